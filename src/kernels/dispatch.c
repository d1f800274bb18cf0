/* dispatch.c - which kernels this machine runs. */
#include "kernels/dispatch.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "kernels/cpuid.h"
#include "kernels/overlay.h"
#include "kernels/cpu/simd/vector_targets.h"

static const struct {
    const char *name, *about;
} targets[MN_TARGET_COUNT] = {
#define TARGET(id, name, about) [MN_TARGET_##id] = { name, about },
#include "kernels/targets.def"
#undef TARGET
};

static const char *const kernel_names[MN_KERNEL_COUNT] = {
#define KERNEL(name) #name,
#include "kernels/kernels.def"
#undef KERNEL
};

const char *mn_kernel_name(mn_kernel_id id) {
    return kernel_names[id];
}

const char *mn_pass_name(mn_pass pass) {
    static const char *const names[MN_PASS_COUNT] = { "forward", "backward", "step" };
    return names[pass];
}

const char *mn_target_name(mn_target_id id) {
    return targets[id].name;
}

const char *mn_target_about(mn_target_id id) {
    return targets[id].about;
}

bool mn_target_available(mn_target_id id) {
    switch (id) {
    case MN_TARGET_REF: return true;
#define AVAILABLE(id, name)                                                                        \
    case MN_TARGET_##id: return mn_cpu_has_##name();
        MN_VECTOR_TARGETS(AVAILABLE)
#undef AVAILABLE
    default: return false;
    }
}

static mn_target_id best_target(void) {
    int best = MN_TARGET_REF;
    for (int i = 0; i < MN_TARGET_COUNT; i++) {
        if (mn_target_available((mn_target_id)i)) best = i;
    }
    return (mn_target_id)best;
}

mn_status mn_target_choose(mn_target_id *out, const char *name) {
    if (!name || !*name) name = getenv("MN_TARGET");
    if (!name || !*name) {
        *out = best_target();
        return MN_OK;
    }
    for (int i = 0; i < MN_TARGET_COUNT; i++) {
        if (strcmp(targets[i].name, name) != 0) continue;
        if (!mn_target_available((mn_target_id)i)) {
            return mn_fail(MN_ERR_UNSUPPORTED,
                           "target %s needs %s; this machine or build is not one", name,
                           targets[i].about);
        }
        *out = (mn_target_id)i;
        return MN_OK;
    }
    return mn_fail(MN_ERR_ARGUMENT,
                   "no target is called \"%s\"; there are ref, avx2, avx512 and neon", name);
}

mn_status mn_kernel_table_fill(mn_kernel_table *table, mn_target_id target, mn_dtype dtype) {
    memset(table, 0, sizeof *table);
    if (dtype == MN_BF16) {
        return mn_fail(MN_ERR_UNSUPPORTED, "bf16 runs on GPUs only; use f32 on the CPU");
    }
    if (dtype == MN_F64) {
        mn_fill_ref_f64(table);
        return MN_OK;
    }
    mn_fill_ref_f32(table);
#define OVERLAY(id, name)                                                                          \
    if (target == MN_TARGET_##id) mn_overlay_##name(table);
    MN_VECTOR_TARGETS(OVERLAY)
#undef OVERLAY
    (void)target;
    return MN_OK;
}

const mn_kernel *mn_span_kernel(mn_span_id span, mn_target_id target, mn_dtype dtype) {
    if (dtype == MN_F64) return &mn_spans_ref_f64[span];
#define SPAN_OF(id, name)                                                                          \
    if (target == MN_TARGET_##id) return &mn_spans_##name[span];
    MN_VECTOR_TARGETS(SPAN_OF)
#undef SPAN_OF
    (void)target;
    return &mn_spans_ref_f32[span];
}

void mn_kernel_table_fill_cuda(mn_kernel_table *table) {
    memset(table, 0, sizeof *table);
#if MN_HAVE_CUDA
    mn_overlay_cuda(table);
#endif
}
