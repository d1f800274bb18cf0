/* hyper_backward.c - HyperMLP / HyperGLU backward, a strip at a time (equations in ref/hyper.c,
 * layout in hyper.h).
 *
 * The strip's forward is computed again, then gone back through. A mix X = Z (1 + d) + (H c) Vt
 * with H = Z U, by lag, gives from the cotangent G of X
 *
 *   Y = G Vt'    dc = H Y    dVt += (H c)'G    dd += column sums of G Z    dU += Z'(Y c)
 *   dZ = G (1 + d) + (Y c) U'
 *
 * Norm: with s the cotangent of the output's scale 1/n, dx1 -= s x1 / n^3 unless eps holds.
 *
 * Gradients of keys and values are added up in lanes (key_lanes.h). Those of the parameters also
 * run over all sequences: one item is one lane of one head of a group of sequences, at most eight
 * groups, and keeps one sum of each; a last phase adds these. */
#include <string.h>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/hyper/hyper.h"
#include "kernels/cpu/chunk/key_lanes.h"
#include "kernels/cpu/attention/past.h"
#include "kernels/cpu/simd/vec.h"

enum { MOST_GROUPS = 8, SUM_KEYS = 64, SUM_LAGS = 256 };
enum { STRIPS = 6 };    // z1, z2, x1, x2, base, w

/* Sums for the parameters of one mix: dU (lags,R), dVt (R,lags), dd (lags); the newest lag is
 * last, or in layout position the first key first. */
typedef struct sums {
    float *U, *Vt, *d;
} sums;

/* Where a lane adds up a gradient: rows of keys. */
typedef struct target {
    float *at;
    int64_t row;
} target;

/* Shared memory: per item the sums of a head's mixes, then lanes 1 .. of dk and of dv. */
typedef struct work {
    const mn_hyper_args *p;
    int64_t groups, lanes, lags, n_branches;
    float *params, *keys, *values;
} work;

static int64_t all_keys(const mn_call *c) {
    return c->cu_seqlens ? c->T : c->B * c->L;
}

static work open_work(const mn_hyper_args *p, void *shared) {
    const mn_call *c = &p->call;
    work w = { .p = p, .lags = hyper_longest(c), .n_branches = hyper_branches(p) };
    w.groups = mn_min(MOST_GROUPS, mn_n_sequences(c));
    w.lanes = most_lanes(c, c->L);
    w.params = shared;
    return w;
}

/* Floats of the sums of all mixes of one head. */
static int64_t head_floats(const work *w) {
    const mn_call *c = &w->p->call;
    return w->lags * (w->n_branches * (2 * c->R + 1) + 2 * c->W + 1);
}

static void place(work *w) {
    const mn_call *c = &w->p->call;
    w->keys = w->params + w->groups * c->H * w->lanes * head_floats(w);
    w->values = w->keys + (w->lanes - 1) * all_keys(c) * c->Q * c->K;
}

/* branch 2: the second mix */
static sums sums_at(const work *w, int64_t item, int branch) {
    const mn_call *c = &w->p->call;
    const int64_t R = branch == 2 ? c->W : c->R, first = 2 * c->R + 1;
    float *at = w->params + item * head_floats(w) +
                w->lags * first * (branch == 2 ? w->n_branches : branch);
    return (sums){ at, at + w->lags * R, at + 2 * w->lags * R };
}

bool MN_T(mn_hyper_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    const work w = open_work(args, NULL);
    const int64_t per_lag = w.n_branches * (2 * c->R + 1) + 2 * c->W + 1;
    const int64_t per_row = 2 * 2 * c->K + 3 * c->V + 3 + 4 * (2 * c->R + c->W);
    int64_t strip, scratch, params, width, keys;
    plan->n_phases = 3;
    plan->items[0] = w.groups * c->H * w.lanes;
    plan->items[1] = mn_tile_slots(c, c->L, SUM_KEYS) * c->H;
    plan->items[2] = (c->Q + c->H) * mn_ceil_div(c->P, SUM_LAGS);
    return hyper_strip_floats(&strip, c) && mn_mul_i64(&scratch, strip, STRIPS) &&
           mn_add_i64(&scratch, scratch, HYPER_ROWS * per_row) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)scratch, sizeof(float)) &&
           mn_mul_i64(&params, per_lag, w.lags) && mn_mul_i64(&params, params, plan->items[0]) &&
           mn_mul_i64(&width, c->Q, c->K) && mn_add_i64(&width, width, c->H * c->V) &&
           mn_mul_i64(&keys, width, all_keys(c)) && mn_mul_i64(&keys, keys, w.lanes - 1) &&
           mn_add_i64(&keys, keys, params) &&
           mn_mul_size(&plan->shared_bytes, (size_t)keys, sizeof(float));
}

/* First row of a lane's sums: of dk of a branch, or of dv of a head. */
static target lane_target(const work *w, const mn_sequence *seq, int64_t lane, int64_t which,
                          bool value) {
    const mn_call *c = &w->p->call;
    const mn_out *grad = value ? &w->p->grad.v : &w->p->grad.k;
    const int64_t width = value ? c->V : c->K, heads = value ? c->H : c->Q;
    if (!grad->data) return (target){ NULL, 0 };
    if (lane == 0) {
        return (target){ MN_ROW_OUT(float, *grad, seq->b, seq->t0, which), grad->stride[1] };
    }
    const int64_t first = c->cu_seqlens ? seq->t0 : seq->b * c->L;
    float *base = value ? w->values : w->keys;
    return (target){ base + (((lane - 1) * heads + which) * all_keys(c) + first) * width, width };
}

/* What a strip computes on its way, all of it scratch. */
typedef struct pass {
    hyper_strip s;
    float *z[2], *x[2], *base, *w;
    float *q[2], *dq, *d_o, *o, *g_o;    // (rows,K) and (rows,V)
    float *norm, *scale, *to_scale;
    hyper_mix mix[3];
    float *y;                            // (rows,R) of the mix at hand
} pass;

static pass open_pass(const mn_hyper_args *p, int64_t n, int64_t head, int64_t first,
                      float *scratch) {
    const mn_call *c = &p->call;
    pass a = { .s = MN_T(mn_hyper_strip)(p, n, head, first) };
    int64_t strip;
    if (!hyper_strip_floats(&strip, c)) return a;    // the plan found that it fits
    float **strips[STRIPS] = { &a.z[0], &a.z[1], &a.x[0], &a.x[1], &a.base, &a.w };
    for (int i = 0; i < STRIPS; i++, scratch += strip) *strips[i] = scratch;
    float **keys[3] = { &a.q[0], &a.q[1], &a.dq };
    for (int i = 0; i < 3; i++, scratch += HYPER_ROWS * c->K) *keys[i] = scratch;
    float **values[3] = { &a.d_o, &a.o, &a.g_o };
    for (int i = 0; i < 3; i++, scratch += HYPER_ROWS * c->V) *values[i] = scratch;
    float **numbers[3] = { &a.norm, &a.scale, &a.to_scale };
    for (int i = 0; i < 3; i++, scratch += HYPER_ROWS) *numbers[i] = scratch;
    for (int b = 0; b < a.s.n_branches; b++) a.mix[b] = MN_T(mn_hyper_mix)(&a.s, b, &scratch);
    a.mix[2] = MN_T(mn_hyper_mix)(&a.s, 2, &scratch);
    a.y = scratch;
    return a;
}

static void forward(pass *a) {
    const mn_hyper_args *p = a->s.p;
    const mn_call *c = &p->call;
    for (int b = 0; b < a->s.n_branches; b++) {
        const int64_t which = a->s.head + b * c->H;
        MN_T(mn_hyper_gather)(&a->s, a->q[b], &p->q, which, c->K);
        MN_T(mn_hyper_scores)(&a->s, a->z[b], a->q[b], &p->k, which, c->K);
        MN_T(mn_hyper_apply)(&a->s, a->x[b], a->z[b], &a->mix[b]);
    }
    MN_T(mn_hyper_activate)(&a->s, a->base, a->x[0], a->s.n_branches == 2 ? a->x[1] : NULL,
                            a->norm, a->scale);
    MN_T(mn_hyper_mask)(&a->s, a->base);
    MN_T(mn_hyper_apply)(&a->s, a->w, a->base, &a->mix[2]);
    MN_T(mn_hyper_read)(&a->s, a->o, a->w, &p->v, a->s.head, c->V);
}

/* g_o = do gv / n, dgv = do o / n, and the cotangent of 1/n; o is what was read. */
static void output_backward(pass *a) {
    const hyper_strip *s = &a->s;
    const mn_hyper_args *p = s->p;
    const int64_t V = p->call.V;
    MN_T(mn_hyper_gather)(s, a->d_o, &p->cot.o, s->head, V);
    for (int64_t r = 0; r < s->n_rows; r++) {
        const int64_t t = s->seq.t0 + s->first + r;
        const float *gv = MN_ROW(float, p->gv, s->seq.b, t, s->head);
        float *dgv = MN_ROW_OUT(float, p->grad.gv, s->seq.b, t, s->head);
        const vf scale = vf_set1(a->scale[r]);
        vf along = vf_zero();
        for (int64_t i = 0; i < V; i += MN_VW) {
            const int lanes = vf_lanes(V - i);
            const vf d_o = vf_load_n(a->d_o + r * V + i, lanes);
            const vf o = vf_load_n(a->o + r * V + i, lanes);
            const vf gated = gv ? vf_mul(d_o, vf_load_n(gv + i, lanes)) : d_o;
            if (dgv) vf_store_n(dgv + i, vf_mul(vf_mul(d_o, o), scale), lanes);
            vf_store_n(a->g_o + r * V + i, vf_mul(gated, scale), lanes);
            along = vf_fma(gated, o, along);
        }
        a->to_scale[r] = vf_sum(along);
    }
}

/* to += strip' x for all keys, by key */
static void add_to_keys(const target *to, const hyper_strip *s, const float *strip, const float *x,
                        int64_t width) {
    const float *by_key = strip + s->n_rows - 1;
    for (int64_t i = 0; to->at && i < s->n_keys; i += HYPER_COLUMNS) {
        const mn_gemm_args g = { .c = to->at + i * to->row, .c_row = to->row, .a = by_key + i,
                                 .a_row = 1, .a_col = s->row, .b = x, .b_row = width,
                                 .M = mn_min(HYPER_COLUMNS, s->n_keys - i), .N = width,
                                 .K = s->n_rows, .alpha = 1.0f, .base = MN_GEMM_ADD,
                                 .shape = MN_GEMM_A_UPPER,
                                 .diagonal = s->n_keys - s->n_rows - i };
        MN_T(mn_gemm)(&g);
    }
}

/* dd += column sums of g z and then g = g (1 + d), columns i .. i + n - 1 of the view mixed */
static void diagonal_backward(const hyper_strip *s, float *g, const float *z, const float *d,
                              float *dd, int64_t i, int64_t n) {
    const vf one = vf_set1(1.0f);
    for (int64_t a = i; a < i + n; a += MN_VW) {
        const int lanes = vf_lanes(i + n - a);
        const vf factor = vf_add(one, vf_load_n(d + a, lanes));
        vf sum = vf_load_n(dd + a, lanes);
        for (int64_t r = 0; r < s->n_rows; r++) {
            float *at = g + s->mix_at + r * s->mix_row + a;
            const vf x = vf_load_n(at, lanes);
            sum = vf_fma(x, vf_load_n(z + (at - g), lanes), sum);
            vf_store_n(at, vf_mul(x, factor), lanes);
        }
        vf_store_n(dd + a, sum, lanes);
    }
}

/* dc of one row, of the mix of a branch */
static float *controls_row(const hyper_strip *s, int64_t r, int branch) {
    const mn_hyper_args *p = s->p;
    const mn_out *dc = branch == 2 ? &p->grad.c2 : &p->grad.c1;
    const int64_t which = s->head + (branch == 2 ? 0 : branch * p->call.H);
    return MN_ROW_OUT(float, *dc, s->seq.b, s->seq.t0 + s->first + r, which);
}

/* y = g Vt' over the view that is mixed, dc, and then y = y c. Without low-rank part dc is 0. */
static void controls_backward(pass *a, const float *g, const hyper_mix *m, int branch) {
    const hyper_strip *s = &a->s;
    for (int64_t i = 0; m->U && i < s->n_keys; i += HYPER_COLUMNS) {
        const mn_gemm_args y = { .c = a->y, .c_row = m->R, .a = g + s->mix_at + i,
                                 .a_row = s->mix_row, .a_col = 1, .b = m->Vt + i, .b_row = m->P,
                                 .M = s->n_rows, .N = m->R,
                                 .K = mn_min(HYPER_COLUMNS, s->n_keys - i), .alpha = 1.0f,
                                 .base = i == 0 ? MN_GEMM_SET : MN_GEMM_ADD };
        MN_T(mn_gemm_nt)(&y);
    }
    for (int64_t r = 0; r < s->n_rows; r++) {
        float *dc = controls_row(s, r, branch);
        for (int64_t i = r * m->R; i < (r + 1) * m->R; i++) {
            if (dc) dc[i - r * m->R] = m->U ? m->h[i] * a->y[i] : 0.0f;
            a->y[i] *= m->c[i];
        }
    }
}

/* g, the cotangent of mix(z), becomes that of z; the parameters' sums grow. */
static void mix_backward(pass *a, float *g, const float *z, int branch, const sums *to,
                         int64_t lags) {
    const hyper_strip *s = &a->s;
    const hyper_mix *m = &a->mix[branch];
    const bool by_key = s->p->layout == HYPER_POSITION;
    const int64_t oldest = by_key ? 0 : lags - s->n_keys;
    float *mixed = g + s->mix_at;
    const float *from = z + s->mix_at;
    controls_backward(a, g, m, branch);
    for (int64_t i = 0; i < s->n_keys; i += HYPER_COLUMNS) {
        const int64_t n = mn_min(HYPER_COLUMNS, s->n_keys - i);
        const mn_gemm_args dVt = { .c = to->Vt + oldest + i, .c_row = lags, .a = m->hc, .a_row = 1,
                                   .a_col = m->R, .b = mixed + i, .b_row = s->mix_row, .M = m->R,
                                   .N = n, .K = s->n_rows, .alpha = 1.0f,
                                   .base = MN_GEMM_ADD };
        const mn_gemm_args dU = { .c = to->U + (oldest + i) * m->R, .c_row = m->R, .a = from + i,
                                  .a_row = 1, .a_col = s->mix_row, .b = a->y, .b_row = m->R, .M = n,
                                  .N = m->R, .K = s->n_rows, .alpha = 1.0f, .base = MN_GEMM_ADD };
        const mn_gemm_args dz = { .c = mixed + i, .c_row = s->mix_row, .a = a->y, .a_row = m->R,
                                  .a_col = 1, .b = m->U + i * m->R, .b_row = m->R,
                                  .M = s->n_rows, .N = n, .K = m->R, .alpha = 1.0f,
                                  .base = MN_GEMM_ADD };
        if (m->U) MN_T(mn_gemm)(&dVt);
        if (m->U) MN_T(mn_gemm)(&dU);
        if (m->d) diagonal_backward(s, g, z, m->d, to->d + oldest, i, n);
        if (m->U) MN_T(mn_gemm_nt)(&dz);
    }
    MN_T(mn_hyper_mask)(s, g);
}

/* One row: x1 and x2 become their cotangents, from g, that of base. */
static void activation_row(float *x1, float *x2, const float *g, int64_t n, float pull) {
    const vf zero = vf_zero(), pulled = vf_set1(pull);
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf x = vf_load_n(x1 + i, lanes);
        const vf open = vf_select(vf_gt(x, zero), vf_load_n(g + i, lanes), zero);
        vf to_1 = open;
        if (x2) {
            const vf u = vf_load_n(x2 + i, lanes);
            to_1 = vf_mul(open, vf_softplus(u));
            vf_store_n(x2 + i, vf_mul(vf_mul(open, x), vf_sigmoid(u)), lanes);
        }
        vf_store_n(x1 + i, vf_fnma(pulled, x, to_1), lanes);
    }
}

static void activation_backward(pass *a, const float *g) {
    enum { NONE = 2 };
    const hyper_strip *s = &a->s;
    for (int64_t r = 0; r < s->n_rows; r++) {
        const int64_t at = r * (s->row + 1);
        const float scale = a->scale[r];
        const bool normed = s->p->norm != NONE && a->norm[r] > (float)s->p->eps;
        activation_row(a->x[0] + at, s->n_branches == 2 ? a->x[1] + at : NULL, g + at, s->n_keys,
                       normed ? a->to_scale[r] * scale * scale * scale : 0.0f);
    }
}

/* dq = dz k, written to the strip's rows */
static void queries_backward(pass *a, const float *dz, int branch) {
    const hyper_strip *s = &a->s;
    const mn_hyper_args *p = s->p;
    const int64_t K = p->call.K, which = s->head + branch * p->call.H;
    if (!p->grad.q.data) return;
    MN_T(mn_hyper_read)(s, a->dq, dz, &p->k, which, K);
    for (int64_t r = 0; r < s->n_rows; r++) {
        float *dq = MN_ROW_OUT(float, p->grad.q, s->seq.b, s->seq.t0 + s->first + r, which);
        memcpy(dq, a->dq + r * K, (size_t)K * sizeof *dq);
    }
}

static void run_strip(const work *w, pass *a, int64_t item, int64_t lane) {
    const mn_hyper_args *p = w->p;
    const mn_call *c = &p->call;
    const hyper_strip *s = &a->s;
    const target dv = lane_target(w, &s->seq, lane, s->head, true);
    const sums second = sums_at(w, item, 2);
    forward(a);
    output_backward(a);
    add_to_keys(&dv, s, a->w, a->g_o, c->V);
    float *g = a->w;    // the weights are done with
    MN_T(mn_hyper_scores)(s, g, a->g_o, &p->v, s->head, c->V);
    mix_backward(a, g, a->base, 2, &second, w->lags);
    activation_backward(a, g);
    for (int b = 0; b < s->n_branches; b++) {
        const sums first = sums_at(w, item, b);
        const target dk = lane_target(w, &s->seq, lane, s->head + b * c->H, false);
        mix_backward(a, a->x[b], a->z[b], b, &first, w->lags);
        queries_backward(a, a->x[b], b);
        add_to_keys(&dk, s, a->x[b], a->q[b], c->K);
    }
}

static void clear(const target *to, int64_t n_keys, int64_t width) {
    for (int64_t i = 0; to->at && i < n_keys; i++) {
        memset(to->at + i * to->row, 0, (size_t)width * sizeof *to->at);
    }
}

static int64_t keys_of(const mn_call *c, const mn_sequence *seq) {
    return c->cu_seqlens ? seq->length : c->L;
}

static int64_t lanes_of(const mn_call *c, const mn_sequence *seq) {
    return n_lanes(keys_of(c, seq), mn_ceil_div(seq->length, HYPER_ROWS));
}

static void run_lane(const work *w, int64_t item, float *scratch) {
    const mn_hyper_args *p = w->p;
    const mn_call *c = &p->call;
    const int64_t lane = item % w->lanes, head = item / w->lanes % c->H;
    const int64_t group = item / w->lanes / c->H, n_sequences = mn_n_sequences(c);
    const int64_t end = (group + 1) * n_sequences / w->groups;
    memset(w->params + item * head_floats(w), 0, (size_t)head_floats(w) * sizeof *w->params);
    for (int64_t n = group * n_sequences / w->groups; n < end; n++) {
        const mn_sequence seq = mn_sequence_at(c, n);
        const int64_t lanes = lanes_of(c, &seq);
        if (lane >= lanes) continue;
        const target dv = lane_target(w, &seq, lane, head, true);
        clear(&dv, keys_of(c, &seq), c->V);
        for (int b = 0; b < w->n_branches; b++) {
            const target dk = lane_target(w, &seq, lane, head + b * c->H, false);
            clear(&dk, keys_of(c, &seq), c->K);
        }
        for (int64_t at = lane * HYPER_ROWS; at < seq.length; at += lanes * HYPER_ROWS) {
            pass a = open_pass(p, n, head, at, scratch);
            run_strip(w, &a, item, lane);
        }
    }
}

/* Adds the other lanes to lane 0 for a tile of keys. */
static void sum_lanes(const work *w, const mn_tile *tile, int64_t which, bool value) {
    const mn_call *c = &w->p->call;
    const mn_sequence seq = mn_sequence_at(c, tile->n);
    const int64_t width = value ? c->V : c->K, lanes = lanes_of(c, &seq);
    const target sum = lane_target(w, &seq, 0, which, value);
    for (int64_t i = tile->first; sum.at && i < tile->first + tile->n_rows; i++) {
        for (int64_t lane = 1; lane < lanes; lane++) {
            const target part = lane_target(w, &seq, lane, which, value);
            for (int64_t a = 0; a < width; a++)
                sum.at[i * sum.row + a] += part.at[i * part.row + a];
        }
    }
}

/* Entries first .. end - 1 of one mix's gradients: the sums of all items of its head; 0 for those
 * of lags or places that no query had. */
static void sum_params(const work *w, int64_t head, int branch, int64_t first, int64_t end) {
    const mn_hyper_args *p = w->p;
    const mn_call *c = &p->call;
    const bool second = branch == 2;
    const int64_t which = second ? head : head + branch * c->H, R = second ? c->W : c->R;
    float *dU = MN_ROW_OUT(float, second ? p->grad.U2 : p->grad.U1, 0, 0, which);
    float *dVt = MN_ROW_OUT(float, second ? p->grad.Vt2 : p->grad.Vt1, 0, 0, which);
    float *dd = MN_ROW_OUT(float, second ? p->grad.d2 : p->grad.d1, 0, 0, which);
    for (int64_t i = first; i < end; i++) {
        for (int64_t a = 0; a < R; a++) {
            if (dU) dU[i * R + a] = 0.0f;
            if (dVt) dVt[a * c->P + i] = 0.0f;
        }
        if (dd) dd[i] = 0.0f;
    }
    const bool by_key = p->layout == HYPER_POSITION;
    const int64_t unused = by_key ? 0 : c->P - w->lags, from = mn_max(first, unused);
    end = by_key ? mn_min(end, w->lags) : end;
    for (int64_t part = 0; part < w->groups * w->lanes; part++) {
        const int64_t item = (part / w->lanes * c->H + head) * w->lanes + part % w->lanes;
        const sums s = sums_at(w, item, branch);
        for (int64_t i = from * R; dU && i < end * R; i++) dU[i] += s.U[i - unused * R];
        for (int64_t i = from; dd && i < end; i++) dd[i] += s.d[i - unused];
        for (int64_t a = 0; dVt && a < R; a++) {
            const float *row = s.Vt + a * w->lags;
            for (int64_t i = from; i < end; i++) dVt[a * c->P + i] += row[i - unused];
        }
    }
}

void MN_T(mn_hyper_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    const mn_hyper_args *p = args;
    const mn_call *c = args;
    work w = open_work(p, shared);
    place(&w);
    if (phase == 0) {
        run_lane(&w, item, scratch);
    } else if (phase == 1) {
        const int64_t head = item % c->H;
        mn_tile tile;
        if (!mn_tile_at(&tile, c, c->L, SUM_KEYS, item / c->H)) return;
        sum_lanes(&w, &tile, head, true);
        for (int b = 0; b < w.n_branches; b++) sum_lanes(&w, &tile, head + b * c->H, false);
    } else {
        const int64_t mix = item % (c->Q + c->H), first = item / (c->Q + c->H) * SUM_LAGS;
        const int branch = mix >= c->Q ? 2 : (int)(mix / c->H);
        sum_params(&w, mix % c->H, branch, first, mn_min(c->P, first + SUM_LAGS));
    }
}
