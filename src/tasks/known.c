/* known.c - a stream of statements and questions, some of which nothing in it answers.
 *
 *   token 0 marks a question, keys [1, 1 + n), values [1 + n, vocab), n = (vocab - 1) / 2
 *   slots of two tokens, length / 2 of them; the first is a statement, each other a question with
 *   probability `question`:
 *     statement   key value    of a key that was said, with another value, with probability
 *                              `update`, else of a key that was not
 *     question    0 key        with probability `unknown` of a key that was not said, whose target
 *                              is any value, evenly; else of a key that was, evenly, whose target
 *                              is its newest value
 *
 * Questions about keys that were not said stand in training only with `train_unknown`. The target
 * of a question stands at its key. Kinds of questions: never (said), once, overwritten, and
 * long_ago: said, with more than `old_after` statements since. */
#include <stdlib.h>

#include "tasks/task_internal.h"

typedef struct known {
    int64_t n_keys, n_values;
    int32_t *value_of;         // of a key, -1: not said
    int32_t *said;             // keys, in the order they were first said
    int32_t *times, *when;     // for kinds: how often a key was said, and in which statement last
    int64_t n_said;
} known;

enum { NEVER, ONCE, OVERWRITTEN, LONG_AGO, KINDS };
static const char *const kinds[KINDS] = { "never", "once", "overwritten", "long_ago" };

static void close_known(mn_task *task) {
    known *m = task->own;
    free(m->value_of);
    free(m->said);
    free(m->times);
    free(m->when);
}

static mn_status open_known(mn_task *task) {
    const mn_task_values *v = &task->values;
    const int64_t n_keys = (v->vocab - 1) / 2;
    mn_status st = mn_task_require(task, v->length % 2 == 0, "length", "it must be even");
    if (st == MN_OK) {
        st = mn_task_require(task, n_keys > v->length / 2, "vocab",
                             "there must be keys that are not said: more than length + 2");
    }
    if (st == MN_OK) st = mn_task_own(task, sizeof(known));
    if (st != MN_OK) return st;
    known *m = task->own;
    m->n_keys = n_keys;
    m->n_values = v->vocab - 1 - n_keys;
    task->shape = (mn_task_shape){ .vocab = v->vocab, .classes = v->vocab, .length = v->length };
    task->groups = kinds;
    task->n_groups = KINDS;
    st = mn_task_memory(&m->value_of, task, n_keys, sizeof *m->value_of);
    if (st == MN_OK) st = mn_task_memory(&m->said, task, n_keys, sizeof *m->said);
    if (st == MN_OK) st = mn_task_memory(&m->times, task, n_keys, sizeof *m->times);
    if (st == MN_OK) st = mn_task_memory(&m->when, task, n_keys, sizeof *m->when);
    for (int64_t i = 0; st == MN_OK && i < n_keys; i++) m->value_of[i] = -1;
    return st;
}

static int32_t key_token(int64_t key) {
    return (int32_t)(1 + key);
}

static int32_t value_token(const known *m, int64_t value) {
    return (int32_t)(1 + m->n_keys + value);
}

static int64_t fresh_key(const known *m, mn_draws *d) {
    int64_t key;
    do key = mn_draw_below(d, m->n_keys);
    while (m->value_of[key] >= 0);    // keys are more than slots
    return key;
}

static void put_statement(known *m, const mn_task_values *v, mn_sample_row *row, int64_t slot) {
    mn_draws *d = &row->draws;
    const bool again = m->n_said > 0 && m->n_values > 1 && mn_draw_unit(d) < v->update;
    int64_t key, value;
    if (again) {
        key = m->said[mn_draw_below(d, m->n_said)];
        value = mn_draw_below(d, m->n_values - 1);
        value += value >= m->value_of[key];
    } else {
        key = fresh_key(m, d);
        value = mn_draw_below(d, m->n_values);
        m->said[m->n_said++] = (int32_t)key;
    }
    m->value_of[key] = (int32_t)value;
    row->input[2 * slot] = key_token(key);
    row->input[2 * slot + 1] = value_token(m, value);
}

static void put_question(const known *m, const mn_task_values *v, mn_sample_row *row,
                         int64_t slot) {
    mn_draws *d = &row->draws;
    const bool may = row->split != MN_SPLIT_TRAIN || v->train_unknown;
    const bool unknown = may && mn_draw_unit(d) < v->unknown;
    const int64_t key = unknown ? fresh_key(m, d) : m->said[mn_draw_below(d, m->n_said)];
    const int64_t value = unknown ? mn_draw_below(d, m->n_values) : m->value_of[key];
    row->input[2 * slot] = 0;
    row->input[2 * slot + 1] = key_token(key);
    row->target[2 * slot + 1] = value_token(m, value);
}

static mn_status draw_known(mn_task *task, mn_sample_row *row) {
    known *m = task->own;
    const mn_task_values *v = &task->values;
    m->n_said = 0;
    for (int64_t slot = 0; slot < v->length / 2; slot++) {
        const bool asks = slot > 0 && mn_draw_unit(&row->draws) < v->question;
        if (asks) put_question(m, v, row, slot);
        else put_statement(m, v, row, slot);
    }
    for (int64_t i = 0; i < m->n_said; i++) m->value_of[m->said[i]] = -1;
    return MN_OK;
}

static int8_t kind_of(int32_t times, int64_t since, int64_t old_after) {
    if (times == 0) return NEVER;
    if (since > old_after) return LONG_AGO;
    return times > 1 ? OVERWRITTEN : ONCE;
}

static void group_known(const mn_task *task, const int32_t *input, const int32_t *target,
                        int8_t *group) {
    known *m = task->own;
    int32_t statements = 0;
    for (int64_t i = 0; i < m->n_keys; i++) m->times[i] = 0;
    for (int64_t t = 0; t + 1 < task->values.length; t += 2) {
        const bool asks = input[t] == 0;
        const int32_t key = input[asks ? t + 1 : t] - 1;
        if (key < 0 || key >= m->n_keys) continue;    // an empty row
        if (!asks) {
            m->times[key]++;
            m->when[key] = statements++;
        } else if (target[t + 1] >= 0) {
            group[t + 1] = kind_of(m->times[key], statements - 1 - m->when[key],
                                   task->values.old_after);
        }
    }
}

const mn_generator mn_generator_known = { .open = open_known, .draw = draw_known,
                                          .close = close_known, .group = group_known };
