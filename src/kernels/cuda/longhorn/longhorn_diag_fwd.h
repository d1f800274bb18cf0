/* longhorn_diag_fwd.h - longhorn_diag forward in bf16, tokens onto cells as products
 * (longhorn_diag_fwd_recurrent.cu), for longhorn.cu. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_FWD_H
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_FWD_H

#include "kernels/cuda/recurrent/column_state.cuh"

namespace mneme::longhorn::diag_fwd {

/* Whether it serves a call, by its type and the width of its keys alone: all calls with the same
 * ones have the same bits. Sequences of one token are left out. */
bool supported(const mn_call &call);

int launch(recurrent::mn_column_params p, cudaStream_t on);

}    // namespace mneme::longhorn::diag_fwd

#endif
