/* check.h - one run of mneme check, on the processor's targets and on a GPU. */
#ifndef MN_CLI_CHECK_CHECK_H
#define MN_CLI_CHECK_CHECK_H

#include "cli/check/golden.h"
#include "ops/run.h"

typedef struct mn_check_options {
    const char *target;    // NULL: all present
    const char *dtype;     // NULL: f64 on ref, f32 elsewhere
    bool quiet;
    int n_threads;
} mn_check_options;

/* One target with its counts; the file under test while there is one. */
typedef struct mn_check {
    const mn_check_options *options;
    const mn_safetensors *file;
    const mn_sample *sample;
    const mn_sample *want;    // bf16: the float64 reference; else NULL, the file is
    const mn_sample *moved;   // that with nudged inputs where it counts, else NULL
    const char *path, *target, *dtype;
    int64_t n_passed, n_failed, n_skipped;
    bool skipped[MN_OP_COUNT];    // operators that the target has no kernel for
} mn_check;

/* The exit status of a check that could not be made, as test drivers understand it. */
enum { MN_CHECK_SKIPPED = 77 };

/* Compares every tensor of the file's metadata `key` and prints a line for each. */
mn_status mn_check_tensors(mn_check *check, const char *key);

/* Counts a comparison and prints its line. */
void mn_check_report(mn_check *check, const char *name, const mn_golden_result *result);

/* Prints why a file could not be evaluated, which counts as one failure. */
void mn_check_failed(mn_check *check);

/* ---- program.c ---- */

/* Evaluates and compares a file whose "op" mn_program_find knows. `reference`: for bf16. */
mn_status mn_check_program(mn_check *check, const mn_safetensors *file, mn_context *context,
                           mn_context *reference, mn_dtype dtype);

/* ---- device.c ---- */

/* All files on the GPU called `name` ("cuda", "cuda:N"). Operators without a kernel are skipped and
 * counted. MN_ERR_UNSUPPORTED where there is no GPU. */
mn_status mn_check_device(mn_check *check, const char *name, const char **files, int n_files);

#endif
