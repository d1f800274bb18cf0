/* test_matmul.c - matrix products on threads: right on every target, and the same bits wherever a
 * row lies and however many threads there are. */
// labels: sanitize threads
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
    const mn_context_options options = { .n_threads = n_threads, .target = mn_target_name(target) };
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
    assert_true(get(c, p.dtype, p.M * p.N) == get(before, p.dtype, p.M * p.N));    // untouched
    free(before);
    free(c);
}

static void products_are_right(void **state) {
    (void)state;
    static const int64_t sizes[][3] = { { 1, 1, 1 },    { 0, 5, 3 },   { 3, 4, 0 },     { 5, 7, 9 },
                                        { 65, 33, 17 }, { 1, 300, 40 }, { 130, 270, 1030 },
                                        { 2, 37, 517 }, { 9, 65, 130 }, { 77, 600, 1025 } };
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

/* Sizes for which products go every way there is: few rows, some rows, near factors, packed
 * panels
 * in one and in several chunks, edges in each direction. */
typedef struct shape {
    int64_t M, N, K;
} shape;

enum { GUARD = 19 };    // floats around and between the rows of C that nobody may write

static float guard_word(int64_t i) {
    return (float)(i % 97) + 0.25f;
}

/* C as rows of N + GUARD floats, GUARD more in front. */
static float *guarded(int64_t M, int64_t N) {
    const int64_t count = GUARD + M * (N + GUARD);
    float *c = malloc((size_t)count * sizeof *c);
    assert_non_null(c);
    for (int64_t i = 0; i < count; i++) c[i] = guard_word(i);
    return c;
}

static void check_guards(const float *c, int64_t M, int64_t N) {
    for (int64_t i = 0; i < GUARD + M * (N + GUARD); i++) {
        const int64_t col = (i - GUARD) % (N + GUARD);
        if (i >= GUARD && col < N) continue;
        if (c[i] != guard_word(i)) {
            fail_msg("guard word %d of %dx%d was written", (int)i, (int)M, (int)N);
        }
    }
}

static void transpose(float *to, const float *from, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) to[c * rows + r] = from[r * cols + c];
    }
}

/* The product in every storage of its factors, and in parts of `part` rows, against `want`. */
static void check_bits(mn_context *context, const shape *s, const float *a, const float *b,
                       int64_t part, bool accumulate, const float *want) {
    const int64_t M = s->M, N = s->N, K = s->K;
    float *at = malloc((size_t)(M * K) * sizeof *at), *bt = malloc((size_t)(K * N) * sizeof *bt);
    assert_true(at && bt);
    transpose(at, a, M, K);
    transpose(bt, b, K, N);
    for (int form = 0; form < 4; form++) {
        float *c = guarded(M, N);
        mn_matmul_args p = { .N = N, .K = K, .a_transposed = form & 1, .b_transposed = form >> 1,
                             .accumulate = accumulate, .c_row = N + GUARD };
        p.a_row = p.a_transposed ? M : K;
        p.b = p.b_transposed ? bt : b;
        for (int64_t i = 0; i < M; i += part) {
            p.M = mn_min(part, M - i);
            p.a = p.a_transposed ? at + i : a + i * K;
            p.c = c + GUARD + i * (N + GUARD);
            mn_matmul(context, &p);
        }
        check_guards(c, M, N);
        for (int64_t i = 0; i < M; i++) {
            const float *row = c + GUARD + i * (N + GUARD);
            if (memcmp(row, want + i * N, (size_t)N * sizeof *c) == 0) continue;
            fail_msg("%s: bits of row %d of %dx%dx%d, form %d, in parts of %d rows",
                     mn_context_target(context), (int)i, (int)M, (int)N, (int)K, form, (int)part);
        }
        free(c);
    }
    free(at);
    free(bt);
}

/* What one thread gives for the whole product stored plainly, C starting as the guard words. */
static float *reference_bits(mn_target_id target, const shape *s, const float *a, const float *b,
                             bool accumulate) {
    mn_context *one = open_context(target, 1);
    float *c = guarded(s->M, s->N), *want = malloc((size_t)(s->M * s->N) * sizeof *want);
    const mn_matmul_args p = { .c = c + GUARD, .a = a, .b = b, .M = s->M, .N = s->N, .K = s->K,
                               .accumulate = accumulate, .c_row = s->N + GUARD };
    mn_matmul(one, &p);
    for (int64_t i = 0; i < s->M; i++) {
        memcpy(want + i * s->N, c + GUARD + i * (s->N + GUARD), (size_t)s->N * sizeof *want);
    }
    free(c);
    mn_context_destroy(one);
    return want;
}

/* Bits do not change with the number of rows, their place, how a factor is stored, or threads. */
static void bits_belong_to_row_and_column(void **state) {
    (void)state;
    static const shape shapes[] = {
        { 7, 33, 5 },     { 70, 49, 65 },    { 131, 145, 520 }, { 150, 530, 70 },
        { 70, 600, 1100 }, { 66, 1800, 600 }, { 70, 40, 6000 },
    };
    static const int64_t parts[] = { 1, 3, 8, 65, 1000 };
    for (int target = 0; target < MN_TARGET_COUNT; target++) {
        if (!mn_target_available((mn_target_id)target) || target == MN_TARGET_REF) continue;
        mn_context *one = open_context((mn_target_id)target, 1);
        mn_context *three = open_context((mn_target_id)target, 3);
        for (size_t s = 0; s < MN_COUNTOF(shapes); s++) {
            const shape *z = &shapes[s];
            float *a = numbers(MN_F32, z->M * z->K, 1), *b = numbers(MN_F32, z->K * z->N, 2);
            const bool accumulate = s % 2;
            float *want = reference_bits((mn_target_id)target, z, a, b, accumulate);
            for (size_t k = 0; k < MN_COUNTOF(parts); k++) {
                check_bits(k % 2 ? one : three, z, a, b, parts[k], accumulate, want);
            }
            free(want);
            free(a);
            free(b);
        }
        mn_context_destroy(one);
        mn_context_destroy(three);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_right),
        cmocka_unit_test(bits_belong_to_row_and_column),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
