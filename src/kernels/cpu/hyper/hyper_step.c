/* hyper_step.c - one decoded token: HyperMLP / HyperGLU with T = 1 over L keys.
 *
 * Most of the work is reading keys and values, each once and in the order they lie in memory: all
 * heads of a key before the next key, as in attention_step.c. Phases:
 *
 *   z      a segment of keys: scores of all heads and branches
 *   w      a head: mixed, activated, mixed again, a strip of one row (hyper.h) in the place of z
 *   parts  a segment: sum_i w_i v_i of all heads
 *   o      a head: the sum of its parts
 *
 * Sequences of one head follow each other in w, so that those at work at the same time read the
 * same parameters. */
#include "kernels/cpu/hyper/hyper.h"

#include <string.h>

#include "kernels/cpu/attention/past.h"
#include "kernels/cpu/simd/row.h"
#include "kernels/cpu/simd/vec.h"

enum { SEGMENT = 256 };    // keys of an item
enum { SCORES, MIX, VALUES, JOIN, N_PHASES };

/* In shared memory: (B,Q,L), (B,segments,H,V), (B,H). */
typedef struct room {
    float *z, *parts, *scale;
} room;

static int64_t n_segments(const mn_call *c) {
    return mn_ceil_div(c->L, SEGMENT);
}

static room room_at(float *memory, const mn_call *c) {
    float *parts = memory + c->B * c->Q * c->L;
    return (room){ memory, parts, parts + c->B * n_segments(c) * c->H * c->V };
}

/* Scratch: what the mixes of one row take. */
bool MN_T(mn_hyper_step_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t segments, heads, z, parts, total;
    plan->n_phases = N_PHASES;
    if (!mn_mul_i64(&segments, c->B, n_segments(c))) return false;
    if (!mn_mul_i64(&heads, c->B, c->H)) return false;
    plan->items[SCORES] = plan->items[VALUES] = segments;
    plan->items[MIX] = plan->items[JOIN] = heads;
    plan->scratch_bytes = (size_t)(HYPER_ROWS * (6 * c->R + 3 * c->W)) * sizeof(float);
    return mn_mul_i64(&z, c->B * c->Q, c->L) && mn_mul_i64(&parts, segments, c->H * c->V) &&
           mn_add_i64(&total, z, parts) && mn_add_i64(&total, total, heads) &&
           mn_mul_size(&plan->shared_bytes, (size_t)total, sizeof(float));
}

static void find_scores(const mn_hyper_args *p, int64_t b, int64_t first, float *z) {
    const mn_call *c = &p->call;
    const int64_t end = mn_min(c->L, first + SEGMENT), k_row = p->k.stride[1];
    for (int64_t i = first; i < end; i += 4) {
        const int64_t n = mn_min(4, end - i);
        for (int64_t j = 0; j < c->Q; j++) {
            const float *q = MN_ROW(float, p->q, b, 0, j), *k = MN_ROW(float, p->k, b, i, j);
            float *at = z + (b * c->Q + j) * c->L + i;
            if (n == 4) vf_four_dots(at, q, k, k_row, c->K, 1.0f);
            else MN_T(mn_past_scores)(at, c->L, q, 1, k, k_row, n, c->K, 1.0f);
        }
    }
}

static void mix_head(const mn_hyper_args *p, int64_t b, int64_t h, const room *at,
                     float *scratch) {
    const mn_call *c = &p->call;
    const hyper_strip s = MN_T(mn_hyper_strip)(p, b, h, 0);
    float *x = at->z + (b * c->Q + h) * c->L, *gate = NULL, norm;
    for (int branch = 0; branch < s.n_branches; branch++) {
        float *row = x + branch * c->H * c->L;
        const hyper_mix m = MN_T(mn_hyper_mix)(&s, branch, &scratch);
        MN_T(mn_hyper_apply)(&s, row, row, &m);
        if (branch) gate = row;
    }
    const hyper_mix m = MN_T(mn_hyper_mix)(&s, 2, &scratch);
    MN_T(mn_hyper_activate)(&s, x, x, gate, &norm, at->scale + b * c->H + h);
    MN_T(mn_hyper_apply)(&s, x, x, &m);
}

static void sum_values(const mn_hyper_args *p, int64_t b, int64_t first, const float *z,
                       float *part) {
    const mn_call *c = &p->call;
    const int64_t end = mn_min(c->L, first + SEGMENT);
    const float *v = p->v.data;
    memset(part, 0, (size_t)(c->H * c->V) * sizeof *part);
    for (int64_t i = first; i < end; i += 4) {
        for (int64_t h = 0; h < c->H; h++) {
            vf_add_rows(part + h * c->V, z + (b * c->Q + h) * c->L + i,
                        v + MN_OFFSET(p->v, b, i, h), p->v.stride[1], mn_min(4, end - i), c->V);
        }
    }
}

static void join_parts(const mn_hyper_args *p, int64_t b, int64_t h, const room *at) {
    const mn_call *c = &p->call;
    const int64_t V = c->V, row = c->H * V, n = n_segments(c);
    const float *part = at->parts + b * n * row + h * V, *gv = MN_ROW(float, p->gv, b, 0, h);
    float *o = MN_ROW_OUT(float, p->o, b, 0, h);
    const vf scale = vf_set1(at->scale[b * c->H + h]);
    for (int64_t a = 0; a < V; a += MN_VW) {
        const int lanes = vf_lanes(V - a);
        vf sum = vf_zero();
        for (int64_t i = 0; i < n; i++) sum = vf_add(sum, vf_load_row(part + i * row + a, lanes));
        sum = vf_mul(sum, scale);
        if (gv) sum = vf_mul(sum, vf_load_row(gv + a, lanes));
        vf_store_row(o + a, sum, lanes);
    }
}

void MN_T(mn_hyper_step_run)(const void *args, int phase, int64_t item, void *shared,
                             void *scratch) {
    const mn_hyper_args *p = args;
    const mn_call *c = args;
    const room at = room_at(shared, c);
    const int64_t b = item / n_segments(c), first = item % n_segments(c) * SEGMENT;
    if (!p->o.data) return;
    if (phase == SCORES) find_scores(p, b, first, at.z);
    if (phase == MIX) mix_head(p, item % c->B, item / c->B, &at, scratch);
    if (phase == VALUES) sum_values(p, b, first, at.z, at.parts + item * c->H * c->V);
    if (phase == JOIN) join_parts(p, item / c->H, item % c->H, &at);
}
