/* overlay.c - the kernels of GPUs, from cuda_kernels.def and glue.def, and the works of tapes. */
#include "kernels/overlay.h"
#include "kernels/elementwise.h"

#define CUDA_KERNEL(id, pass, name)                                                                \
    bool mn_##name##_cuda_plan(const void *args, mn_plan *plan);                                   \
    int mn_##name##_cuda(const void *args, void *shared, void *stream);
#include "kernels/cuda/cuda_kernels.def"
#undef CUDA_KERNEL

void mn_overlay_cuda(mn_kernel_table *table) {
#define CUDA_KERNEL(id, pass, name)                                                                \
    table->kernel[MN_KERNEL_##id][MN_##pass] =                                                     \
        (mn_kernel){ mn_##name##_cuda_plan, NULL, "cuda", mn_##name##_cuda };
#include "kernels/cuda/cuda_kernels.def"
#undef CUDA_KERNEL
}

#define GLUE(name, ins, outs, about) int mn_glue_##name##_cuda(const mn_glue *args, void *stream);
#define GLUE_SUM(name, about) int mn_glue_##name##_cuda(const mn_glue *args, void *stream);
#include "kernels/glue.def"

mn_glue_fn mn_overlay_cuda_glue(mn_glue_id id) {
    static const mn_glue_fn steps[MN_GLUE_COUNT] = {
#define GLUE(name, ins, outs, about) [MN_GLUE_##name] = mn_glue_##name##_cuda,
#define GLUE_SUM(name, about) [MN_GLUE_##name] = mn_glue_##name##_cuda,
#include "kernels/glue.def"
    };
    return steps[id];
}

#define NO_SPACE_OF(name) NULL
#define SPACE_OF(name) mn_elementwise_##name##_cuda_bytes
#define DECLARE_NO_SPACE(name)
#define DECLARE_SPACE(name) size_t mn_elementwise_##name##_cuda_bytes(const void *work);
#define WORK(id, name, space)                                                                      \
    int mn_elementwise_##name##_cuda(void *where, const void *work, void *memory);                 \
    DECLARE_##space(name)
#include "kernels/elementwise.def"
#undef WORK

const mn_elementwise_fn *mn_elementwise_cuda(void) {
    static const mn_elementwise_fn works[MN_N_ELEMENTWISE] = {
#define WORK(id, name, space)                                                                      \
    [MN_ELEMENTWISE_##id] = { mn_elementwise_##name##_cuda, space##_OF(name) },
#include "kernels/elementwise.def"
#undef WORK
    };
    return works;
}
