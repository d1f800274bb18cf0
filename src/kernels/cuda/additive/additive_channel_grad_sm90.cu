/* additive_channel_grad_sm90.cu - gradients of additive where each channel has a decay, on Hopper,
 * and dq alone. */
#include "kernels/cuda/additive/additive_channel_sm90.cuh"

namespace mneme::additive {

/* Gradients of queries, keys and decays where each channel has its own decay, on Hopper, from
 * states that the scans of additive_channel_chunk_sm90.cu have left: S in front of each chunk of 64
 * tokens, and its gradient N behind it.
 *
 *   dq_t = scale (2^(e_t) S do_t + sum over s <= t of (do_t.v_s) 2^(e_t - e_s) k_s)
 *   dk_s = scale (2^(E - e_s) N v_s + sum over t >= s of (do_t.v_s) 2^(e_t - e_s) q_t)
 *   dg_t = scale sum over V of N (2^E S + sum over s of 2^(E - e_s) k_s v_s')
 *          + sum over u >= t of (q_u dq_u - k_u dk_u)
 *
 * with e the sums of log2 decays from the chunk's start, E that of the chunk; no dg takes in what
 * an earlier token's do makes. They are taken from part to part of 16 tokens as in
 * additive_channel_chunk.cu, and inside a part as additive_channel_scale.cuh says. No chunk waits
 * for another: a block has 64 channels of one chunk of one head; four warps have queries, four
 * keys, each those of one part, and make what all rows have alike, scores and what is read from the
 * state, together by wgmma. */

enum {
    MN_GATED_GRAD_TILE = MN_GATED_GRAD_CHUNK * 128,      // bytes of a tile of 64 columns
    MN_GATED_GRAD_THREADS = 64 * MN_SUBCHUNKS,        // threads
    MN_GATED_TERMS_LD = MN_SCAN_WIDTH + 8,       // floats between rows of terms: no bank twice
};

/* What a block has of a call at a time: 64 channels of one chunk of one head. */
struct mn_gated_grad_work {
    mn_tile_span at;
    int64_t slot, h;
    int slice;
    unsigned index;    // of the call's pieces
    bool none;         // nothing is left
};

/* States as they were kept: eight rows of 64 channels by eight columns each. What is asked for
 * first of the next chunk lies in front of what terms take. */
template <int VP>
struct alignas(1024) mn_gated_grad_smem {
    unsigned char q[MN_GATED_GRAD_TILE], k[MN_GATED_GRAD_TILE], g[MN_GATED_GRAD_TILE];
    unsigned char S[VP * 128], N[VP * 128];
    unsigned char q_inside[MN_GATED_GRAD_TILE], k_inside[MN_GATED_GRAD_TILE];
    unsigned char cot[VP / 64 * MN_GATED_GRAD_TILE], v[VP / 64 * MN_GATED_GRAD_TILE];
    unsigned char more_terms[VP == 64 ? 4096 : 1024];
    alignas(16) float cum_decay[2][MN_SUBCHUNKS][MN_SCAN_WIDTH];    // as work, in turn
    alignas(16) float read[MN_SUBCHUNKS][MN_SCAN_WIDTH];    // N v_s k~_s of parts
    alignas(16) float met[MN_SCAN_WIDTH];               // S with N
    alignas(16) float sums[2 * MN_SUBCHUNKS][MN_SCAN_WIDTH];    // terms of halves of parts
    int wild[MN_SCAN_WIDTH];    // the last token whose q is not finite, -1: none
    bool has_wild;              // whether there is one in the chunk
    uint64_t front, back;                                   // what is made has come, the rest
    mn_gated_grad_work work[2];                             // in turn

    /* Of queries, or of keys, where tiles were that have been read. */
    __device__ float *terms(int of_keys) {
        static_assert(sizeof(q_inside) + sizeof(k_inside) + sizeof(cot) + sizeof(v) +
                              sizeof(more_terms) >=
                          2 * MN_GATED_GRAD_CHUNK * MN_GATED_TERMS_LD * sizeof(float),
                      "room for terms");
        return (float *)q_inside + of_keys * MN_GATED_GRAD_CHUNK * MN_GATED_TERMS_LD;
    }
};

#if MN_HAS_WGMMA
/* The first of a call's pieces of work from number `index` on, gridDim.x apart, that has tokens. */
__device__ inline void mn_gated_grad_find(mn_gated_grad_work &w, const mn_gated_grad_params &p,
                                          unsigned n_slices, unsigned index, unsigned count) {
    const unsigned heads = (unsigned)p.call.H, step = gridDim.x;
    for (; index < count; index += step) {    // both are below 2^31
        const unsigned head = index / n_slices;
        w.at = mn_tile_at(p.call, MN_GATED_GRAD_CHUNK, head / heads);
        if (w.at.n_rows == 0) continue;
        w.slice = (int)(index % n_slices), w.h = head % heads, w.slot = head / heads;
        break;
    }
    w.index = index, w.none = index >= count;
}

/* First threads of warps ask TMA for a tile each, as one that asked for all would be waited for:
 * for what is made, and for states; then for the rest. */
enum { MN_GATED_FRONT_TILES = 3, MN_GATED_STATE_TILES = 2 };

template <int VP>
__device__ inline void mn_gated_load_front(mn_gated_grad_smem<VP> &smem,
                                           const mn_gated_grad_params &p,
                                           const mn_gated_grad_work &w, int n_slices) {
    const int i = threadIdx.x / 32;
    if (threadIdx.x % 32 > 0 || i >= MN_GATED_FRONT_TILES + MN_GATED_STATE_TILES) return;
    const int t = (int)(w.at.span.t0 + w.at.first), b = (int)w.at.span.b, h = (int)w.h;
    if (i < MN_GATED_FRONT_TILES) {
        const CUtensorMap &map = i == 0 ? p.g : i == 1 ? p.q : p.k;
        unsigned char *to = i == 0 ? smem.g : i == 1 ? smem.q : smem.k;
        const int head = i == 0 ? h : (int)mn_key_head(p.call, h);
        mn_mbarrier_arrive_expect_tx(&smem.front, MN_GATED_GRAD_TILE);
        mn_tma_load(to, map, &smem.front, 64 * w.slice, head, t, b);
        return;
    }
    const int64_t state = ((w.slot * p.call.H + h) * n_slices + w.slice) * (VP * MN_SCAN_WIDTH);
    const bool is_S = i == MN_GATED_FRONT_TILES;
    mn_mbarrier_arrive_expect_tx(&smem.back, VP * 128);
    mn_tma_load_1d(is_S ? smem.S : smem.N, (is_S ? p.S : p.N) + state, VP * 128, &smem.back);
}

template <int VP>
__device__ inline void mn_gated_load_back(mn_gated_grad_smem<VP> &smem,
                                          const mn_gated_grad_params &p,
                                          const mn_gated_grad_work &w) {
    const int i = threadIdx.x / 32, tile = i / 2, at = tile * MN_GATED_GRAD_TILE;
    if (threadIdx.x % 32 > 0 || tile >= VP / 64) return;
    mn_mbarrier_arrive_expect_tx(&smem.back, MN_GATED_GRAD_TILE);
    mn_tma_load((i % 2 ? smem.v : smem.cot) + at, i % 2 ? p.v : p.cot, &smem.back, 64 * tile,
                (int)w.h, (int)(w.at.span.t0 + w.at.first), (int)w.at.span.b);
}

/* Where one of several packed sequences ends, tokens of the next become zeros: `tiles` of 64 rows.
 * All threads of the block call. */
__device__ inline void mn_gated_zero_tail_tiles(unsigned char *first, int tiles, int n_rows) {
    const int each = (MN_GATED_GRAD_CHUNK - n_rows) * 8;
    for (int i = threadIdx.x; i < tiles * each; i += blockDim.x) {
        *(uint4 *)(first + i / each * MN_GATED_GRAD_TILE + n_rows * 128 + i % each * 16) =
            make_uint4(0, 0, 0, 0);
    }
    mn_fence_proxy_async();
    __syncthreads();
}

/* ---- log decays ------------------------------------------------------------------------------ */

/* A part's 16 tokens by 64 channels: number i of eight channels n is of token
 * lane / 4 + i / 2 * 8, channel 8 n + lane % 4 * 2 + i % 2. */
typedef float mn_gated_acc_tile[8][4];

__device__ inline int mn_gated_subchunk(void) {
    return threadIdx.x / 32 % MN_SUBCHUNKS;
}

/* Sums of log decays inside a part of a channel that decays too far, at a token and eight later:
 * see  * additive_channel_scale.cuh. `g` is the channel at the part's first token. */
static __device__ __noinline__ float2 mn_gated_clamp_decay(const unsigned char *tile, int part,
                                                           int channel,
                                                   int token) {
    const float usual = 12.5f, most = 200.0f;
    const auto fall_at = [&](int u) {
        const unsigned char *at = tile + mn_gated_swizzle(16 * part + u, channel / 8);
        return -mn_scale_log2(mn_float(((const mn_bf16 *)at)[channel % 8]));
    };
    float gentle = 0.0f, depth = 0.0f, d[2] = {};
    int steep = 0;
    for (int u = 1; u < MN_SUBCHUNK; u++) {
        const float cum_decay = fall_at(u);
        if (cum_decay > usual) steep++;
        else gentle += cum_decay;
    }
    const float limit = steep ? fmaxf(usual, (most - gentle) / (float)steep) : most;
    for (int u = 1; u < MN_SUBCHUNK; u++) {
        const float step = fminf(fall_at(u), limit);
        depth += step;
        if (u <= token) d[0] -= step;
        if (u <= token + 8) d[1] -= step;
    }
    return make_float2(d[0] + 0.5f * depth, d[1] + 0.5f * depth);
}

/* Sums of log2 decays, and which channels decay too far. */
struct mn_gated_log_decays {
    mn_gated_acc_tile e;
    unsigned deep;    // bit 2 n + j
    bool any;         // in the warp

    __device__ void make(uint32_t g) {
        const mn_gated_cumsum_mma triangle;
        deep = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t b[4];
            mn_gated_ldmatrix<true>(b, g ^ k * 32);
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

    /* x <- the sums of log decays inside the part, of 16 channels from 16 k on; DEEP: where some of
     * the warp's channels decay too far. */
    template <bool DEEP>
    __device__ void inside(float (&x)[2][4], int k, const unsigned char *tile) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 8; i++) x[i / 4][i % 4] = e[2 * k + i / 4][i % 4];
#pragma unroll
        for (int i = 0; DEEP && i < 4; i++) {
            if (!(deep >> (4 * k + i) & 1)) continue;
            const float2 d = mn_gated_clamp_decay(tile, mn_gated_subchunk(),
                                          16 * k + i / 2 * 8 + lane % 4 * 2 + i % 2, lane / 4);
            x[i / 2][i % 2] = d.x, x[i / 2][2 + i % 2] = d.y;
        }
    }
};

/* A left operand times 2^log_decay, number by number. */
__device__ inline void mn_gated_mul_exp2(uint32_t (&y)[4], const uint32_t (&x)[4],
                                      const float (&log_decay)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float(&l)[4] = log_decay[i / 2];
        y[i] = mn_bf16x2_mul(x[i], mn_exp2(l[i % 2 * 2]), mn_exp2(l[i % 2 * 2 + 1]));
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* Where this lane points in 16 rows and 16 columns of a tile: matrices down the rows first. */
__device__ inline uint32_t mn_gated_addr_rows(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + mn_gated_swizzle(row + lane % 16, lane / 16);
}

/* A kept state as an operand of products, its rows the depth: matrices of eight rows, 128 bytes
 * each, eight side by side. */
__device__ inline uint64_t mn_gated_state_desc(uint32_t address) {
    return (address & 0x3ffffu) >> 4 | (uint64_t)(1024 / 16) << 16 | (uint64_t)(128 / 16) << 32;
}

/* o (64,64) += a b or, with rows of a tile as b's columns, a b', 16 deep. Four warps call; each has
 * the 16 rows of its part. */
template <bool ROWS>
__device__ inline void mn_gated_wgmma(mn_gated_acc_tile &y, uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, 1, 1, 1, 0, %34;"
                 : MN_GATED_ACC8(0), MN_GATED_ACC8(2), MN_GATED_ACC8(4), MN_GATED_ACC8(6)
                 : "l"(a), "l"(b), "n"(ROWS ? 0 : 1)
                 : "memory");
}

/* Zeros in their registers: moved there later, products would wait for each other. */
__device__ inline void mn_gated_clear(mn_gated_acc_tile &x) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
        x[i / 4][i % 4] = 0.0f;
        asm volatile("" : "+f"(x[i / 4][i % 4]));
    }
}

/* o = x M for a kept state M and the rows of a tile x; four warps call. */
template <int VP>
__device__ inline void mn_gated_mma_state(mn_gated_acc_tile &o, uint32_t x, uint32_t M) {
    const uint64_t rows = mn_gated_smem_desc(x), state = mn_gated_state_desc(M);
    mn_gated_clear(o);
    mn_gated_wgmma_fence();
#pragma unroll
    for (int k = 0; k < VP / 16; k++) {
        mn_gated_wgmma<false>(o, rows + (k / 4 * MN_GATED_GRAD_TILE + k % 4 * 32) / 16,
                              state + k * 2048 / 16);
    }
    mn_gated_wgmma_commit();
    mn_gated_wgmma_wait<0>();
}

/* Scores of this warp's 16 rows, with those of each part as a left operand. */
struct mn_gated_part_scores {
    uint32_t of[MN_SUBCHUNKS][4];

    /* Those of rows of x with rows of y. Four warps call. */
    template <int VP>
    __device__ void make(uint32_t x, uint32_t y) {
        const uint64_t rows = mn_gated_smem_desc(x), columns = mn_gated_smem_desc(y);
        mn_gated_acc_tile P;
        mn_gated_clear(P);
        mn_gated_wgmma_fence();
#pragma unroll
        for (int k = 0; k < VP / 16; k++) {
            const int at = (k / 4 * MN_GATED_GRAD_TILE + k % 4 * 32) / 16;
            mn_gated_wgmma<true>(P, rows + at, columns + at);
        }
        mn_gated_wgmma_commit();
        mn_gated_wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < MN_SUBCHUNKS; i++) mn_frag_a_of(of[i], P[2 * i], P[2 * i + 1]);
    }

    /* Of the part's own tokens, zeros where the column is later than the row, or `earlier`. */
    __device__ void own(uint32_t (&a)[4], bool earlier) const {
        const int lane = threadIdx.x % 32, part = mn_gated_subchunk();
        const int row = lane / 4, column = lane % 4 * 2;
        const bool low_seen = earlier ? column >= row : column <= row;
        const bool high_seen = earlier ? column + 1 >= row : column + 1 <= row;
        const uint32_t seen = (low_seen ? 0xffffu : 0u) | (high_seen ? 0xffff0000u : 0u);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t low = part % 2 ? of[1][i] : of[0][i];
            const uint32_t high = part % 2 ? of[3][i] : of[2][i];
            a[i] = part / 2 ? high : low;
        }
        a[0] &= seen, a[3] &= seen;    // on the diagonal
        a[1] = earlier ? 0 : a[1], a[2] = earlier ? a[2] : 0;
    }
};

/* o += P x for the 16 rows of a part of a tile */
__device__ inline void mn_gated_mma_add(mn_gated_acc_tile &o, const uint32_t (&P)[4],
                                        uint32_t tile, int part) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        mn_gated_ldmatrix<true>(b, mn_gated_addr_rows(tile, 16 * part) ^ n * 16);
        mn_mma(o[n], P, b[0], b[1]);
        mn_mma(o[n + 1], P, b[2], b[3]);
    }
}

/* The same for the part's own rows, where P has a triangle: numbers that are not finite reach the
 * rows that see them alone. */
__device__ inline void mn_gated_mma_add_causal(mn_gated_acc_tile &o, const uint32_t (&P)[4],
                                               uint32_t tile, int part) {
    const uint32_t at = mn_gated_addr_rows(tile, 16 * part);
    mn_mma_causal_by(o, P, [&](uint32_t (&b)[4], int n) {
        mn_gated_ldmatrix<true>(b, at ^ n * 16);
    });
}

__device__ inline void mn_gated_decay_subchunk(mn_gated_acc_tile &o, const float *cum_decay) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 f = *(const float2 *)(cum_decay + 8 * n + threadIdx.x % 4 * 2);
        o[n][0] *= f.x, o[n][1] *= f.y, o[n][2] *= f.x, o[n][3] *= f.y;
    }
}

/* Whether q of the chunk has numbers that are not finite: has_wild, which all threads see behind
 * the next barrier. They become zeros, and `wild` tells the last token of each channel that had
 * one: what they make of dk and dg, up to there, is NaN. All threads of the block call. */
template <int VP>
__device__ inline void mn_gated_take_wild(mn_gated_grad_smem<VP> &smem) {
    bool found = false;
#pragma unroll
    for (int i = threadIdx.x; i < MN_GATED_GRAD_TILE / 16; i += MN_GATED_GRAD_THREADS) {
        const uint4 x = ((const uint4 *)smem.q)[i];
        found |= mn_bf16x2_wild(x.x) || mn_bf16x2_wild(x.y) || mn_bf16x2_wild(x.z) ||
                 mn_bf16x2_wild(x.w);
    }
    const bool any = __syncthreads_or(found);
    if (threadIdx.x == 0) smem.has_wild = any;
    if (!any) return;
    if (threadIdx.x < MN_SCAN_WIDTH) {
        int last = -1;
        for (int row = 0; row < MN_GATED_GRAD_CHUNK; row++) {
            mn_bf16 *at = (mn_bf16 *)(smem.q + mn_gated_swizzle(row, threadIdx.x / 8)) +
                          threadIdx.x % 8;
            if (isfinite(mn_float(*at))) continue;
            mn_put(at, 0.0f);
            last = row;
        }
        smem.wild[threadIdx.x] = last;
    }
    __syncthreads();
}

/* NaN where a later token of the channel had a q that is not finite, or the row's own. */
__device__ inline void mn_gated_give_wild(mn_gated_acc_tile &o, const int *wild) {
    const int lane = threadIdx.x % 32, part = mn_gated_subchunk();
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int row = 16 * part + lane / 4 + i % 4 / 2 * 8;
        if (row <= wild[i / 4 * 8 + lane % 4 * 2 + i % 2]) o[i / 4][i % 4] = nanf("");
    }
}

/* Rows of a part to memory. */
__device__ inline void mn_gated_store_subchunk(const mn_gated_acc_tile &o, const mn_out &view,
                                           const mn_tile_span &at, int64_t h, int slice,
                                           int64_t K) {
    const int lane = threadIdx.x % 32, row = 16 * mn_gated_subchunk() + lane / 4;
    const mn_col_tile<mn_bf16> to =
        mn_col_tile_of<mn_bf16>(view, at.span, h, 64 * slice, K, MN_SCAN_WIDTH);
    uint32_t pair[4][4];    // a lane's eight columns, of row i / 2 from 32 (i % 2) on
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int n = i % 8, half = i / 8;
        pair[i / 4][i % 4] = mn_bf16x2(o[n][2 * half], o[n][2 * half + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) mn_quad_transpose(pair[i]);
    mn_bf16 *const first = to.at + (at.first + row) * to.step + lane % 4 * 8;
    const int left = to.at ? (int)at.n_rows - row : 0, width = to.width - lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool inside = i / 2 * 8 < left && i % 2 * 32 < width;    // by eight: K is of these
        uint4 *at_row = (uint4 *)(first + i / 2 * 8 * to.step + i % 2 * 32);
        const uint4 pack = make_uint4(pair[i][0], pair[i][1], pair[i][2], pair[i][3]);
        if (inside && to.packs) *at_row = pack;
    }
    if (__builtin_expect(to.packs || !to.at, 1)) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i / 2 * 8 >= left || i % 2 * 32 >= width) continue;
        mn_store_scalar(first + i / 2 * 8 * to.step + i % 2 * 32, pair[i][0], pair[i][1],
                        pair[i][2], pair[i][3], 8);
    }
}

/* ---- a block --------------------------------------------------------------------------------- */

/* Adds up with the lane that is LANE away, each of both one half of 2 STEP numbers. */
template <int STEP, int LANE>
__device__ inline void mn_gated_halve(float (&x)[16]) {
    const bool upper = threadIdx.x & LANE;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        const float low = x[i], high = x[i + STEP];
        x[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, LANE);
    }
}

/* What the state adds to dg: sums over this part's rows of k~ and what they read from N, which the
 * parts behind have still to lower. */
__device__ inline void mn_gated_sum_state_terms(float (*sums)[MN_SCAN_WIDTH],
                                                const mn_gated_acc_tile &o, uint32_t keys) {
    const int lane = threadIdx.x % 32, part = mn_gated_subchunk();
    float sum[16];    // numbers 2 i and 2 i + 1 are of channels 8 i + lane % 4 * 2 and the next
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4];
        mn_gated_ldmatrix<false>(x, mn_gated_addr_rows(keys, 16 * part) ^ k * 32);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float(&y)[4] = o[2 * k + n];
            float *to = &sum[4 * k + 2 * n];
            to[0] = fmaf(y[0], mn_bf16_lo(x[2 * n]), y[2] * mn_bf16_lo(x[2 * n + 1]));
            to[1] = fmaf(y[1], mn_bf16_hi(x[2 * n]), y[3] * mn_bf16_hi(x[2 * n + 1]));
        }
    }
    mn_gated_halve<8, 4>(sum);
    mn_gated_halve<4, 8>(sum);
    mn_gated_halve<2, 16>(sum);
    const int i = (lane & 4) + (lane & 8) / 4 + lane / 16;
    *(float2 *)&sums[part][8 * i + lane % 4 * 2] = make_float2(sum[0], sum[1]);
}

/* Sums of products of S and N for eight channels; a warp calls. */
template <int VP>
__device__ inline void mn_gated_dot_states(float *sums, const unsigned char *S,
                                        const unsigned char *N, int channels) {
    const int lane = threadIdx.x % 32;
    float2 sum = {};
#pragma unroll
    for (int rows = 0; rows < VP / 8; rows++) {
        const int at = (rows * 8 + channels) * 128 + lane * 4;
        const uint32_t x = *(const uint32_t *)(S + at), y = *(const uint32_t *)(N + at);
        sum.x = fmaf(mn_bf16_lo(x), mn_bf16_lo(y), sum.x),
            sum.y = fmaf(mn_bf16_hi(x), mn_bf16_hi(y), sum.y);
    }
#pragma unroll
    for (int by = 4; by < 32; by <<= 1) {
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, by);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, by);
    }
    if (lane < 4) *(float2 *)(sums + 8 * channels + lane * 2) = sum;
}

/* o <- scale (o 2^e + inside 2^l), where l and e differ if channels decay too far; dk has -l, and
 * E - e for e. Terms are -q dq or k dk, with the rounded rows that products had, at `far` and at
 * `near`, so that what one token reads from another is the same number in both. */
template <bool DEEP>
__device__ inline void
mn_gated_grad_epilogue_of(mn_gated_acc_tile &o, const mn_gated_acc_tile &inside,
                          mn_gated_acc_tile &terms, const mn_gated_log_decays &log_decays,
                          uint32_t far, uint32_t near, const unsigned char *g, bool of_keys,
                          float scale) {
    const float sign = of_keys ? -1.0f : 1.0f, term_scale = of_keys ? scale : -scale;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4], y[4];
        float l[2][4], end[4], up[8], up_inside[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float sum = log_decays.end(2 * k + i / 2, i % 2);
            end[i] = of_keys ? sum : 0.0f;
        }
        log_decays.inside<DEEP>(l, k, g);
        mn_gated_ldmatrix<false>(x, far ^ k * 32);
        mn_gated_ldmatrix<false>(y, near ^ k * 32);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            up[i] = mn_exp2(fmaf(sign, log_decays.e[2 * k + i / 4][i % 4], end[i / 4 * 2 + i % 2]));
            up_inside[i] = up[i];    // of queries the same, unless channels decay too far
        }
        if (DEEP || of_keys) {
#pragma unroll
            for (int i = 0; i < 8; i++) up_inside[i] = mn_exp2(sign * l[i / 4][i % 4]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int n = 2 * k + i / 4, c = i % 4;
            const float wide = c % 2 ? mn_bf16_hi(x[i / 2]) : mn_bf16_lo(x[i / 2]);
            const float close = c % 2 ? mn_bf16_hi(y[i / 2]) : mn_bf16_lo(y[i / 2]);
            terms[n][c] = term_scale * fmaf(o[n][c], wide, inside[n][c] * close);
            o[n][c] = scale * fmaf(inside[n][c], up_inside[i], o[n][c] * up[i]);
        }
    }
}

__device__ inline void mn_gated_grad_epilogue(mn_gated_acc_tile &o, const mn_gated_acc_tile &inside,
                                              mn_gated_acc_tile &terms,
                                              const mn_gated_log_decays &log_decays, uint32_t far,
                                              uint32_t near, const unsigned char *g, bool of_keys,
                                              float scale) {
    if (__builtin_expect(log_decays.any, 0)) {
        mn_gated_grad_epilogue_of<true>(o, inside, terms, log_decays, far, near, g, of_keys, scale);
    } else {
        mn_gated_grad_epilogue_of<false>(o, inside, terms, log_decays, far, near, g, of_keys,
                                         scale);
    }
}

/* dq of this warp's part, or dk, and its terms. Both are the same instructions, as those of a piece
 * are more than a processor has at hand. */
template <int VP>
__device__ inline void mn_gated_grad_rows(mn_gated_grad_smem<VP> &smem, mn_gated_acc_tile &terms,
                                          const mn_gated_log_decays &log_decays,
                                          const mn_gated_grad_params &p, const mn_tile_span &at,
                                          int64_t h, int slice, int phase, bool of_keys) {
    const int part = mn_gated_subchunk(), ahead = of_keys ? MN_SUBCHUNKS - 1 - part : part;
    const uint32_t cot = mn_smem_addr(smem.cot), v = mn_smem_addr(smem.v);
    const uint32_t q = mn_smem_addr(smem.q), k = mn_smem_addr(smem.k);
    const uint32_t q_inside = mn_smem_addr(smem.q_inside), k_inside = mn_smem_addr(smem.k_inside);
    const uint32_t x = of_keys ? v : cot, state = mn_smem_addr(of_keys ? smem.N : smem.S);
    const uint32_t far = mn_gated_addr_rows(of_keys ? k : q, 16 * part);
    const uint32_t near = mn_gated_addr_rows(of_keys ? k_inside : q_inside, 16 * part);
    mn_gated_acc_tile o, inside = {};
    mn_gated_part_scores P;
    uint32_t own[4];
    P.make<VP>(x, of_keys ? cot : v);
    mn_gated_mma_state<VP>(o, x, state);
    if (of_keys) mn_gated_sum_state_terms(smem.read, o, k);
#pragma unroll
    for (int i = 0; i < MN_SUBCHUNKS - 1; i++) {    // parts in front, or behind from the last on
        const int from = of_keys ? MN_SUBCHUNKS - 1 - i : i;
        uint32_t a[4];
        if (i >= ahead) continue;
#pragma unroll
        for (int n = 0; n < 4; n++) a[n] = of_keys ? P.of[MN_SUBCHUNKS - 1 - i][n] : P.of[i][n];
        mn_gated_decay_subchunk(o, smem.cum_decay[phase][from]);
        mn_gated_mma_add(o, a, of_keys ? q : k, from);
    }
    P.own(own, of_keys);
    mn_gated_mma_add(inside, own, of_keys ? q_inside : k_inside, part);
    mn_gated_grad_epilogue(o, inside, terms, log_decays, far, near, smem.g, of_keys, p.scale);
    if (of_keys && p.contain && smem.has_wild) mn_gated_give_wild(o, smem.wild);
    mn_gated_store_subchunk(o, of_keys ? p.dk : p.dq, at, h, slice, p.call.K);
}

/* dg: sums of terms over tokens; a warp has eight. All threads of the block call. `next`: what the
 * block has then, whose tiles are asked for as soon as others have been read. */
template <int VP>
__device__ inline void mn_gated_grad_decays(mn_gated_grad_smem<VP> &smem,
                                              const mn_gated_acc_tile &terms, int of_keys,
                                              const mn_gated_grad_params &p, const mn_tile_span &at,
                                              int64_t h, int slice, int phase,
                                              const mn_gated_grad_work &next, int n_slices) {
    constexpr int each = MN_SUBCHUNK / 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = 2 * lane;
    const int64_t channel = 64 * slice + j;
    float *rows = smem.terms(of_keys) + mn_gated_subchunk() * MN_SUBCHUNK * MN_GATED_TERMS_LD;
    mn_fence_proxy_async();
    __syncthreads();
    if (!next.none) mn_gated_load_front<VP>(smem, p, next, n_slices);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = lane / 4 + i % 2 * 8, n = i / 2;
        *(float2 *)(rows + row * MN_GATED_TERMS_LD + 8 * n + lane % 4 * 2) =
            make_float2(terms[n][i % 2 * 2], terms[n][i % 2 * 2 + 1]);
    }
    __syncthreads();
    float2 term[each], sum = {};
#pragma unroll
    for (int u = 0; u < each; u++) {
        const int i = (warp * each + u) * MN_GATED_TERMS_LD + j;
        const float2 x = *(const float2 *)(smem.terms(0) + i);
        const float2 y = *(const float2 *)(smem.terms(1) + i);
        term[u] = make_float2(x.x + y.x, x.y + y.y);
        sum.x += term[u].x, sum.y += term[u].y;
    }
    *(float2 *)&smem.sums[warp][j] = sum;
    mn_fence_proxy_async();
    __syncthreads();
    if (!next.none) mn_gated_load_back<VP>(smem, p, next);
    const float2 met = *(const float2 *)&smem.met[j];
    float2 read = {}, behind = {}, cum_decay = { 1.0f, 1.0f };
#pragma unroll
    for (int i = 2 * MN_SUBCHUNKS - 1; i > 0; i--) {
        const float2 z = *(const float2 *)&smem.sums[i][j];
        if (i > warp) behind.x += z.x, behind.y += z.y;
    }
#pragma unroll
    for (int i = MN_SUBCHUNKS - 1; i >= 0; i--) {
        const float2 x = *(const float2 *)&smem.read[i][j];
        const float2 f = *(const float2 *)&smem.cum_decay[phase][i][j];
        read.x = fmaf(cum_decay.x, x.x, read.x), read.y = fmaf(cum_decay.y, x.y, read.y);
        cum_decay.x *= f.x, cum_decay.y *= f.y;
    }
    sum.x = fmaf(p.scale, fmaf(cum_decay.x, met.x, read.x), -behind.x);
    sum.y = fmaf(p.scale, fmaf(cum_decay.y, met.y, read.y), -behind.y);
    const int row0 = warp * each, left = (int)at.n_rows - row0;
    mn_bf16 *to = mn_row<mn_bf16>(p.dg, at.span.b, at.span.t0 + at.first + row0, h) + channel;
    const bool wild = p.contain && smem.has_wild;
    if (channel >= p.call.K) return;
    to += each * p.dg.stride[1];
#pragma unroll
    for (int u = each - 1; u >= 0; u--) {
        sum.x -= term[u].x, sum.y -= term[u].y, to -= p.dg.stride[1];
        float2 out = sum;
        if (wild && row0 + u <= smem.wild[j]) out.x = nanf("");
        if (wild && row0 + u <= smem.wild[j + 1]) out.y = nanf("");
        if (u < left) *(uint32_t *)to = mn_bf16x2(out.x, out.y);
    }
}

/* Keys of a part for what its own tokens read, k 2^(-l). Where channels decay too far these are the
 * keys up to which they have not yet, with l = e, or FAR the others, with l of log_decays.inside;
 * zeros in the place of the rest. So no token's bits depend on later decays. */
template <bool FAR>
__device__ inline void mn_gated_scale_near(uint32_t (&y)[4], const uint32_t (&x)[4],
                                           const mn_gated_log_decays &log_decays, int k,
                                           const unsigned char *g) {
    float l[2][4];
    if (FAR) log_decays.inside<true>(l, k, g);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float e = log_decays.e[2 * k + i / 4][i % 4];
        const bool far = e < -100.0f;
        l[i / 4][i % 4] = far != FAR ? -INFINITY : FAR ? -l[i / 4][i % 4] : -e;
    }
    mn_gated_mul_exp2(y, x, l);
}

/* This warp's part of queries or of keys, made, as two tiles: `far` in their place. */
template <bool DEEP>
__device__ inline void mn_gated_scale_subchunk_of(uint32_t far, uint32_t near,
                                                  const mn_gated_log_decays &log_decays,
                                                  const unsigned char *g, bool of_keys) {
    const float sign = of_keys ? -1.0f : 1.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4], y[4], z[4];
        float to_far[2][4], to_near[2][4], end[4];
        mn_gated_ldmatrix<false>(x, far ^ k * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float sum = log_decays.end(2 * k + i / 2, i % 2);
            end[i] = of_keys ? sum : 0.0f;
        }
        log_decays.inside<DEEP>(to_near, k, g);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float e = log_decays.e[2 * k + i / 4][i % 4];
            to_far[i / 4][i % 4] = fmaf(sign, e, end[i / 4 * 2 + i % 2]);
            to_near[i / 4][i % 4] *= sign;
        }
        mn_gated_mul_exp2(y, x, to_far);
#pragma unroll
        for (int i = 0; i < 4; i++) z[i] = y[i];    // of queries the same
        if (DEEP || of_keys) mn_gated_mul_exp2(z, x, to_near);
        mn_gated_stmatrix(far ^ k * 32, y);
        mn_gated_stmatrix(near ^ k * 32, z);
    }
}

__device__ inline void mn_gated_scale_subchunk(unsigned char *far, unsigned char *near,
                                               const mn_gated_log_decays &log_decays,
                                               const unsigned char *g, bool of_keys) {
    const int row = 16 * mn_gated_subchunk();
    const uint32_t at = mn_gated_addr_rows(mn_smem_addr(far), row);
    const uint32_t near_at = mn_gated_addr_rows(mn_smem_addr(near), row);
    if (__builtin_expect(log_decays.any, 0)) {
        mn_gated_scale_subchunk_of<true>(at, near_at, log_decays, g, of_keys);
    } else {
        mn_gated_scale_subchunk_of<false>(at, near_at, log_decays, g, of_keys);
    }
}

/* All gradients of a piece of work whose tiles have been asked for; the first thread finds the
 * next one. No barrier is at the end: some warps go on while others take sums of this piece. What
 * these read is written again behind the next piece's first barrier, but for cum_decay. */
template <int VP>
__device__ inline void mn_gated_grad_piece(mn_gated_grad_smem<VP> &smem,
                                           const mn_gated_grad_params &p, int phase,
                                           unsigned n_slices, unsigned count) {
    const mn_gated_grad_work &w = smem.work[phase];
    const int part = mn_gated_subchunk(), lane = threadIdx.x % 32;
    const bool of_keys = threadIdx.x >= MN_GATED_GRAD_THREADS / 2;
    const mn_tile_span &at = w.at;
    const bool ends = p.call.cu_seqlens && at.n_rows < MN_GATED_GRAD_CHUNK;
    mn_mbarrier_wait(&smem.front, phase);
    if (ends) mn_gated_zero_tail_tiles(smem.q, 3, (int)at.n_rows);
    if (p.contain) mn_gated_take_wild(smem);
    mn_gated_log_decays log_decays;
    mn_gated_acc_tile terms;
    log_decays.make(mn_gated_addr_rows(mn_smem_addr(smem.g), 16 * part));
    mn_gated_scale_subchunk(of_keys ? smem.k : smem.q, of_keys ? smem.k_inside : smem.q_inside,
                            log_decays, smem.g, of_keys);
    if (!of_keys) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 cum_decay = make_float2(mn_exp2(log_decays.end(n, 0)),
                                                 mn_exp2(log_decays.end(n, 1)));
            if (lane < 4) *(float2 *)&smem.cum_decay[phase][part][8 * n + 2 * lane] = cum_decay;
        }
    }
    mn_mbarrier_wait(&smem.back, phase);
    if (ends) mn_gated_zero_tail_tiles(smem.cot, 2 * (VP / 64), (int)at.n_rows);
    __syncthreads();
    if (threadIdx.x == 0) {
        mn_gated_grad_find(smem.work[phase ^ 1], p, n_slices, w.index + gridDim.x, count);
    }
    mn_gated_grad_rows<VP>(smem, terms, log_decays, p, at, w.h, w.slice, phase, of_keys);
    if ((part >= MN_SUBCHUNKS / 2) == of_keys) {    // warps that see few other parts
#pragma unroll 1
        for (int channels = part; channels < 8; channels += MN_SUBCHUNKS) {
            mn_gated_dot_states<VP>(smem.met, smem.S, smem.N, channels);
        }
    }
    mn_gated_grad_decays<VP>(smem, terms, of_keys, p, at, w.h, w.slice, phase,
                             smem.work[phase ^ 1], (int)n_slices);
}

#endif

/* Two blocks a processor, which stay and take each gridDim.x-th piece of `count`: tiles of the next
 * one come while terms of this one are added up. */
template <int VP>
__global__ void __launch_bounds__(MN_GATED_GRAD_THREADS, 2)
additive_gated_grad_sm90(const __grid_constant__ mn_gated_grad_params p, unsigned n_slices,
                         unsigned count) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char grad_smem_bytes[];
    mn_gated_grad_smem<VP> &smem = *(mn_gated_grad_smem<VP> *)grad_smem_bytes;
    if (threadIdx.x == 0) {
        mn_mbarrier_init(&smem.front, MN_GATED_FRONT_TILES);
        mn_mbarrier_init(&smem.back, MN_GATED_STATE_TILES + 2 * (VP / 64));
        mn_mbarrier_init_fence();
        mn_gated_grad_find(smem.work[0], p, n_slices, blockIdx.x, count);
    }
    __syncthreads();
    if (!smem.work[0].none) {
        mn_gated_load_front<VP>(smem, p, smem.work[0], (int)n_slices);
        mn_gated_load_back<VP>(smem, p, smem.work[0]);
    }
#pragma unroll 1
    for (int phase = 0; !smem.work[phase].none; phase ^= 1) {
        mn_gated_grad_piece<VP>(smem, p, phase, n_slices, count);
    }
#endif
}

template <int VP>
inline int mn_gated_grad_launch(const mn_gated_grad_params &job, cudaStream_t stream) {
    const int64_t slices = mn_ceil_div(job.call.K, 64);
    const int64_t count = mn_tile_slots(job.call, MN_GATED_GRAD_CHUNK) * job.call.H * slices;
    if (count == 0) return cudaSuccess;
    if (count > INT32_MAX) return cudaErrorNotSupported;
    const int64_t room = 2 * (int64_t)mn_device_props_current().processors;
    return mn_launch_smem(additive_gated_grad_sm90<VP>, dim3((unsigned)mn_min(count, room)),
                          MN_GATED_GRAD_THREADS, sizeof(mn_gated_grad_smem<VP>), stream, job,
                          (unsigned)slices, (unsigned)count);
}

/* ---- dq alone -------------------------------------------------------------------------------- */
template <int VP>
struct alignas(1024) mn_gated_query_smem {    // as mn_gated_grad_smem
    unsigned char cot[VP / 64 * MN_GATED_GRAD_TILE], v[VP / 64 * MN_GATED_GRAD_TILE];
    unsigned char k[MN_GATED_GRAD_TILE], g[MN_GATED_GRAD_TILE], k_inside[MN_GATED_GRAD_TILE];
    unsigned char S[VP * 128];
    alignas(16) float cum_decay[MN_SUBCHUNKS][MN_SCAN_WIDTH];
    uint64_t front, back;
};

enum { MN_GATED_QUERY_THREADS = 32 * MN_SUBCHUNKS };

#if MN_HAS_WGMMA
template <int VP>
__device__ inline void mn_gated_query_load(mn_gated_query_smem<VP> &smem,
                                           const mn_gated_grad_params &p, const mn_tile_span &at,
                                           int64_t slot, int h, int slice, int n_slices) {
    const int t = (int)(at.span.t0 + at.first), b = (int)at.span.b;
    const int key = (int)mn_key_head(p.call, h);
    const int64_t state = ((slot * p.call.H + h) * n_slices + slice) * (VP * MN_SCAN_WIDTH);
    mn_mbarrier_arrive_expect_tx(&smem.front, 2 * MN_GATED_GRAD_TILE);
    mn_tma_load(smem.g, p.g, &smem.front, 64 * slice, h, t, b);
    mn_tma_load(smem.k, p.k, &smem.front, 64 * slice, key, t, b);
    mn_mbarrier_arrive_expect_tx(&smem.back, 2 * (VP / 64) * MN_GATED_GRAD_TILE + VP * 128);
    mn_tma_load_1d(smem.S, p.S + state, VP * 128, &smem.back);
    for (int tile = 0; tile < VP / 64; tile++) {
        const int at_tile = tile * MN_GATED_GRAD_TILE;
        mn_tma_load(smem.cot + at_tile, p.cot, &smem.back, 64 * tile, h, t, b);
        mn_tma_load(smem.v + at_tile, p.v, &smem.back, 64 * tile, h, t, b);
    }
}

/* Keys of this warp's part lowered to its end, in place, and for what its own tokens read; `far` is
 * made where channels decay too far. */
template <int VP>
__device__ inline void mn_gated_query_keys(mn_gated_query_smem<VP> &smem, uint32_t (&far)[4][4],
                                           const mn_gated_log_decays &log_decays) {
    const int row = 16 * mn_gated_subchunk();
    const uint32_t at = mn_gated_addr_rows(mn_smem_addr(smem.k), row);
    const uint32_t near = mn_gated_addr_rows(mn_smem_addr(smem.k_inside), row);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4], y[4];
        float to_end[2][4], end[4];
        mn_gated_ldmatrix<false>(x, at ^ k * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) end[i] = log_decays.end(2 * k + i / 2, i % 2);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            to_end[i / 4][i % 4] = end[i / 4 * 2 + i % 2] - log_decays.e[2 * k + i / 4][i % 4];
        }
        mn_gated_mul_exp2(y, x, to_end);
        mn_gated_stmatrix(at ^ k * 32, y);
        mn_gated_scale_near<false>(y, x, log_decays, k, smem.g);
        mn_gated_stmatrix(near ^ k * 32, y);
        if (log_decays.any) mn_gated_scale_near<true>(far[k], x, log_decays, k, smem.g);
    }
}

/* What the part's own tokens read of keys that are too far from its start. */
template <int VP>
__device__ inline void mn_gated_query_far(mn_gated_acc_tile &o, mn_gated_query_smem<VP> &smem,
                                          const uint32_t (&far)[4][4], const uint32_t (&P)[4],
                                          const mn_gated_log_decays &log_decays) {
    const uint32_t tile = mn_smem_addr(smem.k_inside);
    const uint32_t at = mn_gated_addr_rows(tile, 16 * mn_gated_subchunk());
    mn_gated_acc_tile sums = {};
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++) mn_gated_stmatrix(at ^ k * 32, far[k]);
    __syncwarp();
    mn_gated_mma_add_causal(sums, P, tile, mn_gated_subchunk());
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float l[2][4];
        log_decays.inside<true>(l, k, smem.g);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            o[2 * k + i / 4][i % 4] += sums[2 * k + i / 4][i % 4] * mn_exp2(l[i / 4][i % 4]);
        }
    }
}

/* dq of this warp's part as mn_gated_grad_queries has it, without its terms. */
template <int VP>
__device__ inline void mn_gated_query_part(mn_gated_query_smem<VP> &smem,
                                           const uint32_t (&far)[4][4],
                                           const mn_gated_log_decays &log_decays,
                                           const mn_gated_grad_params &p, const mn_tile_span &at,
                                           int64_t h, int slice) {
    const int part = mn_gated_subchunk();
    const uint32_t x = mn_smem_addr(smem.cot), y = mn_smem_addr(smem.v);
    mn_gated_acc_tile o, inside = {};
    mn_gated_part_scores P;
    uint32_t own[4];
    P.make<VP>(x, y);
    mn_gated_mma_state<VP>(o, x, mn_smem_addr(smem.S));
#pragma unroll
    for (int from = 0; from < MN_SUBCHUNKS - 1; from++) {
        if (from >= part) continue;
        mn_gated_decay_subchunk(o, smem.cum_decay[from]);
        mn_gated_mma_add(o, P.of[from], mn_smem_addr(smem.k), from);
    }
    P.own(own, false);
    mn_gated_mma_add_causal(inside, own, mn_smem_addr(smem.k_inside), part);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const float up = mn_exp2(log_decays.e[i / 4][i % 4]);
        o[i / 4][i % 4] = fmaf(inside[i / 4][i % 4], up, o[i / 4][i % 4] * up);
    }
    if (log_decays.any) mn_gated_query_far(o, smem, far, own, log_decays);
#pragma unroll
    for (int i = 0; i < 32; i++) o[i / 4][i % 4] *= p.scale;
    mn_gated_store_subchunk(o, p.dq, at, h, slice, p.call.K);
}

#endif
/* A block has 64 channels of a chunk of a head, a warp a part of its tokens. */
template <int VP>
__global__ void __launch_bounds__(MN_GATED_QUERY_THREADS)
additive_gated_query_sm90(const __grid_constant__ mn_gated_grad_params p, unsigned n_slices) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char query_smem_bytes[];
    mn_gated_query_smem<VP> &smem = *(mn_gated_query_smem<VP> *)query_smem_bytes;
    const int slice = (int)(blockIdx.x % n_slices);
    const int part = mn_gated_subchunk(), lane = threadIdx.x % 32;
    const unsigned heads = (unsigned)p.call.H, index = blockIdx.x / n_slices;
    const int64_t h = index % heads, slot = index / heads;
    const mn_tile_span at = mn_tile_at(p.call, MN_GATED_GRAD_CHUNK, slot);
    if (at.n_rows == 0) return;
    const bool ends = p.call.cu_seqlens && at.n_rows < MN_GATED_GRAD_CHUNK;
    if (threadIdx.x == 0) {
        mn_mbarrier_init(&smem.front, 1);
        mn_mbarrier_init(&smem.back, 1);
        mn_mbarrier_init_fence();
        mn_gated_query_load<VP>(smem, p, at, slot, (int)h, slice, (int)n_slices);
    }
    __syncthreads();
    mn_mbarrier_wait(&smem.front, 0);
    if (ends) mn_gated_zero_tail_tiles(smem.k, 2, (int)at.n_rows);
    mn_gated_log_decays log_decays;
    log_decays.make(mn_gated_addr_rows(mn_smem_addr(smem.g), 16 * part));
    uint32_t far[4][4] = {};
    mn_gated_query_keys(smem, far, log_decays);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float low = mn_exp2(log_decays.end(n, 0)), high = mn_exp2(log_decays.end(n, 1));
        if (lane < 4) *(float2 *)&smem.cum_decay[part][8 * n + 2 * lane] = make_float2(low, high);
    }
    mn_mbarrier_wait(&smem.back, 0);
    if (ends) mn_gated_zero_tail_tiles(smem.cot, 2 * (VP / 64), (int)at.n_rows);
    __syncthreads();
    mn_gated_query_part<VP>(smem, far, log_decays, p, at, h, slice);
#endif
}

template <int VP>
inline int mn_gated_query_launch(const mn_gated_grad_params &job, cudaStream_t stream) {
    const int64_t slices = mn_ceil_div(job.call.K, 64);
    const int64_t blocks = mn_tile_slots(job.call, MN_GATED_GRAD_CHUNK) * job.call.H * slices;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(additive_gated_query_sm90<VP>, dim3((unsigned)blocks),
                          MN_GATED_QUERY_THREADS, sizeof(mn_gated_query_smem<VP>), stream, job,
                          (unsigned)slices);
}

int mn_additive_gated_grads(const mn_gated_grad_params &job, cudaStream_t stream) {
    return job.call.V <= 64 ? mn_gated_grad_launch<64>(job, stream)
                            : mn_gated_grad_launch<128>(job, stream);
}

int mn_additive_gated_queries(const mn_gated_grad_params &job, cudaStream_t stream) {
    return job.call.V <= 64 ? mn_gated_query_launch<64>(job, stream)
                            : mn_gated_query_launch<128>(job, stream);
}

}    // namespace mneme::additive
