/* additive.c - S_t = diag(exp g_t) S_{t-1} + k_t v_t';  o_t = scale S_t'q_t.
 *
 * Backward, with D_t the adjoint of S_t (D_T starts from the cotangent of the final state):
 *
 *   D_t += scale q_t do_t'    dq_t = scale S_t do_t     dk_t = D_t v_t     dv_t = D_t'k_t
 *   dg_t = rowsum(D_t . exp(g_t) S_{t-1})               D_{t-1} = diag(exp g_t) D_t
 *
 * One item is one head of one sequence. States of all steps are kept for the way back. */
#include <math.h>
#include <string.h>

#include "kernels/ref/ref.h"

typedef struct rows {
    const REAL *q, *k, *v, *g;
} rows;

static rows rows_at(const mn_additive_args *p, int64_t b, int64_t t, int64_t h) {
    const int64_t j = mn_key_head(&p->call, h);
    return (rows){ MN_ROW(REAL, p->q, b, t, j), MN_ROW(REAL, p->k, b, t, j),
                   MN_ROW(REAL, p->v, b, t, h), MN_ROW(REAL, p->g, b, t, h) };
}

/* exp g for key channel i, whatever form the decay has */
static double decay_at(const mn_additive_args *p, const REAL *g, int64_t i) {
    if (!g) return 1.0;
    return exp(g[p->decay == MN_DECAY_CHANNEL ? i : 0]);
}

static void load_state(double *S, const mn_additive_args *p, int64_t n, int64_t h) {
    const int64_t size = p->call.K * p->call.V;
    const REAL *from = MN_ROW(REAL, p->state0, n, 0, h);
    for (int64_t i = 0; i < size; i++) S[i] = mn_ref_get(from, i);
}

/* next = diag(exp g) S + k v'; next may be S */
static void advance(double *next, const double *S, const mn_additive_args *p, const rows *r) {
    const int64_t V = p->call.V;
    for (int64_t i = 0; i < p->call.K; i++) {
        const double a = decay_at(p, r->g, i), k = r->k[i];
        for (int64_t j = 0; j < V; j++) next[i * V + j] = a * S[i * V + j] + k * r->v[j];
    }
}

bool MN_REF(mn_additive_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->K, c->V) && mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

void MN_REF(mn_additive_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                     void *scratch) {
    (void)phase, (void)shared;
    const mn_additive_args *p = args;
    const int64_t K = p->call.K, V = p->call.V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *S = scratch;
    load_state(S, p, n, h);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        const rows r = rows_at(p, seq.b, t, h);
        REAL *o = MN_ROW_OUT(REAL, p->o, seq.b, t, h);
        advance(S, S, p, &r);
        for (int64_t j = 0; o && j < V; j++) {
            double sum = 0.0;
            for (int64_t i = 0; i < K; i++) sum += S[i * V + j] * r.q[i];
            o[j] = (REAL)(p->scale * sum);
        }
    }
    REAL *last = MN_ROW_OUT(REAL, p->state, n, 0, h);
    for (int64_t i = 0; last && i < K * V; i++) last[i] = (REAL)S[i];
}

/* Scratch: D, then S_0 .. S_T. A decay per head gathers its gradient per sequence in shared memory
 * and sums it over sequences in a second phase. */
bool MN_REF(mn_additive_backward_plan)(const void *args, mn_plan *plan) {
    const mn_additive_args *p = args;
    const mn_call *c = args;
    const int64_t items = mn_n_sequences(c) * c->H;
    int64_t count;
    bool ok = mn_mul_i64(&count, c->K, c->V) &&
              mn_mul_i64(&count, count, mn_longest_sequence(c) + 2) &&
              mn_ref_plan(plan, items, count);
    if (p->decay == MN_DECAY_HEAD && p->grad.g.data) mn_ref_add_phase(plan, c->H);
    return ok && mn_mul_size(&plan->shared_bytes, (size_t)items, sizeof(double));
}

/* D += scale q do' */
static void add_outer(double *D, const mn_additive_args *p, const REAL *q, const REAL *d_o) {
    const int64_t V = p->call.V;
    for (int64_t i = 0; d_o && i < p->call.K; i++) {
        for (int64_t j = 0; j < V; j++) D[i * V + j] += p->scale * q[i] * d_o[j];
    }
}

/* Gradients of one token from S_t, S_{t-1} and D_t; turns D_t into D_{t-1}. Returns the part of dg
 * that belongs to the whole head. */
static double token_backward(double *D, const double *S, const double *before,
                             const mn_additive_args *p, const rows *r, int64_t b, int64_t t,
                             int64_t h) {
    const int64_t K = p->call.K, V = p->call.V;
    const REAL *d_o = MN_ROW(REAL, p->cot.o, b, t, h);
    REAL *dq = MN_ROW_OUT(REAL, p->grad.q, b, t, h), *dk = MN_ROW_OUT(REAL, p->grad.k, b, t, h);
    REAL *dv = MN_ROW_OUT(REAL, p->grad.v, b, t, h), *dg = MN_ROW_OUT(REAL, p->grad.g, b, t, h);
    double whole = 0.0;
    add_outer(D, p, r->q, d_o);
    for (int64_t j = 0; dv && j < V; j++) {
        double sum = 0.0;
        for (int64_t i = 0; i < K; i++) sum += D[i * V + j] * r->k[i];
        dv[j] = (REAL)sum;
    }
    for (int64_t i = 0; i < K; i++) {
        const double a = decay_at(p, r->g, i);
        double to_q = 0.0, to_k = 0.0, to_g = 0.0;
        for (int64_t j = 0; j < V; j++) {
            to_q += S[i * V + j] * mn_ref_get(d_o, j);
            to_k += D[i * V + j] * r->v[j];
            to_g += D[i * V + j] * a * before[i * V + j];
            D[i * V + j] *= a;
        }
        if (dq) dq[i] = (REAL)(p->scale * to_q);
        if (dk) dk[i] = (REAL)to_k;
        if (dg && p->decay == MN_DECAY_CHANNEL) dg[i] = (REAL)to_g;
        whole += to_g;
    }
    if (dg && p->decay == MN_DECAY_TOKEN) *dg = (REAL)whole;
    return whole;
}

static void sum_head_decay(const mn_additive_args *p, int64_t h, const double *parts) {
    double sum = 0.0;
    for (int64_t n = 0; n < mn_n_sequences(&p->call); n++) sum += parts[n * p->call.H + h];
    *MN_ROW_OUT(REAL, p->grad.g, 0, 0, h) = (REAL)sum;
}

void MN_REF(mn_additive_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                      void *scratch) {
    const mn_additive_args *p = args;
    if (phase == 1) {
        sum_head_decay(p, item, shared);
        return;
    }
    const int64_t size = p->call.K * p->call.V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *D = scratch, *S = D + size, whole = 0.0;
    load_state(S, p, n, h);
    for (int64_t t = 0; t < seq.length; t++) {
        const rows r = rows_at(p, seq.b, seq.t0 + t, h);
        advance(S + (t + 1) * size, S + t * size, p, &r);
    }
    const REAL *dlast = MN_ROW(REAL, p->cot.state, n, 0, h);
    for (int64_t i = 0; i < size; i++) D[i] = mn_ref_get(dlast, i);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        const rows r = rows_at(p, seq.b, seq.t0 + t, h);
        whole += token_backward(D, S + (t + 1) * size, S + t * size, p, &r, seq.b, seq.t0 + t, h);
    }
    REAL *dfirst = MN_ROW_OUT(REAL, p->grad.state0, n, 0, h);
    for (int64_t i = 0; dfirst && i < size; i++) dfirst[i] = (REAL)D[i];
    ((double *)shared)[item] = whole;
}
