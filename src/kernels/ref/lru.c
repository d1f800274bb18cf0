/* lru.c - the real-gated linear recurrent unit: each channel a state of its own.
 *
 *   la = -8 sigmoid(ga) softplus(p)   a = e^la   r = sqrt(1 - a^2)   i = sigmoid(gx)
 *   h = a h + r i x
 *
 * A first token without a state before it has a = 0 and r = 1. Backward, D_t the adjoint of h_t:
 *
 *   D_t = dy_t + a_{t+1} D_{t+1}    dx = D r i    dgx = D r x i (1 - i)    dh0 = a_1 D_1
 *   dla = D (a h_{t-1} - i x a^2 / r)      dga = -8 dla softplus(p) sigmoid'(ga)
 *   dp = sum of -8 dla sigmoid(ga) sigmoid(p)
 *
 * 1 - a^2 is -expm1(2 la), and 1 / r at most 2000. One item is one channel of one sequence. */
#include <math.h>

#include "kernels/ref/ref.h"

static double logistic(double x) {
    return 1.0 / (1.0 + exp(-x));
}

static double softplus(double x) {
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

typedef struct cell {
    double x, i, rate, la, a, r;    // rate = sigmoid(ga)
    bool first;                     // of a sequence that has nothing before it
} cell;

static cell cell_at(const mn_lru_args *p, int64_t b, int64_t t, int64_t v, double soft,
                    bool first) {
    cell c = { .x = MN_ROW(REAL, p->x, b, t, 0)[v], .first = first,
               .i = logistic(MN_ROW(REAL, p->gx, b, t, 0)[v]),
               .rate = logistic(MN_ROW(REAL, p->ga, b, t, 0)[v]) };
    c.la = -8.0 * c.rate * soft;
    c.a = first ? 0.0 : exp(c.la);
    c.r = first ? 1.0 : sqrt(-expm1(2.0 * c.la));
    return c;
}

static double softplus_of(const mn_lru_args *p, int64_t v) {
    return softplus(((const REAL *)p->a_param.data)[v]);
}

bool MN_REF(mn_lru_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    return mn_ref_plan(plan, mn_n_sequences(c) * c->V, 0);
}

void MN_REF(mn_lru_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_lru_args *p = args;
    const int64_t V = p->call.V, n = item / V, v = item % V;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const REAL *h0 = MN_ROW(REAL, p->h0, n, 0, 0);
    const double soft = softplus_of(p, v);
    double h = mn_ref_get(h0, v);
    for (int64_t t = 0; t < seq.length; t++) {
        const cell c = cell_at(p, seq.b, seq.t0 + t, v, soft, t == 0 && !h0);
        REAL *y = MN_ROW_OUT(REAL, p->y, seq.b, seq.t0 + t, 0);
        h = c.a * h + c.r * c.i * c.x;
        if (y) y[v] = (REAL)h;
    }
    REAL *last = MN_ROW_OUT(REAL, p->h, n, 0, 0);
    if (last) last[v] = (REAL)h;
}

/* Scratch: h in front of each token. Shared: dp of each sequence. */
bool MN_REF(mn_lru_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    const int64_t items = mn_n_sequences(c) * c->V;
    const bool ok = mn_ref_plan(plan, items, mn_longest_sequence(c) + 1);
    mn_ref_add_phase(plan, c->V);
    return ok && mn_mul_size(&plan->shared_bytes, (size_t)items, sizeof(double));
}

static void put(mn_out to, int64_t b, int64_t t, int64_t v, double x) {
    REAL *row = MN_ROW_OUT(REAL, to, b, t, 0);
    if (row) row[v] = (REAL)x;
}

/* Gradients of one token from its adjoint; returns dla. */
static double token_backward(const mn_lru_args *p, int64_t b, int64_t t, int64_t v, const cell *c,
                             double D, double before, double soft) {
    const double slope = c->first ? 0.0 : fmin(1.0 / c->r, 2000.0);
    const double dla = c->first ? 0.0 : D * (c->a * before - c->i * c->x * c->a * c->a * slope);
    put(p->grad.x, b, t, v, D * c->r * c->i);
    put(p->grad.gx, b, t, v, D * c->r * c->x * c->i * (1.0 - c->i));
    put(p->grad.ga, b, t, v, -8.0 * dla * soft * c->rate * (1.0 - c->rate));
    return dla;
}

void MN_REF(mn_lru_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    const mn_lru_args *p = args;
    const int64_t V = p->call.V, n = item / V, v = item % V;
    if (phase == 1) {
        mn_ref_sum_parts(p->grad.a_param.data, shared, item, mn_n_sequences(&p->call), V);
        return;
    }
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const REAL *h0 = MN_ROW(REAL, p->h0, n, 0, 0);
    const double soft = softplus_of(p, v);
    const double slope = logistic(((const REAL *)p->a_param.data)[v]);
    double *h = scratch, D = mn_ref_get(MN_ROW(REAL, p->cot.h, n, 0, 0), v), to_param = 0.0;
    h[0] = mn_ref_get(h0, v);
    for (int64_t t = 0; t < seq.length; t++) {
        const cell c = cell_at(p, seq.b, seq.t0 + t, v, soft, t == 0 && !h0);
        h[t + 1] = c.a * h[t] + c.r * c.i * c.x;
    }
    for (int64_t t = seq.length - 1; t >= 0; t--) {
        const cell c = cell_at(p, seq.b, seq.t0 + t, v, soft, t == 0 && !h0);
        D += mn_ref_get(MN_ROW(REAL, p->cot.y, seq.b, seq.t0 + t, 0), v);
        to_param -= 8.0 * c.rate * slope *
                    token_backward(p, seq.b, seq.t0 + t, v, &c, D, h[t], soft);
        D *= c.a;
    }
    put(p->grad.h0, n, 0, v, D);
    ((double *)shared)[item] = to_param;
}
