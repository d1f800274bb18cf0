/* check.c - a wrong answer is not measured: each case first runs in small and is compared
 * with the reference in double precision. */
#include <math.h>
#include <stdlib.h>

#include "base/status.h"
#include "cli/bench/bench.h"
#include "ops/run.h"
#include "ops/sample_device.h"

/* Ten times what the float kernels show at these sizes; the golden vectors and the tests of the
 * kernels hold them to far less. In bf16, twice what rounding a result costs (see golden.h). */
static double tolerance_of(mn_dtype dtype) {
    return dtype == MN_BF16 ? 2.0 / 256.0 / sqrt(3.0) : 1e-4;
}

/* The same numbers, float to double. */
static void copy_inputs(mn_sample *to, const mn_sample *from) {
    for (int i = 0; i < from->n_tensors; i++) {
        const mn_sample_tensor *source = &from->tensors[i];
        const bool input = source->field->role <= MN_ROLE_RAW;
        const void *data = input ? source->data : source->partner;
        void *target = input ? to->tensors[i].data : to->tensors[i].partner;
        for (int64_t at = 0; data && target && at < source->count; at++) {
            mn_sample_set(to, target, at, mn_sample_get(from, data, at));
        }
    }
}

/* Elements of the tensor that lies at `data`: a result in place has the memory of an input. */
static int64_t count_at(const mn_sample *sample, const void *data) {
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *tensor = &sample->tensors[i];
        if (tensor->data == data || tensor->partner == data) return tensor->count;
    }
    return 0;
}

/* `moved`: the reference with nudged inputs where its deviation counts, else NULL. */
static mn_status compare(const char *what, const char *name, const mn_sample *got, const void *data,
                         const mn_sample *want, const void *reference, const void *moved,
                         mn_dtype dtype) {
    double tolerance = tolerance_of(dtype), error = 0.0, norm = 0.0, deviation = 0.0;
    const int64_t count = count_at(want, reference);
    for (int64_t at = 0; moved && at < count; at++) {
        const double x = mn_sample_get(want, reference, at), d = mn_sample_get(want, moved, at) - x;
        deviation += d * d;
        norm += x * x;
    }
    if (norm > 0.0) tolerance = fmax(tolerance, 2.0 * sqrt(deviation / norm));
    norm = 0.0;
    for (int64_t at = 0; at < count; at++) {
        const double x = mn_sample_get(want, reference, at);
        const double d = mn_sample_get(got, data, at) - x;
        error += d * d;
        norm += x * x;
    }
    if (count > 0 && error <= tolerance * tolerance * norm) return MN_OK;
    return mn_fail(MN_ERR_NUMERIC, "%s%s is off the reference by %.1e rms", what, name,
                   sqrt(error / norm));
}

/* Every result, wherever it lies, and after TRAIN every gradient. */
static mn_status compare_all(const mn_bench_case *which, const mn_sample *got,
                             const mn_sample *want, const mn_sample *moved, mn_dtype dtype) {
    mn_status st = MN_OK;
    for (int i = 0; i < want->n_tensors && st == MN_OK; i++) {
        const mn_sample_tensor *tensor = &want->tensors[i];
        const mn_field *field = tensor->field;
        if (field->role >= MN_ROLE_OUT) {
            const void *result = ((const mn_out *)(got->args + field->offset))->data;
            const void *reference = ((const mn_out *)(want->args + field->offset))->data;
            const void *off = moved ? moved->tensors[i].data : NULL;
            if (result) st = compare("", field->name, got, result, want, reference, off, dtype);
        } else if (which->pass == MN_BENCH_TRAIN && tensor->partner) {
            const void *gradient = got->tensors[i].partner;
            st = compare("gradient of ", field->name, got, gradient, want, tensor->partner,
                         moved ? moved->tensors[i].partner : NULL, dtype);
        }
    }
    return st;
}

static mn_status run(const mn_bench_case *which, mn_context *context, const mn_sample *sample) {
    mn_status st = mn_op_run(context, sample->op, MN_FORWARD, sample->args);
    if (st == MN_OK && which->pass == MN_BENCH_TRAIN) {
        st = mn_op_run(context, sample->op, MN_BACKWARD, sample->args);
    }
    return st;
}

/* The same on the context's device; results and gradients come back into `sample`. */
static mn_status run_device(const mn_bench_case *which, mn_context *context, mn_sample *sample,
                           mn_dtype dtype) {
    mn_device_sample *there = NULL;
    mn_status st = mn_device_sample_create(&there, context, sample, dtype);
    const void *args = st == MN_OK ? mn_device_sample_args(there) : NULL;
    if (st == MN_OK) st = mn_op_run(context, sample->op, MN_FORWARD, args);
    if (st == MN_OK && which->pass == MN_BENCH_TRAIN) {
        st = mn_op_run(context, sample->op, MN_BACKWARD, args);
    }
    if (st == MN_OK) st = mn_device_sample_fetch(there, sample);
    mn_device_sample_free(there);
    return st;
}

/* The reference with inputs off by `size` of themselves, up or down. */
static mn_status run_nudged(const mn_bench_case *which, mn_context *reference, mn_sample *moved,
                            const mn_sample *want, double size) {
    mn_status st = mn_bench_open(moved, which, MN_BENCH_CHECK, MN_F64, false);
    if (st != MN_OK) return st;
    mn_sample_nudge(moved, want, size, 1);
    return run(which, reference, moved);
}

/* A sum that all but cancels, as the gradient of a head's decay over all tokens does, is moved by
 * the rounding of its inputs to bf16 by more than a result's rounding costs. In bf16 what is off
 * by too much is therefore held to twice what such a step of the inputs does, the rule of
 * tests/kernels/test_cuda.c. */
mn_status mn_bench_check(const mn_bench_case *which, mn_context *context, mn_context *reference,
                         mn_dtype dtype) {
    mn_sample *got = calloc(3, sizeof *got), *want = got + 1, *moved = got + 2;
    const bool nudged = dtype == MN_BF16 && mn_op_rounds_between(which->op);
    if (!got) return mn_fail(MN_ERR_MEMORY, "no memory for a check");
    mn_status st = mn_bench_open(got, which, MN_BENCH_CHECK, MN_F32, false);
    if (st == MN_OK) st = mn_bench_open(want, which, MN_BENCH_CHECK, MN_F64, false);
    if (st == MN_OK) {
        mn_sample_draw(got, 1);
        mn_sample_round(got, dtype);
        copy_inputs(want, got);
        st = context->device ? run_device(which, context, got, dtype) : run(which, context, got);
    }
    if (st == MN_OK) st = run(which, reference, want);
    if (st == MN_OK && nudged) st = run_nudged(which, reference, moved, want, 1.0 / 256.0);
    if (st == MN_OK) st = compare_all(which, got, want, nudged ? moved : NULL, dtype);
    if (st == MN_ERR_NUMERIC && dtype == MN_BF16 && !nudged) {
        st = run_nudged(which, reference, moved, want, 1.0 / 512.0);
        if (st == MN_OK) st = compare_all(which, got, want, moved, dtype);
    }
    if (st == MN_OK && !mn_sample_guards_intact(got)) {
        st = mn_fail(MN_ERR_INTERNAL, "%s: memory around a tensor was overwritten", which->name);
    }
    mn_sample_free(got);
    mn_sample_free(want);
    mn_sample_free(moved);
    free(got);
    return st;
}
