/* megakernel.cu - a megakernel (kernels/decode.h): one kernel goes through all stages, a block
 * for each processor.
 *
 * A block has one warp that brings instructions and weights (mn_decode_producer), and eight that
 * multiply. No barrier stands between stages: a block begins one as soon as the elements that it
 * reads are there (megakernel.cuh), most often while its weights have come already. The launch is
 * cooperative, so that all blocks are there at once. */
#include "kernels/cuda/decode/megakernel.cuh"
#include "kernels/cuda/decode/megakernel_attention.cuh"
#include "kernels/cuda/decode/megakernel_steps.cuh"
#include "kernels/cuda/prim/device_props.h"

namespace mneme::decode {

/* gemms of one row with several weights as a stage (kernels/decode.h).
 *
 * A warp has 128 elements of each chunk of 1024, of the row and of all weights. While it waits
 * for the row it takes its part of the weights to registers; it makes its elements of the row
 * itself, as soon as they are there, and its sums for all column tiles; then the block meets,
 * once, and a warp adds up the eight sums of each column of an output tile. What a norm divides by
 * is a factor of the sums: nothing waits for it. */

/* what becomes of the sums of an output tile (kernels/decode.h): a warp has an output tile, four
 * lanes a column, the first of which stores.
 *
 * What an epilogue reads from memory is asked for before the sums are there. Hand-off words
 * are stored first (consumers spin on them), then the plain output tensor. */

#if __CUDA_ARCH__ >= 900

/* A call: what is written out once stays near the processor. */
template <bool NARROW>
__device__ __noinline__ float mn_decode_activation(int f, float x) {
    switch (f) {
#define UNARY(id, name, about)                                                                     \
    case MN_UNARY_##id: return mn_functions<NARROW>::value_##id(x);
#include "kernels/elementwise.def"
    default: return x;
    }
}

/* x of a lane's column, rounded: to who waits for it, and to memory. All lanes call; `owner`: the
 * column is there, and this its first lane. */
__device__ inline void mn_decode_store_result(const mn_decode_pipe &place, bool owner,
                                              mn_bf16 *to, int words,
                                      float x) {
    const int column = threadIdx.x % 32 / 4;
    const float right = __shfl_down_sync(0xffffffffu, x, 4);
    const uint32_t two = mn_bf16_pack2(x, right);
    if (owner && words >= 0 && column % 2 == 0) mn_decode_store_word(place, words + column * 2,
                                                                     two);
    if (owner) to[column] = __ushort_as_bfloat16((unsigned short)two);
}

/* Number `column` of a row of float32, which is a word. */
__device__ inline void mn_decode_store_wide(const mn_decode_pipe &place, float *to, int words,
                                            int column, float x) {
    const uint32_t word = __float_as_uint(x);
    const uint32_t said = word == MN_DECODE_SENTINEL ? 0x7fffffffu : word;
    if (words >= 0) mn_decode_store_word(place, words + column * 4, said);
    to[column] = x;
}

/* ---- lists of small works -------------------------------------------------------------------- */

__device__ inline float mn_decode_epi_load(const mn_decode_epi_input &in,
                                           const mn_decode_pipe &place,
                                        const float (*values)[MN_DECODE_TILE_N]) {
    const int column = threadIdx.x % 32 / 4, i = column * in.source.step + in.source.odd;
    if (in.from >= 0) return values[in.from][column];
    mn_decode_word1 x;
    do {
        x.fetch(place.words + mn_decode_word_from(in.source.at, i));
    } while (x.most() == MN_DECODE_SENTINEL);
    return x.number(i % 2);
}

__device__ inline float mn_decode_epi_apply(const mn_decode_epi_instr &e, float a, float b) {
    if (e.kind == MN_DECODE_UNARY) {
        const float y = e.narrow ? mn_decode_activation<true>(e.f, a)
            : mn_decode_activation<false>(e.f, a);
        return e.n_inputs > 1 ? y * b : y;
    }
    if (e.kind == MN_DECODE_PAIR) {
        const mn_pair_forward pair = { (mn_pair_kind)e.f, e.scale, e.shift };
        const float x[3][1] = { { a }, { b }, { 0.0f } };
        float y[1][1];
        pair.run<false>(x, y);
        return y[0][0];
    }
    return a;
}

/* What a list reads ahead of column `column`. */
__device__ inline uintptr_t mn_decode_prefetched_at(const mn_decode_out_tile &u, int i,
                                                    int column) {
    return (uintptr_t)u.prefetched[i] + column * u.prefetched_step[i];
}

/* Number i of those, from the word of memory that it lies in. */
__device__ inline float mn_decode_prefetched(const mn_decode_out_tile &u, int i, int column,
                                             uint32_t word) {
    if (u.prefetched_wide[i]) return __uint_as_float(word);
    return mn_decode_prefetched_at(u, i, column) & 2 ? mn_bf16_high(word) : mn_bf16_low(word);
}

/* One after the other, from the output tile's gemms x and y and the words that hold what was read
 * ahead; a lane has its column of all of them. values: of the output tile. */
__device__ __noinline__ void mn_decode_epi_list(const mn_decode_out_tile &u,
                                                const mn_decode_epi_instr *epis,
                                         mn_decode_pipe place, float (*values)[MN_DECODE_TILE_N],
                                         float x, float y, uint4 prefetched) {
    const int column = threadIdx.x % 32 / 4;
    const bool there = column < u.n_rows, owner = there && threadIdx.x % 4 == 0;
    const uint32_t held[MN_DECODE_PREFETCHED] =
        { prefetched.x, prefetched.y, prefetched.z, prefetched.w };
    values[0][column] = x, values[1][column] = y;
#pragma unroll
    for (int i = 0; i < MN_DECODE_PREFETCHED; i++) {
        values[2 + MN_DECODE_EPILOGUES + i][column] = mn_decode_prefetched(u, i, column, held[i]);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < u.n_epis; i++) {
        const mn_decode_epi_instr &e = epis[i];
        float a = 0.0f, b = 0.0f;
        if (there) a = mn_decode_epi_load(e.in[0], place, values);
        if (there && e.n_inputs > 1) b = mn_decode_epi_load(e.in[1], place, values);
        __syncwarp();
        float z = mn_decode_epi_apply(e, a, b);
        __syncwarp();
        if (!e.wide) z = mn_bf16_rounded(z);
        values[2 + i][column] = z;
        const bool stores = owner && (e.per == 1 || column == 0);
        if (!e.wide) mn_decode_store_result(place, stores, (mn_bf16 *)e.to, e.to_handoff, z);
        else if (stores) mn_decode_store_wide(place, (float *)e.to, e.to_handoff, column, z);
        __syncwarp();
    }
}

/* ---- an output tile -------------------------------------------------------------------------- */

/* The head of an output tile. */
struct mn_decode_tile_header {
    unsigned first, second;

    __device__ explicit mn_decode_tile_header(const mn_decode_out_tile &u) {
        const uint2 both = *(const uint2 *)&u;
        first = mn_decode_uniform(both.x), second = mn_decode_uniform(both.y);
    }

    __device__ int form(void) const {
        return first & 255;
    }

    __device__ int n_col_tiles(void) const {
        return first >> 8 & 255;
    }

    __device__ int col_tile(int i) const {
        return first >> (16 + 8 * i) & 255;
    }

    __device__ int n_rows(void) const {
        return second & 255;
    }

    __device__ int f(void) const {
        return second >> 8 & 255;
    }

    __device__ bool biased(void) const {
        return second >> 16 & 1;
    }

    __device__ bool stores_c(void) const {
        return second >> 17 & 1;
    }
};

struct mn_decode_epilogue {
    const mn_decode_out_tile &u;
    const mn_decode_pipe &place;
    int column, form, f, words;
    bool there, owner;        // a column that is there, and its first lane
    bool stores_c;              // gemms
    float bias[2];
    uint32_t held[6];        // as it was found: what is added; tail, taps, bias; what a list reads

    /* Asks, where there is an output tile. */
    __device__ mn_decode_epilogue(const mn_decode_out_tile &out_tile,
                                  const mn_decode_tile_header &kind,
                             const mn_decode_pipe &at, bool has)
        : u(out_tile), place(at) {
        column = threadIdx.x % 32 / 4;
        there = has && column < kind.n_rows();
        owner = there && threadIdx.x % 4 == 0;
        form = kind.form(), f = kind.f(), words = u.to_handoff, stores_c = kind.stores_c();
        bias[0] = bias[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < 6; i++) asm("" : "=r"(held[i]));    // any elements
        if (!has) return;
        if (form == MN_DECODE_EPI_ADD) load_plus();
        if (form == MN_DECODE_EPI_CONV && there) load_taps();
        if (__builtin_expect(form >= MN_DECODE_EPI_DECAY, 0) && there) load_prefetched();
        if (__builtin_expect(kind.biased(), 0) && there) {
            if (u.bias[0]) bias[0] = load_bias(0);
            if (u.bias[1]) bias[1] = load_bias(1);
        }
    }

    /* Rounded, and stored, where it is there in float32. */
    __device__ float load_bias(int i) const {
        const float *const wide = u.wide_bias[i];
        if (!wide) return mn_float(u.bias[i][column]);
        const mn_bf16 one = __float2bfloat16_rn(wide[column]);
        if (owner) ((mn_bf16 *)u.bias[i])[column] = one;
        return mn_float(one);
    }

    /* The word of what is added. */
    __device__ void load_plus(void) {
        mn_decode_word1 word;
        word.none();
        if (there) word.fetch(place.words + u.plus.at + column / 2 * 4);
        held[0] = word.a;
    }

    /* Before the sums are there. */
    __device__ void wait_plus(void) {
        if (form != MN_DECODE_EPI_ADD) return;
        while (__builtin_expect(__any_sync(0xffffffffu, held[0] == MN_DECODE_SENTINEL),
                                0)) load_plus();
    }

    __device__ float add(float x) const {
        return x + (column % 2 ? mn_bf16_high(held[0]) : mn_bf16_low(held[0]));
    }

    /* Three inputs before this one, four taps in two words, a bias. */
    __device__ void load_taps(void) {
#pragma unroll
        for (int m = 0; m < MN_DECODE_TAPS - 1; m++) {
            held[m] = u.tail0 ? __ldcg((const uint32_t *)u.tail0 + m * u.N + column) : 0u;
        }
        const uint2 taps = ((const uint2 *)u.taps)[column];
        held[3] = taps.x, held[4] = taps.y, held[5] = 0;
        if (u.taps_bias) held[5] = ((const uint16_t *)u.taps_bias)[column];
    }

    /* One token of a convolution, without its function, and the tail of inputs that it leaves. */
    __device__ float convolve(float x) const {
        float sum = fmaf(mn_bf16_low(held[3]), __uint_as_float(held[0]), mn_bf16_low(held[5]));
        sum = fmaf(mn_bf16_high(held[3]), __uint_as_float(held[1]), sum);
        sum = fmaf(mn_bf16_low(held[4]), __uint_as_float(held[2]), sum);
        return fmaf(mn_bf16_high(held[4]), x, sum);
    }

    __device__ void store_tail(float x) const {
        float *const tail = u.tail + column;
        const int N = u.N;
        if (!owner || !u.tail) return;
        tail[0] = __uint_as_float(held[1]);
        tail[N] = __uint_as_float(held[2]);
        tail[2 * N] = x;
    }

    /* The words of memory that what a list reads lies in. */
    __device__ void load_prefetched(void) {
#pragma unroll
        for (int i = 0; i < MN_DECODE_PREFETCHED; i++) {
            held[i] = 0;
            const uintptr_t at = mn_decode_prefetched_at(u, i, column);
            if (u.prefetched[i]) held[i] = *(const uint32_t *)(at & ~(uintptr_t)3);
        }
    }

    /* x + dt, softplus of it, -exp(A), rounded, the last unless it is wide; the product of the
     * latter two is a decay. */
    __device__ void decay(float (&made)[3], float x) const {
        made[0] = mn_bf16_rounded(x + mn_decode_prefetched(u, 0, column, held[0]));
        made[1] = mn_bf16_rounded(mn_functions<true>::value_SOFTPLUS(made[0]));
        made[2] = mn_functions<false>::value_NEG_EXP(mn_decode_prefetched(u, 1, column, held[1]));
        if (!f) made[2] = mn_bf16_rounded(made[2]);
    }

    __device__ void store_made(const mn_decode_epi_instr *epis, const float (&made)[3]) const {
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const bool stores = owner && (epis[i].per == 1 || column == 0);
            if (!epis[i].wide) {
                mn_decode_store_result(place, stores, (mn_bf16 *)epis[i].to, epis[i].to_handoff,
                                       made[i]);
            } else if (stores) {
                mn_decode_store_wide(place, (float *)epis[i].to, epis[i].to_handoff, column,
                                     made[i]);
            }
        }
    }

    /* What few output tiles have; a list delivers by itself. */
    __device__ void run_rare(float x, float y, const mn_decode_epi_instr *epis,
                             float (*values)[MN_DECODE_TILE_N]) const {
        if (form == MN_DECODE_EPI_F32) {
            if (owner) ((float *)u.to)[column] = x;
        } else if (form == MN_DECODE_EPI_LIST) {
            const uint4 prefetched = make_uint4(held[0], held[1], held[2], held[3]);
            mn_decode_epi_list(u, epis, place, values, x, y, prefetched);
        } else if (form == MN_DECODE_EPI_DECAY) {
            float made[3];
            decay(made, x);
            mn_decode_store_result(place, owner, u.to, words, made[1] * made[2]);
            store_made(epis, made);
        } else {
            mn_decode_store_result(place, owner, u.to, words, mn_decode_activation<true>(f, x) * y);
        }
    }

    /* From the sums, complete in all four lanes; the second is 1 where there is none. `epis`: of
     * the output tile. No branches on the way to most words. */
    __device__ void run(float first, float second, const mn_decode_epi_instr *epis,
                        float (*values)[MN_DECODE_TILE_N]) {
        const bool silu = f == MN_UNARY_SILU, convolved = form == MN_DECODE_EPI_CONV;
        const bool rare = form >= MN_DECODE_EPI_F32 ||
                          (form == MN_DECODE_EPI_ACT && !silu && f != MN_UNARY_SIGMOID);
        const float x = mn_bf16_rounded(first + bias[0]), y = mn_bf16_rounded(second + bias[1]);
        if (__builtin_expect(rare, 0)) {
            run_rare(x, y, epis, values);
        } else {
            const float sum = convolve(x), added = add(x), at = convolved ? sum : x;
            const float s = mn_sigmoid(at);
            float result = form == MN_DECODE_EPI_ADD ? added : x;
            result = convolved ? (f ? sum * s : sum) : result;
            result = form == MN_DECODE_EPI_ACT ? (silu ? s * x : s) * y : result;
            mn_decode_store_result(place, owner, u.to, words, result);
            if (convolved) store_tail(x);
        }
        if (!stores_c) return;
        mn_bf16 *const one = u.c[0], *const other = u.c[1];
        if (owner && one) one[column] = __float2bfloat16_rn(x);
        if (owner && other) other[column] = __float2bfloat16_rn(y);
    }
};

#endif

/* the recurrence of a matrix memory for one token as a stage
 * (kernels/decode.h).
 *
 *   S' = diag(exp g) S;  w = beta (v - S'^T e);  S = S' + e w';  o = scale S'^T q + scale (q.e) w
 *
 * All that needs a sum over rows of the state is summed at once: S'^T e, S'^T q, q.e and the
 * squares of q and e. A block has eight columns of one memory, a thread eight rows of one of them.
 * What norms of q and e divide by is a factor of the sums. */

#if __CUDA_ARCH__ >= 900

/* All that a thread waits for. */
struct mn_decode_inputs_of {
    mn_decode_word4 q, e, g;
    mn_decode_word1 v, beta, even;

    /* As if all had been found. */
    __device__ void none(void) {
        q.none();
        e.none();
        g.none();
        v.none();
        beta.none();
        even.none();
    }

    __device__ void fetch(const mn_decode_recurrence_instr &m, const mn_decode_pipe &place, int row,
                        int column) {
        const char *const at_q = place.words + mn_decode_word_from(m.q.at, row);
        const char *const at_e = place.words + mn_decode_word_from(m.e.at, row);
        const char *const at_g = place.words + mn_decode_word_from(m.g.at, m.by_channel ? row : 0);
        const char *const at_v = place.words + mn_decode_word_from(m.v.at, column);
        const char *const at_beta = place.words + m.beta.at;
        const bool channels = m.by_channel, evenly = m.has_g && !m.by_channel, with = m.has_beta;
        uint32_t most;
        do {
            q.fetch(at_q);
            e.fetch(at_e);
            v.fetch(at_v);
            if (channels) g.fetch(at_g);
            if (evenly) even.fetch(at_g);
            if (with) beta.fetch(at_beta);
            most = max(max(q.most(), e.most()), max(g.most(), v.most()));
            most = max(most, max(even.most(), beta.most()));
        } while (most == MN_DECODE_SENTINEL);
    }
};

/* The row as others would find it. */
__device__ inline void mn_decode_store_normed(mn_bf16 *to, const float (&x)[8], float factor) {
    uint4 y;
    y.x = mn_bf16_pack2(x[0] * factor, x[1] * factor),
        y.y = mn_bf16_pack2(x[2] * factor, x[3] * factor);
    y.z = mn_bf16_pack2(x[4] * factor, x[5] * factor),
        y.w = mn_bf16_pack2(x[6] * factor, x[7] * factor);
    *(uint4 *)to = y;
}

/* Sums over all rows: of a column, S'^T e and S'^T q; q.e and squares of q and e. */
struct mn_decode_state_sums {
    float e, q, qe, qq, ee;

    __device__ void gather(mn_decode_smem &smem, int buf) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int lanes = 8; lanes < 32; lanes *= 2) {
            e += __shfl_xor_sync(0xffffffffu, e, lanes);
            q += __shfl_xor_sync(0xffffffffu, q, lanes);
            qe += __shfl_xor_sync(0xffffffffu, qe, lanes);
            qq += __shfl_xor_sync(0xffffffffu, qq, lanes);
            ee += __shfl_xor_sync(0xffffffffu, ee, lanes);
        }
        if (lane < MN_DECODE_TILE_V) smem.columns[buf][warp][lane] = make_float2(e, q);
        if (lane == 0) smem.shared[buf][warp] = make_float4(qe, qq, ee, 0.0f);
        mn_decode_consumer_sync();
        e = q = qe = qq = ee = 0.0f;
#pragma unroll
        for (int i = 0; i < MN_DECODE_WARPS; i++) {
            const float2 two = smem.columns[buf][i][lane % MN_DECODE_TILE_V];
            const float4 three = smem.shared[buf][i];
            e += two.x, q += two.y, qe += three.x, qq += three.y, ee += three.z;
        }
    }
};

/* o + plus, of the first warp. */
__device__ inline void mn_decode_store_sum(const mn_decode_recurrence_instr &m,
                                           const mn_decode_pipe &place, float o,
                                           mn_decode_word1 plus, const char *at_plus) {
    while (plus.most() == MN_DECODE_SENTINEL) plus.fetch(at_plus);
    __syncwarp();
    const float x = mn_bf16_rounded(o) + plus.number(threadIdx.x % 2);
    mn_decode_store_columns(place, m.sum, x);
}

__device__ inline void mn_decode_recurrence_step(mn_decode_smem &smem,
                                                 const mn_decode_recurrence_instr &m,
                                     mn_decode_pipe &place) {
    const int lane = threadIdx.x % 32, column = lane % MN_DECODE_TILE_V;
    const int row = threadIdx.x / 32 * 32 + lane / MN_DECODE_TILE_V * 8;
    const bool inside = row < m.K;
    float S[8] = {}, q[8] = {}, e[8] = {}, decay[8];
    float *state = m.state + row * (int64_t)m.V + column;
    mn_decode_inputs_of in;
    in.none();
    mn_decode_state_sums sums = {};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (inside) S[j] = __ldcg(state + j * m.V);
    }
    const auto norm_q = m.front[0], norm_e = m.front[1];
    const float scale = m.scale;
    const bool delta_rule = m.delta_rule, by_channel = m.by_channel, has_g = m.has_g && !by_channel;
    const bool has_beta = m.has_beta;
    const int odd_g = m.g.odd, odd_beta = m.beta.odd, o_handoff = m.o_handoff;
    float v = 0.0f, strength = 1.0f;
    if (inside || threadIdx.x < MN_DECODE_TILE_V) {
        in.fetch(m, place, inside ? row : 0, column);
        v = in.v.number(column % 2);
        if (has_beta) strength = in.beta.number(odd_beta);
    }
    __syncwarp();
    if (inside) {
        in.q.get(q);
        in.e.get(e);
        const float even = has_g ? mn_decode_exp(in.even.number(odd_g)) : 1.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) decay[j] = even;
        if (by_channel) {
            in.g.get(decay);
#pragma unroll
            for (int j = 0; j < 8; j++) decay[j] = mn_decode_exp(decay[j]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            S[j] *= decay[j];
            sums.e = fmaf(e[j], S[j], sums.e);
            sums.q = fmaf(q[j], S[j], sums.q);
            sums.qe = fmaf(q[j], e[j], sums.qe);
            sums.qq = fmaf(q[j], q[j], sums.qq);
            sums.ee = fmaf(e[j], e[j], sums.ee);
        }
    }
    mn_decode_word1 plus;    // words of the stage that made v: asked for before they are needed
    const char *at_plus = nullptr;
    const bool has_plus = m.sum.to != nullptr && threadIdx.x < 32;
    plus.none();
    if (has_plus) {
        at_plus = place.words + mn_decode_word_from(m.plus.at, column);
        plus.fetch(at_plus);
    }
    sums.gather(smem, place.buf);
    const float by_q = mn_decode_l2_scale(norm_q, sums.qq);
    const float by_e = mn_decode_l2_scale(norm_e, sums.ee);
    const float write = strength * by_e * (delta_rule ? v - by_e * sums.e : v);
    const float o = scale * by_q * fmaf(sums.qe, write, sums.q);
    if (threadIdx.x < 32) {
        const uint32_t two = mn_bf16_pack2(o, __shfl_down_sync(0xffffffffu, o, 1));
        if (lane < MN_DECODE_TILE_V && lane % 2 == 0 && o_handoff >= 0) {
            mn_decode_store_word(place, o_handoff + lane * 2, two);
        }
        if (lane < MN_DECODE_TILE_V) m.o[lane] = __float2bfloat16_rn(o);
        if (has_plus) mn_decode_store_sum(m, place, o, plus, at_plus);
    }
    if (inside) {
#pragma unroll
        for (int j = 0; j < 8; j++) state[j * m.V] = fmaf(e[j], write, S[j]);
        if (column == 0 && norm_q.to) mn_decode_store_normed(norm_q.to + row, q, by_q);
        if (column == 0 && norm_e.to) mn_decode_store_normed(norm_e.to + row, e, by_e);
    }
    place.buf ^= 1;
}

#endif

/* the warp of a block that brings instructions and weights (kernels/decode.h).
 *
 * It goes through all stages by itself, ahead of the others: what it brings is older than the
 * megakernel, so that it waits for nothing but room in the ring. Weights come in pieces, the eight
 * rows of a column tile by up to 1024 elements, in the order in which they are multiplied: column
 * tile by column tile, chunk by chunk. Lane i asks for row i. */

#if __CUDA_ARCH__ >= 900

/* Asks for an instruction. */
__device__ inline void mn_decode_load_instr(mn_decode_smem &smem, const mn_decode_pipe &at,
                                         const char *from, int bytes) {
    mn_mbarrier_wait(&smem.instr_empty[at.instr], at.instr_phase ^ 1);
    if (threadIdx.x % 32 > 0) return;
    mn_mbarrier_arrive_expect_tx(&smem.instr_full[at.instr], bytes);
    mn_tma_load_1d(smem.instr[at.instr], from, bytes, &smem.instr_full[at.instr]);
}

__device__ inline void mn_decode_load_weight_tile(mn_decode_smem &smem, mn_decode_pipe &at,
                                          const mn_decode_col_tile &col_tile, int chunk,
                                              int bytes) {
    const int lane = threadIdx.x % 32;
    mn_mbarrier_wait(&smem.empty[at.slot], at.phase ^ 1);
    if (lane == 0) mn_mbarrier_arrive_expect_tx(&smem.full[at.slot], col_tile.n_rows * bytes);
    __syncwarp();
    if (lane < col_tile.n_rows) {
        const char *from = col_tile.rows + lane * (int64_t)col_tile.step + chunk
            * (2 * MN_DECODE_CHUNK);
        mn_decode_tma_load_once(smem.ring[at.slot] + lane * MN_DECODE_ROW_STRIDE, from, bytes,
                                &smem.full[at.slot]);
    }
    at.next_slot();
}

__device__ inline void mn_decode_load_weights(mn_decode_smem &smem, mn_decode_pipe &at,
                                            const mn_decode_gemm_instr &p) {
    const int n = p.n_col_tiles, K = p.K;
#pragma unroll 1
    for (int i = 0; i < n; i++) {
#pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; chunk++) {
            const int bytes = 2 * min((int)MN_DECODE_CHUNK, K - chunk * MN_DECODE_CHUNK);
            mn_decode_load_weight_tile(smem, at, p.col_tile[i], chunk, bytes);
        }
    }
}

__device__ inline void mn_decode_prefetch_line(const void *at) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(at));
}

/* A state is too narrow for copies: the second cache is asked for its lines. */
__device__ inline void mn_decode_prefetch_state(const mn_decode_recurrence_instr &m) {
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < m.K; row += 32) {
        mn_decode_prefetch_line(m.state + row * (int64_t)m.V);
    }
}

__device__ inline void mn_decode_prefetch_palimpsa(const mn_decode_palimpsa_instr &m) {
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < m.K; row += 32) {
        mn_decode_prefetch_line(m.mean + row * (int64_t)m.V);
        mn_decode_prefetch_line(m.importance + row * (int64_t)m.V);
    }
}

/* States and parameters of the dynamics lie together. */
__device__ inline void mn_decode_prefetch_kla(const mn_decode_kla_instr &m) {
    const int bytes = MN_DECODE_KLA_COLUMNS * m.K * (int)sizeof(float);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i * MN_DECODE_LINE < bytes; i += 32) {
        mn_decode_prefetch_line((const char *)m.lam + i * MN_DECODE_LINE);
        mn_decode_prefetch_line((const char *)m.eta + i * MN_DECODE_LINE);
#pragma unroll
        for (int k = 0; k < MN_DECODE_KLA_DYNAMICS; k++) {
            mn_decode_prefetch_line((const char *)m.dynamics[k] + i * MN_DECODE_LINE);
        }
    }
}

/* The group's covariance, and its columns of the mean. */
__device__ inline void mn_decode_prefetch_bayes(const mn_decode_bayes_instr &m) {
    const mn_bayes_args &p = *(const mn_bayes_args *)m.args;
    const int64_t K = m.K;
    const char *const P = (const char *)(mn_row<float>(p.P0, 0, 0, m.head) + m.group * K * K);
    const float *const M = mn_row<float>(p.M0, 0, 0, m.head);
#pragma unroll 1
    for (int64_t at = threadIdx.x % 32 * MN_DECODE_LINE; at < K * K * 4;
         at += 32 * MN_DECODE_LINE) {
        mn_decode_prefetch_line(P + at);
    }
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < m.K && M; row += 32) {
        for (int i = 0; i < m.V; i += MN_DECODE_LINE / 4) {
            mn_decode_prefetch_line(M + row * p.call.V + m.first + i);
        }
    }
}

/* Keys and values older than the token, on their way to the second cache before their turn. */
__device__ inline void mn_decode_prefetch_cache(const mn_decode_attend_instr &p) {
    const mn_decode_attention &a = p.of;
    const attention::mn_attend_span span(a);
    const int lane = threadIdx.x % 32;
    for (int64_t part = p.slot; part < span.parts() && p.n_slots > 0; part += p.n_slots) {
        const int64_t first = span.first + part * attention::MN_STEP_KEYS;
        const int64_t end = min(first + (int64_t)attention::MN_STEP_KEYS, span.position);
#pragma unroll 1
        for (int64_t key = first + lane; key < end; key += 32) {
            const char *const k = (const char *)a.keys + (key * a.J + p.head) * a.K * 2;
            const char *const v = (const char *)a.values + (key * a.J + p.head) * a.V * 2;
            for (int i = 0; i < a.K * 2; i += MN_DECODE_LINE) mn_decode_prefetch_line(k + i);
            for (int i = 0; i < a.V * 2; i += MN_DECODE_LINE) mn_decode_prefetch_line(v + i);
        }
    }
}

/* The same of HyperMLP, in the phases that read them. */
__device__ inline void mn_decode_prefetch_hyper(const mn_decode_hyper_instr &p) {
    const mn_decode_hyper &a = p.of;
    const bool scores = p.phase == MN_HYPER_SCORES;
    if (!scores && p.phase != MN_HYPER_VALUES) return;
    const hyper::step_keys keys(a);
    const char *const from = (const char *)(scores ? a.keys : a.values) +
                             p.head * (scores ? a.key_step : a.value_step) * 2;
    const int64_t row = 2 * (scores ? a.key_row : a.value_row), width = 2 * (scores ? a.K : a.V);
    for (int64_t part = p.slot; part < keys.n_parts; part += p.n_slots) {
        const int64_t first = part * attention::MN_STEP_KEYS;
        const int64_t end = min(first + (int64_t)attention::MN_STEP_KEYS, keys.n - 1);
#pragma unroll 1
        for (int64_t key = first + threadIdx.x % 32; key < end; key += 32) {
            for (int64_t i = 0; i < width; i += MN_DECODE_LINE) {
                mn_decode_prefetch_line(from + key * row + i);
            }
        }
    }
}

enum { MN_DECODE_PREFETCH_SHARE = 8 };

/* Lines of K words that others will write: who looks at one that the second cache does not have
 * waits for memory first. Each block prefetches a part. */
__device__ inline void mn_decode_prefetch_words(const char *words, int K) {
    for (int i = threadIdx.x % 32 * MN_DECODE_PREFETCH_SHARE
         + blockIdx.x % MN_DECODE_PREFETCH_SHARE;
         i * MN_DECODE_PER_LINE < K; i += 32 * MN_DECODE_PREFETCH_SHARE) {
        mn_decode_prefetch_line(words + i * MN_DECODE_LINE);
    }
}

template <typename Stages>
__device__ inline void mn_decode_producer(mn_decode_smem &smem, const char *megakernel,
                                   const mn_decode_entry &start, int words, int n_stages) {
    mn_decode_pipe next = {}, at = {};    // the instruction asked for next; the one at work
    const char *from = megakernel + start.at;
    int bytes = (int)start.bytes;
    mn_decode_load_instr(smem, next, from, bytes);
    next.next_instr();
#pragma unroll 1
    for (int i = 0; i < n_stages; i++) {
        mn_mbarrier_wait(&smem.instr_full[at.instr], at.instr_phase);
        const mn_decode_instr &instr = *(const mn_decode_instr *)smem.instr[at.instr];
        if (i + 1 < n_stages) {
            from += bytes;
            bytes = instr.next_bytes;
            mn_decode_load_instr(smem, next, from, bytes);
            next.next_instr();
        }
        if (instr.kind == MN_DECODE_GEMM) {
            mn_decode_prefetch_words(megakernel + words + instr.gemms.x, instr.gemms.K);
            mn_decode_load_weights(smem, at, instr.gemms);
        } else if (instr.kind == MN_DECODE_RECURRENCE) {
            mn_decode_prefetch_words(megakernel + words + instr.memory.q.at, instr.memory.K);
            mn_decode_prefetch_words(megakernel + words + instr.memory.e.at, instr.memory.K);
            mn_decode_prefetch_state(instr.memory);
        } else if (Stages::has_palimpsa && instr.kind == MN_DECODE_PALIMPSA) {
            mn_decode_prefetch_words(megakernel + words + instr.palimpsa.q.at, instr.palimpsa.K);
            mn_decode_prefetch_words(megakernel + words + instr.palimpsa.k.at, instr.palimpsa.K);
            mn_decode_prefetch_palimpsa(instr.palimpsa);
        } else if (Stages::has_kla && instr.kind == MN_DECODE_KLA) {
            mn_decode_prefetch_kla(instr.kla);
        } else if (Stages::has_bayes && instr.kind == MN_DECODE_BAYES) {
            mn_decode_prefetch_bayes(instr.bayes);
        } else if (Stages::streams && instr.kind == MN_DECODE_STREAM) {
            mn_decode_prefetch_stream(megakernel, instr.stream, words);
            mn_decode_load_stream(smem, at, instr.stream);
        } else if (Stages::attends && instr.kind == MN_DECODE_ATTEND) {
            mn_decode_prefetch_cache(instr.work.attend);
        } else if (Stages::hyper && instr.kind == MN_DECODE_HYPER) {
            mn_decode_prefetch_hyper(instr.work.hyper);
        } else if (mn_decode_takes_ring<Stages>(instr)) {    // until it is done
            mn_mbarrier_wait(&smem.instr_empty[at.instr], at.instr_phase);
        }
        __syncwarp();
        at.next_instr();
    }
}

#endif

#if __CUDA_ARCH__ >= 900

/* What a stage needs of its instruction once the row is there: looked up before. */
struct mn_decode_gemm_params {
    int K, chunks, group, n_col_tiles, n_out_tiles;
    bool norm, gated, sigmoid;
    float inverse_width, epsilon;

    __device__ explicit mn_decode_gemm_params(const mn_decode_gemm_instr &p) {
        const unsigned how = mn_decode_uniform(*(const unsigned *)&p.way);
        const unsigned many = mn_decode_uniform(*(const unsigned *)&p.n_col_tiles);
        K = (int)mn_decode_uniform((unsigned)p.K);
        norm = (how & 255) != MN_DECODE_PLAIN, gated = (how & 255) == MN_DECODE_GATED;
        chunks = how >> 8 & 255, group = how >> 16 & 255, sigmoid = how >> 24;
        n_col_tiles = many & 255, n_out_tiles = many >> 8 & 255;
        inverse_width = p.inverse_width, epsilon = p.epsilon;
    }
};

/* ---- weights --------------------------------------------------------------------------------- */

enum { MN_DECODE_FRAG_VECS = MN_DECODE_WARP_K / 32, MN_DECODE_FRAGS = 6, MN_DECODE_FRAG_GROUP = 3 };

/* A lane's part of a warp's 128 elements of the eight rows of a fragment: row lane / 4, and of each
 * 32 elements eight. */
struct mn_decode_weight_frag {
    uint4 part[MN_DECODE_FRAG_VECS];

    /* Any bits: what may stay unset would be carried from stage to stage. */
    __device__ void discard(void) {
#pragma unroll
        for (int i = 0; i < MN_DECODE_FRAG_VECS; i++) {
            asm("" : "=r"(part[i].x), "=r"(part[i].y), "=r"(part[i].z), "=r"(part[i].w));
        }
    }
};

/* The next `n` pieces of the ring, or as many as `frag` holds. Lane i waits for fragment i,
 * and says that it has been read. Behind the last number of a row lies any other one. */
__device__ inline void mn_decode_load_frags(mn_decode_weight_frag (&frag)[MN_DECODE_FRAGS],
                                            mn_decode_smem &smem,
                                   mn_decode_pipe &place, int n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool owner = lane < min(n, (int)MN_DECODE_FRAGS);
    const int own = place.slot + lane, over = own >= MN_DECODE_SLOTS;
    const int slot = owner ? own - over * MN_DECODE_SLOTS : place.slot;
    const unsigned phase = owner ? place.phase ^ over : place.phase;
    const int at = lane / 4 * MN_DECODE_ROW_STRIDE + warp * (2 * MN_DECODE_WARP_K) + lane % 4 * 16;
    mn_mbarrier_wait(&smem.full[slot], phase);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MN_DECODE_FRAGS; i++) {
        if (i >= n) break;
        const int next = place.slot + i, there = next >= MN_DECODE_SLOTS ? next - MN_DECODE_SLOTS
            : next;
        const unsigned char *from = smem.ring[there] + at;
#pragma unroll
        for (int k = 0; k < MN_DECODE_FRAG_VECS; k++) frag[i].part[k] =
            *((const uint4 *)from + k * 4);
    }
    __syncwarp();
    if (owner) mn_mbarrier_arrive(&smem.empty[slot]);
    place.slot += min(n, (int)MN_DECODE_FRAGS);
    if (place.slot >= MN_DECODE_SLOTS) place.slot -= MN_DECODE_SLOTS, place.phase ^= 1;
}

/* ---- the row --------------------------------------------------------------------------------- */

/* Where a lane's two words of a chunk of the row lie: of four words, which one lane multiplies by,
 * the first and the third are neighbours, and the others. */
enum { MN_DECODE_SECOND = 8, MN_DECODE_CHUNK_STRIDE = 2 * MN_DECODE_CHUNK };    // bytes

__device__ inline void mn_decode_store(uint32_t place, uint2 two) {
    asm volatile("st.shared.u32 [%0], %1;\n\tst.shared.u32 [%0 + %3], %2;" ::"r"(place), "r"(two.x),
                 "r"(two.y), "n"((int)MN_DECODE_SECOND) : "memory");
}

__device__ inline uint32_t mn_decode_row_addr(const mn_decode_smem &smem) {
    return mn_smem_addr((const uint32_t *)smem.row + threadIdx.x / 2 * 4 + threadIdx.x % 2);
}

/* Four elements of a row. */
struct mn_decode_weighted_row {
    float y[4];

    __device__ explicit mn_decode_weighted_row(uint2 x) {
        y[0] = mn_bf16_low(x.x), y[1] = mn_bf16_high(x.x);
        y[2] = mn_bf16_low(x.y), y[3] = mn_bf16_high(x.y);
    }

    /* By four others; adds up the squares of what is normalised. */
    __device__ void weigh(float &squares, uint2 by) {
        const float w[4] = { mn_bf16_low(by.x), mn_bf16_high(by.x), mn_bf16_low(by.y),
                             mn_bf16_high(by.y) };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            squares = fmaf(y[j], y[j], squares);
            y[j] *= w[j];
        }
    }

    __device__ void gate(uint2 x, bool sigmoid) {
        const float z[4] = { mn_bf16_low(x.x), mn_bf16_high(x.x), mn_bf16_low(x.y),
            mn_bf16_high(x.y) };
#pragma unroll
        for (int j = 0; j < 4; j++) y[j] *= mn_sigmoid(z[j]) * (sigmoid ? 1.0f : z[j]);
    }

    /* By the norm over the elements of `lanes` threads. */
    __device__ void divide(float squares, int lanes, float inverse_width, float epsilon) {
#pragma unroll 1
        for (int other = lanes / 2; other > 0; other /= 2) {
            squares += __shfl_xor_sync(0xffffffffu, squares, other);
        }
        const float r = mn_decode_rsqrt(fmaf(squares, inverse_width, epsilon));
#pragma unroll
        for (int j = 0; j < 4; j++) y[j] *= r;
    }

    /* All of it, where there is a gate; what few rows are is looked up here. */
    __device__ void weigh_and_gate(float &squares, uint2 by, uint2 x, const mn_decode_gemm_instr &p,
                                   const mn_decode_gemm_params &way) {
        const bool first = p.gate_first;
        if (__builtin_expect(first, 0)) gate(x, way.sigmoid);
        weigh(squares, by);
        if (!first) gate(x, way.sigmoid);
        const int lanes = p.lanes;
        if (__builtin_expect(lanes > 0, 0)) divide(squares, lanes, way.inverse_width, way.epsilon);
    }

    __device__ uint2 elements(void) const {
        return make_uint2(mn_bf16_pack2(y[0], y[1]), mn_bf16_pack2(y[2], y[3]));
    }
};

/* A lane's words of a row, of its gate, and what it is weighted by, as they are found: asked for
 * before anything else is done. */
struct mn_decode_row_poll {
    enum { STEP = MN_DECODE_CHUNK / MN_DECODE_PER_LINE * MN_DECODE_LINE };    // bytes of a chunk
    mn_decode_word2 x[MN_DECODE_CHUNKS], z;
    uint2 weight;
    int at, gate_at;    // bytes to their words

    __device__ mn_decode_row_poll(const mn_decode_gemm_instr &p, const mn_decode_pipe &place) {
        const int first = threadIdx.x * 4, K = p.K;
        const mn_bf16 *weights = p.weight;
        at = p.x + mn_decode_word_at((unsigned)first),
            gate_at = p.z + mn_decode_word_at((unsigned)first);
#pragma unroll
        for (int c = 0; c < MN_DECODE_CHUNKS; c++) x[c].none();
        z.none();
        weight = make_uint2(0x3f803f80u, 0x3f803f80u);    // ones
        fetch(place, K, p.way == MN_DECODE_GATED);
        if (weights && first < K) weight = *(const uint2 *)(weights + (first & p.wrap));
    }

    __device__ void fetch(const mn_decode_pipe &place, int K, bool gated) {
        const int first = threadIdx.x * 4;
        const char *const words = place.words + at;
#pragma unroll
        for (int c = 0; c < MN_DECODE_CHUNKS; c++) {
            if (first + c * MN_DECODE_CHUNK < K) x[c].fetch(words + c * STEP);
        }
        if (gated && first < K) z.fetch(place.words + gate_at);
    }

    /* The gate of a later chunk, which few rows have: not asked for before. */
    __device__ uint2 gate_of(const mn_decode_pipe &place, int chunk) const {
        mn_decode_word2 gate;
        do {
            gate.fetch(place.words + gate_at + chunk * STEP);
        } while (gate.most() == MN_DECODE_SENTINEL);
        return gate.elements();
    }

    __device__ bool missing(void) const {
        uint32_t most = z.most();
#pragma unroll
        for (int c = 0; c < MN_DECODE_CHUNKS; c++) most = max(most, x[c].most());
        return most == MN_DECODE_SENTINEL;
    }
};

/* The warp's elements to shared memory, zeros behind the last; returns the lane's sum of squares.
 * */
__device__ inline float mn_decode_load_row(mn_decode_smem &smem, const mn_decode_gemm_instr &p,
                                         const mn_decode_gemm_params &way,
                                             const mn_decode_pipe &place,
                                         mn_decode_row_poll &look) {
    const int first = threadIdx.x * 4, K = way.K;
    const mn_bf16 *const weights = p.weight;
    const uint32_t row = mn_decode_materialize(mn_decode_row_addr(smem));
    while (__builtin_expect(__any_sync(0xffffffffu, look.missing()), 0)) {
        look.fetch(place, K, way.gated);
    }
    float squares = 0.0f;
    uint2 y = look.x[0].elements();    // zeros behind the last
    if (way.norm) {
        mn_decode_weighted_row weighted(y);
        if (way.gated) weighted.weigh_and_gate(squares, look.weight, look.z.elements(), p, way);
        else weighted.weigh(squares, look.weight);
        y = weighted.elements();
    }
    mn_decode_store(row, y);
#pragma unroll
    for (int c = 1; c < MN_DECODE_CHUNKS; c++) {
        if (c >= way.chunks) break;
        y = look.x[c].elements();
        if (way.norm) {
            const int k = first + c * MN_DECODE_CHUNK;
            if (weights && k < K) look.weight = *(const uint2 *)(weights + k);
            mn_decode_weighted_row weighted(y);
            if (way.gated) {
                const uint2 gate = k < K ? look.gate_of(place, c) : make_uint2(0, 0);
                weighted.weigh_and_gate(squares, look.weight, gate, p, way);
            } else {
                weighted.weigh(squares, look.weight);
            }
            y = weighted.elements();
        }
        mn_decode_store(row + c * MN_DECODE_CHUNK_STRIDE, y);
    }
    __syncwarp();
    return squares;
}

/* ---- gemms -------------------------------------------------------------------------------- */

/* acc (16,8) += a b. A lane's four words of a row of weights are the left factor as they come: two
 * count as of row lane / 4, two as of row lane / 4 + 8. Even columns of b have the elements that
 * belong to the former, odd ones those of the latter: the sum is acc[0] + acc[3], in all four
 * lanes. */
__device__ inline void mn_decode_mma(float (&acc)[4], const uint4 &a, const uint2 &b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

/* A lane's part of the warp's 128 elements of a chunk of the row, as a right factor. `from`: of the
 * first chunk, in shared memory. */
struct mn_decode_row_frag {
    uint2 part[MN_DECODE_FRAG_VECS];

    __device__ static uint32_t place(const mn_decode_smem &smem) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint2 *row = (const uint2 *)(smem.row + warp * MN_DECODE_WARP_K);
        return mn_smem_addr(row + lane % 4 * 2 + lane / 4 % 2);
    }

    __device__ void get(uint32_t from, int chunk) {
#pragma unroll
        for (int i = 0; i < MN_DECODE_FRAG_VECS; i++) {
            part[i] = mn_decode_load_shared(from + chunk * MN_DECODE_CHUNK_STRIDE + i * 64);
        }
    }
};

/* Four lanes have the same. */
__device__ inline float mn_decode_acc_sum(const float (&acc)[4]) {
    return acc[0] + acc[3];
}

/* Where a stage's gemms stand: the chunk of the next frag, and a column tile's sum up to there. */
struct mn_decode_mainloop_state {
    uint32_t row;    // the lane's, in shared memory
    int chunk;
    float sum, *to;

    /* Pieces from FROM on of a group, some together. A column tile is a chunk: */
    template <int FROM>
    __device__ static void multiply(const mn_decode_row_frag &x,
                                    const mn_decode_weight_frag (&frag)[MN_DECODE_FRAGS],
                                    float (&acc)[MN_DECODE_FRAGS][4]) {
#pragma unroll
        for (int k = 0; k < MN_DECODE_FRAG_VECS; k++) {
#pragma unroll
            for (int i = FROM; i < FROM + MN_DECODE_FRAG_GROUP; i++) {
                mn_decode_mma(acc[i], frag[i].part[k], x.part[k]);
            }
        }
    }

    /* Or a column tile has several, the first of these being `chunk`. */
    template <int FROM>
    __device__ void multiply(const mn_decode_weight_frag (&frag)[MN_DECODE_FRAGS],
                             float (&acc)[MN_DECODE_FRAGS][4], int chunks, int *at) const {
        mn_decode_row_frag x[MN_DECODE_FRAG_GROUP];
#pragma unroll
        for (int i = 0; i < MN_DECODE_FRAG_GROUP; i++) {
            x[i].get(row, *at);
            *at = *at + 1 == chunks ? 0 : *at + 1;
        }
#pragma unroll
        for (int k = 0; k < MN_DECODE_FRAG_VECS; k++) {
#pragma unroll
            for (int i = 0; i < MN_DECODE_FRAG_GROUP; i++) {
                mn_decode_mma(acc[FROM + i], frag[FROM + i].part[k], x[i].part[k]);
            }
        }
    }

    /* A group, of which `left` are there. Meanwhile squares of the row are added up, and kept at
     * `to_squares`. */
    __device__ void multiply(const mn_decode_weight_frag (&frag)[MN_DECODE_FRAGS],
                             float (&acc)[MN_DECODE_FRAGS][4], int chunks, int left, float squares,
                             float *to_squares) const {
        enum { FIRST = 0, SECOND = MN_DECODE_FRAG_GROUP };
        if (chunks == 1) {
            mn_decode_row_frag x;
            x.get(row, 0);
            multiply<FIRST>(x, frag, acc);
            *to_squares = mn_warp_sum(squares);
            if (left > SECOND) multiply<SECOND>(x, frag, acc);
        } else {
            int at = chunk;
            multiply<FIRST>(frag, acc, chunks, &at);
            *to_squares = mn_warp_sum(squares);
            if (left > SECOND) multiply<SECOND>(frag, acc, chunks, &at);
        }
    }

    /* Sums of column tiles of a chunk. */
    __device__ void store(const float (&acc)[MN_DECODE_FRAGS][4], int left) {
        enum { COL_TILE = MN_DECODE_TILE_N * (MN_DECODE_WARPS + 2) };
        const int n = threadIdx.x % 4 == 0 ? left : 0;
#pragma unroll
        for (int i = 0; i < MN_DECODE_FRAGS; i++) {
            if (i < n) to[i * COL_TILE] = mn_decode_acc_sum(acc[i]);
        }
        to += MN_DECODE_FRAGS * COL_TILE;
    }

    /* And of several. */
    __device__ void store(const float (&acc)[MN_DECODE_FRAGS][4], int chunks, int left) {
        enum { COL_TILE = MN_DECODE_TILE_N * (MN_DECODE_WARPS + 2) };
#pragma unroll
        for (int i = 0; i < MN_DECODE_FRAGS; i++) {
            if (i >= left) break;
            sum += mn_decode_acc_sum(acc[i]);
            chunk = chunk + 1 == chunks ? 0 : chunk + 1;
            if (chunk > 0) continue;
            if (threadIdx.x % 4 == 0) *to = sum;
            to += COL_TILE;
            sum = 0.0f;
        }
    }
};

/* All column tiles, chunk by chunk, some pieces at a time, of which the first ones are taken
 * before the row is there; the warp's sums and squares to shared memory. */
__device__ inline void mn_decode_mainloop(mn_decode_smem &smem, const mn_decode_gemm_instr &p,
                                              const mn_decode_gemm_params &way,
                                                  mn_decode_pipe &place,
                                              mn_decode_row_poll &look) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = way.chunks;
    mn_decode_mainloop_state at = { mn_decode_materialize(mn_decode_row_frag::place(smem)), 0, 0.0f,
                           &smem.sums[place.buf][0][lane / 4][warp] };
    float squares = 0.0f;
    bool fresh = true;
#pragma unroll 1
    for (int left = way.n_col_tiles * chunks; left > 0; left -= MN_DECODE_FRAGS) {
        mn_decode_weight_frag frag[MN_DECODE_FRAGS];
        float acc[MN_DECODE_FRAGS][4] = {};
#pragma unroll
        for (int i = 0; i < MN_DECODE_FRAGS; i++) frag[i].discard();
        mn_decode_load_frags(frag, smem, place, left);
        if (fresh) squares = mn_decode_load_row(smem, p, way, place, look);
        at.multiply(frag, acc, chunks, left, squares, &smem.squares[place.buf][warp]);
        if (chunks == 1) at.store(acc, left);
        else at.store(acc, chunks, left);
        fresh = false;
    }
}

/* ---- the stage ------------------------------------------------------------------------------- */

/* Where a lane finds what warps 2 (lane % 4) and the next have made: looked up before the block
 * meets. */
struct mn_decode_partials {
    uint32_t sums[2], squares;    // in shared memory

    __device__ mn_decode_partials(const mn_decode_smem &smem, int buf, int one, int other) {
        const int lane = threadIdx.x % 32, column = lane / 4, warp = lane % 4 * 2;
        sums[0] = mn_decode_materialize(mn_smem_addr(&smem.sums[buf][one][column][warp]));
        sums[1] = mn_decode_materialize(mn_smem_addr(&smem.sums[buf][other][column][warp]));
        squares = mn_smem_addr(&smem.squares[buf][warp]);
    }

    __device__ static float2 get(uint32_t place) {
        const uint2 two = mn_decode_load_shared(place);
        return make_float2(__uint_as_float(two.x), __uint_as_float(two.y));
    }
};

/* Sums of an output tile's two column tiles, of which lanes have parts: of a column, in all four
 * lanes. Norms of the row, or of groups of it, divide by the root of a mean of squares. */
struct mn_decode_reduced {
    float first, second;
    float2 factors;              // of the elements of warps 2 (lane % 4) and the next

    __device__ static float add_up(float2 parts, float2 factor) {
        float sum = fmaf(parts.x, factor.x, parts.y * factor.y);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    }

    __device__ void factors_of(const mn_decode_gemm_params &way, float2 two) {
        const float two_warps = two.x + two.y;
        const float four = two_warps + __shfl_xor_sync(0xffffffffu, two_warps, 1);
        const float all = four + __shfl_xor_sync(0xffffffffu, four, 2);
        const float sum = way.group > 4 ? all : way.group > 2 ? four : two_warps;
        const float one = way.group > 1 ? sum : two.x, other = way.group > 1 ? sum : two.y;
        factors.x = mn_decode_rsqrt(fmaf(one, way.inverse_width, way.epsilon));
        factors.y = mn_decode_rsqrt(fmaf(other, way.inverse_width, way.epsilon));
    }

    /* One norm for all: its factor is not waited for. */
    __device__ mn_decode_reduced(const mn_decode_gemm_params &way,
                                 const mn_decode_partials &found) {
        const float2 one = found.get(found.sums[0]), other = found.get(found.sums[1]);
        const float2 squares = found.get(found.squares), plain = { 1.0f, 1.0f };
        if (way.norm && way.group > 4) {
            factors_of(way, squares);
            first = add_up(one, plain) * factors.x, second = add_up(other, plain) * factors.x;
        } else {
            factors = plain;
            if (way.norm && way.group > 0) factors_of(way, squares);
            first = add_up(one, factors), second = add_up(other, factors);
        }
    }
};

/* The row as others find it. */
__device__ inline void mn_decode_store_row(mn_decode_smem &smem, const mn_decode_gemm_instr &p,
                                           const mn_decode_pipe &place, float2 factors) {
    const int warp = threadIdx.x / 32, handoff = p.row_handoff;
    const uint32_t *row = (const uint32_t *)smem.row + threadIdx.x / 2 * 4 + threadIdx.x % 2;
    const float r = __shfl_sync(0xffffffffu, warp % 2 ? factors.y : factors.x, warp / 2);
#pragma unroll 1
    for (int k = threadIdx.x * 4; k < p.K; k += MN_DECODE_CHUNK,
         row += MN_DECODE_CHUNK_STRIDE / 4) {
        const uint32_t one = row[0], two = row[MN_DECODE_SECOND / 4];
        const uint2 y = make_uint2(mn_bf16_pack2(mn_bf16_low(one) * r, mn_bf16_high(one) * r),
                                   mn_bf16_pack2(mn_bf16_low(two) * r, mn_bf16_high(two) * r));
        if (handoff >= 0) {
            mn_decode_store_word(place, handoff + mn_decode_word_at((unsigned)k), y.x);
            mn_decode_store_word(place, handoff + mn_decode_word_at((unsigned)k + 2), y.y);
        }
        *(uint2 *)(p.row + k) = y;
    }
}

__device__ inline void mn_decode_run_gemms(mn_decode_smem &smem, const mn_decode_instr &instr,
                                       mn_decode_pipe &place) {
    const mn_decode_gemm_instr &p = instr.gemms;
    const int warp = threadIdx.x / 32, buf = place.buf;
    mn_decode_row_poll look(p, place);
    const mn_decode_gemm_params way(p);
    const bool has = mn_decode_uniform(warp < way.n_out_tiles) != 0;
    const mn_decode_out_tile &out_tile = p.out_tile[has ? warp : 0];
    const mn_decode_tile_header kind(out_tile);
    const bool two = kind.n_col_tiles() > 1;
    const mn_decode_partials found(smem, buf, kind.col_tile(0), kind.col_tile(two));
    mn_decode_epilogue finish(out_tile, kind, place, has);
    mn_decode_mainloop(smem, p, way, place, look);
    if (has) finish.wait_plus();
    mn_decode_consumer_sync();
    const mn_decode_reduced sums(way, found);
    if (has) {
        const mn_decode_epi_instr *epis =
            (const mn_decode_epi_instr *)((const char *)&instr + instr.epis_at);
        finish.run(sums.first, two ? sums.second : 1.0f, epis + out_tile.first_epi,
                   smem.values[warp]);
    }
    if (__builtin_expect(way.norm && p.row, 0)) mn_decode_store_row(smem, p, place, sums.factors);
    place.buf ^= 1;
}

#endif

enum { THREADS = MN_DECODE_THREADS + 32 };

#if __CUDA_ARCH__ >= 900

__device__ static void init_barriers(mn_decode_smem &smem) {
    for (int i = 0; i < MN_DECODE_SLOTS; i++) {
        mn_mbarrier_init(&smem.full[i], 1);
        mn_mbarrier_init(&smem.empty[i], MN_DECODE_WARPS);
    }
    for (int i = 0; i < MN_DECODE_INSTRS; i++) {
        mn_mbarrier_init(&smem.instr_full[i], 1);
        mn_mbarrier_init(&smem.instr_empty[i], MN_DECODE_WARPS);
    }
    mn_mbarrier_init_fence();
}

/* Numbers from outside to words, two a thread at a time; of row `row` of a table. */
__device__ static void copy(const mn_decode_copy_instr &p, const mn_decode_pipe &place, int row) {
#pragma unroll 1
    for (int i = 0; i < p.n; i++) {
        const mn_decode_copy &c = p.of[i];
        const mn_bf16 *from = c.from + row * c.row;
#pragma unroll 1
        for (int k = threadIdx.x * 2; k < c.count; k += 2 * MN_DECODE_THREADS) {
            const bool two = k + 1 < c.count;
            const mn_bf16 low = from[k], high = two ? from[k + 1] : low;
            mn_decode_store_word(place, c.words + mn_decode_word_at(k),
                                 mn_bf16_pack2(mn_float(low), mn_float(high)));
            if (c.to) c.to[k] = low;
            if (c.to && two) c.to[k + 1] = high;
        }
    }
}

/* The words of the next run, which have been read in the last one; while the first ones of this run
 * are on their way. */
__device__ static void discard(char *words, int bytes) {
    const uint4 sentinel = { MN_DECODE_SENTINEL, MN_DECODE_SENTINEL, MN_DECODE_SENTINEL,
        MN_DECODE_SENTINEL };
    const int first = (int)(blockIdx.x * MN_DECODE_THREADS + threadIdx.x);
#pragma unroll 1
    for (int i = first; i < bytes / 16; i += (int)gridDim.x * MN_DECODE_THREADS) {
        ((uint4 *)words)[i] = sentinel;
    }
}

/* Waits for the next instruction; and says that it has been done. */
__device__ static const mn_decode_instr &begin(const mn_decode_smem &smem,
                                               const mn_decode_pipe &place) {
    mn_mbarrier_wait(&smem.instr_full[place.instr], place.instr_phase);
    return *(const mn_decode_instr *)smem.instr[place.instr];
}

__device__ static void end(mn_decode_smem &smem, mn_decode_pipe &place) {
    mn_mbarrier_arrive_warp(&smem.instr_empty[place.instr]);
    place.next_instr();
}

/* All stages; the first one copies. `row`: of a table, the megakernel's. */
template <typename Stages>
__device__ static void work(mn_decode_smem &smem, const char *words, int row, int n_stages) {
    mn_decode_pipe place = {};
    place.words = words;
    copy(begin(smem, place).copy, place, row);
    end(smem, place);
#pragma unroll 1
    for (int i = 1; i < n_stages; i++) {
        const mn_decode_instr &instr = begin(smem, place);
        const bool waits = !Stages::attends || instr.kind != MN_DECODE_ATTEND;    // or by itself
        if (Stages::works && waits && instr.sync) mn_decode_grid_sync(smem.header, instr.sync);
        if (instr.kind == MN_DECODE_GEMM) mn_decode_run_gemms(smem, instr, place);
        else if (instr.kind == MN_DECODE_RECURRENCE) mn_decode_recurrence_step(smem, instr.memory,
                                                                               place);
        else if (Stages::has_palimpsa && instr.kind == MN_DECODE_PALIMPSA) {
            mn_decode_palimpsa_step(smem, instr.palimpsa, place);
        } else if (Stages::has_kla && instr.kind == MN_DECODE_KLA) {
            mn_decode_kla_step(instr.kla, place);
        } else if (Stages::has_bayes && instr.kind == MN_DECODE_BAYES) {
            mn_decode_bayes_step(smem, instr.bayes, place);
        } else if (Stages::streams && instr.kind == MN_DECODE_STREAM) {
            mn_decode_run_stream(smem, instr.stream, place);
        } else if (Stages::works && mn_decode_is_work(instr.kind)) {
            mn_decode_run_work<Stages>(smem, instr, place);
        }
        end(smem, place);
    }
}

/* The last block to leave counts the run. */
__device__ static void leave(mn_decode_header *head, unsigned run) {
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(&head->left, 1u) + 1 < gridDim.x) return;
    head->left = head->arrived = 0;
    head->run = run;
}

#endif

/* Stages: which of those of megakernel_steps.cuh it has. */
template <typename Stages>
__global__ void __launch_bounds__(THREADS, 1)
decode_megakernel(char *megakernel, int n_stages, int handoff_at, int words, int ragged) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_decode_smem &smem = *(mn_decode_smem *)bytes;
    mn_decode_header *head = (mn_decode_header *)megakernel;
    const unsigned run = *(volatile unsigned *)&head->run + 1;
    const mn_decode_entry start = ((const mn_decode_entry *)(head + 1))[blockIdx.x];
    if (threadIdx.x == 0) init_barriers(smem);
    if (Stages::works && threadIdx.x == 0) smem.header = head;
    if (ragged) mn_decode_clear_ring(smem, THREADS);
    __syncthreads();
    int row = 0;    // far away: asked for first
    if ((int)blockIdx.x < head->n_gather_blocks) row = *(const volatile int32_t *)head->index;
    const int now = (int)(run % MN_DECODE_WORD_SETS) * words;
    if (threadIdx.x >= MN_DECODE_THREADS) mn_decode_producer<Stages>(smem, megakernel, start, now,
                                                                     n_stages);
    else {
        discard(megakernel + handoff_at + (words - now), words);
        work<Stages>(smem, megakernel + now, row, n_stages);
    }
    leave(head, run);
#endif
}

extern "C" int mn_megakernel_blocks(void) {
    const mn_device_props m = mn_device_props_current();
    const bool serves = m.coop_launch && m.major >= 9
        && m.shared_bytes >= (int)sizeof(mn_decode_smem);
    return serves ? m.processors : 0;
}

typedef void (*megakernel_instance)(char *, int, int, int, int);

/* Who has a step has those of the same folder, which models take together. Memories that are
 * stages without a barrier, and attention without small works, have instances of their own: beside
 * small works the registers of products do not suffice. */
static megakernel_instance instance_of(const mn_decode_launch_args *given) {
    const unsigned steps = given->steps;
    constexpr unsigned palimpsa = 1u << MN_DECODE_STEP_importance;
    constexpr unsigned kla = 1u << MN_DECODE_STEP_moebius, bayes = 1u << MN_DECODE_STEP_bayes;
    const bool caches = given->attends || given->hyper || given->streams;
    const bool alone = !given->works && !given->streams;
    if (alone && steps == 0) return decode_megakernel<mn_decode_stages<false, false, false, 0>>;
    if (!given->works && steps == 0) {
        return decode_megakernel<mn_decode_stages<false, false, false, 0, false, true>>;
    }
    if (alone && steps == palimpsa) {
        return decode_megakernel<mn_decode_stages<false, false, false, palimpsa>>;
    }
    if (alone && steps == kla) {
        return decode_megakernel<mn_decode_stages<false, false, false, kla>>;
    }
    if (alone && steps == bayes) {
        return decode_megakernel<mn_decode_stages<false, false, false, bayes>>;
    }
    if (steps == 0 && !caches) return decode_megakernel<mn_decode_stages<true, false, false, 0>>;
    if (steps == 0 && !given->hyper && !given->small) {
        return decode_megakernel<mn_decode_stages<true, true, false, 0, false>>;
    }
    if (steps == 0 && !given->hyper) {
        return decode_megakernel<mn_decode_stages<true, true, false, 0>>;
    }
    if (steps == 0 && !given->attends && !given->streams) {
        return decode_megakernel<mn_decode_stages<true, false, true, 0>>;
    }
#define DECODE_STEP(op, folder, columns, results, memory)                                          \
    if (!caches && (steps & ~mn_decode_steps_of(#folder)) == 0) {                                  \
        return decode_megakernel<mn_decode_stages<true, false, false,                              \
                                                  mn_decode_steps_of(#folder)>>;                   \
    }
#include "kernels/decode_steps.def"
#undef DECODE_STEP
    return decode_megakernel<mn_decode_stages<true, true, true, MN_DECODE_ALL_STEPS>>;
}

extern "C" int mn_megakernel_start(const mn_decode_launch_args *given, void *megakernel,
                                   void *stream) {
    const megakernel_instance kernel = instance_of(given);
    cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            (int)sizeof(mn_decode_smem));
    if (code != cudaSuccess) return (int)code;
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3((unsigned)mn_megakernel_blocks()), how.blockDim = dim3(THREADS);
    how.dynamicSmemBytes = sizeof(mn_decode_smem), how.stream = (cudaStream_t)stream;
    how.attrs = &together, how.numAttrs = 1;
    return (int)cudaLaunchKernelEx(&how, kernel, (char *)megakernel, given->n_stages,
                                   given->handoff_at, given->words, given->ragged);
}

}    // namespace mneme::decode
