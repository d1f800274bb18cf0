/* softmax_rows.cu - softmax over the last axis, and turning it.
 *
 *   softmax   y_i = e^(x_i - max x) / sum_j e^(x_j - max x)      dx (+)= y (dy - sum_j y_j dy_j)
 *   roll      to_i (+)= from_(i - by), indices modulo the width
 *
 * A team of lanes keeps a row of a softmax in registers where it is short and can be taken in
 * packs. Other rows are a warp's or a block's, which reads them once more for each pass, from a
 * cache. */
#include "kernels/cuda/elementwise/elementwise.cuh"

enum { THREADS = 256, SHORT = 1024 };

struct rows {
    mn_scan walk;    // a pack is a row
    mn_side x, y, dy, dx;
    int64_t width;
    bool add;
};

/* Row numbers tell places through a walk whose rows are one pack wide. */
__device__ static mn_spot row_spot(const mn_scan &walk, uint32_t row) {
    return mn_spot_of<1>(walk, row);
}

template <int GROUP>
__device__ static void forward_row(const rows &r, const mn_spot &spot, int lane, float *room) {
    const int64_t x = mn_offset(r.x, spot), y = mn_offset(r.y, spot);
    float top = -INFINITY, sum = 0.0f;
    for (int64_t i = lane; i < r.width; i += GROUP) top = fmaxf(top, mn_side_get(r.x, x + i));
    top = mn_group_max<GROUP>(top, room);
    for (int64_t i = lane; i < r.width; i += GROUP) sum += expf(mn_side_get(r.x, x + i) - top);
    sum = mn_group_sum<GROUP>(sum, room);
    for (int64_t i = lane; i < r.width; i += GROUP) {
        mn_side_put(r.y, y + i, expf(mn_side_get(r.x, x + i) - top) / sum);
    }
}

template <int GROUP>
__device__ static void backward_row(const rows &r, const mn_spot &spot, int lane, float *room) {
    const int64_t y = mn_offset(r.y, spot), dy = mn_offset(r.dy, spot), dx = mn_offset(r.dx, spot);
    float along = 0.0f;
    for (int64_t i = lane; i < r.width; i += GROUP) {
        along = fmaf(mn_side_get(r.y, y + i), mn_side_get(r.dy, dy + i), along);
    }
    along = mn_group_sum<GROUP>(along, room);
    for (int64_t i = lane; i < r.width; i += GROUP) {
        const float g = mn_side_get(r.y, y + i) * (mn_side_get(r.dy, dy + i) - along);
        mn_side_put(r.dx, dx + i, r.add ? mn_side_get(r.dx, dx + i) + g : g);
    }
}

template <int GROUP>
__global__ void __launch_bounds__(THREADS) softmax_kernel(const __grid_constant__ rows r) {
    __shared__ float room[32];
    const uint32_t row = blockIdx.x * (THREADS / GROUP) + threadIdx.x / GROUP;
    if (row >= r.walk.n_packs) return;
    const mn_spot spot = row_spot(r.walk, row);
    if (r.dx.data) backward_row<GROUP>(r, spot, threadIdx.x % GROUP, room);
    else forward_row<GROUP>(r, spot, threadIdx.x % GROUP, room);
}

/* Rows of at most 32 * KEPT packs: lane l of `lanes` has packs l, l + lanes, ... */
template <mn_types TYPES, int KEPT>
__global__ void __launch_bounds__(THREADS)
softmax_pack_kernel(const __grid_constant__ rows r, int lanes) {
    const uint32_t row = blockIdx.x * (THREADS / lanes) + threadIdx.x / lanes;
    const bool there = row < r.walk.n_packs, back = r.dx.data;
    const int64_t first = threadIdx.x % lanes * MN_PACK, step = lanes * MN_PACK;
    const mn_spot spot = row_spot(r.walk, there ? row : 0);
    const mn_side &from = back ? r.y : r.x, &to = back ? r.dx : r.y;
    const int64_t from_at = mn_offset(from, spot), to_at = mn_offset(to, spot);
    float x[KEPT][MN_PACK], dy[KEPT][MN_PACK], top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int64_t i = first + k * step;
        const bool inside = there && i < r.width;
        if (inside) mn_unpack<TYPES>(x[k], from, mn_load_tile<TYPES>(from, from_at + i));
        if (inside && back) {
            mn_unpack<TYPES>(dy[k], r.dy, mn_load_tile<TYPES>(r.dy, mn_offset(r.dy, spot) + i));
        }
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) {
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
        for (int j = 0; j < MN_PACK; j++) {
            const float past = x[k][j] - top;
            const float e = TYPES == MN_NARROW ? __expf(past) : expf(past);
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
        if (!there || i >= r.width) continue;
        float old[MN_PACK] = {};
        if (back && r.add) mn_unpack<TYPES>(old, to, mn_load_tile<TYPES>(to, to_at + i));
#pragma unroll
        for (int j = 0; j < MN_PACK; j++) {
            x[k][j] = back ? old[j] + x[k][j] * (dy[k][j] - sum) : x[k][j] * inverse;
        }
        mn_store_pack<TYPES>(to, to_at + i, x[k]);
    }
}

template <mn_types TYPES>
static int launch_packs(const rows &r, cudaStream_t on) {
    int lanes = 1;
    while (lanes < 32 && lanes * MN_PACK < r.width) lanes *= 2;
    const unsigned blocks = mn_blocks(r.walk.n_packs, THREADS / lanes);
    if (r.width <= lanes * MN_PACK) {
        softmax_pack_kernel<TYPES, 1><<<blocks, THREADS, 0, on>>>(r, lanes);
    } else {
        softmax_pack_kernel<TYPES, SHORT / 256><<<blocks, THREADS, 0, on>>>(r, lanes);
    }
    return mn_launch_status();
}

static bool takes_packs(const rows &r, const int64_t shape[4]) {
    const mn_axes axes = { { shape[0], shape[1], shape[2], shape[3] } };
    const mn_side *const sides[] = { &r.x, &r.y, &r.dy, &r.dx };
    bool packs = shape[3] % MN_PACK == 0 && shape[3] <= SHORT;
    for (const mn_side *side : sides) packs &= mn_side_packs(*side, axes);
    return packs;
}

MN_CUDA_WORK(softmax) {
    const mn_softmax_work *w = (const mn_softmax_work *)work;
    const cudaStream_t on = (cudaStream_t)where;
    (void)space;
    rows r = { {}, mn_side_of(w->x), mn_side_of(w->y), mn_side_of(w->dy), mn_side_of(w->dx),
               w->shape[3], w->add };
    const mn_axes each = { { w->shape[0], w->shape[1], w->shape[2], 1 } };
    if (!mn_iterate_over(&r.walk, each, 1)) return cudaErrorInvalidConfiguration;
    if (r.walk.n_packs == 0) return cudaSuccess;
    const int64_t n = r.walk.n_packs;
    const mn_side sides[] = { r.x, r.y, r.dy, r.dx };
    if (takes_packs(r, w->shape)) {
        switch (mn_types_of(sides)) {
        case MN_NARROW: return launch_packs<MN_NARROW>(r, on);
        case MN_WIDE: return launch_packs<MN_WIDE>(r, on);
        default: return launch_packs<MN_MIXED>(r, on);
        }
    }
    if (r.width <= SHORT) {
        softmax_kernel<32><<<mn_blocks(n, THREADS / 32), THREADS, 0, on>>>(r);
    } else {
        softmax_kernel<THREADS><<<mn_blocks(n, 1), THREADS, 0, on>>>(r);
    }
    return mn_launch_status();
}

/* ---- roll ------------------------------------------------------------------------------------ */

struct turn {
    mn_scan walk;
    mn_side to, from;
    uint32_t by;
    bool add;
};

__global__ void __launch_bounds__(THREADS) roll_kernel(const __grid_constant__ turn r) {
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= r.walk.n_packs) return;
    const mn_spot to = mn_spot_of<1>(r.walk, i);
    mn_spot from = to;
    from.x = to.x >= r.by ? to.x - r.by : to.x - r.by + (uint32_t)r.walk.width;
    const int64_t at = mn_offset(r.to, to);
    const float x = mn_side_get(r.from, mn_offset(r.from, from));
    mn_side_put(r.to, at, r.add ? mn_side_get(r.to, at) + x : x);
}

MN_CUDA_WORK(roll) {
    const mn_roll_work *w = (const mn_roll_work *)work;
    (void)space;
    turn r = { {}, mn_side_of(w->to), mn_side_of(w->from), (uint32_t)w->by, w->add };
    const mn_axes axes = { { w->shape[0], w->shape[1], w->shape[2], w->shape[3] } };
    if (!mn_iterate_over(&r.walk, axes, 1)) return cudaErrorInvalidConfiguration;
    if (r.walk.n_packs == 0) return cudaSuccess;
    roll_kernel<<<mn_blocks(r.walk.n_packs, THREADS), THREADS, 0, (cudaStream_t)where>>>(r);
    return mn_launch_status();
}
