/* sequence_packed.c - packed sequences over ranks.
 *
 *   part of a row on a rank:   | head | fresh 1 | fresh 2 |
 *
 * Sequences that begin here run as they would alone. The head goes on from a state, or over keys,
 * of the ranks before, and the last sequence may go on behind the part. What crosses is that of one
 * sequence a row: a part whose sequence does not go through all of it has no map (zeros), and what
 * it passes on follows from its own tokens alone, so that maps compose like those of whole rows. */
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "ranks/sequence_internal.h"

/* What a kept block begins with: the view that the caller gave. */
enum { KEPT_HEAD = 64, MOST_SHARED = 32 };

/* ---- parts ----------------------------------------------------------------------------------- */

static const char *axes_of(const cut_call *c, const mn_field *f, char out[MN_MAX_RANK + 1]) {
    return mn_field_axes(f, mn_args_decay(c->op, c->args), out);
}

/* Axis 1 of a tensor is tokens. */
static bool has_tokens(const char *axes) {
    return axes[0] == 'B' && (axes[1] == 'T' || axes[1] == 'L');
}

/* Elements between neighbouring tokens of a view. */
static int64_t token_stride(const cut_call *c, const char *axes, const mn_in *view) {
    return view->stride[1] ? view->stride[1] : mn_cut_count(c, axes + 2);
}

static void shift(const cut_call *c, mn_in *view, const char *axes, mn_dtype dtype, int64_t token,
                  int64_t sequence) {
    int64_t by = 0;
    if (!view->data) return;
    if (axes[0] == 'N') by = sequence * (mn_cut_count(c, axes) / c->sizes->n_seqs);
    else if (has_tokens(axes)) by = token * token_stride(c, axes, view);
    view->data = (const char *)view->data + by * (int64_t)mn_dtype_bytes(dtype);
}

/* Sequences [first, first + n) of a call as a call of their own. */
static void slice(cut_call *out, unsigned char *args, const cut_call *c, int64_t first, int64_t n,
                  int64_t *starts) {
    const int64_t *from = c->sizes->cu_seqlens + first;
    const mn_op_traits *traits = mn_op_traits_of(c->op);
    char text[MN_MAX_RANK + 1];
    int n_fields;
    const mn_field *fields = mn_op_fields(c->op, &n_fields);
    memcpy(args, c->args, mn_op_describe(c->op)->args_bytes);
    *out = *c;
    out->args = args;
    out->sizes = (mn_call *)args;
    for (int i = 0; i < n_fields; i++) {
        const mn_field *f = &fields[i];
        const char *axes = axes_of(c, f, text);
        const mn_dtype dtype = mn_field_dtype(f, c->sizes->dtype);
        if (!axes) continue;
        shift(c, cut_in(out, f), axes, dtype, from[0], first);
        if (f->partner != MN_NO_OFFSET) {
            shift(c, cut_partner(out, f), axes, dtype, from[0], first);
        }
    }
    for (int64_t i = 0; i <= n; i++) starts[i] = from[i] - from[0];
    out->sizes->T = starts[n];
    if (traits->keyed) out->sizes->L = starts[n];
    if (traits->counts0 && *(int64_t **)(args + traits->counts0)) {
        *(const int64_t **)(args + traits->counts0) += first;
    }
    out->sizes->cu_seqlens = n > 1 ? starts : NULL;
    out->sizes->n_seqs = n > 1 ? n : 0;
    for (int i = 0; i < out->n_states; i++) {
        out->states[i].bytes = c->states[i].bytes / (size_t)c->sizes->n_seqs * (size_t)n;
    }
}

static int64_t before_of(const cut_packed *p, int rank, int64_t row) {
    return p->c.s->before[rank * p->n_rows + row];
}

/* Finds the sequences of row b, whose first is `first`, and slices them; returns the next one. */
static int64_t open_row(cut_packed *p, int64_t b, int64_t first, int64_t *starts) {
    cut_call *c = &p->c;
    cut_row *row = &p->rows[b];
    const int64_t *cu = c->sizes->cu_seqlens;
    int64_t end = first;
    while (end < c->sizes->n_seqs && cu[end] < (b + 1) * p->length) end++;
    row->before = before_of(p, c->rank, b);
    row->has_head = row->before > 0;
    row->has_fresh = end > first + row->has_head;
    row->goes_on = c->rank + 1 < c->world && before_of(p, c->rank + 1, b) > 0;
    row->through = row->has_head && !row->has_fresh && row->goes_on;
    row->first = first;
    row->last = end - 1;
    if (row->has_head) {
        slice(&row->head, row->head_args, c, first, 1, starts);
        const mn_op_traits *traits = mn_op_traits_of(c->op);
        if (traits->counts0) *(const int64_t **)(row->head_args + traits->counts0) = NULL;
        mn_cut_set_positions(&row->head, row->before);
        for (int i = 0; i < c->n_states && row->start[i]; i++) {
            *cut_in(&row->head, c->states[i].in) = (mn_in){ row->start[i], { 0 } };
        }
    }
    if (row->has_fresh) {
        const int64_t own = first + row->has_head;
        slice(&row->fresh, row->fresh_args, c, own, end - own, starts + 2);
    }
    return end;
}

/* Over p->args, in which initial states and keys are those that the caller gave. */
static mn_status open_rows(cut_packed *p) {
    const mn_call *sizes = p->c.sizes;
    int64_t first = 0, at = 0;
    for (int64_t b = 0; b < p->n_rows; b++) {
        if (first >= sizes->n_seqs || sizes->cu_seqlens[first] != b * p->length) {
            return mn_fail(MN_ERR_INTERNAL, "no sequence begins where a row does");
        }
        const int64_t next = open_row(p, b, first, p->starts + at);
        at += next - first + 4;
        first = next;
    }
    return MN_OK;
}

static mn_status make(cut_packed **out, const cut_call *c) {
    const int64_t rows = c->s->rows;
    *out = NULL;
    if (rows < 1 || !c->s->before || c->sizes->T % rows != 0 || c->sizes->n_seqs < 1) {
        return mn_fail(MN_ERR_INTERNAL, "nobody says how packed rows are cut over ranks");
    }
    cut_packed *p = cut_zeros(sizeof *p);
    if (!p) return MN_ERR_MEMORY;
    *out = p;
    p->c = *c;
    memcpy(p->args, c->args, mn_op_describe(c->op)->args_bytes);
    p->c.args = p->args;
    p->c.sizes = (mn_call *)p->args;
    p->n_rows = rows;
    p->length = c->sizes->T / rows;
    for (int i = 0; i < c->n_states; i++) {
        p->each[i] = c->states[i].bytes / (size_t)c->sizes->n_seqs;
    }
    p->rows = cut_zeros((size_t)rows * sizeof *p->rows);
    p->starts = cut_zeros((size_t)(c->sizes->n_seqs + 4 * rows) * sizeof *p->starts);
    const int64_t most = 2 * rows * c->world * (CUT_STATES > CUT_KEYED ? CUT_STATES : CUT_KEYED);
    p->transfers = cut_zeros((size_t)most * sizeof *p->transfers);
    return p->rows && p->starts && p->transfers ? MN_OK : MN_ERR_MEMORY;
}

static void destroy(cut_packed *p) {
    if (!p) return;
    for (int i = 0; i < CUT_STATES; i++) free(p->cotangent[i]);
    free(p->rows);
    free(p->starts);
    free(p->transfers);
    free(p);
}

void *mn_cut_final(const cut_packed *p, int i, int64_t sequence) {
    return (char *)cut_in(&p->c, p->c.states[i].out)->data + (size_t)sequence * p->each[i];
}

/* ---- running --------------------------------------------------------------------------------- */

/* Gradients of what all sequences share, such as weights: a call overwrites them. */
typedef struct shared {
    const mn_field *field;
    mn_in to;
    void *own;
    int64_t n;
} shared;

static bool is_shared(const cut_call *c, const mn_field *f, int64_t *n) {
    char text[MN_MAX_RANK + 1];
    const char *axes = axes_of(c, f, text);
    if (!axes || f->role > MN_ROLE_OPT || f->partner == MN_NO_OFFSET || axes[0] == 'N' ||
        has_tokens(axes) || !cut_partner(c, f)->data) {
        return false;
    }
    *n = mn_cut_count(c, axes);
    return true;
}

/* to += own, whose last axes follow each other while the first may have a stride. */
static void add_shared(const cut_call *c, const shared *s) {
    bool ok = true;
    const int64_t first = s->field->axes[0] ? mn_axis_size(c->sizes, s->field->axes[0], &ok) : 1;
    const int64_t outer = s->to.stride[2] && first > 0 ? first : 1, inner = s->n / outer;
    for (int64_t i = 0; i < outer; i++) {
        mn_cut_add(c, (char *)s->to.data + (size_t)(i * s->to.stride[2]) * c->item,
                   (char *)s->own + (size_t)(i * inner) * c->item, inner);
    }
}

static mn_status run_back(cut_packed *p, cut_call *part) {
    shared all[MOST_SHARED];
    int n = 0, n_fields;
    const mn_field *fields = mn_op_fields(part->op, &n_fields);
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && p->ran && i < n_fields && n < MOST_SHARED; i++) {
        shared *s = &all[n];
        if (!is_shared(part, &fields[i], &s->n)) continue;
        s->field = &fields[i];
        s->to = *cut_partner(part, s->field);
        s->own = cut_zeros((size_t)s->n * part->item);
        if (!s->own) st = MN_ERR_MEMORY;
        *cut_partner(part, s->field) = (mn_in){ s->own, { 0 } };
        n++;
    }
    if (st == MN_OK) st = mn_cut_run(part, MN_BACKWARD, part->args);
    for (int i = 0; i < n; i++) {
        if (st == MN_OK) add_shared(part, &all[i]);
        *cut_partner(part, all[i].field) = all[i].to;
        free(all[i].own);
    }
    p->ran = true;
    return st;
}

mn_status mn_cut_run_fresh(cut_packed *p, cut_row *row, mn_pass pass) {
    if (!row->has_fresh) return MN_OK;
    return pass == MN_FORWARD ? mn_cut_run(&row->fresh, pass, row->fresh.args)
                              : run_back(p, &row->fresh);
}

mn_status mn_cut_run_head(cut_packed *p, cut_row *row, mn_pass pass) {
    if (!row->has_head) return MN_OK;
    return pass == MN_FORWARD ? mn_cut_run(&row->head, pass, row->head.args)
                              : run_back(p, &row->head);
}

static mn_status run_rows(cut_packed *p, mn_pass pass, bool heads, bool fresh) {
    mn_status st = MN_OK;
    for (int64_t b = 0; st == MN_OK && b < p->n_rows; b++) {
        if (fresh) st = mn_cut_run_fresh(p, &p->rows[b], pass);
        if (st == MN_OK && heads) st = mn_cut_run_head(p, &p->rows[b], pass);
    }
    return st;
}

/* ---- states from rank to rank ---------------------------------------------------------------- */

/* Final states of sequences that go on to the next rank, initial states of heads from the one
 * before. */
static int list_states(cut_packed *p, int n, bool send) {
    const cut_call *c = &p->c;
    for (int64_t b = 0; b < p->n_rows; b++) {
        const cut_row *row = &p->rows[b];
        for (int i = 0; i < c->n_states; i++) {
            if (send && row->goes_on) {
                p->transfers[n++] = (mn_transfer){ c->rank + 1, true,
                                                   mn_cut_final(p, i, row->last), p->each[i] };
            }
            if (!send && row->has_head) {
                p->transfers[n++] = (mn_transfer){ c->rank - 1, false, row->start[i], p->each[i] };
            }
        }
    }
    return n;
}

static mn_status forward_pipeline(cut_packed *p) {
    mn_status st = run_rows(p, MN_FORWARD, false, true);
    if (st == MN_OK) st = mn_cut_exchange(&p->c, p->transfers, list_states(p, 0, false));
    if (st == MN_OK) st = run_rows(p, MN_FORWARD, true, false);
    return st == MN_OK ? mn_cut_exchange(&p->c, p->transfers, list_states(p, 0, true)) : st;
}

/* Tails of parts that have W - 1 tokens are right whatever came before. */
static mn_status forward_tail(cut_packed *p) {
    if (p->length < p->c.sizes->W - 1) return forward_pipeline(p);
    mn_status st = run_rows(p, MN_FORWARD, false, true);
    for (int64_t b = 0; st == MN_OK && b < p->n_rows; b++) {
        cut_row *row = &p->rows[b];
        if (!row->through) continue;
        for (int i = 0; i < p->c.n_states; i++) {
            cut_in(&row->head, p->c.states[i].in)->data = NULL;
        }
        st = mn_cut_run_head(p, row, MN_FORWARD);
        for (int i = 0; i < p->c.n_states; i++) {
            cut_in(&row->head, p->c.states[i].in)->data = row->start[i];
        }
    }
    const int n = list_states(p, list_states(p, 0, true), false);
    if (st == MN_OK) st = mn_cut_exchange(&p->c, p->transfers, n);
    return st == MN_OK ? run_rows(p, MN_FORWARD, true, false) : st;
}

/* Gradients of heads' initial states get memory, and final states that go on a cotangent, zeros so
 * far. What the caller wants of the initial states of heads is nothing. */
static mn_status prepare_cotangents(cut_packed *p) {
    const cut_call *c = &p->c;
    for (int i = 0; i < c->n_states; i++) {
        const cut_state *of = &c->states[i];
        const mn_field *takes = mn_cut_taker(of);
        if (!takes || of->in->partner == MN_NO_OFFSET) continue;
        p->cotangent[i] = cut_zeros(2 * of->bytes);    // behind them the gradients of heads
        if (!p->cotangent[i]) return MN_ERR_MEMORY;
        mn_in *given = cut_partner(c, takes);
        if (given->data) memcpy(p->cotangent[i], given->data, of->bytes);
        *given = (mn_in){ p->cotangent[i], { 0 } };
        for (int64_t b = 0; b < p->n_rows; b++) {
            const cut_row *row = &p->rows[b];
            if (row->goes_on) memset((char *)p->cotangent[i] + (size_t)row->last * p->each[i], 0,
                                     p->each[i]);
        }
    }
    return MN_OK;
}

static void *cotangent_of(const cut_packed *p, int i, const cut_row *row) {
    return (char *)p->cotangent[i] + (size_t)row->last * p->each[i];
}

static void *gradient_of(const cut_packed *p, int i, const cut_row *row) {
    return (char *)p->cotangent[i] + p->c.states[i].bytes + (size_t)row->first * p->each[i];
}

/* Points heads at their gradients, after the rows have been opened. */
static void place_gradients(cut_packed *p) {
    for (int64_t b = 0; b < p->n_rows; b++) {
        cut_row *row = &p->rows[b];
        for (int i = 0; row->has_head && i < p->c.n_states; i++) {
            if (p->c.states[i].in->partner == MN_NO_OFFSET) continue;
            mn_in *to = cut_partner(&row->head, p->c.states[i].in);
            if (to->data) memset((void *)to->data, 0, p->each[i]);
            *to = (mn_in){ p->cotangent[i] ? gradient_of(p, i, row) : NULL, { 0 } };
        }
    }
}

static mn_status backward_pipeline(cut_packed *p) {
    const cut_call *c = &p->c;
    int n = 0;
    for (int64_t b = 0; b < p->n_rows; b++) {
        for (int i = 0; p->rows[b].goes_on && i < c->n_states; i++) {
            if (!p->cotangent[i]) continue;
            p->transfers[n++] = (mn_transfer){ c->rank + 1, false, cotangent_of(p, i, &p->rows[b]),
                                               p->each[i] };
        }
    }
    mn_status st = mn_cut_exchange(c, p->transfers, n);
    if (st == MN_OK) st = run_rows(p, MN_BACKWARD, true, false);
    n = 0;
    for (int64_t b = 0; b < p->n_rows; b++) {
        cut_row *row = &p->rows[b];
        for (int i = 0; row->has_head && i < c->n_states; i++) {
            if (!p->cotangent[i]) continue;
            mn_cut_scale_sums(&row->head, &row->head.states[i], gradient_of(p, i, row));
            p->transfers[n++] = (mn_transfer){ c->rank - 1, true, gradient_of(p, i, row),
                                               p->each[i] };
        }
    }
    if (st == MN_OK) st = mn_cut_exchange(c, p->transfers, n);
    return st == MN_OK ? run_rows(p, MN_BACKWARD, false, true) : st;
}

/* ---- affine maps ----------------------------------------------------------------------------- */

/* A call of one sequence, whose sizes count what one has. */
static cut_call one_sequence(const cut_packed *p, unsigned char args[MN_MAX_ARGS_BYTES]) {
    cut_call one = p->c;
    memcpy(args, p->args, sizeof p->args);
    one.args = args;
    one.sizes = (mn_call *)args;
    one.sizes->cu_seqlens = NULL;
    one.sizes->n_seqs = 0;
    return one;
}

/* Gathers (map, vector) of every rank and row; xs[b] becomes what the ranks before this one, or
 * behind it, make of zeros. */
static mn_status compose(cut_packed *p, const cut_call *one, char *all, char *const *xs,
                         bool back) {
    const size_t of_map = mn_cut_map_bytes(one), of_b = p->each[0], each = of_map + of_b;
    const size_t of_rank = (size_t)p->n_rows * each;
    const int world = p->c.world, rank = p->c.rank, step = back ? -1 : 1;
    char *next = cut_zeros(of_b);
    mn_status st = next ? mn_comm_all_gather(p->c.s->comm, all, all + (size_t)rank * of_rank,
                                             of_rank) : MN_ERR_MEMORY;
    for (int r = back ? world - 1 : 0; st == MN_OK && r != rank; r += step) {
        for (int64_t b = 0; b < p->n_rows; b++) {
            const char *of = all + (size_t)r * of_rank + (size_t)b * each;
            if (!xs[b]) continue;
            memcpy(next, of + of_map, of_b);
            mn_cut_apply_map(one, next, of, xs[b], back);
            memcpy(xs[b], next, of_b);
        }
    }
    free(next);
    return st;
}

/* The map of row b, kept behind its state for the way back. */
static char *map_of(const cut_packed *p, const cut_row *row) {
    return (char *)row->start[0] + p->each[0];
}

static mn_status summarise_row(cut_packed *p, cut_row *row, char *own, size_t of_map) {
    mn_status st = mn_cut_run_fresh(p, row, MN_FORWARD);
    if (st == MN_OK && row->through) {
        memset(row->start[0], 0, p->each[0]);
        st = mn_cut_find_map(&row->head, map_of(p, row));
        if (st == MN_OK) st = mn_cut_run_head(p, row, MN_FORWARD);
        memcpy(own, map_of(p, row), of_map);
    }
    if (st != MN_OK || !row->goes_on) return st;
    memcpy(own + of_map, mn_cut_final(p, 0, row->last), p->each[0]);
    return st;
}

static mn_status forward_affine(cut_packed *p) {
    unsigned char args[MN_MAX_ARGS_BYTES];
    const cut_call one = one_sequence(p, args);
    const size_t of_map = mn_cut_map_bytes(&one), each = of_map + p->each[0];
    const size_t of_rank = (size_t)p->n_rows * each;
    char *all = cut_zeros((size_t)p->c.world * of_rank);
    char *x = cut_zeros((size_t)p->n_rows * p->each[0]);
    char **xs = cut_zeros((size_t)p->n_rows * sizeof *xs);
    mn_status st = all && x && xs ? MN_OK : MN_ERR_MEMORY;
    for (int64_t b = 0; st == MN_OK && b < p->n_rows; b++) {
        char *own = all + (size_t)p->c.rank * of_rank + (size_t)b * each;
        st = summarise_row(p, &p->rows[b], own, of_map);
        xs[b] = x + (size_t)b * p->each[0];
    }
    if (st == MN_OK) st = compose(p, &one, all, xs, false);
    for (int64_t b = 0; st == MN_OK && b < p->n_rows; b++) {
        if (p->rows[b].has_head) memcpy(p->rows[b].start[0], xs[b], p->each[0]);
    }
    if (st == MN_OK) st = run_rows(p, MN_FORWARD, true, false);
    free(all);
    free(x);
    free(xs);
    return st;
}

/* The gradient of a head's initial state from its own results alone. */
static mn_status own_gradient(cut_packed *p, cut_row *row, char *own, size_t of_map) {
    unsigned char args[MN_MAX_ARGS_BYTES];
    int n;
    const mn_field *fields = mn_op_fields(p->c.op, &n);
    cut_call alone = row->head;
    memcpy(args, row->head.args, sizeof args);
    alone.args = args;
    alone.sizes = (mn_call *)args;
    for (int i = 0; i < n; i++) {
        if (fields[i].role > MN_ROLE_OPT || fields[i].partner == MN_NO_OFFSET) continue;
        cut_partner(&alone, &fields[i])->data = NULL;
    }
    *cut_partner(&alone, p->c.states[0].in) = (mn_in){ own + of_map, { 0 } };
    if (row->through) memcpy(own, map_of(p, row), of_map);
    return mn_cut_run(&alone, MN_BACKWARD, alone.args);
}

static mn_status backward_affine(cut_packed *p) {
    unsigned char args[MN_MAX_ARGS_BYTES];
    const cut_call one = one_sequence(p, args);
    const size_t of_map = mn_cut_map_bytes(&one), each = of_map + p->each[0];
    const size_t of_rank = (size_t)p->n_rows * each;
    char *all = cut_zeros((size_t)p->c.world * of_rank);
    char **xs = cut_zeros((size_t)p->n_rows * sizeof *xs);
    mn_status st = all && xs ? MN_OK : MN_ERR_MEMORY;
    for (int64_t b = 0; st == MN_OK && b < p->n_rows; b++) {
        cut_row *row = &p->rows[b];
        char *own = all + (size_t)p->c.rank * of_rank + (size_t)b * each;
        if (row->has_head) st = own_gradient(p, row, own, of_map);
        if (row->goes_on) xs[b] = cotangent_of(p, 0, row);    // zeros so far
    }
    if (st == MN_OK) st = compose(p, &one, all, xs, true);
    if (st == MN_OK) st = run_rows(p, MN_BACKWARD, true, true);
    free(all);
    free(xs);
    return st;
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Elements of a token of keyed field i. */
static int64_t key_width(const cut_packed *p, int i) {
    return mn_cut_count(&p->c, p->c.keys[i]->axes + 2);
}

/* Copies n tokens of a view of keys from token `first` on, to or from contiguous memory. */
static void pack(const cut_packed *p, int i, const mn_in *view, int64_t first, int64_t n,
                 char *packed, bool to_packed) {
    const cut_call *c = &p->c;
    bool ok = true;
    const int64_t heads = mn_axis_size(c->sizes, c->keys[i]->axes[2], &ok);
    const int64_t width = key_width(p, i) / heads;
    const int64_t of_token = token_stride(c, c->keys[i]->axes, view);
    const int64_t of_head = view->stride[2] ? view->stride[2] : width;
    const size_t row = (size_t)width * c->item;
    for (int64_t t = first; t < first + n; t++) {
        for (int64_t h = 0; h < heads; h++, packed += row) {
            char *at = (char *)view->data + (size_t)(t * of_token + h * of_head) * c->item;
            memcpy(to_packed ? packed : at, to_packed ? at : packed, row);
        }
    }
}

/* Tokens of row b on rank `from` that the head of rank `to` sees, its last ones: how many, and
 * where they begin among those in front of that head. */
static int64_t seen(const cut_packed *p, int64_t b, int from, int to, int64_t *at) {
    const int64_t before = before_of(p, to, b), end = before - (to - from - 1) * p->length;
    const int64_t n = mn_max(mn_min(end, p->length), 0);
    *at = end - n;
    return n;
}

/* One buffer for what travels between the ranks, (rows, tokens, width) of each pair. */
typedef struct mail {
    char *memory, *end;
    int n;
} mail;

static void put(cut_packed *p, mail *m, int peer, bool send, size_t bytes) {
    p->transfers[m->n++] = (mn_transfer){ peer, send, m->end, bytes };
    m->end += bytes;
}

static mn_status open_mail(const cut_packed *p, mail *m, int i) {
    const size_t part = (size_t)(p->n_rows * p->length * key_width(p, i)) * p->c.item;
    *m = (mail){ .memory = cut_zeros(part * (size_t)p->c.world * 2) };
    m->end = m->memory;
    return m->memory ? MN_OK : MN_ERR_MEMORY;
}

/* The keys in front of each head, to where it keeps them. */
static mn_status gather_field(cut_packed *p, int i, char *const *whole) {
    const cut_call *c = &p->c;
    const size_t token = (size_t)key_width(p, i) * c->item;
    const mn_in view = *cut_in(c, c->keys[i]);
    mail m;
    int64_t at;
    mn_status st = open_mail(p, &m, i);
    for (int r = 0; st == MN_OK && r < c->world; r++) {
        for (int64_t b = 0; r != c->rank && b < p->n_rows; b++) {
            const bool send = r > c->rank;
            const int64_t n = send ? seen(p, b, c->rank, r, &at) : seen(p, b, r, c->rank, &at);
            if (n == 0) continue;
            if (send) pack(p, i, &view, (b + 1) * p->length - n, n, m.end, true);
            put(p, &m, r, send, (size_t)n * token);
        }
    }
    if (st == MN_OK) st = mn_cut_exchange(c, p->transfers, m.n);
    for (int64_t k = 0, r = 0; st == MN_OK && r < c->rank; r++) {
        for (int64_t b = 0; b < p->n_rows; b++) {
            const int64_t n = seen(p, b, (int)r, c->rank, &at);
            if (n == 0) continue;
            memcpy(whole[b] + (size_t)at * token, p->transfers[k++].data, (size_t)n * token);
        }
    }
    for (int64_t b = 0; st == MN_OK && b < p->n_rows; b++) {
        cut_row *row = &p->rows[b];
        if (!row->has_head) continue;
        pack(p, i, cut_in(&row->head, c->keys[i]), 0, row->head.sizes->T,
             whole[b] + (size_t)row->before * token, true);
    }
    free(m.memory);
    return st;
}

/* Gradients of the keys in front of heads go back to where those are, and are added there, those
 * of the next rank first. */
static mn_status scatter_field(cut_packed *p, int i, char *const *whole) {
    const cut_call *c = &p->c;
    const int64_t width = key_width(p, i);
    const size_t token = (size_t)width * c->item;
    const mn_in to = *cut_partner(c, c->keys[i]);
    mail m;
    int64_t at;
    mn_status st = open_mail(p, &m, i);
    for (int r = 0; st == MN_OK && r < c->world; r++) {
        for (int64_t b = 0; r != c->rank && b < p->n_rows; b++) {
            const bool send = r < c->rank;
            const int64_t n = send ? seen(p, b, r, c->rank, &at) : seen(p, b, c->rank, r, &at);
            if (n == 0) continue;
            if (send) memcpy(m.end, whole[b] + (size_t)at * token, (size_t)n * token);
            put(p, &m, r, send, (size_t)n * token);
        }
    }
    if (st == MN_OK) st = mn_cut_exchange(c, p->transfers, m.n);
    char *sum = st == MN_OK ? cut_zeros((size_t)p->length * token) : NULL;
    int k = 0;
    while (k < m.n && p->transfers[k].send) k++;    // those to ranks before this one come first
    for (int r = c->rank + 1; sum && to.data && r < c->world; r++) {
        for (int64_t b = 0; b < p->n_rows; b++) {
            const int64_t n = seen(p, b, c->rank, r, &at), first = (b + 1) * p->length - n;
            if (n == 0) continue;
            pack(p, i, &to, first, n, sum, true);
            mn_cut_add(c, sum, p->transfers[k++].data, n * width);
            pack(p, i, &to, first, n, sum, false);
        }
    }
    free(m.memory);
    if (st == MN_OK && !sum) st = MN_ERR_MEMORY;
    free(sum);
    return st;
}

/* Heads see whole[i][b], of before + T tokens. */
static void place_keys(cut_packed *p, char **whole[CUT_KEYED]) {
    for (int64_t b = 0; b < p->n_rows; b++) {
        cut_row *row = &p->rows[b];
        for (int i = 0; row->has_head && i < p->c.n_keys; i++) {
            *cut_in(&row->head, p->c.keys[i]) = (mn_in){ whole[i][b], { 0 } };
            row->head.sizes->L = row->before + row->head.sizes->T;
        }
    }
}

static size_t whole_bytes(const cut_packed *p, int i, const cut_row *row) {
    if (!row->has_head) return 0;
    return (size_t)((row->before + row->head.sizes->T) * key_width(p, i)) * p->c.item;
}

/* Where the keys of each row lie in a block. */
static mn_status find_whole(const cut_packed *p, int i, char *block, char ***whole) {
    *whole = cut_zeros((size_t)p->n_rows * sizeof **whole);
    for (int64_t b = 0; *whole && b < p->n_rows; b++) {
        (*whole)[b] = block;
        block += whole_bytes(p, i, &p->rows[b]);
    }
    return *whole ? MN_OK : MN_ERR_MEMORY;
}

static mn_status forward_keys(cut_packed *p, void *const *kept) {
    char **whole[CUT_KEYED] = { NULL };
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < p->c.n_keys; i++) {
        st = find_whole(p, i, (char *)kept[i] + KEPT_HEAD, &whole[i]);
        if (st == MN_OK) st = gather_field(p, i, whole[i]);
    }
    if (st == MN_OK) place_keys(p, whole);
    if (st == MN_OK) st = run_rows(p, MN_FORWARD, true, true);
    for (int i = 0; i < p->c.n_keys; i++) free(whole[i]);
    return st;
}

/* The gradients of one head's keys to memory of their own, then its own ones to their place. */
static mn_status backward_head_keys(cut_packed *p, cut_row *row, char *const *grads) {
    mn_in own[CUT_KEYED];
    for (int i = 0; i < p->c.n_keys; i++) {
        own[i] = *cut_partner(&row->head, p->c.keys[i]);
        *cut_partner(&row->head, p->c.keys[i]) = (mn_in){ grads[i], { 0 } };
    }
    const mn_status st = mn_cut_run_head(p, row, MN_BACKWARD);
    for (int i = 0; st == MN_OK && i < p->c.n_keys; i++) {
        if (!own[i].data) continue;
        pack(p, i, &own[i], 0, row->head.sizes->T,
             grads[i] + (size_t)(row->before * key_width(p, i)) * p->c.item, false);
    }
    return st;
}

static mn_status backward_keys(cut_packed *p, void *const *kept) {
    char **whole[CUT_KEYED] = { NULL }, **grads[CUT_KEYED] = { NULL };
    char *memory[CUT_KEYED] = { NULL };
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < p->c.n_keys; i++) {
        size_t bytes = 0;
        for (int64_t b = 0; b < p->n_rows; b++) bytes += whole_bytes(p, i, &p->rows[b]);
        memory[i] = cut_zeros(bytes);
        st = memory[i] ? find_whole(p, i, memory[i], &grads[i]) : MN_ERR_MEMORY;
        if (st == MN_OK) st = find_whole(p, i, (char *)kept[i] + KEPT_HEAD, &whole[i]);
    }
    if (st == MN_OK) place_keys(p, whole);
    if (st == MN_OK) st = run_rows(p, MN_BACKWARD, false, true);
    for (int64_t b = 0; st == MN_OK && b < p->n_rows; b++) {
        char *of[CUT_KEYED] = { NULL };
        for (int i = 0; i < p->c.n_keys; i++) of[i] = grads[i][b];
        if (p->rows[b].has_head) st = backward_head_keys(p, &p->rows[b], of);
    }
    for (int i = 0; st == MN_OK && i < p->c.n_keys; i++) st = scatter_field(p, i, grads[i]);
    for (int i = 0; i < p->c.n_keys; i++) {
        free(whole[i]);
        free(grads[i]);
        free(memory[i]);
    }
    return st;
}

/* ---- a call ---------------------------------------------------------------------------------- */

/* Fields whose views are replaced by what is kept until the backward pass. */
static int kept_fields(const cut_call *c, const mn_field *fields[CUT_STATES]) {
    const int n = c->n_keys > 0 ? c->n_keys : c->n_states;
    for (int i = 0; i < n; i++) fields[i] = c->n_keys > 0 ? c->keys[i] : c->states[i].in;
    return n;
}

/* Memory for initial states of heads, and maps; or for all keys that heads see. */
static size_t kept_bytes(const cut_packed *p, int i) {
    size_t bytes = KEPT_HEAD;
    unsigned char args[MN_MAX_ARGS_BYTES];
    const cut_call one = one_sequence(p, args);
    const size_t map = p->c.law == CUT_AFFINE && p->c.n_keys == 0 ? mn_cut_map_bytes(&one) : 0;
    for (int64_t b = 0; b < p->n_rows; b++) {
        bytes += p->c.n_keys > 0 ? whole_bytes(p, i, &p->rows[b]) : p->each[i] + map;
    }
    return bytes;
}

/* Where the initial states of rows are in the kept blocks. */
static void find_starts(cut_packed *p, void *const *kept) {
    unsigned char args[MN_MAX_ARGS_BYTES];
    const cut_call one = one_sequence(p, args);
    const size_t map = p->c.law == CUT_AFFINE ? mn_cut_map_bytes(&one) : 0;
    for (int i = 0; p->c.n_keys == 0 && i < p->c.n_states; i++) {
        for (int64_t b = 0; b < p->n_rows; b++) {
            p->rows[b].start[i] = (char *)kept[i] + KEPT_HEAD + (size_t)b * (p->each[i] + map);
        }
    }
}

static mn_status run_forward(cut_packed *p, void *const *kept) {
    bool done = false;
    if (p->c.n_keys > 0) return forward_keys(p, kept);
    if (p->c.n_states == 0) return run_rows(p, MN_FORWARD, true, true);
    if (p->c.law == CUT_AFFINE) return forward_affine(p);
    if (p->c.law == CUT_TAIL) return forward_tail(p);
    if (p->c.law == CUT_MOEBIUS) {
        const mn_status st = mn_cut_packed_moebius_forward(p, &done);
        if (st != MN_OK || done) return st;
    }
    return forward_pipeline(p);
}

static mn_status run_backward(cut_packed *p, void *const *kept) {
    bool done = false;
    if (p->c.n_keys > 0) return backward_keys(p, kept);
    if (p->c.n_states == 0) return run_rows(p, MN_BACKWARD, true, true);
    if (p->c.law == CUT_AFFINE) return backward_affine(p);
    if (p->c.law == CUT_MOEBIUS) {
        const mn_status st = mn_cut_packed_moebius_backward(p, &done);
        if (st != MN_OK || done) return st;
    }
    return backward_pipeline(p);
}

/* Operators that have neither states nor keys and do not count tokens either. */
static bool is_local(const cut_call *c) {
    int n;
    const mn_param *params = mn_op_params(c->op, &n);
    bool counts = false;
    for (int i = 0; i < n; i++) counts |= strcmp(params[i].name, "pos0") == 0;
    return c->n_states == 0 && c->n_keys == 0 && !counts;
}

mn_status mn_cut_forward_packed(cut_call *c, bool plan) {
    const mn_field *fields[CUT_STATES];
    void *kept[CUT_STATES] = { NULL }, *lent[CUT_STATES] = { NULL };
    cut_packed *p = NULL;
    if (is_local(c)) return plan ? MN_OK : mn_cut_run(c, MN_FORWARD, c->args);
    mn_status st = make(&p, c);
    if (st == MN_OK && !plan && c->n_keys == 0) st = mn_cut_lend_finals(&p->c, lent);
    if (st == MN_OK) st = open_rows(p);    // once for sizes, then with the states of heads
    const int n = kept_fields(c, fields);
    for (int i = 0; st == MN_OK && i < n; i++) {
        kept[i] = c->s->keep(c->s->owner, kept_bytes(p, i), plan);
        if (!kept[i]) st = MN_ERR_MEMORY;
        else if (!plan) memcpy(kept[i], cut_in(c, fields[i]), sizeof(mn_in));
        if (kept[i]) *cut_in(c, fields[i]) = (mn_in){ kept[i], { 0 } };
    }
    if (st == MN_OK && !plan) {
        find_starts(p, kept);
        st = open_rows(p);
    }
    if (st == MN_OK && !plan) st = run_forward(p, kept);
    if (p) mn_cut_return_finals(&p->c, lent);
    destroy(p);
    return st;
}

mn_status mn_cut_backward_packed(cut_call *c) {
    const mn_field *fields[CUT_STATES];
    void *kept[CUT_STATES] = { NULL };
    cut_packed *p = NULL;
    if (is_local(c)) return mn_cut_run(c, MN_BACKWARD, c->args);
    mn_status st = make(&p, c);
    const int n = kept_fields(c, fields);
    for (int i = 0; st == MN_OK && i < n; i++) {
        kept[i] = (void *)cut_in(c, fields[i])->data;
        memcpy(cut_in(&p->c, fields[i]), kept[i], sizeof(mn_in));
    }
    if (st == MN_OK) find_starts(p, kept);
    if (st == MN_OK) st = open_rows(p);
    if (st == MN_OK && c->n_keys == 0) {
        st = prepare_cotangents(p);
        if (st == MN_OK) st = open_rows(p);
        if (st == MN_OK) place_gradients(p);
    }
    if (st == MN_OK) st = run_backward(p, kept);
    destroy(p);
    return st;
}
