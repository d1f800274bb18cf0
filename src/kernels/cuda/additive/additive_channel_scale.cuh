/* additive_channel_scale.cuh - decays per channel as factors of queries and keys.
 *
 * A chunk of 64 tokens has four parts of 16. With a_u the decay of token u, and products over
 * tokens of one part, a query and a key become
 *
 *   q~_t = q_t prod of a_u, u <= t          k~_s = k_s prod of a_u, u > s
 *
 * from the part's start and to its end, so that q~_t.k~_s is what t reads from s in the part
 * before; parts between add their whole products. Factors never exceed 1 and no sum loses a small
 * decay behind a large one. Inside a part q_t 2^(d_t) and k_s 2^(-d_s) do, d the running sum of
 * log2 decays; both are products in the order of time, which no later decay moves. Where a channel
 * decays by more than 2^100 in a part, d counts from about the middle of its decay, a whole number
 * of powers of two away, and its steepest steps are cut so that it decays by at most 2^200: what
 * remains of a cut step is 2^-190 for one steep step and 2^-12.5 if all are, where the exact number
 * is less. In front of its first steep step no product of a query and a key changes by a bit. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_SCALE_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_SCALE_CUH

#include "kernels/cuda/additive/additive_mma.cuh"

namespace mneme::additive {

enum { MN_SUBCHUNK = 16, MN_SUBCHUNKS = 4, MN_SUBCHUNK_CHUNK = MN_SUBCHUNK * MN_SUBCHUNKS };

/* Tiles of COLUMNS channels, rows of COLUMNS + 8: q becomes q~ and k k~ in place. */
struct mn_scale_tiles {
    mn_bf16 *q, *q_inside, *k, *k_inside;
    const mn_bf16 *g;
    float *cum_decay;              // (parts, COLUMNS): decay over a whole part
    float *factor, *inside;   // rows of MN_SCAN_PITCH: factors of the rows' side, or NULL
};

/* log2 of a decay; below 2^-300 nothing is left of a float */
__device__ inline float mn_scale_log2(float g) {
    const float x = 1.44269504f * g;
    return x < -300.0f ? -300.0f : x;    // NaN stays
}

/* What a key grows by where a query falls by a, a positive number. */
__device__ inline float mn_scale_inverse(float a) {
    float x;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(a));
    return x;
}

/* One channel of a part that decays too far; pointers are at its first token in time, in front of
 * which a steep step is nothing. */
static __device__ __noinline__ void mn_scale_underflow(const mn_scale_tiles &at, int step,
                                                  bool reverse) {
    const float usual = 12.5f, most = 200.0f;
    const int table_step = step > 0 ? MN_SCAN_PITCH : -MN_SCAN_PITCH;
    float gentle = 0.0f, depth = 0.0f;
    int steep = 0;
    for (int u = 0; u < MN_SUBCHUNK; u++) {
        const float decay = -mn_scale_log2(mn_float(at.g[u * step]));
        if (decay <= usual) gentle += decay;
        else if (u > 0) steep++;
    }
    const float limit = steep ? fmaxf(usual, (most - gentle) / (float)steep) : most;
    const auto decay_at = [&](int u) {
        const float decay = -mn_scale_log2(mn_float(at.g[u * step]));
        return u == 0 && decay > usual ? 0.0f : fminf(decay, limit);
    };
    for (int u = 0; u < MN_SUBCHUNK; u++) depth += decay_at(u);
    const int half = __float2int_rn(0.5f * depth);
    float up = __int_as_float((127 + half) << 23), down = __int_as_float((127 - half) << 23);
    for (int u = 0; u < MN_SUBCHUNK; u++) {
        const float decay = decay_at(u);
        const bool twice = decay > usual;    // 2^-200 is no float
        const float a = mn_exp2(twice ? -0.5f * decay : -decay), back = mn_scale_inverse(a);
        up *= a, down *= back;
        if (twice) up *= a, down *= back;
        mn_put(at.q_inside + u * step, mn_float(at.q[u * step]) * up);
        mn_put(at.k_inside + u * step, mn_float(at.k[u * step]) * down);
        if (at.inside) at.inside[u * table_step] = reverse ? down : up;
    }
}

__device__ inline mn_scale_tiles mn_scale_advance(const mn_scale_tiles &at, int by, int table_by) {
    return { at.q + by, at.q_inside + by, at.k + by, at.k_inside + by, at.g + by, at.cum_decay,
             at.factor ? at.factor + table_by : nullptr,
             at.inside ? at.inside + table_by : nullptr };
}

__device__ inline void mn_scale_store(mn_bf16 *to, uint32_t pair, bool skip_low, bool skip_high) {
    if (!skip_low && !skip_high) *(uint32_t *)to = pair;
    else if (!skip_low) mn_put(to, mn_bf16_lo(pair));
    else if (!skip_high) mn_put(to + 1, mn_bf16_hi(pair));
}

/* Two channels of a part, from their decays `a` in the order of the scan. SKIPS: what goes inside
 * parts is there already where a channel decays too far. All rows are read before one is stored:
 * the compiler cannot tell that stores are to others. */
template <int COLUMNS, bool SKIPS>
__device__ inline void mn_scale_rows(const mn_scale_tiles &at, const float2 (&a)[MN_SUBCHUNK],
                                     float *cum_decay, bool reverse, bool skip_x, bool skip_y) {
    constexpr int pitch = COLUMNS + 8;
    const int step = reverse ? -pitch : pitch;
    const int table_step = reverse ? -MN_SCAN_PITCH : MN_SCAN_PITCH;
    uint32_t k[MN_SUBCHUNK], q[MN_SUBCHUNK];
    float2 r = { 1.0f, 1.0f };
#pragma unroll
    for (int u = 0; u < MN_SUBCHUNK; u++) {
        k[u] = *(const uint32_t *)(at.k + u * step), q[u] = *(const uint32_t *)(at.q + u * step);
    }
#pragma unroll
    for (int u = 0; u < MN_SUBCHUNK; u++) {    // no later decay moves these
        r.x *= mn_scale_inverse(a[u].x), r.y *= mn_scale_inverse(a[u].y);
        mn_scale_store(at.k_inside + u * step, mn_bf16x2_mul(k[u], r.x, r.y), SKIPS && skip_x,
                       SKIPS && skip_y);
        if (at.factor && reverse) {
            if (!SKIPS || !skip_x) at.inside[u * table_step] = r.x;
            if (!SKIPS || !skip_y) at.inside[u * table_step + 1] = r.y;
        }
    }
    r = { 1.0f, 1.0f };
#pragma unroll
    for (int u = MN_SUBCHUNK - 1; u >= 0; u--) {
        *(uint32_t *)(at.k + u * step) = mn_bf16x2_mul(k[u], r.x, r.y);
        if (at.factor && reverse) *(float2 *)(at.factor + u * table_step) = r;
        r.x *= a[u].x, r.y *= a[u].y;
    }
    *(float2 *)cum_decay = r;
    r = { 1.0f, 1.0f };
#pragma unroll
    for (int u = 0; u < MN_SUBCHUNK; u++) {
        r.x *= a[u].x, r.y *= a[u].y;
        const uint32_t scaled = mn_bf16x2_mul(q[u], r.x, r.y);
        *(uint32_t *)(at.q + u * step) = scaled;
        mn_scale_store(at.q_inside + u * step, scaled, SKIPS && skip_x, SKIPS && skip_y);
        if (at.factor && !reverse) {
            *(float2 *)(at.factor + u * table_step) = r;
            if (!SKIPS || !skip_x) at.inside[u * table_step] = r.x;
            if (!SKIPS || !skip_y) at.inside[u * table_step + 1] = r.y;
        }
    }
}

/* Two channels of a part. */
template <int COLUMNS>
__device__ inline void mn_scale_subchunk(const mn_scale_tiles &tiles, int part, int j,
                                         bool reverse) {
    constexpr int pitch = COLUMNS + 8;
    const int row = part * MN_SUBCHUNK + (reverse ? MN_SUBCHUNK - 1 : 0);
    const int step = reverse ? -pitch : pitch;
    const mn_scale_tiles at = mn_scale_advance(tiles, row * pitch + j, row * MN_SCAN_PITCH + j);
    float *cum_decay = tiles.cum_decay + part * COLUMNS + j;
    float2 a[MN_SUBCHUNK], sum = {};
#pragma unroll
    for (int u = 0; u < MN_SUBCHUNK; u++) {
        const uint32_t pair = *(const uint32_t *)(at.g + u * step);
        const float x = mn_scale_log2(mn_bf16_lo(pair)), y = mn_scale_log2(mn_bf16_hi(pair));
        sum.x += x, sum.y += y;
        a[u] = make_float2(mn_exp2(x), mn_exp2(y));
    }
    const bool underflow_x = sum.x < -100.0f, underflow_y = sum.y < -100.0f;
    if (!underflow_x && !underflow_y) {
        mn_scale_rows<COLUMNS, false>(at, a, cum_decay, reverse, false, false);
        return;
    }
    if (underflow_x) mn_scale_underflow(at, step, reverse);
    if (underflow_y) mn_scale_underflow(mn_scale_advance(at, 1, 1), step, reverse);
    mn_scale_rows<COLUMNS, true>(at, a, cum_decay, reverse, underflow_x, underflow_y);
}

template <int COLUMNS, int THREADS>
__device__ inline void mn_scale_chunk(const mn_scale_tiles &tiles, bool reverse) {
    constexpr int pairs = COLUMNS / 2;
    for (int item = threadIdx.x; item < MN_SUBCHUNKS * pairs; item += THREADS) {
        mn_scale_subchunk<COLUMNS>(tiles, item / pairs, item % pairs * 2, reverse);
    }
}

/* Four matrices of 8 x 8, of which each lane points at a row. */
template <bool TRANS>
__device__ inline void mn_gated_ldmatrix(uint32_t (&r)[4], uint32_t at) {
    if (TRANS) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    }
}

}    // namespace mneme::additive

#endif
