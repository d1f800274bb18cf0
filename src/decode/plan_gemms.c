/* plan_gemms.c - products of one row as a stage of a megakernel (kernels/decode.h): what becomes of
 * their columns, and which block has which of them.
 *
 * Tiles of a stage are shared out among blocks; what a block cannot take in one instruction becomes
 * further instructions, which are stages of their own. */
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "decode/defer.h"
#include "decode/plan.h"

/* ---- the row --------------------------------------------------------------------------------- */

static bool is_vector(const mn_view *view) {
    return !view->data || (view->dtype == MN_BF16 && (uintptr_t)view->data % 8 == 0);
}

/* Whether a stage can make its row by that small work. */
bool mn_megakernel_takes_row(const mn_decode_op *first, int64_t K) {
    const bool gated = first->kind == MN_DECODE_GATED_NORM;
    const int64_t width = first->shape[3], groups = K / (width > 0 ? width : 1);
    const int64_t warps = width / MN_DECODE_WARP_K;
    const bool narrow = gated && groups > 1 && first->scale > 1e-30 &&    // of zeros it is finite
                        (width == MN_DECODE_WARP_K / 2 || width == MN_DECODE_WARP_K / 4);
    const bool even = narrow || warps == 1 || warps == 2 || warps == 4 || warps == 8;
    if (!gated && first->kind != MN_DECODE_RMS_NORM) return false;
    if (first->shape[2] * width != K) return false;
    const bool whole = narrow || width % MN_DECODE_WARP_K == 0;
    if (groups > 1 && (!whole || !even || K > MN_DECODE_CHUNK)) return false;
    for (int i = 0; i <= (gated ? 3 : 2); i++) {
        if (!is_vector(&first->at[i])) return false;
    }
    return !gated || first->at[1].data;
}

/* How the row comes; false where no stage can make it. */
static bool fill_prologue(mn_decode_gemm_instr *to, mn_stage_ranges *r,
                          const mn_decode_gemms *given) {
    const mn_decode_op *first = given->first;
    to->K = (int)given->K;
    to->chunks = (unsigned char)mn_ceil_div(given->K, MN_DECODE_CHUNK);
    to->way = MN_DECODE_PLAIN;
    to->row_handoff = MN_DECODE_NO_WORDS;
    if (given->K == 0) return true;    // works without products
    if (!first) {
        to->x = mn_stage_source(r, given->a, given->K, MN_DECODE_PER_LINE).at;
        return true;
    }
    if (!mn_megakernel_takes_row(first, given->K)) return false;
    const bool gated = first->kind == MN_DECODE_GATED_NORM;
    const int64_t width = first->shape[3], groups = given->K / width;
    const bool shared = groups > 1 && (!gated || first->shape[1] == 1);    // weights of all groups
    to->way = gated ? MN_DECODE_GATED : MN_DECODE_NORMED;
    to->group = (unsigned char)(groups > 1 ? width / MN_DECODE_WARP_K : MN_DECODE_WARPS);
    to->lanes = (unsigned char)(groups > 1 && width < MN_DECODE_WARP_K ? width / 4 : 0);
    to->sigmoid = gated && first->f == MN_DECODE_SIGMOID;
    to->gate_first = gated && first->order == MN_DECODE_GATE_FIRST;
    to->inverse_width = 1.0f / (float)width;
    to->epsilon = (float)first->scale;
    to->weight = first->at[gated ? 2 : 1].data;
    to->wrap = shared ? (int)width - 1 : INT32_MAX;
    to->row = first->at[gated ? 3 : 2].data;
    mn_stage_reads(r, to->weight, shared ? width : given->K, 2);
    to->x = mn_stage_source(r, first->at[0].data, given->K, MN_DECODE_PER_LINE).at;
    if (gated) to->z = mn_stage_source(r, first->at[1].data, given->K, MN_DECODE_PER_LINE).at;
    mn_stage_writes(r, to->row, given->K, 2, given->shares_a);
    return true;
}

/* ---- which products are joined --------------------------------------------------------------- */

/* What becomes of the columns of one product, or of two joined ones. */
typedef struct fused_tile {
    int product[2], n_gemms, n_epis, epis[MN_DECODE_EPILOGUES];
} fused_tile;

/* The input of an epilogue: product or epilogue of the stage, or -1. */
static int origin(const mn_decode_gemms *given, int epilogue, int k, bool *is_product) {
    const void *data = given->epilogue[epilogue].work.at[k].data;
    int found = -1;
    *is_product = false;
    for (int i = 0; i < given->n && data; i++) {
        if (given->of[i].c != data) continue;
        found = i;
        *is_product = true;
    }
    for (int i = 0; i < epilogue && data; i++) {
        if (mn_decode_result(&given->epilogue[i].work)->data != data) continue;
        found = i;
        *is_product = false;
    }
    return found;
}

/* of[i]: the first of the products that product i is joined with. */
static void join_gemms(int *of, const mn_decode_gemms *given) {
    for (int i = 0; i < given->n; i++) of[i] = i;
    for (int e = 0; e < given->n_epilogues; e++) {
        for (int k = 0; k < mn_decode_inputs_of(given->epilogue[e].work.kind); k++) {
            bool is_product;
            const int from = origin(given, e, k, &is_product);
            if (from < 0) continue;
            const int product = is_product ? from : given->epilogue[from].product;
            const int one = of[given->epilogue[e].product], other = of[product];
            for (int i = 0; i < given->n; i++) {
                if (of[i] == one || of[i] == other) of[i] = one < other ? one : other;
            }
        }
    }
}

/* Products that epilogues join become one tile; false where these are more than two. */
static bool fuse_gemms(fused_tile *tiles, int *n_tiles, const mn_decode_gemms *given) {
    int of[MN_DECODE_GEMMS];
    *n_tiles = 0;
    join_gemms(of, given);
    for (int lead = 0; lead < given->n; lead++) {
        if (of[lead] != lead) continue;
        fused_tile *tile = &tiles[(*n_tiles)++];
        *tile = (fused_tile){ 0 };
        for (int i = lead; i < given->n; i++) {
            if (of[i] != lead) continue;
            if (tile->n_gemms == 2 || given->of[i].N != given->of[lead].N) return false;
            tile->product[tile->n_gemms++] = i;
        }
        for (int e = 0; e < given->n_epilogues; e++) {
            if (of[given->epilogue[e].product] == lead) tile->epis[tile->n_epis++] = e;
        }
    }
    return true;
}

/* Value of a tile that an epilogue's input is; -1: memory. */
static int value_of(const fused_tile *tile, const mn_decode_gemms *given, int epilogue, int k) {
    bool is_product;
    const int from = origin(given, epilogue, k, &is_product);
    if (from < 0) return -1;
    for (int i = 0; i < tile->n_gemms && is_product; i++) {
        if (tile->product[i] == from) return i;
    }
    for (int i = 0; i < tile->n_epis && !is_product; i++) {
        if (tile->epis[i] == from) return 2 + i;
    }
    return -1;
}

/* ---- what becomes of columns ----------------------------------------------------------------- */

static bool convolves_whole(const fused_tile *tile, const mn_decode_gemms *given) {
    const mn_decode_op *only = &given->epilogue[tile->epis[0]].work;
    return tile->n_gemms == 1 && only->shape[1] == MN_DECODE_TAPS &&
           value_of(tile, given, tile->epis[0], 0) == 0 &&
           (uintptr_t)only->at[1].data % 16 == 0 && only->at[1].dtype == MN_BF16 &&
           only->at[4].dtype == MN_BF16;
}

/* The tile's form; -1: there is none. */
static int form_of(const fused_tile *tile, const mn_decode_gemms *given) {
    bool adds = false;
    for (int i = 0; i < tile->n_gemms; i++) adds |= given->of[tile->product[i]].sum != NULL;
    if (tile->n_epis == 0) return adds ? MN_DECODE_EPI_ADD : MN_DECODE_EPI_STORE;
    const mn_decode_op *only = &given->epilogue[tile->epis[0]].work;
    const int64_t N = given->of[tile->product[0]].N;
    if (adds) return -1;
    if (tile->n_epis == 1 && only->kind == MN_DECODE_CONV) {
        return convolves_whole(tile, given) ? MN_DECODE_EPI_CONV : -1;
    }
    for (int i = 0; i < tile->n_epis; i++) {
        if (given->epilogue[tile->epis[i]].work.kind > MN_DECODE_MOVE) return -1;
    }
    if (given->K == 0) return MN_DECODE_EPI_LIST;
    const bool one = tile->n_epis == 1 && value_of(tile, given, tile->epis[0], 0) == 0 &&
                     mn_count4(only->shape) == N;
    if (one && tile->n_gemms == 1 && only->kind == MN_DECODE_MOVE) {
        return only->at[1].dtype == MN_F32 ? MN_DECODE_EPI_F32 : MN_DECODE_EPI_STORE;
    }
    const bool times = tile->n_gemms == 2 && value_of(tile, given, tile->epis[0], 1) == 1;
    const bool function = one && only->kind == MN_DECODE_UNARY &&
                          (times || (tile->n_gemms == 1 && !only->at[1].data)) &&
                          only->at[2].dtype == MN_BF16;
    return function ? MN_DECODE_EPI_ACT : MN_DECODE_EPI_LIST;
}

/* How many of N columns share an element of input k of a small work. */
static int columns_of(const mn_decode_op *work, int k, int64_t N) {
    int64_t elements = 1;
    for (int i = 0; i < 4; i++) elements *= work->at[k].stride[i] != 0 ? work->shape[i] : 1;
    return (int)(N / elements);
}

/* What is older than the megakernel is loaded ahead, while there is room for that, and so is
 * what an earlier stage wrote in float32; else it comes from words. */
static void fill_input(mn_stage_ranges *r, mn_decode_out_tile *to, mn_decode_epi_input *in,
                       const void *data, bool wide, int64_t N) {
    const int64_t count = N / in->per;
    for (int i = 0; i < MN_DECODE_PREFETCHED; i++) {
        if (!wide && mn_stage_is_written(r, data, count * 2)) break;
        if (to->prefetched[i]) continue;
        mn_stage_reads(r, data, count, wide ? 4 : 2);
        to->prefetched[i] = data;
        to->prefetched_wide[i] = wide;
        to->prefetched_step[i] = (unsigned char)(in->per > 1 ? 0 : wide ? 4 : 2);
        to->prefetched_per[i] = in->per;
        in->from = 2 + MN_DECODE_EPILOGUES + i;
        return;
    }
    r->fits = r->fits && !wide;
    in->source = mn_stage_source(r, data, count, in->per == 1 ? 2 : 1);
    in->source.step = in->per == 1;
}

/* A small work of a list, over all columns. */
static mn_decode_epi_instr epi_of(mn_stage_ranges *r, mn_decode_out_tile *to,
                                  const fused_tile *tile, const mn_decode_gemms *given,
                                  int epilogue) {
    const mn_decode_op *work = &given->epilogue[epilogue].work;
    const int inputs = mn_decode_inputs_of(work->kind);
    const int64_t N = given->of[tile->product[0]].N, own = mn_count4(work->shape);
    mn_decode_epi_instr e = { .kind = (short)work->kind, .f = (short)work->f, .narrow = 1,
                              .scale = (float)work->scale, .shift = (float)work->shift,
                              .per = (int)(N / own), .to_handoff = MN_DECODE_NO_WORDS,
                              .to = work->at[inputs].data,
                              .wide = work->at[inputs].dtype == MN_F32 };
    for (int k = 0; k <= inputs; k++) {
        e.narrow &= !work->at[k].data || work->at[k].dtype == MN_BF16;
    }
    for (int k = 0; k < inputs && k < 2; k++) {
        const mn_view *in = &work->at[k];
        if (!in->data) continue;
        e.n_inputs = k + 1;
        e.in[k].per = columns_of(work, k, N);
        e.in[k].from = value_of(tile, given, epilogue, k);
        if (e.in[k].from < 0) fill_input(r, to, &e.in[k], in->data, in->dtype == MN_F32, N);
    }
    mn_stage_writes(r, e.to, own, e.wide ? 4 : 2, e.per == 1);
    return e;
}

/* Whether a small work is made from values a and b of its tile, in either order; b: -1 where it has
 * one input. */
static bool makes(const mn_decode_epi_instr *e, int kind, int f, int a, int b) {
    const int x = e->in[0].from, y = e->n_inputs > 1 ? e->in[1].from : -1;
    return e->kind == kind && e->f == f && ((x == a && y == b) || (x == b && y == a));
}

/* Whether a list is x + dt, softplus of it, -exp(A), the product of the latter two. */
static bool decays(const mn_decode_out_tile *tile, const mn_decode_epi_instr *e) {
    enum { SUM = 2, PREFETCHED = 2 + MN_DECODE_EPILOGUES };
    return tile->n_epis == 4 && tile->n_col_tiles == 1 &&
           makes(&e[0], MN_DECODE_PAIR, MN_PAIR_ADD, 0, PREFETCHED) &&
           makes(&e[1], MN_DECODE_UNARY, MN_UNARY_SOFTPLUS, SUM, -1) &&
           makes(&e[2], MN_DECODE_UNARY, MN_UNARY_NEG_EXP, PREFETCHED + 1, -1) &&
           makes(&e[3], MN_DECODE_PAIR, MN_PAIR_MULTIPLY, SUM + 1, SUM + 2) &&
           e[0].per == 1 && e[1].per == 1 && e[3].per == 1 &&
           !e[0].wide && !e[1].wide && !e[3].wide;
}

static void fill_convolution(mn_decode_out_tile *to, mn_stage_ranges *r,
                             const mn_decode_op *work) {
    const int64_t N = to->N;
    to->taps = work->at[1].data;
    to->taps_bias = work->at[2].data;
    to->tail0 = work->at[3].data;
    to->to = work->at[4].data;
    to->tail = work->at[5].data;
    to->f = work->f != 0;
    mn_stage_reads(r, to->taps, N * MN_DECODE_TAPS, 2);
    mn_stage_reads(r, to->taps_bias, N, 2);
    if (to->tail0 != to->tail) mn_stage_reads(r, to->tail0, N * (MN_DECODE_TAPS - 1), 4);
    mn_stage_writes(r, to->tail, N * (MN_DECODE_TAPS - 1), 4, false);
    mn_stage_writes(r, to->to, N, 2, true);
}

/* The one work, if any, that a tile of a form other than a list ends with. */
static void fill_form(mn_decode_out_tile *to, mn_stage_ranges *r, const mn_decode_op *work) {
    if (to->form == MN_DECODE_EPI_ACT) {
        to->to = work->at[2].data;
        to->f = (unsigned char)work->f;
        mn_stage_writes(r, to->to, to->N, 2, true);
    } else if (to->form == MN_DECODE_EPI_STORE) {
        to->to = work->at[1].data;
        mn_stage_writes(r, to->to, to->N, 2, true);
    } else if (to->form == MN_DECODE_EPI_F32) {
        to->to = work->at[1].data;
        mn_stage_writes(r, to->to, to->N, 4, false);
    } else if (to->form == MN_DECODE_EPI_CONV) {
        fill_convolution(to, r, work);
    }
}

static void fill_products(mn_decode_out_tile *to, mn_stage_ranges *r, const fused_tile *tile,
                          const mn_decode_gemms *given) {
    const bool stores = to->form == MN_DECODE_EPI_STORE && tile->n_epis == 0;
    for (int i = 0; i < to->n_col_tiles; i++) {
        const mn_decode_gemm *product = &given->of[tile->product[i]];
        to->c[i] = product->c;
        to->bias[i] = product->bias;
        mn_stage_writes(r, product->c, to->N, 2, stores);
        to->wide_bias[i] = product->wide_bias;
        mn_stage_reads(r, product->wide_bias, to->N, 4);
        if (product->wide_bias) mn_stage_writes(r, product->bias, to->N, 2, false);
        else mn_stage_reads(r, product->bias, to->N, 2);
    }
    to->biased = to->bias[0] || to->bias[1];
    if (stores) {
        to->to = to->c[0];
        to->c[0] = NULL;
    }
    to->stores_c = to->c[0] || to->c[1];
}

/* A tile of all columns, and its small works. */
static bool fill_out_tile(mn_decode_out_tile *to, mn_decode_epi_instr *epis, mn_stage_ranges *r,
                          const fused_tile *tile, const mn_decode_gemms *given) {
    const int form = form_of(tile, given);
    if (form < 0) return false;
    const mn_decode_gemm *first = &given->of[tile->product[0]];
    const int n_col_tiles = given->K > 0 ? tile->n_gemms : 0;
    *to = (mn_decode_out_tile){ .form = (unsigned char)form, .N = (int)first->N,
                                .n_col_tiles = (unsigned char)n_col_tiles,
                                .to_handoff = MN_DECODE_NO_WORDS };
    fill_products(to, r, tile, given);
    if (form == MN_DECODE_EPI_ADD) {
        to->to = first->sum;
        to->plus = mn_stage_source(r, first->plus, first->N, MN_DECODE_TILE_N);
        mn_stage_writes(r, to->to, first->N, 2, true);
        return tile->n_gemms == 1;
    }
    if (tile->n_epis > 0) fill_form(to, r, &given->epilogue[tile->epis[0]].work);
    to->n_epis = (unsigned char)(form == MN_DECODE_EPI_LIST ? tile->n_epis : 0);
    for (int i = 0; i < to->n_epis; i++) epis[i] = epi_of(r, to, tile, given, tile->epis[i]);
    if (form == MN_DECODE_EPI_LIST && decays(to, epis)) {
        to->form = MN_DECODE_EPI_DECAY;
        to->f = epis[2].wide != 0;
        to->to = (mn_decode_bf16 *)epis[to->n_epis - 1].to;
    }
    return true;
}

/* ---- columns from a place on ----------------------------------------------------------------- */

static mn_decode_out_tile out_tile_from(const mn_decode_out_tile *all, int from) {
    mn_decode_out_tile u = *all;
    u.n_rows = (unsigned char)mn_min(MN_DECODE_TILE_N, all->N - from);
    if (u.to_handoff >= 0) u.to_handoff = mn_decode_word_from(u.to_handoff, (unsigned)from);
    for (int i = 0; i < 2; i++) {
        if (u.c[i]) u.c[i] += from;
        if (u.bias[i]) u.bias[i] += from;
        if (u.wide_bias[i]) u.wide_bias[i] += from;
    }
    if (u.to) u.to += u.form == MN_DECODE_EPI_F32 ? 2 * from : from;    // as if of bf16
    u.plus = mn_source_from(u.plus, from);
    if (u.form == MN_DECODE_EPI_CONV) {
        u.taps += (int64_t)from * MN_DECODE_TAPS;
        if (u.taps_bias) u.taps_bias += from;
        if (u.tail0) u.tail0 += from;
        if (u.tail) u.tail += from;
    }
    for (int i = 0; i < MN_DECODE_PREFETCHED && u.form >= MN_DECODE_EPI_DECAY; i++) {
        if (!u.prefetched[i]) continue;
        u.prefetched[i] += (int64_t)(from / u.prefetched_per[i]) * (u.prefetched_wide[i] ? 4 : 2);
    }
    return u;
}

static mn_decode_epi_instr epi_from(const mn_decode_epi_instr *all, int from) {
    mn_decode_epi_instr e = *all;
    const int element = e.wide ? 2 * from : from;    // as if of bf16
    if (e.to_handoff >= 0) e.to_handoff = mn_decode_word_from(e.to_handoff, (unsigned)element);
    e.to += (int64_t)(from / e.per) * (e.wide ? 4 : 2);
    for (size_t i = 0; i < MN_COUNTOF(e.in); i++) {
        mn_decode_epi_input *in = &e.in[i];
        if (in->from < 0 && in->per > 0) in->source = mn_source_from(in->source, from / in->per);
    }
    return e;
}

/* ---- which block has what -------------------------------------------------------------------- */

/* A stage's tiles, complete but for their columns. */
typedef struct gemm_stage {
    const mn_decode_gemms *given;
    mn_decode_gemm_instr head;
    fused_tile fused[MN_DECODE_GEMMS];
    mn_decode_out_tile tile[MN_DECODE_GEMMS];
    mn_decode_epi_instr epi[MN_DECODE_GEMMS][MN_DECODE_EPILOGUES];
    int n_tiles;
} gemm_stage;

/* An instruction that is being written. */
typedef struct instr_writer {
    mn_decode_instr *instr;
    mn_decode_epi_instr epis[MN_DECODE_EPILOGUES];
    int n_epis;
} instr_writer;

static void close_instr(mn_megakernel *p, int block, instr_writer *w) {
    if (!w->instr) return;
    const mn_decode_gemm_instr *q = &w->instr->gemms;
    const size_t at = offsetof(mn_decode_instr, gemms) + offsetof(mn_decode_gemm_instr, out_tile) +
                      (size_t)q->n_out_tiles * sizeof *q->out_tile;
    const size_t bytes = (size_t)w->n_epis * sizeof *w->epis;
    w->instr->epis_at = (int)at;
    memcpy((char *)w->instr + at, w->epis, bytes);
    mn_plan_end_instr(p, block, at + bytes);
    w->instr = NULL;
}

static bool open_instr(mn_megakernel *p, int block, instr_writer *w, const gemm_stage *stage) {
    w->instr = mn_plan_add_instr(p, block);
    w->n_epis = 0;
    if (!w->instr) return false;
    w->instr->kind = MN_DECODE_GEMM;
    w->instr->gemms = stage->head;
    return true;
}

static bool fits_in(const instr_writer *w, const mn_decode_out_tile *tile) {
    return w->instr->gemms.n_col_tiles + tile->n_col_tiles <= MN_DECODE_COL_TILES &&
           w->instr->gemms.n_out_tiles < MN_DECODE_COL_TILES &&
           w->n_epis + tile->n_epis <= MN_DECODE_EPILOGUES;
}

/* Puts columns of tile i into an instruction. */
static void put_tile(instr_writer *w, const gemm_stage *stage, int i, int from) {
    mn_decode_gemm_instr *q = &w->instr->gemms;
    mn_decode_out_tile *tile = &q->out_tile[q->n_out_tiles++];
    *tile = out_tile_from(&stage->tile[i], from);
    tile->first_epi = w->n_epis;
    for (int k = 0; k < tile->n_epis; k++) {
        w->epis[w->n_epis++] = epi_from(&stage->epi[i][k], from);
    }
    for (int k = 0; k < tile->n_col_tiles; k++) {
        const mn_decode_gemm *product = &stage->given->of[stage->fused[i].product[k]];
        const int64_t step = product->b_row * 2;
        q->col_tile[q->n_col_tiles] = (mn_decode_col_tile){ (const char *)product->b + from * step,
                                                            (int)step, tile->n_rows };
        tile->col_tile[k] = q->n_col_tiles++;
    }
}

/* A tile's columns from `from` on, and the block that has them. */
typedef struct tile_owner {
    int tile, from, block;
} tile_owner;

/* What a tile costs its block, in column tiles: a list takes long, and others wait for it. */
static int cost_of(const mn_decode_out_tile *tile) {
    return tile->form == MN_DECODE_EPI_LIST ? tile->n_col_tiles + 4 : tile->n_col_tiles;
}

/* Gives all columns to blocks, those with lists first, each to one of those with least. */
static void share_out(tile_owner *owners, int *cost, const gemm_stage *stage, int n_blocks,
                      int phase) {
    for (int lists = 1; lists >= 0; lists--) {
        for (int i = 0; i < stage->n_tiles; i++) {
            const mn_decode_out_tile *tile = &stage->tile[i];
            if ((tile->form == MN_DECODE_EPI_LIST) != lists) continue;
            for (int from = 0; from < tile->N; from += MN_DECODE_TILE_N) {
                int least = phase;
                for (int k = 1; k < n_blocks; k++) {
                    const int block = (phase + k) % n_blocks;
                    if (cost[block] < cost[least]) least = block;
                }
                *owners++ = (tile_owner){ i, from, least };
                cost[least] += cost_of(tile);
            }
        }
    }
}

/* A block's instructions. Returns how many that makes. */
static int write_tiles(mn_megakernel *p, int block, const tile_owner *owners, int n,
                       const gemm_stage *stage) {
    instr_writer w = { 0 };
    int instrs = 0;
    for (int i = 0; i < n; i++) {
        if (owners[i].block != block) continue;
        if (w.instr && !fits_in(&w, &stage->tile[owners[i].tile])) close_instr(p, block, &w);
        if (!w.instr) {
            if (!open_instr(p, block, &w, stage)) return instrs;
            if (block != owners[0].block || instrs > 0) w.instr->gemms.row = NULL;
            instrs++;
        }
        put_tile(&w, stage, owners[i].tile, owners[i].from);
    }
    close_instr(p, block, &w);
    return instrs;
}

static void write_stage(mn_megakernel *p, const gemm_stage *stage) {
    int n = 0, most = 0;
    for (int i = 0; i < stage->n_tiles; i++) {
        n += (int)mn_ceil_div(stage->tile[i].N, MN_DECODE_TILE_N);
    }
    tile_owner *owners = calloc((size_t)n, sizeof *owners);
    int *cost = calloc((size_t)p->n_blocks, sizeof *cost);
    int *instrs = calloc((size_t)p->n_blocks, sizeof *instrs);
    p->failed = p->failed || !owners || !cost || !instrs;
    if (!p->failed) share_out(owners, cost, stage, p->n_blocks, p->phase);
    for (int block = 0; block < p->n_blocks && !p->failed; block++) {
        instrs[block] = write_tiles(p, block, owners, n, stage);
        most = instrs[block] > most ? instrs[block] : most;
    }
    for (int block = 0; block < p->n_blocks && !p->failed; block++) {
        for (int i = instrs[block]; i < most; i++) mn_plan_rest(p, block);
    }
    free(owners);
    free(cost);
    free(instrs);
    p->phase = (p->phase + n) % p->n_blocks;
    p->n_stages += most;
}

/* What the stage reads and writes; false where no stage does that. */
static bool gather_stage(gemm_stage *stage, mn_stage_ranges *r) {
    const mn_decode_gemms *given = stage->given;
    bool fits = fill_prologue(&stage->head, r, given) &&
                fuse_gemms(stage->fused, &stage->n_tiles, given);
    for (int i = 0; i < given->n && fits && given->K > 0; i++) {
        const mn_decode_gemm *product = &given->of[i];
        fits = product->b_row % 8 == 0 && (uintptr_t)product->b % 16 == 0 &&
               product->b_row * 2 < INT32_MAX;
        mn_stage_loads(r, product->b, (product->N - 1) * product->b_row + given->K, 2);
    }
    for (int i = 0; i < stage->n_tiles && fits; i++) {
        fits = fill_out_tile(&stage->tile[i], stage->epi[i], r, &stage->fused[i], given);
    }
    return fits && mn_stage_close(r);
}

bool mn_megakernel_add_gemms(mn_megakernel *p, const mn_decode_gemms *given) {
    if (given->dtype != MN_BF16 || given->M != 1 || p->failed) return false;
    if (given->K % 8 != 0 || given->K > MN_DECODE_CHUNKS * MN_DECODE_CHUNK) return false;
    gemm_stage stage = { .given = given };
    mn_stage_ranges ranges;
    mn_stage_open(&ranges, p);
    if (!gather_stage(&stage, &ranges)) return false;
    if (stage.head.row) stage.head.row_handoff = mn_stage_words(&ranges, stage.head.row);
    for (int i = 0; i < stage.n_tiles; i++) {
        mn_decode_out_tile *u = &stage.tile[i];
        u->to_handoff = u->to ? mn_stage_words(&ranges, u->to) : MN_DECODE_NO_WORDS;
        for (int k = 0; k < u->n_epis; k++) {
            stage.epi[i][k].to_handoff = mn_stage_words(&ranges, stage.epi[i][k].to);
        }
    }
    p->ragged = p->ragged || given->K % MN_DECODE_CHUNK != 0;
    write_stage(p, &stage);
    return true;
}
