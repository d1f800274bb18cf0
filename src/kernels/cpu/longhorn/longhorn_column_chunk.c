/* longhorn_column_chunk.c - a chunk of per-column Longhorn. Contract in longhorn_column.h. */
#include "kernels/cpu/longhorn/longhorn_column.h"

#include <string.h>

static float *take(float **at, int64_t n) {
    float *here = *at;
    *at += mn_ceil_div(n, 16) * 16;
    return here;
}

int64_t MN_T(mn_column_chunk_floats)(int64_t K, int64_t width) {
    const int64_t L = MN_COLUMN_CHUNK;
    return 2 * (L * K + 16) + 2 * L * L + 4 * (L * width + 16);
}

float *MN_T(mn_column_chunk_place)(mn_column_chunk *c, float *memory, int64_t K, int64_t width) {
    const int64_t L = MN_COLUMN_CHUNK;
    c->k = take(&memory, L * K), c->q = take(&memory, L * K);
    c->A = take(&memory, L * L), c->P = take(&memory, L * L);
    c->w = take(&memory, L * width), c->rest = take(&memory, L * width);
    c->r = take(&memory, L * width), c->u = take(&memory, L * width);
    return memory;
}

/* C[t,s] = x_t.k_s for s <= t, 0 above the diagonal */
static void lower_products(float *C, const float *x, const mn_column_chunk *c, int64_t K) {
    const int64_t L = c->L;
    const mn_gemm_args product = { .c = C, .c_row = L, .a = x, .a_row = K, .a_col = 1, .b = c->k,
                                   .b_row = K, .M = L, .N = L, .K = K, .alpha = 1.0f,
                                   .base = MN_GEMM_SET, .shape = MN_GEMM_C_LOWER };
    MN_T(mn_gemm_nt)(&product);
    for (int64_t t = 0; t < L; t++) {
        for (int64_t s = t + 1; s < L; s++) C[t * L + s] = 0.0f;
    }
}

void MN_T(mn_column_chunk_prepare)(mn_column_chunk *c, const mn_longhorn_column_args *p,
                                   const mn_column_tile *tile, int64_t b, int64_t t0, int64_t L,
                                   bool reads) {
    const int64_t K = p->call.K;
    c->L = L;
    for (int64_t t = 0; t < L; t++) {
        const float *beta = MN_ROW(float, p->beta, b, t0 + t, tile->h) + tile->j0;
        const float *k_t = MN_ROW(float, p->k, b, t0 + t, tile->h);
        const float *q_t = MN_ROW(float, p->q, b, t0 + t, tile->h);
        float *k = c->k + t * K;
        for (int64_t i = 0; i < K; i++) k[i] = k_t[i];
        for (int64_t i = 0; reads && i < K; i++) c->q[t * K + i] = q_t[i];
        c->norm[t] = (float)mn_key_norm(k, K);
        for (int64_t j = 0; j < tile->width; j += MN_VW) {
            const mn_gain gain = mn_gain_of(vf_load_row(beta + j, vf_lanes(tile->n - j)),
                                            c->norm[t]);
            vf_store(c->w + t * tile->width + j, gain.w);
            vf_store(c->rest + t * tile->width + j, gain.rest);
        }
    }
    lower_products(c->A, c->k, c, K);
    if (reads) lower_products(c->P, c->q, c, K);
}

/* r_t -= sum_{s<t} A[t,s] u_s and u_t = w_t . r_t, for up to four vectors of columns at j */
MN_ALWAYS_INLINE void solve_columns(mn_column_chunk *c, int64_t width, int64_t j, int vectors) {
    for (int64_t t = 0; t < c->L; t++) {
        const float *A = c->A + t * c->L;
        float *r = c->r + t * width + j;
        vf sum[4];
        MN_UNROLL
        for (int i = 0; i < vectors; i++) sum[i] = vf_load(r + i * MN_VW);
        for (int64_t s = 0; s < t; s++) {
            const vf a = vf_set1(A[s]);
            MN_UNROLL
            for (int i = 0; i < vectors; i++) {
                sum[i] = vf_fnma(a, vf_load(c->u + s * width + j + i * MN_VW), sum[i]);
            }
        }
        MN_UNROLL
        for (int i = 0; i < vectors; i++) {
            const vf w = vf_load(c->w + t * width + j + i * MN_VW);
            vf_store(r + i * MN_VW, sum[i]);
            vf_store(c->u + t * width + j + i * MN_VW, vf_mul(w, sum[i]));
        }
    }
}

void MN_T(mn_column_chunk_solve)(mn_column_chunk *c, const mn_longhorn_column_args *p,
                                 const mn_column_tile *tile, int64_t b, int64_t t0,
                                 const float *S) {
    const int64_t width = tile->width, K = p->call.K;
    for (int64_t t = 0; t < c->L; t++) {
        const float *v = MN_ROW(float, p->v, b, t0 + t, tile->h) + tile->j0;
        for (int64_t j = 0; j < width; j += MN_VW) {
            vf_store(c->r + t * width + j, vf_load_row(v + j, vf_lanes(tile->n - j)));
        }
    }
    const mn_gemm_args product = { .c = c->r, .c_row = width, .a = c->k, .a_row = K, .a_col = 1,
                                   .b = S, .b_row = width, .M = c->L, .N = width, .K = K,
                                   .alpha = -1.0f, .base = MN_GEMM_ADD };
    MN_T(mn_gemm)(&product);
    int64_t j = 0;
    for (; j + 4 * MN_VW <= width; j += 4 * MN_VW) solve_columns(c, width, j, 4);
    for (; j < width; j += MN_VW) solve_columns(c, width, j, 1);
}

void MN_T(mn_column_chunk_advance)(float *S, const mn_column_chunk *c, int64_t K, int64_t width) {
    const mn_gemm_args product = { .c = S, .c_row = width, .a = c->k, .a_row = 1, .a_col = K,
                                   .b = c->u, .b_row = width, .M = K, .N = width, .K = c->L,
                                   .alpha = 1.0f, .base = MN_GEMM_ADD };
    MN_T(mn_gemm)(&product);
}

void MN_T(mn_column_state_load)(float *S, mn_in from, const mn_column_tile *tile, int64_t K,
                                int64_t V) {
    const float *rows = MN_ROW(float, from, tile->sequence, 0, tile->h);
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j < tile->width; j += MN_VW) {
            const int lanes = vf_lanes(tile->n - j);
            const vf x = rows ? vf_load_row(rows + i * V + tile->j0 + j, lanes) : vf_zero();
            vf_store(S + i * tile->width + j, x);
        }
    }
}

void MN_T(mn_column_state_store)(mn_out to, const float *S, const mn_column_tile *tile, int64_t K,
                                 int64_t V) {
    float *rows = MN_ROW_OUT(float, to, tile->sequence, 0, tile->h);
    for (int64_t i = 0; rows && i < K; i++) {
        memcpy(rows + i * V + tile->j0, S + i * tile->width, (size_t)tile->n * sizeof *rows);
    }
}
