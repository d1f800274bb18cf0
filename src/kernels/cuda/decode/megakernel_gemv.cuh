/* megakernel_gemv.cuh - gemms of one row with several weights as a stage (kernels/decode.h).
 *
 * A warp has 128 elements of each chunk of 1024, of the row and of all weights. While it waits for
 * the row it takes its part of the weights to registers; it makes its elements of the row itself,
 * as
 * soon as they are there, and its sums for all col_tiles; then the block meets, once, and a warp
 * adds
 * up the eight sums of each column of a out_tile. What a norm divides by is a factor of the sums:
 * nothing waits for it. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_GEMV_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_GEMV_CUH

#include "kernels/cuda/decode/megakernel_epilogue.cuh"

#if __CUDA_ARCH__ >= 900

/* What a stage needs of its instr once the row is there: looked up before. */
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

/* A lane's part of a warp's 128 elements of the eight rows of a frag: row lane / 4, and of each 32
 * elements eight. */
struct mn_decode_weight_frag {
    uint4 part[MN_DECODE_FRAG_VECS];

    /* Any elements: what may stay unset would be carried from stage to stage. */
    __device__ void discard(void) {
#pragma unroll
        for (int i = 0; i < MN_DECODE_FRAG_VECS; i++) {
            asm("" : "=r"(part[i].x), "=r"(part[i].y), "=r"(part[i].z), "=r"(part[i].w));
        }
    }
};

/* The next `n` pieces of the ring, or as many as there is smem for. Lane i waits for frag i, and
 * says that it has been read. Behind the last number of a row lies any other one. */
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
    return mn_smem_address((const uint32_t *)smem.row + threadIdx.x / 2 * 4 + threadIdx.x % 2);
}

/* Four elements of bf16 by four; adds their squares up. */
struct mn_decode_weighted_row {
    float y[4];

    __device__ mn_decode_weighted_row(float &squares, uint2 x, uint2 by) {
        y[0] = mn_bf16_low(x.x), y[1] = mn_bf16_high(x.x);
        y[2] = mn_bf16_low(x.y), y[3] = mn_bf16_high(x.y);
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

    __device__ uint2 elements(void) const {
        return make_uint2(mn_bf16_pack2(y[0], y[1]), mn_bf16_pack2(y[2], y[3]));
    }
};

/* A lane's words of a row, of its gate, and what it is weighted by, as they are found: asked for
 * before anything else is done. */
struct mn_decode_row_poll {
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
            if (first + c * MN_DECODE_CHUNK < K) {
                x[c].fetch(words + c * (MN_DECODE_CHUNK / MN_DECODE_PER_LINE * MN_DECODE_LINE));
            }
        }
        if (gated && first < K) z.fetch(place.words + gate_at);
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
        mn_decode_weighted_row weighted(squares, y, look.weight);
        if (way.gated) weighted.gate(look.z.elements(), way.sigmoid);
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
            y = mn_decode_weighted_row(squares, y, look.weight).elements();
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
        return mn_smem_address(row + lane % 4 * 2 + lane / 4 % 2);
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

/* Where a stage's gemms stand: the chunk of the next frag, and a col_tile's sum up to there. */
struct mn_decode_mainloop_state {
    uint32_t row;    // the lane's, in shared memory
    int chunk;
    float sum, *to;

    /* Pieces from FROM on of a group, some together. A col_tile is a chunk: */
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

    /* Or a col_tile has several, the first of these being `chunk`. */
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

    /* Sums of col_tiles of a chunk. */
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

/* All col_tiles, chunk by chunk, some pieces at a time, of which the first ones are taken before
 * the
 * row is there; the warp's sums and squares to shared memory. */
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
        sums[0] = mn_decode_materialize(mn_smem_address(&smem.sums[buf][one][column][warp]));
        sums[1] = mn_decode_materialize(mn_smem_address(&smem.sums[buf][other][column][warp]));
        squares = mn_smem_address(&smem.squares[buf][warp]);
    }

    __device__ static float2 get(uint32_t place) {
        const uint2 two = mn_decode_load_shared(place);
        return make_float2(__uint_as_float(two.x), __uint_as_float(two.y));
    }
};

/* Sums of a out_tile's two col_tiles, of which lanes have parts: of a column, in all four lanes.
 * Norms of
 * the row, or of groups of it, divide by the root of a mean of squares. */
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
            if (way.norm) factors_of(way, squares);
            first = add_up(one, factors), second = add_up(other, factors);
        }
    }
};

/* The row as others would find it. */
__device__ inline void mn_decode_store_row(mn_decode_smem &smem, const mn_decode_gemm_instr &p,
                                       float2 factors) {
    const int warp = threadIdx.x / 32;
    const uint32_t *row = (const uint32_t *)smem.row + threadIdx.x / 2 * 4 + threadIdx.x % 2;
    const float r = __shfl_sync(0xffffffffu, warp % 2 ? factors.y : factors.x, warp / 2);
#pragma unroll 1
    for (int k = threadIdx.x * 4; k < p.K; k += MN_DECODE_CHUNK,
         row += MN_DECODE_CHUNK_STRIDE / 4) {
        const uint32_t one = row[0], two = row[MN_DECODE_SECOND / 4];
        *(uint2 *)(p.row + k) = make_uint2(mn_bf16_pack2(mn_bf16_low(one) * r,
                                                         mn_bf16_high(one) * r),
                                           mn_bf16_pack2(mn_bf16_low(two) * r,
                                                         mn_bf16_high(two) * r));
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
    if (__builtin_expect(way.norm && p.row, 0)) mn_decode_store_row(smem, p, sums.factors);
    place.buf ^= 1;
}

#endif

#endif
