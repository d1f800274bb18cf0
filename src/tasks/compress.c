/* compress.c - the whole input, to be said from the state behind its last token.
 *
 *   length - 1 tokens uniform over [0, vocab - 1), then token vocab - 1
 *   target = input, everywhere */
#include "tasks/task_internal.h"

static mn_status open_compress(mn_task *task) {
    const mn_task_values *v = &task->values;
    task->shape = (mn_task_shape){ .vocab = v->vocab, .classes = v->vocab, .length = v->length };
    return MN_OK;
}

static mn_status draw_compress(mn_task *task, mn_sample_row *row) {
    const int64_t last = task->shape.length - 1, plain = task->values.vocab - 1;
    for (int64_t t = 0; t < last; t++) {
        row->input[t] = row->target[t] = (int32_t)mn_draw_below(&row->draws, plain);
    }
    row->input[last] = row->target[last] = (int32_t)plain;
    return MN_OK;
}

const mn_generator mn_generator_compress = { .open = open_compress, .draw = draw_compress };
