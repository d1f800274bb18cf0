/* delta_state_scan_warp.cuh - delta's scans (delta_state_scan.cuh) where there are few columns for
 * so many
 * processors: blocks of a strip or two.
 *
 * As many warps share a strip as there are smem_tiles of 64 channels, and each is a team of its
 * own: it
 * has the state of one smem_tile, and makes the sums over all channels for its share of the tokens.
 * For
 * that it shows the others its state as a left operand, not sums of its own: added up by warps they
 * would come in another order than groups add them in, and what a sequence gives would depend on
 * those beside it. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_STATE_SCAN_WARP_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_STATE_SCAN_WARP_CUH

#include "kernels/cuda/delta/delta_state_scan.cuh"

enum { MN_SCAN_FEW = MN_DELTA_STRIPS / 2 };    // most strips of a block

/* Sizes for keys of KP channels. */
template <int KP>
struct mn_state_scan_sizes {
    static constexpr int groups = KP / 64;
    static constexpr int parts = mn_state_scan_groups<KP>;             // of sums
    static constexpr int steps = 4 / groups;                     // of 16 tokens, of a team
    static constexpr int tiles = 2 * steps;
    static constexpr int depth = KP / 16;                       // of sums over channels
    static constexpr int threads = 32 * MN_SCAN_FEW * groups + MN_DELTA_FETCHERS;
};

/* Where the groups of a strip meet, at the end of the room: the state, and what each makes of its
 * tokens, as left operands, and where each turns results. Each meets the others twice a chunk,
 * behind what it shows; so what is shown has been seen when it is written over. */
template <int KP>
struct alignas(16) mn_state_scan_table {
    static constexpr int scratch_bytes = 4096 / mn_state_scan_sizes<KP>::groups;

    uint4 state[KP / 16][32];
    uint4 operands[4][32];
    unsigned char scratch[mn_state_scan_sizes<KP>::groups][scratch_bytes];
};

/* This team's smem_tile as left operands, and with those of the others the whole state. */
template <int KP>
__device__ inline void mn_state_scan_smem_tiles(unsigned (&whole)[KP / 16][4],
                                                unsigned (&own)[4][4],
                                      const mn_state_scan_state<KP, false, KP / 64> &S,
                                      uint4 (&room)[KP / 16][32], int strip, int team) {
#pragma unroll
    for (int k = 0; k < 4; k++) mn_left_of(own[k], S.at[2 * k], S.at[2 * k + 1]);
    if constexpr (KP == 64) {
        memcpy(whole, own, sizeof own);
    } else {
        mn_state_scan_show(room + 4 * team, own);
        mn_state_scan_meet<KP / 64>(strip);
        mn_state_scan_see(whole, room);
    }
}

/* Sums over channels for this team's tokens, in the parts that are added in the end. */
template <int KP>
struct mn_state_scan_sums {
    using sizes = mn_state_scan_sizes<KP>;
    static constexpr int parts = sizes::parts, steps = sizes::steps, tiles = sizes::tiles;

    float at[parts][tiles][4];

    __device__ void add(int part, int n, const unsigned (&a)[4], const unsigned (&b)[4]) {
        mn_product(at[part][2 * n], a, b[0], b[1]);
        mn_product(at[part][2 * n + 1], a, b[2], b[3]);
    }

    /* += state rows', for a tile of rows of keys. */
    __device__ void read(const unsigned (&state)[KP / 16][4], const unsigned char *tile,
                         int team) {
        constexpr int depth = sizes::depth / parts;
        const unsigned rows = mn_shared(tile);
#pragma unroll
        for (int k = 0; k < depth; k++) {
#pragma unroll
            for (int part = 0; part < parts; part++) {
                const int channel = 16 * (part * depth + k);
#pragma unroll
                for (int n = 0; n < steps; n++) {
                    unsigned b[4];
                    mn_right(b, rows, channel, 16 * (team * steps + n));
                    add(part, n, state[part * depth + k], b);
                }
            }
        }
    }

    /* += x square', for a lower triangle and x of all tokens. */
    __device__ void lower(const unsigned (&x)[4][4], unsigned square, int team) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int n = 0; n < steps; n++) {
                unsigned b[4];
                if (team * steps + n < k) continue;
                mn_right(b, square, 16 * k, 16 * (team * steps + n));
                add(k / (4 / parts), n, x[k], b);
            }
        }
    }

    /* += x square, likewise. */
    __device__ void upper(const unsigned (&x)[4][4], unsigned square, int team) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
#pragma unroll
            for (int n = 0; n < steps; n++) {
                unsigned b[4];
                if (team * steps + n > k) continue;
                mn_right_transposed(b, square, 16 * k, 16 * (team * steps + n));
                add(k / (4 / parts), n, x[k], b);
            }
        }
    }

    /* By tokens' numbers. */
    __device__ void scale(const float *factor, float more, int team) {
#pragma unroll
        for (int part = 0; part < parts; part++) {
            mn_state_scan_scale(at[part], factor + 8 * tiles * team, more);
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

/* Operands of all tokens from those of each team's own. */
template <int TEAMS>
__device__ inline void mn_state_scan_join(unsigned (&x)[4][4], const unsigned (&own)[4 / TEAMS][4],
                                    uint4 (&room)[4][32], int strip, int team) {
    if constexpr (TEAMS == 1) memcpy(x, own, sizeof x);
    else mn_state_scan_gather<TEAMS>(x, own, room, strip, team);
}

/* KEEP: states in front of chunks and residuals go to work space, and there are no outputs. */
template <int KP, bool CHANNEL, bool KEEP>
__global__ void __launch_bounds__(mn_state_scan_sizes<KP>::threads, 1)
mn_delta_scan_warps_kernel(const __grid_constant__ mn_delta_job job,
                           const __grid_constant__ mn_state_scan_maps maps, int64_t n_slices) {
    extern __shared__ __align__(1024) unsigned char scan_bytes[];
    constexpr int TEAMS = mn_state_scan_sizes<KP>::groups, steps = mn_state_scan_sizes<KP>::steps;
    constexpr int tiles = mn_state_scan_sizes<KP>::tiles;
    constexpr int scratch_bytes = mn_state_scan_table<KP>::scratch_bytes;
    mn_state_scan_smem<KP> &room = *(mn_state_scan_smem<KP> *)scan_bytes;
    const mn_delta_args &p = job.p;
    mn_state_scan_begin<KP, TEAMS>(room, job, n_slices);
    const mn_state_scan_place &at = room.place;
    const bool same_keys = !CHANNEL && !p.w.data;    // writes where it erases
    const bool ahead = mn_state_scan_smem<KP>::backs == 2 || same_keys;
    if (mn_state_scan_hand() >= 0) {
        mn_state_scan_load_forward<KP, CHANNEL, KEEP>(room, job, maps, same_keys);
        return;
    }
    const int strip = mn_state_scan_role<false, TEAMS>::strip();
    const int team = mn_state_scan_role<false, TEAMS>::team();
    mn_state_scan_table<KP> &table =
        ((mn_state_scan_table<KP> *)(scan_bytes + sizeof(mn_state_scan_smem<KP>)))[strip];
    unsigned char *scratch = table.scratch[team];
    const mn_state_scan_results results(p.o, job.packed[MN_DELTA_O], at, p.call.V, strip,
                                  team * tiles * 8);
    const mn_state_scan_records records(job, at, strip);
    const int n_chunks = at.n_chunks;
    mn_state_scan_state<KP, false, TEAMS> S;
    S.load(p.state0, p.call, at);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        mn_state_scan_front<KP> &front = room.front(chunk);
        mn_state_scan_sums<KP> X = {}, O = {};
        float R[8][4] = {}, own[tiles][4];
        unsigned state[KP / 16][4], smem_tile[4][4], x[4][4], r[4][4], mine[steps][4];
        mn_state_scan_smem_tiles<KP>(state, smem_tile, S, table.state, strip, team);
        mn_state_scan_wait_front(room, chunk);
        X.read(state, front.keys, team);
        if (KEEP) {
            mn_state_scan_spill<scratch_bytes>(records.at(job.work.S, chunk, KP) + 64 * team, KP,
                                               smem_tile,
                                         scratch);
        }
        X.join(own);
        mn_state_scan_misses<KP, CHANNEL>(mine, own, front, strip, team * tiles);
        mn_state_scan_join<TEAMS>(x, mine, table.operands, strip, team);
        mn_state_scan_lower<false>(R, x, mn_shared(front.T), 0);
        mn_state_scan_left(r, R);
        if (!CHANNEL) mn_state_scan_scale(R, front.write, 1.0f);
        mn_state_scan_left(x, R);
        if (!KEEP || !same_keys) mn_state_scan_wait_back(room, chunk, ahead);
        if (KEEP) {
            mn_state_scan_share<TEAMS>(mine, r, team);
            mn_state_scan_spill<scratch_bytes>(records.at(job.work.R, chunk, MN_DELTA_CHUNK) +
                                             16 * steps * team, MN_DELTA_CHUNK, mine, scratch);
        } else {
            O.read(state, room.first(chunk, same_keys), team);
            if (!CHANNEL) O.scale(front.gamma, job.scale, team);
            O.lower(r, mn_shared(front.P), team);
        }
        S.template decay<CHANNEL>(front);
        S.add(x, same_keys ? front.keys : room.second(chunk));
        if (!KEEP && results.to) {
            O.join(own);
            results.put(chunk, own, scratch);
        }
        mn_state_scan_done(room, chunk);
    }
    if (!KEEP) S.store(p.state, p.call, at);
}

template <int KP, bool CHANNEL>
__global__ void __launch_bounds__(mn_state_scan_sizes<KP>::threads, 1)
mn_delta_scan_back_warps_kernel(const __grid_constant__ mn_delta_job job,
                                const __grid_constant__ mn_state_scan_maps maps, int64_t n_slices) {
    extern __shared__ __align__(1024) unsigned char scan_bytes[];
    constexpr int TEAMS = mn_state_scan_sizes<KP>::groups, steps = mn_state_scan_sizes<KP>::steps;
    constexpr int tiles = mn_state_scan_sizes<KP>::tiles;
    constexpr int scratch_bytes = mn_state_scan_table<KP>::scratch_bytes;
    mn_state_scan_smem<KP> &room = *(mn_state_scan_smem<KP> *)scan_bytes;
    const mn_delta_args &p = job.p;
    mn_state_scan_begin<KP, TEAMS>(room, job, n_slices);
    const mn_state_scan_place &at = room.place;
    const bool same_keys = !CHANNEL && !p.w.data;
    const bool ahead = mn_state_scan_smem<KP>::backs == 2 || same_keys;
    if (mn_state_scan_hand() >= 0) {
        mn_state_scan_load_backward<KP, CHANNEL>(room, job, maps, same_keys);
        return;
    }
    const int strip = mn_state_scan_role<false, TEAMS>::strip();
    const int team = mn_state_scan_role<false, TEAMS>::team();
    mn_state_scan_table<KP> &table =
        ((mn_state_scan_table<KP> *)(scan_bytes + sizeof(mn_state_scan_smem<KP>)))[strip];
    unsigned char *scratch = table.scratch[team];
    const mn_state_scan_results results(p.grad.v, job.packed[MN_DELTA_DV], at, p.call.V, strip,
                                  team * tiles * 8);
    const mn_state_scan_records records(job, at, strip);
    const int n_chunks = at.n_chunks;
    mn_state_scan_state<KP, false, TEAMS> D;
    D.load(p.cot.state, p.call, at);
    for (int turn = 0; turn < n_chunks; turn++) {
        const int chunk = n_chunks - 1 - turn;
        mn_state_scan_front<KP> &front = room.front(turn);
        mn_state_scan_sums<KP> dR = {};
        float dX[8][4] = {}, own[tiles][4];
        unsigned state[KP / 16][4], smem_tile[4][4], x[4][4], cot[4][4], mine[steps][4];
        mn_state_scan_smem_tiles<KP>(state, smem_tile, D, table.state, strip, team);
        mn_state_scan_wait_front(room, turn);
        dR.read(state, front.keys, team);
        mn_state_scan_spill<scratch_bytes>(records.at(job.work.D, chunk, KP) + 64 * team, KP,
                                           smem_tile,
                                     scratch);
        if (!CHANNEL) dR.scale(front.write, 1.0f, team);
        mn_state_scan_cotangent(cot, mn_shared(front.values), strip, 0, nullptr, 1.0f);
        dR.upper(cot, mn_shared(front.P), team);
        dR.join(own);
        mn_state_scan_left(mine, own);
        mn_state_scan_join<TEAMS>(x, mine, table.operands, strip, team);
        mn_state_scan_upper<false>(dX, x, mn_shared(front.T), 0);
        mn_state_scan_left(x, dX);
        mn_state_scan_share<TEAMS>(mine, x, team);
        mn_state_scan_spill<scratch_bytes>(records.at(job.work.dX, chunk, MN_DELTA_CHUNK) +
                                         16 * steps * team, MN_DELTA_CHUNK, mine, scratch);
        if (results.to) {
            mn_state_scan_share<TEAMS>(own, dX, team);
            results.put(chunk, own, scratch);
        }
        mn_state_scan_cotangent(cot, mn_shared(front.values), strip, 0,
                          CHANNEL ? nullptr : front.gamma, job.scale);
        mn_state_scan_wait_back(room, turn, ahead);
        D.template decay<CHANNEL>(front);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) dX[n][i] = -dX[n][i];
        }
        if (!CHANNEL) mn_state_scan_scale(dX, front.gamma, 1.0f);
        mn_state_scan_left(x, dX);
        D.add(cot, room.first(turn, same_keys));
        D.add(x, same_keys ? front.keys : room.second(turn));
        mn_state_scan_done(room, turn);
    }
    D.store(p.grad.state0, p.call, at);
}

#endif
