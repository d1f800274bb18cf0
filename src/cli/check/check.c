/* check.c - mneme check FILE...: golden vectors on every target present. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/check/check.h"
#include "cli/check/program.h"
#include "cli/command.h"
#include "cli/options.h"
#include "kernels/dispatch.h"
#include "runtime/device.h"

static void print_help(void) {
    puts("usage: mneme check [options] FILE...\n\n"
         "Evaluates the operator inside each golden file (safetensors), or what layers make of\n"
         "several (gsa, hgrn2, window_attention ...), forward and backward, and compares every\n"
         "result and gradient with the file's own tolerance: rms <= tol and largest\n"
         "deviation <= 16 tol. In bf16, the judge is the reference in f64 on inputs\n"
         "rounded to bf16. Without a GPU, --target cuda says so and exits with status 77.\n\n"
         "  --target NAME   ref, avx2, avx512, neon, cuda, cuda:N (default: every target here)\n"
         "  --dtype NAME    f32; f64 on ref; bf16 on cuda (default: f64 on ref, f32 elsewhere)\n"
         "  --threads N     worker threads (default: one per core)\n"
         "  --quiet         only failures and the closing line");
}

void mn_check_report(mn_check *c, const char *name, const mn_golden_result *result) {
    const char *base = strrchr(c->path, '/') ? strrchr(c->path, '/') + 1 : c->path;
    if (result->passed) c->n_passed++;
    else c->n_failed++;
    if (!c->options->quiet || !result->passed) {
        printf("%s %s %s %s %s: rms %.2e max %.2e tol %.2e\n", result->passed ? "ok  " : "FAIL",
               c->target, c->dtype, base, name, result->rms, result->worst, result->tolerance);
    }
}

static mn_status report(void *context, const char *name) {
    mn_check *c = context;
    mn_golden_result result = { 0 };
    const mn_status st =
        c->want ? mn_golden_compare_bf16(&result, c->sample, c->want, c->moved, c->file, name)
                : mn_golden_compare(&result, c->sample, c->file, name);
    if (st == MN_OK) mn_check_report(c, name, &result);
    return st;
}

mn_status mn_check_tensors(mn_check *check, const char *key) {
    return mn_golden_each(check->file, key, report, check);
}

void mn_check_failed(mn_check *check) {
    printf("FAIL %s %s %s: %s\n", check->target, check->dtype, check->path, mn_last_error());
    check->n_failed++;
}

static mn_status evaluate(mn_check *c, mn_context *context, mn_sample *sample) {
    mn_status st = mn_op_run(context, sample->op, MN_FORWARD, sample->args);
    if (st == MN_OK) st = mn_check_tensors(c, "outputs");
    const char *grads = mn_safetensors_metadata(c->file, "grads");
    if (st == MN_OK && grads && *grads) {
        st = mn_op_run(context, sample->op, MN_BACKWARD, sample->args);
        if (st == MN_OK) st = mn_check_tensors(c, "grads");
    }
    if (st == MN_OK && !mn_sample_guards_intact(sample)) {
        st = mn_fail(MN_ERR_INTERNAL, "memory around a result was overwritten");
    }
    return st;
}

static void check_file(mn_check *c, mn_context *context, const char *path, mn_dtype dtype) {
    mn_safetensors *file = NULL;
    int64_t *cu = NULL;
    mn_sample *sample = calloc(1, sizeof *sample);
    mn_status st = sample ? mn_safetensors_open(&file, path) : mn_fail(MN_ERR_MEMORY, "no memory");
    c->path = path;
    c->file = file;
    c->sample = sample;
    if (st == MN_OK && mn_program_find(mn_safetensors_metadata(file, "op"))) {
        st = mn_check_program(c, file, context, NULL, dtype);
    } else {
        if (st == MN_OK) st = mn_golden_bind(sample, &cu, file, dtype);
        if (st == MN_OK) st = evaluate(c, context, sample);
    }
    if (st != MN_OK) mn_check_failed(c);
    if (sample) mn_sample_free(sample);
    free(sample);
    free(cu);
    mn_safetensors_close(file);
}

static mn_status check_target(mn_check *total, mn_target_id id, const char **files, int n_files) {
    const mn_check_options *o = total->options;
    const mn_context_options wanted = { .n_threads = o->n_threads, .target = mn_target_name(id) };
    mn_context *context = NULL;
    mn_dtype dtype = id == MN_TARGET_REF ? MN_F64 : MN_F32;
    if (o->dtype && !mn_dtype_parse(&dtype, o->dtype)) {
        return mn_fail(MN_ERR_ARGUMENT, "no type is called \"%s\"; there are f32 and f64",
                       o->dtype);
    }
    if (dtype == MN_BF16 || (dtype == MN_F64 && id != MN_TARGET_REF)) {
        return mn_fail(MN_ERR_UNSUPPORTED, "target %s has no %s; f64 is ref's, bf16 is for GPUs",
                       mn_target_name(id), mn_dtype_name(dtype));
    }
    mn_status st = mn_context_create(&context, &wanted);
    total->target = mn_target_name(id);
    total->dtype = mn_dtype_name(dtype);
    for (int i = 0; st == MN_OK && i < n_files; i++) check_file(total, context, files[i], dtype);
    mn_context_destroy(context);
    return st;
}

static bool wants_device(const mn_check_options *o) {
    return o->target && strncmp(o->target, "cuda", 4) == 0;
}

/* The target asked for, or every one of this machine; a GPU counts where one can be seen and the
 * type is not of the CPU. */
static mn_status check_targets(mn_check *total, const char **files, int n_files) {
    const mn_check_options *o = total->options;
    if (wants_device(o)) return mn_check_device(total, o->target, files, n_files);
    mn_status st = MN_OK;
    mn_target_id chosen = MN_TARGET_COUNT;
    if (o->target) st = mn_target_choose(&chosen, o->target);
    for (int id = 0; id < MN_TARGET_COUNT && st == MN_OK; id++) {
        const bool wanted = o->target ? (int)chosen == id : mn_target_available((mn_target_id)id);
        if (wanted) st = check_target(total, (mn_target_id)id, files, n_files);
    }
    int n_devices = 0;
    const bool everywhere = st == MN_OK && !o->target && !o->dtype;
    if (everywhere && mn_device_count(&n_devices) == MN_OK && n_devices > 0) {
        st = mn_check_device(total, "cuda", files, n_files);
    }
    return st;
}

/* Which operators had no kernel where they were asked for. */
static void print_skipped(const mn_check *total) {
    if (total->n_skipped == 0) return;
    printf("skipped %lld files whose operators have no CUDA kernels yet:",
           (long long)total->n_skipped);
    for (int op = 0; op < MN_OP_COUNT; op++) {
        if (total->skipped[op]) printf(" %s", mn_op_describe((mn_op_id)op)->name);
    }
    putchar('\n');
}

static int parse(mn_check_options *o, const char **files, int *n_files, int argc, char **argv) {
    const mn_option rows[] = {
        { "--target", .text = &o->target },
        { "--dtype", .text = &o->dtype },
        { "--threads", .count = &o->n_threads, .low = 1, .high = 256 },
        { "--quiet", .flag = &o->quiet },
        { NULL, .list = files, .n = n_files, .most = argc },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "check", argc, argv);
    if (status != 0 || *n_files > 0) return status;
    return mn_options_mistake("check", "", "name at least one golden file");
}

static int check(const mn_check_options *o, const char **files, int n_files) {
    mn_check total = { .options = o };
    const mn_status st = check_targets(&total, files, n_files);
    if (st != MN_OK) fprintf(stderr, "mneme check: %s\n", mn_last_error());
    if (st == MN_ERR_UNSUPPORTED && wants_device(o)) return MN_CHECK_SKIPPED;
    if (st != MN_OK) return 2;
    print_skipped(&total);
    printf("%lld passed, %lld failed\n", (long long)total.n_passed, (long long)total.n_failed);
    return total.n_failed == 0 ? 0 : 1;
}

int mn_command_check(int argc, char **argv) {
    mn_check_options o = { 0 };
    int n_files = 0;
    const char **files = calloc((size_t)argc, sizeof *files);
    if (!files) return 2;
    int status = parse(&o, files, &n_files, argc, argv);
    if (status == 0) status = check(&o, files, n_files);
    else if (status < 0) print_help();
    free(files);
    return status < 0 ? 0 : status;
}
