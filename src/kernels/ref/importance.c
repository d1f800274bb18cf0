/* importance.c - Palimpsa: every memory cell keeps a mean and how much it matters.
 *
 *   I_t = a_t I_{t-1} + (1 - a_t) ip + k_t^2 b_t'     mu_t = (a_t I_{t-1} mu_{t-1} + k_t v_t') /
 * I_t
 *   o_t = scale mu_t'q_t        ovar_t[j] = scale^2 sum_i q_i^2 / I_ij        a_t = exp g_t
 *
 * M = mu I is carried in place of mu. Backward, with A, C the adjoints of M_t and I_t:
 *
 *   dmu = scale q do'      A += dmu / I        C -= dmu mu / I + scale^2 q^2 dovar' / I^2
 *   dq = scale mu do + 2 scale^2 q . (1/I) dovar
 *   dk = A v + 2 k . (C b)      dv = A'k      db = C'k^2
 *   dg = a sum(A . M_{t-1} + C . (I_{t-1} - ip))       dip += (1 - a) sum C
 *   A, C <- a A, a C
 *
 * and at the start dmu0 = A . I0, dimp0 = C + A . mu0, the latter being part of dip where I0 = ip.
 * One item is one head of one sequence. States of all steps are kept for the way back. */
#include <math.h>
#include <string.h>

#include "kernels/ref/ref.h"

typedef struct rows {
    const REAL *q, *k, *v, *b;
    double a, forget;    // forget = 1 - a, formed without cancellation
} rows;

/* M and I, K x V each */
typedef struct cells {
    double *M, *I;
} cells;

static rows rows_at(const mn_importance_args *p, int64_t b, int64_t t, int64_t h) {
    const double g = *MN_ROW(REAL, p->g, b, t, h);
    return (rows){ MN_ROW(REAL, p->q, b, t, h), MN_ROW(REAL, p->k, b, t, h),
                   MN_ROW(REAL, p->v, b, t, h), MN_ROW(REAL, p->b, b, t, h), exp(g), -expm1(g) };
}

static double prior_of(const mn_importance_args *p, int64_t h) {
    return *MN_ROW(REAL, p->ip, 0, 0, h);
}

static double first_importance(const mn_importance_args *p, int64_t n, int64_t h, int64_t i) {
    const REAL *imp0 = MN_ROW(REAL, p->imp0, n, 0, h);
    return imp0 ? imp0[i] : prior_of(p, h);
}

static cells cells_at(double *from, int64_t size, int64_t index) {
    return (cells){ from + 2 * index * size, from + (2 * index + 1) * size };
}

static void load_state(cells s, const mn_importance_args *p, int64_t n, int64_t h) {
    const REAL *mu0 = MN_ROW(REAL, p->mu0, n, 0, h);
    for (int64_t i = 0; i < p->call.K * p->call.V; i++) {
        s.I[i] = first_importance(p, n, h, i);
        s.M[i] = mn_ref_get(mu0, i) * s.I[i];
    }
}

/* next may be s */
static void advance(cells next, cells s, const mn_importance_args *p, const rows *r, double ip) {
    const int64_t V = p->call.V;
    for (int64_t i = 0; i < p->call.K; i++) {
        const double k = r->k[i];
        for (int64_t j = 0; j < V; j++) {
            next.M[i * V + j] = r->a * s.M[i * V + j] + k * r->v[j];
            next.I[i * V + j] = r->a * s.I[i * V + j] + r->forget * ip + k * k * r->b[j];
        }
    }
}

bool MN_REF(mn_importance_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->K, c->V) && mn_mul_i64(&count, count, 2) &&
           mn_ref_plan(plan, mn_n_sequences(c) * c->H, count);
}

static void read_cells(const mn_importance_args *p, cells s, const REAL *q, REAL *o, REAL *ovar) {
    const int64_t V = p->call.V;
    for (int64_t j = 0; (o || ovar) && j < V; j++) {
        double mean = 0.0, spread = 0.0;
        for (int64_t i = 0; i < p->call.K; i++) {
            mean += q[i] * s.M[i * V + j] / s.I[i * V + j];
            spread += (double)q[i] * q[i] / s.I[i * V + j];
        }
        if (o) o[j] = (REAL)(p->scale * mean);
        if (ovar) ovar[j] = (REAL)(p->scale * p->scale * spread);
    }
}

void MN_REF(mn_importance_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                       void *scratch) {
    (void)phase, (void)shared;
    const mn_importance_args *p = args;
    const int64_t size = p->call.K * p->call.V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const cells s = cells_at(scratch, size, 0);
    load_state(s, p, n, h);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        const rows r = rows_at(p, seq.b, t, h);
        advance(s, s, p, &r, prior_of(p, h));
        read_cells(p, s, r.q, MN_ROW_OUT(REAL, p->o, seq.b, t, h),
                   MN_ROW_OUT(REAL, p->ovar, seq.b, t, h));
    }
    REAL *mu = MN_ROW_OUT(REAL, p->mu, n, 0, h), *imp = MN_ROW_OUT(REAL, p->imp, n, 0, h);
    for (int64_t i = 0; i < size; i++) {
        if (mu) mu[i] = (REAL)(s.M[i] / s.I[i]);
        if (imp) imp[i] = (REAL)s.I[i];
    }
}

/* Scratch: A and C, then M and I before the first token and after each. Each sequence leaves its
 * part of dip in shared memory, summed in a second phase. */
bool MN_REF(mn_importance_backward_plan)(const void *args, mn_plan *plan) {
    const mn_importance_args *p = args;
    const mn_call *c = args;
    const int64_t items = mn_n_sequences(c) * c->H;
    int64_t count;
    const bool ok = mn_mul_i64(&count, c->K, c->V) && mn_mul_i64(&count, count, 2) &&
                    mn_mul_i64(&count, count, mn_longest_sequence(c) + 2) &&
                    mn_ref_plan(plan, items, count);
    if (p->grad.ip.data) mn_ref_add_phase(plan, c->H);
    return ok && mn_mul_size(&plan->shared_bytes, (size_t)items, sizeof(double));
}

/* Adds what o_t and ovar_t say to the adjoints, and gives dq. */
static void read_backward(cells adj, cells s, const mn_importance_args *p, const REAL *q,
                          const REAL *d_o, const REAL *dovar, REAL *dq) {
    const int64_t V = p->call.V;
    const double scale = p->scale;
    for (int64_t i = 0; i < p->call.K; i++) {
        double sum = 0.0;
        for (int64_t j = 0; j < V; j++) {
            const double r = 1.0 / s.I[i * V + j], mu = s.M[i * V + j] * r;
            const double mean = scale * mn_ref_get(d_o, j);
            const double spread = scale * scale * mn_ref_get(dovar, j);
            adj.M[i * V + j] += q[i] * mean * r;
            adj.I[i * V + j] -= q[i] * mean * mu * r + (double)q[i] * q[i] * spread * r * r;
            sum += mean * mu + 2.0 * q[i] * spread * r;
        }
        if (dq) dq[i] = (REAL)sum;
    }
}

/* dk, dv, db of one token from the adjoints of its state */
static void write_backward(cells adj, const mn_importance_args *p, const rows *r, REAL *dk,
                           REAL *dv, REAL *db) {
    const int64_t K = p->call.K, V = p->call.V;
    for (int64_t i = 0; dk && i < K; i++) {
        double by_value = 0.0, by_gate = 0.0;
        for (int64_t j = 0; j < V; j++) {
            by_value += adj.M[i * V + j] * r->v[j];
            by_gate += adj.I[i * V + j] * r->b[j];
        }
        dk[i] = (REAL)(by_value + 2.0 * r->k[i] * by_gate);
    }
    for (int64_t j = 0; (dv || db) && j < V; j++) {
        double to_v = 0.0, to_b = 0.0;
        for (int64_t i = 0; i < K; i++) {
            to_v += adj.M[i * V + j] * r->k[i];
            to_b += adj.I[i * V + j] * r->k[i] * r->k[i];
        }
        if (dv) dv[j] = (REAL)to_v;
        if (db) db[j] = (REAL)to_b;
    }
}

/* Turns the adjoints of one state into those of the state before; gives dg, returns the part of
 * dip. */
static double step_back(cells adj, cells before, const mn_importance_args *p, const rows *r,
                        double ip, REAL *dg) {
    double along = 0.0, sum = 0.0;
    for (int64_t i = 0; i < p->call.K * p->call.V; i++) {
        along += adj.M[i] * before.M[i] + adj.I[i] * (before.I[i] - ip);
        sum += adj.I[i];
        adj.M[i] *= r->a;
        adj.I[i] *= r->a;
    }
    if (dg) *dg = (REAL)(r->a * along);
    return r->forget * sum;
}

/* Adjoints of the last state from the cotangents of mu and imp */
static void start_back(cells adj, cells s, const mn_importance_args *p, int64_t n, int64_t h) {
    const REAL *dmu = MN_ROW(REAL, p->cot.mu, n, 0, h), *dimp = MN_ROW(REAL, p->cot.imp, n, 0, h);
    for (int64_t i = 0; i < p->call.K * p->call.V; i++) {
        adj.M[i] = mn_ref_get(dmu, i) / s.I[i];
        adj.I[i] = mn_ref_get(dimp, i) - adj.M[i] * s.M[i] / s.I[i];
    }
}

/* Gradients of the first state; returns the part of dip of a state that starts at the prior. */
static double end_back(cells adj, const mn_importance_args *p, int64_t n, int64_t h) {
    const REAL *mu0 = MN_ROW(REAL, p->mu0, n, 0, h);
    REAL *dmu0 = MN_ROW_OUT(REAL, p->grad.mu0, n, 0, h);
    REAL *dimp0 = MN_ROW_OUT(REAL, p->grad.imp0, n, 0, h);
    double sum = 0.0;
    for (int64_t i = 0; i < p->call.K * p->call.V; i++) {
        const double dI = adj.I[i] + adj.M[i] * mn_ref_get(mu0, i);
        if (dmu0) dmu0[i] = (REAL)(adj.M[i] * first_importance(p, n, h, i));
        if (dimp0) dimp0[i] = (REAL)dI;
        sum += dI;
    }
    return p->imp0.data ? 0.0 : sum;
}

static void sum_prior(const mn_importance_args *p, int64_t h, const double *parts) {
    double sum = 0.0;
    for (int64_t n = 0; n < mn_n_sequences(&p->call); n++) sum += parts[n * p->call.H + h];
    *MN_ROW_OUT(REAL, p->grad.ip, 0, 0, h) = (REAL)sum;
}

void MN_REF(mn_importance_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                        void *scratch) {
    const mn_importance_args *p = args;
    if (phase == 1) {
        sum_prior(p, item, shared);
        return;
    }
    const int64_t size = p->call.K * p->call.V, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const double ip = prior_of(p, h);
    const cells adj = cells_at(scratch, size, 0);
    double *states = adj.M + 2 * size, to_prior = 0.0;
    load_state(cells_at(states, size, 0), p, n, h);
    for (int64_t t = 0; t < seq.length; t++) {
        const rows r = rows_at(p, seq.b, seq.t0 + t, h);
        advance(cells_at(states, size, t + 1), cells_at(states, size, t), p, &r, ip);
    }
    start_back(adj, cells_at(states, size, seq.length), p, n, h);
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        const int64_t at = seq.t0 + t;
        const rows r = rows_at(p, seq.b, at, h);
        read_backward(adj, cells_at(states, size, t + 1), p, r.q,
                      MN_ROW(REAL, p->cot.o, seq.b, at, h), MN_ROW(REAL, p->cot.ovar, seq.b, at, h),
                      MN_ROW_OUT(REAL, p->grad.q, seq.b, at, h));
        write_backward(adj, p, &r, MN_ROW_OUT(REAL, p->grad.k, seq.b, at, h),
                       MN_ROW_OUT(REAL, p->grad.v, seq.b, at, h),
                       MN_ROW_OUT(REAL, p->grad.b, seq.b, at, h));
        to_prior += step_back(adj, cells_at(states, size, t), p, &r, ip,
                              MN_ROW_OUT(REAL, p->grad.g, seq.b, at, h));
    }
    ((double *)shared)[item] = to_prior + end_back(adj, p, n, h);
}
