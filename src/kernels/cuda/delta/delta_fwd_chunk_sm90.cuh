/* delta_fwd_chunk_sm90.cuh - delta's states forward on Hopper, for keys of up to 128 and decays
 * that
 * channels share: the walk of delta_state_scan.cuh by groups of four warps that work ws.
 *
 *   X = V - Ed S     R = T X     O = Qd S + P R     S <- fall S + Wd'R
 *   P_ts = scale beta_s q_t.w_s exp(G_t - G_s), s <= t
 *
 * One group has the states, one makes P, and of the third one warp requests the copy engine for
 * chunks
 * ahead and one for results to be stored. As P is made here, what comes before the walk needs no
 * queries, which may still be in the making then, and while the walk goes on (curvature_ready.cuh).
 * Little code is what this lives by: the warps of a quarter of a processor run three kinds of it in
 * turn. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_FWD_CHUNK_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_FWD_CHUNK_SM90_CUH

#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/curvature/curvature_ready.cuh"
#include "kernels/cuda/delta/delta_wy_inverse_sm90.cuh"
#include "kernels/cuda/delta/delta_state_scan.cuh"

enum {
    MN_APART_GROUP = 32 * MN_DELTA_STRIPS,    // threads
    MN_APART_THREADS = 2 * MN_APART_GROUP + MN_DELTA_FETCHERS,
    MN_APART_STAGES = 3,                       // chunks under way
};

struct mn_ws_maps {
    CUtensorMap q, e, v, o;
};

/* `front` has rows of keys, values, T and P. */
template <int KP>
struct alignas(1024) mn_ws_stage {
    mn_state_scan_front<KP> front;
    alignas(1024) unsigned char queries[mn_tile_bytes<KP>()];
    alignas(16) mn_delta_levels levels;
};

template <int KP>
struct mn_ws_smem {
    mn_ws_stage<KP> stage[MN_APART_STAGES];
    alignas(1024) unsigned char out[2][mn_tile_bytes<64>()];
    uint64_t there[MN_APART_STAGES], scored[MN_APART_STAGES], gone[MN_APART_STAGES];
    uint64_t made[2], left[2];
    mn_state_scan_place place;
};

#if MN_HAS_WGMMA

/* ---- the group that fetches ------------------------------------------------------------------ */

/* Whether a chunk's tiles hold tokens of its sequence alone, and zeros. */
__device__ inline bool mn_ws_is_whole(const mn_delta_job &job, const mn_state_scan_place &at,
                                         int chunk) {
    return !job.p.call.cu_seqlens || mn_state_scan_count(at, chunk) == MN_DELTA_CHUNK;
}

/* One lane calls. */
template <int KP>
__device__ inline void mn_ws_request(mn_ws_stage<KP> &to, uint64_t *there,
                                    const mn_delta_job &job, const mn_ws_maps &maps,
                                    const mn_state_scan_place &at, int chunk) {
    constexpr int square = MN_DELTA_SQUARE * (int)sizeof(mn_bf16);
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    const int h = (int)at.h, b = (int)at.span.b, t = (int)at.span.t0 + chunk * MN_DELTA_CHUNK;
    mn_mbarrier_arrive_expect_tx(there, (2 * (KP / 64) + 2) * square
                                 + (int)sizeof(mn_delta_levels));
#pragma unroll
    for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
        mn_tma_load(to.front.keys + smem_tile * square, maps.e, there, 64 * smem_tile, h, t, b);
        mn_tma_load(to.queries + smem_tile * square, maps.q, there, 64 * smem_tile, h, t, b);
    }
    mn_tma_load(to.front.values, maps.v, there, (int)at.column0, h, t, b);
    mn_tma_load_bulk(to.front.T, job.work.T + index * MN_DELTA_SQUARE, square, there);
    mn_tma_load_bulk(&to.levels, job.work.levels + index, (int)sizeof(mn_delta_levels), there);
}

/* The same by all threads of the group, with zeros behind the sequence. */
template <int KP>
__device__ __noinline__ void mn_ws_copy(mn_ws_stage<KP> &to, const mn_delta_job &job,
                                           const mn_state_scan_place &at, int chunk) {
    constexpr int hands = MN_DELTA_FETCHERS, square = MN_DELTA_SQUARE * (int)sizeof(mn_bf16);
    const mn_delta_args &p = job.p;
    const int hand = mn_state_scan_hand();
    const int64_t index = (at.first + chunk) * p.call.H + at.h;
    mn_state_scan_copy_keys<KP, false>(to.front.keys, job, p.e, true, nullptr, at, chunk);
    mn_state_scan_copy_keys<KP, false>(to.queries, job, p.q, true, nullptr, at, chunk);
    mn_tile_load<64, hands>(to.front.values, p.v, true, at.span, at.h,
                             (int64_t)chunk * MN_DELTA_CHUNK, mn_state_scan_count(at, chunk),
                                 at.column0,
                             min(p.call.V, at.column0 + at.columns), hand);
    mn_copy_plain(to.front.T, job.work.T + index * MN_DELTA_SQUARE, square, hands, hand);
    mn_copy_plain(&to.levels, job.work.levels + index, (int)sizeof(mn_delta_levels), hands, hand);
    mn_copy_commit();
    mn_copy_wait<0>();
    mn_fence_proxy_async();
}

/* A tile of results to memory by a warp. */
__device__ inline void mn_ws_put(const mn_delta_job &job, const mn_ws_maps &maps,
                                    const mn_state_scan_place &at, const unsigned char *tile,
                                        int chunk) {
    const int lane = threadIdx.x % 32, vec16 = lane % 8;
    const int64_t t = at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK;
    const int64_t j = at.column0 + 8 * vec16;
    if (!job.p.o.data) return;
    if (mn_ws_is_whole(job, at, chunk)) {
        if (lane > 0) return;
        mn_tma_store(maps.o, tile, (int)at.column0, (int)at.h, (int)t, (int)at.span.b);
        mn_tma_store_wait_read();
        return;
    }
    for (int token = lane / 8; token < mn_state_scan_count(at, chunk); token += 4) {
        const uint4 pack = *(const uint4 *)(tile + mn_tile_place(token, vec16));
        mn_bf16 *to = mn_row<mn_bf16>(job.p.o, at.span.b, t + token, at.h) + j;
        if (j < job.p.call.V) *(uint4 *)to = pack;
    }
}

/* Results leave as many chunks behind as others are brought ahead. FOLLOWS: not before curvature
 * has made their queries. */
template <int KP, bool FOLLOWS>
__device__ inline void mn_ws_load(mn_ws_smem<KP> &room, const mn_delta_job &job,
                                      const mn_ws_maps &maps, const mn_curve_ready &ready) {
    const mn_state_scan_place &at = room.place;
    const int warp = threadIdx.x / 32 % 4;
    mn_curve_waiting queries;
    if (FOLLOWS) queries.begin(ready, job.p.call, at.n, at.h);
    for (int chunk = 0; chunk < at.n_chunks + MN_APART_STAGES; chunk++) {
        const int slot = chunk % MN_APART_STAGES, turn = chunk / MN_APART_STAGES;
        const int result = chunk - MN_APART_STAGES;
        if (chunk < at.n_chunks) {
            mn_mbarrier_wait(&room.gone[slot], (turn & 1) ^ 1);
            if (!mn_ws_is_whole(job, at, chunk)) {
                if (FOLLOWS) queries.wait(ready, job.p.call.H, chunk);
                mn_ws_copy<KP>(room.stage[slot], job, at, chunk);
                mn_mbarrier_arrive(&room.there[slot]);
            } else if (mn_state_scan_hand() == 0) {
                if (FOLLOWS) queries.wait(ready, job.p.call.H, chunk);
                mn_ws_request<KP>(room.stage[slot], &room.there[slot], job, maps, at, chunk);
            } else {
                mn_mbarrier_arrive(&room.there[slot]);
            }
        }
        if (warp != 1 || result < 0) continue;
        mn_mbarrier_wait(&room.made[result % 2], result / 2 & 1);
        mn_ws_put(job, maps, at, room.out[result % 2], result);
        mn_mbarrier_arrive(&room.left[result % 2]);
    }
}

/* ---- the group that makes scores ------------------------------------------------------------- */

/* A warp has 16 rows of P. */
template <int KP>
__device__ inline void mn_ws_score(mn_ws_smem<KP> &room, float scale) {
    const int lane = threadIdx.x % 32, block = threadIdx.x / 32 % 4;
    for (int i = 0; i < MN_APART_STAGES; i++) {    // what is above the diagonal stays zero
        uint4 *rows = (uint4 *)(room.stage[i].front.P + block * 16 * 128);
        for (int k = lane; k < 16 * 8; k += 32) rows[k] = make_uint4(0, 0, 0, 0);
    }
    for (int chunk = 0; chunk < room.place.n_chunks; chunk++) {
        const int slot = chunk % MN_APART_STAGES;
        mn_ws_stage<KP> &in = room.stage[slot];
        float sum[8][4] = {};
        mn_mbarrier_wait(&room.there[slot], chunk / MN_APART_STAGES & 1);
        mn_fence_proxy_async();
        mn_group_scores<KP>(sum, mn_shared(in.queries), mn_shared(in.front.keys));
        mn_delta_decay_scores(sum, in.levels, block, true, [&](int t, int s, float x, float y) {
            *(unsigned *)(in.front.P + mn_tile_place(t, s / 8) + s % 8 * 2) =
                mn_pair(scale * x, scale * y);
        });
        mn_fence_proxy_async();
        mn_mbarrier_arrive(&room.scored[slot]);
    }
}

/* ---- the group that has the states ----------------------------------------------------------- */

/* Results, turned, as a tile of rows. */
__device__ inline void mn_ws_turn(unsigned char *tile, const float (&O)[8][4]) {
    const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
    const int vec16 = threadIdx.x / 32 * 2 + lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned x[4];
        mn_left_of(x, O[2 * k], O[2 * k + 1]);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::
                         "r"(mn_shared(tile) + mn_tile_place(16 * k + row, vec16)),
                     "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    }
}

/* Starts y += x square'. */
__device__ inline void mn_ws_lower(float (&y)[8][4], const unsigned (&x)[4][4],
                                      const unsigned char *square) {
    mn_unit_begin<true>();
#pragma unroll
    for (int k = 0; k < 4; k++) mn_unit_rows<true>(y, x[k], mn_shared(square), 16 * k, 0);
    mn_unit_send<true>();
}

template <int KP>
__device__ inline void mn_ws_scan(mn_ws_smem<KP> &room, const mn_delta_job &job) {
    const mn_delta_args &p = job.p;
    const mn_state_scan_place &at = room.place;
    const int strip = threadIdx.x / 32;
    mn_state_scan_state<KP, true, 1> S;
    S.load(p.state0, p.call, at);
    for (int chunk = 0; chunk < at.n_chunks; chunk++) {
        const int slot = chunk % MN_APART_STAGES, phase = chunk / MN_APART_STAGES & 1;
        mn_ws_stage<KP> &in = room.stage[slot];
        float X[8][4] = {}, R[8][4] = {}, O[8][4] = {};
        unsigned a[KP / 16][4], x[4][4], r[4][4];
#pragma unroll
        for (int k = 0; k < KP / 16; k++) mn_left_of(a[k], S.at[2 * k], S.at[2 * k + 1]);
        mn_mbarrier_wait(&room.there[slot], phase);
        mn_fence_proxy_async();
        mn_unit_begin<true>();
#pragma unroll
        for (int k = 0; k < KP / 16; k++) {
            mn_unit_rows<true>(X, a[k], mn_shared(in.front.keys), 16 * k, 0);
        }
        mn_unit_send<true>();
#pragma unroll
        for (int k = 0; k < KP / 16; k++) {
            mn_unit_rows<true>(O, a[k], mn_shared(in.queries), 16 * k, 0);
        }
        mn_unit_send<true>();
        const float fall = in.levels.gamma[MN_DELTA_CHUNK - 1];
#pragma unroll
        for (int i = 0; i < KP / 2; i++) S.at[i / 4][i % 4] *= fall;
        mn_unit_wait<true, 1>();
        mn_state_scan_scale(X, in.levels.gamma, 1.0f);
        mn_state_scan_misses<KP, true>(x, X, in.front, strip, 0);
        mn_ws_lower(R, x, in.front.T);
        mn_unit_wait<true, 1>();
        mn_state_scan_scale(O, in.levels.gamma, job.scale);
        mn_unit_wait<true>();
        mn_state_scan_left(r, R);
        mn_state_scan_scale(R, in.levels.write, 1.0f);
        mn_state_scan_left(x, R);
        mn_mbarrier_wait(&room.scored[slot], phase);
        mn_ws_lower(O, r, in.front.P);
        S.add(x, in.front.keys);
        mn_unit_send<true>();
        mn_mbarrier_wait(&room.left[chunk % 2], (chunk / 2 & 1) ^ 1);
        mn_unit_wait<true, 1>();
        mn_ws_turn(room.out[chunk % 2], O);
        mn_unit_wait<true>();
        mn_fence_proxy_async();
        mn_mbarrier_arrive(&room.made[chunk % 2]);
        mn_mbarrier_arrive(&room.gone[slot]);
    }
    S.store(p.state, p.call, at);
}

#endif

/* ---- the kernel ------------------------------------------------------------------------------ */

/* FOLLOWS: beside the launches in front, for which the first block waits at its end. */
template <int KP, bool FOLLOWS>
__global__ void __launch_bounds__(MN_APART_THREADS, 1)
mn_delta_ws_kernel(const __grid_constant__ mn_delta_job job,
                      const __grid_constant__ mn_ws_maps maps, int64_t n_slices,
                      mn_curve_ready ready) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char scan_bytes[];
    mn_ws_smem<KP> &room = *(mn_ws_smem<KP> *)scan_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < MN_APART_STAGES; i++) {
            mn_mbarrier_init(&room.there[i], MN_DELTA_FETCHERS);
            mn_mbarrier_init(&room.scored[i], MN_APART_GROUP);
            mn_mbarrier_init(&room.gone[i], MN_APART_GROUP);
        }
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&room.made[i], MN_APART_GROUP);
            mn_mbarrier_init(&room.left[i], 32);
        }
        mn_mbarrier_init_fence();
        mn_state_scan_find(room.place, job, n_slices, 16 * MN_DELTA_STRIPS);
    }
    __syncthreads();
    if (threadIdx.x < MN_APART_GROUP) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        mn_ws_scan<KP>(room, job);
    } else if (threadIdx.x < 2 * MN_APART_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 144;");
        mn_ws_score<KP>(room, job.scale);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        mn_ws_load<KP, FOLLOWS>(room, job, maps, ready);
        if (FOLLOWS && blockIdx.x == 0) mn_pdl_wait();
    }
#endif
}

/* Whether the kernel serves a call: where there are rows that the copy engine can bring. Fills in
 * the maps. Few columns and heads leave processors without a block, and still it ends before
 * blocks of fewer strips would. */
inline bool mn_delta_goes_ws(mn_ws_maps *maps, const mn_delta_job &job) {
    const mn_delta_args &p = job.p;
    const int64_t K = p.call.K, V = p.call.V;
    *maps = {};
    return K <= 128 && p.decay != MN_DECAY_CHANNEL && !p.w.data && job.packed[MN_DELTA_Q] &&
           job.packed[MN_DELTA_E] && job.packed[MN_DELTA_V] && job.packed[MN_DELTA_O] &&
           mn_device_is_sm90() && mn_tma_map(&maps->q, p.q, p.call, K, MN_DELTA_CHUNK) &&
           mn_tma_map(&maps->e, p.e, p.call, K, MN_DELTA_CHUNK) &&
           mn_tma_map(&maps->v, p.v, p.call, V, MN_DELTA_CHUNK) &&
           (!p.o.data || mn_tma_map(&maps->o, p.o, p.call, V, MN_DELTA_CHUNK));
}

inline int64_t mn_ws_slices(const mn_call &call) {
    return mn_ceil_div(call.V, MN_APART_GROUP / 2);
}

inline int64_t mn_ws_blocks(const mn_call &call) {
    return mn_ws_slices(call) * call.H * mn_n_spans(call);
}

template <int KP>
inline int mn_delta_ws(const mn_delta_job &job, const mn_ws_maps &maps,
                          cudaStream_t stream) {
    const int64_t blocks = mn_ws_blocks(job.p.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(mn_delta_ws_kernel<KP, false>, dim3((unsigned)blocks),
                               MN_APART_THREADS, sizeof(mn_ws_smem<KP>), stream, job, maps,
                               mn_ws_slices(job.p.call), mn_curve_ready{});
}

/* The same beside the launch in front, which makes the queries. */
template <int KP>
inline int mn_delta_ws_follow(const mn_delta_job &job, const mn_ws_maps &maps,
                                 const mn_curve_ready &ready, cudaStream_t stream) {
    const int64_t blocks = mn_ws_blocks(job.p.call);
    const size_t room = sizeof(mn_ws_smem<KP>);
    const auto kernel = mn_delta_ws_kernel<KP, true>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)room);
    if (code != cudaSuccess || blocks == 0) return code;
    return mn_launch_pdl(kernel, dim3((unsigned)blocks), MN_APART_THREADS, room, stream, job,
                           maps, mn_ws_slices(job.p.call), ready);
}

#endif
