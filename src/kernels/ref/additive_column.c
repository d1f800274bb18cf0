/* additive_column.c - S_t = diag(exp g_t) S_{t-1} + v_t k_t';  o_t = scale S_t q_t: a sum whose
 * value channels forget, each at its own rate. S (V,K) is that of additive the other way round.
 *
 * Backward, with D_t the adjoint of S_t (D_T starts from the cotangent of the final state):
 *
 *   D_t += scale do_t q_t'    dq_t = scale S_t'do_t     dk_t = D_t'v_t     dv_t = D_t k_t
 *   dg_t = rowsum(D_t . exp(g_t) S_{t-1})               D_{t-1} = diag(exp g_t) D_t
 *
 * One item is one head of one sequence. States of all steps are kept for the way back. */
#include <math.h>
#include <string.h>

#include "kernels/ref/ref.h"

typedef struct rows {
    const REAL *q, *k, *v, *g;
} rows;

static rows rows_at(const mn_additive_column_args *p, int64_t b, int64_t t, int64_t h) {
    return (rows){ MN_ROW(REAL, p->q, b, t, h), MN_ROW(REAL, p->k, b, t, h),
                   MN_ROW(REAL, p->v, b, t, h), MN_ROW(REAL, p->g, b, t, h) };
}

static void load_state(double *S, const mn_additive_column_args *p, int64_t n, int64_t h) {
    const int64_t size = p->call.K * p->call.V;
    const REAL *from = MN_ROW(REAL, p->state0, n, 0, h);
    for (int64_t i = 0; i < size; i++) S[i] = mn_ref_get(from, i);
}

/* next = diag(exp g) S + v k'; next may be S */
static void advance(double *next, const double *S, const mn_call *c, const rows *r) {
    for (int64_t j = 0; j < c->V; j++) {
        const double a = exp((double)r->g[j]);
        for (int64_t i = 0; i < c->K; i++) {
            next[j * c->K + i] = a * S[j * c->K + i] + (double)r->v[j] * r->k[i];
        }
    }
}

bool MN_REF(mn_additive_column_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->K, c->V) && mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

void MN_REF(mn_additive_column_forward_run)(const void *args, int phase, int64_t item,
                                            void *shared, void *scratch) {
    (void)phase, (void)shared;
    const mn_additive_column_args *p = args;
    const int64_t K = p->call.K, V = p->call.V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *S = scratch;
    load_state(S, p, n, h);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        const rows r = rows_at(p, seq.b, t, h);
        REAL *o = MN_ROW_OUT(REAL, p->o, seq.b, t, h);
        advance(S, S, &p->call, &r);
        for (int64_t j = 0; o && j < V; j++) {
            double sum = 0.0;
            for (int64_t i = 0; i < K; i++) sum += S[j * K + i] * r.q[i];
            o[j] = (REAL)(p->scale * sum);
        }
    }
    REAL *last = MN_ROW_OUT(REAL, p->state, n, 0, h);
    for (int64_t i = 0; last && i < K * V; i++) last[i] = (REAL)S[i];
}

/* Scratch: D, then S_0 .. S_T. */
bool MN_REF(mn_additive_column_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->K, c->V) &&
           mn_mul_i64(&count, count, mn_longest_sequence(c) + 2) &&
           mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

/* Gradients of values and decays of one token, channel by channel; D becomes D_{t-1}. */
static void columns_backward(double *D, const double *before, const mn_additive_column_args *p,
                             const rows *r, REAL *dv, REAL *dg) {
    const int64_t K = p->call.K, V = p->call.V;
    for (int64_t j = 0; j < V; j++) {
        const double a = exp((double)r->g[j]);
        double to_v = 0.0, to_g = 0.0;
        for (int64_t i = 0; i < K; i++) {
            to_v += D[j * K + i] * r->k[i];
            to_g += D[j * K + i] * a * before[j * K + i];
            D[j * K + i] *= a;
        }
        if (dv) dv[j] = (REAL)to_v;
        if (dg) dg[j] = (REAL)to_g;
    }
}

/* Gradients of one token from S_t, S_{t-1} and D_t; turns D_t into D_{t-1}. */
static void token_backward(double *D, const double *S, const double *before,
                           const mn_additive_column_args *p, int64_t b, int64_t t, int64_t h) {
    const int64_t K = p->call.K, V = p->call.V;
    const rows r = rows_at(p, b, t, h);
    const REAL *d_o = MN_ROW(REAL, p->cot.o, b, t, h);
    REAL *dq = MN_ROW_OUT(REAL, p->grad.q, b, t, h), *dk = MN_ROW_OUT(REAL, p->grad.k, b, t, h);
    for (int64_t i = 0; i < K; i++) {
        double to_q = 0.0, to_k = 0.0;
        for (int64_t j = 0; j < V; j++) {
            const double d = mn_ref_get(d_o, j);
            D[j * K + i] += p->scale * r.q[i] * d;
            to_q += S[j * K + i] * d;
            to_k += D[j * K + i] * r.v[j];
        }
        if (dq) dq[i] = (REAL)(p->scale * to_q);
        if (dk) dk[i] = (REAL)to_k;
    }
    columns_backward(D, before, p, &r, MN_ROW_OUT(REAL, p->grad.v, b, t, h),
                     MN_ROW_OUT(REAL, p->grad.g, b, t, h));
}

void MN_REF(mn_additive_column_backward_run)(const void *args, int phase, int64_t item,
                                             void *shared, void *scratch) {
    (void)phase, (void)shared;
    const mn_additive_column_args *p = args;
    const int64_t size = p->call.K * p->call.V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *D = scratch, *S = D + size;
    load_state(S, p, n, h);
    for (int64_t t = 0; t < seq.length; t++) {
        const rows r = rows_at(p, seq.b, seq.t0 + t, h);
        advance(S + (t + 1) * size, S + t * size, &p->call, &r);
    }
    const REAL *dlast = MN_ROW(REAL, p->cot.state, n, 0, h);
    for (int64_t i = 0; i < size; i++) D[i] = mn_ref_get(dlast, i);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        token_backward(D, S + (t + 1) * size, S + t * size, p, seq.b, seq.t0 + t, h);
    }
    REAL *dfirst = MN_ROW_OUT(REAL, p->grad.state0, n, 0, h);
    for (int64_t i = 0; dfirst && i < size; i++) dfirst[i] = (REAL)D[i];
}
