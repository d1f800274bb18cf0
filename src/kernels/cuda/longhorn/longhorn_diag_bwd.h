/* longhorn_diag_bwd.h - longhorn_diag back in bf16, its sums as products
 * (longhorn_diag_bwd_recurrent.cu), for longhorn.cu. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_BWD_H
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_BWD_H

#include "kernels/cuda/recurrent/column_state.cuh"

namespace mneme::longhorn::diag {

/* Whether it serves a call: type and width of keys, and shared memory of this device. */
bool supported(const mn_call &call);

/* Floats of the states that it saves, which go to `spans` of the parameters. */
bool saved_size(size_t *count, const mn_call &call);

/* Leaves dq and dk in parts, dv, y and dstate0, as the kernels of recurrent/ do. */
int launch(recurrent::mn_column_params p, cudaStream_t on);

}    // namespace mneme::longhorn::diag

#endif
