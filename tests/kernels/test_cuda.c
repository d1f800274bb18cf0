/* test_cuda.c - every CUDA kernel against the float64 reference, on awkward sizes and packed
 * sequences, in float32 and bf16, and twice for the same bits. Skipped without a GPU.
 *
 * float32 is held to the tolerances of op_error.h. bf16 gets inputs rounded to bf16, as does the
 * reference; a result stored in bf16 is then off by at most u = 2^-8 of itself, and kernels may
 * have twice of that (see mn_golden_compare_bf16): each number within 2 u of its scale, the largest
 * of its row or the rms of its tensor, and the rms of the error within 2 u / sqrt(3) of that of the
 * tensor. Gradients that vanish by structure are held to the bound of op_error.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "ops/sample_device.h"
#include "support/op_error.h"

static mn_context *gpu;    // NULL: none here

/* Forward and backward on the GPU, results and gradients into `got`. */
static void run_there(mn_sample *got, const op_case *c, mn_dtype dtype) {
    mn_device_sample *there = NULL;
    mn_status st = mn_device_sample_create(&there, gpu, got, dtype);
    if (st == MN_OK) st = mn_op_run(gpu, c->op, MN_FORWARD, mn_device_sample_args(there));
    if (st == MN_OK && mn_op_has_cuda(c->op, MN_BACKWARD)) {
        st = mn_op_run(gpu, c->op, MN_BACKWARD, mn_device_sample_args(there));
    }
    if (st == MN_OK) st = mn_device_sample_fetch(there, got);
    mn_device_sample_free(there);
    if (st != MN_OK) check_fatal("%s: %s", op_case_text(c), mn_last_error());
}

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

static void check_f32(op_case c) {
    op_tolerances tolerances;
    mn_sample got, again, want;
    c.dtype = MN_F32;
    op_open(&got, &c);
    op_open(&again, &c);
    c.dtype = MN_F64;
    op_allocate(&want, &c);
    op_convert(&want, &got);
    op_measure(&tolerances, &want, &c);
    c.dtype = MN_F32;
    run_there(&got, &c, MN_F32);
    run_there(&again, &c, MN_F32);
    op_compare("cuda", &got, &want, &tolerances, &c);
    check_same(&got, &again, &c);
    mn_sample_free(&got);
    mn_sample_free(&again);
    mn_sample_free(&want);
}

static double root_mean_square(const double *x, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += x[i] * x[i];
    return count > 0 ? sqrt(sum / (double)count) : 0.0;
}

/* `loss`: the norm of all products cotangent x result, for a gradient; 0 for a result. */
static void compare_bf16(const double *got, const double *want, int64_t count, int64_t width,
                         double loss, const char *name, const op_case *c) {
    const double unit = 1.0 / 256.0, rms = root_mean_square(want, count);
    if (count > 0 && rms * sqrt((double)count) < 0x1p-40 * loss) {
        const double left = root_mean_square(got, count) * sqrt((double)count);
        CHECK(left <= 0x1p-17 * loss, "%s bf16: %s is %.2e and vanishes", op_case_text(c), name,
              left);
        return;
    }
    double sum = 0.0, worst = 0.0;
    for (int64_t first = 0; first < count; first += width) {
        double scale = rms;
        for (int64_t i = first; i < first + width; i++) scale = fmax(scale, fabs(want[i]));
        for (int64_t i = first; i < first + width; i++) {
            const double d = fabs(got[i] - want[i]);
            sum += d * d;
            worst = d > worst * scale || isnan(d) ? d / scale : worst;
        }
    }
    CHECK(worst <= 2.0 * unit, "%s bf16: %s is off by %.2e of its row", op_case_text(c), name,
          worst);
    const double off = count > 0 ? sqrt(sum / (double)count) : 0.0;
    CHECK(off <= 2.0 * unit / sqrt(3.0) * rms, "%s bf16: %s is off by %.2e of %.2e rms",
          op_case_text(c), name, off, rms);
}

static void check_bf16(op_case c) {
    mn_sample got, want;
    c.dtype = MN_F64;
    op_open(&got, &c);
    op_open(&want, &c);
    mn_sample_round(&got, MN_BF16);
    mn_sample_round(&want, MN_BF16);
    op_run_both(op_context("ref", 2), &want, &c);
    run_there(&got, &c, MN_BF16);
    for (int i = 0; i < want.n_tensors; i++) {
        const mn_sample_tensor *tensor = &want.tensors[i];
        const void *x = op_memory(&got.tensors[i], OP_COMPUTED);
        const void *y = op_memory(tensor, OP_COMPUTED);
        const size_t rank = strlen(tensor->axes);
        bool ok = true;
        const int64_t width = rank ? mn_axis_size((const mn_call *)want.args,
                                                  tensor->axes[rank - 1], &ok) : 1;
        const bool input = tensor->field->role <= MN_ROLE_RAW;
        if (!x || !y || (input && !mn_op_has_cuda(c.op, MN_BACKWARD))) continue;
        compare_bf16(x, y, tensor->count, width, input ? op_loss_norm(&want) : 0.0,
                     tensor->field->name, &c);
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

/* Sequences of one, two and several of the chunks of 4096 tokens that moebius is parallel over. */
static const int64_t long_packing[] = { 0, 4096, 4097, 4099, 12500 };

static void check_long(op_case c) {
    c.B = c.H = 1, c.K = 3, c.V = 5, c.T = 8200, c.seed = 8;
    check_f32(c);
    check_bf16(c);
    c.cu_seqlens = long_packing, c.n_seqs = MN_COUNTOF(long_packing) - 1;
    c.T = long_packing[c.n_seqs];
    check_f32(c);
    check_bf16(c);
}

static void kernels_match_reference(mn_op_id op) {
    if (!gpu) {
        skip();
        return;
    }
    if (!mn_op_has_cuda(op, MN_FORWARD)) return;
    op_case forms[OP_MAX_FORMS];
    const int n_forms = op_forms(op, forms);
    for (int f = 0; f < n_forms; f++) {
        for (size_t i = 0; i < MN_COUNTOF(lengths) * 2; i++) {
            const size_t w = (i + (size_t)f) % MN_COUNTOF(widths);
            op_case c = forms[f];
            c.T = lengths[i % MN_COUNTOF(lengths)], c.K = widths[w].K, c.V = widths[w].V;
            c.B = c.H = c.V > 600 ? 1 : 2;
            c.seed = 100 * (uint64_t)f + i + 1;
            check_f32(c);
            check_bf16(c);
        }
        op_case c = forms[f];
        if (op == MN_OP_moebius) check_long(c);
        if (!op_has_time(op)) continue;
        c.B = 1, c.H = 3, c.K = 16, c.V = 40, c.seed = 7;
        c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1, c.T = packing[c.n_seqs];
        check_f32(c);
        check_bf16(c);
    }
}

int main(int argc, char **argv) {
    const mn_context_options options = { .n_threads = 1, .device = "cuda" };
    if (mn_context_create(&gpu, &options) != MN_OK) printf("skipped: %s\n", mn_last_error());
    const int failed = op_walk("CUDA kernels match the reference", kernels_match_reference, argc,
                               argv);
    mn_context_destroy(gpu);
    return failed;
}
