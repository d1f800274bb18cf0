/* few_recall.cuh - the recurrence of a matrix memory for one token as a stage (kernels/few.h).
 *
 *   S' = diag(exp g) S;  r = v - S'^T e;  S = S' + w r';  o = scale S'^T q + scale (q.w) r
 *
 * All that needs a sum over rows of the state is summed at once: S'^T e, S'^T q and q.w. A block
 * has eight columns of one memory, a thread four neighbours of them in every 128th row, which come
 * before the barrier in front of the stage. Each block normalises queries and keys for itself where
 * that is part of the stage. */
#ifndef MN_KERNELS_CUDA_FEW_RECALL_CUH
#define MN_KERNELS_CUDA_FEW_RECALL_CUH

#include "kernels/cuda/few_stage.cuh"

enum { MN_FEW_GROUPS = MN_FEW_THREADS / 2 };    // rows that the threads have at once

/* Tile i: columns of head h of sequence n, and the state there. */
struct mn_few_tile {
    int n, h, column;

    __device__ mn_few_tile(const mn_few_memory_at &p, int i) {
        const int tiles = p.V / MN_FEW_TILE;
        h = i / tiles % p.H;
        n = i / tiles / p.H;
        column = i % tiles * MN_FEW_TILE + threadIdx.x % 2 * 4;
    }

    __device__ int64_t at(const mn_few_memory_at &p, int row) const {
        return row * (int64_t)p.V + column;
    }
};

__device__ inline int mn_few_tiles(const mn_few_memory_at &p) {
    return p.V / MN_FEW_TILE * p.H * p.B;
}

/* Asks the second cache for the block's first tile. */
__device__ inline void mn_few_ask_state(const mn_few_memory_at &p) {
    if ((int)blockIdx.x >= mn_few_tiles(p) || !p.state0.data) return;
    const mn_few_tile tile(p, blockIdx.x);
    const float *from = mn_row<float>(p.state0, tile.n, 0, tile.h);
#pragma unroll 1
    for (int row = threadIdx.x / 2; row < p.K; row += MN_FEW_GROUPS) {
        if (threadIdx.x % 2 == 0) mn_few_ask_line(from + tile.at(p, row));
    }
}

/* Asks for it, to where a thread's pieces of weights go otherwise. */
__device__ inline void mn_few_begin_state(mn_few_block &room, const mn_few_memory_at &p) {
    if ((int)blockIdx.x >= mn_few_tiles(p)) return;
    const mn_few_tile tile(p, blockIdx.x);
    const float *from = mn_row<float>(p.state0, tile.n, 0, tile.h);
    uint4(*to)[MN_FEW_THREADS] = &room.ring[0][0];
#pragma unroll 1
    for (int i = 0; i < MN_FEW_DEEP; i++) {
        const int row = threadIdx.x / 2 + i * MN_FEW_GROUPS;
        if (from && row < p.K) mn_few_bring(&to[i][threadIdx.x], from + tile.at(p, row), true);
    }
}

/* 1 / length; what is rounded to bf16 takes the hardware's approximate root. */
template <typename T>
__device__ inline float mn_few_unit(const mn_few_job &job, float squares) {
    const bool root = job.kind == MN_FEW_L2_NORM && job.f == MN_FEW_ROOT;
    return sizeof(T) == 2 && root ? rsqrtf(squares + job.scale) : mn_few_inverse(job, squares);
}

/* Rows of queries (0) or keys (1), normalised, to shared memory; a warp has a row. */
template <typename T>
__device__ inline void mn_few_fronts(T *rows, const mn_few_memory_at &p) {
    constexpr int HALF = MN_FEW_WARPS / 2;
    const int lane = threadIdx.x % 32, n_rows = p.B * p.H, front = threadIdx.x / 32 / HALF;
    const mn_few_job &job = p.front[front];
    if (!(p.fronts >> front & 1)) return;
#pragma unroll 1
    for (int row = threadIdx.x / 32 % HALF; row < n_rows; row += HALF) {
        const bool weighted = job.kind != MN_FEW_L2_NORM;
        const T *from = (const T *)job.side[0].data + row * p.K;
        const T *weight = weighted ? (const T *)job.side[1].data : nullptr;
        T *to = rows + (front * n_rows + row) * p.K;
        T *out = (T *)job.side[weighted ? 2 : 1].data + row * p.K;
        float sum = 0.0f;
        for (int at = lane * 4; at < p.K; at += 128) {
            float x[4];
            mn_load<4>(x, from, at);
#pragma unroll
            for (int j = 0; j < 4; j++) sum = fmaf(x[j], x[j], sum);
        }
        const float r = mn_few_unit<T>(job, mn_warp_sum(sum));
        for (int at = lane * 4; at < p.K; at += 128) {
            float x[4], w[4];
            mn_load<4>(x, from, at);
            mn_load<4>(w, weight, at);
#pragma unroll
            for (int j = 0; j < 4; j++) x[j] = weighted ? x[j] * r * w[j] : x[j] * r;
            mn_store<4>(to, at, x);
            if (blockIdx.x == 0) mn_store<4>(out, at, x);
        }
    }
}

/* Sums over the rows of a column, of four neighbours: S'^T e, S'^T q; and q.w. In all threads. */
struct mn_few_sums {
    float at[9];

    __device__ void gather(float (*room)[2][9]) {
        const int quad = threadIdx.x % 2, lane = threadIdx.x % 32;
#pragma unroll
        for (int lanes = 16; lanes >= 2; lanes >>= 1) {
#pragma unroll
            for (int i = 0; i < 9; i++) at[i] += __shfl_xor_sync(0xffffffffu, at[i], lanes);
        }
        if (lane < 2) {
#pragma unroll
            for (int i = 0; i < 9; i++) room[threadIdx.x / 32][quad][i] = at[i];
        }
        __syncthreads();
        if (threadIdx.x < 18) {
            const int of = threadIdx.x / 9, i = threadIdx.x % 9;
            float sum = 0.0f;
#pragma unroll
            for (int warp = 0; warp < MN_FEW_WARPS; warp++) sum += room[warp][of][i];
            room[MN_FEW_WARPS][of][i] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 9; i++) at[i] = room[MN_FEW_WARPS][quad][i];
    }
};

/* What a tile reads beside queries and keys; not looked at before it is needed. */
template <typename T>
struct mn_few_fresh {
    mn_pack<T, 4> v;
    T beta, g;

    __device__ mn_few_fresh(const mn_few_memory_at &p, const mn_few_tile &tile) {
        const T *strength = mn_row<T>(p.beta, tile.n, 0, tile.h);
        const T *decay = mn_row<T>(p.g, tile.n, 0, tile.h);
        v = *(const mn_pack<T, 4> *)(mn_row<T>(p.v, tile.n, 0, tile.h) + tile.column);
        if (strength) beta = *strength;
        if (decay) g = *decay;
    }
};

template <typename T>
__device__ inline void mn_few_recall_tile(mn_few_block &room, const mn_few_memory_at &p,
                                          int index, const mn_few_tile &tile,
                                          const mn_few_fresh<T> &fresh, const T *rows) {
    const int n = tile.n, h = tile.h, first = threadIdx.x / 2;
    const float *from = mn_row<float>(p.state0, n, 0, h);
    float *to = mn_row<float>(p.state, n, 0, h);
    const int64_t made = (n * p.H + h) * (int64_t)p.K;
    const T *q = p.fronts & 1 ? rows + made : mn_row<T>(p.q, n, 0, h);
    const T *e = p.fronts & 2 ? rows + p.B * p.H * (int64_t)p.K + made : mn_row<T>(p.e, n, 0, h);
    const T *w = p.w.data ? mn_row<T>(p.w, n, 0, h) : e, *g = mn_row<T>(p.g, n, 0, h);
    const bool brought = p.settled && index == (int)blockIdx.x;
    const uint4(*ring)[MN_FEW_THREADS] = &room.ring[0][0];
    float S[MN_FEW_DEEP][4], write[MN_FEW_DEEP], residual[4];
    mn_few_sums sums = {};
    const float strength = p.beta.data ? mn_float(fresh.beta) : 1.0f;
    const float even = g ? expf(mn_float(fresh.g)) : 1.0f;    // unless it is by channels
#pragma unroll
    for (int r = 0; r < MN_FEW_DEEP; r++) {
        const int i = first + MN_FEW_GROUPS * r;
        if (r * MN_FEW_GROUPS >= p.K) continue;
        const bool inside = i < p.K;
        const float *state = inside ? from : nullptr;
        if (brought && state) mn_load<4>(S[r], (const float *)&ring[r][threadIdx.x], 0);
        else mn_load<4>(S[r], state, tile.at(p, i));
        write[r] = inside ? strength * mn_float(w[i]) : 0.0f;
        const float query = inside ? mn_float(q[i]) : 0.0f;
        const float erase = inside && p.erases ? mn_float(e[i]) : 0.0f;
        const bool own = p.decay == MN_DECAY_CHANNEL && inside && g;
        const float decay = own ? expf(mn_float(g[i])) : even;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            S[r][c] *= decay;
            sums.at[c] = fmaf(erase, S[r][c], sums.at[c]);
            sums.at[4 + c] = fmaf(query, S[r][c], sums.at[4 + c]);
        }
        sums.at[8] = fmaf(query, write[r], sums.at[8]);
    }
    sums.gather(room.gathered);
#pragma unroll
    for (int c = 0; c < 4; c++) residual[c] = mn_float(fresh.v.at[c]) - sums.at[c];
    T *o = mn_row<T>(p.o, n, 0, h);
    if (first == 0 && o) {
        float out[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            out[c] = p.scale * fmaf(sums.at[8], residual[c], sums.at[4 + c]);
        }
        mn_store<4>(o, tile.column, out);
    }
#pragma unroll
    for (int r = 0; r < MN_FEW_DEEP; r++) {
        const int i = first + MN_FEW_GROUPS * r;
        if (i >= p.K || !to) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) S[r][c] = fmaf(write[r], residual[c], S[r][c]);
        mn_store<4>(to, tile.at(p, i), S[r]);
    }
}

template <typename T>
__device__ __noinline__ void mn_few_memory_run(mn_few_block &room, const mn_few_memory_at &p) {
    T *rows = (T *)room.rows;
    if ((int)blockIdx.x >= mn_few_tiles(p)) return;
    const mn_few_tile first(p, blockIdx.x);
    const mn_few_fresh<T> fresh(p, first);
    if (p.fronts) mn_few_fronts(rows, p);
    if (p.fronts) __syncthreads();
    mn_few_recall_tile(room, p, blockIdx.x, first, fresh, (const T *)rows);
#pragma unroll 1
    for (int i = blockIdx.x + gridDim.x; i < mn_few_tiles(p); i += gridDim.x) {
        const mn_few_tile tile(p, i);
        const mn_few_fresh<T> more(p, tile);
        __syncthreads();
        mn_few_recall_tile(room, p, i, tile, more, (const T *)rows);
    }
}

#endif
