/* hyper_forward.c - HyperMLP / HyperGLU forward, a strip at a time (equations in ref/hyper.c,
 * layout in hyper.h).
 *
 * Norm l2 divides x1 before the activation; relu and everything after it are homogeneous, so it is
 * applied to the output like out_scale. One item is one strip of one head. */
#include "kernels/cpu/hyper/hyper.h"
#include "kernels/cpu/simd/vec.h"

/* Scratch: a strip per branch, queries, output, two numbers per row, and the mixes. */
bool MN_T(mn_hyper_forward_plan)(const void *args, mn_plan *plan) {
    const mn_hyper_args *p = args;
    const mn_call *c = args;
    int64_t strip, total;
    plan->n_phases = 1;
    plan->items[0] = mn_tile_slots(c, c->T, HYPER_ROWS) * c->H;
    return hyper_strip_floats(&strip, c) && mn_mul_i64(&total, strip, hyper_branches(p)) &&
           mn_add_i64(&total, total, HYPER_ROWS * (c->K + c->V + 2 + 6 * c->R + 3 * c->W)) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)total, sizeof(float));
}

static void write_rows(const hyper_strip *s, const float *y, const float *scale) {
    const mn_hyper_args *p = s->p;
    const int64_t V = p->call.V;
    for (int64_t r = 0; r < s->n_rows; r++) {
        const int64_t t = s->seq.t0 + s->first + r;
        float *o = MN_ROW_OUT(float, p->o, s->seq.b, t, s->head);
        const float *gv = MN_ROW(float, p->gv, s->seq.b, t, s->head);
        const vf by = vf_set1(scale[r]);
        for (int64_t i = 0; i < V; i += MN_VW) {
            const int lanes = vf_lanes(V - i);
            vf x = vf_mul(vf_load_n(y + r * V + i, lanes), by);
            if (gv) x = vf_mul(x, vf_load_n(gv + i, lanes));
            vf_store_n(o + i, x, lanes);
        }
    }
}

void MN_T(mn_hyper_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    (void)phase, (void)shared;
    const mn_hyper_args *p = args;
    const mn_call *c = args;
    const int64_t slots = mn_tile_slots(c, c->T, HYPER_ROWS);    // the longest rows come first
    mn_tile tile;
    if (!p->o.data || !mn_tile_at(&tile, c, c->T, HYPER_ROWS, slots - 1 - item / c->H)) return;
    const hyper_strip s = MN_T(mn_hyper_strip)(p, tile.n, item % c->H, tile.first);
    int64_t strip;
    if (!hyper_strip_floats(&strip, c)) return;
    float *x[2] = { scratch, (float *)scratch + strip };
    float *q = x[0] + s.n_branches * strip, *y = q + HYPER_ROWS * c->K;
    float *norm = y + HYPER_ROWS * c->V, *scale = norm + HYPER_ROWS, *rest = scale + HYPER_ROWS;
    for (int b = 0; b < s.n_branches; b++) {
        const hyper_mix m = MN_T(mn_hyper_mix)(&s, b, &rest);
        MN_T(mn_hyper_gather)(&s, q, &p->q, s.head + b * c->H, c->K);
        MN_T(mn_hyper_scores)(&s, x[b], q, &p->k, s.head + b * c->H, c->K);
        MN_T(mn_hyper_apply)(&s, x[b], x[b], &m);
    }
    const hyper_mix m = MN_T(mn_hyper_mix)(&s, 2, &rest);
    MN_T(mn_hyper_activate)(&s, x[0], x[0], s.n_branches == 2 ? x[1] : NULL, norm, scale);
    MN_T(mn_hyper_apply)(&s, x[0], x[0], &m);
    MN_T(mn_hyper_read)(&s, y, x[0], &p->v, s.head, c->V);
    write_rows(&s, y, scale);
}
