/* bayes_bwd_narrow.h - the Bayesian Layer backward by one block for each group of a head of a
 * sequence: what bayes_bwd_chunk.cu launches where its kernels of spans do not go. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_BWD_NARROW_H
#define MN_KERNELS_CUDA_BAYES_BAYES_BWD_NARROW_H

#include <cuda_runtime.h>

#include "kernels/kernel.h"

namespace mneme::bayes {

enum { NARROW_SPAN = 128, NARROW_CHUNKS = NARROW_SPAN / 16 };

/* Work space, in doubles for each block but the parts. */
struct narrow_work {
    double *each;        // D, E, mean, NARROW_CHUNKS + 1 states, and mn_bayes_smem where too large
    double *spans;       // states in front of spans
    double *traces;      // of D in front of each sequence, by blocks
    float *parts;        // G x rows x (4 K + 1): dq, dk, dla, dtheta, dl2
    const int *steep;    // heads of sequences to do; NULL: all
    int64_t size, state;
    size_t smem_bytes;
    bool inside;         // mn_bayes_smem is in shared memory
};

/* Doubles of shared memory, or of the work space, of a block. */
int64_t narrow_smem_doubles(int nb, int nm, int K);

/* `blocks`: groups of heads of sequences; `heads`: heads of spans of 64 tokens, in a redo of
 * sequences. 0 or a cudaError_t. */
int narrow_backward(const mn_bayes_args *p, const narrow_work &w, int64_t blocks, int64_t heads,
                    bool redo, cudaStream_t on);

}    // namespace mneme::bayes

#endif
