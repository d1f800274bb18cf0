/* test_tape.c - every operation of a tape on a GPU, in float32 and bf16, against the same on the
 * CPU in float64: results and gradients, contiguous tensors and parts of wider ones, odd widths,
 * single tokens; twice for the same bits; and forward once more by a tape that delays. Skipped
 * without a GPU.
 *
 * Inputs are rounded to what the tape holds. float32: each number within 2e-5 of its tensor's
 * scale, its rms or, where that is larger, itself. bf16: u = 2^-8 is the most that one rounding
 * takes; a program of n operations stores its numbers n times (softmax counts twice: its gradient
 * is made from its rounded result), and each number may be off by 2 n u of that scale, the rms of
 * the error by 2 n u / sqrt(3) of that of the tensor. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/dtype.h"
#include "base/rng.h"
#include "base/util.h"
#include "ops/context.h"
#include "tape/tape.h"
#include "support/check.h"

enum { MOST_IN = 8, MOST_IDS = 4096 };

static mn_context *gpu, *cpu;    // gpu NULL: none here

/* ---- programs -------------------------------------------------------------------------------- */

typedef struct input {
    int64_t shape[4];
    bool param;    // a leaf: its gradient is float32, and here added to ones
} input;

typedef struct program program;
typedef mn_tensor *build_fn(mn_tape *tape, mn_tensor **in, const program *p);

struct program {
    const char *name;
    build_fn *build;
    int n_operations;    // that round, one after the other
    int n_in;
    input in[MOST_IN];
    int kind;            // of the function, the pattern ...
    bool positive;       // inputs away from 0 and below
    bool forward;        // only results are compared: roundings grow going back through norms
    mn_dtype dtype;
};

/* What a program gives: its result, and gradients of the inputs. */
typedef struct outcome {
    double *y, *delayed, *grad[MOST_IN], loss;
    float *nll;
    int64_t n_y, counted;
    size_t planned, taken;
} outcome;

static int32_t ids[MOST_IDS], targets[MOST_IDS], order[MOST_IDS];

/* ---- one side -------------------------------------------------------------------------------- */

static int64_t count_of(const int64_t shape[4]) {
    return shape[0] * shape[1] * shape[2] * shape[3];
}

/* Numbers are drawn once and used again from another place by each input. */
enum { DRAWN = 65521 };
static double drawn[DRAWN];

static double value_of(const program *p, int which, int64_t i) {
    const double x = drawn[(i + 7919 * which) % DRAWN];
    const double y = p->positive ? 0.5 + fabs(x) : x;
    return p->dtype == MN_F64 ? y : mn_bf16_round(y);
}

static void put(void *to, mn_dtype dtype, int64_t i, double x) {
    if (dtype == MN_F64) ((double *)to)[i] = x;
    else if (dtype == MN_F32) ((float *)to)[i] = (float)x;
    else ((uint16_t *)to)[i] = mn_bf16_from_float((float)x);
}

static double get(const void *from, mn_dtype dtype, int64_t i) {
    if (dtype == MN_F64) return ((const double *)from)[i];
    if (dtype == MN_F32) return ((const float *)from)[i];
    return mn_bf16_to_float(((const uint16_t *)from)[i]);
}

static void must(mn_status st, const program *p) {
    if (st != MN_OK) check_fatal("%s: %s", p->name, mn_last_error());
}

/* Memory on the side of the context, filled by value(i), or with `fixed` where `which` < 0. */
static void *place(mn_context *context, mn_dtype dtype, const program *p, int which, int64_t count,
                   double fixed) {
    const size_t bytes = (size_t)count * mn_dtype_bytes(dtype);
    void *host = malloc(bytes + 1), *there = host;
    for (int64_t i = 0; i < count; i++) {
        put(host, dtype, i, which >= 0 ? value_of(p, which, i) : fixed);
    }
    if (!context->device) return host;
    must(mn_device_allocate(context->device, &there, bytes), p);
    must(mn_device_upload(context->device, there, host, bytes), p);
    free(host);
    return there;
}

static double *take(mn_context *context, mn_dtype dtype, const program *p, void *there,
                    int64_t count) {
    const size_t bytes = (size_t)count * mn_dtype_bytes(dtype);
    void *host = malloc(bytes + 1);
    double *out = malloc((size_t)(count + 1) * sizeof *out);
    if (context->device) must(mn_device_download(context->device, host, there, bytes), p);
    else memcpy(host, there, bytes);
    for (int64_t i = 0; i < count; i++) out[i] = get(host, dtype, i);
    free(host);
    if (context->device) mn_device_free(context->device, there);
    else free(there);
    return out;
}

typedef struct side {
    mn_context *context;
    mn_tape *tape;
    const program *p;
    mn_dtype dtype;
    void *data[MOST_IN], *grad[MOST_IN], *cotangent;
    mn_dtype grad_dtype[MOST_IN];
} side;

/* One pass over the program; the result's numbers go to `o` where it has room for them. */
static void pass(side *s, unsigned modes, outcome *o) {
    const program *p = s->p;
    mn_tensor *in[MOST_IN];
    mn_tape_start(s->tape, modes);
    for (int i = 0; i < p->n_in; i++) {
        const int64_t *n = p->in[i].shape;
        in[i] = p->in[i].param
                    ? mn_tape_leaf_of(s->tape, s->data[i], s->dtype, s->grad[i], s->grad_dtype[i],
                                      n[2], n[3], true)
                    : mn_tape_input(s->tape, s->data[i], s->grad[i], n);
    }
    o->loss = 0.0;
    mn_tensor *y = p->build(s->tape, in, p);
    if (y) {
        o->n_y = count_of(y->shape);
        if (modes != (MN_TAPE_RECORD | MN_TAPE_PLAN)) {
            if (!s->cotangent) {
                s->cotangent = place(s->context, y->dtype, p, MOST_IN, o->n_y, 0.0);
            }
            float *numbers = malloc((size_t)(o->n_y + 1) * sizeof *numbers);
            must(mn_tape_read(s->tape, y, numbers), p);
            if (!o->y) o->y = malloc((size_t)(o->n_y + 1) * sizeof *o->y);
            for (int64_t i = 0; i < o->n_y; i++) o->y[i] = numbers[i];
            free(numbers);
        }
        mn_tape_seed(s->tape, y, s->cotangent ? s->cotangent : s->data[0]);
    }
    if (mn_tape_records(s->tape)) must(mn_tape_backward(s->tape), p);
}

static outcome *current;    // where programs with a loss put it

static outcome run(mn_context *context, const program *given, mn_dtype dtype) {
    program p = *given;
    outcome o = { .nll = calloc(MOST_IDS, sizeof(float)) };
    side s = { .context = context, .p = &p, .dtype = dtype };
    must(mn_tape_create(&s.tape, context, dtype), &p);
    for (int i = 0; i < p.n_in; i++) {
        const int64_t count = count_of(p.in[i].shape);
        s.grad_dtype[i] = p.in[i].param && dtype == MN_BF16 ? MN_F32 : dtype;
        s.data[i] = place(context, dtype, &p, i, count, 0.0);
        s.grad[i] = place(context, s.grad_dtype[i], &p, -1, count, 1.0);
    }
    current = &o;
    pass(&s, MN_TAPE_RECORD | MN_TAPE_PLAN, &o);
    o.planned = mn_tape_bytes(s.tape);
    pass(&s, MN_TAPE_RECORD, &o);
    must(mn_tape_results(s.tape), &p);
    o.taken = mn_tape_bytes(s.tape);
    if (o.y) {
        outcome later = { 0 };
        pass(&s, MN_TAPE_DEFER, &later);
        o.delayed = later.y;
    }
    for (int i = 0; i < p.n_in; i++) {
        const int64_t count = count_of(p.in[i].shape);
        o.grad[i] = take(context, s.grad_dtype[i], &p, s.grad[i], count);
        free(take(context, dtype, &p, s.data[i], count));
    }
    if (s.cotangent) {
        if (context->device) mn_device_free(context->device, s.cotangent);
        else free(s.cotangent);
    }
    mn_tape_destroy(s.tape);
    return o;
}

static void forget(outcome *o, const program *p) {
    free(o->y);
    free(o->delayed);
    free(o->nll);
    for (int i = 0; i < p->n_in; i++) free(o->grad[i]);
}

/* ---- comparison ------------------------------------------------------------------------------ */

static void compare(const program *p, const char *what, int which, const double *got,
                    const double *want, int64_t count, mn_dtype dtype) {
    double squares = 0.0, off = 0.0, worst = 0.0;
    for (int64_t i = 0; i < count; i++) squares += want[i] * want[i];
    const double rms = sqrt(squares / (double)mn_max(count, 1));
    const double unit = dtype == MN_BF16 ? 2.0 / 256.0 * p->n_operations : 2e-5;
    for (int64_t i = 0; i < count; i++) {
        const double d = fabs(got[i] - want[i]), scale = fmax(rms, fabs(want[i]));
        off += d * d;
        if (!(d <= worst * scale)) worst = d / fmax(scale, 1e-30);
    }
    CHECK(worst <= unit, "%s (kind %d) %s: %s %d is off by %.2e of its scale, %.2e is the most",
          p->name, p->kind, mn_dtype_name(dtype), what, which, worst, unit);
    if (dtype != MN_BF16) return;
    off = sqrt(off / (double)mn_max(count, 1));
    CHECK(off <= unit / sqrt(3.0) * rms, "%s (kind %d) bf16: %s %d is off by %.2e of %.2e rms",
          p->name, p->kind, what, which, off, rms);
}

static void same_bits(const program *p, const outcome *a, const outcome *b) {
    bool same = a->loss == b->loss && a->counted == b->counted && a->n_y == b->n_y;
    const size_t size = (size_t)a->n_y * sizeof *a->y;
    if (a->y) same &= memcmp(a->y, b->y, size) == 0 && memcmp(a->delayed, b->delayed, size) == 0;
    for (int i = 0; i < p->n_in; i++) {
        const size_t bytes = (size_t)count_of(p->in[i].shape) * sizeof(double);
        same &= memcmp(a->grad[i], b->grad[i], bytes) == 0;
    }
    CHECK(same, "%s (kind %d): other bits the second time", p->name, p->kind);
}

static void check_on(const program *given, mn_dtype dtype) {
    program p = *given;
    p.dtype = dtype;    // both sides get what this type can hold
    outcome want = run(cpu, &p, MN_F64), got = run(gpu, &p, dtype), again = run(gpu, &p, dtype);
    CHECK(got.n_y == want.n_y && got.counted == want.counted, "%s: other sizes", p.name);
    CHECK(got.planned == got.taken, "%s: %zu bytes planned, %zu taken", p.name, got.planned,
          got.taken);
    if (want.y) compare(&p, "result", 0, got.y, want.y, want.n_y, dtype);
    if (want.y) compare(&p, "delayed result", 0, got.delayed, want.y, want.n_y, dtype);
    const double close = dtype == MN_BF16 ? 0.02 : 2e-5;
    CHECK(fabs(got.loss - want.loss) <= close * fmax(1.0, fabs(want.loss)),
          "%s: loss %.8f for %.8f", p.name, got.loss, want.loss);
    for (int64_t i = 0; i < MOST_IDS && want.loss != 0.0; i++) {
        CHECK(fabs(got.nll[i] - want.nll[i]) <= 3.0 * close * fmax(1.0, fabs(want.nll[i])),
              "%s: nll %.8f for %.8f", p.name, got.nll[i], want.nll[i]);
    }
    for (int i = 0; i < p.n_in && !p.forward; i++) {
        compare(&p, "gradient", i, got.grad[i], want.grad[i], count_of(p.in[i].shape), dtype);
    }
    same_bits(&p, &got, &again);
    forget(&want, &p);
    forget(&got, &p);
    forget(&again, &p);
}

static void check_program(program p) {
    check_on(&p, MN_F32);
    check_on(&p, MN_BF16);
}

/* ---- products -------------------------------------------------------------------------------- */

static mn_tensor *with_bias(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    return mn_tape_linear(tape, in[0], in[1], in[2]);
}

/* Of the middle part of a wider tensor, and of a float32 one. */
static mn_tensor *of_part(mn_tape *tape, mn_tensor **in, const program *p) {
    const int64_t widths[3] = { 8, p->in[1].shape[3], 16 };
    mn_tensor *parts[3];
    mn_tape_split(tape, in[0], widths, 3, parts);
    return mn_tape_linear(tape, mn_tape_cast(tape, parts[1], MN_F32), in[1], NULL);
}

static mn_tensor *of_f64_part(mn_tape *tape, mn_tensor **in, const program *p) {
    const int64_t widths[3] = { 8, p->in[1].shape[3], 16 };
    mn_tensor *parts[3];
    mn_tape_split(tape, in[0], widths, 3, parts);
    return mn_tape_linear(tape, parts[1], in[1], NULL);
}

static mn_tensor *maybe_cast(mn_tape *tape, mn_tensor **in, const program *p) {
    return mn_tape_dtype(tape) == MN_F64 ? of_f64_part(tape, in, p) : of_part(tape, in, p);
}

static void products(void **state) {
    (void)state;
    static const int64_t sizes[][3] = { { 1, 33, 17 }, { 70, 64, 128 }, { 128, 17, 1 }, { 3, 1, 8 },
                                        { 257, 136, 72 } };
    if (!gpu) skip();
    for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
        const int64_t T = sizes[i][0], n = sizes[i][1], m = sizes[i][2];
        check_program((program){ "linear", with_bias, 1, 3, { { { 2, T, 1, n }, false },
                      { { 1, 1, m, n }, true }, { { 1, 1, 1, m }, true } }, .kind = 0 });
        check_program((program){ "linear of a part", maybe_cast, 1, 2,
                      { { { 2, T, 1, n + 24 }, false }, { { 1, 1, m, n }, true } }, .kind = 0 });
    }
    check_done();
}

/* ---- functions of one number ----------------------------------------------------------------- */

static mn_tensor *plain_unary(mn_tape *tape, mn_tensor **in, const program *p) {
    return mn_tape_unary(tape, (mn_unary)p->kind, in[0]);
}

/* Heads of the first part of a wider tensor, as a factor of another tensor. */
static mn_tensor *part_gate(mn_tape *tape, mn_tensor **in, const program *p) {
    const int64_t width = p->in[1].shape[3], widths[2] = { width, p->in[0].shape[3] - width };
    mn_tensor *parts[2];
    mn_tape_split(tape, in[0], widths, 2, parts);
    mn_tensor *x = mn_tape_heads(tape, parts[0], 3), *b = mn_tape_heads(tape, in[1], 3);
    return mn_tape_gate(tape, (mn_unary)p->kind, x, b);
}

static mn_tensor *gate_of(mn_tape *tape, mn_tensor **in, const program *p) {
    return mn_tape_gate(tape, (mn_unary)(p->kind % MN_UNARY_COUNT), in[0], in[1]);
}

/* A number of b and one of c for each row of a part, whose gradient is a sum of both. */
static mn_tensor *gated_twice(mn_tape *tape, mn_tensor **in, const program *p) {
    const int64_t width = 3 * p->kind, widths[2] = { width, p->in[0].shape[3] - width };
    mn_tensor *parts[2];
    mn_tape_split(tape, in[0], widths, 2, parts);
    mn_tensor *x = mn_tape_heads(tape, parts[0], 3), *y = mn_tape_multiply(tape, x, in[1]);
    return mn_tape_add(tape, y, mn_tape_gate(tape, MN_UNARY_SILU, x, in[2]));
}

/* One number for a row, and all other ways in which axes of it may be 1: f(x), then its product. */
static void repeated_gates(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t shapes[][4] = { { 2, 5, 3, 7 }, { 2, 130, 4, 16 }, { 3, 700, 1, 264 } };
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) {
        for (int ones = 1; ones < 16; ones++) {
            input x = { { 0 }, false }, b = { { 0 }, false };
            memcpy(x.shape, shapes[i], sizeof x.shape);
            for (int k = 0; k < 4; k++) b.shape[k] = ones >> k & 1 ? 1 : x.shape[k];
            const mn_unary f = ones % 2 ? MN_UNARY_SIGMOID : MN_UNARY_TANH;
            check_program((program){ "repeated gate", gate_of, 2, 2, { x, b }, .kind = f });
        }
    }
    const input gate = { { 2, 37, 3, 1 }, false }, x = { { 2, 37, 1, 80 }, false };
    for (int kind = 8; kind <= 24; kind += kind < 16 ? 3 : 8) {
        check_program((program){ "gated twice", gated_twice, 3, 3, { x, gate, gate },
                                 .kind = kind });
    }
    check_done();
}

/* Gates of `kind` heads from two parts of a tensor, a sum of all three. */
static mn_tensor *head_gates(mn_tape *tape, mn_tensor **in, const program *p) {
    const int64_t n = p->kind, widths[3] = { n, p->in[0].shape[3] - 2 * n, n };
    mn_tensor *parts[3];
    mn_tape_split(tape, in[0], widths, 3, parts);
    const mn_head_gates g = mn_tape_head_gates(tape, parts[2], parts[0], in[1], in[2], in[3]);
    mn_tensor *decay = mn_tape_cast(tape, g.decay, mn_tape_dtype(tape));
    mn_tensor *both = mn_tape_multiply(tape, g.write, g.strength);
    return mn_tape_add(tape, both, mn_tape_heads(tape, decay, n));
}

static void gates(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[][3] = { { 1, 1, 1 }, { 3, 70, 8 }, { 2, 700, 3 }, { 8, 4096, 8 },
                                        { 1, 33, 300 } };
    for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
        const int64_t n = sizes[i][2];
        const input rows = { { sizes[i][0], sizes[i][1], 1, 2 * n + 24 }, false };
        const input param = { { 1, 1, 1, n }, true };
        check_program((program){ "head gates", head_gates, 4, 4, { rows, param, param, param },
                                 .kind = (int)n });
    }
    check_done();
}

static void functions(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int f = 0; f < MN_UNARY_COUNT; f++) {
        const bool positive = f == MN_UNARY_SQRT || f == MN_UNARY_RECIPROCAL;
        check_program((program){ "unary", plain_unary, 1, 1, { { { 2, 5, 3, 7 }, false } },
                                 .kind = f, .positive = positive });
        check_program((program){ "unary", plain_unary, 1, 1, { { { 2, 64, 1, 40 }, false } },
                                 .kind = f, .positive = positive });
        check_program((program){ "gate", part_gate, 1, 2, { { { 2, 9, 1, 64 }, false },
                                 { { 2, 9, 1, 24 }, false } }, .kind = f, .positive = positive });
        check_program((program){ "gate", part_gate, 1, 2, { { { 1, 1, 1, 70 }, false },
                                 { { 1, 1, 1, 33 }, false } }, .kind = f, .positive = positive });
    }
    check_done();
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static mn_tensor *sum_of(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    return mn_tape_add(tape, in[0], in[1]);
}

static mn_tensor *product_of(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    return mn_tape_multiply(tape, in[0], in[1]);
}

static mn_tensor *square_of(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    return mn_tape_multiply(tape, in[0], in[0]);
}

static mn_tensor *line_of(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    return mn_tape_affine(tape, in[0], 1.75, -0.3);
}

static mn_tensor *bound_of(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    return mn_tape_at_least(tape, in[0], -0.4);
}

/* The first input by way of a copy, which nothing else uses; where gradients are not asked for, a
 * product and a sum. */
static mn_tensor *scaled_of(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    mn_tensor *a = mn_tape_affine(tape, in[0], 0.5, 0.25);
    return mn_tape_add_scaled(tape, a, in[1], in[2], NULL);
}

/* b by a gate of each row, of which the other summand is made; and times c. */
static mn_tensor *scaled_beside(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    mn_tensor *b = mn_tape_affine(tape, in[0], 1.0, 0.0);
    mn_tensor *product = mn_tape_multiply(tape, b, in[1]);
    mn_tensor *a = mn_tape_unary(tape, MN_UNARY_SILU, product);
    return mn_tape_add_scaled(tape, mn_tape_affine(tape, a, 0.5, 0.25), b, in[2], product);
}

static mn_tensor *spread_of(mn_tape *tape, mn_tensor **in, const program *p) {
    return mn_tape_add(tape, in[1], mn_tape_spread(tape, in[0], p->in[1].shape));
}

static const int64_t pair_shapes[][4] = {
    { 2, 5, 3, 7 }, { 2, 130, 4, 16 }, { 1, 1, 2, 40 }, { 3, 700, 1, 264 }, { 2, 70, 1, 2050 },
};

/* All sixteen ways in which axes of b may be 1. */
static void pairs(void **state) {
    (void)state;
    if (!gpu) skip();
    for (size_t i = 0; i < MN_COUNTOF(pair_shapes); i++) {
        for (int ones = 0; ones < 16; ones++) {
            input a = { { 0 }, false }, b = { { 0 }, false };
            memcpy(a.shape, pair_shapes[i], sizeof a.shape);
            for (int k = 0; k < 4; k++) b.shape[k] = ones >> k & 1 ? 1 : a.shape[k];
            check_program((program){ "add", sum_of, 1, 2, { a, b }, .kind = ones });
            check_program((program){ "multiply", product_of, 1, 2, { a, b }, .kind = ones });
            check_program((program){ "scaled", scaled_of, 3, 3, { a, a, b }, .kind = ones });
            check_program((program){ "spread", spread_of, 1, 2, { b, a }, .kind = ones });
            input gate = a;
            gate.shape[3] = 1;
            check_program((program){ "scaled beside", scaled_beside, 5, 3, { a, gate, b },
                                     .kind = ones });
        }
        input a = { { 0 }, false };
        memcpy(a.shape, pair_shapes[i], sizeof a.shape);
        check_program((program){ "square", square_of, 2, 1, { a }, .kind = 0 });
        check_program((program){ "affine", line_of, 1, 1, { a }, .kind = 0 });
        check_program((program){ "at least", bound_of, 1, 1, { a }, .kind = 0 });
    }
    check_done();
}

/* ---- decays ---------------------------------------------------------------------------------- */

/* Of a part of a wider tensor, behind eight columns and before `kind` of them. */
static mn_tensor *decay_of(mn_tape *tape, mn_tensor **in, const program *p) {
    const int64_t H = p->in[1].shape[2], columns = H * p->in[1].shape[3];
    const int64_t widths[3] = { 8, columns, p->kind };
    mn_tensor *parts[3];
    mn_tape_split(tape, in[0], widths, 3, parts);
    return mn_tape_decay(tape, mn_tape_heads(tape, parts[1], H), in[1], in[2]);
}

static void decays(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[][3] = { { 130, 1, 4 }, { 65, 3, 16 }, { 700, 2, 40 }, { 9, 5, 1 },
                                        { 40, 17, 128 }, { 1, 1, 300 } };
    for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
        const int64_t T = sizes[i][0], H = sizes[i][1], X = sizes[i][2];
        for (int per_head = 0; per_head < 2; per_head++) {
            const input b = { { 1, 1, H, X }, true };
            const input a = { { 1, 1, H, per_head ? 1 : X }, true };
            for (int behind = 8; behind > 2; behind -= 5) {
                const input x = { { 2, T, 1, 8 + H * X + behind }, false };
                check_program((program){ "decay", decay_of, 4, 3, { x, b, a }, .kind = behind });
            }
        }
    }
    check_done();
}

/* ---- moves ----------------------------------------------------------------------------------- */

static mn_tensor *repeated(mn_tape *tape, mn_tensor **in, const program *p) {
    return mn_tape_repeat(tape, in[0], p->kind);
}

static mn_tensor *joined(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    return mn_tape_join(tape, in, 3);
}

/* The second part is used twice and turned, the third not at all. */
static mn_tensor *taken_apart(mn_tape *tape, mn_tensor **in, const program *p) {
    const int64_t n = p->in[0].shape[3], widths[3] = { n - 12, 5, 7 };
    mn_tensor *parts[3], *turned;
    mn_tape_split(tape, in[0], widths, 3, parts);
    turned = mn_tape_roll(tape, parts[1], 2);
    mn_tensor *both[3] = { parts[0], mn_tape_add(tape, turned, parts[1]), turned };
    return mn_tape_join(tape, both, 3);
}

static mn_tensor *softmax_of(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    return mn_tape_softmax(tape, in[0]);
}

static mn_tensor *roll_of(mn_tape *tape, mn_tensor **in, const program *p) {
    return mn_tape_roll(tape, in[0], p->kind);
}

static mn_tensor *picked(mn_tape *tape, mn_tensor **in, const program *p) {
    static const int32_t places[] = { 7, 2, 9, 0 };
    (void)p;
    mn_tensor *x = mn_tape_affine(tape, in[0], 1.0, 0.0);
    return mn_tape_pick(tape, x, places, 4);
}

static mn_tensor *embedded(mn_tape *tape, mn_tensor **in, const program *p) {
    return mn_tape_embed(tape, in[0], ids, 3, p->kind);
}

/* x + f(x W') twice over, as layers have it. */
static mn_tensor *block(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    mn_tensor *x = mn_tape_affine(tape, in[0], 1.0, 0.25);
    for (int i = 0; i < 2; i++) {
        mn_tensor *h = mn_tape_linear(tape, mn_tape_unary(tape, MN_UNARY_SILU, x), in[1], NULL);
        x = mn_tape_residual(tape, x, mn_tape_affine(tape, h, 0.1, 0.0));
    }
    return x;
}

/* Rows [first, first + rows) of a leaf, as a leaf of its own that lies beside the others. A tape
 * that does not record has no gradients. */
static mn_tensor *rows_of(mn_tape *tape, const mn_tensor *leaf, int64_t first, int64_t rows) {
    const int64_t at = first * leaf->shape[3];
    char *data = (char *)leaf->data + at * (int64_t)mn_dtype_bytes(leaf->dtype), *grad = NULL;
    const mn_dtype grad_dtype = leaf->slot ? leaf->slot->dtype : leaf->dtype;
    if (leaf->slot) {
        grad = (char *)leaf->slot->memory + at * (int64_t)mn_dtype_bytes(grad_dtype);
    }
    return mn_tape_leaf_of(tape, data, leaf->dtype, grad, grad_dtype, rows, leaf->shape[3], true);
}

/* x + W3 (silu(W1 x) W2 x), W1 and W2 two thirds of a leaf: in one product and nothing kept between
 * on a GPU, step by step on the CPU. The last third has been used before, where `kind` says so. */
static mn_tensor *mlp(mn_tape *tape, mn_tensor **in, const program *p) {
    const int64_t n = in[1]->shape[2] / 3;
    mn_tensor *weights[3], *h[3], *x = mn_tape_affine(tape, in[0], 1.0, 0.25);
    for (int i = 0; i < 3; i++) weights[i] = rows_of(tape, in[1], i * n, n);
    mn_tensor *u = mn_tape_unary(tape, MN_UNARY_TANH, x);
    if (mn_tape_context(tape)->device) {
        mn_tape_linears(tape, u, weights, 3, h);
    } else {
        for (int i = 0; i < 3; i++) h[i] = mn_tape_linear(tape, u, weights[i], NULL);
    }
    h[1] = mn_tape_add(tape, h[1], h[2]);
    if (p->kind == 1) h[1] = mn_tape_add(tape, h[1], mn_tape_linear(tape, u, weights[2], NULL));
    if (mn_tape_context(tape)->device) {
        return mn_tape_gated_onto(tape, x, MN_UNARY_SILU, h[0], h[1], in[2]);
    }
    mn_tensor *gated = mn_tape_gate(tape, MN_UNARY_SILU, h[0], h[1]);
    return mn_tape_add(tape, x, mn_tape_linear(tape, gated, in[2], NULL));
}

static mn_tensor *norm_of(mn_tape *tape, mn_tensor *x, mn_tensor *w) {
    mn_run run_;
    mn_rms_norm_args *args = mn_run_start(&run_, tape, MN_OP_rms_norm);
    args->eps = 1e-5;
    mn_run_in(&run_, "x", x);
    mn_run_in(&run_, "w", w);
    mn_tensor *y = mn_run_out(&run_, "y");
    mn_run_now(&run_);
    return y;
}

/* x + W rms(x) twice over, with a bias once: the norm adds to the gradient of x. */
static mn_tensor *onto(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    mn_tensor *x = mn_tape_affine(tape, in[0], 1.0, 0.25);
    for (int i = 0; i < 2; i++) {
        mn_tensor *u = norm_of(tape, x, in[3]);
        x = mn_tape_linear_onto(tape, x, u, in[1], i ? in[2] : NULL);
    }
    return x;
}

static void moves(void **state) {
    (void)state;
    if (!gpu) skip();
    for (int wide = 0; wide < 2; wide++) {
        const int64_t X = wide ? 64 : 13, T = wide ? 65 : 1;
        const input x = { { 2, T, 3, X }, false }, flat = { { 2, 5, 1, X }, false };
        check_program((program){ "repeat", repeated, 1, 1, { x }, .kind = 4 });
        check_program((program){ "join", joined, 1, 3, { x, { { 2, T, 3, 2 * X }, false },
                                                        { { 2, T, 3, 5 }, false } }, .kind = 0 });
        check_program((program){ "parts", taken_apart, 2, 1, { flat }, .kind = 0 });
        check_program((program){ "softmax", softmax_of, 2, 1, { x }, .kind = 0 });
        check_program((program){ "roll", roll_of, 1, 1, { x }, .kind = 3 });
        check_program((program){ "roll", roll_of, 1, 1, { x }, .kind = -1 });
        check_program((program){ "pick", picked, 1, 1, { flat }, .kind = 0 });
        check_program((program){ "residual", block, 6, 2, { { { 2, T, 1, X }, false },
                                                           { { 1, 1, X, X }, true } }, .kind = 0 });
        const input row = { { 2, T, 1, X }, false }, square = { { 1, 1, X, X }, true };
        for (int kind = 0; kind < 2; kind++) {
            check_program((program){ "mlp", mlp, 6, 3, { row, { { 1, 1, 3 * 24, X }, true },
                                                         { { 1, 1, X, 24 }, true } },
                                     .kind = kind });
        }
        const input vector = { { 1, 1, 1, X }, true };
        check_program((program){ "onto", onto, 6, 4, { row, square, vector, vector },
                                 .kind = 0 });
        const input table = { { 1, 1, wide ? 700 : 29, wide ? 520 : 33 }, true };
        for (int i = 0; i < MOST_IDS; i++) {
            ids[i] = (int32_t)(mn_rng_bits(3, 1, (uint64_t)i) % (i % 3 ? 5 : table.shape[2]));
        }
        check_program((program){ "embed", embedded, 1, 1, { table }, .kind = wide ? 1000 : 11 });
    }
    static const int64_t widths[] = { 2100, 1024, 520, 8 };
    for (size_t i = 0; i < MN_COUNTOF(widths); i++) {
        check_program((program){ "softmax", softmax_of, 2, 1, { { { 2, 3, 2, widths[i] }, false } },
                                 .kind = 0 });
    }
    check_done();
}

/* ---- losses ---------------------------------------------------------------------------------- */

enum { IGNORES = 1, CAPS = 2, ADDS_Z = 4, ORDERS = 8 };
static int kept;    // rows with targets, in front in `order`

static mn_loss_options options_of(const program *p) {
    return (mn_loss_options){ .weight = 0.5, .softcap = p->kind & CAPS ? 3.0 : 0.0,
                              .z_loss = p->kind & ADDS_Z ? 0.01 : 0.0, .nll = current->nll,
                              .order = p->kind & ORDERS ? order : NULL, .n_ordered = kept };
}

/* A loss is weighed as sums over a batch are: its gradients are small and compared by scale. */
static mn_tensor *one_loss(mn_tape *tape, mn_tensor **in, const program *p) {
    const mn_loss_options how = options_of(p);
    mn_tape_loss(tape, mn_tape_affine(tape, in[0], 0.5, 0.0), in[1], targets, &how,
                 &current->loss, &current->counted);
    return NULL;
}

static mn_tensor *mixed_loss(mn_tape *tape, mn_tensor **in, const program *p) {
    const mn_loss_options how = options_of(p);
    mn_tensor *both[2] = { mn_tape_affine(tape, in[0], 0.5, 0.0),
                           mn_tape_affine(tape, in[2], 0.5, 0.1) };
    mn_tape_mixture_loss(tape, both, 2, in[1], targets, &how, &current->loss, &current->counted);
    return NULL;
}

static void losses(void **state) {
    (void)state;
    if (!gpu) skip();
    static const int64_t sizes[][3] = { { 5, 8, 11 }, { 130, 40, 257 }, { 1, 16, 4104 },
                                        { 2, 8, 33001 }, { 300, 8, 24 } };
    for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
        for (int kind = 0; kind < 16; kind++) {
            const int64_t T = sizes[i][0], D = sizes[i][1], V = sizes[i][2], n = 2 * T - 1;
            for (int k = 0; k < MOST_IDS; k++) {
                targets[k] = (int32_t)(mn_rng_bits(4, 1, (uint64_t)k) % (uint64_t)V);
                if (kind & IGNORES && k % 3 == 1) targets[k] = -100;
            }
            for (int k = kept = 0; k <= n; k++) order[targets[k] < 0 ? n - k + kept : kept++] = k;
            const input x = { { 2, T, 1, D }, false }, head = { { 1, 1, V, D }, true };
            check_program((program){ "loss", one_loss, 3, 2, { x, head }, .kind = kind });
            check_program((program){ "mixture", mixed_loss, 3, 3, { x, head, x }, .kind = kind });
        }
    }
    check_done();
}

/* ---- operators ------------------------------------------------------------------------------- */

/* The weight is a parameter, whose gradient has another type than the operator gives on a tape of
 * bf16; and x has two uses. */
static mn_tensor *normed(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    mn_run run_;
    mn_rms_norm_args *args = mn_run_start(&run_, tape, MN_OP_rms_norm);
    args->eps = 1e-5;
    mn_run_in(&run_, "x", in[0]);
    mn_run_in(&run_, "w", in[1]);
    mn_tensor *y = mn_run_out(&run_, "y");
    mn_run_now(&run_);
    return mn_tape_add(tape, y, in[0]);
}

/* One token after the other, each at its beginning, through a convolution and a norm of heads. */
static mn_tensor *conv_of(mn_tape *tape, mn_tensor *x, mn_tensor *w) {
    mn_run run_;
    mn_conv_args *args = mn_run_start(&run_, tape, MN_OP_conv);
    args->act = 1;
    run_.call->W = w->shape[3];
    mn_run_in(&run_, "x", x);
    mn_run_in(&run_, "w", w);
    mn_tensor *y = mn_run_out(&run_, "y");
    mn_run_now(&run_);
    mn_l2_norm_args *norm = mn_run_start(&run_, tape, MN_OP_l2_norm);
    norm->kind = 1;
    norm->eps = 0.1;
    mn_run_in(&run_, "x", mn_tape_heads(tape, y, 2));
    y = mn_run_out(&run_, "y");
    mn_run_now(&run_);
    return mn_tape_flat(tape, y);
}

/* What a layer does with one token: a norm, three products of it, small works on one of them, a
 * gated norm, a product and a residual. */
static mn_tensor *layer_of(mn_tape *tape, mn_tensor **in, const program *p) {
    (void)p;
    mn_tensor *n = norm_of(tape, in[0], in[1]);
    mn_tensor *q = mn_tape_linear(tape, n, in[2], NULL), *z = mn_tape_linear(tape, n, in[3], NULL);
    mn_tensor *g = mn_tape_linear(tape, n, in[4], NULL);
    mn_tensor *k = conv_of(tape, q, in[5]);
    g = mn_tape_unary(tape, MN_UNARY_SIGMOID, mn_tape_add(tape, g, g));
    k = mn_tape_flat(tape, mn_tape_multiply(tape, mn_tape_heads(tape, k, 2),
                                            mn_tape_heads(tape, g, 2)));
    mn_run run_;
    mn_rms_norm_gated_args *args = mn_run_start(&run_, tape, MN_OP_rms_norm_gated);
    args->eps = 0.01;
    args->groups = 2;
    mn_run_in(&run_, "x", k);
    mn_run_in(&run_, "z", z);
    mn_run_in(&run_, "w", in[6]);
    mn_tensor *o = mn_run_out(&run_, "y");
    mn_run_now(&run_);
    return mn_tape_residual(tape, in[0], mn_tape_linear(tape, o, in[7], in[1]));
}

/* p and a of a Moebius recurrence are float32 to the operator, bf16 or float32 to the tape. */
static mn_tensor *packed_memory(mn_tape *tape, mn_tensor **in, const program *p) {
    static const int64_t borders[] = { 0, 3, 3, 20 };
    (void)p;
    mn_tape_pack(tape, borders, 3);
    mn_run run_;
    mn_additive_args *args = mn_run_start(&run_, tape, MN_OP_additive);
    args->decay = MN_DECAY_HEAD;
    args->scale = 0.5;
    mn_tensor *decay = mn_tape_unary(tape, MN_UNARY_LOGSIGMOID, in[3]);
    mn_run_in(&run_, "q", mn_tape_heads(tape, in[0], 2));
    mn_run_in(&run_, "k", mn_tape_heads(tape, in[1], 2));
    mn_run_in(&run_, "v", mn_tape_heads(tape, in[2], 2));
    mn_run_in(&run_, "g", decay);
    mn_tensor *o = mn_run_out(&run_, "o");
    mn_run_now(&run_);
    return o;
}

static void operators(void **state) {
    (void)state;
    if (!gpu) skip();
    check_program((program){ "rms norm", normed, 3, 2, { { { 2, 9, 1, 40 }, false },
                                                        { { 1, 1, 1, 40 }, true } }, .kind = 0 });
    static const int64_t sizes[][3] = { { 1, 64, 96 }, { 3, 40, 2056 }, { 8, 1032, 64 },
                                        { 9, 32, 32 }, { 2, 10, 6 } };
    for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
        const int64_t B = sizes[i][0], D = sizes[i][1], E = sizes[i][2];
        check_program((program){ "layer", layer_of, 12, 8, {
            { { B, 1, 1, D }, false }, { { 1, 1, 1, D }, true }, { { 1, 1, E, D }, true },
            { { 1, 1, E, D }, true }, { { 1, 1, 2, D }, true }, { { 1, 1, E, 4 }, true },
            { { 1, 1, 1, E }, true }, { { 1, 1, D, E }, true } },
            .kind = (int)i, .forward = true });
    }
    check_program((program){ "additive", packed_memory, 4, 4, { { { 1, 20, 1, 32 }, false },
                  { { 1, 20, 1, 32 }, false }, { { 1, 20, 1, 32 }, false },
                  { { 1, 1, 1, 2 }, true } }, .kind = 0 });
    check_done();
}

/* ---- graphs, checks, refusals ---------------------------------------------------------------- */

/* A step that is recorded gives for other tokens what one gives that is launched anew. */
static void recorded_steps(void **state) {
    (void)state;
    if (!gpu) skip();
    const program p = { .name = "graph", .dtype = MN_BF16 };
    enum { V = 50, D = 24, T = 30 };
    void *table = place(gpu, MN_BF16, &p, 0, V * D, 0.0);
    void *grads = place(gpu, MN_F32, &p, -1, V * D, 0.0);
    mn_tape *tape;
    mn_device_graph *graph = NULL;
    must(mn_tape_create(&tape, gpu, MN_BF16), &p);
    double loss = 0.0, before = 0.0;
    int64_t counted;
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < T; i++) ids[i] = targets[i] = (step / 2 * 7 + i * i) % V;
        if (step % 2 == 0 || step == 1) {
            if (step == 1) must(mn_device_graph_begin(gpu->device), &p);
            mn_tape_start(tape, MN_TAPE_RECORD);
            mn_tensor *leaf = mn_tape_leaf(tape, table, grads, V, D, false);
            mn_tensor *x = mn_tape_embed(tape, leaf, ids, 1, T);
            mn_tape_loss(tape, mn_tape_unary(tape, MN_UNARY_SILU, x), leaf, targets,
                         &(mn_loss_options){ 0 }, &loss, &counted);
            must(mn_tape_backward(tape), &p);
        }
        if (step == 1) must(mn_device_graph_end(gpu->device, &graph), &p);
        if (step % 2 == 1) {
            must(mn_tape_feed(tape), &p);
            must(mn_device_graph_launch(graph), &p);
        }
        must(mn_tape_results(tape), &p);
        CHECK(loss > 0.0 && counted == T, "step %d: loss %g of %d", step, loss, (int)counted);
        CHECK(step % 2 == 0 || loss == before, "step %d: %.17g, recorded %.17g", step, before,
              loss);
        before = loss;
    }
    ids[3] = V;
    CHECK(mn_tape_feed(tape) == MN_ERR_ARGUMENT && strstr(mn_last_error(), "token 50 at place 3"),
          "%s", mn_last_error());
    mn_device_graph_destroy(graph);
    mn_tape_destroy(tape);
    free(take(gpu, MN_BF16, &p, table, V * D));
    free(take(gpu, MN_F32, &p, grads, V * D));
    check_done();
}

static void finds_what_is_not_finite(void **state) {
    (void)state;
    if (!gpu) skip();
    const program p = { .name = "check", .dtype = MN_F32 };
    void *data = place(gpu, MN_F32, &p, -1, 2 * 5 * 4, 1.0);
    const float nan = NAN;
    must(mn_device_upload(gpu->device, (float *)data + 27, &nan, sizeof nan), &p);
    mn_tape *tape;
    must(mn_tape_create(&tape, gpu, MN_F32), &p);
    mn_tape_start(tape, MN_TAPE_CHECK);
    mn_tape_scope(tape, "here");
    mn_tape_affine(tape, mn_tape_input(tape, data, NULL, (int64_t[]){ 2, 5, 1, 4 }), 1.0, 0.0);
    CHECK(mn_tape_status(tape) == MN_ERR_NUMERIC &&
              strstr(mn_last_error(), "first in row 1 of the batch, at token 1"),
          "%s", mn_last_error());
    mn_tape_destroy(tape);
    mn_device_free(gpu->device, data);
    check_done();
}

static void refuses_types(void **state) {
    (void)state;
    mn_tape *tape = NULL;
    CHECK(mn_tape_create(&tape, cpu, MN_BF16) == MN_ERR_UNSUPPORTED && !tape &&
          strstr(mn_last_error(), "bf16 is for GPUs"), "%s", mn_last_error());
    if (gpu) {
        CHECK(mn_tape_create(&tape, gpu, MN_F64) == MN_ERR_UNSUPPORTED && !tape &&
              strstr(mn_last_error(), "f64 is for the CPU"), "%s", mn_last_error());
    }
    check_done();
}

int main(void) {
    const mn_context_options on_cpu = { .n_threads = 2 }, on_gpu = { .device = "cuda" };
    for (int i = 0; i < DRAWN; i++) drawn[i] = mn_rng_normal(7, 0, (uint64_t)i);
    if (mn_context_create(&cpu, &on_cpu) != MN_OK) return 1;
    if (mn_context_create(&gpu, &on_gpu) != MN_OK) {
        printf("# no GPU: %s\n", mn_last_error());
        gpu = NULL;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),   cmocka_unit_test(functions), cmocka_unit_test(repeated_gates),
        cmocka_unit_test(gates),      cmocka_unit_test(pairs),     cmocka_unit_test(decays),
        cmocka_unit_test(moves),      cmocka_unit_test(losses),    cmocka_unit_test(operators),
        cmocka_unit_test(recorded_steps), cmocka_unit_test(finds_what_is_not_finite),
        cmocka_unit_test(refuses_types),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    mn_context_destroy(gpu);
    mn_context_destroy(cpu);
    return failed;
}
