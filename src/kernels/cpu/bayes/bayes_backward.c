/* bayes_backward.c - gradients of the Bayesian Layer and its covariance pass, from the last chunk.
 *
 * In the terms of bayes_chunk.h, for one chunk with D and E the adjoints of P and M behind it, and
 * s' <= t tokens of it. From the end of the chunk and the outputs:
 *
 *   dz_s = (E eps_s - 2 D z_s) / sigma_s             dsigma_s = z_s'D z_s / sigma_s^2 - ...
 *   deps = E'z / sigma + (g / sigma)'dO              deps <- (I + c / sigma)^-T deps = dv
 *   d(g / sigma) = dO eps'                           d(c / sigma) = -deps eps' below the diagonal
 *
 * then token after token from the last, du = dz_t being complete once the later ones are done:
 *
 *   du += dgainvec / sigma + dkvar k                 dkvar += dsigma + dgain r2 / sigma^2
 *   d(c / sigma)_ts -= z_ts'du                       dz_ts += dg q + dc k - (c / sigma) du
 *   dk += dkvar u + sum_s dc z_ts + N_t du           dq += sum_s dg z_ts
 *   dla += sum_s dz_ts . z_ts                        dz_{t-1,s} = a_t' dz_ts
 *
 * With B = Phi'du, the rows that leave the chunk through P0 and M0 are products again:
 *
 *   d(Phi'k) = B P0 - deps M0'                       d(Phi'q) = scale dO M0' + 2 dqvar (Phi'q) P0
 *   D <- Phi'D Phi + (k~'B + B'k~) / 2 + dqvar q~'q~     E <- Phi'E + scale q~'dO - k~'deps
 *
 * where k~, q~ are the rows Phi'k, Phi'q. What Phi_t received counts for a_1 .. a_t alike.
 *
 * One item is one head of one sequence; its groups come one after the other and add to the
 * gradients that they share. P and M are kept in front of every chunk of a span, and in front of
 * every span. */
#include <string.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/riccati_args.h"
#include "kernels/cpu/bayes/bayes_chunk.h"
#include "kernels/cpu/simd/row.h"

enum { LEAST_SPAN = 32, L_MOST = MN_BAYES_CHUNK };

typedef struct work {
    mn_bayes_chunk c;
    int64_t span, square, rectangle;    // chunks of a span; floats of P and of M
    float *P, *M;                       // walking forward
    float *marks, *states;              // [P, M] in front of spans, and of the chunks of one span
    float *D, *E;
    float *history;                     // z_ts for s <= t, row t (t + 1) / 2 + s
    float *dz, *part;                   // [R] rows of tokens
    float *dkt, *dqt;                   // [R] adjoints of Phi'k, Phi'q; dkt first holds B
    float *left, *right;                // operands of the rank updates: 3 CHUNK rows [R]
    float *values;                      // 2 CHUNK rows [Vp]
    float *d_o, *deps;                  // [Vp]
    float *dk, *dq, *dla, *dtheta;      // [Kp]
    float *dnoise;                      // [3 Kp]
    float *sum_la, *sum_theta;          // [Kp] what Phi_t received, from the last token on
    float dg[L_MOST * L_MOST];          // of g_ts
    float dell[L_MOST * L_MOST];        // of c_ts / sigma_s
    float dsigma[L_MOST], dl2[L_MOST], dr2[L_MOST], weight[L_MOST];    // weight: scale^2 dqvar
} work;

static void place_tokens(work *w, mn_space *space) {
    const int64_t R = w->c.R, Kp = w->c.Kp, Vp = w->c.Vp;
    float **const wide[] = { &w->dz, &w->part, &w->dkt, &w->dqt };
    float **const narrow[] = { &w->dk, &w->dq, &w->dla, &w->dtheta };
    for (size_t i = 0; i < MN_COUNTOF(wide); i++) *wide[i] = MN_T(mn_take)(space, L_MOST, R);
    for (size_t i = 0; i < MN_COUNTOF(narrow); i++) *narrow[i] = MN_T(mn_take)(space, L_MOST, Kp);
    w->history = MN_T(mn_take)(space, L_MOST * (L_MOST + 1) / 2, R);
    w->left = MN_T(mn_take)(space, 3 * L_MOST, R);
    w->right = MN_T(mn_take)(space, 3 * L_MOST, R);
    w->values = MN_T(mn_take)(space, 2 * L_MOST, Vp);
    w->d_o = MN_T(mn_take)(space, L_MOST, Vp);
    w->deps = MN_T(mn_take)(space, L_MOST, Vp);
    w->dnoise = MN_T(mn_take)(space, 3, Kp);
    w->sum_la = MN_T(mn_take)(space, 1, Kp);
    w->sum_theta = MN_T(mn_take)(space, 1, Kp);
}

static void place(work *w, mn_space *space, const mn_bayes_args *p) {
    const int64_t tokens = mn_bayes_chunk_tokens(p->call.K);
    const int64_t chunks = mn_ceil_div(mn_longest_sequence(&p->call), tokens);
    MN_T(mn_bayes_place)(&w->c, space, p);
    w->c.reads_variance = p->q.data && p->cot.qvar.data;
    const int64_t R = w->c.R, Vp = w->c.Vp;
    for (w->span = LEAST_SPAN; w->span * w->span < chunks;) w->span++;
    const int64_t spans = mn_ceil_div(chunks, w->span), kept = mn_min(w->span, chunks);
    int64_t width;
    if (!space->ok || !mn_add_i64(&width, R, Vp) || !mn_mul_i64(&width, width, R)) {
        space->ok = false;
        return;
    }
    w->rectangle = R * Vp;
    w->square = R * R;
    w->P = MN_T(mn_take)(space, R, R);
    w->M = MN_T(mn_take)(space, R, Vp);
    w->D = MN_T(mn_take)(space, R, R);
    w->E = MN_T(mn_take)(space, R, Vp);
    w->marks = MN_T(mn_take)(space, spans, width);
    w->states = MN_T(mn_take)(space, kept, width);
    place_tokens(w, space);
}

/* Shared: per sequence and head, the trace that becomes dp0. */
bool MN_T(mn_bayes_backward_plan)(const void *args, mn_plan *plan) {
    const mn_bayes_args *p = args;
    const int64_t heads = mn_n_sequences(&p->call) * p->call.H;
    mn_space space = { .ok = true };
    work w;
    place(&w, &space, p);
    plan->n_phases = p->grad.p0.data ? 2 : 1;
    plan->items[0] = heads;
    plan->items[1] = p->call.H;
    plan->scratch_bytes = space.used * sizeof(float);
    return space.ok && mn_mul_size(&plan->shared_bytes, (size_t)heads, sizeof(float));
}

static void load_chunk(work *w, const mn_sequence *seq, int64_t chunk) {
    const int64_t tokens = mn_bayes_chunk_tokens(w->c.p->call.K), start = chunk * tokens;
    MN_T(mn_bayes_load)(&w->c, seq->t0 + start, mn_min(tokens, seq->length - start));
}

static void walk(work *w, const mn_sequence *seq, int64_t chunk) {
    load_chunk(w, seq, chunk);
    MN_T(mn_bayes_gains)(&w->c, w->P);
    if (w->c.columns) MN_T(mn_bayes_residuals)(&w->c, w->M);
    MN_T(mn_bayes_advance)(&w->c, w->P, w->M);
}

static void keep(float *to, const work *w) {
    memcpy(to, w->P, (size_t)w->square * sizeof *to);
    memcpy(to + w->square, w->M, (size_t)w->rectangle * sizeof *to);
}

static void restore(work *w, const float *from) {
    memcpy(w->P, from, (size_t)w->square * sizeof *from);
    memcpy(w->M, from + w->square, (size_t)w->rectangle * sizeof *from);
}

static void scale_row(float *y, const float *x, float factor, int64_t n) {
    const vf f = vf_set1(factor);
    for (int64_t i = 0; i < n; i += MN_VW) vf_store(y + i, vf_mul(f, vf_load(x + i)));
}

/* y += factor x */
static void add_row(float *y, const float *x, float factor, int64_t n) {
    const vf f = vf_set1(factor);
    for (int64_t i = 0; i < n; i += MN_VW) {
        vf_store(y + i, vf_fma(f, vf_load(x + i), vf_load(y + i)));
    }
}

static float *history_row(const work *w, int64_t t, int64_t s) {
    return w->history + (t * (t + 1) / 2 + s) * w->c.R;
}

static void fill_history(work *w) {
    const mn_bayes_chunk *c = &w->c;
    for (int64_t t = 0; t < c->L; t++) {
        for (int64_t s = 0; s < t; s++) {
            mn_bayes_turn(history_row(w, t, s), c->a + t * c->R, history_row(w, t - 1, s), c->Kp,
                          c->turns, false);
        }
        memcpy(history_row(w, t, t), c->u + t * c->R, (size_t)c->R * sizeof(float));
    }
}

/* dz and dsigma from P behind the chunk; the process noise's share of D */
static void leave_covariance(work *w) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t Kp = c->Kp, R = c->R;
    MN_T(mn_gemm)(&(mn_gemm_args){ .c = w->part, .c_row = R, .a = c->z, .a_row = R, .a_col = 1,
                                   .b = w->D, .b_row = R, .M = c->L, .N = R, .K = R,
                                   .alpha = 1.0f });
    for (int64_t s = 0; s < c->L; s++) {
        const float factor = 1.0f / c->sigma[s];
        w->dsigma[s] = factor * factor * vf_dot_whole(c->z + s * R, w->part + s * R, R);
        scale_row(w->dz + s * R, w->part + s * R, -2.0f * factor, R);
    }
    for (int64_t i = 0; i < Kp; i++) {
        w->dnoise[i] = w->D[i * (R + 1)];
        if (!c->turns) continue;
        w->dnoise[Kp + i] = 2.0f * w->D[(Kp + i) * R + i];
        w->dnoise[2 * Kp + i] = w->D[(Kp + i) * (R + 1)];
    }
}

/* dz, dsigma and deps from M behind the chunk */
static void leave_mean(work *w) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t R = c->R, Vp = c->Vp;
    MN_T(mn_gemm_nt)(&(mn_gemm_args){ .c = w->part, .c_row = R, .a = c->eps, .a_row = Vp,
                                      .a_col = 1, .b = w->E, .b_row = Vp, .M = c->L, .N = R,
                                      .K = Vp, .alpha = 1.0f });
    MN_T(mn_gemm)(&(mn_gemm_args){ .c = w->deps, .c_row = Vp, .a = c->z, .a_row = R, .a_col = 1,
                                   .b = w->E, .b_row = Vp, .M = c->L, .N = Vp, .K = R,
                                   .alpha = 1.0f });
    for (int64_t s = 0; s < c->L; s++) {
        const float factor = 1.0f / c->sigma[s];
        w->dsigma[s] -= factor * factor * vf_dot_whole(c->z + s * R, w->part + s * R, R);
        add_row(w->dz + s * R, w->part + s * R, factor, R);
        scale_row(w->deps + s * Vp, w->deps + s * Vp, factor, Vp);
    }
}

/* deps and dg from o; dg is that of g / sigma for a moment, and scale counts once */
static void leave_reads(work *w) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t Vp = c->Vp, L = c->L;
    const float scale = (float)c->p->scale;
    MN_T(mn_bayes_load_values)(w->d_o, c, c->p->cot.o);
    MN_T(mn_gemm_nt)(&(mn_gemm_args){ .c = w->dg, .c_row = L_MOST, .a = w->d_o, .a_row = Vp,
                                      .a_col = 1, .b = c->eps, .b_row = Vp, .M = L, .N = L, .K = Vp,
                                      .alpha = scale });
    MN_T(mn_gemm)(&(mn_gemm_args){ .c = w->deps, .c_row = Vp, .a = c->g_sigma, .a_row = 1,
                                   .a_col = L_MOST, .b = w->d_o, .b_row = Vp, .M = L, .N = Vp,
                                   .K = L, .alpha = scale, .base = MN_GEMM_ADD,
                                   .shape = MN_GEMM_A_UPPER });
    for (int64_t t = 0; t < L; t++) {
        for (int64_t s = 0; s <= t; s++) {
            float *dg = &w->dg[t * L_MOST + s];
            *dg /= c->sigma[s];
            w->dsigma[s] -= *dg * c->g_sigma[t * L_MOST + s];
        }
    }
}

/* dv = deps once the triangular system is undone; d(c / sigma) */
static void leave_residuals(work *w) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t Vp = c->Vp, L = c->L;
    for (int64_t t = L - 1; t > 0; t--) {
        for (int64_t s = 0; s < t; s++) {
            add_row(w->deps + s * Vp, w->deps + t * Vp, -c->ell[t * L_MOST + s], Vp);
        }
    }
    MN_T(mn_gemm_nt)(&(mn_gemm_args){ .c = w->dell, .c_row = L_MOST, .a = w->deps, .a_row = Vp,
                                      .a_col = 1, .b = c->eps, .b_row = Vp, .M = L, .N = L, .K = Vp,
                                      .alpha = -1.0f });
    for (int64_t t = 0; t < L; t++) {
        float *dv = MN_ROW_OUT(float, c->p->grad.v, c->b, c->t0 + t, c->h);
        if (dv) memcpy(dv + c->j0, w->deps + t * Vp, (size_t)c->columns * sizeof *dv);
    }
}

/* dg and dsigma from qvar, and what N_t has to do with it */
static void leave_variances(work *w) {
    mn_bayes_chunk *c = &w->c;
    const float square = (float)(c->p->scale * c->p->scale);
    for (int64_t t = 0; t < c->L; t++) {
        const float *dqvar = MN_ROW(float, c->p->cot.qvar, c->b, c->t0 + t, c->h);
        w->weight[t] = c->reads_variance ? square * dqvar[c->g] : 0.0f;
        for (int64_t s = 0; s <= t && c->reads_variance; s++) {
            const float g_sigma = c->g_sigma[t * L_MOST + s];
            w->dg[t * L_MOST + s] -= 2.0f * w->weight[t] * g_sigma;
            w->dsigma[s] += w->weight[t] * g_sigma * g_sigma;
        }
    }
}

/* du of token t from its own outputs; dr2. The row is complete when this returns. */
static void own_outputs(work *w, int64_t t) {
    mn_bayes_chunk *c = &w->c;
    const mn_bayes_args *p = c->p;
    const int64_t Kp = c->Kp, K = p->call.K, at = c->t0 + t;
    const float *cot_gain = MN_ROW(float, p->cot.gain, c->b, at, c->h);
    const float *cot_kvar = MN_ROW(float, p->cot.kvar, c->b, at, c->h);
    const float *cot_gainvec = MN_ROW(float, p->cot.gainvec, c->b, at, c->h);
    const float *u = c->u + t * c->R, factor = 1.0f / c->sigma[t], dg = w->dg[t * L_MOST + t];
    float *du = w->dz + t * c->R, *x = w->part;
    if (cot_gainvec) {
        const int64_t step = c->turns ? 2 : 1;
        memset(x, 0, (size_t)c->R * sizeof *x);
        for (int64_t i = 0; i < K; i++) {
            const float *pair = cot_gainvec + (c->g * K + i) * step;
            x[i] = pair[0];
            if (c->turns) x[Kp + i] = pair[1];
        }
        w->dsigma[t] -= factor * factor * vf_dot_whole(x, u, c->R);
        add_row(du, x, factor, c->R);
    }
    const float dgain = cot_gain ? cot_gain[c->g] * factor : 0.0f;
    const float direct = cot_kvar ? cot_kvar[c->g] : 0.0f;
    const float dkvar = w->dsigma[t] + dgain * (c->r2[t] * factor) + direct;
    w->dr2[t] = w->dsigma[t] - dgain * (c->kvar[t] * factor);
    add_row(du, c->q + t * Kp, dg, Kp);
    add_row(du, c->k + t * Kp, dkvar, Kp);
    add_row(w->dq + t * Kp, u, dg, Kp);
    add_row(w->dk + t * Kp, u, dkvar, Kp);
}

/* d(c / sigma) of token t is complete with -z_ts'du; dc, and dsigma of the tokens before */
static void own_factor(work *w, float *dc, int64_t t) {
    const mn_bayes_chunk *c = &w->c;
    const float *du = w->dz + t * c->R;
    for (int64_t s = 0; s < t; s++) {
        const float dell = w->dell[t * L_MOST + s] - vf_dot_whole(history_row(w, t, s), du, c->R);
        dc[s] = dell / c->sigma[s];
        w->dsigma[s] -= dc[s] * c->ell[t * L_MOST + s];
    }
}

/* dz of the tokens before t, taken back across a_t; dk, dq, dla and dtheta of t on the way */
static void earlier_rows(work *w, const float *dc, int64_t t) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t Kp = c->Kp, R = c->R;
    const float *a = c->a + t * R, *dg = w->dg + t * L_MOST, *ell = c->ell + t * L_MOST;
    const float *du = w->dz + t * R, *row = history_row(w, t, 0);
    for (int64_t i = 0; i < Kp; i += MN_VW) {
        const vf k = vf_load(c->k + t * Kp + i), q = vf_load(c->q + t * Kp + i);
        const vf ar = vf_load(a + i), ur = vf_load(du + i);
        vf dk = vf_load(w->dk + t * Kp + i), dq = vf_load(w->dq + t * Kp + i);
        vf dla = vf_zero(), dtheta = vf_zero();
        for (int64_t s = 0; s < t; s++) {
            float *dz = w->dz + s * R + i;
            const vf to_k = vf_set1(dc[s]), to_q = vf_set1(dg[s]), l = vf_set1(ell[s]);
            const vf z = vf_load(row + s * R + i);
            vf x = vf_fnma(l, ur, vf_fma(to_q, q, vf_fma(to_k, k, vf_load(dz))));
            dk = vf_fma(to_k, z, dk);
            dq = vf_fma(to_q, z, dq);
            dla = vf_fma(x, z, dla);
            vf back = vf_mul(ar, x);
            if (c->turns) {
                const vf ai = vf_load(a + Kp + i), zi = vf_load(row + s * R + Kp + i);
                const vf xi = vf_fnma(l, vf_load(du + Kp + i), vf_load(dz + Kp));
                dla = vf_fma(xi, zi, dla);
                dtheta = vf_fma(xi, z, vf_fnma(x, zi, dtheta));
                back = vf_fma(ai, xi, back);
                vf_store(dz + Kp, vf_fnma(ai, x, vf_mul(ar, xi)));
            }
            vf_store(dz, back);
        }
        vf_store(w->dk + t * Kp + i, dk);
        vf_store(w->dq + t * Kp + i, dq);
        vf_store(w->dla + t * Kp + i, dla);
        vf_store(w->dtheta + t * Kp + i, dtheta);
    }
}

/* N_t: its use in u and qvar of token t, then back across the token to N_{t-1}. In terms of the
 * matrix X = a_t N_{t-1} a_t', dla is 2 <dN, X> and dtheta <dN, JX + XJ'>. */
static void own_noise_pair(work *w, int64_t t, int64_t i) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t Kp = c->Kp;
    const float *a = c->a + t * c->R, *before = c->noise + (t - 1) * c->noise_width;
    const vf ar = vf_load(a + i), ai = vf_load(a + Kp + i), two = vf_set1(2.0f);
    const vf rr = t ? vf_load(before + i) : vf_zero();
    const vf ri = t ? vf_load(before + Kp + i) : vf_zero();
    const vf ii = t ? vf_load(before + 2 * Kp + i) : vf_zero();
    const vf d_rr = vf_load(w->dnoise + i), d_ri = vf_load(w->dnoise + Kp + i);
    const vf d_ii = vf_load(w->dnoise + 2 * Kp + i);
    const vf cc = vf_mul(ar, ar), cs = vf_mul(ar, ai), ss = vf_mul(ai, ai);
    const vf cross = vf_mul(two, vf_mul(cs, ri)), spread = vf_sub(cc, ss);
    const vf x_rr = vf_fma(cc, rr, vf_fma(ss, ii, vf_neg(cross)));
    const vf x_ri = vf_fma(cs, vf_sub(rr, ii), vf_mul(spread, ri));
    const vf x_ii = vf_fma(ss, rr, vf_fma(cc, ii, cross));
    const vf along = vf_fma(d_rr, x_rr, vf_fma(d_ri, x_ri, vf_mul(d_ii, x_ii)));
    const vf twice = vf_mul(two, vf_sub(d_ii, d_rr));
    const vf across = vf_fma(twice, x_ri, vf_mul(d_ri, vf_sub(x_rr, x_ii)));
    vf_store(w->dla + t * Kp + i, vf_fma(two, along, vf_load(w->dla + t * Kp + i)));
    vf_store(w->dtheta + t * Kp + i, vf_add(across, vf_load(w->dtheta + t * Kp + i)));
    vf_store(w->dnoise + i, vf_fma(cc, d_rr, vf_fma(cs, d_ri, vf_mul(ss, d_ii))));
    vf_store(w->dnoise + Kp + i,
             vf_fma(cs, twice, vf_mul(spread, d_ri)));
    vf_store(w->dnoise + 2 * Kp + i, vf_fma(ss, d_rr, vf_fnma(cs, d_ri, vf_mul(cc, d_ii))));
}

static void own_noise(work *w, int64_t t) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t Kp = c->Kp;
    const float *noise = c->noise + t * c->noise_width, *du = w->dz + t * c->R;
    const vf weight = vf_set1(w->weight[t]), two = vf_set1(2.0f);
    vf dl2 = vf_zero();
    for (int64_t i = 0; i < Kp; i += MN_VW) {
        const vf k = vf_load(c->k + t * Kp + i), q = vf_load(c->q + t * Kp + i);
        const vf ur = vf_load(du + i), rr = vf_load(noise + i), read = vf_mul(weight, q);
        float *dk = w->dk + t * Kp + i, *dq = w->dq + t * Kp + i, *dnoise = w->dnoise + i;
        vf_store(dk, vf_fma(rr, ur, vf_load(dk)));
        vf_store(dq, vf_fma(vf_mul(two, rr), read, vf_load(dq)));
        const vf d_rr = vf_fma(ur, k, vf_fma(read, q, vf_load(dnoise)));
        vf_store(dnoise, d_rr);
        dl2 = vf_add(dl2, vf_keep_first(d_rr, vf_lanes(c->p->call.K - i)));
        if (c->turns) {
            const vf ui = vf_load(du + Kp + i);
            vf_store(dk, vf_fma(vf_load(noise + Kp + i), ui, vf_load(dk)));
            vf_store(dnoise + Kp, vf_fma(ui, k, vf_load(dnoise + Kp)));
            own_noise_pair(w, t, i);
            continue;
        }
        const vf ar = vf_load(c->a + t * c->R + i), back = vf_mul(vf_mul(ar, ar), d_rr);
        const vf before = t ? vf_load(noise - c->noise_width + i) : vf_zero();
        float *dla = w->dla + t * Kp + i;
        vf_store(dla, vf_fma(vf_mul(two, back), before, vf_load(dla)));
        vf_store(dnoise, back);
    }
    w->dl2[t] = vf_sum(dl2);
}

/* D <- Phi'D Phi; what Phi received from P behind the chunk: 2 rowsum(D . P) and the same turned */
static void enter_covariance(work *w, const float *P) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t Kp = c->Kp, R = c->R;
    const float *phi = c->phi + (c->L - 1) * R;
    for (int64_t r = 0; r < R; r++) {
        mn_bayes_turn(w->D + r * R, phi, w->D + r * R, Kp, c->turns, true);
    }
    for (int64_t i = 0; i < Kp; i++) {
        float *re = w->D + i * R, *im = w->D + (Kp + i) * R;
        const float *P_re = P + i * R, *P_im = P + (Kp + i) * R;
        const vf pr = vf_set1(phi[i]), pi = c->turns ? vf_set1(phi[Kp + i]) : vf_zero();
        vf along = vf_zero(), across = vf_zero();
        for (int64_t j = 0; j < R; j += MN_VW) {
            const vf x = vf_load(re + j), y = c->turns ? vf_load(im + j) : vf_zero();
            const vf d_re = vf_fma(pi, y, vf_mul(pr, x)), p_re = vf_load(P_re + j);
            vf_store(re + j, d_re);
            along = vf_fma(d_re, p_re, along);
            if (!c->turns) continue;
            const vf d_im = vf_fnma(pi, x, vf_mul(pr, y)), p_im = vf_load(P_im + j);
            vf_store(im + j, d_im);
            along = vf_fma(d_im, p_im, along);
            across = vf_fma(d_im, p_re, vf_fnma(d_re, p_im, across));
        }
        w->sum_la[i] = 2.0f * vf_sum(along);
        w->sum_theta[i] = 2.0f * vf_sum(across);
    }
}

/* The same for E and M */
static void enter_mean(work *w, const float *M) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t Kp = c->Kp, Vp = c->Vp;
    const float *phi = c->phi + (c->L - 1) * c->R;
    for (int64_t i = 0; i < Kp; i++) {
        float *re = w->E + i * Vp, *im = w->E + (Kp + i) * Vp;
        const float *M_re = M + i * Vp, *M_im = M + (Kp + i) * Vp;
        const vf pr = vf_set1(phi[i]), pi = c->turns ? vf_set1(phi[Kp + i]) : vf_zero();
        vf along = vf_zero(), across = vf_zero();
        for (int64_t j = 0; j < Vp; j += MN_VW) {
            const vf x = vf_load(re + j), y = c->turns ? vf_load(im + j) : vf_zero();
            const vf d_re = vf_fma(pi, y, vf_mul(pr, x)), m_re = vf_load(M_re + j);
            vf_store(re + j, d_re);
            along = vf_fma(d_re, m_re, along);
            if (!c->turns) continue;
            const vf d_im = vf_fnma(pi, x, vf_mul(pr, y)), m_im = vf_load(M_im + j);
            vf_store(im + j, d_im);
            along = vf_fma(d_im, m_im, along);
            across = vf_fma(d_im, m_re, vf_fnma(d_re, m_im, across));
        }
        w->sum_la[i] += vf_sum(along);
        w->sum_theta[i] += vf_sum(across);
    }
}

/* B = Phi'du in `right`, and the rank updates of D and E; d(Phi'k) and d(Phi'q) via P0 and M0 */
static void enter_products(work *w, const float *P, const float *M) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t R = c->R, Vp = c->Vp, L = c->L, rows = (c->reads_variance ? 3 : 2) * L;
    float *B = w->right, *half_k = w->left, *half_B = w->left + L * R;
    for (int64_t t = 0; t < L; t++) {
        mn_bayes_turn(B + t * R, c->phi + t * R, w->dz + t * R, c->Kp, c->turns, true);
        scale_row(half_k + t * R, c->kt + t * R, 0.5f, R);
        scale_row(half_B + t * R, B + t * R, 0.5f, R);
        memcpy(w->right + (L + t) * R, c->kt + t * R, (size_t)R * sizeof *B);
        if (!c->reads_variance) continue;
        scale_row(w->left + (2 * L + t) * R, c->qt + t * R, w->weight[t], R);
        memcpy(w->right + (2 * L + t) * R, c->qt + t * R, (size_t)R * sizeof *B);
    }
    MN_T(mn_gemm)(&(mn_gemm_args){ .c = w->dkt, .c_row = R, .a = B, .a_row = R, .a_col = 1, .b = P,
                                   .b_row = R, .M = L, .N = R, .K = R, .alpha = 1.0f });
    MN_T(mn_gemm)(&(mn_gemm_args){ .c = w->D, .c_row = R, .a = w->left, .a_row = 1, .a_col = R,
                                   .b = w->right, .b_row = R, .M = R, .N = R, .K = rows,
                                   .alpha = 1.0f, .base = MN_GEMM_ADD, .shape = MN_GEMM_C_LOWER });
    MN_T(mn_bayes_mirror)(w->D, R);
    memset(w->dqt, 0, (size_t)(L * R) * sizeof *w->dqt);
    for (int64_t t = 0; t < L && c->reads_variance; t++) {
        scale_row(w->dqt + t * R, c->qP + t * R, 2.0f * w->weight[t], R);
    }
    if (!c->columns) return;
    mn_gemm_args mean = { .c = w->dkt, .c_row = R, .a = w->deps, .a_row = Vp, .a_col = 1, .b = M,
                          .b_row = Vp, .M = L, .N = R, .K = Vp, .alpha = -1.0f,
                          .base = MN_GEMM_ADD };
    MN_T(mn_gemm_nt)(&mean);
    mean.c = w->dqt;
    mean.a = w->d_o;
    mean.alpha = (float)c->p->scale;
    MN_T(mn_gemm_nt)(&mean);
    for (int64_t t = 0; t < L; t++) {
        memcpy(w->left + t * R, c->kt + t * R, (size_t)R * sizeof *B);
        memcpy(w->left + (L + t) * R, c->qt + t * R, (size_t)R * sizeof *B);
        scale_row(w->values + t * Vp, w->deps + t * Vp, -1.0f, Vp);
        scale_row(w->values + (L + t) * Vp, w->d_o + t * Vp, (float)c->p->scale, Vp);
    }
    MN_T(mn_gemm)(&(mn_gemm_args){ .c = w->E, .c_row = Vp, .a = w->left, .a_row = 1, .a_col = R,
                                   .b = w->values, .b_row = Vp, .M = R, .N = Vp, .K = 2 * L,
                                   .alpha = 1.0f, .base = MN_GEMM_ADD });
}

/* dk and dq through Phi'k and Phi'q; what Phi_t received, for all tokens up to t */
static void enter_rows(work *w) {
    const mn_bayes_chunk *c = &w->c;
    const int64_t Kp = c->Kp, R = c->R;
    for (int64_t t = c->L - 1; t >= 0; t--) {
        const float *phi = c->phi + t * R, *B = w->right + t * R, *kP = c->kP + t * R;
        const float *kt = c->kt + t * R, *qt = c->qt + t * R;
        const float *dkt = w->dkt + t * R, *dqt = w->dqt + t * R;
        for (int64_t i = 0; i < Kp; i += MN_VW) {
            const int64_t at = t * Kp + i;
            const vf pr = vf_load(phi + i), x = vf_load(dkt + i), y = vf_load(dqt + i);
            vf dk = vf_fma(pr, x, vf_load(w->dk + at)), dq = vf_fma(pr, y, vf_load(w->dq + at));
            vf la = vf_fma(vf_load(B + i), vf_load(kP + i), vf_load(w->sum_la + i));
            la = vf_fma(x, vf_load(kt + i), vf_fma(y, vf_load(qt + i), la));
            if (c->turns) {
                const int64_t j = Kp + i;
                const vf pi = vf_load(phi + j), xi = vf_load(dkt + j), yi = vf_load(dqt + j);
                vf theta = vf_load(w->sum_theta + i);
                dk = vf_fnma(pi, xi, dk);
                dq = vf_fnma(pi, yi, dq);
                la = vf_fma(vf_load(B + j), vf_load(kP + j), la);
                la = vf_fma(xi, vf_load(kt + j), vf_fma(yi, vf_load(qt + j), la));
                theta = vf_fma(vf_load(B + j), vf_load(kP + i), theta);
                theta = vf_fnma(vf_load(B + i), vf_load(kP + j), theta);
                theta = vf_fnma(xi, vf_load(kt + i), vf_fma(x, vf_load(kt + j), theta));
                theta = vf_fnma(yi, vf_load(qt + i), vf_fma(y, vf_load(qt + j), theta));
                vf_store(w->sum_theta + i, theta);
                vf_store(w->dtheta + at, vf_add(theta, vf_load(w->dtheta + at)));
            }
            vf_store(w->dk + at, dk);
            vf_store(w->dq + at, dq);
            vf_store(w->sum_la + i, la);
            vf_store(w->dla + at, vf_add(la, vf_load(w->dla + at)));
        }
    }
}

/* Writes, or from the second group on adds, a row of a gradient. */
static void write_row(mn_out view, const mn_bayes_chunk *c, const float *from, int64_t t) {
    float *to = MN_ROW_OUT(float, view, c->b, c->t0 + t, c->h);
    const int64_t K = c->p->call.K;
    for (int64_t i = 0; to && i < K; i += MN_VW) {
        const int lanes = vf_lanes(K - i);
        const vf x = vf_load(from + t * c->Kp + i);
        vf_store_n(to + i, c->g ? vf_add(vf_load_n(to + i, lanes), x) : x, lanes);
    }
}

static void write_gradients(const work *w) {
    const mn_bayes_chunk *c = &w->c;
    const mn_bayes_args *p = c->p;
    for (int64_t t = 0; t < c->L; t++) {
        float *dl2 = MN_ROW_OUT(float, p->grad.l2, c->b, c->t0 + t, c->h);
        float *dr2 = MN_ROW_OUT(float, p->grad.r2, c->b, c->t0 + t, c->h);
        write_row(p->grad.q, c, w->dq, t);
        write_row(p->grad.k, c, w->dk, t);
        write_row(p->grad.la, c, w->dla, t);
        write_row(p->grad.theta, c, w->dtheta, t);
        if (dl2) *dl2 = c->g ? *dl2 + w->dl2[t] : w->dl2[t];
        if (dr2) dr2[c->g] = w->dr2[t];
    }
}

/* One chunk, from P and M in front of it; D and E go from behind it to there. */
static void chunk_backward(work *w, const mn_sequence *seq, int64_t chunk, const float *state) {
    mn_bayes_chunk *c = &w->c;
    const float *P = state, *M = state + w->square;
    const size_t rows = (size_t)(L_MOST * c->Kp) * sizeof(float);
    float dc[L_MOST];
    load_chunk(w, seq, chunk);
    MN_T(mn_bayes_gains)(c, P);
    fill_history(w);
    memset(w->dk, 0, rows);
    memset(w->dq, 0, rows);
    memset(w->dg, 0, sizeof w->dg);
    memset(w->dell, 0, sizeof w->dell);
    leave_covariance(w);
    if (c->columns) {
        MN_T(mn_bayes_residuals)(c, M);
        leave_mean(w);
        leave_reads(w);
        leave_residuals(w);
    }
    leave_variances(w);
    for (int64_t t = c->L - 1; t >= 0; t--) {
        own_outputs(w, t);
        own_factor(w, dc, t);
        earlier_rows(w, dc, t);
        own_noise(w, t);
    }
    enter_covariance(w, P);
    if (c->columns) enter_mean(w, M);
    enter_products(w, P, M);
    enter_rows(w);
    write_gradients(w);
}

/* D and E start from the cotangents of the final states; only dP's symmetric part counts. */
static void load_cotangents(work *w) {
    const int64_t R = w->c.R;
    MN_T(mn_bayes_load_square)(w->D, &w->c, w->c.p->cot.P);
    MN_T(mn_bayes_load_columns)(w->E, &w->c, w->c.p->cot.M);
    for (int64_t i = 0; i < R; i++) {
        for (int64_t j = 0; j < i; j++) {
            float *low = w->D + i * R + j, *high = w->D + j * R + i;
            *low = *high = 0.5f * (*low + *high);
        }
    }
}

/* All chunks of one group, backwards. */
static void group_backward(work *w, const mn_sequence *seq) {
    const int64_t tokens = mn_bayes_chunk_tokens(w->c.p->call.K), width = w->square + w->rectangle;
    const int64_t chunks = mn_ceil_div(seq->length, tokens);
    MN_T(mn_bayes_first)(w->P, w->M, &w->c);
    for (int64_t i = 0; i < chunks; i++) {
        if (i % w->span == 0) keep(w->marks + i / w->span * width, w);
        if (i < (chunks - 1) / w->span * w->span) walk(w, seq, i);
    }
    load_cotangents(w);
    for (int64_t first = (chunks - 1) / w->span * w->span; first >= 0 && chunks; first -= w->span) {
        const int64_t end = mn_min(chunks, first + w->span);
        restore(w, w->marks + first / w->span * width);
        for (int64_t i = first; i < end; i++) {
            keep(w->states + (i - first) * width, w);
            if (i + 1 < end) walk(w, seq, i);
        }
        for (int64_t i = end - 1; i >= first; i--) {
            chunk_backward(w, seq, i, w->states + (i - first) * width);
        }
    }
}

void MN_T(mn_bayes_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    const mn_bayes_args *p = args;
    const int64_t H = p->call.H;
    float *traces = shared;
    if (phase == 1) {
        float sum = 0.0f;
        for (int64_t n = 0; n < mn_n_sequences(&p->call); n++) sum += traces[n * H + item];
        *MN_ROW_OUT(float, p->grad.p0, 0, 0, item) = sum;
        return;
    }
    mn_space space = { .memory = scratch, .ok = true };
    work w;
    place(&w, &space, p);
    const mn_sequence seq = mn_sequence_at(&p->call, item / H);
    float trace = 0.0f;
    for (int64_t g = 0; g < p->call.G; g++) {
        MN_T(mn_bayes_select)(&w.c, item / H, item % H, g);
        group_backward(&w, &seq);
        MN_T(mn_bayes_store_square)(p->grad.P0, &w.c, w.D);
        MN_T(mn_bayes_store_columns)(p->grad.M0, &w.c, w.E);
        for (int64_t r = 0; r < w.c.R; r++) {
            if (r % w.c.Kp < p->call.K) trace += w.D[r * (w.c.R + 1)];
        }
    }
    traces[item] = p->P0.data ? 0.0f : trace;
}

bool MN_T(mn_riccati_backward_plan)(const void *args, mn_plan *plan) {
    const mn_bayes_args p = mn_riccati_as_bayes(args);
    return MN_T(mn_bayes_backward_plan)(&p, plan);
}

void MN_T(mn_riccati_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch) {
    const mn_bayes_args p = mn_riccati_as_bayes(args);
    MN_T(mn_bayes_backward_run)(&p, phase, item, shared, scratch);
}
