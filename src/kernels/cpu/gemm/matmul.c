/* matmul.c - packed panels and register tiles of large products. Contract in matmul.h.
 *
 * A tile of ROWS x VECTORS vectors of C keeps its sums in registers over a block of K. It reads B
 * from a packed panel, by vectors, and A by broadcast: from its rows as they lie when A is stored
 * by rows, from packed strips of ROWS rows when it is stored transposed. A panel serves all strips
 * of a worker's rows before the next one comes, so both stay in the second cache. */
#include "kernels/cpu/gemm/matmul.h"

#include "base/util.h"
#include "kernels/cpu/simd/columns.h"
#include "kernels/cpu/simd/row.h"

/* Sums, one row of B and a broadcast: 28 of 32 registers (avx512), 15 of 16 (avx2). */
#if MN_VW == 16
enum { ROWS = 8, VECTORS = 3 };
#else
enum { ROWS = 6, VECTORS = 2 };
#endif
enum { COLS = VECTORS * MN_VW };

typedef struct {
    float *c;
    int64_t c_row;
    const float *a;
    int64_t a_row, a_col;
    const float *b;             // the panel, `vectors` whole vectors a row
    int64_t K;
    int last_lanes;             // used lanes of the rightmost vector
    bool add;                   // C += sum
} tile_args;

typedef void tile_function(const tile_args *t);

MN_ALWAYS_INLINE void tile_end(const tile_args *t, vf sum[ROWS][VECTORS], int rows, int vectors) {
    const int last = vectors - 1;
    float *c = t->c;
    MN_UNROLL
    for (int i = 0; i < rows; i++) {
        MN_UNROLL
        for (int j = 0; j < last; j++) {
            float *at = c + j * MN_VW;
            vf_store(at, t->add ? vf_add(vf_load(at), sum[i][j]) : sum[i][j]);
        }
        float *at = c + last * MN_VW;
        vf_store_row(at, t->add ? vf_add(vf_load_row(at, t->last_lanes), sum[i][last])
                                : sum[i][last], t->last_lanes);
        c += t->c_row;
    }
}

/* rows and vectors are constants where this is expanded, so that `sum` is registers. */
MN_ALWAYS_INLINE void tile(const tile_args *t, int rows, int vectors) {
    vf sum[ROWS][VECTORS];
    MN_UNROLL
    for (int i = 0; i < rows; i++) {
        MN_UNROLL
        for (int j = 0; j < vectors; j++) sum[i][j] = vf_zero();
    }
    /* Every fourth row of A has a pointer; the three rows after it are reached by an index. */
    const int64_t a_row = t->a_row, a_col = t->a_col;
    const float *b = t->b, *a[(ROWS + 3) / 4];
    MN_UNROLL
    for (int g = 0; 4 * g < rows; g++) a[g] = t->a + 4 * g * a_row;
    for (int64_t k = t->K; k > 0; k--) {
        vf b_k[VECTORS];
        MN_UNROLL
        for (int j = 0; j < vectors; j++) b_k[j] = vf_load(b + j * MN_VW);
        MN_UNROLL
        for (int i = 0; i < rows; i++) {
            const vf a_ik = vf_set1(a[i / 4][i % 4 * a_row]);
            MN_UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = vf_fma(a_ik, b_k[j], sum[i][j]);
        }
        MN_UNROLL
        for (int g = 0; 4 * g < rows; g++) a[g] += a_col;
        b += vectors * MN_VW;
    }
    tile_end(t, sum, rows, vectors);
}

#define DEFINE(rows, vectors) \
    static void tile_##rows##x##vectors(const tile_args *t) { tile(t, rows, vectors); }
#define NAME(rows, vectors) tile_##rows##x##vectors,
#if MN_VW == 16
#define ALL_ROWS(F, v) F(1, v) F(2, v) F(3, v) F(4, v) F(5, v) F(6, v) F(7, v) F(8, v)
#define ALL(F) ALL_ROWS(F, 1) ALL_ROWS(F, 2) ALL_ROWS(F, 3)
#else
#define ALL_ROWS(F, v) F(1, v) F(2, v) F(3, v) F(4, v) F(5, v) F(6, v)
#define ALL(F) ALL_ROWS(F, 1) ALL_ROWS(F, 2)
#endif
ALL(DEFINE)
static tile_function *const tiles[VECTORS * ROWS] = { ALL(NAME) };
#undef ALL
#undef ALL_ROWS
#undef NAME
#undef DEFINE

int64_t MN_T(mn_matmul_panel)(void) {
    return COLS;
}

/* ---- packing --------------------------------------------------------------------------------- */

/* B stored by columns: rows of the stored matrix become columns of the panel. */
static void pack_transposed(float *dst, const float *src, int64_t src_row, int64_t K, int cols,
                            int vectors) {
    for (int64_t k = 0; k < K; k += 4) {
        const int n = (int)mn_min(K - k, 4);
        for (int j = 0; j < vectors; j++) {
            vf v[4];
            load_columns(v, src + j * MN_VW * src_row + k, src_row, vf_lanes(cols - j * MN_VW), n);
            MN_UNROLL
            for (int c = 0; c < 4; c++) {
                if (c < n) vf_store(dst + ((k + c) * vectors + j) * MN_VW, v[c]);
            }
        }
    }
}

static void pack_plain(float *dst, const float *src, int64_t src_row, int64_t K, int cols,
                       int vectors) {
    for (int64_t k = 0; k < K; k++) {
        for (int j = 0; j < vectors; j++) {
            vf_store(dst, vf_load_row(src + j * MN_VW, vf_lanes(cols - j * MN_VW)));
            dst += MN_VW;
        }
        src += src_row;
    }
}

/* A panel of a chunk: its columns and where its packed form lies. */
typedef struct {
    int64_t j0;
    int cols, vectors;
    float *packed;
} panel_place;

static panel_place place_of(const mn_chunk *chunk, int64_t panel) {
    const int64_t j0 = chunk->j0 + panel * COLS;
    const int cols = (int)mn_min(COLS, chunk->j1 - j0);
    return (panel_place){ j0, cols, (cols + MN_VW - 1) / MN_VW,
                          chunk->packed + panel * COLS * (chunk->k1 - chunk->k0) };
}

void MN_T(mn_matmul_pack)(const mn_product *p, const mn_chunk *chunk, int64_t panel) {
    const panel_place at = place_of(chunk, panel);
    const float *src = p->b + chunk->k0 * p->b_row + at.j0 * p->b_col;
    const int64_t K = chunk->k1 - chunk->k0;
    if (p->b_col == 1) pack_plain(at.packed, src, p->b_row, K, at.cols, at.vectors);
    else pack_transposed(at.packed, src, p->b_col, K, at.cols, at.vectors);
}

/* Strips of ROWS rows of a transposed A, whose rows of K lie far apart: a few strips at a time, so
 * that a cache line is read once and not too many places are written in turn. */
MN_ALWAYS_INLINE void pack_strips(float *dst, const float *src, int64_t src_row, int64_t K,
                                  int strips) {
    for (int64_t k = 0; k < K; k++) {
        MN_UNROLL
        for (int s = 0; s < strips; s++) {
            memcpy(dst + (s * K + k) * ROWS, src + s * ROWS, ROWS * sizeof *src);
        }
        src += src_row;
    }
}

/* n_rows rows and K terms from `src`; a last strip of fewer rows has that many floats a term. */
static void pack_rows(float *dst, const float *src, int64_t src_row, int64_t n_rows, int64_t K) {
    int64_t i = 0;
    for (; i + 4 * ROWS <= n_rows; i += 4 * ROWS) pack_strips(dst + i * K, src + i, src_row, K, 4);
    for (; i + ROWS <= n_rows; i += ROWS) pack_strips(dst + i * K, src + i, src_row, K, 1);
    const int64_t left = n_rows - i;
    for (int64_t k = 0; left > 0 && k < K; k++) {
        memcpy(dst + i * K + k * left, src + i + k * src_row, (size_t)left * sizeof *src);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* One block of K of some rows and panels. */
typedef struct {
    const float *a;             // A[i0, k0]; packed strips where a_row is 0
    int64_t a_row, a_col;
    int64_t i0, i1, k0, K, first, last;
} block_args;

static void run_block(const mn_product *p, const mn_chunk *chunk, const block_args *w) {
    tile_args t = { .c_row = p->c_row, .K = w->K, .add = p->accumulate || w->k0 > 0 };
    for (int64_t panel = w->first; panel < w->last; panel++) {
        const panel_place at = place_of(chunk, panel);
        t.b = at.packed + (w->k0 - chunk->k0) * at.vectors * MN_VW;
        t.last_lanes = at.cols - (at.vectors - 1) * MN_VW;
        for (int64_t i = w->i0; i < w->i1; i += ROWS) {
            const int rows = (int)mn_min(ROWS, w->i1 - i);
            t.a = w->a + (i - w->i0) * (w->a_row ? w->a_row : w->K);
            t.a_row = w->a_row ? w->a_row : 1;
            t.a_col = w->a_row ? w->a_col : rows;
            t.c = p->c + i * p->c_row + at.j0;
            tiles[(at.vectors - 1) * ROWS + rows - 1](&t);
        }
    }
}

/* A transposed A is read as it lies when its rows of K are near each other and it is not read
 * often; else packing it costs less. */
enum { NEAR_ROWS = 512, FEW_PANELS = 4 };

void MN_T(mn_matmul_rows)(const mn_product *p, const mn_chunk *chunk, int64_t i0, int64_t i1,
                          int64_t first, int64_t last, float *scratch) {
    const int64_t block = mn_matmul_block(p->K);
    const bool as_it_lies =
        p->a_col == 1 || (p->a_col <= NEAR_ROWS && last - first <= FEW_PANELS);
    block_args w = { .i0 = i0, .i1 = i1, .first = first, .last = last };
    for (w.k0 = chunk->k0; w.k0 < chunk->k1; w.k0 += block) {
        w.K = mn_min(block, chunk->k1 - w.k0);
        w.a = p->a + i0 * p->a_row + w.k0 * p->a_col;
        w.a_row = p->a_row;
        w.a_col = p->a_col;
        if (!as_it_lies) {
            pack_rows(scratch, w.a, p->a_col, i1 - i0, w.K);
            w.a = scratch;
            w.a_row = 0;
        }
        run_block(p, chunk, &w);
    }
}

/* ---- few rows -------------------------------------------------------------------------------- */

/* Columns of C that advance together, two vectors of them, hide each other's latency. A line of B
 * is fetched AHEAD floats before it is needed: its rows are too many for the hardware to follow. */
enum { FEW_VECTORS = 2, LINE = 16, AHEAD = 128 };

typedef struct {
    const mn_product *p;
    int64_t j0, k0, K;
    int cols;
} few_args;

typedef void few_function(const few_args *t);
typedef vf few_sums[MN_MATMUL_FEW][FEW_VECTORS];

/* The next n <= 4 terms of K from a and b: rows of stored B are columns of C, so four terms of a
 * vector of them are turned in registers and used at once. */
MN_ALWAYS_INLINE void few_terms(few_sums sum, const mn_product *p, const float *a, const float *b,
                                int rows, int vectors, int cols, int n) {
    MN_UNROLL
    for (int j = 0; j < vectors; j++) {
        vf v[4];
        load_columns(v, b + j * MN_VW * p->b_col, p->b_col, vf_lanes(cols - j * MN_VW), n);
        MN_UNROLL
        for (int c = 0; c < n; c++) {
            MN_UNROLL
            for (int i = 0; i < rows; i++) {
                sum[i][j] = vf_fma(vf_set1(a[i * p->a_row + c * p->a_col]), v[c], sum[i][j]);
            }
        }
    }
}

MN_ALWAYS_INLINE void few(const few_args *t, int rows, int vectors) {
    const mn_product p = *t->p;
    const float *a = p.a + t->k0 * p.a_col, *b = p.b + t->j0 * p.b_col + t->k0;
    few_sums sum;
    MN_UNROLL
    for (int i = 0; i < rows; i++) {
        MN_UNROLL
        for (int j = 0; j < vectors; j++) sum[i][j] = vf_zero();
    }
    int64_t k = 0;
    for (; t->cols == vectors * MN_VW && k + 4 <= t->K; k += 4) {
        for (int r = 0; k % LINE == 0 && r < vectors * MN_VW; r++) {
            __builtin_prefetch(b + r * p.b_col + AHEAD);
        }
        few_terms(sum, &p, a, b, rows, vectors, vectors * MN_VW, 4);
        a += 4 * p.a_col;
        b += 4;
    }
    for (; k < t->K; k++) few_terms(sum, &p, a, b++, rows, vectors, t->cols, 1), a += p.a_col;
    const bool add = p.accumulate || t->k0 > 0;
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < vectors; j++) {
            float *at = p.c + i * p.c_row + t->j0 + j * MN_VW;
            const int lanes = vf_lanes(t->cols - j * MN_VW);
            vf_store_row(at, add ? vf_add(vf_load_row(at, lanes), sum[i][j]) : sum[i][j], lanes);
        }
    }
}

#define DEFINE(rows, vectors) \
    static void few_##rows##x##vectors(const few_args *t) { few(t, rows, vectors); }
#define NAME(rows, vectors) few_##rows##x##vectors,
#define ALL(F, v) F(1, v) F(2, v) F(3, v) F(4, v)
ALL(DEFINE, 1)
ALL(DEFINE, 2)
static few_function *const few_of[FEW_VECTORS][MN_MATMUL_FEW] = { { ALL(NAME, 1) },
                                                                 { ALL(NAME, 2) } };
#undef ALL
#undef NAME
#undef DEFINE

void MN_T(mn_matmul_few)(const mn_product *p, int64_t j0, int64_t j1) {
    const int64_t block = mn_matmul_block(p->K);
    few_args t = { .p = p, .j0 = j0 };
    for (; t.j0 < j1; t.j0 += t.cols) {
        t.cols = (int)mn_min(FEW_VECTORS * MN_VW, j1 - t.j0);
        few_function *run = few_of[(t.cols + MN_VW - 1) / MN_VW - 1][p->M - 1];
        for (t.k0 = 0; t.k0 < p->K; t.k0 += block) {
            t.K = mn_min(block, p->K - t.k0);
            run(&t);
        }
    }
}
