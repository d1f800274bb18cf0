/* copying.c - selective copying: the tokens that stand among blanks, in their order.
 *
 *   V = vocab, copy token V-1, blank V-2, content uniform over [0, V-2), n = to_copy
 *   blanks and content | copy token | n blanks
 *
 * Each of the length - 2n - 1 blanks in front goes before one of the content tokens, drawn evenly.
 * Targets are the content, under the last n blanks. */
#include <stdlib.h>
#include <string.h>

#include "tasks/task_internal.h"

typedef struct copying {
    int64_t *blanks;    // in front of each content token
} copying;

static void close_copying(mn_task *task) {
    copying *c = task->own;
    free(c->blanks);
}

static mn_status open_copying(mn_task *task) {
    const mn_task_values *v = &task->values;
    mn_status st = mn_task_require(task, v->vocab >= 3, "vocab",
                                   "content, blank and copy token are three");
    if (st == MN_OK) {
        st = mn_task_require(task, v->to_copy <= (v->length - 1) / 2, "to_copy",
                             "twice that and the copy token must fit in the length");
    }
    if (st == MN_OK) st = mn_task_own(task, sizeof(copying));
    if (st != MN_OK) return st;
    copying *c = task->own;
    task->shape = (mn_task_shape){ .vocab = v->vocab, .classes = v->vocab, .length = v->length };
    return mn_task_memory(&c->blanks, task, v->to_copy, sizeof *c->blanks);
}

static mn_status draw_copying(mn_task *task, mn_sample_row *row) {
    const copying *c = task->own;
    const int64_t n = task->values.to_copy, T = task->shape.length;
    const int32_t copy = (int32_t)(task->values.vocab - 1), blank = copy - 1;
    memset(c->blanks, 0, (size_t)n * sizeof *c->blanks);
    for (int64_t i = 0; i < T - 2 * n - 1; i++) c->blanks[mn_draw_below(&row->draws, n)]++;
    int64_t t = 0;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < c->blanks[i]; k++) row->input[t++] = blank;
        row->target[T - n + i] = (int32_t)mn_draw_below(&row->draws, blank);
        row->input[t++] = row->target[T - n + i];
    }
    row->input[t++] = copy;
    while (t < T) row->input[t++] = blank;
    return MN_OK;
}

const mn_generator mn_generator_copying = { .open = open_copying, .draw = draw_copying,
                                            .close = close_copying };
