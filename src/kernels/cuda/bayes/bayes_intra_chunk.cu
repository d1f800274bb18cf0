/* bayes_intra_chunk.cu - what keys, queries and decays determine of each chunk;
 * bayes_fwd_chunk.cuh. */
#include "kernels/cuda/bayes/bayes_fwd_chunk.cuh"
#include "kernels/cuda/prim/first_wild.cuh"
#include "kernels/cuda/prim/pdl.cuh"

namespace mneme::bayes {

/* One channel of a chunk as it was given. */
struct channel {
    float k[MN_SCAN_CHUNK], q[MN_SCAN_CHUNK], la[MN_SCAN_CHUNK], theta[MN_SCAN_CHUNK];
};

template <typename T, int STEP>
__device__ static channel channel_of(const mn_state_scan_job &job, const mn_tile_span &tile,
                                     int64_t h,
                                     int i) {
    const mn_bayes_args &p = job.p;
    channel c;
    T la[MN_SCAN_CHUNK], k[MN_SCAN_CHUNK], q[MN_SCAN_CHUNK], theta[MN_SCAN_CHUNK];
    const int most = (int)p.call.K - 1;
    mn_state_scan_column_raw<T>(la, p.la, tile, h, min(i, most));
    mn_state_scan_column_raw<T>(k, p.k, tile, h, min(i, most));
    mn_state_scan_column_raw<T>(q, job.reads ? p.q : p.k, tile, h, min(i, most));
    if (STEP == 2) mn_state_scan_column_raw<T>(theta, p.theta, tile, h, min(i, most));
#pragma unroll
    for (int t = 0; t < MN_SCAN_CHUNK; t++) {
        const bool there = t < tile.n_rows && i <= most;
        c.la[t] = there ? mn_float(la[t]) : 0.0f, c.k[t] = there ? mn_float(k[t]) : 0.0f;
        c.q[t] = there ? mn_float(q[t]) : 0.0f;
        if (STEP == 2) c.theta[t] = there ? mn_float(theta[t]) : 0.0f;
    }
    return c;
}

/* Numbers of the rows of a channel: one, or a pair. */
template <int STEP>
__device__ inline void put(double *to, double re, double im) {
    if (STEP == 2) *(double2 *)to = make_double2(re, im);
    else *to = re;
}

/* A channel's part of a tile, tokens [0, 8) being kept until those after them come. */
template <int STEP>
struct smem_tile {
    double *to;
    double re[8], im[8];

    __device__ void put(int t, double x, double y, int64_t rows) {
        if (t < 8) {
            re[t % 8] = x, im[t % 8] = y;
            return;
        }
        double *at = to + mn_state_scan_smem_tile_at(t % 8, 0, (int)rows);
        *(double2 *)at = make_double2(re[t % 8], x);
        if (STEP == 2) *(double2 *)(at + 2) = make_double2(im[t % 8], y);
    }
};

/* Phi and n of a channel behind a frame. */
template <int STEP>
__device__ static void put_end(double *ends, const mn_state_scan_frame<STEP> &f, int64_t rows) {
    put<STEP>(ends, f.re, f.im);
    put<STEP>(ends + rows, f.rr, f.ii);
    put<STEP>(ends + 2 * rows, f.ri, f.ri);
}

/* A chunk whose tokens up to `begin` share a frame, with the numbers that they have in one that is
 * not steep; every other token's begins behind its A. `r` is the channel's first row. */
template <int STEP>
__device__ static void prepare_steep(const mn_state_scan_job &job, const channel &c,
                                     const float *l2, int64_t place, int r, int begin) {
    const int64_t rows = job.rows, at = place * mn_state_scan_smem_tile(job.rows) + 2 * r;
    smem_tile<STEP> keys = { job.work.keys + at }, queries = { job.work.queries + at };
    double *noised = job.work.noised + place * mn_state_scan_noised(job.rows);
    mn_state_scan_frame<STEP> f;
#pragma unroll
    for (int t = 0; t < MN_SCAN_CHUNK; t++) {
        if (t < begin) {
            f.step(c.la[t], c.theta[t], l2[t]);
            const double q = (double)c.q[t], x = f.re * (double)c.k[t], y = -f.im * (double)c.k[t];
            keys.put(t, x, y, rows);
            if (job.reads) queries.put(t, f.re * q, -f.im * q, rows);
            put<STEP>(noised + t * rows + r, f.rr * x + f.ri * y, f.ri * x + f.ii * y);
            continue;
        }
        const double size = exp((double)c.la[t]);
        double sine = 0.0, cosine = 1.0;
        if (STEP == 2) sincos((double)c.theta[t], &sine, &cosine);
        keys.put(t, (double)c.k[t], 0.0, rows);
        if (job.reads) queries.put(t, (double)c.q[t], 0.0, rows);
        put<STEP>(noised + t * rows + r, size * cosine, size * sine);
    }
    put_end<STEP>(job.work.ends + place * 3 * rows + r, f, rows);
    if (threadIdx.x < MN_SCAN_CHUNK) noised[16 * rows + threadIdx.x] = (double)l2[threadIdx.x];
}

template <int STEP>
__device__ static void prepare_chunk(const mn_state_scan_job &job, const channel &c,
                                     const float *l2,
                                     int64_t place, int r) {
    const int64_t rows = job.rows, at = place * mn_state_scan_smem_tile(job.rows) + 2 * r;
    smem_tile<STEP> keys = { job.work.keys + at }, queries = { job.work.queries + at };
    double *noised = job.work.noised + place * mn_state_scan_noised(job.rows);
    mn_state_scan_frame<STEP> f;
#pragma unroll
    for (int t = 0; t < MN_SCAN_CHUNK; t++) {
        const double k = (double)c.k[t], q = (double)c.q[t];
        f.step(c.la[t], c.theta[t], l2[t]);
        const double x = f.re * k, y = -f.im * k;
        keys.put(t, x, y, rows);
        if (job.reads) queries.put(t, f.re * q, -f.im * q, rows);
        put<STEP>(noised + mn_state_scan_noised_at(t, r), f.rr * x + f.ri * y, f.ri * x + f.ii * y);
    }
    put_end<STEP>(job.work.ends + place * 3 * rows + r, f, rows);
}

/* The least of all threads' numbers, which are 0 to 15 or more; the block calls. */
__device__ static int least_of_all(int x) {
    int low = 0, high = MN_SCAN_CHUNK;    // it is in [low, high)
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (__syncthreads_or(x < middle)) high = middle;
        else low = middle;
    }
    return low;
}

/* Leaves in work.cuts where sequence n ends for head h in a redo of block n * H + h: at the first
 * token with a number that is not finite if a result of the last token is not, 0 where no row of
 * the token's chunk is in front of it. The block calls. */
template <typename T>
__device__ static void find_cut(const mn_state_scan_job &job) {
    const mn_bayes_args &p = job.p;
    const mn_call &call = p.call;
    const int64_t h = blockIdx.x % (unsigned)call.H;
    const mn_span span = mn_span_at(call, blockIdx.x / (unsigned)call.H);
    const int64_t b = span.b, last = span.t0 + span.length - 1;
    int cut = 0;
    mn_pdl_wait();
    if (span.length > 0 && (mn_redo_row_is_wild(mn_row<T>(p.o, b, last, h), call.V) ||
                            mn_redo_row_is_wild(mn_row<T>(p.gain, b, last, h), call.G) ||
                            mn_redo_row_is_wild(mn_row<T>(p.gainvec, b, last, h), call.K) ||
                            mn_redo_row_is_wild(mn_row<T>(p.kvar, b, last, h), call.G) ||
                            mn_redo_row_is_wild(mn_row<T>(p.qvar, b, last, h), call.G))) {
        cut = mn_redo_first_token(span.length, [&](int64_t t, float most) {
            const int64_t at = span.t0 + t;
            return mn_redo_has_wild(mn_row<T>(p.k, b, at, h), call.K, most) ||
                   mn_redo_has_wild(mn_row<T>(p.v, b, at, h), call.V, most) ||
                   mn_redo_has_wild(mn_row<T>(p.la, b, at, h), call.K, most) ||
                   mn_redo_has_wild(mn_row<T>(p.theta, b, at, h), call.K, most) ||
                   mn_redo_has_wild(mn_row<T>(p.l2, b, at, h), 1, most) ||
                   mn_redo_has_wild(mn_row<T>(p.r2, b, at, h), call.G, most);
        });
    }
    if (threadIdx.x == 0) job.work.cuts[blockIdx.x] = cut % MN_SCAN_CHUNK == 0 ? 0 : cut;
    __syncthreads();
}

/* One block has one chunk of one head, a thread one channel; in a redo mn_state_scan_tile. */
template <typename T, int STEP, bool REDO>
__global__ void __launch_bounds__(MN_SCAN_WIDEST, 2)
prepare_kernel(const __grid_constant__ mn_state_scan_job job) {
    mn_pdl_launch_dependents();
    if (REDO) find_cut<T>(job);
    const mn_call &call = job.p.call;
    const int64_t h = blockIdx.x % (unsigned)call.H;
    int64_t place;
    const mn_tile_span tile = mn_state_scan_tile<REDO>(job, place);
    if (tile.n_rows == 0) return;
    __shared__ float l2[MN_SCAN_CHUNK];
    const int i = threadIdx.x;
    if (i < MN_SCAN_CHUNK) {
        const int64_t when = tile.span.t0 + tile.first + i;
        l2[i] = i < tile.n_rows ? mn_float(*mn_row<T>(job.p.l2, tile.span.b, when, h)) : 0.0f;
    }
    const int n_noises = (int)call.G * MN_SCAN_CHUNK;
    const auto noise_at = [&](int e) {
        const int at = min(e, n_noises - 1), t = at % MN_SCAN_CHUNK;
        const int64_t when = tile.span.t0 + tile.first + min(t, (int)tile.n_rows - 1);
        const T *r2 = mn_row<T>(job.p.r2, tile.span.b, when, h) + at / MN_SCAN_CHUNK;
        return t < tile.n_rows ? (double)mn_float(*r2) : 1.0;
    };
    double noise = noise_at(i);
    const channel c = channel_of<T, STEP>(job, tile, h, i);
    if (tile.first == 0 || REDO) {
        const int64_t scan = (tile.n * call.H + h) * call.G;
        const int count = (int)call.G * MN_SCAN_BLOCKS;
#pragma unroll 1
        for (int e = i; e < count; e += (int)blockDim.x) {
            job.work.done[scan * MN_SCAN_BLOCKS + e] = 0;
        }
    }
    double level = 0.0;
    int begin = MN_SCAN_CHUNK;    // the first token by which the channel has decayed too much
#pragma unroll
    for (int t = 0; t < MN_SCAN_CHUNK; t++) {
        level += (double)c.la[t];
        begin = fabs(level) <= 150.0 ? begin : min(begin, t);
    }
    for (int e = i; e < n_noises; e += (int)blockDim.x, noise = noise_at(e)) {
        job.work.r2[place * n_noises + e] = noise;
    }
    const bool steep = __syncthreads_or(begin < MN_SCAN_CHUNK);
    if (steep) begin = least_of_all(begin);
    if (i == 0) {
        const int how = steep ? 1 + begin : 0;
        job.work.steep[place] = how;
        job.work.keys[place * mn_state_scan_smem_tile(job.rows) + 2 * job.rows] = (double)how;
    }
    if (i * STEP >= job.rows) return;
    if (steep) prepare_steep<STEP>(job, c, l2, place, i * STEP, begin);
    else prepare_chunk<STEP>(job, c, l2, place, i * STEP);
}

template <typename T>
static int prepare(const mn_state_scan_job *job, cudaStream_t stream) {
    const int64_t blocks = mn_state_scan_chunks(job);
    const unsigned threads = (unsigned)mn_max(job->rows / job->step, 32);
    const bool pairs = job->step == 2;
    const auto kernel = pairs ? prepare_kernel<T, 2, false> : prepare_kernel<T, 1, false>;
    const auto redo = pairs ? prepare_kernel<T, 2, true> : prepare_kernel<T, 1, true>;
    const dim3 grid((unsigned)blocks);
    if (job->redo) return mn_launch_pdl(redo, grid, (int)threads, 0, stream, *job);
    kernel<<<grid, threads, 0, stream>>>(*job);
    return mn_launch_status();
}

int mn_state_scan_prepare(const mn_state_scan_job *job, cudaStream_t stream) {
    return job->p.call.dtype == MN_BF16 ? prepare<mn_bf16>(job, stream)
                                        : prepare<float>(job, stream);
}

}    // namespace mneme::bayes
