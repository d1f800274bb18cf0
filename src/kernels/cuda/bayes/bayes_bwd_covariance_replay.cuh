/* bayes_bwd_covariance_replay.cuh - the covariance forward by chunks of 16 tokens, as the way back
 * of the
 * Bayesian Layer needs it: bayes_bwd_chunk.cu. One block for each group of a head of a sequence. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_BWD_COVARIANCE_REPLAY_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_BWD_COVARIANCE_REPLAY_CUH

#include "kernels/cuda/bayes/bayes_rmem_tile.cuh"

/* ---- the covariance forward ------------------------------------------------------------------ */

/* Shared memory of the covariance's walk, in doubles. */
template <int R>
struct covariance_smem {
    double k[STAGES][16 * pitch<R>::left], q[STAGES][16 * pitch<R>::left];
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
        const double a = __shfl_sync(ALL, r2, j) + fmax(__shfl_sync(ALL, column[j], j), 0.0);
        const double rest = fmax(fma(c, a, -(b * b)), 0.0);
        const double both = fma(__shfl_sync(ALL, r2, j + 1), a, rest);
        const double first = mn_reciprocal(a), second = a * mn_reciprocal(both);
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

/* w_s.q_t for s <= t of a chunk whose z is in the room: half the columns by each of two warps. */
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
        mn_mma_f64_8(c[j % 2], a, b);
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
template <int R>
__device__ static bool raise_col_tile(strip<R> &P, covariance_smem<R> &room, const double *nk,
                                   double r2, bool turns) {
    const double few = 8.0 * 0x1p-24;
    const int warp = threadIdx.x / 32;
    double sum = 0.0, own[2][2] = {};
    pick_inside<R>(own, P);
    each_inside(own, [&](double &x, int row, int column) {
        if (turns || row == column) sum += room.k[0][row] * room.k[0][column] * x;
    });
    for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x % 32 == 0) room.spread[warp] = sum;
    __syncthreads();
    double scale = 0.0, hidden = 0.0;
    for (int i = 0; i < R / 16; i++) scale += room.spread[i];
    for (int r = 0; r < R; r++) hidden += room.k[0][r] * nk[r];
    scale = few * (scale + hidden);
    if (fmin(room.S[0], r2) >= scale || hidden >= scale) return false;
    each_inside(own, [&](double &x, int row, int column) {
        if (row == column) x *= 1.0 + few;
    });
    put_inside<R>(P, own);
    return true;
}

template <int R>
__device__ static void load_covariance(strip<R> &P, const mn_bayes_args &p, const span_group &s,
                                       int rows, bool bf16) {
    const float *given = mn_row<float>(p.P0, s.n, 0, s.h);
    double size = 1.0;
    if (p.p0.data) {
        size = bf16 ? (double)mn_float(*mn_row<mn_bf16>(p.p0, 0, 0, s.h))
                    : (double)*mn_row<float>(p.p0, 0, 0, s.h);
    }
    if (given) given += s.g * rows * rows;
    fill_col_tile<R>(P, [&](int row, int column) {
        const bool inside = row < rows && column < rows;
        if (given) return inside ? (double)given[(int64_t)row * rows + column] : 0.0;
        return inside && row == column ? size : 0.0;
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

/* Chunk c on its way into the room. */
template <int R>
__device__ static void fetch_covariance(covariance_smem<R> &room, const span_work &w,
                                        const scan_place &at, int64_t c) {
    constexpr int LEFT = pitch<R>::left, THREADS = 2 * R;
    const int stage = (int)(c % STAGES);
    if (c < at.n_chunks) {
        const int64_t from = at.shared(c) * CHUNK * R;
        const double *noise = w.noise + (at.head(c) * 5 + 4) * 2 * R;
        copy_rows_later<R, CHUNK, THREADS>(room.k[stage], LEFT, w.k + from);
        copy_rows_later<R, CHUNK, THREADS>(room.q[stage], LEFT, w.q + from);
        copy_rows_later<R, 2, THREADS>(room.noise[stage], R, noise);
        copy_rows_later<R, 1, THREADS>(room.phi[stage], R, w.phi + at.last_token(c) * R);
    }
    close_copies();
}

/* z / sigma and what chunks need of each other, of a group of a head of a sequence: the first 2 R
 * threads of a block. */
template <int R>
__device__ static void scan_covariance(covariance_smem<R> &room, const mn_bayes_args &p,
                                       const span_work &w, int64_t block, bool bf16) {
    constexpr int LEFT = pitch<R>::left, RIGHT = pitch<R>::right;
    const scan_place at = scan_place_at(p, block);
    const span_group &s = at.s;
    if (w.steep[s.n * at.H + s.h]) return;
    const bool turns = p.theta.data != NULL, handed_in = p.P0.data != NULL;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = (int)p.call.K * (turns ? 2 : 1), column = 16 * warp;
    strip<R> P;
    load_covariance<R>(P, p, s, rows, bf16);
    fetch_covariance<R>(room, w, at, 0), fetch_covariance<R>(room, w, at, 1);
    await_copies();
    __syncthreads();
    for (int64_t c = 0; c < at.n_chunks; c++) {
        const int stage = (int)(c % STAGES), now = (int)(c % 2);
        const double *nk = w.nk + at.shared(c) * CHUNK * R;
        const double r2 = w.r2[at.own(c) * CHUNK + lane % 16];
        double x[2][2][2], noisy[2][2][2];
        get_rows(noisy[0], nk, R, column), get_rows(noisy[1], nk, R, column + 8);
        for (bool again = false;; again = true) {
            zero(x[0]), zero(x[1]);
            through_col_tile<R>(x, room.k[stage], LEFT, P);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i / 4][i / 2 % 2][i % 2] += noisy[i / 4][i / 2 % 2][i % 2];
            }
            gram_share<R>(room.parts, x, room.k[stage], LEFT);
            put_rows(room.B, RIGHT, column, x[0]), put_rows(room.B, RIGHT, column + 8, x[1]);
            __syncthreads();
            add_shares<R>(room.S, room.parts);
            __syncthreads();
            if (!handed_in || c > 0 || again) break;
            if (!raise_col_tile<R>(P, room, nk, __shfl_sync(0xffffffffu, r2, 0), turns)) break;
        }
        if (c % SPAN_CHUNKS == 0) {
            double *to = w.P + at.group(c) * w.P_each + 16 * warp * R;
#pragma unroll
            for (int j = 0; j < R / 8; j++) put_rows(to, R, 8 * j, P[j]);
        }
        if (warp == 0) {
            factorise(room.S, room.eliminate, room.sigma, room.inverse[now], r2);
        } else if (warp < 3 && c > 0) {
            put_reads<R>(w.reads + at.own(c - 1) * SMALL, room.z,
                         room.q[(c - 1) % STAGES], room.inverse[!now], warp - 1);
        } else if (warp == R / 16 - 1 && lane == 0) {
            say_left(w.left + block, c);
        }
        __syncthreads();
        fetch_covariance<R>(room, w, at, c + 2);
        double left[8];
        left_small(left, room.eliminate, SMALL_LD);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            double b[4];
            right_columns16(b, room.B, RIGHT, column + 8 * m);
            zero(x[m]);
            mn_mma_f64_16(x[m], left, b);
            put_rows(room.z, RIGHT, column + 8 * m, x[m]);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const double inverse = room.inverse[now][lane / 4 + 8 * t];
                x[m][t][0] *= inverse, x[m][t][1] *= inverse;
            }
            put_rows(w.w + at.own(c) * CHUNK * R, R, column + 8 * m, x[m]);
        }
        for (int i = threadIdx.x; i < SMALL; i += 2 * R) {
            w.eliminate[at.own(c) * SMALL + i] = room.eliminate[i / 16 * SMALL_LD + i % 16];
        }
        if (threadIdx.x < CHUNK) {
            w.sigma[at.own(c) * CHUNK + threadIdx.x] = room.sigma[threadIdx.x];
        }
        await_copies();
        __syncthreads();
        left_columns16(left, room.z, RIGHT, column);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const double inverse = -room.inverse[now][lane % 4 + 4 * i];
            left[2 * i] *= inverse, left[2 * i + 1] *= inverse;
        }
#pragma unroll
        for (int j = 0; j < R / 8; j++) {
            double b[4];
            right_columns16(b, room.z, RIGHT, 8 * j);
            mn_mma_f64_16(P[j], left, b);
        }
        if (c % SPAN_CHUNKS != SPAN_CHUNKS - 1) continue;
        const double *noise = room.noise[stage];
        double own[2][2] = {};
        pick_inside<R>(own, P);
        each_inside(own, [&](double &to, int row, int other) {
            to += row == other ? noise[row] : noise[R + row];
        });
        put_inside<R>(P, own);
        move_col_tile_columns<R>(P, room.phi[stage], turns, false);
        move_col_tile_rows<R>(P, room.phi[stage], turns, false);
    }
    __syncthreads();
    if (threadIdx.x == 0) say_left(w.left + block, at.n_chunks);
    if (at.n_chunks > 0 && (warp == 1 || warp == 2)) {
        put_reads<R>(w.reads + at.own(at.n_chunks - 1) * SMALL, room.z,
                     room.q[(at.n_chunks - 1) % STAGES], room.inverse[(at.n_chunks - 1) % 2],
                     warp - 1);
    }
    const float *dP = mn_row<float>(p.cot.P, s.n, 0, s.h);
    if (dP) dP += s.g * rows * rows;
    put_last<R>(w.last + block * (w.slices * SLICES + 1) * 2 * R, P,
                [&](int row, int other) { return symmetric_cotangent(dP, rows, row, other); });
}

#endif
