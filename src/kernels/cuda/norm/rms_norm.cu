/* rms_norm.cu - y = r x w with r = 1 / sqrt(mean(x^2) + eps), row by row (see ref/rms_norm.c).
 *
 *   dx = r (c - x r^2 mean(c x)), c = dy w            dw = sum over rows of dy r x
 *   (dx += where it adds)
 *
 * A row belongs to a team of threads (row_reduce.cuh). In backward a block gathers a part of dw
 * over
 * the rows it takes; mn_sum_partials adds the parts. */
#include "kernels/cuda/prim/split_reduce.cuh"
#include "kernels/cuda/prim/row_reduce.cuh"
#include "kernels/norm_adds.h"

enum { FORWARD_REGS = 6, BACKWARD_REGS = 24 };    // of a pack: x; back inputs, w and dw

template <typename Team>
__global__ void __launch_bounds__(Team::THREADS, Team::resident(FORWARD_REGS))
rms_norm_forward_kernel(const __grid_constant__ mn_rms_norm_args p) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[MN_GROUP_SMEM];
    Team team;
    const int64_t V = p.call.V, B = p.call.B;
    const float inverse = 1.0f / (float)V;
    const T *w = (const T *)p.w.data, *x = (const T *)p.x.data;
    typename Team::kept kept;
    for (int64_t b = team.first(); b < B; b += team.step()) {
        const T *row = x + b * V;
        float sum = 0.0f;
        team.keep(kept, row, V);
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
            team.put((T *)p.y.data + b * V, i, y);
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
    __shared__ float room[MN_GROUP_SMEM];
    Team team;
    const int64_t V = p.call.V, B = p.call.B, start = team.first() * V;
    const T *w = (const T *)p.w.data;
    T *const grad = p.grad.x.data ? (T *)p.grad.x.data + start : nullptr;
    const T *all[N_INPUTS] = { (const T *)p.x.data + start,
                               p.cot.y.data ? (const T *)p.cot.y.data + start : nullptr,
                               adds ? grad : nullptr };
    const float inverse = 1.0f / (float)V;
    float *part = parts + blockIdx.x * V;
    typename Team::floats dw = {};
    typename Team::kept kept[N_INPUTS], kept_w;
    team.begin(part, V);
    team.keep(kept_w, w, V);
    mn_prefetch_tile_rows<Team, N_INPUTS> coming(team, all, B, V, V);
    int64_t ahead = 0;    // of the team's first row
    for (int64_t b = team.first(); b < B; b += team.step(), ahead += team.step() * V) {
        const T *x = all[X] + ahead, *dy = all[DY] ? all[DY] + ahead : nullptr;
        float sums[2] = { 0.0f, 0.0f };    // of x^2 and c x
        coming.take(kept);
        team.each(V, [&](int64_t i, int k) {
            float at[N], d[N], weight[N];
            team.at(at, kept[X], x, i, k);
            team.at(d, kept[DY], dy, i, k);
            team.at(weight, kept_w, w, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                sums[0] = fmaf(at[j], at[j], sums[0]);
                sums[1] = fmaf(d[j] * weight[j], at[j], sums[1]);
            }
        });
        team.sum(sums, room);
        const float r = rsqrtf(fmaf(sums[0], inverse, (float)p.eps));
        const float pull = r * sums[1] * inverse * r * r;
        team.each(V, [&](int64_t i, int k) {
            float at[N], d[N], weight[N], dx[N];
            team.at(at, kept[X], x, i, k);
            team.at(d, kept[DY], dy, i, k);
            team.at(weight, kept_w, w, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                d[j] *= r;
                dx[j] = fmaf(d[j], weight[j], -pull * at[j]);
            }
            if (grad && adds) {
                float there[N];
                team.at(there, kept[DX], grad + ahead, i, k);
#pragma unroll
                for (int j = 0; j < N; j++) dx[j] += there[j];
            }
            if (grad) team.put(grad + ahead, i, dx);
            team.gather(dw, part, d, at, i, k);
        });
    }
    team.leave(part, dw, V);
}

template <typename Team>
static int forward(const mn_rms_norm_args *p, cudaStream_t stream) {
    const unsigned blocks = mn_blocks(p->call.B, Team::per_block);
    rms_norm_forward_kernel<Team><<<blocks, Team::THREADS, 0, stream>>>(*p);
    return mn_launch_status();
}

template <typename Team>
static int backward(const mn_rms_norm_args *p, float *parts, mn_norm_adds to,
                    cudaStream_t stream) {
    const unsigned blocks =
        mn_group_blocks<Team>(p->call.B, 1, Team::resident(BACKWARD_REGS), MN_GROUP_ROWS);
    const int code = mn_launch_smem(rms_norm_backward_kernel<Team>, dim3(blocks),
                                         Team::THREADS, mn_prefetch_tile_rows<Team,
                                             N_INPUTS>::BYTES,
                                         stream, *p, parts, to.adds_x);
    if (code != cudaSuccess) return code;
    const int64_t V = p->call.V;
    if (!to.dw) return mn_sum_partials((typename Team::T *)p->grad.w.data, parts, blocks, V,
                                       stream);
    return mn_sum_partials_into(mn_put_wide{ to.dw, to.adds_w }, parts, blocks, V, stream);
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
    MN_BY_GROUP(forward, p->call, p->call.V, tensors, (p, (cudaStream_t)stream));
}

MN_CUDA_PLAN(rms_norm_backward) {
    const mn_call *call = (const mn_call *)args;
    return mn_gather_plan(plan, call->B, call->V, 1);
}

int mn_norm_adds_cuda(const mn_rms_norm_args *p, mn_norm_adds to, void *parts, void *stream) {
    const void *tensors[] = { p->x.data, p->w.data, p->cot.y.data, p->grad.x.data };
    MN_BY_GROUP(backward, p->call, p->call.V, tensors,
               (p, (float *)parts, to, (cudaStream_t)stream));
}

MN_CUDA_LAUNCH(rms_norm_backward) {
    const mn_norm_adds as_usual = {};
    return mn_norm_adds_cuda((const mn_rms_norm_args *)args, as_usual, shared, stream);
}
