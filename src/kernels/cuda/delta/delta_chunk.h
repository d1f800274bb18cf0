/* delta_chunk.h - delta over chunks of 64 tokens on tensor cores, in bf16 (delta_fwd_chunk.cu,
 * delta_bwd_chunk.cu); delta.cu chooses between it and the recurrence. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_CHUNK_H
#define MN_KERNELS_CUDA_DELTA_DELTA_CHUNK_H

#include "kernels/kernel.h"

namespace mneme::delta {

/* Whether chunks serve a call: its kind and widths, never its length. */
bool mn_delta_uses_chunks(const mn_delta_args *p);

bool mn_delta_chunk_forward_plan(mn_plan *plan, const mn_delta_args *p);
int mn_delta_chunk_forward(const mn_delta_args *p, void *shared, void *stream);
bool mn_delta_chunk_backward_plan(mn_plan *plan, const mn_delta_args *p);
int mn_delta_chunk_backward(const mn_delta_args *p, void *shared, void *stream);

}    // namespace mneme::delta

#endif
