/* matrix_step.cuh - the recurrence of a matrix state for one token, with the state in place.
 *
 *   S' = diag(exp g) S;  r = v - S'^T e;  S = S' + w r';  o = scale S'^T q + scale (q.w) r
 *
 * All that needs a sum over rows of the state is summed at once: S'^T e, S'^T q and q.w. A tile is
 * all rows of 32 columns of one memory, whole lines of 128 bytes. The tiles of all memories are one
 * list, of which each block has a run, so that blocks end together whatever the number of memories.
 * A thread has four neighbouring columns in every 32nd row of a tile; it copies them to shared
 * memory by cp.async, STAGES - 1 tiles ahead, and alone reads them there. What a token has for a
 * memory's rows stays in registers while the block goes through the memory's tiles. Blocks prefetch
 * their first tiles into L2 before the launch in front has ended. */
#ifndef MN_KERNELS_CUDA_RECURRENT_MATRIX_STEP_CUH
#define MN_KERNELS_CUDA_RECURRENT_MATRIX_STEP_CUH

#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/recurrent/matrix_state.cuh"

namespace mneme::recurrent {

enum { MN_STEP_THREADS = 256, MN_STEP_COLUMNS = 32, MN_STEP_VECS = MN_STEP_COLUMNS / 4 };
enum { MN_STEP_GROUPS = MN_STEP_THREADS / MN_STEP_VECS, MN_STEP_WARPS = MN_STEP_THREADS / 32 };

/* A thread's sums over its rows of four neighbouring columns, and the block's. */
struct mn_step_sums {
    float known[4], read[4];    // S'^T e, S'^T q
};

struct mn_step_shared {
    float known[2][MN_STEP_WARPS][MN_STEP_COLUMNS], read[2][MN_STEP_WARPS][MN_STEP_COLUMNS];
    float dots[2][MN_STEP_WARPS];    // q.w of a warp's rows
};

/* Over lanes of a warp that have the same columns. */
__device__ inline float mn_step_lanes(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 16);
    return x + __shfl_xor_sync(0xffffffffu, x, 8);
}

/* Over warps, in their order. */
__device__ inline void mn_step_add(float (&sum)[4], const float (*parts)[MN_STEP_COLUMNS],
                                   int column) {
    mn_load<4>(sum, parts[0], column);
#pragma unroll
    for (int k = 1; k < MN_STEP_WARPS; k++) {
        float part[4];
        mn_load<4>(part, parts[k], column);
#pragma unroll
        for (int c = 0; c < 4; c++) sum[c] += part[c];
    }
}

/* What a thread has of a token for one memory: R of the rows. */
template <int R>
struct mn_step_rows {
    float query[R], erase[R], write[R], decay[R];

    template <typename T>
    __device__ void load(const mn_matrix_params &p, int64_t n, int64_t h) {
        const int64_t key = mn_key_head(p.call, h);
        const T *q = mn_row<T>(p.q, n, 0, key), *e = mn_row<T>(p.e, n, 0, key);
        const T *w = p.w.data ? mn_row<T>(p.w, n, 0, key) : e, *g = mn_row<T>(p.g, n, 0, h);
        const T *beta = mn_row<T>(p.beta, n, 0, h);
        const float strength = beta ? mn_float(*beta) : 1.0f;
        const bool by_channel = p.decay == MN_DECAY_CHANNEL;
        const float all = g && !by_channel ? expf(mn_float(*g)) : 1.0f;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int64_t i = threadIdx.x / MN_STEP_VECS + MN_STEP_GROUPS * r;
            const bool inside = i < p.call.K;
            write[r] = inside ? strength * mn_float(w[i]) : 0.0f;
            query[r] = inside ? mn_float(q[i]) : 0.0f;
            erase[r] = inside ? mn_get(e, i) : 0.0f;
            decay[r] = inside && g && by_channel ? expf(mn_float(g[i])) : all;
        }
    }

    /* q.w of this thread's rows, of all lanes of the warp. */
    __device__ float dot(void) const {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < R; r++) sum = fmaf(query[r], write[r], sum);
        return mn_step_lanes(sum);
    }
};

/* A thread's cells of a tile, and where they are in the state. */
struct mn_step_tile {
    int64_t n, h, column;    // sequence, head, the thread's first column
    int64_t at;              // in the memory, of its first row

    __device__ mn_step_tile(const mn_matrix_params &p, int tile, int n_tiles) {
        const int memory = tile / n_tiles, H = (int)p.call.H;
        n = memory / H, h = memory % H;
        column = tile % n_tiles * MN_STEP_COLUMNS + threadIdx.x % MN_STEP_VECS * 4;
        at = threadIdx.x / MN_STEP_VECS * p.call.V + column;
    }

    __device__ bool has(const mn_call &call, int r) const {
        return (int64_t)threadIdx.x / MN_STEP_VECS + MN_STEP_GROUPS * r < call.K && column < call.V;
    }

    __device__ int64_t row(const mn_call &call, int r) const {
        return at + MN_STEP_GROUPS * r * call.V;
    }
};

/* Starts copies of the thread's cells to its places in `to`; zeros where there are none. */
template <int R>
__device__ inline void mn_step_fetch(float4 *to, const mn_matrix_params &p,
                                     const mn_step_tile &tile) {
    const float *from = mn_row<float>(p.state0, tile.n, 0, tile.h);
#pragma unroll
    for (int r = 0; r < R; r++) {
        float4 *place = to + r * MN_STEP_THREADS + threadIdx.x;
        if (from && tile.has(p.call, r)) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n"
                         :: "r"((uint32_t)__cvta_generic_to_shared(place)),
                            "l"(from + tile.row(p.call, r)) : "memory");
        } else {
            *place = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
}

/* Asks L2 for a tile, a thread for a line. */
template <int R>
__device__ inline void mn_step_prefetch(const mn_matrix_params &p, const mn_step_tile &tile) {
    const float *from = mn_row<float>(p.state0, tile.n, 0, tile.h);
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (r % MN_STEP_VECS != (int)threadIdx.x % MN_STEP_VECS) continue;
        if (from && tile.has(p.call, r)) mn_prefetch_l2(from + tile.row(p.call, r));
    }
}

template <int R, int STAGES>
struct mn_step_smem {
    static constexpr int stage = R * MN_STEP_THREADS;    // vectors of four
    static constexpr int bytes = STAGES * stage * (int)sizeof(float4);
    static constexpr int resident = R > 8 ? 1 : R > 4 ? 2 : 4;    // blocks of a processor
};

/* K <= 32 R; V and all rows of v, o and the state in vectors of four. */
template <typename T, int R, int STAGES, bool DELTA_RULE>
__global__ void __launch_bounds__(MN_STEP_THREADS, mn_step_smem<R, STAGES>::resident)
matrix_step_recurrent_kernel(const __grid_constant__ mn_matrix_params p, int n_tiles,
                             int all_tiles) {
    extern __shared__ __align__(16) float4 stages[];
    __shared__ __align__(16) mn_step_shared smem;
    const int begin = (int)((int64_t)all_tiles * blockIdx.x / gridDim.x);
    const int end = (int)((int64_t)all_tiles * (blockIdx.x + 1) / gridDim.x);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int quad = threadIdx.x % MN_STEP_VECS * 4;
    const auto fetch = [&](int tile) {
        float4 *to = stages + (tile - begin) % STAGES * mn_step_smem<R, STAGES>::stage;
        if (tile < end) mn_step_fetch<R>(to, p, mn_step_tile(p, tile, n_tiles));
        asm volatile("cp.async.commit_group;\n" ::: "memory");
    };
    mn_pdl_launch_dependents();
    for (int tile = begin; tile < begin + STAGES - 1 && tile < end; tile++) {
        mn_step_prefetch<R>(p, mn_step_tile(p, tile, n_tiles));
    }
    mn_pdl_wait();    // the launch in front may be this one's last token
    for (int i = 0; i < STAGES - 1; i++) fetch(begin + i);
    mn_step_rows<R> rows;
    int memory = -1, parity = 0;
#pragma unroll 1
    for (int tile = begin; tile < end; tile++) {
        const mn_step_tile at(p, tile, n_tiles);
        if (memory != tile / n_tiles) {
            memory = tile / n_tiles;
            parity ^= 1;
            rows.template load<T>(p, at.n, at.h);
            const float dot = rows.dot();
            if (lane == 0) smem.dots[parity][warp] = dot;
        }
        float residual[4] = {};
        if (at.column < p.call.V) mn_load<4>(residual, mn_row<T>(p.v, at.n, 0, at.h), at.column);
        asm volatile("cp.async.wait_group %0;\n" :: "n"(STAGES - 2) : "memory");
        float cells[R][4];
        const int index = tile - begin;
        const float4 *from = stages + index % STAGES * mn_step_smem<R, STAGES>::stage;
        mn_step_sums sums = {};
#pragma unroll
        for (int r = 0; r < R; r++) {
            mn_load<4>(cells[r], (const float *)(from + r * MN_STEP_THREADS), threadIdx.x * 4);
        }
        fetch(tile + STAGES - 1);
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                cells[r][c] *= rows.decay[r];
                if (DELTA_RULE) sums.known[c] = fmaf(rows.erase[r], cells[r][c], sums.known[c]);
                sums.read[c] = fmaf(rows.query[r], cells[r][c], sums.read[c]);
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            if (DELTA_RULE) sums.known[c] = mn_step_lanes(sums.known[c]);
            sums.read[c] = mn_step_lanes(sums.read[c]);
        }
        if (DELTA_RULE && lane < MN_STEP_VECS) {
            mn_store<4>(smem.known[index % 2][warp], quad, sums.known);
        }
        if (lane < MN_STEP_VECS) mn_store<4>(smem.read[index % 2][warp], quad, sums.read);
        __syncthreads();
        if (DELTA_RULE) {
            mn_step_add(sums.known, smem.known[index % 2], quad);
#pragma unroll
            for (int c = 0; c < 4; c++) residual[c] -= sums.known[c];
        }
        float *to = mn_row<float>(p.state, at.n, 0, at.h);
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (!to || !at.has(p.call, r)) continue;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                cells[r][c] = fmaf(rows.write[r], residual[c], cells[r][c]);
            }
            mn_store<4>(to, at.row(p.call, r), cells[r]);
        }
        T *o = mn_row<T>(p.o, at.n, 0, at.h);
        if (threadIdx.x >= MN_STEP_VECS || !o || at.column >= p.call.V) continue;
        float dot = smem.dots[parity][0];
#pragma unroll
        for (int k = 1; k < MN_STEP_WARPS; k++) dot += smem.dots[parity][k];
        mn_step_add(sums.read, smem.read[index % 2], quad);
        float out[4];
#pragma unroll
        for (int c = 0; c < 4; c++) out[c] = p.scale * fmaf(dot, residual[c], sums.read[c]);
        mn_store<4>(o, at.column, out);
    }
}

template <typename T, int R, int STAGES, bool DELTA_RULE>
static int mn_matrix_step_of(const mn_matrix_params &p, cudaStream_t stream) {
    using smem = mn_step_smem<R, STAGES>;
    const auto kernel = matrix_step_recurrent_kernel<T, R, STAGES, DELTA_RULE>;
    const int64_t n_tiles = mn_ceil_div(p.call.V, MN_STEP_COLUMNS);
    const int64_t all = p.call.H * p.call.B * n_tiles;
    if (all == 0) return cudaSuccess;
    if (all > INT32_MAX / 2) return cudaErrorNotSupported;
    const cudaError_t code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem::bytes);
    if (code != cudaSuccess) return (int)code;
    const int64_t blocks = (int64_t)mn_device_props_current().processors * smem::resident;
    return mn_launch_pdl(kernel, dim3((unsigned)mn_min(all, blocks)), MN_STEP_THREADS, smem::bytes,
                         stream, p, (int)n_tiles, (int)all);
}

/* As far ahead as there is shared memory for; where there is none even for the least, or rows are
 * not in vectors of four, the scan over tokens does the one. */
template <typename T, int R, bool DELTA_RULE>
static int mn_matrix_step_deep(const mn_matrix_params &p, cudaStream_t stream) {
    const int room = mn_device_props_current().shared_bytes - (int)sizeof(mn_step_shared);
    if (mn_step_smem<R, 3>::bytes <= room) return mn_matrix_step_of<T, R, 3, DELTA_RULE>(p, stream);
    if (mn_step_smem<R, 2>::bytes <= room) return mn_matrix_step_of<T, R, 2, DELTA_RULE>(p, stream);
    return mn_matrix_forward<DELTA_RULE>(p, stream);
}

template <typename T, bool DELTA_RULE>
static int mn_matrix_step_in(const mn_matrix_params &p, cudaStream_t stream) {
    const int64_t K = p.call.K;
    const bool vec_aligned = p.call.V % 4 == 0 && mn_step_vec_aligned<T>(p.v) &&
                             mn_step_vec_aligned<T>(p.o) && mn_step_vec_aligned<float>(p.state0) &&
                             mn_step_vec_aligned<float>(p.state);
    if (!vec_aligned || K > 16 * MN_STEP_GROUPS) return mn_matrix_forward<DELTA_RULE>(p, stream);
    if (K <= 2 * MN_STEP_GROUPS) return mn_matrix_step_deep<T, 2, DELTA_RULE>(p, stream);
    if (K <= 4 * MN_STEP_GROUPS) return mn_matrix_step_deep<T, 4, DELTA_RULE>(p, stream);
    if (K <= 8 * MN_STEP_GROUPS) return mn_matrix_step_deep<T, 8, DELTA_RULE>(p, stream);
    return mn_matrix_step_deep<T, 16, DELTA_RULE>(p, stream);
}

template <bool DELTA_RULE>
static int mn_matrix_step(const mn_matrix_params &p, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    return p.call.dtype == MN_BF16 ? mn_matrix_step_in<mn_bf16, DELTA_RULE>(p, on)
                                   : mn_matrix_step_in<float, DELTA_RULE>(p, on);
}

}    // namespace mneme::recurrent

#endif
