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
 * states and between tokens, and of what leaves the chunk. */
#include "support/delta_rounded.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/util.h"
#include "kernels/access.h"
#include "ops/validate.h"
#include "support/check.h"

enum { CHUNK = 64 };

/* One chunk of one head: its rows, and what both ways need of it. */
typedef struct chunk {
    int64_t b, t0, h, L;
    double G[CHUNK], beta[CHUNK];
    double T[CHUNK][CHUNK], P[CHUNK][CHUNK], A[CHUNK][CHUNK];    // rounded
    double *S, *D;                                               // K V, rounded
    double *R, *dX;                                              // CHUNK V, rounded
} chunk;

typedef struct head {
    const mn_delta_args *p;
    int64_t K, V;
    bool rounded;
} head;

static double low(const head *hd, double x) {
    return hd->rounded ? mn_bf16_round(x) : x;
}

static const double *row(const mn_in *view, const chunk *c, int64_t t) {
    return MN_ROW(double, *view, c->b, c->t0 + t, c->h);
}

static double *row_out(const mn_out *view, const chunk *c, int64_t t) {
    return MN_ROW_OUT(double, *view, c->b, c->t0 + t, c->h);
}

/* A row of q, e or w, whose heads serve H / J heads of values each. */
static const double *key_row(const head *hd, const mn_in *view, const chunk *c, int64_t t) {
    return MN_ROW(double, *view, c->b, c->t0 + t, c->h * hd->p->call.J / hd->p->call.H);
}

/* Its gradient is the sum over those heads, of which the first one stores. */
static void put_key(const head *hd, const mn_out *view, const chunk *c, int64_t t, int64_t i,
                    double x) {
    const int64_t J = hd->p->call.J, H = hd->p->call.H;
    double *at = MN_ROW_OUT(double, *view, c->b, c->t0 + t, c->h * J / H);
    if (at) at[i] = c->h % (H / J) ? at[i] + x : x;
}

static const double *write_row(const head *hd, const chunk *c, int64_t t) {
    return key_row(hd, hd->p->w.data ? &hd->p->w : &hd->p->e, c, t);
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

static double last(const chunk *c) {
    return c->G[c->L - 1];
}

/* Decays and squares of a chunk. */
static void prepare(chunk *c, const head *hd) {
    const mn_delta_args *p = hd->p;
    double sum = 0.0, T[CHUNK][CHUNK];
    for (int64_t t = 0; t < c->L; t++) {
        const double *g = row(&p->g, c, t);
        const double *beta = row(&p->beta, c, t);
        c->G[t] = sum += g ? *g : 0.0;
        c->beta[t] = beta ? *beta : 1.0;
    }
    for (int64_t t = 0; t < c->L; t++) {
        double A[CHUNK];
        for (int64_t s = 0; s <= t; s++) {
            const double by = c->beta[s] * exp(c->G[t] - c->G[s]);
            A[s] = s < t ? by * dot(key_row(hd, &p->e, c, t), write_row(hd, c, s), hd->K) : 0.0;
            c->A[t][s] = low(hd, A[s]);
            const double both = dot(key_row(hd, &p->q, c, t), write_row(hd, c, s), hd->K);
            c->P[t][s] = low(hd, p->scale * by * both);
        }
        for (int64_t s = 0; s <= t; s++) {
            T[t][s] = s == t;
            for (int64_t m = s; m < t; m++) T[t][s] -= A[m] * T[m][s];
            c->T[t][s] = low(hd, T[t][s]);
        }
    }
}

/* Outputs and residuals of a chunk, and the state behind it. */
static void forward(chunk *c, const head *hd, double *S) {
    const mn_delta_args *p = hd->p;
    const int64_t K = hd->K, V = hd->V;
    double *X = calloc((size_t)(CHUNK * V), sizeof *X), *R = calloc((size_t)V, sizeof *R);
    for (int64_t i = 0; i < K * V; i++) c->S[i] = low(hd, S[i]);
    for (int64_t i = 0; i < K * V; i++) S[i] *= exp(last(c));
    for (int64_t t = 0; t < c->L; t++) {
        double *o = row_out(&p->o, c, t), *x = X + t * V;
        for (int64_t j = 0; o && j < V; j++) o[j] = 0.0;
        for (int64_t i = 0; i < K; i++) {
            add(x, -exp(c->G[t]) * key_row(hd, &p->e, c, t)[i], c->S + i * V, V);
            if (o) add(o, p->scale * exp(c->G[t]) * key_row(hd, &p->q, c, t)[i], c->S + i * V, V);
        }
        for (int64_t j = 0; j < V; j++) x[j] = low(hd, row(&p->v, c, t)[j] + x[j]), R[j] = 0.0;
        for (int64_t s = 0; s <= t; s++) add(R, c->T[t][s], X + s * V, V);
        for (int64_t j = 0; j < V; j++) c->R[t * V + j] = low(hd, R[j]);
        for (int64_t s = 0; o && s <= t; s++) add(o, c->P[t][s], c->R + s * V, V);
        const double by = c->beta[t] * exp(last(c) - c->G[t]);
        for (int64_t j = 0; j < V; j++) R[j] = low(hd, by * R[j]);
        for (int64_t i = 0; i < K; i++) add(S + i * V, write_row(hd, c, t)[i], R, V);
    }
    free(X), free(R);
}

/* Gradients of values, and the adjoint in front of the chunk. */
static void back(chunk *c, const head *hd, double *D) {
    const mn_delta_args *p = hd->p;
    const int64_t K = hd->K, V = hd->V;
    double *dR = calloc((size_t)(CHUNK * V), sizeof *dR), *x = calloc((size_t)V, sizeof *x);
    for (int64_t i = 0; i < K * V; i++) c->D[i] = low(hd, D[i]);
    for (int64_t i = 0; i < K * V; i++) D[i] *= exp(last(c));
    for (int64_t t = c->L - 1; t >= 0; t--) {
        double *dr = dR + t * V, *dv = row_out(&p->grad.v, c, t);
        const double *cot = row(&p->cot.o, c, t), late = exp(last(c) - c->G[t]);
        for (int64_t i = 0; i < K; i++) {
            add(dr, c->beta[t] * late * write_row(hd, c, t)[i], c->D + i * V, V);
        }
        for (int64_t s = t; cot && s < c->L; s++) add(dr, c->P[s][t], row(&p->cot.o, c, s), V);
        for (int64_t j = 0; j < V; j++) dr[j] = low(hd, dr[j]), x[j] = 0.0;
        for (int64_t s = t; s < c->L; s++) add(x, c->T[s][t], dR + s * V, V);
        for (int64_t j = 0; j < V; j++) {
            if (dv) dv[j] = x[j];
            c->dX[t * V + j] = low(hd, x[j]);
            x[j] = low(hd, -exp(c->G[t]) * x[j]);
        }
        for (int64_t i = 0; i < K; i++) add(D + i * V, key_row(hd, &p->e, c, t)[i], x, V);
        for (int64_t j = 0; cot && j < V; j++) x[j] = low(hd, p->scale * exp(c->G[t]) * cot[j]);
        for (int64_t i = 0; cot && i < K; i++) add(D + i * V, key_row(hd, &p->q, c, t)[i], x, V);
    }
    free(dR), free(x);
}

/* What goes through the state in front and the adjoint behind, for row i of token t. */
static void grade_states(double *dq, double *de, double *dw, const chunk *c, const head *hd,
                         int64_t t, int64_t i) {
    const int64_t V = hd->V;
    const double *cot = row(&hd->p->cot.o, c, t), *S = c->S + i * V;
    *dq = cot ? hd->p->scale * exp(c->G[t]) * dot(S, cot, V) : 0.0;
    *de = -exp(c->G[t]) * dot(S, c->dX + t * V, V);
    *dw = exp(last(c) - c->G[t]) * dot(c->D + i * V, c->R + t * V, V);
}

/* Gradients of keys, beta and decays. Returns the chunk's sum for a decay per head. */
static double grade(const chunk *c, const head *hd) {
    const mn_delta_args *p = hd->p;
    const int64_t K = hd->K, L = c->L;
    double p_at[CHUNK][CHUNK], a_at[CHUNK][CHUNK], dG[CHUNK] = { 0 }, whole = 0.0;
    double end = exp(last(c)) * dot(c->S, c->D, K * hd->V);
    for (int64_t t = 0; t < L; t++) {
        const double *cot = row(&p->cot.o, c, t);
        for (int64_t s = 0; s <= t; s++) {
            const double fall = exp(c->G[t] - c->G[s]), *R = c->R + s * hd->V;
            const double dP = cot ? dot(cot, R, hd->V) : 0.0;
            const double dA = s < t ? -dot(c->dX + t * hd->V, R, hd->V) : 0.0;
            p_at[t][s] = p->scale * fall * dP, a_at[t][s] = fall * dA;
            if (s < t) dG[t] += dP * c->P[t][s] + dA * c->A[t][s];
            if (s < t) dG[s] -= dP * c->P[t][s] + dA * c->A[t][s];
        }
    }
    for (int64_t t = 0; t < L; t++) {
        double *dbeta = row_out(&p->grad.beta, c, t), to_beta = 0.0;
        for (int64_t i = 0; i < K; i++) {
            const double w = write_row(hd, c, t)[i];
            double q, e, by_beta;
            grade_states(&q, &e, &by_beta, c, hd, t, i);
            dG[t] += key_row(hd, &p->q, c, t)[i] * q + key_row(hd, &p->e, c, t)[i] * e;
            dG[t] -= c->beta[t] * w * by_beta;
            end += c->beta[t] * w * by_beta;
            for (int64_t s = 0; s <= t; s++) {
                q += low(hd, p_at[t][s] * c->beta[s]) * write_row(hd, c, s)[i];
                e += low(hd, a_at[t][s] * c->beta[s]) * write_row(hd, c, s)[i];
            }
            for (int64_t s = t; s < L; s++) {
                by_beta += low(hd, p_at[s][t]) * key_row(hd, &p->q, c, s)[i];
                by_beta += low(hd, a_at[s][t]) * key_row(hd, &p->e, c, s)[i];
            }
            to_beta += w * by_beta;
            put_key(hd, &p->grad.q, c, t, i, q);
            put_key(hd, &p->grad.w, c, t, i, c->beta[t] * by_beta);
            put_key(hd, &p->grad.e, c, t, i, e + (p->w.data ? 0.0 : c->beta[t] * by_beta));
        }
        if (dbeta) *dbeta = to_beta;
    }
    for (int64_t t = L - 1; t >= 0; t--) {
        double *dg = row_out(&p->grad.g, c, t);
        end += dG[t];
        whole += end;
        if (dg && p->decay == MN_DECAY_TOKEN) *dg = end;
    }
    return whole;
}

/* All chunks of a head of a sequence, there and back. Returns its sum for a decay per head. */
static double run_head(const head *hd, int64_t n, int64_t h) {
    const mn_delta_args *p = hd->p;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const int64_t n_chunks = mn_ceil_div(seq.length, CHUNK), KV = hd->K * hd->V;
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
        c->S = calloc((size_t)(2 * (KV + CHUNK * hd->V)), sizeof *c->S);
        c->D = c->S + KV, c->R = c->D + KV, c->dX = c->R + CHUNK * hd->V;
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

bool delta_is_rounded(const op_case *c) {
    return c->op == MN_OP_delta && c->decay != MN_DECAY_CHANNEL;
}

void delta_run_rounded(mn_sample *sample, const op_case *c, bool rounded) {
    mn_delta_args args = *(const mn_delta_args *)sample->args;
    if (mn_validate(MN_OP_delta, &args, true) != MN_OK) {
        check_fatal("%s: %s", op_case_text(c), mn_last_error());
    }
    const head hd = { &args, args.call.K, args.call.V, rounded };
    for (int64_t h = 0; h < args.call.H; h++) {
        double *dg = MN_ROW_OUT(double, args.grad.g, 0, 0, h), whole = 0.0;
        for (int64_t n = 0; n < mn_n_sequences(&args.call); n++) whole += run_head(&hd, n, h);
        if (dg && args.decay == MN_DECAY_HEAD) *dg = whole;
    }
}
