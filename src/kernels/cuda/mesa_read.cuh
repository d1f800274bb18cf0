/* mesa_read.cuh - what tokens read, all of them at once, for keys of at most 128 channels.
 *
 * A team of one or four warps has a token t. From the pair (Hkk, Hkv) in front of its chunk and the
 * tokens s <= t inside, G the sum of log decays there and W_s = beta_s exp(G_t - G_s), it makes
 *
 *   M = exp(G_t) Hkk + sum_s W_s k_s k_s' + diag(lam)      in double, and solves (mesa_tiles.cuh)
 *   M x = scale q      o = exp(G_t) Hkv'x + sum_s W_s (k_s.x) v_s
 *   M y = exp(G_t) Hkv do + sum_s W_s (v_s.do) k_s         on the way back: dq = scale y */
#ifndef MN_KERNELS_CUDA_MESA_READ_CUH
#define MN_KERNELS_CUDA_MESA_READ_CUH

#include "kernels/cuda/mesa.cuh"
#include "kernels/cuda/mesa_tiles.cuh"

/* Threads, four teams of one warp or one of four; the widest keys. */
enum { MN_MESA_READERS = 128, MN_MESA_NARROW = 128 };

/* The chunk's tokens, and what teams keep of each of theirs. */
template <int N>
struct mn_mesa_tokens {
    static constexpr int pitch = 8 * N + 8;    // so that four tokens' keys are in different banks
    mn_mesa_shown<N> shown[4 / mn_mesa_matrix<N>::warps];
    double G[MN_MESA_CHUNK];
    float keys[MN_MESA_CHUNK][pitch];
    float beta[MN_MESA_CHUNK];
    float sides[MN_MESA_PART][2][8 * N];          // q and Hkv do, then x and y
    float weight[MN_MESA_PART][MN_MESA_CHUNK];    // of the tokens' values, or keys
};

/* A team and its token, which is token u of the chunk, number `mine` of the part and token t of
 * batch row b. `rank` is the thread's in its team. Where a part is short, teams without a token do
 * as the last one does and leave nothing: branches that all threads take alike spare the exchanges
 * between lanes much care. */
template <int N>
struct mn_mesa_reader {
    static constexpr int warps = mn_mesa_matrix<N>::warps, team = 32 * warps;
    mn_mesa_place at;
    const float *front;    // the pair
    int64_t b, t, t0;      // t0: where the chunk begins
    int u, mine, rank, lane;
    int count;             // tokens up to the part's end
    bool real;
    float fall, write;     // exp(G_t), and W of token `lane`, zero behind t

    __device__ void meet(void) const {
        mn_mesa_meet<warps>();
    }
};

/* Keys, decays and weights of the chunk's first `count` tokens; zeros behind them. */
template <int N, typename T>
__device__ inline void mn_mesa_stage(mn_mesa_tokens<N> &room, const mn_mesa_args &p,
                                     const mn_mesa_place &at, int count) {
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0 + at.tile.first;
#pragma unroll 8
    for (int i = threadIdx.x; i < MN_MESA_CHUNK * 8 * N; i += MN_MESA_READERS) {
        const int u = i / (8 * N), channel = i % (8 * N);
        const bool there = u < count && channel < p.call.K;
        room.keys[u][channel] = there ? mn_float(mn_row<T>(p.k, b, t0 + u, at.h)[channel]) : 0.0f;
    }
    if (threadIdx.x >= MN_MESA_CHUNK) return;
    const int u = threadIdx.x;
    room.G[u] = mn_mesa_levels<T>(p, at, u);
    room.beta[u] = u < count ? mn_float(*mn_row<T>(p.beta, b, t0 + u, at.h)) : 0.0f;
}

/* This warp's tiles of exp(G_t) Hkk + diag(lam), and of the identity from row K on. */
template <int N, typename T>
__device__ __forceinline__ void mn_mesa_begin(mn_mesa_matrix<N> &m, const mn_mesa_args &p,
                                              const mn_mesa_reader<N> &me) {
    const int row = me.lane / 4, pair = me.lane % 4, K = (int)p.call.K;
    const int64_t width = p.call.K + p.call.V;
    const T *lam = mn_row<T>(p.lam, 0, 0, me.at.h);
#pragma unroll
    for (int slot = 0; slot < mn_mesa_matrix<N>::slots; slot++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int tile = 2 * mn_mesa_matrix<N>::pair(slot) + half, i = 8 * tile + row;
            const float *from = me.front + min(i, K - 1) * width;
            const double ridge = i < K ? (double)mn_float(lam[min(i, K - 1)]) : 1.0;
#pragma unroll
            for (int j = 0; j < mn_mesa_matrix<N>::columns(slot); j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int column = 8 * j + 2 * pair + e;
                    const float x = me.fall * from[min(column, K - 1)];
                    double &to = m.at[slot][j][half][e];
                    to = (double)(i < K && column < K ? x : 0.0f);
                    if (mn_mesa_matrix<N>::warps > 1 || j == tile) to += i == column ? ridge : 0.0;
                }
            }
        }
    }
}

/* M of the token. */
template <int N, typename T>
__device__ __forceinline__ void mn_mesa_gather(mn_mesa_matrix<N> &m, const mn_mesa_tokens<N> &room,
                                               const mn_mesa_args &p, const mn_mesa_reader<N> &me) {
    constexpr int slots = mn_mesa_matrix<N>::slots;
    const int row = me.lane / 4, pair = me.lane % 4;
    mn_mesa_begin<N, T>(m, p, me);
#pragma unroll 1
    for (int u0 = 0; u0 < me.count; u0 += 8) {    // tensor cores take eight tokens at a time
        const int u[2] = { u0 + pair, u0 + pair + 4 };
        const auto key = [&](int tile, int e) {
            return u[e] <= me.u ? (double)room.keys[u[e]][8 * tile + row] : 0.0;
        };
        double left[slots][4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const double weight = (double)__shfl_sync(0xffffffffu, me.write, u[c / 2]);
#pragma unroll
            for (int slot = 0; slot < slots; slot++) {
                left[slot][c] = weight * key(2 * mn_mesa_matrix<N>::pair(slot) + c % 2, c / 2);
            }
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            const double right[2] = { key(j, 0), key(j, 1) };
#pragma unroll
            for (int slot = 0; slot < slots; slot++) {
                if (j >= mn_mesa_matrix<N>::columns(slot)) continue;
                mn_dmma_8(m.at[slot][j], left[slot], right);
            }
        }
    }
}

/* The right side of x. */
template <int N, typename T>
__device__ inline void mn_mesa_query(mn_mesa_tokens<N> &room, const mn_mesa_args &p,
                                     const mn_mesa_reader<N> &me) {
    const T *q = mn_row<T>(p.q, me.b, me.t, me.at.h);
    for (int i = me.rank; i < 8 * N; i += me.team) {
        room.sides[me.mine][0][i] = i < p.call.K ? (float)p.scale * mn_float(q[i]) : 0.0f;
    }
    me.meet();
}

/* The right side of y. */
template <int N, typename T>
__device__ inline void mn_mesa_cotangent(mn_mesa_tokens<N> &room, const mn_mesa_args &p,
                                         const mn_mesa_reader<N> &me) {
    const int64_t K = p.call.K, V = p.call.V, width = K + V;
    float *side = room.sides[me.mine][1], *weight = room.weight[me.mine];
    const T *cot = mn_row<T>(p.cot.o, me.b, me.t, me.at.h);
#pragma unroll 4
    for (int u0 = 0; u0 < me.count; u0 += me.warps) {
        const int u = min(u0 + me.rank / 32, me.u);
        const T *v = mn_row<T>(p.v, me.b, me.t0 + u, me.at.h);
        float sum = 0.0f;
        for (int64_t j = me.lane; j < V; j += 32) sum = fmaf(mn_float(v[j]), mn_get(cot, j), sum);
        sum = mn_warp_sum(sum);
        if (me.lane == u0 + me.rank / 32) weight[me.lane] = me.write * sum;
    }
#pragma unroll 4
    for (int i0 = 0; i0 < (int)K; i0 += me.warps) {
        const int i = min(i0 + me.rank / 32, (int)K - 1);
        const float *from = me.front + i * width + K;
        float sum = 0.0f;
        for (int64_t j = me.lane; j < V; j += 32) sum = fmaf(from[j], mn_get(cot, j), sum);
        sum = mn_warp_sum(sum);
        if (me.lane == 0) side[i] = me.fall * sum;
    }
    me.meet();
    for (int i = me.rank; i < 8 * N; i += me.team) {
        float sum = i < K ? side[i] : 0.0f;
        for (int u = 0; u < me.count; u++) sum = fmaf(weight[u], room.keys[u][i], sum);
        side[i] = sum;
    }
    me.meet();
}

/* o from x. */
template <int N, typename T>
__device__ inline void mn_mesa_output(mn_mesa_tokens<N> &room, const mn_mesa_args &p,
                                      const mn_mesa_reader<N> &me) {
    const int64_t K = p.call.K, V = p.call.V, width = K + V;
    const float *x = room.sides[me.mine][0], *keys = room.keys[me.lane];
    float *weight = room.weight[me.mine];
    T *o = mn_row<T>(p.o, me.b, me.t, me.at.h);
    if (me.rank < 32) {
        float with = 0.0f;
#pragma unroll 8
        for (int n = 0; n < 8 * N; n++) {    // each lane begins at its own bank
            const int i = (n + me.lane) % (8 * N);
            with = fmaf(keys[i], x[i], with);
        }
        weight[me.lane] = me.lane <= me.u ? me.write * with : 0.0f;
    }
    me.meet();
    for (int64_t j = me.rank; me.real && j < V; j += 2 * me.team) {    // and its second column
        const int64_t at[2] = { j, min(j + me.team, V - 1) };
        float sum[2] = {};
#pragma unroll 8
        for (int i = 0; i < (int)K; i++) {
            const float *from = me.front + i * width + K;
#pragma unroll
            for (int c = 0; c < 2; c++) sum[c] = fmaf(x[i], from[at[c]], sum[c]);
        }
        sum[0] *= me.fall, sum[1] *= me.fall;
#pragma unroll 8
        for (int u = 0; u < me.count; u++) {
            const T *v = mn_row<T>(p.v, me.b, me.t0 + min(u, me.u), me.at.h);
#pragma unroll
            for (int c = 0; c < 2; c++) sum[c] = fmaf(weight[u], mn_float(v[at[c]]), sum[c]);
        }
        mn_put(o + j, sum[0]);
        if (j + me.team < V) mn_put(o + j + me.team, sum[1]);
    }
}

/* dq, and x and y for the adjoints. */
template <int N, typename T>
__device__ inline void mn_mesa_leave(const mn_mesa_tokens<N> &room, const mn_mesa_args &p,
                                     const mn_mesa_work &w, const mn_mesa_reader<N> &me) {
    const int64_t K = p.call.K, row = ((me.b * p.call.T + me.t) * p.call.H + me.at.h) * K;
    T *dq = mn_row<T>(p.grad.q, me.b, me.t, me.at.h);
    for (int i = me.rank; me.real && i < (int)K; i += me.team) {
        const float x = room.sides[me.mine][0][i], y = room.sides[me.mine][1][i];
        w.x[row + i] = x, w.y[row + i] = y;
        if (dq) mn_put(dq + i, (float)p.scale * y);
    }
}

template <int N, typename T, bool BACK>
__device__ __forceinline__ void mn_mesa_read(mn_mesa_tokens<N> &room, const mn_mesa_args &p,
                                             const mn_mesa_work &w, mn_mesa_reader<N> &me) {
    mn_mesa_matrix<N> m;
    const double G = room.G[me.u];
    float *sides = room.sides[me.mine][0];
    me.t = me.t0 + me.u;
    me.fall = expf((float)G);
    me.write = me.lane <= me.u ? room.beta[me.lane] * expf((float)(G - room.G[me.lane])) : 0.0f;
    mn_mesa_query<N, T>(room, p, me);
    if constexpr (BACK) mn_mesa_cotangent<N, T>(room, p, me);
    mn_mesa_gather<N, T>(m, room, p, me);
    if constexpr (me.warps == 1) mn_mesa_solve_warp<N, BACK ? 2 : 1>(m, sides, (int)p.call.K);
    else mn_mesa_solve_team<N, BACK ? 2 : 1>(m, sides, (int)p.call.K,
                                                room.shown[threadIdx.x / me.team]);
    if constexpr (BACK) mn_mesa_leave<N, T>(room, p, w, me);
    else mn_mesa_output<N, T>(room, p, me);
}

/* A block has a part of a chunk of a head. */
template <int N, typename T, bool BACK>
__global__ void __launch_bounds__(MN_MESA_READERS, N >= 8 ? 2 : 4)
mn_mesa_read_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w) {
    __shared__ mn_mesa_tokens<N> room;
    constexpr int parts = MN_MESA_CHUNK / MN_MESA_PART, teams = 4 / mn_mesa_matrix<N>::warps;
    const int64_t item = blockIdx.x, K = p.call.K;
    const int first = (int)(item % parts) * MN_MESA_PART;
    mn_mesa_reader<N> me;
    me.at = mn_mesa_here(p.call, item / parts);
    const int count = (int)min((int64_t)first + MN_MESA_PART, me.at.tile.n_rows);
    if (first < count) mn_mesa_stage<N, T>(room, p, me.at, count);
    mn_wait_for_before();    // inputs are there already, pairs only now
    if (first >= count) return;
    __syncthreads();
    me.rank = threadIdx.x % me.team, me.lane = threadIdx.x % 32;
    me.b = me.at.tile.span.b, me.t0 = me.at.tile.span.t0 + me.at.tile.first;
    me.front = w.pairs + me.at.index * K * (K + p.call.V), me.count = count;
#pragma unroll 1
    for (int pass = 0; pass < MN_MESA_PART / teams; pass++) {
        me.mine = pass * teams + threadIdx.x / me.team;
        me.u = min(first + me.mine, count - 1), me.real = first + me.mine < count;
        mn_mesa_read<N, T, BACK>(room, p, w, me);
    }
    if (!BACK) return;
    __syncthreads();
    for (int i = threadIdx.x; i < (int)K; i += MN_MESA_READERS) {
        float sum = 0.0f;
        for (int n = 0; first + n < count; n++) sum -= room.sides[n][0][i] * room.sides[n][1][i];
        w.lam[item * K + i] = sum;
    }
}

#endif
