/* lru.c - the real-gated linear recurrent unit on vectors of channels; equations in ref/lru.c.
 *
 * One item is a tile of channels of one sequence, a vector at a time over all its tokens. Backward
 * keeps the states of a vector's tokens, and sums of a parameter over sequences are a second
 * phase. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/access.h"
#include "kernels/cpu/chunk/cells.h"
#include "kernels/kernel.h"

enum { TILE = 64 };    // channels of an item

typedef struct lane {
    const mn_lru_args *p;
    mn_sequence seq;
    int64_t v;          // the first channel of the vector
    int lanes;
    vf soft;            // softplus of the parameter
    bool fresh;         // nothing before the first token
} lane;

typedef struct cell {
    vf x, i, rate, a, r;
} cell;

static inline vf load_row(const lane *l, mn_in view, int64_t t) {
    const float *row = MN_ROW(float, view, l->seq.b, l->seq.t0 + t, 0);
    return row ? vf_load_row(row + l->v, l->lanes) : vf_zero();
}

static inline void store_row(const lane *l, mn_out view, int64_t t, vf x) {
    float *row = MN_ROW_OUT(float, view, l->seq.b, l->seq.t0 + t, 0);
    if (row) vf_store_row(row + l->v, x, l->lanes);
}

static inline cell cell_at(const lane *l, int64_t t) {
    cell c = { .x = load_row(l, l->p->x, t), .i = vf_sigmoid(load_row(l, l->p->gx, t)),
               .rate = vf_sigmoid(load_row(l, l->p->ga, t)) };
    const vf la = vf_mul(vf_mul(vf_set1(-8.0f), c.rate), l->soft);
    c.a = vf_exp(la);
    c.r = vf_sqrt(vf_neg(vf_expm1(vf_add(la, la))));
    if (t == 0 && l->fresh) c.a = vf_zero(), c.r = vf_set1(1.0f);
    return c;
}

static inline vf next(const cell *c, vf h) {
    return vf_fma(c->a, h, vf_mul(vf_mul(c->r, c->i), c->x));
}

static lane lane_at(const mn_lru_args *p, int64_t n, int64_t v) {
    lane l = { .p = p, .seq = mn_sequence_at(&p->call, n), .v = v, .fresh = !p->h0.data,
               .lanes = vf_lanes(p->call.V - v) };
    l.soft = vf_softplus(vf_load_row((const float *)p->a_param.data + v, l.lanes));
    return l;
}

static vf load_state(const lane *l, mn_in view, int64_t n) {
    const float *row = MN_ROW(float, view, n, 0, 0);
    return row ? vf_load_row(row + l->v, l->lanes) : vf_zero();
}

bool MN_T(mn_lru_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 1;
    return mn_mul_i64(&plan->items[0], mn_n_sequences(c), mn_ceil_div(c->V, TILE));
}

void MN_T(mn_lru_forward_run)(const void *args, int phase, int64_t item, void *shared,
                              void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_lru_args *p = args;
    const int64_t tiles = mn_ceil_div(p->call.V, TILE), n = item / tiles;
    const int64_t first = item % tiles * TILE, end = mn_min(first + TILE, p->call.V);
    for (int64_t v = first; v < end; v += MN_VW) {
        const lane l = lane_at(p, n, v);
        vf h = load_state(&l, p->h0, n);
        for (int64_t t = 0; t < l.seq.length; t++) {
            const cell c = cell_at(&l, t);
            h = next(&c, h);
            store_row(&l, p->y, t, h);
        }
        float *last = MN_ROW_OUT(float, p->h, n, 0, 0);
        if (last) vf_store_row(last + v, h, l.lanes);
    }
}

/* Scratch: states in front of tokens. Shared: sums of a_param's gradient for each sequence. */
bool MN_T(mn_lru_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    plan->n_phases = 2;
    plan->items[1] = mn_ceil_div(c->V, TILE);
    return mn_mul_i64(&plan->items[0], mn_n_sequences(c), plan->items[1]) &&
           mn_mul_i64(&count, mn_longest_sequence(c) + 1, MN_VW) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)count, sizeof(float)) &&
           mn_mul_i64(&count, mn_n_sequences(c), c->V) &&
           mn_mul_size(&plan->shared_bytes, (size_t)count, sizeof(float));
}

/* Gradients of one token; returns that of la = log a, and makes D the one in front of it. */
static inline vf token_backward(const lane *l, int64_t t, vf *D, vf before) {
    const mn_lru_args *p = l->p;
    const cell c = cell_at(l, t);
    const vf one = vf_set1(1.0f), d = vf_add(*D, load_row(l, p->cot.y, t));
    const vf steep = vf_min(vf_div(one, c.r), vf_set1(2000.0f));
    const vf in = vf_mul(c.i, c.x), square = vf_mul(c.a, c.a);
    const vf dla = vf_mul(d, vf_fnma(vf_mul(in, square), steep, vf_mul(c.a, before)));
    const vf dr = vf_mul(d, c.r);
    store_row(l, p->grad.x, t, vf_mul(dr, c.i));
    store_row(l, p->grad.gx, t, vf_mul(vf_mul(dr, in), vf_sub(one, c.i)));
    const vf to_rate = vf_mul(vf_mul(vf_set1(-8.0f), dla), l->soft);
    store_row(l, p->grad.ga, t, vf_mul(to_rate, vf_mul(c.rate, vf_sub(one, c.rate))));
    *D = vf_mul(d, c.a);
    return vf_mul(dla, c.rate);
}

static void sum_sequences(const mn_lru_args *p, int64_t tile, const float *parts) {
    float *to = p->grad.a_param.data;
    const int64_t end = mn_min((tile + 1) * TILE, p->call.V);
    for (int64_t v = tile * TILE; to && v < end; v++) {
        double sum = 0.0;
        for (int64_t n = 0; n < mn_n_sequences(&p->call); n++) sum += parts[n * p->call.V + v];
        to[v] = (float)sum;
    }
}

void MN_T(mn_lru_backward_run)(const void *args, int phase, int64_t item, void *shared,
                               void *scratch) {
    const mn_lru_args *p = args;
    if (phase == 1) {
        sum_sequences(p, item, shared);
        return;
    }
    const int64_t tiles = mn_ceil_div(p->call.V, TILE), n = item / tiles;
    const int64_t first = item % tiles * TILE, end = mn_min(first + TILE, p->call.V);
    float *states = scratch;
    for (int64_t v = first; v < end; v += MN_VW) {
        const lane l = lane_at(p, n, v);
        vf h = load_state(&l, p->h0, n), D = load_state(&l, p->cot.h, n), sum = vf_zero();
        for (int64_t t = 0; t < l.seq.length; t++) {
            const cell c = cell_at(&l, t);
            vf_store(states + t * MN_VW, h);
            h = next(&c, h);
        }
        for (int64_t t = l.seq.length - 1; t >= 0; t--) {
            sum = vf_add(sum, token_backward(&l, t, &D, vf_load(states + t * MN_VW)));
        }
        float *dh0 = MN_ROW_OUT(float, p->grad.h0, n, 0, 0);
        if (dh0) vf_store_row(dh0 + v, D, l.lanes);
        const vf slope = vf_sigmoid(vf_load_row((const float *)p->a_param.data + v, l.lanes));
        vf_store_row((float *)shared + n * p->call.V + v,
                       vf_mul(vf_mul(vf_set1(-8.0f), slope), sum), l.lanes);
    }
}
