/* golden.h - a golden file as a sample of its operator, and the comparison. */
#ifndef MN_CLI_CHECK_GOLDEN_H
#define MN_CLI_CHECK_GOLDEN_H

#include "io/safetensors.h"
#include "ops/sample.h"

/* Binds the tensors and parameters of an open golden file to a sample of `dtype`. `cu` receives the
 * packing offsets, allocated, or NULL; free it after the sample. */
mn_status mn_golden_bind(mn_sample *sample, int64_t **cu, const mn_safetensors *file,
                         mn_dtype dtype);

/* How one result compares: rms and largest deviation relative to the reference, and what is
 * allowed. */
typedef struct mn_golden_result {
    double rms, worst, tolerance;
    bool passed;
} mn_golden_result;

/* Compares the tensor `name` of the file with what the sample holds. */
mn_status mn_golden_compare(mn_golden_result *result, const mn_sample *sample,
                            const mn_safetensors *file, const char *name);

/* Compares the tensor `name` that `got` holds after a bf16 call with `want`, the same call in
 * float64 on inputs rounded to bf16: what is left is the kernel's own error. Rounding a result to
 * bf16 (8 significant bits) is off by up to u = 2^-8 of the number and by u / sqrt(3) at most in
 * the mean square; a formula in float64 whose results are stored in bf16 has that error and no
 * other. Kernels may have twice of it, for what they round on the way: rms <= 2 u / sqrt(3) of the
 * tensor's rms, and each number within 2 u of its scale, the largest of its row (last axis) or the
 * tensor's rms, whichever is more, or within u of that and what is to be expected of the largest of
 * n normal errors of the rms that was measured, sqrt(2 ln n) of it (tests/golden/README.md).
 * `moved`, else NULL: `want` with nudged inputs, of an operator that rounds between its parts
 * (mn_op_rounds_between); it may be off by twice as much as that. */
mn_status mn_golden_compare_bf16(mn_golden_result *result, const mn_sample *got,
                                 const mn_sample *want, const mn_sample *moved,
                                 const mn_safetensors *file, const char *name);

/* Numbers computed for a tensor of a file; for bf16 with those of the float64 reference and of that
 * with nudged inputs, else NULL. */
typedef struct mn_golden_numbers {
    const double *got, *want, *moved;
    int64_t count;
} mn_golden_numbers;

/* Compares them by the same rules: with the file, or with `want` where that is given. */
mn_status mn_golden_compare_numbers(mn_golden_result *result, const mn_golden_numbers *numbers,
                                    const mn_safetensors *file, const char *name, bool f64);

/* Calls `use(context, name)` for each name of the comma-separated metadata `key`; stops at a
 * failure. */
mn_status mn_golden_each(const mn_safetensors *file, const char *key,
                         mn_status (*use)(void *context, const char *name), void *context);

#endif
