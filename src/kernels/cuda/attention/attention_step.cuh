/* attention_step.cuh - one query of each head against a cache of keys and values, split over the
 * keys (attention and relu_attention, T = 1; kernels/decode.h for a token of a step that repeats).
 *
 * A block reads 256 keys and values of one key-value head for up to four of the query heads that
 * share it, and leaves a part of the result with its largest score and its sum; parts are then
 * added in their order. Rows are read by groups of 16 threads, eight numbers at a time where they
 * can. The order of all sums goes by the number of keys alone. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_STEP_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_STEP_CUH

#include "kernels/cuda/prim/block.cuh"
#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/fmax.cuh"
#include "kernels/decode.h"

namespace mneme::attention {

enum {
    MN_STEP_KEYS = MN_DECODE_ATTEND_KEYS,    // of a part
    MN_STEP_HEADS = 4,                       // query heads at once
    MN_STEP_THREADS = 256,
    MN_STEP_ROW_THREADS = 16,                // threads of a row
    MN_STEP_ROW_GROUPS = MN_STEP_THREADS / MN_STEP_ROW_THREADS,
    MN_STEP_WARPS = MN_STEP_THREADS / 32,
};

/* Shared memory: queries (4,K), weights, partial sums of N columns a thread, sums of warps. */
template <int N>
struct mn_step_smem {
    float w[MN_STEP_HEADS][MN_STEP_KEYS], sums[N * MN_STEP_THREADS], warps[MN_STEP_WARPS];
    float q[1];    // MN_STEP_HEADS * K

    static constexpr size_t bytes(int64_t K) {
        return sizeof(mn_step_smem) + (size_t)(MN_STEP_HEADS * K) * sizeof(float);
    }
};

/* Keys or values of a head from some token on. */
template <typename T>
struct mn_step_rows {
    const T *first;
    int64_t step;

    __device__ const T *row(int64_t i) const {
        return first + i * step;
    }
};

/* What parts are made of. */
struct mn_step_sizes {
    int K, V, n_heads, n_keys;
    float scale;
    bool softmax;
};

/* The sum over the block's warps, in their order. */
template <typename Block>
__device__ inline float mn_step_sum(float x, float *warps) {
    x = mn_warp_sum(x);
    Block::sync();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    Block::sync();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < MN_STEP_WARPS; warp++) sum += warps[warp];
    return sum;
}

template <typename Block>
__device__ inline float mn_step_max(float x, float *warps) {
    x = mn_warp_max(x);
    Block::sync();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    Block::sync();
    float most = warps[0];
#pragma unroll
    for (int warp = 1; warp < MN_STEP_WARPS; warp++) most = fmaxf(most, warps[warp]);
    return most;
}

/* Scores of the keys into w, for HEADS queries. A thread group takes AT_ONCE keys at a time, N
 * columns of each thread. */
template <typename T, int N, int AT_ONCE, int HEADS>
__device__ inline void mn_step_scores(float (*w)[MN_STEP_KEYS], const float *q,
                                      const mn_step_rows<T> &keys, const mn_step_sizes &p) {
    const int lane = threadIdx.x % MN_STEP_ROW_THREADS,
        thread_group = threadIdx.x / MN_STEP_ROW_THREADS;
    for (int first = 0; first < p.K; first += MN_STEP_ROW_THREADS * N) {
        const int a = first + lane * N;
        float of_q[HEADS][N];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
#pragma unroll
            for (int e = 0; e < N; e++) of_q[h][e] = a < p.K ? q[h * p.K + a + e] : 0.0f;
        }
        for (int from = 0; from < p.n_keys; from += AT_ONCE * MN_STEP_ROW_GROUPS) {
            const int i0 = from + thread_group;
            float x[AT_ONCE][N];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                const int i = i0 + u * MN_STEP_ROW_GROUPS;
                const bool inside = i < p.n_keys && a < p.K;
                mn_load<N>(x[u], inside ? keys.row(i) : (const T *)nullptr, a);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    float sum = 0.0f;
#pragma unroll
                    for (int e = 0; e < N; e++) sum = fmaf(x[u][e], of_q[h][e], sum);
#pragma unroll
                    for (int lanes = MN_STEP_ROW_THREADS / 2; lanes > 0; lanes >>= 1) {
                        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
                    }
                    float *to = &w[h][i0 + u * MN_STEP_ROW_GROUPS];
                    if (lane == 0) *to = fmaf(p.scale, sum, first ? *to : 0.0f);
                }
            }
        }
    }
}

/* Sums of w v over the keys, N columns of each thread from column0 + lane N on: in `out` of thread
 * group 0. */
template <typename T, int N, int AT_ONCE, int HEADS, typename Block>
__device__ inline void mn_step_pv(float (&out)[HEADS][N], mn_step_smem<N> &smem,
                                  const mn_step_rows<T> &values, const mn_step_sizes &p,
                                  int column0) {
    const int lane = threadIdx.x % MN_STEP_ROW_THREADS,
        thread_group = threadIdx.x / MN_STEP_ROW_THREADS;
    const int column = column0 + lane * N;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int e = 0; e < N; e++) out[h][e] = 0.0f;
    }
    for (int i0 = thread_group; i0 < p.n_keys && column < p.V;
         i0 += AT_ONCE * MN_STEP_ROW_GROUPS) {
        float x[AT_ONCE][N];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int i = i0 + u * MN_STEP_ROW_GROUPS;
            mn_load<N>(x[u], i < p.n_keys ? values.row(i) : (const T *)nullptr, column);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int i = min(i0 + u * MN_STEP_ROW_GROUPS, MN_STEP_KEYS - 1);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
#pragma unroll
                for (int e = 0; e < N; e++) out[h][e] = fmaf(smem.w[h][i], x[u][e], out[h][e]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        Block::sync();
#pragma unroll
        for (int e = 0; e < N; e++) {
            smem.sums[(e * MN_STEP_ROW_GROUPS + thread_group) * MN_STEP_ROW_THREADS + lane] =
                out[h][e];
        }
        Block::sync();
        if (thread_group != 0) continue;
#pragma unroll
        for (int e = 0; e < N; e++) {
            float sum = 0.0f;
            for (int i = 0; i < MN_STEP_ROW_GROUPS; i++) {
                sum += smem.sums[(e * MN_STEP_ROW_GROUPS + i) * MN_STEP_ROW_THREADS + lane];
            }
            out[h][e] = sum;
        }
    }
}

/* One part of up to HEADS heads, whose queries are in smem.q: sums of w v (V), the largest score,
 * and the sum of w; for relu_attention w = max(z, 0), 0 in place of the largest score, and the sum
 * of z^2. Head h's goes to parts + h step. All threads call, and meet before smem is read. */
template <typename T, int N, int AT_ONCE, int HEADS, typename Block>
__device__ inline void mn_step_part(mn_step_smem<N> &smem, const mn_step_rows<T> &keys,
                                    const mn_step_rows<T> &values, const mn_step_sizes &p,
                                    float *parts, int64_t step) {
    Block::sync();
    mn_step_scores<T, N, AT_ONCE, HEADS>(smem.w, smem.q, keys, p);
    Block::sync();
    for (int h = 0; h < p.n_heads; h++) {
        const bool inside = threadIdx.x < p.n_keys;
        const float z = inside ? smem.w[h][threadIdx.x] : 0.0f;
        float most = 0.0f, x = mn_fmax(z, 0.0f), weight = z * z;
        if (p.softmax) {
            most = mn_step_max<Block>(inside ? z : -INFINITY, smem.warps);
            weight = x = inside ? expf(z - most) : 0.0f;
        }
        smem.w[h][threadIdx.x] = inside ? x : 0.0f;
        const float sum = mn_step_sum<Block>(weight, smem.warps);
        float *to = parts + h * step + p.V;
        if (threadIdx.x == 0) to[0] = most, to[1] = sum;
    }
    Block::sync();
    for (int column0 = 0; column0 < p.V; column0 += MN_STEP_ROW_THREADS * N) {
        float out[HEADS][N];
        mn_step_pv<T, N, AT_ONCE, HEADS, Block>(out, smem, values, p, column0);
        const int column = column0 + (int)threadIdx.x * N;
        if (threadIdx.x >= MN_STEP_ROW_THREADS || column >= p.V) continue;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (h >= p.n_heads) break;
            float *to = parts + h * step + column;
#pragma unroll
            for (int e = 0; e < N; e++) to[e] = out[h][e];
        }
    }
}

/* The parts of a head, rescaled to their largest score and added in their order: o (V), and lse
 * where given. `eps`: of relu_attention. */
template <typename T, typename Block>
__device__ inline void mn_step_combine(const float *from, int64_t n_parts, int64_t V, bool softmax,
                                       float eps, T *o, float *lse, float *warps) {
    float most = -INFINITY, sum = 0.0f;
    for (int64_t i = threadIdx.x; i < n_parts; i += MN_STEP_THREADS) {
        most = fmaxf(most, from[i * (V + 2) + V]);
    }
    most = mn_step_max<Block>(most, warps);
    for (int64_t i = threadIdx.x; i < n_parts; i += MN_STEP_THREADS) {
        const float *at = from + i * (V + 2) + V;
        sum = fmaf(at[1], expf(at[0] - most), sum);
    }
    sum = mn_step_sum<Block>(sum, warps);
    const float by = 1.0f / (softmax ? sum : mn_fmax(sqrtf(sum), eps));
    if (lse && threadIdx.x == 0) *lse = most + logf(sum);
    for (int64_t a = threadIdx.x; o && a < V; a += MN_STEP_THREADS) {
        float y = 0.0f;
#pragma unroll 4
        for (int64_t i = 0; i < n_parts; i++) {
            const float *at = from + i * (V + 2);
            y = fmaf(at[a], expf(at[V] - most), y);
        }
        mn_put(o + a, y * by);
    }
}

/* The same of few parts: each warp has the scores and sums of all of them, a lane one, and so meets
 * no other; what a thread adds up is on its way at once. Numbers are added in the same order as
 * above: the other warps' sums there are zeros. `store(a, y)`: all threads of a warp call it. */
enum { MN_STEP_FEW_PARTS = 32, MN_STEP_AT_ONCE = 8 };

template <typename Store>
__device__ inline void mn_step_combine_few(const float *from, int n_parts, int64_t V, bool softmax,
                                           float eps, Store store) {
    const int lane = threadIdx.x % 32;
    const bool there = lane < n_parts;
    const float *const own = from + (there ? lane : 0) * (V + 2) + V;
    const float score = there ? __ldcg(own) : -INFINITY, weight = there ? __ldcg(own + 1) : 0.0f;
    const float most = mn_warp_max(score), scaled = there ? expf(score - most) : 0.0f;
    const float sum = mn_warp_sum(there ? fmaf(weight, scaled, 0.0f) : 0.0f);
    const float by = 1.0f / (softmax ? sum : mn_fmax(sqrtf(sum), eps));
    for (int64_t a0 = threadIdx.x - lane; a0 < V; a0 += MN_STEP_THREADS) {
        const int64_t a = a0 + lane;
        float y = 0.0f;
        for (int first = 0; first < n_parts; first += MN_STEP_AT_ONCE) {
            float x[MN_STEP_AT_ONCE];
#pragma unroll
            for (int i = 0; i < MN_STEP_AT_ONCE; i++) {
                const bool inside = first + i < n_parts && a < V;
                x[i] = inside ? __ldcg(from + (first + i) * (V + 2) + a) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < MN_STEP_AT_ONCE; i++) {
                const float e = __shfl_sync(0xffffffffu, scaled, (first + i) % 32);
                if (first + i < n_parts) y = fmaf(x[i], e, y);
            }
        }
        store(a, y * by);
    }
}

/* ---- a token of a step that repeats (mn_decode_attention) ------------------------------------ */

/* Keys that the token sees, its own among them: [first, first + n). */
struct mn_attend_span {
    int64_t position, first, n;

    __device__ explicit mn_attend_span(const mn_decode_attention &p) {
        position = *(const volatile int64_t *)p.position;
        first = p.window > 0 && p.window <= position ? position + 1 - p.window : 0;
        n = position + 1 - first;
    }

    __device__ int64_t parts(void) const {
        return (n + MN_STEP_KEYS - 1) / MN_STEP_KEYS;
    }
};

/* Shared memory of a piece. */
template <int N>
struct mn_attend_smem {
    float2 turn[MN_DECODE_ATTEND_WIDEST / 2];    // cosine and sine of each pair
    mn_step_smem<N> step;

    static constexpr size_t bytes(int64_t K) {
        return sizeof(mn_attend_smem) + (size_t)(MN_STEP_HEADS * K) * sizeof(float);
    }
};

/* The angle is made in double and as a part of a full turn, as in rope.cu. */
__device__ inline float2 mn_attend_turn(double inv_freq, int64_t position, float scale) {
    const double turns = (double)position * inv_freq * 0.15915494309189533577;    // 1 / (2 pi)
    float2 at;
    sincospif((float)(2.0 * (turns - rint(turns))), &at.y, &at.x);
    return make_float2(scale * at.x, scale * at.y);
}

/* Channel c of a row, turned and rounded to its type: pair i is channels i and i + turns / 2. */
template <typename T>
__device__ inline float mn_attend_channel(const T *x, int c, int turns, const float2 *turn) {
    const int half = turns / 2;
    const float own = mn_float(x[c]);
    if (c >= turns) return own;
    const float2 at = turn[c < half ? c : c - half];
    const float other = mn_float(x[c < half ? c + half : c - half]);
    T y;
    mn_put(&y, c < half ? fmaf(at.x, own, -at.y * other) : fmaf(at.y, other, at.x * own));
    return mn_float(y);
}

/* The token's queries, of the heads that share a key-value head, its key and its value. */
template <typename T>
struct mn_attend_token {
    const T *q, *k, *v;
    int64_t q_step;

    /* Where a launch finds those of head j; nothing is waited for. */
    __device__ mn_attend_token(const mn_decode_attention &p, int64_t j)
        : q((const T *)p.q + j * (p.H / p.J) * p.q_step), k((const T *)p.k + j * p.k_step),
          v((const T *)p.v + j * p.v_step), q_step(p.q_step) {
    }

    /* All threads call, and meet afterwards; `last`: key and value are needed, too. */
    __device__ void wait(bool last) const {
        (void)last;
    }
};

/* The token's key and value of head j behind those that are there. */
template <typename T>
__device__ inline void mn_attend_append(const mn_decode_attention &p, int64_t j, int64_t position,
                                        const float2 *turn, const T *k, const T *v) {
    T *key = (T *)p.keys + (position * p.J + j) * p.K;
    T *value = (T *)p.values + (position * p.J + j) * p.V;
    for (int c = threadIdx.x; c < p.K; c += MN_STEP_THREADS) {
        mn_put(key + c, mn_attend_channel(k, c, (int)p.turns, turn));
    }
    for (int c = threadIdx.x; c < p.V; c += MN_STEP_THREADS) value[c] = v[c];
}

/* Parts slot, slot + n_slots, ... of key-value head j, for all its query heads, HEADS at a time.
 * Who has the last part puts the token's key and value there first. */
template <typename T, int N, int HEADS, typename Block, typename Token>
__device__ inline void mn_attend_heads(const mn_decode_attention &p, int64_t j, int64_t slot,
                                       int64_t n_slots, const Token &token, unsigned char *bytes) {
    enum { AT_ONCE = HEADS == 1 ? 8 : 4 };
    mn_attend_smem<N> &smem = *(mn_attend_smem<N> *)bytes;
    const mn_attend_span span(p);
    const int64_t n_parts = span.parts(), group = p.H / p.J, K = p.K, V = p.V;
    if (slot >= n_parts) return;
    for (int i = threadIdx.x; i < p.turns / 2; i += MN_STEP_THREADS) {
        smem.turn[i] = mn_attend_turn(p.inv_freq[i], span.position, (float)p.turned_scale);
    }
    const bool last = (n_parts - 1) % n_slots == slot;
    token.wait(last);
    Block::sync();
    if (last) {
        mn_attend_append<T>(p, j, span.position, smem.turn, token.k, token.v);
        Block::sync();
    }
    for (int64_t h0 = j * group; h0 < (j + 1) * group; h0 += HEADS) {
        const int n_heads = (int)min((int64_t)HEADS, (j + 1) * group - h0);
        Block::sync();
        for (int i = threadIdx.x; i < HEADS * K; i += MN_STEP_THREADS) {
            const int h = i / (int)K, c = i % (int)K;
            const T *q = token.q + (h0 - j * group + h) * token.q_step;
            smem.step.q[i] =
                h < n_heads ? mn_attend_channel(q, c, (int)p.turns, smem.turn) : 0.0f;
        }
        for (int64_t part = slot; part < n_parts; part += n_slots) {
            const int64_t first = span.first + part * MN_STEP_KEYS;
            const int n_keys = (int)min((int64_t)MN_STEP_KEYS, span.position + 1 - first);
            const mn_step_rows<T> keys = { (const T *)p.keys + (first * p.J + j) * K, p.J * K };
            const mn_step_rows<T> values = { (const T *)p.values + (first * p.J + j) * V,
                                             p.J * V };
            const mn_step_sizes sizes = { (int)K, (int)V, n_heads, n_keys, (float)p.scale,
                                          !p.relu };
            mn_step_part<T, N, AT_ONCE, HEADS, Block>(smem.step, keys, values, sizes,
                                                      p.parts + (h0 * p.n_parts + part) * (V + 2),
                                                      p.n_parts * (V + 2));
        }
    }
}

template <typename T, int N, typename Block, typename Token>
__device__ inline void mn_attend_piece(const mn_decode_attention &p, int64_t j, int64_t slot,
                                       int64_t n_slots, const Token &token, unsigned char *bytes) {
    if (p.H == p.J) mn_attend_heads<T, N, 1, Block>(p, j, slot, n_slots, token, bytes);
    else mn_attend_heads<T, N, MN_STEP_HEADS, Block>(p, j, slot, n_slots, token, bytes);
}

/* The parts of head h. `bytes`: of MN_STEP_WARPS floats. */
template <typename T, typename Block>
__device__ inline void mn_attend_combine(const mn_decode_attention &p, int64_t h,
                                         unsigned char *bytes) {
    const mn_attend_span span(p);
    const float *from = p.parts + h * p.n_parts * (p.V + 2);
    mn_step_combine<T, Block>(from, span.parts(), p.V, !p.relu, (float)p.eps, (T *)p.o + h * p.V,
                              nullptr, (float *)bytes);
}

}    // namespace mneme::attention

#endif
