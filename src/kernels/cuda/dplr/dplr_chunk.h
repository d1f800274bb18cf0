/* dplr_chunk.h - dplr over chunks of 32 tokens on tensor cores, in bf16 (dplr_chunk.cu); dplr.cu
 * chooses between it and the recurrence. */
#ifndef MN_KERNELS_CUDA_DPLR_DPLR_CHUNK_H
#define MN_KERNELS_CUDA_DPLR_DPLR_CHUNK_H

#include "kernels/kernel.h"

namespace mneme::dplr {

/* Whether chunks serve a call: its kind and widths, never its length. */
bool mn_dplr_uses_chunks(const mn_dplr_args *p);

bool mn_dplr_chunk_plan(mn_plan *plan, const mn_dplr_args *p, bool back);
int mn_dplr_chunk_forward(const mn_dplr_args *p, void *shared, void *stream);
int mn_dplr_chunk_backward(const mn_dplr_args *p, void *shared, void *stream);

}    // namespace mneme::dplr

#endif
