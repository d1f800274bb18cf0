/* memorise.c - one fixed map from keys to values that only training can tell.
 *
 *   V = vocab, insert token V-1, keys [0, (V-1)/2), values the rest below V-1
 *   input:   key insert key insert ...     keys uniform, again and again
 *   target:  -    value  -   value         the map is one to one and the same for all samples */
#include <stdlib.h>

#include "tasks/task_internal.h"

typedef struct memorise {
    int64_t n_keys;
    int32_t *value_of;
} memorise;

static void close_memorise(mn_task *task) {
    memorise *m = task->own;
    free(m->value_of);
}

static mn_status open_memorise(mn_task *task) {
    const mn_task_values *v = &task->values;
    mn_status st = mn_task_require(task, v->vocab >= 3, "vocab",
                                   "a key, a value and the insert token are three");
    if (st == MN_OK) st = mn_task_require(task, v->length % 2 == 0, "length", "it must be even");
    if (st == MN_OK) st = mn_task_own(task, sizeof(memorise));
    if (st != MN_OK) return st;
    memorise *m = task->own;
    m->n_keys = (v->vocab - 1) / 2;
    task->shape = (mn_task_shape){ .vocab = v->vocab, .classes = v->vocab, .length = v->length };
    mn_deck deck = { 0 };
    st = mn_task_memory(&m->value_of, task, m->n_keys, sizeof *m->value_of);
    if (st == MN_OK) st = mn_deck_create(&deck, v->vocab - 1 - m->n_keys);
    mn_draws d = mn_draws_make((uint64_t)v->map_seed, MN_DRAW_MAP, MN_SPLIT_TRAIN, v->vocab);
    for (int64_t i = 0; st == MN_OK && i < m->n_keys; i++) {
        m->value_of[i] = (int32_t)m->n_keys + mn_deck_draw(&deck, &d);
    }
    mn_deck_free(&deck);
    return st;
}

static mn_status draw_memorise(mn_task *task, mn_sample_row *row) {
    const memorise *m = task->own;
    for (int64_t t = 0; t < task->shape.length; t += 2) {
        const int64_t key = mn_draw_below(&row->draws, m->n_keys);
        row->input[t] = (int32_t)key;
        row->input[t + 1] = (int32_t)(task->values.vocab - 1);
        row->target[t + 1] = m->value_of[key];
    }
    return MN_OK;
}

const mn_generator mn_generator_memorise = { .open = open_memorise, .draw = draw_memorise,
                                             .close = close_memorise };
