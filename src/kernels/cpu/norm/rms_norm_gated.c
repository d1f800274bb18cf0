/* rms_norm_gated.c - RMS norm with a gate a = act(z), before or after (see ref/rms_norm_gated.c).
 *
 * A row goes group by group, each read twice, the second time from the first cache. The gradient of
 * w is gathered per block of rows in shared memory and added up in a second phase. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/norm/norm.h"

#include <string.h>

enum { GATE_FIRST = 1, SIGMOID = 1 };

static inline vf gate(int act, vf z) {
    const vf s = vf_sigmoid(z);
    return act == SIGMOID ? s : vf_mul(z, s);
}

/* act'(z) = s (1 - s) or s (1 + z (1 - s)) with s = sigmoid(z) */
static inline vf slope(int act, vf z, vf s) {
    const vf one = vf_set1(1.0f), rest = vf_sub(one, s);
    return vf_mul(s, act == SIGMOID ? rest : vf_fma(z, rest, one));
}

static double inverse_rms(const float *u, int64_t n, double eps) {
    return 1.0 / sqrt(mn_row_squares(u, n) / (double)n + eps);
}

/* y = x act(z) over n channels */
static void apply_gate(float *y, const float *x, const float *z, int act, int64_t n) {
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf a = gate(act, vf_load_row(z + i, lanes));
        vf_store_row(y + i, vf_mul(vf_load_row(x + i, lanes), a), lanes);
    }
}

/* y = y r w over n channels */
static void scale_group(float *y, double r, const float *w, int64_t n) {
    const vf r_all = vf_set1((float)r);
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf scaled = vf_mul(vf_load_row(y + i, lanes), r_all);
        vf_store_row(y + i, vf_mul(scaled, vf_load_row(w + i, lanes)), lanes);
    }
}

bool MN_T(mn_rms_norm_gated_forward_plan)(const void *args, mn_plan *plan) {
    const mn_rms_norm_gated_args *p = args;
    plan->n_phases = 1;
    plan->items[0] = p->y.data ? mn_ceil_div(p->call.B, MN_NORM_ROWS) : 0;
    return true;
}

void MN_T(mn_rms_norm_gated_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                         void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_rms_norm_gated_args *p = args;
    const int64_t V = p->call.V, n = V / p->groups;
    const int64_t end = mn_min(p->call.B, (item + 1) * MN_NORM_ROWS);
    for (int64_t b = item * MN_NORM_ROWS; b < end; b++) {
        const float *x = MN_ROW(float, p->x, b, 0, 0), *z = MN_ROW(float, p->z, b, 0, 0);
        float *y = MN_ROW_OUT(float, p->y, b, 0, 0);
        apply_gate(y, x, z, p->act, V);
        for (int64_t at = 0; at < V; at += n) {
            const float *u = p->order == GATE_FIRST ? y : x;
            scale_group(y + at, inverse_rms(u + at, n, p->eps), (const float *)p->w.data + at, n);
        }
    }
}

/* Scratch: rows of sigmoid(z), u and c. Shared: for each block of rows its part of dw. */
bool MN_T(mn_rms_norm_gated_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    plan->n_phases = 2;
    plan->items[0] = mn_ceil_div(c->B, MN_NORM_ROWS);
    plan->items[1] = mn_ceil_div(c->V, MN_NORM_ROWS);
    return mn_mul_size(&plan->scratch_bytes, (size_t)c->V, 3 * sizeof(float)) &&
           mn_mul_i64(&count, plan->items[0], c->V) &&
           mn_mul_size(&plan->shared_bytes, (size_t)count, sizeof(float));
}

/* Pointers to the first channel of one group of one row. */
typedef struct group {
    const float *x, *z, *w, *dy;
    float *dx, *dz, *dw;
    float *s, *u, *c;    // sigmoid(z), what is normed, its cotangent before the norm
} group;

/* s, u and c = dy w (times a where the gate comes after the norm) */
static void prepare(const group *g, bool gate_first, int act, int64_t n) {
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf x = vf_load_row(g->x + i, lanes), z = vf_load_row(g->z + i, lanes);
        const vf s = vf_sigmoid(z), a = act == SIGMOID ? s : vf_mul(z, s);
        const vf dyw = vf_mul(vf_load_row(g->dy + i, lanes), vf_load_row(g->w + i, lanes));
        vf_store_row(g->s + i, s, lanes);
        vf_store_row(g->u + i, gate_first ? vf_mul(x, a) : x, lanes);
        vf_store_row(g->c + i, gate_first ? dyw : vf_mul(dyw, a), lanes);
    }
}

/* du = r (c - pull u), pull = r^2 mean(c u), and what follows from it */
static void finish(const group *g, bool gate_first, int act, double inverse, int64_t n) {
    const double dot = mn_row_dot(g->c, g->u, n);
    const vf r = vf_set1((float)inverse);
    const vf pull = vf_set1((float)(inverse * inverse * dot / (double)n));
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf x = vf_load_row(g->x + i, lanes), z = vf_load_row(g->z + i, lanes);
        const vf s = vf_load_row(g->s + i, lanes), a = act == SIGMOID ? s : vf_mul(z, s);
        const vf dy = vf_load_row(g->dy + i, lanes), w = vf_load_row(g->w + i, lanes);
        const vf rx = vf_mul(r, x);
        const vf u = vf_load_row(g->u + i, lanes), c = vf_load_row(g->c + i, lanes);
        const vf du = vf_mul(r, vf_fnma(pull, u, c));
        const vf da = gate_first ? vf_mul(du, x) : vf_mul(vf_mul(dy, w), rx);
        if (g->dx) vf_store_row(g->dx + i, gate_first ? vf_mul(du, a) : du, lanes);
        if (g->dz) vf_store_row(g->dz + i, vf_mul(da, slope(act, z, s)), lanes);
        vf_store_row(g->dw + i, vf_fma(dy, vf_mul(rx, a), vf_load_row(g->dw + i, lanes)), lanes);
    }
}

static void row_backward(float *scratch, float *dw, const mn_rms_norm_gated_args *p, int64_t b) {
    const int64_t V = p->call.V, n = V / p->groups;
    const bool gate_first = p->order == GATE_FIRST;
    float *dx = MN_ROW_OUT(float, p->grad.x, b, 0, 0), *dz = MN_ROW_OUT(float, p->grad.z, b, 0, 0);
    for (int64_t at = 0; at < V; at += n) {
        const group g = {
            .x = MN_ROW(float, p->x, b, 0, 0) + at, .z = MN_ROW(float, p->z, b, 0, 0) + at,
            .w = (const float *)p->w.data + at, .dy = MN_ROW(float, p->cot.y, b, 0, 0) + at,
            .dx = dx ? dx + at : NULL, .dz = dz ? dz + at : NULL, .dw = dw + at,
            .s = scratch, .u = scratch + V, .c = scratch + 2 * V,
        };
        prepare(&g, gate_first, p->act, n);
        finish(&g, gate_first, p->act, inverse_rms(g.u, n, p->eps), n);
    }
}

static void clear_row(const mn_out *view, int64_t b, int64_t V) {
    float *row = MN_ROW_OUT(float, *view, b, 0, 0);
    if (row) memset(row, 0, (size_t)V * sizeof(float));
}

void MN_T(mn_rms_norm_gated_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                          void *scratch) {
    const mn_rms_norm_gated_args *p = args;
    const int64_t V = p->call.V;
    if (phase == 1) {
        mn_sum_parts(p->grad.w.data, shared, item, mn_ceil_div(p->call.B, MN_NORM_ROWS), V);
        return;
    }
    float *dw = (float *)shared + item * V;
    memset(dw, 0, (size_t)V * sizeof(float));
    const int64_t end = mn_min(p->call.B, (item + 1) * MN_NORM_ROWS);
    for (int64_t b = item * MN_NORM_ROWS; b < end; b++) {
        if (p->cot.y.data) {
            row_backward(scratch, dw, p, b);
        } else {
            clear_row(&p->grad.x, b, V);
            clear_row(&p->grad.z, b, V);
        }
    }
}
