/* l2_norm.cu - y = r x with r = 1 / max(|x|, eps) (max) or 1 / sqrt(|x|^2 + eps) (root), row by row
 * (see ref/l2_norm.c).
 *
 *   dx = r (dy - x r^2 (x.dy));  below the floor of `max` r is constant and dx = r dy
 *
 * A row belongs to a row_group, as in rms_norm.cu. */
#include "kernels/cuda/prim/row_reduce.cuh"

namespace mneme::norm {

enum { ROOT = 1 };

/* r from |x|^2; *bent says whether it depends on x */
__device__ static float inverse_norm(const mn_l2_norm_args &p, float squares, bool *above_eps) {
    const float eps = (float)p.eps, length = sqrtf(squares);
    *above_eps = p.kind == ROOT || length > eps;
    return 1.0f / (p.kind == ROOT ? sqrtf(squares + eps) : *above_eps ? length : eps);
}

template <typename RowGroup>
__global__ void __launch_bounds__(RowGroup::THREADS)
l2_norm_forward_kernel(const __grid_constant__ mn_l2_norm_args p) {
    typedef typename RowGroup::T T;
    constexpr int N = RowGroup::N;
    __shared__ float smem[MN_ROW_GROUP_SMEM];
    RowGroup row_group;
    const int64_t V = p.call.V;
    for (int64_t b = row_group.first(); b < p.call.B; b += row_group.step()) {
        const T *x = (const T *)p.x.data + b * V;
        typename RowGroup::kept kept;
        float sum = 0.0f;
        row_group.load_row(kept, x, V);
        row_group.for_each(V, [&](int64_t i, int k) {
            float at[N];
            row_group.at(at, kept, x, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) sum = fmaf(at[j], at[j], sum);
        });
        bool above_eps;
        const float r = inverse_norm(p, row_group.sum(sum, smem), &above_eps);
        row_group.for_each(V, [&](int64_t i, int k) {
            float at[N], y[N];
            row_group.at(at, kept, x, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) y[j] = at[j] * r;
            mn_store<N>((T *)p.y.data + b * V, i, y);
        });
    }
}

template <typename RowGroup>
__global__ void __launch_bounds__(RowGroup::THREADS)
l2_norm_backward_kernel(const __grid_constant__ mn_l2_norm_args p) {
    typedef typename RowGroup::T T;
    constexpr int N = RowGroup::N;
    __shared__ float smem[MN_ROW_GROUP_SMEM];
    RowGroup row_group;
    const int64_t V = p.call.V;
    for (int64_t b = row_group.first(); b < p.call.B; b += row_group.step()) {
        const T *x = (const T *)p.x.data + b * V;
        const T *dy = p.cot.y.data ? (const T *)p.cot.y.data + b * V : nullptr;
        typename RowGroup::kept kept, kept_dy;
        float squares = 0.0f, dot = 0.0f;
        row_group.load_row(kept, x, V);
        row_group.load_row(kept_dy, dy, V);
        row_group.for_each(V, [&](int64_t i, int k) {
            float at[N], d[N];
            row_group.at(at, kept, x, i, k);
            row_group.at(d, kept_dy, dy, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                squares = fmaf(at[j], at[j], squares);
                dot = fmaf(at[j], d[j], dot);
            }
        });
        bool above_eps;
        const float r = inverse_norm(p, row_group.sum(squares, smem), &above_eps);
        const float all = row_group.sum(dot, smem), pull = above_eps ? r * r * all : 0.0f;
        row_group.for_each(V, [&](int64_t i, int k) {
            float at[N], d[N], dx[N];
            row_group.at(at, kept, x, i, k);
            row_group.at(d, kept_dy, dy, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) dx[j] = r * fmaf(-pull, at[j], d[j]);
            mn_store<N>((T *)p.grad.x.data + b * V, i, dx);
        });
    }
}

template <typename RowGroup>
static int forward(const mn_l2_norm_args *p, cudaStream_t stream) {
    const unsigned blocks = mn_blocks(p->call.B, RowGroup::per_block);
    l2_norm_forward_kernel<RowGroup><<<blocks, RowGroup::THREADS, 0, stream>>>(*p);
    return mn_launch_status();
}

template <typename RowGroup>
static int backward(const mn_l2_norm_args *p, cudaStream_t stream) {
    const unsigned blocks = mn_blocks(p->call.B, RowGroup::per_block);
    l2_norm_backward_kernel<RowGroup><<<blocks, RowGroup::THREADS, 0, stream>>>(*p);
    return mn_launch_status();
}

MN_CUDA_PLAN(l2_norm_forward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(l2_norm_forward) {
    (void)shared;
    const mn_l2_norm_args *p = (const mn_l2_norm_args *)args;
    if (!p->y.data) return cudaSuccess;
    const void *tensors[] = { p->x.data, p->y.data };
    MN_DISPATCH_ROW_GROUP(forward, p->call, p->call.V, tensors, (p, (cudaStream_t)stream));
}

MN_CUDA_PLAN(l2_norm_backward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(l2_norm_backward) {
    (void)shared;
    const mn_l2_norm_args *p = (const mn_l2_norm_args *)args;
    if (!p->grad.x.data) return cudaSuccess;
    const void *tensors[] = { p->x.data, p->cot.y.data, p->grad.x.data };
    MN_DISPATCH_ROW_GROUP(backward, p->call, p->call.V, tensors, (p, (cudaStream_t)stream));
}

}    // namespace mneme::norm
