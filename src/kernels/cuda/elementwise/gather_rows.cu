/* gather_rows.cu - rows of a table by index, and back to where they came from.
 *
 *   rows[i] = table[index[i]]        table[index[i]] += rows[i]      (no index twice) */
#include "kernels/cuda/elementwise/elementwise.cuh"

enum { THREADS = 256 };

struct indexed {
    mn_scan walk;    // over rows and their packs
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
        mn_unpack(x, source, mn_load_tile(source, from));
        if (w.scatters) {
            mn_unpack(old, target, mn_load_tile(target, to));
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
    if (!mn_iterate_over(&r.walk, rows, packs ? MN_PACK : 1)) return cudaErrorInvalidConfiguration;
    if (r.walk.n_packs == 0) return cudaSuccess;
    const unsigned blocks = mn_blocks(r.walk.n_packs, THREADS);
    if (packs) index_kernel<MN_PACK><<<blocks, THREADS, 0, on>>>(r);
    else index_kernel<1><<<blocks, THREADS, 0, on>>>(r);
    return mn_launch_status();
}
