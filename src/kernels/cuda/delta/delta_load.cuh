/* delta_load.cuh - how chunks come to shared memory for delta's walks (delta_state_scan.cuh), one
 * chunk
 * ahead, by warps that do nothing else.
 *
 * On Hopper the copy engine brings whole tiles: one thread asks, gates count what has come and who
 * has done with it. Where rows of a tensor do not start at 16 bytes the threads copy, and so they
 * do for a chunk with which one of several packed sequences ends, as tokens of the next must not be
 * seen. Elsewhere they always copy, in step with the others by barriers of the block. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_LOAD_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_LOAD_CUH

#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/delta/delta_mma.cuh"

enum { MN_DELTA_STRIPS = 4, MN_DELTA_FETCHERS = 128 };    // most of a block; threads that fetch

/* What is needed first of a chunk, and what later; the first kind is fetched one chunk ahead, the
 * second too where there is room. */
template <int KP>
struct alignas(1024) mn_walk_front {
    unsigned char keys[mn_tile_bytes<KP>()], values[mn_tile_bytes<64>()];
    unsigned char T[mn_tile_bytes<64>()], P[mn_tile_bytes<64>()];
    float gamma[MN_DELTA_CHUNK], write[MN_DELTA_CHUNK], fall[KP];
};

template <int KP>
constexpr int mn_walk_key_bytes = mn_tile_bytes<KP>();

template <int KP>
struct alignas(1024) mn_walk_back {
    unsigned char first[mn_tile_bytes<KP>()], second[mn_tile_bytes<KP>()];
};

/* Which columns these are, and of what. */
struct mn_walk_place {
    mn_span span;
    int64_t n, h, column0, first;    // of the block; `first` slot of the sequence
    int n_chunks, columns;           // columns of the block
};

/* Of every other chunk: its front has come, what is behind has come, all have done with it. */
struct mn_walk_gates {
    uint64_t front[2], back[2], done[2];
};

/* `n` counts chunks in the order of the walk. */
template <int KP>
struct mn_walk_room {
    static constexpr int backs = KP <= 128 ? 2 : 1;
    mn_walk_front<KP> fronts[2];
    mn_walk_back<KP> behind[backs];
    mn_walk_place place;    // here, as registers are short
    mn_walk_gates gates;

    __device__ mn_walk_front<KP> &front(int n) {
        return fronts[n % 2];
    }

    /* What is needed later of a chunk. Where there is room for one chunk's only, two have it if
     * they need no second tile. */
    __device__ unsigned char *first(int n, bool same_keys) {
        if (backs == 2) return behind[n % backs].first;
        return n % 2 && same_keys ? behind[0].second : behind[0].first;
    }

    __device__ unsigned char *second(int n) {
        return behind[n % backs].second;
    }
};

/* The tensors of a walk for the copy engine. */
struct mn_walk_maps {
    CUtensorMap keys, values, T, P, first, second;
    bool serve;    // otherwise threads copy
};

/* The place of a block of `columns` columns. One thread calls. */
__device__ inline void mn_walk_find(mn_walk_place &at, const mn_delta_job &job, int64_t n_slices,
                                    int columns) {
    const mn_call &call = job.p.call;
    at.columns = columns;
    at.column0 = blockIdx.x % n_slices * at.columns;
    at.h = blockIdx.x / n_slices % call.H;
    at.n = blockIdx.x / n_slices / call.H;
    at.span = mn_span_at(call, at.n);
    at.first = mn_delta_first(call, at.n);
    at.n_chunks = (int)((at.span.length + MN_DELTA_CHUNK - 1) / MN_DELTA_CHUNK);
}

/* Fills in the place. All threads of the block call. */
template <int KP, int TEAMS>
__device__ inline void mn_walk_begin(mn_walk_room<KP> &room, const mn_delta_job &job,
                                     int64_t n_slices) {
    if (threadIdx.x == 0) {
        const int multiply = (int)blockDim.x - MN_DELTA_FETCHERS;
        mn_walk_find(room.place, job, n_slices, multiply / 2 / TEAMS);
#if MN_HAS_WGMMA
        for (int i = 0; i < 2; i++) {
            mn_barrier_open(&room.gates.front[i], MN_DELTA_FETCHERS);
            mn_barrier_open(&room.gates.back[i], MN_DELTA_FETCHERS);
            mn_barrier_open(&room.gates.done[i], multiply);
        }
        mn_bulk_barriers_open();
#endif
    }
    __syncthreads();
}

/* The number of a thread that fetches; below zero for the others. */
__device__ inline int mn_walk_hand(void) {
    return (int)threadIdx.x - ((int)blockDim.x - MN_DELTA_FETCHERS);
}

__device__ inline int mn_walk_count(const mn_walk_place &at, int chunk) {
    return (int)min((int64_t)MN_DELTA_CHUNK, at.span.length - (int64_t)chunk * MN_DELTA_CHUNK);
}

/* What a walk fetches of chunks: keys and values with the front, `first` and `second`, either of
 * which may be left out, behind. Rows that are decayed lie in work space. */
struct mn_walk_source {
    const mn_in &keys, &values, &first, &second;
    const mn_bf16 *decayed_keys, *decayed_first, *decayed_second;
    bool packed_keys, packed_values, packed_first, packed_second, has_first, has_second;
};

/* ---- by threads ------------------------------------------------------------------------------ */

/* Rows of keys of a chunk: decayed ones from work space, or the tensor's own. */
template <int KP, bool CHANNEL>
__device__ inline void mn_walk_copy_keys(unsigned char *tile, const mn_delta_job &job,
                                         const mn_in &view, bool packed, const mn_bf16 *decayed,
                                         const mn_walk_place &at, int chunk) {
    constexpr int hands = MN_DELTA_FETCHERS;
    if (CHANNEL) {
        const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
        mn_tile_recall<KP, hands>(tile, decayed + index * MN_DELTA_CHUNK * KP, KP, mn_walk_hand());
    } else {
        mn_tile_fetch<KP, hands>(tile, view, packed, at.span, at.h, (int64_t)chunk * MN_DELTA_CHUNK,
                                 mn_walk_count(at, chunk), 0, job.p.call.K, mn_walk_hand());
    }
}

template <int KP, bool CHANNEL>
__device__ inline void mn_walk_copy_front(mn_walk_front<KP> &to, const mn_delta_job &job,
                                          const mn_walk_source &from, const mn_walk_place &at,
                                          int chunk) {
    constexpr int hands = MN_DELTA_FETCHERS;
    const int hand = mn_walk_hand();
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_walk_copy_keys<KP, CHANNEL>(to.keys, job, from.keys, from.packed_keys, from.decayed_keys, at,
                                   chunk);
    mn_tile_fetch<64, hands>(to.values, from.values, from.packed_values, at.span, at.h,
                             (int64_t)chunk * MN_DELTA_CHUNK, mn_walk_count(at, chunk), at.column0,
                             min(job.p.call.V, at.column0 + at.columns), hand);
    mn_tile_recall<64, hands>(to.T, job.work.T + index * MN_DELTA_SQUARE, 64, hand);
    mn_tile_recall<64, hands>(to.P, job.work.P + index * MN_DELTA_SQUARE, 64, hand);
    if (CHANNEL) {
        mn_copy_plain(to.fall, job.work.fall + index * KP, KP * (int)sizeof(float), hands, hand);
    } else {
        mn_copy_plain(to.gamma, job.work.levels[index].gamma,
                      2 * MN_DELTA_CHUNK * (int)sizeof(float), hands, hand);
    }
}

template <int KP, bool CHANNEL>
__device__ inline void mn_walk_copy_back(mn_walk_room<KP> &room, const mn_delta_job &job,
                                         const mn_walk_source &from, const mn_walk_place &at,
                                         int n, int chunk) {
    if (from.has_first) {
        mn_walk_copy_keys<KP, CHANNEL>(room.first(n, !from.has_second), job, from.first,
                                       from.packed_first, from.decayed_first, at, chunk);
    }
    if (from.has_second) {
        mn_walk_copy_keys<KP, CHANNEL>(room.second(n), job, from.second, from.packed_second,
                                       from.decayed_second, at, chunk);
    }
}

/* ---- by the copy engine ---------------------------------------------------------------------- */

#if MN_HAS_WGMMA

/* Arrives at a gate, and returns true, in all threads that fetch but the one that is to ask. */
__device__ inline bool mn_walk_leaves(uint64_t *gate) {
    if (mn_walk_hand() < 32 && mn_bulk_elect()) return false;
    mn_barrier_arrive(gate);
    return true;
}

/* Asks for COLUMNS columns from `column` on of 64 rows from (h, t, b) on. */
template <int COLUMNS>
__device__ inline void mn_walk_ask(unsigned char *tile, const CUtensorMap &map, uint64_t *gate,
                                   int64_t column, int64_t h, int64_t t, int64_t b) {
    for (int panel = 0; panel < COLUMNS / 64; panel++) {
        mn_bulk_copy(tile + panel * MN_DELTA_CHUNK * 128, map, gate, (int)column + 64 * panel,
                     (int)h, (int)t, (int)b);
    }
}

template <int KP, bool CHANNEL>
__device__ inline void mn_walk_ask_keys(unsigned char *tile, const CUtensorMap &map,
                                        uint64_t *gate, const mn_walk_place &at, int64_t index,
                                        int chunk) {
    const int64_t t = at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK;
    if (CHANNEL) mn_walk_ask<KP>(tile, map, gate, 0, 0, index * MN_DELTA_CHUNK, 0);
    else mn_walk_ask<KP>(tile, map, gate, 0, at.h, t, at.span.b);
}

template <int KP, bool CHANNEL>
__device__ inline void mn_walk_ask_front(mn_walk_room<KP> &room, const mn_delta_job &job,
                                         const mn_walk_maps &maps, const mn_walk_place &at, int n,
                                         int chunk) {
    constexpr int levels = (CHANNEL ? KP : 2 * MN_DELTA_CHUNK) * (int)sizeof(float);
    mn_walk_front<KP> &to = room.front(n);
    uint64_t *gate = &room.gates.front[n % 2];
    if (mn_walk_leaves(gate)) return;
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_bulk_expect(gate, (int)sizeof to.keys + 3 * (int)sizeof to.T + levels);
    mn_walk_ask_keys<KP, CHANNEL>(to.keys, maps.keys, gate, at, index, chunk);
    mn_walk_ask<64>(to.values, maps.values, gate, at.column0, at.h,
                    at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK, at.span.b);
    mn_walk_ask<64>(to.T, maps.T, gate, 0, 0, index * MN_DELTA_CHUNK, 0);
    mn_walk_ask<64>(to.P, maps.P, gate, 0, 0, index * MN_DELTA_CHUNK, 0);
    if (CHANNEL) mn_bulk_copy_plain(to.fall, job.work.fall + index * KP, levels, gate);
    else mn_bulk_copy_plain(to.gamma, job.work.levels[index].gamma, levels, gate);
}

template <int KP, bool CHANNEL>
__device__ inline void mn_walk_ask_back(mn_walk_room<KP> &room, const mn_delta_job &job,
                                        const mn_walk_maps &maps, const mn_walk_source &from,
                                        const mn_walk_place &at, int n, int chunk) {
    uint64_t *gate = &room.gates.back[n % 2];
    if (mn_walk_leaves(gate)) return;
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_bulk_expect(gate, (from.has_first + from.has_second) * mn_walk_key_bytes<KP>);
    if (from.has_first) {
        mn_walk_ask_keys<KP, CHANNEL>(room.first(n, !from.has_second), maps.first, gate, at, index,
                                      chunk);
    }
    if (from.has_second) {
        mn_walk_ask_keys<KP, CHANNEL>(room.second(n), maps.second, gate, at, index, chunk);
    }
}

/* Arrives at the gate of what this thread has copied. */
__device__ inline void mn_walk_copied(uint64_t *gate) {
    mn_copy_commit();
    mn_copy_wait<0>();
    mn_shared_show();
    mn_barrier_arrive(gate);
}

#else

template <int KP, bool CHANNEL>
__device__ inline void mn_walk_ask_front(mn_walk_room<KP> &, const mn_delta_job &,
                                         const mn_walk_maps &, const mn_walk_place &, int, int) {}

template <int KP, bool CHANNEL>
__device__ inline void mn_walk_ask_back(mn_walk_room<KP> &, const mn_delta_job &,
                                        const mn_walk_maps &, const mn_walk_source &,
                                        const mn_walk_place &, int, int) {}

__device__ inline void mn_walk_copied(uint64_t *) {}

#endif

/* ---- the fetching warps, and waiting for them ------------------------------------------------ */

#if MN_HAS_WGMMA

/* front(n) and back(n) fetch for the n-th chunk of the walk. `ahead`: both go one chunk ahead. */
template <typename Front, typename Back>
__device__ inline void mn_walk_in_turn(const mn_walk_gates &gates, int count, bool ahead,
                                       Front front, Back back) {
    const auto all = [&](auto fetch, int n) {
        if (n < count) fetch(n);
    };
    all(front, 0);
    if (ahead) all(back, 0);
    for (int n = 0; n < count; n++) {
        if (n > 0) mn_barrier_wait(&gates.done[(n - 1) % 2], (n - 1) / 2 % 2);
        if (!ahead) back(n);
        all(front, n + 1);
        if (ahead) all(back, n + 1);
    }
}

#else

/* Likewise, in step with the others. */
template <typename Front, typename Back>
__device__ inline void mn_walk_in_turn(const mn_walk_gates &, int count, bool ahead, Front front,
                                       Back back) {
    const auto all = [&](auto fetch, int n) {
        if (n < count) fetch(n);
        mn_copy_commit();
    };
    all(front, 0);
    if (ahead) all(back, 0);
    for (int n = 0; n < count; n++) {
        if (!ahead) all(back, n);
        all(front, n + 1);
        if (ahead) all(back, n + 1);
        mn_copy_wait<2>();
        __syncthreads();
        if (!ahead) {
            mn_copy_wait<1>();
            __syncthreads();
        }
        __syncthreads();
    }
}

#endif

/* What the fetching warps do. at_turn(n): the n-th chunk of the walk. */
template <int KP, bool CHANNEL, typename Turn>
__device__ inline void mn_walk_fetch(mn_walk_room<KP> &room, const mn_delta_job &job,
                                     const mn_walk_maps &maps, const mn_walk_source &from,
                                     Turn at_turn) {
    const mn_walk_place at = room.place;    // in registers: shared memory answers slowly here
    const bool ahead = mn_walk_room<KP>::backs == 2 || !from.has_second;
    const auto asks = [&](int chunk) {    // of the copy engine
        return maps.serve &&
               !(job.p.call.cu_seqlens && mn_walk_count(at, chunk) < MN_DELTA_CHUNK);
    };
    const auto front = [&](int n) {
        const int chunk = at_turn(n);
        if (MN_HAS_WGMMA && asks(chunk)) {
            mn_walk_ask_front<KP, CHANNEL>(room, job, maps, at, n, chunk);
        } else {
            mn_walk_copy_front<KP, CHANNEL>(room.front(n), job, from, at, chunk);
            mn_walk_copied(&room.gates.front[n % 2]);
        }
    };
    const auto back = [&](int n) {
        const int chunk = at_turn(n);
        if (!from.has_first && !from.has_second) return;
        if (MN_HAS_WGMMA && asks(chunk)) {
            mn_walk_ask_back<KP, CHANNEL>(room, job, maps, from, at, n, chunk);
        } else {
            mn_walk_copy_back<KP, CHANNEL>(room, job, from, at, n, chunk);
            mn_walk_copied(&room.gates.back[n % 2]);
        }
    };
    mn_walk_in_turn(room.gates, at.n_chunks, ahead, front, back);
}

/* Waits for the n-th front. */
template <int KP>
__device__ inline void mn_walk_wait_front(const mn_walk_room<KP> &room, int n) {
#if MN_HAS_WGMMA
    mn_barrier_wait(&room.gates.front[n % 2], n / 2 % 2);
#else
    __syncthreads();
#endif
}

/* Waits for what is behind it. */
template <int KP>
__device__ inline void mn_walk_wait_back(const mn_walk_room<KP> &room, int n, bool ahead) {
#if MN_HAS_WGMMA
    mn_barrier_wait(&room.gates.back[n % 2], n / 2 % 2);
#else
    if (!ahead) __syncthreads();    // otherwise it came with the front
#endif
}

/* This thread has done with the n-th chunk. */
template <int KP>
__device__ inline void mn_walk_done(mn_walk_room<KP> &room, int n) {
#if MN_HAS_WGMMA
    mn_barrier_arrive(&room.gates.done[n % 2]);
#else
    __syncthreads();
#endif
}

#endif
