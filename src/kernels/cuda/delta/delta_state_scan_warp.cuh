/* delta_state_scan_warp.cuh - delta's scans (delta_state_scan.cuh) where there are few columns
 * for so many processors: blocks of a column tile or two.
 *
 * As many warps share a column tile as there are tiles of 64 channels, and each is a split of
 * its own: it keeps the state of 64 channels, and computes the sums over all channels for its
 * share of the tokens. For that it stores its state in shared memory as a left operand for the
 * others, not sums of its own: added up by warps these would be added in another order than
 * warpgroups add them in, and the bits of a sequence would depend on those beside it. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_STATE_SCAN_WARP_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_STATE_SCAN_WARP_CUH

#include "kernels/cuda/delta/delta_state_scan.cuh"

namespace mneme::delta {

enum { MN_SCAN_WARP_TILES = MN_DELTA_COL_TILES / 2 };    // most column tiles of a block

/* Sizes for keys of KP channels. */
template <int KP>
struct mn_scan_sizes {
    static constexpr int splits = KP / 64;
    static constexpr int parts = mn_scan_splits<KP>;             // of sums
    static constexpr int steps = 4 / splits;                     // of 16 tokens, of a split
    static constexpr int tiles = 2 * steps;
    static constexpr int depth = KP / 16;                       // of sums over channels
    static constexpr int threads = 32 * MN_SCAN_WARP_TILES * splits + MN_DELTA_PRODUCERS;
};

/* Where the splits of a column tile meet, at the end of shared memory: the state, and what each
 * makes of its tokens, as left operands, and the scratch where each transposes results. Each meets
 * the others twice a chunk, behind what it shows; so what is shown has been seen when it is written
 * over. */
template <int KP>
struct alignas(16) mn_scan_warp_exchange {
    static constexpr int scratch_bytes = 4096 / mn_scan_sizes<KP>::splits;

    uint4 state[KP / 16][32];
    uint4 operands[4][32];
    unsigned char scratch[mn_scan_sizes<KP>::splits][scratch_bytes];
};

/* This split's part of the state as left operands, and with those of the others the whole state. */
template <int KP>
__device__ inline void mn_scan_gather_state(unsigned (&whole)[KP / 16][4],
                                                unsigned (&own)[4][4],
                                      const mn_scan_state<KP, false, KP / 64> &S,
                                      uint4 (&smem)[KP / 16][32], int col_tile, int split) {
#pragma unroll
    for (int k = 0; k < 4; k++) mn_frag_a_of(own[k], S.at[2 * k], S.at[2 * k + 1]);
    if constexpr (KP == 64) {
        memcpy(whole, own, sizeof own);
    } else {
        mn_scan_put_frags(smem + 4 * split, own);
        mn_scan_split_sync<KP / 64>(col_tile);
        mn_scan_get_frags(whole, smem);
    }
}

/* Sums over channels for this split's tokens, in the parts that are added in the end. */
template <int KP>
struct mn_scan_acc {
    using sizes = mn_scan_sizes<KP>;
    static constexpr int parts = sizes::parts, steps = sizes::steps, tiles = sizes::tiles;

    float at[parts][tiles][4];

    __device__ void add(int part, int n, const unsigned (&a)[4], const unsigned (&b)[4]) {
        mn_mma(at[part][2 * n], a, b[0], b[1]);
        mn_mma(at[part][2 * n + 1], a, b[2], b[3]);
    }

    /* += state rows', for a tile of rows of keys. */
    __device__ void read(const unsigned (&state)[KP / 16][4], const unsigned char *tile,
                         int split) {
        constexpr int depth = sizes::depth / parts;
        const unsigned rows = mn_shared_u32(tile);
#pragma unroll
        for (int k = 0; k < depth; k++) {
#pragma unroll
            for (int part = 0; part < parts; part++) {
                const int channel = 16 * (part * depth + k);
#pragma unroll
                for (int n = 0; n < steps; n++) {
                    unsigned b[4];
                    mn_frag_b(b, rows, channel, 16 * (split * steps + n));
                    add(part, n, state[part * depth + k], b);
                }
            }
        }
    }

    /* += x matrix', for a lower triangle and x of all tokens. */
    __device__ void lower(const unsigned (&x)[4][4], unsigned matrix, int split) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int n = 0; n < steps; n++) {
                unsigned b[4];
                if (split * steps + n < k) continue;
                mn_frag_b(b, matrix, 16 * k, 16 * (split * steps + n));
                add(k / (4 / parts), n, x[k], b);
            }
        }
    }

    /* += x matrix, likewise. */
    __device__ void upper(const unsigned (&x)[4][4], unsigned matrix, int split) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int n = 0; n < steps; n++) {
                unsigned b[4];
                if (split * steps + n > k) continue;
                mn_frag_b_trans(b, matrix, 16 * k, 16 * (split * steps + n));
                add(k / (4 / parts), n, x[k], b);
            }
        }
    }

    /* By tokens' numbers. */
    __device__ void scale(const float *factor, float more, int split) {
#pragma unroll
        for (int part = 0; part < parts; part++) {
            mn_scan_scale_tokens(at[part], factor + 8 * tiles * split, more);
        }
    }

    __device__ void join(float (&sums)[tiles][4]) const {
#pragma unroll
        for (int n = 0; n < tiles; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[n][i] = at[0][n][i];
#pragma unroll
                for (int part = 1; part < parts; part++) sums[n][i] += at[part][n][i];
            }
        }
    }
};

/* Operands of all tokens from those of each split's own. */
template <int SPLITS>
__device__ inline void mn_scan_gather_frags(unsigned (&x)[4][4],
                                            const unsigned (&own)[4 / SPLITS][4],
                                    uint4 (&smem)[4][32], int col_tile, int split) {
    if constexpr (SPLITS == 1) memcpy(x, own, sizeof x);
    else mn_scan_allgather<SPLITS>(x, own, smem, col_tile, split);
}

/* SAVE: states in front of chunks and residuals go to workspace, and there are no outputs. */
template <int KP, int CHANNEL, bool SAVE>
__global__ void __launch_bounds__(mn_scan_sizes<KP>::threads, 1)
delta_state_scan_warp_kernel(const __grid_constant__ mn_delta_params job,
                           const __grid_constant__ mn_scan_tma_maps maps, int64_t n_slices) {
    extern __shared__ __align__(1024) unsigned char scan_smem_bytes[];
    constexpr int SPLITS = mn_scan_sizes<KP>::splits, steps = mn_scan_sizes<KP>::steps;
    constexpr int tiles = mn_scan_sizes<KP>::tiles;
    constexpr int scratch_bytes = mn_scan_warp_exchange<KP>::scratch_bytes;
    mn_scan_smem<KP> &smem = *(mn_scan_smem<KP> *)scan_smem_bytes;
    const mn_delta_args &p = job.p;
    mn_scan_init_smem<KP, SPLITS, false>(smem, job, n_slices, p.state0,
                                         SAVE ? mn_out{} : p.state);
    const mn_scan_coord &at = smem.place;
    if (job.cuts && at.n_chunks == 0) return;
    const bool same_keys = !CHANNEL && !p.w.data;    // writes where it erases
    const bool ahead = mn_scan_smem<KP>::ahead(same_keys, job.tight);
    if (mn_scan_producer_tid() >= 0) {
        constexpr int mode = SAVE ? MN_SCAN_SAVE : MN_SCAN_OUTPUT;
        mn_scan_load_forward<KP, CHANNEL, mode>(smem, job, maps, same_keys);
        return;
    }
    const int col_tile = mn_scan_role<false, SPLITS>::col_tile();
    const int split = mn_scan_role<false, SPLITS>::split();
    mn_scan_warp_exchange<KP> &exchange =
        ((mn_scan_warp_exchange<KP> *)(scan_smem_bytes +
                                    mn_scan_smem<KP>::bytes(job.tight)))[col_tile];
    unsigned char *scratch = exchange.scratch[split];
    const mn_scan_out_rows<CHANNEL == MN_DELTA_PAIRS> results(
        p.o, job.packed[MN_DELTA_O], at, p.call.V, col_tile,
        split * tiles * 8);
    const mn_scan_records records(job, at, col_tile);
    const int n_chunks = at.n_chunks;
    mn_scan_state<KP, false, SPLITS> S;
    S.load(job, at);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        mn_scan_front<KP> &front = smem.front(chunk, job.tight);
        mn_scan_acc<KP> X = {}, O = {};
        float R[8][4] = {}, own[tiles][4];
        unsigned state[KP / 16][4], smem_tile[4][4], x[4][4], r[4][4], local[steps][4];
        mn_scan_gather_state<KP>(state, smem_tile, S, exchange.state, col_tile, split);
        mn_scan_wait_front(smem, chunk);
        X.read(state, front.keys, split);
        if (SAVE) {
            mn_scan_store_frags<scratch_bytes>(records.at(job.workspace.S, chunk, KP) + 64
                                               * split, KP,
                                               smem_tile,
                                         scratch);
        }
        float Q[tiles][2] = {};
        if (mn_rows_joined<CHANNEL>) mn_scan_split_rows(X.at[0], Q);
        X.join(own);
        mn_scan_residuals<KP, CHANNEL>(local, own, front, col_tile, split * tiles);
        mn_scan_gather_frags<SPLITS>(x, local, exchange.operands, col_tile, split);
        mn_scan_mma_lower<false>(R, x, mn_shared_u32(front.T), 0);
        mn_scan_frags_a(r, R);
        if (!CHANNEL) mn_scan_scale_tokens(R, front.write, 1.0f);
        mn_scan_frags_a(x, R);
        if (!SAVE || !same_keys) mn_scan_wait_back(smem, chunk, ahead);
        if (SAVE) {
            mn_scan_own_share<SPLITS>(local, r, split);
            mn_scan_store_frags<scratch_bytes>(records.at(job.workspace.R, chunk, MN_DELTA_CHUNK) +
                                             16 * steps * split, MN_DELTA_CHUNK, local, scratch);
        } else {
            if (!mn_rows_joined<CHANNEL>) {
                O.read(state, smem.first(chunk, same_keys, job.tight), split);
            }
            if (!CHANNEL) O.scale(front.gamma, job.scale, split);
            O.lower(r, mn_shared_u32(front.P), split);
        }
        S.template decay<CHANNEL>(front);
        S.add(x, same_keys ? front.keys : smem.second(chunk, job.tight));
        if (!SAVE && results.to) {
            O.join(own);
            if (CHANNEL == MN_DELTA_PAIRS) mn_scan_add_rows(own, Q);
            results.put(chunk, own, scratch);
        }
        mn_scan_release(smem, chunk);
    }
    S.store(job, at);
}

template <int KP, int CHANNEL>
__global__ void __launch_bounds__(mn_scan_sizes<KP>::threads, 1)
delta_state_scan_bwd_warp_kernel(const __grid_constant__ mn_delta_params job,
                                const __grid_constant__ mn_scan_tma_maps maps, int64_t n_slices) {
    extern __shared__ __align__(1024) unsigned char scan_smem_bytes[];
    constexpr int SPLITS = mn_scan_sizes<KP>::splits, steps = mn_scan_sizes<KP>::steps;
    constexpr int tiles = mn_scan_sizes<KP>::tiles;
    constexpr int scratch_bytes = mn_scan_warp_exchange<KP>::scratch_bytes;
    mn_scan_smem<KP> &smem = *(mn_scan_smem<KP> *)scan_smem_bytes;
    const mn_delta_args &p = job.p;
    mn_scan_init_smem<KP, SPLITS, true>(smem, job, n_slices, p.cot.state, p.grad.state0);
    const mn_scan_coord &at = smem.place;
    if (job.cuts && at.n_chunks == at.skip) return;
    const bool same_keys = !CHANNEL && !p.w.data;
    const bool ahead = mn_scan_smem<KP>::ahead(same_keys, job.tight);
    if (mn_scan_producer_tid() >= 0) {
        mn_scan_load_backward<KP, CHANNEL>(smem, job, maps, same_keys);
        if (blockIdx.x == 0) mn_pdl_wait();
        return;
    }
    const int col_tile = mn_scan_role<false, SPLITS>::col_tile();
    const int split = mn_scan_role<false, SPLITS>::split();
    mn_scan_warp_exchange<KP> &exchange =
        ((mn_scan_warp_exchange<KP> *)(scan_smem_bytes +
                                    mn_scan_smem<KP>::bytes(job.tight)))[col_tile];
    unsigned char *scratch = exchange.scratch[split];
    const mn_scan_out_rows<CHANNEL == MN_DELTA_PAIRS> results(
        p.grad.v, job.packed[MN_DELTA_DV], at, p.call.V, col_tile,
        split * tiles * 8);
    const mn_scan_records records(job, at, col_tile);
    const int n_chunks = at.n_chunks;
    mn_scan_state<KP, false, SPLITS> D;
    const int iters = n_chunks - at.skip;
    D.load(job, at);
    for (int iter = 0; iter < iters; iter++) {
        const int chunk = n_chunks - 1 - iter;
        mn_scan_front<KP> &front = smem.front(iter, job.tight);
        mn_scan_acc<KP> dR = {};
        float dX[8][4] = {}, own[tiles][4];
        unsigned state[KP / 16][4], smem_tile[4][4], x[4][4], cot[4][4], local[steps][4];
        mn_scan_gather_state<KP>(state, smem_tile, D, exchange.state, col_tile, split);
        mn_scan_wait_front(smem, iter);
        dR.read(state, front.keys, split);
        mn_scan_store_frags<scratch_bytes>(records.at(job.workspace.D, chunk, KP) + 64 * split, KP,
                                           smem_tile,
                                     scratch);
        if (!CHANNEL) dR.scale(front.write, 1.0f, split);
        mn_scan_cotangent_of_P<CHANNEL>(cot, front, col_tile, 0);
        dR.upper(cot, mn_shared_u32(front.P), split);
        dR.join(own);
        mn_scan_frags_a(local, own);
        mn_scan_gather_frags<SPLITS>(x, local, exchange.operands, col_tile, split);
        if constexpr (CHANNEL == MN_DELTA_PAIRS) {
            unsigned rest[4][4];
            mn_scan_rest(local, own, local);
            if (SPLITS > 1) mn_scan_split_sync<SPLITS>(col_tile);    // all have taken what is there
            mn_scan_gather_frags<SPLITS>(rest, local, exchange.operands, col_tile, split);
            mn_scan_begin(dX, rest);
        }
        mn_scan_mma_upper<false>(dX, x, mn_shared_u32(front.T), 0);
        mn_scan_record_frags<CHANNEL>(x, dX);
        mn_scan_own_share<SPLITS>(local, x, split);
        if (!job.dX_is_dv) {
            mn_scan_store_frags<scratch_bytes>(
                records.at(job.workspace.dX, chunk, MN_DELTA_CHUNK) + 16 * steps * split,
                MN_DELTA_CHUNK, local, scratch);
        }
        if (results.to) {
            mn_scan_own_share<SPLITS>(own, dX, split);
            results.put(chunk, own, scratch);
        }
        mn_scan_cotangent(cot, mn_shared_u32(front.values), col_tile, 0,
                          CHANNEL ? nullptr : front.gamma, job.scale);
        mn_scan_wait_back(smem, iter, ahead);
        D.template decay<CHANNEL>(front);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) dX[n][i] = -dX[n][i];
        }
        if (!CHANNEL) mn_scan_scale_tokens(dX, front.gamma, 1.0f);
        mn_scan_frags_a(x, dX);
        if (mn_rows_joined<CHANNEL>) mn_scan_join_rows(x, cot);
        else D.add(cot, smem.first(iter, same_keys, job.tight));
        D.add(x, same_keys ? front.keys : smem.second(iter, job.tight));
        mn_scan_release(smem, iter);
    }
    D.store(job, at);
}

}    // namespace mneme::delta

#endif
