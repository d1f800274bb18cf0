/* importance.cuh - Palimpsa on GPUs: what its kernels cell by cell (importance.cu) and
 * those on tensor cores (importance_mma.cuh) share. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_CUH

#include "kernels/cuda/recurrent/cell_state.cuh"

namespace mneme::importance {

using namespace recurrent;

enum {
    TOKENS = MN_CELL_TOKENS,
    HALF = TOKENS / 2,
    SLOTS = MN_CELL_SLOTS,
    C = 2,
    WARPS = 8,
    SETS = 2 * C,    // of four numbers in the state of a thread
    SHORT_KEY = 32,
    MAX_HEADS = 65535,
};

/* What is added to an importance at each token: too little for any but one of exactly 0, as cells
 * outside of (K,V) may have, which it keeps from dividing by 0. */
static __device__ const float min_importance = 1e-37f;

/* The work space of a call, each part behind the other: parts of o, ovar or dv, db; what decays
 * make of tiles; factors of keys made before; states in front of spans; parts of dk, dq; of dg; of
 * dip; of dg for each tile and for each sequence. */
enum { SUMS, DECAYS, KEYS_MADE, STATES, KEY_PARTS, GATES, PRIORS, ALONG, EDGES, N_BUFFERS };

struct workspace {
    float *at[N_BUFFERS];
};

/* One head of one sequence. */
struct place {
    int64_t n, h;
    mn_span span;
    float ip;

    __device__ static place of(const mn_importance_args &p, int64_t item) {
        const int64_t n = item / p.call.H, h = item % p.call.H;
        return { n, h, mn_span_at(p.call, n), *mn_row<float>(p.ip, 0, 0, h) };
    }
};

__device__ inline float first_importance(const mn_importance_args &p, const place &at, int64_t i) {
    const float *imp0 = mn_row<float>(p.imp0, at.n, 0, at.h);
    return imp0 ? imp0[i] : at.ip;
}

}    // namespace mneme::importance

#endif
