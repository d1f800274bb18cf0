/* few_multiply.cuh - products of one row with several weights as a stage (kernels/few.h).
 *
 * A warp has 64 numbers of each chunk of 1024, of the row and of all weights: it makes them
 * itself, as soon as they are there, and its sums for all strips; then the block meets, once, and a
 * warp adds up the sixteen sums of each column of a unit. What a norm divides by is a factor of the
 * sums: nothing waits for it. Weights are the left factor of products of tensor cores, two strips
 * at a time; the row is each of the eight columns of the right one, so that all lanes get sums. */
#ifndef MN_KERNELS_CUDA_FEW_MULTIPLY_CUH
#define MN_KERNELS_CUDA_FEW_MULTIPLY_CUH

#include "kernels/cuda/few_ending.cuh"

#if __CUDA_ARCH__ >= 900

/* ---- the row --------------------------------------------------------------------------------- */

/* Two numbers of bf16 by two, gated or not; adds the squares of x up. */
__device__ inline uint32_t mn_few_weigh(float &squares, const mn_few_products_note &p, uint32_t x,
                                        uint32_t weight, uint32_t gate) {
    float low = mn_few_low(x), high = mn_few_high(x);
    squares = fmaf(low, low, squares);
    squares = fmaf(high, high, squares);
    low *= mn_few_low(weight), high *= mn_few_high(weight);
    if (p.way == MN_FEW_GATED) {
        const float z[2] = { mn_few_low(gate), mn_few_high(gate) };
        low *= mn_fn_sigmoid<true>(z[0]) * (p.sigmoid ? 1.0f : z[0]);
        high *= mn_fn_sigmoid<true>(z[1]) * (p.sigmoid ? 1.0f : z[1]);
    }
    return mn_few_two(low, high);
}

/* The warp's numbers to shared memory, two a lane; returns the lane's sum of squares. */
__device__ inline float mn_few_bring_row(mn_bf16 *row, const mn_few_products_note &p,
                                         const mn_few_place &place) {
    const int first = threadIdx.x * 2, K = p.K;
    const bool gated = p.way == MN_FEW_GATED && first < K, norm = p.way != MN_FEW_AS_IT_IS;
    const char *words = place.words + first * 4;
    mn_few_one x[MN_FEW_CHUNKS], z;
    uint32_t weight = 0x3f803f80u;    // ones
    if (p.weight && first < K) weight = *(const uint32_t *)(p.weight + (first & p.wrap));
    bool there;
    do {
        there = true;
#pragma unroll
        for (int c = 0; c < MN_FEW_CHUNKS; c++) {
            if (first + c * MN_FEW_CHUNK < K) x[c].ask(words + p.x + c * (4 * MN_FEW_CHUNK));
        }
        if (gated) z.ask(words + p.z);
#pragma unroll
        for (int c = 0; c < MN_FEW_CHUNKS; c++) {
            if (first + c * MN_FEW_CHUNK < K) there = there && x[c].there(place.run);
        }
        if (gated) there = there && z.there(place.run);
    } while (!there);
    __syncwarp();
    float squares = 0.0f;
#pragma unroll 1
    for (int k = first; k < K; k += MN_FEW_CHUNK) {
        uint32_t y = (uint32_t)x[0].a;
        if (norm) {
            if (k > first && p.weight) weight = *(const uint32_t *)(p.weight + k);
            y = mn_few_weigh(squares, p, y, weight, gated ? (uint32_t)z.a : 0u);
        }
        *(uint32_t *)(row + k) = y;
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

/* A lane's part of the warp's 64 numbers of a row, of which `left` are there. */
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
        float acc[2 * MN_FEW_UNITS][4] = {};
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
                mn_few_multiply_add(acc[i * 2], a[i].x, b[i].x, a[i].y, b[i].y, x[i].x, x[i].y);
                mn_few_multiply_add(acc[i * 2 + 1], a[i].z, b[i].z, a[i].w, b[i].w, x[i].z, x[i].w);
            }
            __syncwarp();
            if (lane == 0) mn_few_arrive(&room.empty[slot]);
            if (lane == 0 && two) mn_few_arrive(&room.empty[other]);
        }
        if (lane % 4 > 0) continue;
        float (*sums)[MN_FEW_COLUMNS][MN_FEW_WARPS + 4] = &room.sums[place.half][first];
        sums[0][lane / 4][warp] = (acc[0][0] + acc[1][0]) + (acc[2][0] + acc[3][0]);
        if (two) sums[1][lane / 4][warp] = (acc[0][2] + acc[1][2]) + (acc[2][2] + acc[3][2]);
    }
}

/* ---- the stage ------------------------------------------------------------------------------- */

/* The factors of the numbers of warps 4 (lane % 4) and the next, and of the two behind those. */
__device__ inline float2 mn_few_factors(const float *squares, const mn_few_products_note &p) {
    const float4 four = *(const float4 *)(squares + threadIdx.x % 4 * 4);
    float low = four.x + four.y, high = four.z + four.w;
    if (p.group > 2) low += high;
    if (p.group > 4) low += __shfl_xor_sync(0xffffffffu, low, 1);
    if (p.group > 8) low += __shfl_xor_sync(0xffffffffu, low, 2);
    if (p.group > 2) high = low;
    return make_float2(rsqrtf(fmaf(low, p.inverse_width, p.epsilon)),
                       rsqrtf(fmaf(high, p.inverse_width, p.epsilon)));
}

/* The sum of a column of a strip; a lane has four warps' parts. */
__device__ inline float mn_few_add_up(const float (*sums)[MN_FEW_WARPS + 4], float2 factors) {
    const int lane = threadIdx.x % 32;
    const float4 parts = *(const float4 *)&sums[lane / 4][lane % 4 * 4];
    float sum = fmaf(parts.x + parts.y, factors.x, (parts.z + parts.w) * factors.y);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

/* The row as others would find it. */
__device__ inline void mn_few_keep_row(const mn_few_block &room, const mn_few_products_note &p,
                                       float2 factors) {
    const int warp = threadIdx.x / 32;
    const float r = __shfl_sync(0xffffffffu, warp % 4 / 2 ? factors.y : factors.x, warp / 4);
#pragma unroll 1
    for (int k = threadIdx.x * 2; k < p.K; k += MN_FEW_CHUNK) {
        const uint32_t y = *(const uint32_t *)(room.row + k);
        *(uint32_t *)(p.row + k) = mn_few_two(mn_few_low(y) * r, mn_few_high(y) * r);
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
    mn_few_multiply_strips(room, p, place);
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
