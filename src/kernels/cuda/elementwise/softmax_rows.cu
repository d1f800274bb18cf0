/* softmax_rows.cu - softmax over the last axis, and turning it.
 *
 *   softmax   y_i = e^(x_i - max x) / sum_j e^(x_j - max x)      dx (+)= y (dy - sum_j y_j dy_j)
 *   roll      to_i (+)= from_(i - by), indices modulo the width
 *
 * A row_group of lanes keeps a row of a softmax in registers where it is short and can be taken in
 * packs. Other rows are a warp's or a block's, which reads them once more for each pass, from a
 * cache. */
#include "kernels/cuda/elementwise/elementwise.cuh"

namespace mneme::elementwise {

enum { THREADS = 256, MAX_REG_WIDTH = 1024 };

struct rows {
    mn_offset_calc calc;    // a pack is a row
    mn_operand x, y, dy, dx;
    int64_t width;
    bool add;
};

/* Row numbers give positions through an iteration whose rows are one vector wide. */
__device__ static mn_coord row_coord(const mn_offset_calc &calc, uint32_t row) {
    return mn_coord_of<1>(calc, row);
}

template <int GROUP>
__device__ static void forward_row(const rows &r, const mn_coord &coord, int lane, float *smem) {
    const int64_t x = mn_offset(r.x, coord), y = mn_offset(r.y, coord);
    float top = -INFINITY, sum = 0.0f;
    for (int64_t i = lane; i < r.width; i += GROUP) top = fmaxf(top, mn_operand_load(r.x, x + i));
    top = mn_group_max<GROUP>(top, smem);
    for (int64_t i = lane; i < r.width; i += GROUP) sum += expf(mn_operand_load(r.x, x + i) - top);
    sum = mn_group_sum<GROUP>(sum, smem);
    for (int64_t i = lane; i < r.width; i += GROUP) {
        mn_operand_store(r.y, y + i, expf(mn_operand_load(r.x, x + i) - top) / sum);
    }
}

template <int GROUP>
__device__ static void backward_row(const rows &r, const mn_coord &coord, int lane, float *smem) {
    const int64_t y = mn_offset(r.y, coord), dy = mn_offset(r.dy, coord),
        dx = mn_offset(r.dx, coord);
    float along = 0.0f;
    for (int64_t i = lane; i < r.width; i += GROUP) {
        along = fmaf(mn_operand_load(r.y, y + i), mn_operand_load(r.dy, dy + i), along);
    }
    along = mn_group_sum<GROUP>(along, smem);
    for (int64_t i = lane; i < r.width; i += GROUP) {
        const float g = mn_operand_load(r.y, y + i) * (mn_operand_load(r.dy, dy + i) - along);
        mn_operand_store(r.dx, dx + i, r.add ? mn_operand_load(r.dx, dx + i) + g : g);
    }
}

template <int GROUP>
__global__ void __launch_bounds__(THREADS) softmax_kernel(const __grid_constant__ rows r) {
    __shared__ float smem[32];
    const uint32_t row = blockIdx.x * (THREADS / GROUP) + threadIdx.x / GROUP;
    if (row >= r.calc.n_vecs) return;
    const mn_coord coord = row_coord(r.calc, row);
    if (r.dx.data) backward_row<GROUP>(r, coord, threadIdx.x % GROUP, smem);
    else forward_row<GROUP>(r, coord, threadIdx.x % GROUP, smem);
}

/* Rows of at most 32 * KEPT packs: lane l of `lanes` has packs l, l + lanes, ... */
template <mn_operand_types TYPES, int KEPT>
__global__ void __launch_bounds__(THREADS)
softmax_pack_kernel(const __grid_constant__ rows r, int lanes) {
    const uint32_t row = blockIdx.x * (THREADS / lanes) + threadIdx.x / lanes;
    const bool in_range = row < r.calc.n_vecs, back = r.dx.data;
    const int64_t first = threadIdx.x % lanes * MN_VEC, step = lanes * MN_VEC;
    const mn_coord coord = row_coord(r.calc, in_range ? row : 0);
    const mn_operand &from = back ? r.y : r.x, &to = back ? r.dx : r.y;
    const int64_t from_at = mn_offset(from, coord), to_at = mn_offset(to, coord);
    float x[KEPT][MN_VEC], dy[KEPT][MN_VEC], top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int64_t i = first + k * step;
        const bool inside = in_range && i < r.width;
        if (inside) mn_unpack<TYPES>(x[k], from, mn_load_raw<TYPES>(from, from_at + i));
        if (inside && back) {
            mn_unpack<TYPES>(dy[k], r.dy, mn_load_raw<TYPES>(r.dy, mn_offset(r.dy, coord) + i));
        }
#pragma unroll
        for (int j = 0; j < MN_VEC; j++) {
            if (!inside) x[k][j] = back ? 0.0f : -INFINITY;
            if (!inside || !back) dy[k][j] = 0.0f;
            top = fmaxf(top, x[k][j]);
        }
    }
    for (int other = lanes / 2; other > 0; other /= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, other));
    }
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
#pragma unroll
        for (int j = 0; j < MN_VEC; j++) {
            const float past = x[k][j] - top;
            const float e = TYPES == MN_ALL_BF16 ? __expf(past) : expf(past);
            if (!back) x[k][j] = x[k][j] == -INFINITY ? 0.0f : e;
            sum += back ? x[k][j] * dy[k][j] : x[k][j];
        }
    }
    for (int other = lanes / 2; other > 0; other /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, other);
    }
    const float inverse = 1.0f / sum;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int64_t i = first + k * step;
        if (!in_range || i >= r.width) continue;
        float old[MN_VEC] = {};
        if (back && r.add) mn_unpack<TYPES>(old, to, mn_load_raw<TYPES>(to, to_at + i));
#pragma unroll
        for (int j = 0; j < MN_VEC; j++) {
            x[k][j] = back ? old[j] + x[k][j] * (dy[k][j] - sum) : x[k][j] * inverse;
        }
        mn_store_vec<TYPES>(to, to_at + i, x[k]);
    }
}

template <mn_operand_types TYPES>
static int launch_packs(const rows &r, cudaStream_t on) {
    int lanes = 1;
    while (lanes < 32 && lanes * MN_VEC < r.width) lanes *= 2;
    const unsigned blocks = mn_blocks(r.calc.n_vecs, THREADS / lanes);
    if (r.width <= lanes * MN_VEC) {
        softmax_pack_kernel<TYPES, 1><<<blocks, THREADS, 0, on>>>(r, lanes);
    } else {
        softmax_pack_kernel<TYPES, MAX_REG_WIDTH / 256><<<blocks, THREADS, 0, on>>>(r, lanes);
    }
    return mn_launch_status();
}

static bool takes_packs(const rows &r, const int64_t shape[4]) {
    const mn_axes axes = { { shape[0], shape[1], shape[2], shape[3] } };
    const mn_operand *const operands[] = { &r.x, &r.y, &r.dy, &r.dx };
    bool vectorized = shape[3] % MN_VEC == 0 && shape[3] <= MAX_REG_WIDTH;
    for (const mn_operand *operand : operands) vectorized &= mn_operand_vec_ok(*operand, axes);
    return vectorized;
}

MN_CUDA_ELEMENTWISE(softmax) {
    const mn_softmax_params *w = (const mn_softmax_params *)args;
    const cudaStream_t on = (cudaStream_t)backend;
    (void)workspace;
    rows r = { {}, mn_operand_of(w->x), mn_operand_of(w->y), mn_operand_of(w->dy),
        mn_operand_of(w->dx),
               w->shape[3], w->add };
    const mn_axes each = { { w->shape[0], w->shape[1], w->shape[2], 1 } };
    if (!mn_offset_calc_init(&r.calc, each, 1)) return cudaErrorInvalidConfiguration;
    if (r.calc.n_vecs == 0) return cudaSuccess;
    const int64_t n = r.calc.n_vecs;
    const mn_operand operands[] = { r.x, r.y, r.dy, r.dx };
    if (takes_packs(r, w->shape)) {
        switch (mn_operand_types_of(operands)) {
        case MN_ALL_BF16: return launch_packs<MN_ALL_BF16>(r, on);
        case MN_ALL_F32: return launch_packs<MN_ALL_F32>(r, on);
        default: return launch_packs<MN_MIXED>(r, on);
        }
    }
    if (r.width <= MAX_REG_WIDTH) {
        softmax_kernel<32><<<mn_blocks(n, THREADS / 32), THREADS, 0, on>>>(r);
    } else {
        softmax_kernel<THREADS><<<mn_blocks(n, 1), THREADS, 0, on>>>(r);
    }
    return mn_launch_status();
}

/* ---- roll ------------------------------------------------------------------------------------ */

struct roll_args {
    mn_offset_calc calc;
    mn_operand to, from;
    uint32_t by;
    bool add;
};

__global__ void __launch_bounds__(THREADS) roll_kernel(const __grid_constant__ roll_args r) {
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= r.calc.n_vecs) return;
    const mn_coord to = mn_coord_of<1>(r.calc, i);
    mn_coord from = to;
    from.x = to.x >= r.by ? to.x - r.by : to.x - r.by + (uint32_t)r.calc.width;
    const int64_t at = mn_offset(r.to, to);
    const float x = mn_operand_load(r.from, mn_offset(r.from, from));
    mn_operand_store(r.to, at, r.add ? mn_operand_load(r.to, at) + x : x);
}

MN_CUDA_ELEMENTWISE(roll) {
    const mn_roll_params *w = (const mn_roll_params *)args;
    (void)workspace;
    roll_args r = { {}, mn_operand_of(w->to), mn_operand_of(w->from), (uint32_t)w->by, w->add };
    const mn_axes axes = { { w->shape[0], w->shape[1], w->shape[2], w->shape[3] } };
    if (!mn_offset_calc_init(&r.calc, axes, 1)) return cudaErrorInvalidConfiguration;
    if (r.calc.n_vecs == 0) return cudaSuccess;
    roll_kernel<<<mn_blocks(r.calc.n_vecs, THREADS), THREADS, 0, (cudaStream_t)backend>>>(r);
    return mn_launch_status();
}

}    // namespace mneme::elementwise
