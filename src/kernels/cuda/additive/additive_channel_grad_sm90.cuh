/* additive_channel_grad_sm90.cuh - gradients of queries, keys and decays where each channel has its
 * own decay, on Hopper, from states that scans have left (additive_channel_state_scan_sm90.cuh): S
 * in front of each
 * chunk of 64 tokens, and its gradient N behind it.
 *
 *   dq_t = scale (2^(e_t) S do_t + sum over s <= t of (do_t.v_s) 2^(e_t - e_s) k_s)
 *   dk_s = scale (2^(E - e_s) N v_s + sum over t >= s of (do_t.v_s) 2^(e_t - e_s) q_t)
 *   dg_0 = scale sum over V of S (2^E N + sum over t of 2^(e_t) q_t do_t')
 *   dg_(t + 1) = dg_t + k_t dk_t - q_t dq_t
 *
 * with e the sums of log2 decays from the chunk's start, E that of the chunk. They are taken from
 * part to part of 16 tokens as in additive_channel_state_scan.cuh, and inside a part as
 * additive_channel_scale.cuh
 * says. No chunk waits for another: a block has 64 channels of one chunk of one head; four warps
 * have queries, four keys, each those of one part. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_GRAD_SM90_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_GRAD_SM90_CUH

#include "kernels/cuda/additive/additive_channel_scale_sm90.cuh"
#include "kernels/cuda/prim/tma.cuh"

enum {
    MN_GATED_SPAN = MN_PARTS_CHUNK,           // tokens between states
    MN_GATED_TILE = MN_GATED_SPAN * 128,      // bytes of a tile of 64 columns
    MN_GATED_DERIVERS = 64 * MN_PARTS,        // threads
    MN_GATED_TERMS = MN_SCAN_WIDTH + 4,       // floats between rows of terms
};

struct mn_gated_gradient {
    mn_call call;
    CUtensorMap q, k, v, g, cot;
    mn_out dq, dk, dg;
    const mn_bf16 *S, *N;
    float scale;
};

/* States as they were kept: eight rows of 64 channels by eight columns each. */
template <int VP>
struct alignas(1024) mn_gated_gradient_smem {
    unsigned char cot[VP / 64 * MN_GATED_TILE], v[VP / 64 * MN_GATED_TILE];
    unsigned char q[MN_GATED_TILE], k[MN_GATED_TILE], g[MN_GATED_TILE];
    unsigned char q_inside[MN_GATED_TILE], k_inside[MN_GATED_TILE];
    unsigned char S[VP * 128], N[VP * 128];
    alignas(16) float fall[MN_PARTS][MN_SCAN_WIDTH];
    alignas(16) float read[MN_PARTS][MN_SCAN_WIDTH];    // S do_t q~_t of parts
    alignas(16) float met[MN_SCAN_WIDTH];               // S with N
    alignas(16) float sums[2 * MN_PARTS][MN_SCAN_WIDTH];    // terms of halves of parts
    uint64_t front, back;                                   // what is scaled has come, the rest

    /* Of queries, or of keys, where tiles were that have been read. */
    __device__ float *terms(int of_keys) {
        return (float *)cot + of_keys * MN_GATED_SPAN * MN_GATED_TERMS;
    }
};

#if MN_HAS_WGMMA

/* One thread requests for all tiles. */
template <int VP>
__device__ inline void mn_gated_load_all(mn_gated_gradient_smem<VP> &room,
                                          const mn_gated_gradient &p, const mn_tile_span &at,
                                          int64_t slot, int h, int slice, int n_slices) {
    const int t = (int)(at.span.t0 + at.first), b = (int)at.span.b;
    const int64_t state = ((slot * p.call.H + h) * n_slices + slice) * (VP * MN_SCAN_WIDTH);
    mn_mbarrier_arrive_expect_tx(&room.front, 3 * MN_GATED_TILE);
    mn_tma_load(room.g, p.g, &room.front, 64 * slice, h, t, b);
    mn_tma_load(room.q, p.q, &room.front, 64 * slice, h, t, b);
    mn_tma_load(room.k, p.k, &room.front, 64 * slice, h, t, b);
    mn_mbarrier_arrive_expect_tx(&room.back, 2 * (VP / 64) * MN_GATED_TILE + 2 * VP * 128);
    mn_tma_load_bulk(room.S, p.S + state, VP * 128, &room.back);
    mn_tma_load_bulk(room.N, p.N + state, VP * 128, &room.back);
    for (int smem_tile = 0; smem_tile < VP / 64; smem_tile++) {
        const int at_smem_tile = smem_tile * MN_GATED_TILE;
        mn_tma_load(room.cot + at_smem_tile, p.cot, &room.back, 64 * smem_tile, h, t, b);
        mn_tma_load(room.v + at_smem_tile, p.v, &room.back, 64 * smem_tile, h, t, b);
    }
}

/* Where one of several packed sequences ends, tokens of the next become zeros: `tiles` of 64 rows.
 * All threads of the block call. */
__device__ inline void mn_gated_end_tiles(unsigned char *first, int tiles, int n_rows) {
    const int each = (MN_GATED_SPAN - n_rows) * 8;
    for (int i = threadIdx.x; i < tiles * each; i += MN_GATED_DERIVERS) {
        *(uint4 *)(first + i / each * MN_GATED_TILE + n_rows * 128 + i % each * 16) =
            make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
}

/* ---- levels ---------------------------------------------------------------------------------- */

/* A part's 16 tokens by 64 channels: number i of eight channels n is of token
 * lane / 4 + i / 2 * 8, channel 8 n + lane % 4 * 2 + i % 2. */
typedef float mn_gated_part[8][4];

__device__ inline int mn_gated_my_part(void) {
    return threadIdx.x / 32 % MN_PARTS;
}

/* Levels inside a part of a channel that falls too deep, at a token and eight later: see
 * additive_channel_scale.cuh. `g` is the channel at the part's first token. */
static __device__ __noinline__ float2 mn_gated_cut(const unsigned char *tile, int part, int channel,
                                                   int token) {
    const float usual = 12.5f, most = 200.0f;
    const auto fall_at = [&](int u) {
        const unsigned char *at = tile + mn_gated_place(16 * part + u, channel / 8);
        return -mn_scale_log(mn_float(((const mn_bf16 *)at)[channel % 8]));
    };
    float gentle = 0.0f, depth = 0.0f, d[2] = {};
    int steep = 0;
    for (int u = 1; u < MN_PART; u++) {
        const float fall = fall_at(u);
        if (fall > usual) steep++;
        else gentle += fall;
    }
    const float limit = steep ? fmaxf(usual, (most - gentle) / (float)steep) : most;
    for (int u = 1; u < MN_PART; u++) {
        const float step = fminf(fall_at(u), limit);
        depth += step;
        if (u <= token) d[0] -= step;
        if (u <= token + 8) d[1] -= step;
    }
    return make_float2(d[0] + 0.5f * depth, d[1] + 0.5f * depth);
}

/* Sums of decays, and which channels fall too deep. */
struct mn_gated_levels {
    mn_gated_part e;
    unsigned deep;    // bit 2 n + j
    bool any;         // in the warp

    __device__ void make(uint32_t g) {
        const mn_gated_triangle triangle;
        deep = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t b[4];
            mn_gated_matrices<true>(b, g ^ k * 32);
            triangle.sum(e[2 * k], b[0], b[1]);
            triangle.sum(e[2 * k + 1], b[2], b[3]);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (end(i / 2, i % 2) < -100.0f) deep |= 1u << i;
        }
        any = __any_sync(0xffffffffu, deep != 0);
    }

    /* The sum of the whole part for channel j of eight channels n; a warp calls. */
    __device__ float end(int n, int j) const {
        return __shfl_sync(0xffffffffu, e[n][2 + j], 28 + threadIdx.x % 4);
    }

    /* x <- the levels inside the part of 16 channels from 16 k on */
    __device__ void inside(float (&x)[2][4], int k, const unsigned char *tile) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 8; i++) x[i / 4][i % 4] = e[2 * k + i / 4][i % 4];
        if (!any) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!(deep >> (4 * k + i) & 1)) continue;
            const float2 d = mn_gated_cut(tile, mn_gated_my_part(),
                                          16 * k + i / 2 * 8 + lane % 4 * 2 + i % 2, lane / 4);
            x[i / 2][i % 2] = d.x, x[i / 2][2 + i % 2] = d.y;
        }
    }
};

/* A left operand times 2^level. */
__device__ inline void mn_gated_raise(uint32_t (&y)[4], const uint32_t (&x)[4],
                                      const float (&level)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float(&l)[4] = level[i / 2];
        y[i] = mn_pair_times(x[i], mn_exp2(l[i % 2 * 2]), mn_exp2(l[i % 2 * 2 + 1]));
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* Where this lane points in 16 rows and 16 columns of a tile: matrices down the rows first, or
 * along the columns first. */
__device__ inline uint32_t mn_gated_down(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + mn_gated_place(row + lane % 16, lane / 16);
}

__device__ inline uint32_t mn_gated_along(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + mn_gated_place(row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

/* Rows of this warp's part, columns from 16 k on, as a left operand. */
__device__ inline void mn_gated_left(uint32_t (&a)[4], uint32_t tile, int k) {
    mn_gated_matrices<false>(a, (mn_gated_down(tile, 16 * mn_gated_my_part()) ^ k % 4 * 32) +
                                    k / 4 * MN_GATED_TILE);
}

/* o = x M for a kept state M and this part's rows x of a tile */
template <int VP>
__device__ inline void mn_gated_read(mn_gated_part &o, uint32_t x, uint32_t M) {
    const int lane = threadIdx.x % 32;
    const uint32_t at = M + (lane / 8 % 2 * 8 + lane / 16) * 128 + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < 32; i++) o[i / 4][i % 4] = 0.0f;
#pragma unroll 2
    for (int k = 0; k < VP / 16; k++) {
        uint32_t a[4];
        mn_gated_left(a, x, k);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t b[4];
            mn_gated_matrices<true>(b, at + k * 2048 + n * 128);
            mn_mma(o[n], a, b[0], b[1]);
            mn_mma(o[n + 1], a, b[2], b[3]);
        }
    }
}

/* Scores of this part's rows of x with those of a part of y. */
template <int VP>
__device__ inline void mn_gated_meet(float (&P)[2][4], uint32_t x, uint32_t y, int part) {
    float odd[2][4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) P[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < VP / 16; k++) {
        uint32_t a[4], b[4];
        mn_gated_left(a, x, k);
        mn_gated_matrices<false>(
            b, (mn_gated_along(y, 16 * part) ^ k % 4 * 32) + k / 4 * MN_GATED_TILE);
        mn_mma(k % 2 ? odd[0] : P[0], a, b[0], b[1]);
        mn_mma(k % 2 ? odd[1] : P[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) P[i / 4][i % 4] += odd[i / 4][i % 4];
}

/* o += P x for the 16 rows of a part of a tile */
__device__ inline void mn_gated_add(mn_gated_part &o, const float (&P)[2][4], uint32_t tile,
                                    int part) {
    uint32_t a[4];
    mn_left_of(a, P[0], P[1]);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        mn_gated_matrices<true>(b, mn_gated_down(tile, 16 * part) ^ n * 16);
        mn_mma(o[n], a, b[0], b[1]);
        mn_mma(o[n + 1], a, b[2], b[3]);
    }
}

__device__ inline void mn_gated_part_falls(mn_gated_part &o, const float *fall) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 f = *(const float2 *)(fall + 8 * n + threadIdx.x % 4 * 2);
        o[n][0] *= f.x, o[n][1] *= f.y, o[n][2] *= f.x, o[n][3] *= f.y;
    }
}

/* Rows of a part to memory. */
__device__ inline void mn_gated_store_part(const mn_gated_part &o, const mn_out &view,
                                           const mn_tile_span &at, int64_t h, int slice,
                                           int64_t K) {
    const int lane = threadIdx.x % 32, part = mn_gated_my_part();
    const mn_strip<mn_bf16> to =
        mn_strip_of<mn_bf16>(view, at.span, h, 64 * slice, K, MN_SCAN_WIDTH);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = 16 * part + lane / 4 + 8 * half;
#pragma unroll
        for (int n = 0; n < 8; n += 4) {
            uint32_t pair[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                pair[i] = mn_pair(o[n + i][2 * half], o[n + i][2 * half + 1]);
            }
            mn_put_tokens(to, pair, at.first + row, row < at.n_rows, 8 * n);
        }
    }
}

/* ---- a block --------------------------------------------------------------------------------- */

/* What the state adds to dg: sums over this part's rows of q~ and what they read from S, which the
 * parts before have still to lower. */
__device__ inline void mn_gated_sum_read(float (*sums)[MN_SCAN_WIDTH], const mn_gated_part &o,
                                         uint32_t q) {
    const int lane = threadIdx.x % 32, part = mn_gated_my_part();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4];
        mn_gated_matrices<false>(x, mn_gated_down(q, 16 * part) ^ k * 32);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float(&y)[4] = o[2 * k + n];
            const int channel = 16 * k + 8 * n + lane % 4 * 2;
            float2 sum;
            sum.x = fmaf(y[0], mn_low(x[2 * n]), y[2] * mn_low(x[2 * n + 1]));
            sum.y = fmaf(y[1], mn_high(x[2 * n]), y[3] * mn_high(x[2 * n + 1]));
#pragma unroll
            for (int by = 4; by < 32; by <<= 1) {
                sum.x += __shfl_xor_sync(0xffffffffu, sum.x, by);
                sum.y += __shfl_xor_sync(0xffffffffu, sum.y, by);
            }
            if (lane < 4) *(float2 *)&sums[part][channel] = sum;
        }
    }
}

/* Sums of products of S and N: a warp has eight channels. */
template <int VP>
__device__ inline void mn_gated_sum_met(float *sums, const unsigned char *S,
                                        const unsigned char *N) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float2 sum = {};
#pragma unroll
    for (int rows = 0; rows < VP / 8; rows++) {
        const int at = (rows * 8 + warp) * 128 + lane * 4;
        const uint32_t x = *(const uint32_t *)(S + at), y = *(const uint32_t *)(N + at);
        sum.x = fmaf(mn_low(x), mn_low(y), sum.x), sum.y = fmaf(mn_high(x), mn_high(y), sum.y);
    }
#pragma unroll
    for (int by = 4; by < 32; by <<= 1) {
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, by);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, by);
    }
    if (lane < 4) *(float2 *)(sums + 8 * warp + lane * 2) = sum;
}

/* o <- scale (o 2^e + inside 2^l), where l and e differ if channels fall too deep; dk has -l, and
 * E - e for e. Terms are -q dq or k dk, with the rounded rows that products had, at `far` and at
 * `near`, so that what one token reads from another is the same number in both. */
template <bool OF_KEYS>
__device__ inline void mn_gated_finish(mn_gated_part &o, const mn_gated_part &inside,
                                       mn_gated_part &terms, const mn_gated_levels &levels,
                                       uint32_t far, uint32_t near, const unsigned char *g,
                                       float scale) {
    const int part = mn_gated_my_part();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4], y[4];
        float l[2][4], end[4] = {};
#pragma unroll
        for (int i = 0; OF_KEYS && i < 4; i++) end[i] = levels.end(2 * k + i / 2, i % 2);
        levels.inside(l, k, g);
        mn_gated_matrices<false>(x, mn_gated_down(far, 16 * part) ^ k * 32);
        mn_gated_matrices<false>(y, mn_gated_down(near, 16 * part) ^ k * 32);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int n = 2 * k + i / 4, c = i % 4;
            const float e = levels.e[n][c];
            const float up = mn_exp2(OF_KEYS ? end[i / 4 * 2 + c % 2] - e : e);
            const float level = l[i / 4][c], up_inside = mn_exp2(OF_KEYS ? -level : level);
            const float wide = c % 2 ? mn_high(x[i / 2]) : mn_low(x[i / 2]);
            const float close = c % 2 ? mn_high(y[i / 2]) : mn_low(y[i / 2]);
            const float term = fmaf(o[n][c], wide, inside[n][c] * close);
            terms[n][c] = (OF_KEYS ? scale : -scale) * term;
            o[n][c] = scale * fmaf(inside[n][c], up_inside, o[n][c] * up);
        }
    }
}

/* Zero where the column is later than the row, or earlier. */
__device__ inline void mn_gated_mask(float (&P)[2][4], bool earlier) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int column = 8 * (i / 4) + lane % 4 * 2 + i % 2, row = lane / 4 + i % 4 / 2 * 8;
        if (earlier ? column < row : column > row) P[i / 4][i % 4] = 0.0f;
    }
}

/* dq of this warp's part, and its terms. */
template <int VP>
__device__ inline void mn_gated_derive_queries(mn_gated_gradient_smem<VP> &room,
                                               mn_gated_part &terms, const mn_gated_levels &levels,
                                               const mn_gated_gradient &p, const mn_tile_span &at,
                                               int64_t h, int slice) {
    const int part = mn_gated_my_part();
    const uint32_t x = mn_smem_address(room.cot), y = mn_smem_address(room.v);
    const uint32_t far = mn_smem_address(room.q), near = mn_smem_address(room.q_inside);
    mn_gated_part o, inside = {};
    float P[2][4];
    mn_gated_read<VP>(o, x, mn_smem_address(room.S));
    mn_gated_sum_read(room.read, o, far);
#pragma unroll 1
    for (int from = 0; from < part; from++) {
        mn_gated_part_falls(o, room.fall[from]);
        mn_gated_meet<VP>(P, x, y, from);
        mn_gated_add(o, P, mn_smem_address(room.k), from);
    }
    mn_gated_meet<VP>(P, x, y, part);
    mn_gated_mask(P, false);
    mn_gated_add(inside, P, mn_smem_address(room.k_inside), part);
    mn_gated_finish<false>(o, inside, terms, levels, far, near, room.g, p.scale);
    mn_gated_store_part(o, p.dq, at, h, slice, p.call.K);
}

/* dk likewise. */
template <int VP>
__device__ inline void mn_gated_derive_keys(mn_gated_gradient_smem<VP> &room, mn_gated_part &terms,
                                            const mn_gated_levels &levels,
                                            const mn_gated_gradient &p, const mn_tile_span &at,
                                            int64_t h, int slice) {
    const int part = mn_gated_my_part();
    const uint32_t x = mn_smem_address(room.v), y = mn_smem_address(room.cot);
    const uint32_t far = mn_smem_address(room.k), near = mn_smem_address(room.k_inside);
    mn_gated_part o, inside = {};
    float P[2][4];
    mn_gated_read<VP>(o, x, mn_smem_address(room.N));
#pragma unroll 1
    for (int from = MN_PARTS - 1; from > part; from--) {
        mn_gated_part_falls(o, room.fall[from]);
        mn_gated_meet<VP>(P, x, y, from);
        mn_gated_add(o, P, mn_smem_address(room.q), from);
    }
    mn_gated_meet<VP>(P, x, y, part);
    mn_gated_mask(P, true);
    mn_gated_add(inside, P, mn_smem_address(room.q_inside), part);
    mn_gated_finish<true>(o, inside, terms, levels, far, near, room.g, p.scale);
    mn_gated_store_part(o, p.dk, at, h, slice, p.call.K);
}

/* dg: sums of terms over tokens; a warp has eight. All threads of the block call. */
template <int VP>
__device__ inline void mn_gated_derive_decays(mn_gated_gradient_smem<VP> &room,
                                              const mn_gated_part &terms, int of_keys,
                                              const mn_gated_gradient &p, const mn_tile_span &at,
                                              int64_t h, int slice) {
    constexpr int each = MN_PART / 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = 2 * lane;
    const int64_t channel = 64 * slice + j;
    float *rows = room.terms(of_keys) + mn_gated_my_part() * MN_PART * MN_GATED_TERMS;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = lane / 4 + i % 2 * 8, n = i / 2;
        *(float2 *)(rows + row * MN_GATED_TERMS + 8 * n + lane % 4 * 2) =
            make_float2(terms[n][i % 2 * 2], terms[n][i % 2 * 2 + 1]);
    }
    __syncthreads();
    float2 term[each], sum = {};
#pragma unroll
    for (int u = 0; u < each; u++) {
        const int i = (warp * each + u) * MN_GATED_TERMS + j;
        const float2 x = *(const float2 *)(room.terms(0) + i);
        const float2 y = *(const float2 *)(room.terms(1) + i);
        term[u] = make_float2(x.x + y.x, x.y + y.y);
        sum.x += term[u].x, sum.y += term[u].y;
    }
    *(float2 *)&room.sums[warp][j] = sum;
    __syncthreads();
    const float2 met = *(const float2 *)&room.met[j];
    float2 read = {}, before = {}, fall = { 1.0f, 1.0f };
#pragma unroll
    for (int i = 0; i < 2 * MN_PARTS; i++) {
        const float2 z = *(const float2 *)&room.sums[i][j];
        if (i < warp) before.x += z.x, before.y += z.y;
    }
#pragma unroll
    for (int i = 0; i < MN_PARTS; i++) {
        const float2 x = *(const float2 *)&room.read[i][j];
        const float2 f = *(const float2 *)&room.fall[i][j];
        read.x = fmaf(fall.x, x.x, read.x), read.y = fmaf(fall.y, x.y, read.y);
        fall.x *= f.x, fall.y *= f.y;
    }
    sum.x = fmaf(p.scale, fmaf(fall.x, met.x, read.x), before.x);
    sum.y = fmaf(p.scale, fmaf(fall.y, met.y, read.y), before.y);
    const int row0 = warp * each, left = (int)at.n_rows - row0;
    mn_bf16 *to = mn_row<mn_bf16>(p.dg, at.span.b, at.span.t0 + at.first + row0, h) + channel;
    if (channel >= p.call.K) return;
#pragma unroll
    for (int u = 0; u < each; u++) {
        if (u < left) *(uint32_t *)to = mn_pair(sum.x, sum.y);
        sum.x += term[u].x, sum.y += term[u].y, to += p.dg.stride[1];
    }
}

/* This warp's part of queries or of keys, scaled, as two tiles: `far` in their place. */
__device__ inline void mn_gated_scale_part(unsigned char *far, unsigned char *near,
                                           const mn_gated_levels &levels, const unsigned char *g,
                                           bool of_keys) {
    const uint32_t at = mn_gated_down(mn_smem_address(far), 16 * mn_gated_my_part());
    const uint32_t beside = mn_gated_down(mn_smem_address(near), 16 * mn_gated_my_part());
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4], y[4];
        float level[2][4], end[4];
        mn_gated_matrices<false>(x, at ^ k * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) end[i] = levels.end(2 * k + i / 2, i % 2);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float e = levels.e[2 * k + i / 4][i % 4];
            level[i / 4][i % 4] = of_keys ? end[i / 4 * 2 + i % 2] - e : e;
        }
        mn_gated_raise(y, x, level);
        mn_gated_put(at ^ k * 32, y);
        if (of_keys || levels.any) {    // otherwise they are the same
            levels.inside(level, k, g);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                level[i / 4][i % 4] = of_keys ? -level[i / 4][i % 4] : level[i / 4][i % 4];
            }
            mn_gated_raise(y, x, level);
        }
        mn_gated_put(beside ^ k * 32, y);
    }
}

#endif

template <int VP>
__global__ void __launch_bounds__(MN_GATED_DERIVERS, 2)
mn_gated_gradient_kernel(const __grid_constant__ mn_gated_gradient p, unsigned n_slices) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char gradient_bytes[];
    mn_gated_gradient_smem<VP> &room = *(mn_gated_gradient_smem<VP> *)gradient_bytes;
    const int slice = (int)(blockIdx.x % n_slices);
    const int part = mn_gated_my_part(), lane = threadIdx.x % 32;
    const unsigned heads = (unsigned)p.call.H, index = blockIdx.x / n_slices;
    const int64_t h = index % heads, slot = index / heads;
    const mn_tile_span at = mn_tile_at(p.call, MN_GATED_SPAN, slot);
    const bool of_keys = threadIdx.x >= MN_GATED_DERIVERS / 2;
    if (at.n_rows == 0) return;
    const bool ends = p.call.cu_seqlens && at.n_rows < MN_GATED_SPAN;
    if (threadIdx.x == 0) {
        mn_mbarrier_init(&room.front, 1);
        mn_mbarrier_init(&room.back, 1);
        mn_mbarrier_init_fence();
        mn_gated_load_all<VP>(room, p, at, slot, (int)h, slice, (int)n_slices);
    }
    __syncthreads();
    mn_mbarrier_wait(&room.front, 0);
    if (ends) mn_gated_end_tiles(room.q, 3, (int)at.n_rows);
    mn_gated_levels levels;
    mn_gated_part terms;
    levels.make(mn_gated_down(mn_smem_address(room.g), 16 * part));
    mn_gated_scale_part(of_keys ? room.k : room.q, of_keys ? room.k_inside : room.q_inside, levels,
                        room.g, of_keys);
    if (!of_keys) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 fall = make_float2(mn_exp2(levels.end(n, 0)), mn_exp2(levels.end(n, 1)));
            if (lane < 4) *(float2 *)&room.fall[part][8 * n + 2 * lane] = fall;
        }
    }
    mn_mbarrier_wait(&room.back, 0);
    if (ends) mn_gated_end_tiles(room.cot, 2 * (VP / 64), (int)at.n_rows);
    __syncthreads();
    mn_gated_sum_met<VP>(room.met, room.S, room.N);
    if (of_keys) mn_gated_derive_keys<VP>(room, terms, levels, p, at, h, slice);
    else mn_gated_derive_queries<VP>(room, terms, levels, p, at, h, slice);
    mn_gated_derive_decays<VP>(room, terms, of_keys, p, at, h, slice);
#endif
}

template <int VP>
inline int mn_gated_gradient_launch(const mn_gated_gradient &job, cudaStream_t stream) {
    const int64_t slices = mn_ceil_div(job.call.K, 64);
    const int64_t blocks = mn_tile_slots(job.call, MN_GATED_SPAN) * job.call.H * slices;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(mn_gated_gradient_kernel<VP>, dim3((unsigned)blocks),
                               MN_GATED_DERIVERS, sizeof(mn_gated_gradient_smem<VP>), stream, job,
                               (unsigned)slices);
}

#endif
