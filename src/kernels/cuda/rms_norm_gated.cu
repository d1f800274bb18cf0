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
    const bool silu = p.act != SIGMOID;
    const float s = mn_sigmoid(z), value = silu ? z * s : s;
    return { value, fmaf(value, 1.0f - s, silu ? s : 0.0f) };
}

/* 1 / sqrt(sum / width + eps), `inverse` that of the width */
__device__ static float inverse_rms(const mn_rms_norm_gated_args &p, float sum, float inverse) {
    return rsqrtf(fmaf(sum, inverse, (float)p.eps));
}

enum { FORWARD_REGS = 26, BACKWARD_REGS = 36 };    // of a pack: kept, next, made; and dw

/* x, z and, going back, dy of a row */
enum { X, Z, DY, N_INPUTS };

/* Blocks (i, g) take rows of group g. */
template <typename Team, bool GATES_FIRST>
__global__ void __launch_bounds__(Team::THREADS, Team::resident(FORWARD_REGS))
rms_norm_gated_forward_kernel(const __grid_constant__ mn_rms_norm_gated_args p) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[MN_TEAM_ROOM];
    Team team;
    const int64_t width = p.call.V / p.groups, V = p.call.V, B = p.call.B;
    const int64_t group = blockIdx.y * width;
    const float inverse = 1.0f / (float)width;
    const T *w = (const T *)p.w.data + group;
    typename Team::kept kept[DY], next[DY];
    typename Team::floats made;    // x act(z), where it is kept
    const auto fetch = [&](int64_t b) {
        team.keep(next[X], b < B ? (const T *)p.x.data + b * V + group : nullptr, width);
        team.keep(next[Z], b < B ? (const T *)p.z.data + b * V + group : nullptr, width);
    };
    fetch(team.first());
    for (int64_t b = team.first(); b < B; b += team.step()) {
        const T *x = (const T *)p.x.data + b * V + group;
        const T *z = (const T *)p.z.data + b * V + group;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < DY; i++) team.take(kept[i], next[i]);
        fetch(b + team.step());
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N];
            team.at(at, kept[X], x, i, k);
            team.at(gate, kept[Z], z, i, k);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float gated = at[j] * gate_at(p, gate[j]).value;
                const float u = GATES_FIRST ? gated : at[j];
                sum = fmaf(u, u, sum);
                if (k >= 0) made[k][j] = gated;
            }
        });
        const float r = inverse_rms(p, team.sum(sum, room), inverse);
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N], weight[N], y[N];
            mn_load<N>(weight, w, i);
            if (k < 0) {
                mn_load<N>(at, x, i);
                mn_load<N>(gate, z, i);
            }
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float gated = k < 0 ? at[j] * gate_at(p, gate[j]).value : made[k][j];
                y[j] = gated * r * weight[j];
            }
            mn_store<N>((T *)p.y.data + b * V + group, i, y);
        });
    }
}

/* What a pack's gradients are made of: act(z), its slope, dy w. */
template <int N>
struct factors {
    float value[N], slope[N], c[N];

    __device__ void make(const mn_rms_norm_gated_args &p, const float (&gate)[N],
                         const float (&weight)[N], const float (&d)[N]) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const mn_gate a = gate_at(p, gate[j]);
            value[j] = a.value;
            slope[j] = a.slope;
            c[j] = d[j] * weight[j];
        }
    }
};

/* One pack: dx, dz and what it adds to dw, from r and the pull of the mean. */
template <bool GATES_FIRST, int N>
__device__ static void pack_backward(float (&dx)[N], float (&dz)[N], float (&more)[N],
                                     const factors<N> &by, const float (&at)[N],
                                     const float (&d)[N], float r, float pull) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float a = by.value[j], rx = r * at[j];
        const float u = GATES_FIRST ? at[j] * a : at[j];
        const float du = r * fmaf(-pull, u, GATES_FIRST ? by.c[j] : by.c[j] * a);
        dx[j] = GATES_FIRST ? du * a : du;
        dz[j] = by.slope[j] * (GATES_FIRST ? du * at[j] : by.c[j] * rx);
        more[j] = d[j] * (rx * a);
    }
}

/* Block (part, g) gathers part `part` of group g. */
template <typename Team, bool GATES_FIRST>
__global__ void __launch_bounds__(Team::THREADS, Team::resident(BACKWARD_REGS))
rms_norm_gated_backward_kernel(const __grid_constant__ mn_rms_norm_gated_args p, float *parts) {
    typedef typename Team::T T;
    constexpr int N = Team::N;
    __shared__ float room[MN_TEAM_ROOM];
    Team team;
    const int64_t width = p.call.V / p.groups, V = p.call.V, B = p.call.B;
    const int64_t group = blockIdx.y * width;
    const float inverse = 1.0f / (float)width;
    const T *w = (const T *)p.w.data + group;
    const T *all[N_INPUTS] = { (const T *)p.x.data, (const T *)p.z.data, (const T *)p.cot.y.data };
    float *part = parts + blockIdx.x * V + group;
    typename Team::floats dw = {};
    typename Team::kept kept[N_INPUTS], next[N_INPUTS];
    factors<N> made[Team::PACKS];
    const auto fetch = [&](int64_t b) {
#pragma unroll
        for (int i = 0; i < N_INPUTS; i++) {
            team.keep(next[i], b < B && all[i] ? all[i] + b * V + group : nullptr, width);
        }
    };
    team.begin(part, width);
    fetch(team.first());
    for (int64_t b = team.first(); b < B; b += team.step()) {
        const int64_t first = b * V + group;
        const T *dy = all[DY] ? all[DY] + first : nullptr;
        float sums[2] = { 0.0f, 0.0f };    // of u^2 and c u, which is the same in either order
#pragma unroll
        for (int i = 0; i < N_INPUTS; i++) team.take(kept[i], next[i]);
        fetch(b + team.step());
        team.each(width, [&](int64_t i, int k) {
            float at[N], gate[N], weight[N], d[N];
            team.at(at, kept[X], all[X] + first, i, k);
            team.at(gate, kept[Z], all[Z] + first, i, k);
            mn_load<N>(weight, w, i);
            team.at(d, kept[DY], dy, i, k);
            factors<N> own, &by = k < 0 ? own : made[k < 0 ? 0 : k];
            by.make(p, gate, weight, d);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float gated = at[j] * by.value[j];
                const float u = GATES_FIRST ? gated : at[j];
                sums[0] = fmaf(u, u, sums[0]);
                sums[1] = fmaf(by.c[j], gated, sums[1]);
            }
        });
        team.sum(sums, room);
        const float r = inverse_rms(p, sums[0], inverse);
        const float pull = r * r * sums[1] * inverse;
        team.each(width, [&](int64_t i, int k) {
            float at[N], d[N], dx[N], dz[N], more[N];
            team.at(at, kept[X], all[X] + first, i, k);
            team.at(d, kept[DY], dy, i, k);
            if (k < 0) {
                float gate[N], weight[N];
                factors<N> own;
                mn_load<N>(gate, all[Z] + first, i);
                mn_load<N>(weight, w, i);
                own.make(p, gate, weight, d);
                pack_backward<GATES_FIRST>(dx, dz, more, own, at, d, r, pull);
            } else {
                pack_backward<GATES_FIRST>(dx, dz, more, made[k], at, d, r, pull);
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
    const unsigned blocks =
        mn_team_blocks<Team>(p->call.B, p->groups, Team::resident(FORWARD_REGS), 1);
    const auto kernel = p->order == GATE_FIRST ? rms_norm_gated_forward_kernel<Team, true>
                                               : rms_norm_gated_forward_kernel<Team, false>;
    kernel<<<dim3(blocks, (unsigned)p->groups), Team::THREADS, 0, stream>>>(*p);
    return mn_launched();
}

template <typename Team>
static int backward(const mn_rms_norm_gated_args *p, float *parts, cudaStream_t stream) {
    const unsigned blocks = mn_team_blocks<Team>(p->call.B, p->groups,
                                                 Team::resident(BACKWARD_REGS), MN_TEAM_ROWS);
    const auto kernel = p->order == GATE_FIRST ? rms_norm_gated_backward_kernel<Team, true>
                                               : rms_norm_gated_backward_kernel<Team, false>;
    kernel<<<dim3(blocks, (unsigned)p->groups), Team::THREADS, 0, stream>>>(*p, parts);
    const int code = mn_launched();
    if (code != cudaSuccess) return code;
    return mn_sum_parts((typename Team::T *)p->grad.w.data, parts, blocks, p->call.V, stream);
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
