/* megakernel_attention.cuh - attention of one token over a cache as stages without a barrier
 * (mn_decode_stream_instr).
 *
 *   z_t = scale q.k_t    w_t = 2^(z_t - most)    o = sum_t w_t v_t / sum_t w_t
 *
 * or, for relu_attention, w_t = max(z_t, 0) over max(|z|, eps). Keys and values older than the
 * token come through the ring of weights, 64 rows a piece, in turns: they are under way while the
 * stages in front of this one are at work. A warp has eight rows of each piece, half a warp every
 * second one of these, with a largest score, a sum and V sums of its own; these meet once, behind
 * the last piece. The order of all sums goes by the number of keys and of heads. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_ATTENTION_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_ATTENTION_CUH

#include "kernels/cuda/attention/attention_step.cuh"
#include "kernels/cuda/decode/megakernel_steps.cuh"

namespace mneme::decode {

enum {
    MN_DECODE_STREAM_KEYS = 64,                                // rows of a piece
    MN_DECODE_STREAM_ROW = 2 * MN_DECODE_STREAM_WIDEST,        // bytes from row to row of a piece
    MN_DECODE_STREAM_TURNS = 4,                                // rows of half a warp in a piece
    MN_DECODE_STREAM_AT_ONCE = 16,                             // splits that a thread adds up
};

static_assert(MN_DECODE_STREAM_KEYS * MN_DECODE_STREAM_ROW <= MN_DECODE_TILE_BYTES,
              "keys of a piece");
static_assert(MN_DECODE_STREAM_KEYS == MN_DECODE_WARPS * 2 * MN_DECODE_STREAM_TURNS,
              "rows of a warp");

#if __CUDA_ARCH__ >= 900

/* Keys of a split that are older than the token. */
struct mn_decode_split_span {
    int64_t first;
    int n;

    __device__ mn_decode_split_span(const attention::mn_attend_span &span, int split,
                                    int n_splits) {
        const unsigned older = (unsigned)span.n - 1, cuts = (unsigned)n_splits;
        const unsigned each = (older + cuts - 1) / cuts, from = min((unsigned)split * each, older);
        first = span.first + from;
        n = (int)min(each, older - from);
    }
};

/* ---- the warp that loads --------------------------------------------------------------------- */

/* Up to 64 rows of `width` numbers to the next piece of the ring, zeros behind them. Copies of a
 * warp, not TMA's: rows of 256 bytes are too short for it. */
__device__ inline void mn_decode_load_cache_tile(mn_decode_smem &smem, mn_decode_pipe &at,
                                                 const char *rows, int64_t step, int n,
                                                 int width) {
    const int lane = threadIdx.x % 32, row = lane / 16, column = lane % 16 * 16;
    mn_mbarrier_wait(&smem.empty[at.slot], at.phase ^ 1);
    const uint32_t to = mn_smem_addr(smem.ring[at.slot]) + row * MN_DECODE_STREAM_ROW + column;
    const char *from = rows + row * step + column;
    const int left = column < 2 * width ? n - row : 0;
#pragma unroll 8
    for (int i = 0; i < MN_DECODE_STREAM_KEYS; i += 2) {
        const bool inside = i < left;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     ::"r"(to + i * MN_DECODE_STREAM_ROW), "l"(inside ? from : rows),
                     "r"(inside ? 16 : 0) : "memory");
        from += 2 * step;
    }
    /* The phase ends with the copies of all lanes, each of which adds one to what is waited for,
     * and lane 0 behind them. */
    asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];"
                 ::"r"(mn_smem_addr(&smem.full[at.slot])) : "memory");
    mn_mbarrier_arrive_warp(&smem.full[at.slot]);
    at.next_slot();
}

/* Asks the second cache for the lines of words that are waited for, and that were written last in
 * the run before. */
__device__ inline void mn_decode_prefetch_stream(const char *megakernel,
                                                 const mn_decode_stream_instr &p, int words) {
    const int lane = threadIdx.x % 32;
    const char *const from = megakernel + words;
    const int row = 4 * (int)mn_decode_split_row(p.of.V), bytes = p.n_splits * row;
    if (p.n_slots == 0) {
        const char *const splits = from + p.splits + p.head * bytes;
        for (int i = lane * MN_DECODE_LINE; i < bytes + MN_DECODE_LINE; i += 32 * MN_DECODE_LINE) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(splits + min(i, bytes - 4)));
        }
        return;
    }
    const int n_q = p.group * (int)p.of.K / MN_DECODE_PER_LINE;
    for (int i = lane; i < n_q; i += 32) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + p.q.at + i * MN_DECODE_LINE));
    }
}

/* All keys and values of the block's splits, in the order in which they are used. */
__device__ inline void mn_decode_load_stream(mn_decode_smem &smem, mn_decode_pipe &at,
                                             const mn_decode_stream_instr &p) {
    const mn_decode_attention &a = p.of;
    const attention::mn_attend_span span(a);
    const int64_t key_step = a.J * a.K * 2, value_step = a.J * a.V * 2;
    if (p.n_slots == 0) return;
#pragma unroll 1
    for (int split = p.slot; split < p.n_splits; split += p.n_slots) {
        const mn_decode_split_span own(span, split, p.n_splits);
#pragma unroll 1
        for (int i = 0; i < own.n; i += MN_DECODE_STREAM_KEYS) {
            const int64_t row = (own.first + i) * a.J + p.head;
            mn_decode_load_cache_tile(smem, at, (const char *)a.keys + row * a.K * 2, key_step,
                                      own.n - i, (int)a.K);
            mn_decode_load_cache_tile(smem, at, (const char *)a.values + row * a.V * 2,
                                      value_step, own.n - i, (int)a.V);
        }
    }
}

/* ---- a split --------------------------------------------------------------------------------- */

/* Shared memory of a block. The token is in registers once the sums of warps are written. */
template <int HEADS>
struct mn_decode_stream_smem {
    union {
        alignas(16) float o[HEADS][MN_DECODE_WARPS][MN_DECODE_STREAM_WIDEST];
        struct {
            alignas(16) float q[HEADS + 1][MN_DECODE_STREAM_WIDEST];    // the last: the key
            alignas(16) mn_bf16 rows[(HEADS + 2) * MN_DECODE_STREAM_WIDEST];
        } token;
    };
    float2 of_warp[HEADS][MN_DECODE_WARPS];    // the largest score, and the sum
    float2 turn[MN_DECODE_STREAM_WIDEST / 2];
};

static_assert(sizeof(mn_decode_stream_smem<MN_DECODE_STREAM_HEADS>) <= MN_DECODE_SCRATCH,
              "shared memory of a split");

/* What half a warp has of the keys so far; a lane has columns 8 (lane % 16) and on. */
template <int HEADS>
struct mn_decode_stream_state {
    float most[HEADS], sum[HEADS], o[HEADS][8];
};

__device__ inline float mn_decode_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 2^(x - most), 0 where nothing has been seen. */
__device__ inline float mn_decode_rescale(float x, float most) {
    return x == -INFINITY ? 0.0f : mn_decode_exp2(x - most);
}

__device__ inline void mn_decode_unpack8(float (&x)[8], const uint4 &from) {
    x[0] = mn_bf16_low(from.x), x[1] = mn_bf16_high(from.x);
    x[2] = mn_bf16_low(from.y), x[3] = mn_bf16_high(from.y);
    x[4] = mn_bf16_low(from.z), x[5] = mn_bf16_high(from.z);
    x[6] = mn_bf16_low(from.w), x[7] = mn_bf16_high(from.w);
}

/* q.k over the sixteen lanes of a row. */
__device__ inline float mn_decode_dot16(const float (&q)[8], const float (&k)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (int e = 0; e < 8; e++) sum = fmaf(q[e], k[e], sum);
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    return sum;
}

/* Half a warp's four rows of a piece. */
struct mn_decode_cache_rows {
    uint4 row[MN_DECODE_STREAM_TURNS];

    __device__ void load(mn_decode_smem &smem, const mn_decode_pipe &at) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        mn_mbarrier_wait(&smem.full[at.slot], at.phase);
        const uint4 *from = (const uint4 *)(smem.ring[at.slot]
                                            + warp * 2 * MN_DECODE_STREAM_TURNS
                                                  * MN_DECODE_STREAM_ROW) + lane;
#pragma unroll
        for (int u = 0; u < MN_DECODE_STREAM_TURNS; u++) row[u] = from[u * 32];
    }
};

/* Keys and values of a piece, of which half a warp's turns below `left` / 2 are there. `scale`:
 * with log2 e where the weights are a softmax. */
template <int HEADS, bool SOFTMAX>
__device__ inline void mn_decode_stream_piece(mn_decode_stream_state<HEADS> &state,
                                              const float (&q)[HEADS][8],
                                              const mn_decode_cache_rows &keys,
                                              const mn_decode_cache_rows &values, int left,
                                              float scale) {
    float z[HEADS][MN_DECODE_STREAM_TURNS];
#pragma unroll
    for (int u = 0; u < MN_DECODE_STREAM_TURNS; u++) {
        float k[8];
        mn_decode_unpack8(k, keys.row[u]);
#pragma unroll
        for (int h = 0; h < HEADS; h++) z[h][u] = scale * mn_decode_dot16(q[h], k);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        float most = state.most[h];
#pragma unroll
        for (int u = 0; u < MN_DECODE_STREAM_TURNS; u++) {
            if (2 * u >= left) z[h][u] = SOFTMAX ? -INFINITY : 0.0f;
            most = fmaxf(most, z[h][u]);
        }
        if (!SOFTMAX) {
#pragma unroll
            for (int u = 0; u < MN_DECODE_STREAM_TURNS; u++) {
                state.sum[h] = fmaf(z[h][u], z[h][u], state.sum[h]);
                z[h][u] = mn_fmax(z[h][u], 0.0f);
            }
            continue;
        }
        const float base = most == -INFINITY ? 0.0f : most;
        const float before = mn_decode_exp2(state.most[h] - base);
        state.most[h] = most;
        state.sum[h] *= before;
#pragma unroll
        for (int u = 0; u < MN_DECODE_STREAM_TURNS; u++) {
            z[h][u] = mn_decode_exp2(z[h][u] - base);
            state.sum[h] += z[h][u];
        }
#pragma unroll
        for (int e = 0; e < 8; e++) state.o[h][e] *= before;
    }
#pragma unroll
    for (int u = 0; u < MN_DECODE_STREAM_TURNS; u++) {
        float v[8];
        mn_decode_unpack8(v, values.row[u]);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
#pragma unroll
            for (int e = 0; e < 8; e++) state.o[h][e] = fmaf(z[h][u], v[e], state.o[h][e]);
        }
    }
}

/* The token's queries, key and value, of which the last two are waited for where `own`: words to
 * rows, then queries and key turned. Who has the token's key puts both into the caches. */
template <int HEADS>
__device__ inline void mn_decode_stream_token(mn_decode_stream_smem<HEADS> &smem,
                                              const mn_decode_stream_instr &p, const char *words,
                                              int64_t position, bool own) {
    typedef mn_decode_consumers block;
    const mn_decode_attention &a = p.of;
    const int K = (int)a.K, V = (int)a.V, turns = (int)a.turns;
    const int n_q = p.group * K, all = n_q + (own ? K + V : 0);
    mn_bf16 *const rows = smem.token.rows;
    for (int i = threadIdx.x; i < turns / 2; i += MN_DECODE_THREADS) {
        smem.turn[i] = attention::mn_attend_turn(a.inv_freq[i], position, (float)a.turned_scale);
    }
    if (4 * (int)threadIdx.x < all) {
        const int i = 4 * threadIdx.x;
        const int at = i < n_q ? mn_decode_word_from(p.q.at, i)
                       : i < n_q + K ? mn_decode_word_from(p.k.at, i - n_q)
                                     : mn_decode_word_from(p.v.at, i - n_q - K);
        mn_decode_word2 two;
        do {
            two.fetch(words + at);
        } while (two.most() == MN_DECODE_SENTINEL);
        *(uint2 *)(rows + i) = two.elements();
    }
    block::sync();
    mn_bf16 *const key = (mn_bf16 *)a.keys + (position * a.J + p.head) * K;
    mn_bf16 *const value = (mn_bf16 *)a.values + (position * a.J + p.head) * V;
    for (int i = threadIdx.x; i < (HEADS + 1) * MN_DECODE_STREAM_WIDEST;
         i += MN_DECODE_THREADS) {
        const int h = i / MN_DECODE_STREAM_WIDEST, c = i % MN_DECODE_STREAM_WIDEST;
        const bool is_key = h == HEADS, inside = c < K && (is_key ? own : h * K < n_q);
        const mn_bf16 *from = rows + (is_key ? n_q : h * K);
        const float x = inside ? attention::mn_attend_channel(from, c, turns, smem.turn) : 0.0f;
        smem.token.q[h][c] = x;
        if (is_key && inside) mn_put(key + c, x);
        if (is_key && own && c < V) value[c] = rows[n_q + K + c];
    }
    block::sync();
}

/* The token's own key and value, as the first half warp begins with them. */
template <int HEADS, bool SOFTMAX>
__device__ inline void mn_decode_stream_own(mn_decode_stream_state<HEADS> &state,
                                            const mn_decode_stream_smem<HEADS> &smem,
                                            const float (&q)[HEADS][8], int K, int V, int n_q,
                                            float scale) {
    const int first = threadIdx.x % 16 * 8;
    const bool takes = threadIdx.x < 16;
    float k[8], v[8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
        k[e] = smem.token.q[HEADS][first + e];
        v[e] = first < V ? mn_float(smem.token.rows[n_q + K + first + e]) : 0.0f;
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const float z = scale * mn_decode_dot16(q[h], k), w = SOFTMAX ? 1.0f : mn_fmax(z, 0.0f);
        if (!takes) continue;
        state.most[h] = SOFTMAX ? z : 0.0f;
        state.sum[h] = SOFTMAX ? 1.0f : z * z;
#pragma unroll
        for (int e = 0; e < 8; e++) state.o[h][e] = w * v[e];
    }
}

/* Sums of the two halves of a warp, to shared memory. */
template <int HEADS, bool SOFTMAX>
__device__ inline void mn_decode_stream_halves(mn_decode_stream_smem<HEADS> &smem,
                                               mn_decode_stream_state<HEADS> &state) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const float other = __shfl_xor_sync(0xffffffffu, state.most[h], 16);
        const float most = fmaxf(state.most[h], other);
        const float by = SOFTMAX ? mn_decode_rescale(state.most[h], most) : 1.0f;
        float sum = state.sum[h] * by;
        sum += __shfl_xor_sync(0xffffffffu, sum, 16);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            state.o[h][e] *= by;
            state.o[h][e] += __shfl_xor_sync(0xffffffffu, state.o[h][e], 16);
        }
        if (lane == 0) smem.of_warp[h][warp] = make_float2(most, sum);
        if (lane >= 16) continue;
        float4 *const to = (float4 *)&smem.o[h][warp][lane * 8];
        to[0] = make_float4(state.o[h][0], state.o[h][1], state.o[h][2], state.o[h][3]);
        to[1] = make_float4(state.o[h][4], state.o[h][5], state.o[h][6], state.o[h][7]);
    }
}

__device__ inline void mn_decode_store_split(const mn_decode_pipe &place, int word, float x) {
    const uint32_t bits = __float_as_uint(x);
    mn_decode_store_word(place, word, bits == MN_DECODE_SENTINEL ? 0x7fffffffu : bits);
}

/* Sums of the warps, in their order, to words: a thread has a column of a head. */
template <int HEADS, bool SOFTMAX>
__device__ inline void mn_decode_stream_deliver(const mn_decode_stream_smem<HEADS> &smem,
                                                const mn_decode_stream_instr &p,
                                                const mn_decode_pipe &place, int split) {
    const mn_decode_attention &a = p.of;
    const int group = p.group, V = (int)a.V, row = 4 * (int)mn_decode_split_row(V);
    for (int i = threadIdx.x; i < group * MN_DECODE_STREAM_WIDEST; i += MN_DECODE_THREADS) {
        const int h = i / MN_DECODE_STREAM_WIDEST, c = i % MN_DECODE_STREAM_WIDEST;
        float most = -INFINITY, sum = 0.0f, y = 0.0f;
#pragma unroll
        for (int w = 0; w < MN_DECODE_WARPS; w++) most = fmaxf(most, smem.of_warp[h][w].x);
#pragma unroll
        for (int w = 0; w < MN_DECODE_WARPS; w++) {
            const float2 of = smem.of_warp[h][w];
            const float by = SOFTMAX ? mn_decode_rescale(of.x, most) : 1.0f;
            sum = fmaf(of.y, by, sum);
            y = fmaf(smem.o[h][w][c], by, y);
        }
        const int to = p.splits + ((p.head * group + h) * p.n_splits + split) * row;
        if (c < V) mn_decode_store_split(place, to + 4 * c, y);
        if (c == 0) {
            mn_decode_store_split(place, to + 4 * V, most);
            mn_decode_store_split(place, to + 4 * V + 4, sum);
        }
    }
}

/* All splits of the block; returns how many pieces of the ring were used. */
template <int HEADS, bool SOFTMAX>
__device__ __noinline__ int mn_decode_run_splits(mn_decode_smem &all,
                                                 const mn_decode_stream_instr &p,
                                                 mn_decode_pipe place) {
    typedef mn_decode_consumers block;
    mn_decode_stream_smem<HEADS> &smem = *(mn_decode_stream_smem<HEADS> *)all.scratch;
    const mn_decode_attention &a = p.of;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float scale = (float)a.scale * (SOFTMAX ? 1.4426950408889634f : 1.0f);
    const attention::mn_attend_span span(a);
    const bool own = p.slot == 0;    // the token's key is the first split's
    int used = 0;
    block::sync();    // the scratch is no longer another stage's
    mn_decode_stream_token<HEADS>(smem, p, place.words, span.position, own);
    float q[HEADS][8];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int e = 0; e < 8; e++) q[h][e] = smem.token.q[h][lane % 16 * 8 + e];
    }
#pragma unroll 1
    for (int split = p.slot; split < p.n_splits; split += p.n_slots) {
        const mn_decode_split_span keys(span, split, p.n_splits);
        mn_decode_stream_state<HEADS> state = {};
#pragma unroll
        for (int h = 0; h < HEADS; h++) state.most[h] = SOFTMAX ? -INFINITY : 0.0f;
        if (split == 0) {
            mn_decode_stream_own<HEADS, SOFTMAX>(state, smem, q, (int)a.K, (int)a.V,
                                                 p.group * (int)a.K, scale);
        }
#pragma unroll 1
        for (int i = 0; i < keys.n; i += MN_DECODE_STREAM_KEYS) {
            mn_decode_cache_rows of_keys, of_values;
            const int key_slot = place.slot;
            of_keys.load(all, place);
            place.next_slot();
            const int value_slot = place.slot;
            of_values.load(all, place);
            place.next_slot();
            // what copies of threads wrote is next written by TMA
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane < 2) mn_mbarrier_arrive(&all.empty[lane ? value_slot : key_slot]);
            const int left = keys.n - i - warp * 2 * MN_DECODE_STREAM_TURNS - lane / 16;
            mn_decode_stream_piece<HEADS, SOFTMAX>(state, q, of_keys, of_values, left, scale);
            used += 2;
        }
        block::sync();    // the token and the split before have been read
        mn_decode_stream_halves<HEADS, SOFTMAX>(smem, state);
        block::sync();
        mn_decode_stream_deliver<HEADS, SOFTMAX>(smem, p, place, split);
    }
    block::sync();    // the next stage's row lies where the scratch does
    return used;
}

/* ---- the sum of the splits of a head --------------------------------------------------------- */

/* A word of up to 16 splits, all asked for at once, and the largest score and the sum of one. */
struct mn_decode_split_words {
    mn_decode_word1 x[MN_DECODE_STREAM_AT_ONCE], score, weight;

    __device__ void wait(const char *from, int n, int row, const char *own) {
        uint32_t most;
        do {
            score.fetch(own);
            weight.fetch(own + 4);
#pragma unroll
            for (int i = 0; i < MN_DECODE_STREAM_AT_ONCE; i++) {
                x[i].none();
                if (i < n) x[i].fetch(from + i * row);
            }
            most = max(score.most(), weight.most());
#pragma unroll
            for (int i = 0; i < MN_DECODE_STREAM_AT_ONCE; i++) most = max(most, x[i].most());
        } while (most == MN_DECODE_SENTINEL);
    }
};

/* A thread has a column, and each warp the scores and sums of all splits, a lane one: warps meet
 * nowhere. */
__device__ __noinline__ void mn_decode_sum_splits(const mn_decode_stream_instr &p,
                                                  const mn_decode_pipe place) {
    const mn_decode_attention &a = p.of;
    const int V = (int)a.V, row = 4 * (int)mn_decode_split_row(V), n = p.n_splits;
    const int lane = threadIdx.x % 32, column = threadIdx.x;
    const char *const from = place.words + p.splits + p.head * n * row;
    if (column - lane >= V) return;
    const bool softmax = !a.relu, there = lane < n;
    const char *const own = from + (there ? lane : 0) * row + 4 * V;
    const char *const numbers = from + 4 * min(column, V - 1);
    mn_decode_split_words at;
    at.wait(numbers, n, row, own);
    __syncwarp();
    const float z = there ? __uint_as_float(at.score.a) : -INFINITY, most = mn_warp_max(z);
    const float by = !there ? 0.0f : softmax ? mn_decode_rescale(z, most) : 1.0f;
    const float sum = mn_warp_sum(there ? __uint_as_float(at.weight.a) * by : 0.0f);
    float y = 0.0f;
#pragma unroll
    for (int i = 0; i < MN_DECODE_STREAM_AT_ONCE; i++) {
        const float e = __shfl_sync(0xffffffffu, by, i);
        if (i < n) y = fmaf(__uint_as_float(at.x[i].a), e, y);
    }
    if (n > MN_DECODE_STREAM_AT_ONCE) {
        at.wait(numbers + MN_DECODE_STREAM_AT_ONCE * row, n - MN_DECODE_STREAM_AT_ONCE, row,
                own);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < MN_DECODE_STREAM_AT_ONCE; i++) {
            const float e = __shfl_sync(0xffffffffu, by, i + MN_DECODE_STREAM_AT_ONCE);
            if (i + MN_DECODE_STREAM_AT_ONCE < n) y = fmaf(__uint_as_float(at.x[i].a), e, y);
        }
    }
    y *= 1.0f / (softmax ? sum : mn_fmax(sqrtf(sum), (float)a.eps));
    const uint32_t two = mn_bf16_pack2(y, __shfl_down_sync(0xffffffffu, y, 1));
    if (column >= V) return;
    if (column % 2 == 0 && p.o_handoff >= 0) {
        mn_decode_store_word(place, mn_decode_word_from(p.o_handoff, (unsigned)column), two);
    }
    ((mn_bf16 *)a.o)[p.head * V + column] = __float2bfloat16_rn(y);
}

/* Either stage; goes on behind the pieces that it has used. */
__device__ inline void mn_decode_run_stream(mn_decode_smem &smem, const mn_decode_stream_instr &p,
                                            mn_decode_pipe &place) {
    int used = 0;
    if (p.n_slots == 0) mn_decode_sum_splits(p, place);
    else if (p.of.relu) {
        used = mn_decode_run_splits<MN_DECODE_STREAM_HEADS, false>(smem, p, place);
    } else if (p.group == 1) {
        used = mn_decode_run_splits<1, true>(smem, p, place);
    } else {
        used = mn_decode_run_splits<MN_DECODE_STREAM_HEADS, true>(smem, p, place);
    }
    place.slot += used % MN_DECODE_SLOTS;
    place.phase ^= used / MN_DECODE_SLOTS & 1;
    if (place.slot >= MN_DECODE_SLOTS) place.slot -= MN_DECODE_SLOTS, place.phase ^= 1;
}

#endif

}    // namespace mneme::decode

#endif
