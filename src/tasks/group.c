/* group.c - word problems: the running product of permutations of five things.
 *
 *   G: all 120 permutations (s5) or the 60 even ones (a5), numbered in the order of their lists;
 *      0 is the identity.  (a o b)(i) = a(b(i))
 *   input   BOS x1 x2 .. xk
 *   target  BOS p1 p2 .. pk       p0 = identity, pt = pt-1 o xt
 *   ids     G, then PAD, BOS, UNK, EOS, SEP, CLS, MASK
 *
 * No sequence comes twice: as long as |G|^k can be counted, number j of a split is a place in a
 * random order of all sequences; beyond, repetitions are too unlikely to matter. Of `sequences`
 * (or of all, when the group has fewer) the first four fifths are for training and the rest for
 * testing; valid takes the ones behind, or, when there are none, every second of the test's. With
 * `short_ones` training has all sequences of two elements in front, filled up with PAD, which is a
 * target there too. BOS and p1 = x1 need no memory; without `free_places` they are targets in
 * training only. */
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/util.h"
#include "data/shuffle.h"
#include "tasks/task_internal.h"

enum { POINTS = 5, MOST = 120, SPECIALS = 7 };

typedef struct group {
    int64_t order;                      // elements
    uint8_t product[MOST][MOST];
    int64_t all;                        // |G|^k; 0: beyond counting
    mn_shuffle shuffle;                 // of all, but for its seed
    int64_t total;                      // sequences of length k in training and testing
    int64_t n_train;                    // of length k
    int64_t n_short;                    // of length 2
    bool halved;                        // valid and test share the last fifth
} group;

typedef struct permutation {
    uint8_t to[POINTS];
} permutation;

/* The permutation after `p` in the order of their lists; false at the last one. */
static bool next(permutation *p) {
    int i = POINTS - 2, j = POINTS - 1;
    while (i >= 0 && p->to[i] > p->to[i + 1]) i--;
    if (i < 0) return false;
    while (p->to[j] < p->to[i]) j--;
    uint8_t kept = p->to[i];
    p->to[i] = p->to[j];
    p->to[j] = kept;
    for (int a = i + 1, b = POINTS - 1; a < b; a++, b--) {
        kept = p->to[a];
        p->to[a] = p->to[b];
        p->to[b] = kept;
    }
    return true;
}

static bool is_even(const permutation *p) {
    int inversions = 0;
    for (int i = 0; i < POINTS; i++) {
        for (int j = i + 1; j < POINTS; j++) inversions += p->to[i] > p->to[j];
    }
    return inversions % 2 == 0;
}

static void make_table(group *g, bool even_only) {
    permutation p = { { 0, 1, 2, 3, 4 } }, elements[MOST];
    do {
        if (!even_only || is_even(&p)) elements[g->order++] = p;
    } while (next(&p));
    for (int64_t a = 0; a < g->order; a++) {
        for (int64_t b = 0; b < g->order; b++) {
            for (int i = 0; i < POINTS; i++) p.to[i] = elements[a].to[elements[b].to[i]];
            int64_t c = 0;
            while (memcmp(&elements[c], &p, sizeof p) != 0) c++;
            g->product[a][b] = (uint8_t)c;
        }
    }
}

static void split_sequences(mn_task *task) {
    const mn_task_values *v = &task->values;
    group *g = task->own;
    g->all = 1;
    for (int64_t i = 0; i < v->steps && g->all > 0; i++) {
        if (!mn_mul_i64(&g->all, g->all, g->order) || g->all > INT64_MAX / 4) g->all = 0;
    }
    g->total = g->all > 0 ? mn_min(g->all, v->sequences) : v->sequences;
    g->n_train = g->total * 4 / 5;
    g->n_short = v->short_ones && v->steps > 2 ? g->order * g->order : 0;
    const int64_t tests = g->total - g->n_train;
    g->halved = g->all > 0 && g->all < g->total + tests;
    task->examples[MN_SPLIT_TRAIN] = g->n_short + g->n_train;
    task->examples[MN_SPLIT_VALID] = g->halved ? tests / 2 : tests;
    task->examples[MN_SPLIT_TEST] = g->halved ? tests - tests / 2 : tests;
}

static mn_status open_group(mn_task *task) {
    const mn_task_values *v = &task->values;
    mn_status st = mn_task_require(task, v->steps >= 2, "steps", "a product has two factors at "
                                                                 "least");
    if (st == MN_OK) st = mn_task_own(task, sizeof(group));
    if (st != MN_OK) return st;
    group *g = task->own;
    make_table(g, strcmp(task->info.name, "a5") == 0);
    split_sequences(task);
    if (g->all > 0) g->shuffle = mn_shuffle_make(g->all, 0, 0);
    const int64_t ids = g->order + SPECIALS;
    task->shape = (mn_task_shape){ .vocab = ids, .classes = ids, .length = v->steps + 1 };
    return MN_OK;
}

/* Which sequence of length k a sample is, counted through training, test and what lies behind. */
static int64_t number_of(const group *g, const mn_sample_row *row) {
    if (row->split == MN_SPLIT_TRAIN) return row->index - g->n_short;
    if (g->halved) return g->n_train + 2 * row->index + (row->split == MN_SPLIT_VALID);
    return row->split == MN_SPLIT_TEST ? g->n_train + row->index : g->total + row->index;
}

static mn_status draw_group(mn_task *task, mn_sample_row *row) {
    const group *g = task->own;
    const int32_t pad = (int32_t)g->order, bos = pad + 1;
    const int64_t number = number_of(g, row);
    const bool is_short = number < 0;
    const int64_t k = is_short ? 2 : task->values.steps;
    int64_t code = is_short ? row->index : 0;
    if (!is_short && g->all > 0) {
        const mn_draws order = mn_draws_make(row->seed, MN_DRAW_ORDER, MN_SPLIT_TRAIN, 0);
        mn_shuffle shuffled = g->shuffle;
        shuffled.seed = order.key;
        code = mn_shuffle_at(&shuffled, number);
    }
    int32_t product = 0;
    row->input[0] = row->target[0] = bos;
    for (int64_t t = 1; t <= task->values.steps; t++) {
        int32_t x = pad;
        if (t <= k && (is_short || g->all > 0)) {
            x = (int32_t)(code % g->order);
            code /= g->order;
        } else if (t <= k) {
            x = (int32_t)mn_draw_below(&row->draws, g->order);
        }
        if (t <= k) product = g->product[product][x];
        row->input[t] = x;
        row->target[t] = t <= k ? product : pad;
    }
    if (!task->values.free_places && row->split != MN_SPLIT_TRAIN) {
        row->target[0] = row->target[1] = MN_NO_TARGET;
    }
    return MN_OK;
}

const mn_generator mn_generator_group = { .open = open_group, .draw = draw_group };
