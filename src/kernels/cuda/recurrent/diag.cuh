/* diag.cuh - diagonal recurrences of few states: blocks of 16 x 16 of them, one thread each, that
 * walk through time by tiles of 16 tokens.
 *
 * Thread i of a block has line i / 16 and column i % 16 of the block's cells. Numbers of a token
 * that belong to a line or to a column lie in shared memory, 16 tokens in a row, so that a thread
 * reads four tokens at once. */
#ifndef MN_KERNELS_CUDA_RECURRENT_DIAG_CUH
#define MN_KERNELS_CUDA_RECURRENT_DIAG_CUH

#include "kernels/cuda/prim/common.cuh"

enum {
    MN_LINE_SIDE = 16,
    MN_LINE_CELLS = MN_LINE_SIDE * MN_LINE_SIDE,    // threads of a block
    MN_LINE_TOKENS = 16,                       // of a tile
    MN_LINE_PITCH = MN_LINE_TOKENS + 4,        // rows 16 bytes aligned, in different banks
};

/* at[i][t]: number of line or column i at token t of the tile */
struct alignas(16) mn_line_rows {
    float at[MN_LINE_SIDE][MN_LINE_PITCH];

    /* Thread (t, i) brings one number. */
    __device__ void put(float x) {
        at[threadIdx.x % MN_LINE_SIDE][threadIdx.x / MN_LINE_SIDE] = x;
    }

    /* Tokens t to t + 3 of line or column i; t is a multiple of 4. */
    __device__ void get(float (&x)[4], int i, int t) const {
        const float4 four = *(const float4 *)(at[i] + t);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    }
};

/* Tokens [first, first + MN_LINE_TOKENS) of a sequence, or those of them that there are. */
struct mn_line_tile {
    mn_span span;
    int64_t first;
    int n_rows;
};

__device__ inline mn_line_tile mn_line_tile_at(const mn_span &span, int64_t index) {
    const int64_t first = index * MN_LINE_TOKENS;
    return { span, first, (int)min((int64_t)MN_LINE_TOKENS, span.length - first) };
}

__device__ inline int64_t mn_line_tiles(const mn_span &span) {
    return (span.length + MN_LINE_TOKENS - 1) / MN_LINE_TOKENS;
}

/* Where the tiles of sequence n begin among those of all, as mn_tile_slots counts them. */
__device__ inline int64_t mn_line_first_slot(const mn_call &call, int64_t n) {
    if (call.cu_seqlens) return call.cu_seqlens[n] / MN_LINE_TOKENS + n;
    return n * ((call.T + MN_LINE_TOKENS - 1) / MN_LINE_TOKENS);
}

/* Thread (t, i)'s number: element base + i of token t of head h; zero outside of `count` and of the
 * tile, and where the tensor is absent. */
template <typename T>
__device__ inline float mn_line_load(const mn_in &view, const mn_line_tile &tile, int64_t h,
                                      int64_t base, int64_t count) {
    const int t = threadIdx.x / MN_LINE_SIDE;
    const int64_t i = base + threadIdx.x % MN_LINE_SIDE;
    if (!view.data || i >= count || t >= tile.n_rows) return 0.0f;
    return mn_float(mn_row<T>(view, tile.span.b, tile.span.t0 + tile.first + t, h)[i]);
}

/* One exchange between lanes `width` ws: each keeps one half of 2 width tokens. */
template <int width>
__device__ __forceinline__ void mn_line_halve(float (&x)[MN_LINE_TOKENS]) {
    const bool upper = threadIdx.x & width;
#pragma unroll
    for (int i = 0; i < width; i++) {
        const float early = x[i], late = x[i + width];    // values: chosen addresses would
        const float give = upper ? early : late;          // keep x out of the registers
        x[i] = (upper ? late : early) + __shfl_xor_sync(0xffffffffu, give, width);
    }
}

/* x[t] summed over the 16 columns of each line: column t gets the sum of token t. The halves of the
 * lanes exchange halves of the tokens, so it takes 15 exchanges and not 64. */
__device__ __forceinline__ float mn_line_sums(float (&x)[MN_LINE_TOKENS]) {
    mn_line_halve<8>(x);
    mn_line_halve<4>(x);
    mn_line_halve<2>(x);
    mn_line_halve<1>(x);
    return x[0];
}

/* Two numbers of a token summed over the two lines of a warp: the first sum in the lower half of
 * its lanes, the second one in the upper half. */
__device__ inline float mn_line_pair_sums(float first, float second) {
    const bool upper = threadIdx.x & MN_LINE_SIDE;
    const float give = upper ? first : second, keep = upper ? second : first;
    return keep + __shfl_xor_sync(0xffffffffu, give, MN_LINE_SIDE);
}

#endif
