/* bayes_span.cuh - what the way back of the Bayesian Layer keeps of spans of 64 tokens, and the
 * kernel that prepares them. Formulas are in bayes_bwd_chunk.cu.
 *
 * A span has one frame: with Phi_t the product of A since its first token, kh_t = Phi_t'k_t and so
 * on (see bayes.cuh). Tiles have a span's tokens as rows and R columns, the state's rows, zeros
 * beyond them and beyond the last token. Scaling rows and columns costs no digits, only range.
 * Where a channel decays by more than e^-150 within a span, by e^-L, its frame is e^(L/2) times as
 * large, so that Phi goes from e^(L/2) to e^(-L/2) and noise, which outgrows it twice, by e^L: the
 * range of doubles holds L up to 640, ten for each token. In bf16 a token decays by no more than
 * e^-10: what a channel keeps of the tokens before is 5e-5 then, of a result that is rounded to
 * 4e-3. Otherwise a head that decays by more goes the narrow way (bayes_bwd_narrow.cu). */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_SPAN_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_SPAN_CUH

#include "kernels/cuda/bayes/bayes.cuh"
#include "kernels/cuda/prim/redo_grads.h"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::bayes {

enum {
    CHUNK = MN_BAYES_CHUNK, SPAN_TOKENS = 64, SPAN_CHUNKS = SPAN_TOKENS / CHUNK,
    SMALL = CHUNK * CHUNK,
    SLICE = 16,          // value columns of two warps
    SLICES = 4,          // of a block
    MEAN_WARPS = 2 * SLICES,
    SMALL_LD = 20,       // of (16,16) in shared memory, free of conflicts
};

/* Work space of spans. Tiles are of a head of a span, or of a group of it. */
struct span_work {
    int *steep;                               // of a head of a sequence
    int *left;                                // chunks done by covariances' scans, for means
    int *back;                                // the same of means' adjoints, of each slice
    double *k, *q, *phi;                      // tiles (64,R) of heads; k, q in the frame
    double *enter, *leave;                    // (R) of heads: from the real frame to the span's, by
                                              // numbers; from the span's to the next one's, as phi
    double *noise;                            // n at each chunk's start and the end: 5 x 2 x R
    double *nk;                               // tile (64,R): n_t kh_t; until h takes its place
    double *h;                                // tile (64,R) of groups: b, then du
    double *r2, *sigma;                       // tokens of groups
    double *w;                                // tile (64,R) of groups: w = z / sigma
    double *own;                              // tokens of groups: Psi_tt / 2 + w_t.b_t / 2
    double *eliminate, *reads, *theta;        // of chunks, (16,16): L, A = upper(W Q'), O
    double *P, *M;                            // states before spans; M' has columns first. Later a
                                              // head's first P has dk and dq
    double *dw;                               // of slices but the last
    double *e, *de;                           // tokens x columns
    double *inside;                           // D behind chunks: diagonal, beside it: 2 x R
    double *totals;                           // of a head's chunks: C's trace and turn, 2 x K
    double *last;                             // of groups of sequences: C behind the last token
    float *local;                             // tokens x 2 K: C's growth within the chunk
    double *traces;                           // of D in front of sequences
    int columns, slices;                      // value columns of a group, rounded up; blocks of 64
    int64_t P_each, dw_each;                  // numbers of a group
    bool redo;                                // of heads that are not steep, the others rest
};

/* Tiles in shared memory: rows as left factors, and as right ones with tokens summed over. */
template <int R>
struct pitch {
    static constexpr int left = R + 8, right = R + 4;
};

struct span_group {
    int64_t n, h, g;
    int first, count;    // value columns
};

__device__ inline span_group group_at(const mn_bayes_args &p, int64_t block) {
    span_group s;
    const int64_t G = p.call.G, V = p.call.V;
    s.g = block % G, s.h = block / G % p.call.H, s.n = block / G / p.call.H;
    s.first = (int)((s.g * V + G - 1) / G);
    s.count = (int)(((s.g + 1) * V + G - 1) / G) - s.first;
    return s;
}

/* The slot of a sequence's first span. */
__device__ inline int64_t first_slot(const mn_call &call, const mn_span &span, int64_t n) {
    if (call.cu_seqlens) return span.t0 / SPAN_TOKENS + n;
    return n * ((call.T + SPAN_TOKENS - 1) / SPAN_TOKENS);
}

__device__ inline int64_t n_spans_of(const mn_span &span) {
    return (span.length + SPAN_TOKENS - 1) / SPAN_TOKENS;
}

/* ---- factors of products, as mn_mma_f64_k8 and mn_mma_f64_k16 take them ---------------------- */

/* 16 rows, columns [column, column + 8) in the order 0 2 4 6 1 3 5 7 */
__device__ inline void left_rows(double (&a)[4], const double *rows, int64_t ld, int column) {
    const int lane = threadIdx.x % 32;
    const double *at = rows + lane / 4 * ld + column + 2 * (lane % 4);
    const double2 upper = *(const double2 *)at, lower = *(const double2 *)(at + 8 * ld);
    a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
}

/* 8 rows read as columns, summed over [column, column + 8) in that order */
__device__ inline void right_rows(double (&b)[2], const double *rows, int64_t ld, int column) {
    const int lane = threadIdx.x % 32;
    const double2 x = *(const double2 *)(rows + lane / 4 * ld + column + 2 * (lane % 4));
    b[0] = x.x, b[1] = x.y;
}

/* 8 columns, summed over the 8 rows in that order */
__device__ inline void right_columns(double (&b)[2], const double *rows, int64_t ld, int column) {
    const int lane = threadIdx.x % 32;
    const double *at = rows + 2 * (lane % 4) * ld + column + lane / 4;
    b[0] = at[0], b[1] = at[ld];
}

/* Columns of 16 rows as rows, summed over the 16 in their order: 16 columns, or 8. */
__device__ inline void left_columns16(double (&a)[8], const double *rows, int64_t ld, int column) {
    const int lane = threadIdx.x % 32;
    const double *at = rows + lane % 4 * ld + column + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) a[2 * i] = at[4 * i * ld], a[2 * i + 1] = at[4 * i * ld + 8];
}

__device__ inline void right_columns16(double (&b)[4], const double *rows, int64_t ld,
                                       int column) {
    const int lane = threadIdx.x % 32;
    const double *at = rows + lane % 4 * ld + column + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) b[i] = at[4 * i * ld];
}

/* 8 rows read as columns, summed over 16 columns in their order. */
__device__ inline void right_rows16(double (&b)[4], const double *rows, int ld) {
    const int lane = threadIdx.x % 32;
    const double *at = rows + lane / 4 * ld + lane % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) b[i] = at[4 * i];
}

/* A (16,16) matrix as the left factor, in the natural order. */
__device__ inline void left_small(double (&a)[8], const double *matrix, int ld) {
    const int lane = threadIdx.x % 32;
    const double *at = matrix + lane / 4 * ld + lane % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) a[2 * i] = at[4 * i], a[2 * i + 1] = at[8 * ld + 4 * i];
}

/* A result as the left factor of the next product, columns in the order 0 2 4 6 1 3 5 7. */
__device__ inline void left_result(double (&a)[4], const double (&c)[2][2]) {
    a[0] = c[0][0], a[1] = c[1][0], a[2] = c[0][1], a[3] = c[1][1];
}

/* Rows of a result: 16 tokens, columns [column, column + 8) */
__device__ inline void put_rows(double *rows, int64_t ld, int column, const double (&c)[2][2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        double *to = rows + (8 * m + lane / 4) * ld + column + 2 * (lane % 4);
        *(double2 *)to = make_double2(c[m][0], c[m][1]);
    }
}

__device__ inline void get_rows(double (&c)[2][2], const double *rows, int64_t ld, int column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const double *from = rows + (8 * m + lane / 4) * ld + column + 2 * (lane % 4);
        const double2 x = *(const double2 *)from;
        c[m][0] = x.x, c[m][1] = x.y;
    }
}

__device__ inline void zero(double (&c)[2][2]) {
    c[0][0] = c[0][1] = c[1][0] = c[1][1] = 0.0;
}

/* -x by its bits: while one warp's products keep the units for doubles busy, sums and products of
 * its neighbours' single numbers wait for hundreds of cycles each. */
__device__ inline double minus(double x) {
    return __hiloint2double(__double2hiint(x) ^ (int)0x80000000, __double2loint(x));
}

/* ---- copies that run beside the work --------------------------------------------------------- */

__device__ inline void copy_later(double *to, const double *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::
                     "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

__device__ inline void copy_one_later(double *to, const double *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::
                     "r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

/* This thread's number, anew at each call: what follows from it is worked out where it is wanted.
 * Otherwise loops keep it in local memory, reads of which wait behind copies. */
__device__ inline unsigned fresh_thread() {
    unsigned thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

/* COUNT rows of R numbers that lie one after the other, by the first THREADS threads of a block,
 * which copy whole rows at a time: places follow from each other without arithmetic. */
template <int R, int COUNT, int THREADS>
__device__ inline void copy_rows_later(double *to, int ld, const double *from) {
    constexpr unsigned EACH = R / 2, PIECES = COUNT * EACH, ROWS = THREADS / EACH;
    const unsigned thread = fresh_thread();
    to += thread / EACH * ld + thread % EACH * 2, from += 2 * thread;
#pragma unroll
    for (int i = 0; i < (int)(PIECES / THREADS); i++) {
        copy_later(to + i * (int)ROWS * ld, from + 2 * i * THREADS);
    }
    if (PIECES < THREADS && thread < PIECES) copy_later(to, from);
}

__device__ inline void close_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* All have arrived, and all threads of the block see it. */
__device__ inline void await_all_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}

/* All groups but the last one have arrived; others see that behind a barrier. */
__device__ inline void await_copies() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

/* That one too. */
__device__ inline void await_last_copies() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/* ---- cotangents ------------------------------------------------------------------------------ */

/* scale^2 dqvar of a token, or zero */
template <typename T>
__device__ inline double weight_of(const mn_bayes_args &p, const mn_tile_span &tile,
                                   const span_group &s, int t) {
    const T *x = mn_row<T>(p.cot.qvar, tile.span.b, tile.span.t0 + tile.first + t, s.h);
    if (!x || !p.q.data || t >= tile.n_rows) return 0.0;
    return p.scale * p.scale * (double)mn_float(x[s.g]);
}

/* Channel-wise Phi'dgainvec of a token: of row r. */
template <typename T>
__device__ inline double transposed_gain(const mn_bayes_args &p, const mn_tile_span &tile,
                                     const span_group &s, const double *phi, int t, int r,
                                     int rows, bool turns) {
    const T *x = mn_row<T>(p.cot.gainvec, tile.span.b, tile.span.t0 + tile.first + t, s.h);
    if (!x || t >= tile.n_rows || r >= rows) return 0.0;
    x += s.g * rows;
    if (!turns) return phi[r] * (double)mn_float(x[r]);
    const double other = (double)mn_float(x[r ^ 1]), mine = (double)mn_float(x[r]);
    return r % 2 == 0 ? phi[r] * mine + phi[r + 1] * other : phi[r - 1] * mine - phi[r] * other;
}

/* Hands out workspace one piece after the other, from `base` or, where that is NULL, to count
 * bytes. */
struct piecework {
    char *base;
    size_t used;
    bool ok;

    template <typename X>
    void take(X **to, int64_t a, int64_t b, int64_t c) {
        size_t count, bytes, smem;
        ok = ok && mn_mul_size(&count, (size_t)a, (size_t)b) &&
             mn_mul_size(&count, count, (size_t)c) && mn_mul_size(&bytes, count, sizeof(X)) &&
             mn_add_size(&smem, bytes, 15) && mn_add_size(&smem, smem / 16 * 16, used);
        *to = ok && base ? (X *)(base + used) : NULL;
        if (ok) used = smem;
    }
};

/* A redo of the gradients, and `again`, what its kernels have: cotangents and gradients of its own,
 * from `base` on. States and p_0 are not made again. */
inline mn_redo_grads redo_of(const mn_bayes_args &p, mn_bayes_args &again, void *base) {
    const int64_t K = p.call.K, V = p.call.V, G = p.call.G, R = K * (p.theta.data ? 2 : 1);
    mn_redo_grads redo = mn_redo_grads_of(p.call, base);
    again = p, again.grad.M0 = {}, again.grad.P0 = {}, again.grad.p0 = {};
    const struct { mn_in *view; int64_t width; } cots[] = {
        { &again.cot.o, V }, { &again.cot.gain, G }, { &again.cot.gainvec, G * R },
        { &again.cot.kvar, G }, { &again.cot.qvar, G },
    };
    const struct { mn_out *view; int64_t width; } grads[] = {
        { &again.grad.q, K }, { &again.grad.k, K }, { &again.grad.v, V }, { &again.grad.la, K },
        { &again.grad.theta, K }, { &again.grad.l2, 1 }, { &again.grad.r2, G },
    };
    for (const auto &x : cots) mn_redo_grads_cot(&redo, x.view, x.width);
    for (const auto &x : grads) mn_redo_grads_grad(&redo, x.view, x.width);
    return redo;
}

/* Results in rows 16 mb .. of a matrix: use(element, row within the 16, column) */
template <typename F>
__device__ inline void each_result(double (&c)[2][2], int column, F use) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        use(c[i / 2][i % 2], 8 * (i / 2) + lane / 4, column + 2 * (lane % 4) + i % 2);
    }
}

/* ---- scans side by side ---------------------------------------------------------------------- */

/* One thread says behind a barrier that all its block wrote before holds for `count` chunks. */
__device__ inline void say_left(int *to, int64_t count) {
    mn_store_release(to, (int)count);
}

/* One thread waits for that; its block sees it behind a barrier. `seen` is what it has seen so far:
 * a look takes as long as a read of memory, and often shows more than is asked for. */
__device__ inline void await_left(int &seen, const int *from, int64_t count) {
    while (seen < count) {
        seen = mn_load_acquire(from);
    }
}

/* ---- blocks of kernels that have all spans at once ------------------------------------------- */

/* use(slot * H + h) of a block's span and head, which its number says. In a redo a block has all
 * spans of a head of a sequence, so that launches without one have few blocks, which end; all
 * threads call. */
template <bool REDO, typename F>
__device__ inline void each_span(const mn_bayes_args &p, const span_work &w, int64_t block, F use) {
    if (!REDO) {
        use(block);
        return;
    }
    const int64_t H = p.call.H, n = block / H;
    if (w.steep[block]) return;
    const mn_span span = mn_span_at(p.call, n);
    const int64_t slot0 = first_slot(p.call, span, n), n_spans = n_spans_of(span);
    for (int64_t i = 0; i < n_spans; i++) {
        use((slot0 + i) * H + block % H);
        __syncthreads();
    }
}

/* How many: heads of spans, or of sequences. */
inline unsigned span_blocks(const mn_bayes_args *p, const span_work &w) {
    const int64_t spans = w.redo ? mn_n_spans(p->call) : mn_tile_slots(p->call, SPAN_TOKENS);
    return (unsigned)(spans * p->call.H);
}

/* ---- dk and dq of all spans (bayes_span_gemm.cu) --------------------------------------------- */

/* The most shared memory that the products take for states of R = 64 or 128 rows. */
size_t span_products_smem(int R, bool tight);

/* Stores dk and dq in the frame, but for the noise, in place of the first group's P, and dr2, of
 * all heads of spans. 0 or a cudaError_t. */
int span_products(const mn_bayes_args *p, const span_work &w, int R, bool tight, cudaStream_t on);

/* ---- preparing ------------------------------------------------------------------------------- */

/* A block has so many channels, for two of them to share a processor. */
enum { PREPARE_CHANNELS = 64, PREPARE_THREADS = SPAN_CHUNKS * PREPARE_CHANNELS };

__host__ __device__ inline int prepare_parts(const mn_call &call) {
    return 1 + ((int)call.K - 1) / PREPARE_CHANNELS;
}

/* Sums of the chunks of a span, by channels. */
struct chunk_sums {
    double level[SPAN_CHUNKS][PREPARE_CHANNELS], angle[SPAN_CHUNKS][PREPARE_CHANNELS];
    double rr[SPAN_CHUNKS][PREPARE_CHANNELS], ri[SPAN_CHUNKS][PREPARE_CHANNELS];
    double ii[SPAN_CHUNKS][PREPARE_CHANNELS];
    double next[SPAN_CHUNKS][PREPARE_CHANNELS];    // level of the next span
};

constexpr double MOST_SPAN_DECAY = 641.0;

/* A token's log decay; NaN stays. */
template <typename T>
__device__ inline float decay_of(T raw) {
    const float decay = mn_float(raw);
    return sizeof(T) == 2 && decay < -10.0f ? -10.0f : decay;
}

/* A over the one that a cut token has instead: its gradient is as much smaller. */
template <typename T>
__device__ inline double cut_of(T raw) {
    const float decay = mn_float(raw), by = decay_of<T>(raw);
    return decay < by ? exp((double)decay - (double)by) : 1.0;
}

/* By how much, as a logarithm, the frame of a span is larger that decays by `level` < 0. */
__device__ inline double span_centre(double level) {
    return level < -150.0 ? -0.5 * level : 0.0;
}

/* The level of a channel over the 16 tokens of the next span from `first` on. */
template <typename T>
__device__ inline double next_level(const mn_bayes_args &p, const mn_tile_span &tile, int64_t h,
                                    int64_t first, int channel) {
    const int64_t length = tile.span.length;
    double level = 0.0;
    if (first >= length) return level;
    T raw[CHUNK];
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        const int64_t t = tile.span.t0 + min(first + j, length - 1);
        raw[j] = mn_row<T>(p.la, tile.span.b, t, h)[channel];
    }
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        level += first + j < length ? (double)decay_of<T>(raw[j]) : 0.0;
    }
    return level;
}

/* (c, -s) for Phi^-1 = ((c, s), (-s, c)) of a channel: l2 times its square is the noise of a token,
 * rr in the real row, ii in the other, ri across. */
template <bool TURNS>
__device__ inline double2 noise_row(double2 phi) {
    if (!TURNS) return make_double2(mn_rcp_f64(phi.x), 0.0);
    const double inverse = mn_rcp_f64(phi.x * phi.x + phi.y * phi.y);
    return make_double2(phi.x * inverse, -phi.y * inverse);
}

struct noise_sums {
    double rr, ri, ii;

    template <bool TURNS>
    __device__ void add(double2 row, double l2) {
        rr += l2 * row.x * row.x;
        if (TURNS) ri += l2 * row.x * row.y, ii += l2 * row.y * row.y;
    }

    /* where channels' diagonals and, R further on, their rests begin */
    template <bool TURNS>
    __device__ void put(double *to, int R) const {
        to[0] = rr, to[R] = ri;
        if (TURNS) to[1] = ii, to[R + 1] = ri;
    }
};

/* Zeros beyond the state's rows, and r2 of all groups. */
template <typename T>
__device__ inline void prepare_rest(const mn_bayes_args &p, const span_work &w,
                                    const mn_tile_span &tile, int64_t head, int64_t h, int rows,
                                    int R) {
    const int64_t G = p.call.G;
    for (int j = threadIdx.x; j < SPAN_TOKENS * (R - rows); j += PREPARE_THREADS) {
        const int64_t at = (head * SPAN_TOKENS + j / (R - rows)) * R + rows + j % (R - rows);
        w.phi[at] = w.k[at] = w.q[at] = w.nk[at] = 0.0;
    }
    for (int j = rows + (int)threadIdx.x; j < R; j += PREPARE_THREADS) {
        w.enter[head * R + j] = w.leave[head * R + j] = 0.0;
    }
    double *noise = w.noise + head * (SPAN_CHUNKS + 1) * 2 * R;
    for (int j = threadIdx.x; j < 2 * (SPAN_CHUNKS + 1) * (R - rows); j += PREPARE_THREADS) {
        noise[j / (R - rows) * R + rows + j % (R - rows)] = 0.0;
    }
    for (int64_t j = threadIdx.x; j < SPAN_TOKENS * G; j += PREPARE_THREADS) {
        const int64_t g = j / SPAN_TOKENS, t = j % SPAN_TOKENS;
        const T *r2 = mn_row<T>(p.r2, tile.span.b, tile.span.t0 + tile.first + t, h);
        w.r2[(head * G + g) * SPAN_TOKENS + t] = t < tile.n_rows ? (double)mn_float(r2[g]) : 1.0;
    }
}

/* Phi_t, kh, qh, n_t kh_t, n and r2 of a head of a span; one thread has one channel of a chunk. */
template <typename T, bool TURNS>
__device__ static void prepare_span(chunk_sums &sums, const mn_bayes_args &p, const span_work &w,
                                    int R, int64_t head) {
    const int64_t H = p.call.H, h = head % H;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || (w.redo && w.steep[tile.n * H + h])) return;
    const int K = (int)p.call.K, part = (int)blockIdx.x % prepare_parts(p.call);
    const int c = threadIdx.x / PREPARE_CHANNELS, own = threadIdx.x % PREPARE_CHANNELS;
    const int i = part * PREPARE_CHANNELS + own;
    const int64_t b = tile.span.b, t0 = tile.span.t0 + tile.first;
    const int n_rows = i < K ? (int)tile.n_rows : 0, channel = min(i, K - 1);
    const bool requests = p.q.data != NULL;
    const mn_in &queries = requests ? p.q : p.k, &angles = TURNS ? p.theta : p.la;
    double2 phi[CHUNK];
    float l2[CHUNK], k[CHUNK], q[CHUNK];
    double level = 0.0, angle = 0.0;
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        /* A load that a condition guards would wait for the one before. */
        const int64_t t = t0 + min(c * CHUNK + j, (int)tile.n_rows - 1);
        const float decay = decay_of<T>(mn_row<T>(p.la, b, t, h)[channel]);
        const float by = TURNS ? mn_float(mn_row<T>(angles, b, t, h)[channel]) : 0.0f;
        l2[j] = mn_float(*mn_row<T>(p.l2, b, t, h));
        k[j] = mn_float(mn_row<T>(p.k, b, t, h)[channel]);
        q[j] = mn_float(mn_row<T>(queries, b, t, h)[channel]);
        phi[j] = make_double2((double)decay, (double)by);
    }
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        const bool there = c * CHUNK + j < n_rows;
        if (!there) phi[j] = make_double2(0.0, 0.0), l2[j] = k[j] = 0.0f;
        if (!there || !requests) q[j] = 0.0f;
        level += phi[j].x, angle += phi[j].y;
    }
    sums.level[c][own] = level, sums.angle[c][own] = angle;
    sums.next[c][own] = next_level<T>(p, tile, h, tile.first + SPAN_TOKENS + c * CHUNK, channel);
    __syncthreads();
    level = angle = 0.0;
    for (int j = 0; j < c; j++) level += sums.level[j][own], angle += sums.angle[j][own];
    double all = 0.0, next = 0.0;
#pragma unroll
    for (int j = 0; j < SPAN_CHUNKS; j++) all += sums.level[j][own], next += sums.next[j][own];
    const double centre = i < K ? span_centre(all) : 0.0;
    noise_sums n = { 0.0, 0.0, 0.0 };
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        level += phi[j].x, angle += phi[j].y;
        const double size = exp(level + centre);
        phi[j] = make_double2(size, 0.0);
        if (TURNS) {
            double sine, cosine;
            sincos(angle, &sine, &cosine);
            phi[j] = make_double2(size * cosine, size * sine);
        }
        n.add<TURNS>(noise_row<TURNS>(phi[j]), (double)l2[j]);
    }
    if (i < K && !(level > -MOST_SPAN_DECAY)) w.steep[tile.n * H + h] = 1;
    sums.rr[c][own] = n.rr, sums.ri[c][own] = n.ri, sums.ii[c][own] = n.ii;
    __syncthreads();
    n.rr = n.ri = n.ii = 0.0;
    for (int j = 0; j < c; j++) {
        n.rr += sums.rr[j][own], n.ri += sums.ri[j][own], n.ii += sums.ii[j][own];
    }
    const int r = i * (TURNS ? 2 : 1);
    double *noise = w.noise + head * (SPAN_CHUNKS + 1) * 2 * R + r;
    if (part == 0) prepare_rest<T>(p, w, tile, head, h, K * (TURNS ? 2 : 1), R);
    if (i >= K) return;
    n.put<TURNS>(noise + c * 2 * R, R);
    if (c == SPAN_CHUNKS - 1) {
        const double enters = exp(-centre), by = exp(-span_centre(next));
        double *enter = w.enter + head * R + r, *leave = w.leave + head * R + r;
        enter[0] = enters, leave[0] = phi[CHUNK - 1].x * by;
        if (TURNS) enter[1] = enters, leave[1] = phi[CHUNK - 1].y * by;
    }
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        const int64_t at = (head * SPAN_TOKENS + c * CHUNK + j) * R + r;
        const double re = phi[j].x, im = phi[j].y, key = (double)k[j], query = (double)q[j];
        n.add<TURNS>(noise_row<TURNS>(phi[j]), (double)l2[j]);
        if (!TURNS) {
            w.phi[at] = re, w.k[at] = re * key, w.q[at] = re * query;
            w.nk[at] = n.rr * (re * key);
            continue;
        }
        *(double2 *)(w.phi + at) = phi[j];
        *(double2 *)(w.k + at) = make_double2(re * key, -im * key);
        *(double2 *)(w.q + at) = make_double2(re * query, -im * query);
        *(double2 *)(w.nk + at) = make_double2((n.rr * re - n.ri * im) * key,
                                               (n.ri * re - n.ii * im) * key);
    }
    if (c == SPAN_CHUNKS - 1) n.put<TURNS>(noise + SPAN_CHUNKS * 2 * R, R);
}

template <typename T, bool TURNS, bool REDO>
__global__ void __launch_bounds__(PREPARE_THREADS, 2)
span_prepare_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w,
                    int R) {
    __shared__ chunk_sums sums;
    each_span<REDO>(p, w, blockIdx.x / prepare_parts(p.call), [&](int64_t head) {
        prepare_span<T, TURNS>(sums, p, w, R, head);
    });
}

}    // namespace mneme::bayes

#endif
