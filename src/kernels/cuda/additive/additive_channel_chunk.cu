/* additive_channel_chunk.cu - additive over chunks where each channel has a decay: scans and their
 * launches. */
#include "kernels/cuda/additive/additive_channel_scale.cuh"
#include "kernels/cuda/additive/additive_state_scan.cuh"
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::additive {

/* Scans over chunks of 64 tokens, in four parts of 16, for decays per channel, on the factors of
 * additive_channel_scale.cuh: x~ and y~ are rows times theirs. The decays are those of the channels
 * of x and y where a scan is of keys (o, dv), and of those of z and out where it is of values (dq,
 * dk). M (K, 64 value columns) is the state; f, a number a channel, is what M keeps over a
 * part; inside is what tokens of the same part give each other.
 *
 * Of keys:    out_I = scale (x~_I (f M) + sum over parts J < I of (x~_I f y~_J') z_J + inside)
 *             M <- f M + y~_J' z_J, part by part
 * Of values:  out_I = scale (x_I M, then part by part f out + (x_I y_J') z~_J; all times the
 *             factor of the row; + inside)
 *
 * A block has 64 value columns of one head of one sequence and eight warps; a warp has the rows of
 * one part and half of the columns. Keys of up to 128 fit in the 163 KiB of 8.0 with two chunks:
 * what scales inside a part takes the place of the decays it was made of, the state is shared
 * once, and a scan of values reads its rows of x from memory. */

enum { MN_CHANNEL_WARPS = 8, MN_CHANNEL_THREADS = 32 * MN_CHANNEL_WARPS };

template <int DEPTH>
struct mn_channel_sizes {
    static constexpr int pitch = DEPTH + 8, steps = DEPTH / 16;
    static constexpr int buffers = DEPTH <= 128 ? 2 : 1;    // of chunks
    static constexpr int row_groups = steps < MN_CHANNEL_WARPS ? steps : MN_CHANNEL_WARPS;
    static constexpr int row_tiles = steps / row_groups;
    static constexpr int column_tiles = 8 * row_groups / MN_CHANNEL_WARPS;
    static constexpr int kept = DEPTH * MN_SCAN_WIDTH;
    static constexpr int deep = MN_SUBCHUNK_CHUNK * pitch, wide = MN_SUBCHUNK_CHUNK * MN_SCAN_PITCH;
};

template <int DEPTH>
using mn_channel_state =
    mn_scan_state<mn_channel_sizes<DEPTH>::row_tiles, mn_channel_sizes<DEPTH>::column_tiles,
                  mn_channel_sizes<DEPTH>::row_groups, MN_CHANNEL_THREADS>;

/* The part of this thread's warp and the first of its columns. Two warps that share a scheduler
 * have an early and a late part. */
__device__ inline int mn_channel_subchunk() {
    const int warp = threadIdx.x / 32;
    return warp < 4 ? warp : 7 - warp;
}

__device__ inline int mn_channel_column0() {
    return threadIdx.x / 128 * 32;
}

/* o += a z for 16 rows of a left operand, over 16 tokens and this warp's 32 columns */
__device__ inline void mn_channel_mma(float (&o)[4][4], const uint32_t (&a)[4],
                                      const mn_bf16 *z) {
#pragma unroll
    for (int tile = 0; tile < 4; tile += 2) {
        uint32_t b[4];
        mn_frag_b_trans(b, z + mn_channel_column0() + 8 * tile, MN_SCAN_PITCH);
        mn_mma(o[tile], a, b[0], b[1]);
        mn_mma(o[tile + 1], a, b[2], b[3]);
    }
}

/* Zero where the column is later than the row. */
__device__ inline void mn_channel_causal_mask(float (&p)[2][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int column = 8 * (i / 4) + lane % 4 * 2 + i % 2, row = lane / 4 + i % 4 / 2 * 8;
        if (column > row) p[i / 4][i % 4] = 0.0f;
    }
}

/* Rows of a part of x with rows of a part of y, as a left operand. */
template <int DEPTH>
__device__ inline void mn_channel_scores(uint32_t (&a)[4], const uint32_t (&x)[DEPTH / 16][4],
                                         const mn_bf16 *y, bool inside) {
    float p[2][4] = {}, odd[2][4] = {};
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        uint32_t b[4];
        mn_frag_b(b, y + 16 * k, DEPTH + 8);
        mn_mma(k % 2 ? odd[0] : p[0], x[k], b[0], b[1]);
        mn_mma(k % 2 ? odd[1] : p[1], x[k], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) p[i / 4][i % 4] += odd[i / 4][i % 4];
    if (inside) mn_channel_causal_mask(p);
    mn_frag_a_of(a, p[0], p[1]);
}

template <int DEPTH>
__device__ inline void mn_channel_rows(uint32_t (&x)[DEPTH / 16][4], const mn_bf16 *rows) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) mn_frag_a(x[k], rows + 16 * k, DEPTH + 8);
}

template <int DEPTH>
__device__ inline void mn_channel_mma_state(float (&o)[4][4], const uint32_t (&x)[DEPTH / 16][4],
                                            const mn_bf16 *state) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        mn_channel_mma(o, x[k], state + 16 * k * MN_SCAN_PITCH);
    }
}

/* The first token of the chunk that is number `iter` of the scan. */
__device__ inline int64_t mn_channel_token0(int64_t iter, const mn_scan_coord &at,
                                           bool reverse) {
    return (reverse ? at.n_chunks - 1 - iter : iter) * MN_SUBCHUNK_CHUNK;
}

/* The product of the decays of a chunk in this thread's channel, among COLUMNS. */
template <int COLUMNS>
__device__ inline float mn_channel_chunk_decay(const float *cum_decay) {
    float whole = 1.0f;
    if (threadIdx.x >= COLUMNS) return whole;
#pragma unroll
    for (int part = 0; part < MN_SUBCHUNKS; part++) whole *=
        cum_decay[part * COLUMNS + threadIdx.x];
    return whole;
}

/* Leaves the state, or what the segment adds to it and by how much its `channels` fell. */
template <int DEPTH>
__device__ inline void mn_channel_end(mn_channel_state<DEPTH> &M, const mn_chunk_scan &p,
                                      const mn_scan_coord &at, float cum_decay, int channels) {
    if (p.reduce_pass) {
        M.store_sum(p.sums + at.index * mn_channel_sizes<DEPTH>::kept);
        if (threadIdx.x < channels) p.cum_decays[at.index * MN_SCAN_DECAYS + threadIdx.x] =
            cum_decay;
    } else if (at.last) {
        M.store(p, at);
    }
}

/* ---- scans of keys --------------------------------------------------------------------------- */

template <int DEPTH>
struct mn_keys_stage {
    alignas(16) mn_bf16 x[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 y[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 g[mn_channel_sizes<DEPTH>::deep];    // then k_inside
    alignas(16) mn_bf16 z[mn_channel_sizes<DEPTH>::wide];
};

template <int DEPTH>
struct mn_keys_smem {
    mn_keys_stage<DEPTH> stage[mn_channel_sizes<DEPTH>::buffers];
    alignas(16) mn_bf16 q_inside[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 state[DEPTH * MN_SCAN_PITCH];
    alignas(16) float cum_decay[MN_SUBCHUNKS * DEPTH];
};

template <int DEPTH>
__device__ inline void mn_keys_load(mn_keys_stage<DEPTH> &to, const mn_scan_col_tiles &col_tiles,
                                     const mn_col_tile<const mn_bf16> &g, int64_t t, int64_t length,
                                     bool reverse) {
    constexpr int rows = MN_SUBCHUNK_CHUNK, threads = MN_CHANNEL_THREADS;
    const int count = (int)min((int64_t)rows, length - t);
    if (col_tiles.reads) mn_load_tokens<rows, DEPTH, threads>(to.x, col_tiles.x, t, count, reverse);
    mn_load_tokens<rows, DEPTH, threads>(to.y, col_tiles.y, t, count, reverse);
    mn_load_tokens<rows, DEPTH, threads>(to.g, g, t, count, reverse);
    mn_load_tokens<rows, MN_SCAN_WIDTH, threads>(to.z, col_tiles.z, t, count, reverse);
    mn_cp_async_commit();
}

/* Multiplies rows of x~ by the decay of their channels over one more part; `f` is the product so
 * far. */
template <int DEPTH>
__device__ inline void mn_keys_decay_rows(uint32_t (&x)[DEPTH / 16][4], float4 (&f)[DEPTH / 16],
                                     const mn_bf16 *rows, const float *cum_decay) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        const float2 low = *(const float2 *)(cum_decay + 16 * k + lane % 4 * 2);
        const float2 high = *(const float2 *)(cum_decay + 16 * k + 8 + lane % 4 * 2);
        f[k].x *= low.x, f[k].y *= low.y, f[k].z *= high.x, f[k].w *= high.y;
        mn_frag_a(x[k], rows + 16 * k, DEPTH + 8);
        x[k][0] = mn_bf16x2_mul(x[k][0], f[k].x, f[k].y);
        x[k][1] = mn_bf16x2_mul(x[k][1], f[k].x, f[k].y);
        x[k][2] = mn_bf16x2_mul(x[k][2], f[k].z, f[k].w);
        x[k][3] = mn_bf16x2_mul(x[k][3], f[k].z, f[k].w);
    }
}

template <int DEPTH>
__device__ inline void mn_keys_output(float (&o)[4][4], const mn_keys_smem<DEPTH> &smem,
                                      const mn_keys_stage<DEPTH> &in, bool reverse) {
    constexpr int pitch = DEPTH + 8;
    const int part = mn_channel_subchunk();
    uint32_t x[DEPTH / 16][4], a[4];
    float4 f[DEPTH / 16];
    const mn_bf16 *x_inside = reverse ? in.g : smem.q_inside;
    const mn_bf16 *y_inside = reverse ? smem.q_inside : in.g;
    mn_channel_rows<DEPTH>(x, x_inside + part * MN_SUBCHUNK * pitch);
    mn_channel_scores<DEPTH>(a, x, y_inside + part * MN_SUBCHUNK * pitch, true);
    mn_mma_causal(o, a, in.z + part * MN_SUBCHUNK * MN_SCAN_PITCH + mn_channel_column0(),
                  MN_SCAN_PITCH);
    const mn_bf16 *rows = in.x + part * MN_SUBCHUNK * pitch;
    mn_channel_rows<DEPTH>(x, rows);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) f[k] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
#pragma unroll 1
    for (int from = part - 1; from >= 0; from--) {
        mn_channel_scores<DEPTH>(a, x, in.y + from * MN_SUBCHUNK * pitch, false);
        mn_channel_mma(o, a, in.z + from * MN_SUBCHUNK * MN_SCAN_PITCH);
        mn_keys_decay_rows<DEPTH>(x, f, rows, smem.cum_decay + from * DEPTH);
    }
    mn_channel_mma_state<DEPTH>(o, x, smem.state);
}

/* M <- f M + y~' z for every part; the decays f belong to rows of M, or to its columns */
template <int DEPTH, bool OF_VALUES>
__device__ inline void mn_channel_update_state(mn_channel_state<DEPTH> &M, const mn_bf16 *y,
                                        const mn_bf16 *z, const float *cum_decay) {
    using sizes = mn_channel_sizes<DEPTH>;
    const int warp = threadIdx.x / 32;
    const int row0 = warp % sizes::row_groups * sizes::row_tiles * 16;
    const int column0 = warp / sizes::row_groups * sizes::column_tiles * 8;
#pragma unroll 2
    for (int part = 0; part < MN_SUBCHUNKS; part++) {
        const float *of_part = cum_decay + part * (OF_VALUES ? MN_SCAN_WIDTH : DEPTH);
        M.each([&](float &cell, int i, int j) { cell *= of_part[OF_VALUES ? j : i]; });
        uint32_t b[sizes::column_tiles / 2][4];
#pragma unroll
        for (int tile = 0; tile < sizes::column_tiles; tile += 2) {
            mn_frag_b_trans(b[tile / 2],
                                z + part * MN_SUBCHUNK * MN_SCAN_PITCH + column0 + 8 * tile,
                            MN_SCAN_PITCH);
        }
#pragma unroll
        for (int r = 0; r < sizes::row_tiles; r++) {
            uint32_t a[4];
            mn_frag_a_trans(a, y + part * MN_SUBCHUNK * sizes::pitch + row0 + 16 * r, sizes::pitch);
#pragma unroll
            for (int tile = 0; tile < sizes::column_tiles; tile += 2) {
                mn_mma(M.at[r][tile], a, b[tile / 2][0], b[tile / 2][1]);
                mn_mma(M.at[r][tile + 1], a, b[tile / 2][2], b[tile / 2][3]);
            }
        }
    }
}

/* scale o to memory */
__device__ inline void mn_channel_store_out(const float (&o)[4][4], const mn_chunk_scan &p,
                                      const mn_scan_col_tiles &col_tiles, int64_t t, int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = mn_channel_subchunk() * MN_SUBCHUNK + lane / 4 + 8 * half;
        const int token = p.reverse ? MN_SUBCHUNK_CHUNK - 1 - row : row;
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            pair[i] = mn_bf16x2(p.scale * o[i][2 * half], p.scale * o[i][2 * half + 1]);
        }
        mn_store_tokens(col_tiles.out, pair, t + token, token < count, mn_channel_column0());
    }
}

template <int DEPTH>
__global__ void __launch_bounds__(MN_CHANNEL_THREADS, 1)
additive_channel_scan_keys(const __grid_constant__ mn_chunk_scans all) {
    constexpr int buffers = mn_channel_sizes<DEPTH>::buffers, kept = mn_channel_sizes<DEPTH>::kept;
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_keys_smem<DEPTH> &smem = *(mn_keys_smem<DEPTH> *)bytes;
    const mn_chunk_scan &p = all.scan[0];
    const mn_scan_coord at = mn_scan_block_coord(all.call, p, MN_SUBCHUNK_CHUNK);
    if (at.idle) return;
    const mn_scan_col_tiles col_tiles(p, at, DEPTH);
    const mn_col_tile<const mn_bf16> g =
        mn_col_tile_of<const mn_bf16>(all.g, at.span, at.h, 0, p.depth, DEPTH);
    const int64_t length = at.span.length;
    const bool reverse = p.reverse;
    float cum_decay = 1.0f;
    mn_channel_state<DEPTH> M;
    M.begin(p, at, kept, [&](const float *cum_decays) {
        M.each([&](float &cell, int i, int) { cell *= cum_decays[i]; });
    });
    if (buffers == 2 && at.iter < at.end) {
        mn_keys_load<DEPTH>(smem.stage[0], col_tiles, g, mn_channel_token0(at.iter, at, reverse),
                             length, reverse);
    }
    for (int64_t n = at.iter; n < at.end; n++) {
        const int64_t t = mn_channel_token0(n, at, reverse);
        const int now = (n - at.iter) % buffers, next = (now + 1) % buffers;
        mn_keys_stage<DEPTH> &in = smem.stage[now];
        if (buffers == 1) {
            __syncthreads();
            mn_keys_load<DEPTH>(in, col_tiles, g, t, length, reverse);
        }
        mn_cp_async_wait_all();
        __syncthreads();
        if (col_tiles.reads) M.share(smem.state);
        if (buffers == 2 && n + 1 < at.end) {
            mn_keys_load<DEPTH>(smem.stage[next], col_tiles, g,
                                mn_channel_token0(n + 1, at, reverse),
                                 length, reverse);
        }
        mn_scale_tiles tiles = { in.x, smem.q_inside, in.y, in.g, in.g, smem.cum_decay };
        if (reverse) tiles.q = in.y, tiles.k = in.x;
        mn_scale_chunk<DEPTH, MN_CHANNEL_THREADS>(tiles, reverse);
        __syncthreads();
        float o[4][4] = {};
        if (col_tiles.reads) mn_keys_output<DEPTH>(o, smem, in, reverse);
        mn_channel_update_state<DEPTH, false>(M, in.y, in.z, smem.cum_decay);
        if (!col_tiles.reads) cum_decay *= mn_channel_chunk_decay<DEPTH>(smem.cum_decay);
        if (!col_tiles.reads) continue;
        mn_channel_store_out(o, p, col_tiles, t, (int)min((int64_t)MN_SUBCHUNK_CHUNK, length - t));
    }
    mn_channel_end<DEPTH>(M, p, at, cum_decay, DEPTH);
}

/* ---- scans of values ------------------------------------------------------------------------- */

template <int DEPTH>
struct mn_values_stage {
    alignas(16) mn_bf16 y[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 z[mn_channel_sizes<DEPTH>::wide];
    alignas(16) mn_bf16 paired[mn_channel_sizes<DEPTH>::wide];
    alignas(16) mn_bf16 g[mn_channel_sizes<DEPTH>::wide];    // then k_inside
};

template <int DEPTH>
struct mn_values_smem {
    mn_values_stage<DEPTH> stage[mn_channel_sizes<DEPTH>::buffers];
    alignas(16) mn_bf16 q_inside[mn_channel_sizes<DEPTH>::wide];
    alignas(16) mn_bf16 state[DEPTH * MN_SCAN_PITCH];
    alignas(16) float factor[mn_channel_sizes<DEPTH>::wide];    // of rows of out; sums for dg
    alignas(16) float inside[mn_channel_sizes<DEPTH>::wide];
    alignas(16) float cum_decay[MN_SUBCHUNKS * MN_SCAN_WIDTH];
    float state_dots[MN_CHANNEL_WARPS][MN_SCAN_WIDTH], parts[MN_SUBCHUNKS][MN_SCAN_WIDTH];
};

template <int DEPTH>
__device__ inline void mn_values_load(mn_values_stage<DEPTH> &to, const mn_chunk_scan &p,
                                       const mn_scan_col_tiles &col_tiles,
                                       const mn_col_tile<const mn_bf16> &g, int64_t t,
                                       int64_t length) {
    constexpr int rows = MN_SUBCHUNK_CHUNK, threads = MN_CHANNEL_THREADS;
    const int count = (int)min((int64_t)rows, length - t);
    mn_load_tokens<rows, DEPTH, threads>(to.y, col_tiles.y, t, count, p.reverse);
    mn_load_tokens<rows, MN_SCAN_WIDTH, threads>(to.z, col_tiles.z, t, count, p.reverse);
    mn_load_tokens<rows, MN_SCAN_WIDTH, threads>(to.g, g, t, count, p.reverse);
    if (p.mode != MN_SCAN_PLAIN && col_tiles.reads) {
        mn_load_tokens<rows, MN_SCAN_WIDTH, threads>(to.paired, col_tiles.paired, t, count,
                                                      p.reverse);
    }
    mn_cp_async_commit();
}

/* Asks for the rows of this warp's part of x, so that they are near when they are read. */
template <int DEPTH>
__device__ inline void mn_values_prefetch_rows(const mn_col_tile<const mn_bf16> &from, int64_t t,
                                               int count, bool reverse) {
    constexpr int lines = DEPTH / 64;    // of 128 bytes, of a row
    const int row0 = mn_channel_subchunk() * MN_SUBCHUNK;
    for (int i = threadIdx.x % 32; i < MN_SUBCHUNK * lines; i += 32) {
        const int row = row0 + i / lines, column = i % lines * 64;
        const int token = reverse ? MN_SUBCHUNK_CHUNK - 1 - row : row;
        if (token < count && column < from.width) {
            mn_prefetch_l1(from.at + (t + token) * from.step + column);
        }
    }
}

/* Rows of this warp's part of x, straight from memory. */
template <int DEPTH>
__device__ inline void mn_values_load_rows(uint32_t (&x)[DEPTH / 16][4],
                                           const mn_col_tile<const mn_bf16> &from, int64_t t,
                                           int count, bool reverse) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = mn_channel_subchunk() * MN_SUBCHUNK + threadIdx.x % 32 / 4 + 8 * half;
        const int token = reverse ? MN_SUBCHUNK_CHUNK - 1 - row : row;
        uint32_t pair[DEPTH / 8];
        mn_load_bf16x2(pair, from, t + token, token < count, 0);
#pragma unroll
        for (int i = 0; i < DEPTH / 8; i++) x[i / 2][i % 2 * 2 + half] = pair[i];
    }
}

/* o, and its part from inside this warp's part of the chunk, before the factors of rows; the part
 * of o that is read from the state where it is asked for */
template <int DEPTH>
__device__ inline void mn_values_output(float (&o)[4][4], float (&inside)[4][4],
                                        float (&from_state)[4][4],
                                        const uint32_t (&x)[DEPTH / 16][4],
                                        const mn_values_smem<DEPTH> &smem,
                                        const mn_values_stage<DEPTH> &in, bool reverse) {
    constexpr int pitch = DEPTH + 8;
    const int part = mn_channel_subchunk(), lane = threadIdx.x % 32;
    const mn_bf16 *z_inside = reverse ? smem.q_inside : in.g;
    uint32_t a[4];
    mn_channel_mma_state<DEPTH>(o, x, smem.state);
#pragma unroll
    for (int i = 0; i < 16; i++) from_state[i / 4][i % 4] = o[i / 4][i % 4];
#pragma unroll 1
    for (int from = 0; from < part; from++) {
        const float *cum_decay = smem.cum_decay + from * MN_SCAN_WIDTH + mn_channel_column0();
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            const float2 f = *(const float2 *)(cum_decay + 8 * tile + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                o[tile][i] *= i % 2 ? f.y : f.x;
                from_state[tile][i] *= i % 2 ? f.y : f.x;
            }
        }
        mn_channel_scores<DEPTH>(a, x, in.y + from * MN_SUBCHUNK * pitch, false);
        mn_channel_mma(o, a, in.z + from * MN_SUBCHUNK * MN_SCAN_PITCH);
    }
    mn_channel_scores<DEPTH>(a, x, in.y + part * MN_SUBCHUNK * pitch, true);
    mn_mma_causal(inside, a,
                  z_inside + part * MN_SUBCHUNK * MN_SCAN_PITCH + mn_channel_column0(),
                  MN_SCAN_PITCH);
}

/* A row of the products in memory that this thread has: from the slice's first column on. */
__device__ inline float *mn_values_products(const mn_chunk_scans &all, const mn_chunk_scan &p,
                                            const mn_scan_coord &at, int64_t token) {
    const int64_t when = at.span.b * all.call.T + at.span.t0 + token;
    return p.products + (when * all.call.H + at.h) * p.width + at.column0;
}

/* The products that the scan before left: asked for early, as they come from memory. */
__device__ inline void mn_values_load_products(float2 (&saved_products)[2][4],
                                               const mn_chunk_scans &all,
                                        const mn_chunk_scan &p, const mn_scan_coord &at, int64_t t,
                                        int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = mn_channel_subchunk() * MN_SUBCHUNK + lane / 4 + i / 4 * 8;
        const int token = p.reverse ? MN_SUBCHUNK_CHUNK - 1 - row : row;
        const int j = mn_channel_column0() + i % 4 * 8 + lane % 4 * 2;
        const float *products = mn_values_products(all, p, at, t + token) + j;
        const bool first = token < count && at.column0 + j < p.width;
        const bool second = token < count && at.column0 + j + 1 < p.width;
        float2 &both = saved_products[i / 4][i % 4];
        both = make_float2(0.0f, 0.0f);
        if (second && p.width % 2 == 0) both = *(const float2 *)products;
        else if (first) both.x = products[0];
        if (second && p.width % 2 != 0) both.y = products[1];
    }
}

/* A row's products with what lies beside, to device memory, or their difference to what lay there
 * to shared memory; then o <- factor o + factor' inside. */
template <int DEPTH>
__device__ inline void mn_values_epilogue(float (&o)[4][4], const float (&inside)[4][4],
                                        const float2 (&saved_products)[2][4],
                                            const mn_chunk_scans &all,
                                        const mn_chunk_scan &p, const mn_scan_coord &at,
                                        mn_values_smem<DEPTH> &smem,
                                        const mn_values_stage<DEPTH> &in, int64_t t, int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = mn_channel_subchunk() * MN_SUBCHUNK + lane / 4 + 8 * half;
        const int token = p.reverse ? MN_SUBCHUNK_CHUNK - 1 - row : row;
        float *products = mn_values_products(all, p, at, t + token);
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            const int j = mn_channel_column0() + 8 * tile + lane % 4 * 2;
            const int i = row * MN_SCAN_PITCH + j;
            const float2 f = *(const float2 *)(smem.factor + i);
            const float2 f_inside = *(const float2 *)(smem.inside + i);
            float *low = &o[tile][2 * half], *high = low + 1;
            const float near_low = inside[tile][2 * half], near_high = inside[tile][2 * half + 1];
            if (p.mode != MN_SCAN_PLAIN) {
                const uint32_t far = *(const uint32_t *)(in.paired + i);
                const uint32_t near =
                    *(const uint32_t *)((p.reverse ? in.g : smem.q_inside) + i);
                float2 both;
                both.x = p.scale * fmaf(*low, mn_bf16_lo(far), near_low * mn_bf16_lo(near));
                both.y = p.scale * fmaf(*high, mn_bf16_hi(far), near_high * mn_bf16_hi(near));
                const bool first = token < count && at.column0 + j < p.width;
                const bool second = token < count && at.column0 + j + 1 < p.width;
                if (p.mode == MN_SCAN_SAVE_STATE) {
                    if (second && p.width % 2 == 0) *(float2 *)(products + j) = both;
                    else if (first) products[j] = both.x;
                    if (second && p.width % 2 != 0) products[j + 1] = both.y;
                } else {
                    both.x -= saved_products[half][tile].x, both.y -= saved_products[half][tile].y;
                    *(float2 *)(smem.factor + i) = both;
                }
            }
            *low = fmaf(*low, f.x, near_low * f_inside.x);
            *high = fmaf(*high, f.y, near_high * f_inside.y);
        }
    }
}

/* Sums over the chunk's rows of the products of what is read from the state, with what lies beside.
 * All threads of the block call. */
template <int DEPTH>
__device__ inline void mn_values_sum_inside(const float (&from_state)[4][4], const mn_chunk_scan &p,
                                        int64_t kept_at, mn_values_smem<DEPTH> &smem,
                                        const mn_values_stage<DEPTH> &in) {
    const int lane = threadIdx.x % 32, row = mn_channel_subchunk() * MN_SUBCHUNK + lane / 4;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
        const int j = mn_channel_column0() + 8 * tile + lane % 4 * 2;
        const uint32_t upper = *(const uint32_t *)(in.paired + row * MN_SCAN_PITCH + j);
        const uint32_t lower = *(const uint32_t *)(in.paired + (row + 8) * MN_SCAN_PITCH + j);
        float2 sum;
        sum.x = fmaf(from_state[tile][0], mn_bf16_lo(upper),
                     from_state[tile][2] * mn_bf16_lo(lower));
        sum.y = fmaf(from_state[tile][1], mn_bf16_hi(upper),
                     from_state[tile][3] * mn_bf16_hi(lower));
#pragma unroll
        for (int by = 4; by < 32; by <<= 1) {
            sum.x += __shfl_xor_sync(0xffffffffu, sum.x, by);
            sum.y += __shfl_xor_sync(0xffffffffu, sum.y, by);
        }
        if (lane < 4) *(float2 *)&smem.parts[mn_channel_subchunk()][j] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= MN_SCAN_WIDTH) return;
    float sum = 0.0f;
    for (int part = 0; part < MN_SUBCHUNKS; part++) sum += smem.parts[part][threadIdx.x];
    p.inside[kept_at * MN_SCAN_WIDTH + threadIdx.x] = p.scale * sum;
}

/* Sums over the rows of M, decayed over the chunk, of its products with the state kept in front of
 * the chunk. */
template <int DEPTH>
__device__ inline void mn_values_dot_state(const mn_channel_state<DEPTH> &M,
                                      const typename mn_channel_state<DEPTH>::kept &kept,
                                      const mn_chunk_scan &p, mn_values_smem<DEPTH> &smem) {
    using sizes = mn_channel_sizes<DEPTH>;
    float sums[sizes::column_tiles][2] = {};
    M.meet(kept, [&](int k, int i, float x) {
        float &sum = sums[k % sizes::column_tiles][i % 2];
        sum = fmaf(M.at[k / sizes::column_tiles][k % sizes::column_tiles][i], x, sum);
    });
#pragma unroll
    for (int tile = 0; tile < sizes::column_tiles; tile++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float *cum_decay = smem.cum_decay + M.column(tile) + i;
            float sum = p.scale * sums[tile][i];
#pragma unroll
            for (int part = 0; part < MN_SUBCHUNKS; part++) sum *= cum_decay[part * MN_SCAN_WIDTH];
            sum += __shfl_xor_sync(0xffffffffu, sum, 4);
            sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            if (threadIdx.x % 32 < 4) {
                smem.state_dots[threadIdx.x / 32 % sizes::row_groups][M.column(tile) + i] = sum;
            }
        }
    }
}

/* dg_t as in additive_decay_grad.cuh, for each channel, from the differences in shared memory. The
 * scan is in reverse. All threads of the block call. */
template <int DEPTH>
__device__ inline void mn_values_decay_grad(const mn_chunk_scans &all, const mn_chunk_scan &p,
                                       const mn_scan_coord &at, mn_values_smem<DEPTH> &smem,
                                       int64_t kept_at, int64_t t, int count) {
    const int part = threadIdx.x / MN_SCAN_WIDTH, j = threadIdx.x % MN_SCAN_WIDTH;
    const int last = MN_SUBCHUNK_CHUNK - 1 - part * MN_SUBCHUNK;    // row of the part's first token
    float sum = 0.0f;
    __syncthreads();
#pragma unroll
    for (int u = 0; u < MN_SUBCHUNK; u++) {
        const bool inside = part * MN_SUBCHUNK + u < count;
        sum += inside ? smem.factor[(last - u) * MN_SCAN_PITCH + j] : 0.0f;
    }
    smem.parts[part][j] = sum;
    __syncthreads();
    if (at.column0 + j >= p.width) return;
    sum = p.inside[kept_at * MN_SCAN_WIDTH + j];
#pragma unroll
    for (int i = 0; i < mn_channel_sizes<DEPTH>::row_groups; i++) sum += smem.state_dots[i][j];
    for (int i = MN_SUBCHUNKS - 1; i > part; i--) sum -= smem.parts[i][j];
    for (int u = min(MN_SUBCHUNK, count - part * MN_SUBCHUNK) - 1; u >= 0; u--) {
        const int64_t when = at.span.t0 + t + part * MN_SUBCHUNK + u;
        sum -= smem.factor[(last - u) * MN_SCAN_PITCH + j];
        mn_put(mn_row<mn_bf16>(all.dg, at.span.b, when, at.h) + at.column0 + j, sum);
    }
}

/* What a chunk reads: out, and what the gradient of the decay takes from it; then the state moves
 * behind the chunk. */
template <int DEPTH>
__device__ inline void mn_values_chunk(mn_channel_state<DEPTH> &M, const mn_chunk_scans &all,
                                      const mn_chunk_scan &p, const mn_scan_coord &at,
                                      const mn_scan_col_tiles &col_tiles,
                                      mn_values_smem<DEPTH> &smem,
                                      const mn_values_stage<DEPTH> &in, int64_t t) {
    constexpr int size = mn_channel_sizes<DEPTH>::kept;
    const int count = (int)min((int64_t)MN_SUBCHUNK_CHUNK, at.span.length - t);
    const int64_t slot = mn_scan_first_slot(all.call, at.n, MN_SUBCHUNK_CHUNK) + t
        / MN_SUBCHUNK_CHUNK;
    const int64_t index = (slot * all.call.H + at.h) * at.n_slices + at.slice;
    mn_bf16 *kept_at = p.kept + index * size;
    float o[4][4] = {}, inside[4][4] = {}, from_state[4][4];
    typename mn_channel_state<DEPTH>::kept kept;
    float2 saved_products[2][4];
    uint32_t x[DEPTH / 16][4];
    mn_values_load_rows<DEPTH>(x, col_tiles.x, t, count, p.reverse);
    if (p.mode == MN_SCAN_DOT_STATE) {
        M.recall(kept, kept_at);
        mn_values_load_products(saved_products, all, p, at, t, count);
    }
    mn_values_output<DEPTH>(o, inside, from_state, x, smem, in, p.reverse);
    mn_values_epilogue<DEPTH>(o, inside, saved_products, all, p, at, smem, in, t, count);
    if (p.mode == MN_SCAN_SAVE_STATE) M.keep(kept_at);
    if (p.mode == MN_SCAN_DOT_STATE) {
        mn_values_sum_inside<DEPTH>(from_state, p, index, smem, in);
        mn_values_dot_state<DEPTH>(M, kept, p, smem);
    }
    mn_channel_update_state<DEPTH, true>(M, in.y, in.z, smem.cum_decay);
    mn_channel_store_out(o, p, col_tiles, t, count);
    if (p.mode == MN_SCAN_DOT_STATE) mn_values_decay_grad<DEPTH>(all, p, at, smem, index, t, count);
}

template <int DEPTH>
__global__ void __launch_bounds__(MN_CHANNEL_THREADS, 1)
additive_channel_scan_values(const __grid_constant__ mn_chunk_scans all) {
    constexpr int buffers = mn_channel_sizes<DEPTH>::buffers, kept = mn_channel_sizes<DEPTH>::kept;
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_values_smem<DEPTH> &smem = *(mn_values_smem<DEPTH> *)bytes;
    const mn_chunk_scan &p = all.scan[0];
    const mn_scan_coord at = mn_scan_block_coord(all.call, p, MN_SUBCHUNK_CHUNK);
    if (at.idle) return;
    const mn_scan_col_tiles col_tiles(p, at, DEPTH);
    const mn_col_tile<const mn_bf16> g =
        mn_col_tile_of<const mn_bf16>(all.g, at.span, at.h, at.column0, p.width, MN_SCAN_WIDTH);
    const int64_t length = at.span.length;
    const bool reverse = p.reverse;
    float cum_decay = 1.0f;
    mn_channel_state<DEPTH> M;
    M.begin(p, at, kept, [&](const float *cum_decays) {
        M.each([&](float &cell, int, int j) { cell *= cum_decays[j]; });
    });
    if (buffers == 2 && at.iter < at.end) {
        mn_values_load<DEPTH>(smem.stage[0], p, col_tiles, g,
                              mn_channel_token0(at.iter, at, reverse),
                               length);
    }
    for (int64_t n = at.iter; n < at.end; n++) {
        const int64_t t = mn_channel_token0(n, at, reverse);
        const int now = (n - at.iter) % buffers, next = (now + 1) % buffers;
        mn_values_stage<DEPTH> &in = smem.stage[now];
        if (buffers == 1) {
            __syncthreads();
            mn_values_load<DEPTH>(in, p, col_tiles, g, t, length);
        }
        mn_cp_async_wait_all();
        __syncthreads();
        if (col_tiles.reads) {
            const int count = (int)min((int64_t)MN_SUBCHUNK_CHUNK, length - t);
            mn_values_prefetch_rows<DEPTH>(col_tiles.x, t, count, reverse);
            M.share(smem.state);
        }
        if (buffers == 2 && n + 1 < at.end) {
            mn_values_load<DEPTH>(smem.stage[next], p, col_tiles, g,
                                   mn_channel_token0(n + 1, at, reverse), length);
        }
        mn_scale_tiles tiles = { in.paired, smem.q_inside,  in.z,        in.g,
                                 in.g,      smem.cum_decay, smem.factor, smem.inside };
        if (reverse) tiles.q = in.z, tiles.k = in.paired;
        mn_scale_chunk<MN_SCAN_WIDTH, MN_CHANNEL_THREADS>(tiles, reverse);
        __syncthreads();
        if (col_tiles.reads) {
            mn_values_chunk<DEPTH>(M, all, p, at, col_tiles, smem, in, t);
        } else {
            mn_channel_update_state<DEPTH, true>(M, in.y, in.z, smem.cum_decay);
            cum_decay *= mn_channel_chunk_decay<MN_SCAN_WIDTH>(smem.cum_decay);
        }
    }
    mn_channel_end<DEPTH>(M, p, at, cum_decay, MN_SCAN_WIDTH);
}

static_assert(sizeof(mn_keys_smem<128>) <= 163 * 1024 && sizeof(mn_values_smem<128>) <= 163 * 1024,
              "what a GPU of 8.0 has");

template <int DEPTH>
static bool fits(void) {
    const size_t limit = (size_t)mn_additive_smem_limit();
    return sizeof(mn_keys_smem<DEPTH>) <= limit && sizeof(mn_values_smem<DEPTH>) <= limit;
}

int mn_additive_channel_chunk(int depth) {
    const bool has = depth == 64 ? fits<64>() : depth == 128 ? fits<128>() : fits<256>();
    return has ? MN_SUBCHUNK_CHUNK : 0;
}

static int launch_kernel(void (*kernel)(mn_chunk_scans), size_t bytes, const mn_chunk_scans *scans,
                         int64_t segments, cudaStream_t stream) {
    const int64_t slices = mn_scan_slices(scans->scan[0]);
    const int64_t blocks = slices * scans->call.H * mn_n_spans(scans->call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, 1, (unsigned)segments);
    return mn_launch_smem(kernel, grid, MN_CHANNEL_THREADS, bytes, stream, *scans);
}

template <int DEPTH>
static int launch_of(const mn_chunk_scans *scans, int64_t segments, bool of_values,
                     cudaStream_t stream) {
    if (of_values) {
        return launch_kernel(additive_channel_scan_values<DEPTH>, sizeof(mn_values_smem<DEPTH>),
                             scans,
                             segments, stream);
    }
    return launch_kernel(additive_channel_scan_keys<DEPTH>, sizeof(mn_keys_smem<DEPTH>), scans,
                         segments,
                         stream);
}

int mn_additive_channel_launch(const mn_chunk_scans *scans, int64_t segments, bool of_values,
                               cudaStream_t stream) {
    const int depth = mn_additive_padded_depth(scans->scan[0].depth);
    if (!of_values) {
        const int code = mn_additive_gated_launch(scans, segments, stream);
        if (code != cudaErrorNotSupported) return code;
    }
    if (depth == 64) return launch_of<64>(scans, segments, of_values, stream);
    if (depth == 128) return launch_of<128>(scans, segments, of_values, stream);
    return launch_of<256>(scans, segments, of_values, stream);
}

}    // namespace mneme::additive
