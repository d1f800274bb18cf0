/* bayes_bwd_narrow.cu - the narrow way back of the Bayesian Layer: one block for a group of a head
 * of a sequence, chunk by chunk, for states of more than 128 rows and heads that decay steeply. The
 * equations are in bayes_bwd_chunk.cu. */
#include "kernels/cuda/bayes/bayes_bwd_narrow.h"

#include "kernels/cuda/bayes/bayes.cuh"
#include "kernels/cuda/bayes/bayes_span.cuh"

namespace mneme::bayes {

/* ---- steps of the way back through a chunk ------------------------------------------------ */

using tiles = mn_bayes_tiles<true>;    // P and D do not fit in registers together

/* What the way back has beside mn_bayes_smem: tiles of 16 rows; dq, dk lie over the raw inputs. */
struct back_smem {
    double *du, *dw, *dq, *dk, *de;
    double *mix[5];      // (16,16)
    double *h;           // (16,16): du_s.w_t
    double *c, *a, *x;   // 16: adjoint of k'u; weights; dw_t.w_t
    double *D;           // D inside channels: rr, ri, ii
    double *C;           // running C inside channels: its trace and its turn
};

int64_t narrow_smem_doubles(int nb, int nm, int K) {
    const int64_t smem_tile = 16 * (8 * nb + 8);
    return mn_bayes_doubles(nb, nm, K, false) + 4 * smem_tile + 16 * (8 * nm + 4) + 6 * 256 +
           3 * 16 + 5 * (int64_t)K + 16;
}

__device__ static back_smem back_smem_in(const mn_bayes_smem &smem, double *at,
                                         const mn_bayes_shape &s) {
    back_smem r;
    const int smem_tile = 16 * s.pitch();
    const auto take = [&](int count) { double *from = at; at += (count + 1) / 2 * 2; return from; };
    const bool fits = 2 * 16 * s.K >= 2 * smem_tile;
    r.du = take(smem_tile), r.dw = take(smem_tile);
    r.dq = fits ? (double *)smem.raw : take(smem_tile);
    r.dk = fits ? (double *)smem.raw + smem_tile : take(smem_tile);
    r.de = take(16 * s.pitch_e());
    for (int i = 0; i < 5; i++) r.mix[i] = take(256);
    r.h = take(256), r.c = take(16), r.a = take(16), r.x = take(16);
    r.D = take(3 * s.K), r.C = take(2 * s.K);
    return r;
}

/* ---- tiles in memory ------------------------------------------------------------------------- */

__device__ static void copy_tiles(double *to, const double *from, const mn_bayes_shape &s) {
    const int64_t count = (int64_t)s.nb * s.nb * 32;
    for (int64_t i = threadIdx.x; i < count; i += MN_BAYES_THREADS) {
        ((double2 *)to)[i] = ((const double2 *)from)[i];
    }
}

__device__ static void copy_mean(double *to, const double *from, const mn_bayes_shape &s) {
    for (int i = threadIdx.x; i < s.nm * s.nb * 64; i += MN_BAYES_THREADS) to[i] = from[i];
}

/* D and E behind the frame become those in front of it: by Phi'. All threads call. */
__device__ static void move_back(tiles &D, double *E, const mn_bayes_smem &smem,
                                 const mn_bayes_shape &s) {
    for (int i = threadIdx.x; i < 8 * s.nb; i += MN_BAYES_THREADS) smem.phi[i] = 0.0;
    __syncthreads();
    mn_bayes_frame(smem.phi, smem.level, s);
    __syncthreads();
    D.each(s, [&](double (&x)[2], int a, int b) {
        mn_bayes_move_columns(x, smem.phi, b, s.turns, true);
        mn_bayes_move_rows(x, smem.phi, a, s.turns, true);
    });
    mn_bayes_each_mean(E, s, [&](double (&x)[2], int, int b) {
        mn_bayes_move_columns(x, smem.phi, b, s.turns, true);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * s.nb; i += MN_BAYES_THREADS) smem.level[i] = 0.0;
    __syncthreads();
}

/* ---- products of 16 rows --------------------------------------------------------------------- */

/* c += weights (16,16) tile, columns of block b */
__device__ static void mix(double (&c)[2][2], const double *weights, const double *smem_tile,
                           int ld, int b) {
    const int lane = threadIdx.x % 32;
    double left[8], right[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        right[i] = smem_tile[(4 * i + lane % 4) * ld + 8 * b + lane / 4];
        left[2 * i] = weights[lane / 4 * 16 + 4 * i + lane % 4];
        left[2 * i + 1] = weights[(8 + lane / 4) * 16 + 4 * i + lane % 4];
    }
    mn_mma_f64_k16(c, left, right);
}

/* c += left (16, value columns) times a mean's tiles (value columns, rows), rows of block b */
__device__ static void through_mean(double (&c)[2][2], const double *left, int ld,
                                    const double *M, const mn_bayes_shape &s, int b) {
    const int lane = threadIdx.x % 32;
    for (int j = 0; j < s.nm; j++) {
        const double *tile = M + ((int64_t)j * s.nb + b) * 64;
        const double *upper = left + lane / 4 * ld + 8 * j + lane % 4, *lower = upper + 8 * ld;
        const double from[4] = { upper[0], lower[0], upper[4], lower[4] };
        const double with[2] = { tile[lane % 4 * 8 + lane / 4],
                                 tile[(4 + lane % 4) * 8 + lane / 4] };
        mn_mma_f64_k8(c, from, with);
    }
}

__device__ static void clear(double (&c)[2][2]) {
    c[0][0] = c[0][1] = c[1][0] = c[1][1] = 0.0;
}

/* rows of a tile of block b from c, or the other way round */
__device__ static void put(double *smem_tile, int ld, const double (&c)[2][2], int b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        double *to = smem_tile + (8 * m + lane / 4) * ld + mn_tile_column(b);
        to[0] = c[m][0], to[1] = c[m][1];
    }
}

__device__ static void get(double (&c)[2][2], const double *smem_tile, int ld, int b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const double *from = smem_tile + (8 * m + lane / 4) * ld + mn_tile_column(b);
        c[m][0] = from[0], c[m][1] = from[1];
    }
}

/* use(i, row, column) for the elements of a (16,16) matrix */
template <typename F>
__device__ static void each_pair(F use) {
    for (int i = threadIdx.x; i < 256; i += MN_BAYES_THREADS) use(i, i / 16, i % 16);
}

/* ---- steps of a chunk ------------------------------------------------------------------------ */

/* y = scale do into room.o, a, and x = Phi'dgainvec into dw. */
template <typename T>
__device__ static void fetch_cotangents(const mn_bayes_smem &smem, const back_smem &r,
                                        const mn_bayes_args &p, const mn_bayes_shape &s, int64_t t,
                                        int count) {
    const int width = 8 * s.nm, ld_e = s.pitch_e(), ld = s.pitch(), rows = 8 * s.nb;
    const int64_t b = s.span.b, t0 = s.span.t0 + t;
    for (int at = threadIdx.x; at < 16 * width; at += MN_BAYES_THREADS) {
        const int token = at / width, j = at % width;
        const T *d_o = mn_row<T>(p.cot.o, b, t0 + token, s.h);
        const bool there = d_o && token < count && j < s.columns;
        smem.o[token * ld_e + j] = there ? p.scale * (double)mn_float(d_o[s.first + j]) : 0.0;
    }
    if (threadIdx.x < 16) {
        const int i = threadIdx.x;
        const T *dqvar = mn_row<T>(p.cot.qvar, b, t0 + i, s.h);
        const bool there = dqvar && p.q.data && i < count;
        r.a[i] = there ? p.scale * p.scale * (double)mn_float(dqvar[s.g]) : 0.0;
    }
    for (int at = threadIdx.x; at < 16 * rows; at += MN_BAYES_THREADS) {
        const int token = at / rows, i = at % rows;
        const T *d = mn_row<T>(p.cot.gainvec, b, t0 + token, s.h);
        double x = 0.0;
        if (d && token < count && i < s.R) {
            const double *phi = smem.phi + token * rows;
            d += s.g * s.R;
            x = phi[i] * (double)mn_float(d[i]);
            if (s.turns && i % 2 == 0) {
                x += phi[i + 1] * (double)mn_float(d[i + 1]);
            } else if (s.turns) {
                x = phi[i - 1] * (double)mn_float(d[i]) - phi[i] * (double)mn_float(d[i - 1]);
            }
        }
        r.dw[token * ld + i] = x;
    }
}

/* de: E'w by the warps, then the sums over later tokens by columns; dv. */
template <typename T>
__device__ static void value_back(const mn_bayes_smem &smem, const back_smem &r,
                                  const double *E, const mn_bayes_args &p, const mn_bayes_shape &s,
                                  int64_t t, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ld_e = s.pitch_e();
    for (int j = warp; j < s.nm; j += MN_BAYES_WARPS) {
        double c[2][2];
        clear(c);
        for (int b = 0; b < s.nb; b++) {
            const double2 x = *((const double2 *)(E + ((int64_t)j * s.nb + b) * 64) + lane);
            const double tile[2] = { x.x, x.y };
            mn_bayes_left(c, smem.z, s.pitch_z(), tile, b);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int token = 8 * m + lane / 4;
            double *to = r.de + token * ld_e + mn_tile_column(j);
            to[0] = c[m][0] * smem.inverse[token], to[1] = c[m][1] * smem.inverse[token];
        }
    }
    __syncthreads();
    for (int j = threadIdx.x; j < 8 * s.nm; j += MN_BAYES_THREADS) {
        for (int i = MN_BAYES_CHUNK - 1; i >= 0; i--) {
            double x = r.de[i * ld_e + j] + smem.read[i * 16 + i] * smem.o[i * ld_e + j];
            for (int later = i + 1; later < MN_BAYES_CHUNK; later++) {
                x += smem.read[i * 16 + later] * smem.o[later * ld_e + j];
                x -= smem.coef[i * 16 + later] * r.de[later * ld_e + j];
            }
            r.de[i * ld_e + j] = x;
            T *dv = mn_row<T>(p.grad.v, s.span.b, s.span.t0 + t + i, s.h);
            if (dv && i < count && j < s.columns) mn_put(dv + s.first + j, (float)x);
        }
    }
    __syncthreads();
}

/* mix 0: y_s.e_t and mix 1: de_s.e_t as [t][s], all pairs. */
__device__ static void value_grams(const mn_bayes_smem &smem, const back_smem &r,
                                   const mn_bayes_shape &s) {
    const int ld_e = s.pitch_e();
    mn_bayes_gram(smem.parts, smem.e, ld_e, smem.o, ld_e, s.nm);
    __syncthreads();
    each_pair([&](int i, int, int) { r.mix[0][i] = mn_bayes_whole(smem.parts, i); });
    __syncthreads();
    mn_bayes_gram(smem.parts, smem.e, ld_e, r.de, ld_e, s.nm);
    __syncthreads();
    each_pair([&](int i, int, int) { r.mix[1][i] = mn_bayes_whole(smem.parts, i); });
    __syncthreads();
}

/* dw grows by what the mean says of the gains. */
__device__ static void gain_back(const mn_bayes_smem &smem, const back_smem &r, const double *E,
                                 const mn_bayes_shape &s) {
    const int warp = threadIdx.x / 32, ld = s.pitch();
    each_pair([&](int i, int t, int later) {
        r.mix[2][i] = later >= t ? r.mix[0][i] : 0.0;
        r.mix[3][i] = later > t ? -r.mix[1][i] : 0.0;
    });
    __syncthreads();
    for (int b = warp; b < s.nb; b += MN_BAYES_WARPS) {
        double c[2][2];
        get(c, r.dw, ld, b);
        through_mean(c, smem.e, s.pitch_e(), E, s, b);
        mix(c, r.mix[2], smem.q, ld, b);
        mix(c, r.mix[3], smem.k, ld, b);
        put(r.dw, ld, c, b);
    }
}

/* b into du. mix 4 is free for a_s q_s.w_t. */
__device__ static void covariance_start(tiles &D, const mn_bayes_smem &smem,
                                        const back_smem &r, const mn_bayes_shape &s) {
    const int lane = threadIdx.x % 32, ld = s.pitch();
    each_pair([&](int i, int t, int later) {
        r.mix[4][i] = later >= t ? r.a[later] * smem.read[i] * smem.sigma[t] : 0.0;
    });
    __syncthreads();
    double c[2][2];
    D.each(s, [&](double (&tile)[2], int a, int b) {
        if (b == 0) clear(c);
        mn_bayes_left(c, smem.z, s.pitch_z(), tile, b);
        if (b != s.nb - 1) return;
        mix(c, r.mix[4], smem.q, ld, a);
        double dw[2][2];
        get(dw, r.dw, ld, a);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const double inverse = smem.inverse[8 * m + lane / 4];
#pragma unroll
            for (int i = 0; i < 2; i++) c[m][i] = (dw[m][i] - 2.0 * c[m][i]) * inverse;
        }
        put(r.du, ld, c, a);
    }, false);
    __syncthreads();
}

/* h[t][j] = du_t.w_j for j <= t, c_t and dr2 by one warp, lane j. mix 4 holds b_t.w_j. */
template <typename T>
__device__ static void adjoint_scalars(const mn_bayes_smem &smem, const back_smem &r,
                                       const mn_bayes_args &p, const mn_bayes_shape &s, int64_t t,
                                       int count) {
    const int j = threadIdx.x % 16;
    for (int i = MN_BAYES_CHUNK - 1; i >= 0; i--) {
        double h = r.mix[4][i * 16 + j], wDw = 0.0;
        for (int later = i + 1; later < MN_BAYES_CHUNK; later++) {
            const double forward = smem.coef[i * 16 + later], known = r.h[later * 16 + i];
            const double mine = j < later ? smem.coef[j * 16 + later] : 0.0;
            h -= r.h[later * 16 + j] * forward + mine * known;
            wDw += forward * known;
        }
        const int64_t b = s.span.b, when = s.span.t0 + t + i;
        const T *dgain_at = mn_row<T>(p.cot.gain, b, when, s.h);
        const T *dkvar_at = mn_row<T>(p.cot.kvar, b, when, s.h);
        const bool there = i < count;
        const double dgain = there ? (double)mn_get(dgain_at, s.g) : 0.0;
        const double dkvar = there ? (double)mn_get(dkvar_at, s.g) : 0.0;
        const double inverse = smem.inverse[i], x = r.x[i] * inverse;
        wDw = 0.5 * (x - r.mix[4][i * 16 + i]) + wDw;
        const double ds = wDw - x, square = inverse * inverse;
        const double c = there ? dkvar + ds + dgain * smem.r2[i] * square : 0.0;
        if (j < i) h += c * smem.coef[j * 16 + i];
        if (threadIdx.x < 16) r.h[i * 16 + j] = h;
        if (threadIdx.x == 0) {
            r.c[i] = c;
            T *dr2 = mn_row<T>(p.grad.r2, b, when, s.h);
            if (dr2 && there) {
                mn_put(dr2 + s.g, (float)(ds - dgain * smem.variance[i] * square));
            }
        }
        __syncwarp();
    }
}

/* du from b, one thread for each row. */
__device__ static void covariance_solve(const mn_bayes_smem &smem, const back_smem &r,
                                        const mn_bayes_shape &s) {
    const int ld = s.pitch();
    for (int row = threadIdx.x; row < 8 * s.nb; row += MN_BAYES_THREADS) {
        for (int t = MN_BAYES_CHUNK - 1; t >= 0; t--) {
            double x = r.du[t * ld + row] + r.c[t] * smem.k[t * ld + row];
            for (int later = t + 1; later < MN_BAYES_CHUNK; later++) {
                x -= r.du[later * ld + row] * smem.coef[t * 16 + later];
                x -= smem.k[later * ld + row] * r.h[later * 16 + t];
            }
            r.du[t * ld + row] = x;
        }
    }
    __syncthreads();
}

/* D inside channels, as it is behind the chunk. */
__device__ static void take_diagonal(tiles &D, const back_smem &r,
                                     const mn_bayes_shape &s) {
    D.each(s, [&](double (&x)[2], int a, int b) {
        if (a != b) return;
        const int row = mn_tile_row(a), column = mn_tile_column(b), channel = row / s.step;
        if (row >= s.R) return;
        if (!s.turns && (row == column || row == column + 1)) {
            r.D[3 * channel] = row == column ? x[0] : x[1];
            r.D[3 * channel + 1] = r.D[3 * channel + 2] = 0.0;
        }
        if (s.turns && row == column) r.D[3 * channel] = x[0], r.D[3 * channel + 1] = x[1];
        if (s.turns && row == column + 1) r.D[3 * channel + 2] = x[1];
    }, false);
}

/* D and E in front of the chunk. */
__device__ static void write_back(tiles &D, double *E, const mn_bayes_smem &smem,
                                  const back_smem &r, const mn_bayes_shape &s, bool weighs) {
    const int lane = threadIdx.x % 32, ld = s.pitch(), ld_e = s.pitch_e();
    D.each(s, [&](double (&tile)[2], int a, int b) {
        const int row = 8 * a + lane / 4, column = 8 * b + lane / 4;
        double left[4], right[4], up[4], along[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = (4 * i + lane % 4) * ld;
            left[i] = 0.5 * r.du[at + row], right[i] = smem.k[at + column];
            up[i] = 0.5 * smem.k[at + row], along[i] = r.du[at + column];
        }
        mn_mma_f64_tile(tile, left, right);
        mn_mma_f64_tile(tile, up, along);
        if (!weighs) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = 4 * i + lane % 4;
            left[i] = r.a[t] * smem.q[t * ld + row], right[i] = smem.q[t * ld + column];
        }
        mn_mma_f64_tile(tile, left, right);
    });
    mn_bayes_each_mean(E, s, [&](double (&tile)[2], int a, int b) {
        const int row = 8 * a + lane / 4, column = 8 * b + lane / 4;
        double left[4], right[4], up[4], along[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = 4 * i + lane % 4;
            left[i] = smem.o[t * ld_e + row], right[i] = smem.q[t * ld + column];
            up[i] = -r.de[t * ld_e + row], along[i] = smem.k[t * ld + column];
        }
        mn_mma_f64_tile(tile, left, right);
        mn_mma_f64_tile(tile, up, along);
    });
}

/* dk and dq but for the noise and c z, by row blocks. P and M are the states in front of the chunk;
 * mix 0 to 3 hold the weights of z in Pbar du, P q, M y and M de. */
__device__ static void read_back(const double *P, const mn_bayes_smem &smem, const back_smem &r,
                                 const mn_bayes_shape &s, bool weighs) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ld = s.pitch(), ld_z = s.pitch_z();
    for (int a = warp; a < s.nb; a += MN_BAYES_WARPS) {
        double k[2][2], q[2][2], x[2][2];
        clear(k), clear(q), clear(x);
        for (int b = 0; b < s.nb; b++) {
            const double2 at = *((const double2 *)(P + ((int64_t)a * s.nb + b) * 64) + lane);
            const double tile[2] = { at.x, at.y };
            mn_bayes_left(k, r.du, ld, tile, b);
            if (weighs) mn_bayes_left(q, smem.q, ld, tile, b);
        }
        mix(k, r.mix[0], smem.z, ld_z, a);
        if (weighs) {
            mix(q, r.mix[1], smem.z, ld_z, a);
            get(x, smem.zq, ld_z, a);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                q[m][i] = 2.0 * r.a[8 * m + lane / 4] * (q[m][i] + x[m][i]);
            }
        }
        through_mean(q, smem.o, s.pitch_e(), smem.M, s, a);
        mix(q, r.mix[2], smem.z, ld_z, a);
        clear(x);
        through_mean(x, r.de, s.pitch_e(), smem.M, s, a);
        mix(x, r.mix[3], smem.z, ld_z, a);
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) k[m][i] -= x[m][i];
        }
        put(r.dk, ld, k, a);
        put(r.dq, ld, q, a);
    }
    __syncthreads();
}

/* Noise of a channel in the frame. */
struct channel_noise { double rr, ri, ii; };

/* The sum over tokens 0 to j of a chunk, added up for each of them: where the channel decays, the
 * sum over all tokens outgrows those of the first ones by e^80, and taking later tokens off it
 * would leave nothing of these but its rounding. */
__device__ static channel_noise noise_until(const mn_bayes_smem &smem, const mn_bayes_shape &s,
                                            int first, int j, int at) {
    channel_noise n = { 0.0, 0.0, 0.0 };
    for (int e = 0; e <= j; e++) {
        const double *phi = smem.phi + e * 8 * s.nb + at;
        const double re = phi[0], im = s.turns ? phi[1] : 0.0, square = re * re + im * im;
        const double weight = smem.given_l2[first + e] / (square * square);
        n.rr += weight * re * re, n.ri -= weight * re * im, n.ii += weight * im * im;
    }
    return n;
}

/* What one channel leaves of each token, from the last one on: all gradients of the raw inputs.
 * du's rows become the channel's parts of dl2. */
template <typename T>
__device__ static void channels_back(const mn_bayes_smem &smem, const back_smem &r,
                                     const mn_bayes_args &p, const mn_bayes_shape &s, float *parts,
                                     int64_t t, int first, int count) {
    const int ld = s.pitch(), ld_z = s.pitch_z(), rows = 8 * s.nb;
    const int64_t n_rows = p.call.B * p.call.T * p.call.H, width = 4 * (int64_t)s.K + 1;
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        const int at = i * s.step;
        double rr = r.D[3 * i], ri = r.D[3 * i + 1], ii = r.D[3 * i + 2];
        double trace = r.C[2 * i], turn = r.C[2 * i + 1];
        for (int j = MN_BAYES_CHUNK - 1; j >= 0; j--) {
            double *du = r.du + j * ld + at;
            if (j >= count) {
                du[0] = 0.0;
                if (s.turns) du[1] = 0.0;
                continue;
            }
            const double *phi = smem.phi + j * rows + at, *k = smem.k + j * ld + at;
            const double *q = smem.q + j * ld + at, *z = smem.z + j * ld_z + at;
            const double re = phi[0], im = s.turns ? phi[1] : 0.0, square = re * re + im * im;
            const double k1 = s.turns ? k[1] : 0.0, q1 = s.turns ? q[1] : 0.0;
            const double z1 = s.turns ? z[1] : 0.0, du1 = s.turns ? du[1] : 0.0;
            const double *dq = r.dq + j * ld + at, *dk_base = r.dk + j * ld + at;
            const double dq1 = s.turns ? dq[1] : 0.0;
            const channel_noise n = noise_until(smem, s, first, j, at);
            const double dk0 = dk_base[0] + r.c[j] * z[0] + n.rr * du[0] + n.ri * du1;
            const double dk1 = s.turns ? dk_base[1] + r.c[j] * z1 + n.ri * du[0] + n.ii * du1 : 0.0;
            double x0 = 0.0, x1 = 0.0;
            const int64_t when = s.span.t0 + t + j;
            const T *d = mn_row<T>(p.cot.gainvec, s.span.b, when, s.h);
            if (d) {
                d += s.g * s.R + at;
                const double g0 = (double)mn_float(d[0]);
                const double g1 = s.turns ? (double)mn_float(d[1]) : 0.0;
                x0 = re * g0 + im * g1, x1 = re * g1 - im * g0;
            }
            rr += r.a[j] * q[0] * q[0] + du[0] * k[0];
            ri += r.a[j] * q[0] * q1 + 0.5 * (du[0] * k1 + du1 * k[0]);
            ii += r.a[j] * q1 * q1 + du1 * k1;
            const double unit = 1.0 / (square * square), noise = smem.given_l2[first + j] * unit;
            const double own_rr = noise * re * re, own_ri = -noise * re * im;
            const double own_ii = noise * im * im;
            const double w0 = z[0] * smem.inverse[j], w1 = z1 * smem.inverse[j];
            trace += q[0] * dq[0] + q1 * dq1 + k[0] * dk0 + k1 * dk1 + x0 * w0 + x1 * w1;
            trace -= 2.0 * (rr * own_rr + 2.0 * ri * own_ri + ii * own_ii);
            turn += q1 * dq[0] - q[0] * dq1 + k1 * dk0 - k[0] * dk1 + x1 * w0 - x0 * w1;
            turn -= 2.0 * ((ri * own_rr + ii * own_ri) - (rr * own_ri + ri * own_ii));
            const int64_t row = (s.span.b * p.call.T + when) * p.call.H + s.h;
            float *to = parts + (s.g * n_rows + row) * width;
            to[i] = (float)(re * dq[0] - im * dq1);
            to[s.K + i] = (float)(re * dk0 - im * dk1);
            to[2 * s.K + i] = (float)trace;
            to[3 * s.K + i] = (float)turn;
            du[0] = unit * (re * re * rr - 2.0 * re * im * ri + im * im * ii);
            if (s.turns) du[1] = 0.0;
        }
        r.C[2 * i] = trace, r.C[2 * i + 1] = turn;
    }
    __syncthreads();
    const int warp = threadIdx.x / 32;
    double sum = 0.0;
    for (int i = threadIdx.x % 32; i < s.R; i += 32) sum += r.du[warp * ld + i];
    for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x % 32 == 0 && warp < count) {
        const int64_t row = (s.span.b * p.call.T + s.span.t0 + t + warp) * p.call.H + s.h;
        parts[(s.g * n_rows + row) * width + 4 * s.K] = (float)sum;
    }
    __syncthreads();
}

/* ---- scans ----------------------------------------------------------------------------------- */

/* Where a state lies: P's tiles, then the mean's. */
__device__ static double *mean_of(double *state, const mn_bayes_shape &s) {
    return state + (int64_t)s.nb * s.nb * 64;
}

/* From the state in front of a chunk to the one behind it; the frame is at rest on both sides. */
template <typename T>
__device__ __noinline__ static void state_scan(tiles &P, const mn_bayes_smem &smem,
                                         const mn_bayes_args &p, mn_bayes_shape s, int64_t t,
                                         int limit) {
    const int all = (int)min((int64_t)MN_BAYES_CHUNK, s.span.length - t);
    s.reads = false;
    __syncthreads();
    mn_bayes_load_tile<T>(smem, p, s, t, all);
    __syncthreads();
    const bool steep = mn_bayes_is_steep(smem, s);
    const int count = steep ? 1 : all;
    for (int first = 0; first < all && first < limit; first += count) {
        if (steep) {
            mn_bayes_step_frame(smem, s, first);
            mn_bayes_rebase(P, smem, s);
        }
        mn_bayes_chunk<T>(P, smem, p, s, t, first, count, steep, false);
        mn_bayes_write(P, smem, s);
        __syncthreads();
    }
    if (steep) return;
    mn_bayes_advance_frame(smem, s);
    __syncthreads();
    mn_bayes_rebase(P, smem, s);
}

/* Everything of tokens [first, first + count) of the chunk at t, whose frame starts from `state`: D
 * and E go from behind them to in front of them. */
template <typename T>
__device__ __noinline__ static void chunk_back(tiles &D, double *E, double *state,
                                  mn_bayes_smem smem, const back_smem &r, const mn_bayes_args &p,
                                  const mn_bayes_shape &s, float *parts, int64_t t, int first,
                                  int count, bool still) {
    const bool weighs = p.cot.qvar.data && p.q.data;
    tiles P;
    P.memory = state;
    smem.M = mean_of(state, s);
    mn_bayes_chunk<T>(P, smem, p, s, t, first, count, still, false);
    __syncthreads();
    each_pair([&](int i, int row, int) {
        smem.read[i] = mn_bayes_whole(smem.parts, i) * smem.inverse[row];
    });
    fetch_cotangents<T>(smem, r, p, s, t + first, count);
    __syncthreads();
    value_back<T>(smem, r, E, p, s, t + first, count);
    value_grams(smem, r, s);
    gain_back(smem, r, E, s);
    take_diagonal(D, r, s);
    __syncthreads();
    covariance_start(D, smem, r, s);
    mn_bayes_gram(smem.parts, r.dw, s.pitch(), smem.z, s.pitch_z(), s.nb);
    __syncthreads();
    if (threadIdx.x < 16) {
        r.x[threadIdx.x] = mn_bayes_whole(smem.parts, 17 * (int)threadIdx.x) *
                           smem.inverse[threadIdx.x];
    }
    __syncthreads();
    mn_bayes_gram(smem.parts, r.du, s.pitch(), smem.z, s.pitch_z(), s.nb);
    __syncthreads();
    each_pair([&](int i, int, int column) {
        r.mix[4][i] = mn_bayes_whole(smem.parts, i) * smem.inverse[column];
    });
    __syncthreads();
    if (threadIdx.x < 32) adjoint_scalars<T>(smem, r, p, s, t + first, count);
    __syncthreads();
    covariance_solve(smem, r, s);
    write_back(D, E, smem, r, s, weighs);
    mn_bayes_gram(smem.parts, smem.z, s.pitch_z(), r.du, s.pitch(), s.nb);
    each_pair([&](int i, int row, int column) {
        const int turned = column * 16 + row;
        const double inverse = smem.inverse[column];
        r.mix[2][i] = column <= row ? inverse * r.mix[0][turned] : 0.0;
        r.mix[3][i] = column < row ? inverse * r.mix[1][turned] : 0.0;
    });
    __syncthreads();
    each_pair([&](int i, int row, int column) {
        const int turned = column * 16 + row;
        const double inverse = smem.inverse[column];
        r.mix[0][i] = column < row ? -inverse * mn_bayes_whole(smem.parts, turned) : 0.0;
        r.mix[1][i] = column <= row ? -smem.read[turned] : 0.0;
    });
    __syncthreads();
    read_back(state, smem, r, s, weighs);
    channels_back<T>(smem, r, p, s, parts, t + first, first, count);
}

/* D and E from the cotangents of the last states, of which P and room.M are the values; C. */
__device__ static void load_cotangents(tiles &P, double *E, const mn_bayes_smem &smem,
                                       const back_smem &r, const mn_bayes_args &p,
                                       const mn_bayes_shape &s) {
    const float *dP = mn_row<float>(p.cot.P, s.n, 0, s.h);
    const float *dM = mn_row<float>(p.cot.M, s.n, 0, s.h);
    const int64_t R = s.R;
    double own = 0.0, cross = 0.0;
    if (dP) dP += s.g * R * R;
    P.each(s, [&](double (&x)[2], int a, int b) {
        const int64_t row = mn_tile_row(a);
        if (b == 0) own = cross = 0.0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t column = mn_tile_column(b) + i;
            const bool inside = dP && row < R && column < R;
            const double d = inside ? 0.5 * ((double)dP[row * R + column] +
                                             (double)dP[column * R + row]) : 0.0;
            own += d * x[i];
            cross += d * __shfl_xor_sync(0xffffffffu, x[i], 4);
            x[i] = d;
        }
        if (b != s.nb - 1) return;
        for (int lanes = 1; lanes < 4; lanes <<= 1) {
            own += __shfl_xor_sync(0xffffffffu, own, lanes);
            cross += __shfl_xor_sync(0xffffffffu, cross, lanes);
        }
        if (threadIdx.x % 4 == 0) smem.noise[row] = 2.0 * own, smem.cross[row] = 2.0 * cross;
    });
    mn_bayes_each_mean(E, s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = mn_tile_row(a), row = mn_tile_column(b) + i;
            const bool inside = dM && j < s.columns && row < R;
            x[i] = inside ? (double)dM[(int64_t)row * p.call.V + s.first + j] : 0.0;
        }
    });
    __syncthreads();
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        const int row = i * s.step;
        double trace = smem.noise[row], turn = 0.0;
        if (s.turns) trace += smem.noise[row + 1], turn = smem.cross[row + 1] - smem.cross[row];
        for (int j = 0; j < s.columns; j++) {
            const int64_t at = ((int64_t)(j / 8) * s.nb + row / 8) * 64 + j % 8 * 8 + row % 8;
            trace += E[at] * smem.M[at];
            if (!s.turns) continue;
            trace += E[at + 1] * smem.M[at + 1];
            turn += E[at + 1] * smem.M[at] - E[at] * smem.M[at + 1];
        }
        r.C[2 * i] = trace, r.C[2 * i + 1] = turn;
    }
    __syncthreads();
}

/* The gradients of the states handed in, and D's trace. */
__device__ static void put_first(tiles &D, double *E, const mn_bayes_smem &smem,
                                 const mn_bayes_args &p, const mn_bayes_shape &s, double *trace) {
    float *dP = mn_row<float>(p.grad.P0, s.n, 0, s.h), *dM = mn_row<float>(p.grad.M0, s.n, 0, s.h);
    const int64_t R = s.R;
    if (dP) dP += s.g * R * R;
    D.each(s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t row = mn_tile_row(a), column = mn_tile_column(b) + i;
            if (row == column) smem.noise[row] = row < R ? x[i] : 0.0;
            if (dP && row < R && column <= row) {
                dP[row * R + column] = dP[column * R + row] = (float)x[i];
            }
        }
    });
    mn_bayes_each_mean(E, s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = mn_tile_row(a), row = mn_tile_column(b) + i;
            if (dM && j < s.columns && row < R) {
                dM[(int64_t)row * p.call.V + s.first + j] = (float)x[i];
            }
        }
    });
    __syncthreads();
    if (threadIdx.x != 0) return;
    double sum = 0.0;
    for (int i = 0; i < s.R; i++) sum += smem.noise[i];
    *trace = sum;
}

/* Copies a state; all threads call, and see it. */
__device__ static void copy_state(double *to, double *mean, const double *from,
                                  const double *from_mean, const mn_bayes_shape &s) {
    __syncthreads();
    copy_tiles(to, from, s);
    copy_mean(mean, from_mean, s);
    __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(MN_BAYES_THREADS, 1)
bayes_backward_kernel(const __grid_constant__ mn_bayes_args p,
                      const __grid_constant__ narrow_work w) {
    extern __shared__ __align__(16) double doubles[];
    mn_bayes_shape s = mn_bayes_shape_at(p, blockIdx.x);
    if (w.steep && !w.steep[s.n * p.call.H + s.h]) return;
    s.reads = true;
    const int64_t covariance = (int64_t)s.nb * s.nb * 64, mean = (int64_t)s.nm * s.nb * 64;
    double *own = w.each + blockIdx.x * w.size, *E = own + covariance, *M = E + mean;
    double *chunks = M + mean, *spare = chunks + NARROW_CHUNKS * w.state;
    double *base = w.inside ? doubles : spare + w.state + covariance;
    tiles P, D;
    D.memory = own, P.memory = spare + w.state;
    const mn_bayes_smem smem = mn_bayes_smem_in(base, s, M);
    const back_smem r = back_smem_in(smem, base + mn_bayes_doubles(s.nb, s.nm, s.K, false), s);
    const int64_t length = s.span.length, n_spans = (length + NARROW_SPAN - 1) / NARROW_SPAN;
    int64_t slot0 = s.n * ((p.call.T + NARROW_SPAN - 1) / NARROW_SPAN);
    if (p.call.cu_seqlens) slot0 = s.span.t0 / NARROW_SPAN + s.n;
    const auto span_at = [&](int64_t i) {
        return w.spans + (((slot0 + i) * p.call.H + s.h) * p.call.G + s.g) * w.state;
    };
    mn_bayes_clear(smem, s);
    mn_bayes_load(P, smem, p, s, sizeof(T) == 2);
    for (int64_t t = 0; t < length; t += MN_BAYES_CHUNK) {
        if (t % NARROW_SPAN == 0) {
            double *span = span_at(t / NARROW_SPAN);
            copy_state(span, mean_of(span, s), P.memory, M, s);
        }
        state_scan<T>(P, smem, p, s, t, MN_BAYES_CHUNK);
    }
    __syncthreads();
    copy_tiles(D.memory, P.memory, s);
    __syncthreads();
    load_cotangents(D, E, smem, r, p, s);
    for (int64_t i = n_spans - 1; i >= 0; i--) {
        const int64_t left = (length - i * NARROW_SPAN + MN_BAYES_CHUNK - 1) / MN_BAYES_CHUNK;
        const int n_chunks = (int)min((int64_t)NARROW_CHUNKS, left);
        double *span = span_at(i);
        copy_state(P.memory, M, span, mean_of(span, s), s);
        for (int c = 0; c < n_chunks; c++) {
            double *state = chunks + c * w.state;
            copy_state(state, mean_of(state, s), P.memory, M, s);
            if (c + 1 < n_chunks) {
                state_scan<T>(P, smem, p, s, i * NARROW_SPAN + c * MN_BAYES_CHUNK, MN_BAYES_CHUNK);
            }
        }
        for (int c = n_chunks - 1; c >= 0; c--) {
            const int64_t t = i * NARROW_SPAN + c * MN_BAYES_CHUNK;
            const int all = (int)min((int64_t)MN_BAYES_CHUNK, length - t);
            double *state = chunks + c * w.state;
            __syncthreads();
            mn_bayes_load_tile<T>(smem, p, s, t, all);
            __syncthreads();
            const bool steep = mn_bayes_is_steep(smem, s);
            if (!steep) {
                mn_bayes_advance_frame(smem, s);
                __syncthreads();
                move_back(D, E, smem, s);
            }
            /* Where a channel decays by more than e^-40 tokens go one by one, each from a scan of
             * its own up to it. */
            for (int token = steep ? all - 1 : 0; token >= 0; token--) {
                if (steep) {
                    copy_state(P.memory, M, state, mean_of(state, s), s);
                    if (token > 0) state_scan<T>(P, smem, p, s, t, token);
                    __syncthreads();
                    mn_bayes_load_tile<T>(smem, p, s, t, all);
                    __syncthreads();
                    mn_bayes_step_frame(smem, s, token);
                    mn_bayes_rebase(P, smem, s);
                    copy_state(spare, mean_of(spare, s), P.memory, M, s);
                }
                chunk_back<T>(D, E, steep ? spare : state, smem, r, p, s, w.parts, t,
                              steep ? token : 0, steep ? 1 : all, steep);
                if (!steep) continue;
                mn_bayes_load_tile<T>(smem, p, s, t, all);
                __syncthreads();
                mn_bayes_step_frame(smem, s, token);
                move_back(D, E, smem, s);
            }
        }
    }
    __syncthreads();
    put_first(D, E, smem, p, s, w.traces + blockIdx.x);
}

/* ---- what groups share ----------------------------------------------------------------------- */

/* Sums over the groups of a head of 64 tokens that went the narrow way. */
template <typename T>
__device__ static void add_groups(const mn_bayes_args &p, const float *parts, const int *steep,
                                  int64_t head) {
    const int64_t K = p.call.K, H = p.call.H, width = 4 * K + 1, h = head % H;
    const int64_t rows = p.call.B * p.call.T * H;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || (steep && !steep[tile.n * H + h])) return;
    const mn_out to[] = { p.grad.q, p.grad.k, p.grad.la, p.grad.theta, p.grad.l2 };
    for (int64_t at = threadIdx.x; at < tile.n_rows * width; at += 256) {
        const int64_t t = tile.span.t0 + tile.first + at / width, i = at % width, which = i / K;
        const int64_t row = ((tile.span.b * p.call.T + t) * H + h) * width + i;
        if (!to[which].data) continue;
        float sum = 0.0f;
        for (int64_t g = 0; g < p.call.G; g++) sum += parts[g * rows * width + row];
        mn_put(mn_row<T>(to[which], tile.span.b, t, h) + i % K, sum);
    }
}

/* REDO: a block has all spans of a head of a sequence, if it is to be done. */
template <typename T, bool REDO>
__global__ void __launch_bounds__(256)
bayes_groups_kernel(const __grid_constant__ mn_bayes_args p, const float *parts,
                    const int *steep) {
    const int64_t H = p.call.H, n = blockIdx.x / H;
    if (!REDO) {
        add_groups<T>(p, parts, steep, blockIdx.x);
        return;
    }
    if (!steep[blockIdx.x]) return;
    const mn_span span = mn_span_at(p.call, n);
    const int64_t slot0 = first_slot(p.call, span, n);
    for (int64_t i = 0; i < n_spans_of(span); i++) {
        add_groups<T>(p, parts, steep, (slot0 + i) * H + blockIdx.x % H);
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T>
static int start(const mn_bayes_args *p, const narrow_work &w, int64_t blocks, int64_t heads,
                 bool redo, cudaStream_t on) {
    const int code = mn_launch_smem(bayes_backward_kernel<T>, dim3((unsigned)blocks),
                                    MN_BAYES_THREADS, w.smem_bytes, on, *p, w);
    if (code != cudaSuccess || heads == 0) return code;
    const auto groups = redo ? bayes_groups_kernel<T, true> : bayes_groups_kernel<T, false>;
    groups<<<(unsigned)heads, 256, 0, on>>>(*p, w.parts, w.steep);
    return mn_launch_status();
}

int narrow_backward(const mn_bayes_args *p, const narrow_work &w, int64_t blocks, int64_t heads,
                    bool redo, cudaStream_t on) {
    return p->call.dtype == MN_BF16 ? start<mn_bf16>(p, w, blocks, heads, redo, on)
                                    : start<float>(p, w, blocks, heads, redo, on);
}

}    // namespace mneme::bayes
