/* few_multiply.cuh - products of one row with several weights as a stage (kernels/few.h).
 *
 * A warp has 128 numbers of each chunk of 1024, of the row and of all weights: it makes them
 * itself, as soon as they are there, and its sums for all strips; then the block meets, once, and a
 * warp adds up the eight sums of each column of a unit. What a norm divides by is a factor of the
 * sums: nothing waits for it. */
#ifndef MN_KERNELS_CUDA_FEW_MULTIPLY_CUH
#define MN_KERNELS_CUDA_FEW_MULTIPLY_CUH

#include "kernels/cuda/few_ending.cuh"

#if __CUDA_ARCH__ >= 900

/* ---- the row --------------------------------------------------------------------------------- */

/* Four numbers of bf16 by four, gated or not; adds the squares of x up. */
__device__ inline uint2 mn_few_weigh(float &squares, const mn_few_products_note &p, uint2 x,
                                     uint2 weight, uint2 gate) {
    float y[4] = { mn_few_low(x.x), mn_few_high(x.x), mn_few_low(x.y), mn_few_high(x.y) };
    const float by[4] = { mn_few_low(weight.x), mn_few_high(weight.x), mn_few_low(weight.y),
                          mn_few_high(weight.y) };
#pragma unroll
    for (int j = 0; j < 4; j++) {
        squares = fmaf(y[j], y[j], squares);
        y[j] *= by[j];
    }
    if (p.way == MN_FEW_GATED) {
        const float z[4] = { mn_few_low(gate.x), mn_few_high(gate.x), mn_few_low(gate.y),
                             mn_few_high(gate.y) };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            y[j] *= mn_fn_sigmoid<true>(z[j]) * (p.sigmoid ? 1.0f : z[j]);
        }
    }
    return make_uint2(mn_few_two(y[0], y[1]), mn_few_two(y[2], y[3]));
}

/* The warp's numbers to shared memory, zeros behind the last; returns the lane's sum of squares. */
__device__ inline float mn_few_bring_row(mn_bf16 *row, const mn_few_products_note &p,
                                         const mn_few_place &place) {
    const int first = threadIdx.x / 32 * MN_FEW_SPAN + threadIdx.x % 32 * 4, K = p.K;
    const bool gated = p.way == MN_FEW_GATED, norm = p.way != MN_FEW_AS_IT_IS;
    const char *words = place.words + first * 4;
    mn_few_four x[MN_FEW_CHUNKS], z;
    uint2 weight = make_uint2(0x3f803f80u, 0x3f803f80u);    // ones
    if (p.weight && first < K) weight = *(const uint2 *)(p.weight + (first & p.wrap));
    bool there;
    do {
        there = true;
#pragma unroll
        for (int c = 0; c < MN_FEW_CHUNKS; c++) {
            if (first + c * MN_FEW_CHUNK < K) x[c].ask(words + p.x + c * (4 * MN_FEW_CHUNK));
        }
        if (gated && first < K) z.ask(words + p.z);
#pragma unroll
        for (int c = 0; c < MN_FEW_CHUNKS; c++) {
            if (first + c * MN_FEW_CHUNK < K) there = there && x[c].there(place.run);
        }
        if (gated && first < K) there = there && z.there(place.run);
    } while (!there);
    __syncwarp();
    float squares = 0.0f;
#pragma unroll 1
    for (int k = first; k - first < K; k += MN_FEW_CHUNK) {
        uint2 y = k < K ? x[0].numbers() : make_uint2(0, 0);
        if (norm && k < K) {
            if (k > first && p.weight) weight = *(const uint2 *)(p.weight + k);
            y = mn_few_weigh(squares, p, y, weight, gated ? z.numbers() : y);
        }
        *(uint2 *)(row + k) = y;
#pragma unroll
        for (int c = 0; c + 1 < MN_FEW_CHUNKS; c++) x[c] = x[c + 1];
    }
    __syncwarp();
    return squares;
}

/* ---- products -------------------------------------------------------------------------------- */

enum { MN_FEW_UNITS = MN_FEW_SPAN / 32 };

/* acc (16,8) += a b. A lane's four words of a row of weights are the left factor as they come: two
 * count as of row lane / 4, two as of row lane / 4 + 8. Even columns of b have the numbers that
 * belong to the former, odd ones those of the latter: the sum is acc[0] + acc[3], in all four
 * lanes. */
__device__ inline void mn_few_multiply_add(float (&acc)[4], const uint4 &a, const uint2 &b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
}

/* A lane's part of the warp's 128 numbers of a row, of which `left` are there. */
__device__ inline void mn_few_lane_part(uint4 (&x)[MN_FEW_UNITS], const void *row, int left) {
    const int lane = threadIdx.x % 4;
    if (left >= MN_FEW_SPAN) {
#pragma unroll
        for (int i = 0; i < MN_FEW_UNITS; i++) x[i] = *((const uint4 *)row + i * 4 + lane);
        return;
    }
#pragma unroll
    for (int i = 0; i < MN_FEW_UNITS; i++) {
        x[i] = make_uint4(0, 0, 0, 0);
        if (i * 32 + lane * 8 < left) x[i] = *((const uint4 *)row + i * 4 + lane);
    }
}

/* The same of the row that is multiplied, as a right factor. */
__device__ inline void mn_few_lane_row(uint2 (&x)[MN_FEW_UNITS], const void *row, int left) {
    uint4 all[MN_FEW_UNITS];
    mn_few_lane_part(all, row, left);
    const bool odd = threadIdx.x & 4;
#pragma unroll
    for (int i = 0; i < MN_FEW_UNITS; i++) {
        x[i] = make_uint2(odd ? all[i].y : all[i].x, odd ? all[i].w : all[i].z);
    }
}

/* All strips, two at a time; the warp's sums to shared memory. */
__device__ inline void mn_few_multiply_strips(mn_few_block &room, const mn_few_products_note &p,
                                              mn_few_place &place) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = p.n_strips, K = p.K;
    const int at = lane / 4 * MN_FEW_ROW + warp * (2 * MN_FEW_SPAN), chunks = p.chunks;
    float *sums = &room.sums[place.half][0][lane / 4][warp];
    uint2 x[MN_FEW_UNITS];
#pragma unroll 1
    for (int first = 0; first < n; first += 2) {
        const bool two = first + 1 < n;
        float acc[2][2][4] = {};
#pragma unroll 1
        for (int from = warp * MN_FEW_SPAN, c = 0; c < chunks; c++, from += MN_FEW_CHUNK) {
            const int slot = place.slot, left = K - from;
            uint4 a[MN_FEW_UNITS], b[MN_FEW_UNITS];
            if (first == 0 || chunks > 1) mn_few_lane_row(x, room.row + from, left);
            mn_barrier_wait(&room.full[slot], place.turn);
            place.next_slot();
            mn_few_lane_part(a, room.ring[slot] + at, left);
            const int other = place.slot;
            if (two) {
                mn_barrier_wait(&room.full[other], place.turn);
                place.next_slot();
                mn_few_lane_part(b, room.ring[other] + at, left);
            }
#pragma unroll
            for (int i = 0; i < MN_FEW_UNITS; i++) mn_few_multiply_add(acc[0][i % 2], a[i], x[i]);
            if (two) {
#pragma unroll
                for (int i = 0; i < MN_FEW_UNITS; i++) {
                    mn_few_multiply_add(acc[1][i % 2], b[i], x[i]);
                }
            }
            __syncwarp();
            if (lane == 0) mn_barrier_arrive(&room.empty[slot]);
            if (lane == 0 && two) mn_barrier_arrive(&room.empty[other]);
        }
        if (lane % 4 > 0) continue;
        enum { STRIP = MN_FEW_COLUMNS * (MN_FEW_WARPS + 2) };
        sums[first * STRIP] = (acc[0][0][0] + acc[0][0][3]) + (acc[0][1][0] + acc[0][1][3]);
        if (!two) continue;
        sums[(first + 1) * STRIP] = (acc[1][0][0] + acc[1][0][3]) + (acc[1][1][0] + acc[1][1][3]);
    }
}

/* ---- the stage ------------------------------------------------------------------------------- */

/* How sums are scaled: looked up before the block meets. */
struct mn_few_scale {
    int group;
    float inverse_width, epsilon;

    /* The factors of the numbers of warps 2 (lane % 4) and the next. */
    __device__ float2 factors(const float *squares) const {
        const float2 two = *(const float2 *)(squares + threadIdx.x % 4 * 2);
        float sum = two.x + two.y;
        if (group > 2) sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (group > 4) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float first = group > 1 ? sum : two.x, second = group > 1 ? sum : two.y;
        return make_float2(rsqrtf(fmaf(first, inverse_width, epsilon)),
                           rsqrtf(fmaf(second, inverse_width, epsilon)));
    }
};

/* The sum of a column of a strip, in all four lanes. */
__device__ inline float mn_few_add_up(const float (*sums)[MN_FEW_WARPS + 2], float2 factor) {
    const int lane = threadIdx.x % 32;
    const float2 parts = *(const float2 *)&sums[lane / 4][lane % 4 * 2];
    float sum = fmaf(parts.x, factor.x, parts.y * factor.y);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

/* The row as others would find it. */
__device__ inline void mn_few_keep_row(const mn_few_block &room, const mn_few_products_note &p,
                                       float2 factors) {
    const int warp = threadIdx.x / 32;
    const float r = __shfl_sync(0xffffffffu, warp % 2 ? factors.y : factors.x, warp / 2);
#pragma unroll 1
    for (int k = threadIdx.x * 4; k < p.K; k += MN_FEW_CHUNK) {
        const uint2 y = *(const uint2 *)(room.row + k);
        *(uint2 *)(p.row + k) = make_uint2(mn_few_two(mn_few_low(y.x) * r, mn_few_high(y.x) * r),
                                           mn_few_two(mn_few_low(y.y) * r, mn_few_high(y.y) * r));
    }
}

__device__ inline void mn_few_multiply(mn_few_block &room, const mn_few_note &note,
                                       mn_few_place &place) {
    const mn_few_products_note &p = note.products;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = place.half;
    const bool has = warp < p.n_units, norm = p.way != MN_FEW_AS_IT_IS;
    const mn_few_unit &unit = p.unit[has ? warp : 0];
    mn_few_finish finish(unit, place, has);
    const float squares = mn_few_bring_row(room.row, p, place);
    if (norm) {
        const float sum = mn_warp_sum(squares);
        if (lane == 0) room.squares[half][warp] = sum;
    }
    const mn_few_scale scale = { p.group, p.inverse_width, p.epsilon };
    const int one = unit.strip[0], other = unit.n_strips > 1 ? unit.strip[1] : MN_FEW_NOWHERE;
    mn_few_multiply_strips(room, p, place);
    mn_few_meet();
    float2 factors = { 1.0f, 1.0f };
    if (norm) factors = scale.factors(room.squares[half]);
    if (has) {
        const float first = mn_few_add_up(room.sums[half][one], factors);
        const float second = other >= 0 ? mn_few_add_up(room.sums[half][other], factors) : 0.0f;
        finish.run(first, second, (const mn_few_end *)((const char *)&note + note.ends_at),
                   room.values[warp]);
    }
    if (norm && p.row) mn_few_keep_row(room, p, factors);
    place.half ^= 1;
}

#endif

#endif
