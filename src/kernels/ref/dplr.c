/* dplr.c - diagonal plus low rank: u = S'a;  S = diag(exp g) S + b u' + k v';  o = scale S'q.
 *
 * Backward, D_t the adjoint of S_t (D_T starts from the cotangent of the final state):
 *
 *   D += scale q do'      dq = scale S do     dk = D v     dv = D'k     db = D u     du = D'b
 *   da = S_{t-1} du       dg = exp(g) rowsum(D . S_{t-1})      D_{t-1} = diag(exp g) D + a du'
 *
 * One item is one head of one sequence. States of all steps are kept for the way back. */
#include <math.h>

#include "kernels/ref/ref.h"

typedef struct rows {
    const REAL *q, *k, *v, *a, *b, *g;
} rows;

static rows rows_at(const mn_dplr_args *p, int64_t b, int64_t t, int64_t h) {
    return (rows){ MN_ROW(REAL, p->q, b, t, h), MN_ROW(REAL, p->k, b, t, h),
                   MN_ROW(REAL, p->v, b, t, h), MN_ROW(REAL, p->a, b, t, h),
                   MN_ROW(REAL, p->b, b, t, h), MN_ROW(REAL, p->g, b, t, h) };
}

static void load_state(double *S, const mn_dplr_args *p, int64_t n, int64_t h) {
    const REAL *from = MN_ROW(REAL, p->state0, n, 0, h);
    for (int64_t i = 0; i < p->call.K * p->call.V; i++) S[i] = mn_ref_get(from, i);
}

/* u and next, which may be S */
static void advance(double *next, double *u, const double *S, const mn_dplr_args *p,
                    const rows *at) {
    const int64_t K = p->call.K, V = p->call.V;
    for (int64_t j = 0; j < V; j++) u[j] = 0.0;
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j < V; j++) u[j] += at->a[i] * S[i * V + j];
    }
    for (int64_t i = 0; i < K; i++) {
        const double decay = exp(at->g[i]);
        for (int64_t j = 0; j < V; j++) {
            next[i * V + j] = decay * S[i * V + j] + at->b[i] * u[j] +
                              (double)at->k[i] * at->v[j];
        }
    }
}

bool MN_REF(mn_dplr_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->K + 1, c->V) && mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

void MN_REF(mn_dplr_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    (void)phase, (void)shared;
    const mn_dplr_args *p = args;
    const int64_t K = p->call.K, V = p->call.V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *S = scratch, *u = S + K * V;
    load_state(S, p, n, h);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        const rows at = rows_at(p, seq.b, t, h);
        REAL *o = MN_ROW_OUT(REAL, p->o, seq.b, t, h);
        advance(S, u, S, p, &at);
        for (int64_t j = 0; o && j < V; j++) {
            double sum = 0.0;
            for (int64_t i = 0; i < K; i++) sum += S[i * V + j] * at.q[i];
            o[j] = (REAL)(p->scale * sum);
        }
    }
    REAL *last = MN_ROW_OUT(REAL, p->state, n, 0, h);
    for (int64_t i = 0; last && i < K * V; i++) last[i] = (REAL)S[i];
}

/* Scratch: D, du, then S_0 .. S_T, then u_1 .. u_T. */
bool MN_REF(mn_dplr_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->K + 1, c->V) &&
           mn_mul_i64(&count, count, mn_longest_sequence(c) + 2) &&
           mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

/* D += scale q do', dv and du */
static void values_backward(double *D, double *du, const mn_dplr_args *p, const rows *at,
                            const REAL *d_o, REAL *dv) {
    const int64_t V = p->call.V;
    for (int64_t j = 0; j < V; j++) {
        double to_v = 0.0;
        du[j] = 0.0;
        for (int64_t i = 0; i < p->call.K; i++) {
            D[i * V + j] += p->scale * at->q[i] * mn_ref_get(d_o, j);
            to_v += D[i * V + j] * at->k[i];
            du[j] += D[i * V + j] * at->b[i];
        }
        if (dv) dv[j] = (REAL)to_v;
    }
}

/* Gradients of one token from S_t, S_{t-1}, u_t and D_t; turns D_t into D_{t-1}. */
static void token_backward(double *D, double *du, const double *S, const double *before,
                           const double *u, const mn_dplr_args *p, int64_t b, int64_t t,
                           int64_t h) {
    const int64_t K = p->call.K, V = p->call.V;
    const rows at = rows_at(p, b, t, h);
    const REAL *d_o = MN_ROW(REAL, p->cot.o, b, t, h);
    REAL *dq = MN_ROW_OUT(REAL, p->grad.q, b, t, h), *dk = MN_ROW_OUT(REAL, p->grad.k, b, t, h);
    REAL *da = MN_ROW_OUT(REAL, p->grad.a, b, t, h), *db = MN_ROW_OUT(REAL, p->grad.b, b, t, h);
    REAL *dg = MN_ROW_OUT(REAL, p->grad.g, b, t, h);
    values_backward(D, du, p, &at, d_o, MN_ROW_OUT(REAL, p->grad.v, b, t, h));
    for (int64_t i = 0; i < K; i++) {
        const double decay = exp(at.g[i]);
        double to_q = 0.0, to_k = 0.0, to_a = 0.0, to_b = 0.0, to_g = 0.0;
        for (int64_t j = 0; j < V; j++) {
            const double adjoint = D[i * V + j];
            to_q += S[i * V + j] * mn_ref_get(d_o, j);
            to_k += adjoint * at.v[j];
            to_b += adjoint * u[j];
            to_a += before[i * V + j] * du[j];
            to_g += adjoint * before[i * V + j];
            D[i * V + j] = decay * adjoint + at.a[i] * du[j];
        }
        if (dq) dq[i] = (REAL)(p->scale * to_q);
        if (dk) dk[i] = (REAL)to_k;
        if (da) da[i] = (REAL)to_a;
        if (db) db[i] = (REAL)to_b;
        if (dg) dg[i] = (REAL)(decay * to_g);
    }
}

void MN_REF(mn_dplr_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    (void)phase, (void)shared;
    const mn_dplr_args *p = args;
    const int64_t V = p->call.V, size = p->call.K * V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *D = scratch, *du = D + size, *S = du + V, *u = S + (seq.length + 1) * size;
    load_state(S, p, n, h);
    for (int64_t t = 0; t < seq.length; t++) {
        const rows at = rows_at(p, seq.b, seq.t0 + t, h);
        advance(S + (t + 1) * size, u + t * V, S + t * size, p, &at);
    }
    const REAL *dlast = MN_ROW(REAL, p->cot.state, n, 0, h);
    for (int64_t i = 0; i < size; i++) D[i] = mn_ref_get(dlast, i);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        token_backward(D, du, S + (t + 1) * size, S + t * size, u + t * V, p, seq.b, seq.t0 + t, h);
    }
    REAL *dfirst = MN_ROW_OUT(REAL, p->grad.state0, n, 0, h);
    for (int64_t i = 0; dfirst && i < size; i++) dfirst[i] = (REAL)D[i];
}
