/* bayes_output.cu - gains and variances of all chunks at once, from what the covariance scan
 * has left; bayes_fwd_chunk.cuh. */
#include "kernels/cuda/bayes/bayes_fwd_chunk.cuh"
#include "kernels/cuda/prim/pdl.cuh"

namespace mneme::bayes {

enum { CHUNK = MN_SCAN_CHUNK, MOST_WARPS = MN_SCAN_WIDEST / 32 };

/* Where a block is. */
struct ctx {
    int64_t place, h;
    mn_tile_span tile;
    int begin;    // tokens in front that share a frame
};

/* Phi of all tokens of channel i, 1 of one that goes alone, and qh'n qh: the noise's part of a
 * read. */
template <typename T, int STEP>
__device__ static void frames(double (&re)[CHUNK], double (&im)[CHUNK], double (&noise)[CHUNK],
                              const mn_state_scan_job &job, const ctx &s, const float *l2, int i) {
    const mn_bayes_args &p = job.p;
    const int row = min(i, (int)p.call.K - 1) * STEP;
    const double *q = job.work.queries + s.place * mn_state_scan_smem_tile(job.rows);
    float la[CHUNK], theta[CHUNK];
    mn_state_scan_column<T>(la, p.la, p.call, s.tile, s.h, i);
    if (STEP == 2) mn_state_scan_column<T>(theta, p.theta, p.call, s.tile, s.h, i);
    mn_state_scan_frame<STEP> f;
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const double *at = q + mn_state_scan_smem_tile_at(t, row, job.rows);
        const double x = job.spreads ? at[0] : 0.0, y = job.spreads && STEP == 2 ? at[2] : 0.0;
        const bool shares = t < s.begin;
        if (shares) f.step(la[t], theta[t], l2[t]);
        re[t] = shares ? f.re : 1.0, im[t] = shares ? f.im : 0.0;
        noise[t] = shares ? f.rr * x * x + 2.0 * f.ri * x * y + f.ii * y * y
                          : (double)l2[t] * x * x;
        if (i >= p.call.K) noise[t] = 0.0;
    }
}

/* u / sigma of channel i, u being Phi z. */
template <typename T, int STEP>
__device__ static void put_gains(const mn_state_scan_job &job, const ctx &s,
                                 const double (&re)[CHUNK], const double (&im)[CHUNK], int i) {
    const mn_bayes_args &p = job.p;
    const int64_t R = p.call.R, when = s.tile.span.t0 + s.tile.first;
    T *out = mn_row<T>(p.gainvec, s.tile.span.b, when, s.h) + i * STEP;
    for (int64_t g = 0; g < p.call.G; g++) {
        const int64_t group = s.place * p.call.G + g;
        const double *z = job.work.z + group * mn_state_scan_smem_tile(job.rows);
        const double *inverse = job.work.inverse + group * CHUNK;
        double x[CHUNK], y[CHUNK];
#pragma unroll
        for (int t = 0; t < CHUNK; t++) {
            const int there = min(t, (int)s.tile.n_rows - 1);    // others may not be written
            const double *at = z + mn_state_scan_smem_tile_at(there, i * STEP, job.rows);
            x[t] = at[0] * inverse[there];
            y[t] = STEP == 2 ? at[2] * inverse[there] : 0.0;
        }
#pragma unroll
        for (int t = 0; t < CHUNK; t++) {
            T *to = out + t * p.gainvec.stride[1] + g * R;
            if (t >= s.tile.n_rows) continue;
            mn_put(to, (float)(re[t] * x[t] - im[t] * y[t]));
            if (STEP == 2) mn_put(to + 1, (float)(im[t] * x[t] + re[t] * y[t]));
        }
    }
}

/* (z_s.qh_t)^2 / sigma_s for s <= t, summed over s: what a frame's own writes take from reads, by
 * all threads. `parts` is of each warp. */
__device__ static double taken(double (&parts)[MOST_WARPS][256], const mn_state_scan_job &job,
                               const ctx &s, int64_t group) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const int rows = job.rows;
    const int own = mn_state_scan_smem_tile_at(lane / 4, 2 * (lane % 4), rows);
    const double *z = job.work.z + group * mn_state_scan_smem_tile(rows) + own;
    const double *q = job.work.queries + s.place * mn_state_scan_smem_tile(rows) + own;
    double c[2][2][2] = {};
#pragma unroll 4
    for (int r = 8 * warp; r < rows; r += (int)blockDim.x / 4) {
        double a[4];
        mn_state_scan_left(a, z + 2 * r);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            double b[2];
            mn_state_scan_right(b, q + 2 * r, half);
            mn_mma_f64_k8(c[half], a, b);
        }
    }
    __syncthreads();
#pragma unroll
    for (int x = 0; x < 8; x++) {
        const int token = lane / 4 + 8 * (x / 2 % 2), t = 8 * (x / 4) + 2 * (lane % 4) + x % 2;
        parts[warp][16 * token + t] = c[x / 4][x / 2 % 2][x % 2];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < 256; e += (int)blockDim.x) {
        const int token = e / 16, t = e % 16;
        double score = 0.0;
        for (unsigned w = 0; w < blockDim.x / 32; w++) score += parts[w][e];
        const bool counts = t < s.tile.n_rows && (t < s.begin ? token <= t : token == t);
        parts[0][e] = counts ? score * score * job.work.inverse[group * CHUNK + token] : 0.0;
    }
    __syncthreads();
    double sum = 0.0;
#pragma unroll
    for (int token = 0; token < CHUNK; token++) sum += parts[0][16 * token + threadIdx.x % 16];
    return sum;
}

/* What is asked of each token and group, by one thread a token. */
template <typename T>
__device__ static void put_variances(double (&parts)[MOST_WARPS][256], const mn_state_scan_job &job,
                                     const ctx &s, double noise) {
    const mn_bayes_args &p = job.p;
    const int t = (int)threadIdx.x;
    const int64_t b = s.tile.span.b, when = s.tile.span.t0 + s.tile.first + t;
    for (int64_t g = 0; g < p.call.G; g++) {
        const int64_t group = s.place * p.call.G + g;
        const double less = job.spreads ? taken(parts, job, s, group) : 0.0;
        if (t >= s.tile.n_rows || t >= CHUNK) continue;
        const double variance = job.work.variance[group * CHUNK + t];
        T *gain = mn_row<T>(p.gain, b, when, s.h), *kvar = mn_row<T>(p.kvar, b, when, s.h);
        T *qvar = mn_row<T>(p.qvar, b, when, s.h);
        if (gain) mn_put(gain + g, (float)(variance * job.work.inverse[group * CHUNK + t]));
        if (kvar) mn_put(kvar + g, (float)variance);
        if (!qvar) continue;
        double sum = noise - less;
        const double *spread = job.work.spread + group * MN_SCAN_SUMS * CHUNK + t;
        for (int part = 0; part * 32 < job.rows && job.spreads; part++) sum += spread[part * CHUNK];
        mn_put(qvar + g, job.spreads ? (float)(p.scale * p.scale * sum) : 0.0f);
    }
}

/* One block has one chunk of one head, a thread one channel; in a redo mn_state_scan_tile. */
template <typename T, int STEP, bool REDO>
__global__ void __launch_bounds__(MN_SCAN_WIDEST, 2)
results_kernel(const __grid_constant__ mn_state_scan_job job) {
    __shared__ double parts[MOST_WARPS][256], noises[MOST_WARPS][CHUNK];
    __shared__ float l2[CHUNK];
    const mn_bayes_args &p = job.p;
    ctx s;
    if (REDO) mn_pdl_wait();
    s.h = blockIdx.x % (unsigned)p.call.H;
    s.tile = mn_state_scan_tile<REDO>(job, s.place);
    if (s.tile.n_rows == 0) return;
    s.begin = job.work.steep[s.place] ? job.work.steep[s.place] - 1 : CHUNK;
    const int i = (int)threadIdx.x;
    if (i < CHUNK) {
        const int64_t when = s.tile.span.t0 + s.tile.first + i;
        l2[i] = i < s.tile.n_rows ? mn_float(*mn_row<T>(p.l2, s.tile.span.b, when, s.h)) : 0.0f;
    }
    __syncthreads();
    double re[CHUNK], im[CHUNK], part[CHUNK];
    frames<T, STEP>(re, im, part, job, s, l2, i);
    if (p.gainvec.data && i < p.call.K) put_gains<T, STEP>(job, s, re, im, i);
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
#pragma unroll
        for (int lanes = 16; lanes > 0 && job.spreads; lanes >>= 1) {
            part[t] += __shfl_xor_sync(0xffffffffu, part[t], lanes);
        }
        if (i % 32 == 0) noises[i / 32][t] = part[t];
    }
    __syncthreads();
    double noise = 0.0;
    for (unsigned w = 0; w < blockDim.x / 32 && i < s.tile.n_rows; w++) noise += noises[w][i];
    put_variances<T>(parts, job, s, noise);
}

template <typename T>
static int results(const mn_state_scan_job *job, cudaStream_t stream) {
    const int64_t blocks = mn_state_scan_chunks(job);
    const unsigned threads = (unsigned)mn_max(job->rows / job->step, 32);
    const bool pairs = job->step == 2;
    const auto kernel = pairs ? results_kernel<T, 2, false> : results_kernel<T, 1, false>;
    const auto redo = pairs ? results_kernel<T, 2, true> : results_kernel<T, 1, true>;
    const dim3 grid((unsigned)blocks);
    if (job->redo) return mn_launch_pdl(redo, grid, (int)threads, 0, stream, *job);
    kernel<<<grid, threads, 0, stream>>>(*job);
    return mn_launch_status();
}

int mn_state_scan_results(const mn_state_scan_job *job, cudaStream_t stream) {
    return job->p.call.dtype == MN_BF16 ? results<mn_bf16>(job, stream)
                                        : results<float>(job, stream);
}

}    // namespace mneme::bayes
