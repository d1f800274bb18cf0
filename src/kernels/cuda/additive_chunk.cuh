/* additive_chunk.cuh - additive forward over chunks of 64 tokens by tensor cores, in bf16, for
 * decays that a head's channels share (see docs/mixers.md, "Chunked form").
 *
 *   P_ts = q_t.k_s exp(G_t - G_s), s <= t     O = scale (exp(G_t) q_t S + P V)
 *   S <- exp(G_L) S + K'(exp(G_L - G) V)      G: running sums of g in the chunk, in double
 *
 * A block has 32 value columns of one head of one sequence and walks its chunks, its part of the
 * state in shared memory in float32. Products take bf16 and sum in float32. Exponents are
 * differences of G from a later token to an earlier one, so for g <= 0 nothing overflows. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_CHUNK_CUH
#define MN_KERNELS_CUDA_ADDITIVE_CHUNK_CUH

#include <mma.h>
#include <type_traits>

#include "kernels/cuda/common.cuh"

enum {
    MN_CHUNK = 64,            // tokens
    MN_CHUNK_COLUMNS = 32,    // value columns of a block
    MN_CHUNK_THREADS = 256,
    MN_CHUNK_V = 40,          // lengths of rows in shared memory: in bf16,
    MN_CHUNK_P = 72,
    MN_CHUNK_S = 36,          // and in float
    MN_CHUNK_SCORES = 68,
};

template <int K>
struct mn_chunk_room {
    static constexpr int ld = K + 8;
    alignas(128) mn_bf16 q[MN_CHUNK * ld];
    alignas(128) mn_bf16 k[MN_CHUNK * ld];
    alignas(128) mn_bf16 v[MN_CHUNK * MN_CHUNK_V];
    alignas(128) mn_bf16 v_end[MN_CHUNK * MN_CHUNK_V];    // decayed to the end of the chunk
    alignas(128) mn_bf16 s_bf16[K * MN_CHUNK_V];
    alignas(128) mn_bf16 p[MN_CHUNK * MN_CHUNK_P];
    alignas(128) float s[K * MN_CHUNK_S];
    alignas(128) float wide[2 * MN_CHUNK * MN_CHUNK_S];    // scores, then both parts of o
    alignas(128) double G[MN_CHUNK];
};

/* A product of 16 x 16 tiles: the rows of `a` with the columns of `b`, over `depth`. */
using mn_chunk_sum = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;

template <typename A, typename B>
__device__ inline void mn_chunk_product(mn_chunk_sum &sum, const mn_bf16 *a, int lda,
                                        const mn_bf16 *b, int ldb, int depth) {
    using namespace nvcuda::wmma;
    constexpr bool turned_a = std::is_same<A, col_major>::value;
    constexpr bool turned_b = std::is_same<B, col_major>::value;
    for (int i = 0; i < depth; i += 16) {
        fragment<matrix_a, 16, 16, 16, mn_bf16, A> from_a;
        fragment<matrix_b, 16, 16, 16, mn_bf16, B> from_b;
        load_matrix_sync(from_a, a + (turned_a ? i * lda : i), lda);
        load_matrix_sync(from_b, b + (turned_b ? i : i * ldb), ldb);
        mma_sync(sum, from_a, from_b, sum);
    }
}

/* `count` rows of a view from token t on, `width` columns from column0 on, into rows of `ld`;
 * zeros beyond. Columns come in packs of eight. */
__device__ inline void mn_chunk_fetch(mn_bf16 *to, int ld, int padded, const mn_in &view,
                                      const mn_span &span, int64_t h, int64_t t, int count,
                                      int64_t column0, int64_t width) {
    const int packs = padded / 8;
    for (int k = threadIdx.x; k < MN_CHUNK * packs; k += MN_CHUNK_THREADS) {
        const int token = k / packs, j = k % packs * 8;
        mn_pack<mn_bf16, 8> pack = {};
        if (token < count && column0 + j < width) {
            pack = *(const mn_pack<mn_bf16, 8> *)(
                mn_row<mn_bf16>(view, span.b, span.t0 + t + token, h) + column0 + j);
        }
        *(mn_pack<mn_bf16, 8> *)(to + token * ld + j) = pack;
    }
}

/* G of the chunk; beyond `count` it stays level. The first warp calls. */
__device__ inline void mn_chunk_levels(double *G, const mn_additive_args &p, const mn_span &span,
                                       int64_t h, int64_t t, int count) {
    const int lane = threadIdx.x % 32;
    double before = 0.0;
    for (int half = 0; half < MN_CHUNK; half += 32) {
        const int token = half + lane;
        const mn_bf16 *g = token < count ? mn_row<mn_bf16>(p.g, span.b, span.t0 + t + token, h)
                                         : nullptr;
        double sum = g ? (double)mn_float(*g) : 0.0;
        for (int step = 1; step < 32; step <<= 1) {
            const double other = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += other;
        }
        G[token] = before + sum;
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
}

/* Scores by tiles on and below the diagonal; the state in bf16 and decayed over the chunk; values
 * decayed to its end. */
template <int K>
__device__ void mn_chunk_scores(mn_chunk_room<K> &room) {
    using namespace nvcuda::wmma;
    constexpr int ld = mn_chunk_room<K>::ld;
    for (int tile = threadIdx.x / 32; tile < 16; tile += MN_CHUNK_THREADS / 32) {
        const int row = tile / 4 * 16, column = tile % 4 * 16;
        if (column > row) continue;
        mn_chunk_sum sum;
        fill_fragment(sum, 0.0f);
        mn_chunk_product<row_major, col_major>(sum, room.q + row * ld, ld, room.k + column * ld, ld,
                                               K);
        store_matrix_sync(room.wide + row * MN_CHUNK_SCORES + column, sum, MN_CHUNK_SCORES,
                          mem_row_major);
    }
    const double end = room.G[MN_CHUNK - 1];
    const float decay = expf((float)end);
    for (int k = threadIdx.x; k < K * MN_CHUNK_COLUMNS; k += MN_CHUNK_THREADS) {
        const int i = k / MN_CHUNK_COLUMNS, j = k % MN_CHUNK_COLUMNS;
        const float s = room.s[i * MN_CHUNK_S + j];
        mn_put(room.s_bf16 + i * MN_CHUNK_V + j, s);
        room.s[i * MN_CHUNK_S + j] = s * decay;
    }
    for (int k = threadIdx.x; k < MN_CHUNK * MN_CHUNK_COLUMNS; k += MN_CHUNK_THREADS) {
        const int s = k / MN_CHUNK_COLUMNS, j = s * MN_CHUNK_V + k % MN_CHUNK_COLUMNS;
        mn_put(room.v_end + j, mn_float(room.v[j]) * expf((float)(end - room.G[s])));
    }
}

/* P from the scores, and what the chunk adds to the state. */
template <int K>
__device__ void mn_chunk_write(mn_chunk_room<K> &room) {
    using namespace nvcuda::wmma;
    constexpr int ld = mn_chunk_room<K>::ld;
    for (int k = threadIdx.x; k < MN_CHUNK * MN_CHUNK; k += MN_CHUNK_THREADS) {
        const int t = k / MN_CHUNK, s = k % MN_CHUNK;
        float p = 0.0f;
        if (s <= t) p = room.wide[t * MN_CHUNK_SCORES + s] * expf((float)(room.G[t] - room.G[s]));
        mn_put(room.p + t * MN_CHUNK_P + s, p);
    }
    for (int tile = threadIdx.x / 32; tile < K / 8; tile += MN_CHUNK_THREADS / 32) {
        const int row = tile / 2 * 16, column = tile % 2 * 16;
        float *at = room.s + row * MN_CHUNK_S + column;
        mn_chunk_sum sum;
        load_matrix_sync(sum, at, MN_CHUNK_S, mem_row_major);
        mn_chunk_product<col_major, row_major>(sum, room.k + row, ld, room.v_end + column,
                                               MN_CHUNK_V, MN_CHUNK);
        store_matrix_sync(at, sum, MN_CHUNK_S, mem_row_major);
    }
}

/* q S and P V, a tile of both for each warp. */
template <int K>
__device__ void mn_chunk_read(mn_chunk_room<K> &room) {
    using namespace nvcuda::wmma;
    constexpr int ld = mn_chunk_room<K>::ld;
    const int warp = threadIdx.x / 32, row = warp / 2 * 16, column = warp % 2 * 16;
    float *at = room.wide + row * MN_CHUNK_S + column;
    mn_chunk_sum before, inside;
    fill_fragment(before, 0.0f);
    fill_fragment(inside, 0.0f);
    mn_chunk_product<row_major, row_major>(before, room.q + row * ld, ld, room.s_bf16 + column,
                                           MN_CHUNK_V, K);
    mn_chunk_product<row_major, row_major>(inside, room.p + row * MN_CHUNK_P, MN_CHUNK_P,
                                           room.v + column, MN_CHUNK_V, row + 16);
    store_matrix_sync(at, before, MN_CHUNK_S, mem_row_major);
    store_matrix_sync(at + MN_CHUNK * MN_CHUNK_S, inside, MN_CHUNK_S, mem_row_major);
}

template <int K>
__device__ void mn_chunk_put(const mn_chunk_room<K> &room, const mn_additive_args &p,
                             const mn_span &span, int64_t h, int64_t t, int count,
                             int64_t column0) {
    const float scale = (float)p.scale;
    for (int k = threadIdx.x; k < count * MN_CHUNK_COLUMNS; k += MN_CHUNK_THREADS) {
        const int token = k / MN_CHUNK_COLUMNS, j = k % MN_CHUNK_COLUMNS;
        mn_bf16 *o = mn_row<mn_bf16>(p.o, span.b, span.t0 + t + token, h);
        const float *parts = room.wide + token * MN_CHUNK_S + j;
        const float sum = fmaf(expf((float)room.G[token]), parts[0], parts[MN_CHUNK * MN_CHUNK_S]);
        if (o && column0 + j < p.call.V) mn_put(o + column0 + j, scale * sum);
    }
}

template <int K>
__global__ void __launch_bounds__(MN_CHUNK_THREADS, 2)
mn_additive_chunk_kernel(const __grid_constant__ mn_additive_args p, int64_t n_tiles) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_chunk_room<K> &room = *(mn_chunk_room<K> *)bytes;
    const int64_t column0 = blockIdx.x % n_tiles * MN_CHUNK_COLUMNS;
    const int64_t h = blockIdx.x / n_tiles % p.call.H, n = blockIdx.x / n_tiles / p.call.H;
    const mn_span span = mn_span_at(p.call, n);
    const int64_t V = p.call.V;
    const float *first = mn_row<float>(p.state0, n, 0, h);
    float *last = mn_row<float>(p.state, n, 0, h);
    for (int k = threadIdx.x; k < K * MN_CHUNK_COLUMNS; k += MN_CHUNK_THREADS) {
        const int64_t i = k / MN_CHUNK_COLUMNS, j = k % MN_CHUNK_COLUMNS;
        const bool inside = i < p.call.K && column0 + j < V;
        room.s[i * MN_CHUNK_S + j] = inside ? mn_get(first, i * V + column0 + j) : 0.0f;
    }
    for (int64_t t = 0; t < span.length; t += MN_CHUNK) {
        const int count = (int)min((int64_t)MN_CHUNK, span.length - t);
        mn_chunk_fetch(room.q, room.ld, K, p.q, span, h, t, count, 0, p.call.K);
        mn_chunk_fetch(room.k, room.ld, K, p.k, span, h, t, count, 0, p.call.K);
        mn_chunk_fetch(room.v, MN_CHUNK_V, MN_CHUNK_COLUMNS, p.v, span, h, t, count, column0, V);
        __syncthreads();    // the levels of the chunk before are read by mn_chunk_put
        if (threadIdx.x < 32) mn_chunk_levels(room.G, p, span, h, t, count);
        __syncthreads();
        mn_chunk_scores<K>(room);
        __syncthreads();
        mn_chunk_write<K>(room);
        __syncthreads();
        mn_chunk_read<K>(room);
        __syncthreads();
        mn_chunk_put<K>(room, p, span, h, t, count, column0);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < K * MN_CHUNK_COLUMNS; k += MN_CHUNK_THREADS) {
        const int64_t i = k / MN_CHUNK_COLUMNS, j = k % MN_CHUNK_COLUMNS;
        const bool inside = last && i < p.call.K && column0 + j < V;
        if (inside) last[i * V + column0 + j] = room.s[i * MN_CHUNK_S + j];
    }
}

/* Whether rows of a view can be read in packs of eight. */
inline bool mn_chunk_packable(const mn_in &view) {
    bool whole = (uintptr_t)view.data % 16 == 0;
    for (int axis = 0; axis < 3; axis++) whole = whole && view.stride[axis] % 8 == 0;
    return whole;
}

/* Whether the kernel serves a call: its kind and sizes, never its length. In narrow memories tiles
 * would be mostly padding, and few columns average the roundings of P and S less. */
inline bool mn_additive_chunks(const mn_additive_args *p) {
    return p->call.dtype == MN_BF16 && p->decay != MN_DECAY_CHANNEL && p->call.K % 8 == 0 &&
           p->call.K >= 16 && p->call.K <= 128 && p->call.V % 8 == 0 && p->call.V >= 32 &&
           mn_chunk_packable(p->q) && mn_chunk_packable(p->k) && mn_chunk_packable(p->v);
}

template <int K>
static int mn_additive_chunk_forward(const mn_additive_args *p, cudaStream_t stream) {
    const int64_t n_tiles = mn_ceil_div(p->call.V, MN_CHUNK_COLUMNS);
    const int64_t blocks = n_tiles * p->call.H * mn_n_spans(p->call);
    const int bytes = (int)sizeof(mn_chunk_room<K>);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const cudaError_t code = cudaFuncSetAttribute(
        mn_additive_chunk_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess) return code;
    mn_additive_chunk_kernel<K>
        <<<(unsigned)blocks, MN_CHUNK_THREADS, bytes, stream>>>(*p, n_tiles);
    return mn_launched();
}

#endif
