/* dispatch.h - which kernels this machine runs. */
#ifndef MN_KERNELS_DISPATCH_H
#define MN_KERNELS_DISPATCH_H

#include "kernels/kernel.h"

typedef enum mn_target_id {
#define TARGET(id, name, about) MN_TARGET_##id,
#include "kernels/targets.def"
#undef TARGET
    MN_TARGET_COUNT
} mn_target_id;

const char *mn_target_name(mn_target_id id);
const char *mn_target_about(mn_target_id id);

/* Built in, and supported by this processor and its operating system. */
bool mn_target_available(mn_target_id id);

/* The target called `name`; NULL or "" asks MN_TARGET, and without that takes the best one
 * here. */
mn_status mn_target_choose(mn_target_id *out, const char *name);

/* Reference kernels for `dtype` with the overlays up to `target` on top. MN_F64 is always ref. */
mn_status mn_kernel_table_fill(mn_kernel_table *table, mn_target_id target, mn_dtype dtype);

/* A kernel of spans.def for `dtype`, f32 or f64, on the CPU. */
const mn_kernel *mn_span_kernel(mn_span_id id, mn_target_id target, mn_dtype dtype);

/* The kernels of GPUs, one table for f32 and bf16; rows without one, all of them in a build without
 * CUDA, stay zero. */
void mn_kernel_table_fill_cuda(mn_kernel_table *table);

#endif
