/* rms_norm_gated.cu - RMS norm with a gate a = act(z), before or after (see ref/rms_norm_gated.c).
 *
 *   norm_first: u = x, y = r u w a        gate_first: u = x a, y = r u w
 *   r = 1 / sqrt(mean(u^2) + eps) over each group of V / groups channels
 *   du = r (c - u r^2 mean(c u)),  c = dy w a or dy w;  dw = sum over rows of dy r x a
 *
 * A group of a row is a row here: B groups rows of V / groups columns, teams as in rms_norm.cu. */
#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/row_team.cuh"

enum { GATE_FIRST = 1, SIGMOID = 1 };

__device__ static mn_gate gate_at(const mn_rms_norm_gated_args &p, float z) {
    if (p.act != SIGMOID) return mn_silu(z);
    const float s = mn_sigmoid(z);
    return { s, s * (1.0f - s) };
}

template <typename Team>
__global__ void __launch_bounds__(MN_TEAM_THREADS)
rms_norm_gated_forward_kernel(const __grid_constant__ mn_rms_norm_gated_args p) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[32];
    const Team team;
    const int64_t width = p.call.V / p.groups;
    for (int64_t row = team.first(); row < p.call.B * p.groups; row += team.step()) {
        const T *x = (const T *)p.x.data + row * width, *z = (const T *)p.z.data + row * width;
        const T *w = (const T *)p.w.data + row % p.groups * width;
        typename Team::kept kept_x, kept_z;
        float sum = 0.0f;
        team.keep(kept_x, x, width);
        team.keep(kept_z, z, width);
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N];
            team.at(at, kept_x, x, i, k);
            team.at(gate, kept_z, z, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float u = p.order == GATE_FIRST ? at[j] * gate_at(p, gate[j]).value : at[j];
                sum = fmaf(u, u, sum);
            }
        });
        const float r = 1.0f / sqrtf(team.sum(sum, room) / (float)width + (float)p.eps);
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N], weight[N], y[N];
            team.at(at, kept_x, x, i, k);
            team.at(gate, kept_z, z, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) y[j] = at[j] * gate_at(p, gate[j]).value * r * weight[j];
            mn_store<N>((T *)p.y.data + row * width, i, y);
        });
    }
}

/* Team part * groups + g gathers part `part` of group g. */
template <typename Team>
__global__ void __launch_bounds__(MN_TEAM_THREADS, Team::blocks)
rms_norm_gated_backward_kernel(const __grid_constant__ mn_rms_norm_gated_args p, float *parts,
                               int64_t n_parts) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[32];
    const Team team;
    if (team.first() >= n_parts * p.groups) return;
    const int64_t width = p.call.V / p.groups, group = team.first() % p.groups;
    const bool gate_first = p.order == GATE_FIRST;
    const T *w = (const T *)p.w.data + group * width;
    float *part = parts + team.first() * width;
    typename Team::floats dw = {};
    team.begin(part, width);
    for (int64_t b = team.first() / p.groups; b < p.call.B; b += n_parts) {
        const int64_t first = b * p.call.V + group * width;
        const T *x = (const T *)p.x.data + first, *z = (const T *)p.z.data + first;
        const T *dy = p.cot.y.data ? (const T *)p.cot.y.data + first : nullptr;
        typename Team::kept kept_x, kept_z, kept_dy;
        float squares = 0.0f, dot = 0.0f;
        team.keep(kept_x, x, width);
        team.keep(kept_z, z, width);
        team.keep(kept_dy, dy, width);
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N], weight[N], d[N];
            team.at(at, kept_x, x, i, k);
            team.at(gate, kept_z, z, i, k);
            team.at(d, kept_dy, dy, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float gated = at[j] * gate_at(p, gate[j]).value;
                const float u = gate_first ? gated : at[j];
                squares = fmaf(u, u, squares);
                dot = fmaf(d[j] * weight[j], gated, dot);    // c u, either order
            }
        });
        const float r = 1.0f / sqrtf(team.sum(squares, room) / (float)width + (float)p.eps);
        const float pull = r * r * team.sum(dot, room) / (float)width;
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N], weight[N], d[N], dx[N], dz[N], more[N];
            team.at(at, kept_x, x, i, k);
            team.at(gate, kept_z, z, i, k);
            team.at(d, kept_dy, dy, i, k);
            mn_load<N>(weight, w, i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const mn_gate a = gate_at(p, gate[j]);
                const float u = gate_first ? at[j] * a.value : at[j];
                const float c = d[j] * weight[j] * (gate_first ? 1.0f : a.value);
                const float du = r * fmaf(-pull, u, c);
                dx[j] = gate_first ? du * a.value : du;
                dz[j] = a.slope * (gate_first ? du * at[j] : d[j] * weight[j] * r * at[j]);
                more[j] = d[j] * r * at[j] * a.value;
            }
            if (p.grad.x.data) mn_store<N>((T *)p.grad.x.data + first, i, dx);
            if (p.grad.z.data) mn_store<N>((T *)p.grad.z.data + first, i, dz);
            team.gather(dw, part, more, i, k);
        });
    }
    team.leave(part, dw, width);
}

template <typename Team>
static int forward(const mn_rms_norm_gated_args *p, cudaStream_t stream) {
    const unsigned blocks = mn_blocks(p->call.B * p->groups, Team::per_block);
    rms_norm_gated_forward_kernel<Team><<<blocks, MN_TEAM_THREADS, 0, stream>>>(*p);
    return mn_launched();
}

template <typename Team>
static int backward(const mn_rms_norm_gated_args *p, float *parts, cudaStream_t stream) {
    const int64_t V = p->call.V;
    const int64_t n_parts = mn_gather_parts(p->call.B, V / p->groups, p->groups);
    const unsigned blocks = mn_blocks(n_parts * p->groups, Team::per_block);
    rms_norm_gated_backward_kernel<Team>
        <<<blocks, MN_TEAM_THREADS, 0, stream>>>(*p, parts, n_parts);
    const int code = mn_launched();
    if (code != cudaSuccess) return code;
    return mn_sum_parts((typename Team::T *)p->grad.w.data, parts, n_parts, V, stream);
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
    MN_BY_TEAM(forward, p->call, p->call.V / p->groups, tensors, (p, (cudaStream_t)stream));
}

MN_CUDA_PLAN(rms_norm_gated_backward) {
    const mn_rms_norm_gated_args *p = (const mn_rms_norm_gated_args *)args;
    return mn_gather_plan(plan, p->call.B, p->call.V / p->groups, p->groups);
}

MN_CUDA_LAUNCH(rms_norm_gated_backward) {
    const mn_rms_norm_gated_args *p = (const mn_rms_norm_gated_args *)args;
    const void *tensors[] = { p->x.data,     p->z.data,      p->w.data,
                              p->cot.y.data, p->grad.x.data, p->grad.z.data };
    MN_BY_TEAM(backward, p->call, p->call.V / p->groups, tensors,
               (p, (float *)shared, (cudaStream_t)stream));
}
