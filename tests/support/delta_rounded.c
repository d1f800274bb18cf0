/* delta_rounded.c - the delta rule over chunks, evaluated in float64 with bf16 factors.
 *
 * Chunks of 64 tokens, G_t the sum of log decays from the chunk's front, ~ what is rounded:
 *
 *   A_ts = beta_s e_t.w_s exp(G_t - G_s), s < t         ~T = (I + A)^-1
 *   P_ts = scale beta_s q_t.w_s exp(G_t - G_s), s <= t
 *   X_t = v_t - exp(G_t) ~S'e_t       R = ~T ~X         o_t = scale exp(G_t) ~S'q_t + (~P ~R)_t
 *   S <- exp(G_L) S + sum_s w_s ~(beta_s exp(G_L - G_s) R_s)'
 *
 *   dR_t = beta_t exp(G_L - G_t) ~D'w_t + (~P'do)_t     dX = ~T'~dR = dv
 *   D <- exp(G_L) D + sum_t q_t ~(scale exp(G_t) do_t)' - e_t ~(exp(G_t) dX_t)'
 *   p_ts = scale do_t.~R_s exp(G_t - G_s)               a_ts = -~dX_t.~R_s exp(G_t - G_s)
 *   dq_t = scale exp(G_t) ~S do_t + sum_s ~(p_ts beta_s) w_s
 *   de_t = -exp(G_t) ~S ~dX_t + sum_s ~(a_ts beta_s) w_s
 *   dw_s / beta_s = exp(G_L - G_s) ~D ~R_s + sum_t ~p_ts q_t + ~a_ts e_t
 *
 * A decay's gradient is the sum, from its token to the end of the chunk, of what passes through the
 * states and between tokens, and of what leaves the chunk.
 *
 * Where each channel has a decay, rows of keys are rounded with theirs, and values and matrices
 * have none. Above, q, e and w that meet states become ~(scale exp(G_t) q_t), ~(exp(G_t) e_t) and
 * ~(beta_t exp(G_L - G_t) w_t), R and dX are rounded without factors, and for a channel i, with G
 * its own, o a token between s and t or a little before s (origin), u the last token in front of
 * the part of 16 that t is in, and z the last of the part of s,
 *
 *   A_ts = beta_s sum_i ~(e_ti exp(G_t - G_o)) ~(w_si exp(G_o - G_s)), P likewise
 *   p_ts = scale do_t.~R_s        a_ts = -~dX_t.~R_s
 *   dq_ti = .. + sum_s ~p_ts ~(beta_s w_si exp(G_u - G_s)) exp(G_t - G_u), de likewise with a
 *   dw_si / beta_s = .. + sum_t (~p_ts ~(q_ti exp(G_t - G_z)) + ~a_ts ~(e_ti exp(G_t - G_z)))
 *                               exp(G_z - G_s)
 *   dG_ti = q_ti dq_ti + e_ti de_ti - w_ti dw_ti    without what t reads of its own write
 *
 * Kernels add up pairs of one part in float32: p, a and rows of them are not rounded in gradients.
 * Nor are sums of decays, T before it is stored, and what multiplies gradients from states. */
#include "support/delta_rounded.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/util.h"
#include "kernels/access.h"
#include "ops/validate.h"
#include "support/check.h"

enum { CHUNK = 64, PART = 16, EIGHT = 8 };

/* What of S a row of keys does: q, e and w. */
typedef enum role { READ, ERASE, WRITE } role;

/* One chunk of one head: its rows, and what both ways need of it. */
typedef struct chunk {
    int64_t b, t0, h, L;
    double beta[CHUNK];
    double T[CHUNK][CHUNK], P[CHUNK][CHUNK], A[CHUNK][CHUNK];    // rounded
    double *G;                                                   // CHUNK + 1 decays
    double *S, *D;                                               // K V, rounded
    double *R, *dX;                                              // CHUNK V, rounded
} chunk;

typedef struct head {
    const mn_delta_args *p;
    int64_t K, V, decays;    // decays of a token: K, or one
    bool channel, rounded;
} head;

/* Rows of q, e and w, (CHUNK,K) each. */
typedef struct rows {
    double *q, *e, *w;
} rows;

/* Weights of pairs (t, s) in gradients of keys, those of w_s in dq_t and de_t, and of q_t and e_t
 * in dw_s / beta_s; and what they come to over s < t, or t > s. */
typedef struct pairs {
    double q[CHUNK][CHUNK], e[CHUNK][CHUNK], wq[CHUNK][CHUNK], we[CHUNK][CHUNK];
    rows sum;
} pairs;

static double low(const head *hd, double x) {
    return hd->rounded ? mn_bf16_round(x) : x;
}

/* The same of a row that may have decays, whatever the exponent, which kernels choose by where they
 * count decays from. */
static double low_row(const head *hd, double x) {
    int exponent;
    const double mantissa = frexp(x, &exponent);
    return hd->rounded && hd->channel ? ldexp(mn_bf16_round(mantissa), exponent) : x;
}

static const double *row(const mn_in *view, const chunk *c, int64_t t) {
    return MN_ROW(double, *view, c->b, c->t0 + t, c->h);
}

static double *row_out(const mn_out *view, const chunk *c, int64_t t) {
    return MN_ROW_OUT(double, *view, c->b, c->t0 + t, c->h);
}

/* A row of q, e or w, whose heads serve H / J heads of values each. */
static const double *key_row(const head *hd, const chunk *c, role as, int64_t t) {
    const mn_delta_args *p = hd->p;
    const mn_in *view = as == READ ? &p->q : as == WRITE && p->w.data ? &p->w : &p->e;
    return MN_ROW(double, *view, c->b, c->t0 + t, c->h * p->call.J / p->call.H);
}

/* Its gradient is the sum over those heads, of which the first one stores. */
static void put_key(const head *hd, const mn_out *view, const chunk *c, int64_t t, int64_t i,
                    double x) {
    const int64_t J = hd->p->call.J, H = hd->p->call.H;
    double *at = MN_ROW_OUT(double, *view, c->b, c->t0 + t, c->h * J / H);
    if (at) at[i] = c->h % (H / J) ? at[i] + x : x;
}

static double dot(const double *x, const double *y, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* y += by x */
static void add(double *y, double by, const double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += by * x[i];
}

/* ---- decays ---------------------------------------------------------------------------------- */

/* Sums of log decays, each cut off at -80: e^-80 is nothing beside 1, sums of less would forget the
 * other tokens, and the reciprocal of eight of them, e^640, is within float64 (origin). */
static void sum_decays(chunk *c, const head *hd) {
    const int64_t n = hd->decays;
    for (int64_t t = 0; t < CHUNK; t++) {
        const double *g = t < c->L ? row(&hd->p->g, c, t) : NULL;
        for (int64_t i = 0; i < n; i++) {
            const double by = g ? g[i] : 0.0;
            c->G[(t + 1) * n + i] = c->G[t * n + i] + (by < -80.0 ? -80.0 : by);
        }
    }
}

/* exp(G_t - G_s) of channel i; -1 is the chunk's front. */
static double fall(const head *hd, const chunk *c, int64_t s, int64_t t, int64_t i) {
    const double *G = hd->channel ? c->G + i : c->G;
    return exp(G[(t + 1) * hd->decays] - G[(s + 1) * hd->decays]);
}

/* The token up to which factors of scores of t and s <= t have decays on either side: in a part the
 * one in front of the eight tokens of s, where that of s is more than 1; else the end of the last
 * 16 or 32 tokens before t. */
static int64_t origin(int64_t t, int64_t s) {
    if (t / PART == s / PART) return s / EIGHT * EIGHT - 1;
    if (t / (2 * PART) == s / (2 * PART)) return t / PART * PART - 1;
    return t / (2 * PART) * (2 * PART) - 1;
}

static rows rows_new(int64_t K) {
    double *q = calloc((size_t)(3 * CHUNK * K), sizeof *q);
    return (rows){ q, q + CHUNK * K, q + 2 * CHUNK * K };
}

/* Rows q and e behind token `o` with decays from there, and rows w in front of it, and behind it up
 * to `last`, with decays up to there. `scores`: q has the scale, else w has beta. */
static void decay_rows(rows *to, const chunk *c, const head *hd, int64_t o, int64_t last,
                       bool scores) {
    const int64_t K = hd->K;
    for (int64_t t = 0; t < c->L; t++) {
        const double *q = key_row(hd, c, READ, t), *e = key_row(hd, c, ERASE, t);
        const double *w = key_row(hd, c, WRITE, t);
        const double by_q = scores ? hd->p->scale : 1.0, by_w = scores ? 1.0 : c->beta[t];
        for (int64_t i = 0, at = t * K; i < K; i++, at++) {
            const double since = hd->channel && t > o ? fall(hd, c, o, t, i) : 1.0;
            const double until = hd->channel && t <= last ? fall(hd, c, t, o, i) : 1.0;
            to->q[at] = low_row(hd, by_q * q[i] * since);
            to->e[at] = low_row(hd, e[i] * since);
            to->w[at] = low_row(hd, by_w * w[i] * until);
        }
    }
}

/* Where rows of keys meet states: their factors, of which rows have those of channels and values
 * those that channels share. */
static double state_factor(const head *hd, const chunk *c, role as, int64_t t, int64_t i) {
    if (as == WRITE) return c->beta[t] * fall(hd, c, t, c->L - 1, i);
    return (as == READ ? hd->p->scale : 1.0) * fall(hd, c, -1, t, i);
}

static double state_row(const head *hd, const chunk *c, role as, int64_t t, int64_t i) {
    const double x = key_row(hd, c, as, t)[i];
    return hd->channel ? low_row(hd, state_factor(hd, c, as, t, i) * x) : x;
}

static double state_value(const head *hd, const chunk *c, role as, int64_t t) {
    return hd->channel ? 1.0 : state_factor(hd, c, as, t, 0);
}

/* ---- a chunk --------------------------------------------------------------------------------- */

/* A, not rounded, and P. */
static void score(double A[CHUNK][CHUNK], chunk *c, const head *hd) {
    const int64_t K = hd->K;
    rows x = rows_new(K);
    for (int64_t o = -1; o < c->L - 1; o += EIGHT) {
        decay_rows(&x, c, hd, o, o + EIGHT, true);
        for (int64_t t = o + 1; t < c->L; t++) {
            for (int64_t s = 0; s <= t; s++) {
                if (origin(t, s) != o) continue;
                const double by = c->beta[s] * (hd->channel ? 1.0 : fall(hd, c, s, t, 0));
                A[t][s] = s < t ? by * dot(x.e + t * K, x.w + s * K, K) : 0.0;
                c->P[t][s] = low(hd, by * dot(x.q + t * K, x.w + s * K, K));
            }
        }
    }
    free(x.q);
}

/* Decays and squares of a chunk. */
static void prepare(chunk *c, const head *hd) {
    double A[CHUNK][CHUNK], T[CHUNK][CHUNK];
    sum_decays(c, hd);
    for (int64_t t = 0; t < c->L; t++) {
        const double *beta = row(&hd->p->beta, c, t);
        c->beta[t] = beta ? *beta : 1.0;
    }
    score(A, c, hd);
    for (int64_t t = 0; t < c->L; t++) {
        for (int64_t s = 0; s <= t; s++) {
            c->A[t][s] = low(hd, A[t][s]);
            T[t][s] = s == t;
            for (int64_t m = s; m < t; m++) T[t][s] -= A[t][m] * T[m][s];
            c->T[t][s] = low(hd, T[t][s]);
        }
    }
}

/* Keeps a state, rounded, and decays it over the chunk. */
static void pass_state(double *kept, double *S, const chunk *c, const head *hd) {
    for (int64_t i = 0; i < hd->K; i++) {
        const double whole = fall(hd, c, -1, c->L - 1, i);
        for (int64_t j = i * hd->V; j < (i + 1) * hd->V; j++) {
            kept[j] = low(hd, S[j]);
            S[j] *= whole;
        }
    }
}

/* y += by S'x, with x a row as it meets states. */
static void read_state(double *y, double by, const double *S, const chunk *c, const head *hd,
                       role as, int64_t t) {
    by *= state_value(hd, c, as, t);
    for (int64_t i = 0; i < hd->K; i++) {
        add(y, by * state_row(hd, c, as, t, i), S + i * hd->V, hd->V);
    }
}

/* S += x y', likewise; y times `by` is rounded, in y too. */
static void add_to_state(double *S, double by, double *y, const chunk *c, const head *hd, role as,
                         int64_t t) {
    by *= state_value(hd, c, as, t);
    for (int64_t j = 0; j < hd->V; j++) y[j] = low(hd, by * y[j]);
    for (int64_t i = 0; i < hd->K; i++) {
        add(S + i * hd->V, state_row(hd, c, as, t, i), y, hd->V);
    }
}

/* Outputs and residuals of a chunk, and the state behind it. */
static void forward(chunk *c, const head *hd, double *S) {
    const mn_delta_args *p = hd->p;
    const int64_t V = hd->V;
    double *X = calloc((size_t)(CHUNK * V), sizeof *X), *R = calloc((size_t)V, sizeof *R);
    pass_state(c->S, S, c, hd);
    for (int64_t t = 0; t < c->L; t++) {
        double *o = row_out(&p->o, c, t), *x = X + t * V;
        for (int64_t j = 0; o && j < V; j++) o[j] = 0.0;
        read_state(x, -1.0, c->S, c, hd, ERASE, t);
        if (o) read_state(o, 1.0, c->S, c, hd, READ, t);
        for (int64_t j = 0; j < V; j++) x[j] = low(hd, row(&p->v, c, t)[j] + x[j]), R[j] = 0.0;
        for (int64_t s = 0; s <= t; s++) add(R, c->T[t][s], X + s * V, V);
        for (int64_t j = 0; j < V; j++) c->R[t * V + j] = low(hd, R[j]);
        for (int64_t s = 0; o && s <= t; s++) add(o, c->P[t][s], c->R + s * V, V);
        add_to_state(S, 1.0, R, c, hd, WRITE, t);
    }
    free(X), free(R);
}

/* Gradients of values, and the adjoint in front of the chunk. */
static void back(chunk *c, const head *hd, double *D) {
    const mn_delta_args *p = hd->p;
    const int64_t V = hd->V;
    double *dR = calloc((size_t)(CHUNK * V), sizeof *dR), *x = calloc((size_t)V, sizeof *x);
    pass_state(c->D, D, c, hd);
    for (int64_t t = c->L - 1; t >= 0; t--) {
        double *dr = dR + t * V, *dv = row_out(&p->grad.v, c, t);
        const double *cot = row(&p->cot.o, c, t);
        read_state(dr, 1.0, c->D, c, hd, WRITE, t);
        for (int64_t s = t; cot && s < c->L; s++) add(dr, c->P[s][t], row(&p->cot.o, c, s), V);
        for (int64_t j = 0; j < V; j++) dr[j] = low(hd, dr[j]), x[j] = 0.0;
        for (int64_t s = t; s < c->L; s++) add(x, c->T[s][t], dR + s * V, V);
        for (int64_t j = 0; j < V; j++) {
            if (dv) dv[j] = x[j];
            c->dX[t * V + j] = low(hd, x[j]);
        }
        add_to_state(D, -1.0, x, c, hd, ERASE, t);
        if (!cot) continue;
        memcpy(x, cot, (size_t)V * sizeof *x);
        add_to_state(D, 1.0, x, c, hd, READ, t);
    }
    free(dR), free(x);
}

/* ---- gradients of keys and decays ------------------------------------------------------------ */

/* Fills in the pairs, and adds what passes between tokens to a decay that channels share. */
static void weigh(pairs *m, double *dG, const chunk *c, const head *hd) {
    for (int64_t t = 0; t < c->L; t++) {
        const double *cot = row(&hd->p->cot.o, c, t);
        for (int64_t s = 0; s <= t; s++) {
            const bool rounds = !hd->channel || t / PART != s / PART;
            const double by = hd->channel ? 1.0 : fall(hd, c, s, t, 0), *R = c->R + s * hd->V;
            const double beta = hd->channel ? 1.0 : c->beta[s];    // rows of w have it
            const double dP = cot ? dot(cot, R, hd->V) : 0.0;
            const double dA = s < t ? -dot(c->dX + t * hd->V, R, hd->V) : 0.0;
            const double p = hd->p->scale * by * dP, a = by * dA;
            const double passes = dP * c->P[t][s] + dA * c->A[t][s];
            m->q[t][s] = rounds ? low(hd, p * beta) : p, m->wq[t][s] = rounds ? low(hd, p) : p;
            m->e[t][s] = rounds ? low(hd, a * beta) : a, m->we[t][s] = rounds ? low(hd, a) : a;
            if (!hd->channel && s < t) dG[t] += passes, dG[s] -= passes;
        }
    }
}

/* Gradients of q, e and of w / beta of one token and channel. */
typedef struct key_grads {
    double q, e, w;
} key_grads;

/* What goes through the state in front and the adjoint behind. */
static key_grads grade_states(const chunk *c, const head *hd, int64_t t, int64_t i) {
    const int64_t V = hd->V;
    const double *cot = row(&hd->p->cot.o, c, t), *S = c->S + i * V;
    return (key_grads){
        .q = cot ? state_factor(hd, c, READ, t, i) * dot(S, cot, V) : 0.0,
        .e = -state_factor(hd, c, ERASE, t, i) * dot(S, c->dX + t * V, V),
        .w = fall(hd, c, t, c->L - 1, i) * dot(c->D + i * V, c->R + t * V, V),
    };
}

/* Adds what goes between tokens of different parts: to the part that begins behind `o` what earlier
 * tokens have written, to the one that ends there what later ones read. */
static void grade_across(pairs *m, rows *x, const chunk *c, const head *hd, int64_t o) {
    const int64_t K = hd->K;
    const rows *d = &m->sum;
    decay_rows(x, c, hd, o, o, false);
    for (int64_t i = 0; i < K; i++) {
        for (int64_t t = o + 1; t < mn_min(o + 1 + PART, c->L); t++) {
            const double by = fall(hd, c, o, t, i);
            for (int64_t s = 0; s <= o; s++) {
                d->q[t * K + i] += by * m->q[t][s] * x->w[s * K + i];
                d->e[t * K + i] += by * m->e[t][s] * x->w[s * K + i];
            }
        }
        for (int64_t s = o + 1 - PART; s <= o; s++) {
            const double by = fall(hd, c, s, o, i);
            for (int64_t t = o + 1; t < c->L; t++) {
                d->w[s * K + i] += by * m->wq[t][s] * x->q[t * K + i];
                d->w[s * K + i] += by * m->we[t][s] * x->e[t * K + i];
            }
        }
    }
}

/* What goes between tokens. */
static void grade_pairs(pairs *m, const chunk *c, const head *hd) {
    const int64_t K = hd->K;
    const rows d = m->sum = rows_new(K);
    rows x = rows_new(K);
    for (int64_t t = 1; t < c->L; t++) {
        const double *q = key_row(hd, c, READ, t), *e = key_row(hd, c, ERASE, t);
        for (int64_t s = hd->channel ? t / PART * PART : 0; s < t; s++) {
            const double *w = key_row(hd, c, WRITE, s), beta = hd->channel ? c->beta[s] : 1.0;
            for (int64_t i = 0; i < K; i++) {
                const double by = hd->channel ? fall(hd, c, s, t, i) : 1.0;
                d.q[t * K + i] += m->q[t][s] * beta * w[i] * by;
                d.e[t * K + i] += m->e[t][s] * beta * w[i] * by;
                d.w[s * K + i] += (m->wq[t][s] * q[i] + m->we[t][s] * e[i]) * by;
            }
        }
    }
    for (int64_t o = PART - 1; hd->channel && o < c->L - 1; o += PART) {
        grade_across(m, &x, c, hd, o);
    }
    free(x.q);
}

/* q dq + e de - w dw */
static double passed(const key_grads *d, const chunk *c, const head *hd, int64_t t, int64_t i) {
    return key_row(hd, c, READ, t)[i] * d->q + key_row(hd, c, ERASE, t)[i] * d->e -
           c->beta[t] * key_row(hd, c, WRITE, t)[i] * d->w;
}

/* Gradients of a token's keys and beta; adds to those of its sums of decays and of the chunk's. */
static void grade_token(double *dG, double *end, const pairs *m, const chunk *c, const head *hd,
                        int64_t t) {
    const mn_delta_args *p = hd->p;
    double *dbeta = row_out(&p->grad.beta, c, t), to_beta = 0.0;
    for (int64_t i = 0; i < hd->K; i++) {
        const int64_t decay = hd->channel ? i : 0;
        const double w = key_row(hd, c, WRITE, t)[i];
        key_grads d = grade_states(c, hd, t, i);
        end[decay] += c->beta[t] * w * d.w;
        if (!hd->channel) dG[decay] += passed(&d, c, hd, t, i);
        d.q += m->sum.q[t * hd->K + i];
        d.e += m->sum.e[t * hd->K + i];
        d.w += m->sum.w[t * hd->K + i];
        if (hd->channel) dG[decay] += passed(&d, c, hd, t, i);
        d.q += m->q[t][t] * (hd->channel ? c->beta[t] : 1.0) * w;
        d.w += m->wq[t][t] * key_row(hd, c, READ, t)[i];
        to_beta += w * d.w;
        put_key(hd, &p->grad.q, c, t, i, d.q);
        put_key(hd, &p->grad.w, c, t, i, c->beta[t] * d.w);
        put_key(hd, &p->grad.e, c, t, i, d.e + (p->w.data ? 0.0 : c->beta[t] * d.w));
    }
    if (dbeta) *dbeta = to_beta;
}

/* Gradients of keys, beta and decays. Returns the chunk's sum for a decay per head. */
static double grade(const chunk *c, const head *hd) {
    const mn_delta_args *p = hd->p;
    const int64_t n = hd->decays, V = hd->V;
    double *end = calloc((size_t)((CHUNK + 1) * n), sizeof *end), *dG = end + n, whole = 0.0;
    pairs *m = calloc(1, sizeof *m);
    weigh(m, dG, c, hd);
    grade_pairs(m, c, hd);
    for (int64_t i = 0; i < hd->K; i++) {
        end[hd->channel ? i : 0] += fall(hd, c, -1, c->L - 1, i) *
                                    dot(c->S + i * V, c->D + i * V, V);
    }
    for (int64_t t = 0; t < c->L; t++) grade_token(dG + t * n, end, m, c, hd, t);
    for (int64_t t = c->L - 1; t >= 0; t--) {
        double *dg = p->decay == MN_DECAY_HEAD ? NULL : row_out(&p->grad.g, c, t);
        for (int64_t i = 0; i < n; i++) {
            end[i] += dG[t * n + i];
            whole += end[i];
            if (dg) dg[i] = end[i];
        }
    }
    free(end), free(m->sum.q), free(m);
    return whole;
}

/* All chunks of a head of a sequence, there and back. Returns its sum for a decay per head. */
static double run_head(const head *hd, int64_t n, int64_t h) {
    const mn_delta_args *p = hd->p;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const int64_t n_chunks = mn_ceil_div(seq.length, CHUNK);
    const int64_t KV = hd->K * hd->V, CV = CHUNK * hd->V;
    chunk *chunks = calloc((size_t)mn_max(n_chunks, 1), sizeof *chunks);
    double *state = calloc((size_t)KV, sizeof *state), whole = 0.0;
    const double *state0 = MN_ROW(double, p->state0, n, 0, h);
    const double *cot = MN_ROW(double, p->cot.state, n, 0, h);
    double *state_out = MN_ROW_OUT(double, p->state, n, 0, h);
    double *dstate0 = MN_ROW_OUT(double, p->grad.state0, n, 0, h);
    if (state0) memcpy(state, state0, (size_t)KV * sizeof *state);
    for (int64_t i = 0; i < n_chunks; i++) {
        chunk *c = &chunks[i];
        c->b = seq.b, c->t0 = seq.t0 + i * CHUNK, c->h = h;
        c->L = mn_min(CHUNK, seq.length - i * CHUNK);
        c->S = calloc((size_t)(2 * (KV + CV) + (CHUNK + 1) * hd->decays), sizeof *c->S);
        c->D = c->S + KV, c->R = c->D + KV, c->dX = c->R + CV, c->G = c->dX + CV;
        prepare(c, hd);
        forward(c, hd, state);
    }
    if (state_out) memcpy(state_out, state, (size_t)KV * sizeof *state);
    memset(state, 0, (size_t)KV * sizeof *state);
    if (cot) memcpy(state, cot, (size_t)KV * sizeof *state);
    for (int64_t i = n_chunks - 1; i >= 0; i--) {
        back(&chunks[i], hd, state);
        whole += grade(&chunks[i], hd);
        free(chunks[i].S);
    }
    if (dstate0) memcpy(dstate0, state, (size_t)KV * sizeof *state);
    free(chunks), free(state);
    return whole;
}

void delta_run_rounded(mn_sample *sample, const op_case *c, bool rounded) {
    mn_delta_args args = *(const mn_delta_args *)sample->args;
    if (mn_validate(MN_OP_delta, &args, true) != MN_OK) {
        check_fatal("%s: %s", op_case_text(c), mn_last_error());
    }
    const bool channel = args.decay == MN_DECAY_CHANNEL;
    const int64_t K = args.call.K;
    const head hd = { &args, K, args.call.V, channel ? K : 1, channel, rounded };
    for (int64_t h = 0; h < args.call.H; h++) {
        double *dg = MN_ROW_OUT(double, args.grad.g, 0, 0, h), whole = 0.0;
        for (int64_t n = 0; n < mn_n_sequences(&args.call); n++) whole += run_head(&hd, n, h);
        if (dg && args.decay == MN_DECAY_HEAD) *dg = whole;
    }
}
