/* works.c - which small works and operators become one stage of a megakernel.
 *
 * An operator is ready when what it waits for has been done or is made by small works of which
 * every piece of it can make its own part. That saves the barrier which would else stand between
 * them. */
#include "decode/works.h"

#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "decode/cells.h"
#include "ops/run.h"
#include "ops/validate.h"

enum {
    WHOLE = 1024,    // elements that each piece may make all of
    LONG = 2048,     // elements that are better shared out among blocks, behind a barrier
    EVEN = 8,        // pieces begin at multiples of it
};

enum { OWN, SHARED };

static const struct {
    mn_op_id op;
    int columns, results;
} steps[MN_DECODE_STEPS] = {
#define DECODE_STEP(op, folder, columns, results, memory)                                          \
    [MN_DECODE_STEP_##op] = { MN_OP_##op, columns, results },
#include "kernels/decode_steps.def"
#undef DECODE_STEP
};

/* ---- operators ------------------------------------------------------------------------------- */

mn_op_id mn_step_op(const mn_step_work *w) {
    return steps[w->step].op;
}

static const mn_call *call_of(const mn_step_work *w) {
    return (const mn_call *)w->args;
}

/* The operator as a step; false where no stage makes it. */
static bool fill_step(mn_step_work *to, const mn_defer *all, int i) {
    const mn_deferred *d = &all->list[i];
    if (d->kind != MN_DEFERRED_OP) return false;
    const size_t bytes = mn_op_describe(d->of.op.id)->args_bytes;
    const mn_call *call = d->of.op.args;
    int k = 0;
    while (k < MN_DECODE_STEPS && steps[k].op != d->of.op.id) k++;
    if (k == MN_DECODE_STEPS || bytes > MN_DECODE_ARGS_BYTES || call->dtype != MN_BF16 ||
        call->T > 1 || call->B > 1 || call->cu_seqlens) {
        return false;
    }
    *to = (mn_step_work){ .step = (mn_decode_step_kind)k, .deferred = i };
    memcpy(to->args, d->of.op.args, bytes);
    return mn_validate_sizes(d->of.op.id, to->args, false) == MN_OK &&
           mn_op_find_counts(d->of.op.id, to->args, &all->counts) &&
           mn_megakernel_takes_step(to->step, to->args);
}

int64_t mn_step_heads(const mn_step_work *w) {
    return mn_max(call_of(w)->H, 1);
}

static int64_t tiles_of(const mn_step_work *w) {
    const int columns = steps[w->step].columns;
    return columns > 0 ? mn_ceil_div(call_of(w)->V, columns) : mn_max(call_of(w)->G, 1);
}

int64_t mn_step_pieces(const mn_step_work *w) {
    return mn_step_heads(w) * tiles_of(w);
}

mn_span mn_step_piece(int64_t *head, int64_t *column, const mn_step_work *w, int64_t piece) {
    const int64_t tiles = tiles_of(w), V = call_of(w)->V, tile = piece % tiles;
    const int columns = steps[w->step].columns;
    const int64_t begin = columns > 0 ? tile * columns : mn_ceil_div(tile * V, tiles);
    const int64_t end = columns > 0 ? mn_min(begin + columns, V)
                                    : mn_ceil_div((tile + 1) * V, tiles);
    *head = piece / tiles;
    *column = columns > 0 ? begin : tile;
    return (mn_span){ *head * V + begin, end - begin };
}

bool mn_step_shares(const mn_step_work *w) {
    return steps[w->step].results == SHARED;
}

static const mn_field *field_of(const mn_step_work *w, int i, const char **axes,
                                char buffer[MN_MAX_RANK + 1]) {
    int n;
    const mn_field *field = &mn_op_fields(mn_step_op(w), &n)[i];
    *axes = mn_field_axes(field, mn_args_decay(mn_step_op(w), w->args), buffer);
    return field;
}

static const mn_in *view_of(const mn_step_work *w, const mn_field *field) {
    return (const mn_in *)(w->args + field->offset);
}

mn_span mn_step_reads(const mn_step_work *w, int i, int64_t piece) {
    char buffer[MN_MAX_RANK + 1];
    const char *axes;
    field_of(w, i, &axes, buffer);
    int64_t head, column;
    const mn_call *call = call_of(w);
    const mn_span made = mn_step_piece(&head, &column, w, piece);
    mn_span span = { 0, 1 };
    bool ok = true;
    for (; *axes; axes++) {
        const int64_t size = mn_axis_size(call, *axes, &ok);
        if (strchr("BTN", *axes)) continue;
        span.begin *= size;
        if (span.count > 1) span.count *= size;    // all of what is inside
        else if (*axes == 'H') span.begin += head;
        else if (*axes == 'J') span.begin += head * call->J / mn_max(call->H, 1);
        else if (*axes == 'V') span.begin += made.begin - head * call->V, span.count = made.count;
        else span.count = size;
    }
    return span;
}

/* Numbers of a head of a result that is a row of them for each head; 0: it is no such. */
static int64_t row_width(const mn_step_work *w, const char *axes) {
    const bool whole = steps[w->step].columns == 0 && tiles_of(w) == 1;
    if (strcmp(axes, "BTV") == 0 || strcmp(axes, "BTHV") == 0) return call_of(w)->V;
    return whole && strcmp(axes, "BTHK") == 0 ? call_of(w)->K : 0;
}

const mn_decode_bf16 *mn_step_result(const mn_step_work *w, int i) {
    char buffer[MN_MAX_RANK + 1];
    const char *axes;
    const mn_field *field = field_of(w, i, &axes, buffer);
    const mn_in *view = view_of(w, field);
    const mn_call *call = call_of(w);
    const int64_t width = field->role >= MN_ROLE_OUT && axes && view->data ? row_width(w, axes) : 0;
    if (width == 0 || width % EVEN != 0) return NULL;
    if (mn_field_dtype(field, call->dtype) != MN_BF16) return NULL;
    if (steps[w->step].columns == 0 && width % (EVEN * tiles_of(w)) != 0) return NULL;
    return call->H <= 1 || view->stride[2] == width ? view->data : NULL;
}

mn_span mn_step_makes(const mn_step_work *w, int i, int64_t piece) {
    char buffer[MN_MAX_RANK + 1];
    const char *axes;
    int64_t head, column;
    field_of(w, i, &axes, buffer);
    const mn_span columns = mn_step_piece(&head, &column, w, piece);
    const int64_t K = call_of(w)->K;
    return strcmp(axes, "BTHK") == 0 ? (mn_span){ head * K, K } : columns;
}

/* ---- small works ----------------------------------------------------------------------------- */

int64_t mn_small_units(const mn_decode_op *f) {
    if (mn_is_elementwise(f)) return mn_count4(f->shape);
    return f->kind == MN_DECODE_CONV ? f->shape[2] * f->shape[3] : f->shape[2];
}

int64_t mn_small_unit_size(const mn_decode_op *f) {
    return mn_is_elementwise(f) || f->kind == MN_DECODE_CONV ? 1 : f->shape[3];
}

static int64_t elements_of(const mn_decode_op *f) {
    return mn_small_units(f) * mn_small_unit_size(f);
}

/* Whether what lies at `data` is of an interval. */
static bool lies_in(const mn_values *values, const void *data, const mn_mem_range *range) {
    const mn_mem_range at = mn_values_range(values, data, 1);
    return mn_ranges_meet(&at, range);
}

/* What a small work makes, from its first element on. */
static mn_mem_range result_of(const mn_values *values, const mn_decode_op *f) {
    const mn_view *to = mn_decode_result(f);
    return mn_values_range(values, to->data, (size_t)elements_of(f) * mn_dtype_bytes(to->dtype));
}

/* The same of an interval. */
static bool strays_in(const mn_values *values, const mn_decode_op *f, const mn_mem_range *made,
                      int64_t count) {
    for (int i = 0; i < mn_decode_inputs_of(f->kind); i++) {
        const void *at = f->at[i].data;
        if (!at || !lies_in(values, at, made)) continue;
        if (!mn_values_begins(values, made, at) || !mn_is_row(&f->at[i], f->shape, count)) {
            return true;
        }
    }
    return false;
}

bool mn_small_strays(const mn_values *values, const mn_decode_op *f, const mn_decode_op *made,
                     int64_t count) {
    const mn_mem_range result = result_of(values, made);
    return strays_in(values, f, &result, count);
}

/* Whether f goes number by number from what `made` is. */
static bool goes_along(const mn_defer *all, const mn_decode_op *f, const mn_decode_op *made) {
    const int64_t count = mn_small_units(f);
    return mn_is_elementwise(f) && mn_is_elementwise(made) && mn_small_units(made) == count &&
           mn_is_row(mn_decode_result(made), made->shape, count) &&
           !mn_small_strays(&all->values, f, made, count);
}

/* ---- what makes an operator's inputs --------------------------------------------------------- */

/* Whether pieces can make work f, rows or elements, by what they read of the field. */
static bool follows_field(const mn_step_work *w, const mn_decode_op *f, int field) {
    char buffer[MN_MAX_RANK + 1];
    const char *axes;
    const mn_in *view = view_of(w, field_of(w, field, &axes, buffer));
    if (!axes || strchr(axes, 'N') || view->data != mn_decode_result(f)->data) return false;
    const int64_t unit = mn_small_unit_size(f), all = elements_of(f), last = mn_step_pieces(w) - 1;
    const mn_span end = mn_step_reads(w, field, last);
    if (end.begin + end.count != all) return false;    // heads that do not follow each other
    if (mn_is_elementwise(f) && !mn_is_row(mn_decode_result(f), f->shape, all)) return false;
    const bool inner = strlen(axes) > 3 && call_of(w)->H > 1;
    if (inner && view->stride[2] != all / (strchr(axes, 'J') ? call_of(w)->J : call_of(w)->H)) {
        return false;
    }
    for (int64_t piece = 0; piece <= last; piece++) {
        const mn_span span = mn_step_reads(w, field, piece);
        const int64_t even = unit > 1 ? unit : EVEN;
        if (span.begin % even != 0 || (span.count % even != 0 && span.begin + span.count != all)) {
            return false;
        }
    }
    return true;
}

/* The field of the operator that work k's result is, if pieces can make that by what they read, and
 * whether any field lies in it in another way. */
static int field_made(const mn_step_work *w, const mn_defer *all, const mn_decode_op *f,
                      bool *other) {
    int n, found = MN_WORK_WHOLE;
    const mn_field *fields = mn_op_fields(mn_step_op(w), &n);
    const mn_mem_range result = result_of(&all->values, f);
    for (int i = 0; i < n; i++) {
        const void *data = view_of(w, &fields[i])->data;
        if (!data || !lies_in(&all->values, data, &result)) continue;
        if (found == MN_WORK_WHOLE && follows_field(w, f, i)) found = i;
        else *other = true;
    }
    return found;
}

/* What pieces make of work number j of `before`, given that of those behind it. */
static bool fill_follows(mn_step_work *w, const mn_defer *all, int j) {
    const mn_chain *c = &w->before;
    const mn_decode_op *f = mn_small_at(all, c->of[j]);
    bool whole = false;
    int follows = field_made(w, all, f, &whole);
    for (int k = j + 1; k < c->n; k++) {
        if (!(all->list[c->of[k]].after & mn_bit(c->of[j]))) continue;
        const bool along = goes_along(all, mn_small_at(all, c->of[k]), f);
        if (along && follows == MN_WORK_WHOLE && !whole) follows = w->follows[k];
        whole |= !along || follows != w->follows[k];
    }
    w->follows[j] = whole ? MN_WORK_WHOLE : follows;
    if (f->kind == MN_DECODE_CONV || f->kind == MN_DECODE_ROWS) return false;    // not done twice
    return w->follows[j] != MN_WORK_WHOLE || elements_of(f) <= WHOLE;
}

/* Small works among `small` that the operator waits for, and those that they wait for. */
static bool attach_before(mn_step_work *w, const mn_defer *all, uint64_t small) {
    const mn_deferred *d = &all->list[w->deferred];
    uint64_t before = d->after & ~all->done;
    for (int k = w->deferred - 1; k >= 0; k--) {
        if (before & mn_bit(k)) before |= all->list[k].after & ~all->done;
    }
    if (before & ~small) return false;
    for (int k = 0; k < w->deferred; k++) {
        if (!(before & mn_bit(k))) continue;
        if (w->before.n == MN_WORK_ATTACHED || !mn_only_reads(d, &all->list[k])) return false;
        w->before.of[w->before.n++] = k;
    }
    for (int j = w->before.n - 1; j >= 0; j--) {
        if (!fill_follows(w, all, j)) return false;
    }
    return true;
}

/* ---- what follows from an operator's results ------------------------------------------------- */

/* Whether a small work goes over one number for each result. */
static bool goes_by(const mn_step_work *w, const mn_deferred *d) {
    const int64_t count = mn_step_heads(w) * call_of(w)->V;
    return d->kind == MN_DEFERRED_SMALL && mn_is_elementwise(&d->of.few) &&
           mn_small_units(&d->of.few) == count && mn_is_row(mn_decode_result(&d->of.few),
                                                            d->of.few.shape, count);
}

/* Whether it reads of the operator's results only those of its own piece, and only reads them. */
static bool reads_own(const mn_step_work *w, const mn_defer *all, const mn_deferred *d) {
    const mn_deferred *from = &all->list[w->deferred];
    const int64_t count = mn_step_heads(w) * call_of(w)->V;
    int n;
    mn_op_fields(mn_step_op(w), &n);
    if (!mn_only_reads(d, from)) return false;
    for (int m = 0; m < from->n_ranges; m++) {
        const mn_mem_range *range = &from->ranges[m];
        bool row = false;
        for (int i = 0; i < n; i++) {
            const mn_decode_bf16 *result = mn_step_result(w, i);
            row |= result && mn_values_begins(&all->values, range, result);
        }
        if (range->writes && strays_in(&all->values, &d->of.few, range, row ? count : -1)) {
            return false;
        }
    }
    for (int j = 0; j < w->after.n; j++) {
        if (!goes_along(all, &d->of.few, mn_small_at(all, w->after.of[j]))) return false;
    }
    return true;
}

/* Small work k as one that follows, with those beside it that only it waits for; returns their
 * bits, 0 where it is none. `known`: the operator and what follows already; `small`: what is
 * ready. */
static uint64_t follow(mn_step_work *w, const mn_defer *all, int k, uint64_t known,
                       uint64_t small) {
    const mn_deferred *d = &all->list[k];
    const uint64_t missing = d->after & ~all->done, beside = missing & ~known;
    if (!(missing & known) || !goes_by(w, d) || beside & ~small || !reads_own(w, all, d)) return 0;
    mn_chain after = w->after;
    for (int i = 0; i < all->n; i++) {
        if (!(beside & mn_bit(i))) continue;
        const mn_deferred *one = &all->list[i];
        if (one->after & ~all->done || !goes_by(w, one) || !mn_only_reads(d, one) ||
            !goes_along(all, &d->of.few, &one->of.few)) {
            return 0;
        }
        if (after.n < MN_WORK_ATTACHED) after.of[after.n++] = i;
    }
    if (after.n >= MN_WORK_ATTACHED) return 0;
    after.of[after.n++] = k;
    w->after = after;
    return beside | mn_bit(k);
}

static uint64_t attach_after(mn_step_work *w, const mn_defer *all, uint64_t taken, uint64_t small) {
    uint64_t after = 0;
    for (int k = w->deferred + 1; k < all->n; k++) {
        if ((all->done | taken | after) & mn_bit(k)) continue;
        after |= follow(w, all, k, mn_bit(w->deferred) | after, small & ~taken & ~after);
    }
    return after;
}

/* ---- the stage ------------------------------------------------------------------------------- */

static uint64_t bits_of(const mn_chain *c) {
    uint64_t bits = 0;
    for (int i = 0; i < c->n; i++) bits |= mn_bit(c->of[i]);
    return bits;
}

/* `early`: without dynamics that wait for a stage that makes them by itself. */
static void select_steps(mn_work_set *set, const mn_defer *all, uint64_t small, bool early) {
    for (int i = 0; i < all->n && set->n_steps < MN_WORK_STEPS; i++) {
        mn_step_work *w = &set->step[set->n_steps];
        if (all->done & mn_bit(i) || !fill_step(w, all, i)) continue;
        if (early && mn_kla_makes(all, i)) continue;
        if (!attach_before(w, all, small & ~set->taken)) continue;
        set->taken |= mn_bit(i) | bits_of(&w->before);
        set->n_steps++;
    }
    for (int i = 0; i < set->n_steps; i++) {
        set->taken |= attach_after(&set->step[i], all, set->taken, small);
    }
}

/* Whether two works that depend on each other are better off as stages of their own: one of them
 * is long and would be a single block's. */
static bool is_long(const mn_defer *all, const mn_decode_op *f, const mn_decode_op *made) {
    return mn_max(elements_of(f), elements_of(made)) > LONG && !goes_along(all, f, made);
}

/* Without those that depend on what steps do, and long ones that depend on others. */
static uint64_t independent(const mn_work_set *set, const mn_defer *all, uint64_t small) {
    small &= ~set->taken;
    for (int i = 0; i < all->n; i++) {
        const uint64_t missing = all->list[i].after & ~all->done;
        if (!(small & mn_bit(i)) || !missing) continue;
        bool waits = missing & ~small;
        for (int k = 0; k < i && !waits; k++) {
            if (missing & mn_bit(k)) waits = is_long(all, mn_small_at(all, i), mn_small_at(all, k));
        }
        if (waits) small &= ~mn_bit(i);
    }
    return small;
}

void mn_works_select(mn_work_set *set, const mn_defer *all, uint64_t small, bool chains) {
    int part[MN_DEFERRED];
    set->all = all;
    select_steps(set, all, small, !chains);
    small = chains ? independent(set, all, small) : 0;
    set->taken |= small;
    mn_defer_parts(part, all, small);
    for (int p = 0; p < all->n; p++) {
        mn_chain *c = &set->chains[set->n_chains];
        c->n = 0;
        for (int i = 0; i < all->n; i++) {
            if ((small & mn_bit(i)) && part[i] == p) c->of[c->n++] = i;
        }
        set->n_chains += c->n > 0;
    }
}
