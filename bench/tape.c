/* tape.c - how fast a GPU does the operations of a tape, beside copies of its memory and a large
 * matrix product.
 *
 *   bench_tape [f32|bf16 [runs]]
 *
 * Each operation runs forward, and back from a cotangent, on tensors too large for the second
 * cache. What is counted is what it has to read and write; giving the cotangent is a copy and
 * counted with the way back. `cmake --build DIR --target bench_tape` builds it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/rng.h"
#include "base/util.h"
#include "kernels/gemm.h"
#include "tape/tape.h"

enum { B = 8, T = 4096, X = 2048, H = 16, V = 32000, HIDDEN = 5632, MOST_RUNS = 100 };
enum { PRODUCT = 8192 };

typedef struct bench {
    mn_context *context;
    mn_device *device;
    mn_tape *tape;
    mn_dtype dtype;
    int runs;
    mn_device_event *from, *to;
    void *a, *b, *c, *grad_a, *grad_b, *cotangent, *weight, *weight_grad;
    int32_t *tokens;
    double copy_rate, product_rate;
} bench;

typedef mn_tensor *step_fn(const bench *s);

/* `forward` and `back` count tensors of B T X numbers that are read or written once; `flop` are per
 * way, of which going back takes two, or none (the loss) where `back` is negative. */
typedef struct operation {
    const char *name;
    step_fn *step;
    double forward, back, flop;
} operation;

static void must(mn_status st) {
    if (st == MN_OK) return;
    fprintf(stderr, "%s\n", mn_last_error());
    exit(1);
}

/* ---- operations ------------------------------------------------------------------------------ */

static const int64_t shape[4] = { B, T, 1, X }, heads[4] = { B, T, H, X / H };

static mn_tensor *a_of(const bench *s, const int64_t *n) {
    return mn_tape_input(s->tape, s->a, s->grad_a, n);
}

static mn_tensor *b_of(const bench *s, int64_t b, int64_t t, int64_t h, int64_t x) {
    return mn_tape_input(s->tape, s->b, s->grad_b, (int64_t[]){ b, t, h, x });
}

static mn_tensor *affine(const bench *s) {
    return mn_tape_affine(s->tape, a_of(s, shape), 0.5, 0.25);
}

static mn_tensor *add(const bench *s) {
    return mn_tape_add(s->tape, a_of(s, shape), b_of(s, B, T, 1, X));
}

static mn_tensor *multiply(const bench *s) {
    return mn_tape_multiply(s->tape, a_of(s, shape), b_of(s, B, T, 1, X));
}

static mn_tensor *by_channel(const bench *s) {
    return mn_tape_multiply(s->tape, a_of(s, shape), b_of(s, 1, 1, 1, X));
}

static mn_tensor *by_row(const bench *s) {
    return mn_tape_multiply(s->tape, a_of(s, heads), b_of(s, B, T, H, 1));
}

static mn_tensor *by_head(const bench *s) {
    return mn_tape_multiply(s->tape, a_of(s, heads), b_of(s, 1, 1, H, 1));
}

static mn_tensor *silu(const bench *s) {
    return mn_tape_unary(s->tape, MN_UNARY_SILU, a_of(s, shape));
}

static mn_tensor *gelu(const bench *s) {
    return mn_tape_unary(s->tape, MN_UNARY_GELU, a_of(s, shape));
}

static mn_tensor *softplus(const bench *s) {
    return mn_tape_unary(s->tape, MN_UNARY_SOFTPLUS, a_of(s, shape));
}

static mn_tensor *gate(const bench *s) {
    return mn_tape_gate(s->tape, MN_UNARY_SILU, a_of(s, shape), b_of(s, B, T, 1, X));
}

static mn_tensor *part_gate(const bench *s) {
    mn_tensor *parts[2];
    mn_tape_split(s->tape, a_of(s, shape), (int64_t[]){ X / 2, X / 2 }, 2, parts);
    return mn_tape_gate(s->tape, MN_UNARY_SILU, parts[0], parts[1]);
}

static mn_tensor *repeat(const bench *s) {
    return mn_tape_repeat(s->tape, b_of(s, B, T, H / 4, X / H), 4);
}

static mn_tensor *join(const bench *s) {
    mn_tensor *parts[2] = { mn_tape_input(s->tape, s->a, s->grad_a, (int64_t[]){ B, T, 1, X / 2 }),
                            b_of(s, B, T, 1, X / 2) };
    return mn_tape_join(s->tape, parts, 2);
}

static mn_tensor *softmax(const bench *s) {
    return mn_tape_softmax(s->tape, a_of(s, heads));
}

static mn_tensor *embed(const bench *s) {
    mn_tensor *table = mn_tape_leaf_of(s->tape, s->weight, s->dtype, s->weight_grad, MN_F32, V, X,
                                       true);
    return mn_tape_embed(s->tape, table, s->tokens, B, T);
}

static mn_tensor *product_of(const bench *s, int64_t n_out) {
    mn_tensor *w = mn_tape_leaf_of(s->tape, s->weight, s->dtype, s->weight_grad, MN_F32, n_out, X,
                                   true);
    return mn_tape_linear(s->tape, a_of(s, shape), w, NULL);
}

static mn_tensor *linear_square(const bench *s) {
    return product_of(s, X);
}

static mn_tensor *linear_wide(const bench *s) {
    return product_of(s, HIDDEN);
}

static mn_tensor *linear_narrow(const bench *s) {
    return product_of(s, H);
}

static mn_tensor *loss(const bench *s) {
    static double value;
    static int64_t counted;
    mn_tensor *w = mn_tape_leaf_of(s->tape, s->weight, s->dtype, s->weight_grad, MN_F32, V, X,
                                   true);
    mn_tape_loss(s->tape, a_of(s, shape), w, s->tokens, &(mn_loss_options){ 0 }, &value, &counted);
    return NULL;
}

static const operation operations[] = {
    { "affine", affine, 2, 4, 0 },
    { "add", add, 3, 5, 0 },
    { "multiply", multiply, 3, 7, 0 },
    { "multiply by channel", by_channel, 2, 6, 0 },
    { "multiply by row", by_row, 2, 6, 0 },
    { "multiply by head", by_head, 2, 6, 0 },
    { "silu", silu, 2, 5, 0 },
    { "gelu", gelu, 2, 5, 0 },
    { "softplus", softplus, 2, 5, 0 },
    { "silu gate", gate, 3, 7, 0 },
    { "silu gate of halves", part_gate, 1.5, 3.5, 0 },
    { "repeat heads 4 times", repeat, 1.25, 3.25, 0 },
    { "join", join, 2, 4, 0 },
    { "softmax", softmax, 2, 5, 0 },
    { "embed", embed, 2, 3, 0 },
    { "linear 2048 to 2048", linear_square, 0, 0, 2.0 * B * T * X * X },
    { "linear 2048 to 5632", linear_wide, 0, 0, 2.0 * B * T * X * HIDDEN },
    { "linear 2048 to 16", linear_narrow, 1, 5, 0 },
    { "loss of 32000", loss, 0, -1, 6.0 * B * T * X * V },
};

/* ---- measuring ------------------------------------------------------------------------------- */

static double median(double *seconds, int n) {
    for (int i = 1; i < n; i++) {
        for (int j = i; j > 0 && seconds[j] < seconds[j - 1]; j--) {
            const double x = seconds[j];
            seconds[j] = seconds[j - 1];
            seconds[j - 1] = x;
        }
    }
    return seconds[n / 2];
}

static double between(const bench *s) {
    double seconds;
    must(mn_device_event_record(s->device, s->to));
    must(mn_device_seconds(s->device, &seconds, s->from, s->to));
    return seconds;
}

static void measure(const bench *s, const operation *op) {
    double there[MOST_RUNS], back[MOST_RUNS];
    for (int run = -2; run < s->runs; run++) {
        const int at = run < 0 ? 0 : run;
        mn_tape_start(s->tape, MN_TAPE_RECORD);
        must(mn_device_event_record(s->device, s->from));
        mn_tensor *y = op->step(s);
        there[at] = between(s);
        must(mn_device_event_record(s->device, s->from));
        if (y) mn_tape_seed(s->tape, y, s->cotangent);
        must(mn_tape_backward(s->tape));
        back[at] = between(s);
    }
    const double forward = median(there, s->runs), backward = median(back, s->runs);
    if (op->flop > 0) {
        printf("%-24s %8.3f ms %6.1f TFLOP/s %5.2f", op->name, 1e3 * forward,
               1e-12 * op->flop / forward, op->flop / forward / s->product_rate);
        if (op->back >= 0) {
            printf("   back %8.3f ms %6.1f TFLOP/s %5.2f", 1e3 * backward,
                   2e-12 * op->flop / backward, 2.0 * op->flop / backward / s->product_rate);
        }
        printf("\n");
        return;
    }
    const double bytes = (double)B * T * X * (double)mn_dtype_bytes(s->dtype);
    printf("%-24s %8.3f ms %6.0f GB/s    %5.2f", op->name, 1e3 * forward,
           1e-9 * op->forward * bytes / forward, op->forward * bytes / forward / s->copy_rate);
    printf("   back %8.3f ms %6.0f GB/s    %5.2f\n", 1e3 * backward,
           1e-9 * op->back * bytes / backward, op->back * bytes / backward / s->copy_rate);
}

static void measure_ceilings(bench *s) {
    const size_t bytes = (size_t)B * T * X * mn_dtype_bytes(s->dtype);
    mn_gemm_handle *products = mn_gemm_create();
    void *space;
    must(mn_device_allocate(s->device, &space, MN_GEMM_WORKSPACE));
    const mn_gemm_problem work = { .dtype = s->dtype, .c_dtype = s->dtype, .a = s->a, .b = s->b,
                                   .c = s->c, .M = PRODUCT, .N = PRODUCT, .K = PRODUCT,
                                   .a_row = PRODUCT, .b_row = PRODUCT, .c_row = PRODUCT,
                                   .b_transposed = true };
    double copies[MOST_RUNS], multiplies[MOST_RUNS];
    for (int run = -2; run < s->runs; run++) {
        const int at = run < 0 ? 0 : run;
        must(mn_device_event_record(s->device, s->from));
        must(mn_device_copy(s->device, s->cotangent, s->a, bytes));
        copies[at] = between(s);
        must(mn_device_event_record(s->device, s->from));
        must(mn_device_check(s->device, mn_gemm_run(products, &work, space,
                                                        mn_device_stream(s->device)), "product"));
        multiplies[at] = between(s);
    }
    s->copy_rate = 2.0 * (double)bytes / median(copies, s->runs);
    s->product_rate = 2.0 * pow(PRODUCT, 3) / median(multiplies, s->runs);
    printf("%s, %s: copy %.0f GB/s, product of %d %.0f TFLOP/s%s\n",
           mn_device_facts(s->device)->name, mn_dtype_name(s->dtype), 1e-9 * s->copy_rate, PRODUCT,
           1e-12 * s->product_rate, mn_gemm_has_cublaslt(products) ? "" : " (no cuBLASLt)");
    mn_gemm_destroy(products);
    mn_device_free(s->device, space);
}

/* Random numbers of a tenth, the first ones repeated. */
static void *numbers(const bench *s, int64_t count, bool draws) {
    enum { DRAWN = 1 << 16 };
    float *host = malloc(DRAWN * sizeof *host);
    void *wide, *there;
    const size_t item = mn_dtype_bytes(s->dtype);
    for (int i = 0; i < DRAWN; i++) {
        host[i] = draws ? 0.1f * (float)mn_rng_normal(1, 0, (uint64_t)i) : 0.0f;
    }
    must(mn_device_allocate(s->device, &wide, DRAWN * sizeof *host));
    must(mn_device_upload(s->device, wide, host, DRAWN * sizeof *host));
    must(mn_device_allocate(s->device, &there, (size_t)(count + DRAWN) * item));
    mn_tape_start(s->tape, MN_TAPE_FORWARD);
    const int64_t n[4] = { 1, 1, 1, DRAWN };
    mn_tensor *x = mn_tape_leaf_of(s->tape, wide, MN_F32, NULL, MN_F32, 1, DRAWN, false);
    x = mn_tape_affine(s->tape, mn_tape_cast(s->tape, x, s->dtype), 1.0, 0.0);
    must(mn_tape_status(s->tape));
    for (int64_t at = 0; at < count; at += DRAWN) {
        must(mn_device_copy(s->device, (char *)there + (size_t)at * item, x->data,
                            (size_t)n[3] * item));
    }
    must(mn_device_synchronize(s->device));
    mn_device_free(s->device, wide);
    free(host);
    return there;
}

int main(int argc, char **argv) {
    bench s = { .dtype = MN_BF16, .runs = argc > 2 ? atoi(argv[2]) : 15 };
    if (argc > 1 && !mn_dtype_parse(&s.dtype, argv[1])) return 2;
    s.runs = (int)mn_max(1, mn_min(s.runs, MOST_RUNS));
    must(mn_context_create(&s.context, &(mn_context_options){ .device = "cuda" }));
    s.device = s.context->device;
    must(mn_tape_create(&s.tape, s.context, s.dtype));
    must(mn_device_event_create(s.device, &s.from));
    must(mn_device_event_create(s.device, &s.to));
    const int64_t count = (int64_t)B * T * X, weights = (int64_t)V * X;
    s.a = numbers(&s, count, true), s.b = numbers(&s, count, true), s.c = numbers(&s, count, true);
    s.grad_a = numbers(&s, count, false), s.grad_b = numbers(&s, count, false);
    s.cotangent = numbers(&s, (int64_t)B * T * HIDDEN, true);
    s.weight = numbers(&s, weights, true);
    s.weight_grad = numbers(&s, 2 * weights, false);
    s.tokens = malloc((size_t)(B * T) * sizeof *s.tokens);
    for (int64_t i = 0; i < B * T; i++) {    // a few tokens are most of a text
        const double u = mn_rng_uniform(2, 0, (uint64_t)i);
        s.tokens[i] = (int32_t)(pow((double)V, u) - 1.0);
    }
    measure_ceilings(&s);
    for (size_t i = 0; i < MN_COUNTOF(operations); i++) measure(&s, &operations[i]);
    mn_tape_destroy(s.tape);
    mn_context_destroy(s.context);
    return 0;
}
