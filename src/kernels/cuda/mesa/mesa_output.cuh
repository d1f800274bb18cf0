/* mesa_output.cuh - what tokens read, all of them at once, for keys of at most 128 channels.
 *
 * A team of one or four warps has a token t. From the pair (Hkk, Hkv) in front of its chunk and the
 * tokens s <= t inside, G the sum of log decays there and W_s = beta_s exp(G_t - G_s), it makes
 *
 *   M = exp(G_t) Hkk + sum_s W_s k_s k_s' + diag(lam)      in double, and solves (mesa_solve.cuh)
 *   M x = scale q      o = exp(G_t) Hkv'x + sum_s W_s (k_s.x) v_s
 *   M y = exp(G_t) Hkv do + sum_s W_s (v_s.do) k_s         on the way back: dq = scale y */
#ifndef MN_KERNELS_CUDA_MESA_MESA_OUTPUT_CUH
#define MN_KERNELS_CUDA_MESA_MESA_OUTPUT_CUH

#include "kernels/cuda/mesa/mesa.cuh"
#include "kernels/cuda/mesa/mesa_solve.cuh"

namespace mneme::mesa {

enum { MN_MESA_READERS = 256 };    // threads: eight groups of one warp or two of four

/* Keys of a chunk, and a row of zeros; as doubles, too, and with Hkk in front of them, where each
 * of eight warps would fetch that and turn them into such. For groups of four there is no room on
 * all machines. Rows lie so that four tokens' are in different banks. */
template <int N, bool WIDE = mn_mesa_matrix<N>::warps == 1>
struct mn_mesa_keys {
    static constexpr int pitch = 8 * N + 4;
    alignas(16) float keys[MN_MESA_CHUNK + 1][pitch];
    double wide[MN_MESA_CHUNK + 1][pitch];
    alignas(16) float front[8 * N][8 * N + 8];

    __device__ const float *front_row(int i, const float *, int64_t) const { return front[i]; }
    __device__ void put(int u, int channel, float x) {
        keys[u][channel] = x, wide[u][channel] = (double)x;
    }
    __device__ const double *row(int u) const { return wide[u]; }
};

template <int N>
struct mn_mesa_keys<N, false> {
    static constexpr int pitch = 8 * N + 8;
    alignas(16) float keys[MN_MESA_CHUNK + 1][pitch];

    __device__ const float *front_row(int i, const float *from, int64_t pitch) const {
        return from + i * pitch;
    }
    __device__ void put(int u, int channel, float x) { keys[u][channel] = x; }
    __device__ const float *row(int u) const { return keys[u]; }
};

/* The chunk's tokens, and what groups keep of each of theirs. */
template <int N>
struct mn_mesa_tokens : mn_mesa_keys<N> {
    mn_mesa_shown<N> shown[8 / mn_mesa_matrix<N>::warps];
    alignas(16) float sides[MN_MESA_PART][2][8 * N];    // q and Hkv do, then x and y
    float ridge[8 * N];                                 // lam, and ones from row K on
    float weight[MN_MESA_PART][MN_MESA_CHUNK];          // of the tokens' values, or keys
    float fall[MN_MESA_PART];
    float2 parts[4][MN_MESA_PART][32];                  // of o, by quarters
};

/* A team and its token, which is token u of the chunk, number `mine` of the part and token t of
 * batch row b. `rank` is the thread's in its team. Where a part is short, groups without a token do
 * as the last one does and leave nothing: branches that all threads take alike spare the exchanges
 * between lanes much care. */
template <int N>
struct mn_mesa_reader {
    static constexpr int warps = mn_mesa_matrix<N>::warps, team = 32 * warps;
    mn_mesa_place at;
    mn_mesa_layout lie;
    const float *front;    // the pair
    int64_t b, t, t0;      // t0: where the chunk begins
    int u, mine, rank, lane;
    int part, count;       // blocks of the chunk have parts; tokens of the chunk
    int reach;             // tokens up to the last one that the block's groups have at a time
    bool real;
    double level;          // of token `lane`: the sum of log decays
    float beta;            // of token `lane`
    float fall, write;     // exp(G_t), and W of token `lane`, zero behind t

    /* Part `which` of a chunk. */
    __device__ void take(const mn_mesa_args &p, const mn_mesa_place &place, int which) {
        at = place, lie = mn_mesa_layout::of(p.call);
        rank = threadIdx.x % team, lane = threadIdx.x % 32;
        b = at.tile.span.b, t0 = at.tile.span.t0 + at.tile.first;
        part = which, count = (int)at.tile.n_rows;
    }

    __device__ void meet(void) const {
        mn_mesa_meet<warps>();
    }

    /* Token n of the part, in the chunk. Late tokens have more in front of them in the chunk, so
     * that a part has eight of the first half and as many of the other, as far from its end. */
    __device__ int token(int n) const {
        constexpr int half = MN_MESA_PART / 2;
        return n < half ? part * half + n : MN_MESA_CHUNK - (part + 2) * half + n;
    }
};

/* Keys of the chunk's tokens, what those of the part ask, and the ridge: this thread's channel of
 * every few tokens, on their way. Behind the last token it is repeated. */
template <int N, typename T>
struct mn_mesa_brought {
    static constexpr int each = MN_MESA_READERS / (8 * N);    // tokens at a time
    T k[MN_MESA_CHUNK / each], q[MN_MESA_PART / each], lam;

    __device__ static int channel() { return threadIdx.x % (8 * N); }
    __device__ static int from() { return threadIdx.x / (8 * N); }

    __device__ void fetch(const mn_mesa_args &p, const mn_mesa_reader<N> &me) {
        const int at = channel() < p.call.K ? channel() : 0;
        const T *keys = mn_row<T>(p.k, me.b, me.t0, me.at.h) + at;
        const T *queries = mn_row<T>(p.q, me.b, me.t0, me.at.h) + at;
        const int64_t step = p.k.stride[1], q_step = p.q.stride[1];
#pragma unroll
        for (int i = 0; i < MN_MESA_CHUNK / each; i++) {
            k[i] = keys[min(from() + i * each, me.count - 1) * step];
        }
#pragma unroll
        for (int i = 0; i < MN_MESA_PART / each; i++) {
            q[i] = queries[min(me.token(from() + i * each), me.count - 1) * q_step];
        }
        lam = mn_row<T>(p.lam, 0, 0, me.at.h)[at];
    }

    __device__ void put(mn_mesa_tokens<N> &room, const mn_mesa_args &p) const {
        const bool there = channel() < p.call.K;
#pragma unroll
        for (int i = 0; i < MN_MESA_CHUNK / each; i++) {
            room.put(from() + i * each, channel(), there ? mn_float(k[i]) : 0.0f);
        }
#pragma unroll
        for (int i = 0; i < MN_MESA_PART / each; i++) {
            const float x = (float)p.scale * mn_float(q[i]);
            room.sides[from() + i * each][0][channel()] = there ? x : 0.0f;
        }
        if (from() > 0) return;
        room.put(MN_MESA_CHUNK, channel(), 0.0f);
        room.ridge[channel()] = there ? mn_float(lam) : 1.0f;
    }
};

/* Hkk. */
template <int N>
__device__ inline void mn_mesa_stage_front(mn_mesa_tokens<N> &room, const mn_mesa_reader<N> &me) {
#pragma unroll
    for (int n = 0; n < 16 * N * N; n += MN_MESA_READERS) {
        const int pack = n + (int)threadIdx.x, row = pack / (2 * N), j = pack % (2 * N) * 4;
        if (pack >= 16 * N * N) break;
        *(float4 *)&room.front[row][j] = *(const float4 *)(me.front + row * me.lie.pitch + j);
    }
}

/* This warp's tiles of exp(G_t) Hkk + diag(lam), and of the identity from row K on. */
template <int N>
__device__ __forceinline__ void mn_mesa_begin(mn_mesa_matrix<N> &m, const mn_mesa_tokens<N> &room,
                                              const mn_mesa_reader<N> &me) {
    typedef mn_mesa_matrix<N> matrix;
    const int row = me.lane / 4, pair = me.lane % 4;
#pragma unroll
    for (int slot = 0; slot < matrix::slots; slot++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int tile = 2 * matrix::pair(slot) + half, i = 8 * tile + row;
            const double ridge = row / 2 == pair ? (double)room.ridge[i] : 0.0;
            const float *from = room.front_row(i, me.front, me.lie.pitch);
            const double add[2] = { row % 2 ? 0.0 : ridge, row % 2 ? ridge : 0.0 };
#pragma unroll
            for (int j = 0; j < matrix::columns(slot); j++) {
                const float2 x = *(const float2 *)(from + 8 * j + 2 * pair);
                double(&to)[2] = m.at[slot][j][half];
                to[0] = (double)(me.fall * x.x), to[1] = (double)(me.fall * x.y);
                if (matrix::warps == 1 && j != tile) continue;
                if (j == tile) to[0] += add[0], to[1] += add[1];
            }
        }
    }
}

/* M of the token. */
template <int N>
__device__ __forceinline__ void mn_mesa_gather(mn_mesa_matrix<N> &m, const mn_mesa_tokens<N> &room,
                                               const mn_mesa_reader<N> &me) {
    constexpr int slots = mn_mesa_matrix<N>::slots;
    const int row = me.lane / 4, pair = me.lane % 4;
    mn_mesa_begin<N>(m, room, me);
#pragma unroll 1
    for (int u0 = 0; u0 < me.reach; u0 += 8) {    // tensor cores take eight tokens at a time
        const int u[2] = { u0 + pair, u0 + pair + 4 };
        const auto *even = room.row(u[0] <= me.u ? u[0] : MN_MESA_CHUNK) + row;
        const auto *odd = room.row(u[1] <= me.u ? u[1] : MN_MESA_CHUNK) + row;
        double left[slots][4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const double weight = (double)__shfl_sync(0xffffffffu, me.write, u[c / 2]);
#pragma unroll
            for (int slot = 0; slot < slots; slot++) {
                const int tile = 2 * mn_mesa_matrix<N>::pair(slot) + c % 2;
                left[slot][c] = weight * (double)(c < 2 ? even : odd)[8 * tile];
            }
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            const double right[2] = { (double)even[8 * j], (double)odd[8 * j] };
#pragma unroll
            for (int slot = 0; slot < slots; slot++) {
                if (j >= mn_mesa_matrix<N>::columns(slot)) continue;
                mn_mma_f64_k8(m.at[slot][j], left[slot], right);
            }
        }
    }
}

/* The right side of y. */
template <int N, typename T>
__device__ inline void mn_mesa_cotangent(mn_mesa_tokens<N> &room, const mn_mesa_args &p,
                                         const mn_mesa_reader<N> &me) {
    const int64_t K = p.call.K, V = p.call.V;
    float *side = room.sides[me.mine][1], *weight = room.weight[me.mine];
    const T *cot = mn_row<T>(p.cot.o, me.b, me.t, me.at.h);
#pragma unroll 4
    for (int u0 = 0; u0 < me.reach; u0 += me.warps) {
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
        const float *from = me.front + i * me.lie.pitch + me.lie.rows;
        float sum = 0.0f;
        for (int64_t j = me.lane; j < V; j += 32) sum = fmaf(from[j], mn_get(cot, j), sum);
        sum = mn_warp_sum(sum);
        if (me.lane == 0) side[i] = me.fall * sum;
    }
    me.meet();
    for (int i = me.rank; i < 8 * N; i += me.team) {
        float sum = i < K ? side[i] : 0.0f;
        for (int u = 0; u < me.reach; u++) sum = fmaf(weight[u], room.keys[u][i], sum);
        side[i] = sum;
    }
    me.meet();
}

/* Weights of the tokens' values in o, from x. */
template <int N>
__device__ inline void mn_mesa_weigh_values(mn_mesa_tokens<N> &room, const mn_mesa_reader<N> &me) {
    if (me.rank == 0) room.fall[me.mine] = me.fall;
    if (me.rank >= 32) return;
    const float *x = room.sides[me.mine][0];
    const float *k = room.keys[me.lane <= me.u ? me.lane : MN_MESA_CHUNK];
    float with[4] = {};
#pragma unroll
    for (int i = 0; i < 8 * N; i += 4) {
        const float4 a = *(const float4 *)(x + i), b = *(const float4 *)(k + i);
        with[0] = fmaf(a.x, b.x, with[0]), with[1] = fmaf(a.y, b.y, with[1]);
        with[2] = fmaf(a.z, b.z, with[2]), with[3] = fmaf(a.w, b.w, with[3]);
    }
    room.weight[me.mine][me.lane] = me.write * ((with[0] + with[1]) + (with[2] + with[3]));
}

/* Columns j and j + 1 of o of EACH tokens, from number `first` of the part on: what a quarter of
 * the rows of Hkv and a quarter of the chunk's values give. */
template <int N, int EACH, typename T>
__device__ inline void mn_mesa_add_values(float (&sum)[EACH][2], const mn_mesa_tokens<N> &room,
                                          const mn_mesa_args &p, const mn_mesa_reader<N> &me,
                                          int first, int64_t j) {
    constexpr int rows = 8 * N / 4, tokens = MN_MESA_CHUNK / 4;
    const int quarter = threadIdx.x / 32 % 4, pitch = (int)me.lie.pitch;
    const float *from = me.front + quarter * rows * pitch + me.lie.rows + j;
    const int64_t next = j + 1 < p.call.V;
    const T *v = mn_row<T>(p.v, me.b, me.t0, me.at.h) + j;
    T values[tokens][2];
#pragma unroll
    for (int i = 0; i < tokens; i++) {
        const int64_t u = min(quarter * tokens + i, me.count - 1) * p.v.stride[1];
        values[i][0] = v[u], values[i][1] = v[u + next];
    }
#pragma unroll 16
    for (int i = 0; i < rows; i++) {
        const float2 h = *(const float2 *)(from + i * pitch);
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const float x = room.sides[first + n][0][quarter * rows + i];
            sum[n][0] = fmaf(x, h.x, sum[n][0]), sum[n][1] = fmaf(x, h.y, sum[n][1]);
        }
    }
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        sum[n][0] *= room.fall[first + n], sum[n][1] *= room.fall[first + n];
    }
#pragma unroll
    for (int i = 0; i < tokens; i++) {
        const int u = quarter * tokens + i;
        if (u >= me.count) break;
        const float x = mn_float(values[i][0]), y = mn_float(values[i][1]);
#pragma unroll
        for (int n = 0; n < EACH; n++) {    // a later token weighs nothing, but may be NaN
            if (u > me.token(first + n)) continue;
            const float by = room.weight[first + n][u];
            sum[n][0] = fmaf(by, x, sum[n][0]), sum[n][1] = fmaf(by, y, sum[n][1]);
        }
    }
}

/* Hkv and values, which o requests for when x is there, to the first cache. */
template <int N, typename T>
__device__ inline void mn_mesa_announce(const mn_mesa_args &p, const mn_mesa_reader<N> &me) {
    enum { LINE = 32, VALUES = 128 / (int)sizeof(T) };    // numbers
    const int lines = (int)((p.call.V + LINE - 1) / LINE);
    const int value_lines = (int)((p.call.V + VALUES - 1) / VALUES);
    for (int i = threadIdx.x; i < lines * (int)p.call.K; i += MN_MESA_READERS) {
        const float *at = me.front + i / lines * me.lie.pitch + me.lie.rows + i % lines * LINE;
        asm volatile("prefetch.global.L1 [%0];" :: "l"(at));
    }
    for (int i = threadIdx.x; i < value_lines * me.count; i += MN_MESA_READERS) {
        const T *at = mn_row<T>(p.v, me.b, me.t0 + i / value_lines, me.at.h) +
                      i % value_lines * VALUES;
        asm volatile("prefetch.global.L1 [%0];" :: "l"(at));
    }
}

/* o of the part's tokens. All threads of the block call. */
template <int N, typename T>
__device__ inline void mn_mesa_output(mn_mesa_tokens<N> &room, const mn_mesa_args &p,
                                      const mn_mesa_reader<N> &me) {
    constexpr int each = MN_MESA_PART / 2, warps = MN_MESA_READERS / 32;
    const int warp = threadIdx.x / 32, first = warp / 4 * each;
    for (int64_t j0 = 0; j0 < p.call.V; j0 += 64) {
        const int64_t j = j0 + 2 * me.lane;
        float sum[each][2] = {};
        __syncthreads();
        if (j < p.call.V) mn_mesa_add_values<N, each, T>(sum, room, p, me, first, j);
#pragma unroll
        for (int n = 0; n < each; n++) {
            room.parts[warp % 4][first + n][me.lane] = make_float2(sum[n][0], sum[n][1]);
        }
        __syncthreads();
#pragma unroll
        for (int n = warp; n < MN_MESA_PART; n += warps) {
            float2 all = room.parts[0][n][me.lane];
#pragma unroll
            for (int i = 1; i < 4; i++) {
                all.x += room.parts[i][n][me.lane].x, all.y += room.parts[i][n][me.lane].y;
            }
            const int u = me.token(n);
            T *o = mn_row<T>(p.o, me.b, me.t0 + u, me.at.h);
            if (u < me.count && j < p.call.V) mn_put(o + j, all.x);
            if (u < me.count && j + 1 < p.call.V) mn_put(o + j + 1, all.y);
        }
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
    const double G = mn_mesa_from(me.level, me.u);
    float *sides = room.sides[me.mine][0];
    me.t = me.t0 + me.u;
    me.fall = expf((float)G);
    me.write = me.lane <= me.u ? me.beta * expf((float)(G - me.level)) : 0.0f;
    if constexpr (BACK) mn_mesa_cotangent<N, T>(room, p, me);
    mn_mesa_gather<N>(m, room, me);
    if constexpr (me.warps == 1) mn_mesa_solve_warp<N, BACK ? 2 : 1>(m, sides, (int)p.call.K);
    else mn_mesa_solve_group<N, BACK ? 2 : 1>(m, sides, (int)p.call.K,
                                                room.shown[threadIdx.x / me.team]);
    if constexpr (BACK) mn_mesa_leave<N, T>(room, p, w, me);
    else mn_mesa_weigh_values<N>(room, me);
}

/* All tokens of the part, and what they leave. All threads of the block call, behind a barrier that
 * followed the pair in front. */
template <int N, typename T, bool BACK>
__device__ __forceinline__ void mn_mesa_read_part(mn_mesa_tokens<N> &room, const mn_mesa_args &p,
                                                  const mn_mesa_work &w, mn_mesa_reader<N> &me) {
    constexpr int parts = MN_MESA_CHUNK / MN_MESA_PART, groups = 8 / mn_mesa_matrix<N>::warps;
#pragma unroll 1
    for (int from = 0; from < MN_MESA_PART && me.token(from) < me.count; from += groups) {
        me.mine = from + threadIdx.x / me.team;
        me.reach = min(me.token(from) + groups, me.count);
        me.u = min(me.token(me.mine), me.count - 1), me.real = me.token(me.mine) < me.count;
        mn_mesa_read<N, T, BACK>(room, p, w, me);
    }
    if constexpr (!BACK) {
        mn_mesa_output<N, T>(room, p, me);
        return;
    }
    __syncthreads();
    const int64_t item = me.at.index * parts + me.part;
    for (int i = threadIdx.x; i < (int)p.call.K; i += MN_MESA_READERS) {
        float sum = 0.0f;
        for (int n = 0; n < MN_MESA_PART && me.token(n) < me.count; n++) {
            sum -= room.sides[n][0][i] * room.sides[n][1][i];
        }
        w.lam[item * p.call.K + i] = sum;
    }
}

/* A block has a part of a chunk of a head: blockIdx.x is the part, .y the head. */
template <int N, typename T, bool BACK>
__global__ void __launch_bounds__(MN_MESA_READERS, N >= 8 ? 1 : 2)
mn_mesa_read_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w) {
    extern __shared__ __align__(16) unsigned char read_bytes[];
    mn_mesa_tokens<N> &room = *(mn_mesa_tokens<N> *)read_bytes;
    constexpr int parts = MN_MESA_CHUNK / MN_MESA_PART;
    mn_mesa_reader<N> me;
    me.take(p, mn_mesa_here(p.call, blockIdx.x / parts, blockIdx.y), blockIdx.x % parts);
    const bool some = me.token(0) < me.count;
    if (some) {
        mn_mesa_brought<N, T> brought;
        const float2 token = mn_mesa_token<T>(p, me.at, me.lane);
        brought.fetch(p, me);
        brought.put(room, p);
        me.beta = token.x, me.level = mn_mesa_levels(token.y, me.lane);
    }
    mn_pdl_wait();    // inputs are there already, pairs only now
    if (!some) return;
    me.front = w.pairs + me.at.index * me.lie.size;
    if constexpr (me.warps == 1) mn_mesa_stage_front<N>(room, me);
    if constexpr (!BACK) mn_mesa_announce<N, T>(p, me);
    __syncthreads();
    mn_mesa_read_part<N, T, BACK>(room, p, w, me);
}

}    // namespace mneme::mesa

#endif
