/* attention_strip_mma.cuh - products of attention_strip.cuh by tensor cores, for bf16 whose rows
 * can be read in packs of eight. Weights of a strip go into products rounded to bf16, as those of
 * attention_fwd_flash_sm90.cuh do; cotangents, which may have to cancel, and other floats on their
 * side go
 * in whole: as the sum of two of bf16, what rounding leaves of the first being the second. Sums are
 * float.
 *
 * A block of 256 threads makes 64 x 128 sums, in steps of a depth of 32: while the tensor cores
 * work on one step in shared memory, the next is being put beside it and two more are on their way
 * from memory to registers. Tiles that see many keys start first. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_COL_TILE_MMA_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_COL_TILE_MMA_CUH

#include <mma.h>
#include <type_traits>

#include "kernels/cuda/attention/attention_strip.cuh"

enum {
    MN_SMEM_TILE_ROWS = 64,       // of a block's sums
    MN_SMEM_TILE_COLUMNS = 128,
    MN_SMEM_TILE_DEPTH = 32,
    MN_SMEM_TILE_SUMS = 132,      // floats of a row of sums in shared memory
};

/* Eight neighbours on their way: as they are in memory, zeros where there are none. */
template <typename T>
struct mn_eight {
    uint4 at[sizeof(T) / 2];

    __device__ void fetch(const T *x) {
#pragma unroll
        for (int i = 0; i < (int)sizeof(T) / 2; i++) {
            at[i] = x ? ((const uint4 *)x)[i] : make_uint4(0, 0, 0, 0);
        }
    }

    /* To `high`, and what rounding leaves of floats to `low` if that is not NULL. */
    __device__ void store(mn_bf16 *high, mn_bf16 *low) const {
        if (sizeof(T) == 2) {
            *(uint4 *)high = at[0];
            return;
        }
        const float *x = (const float *)at;
        union {
            mn_bf16 each[8];
            uint4 all;
        } first, rest;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float y = x[i % (4 * (int)sizeof(T) / 2)];
            first.each[i] = __float2bfloat16_rn(y);
            rest.each[i] = __float2bfloat16_rn(y - __bfloat162float(first.each[i]));
        }
        *(uint4 *)high = first.all;
        if (low) *(uint4 *)low = rest.all;
    }
};

/* A smem_tile of ROWS x COLUMNS on its way to shared memory; rows are COLUMNS + 8 ws there. */
template <typename T, int ROWS, int COLUMNS>
struct mn_smem_tile {
    static constexpr int pitch = COLUMNS + 8, packs = COLUMNS / 8;
    static constexpr int each = ROWS * packs / MN_COL_TILE_THREADS;
    mn_eight<T> at[each];

    /* at(row, column) points to eight numbers, or is NULL */
    template <typename F>
    __device__ void fetch(F at_row) {
#pragma unroll
        for (int e = 0; e < each; e++) {
            const int i = threadIdx.x + e * MN_COL_TILE_THREADS;
            at[e].fetch(at_row(i / packs, i % packs * 8));
        }
    }

    __device__ void store(mn_bf16 *room, mn_bf16 *low) const {
#pragma unroll
        for (int e = 0; e < each; e++) {
            const int i = threadIdx.x + e * MN_COL_TILE_THREADS;
            const int to = i / packs * pitch + i % packs * 8;
            at[e].store(room + to, low ? low + to : nullptr);
        }
    }
};

/* How a block's two smem_tiles lie: a is (rows, depth) or, turned, (depth, rows); b is (columns,
 * depth)
 * or, turned, (depth, columns). */
template <typename TA, typename TB, bool a_transposed, bool b_transposed>
struct mn_smem_tile_kind {
    using A = mn_smem_tile<TA, a_transposed ? MN_SMEM_TILE_DEPTH : MN_SMEM_TILE_ROWS,
                       a_transposed ? MN_SMEM_TILE_ROWS : MN_SMEM_TILE_DEPTH>;
    using B = mn_smem_tile<TB, b_transposed ? MN_SMEM_TILE_DEPTH : MN_SMEM_TILE_COLUMNS,
                       b_transposed ? MN_SMEM_TILE_COLUMNS : MN_SMEM_TILE_DEPTH>;
};

enum { MN_SMEM_TILE_A = 64 * 40, MN_SMEM_TILE_B = 128 * 40 };    // the largest of them, in bf16

union mn_smem_tile_smem {
    mn_bf16 smem_tiles[2][2 * MN_SMEM_TILE_A + MN_SMEM_TILE_B];
    float sums[MN_SMEM_TILE_ROWS * MN_SMEM_TILE_SUMS];
};

/* The sums of a block: each of eight warps has 32 x 32. */
struct mn_smem_tile_sums {
    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> at[2][2];

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; i++) nvcuda::wmma::fill_fragment(at[i / 2][i % 2], 0.0f);
    }

    template <bool a_transposed, bool b_transposed>
    __device__ void step(const mn_bf16 *a, const mn_bf16 *low, const mn_bf16 *b) {
        using namespace nvcuda::wmma;
        using kind = mn_smem_tile_kind<float, float, a_transposed, b_transposed>;
        using a_order = typename std::conditional<a_transposed, col_major, row_major>::type;
        using b_order = typename std::conditional<b_transposed, row_major, col_major>::type;
        constexpr int lda = kind::A::pitch, ldb = kind::B::pitch;
        const int warp = threadIdx.x / 32, row = warp % 2 * 32, column = warp / 2 * 32;
#pragma unroll
        for (int k = 0; k < MN_SMEM_TILE_DEPTH; k += 16) {
            fragment<matrix_b, 16, 16, 16, mn_bf16, b_order> from_b[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int c = column + i * 16;
                load_matrix_sync(from_b[i], b + (b_transposed ? k * ldb + c : c * ldb + k), ldb);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const mn_bf16 *half = i / 2 ? low : a;
                if (!half) break;
                fragment<matrix_a, 16, 16, 16, mn_bf16, a_order> from_a;
                const int r = row + i % 2 * 16;
                load_matrix_sync(from_a, half + (a_transposed ? k * lda + r : r * lda + k), lda);
                mma_sync(at[i % 2][0], from_a, from_b[0], at[i % 2][0]);
                mma_sync(at[i % 2][1], from_a, from_b[1], at[i % 2][1]);
            }
        }
    }

    __device__ void load(const float *room) {
        const int warp = threadIdx.x / 32, row = warp % 2 * 32, column = warp / 2 * 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            nvcuda::wmma::load_matrix_sync(
                at[i / 2][i % 2], room + (row + i / 2 * 16) * MN_SMEM_TILE_SUMS + column + i % 2
                    * 16,
                MN_SMEM_TILE_SUMS, nvcuda::wmma::mem_row_major);
        }
    }

    __device__ void store(float *room) const {
        const int warp = threadIdx.x / 32, row = warp % 2 * 32, column = warp / 2 * 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            nvcuda::wmma::store_matrix_sync(
                room + (row + i / 2 * 16) * MN_SMEM_TILE_SUMS + column + i % 2 * 16,
                    at[i / 2][i % 2],
                MN_SMEM_TILE_SUMS, nvcuda::wmma::mem_row_major);
        }
    }
};

/* sums += a b over `depth`, floats of a `whole` or rounded; a_at and b_at(row, column of the
 * smem_tile,
 * start of the step). */
template <typename TA, typename TB, bool whole, bool a_transposed, bool b_transposed, typename FA,
          typename FB>
__device__ inline void mn_smem_tile_product(mn_smem_tile_sums &sums, mn_smem_tile_smem &room,
                                            int64_t depth,
                                        FA a_at, FB b_at) {
    constexpr int ahead = 2;
    using kind = mn_smem_tile_kind<TA, TB, a_transposed, b_transposed>;
    typename kind::A a[ahead];
    typename kind::B b[ahead];
    const auto fetch = [&](int i, int64_t k0) {
        a[i].fetch([&](int row, int column) { return a_at(row, column, k0); });
        b[i].fetch([&](int row, int column) { return b_at(row, column, k0); });
    };
#pragma unroll
    for (int i = 0; i < ahead; i++) {
        if (i * MN_SMEM_TILE_DEPTH < depth) fetch(i, i * MN_SMEM_TILE_DEPTH);
    }
    __syncthreads();
    for (int64_t first = 0; first < depth; first += ahead * MN_SMEM_TILE_DEPTH) {
#pragma unroll
        for (int i = 0; i < ahead; i++) {
            const int64_t k0 = first + i * MN_SMEM_TILE_DEPTH;
            if (k0 >= depth) break;
            mn_bf16 *smem_a = room.smem_tiles[i], *smem_b = smem_a + 2 * MN_SMEM_TILE_A;
            mn_bf16 *low = whole && sizeof(TA) == 4 ? smem_a + MN_SMEM_TILE_A : nullptr;
            a[i].store(smem_a, low);
            b[i].store(smem_b, nullptr);
            __syncthreads();
            if (k0 + ahead * MN_SMEM_TILE_DEPTH < depth) fetch(i, k0 + ahead * MN_SMEM_TILE_DEPTH);
            sums.template step<a_transposed, b_transposed>(smem_a, low, smem_b);
        }
    }
    __syncthreads();
}

template <typename TA>
__global__ void __launch_bounds__(MN_COL_TILE_THREADS, 2)
mn_smem_tile_scores_kernel(const __grid_constant__ mn_strip s, float *w, mn_strip_side<TA> a,
                       mn_strip_side<mn_bf16> b, int64_t width, float scale) {
    __shared__ __align__(128) mn_smem_tile_smem room;
    const int64_t which = s.n_tiles - 1 - blockIdx.z;
    const mn_tile_span tile = mn_tile_at(s.call, MN_COL_TILE_ROWS, s.first + which);
    const int64_t h = blockIdx.y, key0 = (int64_t)blockIdx.x * MN_SMEM_TILE_COLUMNS;
    const int64_t start = tile.span.t0, seen = mn_keys_before(s.call) + tile.first;
    const int64_t n_keys = seen + tile.n_rows;
    if (tile.n_rows == 0 || key0 >= n_keys) return;
    mn_smem_tile_sums sums;
    sums.clear();
    mn_smem_tile_product<TA, mn_bf16, true, false, false>(
        sums, room, width,
        [&](int row, int column, int64_t k) {
            const TA *none = nullptr;
            const bool inside = row < tile.n_rows && k + column < width && a.view.data;
            return inside ? a.row(tile.span.b, start + tile.first + row, h) + k + column : none;
        },
        [&](int row, int column, int64_t k) {
            const mn_bf16 *none = nullptr;
            const bool inside = key0 + row < n_keys && k + column < width;
            return inside ? b.row(tile.span.b, start + key0 + row, h) + k + column : none;
        });
    sums.store(room.sums);
    __syncthreads();
    const int64_t columns = min((int64_t)MN_SMEM_TILE_COLUMNS, s.row - key0);
    for (int i = threadIdx.x; i < MN_SMEM_TILE_ROWS * MN_SMEM_TILE_COLUMNS / 4;
         i += MN_COL_TILE_THREADS) {
        const int r = i / (MN_SMEM_TILE_COLUMNS / 4), c = i % (MN_SMEM_TILE_COLUMNS / 4) * 4;
        if (r >= tile.n_rows || c >= columns) continue;
        const int64_t left = seen + r + 1 - key0 - c;
        const float *sum = room.sums + r * MN_SMEM_TILE_SUMS + c;
        float4 z;
        z.x = left > 0 ? scale * sum[0] : 0.0f, z.y = left > 1 ? scale * sum[1] : 0.0f;
        z.z = left > 2 ? scale * sum[2] : 0.0f, z.w = left > 3 ? scale * sum[3] : 0.0f;
        *(float4 *)(w + mn_strip_at(s, which, h, r) + key0 + c) = z;
    }
}

template <typename TY, bool whole>
__global__ void __launch_bounds__(MN_COL_TILE_THREADS, 2)
mn_smem_tile_read_kernel(const __grid_constant__ mn_strip s, mn_out y, int64_t head0,
                         const float *w,
                     mn_strip_side<mn_bf16> x, int64_t width, float scale) {
    __shared__ __align__(128) mn_smem_tile_smem room;
    const int64_t which = s.n_tiles - 1 - blockIdx.z;
    const mn_tile_span tile = mn_tile_at(s.call, MN_COL_TILE_ROWS, s.first + which);
    const int64_t h = blockIdx.y, j0 = (int64_t)blockIdx.x * MN_SMEM_TILE_COLUMNS;
    const int64_t start = tile.span.t0;
    const int64_t n_keys = mn_keys_before(s.call) + tile.first + tile.n_rows;
    if (tile.n_rows == 0) return;
    mn_smem_tile_sums sums;
    sums.clear();
    mn_smem_tile_product<float, mn_bf16, whole, false, true>(
        sums, room, n_keys,
        [&](int row, int column, int64_t k) {
            const float *none = nullptr;    // what lies beyond the keys of a row is 0
            const bool inside = row < tile.n_rows && k + column < s.row;
            return inside ? w + mn_strip_at(s, which, h, row) + k + column : none;
        },
        [&](int row, int column, int64_t k) {
            const mn_bf16 *none = nullptr;
            const bool inside = k + row < n_keys && j0 + column < width;
            return inside ? x.row(tile.span.b, start + k + row, h) + j0 + column : none;
        });
    sums.store(room.sums);
    __syncthreads();
    for (int i = threadIdx.x; i < MN_SMEM_TILE_ROWS * MN_SMEM_TILE_COLUMNS;
         i += MN_COL_TILE_THREADS) {
        const int r = i / MN_SMEM_TILE_COLUMNS, c = i % MN_SMEM_TILE_COLUMNS;
        if (r >= tile.n_rows || j0 + c >= width) continue;
        mn_put(mn_row<TY>(y, tile.span.b, start + tile.first + r, head0 + h) + j0 + c,
               scale * room.sums[r * MN_SMEM_TILE_SUMS + c]);
    }
}

/* As mn_strip_gather_kernel; a tile's queries are added as one number. */
template <typename TX, bool whole>
__global__ void __launch_bounds__(MN_COL_TILE_THREADS, 2)
mn_smem_tile_gather_kernel(const __grid_constant__ mn_strip s, mn_out d, int64_t head0,
                           int64_t group,
                       const float *w, mn_strip_side<TX> x, int64_t width) {
    __shared__ __align__(128) mn_smem_tile_smem room;
    mn_call keys = s.call;
    keys.T = keys.L;
    const mn_tile_span tile = mn_tile_at(keys, 64, blockIdx.x);
    const int64_t j0 = (int64_t)blockIdx.y * MN_SMEM_TILE_COLUMNS, head = blockIdx.z;
    const int64_t b = tile.span.b, start = tile.span.t0, before = mn_keys_before(s.call);
    if (tile.n_rows == 0) return;
    int64_t slot, end;
    mn_strip_slots(s.call, tile.n, &slot, &end);
    const int64_t first = slot;
    slot = max(slot, s.first);
    slot = max(slot, first + max(tile.first - before, (int64_t)0) / MN_COL_TILE_ROWS);
    end = min(end, s.first + s.n_tiles);
    if (slot >= end) return;
    mn_smem_tile_sums sums;
    for (int i = threadIdx.x; i < MN_SMEM_TILE_ROWS * MN_SMEM_TILE_COLUMNS;
         i += MN_COL_TILE_THREADS) {
        const int r = i / MN_SMEM_TILE_COLUMNS, c = i % MN_SMEM_TILE_COLUMNS;
        const bool inside = r < tile.n_rows && j0 + c < width;
        room.sums[r * MN_SMEM_TILE_SUMS + c] =
            inside ? mn_row<float>(d, b, start + tile.first + r, head0 + head)[j0 + c] : 0.0f;
    }
    __syncthreads();
    sums.load(room.sums);
    /* One long product over (tile, head of the group, row), so that loads run ahead throughout. */
    const int64_t t_first = (slot - first) * MN_COL_TILE_ROWS;
    const int64_t length = mn_span_at(s.call, tile.n).length;
    const auto part = [&](int64_t k, int64_t *t, int64_t *h) {
        const int unit = (int)(k / MN_COL_TILE_ROWS), of = (int)group;
        *h = head * group + unit % of;
        *t = t_first + unit / of * MN_COL_TILE_ROWS + k % MN_COL_TILE_ROWS;
    };
    mn_smem_tile_product<float, TX, whole, true, true>(
        sums, room, (end - slot) * group * MN_COL_TILE_ROWS,
        [&](int row, int column, int64_t k) {
            const float *none = nullptr;
            int64_t t, h;
            part(k + row, &t, &h);
            const int64_t i = slot - s.first + (t - t_first) / MN_COL_TILE_ROWS;
            const float *at = w + mn_strip_at(s, i, h, t % MN_COL_TILE_ROWS) + tile.first + column;
            return t < length ? at : none;
        },
        [&](int row, int column, int64_t k) {
            const TX *none = nullptr;
            int64_t t, h;
            part(k + row, &t, &h);
            const bool inside = t < length && j0 + column < width && x.view.data;
            return inside ? x.row(b, start + t, h) + j0 + column : none;
        });
    sums.store(room.sums);
    __syncthreads();
    for (int i = threadIdx.x; i < MN_SMEM_TILE_ROWS * MN_SMEM_TILE_COLUMNS;
         i += MN_COL_TILE_THREADS) {
        const int r = i / MN_SMEM_TILE_COLUMNS, c = i % MN_SMEM_TILE_COLUMNS;
        if (r >= tile.n_rows || j0 + c >= width) continue;
        mn_row<float>(d, b, start + tile.first + r, head0 + head)[j0 + c] =
            room.sums[r * MN_SMEM_TILE_SUMS + c];
    }
}

/* ---- the faster way where there is one ------------------------------------------------------- */

/* Rows that can be read in packs. */
template <typename T>
inline bool mn_smem_tile_packable(const mn_strip_side<T> &x, int64_t width) {
    bool whole = (uintptr_t)x.view.data % 16 == 0 && width % 8 == 0;
    for (int axis = 0; axis < 3; axis++) whole = whole && x.view.stride[axis] % 8 == 0;
    return whole;
}

template <typename T>
constexpr bool mn_is_bf16() {
    return std::is_same<T, mn_bf16>::value;
}

template <typename TA, typename TB>
inline void mn_past_scores(const mn_strip &s, float *w, mn_strip_side<TA> a, mn_strip_side<TB> b,
                           int64_t width, float scale, cudaStream_t stream) {
    if constexpr (mn_is_bf16<TB>()) {
        if (mn_smem_tile_packable(a, width) && mn_smem_tile_packable(b, width)) {
            const dim3 blocks((unsigned)mn_ceil_div(s.row, MN_SMEM_TILE_COLUMNS), (unsigned)s.heads,
                              (unsigned)s.n_tiles);
            mn_smem_tile_scores_kernel<TA><<<blocks, MN_COL_TILE_THREADS, 0,
                stream>>>(s, w, a, b, width,
                                                                                scale);
            return;
        }
    }
    mn_strip_scores(s, w, a, b, width, scale, stream);
}

/* `whole`: w are cotangents, not weights. */
template <bool whole, typename TX, typename TY>
inline void mn_past_read(const mn_strip &s, const mn_out &y, int64_t head0, const float *w,
                         mn_strip_side<TX> x, int64_t width, float scale, cudaStream_t stream) {
    if (!y.data) return;
    if constexpr (mn_is_bf16<TX>()) {
        if (mn_smem_tile_packable(x, width)) {
            const dim3 blocks((unsigned)mn_ceil_div(width, MN_SMEM_TILE_COLUMNS), (unsigned)s.heads,
                              (unsigned)s.n_tiles);
            mn_smem_tile_read_kernel<TY, whole><<<blocks, MN_COL_TILE_THREADS, 0, stream>>>(
                s, y, head0, w, x, width, scale);
            return;
        }
    }
    mn_strip_read<TX, TY>(s, y, head0, w, x, width, scale, stream);
}

/* `narrow`: the call is of bf16, so that x, if it is of floats, may be rounded to it. */
template <bool whole, bool narrow, typename TX>
inline void mn_past_gather(const mn_strip &s, const mn_out &d, int64_t head0, int64_t group,
                           const float *w, mn_strip_side<TX> x, int64_t width,
                           cudaStream_t stream) {
    if (!d.data) return;
    if constexpr (narrow) {
        if (mn_smem_tile_packable(x, width)) {
            mn_call keys = s.call;
            keys.T = keys.L;
            const dim3 blocks((unsigned)mn_tile_slots(keys, 64),
                              (unsigned)mn_ceil_div(width, MN_SMEM_TILE_COLUMNS),
                              (unsigned)(s.heads / group));
            mn_smem_tile_gather_kernel<TX, whole><<<blocks, MN_COL_TILE_THREADS, 0, stream>>>(
                s, d, head0, group, w, x, width);
            return;
        }
    }
    mn_strip_gather(s, d, head0, group, w, x, width, stream);
}

#endif
