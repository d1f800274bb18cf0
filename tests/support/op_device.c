/* op_device.c - an operator's call on a GPU (op_device.h). */
#include "support/op_device.h"

#include <stdio.h>

#include "ops/run.h"
#include "ops/sample_device.h"
#include "support/check.h"
#include "support/op_walk.h"

int op_visit_device(mn_context **gpu, const char *title, void (*test)(mn_op_id op), int argc,
                  char **argv) {
    const mn_context_options options = { .n_threads = 1, .device = "cuda" };
    if (mn_context_create(gpu, &options) != MN_OK) printf("skipped: %s\n", mn_last_error());
    const int failed = op_visit(title, test, argc, argv);
    mn_context_destroy(*gpu);
    return failed;
}

static void run_device(mn_context *gpu, mn_sample *got, const op_case *c, mn_dtype dtype,
                      bool back) {
    mn_device_sample *there = NULL;
    mn_status st = mn_device_sample_create(&there, gpu, got, dtype);
    if (st == MN_OK) st = mn_op_run(gpu, c->op, MN_FORWARD, mn_device_sample_args(there));
    if (st == MN_OK && back && mn_op_has_cuda(c->op, MN_BACKWARD)) {
        st = mn_op_run(gpu, c->op, MN_BACKWARD, mn_device_sample_args(there));
    }
    if (st == MN_OK) st = mn_device_sample_fetch(there, got);
    mn_device_sample_free(there);
    if (st != MN_OK) check_fatal("%s: %s", op_case_text(c), mn_last_error());
}

void op_run_device(mn_context *gpu, mn_sample *got, const op_case *c, mn_dtype dtype) {
    run_device(gpu, got, c, dtype, true);
}

void op_step_device(mn_context *gpu, mn_sample *got, const op_case *c, mn_dtype dtype) {
    run_device(gpu, got, c, dtype, false);
}

bool op_is_refused(mn_context *gpu, op_case c) {
    mn_sample sample;
    mn_device_sample *there = NULL;
    c.dtype = MN_F32, c.T = 1, c.K = c.V = 8, c.B = c.H = 2, c.seed = 1;
    op_open(&sample, &c);
    mn_status st = mn_device_sample_create(&there, gpu, &sample, MN_F32);
    if (st == MN_OK) st = mn_op_run(gpu, c.op, MN_FORWARD, mn_device_sample_args(there));
    mn_device_sample_free(there);
    mn_sample_free(&sample);
    if (st == MN_ERR_UNSUPPORTED) printf("# left out: %s\n", mn_last_error());
    return st == MN_ERR_UNSUPPORTED;
}
