/* embedding_bwd.cu - what rows of a table get back from the places that took them.
 *
 *   table[v] (+)= sum over the i with tokens[i] = v of dy[i]
 *
 * Without floating-point atomics: places are sorted by token, and the sorted list is cut into
 * pieces of 32, however often a token comes. A block adds the rows of a piece; the sum of a token
 * that begins and ends inside goes to the table, the others wait as parts, one at either end of a
 * piece. Then whoever holds the beginning of such a token adds its parts in order.
 *
 * The sort is stable and takes 8 bits of the tokens at a time: counts of each digit in each tile of
 * 1024 places, where each digit of each tile begins, then places by digit. A warp counts 128 places
 * in order, and those of its lanes that have the same digit find each other by a vote. */
#include "kernels/cuda/elementwise/elementwise.cuh"

enum { THREADS = 256, WARPS = 8, DIGITS = 256, TILE = 1024, SCAN_THREADS = 1024 };
enum { PIECE = 32, SUM_THREADS = 128, COLUMNS = SUM_THREADS * MN_PACK };

/* ---- sort ------------------------------------------------------------------------------------ */

/* One pass over n places: those of `from` (NULL: 0, 1, 2, ...) by the digit at `shift`. */
struct sort_pass {
    const int32_t *tokens, *from;
    int32_t *to, *begins;    // begins[digit * n_tiles + tile]
    int64_t n, n_tiles;
    int shift;
};

struct sort_item {
    int32_t place;
    int digit;    // -1 behind the end
};

__device__ static sort_item item_at(const sort_pass &s, int64_t i) {
    if (i >= s.n) return { 0, -1 };
    const int32_t place = s.from ? s.from[i] : (int32_t)i;
    return { place, s.tokens[place] >> s.shift & (DIGITS - 1) };
}

/* Lanes of the warp that have the same digit as this one. */
__device__ static unsigned same_digit(int digit) {
    unsigned same = 0xffffffffu;
#pragma unroll
    for (int bit = 0; bit < 9; bit++) {    // the ninth tells those behind the end
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

__global__ void __launch_bounds__(THREADS) count_kernel(const __grid_constant__ sort_pass s) {
    __shared__ int counts[WARPS][DIGITS];
    count_tile(s, counts);
    int sum = 0;
    for (int warp = 0; warp < WARPS; warp++) sum += counts[warp][threadIdx.x];
    s.begins[threadIdx.x * s.n_tiles + blockIdx.x] = sum;
}

/* Counts become the sums of those in front of them. One block; a thread owns a stretch. */
__global__ void __launch_bounds__(SCAN_THREADS) scan_kernel(int32_t *counts, int64_t n) {
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

__global__ void __launch_bounds__(THREADS) place_kernel(const __grid_constant__ sort_pass s) {
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
            s.to[begin + __popc(before)] = item.place;
            if (before == 0) next[warp][item.digit] = begin + __popc(same);
        }
        __syncwarp();
    }
}

/* ---- sums ------------------------------------------------------------------------------------ */

struct by_token {
    mn_side table, dy;
    const int32_t *tokens, *sorted;
    float *parts;    // parts[piece][end][X]: end 0 of the token it begins with, 1 of the last one
    int64_t X, n;
    bool packs;      // rows of the table and of dy are whole packs
};

__device__ static int32_t token_at(const by_token &w, int64_t i) {
    return i >= 0 && i < w.n ? w.tokens[w.sorted[i]] : -1;
}

/* Columns [x, x + 8) of row `row` of a side; 0 behind the end. */
__device__ static void load_columns(float (&out)[MN_PACK], const by_token &w, const mn_side &side,
                                    int64_t row, int64_t x) {
    if (w.packs && x + MN_PACK <= w.X) {
        mn_unpack(out, side, mn_load_tile(side, row * w.X + x));
        return;
    }
#pragma unroll
    for (int j = 0; j < MN_PACK; j++) {
        out[j] = x + j < w.X ? mn_side_get(side, row * w.X + x + j) : 0.0f;
    }
}

/* Columns [x, x + 8) of row v of the table. */
__device__ static void add_to_table(const by_token &w, int32_t v, int64_t x,
                                    float (&sum)[MN_PACK]) {
    float there[MN_PACK];
    const int64_t at = v * w.X + x;
    load_columns(there, w, w.table, v, x);
#pragma unroll
    for (int j = 0; j < MN_PACK; j++) sum[j] += there[j];
    if (w.packs) {
        mn_store_pack(w.table, at, sum);
        return;
    }
#pragma unroll
    for (int j = 0; j < MN_PACK; j++) {
        if (x + j < w.X) mn_side_put(w.table, at + j, sum[j]);
    }
}

/* A run of one token ends: its sum goes to the table, or waits as the part of an end. */
__device__ static void close_run(const by_token &w, int64_t piece, int32_t v, bool came_from_before,
                                 bool goes_on, int64_t x, float (&sum)[MN_PACK]) {
    if (!came_from_before && !goes_on) {
        add_to_table(w, v, x, sum);
        return;
    }
    float *part = w.parts + (piece * 2 + (came_from_before ? 0 : 1)) * w.X;
#pragma unroll
    for (int j = 0; j < MN_PACK; j++) {
        if (x + j < w.X) part[x + j] = sum[j];
    }
}

__global__ void __launch_bounds__(SUM_THREADS) sum_kernel(const __grid_constant__ by_token w) {
    __shared__ int32_t tokens[PIECE + 2], places[PIECE];    // of the piece and its two neighbours
    const int64_t piece = blockIdx.x, first = piece * PIECE;
    const int count = (int)min((int64_t)PIECE, w.n - first);
    if (threadIdx.x < PIECE + 2) tokens[threadIdx.x] = token_at(w, first - 1 + (int)threadIdx.x);
    if (threadIdx.x < count) places[threadIdx.x] = w.sorted[first + threadIdx.x];
    __syncthreads();
    const int64_t x = (blockIdx.y * (int64_t)SUM_THREADS + threadIdx.x) * MN_PACK;
    if (x >= w.X) return;
    float sum[MN_PACK] = {};
    bool before = tokens[0] == tokens[1];    // the run began in an earlier piece
    enum { AHEAD = 4 };
    for (int i = 0; i < count; i += AHEAD) {
        float rows[AHEAD][MN_PACK];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (i + k < count) load_columns(rows[k], w, w.dy, places[i + k], x);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (i + k >= count) continue;
#pragma unroll
            for (int j = 0; j < MN_PACK; j++) sum[j] += rows[k][j];
            const int32_t v = tokens[1 + i + k];
            const bool goes_on = tokens[2 + i + k] == v;
            if (goes_on && i + k + 1 < count) continue;
            close_run(w, piece, v, before, goes_on, x, sum);
#pragma unroll
            for (int j = 0; j < MN_PACK; j++) sum[j] = 0.0f;
            before = false;
        }
    }
}

/* Pieces behind this one that begin with token v and follow each other. For a whole warp. */
__device__ static int64_t pieces_behind(const by_token &w, int64_t piece, int32_t v) {
    for (int64_t behind = 0;; behind += 32) {
        const int64_t next = piece + 1 + behind + threadIdx.x % 32;
        const unsigned other = ~__ballot_sync(0xffffffffu, token_at(w, next * PIECE) == v);
        if (other) return behind + __ffs(other) - 1;
    }
}

/* Where a token begins in a piece and goes on behind it, its parts are added up. */
__global__ void __launch_bounds__(SUM_THREADS) join_kernel(const __grid_constant__ by_token w) {
    const int64_t piece = blockIdx.x, first = piece * PIECE, last = first + PIECE - 1;
    const int32_t v = token_at(w, last);
    const bool begins = v >= 0 && token_at(w, last + 1) == v && token_at(w, first - 1) != v;
    const int64_t x = (blockIdx.y * (int64_t)SUM_THREADS + threadIdx.x) * MN_PACK;
    if (!begins) return;    // all threads of the block
    const int64_t behind = pieces_behind(w, piece, v);
    const int count = (int)max(min((int64_t)MN_PACK, w.X - x), (int64_t)0);
    float sum[MN_PACK] = {};
    const float *part = w.parts + (piece * 2 + 1) * w.X + x;
#pragma unroll
    for (int j = 0; j < MN_PACK; j++) {
        if (j < count) sum[j] = part[j];
    }
    part += w.X;    // the first end of the next piece
#pragma unroll 4
    for (int64_t next = 0; next < behind; next++, part += 2 * w.X) {
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) {
            if (j < count) sum[j] += part[j];
        }
    }
    if (count > 0) add_to_table(w, v, x, sum);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Where things are in the work space. */
struct spaces {
    size_t begins, sorted[2], parts, all;
};

static spaces layout(const mn_embed_work *w) {
    enum { ALIGN = 256 };
    const size_t tiles = (size_t)mn_ceil_div(w->n, (int64_t)TILE);
    const size_t pieces = (size_t)mn_ceil_div(w->n, (int64_t)PIECE);
    const size_t sizes[] = { tiles * DIGITS * sizeof(int32_t), (size_t)w->n * sizeof(int32_t),
                             (size_t)w->n * sizeof(int32_t),
                             pieces * 2 * (size_t)w->X * sizeof(float) };
    size_t at[5] = { 0 };
    for (int i = 0; i < 4; i++) at[i + 1] = (at[i] + sizes[i] + ALIGN - 1) / ALIGN * ALIGN;
    return { at[0], { at[1], at[2] }, at[3], at[4] };
}

extern "C" size_t mn_work_embed_cuda_bytes(const void *work) {
    return layout((const mn_embed_work *)work).all;
}

/* Places sorted by token; NULL when a launch fails. */
static const int32_t *sort(const mn_embed_work *w, char *space, const spaces &at, cudaStream_t on) {
    int32_t *sorted[2] = { (int32_t *)(space + at.sorted[0]), (int32_t *)(space + at.sorted[1]) };
    const int64_t n_tiles = mn_ceil_div(w->n, (int64_t)TILE);
    sort_pass s = { w->tokens, NULL, sorted[0], (int32_t *)(space + at.begins), w->n, n_tiles, 0 };
    for (int pass = 0; pass == 0 || (w->V - 1) >> s.shift > 0; pass++, s.shift += 8) {
        s.from = pass ? sorted[(pass + 1) % 2] : NULL;
        s.to = sorted[pass % 2];
        count_kernel<<<(unsigned)n_tiles, THREADS, 0, on>>>(s);
        scan_kernel<<<1, SCAN_THREADS, 0, on>>>(s.begins, n_tiles * DIGITS);
        place_kernel<<<(unsigned)n_tiles, THREADS, 0, on>>>(s);
    }
    return s.to;
}

MN_CUDA_WORK(embed) {
    const mn_embed_work *w = (const mn_embed_work *)work;
    const cudaStream_t on = (cudaStream_t)where;
    by_token t = {};
    t.table = mn_side_of(w->table);
    t.dy = mn_side_of(w->dy);
    t.tokens = w->tokens;
    t.X = w->X;
    t.n = w->n;
    if (!w->add) {
        const size_t item = t.table.wide ? sizeof(float) : sizeof(mn_bf16);
        const int code = (int)cudaMemsetAsync(w->table.data, 0, (size_t)(w->V * w->X) * item, on);
        if (code != cudaSuccess) return code;
    }
    if (w->n == 0 || w->X == 0) return cudaSuccess;
    const spaces at = layout(w);
    t.sorted = sort(w, (char *)space, at, on);
    t.parts = (float *)((char *)space + at.parts);
    t.packs = w->X % MN_PACK == 0 && (uintptr_t)w->dy.data % 16 == 0 &&
              (uintptr_t)w->table.data % 16 == 0;
    const dim3 blocks(mn_blocks(w->n, PIECE), mn_blocks(w->X, COLUMNS));
    sum_kernel<<<blocks, SUM_THREADS, 0, on>>>(t);
    join_kernel<<<blocks, SUM_THREADS, 0, on>>>(t);
    return mn_launch_status();
}
