/* bayes_grad.cuh - the steps of the way back through a chunk of the Bayesian Layer; which formulas
 * they are is in bayes_bwd_chunk.cu, the only file that includes this. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_GRAD_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_GRAD_CUH

#include "kernels/cuda/bayes/bayes.cuh"

using tiles = mn_bayes_tiles<true>;    // P and D do not fit in registers together

enum { SPAN = 128, CHUNKS = SPAN / MN_BAYES_CHUNK };    // of the narrow way

/* Work space, in doubles for each block but the parts. */
struct work {
    double *each;        // D, E, mean, CHUNKS + 1 states, and the room where it is too large
    double *spans;       // states in front of spans
    double *traces;      // of D in front of each sequence, by blocks
    float *parts;        // G x rows x (4 K + 1): dq, dk, dla, dtheta, dl2
    const int *steep;    // heads of sequences to do; NULL: all
    int64_t size, state;
    bool inside;         // the room is in shared memory
};

/* What the way back has beside the room; smem_tiles of 16 rows. dq and dk lie over the raw inputs.
 * */
struct back_smem {
    double *du, *dw, *dq, *dk, *de;
    double *mix[5];      // (16,16)
    double *h;           // (16,16): du_s.w_t
    double *c, *a, *x;   // 16: adjoint of k'u; weights; dw_t.w_t
    double *D;           // D inside channels: rr, ri, ii
    double *C;           // running C inside channels: its trace and its turn
};

static int64_t back_doubles(int nb, int nm, int K) {
    const int64_t smem_tile = 16 * (8 * nb + 8);
    return mn_bayes_doubles(nb, nm, K, false) + 4 * smem_tile + 16 * (8 * nm + 4) + 6 * 256 + 3
        * 16 +
           5 * (int64_t)K + 16;
}

__device__ static back_smem back_smem_in(const mn_bayes_smem &room, double *at,
                                         const mn_bayes_shape &s) {
    back_smem r;
    const int smem_tile = 16 * s.pitch();
    const auto take = [&](int count) { double *from = at; at += (count + 1) / 2 * 2; return from; };
    const bool fits = 2 * 16 * s.K >= 2 * smem_tile;
    r.du = take(smem_tile), r.dw = take(smem_tile);
    r.dq = fits ? (double *)room.raw : take(smem_tile);
    r.dk = fits ? (double *)room.raw + smem_tile : take(smem_tile);
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
__device__ static void move_back(tiles &D, double *E, const mn_bayes_smem &room,
                                 const mn_bayes_shape &s) {
    for (int i = threadIdx.x; i < 8 * s.nb; i += MN_BAYES_THREADS) room.phi[i] = 0.0;
    __syncthreads();
    mn_bayes_frame(room.phi, room.level, s);
    __syncthreads();
    D.each(s, [&](double (&x)[2], int a, int b) {
        mn_bayes_move_columns(x, room.phi, b, s.turns, true);
        mn_bayes_move_rows(x, room.phi, a, s.turns, true);
    });
    mn_bayes_each_mean(E, s, [&](double (&x)[2], int, int b) {
        mn_bayes_move_columns(x, room.phi, b, s.turns, true);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < 8 * s.nb; i += MN_BAYES_THREADS) room.level[i] = 0.0;
    __syncthreads();
}

/* ---- products of 16 rows --------------------------------------------------------------------- */

/* c += weights (16,16) smem_tile, columns of block b */
__device__ static void mix(double (&c)[2][2], const double *weights, const double *smem_tile,
                           int ld,
                           int b) {
    const int lane = threadIdx.x % 32;
    double left[8], right[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        right[i] = smem_tile[(4 * i + lane % 4) * ld + 8 * b + lane / 4];
        left[2 * i] = weights[lane / 4 * 16 + 4 * i + lane % 4];
        left[2 * i + 1] = weights[(8 + lane / 4) * 16 + 4 * i + lane % 4];
    }
    mn_mma_f64_16(c, left, right);
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
        mn_mma_f64_8(c, from, with);
    }
}

__device__ static void clear(double (&c)[2][2]) {
    c[0][0] = c[0][1] = c[1][0] = c[1][1] = 0.0;
}

/* smem_tile rows of block b from c, or the other way round */
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
__device__ static void fetch_cotangents(const mn_bayes_smem &room, const back_smem &r,
                                        const mn_bayes_args &p, const mn_bayes_shape &s, int64_t t,
                                        int count) {
    const int width = 8 * s.nm, ld_e = s.pitch_e(), ld = s.pitch(), rows = 8 * s.nb;
    const int64_t b = s.span.b, t0 = s.span.t0 + t;
    for (int at = threadIdx.x; at < 16 * width; at += MN_BAYES_THREADS) {
        const int token = at / width, j = at % width;
        const T *d_o = mn_row<T>(p.cot.o, b, t0 + token, s.h);
        const bool there = d_o && token < count && j < s.columns;
        room.o[token * ld_e + j] = there ? p.scale * (double)mn_float(d_o[s.first + j]) : 0.0;
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
            const double *phi = room.phi + token * rows;
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
__device__ static void value_back(const mn_bayes_smem &room, const back_smem &r,
                                  const double *E, const mn_bayes_args &p, const mn_bayes_shape &s,
                                  int64_t t, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ld_e = s.pitch_e();
    for (int j = warp; j < s.nm; j += MN_BAYES_WARPS) {
        double c[2][2];
        clear(c);
        for (int b = 0; b < s.nb; b++) {
            const double2 x = *((const double2 *)(E + ((int64_t)j * s.nb + b) * 64) + lane);
            const double tile[2] = { x.x, x.y };
            mn_bayes_left(c, room.z, s.pitch_z(), tile, b);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int token = 8 * m + lane / 4;
            double *to = r.de + token * ld_e + mn_tile_column(j);
            to[0] = c[m][0] * room.inverse[token], to[1] = c[m][1] * room.inverse[token];
        }
    }
    __syncthreads();
    for (int j = threadIdx.x; j < 8 * s.nm; j += MN_BAYES_THREADS) {
        for (int i = MN_BAYES_CHUNK - 1; i >= 0; i--) {
            double x = r.de[i * ld_e + j] + room.read[i * 16 + i] * room.o[i * ld_e + j];
            for (int later = i + 1; later < MN_BAYES_CHUNK; later++) {
                x += room.read[i * 16 + later] * room.o[later * ld_e + j];
                x -= room.coef[i * 16 + later] * r.de[later * ld_e + j];
            }
            r.de[i * ld_e + j] = x;
            T *dv = mn_row<T>(p.grad.v, s.span.b, s.span.t0 + t + i, s.h);
            if (dv && i < count && j < s.columns) mn_put(dv + s.first + j, (float)x);
        }
    }
    __syncthreads();
}

/* mix 0: y_s.e_t and mix 1: de_s.e_t as [t][s], all pairs. */
__device__ static void value_grams(const mn_bayes_smem &room, const back_smem &r,
                                   const mn_bayes_shape &s) {
    const int ld_e = s.pitch_e();
    mn_bayes_gram(room.parts, room.e, ld_e, room.o, ld_e, s.nm);
    __syncthreads();
    each_pair([&](int i, int, int) { r.mix[0][i] = mn_bayes_whole(room.parts, i); });
    __syncthreads();
    mn_bayes_gram(room.parts, room.e, ld_e, r.de, ld_e, s.nm);
    __syncthreads();
    each_pair([&](int i, int, int) { r.mix[1][i] = mn_bayes_whole(room.parts, i); });
    __syncthreads();
}

/* dw grows by what the mean says of the gains. */
__device__ static void gain_back(const mn_bayes_smem &room, const back_smem &r, const double *E,
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
        through_mean(c, room.e, s.pitch_e(), E, s, b);
        mix(c, r.mix[2], room.q, ld, b);
        mix(c, r.mix[3], room.k, ld, b);
        put(r.dw, ld, c, b);
    }
}

/* b into du. mix 4 is free for a_s q_s.w_t. */
__device__ static void covariance_start(tiles &D, const mn_bayes_smem &room,
                                        const back_smem &r, const mn_bayes_shape &s) {
    const int lane = threadIdx.x % 32, ld = s.pitch();
    each_pair([&](int i, int t, int later) {
        r.mix[4][i] = later >= t ? r.a[later] * room.read[i] * room.sigma[t] : 0.0;
    });
    __syncthreads();
    double c[2][2];
    D.each(s, [&](double (&tile)[2], int a, int b) {
        if (b == 0) clear(c);
        mn_bayes_left(c, room.z, s.pitch_z(), tile, b);
        if (b != s.nb - 1) return;
        mix(c, r.mix[4], room.q, ld, a);
        double dw[2][2];
        get(dw, r.dw, ld, a);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const double inverse = room.inverse[8 * m + lane / 4];
#pragma unroll
            for (int i = 0; i < 2; i++) c[m][i] = (dw[m][i] - 2.0 * c[m][i]) * inverse;
        }
        put(r.du, ld, c, a);
    }, false);
    __syncthreads();
}

/* h[t][j] = du_t.w_j for j <= t, c_t and dr2 by one warp, lane j. mix 4 holds b_t.w_j. */
template <typename T>
__device__ static void adjoint_scalars(const mn_bayes_smem &room, const back_smem &r,
                                       const mn_bayes_args &p, const mn_bayes_shape &s, int64_t t,
                                       int count) {
    const int j = threadIdx.x % 16;
    for (int i = MN_BAYES_CHUNK - 1; i >= 0; i--) {
        double h = r.mix[4][i * 16 + j], wDw = 0.0;
        for (int later = i + 1; later < MN_BAYES_CHUNK; later++) {
            const double forward = room.coef[i * 16 + later], known = r.h[later * 16 + i];
            const double mine = j < later ? room.coef[j * 16 + later] : 0.0;
            h -= r.h[later * 16 + j] * forward + mine * known;
            wDw += forward * known;
        }
        const int64_t b = s.span.b, when = s.span.t0 + t + i;
        const T *dgain_at = mn_row<T>(p.cot.gain, b, when, s.h);
        const T *dkvar_at = mn_row<T>(p.cot.kvar, b, when, s.h);
        const bool there = i < count;
        const double dgain = there ? (double)mn_get(dgain_at, s.g) : 0.0;
        const double dkvar = there ? (double)mn_get(dkvar_at, s.g) : 0.0;
        const double inverse = room.inverse[i], x = r.x[i] * inverse;
        wDw = 0.5 * (x - r.mix[4][i * 16 + i]) + wDw;
        const double ds = wDw - x, square = inverse * inverse;
        const double c = there ? dkvar + ds + dgain * room.r2[i] * square : 0.0;
        if (j < i) h += c * room.coef[j * 16 + i];
        if (threadIdx.x < 16) r.h[i * 16 + j] = h;
        if (threadIdx.x == 0) {
            r.c[i] = c;
            T *dr2 = mn_row<T>(p.grad.r2, b, when, s.h);
            if (dr2 && there) {
                mn_put(dr2 + s.g, (float)(ds - dgain * room.variance[i] * square));
            }
        }
        __syncwarp();
    }
}

/* du from b, one thread for each row. */
__device__ static void covariance_solve(const mn_bayes_smem &room, const back_smem &r,
                                        const mn_bayes_shape &s) {
    const int ld = s.pitch();
    for (int row = threadIdx.x; row < 8 * s.nb; row += MN_BAYES_THREADS) {
        for (int t = MN_BAYES_CHUNK - 1; t >= 0; t--) {
            double x = r.du[t * ld + row] + r.c[t] * room.k[t * ld + row];
            for (int later = t + 1; later < MN_BAYES_CHUNK; later++) {
                x -= r.du[later * ld + row] * room.coef[t * 16 + later];
                x -= room.k[later * ld + row] * r.h[later * 16 + t];
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
__device__ static void write_back(tiles &D, double *E, const mn_bayes_smem &room,
                                  const back_smem &r, const mn_bayes_shape &s, bool weighs) {
    const int lane = threadIdx.x % 32, ld = s.pitch(), ld_e = s.pitch_e();
    D.each(s, [&](double (&tile)[2], int a, int b) {
        const int row = 8 * a + lane / 4, column = 8 * b + lane / 4;
        double left[4], right[4], up[4], along[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = (4 * i + lane % 4) * ld;
            left[i] = 0.5 * r.du[at + row], right[i] = room.k[at + column];
            up[i] = 0.5 * room.k[at + row], along[i] = r.du[at + column];
        }
        mn_mma_f64_tile(tile, left, right);
        mn_mma_f64_tile(tile, up, along);
        if (!weighs) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = 4 * i + lane % 4;
            left[i] = r.a[t] * room.q[t * ld + row], right[i] = room.q[t * ld + column];
        }
        mn_mma_f64_tile(tile, left, right);
    });
    mn_bayes_each_mean(E, s, [&](double (&tile)[2], int a, int b) {
        const int row = 8 * a + lane / 4, column = 8 * b + lane / 4;
        double left[4], right[4], up[4], along[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = 4 * i + lane % 4;
            left[i] = room.o[t * ld_e + row], right[i] = room.q[t * ld + column];
            up[i] = -r.de[t * ld_e + row], along[i] = room.k[t * ld + column];
        }
        mn_mma_f64_tile(tile, left, right);
        mn_mma_f64_tile(tile, up, along);
    });
}

/* dk and dq but for the noise and c z, by row blocks. P and M are the states in front of the chunk;
 * mix 0 to 3 hold the weights of z in Pbar du, P q, M y and M de. */
__device__ static void read_back(const double *P, const mn_bayes_smem &room, const back_smem &r,
                                 const mn_bayes_shape &s, bool weighs) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ld = s.pitch(), ld_z = s.pitch_z();
    for (int a = warp; a < s.nb; a += MN_BAYES_WARPS) {
        double k[2][2], q[2][2], x[2][2];
        clear(k), clear(q), clear(x);
        for (int b = 0; b < s.nb; b++) {
            const double2 at = *((const double2 *)(P + ((int64_t)a * s.nb + b) * 64) + lane);
            const double tile[2] = { at.x, at.y };
            mn_bayes_left(k, r.du, ld, tile, b);
            if (weighs) mn_bayes_left(q, room.q, ld, tile, b);
        }
        mix(k, r.mix[0], room.z, ld_z, a);
        if (weighs) {
            mix(q, r.mix[1], room.z, ld_z, a);
            get(x, room.zq, ld_z, a);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                q[m][i] = 2.0 * r.a[8 * m + lane / 4] * (q[m][i] + x[m][i]);
            }
        }
        through_mean(q, room.o, s.pitch_e(), room.M, s, a);
        mix(q, r.mix[2], room.z, ld_z, a);
        clear(x);
        through_mean(x, r.de, s.pitch_e(), room.M, s, a);
        mix(x, r.mix[3], room.z, ld_z, a);
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

/* What one channel leaves of each token, from the last one on: all gradients of the raw inputs.
 * du's rows become the channel's parts of dl2. */
template <typename T>
__device__ static void channels_back(const mn_bayes_smem &room, const back_smem &r,
                                     const mn_bayes_args &p, const mn_bayes_shape &s, float *parts,
                                     int64_t t, int first, int count) {
    const int ld = s.pitch(), ld_z = s.pitch_z(), rows = 8 * s.nb;
    const int64_t n_rows = p.call.B * p.call.T * p.call.H, width = 4 * (int64_t)s.K + 1;
    for (int i = threadIdx.x; i < s.K; i += MN_BAYES_THREADS) {
        const int at = i * s.step;
        double rr = r.D[3 * i], ri = r.D[3 * i + 1], ii = r.D[3 * i + 2];
        double trace = r.C[2 * i], turn = r.C[2 * i + 1], nrr = 0.0, nri = 0.0, nii = 0.0;
        for (int j = 0; j < count; j++) {
            const double *phi = room.phi + j * rows + at;
            const double im = s.turns ? phi[1] : 0.0, square = phi[0] * phi[0] + im * im;
            const double weight = room.given_l2[first + j] / (square * square);
            nrr += weight * phi[0] * phi[0], nri -= weight * phi[0] * im, nii += weight * im * im;
        }
        for (int j = MN_BAYES_CHUNK - 1; j >= 0; j--) {
            double *du = r.du + j * ld + at;
            if (j >= count) {
                du[0] = 0.0;
                if (s.turns) du[1] = 0.0;
                continue;
            }
            const double *phi = room.phi + j * rows + at, *k = room.k + j * ld + at;
            const double *q = room.q + j * ld + at, *z = room.z + j * ld_z + at;
            const double re = phi[0], im = s.turns ? phi[1] : 0.0, square = re * re + im * im;
            const double k1 = s.turns ? k[1] : 0.0, q1 = s.turns ? q[1] : 0.0;
            const double z1 = s.turns ? z[1] : 0.0, du1 = s.turns ? du[1] : 0.0;
            const double *dq = r.dq + j * ld + at, *dk_base = r.dk + j * ld + at;
            const double dq1 = s.turns ? dq[1] : 0.0;
            const double dk0 = dk_base[0] + r.c[j] * z[0] + nrr * du[0] + nri * du1;
            const double dk1 = s.turns ? dk_base[1] + r.c[j] * z1 + nri * du[0] + nii * du1 : 0.0;
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
            const double unit = 1.0 / (square * square), noise = room.given_l2[first + j] * unit;
            const double own_rr = noise * re * re, own_ri = -noise * re * im;
            const double own_ii = noise * im * im;
            const double w0 = z[0] * room.inverse[j], w1 = z1 * room.inverse[j];
            trace += q[0] * dq[0] + q1 * dq1 + k[0] * dk0 + k1 * dk1 + x0 * w0 + x1 * w1;
            trace -= 2.0 * (rr * own_rr + 2.0 * ri * own_ri + ii * own_ii);
            turn += q1 * dq[0] - q[0] * dq1 + k1 * dk0 - k[0] * dk1 + x1 * w0 - x0 * w1;
            turn -= 2.0 * ((ri * own_rr + ii * own_ri) - (rr * own_ri + ri * own_ii));
            nrr -= own_rr, nri -= own_ri, nii -= own_ii;
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

#endif
