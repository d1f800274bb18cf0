/* device.c - golden vectors on a GPU.
 *
 * f32: the sample of the file goes to the device, and what comes back is held to the file as on the
 * CPU. bf16: inputs are rounded to bf16 first, the reference evaluates them in float64, and what
 * the device made of them is held to that (golden.h derives the tolerance). */
#include <stdlib.h>

#include "base/dtype.h"
#include "base/status.h"
#include "cli/check/check.h"
#include "cli/check/program.h"
#include "ops/sample_device.h"

/* The contexts of a check. */
typedef struct judge {
    mn_context *device, *reference;
    mn_dtype dtype;
} judge;

/* A file's sample as the device sees it, and for bf16 as the reference does. */
typedef struct trial {
    mn_sample got, want, moved;
    int64_t *got_cu, *want_cu, *moved_cu;
    mn_device_sample *there;
} trial;

static bool has_grads(const mn_safetensors *file) {
    const char *grads = mn_safetensors_metadata(file, "grads");
    return grads && *grads;
}

/* The reference's results and gradients for the rounded inputs. */
static mn_status evaluate_reference(const judge *j, trial *t, const mn_safetensors *file) {
    mn_status st = mn_golden_bind(&t->want, &t->want_cu, file, MN_F64);
    if (st != MN_OK) return st;
    mn_sample_round(&t->want, j->dtype);
    st = mn_op_run(j->reference, t->want.op, MN_FORWARD, t->want.args);
    if (st == MN_OK && has_grads(file)) {
        st = mn_op_run(j->reference, t->want.op, MN_BACKWARD, t->want.args);
    }
    return st;
}

/* The reference once more, with inputs that are off by one rounding. */
static mn_status evaluate_moved(const judge *j, trial *t, const mn_safetensors *file) {
    mn_status st = mn_golden_bind(&t->moved, &t->moved_cu, file, MN_F64);
    if (st != MN_OK) return st;
    mn_sample_nudge(&t->moved, &t->want, 1.0 / 256.0, 1);
    st = mn_op_run(j->reference, t->moved.op, MN_FORWARD, t->moved.args);
    if (st != MN_OK || !has_grads(file)) return st;
    return mn_op_run(j->reference, t->moved.op, MN_BACKWARD, t->moved.args);
}

static mn_status evaluate_device(const judge *j, trial *t, const mn_safetensors *file) {
    mn_status st = mn_device_sample_create(&t->there, j->device, &t->got, j->dtype);
    const void *args = st == MN_OK ? mn_device_sample_args(t->there) : NULL;
    if (st == MN_OK) st = mn_op_run(j->device, t->got.op, MN_FORWARD, args);
    if (st == MN_OK && has_grads(file)) st = mn_op_run(j->device, t->got.op, MN_BACKWARD, args);
    return st == MN_OK ? mn_device_sample_fetch(t->there, &t->got) : st;
}

static mn_status evaluate(mn_check *c, const judge *j, trial *t, const mn_safetensors *file) {
    const bool bf16 = j->dtype == MN_BF16;
    mn_status st = mn_golden_bind(&t->got, &t->got_cu, file, bf16 ? MN_F64 : MN_F32);
    if (st != MN_OK) return st;
    const mn_op_id op = t->got.op;
    if (!mn_op_has_cuda(op, MN_FORWARD) || (has_grads(file) && !mn_op_has_cuda(op, MN_BACKWARD))) {
        c->skipped[op] = true;
        c->n_skipped++;
        return MN_OK;
    }
    const bool nudged = bf16 && mn_op_rounds_between(op);
    if (bf16) st = evaluate_reference(j, t, file);
    if (st == MN_OK && nudged) st = evaluate_moved(j, t, file);
    if (st == MN_OK) st = evaluate_device(j, t, file);
    c->sample = &t->got;
    c->want = bf16 ? &t->want : NULL;
    c->moved = nudged ? &t->moved : NULL;
    if (st == MN_OK) st = mn_check_tensors(c, "outputs");
    if (st == MN_OK) st = mn_check_tensors(c, "grads");
    return st;
}

static void check_file(mn_check *c, const judge *j, const char *path) {
    mn_safetensors *file = NULL;
    trial *t = calloc(1, sizeof *t);
    mn_status st = t ? mn_safetensors_open(&file, path) : mn_fail(MN_ERR_MEMORY, "no memory");
    c->path = path;
    c->file = file;
    if (st == MN_OK && mn_program_find(mn_safetensors_metadata(file, "op"))) {
        st = mn_check_program(c, file, j->device, j->reference, j->dtype);
    } else if (st == MN_OK) {
        st = evaluate(c, j, t, file);
    }
    if (st != MN_OK) mn_check_failed(c);
    c->sample = c->want = c->moved = NULL;
    if (t) {
        mn_device_sample_free(t->there);
        mn_sample_free(&t->got);
        mn_sample_free(&t->want);
        mn_sample_free(&t->moved);
        free(t->got_cu);
        free(t->want_cu);
        free(t->moved_cu);
    }
    free(t);
    mn_safetensors_close(file);
}

mn_status mn_check_device(mn_check *check, const char *name, const char **files, int n_files) {
    const mn_check_options *o = check->options;
    const mn_context_options wanted = { .n_threads = 1, .device = name };
    const mn_context_options reference = { .n_threads = o->n_threads, .target = "ref" };
    judge j = { .dtype = MN_F32 };
    if (o->dtype && (!mn_dtype_parse(&j.dtype, o->dtype) || j.dtype == MN_F64)) {
        return mn_fail(MN_ERR_ARGUMENT, "cuda has no type \"%s\"; there are f32 and bf16",
                       o->dtype);
    }
    mn_status st = mn_context_create(&j.device, &wanted);
    if (st == MN_OK) st = mn_context_create(&j.reference, &reference);
    check->target = "cuda";
    check->dtype = mn_dtype_name(j.dtype);
    for (int i = 0; i < n_files && st == MN_OK; i++) check_file(check, &j, files[i]);
    mn_context_destroy(j.reference);
    mn_context_destroy(j.device);
    return st;
}
