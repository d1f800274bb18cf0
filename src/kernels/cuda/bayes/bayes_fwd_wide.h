/* bayes_fwd_wide.h - the Bayesian Layer forward in one kernel, for states that the kernels of
 * bayes_fwd_chunk.cuh do not hold: up to 512 rows, on any GPU. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_FWD_WIDE_H
#define MN_KERNELS_CUDA_BAYES_BAYES_FWD_WIDE_H

#include <cuda_runtime.h>

#include "kernels/kernel.h"

namespace mneme::bayes {

bool mn_bayes_wide_plan(const mn_bayes_args *p, mn_plan *plan);
int mn_bayes_wide(const mn_bayes_args *p, void *shared, cudaStream_t on);

}    // namespace mneme::bayes

#endif
