/* head_gates.cu - gates of heads (equations in tape/gates.c): forward a thread for each number;
 * going back a thread stays with one head and takes rows of it, and what it has of the sums over
 * rows is added up in its block, and the blocks' parts in their order. */
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"
#include "kernels/cuda/prim/split_reduce.cuh"

namespace mneme::elementwise {

// PREFETCH: rows that a thread waits for at once
enum { THREADS = 256, BLOCKS = 256, PREFETCH = 4 };

struct gates {
    int64_t rows, n;
    mn_operand u, w, param[3], outputs[3], cot[3], du, dw;
    bool add_u, add_w;
};

__device__ static float get(const mn_operand &operand, int64_t i) {
    return operand.data ? mn_operand_load(operand, i) : 0.0f;
}

__device__ static void put(const mn_operand &operand, int64_t i, float x, bool add) {
    if (operand.data) mn_operand_store(operand, i, add ? mn_operand_load(operand, i) + x : x);
}

/* What a head's rows have in common. */
struct head {
    float size, bias, rate;

    __device__ head(const gates &p, int64_t h)
        : size(mn_fn_softplus<false>(mn_operand_load(p.param[0], h))),
          bias(mn_operand_load(p.param[1], h)), rate(expf(mn_operand_load(p.param[2], h))) {
    }
};

/* What a row has of a head, going back cotangents too. */
struct row_values {
    float u, w, cot[3];

    __device__ row_values(const gates &p, int64_t row, int64_t h)
        : u(mn_operand_load(p.u, row * p.u.stride[1] + h)),
          w(mn_operand_load(p.w, row * p.w.stride[1] + h)) {
        for (int k = 0; k < 3; k++) cot[k] = get(p.cot[k], row * p.n + h);
    }
};

__device__ static void forward(const gates &p, const head &at, const row_values &x, int64_t row,
                               int64_t h) {
    const int64_t i = row * p.n + h;
    const float s = mn_fn_sigmoid<false>(x.u);
    put(p.outputs[0], i, s, false);
    put(p.outputs[1], i, s * at.size, false);
    put(p.outputs[2], i, -mn_fn_softplus<false>(x.w + at.bias) * at.rate, false);
}

__device__ static void backward(float (&sums)[3], const gates &p, const head &at,
                                const row_values &x,
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
__global__ void __launch_bounds__(THREADS) gates_fwd_kernel(const __grid_constant__ gates p) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x, row = i / p.n, h = i % p.n;
    if (row < p.rows) forward(p, head(p, h), row_values(p, row, h), row, h);
}

/* Heads of a block: those from blockIdx.y THREADS on. Part blockIdx.x of `parts` gets three sums
 * for each head. */
__global__ void __launch_bounds__(THREADS)
gates_bwd_kernel(const __grid_constant__ gates p, float *partials) {
    __shared__ float smem[3][THREADS];
    const int64_t first = blockIdx.y * (int64_t)THREADS;
    const int n = (int)min(p.n - first, (int64_t)THREADS), at_once = THREADS / n;
    const int row = threadIdx.x / n, h = threadIdx.x % n;
    float sums[3] = {};
    if (row < at_once) {
        const head at(p, first + h);
        const int64_t step = (int64_t)gridDim.x * at_once;
        for (int64_t i = blockIdx.x * (int64_t)at_once + row; i < p.rows; i += PREFETCH * step) {
            const int64_t last = p.rows - 1;
            const row_values x[PREFETCH] = { { p, i, first + h },
                                     { p, min(i + step, last), first + h },
                                     { p, min(i + 2 * step, last), first + h },
                                     { p, min(i + 3 * step, last), first + h } };
#pragma unroll
            for (int k = 0; k < PREFETCH; k++) {
                if (i + k * step < p.rows) backward(sums, p, at, x[k], i + k * step, first + h);
            }
        }
    }
    for (int k = 0; k < 3; k++) smem[k][threadIdx.x] = sums[k];
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * n; i += THREADS) {
        float sum = 0.0f;
        for (int k = 0; k < at_once; k++) sum += smem[i / n][k * n + i % n];
        partials[(blockIdx.x * (int64_t)3 + i / n) * p.n + first + i % n] = sum;
    }
}

/* Sum i of 3 n: of scale, bias and rate. */
struct store_param_grads {
    int64_t n;
    mn_operand scale, dparam[3];
    bool add[3];

    __device__ void operator()(int64_t i, float sum) const {
        const int kind = (int)(i / n);
        const int64_t h = i - kind * n;
        if (kind == 0) sum *= mn_fn_sigmoid<false>(mn_operand_load(scale, h));
        put(dparam[kind], h, sum, add[kind]);
    }
};

/* Parts that rows are cut into going back. */
static int64_t count_partials(const mn_gates_params *w) {
    const int64_t n = mn_min(w->n, (int64_t)THREADS);
    return mn_min(mn_ceil_div(w->rows, PREFETCH * (THREADS / n)), (int64_t)BLOCKS);
}

extern "C" size_t mn_elementwise_gates_cuda_bytes(const void *args) {
    const mn_gates_params *w = (const mn_gates_params *)args;
    return w->back && w->n > 0 ? (size_t)(count_partials(w) * 3 * w->n) * sizeof(float) : 0;
}

MN_CUDA_ELEMENTWISE(gates) {
    const mn_gates_params *w = (const mn_gates_params *)args;
    const cudaStream_t on = (cudaStream_t)backend;
    if (w->n == 0) return cudaSuccess;
    gates p = {};
    store_param_grads params = {};
    p.rows = w->rows, p.n = params.n = w->n;
    p.u = mn_operand_of(w->u), p.w = mn_operand_of(w->w);
    params.scale = mn_operand_of(w->param[0]);
    for (int i = 0; i < 3; i++) {
        p.param[i] = mn_operand_of(w->param[i]);
        p.outputs[i] = mn_operand_of(w->outputs[i]);
        p.cot[i] = mn_operand_of(w->cot[i]);
        params.dparam[i] = mn_operand_of(w->dparam[i]);
        params.add[i] = w->add_param[i];
    }
    p.du = mn_operand_of(w->du), p.dw = mn_operand_of(w->dw);
    p.add_u = w->add_u, p.add_w = w->add_w;
    const int64_t n_partials = count_partials(w);
    float *partials = (float *)workspace;
    if (w->rows > 0 && w->back) {
        const dim3 blocks((unsigned)n_partials, mn_blocks(w->n, THREADS));
        gates_bwd_kernel<<<blocks, THREADS, 0, on>>>(p, partials);
    } else if (w->rows > 0) {
        gates_fwd_kernel<<<mn_blocks(w->rows * w->n, THREADS), THREADS, 0, on>>>(p);
    }
    const int code = mn_launch_status();
    if (code != cudaSuccess || !w->back) return code;
    return mn_reduce_partials_to(params, partials, n_partials, 3 * w->n, on);
}

}    // namespace mneme::elementwise
