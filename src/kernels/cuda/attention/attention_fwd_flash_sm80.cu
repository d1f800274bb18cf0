/* attention_fwd_flash_sm80.cu - attention and relu_attention forward by mma.sync, in bf16, for
 * heads of up to 128 columns: the sums of attention_fwd_flash_sm90.cuh.
 *
 * A block has 128 queries of one head, a warp 16 of them in registers. Tiles of 64 keys, and of
 * their values, come by cp.async in two stages each: the keys of the next tile under the scores of
 * this one, its values under the weights. A warp passes over tiles that none of its rows sees. */
#include "kernels/cuda/attention/attention_mma_sm80.cuh"

namespace mneme::attention {

/* Of a thread's two rows: where they read, and what they have read so far. */
template <int D, bool softmax, bool has_window>
struct mn_flash80_rows {
    int row, seen;    // the first row, keys that it sees
    mn_flash_row_state state = { { -INFINITY, -INFINITY }, { 0.0f, 0.0f } };
    uint32_t q[D / 16][4];
    float o[D / 2] = {};

    /* Whether any row of the warp sees one of the keys from `first` on. */
    __device__ bool sees(int first, int64_t window) const {
        const int top = seen - threadIdx.x % 32 / 4;    // of the warp's first row
        if (has_window && first + MN_FLASH80_STEP <= top - window) return false;
        return first < top + 15;
    }

    /* Scores of the tile of keys from `first` on become weights; sums so far are on their scale. */
    __device__ void weights(uint32_t (&w)[MN_FLASH80_STEP / 4], uint32_t k, int first,
                            const mn_attn_params &p, float scale) {
        float z[MN_FLASH80_STEP / 2] = {}, by[2];
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            mn_warp_mma_abt<MN_FLASH80_STEP, MN_FLASH80_STEP>(z, q[i], k, 0, 16 * i);
        }
        const int left = seen - first;
        if (left < MN_FLASH80_STEP) mn_flash_causal_mask<softmax>(z, left);
        if (has_window && left + 8 > p.window) mn_flash_window_mask(z, left - p.window);
        mn_flash_online_softmax<softmax, has_window>(z, state, by, scale);
        mn_flash_pack_bf16(w, z);
#pragma unroll
        for (int i = 0; softmax && i < D / 2; i++) o[i] *= by[i % 4 / 2];
    }
};

/* Scales what rows have read and stores it, and the log of the sum of their weights. */
template <int D, bool softmax, bool has_window>
__device__ inline void mn_flash80_finish(mn_flash80_rows<D, softmax, has_window> &r,
                                         mn_flash80_fwd_smem<D> &smem, const mn_flash_coord &at,
                                         const mn_attn_params &p, float scale) {
    const int64_t b = at.tile.span.b, t = at.tile.span.t0 + at.tile.first;
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float sum = mn_quad_sum(r.state.sum[i]);
        by[i] = softmax ? 1.0f / sum : p.scale / mn_fmax(p.scale * sqrtf(sum), p.eps);
        if (softmax && p.lse.data && threadIdx.x % 4 == 0 && r.row + 8 * i < at.tile.n_rows) {
            *mn_row<float>(p.lse, b, t + r.row + 8 * i, at.h) =
                fmaf(r.state.row_max[i], p.scale, logf(sum));
        }
    }
    mn_flash80_store_rows<D>(smem.q, r.o, by, p.o, b, t, at.h, (int)at.tile.n_rows,
                             (int)p.call.V);
}

/* Block: 128 queries of a head. Loads q (128,D), then k and v (64,D) in turns. Stores o (128,D) and
 * lse (128). REDO: of rows in front of a value that is not finite. */
template <int D, bool softmax, bool has_window, bool REDO>
__global__ void __launch_bounds__(MN_FLASH80_THREADS, 1)
attention_fwd_flash_sm80_kernel(const __grid_constant__ mn_flash_params f) {
    constexpr int step = MN_FLASH80_STEP;
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_flash80_fwd_smem<D> &smem = *(mn_flash80_fwd_smem<D> *)bytes;
    if (!REDO) mn_pdl_launch_dependents();
    const mn_attn_params &p = f.p;
    const mn_flash_coord at =
        REDO ? mn_flash_redo_coord(p)
             : mn_flash_coord_of(f, blockIdx.x, p.call, p.call.H, MN_FLASH80_ROWS, true);
    if (at.tile.n_rows == 0) return;
    const int K = (int)p.call.K, V = (int)p.call.V, n_rows = (int)at.tile.n_rows;
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0, j = at.h / (p.call.H / p.call.J);
    const mn_bf16 *k = mn_row<mn_bf16>(p.k, b, t0, j), *v = mn_row<mn_bf16>(p.v, b, t0, j);
    const int n_keys = (int)(at.before + at.tile.first) + n_rows;
    const int skipped = has_window ? mn_flash_skipped(at, p, step) : 0;
    const int n_tiles = (n_keys + step - 1) / step;
    const float scale = p.scale * 1.4426950408889634f;
    const auto load_keys = [&](int n) {
        if (n < n_tiles) {
            mn_flash80_load_tile<step, D>(mn_smem_addr(smem.k[n & 1]),
                                          k + n * step * p.k.stride[1], p.k.stride[1],
                                          n_keys - n * step, K);
        }
        mn_cp_async_commit_group();
    };
    const auto load_values = [&](int n) {
        if (n < n_tiles) {
            mn_flash80_load_tile<step, D>(mn_smem_addr(smem.v[n & 1]),
                                          v + n * step * p.v.stride[1], p.v.stride[1],
                                          n_keys - n * step, V);
        }
        mn_cp_async_commit_group();
    };
    mn_flash80_rows<D, softmax, has_window> r;
    r.row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    r.seen = (int)(at.before + at.tile.first) + r.row + 1;
    mn_flash80_load_tile<MN_FLASH80_ROWS, D>(mn_smem_addr(smem.q),
                                             mn_row<mn_bf16>(p.q, b, t0 + at.tile.first, at.h),
                                             p.q.stride[1], n_rows, K);
    load_keys(skipped);
    load_values(skipped);
    for (int n = skipped; n < n_tiles; n++) {
        uint32_t w[step / 4];
        const bool sees = r.sees(n * step, p.window);
        mn_cp_async_wait_group<1>();
        __syncthreads();    // keys n are there, keys n - 1 have been read
        if (n == skipped) {
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                mn_warp_frag_a<MN_FLASH80_ROWS>(r.q[i], mn_smem_addr(smem.q),
                                                threadIdx.x / 32 * 16, 16 * i);
            }
        }
        load_keys(n + 1);
        if (sees) r.weights(w, mn_smem_addr(smem.k[n & 1]), n * step, p, scale);
        mn_cp_async_wait_group<1>();
        __syncthreads();    // values n are there, values n - 1 have been read
        load_values(n + 1);
        if (sees) mn_warp_ab<step, D, step>(r.o, w, mn_smem_addr(smem.v[n & 1]), 0);
    }
    mn_cp_async_wait_group<0>();
    mn_flash80_finish(r, smem, at, p, scale);
}

template <int D, bool softmax, bool has_window>
static int forward_of(const mn_attn_params &p, cudaStream_t stream) {
    int64_t blocks;
    const auto kernel = attention_fwd_flash_sm80_kernel<D, softmax, has_window, false>;
    const auto redo = attention_fwd_flash_sm80_kernel<D, softmax, has_window, true>;
    const size_t smem = sizeof(mn_flash80_fwd_smem<D>);
    const mn_flash_params f = mn_flash_params_of(p, p.call, p.call.H, MN_FLASH80_ROWS,
                                                 p.call.H / p.call.J, &blocks);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const int code = mn_launch_smem(kernel, dim3((unsigned)blocks), MN_FLASH80_THREADS, smem,
                                    stream, f);
    if (code != cudaSuccess || !p.o.data) return code;
    return mn_launch_smem_behind(true, redo, dim3((unsigned)(mn_n_spans(p.call) * p.call.H)),
                                 MN_FLASH80_THREADS, smem, stream, f);
}

template <bool softmax, bool has_window>
static int forward_by(const mn_attn_params &p, cudaStream_t stream) {
    return mn_max(p.call.K, p.call.V) > 64 ? forward_of<128, softmax, has_window>(p, stream)
                                           : forward_of<64, softmax, has_window>(p, stream);
}

int mn_flash_fwd_sm80(const mn_attn_params &p, cudaStream_t stream) {
    if (!p.softmax) return forward_by<false, false>(p, stream);
    return p.window ? forward_by<true, true>(p, stream) : forward_by<true, false>(p, stream);
}

}    // namespace mneme::attention
