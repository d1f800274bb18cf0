/* moebius.c - Kalman Linear Attention: one scalar Kalman filter per channel m and slot s.
 *
 *   den_t = a^2 + p lam_{t-1}      lam_t = lam_{t-1} / den_t + prec k^2
 *   eta_t = (a / den_t) eta_{t-1} + prec v k
 *   y = sum_s q eta / lam          yvar = sum_s q^2 / lam
 *
 * Read one prediction ahead (from_prior), the mean is a eta / lam and the variance a^2 / lam + p.
 * a^2, p, den and the lam under a division are kept at or above 1e-12; where that floor binds, its
 * argument has no gradient. Backward, with nl and ne the adjoints of lam_t and eta_t and gm, gv
 * those of mean and variance:
 *
 *   ne += gm / lam                 nl -= (gm eta + gv) / lam^2
 *   dprec = sum_s nl k^2 + ne v k  dv = sum_s ne prec k       dk = sum_m 2 nl prec k + ne prec v
 *   dden = -(nl lam_{t-1} + ne a eta_{t-1}) / den^2           dp += dden lam_{t-1}
 *   da += ne eta_{t-1} / den + 2 a dden
 *   nl <- nl a^2 / den^2 - ne a p eta_{t-1} / den^2           ne <- ne a / den
 *
 * At the end what a stretch of tokens does to the state and to its gradient (moebius_span.h).
 *
 * Forward, an item is one channel of one sequence; backward it is a sequence, because k and q are
 * shared by the channels. */
#include <math.h>
#include <string.h>

#include "kernels/moebius_span.h"
#include "kernels/ref/ref.h"

static const double floor_at = 1e-12;

static double not_below_floor(double x) {
    return x < floor_at ? floor_at : x;    // NaN stays
}

/* Dynamics of one cell with their floors applied. */
typedef struct cell {
    double a, a2, p;
} cell;

static cell cell_at(const mn_moebius_args *args, int64_t at) {
    const double a = ((const REAL *)args->a.data)[at], p = ((const REAL *)args->p.data)[at];
    return (cell){ a, not_below_floor(a * a), not_below_floor(p) };
}

static void load_state(double *lam, double *eta, const mn_moebius_args *args, int64_t n,
                       int64_t m) {
    const int64_t K = args->call.K;
    const REAL *lam0 = MN_ROW(REAL, args->lam0, n, 0, 0), *eta0 = MN_ROW(REAL, args->eta0, n, 0, 0);
    for (int64_t s = 0; s < K; s++) {
        lam[s] = lam0 ? (double)lam0[m * K + s] : 1.0;
        eta[s] = eta0 ? (double)eta0[m * K + s] : 0.0;
    }
}

/* One token for all slots of channel m; the new state may overwrite the old. */
static void advance(double *lam_next, double *eta_next, const double *lam, const double *eta,
                    const mn_moebius_args *args, int64_t b, int64_t t, int64_t m) {
    const int64_t K = args->call.K;
    const REAL *k = MN_ROW(REAL, args->k, b, t, 0);
    const double v = MN_ROW(REAL, args->v, b, t, 0)[m];
    const double prec = MN_ROW(REAL, args->prec, b, t, 0)[m];
    for (int64_t s = 0; s < K; s++) {
        const cell c = cell_at(args, m * K + s);
        const double den = not_below_floor(c.a2 + c.p * lam[s]);
        lam_next[s] = lam[s] / den + prec * k[s] * k[s];
        eta_next[s] = c.a / den * eta[s] + prec * v * k[s];
    }
}

static void read_out(const double *lam, const double *eta, const mn_moebius_args *args, int64_t b,
                     int64_t t, int64_t m) {
    const int64_t K = args->call.K;
    const REAL *q = MN_ROW(REAL, args->q, b, t, 0);
    REAL *y = MN_ROW_OUT(REAL, args->y, b, t, 0), *yvar = MN_ROW_OUT(REAL, args->yvar, b, t, 0);
    double sum = 0.0, sum_var = 0.0;
    for (int64_t s = 0; s < K; s++) {
        const cell c = cell_at(args, m * K + s);
        const double var = 1.0 / not_below_floor(lam[s]), mean = eta[s] * var;
        sum += q[s] * (args->from_prior ? c.a * mean : mean);
        sum_var += (double)q[s] * q[s] * (args->from_prior ? c.a2 * var + c.p : var);
    }
    if (y) y[m] = (REAL)sum;
    if (yvar) yvar[m] = (REAL)sum_var;
}

bool MN_REF(mn_moebius_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t items, count;
    return mn_mul_i64(&items, mn_n_sequences(c), c->V) && mn_mul_i64(&count, c->K, 2) &&
           mn_ref_plan(plan, items, count);
}

void MN_REF(mn_moebius_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                    void *scratch) {
    (void)phase, (void)shared;
    const mn_moebius_args *p = args;
    const int64_t K = p->call.K, n = item / p->call.V, m = item % p->call.V;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    double *lam = scratch, *eta = lam + K;
    load_state(lam, eta, p, n, m);
    for (int64_t t = seq.t0; t < seq.t0 + seq.length; t++) {
        advance(lam, eta, lam, eta, p, seq.b, t, m);
        read_out(lam, eta, p, seq.b, t, m);
    }
    REAL *lam_out = MN_ROW_OUT(REAL, p->lam, n, 0, 0), *eta_out = MN_ROW_OUT(REAL, p->eta, n, 0, 0);
    for (int64_t s = 0; s < K; s++) {
        if (lam_out) lam_out[m * K + s] = (REAL)lam[s];
        if (eta_out) eta_out[m * K + s] = (REAL)eta[s];
    }
}

/* Scratch: lam and eta of all steps of one channel, their adjoints, da, da2, dp, and dk, dq of the
 * sequence. Shared: da and dp of every sequence, summed by a second phase. */
bool MN_REF(mn_moebius_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    const int64_t T = mn_longest_sequence(c), n = mn_n_sequences(c);
    int64_t rows, count, cells;
    bool ok = mn_mul_i64(&rows, T, 4) && mn_mul_i64(&count, rows + 8, c->K) &&
              mn_ref_plan(plan, n, count) && mn_mul_i64(&cells, c->V, c->K) &&
              mn_mul_i64(&cells, cells, n) && mn_mul_i64(&cells, cells, 2);
    mn_ref_add_phase(plan, c->V);
    return ok && mn_mul_size(&plan->shared_bytes, (size_t)cells, sizeof(double));
}

/* Where the adjoints of one channel live: K numbers each. */
typedef struct adjoints {
    double *lam, *eta, *a, *a2, *p;
} adjoints;

/* Gradients of token t for channel m; turns the adjoints of its state into those of the state
 * before. dk and dq are rows of the sequence's sums. */
static void token_backward(const adjoints *d, double *dk, double *dq, const double *lam,
                           const double *eta, const mn_moebius_args *args, int64_t b, int64_t t,
                           int64_t m) {
    const int64_t K = args->call.K;
    const double *lam_now = lam + 2 * K, *eta_now = eta + 2 * K;
    const REAL *k = MN_ROW(REAL, args->k, b, t, 0), *q = MN_ROW(REAL, args->q, b, t, 0);
    const REAL *cot_y = MN_ROW(REAL, args->cot.y, b, t, 0);
    const REAL *cot_var = MN_ROW(REAL, args->cot.yvar, b, t, 0);
    REAL *dv = MN_ROW_OUT(REAL, args->grad.v, b, t, 0);
    REAL *dprec = MN_ROW_OUT(REAL, args->grad.prec, b, t, 0);
    const double v = MN_ROW(REAL, args->v, b, t, 0)[m];
    const double prec = MN_ROW(REAL, args->prec, b, t, 0)[m];
    const double gy = mn_ref_get(cot_y, m), gw = mn_ref_get(cot_var, m);
    double to_v = 0.0, to_prec = 0.0;
    for (int64_t s = 0; s < K; s++) {
        const cell c = cell_at(args, m * K + s);
        const double var = 1.0 / not_below_floor(lam_now[s]), mean = eta_now[s] * var;
        double gm = gy * q[s], gv = gw * q[s] * q[s];
        if (args->from_prior) {
            dq[s] += gy * c.a * mean + 2.0 * q[s] * gw * (c.a2 * var + c.p);
            d->a[s] += gm * mean;
            d->a2[s] += gv * var;
            d->p[s] += gv;
            gm *= c.a;
            gv *= c.a2;
        } else {
            dq[s] += gy * mean + 2.0 * q[s] * gw * var;
        }
        d->eta[s] += gm * var;
        if (lam_now[s] >= floor_at) d->lam[s] -= (gm * mean + gv * var) * var;
        const double nl = d->lam[s], ne = d->eta[s];
        dk[s] += 2.0 * nl * prec * k[s] + ne * prec * v;
        to_prec += nl * k[s] * k[s] + ne * v * k[s];
        to_v += ne * prec * k[s];

        const double sum = c.a2 + c.p * lam[s], g = 1.0 / not_below_floor(sum);
        d->a[s] += ne * eta[s] * g;
        d->eta[s] = ne * c.a * g;
        d->lam[s] = nl * g;
        if (sum < floor_at) continue;
        const double dden = -(nl * lam[s] + ne * c.a * eta[s]) * g * g;
        d->a2[s] += dden;
        d->p[s] += dden * lam[s];
        d->lam[s] = (nl * c.a2 - ne * c.a * c.p * eta[s]) * g * g;
    }
    if (dv) dv[m] = (REAL)to_v;
    if (dprec) dprec[m] = (REAL)to_prec;
}

/* All tokens of channel m: forward keeping states, then backward. `work` as planned, from its
 * start; states of step t are lam at 2 t K and eta at (2 t + 1) K. */
static void channel_backward(double *work, double *dk, double *dq, const adjoints *d,
                             const mn_moebius_args *args, int64_t n, int64_t m) {
    const int64_t K = args->call.K;
    const mn_sequence seq = mn_sequence_at(&args->call, n);
    load_state(work, work + K, args, n, m);
    for (int64_t t = 0; t < seq.length; t++) {
        double *at = work + 2 * t * K;
        advance(at + 2 * K, at + 3 * K, at, at + K, args, seq.b, seq.t0 + t, m);
    }
    const REAL *dlam = MN_ROW(REAL, args->cot.lam, n, 0, 0);
    const REAL *deta = MN_ROW(REAL, args->cot.eta, n, 0, 0);
    for (int64_t s = 0; s < K; s++) {
        d->lam[s] = dlam ? (double)dlam[m * K + s] : 0.0;
        d->eta[s] = deta ? (double)deta[m * K + s] : 0.0;
        d->a[s] = d->a2[s] = d->p[s] = 0.0;
    }
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        const double *at = work + 2 * t * K;
        token_backward(d, dk + t * K, dq + t * K, at, at + K, args, seq.b, seq.t0 + t, m);
    }
    REAL *lam0 = MN_ROW_OUT(REAL, args->grad.lam0, n, 0, 0);
    REAL *eta0 = MN_ROW_OUT(REAL, args->grad.eta0, n, 0, 0);
    for (int64_t s = 0; s < K; s++) {
        if (lam0) lam0[m * K + s] = (REAL)d->lam[s];
        if (eta0) eta0[m * K + s] = (REAL)d->eta[s];
    }
}

/* da and dp of channel m summed over sequences, floors taken into account */
static void sum_dynamics(const mn_moebius_args *args, int64_t m, const double *parts) {
    const int64_t K = args->call.K, cells = args->call.V * K;
    REAL *da = args->grad.a.data, *dp = args->grad.p.data;
    for (int64_t at = m * K; at < (m + 1) * K; at++) {
        double to_a = 0.0, to_p = 0.0;
        for (int64_t n = 0; n < mn_n_sequences(&args->call); n++) {
            to_a += parts[2 * n * cells + at];
            to_p += parts[(2 * n + 1) * cells + at];
        }
        if (da) da[at] = (REAL)to_a;
        if (dp) dp[at] = (REAL)(((const REAL *)args->p.data)[at] >= floor_at ? to_p : 0.0);
    }
}

void MN_REF(mn_moebius_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                     void *scratch) {
    const mn_moebius_args *p = args;
    if (phase == 1) {
        sum_dynamics(p, item, shared);
        return;
    }
    const int64_t K = p->call.K, cells = p->call.V * K;
    const mn_sequence seq = mn_sequence_at(&p->call, item);
    double *dk = scratch, *dq = dk + seq.length * K, *at = dq + seq.length * K;
    const adjoints d = { at, at + K, at + 2 * K, at + 3 * K, at + 4 * K };
    double *work = at + 5 * K, *parts = (double *)shared + 2 * item * cells;
    memset(dk, 0, (size_t)(2 * seq.length * K) * sizeof *dk);
    for (int64_t m = 0; m < p->call.V; m++) {
        channel_backward(work, dk, dq, &d, p, item, m);
        for (int64_t s = 0; s < K; s++) {
            const double a = ((const REAL *)p->a.data)[m * K + s];
            parts[m * K + s] = d.a[s] + (a * a >= floor_at ? 2.0 * a * d.a2[s] : 0.0);
            parts[cells + m * K + s] = d.p[s];
        }
    }
    for (int64_t t = 0; t < seq.length; t++) {
        REAL *dk_row = MN_ROW_OUT(REAL, p->grad.k, seq.b, seq.t0 + t, 0);
        REAL *dq_row = MN_ROW_OUT(REAL, p->grad.q, seq.b, seq.t0 + t, 0);
        for (int64_t s = 0; s < K; s++) {
            if (dk_row) dk_row[s] = (REAL)dk[t * K + s];
            if (dq_row) dq_row[s] = (REAL)dq[t * K + s];
        }
    }
}

/* ---- stretches of tokens (moebius_span.h) ---------------------------------------------------- */

static bool span_plan(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t items;
    return mn_mul_i64(&items, mn_n_sequences(c), c->V) && mn_ref_plan(plan, items, 0);
}

static bool is_finite_all(const double *x, int n) {
    for (int i = 0; i < n; i++) {
        if (!isfinite(x[i])) return false;
    }
    return true;
}

/* Puts the numbers of cell (m, s) of sequence n where the other cells' are. */
static void store_cell(const mn_moebius_span_args *args, const double *x, int entries, int64_t n,
                       int64_t m, int64_t s) {
    const int64_t cells = args->op.call.V * args->op.call.K, at = m * args->op.call.K + s;
    for (int i = 0; i < entries; i++) {
        ((REAL *)args->out)[(n * entries + i) * cells + at] = (REAL)x[i];
    }
}

/* x times the power of two that brings the largest of A to D into [1/2, 1). */
static void rescale_map(double *x) {
    int exponent;
    frexp(fmax(fmax(x[MN_MAP_A], x[MN_MAP_B]), fmax(x[MN_MAP_C], x[MN_MAP_D])), &exponent);
    for (int i = 0; i < MN_MAP_ENTRIES; i++) x[i] = ldexp(x[i], -exponent);
}

/* The map of one cell; false where a token has no projective form. */
static bool cell_map(double *x, const mn_moebius_args *args, const mn_sequence *seq, int64_t m,
                     int64_t s) {
    const cell c = cell_at(args, m * args->call.K + s);
    x[MN_MAP_A] = x[MN_MAP_D] = x[MN_MAP_E] = 1.0;
    x[MN_MAP_B] = x[MN_MAP_C] = x[MN_MAP_X] = x[MN_MAP_Y] = 0.0;
    for (int64_t t = seq->t0; t < seq->t0 + seq->length; t++) {
        const double k = MN_ROW(REAL, args->k, seq->b, t, 0)[s];
        const double v = MN_ROW(REAL, args->v, seq->b, t, 0)[m];
        const double prec = MN_ROW(REAL, args->prec, seq->b, t, 0)[m];
        const double phi = prec * k * k, r = prec * v * k;
        if (!(prec >= 0.0)) return false;
        x[MN_MAP_C] = c.p * x[MN_MAP_A] + c.a2 * x[MN_MAP_C];
        x[MN_MAP_D] = c.p * x[MN_MAP_B] + c.a2 * x[MN_MAP_D];
        x[MN_MAP_A] += phi * x[MN_MAP_C];
        x[MN_MAP_B] += phi * x[MN_MAP_D];
        x[MN_MAP_X] = c.a * x[MN_MAP_X] + r * x[MN_MAP_C];
        x[MN_MAP_Y] = c.a * x[MN_MAP_Y] + r * x[MN_MAP_D];
        x[MN_MAP_E] *= c.a;
        rescale_map(x);
    }
    return is_finite_all(x, MN_MAP_ENTRIES);
}

bool MN_REF(mn_moebius_map_plan)(const void *args, mn_plan *plan) {
    return span_plan(args, plan);
}

void MN_REF(mn_moebius_map_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_moebius_span_args *p = args;
    const int64_t n = item / p->op.call.V, m = item % p->op.call.V;
    const mn_sequence seq = mn_sequence_at(&p->op.call, n);
    double x[MN_MAP_ENTRIES];
    p->good[item] = 1;
    for (int64_t s = 0; s < p->op.call.K; s++) {
        if (!cell_map(x, &p->op, &seq, m, s)) p->good[item] = 0;
        store_cell(p, x, MN_MAP_ENTRIES, n, m, s);
    }
}

/* A cell on its way forward: its state, and what cotangents here become at the start. */
typedef struct passage {
    double lam, eta, x[MN_ADJOINT_ENTRIES];
} passage;

/* beta and eps by the gradients mu and om of m and w here */
static void collect(passage *to, double om, double mu) {
    to->x[MN_ADJOINT_BETA] += to->x[MN_ADJOINT_ALPHA] * mu;
    to->x[MN_ADJOINT_EPS] += to->x[MN_ADJOINT_GAMMA] * om + to->x[MN_ADJOINT_DELTA] * mu;
}

/* One token: with W = 1 / lam before it, P = a^2 W + p, s = 1 / (1 + phi P),
 *   om <- a^2 (s^2 om + s prec k (v - k m) mu)      mu <- a s mu */
static void pass_token(passage *to, const mn_moebius_args *args, const cell *c,
                       const mn_sequence *seq, int64_t t, int64_t m, int64_t s) {
    const double k = MN_ROW(REAL, args->k, seq->b, t, 0)[s];
    const double q = MN_ROW(REAL, args->q, seq->b, t, 0)[s];
    const double v = MN_ROW(REAL, args->v, seq->b, t, 0)[m];
    const double prec = MN_ROW(REAL, args->prec, seq->b, t, 0)[m];
    const double P = c->a2 / to->lam + c->p, keep = 1.0 / (1.0 + prec * k * k * P);
    const double den = c->a2 + c->p * to->lam;
    to->eta = c->a / den * to->eta + prec * v * k;
    to->lam = to->lam / den + prec * k * k;
    const double mean = to->eta / to->lam, gamma = to->x[MN_ADJOINT_GAMMA];
    to->x[MN_ADJOINT_DELTA] = c->a * keep * to->x[MN_ADJOINT_DELTA] +
                              gamma * c->a2 * keep * prec * k * (v - k * mean);
    to->x[MN_ADJOINT_GAMMA] = gamma * c->a2 * keep * keep;
    to->x[MN_ADJOINT_ALPHA] *= c->a * keep;
    const double gy = mn_ref_get(MN_ROW(REAL, args->cot.y, seq->b, t, 0), m);
    const double gw = mn_ref_get(MN_ROW(REAL, args->cot.yvar, seq->b, t, 0), m);
    collect(to, q * q * gw * (args->from_prior ? c->a2 : 1.0),
            q * gy * (args->from_prior ? c->a : 1.0));
}

static bool cell_adjoint(double *x, const mn_moebius_args *args, int64_t n, int64_t m, int64_t s) {
    const cell c = cell_at(args, m * args->call.K + s);
    const mn_sequence seq = mn_sequence_at(&args->call, n);
    const int64_t at = m * args->call.K + s;
    const REAL *lam0 = MN_ROW(REAL, args->lam0, n, 0, 0), *eta0 = MN_ROW(REAL, args->eta0, n, 0, 0);
    passage to = { lam0 ? (double)lam0[at] : 1.0, mn_ref_get(eta0, at), { 0 } };
    to.x[MN_ADJOINT_GAMMA] = to.x[MN_ADJOINT_ALPHA] = 1.0;
    bool plain = to.lam >= floor_at;
    for (int64_t t = seq.t0; plain && t < seq.t0 + seq.length; t++) {
        const bool has_form = MN_ROW(REAL, args->prec, seq.b, t, 0)[m] >= 0.0;
        pass_token(&to, args, &c, &seq, t, m, s);
        plain = has_form && to.lam >= floor_at;
    }
    const double dlam = mn_ref_get(MN_ROW(REAL, args->cot.lam, n, 0, 0), at);
    const double deta = mn_ref_get(MN_ROW(REAL, args->cot.eta, n, 0, 0), at);
    collect(&to, -to.lam * (dlam * to.lam + deta * to.eta), deta * to.lam);
    for (int i = 0; i < MN_ADJOINT_ENTRIES; i++) x[i] = to.x[i];
    return plain && is_finite_all(x, MN_ADJOINT_ENTRIES);
}

bool MN_REF(mn_moebius_adjoint_plan)(const void *args, mn_plan *plan) {
    return span_plan(args, plan);
}

void MN_REF(mn_moebius_adjoint_run)(const void *args, int phase, int64_t item, void *shared,
                                    void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_moebius_span_args *p = args;
    const int64_t n = item / p->op.call.V, m = item % p->op.call.V;
    double x[MN_ADJOINT_ENTRIES];
    p->good[item] = 1;
    for (int64_t s = 0; s < p->op.call.K; s++) {
        if (!cell_adjoint(x, &p->op, n, m, s)) p->good[item] = 0;
        store_cell(p, x, MN_ADJOINT_ENTRIES, n, m, s);
    }
}
