/* bayes_fwd_wide.cu - the Bayesian Layer and its covariances alone, forward, in one kernel; the
 * chunks of bayes.cuh.
 *
 * No token moves a bit of what is before it (docs/internals/causality.md): rows of products are
 * those of single tokens, sums over tokens are triangular by threads, and where frames begin and
 * chunks are cut follows from decays in front of that place alone. */
#include "kernels/cuda/bayes/bayes_fwd_wide.h"

#include "kernels/cuda/bayes/bayes.cuh"

namespace mneme::bayes {

/* What is asked of tokens [t, t + count), the first ones of shared memory. */
template <typename T>
__device__ static void put_results(const mn_bayes_smem &smem, const mn_bayes_args &p,
                                   const mn_bayes_shape &s, int64_t t, int count) {
    const int rows = 8 * s.nb, ld_e = s.pitch_e(), ld_z = s.pitch_z();
    const int64_t b = s.span.b, t0 = s.span.t0 + t;
    const double scale = p.scale;
    if (threadIdx.x < count) {
        const int i = threadIdx.x;
        T *gain = mn_row<T>(p.gain, b, t0 + i, s.h), *kvar = mn_row<T>(p.kvar, b, t0 + i, s.h);
        T *qvar = mn_row<T>(p.qvar, b, t0 + i, s.h);
        if (gain) mn_put(gain + s.g, (float)(smem.variance[i] * smem.inverse[i]));
        if (kvar) mn_put(kvar + s.g, (float)smem.variance[i]);
        if (qvar) {
            double sum = 0.0;
            for (int warp = 0; warp < MN_BAYES_WARPS; warp++) sum += smem.qparts[warp * 16 + i];
            for (int j = 0; j <= i; j++) {
                const double x = mn_bayes_whole(smem.parts, j * 16 + i);
                sum -= x * x * smem.inverse[j];
            }
            mn_put(qvar + s.g, p.q.data ? (float)(scale * scale * sum) : 0.0f);
        }
    }
    for (int at = threadIdx.x; p.gainvec.data && at < count * s.R; at += MN_BAYES_THREADS) {
        const int token = at / s.R, r = at % s.R;
        const double *z = smem.z + token * ld_z, *phi = smem.phi + token * rows;
        double u = phi[r] * z[r];
        if (s.turns && r % 2 == 0) u = phi[r] * z[r] - phi[r + 1] * z[r + 1];
        if (s.turns && r % 2 == 1) u = phi[r] * z[r - 1] + phi[r - 1] * z[r];
        mn_put(mn_row<T>(p.gainvec, b, t0 + token, s.h) + s.g * s.R + r,
               (float)(u * smem.inverse[token]));
    }
    if (!p.o.data) return;
    for (int at = threadIdx.x; at < count * s.columns; at += MN_BAYES_THREADS) {
        const int token = at / s.columns, j = at % s.columns;
        double sum = smem.o[token * ld_e + j];
        for (int i = 0; i <= token; i++) {
            const double weight = mn_bayes_whole(smem.parts, i * 16 + token) * smem.inverse[i];
            sum += weight * smem.e[i * ld_e + j];
        }
        mn_put(mn_row<T>(p.o, b, t0 + token, s.h) + s.first + j, (float)(scale * sum));
    }
}

template <bool LARGE>
__device__ static void put_states(mn_bayes_tiles<LARGE> &P, const mn_bayes_smem &smem,
                                  const mn_bayes_args &p, const mn_bayes_shape &s) {
    float *last = mn_row<float>(p.P, s.n, 0, s.h), *mean = mn_row<float>(p.M, s.n, 0, s.h);
    if (last) last += s.g * s.R * s.R;
    P.each(s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = mn_tile_row(a), column = mn_tile_column(b) + i;
            if (!last || row >= s.R || column > row) continue;    // the same bits on both sides
            last[(int64_t)row * s.R + column] = last[(int64_t)column * s.R + row] = (float)x[i];
        }
    });
    mn_bayes_each_mean(smem.M, s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = mn_tile_row(a), r = mn_tile_column(b) + i;
            if (mean && j < s.columns && r < s.R) {
                mean[(int64_t)r * p.call.V + s.first + j] = (float)x[i];
            }
        }
    });
}

/* Whether a channel has decayed by more than e^-40 since the frame began; all threads call. */
__device__ static bool is_low(const mn_bayes_smem &smem, const mn_bayes_shape &s) {
    bool low = false;
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        low = low || !(smem.level[i * s.step] >= -40.0);
    }
    return __syncthreads_or(low) != 0;
}

/* The first token of the raw chunk by which a channel has decayed by more than e^-80 since the
 * frame began, 16 if there is none; all threads call. */
__device__ static int first_steep(const mn_bayes_smem &smem, const mn_bayes_shape &s) {
    int first = MN_BAYES_CHUNK;
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        double level = smem.level[i * s.step];
        const float *la = smem.raw + 2 * MN_BAYES_CHUNK * s.K + i;
        for (int t = 0; t < MN_BAYES_CHUNK; t++) {
            level += (double)la[t * s.K];
            first = level > -80.0 ? first : min(first, t);
        }
    }
    int low = 0, high = MN_BAYES_CHUNK;    // where there is one, it is in [low, high)
    if (!__syncthreads_or(first < MN_BAYES_CHUNK)) return MN_BAYES_CHUNK;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (__syncthreads_or(first < middle)) high = middle;
        else low = middle;
    }
    return low;
}

/* Grid: a block for each group of a head of a sequence. The tokens of a chunk in front of a steep
 * decay go together, those from it on one by one. */
template <typename T, bool LARGE>
__global__ void __launch_bounds__(MN_BAYES_THREADS, 1)
wide_kernel(const __grid_constant__ mn_bayes_args p, double *work, int64_t work_each,
                     bool mean_inside, bool smem_inside) {
    extern __shared__ __align__(16) double doubles[];
    const mn_bayes_shape s = mn_bayes_shape_at(p, blockIdx.x);
    double *own = work + blockIdx.x * work_each;
    mn_bayes_tiles<LARGE> P;
    P.memory = own;
    double *mean = own + (LARGE ? (int64_t)s.nb * s.nb * 64 : 0);
    double *elsewhere = mean + (int64_t)s.nm * s.nb * 64;
    const mn_bayes_smem smem = mn_bayes_smem_in(smem_inside ? doubles : elsewhere, s,
                                                mean_inside ? NULL : mean);
    const bool qvar = p.qvar.data && p.q.data;
    mn_bayes_clear(smem, s);
    mn_bayes_load(P, smem, p, s, sizeof(T) == 2);
    __syncthreads();
    for (int64_t t = 0; t < s.span.length; t += MN_BAYES_CHUNK) {
        const int all = (int)min((int64_t)MN_BAYES_CHUNK, s.span.length - t);
        mn_bayes_load_tile<T>(smem, p, s, t, all);
        __syncthreads();
        if (is_low(smem, s)) mn_bayes_rebase(P, smem, s);
        const int front = min(first_steep(smem, s), all);
        for (int first = 0, count; first < all; first += count) {
            const bool alone = first >= front;
            count = alone ? 1 : front;
            if (first == front) mn_bayes_rebase(P, smem, s);
            if (alone) {
                mn_bayes_step_frame(smem, s, first);
                mn_bayes_rebase(P, smem, s);
            }
            mn_bayes_chunk<T>(P, smem, p, s, t, first, count, alone, qvar);
            mn_bayes_write(P, smem, s);
            __syncthreads();
            put_results<T>(smem, p, s, t + first, count);
            __syncthreads();
            if (!alone) mn_bayes_advance_frame(smem, s, count);
            __syncthreads();
        }
    }
    mn_bayes_rebase(P, smem, s);
    put_states(P, smem, p, s);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* How a call is cut: whether P fits in registers, the mean and the rest in shared memory. */
struct layout {
    int nb, nm;
    bool large, mean_inside, smem_inside;
    size_t smem_bytes, work_each;    // work in doubles for each block
    int64_t blocks;
};

static layout layout_of(const mn_bayes_args *p) {
    layout l;
    const mn_call &c = p->call;
    const int64_t R = c.K * (p->theta.data ? 2 : 1);
    const size_t most = mn_bayes_most_shared();
    l.nb = (int)((R + 7) / 8);
    l.nm = (int)(mn_ceil_div(mn_ceil_div(c.V, mn_max(c.G, 1)), 8));
    l.large = l.nb > MN_BAYES_TILES;
    l.smem_bytes = (size_t)mn_bayes_doubles(l.nb, l.nm, (int)c.K, true) * sizeof(double);
    l.mean_inside = l.smem_bytes <= most;
    if (!l.mean_inside) {
        l.smem_bytes = (size_t)mn_bayes_doubles(l.nb, l.nm, (int)c.K, false) * sizeof(double);
    }
    l.smem_inside = l.smem_bytes <= most;
    l.work_each = (l.large ? (size_t)l.nb * l.nb * 64 : 0) +
                  (l.mean_inside ? 0 : (size_t)l.nm * l.nb * 64);
    if (!l.smem_inside) {
        l.work_each += l.smem_bytes / sizeof(double);
        l.smem_bytes = 0;
    }
    l.blocks = mn_n_spans(c) * c.H * c.G;
    return l;
}

bool mn_bayes_wide_plan(const mn_bayes_args *p, mn_plan *plan) {
    const layout l = layout_of(p);
    size_t count;
    return mn_mul_size(&count, l.work_each, (size_t)l.blocks) &&
           mn_mul_size(&plan->shared_bytes, count, sizeof(double));
}

template <typename T, bool LARGE>
static int start(const mn_bayes_args *p, const layout &l, double *work, cudaStream_t on) {
    return mn_launch_smem(wide_kernel<T, LARGE>, dim3((unsigned)l.blocks),
                               MN_BAYES_THREADS, l.smem_bytes, on, *p, work,
                               (int64_t)l.work_each, l.mean_inside, l.smem_inside);
}

int mn_bayes_wide(const mn_bayes_args *p, void *shared, cudaStream_t on) {
    const layout l = layout_of(p);
    double *work = (double *)shared;
    if (l.blocks == 0) return cudaSuccess;
    if (l.nb * 8 > MN_BAYES_WIDEST || l.blocks > INT32_MAX) {
        return cudaErrorNotSupported;
    }
    if (p->call.dtype == MN_BF16) {
        return l.large ? start<mn_bf16, true>(p, l, work, on)
                       : start<mn_bf16, false>(p, l, work, on);
    }
    return l.large ? start<float, true>(p, l, work, on) : start<float, false>(p, l, work, on);
}

}    // namespace mneme::bayes
