/* rms_norm.cu - y = r x w with r = 1 / sqrt(mean(x^2) + eps), row by row (see ref/rms_norm.c).
 *
 *   dx = r (c - x r^2 mean(c x)), c = dy w            dw = sum over rows of dy r x
 *   (dx += where it adds)
 *
 * A row belongs to a team of threads (row_team.cuh). In backward a block gathers a part of dw over
 * the rows it takes; mn_sum_parts adds the parts. */
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/row_team.cuh"
#include "kernels/norm_adds.h"

enum { FORWARD_REGS = 10, BACKWARD_REGS = 28 };    // of a pack: kept, next; and dw

template <typename Team>
__global__ void __launch_bounds__(Team::THREADS, Team::resident(FORWARD_REGS))
rms_norm_forward_kernel(const __grid_constant__ mn_rms_norm_args p) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[MN_TEAM_ROOM];
    Team team;
    const int64_t V = p.call.V, B = p.call.B;
    const float inverse = 1.0f / (float)V;
    const T *w = (const T *)p.w.data, *x = (const T *)p.x.data;
    typename Team::kept kept, next;
    team.keep(next, team.first() < B ? x + team.first() * V : nullptr, V);
    for (int64_t b = team.first(); b < B; b += team.step()) {
        const T *row = x + b * V;
        float sum = 0.0f;
        team.take(kept, next);
        if (b + team.step() < B) team.keep(next, row + team.step() * V, V);
        team.each(V, [&](int64_t i, int k) {
            float at[N];
            team.at(at, kept, row, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) sum = fmaf(at[j], at[j], sum);
        });
        const float r = rsqrtf(fmaf(team.sum(sum, room), inverse, (float)p.eps));
        team.each(V, [&](int64_t i, int k) {
            float at[N], weight[N], y[N];
            team.at(at, kept, row, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) y[j] = at[j] * r * weight[j];
            mn_store<N>((T *)p.y.data + b * V, i, y);
        });
    }
}

/* x, dy and, where it is added to, dx of a row */
enum { X, DY, DX, N_INPUTS };

template <typename Team>
__global__ void __launch_bounds__(Team::THREADS, Team::resident(BACKWARD_REGS))
rms_norm_backward_kernel(const __grid_constant__ mn_rms_norm_args p, float *parts, bool adds) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[MN_TEAM_ROOM];
    Team team;
    const int64_t V = p.call.V, B = p.call.B;
    const T *w = (const T *)p.w.data, *x = (const T *)p.x.data, *cot = (const T *)p.cot.y.data;
    T *grad = (T *)p.grad.x.data;
    const float inverse = 1.0f / (float)V;
    float *part = parts + blockIdx.x * V;
    typename Team::floats dw = {};
    typename Team::kept kept[N_INPUTS], next[N_INPUTS];
    const auto fetch = [&](int64_t b) {
        team.keep(next[X], b < B ? x + b * V : nullptr, V);
        team.keep(next[DY], b < B && cot ? cot + b * V : nullptr, V);
        if (adds) team.keep(next[DX], b < B ? grad + b * V : nullptr, V);
    };
    team.begin(part, V);
    fetch(team.first());
    for (int64_t b = team.first(); b < B; b += team.step()) {
        const T *row = x + b * V, *dy = cot ? cot + b * V : nullptr;
        float sums[2] = { 0.0f, 0.0f };    // of x^2 and c x
#pragma unroll
        for (int i = 0; i < N_INPUTS; i++) team.take(kept[i], next[i]);
        fetch(b + team.step());
        team.each(V, [&](int64_t i, int k) {
            float at[N], d[N], weight[N];
            team.at(at, kept[X], row, i, k);
            team.at(d, kept[DY], dy, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                sums[0] = fmaf(at[j], at[j], sums[0]);
                sums[1] = fmaf(d[j] * weight[j], at[j], sums[1]);
            }
        });
        team.sum(sums, room);
        const float r = rsqrtf(fmaf(sums[0], inverse, (float)p.eps));
        const float pull = r * r * sums[1] * inverse;
        team.each(V, [&](int64_t i, int k) {
            float at[N], d[N], weight[N], dx[N], more[N];
            team.at(at, kept[X], row, i, k);
            team.at(d, kept[DY], dy, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                dx[j] = r * fmaf(-pull, at[j], d[j] * weight[j]);
                more[j] = d[j] * (r * at[j]);
            }
            if (grad && adds) {
                float there[N];
                team.at(there, kept[DX], grad + b * V, i, k);
#pragma unroll
                for (int j = 0; j < N; j++) dx[j] += there[j];
            }
            if (grad) mn_store<N>(grad + b * V, i, dx);
            team.gather(dw, part, more, i, k);
        });
    }
    team.leave(part, dw, V);
}

template <typename Team>
static int forward(const mn_rms_norm_args *p, cudaStream_t stream) {
    const unsigned blocks =
        mn_team_blocks<Team>(p->call.B, 1, Team::resident(FORWARD_REGS), 1);
    rms_norm_forward_kernel<Team><<<blocks, Team::THREADS, 0, stream>>>(*p);
    return mn_launched();
}

template <typename Team>
static int backward(const mn_rms_norm_args *p, float *parts, bool adds, cudaStream_t stream) {
    const unsigned blocks =
        mn_team_blocks<Team>(p->call.B, 1, Team::resident(BACKWARD_REGS), MN_TEAM_ROWS);
    rms_norm_backward_kernel<Team><<<blocks, Team::THREADS, 0, stream>>>(*p, parts, adds);
    const int code = mn_launched();
    if (code != cudaSuccess) return code;
    return mn_sum_parts((typename Team::T *)p->grad.w.data, parts, blocks, p->call.V, stream);
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

static int back(const mn_rms_norm_args *p, void *parts, bool adds, void *stream) {
    const void *tensors[] = { p->x.data, p->w.data, p->cot.y.data, p->grad.x.data };
    MN_BY_TEAM(backward, p->call, p->call.V, tensors,
               (p, (float *)parts, adds, (cudaStream_t)stream));
}

MN_CUDA_LAUNCH(rms_norm_backward) {
    return back((const mn_rms_norm_args *)args, shared, false, stream);
}

extern "C" int mn_norm_adds_cuda(const mn_rms_norm_args *args, void *parts, void *stream) {
    return back(args, parts, true, stream);
}
