/* delta_walk.cuh - delta's states, chunk after chunk, forward and back.
 *
 *   X = V - Ed S     R = T X     O = Qd S + P R     S <- fall S + Wd'R
 *   dR = Wd D + P'dO     dX = T'dR = dV     D <- fall D + Qd'dO - Ed'dX
 *
 * with rows decayed from the chunk's start (Qd, scale included, and Ed) or to its end (Wd).
 *
 * A warp has 16 value columns of one head of one sequence and keeps its columns of the state,
 * turned, in registers in float32: [16][K]. Everything is computed turned as well, so that sums of
 * one product are the left operand of the next and never leave the registers; the right operands,
 * which warps of a block share, come through shared memory, where four more warps fetch them. Where
 * channels share the decay, keys come as they are and the decays are applied to the sums. */
#ifndef MN_KERNELS_CUDA_DELTA_WALK_CUH
#define MN_KERNELS_CUDA_DELTA_WALK_CUH

#include "kernels/cuda/delta_unit.cuh"

enum { MN_DELTA_WALKERS = 4, MN_DELTA_FETCHERS = 128 };    // most warps; threads that fetch

/* What is needed first of a chunk, and what later; the first kind is fetched one chunk ahead, the
 * second too where there is room. */
template <int KP>
struct alignas(1024) mn_walk_front {
    unsigned char keys[mn_tile_bytes<KP>()], values[mn_tile_bytes<64>()];
    unsigned char T[mn_tile_bytes<64>()], P[mn_tile_bytes<64>()];
    float gamma[MN_DELTA_CHUNK], write[MN_DELTA_CHUNK], fall[KP];
};

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

template <int KP>
struct mn_walk_room {
    static constexpr int backs = KP <= 128 ? 2 : 1;
    mn_walk_front<KP> front[2];
    mn_walk_back<KP> back[backs];
    mn_walk_place place;    // here, as registers are short
};

/* Fills in the place; two of `walkers` threads have a column. All threads of the block call. */
__device__ inline void mn_walk_begin(mn_walk_place &at, const mn_delta_job &job, int64_t n_slices,
                                     int walkers) {
    const mn_call &call = job.p.call;
    if (threadIdx.x == 0) {
        at.columns = walkers / 2;
        at.column0 = blockIdx.x % n_slices * at.columns;
        at.h = blockIdx.x / n_slices % call.H;
        at.n = blockIdx.x / n_slices / call.H;
        at.span = mn_span_at(call, at.n);
        at.first = mn_delta_first(call, at.n);
        at.n_chunks = (int)((at.span.length + MN_DELTA_CHUNK - 1) / MN_DELTA_CHUNK);
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

/* Rows of keys of a chunk: decayed ones from work space, or the tensor's own. */
template <int KP, bool CHANNEL>
__device__ inline void mn_walk_fetch_keys(unsigned char *tile, const mn_delta_job &job,
                                          const mn_in &view, int tensor, const mn_bf16 *decayed,
                                          const mn_walk_place &at, int chunk) {
    constexpr int hands = MN_DELTA_FETCHERS;
    if (CHANNEL) {
        const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
        mn_tile_recall<KP, hands>(tile, decayed + index * MN_DELTA_CHUNK * KP, KP, mn_walk_hand());
    } else {
        mn_tile_fetch<KP, hands>(tile, view, job.packed[tensor], at.span, at.h,
                                 (int64_t)chunk * MN_DELTA_CHUNK, mn_walk_count(at, chunk), 0,
                                 job.p.call.K, mn_walk_hand());
    }
}

/* Squares, decays and value columns of a chunk. */
template <int KP, bool CHANNEL>
__device__ inline void mn_walk_fetch_front(mn_walk_front<KP> &to, const mn_delta_job &job,
                                           const mn_in &values, bool packed,
                                           const mn_walk_place &at, int chunk) {
    constexpr int hands = MN_DELTA_FETCHERS;
    const int hand = mn_walk_hand();
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    mn_tile_fetch<64, hands>(to.values, values, packed, at.span, at.h,
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

/* What the fetching warps do for `n` chunks, in step with the others: front(i) and back(i) fetch
 * for chunk i in the order of the walk, and do nothing beyond the last. */
template <int KP, bool GROUP, typename Front, typename Back>
__device__ inline void mn_walk_fetch(int n, Front front, Back back) {
    constexpr int backs = mn_walk_room<KP>::backs;
    const auto all = [&](auto fetch, int i) {
        if (i < n) fetch(i);
        mn_copy_commit();
    };
    all(front, 0);
    if (backs == 2) all(back, 0);
    for (int i = 0; i < n; i++) {
        if (backs == 1) all(back, i);
        all(front, i + 1);
        if (backs == 2) all(back, i + 1);
        mn_copy_wait<2>();
        __syncthreads();
        if (backs == 1) {
            mn_copy_wait<1>();
            __syncthreads();
        }
        __syncthreads();
    }
}

/* ---- states in registers --------------------------------------------------------------------- */

/* Rows of this lane: columns j and j + 8 of the value axis; columns: channels 8 i + 2 (l % 4). */
template <int KP>
struct mn_walk_state {
    float at[KP / 8][4];

    template <typename F>
    __device__ void each(const mn_call &call, int64_t column0, F use) {
        const int lane = threadIdx.x % 32;
        const int64_t j = column0 + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < KP / 8; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int64_t row = 8 * i + lane % 4 * 2 + c % 2, column = j + c / 2 * 8;
                use(at[i][c], row * call.V + column, row < call.K && column < call.V);
            }
        }
    }

    __device__ void load(const mn_in &state, const mn_call &call, const mn_walk_place &place) {
        const float *from = mn_row<float>(state, place.n, 0, place.h);
        each(call, place.column0, [&](float &x, int64_t i, bool inside) {
            x = inside && from ? from[i] : 0.0f;
        });
    }

    __device__ void store(const mn_out &state, const mn_call &call, const mn_walk_place &place) {
        float *to = mn_row<float>(state, place.n, 0, place.h);
        if (!to) return;
        each(call, place.column0, [&](float &x, int64_t i, bool inside) {
            if (inside) to[i] = x;
        });
    }

    /* By what all channels share. */
    __device__ void decay(float fall) {
#pragma unroll
        for (int i = 0; i < KP / 8; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) at[i][c] *= fall;
        }
    }

    template <bool CHANNEL>
    __device__ void decay(const mn_walk_front<KP> &chunk) {
        const int column = threadIdx.x % 4 * 2;
        const float shared = chunk.gamma[MN_DELTA_CHUNK - 1];
#pragma unroll
        for (int i = 0; i < KP / 8; i++) {
            float2 fall = make_float2(shared, shared);
            if (CHANNEL) fall = *(const float2 *)&chunk.fall[8 * i + column];
            at[i][0] *= fall.x, at[i][1] *= fall.y, at[i][2] *= fall.x, at[i][3] *= fall.y;
        }
    }

    /* += x rows, for x (16 values, 64 tokens) and a tile of rows of keys. */
    template <bool GROUP>
    __device__ void add(const unsigned (&x)[4][4], unsigned rows) {
#pragma unroll
        for (int panel = 0; panel < KP / 64; panel++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mn_unit_depth<GROUP>(&at[8 * panel], x[k], rows, 16 * k, panel, 4);
            }
        }
    }

    /* Keeps the compiler from holding on to the state in bf16, for which wide ones have no room. */
    __device__ void renew(void) {
#pragma unroll
        for (int i = 0; i < KP / 8; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) asm volatile("" : "+f"(at[i][c]));
        }
    }

    /* sums += state rows', (16 values, 64 tokens). `keep`, where not NULL, is where this warp's
     * part of the state goes in bf16. */
    template <bool GROUP>
    __device__ void read(float (&sums)[8][4], unsigned rows, mn_bf16 *keep) const {
        constexpr int steps = KP / 16 <= 8 ? KP / 16 : 4;    // as registers allow
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k0 = 0; k0 < KP / 16; k0 += steps) {
            unsigned a[steps][4];
#pragma unroll
            for (int k = 0; k < steps; k++) {
                mn_left_of(a[k], at[2 * (k0 + k)], at[2 * (k0 + k) + 1]);
            }
            mn_unit_begin<GROUP>();
#pragma unroll
            for (int k = 0; k < steps; k++) {
                mn_unit_rows<GROUP>(sums, a[k], rows, 16 * (k0 + k), 0);
            }
            mn_unit_end<GROUP>();
#pragma unroll
            for (int k = 0; k < steps && keep; k++) {
                unsigned *to = (unsigned *)(keep + lane / 4 * KP + 16 * (k0 + k) + lane % 4 * 2);
                to[0] = a[k][0], to[4 * KP] = a[k][1], to[4] = a[k][2], to[4 * KP + 4] = a[k][3];
            }
        }
    }
};

/* ---- sums over tokens in registers ----------------------------------------------------------- */

/* (16 values, 64 tokens) by tokens' numbers. */
__device__ inline void mn_walk_scale(float (&x)[8][4], const float *factor, float more) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 by = *(const float2 *)&factor[8 * n + column];
        x[n][0] *= more * by.x, x[n][1] *= more * by.y;
        x[n][2] *= more * by.x, x[n][3] *= more * by.y;
    }
}

__device__ inline void mn_walk_left(unsigned (&a)[4][4], const float (&x)[8][4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) mn_left_of(a[k], x[2 * k], x[2 * k + 1]);
}

/* y += x square', for a lower triangle. */
template <bool GROUP>
__device__ inline void mn_walk_lower(float (&y)[8][4], const unsigned (&x)[4][4], unsigned square) {
#pragma unroll
    for (int k = 0; k < 4; k++) mn_unit_rows<GROUP>(y, x[k], square, 16 * k, k);
}

/* y += x square, likewise. */
template <bool GROUP>
__device__ inline void mn_walk_upper(float (&y)[8][4], const unsigned (&x)[4][4], unsigned square) {
#pragma unroll
    for (int k = 0; k < 4; k++) mn_unit_depth<GROUP>(y, x[k], square, 16 * k, 0, k + 1);
}

/* Turned rows for work space, [values][64]. */
__device__ inline void mn_walk_keep(mn_bf16 *to, const unsigned (&x)[4][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned *at = (unsigned *)(to + lane / 4 * MN_DELTA_CHUNK + 16 * k + lane % 4 * 2);
        at[0] = x[k][0], at[4 * MN_DELTA_CHUNK] = x[k][1];
        at[4] = x[k][2], at[4 * MN_DELTA_CHUNK + 4] = x[k][3];
    }
}

/* Rows of tokens for a tensor, through this warp's columns of a tile that it alone still reads. */
__device__ inline void mn_walk_put(const mn_out &view, bool packed, const mn_walk_place &at,
                                   int chunk, int64_t V, unsigned char *tile,
                                   const float (&x)[8][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int count = mn_walk_count(at, chunk);
    const int64_t t = at.span.t0 + (int64_t)chunk * MN_DELTA_CHUNK;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const unsigned pair = mn_turn(mn_pair(x[n][2 * half], x[n][2 * half + 1]));
            const unsigned place = mn_tile_place(8 * n + lane / 4, 2 * warp + half);
            *(unsigned *)(tile + place + lane % 4 * 4) = pair;
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = 16 * i + lane / 2, octet = 2 * warp + lane % 2;
        const int64_t j = at.column0 + 8 * octet;
        if (token >= count || j >= V) continue;
        const mn_pack<mn_bf16, 8> pack = *(mn_pack<mn_bf16, 8> *)(tile +
                                                                   mn_tile_place(token, octet));
        mn_bf16 *to = mn_row<mn_bf16>(view, at.span.b, t + token, at.h) + j;
        if (packed) {
            *(mn_pack<mn_bf16, 8> *)to = pack;
        } else {
            for (int c = 0; c < 8 && j + c < V; c++) to[c] = pack.at[c];
        }
    }
}

/* Where this warp's rows of a record of `rows` times `width` begin. */
__device__ inline int64_t mn_walk_record(const mn_delta_job &job, const mn_walk_place &at,
                                         int chunk, int width) {
    const int64_t index = (at.first + chunk) * job.p.call.H + at.h;
    return (index * job.wide_v + at.column0 + threadIdx.x / 32 * 16) * width;
}

/* ---- forward --------------------------------------------------------------------------------- */

/* X of a chunk as left operands, from Ed S, (16 values, 64 tokens). */
template <int KP, bool CHANNEL>
__device__ inline void mn_walk_misses(unsigned (&x)[4][4], float (&X)[8][4],
                                      const mn_walk_front<KP> &front) {
    if (!CHANNEL) mn_walk_scale(X, front.gamma, 1.0f);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned v[4];
        mn_left_turned(v, mn_shared(front.values), threadIdx.x / 32 * 16, 16 * k);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float(&to)[4] = X[2 * k + half];
            to[0] = mn_low(v[2 * half]) - to[0], to[1] = mn_high(v[2 * half]) - to[1];
            to[2] = mn_low(v[2 * half + 1]) - to[2], to[3] = mn_high(v[2 * half + 1]) - to[3];
        }
    }
    mn_walk_left(x, X);
}

/* KEEP: states in front of chunks and residuals go to work space, and there are no outputs. */
template <int KP, bool CHANNEL, bool KEEP, bool GROUP>
__global__ void __launch_bounds__(32 * MN_DELTA_WALKERS + MN_DELTA_FETCHERS)
mn_delta_walk_kernel(const __grid_constant__ mn_delta_job job, int64_t n_slices) {
    extern __shared__ __align__(1024) unsigned char walk_bytes[];
    mn_walk_room<KP> &room = *(mn_walk_room<KP> *)walk_bytes;
    constexpr int backs = mn_walk_room<KP>::backs;
    const mn_delta_args &p = job.p;
    mn_walk_begin(room.place, job, n_slices, (int)blockDim.x - MN_DELTA_FETCHERS);
    const mn_walk_place &at = room.place;
    const bool same_keys = !CHANNEL && !p.w.data;    // writes where it erases
    if (mn_walk_hand() >= 0) {
        const auto front = [&](int chunk) {
            mn_walk_front<KP> &to = room.front[chunk % 2];
            mn_walk_fetch_keys<KP, CHANNEL>(to.keys, job, p.e, MN_DELTA_E, job.work.e, at, chunk);
            mn_walk_fetch_front<KP, CHANNEL>(to, job, p.v, job.packed[MN_DELTA_V], at, chunk);
        };
        const auto back = [&](int chunk) {
            mn_walk_back<KP> &to = room.back[chunk % backs];
            if (!KEEP) {
                mn_walk_fetch_keys<KP, CHANNEL>(to.first, job, p.q, MN_DELTA_Q, job.work.q, at,
                                                chunk);
            }
            if (!same_keys) {
                mn_walk_fetch_keys<KP, CHANNEL>(to.second, job, p.w, MN_DELTA_W, job.work.w, at,
                                                chunk);
            }
        };
        mn_walk_fetch<KP, GROUP>(at.n_chunks, front, back);
        return;
    }
    mn_walk_state<KP> S;
    S.load(p.state0, p.call, at);
    for (int chunk = 0; chunk < at.n_chunks; chunk++) {
        mn_walk_front<KP> &front = room.front[chunk % 2];
        mn_walk_back<KP> &back = room.back[chunk % backs];
        float X[8][4] = {}, R[8][4] = {}, O[8][4] = {};
        unsigned x[4][4], r[4][4];
        __syncthreads();    // the front is there
        mn_unit_see<GROUP>();
        S.template read<GROUP>(
            X, mn_shared(front.keys),
            KEEP ? job.work.S + mn_walk_record(job, at, chunk, KP) : nullptr);
        if (!KEEP && KP > 128) S.renew();
        mn_walk_misses<KP, CHANNEL>(x, X, front);
        mn_unit_begin<GROUP>();
        mn_walk_lower<GROUP>(R, x, mn_shared(front.T));
        mn_unit_end<GROUP>();
        mn_walk_left(r, R);
        if (!CHANNEL) mn_walk_scale(R, front.write, 1.0f);
        mn_walk_left(x, R);
        if (backs == 1) {    // with two, what is behind came with the front
            __syncthreads();
            mn_unit_see<GROUP>();
        }
        if (!KEEP) S.template read<GROUP>(O, mn_shared(back.first), nullptr);
        if (KEEP) {
            mn_walk_keep(job.work.R + mn_walk_record(job, at, chunk, MN_DELTA_CHUNK), r);
        } else {
            if (!CHANNEL) mn_walk_scale(O, front.gamma, job.scale);
            mn_unit_begin<GROUP>();
            mn_walk_lower<GROUP>(O, r, mn_shared(front.P));
            mn_unit_end<GROUP>();
        }
        if (!KEEP && p.o.data) {
            mn_walk_put(p.o, job.packed[MN_DELTA_O], at, chunk, p.call.V, front.values, O);
        }
        S.template decay<CHANNEL>(front);
        mn_unit_begin<GROUP>();
        S.template add<GROUP>(x, mn_shared(same_keys ? front.keys : back.second));
        mn_unit_end<GROUP>();
        __syncthreads();
    }
    if (!KEEP) S.store(p.state, p.call, at);
}

/* ---- back ------------------------------------------------------------------------------------ */

/* The cotangent of this warp's columns as left operands, turned, each token by its number. */
__device__ inline void mn_walk_cotangent(unsigned (&x)[4][4], unsigned tile, const float *factor,
                                         float more) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        mn_left_turned(x[k], tile, threadIdx.x / 32 * 16, 16 * k);
        if (!factor) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 by = *(const float2 *)&factor[16 * k + i / 2 * 8 + column];
            x[k][i] = mn_pair(more * by.x * mn_low(x[k][i]), more * by.y * mn_high(x[k][i]));
        }
    }
}

template <int KP, bool CHANNEL, bool GROUP>
__global__ void __launch_bounds__(32 * MN_DELTA_WALKERS + MN_DELTA_FETCHERS)
mn_delta_walk_back_kernel(const __grid_constant__ mn_delta_job job, int64_t n_slices) {
    extern __shared__ __align__(1024) unsigned char walk_bytes[];
    mn_walk_room<KP> &room = *(mn_walk_room<KP> *)walk_bytes;
    constexpr int backs = mn_walk_room<KP>::backs;
    const mn_delta_args &p = job.p;
    mn_walk_begin(room.place, job, n_slices, (int)blockDim.x - MN_DELTA_FETCHERS);
    const mn_walk_place &at = room.place;
    const bool same_keys = !CHANNEL && !p.w.data;
    const mn_in &w = same_keys ? p.e : p.w;
    if (mn_walk_hand() >= 0) {
        const auto front = [&](int i) {
            const int chunk = at.n_chunks - 1 - i;
            mn_walk_front<KP> &to = room.front[chunk % 2];
            mn_walk_fetch_keys<KP, CHANNEL>(to.keys, job, w, MN_DELTA_W, job.work.w, at, chunk);
            mn_walk_fetch_front<KP, CHANNEL>(to, job, p.cot.o, job.packed[MN_DELTA_COT], at, chunk);
        };
        const auto back = [&](int i) {
            const int chunk = at.n_chunks - 1 - i;
            mn_walk_back<KP> &to = room.back[chunk % backs];
            mn_walk_fetch_keys<KP, CHANNEL>(to.first, job, p.q, MN_DELTA_Q, job.work.q, at, chunk);
            if (same_keys) return;
            mn_walk_fetch_keys<KP, CHANNEL>(to.second, job, p.e, MN_DELTA_E, job.work.e, at, chunk);
        };
        mn_walk_fetch<KP, GROUP>(at.n_chunks, front, back);
        return;
    }
    mn_walk_state<KP> D;
    D.load(p.cot.state, p.call, at);
    for (int chunk = at.n_chunks - 1; chunk >= 0; chunk--) {
        mn_walk_front<KP> &front = room.front[chunk % 2];
        mn_walk_back<KP> &back = room.back[chunk % backs];
        float dR[8][4] = {}, dX[8][4] = {};
        unsigned x[4][4], cot[4][4];
        __syncthreads();
        mn_unit_see<GROUP>();
        mn_walk_cotangent(cot, mn_shared(front.values), nullptr, 1.0f);
        D.template read<GROUP>(dR, mn_shared(front.keys),
                               job.work.D + mn_walk_record(job, at, chunk, KP));
        if (!CHANNEL) mn_walk_scale(dR, front.write, 1.0f);
        mn_unit_begin<GROUP>();
        mn_walk_upper<GROUP>(dR, cot, mn_shared(front.P));
        mn_unit_end<GROUP>();
        mn_walk_left(x, dR);
        mn_unit_begin<GROUP>();
        mn_walk_upper<GROUP>(dX, x, mn_shared(front.T));
        mn_unit_end<GROUP>();
        mn_walk_left(x, dX);
        mn_walk_keep(job.work.dX + mn_walk_record(job, at, chunk, MN_DELTA_CHUNK), x);
        if (!CHANNEL) {
            mn_walk_cotangent(cot, mn_shared(front.values), front.gamma, job.scale);
        }
        if (p.grad.v.data) {
            mn_walk_put(p.grad.v, job.packed[MN_DELTA_DV], at, chunk, p.call.V, front.values, dX);
        }
        if (backs == 1) {
            __syncthreads();
            mn_unit_see<GROUP>();
        }
        D.template decay<CHANNEL>(front);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) dX[n][i] = -dX[n][i];
        }
        if (!CHANNEL) mn_walk_scale(dX, front.gamma, 1.0f);
        mn_walk_left(x, dX);
        mn_unit_begin<GROUP>();
        D.template add<GROUP>(cot, mn_shared(back.first));
        D.template add<GROUP>(x, mn_shared(same_keys ? front.keys : back.second));
        mn_unit_end<GROUP>();
        __syncthreads();
    }
    D.store(p.grad.state0, p.call, at);
}

#endif
