/* past.c - reads of the whole past as one problem: positions, rows and scores. */
#include "kernels/cpu/attention/past.h"

#include <string.h>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/simd/vec.h"

enum { TURN_KEYS = 64 };    // keys turned by one item

static past common(const mn_call *call) {
    past p = { .call = call, .group = call->H / call->J, .window = INT64_MAX / 2 };
    p.n_tokens = mn_max(1, PAST_ROWS / p.group);
    return p;
}

past MN_T(mn_past_softmax)(const mn_attention_args *a) {
    past p = common(&a->call);
    p.softmax = true;
    p.scale = (float)a->scale;
    p.rope = a->rope_kind;
    p.base = a->rope_base;
    if (a->window > 0) p.window = a->window;
    p.q = a->q, p.k = a->k, p.v = a->v, p.o = a->o, p.lse = a->lse, p.d_o = a->cot.o;
    p.dq = a->grad.q, p.dk = a->grad.k, p.dv = a->grad.v;
    return p;
}

past MN_T(mn_past_relu)(const mn_relu_attention_args *a) {
    past p = common(&a->call);
    p.scale = (float)a->scale;
    p.eps = (float)a->eps;
    p.q = a->q, p.k = a->k, p.v = a->v, p.o = a->o, p.d_o = a->cot.o;
    p.dq = a->grad.q, p.dk = a->grad.k, p.dv = a->grad.v;
    return p;
}

/* Keys of all sequences. */
static int64_t all_keys(const past *p) {
    return p->call->cu_seqlens ? p->call->T : p->call->B * p->call->L;
}

static int64_t table_rows(const past *p) {
    return turn_table_rows(past_longest(p->call));
}

bool MN_T(mn_past_plan)(const past *p, mn_plan *plan) {
    const mn_call *c = p->call;
    const bool rope = p->rope != 0;
    size_t table, keys;
    plan->items[plan->n_phases++] = rope ? mn_ceil_div(table_rows(p), TURN_ROWS) : 0;
    plan->items[plan->n_phases++] = rope ? mn_tile_slots(c, c->L, TURN_KEYS) * c->J : 0;
    if (!rope) return true;
    return mn_mul_size(&table, (size_t)table_rows(p) * sizeof(double), (size_t)c->K) &&
           mn_mul_size(&keys, (size_t)all_keys(p), (size_t)c->J) &&
           mn_mul_size(&keys, keys, (size_t)c->K * sizeof(float)) &&
           mn_add_size(&plan->shared_bytes, plan->shared_bytes, table) &&
           mn_add_size(&plan->shared_bytes, plan->shared_bytes, keys);
}

void *MN_T(mn_past_place)(past *p, void *shared) {
    const mn_call *c = p->call;
    if (!p->rope) return shared;
    p->table = (turn_table){ shared, turn_steps(past_longest(c)), c->K, 0, p->base, p->rope - 1 };
    p->turned = (float *)(p->table.at + table_rows(p) * c->K);
    return p->turned + all_keys(p) * c->J * c->K;
}

void MN_T(mn_past_run)(const past *p, int phase, int64_t item) {
    const mn_call *c = p->call;
    if (phase == 0) {
        const int64_t end = mn_min(table_rows(p), (item + 1) * TURN_ROWS);
        for (int64_t row = item * TURN_ROWS; row < end; row++) turn_fill_row(&p->table, row);
        return;
    }
    mn_tile tile;
    if (!mn_tile_at(&tile, c, c->L, TURN_KEYS, item / c->J)) return;
    const past_head head = MN_T(mn_past_head)(p, tile.n, item % c->J);
    for (int64_t i = tile.first; i < tile.first + tile.n_rows; i++) {
        const float *k = MN_ROW(float, p->k, head.seq.b, head.seq.t0 + i, head.j);
        turn_row((float *)head.k + i * head.k_row, k, &p->table, i, false);
    }
}

past_head MN_T(mn_past_head)(const past *p, int64_t n, int64_t j) {
    const mn_call *c = p->call;
    past_head head = { .seq = mn_sequence_at(c, n), .j = j };
    head.n_keys = c->cu_seqlens ? head.seq.length : c->L;
    head.before = head.n_keys - head.seq.length;
    head.k = MN_ROW(float, p->k, head.seq.b, head.seq.t0, j);
    head.k_row = p->k.stride[1];
    head.v = MN_ROW(float, p->v, head.seq.b, head.seq.t0, j);
    head.v_row = p->v.stride[1];
    if (p->turned) {
        const int64_t first = c->cu_seqlens ? head.seq.t0 : head.seq.b * c->L;
        head.k = p->turned + (j * all_keys(p) + first) * c->K;
        head.k_row = c->K;
    }
    return head;
}

void MN_T(mn_past_gather)(float *to, const past *p, const past_head *head, const mn_in *from,
                          int64_t width, int64_t first, int64_t n_tokens, bool turn) {
    for (int64_t t = first; t < first + n_tokens; t++) {
        for (int64_t m = 0; m < p->group; m++, to += width) {
            const float *row = MN_ROW(float, *from, head->seq.b, head->seq.t0 + t,
                                      head->j * p->group + m);
            if (!row) memset(to, 0, (size_t)width * sizeof *to);
            else if (turn && p->turned) turn_row(to, row, &p->table, head->before + t, false);
            else memcpy(to, row, (size_t)width * sizeof *to);
        }
    }
}

/* s_i = alpha x.y_i */
static void dots(float *s, const float *x, const float *y, int64_t y_row, int64_t n, int64_t width,
                 float alpha) {
    for (int64_t i = 0; i < n; i++, y += y_row) {
        vf even = vf_zero(), odd = vf_zero();
        int64_t a = 0;
        for (; a + 2 * MN_VW <= width; a += 2 * MN_VW) {
            even = vf_fma(vf_load(x + a), vf_load(y + a), even);
            odd = vf_fma(vf_load(x + a + MN_VW), vf_load(y + a + MN_VW), odd);
        }
        for (; a < width; a += MN_VW) {
            const int lanes = vf_lanes(width - a);
            even = vf_fma(vf_load_n(x + a, lanes), vf_load_n(y + a, lanes), even);
        }
        s[i] = alpha * vf_sum(vf_add(even, odd));
    }
}

void MN_T(mn_past_scores)(float *s, int64_t s_row, const float *x, int64_t n_rows, const float *y,
                          int64_t y_row, int64_t n, int64_t width, float alpha) {
    if (n_rows <= 4) {
        for (int64_t r = 0; r < n_rows; r++)
            dots(s + r * s_row, x + r * width, y, y_row, n, width, alpha);
        return;
    }
    const mn_gemm_args g = { .c = s, .c_row = s_row, .a = x, .a_row = width, .a_col = 1,
                             .b = y, .b_row = y_row, .M = n_rows, .N = n, .K = width,
                             .alpha = alpha };
    MN_T(mn_gemm_nt)(&g);
}
