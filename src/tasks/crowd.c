/* crowd.c - random keys, more of them than the address of a memory has dimensions.
 *
 *   n writes      n one of `writes`; keys normal, scaled to norm 1; labels uniform with repetition
 *   `queries`     different keys among those written; target: the label
 *
 * A token is [asks, key, value]: 0, the key and its label one-hot for a write; 1, the key and
 * zeros
 * for a question. n is the same for `batch` neighbouring samples, so that batches have one
 * length. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tasks/task_internal.h"

typedef struct crowd {
    int64_t writes[MN_TASK_LIST];
    int n_writes;
    mn_deck *order;       // one for each of `writes`
    int32_t *label;       // of each key written
} crowd;

static void close_crowd(mn_task *task) {
    crowd *c = task->own;
    for (int i = 0; c->order && i < c->n_writes; i++) mn_deck_free(&c->order[i]);
    free(c->order);
    free(c->label);
}

static mn_status open_crowd(mn_task *task) {
    const mn_task_values *v = &task->values;
    mn_status st = mn_task_own(task, sizeof(crowd));
    if (st != MN_OK) return st;
    crowd *c = task->own;
    st = mn_task_list(c->writes, &c->n_writes, task, "writes", v->writes, 1, 1 << 20);
    if (st != MN_OK) return st;
    int64_t most = 0, least = c->writes[0];
    st = mn_task_memory(&c->order, task, c->n_writes, sizeof *c->order);
    for (int i = 0; st == MN_OK && i < c->n_writes; i++) {
        most = c->writes[i] > most ? c->writes[i] : most;
        least = c->writes[i] < least ? c->writes[i] : least;
        st = mn_deck_create(&c->order[i], c->writes[i]);
    }
    if (st == MN_OK) {
        st = mn_task_require(task, v->queries <= least, "queries",
                             "no more keys can be asked for than the least of writes");
    }
    if (st == MN_OK) st = mn_task_memory(&c->label, task, most, sizeof *c->label);
    task->shape = (mn_task_shape){ .classes = v->labels, .features = 1 + v->key_width + v->labels,
                                   .length = most + v->queries };
    return st;
}

/* Two normal numbers from a point in the unit disc (Marsaglia and Bray, 1964), whose coordinates
 * are the halves of one draw: no sine or cosine, and half the logarithms. */
static void draw_pair(double out[2], mn_draws *d) {
    double x, y, square;
    do {
        const uint64_t bits = mn_draw_bits(d);
        x = ((double)(uint32_t)bits + 0.5) * 0x1p-31 - 1.0;
        y = ((double)(uint32_t)(bits >> 32) + 0.5) * 0x1p-31 - 1.0;
        square = x * x + y * y;
    } while (square >= 1.0);
    const double scale = sqrt(-2.0 * log(square) / square);
    out[0] = scale * x;
    out[1] = scale * y;
}

static void draw_key(float *key, int64_t width, mn_draws *d) {
    double square = 0.0;
    for (int64_t i = 0; i < width; i += 2) {
        double pair[2];
        draw_pair(pair, d);
        key[i] = (float)pair[0];
        square += pair[0] * pair[0];
        if (i + 1 == width) break;
        key[i + 1] = (float)pair[1];
        square += pair[1] * pair[1];
    }
    const float scale = (float)(1.0 / sqrt(square));
    for (int64_t i = 0; i < width; i++) key[i] *= scale;
}

static mn_status draw_crowd(mn_task *task, mn_sample_row *row) {
    crowd *c = task->own;
    const mn_task_values *v = &task->values;
    const int64_t width = task->shape.features;
    mn_draws together = mn_draws_make(row->seed, MN_DRAW_NEIGHBOURS, row->split,
                                      row->index / v->batch);
    const int64_t which = mn_draw_below(&together, c->n_writes), n = c->writes[which];
    for (int64_t t = 0; t < n; t++) {
        float *token = row->features + t * width;
        draw_key(token + 1, v->key_width, &row->draws);
        c->label[t] = (int32_t)mn_draw_below(&row->draws, v->labels);
        token[1 + v->key_width + c->label[t]] = 1.0f;
    }
    for (int64_t t = n; t < n + v->queries; t++) {
        const int32_t written = mn_deck_draw(&c->order[which], &row->draws);
        float *token = row->features + t * width;
        token[0] = 1.0f;
        memcpy(token + 1, row->features + written * width + 1,
               (size_t)v->key_width * sizeof *token);
        row->target[t] = c->label[written];
    }
    mn_deck_restore(&c->order[which]);
    task->used = n + v->queries;
    return MN_OK;
}

const mn_generator mn_generator_crowd = { .open = open_crowd, .draw = draw_crowd,
                                          .close = close_crowd };
