/* attention.c - forward of attention and relu_attention: a block of queries meets blocks of keys.
 *
 * softmax   with m the largest score so far and l = sum e^(z - m), a new block first scales l and
 *           o by e^(m_old - m) and then adds its own part; o / l at the end.
 * relu      o and the sum of z^2 just grow; o / max(|z|, eps) at the end.
 *
 * One item is one block of queries of one key-value head. Scores exist for one block of keys at a
 * time. Blocks later in a sequence see more keys and start first. */
#include <math.h>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/simd/map.h"
#include "kernels/cpu/attention/past.h"
#include "kernels/cpu/simd/vec.h"

enum { KEYS = 128 };    // of a block

typedef struct block {
    const past *p;
    past_head head;
    int64_t first, n_tokens, n_rows;    // tokens first .. of the sequence; rows are (token, head)
    float *q, *o, *s;                   // (rows,K) (rows,V) (rows,KEYS)
    float *top, *sum, *part, *shrink;   // m; l or sum of z^2; what a block adds; e^(m_old - m)
} block;

static bool plan_blocks(const past *p, mn_plan *plan) {
    const mn_call *c = p->call;
    const int64_t rows = p->n_tokens * p->group;
    int64_t width;
    plan->n_phases = 0;
    if (!MN_T(mn_past_plan)(p, plan)) return false;
    plan->items[plan->n_phases++] = mn_tile_slots(c, c->T, p->n_tokens) * c->J;
    return mn_add_i64(&width, c->K, c->V) && mn_add_i64(&width, width, KEYS + 4) &&
           mn_mul_i64(&width, width, rows) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)width, sizeof(float));
}

static block open_block(const past *p, const past_head *head, const mn_tile *tile, float *scratch) {
    block b = { .p = p, .head = *head, .first = tile->first, .n_tokens = tile->n_rows };
    b.n_rows = b.n_tokens * p->group;
    b.q = scratch;
    b.o = b.q + b.n_rows * p->call->K;
    b.s = b.o + b.n_rows * p->call->V;
    b.top = b.s + b.n_rows * KEYS;
    b.sum = b.top + b.n_rows;
    b.part = b.sum + b.n_rows;
    b.shrink = b.part + b.n_rows;
    MN_T(mn_past_gather)(b.q, p, head, &p->q, p->call->K, b.first, b.n_tokens, true);
    for (int64_t r = 0; r < b.n_rows; r++) {
        b.top[r] = -INFINITY;
        b.sum[r] = 0.0f;
    }
    return b;
}

/* How many of the n lanes or elements from i on a row still sees. */
static int seen_lanes(int64_t seen, int64_t i) {
    return (int)mn_min(MN_VW, mn_max(seen - i, 0));
}

/* n scores of a row, of which it sees the first `seen`, become e^(z - top), the others 0. top grows
 * first, by -*shrink; *part is their sum. */
static void soften(float *s, int64_t seen, int64_t n, float *top, float *part, float *shrink) {
    vf most = vf_set1(*top), sum = vf_zero();
    for (int64_t i = 0; i < seen; i += MN_VW) {
        const int lanes = seen_lanes(seen, i);
        most = vf_max(most, vf_select(vm_first(lanes), vf_load_n(s + i, lanes), most));
    }
    const float now = vf_max_lanes(most);
    const vf shift = vf_set1(now);
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf e = vf_keep_first(vf_exp(vf_sub(vf_load_n(s + i, lanes), shift)),
                                   seen_lanes(seen, i));
        vf_store_n(s + i, e, lanes);
        sum = vf_add(sum, e);
    }
    *shrink = *top - now;
    *top = now;
    *part = vf_sum(sum);
}

/* The same scores become relu(z), 0 where unseen; *part is the sum of z^2. */
static void rectify(float *s, int64_t seen, int64_t n, float *part) {
    vf sum = vf_zero();
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf z = vf_keep_first(vf_load_n(s + i, lanes), seen_lanes(seen, i));
        sum = vf_fma(z, z, sum);
        vf_store_n(s + i, vf_max(vf_zero(), z), lanes);
    }
    *part = vf_sum(sum);
}

/* Scores of keys older than the window of a row are -infinity; true if it sees none of the n. */
static bool hide_old(const block *b, int64_t r, int64_t key0, int64_t n, int64_t seen) {
    const past *p = b->p;
    float *s = b->s + r * KEYS;
    const int64_t old = past_oldest(p, &b->head, b->first + r / p->group) - key0;
    for (int64_t i = 0; i < mn_min(old, n); i++) s[i] = -INFINITY;
    if (old < seen || seen == 0) return false;
    for (int64_t i = 0; i < n; i++) s[i] = 0.0f;
    b->part[r] = b->shrink[r] = 0.0f;
    return true;
}

/* Keys key0 .. key0 + n - 1 enter; before them none if `first`. */
static void take_keys(const block *b, int64_t key0, int64_t n, bool first) {
    const past *p = b->p;
    const int64_t K = p->call->K, V = p->call->V;
    MN_T(mn_past_scores)(b->s, KEYS, b->q, b->n_rows, b->head.k + key0 * b->head.k_row,
                         b->head.k_row, n, K, p->scale);
    for (int64_t r = 0; r < b->n_rows; r++) {
        const int64_t newest = b->head.before + b->first + r / p->group;
        const int64_t seen = mn_min(n, mn_max(newest + 1 - key0, 0));
        if (hide_old(b, r, key0, n, seen)) continue;
        if (p->softmax) soften(b->s + r * KEYS, seen, n, b->top + r, b->part + r, b->shrink + r);
        else rectify(b->s + r * KEYS, seen, n, b->part + r);
    }
    if (p->softmax) MN_T(mn_map_exp)(b->shrink, b->shrink, b->n_rows);
    for (int64_t r = 0; r < b->n_rows; r++) {
        b->sum[r] = (p->softmax ? b->sum[r] * b->shrink[r] : b->sum[r]) + b->part[r];
    }
    const mn_gemm_args g = { .c = b->o, .c_row = V, .a = b->s, .a_row = KEYS, .a_col = 1,
                             .b = b->head.v + key0 * b->head.v_row, .b_row = b->head.v_row,
                             .M = b->n_rows, .N = V, .K = n, .alpha = 1.0f,
                             .base = first ? MN_GEMM_SET
                                   : p->softmax ? MN_GEMM_SCALE : MN_GEMM_ADD,
                             .c_scale = b->shrink, .shape = MN_GEMM_A_LOWER,
                             .diagonal = b->head.before + b->first - key0, .group = p->group };
    MN_T(mn_gemm)(&g);
}

static void write_rows(const block *b) {
    const past *p = b->p;
    const int64_t V = p->call->V;
    for (int64_t r = 0; r < b->n_rows; r++) {
        const int64_t t = b->head.seq.t0 + b->first + r / p->group;
        const int64_t h = b->head.j * p->group + r % p->group;
        float *o = MN_ROW_OUT(float, p->o, b->head.seq.b, t, h);
        float *lse = MN_ROW_OUT(float, p->lse, b->head.seq.b, t, h);
        const float size = p->softmax ? b->sum[r] : fmaxf(sqrtf(b->sum[r]), p->eps);
        const vf scale = vf_set1(1.0f / size);
        if (lse) *lse = b->top[r] + logf(size);
        for (int64_t i = 0; o && i < V; i += MN_VW) {
            const int lanes = vf_lanes(V - i);
            vf_store_n(o + i, vf_mul(vf_load_n(b->o + r * V + i, lanes), scale), lanes);
        }
    }
}

static void run_item(past *p, int phase, int64_t item, void *shared, float *scratch) {
    const mn_call *c = p->call;
    MN_T(mn_past_place)(p, shared);
    if (phase < PAST_PHASES) {
        MN_T(mn_past_run)(p, phase, item);
        return;
    }
    const int64_t slots = mn_tile_slots(c, c->T, p->n_tokens);
    mn_tile tile;
    if (!wants_any(p) || !mn_tile_at(&tile, c, c->T, p->n_tokens, slots - 1 - item / c->J)) return;
    const past_head head = MN_T(mn_past_head)(p, tile.n, item % c->J);
    const block b = open_block(p, &head, &tile, scratch);
    const int64_t end = head.before + tile.first + tile.n_rows;    // keys the last token sees
    const int64_t start = past_oldest(p, &head, tile.first) / KEYS * KEYS;
    for (int64_t i = start; i < end; i += KEYS) {
        take_keys(&b, i, mn_min(KEYS, end - i), i == start);
    }
    write_rows(&b);
}

bool MN_T(mn_attention_forward_plan)(const void *args, mn_plan *plan) {
    const past p = MN_T(mn_past_softmax)(args);
    return plan_blocks(&p, plan);
}

void MN_T(mn_attention_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                    void *scratch) {
    past p = MN_T(mn_past_softmax)(args);
    run_item(&p, phase, item, shared, scratch);
}

bool MN_T(mn_relu_attention_forward_plan)(const void *args, mn_plan *plan) {
    const past p = MN_T(mn_past_relu)(args);
    return plan_blocks(&p, plan);
}

void MN_T(mn_relu_attention_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                         void *scratch) {
    past p = MN_T(mn_past_relu)(args);
    run_item(&p, phase, item, shared, scratch);
}
