/* rms_norm_gated.cu - RMS norm with a gate a = act(z), before or after (see ref/rms_norm_gated.c).
 *
 *   norm_first: u = x, y = r u w a        gate_first: u = x a, y = r u w
 *   r = 1 / sqrt(mean(u^2) + eps) over each group of V / groups channels
 *   du = r (c - u r^2 mean(c u)),  c = dy w a or dy w;  dw = sum over rows of dy r x a
 *
 * A group of a row is a row here: B groups rows of V / groups columns, groups as in
 * rms_norm.cu. */
#include "kernels/cuda/prim/activation.cuh"
#include "kernels/cuda/prim/split_reduce.cuh"
#include "kernels/cuda/prim/row_reduce.cuh"
#include "kernels/norm_adds.h"

namespace mneme::norm {

enum { GATE_FIRST = 1, SIGMOID = 1 };

/* How a kernel is compiled: which comes first, and whether the gate is s = sigmoid(z) itself or
 * z s. */
template <bool FIRST, bool PLAIN>
struct gate_kind {
    static constexpr bool GATES_FIRST = FIRST;

    __device__ static float value(float z, float s) {
        return PLAIN ? s : z * s;
    }

    __device__ static float slope(float value, float s) {
        return fmaf(value, 1.0f - s, PLAIN ? 0.0f : s);
    }
};

enum { FORWARD_REGS = 4, BACKWARD_REGS = 32 };    // of a pack: inputs; back sigmoid, w and dw

/* x, z and, going back, dy of a row */
enum { X, Z, DY, N_INPUTS };

/* Blocks (i, g) take rows of group g. */
template <typename RowGroup, typename Gate>
__global__ void __launch_bounds__(RowGroup::THREADS, RowGroup::blocks_per_sm(FORWARD_REGS))
rms_norm_gated_forward_kernel(const __grid_constant__ mn_rms_norm_gated_args p) {
    typedef typename RowGroup::T T;
    constexpr int N = RowGroup::N;
    __shared__ float smem[MN_ROW_GROUP_SMEM];
    RowGroup row_group;
    const int64_t width = p.call.V / p.groups, V = p.call.V, B = p.call.B;
    const int64_t group = blockIdx.y * width;
    const float inverse = 1.0f / (float)width;
    const T *w = (const T *)p.w.data + group;
    for (int64_t b = row_group.first(); b < B; b += row_group.step()) {
        const T *x = (const T *)p.x.data + b * V + group;
        const T *z = (const T *)p.z.data + b * V + group;
        typename RowGroup::kept kept[DY];
        float sum = 0.0f;
        row_group.load_row(kept[X], x, width);
        row_group.load_row(kept[Z], z, width);
        row_group.for_each(width, [&](int64_t i, int k) {
            float at[N], gate[N];
            row_group.at(at, kept[X], x, i, k);
            if (Gate::GATES_FIRST) row_group.at(gate, kept[Z], z, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (Gate::GATES_FIRST) at[j] *= Gate::value(gate[j], mn_sigmoid(gate[j]));
                sum = fmaf(at[j], at[j], sum);
            }
        });
        const float r = rsqrtf(fmaf(row_group.sum(sum, smem), inverse, (float)p.eps));
        row_group.for_each(width, [&](int64_t i, int k) {
            float at[N], gate[N], weight[N], y[N];
            row_group.at(at, kept[X], x, i, k);
            row_group.at(gate, kept[Z], z, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                y[j] = at[j] * Gate::value(gate[j], mn_sigmoid(gate[j])) * r * weight[j];
            }
            row_group.store_vec((T *)p.y.data + b * V + group, i, y);
        });
    }
}

/* dx, dz and terms of dw, r dy x by the gate, from r and pull = r^3 mean(c u), s being
 * sigmoid(gate). */
template <typename Gate, int N>
__device__ static void pack_backward(float (&dx)[N], float (&dz)[N], float (&more)[N],
                                     float (&value)[N], const float (&at)[N],
                                     const float (&gate)[N], const float (&s)[N],
                                     const float (&weight)[N], const float (&d)[N], float r,
                                     float pull) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        value[j] = Gate::value(gate[j], s[j]);
        const float slope = Gate::slope(value[j], s[j]), rd = r * d[j], rc = rd * weight[j];
        if (Gate::GATES_FIRST) {
            const float du = fmaf(-pull * at[j], value[j], rc);
            dx[j] = du * value[j];
            dz[j] = du * at[j] * slope;
        } else {
            dx[j] = fmaf(rc, value[j], -pull * at[j]);
            dz[j] = rc * at[j] * slope;
        }
        more[j] = rd * at[j];
    }
}

/* Block (part, g) gathers part `part` of group g. */
template <typename RowGroup, typename Gate>
__global__ void __launch_bounds__(RowGroup::THREADS, RowGroup::blocks_per_sm(BACKWARD_REGS))
rms_norm_gated_backward_kernel(const __grid_constant__ mn_rms_norm_gated_args p, float *partials) {
    typedef typename RowGroup::T T;
    constexpr int N = RowGroup::N;
    __shared__ float smem[MN_ROW_GROUP_SMEM];
    RowGroup row_group;
    const int64_t width = p.call.V / p.groups, V = p.call.V, B = p.call.B;
    const int64_t group = blockIdx.y * width, start = row_group.first() * V + group;
    const float inverse = 1.0f / (float)width;
    const T *w = (const T *)p.w.data + group;
    const T *all[N_INPUTS] = { (const T *)p.x.data + start, (const T *)p.z.data + start,
                               p.cot.y.data ? (const T *)p.cot.y.data + start : nullptr };
    float *partial = partials + blockIdx.x * V + group;
    typename RowGroup::floats dw = {}, sigmoid;
    typename RowGroup::kept kept[N_INPUTS], kept_w;
    row_group.zero_partial(partial, width);
    row_group.load_row(kept_w, w, width);
    mn_row_prefetch<RowGroup, N_INPUTS> prefetch(row_group, all, B, V, width);
    int64_t ahead = 0;    // of the row_group's first row
    for (int64_t b = row_group.first(); b < B; b += row_group.step(),
         ahead += row_group.step() * V) {
        const T *x = all[X] + ahead, *z = all[Z] + ahead, *dy = all[DY] ? all[DY] + ahead : nullptr;
        float sums[2] = { 0.0f, 0.0f };    // of u^2 and c u, which is the same in either order
        prefetch.consume(kept);
        row_group.for_each(width, [&](int64_t i, int k) {
            float at[N], gate[N], weight[N], d[N];
            row_group.at(at, kept[X], x, i, k);
            row_group.at(gate, kept[Z], z, i, k);
            row_group.at(weight, kept_w, w, i, k);
            row_group.at(d, kept[DY], dy, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float s = mn_sigmoid(gate[j]);
                const float gated = at[j] * Gate::value(gate[j], s);
                const float u = Gate::GATES_FIRST ? gated : at[j];
                if (k >= 0) sigmoid[k][j] = s;
                sums[0] = fmaf(u, u, sums[0]);
                sums[1] = fmaf(d[j] * weight[j], gated, sums[1]);
            }
        });
        row_group.sum(sums, smem);
        const float r = rsqrtf(fmaf(sums[0], inverse, (float)p.eps));
        const float pull = r * sums[1] * inverse * r * r;
        row_group.for_each(width, [&](int64_t i, int k) {
            float at[N], gate[N], s[N], weight[N], d[N], dx[N], dz[N], more[N], value[N];
            row_group.at(at, kept[X], x, i, k);
            row_group.at(gate, kept[Z], z, i, k);
            row_group.at(weight, kept_w, w, i, k);
            row_group.at(d, kept[DY], dy, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) s[j] = k >= 0 ? sigmoid[k][j] : mn_sigmoid(gate[j]);
            pack_backward<Gate>(dx, dz, more, value, at, gate, s, weight, d, r, pull);
            if (p.grad.x.data) row_group.store_vec((T *)p.grad.x.data + start + ahead, i, dx);
            if (p.grad.z.data) row_group.store_vec((T *)p.grad.z.data + start + ahead, i, dz);
            row_group.accumulate(dw, partial, more, value, i, k);
        });
    }
    row_group.store_partial(partial, dw, width);
}

template <typename RowGroup, typename Gate>
static int forward_of(const mn_rms_norm_gated_args *p, cudaStream_t stream) {
    const dim3 blocks(mn_blocks(p->call.B, RowGroup::per_block), (unsigned)p->groups);
    rms_norm_gated_forward_kernel<RowGroup, Gate><<<blocks, RowGroup::THREADS, 0, stream>>>(*p);
    return mn_launch_status();
}

template <typename RowGroup>
static int forward(const mn_rms_norm_gated_args *p, cudaStream_t stream) {
    const bool plain = p->act == SIGMOID;
    if (p->order == GATE_FIRST) {
        return plain ? forward_of<RowGroup, gate_kind<true, true>>(p, stream)
                     : forward_of<RowGroup, gate_kind<true, false>>(p, stream);
    }
    return plain ? forward_of<RowGroup, gate_kind<false, true>>(p, stream)
                 : forward_of<RowGroup, gate_kind<false, false>>(p, stream);
}

template <typename RowGroup, typename Gate>
static int backward_of(const mn_rms_norm_gated_args *p, float *partials, mn_norm_accumulate to,
                       cudaStream_t stream) {
    const int64_t V = p->call.V;
    const unsigned n_partials = mn_row_group_blocks<RowGroup>(p->call.B, p->groups,
                                                  RowGroup::blocks_per_sm(BACKWARD_REGS),
                                                      MN_ROW_GROUP_ROWS);
    const int code = mn_launch_smem(rms_norm_gated_backward_kernel<RowGroup, Gate>,
                                         dim3(n_partials, (unsigned)p->groups),
                                             RowGroup::THREADS,
                                         mn_row_prefetch<RowGroup, N_INPUTS>::BYTES, stream,
                                             *p, partials);
    if (code != cudaSuccess) return code;
    if (!to.dw) return mn_reduce_partials((typename RowGroup::T *)p->grad.w.data, partials,
                                          n_partials, V,
                                       stream);
    return mn_reduce_partials_to(mn_store_sum_f32{ to.dw, to.accumulate_w }, partials, n_partials,
                                 V, stream);
}

template <typename RowGroup>
static int backward(const mn_rms_norm_gated_args *p, float *partials, mn_norm_accumulate to,
                    cudaStream_t stream) {
    const bool plain = p->act == SIGMOID;
    if (p->order == GATE_FIRST) {
        return plain ? backward_of<RowGroup, gate_kind<true, true>>(p, partials, to, stream)
                     : backward_of<RowGroup, gate_kind<true, false>>(p, partials, to, stream);
    }
    return plain ? backward_of<RowGroup, gate_kind<false, true>>(p, partials, to, stream)
                 : backward_of<RowGroup, gate_kind<false, false>>(p, partials, to, stream);
}

MN_CUDA_PLAN(rms_norm_gated_forward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(rms_norm_gated_forward) {
    (void)shared;
    const mn_rms_norm_gated_args *p = (const mn_rms_norm_gated_args *)args;
    if (!p->y.data) return cudaSuccess;
    const void *tensors[] = { p->x.data, p->z.data, p->w.data, p->y.data };
    MN_DISPATCH_ROW_GROUP(forward, p->call, p->call.V / p->groups, tensors,
                          (p, (cudaStream_t)stream));
}

MN_CUDA_PLAN(rms_norm_gated_backward) {
    const mn_rms_norm_gated_args *p = (const mn_rms_norm_gated_args *)args;
    return mn_row_reduce_plan(plan, p->call.B, p->call.V / p->groups, p->groups);
}

extern "C" int mn_norm_gated_accumulate_cuda(const mn_rms_norm_gated_args *p,
                                             mn_norm_accumulate to, void *partials,
                            void *stream) {
    const void *tensors[] = { p->x.data,     p->z.data,      p->w.data,
                              p->cot.y.data, p->grad.x.data, p->grad.z.data };
    MN_DISPATCH_ROW_GROUP(backward, p->call, p->call.V / p->groups, tensors,
               (p, (float *)partials, to, (cudaStream_t)stream));
}

MN_CUDA_LAUNCH(rms_norm_gated_backward) {
    const mn_norm_accumulate as_usual = {};
    return mn_norm_gated_accumulate_cuda((const mn_rms_norm_gated_args *)args, as_usual, shared,
                                         stream);
}

}    // namespace mneme::norm
