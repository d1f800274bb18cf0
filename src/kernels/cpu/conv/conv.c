/* conv.c - y_t = act(bias + sum_i w_i u_{t+i}), depthwise, by rows of channels (see ref/conv.c).
 *
 * Bound by memory: an item is a block of tokens times a block of channels, narrow enough for its W
 * rows of x, the taps and the sums to stay in the first cache, so that x, y and their gradients
 * cross the bus once. Taps are turned into rows once per item. Blocks are cut from the T axis
 * whatever sequences lie there; what a sequence has before its first token is tail0 or zero. Each
 * element is one chain of operations wherever it lies, so packing changes no bit of it.
 *
 * Gradients of w and bias: each item's part waits in shared memory, a second phase adds them up. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/simd/row.h"

#include <string.h>

/* GROUP tokens are done together: a tap is loaded once for all of them, and their chains overlap.
 */
enum { TOKENS = 256, CHANNELS = 256, GROUP = 4, SILU = 1 };

/* Items: batch rows x token blocks x channel blocks, then sequences x channel blocks for what
 * belongs to the states. */
typedef struct grid {
    int64_t n_blocks, n_channel_blocks, n_token_items, n_state_items;
} grid;

static bool make_grid(grid *g, const mn_call *c) {
    *g = (grid){ mn_ceil_div(c->T, TOKENS), mn_ceil_div(c->V, CHANNELS), 0, 0 };
    return mn_mul_i64(&g->n_token_items, c->B * g->n_blocks, g->n_channel_blocks) &&
           mn_mul_i64(&g->n_state_items, mn_n_sequences(c), g->n_channel_blocks);
}

/* Where an item works: channels [first, first + count) of sequence n. Rows have CHANNELS floats. */
typedef struct lane {
    const mn_conv_args *p;
    int64_t first;
    int count;
    int64_t n;
    mn_sequence seq;
    const float **inputs;    // the rows that a group of tokens sees, oldest first
    float *taps;             // W rows
    float *ring;             // W + GROUP - 1 rows: d_t lies in row t % that
    float *sums;             // W + 1 rows in shared memory: dw of each tap, dbias; may be NULL
    float *zeros, *bias;
} lane;

/* taps, ring, zeros, bias, inputs */
static bool plan_scratch(mn_plan *plan, const mn_call *c) {
    const size_t row_bytes = 2 * CHANNELS * sizeof(float) + sizeof(float *);
    return mn_mul_size(&plan->scratch_bytes, (size_t)c->W + GROUP, row_bytes);
}

static void open_lane(lane *l, const mn_conv_args *p, int64_t channel_block, void *scratch) {
    const int64_t W = p->call.W;
    *l = (lane){ .p = p, .first = channel_block * CHANNELS, .taps = scratch };
    l->count = (int)mn_min(CHANNELS, p->call.V - l->first);
    l->ring = l->taps + W * CHANNELS;
    l->zeros = l->ring + (W + GROUP - 1) * CHANNELS;
    l->bias = l->zeros + CHANNELS;
    l->inputs = (const float **)(l->bias + CHANNELS);
    const float *w = (const float *)p->w.data + l->first * W, *bias = p->bias.data;
    for (int c = 0; c < l->count; c++) {
        for (int64_t i = 0; i < W; i++) l->taps[i * CHANNELS + c] = w[c * W + i];
    }
    memset(l->zeros, 0, 2 * CHANNELS * sizeof(float));
    if (bias) memcpy(l->bias, bias + l->first, (size_t)l->count * sizeof(float));
}

/* u_j: x behind its last W - 1 inputs */
static const float *input_row(const lane *l, int64_t j) {
    const int64_t M = l->p->call.W - 1;
    if (j >= M) return MN_ROW(float, l->p->x, l->seq.b, l->seq.t0 + j - M, 0) + l->first;
    const float *tail0 = MN_ROW(float, l->p->tail0, l->n, 0, 0);
    return tail0 ? tail0 + j * l->p->call.V + l->first : l->zeros;
}

/* The rows that tokens t .. t + n - 1 see, and those after them on their way to the cache. */
static void see_inputs_of(lane *l, int64_t t, int n) {
    const int64_t end = t + n + l->p->call.W - 1;
    for (int64_t j = t; j < end; j++) l->inputs[j - t] = input_row(l, j);
    for (int64_t j = end; j < mn_min(end + n, l->seq.length + l->p->call.W - 1); j++) {
        const float *row = input_row(l, j);
        for (int c = 0; c < l->count; c += 16) __builtin_prefetch(row + c);
    }
}

/* sum[k] = bias + sum_i w_i u_{t+k+i} at channel c, for n tokens */
MN_ALWAYS_INLINE void before_act(vf sum[GROUP], const lane *l, int c, int lanes, int n) {
    MN_UNROLL
    for (int k = 0; k < n; k++) sum[k] = vf_load(l->bias + c);
    for (int64_t i = 0; i < l->p->call.W; i++) {
        const vf tap = vf_load(l->taps + i * CHANNELS + c);
        MN_UNROLL
        for (int k = 0; k < n; k++) {
            sum[k] = vf_fma(tap, vf_load_row(l->inputs[i + k] + c, lanes), sum[k]);
        }
    }
}

MN_ALWAYS_INLINE void forward_tokens(lane *l, int64_t t, int n) {
    float *y[GROUP];
    see_inputs_of(l, t, n);
    MN_UNROLL
    for (int k = 0; k < n; k++) {
        y[k] = MN_ROW_OUT(float, l->p->y, l->seq.b, l->seq.t0 + t + k, 0) + l->first;
    }
    for (int c = 0; c < l->count; c += MN_VW) {
        const int lanes = vf_lanes(l->count - c);
        vf sum[GROUP];
        before_act(sum, l, c, lanes, n);
        MN_UNROLL
        for (int k = 0; k < n; k++) {
            if (l->p->act == SILU) sum[k] = vf_mul(sum[k], vf_sigmoid(sum[k]));
            vf_store_row(y[k] + c, sum[k], lanes);
        }
    }
}

static void forward_group(lane *l, int64_t t) {
    forward_tokens(l, t, GROUP);
}

static void forward_token(lane *l, int64_t t) {
    forward_tokens(l, t, 1);
}

/* tail: the last W - 1 of u; may be tail0, so the oldest row goes first */
static void copy_tail(lane *l) {
    float *tail = MN_ROW_OUT(float, l->p->tail, l->n, 0, 0);
    for (int64_t m = 0; tail && m < l->p->call.W - 1; m++) {
        memmove(tail + m * l->p->call.V + l->first, input_row(l, l->seq.length + m),
                (size_t)l->count * sizeof(float));
    }
}

/* What is left of a token block, in runs of tokens of one sequence. */
typedef struct piece {
    int64_t at, end;    // on the T axis
    int64_t n;          // sequence of token `at`, or one before it
} piece;

/* The last sequence that starts at or before t. */
static int64_t sequence_at_token(const mn_call *c, int64_t t) {
    int64_t low = 0, high = c->n_seqs;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (c->cu_seqlens[middle] <= t) low = middle;
        else high = middle;
    }
    return low;
}

static piece open_piece(const mn_call *c, const grid *g, int64_t item) {
    const int64_t block = item / g->n_channel_blocks, at = block % g->n_blocks * TOKENS;
    const int64_t n = c->cu_seqlens ? sequence_at_token(c, at) : block / g->n_blocks;
    return (piece){ at, mn_min(c->T, at + TOKENS), n };
}

/* The next tokens [*t0, *t1) of one sequence, counted from its first. */
static bool next_run(lane *l, piece *left, int64_t *t0, int64_t *t1) {
    const mn_call *c = &l->p->call;
    if (left->at >= left->end) return false;
    while (c->cu_seqlens && c->cu_seqlens[left->n + 1] <= left->at) left->n++;
    l->n = left->n;
    l->seq = mn_sequence_at(c, l->n);
    *t0 = left->at - l->seq.t0;
    *t1 = mn_min(left->end - l->seq.t0, l->seq.length);
    left->at = l->seq.t0 + *t1;
    return true;
}

static void open_state(lane *l, const grid *g, int64_t item) {
    l->n = (item - g->n_token_items) / g->n_channel_blocks;
    l->seq = mn_sequence_at(&l->p->call, l->n);
}

bool MN_T(mn_conv_forward_plan)(const void *args, mn_plan *plan) {
    grid g;
    plan->n_phases = 1;
    return make_grid(&g, args) && plan_scratch(plan, args) &&
           mn_add_i64(&plan->items[0], g.n_token_items, g.n_state_items);
}

void MN_T(mn_conv_forward_run)(const void *args, int phase, int64_t item, void *shared,
                               void *scratch) {
    (void)phase, (void)shared;
    const mn_conv_args *p = args;
    grid g;
    lane l;
    make_grid(&g, &p->call);
    open_lane(&l, p, item % g.n_channel_blocks, scratch);
    if (item >= g.n_token_items) {
        open_state(&l, &g, item);
        copy_tail(&l);
        return;
    }
    piece left = open_piece(&p->call, &g, item);
    for (int64_t t, t1; p->y.data && next_run(&l, &left, &t, &t1);) {
        for (; t + GROUP <= t1; t += GROUP) forward_group(&l, t);
        for (; t < t1; t++) forward_token(&l, t);
    }
}

/* One token: the same item writes y and moves the tail, which may be in place. */
bool MN_T(mn_conv_step_plan)(const void *args, mn_plan *plan) {
    grid g;
    const bool ok = make_grid(&g, args) && plan_scratch(plan, args);
    plan->n_phases = 1;
    plan->items[0] = g.n_state_items;
    return ok;
}

void MN_T(mn_conv_step_run)(const void *args, int phase, int64_t item, void *shared,
                            void *scratch) {
    (void)phase, (void)shared;
    const mn_conv_args *p = args;
    grid g;
    lane l;
    make_grid(&g, &p->call);
    open_lane(&l, p, item % g.n_channel_blocks, scratch);
    open_state(&l, &g, g.n_token_items + item);
    if (p->y.data) forward_token(&l, 0);
    copy_tail(&l);
}

static float *ring_row(const lane *l, int64_t t) {
    return l->ring + t % (l->p->call.W + GROUP - 1) * CHANNELS;
}

/* Puts d_t = dy_t act'(p_t) into the ring for n tokens. */
MN_ALWAYS_INLINE void ring_tokens(lane *l, int64_t t, int n) {
    const float *dy[GROUP];
    float *d[GROUP];
    const vf one = vf_set1(1.0f);
    see_inputs_of(l, t, n);
    MN_UNROLL
    for (int k = 0; k < n; k++) {
        dy[k] = MN_ROW(float, l->p->cot.y, l->seq.b, l->seq.t0 + t + k, 0);
        dy[k] = dy[k] ? dy[k] + l->first : l->zeros;
        d[k] = ring_row(l, t + k);
    }
    for (int c = 0; c < l->count; c += MN_VW) {
        const int lanes = vf_lanes(l->count - c);
        vf sum[GROUP], s;
        MN_UNROLL
        for (int k = 0; k < n; k++) sum[k] = vf_zero();
        if (l->p->act == SILU) before_act(sum, l, c, lanes, n);
        MN_UNROLL
        for (int k = 0; k < n; k++) {
            vf d_c = vf_load_row(dy[k] + c, lanes);
            if (l->p->act == SILU) {
                s = vf_sigmoid(sum[k]);
                d_c = vf_mul(d_c, vf_mul(s, vf_fma(sum[k], vf_sub(one, s), one)));
            }
            vf_store(d[k] + c, d_c);
        }
    }
}

/* dw_i += d_t u_{t+i}, dbias += d_t; right after ring_tokens(t) */
MN_ALWAYS_INLINE void add_to_sums(lane *l, int64_t t, int n) {
    const int64_t W = l->p->call.W;
    const float *row[GROUP];
    MN_UNROLL
    for (int k = 0; k < n; k++) row[k] = ring_row(l, t + k);
    for (int c = 0; c < l->count; c += MN_VW) {
        const int lanes = vf_lanes(l->count - c);
        vf d[GROUP], to_bias = vf_load(l->sums + W * CHANNELS + c);
        MN_UNROLL
        for (int k = 0; k < n; k++) to_bias = vf_add(to_bias, d[k] = vf_load(row[k] + c));
        vf_store(l->sums + W * CHANNELS + c, to_bias);
        for (int64_t i = 0; i < W; i++) {
            float *at = l->sums + i * CHANNELS + c;
            vf sum = vf_load(at);
            MN_UNROLL
            for (int k = 0; k < n; k++) {
                sum = vf_fma(d[k], vf_load_row(l->inputs[i + k] + c, lanes), sum);
            }
            vf_store(at, sum);
        }
    }
}

static void ring_group(lane *l, int64_t t, bool add) {
    ring_tokens(l, t, GROUP);
    if (add) add_to_sums(l, t, GROUP);
}

static void ring_token(lane *l, int64_t t, bool add) {
    ring_tokens(l, t, 1);
    if (add) add_to_sums(l, t, 1);
}

/* Brings the ring from token *known to `end`. */
static void ring_until(lane *l, int64_t *known, int64_t end, bool add) {
    for (; *known + GROUP <= end; *known += GROUP) ring_group(l, *known, add);
    for (; *known < end; ++*known) ring_token(l, *known, add);
}

/* out[k] = du_{j+k} = dtail_{j+k-length} + sum_i w_i d_{j+k-i} for n rows, from the ring */
MN_ALWAYS_INLINE void input_gradients(lane *l, float *out[GROUP], int64_t j, int n) {
    const int64_t W = l->p->call.W, length = l->seq.length;
    const float *dtail = MN_ROW(float, l->p->cot.tail, l->n, 0, 0), *start[GROUP];
    MN_UNROLL
    for (int k = 0; k < n; k++) {
        const int64_t m = j + k - length;
        start[k] = dtail && m >= 0 ? dtail + m * l->p->call.V + l->first : l->zeros;
    }
    for (int64_t i = 0; i < W + n - 1; i++) {    // inputs[i] = d_{j-(W-1)+i}
        const int64_t t = j - (W - 1) + i;
        l->inputs[i] = t >= 0 && t < length ? ring_row(l, t) : l->zeros;
    }
    for (int c = 0; c < l->count; c += MN_VW) {
        const int lanes = vf_lanes(l->count - c);
        vf sum[GROUP];
        MN_UNROLL
        for (int k = 0; k < n; k++) sum[k] = vf_load_row(start[k] + c, lanes);
        for (int64_t i = 0; i < W; i++) {
            const vf tap = vf_load(l->taps + i * CHANNELS + c);
            MN_UNROLL
            for (int k = 0; k < n; k++) {
                sum[k] = vf_fma(tap, vf_load(l->inputs[W - 1 - i + k] + c), sum[k]);
            }
        }
        MN_UNROLL
        for (int k = 0; k < n; k++) vf_store_row(out[k] + c, sum[k], lanes);
    }
}

static void dx_group(lane *l, int64_t t) {
    float *dx[GROUP];
    for (int k = 0; k < GROUP; k++) {
        dx[k] = MN_ROW_OUT(float, l->p->grad.x, l->seq.b, l->seq.t0 + t + k, 0) + l->first;
    }
    input_gradients(l, dx, t + l->p->call.W - 1, GROUP);
}

static void input_gradient(lane *l, float *row, int64_t j) {
    float *out[GROUP] = { row };
    input_gradients(l, out, j, 1);
}

static void dx_token(lane *l, int64_t t) {
    float *dx = MN_ROW_OUT(float, l->p->grad.x, l->seq.b, l->seq.t0 + t, 0) + l->first;
    input_gradient(l, dx, t + l->p->call.W - 1);
}

/* Tokens [t0, t1) of one sequence: dx of token t needs d of tokens t .. t + W - 1. */
static void backward_run(lane *l, int64_t t0, int64_t t1) {
    const bool want_dx = l->p->grad.x.data;
    int64_t known = t0;
    for (int64_t t = t0, n; t < t1; t += n) {
        n = t + GROUP <= t1 ? GROUP : 1;
        const int64_t needed = want_dx ? t + n + l->p->call.W - 1 : t + n;
        ring_until(l, &known, mn_min(needed, t1), l->sums);
        ring_until(l, &known, mn_min(needed, l->seq.length), false);
        if (want_dx && n == GROUP) dx_group(l, t);
        else if (want_dx) dx_token(l, t);
    }
}

/* dtail0: the rows of du before x */
static void backward_state(lane *l) {
    const int64_t M = l->p->call.W - 1;
    float *dtail0 = MN_ROW_OUT(float, l->p->grad.tail0, l->n, 0, 0);
    int64_t known = 0;
    if (!dtail0) return;
    ring_until(l, &known, mn_min(M, l->seq.length), false);
    for (int64_t j = 0; j < M; j++) {
        input_gradient(l, dtail0 + j * l->p->call.V + l->first, j);
    }
}

static bool wants_sums(const mn_conv_args *p) {
    return p->grad.w.data || p->grad.bias.data;
}

bool MN_T(mn_conv_backward_plan)(const void *args, mn_plan *plan) {
    const mn_conv_args *p = args;
    grid g;
    int64_t parts;
    bool ok = make_grid(&g, args) && plan_scratch(plan, args) &&
              mn_add_i64(&plan->items[0], g.n_token_items, g.n_state_items);
    plan->n_phases = 1;
    if (!wants_sums(p)) return ok;
    plan->n_phases = 2;
    plan->items[1] = g.n_channel_blocks;
    return ok && mn_mul_i64(&parts, g.n_token_items, (p->call.W + 1) * CHANNELS) &&
           mn_mul_size(&plan->shared_bytes, (size_t)parts, sizeof(float));
}

/* Adds the parts of all token blocks for one block of channels. */
static void reduce(const mn_conv_args *p, const grid *g, int64_t channel_block,
                   const float *parts) {
    const int64_t W = p->call.W, first = channel_block * CHANNELS, item_size = (W + 1) * CHANNELS;
    const int64_t count = mn_min(CHANNELS, p->call.V - first);
    float *dw = p->grad.w.data, *dbias = p->grad.bias.data;
    for (int64_t i = 0; i <= W; i++) {
        double sum[CHANNELS] = { 0.0 };
        for (int64_t item = channel_block; item < g->n_token_items; item += g->n_channel_blocks) {
            const float *part = parts + item * item_size + i * CHANNELS;
            for (int64_t c = 0; c < count; c++) sum[c] += part[c];
        }
        for (int64_t c = 0; c < count; c++) {
            if (i < W && dw) dw[(first + c) * W + i] = (float)sum[c];
            if (i == W && dbias) dbias[first + c] = (float)sum[c];
        }
    }
}

void MN_T(mn_conv_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    const mn_conv_args *p = args;
    grid g;
    lane l;
    make_grid(&g, &p->call);
    if (phase == 1) {
        reduce(p, &g, item, shared);
        return;
    }
    open_lane(&l, p, item % g.n_channel_blocks, scratch);
    if (item >= g.n_token_items) {
        open_state(&l, &g, item);
        backward_state(&l);
        return;
    }
    const int64_t item_size = (p->call.W + 1) * CHANNELS;
    if (wants_sums(p)) {
        l.sums = (float *)shared + item * item_size;
        memset(l.sums, 0, (size_t)item_size * sizeof(float));
    }
    piece left = open_piece(&p->call, &g, item);
    for (int64_t t0, t1; next_run(&l, &left, &t0, &t1);) backward_run(&l, t0, t1);
}
