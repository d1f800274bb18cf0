/* mesa_steps.h - the forward pass of mesa with a number of conjugate-gradient steps. */
#ifndef MN_KERNELS_CUDA_MESA_MESA_STEPS_H
#define MN_KERNELS_CUDA_MESA_MESA_STEPS_H

#include <cuda_runtime.h>

#include "kernels/kernel.h"

namespace mneme::mesa {

bool mn_mesa_steps_plan(mn_plan *plan, const mn_call *c);
int mn_mesa_steps_launch(const mn_mesa_args *p, void *shared, cudaStream_t stream);

}    // namespace mneme::mesa

#endif
