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
struct mn_few_rows_of {
    mn_few_four at[2];

    __device__ void ask(const char *words) {
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
            const uint2 two = at[i].numbers();
            x[4 * i] = mn_few_low(two.x), x[4 * i + 1] = mn_few_high(two.x);
            x[4 * i + 2] = mn_few_low(two.y), x[4 * i + 3] = mn_few_high(two.y);
        }
    }
};

/* All that a thread waits for. */
struct mn_few_inputs_of {
    mn_few_rows_of q, e, g;
    mn_few_one v, beta, even;

    /* As if all had been found. */
    __device__ void none(void) {
        q.none();
        e.none();
        g.none();
        v.none();
        beta.none();
        even.none();
    }

    __device__ void ask(const mn_few_memory_note &m, const mn_few_place &place, int row,
                        int column) {
        const char *const at_q = place.words + mn_few_word_from(m.q.at, row);
        const char *const at_e = place.words + mn_few_word_from(m.e.at, row);
        const char *const at_g = place.words + mn_few_word_from(m.g.at, m.by_channel ? row : 0);
        const char *const at_v = place.words + mn_few_word_from(m.v.at, column);
        const char *const at_beta = place.words + m.beta.at;
        const bool channels = m.by_channel, evenly = m.has_g && !m.by_channel, with = m.has_beta;
        uint32_t most;
        do {
            q.ask(at_q);
            e.ask(at_e);
            v.ask(at_v);
            if (channels) g.ask(at_g);
            if (evenly) even.ask(at_g);
            if (with) beta.ask(at_beta);
            most = max(max(q.most(), e.most()), max(g.most(), v.most()));
            most = max(most, max(even.most(), beta.most()));
        } while (most == MN_FEW_UNSAID);
    }
};

/* 1 / length */
template <typename FRONT>
__device__ inline float mn_few_unit_length(const FRONT &front, float squares) {
    return front.there ? fminf(mn_few_rsqrt(squares + front.plus), front.most) : 1.0f;
}

/* The row as others would find it. */
__device__ inline void mn_few_keep_front(mn_bf16 *to, const float (&x)[8], float factor) {
    uint4 y;
    y.x = mn_few_two(x[0] * factor, x[1] * factor), y.y = mn_few_two(x[2] * factor, x[3] * factor);
    y.z = mn_few_two(x[4] * factor, x[5] * factor), y.w = mn_few_two(x[6] * factor, x[7] * factor);
    *(uint4 *)to = y;
}

/* Sums over all rows: of a column, S'^T e and S'^T q; q.e and squares of q and e. */
struct mn_few_sums {
    float e, q, qe, qq, ee;

    __device__ void gather(mn_few_block &room, int half) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int lanes = 8; lanes < 32; lanes *= 2) {
            e += __shfl_xor_sync(0xffffffffu, e, lanes);
            q += __shfl_xor_sync(0xffffffffu, q, lanes);
            qe += __shfl_xor_sync(0xffffffffu, qe, lanes);
            qq += __shfl_xor_sync(0xffffffffu, qq, lanes);
            ee += __shfl_xor_sync(0xffffffffu, ee, lanes);
        }
        if (lane < MN_FEW_TILE) room.columns[half][warp][lane] = make_float2(e, q);
        if (lane == 0) room.shared[half][warp] = make_float4(qe, qq, ee, 0.0f);
        mn_few_meet();
        e = q = qe = qq = ee = 0.0f;
#pragma unroll
        for (int i = 0; i < MN_FEW_WARPS; i++) {
            const float2 two = room.columns[half][i][lane % MN_FEW_TILE];
            const float4 three = room.shared[half][i];
            e += two.x, q += two.y, qe += three.x, qq += three.y, ee += three.z;
        }
    }
};

__device__ inline void mn_few_recall(mn_few_block &room, const mn_few_memory_note &m,
                                     mn_few_place &place) {
    const int lane = threadIdx.x % 32, column = lane % MN_FEW_TILE;
    const int row = threadIdx.x / 32 * 32 + lane / MN_FEW_TILE * 8;
    const bool inside = row < m.K;
    float S[8] = {}, q[8] = {}, e[8] = {}, decay[8];
    float *state = m.state + row * (int64_t)m.V + column;
    mn_few_inputs_of in;
    in.none();
    mn_few_sums sums = {};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (inside) S[j] = __ldcg(state + j * m.V);
    }
    const auto front_q = m.front[0], front_e = m.front[1];
    const float scale = m.scale;
    const bool erases = m.erases, by_channel = m.by_channel, has_g = m.has_g && !by_channel;
    const bool has_beta = m.has_beta;
    const int odd_g = m.g.odd, odd_beta = m.beta.odd, o_words = m.o_words;
    float v = 0.0f, strength = 1.0f;
    if (inside || threadIdx.x < MN_FEW_TILE) {
        in.ask(m, place, inside ? row : 0, column);
        v = in.v.number(column % 2);
        if (has_beta) strength = in.beta.number(odd_beta);
    }
    __syncwarp();
    if (inside) {
        in.q.get(q);
        in.e.get(e);
        const float even = has_g ? mn_few_exp(in.even.number(odd_g)) : 1.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) decay[j] = even;
        if (by_channel) {
            in.g.get(decay);
#pragma unroll
            for (int j = 0; j < 8; j++) decay[j] = mn_few_exp(decay[j]);
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
    sums.gather(room, place.half);
    const float by_q = mn_few_unit_length(front_q, sums.qq);
    const float by_e = mn_few_unit_length(front_e, sums.ee);
    const float write = strength * by_e * (erases ? v - by_e * sums.e : v);
    const float o = scale * by_q * fmaf(sums.qe, write, sums.q);
    if (threadIdx.x < 32) {
        const uint32_t two = mn_few_two(o, __shfl_down_sync(0xffffffffu, o, 1));
        if (lane < MN_FEW_TILE && lane % 2 == 0 && o_words >= 0) {
            mn_few_say(place, o_words + lane * 2, two);
        }
        if (lane < MN_FEW_TILE) m.o[lane] = __float2bfloat16_rn(o);
    }
    if (inside) {
#pragma unroll
        for (int j = 0; j < 8; j++) state[j * m.V] = fmaf(e[j], write, S[j]);
        if (column == 0 && front_q.to) mn_few_keep_front(front_q.to + row, q, by_q);
        if (column == 0 && front_e.to) mn_few_keep_front(front_e.to + row, e, by_e);
    }
    place.half ^= 1;
}

#endif

#endif
