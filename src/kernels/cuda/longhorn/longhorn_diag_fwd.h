/* longhorn_diag_fwd.h - longhorn_diag forward in bf16, tokens onto cells as products
 * (longhorn_diag_fwd_recurrent.cu), for longhorn.cu and longhorn_diag_bwd_recurrent.cu. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_FWD_H
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_FWD_H

#include "kernels/cuda/recurrent/column_state.cuh"

namespace mneme::longhorn::diag_fwd {

/* Whether it serves a call, by its type and the width of its keys alone: all calls with the same
 * ones have the same bits. */
bool supported(const mn_call &call);

int launch(recurrent::mn_column_params p, cudaStream_t on);

/* The states in front of every eighth token to `spans` (longhorn_diag_states.cuh), of calls that it
 * serves. */
int save_states(recurrent::mn_column_params p, cudaStream_t on);

}    // namespace mneme::longhorn::diag_fwd

#endif
