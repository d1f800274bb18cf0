/* bayes_step.c - one token of the Bayesian Layer on its states in place, for decoding.
 *
 * With diagonal dynamics: a sweep over P for u = Pbar k (and Pbar q), a sweep that writes it, and
 * one over the columns of M that reads them for both products and writes them back while they are
 * near. A call that does not hold its states, a rotation, and a token whose variance float32 would
 * lose (see bayes_chunk.h) take the chunk form, a chunk of one token. Sums and roundings follow
 * that form one by one, so that the bits are the same.
 *
 * One item is one noise group of one head of one sequence. */
#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/riccati_args.h"
#include "kernels/cpu/bayes/bayes_chunk.h"
#include "kernels/cpu/simd/row.h"

bool MN_T(mn_bayes_forward_plan)(const void *args, mn_plan *plan);
void MN_T(mn_bayes_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch);

enum { PANEL = 4 };    // vectors of a row in flight

/* One token; rows are padded to whole vectors with zeros. */
typedef struct step {
    const mn_bayes_args *p;
    int64_t n, h, g, K, Kp;
    float *a, *k, *q, *kt, *qt;    // exp la; a k, a q
    float *u, *y;                  // Pbar k; P0 a q
    float *w;                      // u / sqrt(sigma)
    float *diagonal;               // of P0
    float l2, r2, kvar, sigma, read;    // read: q'u
} step;

static void place(step *s, mn_space *space, const mn_bayes_args *p) {
    float **const rows[] = { &s->a, &s->k,  &s->q,  &s->kt,      &s->qt,
                             &s->u, &s->y, &s->w, &s->diagonal };
    *s = (step){ .p = p, .K = p->call.K, .Kp = mn_ceil_div(p->call.K, MN_VW) * MN_VW };
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) *rows[i] = MN_T(mn_take)(space, 1, s->Kp);
}

bool MN_T(mn_bayes_step_plan)(const void *args, mn_plan *plan) {
    mn_space space = { .ok = true };
    step s;
    if (!MN_T(mn_bayes_forward_plan)(args, plan)) return false;
    place(&s, &space, args);
    plan->scratch_bytes = (size_t)mn_max((int64_t)plan->scratch_bytes,
                                         (int64_t)(space.used * sizeof(float)));
    return space.ok;
}

static void load(step *s) {
    const mn_bayes_args *p = s->p;
    const float *la = MN_ROW(float, p->la, s->n, 0, s->h), *k = MN_ROW(float, p->k, s->n, 0, s->h);
    const float *q = MN_ROW(float, p->q, s->n, 0, s->h);
    s->l2 = *MN_ROW(float, p->l2, s->n, 0, s->h);
    s->r2 = MN_ROW(float, p->r2, s->n, 0, s->h)[s->g];
    for (int64_t i = 0; i < s->Kp; i += MN_VW) {
        const int lanes = vf_lanes(s->K - i);
        const vf a = vf_keep_first(vf_exp(vf_load_n(la + i, lanes)), lanes);
        const vf k_i = vf_load_n(k + i, lanes), q_i = q ? vf_load_n(q + i, lanes) : vf_zero();
        vf_store(s->a + i, a);
        vf_store(s->k + i, k_i);
        vf_store(s->q + i, q_i);
        vf_store(s->kt + i, vf_mul(a, k_i));
        vf_store(s->qt + i, vf_mul(a, q_i));
    }
}

/* u = P kt and y = P qt by the columns [j, j + PANEL vectors), rows read once for both */
static void panel_products(const step *s, const float *P, int64_t j) {
    vf u[PANEL], y[PANEL];
    int lanes[PANEL];
    MN_UNROLL
    for (int x = 0; x < PANEL; x++) {
        u[x] = y[x] = vf_zero();
        lanes[x] = vf_lanes(mn_max(0, s->K - j - x * MN_VW));
    }
    const bool whole = lanes[PANEL - 1] == MN_VW;
    for (int64_t i = 0; i < s->K; i++) {
        const vf k = vf_set1(s->kt[i]), q = vf_set1(s->qt[i]);
        const float *row = P + i * s->K + j;
        MN_UNROLL
        for (int x = 0; x < PANEL; x++) {
            if (!whole && lanes[x] == 0) break;
            const vf v = whole ? vf_load(row + x * MN_VW) : vf_load_row(row + x * MN_VW, lanes[x]);
            u[x] = vf_fma(k, v, u[x]);
            y[x] = vf_fma(q, v, y[x]);
        }
    }
    MN_UNROLL
    for (int x = 0; x < PANEL; x++) {
        if (lanes[x] == 0) break;
        vf_store(s->u + j + x * MN_VW, u[x]);
        vf_store(s->y + j + x * MN_VW, y[x]);
    }
}

/* u, sigma; false where float32 would lose the variance */
static bool gains(step *s, const float *P) {
    const vf l2 = vf_set1(s->l2);
    vf scale = vf_zero();
    for (int64_t j = 0; j < s->K; j += PANEL * MN_VW) panel_products(s, P, j);
    memset(s->diagonal, 0, (size_t)s->Kp * sizeof *s->diagonal);
    for (int64_t i = 0; i < s->K; i++) s->diagonal[i] = P[i * (s->K + 1)];
    for (int64_t i = 0; i < s->Kp; i += MN_VW) {
        const vf a = vf_load(s->a + i), k = vf_load(s->k + i);
        const vf u = vf_fma(l2, k, vf_mul(a, vf_load(s->u + i)));
        const vf prior = vf_fma(vf_mul(a, a), vf_load(s->diagonal + i), l2);
        vf_store(s->u + i, vf_add(u, vf_zero()));
        scale = vf_fma(vf_mul(k, k), prior, scale);
    }
    s->kvar = vf_dot_whole(s->k, s->u, s->Kp);
    s->sigma = s->r2 + s->kvar;
    s->read = vf_dot_whole(s->q, s->u, s->Kp);
    return mn_bayes_sound(s->kvar, s->r2, vf_sum(scale));
}

static float read_variance(const step *s) {
    const vf l2 = vf_set1(s->l2);
    vf noise = vf_zero();
    for (int64_t i = 0; i < s->Kp; i += MN_VW) {
        const vf q = vf_load(s->q + i);
        noise = vf_fma(vf_mul(q, q), l2, noise);
    }
    const float prior = vf_dot_whole(s->qt, s->y, s->Kp) + vf_sum(noise);
    const float variance = prior - s->read * (s->read / s->sigma);
    return variance < 0.0f ? 0.0f : variance;
}

static void write_gains(const step *s) {
    const mn_bayes_args *p = s->p;
    float *gain = MN_ROW_OUT(float, p->gain, s->n, 0, s->h);
    float *gainvec = MN_ROW_OUT(float, p->gainvec, s->n, 0, s->h);
    float *kvar = MN_ROW_OUT(float, p->kvar, s->n, 0, s->h);
    float *qvar = MN_ROW_OUT(float, p->qvar, s->n, 0, s->h);
    if (gain) gain[s->g] = s->kvar / s->sigma;
    if (kvar) kvar[s->g] = s->kvar;
    if (qvar) qvar[s->g] = p->q.data ? (float)(p->scale * p->scale) * read_variance(s) : 0.0f;
    const vf factor = vf_set1(1.0f / s->sigma);
    for (int64_t i = 0; gainvec && i < s->K; i += MN_VW) {
        const vf w = vf_mul(factor, vf_load(s->u + i));
        vf_store_row(gainvec + s->g * s->K + i, w, vf_lanes(s->K - i));
    }
}

/* to = A P A' + l2 - u u' / sigma; every product commutes, so the result is symmetric to the bit */
static void write_covariance(const step *s, float *to, const float *P) {
    const vf root = vf_set1(1.0f / sqrtf(s->sigma));
    for (int64_t i = 0; i < s->Kp; i += MN_VW) {
        vf_store(s->w + i, vf_mul(root, vf_load(s->u + i)));
    }
    for (int64_t i = 0; i < s->K; i++) {
        const vf a = vf_set1(s->a[i]), w = vf_set1(s->w[i]);
        const float *from = P + i * s->K;
        float *row = to + i * s->K;
        for (int64_t j = 0; j < s->K; j += MN_VW) {
            const int lanes = vf_lanes(s->K - j);
            const vf kept = vf_mul(vf_mul(a, vf_load(s->a + j)), vf_load_row(from + j, lanes));
            vf_store_row(row + j, vf_sub(kept, vf_mul(w, vf_load(s->w + j))), lanes);
        }
        row[i] += s->l2;
    }
}

/* Columns [j, j + VW) of M and o: both sums over rows first, then the write. */
static void mean_columns(const step *s, float *to, const float *M, int64_t j, int lanes) {
    const mn_bayes_args *p = s->p;
    const int64_t V = p->call.V;
    float *o = MN_ROW_OUT(float, p->o, s->n, 0, s->h);
    vf known = vf_zero(), read = vf_zero();
    for (int64_t i = 0; i < s->K; i++) {
        const vf m = vf_load_row(M + i * V + j, lanes);
        known = vf_fma(vf_set1(s->kt[i]), m, known);
        read = vf_fma(vf_set1(s->qt[i]), m, read);
    }
    const vf eps = vf_sub(vf_load_row(MN_ROW(float, p->v, s->n, 0, s->h) + j, lanes), known);
    const vf scale = vf_set1((float)p->scale), written = vf_mul(vf_set1(1.0f / s->sigma), eps);
    const vf seen = vf_mul(scale, vf_mul(vf_set1(s->read / s->sigma), eps));
    if (o) vf_store_row(o + j, vf_add(vf_mul(scale, read), seen), lanes);
    for (int64_t i = 0; i < s->K; i++) {
        const vf m = vf_load_row(M + i * V + j, lanes), add = vf_mul(vf_set1(s->u[i]), written);
        vf_store_row(to + i * V + j, vf_fma(vf_set1(s->a[i]), m, add), lanes);
    }
}

static void write_mean(const step *s) {
    const mn_bayes_args *p = s->p;
    const int64_t V = p->call.V, G = p->call.G, end = mn_ceil_div((s->g + 1) * V, G);
    const float *M = MN_ROW(float, p->M0, s->n, 0, s->h);
    float *to = MN_ROW_OUT(float, p->M, s->n, 0, s->h);
    for (int64_t j = mn_ceil_div(s->g * V, G); j < end; j += MN_VW) {
        mean_columns(s, to, M, j, vf_lanes(end - j));
    }
}

void MN_T(mn_bayes_step_run)(const void *args, int phase, int64_t item, void *shared,
                             void *scratch) {
    const mn_bayes_args *p = args;
    const int64_t G = p->call.G, H = p->call.H;
    const bool means = p->call.V == 0 || (p->M0.data && p->M.data);
    bool done = false;
    if (p->P0.data && p->P.data && means && !p->theta.data) {
        mn_space space = { .memory = scratch, .ok = true };
        step s;
        place(&s, &space, p);
        s.n = item / G / H, s.h = item / G % H, s.g = item % G;
        const int64_t block = s.g * s.K * s.K;
        const float *P = MN_ROW(float, p->P0, s.n, 0, s.h) + block;
        load(&s);
        done = gains(&s, P);
        if (done) {
            write_gains(&s);
            write_covariance(&s, MN_ROW_OUT(float, p->P, s.n, 0, s.h) + block, P);
            if (p->call.V) write_mean(&s);
        }
    }
    if (!done) MN_T(mn_bayes_forward_run)(args, phase, item, shared, scratch);
}

bool MN_T(mn_riccati_step_plan)(const void *args, mn_plan *plan) {
    const mn_bayes_args p = mn_riccati_as_bayes(args);
    return MN_T(mn_bayes_step_plan)(&p, plan);
}

void MN_T(mn_riccati_step_run)(const void *args, int phase, int64_t item, void *shared,
                               void *scratch) {
    const mn_bayes_args p = mn_riccati_as_bayes(args);
    MN_T(mn_bayes_step_run)(&p, phase, item, shared, scratch);
}
