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
    const uint32_t in[2] = { x.x, x.y }, by[2] = { weight.x, weight.y }, z[2] = { gate.x, gate.y };
    uint32_t out[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float low = mn_few_low(in[j]), high = mn_few_high(in[j]);
        squares = fmaf(low, low, squares);
        squares = fmaf(high, high, squares);
        if (p.way == MN_FEW_GATED && p.sigmoid) {
            low *= mn_sigmoid(mn_few_low(z[j]));
            high *= mn_sigmoid(mn_few_high(z[j]));
        } else if (p.way == MN_FEW_GATED) {
            low *= mn_silu(mn_few_low(z[j])).value;
            high *= mn_silu(mn_few_high(z[j])).value;
        }
        out[j] = mn_few_two(low * mn_few_low(by[j]), high * mn_few_high(by[j]));
    }
    return make_uint2(out[0], out[1]);
}

/* The warp's numbers to shared memory, zeros behind the last; returns the lane's sum of squares. */
__device__ inline float mn_few_bring_row(mn_bf16 *row, const mn_few_products_note &p,
                                         const mn_few_place &place) {
    const int first = threadIdx.x / 32 * MN_FEW_SPAN + threadIdx.x % 32 * 4, K = p.K;
    const bool gated = p.way == MN_FEW_GATED;
    mn_few_four x[MN_FEW_CHUNKS], z;
    uint2 weight[MN_FEW_CHUNKS];
#pragma unroll
    for (int c = 0; c < MN_FEW_CHUNKS; c++) {
        const int k = first + c * MN_FEW_CHUNK;
        weight[c] = make_uint2(0x3f803f80u, 0x3f803f80u);
        if (k < K && p.weight) weight[c] = *(const uint2 *)(p.weight + (k & p.wrap));
    }
    bool there;
    do {
        there = true;
#pragma unroll
        for (int c = 0; c < MN_FEW_CHUNKS; c++) {
            const int k = first + c * MN_FEW_CHUNK;
            if (k < K) x[c].ask(p.x, place.program, k);
        }
        if (gated && first < K) z.ask(p.z, place.program, first);
#pragma unroll
        for (int c = 0; c < MN_FEW_CHUNKS; c++) {
            const int k = first + c * MN_FEW_CHUNK;
            if (k < K) there = there && x[c].there(p.x, place.run);
        }
        if (gated && first < K) there = there && z.there(p.z, place.run);
    } while (!there);
    __syncwarp();
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < MN_FEW_CHUNKS; c++) {
        const int k = first + c * MN_FEW_CHUNK;
        if (c >= p.chunks) continue;
        uint2 y = make_uint2(0, 0);
        if (k < K) {
            y = x[c].numbers(p.x);
            const uint2 gate = gated ? z.numbers(p.z) : y;
            if (p.way != MN_FEW_AS_IT_IS) y = mn_few_weigh(squares, p, y, weight[c], gate);
        }
        *(uint2 *)(row + k) = y;
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

/* The warp's part of a chunk of two strips. Whole: all its numbers are there. */
template <bool WHOLE>
__device__ inline void mn_few_multiply_piece(float (&acc)[4][4], const unsigned char *one,
                                             const unsigned char *two, const mn_bf16 *row,
                                             int left) {
    enum { UNITS = MN_FEW_SPAN / 32 };
    const int lane = threadIdx.x % 32;
    const int at = lane / 4 * MN_FEW_ROW + threadIdx.x / 32 * (2 * MN_FEW_SPAN) + lane % 4 * 16;
    uint4 a[UNITS], b[UNITS];
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        a[i] = b[i] = make_uint4(0, 0, 0, 0);
        if (!WHOLE && i * 32 + lane % 4 * 8 >= left) continue;
        a[i] = *(const uint4 *)(one + at + i * 64);
        b[i] = *(const uint4 *)(two + at + i * 64);
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const uint4 x = *(const uint4 *)(row + i * 32 + lane % 4 * 8);
        mn_few_multiply_add(acc[i % 2 * 2], a[i].x, b[i].x, a[i].y, b[i].y, x.x, x.y);
        mn_few_multiply_add(acc[i % 2 * 2 + 1], a[i].z, b[i].z, a[i].w, b[i].w, x.z, x.w);
    }
}

/* All strips, two at a time; the warp's sums to shared memory. */
__device__ inline void mn_few_multiply_strips(mn_few_block &room, const mn_few_products_note &p,
                                              mn_few_place &place) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = p.n_strips, K = p.K;
#pragma unroll 1
    for (int first = 0; first < n; first += 2) {
        const bool two = first + 1 < n;
        float acc[4][4] = {};
#pragma unroll 1
        for (int from = warp * MN_FEW_SPAN, c = 0; c < p.chunks; c++, from += MN_FEW_CHUNK) {
            const int slot = place.slot, left = K - from;
            mn_few_wait(&room.full[slot], place.turn);
            place.next_slot();
            const int other = two ? place.slot : slot;
            if (two) mn_few_wait(&room.full[other], place.turn);
            if (two) place.next_slot();
            const unsigned char *a = room.ring[slot], *b = room.ring[other];
            if (left >= MN_FEW_SPAN) mn_few_multiply_piece<true>(acc, a, b, room.row + from, left);
            else if (left > 0) mn_few_multiply_piece<false>(acc, a, b, room.row + from, left);
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

/* The factor of the numbers of warp lane % 8. */
__device__ inline float mn_few_factor(const float *squares, const mn_few_products_note &p) {
    float sum = squares[threadIdx.x % MN_FEW_WARPS];
    if (p.group > 1) sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    if (p.group > 2) sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (p.group > 4) sum += __shfl_xor_sync(0xffffffffu, sum, 4);
    return rsqrtf(fmaf(sum, p.inverse_width, p.epsilon));
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
                                       float factor) {
    const float r = __shfl_sync(0xffffffffu, factor, threadIdx.x / 32);
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
    float factor = 1.0f;
    float2 two = { 1.0f, 1.0f };
    if (norm) {
        factor = mn_few_factor(room.squares[half], p);
        two.x = __shfl_sync(0xffffffffu, factor, lane % 4 * 2);
        two.y = __shfl_sync(0xffffffffu, factor, lane % 4 * 2 + 1);
    }
    if (has) {
        const float first = mn_few_add_up(room.sums[half][unit.strip[0]], two);
        const float second = unit.n_strips > 1 ? mn_few_add_up(room.sums[half][unit.strip[1]], two)
                                               : 0.0f;
        finish.run(first, second, (const mn_few_end *)((const char *)&note + note.ends_at),
                   room.values[warp]);
    }
    if (norm && p.row) mn_few_keep_row(room, p, factor);
    place.half ^= 1;
}

#endif

#endif
