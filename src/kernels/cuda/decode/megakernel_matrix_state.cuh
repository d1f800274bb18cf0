/* megakernel_matrix_state.cuh - the recurrence of a matrix memory for one token as a stage
 * (kernels/decode.h).
 *
 *   S' = diag(exp g) S;  w = beta (v - S'^T e);  S = S' + e w';  o = scale S'^T q + scale (q.e) w
 *
 * All that needs a sum over rows of the state is summed at once: S'^T e, S'^T q, q.e and the
 * squares of q and e. A block has eight columns of one memory, a thread eight rows of one of them.
 * What norms of q and e divide by is a factor of the sums. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_MATRIX_STATE_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_MATRIX_STATE_CUH

#include "kernels/cuda/decode/megakernel.cuh"

#if __CUDA_ARCH__ >= 900

/* A thread's eight rows of a vector. */
struct mn_decode_word4 {
    mn_decode_word2 at[2];

    __device__ void fetch(const char *words) {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(at[0].a), "=r"(at[0].b), "=r"(at[1].a), "=r"(at[1].b) : "l"(words)
                     : "memory");
    }

    __device__ void none(void) {
        at[0].none();
        at[1].none();
    }

    __device__ uint32_t most(void) const {
        return max(at[0].most(), at[1].most());
    }

    __device__ void get(float (&x)[8]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint2 two = at[i].elements();
            x[4 * i] = mn_bf16_low(two.x), x[4 * i + 1] = mn_bf16_high(two.x);
            x[4 * i + 2] = mn_bf16_low(two.y), x[4 * i + 3] = mn_bf16_high(two.y);
        }
    }
};

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

/* 1 / length */
template <typename NORM>
__device__ inline float mn_decode_l2_scale(const NORM &front, float squares) {
    return front.there ? fminf(mn_decode_rsqrt(squares + front.plus), front.most) : 1.0f;
}

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

#endif
