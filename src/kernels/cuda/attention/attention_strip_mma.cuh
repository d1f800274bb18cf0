/* attention_strip_mma.cuh - products of strips of query rows for any sizes and types, and by
 * tensor cores for bf16 whose rows can be read eight numbers at a time. Weights of a strip go into
 * products rounded to bf16, as those of attention_fwd_flash_sm90.cuh do; cotangents, which may have
 * to cancel, and other floats on their side go in whole: as the sum of two of bf16, what rounding
 * leaves of the first being the second. Sums are float.
 *
 * A block of 256 threads makes 64 x 128 sums (64 x 64 where blocks are few), in steps of a depth of
 * 32: while the tensor cores work on one step in shared memory, the next is being put beside it and
 * two more are on their way from memory to registers. Tiles that see many keys start first. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_COL_TILE_MMA_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_COL_TILE_MMA_CUH

#include "kernels/cuda/attention/attention_mma.cuh"
#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/prim/first_wild.cuh"
#include <type_traits>

namespace mneme::attention {

/* Products of queries with their whole past for any sizes and types, in strips: the rows of a few
 * tiles of 64 queries, of all heads, with a float for every key that the longest sequence has. Work
 * space holds one strip after the other, never all T rows.
 *
 *   scores   w_rs = scale a_r.b_s, 0 where row r does not see key s
 *   read     y_r  = sum_s w_rs x_s
 *   gather   d_s += sum_r w_rs x_r
 *
 * Keys count from the start of their sequence and tiles never cross a border, so a sequence's
 * sums run in the same order whatever it is packed with. A gather goes on from what it finds, row
 * after row, so that its bits do not depend on how the rows were cut into strips. */

enum {
    MN_Q_BLOCK_ROWS = 64,
    MN_Q_BLOCK_THREADS = 256,
    MN_Q_BLOCK_DEPTH = 16,      // of a step of a product
    MN_Q_BLOCK_PITCH = 68,      // floats of a row of 64 in shared memory
};
static const int64_t mn_q_block_bytes = (int64_t)384 << 20;    // of one strip's matrices together

/* Query tiles [first, first + n_tiles) of `heads` heads; `rows` rows of `row` floats each. If
 * there are twice as many heads as a matrix has (`each`), the second half is in another matrix,
 * `ws` floats behind the first. */
struct mn_q_block {
    mn_call call;
    int64_t first, n_tiles, heads, rows, row, each, ws;
    int64_t window;    // keys a row sees, its own among them; 0: all so far
    bool redo;         // of rows in front of values that are not finite (mn_strip_cut), or of keys
                       // behind cotangents that are not (mn_strip_wild_query)
};

/* First key of the window of a row that would see `n` keys. */
__host__ __device__ inline int64_t mn_window_first(int64_t n, int64_t window) {
    return window && n > window ? n - window : 0;
}

/* Where products over the keys of a tile begin whose first row would see `n`: scores of the 64
 * keys from there on are there, zeros before the window. */
__device__ inline int64_t mn_window_tile(const mn_q_block &s, int64_t n) {
    return mn_window_first(n, s.window) / 64 * 64;
}

/* The strip of a call, its tiles still to be set, and how many tiles one may have with `n`
 * matrices. */
inline mn_q_block mn_q_block_of(const mn_call &call, int64_t heads, int64_t n, int64_t *most) {
    mn_q_block s = {};
    s.call = call, s.heads = s.each = heads;
    s.rows = mn_min(call.T, (int64_t)MN_Q_BLOCK_ROWS);
    s.row = mn_ceil_div(call.L, MN_Q_BLOCK_ROWS) * MN_Q_BLOCK_ROWS;
    const double tile = 4.0 * (double)n * (double)heads * (double)s.rows * (double)s.row;
    *most = mn_max((int64_t)((double)mn_q_block_bytes / mn_max(tile, 1.0)), 1);
    *most = mn_min(mn_min(*most, mn_tile_slots(call, MN_Q_BLOCK_ROWS)), 65535);
    return s;
}

/* Floats of one matrix of a strip of `most` tiles; false when they overflow. */
inline bool mn_q_block_numel(int64_t *out, const mn_q_block &s, int64_t most) {
    return mn_mul_i64(out, s.heads, s.rows) && mn_mul_i64(out, *out, s.row) &&
           mn_mul_i64(out, *out, most);
}

__device__ inline int64_t mn_q_block_offset(const mn_q_block &s, int64_t tile, int64_t head,
                                            int64_t r) {
    const int64_t matrix = head >= s.each;
    return ((tile * s.each + head - matrix * s.each) * s.rows + r) * s.row + matrix * s.ws;
}

/* The strip with the heads of both matrices where there are two. */
inline mn_q_block mn_q_block_both(mn_q_block s, int n_matrices, int64_t ws) {
    if (n_matrices == 2) s.heads = 2 * s.each, s.ws = ws;
    return s;
}

/* Keys in front of the first query of every sequence. */
__host__ __device__ inline int64_t mn_keys_before(const mn_call &call) {
    return call.cu_seqlens ? 0 : call.L - call.T;
}

/* One operand of a product: rows of a view, head `head0 + h / group` for head h of a strip. */
template <typename T>
struct mn_attn_operand {
    mn_in view;
    int64_t head0, group;

    __device__ const T *row(int64_t b, int64_t t, int64_t h) const {
        return mn_row<T>(view, b, t, head0 + (group == 1 ? h : h / group));
    }
};

/* 4 x 4 sums of a thread out of a product of 64 x 64. */
struct mn_simt_acc {
    float at[4][4];

    __device__ void mma(const float *a, const float *b) {
        const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
#pragma unroll
        for (int k = 0; k < MN_Q_BLOCK_DEPTH; k++) {
            const float4 x = *(const float4 *)(a + k * MN_Q_BLOCK_PITCH + row);
            const float4 y = *(const float4 *)(b + k * MN_Q_BLOCK_PITCH + column);
            const float xs[4] = { x.x, x.y, x.z, x.w }, ys[4] = { y.x, y.y, y.z, y.w };
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) at[i][j] = fmaf(xs[i], ys[j], at[i][j]);
            }
        }
    }

    /* The same without terms that have a weight of 0 because their query does not see the key: of
     * what row r of a meets row k of b only if sees(r, k). */
    template <typename F>
    __device__ void mma_seen(const float *a, const float *b, F sees) {
        const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
        for (int k = 0; k < MN_Q_BLOCK_DEPTH; k++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (!sees(row + i, k)) continue;
                const float x = a[k * MN_Q_BLOCK_PITCH + row + i];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    at[i][j] = fmaf(x, b[k * MN_Q_BLOCK_PITCH + column + j], at[i][j]);
                }
            }
        }
    }
};

/* smem[k][i] = element k0 + k of row(i), 0 beyond `width` or where row(i) is NULL */
template <typename F>
__device__ inline void mn_load_smem_trans(float *smem, int64_t k0, int64_t width, F row) {
    for (int e = threadIdx.x; e < 64 * MN_Q_BLOCK_DEPTH; e += MN_Q_BLOCK_THREADS) {
        const int i = e / MN_Q_BLOCK_DEPTH, k = e % MN_Q_BLOCK_DEPTH;
        const auto *x = row(i);
        smem[k * MN_Q_BLOCK_PITCH + i] = x && k0 + k < width ? mn_float(x[k0 + k]) : 0.0f;
    }
}

/* smem[k][j] = element j0 + j of row(k), the same way */
template <typename F>
__device__ inline void mn_load_smem(float *smem, int64_t j0, int64_t width, F row) {
    for (int e = threadIdx.x; e < 64 * MN_Q_BLOCK_DEPTH; e += MN_Q_BLOCK_THREADS) {
        const int k = e / 64, j = e % 64;
        const auto *x = row(k);
        smem[k * MN_Q_BLOCK_PITCH + j] = x && j0 + j < width ? mn_float(x[j0 + j]) : 0.0f;
    }
}

/* A block is a tile of queries against 64 keys. */
template <typename TA, typename TB>
__global__ void __launch_bounds__(MN_Q_BLOCK_THREADS)
attention_scores_simt_kernel(const __grid_constant__ mn_q_block s, float *w, mn_attn_operand<TA> a,
                       mn_attn_operand<TB> b, int64_t width, float scale) {
    __shared__ __align__(16) float smem_a[MN_Q_BLOCK_DEPTH * MN_Q_BLOCK_PITCH];
    __shared__ __align__(16) float smem_b[MN_Q_BLOCK_DEPTH * MN_Q_BLOCK_PITCH];
    const mn_tile_span tile = mn_tile_at(s.call, MN_Q_BLOCK_ROWS, s.first + blockIdx.z);
    const int64_t h = blockIdx.y, key0 = (int64_t)blockIdx.x * 64, start = tile.span.t0;
    const int64_t seen = mn_keys_before(s.call) + tile.first;    // by row r: seen + r + 1 keys
    if (tile.n_rows == 0 || key0 >= seen + tile.n_rows) return;
    if (key0 + 64 <= mn_window_first(seen + 1, s.window)) return;
    mn_simt_acc acc = {};
    for (int64_t k0 = 0; k0 < width; k0 += MN_Q_BLOCK_DEPTH) {
        mn_load_smem_trans(smem_a, k0, width, [&](int i) {
            const TA *none = nullptr;
            return i < tile.n_rows ? a.row(tile.span.b, start + tile.first + i, h) : none;
        });
        mn_load_smem_trans(smem_b, k0, width, [&](int i) {
            const TB *none = nullptr;
            const bool inside = key0 + i < seen + tile.n_rows;
            return inside ? b.row(tile.span.b, start + key0 + i, h) : none;
        });
        __syncthreads();
        acc.mma(smem_a, smem_b);
        __syncthreads();
    }
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row + i >= tile.n_rows) break;
        float *to = w + mn_q_block_offset(s, blockIdx.z, h, row + i) + key0 + column;
        const int64_t left = seen + row + i + 1 - key0 - column;
        const int64_t out = mn_window_first(seen + row + i + 1, s.window) - key0 - column;
#pragma unroll
        for (int j = 0; j < 4; j++) to[j] = j < left && j >= out ? scale * acc.at[i][j] : 0.0f;
    }
}

template <typename TA, typename TB>
inline void mn_scores_simt(const mn_q_block &s, float *w, mn_attn_operand<TA> a,
                           mn_attn_operand<TB> b,
                            int64_t width, float scale, cudaStream_t stream) {
    const dim3 blocks((unsigned)(s.row / 64), (unsigned)s.heads, (unsigned)s.n_tiles);
    attention_scores_simt_kernel<TA, TB><<<blocks, MN_Q_BLOCK_THREADS, 0,
        stream>>>(s, w, a, b, width,
                                                                            scale);
}

/* A block is a tile of queries and 64 columns; head h of the strip is head `head0 + h` of y. */
template <typename TX, typename TY>
__global__ void __launch_bounds__(MN_Q_BLOCK_THREADS)
attention_pv_simt_kernel(const __grid_constant__ mn_q_block s, mn_out y, int64_t head0,
                         const float *w,
                     mn_attn_operand<TX> x, int64_t width, float scale) {
    __shared__ __align__(16) float smem_w[MN_Q_BLOCK_DEPTH * MN_Q_BLOCK_PITCH];
    __shared__ __align__(16) float smem_x[MN_Q_BLOCK_DEPTH * MN_Q_BLOCK_PITCH];
    const mn_tile_span tile = mn_tile_at(s.call, MN_Q_BLOCK_ROWS, s.first + blockIdx.z);
    const int64_t h = blockIdx.y, j0 = (int64_t)blockIdx.x * 64, start = tile.span.t0;
    const int64_t seen = mn_keys_before(s.call) + tile.first, n_keys = seen + tile.n_rows;
    if (tile.n_rows == 0) return;
    mn_simt_acc acc = {};
    for (int64_t key = mn_window_tile(s, seen + 1); key < n_keys; key += MN_Q_BLOCK_DEPTH) {
        mn_load_smem_trans(smem_w, key, n_keys, [&](int i) {
            return i < tile.n_rows ? w + mn_q_block_offset(s, blockIdx.z, h, i) : nullptr;
        });
        mn_load_smem(smem_x, j0, width, [&](int k) {
            const TX *none = nullptr;
            return key + k < n_keys ? x.row(tile.span.b, start + key + k, h) : none;
        });
        __syncthreads();
        if (key + MN_Q_BLOCK_DEPTH <= seen + 1) {
            acc.mma(smem_w, smem_x);
        } else {
            acc.mma_seen(smem_w, smem_x, [&](int r, int k) { return key + k <= seen + r; });
        }
        __syncthreads();
    }
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row + i >= tile.n_rows) break;
        TY *to = mn_row<TY>(y, tile.span.b, start + tile.first + row + i, head0 + h);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j0 + column + j < width) mn_put(to + j0 + column + j, scale * acc.at[i][j]);
        }
    }
}

template <typename TX, typename TY>
inline void mn_pv_simt(const mn_q_block &s, const mn_out &y, int64_t head0, const float *w,
                          mn_attn_operand<TX> x, int64_t width, float scale, cudaStream_t stream) {
    if (!y.data) return;
    const dim3 blocks((unsigned)mn_ceil_div(width, 64), (unsigned)s.heads, (unsigned)s.n_tiles);
    attention_pv_simt_kernel<TX, TY><<<blocks, MN_Q_BLOCK_THREADS, 0,
        stream>>>(s, y, head0, w, x, width,
                                                                          scale);
}

/* Query tiles of sequence n, as slots [first, end). */
__device__ inline void mn_q_block_slots(const mn_call &call, int64_t n, int64_t *first,
                                      int64_t *end) {
    const int64_t length = mn_span_at(call, n).length;
    const int64_t count = (length + MN_Q_BLOCK_ROWS - 1) / MN_Q_BLOCK_ROWS;
    *first = call.cu_seqlens ? call.cu_seqlens[n] / MN_Q_BLOCK_ROWS + n : n * count;
    *end = *first + count;
}

/* A block is 64 keys and 64 columns of head `head0 + head` of the float sums d; heads
 * [head group, (head + 1) group) of the strip add to it, tile by tile. */
template <typename TX>
__global__ void __launch_bounds__(MN_Q_BLOCK_THREADS)
attention_grad_kv_simt_kernel(const __grid_constant__ mn_q_block s, mn_out d, int64_t head0,
                              int64_t group,
                       const float *w, mn_attn_operand<TX> x, int64_t width) {
    __shared__ __align__(16) float smem_w[MN_Q_BLOCK_DEPTH * MN_Q_BLOCK_PITCH];
    __shared__ __align__(16) float smem_x[MN_Q_BLOCK_DEPTH * MN_Q_BLOCK_PITCH];
    mn_call keys = s.call;
    keys.T = keys.L;
    const mn_tile_span tile = mn_tile_at(keys, 64, blockIdx.x);
    const int64_t j0 = (int64_t)blockIdx.y * 64, head = blockIdx.z, before = mn_keys_before(s.call);
    if (tile.n_rows == 0) return;
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    const int64_t b = tile.span.b, start = tile.span.t0;
    mn_simt_acc acc = {};
    float *to[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row + i >= tile.n_rows) break;
        to[i] = mn_row<float>(d, b, start + tile.first + row + i, head0 + head) + j0 + column;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j0 + column + j < width) acc.at[i][j] = to[i][j];
        }
    }
    int64_t slot, end;
    mn_q_block_slots(s.call, tile.n, &slot, &end);
    const int64_t first = slot;
    slot = max(slot, s.first);
    end = min(end, s.first + s.n_tiles);
    for (; slot < end; slot++) {
        const mn_tile_span of = mn_tile_at(s.call, MN_Q_BLOCK_ROWS, slot);
        const int64_t n_keys = before + (slot - first) * MN_Q_BLOCK_ROWS + of.n_rows;
        if (n_keys <= tile.first) continue;
        if (mn_window_first(n_keys - of.n_rows + 1, s.window) >= tile.first + 64) break;
        for (int64_t h = head * group; h < (head + 1) * group; h++) {
            const float *rows = w + mn_q_block_offset(s, slot - s.first, h, 0);
            for (int64_t r = 0; r < of.n_rows; r += MN_Q_BLOCK_DEPTH) {
                mn_load_smem(smem_w, tile.first, n_keys, [&](int k) {
                    return r + k < of.n_rows ? rows + (r + k) * s.row : nullptr;
                });
                mn_load_smem(smem_x, j0, width, [&](int k) {
                    const TX *none = nullptr;
                    return r + k < of.n_rows ? x.row(b, start + of.first + r + k, h) : none;
                });
                __syncthreads();
                const int64_t first_seen = tile.first - before - of.first - r;    // by row `at`
                if (first_seen + 63 <= 0) {
                    acc.mma(smem_w, smem_x);
                } else {
                    acc.mma_seen(smem_w, smem_x,
                                 [&](int key, int k) { return first_seen + key <= k; });
                }
                __syncthreads();
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (to[i] && j0 + column + j < width) to[i][j] = acc.at[i][j];
        }
    }
}

/* Adds to float sums of shape (B, L, heads of d, width); nothing where d is absent. */
template <typename TX>
inline void mn_grad_kv_simt(const mn_q_block &s, const mn_out &d, int64_t head0, int64_t group,
                            const float *w, mn_attn_operand<TX> x, int64_t width,
                            cudaStream_t stream) {
    if (!d.data) return;
    mn_call keys = s.call;
    keys.T = keys.L;
    const dim3 blocks((unsigned)mn_tile_slots(keys, 64), (unsigned)mn_ceil_div(width, 64),
                      (unsigned)(s.heads / group));
    attention_grad_kv_simt_kernel<TX><<<blocks, MN_Q_BLOCK_THREADS, 0,
        stream>>>(s, d, head0, group, w, x,
                                                                        width);
}

/* Float views of work space, contiguous: (B, n, heads, width). */
inline mn_out mn_workspace_view(float *data, int64_t n, int64_t heads, int64_t width) {
    return { data, { n * heads * width, heads * width, width } };
}

inline mn_in mn_view_as_input(const mn_out &view) {
    return { view.data, { view.stride[0], view.stride[1], view.stride[2] } };
}

/* ---- rows of views --------------------------------------------------------------------------- */

/* cos and sin of pair j of K channels at position `pos` */
__device__ inline float2 mn_rope_cos_sin(double base, int64_t pos, int64_t j, int64_t K) {
    const double turns = (double)pos * exp2(-2.0 * (double)j / (double)K * log2(base)) *
                         0.15915494309189533577;    // 1 / (2 pi)
    float2 at;
    sincospif((float)(2.0 * (turns - rint(turns))), &at.y, &at.x);
    return at;
}

/* How rows change on their way: kind 0 not at all, 1 and 2 by rotary positions of half with half or
 * of neighbours, forward or (direction -1) back; and times `scale`. Row i of a sequence is at
 * position before + i. */
struct mn_rope_params {
    mn_call call;    // T: rows of the views
    int64_t before, heads, width;
    double base;
    int kind, direction;
    float scale;
};

/* y = turn(x), a block for each token */
template <typename TX, typename TY>
__global__ void __launch_bounds__(MN_Q_BLOCK_THREADS)
attention_rope_kernel(const __grid_constant__ mn_rope_params p, mn_out y, mn_in x) {
    const int64_t b = blockIdx.x / p.call.T, t = blockIdx.x % p.call.T, K = p.width;
    const int64_t pos = p.before + t - mn_span_at(p.call, mn_span_of(p.call, b, t)).t0;
    const int64_t each = p.kind ? K / 2 : K;
    for (int64_t e = threadIdx.x; e < p.heads * each; e += MN_Q_BLOCK_THREADS) {
        const int64_t h = e / each, j = e % each;
        const TX *from = mn_row<TX>(x, b, t, h);
        TY *to = mn_row<TY>(y, b, t, h);
        if (p.kind == 0) {
            mn_put(to + j, p.scale * mn_float(from[j]));
            continue;
        }
        const int64_t first = p.kind == 1 ? j : 2 * j, second = p.kind == 1 ? j + K / 2 : 2 * j + 1;
        const float2 at = mn_rope_cos_sin(p.base, pos, j, K);
        const float c = p.scale * at.x, sine = p.scale * (float)p.direction * at.y;
        const float x0 = mn_float(from[first]), x1 = mn_float(from[second]);
        mn_put(to + first, fmaf(c, x0, -sine * x1));
        mn_put(to + second, fmaf(sine, x0, c * x1));
    }
}

template <typename TX, typename TY>
inline void mn_rope_rows(const mn_rope_params &p, const mn_out &y, const mn_in &x,
                               cudaStream_t stream) {
    if (!y.data || p.call.B * p.call.T == 0) return;
    attention_rope_kernel<TX, TY><<<mn_blocks(p.call.B * p.call.T, 1), MN_Q_BLOCK_THREADS, 0,
                                   stream>>>(p, y, x);
}

enum {
    MN_STRIP_TILE_M = 64,       // of a block's sums
    MN_STRIP_TILE_N = 128,      // or half of it
    MN_STRIP_TILE_K = 32,
    MN_STRIP_ACC_PITCH = 132,      // floats of a row of sums in shared memory
};

/* Eight neighbours on their way: as they are in memory, zeros where there are none. */
template <typename T>
struct mn_vec8 {
    uint4 at[sizeof(T) / 2];

    __device__ void load_gmem(const T *x) {
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
        } first, residual;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float y = x[i % (4 * (int)sizeof(T) / 2)];
            first.each[i] = __float2bfloat16_rn(y);
            residual.each[i] = __float2bfloat16_rn(y - __bfloat162float(first.each[i]));
        }
        *(uint4 *)high = first.all;
        if (low) *(uint4 *)low = residual.all;
    }
};

/* A tile of ROWS x COLUMNS on its way to shared memory; rows are COLUMNS + 8 apart there. */
template <typename T, int ROWS, int COLUMNS>
struct mn_tile_prefetch {
    static constexpr int pitch = COLUMNS + 8, vecs = COLUMNS / 8;
    static constexpr int each = ROWS * vecs / MN_Q_BLOCK_THREADS;
    mn_vec8<T> at[each];

    /* at(row, column) points to eight numbers, or is NULL */
    template <typename F>
    __device__ void load_gmem(F at_row) {
#pragma unroll
        for (int e = 0; e < each; e++) {
            const int i = threadIdx.x + e * MN_Q_BLOCK_THREADS;
            at[e].load_gmem(at_row(i / vecs, i % vecs * 8));
        }
    }

    __device__ void store(mn_bf16 *smem, mn_bf16 *low) const {
#pragma unroll
        for (int e = 0; e < each; e++) {
            const int i = threadIdx.x + e * MN_Q_BLOCK_THREADS;
            const int to = i / vecs * pitch + i % vecs * 8;
            at[e].store(smem + to, low ? low + to : nullptr);
        }
    }
};

/* How a block's two tiles in shared memory lie: a is (rows, depth) or, transposed, (depth, rows); b
 * is (columns, depth) or, turned, (depth, columns). */
template <typename TA, typename TB, bool a_trans, bool b_trans, int N>
struct mn_tile_operands {
    using A = mn_tile_prefetch<TA, a_trans ? MN_STRIP_TILE_K : MN_STRIP_TILE_M,
                       a_trans ? MN_STRIP_TILE_M : MN_STRIP_TILE_K>;
    using B = mn_tile_prefetch<TB, b_trans ? MN_STRIP_TILE_K : N, b_trans ? N : MN_STRIP_TILE_K>;
};

enum { MN_STRIP_A_NUMEL = 64 * 40, MN_STRIP_B_NUMEL = 128 * 40 };    // the largest of them, in bf16

union mn_strip_smem {
    mn_bf16 tile_stages[2][2 * MN_STRIP_A_NUMEL + MN_STRIP_B_NUMEL];
    float acc[MN_STRIP_TILE_M * MN_STRIP_ACC_PITCH];
};

/* The sums of a block, N columns: each of eight warps has 32 rows by N / 4 columns, in blocks of 16
 * by eight. */
template <int N>
struct mn_strip_acc {
    static constexpr int columns = N / 4, blocks = columns / 8;
    float at[2][blocks][4];

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 8 * blocks; i++) at[i % 2][i / 8][i / 2 % 4] = 0.0f;
    }

    /* A step's products, of tiles in shared memory; `low` counts if `in_two`. Lane l gives row
     * l % 8 of matrix l / 8 of the four that one instruction reads. */
    template <bool a_trans, bool b_trans, bool in_two>
    __device__ void mma(uint32_t a, uint32_t low, uint32_t b) {
        using kind = mn_tile_operands<float, float, a_trans, b_trans, N>;
        constexpr int lda = kind::A::pitch, ldb = kind::B::pitch;
        const int warp = threadIdx.x / 32, row = warp % 2 * 32, column = warp / 2 * columns;
        const int lane = threadIdx.x % 32, in = lane % 8;
        const int odd = lane / 8 % 2 * 8, far = lane / 16 * 8;
        const int from_a = a_trans ? (in + far) * lda + row + odd : (row + in + odd) * lda + far;
        const int from_b = b_trans ? (in + odd) * ldb + column + far
                                   : (column + in + far) * ldb + odd;
#pragma unroll
        for (int k = 0; k < MN_STRIP_TILE_K; k += 16) {
            uint32_t right[blocks / 2][4];
#pragma unroll
            for (int i = 0; i < blocks / 2; i++) {
                const int to = b_trans ? k * ldb + i * 16 : i * 16 * ldb + k;
                mn_ldmatrix_x4<b_trans>(right[i], b + (from_b + to) * 2);
            }
#pragma unroll
            for (int i = 0; i < (in_two ? 4 : 2); i++) {
                uint32_t left[4];
                const int to = a_trans ? k * lda + i % 2 * 16 : i % 2 * 16 * lda + k;
                mn_ldmatrix_x4<a_trans>(left, (i / 2 ? low : a) + (from_a + to) * 2);
#pragma unroll
                for (int n = 0; n < blocks; n++) {
                    mn_mma_m16n8k16(at[i % 2][n], left, right[n / 2][n % 2 * 2],
                                    right[n / 2][n % 2 * 2 + 1]);
                }
            }
        }
    }

    /* use(two neighbours of a row, where they are in shared memory) */
    template <typename F>
    __device__ static void for_each(F use) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int row = warp % 2 * 32 + lane / 4, column = warp / 2 * columns + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4 * blocks; i++) {
            const int r = row + i / 2 % 2 * 16 + i % 2 * 8, c = column + i / 4 * 8;
            use(i / 2 % 2, i / 4, i % 2 * 2, r * MN_STRIP_ACC_PITCH + c);
        }
    }

    __device__ void load(const float *smem) {
        for_each([&](int i, int n, int e, int from) {
            const float2 x = *(const float2 *)(smem + from);
            at[i][n][e] = x.x, at[i][n][e + 1] = x.y;
        });
    }

    __device__ void store(float *smem) const {
        for_each([&](int i, int n, int e, int to) {
            *(float2 *)(smem + to) = make_float2(at[i][n][e], at[i][n][e + 1]);
        });
    }
};

/* sums += a b over `depth`, floats of a `whole` or rounded; a_at and b_at(row, column of the smem
 * tile, start of the step). */
template <typename TA, typename TB, bool whole, bool a_trans, bool b_trans, int N, typename FA,
          typename FB>
__device__ inline void mn_smem_tile_mma(mn_strip_acc<N> &acc, mn_strip_smem &smem,
                                            int64_t depth,
                                        FA a_at, FB b_at) {
    constexpr int stages = 2;
    using kind = mn_tile_operands<TA, TB, a_trans, b_trans, N>;
    typename kind::A a[stages];
    typename kind::B b[stages];
    const auto load_gmem = [&](int i, int64_t k0) {
        a[i].load_gmem([&](int row, int column) { return a_at(row, column, k0); });
        b[i].load_gmem([&](int row, int column) { return b_at(row, column, k0); });
    };
#pragma unroll
    for (int i = 0; i < stages; i++) {
        if (i * MN_STRIP_TILE_K < depth) load_gmem(i, i * MN_STRIP_TILE_K);
    }
    __syncthreads();
    constexpr bool in_two = whole && sizeof(TA) == 4;
    for (int64_t first = 0; first < depth; first += stages * MN_STRIP_TILE_K) {
#pragma unroll
        for (int i = 0; i < stages; i++) {
            const int64_t k0 = first + i * MN_STRIP_TILE_K;
            if (k0 >= depth) break;
            mn_bf16 *smem_a = smem.tile_stages[i], *smem_b = smem_a + 2 * MN_STRIP_A_NUMEL;
            mn_bf16 *low = smem_a + MN_STRIP_A_NUMEL;
            const uint32_t at = (uint32_t)__cvta_generic_to_shared(smem_a);
            a[i].store(smem_a, in_two ? low : nullptr);
            b[i].store(smem_b, nullptr);
            __syncthreads();
            if (k0 + stages * MN_STRIP_TILE_K < depth) load_gmem(i, k0 + stages * MN_STRIP_TILE_K);
            acc.template mma<a_trans, b_trans, in_two>(at, at + MN_STRIP_A_NUMEL * 2,
                                                       at + MN_STRIP_A_NUMEL * 4);
        }
    }
    __syncthreads();
}

template <typename TA>
__global__ void __launch_bounds__(MN_Q_BLOCK_THREADS, 2)
attention_scores_mma_kernel(const __grid_constant__ mn_q_block s, float *w, mn_attn_operand<TA> a,
                       mn_attn_operand<mn_bf16> b, int64_t width, float scale) {
    __shared__ __align__(128) mn_strip_smem smem;
    const int64_t which = s.n_tiles - 1 - blockIdx.z;
    const mn_tile_span tile = mn_tile_at(s.call, MN_Q_BLOCK_ROWS, s.first + which);
    const int64_t h = blockIdx.y, key0 = (int64_t)blockIdx.x * MN_STRIP_TILE_N;
    const int64_t start = tile.span.t0, seen = mn_keys_before(s.call) + tile.first;
    const int64_t n_keys = seen + tile.n_rows;
    if (tile.n_rows == 0 || key0 >= n_keys) return;
    if (key0 + MN_STRIP_TILE_N <= mn_window_first(seen + 1, s.window)) return;
    const TA *a0 = a.row(tile.span.b, start + tile.first, h);
    const mn_bf16 *b0 = b.row(tile.span.b, start + key0, h);
    mn_strip_acc<MN_STRIP_TILE_N> acc;
    acc.clear();
    mn_smem_tile_mma<TA, mn_bf16, true, false, false>(
        acc, smem, width,
        [&](int row, int column, int64_t k) {
            const TA *none = nullptr;
            const bool inside = row < tile.n_rows && k + column < width && a0;
            return inside ? a0 + row * a.view.stride[1] + k + column : none;
        },
        [&](int row, int column, int64_t k) {
            const mn_bf16 *none = nullptr;
            const bool inside = key0 + row < n_keys && k + column < width;
            return inside ? b0 + row * b.view.stride[1] + k + column : none;
        });
    acc.store(smem.acc);
    __syncthreads();
    const int64_t columns = min((int64_t)MN_STRIP_TILE_N, s.row - key0);
    for (int i = threadIdx.x; i < MN_STRIP_TILE_M * MN_STRIP_TILE_N / 4;
         i += MN_Q_BLOCK_THREADS) {
        const int r = i / (MN_STRIP_TILE_N / 4), c = i % (MN_STRIP_TILE_N / 4) * 4;
        if (r >= tile.n_rows || c >= columns) continue;
        const int64_t left = seen + r + 1 - key0 - c;
        const int64_t out = mn_window_first(seen + r + 1, s.window) - key0 - c;
        const float *sum = smem.acc + r * MN_STRIP_ACC_PITCH + c;
        float4 z;
        z.x = left > 0 && out <= 0 ? scale * sum[0] : 0.0f;
        z.y = left > 1 && out <= 1 ? scale * sum[1] : 0.0f;
        z.z = left > 2 && out <= 2 ? scale * sum[2] : 0.0f;
        z.w = left > 3 && out <= 3 ? scale * sum[3] : 0.0f;
        *(float4 *)(w + mn_q_block_offset(s, which, h, r) + key0 + c) = z;
    }
}

/* Of a tile whose rows read columns of x from j0 on: how many rows are in front of the first
 * x that is not finite, for which 0 times that was not 0; 0 where nothing is to be made again. The
 * last row sees all keys of the tile, or its window. All threads of the block call. */
template <typename TY>
__device__ inline int mn_strip_cut(const mn_q_block &s, const mn_tile_span &tile, const mn_out &y,
                                   int64_t head, const mn_attn_operand<mn_bf16> &x, int64_t h,
                                   int64_t j0, int64_t width) {
    const int64_t t = tile.span.t0 + tile.first, step = s.window ? s.window : tile.n_rows;
    const int64_t columns = min((int64_t)MN_STRIP_TILE_N, width - j0);
    bool wild = false;
    for (int64_t r = tile.n_rows - 1; r >= 0; r -= step) {
        const TY *row = mn_row<TY>(y, tile.span.b, t + r, head) + j0;
        wild = mn_redo_row_is_wild(row, columns) || wild;
    }
    if (!wild) return 0;
    return mn_redo_first_token(tile.n_rows, [&](int64_t r, float most) {
        const mn_bf16 *row = x.row(tile.span.b, t + mn_keys_before(s.call) + r, h) + j0;
        return mn_redo_has_wild(row, columns, most);
    });
}

/* A block has N columns. */
template <typename TY, bool whole, int N>
__global__ void __launch_bounds__(MN_Q_BLOCK_THREADS, 2)
attention_pv_mma_kernel(const __grid_constant__ mn_q_block s, mn_out y, int64_t head0,
                         const float *w,
                     mn_attn_operand<mn_bf16> x, int64_t width, float scale) {
    __shared__ __align__(128) mn_strip_smem smem;
    const int64_t which = s.n_tiles - 1 - blockIdx.z;
    mn_tile_span tile = mn_tile_at(s.call, MN_Q_BLOCK_ROWS, s.first + which);
    const int64_t h = blockIdx.y, j0 = (int64_t)blockIdx.x * N;
    if (tile.n_rows > 0 && !whole && s.redo) {
        tile.n_rows = mn_strip_cut<TY>(s, tile, y, head0 + h, x, h, j0, min(width, j0 + N));
    }
    const int64_t start = tile.span.t0, seen = mn_keys_before(s.call) + tile.first;
    const int64_t n_keys = seen + tile.n_rows, key0 = mn_window_tile(s, seen + 1);
    if (tile.n_rows == 0) return;
    const float *w0 = w + mn_q_block_offset(s, which, h, 0) + key0;
    const mn_bf16 *x0 = x.row(tile.span.b, start + key0, h) + j0;
    mn_strip_acc<N> acc;
    acc.clear();
    mn_smem_tile_mma<float, mn_bf16, whole, false, true>(
        acc, smem, n_keys - key0,
        [&](int row, int column, int64_t k) {
            const float *none = nullptr;    // what lies beyond the keys of a row is 0
            const bool inside = row < tile.n_rows && key0 + k + column < s.row;
            return inside ? w0 + row * s.row + k + column : none;
        },
        [&](int row, int column, int64_t k) {
            const mn_bf16 *none = nullptr;
            const bool inside = key0 + k + row < n_keys && j0 + column < width;
            return inside ? x0 + (k + row) * x.view.stride[1] + column : none;
        });
    acc.store(smem.acc);
    __syncthreads();
    for (int i = threadIdx.x; i < MN_STRIP_TILE_M * N; i += MN_Q_BLOCK_THREADS) {
        const int r = i / N, c = i % N;
        if (r >= tile.n_rows || j0 + c >= width) continue;
        mn_put(mn_row<TY>(y, tile.span.b, start + tile.first + r, head0 + h) + j0 + c,
               scale * smem.acc[r * MN_STRIP_ACC_PITCH + c]);
    }
}

/* Whether dv is made again behind cotangents that are not finite. */
static const bool redoes_strip_gradients = true;

/* Of a tile of keys whose rows d have gathered rows x of columns from j0 on: the last query whose x
 * is not finite and which does not see all of these keys, -1: none. `first`: the query that sees
 * the tile's first key as its last. All threads of the block call. */
template <typename TX>
__device__ inline int64_t mn_strip_wild_query(const mn_tile_span &tile, const float *last_row,
                                              const mn_attn_operand<TX> &x, int64_t head0,
                                              int64_t group, int64_t first, int64_t length,
                                              int64_t j0, int64_t width) {
    const int64_t columns = min((int64_t)MN_STRIP_TILE_N, width - j0);
    const int64_t from = max(first / MN_Q_BLOCK_ROWS * MN_Q_BLOCK_ROWS, (int64_t)0);
    const int64_t end = min(first + tile.n_rows - 1, length);    // those that see all of them
    __shared__ int found;
    if (end <= from || !mn_redo_row_is_wild(last_row, columns)) return -1;
    if (threadIdx.x == 0) found = -1;
    __syncthreads();
    for (int64_t t = from + threadIdx.x; t < end; t += blockDim.x) {
        for (int64_t h = head0; h < head0 + group; h++) {
            const TX *row = x.row(tile.span.b, tile.span.t0 + t, h) + j0;
            if (mn_redo_has_wild(row, columns, 3.40282347e38f)) atomicMax(&found, (int)t);
        }
    }
    __syncthreads();
    return found;
}

/* As attention_grad_kv_simt_kernel; a tile's queries are added as one number. In a redo, of rows
 * that the wild query does not see, where the strip has the first queries that see the tile. */
template <typename TX, bool whole>
__global__ void __launch_bounds__(MN_Q_BLOCK_THREADS, 2)
attention_grad_kv_mma_kernel(const __grid_constant__ mn_q_block s, mn_out d, int64_t head0,
                           int64_t group,
                       const float *w, mn_attn_operand<TX> x, int64_t width) {
    __shared__ __align__(128) mn_strip_smem smem;
    mn_call keys = s.call;
    keys.T = keys.L;
    const mn_tile_span tile = mn_tile_at(keys, 64, blockIdx.x);
    const int64_t j0 = (int64_t)blockIdx.y * MN_STRIP_TILE_N, head = blockIdx.z;
    const int64_t b = tile.span.b, start = tile.span.t0, before = mn_keys_before(s.call);
    if (tile.n_rows == 0) return;
    int64_t slot, end;
    mn_q_block_slots(s.call, tile.n, &slot, &end);
    const int64_t first = slot;
    const int64_t sees = first + max(tile.first - before, (int64_t)0) / MN_Q_BLOCK_ROWS;
    const int64_t length = mn_span_at(s.call, tile.n).length;
    int64_t wild = -1;    // queries up to here are left out
    slot = max(max(slot, s.first), sees);
    end = min(end, s.first + s.n_tiles);
    if (s.window) {    // the last row that sees one of these keys
        const int64_t last = tile.first + 63 - before + s.window - 1;
        end = last < 0 ? slot : min(end, first + last / MN_Q_BLOCK_ROWS + 1);
    }
    if (slot >= end) return;
    const bool redo = !whole && s.redo;
    if (redo) {
        if (slot != sees) return;
        const float *row = mn_row<float>(d, b, start + tile.first + tile.n_rows - 1, head0 + head);
        wild = mn_strip_wild_query(tile, row + j0, x, head * group, group, tile.first - before,
                                   length, j0, width);
        if (wild < 0) return;
    }
    const int64_t kept = redo ? max(before + wild + 1 - tile.first, (int64_t)0) : 0;
    mn_strip_acc<MN_STRIP_TILE_N> acc;
    for (int i = threadIdx.x; i < MN_STRIP_TILE_M * MN_STRIP_TILE_N;
         i += MN_Q_BLOCK_THREADS) {
        const int r = i / MN_STRIP_TILE_N, c = i % MN_STRIP_TILE_N;
        const bool inside = r < tile.n_rows && j0 + c < width && !redo;
        smem.acc[r * MN_STRIP_ACC_PITCH + c] =
            inside ? mn_row<float>(d, b, start + tile.first + r, head0 + head)[j0 + c] : 0.0f;
    }
    __syncthreads();
    acc.load(smem.acc);
    /* One long product over (tile, head of the group, row), so that loads run ahead throughout. */
    const int64_t t_first = (slot - first) * MN_Q_BLOCK_ROWS;
    const int of = (int)group, tile0 = (int)(slot - s.first);
    const auto place_of = [&](int64_t k, int64_t *row, int64_t *h) {
        const int at = (int)(k / MN_Q_BLOCK_ROWS), in_group = of == 1 ? 0 : at % of;
        *h = head * group + in_group;
        *row = k % MN_Q_BLOCK_ROWS;
        return of == 1 ? at : at / of;
    };
    mn_smem_tile_mma<float, TX, whole, true, true>(
        acc, smem, (end - slot) * group * MN_Q_BLOCK_ROWS,
        [&](int row, int column, int64_t k) {
            const float *none = nullptr;
            int64_t r, h;
            const int i = place_of(k, &r, &h);
            const float *at = w + mn_q_block_offset(s, tile0 + i, h, r + row) + tile.first + column;
            return t_first + i * MN_Q_BLOCK_ROWS + r + row < length ? at : none;
        },
        [&](int row, int column, int64_t k) {
            const TX *none = nullptr;
            int64_t r, h;
            const int i = place_of(k, &r, &h);
            const int64_t t = t_first + i * MN_Q_BLOCK_ROWS + r + row;
            const bool inside = t > wild && t < length && j0 + column < width && x.view.data;
            return inside ? x.row(b, start + t, h) + j0 + column : none;
        });
    acc.store(smem.acc);
    __syncthreads();
    for (int i = threadIdx.x; i < MN_STRIP_TILE_M * MN_STRIP_TILE_N;
         i += MN_Q_BLOCK_THREADS) {
        const int r = i / MN_STRIP_TILE_N, c = i % MN_STRIP_TILE_N;
        if (r < kept || r >= tile.n_rows || j0 + c >= width) continue;
        mn_row<float>(d, b, start + tile.first + r, head0 + head)[j0 + c] =
            smem.acc[r * MN_STRIP_ACC_PITCH + c];
    }
}

/* ---- the faster way where there is one ------------------------------------------------------- */

/* Rows that can be read in packs. */
template <typename T>
inline bool mn_operand_vec_aligned(const mn_attn_operand<T> &x, int64_t width) {
    bool whole = (uintptr_t)x.view.data % 16 == 0 && width % 8 == 0;
    for (int axis = 0; axis < 3; axis++) whole = whole && x.view.stride[axis] % 8 == 0;
    return whole;
}

template <typename T>
constexpr bool mn_is_bf16() {
    return std::is_same<T, mn_bf16>::value;
}

template <typename TA, typename TB>
inline void mn_attn_scores(const mn_q_block &s, float *w, mn_attn_operand<TA> a,
                           mn_attn_operand<TB> b,
                           int64_t width, float scale, cudaStream_t stream) {
    if constexpr (mn_is_bf16<TB>()) {
        if (mn_operand_vec_aligned(a, width) && mn_operand_vec_aligned(b, width)) {
            const dim3 blocks((unsigned)mn_ceil_div(s.row, MN_STRIP_TILE_N), (unsigned)s.heads,
                              (unsigned)s.n_tiles);
            attention_scores_mma_kernel<TA><<<blocks, MN_Q_BLOCK_THREADS, 0,
                stream>>>(s, w, a, b, width,
                                                                                scale);
            return;
        }
    }
    mn_scores_simt(s, w, a, b, width, scale, stream);
}

/* `whole`: w are cotangents, not weights. */
template <bool whole, typename TX, typename TY>
inline void mn_attn_pv(const mn_q_block &s, const mn_out &y, int64_t head0, const float *w,
                         mn_attn_operand<TX> x, int64_t width, float scale, cudaStream_t stream) {
    if (!y.data) return;
    if constexpr (mn_is_bf16<TX>()) {
        if (mn_operand_vec_aligned(x, width)) {
            /* Fewer columns for a block where there is less than one for each processor's two. */
            constexpr int n = MN_STRIP_TILE_N, half = n / 2;
            const int64_t most = mn_ceil_div(width, n) * s.heads * s.n_tiles;
            const bool narrow = most < 2 * mn_device_props_current().processors;
            const auto kernel = narrow ? attention_pv_mma_kernel<TY, whole, half>
                                       : attention_pv_mma_kernel<TY, whole, n>;
            const dim3 blocks((unsigned)mn_ceil_div(width, narrow ? half : n), (unsigned)s.heads,
                              (unsigned)s.n_tiles);
            kernel<<<blocks, MN_Q_BLOCK_THREADS, 0, stream>>>(s, y, head0, w, x, width, scale);
            if (whole) return;
            mn_q_block redo = s;
            redo.redo = true;
            kernel<<<blocks, MN_Q_BLOCK_THREADS, 0, stream>>>(redo, y, head0, w, x, width, scale);
            return;
        }
    }
    mn_pv_simt<TX, TY>(s, y, head0, w, x, width, scale, stream);
}

/* `narrow`: the call is of bf16, so that x, if it is of floats, may be rounded to it. */
template <bool whole, bool call_is_bf16, typename TX>
inline void mn_attn_grad_kv(const mn_q_block &s, const mn_out &d, int64_t head0, int64_t group,
                           const float *w, mn_attn_operand<TX> x, int64_t width,
                           cudaStream_t stream) {
    if (!d.data) return;
    if constexpr (call_is_bf16) {
        if (mn_operand_vec_aligned(x, width)) {
            mn_call keys = s.call;
            keys.T = keys.L;
            const dim3 blocks((unsigned)mn_tile_slots(keys, 64),
                              (unsigned)mn_ceil_div(width, MN_STRIP_TILE_N),
                              (unsigned)(s.heads / group));
            attention_grad_kv_mma_kernel<TX, whole><<<blocks, MN_Q_BLOCK_THREADS, 0, stream>>>(
                s, d, head0, group, w, x, width);
            if (whole || !redoes_strip_gradients) return;
            mn_q_block redo = s;
            redo.redo = true;
            attention_grad_kv_mma_kernel<TX, whole><<<blocks, MN_Q_BLOCK_THREADS, 0, stream>>>(
                redo, d, head0, group, w, x, width);
            return;
        }
    }
    mn_grad_kv_simt(s, d, head0, group, w, x, width, stream);
}

}    // namespace mneme::attention

#endif
