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

/* Gradients that are made there from all columns of a head; whether dq and dk are stored by
 * fours. */
struct whole_grads {
    mn_out q, k, beta;
    bool vec_aligned;
};

/* Whether it makes these, too. */
bool makes_whole(const mn_call &call);

/* Leaves dv and dstate0, and those gradients, or else dq and dk in parts and y as the kernels of
 * recurrent/ do. */
int launch(recurrent::mn_column_params p, const whole_grads &grads, cudaStream_t on);

}    // namespace mneme::longhorn::diag

#endif
