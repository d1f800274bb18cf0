/* test_matmul.c - matrix products on threads: right on every target, and the same bits wherever a
 * row lies and however many threads there are. */
#include "ops/matmul.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "base/util.h"

static mn_context *open_context(mn_target_id target, int n_threads) {
    mn_context *context = NULL;
    const mn_context_options options = { n_threads, mn_target_name(target) };
    assert_int_equal(mn_context_create(&context, &options), MN_OK);
    return context;
}

static void set(void *data, mn_dtype dtype, int64_t i, double x) {
    if (dtype == MN_F64) ((double *)data)[i] = x;
    else ((float *)data)[i] = (float)x;
}

static double get(const void *data, mn_dtype dtype, int64_t i) {
    return dtype == MN_F64 ? ((const double *)data)[i] : (double)((const float *)data)[i];
}

static void *numbers(mn_dtype dtype, int64_t count, uint64_t seed) {
    void *data = calloc((size_t)count + 1, sizeof(double));
    assert_non_null(data);
    for (int64_t i = 0; i < count; i++) set(data, dtype, i, mn_rng_normal(seed, 0, (uint64_t)i));
    return data;
}

/* The sum and the sum of magnitudes of element (i, j). */
static double element(const mn_matmul_args *p, int64_t i, int64_t j, double *size) {
    double sum = 0.0;
    *size = 0.0;
    for (int64_t k = 0; k < p->K; k++) {
        const double a = get(p->a, p->dtype, p->a_transposed ? k * p->M + i : i * p->K + k);
        const double b = get(p->b, p->dtype, p->b_transposed ? j * p->K + k : k * p->N + j);
        sum += a * b;
        *size += fabs(a * b);
    }
    return sum;
}

/* K products and sums, each rounded once: K u times the sum of magnitudes, and one more rounding or
 * two when the result joins C. */
static void check_product(mn_context *context, mn_matmul_args p) {
    void *before = numbers(p.dtype, p.M * p.N + 1, 3);
    void *c = numbers(p.dtype, p.M * p.N + 1, 3);
    p.c = c;
    mn_matmul(context, &p);
    const double u = p.dtype == MN_F64 ? DBL_EPSILON : FLT_EPSILON;
    for (int64_t i = 0; i < p.M; i++) {
        for (int64_t j = 0; j < p.N; j++) {
            const double old = p.accumulate ? get(before, p.dtype, i * p.N + j) : 0.0;
            double size;
            const double want = old + element(&p, i, j, &size);
            const double got = get(c, p.dtype, i * p.N + j);
            if (!(fabs(got - want) <= u * ((double)(p.K + 2) * size + fabs(want) + fabs(old)))) {
                fail_msg("%s: C[%d,%d] of %dx%dx%d is %.9g, not %.9g", mn_context_target(context),
                         (int)i, (int)j, (int)p.M, (int)p.N, (int)p.K, got, want);
            }
        }
    }
    assert_true(get(c, p.dtype, p.M * p.N) == get(before, p.dtype, p.M * p.N));
    free(before);
    free(c);
}

static void products_are_right(void **state) {
    (void)state;
    static const int64_t sizes[][3] = { { 1, 1, 1 },    { 0, 5, 3 },   { 3, 4, 0 },     { 5, 7, 9 },
                                        { 65, 33, 17 }, { 1, 300, 40 }, { 130, 270, 1030 } };
    for (int target = 0; target < MN_TARGET_COUNT; target++) {
        if (!mn_target_available((mn_target_id)target)) continue;
        mn_context *context = open_context((mn_target_id)target, 2);
        for (size_t s = 0; s < MN_COUNTOF(sizes); s++) {
            for (int form = 0; form < 16; form++) {
                mn_matmul_args p = { .M = sizes[s][0], .N = sizes[s][1], .K = sizes[s][2] };
                p.dtype = form & 1 ? MN_F64 : MN_F32;
                p.a_transposed = form >> 1 & 1;
                p.b_transposed = form >> 2 & 1;
                p.accumulate = form >> 3 & 1;
                void *a = numbers(p.dtype, p.M * p.K, 1), *b = numbers(p.dtype, p.K * p.N, 2);
                p.a = a;
                p.b = b;
                check_product(context, p);
                free(a);
                free(b);
            }
        }
        mn_context_destroy(context);
    }
}

/* Row r of a tall product is the product of that row alone, on any number of threads. */
static void rows_do_not_depend_on_their_place(void **state) {
    (void)state;
    enum { M = 150, N = 70, K = 700 };
    for (int target = 0; target < MN_TARGET_COUNT; target++) {
        if (!mn_target_available((mn_target_id)target)) continue;
        float *a = numbers(MN_F32, M * K, 1), *b = numbers(MN_F32, N * K, 2);
        static float tall[M * N], row[M * N];
        mn_context *one = open_context((mn_target_id)target, 1);
        mn_context *three = open_context((mn_target_id)target, 3);
        mn_matmul_args p = { .c = tall, .a = a, .b = b, .M = M, .N = N, .K = K };
        p.b_transposed = true;
        mn_matmul(three, &p);
        for (int64_t count = 1; count <= 64; count *= 4) {
            for (int64_t first = 0; first + count <= M; first += 29) {
                mn_matmul_args part = p;
                part.a = a + first * K;
                part.c = row;
                part.M = count;
                mn_matmul(one, &part);
                assert_memory_equal(row, tall + first * N, (size_t)(count * N) * sizeof *row);
            }
        }
        mn_context_destroy(one);
        mn_context_destroy(three);
        free(a);
        free(b);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_right),
        cmocka_unit_test(rows_do_not_depend_on_their_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
