/* curvature.c - the query contracted along the directions in which the keys so far vary.
 *
 *   n_t = n_0 + t     R_t = R_{t-1} + k_t k_t'     s_t = s_{t-1} + k_t
 *   C_t = R_t / n_t - s_t s_t' / n_t^2             qt_t = q_t - gamma_t C_t q_t
 *
 * The key of the token itself is in the statistics, so n_t >= 1. Backward, with d_t the cotangent
 * of qt_t and a_t = -gamma_t / n_t:
 *
 *   dq_t = d_t - gamma_t C_t d_t     dgamma_t = -q_t.C_t d_t
 *   D_t = dR + sum_{i>=t} a_i d_i q_i'
 *   e_t = ds - sum_{i>=t} a_i / n_i ((s_i.q_i) d_i + (s_i.d_i) q_i)
 *   dk_t = (D_t + D_t') k_t + e_t
 *
 * R is symmetric: what is given for it counts by its symmetric part, and so does its gradient.
 *
 * C_t needs the tokens before t and D_t those after it, so one sweep each way serves and no state
 * is kept; the second sweep takes s_t.q_t and s_t.d_t from the first. */
#include "kernels/ref/ref.h"

static double count_before(const mn_curvature_args *p, int64_t n) {
    return (double)(p->counts0 ? p->counts0[n] : p->n0);
}

static double dot(const double *a, const REAL *b, int64_t K) {
    double sum = 0.0;
    for (int64_t i = 0; i < K; i++) sum += a[i] * mn_ref_get(b, i);
    return sum;
}

/* S = (R + R') / 2 */
static void load_symmetric(double *S, const REAL *R, int64_t K) {
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j < K; j++) {
            S[i * K + j] = 0.5 * (mn_ref_get(R, i * K + j) + mn_ref_get(R, j * K + i));
        }
    }
}

static void load(double *to, const REAL *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = mn_ref_get(from, i);
}

static void store(REAL *to, const double *from, int64_t count) {
    for (int64_t i = 0; to && i < count; i++) to[i] = (REAL)from[i];
}

/* R += k k', s += k */
static void advance(double *R, double *s, const REAL *k, int64_t K) {
    for (int64_t i = 0; i < K; i++) {
        const double ki = k[i];
        for (int64_t j = 0; j < K; j++) R[i * K + j] += ki * k[j];
        s[i] += ki;
    }
}

bool MN_REF(mn_curvature_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->K, c->K + 1) && mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

void MN_REF(mn_curvature_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                      void *scratch) {
    (void)phase, (void)shared;
    const mn_curvature_args *p = args;
    const int64_t K = p->call.K, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *R = scratch, *s = R + K * K, count = count_before(p, n);
    load_symmetric(R, MN_ROW(REAL, p->kk0, n, 0, h), K);
    load(s, MN_ROW(REAL, p->ks0, n, 0, h), K);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        const REAL *q = MN_ROW(REAL, p->q, seq.b, t, h);
        const double gamma = *MN_ROW(REAL, p->gamma, seq.b, t, h);
        REAL *qt = MN_ROW_OUT(REAL, p->qt, seq.b, t, h);
        advance(R, s, MN_ROW(REAL, p->k, seq.b, t, h), K);
        count += 1.0;
        const double mean = dot(s, q, K) / count;
        for (int64_t i = 0; qt && i < K; i++) {
            qt[i] = (REAL)(q[i] - gamma / count * (dot(R + i * K, q, K) - mean * s[i]));
        }
    }
    store(MN_ROW_OUT(REAL, p->kk, n, 0, h), R, K * K);
    store(MN_ROW_OUT(REAL, p->ks, n, 0, h), s, K);
}

/* Scratch: a matrix and a vector, R and s on the way there, D and e on the way back; a vector for
 * C'd; s.q and s.d of every token. */
bool MN_REF(mn_curvature_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t square, per_token, count;
    return mn_mul_i64(&square, c->K, c->K + 2) &&
           mn_mul_i64(&per_token, mn_longest_sequence(c), 2) &&
           mn_add_i64(&count, square, per_token) &&
           mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

/* dq, dgamma, and the two products with s that the way back needs. R and s stand after token t. */
static void query_backward(double *products, double *y, const mn_curvature_args *p, const double *R,
                           const double *s, double count, int64_t b, int64_t t, int64_t h) {
    const int64_t K = p->call.K;
    const REAL *q = MN_ROW(REAL, p->q, b, t, h), *d = MN_ROW(REAL, p->cot.qt, b, t, h);
    const double gamma = *MN_ROW(REAL, p->gamma, b, t, h);
    REAL *dq = MN_ROW_OUT(REAL, p->grad.q, b, t, h);
    REAL *dgamma = MN_ROW_OUT(REAL, p->grad.gamma, b, t, h);
    products[0] = dot(s, q, K);
    products[1] = dot(s, d, K);
    for (int64_t i = 0; i < K; i++) y[i] = dot(R + i * K, d, K) - products[1] / count * s[i];
    for (int64_t i = 0; dq && i < K; i++) dq[i] = (REAL)(mn_ref_get(d, i) - gamma / count * y[i]);
    if (dgamma) *dgamma = (REAL)(-dot(y, q, K) / count);
}

/* D and e take in token t; then dk_t. */
static void key_backward(double *D, double *e, const mn_curvature_args *p, const double *products,
                         double count, int64_t b, int64_t t, int64_t h) {
    const int64_t K = p->call.K;
    const REAL *q = MN_ROW(REAL, p->q, b, t, h), *d = MN_ROW(REAL, p->cot.qt, b, t, h);
    const REAL *k = MN_ROW(REAL, p->k, b, t, h);
    REAL *dk = MN_ROW_OUT(REAL, p->grad.k, b, t, h);
    const double a = -(double)*MN_ROW(REAL, p->gamma, b, t, h) / count;
    for (int64_t i = 0; i < K; i++) {
        const double di = mn_ref_get(d, i);
        for (int64_t j = 0; j < K; j++) D[i * K + j] += a * di * q[j];
        e[i] -= a / count * (products[0] * di + products[1] * q[i]);
    }
    for (int64_t i = 0; dk && i < K; i++) {
        double sum = e[i] + (p->adds_k ? (double)dk[i] : 0.0);
        for (int64_t j = 0; j < K; j++) sum += (D[i * K + j] + D[j * K + i]) * k[j];
        dk[i] = (REAL)sum;
    }
}

void MN_REF(mn_curvature_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                       void *scratch) {
    (void)phase, (void)shared;
    const mn_curvature_args *p = args;
    const int64_t K = p->call.K, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *M = scratch, *m = M + K * K, *y = m + K, *products = y + K;
    double count = count_before(p, n);
    load_symmetric(M, MN_ROW(REAL, p->kk0, n, 0, h), K);
    load(m, MN_ROW(REAL, p->ks0, n, 0, h), K);
    for (int64_t t = 0; t < seq.length; t++) {
        advance(M, m, MN_ROW(REAL, p->k, seq.b, seq.t0 + t, h), K);
        count += 1.0;
        query_backward(products + 2 * t, y, p, M, m, count, seq.b, seq.t0 + t, h);
    }
    load(M, MN_ROW(REAL, p->cot.kk, n, 0, h), K * K);
    load(m, MN_ROW(REAL, p->cot.ks, n, 0, h), K);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        key_backward(M, m, p, products + 2 * t, count, seq.b, seq.t0 + t, h);
        count -= 1.0;
    }
    REAL *dkk0 = MN_ROW_OUT(REAL, p->grad.kk0, n, 0, h);
    for (int64_t i = 0; dkk0 && i < K * K; i++) {
        dkk0[i] = (REAL)(0.5 * (M[i] + M[i % K * K + i / K]));
    }
    store(MN_ROW_OUT(REAL, p->grad.ks0, n, 0, h), m, K);
}
