/* attention_fwd_flash_sm90.cuh - attention and relu_attention forward by Hopper's products, in
 * bf16, for heads of up to 128 columns.
 *
 *   softmax   m = max(m, z)   l = sum 2^(c z - c m)   O = sum 2^(c z - c m) v / l
 *   relu      O = sum relu(z) v scale / max(scale |z|, eps)
 *
 * with z before its scale and c = scale log2 e. A block has 128 queries of one head: one warp group
 * copies tiles of 128 keys and values, two multiply, 64 queries each. Scores of the next tile are
 * made while the values of this one are read. Blocks with many keys start first; heads go in
 * sections whose keys and values fit in the second cache. With a window a block begins at the tile
 * that holds the first key of its first row's window. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_FWD_FLASH_SM90_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_FWD_FLASH_SM90_CUH

#include "kernels/cuda/attention/attention_tiles.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::attention {

enum { MN_FLASH_KEYS = 128, MN_FLASH_THREADS = 3 * MN_WARPGROUP };

template <int D>
struct alignas(1024) mn_flash_smem {
    static constexpr int bytes = 128 * D * 2;    // of a tile of 128 rows
    unsigned char q[bytes], k[2][bytes], v[2][bytes];
    uint64_t q_full, k_full[2], v_full[2], k_empty[2], v_empty[2];
};

/* The copying warp group: queries, then keys and values in turns of two stages, from tile `skipped`
 * on. */
template <int D>
__device__ inline void mn_flash_producer(mn_flash_smem<D> &smem, const mn_flash_coord &at,
                                     const mn_attn_params &p, int n_tiles, int skipped) {
    const int i = threadIdx.x % MN_WARPGROUP, K = (int)p.call.K, V = (int)p.call.V;
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0, j = at.h / (p.call.H / p.call.J);
    const mn_bf16 *q = mn_row<mn_bf16>(p.q, b, t0 + at.tile.first, at.h);
    const mn_bf16 *k = mn_row<mn_bf16>(p.k, b, t0, j), *v = mn_row<mn_bf16>(p.v, b, t0, j);
    const int n_keys = (int)(at.before + at.tile.first + at.tile.n_rows);
    mn_cp_async_tile<128, D>(mn_smem_addr(smem.q), q, p.q.stride[1], (int)at.tile.n_rows, K, i);
    for (int n = 0; n < n_tiles; n++) {
        const int stage = n & 1, phase = (n >> 1 & 1) ^ 1, first = (n + skipped) * MN_FLASH_KEYS;
        mn_mbarrier_wait(&smem.k_empty[stage], phase);
        mn_cp_async_tile<128, D>(mn_smem_addr(smem.k[stage]), k + first * p.k.stride[1],
                             p.k.stride[1], n_keys - first, K, i);
        mn_cp_async_wait_fence();
        if (n == 0) mn_mbarrier_arrive(&smem.q_full);
        mn_mbarrier_arrive(&smem.k_full[stage]);
        mn_mbarrier_wait(&smem.v_empty[stage], phase);
        mn_cp_async_tile<128, D>(mn_smem_addr(smem.v[stage]), v + first * p.v.stride[1],
                             p.v.stride[1], n_keys - first, V, i);
        mn_cp_async_wait_fence();
        mn_mbarrier_arrive(&smem.v_full[stage]);
    }
}

#if MN_HAS_WGMMA

/* The two consumer warpgroups start products in turns, so that one makes weights while
 * products of the other run: waits for the turn of group `half`; gives it to the other one, if
 * that waits. */
__device__ inline void mn_flash_scheduler_sync(int half) {
    mn_named_barrier_sync(3 + half, 256);
}

__device__ inline void mn_flash_scheduler_arrive(int half, bool waits) {
    if (waits) mn_named_barrier_arrive(4 - half, 256);
}

/* A multiplying warp group, 64 queries of the block. */
template <int D, bool softmax, bool has_window>
__device__ inline void mn_flash_consumer(mn_flash_smem<D> &smem, const mn_flash_coord &at,
                                         const mn_attn_params &p, int n_tiles, int skipped) {
    const int half = threadIdx.x / MN_WARPGROUP - 1, thread = threadIdx.x % MN_WARPGROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int seen = (int)(at.before + at.tile.first) + row + 1;    // keys of the first row
    const float scale = p.scale * 1.4426950408889634f;
    const uint32_t q = mn_smem_addr(smem.q) + half * 64 * 128;
    mn_flash_row_state s = { { -INFINITY, -INFINITY }, { 0.0f, 0.0f } };
    float o[D / 2] = {}, z[64], by[2];
    uint32_t w[32];
    const auto softmax_tile = [&](int n) {
        const int left = seen - (n + skipped) * MN_FLASH_KEYS;
        if (left < MN_FLASH_KEYS) mn_flash_causal_mask<softmax>(z, left);
        if (has_window && left + 8 > p.window) mn_flash_window_mask(z, left - p.window);
        mn_flash_online_softmax<softmax, has_window>(z, s, by, scale);
    };
    const auto scores = [&](int n) {
        mn_mbarrier_wait(&smem.k_full[n & 1], n >> 1 & 1);
        if (n > 0) mn_flash_scheduler_sync(half);
        mn_wgmma_fence();
        mn_wgmma_abt<D, 128, 128>(z, q, mn_smem_addr(smem.k[n & 1]));
        mn_wgmma_commit();
    };
    const auto read = [&](int n) {
        mn_mbarrier_wait(&smem.v_full[n & 1], n >> 1 & 1);
        mn_wgmma_fence();
        mn_wgmma_ab<128, D>(o, w, mn_smem_addr(smem.v[n & 1]), true);
        mn_wgmma_commit();
    };
    mn_flash_scheduler_arrive(half, half == 1 && n_tiles > 1);    // the first group begins
    mn_mbarrier_wait(&smem.q_full, 0);
    scores(0);
    mn_wgmma_wait<0>();
    if (thread % 32 == 0) mn_mbarrier_arrive(&smem.k_empty[0]);
    softmax_tile(0);
    mn_flash_pack_bf16(w, z);
    for (int n = 1; n < n_tiles; n++) {
        scores(n);
        read(n - 1);
        mn_flash_scheduler_arrive(half, n + half < n_tiles);
        mn_wgmma_wait<1>();
        if (thread % 32 == 0) mn_mbarrier_arrive(&smem.k_empty[n & 1]);
        softmax_tile(n);
        mn_wgmma_wait<0>();
        if (thread % 32 == 0) mn_mbarrier_arrive(&smem.v_empty[n & 1 ^ 1]);
        if (softmax) {
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] *= by[i % 4 / 2];
        }
        mn_flash_pack_bf16(w, z);
    }
    read(n_tiles - 1);
    mn_wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = mn_quad_sum(s.sum[r]);
        by[r] = softmax ? 1.0f / sum : p.scale / mn_fmax(p.scale * sqrtf(sum), p.eps);
        if (softmax && p.lse.data && thread % 4 == 0 && row + 8 * r < at.tile.n_rows) {
            *mn_row<float>(p.lse, at.tile.span.b, at.tile.span.t0 + at.tile.first + row + 8 * r,
                           at.h) = fmaf(s.row_max[r], p.scale, logf(sum));
        }
    }
    if (!p.o.data) return;
    /* Through shared memory, so that rows leave in packs. */
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
        const int column = i / 4 * 8 + thread % 4 * 2, r = i % 4 / 2;
        *(uint32_t *)(smem.q + mn_swizzle_byte(128, row + 8 * r, column)) =
            mn_bf16x2(o[i] * by[r], o[i + 1] * by[r]);
    }
    mn_named_barrier_sync(half + 1, 128);
    const int64_t b = at.tile.span.b, t = at.tile.span.t0 + at.tile.first;
    for (int i = thread; i < 64 * D / 8; i += MN_WARPGROUP) {
        const int r = half * 64 + i / (D / 8), column = i % (D / 8) * 8;
        if (r >= at.tile.n_rows || column >= p.call.V) continue;
        *(uint4 *)(mn_row<mn_bf16>(p.o, b, t + r, at.h) + column) =
            *(const uint4 *)(smem.q + mn_swizzle_byte(128, r, column));
    }
}

#endif

/* REDO: of rows in front of a value that is not finite; its code is apart, so that the other's
 * stays as it is. */
template <int D, bool softmax, bool has_window, bool REDO>
__global__ void __launch_bounds__(MN_FLASH_THREADS, 1)
attention_fwd_flash_kernel(const __grid_constant__ mn_flash_params f) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_flash_smem<D> &smem = *(mn_flash_smem<D> *)bytes;
    if (!REDO) mn_pdl_launch_dependents();
    const mn_flash_coord at =
        REDO ? mn_flash_redo_coord(f.p)
             : mn_flash_coord_of(f, blockIdx.x, f.p.call, f.p.call.H, MN_FLASH_QUERIES, true);
    if (at.tile.n_rows == 0) return;
    const int n_keys = (int)(at.before + at.tile.first + at.tile.n_rows);
    const int skipped = has_window ? mn_flash_skipped(at, f.p, MN_FLASH_KEYS) : 0;
    const int n_tiles = (n_keys + MN_FLASH_KEYS - 1) / MN_FLASH_KEYS - skipped;
    if (threadIdx.x == 0) {
        mn_mbarrier_init(&smem.q_full, MN_WARPGROUP);
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.k_full[i], MN_WARPGROUP);
            mn_mbarrier_init(&smem.v_full[i], MN_WARPGROUP);
            mn_mbarrier_init(&smem.k_empty[i], 8);
            mn_mbarrier_init(&smem.v_empty[i], 8);
        }
    }
    __syncthreads();
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<40>();
        mn_flash_producer<D>(smem, at, f.p, n_tiles, skipped);
    } else {
        mn_setmaxnreg_inc<232>();
        mn_flash_consumer<D, softmax, has_window>(smem, at, f.p, n_tiles, skipped);
    }
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

inline bool mn_flash_supported(const mn_attn_params &p) {
    return mn_flash_serves(p) && mn_device_is_sm90();
}

template <typename Params>
inline int mn_flash_launch(void (*kernel)(Params), const Params &params, int64_t blocks,
                           size_t bytes,
                          cudaStream_t stream) {
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(kernel, dim3((unsigned)blocks), MN_FLASH_THREADS, bytes, stream,
                               params);
}

template <int D, bool softmax, bool has_window>
inline int mn_flash_fwd_of(const mn_attn_params &p, cudaStream_t stream) {
    int64_t blocks;
    const auto kernel = attention_fwd_flash_kernel<D, softmax, has_window, false>;
    const auto redo = attention_fwd_flash_kernel<D, softmax, has_window, true>;
    const size_t smem = sizeof(mn_flash_smem<D>);
    const mn_flash_params f = mn_flash_params_of(p, p.call, p.call.H, MN_FLASH_QUERIES,
                                                 p.call.H / p.call.J, &blocks);
    const int code = mn_flash_launch(kernel, f, blocks, smem, stream);
    if (code != cudaSuccess || blocks == 0 || !p.o.data) return code;
    return mn_launch_smem_behind(true, redo, dim3((unsigned)(mn_n_spans(p.call) * p.call.H)),
                                 MN_FLASH_THREADS, smem, stream, f);
}

inline int mn_flash_fwd(const mn_attn_params &p, cudaStream_t stream) {
    const bool wide = mn_max(p.call.K, p.call.V) > 64;
    if (p.window && wide) return mn_flash_fwd_of<128, true, true>(p, stream);
    if (p.window) return mn_flash_fwd_of<64, true, true>(p, stream);
    if (p.softmax && wide) return mn_flash_fwd_of<128, true, false>(p, stream);
    if (p.softmax) return mn_flash_fwd_of<64, true, false>(p, stream);
    if (wide) return mn_flash_fwd_of<128, false, false>(p, stream);
    return mn_flash_fwd_of<64, false, false>(p, stream);
}

}    // namespace mneme::attention

#endif
