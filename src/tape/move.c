/* move.c - operations that only move numbers: repeat heads, join parts, rows of a table. */
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "tape/tape_internal.h"

static int64_t rows_of(const mn_tensor *x) {
    return x->shape[0] * x->shape[1] * x->shape[2];
}

/* ---- join: parts side by side, and repeat: one part for several heads ------------------------ */

typedef struct join {
    mn_tensor *parts[MN_TAPE_PARTS], *y;
    int n;
    int64_t times;    // heads of y per head of the part
} join;

/* The columns of a view from `first` on. */
static mn_view columns(mn_view view, int64_t first) {
    view.data = (char *)view.data + (size_t)first * mn_dtype_bytes(view.dtype);
    return view;
}

static void back_join(mn_tape *tape, void *payload) {
    const join *j = payload;
    const mn_view dy = mn_grad_read(j->y);
    if (!dy.data) return;
    int64_t first = 0;
    for (int i = 0; i < j->n; i++) {
        mn_tensor *part = j->parts[i];
        mn_move_params work = { .from = columns(dy, first), .times = j->times,
                              .folds = j->times > 1 };
        memcpy(work.shape, part->shape, sizeof work.shape);
        first += part->shape[3];
        if (!mn_wants(part)) continue;
        work.to = mn_grad_write(tape, part, &work.add);
        if (work.to.data) mn_tape_do(tape, MN_ELEMENTWISE_MOVE, &work);
    }
}

static void join_forward(mn_tape *tape, const join *j) {
    int64_t first = 0;
    for (int i = 0; i < j->n; i++) {
        const int64_t *n = j->parts[i]->shape;
        mn_tape_do(tape, MN_ELEMENTWISE_MOVE, &(mn_move_params){
            .shape = { n[0], n[1], n[2] * j->times, n[3] }, .times = j->times,
            .to = columns(mn_value(j->y), first), .from = mn_value(j->parts[i]) });
        first += n[3];
    }
}

static mn_tensor *make(mn_tape *tape, const char *what, mn_tensor *const *parts, int n,
                       int64_t times) {
    join *j = mn_tape_note(tape, sizeof *j);
    if (!j) return NULL;
    const int64_t *first = parts[0]->shape;
    int64_t width = 0;
    bool wanted = false;
    for (int i = 0; i < n; i++) {
        j->parts[i] = parts[i];
        width += parts[i]->shape[3];
        wanted |= mn_wants(parts[i]);
        if (memcmp(parts[i]->shape, first, 3 * sizeof *first) == 0) continue;
        return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: parts of different rows",
                                          tape->scope));
    }
    const int64_t shape[4] = { first[0], first[1], first[2] * times, width };
    j->y = mn_tape_new_of(tape, parts[0]->dtype, shape);
    if (!j->y) return NULL;
    j->n = n;
    j->times = times;
    join_forward(tape, j);
    mn_tape_record(tape, what, back_join, j, wanted, &j->y, 1);
    return j->y;
}

mn_tensor *mn_tape_join(mn_tape *tape, mn_tensor *const *parts, int n) {
    if (mn_tape_dead(tape)) return NULL;
    for (int i = 0; i < n; i++) {
        if (!parts[i]) return NULL;
    }
    if (n < 1 || n > MN_TAPE_PARTS) return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "join"));
    return make(tape, "join", parts, n, 1);
}

mn_tensor *mn_tape_repeat(mn_tape *tape, mn_tensor *x, int64_t times) {
    if (!x || mn_tape_dead(tape)) return NULL;
    return times == 1 ? x : make(tape, "repeat", &x, 1, times);
}

/* ---- pick ------------------------------------------------------------------------------------ */

typedef struct pick {
    mn_tensor *x, *y;
    const int32_t *places;
} pick;

/* Picked rows to where they came from; the others get nothing. */
static void back_pick(mn_tape *tape, void *payload) {
    const pick *p = payload;
    const mn_view dy = mn_grad_read(p->y);
    if (!dy.data || !mn_wants(p->x)) return;
    bool add;
    const mn_view dx = mn_grad_write(tape, p->x, &add);
    if (!dx.data) return;
    const int64_t *n = p->x->shape;
    if (!add) {
        mn_tape_do(tape, MN_ELEMENTWISE_FILL,
                   &(mn_fill_params){ .shape = { n[0], n[1], n[2], n[3] },
                                                        .to = dx });
    }
    mn_tape_do(tape, MN_ELEMENTWISE_ROWS, &(mn_rows_params){
        .shape = { n[0], n[1], n[2], n[3] }, .table = dx, .rows = dy, .index = p->places,
        .n = p->y->shape[1], .scatters = true });
}

mn_tensor *mn_tape_pick(mn_tape *tape, mn_tensor *x, const int32_t *places, int64_t n) {
    if (!x || mn_tape_dead(tape)) return NULL;
    for (int64_t i = 0; i < n; i++) {
        if (x->shape[2] == 1 && places[i] >= 0 && places[i] < rows_of(x)) continue;
        return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: no token %d to pick", tape->scope,
                                          (int)places[i]));
    }
    pick *p = mn_tape_note(tape, sizeof *p);
    mn_tensor *y = mn_tape_new_of(tape, x->dtype, (int64_t[]){ 1, n, 1, x->shape[3] });
    places = mn_tape_lend(tape, places, (size_t)n * sizeof *places);
    if (!p || !y || !places) return NULL;
    *p = (pick){ x, y, places };
    const int64_t *shape = x->shape;
    mn_tape_do(tape, MN_ELEMENTWISE_ROWS, &(mn_rows_params){
        .shape = { shape[0], shape[1], 1, shape[3] }, .table = mn_value(x), .rows = mn_value(y),
        .index = places, .n = n });
    mn_tape_record(tape, "pick", back_pick, p, mn_wants(x), &y, 1);
    return y;
}

typedef struct place {
    mn_tensor **parts, *y;
    const int32_t **places;
    int64_t n;
} place;

/* Row by row what the parts gave. */
static void back_place(mn_tape *tape, void *payload) {
    const place *p = payload;
    const mn_view dy = mn_grad_read(p->y);
    const int64_t *n = p->y->shape;
    if (!dy.data) return;
    for (int64_t i = 0; i < p->n; i++) {
        mn_tensor *part = p->parts[i];
        if (!mn_wants(part) || !mn_grad_place(tape, part)) continue;
        const mn_tape_mark mark = mn_tape_hold(tape);
        const size_t item = mn_dtype_bytes(p->y->dtype);
        void *rows = mn_tape_bytes_of(tape, (size_t)mn_count4(part->shape) * item);
        const mn_view taken = mn_flat_view(rows, p->y->dtype, part->shape);
        if (rows) {
            mn_tape_do(tape, MN_ELEMENTWISE_ROWS, &(mn_rows_params){
                .shape = { n[0], n[1], 1, n[3] }, .table = dy, .rows = taken,
                .index = p->places[i], .n = part->shape[1] });
        }
        if (rows) mn_grad_give(tape, part, &taken);
        mn_tape_let_go(tape, mark);
    }
}

mn_tensor *mn_tape_place(mn_tape *tape, mn_tensor *const *parts, const int32_t *const *places,
                         const int64_t *counts, int64_t n, const int64_t shape[4]) {
    if (mn_tape_dead(tape)) return NULL;
    place *p = mn_tape_note(tape, sizeof *p);
    mn_tensor *y = mn_tape_new(tape, shape);
    if (!p || !y) return NULL;
    p->y = y;
    p->n = n;
    p->parts = mn_tape_note(tape, (size_t)mn_max(n, 1) * sizeof *p->parts);
    p->places = mn_tape_note(tape, (size_t)mn_max(n, 1) * sizeof *p->places);
    if (!p->parts || !p->places) return NULL;
    mn_tape_do(tape, MN_ELEMENTWISE_FILL, &(mn_fill_params){
        .shape = { shape[0], shape[1], shape[2], shape[3] }, .to = mn_value(y) });
    bool wanted = false;
    for (int64_t i = 0; i < n; i++) {
        p->parts[i] = parts[i];
        if (!parts[i]) return NULL;
        p->places[i] = mn_tape_lend(tape, places[i], (size_t)counts[i] * sizeof **places);
        if (!p->places[i]) return NULL;
        wanted |= mn_wants(parts[i]);
        mn_tape_do(tape, MN_ELEMENTWISE_ROWS, &(mn_rows_params){
            .shape = { shape[0], shape[1], 1, shape[3] }, .table = mn_value(y),
            .rows = mn_value(parts[i]), .index = p->places[i], .n = counts[i], .scatters = true });
    }
    mn_tape_record(tape, "place", back_place, p, wanted, &y, 1);
    return y;
}

/* ---- embed ----------------------------------------------------------------------------------- */

typedef struct embed {
    mn_tensor *table, *y;
    const int32_t *tokens;
} embed;

static void back_embed(mn_tape *tape, void *payload) {
    const embed *e = payload;
    mn_embed_params work = { .V = e->table->shape[2], .X = e->table->shape[3], .n = rows_of(e->y),
                           .tokens = e->tokens, .dy = mn_grad_read(e->y) };
    if (!work.dy.data || !mn_wants(e->table)) return;
    work.table = mn_grad_write(tape, e->table, &work.add);
    if (work.table.data) mn_tape_do(tape, MN_ELEMENTWISE_EMBED, &work);
}

/* Rows come in the tape's type, whatever the table's. */
mn_tensor *mn_tape_embed(mn_tape *tape, mn_tensor *table, const int32_t *tokens, int64_t B,
                         int64_t T) {
    if (!table || mn_tape_dead(tape)) return NULL;
    const int64_t V = table->shape[2], X = table->shape[3];
    tokens = mn_tape_lend_ids(tape, tokens, B * T, "token", 0, V);
    embed *e = mn_tape_note(tape, sizeof *e);
    mn_tensor *y = mn_tape_new(tape, (int64_t[]){ B, T, 1, X });
    if (!e || !y || !tokens) return NULL;
    *e = (embed){ .table = table, .y = y, .tokens = tokens };
    mn_rows_params work = { .shape = { 1, V, 1, X }, .rows = mn_value(y), .index = tokens,
                          .n = B * T, .quant = table->quant };
    work.table = mn_flat_view(table->data, table->dtype, work.shape);
    mn_tape_do(tape, MN_ELEMENTWISE_ROWS, &work);
    mn_tape_record(tape, "the embedding", back_embed, e, mn_wants(table), &y, 1);
    return y;
}
