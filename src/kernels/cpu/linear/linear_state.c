/* linear_state.c - the state side of the chunk form: columns, residuals, advance. */
#include "kernels/cpu/linear/linear_state.h"

#include <string.h>

void MN_T(mn_state_load)(float *S, mn_in from, const mn_call *call, int64_t n, int64_t h,
                         const mn_columns *col) {
    const float *rows = MN_ROW(float, from, n, 0, h);
    const size_t bytes = (size_t)col->n * sizeof *S;
    for (int64_t i = 0; i < call->K; i++) {
        if (rows) memcpy(S + i * col->n, rows + i * call->V + col->j0, bytes);
        else memset(S + i * col->n, 0, bytes);
    }
}

void MN_T(mn_state_store)(mn_out to, const float *S, const mn_call *call, int64_t n, int64_t h,
                          const mn_columns *col) {
    float *rows = MN_ROW_OUT(float, to, n, 0, h);
    for (int64_t i = 0; rows && i < call->K; i++) {
        memcpy(rows + i * call->V + col->j0, S + i * col->n, (size_t)col->n * sizeof *S);
    }
}

const float *MN_T(mn_chunk_residual)(float *R, int64_t *r_row, const mn_linear *p,
                                     const mn_chunk *c, const mn_columns *col, const float *S) {
    const float *v = MN_ROW(float, p->v, c->b, c->t0, c->h) + col->j0;
    mn_prefetch_next(p->v, c, c->h, p->call->V);
    if (!p->e.data) {
        *r_row = p->v.stride[1];
        return v;
    }
    *r_row = col->n;
    for (int64_t t = 0; t < c->L; t++) {
        memcpy(R + t * col->n, v + t * p->v.stride[1], (size_t)col->n * sizeof *R);
    }
    const mn_gemm_args predicted = { .c = R, .c_row = col->n, .a = c->ed, .a_row = c->K, .a_col = 1,
                                     .b = S, .b_row = col->n, .M = c->L, .N = col->n, .K = c->K,
                                     .alpha = -1.0f, .base = MN_GEMM_ADD };
    MN_T(mn_gemm)(&predicted);
    MN_T(mn_solve_lower)(R, c->A, c->L, col->n);
    return R;
}

void MN_T(mn_state_advance)(float *S, const mn_chunk *c, const mn_columns *col, const float *R,
                            int64_t r_row) {
    const mn_gemm_args update = { .c = S, .c_row = col->n, .a = c->wd, .a_row = 1, .a_col = c->K,
                                  .b = R, .b_row = r_row, .M = c->K, .N = col->n, .K = c->L,
                                  .alpha = 1.0f, .base = MN_GEMM_SCALE, .c_scale = c->fall };
    MN_T(mn_gemm)(&update);
}
