/* matrix_state_step.cuh - the recurrence of matrix_state.cuh for one token, state in place.
 *
 *   S' = diag(exp g) S;  r = v - S'^T e;  S = S' + w r';  o = scale S'^T q + scale (q.w) r
 *
 * All that needs a sum over rows of the state is summed at once: S'^T e, S'^T q and q.w. A block
 * has 16 columns of one memory, a thread four neighbours of them in every 64th row. While it waits
 * for the launch in front it requests the second cache for its part of the state. */
#ifndef MN_KERNELS_CUDA_RECURRENT_MATRIX_STATE_STEP_CUH
#define MN_KERNELS_CUDA_RECURRENT_MATRIX_STATE_STEP_CUH

#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/recurrent/matrix_state.cuh"

enum { MN_STEP_THREADS = 256, MN_STEP_COLUMNS = 16, MN_STEP_GROUPS = 64, MN_STEP_SUMS = 9 };

/* Sums over the rows of a column, of four neighbours: S'^T e, S'^T q; and q.w. */
struct mn_step_sums {
    float at[MN_STEP_SUMS];

    /* Over the block's rows, in all threads: lanes of a warp first, which lie 4 ws. */
    __device__ void gather(float (*room)[4][MN_STEP_SUMS]) {
        const int quad = threadIdx.x % 4, warp = threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < MN_STEP_SUMS; i++) {
#pragma unroll
            for (int lanes = 16; lanes >= 4; lanes >>= 1) {
                at[i] += __shfl_xor_sync(0xffffffffu, at[i], lanes);
            }
            if (threadIdx.x % 32 < 4) room[warp][quad][i] = at[i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < MN_STEP_SUMS; i++) {
            at[i] = 0.0f;
#pragma unroll
            for (int k = 0; k < MN_STEP_THREADS / 32; k++) at[i] += room[k][quad][i];
        }
    }
};

/* R rows of a thread: K <= 64 R. */
template <typename T, int R, bool ERASES>
__global__ void __launch_bounds__(MN_STEP_THREADS)
mn_memory_step_kernel(const __grid_constant__ mn_memory p, int64_t n_tiles) {
    __shared__ float room[MN_STEP_THREADS / 32][4][MN_STEP_SUMS];
    const int64_t index = blockIdx.x, h = index / n_tiles % p.call.H;
    const int64_t n = index / n_tiles / p.call.H, K = p.call.K, V = p.call.V;
    const int64_t j = index % n_tiles * MN_STEP_COLUMNS + threadIdx.x % 4 * 4;
    const int first = threadIdx.x / 4;
    const float *from = mn_row<float>(p.state0, n, 0, h);
    float *to = mn_row<float>(p.state, n, 0, h);
    mn_pdl_launch_dependents();
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = first + MN_STEP_GROUPS * r;
        if (!from || i >= K || j >= V) continue;
        asm volatile("prefetch.global.L2 [%0];" :: "l"(from + i * V + j));
    }
    const T *q = mn_row<T>(p.q, n, 0, h), *e = mn_row<T>(p.e, n, 0, h);
    const T *w = p.w.data ? mn_row<T>(p.w, n, 0, h) : e, *g = mn_row<T>(p.g, n, 0, h);
    const T *beta = mn_row<T>(p.beta, n, 0, h), *v = mn_row<T>(p.v, n, 0, h);
    T *o = mn_row<T>(p.o, n, 0, h);
    /* arguments are looked at before the wait, not when they are needed */
    asm volatile("" :: "l"(q), "l"(e), "l"(w), "l"(g), "l"(beta), "l"(v), "l"(o), "l"(to));
    mn_pdl_wait();
    float S[R][4], write[R], residual[4] = {};
    mn_step_sums sums = {};
    if (j < V) mn_load<4>(residual, v, j);
    const float strength = beta ? mn_float(*beta) : 1.0f;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = first + MN_STEP_GROUPS * r;
        const bool inside = i < K;
        mn_load<4>(S[r], inside && j < V ? from : nullptr, i * V + j);
        write[r] = inside ? strength * mn_float(w[i]) : 0.0f;
        const float query = inside ? mn_float(q[i]) : 0.0f, erase = inside ? mn_get(e, i) : 0.0f;
        const float decay = inside && g ? expf(mn_float(g[p.decay == MN_DECAY_CHANNEL ? i : 0]))
                                        : 1.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            S[r][c] *= decay;
            if (ERASES) sums.at[c] = fmaf(erase, S[r][c], sums.at[c]);
            sums.at[4 + c] = fmaf(query, S[r][c], sums.at[4 + c]);
        }
        sums.at[8] = fmaf(query, write[r], sums.at[8]);
    }
    sums.gather(room);
    if (j >= V) return;
#pragma unroll
    for (int c = 0; c < 4; c++) residual[c] -= sums.at[c];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = first + MN_STEP_GROUPS * r;
        if (i >= K || !to) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) S[r][c] = fmaf(write[r], residual[c], S[r][c]);
        mn_store<4>(to, i * V + j, S[r]);
    }
    if (first > 0 || !o) return;
    float out[4];
#pragma unroll
    for (int c = 0; c < 4; c++) out[c] = p.scale * fmaf(sums.at[8], residual[c], sums.at[4 + c]);
    mn_store<4>(o, j, out);
}

template <typename T, int R, bool ERASES>
static int mn_memory_step_of(const mn_memory &p, cudaStream_t stream) {
    const int64_t n_tiles = mn_ceil_div(p.call.V, MN_STEP_COLUMNS);
    const int64_t blocks = n_tiles * p.call.H * p.call.B;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(mn_memory_step_kernel<T, R, ERASES>, dim3((unsigned)blocks),
                           MN_STEP_THREADS, 0, stream, p, n_tiles);
}

/* Whether rows of the view can be read four numbers at a time. */
template <typename T, typename View>
static bool mn_step_packs(const View &view) {
    bool even = (uintptr_t)view.data % (4 * sizeof(T)) == 0;
    for (int i = 0; i < 3; i++) even = even && view.stride[i] % 4 == 0;
    return even;
}

template <typename T, bool ERASES>
static int mn_memory_step_in(const mn_memory &p, cudaStream_t stream) {
    const int64_t K = p.call.K;
    const bool packs = p.call.V % 4 == 0 && mn_step_packs<T>(p.v) && mn_step_packs<T>(p.o) &&
                       mn_step_packs<float>(p.state0) && mn_step_packs<float>(p.state);
    if (!packs || K > 8 * MN_STEP_GROUPS) return mn_memory_forward<ERASES>(p, stream);
    if (K <= MN_STEP_GROUPS) return mn_memory_step_of<T, 1, ERASES>(p, stream);
    if (K <= 2 * MN_STEP_GROUPS) return mn_memory_step_of<T, 2, ERASES>(p, stream);
    if (K <= 4 * MN_STEP_GROUPS) return mn_memory_step_of<T, 4, ERASES>(p, stream);
    return mn_memory_step_of<T, 8, ERASES>(p, stream);
}

template <bool ERASES>
static int mn_memory_step(const mn_memory &p, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    return p.call.dtype == MN_BF16 ? mn_memory_step_in<mn_bf16, ERASES>(p, on)
                                   : mn_memory_step_in<float, ERASES>(p, on);
}

#endif
