/* curvature_bwd_sm90.cu - curvature backward on Hopper, for bf16 and keys of up to 128: a scan in
 * the order of time (gradients of q and gamma), one against it (keys and states).
 *
 * As curvature_sm90.cuh says, with tiles brought by TMA, three chunks under way. The first group
 * has a warp that asks for them, one that makes what is known of tokens, which it asks for a chunk
 * ahead, and, in the order of time, two that keep the running sum of keys. Against time the running
 * vector is made by the group with G, from the left operands that it has: two more columns of its
 * products. */
#include "kernels/cuda/curvature/curvature_sum_sm90.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::curvature {

enum { MN_CURVE_BACK_STAGES = 3 };

#if MN_HAS_WGMMA

/* ---- what both have -------------------------------------------------------------------------- */

/* Tiles of a chunk: k in SMEM_TILE rows. One lane calls. */
template <int KP, int SMEM_TILE>
__device__ inline void mn_curve_back_tiles(unsigned char *k, unsigned char *q, unsigned char *d,
                                           const mn_curve_back_maps &maps, uint64_t *there,
                                           const mn_curve_place &at, int start) {
    const int t = (int)(at.s.span.t0 + at.s.first) + start, h = (int)at.h, b = (int)at.s.span.b;
    mn_mbarrier_arrive_expect_tx(there, (maps.has_d ? 3 : 2) * (KP / 64) * MN_CURVE_SQUARE);
#pragma unroll
    for (int i = 0; i < KP / 64; i++) {
        mn_tma_load(k + i * SMEM_TILE * 128, maps.k, there, 64 * i, h, t, b);
        mn_tma_load(q + i * MN_CURVE_SQUARE, maps.q, there, 64 * i, h, t, b);
        if (maps.has_d) mn_tma_load(d + i * MN_CURVE_SQUARE, maps.d, there, 64 * i, h, t, b);
    }
}

/* Without a cotangent of results its tiles are zeros, which nobody brings. The block calls. */
template <int KP, typename Smem>
__device__ inline void mn_curve_back_no_d(Smem &smem) {
    constexpr int vec16s = KP / 64 * MN_CURVE_SQUARE / 16;
    for (int i = threadIdx.x; i < MN_CURVE_BACK_STAGES * vec16s; i += blockDim.x) {
        ((uint4 *)smem.stage[i / vec16s].d)[i % vec16s] = make_uint4(0, 0, 0, 0);
    }
    mn_fence_proxy_async();
}

/* `ready`, `gone`: how many arrive when a chunk's numbers are there, and when it has been used. */
template <typename Smem>
__device__ inline void mn_curve_back_barriers(Smem &smem, int ready, int gone) {
    for (int i = 0; i < MN_CURVE_BACK_STAGES; i++) {
        mn_mbarrier_init(&smem.there[i], 1);
        mn_mbarrier_init(&smem.ready[i], ready);
        mn_mbarrier_init(&smem.gone[i], gone);
    }
    for (int i = 0; i < 2; i++) {
        mn_mbarrier_init(&smem.scored[i], MN_WARPGROUP);
        mn_mbarrier_init(&smem.used[i], 4);
        mn_mbarrier_init(&smem.read[i], MN_WARPGROUP);
        mn_mbarrier_init(&smem.left[i], MN_WARPGROUP);
    }
    mn_mbarrier_init_fence();
}

#endif

/* ---- gradients of q and gamma ---------------------------------------------------------------- */

/* A scan in the order of time: forward with the cotangent d in place of q.
 *
 *   Y' = R D' + K' tril(D K' - m)' - s m'     dq = d - gamma / n y     R <- R + K' K
 *
 * Rows 64 and 65 of a tile of keys are s, rounded, and what that leaves, so that scores bring s.d
 * with them. Nothing may be lost of y, as dgamma is -y.q / n: what bf16 rounds away of R and of the
 * scores is multiplied too. The means of q are made besides. */
template <int KP>
struct alignas(1024) mn_curve_dq_stage {
    unsigned char k[KP / 64 * MN_CURVE_ROWS * 128];
    unsigned char d[KP / 64 * MN_CURVE_SQUARE];
    unsigned char q[KP / 64 * MN_CURVE_SQUARE];
    float s[KP], factor[MN_CURVE_CHUNK], each[MN_CURVE_CHUNK];    // -gamma / n, 1 / n
    float mean[MN_CURVE_CHUNK];                                   // of d
};

template <int KP>
struct mn_curve_dq_smem {
    mn_curve_dq_stage<KP> stage[MN_CURVE_BACK_STAGES];
    alignas(1024) unsigned char P[2][MN_CURVE_SQUARE];
    alignas(1024) unsigned char P_low[2][MN_CURVE_SQUARE];
    mn_curve_read Y[2];
    uint64_t there[MN_CURVE_BACK_STAGES], ready[MN_CURVE_BACK_STAGES], gone[MN_CURVE_BACK_STAGES];
    uint64_t scored[2], used[2], read[2], left[2];
};

#if MN_HAS_WGMMA

/* One lane: tiles of all chunks. */
template <int KP>
__device__ inline void mn_curve_dq_request(mn_curve_dq_smem<KP> &smem,
                                           const mn_curve_back_maps &maps,
                                           const mn_curve_place &at) {
    const int n_chunks = (at.s.rows + 63) / 64;
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_BACK_STAGES, turn = c / MN_CURVE_BACK_STAGES;
        mn_curve_dq_stage<KP> &to = smem.stage[slot];
        mn_mbarrier_wait(&smem.gone[slot], (turn & 1) ^ 1);
        mn_curve_back_tiles<KP, MN_CURVE_ROWS>(to.k, to.q, to.d, maps, &smem.there[slot], at,
                                               64 * c);
    }
}

/* The means of q, beside those of d, to memory at `to`: of a thread's first row, and of the second
 * if there are more than eight left. Each slice has its share of the chunks. */
template <int KP>
__device__ inline void mn_curve_dq_keep_means(mn_curve_dq_stage<KP> &in, float *to, int left,
                                              const float (&mean)[2], const float (&each)[2],
                                              const mn_curve_seen &seen) {
    float of_q[36], mean_q[2];
    mn_wgmma_fence();
    mn_curve_scores_start<KP>(of_q, mn_smem_addr(in.q), mn_smem_addr(in.k));
    mn_wgmma_commit();
    mn_wgmma_wait<0>();
    mn_curve_means(mean_q, of_q, each, seen);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (threadIdx.x % 4 || left <= 8 * r) continue;
        *(float2 *)(to + 16 * r) = make_float2(mean_q[r], mean[r]);
    }
}

template <int KP>
__device__ inline void mn_curve_dq_scores(mn_curve_dq_smem<KP> &smem, const mn_curvature_args &p,
                                          const mn_curve_work &w, const mn_curve_place &at) {
    const int thread = threadIdx.x % MN_WARPGROUP, row = thread / 32 * 16 + thread % 32 / 4;
    const int n_chunks = (at.s.rows + 63) / 64;
    const mn_curve_seen seen;
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_BACK_STAGES, phase = c / MN_CURVE_BACK_STAGES & 1;
        mn_curve_dq_stage<KP> &in = smem.stage[slot];
        float of_d[36], mean[2];
        mn_mbarrier_wait(&smem.there[slot], phase);
        mn_mbarrier_wait(&smem.ready[slot], phase);
        mn_fence_proxy_async();
        mn_wgmma_fence();
        mn_curve_scores_start<KP>(of_d, mn_smem_addr(in.d), mn_smem_addr(in.k));
        mn_wgmma_commit();
        mn_wgmma_wait<0>();
        const float each[2] = { in.each[row], in.each[row + 8] };
        mn_curve_means(mean, of_d, each, seen);
        mn_mbarrier_wait(&smem.used[c % 2], (c / 2 & 1) ^ 1);
        mn_curve_put_square(smem.P[c % 2], smem.P_low[c % 2], of_d, mean, seen);
        if (thread % 4 == 0) {
            in.mean[row] = mean[0];
            in.mean[row + 8] = mean[1];
        }
        mn_mbarrier_arrive(&smem.scored[c % 2]);
        if (c % (KP / 64) == at.slice) {
            const int t = c * 64 + row;
            float *means = w.means + 2 * mn_curve_row_of(p.call, at, at.s.first + t);
            mn_curve_dq_keep_means<KP>(in, means, at.s.rows - t, mean, each, seen);
        }
        mn_mbarrier_arrive_warp(&smem.gone[slot]);
    }
}

/* The group that has R. */
template <int KP>
__device__ inline void mn_curve_dq_read(mn_curve_dq_smem<KP> &smem, const mn_curvature_args &p,
                                        const mn_curve_place &at, const float *sums) {
    const int n_chunks = (at.s.rows + 63) / 64, warp = threadIdx.x / 32 % 4;
    float R[KP / 2], Y[32];
    mn_curve_load(R, mn_row<float>(p.kk0, at.s.n, 0, at.h), sums, 0.5f, p.call.K, at.column0);
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_BACK_STAGES, phase = c / MN_CURVE_BACK_STAGES & 1;
        mn_curve_dq_stage<KP> &in = smem.stage[slot];
        uint32_t a[KP / 4], low[KP / 4], k[16];
        mn_curve_pack(a, R);
        mn_curve_pack_rest(low, R);
        mn_mbarrier_wait(&smem.there[slot], phase);
        mn_mbarrier_wait(&smem.ready[slot], phase);
        mn_wgmma_fence();
        mn_curve_rows<KP, 64>(Y, a, mn_smem_addr(in.d), false);
        mn_curve_rows<KP, 64>(Y, low, mn_smem_addr(in.d));
        mn_wgmma_commit();
        mn_curve_left<MN_CURVE_ROWS>(k, in.k, at.column0 + warp * 16);
        mn_mbarrier_wait(&smem.scored[c % 2], c / 2 & 1);
        mn_fence_proxy_async();
        mn_wgmma_fence();
        mn_curve_square(Y, k, mn_smem_addr(smem.P[c % 2]));
        mn_curve_square(Y, k, mn_smem_addr(smem.P_low[c % 2]));
        mn_wgmma_commit();
        mn_curve_depth<MN_CURVE_ROWS>(R, k, mn_smem_addr(in.k));
        mn_wgmma_commit();
        mn_mbarrier_wait(&smem.left[c % 2], (c / 2 & 1) ^ 1);
        mn_wgmma_wait<1>();
        smem.Y[c % 2].put(Y);
        mn_mbarrier_arrive(&smem.read[c % 2]);
        mn_mbarrier_arrive_warp(&smem.used[c % 2]);
        mn_wgmma_wait<0>();
        mn_mbarrier_arrive_warp(&smem.gone[slot]);
    }
}

/* Eight columns of a token: out = d + factor (y - m s), and the slice's part of y.q. */
template <int KP>
__device__ inline uint4 mn_curve_dq_result(float &product, const float (&y)[8], const float (&s)[8],
                                           const mn_curve_dq_stage<KP> &in, int column, int token) {
    const float m = in.mean[token], f = in.factor[token];
    const uint32_t byte = mn_swizzle_byte(64, token, column);
    float x[8], q[8];
    mn_curve_unpack(x, *(const uint4 *)(in.d + byte));
    mn_curve_unpack(q, *(const uint4 *)(in.q + byte));
    product = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float centred = fmaf(-m, s[i], y[i]);
        x[i] = fmaf(f, centred, x[i]);
        product = fmaf(q[i], centred, product);
    }
    return mn_curve_pack_vec16(x);
}

/* Sums of four numbers over eight lanes: lane l has that of number 2 (l % 2) + l / 2 % 2. */
__device__ inline float mn_curve_dq_sum(const float (&x)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    float two[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float give = odd ? x[i] : x[2 + i], keep = odd ? x[2 + i] : x[i];
        two[i] = keep + __shfl_xor_sync(0xffffffffu, give, 1);
    }
    const float give = upper ? two[0] : two[1], keep = upper ? two[1] : two[0];
    const float sum = keep + __shfl_xor_sync(0xffffffffu, give, 2);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 4);
}

template <int KP>
__device__ inline void mn_curve_dq_store(mn_curve_dq_smem<KP> &smem, const mn_curvature_args &p,
                                         const mn_curve_work &w, const mn_curve_place &at) {
    const int i = threadIdx.x % MN_WARPGROUP, n_chunks = (at.s.rows + 63) / 64;
    const int vec16 = i % 8, column = at.column0 + 8 * vec16, first = i / 8;
    const int summed = first + 16 * (i % 2 * 2 + i / 2 % 2);    // the token whose sum a lane has
    const int64_t step = p.grad.q.stride[1], rows = p.call.B * p.call.T * p.call.H;
    mn_bf16 *to = mn_row<mn_bf16>(p.grad.q, at.s.span.b, at.s.span.t0 + at.s.first + first, at.h);
    float *part = w.parts + at.slice * rows + mn_curve_row_of(p.call, at, at.s.first + summed);
    const bool wanted = to && column < p.call.K;
    to += column;
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_BACK_STAGES, left = at.s.rows - 64 * c;
        const mn_curve_dq_stage<KP> &in = smem.stage[slot];
        float s[8], product[4];
        mn_mbarrier_wait(&smem.there[slot], c / MN_CURVE_BACK_STAGES & 1);
        mn_mbarrier_wait(&smem.read[c % 2], c / 2 & 1);
#pragma unroll
        for (int j = 0; j < 8; j++) s[j] = in.s[column + j];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int token = first + 16 * n;
            float y[8];
            smem.Y[c % 2].get(y, vec16, token);
            const uint4 pack = mn_curve_dq_result<KP>(product[n], y, s, in, column, token);
            if (wanted && token < left) *(uint4 *)(to + 16 * n * step) = pack;
        }
        mn_mbarrier_arrive(&smem.gone[slot]);
        mn_mbarrier_arrive(&smem.left[c % 2]);
        const float sum = mn_curve_dq_sum(product);
        if (vec16 < 4 && summed < left) *part = sum;
        to += 64 * step, part += 64;
    }
}

#endif

template <int KP>
__global__ void __launch_bounds__(MN_CURVE_GROUPS, 1)
mn_curve_dq_kernel(const __grid_constant__ mn_curvature_args p,
                   const __grid_constant__ mn_curve_back_maps maps, mn_curve_work w,
                   mn_curve_cut cut) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char curve_dq_bytes[];
    mn_curve_dq_smem<KP> &smem = *(mn_curve_dq_smem<KP> *)curve_dq_bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K;
    const float *sums =
        at.s.first > 0 ? mn_curve_sums_for(w.there, p.call, at, at.s.slot - 1) : NULL;
    /* a chunk has been used by who stores, who adds up, and scores and R by warps */
    if (threadIdx.x == 0) {
        mn_curve_back_barriers(smem, MN_WARPGROUP - 32, MN_WARPGROUP + 64 + 8);
    }
    if (!maps.has_d) mn_curve_back_no_d<KP>(smem);
    __syncthreads();
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<80>();
        if (threadIdx.x == 0) mn_curve_dq_request<KP>(smem, maps, at);
        if (threadIdx.x / 32 == 1) {
            mn_curve_weigh_chunks<MN_CURVE_BACK_STAGES>(
                smem, p, at, [&](int slot, int i, float factor, float each) {
                    smem.stage[slot].each[i] = each, smem.stage[slot].factor[i] = factor;
                });
        }
        if (threadIdx.x / 32 >= 2) {
            mn_curve_add_keys<KP, MN_CURVE_BACK_STAGES>(
                smem, at, K, sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, at.h), NULL);
        }
    } else if (threadIdx.x < 2 * MN_WARPGROUP) {
        mn_setmaxnreg_dec<120>();
        mn_curve_dq_scores<KP>(smem, p, w, at);
    } else if (threadIdx.x < 3 * MN_WARPGROUP) {
        mn_setmaxnreg_inc<224>();
        mn_curve_dq_read<KP>(smem, p, at, sums);
    } else {
        mn_setmaxnreg_dec<80>();
        mn_curve_dq_store<KP>(smem, p, w, at);
    }
#endif
}

/* ---- gradients of keys and states ------------------------------------------------------------ */

/* A scan against time. With d the cotangent, f = -gamma / n, m and md the means of q and d:
 *
 *   dK' = G K' + (fD)' tril(Q K' - m) + (fQ)' tril(D K' - md) + e
 *   G <- G + (fD)'Q + (fQ)'D      e <- e - sum of f (m d + md q)
 *
 * The terms of e are products with fD and fQ as G has them, rounded, so that what rounding them
 * costs is weighed by centred numbers here as there. */
template <int KP>
struct alignas(1024) mn_curve_dk_stage {
    unsigned char k[KP / 64 * MN_CURVE_SQUARE];
    unsigned char q[KP / 64 * MN_CURVE_SQUARE];
    unsigned char d[KP / 64 * MN_CURVE_SQUARE];
    mn_curve_token_row less[2];    // -m and -md
    float factor[MN_CURVE_CHUNK], mean[2][MN_CURVE_CHUNK];
};

template <int KP>
struct mn_curve_dk_smem {
    mn_curve_dk_stage<KP> stage[MN_CURVE_BACK_STAGES];
    alignas(1024) unsigned char P[2][2][MN_CURVE_SQUARE];    // of q, of d
    mn_curve_read Y[2];
    uint64_t there[MN_CURVE_BACK_STAGES], ready[MN_CURVE_BACK_STAGES], gone[MN_CURVE_BACK_STAGES];
    uint64_t scored[2], used[2], read[2], left[2];
};

#if MN_HAS_WGMMA

/* One lane: tiles of all chunks, the last first. */
template <int KP>
__device__ inline void mn_curve_dk_request(mn_curve_dk_smem<KP> &smem,
                                           const mn_curve_back_maps &maps,
                                           const mn_curve_place &at) {
    const int n_chunks = (at.s.rows + 63) / 64;
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_BACK_STAGES, turn = c / MN_CURVE_BACK_STAGES;
        mn_curve_dk_stage<KP> &to = smem.stage[slot];
        mn_mbarrier_wait(&smem.gone[slot], (turn & 1) ^ 1);
        mn_curve_back_tiles<KP, MN_CURVE_CHUNK>(to.k, to.q, to.d, maps, &smem.there[slot], at,
                                                64 * (n_chunks - 1 - c));
    }
}

/* What is known of a lane's two tokens of a chunk, as it lies in memory. */
struct mn_curve_dk_tokens {
    enum { PARTS = 2 };
    mn_bf16 gamma[2];
    float2 means[2];
    float parts[2][PARTS];

    /* Tokens from `start` on; nothing behind the last, nor in front of the first. */
    __device__ void load(const mn_curvature_args &p, const mn_curve_work &w,
                         const mn_curve_place &at, int n_parts, int start) {
        const int64_t rows = p.call.B * p.call.T * p.call.H;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = start + 32 * half + threadIdx.x % 32;
            const bool inside = start >= 0 && i < at.s.rows;
            const int64_t t = at.s.first + i, row = mn_curve_row_of(p.call, at, t);
            gamma[half] = __float2bfloat16_rn(0.0f);
            means[half] = make_float2(0.0f, 0.0f);
            if (inside) {
                gamma[half] = *mn_row<mn_bf16>(p.gamma, at.s.span.b, at.s.span.t0 + t, at.h);
                means[half] = *(const float2 *)(w.means + 2 * row);
            }
#pragma unroll
            for (int n = 0; n < PARTS; n++) {
                const bool wanted = inside && at.slice == 0 && n < n_parts;
                parts[half][n] = wanted ? w.parts[n * rows + row] : 0.0f;
            }
        }
    }
};

/* A warp: factors and means of tokens, asked for a chunk before; dgamma. */
template <int KP>
__device__ inline void mn_curve_dk_weigh(mn_curve_dk_smem<KP> &smem, const mn_curvature_args &p,
                                         const mn_curve_work &w, const mn_curve_place &at,
                                         int n_parts) {
    const int lane = threadIdx.x % 32, n_chunks = (at.s.rows + 63) / 64;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n) + at.s.first;
    mn_curve_dk_tokens now, next;
    next.load(p, w, at, n_parts, 64 * (n_chunks - 1));
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_BACK_STAGES, turn = c / MN_CURVE_BACK_STAGES;
        const int start = 64 * (n_chunks - 1 - c), count = at.s.rows - start;
        mn_curve_dk_stage<KP> &to = smem.stage[slot];
        now = next;
        next.load(p, w, at, n_parts, start - 64);
        mn_mbarrier_wait(&smem.gone[slot], (turn & 1) ^ 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = 32 * half + lane;
            const float each = 1.0f / (float)(seen + start + i + 1);
            to.factor[i] = -mn_float(now.gamma[half]) * each;
            to.mean[0][i] = now.means[half].x, to.mean[1][i] = now.means[half].y;
            to.less[0].put(i, -now.means[half].x), to.less[1].put(i, -now.means[half].y);
            mn_bf16 *dgamma = mn_row<mn_bf16>(p.grad.gamma, at.s.span.b,
                                              at.s.span.t0 + at.s.first + start + i, at.h);
            const float part = now.parts[half][0] + now.parts[half][1];
            if (dgamma && at.slice == 0 && i < count) mn_put(dgamma, -part * each);
        }
        if (count < 64) {
            mn_mbarrier_wait(&smem.there[slot], turn & 1);
            mn_curve_zero_end<KP>(to.k, count);
            mn_curve_zero_end<KP>(to.q, count);
            mn_curve_zero_end<KP>(to.d, count);
            mn_fence_proxy_async();
        }
        mn_mbarrier_arrive(&smem.ready[slot]);
    }
}

template <int KP>
__device__ inline void mn_curve_dk_scores(mn_curve_dk_smem<KP> &smem, int n_chunks) {
    const int thread = threadIdx.x % MN_WARPGROUP, row = thread / 32 * 16 + thread % 32 / 4;
    const mn_curve_seen seen;
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_BACK_STAGES, phase = c / MN_CURVE_BACK_STAGES & 1;
        mn_curve_dk_stage<KP> &in = smem.stage[slot];
        float of_q[32], of_d[32];
        mn_mbarrier_wait(&smem.there[slot], phase);
        mn_mbarrier_wait(&smem.ready[slot], phase);
        mn_fence_proxy_async();
        mn_wgmma_fence();
        mn_curve_back_product<KP>(of_q, mn_smem_addr(in.q), mn_smem_addr(in.k));
        mn_curve_back_product<KP>(of_d, mn_smem_addr(in.d), mn_smem_addr(in.k));
        mn_mbarrier_wait(&smem.used[c % 2], (c / 2 & 1) ^ 1);
        mn_wgmma_wait<1>();
        const float mean[2] = { in.mean[0][row], in.mean[0][row + 8] };
        mn_curve_put_square(smem.P[c % 2][0], NULL, of_q, mean, seen);
        mn_wgmma_wait<0>();
        const float mean_d[2] = { in.mean[1][row], in.mean[1][row + 8] };
        mn_curve_put_square(smem.P[c % 2][1], NULL, of_d, mean_d, seen);
        mn_mbarrier_arrive(&smem.scored[c % 2]);
    }
}

/* The group that has G, and e. */
template <int KP>
__device__ inline void mn_curve_dk_read(mn_curve_dk_smem<KP> &smem, const mn_curvature_args &p,
                                        const mn_curve_place &at, const float *sums) {
    const int n_chunks = (at.s.rows + 63) / 64, own = at.column0 + threadIdx.x / 32 % 4 * 16;
    const int64_t K = p.call.K;
    float G[KP / 2], Y[32];
    mn_curve_row_vector e;
    mn_curve_load(G, mn_row<float>(p.cot.kk, at.s.n, 0, at.h), sums, 1.0f, K, at.column0);
    e.load(sums ? sums + K * K : mn_row<float>(p.cot.ks, at.s.n, 0, at.h), K, own);
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_BACK_STAGES, phase = c / MN_CURVE_BACK_STAGES & 1;
        mn_curve_dk_stage<KP> &in = smem.stage[slot];
        uint32_t a[KP / 4], d[16], q[16];
        float behind[2];
        mn_curve_pack(a, G);
        e.read(behind);
#pragma unroll
        for (int i = 0; i < 32; i++) Y[i] = behind[i % 4 / 2];
        mn_mbarrier_wait(&smem.there[slot], phase);
        mn_mbarrier_wait(&smem.ready[slot], phase);
        mn_fence_proxy_async();
        mn_wgmma_fence();
        mn_curve_rows<KP, 64>(Y, a, mn_smem_addr(in.k));
        mn_wgmma_commit();
        mn_mbarrier_wait(&smem.there[slot], phase);    // over: what follows stays behind products
        mn_curve_left<64>(d, in.d, own);
        mn_curve_left<64>(q, in.q, own);
        mn_curve_weigh_tokens(d, in.factor);
        mn_curve_weigh_tokens(q, in.factor);
        const bool wild = mn_curve_tame(d);
        mn_mbarrier_wait(&smem.scored[c % 2], c / 2 & 1);
        mn_fence_proxy_async();
        mn_wgmma_fence();
        mn_curve_depth<MN_CURVE_CHUNK>(Y, d, mn_smem_addr(smem.P[c % 2][0]));
        mn_curve_depth<MN_CURVE_CHUNK>(Y, q, mn_smem_addr(smem.P[c % 2][1]));
        mn_wgmma_commit();
        mn_curve_depth<64>(G, d, mn_smem_addr(in.q));
        mn_curve_depth<64>(G, q, mn_smem_addr(in.d));
        e.add(d, in.less[0]);
        e.add(q, in.less[1]);
        mn_wgmma_commit();
        mn_mbarrier_wait(&smem.left[c % 2], (c / 2 & 1) ^ 1);
        mn_wgmma_wait<1>();
        if (__builtin_expect(wild, 0)) {
            uint32_t all[16];
            mn_curve_left<64>(all, in.d, own);
            mn_curve_weigh_tokens(all, in.factor);
            mn_curve_add_wild<MN_SEES_LATER>(Y, all, smem.P[c % 2][0]);
        }
        smem.Y[c % 2].put(Y);
        mn_mbarrier_arrive(&smem.read[c % 2]);
        mn_mbarrier_arrive_warp(&smem.used[c % 2]);
        mn_wgmma_wait<0>();
        if (__builtin_expect(wild, 0)) {
            uint32_t all[16];
            mn_curve_left<64>(all, in.d, own);
            mn_curve_weigh_tokens(all, in.factor);
            mn_curve_wild_rows(G, all);
            mn_curve_wild_rows(e.at, all);
        }
        mn_mbarrier_arrive(&smem.gone[slot]);
    }
    if (at.s.first > 0) return;
    mn_curve_store(mn_row<float>(p.grad.kk0, at.s.n, 0, at.h), G, 0.5f, K, at.column0);
    e.store(mn_row<float>(p.grad.ks0, at.s.n, 0, at.h), K, own);
}

/* Rows of dk; those that they are added to are asked for a chunk before. */
template <int KP>
__device__ inline void mn_curve_dk_store(mn_curve_dk_smem<KP> &smem, const mn_curvature_args &p,
                                         const mn_curve_place &at) {
    const int i = threadIdx.x % MN_WARPGROUP, n_chunks = (at.s.rows + 63) / 64;
    const int vec16 = i % 8, column = at.column0 + 8 * vec16;
    const int64_t step = p.grad.k.stride[1];
    mn_bf16 *to = mn_row<mn_bf16>(p.grad.k, at.s.span.b, at.s.span.t0 + at.s.first, at.h);
    const bool wanted = to && column < p.call.K;
    const auto before_of = [&](int token) {
        const bool there = wanted && p.adds_k && token >= 0 && token < at.s.rows;
        return there ? *(const uint4 *)(to + token * step + column) : make_uint4(0, 0, 0, 0);
    };
    uint4 before[4];
#pragma unroll
    for (int n = 0; n < 4; n++) before[n] = before_of(64 * (n_chunks - 1) + i / 8 + 16 * n);
    for (int c = 0; c < n_chunks; c++) {
        const int start = 64 * (n_chunks - 1 - c);
        mn_mbarrier_wait(&smem.read[c % 2], c / 2 & 1);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int in_tile = i / 8 + 16 * n, token = start + in_tile;
            float y[8], x[8];
            smem.Y[c % 2].get(y, vec16, in_tile);
            mn_curve_unpack(x, before[n]);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] += y[j];
            if (wanted && token < at.s.rows) {
                *(uint4 *)(to + token * step + column) = mn_curve_pack_vec16(x);
            }
            before[n] = before_of(token - 64);
        }
        mn_mbarrier_arrive(&smem.left[c % 2]);
    }
}

#endif

template <int KP>
__global__ void __launch_bounds__(MN_CURVE_GROUPS, 1)
mn_curve_dk_kernel(const __grid_constant__ mn_curvature_args p,
                   const __grid_constant__ mn_curve_back_maps maps, mn_curve_work w,
                   mn_curve_cut cut) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char curve_dk_bytes[];
    mn_curve_dk_smem<KP> &smem = *(mn_curve_dk_smem<KP> *)curve_dk_bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const float *sums = at.s.last ? NULL : mn_curve_sums_for(w.back, p.call, at, at.s.slot + 1);
    if (threadIdx.x == 0) mn_curve_back_barriers(smem, 32, MN_WARPGROUP);
    if (!maps.has_d) mn_curve_back_no_d<KP>(smem);
    __syncthreads();
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<80>();
        if (threadIdx.x == 0) mn_curve_dk_request<KP>(smem, maps, at);
        if (threadIdx.x / 32 == 1) mn_curve_dk_weigh<KP>(smem, p, w, at, cut.n_parts);
    } else if (threadIdx.x < 2 * MN_WARPGROUP) {
        mn_setmaxnreg_dec<120>();
        mn_curve_dk_scores<KP>(smem, (at.s.rows + 63) / 64);
    } else if (threadIdx.x < 3 * MN_WARPGROUP) {
        mn_setmaxnreg_inc<224>();
        mn_curve_dk_read<KP>(smem, p, at, sums);
    } else {
        mn_setmaxnreg_dec<80>();
        mn_curve_dk_store<KP>(smem, p, at);
    }
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

bool mn_curve_back_map(mn_curve_back_maps *maps, const mn_curvature_args *p) {
    const int64_t K = p->call.K;
    maps->has_d = p->cot.qt.data != NULL;
    return mn_tma_map(&maps->q, p->q, p->call, K, MN_CURVE_CHUNK) &&
           mn_tma_map(&maps->k, p->k, p->call, K, MN_CURVE_CHUNK) &&
           (!maps->has_d || mn_tma_map(&maps->d, p->cot.qt, p->call, K, MN_CURVE_CHUNK));
}

template <int KP>
static int launch_dq(const mn_curvature_args *p, const mn_curve_back_maps &maps,
                     const mn_curve_work &w, const mn_curve_cut &cut, cudaStream_t on) {
    return mn_curve_start(mn_curve_dq_kernel<KP>, MN_CURVE_GROUPS, sizeof(mn_curve_dq_smem<KP>),
                          p->call, cut, on, *p, maps, w);
}

template <int KP>
static int launch_dk(const mn_curvature_args *p, const mn_curve_back_maps &maps,
                     const mn_curve_work &w, const mn_curve_cut &cut, cudaStream_t on) {
    return mn_curve_start(mn_curve_dk_kernel<KP>, MN_CURVE_GROUPS, sizeof(mn_curve_dk_smem<KP>),
                          p->call, cut, on, *p, maps, w);
}

int mn_curve_back_queries(const mn_curvature_args *p, const mn_curve_back_maps &maps,
                          const mn_curve_work &w, const mn_curve_cut &cut, cudaStream_t on) {
    return p->call.K <= 64 ? launch_dq<64>(p, maps, w, cut, on)
                           : launch_dq<128>(p, maps, w, cut, on);
}

int mn_curve_back_keys(const mn_curvature_args *p, const mn_curve_back_maps &maps,
                       const mn_curve_work &w, const mn_curve_cut &cut, cudaStream_t on) {
    return p->call.K <= 64 ? launch_dk<64>(p, maps, w, cut, on)
                           : launch_dk<128>(p, maps, w, cut, on);
}

}    // namespace mneme::curvature
