/* bayes_span.cuh - what the way back of the Bayesian Layer keeps of spans of 64 tokens, and the
 * kernel that prepares them. Formulas are in bayes_backward.cu, the only file that includes this.
 *
 * A span has one frame: with Phi_t the product of A since its first token, kh_t = Phi_t'k_t and so
 * on (see bayes.cuh). Panels have a span's tokens as rows and R columns, the state's rows, zeros
 * beyond them and beyond the last token. Scaling rows and columns costs no digits, only range: a
 * head in which a channel decays by more than e^-150 within a span goes the way of bayes_back.cuh. */
#ifndef MN_KERNELS_CUDA_BAYES_SPAN_CUH
#define MN_KERNELS_CUDA_BAYES_SPAN_CUH

#include "kernels/cuda/bayes.cuh"

enum {
    CHUNK = MN_BAYES_CHUNK, SPAN_TOKENS = 64, SPAN_CHUNKS = SPAN_TOKENS / CHUNK,
    SMALL = CHUNK * CHUNK,
    SLICE = 16,          // value columns of a warp
    MEAN_WARPS = 4,      // of a block
    SMALL_LD = 20,       // of (16,16) in shared memory, free of conflicts
};

/* Work space of spans. Panels are of a head of a span, or of a group of it. */
struct span_work {
    int *steep;                               // of a head of a sequence
    double *k, *q, *phi;                      // panels of heads; k, q in the frame
    double *noise;                            // n at each chunk's start and the end: 5 x 2 x R
    double *nk;                               // panel: n_t kh_t; until h takes its place
    double *h;                                // panel of groups: -beta / 2 of the sources, then of all
    double *r2, *sigma;                       // tokens of groups
    double *w;                                // panel: z / sigma
    double *eliminate, *reads, *theta;        // of chunks: Li, w_s.q_t (s <= t), Theta / 2
    double *P, *M, *E;                        // states in front of spans (M', E' have columns first),
                                              // E behind them
    double *e, *de;                           // tokens x columns
    double *inside;                           // D behind chunks: diagonal, beside it: 2 x R
    double *totals;                           // of a head's chunks: C's trace and turn, 2 x K
    double *last;                             // of groups of sequences: C behind the last token
    float *local;                             // tokens x 2 K: C's growth within the chunk
    double *traces;                           // of D in front of sequences
    int columns, slices;                      // value columns of a group, rounded up; blocks of 64
    int64_t slots;
};

/* Panels in shared memory: rows as left factors, and as right ones with tokens summed over. */
template <int R>
struct pitch {
    static constexpr int left = R + 8, right = R + 4;
};

struct span_group {
    int64_t n, h, g;
    int first, count;    // value columns
};

__device__ __forceinline__ static span_group group_at(const mn_bayes_args &p, int64_t block) {
    span_group s;
    const int64_t G = p.call.G, V = p.call.V;
    s.g = block % G, s.h = block / G % p.call.H, s.n = block / G / p.call.H;
    s.first = (int)((s.g * V + G - 1) / G);
    s.count = (int)(((s.g + 1) * V + G - 1) / G) - s.first;
    return s;
}

/* The slot of a sequence's first span. */
__device__ __forceinline__ static int64_t first_slot(const mn_call &call, const mn_span &span, int64_t n) {
    if (call.cu_seqlens) return span.t0 / SPAN_TOKENS + n;
    return n * ((call.T + SPAN_TOKENS - 1) / SPAN_TOKENS);
}

__device__ __forceinline__ static int64_t n_spans_of(const mn_span &span) {
    return (span.length + SPAN_TOKENS - 1) / SPAN_TOKENS;
}

/* ---- factors of products, as mn_dmma_8 and mn_dmma_16 take them ------------------------------- */

/* 16 rows, columns [column, column + 8) in the order 0 2 4 6 1 3 5 7 */
__device__ __forceinline__ static void left_rows(double (&a)[4], const double *rows, int64_t ld, int column) {
    const int lane = threadIdx.x % 32;
    const double *at = rows + lane / 4 * ld + column + 2 * (lane % 4);
    const double2 upper = *(const double2 *)at, lower = *(const double2 *)(at + 8 * ld);
    a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
}

/* 8 rows read as columns, summed over [column, column + 8) in that order */
__device__ __forceinline__ static void right_rows(double (&b)[2], const double *rows, int64_t ld, int column) {
    const int lane = threadIdx.x % 32;
    const double2 x = *(const double2 *)(rows + lane / 4 * ld + column + 2 * (lane % 4));
    b[0] = x.x, b[1] = x.y;
}

/* 8 columns, summed over the 8 rows in that order */
__device__ __forceinline__ static void right_columns(double (&b)[2], const double *rows, int64_t ld, int column) {
    const int lane = threadIdx.x % 32;
    const double *at = rows + 2 * (lane % 4) * ld + column + lane / 4;
    b[0] = at[0], b[1] = at[ld];
}

/* Columns of 16 rows as rows, summed over the 16 in their order: 16 columns, or 8. */
__device__ __forceinline__ static void left_columns16(double (&a)[8], const double *rows, int64_t ld, int column) {
    const int lane = threadIdx.x % 32;
    const double *at = rows + lane % 4 * ld + column + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) a[2 * i] = at[4 * i * ld], a[2 * i + 1] = at[4 * i * ld + 8];
}

__device__ __forceinline__ static void right_columns16(double (&b)[4], const double *rows, int64_t ld,
                                       int column) {
    const int lane = threadIdx.x % 32;
    const double *at = rows + lane % 4 * ld + column + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) b[i] = at[4 * i * ld];
}

/* A (16,16) matrix as the left factor, in the natural order. */
__device__ __forceinline__ static void left_small(double (&a)[8], const double *matrix, int ld) {
    const int lane = threadIdx.x % 32;
    const double *at = matrix + lane / 4 * ld + lane % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) a[2 * i] = at[4 * i], a[2 * i + 1] = at[8 * ld + 4 * i];
}

/* A result as the left factor of the next product, columns in the order 0 2 4 6 1 3 5 7. */
__device__ __forceinline__ static void left_result(double (&a)[4], const double (&c)[2][2]) {
    a[0] = c[0][0], a[1] = c[1][0], a[2] = c[0][1], a[3] = c[1][1];
}

/* Rows of a result: 16 tokens, columns [column, column + 8) */
__device__ __forceinline__ static void put_rows(double *rows, int64_t ld, int column, const double (&c)[2][2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        double *to = rows + (8 * m + lane / 4) * ld + column + 2 * (lane % 4);
        *(double2 *)to = make_double2(c[m][0], c[m][1]);
    }
}

__device__ __forceinline__ static void get_rows(double (&c)[2][2], const double *rows, int64_t ld, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const double *from = rows + (8 * m + lane / 4) * ld + column + 2 * (lane % 4);
        const double2 x = *(const double2 *)from;
        c[m][0] = x.x, c[m][1] = x.y;
    }
}

__device__ __forceinline__ static void zero(double (&c)[2][2]) {
    c[0][0] = c[0][1] = c[1][0] = c[1][1] = 0.0;
}

/* ---- copies that run beside the work --------------------------------------------------------- */

__device__ __forceinline__ static void copy_later(double *to, const double *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::
                     "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

/* `count` rows of R numbers that lie one after the other; R is even. */
template <int R>
__device__ __forceinline__ static void copy_rows_later(double *to, int ld, const double *from, int count,
                                       int threads) {
    for (int i = threadIdx.x; i < count * R / 2; i += threads) {
        copy_later(to + i / (R / 2) * ld + i % (R / 2) * 2, from + 2 * i);
    }
}

__device__ __forceinline__ static void close_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* All groups but the last one have arrived; others see that behind a barrier. */
__device__ __forceinline__ static void await_copies() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

/* ---- preparing ------------------------------------------------------------------------------- */

/* Sums of the chunks of a span, by channels. */
struct chunk_sums {
    double level[SPAN_CHUNKS][128], angle[SPAN_CHUNKS][128];
    double rr[SPAN_CHUNKS][128], ri[SPAN_CHUNKS][128], ii[SPAN_CHUNKS][128];
};

/* Phi_t, kh, qh, n_t kh_t, n and r2 of a head of a span; one thread has one channel of a chunk. */
template <typename T, int R>
__global__ void __launch_bounds__(512)
span_prepare_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    __shared__ chunk_sums sums;
    const int64_t H = p.call.H, G = p.call.G, slot = blockIdx.x / H, h = blockIdx.x % H;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, slot);
    if (tile.n_rows == 0) return;
    const int c = threadIdx.x / 128, i = threadIdx.x % 128, K = (int)p.call.K;
    const bool turns = p.theta.data != NULL, active = i < K;
    const int64_t b = tile.span.b, t0 = tile.span.t0 + tile.first + c * CHUNK;
    const int n_rows = (int)min((int64_t)CHUNK, tile.n_rows - c * CHUNK);
    const int64_t panel = ((slot * H + h) * SPAN_TOKENS + c * CHUNK) * R;
    double level[CHUNK], angle[CHUNK], l2[CHUNK], sum = 0.0, turn = 0.0;
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        const bool there = active && j < n_rows;
        level[j] = there ? (double)mn_float(mn_row<T>(p.la, b, t0 + j, h)[i]) : 0.0;
        angle[j] = there && turns ? (double)mn_float(mn_row<T>(p.theta, b, t0 + j, h)[i]) : 0.0;
        l2[j] = there ? (double)mn_float(*mn_row<T>(p.l2, b, t0 + j, h)) : 0.0;
        sum += level[j], turn += angle[j];
    }
    sums.level[c][i] = sum, sums.angle[c][i] = turn;
    __syncthreads();
    sum = turn = 0.0;
    for (int j = 0; j < c; j++) sum += sums.level[j][i], turn += sums.angle[j][i];
    double rr = 0.0, ri = 0.0, ii = 0.0;
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        sum += level[j], turn += angle[j];
        const double size = exp(sum), square = size * size;
        double re = size, im = 0.0;
        if (turns) {
            double sine, cosine;
            sincos(turn, &sine, &cosine);
            re = size * cosine, im = size * sine;
        }
        const double weight = l2[j] / (square * square);
        rr += weight * re * re, ri -= weight * re * im, ii += weight * im * im;
        level[j] = re, angle[j] = im;    // from here on Phi
    }
    if (active && !(sum > -150.0)) w.steep[tile.n * H + h] = 1;
    sums.rr[c][i] = rr, sums.ri[c][i] = ri, sums.ii[c][i] = ii;
    __syncthreads();
    rr = ri = ii = 0.0;
    for (int j = 0; j < c; j++) {
        rr += sums.rr[j][i], ri += sums.ri[j][i], ii += sums.ii[j][i];
    }
    const int step = turns ? 2 : 1, r = i * step;
    double *noise = w.noise + (slot * H + h) * (SPAN_CHUNKS + 1) * 2 * R;
    const auto put_noise = [&](double *to) {
        to[r] = rr, to[R + r] = ri;
        if (turns) to[r + 1] = ii, to[R + r + 1] = ri;
    };
    if (active) put_noise(noise + c * 2 * R);
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        if (!active) break;
        const bool there = j < n_rows;
        const double re = level[j], im = angle[j], square = re * re + im * im;
        const double k = there ? (double)mn_float(mn_row<T>(p.k, b, t0 + j, h)[i]) : 0.0;
        const T *query = mn_row<T>(p.q, b, t0 + j, h);
        const double q = there && query ? (double)mn_float(query[i]) : 0.0;
        const double weight = l2[j] / (square * square);
        rr += weight * re * re, ri -= weight * re * im, ii += weight * im * im;
        const int64_t at = panel + j * R + r;
        w.phi[at] = re, w.k[at] = re * k, w.q[at] = re * q;
        w.nk[at] = rr * (re * k) - ri * (im * k);
        if (!turns) continue;
        w.phi[at + 1] = im, w.k[at + 1] = -im * k, w.q[at + 1] = -im * q;
        w.nk[at + 1] = ri * (re * k) - ii * (im * k);
    }
    if (active && c == SPAN_CHUNKS - 1) put_noise(noise + SPAN_CHUNKS * 2 * R);
    const int rows = K * step;
    for (int j = threadIdx.x; j < SPAN_TOKENS * (R - rows); j += 512) {
        const int64_t at = (slot * H + h) * SPAN_TOKENS * R + j / (R - rows) * R + rows +
                           j % (R - rows);
        w.phi[at] = w.k[at] = w.q[at] = w.nk[at] = 0.0;
    }
    for (int j = threadIdx.x; j < 2 * (SPAN_CHUNKS + 1) * (R - rows); j += 512) {
        noise[j / (R - rows) * R + rows + j % (R - rows)] = 0.0;
    }
    for (int64_t j = threadIdx.x; j < SPAN_TOKENS * G; j += 512) {
        const int64_t g = j / SPAN_TOKENS, t = j % SPAN_TOKENS;
        const int64_t when = tile.span.t0 + tile.first + t;
        w.r2[((slot * H + h) * G + g) * SPAN_TOKENS + t] =
            t < tile.n_rows ? (double)mn_float(mn_row<T>(p.r2, b, when, h)[g]) : 1.0;
    }
}

#endif
