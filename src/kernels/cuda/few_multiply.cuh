/* few_multiply.cuh - products of one row with several weights as a stage (kernels/few.h).
 *
 * A warp has 128 numbers of each chunk of 1024, of the row and of all weights: it makes them
 * itself, as soon as they are there, and its sums for all strips; then the block meets, once, and a
 * warp adds up the eight sums of each column of a unit. What a norm divides by is a factor of the
 * sums: nothing waits for it. Weights are the left factor of products of tensor cores, two strips
 * at a time; the row is each of the eight columns of the right one, so that all lanes get sums. */
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
    const char *words = place.program + first * 4;
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

/* acc (16,8) += (8 rows of a strip, 8 of another) b */
__device__ inline void mn_few_multiply_add(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                           uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

enum { MN_FEW_UNITS = MN_FEW_SPAN / 32 };

/* A lane's part of the warp's 128 numbers of a row, of which `left` are there. */
__device__ inline void mn_few_lane_part(uint4 (&x)[MN_FEW_UNITS], const void *row, int left) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < MN_FEW_UNITS; i++) {
        x[i] = make_uint4(0, 0, 0, 0);
        if (i * 32 + lane * 8 < left) x[i] = *((const uint4 *)row + i * 4 + lane);
    }
}

/* All strips, two at a time; the warp's sums to shared memory. */
__device__ inline void mn_few_multiply_strips(mn_few_block &room, const mn_few_products_note &p,
                                              mn_few_place &place) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = p.n_strips, K = p.K;
    const int at = lane / 4 * MN_FEW_ROW + warp * (2 * MN_FEW_SPAN);
    uint4 x[MN_FEW_UNITS];
#pragma unroll 1
    for (int first = 0; first < n; first += 2) {
        const bool two = first + 1 < n;
        float acc[4][4] = {};
#pragma unroll 1
        for (int from = warp * MN_FEW_SPAN, c = 0; c < p.chunks; c++, from += MN_FEW_CHUNK) {
            const int slot = place.slot, left = K - from;
            uint4 a[MN_FEW_UNITS], b[MN_FEW_UNITS];
            if (first == 0 || p.chunks > 1) mn_few_lane_part(x, room.row + from, left);
            mn_few_wait(&room.full[slot], place.turn);
            mn_few_lane_part(a, room.ring[slot] + at, left);
            place.next_slot();
            const int other = place.slot;
            if (two) {
                mn_few_wait(&room.full[other], place.turn);
                place.next_slot();
            }
            mn_few_lane_part(b, room.ring[other] + at, two ? left : 0);
#pragma unroll
            for (int i = 0; i < MN_FEW_UNITS; i++) {
                mn_few_multiply_add(acc[i % 2 * 2], a[i].x, b[i].x, a[i].y, b[i].y, x[i].x, x[i].y);
                mn_few_multiply_add(acc[i % 2 * 2 + 1], a[i].z, b[i].z, a[i].w, b[i].w, x[i].z,
                                    x[i].w);
            }
            __syncwarp();
            if (lane == 0) mn_few_arrive(&room.empty[slot]);
            if (lane == 0 && two) mn_few_arrive(&room.empty[other]);
        }
        if (lane % 4 > 0) continue;
        float (*sums)[MN_FEW_COLUMNS][MN_FEW_WARPS + 2] = &room.sums[place.half][first];
        sums[0][lane / 4][warp] = (acc[0][0] + acc[1][0]) + (acc[2][0] + acc[3][0]);
        if (two) sums[1][lane / 4][warp] = (acc[0][2] + acc[1][2]) + (acc[2][2] + acc[3][2]);
    }
}

/* ---- the stage ------------------------------------------------------------------------------- */

/* The factors of the numbers of warps 2 (lane % 4) and the next. */
__device__ inline float2 mn_few_factors(const float *squares, const mn_few_products_note &p) {
    const float2 two = *(const float2 *)(squares + threadIdx.x % 4 * 2);
    float sum = two.x + two.y;
    if (p.group > 2) sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    if (p.group > 4) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float first = p.group > 1 ? sum : two.x, second = p.group > 1 ? sum : two.y;
    return make_float2(rsqrtf(fmaf(first, p.inverse_width, p.epsilon)),
                       rsqrtf(fmaf(second, p.inverse_width, p.epsilon)));
}

/* The sum of a column of a strip; `factor` of warps 2 (lane % 4) and the next. */
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
    mn_few_multiply_strips(room, p, place);
    if (norm) {
        const float sum = mn_warp_sum(squares);
        if (lane == 0) room.squares[half][warp] = sum;
    }
    mn_few_meet();
    float2 factors = { 1.0f, 1.0f };
    if (norm) factors = mn_few_factors(room.squares[half], p);
    if (has) {
        const float first = mn_few_add_up(room.sums[half][unit.strip[0]], factors);
        const float second = unit.n_strips > 1
                                 ? mn_few_add_up(room.sums[half][unit.strip[1]], factors)
                                 : 0.0f;
        finish.run(first, second, (const mn_few_end *)((const char *)&note + note.ends_at),
                   room.values[warp]);
    }
    if (norm && p.row) mn_few_keep_row(room, p, factors);
    place.half ^= 1;
}

#endif

#endif
