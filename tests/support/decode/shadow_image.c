/* shadow_image.c - a megakernel on tags: each block does its instructions in their order, and
 * blocks take turns in an order that the test chooses.
 *
 * An instruction goes on when all words that it reads are there, and is then done at once. Plain
 * memory that one block writes and another reads or writes otherwise must have a barrier of the
 * grid between the two; what the producer warp loads ahead must not be written at all; words are
 * written once. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/rng.h"
#include "base/util.h"
#include "support/decode/shadow.h"

enum { MOST_PENDING = 1 << 20 };

/* Who touched an element last, and in front of which barrier, counted over all megakernels. */
typedef struct touch {
    unsigned wrote, read, ahead, copied;
    short writer, reader;
    int word;               // that it was copied to
    int pending;            // place in the list of its last write, if the list says so too
} touch;

typedef struct written {
    size_t slot;
    uint64_t tag;
    bool word, given;    // given: nothing is written, it stands for what lies there
} written;

typedef struct block_at {
    const char *next;       // its next instruction
    int64_t bytes;          // of that
    int done;               // instructions
    unsigned passed, arrived;    // barriers
    uint64_t trace;
} block_at;

static struct {
    const char *image;
    int handoff, words, block;
    uint64_t *word;         // tags, by two bytes
    bool *seen;             // by block, which of them it has read
    bool copies;            // the instruction at work
    touch *touches;
    unsigned first, epoch;    // of this megakernel; of the block at work
    written *list;
    int64_t n;
    bool blocked;           // the instruction waits for a word
    bool rereads;           // it may read what it has written
    uint64_t trace;
    uint64_t *own;          // (element, block) that wrote what another one wrote as well
    int64_t n_own, most_own;
} m;

static unsigned last_epoch;

/* ---- memory ---------------------------------------------------------------------------------- */

static touch *touch_of(size_t slot) {
    if (!m.touches) m.touches = shadow_reserve(shadow_slots() * sizeof *m.touches);
    return &m.touches[slot];
}

static bool is_own(size_t slot) {
    const uint64_t key = (uint64_t)slot << 16 | (uint64_t)m.block;
    for (int64_t i = 0; i < m.n_own; i++) {
        if (m.own[i] == key) return true;
    }
    return false;
}

static void note_own(size_t slot, int block) {
    if (m.n_own == m.most_own) {
        m.most_own = 2 * m.most_own + 64;
        m.own = realloc(m.own, (size_t)m.most_own * sizeof *m.own);
        if (!m.own) abort();
    }
    m.own[m.n_own++] = (uint64_t)slot << 16 | (uint64_t)block;
}

/* Small works and steps read what those in front of them in the instruction wrote. */
static bool kept(size_t slot, uint64_t *tag) {
    const int64_t i = m.rereads ? touch_of(slot)->pending : m.n;
    if (i >= m.n || m.list[i].word || m.list[i].slot != slot) return false;
    *tag = m.list[i].tag;
    return true;
}

static void reads(size_t slot) {
    touch *t = touch_of(slot);
    if (m.blocked) return;
    m.trace = shadow_mix(m.trace, shadow_at(SHADOW_DONE, slot));
    if (m.copies) return;
    if (t->wrote == m.epoch && t->writer != m.block && !is_own(slot)) {
        shadow_fail("block %d reads element %zu that block %d writes, without a barrier", m.block,
                    slot, t->writer);
    }
    const bool another = t->read == m.epoch && t->reader != m.block;
    t->reader = another ? -1 : (short)m.block;    // -1: several
    t->read = m.epoch;
}

static bool writes(size_t slot, uint64_t tag) {
    if (m.n == MOST_PENDING) abort();
    touch_of(slot)->pending = (int)m.n;
    m.list[m.n++] = (written){ slot, tag, false, false };
    return true;
}

/* What is read long before its turn. */
static void loads_ahead(const void *at) {
    touch *t = touch_of(shadow_slot(at));
    if (t->wrote >= m.first) {
        shadow_fail("block %d loads ahead what block %d has written", m.block, t->writer);
    }
    t->ahead = m.first;
}

/* A block that has read a word comes after the copy that made it. */
static bool has_seen(int place) {
    return m.seen[(size_t)m.block * (size_t)(m.words / 2 + 1) + (size_t)place];
}

static void write_memory(size_t slot, uint64_t tag) {
    touch *t = touch_of(slot);
    const uint64_t before = shadow_at(SHADOW_DONE, slot);
    const bool again = t->wrote == m.epoch && t->writer != m.block && tag == before;
    if (again) {
        note_own(slot, t->writer);
        note_own(slot, m.block);
    } else if (t->wrote == m.epoch && t->writer != m.block) {
        shadow_fail("blocks %d and %d write element %zu", t->writer, m.block, slot);
    } else if (t->read == m.epoch && t->reader != m.block && tag != before) {
        shadow_fail("block %d overwrites element %zu that block %d reads", m.block, slot,
                    t->reader);
    }
    if (t->copied == m.first && tag != before && !has_seen(t->word)) {
        shadow_fail("block %d overwrites element %zu that is copied to words", m.block, slot);
    }
    if (t->ahead == m.first && tag != before) {
        shadow_fail("block %d overwrites element %zu that is loaded ahead", m.block, slot);
    }
    t->wrote = m.epoch;
    t->writer = (short)m.block;
    shadow_set_at(SHADOW_DONE, slot, tag);
}

static void commit(void) {
    for (int64_t i = 0; i < m.n; i++) {
        const written *w = &m.list[i];
        if (w->given) continue;
        m.trace = shadow_mix(m.trace, w->tag);
        if (!w->word) {
            write_memory(w->slot, w->tag);
            continue;
        }
        m.trace = shadow_mix(m.trace, w->slot);
        if (m.word[w->slot]) shadow_fail("block %d writes word %zu again", m.block, w->slot * 2);
        m.word[w->slot] = w->tag;
    }
    m.n = 0;
}

/* ---- words ----------------------------------------------------------------------------------- */

/* An element: of the word at `at` the lower or the upper one. */
static size_t word_place(int64_t at) {
    if (at >= 0 && at + 2 <= m.words && at % 2 == 0) return (size_t)at / 2;
    shadow_fail("block %d: there is no word at %lld", m.block, (long long)at);
    return 0;
}

static uint64_t word(int at, int64_t i) {
    const int64_t to = mn_decode_word_from(at - m.handoff, (unsigned)i) + i % 2 * 2;
    const size_t place = word_place(to);
    const uint64_t tag = m.word[place];
    m.blocked |= !tag;
    m.seen[(size_t)m.block * (size_t)(m.words / 2 + 1) + place] |= tag != 0;
    m.trace = shadow_mix(m.trace, (uint64_t)to);
    return tag;
}

static void put_word(int at, int64_t i, uint64_t tag) {
    if (at < 0) return;
    const int64_t to = mn_decode_word_from(at - m.handoff, (unsigned)i) + i % 2 * 2;
    if (m.n == MOST_PENDING) abort();
    m.list[m.n++] = (written){ word_place(to), tag, true, false };
}

/* What this instruction reads in place of what lies there. */
static void give(const void *at, uint64_t tag) {
    const size_t slot = shadow_slot(at);
    if (m.n == MOST_PENDING) abort();
    touch_of(slot)->pending = (int)m.n;
    m.list[m.n++] = (written){ slot, tag, false, true };
}

/* Words of n elements in place of the plain tensor at `data`. */
static void words_for(const void *data, const mn_decode_source *s, int64_t n) {
    for (int64_t k = 0; k < n; k++) give((const char *)data + 2 * k, word(s->at, k + s->odd));
}

/* Words of n elements as a row. */
static void word_row(uint64_t *row, const mn_decode_source *s, int64_t n) {
    for (int64_t k = 0; k < n; k++) row[k] = word(s->at, k + s->odd);
}

/* ---- instructions ---------------------------------------------------------------------------- */

/* Where a copy of an element goes. */
static void note_copy(const void *from, int words, int k) {
    touch *t = touch_of(shadow_slot(from));
    t->copied = m.first;
    t->word = (int)word_place(mn_decode_word_from(words - m.handoff, (unsigned)k) + k % 2 * 2);
    if (t->wrote >= m.first) shadow_fail("block %d copies what is new to words", m.block);
}

static void run_copy(const mn_decode_copy_instr *p) {
    const mn_decode_header *header = (const mn_decode_header *)m.image;
    for (int i = 0; i < p->n; i++) {
        const mn_decode_copy *c = &p->of[i];
        const bool has_index = m.block < header->n_gather_blocks;
        for (int k = 0; k < c->count; k++) {
            const uint64_t tag = c->row && has_index
                                     ? shadow_table(header->index, c->from + k, c->row)
                                     : shadow_get(c->from + k);
            put_word(c->words, k, tag);
            if (!c->row) note_copy(c->from + k, c->words, k);
            if (c->to) shadow_put(c->to + k, tag);
        }
    }
}

/* The row that is multiplied; stored where this block is to. */
static void make_row(uint64_t *row, const mn_decode_gemm_instr *p) {
    const int64_t width = p->way == MN_DECODE_PLAIN ? p->K : lround(1.0 / p->inverse_width);
    uint64_t *z = calloc((size_t)p->K, sizeof *z);
    if (!z) abort();
    for (int64_t k = 0; k < p->K; k++) row[k] = word(p->x, k);
    for (int64_t k = 0; k < p->K && p->way == MN_DECODE_GATED; k++) z[k] = word(p->z, k);
    for (int64_t from = 0; from < p->K && p->way != MN_DECODE_PLAIN; from += width) {
        const uint64_t of_row = shadow_row(row + from, width);
        for (int64_t k = from; k < from + width; k++) {
            const uint64_t w = shadow_get(p->weight + (k & p->wrap));
            row[k] = p->way == MN_DECODE_NORMED
                         ? shadow_rms(p->epsilon, of_row, row[k], w)
                         : shadow_gated(p->epsilon, p->sigmoid, p->gate_first, of_row, row[k], z[k],
                                            w);
        }
    }
    const int group = width < p->K ? (int)(width / MN_DECODE_WARP_K) : MN_DECODE_WARPS;
    if (p->way != MN_DECODE_PLAIN && p->group != group) {
        shadow_fail("warps of a norm: %d, not %d", p->group, group);
    }
    if (p->chunks != mn_ceil_div(p->K, MN_DECODE_CHUNK)) shadow_fail("chunks: %d", p->chunks);
    for (int64_t k = 0; k < p->K && p->way != MN_DECODE_PLAIN; k++) {
        if (p->row) shadow_put(p->row + k, row[k]);
        if (p->row) put_word(p->row_handoff, k, row[k]);
    }
    free(z);
}

/* A column's values of a list: products, results, what was loaded ahead. */
typedef struct column_values {
    uint64_t of[MN_DECODE_VALUES];
    mn_dtype type[MN_DECODE_VALUES];
} column_values;

static uint64_t epi_input(const mn_decode_epi_input *in, const column_values *values, int column,
                          mn_dtype *type) {
    *type = in->from >= 0 ? values->type[in->from] : MN_BF16;
    if (in->from >= 0) return values->of[in->from];
    return word(in->source.at, column * in->source.step + in->source.odd);
}

static void run_list(const mn_decode_out_tile *u, const mn_decode_epi_instr *epis, int column,
                     column_values *values) {
    const bool decay = u->form == MN_DECODE_EPI_DECAY;
    for (int i = 0; i < MN_DECODE_PREFETCHED; i++) {
        const int to = 2 + MN_DECODE_EPILOGUES + i;
        if (!u->prefetched[i]) continue;
        values->of[to] = shadow_get(u->prefetched[i] + column * u->prefetched_step[i]);
        values->type[to] = u->prefetched_wide[i] ? MN_F32 : MN_BF16;
    }
    for (int i = 0; i < u->n_epis; i++) {
        const mn_decode_epi_instr *e = &epis[i];
        mn_dtype type, other;
        const bool last = decay && i == u->n_epis - 1;
        const uint64_t a = epi_input(&e->in[0], values, column, &type);
        const uint64_t b = e->n_inputs > 1 ? epi_input(&e->in[1], values, column, &other) : 0;
        const mn_dtype to = e->wide ? MN_F32 : MN_BF16;
        const uint64_t y = shadow_stored(e->kind, shadow_cell(e->kind, e->f, e->scale, e->shift, a,
                                                              b), type, to);
        values->of[2 + i] = y;
        values->type[2 + i] = to;
        if (e->per > 1 && column > 0) continue;
        char *at = last ? (char *)(u->to + column) : e->to + column * (e->wide ? 4 : 2);
        shadow_put(at, y);
        if (!e->wide) put_word(last ? u->to_handoff : e->to_handoff, column, y);
        for (int half = 0; half < 2 && e->wide; half++) {
            put_word(e->to_handoff, 2 * column + half, y);
        }
    }
}

static void run_convolution(const mn_decode_out_tile *u, int column, uint64_t x) {
    uint64_t tail0[MN_DECODE_TAPS - 1], tail[MN_DECODE_TAPS - 1];
    for (int i = 0; i < MN_DECODE_TAPS - 1 && u->tail0; i++) {
        tail0[i] = shadow_get(u->tail0 + i * u->N + column);
    }
    const uint64_t bias = u->taps_bias ? shadow_get(u->taps_bias + column) : 0;
    const uint64_t y = shadow_conv(tail, u->f, x, u->tail0 ? tail0 : NULL, MN_DECODE_TAPS,
                                   u->taps + column * MN_DECODE_TAPS, bias);
    shadow_put(u->to + column, y);
    put_word(u->to_handoff, column, y);
    for (int i = 0; i < MN_DECODE_TAPS - 1 && u->tail; i++) {
        shadow_put(u->tail + i * u->N + column, tail[i]);
    }
}

static uint64_t product_of(const mn_decode_gemm_instr *p, const mn_decode_out_tile *u, int k,
                           int column, uint64_t of_row) {
    const mn_decode_col_tile *tile = &p->col_tile[u->col_tile[k]];
    const char *weights = tile->rows + (int64_t)column * tile->step;
    if (tile->n_rows != u->n_rows) shadow_fail("a column tile has %d rows", tile->n_rows);
    for (int64_t i = 0; i < p->K; i++) loads_ahead(weights + 2 * i);
    uint64_t bias = u->bias[k] && !u->wide_bias[k] ? shadow_get(u->bias[k] + column) : 0;
    if (u->wide_bias[k]) {
        bias = shadow_stored(MN_DECODE_MOVE, shadow_get(u->wide_bias[k] + column), MN_F32,
                             MN_BF16);
        shadow_put((void *)(u->bias[k] + column), bias);
    }
    return shadow_column(of_row, weights, p->K, bias);
}

static void run_column(const mn_decode_gemm_instr *p, const mn_decode_out_tile *u,
                       const mn_decode_epi_instr *epis, int column, uint64_t of_row) {
    column_values v = { .type = { MN_BF16, MN_BF16 } };
    for (int k = 0; k < u->n_col_tiles; k++) v.of[k] = product_of(p, u, k, column, of_row);
    uint64_t y = v.of[0];
    if (u->form == MN_DECODE_EPI_ADD) {
        const uint64_t plus = word(u->plus.at, column + u->plus.odd);
        y = shadow_cell(MN_DECODE_PAIR, MN_PAIR_ADD, 0.0, 0.0, y, plus);
    } else if (u->form == MN_DECODE_EPI_ACT) {
        y = shadow_cell(MN_DECODE_UNARY, u->f, 0.0, 0.0, y, v.of[1]);
    }
    if (u->form <= MN_DECODE_EPI_ACT) {
        shadow_put(u->to + column, y);
        put_word(u->to_handoff, column, y);
    } else if (u->form == MN_DECODE_EPI_CONV) {
        run_convolution(u, column, y);
    } else if (u->form == MN_DECODE_EPI_F32) {
        shadow_put((float *)u->to + column, y);
    } else {
        run_list(u, epis, column, &v);
    }
    for (int k = 0; k < 2; k++) {
        if (u->c[k] && !u->stores_c) shadow_fail("a product is not stored");
        if (u->c[k]) shadow_put(u->c[k] + column, v.of[k]);
        if (u->bias[k] && !u->biased) shadow_fail("a bias is not added");
    }
}

static void run_gemms(const mn_decode_instr *instr) {
    const mn_decode_gemm_instr *p = &instr->gemms;
    const mn_decode_epi_instr *epis = (const void *)((const char *)instr + instr->epis_at);
    uint64_t *row = malloc((size_t)p->K * sizeof *row);
    if (!row) abort();
    make_row(row, p);
    const uint64_t of_row = shadow_row(row, p->K);
    for (int i = 0; i < p->n_out_tiles && !m.blocked; i++) {
        const mn_decode_out_tile *u = &p->out_tile[i];
        for (int column = 0; column < u->n_rows; column++) {
            run_column(p, u, epis + u->first_epi, column, of_row);
        }
    }
    free(row);
}

/* Queries or keys of a head, normalised where a norm is in front, as a row. */
static uint64_t vector_of(const mn_decode_recurrence_instr *p, const mn_decode_source *from,
                          const mn_decode_qk_norm *norm) {
    uint64_t row[MN_DECODE_STATE_ROWS];
    word_row(row, from, p->K);
    const uint64_t of_row = shadow_row(row, p->K);
    for (int k = 0; k < p->K && norm->there; k++) {
        row[k] = shadow_l2(norm->plus, norm->most, of_row, row[k]);
        if (norm->to) shadow_put(norm->to + k, row[k]);
    }
    return shadow_row(row, p->K);
}

static void run_recurrence(const mn_decode_recurrence_instr *p) {
    uint64_t row[MN_DECODE_STATE_ROWS], state[MN_DECODE_STATE_ROWS];
    shadow_column_of_state of = { .K = p->K, .scale = p->scale, .delta_rule = p->delta_rule };
    of.q = vector_of(p, &p->q, &p->front[0]);
    of.key = vector_of(p, &p->e, &p->front[1]);
    const int n = p->by_channel ? p->K : 1;
    if (p->has_g) word_row(row, &p->g, n);
    if (p->has_g) of.g = shadow_row(row, n);
    if (p->has_beta) word_row(row, &p->beta, 1);
    if (p->has_beta) of.beta = shadow_row(row, 1);
    for (int column = 0; column < MN_DECODE_TILE_V && !m.blocked; column++) {
        of.v = word(p->v.at, column);
        for (int k = 0; k < p->K; k++) {
            state[k] = shadow_get(p->state + (int64_t)k * p->V + column);
        }
        const uint64_t o = shadow_recurrence(state, &of);
        for (int k = 0; k < p->K; k++) {
            shadow_put(p->state + (int64_t)k * p->V + column, state[k]);
        }
        shadow_put(p->o + column, o);
        put_word(p->o_handoff, column, o);
        if (!p->sum.to) continue;
        const uint64_t plus = word(p->plus.at, column + p->plus.odd);
        const uint64_t sum = shadow_cell(MN_DECODE_PAIR, MN_PAIR_ADD, 0.0, 0.0, o, plus);
        shadow_put(p->sum.to + column, sum);
        put_word(p->sum.handoff, column, sum);
    }
}

/* ---- memories with what is around them ------------------------------------------------------- */

/* A row of queries or keys in words, normalised where a norm is in front. */
static void normed_row(uint64_t *row, const mn_decode_source *from, const mn_decode_qk_norm *norm,
                       int K) {
    word_row(row, from, K);
    const uint64_t of_row = shadow_row(row, K);
    for (int k = 0; k < K && norm->there; k++) {
        row[k] = shadow_l2(norm->plus, norm->most, of_row, row[k]);
        if (norm->to) shadow_put(norm->to + k, row[k]);
    }
}

static void put_result(const mn_decode_result_at *at, int column, uint64_t tag) {
    if (!at->to) return;
    shadow_put(at->to + column, tag);
    put_word(at->handoff, column, tag);
}

static uint64_t pair_of(mn_pair_kind kind, uint64_t a, uint64_t b) {
    return shadow_cell(MN_DECODE_PAIR, kind, 0.0, 0.0, a, b);
}

/* exp of the head's prior, in both types. */
static uint64_t prior_of(const mn_decode_palimpsa_instr *p) {
    const uint64_t ip = shadow_cell(MN_DECODE_UNARY, MN_UNARY_EXP, 0.0, 0.0,
                                    shadow_get(p->prior), 0);
    if (p->exp_prior) shadow_put(p->exp_prior, ip);
    if (p->wide_prior) shadow_put(p->wide_prior, ip);
    return ip;
}

static void palimpsa_column(const mn_decode_palimpsa_instr *p, const uint64_t *q,
                            const uint64_t *k, uint64_t ip, int column) {
    const int64_t V = p->V, to = p->column + column;
    uint64_t mu[MN_DECODE_STATE_ROWS], imp[MN_DECODE_STATE_ROWS];
    const uint64_t raw = word(p->v.at, column + p->v.odd), b = word(p->b.at, column + p->b.odd);
    const uint64_t g = word(p->g.at, p->g.odd);
    const uint64_t v = p->has_by ? pair_of(MN_PAIR_MULTIPLY, raw, word(p->by.at, p->by.odd)) : raw;
    const mn_importance_args numbers = { .scale = p->scale };
    for (int i = 0; i < p->K; i++) {
        mu[i] = shadow_get(p->mean + i * V + column);
        imp[i] = shadow_get(p->importance + i * V + column);
    }
    const shadow_input inputs[] = { { p->K, q }, { p->K, k }, { 1, &v }, { 1, &b }, { 1, &g },
                                    { 1, &ip }, { p->K, mu }, { p->K, imp } };
    const uint64_t made = shadow_made(MN_OP_importance, &numbers, inputs, MN_COUNTOF(inputs));
    for (int i = 0; i < p->K; i++) {
        const int64_t cell = ((int64_t)p->head * p->K + i) * V + to;
        shadow_put(p->mean + i * V + column, shadow_made_at(made, MN_OP_importance, "mu", cell));
        shadow_put(p->importance + i * V + column,
                   shadow_made_at(made, MN_OP_importance, "imp", cell));
    }
    const uint64_t o = shadow_made_at(made, MN_OP_importance, "o", p->head * V + to);
    if (p->has_by) put_result(&p->gated, column, v);
    put_result(&p->o, column, o);
    if (!p->skip) return;
    const uint64_t skipped = pair_of(MN_PAIR_MULTIPLY, raw, shadow_get(p->skip));
    put_result(&p->skipped, column, skipped);
    put_result(&p->sum, column, pair_of(MN_PAIR_ADD, o, skipped));
}

static void run_palimpsa(const mn_decode_palimpsa_instr *p) {
    uint64_t q[MN_DECODE_STATE_ROWS], k[MN_DECODE_STATE_ROWS];
    normed_row(q, &p->q, &p->front[0], p->K);
    normed_row(k, &p->k, &p->front[1], p->K);
    const uint64_t ip = prior_of(p);
    for (int column = 0; column < MN_DECODE_TILE_V && !m.blocked; column++) {
        palimpsa_column(p, q, k, ip, column);
    }
}

enum { KLA_SLOTS = MN_DECODE_KLA_LANES * MN_DECODE_KLA_SLOTS };

/* a and p of a channel, from parameters that are rounded. */
static void kla_dynamics(uint64_t *a, uint64_t *noise, const mn_decode_kla_instr *p, int channel) {
    uint64_t of[MN_DECODE_KLA_DYNAMICS][KLA_SLOTS];
    const mn_kla_discretise_args numbers = { .mode = p->mode };
    shadow_input inputs[MN_DECODE_KLA_DYNAMICS];
    for (int i = 0; i < MN_DECODE_KLA_DYNAMICS; i++) {
        inputs[i] = (shadow_input){ p->K, of[i] };
        for (int s = 0; s < p->K; s++) {
            const int at = channel * p->K + s;
            of[i][s] = shadow_stored(MN_DECODE_MOVE, shadow_get(p->dynamics[i] + at), MN_F32,
                                     MN_BF16);
            shadow_put(p->rounded[i] + at, of[i][s]);
        }
    }
    const uint64_t made = shadow_made(MN_OP_kla_discretise, &numbers, inputs,
                                      MN_DECODE_KLA_DYNAMICS);
    for (int s = 0; s < p->K; s++) {
        const int64_t cell = (int64_t)(p->column + channel) * p->K + s;
        a[s] = shadow_made_at(made, MN_OP_kla_discretise, "abar", cell);
        noise[s] = shadow_made_at(made, MN_OP_kla_discretise, "pbar", cell);
        shadow_put(p->a + channel * p->K + s, a[s]);
        shadow_put(p->p + channel * p->K + s, noise[s]);
    }
}

static void kla_results(const mn_decode_kla_instr *p, int channel, uint64_t y) {
    uint64_t sum = y;
    put_result(&p->y, channel, y);
    if (p->weight) {
        const char *weight = (const char *)p->weight +
                             channel * p->weight_step * (p->weight_wide ? 4 : 2);
        const uint64_t weighted = pair_of(MN_PAIR_MULTIPLY, word(p->z.at, channel + p->z.odd),
                                          shadow_get(weight));
        put_result(&p->weighted, channel, weighted);
        sum = pair_of(MN_PAIR_ADD, y, weighted);
        put_result(&p->sum, channel, sum);
    }
    if (!p->has_gate) return;
    put_result(&p->out, channel, pair_of(MN_PAIR_MULTIPLY, sum,
                                         word(p->gate.at, channel + p->gate.odd)));
}

static void kla_channel(const mn_decode_kla_instr *p, const uint64_t *q, const uint64_t *k,
                        int channel) {
    uint64_t a[KLA_SLOTS], noise[KLA_SLOTS], lam[KLA_SLOTS], eta[KLA_SLOTS];
    const mn_moebius_args numbers = { .from_prior = p->from_prior };
    const uint64_t v = word(p->v.at, channel + p->v.odd);
    const uint64_t prec = word(p->prec.at, channel + p->prec.odd);
    kla_dynamics(a, noise, p, channel);
    for (int s = 0; s < p->K; s++) {
        lam[s] = shadow_get(p->lam + channel * p->K + s);
        eta[s] = shadow_get(p->eta + channel * p->K + s);
    }
    const shadow_input inputs[] = { { 1, &v }, { 1, &prec }, { p->K, k }, { p->K, q },
                                    { p->K, a }, { p->K, noise }, { p->K, lam }, { p->K, eta } };
    const uint64_t made = shadow_made(MN_OP_moebius, &numbers, inputs, MN_COUNTOF(inputs));
    for (int s = 0; s < p->K; s++) {
        const int64_t cell = (int64_t)(p->column + channel) * p->K + s;
        shadow_put(p->lam + channel * p->K + s, shadow_made_at(made, MN_OP_moebius, "lam", cell));
        shadow_put(p->eta + channel * p->K + s, shadow_made_at(made, MN_OP_moebius, "eta", cell));
    }
    kla_results(p, channel, shadow_made_at(made, MN_OP_moebius, "y", p->column + channel));
}

static void run_kla(const mn_decode_kla_instr *p) {
    uint64_t q[KLA_SLOTS], k[KLA_SLOTS];
    normed_row(q, &p->q, &p->front[0], p->K);
    normed_row(k, &p->k, &p->front[1], p->K);
    for (int channel = 0; channel < MN_DECODE_KLA_COLUMNS && !m.blocked; channel++) {
        kla_channel(p, q, k, channel);
    }
}

/* The token is given where the operator's arguments say that it lies. */
static void run_bayes(const mn_decode_bayes_instr *p) {
    const mn_bayes_args *a = (const mn_bayes_args *)p->args;
    const int64_t h = p->head, G = mn_max(a->call.G, 1);
    const mn_in *rows[] = { &a->q, &a->k };
    uint64_t row[MN_DECODE_BAYES_WIDEST];
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) {
        normed_row(row, i ? &p->k : &p->q, &p->front[i], p->K);
        for (int k = 0; k < p->K; k++) {
            give((const char *)rows[i]->data + 2 * (h * p->K + k), row[k]);
        }
    }
    const uint64_t la = word(p->la.at, p->la.odd);
    const uint64_t p0 = shadow_cell(MN_DECODE_FILL, 0, 0.0, p->p0, 0, 0);
    for (int k = 0; k < p->K; k++) {
        if (p->la_to) shadow_put(p->la_to + k, la);
        give((const char *)a->la.data + 2 * (h * p->K + k), la);
    }
    if (p->p0_to) shadow_put(p->p0_to, p0);
    give((const char *)a->p0.data + 2 * h, p0);
    give((const char *)a->l2.data + 2 * h, word(p->l2.at, p->l2.odd));
    give((const char *)a->r2.data + 2 * (h * G + p->group), word(p->r2.at, p->r2.odd));
    words_for((const char *)a->v.data + 2 * (h * a->call.V + p->first), &p->v, p->V);
    if (m.blocked) return;
    shadow_step(MN_DECODE_STEP_bayes, a, h, p->group);
    for (int i = 0; i < p->V; i++) put_word(p->o.handoff, i, shadow_get(p->o.to + i));
}

/* A key-value head's part of the token comes as words. */
static void attend_words(const mn_decode_attend_instr *p) {
    const mn_decode_attention *a = &p->of;
    const int64_t group = a->H / a->J, h = p->head;
    words_for((const char *)a->q + 2 * h * group * a->K, &p->q, group * a->K);
    words_for((const char *)a->k + 2 * h * a->K, &p->k, a->K);
    words_for((const char *)a->v + 2 * h * a->V, &p->v, a->V);
}

/* The words of number i of a split of query head h. */
static size_t split_place(const mn_decode_stream_instr *p, int64_t h, int64_t split, int64_t i) {
    const int64_t row = h * p->n_splits + split;
    return word_place(p->splits - m.handoff + 4 * (row * mn_decode_split_row(p->of.V) + i));
}

/* Splits go to words; to memory go, in their place, parts, which no other block reads. */
static void run_splits(const mn_decode_stream_instr *p) {
    const mn_decode_attention *a = &p->of;
    const int64_t group = a->H / a->J, j = p->head;
    words_for((const char *)a->q + 2 * j * group * a->K, &p->q, group * a->K);
    words_for((const char *)a->k + 2 * j * a->K, &p->k, a->K);
    words_for((const char *)a->v + 2 * j * a->V, &p->v, a->V);
    for (int64_t split = p->slot; split < p->n_splits; split += p->n_slots) {
        shadow_attend(a, j, split, p->n_splits);
        for (int64_t i = 0; i < group * (a->V + 2); i++) {
            const int64_t h = j * group + i / (a->V + 2), column = i % (a->V + 2);
            const uint64_t tag = shadow_split(a, h, split, column);
            const size_t place = split_place(p, h, split, column);
            if (m.n + 2 > MOST_PENDING) abort();
            m.list[m.n++] = (written){ place, tag, true, false };
            m.list[m.n++] = (written){ place + 1, tag, true, false };
        }
    }
}

static void run_stream(const mn_decode_stream_instr *p) {
    const int64_t n = p->of.V + 2;
    if (p->n_splits != mn_decode_splits(p->of.J)) shadow_fail("%d splits", p->n_splits);
    if (p->n_slots > 0) {
        run_splits(p);
        return;
    }
    uint64_t *splits = calloc((size_t)(p->n_splits * n), sizeof *splits);
    if (!splits) abort();
    for (int64_t i = 0; i < p->n_splits * n; i++) {
        const size_t place = split_place(p, p->head, i / n, i % n);
        splits[i] = m.word[place];
        m.blocked |= !m.word[place] || !m.word[place + 1];
    }
    if (!m.blocked) {
        shadow_combine_splits(&p->of, p->head, splits);
        for (int64_t v = 0; v < p->of.V; v++) {
            const mn_decode_bf16 *o = (const mn_decode_bf16 *)p->of.o + p->head * p->of.V + v;
            put_word(p->o_handoff, v, shadow_get(o));
        }
    }
    free(splits);
}

static void run_work(const mn_decode_instr *instr) {
    const mn_decode_work_instr *w = &instr->work;
    for (int i = 0; instr->kind == MN_DECODE_SMALL && i < w->small.n; i++) {
        shadow_job job;
        if ((uintptr_t)w->small.job[i] % 16 != 0) shadow_fail("a job is not aligned");
        memcpy(&job, w->small.job[i], sizeof job);
        shadow_small(shadow_job_at(job.of), job.begin, job.end);
    }
    if (instr->kind == MN_DECODE_STEP) {
        const mn_decode_step_instr *step = &w->step;
        if ((uintptr_t)step->args % 16 != 0) shadow_fail("arguments of a step are not aligned");
        shadow_step(step->step, step->args, step->head, step->column);
    }
    if (instr->kind == MN_DECODE_ATTEND) {
        const mn_decode_attend_instr *attend = &w->attend;
        if (attend->by_words) attend_words(attend);
        if (attend->n_slots == 0) shadow_combine(&attend->of, attend->head);
        else shadow_attend(&attend->of, attend->head, attend->slot, attend->n_slots);
    }
    if (instr->kind == MN_DECODE_HYPER) {
        const mn_decode_hyper_instr *p = &w->hyper;
        shadow_hyper_piece(&p->of, p->phase, p->head, p->slot, p->n_slots);
    }
    for (int i = 0; i < w->n_published; i++) {
        const mn_decode_publication *out = &w->published[i];
        for (int k = 0; k < out->count; k++) put_word(out->words, k, shadow_get(out->from + k));
    }
}

/* Jobs of an instruction that do not wait for those in front may run beside them. */
static void check_beside(const mn_decode_small_instr *p) {
    for (int i = 1; i < p->n; i++) {
        shadow_job job;
        memcpy(&job, p->job[i], sizeof job);
        const mn_decode_op *w = shadow_job_at(job.of);
        for (int k = i - 1; k >= 0 && !job.waits; k--) {
            shadow_job front;
            memcpy(&front, p->job[k], sizeof front);
            const mn_decode_op *f = shadow_job_at(front.of);
            for (int a = 0; a < MN_DECODE_VIEWS; a++) {
                for (int b = 0; b < MN_DECODE_VIEWS; b++) {
                    const bool same = w->at[a].data && w->at[a].data == f->at[b].data;
                    const int results = f->kind <= MN_DECODE_PAIR ? 2 : f->kind == MN_DECODE_MOVE;
                    if (same && b >= results && f->kind <= MN_DECODE_FILL) {
                        shadow_fail("a job does not wait for the one in front that it reads");
                    }
                }
            }
            if (front.waits) break;
        }
    }
}

static void run_instr(const mn_decode_instr *instr) {
    if (instr->kind == MN_DECODE_COPY) run_copy(&instr->copy);
    else if (instr->kind == MN_DECODE_GEMM) run_gemms(instr);
    else if (instr->kind == MN_DECODE_RECURRENCE) run_recurrence(&instr->memory);
    else if (instr->kind == MN_DECODE_PALIMPSA) run_palimpsa(&instr->palimpsa);
    else if (instr->kind == MN_DECODE_KLA) run_kla(&instr->kla);
    else if (instr->kind == MN_DECODE_BAYES) run_bayes(&instr->bayes);
    else if (instr->kind == MN_DECODE_STREAM) run_stream(&instr->stream);
    else if (mn_decode_is_work(instr->kind)) run_work(instr);
    if (instr->kind == MN_DECODE_SMALL) check_beside(&instr->work.small);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* The next instruction of a block, if it can go on. */
static bool advance(block_at *blocks, int b, int n_blocks, shadow_counts *counts) {
    block_at *at = &blocks[b];
    const mn_decode_instr *instr = (const mn_decode_instr *)at->next;
    if (instr->sync && instr->sync != at->passed && instr->sync != at->passed + 1) {
        shadow_fail("block %d comes to barrier %u after %u", b, instr->sync, at->passed);
    }
    if (instr->sync) at->arrived = instr->sync;
    for (int i = 0; i < n_blocks && instr->sync; i++) {
        if (blocks[i].arrived < instr->sync) return false;
    }
    if (instr->sync) at->passed = instr->sync;
    m.block = b;
    m.epoch = m.first + at->passed;
    m.blocked = false;
    m.copies = instr->kind == MN_DECODE_COPY;
    m.rereads = mn_decode_is_work(instr->kind) || instr->kind == MN_DECODE_BAYES ||
                instr->kind == MN_DECODE_STREAM;
    m.trace = shadow_mix(shadow_mix(at->trace, (uint64_t)instr->kind), instr->sync);
    run_instr(instr);
    if (m.blocked) {
        m.n = 0;
        return false;
    }
    commit();
    at->trace = m.trace;
    counts->steps += instr->kind == MN_DECODE_STEP;
    at->next += at->bytes;
    at->bytes = instr->next_bytes;
    at->done++;
    return true;
}

static int turn(int i, int n_blocks, shadow_order order, uint64_t *seed) {
    if (order == SHADOW_LAST) return n_blocks - 1 - i;
    return order == SHADOW_ANY ? (int)(mn_rng_bits(5, 6, (*seed)++) % (uint64_t)n_blocks) : i;
}

/* All blocks until none can go on; whether all have ended. */
static bool run_blocks(block_at *blocks, int n_blocks, int n_instrs, shadow_order order,
                       uint64_t *seed, shadow_counts *counts) {
    int left = n_blocks;
    bool moved = true;
    while (left > 0 && moved) {
        moved = false;
        for (int i = 0; i < (order == SHADOW_ANY ? 8 * n_blocks : n_blocks); i++) {
            const int b = turn(i, n_blocks, order, seed);
            while (blocks[b].done < n_instrs && advance(blocks, b, n_blocks, counts)) {
                moved = true;
                left -= blocks[b].done == n_instrs;
                if (order == SHADOW_ANY) break;
            }
        }
    }
    return left == 0;
}

static void begin_blocks(block_at *blocks, int n_blocks) {
    const mn_decode_entry *entries =
        (const mn_decode_entry *)(m.image + sizeof(mn_decode_header));
    for (int i = 0; i < n_blocks; i++) {
        blocks[i] = (block_at){ m.image + entries[i].at, entries[i].bytes, 0, 0, 0, 7 };
    }
}

void shadow_megakernel(const mn_decode_launch_args *given, const void *image, int n_blocks,
                       shadow_order order, uint64_t *seed, shadow_counts *counts) {
    static const shadow_watch watch = { reads, writes, kept };
    block_at *blocks = calloc((size_t)n_blocks, sizeof *blocks);
    unsigned barriers = 0;
    m.image = image;
    m.handoff = given->handoff_at;
    m.words = given->words;
    m.word = calloc((size_t)given->words / 2 + 1, sizeof *m.word);
    m.seen = calloc((size_t)n_blocks * (size_t)(given->words / 2 + 1), sizeof *m.seen);
    m.list = malloc(MOST_PENDING * sizeof *m.list);
    m.first = ++last_epoch;
    m.n = m.n_own = 0;
    if (!blocks || !m.word || !m.seen || !m.list) abort();
    begin_blocks(blocks, n_blocks);
    shadow_use(SHADOW_DONE);
    shadow_watch_by(&watch);
    const bool ended = run_blocks(blocks, n_blocks, given->n_stages, order, seed, counts);
    shadow_watch_by(NULL);
    for (int i = 0; i < n_blocks && !ended; i++) {
        if (blocks[i].done == given->n_stages) continue;
        shadow_fail("block %d waits in stage %d for ever", i, blocks[i].done);
        break;
    }
    for (int i = 0; i < n_blocks; i++) {
        counts->trace = shadow_mix(counts->trace, blocks[i].trace);
        barriers = blocks[i].passed > barriers ? blocks[i].passed : barriers;
    }
    last_epoch += barriers;
    counts->stages += given->n_stages;
    counts->barriers += (int)barriers;
    counts->megakernels++;
    free(blocks);
    free(m.word);
    free(m.seen);
    free(m.list);
}
