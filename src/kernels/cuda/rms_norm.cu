/* rms_norm.cu - y = r x w with r = 1 / sqrt(mean(x^2) + eps), row by row (see ref/rms_norm.c).
 *
 *   dx = r (c - x r^2 mean(c x)), c = dy w            dw = sum over rows of dy r x
 *
 * A row belongs to a team of threads (row_team.cuh). In backward a team takes every n-th row and
 * gathers its part of dw; mn_sum_parts adds the parts. */
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/row_team.cuh"

template <typename Team>
__global__ void __launch_bounds__(MN_TEAM_THREADS)
rms_norm_forward_kernel(const __grid_constant__ mn_rms_norm_args p) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[32];
    const Team team;
    const int64_t V = p.call.V;
    const T *w = (const T *)p.w.data;
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
        const float r = 1.0f / sqrtf(team.sum(sum, room) / (float)V + (float)p.eps);
        team.each(V, [&](int64_t i, int k) {
            float at[N], weight[N], y[N];
            team.at(at, kept, x, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) y[j] = at[j] * r * weight[j];
            mn_store<N>((T *)p.y.data + b * V, i, y);
        });
    }
}

template <typename Team>
__global__ void __launch_bounds__(MN_TEAM_THREADS, Team::blocks)
rms_norm_backward_kernel(const __grid_constant__ mn_rms_norm_args p, float *parts,
                         int64_t n_parts) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[32];
    const Team team;
    const int64_t V = p.call.V;
    const T *w = (const T *)p.w.data, *cot = (const T *)p.cot.y.data;
    T *grad = (T *)p.grad.x.data;
    if (team.first() >= n_parts) return;
    float *part = parts + team.first() * V;
    typename Team::floats dw = {};
    team.begin(part, V);
    for (int64_t b = team.first(); b < p.call.B; b += n_parts) {
        const T *x = (const T *)p.x.data + b * V, *dy = cot ? cot + b * V : nullptr;
        typename Team::kept kept, kept_dy;
        float squares = 0.0f, dot = 0.0f;
        team.keep(kept, x, V);
        team.keep(kept_dy, dy, V);
        team.each(V, [&](int64_t i, int k) {
            float at[N], d[N], weight[N];
            team.at(at, kept, x, i, k);
            team.at(d, kept_dy, dy, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                squares = fmaf(at[j], at[j], squares);
                dot = fmaf(d[j] * weight[j], at[j], dot);
            }
        });
        const float r = 1.0f / sqrtf(team.sum(squares, room) / (float)V + (float)p.eps);
        const float pull = r * r * team.sum(dot, room) / (float)V;
        team.each(V, [&](int64_t i, int k) {
            float at[N], d[N], weight[N], dx[N], more[N];
            team.at(at, kept, x, i, k);
            team.at(d, kept_dy, dy, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                dx[j] = r * fmaf(-pull, at[j], d[j] * weight[j]);
                more[j] = d[j] * (r * at[j]);
            }
            if (grad) mn_store<N>(grad + b * V, i, dx);
            team.gather(dw, part, more, i, k);
        });
    }
    team.leave(part, dw, V);
}

template <typename Team>
static int forward(const mn_rms_norm_args *p, cudaStream_t stream) {
    const unsigned blocks = mn_blocks(p->call.B, Team::per_block);
    rms_norm_forward_kernel<Team><<<blocks, MN_TEAM_THREADS, 0, stream>>>(*p);
    return mn_launched();
}

template <typename Team>
static int backward(const mn_rms_norm_args *p, float *parts, cudaStream_t stream) {
    const int64_t B = p->call.B, V = p->call.V, n_parts = mn_gather_parts(B, V, 1);
    const unsigned blocks = mn_blocks(n_parts, Team::per_block);
    rms_norm_backward_kernel<Team><<<blocks, MN_TEAM_THREADS, 0, stream>>>(*p, parts, n_parts);
    const int code = mn_launched();
    if (code != cudaSuccess) return code;
    return mn_sum_parts((typename Team::T *)p->grad.w.data, parts, n_parts, V, stream);
}

MN_CUDA_PLAN(rms_norm_forward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(rms_norm_forward) {
    (void)shared;
    const mn_rms_norm_args *p = (const mn_rms_norm_args *)args;
    if (!p->y.data) return cudaSuccess;
    const void *tensors[] = { p->x.data, p->w.data, p->y.data };
    MN_BY_TEAM(forward, p->call, p->call.V, tensors, (p, (cudaStream_t)stream));
}

MN_CUDA_PLAN(rms_norm_backward) {
    const mn_call *call = (const mn_call *)args;
    return mn_gather_plan(plan, call->B, call->V, 1);
}

MN_CUDA_LAUNCH(rms_norm_backward) {
    const mn_rms_norm_args *p = (const mn_rms_norm_args *)args;
    const void *tensors[] = { p->x.data, p->w.data, p->cot.y.data, p->grad.x.data };
    MN_BY_TEAM(backward, p->call, p->call.V, tensors,
               (p, (float *)shared, (cudaStream_t)stream));
}
