/* delta_load.cuh - how chunks come to shared memory for delta's scans (delta_state_scan.cuh), one
 * chunk
 * ahead, by warps that do nothing else.
 *
 * On Hopper the copy engine brings whole tiles: one thread requests, gates count what has come and
 * who
 * has done with it. Where rows of a tensor do not start at 16 bytes the threads copy, and so they
 * do for a chunk with which one of several packed sequences ends, as tokens of the next must not be
 * seen. Elsewhere they always copy, in step with the others by barriers of the block. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_LOAD_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_LOAD_CUH

#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/delta/delta_mma.cuh"

enum { MN_DELTA_STRIPS = 4, MN_DELTA_FETCHERS = 128 };    // most of a block; threads that fetch

/* What is needed first of a chunk, and what later; the first kind is loaded one chunk ahead, the
 * second too where there is room. */
template <int KP>
struct alignas(1024) mn_state_scan_front {
    unsigned char keys[mn_tile_bytes<KP>()], values[mn_tile_bytes<64>()];
    unsigned char T[mn_tile_bytes<64>()], P[mn_tile_bytes<64>()];
    float gamma[MN_DELTA_CHUNK], write[MN_DELTA_CHUNK], fall[KP];
};

template <int KP>
constexpr int mn_state_scan_key_bytes = mn_tile_bytes<KP>();

template <int KP>
struct alignas(1024) mn_state_scan_back {
    unsigned char first[mn_tile_bytes<KP>()], second[mn_tile_bytes<KP>()];
};

/* Which columns these are, and of what. */
struct mn_state_scan_place {
    mn_span span;
    int64_t n, h, column0, first;    // of the block; `first` slot of the sequence
    int n_chunks, columns;           // columns of the block
};

/* Of every other chunk: its front has come, what is behind has come, all have done with it. */
struct mn_state_scan_gates {
    uint64_t front[2], back[2], done[2];
};

/* `n` counts chunks in the order of the walk. */
template <int KP>
struct mn_state_scan_smem {
    static constexpr int backs = KP <= 128 ? 2 : 1;
    mn_state_scan_front<KP> fronts[2];
    mn_state_scan_back<KP> behind[backs];
    mn_state_scan_place place;    // here, as registers are short
    mn_state_scan_gates gates;

    __device__ mn_state_scan_front<KP> &front(int n) {
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
struct mn_state_scan_maps {
    CUtensorMap keys, values, T, P, first, second;
    bool serve;    // otherwise threads copy
};

/* The place of a block of `columns` columns. One thread calls. */
__device__ inline void mn_state_scan_find(mn_state_scan_place &at, const mn_delta_job &job,
                                          int64_t n_slices,
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
__device__ inline void mn_state_scan_begin(mn_state_scan_smem<KP> &room, const mn_delta_job &job,
                                     int64_t n_slices) {
    if (threadIdx.x == 0) {
        const int multiply = (int)blockDim.x - MN_DELTA_FETCHERS;
        mn_state_scan_find(room.place, job, n_slices, multiply / 2 / TEAMS);
#if MN_HAS_WGMMA
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&room.gates.front[i], MN_DELTA_FETCHERS);
            mn_mbarrier_init(&room.gates.back[i], MN_DELTA_FETCHERS);
            mn_mbarrier_init(&room.gates.done[i], multiply);
        }
        mn_mbarrier_init_fence();
#endif
    }
    __syncthreads();
}

/* The number of a thread that fetches; below zero for the others. */
__device__ inline int mn_state_scan_hand(void) {
    return (int)threadIdx.x - ((int)blockDim.x - MN_DELTA_FETCHERS);
}

__device__ inline int mn_state_scan_count(const mn_state_scan_place &at, int chunk) {
    return (int)min((int64_t)MN_DELTA_CHUNK, at.span.length - (int64_t)chunk * MN_DELTA_CHUNK);
}

/* What a walk fetches of chunks: keys and values with the front, `first` and `second`, either of
 * which may be left out, behind. Rows that are decayed lie in work space. */
struct mn_state_scan_source {
    const mn_in &keys, &values, &first, &second;
    const mn_bf16 *decayed_keys, *decayed_first, *decayed_second;
    bool packed_keys, packed_values, packed_first, packed_second, has_first, has_second;
};

/* ---- by threads ------------------------------------------------------------------------------ */

/* Rows of keys of a chunk: decayed ones from work space, or the tensor's own. */
template <int KP, bool CHANNEL>
__device__ inline void mn_state_scan_copy_keys(unsigned char *tile, const mn_delta_job &job,
                                         const mn_in &view, bool packed, const mn_bf16 *decayed,
                                         const mn_state_scan_place &at, int chunk) {
    constexpr int hands = MN_DELTA_FETCHERS;
    if (CHANNEL) {
        const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
        mn_tile_recall<KP, hands>(tile, decayed + index * MN_DELTA_CHUNK * KP, KP,
                                  mn_state_scan_hand());
    } else {
        mn_tile_load<KP, hands>(tile, view, packed, at.span, at.h, (int64_t)chunk * MN_DELTA_CHUNK,
                                 mn_state_scan_count(at, chunk), 0, job.p.call.K,
                                     mn_state_scan_hand());
    }
}

template <int KP, bool CHANNEL>
__device__ inline void mn_state_scan_copy_front(mn_state_scan_front<KP> &to,
                                                const mn_delta_job &job,
                                          const mn_state_scan_source &from,
                                              const mn_state_scan_place &at,
                                          int chunk) {
    constexpr int hands = MN_DELTA_FETCHERS;
    const int hand = mn_state_scan_hand();
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_state_scan_copy_keys<KP, CHANNEL>(to.keys, job, from.keys, from.packed_keys,
                                         from.decayed_keys, at,
                                   chunk);
    mn_tile_load<64, hands>(to.values, from.values, from.packed_values, at.span, at.h,
                             (int64_t)chunk * MN_DELTA_CHUNK, mn_state_scan_count(at, chunk),
                                 at.column0,
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
__device__ inline void mn_state_scan_copy_back(mn_state_scan_smem<KP> &room,
                                               const mn_delta_job &job,
                                         const mn_state_scan_source &from,
                                             const mn_state_scan_place &at,
                                         int n, int chunk) {
    if (from.has_first) {
        mn_state_scan_copy_keys<KP, CHANNEL>(room.first(n, !from.has_second), job, from.first,
                                       from.packed_first, from.decayed_first, at, chunk);
    }
    if (from.has_second) {
        mn_state_scan_copy_keys<KP, CHANNEL>(room.second(n), job, from.second, from.packed_second,
                                       from.decayed_second, at, chunk);
    }
}

/* ---- by the copy engine ---------------------------------------------------------------------- */

#if MN_HAS_WGMMA

/* Arrives at a gate, and returns true, in all threads that fetch but the one that is to ask. */
__device__ inline bool mn_state_scan_leaves(uint64_t *gate) {
    if (mn_state_scan_hand() < 32 && mn_elect_one()) return false;
    mn_mbarrier_arrive(gate);
    return true;
}

/* Asks for COLUMNS columns from `column` on of 64 rows from (h, t, b) on. */
template <int COLUMNS>
__device__ inline void mn_state_scan_request(unsigned char *tile, const CUtensorMap &map,
                                             uint64_t *gate,
                                   int64_t column, int64_t h, int64_t t, int64_t b) {
    for (int smem_tile = 0; smem_tile < COLUMNS / 64; smem_tile++) {
        mn_tma_load(tile + smem_tile * MN_DELTA_CHUNK * 128, map, gate,
                    (int)column + 64 * smem_tile,
                     (int)h, (int)t, (int)b);
    }
}

template <int KP, bool CHANNEL>
__device__ inline void mn_state_scan_request_keys(unsigned char *tile, const CUtensorMap &map,
                                        uint64_t *gate, const mn_state_scan_place &at,
                                            int64_t index,
                                        int chunk) {
    const int64_t t = at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK;
    if (CHANNEL) mn_state_scan_request<KP>(tile, map, gate, 0, 0, index * MN_DELTA_CHUNK, 0);
    else mn_state_scan_request<KP>(tile, map, gate, 0, at.h, t, at.span.b);
}

template <int KP, bool CHANNEL>
__device__ inline void mn_state_scan_request_front(mn_state_scan_smem<KP> &room,
                                                   const mn_delta_job &job,
                                         const mn_state_scan_maps &maps,
                                             const mn_state_scan_place &at, int n,
                                         int chunk) {
    constexpr int levels = (CHANNEL ? KP : 2 * MN_DELTA_CHUNK) * (int)sizeof(float);
    mn_state_scan_front<KP> &to = room.front(n);
    uint64_t *gate = &room.gates.front[n % 2];
    if (mn_state_scan_leaves(gate)) return;
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_mbarrier_arrive_expect_tx(gate, (int)sizeof to.keys + 3 * (int)sizeof to.T + levels);
    mn_state_scan_request_keys<KP, CHANNEL>(to.keys, maps.keys, gate, at, index, chunk);
    mn_state_scan_request<64>(to.values, maps.values, gate, at.column0, at.h,
                    at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK, at.span.b);
    mn_state_scan_request<64>(to.T, maps.T, gate, 0, 0, index * MN_DELTA_CHUNK, 0);
    mn_state_scan_request<64>(to.P, maps.P, gate, 0, 0, index * MN_DELTA_CHUNK, 0);
    if (CHANNEL) mn_tma_load_bulk(to.fall, job.work.fall + index * KP, levels, gate);
    else mn_tma_load_bulk(to.gamma, job.work.levels[index].gamma, levels, gate);
}

template <int KP, bool CHANNEL>
__device__ inline void mn_state_scan_request_back(mn_state_scan_smem<KP> &room,
                                                  const mn_delta_job &job,
                                        const mn_state_scan_maps &maps,
                                            const mn_state_scan_source &from,
                                        const mn_state_scan_place &at, int n, int chunk) {
    uint64_t *gate = &room.gates.back[n % 2];
    if (mn_state_scan_leaves(gate)) return;
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_mbarrier_arrive_expect_tx(gate, (from.has_first + from.has_second)
                                 * mn_state_scan_key_bytes<KP>);
    if (from.has_first) {
        mn_state_scan_request_keys<KP, CHANNEL>(room.first(n, !from.has_second), maps.first, gate,
                                                at, index,
                                      chunk);
    }
    if (from.has_second) {
        mn_state_scan_request_keys<KP, CHANNEL>(room.second(n), maps.second, gate, at, index,
                                                chunk);
    }
}

/* Arrives at the gate of what this thread has copied. */
__device__ inline void mn_state_scan_copied(uint64_t *gate) {
    mn_copy_commit();
    mn_copy_wait<0>();
    mn_fence_proxy_async();
    mn_mbarrier_arrive(gate);
}

#else

template <int KP, bool CHANNEL>
__device__ inline void mn_state_scan_request_front(mn_state_scan_smem<KP> &, const mn_delta_job &,
                                         const mn_state_scan_maps &, const mn_state_scan_place &,
                                             int, int) {}

template <int KP, bool CHANNEL>
__device__ inline void mn_state_scan_request_back(mn_state_scan_smem<KP> &, const mn_delta_job &,
                                        const mn_state_scan_maps &, const mn_state_scan_source &,
                                        const mn_state_scan_place &, int, int) {}

__device__ inline void mn_state_scan_copied(uint64_t *) {}

#endif

/* ---- the fetching warps, and waiting for them ------------------------------------------------ */

#if MN_HAS_WGMMA

/* front(n) and back(n) fetch for the n-th chunk of the walk. `ahead`: both go one chunk ahead. */
template <typename Front, typename Back>
__device__ inline void mn_state_scan_in_turn(const mn_state_scan_gates &gates, int count,
                                             bool ahead,
                                       Front front, Back back) {
    const auto all = [&](auto fetch, int n) {
        if (n < count) fetch(n);
    };
    all(front, 0);
    if (ahead) all(back, 0);
    for (int n = 0; n < count; n++) {
        if (n > 0) mn_mbarrier_wait(&gates.done[(n - 1) % 2], (n - 1) / 2 % 2);
        if (!ahead) back(n);
        all(front, n + 1);
        if (ahead) all(back, n + 1);
    }
}

#else

/* Likewise, in step with the others. */
template <typename Front, typename Back>
__device__ inline void mn_state_scan_in_turn(const mn_state_scan_gates &, int count, bool ahead,
                                             Front front,
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
__device__ inline void mn_state_scan_load(mn_state_scan_smem<KP> &room, const mn_delta_job &job,
                                     const mn_state_scan_maps &maps,
                                         const mn_state_scan_source &from,
                                     Turn at_turn) {
    const mn_state_scan_place at = room.place;    // in registers: shared memory answers slowly here
    const bool ahead = mn_state_scan_smem<KP>::backs == 2 || !from.has_second;
    const auto requests = [&](int chunk) {    // of the copy engine
        return maps.serve &&
               !(job.p.call.cu_seqlens && mn_state_scan_count(at, chunk) < MN_DELTA_CHUNK);
    };
    const auto front = [&](int n) {
        const int chunk = at_turn(n);
        if (MN_HAS_WGMMA && requests(chunk)) {
            mn_state_scan_request_front<KP, CHANNEL>(room, job, maps, at, n, chunk);
        } else {
            mn_state_scan_copy_front<KP, CHANNEL>(room.front(n), job, from, at, chunk);
            mn_state_scan_copied(&room.gates.front[n % 2]);
        }
    };
    const auto back = [&](int n) {
        const int chunk = at_turn(n);
        if (!from.has_first && !from.has_second) return;
        if (MN_HAS_WGMMA && requests(chunk)) {
            mn_state_scan_request_back<KP, CHANNEL>(room, job, maps, from, at, n, chunk);
        } else {
            mn_state_scan_copy_back<KP, CHANNEL>(room, job, from, at, n, chunk);
            mn_state_scan_copied(&room.gates.back[n % 2]);
        }
    };
    mn_state_scan_in_turn(room.gates, at.n_chunks, ahead, front, back);
}

/* Waits for the n-th front. */
template <int KP>
__device__ inline void mn_state_scan_wait_front(const mn_state_scan_smem<KP> &room, int n) {
#if MN_HAS_WGMMA
    mn_mbarrier_wait(&room.gates.front[n % 2], n / 2 % 2);
#else
    __syncthreads();
#endif
}

/* Waits for what is behind it. */
template <int KP>
__device__ inline void mn_state_scan_wait_back(const mn_state_scan_smem<KP> &room, int n,
                                               bool ahead) {
#if MN_HAS_WGMMA
    mn_mbarrier_wait(&room.gates.back[n % 2], n / 2 % 2);
#else
    if (!ahead) __syncthreads();    // otherwise it came with the front
#endif
}

/* This thread has done with the n-th chunk. */
template <int KP>
__device__ inline void mn_state_scan_done(mn_state_scan_smem<KP> &room, int n) {
#if MN_HAS_WGMMA
    mn_mbarrier_arrive(&room.gates.done[n % 2]);
#else
    __syncthreads();
#endif
}

#endif
