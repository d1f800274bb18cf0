/* additive_state_scan.cuh - scans over chunks for decays that the channels of a head share, or
 * none.
 *
 *   out_r = scale (2^(l_r) x_r M + sum over c <= r of 2^(l_r - l_c) (x_r.y_c) z_c)
 *   M <- 2^(L) M + sum of 2^(L - l_c) y_c z_c'
 *
 * with l the running sum of log2 decays in the order of the scan, L that of the whole chunk;
 * forward a token's own decay counts in its l, in reverse it does not, and then what M holds at the
 * end has had the decay of the first token already. Sums of decays are double and kept as two
 * floats, so that small decays survive behind large ones. Exponents never exceed 0.
 *
 * A block has 64 value columns of one head of one sequence and eight warps with the state in their
 * registers; a warp has 16 rows of the chunk. The next chunk comes while one is worked on. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_STATE_SCAN_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_STATE_SCAN_CUH

#include "kernels/cuda/additive/additive_mma.cuh"

namespace mneme::additive {

enum { MN_SCAN_WARPS = 8 };    // of a block

template <int DEPTH, int CHUNK>
struct mn_scan_sizes {
    static constexpr int warps = MN_SCAN_WARPS, threads = 32 * warps;
    static constexpr int pitch = DEPTH + 8, steps = DEPTH / 16;
    static constexpr int row_groups = warps < steps ? warps : steps;    // of the state's tiles
    static constexpr int row_tiles = steps / row_groups;                // of a warp
    static constexpr int column_tiles = 8 * row_groups / warps;
    static constexpr int kept = DEPTH * MN_SCAN_WIDTH;                  // numbers of a state
};

template <int DEPTH, int CHUNK>
struct mn_scan_stage {
    alignas(16) mn_bf16 x[CHUNK * (DEPTH + 8)];
    alignas(16) mn_bf16 y[CHUNK * (DEPTH + 8)];
    alignas(16) mn_bf16 z[CHUNK * MN_SCAN_PITCH];
};

/* l of rows as two floats; 2^(L - l); L */
template <int CHUNK>
struct mn_scan_log_decays {
    alignas(16) float2 log_decay[CHUNK];
    alignas(16) float to_end[CHUNK];
    float whole;
};

template <int DEPTH, int CHUNK>
struct mn_scan_smem {
    mn_scan_stage<DEPTH, CHUNK> stage[2];
    alignas(16) mn_bf16 state[2][DEPTH * MN_SCAN_PITCH];
    mn_scan_log_decays<CHUNK> log_decays[2];
};

/* The tiles of the state that a thread's warp has. */
template <int ROW_TILES, int COLUMN_TILES, int ROW_GROUPS, int THREADS>
struct mn_scan_state {
    float at[ROW_TILES][COLUMN_TILES][4];

    __device__ static int row(int tile) {
        return ((int)threadIdx.x / 32 % ROW_GROUPS * ROW_TILES + tile) * 16 + threadIdx.x % 32 / 4;
    }

    __device__ static int column(int tile) {
        return ((int)threadIdx.x / 32 / ROW_GROUPS * COLUMN_TILES + tile) * 8 + threadIdx.x % 4 * 2;
    }

    template <typename F>
    __device__ void each(F use) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    use(at[r][c][i], row(r) + i / 2 * 8, column(c) + i % 2);
                }
            }
        }
    }

    __device__ void load(const mn_chunk_scan &p, const mn_scan_coord &place) {
        const float *from = mn_row<float>(p.state0, place.n, 0, place.h);
        each([&](float &cell, int i, int j) {
            const int64_t column = place.column0 + j;
            const bool inside = from && i < p.depth && column < p.width;
            cell = inside ? p.into * from[i * p.state_row + column * p.state_column] : 0.0f;
        });
    }

    __device__ void store(const mn_chunk_scan &p, const mn_scan_coord &place) {
        float *to = mn_row<float>(p.state, place.n, 0, place.h);
        each([&](float &cell, int i, int j) {
            const int64_t column = place.column0 + j;
            if (!to || i >= p.depth || column >= p.width) return;
            to[i * p.state_row + column * p.state_column] = p.from * cell;
        });
    }

    __device__ void store_sum(float *to) const {
#pragma unroll
        for (int k = 0; k < ROW_TILES * COLUMN_TILES; k++) {
            const float(&a)[4] = at[k / COLUMN_TILES][k % COLUMN_TILES];
            ((float4 *)to)[k * THREADS + threadIdx.x] = make_float4(a[0], a[1], a[2], a[3]);
        }
    }

    __device__ void add_sum(const float *from) {
#pragma unroll
        for (int k = 0; k < ROW_TILES * COLUMN_TILES; k++) {
            float(&a)[4] = at[k / COLUMN_TILES][k % COLUMN_TILES];
            const float4 x = ((const float4 *)from)[k * THREADS + threadIdx.x];
            a[0] += x.x, a[1] += x.y, a[2] += x.z, a[3] += x.w;
        }
    }

    /* The state in front of a segment, from what those before it left; lower(segment's decays)
     * decays it over one. */
    template <typename F>
    __device__ void begin(const mn_chunk_scan &p, const mn_scan_coord &place, int64_t kept,
                          F lower) {
        load(p, place);
        if (p.reduce_pass) each([](float &cell, int, int) { cell = 0.0f; });
        for (int before = p.reduce_pass ? 0 : (int)blockIdx.z; before > 0; before--) {
            const int64_t index = place.index - before * place.stride;
            lower(p.cum_decays + index * MN_SCAN_DECAYS);
            add_sum(p.sums + index * kept);
        }
    }

    /* As a right operand for all warps. */
    __device__ void share(mn_bf16 *smem) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c++) {
                mn_bf16 *to = smem + row(r) * MN_SCAN_PITCH + column(c);
                *(uint32_t *)to = mn_bf16x2(at[r][c][0], at[r][c][1]);
                *(uint32_t *)(to + 8 * MN_SCAN_PITCH) = mn_bf16x2(at[r][c][2], at[r][c][3]);
            }
        }
    }

    /* To memory in bf16, from where threads in the same positions take them back. */
    __device__ void keep(mn_bf16 *to) const {
#pragma unroll
        for (int k = 0; k < ROW_TILES * COLUMN_TILES; k += 2) {
            const float(&a)[4] = at[k / COLUMN_TILES][k % COLUMN_TILES];
            const float(&b)[4] = at[(k + 1) / COLUMN_TILES][(k + 1) % COLUMN_TILES];
            ((uint4 *)to)[k / 2 * THREADS + threadIdx.x] =
                make_uint4(mn_bf16x2(a[0], a[1]), mn_bf16x2(a[2], a[3]), mn_bf16x2(b[0], b[1]),
                           mn_bf16x2(b[2], b[3]));
        }
    }

    using kept = uint4[ROW_TILES * COLUMN_TILES / 2];

    __device__ static void recall(kept &to, const mn_bf16 *from) {
#pragma unroll
        for (int k = 0; k < ROW_TILES * COLUMN_TILES / 2; k++) {
            to[k] = ((const uint4 *)from)[k * THREADS + threadIdx.x];
        }
    }

    /* use(k, i, x): number x of cell i of tile k as it was kept */
    template <typename F>
    __device__ void meet(const kept &from, F use) const {
#pragma unroll
        for (int k = 0; k < ROW_TILES * COLUMN_TILES; k += 2) {
            const uint4 pack = from[k / 2];
            const uint32_t pairs[4] = { pack.x, pack.y, pack.z, pack.w };
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t pair = pairs[i / 2];
                use(k + i / 4, i % 4, i % 2 ? mn_bf16_hi(pair) : mn_bf16_lo(pair));
            }
        }
    }
};

template <int DEPTH, int CHUNK>
using mn_scan_state_of = mn_scan_state<
    mn_scan_sizes<DEPTH, CHUNK>::row_tiles, mn_scan_sizes<DEPTH, CHUNK>::column_tiles,
    mn_scan_sizes<DEPTH, CHUNK>::row_groups, mn_scan_sizes<DEPTH, CHUNK>::threads>;

/* Tiles of 8 columns of a warp: in chunks of 64, two warps share the columns of 16 rows. */
template <int CHUNK>
constexpr int mn_scan_n_tiles = CHUNK / 16;

/* Which rows of a chunk this thread's warp has: of the warps that share a scheduler some have few
 * columns to the left of their rows, some many. */
template <int CHUNK>
__device__ inline int mn_scan_row0() {
    const int warp = threadIdx.x / 32 % (CHUNK / 16), half = threadIdx.x / (2 * CHUNK);
    if (CHUNK == 128) return 16 * (warp < 4 ? warp : 11 - warp);
    return 16 * (half ? CHUNK / 16 - 1 - warp : warp);
}

template <int CHUNK>
__device__ inline int mn_scan_column0() {
    return threadIdx.x / (2 * CHUNK) * (MN_SCAN_WIDTH / 2);
}

/* ---- decays ---------------------------------------------------------------------------------- */

/* Log decays of a chunk, a few per lane: as they come, so that nobody waits for them before they
 * are added up. */
template <int CHUNK>
__device__ inline void mn_scan_load_decays(mn_bf16 (&g)[CHUNK / 32], const mn_chunk_scans &all,
                                           const mn_scan_coord &at, int64_t t, int count,
                                           bool reverse) {
    const mn_bf16 *from = mn_row<mn_bf16>(all.g, at.span.b, at.span.t0 + t, at.h);
#pragma unroll
    for (int i = 0; i < CHUNK / 32; i++) {
        const int row = threadIdx.x % 32 * (CHUNK / 32) + i;
        const int token = reverse ? CHUNK - 1 - row : row;
        g[i] = __float2bfloat16_rn(0.0f);
        if (token < count) g[i] = from[token * all.g.stride[1]];
    }
}

/* Numbers of a warp's lanes: the sum of those before this one, and of all. */
__device__ inline void mn_scan_warp_cumsum(double &before, double &whole, double own) {
    const int lane = threadIdx.x % 32;
    double sum = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const double other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    whole = __shfl_sync(0xffffffffu, sum, 31);
    before = __shfl_up_sync(0xffffffffu, sum, 1);
    if (lane == 0) before = 0.0;
}

/* A warp calls. A sum of -200 is as good as any below. */
template <int CHUNK>
__device__ inline void mn_scan_cumsum_decays(mn_scan_log_decays<CHUNK> &to,
                                             const mn_bf16 (&raw)[CHUNK / 32], bool reverse) {
    const double unit = 1.4426950408889634;
    const int lane = threadIdx.x % 32;
    float g[CHUNK / 32];
    double own = 0.0;
#pragma unroll
    for (int i = 0; i < CHUNK / 32; i++) {
        const float x = mn_float(raw[i]);
        g[i] = x < -200.0f ? -200.0f : x;    // NaN stays
        own += unit * g[i];
    }
    double log_decay, whole;
    mn_scan_warp_cumsum(log_decay, whole, own);
#pragma unroll
    for (int i = 0; i < CHUNK / 32; i++) {
        const int row = lane * (CHUNK / 32) + i;
        const double before = log_decay;
        log_decay += unit * g[i];
        const double l = reverse ? before : log_decay;
        to.log_decay[row] = make_float2((float)l, (float)(l - (double)(float)l));
        to.to_end[row] = mn_exp2((float)(whole - l));
    }
    if (lane == 0) to.whole = (float)whole;
}

/* ---- one chunk ------------------------------------------------------------------------------- */

/* p <- 2^(l_r - l_c) score(p, r, c), zero where c > r, for 16 rows by 32 columns */
template <bool DECAYS, typename F>
__device__ inline void mn_scan_weigh_scores(float (&p)[4][4], const float2 *rows,
                                           const float2 *columns,
                                     int row0, int column0, F score) {
    const int lane = threadIdx.x % 32, row = row0 + lane / 4;
    float2 of_row[2] = {};
    if (DECAYS) of_row[0] = rows[row], of_row[1] = rows[row + 8];
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
        const int column = column0 + 8 * tile + lane % 4 * 2;
        float4 of_columns = {};
        if (DECAYS) of_columns = *(const float4 *)(columns + column);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[tile][i] = score(p[tile][i], row + i / 2 * 8, column + i % 2);
            if (DECAYS) {
                const float high = i % 2 ? of_columns.z : of_columns.x;
                const float low = i % 2 ? of_columns.w : of_columns.y;
                p[tile][i] *= mn_exp2((of_row[i / 2].x - high) + (of_row[i / 2].y - low));
            }
            if (column + i % 2 > row + i / 2 * 8) p[tile][i] = 0.0f;
        }
    }
}

/* What weighs the tokens of a chunk: here decays, or nothing. Others have more to add where reads
 * and writes pass (mlstm_chunk.cu). */
template <int CHUNK, bool DECAYS>
struct mn_scan_weights {
    static constexpr bool decays = DECAYS;
    const mn_scan_log_decays<CHUNK> &log_decays;

    /* The state was read for rows row0 + ...: o is x M. */
    template <int TILES>
    __device__ void state_read(float (&o)[TILES][4], int row0, int) const {
        if (!DECAYS) return;
        const float low = mn_exp2(log_decays.log_decay[row0 + threadIdx.x % 32 / 4].x);
        const float high = mn_exp2(log_decays.log_decay[row0 + threadIdx.x % 32 / 4 + 8].x);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            o[tile][0] *= low, o[tile][1] *= low, o[tile][2] *= high, o[tile][3] *= high;
        }
    }

    __device__ void weigh(float (&p)[4][4], int row0, int left) const {
        mn_scan_weigh_scores<DECAYS>(p, log_decays.log_decay, log_decays.log_decay, row0, left,
                              [](float x, int, int) { return x; });
    }

    __device__ const float *to_end(void) const { return log_decays.to_end; }
    __device__ float whole(void) const { return mn_exp2(log_decays.whole); }
    /* Left operands pass: rows of x at depth 16 k; of y, transposed, tile r from token t on. */
    __device__ void reads(const uint32_t (&)[4], int) const {}
    __device__ void writes(const uint32_t (&)[4], int, int) const {}
    /* Tokens from t on of z pass. */
    __device__ void writes_of(const mn_bf16 *, int) const {}
};

/* Left operands of 16 rows of x: held in registers where they fit. */
template <int DEPTH>
struct mn_scan_row_frags {
    static constexpr bool held = DEPTH <= 128;
    uint32_t x[held ? DEPTH / 16 : 1][4];
    const mn_bf16 *at;

    __device__ mn_scan_row_frags(const mn_bf16 *rows) : at(rows) {
        if constexpr (held) {
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) mn_frag_a(x[k], at + 16 * k, DEPTH + 8);
        }
    }

    __device__ void get(uint32_t (&a)[4], int k) const {
        if constexpr (held) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = x[k][i];
        } else {
            mn_frag_a(a, at + 16 * k, DEPTH + 8);
        }
    }
};

/* Sum over this thread's cells of o with what lies beside. */
template <int TILES>
__device__ inline float mn_scan_dot(const float (&o)[TILES][4],
                                        const uint32_t (&paired)[2][TILES], int half) {
    float product = 0.0f;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        product = fmaf(o[tile][2 * half], mn_bf16_lo(paired[half][tile]), product);
        product = fmaf(o[tile][2 * half + 1], mn_bf16_hi(paired[half][tile]), product);
    }
    return product;
}

/* o = x M and what the chunk's own tokens add, for this warp's rows; without the scale. The
 * products of x M with what lies beside go to *kept, where it is not NULL. */
template <int DEPTH, int CHUNK, typename WEIGHTS>
__device__ inline void mn_scan_output(float (&o)[mn_scan_n_tiles<CHUNK>][4],
                                    const mn_scan_stage<DEPTH, CHUNK> &in,
                                        const mn_bf16 *state,
                                    WEIGHTS &weights,
                                    const uint32_t (&paired)[2][mn_scan_n_tiles<CHUNK>],
                                    float *kept) {
    constexpr int pitch = DEPTH + 8;
    const int row0 = mn_scan_row0<CHUNK>(), column0 = mn_scan_column0<CHUNK>();
    const mn_scan_row_frags<DEPTH> rows(in.x + row0 * pitch);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        uint32_t a[4], b[4];
        rows.get(a, k);
        weights.reads(a, k);
#pragma unroll
        for (int tile = 0; tile < mn_scan_n_tiles<CHUNK>; tile += 2) {
            mn_frag_b_trans(b, state + 16 * k * MN_SCAN_PITCH + column0 + 8 * tile,
                                MN_SCAN_PITCH);
            mn_mma(o[tile], a, b[0], b[1]);
            mn_mma(o[tile + 1], a, b[2], b[3]);
        }
    }
    weights.state_read(o, row0, column0);
    if (kept) *kept = mn_scan_dot(o, paired, 0) + mn_scan_dot(o, paired, 1);
    for (int left = 0; left <= row0; left += 32) {
        float p[4][4] = {};
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            uint32_t a[4], b[4];
            rows.get(a, k);
#pragma unroll
            for (int tile = 0; tile < 4; tile += 2) {
                mn_frag_b(b, in.y + (left + 8 * tile) * pitch + 16 * k, pitch);
                mn_mma(p[tile], a, b[0], b[1]);
                mn_mma(p[tile + 1], a, b[2], b[3]);
            }
        }
        weights.weigh(p, row0, left);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (left + 16 * half > row0) break;
            uint32_t a[4], b[4];
            mn_frag_a_of(a, p[2 * half], p[2 * half + 1]);
            if (left + 16 * half == row0) {
                mn_mma_causal(o, a, in.z + row0 * MN_SCAN_PITCH + column0, MN_SCAN_PITCH);
                break;
            }
#pragma unroll
            for (int tile = 0; tile < mn_scan_n_tiles<CHUNK>; tile += 2) {
                mn_frag_b_trans(b, in.z + (left + 16 * half) * MN_SCAN_PITCH + column0 + 8
                                    * tile,
                                MN_SCAN_PITCH);
                mn_mma(o[tile], a, b[0], b[1]);
                mn_mma(o[tile + 1], a, b[2], b[3]);
            }
        }
    }
}

/* M <- 2^L M + sum of 2^(L - l) y z' */
template <int DEPTH, int CHUNK, typename WEIGHTS>
__device__ inline void mn_scan_update_state(mn_scan_state_of<DEPTH, CHUNK> &M,
                                     const mn_scan_stage<DEPTH, CHUNK> &in,
                                         WEIGHTS &weights) {
    using sizes = mn_scan_sizes<DEPTH, CHUNK>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row0 = warp % sizes::row_groups * sizes::row_tiles * 16;
    const int column0 = warp / sizes::row_groups * sizes::column_tiles * 8;
    if (WEIGHTS::decays) {
        const float whole = weights.whole();
        M.each([&](float &cell, int, int) { cell *= whole; });
    }
#pragma unroll
    for (int t = 0; t < CHUNK; t += 16) {
        uint32_t b[sizes::column_tiles / 2][4];
#pragma unroll
        for (int tile = 0; tile < sizes::column_tiles; tile += 2) {
            mn_frag_b_trans(b[tile / 2], in.z + t * MN_SCAN_PITCH + column0 + 8 * tile,
                            MN_SCAN_PITCH);
        }
        weights.writes_of(in.z, t);
#pragma unroll
        for (int r = 0; r < sizes::row_tiles; r++) {
            uint32_t a[4];
            mn_frag_a_trans(a, in.y + t * sizes::pitch + row0 + 16 * r, sizes::pitch);
            weights.writes(a, r, t);
            if (WEIGHTS::decays) {
                const float *to_end = weights.to_end() + t + lane % 4 * 2;
                const float2 low = *(const float2 *)to_end, high = *(const float2 *)(to_end + 8);
                a[0] = mn_bf16x2_mul(a[0], low.x, low.y);
                a[1] = mn_bf16x2_mul(a[1], low.x, low.y);
                a[2] = mn_bf16x2_mul(a[2], high.x, high.y);
                a[3] = mn_bf16x2_mul(a[3], high.x, high.y);
            }
#pragma unroll
            for (int tile = 0; tile < sizes::column_tiles; tile += 2) {
                mn_mma(M.at[r][tile], a, b[tile / 2][0], b[tile / 2][1]);
                mn_mma(M.at[r][tile + 1], a, b[tile / 2][2], b[tile / 2][3]);
            }
        }
    }
}

/* ---- the scan -------------------------------------------------------------------------------- */

/* Rows of a sequence that a block reads and writes. */
struct mn_scan_col_tiles {
    mn_col_tile<const mn_bf16> x, y, z, paired;
    mn_col_tile<mn_bf16> out;
    bool reads;

    __device__ mn_scan_col_tiles(const mn_chunk_scan &p, const mn_scan_coord &at, int depth) {
        const mn_span &s = at.span;
        reads = !p.reduce_pass;
        const int64_t deep = p.transposed ? at.h : at.key, wide = p.transposed ? at.key : at.h;
        x = mn_col_tile_of<const mn_bf16>(p.x, s, deep, 0, p.depth, depth);
        y = mn_col_tile_of<const mn_bf16>(p.y, s, deep, 0, p.depth, depth);
        z = mn_col_tile_of<const mn_bf16>(p.z, s, wide, at.column0, p.width, MN_SCAN_WIDTH);
        paired = mn_col_tile_of<const mn_bf16>(p.paired, s, wide, at.column0, p.width,
                                               MN_SCAN_WIDTH);
        out = mn_col_tile_of<mn_bf16>(p.out, s, at.h, at.column0, p.width, MN_SCAN_WIDTH);
    }
};

template <int DEPTH, int CHUNK>
__device__ inline void mn_scan_load_chunks(mn_scan_stage<DEPTH, CHUNK> &to,
                                          const mn_scan_col_tiles &col_tiles,
                                     int64_t t, int64_t length, bool reverse) {
    constexpr int threads = mn_scan_sizes<DEPTH, CHUNK>::threads;
    const int count = (int)min((int64_t)CHUNK, length - t);
    if (col_tiles.reads) mn_load_tokens<CHUNK, DEPTH,
        threads>(to.x, col_tiles.x, t, count, reverse);
    mn_load_tokens<CHUNK, DEPTH, threads>(to.y, col_tiles.y, t, count, reverse);
    mn_load_tokens<CHUNK, MN_SCAN_WIDTH, threads>(to.z, col_tiles.z, t, count, reverse);
    mn_cp_async_commit();
}

/* The token of this thread's row in the upper or lower half of its warp's rows. */
template <int CHUNK>
__device__ inline int mn_scan_token(int half, bool reverse) {
    const int row = mn_scan_row0<CHUNK>() + threadIdx.x % 32 / 4 + 8 * half;
    return reverse ? CHUNK - 1 - row : row;
}

/* What lies beside o: asked for early, as it comes from memory. */
template <int CHUNK>
__device__ inline void mn_scan_load_paired(uint32_t (&paired)[2][mn_scan_n_tiles<CHUNK>],
                                           const mn_chunk_scan &p,
                                               const mn_scan_col_tiles &col_tiles,
                                           int64_t t, int count) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = mn_scan_token<CHUNK>(half, p.reverse);
        mn_load_bf16x2(paired[half], col_tiles.paired, t + token, token < count,
                    mn_scan_column0<CHUNK>());
    }
}

/* Rows of o, scaled, to memory, and their products with the rows beside it */
template <int CHUNK>
__device__ inline void mn_scan_store_out(const float (&o)[mn_scan_n_tiles<CHUNK>][4],
                                   const uint32_t (&paired)[2][mn_scan_n_tiles<CHUNK>],
                                   mn_scan_mode mode, const mn_chunk_scans &all,
                                       const mn_chunk_scan &p,
                                   const mn_scan_coord &at,
                                       const mn_scan_col_tiles &col_tiles,
                                   int64_t t, int count, const float (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = mn_scan_token<CHUNK>(half, p.reverse);
        const bool inside = token < count;
        if (mode != MN_SCAN_PLAIN) {
            float product = mn_scan_dot(o, paired, half);
            product += __shfl_xor_sync(0xffffffffu, product, 1);
            product += __shfl_xor_sync(0xffffffffu, product, 2);
            const int64_t when = at.span.b * all.call.T + at.span.t0 + t + token;
            const int64_t tokens = all.call.B * all.call.T;
            if (inside && threadIdx.x % 4 == 0) {
                const int64_t part = at.slice * (128 / CHUNK) + threadIdx.x / (2 * CHUNK);
                p.products[(part * tokens + when) * all.call.H + at.h] = scale[half] * product;
            }
        }
#pragma unroll
        for (int tile = 0; tile < mn_scan_n_tiles<CHUNK>; tile += 4) {
            uint32_t pair[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                pair[i] = mn_bf16x2(scale[half] * o[tile + i][2 * half],
                                  scale[half] * o[tile + i][2 * half + 1]);
            }
            mn_store_tokens(col_tiles.out, pair, t + token, inside,
                          mn_scan_column0<CHUNK>() + 8 * tile);
        }
    }
}

/* Where the state in front of a chunk is kept, and this warp's part of its exchange with the state
 * behind the chunk, which comes decayed over it; `more` is what else this thread makes meet, and
 * `product` its part of what has been read from the state behind the chunk. */
template <int DEPTH, int CHUNK>
__device__ inline int64_t mn_scan_saved_at(const mn_chunk_scans &all,
                                                const mn_scan_coord &at,
                                          int64_t chunk) {
    const int64_t slot = mn_scan_first_slot(all.call, at.n, CHUNK) + chunk;
    return (slot * all.call.H + at.h) * at.n_slices + at.slice;
}

template <int DEPTH, int CHUNK>
__device__ inline void mn_scan_dot_saved(const mn_scan_state_of<DEPTH, CHUNK> &M,
                                    const typename mn_scan_state_of<DEPTH, CHUNK>::kept &kept,
                                    const mn_chunk_scan &p, int64_t kept_at, float cum_decay,
                                        float more, float product) {
    using sizes = mn_scan_sizes<DEPTH, CHUNK>;
    float sum = more;
    M.meet(kept, [&](int k, int i, float x) {
        sum = fmaf(M.at[k / sizes::column_tiles][k % sizes::column_tiles][i], x, sum);
    });
    sum = mn_warp_sum(sum);
    product = mn_warp_sum(product);
    if (threadIdx.x % 32 == 0) {
        p.state_dots[kept_at * sizes::warps + threadIdx.x / 32] = p.scale * cum_decay * sum;
        p.inside[kept_at * sizes::warps + threadIdx.x / 32] = p.scale * product;
    }
}

/* Reads the chunk at t, then moves the state behind it. */
template <int DEPTH, int CHUNK, bool DECAYS>
__device__ inline void mn_scan_chunk(mn_scan_state_of<DEPTH, CHUNK> &M,
                                          const mn_chunk_scans &all,
                                    const mn_chunk_scan &p, const mn_scan_coord &at,
                                    const mn_scan_col_tiles &col_tiles,
                                    const mn_scan_stage<DEPTH, CHUNK> &in,
                                        const mn_bf16 *state,
                                    const mn_scan_log_decays<CHUNK> &log_decays, mn_bf16 *next,
                                        int64_t t) {
    using sizes = mn_scan_sizes<DEPTH, CHUNK>;
    const int count = (int)min((int64_t)CHUNK, at.span.length - t);
    const int64_t kept_at = mn_scan_saved_at<DEPTH, CHUNK>(all, at, t / CHUNK);
    const mn_scan_mode mode = DECAYS ? p.mode : MN_SCAN_PLAIN;
    float o[mn_scan_n_tiles<CHUNK>][4] = {}, product = 0.0f;
    uint32_t paired[2][mn_scan_n_tiles<CHUNK>];
    if (mode != MN_SCAN_PLAIN) mn_scan_load_paired<CHUNK>(paired, p, col_tiles, t, count);
    typename mn_scan_state_of<DEPTH, CHUNK>::kept kept;
    if (mode == MN_SCAN_DOT_STATE) M.recall(kept, p.kept + kept_at * sizes::kept);
    mn_scan_weights<CHUNK, DECAYS> weights = { log_decays };
    mn_scan_output<DEPTH, CHUNK>(o, in, state, weights, paired,
                               mode == MN_SCAN_DOT_STATE ? &product : nullptr);
    if (mode == MN_SCAN_DOT_STATE) {
        mn_scan_dot_saved<DEPTH, CHUNK>(M, kept, p, kept_at, DECAYS ? weights.whole() : 1.0f,
                                        0.0f, product);
    }
    if (mode == MN_SCAN_SAVE_STATE) M.keep(p.kept + kept_at * sizes::kept);
    mn_scan_update_state<DEPTH, CHUNK>(M, in, weights);
    M.share(next);
    mn_scan_store_out<CHUNK>(o, paired, mode, all, p, at, col_tiles, t, count,
                             { p.scale, p.scale });
}

template <int DEPTH, int CHUNK, bool DECAYS>
__global__ void __launch_bounds__(mn_scan_sizes<DEPTH, CHUNK>::threads, 1)
additive_state_scan(const __grid_constant__ mn_chunk_scans all) {
    using sizes = mn_scan_sizes<DEPTH, CHUNK>;
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_scan_smem<DEPTH, CHUNK> &smem = *(mn_scan_smem<DEPTH, CHUNK> *)bytes;
    const mn_chunk_scan &p = all.scan[blockIdx.y];
    if (blockIdx.x >= mn_scan_slices(p) * all.call.H * mn_n_spans(all.call)) return;
    const mn_scan_coord at = mn_scan_block_coord(all.call, p, CHUNK);
    if (at.idle) return;
    const mn_scan_col_tiles col_tiles(p, at, DEPTH);
    const int64_t length = at.span.length;
    const bool reverse = p.reverse, sums = DECAYS && threadIdx.x < 32;
    mn_bf16 g[CHUNK / 32];
    float cum_decay = 1.0f;
    mn_scan_state_of<DEPTH, CHUNK> M;
    M.begin(p, at, sizes::kept, [&](const float *cum_decays) {
        M.each([&](float &cell, int, int) { cell *= *cum_decays; });
    });
    M.share(smem.state[0]);
    for (int64_t n = at.iter; n <= at.end; n++) {
        const bool computes = n > at.iter, prefetches = n < at.end;
        const int next = (n - at.iter) % 2, now = 1 - next;
        const int64_t t = (reverse ? at.n_chunks - n : n - 1) * CHUNK;    // of what it computes
        const int64_t t_next = reverse ? t - CHUNK : t + CHUNK;
        if (computes) mn_cp_async_wait_all();
        __syncthreads();
        if (prefetches) {
            mn_scan_load_chunks<DEPTH, CHUNK>(smem.stage[next], col_tiles, t_next, length, reverse);
            const int count = (int)min((int64_t)CHUNK, length - t_next);
            if (sums) mn_scan_load_decays<CHUNK>(g, all, at, t_next, count, reverse);
        }
        if (computes && p.reduce_pass) {
            mn_scan_weights<CHUNK, DECAYS> weights = { smem.log_decays[now] };
            mn_scan_update_state<DEPTH, CHUNK>(M, smem.stage[now], weights);
            if (DECAYS) cum_decay *= mn_exp2(smem.log_decays[now].whole);
        } else if (computes) {
            mn_scan_chunk<DEPTH, CHUNK, DECAYS>(M, all, p, at, col_tiles, smem.stage[now],
                                               smem.state[now], smem.log_decays[now],
                                               smem.state[next], t);
        }
        if (sums && prefetches) mn_scan_cumsum_decays<CHUNK>(smem.log_decays[next], g, reverse);
    }
    if (p.reduce_pass) {
        M.store_sum(p.sums + at.index * sizes::kept);
        if (threadIdx.x == 0) p.cum_decays[at.index * MN_SCAN_DECAYS] = cum_decay;
    } else if (at.last) {
        M.store(p, at);
    }
}

}    // namespace mneme::additive

#endif
