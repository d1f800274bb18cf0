/* dplr_chunk.h - dplr over chunks of 32 tokens on tensor cores, in bf16 (dplr_chunk.cu); dplr.cu
 * chooses between it and the recurrence. */
#ifndef MN_KERNELS_CUDA_DPLR_DPLR_CHUNK_H
#define MN_KERNELS_CUDA_DPLR_DPLR_CHUNK_H

#include <cuda_runtime.h>

#include "kernels/kernel.h"

namespace mneme::dplr {

/* Whether chunks serve a call: its kind and widths, never its length. */
bool mn_dplr_uses_chunks(const mn_dplr_args *p);

bool mn_dplr_chunk_plan(mn_plan *plan, const mn_dplr_args *p, bool back);
int mn_dplr_chunk_forward(const mn_dplr_args *p, void *shared, void *stream);
int mn_dplr_chunk_backward(const mn_dplr_args *p, void *shared, void *stream);

/* Of these the calls with keys and values of up to 64 on Hopper (dplr_chunk_sm90.cu). */
bool mn_dplr_uses_chunks_sm90(const mn_dplr_args *p);
bool mn_dplr_chunk_plan_sm90(mn_plan *plan, const mn_dplr_args *p, bool back);
int mn_dplr_chunk_forward_sm90(const mn_dplr_args *p, cudaStream_t stream);
int mn_dplr_chunk_backward_sm90(const mn_dplr_args *p, void *shared, cudaStream_t stream);

}    // namespace mneme::dplr

#endif
