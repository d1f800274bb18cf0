/* delta_state_scan.cuh - delta's states, chunk after chunk, forward and back.
 *
 *   X = V - Ed S     R = T X     O = Qd S + P R     S <- d S + Wd'R
 *   dR = Wd D + P'dO     dX = T'dR = dV     D <- d D + Qd'dO - Ed'dX
 *
 * with S and D (K,V), d = exp(G_63) the decay of the whole chunk, and rows decayed from the chunk's
 * start, Qd = scale exp(G) q and Ed = exp(G) e, or to its end, Wd = beta exp(G_63 - G) w.
 *
 * A warp has 16 value columns (a column tile) of one head of one sequence and keeps its columns
 * of the state, transposed, in registers in float32: [16][K]. Everything is computed transposed
 * as well, so that sums of one product are the left operand of the next and never leave the
 * registers; the right operands, which warps of a block share, come through shared memory, where
 * four more warps load them. Where channels share the decay, keys come as they are and the
 * decays are applied to the sums.
 *
 * Here four warps with a column tile each multiply as a warpgroup; delta_state_scan_warp.cuh has
 * the scans where there are few columns for so many processors. Which of them serve depends on the
 * other sequences of a call, and sums are made in one order by both: over channels one after the
 * other, and where K is 256 over each half of them first. There two warpgroups, called splits,
 * share the column tiles, as the states need the registers of both: each has a half of the
 * channels. Its sums and those of the other meet in shared memory, where each split adds up those
 * of its share of the tokens; what is a product of tokens alone both compute. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_STATE_SCAN_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_STATE_SCAN_CUH

#include <type_traits>

#include "kernels/cuda/delta/delta_mma.cuh"
#include "kernels/cuda/delta/delta_pairs.cuh"
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::delta {

/* How chunks are loaded to shared memory for delta's scans, one chunk ahead, by producer warps that
 * do nothing else.
 *
 * On Hopper TMA loads whole tiles: one thread issues the loads, mbarriers count the bytes that have
 * arrived (full) and the threads that have read them (empty). Where rows of a tensor do not start
 * at 16 bytes the threads copy, and so they do for a chunk with which one of several packed
 * sequences ends, as tokens of the next must not be seen. Elsewhere they always copy, in step with
 * the others by barriers of the block. */

enum { MN_DELTA_COL_TILES = 4, MN_DELTA_PRODUCERS = 128 };    // most of a block; producer threads

/* What is needed first of a chunk (front), and what later (back). The front is loaded one chunk
 * ahead, the back too where shared memory suffices; where it is tight (mn_delta_params.tight) keys
 * of more than 128 have one front and others one back. Forward: keys e, values v, T, P; then q and
 * w. Back: keys w, values do, T, P; then q and e. */
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

/* The value columns of a block: of which head and sequence. */
struct mn_scan_coord {
    mn_span span;
    int64_t n, h, column0, first;    // of the block; `first` slot of the sequence
    int64_t key;                     // head of the queries and keys
    int64_t n_rows;                  // of the sequence's chunks
    int n_chunks, columns;           // columns of the block
    int skip, from;                  // chunks that a redo back leaves out, rows it leaves out
    const float *state_in;           // (K,V), NULL: zeros; NULL: not wanted
    float *state_out;
    bool map;                        // makes the map of a segment, this one
    int segment;
};

/* Of every other chunk: its front is loaded, its back is loaded, all have read both. */
struct mn_scan_mbarriers {
    uint64_t front[2], back[2], empty[2];
};

/* `n` counts chunks in the order of the scan. */
template <int KP>
struct mn_scan_smem {
    static constexpr bool two_backs = KP <= 128;
    using last = typename std::conditional<two_backs, mn_scan_back<KP>, mn_scan_front<KP>>::type;

    mn_scan_front<KP> fronts[two_backs ? 2 : 1];
    mn_scan_coord place;    // of the block; in shared memory, as registers are short
    mn_scan_mbarriers mbarriers;
    mn_scan_back<KP> behind;    // blocks that need none do without it and what follows
    last spare;                 // the second back or front; not there where memory is tight

    /* Its bytes, behind which splits meet. */
    __host__ __device__ static constexpr size_t bytes(bool tight) {
        return sizeof(mn_scan_smem) - (tight ? sizeof(last) : 0);
    }

    /* Whether the back of a chunk goes one chunk ahead. */
    __device__ static bool ahead(bool same_keys, bool tight) {
        return same_keys || (two_backs && !tight);
    }

    __device__ mn_scan_front<KP> &front(int n, bool tight) {
        if constexpr (two_backs) return fronts[n % 2];
        else return n % 2 && !tight ? spare : fronts[0];
    }

    /* Tiles of the back of a chunk. Where shared memory holds one chunk's only, two chunks share it
     * if they need no second tile. */
    __device__ unsigned char *first(int n, bool same_keys, bool tight) {
        if constexpr (two_backs) {
            if (!tight) return n % 2 ? spare.first : behind.first;
        }
        return n % 2 && same_keys ? behind.second : behind.first;
    }

    __device__ unsigned char *second(int n, bool tight) {
        if constexpr (two_backs) {
            if (!tight) return n % 2 ? spare.second : behind.second;
        }
        return behind.second;
    }
};

/* The tensors of a scan for TMA. */
struct mn_scan_tma_maps {
    CUtensorMap keys, values, T, P, first, second;
    bool serve;    // otherwise threads copy
};

/* How a sequence is cut: `n` segments, of which the first has `first` rows, the last what is left
 * and those between `rows`. A sequence is cut by its own length alone. */
struct mn_scan_cut {
    int64_t rows, first;
    int n;
};

__device__ inline mn_scan_cut mn_scan_cut_of(const mn_delta_segments &segments, int64_t n_rows) {
    if (n_rows < segments.least) return { n_rows, n_rows, 1 };
    const int between = segments.count - 2, shares = between + 2 * segments.ends;
    const int64_t share = (n_rows + shares - 1) / shares;
    const int64_t rows = (share + MN_DELTA_CHUNK - 1) / MN_DELTA_CHUNK * MN_DELTA_CHUNK;
    const int64_t first = min(rows * segments.ends, n_rows);
    const int n = (int)min((int64_t)between, (n_rows - first + rows - 1) / rows);
    return { rows, first, 1 + n + (n_rows > first + n * rows) };
}

/* Sequences that may be cut have numbers of their own: of packed ones each begins at least that
 * many tokens behind the one before. */
__host__ __device__ inline int64_t mn_scan_cut_sequences(const mn_call &call,
                                                         const mn_delta_segments &segments) {
    return call.cu_seqlens ? call.T / segments.least : call.B;
}

__device__ inline int64_t mn_scan_cut_index(const mn_delta_params &job, int64_t n) {
    const mn_call &call = job.p.call;
    return call.cu_seqlens ? call.cu_seqlens[n] / job.segments.least : n;
}

/* The sequence of such a number, or another, that is too short: what is cut and begins in so many
 * tokens has the last of them. */
__device__ inline int64_t mn_scan_cut_sequence(const mn_delta_params &job, int64_t index) {
    const mn_call &call = job.p.call;
    if (!call.cu_seqlens) return index;
    const int64_t n = mn_span_of(call, 0, (index + 1) * job.segments.least - 1);
    return call.cu_seqlens[n] >= index * job.segments.least ? n : -1;
}

/* The state (K,V) that a scan has in front of a segment. */
__device__ inline float *mn_scan_segment_state(const mn_delta_params &job, int64_t n, int64_t h,
                                               int segment) {
    const mn_call &call = job.p.call;
    const int64_t index = mn_scan_cut_index(job, n) * job.segments.count + segment;
    return job.workspace.segment_states + (index * call.H + h) * call.K * call.V;
}

/* The map of a segment, neither first nor last, (KP, padded_v + KP): what it adds to the state, and
 * what it makes of one. */
template <int KP>
__device__ inline float *mn_scan_segment_map(const mn_delta_params &job, int64_t n, int64_t h,
                                             int segment) {
    const int64_t index = mn_scan_cut_index(job, n) * (job.segments.count - 2) + segment - 1;
    return job.workspace.segment_maps + (index * job.p.call.H + h) * KP * (job.padded_v + KP);
}

/* Narrows a block's coordinates from its sequence to a segment of it, that with which the scan
 * begins or number `segment`, and tells where states come from and go to; no rows and no states
 * where the launch has none for it. */
template <bool BACK>
__device__ inline void mn_scan_find_segment(mn_scan_coord &at, const mn_delta_params &job,
                                            bool begins, int segment) {
    const mn_scan_cut cut = mn_scan_cut_of(job.segments, at.n_rows);
    const int head = BACK ? cut.n - 1 : 0, tail = BACK ? 0 : cut.n - 1;
    if (begins) segment = head;
    const int64_t first = segment > 0 ? cut.first + (segment - 1) * cut.rows : 0;
    at.map = !begins && job.segments.part & MN_DELTA_SEGMENT_MAPS, at.segment = segment;
    if (segment >= cut.n || (!begins && segment == head) || (at.map && segment == tail)) {
        at.map = false;
        at.n_rows = 0, at.state_in = nullptr, at.state_out = nullptr;
        return;
    }
    if (at.map) at.state_in = nullptr;
    else if (segment != head) at.state_in = mn_scan_segment_state(job, at.n, at.h, segment);
    if (segment != tail) {
        at.state_out = segment == head ? mn_scan_segment_state(job, at.n, at.h,
                                                               segment + (BACK ? -1 : 1))
                                       : nullptr;
    }
    at.span.t0 += first;
    at.first += first / MN_DELTA_CHUNK;
    at.n_rows = segment == cut.n - 1 ? at.n_rows - first : segment > 0 ? cut.rows : cut.first;
}

/* In a redo a scan has the rows on its side of where the sequence is cut, and only the segment that
 * is cut: what the scan meets before that is there already. */
template <bool BACK>
__device__ inline void mn_scan_cut_rows(mn_scan_coord &at, const mn_delta_params &job) {
    const int64_t before = at.span.t0 - mn_span_at(job.p.call, at.n).t0;
    const int64_t cut = job.cuts[at.n * job.p.call.H + at.h];    // tokens
    const int64_t rows = (job.pairs ? 2 * cut : cut) - before;
    const bool inside = rows > 0 && rows < at.n_rows;
    if (!inside || !BACK) at.n_rows = inside ? rows : 0;
    else at.skip = (int)(rows / MN_DELTA_CHUNK), at.from = (int)(rows % MN_DELTA_CHUNK);
    at.state_out = nullptr;
}

/* Fills in the coordinates of a block of `columns` value columns, whose states come from and go to
 * these tensors. BACK: from the last token to the first. One thread calls. */
template <bool BACK, bool REDOES = true>
__device__ inline void mn_scan_find_coord(mn_scan_coord &at, const mn_delta_params &job,
                                          int64_t n_slices, int columns, const mn_in &state_in,
                                          const mn_out &state_out) {
    const mn_call &call = job.p.call;
    const bool whole = job.segments.part == MN_DELTA_WHOLE;
    int64_t unit = blockIdx.x / n_slices / call.H;
    bool begins = true;
    if (REDOES && job.cuts) mn_pdl_wait();
    int segment = 0;
    at.columns = columns;
    at.column0 = blockIdx.x % n_slices * at.columns;
    at.h = blockIdx.x / n_slices % call.H;
    at.key = mn_key_head(call, at.h);
    if (!whole) {
        const int64_t n_spans = mn_n_spans(call);
        const int64_t n_cut = mn_scan_cut_sequences(call, job.segments);
        begins = job.segments.part & MN_DELTA_SEGMENT_FIRST && unit < n_spans;
        if (!begins) {
            if (job.segments.part & MN_DELTA_SEGMENT_FIRST) unit -= n_spans;
            segment = job.segments.first + (int)(unit / n_cut);
            unit = mn_scan_cut_sequence(job, unit % n_cut);
        }
    }
    at.n = max(unit, (int64_t)0);
    at.span = mn_span_at(call, at.n);
    at.first = mn_delta_first_slot(call, at.n, mn_delta_chunk_tokens(job.pairs));
    at.n_rows = at.span.length * (job.pairs ? 2 : 1);
    at.state_in = mn_row<float>(state_in, at.n, 0, at.h);
    at.state_out = mn_row<float>(state_out, at.n, 0, at.h);
    at.map = false;
    if (unit < 0) segment = INT32_MAX;    // none
    if (!whole) mn_scan_find_segment<BACK>(at, job, begins, segment);
    at.skip = at.from = 0;
    if (REDOES && job.cuts) mn_scan_cut_rows<BACK>(at, job);
    at.n_chunks = (int)((at.n_rows + MN_DELTA_CHUNK - 1) / MN_DELTA_CHUNK);
}

/* Fills in the block's coordinates and initialises the mbarriers. All threads of the block call. */
template <int KP, int SPLITS, bool BACK>
__device__ inline void mn_scan_init_smem(mn_scan_smem<KP> &smem, const mn_delta_params &job,
                                         int64_t n_slices, const mn_in &state_in,
                                         const mn_out &state_out) {
    if (threadIdx.x == 0) {
        const int multiply = (int)blockDim.x - MN_DELTA_PRODUCERS;
        mn_scan_find_coord<BACK>(smem.place, job, n_slices, multiply / 2 / SPLITS, state_in,
                                 state_out);
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

/* The number of a producer thread; below zero for the others. */
__device__ inline int mn_scan_producer_tid(void) {
    return (int)threadIdx.x - ((int)blockDim.x - MN_DELTA_PRODUCERS);
}

__device__ inline int mn_scan_chunk_len(const mn_scan_coord &at, int chunk) {
    return (int)min((int64_t)MN_DELTA_CHUNK, at.n_rows - (int64_t)chunk * MN_DELTA_CHUNK);
}

/* What a scan loads of chunks: keys and values with the front; `first` and `second`, either of
 * which may be left out, with the back. Decayed rows lie in the workspace. */
struct mn_scan_source {
    const mn_in &keys, &values, &first, &second;
    const mn_bf16 *decayed_keys, *decayed_first, *decayed_second;
    bool packed_keys, packed_values, packed_first, packed_second, has_first, has_second, has_P;
    bool one_back;    // shared memory has one back, and that of a single tile

    __device__ int slot(int n) const {
        return one_back ? 0 : n;
    }
};

/* ---- by threads ------------------------------------------------------------------------------ */

/* Rows of keys of a chunk: decayed ones from workspace, or the tensor's own. */
template <int KP, int CHANNEL>
__device__ inline void mn_scan_copy_keys(unsigned char *tile, const mn_delta_params &job,
                                         const mn_in &view, bool packed, const mn_bf16 *decayed,
                                         const mn_scan_coord &at, int chunk) {
    constexpr int n_threads = MN_DELTA_PRODUCERS;
    if (CHANNEL) {
        const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
        mn_tile_reload<KP, n_threads>(tile, decayed + index * MN_DELTA_CHUNK * KP, KP,
                                  mn_scan_producer_tid());
    } else {
        mn_tile_load<KP, n_threads>(tile, view, packed, at.span, at.key,
                                    (int64_t)chunk * MN_DELTA_CHUNK,
                                 mn_scan_chunk_len(at, chunk), 0, job.p.call.K,
                                     mn_scan_producer_tid());
    }
}

template <int KP, int CHANNEL>
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
    mn_chunk_load<CHANNEL, 64, n_threads>(
        to.values, mn_in{}, from.values, from.packed_values, at.span, at.h,
        (int64_t)chunk * mn_delta_chunk_tokens(CHANNEL == MN_DELTA_PAIRS),
        mn_scan_chunk_len(at, chunk), at.column0, min(job.p.call.V, at.column0 + at.columns), tid);
    mn_tile_reload<64, n_threads>(to.T, job.workspace.T + index * MN_DELTA_MATRIX, 64, tid);
    if (from.has_P) {
        mn_tile_reload<64, n_threads>(to.P, job.workspace.P + index * MN_DELTA_MATRIX, 64, tid);
    }
    if (CHANNEL) {
        mn_cp_async_raw(to.cum_decay, job.workspace.cum_decay + index * KP,
                        KP * (int)sizeof(float), n_threads, tid);
    } else {
        mn_cp_async_raw(to.gamma, job.workspace.log_decays[index].gamma,
                      2 * MN_DELTA_CHUNK * (int)sizeof(float), n_threads, tid);
    }
}

/* Zeros in the first rows of a tile of 64 columns: a thread has the packs that it has copied. */
__device__ inline void mn_scan_zero_head(unsigned char *tile, int rows) {
    const int tid = mn_scan_producer_tid();
    mn_cp_async_commit();
    mn_cp_async_wait<0>();
    for (int row = tid / 8; row < rows; row += MN_DELTA_PRODUCERS / 8) {
        *(uint4 *)(tile + mn_tile_swizzle(row, tid % 8)) = make_uint4(0, 0, 0, 0);
    }
}

template <int KP, int CHANNEL>
__device__ inline void mn_scan_copy_back(mn_scan_smem<KP> &smem,
                                               const mn_delta_params &job,
                                         const mn_scan_source &from,
                                             const mn_scan_coord &at,
                                         int n, int chunk) {
    if (from.has_first) {
        mn_scan_copy_keys<KP, CHANNEL>(smem.first(from.slot(n), !from.has_second, job.tight),
                                       job, from.first, from.packed_first,
                                       from.decayed_first, at, chunk);
    }
    if (from.has_second) {
        mn_scan_copy_keys<KP, CHANNEL>(smem.second(n, job.tight), job, from.second,
                                       from.packed_second,
                                       from.decayed_second, at, chunk);
    }
}

/* ---- by TMA ---------------------------------------------------------------------- */

#if MN_HAS_WGMMA

/* False in the producer thread that is to issue the TMA loads; all others arrive at the mbarrier
 * and get true. */
__device__ inline bool mn_scan_not_elected(uint64_t *mbarrier) {
    if (mn_scan_producer_tid() < 32 && mn_elect_one()) return false;
    mn_mbarrier_arrive(mbarrier);
    return true;
}

/* Issues loads of COLUMNS columns from `column` on of 64 rows from (h, t, b) on. */
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

template <int KP, int CHANNEL>
__device__ inline void mn_scan_tma_load_keys(unsigned char *tile, const CUtensorMap &map,
                                        uint64_t *mbarrier, const mn_scan_coord &at,
                                            int64_t index,
                                        int chunk) {
    const int64_t t = at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK;
    if (CHANNEL) mn_scan_tma_load<KP>(tile, map, mbarrier, 0, 0, index * MN_DELTA_CHUNK, 0);
    else mn_scan_tma_load<KP>(tile, map, mbarrier, 0, at.key, t, at.span.b);
}

template <int KP, int CHANNEL>
__device__ inline void mn_scan_tma_load_front(mn_scan_smem<KP> &smem,
                                                   const mn_delta_params &job,
                                         const mn_scan_tma_maps &maps,
                                             const mn_scan_source &from,
                                             const mn_scan_coord &at, int n,
                                         int chunk) {
    constexpr int log_decays = (CHANNEL ? KP : 2 * MN_DELTA_CHUNK) * (int)sizeof(float);
    mn_scan_front<KP> &to = smem.front(n, job.tight);
    uint64_t *mbarrier = &smem.mbarriers.front[n % 2];
    if (mn_scan_not_elected(mbarrier)) return;
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_mbarrier_arrive_expect_tx(mbarrier, (int)sizeof to.keys +
                                               (2 + from.has_P) * (int)sizeof to.T + log_decays);
    mn_scan_tma_load_keys<KP, CHANNEL>(to.keys, maps.keys, mbarrier, at, index, chunk);
    if (CHANNEL == MN_DELTA_PAIRS) {
        mn_tma_load_pairs(to.values, maps.values, mbarrier, (int)at.column0, (int)at.h,
                          (int)at.span.t0 + chunk * mn_delta_chunk_tokens(true), (int)at.span.b);
    } else {
        mn_scan_tma_load<64>(to.values, maps.values, mbarrier, at.column0, at.h,
                             at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK, at.span.b);
    }
    if (job.T_tiled) {
        mn_tma_load_1d(to.T, job.workspace.T + index * MN_DELTA_MATRIX, (int)sizeof to.T, mbarrier);
    } else {
        mn_scan_tma_load<64>(to.T, maps.T, mbarrier, 0, 0, index * MN_DELTA_CHUNK, 0);
    }
    if (from.has_P) {
        mn_scan_tma_load<64>(to.P, maps.P, mbarrier, 0, 0, index * MN_DELTA_CHUNK, 0);
    }
    if (CHANNEL) mn_tma_load_1d(to.cum_decay, job.workspace.cum_decay + index * KP, log_decays,
                                  mbarrier);
    else mn_tma_load_1d(to.gamma, job.workspace.log_decays[index].gamma, log_decays, mbarrier);
}

template <int KP, int CHANNEL>
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
        mn_scan_tma_load_keys<KP, CHANNEL>(smem.first(from.slot(n), !from.has_second, job.tight),
                                           maps.first, mbarrier, at, index, chunk);
    }
    if (from.has_second) {
        mn_scan_tma_load_keys<KP, CHANNEL>(smem.second(n, job.tight), maps.second, mbarrier, at,
                                           index, chunk);
    }
}

/* Waits for this thread's copies and arrives at their mbarrier. */
__device__ inline void mn_scan_copy_arrive(uint64_t *mbarrier) {
    mn_cp_async_commit();
    mn_cp_async_wait<0>();
    mn_fence_proxy_async();
    mn_mbarrier_arrive(mbarrier);
}

#else

template <int KP, int CHANNEL>
__device__ inline void mn_scan_tma_load_front(mn_scan_smem<KP> &, const mn_delta_params &,
                                         const mn_scan_tma_maps &, const mn_scan_source &,
                                         const mn_scan_coord &, int, int) {}

template <int KP, int CHANNEL>
__device__ inline void mn_scan_tma_load_back(mn_scan_smem<KP> &, const mn_delta_params &,
                                        const mn_scan_tma_maps &, const mn_scan_source &,
                                        const mn_scan_coord &, int, int) {}

__device__ inline void mn_scan_copy_arrive(uint64_t *) {}

#endif

/* ---- the producer warps, and waiting for them ------------------------------------------------ */

#if MN_HAS_WGMMA

/* front(n) and back(n) load the n-th chunk of the scan. `ahead`: both go one chunk ahead; `one`:
 * there is one front, which does not. */
template <typename Front, typename Back>
__device__ inline void mn_scan_producer_loop(const mn_scan_mbarriers &mbarriers, int count,
                                             bool ahead, bool one, Front front, Back back) {
    const auto all = [&](auto fetch, int n) {
        if (n < count) fetch(n);
    };
    all(front, 0);
    if (ahead) all(back, 0);
    for (int n = 0; n < count; n++) {
        if (n > 0) mn_mbarrier_wait(&mbarriers.empty[(n - 1) % 2], (n - 1) / 2 % 2);
        if (one && n > 0) front(n);
        if (!ahead) back(n);
        if (!one) all(front, n + 1);
        if (ahead) all(back, n + 1);
    }
}

#else

/* Likewise, in step with the others. */
template <typename Front, typename Back>
__device__ inline void mn_scan_producer_loop(const mn_scan_mbarriers &, int count, bool ahead,
                                             bool one, Front front, Back back) {
    const auto all = [&](auto fetch, int n) {
        if (n < count) fetch(n);
        mn_cp_async_commit();
    };
    if (!one) all(front, 0);
    if (ahead) all(back, 0);
    for (int n = 0; n < count; n++) {
        if (one) all(front, n);
        if (!ahead) all(back, n);
        if (!one) all(front, n + 1);
        if (ahead) all(back, n + 1);
        if (one) mn_cp_async_wait<1>();
        else mn_cp_async_wait<2>();
        __syncthreads();
        if (!ahead) {
            if (one) mn_cp_async_wait<0>();
            else mn_cp_async_wait<1>();
            __syncthreads();
        }
        __syncthreads();
    }
}

#endif

/* What the producer warps do. chunk_at(n): the n-th chunk of the scan. */
template <int KP, int CHANNEL, typename ChunkAt>
__device__ inline void mn_scan_load_chunks(mn_scan_smem<KP> &smem, const mn_delta_params &job,
                                     const mn_scan_tma_maps &maps,
                                         const mn_scan_source &from,
                                     ChunkAt chunk_at) {
    const mn_scan_coord at = smem.place;    // in registers: shared memory answers slowly here
    const bool tight = job.tight, one = KP > 128 && tight;
    const bool ahead = mn_scan_smem<KP>::ahead(!from.has_second, tight) && !from.one_back;
    const auto uses_tma = [&](int chunk) {
        return maps.serve &&
               !((job.p.call.cu_seqlens || job.cuts) &&
                 mn_scan_chunk_len(at, chunk) < MN_DELTA_CHUNK);
    };
    const auto front = [&](int n) {
        const int chunk = chunk_at(n);
        const bool part = at.from > 0 && chunk == at.skip;    // of a redo back
        if (MN_HAS_WGMMA && uses_tma(chunk) && !part) {
            mn_scan_tma_load_front<KP, CHANNEL>(smem, job, maps, from, at, n, chunk);
        } else {
            mn_scan_copy_front<KP, CHANNEL>(smem.front(n, tight), job, from, at, chunk);
            if (part) mn_scan_zero_head(smem.front(n, tight).values, at.from);
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
    mn_scan_producer_loop(smem.mbarriers, at.n_chunks - at.skip, ahead, one, front, back);
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

/* Waits for the n-th back. */
template <int KP>
__device__ inline void mn_scan_wait_back(const mn_scan_smem<KP> &smem, int n,
                                               bool ahead) {
#if MN_HAS_WGMMA
    mn_mbarrier_wait(&smem.mbarriers.back[n % 2], n / 2 % 2);
#else
    if (!ahead) __syncthreads();    // otherwise it came with the front
#endif
}

/* This thread has done with the n-th chunk. */
template <int KP>
__device__ inline void mn_scan_release(mn_scan_smem<KP> &smem, int n) {
#if MN_HAS_WGMMA
    mn_mbarrier_arrive(&smem.mbarriers.empty[n % 2]);
#else
    __syncthreads();
#endif
}

/* Where the splits of a column tile meet, at the end of shared memory: sums of each split for the
 * tokens of the others, and the operands that each makes of its tokens. What would be a split's
 * sums for itself is its scratch, where it transposes results. */
template <int SPLITS>
struct alignas(16) mn_scan_exchange {
    static constexpr int scratch_bytes = 8 / SPLITS * 32 * (int)sizeof(float4);

    float4 sums[SPLITS][SPLITS][8 / SPLITS][32];
    uint4 operands[4][32];

    __device__ unsigned char *scratch(int split) {
        return (unsigned char *)sums[split][split];
    }
};

/* Which column tile of the block this warp has, and which part of the channels. A warpgroup is
 * the four warps of one split. */
template <bool WGMMA, int SPLITS>
struct mn_scan_role {
    static __device__ int col_tile(void) {
        const int warp = threadIdx.x / 32;
        return WGMMA ? warp % MN_DELTA_COL_TILES : warp / SPLITS;
    }

    static __device__ int split(void) {
        const int warp = threadIdx.x / 32;
        return SPLITS == 1 ? 0 : WGMMA ? warp / MN_DELTA_COL_TILES : warp % SPLITS;
    }
};

/* Splits, and so parts of the channels that are summed up apart. */
template <int KP>
constexpr int mn_scan_splits = KP <= 128 ? 1 : 2;

constexpr int mn_scan_threads(int splits) {
    return 32 * MN_DELTA_COL_TILES * splits + MN_DELTA_PRODUCERS;
}

/* What a scan forward leaves: outputs and the last state; S in front of each chunk and R of each,
 * in the workspace; the map of a segment. */
enum { MN_SCAN_OUTPUT, MN_SCAN_SAVE, MN_SCAN_MAP };

/* Two consumer warpgroups take registers from the producers, and so does that of a block of which a
 * processor holds two (BLOCKS). */
template <int SPLITS, bool PRODUCER, int BLOCKS = 1>
__device__ __forceinline__ void mn_scan_setmaxnreg(void) {
#if MN_HAS_WGMMA
    if (SPLITS == 1 && BLOCKS == 1) return;
    if (PRODUCER) mn_setmaxnreg_dec<88>();
    else if (BLOCKS == 2) mn_setmaxnreg_inc<168>();
    else mn_setmaxnreg_inc<208>();
#endif
}

/* Where a column tile's results are transposed in the scan back if a processor holds two blocks,
 * which wait for their products most of the time: behind the tiles that each needs then, the fronts
 * and one tile of queries. */
enum { MN_SCAN_SCRATCH_OF_TWO = 2048 };

template <int KP>
__host__ __device__ constexpr size_t mn_scan_bytes_of_two(void) {
    return offsetof(mn_scan_smem<KP>, behind) + mn_tile_bytes<KP>();
}

/* ---- results of left operands ---------------------------------------------------------------- */

/* Stores sixteen rows of 16 N columns in the workspace, rows `pitch` apart. On Hopper they pass
 * through SCRATCH bytes, in pieces of 32 columns whose vec16s are exchanged so that lanes meet in
 * no bank, and leave 16 bytes at a time. */
template <int SCRATCH, int N>
__device__ inline void mn_scan_store_frags(mn_bf16 *to, int pitch, const unsigned (&x)[N][4],
                                     unsigned char *scratch) {
    const int lane = threadIdx.x % 32;
    if constexpr (MN_HAS_WGMMA && N % 2 == 0) {
        constexpr int pieces = N / 2 < SCRATCH / 1024 ? N / 2 : SCRATCH / 1024;
        const auto place = [](int row, int vec16) {
            return (unsigned)(row * 64 + ((vec16 ^ (row >> 1 & 3)) << 4));
        };
        const unsigned from = mn_shared_u32(scratch);
        to += lane / 4 * pitch + lane % 4 * 8;
#pragma unroll
        for (int first = 0; first < N / 2; first += pieces) {
            __syncwarp();
#pragma unroll
            for (int k = 0; k < 2 * pieces; k++) {
                const unsigned(&a)[4] = x[2 * first + k];
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n"
                             ::"r"(from + k / 2 * 1024 +
                                   place(lane % 16, k % 2 * 2 + lane / 16)),
                             "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                             : "memory");
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2 * pieces; i++) {
                const int row = lane / 4 + i % 2 * 8;
                *(uint4 *)(to + i % 2 * 8 * pitch + 32 * (first + i / 2)) =
                    *(const uint4 *)(scratch + i / 2 * 1024 + place(row, lane % 4));
            }
        }
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) {
            unsigned *at = (unsigned *)(to + lane / 4 * pitch + 16 * k + lane % 4 * 2);
            at[0] = x[k][0], at[4 * pitch] = x[k][1];
            at[4] = x[k][2], at[4 * pitch + 4] = x[k][3];
        }
    }
}

/* ---- states in registers --------------------------------------------------------------------- */

/* From the tensors of a call and to them, for a state whose each() knows where its numbers lie. */
template <typename STATE>
struct mn_scan_state_of_call {
    __device__ void load(const mn_delta_params &job, const mn_scan_coord &place) {
        const float *from = place.state_in;
        const int64_t K = job.p.call.K, V = job.p.call.V;
        ((STATE *)this)->each(place.column0, [&](float &x, int64_t row, int64_t column) {
            x = from && row < K && column < V ? from[row * V + column] : 0.0f;
        });
    }

    __device__ void store(const mn_delta_params &job, const mn_scan_coord &place) {
        float *to = place.state_out;
        const int64_t K = job.p.call.K, V = job.p.call.V;
        if (!to) return;
        ((STATE *)this)->each(place.column0, [&](float &x, int64_t row, int64_t column) {
            if (row < K && column < V) to[row * V + column] = x;
        });
    }
};

/* Rows of this lane: columns j and j + 8 of the value axis; columns: channels 8 i + 2 (l % 4) of
 * the split's. */
template <int KP, bool WGMMA, int SPLITS>
struct mn_scan_state : mn_scan_state_of_call<mn_scan_state<KP, WGMMA, SPLITS>> {
    static constexpr int width = KP / SPLITS;    // channels of a split
    static constexpr int part_bytes = mn_tile_bytes<width>();
    using role = mn_scan_role<WGMMA, SPLITS>;

    float at[width / 8][4];

    /* use(x, row, column) for this lane's numbers */
    template <typename F>
    __device__ void each(int64_t column0, F use) {
        const int lane = threadIdx.x % 32, channel0 = role::split() * width;
        const int64_t j = column0 + role::col_tile() * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < width / 8; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                use(at[i][c], channel0 + 8 * i + lane % 4 * 2 + c % 2, j + c / 2 * 8);
            }
        }
    }

    /* Of a segment's map: zeros, and behind the values' columns the unit matrix. */
    __device__ void begin_map(const mn_delta_params &job, const mn_scan_coord &place) {
        each(place.column0, [&](float &x, int64_t row, int64_t column) {
            x = column == job.padded_v + row ? 1.0f : 0.0f;
        });
    }

    __device__ void store_map(const mn_delta_params &job, const mn_scan_coord &place) {
        if (!place.map) return;
        float *to = mn_scan_segment_map<KP>(job, place.n, place.h, place.segment);
        each(place.column0, [&](float &x, int64_t row, int64_t column) {
            to[row * (job.padded_v + KP) + column] = x;
        });
    }

    template <int CHANNEL>
    __device__ void decay(const mn_scan_front<KP> &chunk) {
        const int column = role::split() * width + threadIdx.x % 4 * 2;
        const float shared = chunk.gamma[MN_DELTA_CHUNK - 1];
#pragma unroll
        for (int i = 0; i < width / 8; i++) {
            float2 cum_decay = make_float2(shared, shared);
            if (CHANNEL) cum_decay = *(const float2 *)&chunk.cum_decay[8 * i + column];
            at[i][0] *= cum_decay.x, at[i][1] *= cum_decay.y, at[i][2] *= cum_decay.x,
                at[i][3] *= cum_decay.y;
        }
    }

    /* The shared address of the split's channels in a tile of rows of keys. */
    __device__ unsigned part(const unsigned char *rows) const {
        return mn_shared_u32(rows) + role::split() * part_bytes;
    }

    /* += x rows, for x (16 values, 64 tokens) and a tile of rows of keys. */
    __device__ void add(const unsigned (&x)[4][4], const unsigned char *tile) {
        const unsigned rows = part(tile);
#pragma unroll
        for (int smem_tile = 0; smem_tile < width / 64; smem_tile++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mn_mma_ab<WGMMA>(&at[8 * smem_tile], x[k], rows, 16 * k, smem_tile, 4);
            }
        }
    }

    /* sums += state rows', (16 values, 64 tokens), over the split's channels. `keep`, where not
     * NULL, is where this column tile of the state goes in bf16. */
    template <int SCRATCH = mn_scan_exchange<SPLITS>::scratch_bytes>
    __device__ void read(float (&sums)[8][4], const unsigned char *tile, mn_bf16 *keep,
                         unsigned char *scratch) const {
        constexpr int steps = width / 16;
        const unsigned rows = part(tile);
        unsigned a[steps][4];
#pragma unroll
        for (int k = 0; k < steps; k++) mn_frag_a_of(a[k], at[2 * k], at[2 * k + 1]);
        mn_mma_fence<WGMMA>();
#pragma unroll
        for (int k = 0; k < steps; k++) mn_mma_abt<WGMMA>(sums, a[k], rows, 16 * k, 0);
        mn_mma_commit<WGMMA>();
        if (keep) mn_scan_store_frags<SCRATCH>(keep + role::split() * width, KP, a, scratch);
        mn_mma_wait<WGMMA>();
    }
};

/* ---- sums over tokens in registers ----------------------------------------------------------- */

/* (16 values, 8 N tokens) by tokens' numbers. */
template <int N>
__device__ inline void mn_scan_scale_tokens(float (&x)[N][4], const float *factor, float more) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 by = *(const float2 *)&factor[8 * n + column];
        x[n][0] *= more * by.x, x[n][1] *= more * by.y;
        x[n][2] *= more * by.x, x[n][3] *= more * by.y;
    }
}

template <int N>
__device__ inline void mn_scan_frags_a(unsigned (&a)[N / 2][4], const float (&x)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) mn_frag_a_of(a[k], x[2 * k], x[2 * k + 1]);
}

/* ---- rows in pairs (delta_pairs.cuh) --------------------------------------------------------- */

/* In both rows of a token what the second has. */
template <int N>
__device__ inline void mn_scan_second_rows(unsigned (&x)[N][4]) {
#pragma unroll
    for (int k = 0; k < N; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) x[k][i] = __byte_perm(x[k][i], 0, 0x3232);
    }
}

/* What a read of joined rows gives: sums of first rows stay, those of second rows go to Q. */
template <int N>
__device__ inline void mn_scan_split_rows(float (&x)[N][4], float (&Q)[N][2]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        Q[n][0] = x[n][1], Q[n][1] = x[n][3];
        x[n][1] = x[n][3] = 0.0f;
    }
}

/* First rows of x, second ones of y. */
template <int N>
__device__ inline void mn_scan_join_rows(unsigned (&x)[N][4], const unsigned (&y)[N][4]) {
#pragma unroll
    for (int k = 0; k < N; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) x[k][i] = __byte_perm(x[k][i], y[k][i], 0x7610);
    }
}

/* In the second row of a token the sum of both, and what was split off. */
template <int N>
__device__ inline void mn_scan_add_rows(float (&x)[N][4], const float (&Q)[N][2]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        x[n][1] = Q[n][0] + (x[n][1] + x[n][0]), x[n][3] = Q[n][1] + (x[n][3] + x[n][2]);
    }
}

/* As left operands a token's first row, and in its second what rounding left of the first. */
template <int N>
__device__ inline void mn_scan_first_rows(unsigned (&a)[N / 2][4], const float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float first = x[n][2 * half];
            a[n / 2][n % 2 * 2 + half] = mn_bf16x2(first, first - mn_bf16_lo(mn_bf16x2(first,
                                                                                       0.0f)));
        }
    }
}

/* What rounding to left operands `a` left of x, as such; and sums that begin with it. */
template <int N>
__device__ inline void mn_scan_rest(unsigned (&rest)[N / 2][4], const float (&x)[N][4],
                                    const unsigned (&a)[N / 2][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = n % 2 * 2 + half;
            rest[n / 2][i] = mn_bf16x2_rest(x[n][2 * half], x[n][2 * half + 1], a[n / 2][i]);
        }
    }
}

template <int N>
__device__ inline void mn_scan_begin(float (&x)[N][4], const unsigned (&a)[N / 2][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const unsigned pair = a[n / 2][n % 2 * 2 + c / 2];
            x[n][c] = c % 2 ? mn_bf16_hi(pair) : mn_bf16_lo(pair);
        }
    }
}

template <int N>
__device__ inline void mn_scan_begin_with_rest(float (&y)[N][4], const float (&x)[N][4],
                                               const unsigned (&a)[N / 2][4]) {
    unsigned rest[N / 2][4];
    mn_scan_rest(rest, x, a);
    mn_scan_begin(y, rest);
}

/* ---- products over tokens -------------------------------------------------------------------- */

/* y += x matrix', for a lower triangle; x are tokens from 16 * first on. */
template <bool WGMMA, int N>
__device__ inline void mn_scan_mma_lower(float (&y)[8][4], const unsigned (&x)[N][4],
                                           unsigned matrix,
                                     int first) {
    mn_mma_fence<WGMMA>();
#pragma unroll
    for (int k = 0; k < N; k++) {
        mn_mma_abt<WGMMA>(y, x[k], matrix, 16 * (first + k), first + k);
    }
    mn_mma_commit_wait<WGMMA>();
}

/* y += x matrix, likewise. */
template <bool WGMMA, int N>
__device__ inline void mn_scan_mma_upper(float (&y)[8][4], const unsigned (&x)[N][4],
                                           unsigned matrix,
                                     int first) {
    mn_mma_fence<WGMMA>();
#pragma unroll
    for (int k = 0; k < N; k++) {
        mn_mma_ab<WGMMA>(y, x[k], matrix, 16 * (first + k), 0, first + k + 1);
    }
    mn_mma_commit_wait<WGMMA>();
}

/* Where results of a column tile's tokens and columns go: this lane has eight columns of every
 * 16th token of its split. */
template <bool PAIRS>
struct mn_scan_out_rows {
    static constexpr int rows = PAIRS ? 2 : 1;    // of a token: the last is its result

    mn_bf16 *to;        // of the first chunk; NULL: nowhere
    int64_t step;       // between tokens
    int left, width;    // rows and columns from there on
    int from;           // in pairs: rows in front of it, which a redo back leaves out
    bool packed;

    __device__ mn_scan_out_rows(const mn_out &view, bool packs,
                                     const mn_scan_coord &at, int64_t V,
                               int col_tile, int row) {
        const int64_t j = at.column0 + col_tile * 16 + threadIdx.x % 2 * 8;
        row += threadIdx.x % 32 / 2;
        to = mn_row<mn_bf16>(view, at.span.b, at.span.t0 + row / rows, at.h);
        if (to) to += j;
        step = view.stride[1], packed = packs;
        left = (int)(at.n_rows - row), width = (int)(V - j);
        from = at.skip * MN_DELTA_CHUNK + at.from - row;
        if (row % rows != rows - 1) left = 0;
    }

    /* Rows of 8 N tokens. They pass through 256 N bytes, a token's two vec16s exchanged in every
     * other four, so that lanes meet in no bank. */
    template <int N>
    __device__ void put(int chunk, const float (&x)[N][4], unsigned char *scratch) const {
        const int lane = threadIdx.x % 32;
        const auto place = [](int token, int vec16) {
            return token * 32 + ((vec16 ^ (token >> 2 & 1)) << 4);
        };
        __syncwarp();
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const unsigned pair = mn_movmatrix_trans(mn_bf16x2(x[n][2 * half],
                                                                   x[n][2 * half + 1]));
                *(unsigned *)(scratch + place(8 * n + lane / 4, half) + lane % 4 * 4) = pair;
            }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const int token = chunk * MN_DELTA_CHUNK + 16 * i;
            if (token >= left || width <= 0 || (PAIRS && token < from)) continue;
            const mn_vec<mn_bf16, 8> pack =
                *(mn_vec<mn_bf16, 8> *)(scratch + place(16 * i + lane / 2, lane % 2));
            mn_bf16 *row = to + token / rows * step;
            if (packed) {
                *(mn_vec<mn_bf16, 8> *)row = pack;
            } else {
                for (int c = 0; c < 8 && c < width; c++) row[c] = pack.at[c];
            }
        }
    }
};

/* Rows of values of this column tile in records of a sequence's chunks, padded_v in each. */
struct mn_scan_records {
    int64_t first, step;

    __device__ mn_scan_records(const mn_delta_params &job, const mn_scan_coord &at,
                                     int col_tile) {
        step = job.p.call.H * job.padded_v;
        first = (at.first * job.p.call.H + at.h) * job.padded_v + at.column0 + col_tile * 16;
    }

    template <typename X>
    __device__ X *at(X *records, int chunk, int width) const {
        return records + (first + chunk * step) * width;
    }
};

/* ---- splits ---------------------------------------------------------------------------------- */

/* A barrier of all splits of a column tile. */
template <int SPLITS>
__device__ inline void mn_scan_split_sync(int col_tile) {
    asm volatile("barrier.sync %0, %1;\n" ::"r"(1 + col_tile), "n"(32 * SPLITS) : "memory");
}

/* Left operands for the other splits of a column tile, and from them. */
template <int N>
__device__ inline void mn_scan_put_frags(uint4 (*smem)[32], const unsigned (&x)[N][4]) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        smem[k][threadIdx.x % 32] = make_uint4(x[k][0], x[k][1], x[k][2], x[k][3]);
    }
}

template <int N>
__device__ inline void mn_scan_get_frags(unsigned (&x)[N][4], const uint4 (*smem)[32]) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        const uint4 from = smem[k][threadIdx.x % 32];
        x[k][0] = from.x, x[k][1] = from.y, x[k][2] = from.z, x[k][3] = from.w;
    }
}

/* Sums over this split's channels for the tokens of the others. */
template <int SPLITS>
__device__ inline void mn_scan_store_partials(mn_scan_exchange<SPLITS> &smem,
                                           const float (&sums)[8][4],
                                    int split) {
    constexpr int tiles = 8 / SPLITS;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        if (n / tiles == split) continue;
        smem.sums[n / tiles][split][n % tiles][threadIdx.x % 32] =
            make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
    }
}

/* The whole sums for this split's tokens, once all have given theirs. */
template <int SPLITS>
__device__ inline void mn_scan_reduce_partials(float (&local)[8 / SPLITS][4],
                                               const float (&sums)[8][4],
                                    const mn_scan_exchange<SPLITS> &smem, int split) {
    constexpr int tiles = 8 / SPLITS;
#pragma unroll
    for (int n = 0; n < tiles; n++) {
#pragma unroll
        for (int from = 0; from < SPLITS; from++) {
            const float(&own)[4] = sums[from * tiles + n];
            float4 x = make_float4(own[0], own[1], own[2], own[3]);
            if (from != split) x = smem.sums[split][from][n][threadIdx.x % 32];
            if (from == 0) local[n][0] = x.x, local[n][1] = x.y, local[n][2] = x.z,
                local[n][3] = x.w;
            else local[n][0] += x.x, local[n][1] += x.y, local[n][2] += x.z, local[n][3] += x.w;
        }
    }
}

/* Operands of all tokens from those of each split's own. */
template <int SPLITS>
__device__ inline void mn_scan_allgather(unsigned (&x)[4][4],
                                            const unsigned (&own)[4 / SPLITS][4],
                                      uint4 (&smem)[4][32], int col_tile, int split) {
    constexpr int steps = 4 / SPLITS;
    mn_scan_put_frags(smem + split * steps, own);
    mn_scan_split_sync<SPLITS>(col_tile);
    mn_scan_get_frags(x, smem);
}

/* This split's share of what all have. */
template <int SPLITS, int N, typename X>
__device__ inline void mn_scan_own_share(X (&local)[N / SPLITS][4], const X (&x)[N][4], int split) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (n < N / SPLITS || n / (N / SPLITS) == split) local[n % (N / SPLITS)][i] = x[n][i];
        }
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* X of tokens from 8 * first on from Ed S, (16 values, 8 N tokens), and a tile of values (64
 * tokens, 64 columns). */
template <int N>
__device__ inline void mn_scan_subtract_from(float (&X)[N][4], unsigned values, int col_tile,
                                             int first) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        unsigned v[4];
        mn_frag_a_trans(v, values, col_tile * 16, 8 * first + 16 * k);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float(&to)[4] = X[2 * k + half];
            to[0] = mn_bf16_lo(v[2 * half]) - to[0], to[1] = mn_bf16_hi(v[2 * half]) - to[1];
            to[2] = mn_bf16_lo(v[2 * half + 1]) - to[2],
                to[3] = mn_bf16_hi(v[2 * half + 1]) - to[3];
        }
    }
}

/* The same as left operands. */
template <int KP, int CHANNEL, int N>
__device__ inline void mn_scan_residuals(unsigned (&x)[N / 2][4], float (&X)[N][4],
                                      const mn_scan_front<KP> &front, int col_tile, int first) {
    if (!CHANNEL) mn_scan_scale_tokens(X, front.gamma + 8 * first, 1.0f);
    mn_scan_subtract_from(X, mn_shared_u32(front.values), col_tile, first);
    mn_scan_frags_a(x, X);
}

/* What the producer warps do. */
template <int KP, int CHANNEL, int MODE>
__device__ inline void mn_scan_load_forward(mn_scan_smem<KP> &smem,
                                                  const mn_delta_params &job,
                                           const mn_scan_tma_maps &maps, bool same_keys) {
    const mn_delta_args &p = job.p;
    const mn_scan_source from = {
        p.e, p.v, p.q, p.w, job.workspace.e, job.workspace.q, job.workspace.w,
            job.packed[MN_DELTA_E],
        job.packed[MN_DELTA_V], job.packed[MN_DELTA_Q], job.packed[MN_DELTA_W],
        MODE == MN_SCAN_OUTPUT && !mn_rows_joined<CHANNEL>, !same_keys, MODE == MN_SCAN_OUTPUT,
        false,
    };
    mn_scan_load_chunks<KP, CHANNEL>(smem, job, maps, from, [](int n) { return n; });
}

/* Grid: block = (n * H + h) * n_slices + slice, a slice being 64 value columns; it goes through the
 * chunks of sequence n in order, or of a segment (mn_delta_scan_units).
 * Loads   e, q, w (64,K) (decayed ones of the workspace where CHANNEL), v (64, 64 columns), T and P
 *         (64,64) and the decays of each chunk; the state (K, 64 columns) at the start.
 * Stores  o (64, 64 columns) of each chunk and the state at the end. MN_SCAN_SAVE: instead of o
 *         S in front of each chunk and R of each, in the workspace. MN_SCAN_MAP: the segment's map
 *         alone, columns of values and of the unit matrix; the launch in front may still be at
 *         work, and the first block waits for it at its end. */
template <int KP, int CHANNEL, int MODE>
__global__ void __launch_bounds__(mn_scan_threads(mn_scan_splits<KP>), MODE == MN_SCAN_MAP ? 2 : 1)
delta_state_scan_kernel(const __grid_constant__ mn_delta_params job,
                     const __grid_constant__ mn_scan_tma_maps maps, int64_t n_slices) {
    extern __shared__ __align__(1024) unsigned char scan_smem_bytes[];
    constexpr int SPLITS = mn_scan_splits<KP>;
    constexpr bool SAVE = MODE == MN_SCAN_SAVE, MAP = MODE == MN_SCAN_MAP;
    constexpr int BLOCKS = MAP ? 2 : 1;
    if (MAP && !MN_HAS_WGMMA) return;
    mn_scan_smem<KP> &smem = *(mn_scan_smem<KP> *)scan_smem_bytes;
    const mn_delta_args &p = job.p;
    if (job.segments.part == MN_DELTA_SEGMENT_FIRST) mn_pdl_launch_dependents();
    mn_scan_init_smem<KP, SPLITS, false>(smem, job, n_slices, p.state0,
                                         MODE == MN_SCAN_OUTPUT ? p.state : mn_out{});
    const mn_scan_coord &at = smem.place;
    if (job.cuts && at.n_chunks == 0) return;
    const bool same_keys = !CHANNEL && !p.w.data;    // writes where it erases
    const bool ahead = mn_scan_smem<KP>::ahead(same_keys, job.tight);
    if (mn_scan_producer_tid() >= 0) {
        mn_scan_setmaxnreg<SPLITS, true, BLOCKS>();
        mn_scan_load_forward<KP, CHANNEL, MODE>(smem, job, maps, same_keys);
        if (MAP && blockIdx.x == 0) mn_pdl_wait();
        return;
    }
    mn_scan_setmaxnreg<SPLITS, false, BLOCKS>();
    constexpr int steps = 4 / SPLITS, tiles = 8 / SPLITS;    // of a split's tokens
    constexpr int scratch_bytes = mn_scan_exchange<SPLITS>::scratch_bytes;
    const int col_tile = mn_scan_role<true, SPLITS>::col_tile();
    const int split = mn_scan_role<true, SPLITS>::split();
    mn_scan_exchange<SPLITS> &exchange =
        ((mn_scan_exchange<SPLITS> *)(scan_smem_bytes +
                                    mn_scan_smem<KP>::bytes(job.tight)))[col_tile];
    const mn_scan_out_rows<CHANNEL == MN_DELTA_PAIRS> results(
        p.o, job.packed[MN_DELTA_O], at, p.call.V, col_tile,
        split * tiles * 8);
    const mn_scan_records records(job, at, col_tile);
    const int n_chunks = at.n_chunks;
    mn_scan_state<KP, true, SPLITS> S;
    if (MAP) S.begin_map(job, at);
    else S.load(job, at);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        mn_scan_front<KP> &front = smem.front(chunk, job.tight);
        float X[8][4] = {}, R[8][4] = {}, O[8][4] = {};
        unsigned x[4][4], r[4][4], local[steps][4];
        mn_scan_wait_front(smem, chunk);
        S.read(X, front.keys, SAVE ? records.at(job.workspace.S, chunk, KP) : nullptr,
               exchange.scratch(split));
        float Q[8][2] = {};
        if (mn_rows_joined<CHANNEL>) mn_scan_split_rows(X, Q);
        if constexpr (SPLITS == 1) {
            mn_scan_residuals<KP, CHANNEL>(x, X, front, col_tile, 0);
        } else {
            float own[tiles][4];
            mn_scan_split_sync<SPLITS>(col_tile);    // all have taken what was given last
            mn_scan_store_partials<SPLITS>(exchange, X, split);
            mn_scan_split_sync<SPLITS>(col_tile);
            mn_scan_reduce_partials<SPLITS>(own, X, exchange, split);
            mn_scan_residuals<KP, CHANNEL>(local, own, front, col_tile, split * tiles);
            mn_scan_allgather<SPLITS>(x, local, exchange.operands, col_tile, split);
        }
        mn_scan_mma_lower<true>(R, x, mn_shared_u32(front.T), 0);
        mn_scan_frags_a(r, R);
        mn_scan_own_share<SPLITS>(local, r, split);
        if (!CHANNEL) mn_scan_scale_tokens(R, front.write, 1.0f);
        mn_scan_frags_a(x, R);
        if (MODE == MN_SCAN_OUTPUT || !same_keys) mn_scan_wait_back(smem, chunk, ahead);
        if (SAVE) {
            mn_scan_store_frags<scratch_bytes>(records.at(job.workspace.R, chunk, MN_DELTA_CHUNK) +
                                             16 * steps * split, MN_DELTA_CHUNK, local,
                                         exchange.scratch(split));
        } else if (!MAP) {
            if (!mn_rows_joined<CHANNEL>) {
                S.read(O, smem.first(chunk, same_keys, job.tight), nullptr, nullptr);
            }
            if (!CHANNEL) mn_scan_scale_tokens(O, front.gamma, job.scale);
            mn_scan_mma_lower<true>(O, local, mn_shared_u32(front.P), split * steps);
            if (CHANNEL == MN_DELTA_PAIRS) mn_scan_add_rows(O, Q);
        }
        const bool puts = MODE == MN_SCAN_OUTPUT && results.to;
        if (puts && SPLITS > 1) mn_scan_store_partials<SPLITS>(exchange, O, split);
        S.template decay<CHANNEL>(front);
        mn_mma_fence<true>();
        S.add(x, same_keys ? front.keys : smem.second(chunk, job.tight));
        mn_mma_commit<true>();
        if (puts) {
            float own[tiles][4];
            if (SPLITS > 1) mn_scan_split_sync<SPLITS>(col_tile);
            mn_scan_reduce_partials<SPLITS>(own, O, exchange, split);
            results.put(chunk, own, exchange.scratch(split));
        }
        mn_mma_wait<true>();
        mn_scan_release(smem, chunk);
    }
    if (MAP) S.store_map(job, at);
    else S.store(job, at);
}

/* ---- back ------------------------------------------------------------------------------------ */

/* The cotangent of this column tile's columns as left operands, transposed, tokens from 16 *
 * first on, each by its number. */
template <int N>
__device__ inline void mn_scan_cotangent(unsigned (&x)[N][4], unsigned tile, int col_tile,
                                               int first,
                                         const float *factor, float more) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int k = 0; k < N; k++) {
        mn_frag_a_trans(x[k], tile, col_tile * 16, 16 * (first + k));
        if (!factor) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 by = *(const float2 *)&factor[16 * (first + k) + i / 2 * 8 + column];
            x[k][i] = mn_bf16x2(more * by.x * mn_bf16_lo(x[k][i]),
                                more * by.y * mn_bf16_hi(x[k][i]));
        }
    }
}

/* Likewise as what P' multiplies, in pairs of rows with P in two parts. */
template <int CHANNEL, int KP, int N>
__device__ inline void mn_scan_cotangent_of_P(unsigned (&x)[N][4], const mn_scan_front<KP> &front,
                                              int col_tile, int first) {
    mn_scan_cotangent(x, mn_shared_u32(front.values), col_tile, first, nullptr, 1.0f);
    if (CHANNEL == MN_DELTA_PAIRS) mn_scan_second_rows(x);
}

/* What the record of dX has, as left operands. */
template <int CHANNEL>
__device__ inline void mn_scan_record_frags(unsigned (&x)[4][4], const float (&dX)[8][4]) {
    if (CHANNEL == MN_DELTA_PAIRS) mn_scan_first_rows(x, dX);
    else mn_scan_frags_a(x, dX);
}

/* What the producer warps do. */
template <int KP, int CHANNEL, int BLOCKS = 1>
__device__ inline void mn_scan_load_backward(mn_scan_smem<KP> &smem,
                                                   const mn_delta_params &job,
                                          const mn_scan_tma_maps &maps, bool same_keys) {
    const mn_delta_args &p = job.p;
    const mn_scan_source from = {
        same_keys ? p.e : p.w, p.cot.o, p.q, p.e, job.workspace.w, job.workspace.q, job.workspace.e,
        job.packed[MN_DELTA_W], job.packed[MN_DELTA_COT], job.packed[MN_DELTA_Q],
        job.packed[MN_DELTA_E], !mn_rows_joined<CHANNEL>, !same_keys, true, BLOCKS == 2,
    };
    const int last = smem.place.n_chunks - 1;
    mn_scan_load_chunks<KP, CHANNEL>(smem, job, maps, from, [=](int n) { return last - n; });
}

/* Grid: as forward, from the last chunk to the first.
 * Loads   w, q, e (64,K), do (64, 64 columns), T, P (64,64) and the decays of each chunk; the
 *         gradient of the last state (K, 64 columns), or what a segment's scan begins with.
 * Stores  dv (64, 64 columns) of each chunk, D behind each chunk and dX of each, in the workspace,
 *         and D at the end. Of a segment whose map it makes D at the end alone, from zeros.
 * May run beside the launch in front, for which the first block waits at its end. */
template <int KP, int CHANNEL, int BLOCKS = 1>
__global__ void __launch_bounds__(mn_scan_threads(mn_scan_splits<KP>), BLOCKS)
delta_state_scan_bwd_kernel(const __grid_constant__ mn_delta_params job,
                          const __grid_constant__ mn_scan_tma_maps maps, int64_t n_slices) {
    extern __shared__ __align__(1024) unsigned char scan_smem_bytes[];
    constexpr int SPLITS = mn_scan_splits<KP>;
    if (BLOCKS == 2 && !MN_HAS_WGMMA) return;
    mn_scan_smem<KP> &smem = *(mn_scan_smem<KP> *)scan_smem_bytes;
    const mn_delta_args &p = job.p;
    mn_pdl_launch_dependents();
    mn_scan_init_smem<KP, SPLITS, true>(smem, job, n_slices, p.cot.state, p.grad.state0);
    const mn_scan_coord &at = smem.place;
    if (job.cuts && at.n_chunks == at.skip) return;
    const bool same_keys = !CHANNEL && !p.w.data;
    const bool ahead = mn_scan_smem<KP>::ahead(same_keys, job.tight);
    if (mn_scan_producer_tid() >= 0) {
        mn_scan_setmaxnreg<SPLITS, true, BLOCKS>();
        mn_scan_load_backward<KP, CHANNEL, BLOCKS>(smem, job, maps, same_keys);
        if (blockIdx.x == 0) mn_pdl_wait();
        return;
    }
    mn_scan_setmaxnreg<SPLITS, false, BLOCKS>();
    constexpr int steps = 4 / SPLITS, tiles = 8 / SPLITS;
    constexpr int scratch_bytes =
        BLOCKS == 2 ? (int)MN_SCAN_SCRATCH_OF_TWO : mn_scan_exchange<SPLITS>::scratch_bytes;
    const int col_tile = mn_scan_role<true, SPLITS>::col_tile();
    const int split = mn_scan_role<true, SPLITS>::split();
    mn_scan_exchange<SPLITS> &exchange =
        ((mn_scan_exchange<SPLITS> *)(scan_smem_bytes +
                                    mn_scan_smem<KP>::bytes(job.tight)))[col_tile];
    unsigned char *scratch = BLOCKS == 2 ? scan_smem_bytes + mn_scan_bytes_of_two<KP>() +
                                               col_tile * scratch_bytes
                                         : exchange.scratch(split);
    const mn_scan_out_rows<CHANNEL == MN_DELTA_PAIRS> results(
        p.grad.v, job.packed[MN_DELTA_DV], at, p.call.V, col_tile,
        split * tiles * 8);
    const mn_scan_records records(job, at, col_tile);
    const int n_chunks = at.n_chunks;
    mn_scan_state<KP, true, SPLITS> D;
    const bool map = at.map;
    const int iters = n_chunks - at.skip;
    D.load(job, at);
    for (int iter = 0; iter < iters; iter++) {
        const int chunk = n_chunks - 1 - iter;
        mn_scan_front<KP> &front = smem.front(iter, job.tight);
        float dR[8][4] = {}, dX[8][4] = {};
        unsigned x[4][4], cot[4][4], local[steps][4];
        const float *gamma = CHANNEL ? nullptr : front.gamma;
        mn_scan_wait_front(smem, iter);
        D.template read<scratch_bytes>(
            dR, front.keys, map ? nullptr : records.at(job.workspace.D, chunk, KP), scratch);
        if (!CHANNEL) mn_scan_scale_tokens(dR, front.write, 1.0f);
        mn_scan_cotangent_of_P<CHANNEL>(local, front, col_tile, split * steps);
        mn_scan_mma_upper<true>(dR, local, mn_shared_u32(front.P), split * steps);
        if (SPLITS > 1) {
            mn_scan_split_sync<SPLITS>(col_tile);
            mn_scan_store_partials<SPLITS>(exchange, dR, split);
        }
        const auto read_cot = [&] {
            mn_scan_cotangent(cot, mn_shared_u32(front.values), col_tile, 0, gamma, job.scale);
        };
        if (BLOCKS == 1) read_cot();    // two blocks of a processor have no registers for it yet
        if constexpr (SPLITS == 1) {
            mn_scan_frags_a(x, dR);
            if (CHANNEL == MN_DELTA_PAIRS) mn_scan_begin_with_rest(dX, dR, x);
        } else {
            float own[tiles][4];
            mn_scan_split_sync<SPLITS>(col_tile);
            mn_scan_reduce_partials<SPLITS>(own, dR, exchange, split);
            mn_scan_frags_a(local, own);
            mn_scan_allgather<SPLITS>(x, local, exchange.operands, col_tile, split);
        }
        mn_scan_mma_upper<true>(dX, x, mn_shared_u32(front.T), 0);
        mn_scan_record_frags<CHANNEL>(x, dX);
        mn_scan_own_share<SPLITS>(local, x, split);
        if (!map && !job.dX_is_dv) {
            mn_scan_store_frags<scratch_bytes>(records.at(job.workspace.dX, chunk,
                                                          MN_DELTA_CHUNK) + 16 * steps * split,
                                               MN_DELTA_CHUNK, local, scratch);
        }
        if (results.to && !map) {
            float own[tiles][4];
            mn_scan_own_share<SPLITS>(own, dX, split);
            results.put(chunk, own, scratch);
        }
        mn_scan_wait_back(smem, iter, ahead);
        if (BLOCKS == 2) read_cot();
        D.template decay<CHANNEL>(front);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) dX[n][i] = -dX[n][i];
        }
        if (!CHANNEL) mn_scan_scale_tokens(dX, front.gamma, 1.0f);
        mn_scan_frags_a(x, dX);
        if (mn_rows_joined<CHANNEL>) mn_scan_join_rows(x, cot);
        mn_mma_fence<true>();
        if (!mn_rows_joined<CHANNEL>) {
            D.add(cot, smem.first(BLOCKS == 2 ? 0 : iter, same_keys, job.tight));
        }
        D.add(x, same_keys ? front.keys : smem.second(iter, job.tight));
        mn_mma_commit_wait<true>();
        mn_scan_release(smem, iter);
    }
    D.store_map(job, at);
    D.store(job, at);
}

}    // namespace mneme::delta

#endif
