/* l2_norm.cu - y = r x with r = 1 / max(|x|, eps) (max) or 1 / sqrt(|x|^2 + eps) (root), row by row
 * (see ref/l2_norm.c).
 *
 *   dx = r (dy - x r^2 (x.dy));  below the floor of `max` r is constant and dx = r dy
 *
 * A row belongs to a team, as in rms_norm.cu. */
#include "kernels/cuda/prim/row_reduce.cuh"

enum { ROOT = 1 };

/* r from |x|^2; *bent says whether it depends on x */
__device__ static float inverse_norm(const mn_l2_norm_args &p, float squares, bool *bent) {
    const float eps = (float)p.eps, length = sqrtf(squares);
    *bent = p.kind == ROOT || length > eps;
    return 1.0f / (p.kind == ROOT ? sqrtf(squares + eps) : *bent ? length : eps);
}

template <typename Team>
__global__ void __launch_bounds__(Team::THREADS)
l2_norm_forward_kernel(const __grid_constant__ mn_l2_norm_args p) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[MN_GROUP_SMEM];
    Team team;
    const int64_t V = p.call.V;
    for (int64_t b = team.first(); b < p.call.B; b += team.step()) {
        const T *x = (const T *)p.x.data + b * V;
        typename Team::kept kept;
        float sum = 0.0f;
        team.keep(kept, x, V);
        team.each(V, [&](int64_t i, int k) {
            float at[N];
            team.at(at, kept, x, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) sum = fmaf(at[j], at[j], sum);
        });
        bool bent;
        const float r = inverse_norm(p, team.sum(sum, room), &bent);
        team.each(V, [&](int64_t i, int k) {
            float at[N], y[N];
            team.at(at, kept, x, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) y[j] = at[j] * r;
            mn_store<N>((T *)p.y.data + b * V, i, y);
        });
    }
}

template <typename Team>
__global__ void __launch_bounds__(Team::THREADS)
l2_norm_backward_kernel(const __grid_constant__ mn_l2_norm_args p) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[MN_GROUP_SMEM];
    Team team;
    const int64_t V = p.call.V;
    for (int64_t b = team.first(); b < p.call.B; b += team.step()) {
        const T *x = (const T *)p.x.data + b * V;
        const T *dy = p.cot.y.data ? (const T *)p.cot.y.data + b * V : nullptr;
        typename Team::kept kept, kept_dy;
        float squares = 0.0f, dot = 0.0f;
        team.keep(kept, x, V);
        team.keep(kept_dy, dy, V);
        team.each(V, [&](int64_t i, int k) {
            float at[N], d[N];
            team.at(at, kept, x, i, k);
            team.at(d, kept_dy, dy, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                squares = fmaf(at[j], at[j], squares);
                dot = fmaf(at[j], d[j], dot);
            }
        });
        bool bent;
        const float r = inverse_norm(p, team.sum(squares, room), &bent);
        const float all = team.sum(dot, room), pull = bent ? r * r * all : 0.0f;
        team.each(V, [&](int64_t i, int k) {
            float at[N], d[N], dx[N];
            team.at(at, kept, x, i, k);
            team.at(d, kept_dy, dy, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) dx[j] = r * fmaf(-pull, at[j], d[j]);
            mn_store<N>((T *)p.grad.x.data + b * V, i, dx);
        });
    }
}

template <typename Team>
static int forward(const mn_l2_norm_args *p, cudaStream_t stream) {
    const unsigned blocks = mn_blocks(p->call.B, Team::per_block);
    l2_norm_forward_kernel<Team><<<blocks, Team::THREADS, 0, stream>>>(*p);
    return mn_launch_status();
}

template <typename Team>
static int backward(const mn_l2_norm_args *p, cudaStream_t stream) {
    const unsigned blocks = mn_blocks(p->call.B, Team::per_block);
    l2_norm_backward_kernel<Team><<<blocks, Team::THREADS, 0, stream>>>(*p);
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
    MN_BY_GROUP(forward, p->call, p->call.V, tensors, (p, (cudaStream_t)stream));
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
    MN_BY_GROUP(backward, p->call, p->call.V, tensors, (p, (cudaStream_t)stream));
}
