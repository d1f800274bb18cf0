/* delta_load.cuh - how chunks come to shared memory for delta's scans (delta_state_scan.cuh), one
 * chunk
 * ahead, by warps that do nothing else.
 *
 * On Hopper the copy engine brings whole tiles: one thread uses_tma, mbarriers count what has come
 * and
 * who
 * has empty with it. Where rows of a tensor do not start at 16 bytes the threads copy, and so they
 * do for a chunk with which one of several packed sequences ends, as tokens of the next must not be
 * seen. Elsewhere they always copy, in step with the others by barriers of the block. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_LOAD_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_LOAD_CUH

#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/delta/delta_mma.cuh"

enum { MN_DELTA_COL_TILES = 4, MN_DELTA_PRODUCERS = 128 };    // most of a block; threads that fetch

/* What is needed first of a chunk, and what later; the first kind is loaded one chunk ahead, the
 * second too where there is smem. */
template <int KP>
struct alignas(1024) mn_scan_front {
    unsigned char keys[mn_tile_bytes<KP>()], values[mn_tile_bytes<64>()];
    unsigned char T[mn_tile_bytes<64>()], P[mn_tile_bytes<64>()];
    float gamma[MN_DELTA_CHUNK], write[MN_DELTA_CHUNK], cum_decay[KP];
};

template <int KP>
constexpr int mn_scan_key_bytes = mn_tile_bytes<KP>();

template <int KP>
struct alignas(1024) mn_scan_back {
    unsigned char first[mn_tile_bytes<KP>()], second[mn_tile_bytes<KP>()];
};

/* Which columns these are, and of what. */
struct mn_scan_coord {
    mn_span span;
    int64_t n, h, column0, first;    // of the block; `first` slot of the sequence
    int n_chunks, columns;           // columns of the block
};

/* Of every other chunk: its front has come, what is behind has come, all have empty with it. */
struct mn_scan_mbarriers {
    uint64_t front[2], back[2], empty[2];
};

/* `n` counts chunks in the order of the scan. */
template <int KP>
struct mn_scan_smem {
    static constexpr int backs = KP <= 128 ? 2 : 1;
    mn_scan_front<KP> fronts[2];
    mn_scan_back<KP> behind[backs];
    mn_scan_coord place;    // here, as registers are short
    mn_scan_mbarriers mbarriers;

    __device__ mn_scan_front<KP> &front(int n) {
        return fronts[n % 2];
    }

    /* What is needed later of a chunk. Where there is smem for one chunk's only, two have it if
     * they need no second tile. */
    __device__ unsigned char *first(int n, bool same_keys) {
        if (backs == 2) return behind[n % backs].first;
        return n % 2 && same_keys ? behind[0].second : behind[0].first;
    }

    __device__ unsigned char *second(int n) {
        return behind[n % backs].second;
    }
};

/* The tensors of a scan for the copy engine. */
struct mn_scan_tma_maps {
    CUtensorMap keys, values, T, P, first, second;
    bool serve;    // otherwise threads copy
};

/* The place of a block of `columns` columns. One thread calls. */
__device__ inline void mn_scan_find_coord(mn_scan_coord &at, const mn_delta_params &job,
                                          int64_t n_slices,
                                    int columns) {
    const mn_call &call = job.p.call;
    at.columns = columns;
    at.column0 = blockIdx.x % n_slices * at.columns;
    at.h = blockIdx.x / n_slices % call.H;
    at.n = blockIdx.x / n_slices / call.H;
    at.span = mn_span_at(call, at.n);
    at.first = mn_delta_first_slot(call, at.n);
    at.n_chunks = (int)((at.span.length + MN_DELTA_CHUNK - 1) / MN_DELTA_CHUNK);
}

/* Fills in the place. All threads of the block call. */
template <int KP, int SPLITS>
__device__ inline void mn_scan_init_smem(mn_scan_smem<KP> &smem, const mn_delta_params &job,
                                     int64_t n_slices) {
    if (threadIdx.x == 0) {
        const int multiply = (int)blockDim.x - MN_DELTA_PRODUCERS;
        mn_scan_find_coord(smem.place, job, n_slices, multiply / 2 / SPLITS);
#if MN_HAS_WGMMA
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.mbarriers.front[i], MN_DELTA_PRODUCERS);
            mn_mbarrier_init(&smem.mbarriers.back[i], MN_DELTA_PRODUCERS);
            mn_mbarrier_init(&smem.mbarriers.empty[i], multiply);
        }
        mn_mbarrier_init_fence();
#endif
    }
    __syncthreads();
}

/* The number of a thread that fetches; below zero for the others. */
__device__ inline int mn_scan_producer_tid(void) {
    return (int)threadIdx.x - ((int)blockDim.x - MN_DELTA_PRODUCERS);
}

__device__ inline int mn_scan_chunk_len(const mn_scan_coord &at, int chunk) {
    return (int)min((int64_t)MN_DELTA_CHUNK, at.span.length - (int64_t)chunk * MN_DELTA_CHUNK);
}

/* What a scan fetches of chunks: keys and values with the front, `first` and `second`, either of
 * which may be left out, behind. Rows that are decayed lie in workspace. */
struct mn_scan_source {
    const mn_in &keys, &values, &first, &second;
    const mn_bf16 *decayed_keys, *decayed_first, *decayed_second;
    bool packed_keys, packed_values, packed_first, packed_second, has_first, has_second;
};

/* ---- by threads ------------------------------------------------------------------------------ */

/* Rows of keys of a chunk: decayed ones from workspace, or the tensor's own. */
template <int KP, bool CHANNEL>
__device__ inline void mn_scan_copy_keys(unsigned char *tile, const mn_delta_params &job,
                                         const mn_in &view, bool packed, const mn_bf16 *decayed,
                                         const mn_scan_coord &at, int chunk) {
    constexpr int n_threads = MN_DELTA_PRODUCERS;
    if (CHANNEL) {
        const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
        mn_tile_reload<KP, n_threads>(tile, decayed + index * MN_DELTA_CHUNK * KP, KP,
                                  mn_scan_producer_tid());
    } else {
        mn_tile_load<KP, n_threads>(tile, view, packed, at.span, at.h,
                                    (int64_t)chunk * MN_DELTA_CHUNK,
                                 mn_scan_chunk_len(at, chunk), 0, job.p.call.K,
                                     mn_scan_producer_tid());
    }
}

template <int KP, bool CHANNEL>
__device__ inline void mn_scan_copy_front(mn_scan_front<KP> &to,
                                                const mn_delta_params &job,
                                          const mn_scan_source &from,
                                              const mn_scan_coord &at,
                                          int chunk) {
    constexpr int n_threads = MN_DELTA_PRODUCERS;
    const int tid = mn_scan_producer_tid();
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_scan_copy_keys<KP, CHANNEL>(to.keys, job, from.keys, from.packed_keys,
                                         from.decayed_keys, at,
                                   chunk);
    mn_tile_load<64, n_threads>(to.values, from.values, from.packed_values, at.span, at.h,
                             (int64_t)chunk * MN_DELTA_CHUNK, mn_scan_chunk_len(at, chunk),
                                 at.column0,
                             min(job.p.call.V, at.column0 + at.columns), tid);
    mn_tile_reload<64, n_threads>(to.T, job.workspace.T + index * MN_DELTA_MATRIX, 64, tid);
    mn_tile_reload<64, n_threads>(to.P, job.workspace.P + index * MN_DELTA_MATRIX, 64, tid);
    if (CHANNEL) {
        mn_cp_async_raw(to.cum_decay, job.workspace.cum_decay + index * KP,
                        KP * (int)sizeof(float), n_threads, tid);
    } else {
        mn_cp_async_raw(to.gamma, job.workspace.log_decays[index].gamma,
                      2 * MN_DELTA_CHUNK * (int)sizeof(float), n_threads, tid);
    }
}

template <int KP, bool CHANNEL>
__device__ inline void mn_scan_copy_back(mn_scan_smem<KP> &smem,
                                               const mn_delta_params &job,
                                         const mn_scan_source &from,
                                             const mn_scan_coord &at,
                                         int n, int chunk) {
    if (from.has_first) {
        mn_scan_copy_keys<KP, CHANNEL>(smem.first(n, !from.has_second), job, from.first,
                                       from.packed_first, from.decayed_first, at, chunk);
    }
    if (from.has_second) {
        mn_scan_copy_keys<KP, CHANNEL>(smem.second(n), job, from.second, from.packed_second,
                                       from.decayed_second, at, chunk);
    }
}

/* ---- by the copy engine ---------------------------------------------------------------------- */

#if MN_HAS_WGMMA

/* Arrives at a mbarrier, and returns true, in all threads that fetch but the one that is to ask. */
__device__ inline bool mn_scan_not_elected(uint64_t *mbarrier) {
    if (mn_scan_producer_tid() < 32 && mn_elect_one()) return false;
    mn_mbarrier_arrive(mbarrier);
    return true;
}

/* Asks for COLUMNS columns from `column` on of 64 rows from (h, t, b) on. */
template <int COLUMNS>
__device__ inline void mn_scan_tma_load(unsigned char *tile, const CUtensorMap &map,
                                             uint64_t *mbarrier,
                                   int64_t column, int64_t h, int64_t t, int64_t b) {
    for (int smem_tile = 0; smem_tile < COLUMNS / 64; smem_tile++) {
        mn_tma_load(tile + smem_tile * MN_DELTA_CHUNK * 128, map, mbarrier,
                    (int)column + 64 * smem_tile,
                     (int)h, (int)t, (int)b);
    }
}

template <int KP, bool CHANNEL>
__device__ inline void mn_scan_tma_load_keys(unsigned char *tile, const CUtensorMap &map,
                                        uint64_t *mbarrier, const mn_scan_coord &at,
                                            int64_t index,
                                        int chunk) {
    const int64_t t = at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK;
    if (CHANNEL) mn_scan_tma_load<KP>(tile, map, mbarrier, 0, 0, index * MN_DELTA_CHUNK, 0);
    else mn_scan_tma_load<KP>(tile, map, mbarrier, 0, at.h, t, at.span.b);
}

template <int KP, bool CHANNEL>
__device__ inline void mn_scan_tma_load_front(mn_scan_smem<KP> &smem,
                                                   const mn_delta_params &job,
                                         const mn_scan_tma_maps &maps,
                                             const mn_scan_coord &at, int n,
                                         int chunk) {
    constexpr int log_decays = (CHANNEL ? KP : 2 * MN_DELTA_CHUNK) * (int)sizeof(float);
    mn_scan_front<KP> &to = smem.front(n);
    uint64_t *mbarrier = &smem.mbarriers.front[n % 2];
    if (mn_scan_not_elected(mbarrier)) return;
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_mbarrier_arrive_expect_tx(mbarrier, (int)sizeof to.keys + 3 * (int)sizeof to.T + log_decays);
    mn_scan_tma_load_keys<KP, CHANNEL>(to.keys, maps.keys, mbarrier, at, index, chunk);
    mn_scan_tma_load<64>(to.values, maps.values, mbarrier, at.column0, at.h,
                    at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK, at.span.b);
    mn_scan_tma_load<64>(to.T, maps.T, mbarrier, 0, 0, index * MN_DELTA_CHUNK, 0);
    mn_scan_tma_load<64>(to.P, maps.P, mbarrier, 0, 0, index * MN_DELTA_CHUNK, 0);
    if (CHANNEL) mn_tma_load_bulk(to.cum_decay, job.workspace.cum_decay + index * KP, log_decays,
                                  mbarrier);
    else mn_tma_load_bulk(to.gamma, job.workspace.log_decays[index].gamma, log_decays, mbarrier);
}

template <int KP, bool CHANNEL>
__device__ inline void mn_scan_tma_load_back(mn_scan_smem<KP> &smem,
                                                  const mn_delta_params &job,
                                        const mn_scan_tma_maps &maps,
                                            const mn_scan_source &from,
                                        const mn_scan_coord &at, int n, int chunk) {
    uint64_t *mbarrier = &smem.mbarriers.back[n % 2];
    if (mn_scan_not_elected(mbarrier)) return;
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_mbarrier_arrive_expect_tx(mbarrier, (from.has_first + from.has_second)
                                 * mn_scan_key_bytes<KP>);
    if (from.has_first) {
        mn_scan_tma_load_keys<KP, CHANNEL>(smem.first(n, !from.has_second), maps.first, mbarrier,
                                                at, index,
                                      chunk);
    }
    if (from.has_second) {
        mn_scan_tma_load_keys<KP, CHANNEL>(smem.second(n), maps.second, mbarrier, at, index,
                                                chunk);
    }
}

/* Arrives at the mbarrier of what this thread has copied. */
__device__ inline void mn_scan_copy_arrive(uint64_t *mbarrier) {
    mn_cp_async_commit();
    mn_cp_async_wait<0>();
    mn_fence_proxy_async();
    mn_mbarrier_arrive(mbarrier);
}

#else

template <int KP, bool CHANNEL>
__device__ inline void mn_scan_tma_load_front(mn_scan_smem<KP> &, const mn_delta_params &,
                                         const mn_scan_tma_maps &, const mn_scan_coord &,
                                             int, int) {}

template <int KP, bool CHANNEL>
__device__ inline void mn_scan_tma_load_back(mn_scan_smem<KP> &, const mn_delta_params &,
                                        const mn_scan_tma_maps &, const mn_scan_source &,
                                        const mn_scan_coord &, int, int) {}

__device__ inline void mn_scan_copy_arrive(uint64_t *) {}

#endif

/* ---- the fetching warps, and waiting for them ------------------------------------------------ */

#if MN_HAS_WGMMA

/* front(n) and back(n) fetch for the n-th chunk of the scan. `ahead`: both go one chunk ahead. */
template <typename Front, typename Back>
__device__ inline void mn_scan_producer_loop(const mn_scan_mbarriers &mbarriers, int count,
                                             bool ahead,
                                       Front front, Back back) {
    const auto all = [&](auto fetch, int n) {
        if (n < count) fetch(n);
    };
    all(front, 0);
    if (ahead) all(back, 0);
    for (int n = 0; n < count; n++) {
        if (n > 0) mn_mbarrier_wait(&mbarriers.empty[(n - 1) % 2], (n - 1) / 2 % 2);
        if (!ahead) back(n);
        all(front, n + 1);
        if (ahead) all(back, n + 1);
    }
}

#else

/* Likewise, in step with the others. */
template <typename Front, typename Back>
__device__ inline void mn_scan_producer_loop(const mn_scan_mbarriers &, int count, bool ahead,
                                             Front front,
                                       Back back) {
    const auto all = [&](auto fetch, int n) {
        if (n < count) fetch(n);
        mn_cp_async_commit();
    };
    all(front, 0);
    if (ahead) all(back, 0);
    for (int n = 0; n < count; n++) {
        if (!ahead) all(back, n);
        all(front, n + 1);
        if (ahead) all(back, n + 1);
        mn_cp_async_wait<2>();
        __syncthreads();
        if (!ahead) {
            mn_cp_async_wait<1>();
            __syncthreads();
        }
        __syncthreads();
    }
}

#endif

/* What the fetching warps do. chunk_at(n): the n-th chunk of the scan. */
template <int KP, bool CHANNEL, typename ChunkAt>
__device__ inline void mn_scan_load_chunks(mn_scan_smem<KP> &smem, const mn_delta_params &job,
                                     const mn_scan_tma_maps &maps,
                                         const mn_scan_source &from,
                                     ChunkAt chunk_at) {
    const mn_scan_coord at = smem.place;    // in registers: shared memory answers slowly here
    const bool ahead = mn_scan_smem<KP>::backs == 2 || !from.has_second;
    const auto uses_tma = [&](int chunk) {    // of the copy engine
        return maps.serve &&
               !(job.p.call.cu_seqlens && mn_scan_chunk_len(at, chunk) < MN_DELTA_CHUNK);
    };
    const auto front = [&](int n) {
        const int chunk = chunk_at(n);
        if (MN_HAS_WGMMA && uses_tma(chunk)) {
            mn_scan_tma_load_front<KP, CHANNEL>(smem, job, maps, at, n, chunk);
        } else {
            mn_scan_copy_front<KP, CHANNEL>(smem.front(n), job, from, at, chunk);
            mn_scan_copy_arrive(&smem.mbarriers.front[n % 2]);
        }
    };
    const auto back = [&](int n) {
        const int chunk = chunk_at(n);
        if (!from.has_first && !from.has_second) return;
        if (MN_HAS_WGMMA && uses_tma(chunk)) {
            mn_scan_tma_load_back<KP, CHANNEL>(smem, job, maps, from, at, n, chunk);
        } else {
            mn_scan_copy_back<KP, CHANNEL>(smem, job, from, at, n, chunk);
            mn_scan_copy_arrive(&smem.mbarriers.back[n % 2]);
        }
    };
    mn_scan_producer_loop(smem.mbarriers, at.n_chunks, ahead, front, back);
}

/* Waits for the n-th front. */
template <int KP>
__device__ inline void mn_scan_wait_front(const mn_scan_smem<KP> &smem, int n) {
#if MN_HAS_WGMMA
    mn_mbarrier_wait(&smem.mbarriers.front[n % 2], n / 2 % 2);
#else
    __syncthreads();
#endif
}

/* Waits for what is behind it. */
template <int KP>
__device__ inline void mn_scan_wait_back(const mn_scan_smem<KP> &smem, int n,
                                               bool ahead) {
#if MN_HAS_WGMMA
    mn_mbarrier_wait(&smem.mbarriers.back[n % 2], n / 2 % 2);
#else
    if (!ahead) __syncthreads();    // otherwise it came with the front
#endif
}

/* This thread has empty with the n-th chunk. */
template <int KP>
__device__ inline void mn_scan_release(mn_scan_smem<KP> &smem, int n) {
#if MN_HAS_WGMMA
    mn_mbarrier_arrive(&smem.mbarriers.empty[n % 2]);
#else
    __syncthreads();
#endif
}

#endif
