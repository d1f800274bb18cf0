/* curvature_smem.cuh - curvature by blocks of eight warps on tiles in shared memory, for any
 * type and machine: what forward and backward share, and the sums of segments. */
#ifndef MN_KERNELS_CUDA_CURVATURE_CURVATURE_SMEM_CUH
#define MN_KERNELS_CUDA_CURVATURE_CURVATURE_SMEM_CUH

#include "kernels/cuda/curvature/curvature.cuh"

namespace mneme::curvature {

enum {
    MN_CURVE_THREADS = 256,
    MN_CURVE_WARPS = 8,
    MN_CURVE_PITCH = MN_CURVE_SLICE + MN_SMEM_TILE_PAD,
};

/* Chunks and who has which tile of a product, for keys of up to KP numbers; `down` tiles of 16 rows
 * make a chunk. */
template <typename T, int KP>
struct mn_curve_sizes {
    static constexpr int chunk = (sizeof(T) == 2 ? 64 : 32) / (KP == 256 ? 2 : 1);
    static constexpr int pitch = KP + MN_SMEM_TILE_PAD, score_pitch = chunk + MN_SMEM_TILE_PAD;
    static constexpr int down = chunk / 16, across = MN_CURVE_WARPS / down;
    static constexpr int columns = MN_CURVE_SLICE / across;
    static constexpr int state_n = KP == 64 ? 4 : 8;                  // tiles of R that a warp has
    static constexpr int state_across = MN_CURVE_SLICE / 8 / state_n;
    static constexpr int state_tiles = KP / 16 * state_across / MN_CURVE_WARPS;
};

/* mn_smem_tile_mma; in float32 sums of 32 products join the others at once, as what they make
 * cancels against its mean. */
template <mn_mma_trans A, mn_mma_trans B, int N>
__device__ inline void mn_curve_product(mn_tile_acc<N> &sum, const mn_bf16 *a, int lda,
                                        const mn_bf16 *b, int ldb, int depth) {
    mn_smem_tile_mma<A, B>(sum, a, lda, b, ldb, depth);
}

template <typename T, int N>
__device__ inline void mn_curve_join(mn_tile_acc<N> &sum, const mn_tile_acc<N> &part) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (sizeof(T) == 4) sum.at[n][j] += part.at[n][j];
        }
    }
}

template <mn_mma_trans A, mn_mma_trans B, int N>
__device__ inline void mn_curve_product(mn_tile_acc<N> &sum, const float *a, int lda,
                                        const float *b, int ldb, int depth) {
    for (int i = 0; i < depth; i += 32) {
        mn_tile_acc<N> part;
        part.clear();
        mn_smem_tile_mma<A, B>(part, a + (A == MN_NO_TRANS ? i : i * lda), lda,
                               b + (B == MN_NO_TRANS ? i * ldb : i), ldb, min(32, depth - i));
        mn_curve_join<float>(sum, part);
    }
}

/* sum += P K for 16 tokens' rows of P, from token row0 of the chunk on, which see tokens up to
 * their own. In float32 a chunk has no more tokens than sums that join the others at once. */
template <int N, typename T>
__device__ inline void mn_curve_product_earlier(mn_tile_acc<N> &sum, const T *P, int pitch,
                                                const T *k, int ldb, int row0) {
    mn_tile_acc<N> part;
    part.clear();
    mn_tile_acc<N> &to = sizeof(T) == 4 ? part : sum;
    mn_smem_tile_mma<MN_NO_TRANS, MN_NO_TRANS>(to, P, pitch, k, ldb, row0);
    mn_smem_tile_mma_causal<MN_NO_TRANS, MN_SEES_EARLIER>(to, P + row0, pitch, k + row0 * ldb,
                                                          ldb);
    mn_curve_join<T>(sum, part);
}

/* sum += P'X for tokens from row0 of the chunk on, which later ones, and they themselves, see. */
template <int N, typename T>
__device__ inline void mn_curve_product_later(mn_tile_acc<N> &sum, const T *P, int pitch,
                                              const T *x, int ldb, int depth) {
    mn_tile_acc<N> part;
    part.clear();
    mn_tile_acc<N> &to = sizeof(T) == 4 ? part : sum;
    mn_smem_tile_mma_causal<MN_TRANS, MN_SEES_LATER>(to, P, pitch, x, ldb);
    mn_smem_tile_mma<MN_TRANS, MN_NO_TRANS>(to, P + 16 * pitch, pitch, x + 16 * ldb, ldb,
                                            depth - 16);
    mn_curve_join<T>(sum, part);
}

/* ---- the part of a state that a warp holds --------------------------------------------------- */

template <typename T, int KP>
struct mn_curve_matrix {
    using z = mn_curve_sizes<T, KP>;
    mn_tile_acc<z::state_n> tile[z::state_tiles];

    __device__ inline int row0(int i) {
        return (threadIdx.x / 32 / z::state_across + i * (MN_CURVE_WARPS / z::state_across)) * 16;
    }

    __device__ inline int column0() {
        return threadIdx.x / 32 % z::state_across * z::state_n * 8;
    }

    template <typename F>
    __device__ void each(F use) {
#pragma unroll
        for (int i = 0; i < z::state_tiles; i++) {
            tile[i].each([&](float &x, int row, int column) {
                use(x, row0(i) + row, column0() + column);
            });
        }
    }

    /* += A'B over a chunk; B starts at the slice */
    __device__ void add(const T *a, const T *b) {
#pragma unroll
        for (int i = 0; i < z::state_tiles; i++) {
            mn_curve_product<MN_TRANS, MN_NO_TRANS>(tile[i], a + row0(i), z::pitch, b + column0(),
                                                  z::pitch, z::chunk);
        }
    }

    __device__ void put(T *to) {
#pragma unroll
        for (int i = 0; i < z::state_tiles; i++) {
            tile[i].pairs([&](const float *x, int row, int column) {
                T *at = to + (row0(i) + row) * MN_CURVE_PITCH + column0() + column;
                mn_store2(at, x[0], x[1]);
            });
        }
    }

    /* What `put` rounds away. */
    __device__ void put_rest(T *to) {
#pragma unroll
        for (int i = 0; i < z::state_tiles; i++) {
            tile[i].pairs([&](const float *x, int row, int column) {
                T *at = to + (row0(i) + row) * MN_CURVE_PITCH + column0() + column;
                mn_store2(at, mn_curve_rest<T>(x[0]), mn_curve_rest<T>(x[1]));
            });
        }
    }

    /* From a state of the caller (its symmetric part, `times` over) or from the sums in front. */
    __device__ void load(const float *given, const float *sums, float times, int64_t K, int first) {
        each([&](float &x, int i, int j) {
            const int64_t column = first + j;
            x = 0.0f;
            if (i >= K || column >= K) return;
            if (sums) x = sums[i * K + column];
            else if (given) x = times * (given[i * K + column] + given[column * K + i]);
        });
    }

    __device__ void store(float *to, float times, int64_t K, int first) {
        each([&](float &x, int i, int j) {
            if (to && i < K && first + j < K) to[i * K + first + j] = times * x;
        });
    }
};

/* sum over a chunk's tokens of column i of a tile in shared memory */
template <typename T>
__device__ inline float mn_curve_column_sum(const T *smem_tile, int pitch, int chunk, int i) {
    float sum = 0.0f;
#pragma unroll 32
    for (int t = 0; t < chunk; t++) sum += mn_float(smem_tile[t * pitch + i]);
    return sum;
}

/* tril(X K') of 16 rows, in registers; the sums of its rows go to `sums`. */
template <typename T, int KP>
__device__ inline void mn_curve_scores(mn_tile_acc<mn_curve_sizes<T, KP>::chunk / 8> &sum,
                                       float *sums, const T *x, const T *k, int row0) {
    using z = mn_curve_sizes<T, KP>;
    float part[2] = { 0.0f, 0.0f };
    sum.clear();
    mn_curve_product<MN_NO_TRANS, MN_TRANS>(sum, x + row0 * z::pitch, z::pitch, k, z::pitch, KP);
    sum.each([&](float &p, int row, int column) {
        if (column > row0 + row) p = 0.0f;
        if (row < 8) part[0] += p;
        else part[1] += p;
    });
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 1);
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 2);
        if (lane % 4 == 0) sums[row0 + lane / 4 + 8 * i] = part[i];
    }
}

/* Scores less their row's mean, still lower triangular; and in `low` what rounding leaves. */
template <typename T, int KP>
__device__ inline void mn_curve_put_scores(T *to,
                                           mn_tile_acc<mn_curve_sizes<T, KP>::chunk / 8> &sum,
                                           const float *mean, int row0, T *low = NULL) {
    using z = mn_curve_sizes<T, KP>;
    sum.pairs([&](const float *x, int row, int column) {
        const int t = row0 + row, at = t * z::score_pitch + column;
        const float left = column > t ? 0.0f : x[0] - mean[t];
        const float right = column + 1 > t ? 0.0f : x[1] - mean[t];
        mn_store2(to + at, left, right);
        if (low) mn_store2(low + at, mn_curve_rest<T>(left), mn_curve_rest<T>(right));
    });
}

/* s.x of tokens first, first + step, ... by one warp each, four of them at a time */
template <typename T, int KP>
__device__ inline void mn_curve_dots(float *to, const float *s, const T *x, int first, int step) {
    using z = mn_curve_sizes<T, KP>;
    const int lane = threadIdx.x % 32;
    for (int t = first; t < z::chunk; t += 4 * step) {
        float sum[4] = {};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const T *row = x + min(t + n * step, z::chunk - 1) * z::pitch;
#pragma unroll
            for (int i = 0; i < KP; i += 32) {
                sum[n] = fmaf(s[i + lane], mn_float(row[i + lane]), sum[n]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++) sum[n] = mn_warp_sum(sum[n]);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (lane == n && t + n * step < z::chunk) to[t + n * step] = sum[n];
        }
    }
}

/* Y of the warp's tile: += X R + scores K */
template <typename T, int KP>
__device__ inline void mn_curve_apply(mn_tile_acc<mn_curve_sizes<T, KP>::columns / 8> &Y,
                                      const T *x, const T *R, const T *P, const T *k,
                                      int column0) {
    using z = mn_curve_sizes<T, KP>;
    const int row0 = threadIdx.x / 32 % z::down * 16;
    const int column = threadIdx.x / 32 / z::down * z::columns;
    mn_curve_product<MN_NO_TRANS, MN_NO_TRANS>(Y, x + row0 * z::pitch, z::pitch, R + column,
                                         MN_CURVE_PITCH, KP);
    mn_curve_product_earlier(Y, P + row0 * z::score_pitch, z::score_pitch, k + column0 + column,
                             z::pitch, row0);
}

/* ---- what segments add ----------------------------------------------------------------------- */

template <typename T, int KP>
struct mn_curve_moment_smem {
    using z = mn_curve_sizes<T, KP>;
    alignas(16) T a[z::chunk * z::pitch];
    alignas(16) T b[z::chunk * z::pitch];
    float mean[2][z::chunk], weight[z::chunk];
};

/* -gamma / n of a token, the next behind `seen` others */
__device__ inline float mn_curve_weight(float gamma, double seen) {
    return -gamma / (float)(seen + 1.0);
}

/* d becomes z, its rows by their tokens' weights */
template <typename T, int KP>
__device__ inline void mn_curve_weigh(T *d, const float *weight, int count) {
    using z = mn_curve_sizes<T, KP>;
#pragma unroll 4
    for (int i = threadIdx.x; i < count * (KP / 2); i += MN_CURVE_THREADS) {
        const int token = i / (KP / 2);
        T *at = d + token * z::pitch + i % (KP / 2) * 2;
        const float2 x = mn_load2(at);
        mn_store2(at, weight[token] * x.x, weight[token] * x.y);
    }
}

/* What a chunk's tokens add to e of a column: z and q are the column's first numbers. */
template <typename T>
__device__ inline float mn_curve_weighted(float e, const T *z, const T *q, int pitch,
                                          const float *mean, const float *mean_z, int count) {
#pragma unroll 8
    for (int i = 0; i < count; i++) {
        e = fmaf(-mean[i], mn_float(z[i * pitch]), e);
        e = fmaf(-mean_z[i], mn_float(q[i * pitch]), e);
    }
    return e;
}

/* K'K and the sum of k; or, going back, Z'Q + Q'Z and e, for which `means` are there. */
template <typename T, int KP, bool BACK>
__global__ void __launch_bounds__(MN_CURVE_THREADS, KP == 256 ? 1 : 2)
mn_curve_moments_kernel(const __grid_constant__ mn_curvature_args p, float *states,
                        const float *means, mn_curve_cut cut) {
    using z = mn_curve_sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_curve_moment_smem<T, KP> &smem = *(mn_curve_moment_smem<T, KP> *)bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    const int64_t K = p.call.K;
    if (!at.s.there || (BACK ? at.s.first == 0 : at.s.last)) return;
    float *state = states + (at.s.slot * p.call.H + at.h) * mn_curve_state_size(K), sum = 0.0f;
    const double before = mn_curve_before(p, at.s.n);
    mn_curve_matrix<T, KP> R;
#pragma unroll
    for (int i = 0; i < z::state_tiles; i++) R.tile[i].clear();
    for (int start = 0; start < at.s.rows; start += z::chunk) {
        const int count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        __syncthreads();
        const int next = min(z::chunk, at.s.rows - start - z::chunk);
        mn_smem_tile_load(smem.a, z::pitch, z::chunk, KP, BACK ? p.cot.qt : p.k, at.s.span, at.h, t,
                       count, K, cut.packs);
        mn_smem_tile_prefetch<T>(BACK ? p.cot.qt : p.k, at.s.span, at.h, t + z::chunk, next, K);
        if (BACK) {
            mn_smem_tile_load(smem.b, z::pitch, z::chunk, KP, p.q, at.s.span, at.h, t, count, K,
                           cut.packs);
            mn_smem_tile_prefetch<T>(p.q, at.s.span, at.h, t + z::chunk, next, K);
            const int i = threadIdx.x;
            if (i < count) {
                const int64_t row = mn_curve_row_of(p.call, at, t + i);
                const float each = (float)(1.0 / (before + (double)(t + i + 1)));
                const float gamma = mn_float(
                    *mn_row<T>(p.gamma, at.s.span.b, at.s.span.t0 + t + i, at.h));
                smem.mean[0][i] = means[2 * row];
                smem.mean[1][i] = -gamma * each * means[2 * row + 1];
                smem.weight[i] = mn_curve_weight(gamma, before + (double)(t + i));
            }
            __syncthreads();
            mn_curve_weigh<T, KP>(smem.a, smem.weight, count);
        }
        __syncthreads();
        const int own = at.column0 + (int)threadIdx.x;
        if (BACK) {
            R.add(smem.a, smem.b + at.column0);
            R.add(smem.b, smem.a + at.column0);
            if (threadIdx.x < MN_CURVE_SLICE) {
                sum = mn_curve_weighted(sum, smem.a + own, smem.b + own, z::pitch, smem.mean[0],
                                        smem.mean[1], count);
            }
        } else {
            R.add(smem.a, smem.a + at.column0);
            if (threadIdx.x < MN_CURVE_SLICE) {
                sum += mn_curve_column_sum(smem.a, z::pitch, z::chunk, own);
            }
        }
    }
    R.store(state, 1.0f, K, at.column0);
    const int64_t column = at.column0 + threadIdx.x;
    if (threadIdx.x < MN_CURVE_SLICE && column < K) state[K * K + column] = sum;
}

enum { MN_CURVE_SUMS_AHEAD = 4 };    // segments whose sums a thread loads at once

/* Sums up to and with each segment but the last, in place, from the caller's state on; going back,
 * down to and with each but the first. A block has numbers of one head, a thread one of them; all
 * in 32 bits, as a division of 64 takes longer than the sums. */
template <bool BACK>
__global__ void __launch_bounds__(MN_CURVE_THREADS)
mn_curve_scan_kernel(const __grid_constant__ mn_curvature_args p, float *states, int segment) {
    const unsigned K = (unsigned)p.call.K, size = (K + 1) * K, H = (unsigned)p.call.H;
    const unsigned parts = (size + MN_CURVE_THREADS - 1) / MN_CURVE_THREADS;
    const unsigned element = blockIdx.x % parts * MN_CURVE_THREADS + threadIdx.x;
    const unsigned head = blockIdx.x / parts, h = head % H, n = head / H;
    if (element >= size) return;
    const mn_span span = mn_span_at(p.call, n);
    const unsigned i = element / K, j = element % K;
    const int count = (int)((unsigned)(span.length + segment - 1) / (unsigned)segment);
    const int64_t slot0 = p.call.cu_seqlens ? span.t0 / segment + n : (int64_t)n * max(count, 1);
    const float *matrix = mn_row<float>(BACK ? p.cot.kk : p.kk0, n, 0, h);
    const float *vector = mn_row<float>(BACK ? p.cot.ks : p.ks0, n, 0, h);
    float sum = mn_get(vector, j);
    if (i < K) {
        sum = (BACK ? 1.0f : 0.5f) * (mn_get(matrix, i * K + j) + mn_get(matrix, j * K + i));
    }
    const int64_t step = (BACK ? -1 : 1) * (int64_t)H * size;
    float *at = states + ((slot0 + (BACK ? count - 1 : 0)) * H + h) * size + element;
    for (int s = 0; s + 1 < count; s += MN_CURVE_SUMS_AHEAD, at += MN_CURVE_SUMS_AHEAD * step) {
        float own[MN_CURVE_SUMS_AHEAD];
#pragma unroll
        for (int u = 0; u < MN_CURVE_SUMS_AHEAD; u++) {
            own[u] = s + u + 1 < count ? at[u * step] : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < MN_CURVE_SUMS_AHEAD; u++) {
            sum += own[u];
            if (s + u + 1 < count) at[u * step] = sum;
        }
    }
}

template <bool BACK>
inline int mn_curve_scan(const mn_curvature_args *p, float *states, int64_t segment,
                         cudaStream_t on) {
    const int64_t parts = mn_ceil_div(mn_curve_state_size(p->call.K), MN_CURVE_THREADS);
    const int64_t blocks = parts * p->call.H * mn_n_spans(p->call);
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    mn_curve_scan_kernel<BACK><<<(unsigned)blocks, MN_CURVE_THREADS, 0, on>>>(*p, states,
                                                                              (int)segment);
    return mn_launch_status();
}

/* The sums of all segments, if there can be more than one of a sequence. */
template <typename T, int KP, bool BACK>
inline int mn_curve_add_up(const mn_curvature_args *p, float *states, const float *means,
                           const mn_curve_cut &cut, cudaStream_t on) {
    const mn_call &c = p->call;
    if (c.T <= cut.segment) return cudaSuccess;
    const int code = mn_curve_start(mn_curve_moments_kernel<T, KP, BACK>, MN_CURVE_THREADS,
                                    sizeof(mn_curve_moment_smem<T, KP>), c, cut, on, *p, states,
                                    means);
    return code == cudaSuccess ? mn_curve_scan<BACK>(p, states, cut.segment, on) : code;
}

/* Tokens of a segment of bf16 calls for each slice of a head, of which 16 to 32 count: enough
 * blocks of one long sequence for a GPU, and of many heads few sums of segments. */
enum { MN_CURVE_SEGMENT_SHARE = 32 };

/* How a call is cut into tiles: by sizes that a sequence shares with all others. */
template <typename T>
inline mn_curve_cut mn_curve_smem_tile_cut(const mn_curvature_args *p) {
    const int64_t K = p->call.K;
    const int64_t heads = mn_max(mn_min(mn_curve_slices(K) * p->call.H, 32), 16);
    const int64_t segment = sizeof(T) == 2 ? heads * (int64_t)MN_CURVE_SEGMENT_SHARE
                                           : (int64_t)MN_CURVE_SEGMENT;
    const bool packs = mn_smem_tile_vec_ok<T>(p->q, K) && mn_smem_tile_vec_ok<T>(p->k, K) &&
                       mn_smem_tile_vec_ok<T>(p->cot.qt, K);
    return { segment, mn_curve_slices(K), mn_curve_slices(K), packs };
}

/* Calls function<T, KP> for a call's type and keys; `arguments` in parentheses. */
#define MN_CURVE_BY_WIDTH(function, T, K, arguments)                                               \
    do {                                                                                           \
        if ((K) <= 64) return function<T, 64> arguments;                                           \
        if ((K) <= 128) return function<T, 128> arguments;                                         \
        return function<T, 256> arguments;                                                         \
    } while (0)

}    // namespace mneme::curvature

#endif
