/* delta_state_scan.cuh - delta's states, chunk after chunk, forward and back.
 *
 *   X = V - Ed S     R = T X     O = Qd S + P R     S <- fall S + Wd'R
 *   dR = Wd D + P'dO     dX = T'dR = dV     D <- fall D + Qd'dO - Ed'dX
 *
 * with rows decayed from the chunk's start (Qd, scale included, and Ed) or to its end (Wd).
 *
 * A warp has 16 value columns (a strip) of one head of one sequence and keeps its columns of the
 * state, turned, in registers in float32: [16][K]. Everything is computed turned as well, so that
 * sums of one product are the left operand of the next and never leave the registers; the right
 * operands, which warps of a block share, come through shared memory, where four more warps fetch
 * them. Where channels share the decay, keys come as they are and the decays are applied to the
 * sums.
 *
 * Here four warps with a strip each multiply as a group; delta_state_scan_warp.cuh has the scans
 * where
 * there are few columns for so many processors. Which of them serve depends on the other sequences
 * of a call, and sums are made in one order by both: over channels one after the other, and where
 * K is 256 over each half of them first. There two groups, groups, share the strips, as the states
 * ask for the registers of both: each has a half of the channels. Its sums and those of the other
 * meet in shared memory, where each team adds up those of its share of the tokens; what is a
 * product of tokens alone both compute. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_STATE_SCAN_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_STATE_SCAN_CUH

#include "kernels/cuda/delta/delta_load.cuh"

/* Where the groups of a strip meet, at the end of the room: sums of each team for the tokens of the
 * others, and the operands that each makes of its tokens. What would be a team's sums for itself is
 * where it turns results. */
template <int TEAMS>
struct alignas(16) mn_state_scan_meeting {
    static constexpr int scratch_bytes = 8 / TEAMS * 32 * (int)sizeof(float4);

    float4 sums[TEAMS][TEAMS][8 / TEAMS][32];
    uint4 operands[4][32];

    __device__ unsigned char *scratch(int team) {
        return (unsigned char *)sums[team][team];
    }
};

/* Which strip of the block this warp has, and which part of the channels. Groups are four warps of
 * one team. */
template <bool GROUP, int TEAMS>
struct mn_state_scan_role {
    static __device__ int strip(void) {
        const int warp = threadIdx.x / 32;
        return GROUP ? warp % MN_DELTA_STRIPS : warp / TEAMS;
    }

    static __device__ int team(void) {
        const int warp = threadIdx.x / 32;
        return TEAMS == 1 ? 0 : GROUP ? warp / MN_DELTA_STRIPS : warp % TEAMS;
    }
};

/* Teams of groups, and so parts of the channels that are summed up ws. */
template <int KP>
constexpr int mn_state_scan_groups = KP <= 128 ? 1 : 2;

constexpr int mn_state_scan_threads(int groups) {
    return 32 * MN_DELTA_STRIPS * groups + MN_DELTA_FETCHERS;
}

/* Two groups that multiply take registers from the one that fetches. */
template <int TEAMS, bool FETCHES>
__device__ __forceinline__ void mn_state_scan_registers(void) {
#if MN_HAS_WGMMA
    if (TEAMS == 1) return;
    if (FETCHES) asm volatile("setmaxnreg.dec.sync.aligned.u32 88;\n");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 208;\n");
#endif
}

/* ---- results of left operands ---------------------------------------------------------------- */

/* Sixteen rows of 16 N columns for work space, rows `pitch` ws. On Hopper they pass through
 * SCRATCH bytes, in pieces of 32 columns whose vec16s are exchanged so that lanes meet in no bank,
 * and leave 16 bytes at a time. */
template <int SCRATCH, int N>
__device__ inline void mn_state_scan_spill(mn_bf16 *to, int pitch, const unsigned (&x)[N][4],
                                     unsigned char *scratch) {
    const int lane = threadIdx.x % 32;
    if constexpr (MN_HAS_WGMMA && N % 2 == 0) {
        constexpr int pieces = N / 2 < SCRATCH / 1024 ? N / 2 : SCRATCH / 1024;
        const auto place = [](int row, int vec16) {
            return (unsigned)(row * 64 + ((vec16 ^ (row >> 1 & 3)) << 4));
        };
        const unsigned from = mn_shared(scratch);
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

/* Rows of this lane: columns j and j + 8 of the value axis; columns: channels 8 i + 2 (l % 4) of
 * the team's. */
template <int KP, bool GROUP, int TEAMS>
struct mn_state_scan_state {
    static constexpr int width = KP / TEAMS;    // channels of a team
    static constexpr int part_bytes = mn_tile_bytes<width>();
    using role = mn_state_scan_role<GROUP, TEAMS>;

    float at[width / 8][4];

    template <typename F>
    __device__ void each(const mn_call &call, int64_t column0, F use) {
        const int lane = threadIdx.x % 32, channel0 = role::team() * width;
        const int64_t j = column0 + role::strip() * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < width / 8; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int64_t row = channel0 + 8 * i + lane % 4 * 2 + c % 2;
                const int64_t column = j + c / 2 * 8;
                use(at[i][c], row * call.V + column, row < call.K && column < call.V);
            }
        }
    }

    __device__ void load(const mn_in &state, const mn_call &call,
                         const mn_state_scan_place &place) {
        const float *from = mn_row<float>(state, place.n, 0, place.h);
        each(call, place.column0, [&](float &x, int64_t i, bool inside) {
            x = inside && from ? from[i] : 0.0f;
        });
    }

    __device__ void store(const mn_out &state, const mn_call &call,
                          const mn_state_scan_place &place) {
        float *to = mn_row<float>(state, place.n, 0, place.h);
        if (!to) return;
        each(call, place.column0, [&](float &x, int64_t i, bool inside) {
            if (inside) to[i] = x;
        });
    }

    template <bool CHANNEL>
    __device__ void decay(const mn_state_scan_front<KP> &chunk) {
        const int column = role::team() * width + threadIdx.x % 4 * 2;
        const float shared = chunk.gamma[MN_DELTA_CHUNK - 1];
#pragma unroll
        for (int i = 0; i < width / 8; i++) {
            float2 fall = make_float2(shared, shared);
            if (CHANNEL) fall = *(const float2 *)&chunk.fall[8 * i + column];
            at[i][0] *= fall.x, at[i][1] *= fall.y, at[i][2] *= fall.x, at[i][3] *= fall.y;
        }
    }

    /* The smem_tiles of a tile of rows of keys that have the team's channels. */
    __device__ unsigned part(const unsigned char *rows) const {
        return mn_shared(rows) + role::team() * part_bytes;
    }

    /* += x rows, for x (16 values, 64 tokens) and a tile of rows of keys. */
    __device__ void add(const unsigned (&x)[4][4], const unsigned char *tile) {
        const unsigned rows = part(tile);
#pragma unroll
        for (int smem_tile = 0; smem_tile < width / 64; smem_tile++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mn_unit_depth<GROUP>(&at[8 * smem_tile], x[k], rows, 16 * k, smem_tile, 4);
            }
        }
    }

    /* sums += state rows', (16 values, 64 tokens), over the team's channels. `keep`, where not
     * NULL, is where this strip of the state goes in bf16. */
    __device__ void read(float (&sums)[8][4], const unsigned char *tile, mn_bf16 *keep,
                         unsigned char *scratch) const {
        constexpr int steps = width / 16,
            scratch_bytes = mn_state_scan_meeting<TEAMS>::scratch_bytes;
        const unsigned rows = part(tile);
        unsigned a[steps][4];
#pragma unroll
        for (int k = 0; k < steps; k++) mn_left_of(a[k], at[2 * k], at[2 * k + 1]);
        mn_unit_begin<GROUP>();
#pragma unroll
        for (int k = 0; k < steps; k++) mn_unit_rows<GROUP>(sums, a[k], rows, 16 * k, 0);
        mn_unit_send<GROUP>();
        if (keep) mn_state_scan_spill<scratch_bytes>(keep + role::team() * width, KP, a, scratch);
        mn_unit_wait<GROUP>();
    }
};

/* ---- sums over tokens in registers ----------------------------------------------------------- */

/* (16 values, 8 N tokens) by tokens' numbers. */
template <int N>
__device__ inline void mn_state_scan_scale(float (&x)[N][4], const float *factor, float more) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 by = *(const float2 *)&factor[8 * n + column];
        x[n][0] *= more * by.x, x[n][1] *= more * by.y;
        x[n][2] *= more * by.x, x[n][3] *= more * by.y;
    }
}

template <int N>
__device__ inline void mn_state_scan_left(unsigned (&a)[N / 2][4], const float (&x)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; k++) mn_left_of(a[k], x[2 * k], x[2 * k + 1]);
}

/* y += x square', for a lower triangle; x are tokens from 16 * first on. */
template <bool GROUP, int N>
__device__ inline void mn_state_scan_lower(float (&y)[8][4], const unsigned (&x)[N][4],
                                           unsigned square,
                                     int first) {
    mn_unit_begin<GROUP>();
#pragma unroll
    for (int k = 0; k < N; k++) {
        mn_unit_rows<GROUP>(y, x[k], square, 16 * (first + k), first + k);
    }
    mn_unit_end<GROUP>();
}

/* y += x square, likewise. */
template <bool GROUP, int N>
__device__ inline void mn_state_scan_upper(float (&y)[8][4], const unsigned (&x)[N][4],
                                           unsigned square,
                                     int first) {
    mn_unit_begin<GROUP>();
#pragma unroll
    for (int k = 0; k < N; k++) {
        mn_unit_depth<GROUP>(y, x[k], square, 16 * (first + k), 0, first + k + 1);
    }
    mn_unit_end<GROUP>();
}

/* Where results of a strip's tokens and columns go: this lane has eight columns of every 16th token
 * of its team. */
struct mn_state_scan_results {
    mn_bf16 *to;        // of the first chunk; NULL: nowhere
    int64_t step;       // between tokens
    int left, width;    // tokens and columns from there on
    bool packed;

    __device__ mn_state_scan_results(const mn_out &view, bool packs,
                                     const mn_state_scan_place &at, int64_t V,
                               int strip, int token) {
        const int64_t j = at.column0 + strip * 16 + threadIdx.x % 2 * 8;
        token += threadIdx.x % 32 / 2;
        to = mn_row<mn_bf16>(view, at.span.b, at.span.t0 + token, at.h);
        if (to) to += j;
        step = view.stride[1], packed = packs;
        left = (int)(at.span.length - token), width = (int)(V - j);
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
                const unsigned pair = mn_turn(mn_pair(x[n][2 * half], x[n][2 * half + 1]));
                *(unsigned *)(scratch + place(8 * n + lane / 4, half) + lane % 4 * 4) = pair;
            }
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const int token = chunk * MN_DELTA_CHUNK + 16 * i;
            if (token >= left || width <= 0) continue;
            const mn_pack<mn_bf16, 8> pack =
                *(mn_pack<mn_bf16, 8> *)(scratch + place(16 * i + lane / 2, lane % 2));
            mn_bf16 *row = to + token * step;
            if (packed) {
                *(mn_pack<mn_bf16, 8> *)row = pack;
            } else {
                for (int c = 0; c < 8 && c < width; c++) row[c] = pack.at[c];
            }
        }
    }
};

/* Rows of values of this strip in records of a sequence's chunks, which hold wide_v each. */
struct mn_state_scan_records {
    int64_t first, step;

    __device__ mn_state_scan_records(const mn_delta_job &job, const mn_state_scan_place &at,
                                     int strip) {
        step = job.p.call.H * job.wide_v;
        first = (at.first * job.p.call.H + at.h) * job.wide_v + at.column0 + strip * 16;
    }

    template <typename X>
    __device__ X *at(X *records, int chunk, int width) const {
        return records + (first + chunk * step) * width;
    }
};

/* ---- groups -----------------------------------------------------------------------------------
 * */

/* All groups of a strip are here. */
template <int TEAMS>
__device__ inline void mn_state_scan_meet(int strip) {
    asm volatile("barrier.sync %0, %1;\n" ::"r"(1 + strip), "n"(32 * TEAMS) : "memory");
}

/* Left operands for the other groups of a strip, and from them. */
template <int N>
__device__ inline void mn_state_scan_show(uint4 (*room)[32], const unsigned (&x)[N][4]) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        room[k][threadIdx.x % 32] = make_uint4(x[k][0], x[k][1], x[k][2], x[k][3]);
    }
}

template <int N>
__device__ inline void mn_state_scan_see(unsigned (&x)[N][4], const uint4 (*room)[32]) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        const uint4 from = room[k][threadIdx.x % 32];
        x[k][0] = from.x, x[k][1] = from.y, x[k][2] = from.z, x[k][3] = from.w;
    }
}

/* Sums over this team's channels for the tokens of the others. */
template <int TEAMS>
__device__ inline void mn_state_scan_store(mn_state_scan_meeting<TEAMS> &room,
                                           const float (&sums)[8][4],
                                    int team) {
    constexpr int tiles = 8 / TEAMS;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        if (n / tiles == team) continue;
        room.sums[n / tiles][team][n % tiles][threadIdx.x % 32] =
            make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
    }
}

/* The whole sums for this team's tokens, once all have given theirs. */
template <int TEAMS>
__device__ inline void mn_state_scan_take(float (&mine)[8 / TEAMS][4], const float (&sums)[8][4],
                                    const mn_state_scan_meeting<TEAMS> &room, int team) {
    constexpr int tiles = 8 / TEAMS;
#pragma unroll
    for (int n = 0; n < tiles; n++) {
#pragma unroll
        for (int from = 0; from < TEAMS; from++) {
            const float(&own)[4] = sums[from * tiles + n];
            float4 x = make_float4(own[0], own[1], own[2], own[3]);
            if (from != team) x = room.sums[team][from][n][threadIdx.x % 32];
            if (from == 0) mine[n][0] = x.x, mine[n][1] = x.y, mine[n][2] = x.z, mine[n][3] = x.w;
            else mine[n][0] += x.x, mine[n][1] += x.y, mine[n][2] += x.z, mine[n][3] += x.w;
        }
    }
}

/* Operands of all tokens from those of each team's own. */
template <int TEAMS>
__device__ inline void mn_state_scan_gather(unsigned (&x)[4][4],
                                            const unsigned (&own)[4 / TEAMS][4],
                                      uint4 (&room)[4][32], int strip, int team) {
    constexpr int steps = 4 / TEAMS;
    mn_state_scan_show(room + team * steps, own);
    mn_state_scan_meet<TEAMS>(strip);
    mn_state_scan_see(x, room);
}

/* This team's share of what all have. */
template <int TEAMS, int N, typename X>
__device__ inline void mn_state_scan_share(X (&mine)[N / TEAMS][4], const X (&x)[N][4], int team) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (n < N / TEAMS || n / (N / TEAMS) == team) mine[n % (N / TEAMS)][i] = x[n][i];
        }
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* X of tokens from 8 * first on as left operands, from Ed S, (16 values, 8 N tokens). */
template <int KP, bool CHANNEL, int N>
__device__ inline void mn_state_scan_misses(unsigned (&x)[N / 2][4], float (&X)[N][4],
                                      const mn_state_scan_front<KP> &front, int strip, int first) {
    if (!CHANNEL) mn_state_scan_scale(X, front.gamma + 8 * first, 1.0f);
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        unsigned v[4];
        mn_left_transposed(v, mn_shared(front.values), strip * 16, 8 * first + 16 * k);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float(&to)[4] = X[2 * k + half];
            to[0] = mn_low(v[2 * half]) - to[0], to[1] = mn_high(v[2 * half]) - to[1];
            to[2] = mn_low(v[2 * half + 1]) - to[2], to[3] = mn_high(v[2 * half + 1]) - to[3];
        }
    }
    mn_state_scan_left(x, X);
}

/* What the fetching warps do. KEEP: as below. */
template <int KP, bool CHANNEL, bool KEEP>
__device__ inline void mn_state_scan_load_forward(mn_state_scan_smem<KP> &room,
                                                  const mn_delta_job &job,
                                           const mn_state_scan_maps &maps, bool same_keys) {
    const mn_delta_args &p = job.p;
    const mn_state_scan_source from = {
        p.e, p.v, p.q, p.w, job.work.e, job.work.q, job.work.w, job.packed[MN_DELTA_E],
        job.packed[MN_DELTA_V], job.packed[MN_DELTA_Q], job.packed[MN_DELTA_W], !KEEP,
        !same_keys,
    };
    mn_state_scan_load<KP, CHANNEL>(room, job, maps, from, [](int n) { return n; });
}

/* KEEP: states in front of chunks and residuals go to work space, and there are no outputs. */
template <int KP, bool CHANNEL, bool KEEP>
__global__ void __launch_bounds__(mn_state_scan_threads(mn_state_scan_groups<KP>), 1)
mn_delta_scan_kernel(const __grid_constant__ mn_delta_job job,
                     const __grid_constant__ mn_state_scan_maps maps, int64_t n_slices) {
    extern __shared__ __align__(1024) unsigned char scan_bytes[];
    constexpr int TEAMS = mn_state_scan_groups<KP>;
    mn_state_scan_smem<KP> &room = *(mn_state_scan_smem<KP> *)scan_bytes;
    const mn_delta_args &p = job.p;
    mn_state_scan_begin<KP, TEAMS>(room, job, n_slices);
    const mn_state_scan_place &at = room.place;
    const bool same_keys = !CHANNEL && !p.w.data;    // writes where it erases
    const bool ahead = mn_state_scan_smem<KP>::backs == 2 || same_keys;
    if (mn_state_scan_hand() >= 0) {
        mn_state_scan_registers<TEAMS, true>();
        mn_state_scan_load_forward<KP, CHANNEL, KEEP>(room, job, maps, same_keys);
        return;
    }
    mn_state_scan_registers<TEAMS, false>();
    constexpr int steps = 4 / TEAMS, tiles = 8 / TEAMS;    // of a team's tokens
    constexpr int scratch_bytes = mn_state_scan_meeting<TEAMS>::scratch_bytes;
    const int strip = mn_state_scan_role<true, TEAMS>::strip();
    const int team = mn_state_scan_role<true, TEAMS>::team();
    mn_state_scan_meeting<TEAMS> &meeting =
        ((mn_state_scan_meeting<TEAMS> *)(scan_bytes + sizeof(mn_state_scan_smem<KP>)))[strip];
    const mn_state_scan_results results(p.o, job.packed[MN_DELTA_O], at, p.call.V, strip,
                                  team * tiles * 8);
    const mn_state_scan_records records(job, at, strip);
    const int n_chunks = at.n_chunks;
    mn_state_scan_state<KP, true, TEAMS> S;
    S.load(p.state0, p.call, at);
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        mn_state_scan_front<KP> &front = room.front(chunk);
        float X[8][4] = {}, R[8][4] = {}, O[8][4] = {};
        unsigned x[4][4], r[4][4], mine[steps][4];
        mn_state_scan_wait_front(room, chunk);
        S.read(X, front.keys, KEEP ? records.at(job.work.S, chunk, KP) : nullptr,
               meeting.scratch(team));
        if constexpr (TEAMS == 1) {
            mn_state_scan_misses<KP, CHANNEL>(x, X, front, strip, 0);
        } else {
            float own[tiles][4];
            mn_state_scan_meet<TEAMS>(strip);    // all have taken what was given last
            mn_state_scan_store<TEAMS>(meeting, X, team);
            mn_state_scan_meet<TEAMS>(strip);
            mn_state_scan_take<TEAMS>(own, X, meeting, team);
            mn_state_scan_misses<KP, CHANNEL>(mine, own, front, strip, team * tiles);
            mn_state_scan_gather<TEAMS>(x, mine, meeting.operands, strip, team);
        }
        mn_state_scan_lower<true>(R, x, mn_shared(front.T), 0);
        mn_state_scan_left(r, R);
        mn_state_scan_share<TEAMS>(mine, r, team);
        if (!CHANNEL) mn_state_scan_scale(R, front.write, 1.0f);
        mn_state_scan_left(x, R);
        if (!KEEP || !same_keys) mn_state_scan_wait_back(room, chunk, ahead);
        if (KEEP) {
            mn_state_scan_spill<scratch_bytes>(records.at(job.work.R, chunk, MN_DELTA_CHUNK) +
                                             16 * steps * team, MN_DELTA_CHUNK, mine,
                                         meeting.scratch(team));
        } else {
            S.read(O, room.first(chunk, same_keys), nullptr, nullptr);
            if (!CHANNEL) mn_state_scan_scale(O, front.gamma, job.scale);
            mn_state_scan_lower<true>(O, mine, mn_shared(front.P), team * steps);
        }
        const bool puts = !KEEP && results.to;
        if (puts && TEAMS > 1) mn_state_scan_store<TEAMS>(meeting, O, team);
        S.template decay<CHANNEL>(front);
        mn_unit_begin<true>();
        S.add(x, same_keys ? front.keys : room.second(chunk));
        mn_unit_send<true>();
        if (puts) {
            float own[tiles][4];
            if (TEAMS > 1) mn_state_scan_meet<TEAMS>(strip);
            mn_state_scan_take<TEAMS>(own, O, meeting, team);
            results.put(chunk, own, meeting.scratch(team));
        }
        mn_unit_wait<true>();
        mn_state_scan_done(room, chunk);
    }
    if (!KEEP) S.store(p.state, p.call, at);
}

/* ---- back ------------------------------------------------------------------------------------ */

/* The cotangent of this strip's columns as left operands, turned, tokens from 16 * first on, each
 * by its number. */
template <int N>
__device__ inline void mn_state_scan_cotangent(unsigned (&x)[N][4], unsigned tile, int strip,
                                               int first,
                                         const float *factor, float more) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int k = 0; k < N; k++) {
        mn_left_transposed(x[k], tile, strip * 16, 16 * (first + k));
        if (!factor) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 by = *(const float2 *)&factor[16 * (first + k) + i / 2 * 8 + column];
            x[k][i] = mn_pair(more * by.x * mn_low(x[k][i]), more * by.y * mn_high(x[k][i]));
        }
    }
}

/* What the fetching warps do. */
template <int KP, bool CHANNEL>
__device__ inline void mn_state_scan_load_backward(mn_state_scan_smem<KP> &room,
                                                   const mn_delta_job &job,
                                          const mn_state_scan_maps &maps, bool same_keys) {
    const mn_delta_args &p = job.p;
    const mn_state_scan_source from = {
        same_keys ? p.e : p.w, p.cot.o, p.q, p.e, job.work.w, job.work.q, job.work.e,
        job.packed[MN_DELTA_W], job.packed[MN_DELTA_COT], job.packed[MN_DELTA_Q],
        job.packed[MN_DELTA_E], true, !same_keys,
    };
    const int last = room.place.n_chunks - 1;
    mn_state_scan_load<KP, CHANNEL>(room, job, maps, from, [=](int n) { return last - n; });
}

template <int KP, bool CHANNEL>
__global__ void __launch_bounds__(mn_state_scan_threads(mn_state_scan_groups<KP>), 1)
mn_delta_scan_back_kernel(const __grid_constant__ mn_delta_job job,
                          const __grid_constant__ mn_state_scan_maps maps, int64_t n_slices) {
    extern __shared__ __align__(1024) unsigned char scan_bytes[];
    constexpr int TEAMS = mn_state_scan_groups<KP>;
    mn_state_scan_smem<KP> &room = *(mn_state_scan_smem<KP> *)scan_bytes;
    const mn_delta_args &p = job.p;
    mn_state_scan_begin<KP, TEAMS>(room, job, n_slices);
    const mn_state_scan_place &at = room.place;
    const bool same_keys = !CHANNEL && !p.w.data;
    const bool ahead = mn_state_scan_smem<KP>::backs == 2 || same_keys;
    if (mn_state_scan_hand() >= 0) {
        mn_state_scan_registers<TEAMS, true>();
        mn_state_scan_load_backward<KP, CHANNEL>(room, job, maps, same_keys);
        return;
    }
    mn_state_scan_registers<TEAMS, false>();
    constexpr int steps = 4 / TEAMS, tiles = 8 / TEAMS;
    constexpr int scratch_bytes = mn_state_scan_meeting<TEAMS>::scratch_bytes;
    const int strip = mn_state_scan_role<true, TEAMS>::strip();
    const int team = mn_state_scan_role<true, TEAMS>::team();
    mn_state_scan_meeting<TEAMS> &meeting =
        ((mn_state_scan_meeting<TEAMS> *)(scan_bytes + sizeof(mn_state_scan_smem<KP>)))[strip];
    const mn_state_scan_results results(p.grad.v, job.packed[MN_DELTA_DV], at, p.call.V, strip,
                                  team * tiles * 8);
    const mn_state_scan_records records(job, at, strip);
    const int n_chunks = at.n_chunks;
    mn_state_scan_state<KP, true, TEAMS> D;
    D.load(p.cot.state, p.call, at);
    for (int turn = 0; turn < n_chunks; turn++) {
        const int chunk = n_chunks - 1 - turn;
        mn_state_scan_front<KP> &front = room.front(turn);
        float dR[8][4] = {}, dX[8][4] = {};
        unsigned x[4][4], cot[4][4], mine[steps][4];
        const float *gamma = CHANNEL ? nullptr : front.gamma;
        mn_state_scan_wait_front(room, turn);
        D.read(dR, front.keys, records.at(job.work.D, chunk, KP), meeting.scratch(team));
        if (!CHANNEL) mn_state_scan_scale(dR, front.write, 1.0f);
        mn_state_scan_cotangent(mine, mn_shared(front.values), strip, team * steps, nullptr, 1.0f);
        mn_state_scan_upper<true>(dR, mine, mn_shared(front.P), team * steps);
        if (TEAMS > 1) {
            mn_state_scan_meet<TEAMS>(strip);
            mn_state_scan_store<TEAMS>(meeting, dR, team);
        }
        mn_state_scan_cotangent(cot, mn_shared(front.values), strip, 0, gamma, job.scale);
        if constexpr (TEAMS == 1) {
            mn_state_scan_left(x, dR);
        } else {
            float own[tiles][4];
            mn_state_scan_meet<TEAMS>(strip);
            mn_state_scan_take<TEAMS>(own, dR, meeting, team);
            mn_state_scan_left(mine, own);
            mn_state_scan_gather<TEAMS>(x, mine, meeting.operands, strip, team);
        }
        mn_state_scan_upper<true>(dX, x, mn_shared(front.T), 0);
        mn_state_scan_left(x, dX);
        mn_state_scan_share<TEAMS>(mine, x, team);
        mn_state_scan_spill<scratch_bytes>(records.at(job.work.dX, chunk, MN_DELTA_CHUNK) +
                                         16 * steps * team, MN_DELTA_CHUNK, mine,
                                     meeting.scratch(team));
        if (results.to) {
            float own[tiles][4];
            mn_state_scan_share<TEAMS>(own, dX, team);
            results.put(chunk, own, meeting.scratch(team));
        }
        mn_state_scan_wait_back(room, turn, ahead);
        D.template decay<CHANNEL>(front);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) dX[n][i] = -dX[n][i];
        }
        if (!CHANNEL) mn_state_scan_scale(dX, front.gamma, 1.0f);
        mn_state_scan_left(x, dX);
        mn_unit_begin<true>();
        D.add(cot, room.first(turn, same_keys));
        D.add(x, same_keys ? front.keys : room.second(turn));
        mn_unit_end<true>();
        mn_state_scan_done(room, turn);
    }
    D.store(p.grad.state0, p.call, at);
}

#endif
