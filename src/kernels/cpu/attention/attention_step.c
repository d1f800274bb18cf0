/* attention_step.c - one decoded token: attention and relu_attention with T = 1 over L cached keys.
 *
 * The work is reading the cache, once and in the order it lies in memory: all heads of a key before
 * the next key. Keys are cut into segments, one item each. A segment leaves for every row (a query
 * head) m = max z, l = sum e^(z - m) and o = sum e^(z - m) v; the last phase joins segments,
 *
 *   m = max m_s    l = sum l_s e^(m_s - m)    o = sum o_s e^(m_s - m) / l
 *
 * relu has no m: l is the sum of z^2, and o is divided by max(sqrt l, eps). */
#include <math.h>
#include <string.h>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/attention/past.h"
#include "kernels/cpu/simd/lanes.h"
#include "kernels/cpu/simd/row.h"

/* Keys of an item; a group worth a matrix product; heads of a group that read four keys together,
 * whose sums fill the registers. */
enum { SEGMENT = 256, MANY_ROWS = 16, QUERIES = MN_VW / 4 };

/* What a segment leaves: (H,V) (H) (H). */
typedef struct part {
    float *o, *top, *sum;
} part;

/* Keys that the token sees: the newest. */
static int64_t n_seen(const past *p) {
    return mn_min(p->call->L, p->window);
}

static int64_t n_segments(const past *p) {
    return mn_ceil_div(n_seen(p), SEGMENT);
}

static part part_at(const past *p, float *parts, int64_t which) {
    const int64_t H = p->call->H, V = p->call->V;
    float *o = parts + which * H * (V + 2);
    return (part){ o, o + H * V, o + H * V + H };
}

/* Scratch: the queries (H,K) and the scores of a segment (H,SEGMENT). */
static bool plan_step(const past *p, mn_plan *plan) {
    const mn_call *c = p->call;
    int64_t parts, floats, width;
    size_t bytes;
    if (!MN_T(mn_past_plan)(p, plan) || !mn_mul_i64(&parts, c->B, n_segments(p))) return false;
    plan->items[plan->n_phases++] = parts;
    plan->items[plan->n_phases++] = c->B * c->H;
    return mn_mul_i64(&width, c->H, c->V + 2) && mn_mul_i64(&floats, parts, width) &&
           mn_mul_size(&bytes, (size_t)floats, sizeof(float)) &&
           mn_add_size(&plan->shared_bytes, plan->shared_bytes, bytes) &&
           mn_mul_i64(&floats, c->H, c->K + SEGMENT) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float));
}

/* Scores of four keys for QUERIES queries, whose rows are SEGMENT apart; the keys are read once. */
static void tile_of_scores(float *s, const float *q, const float *k, int64_t k_row, int64_t K,
                           float scale) {
    vf sum[QUERIES][4];
    MN_UNROLL
    for (int r = 0; r < QUERIES; r++) sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = vf_zero();
    for (int64_t a = 0; a < K; a += MN_VW) {
        const int lanes = vf_lanes(K - a);
        vf y[4];
        MN_UNROLL
        for (int i = 0; i < 4; i++) y[i] = vf_load_row(k + i * k_row + a, lanes);
        MN_UNROLL
        for (int r = 0; r < QUERIES; r++) {
            const vf x = vf_load_row(q + r * K + a, lanes);
            MN_UNROLL
            for (int i = 0; i < 4; i++) sum[r][i] = vf_fma(x, y[i], sum[r][i]);
        }
    }
    _Alignas(64) float folds[QUERIES * MN_VW], z[MN_VW];
    MN_UNROLL
    for (int r = 0; r < QUERIES; r++) vf_store(folds + r * MN_VW, lanes_fold(sum[r]));
    vf_store(z, vf_mul(vf_set1(scale), lanes_join(folds)));
    for (int r = 0; r < QUERIES; r++) memcpy(s + r * SEGMENT, z + 4 * r, 4 * sizeof *s);
}

/* o_r += w_r0 v_0 + .. + w_r3 v_3 for QUERIES queries r, which read the values once. */
static void add_tile(float *o, const float *w, const float *v, int64_t v_row, int64_t V) {
    for (int64_t a = 0; a < V; a += 2 * MN_VW) {
        const int lanes[2] = { vf_lanes(V - a), vf_lanes(mn_max(0, V - a - MN_VW)) };
        vf x[4][2];
        MN_UNROLL
        for (int i = 0; i < 4; i++) {
            const float *at = v + i * v_row + a;
            x[i][0] = vf_load_row(at, lanes[0]);
            x[i][1] = vf_load_row(at + MN_VW, lanes[1]);
        }
        MN_UNROLL
        for (int r = 0; r < QUERIES; r++) {
            float *to = o + r * V + a;
            vf y[2] = { vf_load_row(to, lanes[0]), vf_load_row(to + MN_VW, lanes[1]) };
            MN_UNROLL
            for (int i = 0; i < 4; i++) {
                const vf weight = vf_set1(w[r * SEGMENT + i]);
                y[0] = vf_fma(weight, x[i][0], y[0]);
                y[1] = vf_fma(weight, x[i][1], y[1]);
            }
            vf_store_row(to, y[0], lanes[0]);
            vf_store_row(to + MN_VW, y[1], lanes[1]);
        }
    }
}

/* n scores become weights: e^(z - top) or relu(z); *sum is theirs, or that of z^2. */
static void weigh(float *s, int64_t n, bool softmax, float *top, float *sum) {
    vf most = vf_set1(-INFINITY), total = vf_zero();
    for (int64_t i = 0; softmax && i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        most = vf_max(most, vf_select(vm_first(lanes), vf_load_row(s + i, lanes), most));
    }
    *top = vf_max_lanes(most);
    const vf shift = vf_set1(*top);
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf z = vf_load_row(s + i, lanes);
        const vf w = softmax ? vf_exp(vf_sub(z, shift)) : vf_max(vf_zero(), z);
        vf_store_row(s + i, w, lanes);
        total = softmax ? vf_add(total, vf_keep_first(w, lanes)) : vf_fma(z, z, total);
    }
    *sum = vf_sum(total);
}

/* A segment of a sequence: keys from `first` on of the heads of sequence b. */
typedef struct segment {
    const past *p;
    past_head head;                  // of key-value head 0
    int64_t first, n, k_head;        // floats from one head's keys to the next
    float *q, *s;                    // (H,K), (H,SEGMENT)
    part to;
} segment;

/* Scores and outputs of all heads, four keys and QUERIES heads of a group at a time. */
static void stream_scores(const segment *m) {
    const mn_call *c = m->p->call;
    const int64_t k_row = m->head.k_row, group = m->p->group;
    const float scale = m->p->scale;
    for (int64_t i = 0; i < m->n; i += 4) {
        const int64_t n = mn_min(4, m->n - i);
        const float *k = m->head.k + (m->first + i) * k_row;
        for (int64_t h = 0; h < c->H; h++) {
            const float *k_h = k + h / group * m->k_head, *q = m->q + h * c->K;
            float *s = m->s + h * SEGMENT + i;
            if (n == 4 && group - h % group >= QUERIES) {
                tile_of_scores(s, q, k_h, k_row, c->K, scale);
                h += QUERIES - 1;
            } else if (n == 4) {
                vf_four_dots(s, q, k_h, k_row, c->K, scale);
            } else {
                MN_T(mn_past_scores)(s, SEGMENT, q, 1, k_h, k_row, n, c->K, scale);
            }
        }
    }
}

static void stream_values(const segment *m) {
    const mn_call *c = m->p->call;
    const int64_t v_row = m->head.v_row, group = m->p->group;
    memset(m->to.o, 0, (size_t)(c->H * c->V) * sizeof *m->to.o);
    for (int64_t i = 0; i < m->n; i += 4) {
        const int64_t n = mn_min(4, m->n - i);
        const float *v = m->head.v + (m->first + i) * v_row;
        for (int64_t h = 0; h < c->H; h++) {
            const float *v_h = v + h / group * m->p->v.stride[2], *w = m->s + h * SEGMENT + i;
            float *o = m->to.o + h * c->V;
            if (n == 4 && group - h % group >= QUERIES) {
                add_tile(o, w, v_h, v_row, c->V);
                h += QUERIES - 1;
            } else {
                vf_add_rows(o, w, v_h, v_row, n, c->V);
            }
        }
    }
}

/* The same as products, head by head: worth it when many rows share a key. */
static void multiply_scores(const segment *m) {
    const mn_call *c = m->p->call;
    const int64_t group = m->p->group;
    for (int64_t j = 0; j < c->J; j++) {
        MN_T(mn_past_scores)(m->s + j * group * SEGMENT, SEGMENT, m->q + j * group * c->K, group,
                             m->head.k + m->first * m->head.k_row + j * m->k_head, m->head.k_row,
                             m->n, c->K, m->p->scale);
    }
}

static void multiply_values(const segment *m) {
    const mn_call *c = m->p->call;
    const int64_t group = m->p->group;
    for (int64_t j = 0; j < c->J; j++) {
        const mn_gemm_args g = {
            .c = m->to.o + j * group * c->V, .c_row = c->V, .a = m->s + j * group * SEGMENT,
            .a_row = SEGMENT, .a_col = 1,
            .b = m->head.v + m->first * m->head.v_row + j * m->p->v.stride[2],
            .b_row = m->head.v_row, .M = group, .N = c->V, .K = m->n, .alpha = 1.0f,
        };
        MN_T(mn_gemm)(&g);
    }
}

static void run_segment(const past *p, int64_t item, float *parts, float *scratch) {
    const mn_call *c = p->call;
    const int64_t b = item / n_segments(p), K = c->K;
    segment m = { .p = p, .head = MN_T(mn_past_head)(p, b, 0), .q = scratch,
                  .s = scratch + c->H * K, .to = part_at(p, parts, item) };
    m.first = c->L - n_seen(p) + item % n_segments(p) * SEGMENT;
    m.n = mn_min(SEGMENT, c->L - m.first);
    m.k_head = p->turned ? c->B * c->L * K : p->k.stride[2];
    for (int64_t j = 0; j < c->J; j++) {
        const past_head head = MN_T(mn_past_head)(p, b, j);
        MN_T(mn_past_gather)(m.q + j * p->group * K, p, &head, &p->q, K, 0, 1, true);
    }
    const bool many = p->group >= MANY_ROWS;
    if (many) multiply_scores(&m);
    else stream_scores(&m);
    for (int64_t h = 0; h < c->H; h++) {
        weigh(m.s + h * SEGMENT, m.n, p->softmax, m.to.top + h, m.to.sum + h);
    }
    if (many) multiply_values(&m);
    else stream_values(&m);
}

/* One query head. */
static void join_segments(const past *p, int64_t item, float *parts) {
    const mn_call *c = p->call;
    const int64_t V = c->V, h = item % c->H, first = item / c->H * n_segments(p);
    float *o = MN_ROW_OUT(float, p->o, item / c->H, 0, h);
    float *lse = MN_ROW_OUT(float, p->lse, item / c->H, 0, h);
    float top = -INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < n_segments(p); i++)
        top = fmaxf(top, part_at(p, parts, first + i).top[h]);
    for (int64_t a = 0; o && a < V; a++) o[a] = 0.0f;
    for (int64_t i = 0; i < n_segments(p); i++) {
        const part from = part_at(p, parts, first + i);
        const float scale = p->softmax ? expf(from.top[h] - top) : 1.0f;
        sum += scale * from.sum[h];
        for (int64_t a = 0; o && a < V; a++) o[a] += scale * from.o[h * V + a];
    }
    const float scale = 1.0f / (p->softmax ? sum : fmaxf(sqrtf(sum), p->eps));
    for (int64_t a = 0; o && a < V; a++) o[a] *= scale;
    if (lse) *lse = top + logf(sum);
}

static void run_item(past *p, int phase, int64_t item, void *shared, float *scratch) {
    float *parts = MN_T(mn_past_place)(p, shared);
    if (phase < PAST_PHASES) MN_T(mn_past_run)(p, phase, item);
    else if (!wants_any(p)) return;
    else if (phase == PAST_PHASES) run_segment(p, item, parts, scratch);
    else join_segments(p, item, parts);
}

bool MN_T(mn_attention_step_plan)(const void *args, mn_plan *plan) {
    const past p = MN_T(mn_past_softmax)(args);
    return plan_step(&p, plan);
}

void MN_T(mn_attention_step_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    past p = MN_T(mn_past_softmax)(args);
    run_item(&p, phase, item, shared, scratch);
}

bool MN_T(mn_relu_attention_step_plan)(const void *args, mn_plan *plan) {
    const past p = MN_T(mn_past_relu)(args);
    return plan_step(&p, plan);
}

void MN_T(mn_relu_attention_step_run)(const void *args, int phase, int64_t item, void *shared,
                                      void *scratch) {
    past p = MN_T(mn_past_relu)(args);
    run_item(&p, phase, item, shared, scratch);
}
