/* test_vec.c - the vector layer: small products and elementary functions, on every target here.
 *
 * Operands end where an inaccessible page begins, so a read or write beyond the last element is a
 * crash; outputs stand between guard words; padding inside operands is NaN, so using it shows. */
// labels: sanitize
#if MN_HAVE_AVX2 || MN_HAVE_AVX512 || MN_HAVE_NEON

#include "kernels/cpuid.h"
#include "kernels/cpu/simd/vector_targets.h"

#define MN_PER_TARGET "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/simd/per_target.h"
#define MN_PER_TARGET "kernels/cpu/simd/map.h"
#include "kernels/cpu/simd/per_target.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/mman.h>
#include <unistd.h>

#define COUNTOF(array) ((int)(sizeof(array) / sizeof((array)[0])))

typedef void gemm_function(const mn_gemm_args *p);
typedef void map_function(float *y, const float *x, int64_t n);
typedef void transpose_function(float *, int64_t, const float *, int64_t, int64_t, int64_t);

enum { EXP, EXPM1, LOG, LOG1P, SIGMOID, SOFTPLUS, TANH, N_MAPS };

typedef struct {
    const char *name;
    int width;
    bool (*available)(void);
    gemm_function *gemm, *gemm_nt;
    transpose_function *transpose;
    map_function *map[N_MAPS];
    float (*sum)(const float *x, int64_t n), (*max)(const float *x, int64_t n);
} target;

enum { WIDTH_avx2 = 8, WIDTH_avx512 = 16, WIDTH_neon = 8 };    // floats of a vector

#define TARGET(id, name)                                                                       \
    {                                                                                          \
        #name, WIDTH_##name, mn_cpu_has_##name, mn_gemm_##name, mn_gemm_nt_##name,             \
        mn_transpose_##name,                                                                   \
        { mn_map_exp_##name, mn_map_expm1_##name, mn_map_log_##name, mn_map_log1p_##name,      \
          mn_map_sigmoid_##name, mn_map_softplus_##name, mn_map_tanh_##name },                 \
        mn_map_sum_##name, mn_map_max_##name                                                   \
    },
static const target targets[] = {
    MN_VECTOR_TARGETS(TARGET)
};

#define FOR_TARGETS(t)                                                                         \
    for (const target *t = targets; t < targets + COUNTOF(targets); t++)                       \
        if (t->available())

/* Repeatable numbers: a hash of a running counter. */
static uint64_t draws;

static uint32_t draw(void) {
    uint64_t z = ++draws * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}

static float draw_unit(void) {      // [-1, 1)
    return (float)((int32_t)(draw() >> 8) - (1 << 23)) * 0x1p-23f;
}

static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Memory for n floats whose end is the end of accessible memory. */
enum { BUFFERS = 5, BUFFER_FLOATS = 1 << 20 };

static float *at_page_end(int which, int64_t n) {
    static float *buffers[BUFFERS];
    const size_t bytes = BUFFER_FLOATS * sizeof(float), page = (size_t)sysconf(_SC_PAGESIZE);
    assert_true(n >= 0 && n <= BUFFER_FLOATS);
    if (!buffers[which]) {
        char *p = mmap(NULL, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                       -1, 0);
        assert_true(p != MAP_FAILED);
        assert_int_equal(mprotect(p + bytes, page, PROT_NONE), 0);
        buffers[which] = (float *)(void *)p;
    }
    return buffers[which] + BUFFER_FLOATS - n;
}

static const uint32_t GUARD = 0x7fc0abcd;       // a NaN with a payload no arithmetic makes

static void fill_guard(float *p, int64_t n) {
    for (int64_t i = 0; i < n; i++) memcpy(p + i, &GUARD, sizeof *p);
}

/* A product to be checked: the arguments, what C was before, and where it all lies. */
typedef struct {
    mn_gemm_args p;
    bool transposed_b;
    float *before;              // C as it was, with its guards
    float *c_block;             // `c_floats` floats: a guarded row, then C
    int64_t c_floats;
} product;

static float a_at(const product *g, int64_t i, int64_t k) {
    return g->p.a[i * g->p.a_row + k * g->p.a_col];
}

static float b_at(const product *g, int64_t k, int64_t j) {
    return g->p.b[g->transposed_b ? j * g->p.b_row + k : k * g->p.b_row + j];
}

static int64_t extent(int64_t rows, int64_t row, int64_t cols, int64_t col) {
    return rows && cols ? (rows - 1) * row + (cols - 1) * col + 1 : 0;
}

/* layout 0: rows of A, 1: columns of A, 2: both strides above 1. pad: extra floats in each row. */
static product make_product(int64_t M, int64_t N, int64_t K, bool transposed_b, int layout,
                            int64_t pad) {
    product g = { .p = { .M = M, .N = N, .K = K, .alpha = 1.0f }, .transposed_b = transposed_b };
    mn_gemm_args *p = &g.p;
    p->a_row = layout == 0 ? K + pad : layout == 1 ? 1 : 3 * K + pad;
    p->a_col = layout == 0 ? 1 : layout == 1 ? M + pad : 3;
    p->b_row = (transposed_b ? K : N) + pad;
    p->c_row = N + pad;
    const int64_t a_floats = extent(M, p->a_row, K, p->a_col);
    const int64_t b_floats = transposed_b ? extent(N, p->b_row, K, 1) : extent(K, p->b_row, N, 1);
    float *a = at_page_end(0, a_floats), *b = at_page_end(1, b_floats);
    float *scale = at_page_end(2, M);
    fill_guard(a, a_floats);
    fill_guard(b, b_floats);
    for (int64_t i = 0; i < M; i++) {
        for (int64_t k = 0; k < K; k++) a[i * p->a_row + k * p->a_col] = draw_unit();
        scale[i] = draw_unit();
    }
    for (int64_t r = 0; r < (transposed_b ? N : K); r++) {
        for (int64_t c = 0; c < (transposed_b ? K : N); c++) b[r * p->b_row + c] = draw_unit();
    }
    p->a = a;
    p->b = b;
    p->c_scale = scale;

    g.c_floats = p->c_row + extent(M, p->c_row, N, 1);
    g.c_block = at_page_end(3, g.c_floats);
    g.before = at_page_end(4, g.c_floats);
    fill_guard(g.before, g.c_floats);
    p->c = g.c_block + p->c_row;
    for (int64_t i = 0; i < M; i++) {
        for (int64_t j = 0; j < N; j++) g.before[(i + 1) * p->c_row + j] = draw_unit();
    }
    return g;
}

static float old_c(const product *g, int64_t i, int64_t j) {
    return g->before[(i + 1) * g->p.c_row + j];
}

/* The definition in gemm.h, word for word. */
static float chain(const product *g, int64_t i, int64_t j) {
    float s = 0.0f;
    for (int64_t k = 0; k < g->p.K; k++) s = fmaf(a_at(g, i, k), b_at(g, k, j), s);
    const float t = g->p.alpha * s;
    if (g->p.base == MN_GEMM_SET) return t;
    if (g->p.base == MN_GEMM_ADD) return old_c(g, i, j) + t;
    return fmaf(g->p.c_scale[i], old_c(g, i, j), t);
}

/* K products and sums: each of the K fused steps rounds a partial sum that is at most sum|a||b|
 * (1 + K u), u = eps/2; alpha and base round once more each. As K u < 1e-3, eps covers it. */
static void check_close(const product *g, int64_t i, int64_t j, float got) {
    double sum = 0, size = 0;
    for (int64_t k = 0; k < g->p.K; k++) {
        const double term = (double)a_at(g, i, k) * b_at(g, k, j);
        sum += term;
        size += fabs(term);
    }
    const double base = g->p.base == MN_GEMM_SET ? 0
                      : g->p.base == MN_GEMM_ADD ? (double)old_c(g, i, j)
                                                 : (double)g->p.c_scale[i] * old_c(g, i, j);
    const double want = base + g->p.alpha * sum;
    const double most = FLT_EPSILON * ((double)g->p.K * fabs(g->p.alpha) * size + fabs(want)
                                       + fabs(g->p.alpha) * size);
    if (fabs(got - want) > most) {
        fail_msg("C[%d,%d] of %dx%dx%d is %.9g, should be %.9g within %.3g", (int)i, (int)j,
                 (int)g->p.M, (int)g->p.N, (int)g->p.K, (double)got, want, most);
    }
}

/* Runs the product. Elements asked for must be the chain, bit for bit, and near the exact value;
 * everything that is no element of C must be untouched. */
static void check_product(const target *t, product *g, bool measure) {
    const mn_gemm_args *p = &g->p;
    memcpy(g->c_block, g->before, (size_t)g->c_floats * sizeof(float));
    (g->transposed_b ? t->gemm_nt : t->gemm)(p);
    for (int64_t at = 0; at < g->c_floats; at++) {
        const int64_t i = at / p->c_row - 1, j = at % p->c_row;
        const float got = g->c_block[at];
        if (i < 0 || j >= p->N) {
            if (bits_of(got) != GUARD) fail_msg("%s wrote outside C, near row %d", t->name, (int)i);
            continue;
        }
        if (p->shape == MN_GEMM_C_LOWER && j > i) continue;
        const float want = chain(g, i, j);
        if (bits_of(got) != bits_of(want)) {
            fail_msg("%s %s %dx%dx%d shape %d base %d alpha %g: C[%d,%d] is %.9g, chain %.9g",
                     t->name, g->transposed_b ? "nt" : "nn", (int)p->M, (int)p->N, (int)p->K,
                     (int)p->shape, (int)p->base, (double)p->alpha, (int)i, (int)j, (double)got,
                     (double)want);
        }
        if (measure) check_close(g, i, j, got);
    }
}

static const int sizes[] = { 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100 };
static const float alphas[] = { 1.0f, -1.0f, 0.3f };

/* Every size against every size; layout, padding, base and alpha take turns. */
static void test_gemm_is_the_chain(void **state) {
    (void)state;
    FOR_TARGETS(t) {
        uint32_t turn = 0;
        for (int m = 0; m < COUNTOF(sizes); m++) {
            for (int n = 0; n < COUNTOF(sizes); n++) {
                for (int k = 0; k < COUNTOF(sizes); k++, turn = turn * 5 + 7) {
                    const uint32_t pick = turn >> 8;
                    product g = make_product(sizes[m], sizes[n], sizes[k], pick & 1,
                                             (int)(pick / 2 % 3), pick / 6 % 2 ? 5 : 0);
                    g.p.base = (mn_gemm_base)(pick / 12 % 3);
                    g.p.alpha = alphas[pick / 36 % 3];
                    check_product(t, &g, k % 3 == 0);
                }
            }
        }
    }
}

/* All settings at sizes around the tile and vector edges. */
static void test_gemm_settings(void **state) {
    (void)state;
    static const int edges[][3] = { { 1, 1, 1 }, { 6, 64, 5 }, { 7, 33, 9 }, { 13, 17, 31 },
                                    { 24, 48, 16 }, { 25, 50, 7 }, { 2, 130, 3 } };
    FOR_TARGETS(t) {
        for (int s = 0; s < COUNTOF(edges) * 2 * 3 * 2 * 3 * 3; s++) {
            const int *e = edges[s / 108];
            product g = make_product(e[0], e[1], e[2], s % 2, s / 2 % 3, s / 6 % 2 ? 3 : 0);
            g.p.base = (mn_gemm_base)(s / 12 % 3);
            g.p.alpha = alphas[s / 36 % 3];
            check_product(t, &g, true);
        }
    }
}

/* Sizes beyond one packed part of B: K cut in parts, rows in blocks, rows of B pages apart. */
static void test_gemm_large(void **state) {
    (void)state;
    static const int large[][3] = { { 100, 33, 700 }, { 5, 70, 300 }, { 97, 16, 513 },
                                    { 30, 40, 1100 }, { 1, 64, 129 } };
    FOR_TARGETS(t) {
        for (int s = 0; s < COUNTOF(large); s++) {
            for (int kind = 0; kind < 4; kind++) {
                product g = make_product(large[s][0], large[s][1], large[s][2], kind % 2, 0,
                                         kind / 2 ? 512 : 1);
                g.p.base = MN_GEMM_SCALE;
                g.p.alpha = 0.3f;
                check_product(t, &g, true);
            }
        }
    }
}

static void test_gemm_triangles(void **state) {
    (void)state;
    static const int ks[] = { 1, 16, 33, 100, 600 };
    FOR_TARGETS(t) {
        for (int m = 0; m < COUNTOF(sizes); m++) {
            for (int n = 0; n < COUNTOF(sizes); n++) {
                for (int kind = 0; kind < COUNTOF(ks) * 6; kind++) {
                    if (ks[kind / 6] == 600 && (m + n) % 5) continue;
                    product g = make_product(sizes[m], sizes[n], ks[kind / 6], kind % 2,
                                             (m + n) % 3, n % 2 ? 600 : 0);
                    g.p.shape = (mn_gemm_shape)(MN_GEMM_C_LOWER + kind / 2 % 3);
                    g.p.base = (mn_gemm_base)(m % 3);
                    float *a = at_page_end(0, extent(g.p.M, g.p.a_row, g.p.K, g.p.a_col));
                    for (int64_t i = 0; i < g.p.M; i++) {
                        for (int64_t k = 0; k < g.p.K; k++) {
                            const bool zero = g.p.shape == MN_GEMM_A_LOWER ? k > i
                                            : g.p.shape == MN_GEMM_A_UPPER ? k < i : false;
                            if (zero) a[i * g.p.a_row + k * g.p.a_col] = 0.0f;
                        }
                    }
                    check_product(t, &g, false);
                }
            }
        }
    }
}

/* Each triangle must leave work out, or it is only a promise: what it skips is NaN here, in rows
 * and columns a whole tile away from the diagonal. */
static void test_triangles_skip(void **state) {
    (void)state;
    enum { n = 96, tile = 32 };
    FOR_TARGETS(t) {
        for (int transposed = 0; transposed < 2; transposed++) {
            product g = make_product(n, n, n, transposed, 0, 0);
            memcpy(g.c_block, g.before, (size_t)g.c_floats * sizeof(float));
            g.p.shape = MN_GEMM_C_LOWER;
            (transposed ? t->gemm_nt : t->gemm)(&g.p);
            for (int i = 0; i < n; i++) {
                for (int j = i + tile; j < n; j++) {
                    assert_true(bits_of(g.p.c[i * n + j]) == bits_of(old_c(&g, i, j)));
                }
            }
            float *b = at_page_end(1, n * n);
            for (int upper = 0; upper < 2; upper++) {
                const int poisoned = upper ? 0 : n - 1;     // the row of B all but a few rows skip
                g = make_product(n, n, n, transposed, 0, 0);
                for (int j = 0; j < n; j++) {
                    b[transposed ? j * n + poisoned : poisoned * n + j] = NAN;
                }
                g.p.shape = upper ? MN_GEMM_A_UPPER : MN_GEMM_A_LOWER;
                (transposed ? t->gemm_nt : t->gemm)(&g.p);
                for (int i = 0; i < n; i++) {
                    if (abs(i - poisoned) < tile) continue;
                    for (int j = 0; j < n; j++) assert_true(g.p.c[i * n + j] == g.p.c[i * n + j]);
                }
            }
        }
    }
}

/* A block computed alone, at any place and size, has the bits it has inside the whole. */
static void test_gemm_element_ignores_its_place(void **state) {
    (void)state;
    enum { M = 70, N = 90, K = 40 };
    FOR_TARGETS(t) {
        product g = make_product(M, N, K, false, 0, 0);
        static float whole[M * N], block[M * N];
        mn_gemm_args p = g.p;
        p.c = whole;
        p.c_row = N;
        t->gemm(&p);
        for (int round = 0; round < 400; round++) {
            const int64_t i = draw() % M, j = draw() % N;
            mn_gemm_args q = p;
            q.M = 1 + draw() % (uint32_t)(M - i);
            q.N = 1 + draw() % (uint32_t)(N - j);
            q.a += i * q.a_row;
            q.b += j;
            q.c = block;
            q.c_row = q.N;
            t->gemm(&q);
            for (int64_t r = 0; r < q.M; r++) {
                assert_memory_equal(block + r * q.N, whole + (i + r) * N + j,
                                    (size_t)q.N * sizeof(float));
            }
        }
    }
}

/* No rows, no columns, or nothing to sum; and C that is NaN is not read by SET. */
static void test_gemm_empty(void **state) {
    (void)state;
    FOR_TARGETS(t) {
        for (int kind = 0; kind < 24; kind++) {
            const int none = kind / 8;      // which size is 0
            product g = make_product(none == 0 ? 0 : 9, none == 1 ? 0 : 19, none == 2 ? 0 : 4,
                                     kind % 2, 0, 2);
            g.p.base = (mn_gemm_base)(kind / 2 % 3);
            check_product(t, &g, false);
        }
        product g = make_product(9, 19, 4, false, 0, 0);
        for (int64_t i = 0; i < 9 * 19; i++) g.before[19 + i] = NAN;
        check_product(t, &g, true);
    }
}

static void test_transpose(void **state) {
    (void)state;
    FOR_TARGETS(t) {
        for (int r = 0; r < COUNTOF(sizes); r++) {
            for (int c = 0; c < COUNTOF(sizes); c++) {
                const int64_t rows = sizes[r], cols = sizes[c], pad = (r + c) % 3;
                const int64_t src_row = cols + pad, dst_row = rows + pad;
                const int64_t n_src = extent(rows, src_row, cols, 1);
                const int64_t n_dst = dst_row + extent(cols, dst_row, rows, 1);
                float *src = at_page_end(0, n_src), *dst = at_page_end(1, n_dst);
                for (int64_t i = 0; i < n_src; i++) src[i] = draw_unit();
                fill_guard(dst, n_dst);
                t->transpose(dst + dst_row, dst_row, src, src_row, rows, cols);
                for (int64_t at = 0; at < n_dst; at++) {
                    const int64_t y = at / dst_row - 1, x = at % dst_row;
                    const bool inside = y >= 0 && x < rows;
                    const uint32_t want = inside ? bits_of(src[x * src_row + y]) : GUARD;
                    assert_int_equal(bits_of(dst[at]), want);
                }
            }
        }
    }
}

static double exact_sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double exact_softplus(double x) { return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x)); }

/* Bounds in units in the last place: the largest error found over a third of a billion arguments,
 * rounded up to a tenth. A value near its bound leaves a target no room for a sloppier formula. */
static const struct {
    const char *name;
    double (*exact)(double x);
    double most_ulp;
} maps[N_MAPS] = {
    [EXP] = { "exp", exp, 1.1 },
    [EXPM1] = { "expm1", expm1, 1.6 },
    [LOG] = { "log", log, 0.9 },
    [LOG1P] = { "log1p", log1p, 1.5 },
    [SIGMOID] = { "sigmoid", exact_sigmoid, 2.4 },
    [SOFTPLUS] = { "softplus", exact_softplus, 1.8 },
    [TANH] = { "tanh", tanh, 1.5 },
};

/* Infinity counts as 2^128, the number above the largest float. */
static double ulps(float got, double want) {
    int e;
    if (isnan(want) || isnan(got)) return isnan(want) && isnan(got) ? 0 : INFINITY;
    const double near = isinf(got) ? copysign(0x1p128, got) : (double)got;
    want = fmax(-0x1p128, fmin(0x1p128, want));
    frexp(want, &e);
    if (want == 0 || e < FLT_MIN_EXP) e = FLT_MIN_EXP;
    return fabs(near - want) / ldexp(1, e - FLT_MANT_DIG);
}

static void check_map(const target *t, int f, const float *x, int n) {
    float y[1024];
    assert_true(n <= COUNTOF(y));
    t->map[f](y, x, n);
    for (int i = 0; i < n; i++) {
        const double off = ulps(y[i], maps[f].exact(x[i]));
        if (!(off <= maps[f].most_ulp)) {
            fail_msg("%s %s(%a) is %a, should be %a: %.2f ulp", t->name, maps[f].name,
                     (double)x[i], (double)y[i], maps[f].exact(x[i]), off);
        }
    }
}

/* Every 4099th float, NaNs and infinities among them: over a million arguments of each function.
 * Then a finer walk where the functions change most. */
static void test_maps_are_accurate(void **state) {
    (void)state;
    FOR_TARGETS(t) {
        for (int f = 0; f < N_MAPS; f++) {
            float x[1024];
            for (uint64_t u = 0; u <= UINT32_MAX;) {
                int n = 0;
                for (; n < COUNTOF(x) && u <= UINT32_MAX; u += 4099) x[n++] = float_of((uint32_t)u);
                check_map(t, f, x, n);
            }
            for (int i = -200; i < 200; i++) {
                for (int j = 0; j < COUNTOF(x); j++) {
                    x[j] = ((float)i + (float)j / (float)COUNTOF(x)) * 0.625f;
                }
                check_map(t, f, x, COUNTOF(x));
            }
        }
    }
}

/* The 64 floats on either side of each place where a branch, a limit or a rounding changes. */
static void test_maps_at_seams(void **state) {
    (void)state;
    static const float seams[] = {
        0.0f, FLT_MIN, FLT_MAX, 0x1p-30f, 0x1p-23f, 0.25f, 0.34657359f, 0.5f, 0.55f, 0.70710678f,
        0.75f, 1.0f, 1.41421356f, 2.0f, 17.32868f, 30.0f, 87.33654f, 88.029f, 88.37626f, 88.72283f,
        89.0f, 103.97208f, 104.0f, 16777216.0f, 0x1p126f, 0x1p127f,
    };
    FOR_TARGETS(t) {
        for (int s = 0; s < COUNTOF(seams); s++) {
            float x[256];
            for (int i = 0; i < 128; i++) {
                const int64_t u = (int64_t)bits_of(seams[s]) + i - 64;
                x[i] = float_of((uint32_t)(u < 0 ? 0 : u));
                x[i + 128] = -x[i];
            }
            for (int f = 0; f < N_MAPS; f++) check_map(t, f, x, COUNTOF(x));
        }
    }
}

static void test_maps_at_limits(void **state) {
    (void)state;
    const float inf = INFINITY;
    const struct {
        int f;
        float x, y;         // bit-equal, or both NaN
    } limits[] = {
        { EXP, 0, 1 }, { EXP, -0.0f, 1 }, { EXP, -inf, 0 }, { EXP, inf, inf }, { EXP, 89, inf },
        { EXP, -104, 0 }, { EXP, -FLT_MAX, 0 }, { EXP, -103.97f, 0x1p-149f }, { EXP, NAN, NAN },
        { EXPM1, 0, 0 }, { EXPM1, -0.0f, -0.0f }, { EXPM1, -inf, -1 }, { EXPM1, inf, inf },
        { EXPM1, 0x1p-149f, 0x1p-149f }, { EXPM1, NAN, NAN },
        { LOG, 1, 0 }, { LOG, 0, -inf }, { LOG, -0.0f, -inf }, { LOG, -1, NAN },
        { LOG, -inf, NAN }, { LOG, -0x1p-149f, NAN }, { LOG, inf, inf }, { LOG, NAN, NAN },
        { LOG1P, 0, 0 }, { LOG1P, -0.0f, -0.0f }, { LOG1P, -1, -inf }, { LOG1P, -2, NAN },
        { LOG1P, inf, inf }, { LOG1P, -inf, NAN }, { LOG1P, -0x1p-149f, -0x1p-149f },
        { LOG1P, NAN, NAN },
        { SIGMOID, 0, 0.5f }, { SIGMOID, -inf, 0 }, { SIGMOID, inf, 1 }, { SIGMOID, NAN, NAN },
        { SOFTPLUS, -inf, 0 }, { SOFTPLUS, inf, inf }, { SOFTPLUS, 100, 100 },
        { SOFTPLUS, FLT_MAX, FLT_MAX }, { SOFTPLUS, -103.97f, 0x1p-149f }, { SOFTPLUS, NAN, NAN },
        { TANH, 0, 0 }, { TANH, -0.0f, -0.0f }, { TANH, inf, 1 }, { TANH, -inf, -1 },
        { TANH, 20, 1 }, { TANH, -0x1p-149f, -0x1p-149f }, { TANH, NAN, NAN },
    };
    FOR_TARGETS(t) {
        for (int i = 0; i < COUNTOF(limits); i++) {
            float y;
            t->map[limits[i].f](&y, &limits[i].x, 1);
            const float want = limits[i].y;
            const bool same = bits_of(y) == bits_of(want) || (isnan(y) && isnan(want));
            if (!same) {
                fail_msg("%s %s(%g) is %g, should be %g", t->name, maps[limits[i].f].name,
                         (double)limits[i].x, (double)y, (double)want);
            }
        }
    }
}

/* Any length and place, in place or not, next to a forbidden page: the same bits per element. */
static void test_maps_ignore_place(void **state) {
    (void)state;
    enum { MOST = 67 };
    FOR_TARGETS(t) {
        for (int f = 0; f < N_MAPS; f++) {
            float x[MOST], alone[MOST];
            for (int i = 0; i < MOST; i++) {
                x[i] = 8 * draw_unit() + (f == LOG || f == LOG1P ? 8.0f : 0.0f);
                t->map[f](&alone[i], &x[i], 1);
            }
            for (int n = 0; n <= MOST; n++) {
                float *in = at_page_end(0, n), *out = at_page_end(1, n + 1);
                memcpy(in, x, (size_t)n * sizeof *in);
                fill_guard(out, n + 1);
                t->map[f](out + 1, in, n);
                t->map[f](in, in, n);
                assert_int_equal(bits_of(out[0]), GUARD);
                assert_memory_equal(out + 1, alone, (size_t)n * sizeof *out);
                assert_memory_equal(in, alone, (size_t)n * sizeof *in);

                float guarded[MOST + 1];        // and nothing behind the last element
                fill_guard(guarded, MOST + 1);
                t->map[f](guarded, x, n);
                for (int i = n; i <= MOST; i++) assert_int_equal(bits_of(guarded[i]), GUARD);
            }
        }
    }
}

/* A file moved between machines gives the same numbers whichever target reads it. */
static void test_targets_agree(void **state) {
    (void)state;
    const target *a = &targets[0], *b = &targets[COUNTOF(targets) - 1];
    if (a == b || !a->available() || !b->available()) skip();
    for (int f = 0; f < N_MAPS; f++) {
        float x[1000], y[1000], z[1000];
        for (int round = 0; round < 100; round++) {
            for (int i = 0; i < COUNTOF(x); i++) {
                do x[i] = float_of(draw()); while (isnan(x[i]) || (f == LOG && x[i] < 0)
                                                   || (f == LOG1P && x[i] < -1));
            }
            a->map[f](y, x, COUNTOF(x));
            b->map[f](z, x, COUNTOF(x));
            assert_memory_equal(y, z, sizeof y);
        }
    }
}

/* Lane i sums x[i], x[i + width], ...; then the upper half of the lanes folds onto the lower. */
static void test_sum_and_max(void **state) {
    (void)state;
    FOR_TARGETS(t) {
        for (int n = 0; n <= 100; n++) {
            float *x = at_page_end(0, n), lanes[16] = { 0 }, top = -INFINITY;
            for (int i = 0; i < n; i++) {
                x[i] = draw_unit() - 1.5f;
                lanes[i % t->width] += x[i];
                top = fmaxf(top, x[i]);
            }
            for (int half = t->width / 2; half > 0; half /= 2) {
                for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
            }
            assert_int_equal(bits_of(t->sum(x, n)), bits_of(lanes[0]));
            assert_int_equal(bits_of(t->max(x, n)), bits_of(top));
        }
    }
}

/* A test draws the same numbers alone and after others. */
static int reset_draws(void **state) {
    (void)state;
    draws = 0;
    return 0;
}

#define TEST(f) cmocka_unit_test_setup(f, reset_draws)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_gemm_is_the_chain),
        TEST(test_gemm_settings),
        TEST(test_gemm_large),
        TEST(test_gemm_triangles),
        TEST(test_triangles_skip),
        TEST(test_gemm_element_ignores_its_place),
        TEST(test_gemm_empty),
        TEST(test_transpose),
        TEST(test_maps_are_accurate),
        TEST(test_maps_at_seams),
        TEST(test_maps_at_limits),
        TEST(test_maps_ignore_place),
        TEST(test_targets_agree),
        TEST(test_sum_and_max),
    };
    for (int i = 0; i < COUNTOF(targets); i++) {
        if (!targets[i].available()) printf("%s: not on this machine\n", targets[i].name);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

#include <stdio.h>

int main(void) {
    printf("this build has no vector targets\n");
    return 0;
}

#endif
