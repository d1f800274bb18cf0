/* mesa.cuh - the parts of mesa (see ref/mesa.c): work space, pairs of matrices, sums of chunks.
 *
 * A state is the pair (Hkk, Hkv) in rows of K + V numbers; so is its adjoint (A, B). Sequences are
 * cut into chunks of 64 tokens: what each chunk adds to the pair, all of them at once; a sum over
 * chunks in their order, which leaves the pair in front of each (behind each, for adjoints); then
 * all chunks at once again, token by token. */
#ifndef MN_KERNELS_CUDA_MESA_CUH
#define MN_KERNELS_CUDA_MESA_CUH

#include "kernels/cuda/mesa_solve.cuh"

enum { MN_MESA_CHUNK = 64, MN_MESA_PART = 16, MN_MESA_BLOCKS = 264 };

/* Counts of floats; of doubles for `matrices`. */
struct mn_mesa_extent {
    size_t pairs, falls, last, tokens, lam;
    size_t rooms, matrices;    // of all blocks, where shared memory is too small
    int64_t slots;
    size_t room_bytes;         // shared memory of a block
};

struct mn_mesa_work {
    double *matrices;
    float *pairs, *falls, *last;    // in front of chunks; (N,H) at the end
    float *adjoints;                // behind chunks
    float *x, *y;                   // (B T, H, K)
    float *lam;                     // (chunks, H, K): parts of its gradient
    float *rooms;                   // NULL: pairs of blocks are in shared memory
};

/* One chunk of one head. */
struct mn_mesa_place {
    int64_t slot, h, index;    // index: of the pair
    mn_tile_span tile;
};

__device__ inline mn_mesa_place mn_mesa_here(const mn_call &call, int64_t item) {
    mn_mesa_place at;
    at.index = item, at.slot = item / call.H, at.h = item % call.H;
    at.tile = mn_tile_at(call, MN_MESA_CHUNK, at.slot);
    return at;
}

/* A log decay, as sums take it; NaN stays. */
template <typename T>
__device__ inline float mn_mesa_log(const mn_mesa_args &p, int64_t b, int64_t t, int64_t h) {
    const float g = mn_float(*mn_row<T>(p.g, b, t, h));
    return g < -1e5f ? -1e5f : g;
}

/* What a chunk adds to its pair at its end or, `backward`, to the adjoint at its front, where the
 * decay of its first token counts, too. A block has a chunk of a head. */
template <typename T>
__global__ void __launch_bounds__(MN_MESA_THREADS)
mn_mesa_sums_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w, bool backward) {
    __shared__ float weight[MN_MESA_CHUNK];
    const mn_mesa_place at = mn_mesa_here(p.call, blockIdx.x);
    const int64_t K = p.call.K, V = p.call.V, width = K + V;
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0 + at.tile.first;
    const int count = (int)at.tile.n_rows;
    if (count == 0) return;
    if (threadIdx.x < count) {
        const int u = threadIdx.x;
        double sum = 0.0;
        for (int s = backward ? 0 : u + 1; s < (backward ? u + 1 : count); s++) {
            sum += (double)mn_mesa_log<T>(p, b, t0 + s, at.h);
        }
        const float beta = mn_float(*mn_row<T>(p.beta, b, t0 + u, at.h));
        weight[u] = expf((float)sum) * (backward ? 1.0f : beta);
        if (u == (backward ? count - 1 : 0)) {
            sum += backward ? 0.0 : (double)mn_mesa_log<T>(p, b, t0, at.h);
            w.falls[at.index] = expf((float)sum);
        }
    }
    __syncthreads();
    float *to = (backward ? w.adjoints : w.pairs) + at.index * K * width;
    for (int64_t cell = threadIdx.x; cell < K * width; cell += MN_MESA_THREADS) {
        const int64_t i = cell / width, j = cell % width;
        float sum = 0.0f;
        for (int u = 0; u < count; u++) {
            float product;
            if (!backward) {
                const T *k = mn_row<T>(p.k, b, t0 + u, at.h);
                const T *right = j < K ? k + j : mn_row<T>(p.v, b, t0 + u, at.h) + (j - K);
                product = mn_float(k[i]) * mn_float(*right);
            } else {
                const int64_t row = ((b * p.call.T + t0 + u) * p.call.H + at.h) * K;
                const float x = w.x[row + i], y = w.y[row + i];
                if (j < K) product = -0.5f * (x * w.y[row + j] + y * w.x[row + j]);
                else product = x * mn_get(mn_row<T>(p.cot.o, b, t0 + u, at.h), j - K);
            }
            sum = fmaf(weight[u], product, sum);
        }
        to[cell] = sum;
    }
}

/* Number `cell` of a given pair: the symmetric part of the first matrix, and the second. */
__device__ inline float mn_mesa_given(const float *kk, const float *kv, int64_t head, int64_t cell,
                                      int64_t K, int64_t V) {
    const int64_t i = cell / (K + V), j = cell % (K + V);
    if (j >= K) return mn_get(kv, (head * K + i) * V + j - K);
    return 0.5f * (mn_get(kk, (head * K + i) * K + j) + mn_get(kk, (head * K + j) * K + i));
}

__device__ inline void mn_mesa_put(float *kk, float *kv, int64_t head, int64_t cell, int64_t K,
                                   int64_t V, float x) {
    const int64_t i = cell / (K + V), j = cell % (K + V);
    if (j < K && kk) kk[(head * K + i) * K + j] = x;
    if (j >= K && kv) kv[(head * K + i) * V + j - K] = x;
}

/* Sums over the chunks of a sequence, in place: afterwards a pair is the one in front of its chunk
 * or, backward, behind it. A thread has a number of the pair. */
static __global__ void __launch_bounds__(MN_MESA_THREADS)
mn_mesa_carry_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w, bool backward) {
    const int64_t K = p.call.K, V = p.call.V, size = K * (K + V), H = p.call.H;
    const int64_t cell = blockIdx.x * (int64_t)MN_MESA_THREADS + threadIdx.x;
    const int64_t n = blockIdx.y / H, h = blockIdx.y % H, head = blockIdx.y;
    if (cell >= size) return;
    const mn_span span = mn_span_at(p.call, n);
    const int64_t chunks = (span.length + MN_MESA_CHUNK - 1) / MN_MESA_CHUNK;
    const int64_t slot0 = p.call.cu_seqlens
                              ? span.t0 / MN_MESA_CHUNK + n
                              : n * ((p.call.T + MN_MESA_CHUNK - 1) / MN_MESA_CHUNK);
    const float *kk = (const float *)(backward ? p.cot.hkk.data : p.hkk0.data);
    const float *kv = (const float *)(backward ? p.cot.hkv.data : p.hkv0.data);
    float x = mn_mesa_given(kk, kv, head, cell, K, V);
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t index = (slot0 + (backward ? chunks - 1 - i : i)) * H + h;
        float *at = (backward ? w.adjoints : w.pairs) + index * size + cell;
        const float added = *at;
        *at = x;
        x = fmaf(w.falls[index], x, added);
    }
    if (backward) {
        mn_mesa_put((float *)p.grad.hkk0.data, (float *)p.grad.hkv0.data, head, cell, K, V, x);
        return;
    }
    w.last[head * size + cell] = x;
}

/* The pairs at the end; in a kernel of its own, as they may lie where the first ones did. */
static __global__ void __launch_bounds__(MN_MESA_THREADS)
mn_mesa_put_kernel(const __grid_constant__ mn_mesa_args p, const float *last) {
    const int64_t K = p.call.K, V = p.call.V, size = K * (K + V), head = blockIdx.y;
    const int64_t cell = blockIdx.x * (int64_t)MN_MESA_THREADS + threadIdx.x;
    if (cell >= size) return;
    mn_mesa_put((float *)p.hkk.data, (float *)p.hkv.data, head, cell, K, V,
                last[head * size + cell]);
}

/* out[j] = sum over rows i < K of x_i P_ij, for `width` columns of rows of `pitch`. All threads
 * call; `room` has as many numbers as threads. Barriers on both sides. */
__device__ inline void mn_mesa_columns(float *out, const float *P, int64_t pitch, int64_t width,
                                       const float *x, int64_t K, float *room) {
    const int lanes = (int)min((width + 31) / 32 * 32, (int64_t)MN_MESA_THREADS);
    const int teams = MN_MESA_THREADS / lanes, team = threadIdx.x / lanes;
    for (int64_t j0 = 0; j0 < width; j0 += lanes) {
        const int64_t j = j0 + threadIdx.x % lanes;
        float sum = 0.0f;
        for (int64_t i = team; i < K && j < width && team < teams; i += teams) {
            sum = fmaf(x[i], P[i * pitch + j], sum);
        }
        room[threadIdx.x] = sum;
        __syncthreads();
        if (team == 0 && j < width) {
            for (int other = 1; other < teams; other++) sum += room[other * lanes + threadIdx.x];
            out[j] = sum;
        }
        __syncthreads();
    }
}

/* out[i] = sum over columns j < width of P_ij x_j, for K rows; a warp has a row at a time. A
 * barrier follows. */
__device__ inline void mn_mesa_rows(float *out, const float *P, int64_t pitch, int64_t width,
                                    const float *x, int64_t K) {
    for (int64_t i = threadIdx.x / 32; i < K; i += MN_MESA_THREADS / 32) {
        float sum = 0.0f;
        for (int64_t j = threadIdx.x % 32; j < width; j += 32) {
            sum = fmaf(P[i * pitch + j], x[j], sum);
        }
        sum = mn_warp_sum(sum);
        if (threadIdx.x % 32 == 0) out[i] = sum;
    }
    __syncthreads();
}

#endif
