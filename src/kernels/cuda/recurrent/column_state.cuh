/* column_state.cuh - matrix memories whose value columns go their own way: the recurrence of mlstm
 * and
 * of both forms of Longhorn.
 *
 *   SUM     S_ij <- f S_ij + w k_i v_j                         w, f numbers of a token
 *   CELL    S_ij <- (u_j + w_j x_i) S_ij + w_j k_i v_j       x_i = |k|^2 - k_i^2, u = 1 - w |k|^2
 *   COLUMN  S_ij <- S_ij + w_j k_i (v_j - k'S_:j)              o_j = scale S_:j'q
 *
 * Backward, D the adjoint of S_t, B that of the memory before the write, y_j the gradient of w_j:
 *
 *   D += scale q do'          dq = scale S do        SUM     y = k'D v, dv = w D'k, dk = w D v,
 *   df = f D.S, D <- f D      CELL    y_j = sum D k (v - k S), dk = sum w D (v - 2 k S), D <- c D
 *   COLUMN  y_j = (D'k)_j (v_j - k'S), dk = D (w (v - k'S)) - S (w D'k), D <- D - k (w D'k)'
 *
 * How threads share the cells is in column_state_fwd.cuh and column_state_bwd.cuh. */
#ifndef MN_KERNELS_CUDA_RECURRENT_COLUMN_STATE_CUH
#define MN_KERNELS_CUDA_RECURRENT_COLUMN_STATE_CUH

#include "kernels/cuda/prim/common.cuh"

enum { MN_COLUMNS_WIDEST = 256, MN_COLUMNS_TILE = 64 };    // rows; columns of a block

enum mn_columns_kind { MN_COLUMNS_SUM, MN_COLUMNS_CELL, MN_COLUMNS_COLUMN };

/* Tensors of tokens are views; what is made in work space has rows of all heads of all tokens. */
struct mn_columns {
    mn_call call;
    float scale;
    int64_t columns;             // V, or V + 1 where a last column of ones is added
    mn_in q, k, v;
    mn_in beta;                  // CELL, COLUMN: w_j = beta_j u_j, u_j = 1 / (1 + beta_j |k|^2)
    const float *w, *f;          // SUM: (rows)
    const float *state0, *ones0; // (N,H,K,V) and the added column's (N,H,K), or NULL
    float *state, *ones;
    bool reads;                  // whether o or out is wanted
    float *o;                    // (rows, columns): S'q scale
    mn_out out;                  // the same as a tensor
    const float *cot;            // (rows, columns)
    mn_in cot_o;                 // the same as a tensor, where cot is NULL
    const float *cot_state, *cot_ones;
    float *y;                    // (rows, columns): gradient of w
    float *parts;                // (tiles, rows, 2, K): dq, dk
    float *fparts;               // (tiles, rows): df
    mn_out dv;
    float *dstate0, *dones0;
    float *spans, *tokens;       // states
    int spill;                   // states that shared memory has room for
    bool whole;                  // whether neighbours of a token's numbers come by one access
};

/* Rows that threads have between them. */
__host__ __device__ inline int mn_columns_rows(const mn_call &c) {
    return c.K <= 32 ? 32 : c.K <= 64 ? 64 : c.K <= 128 ? 128 : 256;
}

struct mn_columns_place {
    int64_t n, h, tile, block;
    mn_span span;
};

__device__ inline mn_columns_place mn_columns_here(const mn_columns &p, int64_t tiles) {
    mn_columns_place at;
    at.block = blockIdx.x, at.tile = at.block % tiles;
    at.h = at.block / tiles % p.call.H, at.n = at.block / tiles / p.call.H;
    at.span = mn_span_at(p.call, at.n);
    return at;
}

__device__ inline int64_t mn_columns_row(const mn_columns &p, const mn_columns_place &at,
                                         int64_t t) {
    return (at.span.b * p.call.T + at.span.t0 + t) * p.call.H + at.h;
}

#endif
