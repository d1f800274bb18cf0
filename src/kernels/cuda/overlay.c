/* overlay.c - the kernels of GPUs, from cuda_kernels.def. */
#include "kernels/overlay.h"

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
