/* recall.c - in-context recall: pairs of keys and values, and values asked again by their keys.
 *
 *   S = vocab - noise_vocab, keys [0, S/2), values [S/2, S), noise [S, vocab), P = length / 2 slots
 *   slots 0 .. P-2:  noise noise   with probability `noise`, except in one slot drawn before
 *                    key value     key uniform; its value uniform when the key is new
 *   slot P-1:        key value     key uniform over the distinct keys seen
 *
 * Input is all but the last token. Training asks for every next token; valid and test for the
 * values of keys that came before. */
#include <stdlib.h>

#include "tasks/task_internal.h"

typedef struct recall {
    int64_t n_keys, n_values, n_slots;
    int32_t *value_of;    // of a key; -1: not in the sequence
    int32_t *seen;        // the distinct keys, in the order they came
} recall;

static void close_recall(mn_task *task) {
    recall *r = task->own;
    free(r->value_of);
    free(r->seen);
}

static mn_status open_recall(mn_task *task) {
    const mn_task_values *v = &task->values;
    const int64_t plain = v->vocab - v->noise_vocab;
    mn_status st = mn_task_require(task, v->length >= 4 && v->length % 2 == 0, "length",
                                   "it must be even and at least 4");
    if (st == MN_OK) {
        st = mn_task_require(task, plain >= 2, "noise_vocab",
                             "two tokens of the vocabulary at least must be left for keys and "
                             "values");
    }
    if (st == MN_OK) {
        st = mn_task_require(task, v->noise == 0.0 || v->noise_vocab > 0, "noise_vocab",
                             "noise needs tokens of its own: raise it, or set noise to 0");
    }
    if (st == MN_OK) st = mn_task_require(task, v->noise < 1.0, "noise", "must lie below 1");
    if (st == MN_OK) st = mn_task_own(task, sizeof(recall));
    if (st != MN_OK) return st;
    recall *r = task->own;
    r->n_keys = plain / 2;
    r->n_values = plain - r->n_keys;
    r->n_slots = v->length / 2;
    task->shape = (mn_task_shape){ .vocab = v->vocab, .classes = v->vocab,
                                   .length = v->length - 1 };
    st = mn_task_memory(&r->value_of, task, r->n_keys, sizeof *r->value_of);
    if (st == MN_OK) st = mn_task_memory(&r->seen, task, r->n_keys, sizeof *r->seen);
    for (int64_t i = 0; st == MN_OK && i < r->n_keys; i++) r->value_of[i] = -1;
    return st;
}

/* Writes one slot; `again` asks for the second token in valid and test. */
static void put_slot(mn_sample_row *row, int64_t slot, int64_t n_slots, int32_t first,
                     int32_t second, bool again) {
    const int64_t t = 2 * slot;
    row->input[t] = first;
    if (slot + 1 < n_slots) row->input[t + 1] = second;
    if (row->split == MN_SPLIT_TRAIN) {
        if (t > 0) row->target[t - 1] = first;
        row->target[t] = second;
    } else {
        row->target[t] = again ? second : MN_NO_TARGET;
    }
}

/* Slots 0 .. P-2; returns how many distinct keys they hold. */
static int64_t put_slots(const mn_task *task, mn_sample_row *row) {
    const recall *r = task->own;
    const double noise = task->values.noise;
    mn_draws *d = &row->draws;
    const int64_t plain = r->n_keys + r->n_values;
    const int64_t kept = noise > 0.0 ? mn_draw_below(d, r->n_slots) : -1;
    int64_t n_seen = 0;
    for (int64_t i = 0; i + 1 < r->n_slots; i++) {
        if (noise > 0.0 && i != kept && mn_draw_unit(d) < noise) {
            const int64_t first = mn_draw_below(d, task->values.noise_vocab);
            const int64_t second = mn_draw_below(d, task->values.noise_vocab);
            put_slot(row, i, r->n_slots, (int32_t)(plain + first), (int32_t)(plain + second),
                     false);
            continue;
        }
        const int32_t key = (int32_t)mn_draw_below(d, r->n_keys);
        const bool again = r->value_of[key] >= 0;
        if (!again) {
            r->seen[n_seen++] = key;
            r->value_of[key] = (int32_t)(r->n_keys + mn_draw_below(d, r->n_values));
        }
        put_slot(row, i, r->n_slots, key, r->value_of[key], again);
    }
    return n_seen;
}

static mn_status draw_recall(mn_task *task, mn_sample_row *row) {
    const recall *r = task->own;
    int64_t n_seen;
    do n_seen = put_slots(task, row);    // again in the rare case of nothing but noise
    while (n_seen == 0);
    const int32_t probe = r->seen[mn_draw_below(&row->draws, n_seen)];
    put_slot(row, r->n_slots - 1, r->n_slots, probe, r->value_of[probe], true);
    for (int64_t i = 0; i < n_seen; i++) r->value_of[r->seen[i]] = -1;
    return MN_OK;
}

const mn_generator mn_generator_recall = { .open = open_recall, .draw = draw_recall,
                                           .close = close_recall };
