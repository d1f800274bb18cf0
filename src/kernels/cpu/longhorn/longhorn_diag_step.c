/* longhorn_diag_step.c - one token of diagonal Longhorn, the state in place: each number read and
 * written once. Equations and gains in longhorn.h.
 *
 * One item is some columns of one head, walked row by row in the order of memory. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/cpu/longhorn/longhorn.h"

/* Vectors of a row whose sums fit the registers; columns of an item when there are few heads */
enum { STRIP = MN_VW == 16 ? 8 : 4, NARROW = 32 };

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

/* One head's token, states from the first column of the item on. */
typedef struct token {
    const float *q, *k;
    double norm;              // |k|^2
    const float *state0;      // NULL: zero
    float *state;             // NULL: not wanted; may be state0
    int64_t K, V;
} token;

/* Vectors of the columns: u = w v, w, rest, and the sums of o. */
typedef struct columns {
    float *u, *w, *rest, *o;
    int64_t n;
} columns;

static void prepare(const columns *s, const float *v, const float *beta, float norm) {
    for (int64_t j = 0; j < s->n; j += MN_VW) {
        const int lanes = vf_lanes(s->n - j);
        const mn_gain gain = mn_gain_of(vf_load_row(beta + j, lanes), norm);
        vf_store(s->u + j, vf_mul(gain.w, vf_load_row(v + j, lanes)));
        vf_store(s->w + j, gain.w);
        vf_store(s->rest + j, gain.rest);
        vf_store(s->o + j, vf_zero());
    }
}

/* q, k and |k|^2 - k^2 of one key row */
typedef struct key {
    vf q, k, others;
} key;

static inline key key_at(const token *t, int64_t i) {
    const double k = t->k[i];
    return (key){ vf_set1(t->q[i]), vf_set1(t->k[i]), vf_set1((float)(t->norm - k * k)) };
}

/* Rows of exactly `vectors` whole vectors, a constant, of a state kept in place: what the columns
 * need stays in registers, as far as they go. */
MN_ALWAYS_INLINE void narrow_rows(const columns *s, const token *t, int vectors) {
    vf u[STRIP], w[STRIP], rest[STRIP], o[STRIP];
    MN_UNROLL
    for (int c = 0; c < vectors; c++) {
        u[c] = vf_load(s->u + c * MN_VW);
        w[c] = vf_load(s->w + c * MN_VW);
        rest[c] = vf_load(s->rest + c * MN_VW);
        o[c] = vf_zero();
    }
    for (int64_t i = 0; i < t->K; i++) {
        const key row = key_at(t, i);
        const float *from = t->state0 + i * t->V;
        float *to = t->state + i * t->V;
        MN_UNROLL
        for (int c = 0; c < vectors; c++) {
            const vf keep = vf_fma(row.others, w[c], rest[c]);
            const vf S = vf_fma(keep, vf_load(from + c * MN_VW), vf_mul(row.k, u[c]));
            o[c] = vf_fma(row.q, S, o[c]);
            vf_store(to + c * MN_VW, S);
        }
    }
    MN_UNROLL
    for (int c = 0; c < vectors; c++) vf_store(s->o + c * MN_VW, o[c]);
}

/* Rows of any width; state0 and state may be NULL. */
static void wide_rows(const columns *s, const token *t) {
    for (int64_t i = 0; i < t->K; i++) {
        const key row = key_at(t, i);
        const float *from = t->state0 ? t->state0 + i * t->V : NULL;
        float *to = t->state ? t->state + i * t->V : NULL;
        for (int64_t j = 0; j < s->n; j += MN_VW) {
            const int lanes = vf_lanes(s->n - j);
            const vf keep = vf_fma(row.others, vf_load(s->w + j), vf_load(s->rest + j));
            const vf S0 = from ? vf_load_row(from + j, lanes) : vf_zero();
            const vf S = vf_fma(keep, S0, vf_mul(row.k, vf_load(s->u + j)));
            vf_store(s->o + j, vf_fma(row.q, S, vf_load(s->o + j)));
            if (to) vf_store_row(to + j, S, lanes);
        }
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
    token t = { .q = MN_ROW(float, p->q, b, 0, h), .k = MN_ROW(float, p->k, b, 0, h),
                .state0 = MN_ROW(float, p->state0, b, 0, h),
                .state = MN_ROW_OUT(float, p->state, b, 0, h), .K = call->K, .V = call->V };
    float *o = MN_ROW_OUT(float, p->o, b, 0, h), *memory = scratch;
    const columns s = { memory, memory + padded, memory + 2 * padded, memory + 3 * padded, n };
    t.norm = mn_key_norm(t.k, call->K);
    if (t.state0) t.state0 += j0;
    if (t.state) t.state += j0;
    prepare(&s, MN_ROW(float, p->v, b, 0, h) + j0, MN_ROW(float, p->beta, b, 0, h) + j0,
            (float)t.norm);
    const bool whole = t.state0 && t.state;
    if (whole && n == STRIP * MN_VW) narrow_rows(&s, &t, STRIP);
    else if (whole && n == STRIP / 2 * MN_VW) narrow_rows(&s, &t, STRIP / 2);
    else wide_rows(&s, &t);
    const vf scale = vf_set1((float)p->scale);
    for (int64_t j = 0; o && j < n; j += MN_VW) {
        vf_store_row(o + j0 + j, vf_mul(scale, vf_load(s.o + j)), vf_lanes(n - j));
    }
}
