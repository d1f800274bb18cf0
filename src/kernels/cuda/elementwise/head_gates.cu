/* head_gates.cu - gates of heads (equations in tape/gates.c): forward a thread for each number;
 * going back a thread stays with one head and takes rows of it, and what it has of the sums over
 * rows is added up in its block, and the blocks' parts in their order. */
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"
#include "kernels/cuda/prim/split_reduce.cuh"

enum { THREADS = 256, BLOCKS = 256, AHEAD = 4 };    // AHEAD: rows that a thread waits for at once

struct gates {
    int64_t rows, n;
    mn_side u, w, param[3], made[3], cot[3], du, dw;
    bool add_u, add_w;
};

__device__ static float get(const mn_side &side, int64_t i) {
    return side.data ? mn_side_get(side, i) : 0.0f;
}

__device__ static void put(const mn_side &side, int64_t i, float x, bool add) {
    if (side.data) mn_side_put(side, i, add ? mn_side_get(side, i) + x : x);
}

/* What a head's rows have in common. */
struct head {
    float size, bias, rate;

    __device__ head(const gates &p, int64_t h)
        : size(mn_fn_softplus<false>(mn_side_get(p.param[0], h))),
          bias(mn_side_get(p.param[1], h)), rate(expf(mn_side_get(p.param[2], h))) {
    }
};

/* What a row has of a head, going back cotangents too. */
struct taken {
    float u, w, cot[3];

    __device__ taken(const gates &p, int64_t row, int64_t h)
        : u(mn_side_get(p.u, row * p.u.stride[1] + h)),
          w(mn_side_get(p.w, row * p.w.stride[1] + h)) {
        for (int k = 0; k < 3; k++) cot[k] = get(p.cot[k], row * p.n + h);
    }
};

__device__ static void forward(const gates &p, const head &at, const taken &x, int64_t row,
                               int64_t h) {
    const int64_t i = row * p.n + h;
    const float s = mn_fn_sigmoid<false>(x.u);
    put(p.made[0], i, s, false);
    put(p.made[1], i, s * at.size, false);
    put(p.made[2], i, -mn_fn_softplus<false>(x.w + at.bias) * at.rate, false);
}

__device__ static void backward(float (&sums)[3], const gates &p, const head &at, const taken &x,
                                int64_t row, int64_t h) {
    const float s = mn_fn_sigmoid<false>(x.u), z = x.w + at.bias;
    const float strength = x.cot[1], fall = -x.cot[2] * at.rate;
    const float ds = fmaf(strength, at.size, x.cot[0]);
    const float dz = fall * mn_fn_sigmoid<false>(z);
    put(p.du, row * p.du.stride[1] + h, ds * s * (1.0f - s), p.add_u);
    put(p.dw, row * p.dw.stride[1] + h, dz, p.add_w);
    sums[0] = fmaf(strength, s, sums[0]);
    sums[1] += dz;
    sums[2] = fmaf(fall, mn_fn_softplus<false>(z), sums[2]);
}

/* One number of a head and row. */
__global__ void __launch_bounds__(THREADS) forward_kernel(const __grid_constant__ gates p) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x, row = i / p.n, h = i % p.n;
    if (row < p.rows) forward(p, head(p, h), taken(p, row, h), row, h);
}

/* Heads of a block: those from blockIdx.y THREADS on. Part blockIdx.x of `parts` gets three sums
 * for each head. */
__global__ void __launch_bounds__(THREADS)
back_kernel(const __grid_constant__ gates p, float *parts) {
    __shared__ float room[3][THREADS];
    const int64_t first = blockIdx.y * (int64_t)THREADS;
    const int n = (int)min(p.n - first, (int64_t)THREADS), at_once = THREADS / n;
    const int row = threadIdx.x / n, h = threadIdx.x % n;
    float sums[3] = {};
    if (row < at_once) {
        const head at(p, first + h);
        const int64_t step = (int64_t)gridDim.x * at_once;
        for (int64_t i = blockIdx.x * (int64_t)at_once + row; i < p.rows; i += AHEAD * step) {
            const int64_t last = p.rows - 1;
            const taken x[AHEAD] = { { p, i, first + h },
                                     { p, min(i + step, last), first + h },
                                     { p, min(i + 2 * step, last), first + h },
                                     { p, min(i + 3 * step, last), first + h } };
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (i + k * step < p.rows) backward(sums, p, at, x[k], i + k * step, first + h);
            }
        }
    }
    for (int k = 0; k < 3; k++) room[k][threadIdx.x] = sums[k];
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * n; i += THREADS) {
        float sum = 0.0f;
        for (int k = 0; k < at_once; k++) sum += room[i / n][k * n + i % n];
        parts[(blockIdx.x * (int64_t)3 + i / n) * p.n + first + i % n] = sum;
    }
}

/* Sum i of 3 n: of scale, bias and rate. */
struct put_params {
    int64_t n;
    mn_side scale, dparam[3];
    bool add[3];

    __device__ void operator()(int64_t i, float sum) const {
        const int kind = (int)(i / n);
        const int64_t h = i - kind * n;
        if (kind == 0) sum *= mn_fn_sigmoid<false>(mn_side_get(scale, h));
        put(dparam[kind], h, sum, add[kind]);
    }
};

/* Parts that rows are cut into going back. */
static int64_t count_parts(const mn_gates_work *w) {
    const int64_t n = mn_min(w->n, (int64_t)THREADS);
    return mn_min(mn_ceil_div(w->rows, AHEAD * (THREADS / n)), (int64_t)BLOCKS);
}

extern "C" size_t mn_work_gates_cuda_bytes(const void *work) {
    const mn_gates_work *w = (const mn_gates_work *)work;
    return w->back && w->n > 0 ? (size_t)(count_parts(w) * 3 * w->n) * sizeof(float) : 0;
}

MN_CUDA_WORK(gates) {
    const mn_gates_work *w = (const mn_gates_work *)work;
    const cudaStream_t on = (cudaStream_t)where;
    if (w->n == 0) return cudaSuccess;
    gates p = {};
    put_params params = {};
    p.rows = w->rows, p.n = params.n = w->n;
    p.u = mn_side_of(w->u), p.w = mn_side_of(w->w);
    params.scale = mn_side_of(w->param[0]);
    for (int i = 0; i < 3; i++) {
        p.param[i] = mn_side_of(w->param[i]);
        p.made[i] = mn_side_of(w->made[i]);
        p.cot[i] = mn_side_of(w->cot[i]);
        params.dparam[i] = mn_side_of(w->dparam[i]);
        params.add[i] = w->add_param[i];
    }
    p.du = mn_side_of(w->du), p.dw = mn_side_of(w->dw);
    p.add_u = w->add_u, p.add_w = w->add_w;
    const int64_t n_parts = count_parts(w);
    float *parts = (float *)space;
    if (w->rows > 0 && w->back) {
        const dim3 blocks((unsigned)n_parts, mn_blocks(w->n, THREADS));
        back_kernel<<<blocks, THREADS, 0, on>>>(p, parts);
    } else if (w->rows > 0) {
        forward_kernel<<<mn_blocks(w->rows * w->n, THREADS), THREADS, 0, on>>>(p);
    }
    const int code = mn_launch_status();
    if (code != cudaSuccess || !w->back) return code;
    return mn_sum_partials_into(params, parts, n_parts, 3 * w->n, on);
}
