/* attention_backward.c - backward of attention and relu_attention, a strip of scores at a time.
 *
 * A block of queries computes its scores z against all keys it sees and from them the weights w,
 * then g = do v', and with them (equations in ref/attention.c)
 *
 *   softmax  dz = w (g - sum w g)      relu  dz = ([z > 0] g - z sum(w g) / n) / n, w = relu(z) / n
 *   dq = scale dz k     dk += scale dz'q     dv += w'do
 *
 * Two strips, z or w and g or dz, are all that is kept: rows x keys floats. The scores are computed
 * once, so backward is five matrix products. Of a window, blocks of keys that no query of the block
 * sees are left out.
 *
 * One item is one lane (key_lanes.h) of one key-value head of one sequence. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/chunk/key_lanes.h"
#include "kernels/cpu/attention/past.h"
#include "kernels/cpu/simd/vec.h"

enum { KEYS = 256, SUM_KEYS = 64 };    // keys of one product; keys of one item that adds lanes

/* Where a lane adds up a gradient: rows of keys. */
typedef struct target {
    float *at;
    int64_t row;
} target;

typedef struct work {
    past p;
    int64_t lanes;           // most of any sequence
    float *partials;         // lanes 1 .. of dk, then of dv: (lane, J, all keys, width)
} work;

typedef struct strip {
    const past *p;
    past_head head;
    int64_t first, n_tokens, n_rows, row;            // row: floats of a strip's row
    int64_t from, n_keys;                            // keys that the block sees; from: whole KEYS
    float *q, *d_o, *dq, *w, *g;
    target dk, dv;
} strip;

static int64_t all_keys(const mn_call *c) {
    return c->cu_seqlens ? c->T : c->B * c->L;
}

static int64_t strip_row(int64_t n_keys) {
    return (n_keys + MN_VW - 1) / MN_VW * MN_VW;
}

/* The most keys that a block of queries sees, from a whole block of KEYS on. */
static int64_t strip_keys(const past *p) {
    const int64_t longest = past_longest(p->call);
    if (p->window > longest) return longest;
    return mn_min(longest, p->window + p->n_tokens + KEYS);
}

static bool plan_lanes(const past *p, mn_plan *plan) {
    const mn_call *c = p->call;
    const int64_t rows = p->n_tokens * p->group, lanes = most_lanes(c, c->L);
    int64_t width, sums;
    size_t bytes;
    if (!MN_T(mn_past_plan)(p, plan)) return false;
    plan->items[plan->n_phases++] = mn_n_sequences(c) * c->J * lanes;
    plan->items[plan->n_phases++] = mn_tile_slots(c, c->L, SUM_KEYS) * c->J;
    return mn_add_i64(&width, 2 * strip_row(strip_keys(p)), 2 * c->K) &&
           mn_add_i64(&width, width, c->V) && mn_mul_i64(&width, width, rows) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)width, sizeof(float)) &&
           mn_mul_i64(&sums, (lanes - 1) * c->J, c->K + c->V) &&
           mn_mul_i64(&sums, sums, all_keys(c)) &&
           mn_mul_size(&bytes, (size_t)sums, sizeof(float)) &&
           mn_add_size(&plan->shared_bytes, plan->shared_bytes, bytes);
}

static work open_work(past p, void *shared) {
    work s = { .lanes = most_lanes(p.call, p.call->L) };
    s.partials = MN_T(mn_past_place)(&p, shared);
    s.p = p;
    return s;
}

/* First row of a lane's sums for a key-value head: of dk (which = 0) or dv (1). */
static target lane_target(const work *s, const past_head *head, int64_t lane, int which) {
    const mn_call *c = s->p.call;
    const mn_out *grad = which ? &s->p.dv : &s->p.dk;
    const int64_t width = which ? c->V : c->K;
    if (!grad->data) return (target){ NULL, 0 };
    if (lane == 0) {
        return (target){ MN_ROW_OUT(float, *grad, head->seq.b, head->seq.t0, head->j),
                         grad->stride[1] };
    }
    const int64_t first = c->cu_seqlens ? head->seq.t0 : head->seq.b * c->L;
    float *base = s->partials + (which ? (s->lanes - 1) * c->J * all_keys(c) * c->K : 0);
    return (target){ base + (((lane - 1) * c->J + head->j) * all_keys(c) + first) * width, width };
}

static strip open_strip(const work *s, const past_head *head, int64_t first, int64_t n_tokens,
                        float *scratch) {
    const past *p = &s->p;
    const int64_t K = p->call->K, V = p->call->V;
    strip b = { .p = p, .head = *head, .first = first, .n_tokens = n_tokens };
    b.n_rows = n_tokens * p->group;
    b.from = past_oldest(p, head, first) / KEYS * KEYS;
    b.n_keys = head->before + first + n_tokens;
    b.row = strip_row(b.n_keys - b.from);
    b.q = scratch;
    b.dq = b.q + b.n_rows * K;
    b.d_o = b.dq + b.n_rows * K;
    b.w = b.d_o + b.n_rows * V;
    b.g = b.w + b.n_rows * b.row;
    MN_T(mn_past_gather)(b.q, p, head, &p->q, K, first, n_tokens, true);
    MN_T(mn_past_gather)(b.d_o, p, head, &p->d_o, V, first, n_tokens, false);
    return b;
}

/* Turns a row of scores into softmax weights and g into dz, both 0 from `seen` on. */
static void soften_row(float *w, float *g, int64_t seen, int64_t n) {
    vf most = vf_set1(-INFINITY), sum = vf_zero(), mean = vf_zero();
    for (int64_t i = 0; i < seen; i += MN_VW) {
        const int lanes = vf_lanes(seen - i);
        most = vf_max(most, vf_select(vm_first(lanes), vf_load(w + i), most));
    }
    const vf shift = vf_set1(vf_max_lanes(most));
    for (int64_t i = 0; i < seen; i += MN_VW) {
        const vf e = vf_keep_first(vf_exp(vf_sub(vf_load(w + i), shift)), vf_lanes(seen - i));
        vf_store(w + i, e);
        sum = vf_add(sum, e);
        mean = vf_fma(e, vf_keep_first(vf_load(g + i), vf_lanes(seen - i)), mean);
    }
    const vf scale = vf_set1(1.0f / vf_sum(sum));
    const vf centre = vf_mul(vf_set1(vf_sum(mean)), scale);
    int64_t i = 0;
    for (; i < seen; i += MN_VW) {
        const vf e = vf_mul(vf_load(w + i), scale);
        const vf dz = vf_mul(e, vf_sub(vf_load(g + i), centre));
        vf_store(w + i, e);
        vf_store(g + i, vf_keep_first(dz, vf_lanes(seen - i)));
    }
    for (; i < n; i += MN_VW) {
        vf_store(w + i, vf_zero());
        vf_store(g + i, vf_zero());
    }
}

/* The same for relu(z) / n. */
static void rectify_row(float *w, float *g, int64_t seen, int64_t n, float eps) {
    vf square = vf_zero(), mean = vf_zero();
    for (int64_t i = 0; i < seen; i += MN_VW) {
        const vf z = vf_keep_first(vf_load(w + i), vf_lanes(seen - i));
        square = vf_fma(z, z, square);
        mean = vf_fma(vf_max(vf_zero(), z), vf_keep_first(vf_load(g + i), vf_lanes(seen - i)),
                      mean);
    }
    const float norm = sqrtf(vf_sum(square)), size = fmaxf(norm, eps);
    const vf scale = vf_set1(1.0f / size);
    const vf pull = vf_set1(norm > eps ? vf_sum(mean) / size / size : 0.0f);
    int64_t i = 0;
    for (; i < seen; i += MN_VW) {
        const int lanes = vf_lanes(seen - i);
        const vf z = vf_keep_first(vf_load(w + i), lanes);
        const vf open = vf_select(vf_gt(z, vf_zero()), vf_load(g + i), vf_zero());
        vf_store(g + i, vf_keep_first(vf_mul(vf_fnma(pull, z, open), scale), lanes));
        vf_store(w + i, vf_mul(vf_max(vf_zero(), z), scale));
    }
    for (; i < n; i += MN_VW) {
        vf_store(w + i, vf_zero());
        vf_store(g + i, vf_zero());
    }
}

/* Both strips: w and dz. */
static void fill_strips(const strip *b) {
    const past *p = b->p;
    const past_head *head = &b->head;
    for (int64_t i = b->from; i < b->n_keys; i += KEYS) {
        const int64_t n = mn_min(KEYS, b->n_keys - i);
        MN_T(mn_past_scores)(b->w + i - b->from, b->row, b->q, b->n_rows, head->k + i * head->k_row,
                             head->k_row, n, p->call->K, p->scale);
        MN_T(mn_past_scores)(b->g + i - b->from, b->row, b->d_o, b->n_rows,
                             head->v + i * head->v_row, head->v_row, n, p->call->V, 1.0f);
    }
    for (int64_t r = 0; r < b->n_rows; r++) {
        const int64_t seen = head->before + b->first + r / p->group + 1 - b->from;
        const int64_t old = past_oldest(p, head, b->first + r / p->group) - b->from;
        float *w = b->w + r * b->row, *g = b->g + r * b->row;
        for (int64_t i = 0; i < old; i++) w[i] = -INFINITY;
        if (p->softmax) soften_row(w, g, seen, b->n_keys - b->from);
        else rectify_row(w, g, seen, b->n_keys - b->from, p->eps);
    }
}

/* to += alpha strip' x for keys i .. i + n - 1 */
static void add_to_keys(const target *to, const strip *b, const float *weights, const float *x,
                        int64_t width, float alpha, int64_t i, int64_t n) {
    const mn_gemm_args g = { .c = to->at + i * to->row, .c_row = to->row,
                             .a = weights + i - b->from, .a_row = 1, .a_col = b->row, .b = x,
                             .b_row = width, .M = n, .N = width, .K = b->n_rows, .alpha = alpha,
                             .base = MN_GEMM_ADD, .shape = MN_GEMM_A_UPPER, .group = b->p->group,
                             .diagonal = b->head.before + b->first - i };
    if (to->at) MN_T(mn_gemm)(&g);
}

static void add_queries(const strip *b, int64_t i, int64_t n) {
    const int64_t K = b->p->call->K;
    const mn_gemm_args g = { .c = b->dq, .c_row = K, .a = b->g + i - b->from,
                             .a_row = b->row, .a_col = 1,
                             .b = b->head.k + i * b->head.k_row, .b_row = b->head.k_row,
                             .M = b->n_rows, .N = K, .K = n, .alpha = b->p->scale,
                             .base = i == b->from ? MN_GEMM_SET : MN_GEMM_ADD,
                             .shape = MN_GEMM_A_LOWER, .group = b->p->group,
                             .diagonal = b->head.before + b->first - i };
    if (b->p->dq.data) MN_T(mn_gemm)(&g);
}

static void write_queries(const strip *b) {
    const past *p = b->p;
    const int64_t K = p->call->K;
    for (int64_t r = 0; p->dq.data && r < b->n_rows; r++) {
        const int64_t t = b->first + r / p->group;
        float *dq = MN_ROW_OUT(float, p->dq, b->head.seq.b, b->head.seq.t0 + t,
                               b->head.j * p->group + r % p->group);
        if (p->rope) turn_row(dq, b->dq + r * K, &p->table, b->head.before + t, true);
        else memcpy(dq, b->dq + r * K, (size_t)K * sizeof *dq);
    }
}

static void clear(const target *to, int64_t n_keys, int64_t width) {
    for (int64_t i = 0; to->at && i < n_keys; i++) {
        memset(to->at + i * to->row, 0, (size_t)width * sizeof *to->at);
    }
}

static void run_lane(const work *s, int64_t item, float *scratch) {
    const past *p = &s->p;
    const mn_call *c = p->call;
    const int64_t lane = item % s->lanes, which = item / s->lanes;
    const past_head head = MN_T(mn_past_head)(p, which / c->J, which % c->J);
    const int64_t n_blocks = mn_ceil_div(head.seq.length, p->n_tokens);
    const int64_t lanes = n_lanes(head.n_keys, n_blocks);
    if (lane >= lanes) return;
    const target dk = lane_target(s, &head, lane, 0), dv = lane_target(s, &head, lane, 1);
    clear(&dk, head.n_keys, c->K);
    clear(&dv, head.n_keys, c->V);
    for (int64_t block = lane; block < n_blocks; block += lanes) {
        const int64_t first = block * p->n_tokens;
        const strip b = open_strip(s, &head, first, mn_min(p->n_tokens, head.seq.length - first),
                                   scratch);
        fill_strips(&b);
        for (int64_t i = b.from; i < b.n_keys; i += KEYS) {
            const int64_t n = mn_min(KEYS, b.n_keys - i);
            add_queries(&b, i, n);
            add_to_keys(&dk, &b, b.g, b.q, c->K, p->scale, i, n);
            add_to_keys(&dv, &b, b.w, b.d_o, c->V, 1.0f, i, n);
        }
        write_queries(&b);
    }
}

/* Adds the other lanes to lane 0 for a tile of keys, and turns dk back. */
static void sum_lanes(const work *s, const past_head *head, const mn_tile *tile, int which) {
    const past *p = &s->p;
    const int64_t width = which ? p->call->V : p->call->K;
    const int64_t lanes = n_lanes(head->n_keys, mn_ceil_div(head->seq.length, p->n_tokens));
    const target sum = lane_target(s, head, 0, which);
    for (int64_t i = tile->first; sum.at && i < tile->first + tile->n_rows; i++) {
        float *to = sum.at + i * sum.row;
        for (int64_t lane = 1; lane < lanes; lane++) {
            const target part = lane_target(s, head, lane, which);
            const float *from = part.at + i * part.row;
            for (int64_t a = 0; a < width; a++) to[a] += from[a];
        }
        if (which == 0 && p->rope) turn_row(to, to, &p->table, i, true);
    }
}

static void run_item(const past *problem, int phase, int64_t item, void *shared, float *scratch) {
    const work s = open_work(*problem, shared);
    const mn_call *c = s.p.call;
    if (phase < PAST_PHASES) {
        MN_T(mn_past_run)(&s.p, phase, item);
    } else if (phase == PAST_PHASES) {
        run_lane(&s, item, scratch);
    } else {
        mn_tile tile;
        if (!mn_tile_at(&tile, c, c->L, SUM_KEYS, item / c->J)) return;
        const past_head head = MN_T(mn_past_head)(&s.p, tile.n, item % c->J);
        sum_lanes(&s, &head, &tile, 0);
        sum_lanes(&s, &head, &tile, 1);
    }
}

bool MN_T(mn_attention_backward_plan)(const void *args, mn_plan *plan) {
    const past p = MN_T(mn_past_softmax)(args);
    return plan_lanes(&p, plan);
}

void MN_T(mn_attention_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                     void *scratch) {
    const past p = MN_T(mn_past_softmax)(args);
    run_item(&p, phase, item, shared, scratch);
}

bool MN_T(mn_relu_attention_backward_plan)(const void *args, mn_plan *plan) {
    const past p = MN_T(mn_past_relu)(args);
    return plan_lanes(&p, plan);
}

void MN_T(mn_relu_attention_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                          void *scratch) {
    const past p = MN_T(mn_past_relu)(args);
    run_item(&p, phase, item, shared, scratch);
}
