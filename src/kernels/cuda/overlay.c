/* overlay.c - the kernels of GPUs, from cuda_kernels.def, and elementwise jobs there. */
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

#define NO_SPACE_OF(name) NULL
#define SPACE_OF(name) mn_elementwise_##name##_cuda_bytes
#define DECLARE_NO_SPACE(name)
#define DECLARE_SPACE(name) size_t mn_elementwise_##name##_cuda_bytes(const void *work);
#define JOB(id, name, ins, outs, workspace, decode, about)                                         \
    int mn_elementwise_##name##_cuda(void *where, const void *work, void *memory);                 \
    DECLARE_##workspace(name)
#include "kernels/elementwise.def"

const mn_elementwise_fn *mn_elementwise_cuda(void) {
    static const mn_elementwise_fn works[MN_N_ELEMENTWISE] = {
#define JOB(id, name, ins, outs, workspace, decode, about)                                         \
    [MN_ELEMENTWISE_##id] = { mn_elementwise_##name##_cuda, workspace##_OF(name) },
#include "kernels/elementwise.def"
    };
    return works;
}
