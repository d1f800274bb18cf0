/* embedding_bwd.cu - what rows of a table get back from the positions that took them.
 *
 *   table[v] (+)= sum over the i with tokens[i] = v of dy[i]
 *
 * Without floating-point atomics: positions are sorted by token, and the sorted list is cut into
 * chunks of 32, however often a token comes. A block adds the rows of a chunk; the sum of a token
 * that begins and ends inside goes to the table, the others wait as parts, one at either end of a
 * chunk. Then whoever holds the beginning of such a token adds its parts in order.
 *
 * The sort is stable and takes 8 bits of the tokens at a time: counts of each digit in each tile
 * of 1024 positions, where each digit of each tile begins, then positions by digit. A warp counts
 * 128 positions in order, and those of its lanes that have the same digit find each other by a
 * vote. */
#include "kernels/cuda/elementwise/elementwise.cuh"

namespace mneme::elementwise {

enum { THREADS = 256, WARPS = 8, DIGITS = 256, TILE = 1024, SCAN_THREADS = 1024 };
enum { CHUNK = 32, SUM_THREADS = 128, COLUMNS = SUM_THREADS * MN_VEC };

/* ---- sort ------------------------------------------------------------------------------------ */

/* One pass over n positions: those of `from` (NULL: 0, 1, 2, ...) by the digit at `shift`. */
struct sort_pass {
    const int32_t *tokens, *from;
    int32_t *to, *begins;    // begins[digit * n_tiles + tile]
    int64_t n, n_tiles;
    int shift;
};

struct sort_item {
    int32_t position;
    int digit;    // -1 behind the end
};

__device__ static sort_item item_at(const sort_pass &s, int64_t i) {
    if (i >= s.n) return { 0, -1 };
    const int32_t position = s.from ? s.from[i] : (int32_t)i;
    return { position, s.tokens[position] >> s.shift & (DIGITS - 1) };
}

/* Lanes of the warp that have the same digit as this one. */
__device__ static unsigned same_digit(int digit) {
    unsigned same = 0xffffffffu;
#pragma unroll
    for (int bit = 0; bit < 9; bit++) {    // the ninth marks those behind the end
        const unsigned set = __ballot_sync(0xffffffffu, digit >> bit & 1);
        same &= digit >> bit & 1 ? set : ~set;
    }
    return same;
}

/* counts[warp][digit] of the warp's part of the tile. */
__device__ static void count_tile(const sort_pass &s, int (*counts)[DIGITS]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < WARPS * DIGITS; i += THREADS) counts[0][i] = 0;
    __syncthreads();
    const int64_t first = blockIdx.x * (int64_t)TILE + warp * (TILE / WARPS);
    for (int i = lane; i < TILE / WARPS; i += 32) {
        const int digit = item_at(s, first + i).digit;
        const unsigned same = same_digit(digit);
        if (digit >= 0 && (same & ((1u << lane) - 1)) == 0) counts[warp][digit] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
}

__global__ void __launch_bounds__(THREADS)
    embed_histogram_kernel(const __grid_constant__ sort_pass s) {
    __shared__ int counts[WARPS][DIGITS];
    count_tile(s, counts);
    int sum = 0;
    for (int warp = 0; warp < WARPS; warp++) sum += counts[warp][threadIdx.x];
    s.begins[threadIdx.x * s.n_tiles + blockIdx.x] = sum;
}

/* Counts become the sums of those in front of them. One block; a thread owns a stretch. */
__global__ void __launch_bounds__(SCAN_THREADS) embed_scan_kernel(int32_t *counts, int64_t n) {
    __shared__ int32_t sums[SCAN_THREADS];
    const int64_t each = (n + SCAN_THREADS - 1) / SCAN_THREADS;
    const int64_t first = min(threadIdx.x * each, n), last = min(first + each, n);
    int32_t sum = 0;
    for (int64_t i = first; i < last; i++) sum += counts[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int step = 1; step < SCAN_THREADS; step *= 2) {
        const int32_t before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
        __syncthreads();
    }
    int32_t at = sums[threadIdx.x] - sum;
    for (int64_t i = first; i < last; i++) {
        const int32_t count = counts[i];
        counts[i] = at;
        at += count;
    }
}

__global__ void __launch_bounds__(THREADS)
    embed_scatter_kernel(const __grid_constant__ sort_pass s) {
    __shared__ int next[WARPS][DIGITS];    // where the warp's next place with that digit goes
    count_tile(s, next);
    int at = s.begins[threadIdx.x * s.n_tiles + blockIdx.x];
    for (int warp = 0; warp < WARPS; warp++) {
        const int count = next[warp][threadIdx.x];
        next[warp][threadIdx.x] = at;
        at += count;
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t first = blockIdx.x * (int64_t)TILE + warp * (TILE / WARPS);
    for (int i = lane; i < TILE / WARPS; i += 32) {
        const sort_item item = item_at(s, first + i);
        const unsigned same = same_digit(item.digit), before = same & ((1u << lane) - 1);
        const int begin = item.digit >= 0 ? next[warp][item.digit] : 0;
        __syncwarp();
        if (item.digit >= 0) {
            s.to[begin + __popc(before)] = item.position;
            if (before == 0) next[warp][item.digit] = begin + __popc(same);
        }
        __syncwarp();
    }
}

/* ---- sums ------------------------------------------------------------------------------------ */

struct segment_sum {
    mn_operand table, dy;
    const int32_t *tokens, *sorted;
    // parts[chunk][end][X]: end 0 of the token it begins with, 1 of the last one
    float *partials;
    int64_t X, n;
    bool vectorized;      // rows of the table and of dy are whole packs
};

__device__ static int32_t token_at(const segment_sum &w, int64_t i) {
    return i >= 0 && i < w.n ? w.tokens[w.sorted[i]] : -1;
}

/* Columns [x, x + 8) of row `row` of a side; 0 behind the end. */
__device__ static void load_columns(float (&out)[MN_VEC], const segment_sum &w,
                                    const mn_operand &operand,
                                    int64_t row, int64_t x) {
    if (w.vectorized && x + MN_VEC <= w.X) {
        mn_unpack(out, operand, mn_load_raw(operand, row * w.X + x));
        return;
    }
#pragma unroll
    for (int j = 0; j < MN_VEC; j++) {
        out[j] = x + j < w.X ? mn_operand_load(operand, row * w.X + x + j) : 0.0f;
    }
}

/* Columns [x, x + 8) of row v of the table. */
__device__ static void add_to_table(const segment_sum &w, int32_t v, int64_t x,
                                    float (&sum)[MN_VEC]) {
    float old[MN_VEC];
    const int64_t at = v * w.X + x;
    load_columns(old, w, w.table, v, x);
#pragma unroll
    for (int j = 0; j < MN_VEC; j++) sum[j] += old[j];
    if (w.vectorized) {
        mn_store_vec(w.table, at, sum);
        return;
    }
#pragma unroll
    for (int j = 0; j < MN_VEC; j++) {
        if (x + j < w.X) mn_operand_store(w.table, at + j, sum[j]);
    }
}

/* A run of one token ends: its sum goes to the table, or waits as the part of an end. */
__device__ static void flush_run(const segment_sum &w, int64_t chunk, int32_t v,
                                 bool continues_prev,
                                 bool continues_next, int64_t x, float (&sum)[MN_VEC]) {
    if (!continues_prev && !continues_next) {
        add_to_table(w, v, x, sum);
        return;
    }
    float *partial = w.partials + (chunk * 2 + (continues_prev ? 0 : 1)) * w.X;
#pragma unroll
    for (int j = 0; j < MN_VEC; j++) {
        if (x + j < w.X) partial[x + j] = sum[j];
    }
}

__global__ void __launch_bounds__(SUM_THREADS)
    embed_segment_sum_kernel(const __grid_constant__ segment_sum w) {
    // of the chunk and its two neighbours
    __shared__ int32_t tokens[CHUNK + 2], positions[CHUNK];
    const int64_t chunk = blockIdx.x, first = chunk * CHUNK;
    const int count = (int)min((int64_t)CHUNK, w.n - first);
    if (threadIdx.x < CHUNK + 2) tokens[threadIdx.x] = token_at(w, first - 1 + (int)threadIdx.x);
    if (threadIdx.x < count) positions[threadIdx.x] = w.sorted[first + threadIdx.x];
    __syncthreads();
    const int64_t x = (blockIdx.y * (int64_t)SUM_THREADS + threadIdx.x) * MN_VEC;
    if (x >= w.X) return;
    float sum[MN_VEC] = {};
    bool before = tokens[0] == tokens[1];    // the run began in an earlier chunk
    enum { PREFETCH = 4 };
    for (int i = 0; i < count; i += PREFETCH) {
        float rows[PREFETCH][MN_VEC];
#pragma unroll
        for (int k = 0; k < PREFETCH; k++) {
            if (i + k < count) load_columns(rows[k], w, w.dy, positions[i + k], x);
        }
#pragma unroll
        for (int k = 0; k < PREFETCH; k++) {
            if (i + k >= count) continue;
#pragma unroll
            for (int j = 0; j < MN_VEC; j++) sum[j] += rows[k][j];
            const int32_t v = tokens[1 + i + k];
            const bool continues_next = tokens[2 + i + k] == v;
            if (continues_next && i + k + 1 < count) continue;
            flush_run(w, chunk, v, before, continues_next, x, sum);
#pragma unroll
            for (int j = 0; j < MN_VEC; j++) sum[j] = 0.0f;
            before = false;
        }
    }
}

/* Pieces behind this one that begin with token v and follow each other. For a whole warp. */
__device__ static int64_t chunks_after(const segment_sum &w, int64_t chunk, int32_t v) {
    for (int64_t n_after = 0;; n_after += 32) {
        const int64_t next = chunk + 1 + n_after + threadIdx.x % 32;
        const unsigned other = ~__ballot_sync(0xffffffffu, token_at(w, next * CHUNK) == v);
        if (other) return n_after + __ffs(other) - 1;
    }
}

/* Where a token begins in a chunk and goes on behind it, its parts are added up. */
__global__ void __launch_bounds__(SUM_THREADS)
    embed_join_kernel(const __grid_constant__ segment_sum w) {
    const int64_t chunk = blockIdx.x, first = chunk * CHUNK, last = first + CHUNK - 1;
    const int32_t v = token_at(w, last);
    const bool begins = v >= 0 && token_at(w, last + 1) == v && token_at(w, first - 1) != v;
    const int64_t x = (blockIdx.y * (int64_t)SUM_THREADS + threadIdx.x) * MN_VEC;
    if (!begins) return;    // all threads of the block
    const int64_t n_after = chunks_after(w, chunk, v);
    const int count = (int)max(min((int64_t)MN_VEC, w.X - x), (int64_t)0);
    float sum[MN_VEC] = {};
    const float *partial = w.partials + (chunk * 2 + 1) * w.X + x;
#pragma unroll
    for (int j = 0; j < MN_VEC; j++) {
        if (j < count) sum[j] = partial[j];
    }
    partial += w.X;    // the first end of the next chunk
#pragma unroll 4
    for (int64_t next = 0; next < n_after; next++, partial += 2 * w.X) {
#pragma unroll
        for (int j = 0; j < MN_VEC; j++) {
            if (j < count) sum[j] += partial[j];
        }
    }
    if (count > 0) add_to_table(w, v, x, sum);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Where things are in the work space. */
struct workspace_layout {
    size_t begins, sorted[2], partials, all;
};

static workspace_layout make_layout(const mn_embed_params *w) {
    enum { ALIGN = 256 };
    const size_t tiles = (size_t)mn_ceil_div(w->n, (int64_t)TILE);
    const size_t chunks = (size_t)mn_ceil_div(w->n, (int64_t)CHUNK);
    const size_t sizes[] = { tiles * DIGITS * sizeof(int32_t), (size_t)w->n * sizeof(int32_t),
                             (size_t)w->n * sizeof(int32_t),
                             chunks * 2 * (size_t)w->X * sizeof(float) };
    size_t at[5] = { 0 };
    for (int i = 0; i < 4; i++) at[i + 1] = (at[i] + sizes[i] + ALIGN - 1) / ALIGN * ALIGN;
    return { at[0], { at[1], at[2] }, at[3], at[4] };
}

extern "C" size_t mn_elementwise_embed_cuda_bytes(const void *args) {
    return make_layout((const mn_embed_params *)args).all;
}

/* Places sorted by token; NULL when a launch fails. */
static const int32_t *sort(const mn_embed_params *w, char *workspace, const workspace_layout &at,
                           cudaStream_t on) {
    int32_t *sorted[2] = { (int32_t *)(workspace + at.sorted[0]),
        (int32_t *)(workspace + at.sorted[1]) };
    const int64_t n_tiles = mn_ceil_div(w->n, (int64_t)TILE);
    sort_pass s = { w->tokens, NULL, sorted[0], (int32_t *)(workspace + at.begins), w->n, n_tiles,
        0 };
    for (int pass = 0; pass == 0 || (w->V - 1) >> s.shift > 0; pass++, s.shift += 8) {
        s.from = pass ? sorted[(pass + 1) % 2] : NULL;
        s.to = sorted[pass % 2];
        embed_histogram_kernel<<<(unsigned)n_tiles, THREADS, 0, on>>>(s);
        embed_scan_kernel<<<1, SCAN_THREADS, 0, on>>>(s.begins, n_tiles * DIGITS);
        embed_scatter_kernel<<<(unsigned)n_tiles, THREADS, 0, on>>>(s);
    }
    return s.to;
}

MN_CUDA_ELEMENTWISE(embed) {
    const mn_embed_params *w = (const mn_embed_params *)args;
    const cudaStream_t on = (cudaStream_t)backend;
    segment_sum t = {};
    t.table = mn_operand_of(w->table);
    t.dy = mn_operand_of(w->dy);
    t.tokens = w->tokens;
    t.X = w->X;
    t.n = w->n;
    if (!w->add) {
        const size_t item = t.table.is_f32 ? sizeof(float) : sizeof(mn_bf16);
        const int code = (int)cudaMemsetAsync(w->table.data, 0, (size_t)(w->V * w->X) * item, on);
        if (code != cudaSuccess) return code;
    }
    if (w->n == 0 || w->X == 0) return cudaSuccess;
    const workspace_layout at = make_layout(w);
    t.sorted = sort(w, (char *)workspace, at, on);
    t.partials = (float *)((char *)workspace + at.partials);
    t.vectorized = w->X % MN_VEC == 0 && (uintptr_t)w->dy.data % 16 == 0 &&
              (uintptr_t)w->table.data % 16 == 0;
    const dim3 blocks(mn_blocks(w->n, CHUNK), mn_blocks(w->X, COLUMNS));
    embed_segment_sum_kernel<<<blocks, SUM_THREADS, 0, on>>>(t);
    embed_join_kernel<<<blocks, SUM_THREADS, 0, on>>>(t);
    return mn_launch_status();
}

}    // namespace mneme::elementwise
