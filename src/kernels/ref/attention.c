/* attention.c - reads of the whole past: o_t = sum_{i<=t} w_i v_i, weights of z_i = scale q_t.k_i.
 *
 *   attention        w = softmax(z), q and k turned to their positions first if asked
 *   relu_attention   w = relu(z) / n, n = max(|z|_2, eps)
 *
 * Backward, with g_i = do.v_i:   dv_i += w_i do,  dq += scale dz_i k_i,  dk_i += scale dz_i q  and
 *
 *   softmax          dz_i = w_i (g_i - sum_j w_j g_j)
 *   relu             dz_i = ([z_i > 0] g_i - z_i sum_j relu(z_j) g_j / n^2) / n, where eps
 *                    holds without the second term
 *
 * With a window weights of older keys are 0. The T queries are the last of L positions, and query head h reads key-value head h J / H. One
 * item is one key-value head of one sequence. */
#include <math.h>
#include <string.h>

#include "kernels/ref/turn.h"

typedef struct problem {
    const mn_call *call;
    double scale, eps, base;
    int rope;                                // attention's rope_kind
    int64_t window;                          // 0: none
    bool softmax;
    mn_in q, k, v, d_o;
    mn_out o, lse, dq, dk, dv;
} problem;

static problem softmax_problem(const mn_attention_args *p) {
    return (problem){ .call = &p->call, .scale = p->scale, .base = p->rope_base,
                      .rope = p->rope_kind, .window = p->window, .softmax = true, .q = p->q, .k = p->k, .v = p->v,
                      .d_o = p->cot.o, .o = p->o, .lse = p->lse, .dq = p->grad.q,
                      .dk = p->grad.k, .dv = p->grad.v };
}

static problem relu_problem(const mn_relu_attention_args *p) {
    return (problem){ .call = &p->call, .scale = p->scale, .eps = p->eps, .q = p->q, .k = p->k,
                      .v = p->v, .d_o = p->cot.o, .o = p->o, .dq = p->grad.q, .dk = p->grad.k,
                      .dv = p->grad.v };
}

/* One key-value head of one sequence, and its work space. */
typedef struct work {
    const problem *p;
    mn_sequence seq;
    int64_t j, n_keys, before;               // before: keys older than the first query
    double *k, *dk, *dv;                     // (n_keys,K) turned, (n_keys,K), (n_keys,V)
    double *q, *dq, *z, *w, *g;              // K, K, n_keys each
} work;

static int64_t longest_keys(const mn_call *c) {
    return c->cu_seqlens ? mn_longest_sequence(c) : c->L;
}

static bool plan_heads(const mn_call *c, mn_plan *plan, bool backward) {
    const int64_t keys = longest_keys(c), per_key = (backward ? 2 * c->K + c->V : c->K) + 3;
    int64_t count;
    return mn_mul_i64(&count, keys, per_key) && mn_add_i64(&count, count, 2 * c->K) &&
           mn_ref_plan(plan, mn_n_sequences(c) * c->J, count);
}

static void turn(const problem *p, double *row, int64_t pos, int direction) {
    if (p->rope) mn_ref_turn(row, row, p->call->K, p->rope - 1, p->base, pos, direction);
}

static work open_work(const problem *p, int64_t item, double *scratch) {
    const mn_call *c = p->call;
    const int64_t K = c->K;
    work s = { .p = p, .seq = mn_sequence_at(c, item / c->J), .j = item % c->J };
    s.n_keys = c->cu_seqlens ? s.seq.length : c->L;
    s.before = s.n_keys - s.seq.length;
    s.q = scratch;
    s.dq = s.q + K;
    s.z = s.dq + K;
    s.w = s.z + s.n_keys;
    s.g = s.w + s.n_keys;
    s.k = s.g + s.n_keys;
    s.dk = s.k + s.n_keys * K;
    s.dv = s.dk + s.n_keys * K;
    for (int64_t i = 0; i < s.n_keys; i++) {
        const REAL *k = MN_ROW(REAL, p->k, s.seq.b, s.seq.t0 + i, s.j);
        for (int64_t a = 0; a < K; a++) s.k[i * K + a] = k[a];
        turn(p, s.k + i * K, i, 1);
    }
    return s;
}

static double norm_of(const work *s, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += s->z[i] * s->z[i];
    return sqrt(sum);
}

/* w from z for the n keys a query sees; returns the log of the sum of e^z, or |z| for relu. */
static double weigh(const work *s, int64_t n) {
    double largest = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, s->z[i]);
    for (int64_t i = 0; s->p->softmax && i < n; i++) sum += s->w[i] = exp(s->z[i] - largest);
    if (!s->p->softmax) {
        sum = fmax(norm_of(s, n), s->p->eps);
        for (int64_t i = 0; i < n; i++) s->w[i] = mn_ref_relu(s->z[i]);
    }
    for (int64_t i = 0; i < n; i++) s->w[i] /= sum;
    return s->p->softmax ? largest + log(sum) : sum;
}

/* g becomes dz */
static void weigh_backward(const work *s, int64_t n) {
    double mean = 0.0;
    for (int64_t i = 0; i < n; i++) mean += s->w[i] * s->g[i];
    if (s->p->softmax) {
        for (int64_t i = 0; i < n; i++) s->g[i] = s->w[i] * (s->g[i] - mean);
        return;
    }
    const double norm = norm_of(s, n), size = fmax(norm, s->p->eps);
    const double pull = norm > s->p->eps ? mean / size : 0.0;
    for (int64_t i = 0; i < n; i++) {
        s->g[i] = ((s->z[i] > 0.0 ? s->g[i] : 0.0) - pull * s->z[i]) / size;
    }
}

/* The query of (t, h), its scores and weights, and in *sum what weigh tells; returns how many keys
 * it sees. */
static int64_t read_row(const work *s, int64_t t, int64_t h, double *sum) {
    const problem *p = s->p;
    const int64_t K = p->call->K, n = s->before + t + 1;
    const REAL *q = MN_ROW(REAL, p->q, s->seq.b, s->seq.t0 + t, h);
    for (int64_t a = 0; a < K; a++) s->q[a] = q[a];
    turn(p, s->q, s->before + t, 1);
    for (int64_t i = 0; i < n; i++) {
        double dot = 0.0;
        for (int64_t a = 0; a < K; a++) dot += s->q[a] * s->k[i * K + a];
        s->z[i] = p->scale * dot;
    }
    for (int64_t i = 0; p->window && i < n - p->window; i++) s->z[i] = -INFINITY;
    *sum = weigh(s, n);
    return n;
}

static void forward_row(const work *s, int64_t t, int64_t h) {
    const problem *p = s->p;
    double of_row;
    const int64_t n = read_row(s, t, h, &of_row);
    REAL *o = MN_ROW_OUT(REAL, p->o, s->seq.b, s->seq.t0 + t, h);
    REAL *lse = MN_ROW_OUT(REAL, p->lse, s->seq.b, s->seq.t0 + t, h);
    if (lse) *lse = (REAL)of_row;
    for (int64_t j = 0; o && j < p->call->V; j++) {
        double sum = 0.0;
        for (int64_t i = 0; i < n; i++) {
            sum += s->w[i] * MN_ROW(REAL, p->v, s->seq.b, s->seq.t0 + i, s->j)[j];
        }
        o[j] = (REAL)sum;
    }
}

static void backward_row(const work *s, int64_t t, int64_t h) {
    const problem *p = s->p;
    double of_row;
    const int64_t K = p->call->K, V = p->call->V, n = read_row(s, t, h, &of_row);
    const REAL *d_o = MN_ROW(REAL, p->d_o, s->seq.b, s->seq.t0 + t, h);
    for (int64_t i = 0; i < n; i++) {
        const REAL *v = MN_ROW(REAL, p->v, s->seq.b, s->seq.t0 + i, s->j);
        s->g[i] = 0.0;
        for (int64_t j = 0; j < V; j++) {
            s->g[i] += mn_ref_get(d_o, j) * v[j];
            s->dv[i * V + j] += s->w[i] * mn_ref_get(d_o, j);
        }
    }
    weigh_backward(s, n);
    memset(s->dq, 0, (size_t)K * sizeof *s->dq);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t a = 0; a < K; a++) {
            s->dq[a] += p->scale * s->g[i] * s->k[i * K + a];
            s->dk[i * K + a] += p->scale * s->g[i] * s->q[a];
        }
    }
    turn(p, s->dq, s->before + t, -1);
    REAL *dq = MN_ROW_OUT(REAL, p->dq, s->seq.b, s->seq.t0 + t, h);
    for (int64_t a = 0; dq && a < K; a++) dq[a] = (REAL)s->dq[a];
}

static void each_query(const work *s, void (*row)(const work *s, int64_t t, int64_t h)) {
    const int64_t group = s->p->call->H / s->p->call->J;
    for (int64_t t = 0; t < s->seq.length; t++) {
        for (int64_t h = s->j * group; h < (s->j + 1) * group; h++) row(s, t, h);
    }
}

static void run_forward(const problem *p, int64_t item, double *scratch) {
    const work s = open_work(p, item, scratch);
    each_query(&s, forward_row);
}

static void run_backward(const problem *p, int64_t item, double *scratch) {
    const work s = open_work(p, item, scratch);
    const int64_t K = p->call->K, V = p->call->V;
    memset(s.dk, 0, (size_t)(s.n_keys * (K + V)) * sizeof *s.dk);
    each_query(&s, backward_row);
    for (int64_t i = 0; i < s.n_keys; i++) {
        REAL *dk = MN_ROW_OUT(REAL, p->dk, s.seq.b, s.seq.t0 + i, s.j);
        REAL *dv = MN_ROW_OUT(REAL, p->dv, s.seq.b, s.seq.t0 + i, s.j);
        turn(p, s.dk + i * K, i, -1);
        for (int64_t a = 0; dk && a < K; a++) dk[a] = (REAL)s.dk[i * K + a];
        for (int64_t j = 0; dv && j < V; j++) dv[j] = (REAL)s.dv[i * V + j];
    }
}

bool MN_REF(mn_attention_forward_plan)(const void *args, mn_plan *plan) {
    return plan_heads(args, plan, false);
}

void MN_REF(mn_attention_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                      void *scratch) {
    (void)phase, (void)shared;
    const problem p = softmax_problem(args);
    run_forward(&p, item, scratch);
}

bool MN_REF(mn_attention_backward_plan)(const void *args, mn_plan *plan) {
    return plan_heads(args, plan, true);
}

void MN_REF(mn_attention_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                       void *scratch) {
    (void)phase, (void)shared;
    const problem p = softmax_problem(args);
    run_backward(&p, item, scratch);
}

bool MN_REF(mn_relu_attention_forward_plan)(const void *args, mn_plan *plan) {
    return plan_heads(args, plan, false);
}

void MN_REF(mn_relu_attention_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                           void *scratch) {
    (void)phase, (void)shared;
    const problem p = relu_problem(args);
    run_forward(&p, item, scratch);
}

bool MN_REF(mn_relu_attention_backward_plan)(const void *args, mn_plan *plan) {
    return plan_heads(args, plan, true);
}

void MN_REF(mn_relu_attention_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                            void *scratch) {
    (void)phase, (void)shared;
    const problem p = relu_problem(args);
    run_backward(&p, item, scratch);
}
