/* delta_bwd_chunk.cu - gradients of delta over chunks of 64 tokens, in five launches:
 *
 *   delta_intra_chunk*           A, P, T and decays of all chunks, as forward
 *   delta_scan_save_sm90         S in front of every chunk and R, to the workspace; elsewhere
 *                                delta_state_scan, SAVE
 *   delta_state_scan_bwd         dv, dstate0, and D behind every chunk and dX, to the workspace
 *   delta_grad*                  dq, de, dw of all chunks, and parts of dbeta and dg; on Hopper
 *                                dbeta and dg as such, but of groups with 256 channels
 *   delta_reduce_grads           dbeta and dg from these parts (decays per channel: dbeta alone,
 *                                where blocks have some of the channels)
 *
 * Of these the two scans need nothing of each other, and on Hopper run at once. What grad.v has of
 * a chunk is dX of it, which is stored in the workspace where grad.v is not wanted alone. */
#include "kernels/cuda/delta/delta_grad_channel.cuh"
#include "kernels/cuda/delta/delta_grad_sm90.cuh"
#include "kernels/cuda/delta/delta_intra_chunk_channel_sm90.cuh"
#include "kernels/cuda/delta/delta_launch.cuh"
#include "kernels/cuda/delta/delta_redo.cuh"
#include "kernels/cuda/delta/delta_scan_wide_keys_sm90.cuh"
#include "kernels/cuda/delta/delta_wy_inverse_sm90.cuh"
#include "kernels/cuda/delta/delta_state_scan_warp.cuh"
#include "kernels/delta_gpu.h"

namespace mneme::delta {

/* Cotangents that are not finite, in delta's way back
 * (docs/internals/causality.md).
 *
 * What comes into D that is not finite stays there: it shows in the first token's dv, or dk. Five
 * launches behind the others look at that and end at once where all is well. Else they find the
 * last token with such a cotangent and make the rows behind it again: the scan as if cotangents up
 * to it were zeros, as far as its chunk, and the gradients of that chunk. Rows up to it are NaN
 * there. Small ones let the next begin at once: each waits for the one in front of it to end, which
 * has done the same. */

/* Gradients of a group's keys are made again with those of all its heads, which need dX: dv of the
 * chunks in which sequence n is cut for others of the `times` heads with which h shares keys, and
 * not for itself, to dX. */
__device__ inline void mn_redo_others_dX(const mn_delta_params &job, const mn_out &dv,
                                         int times) {
    const mn_call &call = job.p.call;
    const int64_t n = blockIdx.x / call.H, h = blockIdx.x % call.H, first = h - h % times;
    const mn_span span = mn_span_at(call, n);
    for (int64_t other = first; other < first + times; other++) {
        const int chunk = job.cuts[n * call.H + other] / MN_DELTA_CHUNK;
        if (other == h || job.cuts[n * call.H + other] == 0) continue;
        if (job.cuts[blockIdx.x] > 0 && job.cuts[blockIdx.x] / MN_DELTA_CHUNK == chunk) continue;
        const int64_t from = (int64_t)chunk * MN_DELTA_CHUNK;
        const int64_t record = (mn_delta_first_slot(call, n, MN_DELTA_CHUNK) + chunk) * call.H + h;
        mn_bf16 *dX = job.workspace.dX + record * job.padded_v * MN_DELTA_CHUNK;
        for (int64_t k = threadIdx.x; k < job.padded_v * MN_DELTA_CHUNK;
             k += MN_DELTA_REDO_THREADS) {
            const int64_t j = k / MN_DELTA_CHUNK, t = from + k % MN_DELTA_CHUNK;
            if (j < call.V && t < span.length) {
                dX[k] = mn_row<mn_bf16>(dv, span.b, span.t0 + t, h)[j];
            } else {
                mn_put(dX + k, 0.0f);
            }
        }
    }
}

/* dv of the rows behind the cut, from dX, and NaN in dX in front of it. `times`: heads that share
 * keys, where Hopper's kernel adds up their gradients, else 0. Grid: n * H + h. */
__global__ void __launch_bounds__(MN_DELTA_REDO_THREADS)
delta_redo_values(const __grid_constant__ mn_delta_params job, const mn_out dv, int times) {
    const mn_call &call = job.p.call;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    if (times > 0 && dv.data) mn_redo_others_dX(job, dv, times);
    const int64_t record = mn_delta_record_of(job, blockIdx.x), h = blockIdx.x % call.H;
    if (record < 0) return;
    const int cut = job.cuts[blockIdx.x], from = cut % MN_DELTA_CHUNK, first = cut - from;
    const mn_span span = mn_span_at(call, blockIdx.x / call.H);
    const int count = (int)min((int64_t)MN_DELTA_CHUNK, span.length - first);
    mn_bf16 *dX = job.workspace.dX + record * job.padded_v * MN_DELTA_CHUNK;
    for (int64_t j = threadIdx.x; j < call.V; j += MN_DELTA_REDO_THREADS) {
        for (int t = 0; t < count; t++) {
            mn_bf16 &x = dX[j * MN_DELTA_CHUNK + t];
            if (t < from) mn_put(&x, __int_as_float(0x7fc00000));
            else if (dv.data) mn_row<mn_bf16>(dv, span.b, span.t0 + first + t, h)[j] = x;
        }
    }
}

inline int redo_values(const mn_delta_params &job, const mn_out &dv, int times,
                       cudaStream_t stream) {
    return mn_launch_smem_behind(true, delta_redo_values,
                                 dim3((unsigned)mn_delta_grad_blocks(job, 0)),
                                 MN_DELTA_REDO_THREADS, 0, stream, job, dv, times);
}

/* Sums over heads that share queries and keys once more, of the chunks that were cut. Grid: n * H +
 * h, tiles of KT channels; two heads of a group that are cut in one chunk store the same. */
template <int KT, int KP>
__global__ void __launch_bounds__(MN_DELTA_GRAD_THREADS)
delta_redo_fold(const __grid_constant__ mn_delta_params job,
                const __grid_constant__ mn_grad_fold fold) {
    mn_pdl_wait();
    const mn_grad_coord at = mn_grad_block_coord(job, KT, KP);
    const int64_t K = job.p.call.K;
    if (at.count == 0) return;
    mn_grad_fold_rows<KT>(fold.q, job.p.grad.q, fold.packed[0], fold.times, at, K);
    mn_grad_fold_rows<KT>(fold.e, job.p.grad.e, fold.packed[1], fold.times, at, K);
    mn_grad_fold_rows<KT>(fold.w, job.p.grad.w, fold.packed[2], fold.times, at, K);
}

template <int KP>
inline int redo_fold(const mn_delta_params &job, const mn_grad_fold &fold, cudaStream_t stream) {
    constexpr int KT = 64;
    if (fold.times == 0) return cudaSuccess;
    return mn_launch_smem_behind(true, delta_redo_fold<KT, KP>,
                                 dim3((unsigned)mn_delta_grad_blocks(job, 0), KP / KT),
                                 MN_DELTA_GRAD_THREADS, 0, stream, job, fold);
}

/* ---- dbeta and dg from the parts of blocks --------------------------------------------------- */

/* dbeta and dg of a chunk: dbeta_t is the sum of the parts, dg_t = sum over s >= t of dG_s +
 * dG_end.
 *
 * Grid: chunk slots * H blocks, a thread for each of the 64 tokens.
 * Loads   workspace.parts (n_partials, slots * H), records of dG (64), dbeta (64) and dG_end.
 * Stores  grad.beta (B,T,H) where given; grad.g (B,T,H) for a decay per token; for a decay per head
 *         the chunk's sum of dg in workspace.whole (slots * H). */
__global__ void __launch_bounds__(MN_DELTA_CHUNK)
delta_reduce_grads(const __grid_constant__ mn_delta_params job, int n_partials) {
    __shared__ float sums[2][MN_DELTA_CHUNK];
    const mn_delta_args &p = job.p;
    const mn_delta_partial *parts = (const mn_delta_partial *)job.workspace.parts;
    if (job.cuts) mn_pdl_wait();
    const int64_t record = mn_delta_record_of(job, blockIdx.x), records = mn_delta_records(job);
    if (record < 0) return;
    const int64_t h = record % p.call.H, slot = record / p.call.H;
    const mn_tile_span tile = mn_tile_at(p.call, MN_DELTA_CHUNK, slot);
    const int t = threadIdx.x;
    float G = 0.0f, beta = 0.0f, end = 0.0f;
    for (int i = 0; i < n_partials && tile.n_rows > 0; i++) {
        const mn_delta_partial &part = parts[records * i + record];
        G += part.G[t];
        beta += part.beta[t];
        end += part.end;
    }
    int now = 0;
    sums[0][t] = G;
    __syncthreads();
    for (int step = 1; step < MN_DELTA_CHUNK; step <<= 1, now ^= 1) {    // sums from t to the end
        sums[now ^ 1][t] = sums[now][t] + (t + step < MN_DELTA_CHUNK ? sums[now][t + step] : 0.0f);
        __syncthreads();
    }
    const float dg = sums[now][t] + end;
    __syncthreads();
    sums[0][t] = t < tile.n_rows ? dg : 0.0f;
    __syncthreads();
    if (t == 0 && job.workspace.whole) {
        float sum = 0.0f;
        for (int i = 0; i < MN_DELTA_CHUNK; i++) sum += sums[0][i];
        job.workspace.whole[record] = sum;
    }
    if (t >= tile.n_rows) return;
    const int64_t when = tile.span.t0 + tile.first + t;
    mn_bf16 *to_beta = mn_row<mn_bf16>(p.grad.beta, tile.span.b, when, h);
    if (to_beta) mn_put(to_beta, beta);
    if (p.decay != MN_DECAY_TOKEN || !p.grad.g.data) return;
    mn_put(mn_row<mn_bf16>(p.grad.g, tile.span.b, when, h), dg);
}

/* dg of a decay per head (H): a block sums workspace.whole (slots, H) over the slots of head h,
 * each thread's in their order, then the threads'. */
__global__ void __launch_bounds__(256)
delta_head_decay_grad(const __grid_constant__ mn_delta_params job, int64_t slots) {
    __shared__ float smem[32];
    const int64_t h = blockIdx.x;
    float sum = 0.0f;
    for (int64_t slot = threadIdx.x; slot < slots; slot += 256) {
        sum += job.workspace.whole[slot * job.p.call.H + h];
    }
    sum = mn_group_sum<256>(sum, smem);
    if (threadIdx.x == 0) mn_put(mn_row<mn_bf16>(job.p.grad.g, 0, 0, h), sum);
}

/* ---- S and R for the way back, on Hopper ----------------------------------------------------- */

/* The scan forward for decays that channels share, w = e and keys of up to 128: S in front of every
 * chunk and R of each, with the bits of delta_state_scan.cuh.
 *
 * One warpgroup keeps S and does nothing but what its next product waits for: a warp loads chunks
 * ahead by TMA, and S and R leave through shared memory, from where one more warp has TMA store
 * them. Threads and shared memory are so few that a processor holds two blocks. */

enum {
    MN_SAVE_WARPGROUP = 32 * MN_DELTA_COL_TILES,
    // and a warp that loads, one that stores; whole warpgroups, or products wait for each other
    MN_SAVE_THREADS = 2 * MN_SAVE_WARPGROUP,
};

struct mn_save_maps {
    CUtensorMap e, v, T, S, R;
};

/* Two chunks are on their way, of whose fronts P is not used; results of one leave. */
template <int KP>
struct mn_save_smem {
    mn_scan_front<KP> front[2];
    alignas(1024) unsigned char S[mn_tile_bytes<KP>()];    // (64 columns, KP)
    unsigned char R[mn_tile_bytes<64>()];                  // (64 columns, 64 tokens)
    uint64_t full[2], empty[2], out_full, out_empty;
    mn_scan_coord place;
};

#if MN_HAS_WGMMA

/* Loads e, v, T and the decays of a chunk. All lanes of the warp call and arrive. */
template <int KP>
__device__ inline void mn_save_load(mn_scan_front<KP> &to, uint64_t *full,
                                    const mn_delta_params &job, const mn_save_maps &maps,
                                    const mn_scan_coord &at, int chunk) {
    const mn_delta_args &p = job.p;
    const int lane = threadIdx.x % 32, count = mn_scan_chunk_len(at, chunk);
    const bool copies = p.call.cu_seqlens && count < MN_DELTA_CHUNK;    // others' rows follow
    constexpr int log_decays = 2 * MN_DELTA_CHUNK * (int)sizeof(float);
    const int64_t index = (at.first + chunk) * p.call.H + at.h;
    const int64_t first = (int64_t)chunk * MN_DELTA_CHUNK, t = at.span.t0 + first;
    if (copies) {
        mn_tile_load<KP, 32>(to.keys, p.e, true, at.span, at.key, first, count, 0, p.call.K, lane);
        mn_tile_load<64, 32>(to.values, p.v, true, at.span, at.h, first, count, at.column0,
                             min(p.call.V, at.column0 + at.columns), lane);
        mn_cp_async_commit();
        mn_cp_async_wait<0>();
        mn_fence_proxy_async();
        __syncwarp();
    }
    if (lane > 0) {
        mn_mbarrier_arrive(full);
        return;
    }
    mn_mbarrier_arrive_expect_tx(full, (int)sizeof to.T + log_decays +
                                           (copies ? 0 : (int)(sizeof to.keys + sizeof to.values)));
    if (!copies) {
        mn_scan_tma_load<KP>(to.keys, maps.e, full, 0, at.key, t, at.span.b);
        mn_scan_tma_load<64>(to.values, maps.v, full, at.column0, at.h, t, at.span.b);
    }
    mn_scan_tma_load<64>(to.T, maps.T, full, 0, 0, index * MN_DELTA_CHUNK, 0);
    mn_tma_load_1d(to.gamma, job.workspace.log_decays[index].gamma, log_decays, full);
}

template <int KP>
__device__ inline void mn_save_producer(mn_save_smem<KP> &smem, const mn_delta_params &job,
                                        const mn_save_maps &maps) {
    const mn_scan_coord at = smem.place;
    for (int chunk = 0; chunk < at.n_chunks; chunk++) {
        const int slot = chunk % 2;
        mn_mbarrier_wait(&smem.empty[slot], (chunk / 2 & 1) ^ 1);
        mn_save_load<KP>(smem.front[slot], &smem.full[slot], job, maps, at, chunk);
    }
}

/* Stores S and R of all chunks. One lane calls. */
template <int KP>
__device__ inline void mn_save_store(mn_save_smem<KP> &smem, const mn_delta_params &job,
                                     const mn_save_maps &maps) {
    const mn_scan_coord at = smem.place;
    for (int chunk = 0; chunk < at.n_chunks; chunk++) {
        const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
        const int row = (int)(index * job.padded_v + at.column0);
        mn_mbarrier_wait(&smem.out_full, chunk & 1);
#pragma unroll
        for (int i = 0; i < KP / 64; i++) {
            mn_tma_store(maps.S, smem.S + i * mn_tile_bytes<64>(), 64 * i, 0, row, 0);
        }
        mn_tma_store(maps.R, smem.R, 0, 0, row, 0);
        mn_tma_store_wait_read();
        mn_mbarrier_arrive(&smem.out_empty);
    }
}

/* A warp's 16 rows of left operands, 16 N columns, to a tile in shared memory. */
template <int N>
__device__ inline void mn_save_stage_out(unsigned char *tile, const unsigned (&x)[N][4]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < N; k++) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                         mn_shared_u32(tile) + mn_tile_swizzle(row, 2 * k + lane / 16)),
                     "r"(x[k][0]), "r"(x[k][1]), "r"(x[k][2]), "r"(x[k][3]) : "memory");
    }
}

template <int KP>
__device__ inline void mn_save_state_scan(mn_save_smem<KP> &smem, const mn_delta_params &job) {
    const mn_scan_coord &at = smem.place;
    const int col_tile = threadIdx.x / 32, n_chunks = at.n_chunks;
    mn_scan_state<KP, true, 1> S;
    S.load(job, at);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        const int slot = chunk % 2;
        mn_scan_front<KP> &front = smem.front[slot];
        float X[8][4] = {}, R[8][4] = {};
        unsigned a[KP / 16][4], x[4][4];
#pragma unroll
        for (int k = 0; k < KP / 16; k++) mn_frag_a_of(a[k], S.at[2 * k], S.at[2 * k + 1]);
        mn_mbarrier_wait(&smem.out_empty, (chunk & 1) ^ 1);
        mn_mbarrier_wait(&smem.full[slot], chunk / 2 & 1);
        mn_mma_fence<true>();
#pragma unroll
        for (int k = 0; k < KP / 16; k++) {
            mn_mma_abt<true>(X, a[k], mn_shared_u32(front.keys), 16 * k, 0);
        }
        mn_mma_commit<true>();
        mn_save_stage_out(smem.S, a);
        S.template decay<false>(front);
        mn_mma_wait<true>();
        mn_scan_residuals<KP, false>(x, X, front, col_tile, 0);
        mn_scan_mma_lower<true>(R, x, mn_shared_u32(front.T), 0);
        mn_scan_frags_a(x, R);
        mn_save_stage_out(smem.R, x);
        mn_fence_proxy_async();
        mn_mbarrier_arrive(&smem.out_full);
        mn_scan_scale_tokens(R, front.write, 1.0f);
        mn_scan_frags_a(x, R);
        mn_mma_fence<true>();
        S.add(x, front.keys);
        mn_mma_commit_wait<true>();
        mn_mbarrier_arrive(&smem.empty[slot]);
    }
    S.store(job, at);
}

#endif

/* Grid: block = (n * H + h) * n_slices + slice, a slice being 64 value columns; it goes through the
 * chunks of sequence n in order, or of a segment (mn_delta_scan_units).
 * Loads   e (64,K), v (64, 64 columns), T (64,64) and the decays of each chunk; the state (K, 64
 *         columns) at the start.
 * Stores  S (64 columns, KP) in front of each chunk and R (64 columns, 64) of each, in the
 *         workspace; the state behind a first segment.
 * Launches behind it may begin at once: neither maps nor the scan back need what it leaves. */
template <int KP>
__global__ void __launch_bounds__(MN_SAVE_THREADS, 2)
delta_scan_save_sm90_kernel(const __grid_constant__ mn_delta_params job,
                            const __grid_constant__ mn_save_maps maps, int64_t n_slices) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char save_smem_bytes[];
    mn_save_smem<KP> &smem = *(mn_save_smem<KP> *)save_smem_bytes;
    mn_pdl_launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.full[i], 32);
            mn_mbarrier_init(&smem.empty[i], MN_SAVE_WARPGROUP);
        }
        mn_mbarrier_init(&smem.out_full, MN_SAVE_WARPGROUP);
        mn_mbarrier_init(&smem.out_empty, 1);
        mn_mbarrier_init_fence();
        mn_scan_find_coord<false, false>(smem.place, job, n_slices, 16 * MN_DELTA_COL_TILES,
                                         job.p.state0, mn_out{});
    }
    __syncthreads();
    if (threadIdx.x >= MN_SAVE_WARPGROUP) {
        mn_setmaxnreg_dec<88>();
        if (threadIdx.x < MN_SAVE_WARPGROUP + 32) mn_save_producer<KP>(smem, job, maps);
        else if (threadIdx.x == MN_SAVE_WARPGROUP + 32) mn_save_store<KP>(smem, job, maps);
        return;
    }
    mn_setmaxnreg_inc<168>();
    mn_save_state_scan<KP>(smem, job);
#endif
}

/* Whether the kernel serves a call of `records` chunks and heads; fills in the maps. */
inline bool mn_delta_scan_save_supported(mn_save_maps *maps, const mn_delta_params &job) {
    const mn_delta_args &p = job.p;
    const mn_delta_workspace &workspace = job.workspace;
    const int64_t records = mn_tile_slots(p.call, MN_DELTA_CHUNK) * p.call.H;
    const int64_t K = mn_delta_padded_k(p.call.K), rows = records * job.padded_v;
    *maps = {};
    return mn_device_is_sm90() && K <= 128 && p.decay != MN_DECAY_CHANNEL && !p.w.data &&
           !job.pairs && job.packed[MN_DELTA_E] && job.packed[MN_DELTA_V] &&
           mn_tma_map(&maps->e, p.e, p.call, p.call.K, MN_DELTA_CHUNK) &&
           mn_tma_map(&maps->v, p.v, p.call, p.call.V, MN_DELTA_CHUNK) &&
           mn_delta_tma_map_rows(&maps->T, workspace.T, records * MN_DELTA_CHUNK,
                                 MN_DELTA_CHUNK) &&
           mn_delta_tma_map_rows(&maps->S, workspace.S, rows, K) &&
           mn_delta_tma_map_rows(&maps->R, workspace.R, rows, MN_DELTA_CHUNK);
}

/* As mn_delta_state_scan, over all of padded_v value columns. */
template <int KP>
inline int mn_delta_scan_save_sm90(const mn_delta_params &job, const mn_save_maps &maps,
                                   cudaStream_t stream, int segments) {
    const int64_t n_slices = job.padded_v / 64;
    const int64_t blocks =
        n_slices * job.p.call.H * mn_delta_scan_units(job.p.call, job.segments, segments);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(delta_scan_save_sm90_kernel<KP>, dim3((unsigned)blocks), MN_SAVE_THREADS,
                          sizeof(mn_save_smem<KP>), stream, job, maps, n_slices);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* dbeta and dg from `n_partials` parts, 0: all but for a decay per head is there, of `records` =
 * slots * H chunks. Without tokens the gradient of a decay per head is stored too, as zero. */
static int reduce_grads(const mn_delta_params &job, int64_t records, int n_partials,
                        cudaStream_t stream) {
    const mn_delta_args &p = job.p;
    int code = cudaSuccess;
    if (records > 0 && n_partials > 0) {
        const int64_t blocks = mn_delta_grad_blocks(job, records);
        code = mn_launch_smem_behind(job.cuts, delta_reduce_grads, dim3((unsigned)blocks),
                                     MN_DELTA_CHUNK, 0, stream, job, n_partials);
    }
    if (code != cudaSuccess || p.decay != MN_DECAY_HEAD || !p.grad.g.data) return code;
    delta_head_decay_grad<<<(unsigned)p.call.H, 256, 0, stream>>>(job, records / p.call.H);
    return mn_launch_status();
}

/* A, P, T and decays of all chunks. */
template <int KP>
static int intra_chunk(const mn_delta_params &job, cudaStream_t stream) {
    if constexpr (KP <= mn_delta_wy_inverse_keys) {
        bool served;
        const int code = mn_delta_intra_chunk_sm90<KP>(job, &served, stream);
        if (served) return code;
    }
    return mn_delta_intra_chunk_by_decay<KP>(job, stream);
}

/* Both scans, for all of padded_v columns of values; at once where the one that saves states is by
 * warps so few that a processor holds a block of each. */
template <int KP, bool CHANNEL>
static int scan(const mn_delta_params &job, cudaStream_t stream) {
    mn_save_maps save_maps;
    const bool saves = !CHANNEL && mn_delta_scan_save_supported(&save_maps, job);
    const bool beside = saves && !job.cuts;
    const mn_delta_params behind = mn_delta_back_apart(job);
    mn_delta_scan_kernel two_back = nullptr;
    if constexpr (KP <= 128 && !CHANNEL) two_back = delta_state_scan_bwd_kernel<KP, false, 2>;
    const auto forth = [&](const mn_delta_params &part, int segments) {
        if constexpr (KP <= 128 && !CHANNEL) {
            if (saves) return mn_delta_scan_save_sm90<KP>(part, save_maps, stream, segments);
        } else if constexpr (!CHANNEL) {
            bool served;
            const int code = mn_delta_scan_wide_keys<MN_WIDE_SAVE>(part, part.padded_v, &served,
                                                                   stream);
            if (served) return code;
        }
        return mn_delta_state_scan<KP>(delta_state_scan_kernel<KP, CHANNEL, MN_SCAN_SAVE>,
                                       delta_state_scan_warp_kernel<KP, CHANNEL, true>, part,
                                       false, part.padded_v, stream, segments);
    };
    const auto back = [&](const mn_delta_params &part, int segments) {
        if constexpr (KP > 128 && !CHANNEL) {
            bool served;
            const int code = mn_delta_scan_wide_keys<MN_WIDE_BACK>(part, part.padded_v, &served,
                                                                   stream);
            if (served) return code;
        }
        return mn_delta_state_scan<KP>(delta_state_scan_bwd_kernel<KP, CHANNEL>,
                                       delta_state_scan_bwd_warp_kernel<KP, CHANNEL>, part, true,
                                       part.padded_v, stream, segments, two_back, beside);
    };
    if constexpr (KP <= 128) {
        if (mn_delta_has_segments(job)) {
            if (beside) {
                return mn_delta_scan_segments_beside<KP, CHANNEL>(job, behind, stream, forth, back);
            }
            const int code = job.cuts ? cudaSuccess
                                      : mn_delta_scan_segments<KP, CHANNEL>(job, stream, forth);
            return code == cudaSuccess ? mn_delta_scan_segments_back<KP>(behind, stream, back)
                                       : code;
        }
    }
    const int code = job.cuts ? cudaSuccess : forth(job, 0);
    return code == cudaSuccess ? back(behind, 0) : code;
}

/* Numbers of gradients of all value heads' own, and arrivals. */
static bool size_fold(int64_t *grads, int64_t *arrivals, const mn_delta_args *p) {
    const mn_call &c = p->call;
    return mn_mul_i64(grads, c.B * c.T, c.H) && mn_mul_i64(grads, *grads, c.K) &&
           mn_mul_i64(arrivals, mn_tile_slots(c, MN_DELTA_CHUNK) * c.J,
                      mn_delta_padded_k(c.K) / 64);
}

/* dq, de, dw and parts of dbeta and dg, where Hopper's kernel does not serve. A redo's sums over
 * heads that share queries and keys follow it. */
template <int KT, int KP>
static int grad_by_threads(const mn_delta_params &job, const mn_grad_fold &fold, int64_t records,
                           cudaStream_t stream) {
    const bool channel = job.p.decay == MN_DECAY_CHANNEL;
    const dim3 blocks((unsigned)mn_delta_grad_blocks(job, records), KP / KT);
    int64_t grads, arrivals;
    if (fold.times > 0 && !job.cuts) {
        if (!size_fold(&grads, &arrivals, &job.p)) return cudaErrorNotSupported;
        const int code = (int)cudaMemsetAsync(fold.arrived, 0, (size_t)arrivals * sizeof(int),
                                              stream);
        if (code != cudaSuccess) return code;
    }
    const int code = mn_launch_smem_behind(
        job.cuts, channel ? delta_grad_channel_kernel<KT, KP, true> : delta_grad_kernel<KT, KP>,
        blocks, MN_DELTA_GRAD_THREADS,
        channel ? sizeof(mn_channel_grad_smem<KT>) : sizeof(mn_grad_smem<KT>), stream, job,
        job.cuts ? mn_grad_fold{} : fold);
    return code == cudaSuccess && job.cuts ? redo_fold<KP>(job, fold, stream) : code;
}

/* dq, de, dw, dbeta and dg; by Hopper's kernel where there are maps for it. */
template <int KT, int KP>
static int grad(const mn_delta_params &job, const mn_grad_tma_maps *maps, const mn_grad_fold &fold,
                int64_t records, cudaStream_t stream) {
    const bool channel = job.p.decay == MN_DECAY_CHANNEL;
    int n_partials = channel && KT == KP ? 0 : KP / KT, code = cudaSuccess;
    if (maps) {
        n_partials = KP > 128 && fold.times > 0 ? KP / 128 : 0;
        code = mn_delta_grad_sm90<KP>(mn_delta_grad_of_groups(job, fold), *maps, fold.times > 0,
                                      records, stream);
    } else {
        code = grad_by_threads<KT, KP>(job, fold, records, stream);
    }
    return code == cudaSuccess ? reduce_grads(job, records, n_partials, stream) : code;
}

/* Gradients by KT channels a block; `values`: dv of a redo. */
template <int KT, int KP>
static int backward_by(const mn_delta_params &job, const mn_grad_fold &fold, const mn_out &values,
                       cudaStream_t stream) {
    const int64_t records = mn_tile_slots(job.p.call, MN_DELTA_CHUNK) * job.p.call.H;
    mn_grad_tma_maps maps;
    const bool sm90 =
        mn_delta_grad_sm90_supported(&maps, mn_delta_grad_of_groups(job, fold), records);
    int code = job.cuts ? cudaSuccess : intra_chunk<KP>(job, stream);
    if (code != cudaSuccess) return code;
    code = job.p.decay == MN_DECAY_CHANNEL ? scan<KP, true>(job, stream)
                                           : scan<KP, false>(job, stream);
    if (code != cudaSuccess || records == 0) {
        return code != cudaSuccess ? code : reduce_grads(job, 0, KP / KT, stream);
    }
    if (job.cuts) code = redo_values(job, values, sm90 ? fold.times : 0, stream);
    if (code != cudaSuccess) return code;
    return grad<KT, KP>(job, sm90 ? &maps : nullptr, fold, records, stream);
}

/* Where there is little shared memory, blocks of gradients take 64 channels in place of 128. */
template <int KP>
static int backward(const mn_delta_params &job, const mn_grad_fold &fold, const mn_out &values,
                    cudaStream_t stream) {
    if constexpr (KP >= 128) {
        static_assert(sizeof(mn_channel_grad_smem<64>) <= MN_DELTA_LEAST_SMEM_64 &&
                          sizeof(mn_grad_smem<64>) <= MN_DELTA_LEAST_SMEM_64,
                      "what the GPU has to have");
        const size_t bytes = job.p.decay == MN_DECAY_CHANNEL ? sizeof(mn_channel_grad_smem<128>)
                                                             : sizeof(mn_grad_smem<128>);
        if (bytes > (size_t)mn_device_props_current().shared_bytes) {
            return backward_by<64, KP>(job, fold, values, stream);
        }
    }
    return backward_by<(KP < 128 ? KP : 128), KP>(job, fold, values, stream);
}

/* By sizes alone, as the caller leaves the sums to this then: not where Hopper's kernel of
 * gradients would serve larger groups than it adds up. */
extern "C" bool mn_delta_folds_groups(const void *args) {
    const mn_delta_args *p = (const mn_delta_args *)args;
    return mn_delta_uses_chunks(p) && p->call.J > 0 && p->call.J < p->call.H &&
           p->call.K % 8 == 0 &&
           (!mn_delta_grad_sm90_fits(*p) || p->call.H / p->call.J <= mn_grad_most_heads);
}

/* Behind the workspace, which is a multiple of 16 bytes: arrivals, then the gradients. */
static bool size_shared(size_t *all, size_t *own, const mn_delta_args *p) {
    mn_delta_workspace workspace;
    int64_t grads = 0, arrivals = 0;
    size_t bytes, more;
    if (!mn_delta_workspace_layout(&workspace, own, p, nullptr, true)) return false;
    *own = mn_ceil_div((int64_t)*own, 16) * 16;
    *all = *own;
    if (!mn_delta_folds_groups(p)) return true;
    if (!size_fold(&grads, &arrivals, p)) return false;
    const int n = (p->grad.q.data != NULL) + (p->grad.e.data != NULL) + (p->grad.w.data != NULL);
    arrivals = mn_ceil_div(arrivals, 4) * 4;
    return mn_mul_size(&more, (size_t)arrivals, sizeof(int)) &&
           mn_mul_size(&bytes, (size_t)grads, n * sizeof(mn_bf16)) &&
           mn_add_size(&more, more, bytes) && mn_add_size(all, *own, more);
}

/* The kernel's gradients become those of all value heads; theirs are the fold's. */
static int make_fold(mn_grad_fold *fold, mn_delta_params *job, char *memory) {
    const mn_delta_args p = job->p;
    const mn_call &c = p.call;
    int64_t grads, arrivals;
    *fold = {};
    if (!mn_delta_folds_groups(&p)) return cudaSuccess;
    if (!size_fold(&grads, &arrivals, &p)) return cudaErrorNotSupported;
    arrivals = mn_ceil_div(arrivals, 4) * 4;
    *fold = { p.grad.q, p.grad.e, p.grad.w,
              { job->packed[MN_DELTA_DQ], job->packed[MN_DELTA_DE], job->packed[MN_DELTA_DW] },
              (int *)memory, (int)(c.H / c.J) };
    mn_out *each[] = { &job->p.grad.q, &job->p.grad.e, &job->p.grad.w };
    mn_bf16 *at = (mn_bf16 *)(fold->arrived + arrivals);
    for (mn_out *grad : each) {
        if (!grad->data) continue;
        *grad = { at, { c.T * c.H * c.K, c.H * c.K, c.K } };
        at += grads;
    }
    job->packed[MN_DELTA_DQ] = job->packed[MN_DELTA_DE] = job->packed[MN_DELTA_DW] = true;
    return cudaSuccess;
}

bool mn_delta_chunk_backward_plan(mn_plan *plan, const mn_delta_args *p) {
    size_t own;
    return size_shared(&plan->shared_bytes, &own, p);
}

/* A call, and rows behind cotangents that are not finite once more. */
template <int KP>
static int backward_kept(const mn_delta_params &job, const mn_grad_fold &fold,
                         cudaStream_t stream) {
    int code = backward<KP>(job, fold, {}, stream);
    mn_delta_params redo = job;
    const mn_out &first = job.p.grad.v.data ? job.p.grad.v : job.p.grad.e;
    const int64_t heads = mn_n_spans(job.p.call) * job.p.call.H;
    if (code != cudaSuccess || job.p.call.T < 2 || !first.data || heads == 0 ||
        !job.p.cot.o.data) {
        return code;
    }
    redo.cuts = job.workspace.cuts, redo.dX_is_dv = false;
    redo.p.grad.v = {}, redo.p.grad.state0 = {};
    code = mn_launch_smem_behind(true, delta_find_redo_back<false>, dim3((unsigned)heads),
                                 MN_DELTA_REDO_THREADS, 0, stream,
                                 mn_delta_grad_of_groups(redo, fold), job.p.grad.v,
                                 mn_max(fold.times, 1));
    return code == cudaSuccess ? backward<KP>(redo, fold, job.p.grad.v, stream) : code;
}

int mn_delta_chunk_backward(const mn_delta_args *p, void *shared, void *stream) {
    mn_delta_params job;
    mn_grad_fold fold;
    size_t own, all;
    if (!mn_delta_make_params(&job, p, shared, true) || !size_shared(&all, &own, p)) {
        return cudaErrorNotSupported;
    }
    const int code = make_fold(&fold, &job, (char *)shared + own);
    if (code != cudaSuccess) return code;
    job.dX_is_dv = p->grad.v.data != NULL;
    MN_DELTA_DISPATCH_K(backward_kept, p->call.K, (job, fold, (cudaStream_t)stream));
}

}    // namespace mneme::delta
