/* rms_norm_gated.cu - RMS norm with a gate a = act(z), before or after (see ref/rms_norm_gated.c).
 *
 *   norm_first: u = x, y = r u w a        gate_first: u = x a, y = r u w
 *   r = 1 / sqrt(mean(u^2) + eps) over each group of V / groups channels
 *   du = r (c - u r^2 mean(c u)),  c = dy w a or dy w;  dw = sum over rows of dy r x a
 *
 * A group of a row is a row here: B groups rows of V / groups columns, groups as in rms_norm.cu. */
#include "kernels/cuda/prim/activation.cuh"
#include "kernels/cuda/prim/split_reduce.cuh"
#include "kernels/cuda/prim/row_reduce.cuh"
#include "kernels/norm_adds.h"

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
template <typename Team, typename Gate>
__global__ void __launch_bounds__(Team::THREADS, Team::resident(FORWARD_REGS))
rms_norm_gated_forward_kernel(const __grid_constant__ mn_rms_norm_gated_args p) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[MN_GROUP_SMEM];
    Team team;
    const int64_t width = p.call.V / p.groups, V = p.call.V, B = p.call.B;
    const int64_t group = blockIdx.y * width;
    const float inverse = 1.0f / (float)width;
    const T *w = (const T *)p.w.data + group;
    for (int64_t b = team.first(); b < B; b += team.step()) {
        const T *x = (const T *)p.x.data + b * V + group;
        const T *z = (const T *)p.z.data + b * V + group;
        typename Team::kept kept[DY];
        float sum = 0.0f;
        team.keep(kept[X], x, width);
        team.keep(kept[Z], z, width);
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N];
            team.at(at, kept[X], x, i, k);
            if (Gate::GATES_FIRST) team.at(gate, kept[Z], z, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (Gate::GATES_FIRST) at[j] *= Gate::value(gate[j], mn_sigmoid(gate[j]));
                sum = fmaf(at[j], at[j], sum);
            }
        });
        const float r = rsqrtf(fmaf(team.sum(sum, room), inverse, (float)p.eps));
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N], weight[N], y[N];
            team.at(at, kept[X], x, i, k);
            team.at(gate, kept[Z], z, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                y[j] = at[j] * Gate::value(gate[j], mn_sigmoid(gate[j])) * r * weight[j];
            }
            team.put((T *)p.y.data + b * V + group, i, y);
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
template <typename Team, typename Gate>
__global__ void __launch_bounds__(Team::THREADS, Team::resident(BACKWARD_REGS))
rms_norm_gated_backward_kernel(const __grid_constant__ mn_rms_norm_gated_args p, float *parts) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[MN_GROUP_SMEM];
    Team team;
    const int64_t width = p.call.V / p.groups, V = p.call.V, B = p.call.B;
    const int64_t group = blockIdx.y * width, start = team.first() * V + group;
    const float inverse = 1.0f / (float)width;
    const T *w = (const T *)p.w.data + group;
    const T *all[N_INPUTS] = { (const T *)p.x.data + start, (const T *)p.z.data + start,
                               p.cot.y.data ? (const T *)p.cot.y.data + start : nullptr };
    float *part = parts + blockIdx.x * V + group;
    typename Team::floats dw = {}, sigmoid;
    typename Team::kept kept[N_INPUTS], kept_w;
    team.begin(part, width);
    team.keep(kept_w, w, width);
    mn_prefetch_tile_rows<Team, N_INPUTS> coming(team, all, B, V, width);
    int64_t ahead = 0;    // of the team's first row
    for (int64_t b = team.first(); b < B; b += team.step(), ahead += team.step() * V) {
        const T *x = all[X] + ahead, *z = all[Z] + ahead, *dy = all[DY] ? all[DY] + ahead : nullptr;
        float sums[2] = { 0.0f, 0.0f };    // of u^2 and c u, which is the same in either order
        coming.take(kept);
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N], weight[N], d[N];
            team.at(at, kept[X], x, i, k);
            team.at(gate, kept[Z], z, i, k);
            team.at(weight, kept_w, w, i, k);
            team.at(d, kept[DY], dy, i, k);
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
        team.sum(sums, room);
        const float r = rsqrtf(fmaf(sums[0], inverse, (float)p.eps));
        const float pull = r * sums[1] * inverse * r * r;
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N], s[N], weight[N], d[N], dx[N], dz[N], more[N], value[N];
            team.at(at, kept[X], x, i, k);
            team.at(gate, kept[Z], z, i, k);
            team.at(weight, kept_w, w, i, k);
            team.at(d, kept[DY], dy, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) s[j] = k >= 0 ? sigmoid[k][j] : mn_sigmoid(gate[j]);
            pack_backward<Gate>(dx, dz, more, value, at, gate, s, weight, d, r, pull);
            if (p.grad.x.data) team.put((T *)p.grad.x.data + start + ahead, i, dx);
            if (p.grad.z.data) team.put((T *)p.grad.z.data + start + ahead, i, dz);
            team.gather(dw, part, more, value, i, k);
        });
    }
    team.leave(part, dw, width);
}

template <typename Team, typename Gate>
static int forward_of(const mn_rms_norm_gated_args *p, cudaStream_t stream) {
    const dim3 blocks(mn_blocks(p->call.B, Team::per_block), (unsigned)p->groups);
    rms_norm_gated_forward_kernel<Team, Gate><<<blocks, Team::THREADS, 0, stream>>>(*p);
    return mn_launch_status();
}

template <typename Team>
static int forward(const mn_rms_norm_gated_args *p, cudaStream_t stream) {
    const bool plain = p->act == SIGMOID;
    if (p->order == GATE_FIRST) {
        return plain ? forward_of<Team, gate_kind<true, true>>(p, stream)
                     : forward_of<Team, gate_kind<true, false>>(p, stream);
    }
    return plain ? forward_of<Team, gate_kind<false, true>>(p, stream)
                 : forward_of<Team, gate_kind<false, false>>(p, stream);
}

template <typename Team, typename Gate>
static int backward_of(const mn_rms_norm_gated_args *p, float *parts, mn_norm_adds to,
                       cudaStream_t stream) {
    const int64_t V = p->call.V;
    const unsigned n_parts = mn_group_blocks<Team>(p->call.B, p->groups,
                                                  Team::resident(BACKWARD_REGS), MN_GROUP_ROWS);
    const int code = mn_launch_smem(rms_norm_gated_backward_kernel<Team, Gate>,
                                         dim3(n_parts, (unsigned)p->groups), Team::THREADS,
                                         mn_prefetch_tile_rows<Team, N_INPUTS>::BYTES, stream,
                                             *p, parts);
    if (code != cudaSuccess) return code;
    if (!to.dw) return mn_sum_partials((typename Team::T *)p->grad.w.data, parts, n_parts, V,
                                       stream);
    return mn_sum_partials_into(mn_put_wide{ to.dw, to.adds_w }, parts, n_parts, V, stream);
}

template <typename Team>
static int backward(const mn_rms_norm_gated_args *p, float *parts, mn_norm_adds to,
                    cudaStream_t stream) {
    const bool plain = p->act == SIGMOID;
    if (p->order == GATE_FIRST) {
        return plain ? backward_of<Team, gate_kind<true, true>>(p, parts, to, stream)
                     : backward_of<Team, gate_kind<true, false>>(p, parts, to, stream);
    }
    return plain ? backward_of<Team, gate_kind<false, true>>(p, parts, to, stream)
                 : backward_of<Team, gate_kind<false, false>>(p, parts, to, stream);
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
    MN_BY_GROUP(forward, p->call, p->call.V / p->groups, tensors, (p, (cudaStream_t)stream));
}

MN_CUDA_PLAN(rms_norm_gated_backward) {
    const mn_rms_norm_gated_args *p = (const mn_rms_norm_gated_args *)args;
    return mn_gather_plan(plan, p->call.B, p->call.V / p->groups, p->groups);
}

int mn_norm_gated_adds_cuda(const mn_rms_norm_gated_args *p, mn_norm_adds to, void *parts,
                            void *stream) {
    const void *tensors[] = { p->x.data,     p->z.data,      p->w.data,
                              p->cot.y.data, p->grad.x.data, p->grad.z.data };
    MN_BY_GROUP(backward, p->call, p->call.V / p->groups, tensors,
               (p, (float *)parts, to, (cudaStream_t)stream));
}

MN_CUDA_LAUNCH(rms_norm_gated_backward) {
    const mn_norm_adds as_usual = {};
    return mn_norm_gated_adds_cuda((const mn_rms_norm_gated_args *)args, as_usual, shared, stream);
}
