/* mlstm.c - a sum with exponential input gates and a normaliser, kept in units of exp(m).
 *
 *   lf_t = log sigmoid(fpre_t)     m_t = max(lf_t + m_{t-1}, ipre_t)
 *   f = exp(lf_t + m_{t-1} - m_t)  i = exp(ipre_t - m_t)
 *   C_t = f C_{t-1} + i k v'       n_t = f n_{t-1} + i k
 *   o_t = num / den,  num = scale C_t'q,  a = scale n_t.q,  den = max(|a|, exp(-m_t))
 *
 * The stabiliser m drops out of o, C e^m and n e^m, so backward treats it as a constant. With D, d
 * the adjoints of C, n (in units of exp(-m); at the end dcsum e^m and dnsum e^m):
 *
 *   dnum = do / den     da = -sign(a) (do.num) / den^2 where |a| is the larger, else 0
 *   D += scale q dnum'  d += scale q da     dq = scale (C dnum + n da)
 *   dk = i (D v + d)    dv = i D'k          dipre = k.dk
 *   dlf = f (D.C_{t-1} + d.n_{t-1})         dfpre = dlf sigmoid(-fpre)     D, d <- f D, f d
 *   dC0 = D, dn0 = d, dm0 = D.C0 + d.n0
 *
 * A fresh state has m = -inf and then f = 0. One item is one head of one sequence. States of all
 * steps are kept for the way back: C, n and m, as K x V, K and 1 doubles. */
#include <math.h>
#include <string.h>

#include "kernels/ref/ref.h"

/* What one token needs of its gates. */
typedef struct gates {
    double f, i, m;
} gates;

static double log_sigmoid(double x) {
    return (x < 0.0 ? x : 0.0) - log1p(exp(-fabs(x)));
}

/* exp(x - m), 0 where x is -inf: nothing has been stored yet */
static double relative(double x, double m) {
    return x == -INFINITY ? 0.0 : exp(x - m);
}

static gates gates_at(const mn_mlstm_args *p, double m, int64_t b, int64_t t, int64_t h) {
    const double ipre = *MN_ROW(REAL, p->ipre, b, t, h), fpre = *MN_ROW(REAL, p->fpre, b, t, h);
    const double decayed = log_sigmoid(fpre) + m;
    const double next = decayed > ipre ? decayed : ipre;
    return (gates){ relative(decayed, next), relative(ipre, next), next };
}

static bool count_state(int64_t *count, const mn_call *c) {
    return mn_mul_i64(count, c->K, c->V + 1) && mn_add_i64(count, *count, 1);
}

/* The state as C, n, m in a row; fresh where no m is given. */
static void load_state(double *S, const mn_mlstm_args *p, int64_t n, int64_t h) {
    const int64_t K = p->call.K, KV = K * p->call.V;
    const REAL *C = MN_ROW(REAL, p->C0, n, 0, h), *norm = MN_ROW(REAL, p->n0, n, 0, h);
    const REAL *m = MN_ROW(REAL, p->m0, n, 0, h);
    for (int64_t i = 0; i < KV; i++) S[i] = mn_ref_get(C, i);
    for (int64_t i = 0; i < K; i++) S[KV + i] = mn_ref_get(norm, i);
    S[KV + K] = m ? (double)*m : -INFINITY;
}

/* The state after token t; `next` may be S. */
static gates advance(double *next, const double *S, const mn_mlstm_args *p, int64_t b, int64_t t,
                     int64_t h) {
    const int64_t K = p->call.K, V = p->call.V;
    const REAL *k = MN_ROW(REAL, p->k, b, t, h), *v = MN_ROW(REAL, p->v, b, t, h);
    const gates g = gates_at(p, S[K * V + K], b, t, h);
    for (int64_t i = 0; i < K; i++) {
        const double ik = g.i * k[i];
        for (int64_t j = 0; j < V; j++) next[i * V + j] = g.f * S[i * V + j] + ik * v[j];
        next[K * V + i] = g.f * S[K * V + i] + ik;
    }
    next[K * V + K] = g.m;
    return g;
}

/* num, and a; the denominator is returned. It is 0 only where both its terms underflow. */
static double read_state(double *num, double *a, const double *S, const mn_mlstm_args *p,
                         const REAL *q) {
    const int64_t K = p->call.K, V = p->call.V;
    *a = 0.0;
    for (int64_t j = 0; j < V; j++) num[j] = 0.0;
    for (int64_t i = 0; i < K; i++) {
        const double qi = p->scale * q[i];
        for (int64_t j = 0; j < V; j++) num[j] += S[i * V + j] * qi;
        *a += S[K * V + i] * qi;
    }
    return fmax(fabs(*a), exp(-S[K * V + K]));
}

static double over(double x, double den) {
    return den == 0.0 ? 0.0 : x / den;    // NaN stays
}

static void store_state(const mn_mlstm_args *p, const double *S, int64_t n, int64_t h) {
    const int64_t K = p->call.K, KV = K * p->call.V;
    REAL *C = MN_ROW_OUT(REAL, p->C, n, 0, h), *norm = MN_ROW_OUT(REAL, p->n, n, 0, h);
    REAL *m = MN_ROW_OUT(REAL, p->m, n, 0, h);
    REAL *csum = MN_ROW_OUT(REAL, p->csum, n, 0, h), *nsum = MN_ROW_OUT(REAL, p->nsum, n, 0, h);
    const double unit = exp(S[KV + K]);
    for (int64_t i = 0; C && i < KV; i++) C[i] = (REAL)S[i];
    for (int64_t i = 0; norm && i < K; i++) norm[i] = (REAL)S[KV + i];
    for (int64_t i = 0; csum && i < KV; i++) csum[i] = (REAL)(S[i] * unit);
    for (int64_t i = 0; nsum && i < K; i++) nsum[i] = (REAL)(S[KV + i] * unit);
    if (m) *m = (REAL)S[KV + K];
}

bool MN_REF(mn_mlstm_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return count_state(&count, c) && mn_add_i64(&count, count, c->V) &&
           mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

void MN_REF(mn_mlstm_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    (void)phase, (void)shared;
    const mn_mlstm_args *p = args;
    const int64_t V = p->call.V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *num = scratch, *S = num + V;
    load_state(S, p, n, h);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        REAL *o = MN_ROW_OUT(REAL, p->o, seq.b, t, h);
        double a;
        advance(S, S, p, seq.b, t, h);
        if (!o) continue;
        const double den = read_state(num, &a, S, p, MN_ROW(REAL, p->q, seq.b, t, h));
        for (int64_t j = 0; j < V; j++) o[j] = (REAL)over(num[j], den);
    }
    store_state(p, S, n, h);
}

/* Scratch: dnum, D and d, then the states 0 .. T. */
bool MN_REF(mn_mlstm_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return count_state(&count, c) && mn_mul_i64(&count, count, mn_longest_sequence(c) + 2) &&
           mn_add_i64(&count, count, c->V) && mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

/* dnum and da (returned) of one token. */
static double quotient_backward(double *dnum, const double *S, const mn_mlstm_args *p,
                                const REAL *q, const REAL *d_o) {
    const int64_t V = p->call.V;
    double a, inner = 0.0;
    const double den = read_state(dnum, &a, S, p, q);
    for (int64_t j = 0; j < V; j++) {
        inner += over(dnum[j], den) * mn_ref_get(d_o, j);
        dnum[j] = over(mn_ref_get(d_o, j), den);
    }
    if (!(fabs(a) > exp(-S[p->call.K * (V + 1)]))) return 0.0;
    return -inner / a;
}

/* Gradients of one token; D (with d behind it) turns from the adjoint of S into that of
 * `before`. */
static void token_backward(double *D, double *dnum, const double *S, const double *before,
                           const mn_mlstm_args *p, int64_t b, int64_t t, int64_t h) {
    const int64_t K = p->call.K, V = p->call.V, KV = K * V;
    const REAL *q = MN_ROW(REAL, p->q, b, t, h), *k = MN_ROW(REAL, p->k, b, t, h);
    const REAL *v = MN_ROW(REAL, p->v, b, t, h);
    REAL *dq = MN_ROW_OUT(REAL, p->grad.q, b, t, h), *dk = MN_ROW_OUT(REAL, p->grad.k, b, t, h);
    REAL *dv = MN_ROW_OUT(REAL, p->grad.v, b, t, h);
    REAL *dipre = MN_ROW_OUT(REAL, p->grad.ipre, b, t, h);
    REAL *dfpre = MN_ROW_OUT(REAL, p->grad.fpre, b, t, h);
    const gates g = gates_at(p, before[KV + K], b, t, h);
    const double da = quotient_backward(dnum, S, p, q, MN_ROW(REAL, p->cot.o, b, t, h));
    double to_i = 0.0, to_f = 0.0;
    for (int64_t i = 0; i < K; i++) {
        double to_q = S[KV + i] * da, to_k;
        D[KV + i] += p->scale * q[i] * da;
        to_k = D[KV + i];
        to_f += D[KV + i] * before[KV + i];
        for (int64_t j = 0; j < V; j++) {
            double *Dij = &D[i * V + j];
            *Dij += p->scale * q[i] * dnum[j];
            to_q += S[i * V + j] * dnum[j];
            to_k += *Dij * v[j];
            to_f += *Dij * before[i * V + j];
        }
        to_i += g.i * to_k * k[i];
        if (dq) dq[i] = (REAL)(p->scale * to_q);
        if (dk) dk[i] = (REAL)(g.i * to_k);
    }
    for (int64_t j = 0; dv && j < V; j++) {
        double sum = 0.0;
        for (int64_t i = 0; i < K; i++) sum += D[i * V + j] * k[i];
        dv[j] = (REAL)(g.i * sum);
    }
    for (int64_t i = 0; i < KV + K; i++) D[i] *= g.f;
    const double fpre = *MN_ROW(REAL, p->fpre, b, t, h);
    if (dipre) *dipre = (REAL)to_i;
    if (dfpre) *dfpre = (REAL)(g.f * to_f * exp(log_sigmoid(-fpre)));
}

/* Cotangents of csum and nsum in units of exp(-m); where they are 0 the unit does not matter. */
static void load_adjoint(double *D, const mn_mlstm_args *p, double m, int64_t n, int64_t h) {
    const int64_t K = p->call.K, KV = K * p->call.V;
    const REAL *dcsum = MN_ROW(REAL, p->cot.csum, n, 0, h);
    const REAL *dnsum = MN_ROW(REAL, p->cot.nsum, n, 0, h);
    for (int64_t i = 0; i < KV + K; i++) {
        const double x = i < KV ? mn_ref_get(dcsum, i) : mn_ref_get(dnsum, i - KV);
        D[i] = x == 0.0 ? 0.0 : x * exp(m);
    }
}

static void store_initial(const mn_mlstm_args *p, const double *D, const double *S, int64_t n,
                          int64_t h) {
    const int64_t K = p->call.K, KV = K * p->call.V;
    REAL *dC0 = MN_ROW_OUT(REAL, p->grad.C0, n, 0, h), *dn0 = MN_ROW_OUT(REAL, p->grad.n0, n, 0, h);
    REAL *dm0 = MN_ROW_OUT(REAL, p->grad.m0, n, 0, h);
    double sum = 0.0;
    for (int64_t i = 0; i < KV + K; i++) sum += D[i] * S[i];
    for (int64_t i = 0; dC0 && i < KV; i++) dC0[i] = (REAL)D[i];
    for (int64_t i = 0; dn0 && i < K; i++) dn0[i] = (REAL)D[KV + i];
    if (dm0) *dm0 = (REAL)sum;
}

void MN_REF(mn_mlstm_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch) {
    (void)phase, (void)shared;
    const mn_mlstm_args *p = args;
    const int64_t K = p->call.K, V = p->call.V, size = K * V + K + 1;
    const int64_t n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *dnum = scratch, *D = dnum + V, *S = D + size;
    load_state(S, p, n, h);
    for (int64_t t = 0; t < seq.length; t++) {
        advance(S + (t + 1) * size, S + t * size, p, seq.b, seq.t0 + t, h);
    }
    load_adjoint(D, p, S[seq.length * size + size - 1], n, h);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        token_backward(D, dnum, S + (t + 1) * size, S + t * size, p, seq.b, seq.t0 + t, h);
    }
    store_initial(p, D, S, n, h);
}
