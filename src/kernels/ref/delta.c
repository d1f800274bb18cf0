/* delta.c - S' = diag(exp g) S;  r = v - S'^T e;  S = S' + w r';  o = scale S'q, with w = beta (w
 * or e).
 *
 * Backward, D_t the adjoint of S_t (D_T starts from the cotangent of the final state):
 *
 *   D += scale q do'      dq = scale S do     dw = D r     dr = D'w     dv = dr     de = -S' dr
 *   D' = D - e dr'        dg = rowsum(D' . S')             D_{t-1} = diag(exp g) D'
 *
 * One item is one head of one sequence. States of all steps are kept for the way back. */
#include <math.h>

#include "kernels/ref/ref.h"

typedef struct rows {
    const REAL *q, *e, *w, *v, *g;
    double beta;
} rows;

static rows rows_at(const mn_delta_args *p, int64_t b, int64_t t, int64_t h) {
    const int64_t j = mn_key_head(&p->call, h);
    const REAL *beta = MN_ROW(REAL, p->beta, b, t, h), *e = MN_ROW(REAL, p->e, b, t, j);
    return (rows){ MN_ROW(REAL, p->q, b, t, j), e, p->w.data ? MN_ROW(REAL, p->w, b, t, j) : e,
                   MN_ROW(REAL, p->v, b, t, h), MN_ROW(REAL, p->g, b, t, h), beta ? *beta : 1.0 };
}

static double decay_at(const mn_delta_args *p, const REAL *g, int64_t i) {
    if (!g) return 1.0;
    return exp(g[p->decay == MN_DECAY_CHANNEL ? i : 0]);
}

static void load_state(double *S, const mn_delta_args *p, int64_t n, int64_t h) {
    const REAL *from = MN_ROW(REAL, p->state0, n, 0, h);
    for (int64_t i = 0; i < p->call.K * p->call.V; i++) S[i] = mn_ref_get(from, i);
}

/* next = S' + w r' and r; next may be S */
static void advance(double *next, double *r, const double *S, const mn_delta_args *p,
                    const rows *at) {
    const int64_t K = p->call.K, V = p->call.V;
    for (int64_t j = 0; j < V; j++) r[j] = at->v[j];
    for (int64_t i = 0; i < K; i++) {
        const double a = decay_at(p, at->g, i);
        for (int64_t j = 0; j < V; j++) {
            next[i * V + j] = a * S[i * V + j];
            r[j] -= next[i * V + j] * at->e[i];
        }
    }
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j < V; j++) next[i * V + j] += at->beta * at->w[i] * r[j];
    }
}

bool MN_REF(mn_delta_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->K + 1, c->V) && mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

void MN_REF(mn_delta_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    (void)phase, (void)shared;
    const mn_delta_args *p = args;
    const int64_t K = p->call.K, V = p->call.V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *S = scratch, *r = S + K * V;
    load_state(S, p, n, h);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        const rows at = rows_at(p, seq.b, t, h);
        REAL *o = MN_ROW_OUT(REAL, p->o, seq.b, t, h);
        advance(S, r, S, p, &at);
        for (int64_t j = 0; o && j < V; j++) {
            double sum = 0.0;
            for (int64_t i = 0; i < K; i++) sum += S[i * V + j] * at.q[i];
            o[j] = (REAL)(p->scale * sum);
        }
    }
    REAL *last = MN_ROW_OUT(REAL, p->state, n, 0, h);
    for (int64_t i = 0; last && i < K * V; i++) last[i] = (REAL)S[i];
}

/* Scratch: D, dr, then S_0 .. S_T, then r_1 .. r_T. */
bool MN_REF(mn_delta_backward_plan)(const void *args, mn_plan *plan) {
    const mn_delta_args *p = args;
    const mn_call *c = args;
    const int64_t items = mn_n_sequences(c) * c->H;
    int64_t count;
    const bool ok = mn_mul_i64(&count, c->K + 1, c->V) &&
                    mn_mul_i64(&count, count, mn_longest_sequence(c) + 2) &&
                    mn_ref_plan(plan, items, count);
    if (p->decay == MN_DECAY_HEAD && p->grad.g.data) mn_ref_add_phase(plan, c->H);
    return ok && mn_mul_size(&plan->shared_bytes, (size_t)items, sizeof(double));
}

/* D += scale q do'; dr = D'w */
static void residual_adjoint(double *D, double *dr, const mn_delta_args *p, const rows *at,
                             const REAL *d_o) {
    const int64_t V = p->call.V;
    for (int64_t j = 0; j < V; j++) dr[j] = 0.0;
    for (int64_t i = 0; i < p->call.K; i++) {
        for (int64_t j = 0; j < V; j++) {
            D[i * V + j] += p->scale * at->q[i] * mn_ref_get(d_o, j);
            dr[j] += at->beta * at->w[i] * D[i * V + j];
        }
    }
}

/* Gradients of one token from S_t, S_{t-1}, r_t and D_t; turns D_t into D_{t-1}. Returns the part
 * of dg that belongs to the whole head. */
static double token_backward(double *D, double *dr, const double *S, const double *before,
                             const double *r, const mn_delta_args *p, int64_t b, int64_t t,
                             int64_t h) {
    const int64_t K = p->call.K, V = p->call.V;
    const rows at = rows_at(p, b, t, h);
    const REAL *d_o = MN_ROW(REAL, p->cot.o, b, t, h);
    REAL *dq = MN_ROW_OUT(REAL, p->grad.q, b, t, h), *de = MN_ROW_OUT(REAL, p->grad.e, b, t, h);
    REAL *dw = MN_ROW_OUT(REAL, p->grad.w, b, t, h), *dv = MN_ROW_OUT(REAL, p->grad.v, b, t, h);
    REAL *dg = MN_ROW_OUT(REAL, p->grad.g, b, t, h),
         *dbeta = MN_ROW_OUT(REAL, p->grad.beta, b, t, h);
    double whole = 0.0, to_beta = 0.0;
    residual_adjoint(D, dr, p, &at, d_o);
    for (int64_t j = 0; dv && j < V; j++) dv[j] = (REAL)dr[j];
    for (int64_t i = 0; i < K; i++) {
        const double a = decay_at(p, at.g, i);
        double to_q = 0.0, to_w = 0.0, to_e = 0.0, to_g = 0.0;
        for (int64_t j = 0; j < V; j++) {
            const double decayed = a * before[i * V + j];
            to_q += S[i * V + j] * mn_ref_get(d_o, j);
            to_w += D[i * V + j] * r[j];
            to_e -= decayed * dr[j];
            D[i * V + j] -= at.e[i] * dr[j];
            to_g += D[i * V + j] * decayed;
            D[i * V + j] *= a;
        }
        to_beta += at.w[i] * to_w;
        if (dq) dq[i] = (REAL)(p->scale * to_q);
        if (dw) dw[i] = (REAL)(at.beta * to_w);
        if (de) de[i] = (REAL)(to_e + (p->w.data ? 0.0 : at.beta * to_w));
        if (dg && p->decay == MN_DECAY_CHANNEL) dg[i] = (REAL)to_g;
        whole += to_g;
    }
    if (dbeta) *dbeta = (REAL)to_beta;
    if (dg && p->decay == MN_DECAY_TOKEN) *dg = (REAL)whole;
    return whole;
}

static void sum_head_decay(const mn_delta_args *p, int64_t h, const double *parts) {
    double sum = 0.0;
    for (int64_t n = 0; n < mn_n_sequences(&p->call); n++) sum += parts[n * p->call.H + h];
    *MN_ROW_OUT(REAL, p->grad.g, 0, 0, h) = (REAL)sum;
}

void MN_REF(mn_delta_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch) {
    const mn_delta_args *p = args;
    if (phase == 1) {
        sum_head_decay(p, item, shared);
        return;
    }
    const int64_t V = p->call.V, size = p->call.K * V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *D = scratch, *dr = D + size, *S = dr + V, *r = S + (seq.length + 1) * size, whole = 0.0;
    load_state(S, p, n, h);
    for (int64_t t = 0; t < seq.length; t++) {
        const rows at = rows_at(p, seq.b, seq.t0 + t, h);
        advance(S + (t + 1) * size, r + t * V, S + t * size, p, &at);
    }
    const REAL *dlast = MN_ROW(REAL, p->cot.state, n, 0, h);
    for (int64_t i = 0; i < size; i++) D[i] = mn_ref_get(dlast, i);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        whole += token_backward(D, dr, S + (t + 1) * size, S + t * size, r + t * V, p, seq.b,
                                seq.t0 + t, h);
    }
    REAL *dfirst = MN_ROW_OUT(REAL, p->grad.state0, n, 0, h);
    for (int64_t i = 0; dfirst && i < size; i++) dfirst[i] = (REAL)D[i];
    ((double *)shared)[item] = whole;
}
