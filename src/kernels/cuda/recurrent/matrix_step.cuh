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

/* Starts a copy of 16 bytes; zeros where `there` is false. */
__device__ inline void mn_step_copy(uint32_t to, const float *from, bool there) {
    if (there) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n"
                     :: "r"(to), "l"(from) : "memory");
    } else {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" :: "r"(to), "r"(0) : "memory");
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

/* A tile in the list of all: of sequence n, head h, columns from MN_STEP_COLUMNS `tile` on; and
 * where the thread's first element of the memory's state, values and results is. */
template <typename T>
struct mn_step_cursor {
    int tile, h, n;
    const float *from;
    float *to;
    const T *v;
    T *o;

    __device__ mn_step_cursor(const mn_matrix_params &p, int index, int n_tiles) {
        const int memory = index / n_tiles, H = (int)p.call.H;
        tile = index - memory * n_tiles, n = memory / H, h = memory - n * H;
        locate(p);
    }

    __device__ void locate(const mn_matrix_params &p) {
        const int quad = threadIdx.x % MN_STEP_VECS * 4;
        const int64_t place = threadIdx.x / MN_STEP_VECS * p.call.V + quad;
        from = p.state0.data ? mn_row<float>(p.state0, n, 0, h) + place : nullptr;
        to = p.state.data ? mn_row<float>(p.state, n, 0, h) + place : nullptr;
        v = mn_row<T>(p.v, n, 0, h) + quad;
        o = p.o.data ? mn_row<T>(p.o, n, 0, h) + quad : nullptr;
    }

    __device__ void next(const mn_matrix_params &p, int n_tiles) {
        if (++tile < n_tiles) return;
        tile = 0;
        if (++h == (int)p.call.H) h = 0, n++;
        if (n < (int)p.call.B) locate(p);
    }
};

/* Shared memory of a block, and how many blocks of a processor work at a time. */
template <int R, int STAGES>
struct mn_step_smem {
    static constexpr int stage = R * MN_STEP_THREADS * (int)sizeof(float4);
    static constexpr int bytes = STAGES * stage;
};

/* K <= 32 R; V and all rows of v, o and the state in vectors of four. WHOLE: K = 32 R, V is whole
 * tiles, and the states are there. */
template <typename T, int R, int STAGES, int BLOCKS, bool DELTA_RULE, bool WHOLE>
__global__ void __launch_bounds__(MN_STEP_THREADS, BLOCKS)
matrix_step_recurrent_kernel(const __grid_constant__ mn_matrix_params p, int n_tiles,
                             int all_tiles) {
    extern __shared__ __align__(16) unsigned char stages[];
    __shared__ __align__(16) mn_step_shared smem;
    constexpr int between = MN_STEP_THREADS * (int)sizeof(float4);
    const int K = (int)p.call.K, V = (int)p.call.V;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = threadIdx.x / MN_STEP_VECS, quad = threadIdx.x % MN_STEP_VECS * 4;
    const int begin = (int)((int64_t)all_tiles * blockIdx.x / gridDim.x);
    const int count = (int)((int64_t)all_tiles * (blockIdx.x + 1) / gridDim.x) - begin;
    const int64_t step = (int64_t)MN_STEP_GROUPS * V;
    const unsigned char *mine = stages + threadIdx.x * sizeof(float4);
    /* Rows of the thread that a tile has. */
    const auto n_rows_of = [&](const void *state, int tile) {
        const bool there = state && tile * MN_STEP_COLUMNS + quad < V;
        return there ? (K - row + MN_STEP_GROUPS - 1) / MN_STEP_GROUPS : 0;
    };
    mn_step_cursor<T> at(p, begin, n_tiles), ahead = at, later = at;
    mn_pdl_launch_dependents();
    for (int i = 0; i < STAGES - 1 && i < count; i++) {    // a thread asks for a line of each tile
        const int n_rows = WHOLE ? R : n_rows_of(later.from, later.tile);
        for (int r = threadIdx.x % MN_STEP_VECS; r < n_rows; r += MN_STEP_VECS) {
            mn_prefetch_l2(later.from + later.tile * MN_STEP_COLUMNS + r * step);
        }
        later.next(p, n_tiles);
    }
    mn_pdl_wait();    // the launch in front may be this one's last token
    const auto fetch = [&](int index, int slot) {
        if (index < count) {
            const float *from = ahead.from + ahead.tile * MN_STEP_COLUMNS;
            const int n_rows = WHOLE ? R : n_rows_of(ahead.from, ahead.tile);
            const uint32_t to = (uint32_t)__cvta_generic_to_shared(mine) +
                                slot * mn_step_smem<R, STAGES>::stage;
#pragma unroll
            for (int r = 0; r < R; r++) mn_step_copy(to + r * between, from + r * step, r < n_rows);
            ahead.next(p, n_tiles);
        }
        asm volatile("cp.async.commit_group;\n" ::: "memory");
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i, i);
    const auto value_of = [&](const mn_step_cursor<T> &of) {
        mn_vec<T, 4> value = {};
        const int column = of.tile * MN_STEP_COLUMNS;
        if (of.n < (int)p.call.B && (WHOLE || column + quad < V)) {
            value = *(const mn_vec<T, 4> *)(of.v + column);
        }
        return value;
    };
    mn_vec<T, 4> value = value_of(at);
    mn_step_rows<R> rows;
    int parity = 0, slot = 0;
#pragma unroll 1
    for (int index = 0; index < count; index++) {
        if (index == 0 || at.tile == 0) {
            parity ^= 1;
            rows.template load<T>(p, at.n, at.h);
            const float dot = rows.dot();
            if (lane == 0) smem.dots[parity][warp] = dot;
        }
        mn_step_cursor<T> next = at;
        next.next(p, n_tiles);
        const mn_vec<T, 4> next_value = value_of(next);
        asm volatile("cp.async.wait_group %0;\n" :: "n"(STAGES - 2) : "memory");
        float cells[R][4];
        const unsigned char *from = mine + slot * mn_step_smem<R, STAGES>::stage;
#pragma unroll
        for (int r = 0; r < R; r++) mn_load<4>(cells[r], (const float *)(from + r * between), 0);
        fetch(index + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        mn_step_sums sums = {};
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
        if (lane < MN_STEP_VECS) {
            if (DELTA_RULE) mn_store<4>(smem.known[index % 2][warp], quad, sums.known);
            mn_store<4>(smem.read[index % 2][warp], quad, sums.read);
        }
        __syncthreads();
        float residual[4];
#pragma unroll
        for (int c = 0; c < 4; c++) residual[c] = mn_float(value.at[c]);
        if (DELTA_RULE) {
            mn_step_add(sums.known, smem.known[index % 2], quad);
#pragma unroll
            for (int c = 0; c < 4; c++) residual[c] -= sums.known[c];
        }
        const int column = at.tile * MN_STEP_COLUMNS;
        const int n_rows = WHOLE ? R : n_rows_of(at.to, at.tile);
        float *to = at.to + column;
#pragma unroll
        for (int r = 0; r < R; r++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                cells[r][c] = fmaf(rows.write[r], residual[c], cells[r][c]);
            }
            if (WHOLE || r < n_rows) mn_store<4>(to + r * step, 0, cells[r]);
        }
        if (threadIdx.x < MN_STEP_VECS && at.o && (WHOLE || column + quad < V)) {
            float dot = smem.dots[parity][0], out[4];
#pragma unroll
            for (int k = 1; k < MN_STEP_WARPS; k++) dot += smem.dots[parity][k];
            mn_step_add(sums.read, smem.read[index % 2], quad);
#pragma unroll
            for (int c = 0; c < 4; c++) out[c] = p.scale * fmaf(dot, residual[c], sums.read[c]);
            mn_store<4>(at.o, column, out);
        }
        value = next_value;
        at = next;
    }
}

template <typename T, int R, int STAGES, int BLOCKS, bool DELTA_RULE, bool WHOLE>
static int mn_matrix_step_of(const mn_matrix_params &p, cudaStream_t stream) {
    constexpr int bytes = mn_step_smem<R, STAGES>::bytes;
    const auto kernel = matrix_step_recurrent_kernel<T, R, STAGES, BLOCKS, DELTA_RULE, WHOLE>;
    const int64_t n_tiles = mn_ceil_div(p.call.V, MN_STEP_COLUMNS);
    const int64_t all = p.call.H * p.call.B * n_tiles;
    if (all == 0) return cudaSuccess;
    if (all > INT32_MAX / 2 || p.call.V > INT32_MAX / 2) return cudaErrorNotSupported;
    const cudaError_t code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess) return (int)code;
    const int64_t blocks = (int64_t)mn_device_props_current().processors * BLOCKS;
    return mn_launch_pdl(kernel, dim3((unsigned)mn_min(all, blocks)), MN_STEP_THREADS, bytes,
                         stream, p, (int)n_tiles, (int)all);
}

/* Far ahead where there is shared memory for it; where there is none even for a little, the scan
 * over tokens does the one. A processor keeps room for a block of products (gemm_rows.cu), which
 * another branch of the step may have. */
template <typename T, int R, bool DELTA_RULE>
static int mn_matrix_step_deep(const mn_matrix_params &p, cudaStream_t stream) {
    constexpr int STAGES = R > 8 ? 3 : 4, BLOCKS = R > 4 ? 1 : 3;
    const int room = mn_device_props_current().shared_bytes - (int)sizeof(mn_step_shared);
    const bool whole = p.call.K == R * MN_STEP_GROUPS && p.call.V % MN_STEP_COLUMNS == 0 &&
                       p.state0.data && p.state.data;
    if (mn_step_smem<R, STAGES>::bytes <= room) {
        return whole ? mn_matrix_step_of<T, R, STAGES, BLOCKS, DELTA_RULE, true>(p, stream)
                     : mn_matrix_step_of<T, R, STAGES, BLOCKS, DELTA_RULE, false>(p, stream);
    }
    if (mn_step_smem<R, 2>::bytes > room) return mn_matrix_forward<DELTA_RULE>(p, stream);
    return mn_matrix_step_of<T, R, 2, 1, DELTA_RULE, false>(p, stream);
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
