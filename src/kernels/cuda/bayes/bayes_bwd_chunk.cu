/* bayes_bwd_chunk.cu - the Bayesian Layer and its covariances alone, backward. Hats are left out:
 * all is in the frame of a span (bayes_span.cuh) or, on the narrow way, of a chunk (bayes.cuh).
 *
 * With rows for the 16 tokens of a chunk, w = z / sigma, L = lower(K W', unit diagonal)^-1, whose
 * transpose is L', A = upper(W Q'), a = scale^2 dqvar, y = scale do, x = Phi'dgainvec, and D and E
 * the adjoints of P and M behind the chunk:
 *
 *   de = L'(W E + A Y)         dv = de           E <- E + Q'Y - K'de
 *   dw_t = E e_t + sum_{s>=t} q_s (y_s.e_t) - sum_{s>t} k_s (de_s.e_t) + x_t
 *   b = dw / sigma - 2 A a Q                     Psi_ts = -w_t.b_s (t < s, and symmetric)
 *   Psi_tt = 2 (dkvar + dgain r2 / sigma^2 - sum_{s>=t} a_s A_ts^2 - w_t.b_t)
 *
 * where b and Psi are those without D, so that they come first. With D behind the chunk,
 *
 *   Y = W D - b / 2            H = L'Y                     O = L'(W D W' + Psi / 2) L
 *   D <- D - K'H - (H - O K)'K + Q'a Q                     du = -2 H + (diag O + 2 upper O) K
 *
 * where below the diagonal W D W' + Psi / 2 is Y W', and c_t = O_tt is the adjoint of k'u: D goes
 * to F'D F with F = (I - w_1 k_1') ... (I - w_16 k_16'), and du follows the same products.
 * With P and M the states in front of the span, sums over its earlier tokens,
 *
 *   dk_t = c_t z_t + (P + n_t) du_t - M de_t - sum_{s<t} w_s (z_s.du_t + e_s.de_t)
 *   dq_t = M y_t + 2 a_t (P + n_t) q_t + sum_{s<=t} w_s (e_s.y_t - 2 a_t z_s.q_t)
 *   dr2_t = c_t - dkvar_t - dgain_t / sigma_t
 *
 * dla and dtheta follow without a product: with C = 2 D P + E M, of which only the sums and
 * differences inside channels count, the same in every frame,
 *
 *   C_{t-1} = C_t + q dq' + k dk' + x w' - 2 D_{t-1} n_t     dla_t, dtheta_t: its trace, its turn
 *
 * So one kernel scans the covariance forward and the mean behind it, one E back and D behind it, on
 * different processors; before and after them kernels do all spans at once. The states of more
 * than 128 rows, and heads that decay steeply, go the narrow way (bayes_bwd_narrow.cu): one block
 * for each, chunk by chunk, after a scan that leaves states in front of spans of 128 tokens; there
 *
 *   du_t = b_t + c_t k_t - sum_{s>t} (du_s (k_s.w_t) + k_s (du_s.w_t))
 *
 * and groups leave float32 parts of what they share, added in their order. */
#include "kernels/cuda/bayes/bayes_span.cuh"
#include "kernels/cuda/bayes/bayes.cuh"
#include "kernels/cuda/bayes/bayes_rmem_tile.cuh"
#include "kernels/cuda/bayes/bayes_bwd_covariance_scan.cuh"
#include "kernels/cuda/bayes/bayes_bwd_mean_scan.cuh"
#include "kernels/cuda/bayes/bayes_bwd_narrow.h"
#include "kernels/riccati_args.h"

namespace mneme::bayes {

/* Scans run side by side in a launch. One that waits for another has the later blocks: by the time
 * that they start, all blocks before them have started, so that nobody waits for what cannot come.
 * GPUs deal blocks out in the order of their numbers, on which scans in one pass rely as well,
 * though CUDA does not say so. Taking work by counting needs no such order and took 7.94 ms instead
 * of 7.24, perhaps as neighbouring processors are then at different scans. */

/* ---- the covariance forward ------------------------------------------------------------------ */

/* Shared memory of the covariance scan, in doubles; a block has a group of a head of a sequence.
 * TIGHT: keys, which are read first, of two chunks. */
template <int R, bool TIGHT>
struct covariance_smem {
    static constexpr int KEY_STAGES = TIGHT ? 2 : STAGES;

    double k[KEY_STAGES][16 * pitch<R>::left], q[STAGES][16 * pitch<R>::left];
    double phi[STAGES][R], noise[STAGES][2 * R];
    double B[16 * pitch<R>::right], z[16 * pitch<R>::right];
    double parts[R / 16 * 16 * PARTS_LD];
    double S[16 * SMALL_LD], eliminate[16 * SMALL_LD];
    double inverse[2][CHUNK], sigma[CHUNK];    // inverse of this chunk and of the one before
    double spread[R / 16];
};

/* S + diag r2 = G' diag(1/sigma) G by one warp: lane t has column t, lane 16 + t that of the unit
 * matrix, which becomes G'^-1. The rows of S come first. Lane t has r2_t. Two pivots at a time:
 * with a, b, c their (2,2), the reciprocals of a and of a c - b^2 do not wait for each other. */
__device__ static void factorise(const double *S, double *eliminate, double *sigma,
                                 double *inverse, double r2) {
    constexpr unsigned ALL = 0xffffffffu;
    const int lane = threadIdx.x % 32, t = lane % 16;
    const bool unit = lane >= 16;
    double column[CHUNK], mine = 0.0, own = 0.0;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        const double s = S[i <= t ? i * SMALL_LD + t : t * SMALL_LD + i];
        column[i] = unit ? (i == t ? 1.0 : 0.0) : s;
    }
#pragma unroll
    for (int j = 0; j < CHUNK; j += 2) {
        const double b = __shfl_sync(ALL, column[j], j + 1);
        const double c = __shfl_sync(ALL, column[j + 1], j + 1);
        const double a = __shfl_sync(ALL, r2, j) + mn_fmax(__shfl_sync(ALL, column[j], j), 0.0);
        const double rest = mn_fmax(fma(c, a, -(b * b)), 0.0);
        const double both = fma(__shfl_sync(ALL, r2, j + 1), a, rest);
        const double first = mn_rcp_f64(a), second = a * mn_rcp_f64(both);
        const double by_first = column[j] * first;
        column[j + 1] = fma(-b, by_first, column[j + 1]);
        const double by_second = column[j + 1] * second;
        if (lane == j) mine = a, own = first;
        if (lane == j + 1) mine = both * first, own = second;
#pragma unroll
        for (int i = j + 2; i < CHUNK; i++) {
            const double x = __shfl_sync(ALL, column[j], i);
            const double y = __shfl_sync(ALL, column[j + 1], i);
            column[i] = fma(-y, by_second, fma(-x, by_first, column[i]));
        }
    }
    if (!unit) sigma[t] = mine, inverse[t] = own;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        if (unit) eliminate[i * SMALL_LD + t] = column[i];
    }
}

/* w_s.q_t for s <= t of a chunk whose z is in shared memory: half the columns by each of two
 * warps. */
template <int R>
__device__ static void put_reads(double *to, const double *z, const double *q,
                                 const double *inverse, int half) {
    const int lane = threadIdx.x % 32;
    double c[2][2][2];
    zero(c[0]), zero(c[1]);
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
        double a[4], b[2];
        left_rows(a, z, pitch<R>::right, 8 * j);
        right_rows(b, q + 8 * half * pitch<R>::left, pitch<R>::left, 8 * j);
        mn_mma_f64_k8(c[j % 2], a, b);
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int s = 8 * m + lane / 4, t = 8 * half + 2 * (lane % 4);
        const double x = (c[0][m][0] + c[1][m][0]) * inverse[s];
        const double y = (c[0][m][1] + c[1][m][1]) * inverse[s];
        *(double2 *)(to + s * 16 + t) = make_double2(s <= t ? x : 0.0, s <= t + 1 ? y : 0.0);
    }
}

/* Whether a P that was handed in is raised, as mn_bayes_raise says; all threads call. */
template <int R, bool TIGHT>
__device__ static bool raise_col_tile(strip<R> &P, covariance_smem<R, TIGHT> &smem,
                                      const double *nk, double r2, bool turns) {
    const double few = 8.0 * 0x1p-24;
    const int warp = threadIdx.x / 32;
    double sum = 0.0, own[2][2] = {};
    pick_inside<R>(own, P);
    each_inside(own, [&](double &x, int row, int column) {
        if (turns || row == column) sum += smem.k[0][row] * smem.k[0][column] * x;
    });
    for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x % 32 == 0) smem.spread[warp] = sum;
    __syncthreads();
    double scale = 0.0, hidden = 0.0;
    for (int i = 0; i < R / 16; i++) scale += smem.spread[i];
    for (int r = 0; r < R; r++) hidden += smem.k[0][r] * nk[r];
    scale = few * (scale + hidden);
    if (fmin(smem.S[0], r2) >= scale || hidden >= scale) return false;
    each_inside(own, [&](double &x, int row, int column) {
        if (row == column) x *= 1.0 + few;
    });
    put_inside<R>(P, own);
    return true;
}

template <int R>
__device__ static void load_covariance(strip<R> &P, const mn_bayes_args &p, const span_group &s,
                                       const double *enter, int rows, bool bf16) {
    const float *given = mn_row<float>(p.P0, s.n, 0, s.h);
    double size = 1.0;
    if (p.p0.data) {
        size = bf16 ? (double)mn_float(*mn_row<mn_bf16>(p.p0, 0, 0, s.h))
                    : (double)*mn_row<float>(p.p0, 0, 0, s.h);
    }
    if (given) given += s.g * rows * rows;
    fill_col_tile<R>(P, [&](int row, int column) {
        const bool inside = row < rows && column < rows;
        const double by = enter && inside ? enter[row] * enter[column] : 1.0;
        if (given) return inside ? by * (double)given[(int64_t)row * rows + column] : 0.0;
        return inside && row == column ? by * size : 0.0;
    });
}

/* C behind the last token from a state's strip and `adjoint(row, column)`: sums over the columns,
 * and with the rows of channels crossed. */
template <int R, typename F>
__device__ static void put_last(double *to, const strip<R> &P, F adjoint) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int row = mn_tile_row(2 * warp + m);
        double own = 0.0, cross = 0.0;
#pragma unroll
        for (int j = 0; j < R / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const double d = adjoint(row, mn_tile_column(j) + i);
                own += d * P[j][m][i];
                cross += d * __shfl_xor_sync(0xffffffffu, P[j][m][i], 4);
            }
        }
        for (int lanes = 1; lanes < 4; lanes <<= 1) {
            own += __shfl_xor_sync(0xffffffffu, own, lanes);
            cross += __shfl_xor_sync(0xffffffffu, cross, lanes);
        }
        if (threadIdx.x % 4 == 0) to[row] = 2.0 * own, to[R + row] = 2.0 * cross;
    }
}

/* Chunk c on its way to shared memory. */
template <int R, bool TIGHT>
__device__ static void fetch_covariance(covariance_smem<R, TIGHT> &smem, const span_work &w,
                                        const scan_place &at, int64_t c) {
    constexpr int LEFT = pitch<R>::left, THREADS = 2 * R;
    const int stage = (int)(c % STAGES);
    if (c < at.n_chunks) {
        const int64_t from = at.shared(c) * CHUNK * R;
        const double *noise = w.noise + (at.head(c) * 5 + 4) * 2 * R;
        copy_rows_later<R, CHUNK, THREADS>(smem.k[c % smem.KEY_STAGES], LEFT, w.k + from);
        copy_rows_later<R, CHUNK, THREADS>(smem.q[stage], LEFT, w.q + from);
        copy_rows_later<R, 2, THREADS>(smem.noise[stage], R, noise);
        copy_rows_later<R, 1, THREADS>(smem.phi[stage], R, w.leave + at.head(c) * R);
    }
    close_copies();
}

/* z / sigma and what chunks need of each other, of a group of a head of a sequence: the first 2 R
 * threads of a block. */
template <int R, bool TIGHT>
__device__ static void scan_covariance(covariance_smem<R, TIGHT> &smem, const mn_bayes_args &p,
                                       const span_work &w, int64_t block, bool bf16) {
    constexpr int LEFT = pitch<R>::left, RIGHT = pitch<R>::right;
    const scan_place at = scan_place_at(p, block);
    const span_group &s = at.s;
    if (w.steep[s.n * at.H + s.h]) return;
    const bool turns = p.theta.data != NULL, handed_in = p.P0.data != NULL;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = (int)p.call.K * (turns ? 2 : 1), column = 16 * warp;
    strip<R> P;
    load_covariance<R>(P, p, s, at.template enter<R>(w), rows, bf16);
    fetch_covariance<R, TIGHT>(smem, w, at, 0), fetch_covariance<R, TIGHT>(smem, w, at, 1);
    await_copies();
    __syncthreads();
    for (int64_t c = 0; c < at.n_chunks; c++) {
        const int stage = (int)(c % STAGES), now = (int)(c % 2);
        const double *k = smem.k[c % smem.KEY_STAGES];
        const double *nk = w.nk + at.shared(c) * CHUNK * R;
        const double r2 = w.r2[at.own(c) * CHUNK + lane % 16];
        double x[2][2][2], noisy[2][2][2];
        get_rows(noisy[0], nk, R, column), get_rows(noisy[1], nk, R, column + 8);
        for (bool again = false;; again = true) {
            zero(x[0]), zero(x[1]);
            through_col_tile<R>(x, k, LEFT, P);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i / 4][i / 2 % 2][i % 2] += noisy[i / 4][i / 2 % 2][i % 2];
            }
            gram_share<R>(smem.parts, x, k, LEFT);
            put_rows(smem.B, RIGHT, column, x[0]), put_rows(smem.B, RIGHT, column + 8, x[1]);
            __syncthreads();
            add_shares<R>(smem.S, smem.parts);
            __syncthreads();
            if (!handed_in || c > 0 || again) break;
            const double first = __shfl_sync(0xffffffffu, r2, 0);
            if (!raise_col_tile<R, TIGHT>(P, smem, nk, first, turns)) break;
        }
        if (c % SPAN_CHUNKS == 0) {
            double *to = w.P + at.group(c) * w.P_each + 16 * warp * R;
#pragma unroll
            for (int j = 0; j < R / 8; j++) put_rows(to, R, 8 * j, P[j]);
        }
        if (warp == 0) {
            factorise(smem.S, smem.eliminate, smem.sigma, smem.inverse[now], r2);
        } else if (warp < 3 && c > 0) {
            put_reads<R>(w.reads + at.own(c - 1) * SMALL, smem.z,
                         smem.q[(c - 1) % STAGES], smem.inverse[!now], warp - 1);
        } else if (warp == R / 16 - 1 && lane == 0) {
            say_left(w.left + block, c);
        }
        __syncthreads();
        fetch_covariance<R, TIGHT>(smem, w, at, c + 2);
        double left[8];
        left_small(left, smem.eliminate, SMALL_LD);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            double b[4];
            right_columns16(b, smem.B, RIGHT, column + 8 * m);
            zero(x[m]);
            mn_mma_f64_k16(x[m], left, b);
            put_rows(smem.z, RIGHT, column + 8 * m, x[m]);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const double inverse = smem.inverse[now][lane / 4 + 8 * t];
                x[m][t][0] *= inverse, x[m][t][1] *= inverse;
            }
            put_rows(w.w + at.own(c) * CHUNK * R, R, column + 8 * m, x[m]);
        }
        for (int i = threadIdx.x; i < SMALL; i += 2 * R) {
            w.eliminate[at.own(c) * SMALL + i] = smem.eliminate[i / 16 * SMALL_LD + i % 16];
        }
        if (threadIdx.x < CHUNK) {
            w.sigma[at.own(c) * CHUNK + threadIdx.x] = smem.sigma[threadIdx.x];
        }
        await_copies();
        __syncthreads();
        left_columns16(left, smem.z, RIGHT, column);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const double inverse = -smem.inverse[now][lane % 4 + 4 * i];
            left[2 * i] *= inverse, left[2 * i + 1] *= inverse;
        }
#pragma unroll
        for (int j = 0; j < R / 8; j++) {
            double b[4];
            right_columns16(b, smem.z, RIGHT, 8 * j);
            mn_mma_f64_k16(P[j], left, b);
        }
        if (c % SPAN_CHUNKS != SPAN_CHUNKS - 1) continue;
        const double *noise = smem.noise[stage];
        double own[2][2] = {};
        pick_inside<R>(own, P);
        each_inside(own, [&](double &to, int row, int other) {
            to += row == other ? noise[row] : noise[R + row];
        });
        put_inside<R>(P, own);
        move_col_tile_columns<R>(P, smem.phi[stage], turns, false);
        move_col_tile_rows<R>(P, smem.phi[stage], turns, false);
    }
    __syncthreads();
    if (threadIdx.x == 0) say_left(w.left + block, at.n_chunks);
    if (at.n_chunks > 0 && (warp == 1 || warp == 2)) {
        put_reads<R>(w.reads + at.own(at.n_chunks - 1) * SMALL, smem.z,
                     smem.q[(at.n_chunks - 1) % STAGES], smem.inverse[(at.n_chunks - 1) % 2],
                     warp - 1);
    }
    const float *dP = mn_row<float>(p.cot.P, s.n, 0, s.h);
    if (dP) dP += s.g * rows * rows;
    put_last<R>(w.last + block * (w.slices * SLICES + 1) * 2 * R, P,
                [&](int row, int other) { return symmetric_cotangent(dP, rows, row, other); });
}

/* ---- channels: gradients from dk and dq in the frame, all spans at once ---------------------- */

enum { CHANNELS_LD = 129, CHANNEL_THREADS = 128 };

/* x_t w_t inside channel i, of all groups: its trace and its turn. */
template <typename T, int R>
__device__ static void gain_inside(double &trace, double &turning, const mn_bayes_args &p,
                                   const span_work &w, const mn_tile_span &tile, int64_t head,
                                   int t, int i, const double *phi) {
    const int64_t G = p.call.G, H = p.call.H;
    const bool turns = p.theta.data != NULL;
    const int step = turns ? 2 : 1, r = i * step, rows = (int)p.call.K * step;
    for (int64_t g = 0; g < G; g++) {
        const span_group s = { tile.n, head % H, g, 0, 0 };
        const double *z = w.w + ((head * G + g) * SPAN_TOKENS + t) * R + r;
        const double x0 = transposed_gain<T>(p, tile, s, phi, t, r, rows, turns);
        trace += x0 * z[0];
        if (!turns) continue;
        const double x1 = transposed_gain<T>(p, tile, s, phi, t, r + 1, rows, turns);
        trace += x1 * z[1];
        turning += x1 * z[0] - x0 * z[1];
    }
}

/* What a thread has of a token: its channel's rows, in complex numbers where channels turn. */
struct channel_token {
    double2 phi, du, dk, dq;
    float k, q;
};

template <bool TURNS>
__device__ static double2 pair_at(const double *x) {
    if (TURNS) return *(const double2 *)x;
    return make_double2(*x, 0.0);
}

/* Phi' of a real number */
template <bool TURNS>
__device__ static double2 in_frame(double2 phi, double x) {
    return make_double2(phi.x * x, TURNS ? -phi.y * x : 0.0);
}

/* What a token has to do with its channel: n du and 2 a n q join dk and dq, and D inside the
 * channel, its trace and its turn grow. */
template <bool TURNS>
struct channel_sums {
    double rr, ri, ii;          // D
    double trace, turning;      // C's growth

    __device__ double add(double2 &dk, double2 &dq, double2 k, double2 q, double2 du, double a,
                          const noise_sums &n, double2 own, double l2) {
        const double twice = 2.0 * a;
        dk.x += n.rr * du.x, dq.x += twice * n.rr * q.x;
        rr += a * q.x * q.x + du.x * k.x;
        if (!TURNS) {
            const double by_noise = rr * own.x * own.x;
            trace += q.x * dq.x + k.x * dk.x - 2.0 * l2 * by_noise;
            return by_noise;
        }
        dk.x += n.ri * du.y, dk.y += n.ri * du.x + n.ii * du.y;
        dq.x += twice * n.ri * q.y, dq.y += twice * (n.ri * q.x + n.ii * q.y);
        ri += a * q.x * q.y + 0.5 * (du.x * k.y + du.y * k.x);
        ii += a * q.y * q.y + du.y * k.y;
        const double along = rr * own.x + ri * own.y, across = ri * own.x + ii * own.y;
        const double by_noise = along * own.x + across * own.y;
        trace += q.x * dq.x + q.y * dq.y + k.x * dk.x + k.y * dk.y - 2.0 * l2 * by_noise;
        turning += q.y * dq.x - q.x * dq.y + k.y * dk.x - k.x * dk.y;
        turning -= 2.0 * l2 * (across * own.x - along * own.y);
        return by_noise;
    }
};

/* Shared memory of span_channels_kernel. */
struct channels_smem {
    double weights[CHUNK], l2[CHUNK], dl2[CHUNK * CHANNELS_LD];
};

/* Asks L2 for dk, dq and du of a chunk, of which a channel loads four tokens at a time. */
template <int R>
__device__ static void ask_channels(const span_work &w, int64_t head, int64_t G, int c) {
    constexpr int LINE = 128 / (int)sizeof(double);
    const double *dk = w.P + head * G * w.P_each + c * CHUNK * R, *dq = dk + SPAN_TOKENS * R;
    const double *du = w.h + (head * G * SPAN_TOKENS + c * CHUNK) * R;
    for (int at = (int)threadIdx.x * LINE; at < CHUNK * R; at += CHANNEL_THREADS * LINE) {
        mn_prefetch_l2(dk + at), mn_prefetch_l2(dq + at);
        for (int64_t g = 0; g < G; g++) mn_prefetch_l2(du + g * SPAN_TOKENS * R + at);
    }
}

/* What channel i leaves of a chunk's tokens: the raw inputs' gradients but for what later chunks
 * say of la and theta; parts of dl2 by channels into shared memory. n_t grows from the first token
 * on, all else from the last. */
template <typename T, int R, bool TURNS>
__device__ static void gather_channel(channels_smem &smem, const mn_bayes_args &p,
                                      const span_work &w, const mn_tile_span &tile, int64_t head,
                                      int c, int i) {
    constexpr int AHEAD = 4, STEP = TURNS ? 2 : 1;
    const int64_t G = p.call.G, h = head % p.call.H;
    const int r = i * STEP, K = (int)p.call.K;
    const int count = (int)min((int64_t)CHUNK, tile.n_rows - c * CHUNK);    // 0 or less: no token
    const int64_t b = tile.span.b, t0 = tile.span.t0 + tile.first + c * CHUNK;
    const int64_t smem_tile = (head * SPAN_TOKENS + c * CHUNK) * R + r;
    const double *phi = w.phi + smem_tile;
    const double *dk = w.P + head * G * w.P_each + c * CHUNK * R + r, *dq = dk + SPAN_TOKENS * R;
    const double *du = w.h + (head * G * SPAN_TOKENS + c * CHUNK) * R + r;
    const double *noise = w.noise + (head * (SPAN_CHUNKS + 1) + c) * 2 * R;
    const bool requests = p.q.data != NULL;
    const T *keys = mn_row<T>(p.k, b, t0, h) + i;
    const T *queries = requests ? mn_row<T>(p.q, b, t0, h) + i : keys;
    const int64_t next_key = p.k.stride[1], next_query = requests ? p.q.stride[1] : next_key;
    T *to_q = mn_row<T>(p.grad.q, b, t0, h), *to_k = mn_row<T>(p.grad.k, b, t0, h);
    float *local = w.local + (head * SPAN_TOKENS + c * CHUNK) * 2 * K + i;
    noise_sums n[CHUNK], sum = { noise[r], noise[R + r], TURNS ? noise[r + 1] : 0.0 };
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        sum.add<TURNS>(noise_row<TURNS>(pair_at<TURNS>(phi + t * R)), smem.l2[t]);
        n[t] = sum;
    }
    channel_sums<TURNS> sums = { 0.0, 0.0, 0.0, 0.0, 0.0 };
    for (int64_t g = 0; g < G; g++) {
        const double *inside = w.inside + ((head * G + g) * SPAN_CHUNKS + c) * 2 * R;
        sums.rr += inside[r];
        if (TURNS) sums.ri += inside[R + r], sums.ii += inside[r + 1];
    }
#pragma unroll
    for (int last = CHUNK - 1; last >= 0 && count > 0; last -= AHEAD) {
        channel_token x[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int t = last - j, there = min(t, count - 1);
            x[j].phi = pair_at<TURNS>(phi + t * R), x[j].du = pair_at<TURNS>(du + t * R);
            x[j].dk = pair_at<TURNS>(dk + t * R), x[j].dq = pair_at<TURNS>(dq + t * R);
            x[j].k = mn_float(keys[there * next_key]);
            x[j].q = mn_float(queries[there * next_query]);
        }
        for (int64_t g = 1; g < G; g++) {
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const double2 more = pair_at<TURNS>(du + (g * SPAN_TOKENS + last - j) * R);
                x[j].du.x += more.x, x[j].du.y += more.y;
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int t = last - j;
            if (t >= count) continue;
            const double2 own = noise_row<TURNS>(x[j].phi);
            const double2 k = in_frame<TURNS>(x[j].phi, (double)x[j].k);
            const double2 q = in_frame<TURNS>(x[j].phi, requests ? (double)x[j].q : 0.0);
            const double by_noise = sums.add(x[j].dk, x[j].dq, k, q, x[j].du, smem.weights[t],
                                             n[t], own, smem.l2[t]);
            if (p.cot.gainvec.data) {
                gain_inside<T, R>(sums.trace, sums.turning, p, w, tile, head, c * CHUNK + t, i,
                                  phi + t * R - r);
            }
            const double2 by = x[j].phi;
            if (to_q) {
                const double d = by.x * x[j].dq.x - (TURNS ? by.y * x[j].dq.y : 0.0);
                mn_put(to_q + t * p.grad.q.stride[1] + i, (float)d);
            }
            if (to_k) {
                const double d = by.x * x[j].dk.x - (TURNS ? by.y * x[j].dk.y : 0.0);
                mn_put(to_k + t * p.grad.k.stride[1] + i, (float)d);
            }
            local[t * 2 * K] = (float)sums.trace;
            if (TURNS) local[t * 2 * K + K] = (float)sums.turning;
            smem.dl2[t * CHANNELS_LD + i] = by_noise;
        }
    }
    double *total = w.totals + (head * SPAN_CHUNKS + c) * 2 * K;
    total[i] = sums.trace, total[K + i] = sums.turning;
}

/* All gradients of a chunk of a head but dv, dr2, dla and dtheta. */
template <typename T, int R, bool TURNS>
__device__ static void channels_of(channels_smem &smem, const mn_bayes_args &p, const span_work &w,
                                   int64_t head) {
    const int64_t H = p.call.H, G = p.call.G, h = head % H;
    const int c = (int)(blockIdx.x % SPAN_CHUNKS), i = (int)threadIdx.x, K = (int)p.call.K;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || w.steep[tile.n * H + h]) return;
    const int64_t b = tile.span.b, t0 = tile.span.t0 + tile.first;
    ask_channels<R>(w, head, G, c);
    if (i < CHUNK) {
        const int t = c * CHUNK + i;
        double sum = 0.0;
        for (int64_t g = 0; g < G; g++) {
            const span_group s = { tile.n, h, g, 0, 0 };
            sum += weight_of<T>(p, tile, s, t);
        }
        smem.weights[i] = sum;
        smem.l2[i] = t < tile.n_rows ? (double)mn_float(*mn_row<T>(p.l2, b, t0 + t, h)) : 0.0;
    }
    __syncthreads();
    if (i < K) gather_channel<T, R, TURNS>(smem, p, w, tile, head, c, i);
    __syncthreads();
    for (int j = i / 32; j < CHUNK && p.grad.l2.data; j += CHANNEL_THREADS / 32) {
        if (c * CHUNK + j >= tile.n_rows) break;
        double sum = 0.0;
        for (int k = i % 32; k < K; k += 32) sum += smem.dl2[j * CHANNELS_LD + k];
        for (int lanes = 16; lanes > 0; lanes >>= 1) {
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        }
        T *to = mn_row<T>(p.grad.l2, b, t0 + c * CHUNK + j, h);
        if (i % 32 == 0) mn_put(to, (float)sum);
    }
}

template <typename T, int R, bool TURNS, bool REDO>
__global__ void __launch_bounds__(CHANNEL_THREADS, TURNS ? 2 : 4)
span_channels_kernel(const __grid_constant__ mn_bayes_args p,
                     const __grid_constant__ span_work w) {
    __shared__ channels_smem smem;
    each_span<REDO>(p, w, blockIdx.x / SPAN_CHUNKS, [&](int64_t head) {
        channels_of<T, R, TURNS>(smem, p, w, head);
    });
}

/* C behind each chunk in place of its growth there, one thread for each channel of a head of a
 * sequence, from its last chunk on. */
template <int R>
__global__ void __launch_bounds__(128)
span_totals_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    constexpr int AHEAD = 4;    // spans whose sums are loaded together
    const int64_t H = p.call.H, G = p.call.G, n = blockIdx.x / H, h = blockIdx.x % H;
    const int i = threadIdx.x, K = (int)p.call.K;
    if (i >= K || w.steep[n * H + h]) return;
    const mn_span span = mn_span_at(p.call, n);
    const bool turns = p.theta.data != NULL;
    const int64_t slot0 = first_slot(p.call, span, n), parts = w.slices * SLICES + 1;
    double trace = 0.0, turning = 0.0;
    for (int64_t part = 0; part < G * parts; part++) {
        const double *last = w.last + (blockIdx.x * G * parts + part) * 2 * R;
        if (turns) {
            trace += last[2 * i] + last[2 * i + 1];
            turning += last[R + 2 * i + 1] - last[R + 2 * i];
        } else {
            trace += last[i];
        }
    }
    double *totals = w.totals + i, grows[AHEAD][SPAN_CHUNKS][2];
    const int64_t last = slot0 + n_spans_of(span) - 1;
    for (int64_t slot = last; slot >= slot0; slot -= AHEAD) {
        const auto place = [&](int j) {
            return totals + (max(slot - j, slot0) * H + h) * SPAN_CHUNKS * 2 * K;
        };
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
#pragma unroll
            for (int c = 0; c < SPAN_CHUNKS; c++) {
                grows[j][c][0] = place(j)[c * 2 * K], grows[j][c][1] = place(j)[c * 2 * K + K];
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (slot - j < slot0) break;
#pragma unroll
            for (int c = SPAN_CHUNKS - 1; c >= 0; c--) {
                place(j)[c * 2 * K] = trace, place(j)[c * 2 * K + K] = turning;
                trace += grows[j][c][0], turning += grows[j][c][1];
            }
        }
    }
}

/* dla and dtheta of a head of a span: a thread has a channel, `width` threads side by side have all
 * of a token, and rows of a chunk have what follows it in common. */
template <typename T>
__device__ static void decays_of(const mn_bayes_args &p, const span_work &w, int64_t head) {
    constexpr int AHEAD = 16;    // numbers of a thread that are loaded together
    const int64_t H = p.call.H, h = head % H;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || w.steep[tile.n * H + h]) return;
    const int K = (int)p.call.K, n_rows = (int)tile.n_rows, width = K > 64 ? 128 : K > 32 ? 64 : 32;
    const int i = (int)threadIdx.x % width, row = (int)threadIdx.x / width, step = 256 / width;
    if (i >= K) return;
    const mn_out to[] = { p.grad.la, p.grad.theta };
    const int64_t when = tile.span.t0 + tile.first;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        T *first = mn_row<T>(to[which], tile.span.b, when, h);
        const double *totals = w.totals + head * SPAN_CHUNKS * 2 * K + i + which * K;
        const float *locals = w.local + head * SPAN_TOKENS * 2 * K + i + which * K;
        for (int base = row; first && base < n_rows; base += AHEAD * step) {
            double behind[AHEAD];
            float local[AHEAD];
            T raw[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int t = min(base + step * j, n_rows - 1);
                behind[j] = totals[t / CHUNK * 2 * K], local[j] = locals[t * 2 * K];
                raw[j] = mn_row<T>(p.la, tile.span.b, when + t, h)[i];
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int t = base + step * j;
                if (t >= n_rows) break;
                double grad = behind[j] + (double)local[j];
                if (sizeof(T) == 2 && which == 0) grad *= cut_of<T>(raw[j]);
                mn_put(first + t * to[which].stride[1] + i, (float)grad);
            }
        }
    }
}

template <typename T, bool REDO>
__global__ void __launch_bounds__(256)
span_decay_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    each_span<REDO>(p, w, blockIdx.x, [&](int64_t head) { decays_of<T>(p, w, head); });
}

enum { SCAN_THREADS = 32 * MEAN_WARPS };

/* Grid: covariances (group of a head of a sequence), then slices blocks for each: the covariance
 * scans forward (bayes_bwd_covariance_scan.cuh's inputs), and behind each the scans of its mean, 64
 * value columns a block (mean_forward). */
template <typename T, int R, bool TIGHT>
__global__ void __launch_bounds__(SCAN_THREADS, 1)
scans_forward_kernel(const __grid_constant__ mn_bayes_args p,
                     const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    const int64_t covariances = gridDim.x / (1 + w.slices), block = blockIdx.x;
    if (block >= covariances) {
        mean_forward<T, R>(*(mean_smem<R> *)doubles, p, w, block - covariances);
    } else if (threadIdx.x < 2 * R) {
        scan_covariance<R, TIGHT>(*(covariance_smem<R, TIGHT> *)doubles, p, w, block,
                                  sizeof(T) == 2);
    }
}

/* Grid: for each group of a head of a sequence `slices` blocks that scan the mean's adjoint back
 * (mean_backward), then, behind all of these, a block that scans the covariance's
 * (scan_adjoint). */
template <typename T, int R, bool TIGHT>
__global__ void __launch_bounds__(SCAN_THREADS, 1)
scans_back_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    const int64_t means = (int64_t)gridDim.x / (1 + w.slices) * w.slices, block = blockIdx.x;
    if (block < means) {
        mean_backward<T, R, TIGHT>(*(mean_back_smem<R, TIGHT> *)doubles, p, w, block);
    } else if (threadIdx.x < 2 * R) {
        scan_adjoint<T, R, TIGHT>(*(adjoint_smem<R, TIGHT> *)doubles, p, w, block - means);
    }
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

/* ---- work space ------------------------------------------------------------------------------ */

/* How a call goes: R is 64 or 128, or 0 where all goes the narrow way, whose room overlays that of
 * spans, for it comes after them; `tight`: kernels of spans take less shared memory, with the same
 * bits. */
struct layout {
    int R;
    bool tight;
    size_t total_bytes;
    int64_t blocks, heads;    // groups of heads of sequences; heads of slots
    span_work spans;
    narrow_work narrow;
    mn_redo_grads redo;
    mn_bayes_args again;    // its kernels' arguments
};

static const bool redoes_gradients = true;    // behind cotangents that are not finite

/* What all scans look at before anything else: zeros at first. */
static void take_counts(layout *l, const mn_call &c, piecework *at) {
    span_work *w = &l->spans;
    w->columns = (int)(mn_ceil_div(mn_ceil_div(c.V, mn_max(c.G, 1)), SLICE) * SLICE);
    w->slices = (int)mn_max(mn_ceil_div(w->columns, SLICE * SLICES), 1);
    at->take(&w->steep, l->blocks, 2 + w->slices, 1);
    if (!w->steep) return;
    w->left = w->steep + l->blocks, w->back = w->left + l->blocks;
}

static void take_spans(layout *l, const mn_bayes_args *p, piecework *at) {
    const mn_call &c = p->call;
    span_work *w = &l->spans;
    const int64_t R = l->R, heads = l->heads, groups = heads * c.G, tokens = SPAN_TOKENS;
    at->take(&w->k, heads, tokens, R), at->take(&w->q, heads, tokens, R);
    at->take(&w->phi, heads, tokens, R), at->take(&w->noise, heads, 2 * (SPAN_CHUNKS + 1), R);
    at->take(&w->enter, heads, R, 1), at->take(&w->leave, heads, R, 1);
    at->take(&w->h, groups, tokens, R), at->take(&w->w, groups, tokens, R);
    w->nk = w->h;
    at->take(&w->r2, groups, tokens, 1), at->take(&w->sigma, groups, tokens, 1);
    at->take(&w->own, groups, tokens, 1);
    at->take(&w->eliminate, groups, SPAN_CHUNKS, SMALL);
    at->take(&w->reads, groups, SPAN_CHUNKS, SMALL);
    at->take(&w->theta, groups, SPAN_CHUNKS, SMALL);
    w->P_each = mn_max(R, 2 * tokens) * R;
    w->dw_each = (w->slices - 1) * tokens * R;
    at->take(&w->P, groups, w->P_each, 1), at->take(&w->dw, groups, w->dw_each, 1);
    at->take(&w->M, groups, R, w->columns);
    at->take(&w->e, groups, tokens, w->columns), at->take(&w->de, groups, tokens, w->columns);
    at->take(&w->inside, groups, SPAN_CHUNKS, 2 * R);
    at->take(&w->totals, heads, SPAN_CHUNKS, 2 * c.K);
    at->take(&w->last, l->blocks, w->slices * SLICES + 1, 2 * R);
    at->take(&w->local, heads, tokens, 2 * c.K);
}

static void take_narrow(layout *l, const mn_bayes_args *p, int nb, int nm, piecework *at) {
    const mn_call &c = p->call;
    const int64_t smem = narrow_smem_doubles(nb, nm, (int)c.K);
    const int64_t square = (int64_t)nb * nb * 64, mean = (int64_t)nm * nb * 64;
    narrow_work *w = &l->narrow;
    w->smem_bytes = (size_t)smem * sizeof(double);
    w->inside = w->smem_bytes <= mn_bayes_most_shared();
    w->state = square + mean;
    w->size = 2 * square + 2 * mean + (NARROW_CHUNKS + 1) * (square + mean);
    if (!w->inside) w->size += smem, w->smem_bytes = 0;
    at->take(&w->each, l->blocks, w->size, 1);
    at->take(&w->spans, mn_tile_slots(c, NARROW_SPAN), c.H * c.G, w->state);
    at->take(&w->parts, c.B * c.T, c.H * c.G, 4 * c.K + 1);
}

/* The most shared memory that a scan takes. */
template <int R, bool TIGHT>
constexpr size_t widest_smem() {
    const size_t each[] = { sizeof(covariance_smem<R, TIGHT>), sizeof(mean_smem<R>),
                            sizeof(mean_back_smem<R, TIGHT>), sizeof(adjoint_smem<R, TIGHT>) };
    size_t most = 0;
    for (size_t bytes : each) most = bytes > most ? bytes : most;
    return most;
}

/* The rows that kernels of spans are made for, or 0; whether shared memory is tight for them. */
static int span_rows(int64_t rows, bool *tight) {
    static_assert(widest_smem<128, true>() <= 163 * 1024, "what a GPU of 8.0 has");
    const size_t most = (size_t)mn_device_props_current().shared_bytes;
    const auto fits = [&](size_t scans, int R, bool small) {
        return scans <= most && span_products_smem(R, small) <= most;
    };
    *tight = rows > 64 && !fits(widest_smem<128, false>(), 128, false);
    if (rows <= 64 && fits(widest_smem<64, false>(), 64, false)) return 64;
    return rows > 64 && rows <= 128 && fits(widest_smem<128, true>(), 128, true) ? 128 : 0;
}

static bool layout_of(layout *l, const mn_bayes_args *p, void *base) {
    const mn_call &c = p->call;
    const int64_t rows = c.K * (p->theta.data ? 2 : 1);
    if (rows > MN_BAYES_WIDEST) return false;
    memset(l, 0, sizeof *l);
    l->R = span_rows(rows, &l->tight);
    l->blocks = mn_n_spans(c) * c.H * c.G;
    l->heads = mn_tile_slots(c, SPAN_TOKENS) * c.H;
    piecework both = { (char *)base, 0, true };
    both.take(&l->narrow.traces, l->blocks, 1, 1);
    if (l->R) take_counts(l, c, &both);
    l->spans.traces = l->narrow.traces, l->narrow.steep = l->spans.steep;
    piecework one = both, other = both;
    if (l->R) take_spans(l, p, &one);
    const int nm = (int)mn_ceil_div(mn_ceil_div(c.V, mn_max(c.G, 1)), 8);
    take_narrow(l, p, (int)((rows + 7) / 8), nm, &other);
    l->total_bytes = one.used > other.used ? one.used : other.used;
    if (!one.ok || !other.ok || !redoes_gradients) return one.ok && other.ok;
    l->redo = redo_of(*p, l->again, base ? (char *)base + l->total_bytes : NULL);
    if (l->R) {
        l->redo.aside = l->spans.steep, l->redo.zeros = l->spans.left;
        l->redo.n_zeros = l->blocks * (1 + l->spans.slices);
    }
    return l->redo.ok && mn_add_size(&l->total_bytes, l->total_bytes, l->redo.used);
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T, int R, bool TIGHT, bool REDO>
static int start_spans(const mn_bayes_args *p, const layout &l, const span_work &w,
                       cudaStream_t on) {
    const unsigned blocks = (unsigned)l.blocks, heads = span_blocks(p, w);
    const unsigned parts = heads * (unsigned)prepare_parts(p->call);
    const bool turns = p->theta.data != NULL;
    const auto prepare = turns ? span_prepare_kernel<T, true, REDO>
                               : span_prepare_kernel<T, false, REDO>;
    prepare<<<parts, PREPARE_THREADS, 0, on>>>(*p, w, R);
    const size_t smem = widest_smem<R, TIGHT>();
    int code = mn_launch_smem(scans_forward_kernel<T, R, TIGHT>, blocks * (1 + (unsigned)w.slices),
                              SCAN_THREADS, smem, on, *p, w);
    if (code != cudaSuccess) return code;
    code = mn_launch_smem(scans_back_kernel<T, R, TIGHT>, blocks * (1 + (unsigned)w.slices),
                          SCAN_THREADS, smem, on, *p, w);
    if (code != cudaSuccess) return code;
    code = span_products(p, w, R, TIGHT, on);
    if (code != cudaSuccess) return code;
    const unsigned chunks = heads * SPAN_CHUNKS;
    const auto channels = turns ? span_channels_kernel<T, R, true, REDO>
                                : span_channels_kernel<T, R, false, REDO>;
    channels<<<chunks, CHANNEL_THREADS, 0, on>>>(*p, w);
    span_totals_kernel<R><<<(unsigned)(mn_n_spans(p->call) * p->call.H), 128, 0, on>>>(*p, w);
    span_decay_kernel<T, REDO><<<heads, 256, 0, on>>>(*p, w);
    return mn_launch_status();
}

/* All gradients but p_0's. */
template <typename T, bool REDO>
static int start_all(const mn_bayes_args *p, const layout &l, const span_work &spans,
                     const narrow_work &narrow, cudaStream_t on) {
    int code = cudaSuccess;
    const bool starts = l.heads > 0;
    if (l.R == 64 && starts) code = start_spans<T, 64, false, REDO>(p, l, spans, on);
    if (l.R == 128 && starts && l.tight) code = start_spans<T, 128, true, REDO>(p, l, spans, on);
    if (l.R == 128 && starts && !l.tight) {
        code = start_spans<T, 128, false, REDO>(p, l, spans, on);
    }
    if (code != cudaSuccess) return code;
    return narrow_backward(p, narrow, l.blocks, span_blocks(p, spans), REDO, on);
}

/* Once more, of heads with a cotangent that is not finite; others end at once. */
template <typename T>
static int start_redo(const layout &l, cudaStream_t on) {
    const bool shows = l.redo.n_cots > 0 && l.redo.n_grads > 0 && l.redo.call.T > 1;
    if (!redoes_gradients || !shows || l.heads == 0) return mn_launch_status();
    span_work spans = l.spans;
    narrow_work narrow = l.narrow;
    spans.redo = true, spans.steep = l.redo.skips;
    narrow.steep = l.R ? l.redo.takes : l.redo.cuts;
    int code = mn_redo_grads_find(&l.redo, on);
    if (code == cudaSuccess) code = start_all<T, true>(&l.again, l, spans, narrow, on);
    return code == cudaSuccess ? mn_redo_grads_store(&l.redo, on) : code;
}

template <typename T>
static int start(const mn_bayes_args *p, const layout &l, cudaStream_t on) {
    int code = cudaSuccess;
    if (l.R) {    // without tokens all heads are as steep ones
        const size_t counts = (size_t)l.blocks * (2 + (size_t)l.spans.slices);
        code = (int)cudaMemsetAsync(l.spans.steep, l.heads == 0, counts * sizeof(int), on);
    }
    if (code == cudaSuccess) code = start_all<T, false>(p, l, l.spans, l.narrow, on);
    if (code != cudaSuccess) return code;
    if (p->grad.p0.data) {
        bayes_first_kernel<T><<<mn_blocks(p->call.H, 64), 64, 0, on>>>(*p, l.narrow.traces);
    }
    return start_redo<T>(l, on);
}

static bool backward_plan(const mn_bayes_args *p, mn_plan *plan) {
    layout l;
    if (p->call.K * (p->theta.data ? 2 : 1) > MN_BAYES_WIDEST) return true;    // refused later
    const bool fits = layout_of(&l, p, NULL);
    if (fits) plan->shared_bytes = l.total_bytes;
    return fits;
}

static int backward(const mn_bayes_args *p, void *shared, void *stream) {
    layout l;
    const cudaStream_t on = (cudaStream_t)stream;
    if (!layout_of(&l, p, shared) || l.blocks > INT32_MAX || l.heads * p->call.G > INT32_MAX) {
        return cudaErrorNotSupported;
    }
    if (l.blocks == 0) return cudaSuccess;
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

}    // namespace mneme::bayes
