/* megakernel_gemv.cuh - products of one row with several weights as a stage (kernels/decode.h).
 *
 * A warp has 128 numbers of each chunk of 1024, of the row and of all weights. While it waits for
 * the row it takes its part of the weights to registers; it makes its numbers of the row itself, as
 * soon as they are there, and its sums for all strips; then the block meets, once, and a warp adds
 * up the eight sums of each column of a unit. What a norm divides by is a factor of the sums:
 * nothing waits for it. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_GEMV_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_GEMV_CUH

#include "kernels/cuda/decode/megakernel_epilogue.cuh"

#if __CUDA_ARCH__ >= 900

/* What a stage needs of its note once the row is there: looked up before. */
struct mn_few_way_of {
    int K, chunks, group, n_strips, n_units;
    bool norm, gated, sigmoid;
    float inverse_width, epsilon;

    __device__ explicit mn_few_way_of(const mn_few_products_note &p) {
        const unsigned how = mn_few_even(*(const unsigned *)&p.way);
        const unsigned many = mn_few_even(*(const unsigned *)&p.n_strips);
        K = (int)mn_few_even((unsigned)p.K);
        norm = (how & 255) != MN_FEW_AS_IT_IS, gated = (how & 255) == MN_FEW_GATED;
        chunks = how >> 8 & 255, group = how >> 16 & 255, sigmoid = how >> 24;
        n_strips = many & 255, n_units = many >> 8 & 255;
        inverse_width = p.inverse_width, epsilon = p.epsilon;
    }
};

/* ---- weights --------------------------------------------------------------------------------- */

enum { MN_FEW_PARTS = MN_FEW_SPAN / 32, MN_FEW_HELD = 6, MN_FEW_TOGETHER_HELD = 3 };

/* A lane's part of a warp's 128 numbers of the eight rows of a piece: row lane / 4, and of each 32
 * numbers eight. */
struct mn_few_piece {
    uint4 part[MN_FEW_PARTS];

    /* Any numbers: what may stay unset would be carried from stage to stage. */
    __device__ void forget(void) {
#pragma unroll
        for (int i = 0; i < MN_FEW_PARTS; i++) {
            asm("" : "=r"(part[i].x), "=r"(part[i].y), "=r"(part[i].z), "=r"(part[i].w));
        }
    }
};

/* The next `n` pieces of the ring, or as many as there is room for. Lane i waits for piece i, and
 * says that it has been read. Behind the last number of a row lies any other one. */
__device__ inline void mn_few_take(mn_few_piece (&piece)[MN_FEW_HELD], mn_few_block &room,
                                   mn_few_place &place, int n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool mine = lane < min(n, (int)MN_FEW_HELD);
    const int own = place.slot + lane, over = own >= MN_FEW_SLOTS;
    const int slot = mine ? own - over * MN_FEW_SLOTS : place.slot;
    const unsigned turn = mine ? place.turn ^ over : place.turn;
    const int at = lane / 4 * MN_FEW_ROW + warp * (2 * MN_FEW_SPAN) + lane % 4 * 16;
    mn_barrier_wait(&room.full[slot], turn);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MN_FEW_HELD; i++) {
        if (i >= n) break;
        const int next = place.slot + i, there = next >= MN_FEW_SLOTS ? next - MN_FEW_SLOTS : next;
        const unsigned char *from = room.ring[there] + at;
#pragma unroll
        for (int k = 0; k < MN_FEW_PARTS; k++) piece[i].part[k] = *((const uint4 *)from + k * 4);
    }
    __syncwarp();
    if (mine) mn_barrier_arrive(&room.empty[slot]);
    place.slot += min(n, (int)MN_FEW_HELD);
    if (place.slot >= MN_FEW_SLOTS) place.slot -= MN_FEW_SLOTS, place.turn ^= 1;
}

/* ---- the row --------------------------------------------------------------------------------- */

/* Where a lane's two words of a chunk of the row lie: of four words, which one lane multiplies by,
 * the first and the third are neighbours, and the others. */
enum { MN_FEW_SECOND = 8, MN_FEW_NEXT_CHUNK = 2 * MN_FEW_CHUNK };    // bytes

__device__ inline void mn_few_put(uint32_t place, uint2 two) {
    asm volatile("st.shared.u32 [%0], %1;\n\tst.shared.u32 [%0 + %3], %2;" ::"r"(place), "r"(two.x),
                 "r"(two.y), "n"((int)MN_FEW_SECOND) : "memory");
}

__device__ inline uint32_t mn_few_row_words(const mn_few_block &room) {
    return mn_shared_at((const uint32_t *)room.row + threadIdx.x / 2 * 4 + threadIdx.x % 2);
}

/* Four numbers of bf16 by four; adds their squares up. */
struct mn_few_weighed {
    float y[4];

    __device__ mn_few_weighed(float &squares, uint2 x, uint2 by) {
        y[0] = mn_few_low(x.x), y[1] = mn_few_high(x.x);
        y[2] = mn_few_low(x.y), y[3] = mn_few_high(x.y);
        const float w[4] = { mn_few_low(by.x), mn_few_high(by.x), mn_few_low(by.y),
                             mn_few_high(by.y) };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            squares = fmaf(y[j], y[j], squares);
            y[j] *= w[j];
        }
    }

    __device__ void gate(uint2 x, bool sigmoid) {
        const float z[4] = { mn_few_low(x.x), mn_few_high(x.x), mn_few_low(x.y), mn_few_high(x.y) };
#pragma unroll
        for (int j = 0; j < 4; j++) y[j] *= mn_sigmoid(z[j]) * (sigmoid ? 1.0f : z[j]);
    }

    __device__ uint2 numbers(void) const {
        return make_uint2(mn_few_two(y[0], y[1]), mn_few_two(y[2], y[3]));
    }
};

/* A lane's words of a row, of its gate, and what it is weighted by, as they are found: asked for
 * before anything else is done. */
struct mn_few_look {
    mn_few_four x[MN_FEW_CHUNKS], z;
    uint2 weight;
    int at, gate_at;    // bytes to their words

    __device__ mn_few_look(const mn_few_products_note &p, const mn_few_place &place) {
        const int first = threadIdx.x * 4, K = p.K;
        const mn_bf16 *weights = p.weight;
        at = p.x + mn_few_word((unsigned)first), gate_at = p.z + mn_few_word((unsigned)first);
#pragma unroll
        for (int c = 0; c < MN_FEW_CHUNKS; c++) x[c].none();
        z.none();
        weight = make_uint2(0x3f803f80u, 0x3f803f80u);    // ones
        ask(place, K, p.way == MN_FEW_GATED);
        if (weights && first < K) weight = *(const uint2 *)(weights + (first & p.wrap));
    }

    __device__ void ask(const mn_few_place &place, int K, bool gated) {
        const int first = threadIdx.x * 4;
        const char *const words = place.words + at;
#pragma unroll
        for (int c = 0; c < MN_FEW_CHUNKS; c++) {
            if (first + c * MN_FEW_CHUNK < K) {
                x[c].ask(words + c * (MN_FEW_CHUNK / MN_FEW_OF_LINE * MN_FEW_LINE));
            }
        }
        if (gated && first < K) z.ask(place.words + gate_at);
    }

    __device__ bool missing(void) const {
        uint32_t most = z.most();
#pragma unroll
        for (int c = 0; c < MN_FEW_CHUNKS; c++) most = max(most, x[c].most());
        return most == MN_FEW_UNSAID;
    }
};

/* The warp's numbers to shared memory, zeros behind the last; returns the lane's sum of squares. */
__device__ inline float mn_few_bring_row(mn_few_block &room, const mn_few_products_note &p,
                                         const mn_few_way_of &way, const mn_few_place &place,
                                         mn_few_look &look) {
    const int first = threadIdx.x * 4, K = way.K;
    const mn_bf16 *const weights = p.weight;
    const uint32_t row = mn_few_here(mn_few_row_words(room));
    while (__builtin_expect(__any_sync(0xffffffffu, look.missing()), 0)) {
        look.ask(place, K, way.gated);
    }
    float squares = 0.0f;
    uint2 y = look.x[0].numbers();    // zeros behind the last
    if (way.norm) {
        mn_few_weighed weighed(squares, y, look.weight);
        if (way.gated) weighed.gate(look.z.numbers(), way.sigmoid);
        y = weighed.numbers();
    }
    mn_few_put(row, y);
#pragma unroll
    for (int c = 1; c < MN_FEW_CHUNKS; c++) {
        if (c >= way.chunks) break;
        y = look.x[c].numbers();
        if (way.norm) {
            const int k = first + c * MN_FEW_CHUNK;
            if (weights && k < K) look.weight = *(const uint2 *)(weights + k);
            y = mn_few_weighed(squares, y, look.weight).numbers();
        }
        mn_few_put(row + c * MN_FEW_NEXT_CHUNK, y);
    }
    __syncwarp();
    return squares;
}

/* ---- products -------------------------------------------------------------------------------- */

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

/* A lane's part of the warp's 128 numbers of a chunk of the row, as a right factor. `from`: of the
 * first chunk, in shared memory. */
struct mn_few_lane_row {
    uint2 part[MN_FEW_PARTS];

    __device__ static uint32_t place(const mn_few_block &room) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint2 *row = (const uint2 *)(room.row + warp * MN_FEW_SPAN);
        return mn_shared_at(row + lane % 4 * 2 + lane / 4 % 2);
    }

    __device__ void get(uint32_t from, int chunk) {
#pragma unroll
        for (int i = 0; i < MN_FEW_PARTS; i++) {
            part[i] = mn_few_find(from + chunk * MN_FEW_NEXT_CHUNK + i * 64);
        }
    }
};

/* Four lanes have the same. */
__device__ inline float mn_few_sum_of(const float (&acc)[4]) {
    return acc[0] + acc[3];
}

/* Where a stage's products stand: the chunk of the next piece, and a strip's sum up to there. */
struct mn_few_progress {
    uint32_t row;    // the lane's, in shared memory
    int chunk;
    float sum, *to;

    /* Pieces from FROM on of a group, some together. A strip is a chunk: */
    template <int FROM>
    __device__ static void multiply(const mn_few_lane_row &x,
                                    const mn_few_piece (&piece)[MN_FEW_HELD],
                                    float (&acc)[MN_FEW_HELD][4]) {
#pragma unroll
        for (int k = 0; k < MN_FEW_PARTS; k++) {
#pragma unroll
            for (int i = FROM; i < FROM + MN_FEW_TOGETHER_HELD; i++) {
                mn_few_multiply_add(acc[i], piece[i].part[k], x.part[k]);
            }
        }
    }

    /* Or a strip has several, the first of these being `chunk`. */
    template <int FROM>
    __device__ void multiply(const mn_few_piece (&piece)[MN_FEW_HELD],
                             float (&acc)[MN_FEW_HELD][4], int chunks, int *at) const {
        mn_few_lane_row x[MN_FEW_TOGETHER_HELD];
#pragma unroll
        for (int i = 0; i < MN_FEW_TOGETHER_HELD; i++) {
            x[i].get(row, *at);
            *at = *at + 1 == chunks ? 0 : *at + 1;
        }
#pragma unroll
        for (int k = 0; k < MN_FEW_PARTS; k++) {
#pragma unroll
            for (int i = 0; i < MN_FEW_TOGETHER_HELD; i++) {
                mn_few_multiply_add(acc[FROM + i], piece[FROM + i].part[k], x[i].part[k]);
            }
        }
    }

    /* A group, of which `left` are there. Meanwhile squares of the row are added up, and kept at
     * `to_squares`. */
    __device__ void multiply(const mn_few_piece (&piece)[MN_FEW_HELD],
                             float (&acc)[MN_FEW_HELD][4], int chunks, int left, float squares,
                             float *to_squares) const {
        enum { FIRST = 0, SECOND = MN_FEW_TOGETHER_HELD };
        if (chunks == 1) {
            mn_few_lane_row x;
            x.get(row, 0);
            multiply<FIRST>(x, piece, acc);
            *to_squares = mn_warp_sum(squares);
            if (left > SECOND) multiply<SECOND>(x, piece, acc);
        } else {
            int at = chunk;
            multiply<FIRST>(piece, acc, chunks, &at);
            *to_squares = mn_warp_sum(squares);
            if (left > SECOND) multiply<SECOND>(piece, acc, chunks, &at);
        }
    }

    /* Sums of strips of a chunk. */
    __device__ void store(const float (&acc)[MN_FEW_HELD][4], int left) {
        enum { STRIP = MN_FEW_COLUMNS * (MN_FEW_WARPS + 2) };
        const int n = threadIdx.x % 4 == 0 ? left : 0;
#pragma unroll
        for (int i = 0; i < MN_FEW_HELD; i++) {
            if (i < n) to[i * STRIP] = mn_few_sum_of(acc[i]);
        }
        to += MN_FEW_HELD * STRIP;
    }

    /* And of several. */
    __device__ void store(const float (&acc)[MN_FEW_HELD][4], int chunks, int left) {
        enum { STRIP = MN_FEW_COLUMNS * (MN_FEW_WARPS + 2) };
#pragma unroll
        for (int i = 0; i < MN_FEW_HELD; i++) {
            if (i >= left) break;
            sum += mn_few_sum_of(acc[i]);
            chunk = chunk + 1 == chunks ? 0 : chunk + 1;
            if (chunk > 0) continue;
            if (threadIdx.x % 4 == 0) *to = sum;
            to += STRIP;
            sum = 0.0f;
        }
    }
};

/* All strips, chunk by chunk, some pieces at a time, of which the first ones are taken before the
 * row is there; the warp's sums and squares to shared memory. */
__device__ inline void mn_few_multiply_strips(mn_few_block &room, const mn_few_products_note &p,
                                              const mn_few_way_of &way, mn_few_place &place,
                                              mn_few_look &look) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = way.chunks;
    mn_few_progress at = { mn_few_here(mn_few_lane_row::place(room)), 0, 0.0f,
                           &room.sums[place.half][0][lane / 4][warp] };
    float squares = 0.0f;
    bool fresh = true;
#pragma unroll 1
    for (int left = way.n_strips * chunks; left > 0; left -= MN_FEW_HELD) {
        mn_few_piece piece[MN_FEW_HELD];
        float acc[MN_FEW_HELD][4] = {};
#pragma unroll
        for (int i = 0; i < MN_FEW_HELD; i++) piece[i].forget();
        mn_few_take(piece, room, place, left);
        if (fresh) squares = mn_few_bring_row(room, p, way, place, look);
        at.multiply(piece, acc, chunks, left, squares, &room.squares[place.half][warp]);
        if (chunks == 1) at.store(acc, left);
        else at.store(acc, chunks, left);
        fresh = false;
    }
}

/* ---- the stage ------------------------------------------------------------------------------- */

/* Where a lane finds what warps 2 (lane % 4) and the next have made: looked up before the block
 * meets. */
struct mn_few_found {
    uint32_t sums[2], squares;    // in shared memory

    __device__ mn_few_found(const mn_few_block &room, int half, int one, int other) {
        const int lane = threadIdx.x % 32, column = lane / 4, warp = lane % 4 * 2;
        sums[0] = mn_few_here(mn_shared_at(&room.sums[half][one][column][warp]));
        sums[1] = mn_few_here(mn_shared_at(&room.sums[half][other][column][warp]));
        squares = mn_shared_at(&room.squares[half][warp]);
    }

    __device__ static float2 get(uint32_t place) {
        const uint2 two = mn_few_find(place);
        return make_float2(__uint_as_float(two.x), __uint_as_float(two.y));
    }
};

/* Sums of a unit's two strips, of which lanes have parts: of a column, in all four lanes. Norms of
 * the row, or of groups of it, divide by the root of a mean of squares. */
struct mn_few_added {
    float first, second;
    float2 factors;              // of the numbers of warps 2 (lane % 4) and the next

    __device__ static float add_up(float2 parts, float2 factor) {
        float sum = fmaf(parts.x, factor.x, parts.y * factor.y);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    }

    __device__ void factors_of(const mn_few_way_of &way, float2 two) {
        const float two_warps = two.x + two.y;
        const float four = two_warps + __shfl_xor_sync(0xffffffffu, two_warps, 1);
        const float all = four + __shfl_xor_sync(0xffffffffu, four, 2);
        const float sum = way.group > 4 ? all : way.group > 2 ? four : two_warps;
        const float one = way.group > 1 ? sum : two.x, other = way.group > 1 ? sum : two.y;
        factors.x = mn_few_rsqrt(fmaf(one, way.inverse_width, way.epsilon));
        factors.y = mn_few_rsqrt(fmaf(other, way.inverse_width, way.epsilon));
    }

    /* One norm for all: its factor is not waited for. */
    __device__ mn_few_added(const mn_few_way_of &way, const mn_few_found &found) {
        const float2 one = found.get(found.sums[0]), other = found.get(found.sums[1]);
        const float2 squares = found.get(found.squares), plain = { 1.0f, 1.0f };
        if (way.norm && way.group > 4) {
            factors_of(way, squares);
            first = add_up(one, plain) * factors.x, second = add_up(other, plain) * factors.x;
        } else {
            factors = plain;
            if (way.norm) factors_of(way, squares);
            first = add_up(one, factors), second = add_up(other, factors);
        }
    }
};

/* The row as others would find it. */
__device__ inline void mn_few_keep_row(mn_few_block &room, const mn_few_products_note &p,
                                       float2 factors) {
    const int warp = threadIdx.x / 32;
    const uint32_t *row = (const uint32_t *)room.row + threadIdx.x / 2 * 4 + threadIdx.x % 2;
    const float r = __shfl_sync(0xffffffffu, warp % 2 ? factors.y : factors.x, warp / 2);
#pragma unroll 1
    for (int k = threadIdx.x * 4; k < p.K; k += MN_FEW_CHUNK, row += MN_FEW_NEXT_CHUNK / 4) {
        const uint32_t one = row[0], two = row[MN_FEW_SECOND / 4];
        *(uint2 *)(p.row + k) = make_uint2(mn_few_two(mn_few_low(one) * r, mn_few_high(one) * r),
                                           mn_few_two(mn_few_low(two) * r, mn_few_high(two) * r));
    }
}

__device__ inline void mn_few_multiply(mn_few_block &room, const mn_few_note &note,
                                       mn_few_place &place) {
    const mn_few_products_note &p = note.products;
    const int warp = threadIdx.x / 32, half = place.half;
    mn_few_look look(p, place);
    const mn_few_way_of way(p);
    const bool has = mn_few_even(warp < way.n_units) != 0;
    const mn_few_unit &unit = p.unit[has ? warp : 0];
    const mn_few_kind_of kind(unit);
    const bool two = kind.n_strips() > 1;
    const mn_few_found found(room, half, kind.strip(0), kind.strip(two));
    mn_few_finish finish(unit, kind, place, has);
    mn_few_multiply_strips(room, p, way, place, look);
    if (has) finish.settle();
    mn_few_meet();
    const mn_few_added sums(way, found);
    if (has) {
        const mn_few_end *ends = (const mn_few_end *)((const char *)&note + note.ends_at);
        finish.run(sums.first, two ? sums.second : 1.0f, ends + unit.first_end, room.values[warp]);
    }
    if (__builtin_expect(way.norm && p.row, 0)) mn_few_keep_row(room, p, sums.factors);
    place.half ^= 1;
}

#endif

#endif
