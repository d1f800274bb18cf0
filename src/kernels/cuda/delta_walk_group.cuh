/* delta_walk_group.cuh - delta's states forward on Hopper, for keys of up to 128 and decays that
 * channels share: the walk of delta_walk.cuh by groups of four warps that work apart.
 *
 *   X = V - Ed S     R = T X     O = Qd S + P R     S <- fall S + Wd'R
 *   P_ts = scale beta_s q_t.w_s exp(G_t - G_s), s <= t
 *
 * One or two groups have the states of 64 columns each, one makes P, and of the last one warp asks
 * the copy engine for chunks ahead and one for each group for results to be stored. As P is made
 * here, what comes before the walk needs no queries, which may still be in the making while it is
 * under way (curvature_ready.cuh). Little code is what this lives by: the warps of a quarter of a
 * processor run three kinds of it in turn. */
#ifndef MN_KERNELS_CUDA_DELTA_WALK_GROUP_CUH
#define MN_KERNELS_CUDA_DELTA_WALK_GROUP_CUH

#include "kernels/cuda/bulk.cuh"
#include "kernels/cuda/curvature_ready.cuh"
#include "kernels/cuda/delta_triangle.cuh"
#include "kernels/cuda/delta_walk.cuh"

enum {
    MN_APART_GROUP = 32 * MN_DELTA_STRIPS,    // threads
    MN_APART_STAGES = 3,                       // chunks under way
};

struct mn_apart_maps {
    CUtensorMap q, e, v, o;
};

template <int KP, int GROUPS>
struct alignas(1024) mn_apart_stage {
    unsigned char keys[mn_tile_bytes<KP>()], queries[mn_tile_bytes<KP>()];
    unsigned char values[GROUPS][mn_tile_bytes<64>()];
    unsigned char T[mn_tile_bytes<64>()], P[mn_tile_bytes<64>()];
};

/* `outs` tiles of results of each group; two groups leave room for one. */
template <int KP, int GROUPS>
struct mn_apart_room {
    static constexpr int outs = 3 - GROUPS;
    mn_apart_stage<KP, GROUPS> stage[MN_APART_STAGES];
    alignas(1024) unsigned char out[GROUPS][outs][mn_tile_bytes<64>()];
    alignas(16) mn_delta_levels levels[MN_APART_STAGES];
    uint64_t there[MN_APART_STAGES], scored[MN_APART_STAGES], gone[MN_APART_STAGES];
    uint64_t made[GROUPS][outs], left[GROUPS][outs];
    mn_walk_place place;
};

#if MN_HAS_WGMMA

/* ---- the group that fetches ------------------------------------------------------------------ */

/* Whether a chunk's tiles hold tokens of its sequence alone, and zeros. */
__device__ inline bool mn_apart_is_whole(const mn_delta_job &job, const mn_walk_place &at,
                                         int chunk) {
    return !job.p.call.cu_seqlens || mn_walk_count(at, chunk) == MN_DELTA_CHUNK;
}

/* One lane calls. */
template <int KP, int GROUPS>
__device__ inline void mn_apart_ask(mn_apart_room<KP, GROUPS> &room, int slot,
                                    const mn_delta_job &job, const mn_apart_maps &maps,
                                    const mn_walk_place &at, int chunk) {
    constexpr int square = MN_DELTA_SQUARE * (int)sizeof(mn_bf16);
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    const int h = (int)at.h, b = (int)at.span.b, t = (int)at.span.t0 + chunk * MN_DELTA_CHUNK;
    mn_apart_stage<KP, GROUPS> &to = room.stage[slot];
    uint64_t *there = &room.there[slot];
    mn_bulk_expect(there,
                   (2 * (KP / 64) + GROUPS + 1) * square + (int)sizeof(mn_delta_levels));
#pragma unroll
    for (int panel = 0; panel < KP / 64; panel++) {
        mn_bulk_copy(to.keys + panel * square, maps.e, there, 64 * panel, h, t, b);
        mn_bulk_copy(to.queries + panel * square, maps.q, there, 64 * panel, h, t, b);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        mn_bulk_copy(to.values[group], maps.v, there, (int)at.column0 + 64 * group, h, t, b);
    }
    mn_bulk_copy_plain(to.T, job.work.T + index * MN_DELTA_SQUARE, square, there);
    mn_bulk_copy_plain(&room.levels[slot], job.work.levels + index, (int)sizeof(mn_delta_levels),
                       there);
}

/* The same by all threads of the group, with zeros behind the sequence. */
template <int KP, int GROUPS>
__device__ __noinline__ void mn_apart_copy(mn_apart_room<KP, GROUPS> &room, int slot,
                                           const mn_delta_job &job, const mn_walk_place &at,
                                           int chunk) {
    constexpr int hands = MN_DELTA_FETCHERS, square = MN_DELTA_SQUARE * (int)sizeof(mn_bf16);
    const mn_delta_args &p = job.p;
    const int hand = threadIdx.x % MN_DELTA_FETCHERS;
    const int64_t index = (at.first + chunk) * p.call.H + at.h;
    mn_apart_stage<KP, GROUPS> &to = room.stage[slot];
    mn_walk_copy_keys<KP, false>(to.keys, job, p.e, true, nullptr, at, chunk);
    mn_walk_copy_keys<KP, false>(to.queries, job, p.q, true, nullptr, at, chunk);
    for (int group = 0; group < GROUPS; group++) {
        mn_tile_fetch<64, hands>(to.values[group], p.v, true, at.span, at.h,
                                 (int64_t)chunk * MN_DELTA_CHUNK, mn_walk_count(at, chunk),
                                 at.column0 + 64 * group, p.call.V, hand);
    }
    mn_copy_plain(to.T, job.work.T + index * MN_DELTA_SQUARE, square, hands, hand);
    mn_copy_plain(&room.levels[slot], job.work.levels + index, (int)sizeof(mn_delta_levels), hands,
                  hand);
    mn_copy_commit();
    mn_copy_wait<0>();
    mn_shared_show();
}

/* A tile of results, columns from column0 on, to memory by a warp. */
__device__ inline void mn_apart_put(const mn_delta_job &job, const mn_apart_maps &maps,
                                    const mn_walk_place &at, int64_t column0,
                                    const unsigned char *tile, int chunk) {
    const int lane = threadIdx.x % 32, octet = lane % 8;
    const int64_t t = at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK;
    const int64_t j = column0 + 8 * octet;
    if (!job.p.o.data) return;
    if (mn_apart_is_whole(job, at, chunk)) {
        if (lane > 0) return;
        mn_bulk_store(maps.o, tile, (int)column0, (int)at.h, (int)t, (int)at.span.b);
        mn_bulk_stores_read();
        return;
    }
    for (int token = lane / 8; token < mn_walk_count(at, chunk); token += 4) {
        const uint4 pack = *(const uint4 *)(tile + mn_tile_place(token, octet));
        mn_bf16 *to = mn_row<mn_bf16>(job.p.o, at.span.b, t + token, at.h) + j;
        if (j < job.p.call.V) *(uint4 *)to = pack;
    }
}

/* The first warp asks; the next ones have results of a group each, which leave as many chunks
 * behind as others are brought ahead. */
template <int KP, int GROUPS>
__device__ inline void mn_apart_fetch(mn_apart_room<KP, GROUPS> &room, const mn_delta_job &job,
                                      const mn_apart_maps &maps, const mn_curve_ready &ready) {
    constexpr int outs = mn_apart_room<KP, GROUPS>::outs;
    const mn_walk_place &at = room.place;
    const int warp = threadIdx.x / 32 % 4, group = warp - 1;
    mn_curve_waiting queries;
    if (ready.chunks) queries.begin(ready, job.p.call, at.n, at.h);
    for (int chunk = 0; chunk < at.n_chunks + MN_APART_STAGES; chunk++) {
        const int slot = chunk % MN_APART_STAGES, turn = chunk / MN_APART_STAGES;
        const int result = chunk - MN_APART_STAGES;
        if (chunk < at.n_chunks) {
            const bool copies = !mn_apart_is_whole(job, at, chunk);
            const bool asks = !copies && warp == 0 && threadIdx.x % 32 == 0;
            mn_barrier_wait(&room.gone[slot], (turn & 1) ^ 1);
            if (ready.chunks && (copies || asks)) queries.wait(ready, job.p.call.H, chunk);
            if (copies) {
                mn_apart_copy(room, slot, job, at, chunk);
                mn_barrier_release(&room.there[slot]);
            } else if (asks) {
                mn_apart_ask(room, slot, job, maps, at, chunk);
            } else if (warp > 0) {
                mn_barrier_release(&room.there[slot]);
            }
        }
        if (warp == 0 || group >= GROUPS || result < 0) continue;
        mn_barrier_wait(&room.made[group][result % outs], result / outs & 1);
        mn_apart_put(job, maps, at, at.column0 + 64 * group, room.out[group][result % outs],
                     result);
        mn_barrier_release(&room.left[group][result % outs]);
    }
}

/* ---- the group that makes scores ------------------------------------------------------------- */

/* A warp has 16 rows of P. */
template <int KP, int GROUPS>
__device__ inline void mn_apart_score(mn_apart_room<KP, GROUPS> &room, const mn_delta_job &job) {
    const float4 *kept = mn_triangle_falls(job, room.place.first * job.p.call.H + room.place.h);
    const int64_t step = job.p.call.H * MN_DELTA_SQUARE * sizeof(mn_bf16) / sizeof(float4);
    const int n_chunks = room.place.n_chunks;
    const int lane = threadIdx.x % 32, block = threadIdx.x / 32 % 4;
    for (int i = 0; i < MN_APART_STAGES; i++) {    // what is above the diagonal stays zero
        uint4 *rows = (uint4 *)(room.stage[i].P + block * 16 * 128);
        for (int k = lane; k < 16 * 8; k += 32) rows[k] = make_uint4(0, 0, 0, 0);
    }
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        const int slot = chunk % MN_APART_STAGES;
        mn_apart_stage<KP, GROUPS> &in = room.stage[slot];
        float sum[8][4];
        mn_delta_falls falls;
        if (chunk > 0) falls.get(kept);
        mn_barrier_wait(&room.there[slot], chunk / MN_APART_STAGES & 1);
        if (chunk == 0) falls.get(kept);    // all are there when the first chunk is
        kept += step;
        falls.times(job.scale);
        mn_group_scores<KP>(sum, mn_shared(in.queries), mn_shared(in.keys));
        mn_delta_decay_scores(sum, falls, room.levels[slot], block, true,
                              [&](int t, int s, float x, float y) {
                                  *(unsigned *)(in.P + mn_tile_place(t, s / 8) + s % 8 * 2) =
                                      mn_pair(x, y);
                              });
        mn_shared_show();
        mn_barrier_release(&room.scored[slot]);
        mn_barrier_release(&room.gone[slot]);
    }
}

/* ---- the group that has the states ----------------------------------------------------------- */

/* Results, turned, as a tile of rows. */
__device__ inline void mn_apart_turn(unsigned char *tile, const float (&O)[8][4]) {
    const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
    const int octet = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned x[4];
        mn_left_of(x, O[2 * k], O[2 * k + 1]);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::
                         "r"(mn_shared(tile) + mn_tile_place(16 * k + row, octet)),
                     "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    }
}

/* Starts y += x square', or y = x square'. */
template <bool MORE>
__device__ inline void mn_apart_lower(float (&y)[8][4], const unsigned (&x)[4][4],
                                      const unsigned char *square) {
    mn_unit_begin<true>();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        mn_unit_rows<true>(y, x[k], mn_shared(square), 16 * k, 0, MORE || k > 0);
    }
    mn_unit_send<true>();
}

template <int KP, int GROUPS>
__device__ inline void mn_apart_walk(mn_apart_room<KP, GROUPS> &room, const mn_delta_job &job,
                                     int group) {
    constexpr int outs = mn_apart_room<KP, GROUPS>::outs;
    const mn_delta_args &p = job.p;
    const int strip = threadIdx.x / 32 % 4, n_chunks = room.place.n_chunks;
    const auto place = [&] {
        mn_walk_place own = room.place;
        own.column0 += 64 * group;
        return own;
    };
    mn_walk_state<KP, true, 1> S;
    S.load(p.state0, p.call, place());
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        const int slot = chunk % MN_APART_STAGES, phase = chunk / MN_APART_STAGES & 1;
        mn_apart_stage<KP, GROUPS> &in = room.stage[slot];
        const mn_delta_levels &levels = room.levels[slot];
        unsigned char *out = room.out[group][chunk % outs];
        float X[8][4], R[8][4], O[8][4];
        unsigned a[KP / 16][4], x[4][4], r[4][4];
#pragma unroll
        for (int k = 0; k < KP / 16; k++) mn_left_of(a[k], S.at[2 * k], S.at[2 * k + 1]);
        mn_barrier_wait(&room.there[slot], phase);
        mn_unit_begin<true>();
#pragma unroll
        for (int k = 0; k < KP / 16; k++) {
            mn_unit_rows<true>(X, a[k], mn_shared(in.keys), 16 * k, 0, k > 0);
        }
        mn_unit_send<true>();
#pragma unroll
        for (int k = 0; k < KP / 16; k++) {
            mn_unit_rows<true>(O, a[k], mn_shared(in.queries), 16 * k, 0, k > 0);
        }
        mn_unit_send<true>();
        const float fall = levels.gamma[MN_DELTA_CHUNK - 1];
#pragma unroll
        for (int i = 0; i < KP / 2; i++) S.at[i / 4][i % 4] *= fall;
        mn_unit_wait<true, 1>();
        mn_walk_scale(X, levels.gamma, 1.0f);
        mn_walk_misses(x, X, in.values[group], strip, 0);
        if (GROUPS > 1) mn_unit_wait<true>();    // few registers: what S is read with goes first
        mn_apart_lower<false>(R, x, in.T);
        mn_unit_wait<true, 1>();
        mn_walk_scale(O, levels.gamma, job.scale);
        mn_unit_wait<true>();
        mn_walk_left(r, R);
        mn_walk_scale(R, levels.write, 1.0f);
        mn_walk_left(x, R);
        mn_barrier_wait(&room.scored[slot], phase);
        mn_apart_lower<true>(O, r, in.P);
        S.add(x, in.keys);
        mn_unit_send<true>();
        mn_barrier_wait(&room.left[group][chunk % outs], (chunk / outs & 1) ^ 1);
        mn_unit_wait<true, 1>();
        mn_apart_turn(out, O);
        mn_unit_wait<true>();
        mn_shared_show();
        mn_barrier_release(&room.made[group][chunk % outs]);
        mn_barrier_release(&room.gone[slot]);
    }
    S.store(p.state, p.call, place());
}

#endif

/* ---- the kernel ------------------------------------------------------------------------------ */

/* GROUPS of columns a block. Where queries are still being made, the first block waits at its end
 * for the launches in front. */
template <int KP, int GROUPS>
__global__ void __launch_bounds__((GROUPS + 1) * MN_APART_GROUP + MN_DELTA_FETCHERS, 1)
mn_delta_apart_kernel(const __grid_constant__ mn_delta_job job,
                      const __grid_constant__ mn_apart_maps maps, mn_curve_ready ready,
                      int64_t n_slices) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char walk_bytes[];
    mn_apart_room<KP, GROUPS> &room = *(mn_apart_room<KP, GROUPS> *)walk_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < MN_APART_STAGES; i++) {
            mn_barrier_open(&room.there[i], MN_DELTA_FETCHERS / 32);
            mn_barrier_open(&room.scored[i], MN_DELTA_STRIPS);
            mn_barrier_open(&room.gone[i], (GROUPS + 1) * MN_DELTA_STRIPS);
        }
        for (int i = 0; i < GROUPS * mn_apart_room<KP, GROUPS>::outs; i++) {
            mn_barrier_open(&room.made[0][0] + i, MN_DELTA_STRIPS);
            mn_barrier_open(&room.left[0][0] + i, 1);
        }
        mn_bulk_barriers_open();
        mn_walk_find(room.place, job, n_slices, 16 * MN_DELTA_STRIPS * GROUPS);
    }
    __syncthreads();
    const int group = threadIdx.x / MN_APART_GROUP;
    if (group < GROUPS) {
        if (GROUPS == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        else asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
        mn_apart_walk(room, job, group);
    } else if (group == GROUPS) {
        if (GROUPS == 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 144;");
        else asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
        mn_apart_score(room, job);
    } else {
        if (GROUPS == 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        else asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
        mn_apart_fetch(room, job, maps, ready);
        if (ready.chunks && blockIdx.x == 0) mn_wait_for_before();
    }
#endif
}

/* Whether the kernel serves a call: where there are enough columns and heads for groups, and rows
 * that the copy engine can bring. Fills in the maps. */
inline bool mn_delta_goes_apart(mn_apart_maps *maps, const mn_delta_job &job, int strips) {
    const mn_delta_args &p = job.p;
    const int64_t K = p.call.K, V = p.call.V;
    *maps = {};
    return K <= 128 && p.decay != MN_DECAY_CHANNEL && !p.w.data && strips == MN_DELTA_STRIPS &&
           job.packed[MN_DELTA_Q] && job.packed[MN_DELTA_E] && job.packed[MN_DELTA_V] &&
           job.packed[MN_DELTA_O] && mn_on_hopper() &&
           mn_bulk_map(&maps->q, p.q, p.call, K, MN_DELTA_CHUNK) &&
           mn_bulk_map(&maps->e, p.e, p.call, K, MN_DELTA_CHUNK) &&
           mn_bulk_map(&maps->v, p.v, p.call, V, MN_DELTA_CHUNK) &&
           (!p.o.data || mn_bulk_map(&maps->o, p.o, p.call, V, MN_DELTA_CHUNK));
}

/* Blocks of the walk with so many groups of columns each. */
inline int64_t mn_apart_blocks(const mn_call &call, int groups) {
    return mn_ceil_div(call.V, groups * 16 * MN_DELTA_STRIPS) * call.H * mn_n_spans(call);
}

/* `ready.chunks` not NULL: beside the launch in front, which makes the queries. */
template <int KP, int GROUPS>
inline int mn_delta_apart(const mn_delta_job &job, const mn_apart_maps &maps,
                          const mn_curve_ready &ready, cudaStream_t stream) {
    const int64_t blocks = mn_apart_blocks(job.p.call, GROUPS);
    const int64_t n_slices = mn_ceil_div(job.p.call.V, GROUPS * 16 * MN_DELTA_STRIPS);
    const int threads = (GROUPS + 1) * MN_APART_GROUP + MN_DELTA_FETCHERS;
    const size_t room = sizeof(mn_apart_room<KP, GROUPS>);
    const auto kernel = mn_delta_apart_kernel<KP, GROUPS>;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    if (!ready.chunks) {
        return mn_launch_with_room(kernel, dim3((unsigned)blocks), threads, room, stream, job,
                                   maps, ready, n_slices);
    }
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)room);
    if (code != cudaSuccess) return code;
    return mn_launch_early(kernel, dim3((unsigned)blocks), threads, room, stream, job, maps, ready,
                           n_slices);
}

#endif
