/* few_recall.cuh - the recurrence of a matrix memory for one token as a stage (kernels/few.h).
 *
 *   S' = diag(exp g) S;  r = v - S'^T e;  S = S' + w r';  o = scale S'^T q + scale (q.w) r
 *
 * All that needs a sum over rows of the state is summed at once: S'^T e, S'^T q, q.w and the
 * squares of q and e. A block has eight columns of one memory, a thread eight rows of one of them.
 * What norms of q and e divide by is a factor of the sums. */
#ifndef MN_KERNELS_CUDA_FEW_RECALL_CUH
#define MN_KERNELS_CUDA_FEW_RECALL_CUH

#include "kernels/cuda/few_program.cuh"

#if __CUDA_ARCH__ >= 900

/* A thread's eight rows of a vector. */
struct mn_few_rows_of {
    mn_few_four at[2];

    __device__ void ask(const mn_few_source &from, const char *program, int row) {
        at[0].ask(from, program, row);
        at[1].ask(from, program, row + 4);
    }

    __device__ bool there(const mn_few_source &from, unsigned run) const {
        return at[0].there(from, run) && at[1].there(from, run);
    }

    __device__ void get(float (&x)[8], const mn_few_source &from) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint2 two = at[i].numbers(from);
            x[4 * i] = mn_few_low(two.x), x[4 * i + 1] = mn_few_high(two.x);
            x[4 * i + 2] = mn_few_low(two.y), x[4 * i + 3] = mn_few_high(two.y);
        }
    }
};

/* All that a thread waits for. */
struct mn_few_inputs_of {
    mn_few_rows_of q, e, w, g;
    mn_few_one v, beta, even;

    __device__ void ask(const mn_few_memory_note &m, const mn_few_place &place, int row,
                        int column) {
        bool there;
        do {
            q.ask(m.q, place.program, row);
            e.ask(m.e, place.program, row);
            if (m.has_w) w.ask(m.w, place.program, row);
            if (m.by_channel) g.ask(m.g, place.program, row);
            else if (m.has_g) even.ask(m.g, place.program, m.g.odd);
            v.ask(m.v, place.program, column);
            if (m.has_beta) beta.ask(m.beta, place.program, m.beta.odd);
            there = q.there(m.q, place.run) && e.there(m.e, place.run);
            there = there && v.there(m.v, place.run);
            if (m.has_w) there = there && w.there(m.w, place.run);
            if (m.by_channel) there = there && g.there(m.g, place.run);
            else if (m.has_g) there = there && even.there(m.g, place.run);
            if (m.has_beta) there = there && beta.there(m.beta, place.run);
        } while (!there);
    }
};

/* Numbers by a norm's weights, of which the sum of squares is taken before. */
template <typename FRONT>
__device__ inline float mn_few_front(float (&x)[8], const FRONT &front, int row) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) squares = fmaf(x[j], x[j], squares);
    if (!front.there || !front.weight) return squares;
    const uint4 raw = *(const uint4 *)(front.weight + row);
    const uint32_t words[4] = { raw.x, raw.y, raw.z, raw.w };
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x[2 * j] *= mn_few_low(words[j]);
        x[2 * j + 1] *= mn_few_high(words[j]);
    }
    return squares;
}

/* 1 / length */
template <typename FRONT>
__device__ inline float mn_few_unit_length(const FRONT &front, float squares, int K) {
    if (!front.there) return 1.0f;
    if (!front.is_l2) return rsqrtf(squares / (float)K + front.epsilon);
    if (front.root) return rsqrtf(squares + front.epsilon);
    return 1.0f / fmaxf(sqrtf(squares), front.epsilon);
}

/* The row as others would find it. */
__device__ inline void mn_few_keep_front(mn_bf16 *to, const float (&x)[8], float factor) {
    uint4 y;
    y.x = mn_few_two(x[0] * factor, x[1] * factor), y.y = mn_few_two(x[2] * factor, x[3] * factor);
    y.z = mn_few_two(x[4] * factor, x[5] * factor), y.w = mn_few_two(x[6] * factor, x[7] * factor);
    *(uint4 *)to = y;
}

/* Sums over all rows: of a column, S'^T e and S'^T q; q.w and squares of q and e. */
struct mn_few_sums {
    float e, q, qw, qq, ee;

    __device__ void gather(mn_few_block &room, int half) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int lanes = 8; lanes < 32; lanes *= 2) {
            e += __shfl_xor_sync(0xffffffffu, e, lanes);
            q += __shfl_xor_sync(0xffffffffu, q, lanes);
            qw += __shfl_xor_sync(0xffffffffu, qw, lanes);
            qq += __shfl_xor_sync(0xffffffffu, qq, lanes);
            ee += __shfl_xor_sync(0xffffffffu, ee, lanes);
        }
        if (lane < MN_FEW_TILE) room.columns[half][warp][lane] = make_float2(e, q);
        if (lane == 0) room.shared[half][warp] = make_float4(qw, qq, ee, 0.0f);
        mn_few_meet();
        e = q = qw = qq = ee = 0.0f;
#pragma unroll
        for (int i = 0; i < MN_FEW_WARPS; i++) {
            const float2 two = room.columns[half][i][lane % MN_FEW_TILE];
            const float4 three = room.shared[half][i];
            e += two.x, q += two.y, qw += three.x, qq += three.y, ee += three.z;
        }
    }
};

__device__ inline void mn_few_recall(mn_few_block &room, const mn_few_memory_note &m,
                                     mn_few_place &place) {
    const int lane = threadIdx.x % 32, column = lane % MN_FEW_TILE;
    const int row = threadIdx.x / 32 * 32 + lane / MN_FEW_TILE * 8;
    const bool inside = row < m.K;
    float S[8] = {}, q[8] = {}, e[8] = {}, w[8] = {}, decay[8];
    float *state = m.state + row * (int64_t)m.V + column;
    mn_few_inputs_of in;
    mn_few_sums sums = {};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (inside) S[j] = __ldcg(state + j * (int64_t)m.V);
    }
    float v = 0.0f, strength = 1.0f;
    if (inside || threadIdx.x < MN_FEW_TILE) {
        in.ask(m, place, inside ? row : 0, column);
        v = in.v.number(m.v, column);
        if (m.has_beta) strength = in.beta.number(m.beta, m.beta.odd);
    }
    __syncwarp();
    if (inside) {
        in.q.get(q, m.q);
        in.e.get(e, m.e);
        sums.qq = mn_few_front(q, m.front[0], row);
        sums.ee = mn_few_front(e, m.front[1], row);
        if (m.has_w) in.w.get(w, m.w);
        if (m.by_channel) in.g.get(decay, m.g);
        const float even = m.has_g && !m.by_channel ? expf(in.even.number(m.g, m.g.odd)) : 1.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (!m.has_w) w[j] = e[j];
            S[j] *= m.by_channel ? expf(decay[j]) : even;
            sums.e = fmaf(e[j], S[j], sums.e);
            sums.q = fmaf(q[j], S[j], sums.q);
            sums.qw = fmaf(q[j], w[j], sums.qw);
        }
    }
    sums.gather(room, place.half);
    const float by_q = mn_few_unit_length(m.front[0], sums.qq, m.K);
    const float by_e = mn_few_unit_length(m.front[1], sums.ee, m.K);
    const float by_w = strength * (m.has_w ? 1.0f : by_e);
    const float residual = m.erases ? v - by_e * sums.e : v;
    const float o = m.scale * fmaf(by_q * by_w * sums.qw, residual, by_q * sums.q);
    if (threadIdx.x < 32) {
        const uint32_t own = mn_few_bits(o), right = __shfl_down_sync(0xffffffffu, own, 1);
        if (lane < MN_FEW_TILE && lane % 2 == 0 && m.o_words >= 0) {
            mn_few_say((char *)place.program + m.o_words + lane * 4, own | right << 16, place.run);
        }
        if (lane < MN_FEW_TILE) m.o[lane] = __float2bfloat16_rn(o);
    }
    if (inside) {
        const float write = by_w * residual;
#pragma unroll
        for (int j = 0; j < 8; j++) state[j * (int64_t)m.V] = fmaf(w[j], write, S[j]);
        if (column == 0 && m.front[0].to) mn_few_keep_front(m.front[0].to + row, q, by_q);
        if (column == 0 && m.front[1].to) mn_few_keep_front(m.front[1].to + row, e, by_e);
    }
    place.half ^= 1;
}

#endif

#endif
