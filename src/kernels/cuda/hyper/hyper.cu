/* hyper.cu - HyperMLP and HyperGLU heads by strips of query rows (equations in ref/hyper.c).
 *
 * Products of a strip are those of attention (attention_strip_mma.cuh). Backward makes the strip
 * again, and o once more where it is given, and goes back through it:
 *
 *   o = w v, dgv, g_o = do gv / n    dv += w'g_o    gw = g_o v'    gw -> g, the cotangents of x
 *   parameters, and g -> dz          dq = dz k      dk += dz'q
 *
 * Gradients of parameters gather in a few parts, each of every n-th tile, which are added last. */
#include "kernels/cuda/hyper/hyper_rows.cuh"
#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/prim/mma_tf32.cuh"
#include "kernels/cuda/prim/split_reduce.cuh"

namespace mneme::hyper {

/* Each exchange of lanes sums pairs and leaves a lane half of its values. */
template <int half>
__device__ inline void mn_hyper_reduce_lanes(float (&v)[MN_HYPER_SUMS]) {
    const bool upper = threadIdx.x & half / 2;
#pragma unroll
    for (int i = 0; i < half; i++) {
        const float give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
        v[i] = keep + __shfl_xor_sync(0xffffffffu, give, half / 2);
    }
    if constexpr (half > 2) mn_hyper_reduce_lanes<half / 2>(v);
}

/* Sums `v` over the block into out[0 .. 63]. */
__device__ inline void mn_hyper_reduce(float (&v)[MN_HYPER_SUMS], float *scratch, float *out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    mn_hyper_reduce_lanes<MN_HYPER_SUMS / 2>(v);
    __syncthreads();
    scratch[warp * MN_HYPER_SUMS + 2 * lane] = v[0];
    scratch[warp * MN_HYPER_SUMS + 2 * lane + 1] = v[1];
    __syncthreads();
    if (threadIdx.x < MN_HYPER_SUMS) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < MN_HYPER_THREADS / 32; i++) {
            sum += scratch[i * MN_HYPER_SUMS + threadIdx.x];
        }
        out[threadIdx.x] = sum;
    }
    __syncthreads();
}

/* What the threads of a block share: ranks of a mix of four rows, sums, room for them. */
struct mn_hyper_smem {
    float sums[MN_HYPER_SUMS], scratch[MN_HYPER_THREADS / 32 * MN_HYPER_SUMS], thread_group[32];
};

/* 16 ranks of a lag, from a0 on */
__device__ inline void mn_hyper_load(float (&x)[MN_HYPER_RANKS], const mn_hyper_params &k,
                                     const float *from, int lag, int a0) {
    const int at = mn_hyper_place(k, lag, a0), step = (int)k.lags;
#pragma unroll
    for (int i = 0; i < MN_HYPER_RANKS; i += 4) {
        const float4 v = *(const float4 *)(from + (at + i * step));
        x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
}

/* sums over lags of matrix(row, lag) times a parameter by lag; put(r, rank, sum) by one thread
 * each. */
template <typename F>
__device__ inline void mn_hyper_down_project(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                         mn_hyper_smem &scratch, float *matrix, const float *by_lag,
                                         F put) {
    const float *lag0_offset = mn_hyper_lag0(k, matrix, f);
    for (int64_t a0 = 0; a0 < k.ranks; a0 += MN_HYPER_RANKS) {
        float sums[MN_HYPER_SUMS] = {}, next[MN_HYPER_RANKS], z_next[MN_HYPER_ROWS];
        const auto fetch = [&](int j) {
            if (j >= f.max_tiles) return;
            mn_hyper_load(next, k, by_lag, j, (int)a0);
#pragma unroll
            for (int r = 0; r < MN_HYPER_ROWS; r++) {
                z_next[r] = j < f.keys(r) ? lag0_offset[mn_hyper_lag_offset(k, r, j)] : 0.0f;
            }
        };
        fetch(threadIdx.x);
        for (int j = threadIdx.x; j < f.max_tiles; j += MN_HYPER_THREADS) {
            float u[MN_HYPER_RANKS], z[MN_HYPER_ROWS];
#pragma unroll
            for (int a = 0; a < MN_HYPER_RANKS; a++) u[a] = next[a];
#pragma unroll
            for (int r = 0; r < MN_HYPER_ROWS; r++) z[r] = z_next[r];
            fetch(j + MN_HYPER_THREADS);
#pragma unroll
            for (int r = 0; r < MN_HYPER_ROWS; r++) {
#pragma unroll
                for (int a = 0; a < MN_HYPER_RANKS; a++) {
                    sums[r * MN_HYPER_RANKS + a] = fmaf(z[r], u[a], sums[r * MN_HYPER_RANKS + a]);
                }
            }
        }
        mn_hyper_reduce(sums, scratch.scratch, scratch.sums);
        if (threadIdx.x < MN_HYPER_SUMS && f.keys(threadIdx.x / MN_HYPER_RANKS) > 0) {
            put(threadIdx.x / MN_HYPER_RANKS, a0 + threadIdx.x % MN_HYPER_RANKS,
                scratch.sums[threadIdx.x]);
        }
        __syncthreads();
    }
}

/* Numbers of a thread: four lags, a block's threads apart, of four rows. */
struct mn_hyper_frag {
    float at[MN_HYPER_LAGS][MN_HYPER_ROWS];
};

__device__ inline int mn_hyper_lag(int j, int l) {
    return j + l * MN_HYPER_THREADS;
}

/* x_r += sum of ranks of row r (in shared memory, `ranks` apart) times a parameter by lag. Ranks of
 * a row, which all lanes read alike at four cycles for four of them, serve four lags. */
__device__ inline void mn_hyper_up_project(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                       mn_hyper_frag &x, const float *of_rows,
                                       const float *by_lag, int j) {
#pragma unroll 2
    for (int a = 0; a < (int)k.ranks; a += 4) {
        float4 v[MN_HYPER_LAGS];
#pragma unroll
        for (int l = 0; l < MN_HYPER_LAGS; l++) {
            const int lag = mn_hyper_lag(j, l);
            v[l] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (lag < f.max_tiles) v[l] = *(const float4 *)(by_lag + mn_hyper_place(k, lag, a));
        }
#pragma unroll
        for (int r = 0; r < MN_HYPER_ROWS; r++) {
            const float4 c = *(const float4 *)(of_rows + r * (int)k.ranks + a);
#pragma unroll
            for (int l = 0; l < MN_HYPER_LAGS; l++) {
                float y = x.at[l][r];
                y = fmaf(c.x, v[l].x, y), y = fmaf(c.y, v[l].y, y);
                x.at[l][r] = fmaf(c.w, v[l].w, fmaf(c.z, v[l].z, y));
            }
        }
    }
}

__device__ inline float mn_hyper_sigmoid(float x) {
    const float e = expf(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

/* The matrix of `lag0_offset` times 1 + d. */
__device__ inline void mn_hyper_diagonal(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                       mn_hyper_frag &x, const float *lag0_offset, const float *d,
                                       int j) {
#pragma unroll
    for (int l = 0; l < MN_HYPER_LAGS; l++) {
        const int lag = mn_hyper_lag(j, l);
        const float by = d && lag < f.max_tiles ? 1.0f + d[lag] : 1.0f;
#pragma unroll
        for (int r = 0; r < MN_HYPER_ROWS; r++) {
            x.at[l][r] = lag < f.keys(r) ? by * lag0_offset[mn_hyper_lag_offset(k, r, lag)] : 0.0f;
        }
    }
}

/* x of a branch: z (1 + d) + (h c) Vt, z in the matrix of `lag0_offset` */
__device__ inline void mn_hyper_mixed(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                      mn_hyper_frag &x, const float *lag0_offset,
                                      const mn_hyper_mix &m, const float *hc, int j) {
    mn_hyper_diagonal(k, f, x, lag0_offset, m.d, j);
    if (m.Vt) mn_hyper_up_project(k, f, x, hc, m.Vt, j);
}

/* what(l, r, where it lies) for the thread's numbers that rows see */
template <typename F>
__device__ inline void mn_hyper_for_each(const mn_hyper_params &k, const mn_hyper_rows4 &f, int j,
                                         F what) {
#pragma unroll
    for (int l = 0; l < MN_HYPER_LAGS; l++) {
        const int lag = mn_hyper_lag(j, l);
#pragma unroll
        for (int r = 0; r < MN_HYPER_ROWS; r++) {
            if (lag < f.keys(r)) what(l, r, mn_hyper_lag_offset(k, r, lag));
        }
    }
}

/* h and h c of a mix from its argument, kept and in shared memory. */
template <typename T>
__device__ inline void mn_hyper_project_in(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                      mn_hyper_smem &scratch, float *matrix, const mn_hyper_mix &m,
                                      int branch, float *hc) {
    if (!m.U) return;
    mn_hyper_down_project(k, f, scratch, matrix, m.U, [&](int r, int64_t a, float sum) {
        const float by = mn_hyper_rank_gate<T>(k, f, branch, r, a) * sum;
        float *saved_row = mn_hyper_saved_row(k, f.which, f.head, f.first + r);
        mn_hyper_saved_ranks(k, saved_row, branch, MN_HYPER_H)[a] = sum;
        mn_hyper_saved_ranks(k, saved_row, branch, MN_HYPER_HC)[a] = by;
        hc[r * k.ranks + a] = by;
    });
}

/* base from z, w from base, and the scale of the output. A block has four rows of a head. */
template <typename T>
__global__ void __launch_bounds__(MN_HYPER_THREADS, 4)
hyper_rows_fwd_kernel(const __grid_constant__ mn_hyper_params k) {
    extern __shared__ __align__(16) float shared[];
    __shared__ mn_hyper_smem scratch;
    mn_hyper_rows4 f;
    if (!mn_hyper_rows4_of(&f, k)) return;
    const int64_t each = MN_HYPER_ROWS * k.ranks;
    const mn_hyper_mix first = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, 0));
    const mn_hyper_mix second = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, k.branches - 1));
    const mn_hyper_mix last = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, 2));
    float *hc = shared, square[MN_HYPER_ROWS] = {};
    float *base = mn_hyper_lag0(k, k.base, f), *w = mn_hyper_lag0(k, k.w, f);
    const float *z1 = mn_hyper_lag0(k, k.z[0], f);
    const float *z2 = mn_hyper_lag0(k, k.z[k.branches - 1], f);
    for (int i = threadIdx.x; i < 3 * MN_HYPER_ROWS * k.ranks; i += MN_HYPER_THREADS) {
        shared[i] = 0.0f;
    }
    __syncthreads();
    mn_hyper_project_in<T>(k, f, scratch, k.z[0], first, 0, hc);
    if (k.branches == 2) mn_hyper_project_in<T>(k, f, scratch, k.z[1], second, 1, hc + each);
    for (int j = threadIdx.x; j < f.max_tiles; j += MN_HYPER_STEP) {
        mn_hyper_frag x, scale;
        mn_hyper_mixed(k, f, x, z1, first, hc, j);
        if (k.branches == 2) mn_hyper_mixed(k, f, scale, z2, second, hc + each, j);
        mn_hyper_for_each(k, f, j, [&](int l, int r, int at) {
            square[r] = fmaf(x.at[l][r], x.at[l][r], square[r]);
            float y = mn_fmax(x.at[l][r], 0.0f);
            if (k.branches == 2) y *= mn_hyper_softplus(scale.at[l][r]);
            base[at] = y;
        });
    }
#pragma unroll
    for (int r = 0; r < MN_HYPER_ROWS; r++) {
        const float norm = sqrtf(mn_group_sum<MN_HYPER_THREADS>(square[r], scratch.thread_group));
        if (threadIdx.x != 0 || f.keys(r) == 0) continue;
        float *saved_row = mn_hyper_saved_row(k, f.which, f.head, f.first + r);
        saved_row[MN_HYPER_NORM] = norm;
        saved_row[MN_HYPER_SCALE] = k.p.norm == 2 ? 1.0f : 1.0f / mn_fmax(norm, (float)k.p.eps);
    }
    __syncthreads();
    mn_hyper_project_in<T>(k, f, scratch, k.base, last, 2, hc + 2 * each);
    for (int j = threadIdx.x; j < f.max_tiles; j += MN_HYPER_STEP) {
        mn_hyper_frag x;
        mn_hyper_mixed(k, f, x, base, last, hc + 2 * each, j);
        mn_hyper_for_each(k, f, j, [&](int l, int r, int at) { w[at] = x.at[l][r]; });
    }
    if (k.w != k.base) mn_hyper_zero_tail(k, f, k.w);
}

/* y c of a mix from the cotangent of its result, and dc. */
template <typename T>
__device__ inline void mn_hyper_project_back(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                      mn_hyper_smem &scratch, float *matrix, const mn_hyper_mix &m,
                                      int branch, float *yc) {
    if (!m.Vt) return;
    const bool second = branch == 2;
    const int64_t n_ranks = second ? k.p.call.W : k.p.call.R;
    mn_hyper_down_project(k, f, scratch, matrix, m.Vt, [&](int r, int64_t a, float sum) {
        const float by = mn_hyper_rank_gate<T>(k, f, branch, r, a) * sum;
        float *saved_row = mn_hyper_saved_row(k, f.which, f.head, f.first + r);
        mn_hyper_saved_ranks(k, saved_row, branch, MN_HYPER_YC)[a] = by;
        yc[r * k.ranks + a] = by;
        T *dc = mn_row<T>(second ? k.p.grad.c2 : k.p.grad.c1, f.tile.span.b, f.token(r),
                          second ? f.head : f.head + branch * k.p.call.H);
        const float h = mn_hyper_saved_ranks(k, saved_row, branch, MN_HYPER_H)[a];
        if (dc && a < n_ranks) mn_put(dc + a, h * sum);
    });
}

/* What of x1 is taken from its cotangent for the norm: x1 itself times sum_j gw_j w_j / n^2, as
 * weights are homogeneous in x1. With w = base (1 + d) + (h c) Vt the sum is that of
 * gw base (1 + d) over lags and of h y c over ranks: made of the numbers that the cotangent is made
 * of, it cancels what it has to cancel, in a row with a single key all. */
__device__ inline void mn_hyper_norm_grad(const mn_hyper_params &k, const mn_hyper_rows4 &f,
                                      mn_hyper_smem &scratch, float (&pull)[MN_HYPER_ROWS],
                                      const float *gw, const float *base, const float *d,
                                      const float *yc) {
    float along[MN_HYPER_ROWS] = {};
    for (int j = threadIdx.x; j < f.max_tiles; j += MN_HYPER_STEP) {
        mn_hyper_frag g;
        mn_hyper_diagonal(k, f, g, gw, d, j);
        mn_hyper_for_each(k, f, j, [&](int l, int r, int at) {
            along[r] = fmaf(g.at[l][r], base[at], along[r]);
        });
    }
#pragma unroll
    for (int r = 0; r < MN_HYPER_ROWS; r++) {
        float *saved_row = mn_hyper_saved_row(k, f.which, f.head, f.first + (r < f.n ? r : 0));
        const float *h = mn_hyper_saved_ranks(k, saved_row, 2, MN_HYPER_H);
        for (int64_t a = threadIdx.x; k.has_params[1] && a < k.ranks; a += MN_HYPER_THREADS) {
            along[r] = fmaf(yc[r * k.ranks + a], h[a], along[r]);
        }
        const float by = saved_row[MN_HYPER_SCALE];
        const bool normed = k.p.norm != 2 && saved_row[MN_HYPER_NORM] > (float)k.p.eps;
        const float sum = mn_group_sum<MN_HYPER_THREADS>(along[r], scratch.thread_group);
        pull[r] = normed ? sum * by * by : 0.0f;
    }
}

/* From w, the cotangent of the weights, to g, those of x1 and x2. */
template <typename T>
__global__ void __launch_bounds__(MN_HYPER_THREADS, 4)
hyper_rows_bwd_kernel(const __grid_constant__ mn_hyper_params k) {
    extern __shared__ __align__(16) float shared[];
    __shared__ mn_hyper_smem scratch;
    mn_hyper_rows4 f;
    if (!mn_hyper_rows4_of(&f, k)) return;
    const int64_t each = MN_HYPER_ROWS * k.ranks;
    const mn_hyper_mix first = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, 0));
    const mn_hyper_mix second = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, k.branches - 1));
    const mn_hyper_mix last = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, 2));
    float *hc = shared, *yc = shared + 2 * each, pull[MN_HYPER_ROWS];
    float *g1 = mn_hyper_lag0(k, k.g[0], f), *g2 = mn_hyper_lag0(k, k.g[k.branches - 1], f);
    const float *z1 = mn_hyper_lag0(k, k.z[0], f);
    const float *z2 = mn_hyper_lag0(k, k.z[k.branches - 1], f);
    const float *w = mn_hyper_lag0(k, k.w, f);
    for (int e = threadIdx.x; e < 3 * each; e += MN_HYPER_THREADS) {
        const int i = (int)(e / each), r = (int)(e % each / k.ranks);
        float x = 0.0f;
        if (r < f.n && k.has_params[0] && i < k.branches) {
            float *saved_row = mn_hyper_saved_row(k, f.which, f.head, f.first + r);
            x = mn_hyper_saved_ranks(k, saved_row, i, MN_HYPER_HC)[e % k.ranks];
        }
        shared[e] = x;
    }
    __syncthreads();
    mn_hyper_project_back<T>(k, f, scratch, k.w, last, 2, yc);
    mn_hyper_norm_grad(k, f, scratch, pull, w, mn_hyper_lag0(k, k.base, f), last.d, yc);
    for (int j = threadIdx.x; j < f.max_tiles; j += MN_HYPER_STEP) {
        mn_hyper_frag x, scale, g;
        mn_hyper_diagonal(k, f, g, w, last.d, j);
        if (last.U) mn_hyper_up_project(k, f, g, yc, last.U, j);
        mn_hyper_mixed(k, f, x, z1, first, hc, j);
        if (k.branches == 2) mn_hyper_mixed(k, f, scale, z2, second, hc + each, j);
        mn_hyper_for_each(k, f, j, [&](int l, int r, int at) {
            const float open = x.at[l][r] > 0.0f ? g.at[l][r] : 0.0f;
            float to_first = open;
            if (k.branches == 2) {
                to_first = open * mn_hyper_softplus(scale.at[l][r]);
                g2[at] = open * x.at[l][r] * mn_hyper_sigmoid(scale.at[l][r]);
            }
            g1[at] = fmaf(-pull[r], x.at[l][r], to_first);
        });
    }
    mn_hyper_zero_tail(k, f, k.g[0]);
    if (k.branches == 2) mn_hyper_zero_tail(k, f, k.g[1]);
    __syncthreads();
    mn_hyper_project_back<T>(k, f, scratch, k.g[0], first, 0, hc);
    if (k.branches == 2) mn_hyper_project_back<T>(k, f, scratch, k.g[1], second, 1, hc + each);
}

/* Of a block of the parameters' kernel: lags, rows in shared memory and in registers. */
enum { LAG_THREADS = 128, BATCH = 16, UNROLL = 8, MAX_PARTIALS = 8 };

/* ---- parameters ------------------------------------------------------------------------------ */

/* Parameters by lag or position, in float. A block has one rank, as below. */
template <typename T>
__global__ void hyper_params_by_lag_kernel(const __grid_constant__ mn_hyper_params k) {
    const mn_call &c = k.p.call;
    const int64_t mix = blockIdx.y, which = mix < c.Q ? mix : mix - c.Q;
    const bool second = mix >= c.Q;
    const int64_t R = second ? c.W : c.R, j = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (j >= c.P || !k.has_params[second]) return;
    const T *U = mn_row<T>(second ? k.p.U2 : k.p.U1, 0, 0, which);
    const T *Vt = mn_row<T>(second ? k.p.Vt2 : k.p.Vt1, 0, 0, which);
    const T *d = mn_row<T>(second ? k.p.d2 : k.p.d1, 0, 0, which);
    float *to = k.params + mix * k.lags * (2 * k.ranks + 1);
    const int64_t entry = mn_hyper_entry(k, j);
    for (int64_t a = blockIdx.z; a < k.ranks; a += gridDim.z) {
        float *at = to + mn_hyper_place(k, (int)j, (int)a);
        at[0] = a < R ? mn_float(U[entry * R + a]) : 0.0f;
        at[k.lags * k.ranks] = a < R ? mn_float(Vt[a * c.P + entry]) : 0.0f;
    }
    if (blockIdx.z == 0) to[2 * k.lags * k.ranks + j] = mn_float(d[entry]);
}

/* Sums of parts by lag, which lie as parameters do, to the parameters' gradients. */
template <typename T>
__global__ void hyper_reduce_params_kernel(const __grid_constant__ mn_hyper_params k,
                                           const float *partials,
                             int64_t n_partials) {
    const mn_call &c = k.p.call;
    const int64_t mix = blockIdx.y, which = mix < c.Q ? mix : mix - c.Q;
    const bool second = mix >= c.Q;
    const int64_t R = second ? c.W : c.R, j = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (j >= c.P || !k.has_params[second]) return;
    const int64_t each = k.lags * (2 * k.ranks + 1), step = (c.Q + c.H) * each;
    const auto sum = [&](int64_t at) {
        float x = 0.0f;
#pragma unroll 4
        for (int64_t i = 0; i < n_partials; i++) x += partials[i * step + mix * each + at];
        return x;
    };
    T *dU = mn_row<T>(second ? k.p.grad.U2 : k.p.grad.U1, 0, 0, which);
    T *dVt = mn_row<T>(second ? k.p.grad.Vt2 : k.p.grad.Vt1, 0, 0, which);
    T *dd = mn_row<T>(second ? k.p.grad.d2 : k.p.grad.d1, 0, 0, which);
    const int64_t entry = mn_hyper_entry(k, j);
    for (int64_t a = blockIdx.z; a < R; a += gridDim.z) {
        const int64_t at = mn_hyper_place(k, (int)j, (int)a);
        if (dU) mn_put(dU + entry * R + a, sum(at));
        if (dVt) mn_put(dVt + a * c.P + entry, sum(k.lags * k.ranks + at));
    }
    if (dd && blockIdx.z == 0) mn_put(dd + entry, sum(2 * k.lags * k.ranks + j));
}

/* What rows of a batch have for one mix: h c and y c of 16 ranks. */
struct batch_smem {
    float hc[BATCH][MN_HYPER_RANKS], yc[BATCH][MN_HYPER_RANKS];
};

/* dU, dVt and dd of a lag grow by what the strip's rows give, and for first mixes g becomes dz. A
 * block has 128 lags of one mix and every n-th tile; 16 ranks at a time. */
__global__ static void __launch_bounds__(LAG_THREADS, 4)
hyper_params_grad_kernel(const __grid_constant__ mn_hyper_params k, float *partials,
                         int64_t n_partials) {
    __shared__ __align__(16) batch_smem scratch;
    const mn_call &c = k.p.call;
    const int64_t mix = blockIdx.y, j = blockIdx.x * (int64_t)LAG_THREADS + threadIdx.x;
    const bool second = mix >= c.Q;
    const int branch = second ? 2 : (int)(mix / c.H);
    const int64_t head = mix % c.H, each = k.lags * (2 * k.ranks + 1);
    const mn_hyper_mix m = mn_hyper_mix_of(k, mix);
    if (!m.U) return;
    float *partial = partials + (blockIdx.z * (c.Q + c.H) + mix) * each;
    const float *in = second ? k.base : k.z[branch];
    float *out = second ? k.w : k.g[branch];
    const bool valid = j < k.lags;
    float dd = valid ? partial[2 * k.lags * k.ranks + j] : 0.0f;
    const float by = valid ? 1.0f + m.d[j] : 0.0f;
    for (int64_t a0 = 0; a0 < k.ranks; a0 += MN_HYPER_RANKS) {
        float dU[MN_HYPER_RANKS] = {}, dVt[MN_HYPER_RANKS] = {}, U[MN_HYPER_RANKS] = {};
        if (valid) {
            mn_hyper_load(dU, k, partial, (int)j, (int)a0);
            mn_hyper_load(dVt, k, partial + k.lags * k.ranks, (int)j, (int)a0);
            mn_hyper_load(U, k, m.U, (int)j, (int)a0);
        }
        const bool last = a0 + MN_HYPER_RANKS >= k.ranks, sums_d = a0 == 0;
        for (int64_t i = blockIdx.z; i < k.s.n_tiles; i += n_partials) {
            const mn_tile_span tile = mn_tile_at(k.s.call, MN_Q_BLOCK_ROWS, k.s.first + i);
            const int64_t seen = mn_keys_before(k.s.call) + tile.first;
            if (seen + tile.n_rows <= blockIdx.x * (int64_t)LAG_THREADS) continue;
            for (int64_t r0 = 0; r0 < tile.n_rows; r0 += BATCH) {
                const int n = (int)min((int64_t)BATCH, tile.n_rows - r0);
                __syncthreads();
                for (int e = threadIdx.x; e < n * MN_HYPER_RANKS; e += LAG_THREADS) {
                    const int r = e / MN_HYPER_RANKS, a = e % MN_HYPER_RANKS;
                    float *saved_row = mn_hyper_saved_row(k, i, head, r0 + r);
                    scratch.hc[r][a] = mn_hyper_saved_ranks(k, saved_row, branch,
                                                            MN_HYPER_HC)[a0 + a];
                    scratch.yc[r][a] = mn_hyper_saved_ranks(k, saved_row, branch,
                                                            MN_HYPER_YC)[a0 + a];
                }
                __syncthreads();
                /* Row r has number j at r step from here on. */
                const bool by_position = mn_hyper_by_position(k);
                const int64_t lag0_offset = mn_q_block_offset(k.s, i, head, r0) +
                                            (by_position ? j : seen + r0 - j);
                const int step = (int)k.s.row + (by_position ? 0 : 1);
                const int lags = (int)(seen + r0 + 1 - j);
                const float *from_z = in + lag0_offset;
                float *from_g = out + lag0_offset;
                for (int r1 = 0; r1 < n; r1 += UNROLL) {
                    float z[UNROLL], g[UNROLL];
#pragma unroll
                    for (int e = 0; e < UNROLL; e++) {
                        const bool sees = r1 + e < n && lags + r1 + e > 0;
                        z[e] = sees ? from_z[(r1 + e) * step] : 0.0f;
                        g[e] = sees ? from_g[(r1 + e) * step] : 0.0f;
                    }
#pragma unroll
                    for (int e = 0; e < UNROLL; e++) {
                        const int r = r1 + e;
                        if (r >= n) break;
                        if (sums_d) dd = fmaf(z[e], g[e], dd);
                        float dz = by * g[e];
#pragma unroll
                        for (int a = 0; a < MN_HYPER_RANKS; a += 4) {
                            const float4 yc = *(const float4 *)&scratch.yc[r][a];
                            const float4 hc = *(const float4 *)&scratch.hc[r][a];
                            const float ys[4] = { yc.x, yc.y, yc.z, yc.w };
                            const float hs[4] = { hc.x, hc.y, hc.z, hc.w };
#pragma unroll
                            for (int b = 0; b < 4; b++) {
                                dU[a + b] = fmaf(z[e], ys[b], dU[a + b]);
                                dVt[a + b] = fmaf(g[e], hs[b], dVt[a + b]);
                                dz = fmaf(ys[b], U[a + b], dz);
                            }
                        }
                        if (second || !last || lags + r <= 0) continue;
                        const float *saved_row = mn_hyper_saved_row(k, i, head, r0 + r);
                        const float *all = saved_row + MN_HYPER_FIRST + (branch * 3 + 2) * k.ranks;
                        for (int64_t a = 0; a < a0; a++) {
                            dz = fmaf(all[a], m.U[mn_hyper_place(k, (int)j, (int)a)], dz);
                        }
                        from_g[r * step] = dz;
                    }
                }
            }
        }
#pragma unroll
        for (int a = 0; a < MN_HYPER_RANKS; a++) {
            float *at = partial + mn_hyper_place(k, (int)j, (int)a0 + a);
            if (valid) at[0] = dU[a], at[k.lags * k.ranks] = dVt[a];
        }
    }
    if (valid) partial[2 * k.lags * k.ranks + j] = dd;
}

/* ---- gradients of parameters by tensor cores ------------------------------------------------- */

/* The same for 16 ranks of bf16 calls, in tf32, whose roundings are an eighth of those of bf16. A
 * warp has two blocks of 16 lags, and eight rows at a time:
 *
 *   dU (lags, ranks) += z' y c    dVt += g' h c    dz' (lags, rows) = (1 + d) g' + U (y c)'
 *
 * Of 16 lags a thread has lane / 4 and that plus 8; of eight rows 2 (lane % 4) and the next, which
 * are depths lane % 4 and that plus 4 of z' and g' as left operands, and their columns of dz': what
 * is loaded of g is where dz is made. */
enum { MN_HYPER_RANK_PITCH = 20 };    // of ranks of rows: lanes meet in no bank

struct mn_hyper_grad_smem {
    float hc[MN_Q_BLOCK_ROWS][MN_HYPER_RANK_PITCH], yc[MN_Q_BLOCK_ROWS][MN_HYPER_RANK_PITCH];
};

__device__ inline float mn_hyper_tf32(float x) {
    return __uint_as_float(mn_tf32(x));
}

__device__ inline void mn_hyper_mma(float (&d)[4], const float (&a)[4], float b0, float b1) {
    const unsigned left[4] = { __float_as_uint(a[0]), __float_as_uint(a[1]), __float_as_uint(a[2]),
                               __float_as_uint(a[3]) };
    mn_mma_tf32_k8(d, left, __float_as_uint(b0), __float_as_uint(b1));
}

/* 16 lags of a mix from `lag` on. */
struct mn_hyper_grad_lags {
    float U[2][4];                 // 16 lags by eight ranks each
    float dU[2][4], dVt[2][4];     // the same
    float by[2], dd[2];            // 1 + d, and its gradient

    /* use(number, rank, lag) for a thread's two sums of ranks and lags */
    template <typename F>
    __device__ static void each(int lag, F use) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            use(i, 8 * (i / 4) + lane % 4 * 2 + i % 2, lag + lane / 4 + i % 4 / 2 * 8);
        }
    }

    __device__ void load(const mn_hyper_params &k, const mn_hyper_mix &m, const float *partial,
                         int lag) {
        const int lane = threadIdx.x % 32, lags = (int)k.lags;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int at = lag + lane / 4 + i % 2 * 8, a = i / 4 * 8 + lane % 4 + i % 4 / 2 * 4;
            const float x = at < lags ? m.U[mn_hyper_place(k, at, a)] : 0.0f;
            U[i / 4][i % 4] = mn_hyper_tf32(x);
        }
        each(lag, [&](int i, int a, int at) {
            const float *from = partial + mn_hyper_place(k, at, a);
            dU[i / 4][i % 4] = at < lags ? from[0] : 0.0f;
            dVt[i / 4][i % 4] = at < lags ? from[k.lags * k.ranks] : 0.0f;
        });
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = lag + lane / 4 + 8 * half;
            by[half] = at < lags ? 1.0f + m.d[at] : 0.0f;
            dd[half] = 0.0f;
        }
    }

    __device__ void store(const mn_hyper_params &k, float *partial, int lag) {
        const int lane = threadIdx.x % 32, lags = (int)k.lags;
        each(lag, [&](int i, int a, int at) {
            float *to = partial + mn_hyper_place(k, at, a);
            if (at < lags) to[0] = dU[i / 4][i % 4], to[k.lags * k.ranks] = dVt[i / 4][i % 4];
        });
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = lag + lane / 4 + 8 * half;
            float sum = dd[half] + __shfl_xor_sync(0xffffffffu, dd[half], 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (lane % 4 == 0 && at < lags) partial[2 * k.lags * k.ranks + at] += sum;
        }
    }

    /* dz of eight rows from g, and what they give to parameters; numbers as left operands have
     * them: lag half i % 2, row i / 2 of the thread's two. */
    __device__ void add(float (&dz)[4], const float (&z)[4], const float (&g)[4],
                        const mn_hyper_grad_smem &smem, int row) {
        const int lane = threadIdx.x % 32, depth = lane % 4, column = lane / 4;
        float x[4], y[4];
        const float(*yc)[MN_HYPER_RANK_PITCH] = smem.yc + row;
        const float(*hc)[MN_HYPER_RANK_PITCH] = smem.hc + row;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = mn_hyper_tf32(z[i]), y[i] = mn_hyper_tf32(g[i]);
            dd[i % 2] = fmaf(z[i], g[i], dd[i % 2]);
            dz[i % 2 * 2 + i / 2] = by[i % 2] * g[i];
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int a = 8 * n + column;
            mn_hyper_mma(dU[n], x, yc[2 * depth][a], yc[2 * depth + 1][a]);
            mn_hyper_mma(dVt[n], y, hc[2 * depth][a], hc[2 * depth + 1][a]);
            mn_hyper_mma(dz, U[n], yc[column][8 * n + depth], yc[column][8 * n + depth + 4]);
        }
    }
};

/* h c and y c of a tile's rows of one branch, zeros behind its last. */
__device__ inline void mn_hyper_grad_ranks(mn_hyper_grad_smem &smem, const mn_hyper_params &k,
                                           int64_t tile, int64_t head, int branch, int n_rows) {
    for (int e = threadIdx.x; e < MN_Q_BLOCK_ROWS * MN_HYPER_RANKS; e += LAG_THREADS) {
        const int r = e / MN_HYPER_RANKS, a = e % MN_HYPER_RANKS;
        float h = 0.0f, y = 0.0f;
        if (r < n_rows) {
            float *row = mn_hyper_saved_row(k, tile, head, r);
            h = mn_hyper_saved_ranks(k, row, branch, MN_HYPER_HC)[a];
            y = mn_hyper_saved_ranks(k, row, branch, MN_HYPER_YC)[a];
        }
        smem.hc[r][a] = mn_hyper_tf32(h), smem.yc[r][a] = mn_hyper_tf32(y);
    }
}

/* z and g of eight rows of a warp's 32 lags, as left operands have them: of 16 lags l number i is
 * of lag half i % 2 and row i / 2 of the thread's two. */
struct mn_hyper_grad_tile {
    float z[2][4], g[2][4];
};

/* Where a thread's numbers of a tile of rows lie: `lag` its first one. */
template <bool by_position>
struct mn_hyper_grad_place {
    int64_t step;             // from row to row
    int seen, rows, lag, row; // keys in front of the tile; its rows; the thread's first of eight

    __device__ static int lag_of(int l, int i) {
        return 16 * l + i % 2 * 8;
    }

    __device__ int64_t offset(int r0, int l, int i) const {
        return (r0 + row + i / 2) * step + (by_position ? lag_of(l, i) : -lag_of(l, i));
    }

    __device__ bool sees(int r0, int l, int i) const {
        const int r = r0 + row + i / 2;
        return r < rows && lag + lag_of(l, i) <= seen + r;
    }

    /* Whether the warp's eight rows from r0 on see all of its lags: no question is asked then, so
     * that all loads are on their way at once. */
    __device__ bool whole(int r0, int lag0) const {
        return r0 + 8 <= rows && lag0 + 31 <= seen + r0;
    }

    __device__ void load(mn_hyper_grad_tile &to, const float *z, const float *g, int r0,
                         bool all) const {
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const bool inside = all || sees(r0, e / 4, e % 4);
            const int64_t at = offset(r0, e / 4, e % 4);
            to.z[e / 4][e % 4] = inside ? z[at] : 0.0f;
            to.g[e / 4][e % 4] = inside ? g[at] : 0.0f;
        }
    }

    __device__ void store(float *g, const float (&dz)[4], int r0, int l, bool all) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (all || sees(r0, l, i)) g[offset(r0, l, i)] = dz[i % 2 * 2 + i / 2];
        }
    }
};

/* A block has 128 lags of one mix and every n-th tile; the next eight rows are on their way while
 * products of these are made. */
template <bool by_position>
__global__ static void __launch_bounds__(LAG_THREADS, 3)
hyper_params_grad_mma_kernel(const __grid_constant__ mn_hyper_params k, float *partials,
                             int64_t n_partials) {
    __shared__ mn_hyper_grad_smem smem;
    const mn_call &c = k.p.call;
    const int mix = (int)blockIdx.y, head = mix % (int)c.H;
    const bool second = mix >= c.Q;
    const int branch = second ? 2 : mix / (int)c.H, lane = threadIdx.x % 32;
    const int block0 = (int)blockIdx.x * LAG_THREADS, lag0 = block0 + threadIdx.x / 32 * 32;
    const mn_hyper_mix m = mn_hyper_mix_of(k, mix);
    if (!m.U) return;
    float *partial = partials + (blockIdx.z * (c.Q + c.H) + mix) * k.lags * (2 * k.ranks + 1);
    const float *in = second ? k.base : k.z[branch];
    float *out = second ? k.w : k.g[branch];
    mn_hyper_grad_lags of[2];
#pragma unroll
    for (int l = 0; l < 2; l++) of[l].load(k, m, partial, lag0 + 16 * l);
    mn_hyper_grad_place<by_position> at;
    at.step = k.s.row + (by_position ? 0 : 1), at.lag = lag0 + lane / 4, at.row = lane % 4 * 2;
#pragma unroll 1
    for (int i = (int)blockIdx.z; i < k.s.n_tiles; i += (int)n_partials) {
        const mn_tile_span tile = mn_tile_at(k.s.call, MN_Q_BLOCK_ROWS, k.s.first + i);
        at.seen = (int)(mn_keys_before(k.s.call) + tile.first), at.rows = (int)tile.n_rows;
        if (at.seen + at.rows <= block0) continue;
        const int64_t tile0 = mn_q_block_offset(k.s, i, head, 0) +
                              (by_position ? at.lag : at.seen - at.lag);
        const float *from_z = in + tile0;
        float *from_g = out + tile0;
        /* Row r sees lags below seen + r + 1. */
        int r0 = max(lag0 - at.seen, 0) / 8 * 8;
        mn_hyper_grad_tile next;
        at.load(next, from_z, from_g, r0, false);
        __syncthreads();
        mn_hyper_grad_ranks(smem, k, i, head, branch, at.rows);
        __syncthreads();
#pragma unroll 1
        for (; r0 < at.rows; r0 += 8) {
            const mn_hyper_grad_tile x = next;
            const bool all = at.whole(r0, lag0);
            if (at.whole(r0 + 8, lag0)) at.load(next, from_z, from_g, r0 + 8, true);
            else if (r0 + 8 < at.rows) at.load(next, from_z, from_g, r0 + 8, false);
#pragma unroll
            for (int l = 0; l < 2; l++) {
                float dz[4];
                of[l].add(dz, x.z[l], x.g[l], smem, r0);
                if (second) continue;
                if (all) at.store(from_g, dz, r0, l, true);
                else at.store(from_g, dz, r0, l, false);
            }
        }
    }
#pragma unroll
    for (int l = 0; l < 2; l++) of[l].store(k, partial, lag0 + 16 * l);
}

/* ---- outputs --------------------------------------------------------------------------------- */

/* o = y scale gv; and, going back, dgv = do y scale and g_o = do gv scale. A block has one row of a
 * head. */
template <typename T>
__global__ void __launch_bounds__(MN_Q_BLOCK_THREADS)
hyper_output_kernel(const __grid_constant__ mn_hyper_params k, mn_in y, mn_out g_o) {
    const mn_tile_span tile = mn_tile_at(k.s.call, MN_Q_BLOCK_ROWS, k.s.first + blockIdx.z);
    const int64_t r = blockIdx.x, h = blockIdx.y;
    if (r >= tile.n_rows) return;
    const int64_t b = tile.span.b, t = tile.span.t0 + tile.first + r;
    const float scale = mn_hyper_saved_row(k, blockIdx.z, h, r)[MN_HYPER_SCALE];
    const float *sum = mn_row<float>(y, b, t, h);
    const T *gv = mn_row<T>(k.p.gv, b, t, h), *d_o = mn_row<T>(k.p.cot.o, b, t, h);
    T *o = mn_row<T>(k.p.o, b, t, h), *dgv = mn_row<T>(k.p.grad.gv, b, t, h);
    float *g = mn_row<float>(g_o, b, t, h);
    for (int64_t i = threadIdx.x; i < k.p.call.V; i += MN_Q_BLOCK_THREADS) {
        const float by = gv ? mn_float(gv[i]) : 1.0f;
        if (o) mn_put(o + i, sum[i] * scale * by);
        if (!g) continue;
        const float d = mn_get(d_o, i);
        if (dgv) mn_put(dgv + i, d * sum[i] * scale);
        g[i] = d * by * scale;
    }
}

/* ---- strips ---------------------------------------------------------------------------------- */

/* Work space of a call, in floats. */
struct scratch {
    mn_hyper_params k;
    int64_t max_tiles, matrix, n_matrices, params, pieces, rows, y, g_o, dk, dv;
    int64_t partials, n_partials, all;
};

static bool workspace_of(scratch *to, const mn_hyper_args *p, bool backward) {
    const mn_call &c = p->call;
    mn_hyper_params &k = to->k;
    k = {};
    k.p = *p;
    k.branches = p->kind == 1 ? 2 : 1;
    k.has_params[0] = p->U1.data != NULL, k.has_params[1] = p->U2.data != NULL;
    const int64_t R = mn_max(k.has_params[0] ? c.R : 0, k.has_params[1] ? c.W : 0);
    k.ranks = mn_ceil_div(R, MN_HYPER_RANKS) * MN_HYPER_RANKS;
    k.lags = R > 0 ? (c.P + 3) / 4 * 4 : 0;
    const bool by_mma = c.dtype == MN_BF16 && k.ranks == MN_HYPER_RANKS;
    k.n_pieces = by_mma ? mn_ceil_div(c.P, PIECE_LAGS) : 0;
    k.row_floats = MN_HYPER_FIRST + 9 * k.ranks;
    to->n_matrices = k.branches * (backward ? 2 : 1) + (backward ? 2 : 0);
    k.s = mn_q_block_of(c, c.H, to->n_matrices, &to->max_tiles);
    to->n_partials = mn_min(mn_max(mn_tile_slots(c, MN_Q_BLOCK_ROWS), 1), (int64_t)MAX_PARTIALS);
    bool ok = mn_q_block_numel(&to->matrix, k.s, to->max_tiles) &&
              mn_mul_i64(&to->params, k.lags, (c.Q + c.H) * (2 * k.ranks + 1)) &&
              mn_mul_i64(&to->pieces, k.n_pieces, (c.Q + c.H) * PIECE_FLOATS) &&
              mn_mul_i64(&to->rows, to->max_tiles * k.s.rows * c.H, k.row_floats) &&
              mn_mul_i64(&to->y, c.B * c.T, c.H * c.V) &&
              mn_mul_i64(&to->dk, c.B * c.L, c.Q * c.K) &&
              mn_mul_i64(&to->dv, c.B * c.L, c.H * c.V) &&
              mn_mul_i64(&to->partials, to->params, to->n_partials);
    to->g_o = to->y;
    if (!backward) to->g_o = to->dk = to->dv = to->partials = 0;
    const int64_t partials[] = { to->params, to->pieces, to->rows, to->y, to->g_o, to->dk, to->dv,
                                 to->partials };
    to->all = 0;
    for (int i = 0; i < to->n_matrices; i++) ok = ok && mn_add_i64(&to->all, to->all, to->matrix);
    for (int64_t partial : partials) {
        ok = ok && mn_add_i64(&to->all, to->all, (partial + 63) / 64 * 64 + 64);
    }
    return ok;
}

/* Rows of a strip by fwd or bwd, of which there are one by tensor cores for each number of branches
 * and one for all other calls. */
template <typename T>
static void launch_rows(const mn_hyper_params &k, bool backward, cudaStream_t stream) {
    if (mn_is_bf16<T>() && k.n_pieces > 0 && mn_device_props_current().major >= 8) {
        mn_hyper_rows_by_mma(k, backward, stream);
        return;
    }
    const dim3 blocks((unsigned)mn_ceil_div(k.s.rows, (int64_t)MN_HYPER_ROWS),
                      (unsigned)k.p.call.H, (unsigned)k.s.n_tiles);
    const size_t bytes = (size_t)(3 * MN_HYPER_ROWS * k.ranks) * sizeof(float);
    const auto rows = backward ? hyper_rows_bwd_kernel<T> : hyper_rows_fwd_kernel<T>;
    rows<<<blocks, MN_HYPER_THREADS, bytes, stream>>>(k);
}

static float *carve(float **at, int64_t count) {
    float *buffer = *at;
    *at += (count + 63) / 64 * 64;
    return buffer;
}

/* Parts of the work space, for one call. */
struct buffers {
    mn_out y, g_o, dk, dv;
    float *partials;
};

static buffers carve_workspace(scratch *to, float *at, bool backward) {
    mn_hyper_params &k = to->k;
    const mn_call &c = k.p.call;
    buffers s = {};
    k.params = carve(&at, to->params);
    k.pieces = (uint4 *)carve(&at, to->pieces);
    k.diagonal = (float *)k.pieces + to->pieces / PIECE_FLOATS * (PIECE_FLOATS - PIECE_LAGS);
    k.rows = carve(&at, to->rows);
    for (int b = 0; b < k.branches; b++) k.z[b] = carve(&at, to->matrix);
    k.base = backward ? carve(&at, to->matrix) : k.z[0];
    k.w = backward ? carve(&at, to->matrix) : k.base;
    for (int b = 0; b < k.branches && backward; b++) k.g[b] = carve(&at, to->matrix);
    s.y = mn_workspace_view(carve(&at, to->y), c.T, c.H, c.V);
    if (!backward) return s;
    s.g_o = mn_workspace_view(carve(&at, to->g_o), c.T, c.H, c.V);
    s.dk = mn_workspace_view(carve(&at, to->dk), c.L, c.Q, c.K);
    s.dv = mn_workspace_view(carve(&at, to->dv), c.L, c.H, c.V);
    s.partials = carve(&at, to->partials);
    return s;
}

template <typename T>
static void q_block_forward(const mn_hyper_params &k, const buffers &to, cudaStream_t stream) {
    const mn_call &c = k.p.call;
    const mn_attn_operand<T> q = { k.p.q, 0, 1 }, key = { k.p.k, 0, 1 };
    const mn_q_block both = mn_q_block_both(k.s, k.branches, k.z[k.branches - 1] - k.z[0]);
    mn_attn_scores(both, k.z[0], q, key, c.K, 1.0f, stream);
    launch_rows<T>(k, false, stream);
    const mn_attn_operand<T> v = { k.p.v, 0, 1 };
    mn_attn_pv<false, T, float>(k.s, to.y, 0, k.w, v, c.V, 1.0f, stream);
    const dim3 rows((unsigned)k.s.rows, (unsigned)c.H, (unsigned)k.s.n_tiles);
    hyper_output_kernel<T><<<rows, MN_Q_BLOCK_THREADS, 0,
        stream>>>(k, mn_view_as_input(to.y), to.g_o);
}

template <typename T>
static void q_block_backward(const mn_hyper_params &k, const buffers &to, int64_t n_partials,
                           cudaStream_t stream) {
    const mn_call &c = k.p.call;
    const mn_attn_operand<float> g_o = { mn_view_as_input(to.g_o), 0, 1 };
    const mn_attn_operand<T> v = { k.p.v, 0, 1 };
    q_block_forward<T>(k, to, stream);
    mn_attn_grad_kv<false, mn_is_bf16<T>()>(k.s, to.dv, 0, 1, k.w, g_o, c.V, stream);
    mn_attn_scores(k.s, k.w, g_o, v, c.V, 1.0f, stream);
    launch_rows<T>(k, true, stream);
    const dim3 lags((unsigned)mn_ceil_div(k.lags, LAG_THREADS), (unsigned)(c.Q + c.H),
                    (unsigned)n_partials);
    const bool by_mma = mn_is_bf16<T>() && k.ranks == MN_HYPER_RANKS &&
                        mn_device_props_current().major >= 8;
    const auto by_lag = k.p.layout == 1 ? hyper_params_grad_mma_kernel<true>
                                        : hyper_params_grad_mma_kernel<false>;
    const auto params_grad = by_mma ? by_lag : hyper_params_grad_kernel;
    if (k.lags > 0) params_grad<<<lags, LAG_THREADS, 0, stream>>>(k, to.partials, n_partials);
    const mn_attn_operand<T> q = { k.p.q, 0, 1 }, key = { k.p.k, 0, 1 };
    const mn_q_block both = mn_q_block_both(k.s, k.branches, k.g[k.branches - 1] - k.g[0]);
    mn_attn_pv<true, T, T>(both, k.p.grad.q, 0, k.g[0], key, c.K, 1.0f, stream);
    mn_attn_grad_kv<true, mn_is_bf16<T>()>(both, to.dk, 0, 1, k.g[0], q, c.K, stream);
}

/* Sums of keys or values in their own type. */
template <typename T>
static void store_sums(const mn_out &to, const mn_out &from, const mn_call &call, int64_t heads,
                     int64_t width, cudaStream_t stream) {
    mn_rope_params cast_params = { call, 0, heads, width, 1.0, 0, 1, 1.0f };
    cast_params.call.T = call.L;
    mn_rope_rows<float, T>(cast_params, to, mn_view_as_input(from), stream);
}

template <typename T>
static int run(const mn_hyper_args *p, bool backward, float *shared, cudaStream_t stream) {
    const mn_call &c = p->call;
    scratch to = {};
    if (!workspace_of(&to, p, backward)) return cudaErrorInvalidValue;
    if (c.Q + c.H > 65535 || c.B * c.L > INT32_MAX || to.k.ranks > 512) {
        return cudaErrorNotSupported;
    }
    buffers s = carve_workspace(&to, shared, backward);
    mn_hyper_params &k = to.k;
    const dim3 lags((unsigned)mn_ceil_div(mn_max(c.P, 1), 128), (unsigned)(c.Q + c.H),
                    (unsigned)mn_max(k.ranks, 1));
    if (k.lags > 0) hyper_params_by_lag_kernel<T><<<lags, 128, 0, stream>>>(k);
    mn_hyper_make_pieces(k, stream);
    if (backward) {
        if (!p->grad.k.data) s.dk.data = NULL;
        if (!p->grad.v.data) s.dv.data = NULL;
        if (s.dk.data) cudaMemsetAsync(s.dk.data, 0, (size_t)to.dk * sizeof(float), stream);
        if (s.dv.data) cudaMemsetAsync(s.dv.data, 0, (size_t)to.dv * sizeof(float), stream);
        cudaMemsetAsync(s.partials, 0, (size_t)to.partials * sizeof(float), stream);
    }
    const int64_t slots = c.T > 0 ? mn_tile_slots(c, MN_Q_BLOCK_ROWS) : 0;
    for (k.s.first = 0; k.s.first < slots; k.s.first += k.s.n_tiles) {
        k.s.n_tiles = mn_min(to.max_tiles, slots - k.s.first);
        if (backward) q_block_backward<T>(k, s, to.n_partials, stream);
        else q_block_forward<T>(k, s, stream);
    }
    if (!backward) return mn_launch_status();
    if (s.dk.data) store_sums<T>(p->grad.k, s.dk, c, c.Q, c.K, stream);
    if (s.dv.data) store_sums<T>(p->grad.v, s.dv, c, c.H, c.V, stream);
    if (k.lags > 0) hyper_reduce_params_kernel<T><<<lags, 128, 0,
        stream>>>(k, s.partials, to.n_partials);
    return mn_launch_status();
}

static int run_any(const mn_hyper_args *p, bool backward, void *shared, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    if (p->call.dtype == MN_BF16) return run<mn_bf16>(p, backward, (float *)shared, on);
    return run<float>(p, backward, (float *)shared, on);
}

static bool plan_of(mn_plan *plan, const void *args, bool backward) {
    scratch to = {};
    return workspace_of(&to, (const mn_hyper_args *)args, backward) &&
           mn_mul_size(&plan->shared_bytes, (size_t)to.all, sizeof(float));
}

MN_CUDA_PLAN(hyper_forward) {
    return plan_of(plan, args, false);
}

MN_CUDA_LAUNCH(hyper_forward) {
    const mn_hyper_args *p = (const mn_hyper_args *)args;
    return p->o.data ? run_any(p, false, shared, stream) : cudaSuccess;
}

MN_CUDA_PLAN(hyper_backward) {
    return plan_of(plan, args, true);
}

MN_CUDA_LAUNCH(hyper_backward) {
    return run_any((const mn_hyper_args *)args, true, shared, stream);
}

}    // namespace mneme::hyper
