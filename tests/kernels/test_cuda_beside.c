/* test_cuda_beside.c - calls on two streams of a GPU at once come to an end, and give the bits of
 * calls alone: blocks that wait for others may not do so while a block of the other stream has the
 * processor that those need. Skipped without a GPU.
 *
 * test_cuda_beside [OPERATOR] */
#include <stdio.h>
#include <unistd.h>

#include "base/util.h"
#include "ops/run.h"
#include "ops/sample_device.h"
#include "support/check.h"
#include "support/op_bits.h"
#include "support/op_device.h"
#include "support/op_walk.h"

enum { STREAMS = 2, ROUNDS = 40, MOST_SECONDS = 60 };    // an operator takes a few

static mn_context *gpu[STREAMS];    // the first is NULL: none here

/* Few blocks, of which all must be there at once, and more than a GPU has room for. */
static const struct {
    int64_t B, T, H, K, V;
} sizes[] = { { 1, 128, 16, 64, 64 }, { 1, 130, 16, 128, 128 }, { 5, 100, 16, 64, 64 } };

typedef struct job {
    mn_sample sample, alone;
    mn_device_sample *there;
} job;

static void must(mn_status st, const op_case *c) {
    if (st != MN_OK) check_fatal("%s: %s", op_case_text(c), mn_last_error());
}

/* Forward, and backward where there are kernels for it; nothing waits. */
static void put(mn_context *context, const job *j, const op_case *c) {
    const void *args = mn_device_sample_args(j->there);
    must(mn_op_run(context, c->op, MN_FORWARD, args), c);
    if (mn_op_has_cuda(c->op, MN_BACKWARD)) must(mn_op_run(context, c->op, MN_BACKWARD, args), c);
}

static void check_case(op_case c) {
    job jobs[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        c.seed = (uint64_t)i + 1;
        op_open(&jobs[i].sample, &c);
        op_open(&jobs[i].alone, &c);
        must(mn_device_sample_create(&jobs[i].there, gpu[i], &jobs[i].sample, MN_BF16), &c);
        put(gpu[i], &jobs[i], &c);
        must(mn_device_sample_fetch(jobs[i].there, &jobs[i].alone), &c);
    }
    for (int i = 0; i < STREAMS * ROUNDS; i++) put(gpu[i % STREAMS], &jobs[i % STREAMS], &c);
    for (int i = 0; i < STREAMS; i++) {
        must(mn_device_sample_fetch(jobs[i].there, &jobs[i].sample), &c);
        op_check_same("beside another and alone", "cuda bf16", &jobs[i].sample, &jobs[i].alone,
                      op_bits_everything, &c);
        mn_device_sample_free(jobs[i].there);
        mn_sample_free(&jobs[i].sample);
        mn_sample_free(&jobs[i].alone);
    }
}

static void streams_end(mn_op_id op) {
    op_case forms[OP_MAX_FORMS];
    if (!gpu[0]) {
        skip();
        return;
    }
    if (!mn_op_has_cuda(op, MN_FORWARD) || !op_has_time(op)) return;
    op_forms(op, forms);
    if (op_is_refused(gpu[0], forms[0])) return;
    alarm(MOST_SECONDS);    // ends this program
    for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
        op_case c = forms[0];
        c.dtype = MN_F32;
        c.B = sizes[i].B, c.T = sizes[i].T, c.H = sizes[i].H, c.K = sizes[i].K, c.V = sizes[i].V;
        check_case(c);
    }
    alarm(0);
}

int main(int argc, char **argv) {
    const mn_context_options options = { .n_threads = 1, .device = "cuda" };
    if (mn_context_create(&gpu[1], &options) != MN_OK) gpu[1] = NULL;    // told of below
    const int failed = op_visit_device(&gpu[0], "streams beside each other end", streams_end, argc,
                                     argv);
    mn_context_destroy(gpu[1]);
    return failed;
}
