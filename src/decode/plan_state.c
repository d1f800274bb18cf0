/* plan_state.c - the recurrence of a matrix state, and rows of tables, as stages of a
 * megakernel. */
#include <float.h>
#include <stdlib.h>

#include "base/util.h"
#include "decode/plan.h"

/* Numbers i of rows of heads begin at 16 bytes. */
static bool packs(const mn_in *x) {
    return (uintptr_t)x->data % 16 == 0 && x->stride[2] % 8 == 0;
}

/* Whether a norm makes the rows of `made`, one behind the other. */
static bool is_qk_norm(const mn_decode_op *front, const mn_in *made, const mn_call *c) {
    bool fits = front->kind == MN_DECODE_L2_NORM && front->shape[3] == c->K &&
                front->shape[2] == c->J && (c->J == 1 || made->stride[2] == c->K) &&
                front->at[1].data == made->data;
    for (int i = 0; i < 2; i++) {
        fits = fits && front->at[i].dtype == MN_BF16 && (uintptr_t)front->at[i].data % 16 == 0;
    }
    return fits;
}

static const mn_decode_bf16 *element(const void *data, int64_t i) {
    return (const mn_decode_bf16 *)data + i;
}

/* A vector of a head, or what a norm makes it of. */
static mn_decode_source head_of(mn_stage_ranges *r, const mn_in *x, const mn_decode_op *front,
                                int64_t h, int64_t K) {
    if (!front) return mn_stage_source(r, element(x->data, h * x->stride[2]), K, 8);
    return mn_stage_source(r, element(front->at[0].data, h * K), K, 8);
}

void mn_plan_fill_norm(mn_decode_qk_norm *to, const mn_decode_op *front) {
    if (!front) return;
    const bool root = front->f == MN_DECODE_ROOT;
    *to = (mn_decode_qk_norm){ 1, root ? (float)front->scale : 0.0f,
                               root ? FLT_MAX : 1.0f / (float)front->scale, front->at[1].data };
}

/* What all tiles of head h have in common. */
static mn_decode_recurrence_instr head_instr(mn_stage_ranges *r, const mn_decode_recurrence *m,
                                             int64_t h) {
    const mn_call *c = &m->call;
    mn_decode_recurrence_instr to = { .K = (int)c->K, .V = (int)c->V, .scale = (float)m->scale,
                                      .delta_rule = m->e.data != NULL,
                                      .has_beta = m->beta.data != NULL,
                                      .has_g = m->g.data != NULL };
    const int64_t key = h * c->J / c->H;
    to.by_channel = to.has_g && m->decay == MN_DECAY_CHANNEL;
    to.q = head_of(r, &m->q, m->first[0], key, c->K);
    to.e = head_of(r, to.delta_rule ? &m->e : &m->w, to.delta_rule ? m->first[1] : NULL, key,
                   c->K);
    if (to.has_g) {
        to.g = mn_stage_source(r, element(m->g.data, h * m->g.stride[2]),
                               to.by_channel ? c->K : 1, to.by_channel ? 8 : 1);
    }
    if (to.has_beta) {
        to.beta = mn_stage_source(r, element(m->beta.data, h * m->beta.stride[2]), 1, 1);
    }
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) mn_plan_fill_norm(&to.front[i], m->first[i]);
    return to;
}

static bool has_recurrence(const mn_decode_recurrence *m) {
    const mn_call *c = &m->call;
    bool serves = c->dtype == MN_BF16 && c->T == 1 && c->B == 1 && !c->cu_seqlens && c->H > 0 &&
                  c->K > 0 && c->K <= MN_DECODE_STATE_ROWS && c->K % 8 == 0 && c->V > 0 &&
                  c->V % MN_DECODE_TILE_V == 0 && packs(&m->q) && packs(&m->v) && m->q.data &&
                  m->o.data && !m->e.data != !m->w.data && m->state.data == m->state0.data &&
                  (c->H == 1 || m->o.stride[2] == c->V);
    if (m->e.data) serves = serves && packs(&m->e);
    if (m->w.data) serves = serves && packs(&m->w);
    if (m->decay == MN_DECAY_CHANNEL && m->g.data) serves = serves && packs(&m->g);
    for (int i = 0; i < MN_DECODE_QK_NORMS && serves; i++) {
        if (!m->first[i]) continue;
        serves = is_qk_norm(m->first[i], i == 0 ? &m->q : &m->e, c) && (i == 0 || m->e.data);
    }
    return serves;
}

/* The memory of all tiles; heads[h] becomes what the tiles of head h have in common. */
static bool gather_heads(mn_stage_ranges *r, mn_decode_recurrence_instr *heads,
                         const mn_decode_recurrence *m) {
    const mn_call *c = &m->call;
    for (int64_t h = 0; h < c->H && r->fits; h++) {
        heads[h] = head_instr(r, m, h);
        heads[h].v = mn_stage_source(r, element(m->v.data, h * m->v.stride[2]), c->V, 4);
        if (m->sum) heads[h].plus = mn_stage_source(r, element(m->plus, h * c->V), c->V, 4);
        heads[h].state = (float *)m->state.data + h * m->state.stride[2];
        mn_stage_writes(r, heads[h].state, c->K * c->V, 4, false);
    }
    mn_stage_writes(r, m->o.data, c->H * c->V, 2, true);
    if (m->sum) mn_stage_writes(r, m->sum, c->H * c->V, 2, true);
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) {
        if (m->first[i]) mn_stage_writes(r, heads[0].front[i].to, c->J * c->K, 2, false);
    }
    return mn_stage_close(r);
}

/* Tile number `tile` of all heads, whose results have words from o_handoff on. */
static void write_tile(mn_megakernel *p, int block, const mn_decode_recurrence_instr *heads,
                       const mn_decode_recurrence *m, int o_handoff, int sum_handoff,
                       int64_t tile) {
    mn_decode_instr *instr = mn_plan_add_instr(p, block);
    if (!instr) return;
    const int64_t tiles = m->call.V / MN_DECODE_TILE_V, h = tile / tiles;
    const int64_t column = tile % tiles * MN_DECODE_TILE_V, first = h * m->call.V + column;
    mn_decode_recurrence_instr *to = &instr->memory;
    instr->kind = MN_DECODE_RECURRENCE;
    *to = heads[h];
    to->v = mn_source_from(to->v, column);
    to->o = (mn_decode_bf16 *)m->o.data + first;
    to->o_handoff = mn_decode_word_from(o_handoff, (unsigned)first);
    to->state += column;
    to->sum.handoff = MN_DECODE_NO_WORDS;
    if (m->sum) {
        to->plus = mn_source_from(to->plus, column);
        to->sum.to = (mn_decode_bf16 *)m->sum + first;
        to->sum.handoff = mn_decode_word_from(sum_handoff, (unsigned)first);
    }
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) {
        const int64_t group = m->call.H / m->call.J;    // whose first head stores the normed row
        if (to->front[i].to) to->front[i].to += h / group * to->K;
        if (column > 0 || h % group != 0) to->front[i].to = NULL;
    }
    mn_plan_end_instr(p, block, offsetof(mn_decode_instr, memory) + sizeof *to);
}

bool mn_megakernel_add_recurrence(mn_megakernel *p, const mn_decode_recurrence *m) {
    if (p->failed || !has_recurrence(m)) return false;
    const int64_t all = m->call.V / MN_DECODE_TILE_V * m->call.H;
    mn_stage_ranges ranges;
    mn_stage_open(&ranges, p);
    mn_decode_recurrence_instr *heads = calloc((size_t)m->call.H, sizeof *heads);
    if (!heads || !gather_heads(&ranges, heads, m)) {
        free(heads);
        return false;
    }
    const int o_handoff = mn_stage_words(&ranges, m->o.data);
    const int sum_handoff = m->sum ? mn_stage_words(&ranges, m->sum) : MN_DECODE_NO_WORDS;
    for (int64_t from = 0; from < all; from += p->n_blocks) {
        for (int block = 0; block < p->n_blocks; block++) {
            const int64_t tile = from + (block - p->phase + p->n_blocks) % p->n_blocks;
            if (tile >= all) mn_plan_rest(p, block);
            else write_tile(p, block, heads, m, o_handoff, sum_handoff, tile);
        }
        p->n_stages++;
    }
    p->phase = (int)((p->phase + all) % p->n_blocks);
    free(heads);
    return true;
}

/* The first stage does it: table and index are older than the megakernel. */
bool mn_megakernel_add_gather(mn_megakernel *p, const mn_decode_op *rows) {
    const mn_view *table = &rows->at[0], *to = &rows->at[1];
    const int64_t width = rows->shape[3];
    mn_stage_ranges ranges;
    mn_stage_open(&ranges, p);
    const bool fits = !p->failed && rows->kind == MN_DECODE_ROWS && rows->shape[2] == 1 &&
                      table->dtype == MN_BF16 && to->dtype == MN_BF16 && width < (1 << 24) &&
                      rows->elements[0] < INT64_MAX;
    if (!fits) return false;
    mn_stage_loads(&ranges, table->data, rows->elements[0], 2);
    mn_stage_loads(&ranges, rows->index, 1, 4);
    mn_stage_writes(&ranges, to->data, width, 2, true);
    if (!ranges.fits) return false;
    mn_decode_range *made = &ranges.list[ranges.n - 1];
    mn_stage_add_words(&ranges, made);
    mn_stage_copies(&ranges, (mn_decode_copy){ table->data, to->data, rows->index, width,
                                               made->words, (int)width });
    return mn_stage_close(&ranges);
}
