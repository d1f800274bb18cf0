/* longhorn_column_chunk.h - longhorn_column over chunks in bf16 (longhorn_column_chunk.cu), for
 * longhorn.cu. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_COLUMN_CHUNK_H
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_COLUMN_CHUNK_H

#include "kernels/kernel.h"

namespace mneme::longhorn {

/* Whether chunks serve a call: its kind and widths, never its length. */
bool mn_longhorn_uses_chunks(const mn_call *call);

bool mn_longhorn_chunk_plan(mn_plan *plan, const mn_call *call, bool back);
int mn_longhorn_chunk_forward(const mn_longhorn_column_args *p, void *shared, void *stream);
int mn_longhorn_chunk_backward(const mn_longhorn_column_args *p, void *shared, void *stream);

}    // namespace mneme::longhorn

#endif
