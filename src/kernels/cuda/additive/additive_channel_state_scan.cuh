/* additive_channel_state_scan.cuh - scans over chunks of 64 tokens for decays per channel, on the
 * factors of
 * additive_channel_scale.cuh. What decays are the channels of x and y where a walk is of keys (o,
 * dv), and
 * those of z and out where it is of values (dq, dk).
 *
 * Of keys:    out_I = scale (x~_I (fall M) + sum over parts J < I of (x~_I fall y~_J') z_J
 *                           + inside)
 *             M <- fall M + y~_J' z_J, part by part
 * Of values:  out_I = scale (x_I M, then part by part fall out + (x_I y_J') z~_J; all times the
 *             factor of the row; + inside)
 *
 * A block has 64 value columns of one head of one sequence and eight warps; a warp has the rows of
 * one part and half of the columns. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_STATE_SCAN_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_STATE_SCAN_CUH

#include "kernels/cuda/additive/additive_channel_scale.cuh"
#include "kernels/cuda/additive/additive_state_scan.cuh"

enum { MN_CHANNEL_WARPS = 8, MN_CHANNEL_THREADS = 32 * MN_CHANNEL_WARPS };

template <int DEPTH>
struct mn_channel_sizes {
    static constexpr int pitch = DEPTH + 8, steps = DEPTH / 16;
    static constexpr int buffers = DEPTH <= 128 ? 2 : 1;    // of chunks and of the shared state
    static constexpr int row_groups = steps < MN_CHANNEL_WARPS ? steps : MN_CHANNEL_WARPS;
    static constexpr int row_tiles = steps / row_groups;
    static constexpr int column_tiles = 8 * row_groups / MN_CHANNEL_WARPS;
    static constexpr int kept = DEPTH * MN_SCAN_WIDTH;
    static constexpr int deep = MN_PARTS_CHUNK * pitch, wide = MN_PARTS_CHUNK * MN_SCAN_PITCH;
};

template <int DEPTH>
using mn_channel_state =
    mn_state_scan_state<mn_channel_sizes<DEPTH>::row_tiles, mn_channel_sizes<DEPTH>::column_tiles,
                  mn_channel_sizes<DEPTH>::row_groups, MN_CHANNEL_THREADS>;

/* The part of this thread's warp and the first of its columns. Two warps that share a scheduler
 * have an early and a late part. */
__device__ inline int mn_channel_part() {
    const int warp = threadIdx.x / 32;
    return warp < 4 ? warp : 7 - warp;
}

__device__ inline int mn_channel_column0() {
    return threadIdx.x / 128 * 32;
}

/* o += a z for 16 rows of a left operand, over 16 tokens and this warp's 32 columns */
__device__ inline void mn_channel_add(float (&o)[4][4], const uint32_t (&a)[4],
                                      const mn_bf16 *z) {
#pragma unroll
    for (int tile = 0; tile < 4; tile += 2) {
        uint32_t b[4];
        mn_right_transposed(b, z + mn_channel_column0() + 8 * tile, MN_SCAN_PITCH);
        mn_mma(o[tile], a, b[0], b[1]);
        mn_mma(o[tile + 1], a, b[2], b[3]);
    }
}

/* Zero where the column is later than the row. */
__device__ inline void mn_channel_mask(float (&p)[2][4]) {
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
        mn_right(b, y + 16 * k, DEPTH + 8);
        mn_mma(k % 2 ? odd[0] : p[0], x[k], b[0], b[1]);
        mn_mma(k % 2 ? odd[1] : p[1], x[k], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) p[i / 4][i % 4] += odd[i / 4][i % 4];
    if (inside) mn_channel_mask(p);
    mn_left_of(a, p[0], p[1]);
}

template <int DEPTH>
__device__ inline void mn_channel_rows(uint32_t (&x)[DEPTH / 16][4], const mn_bf16 *rows) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) mn_left(x[k], rows + 16 * k, DEPTH + 8);
}

template <int DEPTH>
__device__ inline void mn_channel_add_state(float (&o)[4][4], const uint32_t (&x)[DEPTH / 16][4],
                                            const mn_bf16 *state) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        mn_channel_add(o, x[k], state + 16 * k * MN_SCAN_PITCH);
    }
}

/* The first token of the chunk of a turn. */
__device__ inline int64_t mn_channel_start(int64_t turn, const mn_state_scan_place &at,
                                           bool reverse) {
    return (reverse ? at.n_chunks - 1 - turn : turn) * MN_PARTS_CHUNK;
}

/* What this thread's channel falls over a chunk, among COLUMNS. */
template <int COLUMNS>
__device__ inline float mn_channel_fall(const float *fall) {
    float whole = 1.0f;
    if (threadIdx.x >= COLUMNS) return whole;
#pragma unroll
    for (int part = 0; part < MN_PARTS; part++) whole *= fall[part * COLUMNS + threadIdx.x];
    return whole;
}

/* Leaves the state, or what the segment adds to it and by how much its `channels` fell. */
template <int DEPTH>
__device__ inline void mn_channel_end(mn_channel_state<DEPTH> &M, const mn_scan &p,
                                      const mn_state_scan_place &at, float fall, int channels) {
    if (p.gathers) {
        M.put_sum(p.sums + at.index * mn_channel_sizes<DEPTH>::kept);
        if (threadIdx.x < channels) p.falls[at.index * MN_SCAN_FALLS + threadIdx.x] = fall;
    } else if (at.last) {
        M.store(p, at);
    }
}

/* ---- scans of keys --------------------------------------------------------------------------- */

template <int DEPTH>
struct mn_keys_stage {
    alignas(16) mn_bf16 x[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 y[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 g[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 z[mn_channel_sizes<DEPTH>::wide];
};

template <int DEPTH>
struct mn_keys_smem {
    mn_keys_stage<DEPTH> stage[mn_channel_sizes<DEPTH>::buffers];
    alignas(16) mn_bf16 x_inside[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 y_inside[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 state[mn_channel_sizes<DEPTH>::buffers][DEPTH * MN_SCAN_PITCH];
    alignas(16) float fall[MN_PARTS * DEPTH];
};

template <int DEPTH>
__device__ inline void mn_keys_load(mn_keys_stage<DEPTH> &to, const mn_state_scan_col_tiles &strips,
                                     const mn_strip<const mn_bf16> &g, int64_t t, int64_t length,
                                     bool reverse) {
    constexpr int rows = MN_PARTS_CHUNK, threads = MN_CHANNEL_THREADS;
    const int count = (int)min((int64_t)rows, length - t);
    if (strips.reads) mn_load_tokens<rows, DEPTH, threads>(to.x, strips.x, t, count, reverse);
    mn_load_tokens<rows, DEPTH, threads>(to.y, strips.y, t, count, reverse);
    mn_load_tokens<rows, DEPTH, threads>(to.g, g, t, count, reverse);
    mn_load_tokens<rows, MN_SCAN_WIDTH, threads>(to.z, strips.z, t, count, reverse);
    mn_copies_end();
}

/* Multiplies rows of x~ by what their channels fall over one more part; `f` is the whole so far. */
template <int DEPTH>
__device__ inline void mn_keys_lower(uint32_t (&x)[DEPTH / 16][4], float4 (&f)[DEPTH / 16],
                                     const mn_bf16 *rows, const float *fall) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        const float2 low = *(const float2 *)(fall + 16 * k + lane % 4 * 2);
        const float2 high = *(const float2 *)(fall + 16 * k + 8 + lane % 4 * 2);
        f[k].x *= low.x, f[k].y *= low.y, f[k].z *= high.x, f[k].w *= high.y;
        mn_left(x[k], rows + 16 * k, DEPTH + 8);
        x[k][0] = mn_pair_times(x[k][0], f[k].x, f[k].y);
        x[k][1] = mn_pair_times(x[k][1], f[k].x, f[k].y);
        x[k][2] = mn_pair_times(x[k][2], f[k].z, f[k].w);
        x[k][3] = mn_pair_times(x[k][3], f[k].z, f[k].w);
    }
}

template <int DEPTH>
__device__ inline void mn_keys_read(float (&o)[4][4], const mn_keys_smem<DEPTH> &room,
                                    const mn_keys_stage<DEPTH> &in, const mn_bf16 *state) {
    constexpr int pitch = DEPTH + 8;
    const int part = mn_channel_part();
    uint32_t x[DEPTH / 16][4], a[4];
    float4 f[DEPTH / 16];
    mn_channel_rows<DEPTH>(x, room.x_inside + part * MN_PART * pitch);
    mn_channel_scores<DEPTH>(a, x, room.y_inside + part * MN_PART * pitch, true);
    mn_channel_add(o, a, in.z + part * MN_PART * MN_SCAN_PITCH);
    const mn_bf16 *rows = in.x + part * MN_PART * pitch;
    mn_channel_rows<DEPTH>(x, rows);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) f[k] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
#pragma unroll 1
    for (int from = part - 1; from >= 0; from--) {
        mn_channel_scores<DEPTH>(a, x, in.y + from * MN_PART * pitch, false);
        mn_channel_add(o, a, in.z + from * MN_PART * MN_SCAN_PITCH);
        mn_keys_lower<DEPTH>(x, f, rows, room.fall + from * DEPTH);
    }
    mn_channel_add_state<DEPTH>(o, x, state);
}

/* M <- fall M + y~' z for every part; rows of M fall, or its columns */
template <int DEPTH, bool OF_VALUES>
__device__ inline void mn_channel_write(mn_channel_state<DEPTH> &M, const mn_bf16 *y,
                                        const mn_bf16 *z, const float *fall) {
    using sizes = mn_channel_sizes<DEPTH>;
    const int warp = threadIdx.x / 32;
    const int row0 = warp % sizes::row_groups * sizes::row_tiles * 16;
    const int column0 = warp / sizes::row_groups * sizes::column_tiles * 8;
#pragma unroll 2
    for (int part = 0; part < MN_PARTS; part++) {
        const float *of_part = fall + part * (OF_VALUES ? MN_SCAN_WIDTH : DEPTH);
        M.each([&](float &cell, int i, int j) { cell *= of_part[OF_VALUES ? j : i]; });
        uint32_t b[sizes::column_tiles / 2][4];
#pragma unroll
        for (int tile = 0; tile < sizes::column_tiles; tile += 2) {
            mn_right_transposed(b[tile / 2],
                                z + part * MN_PART * MN_SCAN_PITCH + column0 + 8 * tile,
                            MN_SCAN_PITCH);
        }
#pragma unroll
        for (int r = 0; r < sizes::row_tiles; r++) {
            uint32_t a[4];
            mn_left_transposed(a, y + part * MN_PART * sizes::pitch + row0 + 16 * r, sizes::pitch);
#pragma unroll
            for (int tile = 0; tile < sizes::column_tiles; tile += 2) {
                mn_mma(M.at[r][tile], a, b[tile / 2][0], b[tile / 2][1]);
                mn_mma(M.at[r][tile + 1], a, b[tile / 2][2], b[tile / 2][3]);
            }
        }
    }
}

/* scale o to memory */
__device__ inline void mn_channel_put(const float (&o)[4][4], const mn_scan &p,
                                      const mn_state_scan_col_tiles &strips, int64_t t, int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = mn_channel_part() * MN_PART + lane / 4 + 8 * half;
        const int token = p.reverse ? MN_PARTS_CHUNK - 1 - row : row;
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            pair[i] = mn_pair(p.scale * o[i][2 * half], p.scale * o[i][2 * half + 1]);
        }
        mn_put_tokens(strips.out, pair, t + token, token < count, mn_channel_column0());
    }
}

template <int DEPTH>
__global__ void __launch_bounds__(MN_CHANNEL_THREADS, 1)
mn_keys_kernel(const __grid_constant__ mn_state_scans all) {
    constexpr int buffers = mn_channel_sizes<DEPTH>::buffers, kept = mn_channel_sizes<DEPTH>::kept;
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_keys_smem<DEPTH> &room = *(mn_keys_smem<DEPTH> *)bytes;
    const mn_scan &p = all.walk[0];
    const mn_state_scan_place at = mn_state_scan_here(all.call, p, MN_PARTS_CHUNK);
    if (at.idle) return;
    const mn_state_scan_col_tiles strips(p, at, DEPTH);
    const mn_strip<const mn_bf16> g =
        mn_strip_of<const mn_bf16>(all.g, at.span, at.h, 0, p.depth, DEPTH);
    const int64_t length = at.span.length;
    const bool reverse = p.reverse;
    float fall = 1.0f;
    mn_channel_state<DEPTH> M;
    M.begin(p, at, kept, [&](const float *falls) {
        M.each([&](float &cell, int i, int) { cell *= falls[i]; });
    });
    M.share(room.state[0]);
    if (buffers == 2 && at.turn < at.end) {
        mn_keys_load<DEPTH>(room.stage[0], strips, g, mn_channel_start(at.turn, at, reverse),
                             length, reverse);
    }
    for (int64_t n = at.turn; n < at.end; n++) {
        const int64_t t = mn_channel_start(n, at, reverse);
        const int now = (n - at.turn) % buffers, next = (now + 1) % buffers;
        mn_keys_stage<DEPTH> &in = room.stage[now];
        if (buffers == 1) {
            __syncthreads();
            mn_keys_load<DEPTH>(in, strips, g, t, length, reverse);
        }
        mn_copies_wait();
        __syncthreads();
        if (buffers == 2 && n + 1 < at.end) {
            mn_keys_load<DEPTH>(room.stage[next], strips, g, mn_channel_start(n + 1, at, reverse),
                                 length, reverse);
        }
        mn_scale_tiles tiles = { in.x, room.x_inside, in.y, room.y_inside, in.g, room.fall };
        if (reverse) {
            tiles = { in.y, room.y_inside, in.x, room.x_inside, in.g, room.fall };
        }
        mn_scale<DEPTH, MN_CHANNEL_THREADS>(tiles, reverse);
        __syncthreads();
        float o[4][4] = {};
        if (strips.reads) mn_keys_read<DEPTH>(o, room, in, room.state[now]);
        mn_channel_write<DEPTH, false>(M, in.y, in.z, room.fall);
        if (!strips.reads) fall *= mn_channel_fall<DEPTH>(room.fall);
        if (buffers == 1) __syncthreads();
        M.share(room.state[next]);
        if (!strips.reads) continue;
        mn_channel_put(o, p, strips, t, (int)min((int64_t)MN_PARTS_CHUNK, length - t));
    }
    mn_channel_end<DEPTH>(M, p, at, fall, DEPTH);
}

/* ---- scans of values ------------------------------------------------------------------------- */

template <int DEPTH>
struct mn_values_stage {
    alignas(16) mn_bf16 x[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 y[mn_channel_sizes<DEPTH>::deep];
    alignas(16) mn_bf16 z[mn_channel_sizes<DEPTH>::wide];
    alignas(16) mn_bf16 beside[mn_channel_sizes<DEPTH>::wide];
    alignas(16) mn_bf16 g[mn_channel_sizes<DEPTH>::wide];
};

template <int DEPTH>
struct mn_values_smem {
    mn_values_stage<DEPTH> stage[mn_channel_sizes<DEPTH>::buffers];
    alignas(16) mn_bf16 z_inside[mn_channel_sizes<DEPTH>::wide];
    alignas(16) mn_bf16 beside_inside[mn_channel_sizes<DEPTH>::wide];
    alignas(16) mn_bf16 state[mn_channel_sizes<DEPTH>::buffers][DEPTH * MN_SCAN_PITCH];
    alignas(16) float factor[mn_channel_sizes<DEPTH>::wide];    // of rows of out; sums for dg
    alignas(16) float inside[mn_channel_sizes<DEPTH>::wide];
    alignas(16) float fall[MN_PARTS * MN_SCAN_WIDTH];
    float meetings[MN_CHANNEL_WARPS][MN_SCAN_WIDTH], parts[MN_PARTS][MN_SCAN_WIDTH];
};

template <int DEPTH>
__device__ inline void mn_values_load(mn_values_stage<DEPTH> &to, const mn_scan &p,
                                       const mn_state_scan_col_tiles &strips,
                                       const mn_strip<const mn_bf16> &g, int64_t t,
                                       int64_t length) {
    constexpr int rows = MN_PARTS_CHUNK, threads = MN_CHANNEL_THREADS;
    const int count = (int)min((int64_t)rows, length - t);
    if (strips.reads) mn_load_tokens<rows, DEPTH, threads>(to.x, strips.x, t, count, p.reverse);
    mn_load_tokens<rows, DEPTH, threads>(to.y, strips.y, t, count, p.reverse);
    mn_load_tokens<rows, MN_SCAN_WIDTH, threads>(to.z, strips.z, t, count, p.reverse);
    mn_load_tokens<rows, MN_SCAN_WIDTH, threads>(to.g, g, t, count, p.reverse);
    if (p.duty != MN_SCAN_PLAIN && strips.reads) {
        mn_load_tokens<rows, MN_SCAN_WIDTH, threads>(to.beside, strips.beside, t, count,
                                                      p.reverse);
    }
    mn_copies_end();
}

/* o, and its part from inside this warp's part of the chunk, before the factors of rows; the part
 * of o that is read from the state where it is asked for */
template <int DEPTH>
__device__ inline void mn_values_read(float (&o)[4][4], float (&inside)[4][4],
                                      float (&from_state)[4][4],
                                      const mn_values_smem<DEPTH> &room,
                                      const mn_values_stage<DEPTH> &in, const mn_bf16 *state) {
    constexpr int pitch = DEPTH + 8;
    const int part = mn_channel_part(), lane = threadIdx.x % 32;
    uint32_t x[DEPTH / 16][4], a[4];
    mn_channel_rows<DEPTH>(x, in.x + part * MN_PART * pitch);
    mn_channel_add_state<DEPTH>(o, x, state);
#pragma unroll
    for (int i = 0; i < 16; i++) from_state[i / 4][i % 4] = o[i / 4][i % 4];
#pragma unroll 1
    for (int from = 0; from < part; from++) {
        const float *fall = room.fall + from * MN_SCAN_WIDTH + mn_channel_column0();
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            const float2 f = *(const float2 *)(fall + 8 * tile + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                o[tile][i] *= i % 2 ? f.y : f.x;
                from_state[tile][i] *= i % 2 ? f.y : f.x;
            }
        }
        mn_channel_scores<DEPTH>(a, x, in.y + from * MN_PART * pitch, false);
        mn_channel_add(o, a, in.z + from * MN_PART * MN_SCAN_PITCH);
    }
    mn_channel_scores<DEPTH>(a, x, in.y + part * MN_PART * pitch, true);
    mn_channel_add(inside, a, room.z_inside + part * MN_PART * MN_SCAN_PITCH);
}

/* A row of the products in memory that this thread has: from the slice's first column on. */
__device__ inline float *mn_values_products(const mn_state_scans &all, const mn_scan &p,
                                            const mn_state_scan_place &at, int64_t token) {
    const int64_t when = at.span.b * all.call.T + at.span.t0 + token;
    return p.products + (when * all.call.H + at.h) * p.width + at.column0;
}

/* The products that the walk before left: asked for early, as they come from memory. */
__device__ inline void mn_values_recall(float2 (&there)[2][4], const mn_state_scans &all,
                                        const mn_scan &p, const mn_state_scan_place &at, int64_t t,
                                        int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int row = mn_channel_part() * MN_PART + lane / 4 + i / 4 * 8;
        const int token = p.reverse ? MN_PARTS_CHUNK - 1 - row : row;
        const int j = mn_channel_column0() + i % 4 * 8 + lane % 4 * 2;
        const float *products = mn_values_products(all, p, at, t + token) + j;
        const bool first = token < count && at.column0 + j < p.width;
        const bool second = token < count && at.column0 + j + 1 < p.width;
        float2 &both = there[i / 4][i % 4];
        both = make_float2(0.0f, 0.0f);
        if (second && p.width % 2 == 0) both = *(const float2 *)products;
        else if (first) both.x = products[0];
        if (second && p.width % 2 != 0) both.y = products[1];
    }
}

/* A row's products with what lies beside, into memory, or their difference to what lay there into
 * the room; then o <- factor o + factor' inside. */
template <int DEPTH>
__device__ inline void mn_values_finish(float (&o)[4][4], const float (&inside)[4][4],
                                        const float2 (&there)[2][4], const mn_state_scans &all,
                                        const mn_scan &p, const mn_state_scan_place &at,
                                        mn_values_smem<DEPTH> &room,
                                        const mn_values_stage<DEPTH> &in, int64_t t, int count) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = mn_channel_part() * MN_PART + lane / 4 + 8 * half;
        const int token = p.reverse ? MN_PARTS_CHUNK - 1 - row : row;
        float *products = mn_values_products(all, p, at, t + token);
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            const int j = mn_channel_column0() + 8 * tile + lane % 4 * 2;
            const int i = row * MN_SCAN_PITCH + j;
            const float2 f = *(const float2 *)(room.factor + i);
            const float2 f_inside = *(const float2 *)(room.inside + i);
            float *low = &o[tile][2 * half], *high = low + 1;
            const float near_low = inside[tile][2 * half], near_high = inside[tile][2 * half + 1];
            if (p.duty != MN_SCAN_PLAIN) {
                const uint32_t far = *(const uint32_t *)(in.beside + i);
                const uint32_t near = *(const uint32_t *)(room.beside_inside + i);
                float2 both;
                both.x = p.scale * fmaf(*low, mn_low(far), near_low * mn_low(near));
                both.y = p.scale * fmaf(*high, mn_high(far), near_high * mn_high(near));
                const bool first = token < count && at.column0 + j < p.width;
                const bool second = token < count && at.column0 + j + 1 < p.width;
                if (p.duty == MN_SCAN_KEEPS) {
                    if (second && p.width % 2 == 0) *(float2 *)(products + j) = both;
                    else if (first) products[j] = both.x;
                    if (second && p.width % 2 != 0) products[j + 1] = both.y;
                } else {
                    both.x -= there[half][tile].x, both.y -= there[half][tile].y;
                    *(float2 *)(room.factor + i) = both;
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
__device__ inline void mn_values_inside(const float (&from_state)[4][4], const mn_scan &p,
                                        int64_t kept_at, mn_values_smem<DEPTH> &room,
                                        const mn_values_stage<DEPTH> &in) {
    const int lane = threadIdx.x % 32, row = mn_channel_part() * MN_PART + lane / 4;
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
        const int j = mn_channel_column0() + 8 * tile + lane % 4 * 2;
        const uint32_t upper = *(const uint32_t *)(in.beside + row * MN_SCAN_PITCH + j);
        const uint32_t lower = *(const uint32_t *)(in.beside + (row + 8) * MN_SCAN_PITCH + j);
        float2 sum;
        sum.x = fmaf(from_state[tile][0], mn_low(upper), from_state[tile][2] * mn_low(lower));
        sum.y = fmaf(from_state[tile][1], mn_high(upper), from_state[tile][3] * mn_high(lower));
#pragma unroll
        for (int by = 4; by < 32; by <<= 1) {
            sum.x += __shfl_xor_sync(0xffffffffu, sum.x, by);
            sum.y += __shfl_xor_sync(0xffffffffu, sum.y, by);
        }
        if (lane < 4) *(float2 *)&room.parts[mn_channel_part()][j] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= MN_SCAN_WIDTH) return;
    float sum = 0.0f;
    for (int part = 0; part < MN_PARTS; part++) sum += room.parts[part][threadIdx.x];
    p.inside[kept_at * MN_SCAN_WIDTH + threadIdx.x] = p.scale * sum;
}

/* Sums over the rows of M, decayed over the chunk, of its products with the state kept in front of
 * the chunk. */
template <int DEPTH>
__device__ inline void mn_values_meet(const mn_channel_state<DEPTH> &M,
                                      const typename mn_channel_state<DEPTH>::kept &kept,
                                      const mn_scan &p, mn_values_smem<DEPTH> &room) {
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
            const float *fall = room.fall + M.column(tile) + i;
            float sum = p.scale * sums[tile][i];
#pragma unroll
            for (int part = 0; part < MN_PARTS; part++) sum *= fall[part * MN_SCAN_WIDTH];
            sum += __shfl_xor_sync(0xffffffffu, sum, 4);
            sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            if (threadIdx.x % 32 < 4) {
                room.meetings[threadIdx.x / 32 % sizes::row_groups][M.column(tile) + i] = sum;
            }
        }
    }
}

/* dg_t as in additive_chunk.cu, for each channel, from the differences in the room. The walk is in
 * reverse. All threads of the block call. */
template <int DEPTH>
__device__ inline void mn_values_decay(const mn_state_scans &all, const mn_scan &p,
                                       const mn_state_scan_place &at, mn_values_smem<DEPTH> &room,
                                       int64_t kept_at, int64_t t, int count) {
    const int part = threadIdx.x / MN_SCAN_WIDTH, j = threadIdx.x % MN_SCAN_WIDTH;
    const int last = MN_PARTS_CHUNK - 1 - part * MN_PART;    // row of the part's first token
    float sum = 0.0f;
    __syncthreads();
#pragma unroll
    for (int u = 0; u < MN_PART; u++) sum += room.factor[(last - u) * MN_SCAN_PITCH + j];
    room.parts[part][j] = sum;
    __syncthreads();
    if (at.column0 + j >= p.width) return;
    sum = p.inside[kept_at * MN_SCAN_WIDTH + j];
#pragma unroll
    for (int i = 0; i < mn_channel_sizes<DEPTH>::row_groups; i++) sum += room.meetings[i][j];
    for (int i = 0; i < part; i++) sum += room.parts[i][j];
    for (int u = 0; u < MN_PART && part * MN_PART + u < count; u++) {
        const int64_t when = at.span.t0 + t + part * MN_PART + u;
        mn_put(mn_row<mn_bf16>(all.dg, at.span.b, when, at.h) + at.column0 + j, sum);
        sum += room.factor[(last - u) * MN_SCAN_PITCH + j];
    }
}

/* What a chunk reads: out, and what the gradient of the decay takes from it; then the state moves
 * behind the chunk. */
template <int DEPTH>
__device__ inline void mn_values_turn(mn_channel_state<DEPTH> &M, const mn_state_scans &all,
                                      const mn_scan &p, const mn_state_scan_place &at,
                                      const mn_state_scan_col_tiles &strips,
                                          mn_values_smem<DEPTH> &room,
                                      const mn_values_stage<DEPTH> &in, int now, int next,
                                      int64_t t) {
    constexpr int size = mn_channel_sizes<DEPTH>::kept;
    const int count = (int)min((int64_t)MN_PARTS_CHUNK, at.span.length - t);
    const int64_t slot = mn_state_scan_first_slot(all.call, at.n, MN_PARTS_CHUNK) + t
        / MN_PARTS_CHUNK;
    const int64_t index = (slot * all.call.H + at.h) * at.n_slices + at.slice;
    mn_bf16 *kept_at = p.kept + index * size;
    float o[4][4] = {}, inside[4][4] = {}, from_state[4][4];
    typename mn_channel_state<DEPTH>::kept kept;
    float2 there[2][4];
    if (p.duty == MN_SCAN_MEETS) {
        M.recall(kept, kept_at);
        mn_values_recall(there, all, p, at, t, count);
    }
    mn_values_read<DEPTH>(o, inside, from_state, room, in, room.state[now]);
    mn_values_finish<DEPTH>(o, inside, there, all, p, at, room, in, t, count);
    if (p.duty == MN_SCAN_KEEPS) {
        M.keep(kept_at);
        mn_values_inside<DEPTH>(from_state, p, index, room, in);
    }
    if (p.duty == MN_SCAN_MEETS) mn_values_meet<DEPTH>(M, kept, p, room);
    mn_channel_write<DEPTH, true>(M, in.y, in.z, room.fall);
    if (mn_channel_sizes<DEPTH>::buffers == 1) __syncthreads();
    M.share(room.state[next]);
    mn_channel_put(o, p, strips, t, count);
    if (p.duty == MN_SCAN_MEETS) mn_values_decay<DEPTH>(all, p, at, room, index, t, count);
}

template <int DEPTH>
__global__ void __launch_bounds__(MN_CHANNEL_THREADS, 1)
mn_values_kernel(const __grid_constant__ mn_state_scans all) {
    constexpr int buffers = mn_channel_sizes<DEPTH>::buffers, kept = mn_channel_sizes<DEPTH>::kept;
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_values_smem<DEPTH> &room = *(mn_values_smem<DEPTH> *)bytes;
    const mn_scan &p = all.walk[0];
    const mn_state_scan_place at = mn_state_scan_here(all.call, p, MN_PARTS_CHUNK);
    if (at.idle) return;
    const mn_state_scan_col_tiles strips(p, at, DEPTH);
    const mn_strip<const mn_bf16> g =
        mn_strip_of<const mn_bf16>(all.g, at.span, at.h, at.column0, p.width, MN_SCAN_WIDTH);
    const int64_t length = at.span.length;
    const bool reverse = p.reverse;
    float fall = 1.0f;
    mn_channel_state<DEPTH> M;
    M.begin(p, at, kept, [&](const float *falls) {
        M.each([&](float &cell, int, int j) { cell *= falls[j]; });
    });
    M.share(room.state[0]);
    if (buffers == 2 && at.turn < at.end) {
        mn_values_load<DEPTH>(room.stage[0], p, strips, g, mn_channel_start(at.turn, at, reverse),
                               length);
    }
    for (int64_t n = at.turn; n < at.end; n++) {
        const int64_t t = mn_channel_start(n, at, reverse);
        const int now = (n - at.turn) % buffers, next = (now + 1) % buffers;
        mn_values_stage<DEPTH> &in = room.stage[now];
        if (buffers == 1) {
            __syncthreads();
            mn_values_load<DEPTH>(in, p, strips, g, t, length);
        }
        mn_copies_wait();
        __syncthreads();
        if (buffers == 2 && n + 1 < at.end) {
            mn_values_load<DEPTH>(room.stage[next], p, strips, g,
                                   mn_channel_start(n + 1, at, reverse), length);
        }
        mn_scale_tiles tiles = { in.beside, room.beside_inside, in.z,       room.z_inside, in.g,
                                 room.fall, room.factor,        room.inside };
        if (reverse) {
            tiles.q = in.z, tiles.q_inside = room.z_inside;
            tiles.k = in.beside, tiles.k_inside = room.beside_inside;
        }
        mn_scale<MN_SCAN_WIDTH, MN_CHANNEL_THREADS>(tiles, reverse);
        __syncthreads();
        if (strips.reads) {
            mn_values_turn<DEPTH>(M, all, p, at, strips, room, in, now, next, t);
        } else {
            mn_channel_write<DEPTH, true>(M, in.y, in.z, room.fall);
            fall *= mn_channel_fall<MN_SCAN_WIDTH>(room.fall);
        }
    }
    mn_channel_end<DEPTH>(M, p, at, fall, MN_SCAN_WIDTH);
}

#endif
