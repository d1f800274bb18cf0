/* rms_norm.cu - y = r x w with r = 1 / sqrt(mean(x^2) + eps), row by row (see ref/rms_norm.c).
 *
 *   dx = r (c - x r^2 mean(c x)), c = dy w            dw = sum over rows of dy r x
 *   (dx += where it adds)
 *
 * A row belongs to a row_group of threads (row_reduce.cuh). In backward a block gathers a part of
 * dw over the rows it takes; mn_reduce_partials adds the parts. */
#include "kernels/cuda/prim/split_reduce.cuh"
#include "kernels/cuda/prim/row_reduce.cuh"
#include "kernels/norm_adds.h"

namespace mneme::norm {

enum { FORWARD_REGS = 6, BACKWARD_REGS = 24 };    // of a pack: x; back inputs, w and dw

template <typename RowGroup>
__global__ void __launch_bounds__(RowGroup::THREADS, RowGroup::blocks_per_sm(FORWARD_REGS))
rms_norm_forward_kernel(const __grid_constant__ mn_rms_norm_args p) {
    typedef typename RowGroup::T T;
    constexpr int N = RowGroup::N;
    __shared__ float smem[MN_ROW_GROUP_SMEM];
    RowGroup row_group;
    const int64_t V = p.call.V, B = p.call.B;
    const float inverse = 1.0f / (float)V;
    const T *w = (const T *)p.w.data, *x = (const T *)p.x.data;
    typename RowGroup::kept kept;
    for (int64_t b = row_group.first(); b < B; b += row_group.step()) {
        const T *row = x + b * V;
        float sum = 0.0f;
        row_group.load_row(kept, row, V);
        row_group.for_each(V, [&](int64_t i, int k) {
            float at[N];
            row_group.at(at, kept, row, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) sum = fmaf(at[j], at[j], sum);
        });
        const float r = rsqrtf(fmaf(row_group.sum(sum, smem), inverse, (float)p.eps));
        row_group.for_each(V, [&](int64_t i, int k) {
            float at[N], weight[N], y[N];
            row_group.at(at, kept, row, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) y[j] = at[j] * r * weight[j];
            row_group.store_vec((T *)p.y.data + b * V, i, y);
        });
    }
}

/* x, dy and, where it is added to, dx of a row */
enum { X, DY, DX, N_INPUTS };

template <typename RowGroup>
__global__ void __launch_bounds__(RowGroup::THREADS, RowGroup::blocks_per_sm(BACKWARD_REGS))
rms_norm_backward_kernel(const __grid_constant__ mn_rms_norm_args p, float *partials, bool adds) {
    typedef typename RowGroup::T T;
    constexpr int N = RowGroup::N;
    __shared__ float smem[MN_ROW_GROUP_SMEM];
    RowGroup row_group;
    const int64_t V = p.call.V, B = p.call.B, start = row_group.first() * V;
    const T *w = (const T *)p.w.data;
    T *const grad = p.grad.x.data ? (T *)p.grad.x.data + start : nullptr;
    const T *all[N_INPUTS] = { (const T *)p.x.data + start,
                               p.cot.y.data ? (const T *)p.cot.y.data + start : nullptr,
                               adds ? grad : nullptr };
    const float inverse = 1.0f / (float)V;
    float *partial = partials + blockIdx.x * V;
    typename RowGroup::floats dw = {};
    typename RowGroup::kept kept[N_INPUTS], kept_w;
    row_group.zero_partial(partial, V);
    row_group.load_row(kept_w, w, V);
    mn_row_prefetch<RowGroup, N_INPUTS> prefetch(row_group, all, B, V, V);
    int64_t ahead = 0;    // of the row_group's first row
    for (int64_t b = row_group.first(); b < B; b += row_group.step(),
         ahead += row_group.step() * V) {
        const T *x = all[X] + ahead, *dy = all[DY] ? all[DY] + ahead : nullptr;
        float sums[2] = { 0.0f, 0.0f };    // of x^2 and c x
        prefetch.consume(kept);
        row_group.for_each(V, [&](int64_t i, int k) {
            float at[N], d[N], weight[N];
            row_group.at(at, kept[X], x, i, k);
            row_group.at(d, kept[DY], dy, i, k);
            row_group.at(weight, kept_w, w, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                sums[0] = fmaf(at[j], at[j], sums[0]);
                sums[1] = fmaf(d[j] * weight[j], at[j], sums[1]);
            }
        });
        row_group.sum(sums, smem);
        const float r = rsqrtf(fmaf(sums[0], inverse, (float)p.eps));
        const float pull = r * sums[1] * inverse * r * r;
        row_group.for_each(V, [&](int64_t i, int k) {
            float at[N], d[N], weight[N], dx[N];
            row_group.at(at, kept[X], x, i, k);
            row_group.at(d, kept[DY], dy, i, k);
            row_group.at(weight, kept_w, w, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                d[j] *= r;
                dx[j] = fmaf(d[j], weight[j], -pull * at[j]);
            }
            if (grad && adds) {
                float old[N];
                row_group.at(old, kept[DX], grad + ahead, i, k);
#pragma unroll
                for (int j = 0; j < N; j++) dx[j] += old[j];
            }
            if (grad) row_group.store_vec(grad + ahead, i, dx);
            row_group.accumulate(dw, partial, d, at, i, k);
        });
    }
    row_group.store_partial(partial, dw, V);
}

template <typename RowGroup>
static int forward(const mn_rms_norm_args *p, cudaStream_t stream) {
    const unsigned blocks = mn_blocks(p->call.B, RowGroup::per_block);
    rms_norm_forward_kernel<RowGroup><<<blocks, RowGroup::THREADS, 0, stream>>>(*p);
    return mn_launch_status();
}

template <typename RowGroup>
static int backward(const mn_rms_norm_args *p, float *partials, mn_norm_accumulate to,
                    cudaStream_t stream) {
    const unsigned blocks =
        mn_row_group_blocks<RowGroup>(p->call.B, 1, RowGroup::blocks_per_sm(BACKWARD_REGS),
                                      MN_ROW_GROUP_ROWS);
    const int code = mn_launch_smem(rms_norm_backward_kernel<RowGroup>, dim3(blocks),
                                         RowGroup::THREADS, mn_row_prefetch<RowGroup,
                                             N_INPUTS>::BYTES,
                                         stream, *p, partials, to.accumulate_x);
    if (code != cudaSuccess) return code;
    const int64_t V = p->call.V;
    if (!to.dw) return mn_reduce_partials((typename RowGroup::T *)p->grad.w.data, partials,
                                          blocks, V,
                                       stream);
    return mn_reduce_partials_to(mn_store_sum_f32{ to.dw, to.accumulate_w }, partials, blocks, V,
                                 stream);
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
    MN_DISPATCH_ROW_GROUP(forward, p->call, p->call.V, tensors, (p, (cudaStream_t)stream));
}

MN_CUDA_PLAN(rms_norm_backward) {
    const mn_call *call = (const mn_call *)args;
    return mn_row_reduce_plan(plan, call->B, call->V, 1);
}

extern "C" int mn_norm_accumulate_cuda(const mn_rms_norm_args *p, mn_norm_accumulate to,
                                       void *partials, void *stream) {
    const void *tensors[] = { p->x.data, p->w.data, p->cot.y.data, p->grad.x.data };
    MN_DISPATCH_ROW_GROUP(backward, p->call, p->call.V, tensors,
               (p, (float *)partials, to, (cudaStream_t)stream));
}

MN_CUDA_LAUNCH(rms_norm_backward) {
    const mn_norm_accumulate as_usual = {};
    return mn_norm_accumulate_cuda((const mn_rms_norm_args *)args, as_usual, shared, stream);
}

}    // namespace mneme::norm
