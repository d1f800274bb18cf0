/* mqar.c - multi-query associative recall: pairs in front, then every key once more.
 *
 *   N = length, V = vocab, D pairs, context of C tokens:
 *     plain    k1 v1 k2 v2 ... kD vD                                        C = 2 D
 *     update   the same, then `rewrites` new values of U keys, mixed        C = 2 (D + U rewrites)
 *     block    k1 .. kB v1 .. vB kB+1 .. k2B vB+1 .. v2B ...                C = 2 D = 2 B blocks
 *   keys from [1, V/2) and values from [V/2, V), or with `shared` both from [1, V), each without
 *   repetition; new values are none of the values before.
 *
 * Behind the context lie (N - C) / 2 slots of two tokens. Slots go to the keys in order of the
 * context, drawn one after the other without repetition, slot i with weight (i + 1)^(alpha - 1).
 * That order of draws is the order of log(weight) + Gumbel noise. The key stands first in its slot
 * and has its newest value as target; all other places are 0, or random with `random_fill`. */
#include <math.h>
#include <stdlib.h>

#include "base/util.h"
#include "tasks/task_internal.h"

typedef struct slot {
    double urge;      // slots are taken from the largest down
    int64_t place;
} slot;

typedef struct mqar {
    mn_deck keys, values;
    int32_t first_key, first_value;
    int64_t most_pairs;
    int32_t *key, *value;          // of each pair, the newest value
    int32_t *turn;                 // which pair each rewrite is for
    double *log_weight;            // of each slot
    slot *slots;
} mqar;

static void close_mqar(mn_task *task) {
    mqar *m = task->own;
    mn_deck_free(&m->keys);
    mn_deck_free(&m->values);
    free(m->key);
    free(m->value);
    free(m->turn);
    free(m->log_weight);
    free(m->slots);
}

static int64_t n_rewrites(const mn_task_values *v) {
    return v->updates * v->rewrites;
}

static int64_t most_pairs(const mn_task_values *v) {
    return v->block > 0 ? v->block * v->blocks : v->pairs;
}

static mn_status check_mqar(const mn_task *task, int64_t n_keys, int64_t n_values) {
    const mn_task_values *v = &task->values;
    const int64_t D = most_pairs(v), W = n_rewrites(v);
    const char *pairs = v->block > 0 ? "blocks" : "pairs";
    const struct {
        const char *key, *why;
        bool holds;
    } rules[] = {
        { "length", "it must be even", v->length % 2 == 0 },
        { "vocab", "it must exceed length", v->vocab > v->length },
        { "updates", "no more keys than pairs can get new values", v->updates <= D },
        { pairs, "twice the pairs and rewrites and twice the pairs again must fit in length",
          4 * D + 2 * W <= v->length },
        { pairs, "there are not that many keys: raise vocab", D <= n_keys },
        { pairs, "there are not that many values: raise vocab", D + W <= n_values },
    };
    mn_status st = MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(rules) && st == MN_OK; i++) {
        st = mn_task_require(task, rules[i].holds, rules[i].key, rules[i].why);
    }
    return st;
}

static const char *const update_groups[] = { "untouched", "updated" };

static mn_status open_mqar(mn_task *task) {
    const mn_task_values *v = &task->values;
    const int64_t half = v->vocab / 2;
    const int64_t n_keys = v->shared ? v->vocab - 1 : half - 1;
    const int64_t n_values = v->shared ? v->vocab - 1 : v->vocab - half;
    mn_status st = check_mqar(task, n_keys, n_values);
    if (st == MN_OK) st = mn_task_own(task, sizeof(mqar));
    if (st != MN_OK) return st;
    mqar *m = task->own;
    const int64_t D = most_pairs(v), n_slots = v->length / 2;
    m->first_key = 1;
    m->first_value = v->shared ? 1 : (int32_t)half;
    task->shape = (mn_task_shape){ .vocab = v->vocab, .classes = v->vocab, .length = v->length };
    if (v->updates > 0) {
        task->groups = update_groups;
        task->n_groups = 2;
    }
    st = mn_deck_create(&m->keys, n_keys);
    if (st == MN_OK) st = mn_deck_create(&m->values, n_values);
    if (st == MN_OK) st = mn_task_memory(&m->key, task, D, sizeof *m->key);
    if (st == MN_OK) st = mn_task_memory(&m->value, task, D, sizeof *m->value);
    if (st == MN_OK) st = mn_task_memory(&m->turn, task, D + n_rewrites(v), sizeof *m->turn);
    if (st == MN_OK) st = mn_task_memory(&m->log_weight, task, n_slots, sizeof *m->log_weight);
    if (st == MN_OK) st = mn_task_memory(&m->slots, task, n_slots, sizeof *m->slots);
    for (int64_t i = 0; st == MN_OK && i < n_slots; i++) {
        m->log_weight[i] = (v->alpha - 1.0) * log((double)(i + 1));
    }
    return st;
}

static void shuffle(int32_t *items, int64_t n, mn_draws *d) {
    for (int64_t i = n; i > 1; i--) {
        const int64_t j = mn_draw_below(d, i);
        const int32_t item = items[i - 1];
        items[i - 1] = items[j];
        items[j] = item;
    }
}

/* The pairs, in blocks of `block`. */
static void put_pairs(mqar *m, mn_sample_row *row, int64_t D, int64_t block) {
    for (int64_t i = 0; i < D; i++) {
        const int64_t at = i / block * 2 * block + i % block;
        m->key[i] = m->first_key + mn_deck_draw(&m->keys, &row->draws);
        m->value[i] = m->first_value + mn_deck_draw(&m->values, &row->draws);
        row->input[at] = m->key[i];
        row->input[at + block] = m->value[i];
    }
}

/* New values of `updates` of the keys, in any order, from place `t` on. */
static void put_rewrites(mqar *m, const mn_task_values *v, mn_sample_row *row, int64_t t) {
    const int64_t D = v->pairs, W = n_rewrites(v);
    for (int64_t i = 0; i < D; i++) m->turn[i] = (int32_t)i;
    shuffle(m->turn, D, &row->draws);
    for (int64_t i = v->updates; i < W; i++) m->turn[i] = m->turn[i % v->updates];
    shuffle(m->turn, W, &row->draws);
    for (int64_t i = 0; i < W; i++) {
        const int32_t pair = m->turn[i];
        m->value[pair] = m->first_value + mn_deck_draw(&m->values, &row->draws);
        row->input[t + 2 * i] = m->key[pair];
        row->input[t + 2 * i + 1] = m->value[pair];
    }
}

static int by_urge(const void *a, const void *b) {
    const slot *x = a, *y = b;
    if (x->urge != y->urge) return x->urge < y->urge ? 1 : -1;
    return x->place < y->place ? -1 : 1;
}

/* Queries in the slots from place `context` on. */
static void put_queries(mqar *m, const mn_task *task, mn_sample_row *row, int64_t D,
                        int64_t context) {
    const int64_t N = task->values.length, n_slots = (N - context) / 2;
    for (int64_t i = 0; i < n_slots; i++) {
        const double gumbel = -log(-log(mn_draw_unit(&row->draws)));
        m->slots[i] = (slot){ m->log_weight[i] + gumbel, i };
    }
    qsort(m->slots, (size_t)n_slots, sizeof *m->slots, by_urge);
    for (int64_t i = 0; i < D; i++) {
        const int64_t t = context + 2 * m->slots[i].place;
        row->input[t] = m->key[i];
        row->target[t] = m->value[i];
    }
    if (!task->values.random_fill) return;
    for (int64_t t = context; t < N; t++) {
        if (row->target[t] >= 0) continue;
        row->input[t] = (int32_t)mn_draw_below(&row->draws, task->values.vocab);
    }
}

static mn_status draw_mqar(mn_task *task, mn_sample_row *row) {
    mqar *m = task->own;
    const mn_task_values *v = &task->values;
    int64_t D = v->pairs;
    if (v->block > 0) D = v->block * (1 + mn_draw_below(&row->draws, v->blocks));
    put_pairs(m, row, D, v->block > 0 ? v->block : 1);
    if (v->updates > 0) put_rewrites(m, v, row, 2 * D);
    put_queries(m, task, row, D, 2 * (D + n_rewrites(v)));
    mn_deck_restore(&m->keys);
    mn_deck_restore(&m->values);
    return MN_OK;
}

/* A key that stands in the context more than once was updated. */
static void group_mqar(const mn_task *task, const int32_t *input, const int32_t *target,
                       int8_t *group) {
    const mn_task_values *v = &task->values;
    const int64_t context = 2 * (v->pairs + n_rewrites(v));
    for (int64_t t = context; v->updates > 0 && t < v->length; t++) {
        int64_t times = 0;
        if (target[t] < 0) continue;
        for (int64_t i = 0; i < context; i += 2) times += input[i] == input[t];
        group[t] = times > 1;
    }
}

const mn_generator mn_generator_mqar = { .open = open_mqar, .draw = draw_mqar,
                                         .close = close_mqar, .group = group_mqar };
