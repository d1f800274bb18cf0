/* bayes_backward.cu - the Bayesian Layer and its covariances alone, backward over the chunks of
 * bayes.cuh. With D and E the adjoints of Ph and Mh behind a chunk, a_t = scale^2 dqvar_t, y_t =
 * scale do_t, w_t = z_t / sigma_t, x_t = Phi_t'dgainvec_t:
 *
 *   de_t = E'w_t + sum_{s>=t} (q_s.w_t) y_s - sum_{s>t} (k_s.w_t) de_s            dv_t = de_t
 *   dw_t = E e_t + sum_{s>=t} q_s (y_s.e_t) - sum_{s>t} k_s (de_s.e_t) + x_t
 *   b_t  = dw_t / sigma_t - 2 (D w_t + sum_{s>=t} a_s q_s (q_s.w_t))
 *   du_t = b_t + c_t k_t - sum_{s>t} (du_s (k_s.w_t) + k_s (du_s.w_t))
 *   dk_t = c_t z_t + Pbar_t du_t - M_{t-1} de_t          dq_t = M_t y_t + 2 a_t P_t q_t
 *   D <- D + sum a q q' + (du k' + k du') / 2            E <- E + sum q y' - k de'
 *
 * (hats left out). c_t, the adjoint of k'u, needs du_s.w_t for s > t alone, numbers that follow from
 * b_s.w_t: one warp finds them, and then all rows of du at once. dla and dtheta follow without a
 * product: with C = 2 D P + E M, of which only the sums and differences inside channels count,
 *
 *   C_{t-1} = C_t + q dq' + k dk' + x w' - 2 D_{t-1} n_t       dla_t = trace, dtheta_t = turn of C_{t-1}
 *
 * and C is the same in every frame. States in front of spans of 128 tokens come from a first walk,
 * those in front of a span's chunks from a second one, last span first; each chunk has a frame of
 * its own there. Groups leave float32 parts of what they share, added in their order. */
#include "kernels/cuda/bayes.cuh"
#include "kernels/cuda/parts.cuh"
#include "kernels/riccati_args.h"

using tiles = mn_bayes_tiles<true>;    // P and D do not fit in registers together

enum { ROOM_BYTES = 227 * 1024, SPAN = 128, CHUNKS = SPAN / MN_BAYES_CHUNK };

/* Work space, in doubles for each block but the parts. */
struct work {
    double *each;        // D, E, mean, CHUNKS + 1 states, and the room where it is too large
    double *spans;       // states in front of spans
    double *traces;      // of D in front of each sequence, by blocks
    float *parts;        // G x rows x (4 K + 1): dq, dk, dla, dtheta, dl2
    int64_t size, state;
    bool inside;         // the room is in shared memory
};

/* What the way back has beside the room; panels of 16 rows. dq and dk lie over the raw inputs. */
struct back_room {
    double *du, *dw, *dq, *dk, *de;
    double *mix[5];      // (16,16)
    double *h;           // (16,16): du_s.w_t
    double *c, *a, *x;   // 16: adjoint of k'u; weights; dw_t.w_t
    double *D;           // D inside channels: rr, ri, ii
    double *C;           // running C inside channels: its trace and its turn
};

static int64_t back_doubles(int nb, int nm, int K) {
    const int64_t panel = 16 * (8 * nb + 8);
    return mn_bayes_doubles(nb, nm, K, false) + 4 * panel + 16 * (8 * nm + 4) + 6 * 256 + 3 * 16 +
           5 * (int64_t)K + 16;
}

__device__ static back_room back_room_in(const mn_bayes_room &room, double *at,
                                         const mn_bayes_shape &s) {
    back_room r;
    const int panel = 16 * s.pitch();
    const auto take = [&](int count) { double *from = at; at += (count + 1) / 2 * 2; return from; };
    const bool fits = 2 * 16 * s.K >= 2 * panel;
    r.du = take(panel), r.dw = take(panel);
    r.dq = fits ? (double *)room.raw : take(panel);
    r.dk = fits ? (double *)room.raw + panel : take(panel);
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
__device__ static void move_back(tiles &D, double *E, const mn_bayes_room &room,
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

/* c += weights (16,16) panel, columns of block b */
__device__ static void mix(double (&c)[2][2], const double *weights, const double *panel, int ld,
                           int b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const double from = panel[(4 * i + lane % 4) * ld + 8 * b + lane / 4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            mn_dmma(c[m], weights[(8 * m + lane / 4) * 16 + 4 * i + lane % 4], from);
        }
    }
}

/* c += left (16, value columns) times a mean's tiles (value columns, rows), rows of block b */
__device__ static void through_mean(double (&c)[2][2], const double *left, int ld,
                                    const double *M, const mn_bayes_shape &s, int b) {
    const int lane = threadIdx.x % 32;
    for (int j = 0; j < s.nm; j++) {
        const double *tile = M + ((int64_t)j * s.nb + b) * 64;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const double from = tile[(4 * i + lane % 4) * 8 + lane / 4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mn_dmma(c[m], left[(8 * m + lane / 4) * ld + 8 * j + 4 * i + lane % 4], from);
            }
        }
    }
}

__device__ static void clear(double (&c)[2][2]) {
    c[0][0] = c[0][1] = c[1][0] = c[1][1] = 0.0;
}

/* panel rows of block b from c, or the other way round */
__device__ static void put(double *panel, int ld, const double (&c)[2][2], int b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        double *to = panel + (8 * m + lane / 4) * ld + mn_tile_column(b);
        to[0] = c[m][0], to[1] = c[m][1];
    }
}

__device__ static void get(double (&c)[2][2], const double *panel, int ld, int b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const double *from = panel + (8 * m + lane / 4) * ld + mn_tile_column(b);
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
__device__ static void fetch_cotangents(const mn_bayes_room &room, const back_room &r,
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
__device__ static void value_back(const mn_bayes_room &room, const back_room &r,
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
__device__ static void value_grams(const mn_bayes_room &room, const back_room &r,
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
__device__ static void gain_back(const mn_bayes_room &room, const back_room &r, const double *E,
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
__device__ static void covariance_start(tiles &D, const mn_bayes_room &room,
                                        const back_room &r, const mn_bayes_shape &s) {
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
__device__ static void adjoint_scalars(const mn_bayes_room &room, const back_room &r,
                                       const mn_bayes_args &p, const mn_bayes_shape &s, int64_t t,
                                       int count) {
    const int j = threadIdx.x % 16;
    for (int i = MN_BAYES_CHUNK - 1; i >= 0; i--) {
        double h = r.mix[4][i * 16 + j], wDw = 0.0;
        for (int later = i + 1; later < MN_BAYES_CHUNK; later++) {
            const double forward = room.coef[i * 16 + later], known = r.h[later * 16 + i];
            h -= r.h[later * 16 + j] * forward + (j < later ? room.coef[j * 16 + later] : 0.0) * known;
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
__device__ static void covariance_solve(const mn_bayes_room &room, const back_room &r,
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
__device__ static void take_diagonal(tiles &D, const back_room &r,
                                     const mn_bayes_shape &s) {
    D.each(s, [&](double (&x)[2], int a, int b) {
        if (a != b) return;
        const int row = mn_tile_row(a), column = mn_tile_column(b), channel = row / s.step;
        if (row >= s.R) return;
        if (!s.turns && row == column) r.D[3 * channel] = x[0];
        if (!s.turns && row == column + 1) r.D[3 * channel] = x[1];
        if (s.turns && row == column) r.D[3 * channel] = x[0], r.D[3 * channel + 1] = x[1];
        if (s.turns && row == column + 1) r.D[3 * channel + 2] = x[1];
    }, false);
}

/* D and E in front of the chunk. */
__device__ static void write_back(tiles &D, double *E, const mn_bayes_room &room,
                                  const back_room &r, const mn_bayes_shape &s, bool weighs) {
    const int lane = threadIdx.x % 32, ld = s.pitch(), ld_e = s.pitch_e();
    D.each(s, [&](double (&tile)[2], int a, int b) {
        const int row = 8 * a + lane / 4, column = 8 * b + lane / 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = (4 * i + lane % 4), at = t * ld;
            mn_dmma(tile, 0.5 * r.du[at + row], room.k[at + column]);
            mn_dmma(tile, 0.5 * room.k[at + row], r.du[at + column]);
            if (weighs) mn_dmma(tile, r.a[t] * room.q[at + row], room.q[at + column]);
        }
    });
    mn_bayes_each_mean(E, s, [&](double (&tile)[2], int a, int b) {
        const int row = 8 * a + lane / 4, column = 8 * b + lane / 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = 4 * i + lane % 4;
            mn_dmma(tile, room.o[t * ld_e + row], room.q[t * ld + column]);
            mn_dmma(tile, -r.de[t * ld_e + row], room.k[t * ld + column]);
        }
    });
}

/* dk and dq but for the noise and c z, by row blocks. P and M are the states in front of the chunk;
 * mix 0 to 3 hold the weights of z in Pbar du, P q, M y and M de. */
__device__ static void read_back(const double *P, const mn_bayes_room &room, const back_room &r,
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

/* What one channel leaves of each token, from the last one on: all gradients of the raw inputs. du's
 * rows become the channel's parts of dl2. */
template <typename T>
__device__ static void channels_back(const mn_bayes_room &room, const back_room &r,
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
                const double g0 = (double)mn_float(d[0]), g1 = s.turns ? (double)mn_float(d[1]) : 0.0;
                x0 = re * g0 + im * g1, x1 = re * g1 - im * g0;
            }
            rr += r.a[j] * q[0] * q[0] + du[0] * k[0];
            ri += r.a[j] * q[0] * q1 + 0.5 * (du[0] * k1 + du1 * k[0]);
            ii += r.a[j] * q1 * q1 + du1 * k1;
            const double unit = 1.0 / (square * square), noise = room.given_l2[first + j] * unit;
            const double own_rr = noise * re * re, own_ri = -noise * re * im, own_ii = noise * im * im;
            const double w0 = z[0] * room.inverse[j], w1 = z1 * room.inverse[j];
            trace += q[0] * dq[0] + q1 * dq1 + k[0] * dk0 + k1 * dk1 + x0 * w0 + x1 * w1;
            trace -= 2.0 * (rr * own_rr + 2.0 * ri * own_ri + ii * own_ii);
            turn += q1 * dq[0] - q[0] * dq1 + k1 * dk0 - k[0] * dk1 + x1 * w0 - x0 * w1;
            turn -= 2.0 * ((ri * own_rr + ii * own_ri) - (rr * own_ri + ri * own_ii));
            nrr -= own_rr, nri -= own_ri, nii -= own_ii;
            float *to = parts + (s.g * n_rows + (s.span.b * p.call.T + when) * p.call.H + s.h) * width;
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

/* ---- walks ----------------------------------------------------------------------------------- */

/* Where a state lies: P's tiles, then the mean's. */
__device__ static double *mean_of(double *state, const mn_bayes_shape &s) {
    return state + (int64_t)s.nb * s.nb * 64;
}

/* From the state in front of a chunk to the one behind it; the frame is at rest on both sides. */
template <typename T>
__device__ __noinline__ static void walk(tiles &P, const mn_bayes_room &room,
                            const mn_bayes_args &p, mn_bayes_shape s, int64_t t,
                                         int limit) {
    const int all = (int)min((int64_t)MN_BAYES_CHUNK, s.span.length - t);
    s.reads = false;
    __syncthreads();
    mn_bayes_fetch<T>(room, p, s, t, all);
    __syncthreads();
    const bool steep = mn_bayes_is_steep(room, s, false);
    const int count = steep ? 1 : all;
    for (int first = 0; first < all && first < limit; first += count) {
        if (steep) {
            mn_bayes_step_frame(room, s, first);
            mn_bayes_rebase(P, room, s);
        }
        mn_bayes_chunk<T>(P, room, p, s, t, first, count, steep, false);
        mn_bayes_write(P, room, s);
        __syncthreads();
    }
    if (steep) return;
    mn_bayes_advance_frame(room, s);
    __syncthreads();
    mn_bayes_rebase(P, room, s);
}

/* Everything of tokens [first, first + count) of the chunk at t, whose frame starts from `state`: D
 * and E go from behind them to in front of them. */
template <typename T>
__device__ __noinline__ static void chunk_back(tiles &D, double *E, double *state,
                                  mn_bayes_room room, const back_room &r, const mn_bayes_args &p,
                                  const mn_bayes_shape &s, float *parts, int64_t t, int first,
                                  int count, bool still) {
    const bool weighs = p.cot.qvar.data && p.q.data;
    tiles P;
    P.memory = state;
    room.M = mean_of(state, s);
    mn_bayes_chunk<T>(P, room, p, s, t, first, count, still, false);
    __syncthreads();
    each_pair([&](int i, int row, int) {
        room.read[i] = mn_bayes_whole(room.parts, i) * room.inverse[row];
    });
    fetch_cotangents<T>(room, r, p, s, t + first, count);
    __syncthreads();
    value_back<T>(room, r, E, p, s, t + first, count);
    value_grams(room, r, s);
    gain_back(room, r, E, s);
    take_diagonal(D, r, s);
    __syncthreads();
    covariance_start(D, room, r, s);
    mn_bayes_gram(room.parts, r.dw, s.pitch(), room.z, s.pitch_z(), s.nb);
    __syncthreads();
    if (threadIdx.x < 16) {
        r.x[threadIdx.x] = mn_bayes_whole(room.parts, 17 * (int)threadIdx.x) *
                           room.inverse[threadIdx.x];
    }
    __syncthreads();
    mn_bayes_gram(room.parts, r.du, s.pitch(), room.z, s.pitch_z(), s.nb);
    __syncthreads();
    each_pair([&](int i, int, int column) {
        r.mix[4][i] = mn_bayes_whole(room.parts, i) * room.inverse[column];
    });
    __syncthreads();
    if (threadIdx.x < 32) adjoint_scalars<T>(room, r, p, s, t + first, count);
    __syncthreads();
    covariance_solve(room, r, s);
    write_back(D, E, room, r, s, weighs);
    mn_bayes_gram(room.parts, room.z, s.pitch_z(), r.du, s.pitch(), s.nb);
    each_pair([&](int i, int row, int column) {
        const int turned = column * 16 + row;
        const double inverse = room.inverse[column];
        r.mix[2][i] = column <= row ? inverse * r.mix[0][turned] : 0.0;
        r.mix[3][i] = column < row ? inverse * r.mix[1][turned] : 0.0;
    });
    __syncthreads();
    each_pair([&](int i, int row, int column) {
        const int turned = column * 16 + row;
        const double inverse = room.inverse[column];
        r.mix[0][i] = column < row ? -inverse * mn_bayes_whole(room.parts, turned) : 0.0;
        r.mix[1][i] = column <= row ? -room.read[turned] : 0.0;
    });
    __syncthreads();
    read_back(state, room, r, s, weighs);
    channels_back<T>(room, r, p, s, parts, t + first, first, count);
}

/* D and E from the cotangents of the last states, of which P and room.M are the values; C. */
__device__ static void load_cotangents(tiles &P, double *E,
                                       const mn_bayes_room &room, const back_room &r,
                                       const mn_bayes_args &p, const mn_bayes_shape &s) {
    const float *dP = mn_row<float>(p.cot.P, s.n, 0, s.h), *dM = mn_row<float>(p.cot.M, s.n, 0, s.h);
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
        if (threadIdx.x % 4 == 0) room.noise[row] = 2.0 * own, room.cross[row] = 2.0 * cross;
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
        double trace = room.noise[row], turn = 0.0;
        if (s.turns) trace += room.noise[row + 1], turn = room.cross[row + 1] - room.cross[row];
        for (int j = 0; j < s.columns; j++) {
            const int64_t at = ((int64_t)(j / 8) * s.nb + row / 8) * 64 + j % 8 * 8 + row % 8;
            trace += E[at] * room.M[at];
            if (!s.turns) continue;
            trace += E[at + 1] * room.M[at + 1];
            turn += E[at + 1] * room.M[at] - E[at] * room.M[at + 1];
        }
        r.C[2 * i] = trace, r.C[2 * i + 1] = turn;
    }
    __syncthreads();
}

/* The gradients of the states handed in, and D's trace. */
__device__ static void put_first(tiles &D, double *E, const mn_bayes_room &room,
                                 const mn_bayes_args &p, const mn_bayes_shape &s, double *trace) {
    float *dP = mn_row<float>(p.grad.P0, s.n, 0, s.h), *dM = mn_row<float>(p.grad.M0, s.n, 0, s.h);
    const int64_t R = s.R;
    if (dP) dP += s.g * R * R;
    D.each(s, [&](double (&x)[2], int a, int b) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t row = mn_tile_row(a), column = mn_tile_column(b) + i;
            if (row == column) room.noise[row] = row < R ? x[i] : 0.0;
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
    for (int i = 0; i < s.R; i++) sum += room.noise[i];
    *trace = sum;
}

/* Copies a state; all threads call, and see it. */
__device__ static void copy_state(double *to, double *mean, const double *from, const double *from_mean,
                                  const mn_bayes_shape &s) {
    __syncthreads();
    copy_tiles(to, from, s);
    copy_mean(mean, from_mean, s);
    __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(MN_BAYES_THREADS, 1)
bayes_backward_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ work w) {
    extern __shared__ __align__(16) double doubles[];
    mn_bayes_shape s = mn_bayes_shape_at(p, blockIdx.x);
    s.reads = true;
    const int64_t covariance = (int64_t)s.nb * s.nb * 64, mean = (int64_t)s.nm * s.nb * 64;
    double *own = w.each + blockIdx.x * w.size, *E = own + covariance, *M = E + mean;
    double *chunks = M + mean, *spare = chunks + CHUNKS * w.state;
    double *base = w.inside ? doubles : spare + w.state + covariance;
    tiles P, D;
    D.memory = own;
    P.memory = spare + w.state;
    const mn_bayes_room room = mn_bayes_room_in(base, s, M);
    const back_room r = back_room_in(room, base + mn_bayes_doubles(s.nb, s.nm, s.K, false), s);
    const int64_t length = s.span.length, n_spans = (length + SPAN - 1) / SPAN;
    const int64_t slot0 = p.call.cu_seqlens ? s.span.t0 / SPAN + s.n
                                            : s.n * ((p.call.T + SPAN - 1) / SPAN);
    const auto span_at = [&](int64_t i) {
        return w.spans + (((slot0 + i) * p.call.H + s.h) * p.call.G + s.g) * w.state;
    };
    mn_bayes_clear(room, s);
    mn_bayes_load(P, room, p, s, sizeof(T) == 2);
    for (int64_t t = 0; t < length; t += MN_BAYES_CHUNK) {
        if (t % SPAN == 0) {
            double *span = span_at(t / SPAN);
            copy_state(span, mean_of(span, s), P.memory, M, s);
        }
        walk<T>(P, room, p, s, t, MN_BAYES_CHUNK);
    }
    __syncthreads();
    copy_tiles(D.memory, P.memory, s);
    __syncthreads();
    load_cotangents(D, E, room, r, p, s);
    for (int64_t i = n_spans - 1; i >= 0; i--) {
        const int n_chunks = (int)min((int64_t)CHUNKS, (length - i * SPAN + MN_BAYES_CHUNK - 1) /
                                                           MN_BAYES_CHUNK);
        double *span = span_at(i);
        copy_state(P.memory, M, span, mean_of(span, s), s);
        for (int c = 0; c < n_chunks; c++) {
            double *state = chunks + c * w.state;
            copy_state(state, mean_of(state, s), P.memory, M, s);
            if (c + 1 < n_chunks) {
                walk<T>(P, room, p, s, i * SPAN + c * MN_BAYES_CHUNK, MN_BAYES_CHUNK);
            }
        }
        for (int c = n_chunks - 1; c >= 0; c--) {
            const int64_t t = i * SPAN + c * MN_BAYES_CHUNK;
            const int all = (int)min((int64_t)MN_BAYES_CHUNK, length - t);
            double *state = chunks + c * w.state;
            __syncthreads();
            mn_bayes_fetch<T>(room, p, s, t, all);
            __syncthreads();
            const bool steep = mn_bayes_is_steep(room, s, false);
            if (!steep) {
                mn_bayes_advance_frame(room, s);
                __syncthreads();
                move_back(D, E, room, s);
            }
            /* Where a channel decays by more than e^-40 tokens go one by one, each from a walk of
             * its own up to it. */
            for (int token = steep ? all - 1 : 0; token >= 0; token--) {
                if (steep) {
                    copy_state(P.memory, M, state, mean_of(state, s), s);
                    if (token > 0) walk<T>(P, room, p, s, t, token);
                    __syncthreads();
                    mn_bayes_fetch<T>(room, p, s, t, all);
                    __syncthreads();
                    mn_bayes_step_frame(room, s, token);
                    mn_bayes_rebase(P, room, s);
                    copy_state(spare, mean_of(spare, s), P.memory, M, s);
                }
                chunk_back<T>(D, E, steep ? spare : state, room, r, p, s, w.parts, t,
                              steep ? token : 0, steep ? 1 : all, steep);
                if (!steep) continue;
                mn_bayes_fetch<T>(room, p, s, t, all);
                __syncthreads();
                mn_bayes_step_frame(room, s, token);
                move_back(D, E, room, s);
            }
        }
    }
    __syncthreads();
    put_first(D, E, room, p, s, w.traces + blockIdx.x);
}

/* ---- what groups share ----------------------------------------------------------------------- */

/* Sums over groups, one thread for each number of a token. */
template <typename T>
__global__ void __launch_bounds__(256)
bayes_groups_kernel(const __grid_constant__ mn_bayes_args p, const float *parts) {
    const int64_t K = p.call.K, width = 4 * K + 1, rows = p.call.B * p.call.T * p.call.H;
    const int64_t at = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (at >= rows * width) return;
    const int64_t row = at / width, i = at % width, which = i / K, channel = i % K;
    const int64_t h = row % p.call.H, t = row / p.call.H % p.call.T, b = row / p.call.H / p.call.T;
    const mn_out to[] = { p.grad.q, p.grad.k, p.grad.la, p.grad.theta, p.grad.l2 };
    if (!to[which].data) return;
    float sum = 0.0f;
    for (int64_t g = 0; g < p.call.G; g++) sum += parts[g * rows * width + at];
    mn_put(mn_row<T>(to[which], b, t, h) + channel, sum);
}

/* dp0 of a head: the traces of its sequences and groups; none where P_0 was given. */
template <typename T>
__global__ void bayes_first_kernel(const __grid_constant__ mn_bayes_args p, const double *traces) {
    const int64_t h = threadIdx.x + blockIdx.x * (int64_t)blockDim.x, G = p.call.G;
    if (h >= p.call.H) return;
    double sum = 0.0;
    for (int64_t n = 0; n < mn_n_spans(p.call) && !p.P0.data; n++) {
        for (int64_t g = 0; g < G; g++) sum += traces[(n * p.call.H + h) * G + g];
    }
    mn_put(mn_row<T>(p.grad.p0, 0, 0, h), (float)sum);
}

/* ---- launches -------------------------------------------------------------------------------- */

struct layout {
    int nb, nm;
    size_t room_bytes, spans, each, blocks, parts;    // doubles; parts in floats
    work w;
};

static bool layout_of(layout *l, const mn_bayes_args *p) {
    const mn_call &c = p->call;
    const int64_t R = c.K * (p->theta.data ? 2 : 1);
    if (c.K > MN_BAYES_WIDEST) return false;
    l->nb = (int)((R + 7) / 8);
    l->nm = (int)mn_ceil_div(mn_ceil_div(c.V, mn_max(c.G, 1)), 8);
    const size_t room = (size_t)back_doubles(l->nb, l->nm, (int)c.K);
    const size_t square = (size_t)l->nb * l->nb * 64, mean = (size_t)l->nm * l->nb * 64;
    l->room_bytes = room * sizeof(double);
    l->w.inside = l->room_bytes <= ROOM_BYTES;
    l->w.state = (int64_t)(square + mean);
    size_t size = 2 * square + 2 * mean + (CHUNKS + 1) * (square + mean);
    if (!l->w.inside) size += room;
    l->w.size = (int64_t)size;
    size_t heads, rows;
    bool ok = mn_mul_size(&heads, (size_t)c.H, (size_t)c.G) &&
              mn_mul_size(&l->blocks, heads, (size_t)mn_n_spans(c)) &&
              mn_mul_size(&l->each, l->blocks, size);
    ok = ok && mn_mul_size(&l->spans, (size_t)mn_tile_slots(c, SPAN), heads) &&
         mn_mul_size(&l->spans, l->spans, square + mean);
    ok = ok && mn_mul_size(&rows, (size_t)c.B, (size_t)c.T) && mn_mul_size(&rows, rows, heads);
    return ok && mn_mul_size(&l->parts, rows, 4 * (size_t)c.K + 1);
}

static bool backward_plan(const mn_bayes_args *p, mn_plan *plan) {
    layout l;
    size_t count, floats;
    if (p->call.K > MN_BAYES_WIDEST) return true;    // refused at the launch
    return layout_of(&l, p) && mn_add_size(&count, l.spans, l.each) &&
           mn_add_size(&count, count, l.blocks) &&
           mn_mul_size(&count, count, sizeof(double)) &&
           mn_mul_size(&floats, l.parts, sizeof(float)) &&
           mn_add_size(&plan->shared_bytes, count, floats);
}

template <typename T>
static int start(const mn_bayes_args *p, const layout &l, cudaStream_t on) {
    const size_t bytes = l.w.inside ? l.room_bytes : 0;
    const cudaError_t code = cudaFuncSetAttribute(
        bayes_backward_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code != cudaSuccess) return code;
    bayes_backward_kernel<T><<<(unsigned)l.blocks, MN_BAYES_THREADS, bytes, on>>>(*p, l.w);
    const int launched = mn_launched();
    if (launched != cudaSuccess) return launched;
    const int64_t numbers = p->call.B * p->call.T * p->call.H * (4 * p->call.K + 1);
    if (numbers > 0) {
        bayes_groups_kernel<T><<<mn_blocks(numbers, 256), 256, 0, on>>>(*p, l.w.parts);
    }
    if (p->grad.p0.data) {
        bayes_first_kernel<T><<<mn_blocks(p->call.H, 64), 64, 0, on>>>(*p, l.w.traces);
    }
    return mn_launched();
}

static int backward(const mn_bayes_args *p, void *shared, void *stream) {
    layout l;
    const cudaStream_t on = (cudaStream_t)stream;
    if (!layout_of(&l, p) || l.nb * 8 > MN_BAYES_WIDEST || l.blocks > INT32_MAX) {
        return cudaErrorNotSupported;
    }
    if (l.blocks == 0) return cudaSuccess;
    double *at = (double *)shared;
    l.w.each = at, l.w.spans = at + l.each, l.w.traces = at + l.each + l.spans;
    l.w.parts = (float *)(l.w.traces + l.blocks);
    return p->call.dtype == MN_BF16 ? start<mn_bf16>(p, l, on) : start<float>(p, l, on);
}

MN_CUDA_PLAN(bayes_backward) {
    return backward_plan((const mn_bayes_args *)args, plan);
}

MN_CUDA_LAUNCH(bayes_backward) {
    return backward((const mn_bayes_args *)args, shared, stream);
}

MN_CUDA_PLAN(riccati_backward) {
    const mn_bayes_args p = mn_riccati_as_bayes((const mn_riccati_args *)args);
    return backward_plan(&p, plan);
}

MN_CUDA_LAUNCH(riccati_backward) {
    const mn_bayes_args p = mn_riccati_as_bayes((const mn_riccati_args *)args);
    return backward(&p, shared, stream);
}
