/* bayes_forward.c - the Bayesian Layer and its covariance pass, chunk after chunk.
 *
 * One item is one noise group of one head of one sequence: groups share keys but neither
 * covariances nor value columns. The covariance pass alone is the layer with no value columns. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/riccati_args.h"
#include "kernels/cpu/bayes/bayes_chunk.h"
#include "kernels/cpu/simd/row.h"

typedef struct work {
    mn_bayes_chunk c;
    float *P, *M;
} work;

static void place(work *w, mn_space *space, const mn_bayes_args *p) {
    MN_T(mn_bayes_place)(&w->c, space, p);
    w->P = MN_T(mn_take)(space, w->c.R, w->c.R);
    w->M = MN_T(mn_take)(space, w->c.R, w->c.Vp);
}

bool MN_T(mn_bayes_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *call = args;
    mn_space space = { .ok = true };
    work w;
    place(&w, &space, args);
    plan->n_phases = 1;
    plan->scratch_bytes = space.used * sizeof(float);
    return space.ok && mn_mul_i64(&plan->items[0], mn_n_sequences(call) * call->H, call->G);
}

/* gainvec of one token in the caller's order of rows */
static void write_gainvec(float *to, const mn_bayes_chunk *c, int64_t t) {
    const int64_t K = c->p->call.K;
    const float *u = c->u + t * c->R, factor = 1.0f / c->sigma[t];
    if (c->turns) {
        for (int64_t i = 0; i < K; i++) {
            to[2 * i] = factor * u[i];
            to[2 * i + 1] = factor * u[c->Kp + i];
        }
        return;
    }
    for (int64_t i = 0; i < K; i += MN_VW) {
        const int lanes = vf_lanes(K - i);
        vf_store_row(to + i, vf_mul(vf_set1(factor), vf_load(u + i)), lanes);
    }
}

static void write_gains(const mn_bayes_chunk *c) {
    const mn_bayes_args *p = c->p;
    const float square = (float)(p->scale * p->scale);
    const int64_t n_rows = c->turns ? 2 * p->call.K : p->call.K;
    for (int64_t t = 0; t < c->L; t++) {
        const int64_t at = c->t0 + t;
        float *gain = MN_ROW_OUT(float, p->gain, c->b, at, c->h);
        float *gainvec = MN_ROW_OUT(float, p->gainvec, c->b, at, c->h);
        float *kvar = MN_ROW_OUT(float, p->kvar, c->b, at, c->h);
        float *qvar = MN_ROW_OUT(float, p->qvar, c->b, at, c->h);
        if (gain) gain[c->g] = c->kvar[t] / c->sigma[t];
        if (kvar) kvar[c->g] = c->kvar[t];
        if (qvar) qvar[c->g] = c->reads_variance ? square * c->qvar[t] : 0.0f;
        if (gainvec) write_gainvec(gainvec + c->g * n_rows, c, t);
    }
}

/* o = scale (Phi'q)'M0 + scale sum_s g_ts / sigma_s eps_s */
static void write_reads(const mn_bayes_chunk *c, const float *M) {
    const mn_bayes_args *p = c->p;
    const int64_t Vp = c->Vp;
    if (!p->o.data) return;
    mn_gemm_args product = { .c = c->out, .c_row = Vp, .a = c->qt, .a_row = c->R, .a_col = 1,
                             .b = M, .b_row = Vp, .M = c->L, .N = Vp, .K = c->R,
                             .alpha = (float)p->scale };
    MN_T(mn_gemm)(&product);
    product.a = c->g_sigma;
    product.a_row = MN_BAYES_CHUNK;
    product.b = c->eps;
    product.K = c->L;
    product.base = MN_GEMM_ADD;
    product.shape = MN_GEMM_A_LOWER;
    MN_T(mn_gemm)(&product);
    for (int64_t t = 0; t < c->L; t++) {
        float *o = MN_ROW_OUT(float, p->o, c->b, c->t0 + t, c->h) + c->j0;
        for (int64_t j = 0; j < c->columns; j += MN_VW) {
            vf_store_row(o + j, vf_load(c->out + t * Vp + j), vf_lanes(c->columns - j));
        }
    }
}

void MN_T(mn_bayes_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    (void)phase, (void)shared;
    const mn_bayes_args *p = args;
    const int64_t G = p->call.G, H = p->call.H;
    mn_space space = { .memory = scratch, .ok = true };
    work w;
    place(&w, &space, p);
    MN_T(mn_bayes_select)(&w.c, item / G / H, item / G % H, item % G);
    MN_T(mn_bayes_first)(w.P, w.M, &w.c);
    const mn_sequence seq = mn_sequence_at(&p->call, w.c.n);
    const int64_t end = seq.t0 + seq.length, tokens = mn_bayes_chunk_tokens(p->call.K);
    for (int64_t t = seq.t0; t < end; t += tokens) {
        MN_T(mn_bayes_load)(&w.c, t, mn_min(tokens, end - t));
        MN_T(mn_bayes_gains)(&w.c, w.P);
        write_gains(&w.c);
        if (w.c.columns) {
            MN_T(mn_bayes_residuals)(&w.c, w.M);
            write_reads(&w.c, w.M);
        }
        MN_T(mn_bayes_advance)(&w.c, w.P, w.M);
    }
    MN_T(mn_bayes_store_square)(p->P, &w.c, w.P);
    MN_T(mn_bayes_store_columns)(p->M, &w.c, w.M);
}

bool MN_T(mn_riccati_forward_plan)(const void *args, mn_plan *plan) {
    const mn_bayes_args p = mn_riccati_as_bayes(args);
    return MN_T(mn_bayes_forward_plan)(&p, plan);
}

void MN_T(mn_riccati_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    const mn_bayes_args p = mn_riccati_as_bayes(args);
    MN_T(mn_bayes_forward_run)(&p, phase, item, shared, scratch);
}
