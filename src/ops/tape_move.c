/* tape_move.c - operations that only move numbers: repeat heads, join parts, rows of a table. */
#include <string.h>

#include "base/util.h"
#include "ops/tape_node.h"

enum { ROWS = 16, COLUMNS = 64, MAX_PARTS = 8 };

static int64_t rows_of(const mn_tensor *x) {
    return x->shape[0] * x->shape[1] * x->shape[2];
}

static void *moved(const mn_tape *tape, void *at, int64_t elements) {
    return (char *)at + (size_t)elements * tape->item;
}

/* ---- join: parts side by side, and repeat: one part for several heads ------------------------ */

typedef struct join {
    mn_tensor *parts[MAX_PARTS], *y;
    int n;
    int64_t times;       // heads of y per head of the part
    mn_tape *tape;
    void *dy, *grads[MAX_PARTS];
    bool add[MAX_PARTS];
} join;

static void join_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const join *j = context;
    const int64_t last = mn_min((item + 1) * ROWS, rows_of(j->y));
    for (int64_t row = item * ROWS; row < last; row++) {
        int64_t at = row * j->y->shape[3];
        for (int i = 0; i < j->n; i++) {
            const mn_tensor *part = j->parts[i];
            const int64_t from = mn_row_at(part, row / j->times);
            mn_tape_give(j->tape, moved(j->tape, j->y->data, at), moved(j->tape, part->data, from),
                 part->shape[3], false);
            at += part->shape[3];
        }
    }
}

/* Rows of the parts: a repeated head gets the sum over its copies, first copy first. */
static void back_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const join *j = context;
    const int64_t last = mn_min((item + 1) * ROWS, rows_of(j->parts[0]));
    for (int64_t row = item * ROWS; row < last; row++) {
        int64_t at = row * j->times * j->y->shape[3];
        for (int i = 0; i < j->n; i++) {
            const mn_tensor *part = j->parts[i];
            for (int64_t copy = 0; j->grads[i] && copy < j->times; copy++) {
                mn_tape_give(j->tape, moved(j->tape, j->grads[i], mn_row_at(part, row)),
                     moved(j->tape, j->dy, at + copy * part->shape[3]), part->shape[3],
                     j->add[i] || copy > 0);
            }
            at += part->shape[3];
        }
    }
}

static void back_join(mn_tape *tape, void *payload) {
    join *j = payload;
    j->dy = mn_grad_read(j->y);
    if (!j->dy) return;
    for (int i = 0; i < j->n; i++) {
        j->grads[i] = NULL;
        if (mn_wants(j->parts[i])) j->grads[i] = mn_grad_write(tape, j->parts[i], &j->add[i]);
    }
    const int64_t pieces = mn_ceil_div(rows_of(j->parts[0]), ROWS);
    if (mn_tape_runs(tape)) mn_tape_items(tape, pieces, back_rows, j);
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
    j->y = mn_tape_new(tape, (int64_t[]){ first[0], first[1], first[2] * times, width });
    if (!j->y) return NULL;
    j->n = n;
    j->times = times;
    j->tape = tape;
    if (mn_tape_runs(tape)) mn_tape_items(tape, mn_ceil_div(rows_of(j->y), ROWS), join_rows, j);
    mn_tape_record(tape, what, back_join, j, wanted, &j->y, 1);
    return j->y;
}

mn_tensor *mn_tape_join(mn_tape *tape, mn_tensor *const *parts, int n) {
    if (mn_tape_dead(tape)) return NULL;
    for (int i = 0; i < n; i++) {
        if (!parts[i]) return NULL;
    }
    if (n < 1 || n > MAX_PARTS) return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "join"));
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
    void *dy = mn_grad_read(p->y);
    if (!dy || !mn_wants(p->x)) return;
    bool add;
    void *dx = mn_grad_write(tape, p->x, &add);
    if (!dx || !mn_tape_runs(tape)) return;
    const int64_t width = p->x->shape[3];
    for (int64_t row = 0; !add && row < rows_of(p->x); row++) {
        memset(moved(tape, dx, mn_row_at(p->x, row)), 0, (size_t)width * tape->item);
    }
    for (int64_t i = 0; i < p->y->shape[1]; i++) {
        mn_tape_give(tape, moved(tape, dx, mn_row_at(p->x, p->places[i])),
                     moved(tape, dy, i * width), width, true);
    }
}

mn_tensor *mn_tape_pick(mn_tape *tape, mn_tensor *x, const int32_t *places, int64_t n) {
    if (!x || mn_tape_dead(tape)) return NULL;
    for (int64_t i = 0; i < n; i++) {
        if (x->shape[2] == 1 && places[i] >= 0 && places[i] < rows_of(x)) continue;
        return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: no token %d to pick", tape->scope,
                                          (int)places[i]));
    }
    pick *p = mn_tape_note(tape, sizeof *p);
    mn_tensor *y = mn_tape_new(tape, (int64_t[]){ 1, n, 1, x->shape[3] });
    if (!p || !y) return NULL;
    *p = (pick){ x, y, places };
    for (int64_t i = 0; i < n && mn_tape_runs(tape); i++) {
        mn_tape_give(tape, moved(tape, y->data, i * x->shape[3]),
             moved(tape, x->data, mn_row_at(x, places[i])), x->shape[3], false);
    }
    mn_tape_record(tape, "pick", back_pick, p, mn_wants(x), &y, 1);
    return y;
}

/* ---- embed ----------------------------------------------------------------------------------- */

typedef struct embed {
    mn_tensor *table, *y;
    const int32_t *tokens;
    mn_tape *tape;
    void *dtable, *dy;
} embed;

static void embed_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const embed *e = context;
    const int64_t width = e->table->shape[3];
    const int64_t last = mn_min((item + 1) * ROWS, rows_of(e->y));
    for (int64_t row = item * ROWS; row < last; row++) {
        mn_tape_give(e->tape, moved(e->tape, e->y->data, row * width),
             moved(e->tape, e->table->data, e->tokens[row] * width), width, false);
    }
}

/* Columns [64 item, ...) of the table: every token in order, so the sum has one order. */
static void back_columns(void *context, int64_t item, int worker) {
    (void)worker;
    const embed *e = context;
    const int64_t width = e->table->shape[3], first = item * COLUMNS;
    const int64_t n = mn_min(COLUMNS, width - first);
    for (int64_t row = 0; row < rows_of(e->y); row++) {
        mn_tape_give(e->tape, moved(e->tape, e->dtable, e->tokens[row] * width + first),
             moved(e->tape, e->dy, row * width + first), n, true);
    }
}

static void back_embed(mn_tape *tape, void *payload) {
    embed *e = payload;
    e->dy = mn_grad_read(e->y);
    if (!e->dy || !mn_wants(e->table)) return;
    bool add;
    e->dtable = mn_grad_write(tape, e->table, &add);
    if (!e->dtable || !mn_tape_runs(tape)) return;
    if (!add) memset(e->dtable, 0, (size_t)mn_count4(e->table->shape) * tape->item);
    mn_tape_items(tape, mn_ceil_div(e->table->shape[3], COLUMNS), back_columns, e);
}

mn_tensor *mn_tape_embed(mn_tape *tape, mn_tensor *table, const int32_t *tokens, int64_t B,
                         int64_t T) {
    if (!table || mn_tape_dead(tape)) return NULL;
    for (int64_t i = 0; mn_tape_runs(tape) && i < B * T; i++) {
        if (tokens[i] >= 0 && tokens[i] < table->shape[2]) continue;
        return mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "token %d at place %lld of the batch is "
                            "outside the model's vocabulary of %lld; the data and the model have "
                            "different tokenizers", (int)tokens[i], (long long)i,
                            (long long)table->shape[2]));
    }
    embed *e = mn_tape_note(tape, sizeof *e);
    mn_tensor *y = mn_tape_new(tape, (int64_t[]){ B, T, 1, table->shape[3] });
    if (!e || !y) return NULL;
    *e = (embed){ .table = table, .y = y, .tokens = tokens, .tape = tape };
    if (mn_tape_runs(tape)) mn_tape_items(tape, mn_ceil_div(B * T, ROWS), embed_rows, e);
    mn_tape_record(tape, "the embedding", back_embed, e, mn_wants(table), &y, 1);
    return y;
}
