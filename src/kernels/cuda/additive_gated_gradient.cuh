/* additive_gated_gradient.cuh - gradients of queries, keys and decays where each channel has its
 * own decay, on Hopper, from states that walks have left (additive_gated.cuh): S in front of each
 * chunk of 64 tokens, and its gradient N behind it.
 *
 *   dq_t = scale (2^(e_t) S do_t + sum over s <= t of (do_t.v_s) 2^(e_t - e_s) k_s)
 *   dk_s = scale (2^(E - e_s) N v_s + sum over t >= s of (do_t.v_s) 2^(e_t - e_s) q_t)
 *   dg_0 = scale sum over V of S (2^E N + sum over t of 2^(e_t) q_t do_t')
 *   dg_(t + 1) = dg_t + k_t dk_t - q_t dq_t
 *
 * with e the sums of log2 decays from the chunk's start, E that of the chunk. They are taken from
 * part to part of 16 tokens as in additive_channel.cuh, and inside a part as additive_scale.cuh
 * says. No chunk waits for another: a block has 64 channels of one chunk of one head, a warp one
 * part. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_GATED_GRADIENT_CUH
#define MN_KERNELS_CUDA_ADDITIVE_GATED_GRADIENT_CUH

#include "kernels/cuda/additive_gated_scale.cuh"

enum {
    MN_GATED_SPAN = MN_PARTS_CHUNK,           // tokens between states
    MN_GATED_TILE = MN_GATED_SPAN * 128,      // bytes of a tile of 64 columns
    MN_GATED_DERIVERS = 32 * MN_PARTS,        // threads
    MN_GATED_TERMS = MN_WALK_WIDTH + 4,       // floats between rows of terms
};

struct mn_gated_gradient {
    mn_call call;
    mn_in q, k, v, g, cot;
    mn_out dq, dk, dg;
    const mn_bf16 *S, *N;
    float scale;
};

/* States as they were kept: eight rows of 64 channels by eight columns each. */
template <int VP>
struct alignas(128) mn_gated_gradient_room {
    unsigned char cot[VP / 64 * MN_GATED_TILE], v[VP / 64 * MN_GATED_TILE];
    unsigned char q[MN_GATED_TILE], k[MN_GATED_TILE], g[MN_GATED_TILE];
    unsigned char q_inside[MN_GATED_TILE], k_inside[MN_GATED_TILE];
    unsigned char S[VP * 128], N[VP * 128];
    alignas(16) float fall[MN_PARTS][MN_WALK_WIDTH];
    alignas(16) float read[MN_PARTS][MN_WALK_WIDTH];    // what parts read from S, times q
    alignas(16) float met[MN_PARTS][MN_WALK_WIDTH];     // S with N
    alignas(16) float sums[MN_PARTS][MN_WALK_WIDTH];    // terms of parts

    __device__ float *terms(void) { return (float *)cot; }    // once cot and v are read
};

#if MN_HAS_WGMMA

__device__ inline void mn_gated_fetch_octet(void *to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(mn_shared_at(to)), "l"(from),
                 "r"(inside ? 16 : 0) : "memory");
}

/* 64 tokens of 64 columns of a view; zeros beyond. */
__device__ inline void mn_gated_fetch(unsigned char *tile, const mn_in &view,
                                      const mn_tile_span &at, int64_t h, int64_t column0,
                                      int64_t columns) {
    const int row0 = threadIdx.x / 8, octet = threadIdx.x % 8;
    const int64_t j = column0 + 8 * octet;
    const mn_bf16 *from =
        mn_row<mn_bf16>(view, at.span.b, at.span.t0 + at.first + row0, h) + j;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = row0 + 16 * i;
        const bool inside = row < at.n_rows && j < columns;
        mn_gated_fetch_octet(tile + mn_gated_place(row, octet),
                             inside ? (const void *)(from + 16 * i * view.stride[1]) : view.data,
                             inside);
    }
}

template <int VP>
__device__ inline void mn_gated_fetch_all(mn_gated_gradient_room<VP> &room,
                                          const mn_gated_gradient &p, const mn_tile_span &at,
                                          int64_t slot, int64_t h, int slice) {
    const int64_t K = p.call.K, V = p.call.V, wide = (K + 63) / 64 * 64;
#pragma unroll
    for (int panel = 0; panel < VP / 64; panel++) {
        mn_gated_fetch(room.cot + panel * MN_GATED_TILE, p.cot, at, h, 64 * panel, V);
        mn_gated_fetch(room.v + panel * MN_GATED_TILE, p.v, at, h, 64 * panel, V);
    }
    mn_gated_fetch(room.g, p.g, at, h, 64 * slice, K);
    mn_gated_fetch(room.k, p.k, at, h, 64 * slice, K);
    mn_gated_fetch(room.q, p.q, at, h, 64 * slice, K);
    const int64_t first = ((slot * p.call.H + h) * VP * wide + slice * 512) + threadIdx.x % 64 * 8;
#pragma unroll
    for (int rows = threadIdx.x / 64; rows < VP / 8; rows += 2) {    // of eight: 1024 bytes
        const int to = rows * 1024 + threadIdx.x % 64 * 16;
        mn_gated_fetch_octet(room.S + to, p.S + first + rows * 8 * wide, true);
        mn_gated_fetch_octet(room.N + to, p.N + first + rows * 8 * wide, true);
    }
    mn_copies_end();
}

/* ---- levels ---------------------------------------------------------------------------------- */

/* A part's 16 tokens by 64 channels: number i of eight channels n is of token
 * lane / 4 + i / 2 * 8, channel 8 n + lane % 4 * 2 + i % 2. */
typedef float mn_gated_part[8][4];

/* Levels inside a part of a channel that falls too deep, at a token and eight later: see
 * additive_scale.cuh. `g` is the channel at the part's first token. */
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

/* Sums of decays, those of whole parts, and which channels fall too deep. */
struct mn_gated_levels {
    mn_gated_part e;
    float end[8][2];
    unsigned deep;    // bit 2 n + j
    bool any;         // in the warp

    __device__ void make(uint32_t g) {
        const mn_gated_triangle triangle;
        const int lane = threadIdx.x % 32;
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
            end[i / 2][i % 2] = __shfl_sync(0xffffffffu, e[i / 2][2 + i % 2], 28 + lane % 4);
            if (end[i / 2][i % 2] < -100.0f) deep |= 1u << i;
        }
        any = __any_sync(0xffffffffu, deep != 0);
    }

    /* x <- the levels inside the part */
    __device__ void inside(mn_gated_part &x, const unsigned char *tile) const {
        const int part = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 32; i++) x[i / 4][i % 4] = e[i / 4][i % 4];
        if (!any) return;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (!(deep >> i & 1)) continue;
            const float2 d = mn_gated_cut(tile, part, i / 2 * 8 + lane % 4 * 2 + i % 2, lane / 4);
            x[i / 2][i % 2] = d.x, x[i / 2][2 + i % 2] = d.y;
        }
    }
};

/* A part's rows of a tile at `at`, times 2^level or its inverse, to another tile's. */
__device__ inline void mn_gated_put_part(uint32_t at, const uint32_t (&x)[4][4],
                                         const mn_gated_part &level, float sign) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&l)[4] = level[2 * k + i / 2];
            y[i] = mn_pair_times(x[k][i], mn_exp2(sign * l[i % 2 * 2]),
                                 mn_exp2(sign * l[i % 2 * 2 + 1]));
        }
        mn_gated_put(at ^ k * 32, y);
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

template <int VP>
__device__ inline void mn_gated_left(uint32_t (&a)[VP / 16][4], uint32_t tile, int part) {
#pragma unroll
    for (int k = 0; k < VP / 16; k++) {
        mn_gated_matrices<false>(
            a[k], (mn_gated_down(tile, 16 * part) ^ k % 4 * 32) + k / 4 * MN_GATED_TILE);
    }
}

/* o = a M for a kept state M */
template <int VP>
__device__ inline void mn_gated_read(mn_gated_part &o, const uint32_t (&a)[VP / 16][4],
                                     uint32_t M) {
    const int lane = threadIdx.x % 32;
    const uint32_t at = M + (lane / 8 % 2 * 8 + lane / 16) * 128 + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < 32; i++) o[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < VP / 16; k++) {
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t b[4];
            mn_gated_matrices<true>(b, at + k * 2048 + n * 128);
            mn_mma(o[n], a[k], b[0], b[1]);
            mn_mma(o[n + 1], a[k], b[2], b[3]);
        }
    }
}

/* Scores of a's 16 tokens with those of a part of a tile. */
template <int VP>
__device__ inline void mn_gated_meet(float (&P)[2][4], const uint32_t (&a)[VP / 16][4],
                                     uint32_t tile, int part) {
#pragma unroll
    for (int i = 0; i < 8; i++) P[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < VP / 16; k++) {
        uint32_t b[4];
        mn_gated_matrices<false>(
            b, (mn_gated_along(tile, 16 * part) ^ k % 4 * 32) + k / 4 * MN_GATED_TILE);
        mn_mma(P[0], a[k], b[0], b[1]);
        mn_mma(P[1], a[k], b[2], b[3]);
    }
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
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
    const mn_strip<mn_bf16> to =
        mn_strip_of<mn_bf16>(view, at.span, h, 64 * slice, K, MN_WALK_WIDTH);
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

/* What the state adds to dg: sums over this part's rows of q~ and what they read from S. */
__device__ inline void mn_gated_sum_read(float (*sums)[MN_WALK_WIDTH], const mn_gated_part &o,
                                         uint32_t q, const float (*falls)[MN_WALK_WIDTH]) {
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
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
            for (int before = 0; before < part; before++) {
                const float2 fall = *(const float2 *)&falls[before][channel];
                sum.x *= fall.x, sum.y *= fall.y;
            }
            if (lane < 4) *(float2 *)&sums[part][channel] = sum;
        }
    }
}

/* Sums of products of S and N over a quarter of the rows. */
template <int VP>
__device__ inline void mn_gated_sum_met(float (*sums)[MN_WALK_WIDTH], const unsigned char *S,
                                        const unsigned char *N) {
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float2 sum = {};
#pragma unroll
        for (int rows = 0; rows < VP / 32; rows++) {
            const int at = ((part * (VP / 32) + rows) * 8 + n) * 128 + lane * 4;
            const uint32_t x = *(const uint32_t *)(S + at), y = *(const uint32_t *)(N + at);
            sum.x = fmaf(mn_low(x), mn_low(y), sum.x), sum.y = fmaf(mn_high(x), mn_high(y), sum.y);
        }
#pragma unroll
        for (int by = 4; by < 32; by <<= 1) {
            sum.x += __shfl_xor_sync(0xffffffffu, sum.x, by);
            sum.y += __shfl_xor_sync(0xffffffffu, sum.y, by);
        }
        if (lane < 4) *(float2 *)&sums[part][8 * n + lane * 2] = sum;
    }
}

/* o <- scale (o 2^e + inside 2^l), where l and e differ if channels fall too deep; dk has -l, and
 * E - e for e. terms -= or += the rows of x times that: of the rounded rows that products had, x at
 * `far` and at `near`, so that what one token reads from another is the same number in both. */
template <bool OF_KEYS>
__device__ inline void mn_gated_finish(mn_gated_part &o, const mn_gated_part &inside,
                                       mn_gated_part &terms, const mn_gated_levels &levels,
                                       uint32_t far, uint32_t near, const unsigned char *g,
                                       float scale) {
    const int part = threadIdx.x / 32;
    mn_gated_part l;
    levels.inside(l, g);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4], y[4];
        mn_gated_matrices<false>(x, mn_gated_down(far, 16 * part) ^ k * 32);
        mn_gated_matrices<false>(y, mn_gated_down(near, 16 * part) ^ k * 32);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int n = 2 * k + i / 4, c = i % 4;
            const float e = levels.e[n][c];
            const float up = mn_exp2(OF_KEYS ? levels.end[n][c % 2] - e : e);
            const float up_inside = mn_exp2(OF_KEYS ? -l[n][c] : l[n][c]);
            const float wide = c % 2 ? mn_high(x[i / 2]) : mn_low(x[i / 2]);
            const float close = c % 2 ? mn_high(y[i / 2]) : mn_low(y[i / 2]);
            const float term = fmaf(o[n][c], wide, inside[n][c] * close);
            terms[n][c] = fmaf(OF_KEYS ? scale : -scale, term, terms[n][c]);
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

/* dq of this warp's part. */
template <int VP>
__device__ inline void mn_gated_derive_queries(mn_gated_gradient_room<VP> &room,
                                               mn_gated_part &terms, const mn_gated_levels &levels,
                                               const mn_gated_gradient &p, const mn_tile_span &at,
                                               int64_t h, int slice) {
    const int part = threadIdx.x / 32;
    mn_gated_part o, inside = {};
    uint32_t a[VP / 16][4];
    float P[2][4];
    mn_gated_left<VP>(a, mn_shared_at(room.cot), part);
    mn_gated_read<VP>(o, a, mn_shared_at(room.S));
    mn_gated_sum_read(room.read, o, mn_shared_at(room.q), room.fall);
#pragma unroll 1
    for (int from = 0; from < part; from++) {
        mn_gated_part_falls(o, room.fall[from]);
        mn_gated_meet<VP>(P, a, mn_shared_at(room.v), from);
        mn_gated_add(o, P, mn_shared_at(room.k), from);
    }
    mn_gated_meet<VP>(P, a, mn_shared_at(room.v), part);
    mn_gated_mask(P, false);
    mn_gated_add(inside, P, mn_shared_at(room.k_inside), part);
    mn_gated_finish<false>(o, inside, terms, levels, mn_shared_at(room.q),
                           mn_shared_at(room.q_inside), room.g, p.scale);
    mn_gated_store_part(o, p.dq, at, h, slice, p.call.K);
}

/* dk likewise. */
template <int VP>
__device__ inline void mn_gated_derive_keys(mn_gated_gradient_room<VP> &room, mn_gated_part &terms,
                                            const mn_gated_levels &levels,
                                            const mn_gated_gradient &p, const mn_tile_span &at,
                                            int64_t h, int slice) {
    const int part = threadIdx.x / 32;
    mn_gated_part o, inside = {};
    uint32_t a[VP / 16][4];
    float P[2][4];
    mn_gated_left<VP>(a, mn_shared_at(room.v), part);
    mn_gated_read<VP>(o, a, mn_shared_at(room.N));
#pragma unroll 1
    for (int from = MN_PARTS - 1; from > part; from--) {
        mn_gated_part_falls(o, room.fall[from]);
        mn_gated_meet<VP>(P, a, mn_shared_at(room.cot), from);
        mn_gated_add(o, P, mn_shared_at(room.q), from);
    }
    mn_gated_meet<VP>(P, a, mn_shared_at(room.cot), part);
    mn_gated_mask(P, true);
    mn_gated_add(inside, P, mn_shared_at(room.q_inside), part);
    mn_gated_finish<true>(o, inside, terms, levels, mn_shared_at(room.k),
                          mn_shared_at(room.k_inside), room.g, p.scale);
    mn_gated_store_part(o, p.dk, at, h, slice, p.call.K);
}

/* dg: sums of terms over tokens. All threads of the block call. */
template <int VP>
__device__ inline void mn_gated_derive_decays(mn_gated_gradient_room<VP> &room,
                                              const mn_gated_part &terms,
                                              const mn_gated_gradient &p, const mn_tile_span &at,
                                              int64_t h, int slice) {
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32, j = 2 * lane;
    const int64_t channel = 64 * slice + j;
    float *rows = room.terms() + part * MN_PART * MN_GATED_TERMS;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = lane / 4 + i % 2 * 8, n = i / 2;
        *(float2 *)(rows + row * MN_GATED_TERMS + 8 * n + lane % 4 * 2) =
            make_float2(terms[n][i % 2 * 2], terms[n][i % 2 * 2 + 1]);
    }
    __syncwarp();
    float2 term[MN_PART], sum = {};
#pragma unroll
    for (int u = 0; u < MN_PART; u++) {
        term[u] = *(const float2 *)(rows + u * MN_GATED_TERMS + j);
        sum.x += term[u].x, sum.y += term[u].y;
    }
    *(float2 *)&room.sums[part][j] = sum;
    __syncthreads();
    float2 read = {}, met = {}, before = {};
#pragma unroll
    for (int i = 0; i < MN_PARTS; i++) {
        const float2 x = *(const float2 *)&room.read[i][j], y = *(const float2 *)&room.met[i][j];
        const float2 z = *(const float2 *)&room.sums[i][j];
        read.x += x.x, read.y += x.y, met.x += y.x, met.y += y.y;
        if (i < part) before.x += z.x, before.y += z.y;
    }
#pragma unroll
    for (int i = 0; i < MN_PARTS; i++) {
        met.x *= room.fall[i][j], met.y *= room.fall[i][j + 1];
    }
    sum.x = fmaf(p.scale, met.x + read.x, before.x);
    sum.y = fmaf(p.scale, met.y + read.y, before.y);
    if (channel >= p.call.K) return;
#pragma unroll
    for (int u = 0; u < MN_PART; u++) {
        const int64_t t = at.first + part * MN_PART + u;
        if (part * MN_PART + u >= at.n_rows) break;
        mn_bf16 *to = mn_row<mn_bf16>(p.dg, at.span.b, at.span.t0 + t, h) + channel;
        *(uint32_t *)to = mn_pair(sum.x, sum.y);
        sum.x += term[u].x, sum.y += term[u].y;
    }
}

#endif

template <int VP>
__global__ void __launch_bounds__(MN_GATED_DERIVERS, 2)
mn_gated_gradient_kernel(const __grid_constant__ mn_gated_gradient p, int n_slices) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(128) unsigned char gradient_bytes[];
    mn_gated_gradient_room<VP> &room = *(mn_gated_gradient_room<VP> *)gradient_bytes;
    const int slice = blockIdx.x % n_slices, part = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t h = blockIdx.x / n_slices % p.call.H, slot = blockIdx.x / n_slices / p.call.H;
    const mn_tile_span at = mn_tile_at(p.call, MN_GATED_SPAN, slot);
    if (at.n_rows == 0) return;
    mn_gated_fetch_all<VP>(room, p, at, slot, h, slice);
    mn_copies_wait();
    __syncthreads();
    mn_gated_levels levels;
    uint32_t q[4][4], k[4][4];
    mn_gated_part terms = {}, level;
    levels.make(mn_gated_down(mn_shared_at(room.g), 16 * part));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        mn_gated_matrices<false>(q[i], mn_gated_down(mn_shared_at(room.q), 16 * part) ^ i * 32);
        mn_gated_matrices<false>(k[i], mn_gated_down(mn_shared_at(room.k), 16 * part) ^ i * 32);
    }
    mn_gated_put_part(mn_gated_down(mn_shared_at(room.q), 16 * part), q, levels.e, 1.0f);
    levels.inside(level, room.g);
    mn_gated_put_part(mn_gated_down(mn_shared_at(room.q_inside), 16 * part), q, level, 1.0f);
    mn_gated_put_part(mn_gated_down(mn_shared_at(room.k_inside), 16 * part), k, level, -1.0f);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        level[i / 4][i % 4] = levels.end[i / 4][i % 2] - levels.e[i / 4][i % 4];
    }
    mn_gated_put_part(mn_gated_down(mn_shared_at(room.k), 16 * part), k, level, 1.0f);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float *fall = room.fall[part] + 8 * n + lane * 2;
        if (lane < 4) {
            fall[0] = mn_exp2(levels.end[n][0]), fall[1] = mn_exp2(levels.end[n][1]);
        }
    }
    __syncthreads();
    mn_gated_sum_met<VP>(room.met, room.S, room.N);
    mn_gated_derive_queries<VP>(room, terms, levels, p, at, h, slice);
    mn_gated_derive_keys<VP>(room, terms, levels, p, at, h, slice);
    mn_gated_derive_decays<VP>(room, terms, p, at, h, slice);
#endif
}

template <int VP>
inline int mn_gated_gradient_launch(const mn_gated_gradient &job, cudaStream_t stream) {
    const int64_t slices = mn_ceil_div(job.call.K, 64);
    const int64_t blocks = mn_tile_slots(job.call, MN_GATED_SPAN) * job.call.H * slices;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_with_room(mn_gated_gradient_kernel<VP>, dim3((unsigned)blocks),
                               MN_GATED_DERIVERS, sizeof(mn_gated_gradient_room<VP>), stream, job,
                               (int)slices);
}

#endif
