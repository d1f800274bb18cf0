/* longhorn_diag_step.c - one token of diagonal Longhorn, the state in place: each number read and
 * written once. Equations and gains in longhorn.h.
 *
 * One item is some columns of one head, walked row by row in the order of memory; what the columns
 * need and their sums live in the first cache. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/vec/longhorn.h"

enum { NARROW = 32 };

/* Columns of an item: all of them, unless there are few heads to share out. */
static int64_t width_of(const mn_call *c) {
    return c->B * c->H >= 4 ? c->V : mn_min(c->V, NARROW);
}

bool MN_T(mn_longhorn_diag_step_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    if (!mn_cells_fit(c)) return false;
    const int64_t width = width_of(c);
    plan->n_phases = 1;
    plan->items[0] = c->B * c->H * mn_ceil_div(c->V, width);
    return mn_mul_size(&plan->scratch_bytes, (size_t)(width + MN_VW), 4 * sizeof(float));
}

/* Vectors of the columns: u = w v, w, rest, and the sums of o. */
typedef struct columns {
    float *u, *w, *rest, *o;
    int64_t n;
} columns;

static void prepare(const columns *s, const float *v, const float *beta, float norm) {
    for (int64_t j = 0; j < s->n; j += MN_VW) {
        const int lanes = vf_lanes(s->n - j);
        const mn_gain gain = mn_gain_of(mn_load_lanes(beta + j, lanes), norm);
        vf_store(s->u + j, vf_mul(gain.w, mn_load_lanes(v + j, lanes)));
        vf_store(s->w + j, gain.w);
        vf_store(s->rest + j, gain.rest);
        vf_store(s->o + j, vf_zero());
    }
}

/* One row, one vector of columns: S <- c S + k u and o += q S. The constants are those of the row. */
MN_ALWAYS_INLINE void cells(const columns *s, const float *state0, float *state, vf q, vf k, vf others,
                            int64_t j, int lanes, bool masked) {
    vf S = vf_mul(k, vf_load(s->u + j));
    if (state0) {
        const vf c = vf_fma(others, vf_load(s->w + j), vf_load(s->rest + j));
        S = vf_fma(c, masked ? vf_load_n(state0 + j, lanes) : vf_load(state0 + j), S);
    }
    vf_store(s->o + j, vf_fma(q, S, vf_load(s->o + j)));
    if (state && masked) vf_store_n(state + j, S, lanes);
    else if (state) vf_store(state + j, S);
}

/* All rows; state0 may be NULL or `state`, state may be NULL. */
MN_ALWAYS_INLINE void walk(const columns *to, const mn_longhorn_diag_args *p, const float *q,
                           const float *k, double norm, const float *state0, float *state) {
    const columns s = *to;
    for (int64_t i = 0; i < p->call.K; i++) {
        const vf q_i = vf_set1(q[i]), k_i = vf_set1(k[i]);
        const vf others = vf_set1((float)(norm - (double)k[i] * k[i]));
        const float *from = state0 ? state0 + i * p->call.V : NULL;
        float *into = state ? state + i * p->call.V : NULL;
        int64_t j = 0;
        for (; j + MN_VW <= s.n; j += MN_VW) {
            cells(&s, from, into, q_i, k_i, others, j, MN_VW, false);
        }
        if (j < s.n) cells(&s, from, into, q_i, k_i, others, j, (int)(s.n - j), true);
    }
}

void MN_T(mn_longhorn_diag_step_run)(const void *args, int phase, int64_t item, void *shared,
                                     void *scratch) {
    (void)phase, (void)shared;
    const mn_longhorn_diag_args *p = args;
    const mn_call *call = &p->call;
    const int64_t width = width_of(call), tiles = mn_ceil_div(call->V, width);
    const int64_t b = item / tiles / call->H, h = item / tiles % call->H, j0 = item % tiles * width;
    const int64_t n = mn_min(width, call->V - j0), padded = mn_ceil_div(n, MN_VW) * MN_VW;
    const float *q = MN_ROW(float, p->q, b, 0, h), *k = MN_ROW(float, p->k, b, 0, h);
    const float *state0 = MN_ROW(float, p->state0, b, 0, h);
    float *state = MN_ROW_OUT(float, p->state, b, 0, h), *o = MN_ROW_OUT(float, p->o, b, 0, h);
    float *memory = scratch;
    const columns s = { memory, memory + padded, memory + 2 * padded, memory + 3 * padded, n };
    const double norm = mn_key_norm(k, call->K);
    prepare(&s, MN_ROW(float, p->v, b, 0, h) + j0, MN_ROW(float, p->beta, b, 0, h) + j0, (float)norm);
    if (state0 && state) walk(&s, p, q, k, norm, state0 + j0, state + j0);    // the common call
    else walk(&s, p, q, k, norm, state0 ? state0 + j0 : NULL, state ? state + j0 : NULL);
    const vf scale = vf_set1((float)p->scale);
    for (int64_t j = 0; o && j < n; j += MN_VW) {
        mn_store_lanes(o + j0 + j, vf_mul(scale, vf_load(s.o + j)), vf_lanes(n - j));
    }
}
