/* test_cuda.c - every CUDA kernel against the float64 reference, on awkward sizes and packed
 * sequences, in float32 and bf16, and twice for the same bits; single tokens with their state in
 * place too. Skipped without a GPU.
 *
 * float32 is held to the tolerances of op_error.h. bf16 gets inputs rounded to bf16, as does the
 * reference; a result stored in bf16 is then off by at most u = 2^-8 of itself, and kernels may
 * have twice of that (see mn_golden_compare_bf16): each number within 2 u of its scale, the largest
 * of its row or the rms of its tensor, or within the law of the largest of so many (deviation.h),
 * and the rms of the error within 2 u / sqrt(3) of that of the tensor. Where sums of many products
 * lose more because kernels round what goes into the products, the bound is twice what rounding
 * every input once does or, if that is more, twice what the same formula loses in float64 with what
 * passes between its parts rounded (op_rounded.h: ccq_read, conv_unit and delta, whatever its
 * decays): three random roundings say little of a sum that all but cancels, or of the largest of
 * many roundings. For operators made of more parts it is that of the golden files
 * (tests/golden/README.md): ten times what results of the reference move when inputs move by u, and
 * twenty times for gradients. Gradients that vanish by structure are held to 2 u of the loss.
 *
 * test_cuda [OPERATOR [I/N]] runs one operator, and of its calls every Nth from the Ith on. The
 * reference takes most of the time: without I/N there is a process for each core (shares.h). */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/deviation.h"
#include "base/util.h"
#include "ops/sample_device.h"
#include "support/op_device.h"
#include "support/op_error.h"
#include "support/shares.h"

static mn_context *gpu;    // NULL: none here

enum { EXTREME = 1000000 };    // seeds from here on ask for extreme inputs

/* The same numbers bit by bit, wherever something is computed. */
static void check_same(const mn_sample *a, const mn_sample *b, const op_case *c) {
    for (int i = 0; i < a->n_tensors; i++) {
        const void *x = op_memory(&a->tensors[i], OP_COMPUTED);
        const void *y = op_memory(&b->tensors[i], OP_COMPUTED);
        const size_t bytes = (size_t)a->tensors[i].count * sizeof(float);
        if (x && y) {
            CHECK(memcmp(x, y, bytes) == 0, "%s: %s has other bits the second time",
                  op_case_text(c), a->tensors[i].field->name);
        }
    }
}

/* Whether float32 can hold what the reference computed: a selective scan without softplus may grow
 * beyond that. */
static bool fits_f32(const mn_sample *want) {
    for (int i = 0; i < want->n_tensors; i++) {
        const double *x = op_memory(&want->tensors[i], OP_COMPUTED);
        for (int64_t at = 0; x && at < want->tensors[i].count; at++) {
            if (isfinite(x[at]) && fabs(x[at]) > (double)FLT_MAX) return false;
        }
    }
    return true;
}

/* Some numbers of an input, from `first` on. */
static void set_each(mn_sample *sample, const char *name, int64_t first, int64_t apart,
                     double value) {
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *t = &sample->tensors[i];
        if (strcmp(t->field->name, name) != 0 || !t->data) continue;
        for (int64_t at = first; at < t->count; at += apart) {
            mn_sample_set(sample, t->data, at, value);
        }
    }
}

/* Where `c` asks for extremes: log decays from none to -1e4 between the usual ones; filters that
 * keep nothing, or tokens without precision; covariances that fall by e^-154 in 64 tokens and by
 * e^-38 in 16. */
static void spread_extremes(mn_sample *sample, const op_case *c) {
    if (c->seed < EXTREME) return;
    set_each(sample, "g", 3, 7, -1e4);
    set_each(sample, "g", 5, 11, -20.0);
    set_each(sample, "g", 1, 5, 0.0);
    set_each(sample, "la", 0, 1, -2.4);
    if (c->op != MN_OP_moebius) return;
    set_each(sample, "a", 1, 3, 0.0);
    set_each(sample, "prec", 5, 13, 0.0);
    set_each(sample, "lam0", 4, 7, 0.0);
}

/* What is allowed is measured where the floors are not enough. */
static void judge_f32(const mn_sample *got, const mn_sample *want, op_tolerances *tolerances,
                      const op_case *c) {
    if (!fits_f32(want) || op_agrees(got, want, tolerances)) return;
    op_widen(tolerances, want, c);
    op_compare("cuda", got, want, tolerances, c);
}

static void check_f32(op_case c) {
    op_tolerances tolerances;
    mn_sample got, again, want;
    c.dtype = MN_F32;
    op_open(&got, &c);
    op_open(&again, &c);
    spread_extremes(&got, &c);
    spread_extremes(&again, &c);
    c.dtype = MN_F64;
    op_allocate(&want, &c);
    op_convert(&want, &got);
    op_reference(&tolerances, &want, &c);
    c.dtype = MN_F32;
    op_run_device(gpu, &got, &c, MN_F32);
    op_run_device(gpu, &again, &c, MN_F32);
    judge_f32(&got, &want, &tolerances, &c);
    check_same(&got, &again, &c);
    mn_sample_free(&got);
    mn_sample_free(&again);
    mn_sample_free(&want);
}

/* `loss`: the norm of all products cotangent x result. */
static void check_vanishes(const double *got, const mn_sample_tensor *tensor, double loss,
                           const op_case *c) {
    double sum = 0.0;
    for (int64_t i = 0; i < tensor->count; i++) sum += got[i] * got[i];
    const double left = sqrt(sum);
    CHECK(left <= 2.0 * MN_BF16_UNIT * loss, "%s bf16: %s is %.2e and vanishes", op_case_text(c),
          tensor->field->name, left);
}

/* A computed tensor, number `i` of a sample: how far it is off, what it may be off at once, and how
 * often what is measured. */
typedef struct verdict {
    int i;
    mn_deviation far;
    double most, times;
} verdict;

static double error_of(const verdict *v) {
    return v->far.rms > 0.0 ? v->far.of_rms * v->far.rms : v->far.of_rms;
}

static bool is_close(const verdict *v, const double *rms, const double *worst) {
    return (v->far.share <= 2.0 * MN_BF16_UNIT || v->far.of_law <= 1.0 ||
            v->far.worst <= v->times * worst[v->i]) &&
           error_of(v) <= fmax(v->most, v->times * rms[v->i]);
}

/* All tensors but those that vanish, which are judged at once. Returns how many. */
static int look_at_all(verdict out[MN_MAX_FIELDS], const mn_sample *got, const mn_sample *want,
                       const op_case *c) {
    int n = 0;
    for (int i = 0; i < want->n_tensors; i++) {
        const mn_sample_tensor *tensor = &want->tensors[i];
        const void *x = op_memory(&got->tensors[i], OP_COMPUTED);
        const void *y = op_memory(tensor, OP_COMPUTED);
        const size_t rank = strlen(tensor->axes);
        bool ok = true;
        const int64_t width = rank ? mn_axis_size((const mn_call *)want->args,
                                                  tensor->axes[rank - 1], &ok) : 1;
        const bool input = tensor->field->role <= MN_ROLE_RAW;
        if (!x || !y || (input && !mn_op_has_cuda(c->op, MN_BACKWARD))) continue;
        const mn_deviation far = mn_deviation_of(x, y, tensor->count, width);
        const double loss = input ? op_loss_norm(want) : 0.0;
        if (tensor->count > 0 && far.rms * sqrt((double)tensor->count) < 0x1p-40 * loss) {
            check_vanishes(x, tensor, loss, c);
            continue;
        }
        out[n++] = (verdict){ i, far, 2.0 * MN_BF16_UNIT / sqrt(3.0) * far.rms,
                              !mn_op_rounds_between(c->op) ? 1.0 : input ? 20.0 : 10.0 };
    }
    return n;
}

static void report(const verdict *v, const mn_sample *got, const mn_sample *want, const double *rms,
                   const double *worst, const op_case *c) {
    const mn_sample_tensor *tensor = &want->tensors[v->i];
    const double *x = op_memory(&got->tensors[v->i], OP_COMPUTED);
    const double *y = op_memory(tensor, OP_COMPUTED);
    CHECK(is_close(v, rms, worst),
          "%s bf16: %s is off by %.2e of its row: %.6g at %lld where %.6g is right, by %.2e where "
          "%.2e is allowed; by %.2e of %.2e rms", op_case_text(c), tensor->field->name,
          v->far.share, x[v->far.at], (long long)v->far.at, y[v->far.at],
          v->far.worst, v->times * worst[v->i], error_of(v), v->far.rms);
}

/* What is allowed is measured, one way after the other, until that is enough. */
static void judge_bf16(const mn_sample *got, const mn_sample *want, const op_case *c) {
    verdict seen[MN_MAX_FIELDS];
    double rms[MN_MAX_FIELDS] = { 0 }, worst[MN_MAX_FIELDS] = { 0 };
    const int n = fits_f32(want) ? look_at_all(seen, got, want, c) : 0;
    for (int step = 0, close = 0; close < n; step++) {
        for (close = 0; close < n && is_close(&seen[close], rms, worst); close++) {}
        if (close < n && !op_measure_bf16(rms, worst, want, c, step)) break;
    }
    for (int i = 0; i < n; i++) report(&seen[i], got, want, rms, worst, c);
}

/* Results called ...var, which models do not ask for, and their cotangents are not there. */
static void leave_variances(mn_sample *sample) {
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_field *field = sample->tensors[i].field;
        const size_t length = strlen(field->name);
        if (field->role != MN_ROLE_OUT || length < 3) continue;
        if (strcmp(field->name + length - 3, "var") != 0) continue;
        ((mn_out *)(sample->args + field->offset))->data = NULL;
        ((mn_in *)(sample->args + field->partner))->data = NULL;
        void *computed = op_memory(&sample->tensors[i], OP_COMPUTED);
        if (computed) memset(computed, 0, (size_t)sample->tensors[i].count * sizeof(double));
    }
}

static void check_bf16_of(op_case c, bool variances) {
    mn_sample got, want;
    c.dtype = MN_F64;
    op_open(&got, &c);
    op_open(&want, &c);
    spread_extremes(&got, &c);
    spread_extremes(&want, &c);
    mn_sample_round(&got, MN_BF16);
    mn_sample_round(&want, MN_BF16);
    if (!variances) leave_variances(&got), leave_variances(&want);
    op_run_both(op_context("ref", shares_threads()), &want, &c);
    op_run_device(gpu, &got, &c, MN_BF16);
    judge_bf16(&got, &want, &c);
    mn_sample_free(&got);
    mn_sample_free(&want);
}

static void check_bf16(op_case c) {
    check_bf16_of(c, true);
}

/* What was not asked for, from the reference: gradients, and sums that only they need, with which
 * mlstm does not take its decode step. */
static void fill_in(mn_sample *got, const mn_sample *want) {
    for (int i = 0; i < want->n_tensors; i++) {
        const mn_sample_tensor *t = &want->tensors[i];
        const bool result = t->field->role >= MN_ROLE_OUT;
        void *to = op_memory(&got->tensors[i], OP_COMPUTED);
        const bool made = result && ((const mn_out *)(got->args + t->field->offset))->data;
        if (to && !made) memcpy(to, op_memory(t, OP_COMPUTED), (size_t)t->count * sizeof(double));
    }
}

static void leave_out(mn_sample *got, const char *name) {
    for (int i = 0; i < got->n_tensors; i++) {
        const mn_field *field = got->tensors[i].field;
        if (strcmp(field->name, name) == 0) ((mn_out *)(got->args + field->offset))->data = NULL;
    }
}

/* longhorn_diag's step is one turn of its walk, which takes tokens whose states move. */
static void check_walked(const mn_sample *got, const op_case *c, mn_dtype dtype) {
    mn_sample walked;
    op_open(&walked, c);
    mn_sample_round(&walked, dtype);
    op_step_device(gpu, &walked, c, dtype);
    for (int i = 0; i < got->n_tensors; i++) {
        const mn_sample_tensor *t = &got->tensors[i];
        if (t->field->role < MN_ROLE_OUT) continue;
        CHECK(memcmp(t->data, walked.tensors[i].data, (size_t)t->count * sizeof(double)) == 0,
              "%s: %s has other bits in place", op_case_text(c), t->field->name);
    }
    mn_sample_free(&walked);
}

/* One token whose states stay in place. */
static void check_step(op_case c, mn_dtype dtype) {
    op_tolerances tolerances;
    mn_sample got, want;
    c.dtype = MN_F64;
    op_open(&got, &c);
    op_open(&want, &c);
    mn_sample_round(&got, dtype);
    mn_sample_round(&want, dtype);
    op_reference(&tolerances, &want, &c);
    leave_out(&got, "csum");
    leave_out(&got, "nsum");
    if (op_stay_in_place(&got)) {
        op_step_device(gpu, &got, &c, dtype);
        if (c.op == MN_OP_longhorn_diag) check_walked(&got, &c, dtype);
        fill_in(&got, &want);
        if (dtype == MN_F32) judge_f32(&got, &want, &tolerances, &c);
        else judge_bf16(&got, &want, &c);
    }
    mn_sample_free(&got);
    mn_sample_free(&want);
}

/* Around packs, warps, tiles and blocks of threads. */
static const int64_t lengths[] = { 0, 1, 2, 31, 32, 33, 65, 130 };
static const struct {
    int64_t K, V;
} widths[] = { { 2, 3 },    { 8, 8 },    { 16, 17 },  { 6, 64 },   { 64, 33 },
               { 128, 128 }, { 32, 520 }, { 256, 511 }, { 4, 2056 }, { 72, 40 },
    { 33, 100 },  { 256, 256 }, { 100, 136 } };

/* Sequences of all kinds of lengths: none, one, less than the taps of a convolution, more than a
 * tile. */
static const int64_t packing[] = { 0, 0, 1, 3, 3, 35, 67, 68, 132, 132 };

/* Sequences up to and above the 4096 tokens from which on moebius is parallel over chunks. */
static const int64_t long_packing[] = { 0, 4096, 4097, 4099, 12500 };

static void check_both(op_case c) {
    if (shares_next()) check_f32(c);
    if (shares_next()) check_bf16(c);
}

/* Windows narrower than a tile, as wide as some and wider than all keys; queries behind many keys,
 * and one query. */
static void check_windows(op_case c) {
    static const struct {
        int64_t window, T, more_keys, K, V;
    } shapes[] = {
        { 1, 65, 0, 16, 17 },   { 5, 130, 0, 64, 64 },   { 64, 200, 0, 72, 40 },
        { 63, 300, 0, 128, 128 }, { 100, 90, 200, 64, 33 }, { 129, 300, 61, 8, 8 },
        { 2, 3, 500, 64, 64 },  { 400, 300, 0, 32, 32 }, { 70, 1, 600, 64, 64 },
        { 300, 1, 600, 33, 100 }, { 256, 512, 0, 96, 96 }, { 20, 5, 400, 128, 128 },
    };
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) {
        c.window = shapes[i].window, c.T = shapes[i].T, c.more_keys = shapes[i].more_keys;
        c.K = shapes[i].K, c.V = shapes[i].V, c.B = 2, c.H = i % 2 ? 2 : 4, c.seed = 40 + i;
        check_both(c);
    }
    c.B = 1, c.H = 3, c.K = 16, c.V = 40, c.more_keys = 0, c.seed = 7;
    c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1, c.T = packing[c.n_seqs];
    for (c.window = 1; c.window < 80; c.window += 13) check_both(c);
}

/* More tiles of queries than a GPU has processors, whose blocks then take several: of a batch, of
 * packed sequences that end within tiles, and behind keys that do not end with one. */
static void check_many_tiles(op_case c) {
    static const int64_t borders[] = { 0, 130, 131, 400, 401, 700, 840 };
    c.B = 3, c.H = 16, c.T = 260, c.K = c.V = 128, c.seed = 61;
    if (shares_next()) check_bf16(c);
    c.K = 64, c.V = 56, c.more_keys = 61, c.groups = 4, c.seed = 62;
    if (shares_next()) check_bf16(c);
    c.B = 1, c.T = 840, c.K = 96, c.V = 128, c.more_keys = 0, c.seed = 63;
    c.cu_seqlens = borders, c.n_seqs = MN_COUNTOF(borders) - 1;
    if (shares_next()) check_bf16(c);
    c.window = c.op == MN_OP_attention ? 150 : 0, c.groups = 0, c.seed = 64;
    if (shares_next()) check_bf16(c);
}

/* More chunks of heads than a GPU has room for, where blocks take several, packed ones too. */
static void check_many_chunks(op_case c) {
    static const int64_t borders[] = { 0, 130, 131, 131, 400, 401, 700, 840 };
    c.B = 3, c.H = 16, c.T = 260, c.K = c.V = 128, c.seed = 65;
    if (shares_next()) check_bf16(c);
    c.B = 1, c.T = 840, c.K = 96, c.V = 64, c.seed = 66;
    c.cu_seqlens = borders, c.n_seqs = MN_COUNTOF(borders) - 1;
    if (shares_next()) check_bf16(c);
}

static void check_steps(op_case c) {
    c.B = 3, c.T = 1, c.H = 2;
    for (size_t w = 0; w < MN_COUNTOF(widths); w++) {
        c.K = widths[w].K, c.V = widths[w].V, c.seed = 20 + w;
        if (shares_next()) check_step(c, MN_F32);
        if (shares_next()) check_step(c, MN_BF16);
    }
}

/* Value heads that share query and key heads: by every kernel, whole, packed and single tokens. */
static void check_groups(op_case c) {
    static const struct {
        int64_t H, groups, T, K, V;
    } shapes[] = {
        { 6, 3, 65, 16, 17 },    { 4, 2, 130, 64, 64 }, { 4, 4, 200, 128, 128 },
        { 2, 2, 70, 256, 256 },  { 6, 2, 150, 72, 40 }, { 16, 4, 130, 128, 64 },
        { 6, 3, 33, 33, 100 },
    };
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) {
        c.H = shapes[i].H, c.groups = shapes[i].groups, c.T = shapes[i].T, c.B = 2;
        c.K = shapes[i].K, c.V = shapes[i].V, c.seed = 60 + i;
        check_both(c);
        op_case one = c;
        one.T = 1;
        if (shares_next()) check_step(one, MN_F32);
        if (shares_next()) check_step(one, MN_BF16);
    }
    c.B = 1, c.H = 32, c.groups = 2, c.K = 64, c.V = 64, c.seed = 7;
    c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1, c.T = packing[c.n_seqs];
    check_both(c);
}

static void check_long(op_case c) {
    c.B = c.H = 1, c.K = 3, c.V = 5, c.T = 8200, c.seed = 8;
    check_both(c);
    c.seed = EXTREME + 8;
    check_both(c);
    c.cu_seqlens = long_packing, c.n_seqs = MN_COUNTOF(long_packing) - 1;
    c.T = long_packing[c.n_seqs];
    check_both(c);
}

/* Sequences that delta cuts into segments, of which the last may be short or none, beside others
 * that it leaves whole. The reference keeps a state for each token, so memories are small. */
static void check_cut(op_case c) {
    static const int64_t borders[] = { 0, 100, 8400, 8400, 8431, 17000 };
    static const struct {
        int64_t H, T, K, V;
    } shapes[] = { { 1, 8192, 32, 40 }, { 2, 8200, 40, 72 }, { 1, 9999, 72, 40 } };
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) {
        c.B = 1, c.H = shapes[i].H, c.T = shapes[i].T, c.K = shapes[i].K, c.V = shapes[i].V;
        c.seed = 80 + i;
        if (shares_next()) check_bf16(c);
    }
    c.H = 1, c.K = 40, c.V = 40;
    c.cu_seqlens = borders, c.n_seqs = MN_COUNTOF(borders) - 1, c.T = borders[c.n_seqs];
    if (shares_next()) check_bf16(c);
}

/* Heads of up to 64 channels and value columns, whose chunks are shorter than those of wider ones:
 * around a chunk, packed, without and with decays that leave nothing. */
static void check_narrow(op_case c) {
    static const struct {
        int64_t K, V;
    } heads[] = { { 64, 64 }, { 40, 56 }, { 33, 35 } };
    static const int64_t spans[] = { 15, 16, 17, 200 };
    for (size_t i = 0; i < MN_COUNTOF(heads) * MN_COUNTOF(spans); i++) {
        c.K = heads[i / MN_COUNTOF(spans)].K, c.V = heads[i / MN_COUNTOF(spans)].V;
        c.B = c.H = 2, c.T = spans[i % MN_COUNTOF(spans)];
        for (int extreme = 0; extreme < 2; extreme++) {
            c.seed = (extreme ? EXTREME : 0) + 90 + i;
            if (shares_next()) check_bf16(c);
        }
    }
    c.B = 1, c.H = 3, c.K = 64, c.V = 64;
    c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1, c.T = packing[c.n_seqs];
    if (shares_next()) check_bf16(c);
}

/* As models call it: without variances other kernels run. Few heads and more than there are
 * processors, keys of one block and of two, tiles that are not full, packed sequences. */
static void check_means(op_case c) {
    static const struct {
        int64_t B, H, T, K, V;
    } shapes[] = {
        { 2, 2, 130, 64, 128 }, { 2, 2, 130, 128, 128 }, { 2, 2, 70, 72, 40 },
        { 2, 2, 1, 33, 100 },   { 8, 9, 40, 64, 136 },   { 8, 9, 40, 128, 136 },
    };
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) {
        c.B = shapes[i].B, c.H = shapes[i].H, c.T = shapes[i].T;
        c.K = shapes[i].K, c.V = shapes[i].V, c.seed = 70 + i;
        if (shares_next()) check_bf16_of(c, false);
    }
    c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1, c.T = packing[c.n_seqs];
    for (c.B = 1, c.H = 2, c.V = 80, c.K = 64; c.K <= 128; c.K += 64) {
        if (shares_next()) check_bf16_of(c, false);
    }
}

/* Heads that blocks of a cluster share, of none, one and two groups of eight tokens and of many;
 * whose second block has few columns or none. */
static void check_shared_heads(op_case c) {
    static const struct {
        int64_t T, K, V;
    } shapes[] = { { 130, 128, 128 }, { 8, 128, 80 }, { 9, 72, 128 }, { 67, 96, 64 } };
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) {
        c.B = 1, c.H = 2, c.T = shapes[i].T, c.K = shapes[i].K, c.V = shapes[i].V;
        c.seed = 80 + i;
        if (shares_next()) check_bf16(c);
    }
    c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1, c.T = packing[c.n_seqs];
    c.K = 128, c.V = 100, c.seed = 90;
    if (shares_next()) check_bf16(c);
    c.seed = EXTREME + 90;
    if (shares_next()) check_bf16(c);
}

/* Heads that decay too steeply for a frame of 64 tokens, and not for one of 16. */
static void check_steep(op_case c) {
    c.B = c.H = 2, c.T = 150, c.K = 32, c.V = 40, c.cu_seqlens = NULL, c.n_seqs = 0;
    c.seed = EXTREME + 60;
    if (shares_next()) check_f32(c);
    if (shares_next()) check_bf16(c);
}

static void kernels_match_reference(mn_op_id op) {
    if (!gpu) {
        skip();
        return;
    }
    if (!mn_op_has_cuda(op, MN_FORWARD)) return;
    op_case forms[OP_MAX_FORMS];
    const int n_forms = op_forms(op, forms);
    shares_restart();
    for (int f = 0; f < n_forms; f++) {
        if (op_is_refused(gpu, forms[f])) continue;
        for (size_t i = 0; i < MN_COUNTOF(lengths) * 2; i++) {
            const size_t w = (i + (size_t)f) % MN_COUNTOF(widths);
            op_case c = forms[f];
            c.T = lengths[i % MN_COUNTOF(lengths)], c.K = widths[w].K, c.V = widths[w].V;
            c.B = c.H = c.V > 600 ? 1 : 2;
            c.seed = 100 * (uint64_t)f + i + 1;
            check_both(c);
        }
        op_case c = forms[f];
        if (op == MN_OP_moebius) check_long(c);
        if (op == MN_OP_longhorn_diag) check_shared_heads(c);
        if (op == MN_OP_importance || op == MN_OP_moebius || op == MN_OP_bayes ||
            op == MN_OP_riccati) {
            check_means(c);
        }
        if (op == MN_OP_delta) check_cut(c);
        if (op == MN_OP_dplr) check_narrow(c);
        if (op == MN_OP_bayes || op == MN_OP_riccati) check_steep(c);
        if (op == MN_OP_attention) check_windows(c);
        if ((op == MN_OP_attention || op == MN_OP_relu_attention) && c.choice[0] == 0) {
            check_many_tiles(c);
        }
        if (op == MN_OP_additive || op == MN_OP_delta || op == MN_OP_delta_net) check_groups(c);
        if (op == MN_OP_additive && c.decay == MN_DECAY_CHANNEL) check_many_chunks(c);
        if (!op_has_time(op)) continue;
        c.B = 1, c.H = 3, c.K = 16, c.V = 40, c.seed = 7;
        c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1, c.T = packing[c.n_seqs];
        check_both(c);
        c.cu_seqlens = NULL, c.n_seqs = 0, c.B = 2, c.T = 150, c.K = 72, c.V = 40;
        c.seed = EXTREME + (uint64_t)f;
        if (c.decay >= MN_DECAY_TOKEN && shares_next()) check_bf16(c);
        c.B = 4, c.H = 16, c.T = 200, c.V = 64, c.seed = 12;    // warps work in groups from here on
        for (c.K = 40; c.K <= 200 && op == MN_OP_delta; c.K += 80) {
            if (shares_next()) check_bf16(c);
        }
        c.B = 9, c.H = 8, c.T = 330, c.K = 100, c.V = 100;    // more blocks than processors
        if (op == MN_OP_delta && shares_next()) check_bf16(c);
        c.K = 104, c.V = 120;    // the same with rows for TMA
        if (op == MN_OP_delta && shares_next()) check_bf16(c);
        c.groups = 2;    // and with more groups than processors
        if (op == MN_OP_delta && shares_next()) check_bf16(c);
        c.H = 16, c.groups = 4, c.T = 520;
        if (op == MN_OP_delta && shares_next()) check_bf16(c);
        c.groups = 0;
        c.B = 2, c.H = 8, c.T = 200, c.V = 256, c.K = 40;
        if (op == MN_OP_ccq_read && shares_next()) check_bf16(c);
        c.B = 4, c.H = 16, c.T = 70, c.V = 72, c.K = 72;    // too many blocks for a walk beside
        if (op == MN_OP_ccq_read && shares_next()) check_bf16(c);
        c.B = 1, c.H = 2, c.K = 140, c.V = 24, c.seed = 13;    // keys that fill no tile
        if (op == MN_OP_mesa) check_both(c);
        if (!op_has_state(op) || op_is_keyed(op)) continue;
        if (mn_op_has_cuda(op, MN_STEP)) check_steps(c);
        c.B = 1, c.H = 1, c.T = 2300, c.K = 32, c.V = 48, c.seed = 11;    // more than a segment
        if (shares_next()) check_bf16(c);
    }
}

static int run_operators(int argc, char **argv) {
    return op_visit_device(&gpu, "CUDA kernels match the reference", kernels_match_reference, argc,
                         argv);
}

int main(int argc, char **argv) {
    if (argc > 2 && !shares_given(argc, argv)) {
        fprintf(stderr, "usage: test_cuda [OPERATOR [I/N]]\n");
        return 2;
    }
    return shares_run(argc, argv, run_operators);
}
