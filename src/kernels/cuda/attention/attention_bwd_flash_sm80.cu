/* attention_bwd_flash_sm80.cu - attention and relu_attention backward by mma.sync, in bf16, for
 * heads of up to 128 columns: the two kernels of attention_bwd_flash_sm90.cuh, by the equations of
 * attention_tiles.cuh.
 *
 * A block's 128 rows stay in shared memory, a warp has 16 of them; those of the other side come by
 * cp.async, 64 at a time, the next under the products of these. Nothing is added across blocks. */
#include "kernels/cuda/attention/attention_mma_sm80.cuh"

namespace mneme::attention {

/* The two rows of a thread in a product of 16 rows. */
__device__ inline int mn_flash80_row(void) {
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
}

/* ---- queries --------------------------------------------------------------------------------- */

/* What a block for queries knows of its place. */
struct mn_bwd80_queries {
    mn_flash_coord at;
    int n_keys, n_tiles, skipped;
    int row, seen;    // the thread's first row, keys that it sees
};

template <bool has_window>
__device__ inline mn_bwd80_queries mn_bwd80_queries_of(const mn_bwd_params &k) {
    const mn_attn_params &p = k.f.p;
    mn_bwd80_queries q;
    q.at = mn_flash_coord_of(k.f, blockIdx.x, p.call, p.call.H, MN_FLASH80_ROWS, true);
    q.n_keys = (int)(q.at.before + q.at.tile.first + q.at.tile.n_rows);
    q.skipped = has_window ? mn_flash_skipped(q.at, p, MN_FLASH80_STEP) : 0;
    q.n_tiles = (q.n_keys + MN_FLASH80_STEP - 1) / MN_FLASH80_STEP;
    q.row = mn_flash80_row();
    q.seen = (int)(q.at.before + q.at.tile.first) + q.row + 1;
    return q;
}

/* Scans the keys once: use(first key, stage) for each tile that a row of the warp sees. The block
 * calls, and may again. */
template <int D, bool has_window, typename F>
__device__ inline void mn_bwd80_scan_keys(mn_flash80_bwd_smem<D> &smem, const mn_bwd80_queries &q,
                                          const mn_attn_params &p, F use) {
    constexpr int step = MN_FLASH80_STEP;
    const int64_t b = q.at.tile.span.b, t0 = q.at.tile.span.t0;
    const int64_t j = q.at.h / (p.call.H / p.call.J);
    const mn_bf16 *k = mn_row<mn_bf16>(p.k, b, t0, j), *v = mn_row<mn_bf16>(p.v, b, t0, j);
    const int top = q.seen - threadIdx.x % 32 / 4;    // keys that the warp's first row sees
    const auto load = [&](int n) {
        const int first = n * step, left = q.n_keys - first;
        mn_flash80_load_tile<step, D>(mn_smem_addr(smem.x[n & 1]), k + first * p.k.stride[1],
                                      p.k.stride[1], left, (int)p.call.K);
        mn_flash80_load_tile<step, D>(mn_smem_addr(smem.y[n & 1]), v + first * p.v.stride[1],
                                      p.v.stride[1], left, (int)p.call.V);
        mn_cp_async_commit_group();
    };
    __syncthreads();    // a scan before has read its last tile
    load(q.skipped);
    for (int n = q.skipped; n < q.n_tiles; n++) {
        mn_cp_async_wait_group<0>();
        __syncthreads();    // tile n is there, tile n - 1 has been read
        if (n + 1 < q.n_tiles) load(n + 1);
        const int first = n * step;
        if (first >= top + 15 || (has_window && first + step <= top - p.window)) continue;
        use(first, n & 1);
    }
}

/* z and g = do v' of a tile; what rows do not see is masked in z. */
template <int D, bool softmax, bool has_window>
__device__ inline void mn_bwd80_scores(float (&z)[MN_FLASH80_STEP / 2],
                                       float (&g)[MN_FLASH80_STEP / 2],
                                       mn_flash80_bwd_smem<D> &smem, const mn_bwd80_queries &q,
                                       int64_t window, int first, int stage) {
    constexpr int rows = MN_FLASH80_ROWS, step = MN_FLASH80_STEP;
    const int row0 = threadIdx.x / 32 * 16, left = q.seen - first;
    mn_warp_abt<D, rows, step, step>(z, mn_smem_addr(smem.a), row0, mn_smem_addr(smem.x[stage]), 0);
    mn_warp_abt<D, rows, step, step>(g, mn_smem_addr(smem.b), row0, mn_smem_addr(smem.y[stage]), 0);
    if (left < step) mn_flash_causal_mask<softmax>(z, left);
    if (has_window && left + 8 > window) mn_flash_window_mask(z, left - window);
}

/* The two numbers of the thread's rows, for the second kernel. */
__device__ inline void mn_bwd80_store_stats(const mn_bwd_params &k, const mn_bwd80_queries &q,
                                            const float (&a)[2], const float (&b)[2]) {
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (q.row + 8 * r >= q.at.tile.n_rows) continue;
        float *to = mn_bwd_row_stats(k, q.at.tile.span.b, q.at.h,
                                     q.at.tile.span.t0 + q.at.tile.first + q.row + 8 * r);
        to[0] = a[r];
        to[mn_bwd_stats_stride(k)] = b[r];
    }
}

/* Block: 128 queries of a head. Loads q, do (128,D) and o (128,D) or nothing, then k and v (64,D)
 * in turns. Stores dq (128,D), and a and b (128) in k.rows for the second kernel. has_stats:
 * forward left lse and o. */
template <int D, bool softmax, bool has_stats, bool has_window>
__global__ void __launch_bounds__(MN_FLASH80_THREADS, 1)
attention_bwd_dq_sm80_kernel(const __grid_constant__ mn_bwd_params k) {
    constexpr int step = MN_FLASH80_STEP;
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_flash80_bwd_smem<D> &smem = *(mn_flash80_bwd_smem<D> *)bytes;
    const mn_attn_params &p = k.f.p;
    const mn_bwd80_queries q = mn_bwd80_queries_of<has_window>(k);
    if (q.at.tile.n_rows == 0) return;
    const int n_rows = (int)q.at.tile.n_rows;
    const int64_t n = q.at.tile.span.b, t = q.at.tile.span.t0 + q.at.tile.first;
    const float scale = softmax ? p.scale * 1.4426950408889634f : p.scale;
    mn_flash80_load_tile<MN_FLASH80_ROWS, D>(mn_smem_addr(smem.a),
                                             mn_row<mn_bf16>(p.q, n, t, q.at.h), p.q.stride[1],
                                             n_rows, (int)p.call.K);
    mn_flash80_load_tile<MN_FLASH80_ROWS, D>(mn_smem_addr(smem.b),
                                             mn_row<mn_bf16>(p.d_o, n, t, q.at.h),
                                             p.d_o.stride[1], n_rows, (int)p.call.V);
    float a[2], b[2], tolerance[2], dq[D / 2];
    if (has_stats) {
        mn_bwd_load_stats(a, b, tolerance, p, q.at, q.row);
    } else {
        mn_bwd_row_state s = { { -INFINITY, -INFINITY }, { 0.0f, 0.0f }, { 0.0f, 0.0f } };
        mn_bwd80_scan_keys<D, has_window>(smem, q, p, [&](int first, int stage) {
            float z[step / 2], g[step / 2];
            mn_bwd80_scores<D, softmax, has_window>(z, g, smem, q, p.window, first, stage);
            mn_bwd_accumulate_stats<softmax>(s, z, g, scale);
        });
        mn_bwd_finish_stats<softmax>(s, a, b, p, scale);
        mn_bwd80_store_stats(k, q, a, b);
    }
    for (int scans = 0;; scans++) {
        float residual_sum[2] = { 0.0f, 0.0f }, size[2] = { 0.0f, 0.0f };
#pragma unroll
        for (int i = 0; i < D / 2; i++) dq[i] = 0.0f;
        mn_bwd80_scan_keys<D, has_window>(smem, q, p, [&](int first, int stage) {
            float z[step / 2], g[step / 2];
            uint32_t dz[step / 4];
            mn_bwd80_scores<D, softmax, has_window>(z, g, smem, q, p.window, first, stage);
            mn_bwd_weights<softmax>(z, a, scale);
#pragma unroll
            for (int i = 0; i < step / 2; i += 2) {
                const int r = i % 4 / 2;
                const float x = mn_bwd_dscore<softmax>(z[i], g[i], a[r], b[r]);
                const float y = mn_bwd_dscore<softmax>(z[i + 1], g[i + 1], a[r], b[r]);
                if (has_stats) residual_sum[r] += x + y, size[r] += fabsf(x) + fabsf(y);
                dz[i / 2] = mn_bf16x2(x, y);
            }
            mn_warp_ab<step, D, step>(dq, dz, mn_smem_addr(smem.x[stage]), 0);
        });
        if (!has_stats || scans == 1) break;
        float whole[2];
        const bool inexact = mn_bwd_correct_delta(whole, b, tolerance, residual_sum, size);
        mn_bwd80_store_stats(k, q, a, whole);
        if (!__syncthreads_or(inexact)) break;
    }
    const float by[2] = { p.scale, p.scale };
    mn_flash80_store_rows<D>(smem.a, dq, by, p.dq, n, t, q.at.h, n_rows, (int)p.call.K);
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Queries, their cotangents and two numbers of each of turn n to its stage. */
template <int D>
__device__ inline void mn_bwd80_load_queries(mn_flash80_bwd_smem<D> &smem,
                                             const mn_flash_coord &at, const mn_bwd_params &k,
                                             const mn_bwd_q_range &range, int n) {
    constexpr int step = MN_FLASH80_STEP;
    const mn_attn_params &p = k.f.p;
    const int t = range.first + n % range.n * step, left = (int)range.length - t;
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0, h = range.head0 + n / range.n;
    mn_flash80_load_tile<step, D>(mn_smem_addr(smem.x[n & 1]), mn_row<mn_bf16>(p.q, b, t0 + t, h),
                                  p.q.stride[1], left, (int)p.call.K);
    mn_flash80_load_tile<step, D>(mn_smem_addr(smem.y[n & 1]),
                                  mn_row<mn_bf16>(p.d_o, b, t0 + t, h), p.d_o.stride[1], left,
                                  (int)p.call.V);
    if (threadIdx.x < 2 * step) {
        const int r = threadIdx.x % step, which = threadIdx.x / step;
        const float *from = mn_bwd_row_stats(k, b, h, t0 + t);
        if (r < left) from += r + which * mn_bwd_stats_stride(k);
        mn_cp_async_float(mn_smem_addr(&smem.rows[n & 1][which][r]), from, r < left);
    }
    mn_cp_async_commit_group();
}

/* Adds what 32 queries from number `q0` of a stage on, which is query t, give to the warp's 16
 * keys; `key` is the first query that sees the thread's first one. */
template <int D, bool softmax, bool has_window>
__device__ inline void mn_bwd80_keys(float (&dk)[D / 2], float (&dv)[D / 2],
                                     mn_flash80_bwd_smem<D> &smem, const mn_attn_params &p,
                                     float scale, int stage, int q0, int t, int key) {
    constexpr int rows = MN_FLASH80_ROWS, step = MN_FLASH80_STEP, n = step / 2;
    const int row0 = threadIdx.x / 32 * 16, column = threadIdx.x % 4 * 2;
    const uint32_t x = mn_smem_addr(smem.x[stage]), y = mn_smem_addr(smem.y[stage]);
    float z[n / 2], g[n / 2];
    uint32_t w[n / 4], dz[n / 4];
    mn_warp_abt<D, rows, step, n>(z, mn_smem_addr(smem.a), row0, x, q0);
    mn_warp_abt<D, rows, step, n>(g, mn_smem_addr(smem.b), row0, y, q0);
    if (t < key + 8 || (has_window && t + n > key + p.window)) {
#pragma unroll
        for (int i = 0; i < n / 2; i++) {
            const int query = t + i / 4 * 8 + column + i % 2, first = key + i % 4 / 2 * 8;
            if (query < first) z[i] = softmax ? -INFINITY : 0.0f;
            if (has_window && query >= first + p.window) z[i] = -INFINITY;
        }
    }
#pragma unroll
    for (int i = 0; i < n / 2; i += 4) {
        const float2 a = *(const float2 *)&smem.rows[stage][0][q0 + i / 4 * 8 + column];
        const float2 b = *(const float2 *)&smem.rows[stage][1][q0 + i / 4 * 8 + column];
#pragma unroll
        for (int j = i; j < i + 4; j += 2) {
            const float left = mn_bwd_weight<softmax>(z[j], a.x, scale);
            const float right = mn_bwd_weight<softmax>(z[j + 1], a.y, scale);
            w[j / 2] = mn_bf16x2(left, right);
            dz[j / 2] =
                mn_bf16x2(mn_bwd_dscore<softmax>(softmax ? left : z[j], g[j], a.x, b.x),
                          mn_bwd_dscore<softmax>(softmax ? right : z[j + 1], g[j + 1], a.y, b.y));
        }
    }
    mn_warp_ab<n, D, step>(dv, w, y, q0);
    mn_warp_ab<n, D, step>(dk, dz, x, q0);
}

/* Block: 128 keys of a key head. Loads k, v (128,D), then q, do (64,D) in turns, a and b of every
 * query that sees them, of all query heads that share the key head. Stores dk, dv (128,D). */
template <int D, bool softmax, bool has_window>
__global__ void __launch_bounds__(MN_FLASH80_THREADS, 1)
attention_bwd_dkv_sm80_kernel(const __grid_constant__ mn_bwd_params k) {
    constexpr int step = MN_FLASH80_STEP;
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_flash80_bwd_smem<D> &smem = *(mn_flash80_bwd_smem<D> *)bytes;
    const mn_attn_params &p = k.f.p;
    mn_call keys = p.call;
    keys.T = keys.L;
    mn_flash_coord at = mn_flash_coord_of(k.f, blockIdx.x, keys, keys.J, MN_FLASH80_ROWS, false);
    at.before = mn_keys_before(p.call);
    if (at.tile.n_rows == 0) return;
    const mn_bwd_q_range range = mn_bwd_q_range_of<has_window>(at, p, step);
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0 + at.tile.first;
    const int n_rows = (int)at.tile.n_rows, turns = range.n * range.heads;
    const int key = (int)(at.tile.first - at.before) + mn_flash80_row();
    const int first = key - threadIdx.x % 32 / 4;    // the warp's first key
    const float scale = softmax ? p.scale * 1.4426950408889634f : p.scale;
    float dk[D / 2] = {}, dv[D / 2] = {};
    mn_flash80_load_tile<MN_FLASH80_ROWS, D>(mn_smem_addr(smem.a),
                                             mn_row<mn_bf16>(p.k, b, t0, at.h), p.k.stride[1],
                                             n_rows, (int)p.call.K);
    mn_flash80_load_tile<MN_FLASH80_ROWS, D>(mn_smem_addr(smem.b),
                                             mn_row<mn_bf16>(p.v, b, t0, at.h), p.v.stride[1],
                                             n_rows, (int)p.call.V);
    if (turns > 0) mn_bwd80_load_queries<D>(smem, at, k, range, 0);
    else mn_cp_async_commit_group();
    for (int n = 0; n < turns; n++) {
        mn_cp_async_wait_group<0>();
        __syncthreads();    // turn n is there, turn n - 1 has been read
        if (n + 1 < turns) mn_bwd80_load_queries<D>(smem, at, k, range, n + 1);
#pragma unroll 1
        for (int q0 = 0; q0 < step; q0 += step / 2) {
            const int t = range.first + n % range.n * step + q0;
            if (t + step / 2 <= first || (has_window && t >= first + 15 + p.window)) continue;
            mn_bwd80_keys<D, softmax, has_window>(dk, dv, smem, p, scale, n & 1, q0, t, key);
        }
    }
    mn_cp_async_wait_group<0>();
    __syncthreads();    // all copies are there, also where there were no turns
    const float by[2] = { p.scale, p.scale }, one[2] = { 1.0f, 1.0f };
    mn_flash80_store_rows<D>(smem.a, dk, by, p.dk, b, t0, at.h, n_rows, (int)p.call.K);
    mn_flash80_store_rows<D>(smem.b, dv, one, p.dv, b, t0, at.h, n_rows, (int)p.call.V);
}

/* ---- launches -------------------------------------------------------------------------------- */

static int launch(void (*kernel)(mn_bwd_params), const mn_bwd_params &k, int64_t blocks,
                  size_t smem, cudaStream_t stream) {
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(kernel, dim3((unsigned)blocks), MN_FLASH80_THREADS, smem, stream, k);
}

template <int D, bool softmax, bool has_stats, bool has_window>
static int backward_of(const mn_attn_params &p, float *rows, cudaStream_t stream) {
    const size_t smem = sizeof(mn_flash80_bwd_smem<D>);
    mn_call keys = p.call;
    keys.T = keys.L;
    int64_t blocks;
    mn_bwd_params k = { mn_flash_params_of(p, p.call, p.call.H, MN_FLASH80_ROWS,
                                           p.call.H / p.call.J, &blocks),
                        rows };
    const int code = launch(attention_bwd_dq_sm80_kernel<D, softmax, has_stats, has_window>, k,
                            blocks, smem, stream);
    if (code != cudaSuccess || (!p.dk.data && !p.dv.data)) return code;
    k.f = mn_flash_params_of(p, keys, p.call.J, MN_FLASH80_ROWS, 1, &blocks);
    return launch(attention_bwd_dkv_sm80_kernel<D, softmax, has_window>, k, blocks, smem, stream);
}

template <int D>
static int backward_by(const mn_attn_params &p, float *rows, cudaStream_t stream) {
    if (!p.softmax) return backward_of<D, false, false, false>(p, rows, stream);
    if (p.window) return backward_of<D, true, true, true>(p, rows, stream);
    return p.lse.data && p.o.data ? backward_of<D, true, true, false>(p, rows, stream)
                                  : backward_of<D, true, false, false>(p, rows, stream);
}

int mn_flash_bwd_sm80(const mn_attn_params &p, float *rows, cudaStream_t stream) {
    return mn_max(p.call.K, p.call.V) > 64 ? backward_by<128>(p, rows, stream)
                                           : backward_by<64>(p, rows, stream);
}

}    // namespace mneme::attention
