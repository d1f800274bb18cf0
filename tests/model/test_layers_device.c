/* test_layers_device.c - every kind of layer on a GPU, in float32 and in bf16, against the same on
 * the CPU in float64: output, gradients of the input and of every parameter. Parameters are float32
 * with float32 gradients, or bf16 with float32 gradients. Layers whose operators have no CUDA
 * kernel yet are named and left out. Skipped without a GPU.
 *
 * Numbers are rounded to bf16 on both sides, and rms of errors are held against rms of what is
 * compared. float32: 2e-4 of it. bf16: a layer rounds some twenty times on the way, by up to 2^-8
 * each; how much that matters depends on the layer (a vector of three numbers near zero that is
 * scaled to unit length, a sum that almost cancels), so the CPU computes a second time from numbers
 * moved by 2^-8 of themselves, and the GPU may be off by 0.1 and four times what that changes.
 * Gradients that are small against the others of the layer are held against a hundredth of the
 * largest rms. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/dtype.h"
#include "base/rng.h"
#include "base/util.h"
#include "ops/context.h"
#include "support/check.h"
#include "support/layer_case.h"

static const struct {
    const char *name, *json;
} cases[] = {
#define LAYER_TEST(name, json) { name, json },
#include "layers/all.def"
};

enum { B = 2, D = 16 };

static mn_context *gpu;    // NULL: none here

/* ---- memory of the device -------------------------------------------------------------------- */

static void must(mn_status st) {
    if (st != MN_OK) check_fatal("%s", mn_last_error());
}

/* Numbers of a case, which are float64, as `dtype` there; NULL: zeros. */
static void *send(const double *from, int64_t n, mn_dtype dtype) {
    const size_t bytes = (size_t)n * mn_dtype_bytes(dtype);
    void *host = malloc(bytes + 1), *there;
    for (int64_t i = 0; i < n; i++) {
        const float x = from ? (float)from[i] : 0.0f;
        if (dtype == MN_F32) ((float *)host)[i] = x;
        else ((uint16_t *)host)[i] = mn_bf16_from_float(x);
    }
    must(mn_device_allocate(gpu->device, &there, bytes));
    must(mn_device_upload(gpu->device, there, host, bytes));
    free(host);
    return there;
}

static double *receive(void *there, int64_t n, mn_dtype dtype) {
    const size_t bytes = (size_t)n * mn_dtype_bytes(dtype);
    void *host = malloc(bytes + 1);
    double *to = malloc((size_t)(n + 1) * sizeof *to);
    must(mn_device_download(gpu->device, host, there, bytes));
    for (int64_t i = 0; i < n; i++) {
        to[i] = dtype == MN_F32 ? ((float *)host)[i] : mn_bf16_to_float(((uint16_t *)host)[i]);
    }
    free(host);
    mn_device_free(gpu->device, there);
    return to;
}

static void round_numbers(void *numbers, int64_t n) {
    double *x = numbers;
    for (int64_t i = 0; i < n; i++) x[i] = mn_bf16_round(x[i]);
}

/* ---- one layer there ------------------------------------------------------------------------- */

typedef struct there {
    void *x, *dx, *dy, *params[MN_LAYER_PARAMS], *grads[MN_LAYER_PARAMS];
    float *y;
} there;

static there send_all(const layer_case *c, mn_dtype dtype) {
    const int64_t n = B * c->T * D;
    there t = { .x = send(c->x, n, dtype), .dx = send(NULL, n, dtype),
                .dy = send(c->dy, n, dtype) };
    for (int i = 0; i < c->layer.n_params; i++) {
        t.params[i] = send(c->params[i], c->layer.params[i].count, dtype);
        t.grads[i] = send(NULL, c->layer.params[i].count, MN_F32);
    }
    t.y = calloc((size_t)n, sizeof *t.y);
    return t;
}

static mn_status run(const layer_case *c, there *t, mn_dtype dtype) {
    mn_tape *tape;
    mn_tensor *leaves[MN_LAYER_PARAMS];
    must(mn_tape_create(&tape, gpu, dtype));
    mn_tape_start(tape, MN_TAPE_RECORD);
    for (int i = 0; i < c->layer.n_params; i++) {
        const mn_param_info *info = &c->layer.params[i];
        const int64_t rows = info->rank == 1 ? 1 : info->shape[0];
        leaves[i] = mn_tape_leaf_of(tape, t->params[i], dtype, t->grads[i], MN_F32, rows,
                                    info->count / rows, false);
    }
    mn_forward f = { .tape = tape, .layer = &c->layer, .params = leaves };
    mn_tensor *x = mn_tape_input(tape, t->x, t->dx, (int64_t[]){ B, c->T, 1, D });
    mn_tensor *y = mn_layer_forward(&f, x);
    mn_status st = mn_tape_status(tape);
    if (st == MN_OK) st = mn_tape_read(tape, y, t->y);
    if (st == MN_OK) {
        mn_tape_seed(tape, y, t->dy);
        st = mn_tape_backward(tape);
    }
    mn_tape_destroy(tape);
    return st;
}

/* ---- comparison ------------------------------------------------------------------------------ */

static double rms(const double *x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sqrt(sum / (double)n);
}

/* What is compared: `moved` is `want` from inputs that were moved a little. */
typedef struct numbers {
    const char *what;
    const double *got, *want, *moved;
    int64_t n;
} numbers;

static double difference(const double *a, const double *b, int64_t n) {
    double sum = 0.0;
    for (int64_t k = 0; k < n; k++) sum += (a[k] - b[k]) * (a[k] - b[k]);
    return sqrt(sum / (double)n);
}

static void compare(size_t i, mn_dtype dtype, const numbers *x, double largest) {
    const double off = difference(x->got, x->want, x->n);
    const double scale = fmax(rms(x->want, x->n), 0.01 * largest);
    const double near = difference(x->moved, x->want, x->n);
    const double most = dtype == MN_F32 ? 2e-4 * scale : 0.1 * scale + 4.0 * near;
    CHECK(off <= most, "%s %s %s: %s is off by %.2e of %.2e, a share of %.4f; %.4f is the most",
          cases[i].name, cases[i].json, mn_dtype_name(dtype), x->what, off, scale, off / scale,
          most / scale);
}

static void compare_all(size_t i, const layer_case *c, const layer_case *moved, there *t,
                        mn_dtype dtype) {
    const int64_t n = B * c->T * D;
    double *y = malloc((size_t)n * sizeof *y), *dx = receive(t->dx, n, dtype), largest = 0.0;
    for (int64_t k = 0; k < n; k++) y[k] = t->y[k];
    compare(i, dtype, &(numbers){ "the output", y, c->y, moved->y, n }, 0.0);
    compare(i, dtype, &(numbers){ "the gradient of x", dx, c->dx, moved->dx, n }, 0.0);
    free(y);
    free(dx);
    for (int p = 0; p < c->layer.n_params; p++) {
        largest = fmax(largest, rms(c->grads[p], c->layer.params[p].count));
    }
    for (int p = 0; p < c->layer.n_params; p++) {
        const mn_param_info *info = &c->layer.params[p];
        double *grad = receive(t->grads[p], info->count, MN_F32);
        if (info->group != MN_GROUP_FROZEN) {
            compare(i, dtype, &(numbers){ info->name, grad, c->grads[p], moved->grads[p],
                                          info->count }, largest);
        }
        free(grad);
    }
}

/* Inputs and parameters as bf16 holds them, or moved from there. */
static void prepare(layer_case *c, bool moves) {
    void *arrays[MN_LAYER_PARAMS + 2] = { c->x, c->dy };
    int64_t counts[MN_LAYER_PARAMS + 2] = { B * c->T * D, B * c->T * D };
    for (int p = 0; p < c->layer.n_params; p++) {
        arrays[p + 2] = c->params[p];
        counts[p + 2] = c->layer.params[p].count;
    }
    for (int k = 0; k < c->layer.n_params + 2; k++) {
        round_numbers(arrays[k], counts[k]);
        for (int64_t i = 0; moves && i < counts[k]; i++) {
            const double by = mn_rng_normal(11, (uint64_t)k, (uint64_t)i) / 256.0;
            ((double *)arrays[k])[i] *= 1.0 + by;
        }
    }
}

static bool run_case(layer_case *c, size_t i, bool moves) {
    /* blocks of mixing parameters bound the sequences */
    const int64_t T = strstr(cases[i].json, "block_size") ? 12 : 70;
    double value;
    mn_status st = layer_case_create(c, cases[i].name, cases[i].json, MN_F64, B, T, D, 7);
    if (st == MN_OK) prepare(c, moves);
    if (st == MN_OK) st = layer_case_backward(c, &value);
    return CHECK(st == MN_OK, "%s: %s", cases[i].name, mn_last_error());
}

static void check_layer(size_t i, mn_dtype dtype) {
    layer_case c, moved;
    const bool ran = run_case(&c, i, false), ran_moved = run_case(&moved, i, true);
    there t = send_all(&c, dtype);
    const mn_status st = run(&c, &t, dtype);
    if (st == MN_ERR_UNSUPPORTED) {
        printf("# left out: %s %s: %s\n", cases[i].name, cases[i].json, mn_last_error());
    } else if (CHECK(st == MN_OK, "%s %s: %s", cases[i].name, cases[i].json, mn_last_error())) {
        if (ran && ran_moved) compare_all(i, &c, &moved, &t, dtype);
    }
    void *const rest[] = { t.x, t.dy };
    for (size_t k = 0; k < MN_COUNTOF(rest); k++) mn_device_free(gpu->device, rest[k]);
    for (int p = 0; p < c.layer.n_params; p++) mn_device_free(gpu->device, t.params[p]);
    free(t.y);
    layer_case_destroy(&c);
    layer_case_destroy(&moved);
}

static void layers_in_f32(void **state) {
    (void)state;
    if (!gpu) skip();
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) check_layer(i, MN_F32);
    check_done();
}

static void layers_in_bf16(void **state) {
    (void)state;
    if (!gpu) skip();
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) check_layer(i, MN_BF16);
    check_done();
}

int main(void) {
    if (mn_context_create(&gpu, &(mn_context_options){ .device = "cuda" }) != MN_OK) {
        printf("# no GPU: %s\n", mn_last_error());
        gpu = NULL;
    }
    const struct CMUnitTest tests[] = { cmocka_unit_test(layers_in_f32),
                                        cmocka_unit_test(layers_in_bf16) };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    mn_context_destroy(gpu);
    return failed;
}
