/* curvature_fwd_chunk.cu - curvature forward: products of tiles, and which calls go to
 * those of Hopper. */
#include "kernels/cuda/curvature/curvature_mma_sm80.cuh"
#include "kernels/cuda/curvature/curvature_sm90.cuh"
#include "kernels/cuda/curvature/curvature_ready.cuh"
#include "kernels/cuda/curvature/curvature_smem.cuh"
#include "kernels/cuda/curvature/curvature_sum_sm90.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::curvature {

/* curvature forward on Hopper, for bf16 and keys of up to 128:
 *
 *   Y' = R Q' + K' tril(Q K' - m)'     qt = q - gamma / n (y - m s)     R <- R + K' K
 *
 * Three groups of four warps. Of the first, one warp loads tiles by TMA, chunks
 * ahead, one makes 1 / n and -gamma / n, and two keep s: rows 64 and 65 of a tile of keys are s,
 * rounded, and what that leaves, so that scores bring s.q with them. The second group makes
 * scores. The third has 64 rows of the symmetric R in its registers, reads, moves and stores:
 * what it reads is transposed, rows being columns of the result, as are the rows of q that it takes
 * from the tile. */

enum {
    MN_CURVE_AHEAD = 4,                              // chunks under way
    MN_CURVE_FORWARD_THREADS = 3 * MN_WARPGROUP,
};

template <int KP>
struct alignas(1024) mn_curve_forward_stage {
    unsigned char k[KP / 64 * MN_CURVE_ROWS * 128];
    unsigned char q[KP / 64 * MN_CURVE_SQUARE];
    float s[KP], each[MN_CURVE_CHUNK];    // each: 1 / n
    float2 weight[MN_CURVE_CHUNK];        // -gamma / n and the mean
};

template <int KP>
struct mn_curve_forward_smem {
    mn_curve_forward_stage<KP> stage[MN_CURVE_AHEAD];
    alignas(1024) unsigned char P[2][MN_CURVE_SQUARE];
    alignas(1024) unsigned char out[2][MN_CURVE_SQUARE];
    uint64_t there[MN_CURVE_AHEAD], ready[MN_CURVE_AHEAD], gone[MN_CURVE_AHEAD];
    uint64_t scored[2], used[2];
};

#if MN_HAS_WGMMA

/* ---- the group that brings ------------------------------------------------------------------- */

/* One lane calls. */
template <int KP>
__device__ inline void mn_curve_forward_request(mn_curve_forward_smem<KP> &smem,
                                            const mn_curve_maps &maps, const mn_curve_place &at) {
    const int n_chunks = (at.s.rows + 63) / 64, h = (int)at.h, b = (int)at.s.span.b;
    for (int c = 0; c < n_chunks; c++) {
        const int turn = c / MN_CURVE_AHEAD, t = (int)(at.s.span.t0 + at.s.first) + c * 64;
        mn_curve_forward_stage<KP> &to = smem.stage[c % MN_CURVE_AHEAD];
        uint64_t *there = &smem.there[c % MN_CURVE_AHEAD];
        mn_mbarrier_wait(&smem.gone[c % MN_CURVE_AHEAD], (turn & 1) ^ 1);
        mn_mbarrier_arrive_expect_tx(there, 2 * KP / 64 * MN_CURVE_SQUARE);
#pragma unroll
        for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
            mn_tma_load(to.k + smem_tile * MN_CURVE_ROWS * 128, maps.k, there, 64 * smem_tile, h,
                        t, b);
            mn_tma_load(to.q + smem_tile * MN_CURVE_SQUARE, maps.q, there, 64 * smem_tile, h, t, b);
        }
    }
}

/* ---- the group that makes scores ------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_forward_scores(mn_curve_forward_smem<KP> &smem,
                                               const mn_curve_place &at) {
    const int i = threadIdx.x % MN_WARPGROUP, row = i / 32 * 16 + i % 32 / 4;
    const int n_chunks = (at.s.rows + 63) / 64;
    const mn_curve_seen seen;
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_forward_stage<KP> &in = smem.stage[c % MN_CURVE_AHEAD];
        float d[36], mean[2];
        mn_mbarrier_wait(&smem.there[c % MN_CURVE_AHEAD], c / MN_CURVE_AHEAD & 1);
        mn_mbarrier_wait(&smem.ready[c % MN_CURVE_AHEAD], c / MN_CURVE_AHEAD & 1);
        mn_wgmma_fence();
        mn_curve_scores_start<KP>(d, mn_smem_addr(in.q), mn_smem_addr(in.k));
        mn_wgmma_commit();
        mn_wgmma_wait<0>();
        const float each[2] = { in.each[row], in.each[row + 8] };
        mn_curve_means(mean, d, each, seen);
        mn_mbarrier_wait(&smem.used[c % 2], (c / 2 & 1) ^ 1);
        mn_curve_put_square(smem.P[c % 2], NULL, d, mean, seen);
        if (i % 4 == 0) {
            in.weight[row].y = mean[0];
            in.weight[row + 8].y = mean[1];
        }
        mn_fence_proxy_async();
        mn_mbarrier_arrive(&smem.scored[c % 2]);
    }
}

/* ---- the group that has R -------------------------------------------------------------------- */

/* What a thread's 16 tokens need for their results, four of eight of them. */
template <int KP>
__device__ inline void mn_curve_forward_weights(float4 (&w)[4],
                                                const mn_curve_forward_stage<KP> &in, int first) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = *(const float4 *)(in.weight + 8 * (first + i) + threadIdx.x % 4 * 2);
    }
}

/* Turned pairs of tokens of q, `x`, become results: those of 32 tokens from 8 `first` on. */
__device__ inline void mn_curve_forward_result(uint32_t (&x)[16], const float (&Y)[32],
                                               const float4 (&w)[4], const float (&s)[2],
                                               int first) {
#pragma unroll
    for (int vec16 = first; vec16 < first + 4; vec16++) {
        const float4 by = w[vec16 - first];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float left = fmaf(-by.y, s[r], Y[4 * vec16 + 2 * r]);
            const float right = fmaf(-by.w, s[r], Y[4 * vec16 + 2 * r + 1]);
            uint32_t &pair = x[2 * vec16 + r];
            pair = mn_bf16x2(fmaf(by.x, left, mn_curve_low(pair)),
                             fmaf(by.z, right, mn_curve_high(pair)));
        }
    }
}

/* Turned results as rows of a tile. */
__device__ inline void mn_curve_forward_turn(unsigned char *to, const uint32_t (&x)[16]) {
    const int lane = threadIdx.x % 32, own = threadIdx.x % MN_WARPGROUP / 32 * 16;
    const int row = lane % 8 + lane / 16 * 8, column = own + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         mn_smem_addr(to) + mn_swizzle_byte(64, 16 * step + row, column)),
                     "r"(x[4 * step]), "r"(x[4 * step + 1]), "r"(x[4 * step + 2]),
                     "r"(x[4 * step + 3]) : "memory");
    }
}

/* Rows of a tile of results behind which another sequence follows. The group calls. */
__device__ inline void mn_curve_forward_put_rows(const mn_curvature_args &p,
                                                 const mn_curve_place &at,
                                                 const unsigned char *tile, int c) {
    const int i = threadIdx.x % MN_WARPGROUP, vec16 = i % 8, column = at.column0 + 8 * vec16;
    const int count = column < p.call.K ? at.s.rows - c * 64 : 0;
    const int64_t t = at.s.span.t0 + at.s.first + c * 64;
    mn_bf16 *to = mn_row<mn_bf16>(p.qt, at.s.span.b, t, at.h) + column;
#pragma unroll 1
    for (int token = i / 8; token < count; token += MN_WARPGROUP / 8) {
        const uint4 pack = *(const uint4 *)(tile + mn_swizzle_byte(64, token, 8 * vec16));
        *(uint4 *)(to + token * p.qt.stride[1]) = pack;
    }
}

/* A tile of results to memory; where another sequence follows in it, row by row. The group calls
 * together. Its first thread waits until older tiles were read, or, where `counter` counts them,
 * until they are in memory. */
__device__ inline void mn_curve_forward_put(const mn_curvature_args &p, const mn_curve_maps &maps,
                                            const mn_curve_place &at, const unsigned char *tile,
                                            int c, int *counter) {
    const bool first = threadIdx.x % MN_WARPGROUP == 0;
    mn_fence_proxy_async();
    if (first) {
        if (counter) mn_tma_store_wait();
        else mn_tma_store_wait_read();
    }
    mn_curve_group_sync(2);
    const bool alone = p.call.cu_seqlens && at.s.rows < c * 64 + 64;
    if (__builtin_expect(alone, 0) && p.qt.data) {
        mn_curve_forward_put_rows(p, at, tile, c);
    }
    if (!first) return;
    if (counter && c > 0) mn_curve_arrive(counter, c);
    if (alone || !p.qt.data) return;
    mn_tma_store(maps.qt, tile, at.column0, (int)at.h, (int)(at.s.span.t0 + at.s.first) + c * 64,
                 (int)at.s.span.b);
}

/* Behind the last tile. */
__device__ inline void mn_curve_forward_stored(int n_chunks, int *counter) {
    const bool first = threadIdx.x % MN_WARPGROUP == 0;
    if (first && !counter) mn_tma_store_wait_read();
    if (!counter) return;
    if (first) mn_tma_store_wait();
    mn_curve_group_sync(2);
    if (!first || n_chunks == 0) return;
    __threadfence();    // threads may have stored the last one
    mn_curve_arrive(counter, n_chunks);
}

template <int KP>
__device__ inline void mn_curve_forward_read(mn_curve_forward_smem<KP> &smem,
                                             const mn_curvature_args &p, const mn_curve_maps &maps,
                                             const mn_curve_place &at, const float *sums,
                                             int *counter) {
    const int n_chunks = (at.s.rows + 63) / 64, lane = threadIdx.x % 32;
    const int own = at.column0 + threadIdx.x / 32 % 4 * 16;
    float R[KP / 2];
    mn_curve_load(R, mn_row<float>(p.kk0, at.s.n, 0, at.h), sums, 0.5f, p.call.K, at.column0);
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_forward_stage<KP> &in = smem.stage[c % MN_CURVE_AHEAD];
        uint32_t a[KP / 4], k[16], x[16];
        float Y[32];
        mn_mbarrier_wait(&smem.there[c % MN_CURVE_AHEAD], c / MN_CURVE_AHEAD & 1);
        mn_curve_left<MN_CURVE_ROWS>(k, in.k, own);
        mn_curve_pack(a, R);
        mn_wgmma_fence();
        mn_curve_rows<KP, 64>(Y, a, mn_smem_addr(in.q), false);
        mn_wgmma_commit();
        mn_mbarrier_wait(&smem.scored[c % 2], c / 2 & 1);
        mn_fence_operand(k);    // what follows is done while products run, not in front of them
        const bool wild = mn_curve_tame(k);
        mn_wgmma_fence();
        mn_curve_square(Y, k, mn_smem_addr(smem.P[c % 2]));
        mn_wgmma_commit();
        mn_curve_depth<MN_CURVE_ROWS>(R, k, mn_smem_addr(in.k));
        mn_wgmma_commit();
        mn_curve_left<64>(x, in.q, own);
        const float s[2] = { in.s[own + lane / 4], in.s[own + lane / 4 + 8] };
        float4 w[4];
        mn_curve_forward_weights<KP>(w, in, 0);
        mn_wgmma_wait<1>();
        if (__builtin_expect(wild, 0)) {
            uint32_t all[16];
            mn_curve_left<MN_CURVE_ROWS>(all, in.k, own);
            mn_curve_add_wild<MN_SEES_EARLIER>(Y, all, smem.P[c % 2]);
        }
        mn_mbarrier_arrive_warp(&smem.used[c % 2]);
        mn_curve_forward_result(x, Y, w, s, 0);
        mn_curve_forward_weights<KP>(w, in, 4);
        mn_curve_forward_result(x, Y, w, s, 4);
        mn_curve_forward_turn(smem.out[c % 2], x);
        mn_curve_forward_put(p, maps, at, smem.out[c % 2], c, counter);
        mn_wgmma_wait<0>();
        if (__builtin_expect(wild, 0)) {
            uint32_t all[16];
            mn_curve_left<MN_CURVE_ROWS>(all, in.k, own);
            mn_curve_wild_rows(R, all);
        }
        mn_mbarrier_arrive(&smem.gone[c % MN_CURVE_AHEAD]);
    }
    mn_curve_forward_stored(n_chunks, counter);
    if (at.s.last) {
        mn_curve_store(mn_row<float>(p.kk, at.s.n, 0, at.h), R, 1.0f, p.call.K, at.column0);
    }
}

#endif

/* `ready` is for a scan beside this, if any. */
template <int KP>
__global__ void __launch_bounds__(MN_CURVE_GROUPS, 1)
mn_curve_forward_kernel(const __grid_constant__ mn_curvature_args p,
                        const __grid_constant__ mn_curve_maps maps, const float *states,
                        mn_curve_ready ready, mn_curve_cut cut) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char curve_bytes[];
    mn_curve_forward_smem<KP> &smem = *(mn_curve_forward_smem<KP> *)curve_bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    int *counter = ready.chunks ? ready.chunks + blockIdx.x : NULL;
    if (threadIdx.x == 0) {
        if (counter) {
            *counter = 0;
            __threadfence();
        }
        mn_pdl_launch_dependents();
    }
    if (!at.s.there) return;
    const int64_t K = p.call.K;
    const float *sums =
        at.s.first > 0 ? mn_curve_sums_for(states, p.call, at, at.s.slot - 1) : NULL;
    if (threadIdx.x == 0) {
        for (int i = 0; i < MN_CURVE_AHEAD; i++) {
            mn_mbarrier_init(&smem.there[i], 1);
            mn_mbarrier_init(&smem.ready[i], MN_WARPGROUP - 32);
            mn_mbarrier_init(&smem.gone[i], MN_WARPGROUP + 64);    // who reads, who adds up
        }
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.scored[i], MN_WARPGROUP);
            mn_mbarrier_init(&smem.used[i], 4);
        }
        mn_mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<80>();
        if (threadIdx.x == 0) mn_curve_forward_request<KP>(smem, maps, at);
        if (threadIdx.x / 32 == 1) {
            mn_curve_weigh_chunks<MN_CURVE_AHEAD>(
                smem, p, at, [&](int slot, int i, float factor, float each) {
                    smem.stage[slot].each[i] = each, smem.stage[slot].weight[i].x = factor;
                });
        }
        if (threadIdx.x / 32 >= 2) {
            mn_curve_add_keys<KP, MN_CURVE_AHEAD>(
                smem, at, K, sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, at.h),
                at.s.last ? mn_row<float>(p.ks, at.s.n, 0, at.h) : NULL);
        }
    } else if (threadIdx.x < 2 * MN_WARPGROUP) {
        mn_setmaxnreg_dec<96>();
        mn_curve_forward_scores<KP>(smem, at);
    } else {
        mn_setmaxnreg_inc<208>();
        mn_curve_forward_read<KP>(smem, p, maps, at, sums, counter);
    }
#endif
}

/* False: the tensors cannot be mapped. */
inline bool mn_curve_forward_map(mn_curve_maps *maps, const mn_curvature_args *p) {
    if (p->call.T == 0) return true;
    const int64_t K = p->call.K;
    return mn_tma_map(&maps->q, p->q, p->call, K, MN_CURVE_CHUNK) &&
           mn_tma_map(&maps->k, p->k, p->call, K, MN_CURVE_CHUNK) &&
           (!p->qt.data || mn_tma_map(&maps->qt, p->qt, p->call, K, MN_CURVE_CHUNK));
}

template <typename T, int KP>
struct forward_smem {
    using z = mn_curve_sizes<T, KP>;
    alignas(16) T q[z::chunk * z::pitch];
    alignas(16) T k[z::chunk * z::pitch];
    alignas(16) T R[KP * MN_CURVE_PITCH];
    alignas(16) T P[z::chunk * z::score_pitch];
    float s[KP], within[z::chunk], before[z::chunk], mean[z::chunk], each[z::chunk];
    float gamma[z::chunk];
};

/* qt of the warp's tile, from what was read of it. */
template <typename T, int KP>
__device__ inline void forward_result(mn_tile_acc<mn_curve_sizes<T, KP>::columns / 8> &Y,
                                      const forward_smem<T, KP> &smem, const mn_curvature_args &p,
                                      const mn_curve_place &at, int64_t t, int count) {
    using z = mn_curve_sizes<T, KP>;
    const int warp = threadIdx.x / 32, row0 = warp % z::down * 16;
    const int column0 = at.column0 + warp / z::down * z::columns;
    Y.pairs([&](const float *y, int row, int column) {
        const int token = row0 + row, j = column0 + column;
        T *qt = mn_row<T>(p.qt, at.s.span.b, at.s.span.t0 + t + token, at.h);
        if (token >= count || !qt) return;
        const float2 q = mn_load2(smem.q + token * z::pitch + j);
        const float left = fmaf(-smem.mean[token], smem.s[j], y[0]);
        const float right = fmaf(-smem.mean[token], smem.s[j + 1], y[1]);
        const float weight = -smem.gamma[token] * smem.each[token];
        mn_row_store2(qt, j, p.call.K, fmaf(weight, left, q.x), fmaf(weight, right, q.y));
    });
}

template <typename T, int KP>
__global__ void __launch_bounds__(MN_CURVE_THREADS, KP == 256 ? 1 : 2)
curvature_forward_kernel(const __grid_constant__ mn_curvature_args p, const float *states,
                         mn_curve_cut cut) {
    using z = mn_curve_sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    forward_smem<T, KP> &smem = *(forward_smem<T, KP> *)bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K, h = at.h;
    const int warp = threadIdx.x / 32;
    const double seen = mn_curve_before(p, at.s.n);
    const float *sums =
        at.s.first > 0 ? mn_curve_sums_for(states, p.call, at, at.s.slot - 1) : NULL;
    const float *vector = sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, h);
    mn_curve_matrix<T, KP> R;
    R.load(mn_row<float>(p.kk0, at.s.n, 0, h), sums, 0.5f, K, at.column0);
    for (int i = threadIdx.x; i < KP; i += MN_CURVE_THREADS) {
        smem.s[i] = i < K ? mn_get(vector, i) : 0.0f;
    }
    for (int start = 0; start < at.s.rows; start += z::chunk) {
        const int count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_smem_tile_load(smem.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(smem.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K,
                          cut.packs);
        R.put(smem.R);
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            const int64_t token = at.s.span.t0 + t + i;
            smem.each[i] = (float)(1.0 / (seen + (double)(t + i + 1)));
            smem.gamma[i] = i < count ? mn_float(*mn_row<T>(p.gamma, at.s.span.b, token, h)) : 0.0f;
        }
        const int next = min(z::chunk, at.s.rows - start - z::chunk);
        mn_smem_tile_prefetch<T>(p.q, at.s.span, h, t + z::chunk, next, K);
        mn_smem_tile_prefetch<T>(p.k, at.s.span, h, t + z::chunk, next, K);
        __syncthreads();
        mn_tile_acc<z::chunk / 8> P;
        if (warp < z::down) {
            mn_curve_scores<T, KP>(P, smem.within, smem.q, smem.k, warp * 16);
        } else {
            mn_curve_dots<T, KP>(smem.before, smem.s, smem.q, warp - z::down,
                                 MN_CURVE_WARPS - z::down);
        }
        __syncthreads();
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            smem.mean[i] = (smem.within[i] + smem.before[i]) * smem.each[i];
        }
        __syncthreads();
        if (warp < z::down) mn_curve_put_scores<T, KP>(smem.P, P, smem.mean, warp * 16);
        __syncthreads();
        mn_tile_acc<z::columns / 8> Y;
        Y.clear();
        mn_curve_apply<T, KP>(Y, smem.q, smem.R, smem.P, smem.k, at.column0);
        forward_result<T, KP>(Y, smem, p, at, t, count);
        R.add(smem.k, smem.k + at.column0);
        __syncthreads();
        for (int i = threadIdx.x; i < KP; i += MN_CURVE_THREADS) {
            smem.s[i] += mn_curve_column_sum(smem.k, z::pitch, z::chunk, i);
        }
        __syncthreads();
    }
    if (!at.s.last) return;
    R.store(mn_row<float>(p.kk, at.s.n, 0, h), 1.0f, K, at.column0);
    float *last = mn_row<float>(p.ks, at.s.n, 0, h);
    const int64_t column = at.column0 + threadIdx.x;
    __syncthreads();
    if (last && threadIdx.x < MN_CURVE_SLICE && column < K) last[column] = smem.s[column];
}

/* ---- launches -------------------------------------------------------------------------------- */

MN_CUDA_PLAN(curvature_forward) {
    const mn_call *c = (const mn_call *)args;
    size_t count = 0;
    return (c->T <= MN_CURVE_SEGMENT || mn_curve_states_size(&count, c)) &&
           mn_mul_size(&plan->shared_bytes, count, sizeof(float));
}

template <typename T, int KP>
static int forward_of(const mn_curvature_args *p, float *states, cudaStream_t on) {
    const mn_curve_cut cut = mn_curve_smem_tile_cut<T>(p);
    const int code = mn_curve_add_up<T, KP, false>(p, states, NULL, cut, on);
    if (code != cudaSuccess) return code;
    return mn_curve_start(curvature_forward_kernel<T, KP>, MN_CURVE_THREADS,
                          sizeof(forward_smem<T, KP>), p->call, cut, on, *p, states);
}

/* `early`: blocks of the launch in front may still be at work. */
template <int KP>
static int start_group(const mn_curve_beside &job, bool early, cudaStream_t on) {
    const mn_curvature_args &p = job.p;
    const auto kernel = mn_curve_forward_kernel<KP>;
    const size_t smem = sizeof(mn_curve_forward_smem<KP>);
    const mn_curve_cut cut = mn_curve_group_cut(&p);
    const cudaError_t code = cudaFuncSetAttribute(    // so that what is next finds room beside it
        kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (code != cudaSuccess) return code;
    if (!early) {
        return mn_curve_start(kernel, MN_CURVE_FORWARD_THREADS, smem, p.call, cut, on, p, job.maps,
                              (const float *)job.states, job.ready);
    }
    const cudaError_t limit = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (limit != cudaSuccess) return limit;
    return mn_launch_pdl(kernel, dim3((unsigned)mn_curve_beside_blocks(job)),
                           MN_CURVE_FORWARD_THREADS, smem, on, p, job.maps,
                           (const float *)job.states, job.ready, cut);
}

template <int KP>
static int group_of(const mn_curvature_args *p, float *states, cudaStream_t on) {
    mn_curve_beside job = {};
    job.p = *p, job.states = states;
    if (!mn_curve_forward_map(&job.maps, p)) return forward_of<mn_bf16, KP>(p, states, on);
    const int code = mn_curve_beside_sums(job, on);
    return code == cudaSuccess ? start_group<KP>(job, false, on) : code;
}

MN_CUDA_LAUNCH(curvature_forward) {
    const mn_curvature_args *p = (const mn_curvature_args *)args;
    const mn_call &c = p->call;
    const cudaStream_t on = (cudaStream_t)stream;
    if (mn_curve_slots(c, MN_CURVE_SEGMENT) * c.H == 0) return cudaSuccess;
    if (c.K > MN_CURVE_WIDEST) return cudaErrorNotSupported;
    float *states = (float *)shared;
    if (mn_curve_group_serves(p)) {
        return c.K <= 64 ? group_of<64>(p, states, on) : group_of<128>(p, states, on);
    }
    int code;
    if (mn_curve_forward_sm80(&code, p, states, on)) return code;
    if (c.dtype == MN_BF16) MN_CURVE_BY_WIDTH(forward_of, mn_bf16, c.K, (p, states, on));
    MN_CURVE_BY_WIDTH(forward_of, float, c.K, (p, states, on));
}

/* ---- beside a state scan --------------------------------------------------------------------- */

/* Counters of the chunks of segments that are in memory: one for each block. */
static int64_t count_arrived(const mn_curvature_args *p) {
    const mn_curve_cut cut = mn_curve_group_cut(p);
    return mn_curve_slots(p->call, cut.segment) * p->call.H * cut.slices;
}

static bool beside_layout(size_t *states, size_t *all, const mn_curvature_args *p) {
    mn_plan plan = {};
    size_t counter;
    if (!mn_curvature_forward_cuda_plan(p, &plan) ||
        !mn_add_size(states, plan.shared_bytes, 255) ||
        !mn_mul_size(&counter, (size_t)count_arrived(p), sizeof(int)) ||
        !mn_add_size(&counter, counter, 255)) {
        return false;
    }
    *states = *states / 256 * 256;
    return mn_add_size(all, *states, counter / 256 * 256);
}

bool mn_curve_beside_plan(size_t *bytes, const mn_curvature_args *p) {
    size_t states;
    return beside_layout(&states, bytes, p);
}

bool mn_curve_beside_of(mn_curve_beside *to, const mn_curvature_args *p, void *shared) {
    size_t states, all;
    *to = {};
    if (p->call.T == 0 || !p->qt.data || !mn_curve_group_serves(p) ||
        !mn_curve_forward_map(&to->maps, p) || !beside_layout(&states, &all, p)) {
        return false;
    }
    const mn_curve_cut cut = mn_curve_group_cut(p);
    to->p = *p;
    to->states = (float *)shared;
    to->ready = { (int *)((char *)shared + states), cut.segment, cut.slices };
    return true;
}

int mn_curve_beside_sums(const mn_curve_beside &job, cudaStream_t on) {
    const mn_curve_cut cut = mn_curve_group_cut(&job.p);
    mn_curve_back_maps maps = {};
    maps.k = job.maps.k;
    return mn_curve_group_sums(&job.p, maps, job.states, cut, on);
}

int mn_curve_beside_launch(const mn_curve_beside &job, cudaStream_t on) {
    return job.p.call.K <= 64 ? start_group<64>(job, true, on) : start_group<128>(job, true, on);
}

int64_t mn_curve_beside_blocks(const mn_curve_beside &job) {
    return count_arrived(&job.p);
}

}    // namespace mneme::curvature
