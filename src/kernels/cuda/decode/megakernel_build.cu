/* megakernel_build.cu - adds stages to programs (kernels/decode.h): what each block does in each,
 * as a note
 * that it finds in its own list.
 *
 * Units of a stage, and tiles of a memory, are shared out among blocks; what a block cannot take in
 * one note becomes further notes, which are stages of their own. */
#include <float.h>

#include "kernels/cuda/decode/megakernel_ranges.cuh"

/* ---- products -------------------------------------------------------------------------------- */

/* How the row comes; false where no stage can make it. */
static bool row_of(mn_few_products_note *to, mn_few_touch *touch, const mn_few_products *given) {
    const mn_few *first = given->first;
    to->K = (int)given->K, to->chunks = (unsigned char)mn_ceil_div(given->K, MN_FEW_CHUNK);
    to->way = MN_FEW_AS_IT_IS;
    if (!first) {
        to->x = touch->source(given->a, given->K, MN_FEW_OF_LINE).at;
        return true;
    }
    const bool gated = first->kind == MN_FEW_GATED_NORM;
    const int64_t width = first->shape[3], groups = given->K / (width > 0 ? width : 1);
    const int64_t warps = width / MN_FEW_SPAN;
    const bool even = warps == 1 || warps == 2 || warps == 4 || warps == 8;
    if (!gated && first->kind != MN_FEW_RMS_NORM) return false;
    if (gated && (first->order == MN_FEW_GATE_FIRST || given->K > MN_FEW_CHUNK)) return false;
    if (first->shape[2] * width != given->K) return false;
    if (groups > 1 && (width % MN_FEW_SPAN != 0 || !even || given->K > MN_FEW_CHUNK)) return false;
    for (int i = 0; i <= (gated ? 3 : 2); i++) {
        const bool there = first->at[i].data != NULL;
        if (there && (first->at[i].dtype != MN_BF16 || (uintptr_t)first->at[i].data % 8 != 0)) {
            return false;
        }
    }
    if (gated && !first->at[1].data) return false;
    const bool shared = groups > 1 && (!gated || first->shape[1] == 1);    // weights of all groups
    to->way = gated ? MN_FEW_GATED : MN_FEW_NORMALISED;
    to->group = (unsigned char)(groups > 1 ? (int)warps : (int)MN_FEW_WARPS);
    to->sigmoid = gated && first->f == MN_FEW_SIGMOID;
    to->inverse_width = 1.0f / (float)width, to->epsilon = (float)first->scale;
    to->weight = (const mn_bf16 *)first->at[gated ? 2 : 1].data;
    to->wrap = shared ? (int)width - 1 : INT32_MAX;
    to->row = (mn_bf16 *)first->at[gated ? 3 : 2].data;
    touch->reads(to->weight, shared ? width : given->K, 2);
    to->x = touch->source(first->at[0].data, given->K, MN_FEW_OF_LINE).at;
    if (gated) to->z = touch->source(first->at[1].data, given->K, MN_FEW_OF_LINE).at;
    touch->writes(to->row, given->K, 2, false);
    return true;
}

/* What becomes of the columns of one product, or of two joined ones. */
struct few_unit {
    int product[2], n_products, n_ends, ends[MN_FEW_ENDINGS];
};

/* The input of an ending: product or ending of the stage, or -1. */
static int origin(const mn_few_products *given, int ending, int k, bool *is_product) {
    const void *data = given->ending[ending].work.at[k].data;
    int found = -1;
    *is_product = false;
    for (int i = 0; i < given->n && data; i++) {
        if (given->of[i].c == data) found = i, *is_product = true;
    }
    for (int i = 0; i < ending && data; i++) {
        const mn_few &work = given->ending[i].work;
        if (work.at[mn_few_inputs(work.kind)].data == data) found = i, *is_product = false;
    }
    return found;
}

/* Products that endings join become one unit; false where these are more than two. */
static bool gather_units(few_unit *units, int *n_units, const mn_few_products *given) {
    int of[MN_FEW_PRODUCTS];
    *n_units = 0;
    for (int i = 0; i < given->n; i++) of[i] = i;
    for (int e = 0; e < given->n_endings; e++) {
        for (int k = 0; k < mn_few_inputs(given->ending[e].work.kind); k++) {
            bool is_product;
            const int from = origin(given, e, k, &is_product);
            if (from < 0) continue;
            const int product = is_product ? from : given->ending[from].product;
            const int one = of[given->ending[e].product], other = of[product];
            for (int i = 0; i < given->n; i++) {
                if (of[i] == one || of[i] == other) of[i] = one < other ? one : other;
            }
        }
    }
    for (int lead = 0; lead < given->n; lead++) {
        if (of[lead] != lead) continue;
        few_unit *unit = &units[(*n_units)++];
        *unit = {};
        for (int i = lead; i < given->n; i++) {
            if (of[i] != lead) continue;
            if (unit->n_products == 2 || given->of[i].N != given->of[lead].N) return false;
            unit->product[unit->n_products++] = i;
        }
        for (int e = 0; e < given->n_endings; e++) {
            if (of[given->ending[e].product] == lead) unit->ends[unit->n_ends++] = e;
        }
    }
    return true;
}

/* Value of a unit that an ending's input is; -1: memory. */
static int value_of(const few_unit &unit, const mn_few_products *given, int ending, int k) {
    bool is_product;
    const int from = origin(given, ending, k, &is_product);
    if (from < 0) return -1;
    for (int i = 0; i < unit.n_products && is_product; i++) {
        if (unit.product[i] == from) return i;
    }
    for (int i = 0; i < unit.n_ends && !is_product; i++) {
        if (unit.ends[i] == from) return 2 + i;
    }
    return -1;
}

static int64_t count_of(const int64_t shape[4]) {
    return shape[0] * shape[1] * shape[2] * shape[3];
}

/* The unit's form; -1: there is none. */
static int form_of(const few_unit &unit, const mn_few_products *given) {
    bool adds = false;
    for (int i = 0; i < unit.n_products; i++) adds |= given->of[unit.product[i]].sum != NULL;
    if (unit.n_ends == 0) return adds ? MN_FEW_ADDED : MN_FEW_STORED;
    const mn_few &only = given->ending[unit.ends[0]].work;
    if (adds) return -1;
    if (unit.n_ends == 1 && only.kind == MN_FEW_CONV) {
        const bool whole = unit.n_products == 1 && only.shape[1] == MN_FEW_TAPS &&
                           value_of(unit, given, unit.ends[0], 0) == 0 &&
                           (uintptr_t)only.at[1].data % 16 == 0 && only.at[1].dtype == MN_BF16 &&
                           only.at[4].dtype == MN_BF16;
        return whole ? MN_FEW_CONVOLVED : -1;
    }
    for (int i = 0; i < unit.n_ends; i++) {
        if (given->ending[unit.ends[i]].work.kind > MN_FEW_MOVE) return -1;
    }
    if (unit.n_ends == 1 && unit.n_products == 1 && only.kind == MN_FEW_MOVE &&
        value_of(unit, given, unit.ends[0], 0) == 0 && only.at[1].dtype == MN_F32 &&
        count_of(only.shape) == given->of[unit.product[0]].N) {
        return MN_FEW_WIDENED;
    }
    const bool times = unit.n_products == 2 && value_of(unit, given, unit.ends[0], 1) == 1;
    const bool function = unit.n_ends == 1 && only.kind == MN_FEW_UNARY &&
                          (times || (unit.n_products == 1 && !only.at[1].data)) &&
                          value_of(unit, given, unit.ends[0], 0) == 0 &&
                          only.at[2].dtype == MN_BF16 &&
                          count_of(only.shape) == given->of[unit.product[0]].N;
    return function ? MN_FEW_FUNCTION : MN_FEW_LISTED;
}

/* How many of N columns share a number of input k of a small work. */
static int columns_of(const mn_few &work, int k, int64_t N) {
    int64_t numbers = 1;
    for (int i = 0; i < 4; i++) numbers *= work.at[k].stride[i] != 0 ? work.shape[i] : 1;
    return (int)(N / numbers);
}

/* What is older than the program is read ahead, while there is room for that; else, if it is of
 * bf16, from words. */
static void touch_input(mn_few_touch *touch, mn_few_unit *to, mn_few_input *in, const void *data,
                        bool wide, int64_t N) {
    const int64_t count = N / in->per;
    for (int i = 0; i < MN_FEW_EARLY && !touch->is_written(data, count * (wide ? 4 : 2)); i++) {
        if (to->early[i]) continue;
        touch->reads(data, count, wide ? 4 : 2);
        to->early[i] = (const char *)data, to->early_wide[i] = wide;
        to->early_step[i] = (unsigned char)(in->per > 1 ? 0 : wide ? 4 : 2);
        to->early_per[i] = in->per;
        in->from = 2 + MN_FEW_ENDINGS + i;
        return;
    }
    touch->fits = touch->fits && !wide;
    in->source = touch->source(data, count, in->per == 1 ? 2 : 1);
    in->source.step = in->per == 1;
}

/* A small work of a list, over all columns. */
static mn_few_end end_of(mn_few_touch *touch, mn_few_unit *to, const few_unit &unit,
                         const mn_few_products *given, int ending) {
    const mn_few &work = given->ending[ending].work;
    const int inputs = mn_few_inputs(work.kind);
    const int64_t N = given->of[unit.product[0]].N;
    const int64_t own = count_of(work.shape);
    mn_few_end end = {};
    end.kind = (short)work.kind, end.f = (short)work.f, end.narrow = 1;
    end.scale = (float)work.scale, end.shift = (float)work.shift;
    for (int k = 0; k <= inputs; k++) {
        end.narrow &= !work.at[k].data || work.at[k].dtype == MN_BF16;
    }
    for (int k = 0; k < inputs && k < 2; k++) {
        if (!work.at[k].data) continue;
        end.n_inputs = k + 1;
        end.in[k].per = columns_of(work, k, N);
        end.in[k].from = value_of(unit, given, ending, k);
        if (end.in[k].from >= 0) continue;
        touch_input(touch, to, &end.in[k], work.at[k].data, work.at[k].dtype == MN_F32, N);
    }
    end.per = (int)(N / own), end.to_words = MN_FEW_NOWHERE;
    end.to = (char *)work.at[inputs].data, end.wide = work.at[inputs].dtype == MN_F32;
    touch->writes(end.to, own, end.wide ? 4 : 2, !end.wide && end.per == 1);
    return end;
}

/* Whether an end is made from values a and b of its unit, in either order; b: -1 where it has one
 * input. */
static bool makes(const mn_few_end &e, int kind, int f, int a, int b) {
    const int x = e.in[0].from, y = e.n_inputs > 1 ? e.in[1].from : -1;
    return e.kind == kind && e.f == f && ((x == a && y == b) || (x == b && y == a));
}

/* Whether a list is x + dt, softplus of it, -exp(A), the product of the latter two. */
static bool decays(const mn_few_unit &unit, const mn_few_end *ends) {
    enum { SUM = 2, EARLY = 2 + MN_FEW_ENDINGS };
    return unit.n_ends == 4 && unit.n_strips == 1 &&
           makes(ends[0], MN_FEW_PAIR, MN_PAIR_ADD, 0, EARLY) &&
           makes(ends[1], MN_FEW_UNARY, MN_UNARY_SOFTPLUS, SUM, -1) &&
           makes(ends[2], MN_FEW_UNARY, MN_UNARY_NEG_EXP, EARLY + 1, -1) &&
           makes(ends[3], MN_FEW_PAIR, MN_PAIR_MULTIPLY, SUM + 1, SUM + 2) &&
           ends[0].per == 1 && ends[1].per == 1 && ends[3].per == 1 &&
           !ends[0].wide && !ends[1].wide && !ends[3].wide;
}

/* A unit of all columns, and its ends. */
static bool fill_unit(mn_few_unit *to, mn_few_end *ends, mn_few_touch *touch, const few_unit &unit,
                      const mn_few_products *given) {
    const int form = form_of(unit, given);
    if (form < 0) return false;
    const int64_t N = given->of[unit.product[0]].N;
    *to = {};
    to->form = (unsigned char)form, to->n_strips = (unsigned char)unit.n_products, to->N = (int)N;
    to->to_words = MN_FEW_NOWHERE;
    for (int i = 0; i < unit.n_products; i++) {
        const mn_few_product &product = given->of[unit.product[i]];
        to->c[i] = (mn_bf16 *)product.c, to->bias[i] = (const mn_bf16 *)product.bias;
        touch->writes(product.c, N, 2, form == MN_FEW_STORED);
        touch->reads(product.bias, N, 2);
    }
    to->biased = to->bias[0] || to->bias[1];
    if (form == MN_FEW_STORED) to->to = to->c[0], to->c[0] = NULL;
    to->keeps = to->c[0] || to->c[1];
    if (form == MN_FEW_ADDED) {
        to->to = (mn_bf16 *)given->of[unit.product[0]].sum;
        to->plus = touch->source(given->of[unit.product[0]].plus, N, MN_FEW_COLUMNS);
        touch->writes(to->to, N, 2, true);
        return unit.n_products == 1;
    }
    if (form == MN_FEW_FUNCTION) {
        const mn_few &work = given->ending[unit.ends[0]].work;
        to->to = (mn_bf16 *)work.at[2].data, to->f = (unsigned char)work.f;
        touch->writes(to->to, N, 2, true);
    } else if (form == MN_FEW_WIDENED) {
        to->to = (mn_bf16 *)given->ending[unit.ends[0]].work.at[1].data;
        touch->writes(to->to, N, 4, false);
    } else if (form == MN_FEW_CONVOLVED) {
        const mn_few &work = given->ending[unit.ends[0]].work;
        to->taps = (const mn_bf16 *)work.at[1].data;
        to->taps_bias = (const mn_bf16 *)work.at[2].data;
        to->tail0 = (const float *)work.at[3].data, to->to = (mn_bf16 *)work.at[4].data;
        to->tail = (float *)work.at[5].data, to->f = work.f != 0;
        touch->reads(to->taps, N * MN_FEW_TAPS, 2);
        touch->reads(to->taps_bias, N, 2);
        if (to->tail0 != to->tail) touch->reads(to->tail0, N * (MN_FEW_TAPS - 1), 4);
        touch->renews(to->tail, N * (MN_FEW_TAPS - 1), 4);
        touch->writes(to->to, N, 2, true);
    }
    to->n_ends = (unsigned char)(form == MN_FEW_LISTED ? unit.n_ends : 0);
    for (int i = 0; i < to->n_ends; i++) {
        ends[i] = end_of(touch, to, unit, given, unit.ends[i]);
    }
    if (form == MN_FEW_LISTED && decays(*to, ends)) {
        to->form = MN_FEW_DECAYED, to->f = ends[2].wide != 0;
        to->to = (mn_bf16 *)ends[to->n_ends - 1].to;
    }
    return true;
}

/* From number `i` on, which may be the upper one of its word. */
static mn_few_source source_from(mn_few_source source, int i) {
    source.at = mn_few_word_from(source.at, (unsigned)(source.odd + i));
    source.odd = (short)((source.odd + i) % 2);
    return source;
}

static mn_few_unit unit_from(const mn_few_unit &all, int from) {
    mn_few_unit u = all;
    u.n_rows = (unsigned char)mn_min(MN_FEW_COLUMNS, all.N - from);
    if (u.to_words >= 0) u.to_words = mn_few_word_from(u.to_words, (unsigned)from);
    for (int i = 0; i < 2; i++) {
        if (u.c[i]) u.c[i] += from;
        if (u.bias[i]) u.bias[i] += from;
    }
    if (u.to) u.to += u.form == MN_FEW_WIDENED ? 2 * from : from;    // as if of bf16
    u.plus = source_from(u.plus, from);
    if (u.form == MN_FEW_CONVOLVED) {
        u.taps += (int64_t)from * MN_FEW_TAPS;
        if (u.taps_bias) u.taps_bias += from;
        if (u.tail0) u.tail0 += from;
        if (u.tail) u.tail += from;
    }
    for (int i = 0; i < MN_FEW_EARLY && u.form >= MN_FEW_DECAYED; i++) {
        if (u.early[i]) u.early[i] += (int64_t)(from / u.early_per[i]) * (u.early_wide[i] ? 4 : 2);
    }
    return u;
}

static mn_few_end end_from(const mn_few_end &all, int from) {
    mn_few_end e = all;
    if (e.to_words >= 0) e.to_words = mn_few_word_from(e.to_words, (unsigned)from);
    e.to += (int64_t)(from / e.per) * (e.wide ? 4 : 2);
    for (mn_few_input &in : e.in) {
        if (in.from < 0 && in.per > 0) in.source = source_from(in.source, from / in.per);
    }
    return e;
}

/* A stage's units, complete but for their columns. */
struct few_stage {
    mn_few_products_note head;
    few_unit units[MN_FEW_PRODUCTS];
    mn_few_unit unit[MN_FEW_PRODUCTS];
    mn_few_end end[MN_FEW_PRODUCTS][MN_FEW_ENDINGS];
    int n_units;
};

/* A note that is being written. */
struct few_writing {
    mn_few_note *note;
    mn_few_end ends[MN_FEW_ENDINGS];
    int n_ends;
};

static void close_note(mn_few_program *p, int block, few_writing *w) {
    if (!w->note) return;
    const mn_few_products_note &q = w->note->products;
    const size_t at = offsetof(mn_few_note, products) + offsetof(mn_few_products_note, unit) +
                      (size_t)q.n_units * sizeof *q.unit;
    w->note->ends_at = (int)at;
    memcpy((char *)w->note + at, w->ends, (size_t)w->n_ends * sizeof *w->ends);
    mn_few_end_note(p, block, (int)(at + (size_t)w->n_ends * sizeof *w->ends));
    w->note = NULL;
}

static bool open_note(mn_few_program *p, int block, few_writing *w, const few_stage &stage) {
    w->note = mn_few_add_note(p, block);
    w->n_ends = 0;
    if (!w->note) return false;
    w->note->kind = MN_FEW_MULTIPLY;
    w->note->products = stage.head;
    return true;
}

static bool fits_in(const few_writing &w, const mn_few_unit &unit) {
    const mn_few_products_note &q = w.note->products;
    return q.n_strips + unit.n_strips <= MN_FEW_STRIPS && w.n_ends + unit.n_ends <= MN_FEW_ENDINGS;
}

/* Puts columns of a unit into a note. */
static void put_unit(few_writing *w, const few_stage &stage, const mn_few_products *given, int i,
                     int from) {
    mn_few_products_note *q = &w->note->products;
    mn_few_unit *unit = &q->unit[q->n_units++];
    *unit = unit_from(stage.unit[i], from);
    unit->first_end = w->n_ends;
    for (int k = 0; k < unit->n_ends; k++) {
        w->ends[w->n_ends++] = end_from(stage.end[i][k], from);
    }
    for (int k = 0; k < unit->n_strips; k++) {
        const mn_few_product &product = given->of[stage.units[i].product[k]];
        const int64_t step = product.b_row * 2;
        q->strip[q->n_strips] = { (const char *)product.b + from * step, (int)step, unit->n_rows };
        unit->strip[k] = (unsigned char)q->n_strips++;
    }
}

/* A unit's columns from `from` on, and the block that has them. */
struct few_columns {
    int unit, from, block;
};

/* What a unit costs its block, in strips: a list takes long, and others wait for it. */
static int cost_of(const mn_few_unit &unit) {
    return unit.form == MN_FEW_LISTED ? unit.n_strips + 4 : unit.n_strips;
}

/* Gives all columns to blocks, those with lists first, each to one of those with least. Returns how
 * many there are; NULL in `out` when memory is out. */
static int share_out(few_columns **out, const few_stage &stage, int n_blocks, int turn) {
    int total = 0, n = 0;
    for (int i = 0; i < stage.n_units; i++) {
        total += (int)mn_ceil_div((int64_t)stage.unit[i].N, MN_FEW_COLUMNS);
    }
    few_columns *columns = (few_columns *)calloc((size_t)total, sizeof *columns);
    int *cost = (int *)calloc((size_t)n_blocks, sizeof *cost);
    *out = cost ? columns : NULL;
    for (int lists = 1; lists >= 0 && columns && cost; lists--) {
        for (int i = 0; i < stage.n_units; i++) {
            if ((stage.unit[i].form == MN_FEW_LISTED) != lists) continue;
            for (int from = 0; from < stage.unit[i].N; from += MN_FEW_COLUMNS) {
                int least = turn;
                for (int k = 1; k < n_blocks; k++) {
                    const int block = (turn + k) % n_blocks;
                    if (cost[block] < cost[least]) least = block;
                }
                columns[n++] = { i, from, least };
                cost[least] += cost_of(stage.unit[i]);
            }
        }
    }
    if (!*out) free(columns);
    free(cost);
    return total;
}

/* A block's notes. Returns how many that makes. */
static int write_units(mn_few_program *p, int block, const few_columns *columns, int n,
                       const few_stage &stage, const mn_few_products *given) {
    few_writing w = {};
    int notes = 0;
    for (int i = 0; i < n; i++) {
        if (columns[i].block != block) continue;
        if (w.note && !fits_in(w, stage.unit[columns[i].unit])) close_note(p, block, &w);
        if (!w.note) {
            if (!open_note(p, block, &w, stage)) return notes;
            if (block != columns[0].block || notes > 0) w.note->products.row = NULL;
            notes++;
        }
        put_unit(&w, stage, given, columns[i].unit, columns[i].from);
    }
    close_note(p, block, &w);
    return notes;
}

static void rest(mn_few_program *p, int block) {
    mn_few_note *note = mn_few_add_note(p, block);
    if (note) mn_few_end_note(p, block, offsetof(mn_few_note, products));
}

static void write_stage(mn_few_program *p, const few_stage &stage, const mn_few_products *given) {
    few_columns *columns;
    const int n = share_out(&columns, stage, p->n_blocks, p->turn);
    int *notes = (int *)calloc((size_t)p->n_blocks, sizeof *notes), most = 0;
    p->failed = p->failed || !columns || !notes;
    for (int block = 0; block < p->n_blocks && !p->failed; block++) {
        notes[block] = write_units(p, block, columns, n, stage, given);
        most = notes[block] > most ? notes[block] : most;
    }
    for (int block = 0; block < p->n_blocks && !p->failed; block++) {
        for (int i = notes[block]; i < most; i++) rest(p, block);
    }
    free(columns);
    free(notes);
    p->turn = (p->turn + n) % p->n_blocks;
    p->n_stages += most;
}

extern "C" bool mn_few_program_multiply(mn_few_program *p, const mn_few_products *given) {
    if (given->dtype != MN_BF16 || given->M != 1 || p->failed) return false;
    if (given->K % 8 != 0 || given->K > MN_FEW_CHUNKS * MN_FEW_CHUNK) return false;
    few_stage stage = {};
    mn_few_touch touch(p);
    bool fits = row_of(&stage.head, &touch, given) &&
                gather_units(stage.units, &stage.n_units, given);
    for (int i = 0; i < given->n && fits; i++) {
        const mn_few_product &product = given->of[i];
        fits = product.b_row % 8 == 0 && (uintptr_t)product.b % 16 == 0 &&
               product.b_row * 2 < INT32_MAX;
        touch.reads(product.b, (product.N - 1) * product.b_row + given->K, 2);
    }
    for (int i = 0; i < stage.n_units && fits; i++) {
        fits = fill_unit(&stage.unit[i], stage.end[i], &touch, stage.units[i], given);
    }
    if (!fits || !touch.place()) return false;
    for (int i = 0; i < stage.n_units; i++) {
        mn_few_unit *u = &stage.unit[i];
        u->to_words = u->to ? touch.words(u->to) : MN_FEW_NOWHERE;
        for (int k = 0; k < u->n_ends; k++) {
            stage.end[i][k].to_words = touch.words(stage.end[i][k].to);
        }
    }
    p->ragged = p->ragged || given->K % MN_FEW_CHUNK != 0;
    write_stage(p, stage, given);
    return true;
}

/* ---- memories -------------------------------------------------------------------------------- */

/* Numbers i of rows of heads begin at 16 bytes. */
static bool packs(const mn_in &x) {
    return (uintptr_t)x.data % 16 == 0 && x.stride[2] % 8 == 0;
}

/* Whether a norm makes the rows of `made`, one behind the other. */
static bool is_front(const mn_few *front, const mn_in &made, const mn_call &c) {
    bool fits = front->kind == MN_FEW_L2_NORM && front->shape[3] == c.K &&
                front->shape[2] == c.H && (c.H == 1 || made.stride[2] == c.K) &&
                front->at[1].data == made.data;
    for (int i = 0; i < 2; i++) {
        fits = fits && front->at[i].dtype == MN_BF16 && (uintptr_t)front->at[i].data % 16 == 0;
    }
    return fits;
}

/* A vector of a head, or what a norm makes it of. */
static mn_few_source head_of(mn_few_touch *touch, const mn_in &x, const mn_few *front, int64_t h,
                             int64_t K) {
    if (!front) return touch->source((const mn_bf16 *)x.data + h * x.stride[2], K, 8);
    return touch->source((const mn_bf16 *)front->at[0].data + h * K, K, 8);
}

static void fill_front(mn_few_memory_note *to, int i, const mn_few *front) {
    if (!front) return;
    const bool root = front->f == MN_FEW_ROOT;
    to->front[i] = { 1, root ? (float)front->scale : 0.0f,
                     root ? FLT_MAX : 1.0f / (float)front->scale, (mn_bf16 *)front->at[1].data };
}

/* What all tiles of head h have in common. */
static mn_few_memory_note head_note(mn_few_touch *touch, const mn_few_memory *m, int64_t h) {
    const mn_call &c = m->call;
    const mn_in &e = m->e.data ? m->e : m->w;
    mn_few_memory_note to = {};
    to.K = (int)c.K, to.V = (int)c.V, to.scale = (float)m->scale;
    to.erases = m->e.data != NULL;
    to.has_beta = m->beta.data != NULL, to.has_g = m->g.data != NULL;
    to.by_channel = to.has_g && m->decay == MN_DECAY_CHANNEL;
    to.q = head_of(touch, m->q, m->first[0], h, c.K);
    to.e = head_of(touch, e, m->e.data ? m->first[1] : NULL, h, c.K);
    if (to.has_g) {
        to.g = touch->source((const mn_bf16 *)m->g.data + h * m->g.stride[2],
                             to.by_channel ? c.K : 1, to.by_channel ? 8 : 1);
    }
    if (to.has_beta) {
        to.beta = touch->source((const mn_bf16 *)m->beta.data + h * m->beta.stride[2], 1, 1);
    }
    for (int i = 0; i < MN_FEW_FRONTS; i++) fill_front(&to, i, m->first[i]);
    return to;
}

static bool recalls(const mn_few_memory *m) {
    const mn_call &c = m->call;
    bool serves = c.dtype == MN_BF16 && c.T == 1 && c.B == 1 && !c.cu_seqlens && c.H > 0 &&
                  c.K > 0 && c.K <= MN_FEW_RECALLED && c.K % 8 == 0 && c.V > 0 &&
                  c.V % MN_FEW_TILE == 0 && packs(m->q) && packs(m->v) && m->q.data && m->o.data &&
                  !m->e.data != !m->w.data && m->state.data == m->state0.data &&
                  (c.H == 1 || m->o.stride[2] == c.V);
    if (m->e.data) serves = serves && packs(m->e);
    if (m->w.data) serves = serves && packs(m->w);
    if (m->decay == MN_DECAY_CHANNEL && m->g.data) serves = serves && packs(m->g);
    for (int i = 0; i < MN_FEW_FRONTS && serves; i++) {
        if (!m->first[i]) continue;
        serves = is_front(m->first[i], i == 0 ? m->q : m->e, c) && (i == 0 || m->e.data);
    }
    return serves;
}

/* What all of a memory touches; heads[h] becomes what the tiles of head h have in common. */
static bool touch_memory(mn_few_touch *touch, mn_few_memory_note *heads, const mn_few_memory *m) {
    const mn_call &c = m->call;
    for (int64_t h = 0; h < c.H && touch->fits; h++) {
        heads[h] = head_note(touch, m, h);
        heads[h].v = touch->source((const mn_bf16 *)m->v.data + h * m->v.stride[2], c.V, 4);
        heads[h].state = (float *)m->state.data + h * m->state.stride[2];
        touch->renews(heads[h].state, c.K * c.V, 4);
    }
    touch->writes(m->o.data, c.H * c.V, 2, true);
    for (int i = 0; i < MN_FEW_FRONTS; i++) {
        if (m->first[i]) touch->writes(heads[0].front[i].to, c.H * c.K, 2, false);
    }
    return touch->place();
}

/* Columns from `column` on of head h, whose results begin at o, and their words at o_words. */
static void write_tile(mn_few_program *p, int block, const mn_few_memory_note &head, mn_bf16 *o,
                       int o_words, int64_t h, int64_t column) {
    mn_few_note *note = mn_few_add_note(p, block);
    if (!note) return;
    mn_few_memory_note *to = &note->memory;
    const int64_t first = h * head.V + column;
    note->kind = MN_FEW_RECALL;
    *to = head;
    to->v = source_from(head.v, (int)column);
    to->o = o + first, to->o_words = mn_few_word_from(o_words, (unsigned)first);
    to->state += column;
    for (int i = 0; i < MN_FEW_FRONTS; i++) {
        if (to->front[i].to) to->front[i].to += h * head.K;
        if (column > 0) to->front[i].to = NULL;
    }
    mn_few_end_note(p, block, (int)(offsetof(mn_few_note, memory) + sizeof *to));
}

extern "C" bool mn_few_program_remember(mn_few_program *p, const mn_few_memory *m) {
    if (p->failed || !recalls(m)) return false;
    const int64_t tiles = m->call.V / MN_FEW_TILE, all = tiles * m->call.H;
    mn_few_touch touch(p);
    mn_few_memory_note *heads = (mn_few_memory_note *)calloc((size_t)m->call.H, sizeof *heads);
    if (!heads || !touch_memory(&touch, heads, m)) {
        free(heads);
        return false;
    }
    const int o_words = touch.words(m->o.data);
    for (int64_t from = 0; from < all; from += p->n_blocks) {
        for (int block = 0; block < p->n_blocks; block++) {
            const int64_t tile = from + (block - p->turn + p->n_blocks) % p->n_blocks;
            if (tile >= all) rest(p, block);
            else write_tile(p, block, heads[tile / tiles], (mn_bf16 *)m->o.data, o_words,
                            tile / tiles, tile % tiles * MN_FEW_TILE);
        }
        p->n_stages++;
    }
    p->turn = (int)((p->turn + all) % p->n_blocks);
    free(heads);
    return true;
}

/* ---- rows of tables -------------------------------------------------------------------------- */

/* The first stage does it: table and index are older than the program. */
extern "C" bool mn_few_program_pick(mn_few_program *p, const mn_few *rows) {
    const mn_view &table = rows->at[0], &to = rows->at[1];
    const int64_t width = rows->shape[3];
    mn_few_touch touch(p);
    const bool fits = !p->failed && rows->kind == MN_FEW_ROWS && rows->shape[2] == 1 &&
                      table.dtype == MN_BF16 && to.dtype == MN_BF16 && width < (1 << 24) &&
                      rows->numbers[0] < INT64_MAX;
    if (!fits) return false;
    touch.reads(table.data, rows->numbers[0], 2);
    touch.reads(rows->index, 1, 4);
    touch.writes(to.data, width, 2, true);
    if (!touch.fits) return false;
    mn_few_range *made = &touch.list[touch.n - 1];
    touch.add_words(made);
    touch.copies({ (const mn_bf16 *)table.data, (mn_bf16 *)to.data, rows->index, width,
                   made->words, (int)width });
    return touch.place();
}
