/* delta_fwd_wide_sm90.cuh - delta's state scan forward on Hopper where sequences and heads fill the
 * GPU with blocks of 128 value columns, for keys of more than 64 and up to 128 numbers, decays that
 * channels share, and w = e.
 *
 *   X = V - Ed S     R = T X     O = Qd S + P R     S <- d S + Wd'R
 *   P_ts = scale beta_s q_t.e_s exp(G_t - G_s), s <= t
 *
 * as delta_fwd_chunk.cu has them for 64 columns, every sum in the same order and rounded where it
 * is there: results have the same bits, so that which of them serves may go by the number of
 * sequences. Here P is made once and q, e, T and the decays are read once for all columns of a
 * head, and sequences need half as many blocks.
 *
 * Warpgroups of a block, each a chunk behind the one that it follows:
 *
 *   states (2)    S (K, 64 value columns) each, in registers
 *   scores        P of the chunk that the states take next
 *   others        a warp that loads by TMA, two that store o */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_FWD_WIDE_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_FWD_WIDE_SM90_CUH

#include "kernels/cuda/delta/delta_state_scan.cuh"
#include "kernels/cuda/delta/delta_wy_inverse_sm90.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::delta {

/* The tensors of a scan forward on Hopper for TMA. */
struct mn_fwd_chunk_maps {
    CUtensorMap q, e, v, o;
};

enum {
    MN_FWD_WIDE_KEYS = 128,       // KP
    MN_FWD_WIDE_SLICES = 2,       // of 64 value columns: warpgroups that keep a state
    MN_FWD_WIDE_COLUMNS = 64 * MN_FWD_WIDE_SLICES,
    MN_FWD_WIDE_GROUP = 128,      // threads of a warpgroup
    MN_FWD_WIDE_THREADS = (MN_FWD_WIDE_SLICES + 2) * MN_FWD_WIDE_GROUP,
    MN_FWD_WIDE_STAGES = 3,       // chunks under way: scanned, scored, loaded
    // registers of a thread: 512 for one of each warpgroup
    MN_FWD_WIDE_STATE_REGS = 192,
    MN_FWD_WIDE_SCORE_REGS = 80,
    MN_FWD_WIDE_OTHER_REGS = 48,
};

/* A chunk: e, q (64,KP), v (64, 64 columns) of each slice and T (64,64) are loaded, o takes the
 * place of v; P (64,64) is written by the warpgroup of scores, zeros above its diagonal once. */
template <int KP>
struct alignas(1024) mn_fwd_wide_stage {
    unsigned char keys[mn_tile_bytes<KP>()], queries[mn_tile_bytes<KP>()];
    unsigned char values[MN_FWD_WIDE_SLICES][mn_tile_bytes<64>()];
    unsigned char T[mn_tile_bytes<64>()], P[mn_tile_bytes<64>()];
};

template <int KP>
struct mn_fwd_wide_smem {
    mn_fwd_wide_stage<KP> stage[MN_FWD_WIDE_STAGES];
    alignas(16) mn_delta_log_decays log_decays[MN_FWD_WIDE_STAGES];
    // of a stage: loaded, P written, o of a slice written, o stored
    uint64_t full[MN_FWD_WIDE_STAGES], scored[MN_FWD_WIDE_STAGES];
    uint64_t out_full[MN_FWD_WIDE_STAGES][MN_FWD_WIDE_SLICES], empty[MN_FWD_WIDE_STAGES];
    mn_scan_coord place;
};

#if MN_HAS_WGMMA

/* Where a chunk is in shared memory, and the parity of its use of that. */
struct mn_fwd_wide_turn {
    int slot, phase;

    __device__ explicit mn_fwd_wide_turn(int chunk)
        : slot(chunk % MN_FWD_WIDE_STAGES), phase(chunk / MN_FWD_WIDE_STAGES & 1) {}
};

/* Whether TMA may load and store a chunk: its 64 rows are tokens of its sequence, or lie behind the
 * tensor's end. */
template <bool REDO>
__device__ inline bool mn_fwd_chunk_is_full(const mn_delta_params &job, const mn_scan_coord &at,
                                            int chunk) {
    return (!job.p.call.cu_seqlens && !REDO) || mn_scan_chunk_len(at, chunk) == MN_DELTA_CHUNK;
}

/* ---- loads and stores ------------------------------------------------------------------------ */

/* Loads q, e, v, T and the decays of a chunk. One lane calls. */
template <int KP>
__device__ inline void mn_fwd_wide_tma_load(mn_fwd_wide_smem<KP> &smem, int slot,
                                            const mn_delta_params &job,
                                            const mn_fwd_chunk_maps &maps,
                                            const mn_scan_coord &at, int chunk) {
    constexpr int matrix = mn_tile_bytes<64>();
    mn_fwd_wide_stage<KP> &to = smem.stage[slot];
    uint64_t *full = &smem.full[slot];
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    const int h = (int)at.h, key = (int)at.key, b = (int)at.span.b;
    const int t = (int)at.span.t0 + chunk * MN_DELTA_CHUNK;
    mn_mbarrier_arrive_expect_tx(full, (2 * (KP / 64) + MN_FWD_WIDE_SLICES + 1) * matrix +
                                           (int)sizeof(mn_delta_log_decays));
#pragma unroll
    for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
        mn_tma_load(to.keys + smem_tile * matrix, maps.e, full, 64 * smem_tile, key, t, b);
        mn_tma_load(to.queries + smem_tile * matrix, maps.q, full, 64 * smem_tile, key, t, b);
    }
#pragma unroll
    for (int slice = 0; slice < MN_FWD_WIDE_SLICES; slice++) {
        mn_tma_load(to.values[slice], maps.v, full, (int)at.column0 + 64 * slice, h, t, b);
    }
    mn_tma_load_1d(to.T, job.workspace.T + index * MN_DELTA_MATRIX, matrix, full);
    mn_tma_load_1d(&smem.log_decays[slot], job.workspace.log_decays + index,
                   (int)sizeof(mn_delta_log_decays), full);
}

/* A warp copies rows of a chunk, COLUMNS of them from column0 on, of which there are `count`, with
 * zeros behind them and behind the tensor's `width`. */
template <int COLUMNS>
__device__ inline void mn_fwd_wide_copy_rows(unsigned char *tile, const mn_in &view,
                                              const mn_scan_coord &at, int64_t h, int chunk,
                                              int64_t column0, int64_t width) {
    constexpr int vec16s = COLUMNS / 8, step = 32 / vec16s;
    const int lane = threadIdx.x % 32, vec16 = lane % vec16s;
    const int64_t j = column0 + 8 * vec16;
    const int count = j < width ? mn_scan_chunk_len(at, chunk) : 0;
    const mn_bf16 *rows = mn_row<mn_bf16>(view, at.span.b,
                                          at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK, h) + j;
    const unsigned to = mn_shared_u32(tile);
#pragma unroll 1
    for (int row = lane / vec16s; row < MN_DELTA_CHUNK; row += step) {
        const bool inside = row < count;
        mn_cp_async_vec16(to + mn_tile_swizzle(row, vec16),
                          inside ? rows + row * view.stride[1] : view.data, inside ? 16 : 0);
    }
}

/* What TMA loads, by a warp, with zeros behind the sequence's last token. */
template <int KP>
__device__ inline void mn_fwd_wide_copy(mn_fwd_wide_smem<KP> &smem, int slot,
                                        const mn_delta_params &job, const mn_scan_coord &at,
                                        int chunk) {
    const mn_delta_args &p = job.p;
    const int64_t K = p.call.K, V = p.call.V, index = (at.first + chunk) * p.call.H + at.h;
    const int lane = threadIdx.x % 32;
    mn_fwd_wide_stage<KP> &to = smem.stage[slot];
    mn_fwd_wide_copy_rows<KP>(to.keys, p.e, at, at.key, chunk, 0, K);
    mn_fwd_wide_copy_rows<KP>(to.queries, p.q, at, at.key, chunk, 0, K);
#pragma unroll 1
    for (int slice = 0; slice < MN_FWD_WIDE_SLICES; slice++) {
        mn_fwd_wide_copy_rows<64>(to.values[slice], p.v, at, at.h, chunk, at.column0 + 64 * slice,
                                  V);
    }
    mn_cp_async_raw(to.T, job.workspace.T + index * MN_DELTA_MATRIX, mn_tile_bytes<64>(), 32, lane);
    mn_cp_async_raw(&smem.log_decays[slot], job.workspace.log_decays + index,
                    (int)sizeof(mn_delta_log_decays), 32, lane);
    mn_cp_async_commit();
    mn_cp_async_wait<0>();
    mn_fence_proxy_async();
}

/* A warp loads every chunk, once T is there. */
template <int KP>
__device__ inline void mn_fwd_wide_load(mn_fwd_wide_smem<KP> &smem, const mn_delta_params &job,
                                        const mn_fwd_chunk_maps &maps) {
    const mn_scan_coord &at = smem.place;
    mn_pdl_wait();
    for (int chunk = 0; chunk < at.n_chunks; chunk++) {
        const mn_fwd_wide_turn turn(chunk);
        uint64_t *full = &smem.full[turn.slot];
        mn_mbarrier_wait(&smem.empty[turn.slot], turn.phase ^ 1);
        if (!mn_fwd_chunk_is_full<false>(job, at, chunk)) {
            mn_fwd_wide_copy<KP>(smem, turn.slot, job, at, chunk);
            mn_mbarrier_arrive(full);
        } else if (mn_elect_one()) {
            mn_fwd_wide_tma_load<KP>(smem, turn.slot, job, maps, at, chunk);
        } else {
            mn_mbarrier_arrive(full);
        }
    }
}

/* A warp stores a tile of results, o (64, 64 columns from column0 on), to device memory: by TMA, or
 * row by row where fewer tokens are the sequence's. */
template <bool REDO>
__device__ inline void mn_fwd_chunk_store_out(const mn_delta_params &job,
                                              const mn_fwd_chunk_maps &maps,
                                              const mn_scan_coord &at, const unsigned char *tile,
                                              int64_t column0, int chunk) {
    const int lane = threadIdx.x % 32, vec16 = lane % 8;
    const int64_t t = at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK;
    const int64_t j = column0 + 8 * vec16;
    if (!job.p.o.data) return;
    if (mn_fwd_chunk_is_full<REDO>(job, at, chunk)) {
        if (lane > 0) return;
        mn_tma_store(maps.o, tile, (int)column0, (int)at.h, (int)t, (int)at.span.b);
        mn_tma_store_wait_read();
        return;
    }
    for (int token = lane / 8; token < mn_scan_chunk_len(at, chunk); token += 4) {
        const uint4 pack = *(const uint4 *)(tile + mn_tile_swizzle(token, vec16));
        mn_bf16 *to = mn_row<mn_bf16>(job.p.o, at.span.b, t + token, at.h) + j;
        if (j < job.p.call.V) *(uint4 *)to = pack;
    }
}

/* A warp stores o of a slice of every chunk, whose stage is empty then. */
template <int KP>
__device__ inline void mn_fwd_wide_store(mn_fwd_wide_smem<KP> &smem, const mn_delta_params &job,
                                          const mn_fwd_chunk_maps &maps, int slice) {
    const mn_scan_coord &at = smem.place;
    for (int chunk = 0; chunk < at.n_chunks; chunk++) {
        const mn_fwd_wide_turn turn(chunk);
        mn_mbarrier_wait(&smem.out_full[turn.slot][slice], turn.phase);
        mn_fwd_chunk_store_out<false>(job, maps, at, smem.stage[turn.slot].values[slice],
                                     at.column0 + 64 * slice, chunk);
        mn_mbarrier_arrive_warp(&smem.empty[turn.slot]);
    }
}

/* ---- the warpgroup that computes scores ------------------------------------------------------ */

/* Stores P (64,64) of every chunk to its stage; a warp has 16 rows. */
template <int KP>
__device__ inline void mn_fwd_wide_scores(mn_fwd_wide_smem<KP> &smem, float scale) {
    const int lane = threadIdx.x % 32, block = threadIdx.x / 32 % 4;
    for (int i = 0; i < MN_FWD_WIDE_STAGES; i++) {    // what is above the diagonal stays zero
        uint4 *rows = (uint4 *)(smem.stage[i].P + block * 16 * 128);
        for (int k = lane; k < 16 * 8; k += 32) rows[k] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    for (int chunk = 0; chunk < smem.place.n_chunks; chunk++) {
        const mn_fwd_wide_turn turn(chunk);
        mn_fwd_wide_stage<KP> &in = smem.stage[turn.slot];
        const mn_delta_log_decays &log_decays = smem.log_decays[turn.slot];
        float sum[8][4] = {};
        mn_mbarrier_wait(&smem.full[turn.slot], turn.phase);
        mn_wgmma_scores_start<KP>(sum, mn_shared_u32(in.queries), mn_shared_u32(in.keys));
        const mn_delta_score_decays by = mn_delta_score_decays_of(log_decays, block);
        mn_mma_wait<true>();
        mn_delta_put_scores(sum, by, log_decays, block, true, [&](int t, int s, float x, float y) {
            *(unsigned *)(in.P + mn_tile_swizzle(t, s / 8) + s % 8 * 2) =
                mn_bf16x2(scale * x, scale * y);
        });
        mn_fence_proxy_async();
        mn_mbarrier_arrive_warp(&smem.scored[turn.slot]);
    }
}

/* ---- the warpgroups that keep a state -------------------------------------------------------- */

/* The thread's number, asked for where it is used: places that depend on the lane alone would be
 * made before the loop over chunks otherwise, and kept in registers that products need. */
__device__ inline int mn_tid_again(void) {
    int tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}

/* O, transposed in registers (16 value columns of a warp, 64 tokens), to a tile (64 tokens, 64
 * columns) in shared memory, by thread `tid`. */
__device__ inline void mn_fwd_chunk_stage_out(unsigned char *tile, const float (&O)[8][4],
                                              int tid) {
    const int lane = tid % 32, row = lane % 8 + lane / 16 * 8;
    const int vec16 = tid / 32 % 4 * 2 + lane / 8 % 2;
    const unsigned to = mn_shared_u32(tile) + mn_tile_swizzle(row, vec16);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned x[4];
        mn_frag_a_of(x, O[2 * k], O[2 * k + 1]);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::
                         "r"(to + 16 * k * 128),
                     "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    }
}

/* Starts y = x rows', or where it ADDS y += x rows', for x (16 value columns of a warp, 16 N
 * channels or tokens) and a tile of rows (64, 16 N). A descriptor counts in 16 bytes. */
template <bool ADDS, int N>
__device__ inline void mn_fwd_chunk_mma(float (&y)[8][4], const unsigned (&x)[N][4],
                                        const unsigned char *rows) {
    const uint64_t b = mn_wgmma_smem_desc(mn_shared_u32(rows));
#pragma unroll
    for (int k = 0; k < N; k++) {
        const uint64_t at = b + (k / 4 * mn_tile_bytes<64>() + k % 4 * 32) / 16;
        if (k == 0 && !ADDS) mn_wgmma_start_m64n64k16(y, x[k], at);
        else mn_wgmma_m64n64k16<0>(y, x[k], at);
    }
    mn_mma_commit<true>();
}

/* X = V - gamma X, transposed: a warp's 16 value columns of a tile (64 tokens, 64 columns). */
__device__ inline void mn_fwd_chunk_residuals(float (&X)[8][4], const unsigned char *values,
                                              const float *gamma, int col_tile) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned v[4];
        mn_frag_a_trans(v, mn_shared_u32(values), col_tile * 16, 16 * k);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float(&x)[4] = X[2 * k + half];
            const float2 by = *(const float2 *)&gamma[16 * k + 8 * half + column];
            x[0] = fmaf(-by.x, x[0], mn_bf16_lo(v[2 * half]));
            x[1] = fmaf(-by.y, x[1], mn_bf16_hi(v[2 * half]));
            x[2] = fmaf(-by.x, x[2], mn_bf16_lo(v[2 * half + 1]));
            x[3] = fmaf(-by.y, x[3], mn_bf16_hi(v[2 * half + 1]));
        }
    }
}

/* Starts S += x rows, for x (16 value columns, 64 tokens) and a tile of rows (64,KP). */
template <int KP>
__device__ inline void mn_fwd_wide_mma_state(float (&S)[KP / 8][4], const unsigned (&x)[4][4],
                                              const unsigned char *rows) {
    const uint64_t b = mn_wgmma_smem_desc(mn_shared_u32(rows));
#pragma unroll
    for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            mn_wgmma_m64n64k16<1>(&S[8 * smem_tile], x[k],
                                  b + (smem_tile * mn_tile_bytes<64>() + 16 * k * 128) / 16);
        }
    }
    mn_mma_commit<true>();
}

/* A state decays by a chunk. */
template <int N>
__device__ inline void mn_fwd_wide_decay(float (&S)[N][4], float by) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) S[i / 4][i % 4] *= by;
}

/* The warpgroups of states take turns at the products with which a chunk begins, so that either
 * computes beside the products of the other one. The first may begin; behind the last chunk it
 * takes what the other one has given. */
__device__ inline void mn_fwd_wide_wait_turn(int slice) {
    mn_named_barrier_sync(1 + slice, MN_FWD_WIDE_SLICES * MN_FWD_WIDE_GROUP);
}

__device__ inline void mn_fwd_wide_give_turn(int slice) {
    mn_named_barrier_arrive(2 - slice, MN_FWD_WIDE_SLICES * MN_FWD_WIDE_GROUP);
}

/* For each chunk: X, R, O and the next S as in the equations above, all transposed; the last S to
 * p.state. E S of a chunk is asked for before o of the one before is stored; behind the last chunk
 * once more, for nothing, so that no product is in a branch. There is a chunk. */
template <int KP>
__device__ inline void mn_fwd_wide_state_scan(mn_fwd_wide_smem<KP> &smem,
                                               const mn_delta_params &job) {
    const int slice = threadIdx.x / MN_FWD_WIDE_GROUP, col_tile = threadIdx.x / 32 % 4;
    const int n_chunks = smem.place.n_chunks;
    mn_scan_coord at = smem.place;
    mn_scan_state<KP, true, 1> S;
    at.column0 += 64 * slice;
    S.load(job, at);
    if (slice == 1) mn_fwd_wide_give_turn(slice);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        const mn_fwd_wide_turn turn(chunk);
        mn_fwd_wide_stage<KP> &in = smem.stage[turn.slot];
        const mn_delta_log_decays &log_decays = smem.log_decays[turn.slot];
        float X[8][4], R[8][4], O[8][4];
        unsigned a[KP / 16][4], x[4][4], r[4][4];
        mn_scan_frags_a(a, S.at);
        mn_mbarrier_wait(&smem.full[turn.slot], turn.phase);
        mn_fwd_wide_wait_turn(slice);
        mn_mma_fence<true>();
        mn_fwd_chunk_mma<false>(X, a, in.keys);
        mn_fwd_chunk_mma<false>(O, a, in.queries);
        mn_fwd_wide_give_turn(slice);
        mn_mma_wait<true>();    // of both: their operands' registers are needed
        mn_fwd_chunk_residuals(X, in.values[slice], log_decays.gamma, col_tile);
        mn_scan_frags_a(x, X);
        mn_mma_fence<true>();
        mn_fwd_chunk_mma<false>(R, x, in.T);
        mn_fwd_wide_decay(S.at, log_decays.gamma[MN_DELTA_CHUNK - 1]);
        mn_scan_scale_tokens(O, log_decays.gamma, job.scale);
        mn_mma_wait<true>();
        mn_scan_frags_a(r, R);
        mn_scan_scale_tokens(R, log_decays.write, 1.0f);
        mn_scan_frags_a(x, R);
        mn_mbarrier_wait(&smem.scored[turn.slot], turn.phase);
        mn_mma_fence<true>();
        mn_fwd_chunk_mma<true>(O, r, in.P);
        mn_fwd_wide_mma_state<KP>(S.at, x, in.keys);
        mn_mma_wait<true, 1>();
        mn_fwd_chunk_stage_out(in.values[slice], O, mn_tid_again());
        mn_mma_wait<true>();
        mn_fence_proxy_async();
        mn_mbarrier_arrive_warp(&smem.out_full[turn.slot][slice]);
    }
    if (slice == 0) mn_fwd_wide_wait_turn(slice);
    S.store(job, at);
}

/* A sequence without tokens leaves its state. */
template <int KP>
__device__ inline void mn_fwd_wide_copy_state(const mn_delta_params &job,
                                               const mn_scan_coord &place) {
    const int64_t K = job.p.call.K, V = job.p.call.V;
    for (int64_t i = threadIdx.x; place.state_out && i < K * MN_FWD_WIDE_COLUMNS;
         i += MN_FWD_WIDE_THREADS) {
        const int64_t j = place.column0 + i % MN_FWD_WIDE_COLUMNS;
        const int64_t at = i / MN_FWD_WIDE_COLUMNS * V + j;
        if (j < V) place.state_out[at] = place.state_in ? place.state_in[at] : 0.0f;
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

template <int KP>
__device__ inline void mn_fwd_wide_init(mn_fwd_wide_smem<KP> &smem, const mn_delta_params &job,
                                        int64_t n_slices) {
    for (int i = 0; i < MN_FWD_WIDE_STAGES; i++) {
        mn_mbarrier_init(&smem.full[i], 32);    // lanes that load
        mn_mbarrier_init(&smem.scored[i], MN_FWD_WIDE_GROUP / 32);
        for (int slice = 0; slice < MN_FWD_WIDE_SLICES; slice++) {
            mn_mbarrier_init(&smem.out_full[i][slice], MN_FWD_WIDE_GROUP / 32);
        }
        mn_mbarrier_init(&smem.empty[i], MN_FWD_WIDE_SLICES);
    }
    mn_mbarrier_init_fence();
    mn_scan_find_coord<false, false>(smem.place, job, n_slices, MN_FWD_WIDE_COLUMNS, job.p.state0,
                                     job.p.state);
}

#endif

/* Grid: blocks of 512 threads, block = (n * H + h) * n_slices + slice for sequence n, head h and
 * 128 value columns. A block goes through the chunks of its sequence in order.
 * Loads   for each chunk q, e (64,K), v (64, 128 columns), workspace.T (64,64) and log_decays; at
 *         the start state0 (K, 128 columns), zeros where there is none.
 * Stores  o (64, 128 columns) for each chunk where p.o is given; at the end state, where it is
 *         given.
 * Begins before the launch in front has ended, which makes T and nothing else, and waits for it
 * where T is loaded. */
template <int KP>
__global__ void __launch_bounds__(MN_FWD_WIDE_THREADS, 1)
delta_fwd_wide_sm90_kernel(const __grid_constant__ mn_delta_params job,
                           const __grid_constant__ mn_fwd_chunk_maps maps, int64_t n_slices) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char scan_smem_bytes[];
    mn_fwd_wide_smem<KP> &smem = *(mn_fwd_wide_smem<KP> *)scan_smem_bytes;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) mn_fwd_wide_init<KP>(smem, job, n_slices);
    __syncthreads();
    if (smem.place.n_chunks == 0) {
        mn_pdl_wait();
        mn_fwd_wide_copy_state<KP>(job, smem.place);
        return;
    }
    if (warp < 4 * MN_FWD_WIDE_SLICES) {
        mn_setmaxnreg_inc<MN_FWD_WIDE_STATE_REGS>();
        mn_fwd_wide_state_scan<KP>(smem, job);
    } else if (warp < 4 * MN_FWD_WIDE_SLICES + 4) {
        mn_setmaxnreg_dec<MN_FWD_WIDE_SCORE_REGS>();
        mn_fwd_wide_scores<KP>(smem, job.scale);
    } else {
        mn_setmaxnreg_dec<MN_FWD_WIDE_OTHER_REGS>();
        if (warp % 4 == 0) mn_fwd_wide_load<KP>(smem, job, maps);
        else if (warp % 4 > 1) mn_fwd_wide_store<KP>(smem, job, maps, warp % 4 - 2);
    }
#endif
}

inline int64_t mn_fwd_wide_slices(const mn_call &call) {
    return mn_ceil_div(call.V, MN_FWD_WIDE_COLUMNS);
}

/* The scan beside the end of the launch in front, that of T. */
template <int KP>
inline int mn_delta_fwd_wide_sm90(const mn_delta_params &job, const mn_fwd_chunk_maps &maps,
                                  cudaStream_t stream) {
    const int64_t blocks = mn_fwd_wide_slices(job.p.call) * job.p.call.H * mn_n_spans(job.p.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem_behind(true, delta_fwd_wide_sm90_kernel<KP>, dim3((unsigned)blocks),
                                 MN_FWD_WIDE_THREADS, sizeof(mn_fwd_wide_smem<KP>), stream, job,
                                 maps, mn_fwd_wide_slices(job.p.call));
}

}    // namespace mneme::delta

#endif
