/* delta_fwd_chunk.cu - delta forward over chunks of 64 tokens: T of all chunks at once, then the
 * state scan; and curvature before them where it makes the queries, which the scan then follows a
 * chunk or two behind.
 *
 * Serves mn_delta in bf16 (delta.cu): q, e, w (B,T,J,K) for J key heads, v, o (B,T,H,V), g (H),
 * (B,T,H) or (B,T,H,K), beta (B,T,H), states (N,H,K,V) in float32. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/delta/delta_intra_chunk.cuh"
#include "kernels/cuda/delta/delta_mma.cuh"
#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/curvature/curvature_ready.cuh"
#include "kernels/cuda/delta/delta_state_scan.cuh"
#include "kernels/cuda/delta/delta_fwd_wide_sm90.cuh"
#include "kernels/cuda/delta/delta_launch.cuh"
#include "kernels/cuda/delta/delta_intra_chunk_channel_sm90.cuh"
#include "kernels/cuda/delta/delta_scan_wide_keys_sm90.cuh"
#include "kernels/cuda/delta/delta_wy_inverse_sm90.cuh"
#include "kernels/cuda/delta/delta_state_scan_warp.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::delta {

using namespace curvature;

/* delta's states forward on Hopper, for keys of up to 128 and decays that channels share: the
 * state scan of delta_state_scan.cuh by three warpgroups that work apart.
 *
 *   X = V - Ed S     R = T X     O = Qd S + P R     S <- d S + Wd'R
 *   Ed_t = exp(G_t) e_t     Qd_t = scale exp(G_t) q_t     Wd_t = beta_t exp(G_L - G_t) w_t
 *   P_ts = scale beta_s q_t.w_s exp(G_t - G_s), s <= t             d = exp(G_L), L the last token
 *
 * with G_t the sum of g from the chunk's start to token t, and w = e. The first warpgroup keeps S
 * (K, 64 value columns) in registers, the second computes P (64,64), and of the third one warp
 * loads chunks ahead by TMA and one stores results. As P is computed here, what comes before the
 * scan needs no queries, which may still be in the making then, and while the scan goes on
 * (curvature_ready.cuh). The code of a warpgroup is kept short, because the warps of a quarter of a
 * processor run three kinds of it in turn. */

enum {
    MN_FWD_CHUNK_WARPGROUP = 32 * MN_DELTA_COL_TILES,    // threads
    MN_FWD_CHUNK_THREADS = 2 * MN_FWD_CHUNK_WARPGROUP + MN_DELTA_PRODUCERS,
    MN_FWD_CHUNK_STAGES = 3,                       // chunks under way
};

/* A chunk in shared memory: `front` has e (64,KP), v (64, 64 columns), T and P (64,64); P is
 * written by the second warpgroup, all else is loaded. */
template <int KP>
struct alignas(1024) mn_fwd_chunk_stage {
    mn_scan_front<KP> front;
    alignas(1024) unsigned char queries[mn_tile_bytes<KP>()];
    alignas(16) mn_delta_log_decays log_decays;
};

template <int KP>
struct mn_fwd_chunk_smem {
    mn_fwd_chunk_stage<KP> stage[MN_FWD_CHUNK_STAGES];
    alignas(1024) unsigned char out[2][mn_tile_bytes<64>()];
    // a stage is loaded, its P is written, it may be loaded again
    uint64_t full[MN_FWD_CHUNK_STAGES], scored[MN_FWD_CHUNK_STAGES], empty[MN_FWD_CHUNK_STAGES];
    uint64_t out_full[2], out_empty[2];
    mn_scan_coord place;
};

#if MN_HAS_WGMMA

/* ---- the producer warpgroup ------------------------------------------------------------------ */

/* Loads q, e, v, T and the decays of a chunk into a stage. One lane calls. */
template <int KP>
__device__ inline void mn_fwd_chunk_tma_load(mn_fwd_chunk_stage<KP> &to, uint64_t *full,
                                    const mn_delta_params &job, const mn_fwd_chunk_maps &maps,
                                    const mn_scan_coord &at, int chunk) {
    constexpr int matrix = MN_DELTA_MATRIX * (int)sizeof(mn_bf16);
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    const int h = (int)at.h, b = (int)at.span.b, t = (int)at.span.t0 + chunk * MN_DELTA_CHUNK;
    const int key = (int)at.key;
    mn_mbarrier_arrive_expect_tx(full, (2 * (KP / 64) + 2) * matrix
                                 + (int)sizeof(mn_delta_log_decays));
#pragma unroll
    for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
        mn_tma_load(to.front.keys + smem_tile * matrix, maps.e, full, 64 * smem_tile, key, t, b);
        mn_tma_load(to.queries + smem_tile * matrix, maps.q, full, 64 * smem_tile, key, t, b);
    }
    mn_tma_load(to.front.values, maps.v, full, (int)at.column0, h, t, b);
    mn_tma_load_1d(to.front.T, job.workspace.T + index * MN_DELTA_MATRIX, matrix, full);
    mn_tma_load_1d(&to.log_decays, job.workspace.log_decays + index,
                     (int)sizeof(mn_delta_log_decays), full);
}

/* The same by all threads of the warpgroup, with zeros behind the sequence's last token. */
template <int KP>
__device__ __noinline__ void mn_fwd_chunk_copy(mn_fwd_chunk_stage<KP> &to,
                                               const mn_delta_params &job,
                                           const mn_scan_coord &at, int chunk) {
    constexpr int n_threads = MN_DELTA_PRODUCERS, matrix = MN_DELTA_MATRIX * (int)sizeof(mn_bf16);
    const mn_delta_args &p = job.p;
    const int tid = mn_scan_producer_tid();
    const int64_t index = (at.first + chunk) * p.call.H + at.h;
    mn_scan_copy_keys<KP, false>(to.front.keys, job, p.e, true, nullptr, at, chunk);
    mn_scan_copy_keys<KP, false>(to.queries, job, p.q, true, nullptr, at, chunk);
    mn_tile_load<64, n_threads>(to.front.values, p.v, true, at.span, at.h,
                             (int64_t)chunk * MN_DELTA_CHUNK, mn_scan_chunk_len(at, chunk),
                                 at.column0,
                             min(p.call.V, at.column0 + at.columns), tid);
    mn_cp_async_raw(to.front.T, job.workspace.T + index * MN_DELTA_MATRIX, matrix, n_threads, tid);
    mn_cp_async_raw(&to.log_decays, job.workspace.log_decays + index,
                    (int)sizeof(mn_delta_log_decays), n_threads, tid);
    mn_cp_async_commit();
    mn_cp_async_wait<0>();
    mn_fence_proxy_async();
}

/* Loads chunk `chunk` while warp 1 stores the results of the one MN_FWD_CHUNK_STAGES before.
 * OVERLAPS: waits until curvature has stored the chunk's queries. */
template <int KP, bool OVERLAPS, bool REDO>
__device__ inline void mn_fwd_chunk_producer(mn_fwd_chunk_smem<KP> &smem,
                                             const mn_delta_params &job,
                                      const mn_fwd_chunk_maps &maps, const mn_curve_ready &ready) {
    const mn_scan_coord &at = smem.place;
    const int warp = threadIdx.x / 32 % 4;
    mn_curve_waiting queries;
    if (!OVERLAPS) mn_pdl_wait();    // T of the launch in front
    if (OVERLAPS) queries.begin(ready, job.p.call, at.n, at.h);
    for (int chunk = 0; chunk < at.n_chunks + MN_FWD_CHUNK_STAGES; chunk++) {
        const int slot = chunk % MN_FWD_CHUNK_STAGES, iter = chunk / MN_FWD_CHUNK_STAGES;
        const int result = chunk - MN_FWD_CHUNK_STAGES;
        if (chunk < at.n_chunks) {
            mn_mbarrier_wait(&smem.empty[slot], (iter & 1) ^ 1);
            if (!mn_fwd_chunk_is_full<REDO>(job, at, chunk)) {
                if (OVERLAPS) queries.wait(ready, job.p.call.H, chunk);
                mn_fwd_chunk_copy<KP>(smem.stage[slot], job, at, chunk);
                mn_mbarrier_arrive(&smem.full[slot]);
            } else if (mn_scan_producer_tid() == 0) {
                if (OVERLAPS) queries.wait(ready, job.p.call.H, chunk);
                mn_fwd_chunk_tma_load<KP>(smem.stage[slot], &smem.full[slot], job, maps, at, chunk);
            } else {
                mn_mbarrier_arrive(&smem.full[slot]);
            }
        }
        if (warp != 1 || result < 0) continue;
        mn_mbarrier_wait(&smem.out_full[result % 2], result / 2 & 1);
        mn_fwd_chunk_store_out<REDO>(job, maps, at, smem.out[result % 2], at.column0, result);
        mn_mbarrier_arrive(&smem.out_empty[result % 2]);
    }
}

/* ---- the warpgroup that computes scores ------------------------------------------------------ */

/* Stores P (64,64) of every chunk to its stage; a warp has 16 rows. */
template <int KP>
__device__ inline void mn_fwd_chunk_scores(mn_fwd_chunk_smem<KP> &smem, float scale) {
    const int lane = threadIdx.x % 32, block = threadIdx.x / 32 % 4;
    for (int i = 0; i < MN_FWD_CHUNK_STAGES; i++) {    // what is above the diagonal stays zero
        uint4 *rows = (uint4 *)(smem.stage[i].front.P + block * 16 * 128);
        for (int k = lane; k < 16 * 8; k += 32) rows[k] = make_uint4(0, 0, 0, 0);
    }
    const int n_chunks = smem.place.n_chunks;
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        const int slot = chunk % MN_FWD_CHUNK_STAGES;
        mn_fwd_chunk_stage<KP> &in = smem.stage[slot];
        float sum[8][4] = {};
        mn_mbarrier_wait(&smem.full[slot], chunk / MN_FWD_CHUNK_STAGES & 1);
        mn_wgmma_scores_start<KP>(sum, mn_shared_u32(in.queries), mn_shared_u32(in.front.keys));
        const mn_delta_score_decays by = mn_delta_score_decays_of(in.log_decays, block);
        mn_mma_wait<true>();
        const auto put = [&](int t, int s, float x, float y) {
            *(unsigned *)(in.front.P + mn_tile_swizzle(t, s / 8) + s % 8 * 2) =
                mn_bf16x2(scale * x, scale * y);
        };
        mn_delta_put_scores(sum, by, in.log_decays, block, true, put);
        mn_fence_proxy_async();
        mn_mbarrier_arrive_warp(&smem.scored[slot]);
    }
}

/* ---- the warpgroup that keeps the state ------------------------------------------------------ */

/* For each chunk: X, R, O and the next S as in the equations above, all transposed; O goes to
 * smem.out, the last S to p.state. */
template <int KP>
__device__ inline void mn_fwd_chunk_state_scan(mn_fwd_chunk_smem<KP> &smem,
                                               const mn_delta_params &job) {
    const mn_scan_coord &at = smem.place;
    const int col_tile = threadIdx.x / 32, n_chunks = at.n_chunks;
    mn_scan_state<KP, true, 1> S;
    S.load(job, at);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        const int slot = chunk % MN_FWD_CHUNK_STAGES, phase = chunk / MN_FWD_CHUNK_STAGES & 1;
        mn_fwd_chunk_stage<KP> &in = smem.stage[slot];
        float X[8][4], R[8][4], O[8][4];
        unsigned a[KP / 16][4], x[4][4], r[4][4];
#pragma unroll
        for (int k = 0; k < KP / 16; k++) mn_frag_a_of(a[k], S.at[2 * k], S.at[2 * k + 1]);
        mn_mbarrier_wait(&smem.full[slot], phase);
        mn_mma_fence<true>();
        mn_fwd_chunk_mma<false>(X, a, in.front.keys);
        mn_fwd_chunk_mma<false>(O, a, in.queries);
        const float cum_decay = in.log_decays.gamma[MN_DELTA_CHUNK - 1];
#pragma unroll
        for (int i = 0; i < KP / 2; i++) S.at[i / 4][i % 4] *= cum_decay;
        mn_mma_wait<true, 1>();
        mn_fwd_chunk_residuals(X, in.front.values, in.log_decays.gamma, col_tile);
        mn_scan_frags_a(x, X);
        mn_mma_fence<true>();
        mn_fwd_chunk_mma<false>(R, x, in.front.T);
        mn_mma_wait<true, 1>();
        mn_scan_scale_tokens(O, in.log_decays.gamma, job.scale);
        mn_mma_wait<true>();
        mn_scan_frags_a(r, R);
        mn_scan_scale_tokens(R, in.log_decays.write, 1.0f);
        mn_scan_frags_a(x, R);
        mn_mbarrier_wait(&smem.scored[slot], phase);
        mn_mma_fence<true>();
        mn_fwd_chunk_mma<true>(O, r, in.front.P);
        S.add(x, in.front.keys);
        mn_mma_commit<true>();
        mn_mbarrier_wait(&smem.out_empty[chunk % 2], (chunk / 2 & 1) ^ 1);
        mn_mma_wait<true, 1>();
        mn_fwd_chunk_stage_out(smem.out[chunk % 2], O, threadIdx.x);
        mn_mma_wait<true>();
        mn_fence_proxy_async();
        mn_mbarrier_arrive_warp(&smem.out_full[chunk % 2]);
        mn_mbarrier_arrive_warp(&smem.empty[slot]);
    }
    S.store(job, at);
}

#endif

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Rows for the first time; in front of numbers that are not finite again, with T that a launch in
 * front has made, or which all is made of in one: blocks of a head's slices make the same T. */
enum mn_fwd_chunk_redo { MN_FWD_CHUNK_FIRST, MN_FWD_CHUNK_REDO_SCAN, MN_FWD_CHUNK_REDO_ALL };

/* Whether one launch looks at the last rows and makes others again; false: two do. */
static const bool redoes_in_one_launch = true;

/* Grid: blocks of 384 threads, block = (n * H + h) * n_slices + slice for sequence n, head h and 64
 * value columns. A block goes through the chunks of its sequence in order.
 * Loads   for each chunk q, e (64,K), v (64, 64 columns), workspace.T (64,64) and log_decays; at
 *         the start state0 (K, 64 columns), zeros where there is none.
 * Stores  o (64, 64 columns) for each chunk where p.o is given; at the end state, where it is
 *         given.
 * OVERLAPS: runs beside the launches in front, for which the first block waits at its end. */
template <int KP, bool OVERLAPS, mn_fwd_chunk_redo REDOES>
__global__ void __launch_bounds__(MN_FWD_CHUNK_THREADS, 1)
delta_fwd_chunk_sm90_kernel(const __grid_constant__ mn_delta_params job,
                      const __grid_constant__ mn_fwd_chunk_maps maps, int64_t n_slices,
                      mn_curve_ready ready) {
#if MN_HAS_WGMMA
    constexpr bool REDO = REDOES != MN_FWD_CHUNK_FIRST;
    extern __shared__ __align__(1024) unsigned char scan_smem_bytes[];
    mn_fwd_chunk_smem<KP> &smem = *(mn_fwd_chunk_smem<KP> *)scan_smem_bytes;
    if (job.segments.part == MN_DELTA_SEGMENT_FIRST) mn_pdl_launch_dependents();
    if (REDOES == MN_FWD_CHUNK_REDO_ALL) {
        const int64_t head = blockIdx.x / n_slices;    // n * H + h
        const mn_delta_chunk_place place = mn_delta_cut_chunk(
            job, MN_DELTA_CHUNK, head / job.p.call.H, head % job.p.call.H);
        if (place.tile.n_rows == 0) return;
        mn_wy_inverse_redo<KP, MN_FWD_CHUNK_THREADS>(
            *(mn_wy_inverse_smem<KP, false> *)scan_smem_bytes, job, place);
        mn_fence_proxy_async();
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < MN_FWD_CHUNK_STAGES; i++) {
            mn_mbarrier_init(&smem.full[i], MN_DELTA_PRODUCERS);
            mn_mbarrier_init(&smem.scored[i], MN_FWD_CHUNK_WARPGROUP / 32);
            mn_mbarrier_init(&smem.empty[i], MN_FWD_CHUNK_WARPGROUP / 32);
        }
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.out_full[i], MN_FWD_CHUNK_WARPGROUP / 32);
            mn_mbarrier_init(&smem.out_empty[i], 32);
        }
        mn_mbarrier_init_fence();
        mn_scan_find_coord<false, REDO>(smem.place, job, n_slices, 16 * MN_DELTA_COL_TILES,
                                        job.p.state0, job.p.state);
    }
    __syncthreads();
    if (REDO && smem.place.n_chunks == 0) return;
    if (threadIdx.x < MN_FWD_CHUNK_WARPGROUP) {
        mn_setmaxnreg_inc<240>();
        mn_fwd_chunk_state_scan<KP>(smem, job);
    } else if (threadIdx.x < 2 * MN_FWD_CHUNK_WARPGROUP) {
        mn_setmaxnreg_dec<144>();
        mn_fwd_chunk_scores<KP>(smem, job.scale);
    } else {
        mn_setmaxnreg_dec<120>();
        mn_fwd_chunk_producer<KP, OVERLAPS, REDO>(smem, job, maps, ready);
        if (OVERLAPS && blockIdx.x == 0) mn_pdl_wait();
    }
#endif
}

/* Whether the kernel serves a call: K <= 128, a decay that channels share, w = e, and rows that TMA
 * can load (16-byte starts). Fills in the maps. Few columns and heads leave processors without a
 * block, and still it ends before blocks of fewer column tiles would. */
inline bool mn_delta_fwd_chunk_supported(mn_fwd_chunk_maps *maps, const mn_delta_params &job) {
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

inline int64_t mn_fwd_chunk_slices(const mn_call &call) {
    return mn_ceil_div(call.V, MN_FWD_CHUNK_WARPGROUP / 2);
}

inline int64_t mn_fwd_chunk_blocks(const mn_call &call) {
    return mn_fwd_chunk_slices(call) * call.H * mn_n_spans(call);
}

/* Blocks of whole sequences begin beside the end of the launch that makes T. Maps of segments begin
 * beside the first, which so may not itself begin before T is there. */
template <int KP>
inline int mn_delta_fwd_chunk_sm90(const mn_delta_params &job, const mn_fwd_chunk_maps &maps,
                                   cudaStream_t stream, int segments = 0,
                                   mn_fwd_chunk_redo redo = MN_FWD_CHUNK_REDO_SCAN) {
    const int64_t blocks = mn_fwd_chunk_slices(job.p.call) * job.p.call.H *
                           mn_delta_scan_units(job.p.call, job.segments, segments);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const auto kernel =
        !job.cuts ? delta_fwd_chunk_sm90_kernel<KP, false, MN_FWD_CHUNK_FIRST>
        : redo == MN_FWD_CHUNK_REDO_ALL
            ? delta_fwd_chunk_sm90_kernel<KP, false, MN_FWD_CHUNK_REDO_ALL>
            : delta_fwd_chunk_sm90_kernel<KP, false, MN_FWD_CHUNK_REDO_SCAN>;
    const bool whole = job.segments.part == MN_DELTA_WHOLE;
    return mn_launch_smem_behind(job.cuts || whole, kernel,
                                 dim3((unsigned)blocks), MN_FWD_CHUNK_THREADS,
                                 sizeof(mn_fwd_chunk_smem<KP>), stream, job, maps,
                                 mn_fwd_chunk_slices(job.p.call), mn_curve_ready{});
}

/* The same beside the launch in front, which computes the queries. */
template <int KP>
inline int mn_delta_fwd_chunk_sm90_pdl(const mn_delta_params &job, const mn_fwd_chunk_maps &maps,
                                 const mn_curve_ready &ready, cudaStream_t stream) {
    const int64_t blocks = mn_fwd_chunk_blocks(job.p.call);
    const size_t smem = sizeof(mn_fwd_chunk_smem<KP>);
    const auto kernel = delta_fwd_chunk_sm90_kernel<KP, true, MN_FWD_CHUNK_FIRST>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (code != cudaSuccess || blocks == 0) return code;
    return mn_launch_pdl(kernel, dim3((unsigned)blocks), MN_FWD_CHUNK_THREADS, smem, stream, job,
                           maps, mn_fwd_chunk_slices(job.p.call), ready);
}

static int sm_count(void) {
    int device = 0, count = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return count;
}

/* The scan beside the curvature kernel that computes its queries, a chunk or two behind. */
template <int KP>
static int forward_sm90_pdl(const mn_delta_params &job, const mn_fwd_chunk_maps &maps,
                            const mn_curve_beside &query,
                  cudaStream_t stream) {
    int code = mn_curve_beside_sums(query, stream);
    if (code == cudaSuccess) code = mn_delta_wy_inverse_sm90<KP>(job, maps.e, false, stream);
    if (code == cudaSuccess) code = mn_curve_beside_launch(query, stream);
    return code == cudaSuccess ? mn_delta_fwd_chunk_sm90_pdl<KP>(job, maps, query.ready, stream)
        : code;
}

/* Whether blocks have 128 value columns, with the same bits (delta_fwd_wide_sm90.cuh): where those
 * of 64 are more than processors, half as many then fill the GPU. Not for many packed sequences,
 * whose last chunks a single warp copies. */
template <int KP>
static bool is_wide(const mn_delta_params &job) {
    const mn_call &call = job.p.call;
    const int64_t blocks = mn_fwd_chunk_blocks(call), processors = sm_count();
    return KP == MN_FWD_WIDE_KEYS && !job.cuts && !job.p.query &&
           mn_fwd_chunk_slices(call) % MN_FWD_WIDE_SLICES == 0 && blocks > processors &&
           (!call.cu_seqlens || blocks <= 4 * processors);
}

/* The scan behind T, with long sequences by segments where `cuts`. */
template <int KP>
static int scan_sm90(const mn_delta_params &job, const mn_fwd_chunk_maps &maps, bool cuts,
                     cudaStream_t stream) {
    if constexpr (KP == MN_FWD_WIDE_KEYS) {
        if (!cuts && is_wide<KP>(job)) return mn_delta_fwd_wide_sm90<KP>(job, maps, stream);
    }
    if (!cuts) return mn_delta_fwd_chunk_sm90<KP>(job, maps, stream);
    mn_delta_params tiled = job;
    tiled.T_tiled = true;
    return mn_delta_scan_segments<KP, false>(
        tiled, stream, [&](const mn_delta_params &part, int segments) {
            return mn_delta_fwd_chunk_sm90<KP>(part, maps, stream, segments);
        });
}

/* Where all blocks of curvature and of the scan are resident at once, the scan runs beside
 * curvature; else T alone is computed beside it. The bits are the same. */
template <int KP>
static int forward_sm90(const mn_delta_params &job, const mn_fwd_chunk_maps &maps, void *query_work,
                 cudaStream_t stream) {
    const mn_curvature_args *query = job.p.query;
    mn_curve_beside overlapped;
    const bool cuts = mn_delta_has_segments(job);
    int code = cudaSuccess;
    if (job.cuts && !cuts && redoes_in_one_launch) {
        return mn_delta_fwd_chunk_sm90<KP>(job, maps, stream, 0, MN_FWD_CHUNK_REDO_ALL);
    }
    if (!cuts && query && mn_curve_beside_of(&overlapped, query, query_work) &&
        mn_curve_beside_blocks(overlapped) + mn_fwd_chunk_blocks(job.p.call) <= sm_count()) {
        return forward_sm90_pdl<KP>(job, maps, overlapped, stream);
    }
    if (query) code = mn_curvature_forward_cuda(query, query_work, stream);
    if (code == cudaSuccess) code = mn_delta_wy_inverse_sm90<KP>(job, maps.e, query != nullptr,
                                                                 stream);
    return code == cudaSuccess ? scan_sm90<KP>(job, maps, cuts, stream) : code;
}

/* The scan of delta_state_scan.cuh, behind the intra-chunk stage; on Hopper, where keys have more
 * than 128 channels, that of delta_scan_wide_keys_sm90.cuh. */
template <int KP, bool CHANNEL>
static int scan(const mn_delta_params &job, cudaStream_t stream) {
    const auto launch = [&](const mn_delta_params &part, int segments) {
        return mn_delta_state_scan<KP>(delta_state_scan_kernel<KP, CHANNEL, MN_SCAN_OUTPUT>,
                                       delta_state_scan_warp_kernel<KP, CHANNEL, false>, part,
                                       false, part.p.call.V, stream, segments);
    };
    if constexpr (KP <= 128) {
        if (mn_delta_has_segments(job)) {
            return mn_delta_scan_segments<KP, CHANNEL>(job, stream, launch);
        }
    } else if constexpr (!CHANNEL) {
        bool served;
        const int code = mn_delta_scan_wide_keys<MN_WIDE_OUTPUT>(job, job.p.call.V, &served,
                                                                 stream);
        if (served) return code;
    }
    return launch(job, 0);
}

/* T, P and decays of all chunks for the scan of delta_state_scan.cuh: keys of more than 128
 * channels that TMA brings have a kernel of Hopper's. */
template <int KP>
static int intra_chunk(const mn_delta_params &job, cudaStream_t stream) {
    if constexpr (KP > 128 && KP <= mn_delta_wy_inverse_keys) {
        bool served;
        const int code = mn_delta_intra_chunk_sm90<KP>(job, &served, stream);
        if (served) return code;
    }
    return mn_delta_intra_chunk_by_decay<KP>(job, stream);
}

template <int KP>
static int forward(const mn_delta_params &job, void *query_work, cudaStream_t stream) {
    if constexpr (KP <= 128) {
        mn_fwd_chunk_maps maps;
        if (mn_delta_fwd_chunk_supported(&maps, job)) {
            return forward_sm90<KP>(job, maps, query_work, stream);
        }
    }
    int code = cudaSuccess;
    if (job.p.query) code = mn_curvature_forward_cuda(job.p.query, query_work, stream);
    if (code == cudaSuccess) code = intra_chunk<KP>(job, stream);
    if (code != cudaSuccess) return code;
    return job.p.decay == MN_DECAY_CHANNEL ? scan<KP, true>(job, stream)
                                           : scan<KP, false>(job, stream);
}

/* Whether a block gets as much shared memory as the kernels of keys of K numbers take. Where there
 * is no GPU to ask, as when a run's memory is predicted, the answer is yes. */
static bool has_smem(int64_t K) {
    const int bytes = mn_device_props_current().shared_bytes;
    return bytes == 0 || bytes >= (K <= 64                ? MN_DELTA_LEAST_SMEM_64
                                   : K <= 128             ? MN_DELTA_LEAST_SMEM_128
                                   : mn_delta_tight_taken ? MN_DELTA_LEAST_SMEM_256
                                                          : MN_DELTA_LEAST_SMEM_256_LOOSE);
}

/* Sums over few value columns average the roundings of operands less: those of up to 32 lose more
 * than twice what storing in bf16 does. */
bool mn_delta_uses_chunks(const mn_delta_args *p) {
    return p->call.dtype == MN_BF16 && p->call.K >= 32 && p->call.K <= 256 && p->call.V > 32 &&
           has_smem(p->call.K);
}

bool mn_delta_chunk_forward_plan(mn_plan *plan, const mn_delta_args *p) {
    mn_delta_workspace workspace;
    size_t own, query = 0;
    return mn_delta_workspace_layout(&workspace, &own, p, nullptr, false) &&
           (!p->query || mn_curve_beside_plan(&query, p->query)) &&
           mn_add_size(&plan->shared_bytes, own, query);
}

/* A call, and rows in front of numbers that are not finite once more (delta_redo.cuh). */
template <int KP>
static int forward_kept(const mn_delta_params &job, void *query_work, cudaStream_t stream) {
    const int code = forward<KP>(job, query_work, stream);
    mn_delta_params redo = job;
    if (code != cudaSuccess || !job.p.o.data || job.p.call.T < 2) return code;
    redo.cuts = job.workspace.cuts;
    redo.p.query = nullptr, redo.p.state = {};
    return forward<KP>(redo, nullptr, stream);
}

int mn_delta_chunk_forward(const mn_delta_args *p, void *shared, void *stream) {
    mn_delta_params job;
    mn_delta_workspace workspace;
    size_t own;
    if (!mn_delta_make_params(&job, p, shared, false) ||
        !mn_delta_workspace_layout(&workspace, &own, p, nullptr, false)) {
        return cudaErrorNotSupported;
    }
    MN_DELTA_DISPATCH_K(forward_kept, p->call.K, (job, (char *)shared + own, (cudaStream_t)stream));
}

}    // namespace mneme::delta
