/* gather_rows.cu - rows of a table by index, and back to where they came from.
 *
 *   rows[i] = table[index[i]]        table[index[i]] += rows[i]      (no index twice) */
#include "kernels/cuda/elementwise/elementwise.cuh"
#include "kernels/cuda/gemm/gemm_fallback.h"

namespace mneme::elementwise {

enum { THREADS = 256 };

struct indexed {
    mn_offset_calc calc;    // over rows and their packs
    mn_operand table, rows;
    const int32_t *index;
    mn_fast_divisor T;
    bool scatters;
};

template <int N>
__global__ void __launch_bounds__(THREADS) index_rows_kernel(const __grid_constant__ indexed w) {
    const uint32_t pack = blockIdx.x * THREADS + threadIdx.x;
    if (pack >= w.calc.n_vecs) return;
    const mn_coord coord = mn_coord_of<N>(w.calc, pack);
    const uint32_t row_index = (uint32_t)w.index[coord.at[2]], b = mn_fast_div(row_index, w.T);
    const int64_t row = mn_offset(w.rows, coord);
    const int64_t table_offset = b * w.table.stride[0] + (row_index - b * w.T.d)
        * w.table.stride[1] + coord.x;
    const int64_t from = w.scatters ? row : table_offset, to = w.scatters ? table_offset : row;
    const mn_operand &source = w.scatters ? w.rows : w.table,
        &target = w.scatters ? w.table : w.rows;
    const int count = (int)min((int64_t)N, w.calc.width - coord.x);
    if (N == MN_VEC && count == N) {
        float x[MN_VEC], old[MN_VEC];
        mn_unpack(x, source, mn_load_raw(source, from));
        if (w.scatters) {
            mn_unpack(old, target, mn_load_raw(target, to));
#pragma unroll
            for (int j = 0; j < N; j++) x[j] += old[j];
        }
        mn_store_vec(target, to, x);
        return;
    }
    for (int j = 0; j < count; j++) {
        const float x = mn_operand_load(source, from + j);
        mn_operand_store(target, to + j, w.scatters ? mn_operand_load(target, to + j) + x : x);
    }
}

MN_CUDA_ELEMENTWISE(rows) {
    const mn_rows_params *w = (const mn_rows_params *)args;
    const cudaStream_t on = (cudaStream_t)backend;
    (void)workspace;
    if (w->quant) {
        return mn_quant_rows_cuda(w->quant, w->rows.dtype, w->rows.data, w->index, 0, w->n, on);
    }
    indexed r = { {}, mn_operand_of(w->table), mn_operand_of(w->rows), w->index,
                  mn_fast_divisor_of(w->shape[1]), w->scatters };
    const int64_t width = w->shape[3];
    r.rows.stride[2] = width;
    const mn_axes rows = { { 1, 1, w->n, width } };
    const mn_axes table = { { w->shape[0], w->shape[1], 1, width } };
    const bool vectorized = mn_operand_vec_ok(r.rows, rows) && mn_operand_vec_ok(r.table, table);
    if (!mn_offset_calc_init(&r.calc, rows,
                             vectorized ? MN_VEC : 1)) return cudaErrorInvalidConfiguration;
    if (r.calc.n_vecs == 0) return cudaSuccess;
    const unsigned blocks = mn_blocks(r.calc.n_vecs, THREADS);
    if (vectorized) index_rows_kernel<MN_VEC><<<blocks, THREADS, 0, on>>>(r);
    else index_rows_kernel<1><<<blocks, THREADS, 0, on>>>(r);
    return mn_launch_status();
}

}    // namespace mneme::elementwise
