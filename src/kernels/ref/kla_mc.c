/* kla_mc.c - KLA+ loss: the marginal likelihood of a token under S draws of its features.
 *
 *   x_s = mu + sqrt(max(var, 1e-12)) noise_s      h_s = x_s, or x_s / sqrt(mean x_s^2 + eps) norm
 *   l_s = log_softmax(head h_s)                   logprob = logsumexp_s l_s - log S
 *   nll = -logprob[target]
 *
 * Backward, with w_s = softmax_s(l_s[target]) and g the cotangent of nll:
 *
 *   dlogits_s = g w_s (softmax_s - onehot)
 *   dhead = sum dlogits_s h_s'         dh_s = head' dlogits_s
 *   dx_s = r (dh_s norm - h_s <dh_s, h_s> / (D norm))  where r is the 1/sqrt, written with xr = x r
 *   dmu = sum_s dx_s      dvar = sum_s dx_s noise_s / (2 sqrt(var)), 0 below the floor
 *   dnoise_s = dx_s sqrt(var)
 *
 * A target that is no class (negative, V or above) has no loss: its nll and gradients are 0.
 * An item is a token; gradients of head and norm are gathered by one item per row of head, which
 * recomputes what it needs, so nothing is summed in an order that depends on threads. */
#include <math.h>

#include "kernels/ref/ref.h"

/* The larger one; NaN stays */
static double larger(double a, double b) {
    return a > b || a != a ? a : b;
}

/* What one draw of one token gives. */
typedef struct draw {
    double *x, *h, *logits;      // D, D, V; logits become log-probabilities
    double inverse_rms;
} draw;

static double deviation(const mn_kla_mc_args *p, int64_t b, int64_t t, int64_t i) {
    return sqrt(larger(MN_ROW(REAL, p->var, b, t, 0)[i], 1e-12));
}

static const REAL *noise_row(const mn_kla_mc_args *p, int64_t s, int64_t b, int64_t t) {
    const int64_t row = (s * p->call.B + b) * p->call.T + t;
    return (const REAL *)p->noise.data + row * p->call.D;
}

static int64_t target_of(const mn_kla_mc_args *p, int64_t b, int64_t t) {
    const REAL class_at = *MN_ROW(REAL, p->target, b, t, 0);
    return class_at >= 0 && class_at < (REAL)p->call.V ? (int64_t)class_at : -1;
}

/* Features of draw s */
static void features(draw *d, const mn_kla_mc_args *p, int64_t s, int64_t b, int64_t t) {
    const int64_t D = p->call.D;
    const REAL *mu = MN_ROW(REAL, p->mu, b, t, 0), *noise = noise_row(p, s, b, t);
    double square = 0.0;
    for (int64_t i = 0; i < D; i++) {
        d->x[i] = mu[i] + deviation(p, b, t, i) * noise[i];
        square += d->x[i] * d->x[i];
    }
    d->inverse_rms = p->norm.data ? 1.0 / sqrt(square / (double)D + p->norm_eps) : 1.0;
    for (int64_t i = 0; i < D; i++) {
        d->h[i] = d->x[i] * d->inverse_rms * (p->norm.data ? ((const REAL *)p->norm.data)[i] : 1.0);
    }
}

/* log_softmax(head h) */
static void log_probabilities(draw *d, const mn_kla_mc_args *p) {
    const int64_t D = p->call.D, V = p->call.V;
    double top = -INFINITY, sum = 0.0;
    for (int64_t v = 0; v < V; v++) {
        const REAL *row = (const REAL *)p->head.data + v * D;
        double dot = 0.0;
        for (int64_t i = 0; i < D; i++) dot += row[i] * d->h[i];
        d->logits[v] = dot;
        top = larger(top, dot);
    }
    for (int64_t v = 0; v < V; v++) sum += exp(d->logits[v] - top);
    for (int64_t v = 0; v < V; v++) d->logits[v] -= top + log(sum);
}

/* log(e^a + e^b); a may be -infinity */
static double log_add(double a, double b) {
    const double top = larger(a, b);
    return top == -INFINITY ? top : top + log(exp(a - top) + exp(b - top));
}

static draw draw_in(const mn_kla_mc_args *p, double *memory) {
    return (draw){ memory, memory + p->call.D, memory + 2 * p->call.D, 1.0 };
}

/* Scratch: x, h, one row of V for a draw and one for the sum of draws. */
bool MN_REF(mn_kla_mc_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t items;
    return mn_mul_i64(&items, c->B, c->T) && mn_ref_plan(plan, items, 2 * c->D + 2 * c->V);
}

void MN_REF(mn_kla_mc_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch) {
    (void)phase, (void)shared;
    const mn_kla_mc_args *p = args;
    const int64_t V = p->call.V, b = item / p->call.T, t = item % p->call.T;
    const int64_t target = target_of(p, b, t);
    draw d = draw_in(p, scratch);
    double *all = d.logits + V;
    for (int64_t v = 0; v < V; v++) all[v] = -INFINITY;
    for (int64_t s = 0; s < p->call.S; s++) {
        features(&d, p, s, b, t);
        log_probabilities(&d, p);
        for (int64_t v = 0; v < V; v++) all[v] = log_add(all[v], d.logits[v]);
    }
    const double log_s = log((double)p->call.S);
    REAL *nll = MN_ROW_OUT(REAL, p->nll, b, t, 0), *logprob = MN_ROW_OUT(REAL, p->logprob, b, t, 0);
    if (nll) *nll = (REAL)(target >= 0 ? log_s - all[target] : 0.0);
    for (int64_t v = 0; logprob && v < V; v++) logprob[v] = (REAL)(all[v] - log_s);
}

/* Phase 0 over tokens: w_s and the log-normaliser of each draw into shared memory (S pairs a
 * token), gradients of mu, var, noise, and of norm per token (D numbers each). Phase 1 over rows of
 * head. Phase 2, over channels, sums the gradient of norm. */
bool MN_REF(mn_kla_mc_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t items, count;
    const bool ok = mn_mul_i64(&items, c->B, c->T) && mn_ref_plan(plan, items, 5 * c->D + c->V) &&
                    mn_mul_i64(&count, items, 2 * c->S + c->D);
    mn_ref_add_phase(plan, c->V);
    mn_ref_add_phase(plan, c->D);
    return ok && mn_mul_size(&plan->shared_bytes, (size_t)count, sizeof(double));
}

/* dx from dh; adds the token's part of the gradient of norm. Both vectors are D long, dx may be
 * dh. */
static void norm_backward(double *dx, double *dnorm, const double *dh, const draw *d,
                          const mn_kla_mc_args *p) {
    const int64_t D = p->call.D;
    const REAL *norm = p->norm.data;
    const double r = d->inverse_rms;
    double dot = 0.0;
    for (int64_t i = 0; norm && i < D; i++) {
        dnorm[i] += dh[i] * d->x[i] * r;
        dot += dh[i] * norm[i] * d->x[i] * r;
    }
    for (int64_t i = 0; i < D; i++) {
        dx[i] = norm ? r * (dh[i] * norm[i] - d->x[i] * r * dot / (double)D) : dh[i];
    }
}

/* Adds draw s of one token to dmu, dvar, dnorm (D each) and writes its dnoise. `weight` is g
 * w_s. */
static void draw_backward(double *dh, double *dmu, double *dvar, double *dnorm, draw *d,
                          const mn_kla_mc_args *p, double weight, int64_t s, int64_t b, int64_t t) {
    const int64_t D = p->call.D, target = target_of(p, b, t);
    const REAL *noise = noise_row(p, s, b, t), *var = MN_ROW(REAL, p->var, b, t, 0);
    const int64_t at = ((s * p->call.B + b) * p->call.T + t) * D;
    REAL *dnoise = p->grad.noise.data ? (REAL *)p->grad.noise.data + at : NULL;
    for (int64_t i = 0; i < D; i++) dh[i] = 0.0;
    for (int64_t v = 0; v < p->call.V; v++) {
        const REAL *row = (const REAL *)p->head.data + v * D;
        const double g = weight * (exp(d->logits[v]) - (v == target ? 1.0 : 0.0));
        for (int64_t i = 0; i < D; i++) dh[i] += g * row[i];
    }
    norm_backward(dh, dnorm, dh, d, p);
    for (int64_t i = 0; i < D; i++) {
        const double std = deviation(p, b, t, i);
        dmu[i] += dh[i];
        if (var[i] >= (REAL)1e-12) dvar[i] += dh[i] * noise[i] / (2.0 * std);
        if (dnoise) dnoise[i] = (REAL)(dh[i] * std);
    }
}

/* Weights of the draws of a token and their log-normalisers: pairs[2 s], pairs[2 s + 1]. */
static void weigh_draws(double *pairs, draw *d, const mn_kla_mc_args *p, double g, int64_t b,
                        int64_t t) {
    const int64_t S = p->call.S, target = target_of(p, b, t);
    double all = -INFINITY;
    for (int64_t s = 0; s < S; s++) {
        features(d, p, s, b, t);
        log_probabilities(d, p);
        pairs[2 * s] = target >= 0 ? d->logits[target] : -INFINITY;
        const REAL *row = p->head.data;
        double dot = 0.0;
        for (int64_t i = 0; i < p->call.D; i++) dot += row[i] * d->h[i];
        pairs[2 * s + 1] = dot - d->logits[0];
        all = log_add(all, pairs[2 * s]);
    }
    for (int64_t s = 0; s < S; s++) pairs[2 * s] = target >= 0 ? g * exp(pairs[2 * s] - all) : 0.0;
}

static void token_backward(const mn_kla_mc_args *p, int64_t item, double *shared, double *scratch) {
    const int64_t D = p->call.D, S = p->call.S, b = item / p->call.T, t = item % p->call.T;
    const REAL *cot = MN_ROW(REAL, p->cot.nll, b, t, 0);
    double *pairs = shared + item * (2 * S + D), *dnorm = pairs + 2 * S;
    double *dh = scratch, *dmu = dh + D, *dvar = dmu + D;
    draw d = draw_in(p, dvar + D);
    for (int64_t i = 0; i < D; i++) dmu[i] = dvar[i] = dnorm[i] = 0.0;
    weigh_draws(pairs, &d, p, cot ? (double)*cot : 0.0, b, t);
    for (int64_t s = 0; s < S; s++) {
        features(&d, p, s, b, t);
        log_probabilities(&d, p);
        draw_backward(dh, dmu, dvar, dnorm, &d, p, pairs[2 * s], s, b, t);
    }
    REAL *to_mu = MN_ROW_OUT(REAL, p->grad.mu, b, t, 0);
    REAL *to_var = MN_ROW_OUT(REAL, p->grad.var, b, t, 0);
    for (int64_t i = 0; i < D; i++) {
        if (to_mu) to_mu[i] = (REAL)dmu[i];
        if (to_var) to_var[i] = (REAL)dvar[i];
    }
}

/* Row v of dhead: sum over tokens and draws of dlogits[v] h. */
static void head_row_backward(const mn_kla_mc_args *p, int64_t v, const double *shared,
                              double *scratch) {
    const int64_t D = p->call.D, S = p->call.S;
    const REAL *row = (const REAL *)p->head.data + v * D;
    double *sum = scratch;
    draw d = draw_in(p, scratch + D);
    for (int64_t i = 0; i < D; i++) sum[i] = 0.0;
    for (int64_t item = 0; item < p->call.B * p->call.T; item++) {
        const int64_t b = item / p->call.T, t = item % p->call.T;
        const double *pairs = shared + item * (2 * S + D);
        for (int64_t s = 0; s < S; s++) {
            features(&d, p, s, b, t);
            double dot = 0.0;
            for (int64_t i = 0; i < D; i++) dot += row[i] * d.h[i];
            const double hit = v == target_of(p, b, t) ? 1.0 : 0.0;
            const double g = pairs[2 * s] * (exp(dot - pairs[2 * s + 1]) - hit);
            for (int64_t i = 0; i < D; i++) sum[i] += g * d.h[i];
        }
    }
    REAL *out = (REAL *)p->grad.head.data + v * D;
    for (int64_t i = 0; i < D; i++) out[i] = (REAL)sum[i];
}

void MN_REF(mn_kla_mc_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                    void *scratch) {
    const mn_kla_mc_args *p = args;
    const int64_t D = p->call.D, S = p->call.S;
    if (phase == 0) {
        token_backward(p, item, shared, scratch);
    } else if (phase == 1) {
        if (p->grad.head.data) head_row_backward(p, item, shared, scratch);
    } else if (p->grad.norm.data) {
        double sum = 0.0;
        for (int64_t i = 0; i < p->call.B * p->call.T; i++) {
            sum += ((const double *)shared)[i * (2 * S + D) + 2 * S + item];
        }
        ((REAL *)p->grad.norm.data)[item] = (REAL)sum;
    }
}
