/* tape_rows.cu - rows of a table by index, and what such rows give back.
 *
 *   rows[i] = table[index[i]]        table[index[i]] += rows[i]      (no index twice)
 *   table[v] (+)= sum over the i with tokens[i] = v of dy[i]
 *
 * The sum has no atomics. A block owns a few rows of the table and a strip of their columns, looks
 * through all tokens for its own, and adds the rows it finds in their order: a thread owns two
 * columns, so that nothing is shared but the list of finds. */
#include "kernels/cuda/each.cuh"

enum { THREADS = 256 };

/* ---- gather and scatter ---------------------------------------------------------------------- */

struct indexed {
    mn_walk walk;    // over rows and their packs
    mn_side table, rows;
    const int32_t *index;
    mn_divisor T;
    bool scatters;
};

template <int N>
__global__ void __launch_bounds__(THREADS) index_kernel(const __grid_constant__ indexed w) {
    const uint32_t pack = blockIdx.x * THREADS + threadIdx.x;
    if (pack >= w.walk.n_packs) return;
    const mn_spot spot = mn_spot_of<N>(w.walk, pack);
    const uint32_t place = (uint32_t)w.index[spot.at[2]], b = mn_quotient(place, w.T);
    const int64_t row = mn_offset(w.rows, spot);
    const int64_t there = b * w.table.stride[0] + (place - b * w.T.d) * w.table.stride[1] + spot.x;
    const int64_t from = w.scatters ? row : there, to = w.scatters ? there : row;
    const mn_side &source = w.scatters ? w.rows : w.table, &target = w.scatters ? w.table : w.rows;
    const int count = (int)min((int64_t)N, w.walk.width - spot.x);
    if (N == MN_PACK && count == N) {
        float x[MN_PACK], old[MN_PACK];
        mn_unpack(x, source, mn_fetch(source, from));
        if (w.scatters) {
            mn_unpack(old, target, mn_fetch(target, to));
#pragma unroll
            for (int j = 0; j < N; j++) x[j] += old[j];
        }
        mn_store_pack(target, to, x);
        return;
    }
    for (int j = 0; j < count; j++) {
        const float x = mn_side_get(source, from + j);
        mn_side_put(target, to + j, w.scatters ? mn_side_get(target, to + j) + x : x);
    }
}

MN_CUDA_WORK(rows) {
    const mn_rows_work *w = (const mn_rows_work *)work;
    const cudaStream_t on = (cudaStream_t)where;
    (void)space;
    indexed r = { {}, mn_side_of(w->table), mn_side_of(w->rows), w->index,
                  mn_divide_by(w->shape[1]), w->scatters };
    const int64_t width = w->shape[3];
    r.rows.stride[2] = width;
    const mn_axes rows = { { 1, 1, w->n, width } };
    const mn_axes table = { { w->shape[0], w->shape[1], 1, width } };
    const bool packs = mn_side_packs(r.rows, rows) && mn_side_packs(r.table, table);
    if (!mn_walk_over(&r.walk, rows, packs ? MN_PACK : 1)) return cudaErrorInvalidConfiguration;
    if (r.walk.n_packs == 0) return cudaSuccess;
    const unsigned blocks = mn_blocks(r.walk.n_packs, THREADS);
    if (packs) index_kernel<MN_PACK><<<blocks, THREADS, 0, on>>>(r);
    else index_kernel<1><<<blocks, THREADS, 0, on>>>(r);
    return mn_launched();
}

/* ---- sums by token --------------------------------------------------------------------------- */

enum { COLUMNS = 2 * THREADS, MOST_ROWS = 64, LOOK = 4 * THREADS };

struct by_token {
    mn_side table, dy;
    const int32_t *tokens;
    int64_t V, X, n;
    int rows;    // of the table that a block owns
    bool add;
};

/* The places of this block's tokens among tokens [first, first + LOOK), in order; how many. A
 * thread looks at four neighbours, and counts by warps tell where its finds go. */
__device__ static int find(const by_token &w, int64_t first, int64_t v0, int32_t *places,
                           int *counts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int32_t mine[4];
    int found = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int64_t i = first + threadIdx.x * 4 + k;
        const int64_t v = i < w.n ? w.tokens[i] - v0 : -1;
        if (v >= 0 && v < w.rows) mine[found++] = (int32_t)i;
    }
    int before = found;    // finds of this lane and those in front of it
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    __syncthreads();
    if (lane == 31) counts[warp] = before;
    __syncthreads();
    int at = before - found, all = 0;
    for (int i = 0; i < THREADS / 32; i++) {
        if (i < warp) at += counts[i];
        all += counts[i];
    }
    for (int k = 0; k < found; k++) places[at + k] = mine[k];
    __syncthreads();
    return all;
}

/* sums[row][column], two columns of each row for a thread. */
__global__ void __launch_bounds__(THREADS) embed_kernel(const __grid_constant__ by_token w) {
    extern __shared__ float sums[];
    __shared__ int32_t places[LOOK];
    __shared__ int counts[THREADS / 32];
    __shared__ bool met[MOST_ROWS];
    const int64_t v0 = blockIdx.x * (int64_t)w.rows, x0 = blockIdx.y * (int64_t)COLUMNS;
    const int64_t mine[2] = { x0 + threadIdx.x, x0 + THREADS + threadIdx.x };
    for (int i = threadIdx.x; i < w.rows * COLUMNS; i += THREADS) sums[i] = 0.0f;
    if (threadIdx.x < MOST_ROWS) met[threadIdx.x] = false;
    for (int64_t first = 0; first < w.n; first += LOOK) {
        const int found = find(w, first, v0, places, counts);
#pragma unroll 4
        for (int k = 0; k < found; k++) {
            const int64_t row = places[k] * w.X;
            const int v = (int)(w.tokens[places[k]] - v0);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float *sum = &sums[v * COLUMNS + c * THREADS + threadIdx.x];
                if (mine[c] < w.X) *sum += mn_side_get(w.dy, row + mine[c]);
            }
            if (threadIdx.x == 0) met[v] = true;
        }
        __syncthreads();
    }
    for (int v = 0; v < w.rows && v0 + v < w.V; v++) {
        if (w.add && !met[v]) continue;
        for (int c = 0; c < 2; c++) {
            const int64_t at = (v0 + v) * w.X + mine[c];
            if (mine[c] >= w.X) continue;
            const float sum = sums[v * COLUMNS + c * THREADS + threadIdx.x];
            mn_side_put(w.table, at, w.add ? mn_side_get(w.table, at) + sum : sum);
        }
    }
}

/* Small vocabularies get blocks of fewer rows: there are more blocks then, and less to look at for
 * each. */
MN_CUDA_WORK(embed) {
    const mn_embed_work *w = (const mn_embed_work *)work;
    (void)space;
    const int64_t rows = mn_min(mn_max(w->V / 512, (int64_t)1), (int64_t)MOST_ROWS);
    const by_token t = { mn_side_of(w->table), mn_side_of(w->dy), w->tokens, w->V, w->X, w->n,
                         (int)rows, w->add };
    const int bytes = (int)(rows * COLUMNS * sizeof(float));
    const dim3 blocks(mn_blocks(w->V, rows), mn_blocks(w->X, COLUMNS));
    const int code = (int)cudaFuncSetAttribute(
        embed_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess) return code;
    embed_kernel<<<blocks, THREADS, bytes, (cudaStream_t)where>>>(t);
    return mn_launched();
}
