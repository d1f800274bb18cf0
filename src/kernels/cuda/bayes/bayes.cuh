/* bayes.cuh - chunks of the Bayesian Layer in double on tensor cores, in a frame that decays and
 * turns with the state. Definition in ref/bayes.c.
 *
 * With Phi_t the product of A since the frame began, P = Phi (Ph + N) Phi' and M = Phi Mh, where Ph
 * and Mh change by what tokens write alone. A chunk of 16 tokens, kh_t = Phi_t'k_t, qh_t =
 * Phi_t'q_t, n_t = sums of l2 Phi^-1 N Phi^-T, rows being tokens:
 *
 *   B_t = Ph kh_t + n_t kh_t     S_st = B_s.kh_t (s <= t)     S + diag r2 = G' diag(1/sigma) G
 *   z_t = B_t - sum_{s<t} z_s G_st / sigma_s                  u_t = Phi_t z_t
 *   e_t = v_t - Mh'kh_t - sum_{s<t} e_s G_st / sigma_s
 *   o_t = Mh'qh_t + sum_{s<=t} e_s (z_s.qh_t) / sigma_s
 *   Ph <- Ph + n - sum z_s z_s' / sigma_s          Mh <- Mh + sum z_s e_s' / sigma_s
 *
 * sigma_t = r2_t + k'u. Everything is double: float32 loses P once exact writes have shrunk it, and
 * these GPUs multiply doubles at half its rate. Going back, each chunk has a frame, or each token
 * of one in which a channel decays by more than e^-40; bayes_fwd_wide.cu has frames of several
 * chunks. Where one ends P <- Phi P Phi'. Scaling rows and columns costs no digits.
 *
 * A block of 16 warps has one noise group of one head of one sequence. P lies in tiles of 8 x 8,
 * two numbers for each lane: row l / 4, columns 2 (l % 4) and the next, as products leave it. The
 * same numbers are the right factor of the next product, rows read as columns, if the left one's
 * columns are taken in the order 0 2 4 6 1 3 5 7. Mh' lies alike, value columns being its rows. Up
 * to R = 128, P is in registers, row block w in warp w; beyond it is in memory. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_CUH

#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/prim/fmax.cuh"
#include "kernels/cuda/prim/mma_f64.cuh"

namespace mneme::bayes {

enum {
    MN_BAYES_CHUNK = 16, MN_BAYES_WARPS = 16, MN_BAYES_THREADS = 512,
    MN_BAYES_TILES = 16,      // row blocks of 8 in registers
    MN_BAYES_WIDEST = 512,    // R
};

/* Sizes of a block's work. */
struct mn_bayes_shape {
    int K, R, step, nb;          // channels, rows, rows of a channel, blocks of 8 rows
    int first, columns, nm;      // value columns of the group, blocks of 8 of them
    int64_t n, h, g;
    mn_span span;
    bool turns, reads;           // theta; qvar or o is wanted

    __device__ int pitch() const { return 8 * nb + 8; }      // left factors
    __device__ int pitch_z() const { return 8 * nb + 4; }    // right factors
    __device__ int pitch_e() const { return 8 * nm + 4; }
};

/* Bytes of shared memory that a block may have on the device in use. */
inline size_t mn_bayes_most_shared(void) {
    const size_t bytes = (size_t)mn_device_props_current().shared_bytes;
    return bytes > 0 ? bytes - 1024 : 0;    // some is taken already
}

/* Buffers of a chunk, in doubles: in shared memory, or in the workspace where they are too large
 * for it. */
struct mn_bayes_smem {
    double *k, *q, *z, *zq;              // 16 rows
    double *phi;                         // 16 rows of 8 nb: Phi_t, or its two parts
    double *level;                       // log decay and angle of the frame, by rows
    double *noise, *cross;               // n at the chunk's end: diagonal, and inside pairs
    double *parts, *qparts;              // 4 (16,16); 16 (16)
    double *coef, *read;                 // (16,16): G_st / sigma_s; z_s.qh_t / sigma_s
    double *sigma, *inverse, *r2, *variance;    // 16
    double *given_r2, *given_l2;         // 16, of the raw tokens
    double *e, *o;                       // 16 rows of pitch_e
    double *M;                           // nm x nb tiles, or elsewhere
    float *raw;                          // 4 x 16 x K: k, q, la, theta
};

__host__ __device__ inline int64_t mn_bayes_doubles(int nb, int nm, int K, bool mean_inside) {
    int64_t count = 2 * 16 * (8 * nb + 8) + 2 * 16 * (8 * nb + 4) + 16 * 8 * nb + 3 * 8 * nb;
    count += 4 * 256 + 256 + 256 + 256 + 6 * 16 + 2 * 16 * (8 * nm + 4);
    count += (4 * 16 * (int64_t)K + 1) / 2;
    return count + (mean_inside ? (int64_t)nm * nb * 64 : 0) + 8;
}

__device__ inline mn_bayes_smem mn_bayes_smem_in(double *at, const mn_bayes_shape &s,
                                                 double *mean_elsewhere) {
    mn_bayes_smem r;
    const auto take = [&](int count) { double *from = at; at += (count + 1) / 2 * 2; return from; };
    r.k = take(16 * s.pitch()), r.q = take(16 * s.pitch());
    r.z = take(16 * s.pitch_z()), r.zq = take(16 * s.pitch_z());
    r.phi = take(16 * 8 * s.nb), r.level = take(8 * s.nb);
    r.noise = take(8 * s.nb), r.cross = take(8 * s.nb);
    r.parts = take(4 * 256), r.qparts = take(256), r.coef = take(256), r.read = take(256);
    r.sigma = take(16), r.inverse = take(16), r.r2 = take(16), r.variance = take(16);
    r.given_r2 = take(16), r.given_l2 = take(16);
    r.e = take(16 * s.pitch_e()), r.o = take(16 * s.pitch_e());
    r.raw = (float *)take(2 * 16 * s.K);
    r.M = mean_elsewhere ? mean_elsewhere : at;
    return r;
}

/* tile (8,8) += (8,16) (16,8): lane l gives row l / 4 and column l / 4 at tokens l % 4 + 4 i. */
__device__ inline void mn_mma_f64_tile(double (&tile)[2], const double (&a)[4],
                                       const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
    double c[2][2] = { { tile[0], tile[1] }, { 0.0, 0.0 } };
    const double wide[8] = { a[0], 0.0, a[1], 0.0, a[2], 0.0, a[3], 0.0 };
    mn_mma_f64_k16(c, wide, b);
    tile[0] = c[0][0], tile[1] = c[0][1];
#else
    for (int i = 0; i < 4; i++) mn_mma_f64_k4(tile, a[i], b[i]);
#endif
}

/* Tiles of P that a warp holds, or where they are. */
template <bool LARGE>
struct mn_bayes_tiles {
    double at[LARGE ? 1 : MN_BAYES_TILES][2];
    double *memory;    // LARGE: nb x nb tiles of 64

    /* use(tile, row block, column block) for all tiles of the warp, which it may change if it
     * says so */
    template <typename F>
    __device__ void each(const mn_bayes_shape &s, F use, bool changes = true) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int b = 0; b < (LARGE ? 0 : MN_BAYES_TILES); b++) {
            if (warp < s.nb && b < s.nb) use(at[b], warp, b);
        }
        for (int a = LARGE ? warp : s.nb; a < s.nb; a += MN_BAYES_WARPS) {
            for (int b = 0; b < s.nb; b++) {
                double2 *place = (double2 *)(memory + ((int64_t)a * s.nb + b) * 64) + lane;
                double tile[2] = { place->x, place->y };
                use(tile, a, b);
                if (changes) *place = make_double2(tile[0], tile[1]);
            }
        }
    }
};

/* Row and first column of what this lane has of a tile. */
__device__ inline int mn_tile_row(int a) {
    return 8 * a + (int)(threadIdx.x % 32) / 4;
}

__device__ inline int mn_tile_column(int b) {
    return 8 * b + 2 * (int)(threadIdx.x % 4);
}

/* ---- the frame ------------------------------------------------------------------------------- */

/* x <- the pair (x, y) of a column, row 2i and 2i + 1 being `row` and its neighbour, by Phi */
__device__ inline void mn_bayes_turn(double &re, double &im, double c, double s) {
    const double x = re, y = im;
    re = c * x - s * y;
    im = s * x + c * y;
}

/* Phi from its logarithms into `phi` (8 nb), for rebasing. */
__device__ inline void mn_bayes_frame(double *phi, const double *level, const mn_bayes_shape &s) {
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        const int r = i * s.step;
        const double size = exp(level[r]);
        if (!s.turns) {
            phi[r] = size;
        } else {
            double sine, cosine;
            sincos(level[r + 1], &sine, &cosine);
            phi[r] = size * cosine, phi[r + 1] = size * sine;
        }
    }
}

/* The tile's columns, and its rows, by Phi (`back`: by Phi'). */
__device__ inline void mn_bayes_move_columns(double (&x)[2], const double *phi, int b, bool turns,
                                             bool back) {
    const int j = mn_tile_column(b);
    if (turns) mn_bayes_turn(x[0], x[1], phi[j], back ? -phi[j + 1] : phi[j + 1]);
    else x[0] *= phi[j], x[1] *= phi[j + 1];
}

__device__ inline void mn_bayes_move_rows(double (&x)[2], const double *phi, int a, bool turns,
                                          bool back) {
    const int i = mn_tile_row(a), even = i / 2 * 2;
    if (!turns) {
        x[0] *= phi[i], x[1] *= phi[i];
        return;
    }
    const double c = phi[even], s = back ? -phi[even + 1] : phi[even + 1];
    const double sign = i % 2 ? s : -s;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const double other = __shfl_xor_sync(0xffffffffu, x[k], 4);
        x[k] = c * x[k] + sign * other;
    }
}

/* Units of Mh' tiles: use(tile, value block, row block) by all warps. */
template <typename F>
__device__ inline void mn_bayes_each_mean(double *M, const mn_bayes_shape &s, F use) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < s.nm * s.nb; i += MN_BAYES_WARPS) {
        double2 *place = (double2 *)(M + (int64_t)i * 64) + lane;
        double tile[2] = { place->x, place->y };
        use(tile, i / s.nb, i % s.nb);
        *place = make_double2(tile[0], tile[1]);
    }
}

/* The frame begins anew: states by Phi, levels 0. All threads call; phi's first row is used. */
template <bool LARGE>
__device__ void mn_bayes_rebase(mn_bayes_tiles<LARGE> &P, const mn_bayes_smem &smem,
                                const mn_bayes_shape &s) {
    for (int i = threadIdx.x; i < 8 * s.nb; i += MN_BAYES_THREADS) smem.phi[i] = 0.0;
    __syncthreads();
    mn_bayes_frame(smem.phi, smem.level, s);
    __syncthreads();
    P.each(s, [&](double (&x)[2], int a, int b) {
        mn_bayes_move_columns(x, smem.phi, b, s.turns, false);
        mn_bayes_move_rows(x, smem.phi, a, s.turns, false);
    });
    mn_bayes_each_mean(smem.M, s, [&](double (&x)[2], int, int b) {
        mn_bayes_move_columns(x, smem.phi, b, s.turns, false);
    });
    for (int i = threadIdx.x; i < 8 * s.nb; i += MN_BAYES_THREADS) smem.level[i] = 0.0;
    __syncthreads();
}

/* ---- a chunk's inputs ------------------------------------------------------------------------ */

/* Raw k, q, la and theta of tokens [t, t + count), zeros beyond. */
template <typename T>
__device__ void mn_bayes_load_tile(const mn_bayes_smem &smem, const mn_bayes_args &p,
                               const mn_bayes_shape &s, int64_t t, int count) {
    constexpr int AHEAD = 4;    // loads of a thread before it stores
    const int size = MN_BAYES_CHUNK * s.K;
    for (int first = threadIdx.x; first < size; first += AHEAD * MN_BAYES_THREADS) {
        float x[AHEAD][4];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int at = first + j * MN_BAYES_THREADS, token = at / s.K, i = at % s.K;
            const bool there = at < size && token < count;
            const int64_t b = s.span.b, when = s.span.t0 + t + token;
            x[j][0] = there ? mn_float(mn_row<T>(p.k, b, when, s.h)[i]) : 0.0f;
            x[j][1] = there ? mn_get(mn_row<T>(p.q, b, when, s.h), i) : 0.0f;
            x[j][2] = there ? mn_float(mn_row<T>(p.la, b, when, s.h)[i]) : 0.0f;
            x[j][3] = there ? mn_get(mn_row<T>(p.theta, b, when, s.h), i) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int at = first + j * MN_BAYES_THREADS;
#pragma unroll
            for (int which = 0; which < 4 && at < size; which++) {
                smem.raw[which * size + at] = x[j][which];
            }
        }
    }
    if (threadIdx.x < MN_BAYES_CHUNK) {
        const int i = threadIdx.x;
        const int64_t b = s.span.b, when = s.span.t0 + t + i;
        smem.given_l2[i] = i < count ? (double)mn_float(*mn_row<T>(p.l2, b, when, s.h)) : 0.0;
        smem.given_r2[i] = i < count ? (double)mn_float(mn_row<T>(p.r2, b, when, s.h)[s.g]) : 1.0;
    }
}

/* Whether a channel decays by more than e^-40 within the chunk. */
__device__ inline bool mn_bayes_is_steep(const mn_bayes_smem &smem, const mn_bayes_shape &s) {
    int steep = 0;
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        double sum = 0.0;
        const float *la = smem.raw + 2 * MN_BAYES_CHUNK * s.K + i;
        for (int t = 0; t < MN_BAYES_CHUNK; t++) sum += (double)la[t * s.K];
        steep |= !(sum > -40.0);
    }
    return __syncthreads_or(steep) != 0;
}

/* Phi_t, kh, qh and the weights of the noise of tokens [first, first + count) of the raw chunk, as
 * tokens 0 to 15 of shared memory. Four threads share a channel. `still`: the frame does not
 * move. */
__device__ __noinline__ static void mn_bayes_prepare(const mn_bayes_smem &smem,
                                                     const mn_bayes_shape &s, int first,
                                                     int count, bool still) {
    const int size = MN_BAYES_CHUNK * s.K, quarter = threadIdx.x / 128 * 4;
    const int ld = s.pitch(), ld_z = s.pitch_z(), rows = 8 * s.nb;
    if (threadIdx.x < MN_BAYES_CHUNK) {
        const int t = threadIdx.x;
        smem.r2[t] = t < count ? smem.given_r2[first + t] : 1.0;
    }
    for (int i = threadIdx.x % 128; i < s.K; i += 128) {
        const int r = i * s.step;
        double level = smem.level[r], angle = s.turns ? smem.level[r + 1] : 0.0;
        for (int t = 0; t < quarter; t++) {
            const int at = (first + t) * s.K + i;
            if (still || t >= count) break;
            level += (double)smem.raw[2 * size + at];
            angle += (double)smem.raw[3 * size + at];
        }
        double scale[4], turn[4], k[4], q[4], l2[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int t = quarter + j, at = (first + t) * s.K + i;
            const bool there = t < count;
            if (there && !still) {
                level += (double)smem.raw[2 * size + at];
                angle += (double)smem.raw[3 * size + at];
            }
            scale[j] = level, turn[j] = angle;
            k[j] = there ? (double)smem.raw[at] : 0.0;
            q[j] = there ? (double)smem.raw[size + at] : 0.0;
            l2[j] = there ? smem.given_l2[first + t] : 0.0;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) scale[j] = exp(scale[j]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int t = quarter + j;
            const double square = 1.0 / (scale[j] * scale[j]);
            double re = scale[j], im = 0.0;
            if (s.turns) {
                double sine, cosine;
                sincos(turn[j], &sine, &cosine);
                re = scale[j] * cosine, im = scale[j] * sine;
            }
            smem.phi[t * rows + r] = re;
            smem.k[t * ld + r] = re * k[j];
            smem.q[t * ld + r] = re * q[j];
            smem.z[t * ld_z + r] = l2[j] * square;
            if (s.turns) {
                smem.phi[t * rows + r + 1] = im;
                smem.k[t * ld + r + 1] = -im * k[j];
                smem.q[t * ld + r + 1] = -im * q[j];
                smem.z[t * ld_z + r + 1] = square;
            }
        }
    }
}

/* n_t kh_t and n_t qh_t in place of the weights; n at the end. One thread has one channel. */
__device__ __noinline__ static void mn_bayes_add_noise(const mn_bayes_smem &smem,
                                                       const mn_bayes_shape &s) {
    const int ld = s.pitch(), ld_z = s.pitch_z(), rows = 8 * s.nb;
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        const int r = i * s.step;
        double rr = 0.0, ri = 0.0, ii = 0.0;
        for (int first = 0; !s.turns && first < MN_BAYES_CHUNK; first += 8) {
            double w[8], k[8], q[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                w[j] = smem.z[(first + j) * ld_z + r];
                k[j] = smem.k[(first + j) * ld + r], q[j] = smem.q[(first + j) * ld + r];
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                rr += w[j];
                smem.z[(first + j) * ld_z + r] = rr * k[j];
                smem.zq[(first + j) * ld_z + r] = rr * q[j];
            }
        }
        for (int t = 0; s.turns && t < MN_BAYES_CHUNK; t++) {
            double *z = smem.z + t * ld_z + r, *zq = smem.zq + t * ld_z + r;
            const double *k = smem.k + t * ld + r, *q = smem.q + t * ld + r;
            const double re = smem.phi[t * rows + r], im = smem.phi[t * rows + r + 1];
            const double weight = z[0] * z[1];    // l2 / |Phi|^4
            rr += weight * re * re, ri -= weight * re * im, ii += weight * im * im;
            z[0] = rr * k[0] + ri * k[1], z[1] = ri * k[0] + ii * k[1];
            zq[0] = rr * q[0] + ri * q[1], zq[1] = ri * q[0] + ii * q[1];
        }
        smem.noise[r] = rr;
        if (s.turns) smem.noise[r + 1] = ii, smem.cross[r] = ri, smem.cross[r + 1] = ri;
    }
}

/* Zeros in all rows and beyond the state's. */
__device__ inline void mn_bayes_clear(const mn_bayes_smem &smem, const mn_bayes_shape &s) {
    for (int i = threadIdx.x; i < 16 * s.pitch(); i += MN_BAYES_THREADS) {
        smem.k[i] = smem.q[i] = 0.0;
    }
    for (int i = threadIdx.x; i < 16 * s.pitch_z(); i += MN_BAYES_THREADS) {
        smem.z[i] = smem.zq[i] = 0.0;
    }
    for (int i = threadIdx.x; i < 16 * s.pitch_e(); i += MN_BAYES_THREADS) {
        smem.e[i] = smem.o[i] = 0.0;
    }
    for (int i = threadIdx.x; i < 8 * s.nb; i += MN_BAYES_THREADS) {
        smem.level[i] = smem.noise[i] = smem.cross[i] = 0.0;
    }
    for (int i = threadIdx.x; i < 16 * 8 * s.nb; i += MN_BAYES_THREADS) smem.phi[i] = 0.0;
}

/* ---- products -------------------------------------------------------------------------------- */

/* rows of 16 tokens of `left` with the tile's rows: c[m] (tokens 8 m .., rows of the block) */
__device__ inline void mn_bayes_left(double (&c)[2][2], const double *left, int ld,
                                     const double (&tile)[2], int b) {
    const int lane = threadIdx.x % 32;
    const double *at = left + lane / 4 * ld + 8 * b + 2 * (lane % 4);
    const double2 upper = *(const double2 *)at, lower = *(const double2 *)(at + 8 * ld);
    const double a[4] = { upper.x, lower.x, upper.y, lower.y };
    mn_mma_f64_k8(c, a, tile);
}

/* x.y for all pairs of the 16 rows of two tiles in shared memory: of the first eight warps, w has
 * quarter w / 2 of the sums for half w % 2 of y's rows; parts are added by mn_bayes_whole. */
__device__ inline void mn_bayes_gram(double *parts, const double *x, int ld_x, const double *y,
                                     int ld_y, int nb) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = warp % 2 * 8;
    if (warp >= 8) return;
    double c[2][2] = { { 0.0, 0.0 }, { 0.0, 0.0 } };
    const double *upper = x + lane / 4 * ld_x + lane % 4, *lower = upper + 8 * ld_x;
    const double *from = y + (column + lane / 4) * ld_y + lane % 4;
    for (int i = warp / 2; i < nb; i += 4) {
        const double a[4] = { upper[8 * i], lower[8 * i], upper[8 * i + 4], lower[8 * i + 4] };
        const double b[2] = { from[8 * i], from[8 * i + 4] };
        mn_mma_f64_k8(c, a, b);
    }
    double *to = parts + warp / 2 * 256 + lane / 4 * 16 + column + 2 * (lane % 4);
    to[0] = c[0][0], to[1] = c[0][1], to[128] = c[1][0], to[129] = c[1][1];
}

__device__ inline double mn_bayes_whole(const double *parts, int i) {
    return (parts[i] + parts[256 + i]) + (parts[512 + i] + parts[768 + i]);
}

/* B in place of z; qh.(Ph + n)qh by parts of 8 rows. */
template <bool LARGE>
__device__ void mn_bayes_through(mn_bayes_tiles<LARGE> &P, const mn_bayes_smem &smem,
                                 const mn_bayes_shape &s, bool qvar) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ld = s.pitch(), ld_z = s.pitch_z();
    double sums[4] = { 0.0, 0.0, 0.0, 0.0 };    // tokens lane / 4 + 8 m: of q
    double c[2][2], cq[2][2];
    P.each(s, [&](double (&tile)[2], int a, int b) {
        const int r = mn_tile_column(a);
        if (b == 0) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const double2 z = *(const double2 *)(smem.z + (8 * m + lane / 4) * ld_z + r);
                c[m][0] = z.x, c[m][1] = z.y;
                const double2 zq = *(const double2 *)(smem.zq + (8 * m + lane / 4) * ld_z + r);
                cq[m][0] = zq.x, cq[m][1] = zq.y;
            }
        }
        mn_bayes_left(c, smem.k, ld, tile, b);
        if (qvar) mn_bayes_left(cq, smem.q, ld, tile, b);
        if (b != s.nb - 1) return;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int t = 8 * m + lane / 4;
            *(double2 *)(smem.z + t * ld_z + r) = make_double2(c[m][0], c[m][1]);
            const double2 q = *(const double2 *)(smem.q + t * ld + r);
            sums[m] += cq[m][0] * q.x + cq[m][1] * q.y;
        }
    }, false);
    if (!qvar) return;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        sums[m] += __shfl_xor_sync(0xffffffffu, sums[m], 1);
        sums[m] += __shfl_xor_sync(0xffffffffu, sums[m], 2);
        if (lane % 4 == 0) smem.qparts[warp * 16 + 8 * m + lane / 4] = sums[m];
    }
}

/* Mh'kh and Mh'qh: e and o from the mean, by the warps from `first_warp` on. */
__device__ inline void mn_bayes_read_mean(const mn_bayes_smem &smem, const mn_bayes_shape &s,
                                          int first_warp) {
    const int warp = threadIdx.x / 32 - first_warp, lane = threadIdx.x % 32;
    const int n_warps = MN_BAYES_WARPS - first_warp, ld_e = s.pitch_e();
    if (warp < 0) return;
    for (int unit = warp; unit < 2 * s.nm; unit += n_warps) {
        const int j = unit / 2;
        const bool query = unit % 2;
        if (query && !s.reads) continue;
        double c[2][2] = { { 0.0, 0.0 }, { 0.0, 0.0 } };
        for (int b = 0; b < s.nb; b++) {
            const double2 x = *((const double2 *)(smem.M + ((int64_t)j * s.nb + b) * 64) + lane);
            const double tile[2] = { x.x, x.y };
            mn_bayes_left(c, query ? smem.q : smem.k, s.pitch(), tile, b);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            double *to = (query ? smem.o : smem.e) + (8 * m + lane / 4) * ld_e + mn_tile_column(j);
            if (query) to[0] = c[m][0], to[1] = c[m][1];
            else to[0] -= c[m][0], to[1] -= c[m][1];
        }
    }
}

/* S + diag r2 = G'diag(1/sigma) G by one warp: lane t has column t. Rows of S come first. */
__device__ __noinline__ static void mn_bayes_factor(const mn_bayes_smem &smem) {
    const int t = threadIdx.x % 16;
    double column[MN_BAYES_CHUNK];
#pragma unroll
    for (int i = 0; i < MN_BAYES_CHUNK; i++) {
        column[i] = mn_bayes_whole(smem.parts, i <= t ? i * 16 + t : t * 16 + i);
    }
#pragma unroll
    for (int j = 0; j < MN_BAYES_CHUNK; j++) {
        const double variance = mn_fmax(__shfl_sync(0xffffffffu, column[j], j), 0.0);
        const double sigma = smem.r2[j] + variance, inverse = 1.0 / sigma;
        const double factor = column[j] * inverse;
        if (threadIdx.x == 0) {
            smem.variance[j] = variance, smem.sigma[j] = sigma, smem.inverse[j] = inverse;
        }
        if (threadIdx.x < 16) smem.coef[j * 16 + t] = t > j ? factor : 0.0;
#pragma unroll
        for (int i = j + 1; i < MN_BAYES_CHUNK; i++) {
            const double other = __shfl_sync(0xffffffffu, column[j], i);
            column[i] -= other * factor;
        }
    }
}

/* z from B and e from its start: one thread has one column of either. */
__device__ __noinline__ static void mn_bayes_solve(const mn_bayes_smem &smem,
                                                   const mn_bayes_shape &s) {
    const int rows = 8 * s.nb, all = rows + 8 * s.nm;
    for (int i = threadIdx.x; i < all; i += MN_BAYES_THREADS) {
        double *at = i < rows ? smem.z + i : smem.e + i - rows, x[MN_BAYES_CHUNK];
        const int ld = i < rows ? s.pitch_z() : s.pitch_e();
#pragma unroll
        for (int t = 0; t < MN_BAYES_CHUNK; t++) x[t] = at[t * ld];
#pragma unroll
        for (int j = 0; j < MN_BAYES_CHUNK - 1; j++) {
#pragma unroll
            for (int t = j + 1; t < MN_BAYES_CHUNK; t++) x[t] -= smem.coef[j * 16 + t] * x[j];
        }
#pragma unroll
        for (int t = 1; t < MN_BAYES_CHUNK; t++) at[t * ld] = x[t];
    }
}

/* Ph and Mh behind the chunk. */
template <bool LARGE>
__device__ void mn_bayes_write(mn_bayes_tiles<LARGE> &P, const mn_bayes_smem &smem,
                               const mn_bayes_shape &s) {
    const int lane = threadIdx.x % 32, ld_z = s.pitch_z(), ld_e = s.pitch_e();
    double a_of[4];
    P.each(s, [&](double (&tile)[2], int a, int b) {
        if (b == 0) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int t = 4 * i + lane % 4;
                a_of[i] = -smem.z[t * ld_z + 8 * a + lane / 4] * smem.inverse[t];
            }
        }
        if (a == b) {
            const int row = mn_tile_row(a), column = mn_tile_column(b);
            if (row == column) tile[0] += smem.noise[row];
            if (row == column + 1) tile[1] += smem.noise[row];
            if (s.turns && row == column) tile[1] += smem.cross[row];
            if (s.turns && row == column + 1) tile[0] += smem.cross[row];
        }
        double b_of[4];
#pragma unroll
        for (int i = 0; i < 4; i++) b_of[i] = smem.z[(4 * i + lane % 4) * ld_z + 8 * b + lane / 4];
        mn_mma_f64_tile(tile, a_of, b_of);
    });
    mn_bayes_each_mean(smem.M, s, [&](double (&tile)[2], int a, int b) {
        double left[4], right[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = 4 * i + lane % 4;
            left[i] = smem.e[t * ld_e + 8 * a + lane / 4] * smem.inverse[t];
            right[i] = smem.z[t * ld_z + 8 * b + lane / 4];
        }
        mn_mma_f64_tile(tile, left, right);
    });
}

/* ---- a whole chunk --------------------------------------------------------------------------- */

/* Values of tokens [t, t + count) into e. */
template <typename T>
__device__ void mn_bayes_values(const mn_bayes_smem &smem, const mn_bayes_args &p,
                                const mn_bayes_shape &s, int64_t t, int count) {
    const int ld = s.pitch_e(), width = 8 * s.nm;
    for (int at = threadIdx.x; at < MN_BAYES_CHUNK * width; at += MN_BAYES_THREADS) {
        const int token = at / width, j = at % width;
        const T *v = mn_row<T>(p.v, s.span.b, s.span.t0 + t + token, s.h);
        const bool there = token < count && j < s.columns;
        smem.e[token * ld + j] = there ? (double)mn_float(v[s.first + j]) : 0.0;
    }
}

/* A P that was handed in, rounded to float32, may be indefinite by as much; where the first key or
 * the noise of its write shows that, the diagonal is raised by a few roundings (see ref/bayes.c).
 * `diagonal` and `pairs` are of P_0. Returns whether it has been. All threads call. */
template <bool LARGE>
__device__ bool mn_bayes_raise(mn_bayes_tiles<LARGE> &P, const mn_bayes_smem &smem,
                               const mn_bayes_shape &s) {
    const double few = 8.0 * 0x1p-24;
    __shared__ int shows;
    double *spread = smem.coef;    // free until the factor
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * MN_BAYES_WARPS; i += MN_BAYES_THREADS) spread[i] = 0.0;
    __syncthreads();
    double sum = 0.0;
    P.each(s, [&](double (&x)[2], int a, int b) {
        if (a != b) return;
        const int row = mn_tile_row(a), column = mn_tile_column(b);
        const double mine = smem.k[row];
        const double here = row == column ? x[0] : row == column + 1 ? x[1] : 0.0;
        const double cross = row == column ? x[1] : row == column + 1 ? x[0] : 0.0;
        sum += mine * mine * here;
        if (s.turns) sum += mine * smem.k[row ^ 1] * cross;
    });
    for (int lanes = 16; lanes > 0; lanes >>= 1) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    if (threadIdx.x % 32 == 0) spread[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        double scale = 0.0, hidden = 0.0;
        for (int warp = 0; warp < MN_BAYES_WARPS; warp++) scale += spread[warp];
        for (int i = 0; i < s.K; i++) {
            const double k = (double)smem.raw[i];
            hidden += k * k * smem.given_l2[0];
        }
        const double variance = mn_bayes_whole(smem.parts, 0);
        scale = few * (scale + hidden);
        shows = !(fmin(variance, smem.r2[0]) >= scale || hidden >= scale);
    }
    __syncthreads();
    if (!shows) return false;
    P.each(s, [&](double (&x)[2], int a, int b) {
        if (a != b) return;
        const int row = mn_tile_row(a), column = mn_tile_column(b);
        if (row == column) x[0] *= 1.0 + few;
        if (row == column + 1) x[1] *= 1.0 + few;
    });
    return true;
}

/* z, e, sigma and what reads need, of tokens [first, first + count) of the raw chunk whose first
 * token is t of the sequence; the states stay in front of it. */
template <typename T, bool LARGE>
__device__ void mn_bayes_chunk(mn_bayes_tiles<LARGE> &P, const mn_bayes_smem &smem,
                               const mn_bayes_args &p, const mn_bayes_shape &s, int64_t t,
                               int first, int count, bool still, bool qvar) {
    const bool handed_in = p.P0.data && t + first == 0;
    for (bool again = false;; again = true) {
        mn_bayes_prepare(smem, s, first, count, still);
        __syncthreads();
        mn_bayes_add_noise(smem, s);
        mn_bayes_values<T>(smem, p, s, t + first, count);
        __syncthreads();
        mn_bayes_through(P, smem, s, qvar);
        __syncthreads();
        mn_bayes_gram(smem.parts, smem.z, s.pitch_z(), smem.k, s.pitch(), s.nb);
        __syncthreads();
        if (!handed_in || again || !mn_bayes_raise(P, smem, s)) break;
        __syncthreads();
    }
    if (threadIdx.x < 32) mn_bayes_factor(smem);
    mn_bayes_read_mean(smem, s, 1);
    __syncthreads();
    mn_bayes_solve(smem, s);
    __syncthreads();
    if (s.reads) mn_bayes_gram(smem.parts, smem.z, s.pitch_z(), smem.q, s.pitch(), s.nb);
}

/* The frame moves on by the raw chunk's first `count` tokens. */
__device__ inline void mn_bayes_advance_frame(const mn_bayes_smem &smem, const mn_bayes_shape &s,
                                              int count = MN_BAYES_CHUNK) {
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        const float *la = smem.raw + 2 * MN_BAYES_CHUNK * s.K + i, *theta = la + 16 * s.K;
        double level = 0.0, angle = 0.0;
        for (int t = 0; t < count; t++) {
            level += (double)la[t * s.K], angle += (double)theta[t * s.K];
        }
        smem.level[i * s.step] += level;
        if (s.turns) smem.level[i * s.step + 1] += angle;
    }
}

/* The frame of one token, in front of it. */
__device__ inline void mn_bayes_step_frame(const mn_bayes_smem &smem, const mn_bayes_shape &s,
                                           int token) {
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        const int at = 2 * MN_BAYES_CHUNK * s.K + token * s.K + i;
        smem.level[i * s.step] = (double)smem.raw[at];
        if (s.turns) smem.level[i * s.step + 1] = (double)smem.raw[at + MN_BAYES_CHUNK * s.K];
    }
    __syncthreads();
}

/* ---- states of the caller -------------------------------------------------------------------- */

template <bool LARGE>
__device__ void mn_bayes_load(mn_bayes_tiles<LARGE> &P, const mn_bayes_smem &smem,
                              const mn_bayes_args &p, const mn_bayes_shape &s, bool bf16) {
    const float *given = mn_row<float>(p.P0, s.n, 0, s.h);
    const float *mean = mn_row<float>(p.M0, s.n, 0, s.h);
    double size = 1.0;
    if (p.p0.data) {
        size = bf16 ? (double)mn_float(*mn_row<mn_bf16>(p.p0, 0, 0, s.h))
                    : (double)*mn_row<float>(p.p0, 0, 0, s.h);
    }
    if (given) given += s.g * s.R * s.R;
    P.each(s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = mn_tile_row(a), column = mn_tile_column(b) + i;
            const bool inside = row < s.R && column < s.R;
            x[i] = row == column && inside ? size : 0.0;
            if (given && inside) x[i] = (double)given[(int64_t)row * s.R + column];
        }
    });
    mn_bayes_each_mean(smem.M, s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = mn_tile_row(a), r = mn_tile_column(b) + i;
            const bool inside = mean && j < s.columns && r < s.R;
            x[i] = inside ? (double)mean[(int64_t)r * p.call.V + s.first + j] : 0.0;
        }
    });
}

/* Columns [first, first + columns) are those j with floor(j G / V) = g. */
__device__ inline mn_bayes_shape mn_bayes_shape_at(const mn_bayes_args &p, int64_t block) {
    mn_bayes_shape s;
    const int64_t G = p.call.G, V = p.call.V;
    s.g = block % G, s.h = block / G % p.call.H, s.n = block / G / p.call.H;
    s.span = mn_span_at(p.call, s.n);
    s.turns = p.theta.data != NULL, s.step = s.turns ? 2 : 1;
    s.K = (int)p.call.K, s.R = s.K * s.step, s.nb = (s.R + 7) / 8;
    s.first = (int)((s.g * V + G - 1) / G);
    s.columns = (int)(((s.g + 1) * V + G - 1) / G) - s.first;
    s.nm = (s.columns + 7) / 8;
    s.reads = p.qvar.data || p.o.data;
    return s;
}

}    // namespace mneme::bayes

#endif
