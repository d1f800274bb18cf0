/* longhorn_column_step.c - one token of per-column Longhorn, the state in place.
 *
 *   u = w . (v - S'k)      o = scale (S'q + (k.q) u)      S <- S + k u'
 *
 * S'k and S'q are taken in one pass over the old state, so that memory sees it once to read and
 * once more, now from the cache, to change it. One item is some columns of one head. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/cpu/longhorn/longhorn.h"

/* Vectors of a row whose sums fit the registers; columns of an item when there are few heads */
enum { STRIP = MN_VW == 16 ? 8 : 4, NARROW = 32 };

/* Columns of an item: all of them, unless there are few heads to share out. */
static int64_t width_of(const mn_call *c) {
    return c->B * c->H >= 4 ? c->V : mn_min(c->V, NARROW);
}

bool MN_T(mn_longhorn_column_step_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    if (!mn_cells_fit(c)) return false;
    const int64_t width = width_of(c);
    plan->n_phases = 1;
    plan->items[0] = c->B * c->H * mn_ceil_div(c->V, width);
    return mn_mul_size(&plan->scratch_bytes, (size_t)(width + MN_VW), 2 * sizeof(float));
}

/* along = S'k and read = S'q, n columns of K rows `step` floats apart; both start at zero */
static void project_wide(float *along, float *read, const float *S, int64_t step, const float *k,
                         const float *q, int64_t K, int64_t n) {
    for (int64_t i = 0; i < K; i++, S += step) {
        const vf k_i = vf_set1(k[i]), q_i = vf_set1(q[i]);
        for (int64_t j = 0; j < n; j += MN_VW) {
            const vf x = vf_load_row(S + j, vf_lanes(n - j));
            vf_store(along + j, vf_fma(k_i, x, vf_load(along + j)));
            vf_store(read + j, vf_fma(q_i, x, vf_load(read + j)));
        }
    }
}

/* The same for exactly `vectors` whole vectors, a constant: sums stay in registers. */
MN_ALWAYS_INLINE void project_narrow(float *along, float *read, const float *S, int64_t step,
                                     const float *k, const float *q, int64_t K, int vectors) {
    vf by_k[STRIP], by_q[STRIP];
    MN_UNROLL
    for (int c = 0; c < vectors; c++) by_k[c] = by_q[c] = vf_zero();
    for (int64_t i = 0; i < K; i++, S += step) {
        const vf k_i = vf_set1(k[i]), q_i = vf_set1(q[i]);
        MN_UNROLL
        for (int c = 0; c < vectors; c++) {
            const vf x = vf_load(S + c * MN_VW);
            by_k[c] = vf_fma(k_i, x, by_k[c]);
            by_q[c] = vf_fma(q_i, x, by_q[c]);
        }
    }
    MN_UNROLL
    for (int c = 0; c < vectors; c++) {
        vf_store(along + c * MN_VW, by_k[c]);
        vf_store(read + c * MN_VW, by_q[c]);
    }
}

static void project(float *along, float *read, const float *S, int64_t step, const float *k,
                    const float *q, int64_t K, int64_t n) {
    if (n == STRIP * MN_VW) project_narrow(along, read, S, step, k, q, K, STRIP);
    else if (n == STRIP / 2 * MN_VW) project_narrow(along, read, S, step, k, q, K, STRIP / 2);
    else project_wide(along, read, S, step, k, q, K, n);
}

/* to = from + k u'; from may be NULL or `to` */
static void change(float *to, const float *from, int64_t step, const float *k, const float *u,
                   int64_t K, int64_t n) {
    for (int64_t i = 0; i < K; i++) {
        const vf k_i = vf_set1(k[i]);
        for (int64_t j = 0; j < n; j += MN_VW) {
            const int lanes = vf_lanes(n - j);
            const vf x = from ? vf_load_row(from + i * step + j, lanes) : vf_zero();
            vf_store_row(to + i * step + j, vf_fma(k_i, vf_load(u + j), x), lanes);
        }
    }
}

static double dot(const float *a, const float *b, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return sum;
}

void MN_T(mn_longhorn_column_step_run)(const void *args, int phase, int64_t item, void *shared,
                                       void *scratch) {
    (void)phase, (void)shared;
    const mn_longhorn_column_args *p = args;
    const mn_call *call = &p->call;
    const int64_t K = call->K, V = call->V, width = width_of(call), tiles = mn_ceil_div(V, width);
    const int64_t b = item / tiles / call->H, h = item / tiles % call->H, j0 = item % tiles * width;
    const int64_t n = mn_min(width, V - j0), padded = mn_ceil_div(n, MN_VW) * MN_VW;
    const float *q = MN_ROW(float, p->q, b, 0, h), *k = MN_ROW(float, p->k, b, 0, h);
    const float *v = MN_ROW(float, p->v, b, 0, h) + j0,
                *beta = MN_ROW(float, p->beta, b, 0, h) + j0;
    const float *state0 = MN_ROW(float, p->state0, b, 0, h);
    float *state = MN_ROW_OUT(float, p->state, b, 0, h), *o = MN_ROW_OUT(float, p->o, b, 0, h);
    float *u = scratch, *read = u + padded;
    const float norm = (float)mn_key_norm(k, K);
    const vf kq = vf_set1((float)dot(k, q, K)), scale = vf_set1((float)p->scale);
    for (int64_t j = 0; j < 2 * padded; j += MN_VW) vf_store(u + j, vf_zero());
    if (state0) project(u, read, state0 + j0, V, k, q, K, n);
    for (int64_t j = 0; j < n; j += MN_VW) {
        const int lanes = vf_lanes(n - j);
        const mn_gain gain = mn_gain_of(vf_load_row(beta + j, lanes), norm);
        const vf u_j = vf_mul(gain.w, vf_sub(vf_load_row(v + j, lanes), vf_load(u + j)));
        vf_store(u + j, u_j);
        if (o) vf_store_row(o + j0 + j, vf_mul(scale, vf_fma(kq, u_j, vf_load(read + j))), lanes);
    }
    if (state) change(state + j0, state0 ? state0 + j0 : NULL, V, k, u, K, n);
}
