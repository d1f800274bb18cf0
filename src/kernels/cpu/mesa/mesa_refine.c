/* mesa_refine.c - x = (H + diag lam)^-1 b for the one token of a decode step.
 *
 *   U'U = H + diag lam         in float32, by rows of blocks
 *   x <- x + (U'U)^-1 r        r = b - (H + diag lam) x in double, from x = 0 on
 *
 * Each correction leaves about cond(M) 2^-24 of the error, and the ratio of one to the one before
 * estimates that factor, so x becomes as exact as with a factor in double, in half the time
 * (K^3 / 6 multiply-adds, twice as many in a vector). Where the ratio is too large, or a pivot is
 * not positive, the caller factorises in double.
 *
 * A block of MN_VW rows begins as those of M less the products of all rows above, taken from tiles
 * in registers. With R'R = D for its block D on the diagonal, the block row of U is R^-T times what
 * is left. Inverses of all R are kept, so substitutions divide nowhere. */
#include "kernels/cpu/mesa/mesa.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/simd/ahead.h"
#include "kernels/cpu/simd/lanes.h"

enum { BLOCK = MN_VW, TILE_ROWS = 4, TILE_VECTORS = 2 };
/* Floats after a row of U: rows a multiple of 512 bytes apart would share few sets of the cache. */
enum { GAP = 16 };
enum { MOST_ROUNDS = 6 };
/* In the norm of M: what a correction may be of the one before, and where x is done. */
static const double largest_rate = 0.25, stop_error = 1e-8;

static int64_t padded(int64_t K) {
    return mn_ceil_div(K, BLOCK) * BLOCK;
}

/* Floats, then doubles, each part whole vectors. */
bool MN_T(mn_mesa_refiner_bytes)(size_t *bytes, int64_t K) {
    int64_t N, square, floats;
    size_t doubles;
    if (!mn_add_i64(&N, K, BLOCK - 1)) return false;
    N = padded(K);
    return mn_mul_i64(&square, N, 2 * (int64_t)sizeof(float)) && mn_mul_i64(&square, square, N) &&
           mn_mul_i64(&floats, N, (GAP + 2 * BLOCK + 1) * (int64_t)sizeof(float)) &&
           mn_add_i64(&square, square, floats) &&
           mn_mul_size(&doubles, (size_t)N, 3 * sizeof(double)) &&
           mn_add_size(bytes, (size_t)square, doubles);
}

void MN_T(mn_mesa_refiner_place)(mn_mesa_refiner *s, void *memory, int64_t K) {
    const int64_t N = padded(K);
    s->K = K;
    s->N = N;
    s->row = N + GAP;
    s->b = memory;
    s->x = s->b + N;
    s->r = s->x + N;
    s->H = (float *)(s->r + N);
    s->U = s->H + N * N;
    s->inverse = s->U + N * s->row;
    s->inverse_t = s->inverse + N * BLOCK;
    s->d = s->inverse_t + N * BLOCK;
    for (int64_t i = K; i < N; i++) {    // beyond K the unit matrix
        memset(s->H + i * N, 0, (size_t)N * sizeof *s->H);
        s->H[i * N + i] = 1.0f;
        s->b[i] = 0.0;
    }
}

/* ---- the factor ------------------------------------------------------------------------------ */

/* Asks for a line of what is wanted next. */
static inline void look_ahead(mn_mesa_ahead *a) {
    if (a->lines == 0) {
        a->at = a->next;
        a->lines = a->next_lines;
        a->next_lines = 0;
    }
    __builtin_prefetch(a->at, 0, 2);
    if (a->lines > 0 && --a->lines > 0) a->at += MN_LINE;
}

/* Rows i .. of U from column c on: those of H less the products of the first n rows of U. rows and
 * vectors are constants where this is expanded. */
MN_ALWAYS_INLINE void take_products(const mn_mesa_refiner *s, int64_t i, int64_t c, int64_t n,
                                    int rows, int vectors, mn_mesa_ahead *ahead) {
    vf y[BLOCK][TILE_VECTORS];
    MN_UNROLL
    for (int r = 0; r < rows; r++) {
        MN_UNROLL
        for (int v = 0; v < vectors; v++) {
            y[r][v] = vf_load(s->H + (i + r) * s->N + c + v * MN_VW);
        }
    }
    const float *row = s->U;
    mn_mesa_ahead wanted = *ahead;
    for (int64_t k = 0; k < n; k += 2) {    // n is a multiple of BLOCK
        look_ahead(&wanted);
        MN_UNROLL
        for (int p = 0; p < 2; p++, row += s->row) {
            vf b[TILE_VECTORS];
            MN_UNROLL
            for (int v = 0; v < vectors; v++) b[v] = vf_load(row + c + v * MN_VW);
            MN_UNROLL
            for (int r = 0; r < rows; r++) {
                const vf a = vf_set1(row[i + r]);
                MN_UNROLL
                for (int v = 0; v < vectors; v++) y[r][v] = vf_fnma(a, b[v], y[r][v]);
            }
        }
    }
    *ahead = wanted;
    MN_UNROLL
    for (int r = 0; r < rows; r++) {
        MN_UNROLL
        for (int v = 0; v < vectors; v++) {
            vf_store(s->U + (i + r) * s->row + c + v * MN_VW, y[r][v]);
        }
    }
}

/* W = R^-T of R'R = D, the block at (i, i) of U with lam added: what makes R of D makes W of the
 * unit matrix. False where a pivot is not positive. */
static bool factor_block(mn_mesa_refiner *s, const float *lam, int64_t i) {
    _Alignas(64) float D[BLOCK][MN_VW], W[BLOCK][MN_VW];
    for (int r = 0; r < BLOCK; r++) {
        vf_store(D[r], vf_load(s->U + (i + r) * s->row + i));
        vf_store(W[r], vf_zero());
        W[r][r] = 1.0f;
        if (i + r < s->K) D[r][r] += lam[i + r];
    }
    for (int p = 0; p < BLOCK; p++) {
        const float pivot = D[p][p];
        if (!(pivot > 0.0f)) return false;
        const vf over = vf_set1(1.0f / sqrtf(pivot));
        const vf d = vf_mul(over, vf_load(D[p])), w = vf_mul(over, vf_load(W[p]));
        vf_store(D[p], d);
        vf_store(W[p], w);
        for (int r = p + 1; r < BLOCK; r++) {
            const vf a = vf_set1(D[p][r]);
            vf_store(D[r], vf_fnma(a, d, vf_load(D[r])));
            vf_store(W[r], vf_fnma(a, w, vf_load(W[r])));
        }
    }
    memcpy(s->inverse + i * BLOCK, W, sizeof W);
    MN_T(mn_transpose)(s->inverse_t + i * BLOCK, BLOCK, W[0], MN_VW, BLOCK, BLOCK);
    return true;
}

/* The block row at i, right of the diagonal, times W. */
static void scale_block_row(mn_mesa_refiner *s, int64_t i) {
    const float *W = s->inverse + i * BLOCK;
    for (int64_t c = i + BLOCK; c < s->N; c += MN_VW) {
        float *at = s->U + i * s->row + c;
        vf a[BLOCK];
        MN_UNROLL
        for (int r = 0; r < BLOCK; r++) a[r] = vf_load(at + r * s->row);
        MN_UNROLL
        for (int r = 0; r < BLOCK; r++) {
            vf y = vf_mul(vf_set1(W[r * BLOCK]), a[0]);
            MN_UNROLL
            for (int p = 1; p <= r; p++) y = vf_fma(vf_set1(W[r * BLOCK + p]), a[p], y);
            vf_store(at + r * s->row, y);
        }
    }
}

static bool factorise(mn_mesa_refiner *s, const float *lam, mn_mesa_ahead *ahead) {
    for (int64_t i = 0; i < s->N; i += BLOCK) {
        take_products(s, i, i, i, BLOCK, 1, ahead);
        if (!factor_block(s, lam, i)) return false;
        int64_t c = i + BLOCK;
        if ((s->N - c) / MN_VW % 2) {
            take_products(s, i, c, i, BLOCK, 1, ahead);
            c += MN_VW;
        }
        for (; c < s->N; c += TILE_VECTORS * MN_VW) {
            for (int r = 0; r < BLOCK; r += TILE_ROWS) {
                take_products(s, i + r, c, i, TILE_ROWS, TILE_VECTORS, ahead);
            }
        }
        scale_block_row(s, i);
    }
    return true;
}

/* ---- the solution ---------------------------------------------------------------------------- */

/* sum_p x[p] A[p] for a block A of rows */
static inline vf combine_rows(const float *A, const float *x) {
    vf even = vf_zero(), odd = vf_zero();
    MN_UNROLL
    for (int p = 0; p < BLOCK; p += 2) {
        even = vf_fma(vf_set1(x[p]), vf_load(A + p * BLOCK), even);
        odd = vf_fma(vf_set1(x[p + 1]), vf_load(A + (p + 1) * BLOCK), odd);
    }
    return vf_add(even, odd);
}

/* d <- (U'U)^-1 d */
static void substitute(mn_mesa_refiner *s) {
    _Alignas(64) float sums[BLOCK * MN_VW], left[BLOCK];
    float *d = s->d;
    for (int64_t i = 0; i < s->N; i += BLOCK) {
        vf_store(d + i, combine_rows(s->inverse_t + i * BLOCK, d + i));
        vf a[BLOCK];
        MN_UNROLL
        for (int p = 0; p < BLOCK; p++) a[p] = vf_set1(d[i + p]);
        for (int64_t c = i + BLOCK; c < s->N; c += MN_VW) {
            const float *at = s->U + i * s->row + c;
            vf y = vf_load(d + c);
            MN_UNROLL
            for (int p = 0; p < BLOCK; p++) y = vf_fnma(a[p], vf_load(at + p * s->row), y);
            vf_store(d + c, y);
        }
    }
    for (int64_t i = s->N - BLOCK; i >= 0; i -= BLOCK) {
        vf sum[BLOCK];
        MN_UNROLL
        for (int p = 0; p < BLOCK; p++) sum[p] = vf_zero();
        for (int64_t c = i + BLOCK; c < s->N; c += MN_VW) {
            const float *at = s->U + i * s->row + c;
            const vf x = vf_load(d + c);
            MN_UNROLL
            for (int p = 0; p < BLOCK; p++) sum[p] = vf_fma(x, vf_load(at + p * s->row), sum[p]);
        }
        MN_UNROLL
        for (int p = 0; p < BLOCK; p++) vf_store(sums + p * MN_VW, sum[p]);
        vf_store(left, vf_sub(vf_load(d + i), lanes_sum_square(sums)));
        vf_store(d + i, combine_rows(s->inverse + i * BLOCK, left));
    }
}

/* Columns c .. of r less those of x H. `vectors` is a constant where this is expanded. */
MN_ALWAYS_INLINE void subtract_columns(mn_mesa_refiner *s, int64_t c, int vectors) {
    vd y[8];
    MN_UNROLL
    for (int v = 0; v < vectors; v++) y[v] = vd_load(s->r + c + v * MN_VD);
    for (int64_t i = 0; i < s->K; i++) {
        const vd x = vd_set1(s->x[i]);
        const float *row = s->H + i * s->N + c;
        MN_UNROLL
        for (int v = 0; v < vectors; v++) {
            y[v] = vd_fnma(x, vd_load_floats(row + v * MN_VD), y[v]);
        }
    }
    MN_UNROLL
    for (int v = 0; v < vectors; v++) vd_store(s->r + c + v * MN_VD, y[v]);
}

/* r = b - (H + diag lam) x; H is symmetric, so that its rows serve as columns. */
static void find_residual(mn_mesa_refiner *s, const float *lam) {
    for (int64_t i = 0; i < s->N; i++) s->r[i] = s->b[i];
    for (int64_t i = 0; i < s->K; i++) s->r[i] -= lam[i] * s->x[i];
    int64_t c = 0;
    for (; c + 8 * MN_VD <= s->N; c += 8 * MN_VD) subtract_columns(s, c, 8);
    for (; c < s->N; c += 2 * MN_VD) subtract_columns(s, c, 2);
}

/* x <- x + d; returns the square of d in the norm of M, r'd. */
static double correct(mn_mesa_refiner *s) {
    double part[4] = { 0.0, 0.0, 0.0, 0.0 };
    for (int64_t i = 0; i < s->N; i += 4) {
        for (int64_t l = i; l < i + 4; l++) {
            part[l - i] = fma(s->r[l], s->d[l], part[l - i]);
            s->x[l] += s->d[l];
        }
    }
    return (part[0] + part[1]) + (part[2] + part[3]);
}

bool MN_T(mn_mesa_refine)(mn_mesa_refiner *s, const float *lam, mn_mesa_ahead ahead) {
    if (!factorise(s, lam, &ahead)) return false;
    double first = 0.0, before = 0.0;
    for (int64_t i = 0; i < s->N; i++) s->x[i] = 0.0;
    memcpy(s->r, s->b, (size_t)s->N * sizeof *s->r);
    for (int round = 0; round < MOST_ROUNDS; round++) {
        if (round > 0) find_residual(s, lam);
        for (int64_t i = 0; i < s->N; i++) s->d[i] = (float)s->r[i];
        substitute(s);
        const double square = correct(s);
        if (round == 0) {
            first = square;
            if (!(first > 0.0)) return false;
        } else {
            const double rate = square / before;
            if (!(rate >= 0.0 && rate <= largest_rate * largest_rate)) return false;
            if (rate * square <= stop_error * stop_error * first) return true;
        }
        before = square;
        if (square == 0.0) return true;
    }
    return false;
}
