/* test_quant.c - weights of 8 and 4 bits: products have the bits of products with the float32
 * weights that the codes stand for, on every target; codes and scales make the error small, survive
 * files, and are refused where they are not numbers. */
// labels: sanitize threads
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
#include "ops/matmul.h"
#include "ops/quantize.h"

static mn_context *open_context(mn_target_id target, int n_threads) {
    mn_context *context = NULL;
    const mn_context_options options = { .n_threads = n_threads, .target = mn_target_name(target) };
    assert_int_equal(mn_context_create(&context, &options), MN_OK);
    return context;
}

static float *numbers(int64_t count, uint64_t seed) {
    float *data = malloc((size_t)(count + 1) * sizeof *data);
    assert_non_null(data);
    for (int64_t i = 0; i <= count; i++) data[i] = (float)mn_rng_normal(seed, 0, (uint64_t)i);
    return data;
}

static mn_quant_stored room(int bits, int64_t rows, int64_t cols, int64_t group) {
    mn_quant_stored s = { .bits = bits, .rows = rows, .cols = cols, .group = group };
    const mn_quant_sizes sizes = mn_quant_stored_sizes(&s);
    s.codes = calloc(sizes.codes + 1, 1);
    s.scales = calloc(sizes.scales + 1, 1);
    s.least = sizes.least ? calloc(sizes.least, 1) : NULL;
    assert_true(s.codes && s.scales && (s.least || bits == 8));
    return s;
}

static void drop(mn_quant_stored *s) {
    free(s->codes);
    free(s->scales);
    free(s->least);
}

static mn_quant_stored quantized(int bits, const float *w, int64_t rows, int64_t cols,
                                 int64_t group) {
    mn_quant_stored s = room(bits, rows, cols, group);
    double error, all;
    assert_int_equal(mn_quantize(&s, w, NULL, NULL, &error, &all), MN_OK);
    assert_true(error >= 0.0 && error < all);
    return s;
}

/* ---- products -------------------------------------------------------------------------------- */

typedef struct shape {
    int64_t M, N, K, group;
} shape;

/* Around strips of 16 rows, items of 64, groups, blocks of the sum, tiles and panels. */
static const shape shapes[] = {
    { 1, 1, 1, 32 },       { 1, 16, 8, 32 },      { 1, 17, 31, 32 },     { 2, 64, 64, 64 },
    { 3, 65, 100, 64 },    { 4, 129, 513, 128 },  { 5, 48, 1100, 128 },  { 8, 33, 1000, 256 },
    { 16, 100, 520, 32 },  { 17, 47, 72, 32 },    { 31, 200, 776, 64 },  { 70, 300, 1030, 64 },
    { 1, 700, 2049, 128 }, { 64, 16, 40, 32 },
};

static void check_shape(mn_context *context, const shape *z, int bits, bool accumulate) {
    float *w = numbers(z->N * z->K, 1), *x = numbers(z->M * z->K, 2);
    float *got = numbers(z->M * (z->N + 3), 3), *want = numbers(z->M * (z->N + 3), 3);
    mn_quant_stored s = quantized(bits, w, z->N, z->K, z->group);
    mn_quant *q = NULL;
    assert_int_equal(mn_quant_load(&q, &s), MN_OK);
    mn_quant_unpack(w, q);
    mn_matmul_args p = { .a = x, .c = want, .c_row = z->N + 3, .M = z->M, .N = z->N, .K = z->K,
                         .b = w, .b_transposed = true, .accumulate = accumulate, .bias = x };
    if (z->M * z->K < z->N) p.bias = NULL;
    assert_int_equal(mn_matmul(context, &p), MN_OK);
    p.b = NULL;
    p.quant = q;
    p.c = got;
    assert_int_equal(mn_matmul(context, &p), MN_OK);
    for (int64_t i = 0; i < z->M; i++) {
        for (int64_t j = 0; j < z->N + 3; j++) {
            const float *a = &got[i * (z->N + 3) + j], *b = &want[i * (z->N + 3) + j];
            if (memcmp(a, b, sizeof *a) == 0) continue;
            fail_msg("%s, %d bits: C[%d,%d] of %dx%dx%d is %.9g, not %.9g",
                     mn_context_target(context), bits, (int)i, (int)j, (int)z->M, (int)z->N,
                     (int)z->K, (double)*a, (double)*b);
        }
    }
    mn_quant_free(q);
    drop(&s);
    free(w);
    free(x);
    free(got);
    free(want);
}

/* The same bits whatever the number of rows and threads follow: float32 products have them. */
static void products_have_the_bits_of_float32(void **state) {
    (void)state;
    for (int target = 0; target < MN_TARGET_COUNT; target++) {
        if (!mn_target_available((mn_target_id)target)) continue;
        for (int threads = 1; threads <= 3; threads += 2) {
            mn_context *context = open_context((mn_target_id)target, threads);
            for (size_t i = 0; i < MN_COUNTOF(shapes); i++) {
                check_shape(context, &shapes[i], 8, i % 2);
                check_shape(context, &shapes[i], 4, i % 2);
            }
            mn_context_destroy(context);
        }
    }
}

/* Against sums in double of the stored codes: K products and sums, each rounded once. */
static void products_are_right(void **state) {
    (void)state;
    const int64_t N = 37, K = 150, groups = 3;
    for (int bits = 4; bits <= 8; bits += 4) {
        float *w = numbers(N * K, 4), *x = numbers(K, 5), y[37];
        mn_quant_stored s = quantized(bits, w, N, K, 64);
        mn_quant *q = NULL;
        assert_int_equal(mn_quant_load(&q, &s), MN_OK);
        for (int target = 0; target < MN_TARGET_COUNT; target++) {
            if (!mn_target_available((mn_target_id)target)) continue;
            mn_context *context = open_context((mn_target_id)target, 1);
            assert_int_equal(mn_matmul(context, &(mn_matmul_args){
                .a = x, .c = y, .quant = q, .b_transposed = true, .M = 1, .N = N, .K = K }), MN_OK);
            for (int64_t j = 0; j < N; j++) {
                double sum = 0.0, size = 0.0;
                for (int64_t k = 0; k < K; k++) {
                    const int64_t at = j * groups + k / 64;
                    double v;
                    if (bits == 8) {
                        v = (double)((float *)s.scales)[at] * ((int8_t *)s.codes)[j * K + k];
                    } else {
                        const int byte = ((uint8_t *)s.codes)[j * K / 2 + k / 2];
                        v = (double)mn_f16_to_float(((uint16_t *)s.scales)[at]) *
                                (k % 2 ? byte >> 4 : byte & 15) +
                            mn_f16_to_float(((uint16_t *)s.least)[at]);
                    }
                    sum += v * x[k];
                    size += fabs(v * x[k]);
                }
                assert_true(fabs(y[j] - sum) <= FLT_EPSILON * (double)(K + 2) * size);
            }
            mn_context_destroy(context);
        }
        mn_quant_free(q);
        drop(&s);
        free(w);
        free(x);
    }
}

/* ---- codes ----------------------------------------------------------------------------------- */

static float stored(const mn_quant_stored *s, int64_t row, int64_t col) {
    mn_quant *q = NULL;
    assert_int_equal(mn_quant_load(&q, s), MN_OK);
    const float w = mn_quant_weight(q, row, col);
    mn_quant_free(q);
    return w;
}

/* Numbers that codes can stand for are kept to the last bit; a known row gives known codes. */
static void exact_weights_stay(void **state) {
    (void)state;
    float w[2][52];    // each group has the least and the largest level
    for (int k = 0; k < 52; k++) {
        w[0][k] = 0.25f * (float)((k * 7 + 3) % 16) - 1.5f;
        w[1][k] = k < 32 ? 0.0f : 0.125f * (float)(k % 16);
    }
    mn_quant_stored s = quantized(4, w[0], 2, 52, 32);
    for (int k = 0; k < 52; k++) {
        assert_true(stored(&s, 0, k) == w[0][k]);
        assert_true(stored(&s, 1, k) == w[1][k]);
    }
    const uint8_t *codes = s.codes;
    assert_int_equal(codes[0], 3 | 10 << 4);    // 3 and (7 + 3) % 16
    assert_int_equal(codes[1], 1 | 8 << 4);
    assert_int_equal(((uint16_t *)s.scales)[0], 0x3400);    // 0.25
    assert_int_equal(((uint16_t *)s.least)[0], 0xbe00);     // -1.5
    drop(&s);
    float v[33] = { -127.0f * 0.5f, 3.2f, -3.3f, 0.24f, 0.26f };
    s = quantized(8, v, 1, 33, 32);
    static const int8_t want[5] = { -127, 6, -7, 0, 1 };
    assert_memory_equal(s.codes, want, sizeof want);
    assert_true(((float *)s.scales)[0] == 0.5f && ((float *)s.scales)[1] == 0.0f);
    drop(&s);
}

/* Never worse than rounding to the nearest of 16 levels between least and largest weight, and for
 * normal weights clearly better: about a tenth of the square error. */
static void four_bits_beat_rounding(void **state) {
    (void)state;
    const int64_t K = 64, N = 200;
    float *w = numbers(N * K, 6);
    mn_quant_stored s = quantized(4, w, N, K, 64);
    mn_quant *q = NULL;
    assert_int_equal(mn_quant_load(&q, &s), MN_OK);
    double own = 0.0, rounded = 0.0;
    for (int64_t j = 0; j < N; j++) {
        double low = w[j * K], high = low, mine = 0.0, theirs = 0.0;
        for (int64_t k = 0; k < K; k++) {
            low = fmin(low, w[j * K + k]);
            high = fmax(high, w[j * K + k]);
        }
        const float step = mn_f16_to_float(mn_f16_from_float((float)((high - low) / 15)));
        const float least = mn_f16_to_float(mn_f16_from_float((float)low));
        for (int64_t k = 0; k < K; k++) {
            const double x = w[j * K + k], level = rint((x - least) / step);
            theirs += pow(least + step * fmin(fmax(level, 0.0), 15.0) - x, 2.0);
            mine += pow(mn_quant_weight(q, j, k) - x, 2.0);
        }
        assert_true(mine <= theirs * (1.0 + 1e-5));
        own += mine;
        rounded += theirs;
    }
    assert_true(own < 0.9 * rounded);
    mn_quant_free(q);
    drop(&s);
    free(w);
}

/* Inputs that are like each other: errors made good leave less of the output's error. */
static void errors_are_made_good(void **state) {
    (void)state;
    enum { K = 64, N = 32 };
    float *w = numbers(N * K, 7);
    /* H = I + 199 v v', v being signs over sqrt(K), so H^-1 = I - 0.995 v v', and U row by row
     * from H^-1 = U'U. */
    double v[K];
    for (int k = 0; k < K; k++) v[k] = (mn_rng_bits(11, 0, (uint64_t)k) & 1 ? 1 : -1) / sqrt(K);
    static float u[K * K];
    static double a[K][K];
    for (int i = 0; i < K; i++) {
        for (int k = 0; k < K; k++) a[i][k] = (i == k) - 0.995 * v[i] * v[k];
    }
    for (int i = 0; i < K; i++) {
        for (int k = i; k < K; k++) {
            double sum = a[i][k];
            for (int m = 0; m < i; m++) sum -= (double)u[m * K + i] * u[m * K + k];
            u[i * K + k] = (float)(k == i ? sqrt(sum) : sum / u[i * K + i]);
        }
    }
    double output[2];
    for (int with = 0; with < 2; with++) {
        mn_quant_stored s = room(4, N, K, 32);
        const mn_quantize_how how = { .inverse = with ? u : NULL };
        double error, all;
        assert_int_equal(mn_quantize(&s, w, &how, NULL, &error, &all), MN_OK);
        mn_quant *q = NULL;
        assert_int_equal(mn_quant_load(&q, &s), MN_OK);
        output[with] = 0.0;
        for (int j = 0; j < N; j++) {    // d H d' of each row's error d
            double square = 0.0, along = 0.0;
            for (int k = 0; k < K; k++) {
                const double d = (double)mn_quant_weight(q, j, k) - w[j * K + k];
                square += d * d;
                along += d * v[k];
            }
            output[with] += square + 199.0 * along * along;
        }
        mn_quant_free(q);
        drop(&s);
    }
    if (!(output[1] < 0.5 * output[0])) fail_msg("%g not under half of %g", output[1], output[0]);
    free(w);
}

static void files_and_memory_agree(void **state) {
    (void)state;
    for (int bits = 4; bits <= 8; bits += 4) {
        float *w = numbers(35 * 71, 8);
        mn_quant_stored s = quantized(bits, w, 35, 71, 32), back = room(bits, 35, 71, 32);
        const mn_quant_sizes sizes = mn_quant_stored_sizes(&s);
        mn_quant *q = NULL;
        assert_int_equal(mn_quant_check(&s, "w"), MN_OK);
        assert_int_equal(mn_quant_load(&q, &s), MN_OK);
        mn_quant_store(&back, q);
        assert_memory_equal(s.codes, back.codes, sizes.codes);
        assert_memory_equal(s.scales, back.scales, sizes.scales);
        if (bits == 4) assert_memory_equal(s.least, back.least, sizes.least);
        unsigned char *codes = malloc(mn_quant_device_codes_bytes(q));
        uint32_t *scales = malloc(mn_quant_device_scales_bytes(q));
        assert_true(codes && scales);
        mn_quant_to_device_form(codes, (unsigned char *)scales, q);
        for (int64_t row = 0; row < 35; row++) {
            const int64_t bytes = mn_quant_file_row(q);
            assert_memory_equal(codes + row * mn_quant_row_bytes(q),
                                (unsigned char *)s.codes + row * bytes, (size_t)bytes);
        }
        if (bits == 4) assert_int_equal(scales[3] & 0xffff, ((uint16_t *)s.scales)[3]);
        else assert_memory_equal(scales, s.scales, sizes.scales);
        free(codes);
        free(scales);
        mn_quant_free(q);
        drop(&s);
        drop(&back);
        free(w);
    }
}

static void what_is_no_number_is_refused(void **state) {
    (void)state;
    float *w = numbers(20 * 40, 9);
    for (int bits = 4; bits <= 8; bits += 4) {
        mn_quant_stored s = quantized(bits, w, 20, 40, 32);
        if (bits == 8) ((float *)s.scales)[5] = NAN;
        else ((uint16_t *)s.least)[5] = 0x7c00;
        assert_int_equal(mn_quant_check(&s, "weights"), MN_ERR_FORMAT);
        assert_non_null(strstr(mn_last_error(), "weights: the scale of group 1 of row 2"));
        drop(&s);
    }
    mn_quant_stored s = quantized(8, w, 20, 40, 32);
    ((int8_t *)s.codes)[7] = -128;
    assert_int_equal(mn_quant_check(&s, "w"), MN_ERR_FORMAT);
    assert_non_null(strstr(mn_last_error(), "-128"));
    double error, all;
    w[77] = INFINITY;
    assert_int_equal(mn_quantize(&s, w, NULL, NULL, &error, &all), MN_ERR_ARGUMENT);
    drop(&s);
    s = room(4, 20, 40, 32);
    w[77] = 1e6f;
    assert_int_equal(mn_quantize(&s, w, NULL, NULL, &error, &all), MN_ERR_ARGUMENT);
    assert_non_null(strstr(mn_last_error(), "float16"));
    drop(&s);
    free(w);
}

/* Rows are quantised apart: threads change nothing. */
static void threads_change_nothing(void **state) {
    (void)state;
    mn_context *three = open_context(MN_TARGET_REF, 3);
    float *w = numbers(50 * 96, 10);
    mn_quant_stored a = quantized(4, w, 50, 96, 32), b = room(4, 50, 96, 32);
    double error, all;
    assert_int_equal(mn_quantize(&b, w, NULL, three->threads, &error, &all), MN_OK);
    const mn_quant_sizes sizes = mn_quant_stored_sizes(&a);
    assert_memory_equal(a.codes, b.codes, sizes.codes);
    assert_memory_equal(a.scales, b.scales, sizes.scales);
    assert_memory_equal(a.least, b.least, sizes.least);
    drop(&a);
    drop(&b);
    free(w);
    mn_context_destroy(three);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_have_the_bits_of_float32),
        cmocka_unit_test(products_are_right),
        cmocka_unit_test(exact_weights_stay),
        cmocka_unit_test(four_bits_beat_rounding),
        cmocka_unit_test(errors_are_made_good),
        cmocka_unit_test(files_and_memory_agree),
        cmocka_unit_test(what_is_no_number_is_refused),
        cmocka_unit_test(threads_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
