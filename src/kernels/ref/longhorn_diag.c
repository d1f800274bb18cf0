/* longhorn_diag.c - Longhorn with the diagonal approximation of its gain.
 *
 *   w_j = beta_j / n_j,  n_j = 1 + beta_j |k|^2      S_ij = c_ij S_ij + k_i w_j v_j
 *   c_ij = 1 - k_i^2 w_j = (1 + beta_j (|k|^2 - k_i^2)) / n_j          o = scale S'q
 *
 * The second form of c has no cancellation. Backward, with D the adjoint of S_t:
 *
 *   D += scale q do'      dq = scale S_t do      x_j = sum_i D_ij k_i (v_j - k_i S_{t-1,ij})
 *   dv_j = w_j sum_i D_ij k_i      dbeta_j = x_j / n_j^2
 *   dk_i = sum_j w_j D_ij (v_j - 2 k_i S_{t-1,ij}) - 2 k_i sum_j w_j^2 x_j       D <- c . D
 *
 * x is the gradient of w, and dw/dbeta = 1/n^2, dw/d|k|^2 = -w^2. One item is one head of one
 * sequence. States of all steps are kept for the way back. */
#include <string.h>

#include "kernels/ref/ref.h"

typedef struct rows {
    const REAL *q, *k, *v, *beta;
    double norm;    // |k|^2
} rows;

static rows rows_at(const mn_longhorn_diag_args *p, int64_t b, int64_t t, int64_t h) {
    rows r = { MN_ROW(REAL, p->q, b, t, h), MN_ROW(REAL, p->k, b, t, h),
               MN_ROW(REAL, p->v, b, t, h), MN_ROW(REAL, p->beta, b, t, h), 0.0 };
    for (int64_t i = 0; i < p->call.K; i++) r.norm += (double)r.k[i] * r.k[i];
    return r;
}

static void load_state(double *S, const mn_longhorn_diag_args *p, int64_t n, int64_t h) {
    const REAL *from = MN_ROW(REAL, p->state0, n, 0, h);
    for (int64_t i = 0; i < p->call.K * p->call.V; i++) S[i] = mn_ref_get(from, i);
}

/* |k|^2 - k_i^2, as a sum without the term */
static double norm_of_others(const rows *r, int64_t K, int64_t i) {
    double sum = 0.0;
    for (int64_t m = 0; m < K; m++) sum += m == i ? 0.0 : (double)r->k[m] * r->k[m];
    return sum;
}

/* c_ij */
static double keep(const rows *r, double others, int64_t j) {
    return (1.0 + r->beta[j] * others) / (1.0 + r->beta[j] * r->norm);
}

/* next may be S */
static void advance(double *next, const double *S, const mn_longhorn_diag_args *p, const rows *r) {
    const int64_t K = p->call.K, V = p->call.V;
    for (int64_t i = 0; i < K; i++) {
        const double others = norm_of_others(r, K, i);
        for (int64_t j = 0; j < V; j++) {
            const double w = r->beta[j] / (1.0 + r->beta[j] * r->norm);
            next[i * V + j] = keep(r, others, j) * S[i * V + j] + r->k[i] * w * r->v[j];
        }
    }
}

bool MN_REF(mn_longhorn_diag_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->K, c->V) && mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

void MN_REF(mn_longhorn_diag_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                          void *scratch) {
    (void)phase, (void)shared;
    const mn_longhorn_diag_args *p = args;
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

/* Scratch: x, then D, then S_0 .. S_T. */
bool MN_REF(mn_longhorn_diag_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->K, c->V) &&
           mn_mul_i64(&count, count, mn_longest_sequence(c) + 2) &&
           mn_add_i64(&count, count, c->V) && mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

/* D += scale q do', and dq */
static void read_backward(double *D, const double *S, const mn_longhorn_diag_args *p, const REAL *q,
                          const REAL *d_o, REAL *dq) {
    const int64_t V = p->call.V;
    for (int64_t i = 0; i < p->call.K; i++) {
        double sum = 0.0;
        for (int64_t j = 0; j < V; j++) {
            sum += S[i * V + j] * mn_ref_get(d_o, j);
            D[i * V + j] += p->scale * q[i] * mn_ref_get(d_o, j);
        }
        if (dq) dq[i] = (REAL)(p->scale * sum);
    }
}

/* dv, dbeta and x; returns sum_j w_j^2 x_j */
static double columns_backward(double *x, const double *D, const double *before,
                               const mn_longhorn_diag_args *p, const rows *r, REAL *dv,
                               REAL *dbeta) {
    const int64_t V = p->call.V;
    double through_norm = 0.0;
    for (int64_t j = 0; j < V; j++) {
        const double n = 1.0 + r->beta[j] * r->norm, w = r->beta[j] / n;
        double to_u = 0.0;
        x[j] = 0.0;
        for (int64_t i = 0; i < p->call.K; i++) {
            const double Dk = D[i * V + j] * r->k[i];
            to_u += Dk;
            x[j] += Dk * (r->v[j] - r->k[i] * before[i * V + j]);
        }
        if (dv) dv[j] = (REAL)(w * to_u);
        if (dbeta) dbeta[j] = (REAL)(x[j] / (n * n));
        through_norm += w * w * x[j];
    }
    return through_norm;
}

/* dk of one token; turns D_t into D_{t-1} */
static void keys_backward(double *D, const double *before, const mn_longhorn_diag_args *p,
                          const rows *r, double through_norm, REAL *dk) {
    const int64_t K = p->call.K, V = p->call.V;
    for (int64_t i = 0; i < K; i++) {
        const double k = r->k[i], others = norm_of_others(r, K, i);
        double sum = 0.0;
        for (int64_t j = 0; j < V; j++) {
            const double w = r->beta[j] / (1.0 + r->beta[j] * r->norm);
            sum += w * D[i * V + j] * (r->v[j] - 2.0 * k * before[i * V + j]);
            D[i * V + j] *= keep(r, others, j);
        }
        if (dk) dk[i] = (REAL)(sum - 2.0 * k * through_norm);
    }
}

void MN_REF(mn_longhorn_diag_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                           void *scratch) {
    (void)phase, (void)shared;
    const mn_longhorn_diag_args *p = args;
    const int64_t size = p->call.K * p->call.V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *x = scratch, *D = x + p->call.V, *S = D + size;
    load_state(S, p, n, h);
    for (int64_t t = 0; t < seq.length; t++) {
        const rows r = rows_at(p, seq.b, seq.t0 + t, h);
        advance(S + (t + 1) * size, S + t * size, p, &r);
    }
    const REAL *dlast = MN_ROW(REAL, p->cot.state, n, 0, h);
    for (int64_t i = 0; i < size; i++) D[i] = mn_ref_get(dlast, i);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        const int64_t at = seq.t0 + t;
        const rows r = rows_at(p, seq.b, at, h);
        read_backward(D, S + (t + 1) * size, p, r.q, MN_ROW(REAL, p->cot.o, seq.b, at, h),
                      MN_ROW_OUT(REAL, p->grad.q, seq.b, at, h));
        const double through_norm =
            columns_backward(x, D, S + t * size, p, &r, MN_ROW_OUT(REAL, p->grad.v, seq.b, at, h),
                             MN_ROW_OUT(REAL, p->grad.beta, seq.b, at, h));
        keys_backward(D, S + t * size, p, &r, through_norm,
                      MN_ROW_OUT(REAL, p->grad.k, seq.b, at, h));
    }
    REAL *dfirst = MN_ROW_OUT(REAL, p->grad.state0, n, 0, h);
    for (int64_t i = 0; dfirst && i < size; i++) dfirst[i] = (REAL)D[i];
}
