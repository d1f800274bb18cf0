/* delta_grad_sm90.cuh - delta_grad.cuh on Hopper, for decays that channels share, w = e and keys of
 * up to 128 channels, or of 256 in two halves: the same sums in the same order.
 *
 * A block of delta_grad_kernel waits for its tiles, multiplies, and stores, one after the other,
 * and is alone on its processor. Here a block stays and goes through chunks; a producer warp has
 * TMA load what the next ones need while 16 warps compute. Of 256 channels it goes through one half
 * after the other, of which the second finds the matrices of the first, and what both load in the
 * second cache. A block that has all channels of a chunk stores dbeta and dg as well.
 *
 * GROUPED: value heads share keys, and a block goes through those of a group one after the other;
 * their keys are loaded once, and dq and de are added up in shared memory, in the order of the
 * heads: each time a sum in float32 of what is there in bf16 and the head's own. Halves of their
 * channels are units of their own, neighbours, whose parts of dbeta and dg are added up later. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_GRAD_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_GRAD_SM90_CUH

#include "kernels/cuda/delta/delta_grad.cuh"
#include "kernels/cuda/delta/delta_launch.cuh"
#include "kernels/cuda/delta/delta_mma.cuh"

namespace mneme::delta {

enum { MN_GRAD_SM90_THREADS = MN_DELTA_GRAD_THREADS + 128 };    // a warpgroup gives registers

/* Keys of so many channels, at most, have their gradients from this kernel; 128: 256 from
 * delta_grad_kernel. */
static constexpr int mn_delta_grad_sm90_keys = 256;

/* Value heads of a group, at most, whose gradients are added up; of more, roundings to bf16 would
 * be seen. */
static constexpr int mn_grad_most_heads = 4;

/* Whether a block goes through the halves of a chunk one after the other; else each is a unit. */
template <int HALVES, bool GROUPED>
static constexpr bool mn_grad_in_turn = HALVES > 1 && !GROUPED;

template <int HALVES, bool GROUPED>
static constexpr int mn_grad_halves_apart = mn_grad_in_turn<HALVES, GROUPED> ? 1 : HALVES;

/* Where the channels of step `step` of unit `index` begin, each of KT channels: of half
 * index % HALVES of the records of index / HALVES, or in turn half `step`. */
template <int KT, int HALVES, bool GROUPED>
__device__ inline int64_t mn_grad_channel0(int64_t index, int step) {
    if (HALVES == 1) return 0;
    return (mn_grad_in_turn<HALVES, GROUPED> ? step : index % HALVES) * KT;
}

/* Records of a unit, which are neighbours. */
template <bool GROUPED>
__device__ inline int mn_grad_heads(const mn_delta_params &job) {
    return GROUPED ? (int)(job.p.call.H / job.p.call.J) : 1;
}

/* A unit's steps, which are chunks to all but its matrices: records of a group, or halves. */
template <int HALVES, bool GROUPED>
__device__ inline int mn_grad_steps(const mn_delta_params &job) {
    return mn_grad_in_turn<HALVES, GROUPED> ? HALVES : mn_grad_heads<GROUPED>(job);
}

/* The first record of unit `index`. In a redo units are sequences and heads; below zero: the head
 * is not cut, or one in front of it in its group is, in the same chunk. */
template <bool REDO, bool GROUPED>
__device__ inline int64_t mn_grad_first_record(const mn_delta_params &job, int64_t index) {
    const int heads = mn_grad_heads<GROUPED>(job);
    if (!REDO) return index * heads;
    const int64_t record = mn_delta_record_of(job, index);
    if (!GROUPED || record < 0) return record;
    const int own = (int)(index % heads);
    for (int i = 1; i <= own; i++) {
        const int cut = job.cuts[index - i];
        if (cut > 0 && cut / MN_DELTA_CHUNK == job.cuts[index] / MN_DELTA_CHUNK) return -1;
    }
    return record - own;
}

/* The tensors for TMA: q, e, do, and of the workspace what the scans have left; dX may be dv. */
struct mn_grad_tma_maps {
    CUtensorMap q, e, cot, S, D, R, dX, P, A;
    CUtensorMap dq, de;
};

template <int KT>
struct alignas(1024) mn_grad_sm90_keys {
    unsigned char q[mn_tile_bytes<KT>()], e[mn_tile_bytes<KT>()];
};

/* Two tiles of value columns are under way; keys and decays of two chunks, whose place dq and de
 * take. GROUPED: keys[0] are those of the group, keys[1] its dq and de. P and A of a chunk are
 * loaded to where their gradients go. */
template <int KT>
struct mn_grad_sm90_smem {
    alignas(1024) mn_grad_stage<KT> stage[2];
    mn_grad_sm90_keys<KT> keys[2];
    alignas(1024) mn_grad_matrices matrices;
    mn_delta_log_decays log_decays[2];
    mn_grad_sums sums[2];
    mn_grad_coord place[2];
    uint64_t stage_full[2], stage_empty[2], keys_full[2], keys_empty[2];
    uint64_t matrices_full, matrices_empty, sums_full[2];
};

/* Where keys of chunk `iter` of the block are, and where its dq and de go. */
template <bool GROUPED>
__device__ inline int mn_grad_keys_slot(int iter) {
    return GROUPED ? 0 : iter % 2;
}

template <bool GROUPED>
__device__ inline int mn_grad_out_slot(int iter) {
    return GROUPED ? 1 : iter % 2;
}

/* Whose matrices chunk `iter` of the block takes, of those that it loads. */
template <bool IN_TURN>
__device__ inline int mn_grad_matrices_of(int iter) {
    return IN_TURN ? iter / 2 : iter;
}

/* What is one chunk's, as the functions of delta_grad.cuh know it. */
struct mn_grad_chunk {
    struct {
        unsigned char *q, *e, *w;
    } keys;
    mn_grad_matrices &matrices;
    const mn_delta_log_decays &log_decays;
    mn_grad_sums &sums;
};

#if MN_HAS_WGMMA

/* ---- the producer warp ----------------------------------------------------------------------- */

/* Whether TMA may load rows of tensors: they are tokens of the chunk's sequence, or zeros behind
 * the tensor's end. */
__device__ inline bool mn_grad_is_full(const mn_delta_params &job, const mn_grad_coord &at) {
    return !job.p.call.cu_seqlens || at.count == MN_DELTA_CHUNK;
}

/* What mn_tile_load does with the rows of a chunk's tokens, by a warp that has few registers. */
template <int COLUMNS>
__device__ inline void mn_grad_copy_rows(unsigned char *tile, const mn_in &view,
                                         const mn_grad_coord &at, int64_t h, int64_t column0,
                                         int64_t width) {
    constexpr int vec16s = COLUMNS / 8, step = 32 / vec16s;
    int lane;    // asked for here, or what follows from it would be kept over chunks
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    const int row0 = lane / vec16s, vec16 = lane % vec16s;
    const int64_t j = column0 + 8 * vec16, first = at.tile.span.t0 + at.tile.first;
    const int n_rows = j < width ? at.count : 0;
    const mn_bf16 *from = mn_row<mn_bf16>(view, at.tile.span.b, first + row0, h) + j;
#pragma unroll 1
    for (int row = row0; row < MN_DELTA_CHUNK; row += step) {
        const bool inside = row < n_rows;
        mn_cp_async_vec16(mn_shared_u32(tile) + mn_tile_swizzle(row, vec16),
                          inside ? from : view.data, inside ? 16 : 0);
        from += step * view.stride[1];
    }
}

/* The warp's own copies are there, for those who read them and for TMA, which writes over them. */
__device__ inline void mn_grad_copies_done(void) {
    mn_cp_async_commit();
    mn_cp_async_wait<0>();
    mn_fence_proxy_async();
    __syncwarp();
}

/* Issues loads of `tiles` tiles of 64 columns of 64 rows from (h, t, b) on. ONCE: the second cache
 * need not keep them. */
template <int TILES, bool ONCE = false>
__device__ inline void mn_grad_tma_load(unsigned char *to, const CUtensorMap &map, uint64_t *full,
                                        int64_t column, int64_t h, int64_t t, int64_t b) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        unsigned char *tile = to + i * mn_tile_bytes<64>();
        const int from = (int)column + 64 * i;
        if (ONCE) mn_tma_load_once(tile, map, full, from, (int)h, (int)t, (int)b);
        else mn_tma_load(tile, map, full, from, (int)h, (int)t, (int)b);
    }
}

/* Loads the decays of a chunk and, `with_keys`, q and e. All lanes call; each arrives at the
 * mbarrier. */
template <int KT>
__device__ inline void mn_grad_load_keys(mn_grad_sm90_smem<KT> &smem, int slot,
                                         mn_grad_sm90_keys<KT> &to, bool with_keys,
                                         const mn_delta_params &job, const mn_grad_tma_maps &maps,
                                         const mn_grad_coord &at) {
    const mn_delta_args &p = job.p;
    const int lane = threadIdx.x % 32;
    const bool full = mn_grad_is_full(job, at);
    const int64_t key = mn_key_head(p.call, at.h), t = at.tile.span.t0 + at.tile.first;
    uint64_t *mbar = &smem.keys_full[slot];
    if (with_keys && !full) {
        mn_grad_copy_rows<KT>(to.q, p.q, at, key, at.channel0, p.call.K);
        mn_grad_copy_rows<KT>(to.e, p.e, at, key, at.channel0, p.call.K);
        mn_grad_copies_done();
    }
    if (lane > 0) {
        mn_mbarrier_arrive(mbar);
        return;
    }
    smem.place[slot] = at;
    mn_mbarrier_arrive_expect_tx(mbar, (int)sizeof(mn_delta_log_decays) +
                                           (with_keys && full ? 2 * mn_tile_bytes<KT>() : 0));
    mn_tma_load_1d(&smem.log_decays[slot], job.workspace.log_decays + at.index,
                   (int)sizeof(mn_delta_log_decays), mbar);
    if (!with_keys || !full) return;
    mn_grad_tma_load<KT / 64>(to.q, maps.q, mbar, at.channel0, key, t, at.tile.span.b);
    mn_grad_tma_load<KT / 64>(to.e, maps.e, mbar, at.channel0, key, t, at.tile.span.b);
}

/* Likewise a tile of value columns: do, dX, R, S and D. IN_TURN: all but S and D once more soon. */
template <int KT, bool IN_TURN>
__device__ inline void mn_grad_load_values(mn_grad_stage<KT> &to, uint64_t *mbar,
                                           const mn_delta_params &job,
                                           const mn_grad_tma_maps &maps, const mn_grad_coord &at,
                                           int64_t column0) {
    const mn_delta_args &p = job.p;
    const int lane = threadIdx.x % 32;
    const bool full = mn_grad_is_full(job, at), dv = job.dX_is_dv;
    const int64_t row = at.index * job.padded_v + column0;
    const int64_t t = at.tile.span.t0 + at.tile.first, b = at.tile.span.b;
    if (!full) {
        mn_grad_copy_rows<64>(to.cot, p.cot.o, at, at.h, column0, p.call.V);
        if (dv) mn_grad_copy_rows<64>(to.dX, mn_grad_dv(job), at, at.h, column0, p.call.V);
        mn_grad_copies_done();
    }
    if (lane > 0) {
        mn_mbarrier_arrive(mbar);
        return;
    }
    mn_mbarrier_arrive_expect_tx(mbar, 2 * mn_tile_bytes<KT>() +
                                           (full ? 3 : dv ? 1 : 2) * mn_tile_bytes<64>());
    if (full) mn_grad_tma_load<1>(to.cot, maps.cot, mbar, column0, at.h, t, b);
    if (!dv) mn_grad_tma_load<1>(to.dX, maps.dX, mbar, 0, 0, row, 0);
    else if (full) mn_grad_tma_load<1>(to.dX, maps.dX, mbar, column0, at.h, t, b);
    mn_grad_tma_load<KT / 64, IN_TURN>(to.S, maps.S, mbar, at.channel0, 0, row, 0);
    mn_grad_tma_load<1>(to.R, maps.R, mbar, 0, 0, row, 0);
    mn_grad_tma_load<KT / 64, IN_TURN>(to.D, maps.D, mbar, at.channel0, 0, row, 0);
}

/* Loads what chunk `iter` of the block needs, as soon as there is room; `n` tiles of value columns
 * are loaded before. Keys of a group take the place of those of the one before, which are in use to
 * the end of its last chunk; so tiles of values for which there is room go in front of them. */
template <int KT, bool GROUPED, bool IN_TURN>
__device__ inline void mn_grad_load_chunk(mn_grad_sm90_smem<KT> &smem, const mn_delta_params &job,
                                          const mn_grad_tma_maps &maps, const mn_grad_coord &at,
                                          bool with_keys, int iter, int n) {
    const int tiles = (int)(job.padded_v / 64);
    int i = 0;
    const auto load_values = [&]() {
        mn_mbarrier_wait(&smem.stage_empty[n % 2], (n / 2 & 1) ^ 1);
        mn_grad_load_values<KT, IN_TURN>(smem.stage[n % 2], &smem.stage_full[n % 2], job, maps, at,
                                         64 * i);
        i++, n++;
    };
    if constexpr (GROUPED) {
#pragma unroll 1
        while (i < tiles && i < 2) load_values();
    }
    mn_mbarrier_wait(&smem.keys_empty[iter % 2], (iter / 2 & 1) ^ 1);
    if (GROUPED && with_keys && iter > 0) {
        mn_mbarrier_wait(&smem.keys_empty[(iter - 1) % 2], (iter - 1) / 2 & 1);
    }
    mn_grad_load_keys<KT>(smem, iter % 2, smem.keys[mn_grad_keys_slot<GROUPED>(iter)], with_keys,
                          job, maps, at);
#pragma unroll 1
    while (i < tiles) load_values();
    if (IN_TURN && iter % 2 > 0) return;
    mn_mbarrier_wait(&smem.matrices_empty, (mn_grad_matrices_of<IN_TURN>(iter) & 1) ^ 1);
    if (threadIdx.x % 32 > 0) return;
    mn_mbarrier_arrive_expect_tx(&smem.matrices_full, 2 * mn_tile_bytes<64>());
    mn_grad_tma_load<1>(smem.matrices.P, maps.P, &smem.matrices_full, 0, 0,
                        at.index * MN_DELTA_CHUNK, 0);
    mn_grad_tma_load<1>(smem.matrices.A, maps.A, &smem.matrices_full, 0, 0,
                        at.index * MN_DELTA_CHUNK, 0);
}

/* Loads what the block's chunks need, in the order of its use. */
template <int KT, int HALVES, bool REDO, bool GROUPED>
__device__ inline void mn_grad_producer(mn_grad_sm90_smem<KT> &smem, const mn_delta_params &job,
                                        const mn_grad_tma_maps &maps, int64_t n_units) {
    constexpr bool in_turn = mn_grad_in_turn<HALVES, GROUPED>;
    constexpr int apart = mn_grad_halves_apart<HALVES, GROUPED>;
    const int tiles = (int)(job.padded_v / 64), steps = mn_grad_steps<HALVES, GROUPED>(job);
    int iter = 0;
    for (int64_t index = blockIdx.x; index < n_units; index += gridDim.x) {
        const int64_t first = mn_grad_first_record<REDO, GROUPED>(job, index / apart);
        if (REDO && first < 0) continue;
        for (int step = 0; step < steps; step++, iter++) {
            mn_grad_coord at =
                mn_grad_record_coord<false>(job, first + (in_turn ? 0 : step), KT * HALVES);
            at.channel0 = mn_grad_channel0<KT, HALVES, GROUPED>(index, step);
            mn_grad_load_chunk<KT, GROUPED, in_turn>(smem, job, maps, at, in_turn || step == 0,
                                                     iter, iter * tiles);
        }
    }
}

/* ---- the warps that multiply ----------------------------------------------------------------- */

/* Products are by wgmma, from shared memory alone: the four warps of a quarter are a warpgroup,
 * whose sums lie as those of mma do (delta_grad.cuh). */

/* A tile for products, and one from a column on, with its rows as depth. */
__device__ inline uint64_t mn_grad_tile(const unsigned char *tile) {
    return mn_wgmma_smem_desc(mn_shared_u32(tile));
}

__device__ inline uint64_t mn_grad_columns(const unsigned char *tile, int column) {
    return mn_grad_tile(tile + column / 64 * mn_tile_bytes<64>() + column % 64 * 2);
}

/* mn_grad_mma_values. MATRICES: those of P and A, too. */
template <int KT, bool DV, bool MATRICES, int N>
__device__ inline void mn_grad_wgmma_values(mn_grad_acc<KT> &sum, float (&end)[N],
                                            const mn_grad_stage<KT> &stage,
                                            const mn_grad_coord &at) {
    const int channel0 = at.quarter * (KT / 4);
    const uint64_t cot = mn_grad_tile(stage.cot), dX = mn_grad_tile(stage.dX);
    const uint64_t R = mn_grad_tile(stage.R), columns = mn_grad_columns(stage.R, 16 * at.quarter);
    const uint64_t S = mn_grad_columns(stage.S, channel0), D = mn_grad_columns(stage.D, channel0);
    mn_mma_fence<true>();
#pragma unroll
    for (int k = 0; k < 64; k += 16) {
        const int column = 2 * k / 16, rows = 128 * k / 16;
        const uint64_t from_dX = dX + (DV ? column : rows);
        mn_wgmma_m64k16<0, 1>(sum.q, cot + column, S + rows);
        mn_wgmma_m64k16<!DV, 1>(sum.e, from_dX, S + rows);
        mn_wgmma_m64k16<1, 1>(sum.w, R + rows, D + rows);
        if constexpr (MATRICES) {
            mn_wgmma_m64k16<0, 1>(sum.P, cot + column, columns + rows);
            mn_wgmma_m64k16<!DV, 1>(sum.A, from_dX, columns + rows);
        }
    }
    mn_mma_commit<true>();
    mn_grad_add_ends<KT>(end, stage);
    mn_mma_wait<true>();
}

/* mn_grad_intra_chunk, with zeros in P and A above the diagonal. */
template <int KT>
__device__ inline void mn_grad_wgmma_intra_chunk(const mn_grad_chunk &chunk, mn_grad_acc<KT> &sum,
                                                 const mn_grad_coord &at) {
    const int channel0 = at.quarter * (KT / 4);
    const uint64_t P = mn_grad_tile(chunk.matrices.P), A = mn_grad_tile(chunk.matrices.A);
    const uint64_t P_beta = mn_grad_tile(chunk.matrices.P_beta);
    const uint64_t A_beta = mn_grad_tile(chunk.matrices.A_beta);
    const uint64_t q = mn_grad_columns(chunk.keys.q, channel0);
    const uint64_t e = mn_grad_columns(chunk.keys.e, channel0);
    mn_mma_fence<true>();
#pragma unroll
    for (int k = 0; k < MN_DELTA_CHUNK; k += 16) {
        const int column = 2 * k / 16, rows = 128 * k / 16;
        mn_wgmma_m64k16<0, 1>(sum.q, P_beta + column, e + rows);
        mn_wgmma_m64k16<0, 1>(sum.e, A_beta + column, e + rows);
        mn_wgmma_m64k16<1, 1>(sum.w, P + rows, q + rows);
        mn_wgmma_m64k16<1, 1>(sum.w, A + rows, e + rows);
    }
    mn_mma_commit_wait<true>();
}

/* A warp's 16 rows and KT / 4 columns to a tile, or `adds` to what it has left there. */
template <int KT>
__device__ inline void mn_grad_stage_out(unsigned char *tile, float (&x)[mn_grad_acc<KT>::N][4],
                                         bool adds, const mn_grad_coord &at) {
    constexpr int N = mn_grad_acc<KT>::N;
    const int lane = threadIdx.x % 32, row = at.block * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        unsigned a[4];
        if (adds) {
            mn_frag_a(a, mn_shared_u32(tile), at.block * 16, at.quarter * (KT / 4) + 8 * n);
#pragma unroll
            for (int c = 0; c < 8; c++) {
                x[n + c / 4][c % 4] += c % 2 ? mn_bf16_hi(a[c / 2]) : mn_bf16_lo(a[c / 2]);
            }
        }
        mn_frag_a_of(a, x[n], x[n + 1]);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                         mn_shared_u32(tile) +
                         mn_tile_swizzle(row, at.quarter * N + n + lane / 16)),
                     "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
    }
}

/* The block of 16 rows and columns of this warp, where it is above the diagonal. */
__device__ inline void mn_grad_zero_above(mn_grad_matrices &matrices, const mn_grad_coord &at) {
    const int lane = threadIdx.x % 32;
    if (at.quarter <= at.block) return;
    const unsigned place = mn_tile_swizzle(16 * at.block + lane / 2, 2 * at.quarter + lane % 2);
    *(uint4 *)(matrices.P + place) = make_uint4(0, 0, 0, 0);
    *(uint4 *)(matrices.A + place) = make_uint4(0, 0, 0, 0);
    *(uint4 *)(matrices.P_beta + place) = make_uint4(0, 0, 0, 0);
    *(uint4 *)(matrices.A_beta + place) = make_uint4(0, 0, 0, 0);
}

/* The steps of a chunk: all, or of its halves the first, which makes its matrices, and the second,
 * which finds them. */
enum mn_grad_step { MN_GRAD_ALL, MN_GRAD_FIRST, MN_GRAD_SECOND };

template <mn_grad_step STEP>
using mn_grad_step_of = cuda::std::integral_constant<mn_grad_step, STEP>;

/* Gradients of P and A of a chunk, in their place. */
template <int KT>
__device__ inline void mn_grad_make_matrices(mn_grad_sm90_smem<KT> &smem, mn_grad_chunk &chunk,
                                             const mn_grad_acc<KT> &sum, float scale, int n,
                                             const mn_grad_coord &at) {
    mn_mbarrier_wait(&smem.matrices_full, n & 1);
    mn_grad_pairs<KT>(chunk, sum, scale, at, [&](int t, int s) {
        const unsigned place = mn_tile_swizzle(t, s / 8) + s % 8 * 2;
        return mn_grad_known((const unsigned *)(smem.matrices.P + place),
                             (const unsigned *)(smem.matrices.A + place));
    });
}

/* What is left of a chunk once all value columns are in `sum`; `adds`: to the gradients of heads in
 * front of it. */
template <int KT, bool GROUPED, mn_grad_step STEP>
__device__ inline void mn_grad_finish_chunk(mn_grad_sm90_smem<KT> &smem, mn_grad_acc<KT> &sum,
                                            float end, const mn_delta_params &job,
                                            const mn_grad_coord &at, int iter, bool adds) {
    const int slot = iter % 2;
    mn_grad_sm90_keys<KT> &keys = smem.keys[mn_grad_keys_slot<GROUPED>(iter)];
    mn_grad_sm90_keys<KT> &out = smem.keys[mn_grad_out_slot<GROUPED>(iter)];
    mn_grad_chunk chunk = { { keys.q, keys.e, keys.e }, smem.matrices, smem.log_decays[slot],
                            smem.sums[slot] };
    end = mn_warp_sum(end);
    if (threadIdx.x % 32 == 0) chunk.sums.end[threadIdx.x / 32] = end;
    if constexpr (STEP != MN_GRAD_SECOND) {
        mn_grad_make_matrices<KT>(smem, chunk, sum, job.scale,
                                  mn_grad_matrices_of<STEP != MN_GRAD_ALL>(iter), at);
    }
    mn_grad_states<KT>(chunk, sum, mn_shared_u32(keys.e), job.scale, at);
    if constexpr (STEP != MN_GRAD_SECOND) {
        mn_grad_zero_above(smem.matrices, at);
        mn_fence_proxy_async();
        mn_grad_sync();
    }
    mn_grad_wgmma_intra_chunk<KT>(chunk, sum, at);
    mn_grad_scale_writes<KT>(chunk, sum, job, chunk.log_decays.beta, mn_shared_u32(keys.e), at);
    if (!GROUPED) mn_grad_sync();    // gradients take the place of keys
    mn_fence_proxy_async();
    if (STEP != MN_GRAD_FIRST) mn_mbarrier_arrive_warp(&smem.matrices_empty);
    mn_grad_stage_out<KT>(out.q, sum.q, GROUPED && adds, at);
    mn_grad_stage_out<KT>(out.e, sum.e, GROUPED && adds, at);
    mn_fence_proxy_async();
    mn_mbarrier_arrive_warp(&smem.sums_full[slot]);
    mn_mbarrier_arrive_warp(&smem.keys_empty[slot]);
}

/* The gradients of chunk `iter` of the block; `n` tiles of value columns are behind it. */
template <int KT, bool DV, bool GROUPED, mn_grad_step STEP>
__device__ inline void mn_grad_consume_chunk(mn_grad_sm90_smem<KT> &smem,
                                             const mn_delta_params &job, int iter, int n,
                                             bool adds) {
    const int tiles = (int)(job.padded_v / 64);
    mn_grad_coord at;
    at.block = threadIdx.x / 32 % 4;
    // by a shuffle, of whose result it is known that a warp's lanes have the same
    at.quarter = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    mn_grad_acc<KT> sum = {};
    float end[2] = {};
    for (int i = 0; i < tiles; i++, n++) {
        mn_mbarrier_wait(&smem.stage_full[n % 2], n / 2 & 1);
        mn_grad_wgmma_values<KT, DV, STEP != MN_GRAD_SECOND>(sum, end, smem.stage[n % 2], at);
        mn_mbarrier_arrive_warp(&smem.stage_empty[n % 2]);
    }
    mn_mbarrier_wait(&smem.keys_full[iter % 2], iter / 2 & 1);
    mn_grad_finish_chunk<KT, GROUPED, STEP>(smem, sum, end[0] + end[1], job, at, iter, adds);
}

template <int KT, int HALVES, bool REDO, bool DV, bool GROUPED>
__device__ inline void mn_grad_consumer(mn_grad_sm90_smem<KT> &smem, const mn_delta_params &job,
                                        int64_t n_units) {
    constexpr int apart = mn_grad_halves_apart<HALVES, GROUPED>;
    const int tiles = (int)(job.padded_v / 64), heads = mn_grad_heads<GROUPED>(job);
    int iter = 0;
    for (int64_t index = blockIdx.x; index < n_units; index += gridDim.x) {
        if (REDO && mn_grad_first_record<REDO, GROUPED>(job, index / apart) < 0) continue;
        const auto consume = [&](auto step, bool adds) {
            mn_grad_consume_chunk<KT, DV, GROUPED, step>(smem, job, iter, iter * tiles, adds);
            iter++;
        };
        if constexpr (mn_grad_in_turn<HALVES, GROUPED>) {
            consume(mn_grad_step_of<MN_GRAD_FIRST>{}, false);
            consume(mn_grad_step_of<MN_GRAD_SECOND>{}, false);
        } else {
            for (int head = 0; head < heads; head++) {
                consume(mn_grad_step_of<MN_GRAD_ALL>{}, head > 0);
            }
        }
    }
}

/* ---- the warp that sums up over tokens ------------------------------------------------------- */

/* Stores a number of each of the two tokens of this lane. */
__device__ inline void mn_grad_put_tokens(const mn_out &view, const mn_grad_coord &at, float x,
                                          float y) {
    const int t = 2 * (threadIdx.x % 32);
    if (!view.data || t >= at.count) return;
    mn_bf16 *to =
        mn_row<mn_bf16>(view, at.tile.span.b, at.tile.span.t0 + at.tile.first + t, at.h);
    mn_put(to, x);
    if (t + 1 < at.count) mn_put(to + view.stride[1], y);
}

/* What a lane of this warp has of its two tokens; of writes, and of the chunk's end by warps. */
struct mn_grad_tokens {
    float beta[2], G[2], written, end;

    /* += the sums of a step. Registers are few here, so that nothing is unrolled. */
    __device__ void add(const mn_grad_sums &sums, bool with_matrices) {
        const int lane = threadIdx.x % 32, t = 2 * lane;
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            beta[0] += sums.beta[i][t], beta[1] += sums.beta[i][t + 1];
            written += sums.write[i][t] + sums.write[i][t + 1];
        }
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            float x = sums.G[i][t], y = sums.G[i][t + 1];
            if (with_matrices) {
                x += sums.rows[i][t] - sums.columns[i][t];
                y += sums.rows[i][t + 1] - sums.columns[i][t + 1];
            }
            G[0] += x, G[1] += y;
        }
        if (lane < MN_DELTA_GRAD_WARPS) end += sums.end[lane];
    }
};

/* dbeta and dg of a chunk, by one warp, of which a lane has two tokens: dg_t = sum over s >= t of
 * dG_s + dG_end; for a decay per head the chunk's sum of dg goes to workspace.whole. */
__device__ inline void mn_grad_store_tokens(const mn_delta_params &job, const mn_grad_tokens &sums,
                                            float cum_decay, const mn_grad_coord &at) {
    const int lane = threadIdx.x % 32, t = 2 * lane;
    mn_grad_put_tokens(job.p.grad.beta, at, sums.beta[0], sums.beta[1]);
    float behind = sums.G[0] + sums.G[1];    // sums from this lane's tokens to the end
#pragma unroll 1
    for (int step = 1; step < 32; step <<= 1) {
        const float other = __shfl_down_sync(0xffffffffu, behind, step);
        if (lane + step < 32) behind += other;
    }
    const float later = __shfl_down_sync(0xffffffffu, behind, 1);
    const float end = fmaf(cum_decay, mn_warp_sum(sums.end), mn_warp_sum(sums.written));
    const float x = behind + end, y = (lane < 31 ? later : 0.0f) + sums.G[1] + end;
    if (job.p.decay == MN_DECAY_TOKEN) mn_grad_put_tokens(job.p.grad.g, at, x, y);
    const float whole = mn_warp_sum((t < at.count ? x : 0.0f) + (t + 1 < at.count ? y : 0.0f));
    if (lane == 0) job.workspace.whole[at.index] = whole;
}

/* What a half of a chunk's channels, a unit, has of dG and dbeta, for delta_reduce_grads; what
 * passes inside the chunk is the first one's. */
__device__ inline void mn_grad_store_half(mn_delta_partial &part, const mn_grad_sums &sums,
                                          float cum_decay, bool first) {
    const int lane = threadIdx.x % 32;
    float written = 0.0f;
#pragma unroll 1
    for (int t = lane; t < MN_DELTA_CHUNK; t += 32) {
        float G = 0.0f, beta = 0.0f;
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            G += sums.G[i][t];
            if (first) G += sums.rows[i][t] - sums.columns[i][t];
            beta += sums.beta[i][t];
            written += sums.write[i][t];
        }
        part.G[t] = G;
        part.beta[t] = beta;
    }
    const float both = lane < MN_DELTA_GRAD_WARPS ? sums.end[lane] : 0.0f;
    const float end = fmaf(cum_decay, mn_warp_sum(both), mn_warp_sum(written));
    if (lane == 0) part.end = end;
}

/* Starts to store a tile of gradients of head h, (64,KT) from at.channel0; of a chunk with which
 * one of several packed sequences ends, row by row. A warp calls. */
template <int KT>
__device__ inline void mn_grad_store_tile(const mn_out &view, const CUtensorMap &map,
                                          const unsigned char *tile, const mn_delta_params &job,
                                          const mn_grad_coord &at, int64_t h) {
    constexpr int vec16s = KT / 8;
    const int lane = threadIdx.x % 32, i = lane % vec16s, channel = (int)at.channel0 + 8 * i;
    const int64_t t = at.tile.span.t0 + at.tile.first, b = at.tile.span.b;
    if (!view.data) return;
    if (mn_grad_is_full(job, at)) {
        for (int k = 0; k < KT / 64 && lane == 0; k++) {
            mn_tma_store(map, tile + k * mn_tile_bytes<64>(), (int)at.channel0 + 64 * k, (int)h,
                         (int)t, (int)b);
        }
        return;
    }
#pragma unroll 1
    for (int row = lane / vec16s; row < at.count && channel < job.p.call.K; row += 32 / vec16s) {
        mn_bf16 *to = mn_row<mn_bf16>(view, b, t + row, h) + channel;
        *(uint4 *)to = *(const uint4 *)(tile + mn_tile_swizzle(row, i));
    }
}

/* Takes the sums of chunk `iter` from the warps that multiply and, `stores`, gradients of keys. In
 * turn `sums` are kept from a chunk's first half to its second. */
template <int KT, int HALVES, bool GROUPED>
__device__ inline void mn_grad_take_chunk(mn_grad_sm90_smem<KT> &smem, const mn_delta_params &job,
                                          const mn_grad_tma_maps &maps, int iter, bool stores,
                                          mn_grad_tokens &sums) {
    constexpr bool in_turn = mn_grad_in_turn<HALVES, GROUPED>;
    const int slot = iter % 2, phase = iter / 2 & 1;
    mn_mbarrier_wait(&smem.keys_full[slot], phase);
    mn_mbarrier_wait(&smem.sums_full[slot], phase);
    const mn_grad_coord &at = smem.place[slot];
    const mn_grad_sm90_keys<KT> &out = smem.keys[mn_grad_out_slot<GROUPED>(iter)];
    const float cum_decay = smem.log_decays[slot].gamma[MN_DELTA_CHUNK - 1];
    if (stores) {
        const int64_t h = GROUPED ? mn_key_head(job.p.call, at.h) : at.h;
        mn_grad_store_tile<KT>(job.p.grad.q, maps.dq, out.q, job, at, h);
        mn_grad_store_tile<KT>(job.p.grad.e, maps.de, out.e, job, at, h);
    }
    if constexpr (HALVES > 1 && !in_turn) {
        mn_delta_partial *parts = (mn_delta_partial *)job.workspace.parts;
        const int64_t half = at.channel0 / KT;
        parts += mn_delta_records(job) * half + at.index;
        mn_grad_store_half(*parts, smem.sums[slot], cum_decay, half == 0);
    } else {
        const bool first = !in_turn || iter % 2 == 0, last = !in_turn || iter % 2 > 0;
        if (first) sums = {};
        sums.add(smem.sums[slot], first);
        if (last) mn_grad_store_tokens(job, sums, cum_decay, at);
    }
    mn_tma_store_wait_read();
    mn_fence_proxy_async();
    mn_mbarrier_arrive_warp(&smem.keys_empty[slot]);
}

template <int KT, int HALVES, bool REDO, bool GROUPED>
__device__ inline void mn_grad_token_sums(mn_grad_sm90_smem<KT> &smem, const mn_delta_params &job,
                                          const mn_grad_tma_maps &maps, int64_t n_units) {
    constexpr int apart = mn_grad_halves_apart<HALVES, GROUPED>;
    const int steps = mn_grad_steps<HALVES, GROUPED>(job);
    mn_grad_tokens sums = {};
    int iter = 0;
    for (int64_t index = blockIdx.x; index < n_units; index += gridDim.x) {
        if (REDO && mn_grad_first_record<REDO, GROUPED>(job, index / apart) < 0) continue;
        for (int step = 0; step < steps; step++, iter++) {
            const bool stores = !GROUPED || step == steps - 1;
            mn_grad_take_chunk<KT, HALVES, GROUPED>(smem, job, maps, iter, stores, sums);
        }
    }
}

#endif

/* DV: dX is dv.
 *
 * Grid: as many blocks of 18 warps as there are processors, block b has units b, b + grid, ... of
 * n_units = slots * H, GROUPED: slots * J, with 256 channels halves of twice as many.
 * Loads   P, A (64,64), S, D (V,KT), R, dX (V,64) and the decays of the workspace, do (64,V), q and
 *         e (64,KT), for each chunk.
 * Stores  grad.q, grad.e (64,KT), GROUPED of (B,T,J,K), grad.beta and grad.g (64) where given;
 *         the sum of dg in workspace.whole. GROUPED with 256 channels: parts of dbeta and dg in
 *         workspace.parts instead. */
template <int KT, int HALVES, bool REDO, bool DV, bool GROUPED>
__global__ void __launch_bounds__(MN_GRAD_SM90_THREADS, 1)
delta_grad_sm90_kernel(const __grid_constant__ mn_delta_params job,
                       const __grid_constant__ mn_grad_tma_maps maps, int64_t n_units) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char grad_smem_bytes[];
    mn_grad_sm90_smem<KT> &smem = *(mn_grad_sm90_smem<KT> *)grad_smem_bytes;
    if (REDO) {
        mn_pdl_launch_dependents();
        mn_pdl_wait();
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.stage_full[i], 32);
            mn_mbarrier_init(&smem.keys_full[i], 32);
            mn_mbarrier_init(&smem.stage_empty[i], MN_DELTA_GRAD_WARPS);
            mn_mbarrier_init(&smem.sums_full[i], MN_DELTA_GRAD_WARPS);
            mn_mbarrier_init(&smem.keys_empty[i], MN_DELTA_GRAD_WARPS + 1);
        }
        mn_mbarrier_init(&smem.matrices_full, 1);
        mn_mbarrier_init(&smem.matrices_empty, MN_DELTA_GRAD_WARPS);
        mn_mbarrier_init_fence();
        if (REDO) mn_fence_proxy_async();
    }
    __syncthreads();
    if (threadIdx.x < MN_DELTA_GRAD_THREADS) {
        mn_setmaxnreg_inc<104>();
        mn_grad_consumer<KT, HALVES, REDO, DV, GROUPED>(smem, job, n_units);
    } else {
        mn_setmaxnreg_dec<64>();
        if (threadIdx.x < MN_DELTA_GRAD_THREADS + 32) {
            mn_grad_producer<KT, HALVES, REDO, GROUPED>(smem, job, maps, n_units);
        } else if (threadIdx.x < MN_DELTA_GRAD_THREADS + 64) {
            mn_grad_token_sums<KT, HALVES, REDO, GROUPED>(smem, job, maps, n_units);
        }
    }
#endif
}

/* ---- on the host ----------------------------------------------------------------------------- */

/* A call whose gradients of keys are those of groups, where these are added up. */
inline mn_delta_params mn_delta_grad_of_groups(const mn_delta_params &job,
                                               const mn_grad_fold &fold) {
    mn_delta_params of = job;
    if (fold.times == 0) return of;
    of.p.grad.q = fold.q, of.p.grad.e = fold.e;
    of.packed[MN_DELTA_DQ] = fold.packed[0], of.packed[MN_DELTA_DE] = fold.packed[1];
    return of;
}

/* Whether the kernel would serve a call by its sizes. */
inline bool mn_delta_grad_sm90_fits(const mn_delta_args &p) {
    return mn_device_is_sm90() && p.call.K <= mn_delta_grad_sm90_keys &&
           p.decay != MN_DECAY_CHANNEL && !p.w.data;
}

/* A map of gradients of keys, where they are wanted; false where they are and cannot be mapped. */
inline bool mn_delta_grad_key_map(CUtensorMap *map, const mn_out &view, bool packed,
                                  const mn_call &call) {
    return !view.data || (packed && mn_tma_map(map, view, call, call.K, MN_DELTA_CHUNK));
}

/* Whether the kernel serves a call of `records` chunks and heads; fills in the maps. A redo, of
 * which dX is not dv, is served where the call was. */
inline bool mn_delta_grad_sm90_supported(mn_grad_tma_maps *maps, const mn_delta_params &job,
                                         int64_t records) {
    const mn_delta_args &p = job.p;
    const mn_delta_workspace &workspace = job.workspace;
    const int64_t K = mn_delta_padded_k(p.call.K), rows = records * job.padded_v;
    *maps = {};
    return mn_delta_grad_sm90_fits(p) && job.packed[MN_DELTA_Q] && job.packed[MN_DELTA_E] &&
           job.packed[MN_DELTA_COT] && job.packed[MN_DELTA_DV] &&
           mn_tma_map(&maps->q, p.q, p.call, p.call.K, MN_DELTA_CHUNK) &&
           mn_tma_map(&maps->e, p.e, p.call, p.call.K, MN_DELTA_CHUNK) &&
           mn_tma_map(&maps->cot, p.cot.o, p.call, p.call.V, MN_DELTA_CHUNK) &&
           mn_delta_tma_map_rows(&maps->S, workspace.S, rows, K) &&
           mn_delta_tma_map_rows(&maps->D, workspace.D, rows, K) &&
           mn_delta_tma_map_rows(&maps->R, workspace.R, rows, MN_DELTA_CHUNK) &&
           (job.dX_is_dv
                ? mn_tma_map(&maps->dX, mn_grad_dv(job), p.call, p.call.V, MN_DELTA_CHUNK)
                : mn_delta_tma_map_rows(&maps->dX, workspace.dX, rows, MN_DELTA_CHUNK)) &&
           mn_delta_grad_key_map(&maps->dq, p.grad.q, job.packed[MN_DELTA_DQ], p.call) &&
           mn_delta_grad_key_map(&maps->de, p.grad.e, job.packed[MN_DELTA_DE], p.call) &&
           mn_delta_tma_map_rows(&maps->P, workspace.P, records * MN_DELTA_CHUNK, MN_DELTA_CHUNK) &&
           mn_delta_tma_map_rows(&maps->A, workspace.A, records * MN_DELTA_CHUNK, MN_DELTA_CHUNK);
}

template <int KP, bool GROUPED>
inline int mn_delta_grad_sm90_by(const mn_delta_params &job, const mn_grad_tma_maps &maps,
                                 int64_t records, cudaStream_t stream) {
    constexpr int KT = KP < 128 ? KP : 128, HALVES = KP / KT;
    const int64_t heads = GROUPED && !job.cuts ? job.p.call.H / job.p.call.J : 1;
    const int64_t n =
        mn_delta_grad_blocks(job, records) / heads * mn_grad_halves_apart<HALVES, GROUPED>;
    const int64_t blocks = mn_min(n, (int64_t)mn_device_props_current().processors);
    const auto kernel = job.cuts       ? delta_grad_sm90_kernel<KT, HALVES, true, false, GROUPED>
                        : job.dX_is_dv ? delta_grad_sm90_kernel<KT, HALVES, false, true, GROUPED>
                                       : delta_grad_sm90_kernel<KT, HALVES, false, false, GROUPED>;
    return mn_launch_smem_behind(job.cuts, kernel, dim3((unsigned)blocks), MN_GRAD_SM90_THREADS,
                                 sizeof(mn_grad_sm90_smem<KT>), stream, job, maps, n);
}

/* `grouped`: gradients of keys are those of groups. */
template <int KP>
inline int mn_delta_grad_sm90(const mn_delta_params &job, const mn_grad_tma_maps &maps,
                              bool grouped, int64_t records, cudaStream_t stream) {
    return grouped ? mn_delta_grad_sm90_by<KP, true>(job, maps, records, stream)
                   : mn_delta_grad_sm90_by<KP, false>(job, maps, records, stream);
}

}    // namespace mneme::delta

#endif
