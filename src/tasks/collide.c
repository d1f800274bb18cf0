/* collide.c - collisions of keys: pairs that share an address for the most part, one of which is
 * written over and over.
 *
 *   P = bindings, D = 2 P
 *   pair i has keys  b_i = e_2i  and  a_i = rho_i e_2i + sqrt(1 - rho_i^2) e_2i+1
 *   rho_i uniform in [rho_low, rho_high]; labels are a random permutation of D, two for each pair
 *
 *   seed    all 2 P keys in random order
 *   boost   b_0 x boosts, b_1 x boosts, ..
 *   flood   a_0 x n, a_1 x n, ..                n one of `floods`
 *   ask     b_0 .. b_P-1 in random order        target: the label of b_i
 *
 * A token is [asks, key, value]: 0, the key and its label one-hot for a write; 1, the key and
 * zeros
 * for a question. n is the same for `batch` neighbouring samples, so that batches have one
 * length. */
#include <math.h>
#include <stdlib.h>

#include "tasks/task_internal.h"

enum { MOST_PAIRS = 256 };

typedef struct collide {
    int64_t floods[MN_TASK_LIST];
    int n_floods;
    mn_deck labels, order;
} collide;

/* One sample on the way. */
typedef struct scene {
    mn_sample_row *row;
    int64_t pairs, t;
    int32_t label[2 * MOST_PAIRS];    // of b_i at 2i, of a_i at 2i+1
    double rho[MOST_PAIRS];
} scene;

static void close_collide(mn_task *task) {
    collide *c = task->own;
    mn_deck_free(&c->labels);
    mn_deck_free(&c->order);
}

static mn_status open_collide(mn_task *task) {
    const mn_task_values *v = &task->values;
    mn_status st = mn_task_require(task, v->rho_low <= v->rho_high, "rho_low",
                                   "it must not exceed rho_high");
    if (st == MN_OK) st = mn_task_own(task, sizeof(collide));
    if (st != MN_OK) return st;
    collide *c = task->own;
    const int64_t D = 2 * v->bindings;
    st = mn_task_list(c->floods, &c->n_floods, task, "floods", v->floods, 0, 65536);
    if (st == MN_OK) st = mn_deck_create(&c->labels, D);
    if (st == MN_OK) st = mn_deck_create(&c->order, D);
    if (st != MN_OK) return st;
    int64_t most = 0;
    for (int i = 0; i < c->n_floods; i++) most = c->floods[i] > most ? c->floods[i] : most;
    task->shape = (mn_task_shape){ .classes = D, .features = 1 + 2 * D,
                                   .length = v->bindings * (3 + v->boosts + most) };
    return MN_OK;
}

/* Token for key `which`, 2i: b_i, 2i+1: a_i. */
static void put(scene *s, int64_t which, bool asks) {
    const int64_t D = 2 * s->pairs, pair = which / 2;
    float *token = s->row->features + s->t * (1 + 2 * D);
    const double rho = which % 2 ? s->rho[pair] : 1.0;
    token[0] = asks;
    token[1 + 2 * pair] = (float)rho;
    token[2 + 2 * pair] = (float)sqrt(1.0 - rho * rho);
    if (asks) s->row->target[s->t] = s->label[which];
    else token[1 + D + s->label[which]] = 1.0f;
    s->t++;
}

static mn_status draw_collide(mn_task *task, mn_sample_row *row) {
    collide *c = task->own;
    const mn_task_values *v = &task->values;
    scene s = { .row = row, .pairs = v->bindings };
    mn_draws together = mn_draws_make(row->seed, MN_DRAW_NEIGHBOURS, row->split,
                                      row->index / v->batch);
    const int64_t n = c->floods[mn_draw_below(&together, c->n_floods)];
    for (int64_t i = 0; i < 2 * s.pairs; i++) s.label[i] = mn_deck_draw(&c->labels, &row->draws);
    for (int64_t i = 0; i < s.pairs; i++) {
        s.rho[i] = v->rho_low + (v->rho_high - v->rho_low) * mn_draw_unit(&row->draws);
    }
    for (int64_t i = 0; i < 2 * s.pairs; i++) put(&s, mn_deck_draw(&c->order, &row->draws), false);
    mn_deck_restore(&c->labels);
    mn_deck_restore(&c->order);
    for (int64_t i = 0; i < s.pairs * v->boosts; i++) put(&s, 2 * (i / v->boosts), false);
    for (int64_t i = 0; i < s.pairs * n; i++) put(&s, 2 * (i / n) + 1, false);
    for (int64_t i = 0; i < 2 * s.pairs; i++) {    // of an order of all keys, those of b
        const int32_t which = mn_deck_draw(&c->order, &row->draws);
        if (which % 2 == 0) put(&s, which, true);
    }
    mn_deck_restore(&c->order);
    task->used = s.t;
    return MN_OK;
}

static int64_t pair_of(const float *token) {
    int64_t pair = 0;
    while (token[1 + 2 * pair] == 0.0f && token[2 + 2 * pair] == 0.0f) pair++;
    return pair;
}

static int32_t label_of(const float *value) {
    int32_t label = 0;
    while (value[label] == 0.0f) label++;
    return label;
}

/* The label of a_i where b_i is asked: of the two that the seed writes for the pair, the one that
 * is not the target. */
static void rival_collide(const mn_task *task, const float *input, const int32_t *target,
                          int32_t *rival) {
    const int64_t P = task->values.bindings, width = task->shape.features;
    for (int64_t t = 2 * P; t < task->shape.length; t++) {
        if (target[t] == MN_NO_TARGET) continue;
        const int64_t asked = pair_of(input + t * width);
        for (int64_t s = 0; s < 2 * P; s++) {
            const float *write = input + s * width;
            if (pair_of(write) != asked) continue;
            const int32_t label = label_of(write + 1 + 2 * P);
            if (label != target[t]) rival[t] = label;
        }
    }
}

const mn_generator mn_generator_collide = { .open = open_collide, .draw = draw_collide,
                                            .close = close_collide, .rival = rival_collide };
