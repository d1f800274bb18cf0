/* read_lag.c - reads over the cache in lag order, the newest token first, with learned mixing of
 * lags before and after the activation (HyperMLP, HyperGLU):
 *
 *   z_l = q.k_(t-l); x = z (I + diag d1 + U1 diag c1 Vt1); w = base (I + diag d2 + U2 diag c2 Vt2)
 *   relu: base = relu(x);  glu: base = softplus(x2) relu(x1), x2 from a second query and key branch
 *   o = gv sum_l w_l v_(t-l) / rho,   rho = max(|x1|, eps)
 *
 * norm out_scale divides the output by rho, l2 divides x1, none divides nothing. Lag l uses
 * entry P-1-l of the mixing parameters whatever the length of the past; in layout position the
 * token at place i uses entry i. Without U1 or U2 there is no such mix. */
#include "definition/axes.h"

#include <math.h>
#include <string.h>

enum { NORM_OUT_SCALE, NORM_L2 };
enum { LAYOUT_LAG, LAYOUT_POSITION };

/* One mix over lags: controls c (rank), U (P,rank), Vt (rank,P), d (P). */
typedef struct mix {
    const double *c, *U, *Vt, *d;
    int64_t rank, P, newest;    // newest: the entry of lag 0
} mix;

/* x <- x (I + diag d + U diag c Vt) over lags 0 .. length-1; `low` has room for `rank` numbers */
static void apply(double *x, int64_t length, const mix *m, double *low) {
    if (!m->U) return;
    for (int64_t a = 0; a < m->rank; a++) {
        low[a] = 0.0;
        for (int64_t l = 0; l < length; l++) low[a] += x[l] * m->U[(m->newest - l) * m->rank + a];
        low[a] *= m->c ? m->c[a] : 1.0;
    }
    for (int64_t l = 0; l < length; l++) {
        const int64_t at = m->newest - l;
        if (m->d) x[l] *= 1.0 + m->d[at];
        for (int64_t a = 0; a < m->rank; a++) x[l] += low[a] * m->Vt[a * m->P + at];
    }
}

static const double *rows_of(const double *all, int64_t branch, int64_t count) {
    return all ? all + branch * count : NULL;
}

static int64_t newest_entry(const mn_head *head) {
    const bool by_place = head->config->layout == LAYOUT_POSITION;
    return (by_place ? head->cache->length : head->size->P) - 1;
}

/* Scores of one branch in lag order, mixed. */
static void scores(double *x, const mn_head *head, int64_t branch) {
    const mn_cache *cache = head->cache;
    const int64_t K = head->size->K, P = head->size->P, rank = head->size->R;
    const double *q = head->token->q + branch * K;
    for (int64_t l = 0; l < cache->length; l++) {
        const double *k = cache->k + (cache->length - 1 - l) * cache->k_count + branch * K;
        x[l] = 0.0;
        for (int64_t i = 0; i < K; i++) x[l] += q[i] * k[i];
    }
    const mix m = { rows_of(head->token->c1, branch, rank),
                    rows_of(head->token->U1, branch, P * rank),
                    rows_of(head->token->Vt1, branch, rank * P),
                    rows_of(head->token->d1, branch, P),
                    rank,
                    P,
                    newest_entry(head) };
    apply(x, cache->length, &m, head->scratch);
}

static double softplus(double x) {
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

/* Turns the gate branch x1 into `base`, scaled by x2 where there is a second branch; returns
 * what the output is to be divided by. */
static double activate(double *x1, const double *x2, const mn_head *head) {
    const int64_t length = head->cache->length;
    double norm2 = 0.0;
    for (int64_t l = 0; l < length; l++) norm2 += x1[l] * x1[l];
    const double rho = fmax(sqrt(norm2), head->config->eps);
    const double within = head->config->norm == NORM_L2 ? rho : 1.0;
    for (int64_t l = 0; l < length; l++) {
        x1[l] = fmax(x1[l] / within, 0.0) * (x2 ? softplus(x2[l]) : 1.0);
    }
    return head->config->norm == NORM_OUT_SCALE ? rho : 1.0;
}

static void read_lags(double *o, const mn_head *head, bool glu) {
    const mn_cache *cache = head->cache;
    const int64_t V = head->size->V;
    double *x1 = cache->scratch, *x2 = glu ? x1 + cache->capacity : NULL;
    scores(x1, head, head->h);
    if (glu) scores(x2, head, head->size->H + head->h);
    const double divisor = activate(x1, x2, head);
    const mix m = { head->in.c2, head->in.U2,   head->in.Vt2,
                    head->in.d2, head->size->W, head->size->P,
                    newest_entry(head) };
    apply(x1, cache->length, &m, head->scratch);
    memset(o, 0, (size_t)V * sizeof *o);
    for (int64_t l = 0; l < cache->length; l++) {
        const double *v = cache->v + (cache->length - 1 - l) * cache->v_count + head->h * V;
        for (int64_t j = 0; j < V; j++) o[j] += x1[l] * v[j];
    }
    for (int64_t j = 0; j < V; j++) o[j] *= (head->in.gv ? head->in.gv[j] : 1.0) / divisor;
}

static void run_relu(double *o, const mn_head *head) {
    read_lags(o, head, false);
}

static void run_glu(double *o, const mn_head *head) {
    read_lags(o, head, true);
}

const mn_read mn_read_lag_relu = {
    .name = "lag-mixed relu",
    .equation = "o = sum_l (relu(z R1) R2)_l v_(t-l) / |z R1|",
    .kind = 0,
    .run = run_relu,
};

const mn_read mn_read_lag_glu = {
    .name = "lag-mixed GLU",
    .equation = "o = sum_l (softplus(z2 R1) relu(z1 R1) R2)_l v_(t-l) / |z1 R1|",
    .kind = 1,
    .run = run_glu,
};
