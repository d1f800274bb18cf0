/* megakernel_build.cu - adds stages to programs (kernels/decode.h): what each block does in each,
 * as a instr that it finds in its own list.
 *
 * Units of a stage, and tiles of a memory, are shared out among blocks; what a block cannot take in
 * one instr becomes further instrs, which are stages of their own. */
#include <float.h>

#include "kernels/cuda/decode/megakernel_ranges.cuh"

namespace mneme::decode {

/* ---- gemms -------------------------------------------------------------------------------- */

/* How the row comes; false where no stage can make it. */
static bool fill_prologue(mn_decode_gemm_instr *to, mn_decode_ranges *access,
                          const mn_decode_gemms *given) {
    const mn_decode_op *first = given->first;
    to->K = (int)given->K, to->chunks = (unsigned char)mn_ceil_div(given->K, MN_DECODE_CHUNK);
    to->way = MN_DECODE_PLAIN;
    if (!first) {
        to->x = access->source(given->a, given->K, MN_DECODE_PER_LINE).at;
        return true;
    }
    const bool gated = first->kind == MN_DECODE_GATED_NORM;
    const int64_t width = first->shape[3], groups = given->K / (width > 0 ? width : 1);
    const int64_t warps = width / MN_DECODE_WARP_K;
    const bool even = warps == 1 || warps == 2 || warps == 4 || warps == 8;
    if (!gated && first->kind != MN_DECODE_RMS_NORM) return false;
    if (gated && (first->order == MN_DECODE_GATE_FIRST || given->K > MN_DECODE_CHUNK)) return false;
    if (first->shape[2] * width != given->K) return false;
    if (groups > 1 && (width % MN_DECODE_WARP_K != 0 || !even
                       || given->K > MN_DECODE_CHUNK)) return false;
    for (int i = 0; i <= (gated ? 3 : 2); i++) {
        const bool there = first->at[i].data != NULL;
        if (there && (first->at[i].dtype != MN_BF16 || (uintptr_t)first->at[i].data % 8 != 0)) {
            return false;
        }
    }
    if (gated && !first->at[1].data) return false;
    const bool shared = groups > 1 && (!gated || first->shape[1] == 1);    // weights of all groups
    to->way = gated ? MN_DECODE_GATED : MN_DECODE_NORMED;
    to->group = (unsigned char)(groups > 1 ? (int)warps : (int)MN_DECODE_WARPS);
    to->sigmoid = gated && first->f == MN_DECODE_SIGMOID;
    to->inverse_width = 1.0f / (float)width, to->epsilon = (float)first->scale;
    to->weight = (const mn_bf16 *)first->at[gated ? 2 : 1].data;
    to->wrap = shared ? (int)width - 1 : INT32_MAX;
    to->row = (mn_bf16 *)first->at[gated ? 3 : 2].data;
    access->reads(to->weight, shared ? width : given->K, 2);
    to->x = access->source(first->at[0].data, given->K, MN_DECODE_PER_LINE).at;
    if (gated) to->z = access->source(first->at[1].data, given->K, MN_DECODE_PER_LINE).at;
    access->writes(to->row, given->K, 2, false);
    return true;
}

/* What becomes of the columns of one product, or of two joined ones. */
struct fused_tile {
    int product[2], n_gemms, n_epis, epis[MN_DECODE_EPILOGUES];
};

/* The input of an epilogue: product or epilogue of the stage, or -1. */
static int origin(const mn_decode_gemms *given, int epilogue, int k, bool *is_product) {
    const void *data = given->epilogue[epilogue].work.at[k].data;
    int found = -1;
    *is_product = false;
    for (int i = 0; i < given->n && data; i++) {
        if (given->of[i].c == data) found = i, *is_product = true;
    }
    for (int i = 0; i < epilogue && data; i++) {
        const mn_decode_op &work = given->epilogue[i].work;
        if (work.at[mn_decode_n_inputs(work.kind)].data == data) found = i, *is_product = false;
    }
    return found;
}

/* Products that endings join become one out_tile; false where these are more than two. */
static bool fuse_gemms(fused_tile *out_tiles, int *n_out_tiles, const mn_decode_gemms *given) {
    int of[MN_DECODE_GEMMS];
    *n_out_tiles = 0;
    for (int i = 0; i < given->n; i++) of[i] = i;
    for (int e = 0; e < given->n_epilogues; e++) {
        for (int k = 0; k < mn_decode_n_inputs(given->epilogue[e].work.kind); k++) {
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
    for (int lead = 0; lead < given->n; lead++) {
        if (of[lead] != lead) continue;
        fused_tile *out_tile = &out_tiles[(*n_out_tiles)++];
        *out_tile = {};
        for (int i = lead; i < given->n; i++) {
            if (of[i] != lead) continue;
            if (out_tile->n_gemms == 2 || given->of[i].N != given->of[lead].N) return false;
            out_tile->product[out_tile->n_gemms++] = i;
        }
        for (int e = 0; e < given->n_epilogues; e++) {
            if (of[given->epilogue[e].product] == lead) out_tile->epis[out_tile->n_epis++] = e;
        }
    }
    return true;
}

/* Value of a out_tile that an epilogue's input is; -1: memory. */
static int value_of(const fused_tile &out_tile, const mn_decode_gemms *given, int epilogue, int k) {
    bool is_product;
    const int from = origin(given, epilogue, k, &is_product);
    if (from < 0) return -1;
    for (int i = 0; i < out_tile.n_gemms && is_product; i++) {
        if (out_tile.product[i] == from) return i;
    }
    for (int i = 0; i < out_tile.n_epis && !is_product; i++) {
        if (out_tile.epis[i] == from) return 2 + i;
    }
    return -1;
}

static int64_t count_of(const int64_t shape[4]) {
    return shape[0] * shape[1] * shape[2] * shape[3];
}

/* The out_tile's form; -1: there is none. */
static int form_of(const fused_tile &out_tile, const mn_decode_gemms *given) {
    bool adds = false;
    for (int i = 0; i < out_tile.n_gemms; i++) adds |= given->of[out_tile.product[i]].sum != NULL;
    if (out_tile.n_epis == 0) return adds ? MN_DECODE_EPI_ADD : MN_DECODE_EPI_STORE;
    const mn_decode_op &only = given->epilogue[out_tile.epis[0]].work;
    if (adds) return -1;
    if (out_tile.n_epis == 1 && only.kind == MN_DECODE_CONV) {
        const bool whole = out_tile.n_gemms == 1 && only.shape[1] == MN_DECODE_TAPS &&
                           value_of(out_tile, given, out_tile.epis[0], 0) == 0 &&
                           (uintptr_t)only.at[1].data % 16 == 0 && only.at[1].dtype == MN_BF16 &&
                           only.at[4].dtype == MN_BF16;
        return whole ? MN_DECODE_EPI_CONV : -1;
    }
    for (int i = 0; i < out_tile.n_epis; i++) {
        if (given->epilogue[out_tile.epis[i]].work.kind > MN_DECODE_MOVE) return -1;
    }
    if (out_tile.n_epis == 1 && out_tile.n_gemms == 1 && only.kind == MN_DECODE_MOVE &&
        value_of(out_tile, given, out_tile.epis[0], 0) == 0 && only.at[1].dtype == MN_F32 &&
        count_of(only.shape) == given->of[out_tile.product[0]].N) {
        return MN_DECODE_EPI_F32;
    }
    const bool times = out_tile.n_gemms == 2 && value_of(out_tile, given, out_tile.epis[0], 1) == 1;
    const bool function = out_tile.n_epis == 1 && only.kind == MN_DECODE_UNARY &&
                          (times || (out_tile.n_gemms == 1 && !only.at[1].data)) &&
                          value_of(out_tile, given, out_tile.epis[0], 0) == 0 &&
                          only.at[2].dtype == MN_BF16 &&
                          count_of(only.shape) == given->of[out_tile.product[0]].N;
    return function ? MN_DECODE_EPI_ACT : MN_DECODE_EPI_LIST;
}

/* How many of N columns share a number of input k of a small work. */
static int columns_of(const mn_decode_op &work, int k, int64_t N) {
    int64_t elements = 1;
    for (int i = 0; i < 4; i++) elements *= work.at[k].stride[i] != 0 ? work.shape[i] : 1;
    return (int)(N / elements);
}

/* What is older than the megakernel is read ahead, while there is smem for that; else, if it is of
 * bf16, from words. */
static void access_input(mn_decode_ranges *access, mn_decode_out_tile *to,
                         mn_decode_epi_input *in, const void *data,
                        bool wide, int64_t N) {
    const int64_t count = N / in->per;
    for (int i = 0; i < MN_DECODE_PREFETCHED && !access->is_written(data, count * (wide ? 4 : 2));
         i++) {
        if (to->prefetched[i]) continue;
        access->reads(data, count, wide ? 4 : 2);
        to->prefetched[i] = (const char *)data, to->prefetched_wide[i] = wide;
        to->prefetched_step[i] = (unsigned char)(in->per > 1 ? 0 : wide ? 4 : 2);
        to->prefetched_per[i] = in->per;
        in->from = 2 + MN_DECODE_EPILOGUES + i;
        return;
    }
    access->fits = access->fits && !wide;
    in->source = access->source(data, count, in->per == 1 ? 2 : 1);
    in->source.step = in->per == 1;
}

/* A small work of a list, over all columns. */
static mn_decode_epi_instr epi_of(mn_decode_ranges *access, mn_decode_out_tile *to,
                                  const fused_tile &out_tile,
                         const mn_decode_gemms *given, int epilogue) {
    const mn_decode_op &work = given->epilogue[epilogue].work;
    const int inputs = mn_decode_n_inputs(work.kind);
    const int64_t N = given->of[out_tile.product[0]].N;
    const int64_t own = count_of(work.shape);
    mn_decode_epi_instr end = {};
    end.kind = (short)work.kind, end.f = (short)work.f, end.narrow = 1;
    end.scale = (float)work.scale, end.shift = (float)work.shift;
    for (int k = 0; k <= inputs; k++) {
        end.narrow &= !work.at[k].data || work.at[k].dtype == MN_BF16;
    }
    for (int k = 0; k < inputs && k < 2; k++) {
        if (!work.at[k].data) continue;
        end.n_inputs = k + 1;
        end.in[k].per = columns_of(work, k, N);
        end.in[k].from = value_of(out_tile, given, epilogue, k);
        if (end.in[k].from >= 0) continue;
        access_input(access, to, &end.in[k], work.at[k].data, work.at[k].dtype == MN_F32, N);
    }
    end.per = (int)(N / own), end.to_handoff = MN_DECODE_NO_WORDS;
    end.to = (char *)work.at[inputs].data, end.wide = work.at[inputs].dtype == MN_F32;
    access->writes(end.to, own, end.wide ? 4 : 2, !end.wide && end.per == 1);
    return end;
}

/* Whether an end is made from values a and b of its out_tile, in either order; b: -1 where it has
 * one input. */
static bool makes(const mn_decode_epi_instr &e, int kind, int f, int a, int b) {
    const int x = e.in[0].from, y = e.n_inputs > 1 ? e.in[1].from : -1;
    return e.kind == kind && e.f == f && ((x == a && y == b) || (x == b && y == a));
}

/* Whether a list is x + dt, softplus of it, -exp(A), the product of the latter two. */
static bool decays(const mn_decode_out_tile &out_tile, const mn_decode_epi_instr *epis) {
    enum { SUM = 2, PREFETCHED = 2 + MN_DECODE_EPILOGUES };
    return out_tile.n_epis == 4 && out_tile.n_col_tiles == 1 &&
           makes(epis[0], MN_DECODE_PAIR, MN_PAIR_ADD, 0, PREFETCHED) &&
           makes(epis[1], MN_DECODE_UNARY, MN_UNARY_SOFTPLUS, SUM, -1) &&
           makes(epis[2], MN_DECODE_UNARY, MN_UNARY_NEG_EXP, PREFETCHED + 1, -1) &&
           makes(epis[3], MN_DECODE_PAIR, MN_PAIR_MULTIPLY, SUM + 1, SUM + 2) &&
           epis[0].per == 1 && epis[1].per == 1 && epis[3].per == 1 &&
           !epis[0].wide && !epis[1].wide && !epis[3].wide;
}

/* A out_tile of all columns, and its epis. */
static bool fill_out_tile(mn_decode_out_tile *to, mn_decode_epi_instr *epis,
                          mn_decode_ranges *access, const fused_tile &out_tile,
                      const mn_decode_gemms *given) {
    const int form = form_of(out_tile, given);
    if (form < 0) return false;
    const int64_t N = given->of[out_tile.product[0]].N;
    *to = {};
    to->form = (unsigned char)form, to->n_col_tiles = (unsigned char)out_tile.n_gemms,
        to->N = (int)N;
    to->to_handoff = MN_DECODE_NO_WORDS;
    for (int i = 0; i < out_tile.n_gemms; i++) {
        const mn_decode_gemm &product = given->of[out_tile.product[i]];
        to->c[i] = (mn_bf16 *)product.c, to->bias[i] = (const mn_bf16 *)product.bias;
        access->writes(product.c, N, 2, form == MN_DECODE_EPI_STORE);
        access->reads(product.bias, N, 2);
    }
    to->biased = to->bias[0] || to->bias[1];
    if (form == MN_DECODE_EPI_STORE) to->to = to->c[0], to->c[0] = NULL;
    to->stores_c = to->c[0] || to->c[1];
    if (form == MN_DECODE_EPI_ADD) {
        to->to = (mn_bf16 *)given->of[out_tile.product[0]].sum;
        to->plus = access->source(given->of[out_tile.product[0]].plus, N, MN_DECODE_TILE_N);
        access->writes(to->to, N, 2, true);
        return out_tile.n_gemms == 1;
    }
    if (form == MN_DECODE_EPI_ACT) {
        const mn_decode_op &work = given->epilogue[out_tile.epis[0]].work;
        to->to = (mn_bf16 *)work.at[2].data, to->f = (unsigned char)work.f;
        access->writes(to->to, N, 2, true);
    } else if (form == MN_DECODE_EPI_F32) {
        to->to = (mn_bf16 *)given->epilogue[out_tile.epis[0]].work.at[1].data;
        access->writes(to->to, N, 4, false);
    } else if (form == MN_DECODE_EPI_CONV) {
        const mn_decode_op &work = given->epilogue[out_tile.epis[0]].work;
        to->taps = (const mn_bf16 *)work.at[1].data;
        to->taps_bias = (const mn_bf16 *)work.at[2].data;
        to->tail0 = (const float *)work.at[3].data, to->to = (mn_bf16 *)work.at[4].data;
        to->tail = (float *)work.at[5].data, to->f = work.f != 0;
        access->reads(to->taps, N * MN_DECODE_TAPS, 2);
        access->reads(to->taps_bias, N, 2);
        if (to->tail0 != to->tail) access->reads(to->tail0, N * (MN_DECODE_TAPS - 1), 4);
        access->updates(to->tail, N * (MN_DECODE_TAPS - 1), 4);
        access->writes(to->to, N, 2, true);
    }
    to->n_epis = (unsigned char)(form == MN_DECODE_EPI_LIST ? out_tile.n_epis : 0);
    for (int i = 0; i < to->n_epis; i++) {
        epis[i] = epi_of(access, to, out_tile, given, out_tile.epis[i]);
    }
    if (form == MN_DECODE_EPI_LIST && decays(*to, epis)) {
        to->form = MN_DECODE_EPI_DECAY, to->f = epis[2].wide != 0;
        to->to = (mn_bf16 *)epis[to->n_epis - 1].to;
    }
    return true;
}

/* From number `i` on, which may be the upper one of its word. */
static mn_decode_source source_from(mn_decode_source source, int i) {
    source.at = mn_decode_word_from(source.at, (unsigned)(source.odd + i));
    source.odd = (short)((source.odd + i) % 2);
    return source;
}

static mn_decode_out_tile out_tile_from(const mn_decode_out_tile &all, int from) {
    mn_decode_out_tile u = all;
    u.n_rows = (unsigned char)mn_min(MN_DECODE_TILE_N, all.N - from);
    if (u.to_handoff >= 0) u.to_handoff = mn_decode_word_from(u.to_handoff, (unsigned)from);
    for (int i = 0; i < 2; i++) {
        if (u.c[i]) u.c[i] += from;
        if (u.bias[i]) u.bias[i] += from;
    }
    if (u.to) u.to += u.form == MN_DECODE_EPI_F32 ? 2 * from : from;    // as if of bf16
    u.plus = source_from(u.plus, from);
    if (u.form == MN_DECODE_EPI_CONV) {
        u.taps += (int64_t)from * MN_DECODE_TAPS;
        if (u.taps_bias) u.taps_bias += from;
        if (u.tail0) u.tail0 += from;
        if (u.tail) u.tail += from;
    }
    for (int i = 0; i < MN_DECODE_PREFETCHED && u.form >= MN_DECODE_EPI_DECAY; i++) {
        if (u.prefetched[i]) u.prefetched[i] += (int64_t)(from / u.prefetched_per[i])
            * (u.prefetched_wide[i] ? 4 : 2);
    }
    return u;
}

static mn_decode_epi_instr epi_from(const mn_decode_epi_instr &all, int from) {
    mn_decode_epi_instr e = all;
    if (e.to_handoff >= 0) e.to_handoff = mn_decode_word_from(e.to_handoff, (unsigned)from);
    e.to += (int64_t)(from / e.per) * (e.wide ? 4 : 2);
    for (mn_decode_epi_input &in : e.in) {
        if (in.from < 0 && in.per > 0) in.source = source_from(in.source, from / in.per);
    }
    return e;
}

/* A stage's out_tiles, complete but for their columns. */
struct gemm_stage {
    mn_decode_gemm_instr head;
    fused_tile out_tiles[MN_DECODE_GEMMS];
    mn_decode_out_tile out_tile[MN_DECODE_GEMMS];
    mn_decode_epi_instr end[MN_DECODE_GEMMS][MN_DECODE_EPILOGUES];
    int n_out_tiles;
};

/* A instr that is being written. */
struct instr_writer {
    mn_decode_instr *instr;
    mn_decode_epi_instr epis[MN_DECODE_EPILOGUES];
    int n_epis;
};

static void close_instr(mn_megakernel *p, int block, instr_writer *w) {
    if (!w->instr) return;
    const mn_decode_gemm_instr &q = w->instr->gemms;
    const size_t at = offsetof(mn_decode_instr, gemms) + offsetof(mn_decode_gemm_instr, out_tile) +
                      (size_t)q.n_out_tiles * sizeof *q.out_tile;
    w->instr->epis_at = (int)at;
    memcpy((char *)w->instr + at, w->epis, (size_t)w->n_epis * sizeof *w->epis);
    mn_decode_end_instr(p, block, (int)(at + (size_t)w->n_epis * sizeof *w->epis));
    w->instr = NULL;
}

static bool open_instr(mn_megakernel *p, int block, instr_writer *w, const gemm_stage &stage) {
    w->instr = mn_decode_add_instr(p, block);
    w->n_epis = 0;
    if (!w->instr) return false;
    w->instr->kind = MN_DECODE_GEMM;
    w->instr->gemms = stage.head;
    return true;
}

static bool fits_in(const instr_writer &w, const mn_decode_out_tile &out_tile) {
    const mn_decode_gemm_instr &q = w.instr->gemms;
    return q.n_col_tiles + out_tile.n_col_tiles <= MN_DECODE_COL_TILES
        && w.n_epis + out_tile.n_epis <= MN_DECODE_EPILOGUES;
}

/* Puts columns of a out_tile into a instr. */
static void put_out_tile(instr_writer *w, const gemm_stage &stage, const mn_decode_gemms *given,
                         int i,
                     int from) {
    mn_decode_gemm_instr *q = &w->instr->gemms;
    mn_decode_out_tile *out_tile = &q->out_tile[q->n_out_tiles++];
    *out_tile = out_tile_from(stage.out_tile[i], from);
    out_tile->first_epi = w->n_epis;
    for (int k = 0; k < out_tile->n_epis; k++) {
        w->epis[w->n_epis++] = epi_from(stage.end[i][k], from);
    }
    for (int k = 0; k < out_tile->n_col_tiles; k++) {
        const mn_decode_gemm &product = given->of[stage.out_tiles[i].product[k]];
        const int64_t step = product.b_row * 2;
        q->col_tile[q->n_col_tiles] = { (const char *)product.b + from * step, (int)step,
            out_tile->n_rows };
        out_tile->col_tile[k] = (unsigned char)q->n_col_tiles++;
    }
}

/* A out_tile's columns from `from` on, and the block that has them. */
struct tile_owner {
    int out_tile, from, block;
};

/* What a out_tile costs its block, in column tiles: a list takes long, and others wait for it. */
static int cost_of(const mn_decode_out_tile &out_tile) {
    return out_tile.form == MN_DECODE_EPI_LIST ? out_tile.n_col_tiles + 4 : out_tile.n_col_tiles;
}

/* Gives all columns to blocks, those with lists first, each to one of those with least. Returns how
 * many there are; NULL in `out` when memory is out. */
static int assign_tiles(tile_owner **out, const gemm_stage &stage, int n_blocks, int phase) {
    int total = 0, n = 0;
    for (int i = 0; i < stage.n_out_tiles; i++) {
        total += (int)mn_ceil_div((int64_t)stage.out_tile[i].N, MN_DECODE_TILE_N);
    }
    tile_owner *columns = (tile_owner *)calloc((size_t)total, sizeof *columns);
    int *cost = (int *)calloc((size_t)n_blocks, sizeof *cost);
    *out = cost ? columns : NULL;
    for (int lists = 1; lists >= 0 && columns && cost; lists--) {
        for (int i = 0; i < stage.n_out_tiles; i++) {
            if ((stage.out_tile[i].form == MN_DECODE_EPI_LIST) != lists) continue;
            for (int from = 0; from < stage.out_tile[i].N; from += MN_DECODE_TILE_N) {
                int least = phase;
                for (int k = 1; k < n_blocks; k++) {
                    const int block = (phase + k) % n_blocks;
                    if (cost[block] < cost[least]) least = block;
                }
                columns[n++] = { i, from, least };
                cost[least] += cost_of(stage.out_tile[i]);
            }
        }
    }
    if (!*out) free(columns);
    free(cost);
    return total;
}

/* A block's instrs. Returns how many that makes. */
static int write_out_tiles(mn_megakernel *p, int block, const tile_owner *columns, int n,
                       const gemm_stage &stage, const mn_decode_gemms *given) {
    instr_writer w = {};
    int instrs = 0;
    for (int i = 0; i < n; i++) {
        if (columns[i].block != block) continue;
        if (w.instr && !fits_in(w, stage.out_tile[columns[i].out_tile])) close_instr(p, block, &w);
        if (!w.instr) {
            if (!open_instr(p, block, &w, stage)) return instrs;
            if (block != columns[0].block || instrs > 0) w.instr->gemms.row = NULL;
            instrs++;
        }
        put_out_tile(&w, stage, given, columns[i].out_tile, columns[i].from);
    }
    close_instr(p, block, &w);
    return instrs;
}

static void rest(mn_megakernel *p, int block) {
    mn_decode_instr *instr = mn_decode_add_instr(p, block);
    if (instr) mn_decode_end_instr(p, block, offsetof(mn_decode_instr, gemms));
}

static void write_stage(mn_megakernel *p, const gemm_stage &stage, const mn_decode_gemms *given) {
    tile_owner *columns;
    const int n = assign_tiles(&columns, stage, p->n_blocks, p->phase);
    int *instrs = (int *)calloc((size_t)p->n_blocks, sizeof *instrs), most = 0;
    p->failed = p->failed || !columns || !instrs;
    for (int block = 0; block < p->n_blocks && !p->failed; block++) {
        instrs[block] = write_out_tiles(p, block, columns, n, stage, given);
        most = instrs[block] > most ? instrs[block] : most;
    }
    for (int block = 0; block < p->n_blocks && !p->failed; block++) {
        for (int i = instrs[block]; i < most; i++) rest(p, block);
    }
    free(columns);
    free(instrs);
    p->phase = (p->phase + n) % p->n_blocks;
    p->n_stages += most;
}

extern "C" bool mn_megakernel_add_gemms(mn_megakernel *p, const mn_decode_gemms *given) {
    if (given->dtype != MN_BF16 || given->M != 1 || p->failed) return false;
    if (given->K % 8 != 0 || given->K > MN_DECODE_CHUNKS * MN_DECODE_CHUNK) return false;
    gemm_stage stage = {};
    mn_decode_ranges access(p);
    bool fits = fill_prologue(&stage.head, &access, given) &&
                fuse_gemms(stage.out_tiles, &stage.n_out_tiles, given);
    for (int i = 0; i < given->n && fits; i++) {
        const mn_decode_gemm &product = given->of[i];
        fits = product.b_row % 8 == 0 && (uintptr_t)product.b % 16 == 0 &&
               product.b_row * 2 < INT32_MAX;
        access.reads(product.b, (product.N - 1) * product.b_row + given->K, 2);
    }
    for (int i = 0; i < stage.n_out_tiles && fits; i++) {
        fits = fill_out_tile(&stage.out_tile[i], stage.end[i], &access, stage.out_tiles[i], given);
    }
    if (!fits || !access.place()) return false;
    for (int i = 0; i < stage.n_out_tiles; i++) {
        mn_decode_out_tile *u = &stage.out_tile[i];
        u->to_handoff = u->to ? access.words(u->to) : MN_DECODE_NO_WORDS;
        for (int k = 0; k < u->n_epis; k++) {
            stage.end[i][k].to_handoff = access.words(stage.end[i][k].to);
        }
    }
    p->ragged = p->ragged || given->K % MN_DECODE_CHUNK != 0;
    write_stage(p, stage, given);
    return true;
}

/* ---- memories -------------------------------------------------------------------------------- */

/* Numbers i of rows of heads begin at 16 bytes. */
static bool packs(const mn_in &x) {
    return (uintptr_t)x.data % 16 == 0 && x.stride[2] % 8 == 0;
}

/* Whether a norm makes the rows of `made`, one behind the other. */
static bool is_qk_norm(const mn_decode_op *front, const mn_in &made, const mn_call &c) {
    bool fits = front->kind == MN_DECODE_L2_NORM && front->shape[3] == c.K &&
                front->shape[2] == c.J && (c.J == 1 || made.stride[2] == c.K) &&
                front->at[1].data == made.data;
    for (int i = 0; i < 2; i++) {
        fits = fits && front->at[i].dtype == MN_BF16 && (uintptr_t)front->at[i].data % 16 == 0;
    }
    return fits;
}

/* A vector of a head, or what a norm makes it of. */
static mn_decode_source head_of(mn_decode_ranges *access, const mn_in &x,
                                const mn_decode_op *front, int64_t h,
                             int64_t K) {
    if (!front) return access->source((const mn_bf16 *)x.data + h * x.stride[2], K, 8);
    return access->source((const mn_bf16 *)front->at[0].data + h * K, K, 8);
}

static void fill_qk_norm(mn_decode_recurrence_instr *to, int i, const mn_decode_op *front) {
    if (!front) return;
    const bool root = front->f == MN_DECODE_ROOT;
    to->front[i] = { 1, root ? (float)front->scale : 0.0f,
                     root ? FLT_MAX : 1.0f / (float)front->scale, (mn_bf16 *)front->at[1].data };
}

/* What all tiles of head h have in common. */
static mn_decode_recurrence_instr head_instr(mn_decode_ranges *access,
                                             const mn_decode_recurrence *m, int64_t h) {
    const mn_call &c = m->call;
    const mn_in &e = m->e.data ? m->e : m->w;
    mn_decode_recurrence_instr to = {};
    to.K = (int)c.K, to.V = (int)c.V, to.scale = (float)m->scale;
    to.delta_rule = m->e.data != NULL;
    to.has_beta = m->beta.data != NULL, to.has_g = m->g.data != NULL;
    to.by_channel = to.has_g && m->decay == MN_DECAY_CHANNEL;
    const int64_t key = h * c.J / c.H;
    to.q = head_of(access, m->q, m->first[0], key, c.K);
    to.e = head_of(access, e, m->e.data ? m->first[1] : NULL, key, c.K);
    if (to.has_g) {
        to.g = access->source((const mn_bf16 *)m->g.data + h * m->g.stride[2],
                             to.by_channel ? c.K : 1, to.by_channel ? 8 : 1);
    }
    if (to.has_beta) {
        to.beta = access->source((const mn_bf16 *)m->beta.data + h * m->beta.stride[2], 1, 1);
    }
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) fill_qk_norm(&to, i, m->first[i]);
    return to;
}

static bool has_recurrence(const mn_decode_recurrence *m) {
    const mn_call &c = m->call;
    bool serves = c.dtype == MN_BF16 && c.T == 1 && c.B == 1 && !c.cu_seqlens && c.H > 0 &&
                  c.K > 0 && c.K <= MN_DECODE_STATE_ROWS && c.K % 8 == 0 && c.V > 0 &&
                  c.V % MN_DECODE_TILE_V == 0 && packs(m->q) && packs(m->v) && m->q.data
                      && m->o.data &&
                  !m->e.data != !m->w.data && m->state.data == m->state0.data &&
                  (c.H == 1 || m->o.stride[2] == c.V);
    if (m->e.data) serves = serves && packs(m->e);
    if (m->w.data) serves = serves && packs(m->w);
    if (m->decay == MN_DECAY_CHANNEL && m->g.data) serves = serves && packs(m->g);
    for (int i = 0; i < MN_DECODE_QK_NORMS && serves; i++) {
        if (!m->first[i]) continue;
        serves = is_qk_norm(m->first[i], i == 0 ? m->q : m->e, c) && (i == 0 || m->e.data);
    }
    return serves;
}

/* What all of a memory touches; heads[h] becomes what the tiles of head h have in common. */
static bool access_state(mn_decode_ranges *access, mn_decode_recurrence_instr *heads,
                         const mn_decode_recurrence *m) {
    const mn_call &c = m->call;
    for (int64_t h = 0; h < c.H && access->fits; h++) {
        heads[h] = head_instr(access, m, h);
        heads[h].v = access->source((const mn_bf16 *)m->v.data + h * m->v.stride[2], c.V, 4);
        heads[h].state = (float *)m->state.data + h * m->state.stride[2];
        access->updates(heads[h].state, c.K * c.V, 4);
    }
    access->writes(m->o.data, c.H * c.V, 2, true);
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) {
        if (m->first[i]) access->writes(heads[0].front[i].to, c.J * c.K, 2, false);
    }
    return access->place();
}

/* Columns from `column` on of head h of `c`, whose results begin at o, and their words at
 * o_handoff. */
static void write_tile(mn_megakernel *p, int block, const mn_decode_recurrence_instr &head,
                       mn_bf16 *o, int o_handoff, const mn_call &c, int64_t h, int64_t column) {
    mn_decode_instr *instr = mn_decode_add_instr(p, block);
    if (!instr) return;
    mn_decode_recurrence_instr *to = &instr->memory;
    const int64_t first = h * head.V + column;
    instr->kind = MN_DECODE_RECURRENCE;
    *to = head;
    to->v = source_from(head.v, (int)column);
    to->o = o + first, to->o_handoff = mn_decode_word_from(o_handoff, (unsigned)first);
    to->state += column;
    for (int i = 0; i < MN_DECODE_QK_NORMS; i++) {
        const int64_t group = c.H / c.J;    // whose first head stores the normed row
        if (to->front[i].to) to->front[i].to += h / group * head.K;
        if (column > 0 || h % group != 0) to->front[i].to = NULL;
    }
    mn_decode_end_instr(p, block, (int)(offsetof(mn_decode_instr, memory) + sizeof *to));
}

extern "C" bool mn_megakernel_add_recurrence(mn_megakernel *p, const mn_decode_recurrence *m) {
    if (p->failed || !has_recurrence(m)) return false;
    const int64_t tiles = m->call.V / MN_DECODE_TILE_V, all = tiles * m->call.H;
    mn_decode_ranges access(p);
    mn_decode_recurrence_instr *heads = (mn_decode_recurrence_instr *)calloc((size_t)m->call.H,
                                                                             sizeof *heads);
    if (!heads || !access_state(&access, heads, m)) {
        free(heads);
        return false;
    }
    const int o_handoff = access.words(m->o.data);
    for (int64_t from = 0; from < all; from += p->n_blocks) {
        for (int block = 0; block < p->n_blocks; block++) {
            const int64_t tile = from + (block - p->phase + p->n_blocks) % p->n_blocks;
            if (tile >= all) rest(p, block);
            else write_tile(p, block, heads[tile / tiles], (mn_bf16 *)m->o.data, o_handoff,
                            m->call, tile / tiles, tile % tiles * MN_DECODE_TILE_V);
        }
        p->n_stages++;
    }
    p->phase = (int)((p->phase + all) % p->n_blocks);
    free(heads);
    return true;
}

/* ---- rows of tables -------------------------------------------------------------------------- */

/* The first stage does it: table and index are older than the megakernel. */
extern "C" bool mn_megakernel_add_gather(mn_megakernel *p, const mn_decode_op *rows) {
    const mn_view &table = rows->at[0], &to = rows->at[1];
    const int64_t width = rows->shape[3];
    mn_decode_ranges access(p);
    const bool fits = !p->failed && rows->kind == MN_DECODE_ROWS && rows->shape[2] == 1 &&
                      table.dtype == MN_BF16 && to.dtype == MN_BF16 && width < (1 << 24) &&
                      rows->elements[0] < INT64_MAX;
    if (!fits) return false;
    access.reads(table.data, rows->elements[0], 2);
    access.reads(rows->index, 1, 4);
    access.writes(to.data, width, 2, true);
    if (!access.fits) return false;
    mn_decode_range *made = &access.list[access.n - 1];
    access.add_handoff(made);
    access.copies({ (const mn_bf16 *)table.data, (mn_bf16 *)to.data, rows->index, width,
                   made->words, (int)width });
    return access.place();
}

}    // namespace mneme::decode
