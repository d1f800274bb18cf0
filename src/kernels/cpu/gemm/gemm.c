/* gemm.c - register-tiled small products. Contract and order of summation in gemm.h.
 *
 * C is cut into panels of up to four vectors, a panel into tiles of up to twelve rows. A tile
 * keeps its sums in registers over all of K, reading B by vectors and A by broadcast. Its size
 * says which sums are in flight together, never how one of them is formed. */
#include "kernels/cpu/gemm/gemm.h"

#include "base/util.h"
#include "kernels/cpu/simd/columns.h"

#include <stddef.h>

typedef struct {
    float *c;
    int64_t c_row;
    const float *a;
    int64_t a_row, a_col;
    const float *b;
    int64_t b_row, K;
    int head, tail;             // how many k before and after those K only some rows take
    bool stepped;               // every one of them one row more, or one less
    int64_t edge, group;        // else head r: the first (edge + r) / group rows; tail r: all but
                                // the first edge + r group
    const float *start;         // sums of earlier k, whole vectors; NULL: 0
    int64_t start_row;
    const float *c_scale;       // NULL: C is written without being read
    int64_t c_scale_step;       // 0: one factor for all rows
    float alpha;
    int last_lanes;             // used lanes of the rightmost vector, 1 .. MN_VW
} tile_args;

typedef void tile_function(const tile_args *t);

enum { MOST_ROWS = 12, MOST_VECTORS = 4 };

/* C = c_scale*C + alpha*sum, or alpha*sum */
MN_ALWAYS_INLINE void tile_end(const tile_args *t, vf sum[MOST_ROWS][MOST_VECTORS], int rows,
                               int vectors, bool masked) {
    const int whole = masked ? vectors - 1 : vectors;
    const vf alpha = vf_set1(t->alpha);
    const float *scale = t->c_scale;
    float *c = t->c;
    MN_UNROLL
    for (int i = 0; i < rows; i++) {
        vf *y = sum[i];
        MN_UNROLL
        for (int j = 0; j < vectors; j++) y[j] = vf_mul(alpha, y[j]);
        if (scale) {
            const vf s = vf_set1(scale[i * t->c_scale_step]);
            MN_UNROLL
            for (int j = 0; j < whole; j++) y[j] = vf_fma(s, vf_load(c + j * MN_VW), y[j]);
            if (masked) {
                y[whole] = vf_fma(s, vf_load_n(c + whole * MN_VW, t->last_lanes), y[whole]);
            }
        }
        MN_UNROLL
        for (int j = 0; j < whole; j++) vf_store(c + j * MN_VW, y[j]);
        if (masked) vf_store_n(c + whole * MN_VW, y[whole], t->last_lanes);
        c += t->c_row;
    }
}

/* Adds one k to rows `first` .. end-1, and moves on to the next k. */
MN_ALWAYS_INLINE void tile_step(const tile_args *t, vf sum[MOST_ROWS][MOST_VECTORS],
                                const float *a[MOST_ROWS / 4], const float **b, int rows,
                                int vectors, bool masked, int first, int end) {
    const int whole = masked ? vectors - 1 : vectors;
    vf b_k[MOST_VECTORS];
    MN_UNROLL
    for (int j = 0; j < whole; j++) b_k[j] = vf_load(*b + j * MN_VW);
    if (masked) b_k[whole] = vf_load_n(*b + whole * MN_VW, t->last_lanes);
    MN_UNROLL
    for (int i = 0; i < rows; i++) {
        if (i < first || i >= end) continue;
        const vf a_ik = vf_set1(a[i / 4][i % 4 * t->a_row]);
        MN_UNROLL
        for (int j = 0; j < vectors; j++) sum[i][j] = vf_fma(a_ik, b_k[j], sum[i][j]);
    }
    MN_UNROLL
    for (int g = 0; 4 * g < rows; g++) a[g] += t->a_col;
    *b += t->b_row;
}

/* The k of a triangle's edge, where rows begin (head) or have ended (tail). */
MN_ALWAYS_INLINE void tile_edge(const tile_args *t, vf sum[MOST_ROWS][MOST_VECTORS],
                                const float *a[MOST_ROWS / 4], const float **b, int rows,
                                int vectors, bool masked, bool head) {
    if (!masked && t->stepped) {
        MN_UNROLL
        for (int r = 0; r + 1 < rows; r++) {
            tile_step(t, sum, a, b, rows, vectors, masked, head ? 0 : r + 1, head ? r + 1 : rows);
        }
        return;
    }
    for (int r = 0; r < (head ? t->head : t->tail); r++) {
        const int first = head ? 0 : (int)(t->edge + r * t->group);
        const int end = head ? (int)((t->edge + r) / t->group) : rows;
        tile_step(t, sum, a, b, rows, vectors, masked, first, end);
    }
}

/* rows, vectors and masked are constants where this is expanded, so that `sum` is registers. */
MN_ALWAYS_INLINE void tile(const tile_args *t, int rows, int vectors, bool masked) {
    vf sum[MOST_ROWS][MOST_VECTORS];
    MN_UNROLL
    for (int i = 0; i < rows; i++) {
        MN_UNROLL
        for (int j = 0; j < vectors; j++) {
            sum[i][j] = t->start ? vf_load(t->start + i * t->start_row + j * MN_VW) : vf_zero();
        }
    }
    /* Every fourth row of A has a pointer; the three rows after it are reached by an index. */
    const float *b = t->b, *a[MOST_ROWS / 4];
    MN_UNROLL
    for (int g = 0; 4 * g < rows; g++) a[g] = t->a + 4 * g * t->a_row;
    if (t->head) tile_edge(t, sum, a, &b, rows, vectors, masked, true);
    for (int64_t k = t->K; k > 0; k--) tile_step(t, sum, a, &b, rows, vectors, masked, 0, rows);
    if (t->tail) tile_edge(t, sum, a, &b, rows, vectors, masked, false);
    tile_end(t, sum, rows, vectors, masked);
}

/* Tiles one, two and four vectors wide. Their most rows: the sums, a row of B and a broadcast fit
 * the registers, 32 (avx512) or 16 (avx2). */
#define ROWS_TO_2(F, v) F(1, v) F(2, v)
#define ROWS_TO_6(F, v) ROWS_TO_2(F, v) F(3, v) F(4, v) F(5, v) F(6, v)
#define ROWS_TO_12(F, v) \
    ROWS_TO_6(F, v) F(7, v) F(8, v) F(9, v) F(10, v) F(11, v) F(12, v)
#if MN_VW == 16
enum { ROWS_1 = 12, ROWS_2 = 12, ROWS_4 = 6 };
#define TILES_2 ROWS_TO_12
#define TILES_4 ROWS_TO_6
#else
enum { ROWS_1 = 12, ROWS_2 = 6, ROWS_4 = 2 };
#define TILES_2 ROWS_TO_6
#define TILES_4 ROWS_TO_2
#endif

#define DEFINE(rows, vectors)                                           \
    static void tile_##rows##x##vectors(const tile_args *t) {           \
        if (t->last_lanes == MN_VW) tile(t, rows, vectors, false);      \
        else tile(t, rows, vectors, true);                              \
    }
#define NAME(rows, vectors) tile_##rows##x##vectors,

ROWS_TO_12(DEFINE, 1)
TILES_2(DEFINE, 2)
TILES_4(DEFINE, 4)
static tile_function *const tiles_1[] = { NULL, ROWS_TO_12(NAME, 1) };
static tile_function *const tiles_2[] = { NULL, TILES_2(NAME, 2) };
static tile_function *const tiles_4[] = { NULL, TILES_4(NAME, 4) };
#undef DEFINE
#undef NAME

/* Part of a product: a panel of columns, some rows, some of K. Where `sums` is not NULL the parts
 * of K come one after the other, and it holds the sums in between, `width` floats a row. */
typedef struct {
    const mn_gemm_args *p;
    int64_t i0, i1, j0, k0, k1;
    int cols, width;            // used columns, and whole vectors of them
    const float *b;             // B[k0, j0]
    int64_t b_row;
    float *sums;
} part;

/* Which k of [k0, k1) the tile of rows i .. i+rows-1 takes: all its rows those of t->K, some of
 * them those of the head or the tail. Returns the first of all. */
static int64_t bound_tile(tile_args *t, const mn_gemm_args *p, int64_t i, int64_t rows, int64_t k0,
                          int64_t k1) {
    const int64_t group = p->group ? p->group : 1, last = i + rows - 1;
    t->head = t->tail = 0;
    t->group = group;
    if (p->shape == MN_GEMM_A_LOWER) {
        const int64_t all = mn_min(k1, mn_max(k0, p->diagonal + i / group + 1));
        const int64_t end = mn_min(k1, mn_max(all, p->diagonal + last / group + 1));
        t->K = all - k0;
        t->tail = (int)(end - all);
        t->edge = (all - p->diagonal) * group - i;
        t->stepped = t->tail == rows - 1 && group == 1 && t->edge == 1;
        return k0;
    }
    if (p->shape == MN_GEMM_A_UPPER) {
        const int64_t begin = mn_min(k1, mn_max(k0, (i - p->diagonal) * group));
        const int64_t all = mn_min(k1, mn_max(begin, (last - p->diagonal) * group));
        t->head = (int)(all - begin);
        t->edge = (p->diagonal - i + 1) * group + begin;
        t->stepped = t->head == rows - 1 && group == 1 && t->edge == 1;
        t->K = k1 - all;
        return begin;
    }
    t->K = k1 - k0;
    return k0;
}

/* Rows i0 .. i1-1 of the part, its first `cols` columns, in tiles of even height. */
static void run_rows(const part *w, int64_t i0, int64_t i1, int cols) {
    static const float one = 1.0f;
    const mn_gemm_args *p = w->p;
    const int vectors = (cols + MN_VW - 1) / MN_VW;
    tile_function *const *tiles = vectors == 1 ? tiles_1 : vectors == 2 ? tiles_2 : tiles_4;
    const int64_t most = vectors == 1 ? ROWS_1 : vectors == 2 ? ROWS_2 : ROWS_4;
    const bool last = w->k1 == p->K;
    const float *scale = p->base == MN_GEMM_ADD ? &one : p->c_scale;
    tile_args t = {
        .a_row = p->a_row, .a_col = p->a_col, .b_row = w->b_row, .start_row = w->width,
        .c_row = last ? p->c_row : w->width,
        .c_scale_step = p->base == MN_GEMM_SCALE,
        .alpha = last ? p->alpha : 1.0f,
        .last_lanes = last ? cols - (vectors - 1) * MN_VW : MN_VW,
    };
    int64_t tiles_left = mn_ceil_div(i1 - i0, most);
    for (int64_t i = i0; i < i1; tiles_left--) {
        const int64_t rows = mn_ceil_div(i1 - i, tiles_left);
        const int64_t k0 = bound_tile(&t, p, i, rows, w->k0, w->k1);
        float *sums = w->sums ? w->sums + (i - w->i0) * w->width : NULL;
        t.a = p->a + i * p->a_row + k0 * p->a_col;
        t.b = w->b + (k0 - w->k0) * w->b_row;
        t.start = w->k0 > 0 ? sums : NULL;
        t.c = last ? p->c + i * p->c_row + w->j0 : sums;
        t.c_scale = p->base == MN_GEMM_SET || !last ? NULL : scale + i * t.c_scale_step;
        tiles[rows](&t);
        i += rows;
    }
}

/* Of C_LOWER, rows above the panel are left out, and those beside its first vector need no other.
 * Panels of four vectors have so few rows that the first is all they need. */
static void run_part(const part *w) {
    int64_t i = w->i0;
    if (w->p->shape == MN_GEMM_C_LOWER) {
        i = mn_max(i, mn_min(w->j0, w->i1));
        if (w->cols > MN_VW) {
            const int64_t beside = mn_max(i, mn_min(w->j0 + MN_VW, w->i1));
            run_rows(w, i, beside, MN_VW);
            i = beside;
        }
    }
    run_rows(w, i, w->i1, w->cols);
}

/* Columns of the panel at j: four vectors while few rows leave registers free for them, else two,
 * then what is left, never three vectors. */
static int panel_cols(const mn_gemm_args *p, int64_t j) {
    const int64_t left = p->N - j;
    return (int)mn_min(left, (p->M <= ROWS_4 && left > 3 * MN_VW ? 4 : 2) * MN_VW);
}

/* dst[c, j - j0] = B^T[c, j] for the columns of the part; lanes beyond them become 0. */
static void pack_transposed(float *dst, const part *w) {
    const int64_t src_row = w->p->b_row;
    for (int j = 0; j < w->cols; j += MN_VW) {
        const float *src = w->p->b + (w->j0 + j) * src_row + w->k0;
        const int rows = vf_lanes(w->cols - j);
        for (int64_t k = 0; k < w->k1 - w->k0; k += 4) {
            const int cols = (int)mn_min(w->k1 - w->k0 - k, 4);
            vf v[4];
            load_columns(v, src + k, src_row, rows, cols);
            MN_UNROLL
            for (int c = 0; c < 4; c++) {
                if (c < cols) vf_store(dst + (k + c) * w->width + j, v[c]);
            }
        }
    }
}

/* dst[k - k0, j - j0] = B[k, j] for the columns of the part; lanes beyond them become 0. */
static void pack_rows(float *dst, const part *w) {
    const float *src = w->p->b + w->k0 * w->p->b_row + w->j0;
    for (int64_t k = w->k0; k < w->k1; k++) {
        for (int j = 0; j < w->cols; j += MN_VW) {
            const int lanes = vf_lanes(w->cols - j);
            vf_store(dst + j, lanes == MN_VW ? vf_load(src + j) : vf_load_n(src + j, lanes));
        }
        src += w->p->b_row;
        dst += w->width;
    }
}

/* Floats of B on the stack at a time; rows whose sums wait while the next part of K is packed. */
enum { PACK_FLOATS = 8192, WAIT_ROWS = 96 };

static void run_packed(const mn_gemm_args *p, void (*pack)(float *dst, const part *w)) {
    _Alignas(64) float packed[PACK_FLOATS], sums[WAIT_ROWS * 2 * MN_VW];
    const int64_t N = p->shape == MN_GEMM_C_LOWER ? mn_min(p->M, p->N) : p->N;
    part w = { .p = p, .b = packed };
    for (; w.j0 < N; w.j0 += w.cols) {
        w.cols = panel_cols(p, w.j0);
        w.width = (w.cols + MN_VW - 1) / MN_VW * MN_VW;
        w.b_row = w.width;
        const int64_t most_k = PACK_FLOATS / w.width;
        const int64_t most_i = p->K <= most_k ? p->M : WAIT_ROWS;
        w.sums = p->K <= most_k ? NULL : sums;
        for (w.i0 = 0; w.i0 < p->M; w.i0 = w.i1) {
            w.i1 = mn_min(p->M, w.i0 + most_i);
            w.k0 = 0;
            do {
                w.k1 = mn_min(p->K, w.k0 + most_k);
                pack(packed, &w);
                run_part(&w);
                w.k0 = w.k1;
            } while (w.k0 < p->K);
        }
    }
}

static void run_direct(const mn_gemm_args *p) {
    part w = { .p = p, .i1 = p->M, .k1 = p->K, .b_row = p->b_row };
    for (; w.j0 < p->N; w.j0 += w.cols) {
        w.cols = panel_cols(p, w.j0);
        w.b = p->b + w.j0;
        run_part(&w);
    }
}

/* Rows of B pages apart take a TLB entry each and share a few cache sets, for every tile again:
 * a copy of the panel pays from the second tile on. */
enum { FAR_ROWS = 512 };

void MN_T(mn_gemm)(const mn_gemm_args *p) {
    if (p->b_row >= FAR_ROWS && p->M > ROWS_2) run_packed(p, pack_rows);
    else run_direct(p);
}

void MN_T(mn_gemm_nt)(const mn_gemm_args *p) {
    run_packed(p, pack_transposed);
}

void MN_T(mn_transpose)(float *dst, int64_t dst_row, const float *src, int64_t src_row,
                        int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r += MN_VW) {
        const int lanes = vf_lanes(rows - r);
        for (int64_t c = 0; c < cols; c += 4) {
            const int n = (int)mn_min(cols - c, 4);
            vf v[4];
            load_columns(v, src + r * src_row + c, src_row, lanes, n);
            MN_UNROLL
            for (int i = 0; i < 4; i++) {
                float *at = dst + (c + i) * dst_row + r;
                if (i >= n) continue;
                if (lanes == MN_VW) vf_store(at, v[i]);
                else vf_store_n(at, v[i], lanes);
            }
        }
    }
}
