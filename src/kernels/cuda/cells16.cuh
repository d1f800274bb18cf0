/* cells.cuh - recurrences in which every memory cell goes its own way: blocks of 16 x 16 cells, one
 * thread each, that walk through time by tiles of 16 tokens.
 *
 * Thread i of a block has line i / 16 and column i % 16 of the block's cells. Numbers of a token
 * that belong to a line or to a column lie in shared memory, 16 tokens in a row, so that a thread
 * reads four tokens at once. */
#ifndef MN_KERNELS_CUDA_CELLS16_CUH
#define MN_KERNELS_CUDA_CELLS16_CUH

#include "kernels/cuda/common.cuh"

enum {
    MN_CELL_SIDE = 16,
    MN_CELLS = MN_CELL_SIDE * MN_CELL_SIDE,    // threads of a block
    MN_CELL_TOKENS = 16,                       // of a tile
    MN_CELL_PITCH = MN_CELL_TOKENS + 4,        // rows 16 bytes aligned, in different banks
};

/* at[i][t]: number of line or column i at token t of the tile */
struct alignas(16) mn_cell_rows {
    float at[MN_CELL_SIDE][MN_CELL_PITCH];

    /* Thread (t, i) brings one number. */
    __device__ void put(float x) {
        at[threadIdx.x % MN_CELL_SIDE][threadIdx.x / MN_CELL_SIDE] = x;
    }

    /* Tokens t to t + 3 of line or column i; t is a multiple of 4. */
    __device__ void get(float (&x)[4], int i, int t) const {
        const float4 four = *(const float4 *)(at[i] + t);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    }
};

/* Tokens [first, first + MN_CELL_TOKENS) of a sequence, or those of them that there are. */
struct mn_cell_tile {
    mn_span span;
    int64_t first;
    int n_rows;
};

__device__ inline mn_cell_tile mn_cell_tile_at(const mn_span &span, int64_t index) {
    const int64_t first = index * MN_CELL_TOKENS;
    return { span, first, (int)min((int64_t)MN_CELL_TOKENS, span.length - first) };
}

__device__ inline int64_t mn_cell_tiles(const mn_span &span) {
    return (span.length + MN_CELL_TOKENS - 1) / MN_CELL_TOKENS;
}

/* Where the tiles of sequence n begin among those of all, as mn_tile_slots counts them. */
__device__ inline int64_t mn_cell_first_slot(const mn_call &call, int64_t n) {
    if (call.cu_seqlens) return call.cu_seqlens[n] / MN_CELL_TOKENS + n;
    return n * ((call.T + MN_CELL_TOKENS - 1) / MN_CELL_TOKENS);
}

/* Thread (t, i)'s number: element base + i of token t of head h; zero outside of `count` and of the
 * tile, and where the tensor is absent. */
template <typename T>
__device__ inline float mn_cell_fetch(const mn_in &view, const mn_cell_tile &tile, int64_t h,
                                      int64_t base, int64_t count) {
    const int t = threadIdx.x / MN_CELL_SIDE;
    const int64_t i = base + threadIdx.x % MN_CELL_SIDE;
    if (!view.data || i >= count || t >= tile.n_rows) return 0.0f;
    return mn_float(mn_row<T>(view, tile.span.b, tile.span.t0 + tile.first + t, h)[i]);
}

/* One exchange between lanes `width` apart: each keeps one half of 2 width tokens. */
template <int width>
__device__ __forceinline__ void mn_cell_halve(float (&x)[MN_CELL_TOKENS]) {
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
__device__ __forceinline__ float mn_cell_line_sums(float (&x)[MN_CELL_TOKENS]) {
    mn_cell_halve<8>(x);
    mn_cell_halve<4>(x);
    mn_cell_halve<2>(x);
    mn_cell_halve<1>(x);
    return x[0];
}

/* Two numbers of a token summed over the two lines of a warp: the first sum in the lower half of
 * its lanes, the second one in the upper half. */
__device__ inline float mn_cell_pair_sums(float first, float second) {
    const bool upper = threadIdx.x & MN_CELL_SIDE;
    const float give = upper ? first : second, keep = upper ? second : first;
    return keep + __shfl_xor_sync(0xffffffffu, give, MN_CELL_SIDE);
}

/* 1 / x to the last bit or two; denormal numbers count as zero. */
__device__ inline float mn_inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Tokens of all sequences. */
inline int64_t mn_cell_rows_of(const mn_call *call) {
    return call->cu_seqlens ? call->T : call->B * call->T;
}

/* Sums over parts that are rows (b, t, h): two tensors of `width` numbers each, the second one's
 * row after the first one's. */
template <typename T>
struct mn_put_rows {
    mn_out first, second;
    int64_t tokens, heads, width;

    __device__ void operator()(int64_t i, float sum) const {
        const int64_t row = i / (2 * width), at = i % (2 * width);
        const int64_t token = row / heads, b = token / tokens, t = token % tokens, h = row % heads;
        if (at < width && first.data) mn_put(mn_row<T>(first, b, t, h) + at, sum);
        if (at >= width && second.data) mn_put(mn_row<T>(second, b, t, h) + at - width, sum);
    }
};

#endif
