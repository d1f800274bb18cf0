/* task_fill.c - batches of samples: fresh ones, or a set gone through in a new order each epoch. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/util.h"
#include "data/shuffle.h"
#include "tasks/task_internal.h"

/* Examples of an epoch; 0: without end. */
static int64_t set_size(const mn_task *task, const mn_task_feed *feed) {
    const int64_t all = mn_task_examples(task, feed->split);
    if (feed->examples == 0 || all == 0) return feed->examples + all;
    return mn_min(feed->examples, all);
}

int64_t mn_task_epoch(const mn_task *task, const mn_task_feed *feed) {
    return mn_ceil_div(set_size(task, feed), feed->rows);
}

mn_status mn_task_batch_create(mn_token_batch *out, const mn_task *task, int64_t rows) {
    const int64_t length = task->shape.length;
    size_t places = 0, bytes = 0, starts = 0;
    *out = (mn_token_batch){ .rows = rows, .length = length };
    if (rows < 1) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: a batch of %" PRId64 " rows", task->info.name, rows);
    }
    const bool fits = mn_mul_size(&places, (size_t)rows, (size_t)length) &&
                      mn_mul_size(&bytes, places, sizeof *out->tokens) &&
                      mn_mul_size(&starts, (size_t)rows + 1, sizeof *out->starts);
    out->tokens = fits ? calloc(places, sizeof *out->tokens) : NULL;
    out->targets = fits ? malloc(bytes) : NULL;
    out->starts = fits ? malloc(starts) : NULL;
    if (out->tokens && out->targets && out->starts) {
        for (int64_t r = 0; r <= rows; r++) out->starts[r] = r * length;
        out->n_sequences = rows;
        return MN_OK;
    }
    mn_token_batch_free(out);
    return mn_fail(MN_ERR_MEMORY, "%s: no memory for a batch of %" PRId64 " rows of %" PRId64
                   " tokens", task->info.name, rows, length);
}

/* What a step shows of a set. */
typedef struct step_order {
    int64_t first, examples;     // place of its first row; 0: samples without end
    bool shuffles;
    mn_shuffle shuffle;
} step_order;

static step_order order_of(const mn_task *task, const mn_task_feed *feed, int64_t step) {
    step_order o = { .first = step * feed->rows, .examples = set_size(task, feed) };
    if (o.examples == 0) return o;
    const int64_t epoch = mn_task_epoch(task, feed);
    o.first = step % epoch * feed->rows;
    o.shuffles = !feed->in_order;
    if (!o.shuffles) return o;
    const mn_draws order = mn_draws_make(feed->seed, MN_DRAW_ORDER, feed->split, 0);
    o.shuffle = mn_shuffle_make(o.examples, order.key + 1, (uint64_t)(step / epoch));
    return o;
}

/* Which sample a row of the step shows; -1: none, the epoch is over. */
static int64_t index_of(const step_order *order, int64_t row) {
    const int64_t place = order->first + row;
    if (order->examples > 0 && place >= order->examples) return -1;
    return order->shuffles ? mn_shuffle_at(&order->shuffle, place) : place;
}

static mn_status check_feed(const mn_task *task, const mn_token_batch *batch, const float *features,
                            const mn_task_feed *feed, int64_t step) {
    const char *name = task->info.name;
    int64_t last;
    if (feed->rows < 1 || feed->rows != batch->rows || batch->length != task->shape.length) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the batch has %" PRId64 " rows of %" PRId64
                       " tokens, %" PRId64 " of %" PRId64 " are to be filled", name, batch->rows,
                       batch->length, feed->rows, task->shape.length);
    }
    if (feed->examples < 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: a set of %" PRId64 " examples", name, feed->examples);
    }
    if (step < 0 || !mn_mul_i64(&last, step, feed->rows) || last > INT64_MAX - feed->rows) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: there is no step %" PRId64, name, step);
    }
    if (task->shape.features > 0 && !features) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: its inputs are numbers and need room to go to", name);
    }
    return MN_OK;
}

mn_status mn_task_fill(mn_token_batch *batch, float *features, mn_task *task,
                       const mn_task_feed *feed, int64_t step) {
    const int64_t T = task->shape.length, width = task->shape.features;
    mn_status st = check_feed(task, batch, features, feed, step);
    if (st != MN_OK) return st;
    const step_order order = order_of(task, feed, step);
    for (int64_t r = 0; r < feed->rows && st == MN_OK; r++) {
        const int64_t index = index_of(&order, r);
        int32_t *input = batch->tokens + r * T, *target = batch->targets + r * T;
        if (index < 0) {
            memset(input, 0, (size_t)T * sizeof *input);
            for (int64_t t = 0; t < T; t++) target[t] = MN_NO_TARGET;
            if (width > 0) memset(features + r * T * width, 0, (size_t)(T * width) * sizeof(float));
        } else if (width > 0) {
            st = mn_task_vectors(task, feed->seed, feed->split, index, features + r * T * width,
                                 target);
        } else {
            st = mn_task_sample(task, feed->seed, feed->split, index, input, target);
        }
    }
    return st;
}
