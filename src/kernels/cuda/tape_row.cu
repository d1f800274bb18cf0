/* tape_row.cu - softmax over the last axis, and turning it.
 *
 *   softmax   y_i = e^(x_i - max x) / sum_j e^(x_j - max x)      dx (+)= y (dy - sum_j y_j dy_j)
 *   roll      to_i (+)= from_(i - by), indices modulo the width
 *
 * A team of threads takes a row of a softmax, a warp where it is short, and reads it once more for
 * each pass: rows come from the first cache then. */
#include "kernels/cuda/each.cuh"

enum { THREADS = 256, SHORT = 1024 };

struct rows {
    mn_walk walk;    // a pack is a row
    mn_side x, y, dy, dx;
    int64_t width;
    bool add;
};

/* Row numbers tell places through a walk whose rows are one pack wide. */
__device__ static mn_spot row_spot(const mn_walk &walk, uint32_t row) {
    return mn_spot_of<1>(walk, row);
}

template <int TEAM>
__device__ static void forward_row(const rows &r, const mn_spot &spot, int lane, float *room) {
    const int64_t x = mn_offset(r.x, spot), y = mn_offset(r.y, spot);
    float top = -INFINITY, sum = 0.0f;
    for (int64_t i = lane; i < r.width; i += TEAM) top = fmaxf(top, mn_side_get(r.x, x + i));
    top = mn_team_max<TEAM>(top, room);
    for (int64_t i = lane; i < r.width; i += TEAM) sum += expf(mn_side_get(r.x, x + i) - top);
    sum = mn_team_sum<TEAM>(sum, room);
    for (int64_t i = lane; i < r.width; i += TEAM) {
        mn_side_put(r.y, y + i, expf(mn_side_get(r.x, x + i) - top) / sum);
    }
}

template <int TEAM>
__device__ static void backward_row(const rows &r, const mn_spot &spot, int lane, float *room) {
    const int64_t y = mn_offset(r.y, spot), dy = mn_offset(r.dy, spot), dx = mn_offset(r.dx, spot);
    float along = 0.0f;
    for (int64_t i = lane; i < r.width; i += TEAM) {
        along = fmaf(mn_side_get(r.y, y + i), mn_side_get(r.dy, dy + i), along);
    }
    along = mn_team_sum<TEAM>(along, room);
    for (int64_t i = lane; i < r.width; i += TEAM) {
        const float g = mn_side_get(r.y, y + i) * (mn_side_get(r.dy, dy + i) - along);
        mn_side_put(r.dx, dx + i, r.add ? mn_side_get(r.dx, dx + i) + g : g);
    }
}

template <int TEAM>
__global__ void __launch_bounds__(THREADS) softmax_kernel(const __grid_constant__ rows r) {
    __shared__ float room[32];
    const uint32_t row = blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
    if (row >= r.walk.n_packs) return;
    const mn_spot spot = row_spot(r.walk, row);
    if (r.dx.data) backward_row<TEAM>(r, spot, threadIdx.x % TEAM, room);
    else forward_row<TEAM>(r, spot, threadIdx.x % TEAM, room);
}

MN_CUDA_WORK(softmax) {
    const mn_softmax_work *w = (const mn_softmax_work *)work;
    const cudaStream_t on = (cudaStream_t)where;
    (void)space;
    rows r = { {}, mn_side_of(w->x), mn_side_of(w->y), mn_side_of(w->dy), mn_side_of(w->dx),
               w->shape[3], w->add };
    const mn_axes each = { { w->shape[0], w->shape[1], w->shape[2], 1 } };
    if (!mn_walk_over(&r.walk, each, 1)) return cudaErrorInvalidConfiguration;
    if (r.walk.n_packs == 0) return cudaSuccess;
    const int64_t n = r.walk.n_packs;
    if (r.width <= SHORT) {
        softmax_kernel<32><<<mn_blocks(n, THREADS / 32), THREADS, 0, on>>>(r);
    } else {
        softmax_kernel<THREADS><<<mn_blocks(n, 1), THREADS, 0, on>>>(r);
    }
    return mn_launched();
}

/* ---- roll ------------------------------------------------------------------------------------ */

struct turn {
    mn_walk walk;
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
    if (!mn_walk_over(&r.walk, axes, 1)) return cudaErrorInvalidConfiguration;
    if (r.walk.n_packs == 0) return cudaSuccess;
    roll_kernel<<<mn_blocks(r.walk.n_packs, THREADS), THREADS, 0, (cudaStream_t)where>>>(r);
    return mn_launched();
}
