/* mesa_output.cuh - what tokens read, all of them at once, for keys of at most 128 channels.
 *
 * A group of one or four warps has a token t. From the pair (Hkk, Hkv) in front of its chunk and
 * the tokens s <= t inside, G the sum of log decays there and W_s = beta_s exp(G_t - G_s), it makes
 *
 *   M = exp(G_t) Hkk + sum_s W_s k_s k_s' + diag(lam)      in double, and solves (mesa_solve.cuh)
 *   M x = scale q      o = exp(G_t) Hkv'x + sum_s W_s (k_s.x) v_s
 *   M y = exp(G_t) Hkv do + sum_s W_s (v_s.do) k_s         on the way back: dq = scale y */
#ifndef MN_KERNELS_CUDA_MESA_MESA_OUTPUT_CUH
#define MN_KERNELS_CUDA_MESA_MESA_OUTPUT_CUH

#include "kernels/cuda/mesa/mesa.cuh"
#include "kernels/cuda/mesa/mesa_solve.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::mesa {

enum { MN_MESA_READ_THREADS = 256 };    // threads: eight groups of one warp or two of four

/* Keys of a chunk, and a row of zeros; as doubles, too, and with Hkk in front of them, where each
 * of eight warps would load that and turn them into such. For groups of four not all
 * machines have the shared memory. Rows lie so that four tokens' are in different banks. */
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
struct mn_mesa_read_smem : mn_mesa_keys<N> {
    mn_mesa_warp_exchange<N> exchange[8 / mn_mesa_matrix<N>::warps];
    alignas(16) float sides[MN_MESA_TOKENS][2][8 * N];    // q and Hkv do, then x and y
    float ridge[8 * N];                                 // lam, and ones from row K on
    float weight[MN_MESA_TOKENS][MN_MESA_CHUNK];          // of the tokens' values, or keys
    float decay[MN_MESA_TOKENS];
    float2 parts[4][MN_MESA_TOKENS][32];                  // of o, by quarters
};

/* A group of warps and its token, which is token u of the chunk, number `own_index` of the part and
 * token t of batch row b. `rank` is the thread's in its group. Where a part is short, groups
 * without a token do as the last one does and leave nothing: branches that all threads take alike
 * spare the exchanges between lanes much care. */
template <int N>
struct mn_mesa_read_ctx {
    static constexpr int warps = mn_mesa_matrix<N>::warps, group_threads = 32 * warps;
    mn_mesa_coord at;
    mn_mesa_layout layout;
    const float *front;    // the pair
    int64_t b, t, t0;      // t0: where the chunk begins
    int u, own_index, rank, lane;
    int part, count;       // blocks of the chunk have parts; tokens of the chunk
    int n_reachable;             // tokens up to the last one that the block's groups have at a time
    bool active;
    double level;          // of token `lane`: the sum of log decays
    float beta;            // of token `lane`
    float decay, write;     // exp(G_t), and W of token `lane`, zero behind t

    /* Part `which` of a chunk. */
    __device__ void init(const mn_mesa_args &p, const mn_mesa_coord &coord, int which) {
        at = coord, layout = mn_mesa_layout::of(p.call);
        rank = threadIdx.x % group_threads, lane = threadIdx.x % 32;
        b = at.tile.span.b, t0 = at.tile.span.t0 + at.tile.first;
        part = which, count = (int)at.tile.n_rows;
    }

    __device__ void group_sync(void) const {
        mn_mesa_group_sync<warps>();
    }

    /* Token n of the part, in the chunk. Late tokens have more in front of them in the chunk, so
     * that a part has eight of the first half and as many of the other, as far from its end. */
    __device__ int token(int n) const {
        constexpr int half = MN_MESA_TOKENS / 2;
        return n < half ? part * half + n : MN_MESA_CHUNK - (part + 2) * half + n;
    }
};

/* Keys of the chunk's tokens, what those of the part ask, and the ridge: this thread's channel of
 * every few tokens, on their way. Behind the last token it is repeated. */
template <int N, typename T>
struct mn_mesa_prefetch {
    static constexpr int each = MN_MESA_READ_THREADS / (8 * N);    // tokens at a time
    T k[MN_MESA_CHUNK / each], q[MN_MESA_TOKENS / each], lam;

    __device__ static int channel() { return threadIdx.x % (8 * N); }
    __device__ static int from() { return threadIdx.x / (8 * N); }

    __device__ void fetch(const mn_mesa_args &p, const mn_mesa_read_ctx<N> &ctx) {
        const int at = channel() < p.call.K ? channel() : 0;
        const T *keys = mn_row<T>(p.k, ctx.b, ctx.t0, ctx.at.h) + at;
        const T *queries = mn_row<T>(p.q, ctx.b, ctx.t0, ctx.at.h) + at;
        const int64_t step = p.k.stride[1], q_step = p.q.stride[1];
#pragma unroll
        for (int i = 0; i < MN_MESA_CHUNK / each; i++) {
            k[i] = keys[min(from() + i * each, ctx.count - 1) * step];
        }
#pragma unroll
        for (int i = 0; i < MN_MESA_TOKENS / each; i++) {
            q[i] = queries[min(ctx.token(from() + i * each), ctx.count - 1) * q_step];
        }
        lam = mn_row<T>(p.lam, 0, 0, ctx.at.h)[at];
    }

    __device__ void put(mn_mesa_read_smem<N> &smem, const mn_mesa_args &p) const {
        const bool valid = channel() < p.call.K;
#pragma unroll
        for (int i = 0; i < MN_MESA_CHUNK / each; i++) {
            smem.put(from() + i * each, channel(), valid ? mn_float(k[i]) : 0.0f);
        }
#pragma unroll
        for (int i = 0; i < MN_MESA_TOKENS / each; i++) {
            const float x = (float)p.scale * mn_float(q[i]);
            smem.sides[from() + i * each][0][channel()] = valid ? x : 0.0f;
        }
        if (from() > 0) return;
        smem.put(MN_MESA_CHUNK, channel(), 0.0f);
        smem.ridge[channel()] = valid ? mn_float(lam) : 1.0f;
    }
};

/* Hkk. */
template <int N>
__device__ inline void mn_mesa_load_front(mn_mesa_read_smem<N> &smem,
                                          const mn_mesa_read_ctx<N> &ctx) {
#pragma unroll
    for (int n = 0; n < 16 * N * N; n += MN_MESA_READ_THREADS) {
        const int pack = n + (int)threadIdx.x, row = pack / (2 * N), j = pack % (2 * N) * 4;
        if (pack >= 16 * N * N) break;
        *(float4 *)&smem.front[row][j] = *(const float4 *)(ctx.front + row * ctx.layout.pitch + j);
    }
}

/* This warp's tiles of exp(G_t) Hkk + diag(lam), and of the identity from row K on. */
template <int N>
__device__ __forceinline__ void mn_mesa_init_matrix(mn_mesa_matrix<N> &m,
                                                    const mn_mesa_read_smem<N> &smem,
                                              const mn_mesa_read_ctx<N> &ctx) {
    typedef mn_mesa_matrix<N> matrix;
    const int row = ctx.lane / 4, pair = ctx.lane % 4;
#pragma unroll
    for (int slot = 0; slot < matrix::slots; slot++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int tile = 2 * matrix::pair(slot) + half, i = 8 * tile + row;
            const double ridge = row / 2 == pair ? (double)smem.ridge[i] : 0.0;
            const float *from = smem.front_row(i, ctx.front, ctx.layout.pitch);
            const double add[2] = { row % 2 ? 0.0 : ridge, row % 2 ? ridge : 0.0 };
#pragma unroll
            for (int j = 0; j < matrix::columns(slot); j++) {
                const float2 x = *(const float2 *)(from + 8 * j + 2 * pair);
                double(&to)[2] = m.at[slot][j][half];
                to[0] = (double)(ctx.decay * x.x), to[1] = (double)(ctx.decay * x.y);
                if (matrix::warps == 1 && j != tile) continue;
                if (j == tile) to[0] += add[0], to[1] += add[1];
            }
        }
    }
}

/* M of the token. */
template <int N>
__device__ __forceinline__ void mn_mesa_build_matrix(mn_mesa_matrix<N> &m,
                                                     const mn_mesa_read_smem<N> &smem,
                                               const mn_mesa_read_ctx<N> &ctx) {
    constexpr int slots = mn_mesa_matrix<N>::slots;
    const int row = ctx.lane / 4, pair = ctx.lane % 4;
    mn_mesa_init_matrix<N>(m, smem, ctx);
#pragma unroll 1
    for (int u0 = 0; u0 < ctx.n_reachable; u0 += 8) {    // tensor cores take eight tokens at a time
        const int u[2] = { u0 + pair, u0 + pair + 4 };
        const auto *even = smem.row(u[0] <= ctx.u ? u[0] : MN_MESA_CHUNK) + row;
        const auto *odd = smem.row(u[1] <= ctx.u ? u[1] : MN_MESA_CHUNK) + row;
        double left[slots][4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const double weight = (double)__shfl_sync(0xffffffffu, ctx.write, u[c / 2]);
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
__device__ inline void mn_mesa_adjoint_rhs(mn_mesa_read_smem<N> &smem, const mn_mesa_args &p,
                                         const mn_mesa_read_ctx<N> &ctx) {
    const int64_t K = p.call.K, V = p.call.V;
    float *side = smem.sides[ctx.own_index][1], *weight = smem.weight[ctx.own_index];
    const T *cot = mn_row<T>(p.cot.o, ctx.b, ctx.t, ctx.at.h);
#pragma unroll 4
    for (int u0 = 0; u0 < ctx.n_reachable; u0 += ctx.warps) {
        const int u = min(u0 + ctx.rank / 32, ctx.u);
        const T *v = mn_row<T>(p.v, ctx.b, ctx.t0 + u, ctx.at.h);
        float sum = 0.0f;
        for (int64_t j = ctx.lane; j < V; j += 32) sum = fmaf(mn_float(v[j]), mn_get(cot, j), sum);
        sum = mn_warp_sum(sum);
        if (ctx.lane == u0 + ctx.rank / 32) weight[ctx.lane] = ctx.write * sum;
    }
#pragma unroll 4
    for (int i0 = 0; i0 < (int)K; i0 += ctx.warps) {
        const int i = min(i0 + ctx.rank / 32, (int)K - 1);
        const float *from = ctx.front + i * ctx.layout.pitch + ctx.layout.rows;
        float sum = 0.0f;
        for (int64_t j = ctx.lane; j < V; j += 32) sum = fmaf(from[j], mn_get(cot, j), sum);
        sum = mn_warp_sum(sum);
        if (ctx.lane == 0) side[i] = ctx.decay * sum;
    }
    ctx.group_sync();
    for (int i = ctx.rank; i < 8 * N; i += ctx.group_threads) {
        float sum = i < K ? side[i] : 0.0f;
        for (int u = 0; u < ctx.n_reachable; u++) sum = fmaf(weight[u], smem.keys[u][i], sum);
        side[i] = sum;
    }
    ctx.group_sync();
}

/* Weights of the tokens' values in o, from x. */
template <int N>
__device__ inline void mn_mesa_value_weights(mn_mesa_read_smem<N> &smem,
                                             const mn_mesa_read_ctx<N> &ctx) {
    if (ctx.rank == 0) smem.decay[ctx.own_index] = ctx.decay;
    if (ctx.rank >= 32) return;
    const float *x = smem.sides[ctx.own_index][0];
    const float *k = smem.keys[ctx.lane <= ctx.u ? ctx.lane : MN_MESA_CHUNK];
    float with[4] = {};
#pragma unroll
    for (int i = 0; i < 8 * N; i += 4) {
        const float4 a = *(const float4 *)(x + i), b = *(const float4 *)(k + i);
        with[0] = fmaf(a.x, b.x, with[0]), with[1] = fmaf(a.y, b.y, with[1]);
        with[2] = fmaf(a.z, b.z, with[2]), with[3] = fmaf(a.w, b.w, with[3]);
    }
    smem.weight[ctx.own_index][ctx.lane] = ctx.write * ((with[0] + with[1]) + (with[2] + with[3]));
}

/* Columns j and j + 1 of o of EACH tokens, from number `first` of the part on: what a quarter of
 * the rows of Hkv and a quarter of the chunk's values give. */
template <int N, int EACH, typename T>
__device__ inline void mn_mesa_add_values(float (&sum)[EACH][2], const mn_mesa_read_smem<N> &smem,
                                          const mn_mesa_args &p, const mn_mesa_read_ctx<N> &ctx,
                                          int first, int64_t j) {
    constexpr int rows = 8 * N / 4, tokens = MN_MESA_CHUNK / 4;
    const int quarter = threadIdx.x / 32 % 4, pitch = (int)ctx.layout.pitch;
    const float *from = ctx.front + quarter * rows * pitch + ctx.layout.rows + j;
    const int64_t next = j + 1 < p.call.V;
    const T *v = mn_row<T>(p.v, ctx.b, ctx.t0, ctx.at.h) + j;
    T values[tokens][2];
#pragma unroll
    for (int i = 0; i < tokens; i++) {
        const int64_t u = min(quarter * tokens + i, ctx.count - 1) * p.v.stride[1];
        values[i][0] = v[u], values[i][1] = v[u + next];
    }
#pragma unroll 16
    for (int i = 0; i < rows; i++) {
        const float2 h = *(const float2 *)(from + i * pitch);
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            const float x = smem.sides[first + n][0][quarter * rows + i];
            sum[n][0] = fmaf(x, h.x, sum[n][0]), sum[n][1] = fmaf(x, h.y, sum[n][1]);
        }
    }
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        sum[n][0] *= smem.decay[first + n], sum[n][1] *= smem.decay[first + n];
    }
#pragma unroll
    for (int i = 0; i < tokens; i++) {
        const int u = quarter * tokens + i;
        if (u >= ctx.count) break;
        const float x = mn_float(values[i][0]), y = mn_float(values[i][1]);
#pragma unroll
        for (int n = 0; n < EACH; n++) {    // a later token weighs nothing, but may be NaN
            if (u > ctx.token(first + n)) continue;
            const float by = smem.weight[first + n][u];
            sum[n][0] = fmaf(by, x, sum[n][0]), sum[n][1] = fmaf(by, y, sum[n][1]);
        }
    }
}

/* Hkv and values, which o needs when x has been solved, to the first cache. */
template <int N, typename T>
__device__ inline void mn_mesa_prefetch_l1(const mn_mesa_args &p, const mn_mesa_read_ctx<N> &ctx) {
    enum { LINE = 32, VALUES = 128 / (int)sizeof(T) };    // numbers
    const int lines = (int)((p.call.V + LINE - 1) / LINE);
    const int value_lines = (int)((p.call.V + VALUES - 1) / VALUES);
    for (int i = threadIdx.x; i < lines * (int)p.call.K; i += MN_MESA_READ_THREADS) {
        const float *at = ctx.front + i / lines * ctx.layout.pitch + ctx.layout.rows + i % lines
            * LINE;
        mn_prefetch_l1(at);
    }
    for (int i = threadIdx.x; i < value_lines * ctx.count; i += MN_MESA_READ_THREADS) {
        const T *at = mn_row<T>(p.v, ctx.b, ctx.t0 + i / value_lines, ctx.at.h) +
                      i % value_lines * VALUES;
        mn_prefetch_l1(at);
    }
}

/* o of the part's tokens. All threads of the block call. */
template <int N, typename T>
__device__ inline void mn_mesa_output(mn_mesa_read_smem<N> &smem, const mn_mesa_args &p,
                                      const mn_mesa_read_ctx<N> &ctx) {
    constexpr int each = MN_MESA_TOKENS / 2, warps = MN_MESA_READ_THREADS / 32;
    const int warp = threadIdx.x / 32, first = warp / 4 * each;
    for (int64_t j0 = 0; j0 < p.call.V; j0 += 64) {
        const int64_t j = j0 + 2 * ctx.lane;
        float sum[each][2] = {};
        __syncthreads();
        if (j < p.call.V) mn_mesa_add_values<N, each, T>(sum, smem, p, ctx, first, j);
#pragma unroll
        for (int n = 0; n < each; n++) {
            smem.parts[warp % 4][first + n][ctx.lane] = make_float2(sum[n][0], sum[n][1]);
        }
        __syncthreads();
#pragma unroll
        for (int n = warp; n < MN_MESA_TOKENS; n += warps) {
            float2 all = smem.parts[0][n][ctx.lane];
#pragma unroll
            for (int i = 1; i < 4; i++) {
                all.x += smem.parts[i][n][ctx.lane].x, all.y += smem.parts[i][n][ctx.lane].y;
            }
            const int u = ctx.token(n);
            T *o = mn_row<T>(p.o, ctx.b, ctx.t0 + u, ctx.at.h);
            if (u < ctx.count && j < p.call.V) mn_put(o + j, all.x);
            if (u < ctx.count && j + 1 < p.call.V) mn_put(o + j + 1, all.y);
        }
    }
}

/* dq, and x and y for the adjoints. */
template <int N, typename T>
__device__ inline void mn_mesa_store_grads(const mn_mesa_read_smem<N> &smem, const mn_mesa_args &p,
                                     const mn_mesa_workspace &w, const mn_mesa_read_ctx<N> &ctx) {
    const int64_t K = p.call.K, row = ((ctx.b * p.call.T + ctx.t) * p.call.H + ctx.at.h) * K;
    T *dq = mn_row<T>(p.grad.q, ctx.b, ctx.t, ctx.at.h);
    for (int i = ctx.rank; ctx.active && i < (int)K; i += ctx.group_threads) {
        const float x = smem.sides[ctx.own_index][0][i], y = smem.sides[ctx.own_index][1][i];
        w.x[row + i] = x, w.y[row + i] = y;
        if (dq) mn_put(dq + i, (float)p.scale * y);
    }
}

template <int N, typename T, bool BACK>
__device__ __forceinline__ void mn_mesa_read_token(mn_mesa_read_smem<N> &smem,
                                                   const mn_mesa_args &p,
                                             const mn_mesa_workspace &w, mn_mesa_read_ctx<N> &ctx) {
    mn_mesa_matrix<N> m;
    const double G = mn_mesa_shfl(ctx.level, ctx.u);
    float *sides = smem.sides[ctx.own_index][0];
    ctx.t = ctx.t0 + ctx.u;
    ctx.decay = expf((float)G);
    ctx.write = ctx.lane <= ctx.u ? ctx.beta * expf((float)(G - ctx.level)) : 0.0f;
    if constexpr (BACK) mn_mesa_adjoint_rhs<N, T>(smem, p, ctx);
    mn_mesa_build_matrix<N>(m, smem, ctx);
    if constexpr (ctx.warps == 1) mn_mesa_solve_warp<N, BACK ? 2 : 1>(m, sides, (int)p.call.K);
    else mn_mesa_solve_warps<N, BACK ? 2 : 1>(m, sides, (int)p.call.K,
                                                smem.exchange[threadIdx.x / ctx.group_threads]);
    if constexpr (BACK) mn_mesa_store_grads<N, T>(smem, p, w, ctx);
    else mn_mesa_value_weights<N>(smem, ctx);
}

/* All tokens of the part, and what they leave. All threads of the block call, behind a barrier that
 * followed the pair in front. */
template <int N, typename T, bool BACK>
__device__ __forceinline__ void mn_mesa_read_tokens(mn_mesa_read_smem<N> &smem,
                                                    const mn_mesa_args &p,
                                                  const mn_mesa_workspace &w,
                                                      mn_mesa_read_ctx<N> &ctx) {
    constexpr int parts = MN_MESA_CHUNK / MN_MESA_TOKENS, n_groups = 8 / mn_mesa_matrix<N>::warps;
#pragma unroll 1
    for (int from = 0; from < MN_MESA_TOKENS && ctx.token(from) < ctx.count; from += n_groups) {
        ctx.own_index = from + threadIdx.x / ctx.group_threads;
        ctx.n_reachable = min(ctx.token(from) + n_groups, ctx.count);
        ctx.u = min(ctx.token(ctx.own_index), ctx.count - 1),
            ctx.active = ctx.token(ctx.own_index) < ctx.count;
        mn_mesa_read_token<N, T, BACK>(smem, p, w, ctx);
    }
    if constexpr (!BACK) {
        mn_mesa_output<N, T>(smem, p, ctx);
        return;
    }
    __syncthreads();
    const int64_t item = ctx.at.index * parts + ctx.part;
    for (int i = threadIdx.x; i < (int)p.call.K; i += MN_MESA_READ_THREADS) {
        float sum = 0.0f;
        for (int n = 0; n < MN_MESA_TOKENS && ctx.token(n) < ctx.count; n++) {
            sum -= smem.sides[n][0][i] * smem.sides[n][1][i];
        }
        w.lam[item * p.call.K + i] = sum;
    }
}

/* A block has a part of a chunk of a head: blockIdx.x is the part, .y the head. */
template <int N, typename T, bool BACK>
__global__ void __launch_bounds__(MN_MESA_READ_THREADS, N >= 8 ? 1 : 2)
mesa_read_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_workspace w) {
    extern __shared__ __align__(16) unsigned char read_bytes[];
    mn_mesa_read_smem<N> &smem = *(mn_mesa_read_smem<N> *)read_bytes;
    constexpr int parts = MN_MESA_CHUNK / MN_MESA_TOKENS;
    mn_mesa_read_ctx<N> ctx;
    ctx.init(p, mn_mesa_coord_of(p.call, blockIdx.x / parts, blockIdx.y), blockIdx.x % parts);
    const bool some = ctx.token(0) < ctx.count;
    if (some) {
        mn_mesa_prefetch<N, T> prefetch;
        const float2 token = mn_mesa_token<T>(p, ctx.at, ctx.lane);
        prefetch.fetch(p, ctx);
        prefetch.put(smem, p);
        ctx.beta = token.x, ctx.level = mn_mesa_log_decay_cumsum(token.y, ctx.lane);
    }
    mn_pdl_wait();    // inputs are there already, pairs only now
    if (!some) return;
    ctx.front = w.pairs + ctx.at.index * ctx.layout.size;
    if constexpr (ctx.warps == 1) mn_mesa_load_front<N>(smem, ctx);
    if constexpr (!BACK) mn_mesa_prefetch_l1<N, T>(p, ctx);
    __syncthreads();
    mn_mesa_read_tokens<N, T, BACK>(smem, p, w, ctx);
}

}    // namespace mneme::mesa

#endif
