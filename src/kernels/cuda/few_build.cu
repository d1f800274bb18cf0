/* few_build.cu - writes programs (kernels/few.h): what each block does in each stage, as a note
 * that it finds in its own list.
 *
 * Units of a stage, and tiles of a memory, go round the blocks; what a block cannot take in one
 * note becomes further notes, which are stages of their own. Numbers that a later stage reads have
 * words behind all notes. Since no barrier stands between stages, nothing may be written that an
 * earlier stage reads from memory or writes itself: then the program has to end before. */
#include <float.h>
#include <stdlib.h>

#include "kernels/cuda/few_program.cuh"
#include "kernels/cuda/few_program.h"

enum { MOST_RANGES = 16384, WORDS_ALIGNED = 128 };
enum {
    COPY_BYTES = (int)((offsetof(mn_few_note, copy) + sizeof(mn_few_copy_note) + 15) / 16 * 16)
};

/* Bytes that stages read or write. Those written may have words; those read have where they are
 * copied to words first. */
struct few_range {
    uintptr_t begin, end;
    bool writes, flagged, read;
    int words;                  // bytes from the first word
};

/* A block's notes. */
struct few_list {
    unsigned char *bytes;
    int64_t n, most, last;      // where the last note begins
    int64_t first;              // bytes of the first
};

struct mn_few_program {
    int n_stages, n_blocks, turn;    // turn: the block that has the next unit
    int64_t words;                   // bytes of all words
    int64_t n_copies;                // pieces of what is copied to words first
    few_list *list;
    few_range *range;
    int64_t n_ranges, most_ranges;
    bool failed;                     // memory was out
};

/* ---- lists ----------------------------------------------------------------------------------- */

static bool grow(void **list, int64_t *most, int64_t n, size_t item) {
    if (n <= *most) return true;
    const int64_t more = n > 2 * *most ? n : 2 * *most;
    void *grown = realloc(*list, (size_t)more * item);
    if (!grown) return false;
    *list = grown;
    *most = more;
    return true;
}

/* A zeroed note at the end of a block's list; its bytes are set when it is complete. */
static mn_few_note *add_note(mn_few_program *p, int block) {
    few_list *list = &p->list[block];
    if (!grow((void **)&list->bytes, &list->most, list->n + MN_FEW_NOTE_BYTES, 1)) {
        p->failed = true;
        return NULL;
    }
    mn_few_note *note = (mn_few_note *)(list->bytes + list->n);
    memset(note, 0, MN_FEW_NOTE_BYTES);
    return note;
}

static void end_note(mn_few_program *p, int block, int bytes) {
    few_list *list = &p->list[block];
    bytes = (bytes + 15) / 16 * 16;
    if (list->n == 0) list->first = bytes;
    else ((mn_few_note *)(list->bytes + list->last))->next_bytes = bytes;
    list->last = list->n;
    list->n += bytes;
}

static few_range range_of(const void *data, size_t bytes, bool writes) {
    few_range range = {};
    range.begin = (uintptr_t)data, range.end = range.begin + bytes;
    range.writes = writes, range.words = MN_FEW_NOWHERE;
    return range;
}

static bool meet(const few_range &a, const few_range &b) {
    return a.begin < b.end && b.begin < a.end;
}

/* ---- what a stage touches -------------------------------------------------------------------- */

/* What one stage touches, gathered before it is added. */
struct few_touch {
    mn_few_program *p;
    few_range list[512];
    int n;
    int64_t n_copies;
    bool fits;

    explicit few_touch(mn_few_program *program) : p(program), n(0), n_copies(0), fits(true) {}

    void add(const few_range &range) {
        if (n == (int)(sizeof list / sizeof *list)) fits = false;
        else list[n++] = range;
    }

    /* Numbers that must be older than the program. */
    void reads(const void *data, int64_t count, size_t item) {
        if (!data) return;
        const few_range range = range_of(data, (size_t)count * item, false);
        if (is_written(data, count * (int64_t)item)) fits = false;
        add(range);
    }

    /* Results, which others may read as words where they are `flagged`. */
    void writes(const void *data, int64_t count, size_t item, bool flagged) {
        if (!data) return;
        few_range range = range_of(data, (size_t)count * item, true);
        for (int64_t i = 0; i < p->n_ranges; i++) {
            if (meet(range, p->range[i])) fits = false;
        }
        range.flagged = flagged;
        add(range);
    }

    bool is_written(const void *data, int64_t bytes) const {
        const few_range range = range_of(data, (size_t)bytes, false);
        for (int64_t i = 0; i < p->n_ranges; i++) {
            if (p->range[i].writes && meet(range, p->range[i])) return true;
        }
        return false;
    }

    /* Memory that a block reads before it writes the same itself. */
    void renews(const void *data, int64_t count, size_t item) {
        writes(data, count, item, false);
    }

    /* Numbers of bf16, wherever they come from. `even`: those asked for at once. */
    mn_few_source source(const void *data, int64_t count, int even) {
        const few_range range = range_of(data, (size_t)count * 2, false);
        few_range *home = NULL;
        for (int64_t i = 0; i < p->n_ranges + n; i++) {
            few_range &other = i < p->n_ranges ? p->range[i] : list[i - p->n_ranges];
            const bool counts = other.writes || other.flagged;
            if (!counts || !meet(range, other) || (i >= p->n_ranges && other.writes)) continue;
            const bool whole = other.begin <= range.begin && range.end <= other.end;
            if (whole && other.flagged) home = &other;
            else if (other.writes) fits = false;
        }
        if (!home) {
            fits = fits && range.begin % 2 == 0 && n < (int)(sizeof list / sizeof *list);
            if (!fits) return {};
            home = &list[n++];
            *home = range;
            home->flagged = true;
            add_words(home);
            n_copies += mn_ceil_div(count, (int64_t)MN_FEW_CHUNK);
        }
        const int64_t at = (int64_t)(range.begin - home->begin) / 2;
        fits = fits && at % even == 0;
        home->read = true;
        return { home->words + (int)(at / 2 * 8), 1, (short)(at % 2) };
    }

    /* A place for words. What is not added at last leaves a gap. */
    void add_words(few_range *range) {
        range->words = (int)p->words;
        const int64_t bytes = (int64_t)(range->end - range->begin) * 2;
        p->words += (bytes + 16 + WORDS_ALIGNED - 1) / WORDS_ALIGNED * WORDS_ALIGNED;
    }

    /* Words of something written, or MN_FEW_NOWHERE, before it is known whether any are read. */
    int words(const void *data) const {
        for (int i = 0; i < n; i++) {
            if (list[i].writes && list[i].begin == (uintptr_t)data) return list[i].words;
        }
        return MN_FEW_NOWHERE;
    }

    /* Places for words; what has been touched is the program's. */
    bool place(void) {
        if (!fits || !grow((void **)&p->range, &p->most_ranges, p->n_ranges + n, sizeof *list) ||
            p->n_ranges + n > MOST_RANGES ||
            p->n_copies + n_copies > MN_FEW_COPIES * p->n_blocks) {
            return false;
        }
        p->n_copies += n_copies;
        for (int i = 0; i < n; i++) {
            if (list[i].flagged && list[i].writes) add_words(&list[i]);
            p->range[p->n_ranges + i] = list[i];
        }
        p->n_ranges += n;
        return true;
    }
};

/* ---- products -------------------------------------------------------------------------------- */

/* How the row comes; false where no stage can make it. */
static bool row_of(mn_few_products_note *to, few_touch *touch, const mn_few_products *given) {
    const mn_few *first = given->first;
    to->K = (int)given->K, to->chunks = (int)mn_ceil_div(given->K, MN_FEW_CHUNK);
    to->way = MN_FEW_AS_IT_IS;
    if (!first) {
        to->x = touch->source(given->a, given->K, 2).at;
        return true;
    }
    const bool gated = first->kind == MN_FEW_GATED_NORM;
    const int64_t width = first->shape[3], groups = given->K / (width > 0 ? width : 1);
    const int64_t warps = width / MN_FEW_SPAN;
    const bool even = warps == 2 || warps == 4 || warps == 8 || warps == 16;
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
    to->group = groups > 1 ? (int)warps : MN_FEW_WARPS;
    to->sigmoid = gated && first->f == MN_FEW_SIGMOID;
    to->inverse_width = 1.0f / (float)width, to->epsilon = (float)first->scale;
    to->weight = (const mn_bf16 *)first->at[gated ? 2 : 1].data;
    to->wrap = shared ? (int)width - 1 : INT32_MAX;
    to->row = (mn_bf16 *)first->at[gated ? 3 : 2].data;
    touch->reads(to->weight, shared ? width : given->K, 2);
    to->x = touch->source(first->at[0].data, given->K, 2).at;
    if (gated) to->z = touch->source(first->at[1].data, given->K, 2).at;
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
    const bool function = unit.n_ends == 1 && unit.n_products == 2 && only.kind == MN_FEW_UNARY &&
                          value_of(unit, given, unit.ends[0], 0) == 0 &&
                          value_of(unit, given, unit.ends[0], 1) == 1 &&
                          only.at[2].dtype == MN_BF16;
    return function ? MN_FEW_FUNCTION : MN_FEW_LISTED;
}

static int64_t count_of(const int64_t shape[4]) {
    return shape[0] * shape[1] * shape[2] * shape[3];
}

/* How many of N columns share a number of input k of a small work. */
static int columns_of(const mn_few &work, int k, int64_t N) {
    int64_t numbers = 1;
    for (int i = 0; i < 4; i++) numbers *= work.at[k].stride[i] != 0 ? work.shape[i] : 1;
    return (int)(N / numbers);
}

/* What is older than the program is read ahead, while there is room for that; else, if it is of
 * bf16, from words. */
static void touch_input(few_touch *touch, mn_few_unit *to, mn_few_input *in, const void *data,
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
static mn_few_end end_of(few_touch *touch, mn_few_unit *to, const few_unit &unit,
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

/* A unit of all columns, and its ends. */
static bool fill_unit(mn_few_unit *to, mn_few_end *ends, few_touch *touch, const few_unit &unit,
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
    if (form == MN_FEW_STORED) to->to = to->c[0], to->c[0] = NULL;
    if (form == MN_FEW_ADDED) {
        to->to = (mn_bf16 *)given->of[unit.product[0]].sum;
        to->plus = touch->source(given->of[unit.product[0]].plus, N, 2);
        touch->writes(to->to, N, 2, true);
        return unit.n_products == 1;
    }
    if (form == MN_FEW_FUNCTION) {
        const mn_few &work = given->ending[unit.ends[0]].work;
        to->to = (mn_bf16 *)work.at[2].data, to->f = (unsigned char)work.f, to->narrow = 1;
        touch->writes(to->to, N, 2, true);
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
    return true;
}

/* From number `i` on, which may be the upper one of its word. */
static mn_few_source source_from(mn_few_source source, int i) {
    const int at = source.odd + i;
    source.at += at / 2 * 8;
    source.odd = (short)(at % 2);
    return source;
}

static mn_few_unit unit_from(const mn_few_unit &all, int from) {
    mn_few_unit u = all;
    u.n_rows = (unsigned char)mn_min(MN_FEW_COLUMNS, all.N - from);
    if (u.to_words >= 0) u.to_words += from * 4;
    for (int i = 0; i < 2; i++) {
        if (u.c[i]) u.c[i] += from;
        if (u.bias[i]) u.bias[i] += from;
    }
    if (u.to) u.to += from;
    u.plus = source_from(u.plus, from);
    if (u.form == MN_FEW_CONVOLVED) {
        u.taps += (int64_t)from * MN_FEW_TAPS;
        if (u.taps_bias) u.taps_bias += from;
        if (u.tail0) u.tail0 += from;
        if (u.tail) u.tail += from;
    }
    for (int i = 0; i < MN_FEW_EARLY && u.form == MN_FEW_LISTED; i++) {
        if (u.early[i]) u.early[i] += (int64_t)(from / u.early_per[i]) * (u.early_wide[i] ? 4 : 2);
    }
    return u;
}

static mn_few_end end_from(const mn_few_end &all, int from) {
    mn_few_end e = all;
    if (e.to_words >= 0) e.to_words += from * 4;
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
    end_note(p, block, (int)(at + (size_t)w->n_ends * sizeof *w->ends));
    w->note = NULL;
}

static bool open_note(mn_few_program *p, int block, few_writing *w, const few_stage &stage) {
    w->note = add_note(p, block);
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
    mn_few_note *note = add_note(p, block);
    if (note) end_note(p, block, offsetof(mn_few_note, products));
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
    few_touch touch(p);
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
static mn_few_source head_of(few_touch *touch, const mn_in &x, const mn_few *front, int64_t h,
                             int64_t K) {
    if (!front) return touch->source((const mn_bf16 *)x.data + h * x.stride[2], K, 4);
    return touch->source((const mn_bf16 *)front->at[0].data + h * K, K, 4);
}

static void fill_front(mn_few_memory_note *to, int i, const mn_few *front) {
    if (!front) return;
    const bool root = front->f == MN_FEW_ROOT;
    to->front[i] = { 1, root ? (float)front->scale : 0.0f,
                     root ? FLT_MAX : 1.0f / (float)front->scale, (mn_bf16 *)front->at[1].data };
}

/* What all tiles of head h have in common. */
static mn_few_memory_note head_note(few_touch *touch, const mn_few_memory *m, int64_t h) {
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
                             to.by_channel ? c.K : 1, to.by_channel ? 4 : 1);
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
static bool touch_memory(few_touch *touch, mn_few_memory_note *heads, const mn_few_memory *m) {
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
    mn_few_note *note = add_note(p, block);
    if (!note) return;
    mn_few_memory_note *to = &note->memory;
    const int64_t first = h * head.V + column;
    note->kind = MN_FEW_RECALL;
    *to = head;
    to->v = source_from(head.v, (int)column);
    to->o = o + first, to->o_words = o_words + (int)first * 4;
    to->state += column;
    for (int i = 0; i < MN_FEW_FRONTS; i++) {
        if (to->front[i].to) to->front[i].to += h * head.K;
        if (column > 0) to->front[i].to = NULL;
    }
    end_note(p, block, (int)(offsetof(mn_few_note, memory) + sizeof *to));
}

extern "C" bool mn_few_program_remember(mn_few_program *p, const mn_few_memory *m) {
    if (p->failed || !recalls(m)) return false;
    const int64_t tiles = m->call.V / MN_FEW_TILE, all = tiles * m->call.H;
    few_touch touch(p);
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

/* ---- programs -------------------------------------------------------------------------------- */

extern "C" bool mn_few_programs_serve(void) {
    return mn_few_blocks() > 0;
}

extern "C" mn_few_program *mn_few_program_create(void) {
    mn_few_program *p = (mn_few_program *)calloc(1, sizeof *p);
    if (!p) return NULL;
    p->n_blocks = mn_few_blocks();
    p->list = (few_list *)calloc((size_t)p->n_blocks, sizeof *p->list);
    if (p->list) return p;
    free(p);
    return NULL;
}

extern "C" void mn_few_program_destroy(mn_few_program *p) {
    if (!p) return;
    for (int i = 0; i < p->n_blocks; i++) free(p->list[i].bytes);
    free(p->list);
    free(p->range);
    free(p);
}

extern "C" void mn_few_program_clear(mn_few_program *p) {
    for (int i = 0; i < p->n_blocks; i++) p->list[i].n = 0;
    p->n_stages = p->turn = 0;
    p->n_ranges = p->words = p->n_copies = 0;
    p->failed = false;
}

static int64_t notes_at(const mn_few_program *p) {
    const int64_t starts = p->n_blocks * (int64_t)sizeof(mn_few_start);
    return ((int64_t)sizeof(mn_few_head) + starts + 127) / 128 * 128;
}

static int64_t words_at(const mn_few_program *p) {
    int64_t bytes = notes_at(p);
    for (int i = 0; i < p->n_blocks; i++) bytes += COPY_BYTES + p->list[i].n;
    return (bytes + 127) / 128 * 128;
}

extern "C" size_t mn_few_program_bytes(const mn_few_program *p) {
    return p->n_stages > 0 && !p->failed ? (size_t)(words_at(p) + MN_FEW_ECHOES * p->words) : 0;
}

/* Which words are read: a byte for each WORDS_ALIGNED of them. */
static unsigned char *list_read(const mn_few_program *p) {
    unsigned char *read = (unsigned char *)calloc((size_t)(p->words / WORDS_ALIGNED + 1), 1);
    for (int64_t i = 0; i < p->n_ranges && read; i++) {
        const few_range &range = p->range[i];
        if (!range.flagged || !range.read) continue;
        const int64_t bytes = (int64_t)(range.end - range.begin) * 2;
        for (int64_t at = 0; at < bytes; at += WORDS_ALIGNED) {
            read[(range.words + at) / WORDS_ALIGNED] = 1;
        }
    }
    return read;
}

/* Words from the beginning of the program, and only where somebody reads them. */
struct few_moving {
    const unsigned char *read;
    int64_t base;

    void words(int *at) const {
        if (*at < 0) return;
        if (read && !read[*at / WORDS_ALIGNED]) *at = MN_FEW_NOWHERE;
        else *at += (int)base;
    }

    void source(int *at) const {
        *at += (int)base;
    }

    void note(mn_few_note *note) const {
        if (note->kind == MN_FEW_RECALL) {
            mn_few_memory_note *m = &note->memory;
            mn_few_source *of[] = { &m->q, &m->e, &m->v, &m->beta, &m->g };
            for (mn_few_source *from : of) source(&from->at);
            words(&m->o_words);
        }
        if (note->kind != MN_FEW_MULTIPLY) return;
        mn_few_products_note *p = &note->products;
        mn_few_end *end = (mn_few_end *)((char *)note + note->ends_at);
        source(&p->x);
        source(&p->z);
        for (int i = 0; i < p->n_units; i++) {
            mn_few_unit *unit = &p->unit[i];
            source(&unit->plus.at);
            words(&unit->to_words);
            for (int k = 0; k < unit->n_ends; k++, end++) {
                for (mn_few_input &in : end->in) source(&in.source.at);
                words(&end->to_words);
            }
        }
    }
};

/* A block's first note: blocks in turn copy what the program reads to words. */
static void write_first(void *to, const mn_few_program *p, int block, int64_t base) {
    mn_few_note *note = (mn_few_note *)to;
    note->kind = MN_FEW_COPY, note->next_bytes = (int)p->list[block].first;
    for (int64_t i = 0, turn = 0; i < p->n_ranges; i++) {
        const few_range &range = p->range[i];
        if (!range.flagged || range.writes) continue;
        const int64_t count = (int64_t)(range.end - range.begin) / 2;
        for (int64_t from = 0; from < count; from += MN_FEW_CHUNK, turn++) {
            if (turn % p->n_blocks != block) continue;
            note->copy.of[note->copy.n++] = { (const mn_bf16 *)range.begin + from,
                                              (int)(base + range.words + from * 4),
                                              (int)mn_min(count - from, MN_FEW_CHUNK) };
        }
    }
}

extern "C" void mn_few_program_write(const mn_few_program *p, void *to) {
    unsigned char *bytes = (unsigned char *)to, *read = list_read(p);
    memset(bytes, 0, mn_few_program_bytes(p));
    mn_few_start *starts = (mn_few_start *)(bytes + sizeof(mn_few_head));
    const few_moving moving = { read, words_at(p) };
    int64_t at = notes_at(p);
    for (int block = 0; block < p->n_blocks; block++) {
        const few_list &list = p->list[block];
        starts[block] = { at, COPY_BYTES };
        write_first(bytes + at, p, block, moving.base);
        at += COPY_BYTES;
        memcpy(bytes + at, list.bytes, (size_t)list.n);
        int64_t next = list.first;
        for (int64_t i = 0; i < list.n;) {
            mn_few_note *note = (mn_few_note *)(bytes + at + i);
            moving.note(note);
            i += next;
            next = note->next_bytes;
        }
        at += list.n;
    }
    free(read);
}

extern "C" int mn_few_program_launch(const mn_few_program *p, void *there, void *stream) {
    return mn_few_start_program(there, 1 + p->n_stages, (int)p->words, stream);
}
