/* bayes_walk_covariance.cuh - the covariance forward by chunks of 16 tokens, as the way back of the
 * Bayesian Layer needs it: bayes_backward.cu. One block for each group of a head of a sequence. */
#ifndef MN_KERNELS_CUDA_BAYES_WALK_COVARIANCE_CUH
#define MN_KERNELS_CUDA_BAYES_WALK_COVARIANCE_CUH

#include "kernels/cuda/bayes_strip.cuh"

/* ---- the covariance forward ------------------------------------------------------------------ */

/* Keys are there three chunks ahead, queries one. */
enum { KEY_STAGES = 4 };

/* Shared memory of the covariance's walk, in doubles. */
template <int R>
struct covariance_room {
    double k[KEY_STAGES][16 * pitch<R>::left], q[2][16 * pitch<R>::left];
    double phi[R], noise[2 * R];               // of the span's end
    double B[16 * pitch<R>::right], z[16 * pitch<R>::right];
    double parts[2][R / 16 * 16 * PARTS_LD];
    double S[16 * SMALL_LD], eliminate[16 * SMALL_LD];
    double ahead[16 * SMALL_LD], cross[16 * SMALL_LD];    // of the next chunk: G, z_s.k_t
    double inverse[2][CHUNK], sigma[CHUNK];    // inverse of this chunk and of the one before
    double spread[R / 16];
};

/* S + diag r2 = G' diag(1/sigma) G by one warp: lane t has column t, lane 16 + t that of the unit
 * matrix, which becomes G'^-1. The rows of S come first. Lane t has r2_t. Two pivots at a time: with
 * a, b, c their (2,2), the reciprocals of a and of a c - b^2 do not wait for each other. */
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
        mn_dmma_8(c[j % 2], a, b);
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
__device__ static bool raise_strip(strip<R> &P, covariance_room<R> &room, const double *nk,
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
    fill_strip<R>(P, [&](int row, int column) {
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

/* Keys of chunk c, queries of the one before the last, and the end of c's span on their way. */
template <int R>
__device__ static void fetch_covariance(covariance_room<R> &room, const span_work &w,
                                        const walk_place &at, int64_t c) {
    constexpr int LEFT = pitch<R>::left, THREADS = 2 * R;
    if (c < at.n_chunks) {
        copy_rows_later<R>(room.k[c % KEY_STAGES], LEFT, w.k + at.shared(c) * CHUNK * R, CHUNK,
                           THREADS);
    }
    if (c >= 2 && c - 2 < at.n_chunks) {
        copy_rows_later<R>(room.q[c % 2], LEFT, w.q + at.shared(c - 2) * CHUNK * R, CHUNK,
                           THREADS);
    }
    if (c < at.n_chunks && c % SPAN_CHUNKS == SPAN_CHUNKS - 1) {
        const double *noise = w.noise + (at.head(c) * 5 + 4) * 2 * R;
        copy_rows_later<R>(room.noise, R, noise, 2, THREADS);
        copy_rows_later<R>(room.phi, R, w.phi + at.last_token(c) * R, 1, THREADS);
    }
    close_copies();
}

/* x = k P + n k of 16 columns, and their share of x k'. */
template <int R>
__device__ static void times_covariance(double (&x)[2][2][2], double *parts, const strip<R> &P,
                                        const double *k, const double *nk) {
    const int column = threadIdx.x / 32 * 16;
    double noisy[2][2][2];
    get_rows(noisy[0], nk, R, column), get_rows(noisy[1], nk, R, column + 8);
    zero(x[0]), zero(x[1]);
    through_strip<R>(x, k, pitch<R>::left, P);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i / 2 % 2][i % 2] += noisy[i / 4][i / 2 % 2][i % 2];
    gram_share<R>(parts, x, k, pitch<R>::left);
}

/* B and S of chunk c from P in front of it; all threads call. */
template <int R>
__device__ static void start_chunk(covariance_room<R> &room, const strip<R> &P,
                                   const span_work &w, const walk_place &at, int64_t c) {
    constexpr int RIGHT = pitch<R>::right;
    const int column = threadIdx.x / 32 * 16;
    double x[2][2][2];
    times_covariance<R>(x, room.parts[0], P, room.k[c % KEY_STAGES],
                        w.nk + at.shared(c) * CHUNK * R);
    put_rows(room.B, RIGHT, column, x[0]), put_rows(room.B, RIGHT, column + 8, x[1]);
    __syncthreads();
    add_shares<R>(room.S, room.parts[0]);
    __syncthreads();
}

/* P behind chunk c, whose z is in the room. */
template <int R>
__device__ static void write_covariance(strip<R> &P, const covariance_room<R> &room, int64_t c) {
    constexpr int RIGHT = pitch<R>::right;
    const int lane = threadIdx.x % 32;
    double left[8];
    left_columns16(left, room.z, RIGHT, threadIdx.x / 32 * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const double inverse = -room.inverse[c % 2][lane % 4 + 4 * i];
        left[2 * i] *= inverse, left[2 * i + 1] *= inverse;
    }
    add_product<R>(P, left, room.z, RIGHT);
}

/* P behind a span in the frame of the next one. */
template <int R>
__device__ static void move_covariance(strip<R> &P, const covariance_room<R> &room, bool turns) {
    double own[2][2] = {};
    pick_inside<R>(own, P);
    each_inside(own, [&](double &to, int row, int other) {
        to += row == other ? room.noise[row] : room.noise[R + row];
    });
    put_inside<R>(P, own);
    move_strip_columns<R>(P, room.phi, turns, false);
    move_strip_rows<R>(P, room.phi, turns, false);
}

/* z and w of chunk c from its B, in this warp's columns, their share of z k' with the next keys, and
 * to memory what others need of it. */
template <int R>
__device__ static void put_z(covariance_room<R> &room, const span_work &w, const walk_place &at,
                             int64_t c) {
    constexpr int RIGHT = pitch<R>::right;
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * 16;
    double left[8], x[2][2][2];
    left_small(left, room.eliminate, SMALL_LD);
#pragma unroll
    for (int m = 0; m < 2; m++) {
        double b[4];
        right_columns16(b, room.B, RIGHT, column + 8 * m);
        zero(x[m]);
        mn_dmma_16(x[m], left, b);
        put_rows(room.z, RIGHT, column + 8 * m, x[m]);
    }
    if (c % SPAN_CHUNKS != SPAN_CHUNKS - 1) {
        gram_share<R>(room.parts[1], x, room.k[(c + 1) % KEY_STAGES], pitch<R>::left);
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[m][i / 2][i % 2] *= room.inverse[c % 2][lane / 4 + 8 * (i / 2)];
        }
        put_rows(w.w + at.own(c) * CHUNK * R, R, column + 8 * m, x[m]);
    }
    for (int i = threadIdx.x; i < SMALL; i += 2 * R) {
        w.eliminate[at.own(c) * SMALL + i] = room.eliminate[i / 16 * SMALL_LD + i % 16];
    }
    if (threadIdx.x < CHUNK) {
        w.sigma[at.own(c) * CHUNK + threadIdx.x] = room.sigma[threadIdx.x];
    }
}

/* The next chunk's B from x = k P + n k with P in front of chunk c, and by warp 0 its S. With z and
 * sigma of chunk c, C_ts = k_t.z_s of the next keys and G = x k', all rows being tokens:
 *
 *   B = x - C diag(1/sigma) z          S = G - C diag(1/sigma) C' */
template <int R>
__device__ static void follow(covariance_room<R> &room, double (&x)[2][2][2], int64_t c) {
    constexpr int RIGHT = pitch<R>::right;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = 16 * warp;
    double left[8], b[4];
    left_columns16(left, room.cross, SMALL_LD, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const double inverse = -room.inverse[c % 2][lane % 4 + 4 * i];
        left[2 * i] *= inverse, left[2 * i + 1] *= inverse;
    }
#pragma unroll
    for (int m = 0; m < 2 && warp == 0; m++) {
        double S[2][2];
        get_rows(S, room.ahead, SMALL_LD, 8 * m);
        right_columns16(b, room.cross, SMALL_LD, 8 * m);
        mn_dmma_16(S, left, b);
        put_rows(room.S, SMALL_LD, 8 * m, S);
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
        right_columns16(b, room.z, RIGHT, column + 8 * m);
        mn_dmma_16(x[m], left, b);
        put_rows(room.B, RIGHT, column + 8 * m, x[m]);
    }
    __syncwarp();
}

/* z / sigma and what chunks need of each other, of a group of a head of a sequence: the first 2 R
 * threads of a block. While one warp factorises a chunk's S, all of them write the chunk before into
 * P and multiply it by the next keys, unless between the two a span ends. */
template <int R>
__device__ static void walk_covariance(covariance_room<R> &room, const mn_bayes_args &p,
                                       const span_work &w, int64_t block, bool bf16) {
    const walk_place at = walk_place_at(p, block);
    const span_group &s = at.s;
    if (w.steep[s.n * at.H + s.h]) return;
    const bool turns = p.theta.data != NULL;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = (int)p.call.K * (turns ? 2 : 1);
    strip<R> P;
    load_covariance<R>(P, p, s, rows, bf16);
    for (int c = 0; c < KEY_STAGES - 1; c++) fetch_covariance<R>(room, w, at, c);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    if (at.n_chunks > 0) {
        const double r2 = w.r2[at.own(0) * CHUNK + lane % 16];
        start_chunk<R>(room, P, w, at, 0);
        const double *nk = w.nk + at.shared(0) * CHUNK * R;
        if (p.P0.data &&
            raise_strip<R>(P, room, nk, __shfl_sync(0xffffffffu, r2, 0), turns)) {
            start_chunk<R>(room, P, w, at, 0);
        }
        if (warp == 0) factorise(room.S, room.eliminate, room.sigma, room.inverse[0], r2);
    }
    for (int64_t c = 0; c < at.n_chunks; c++) {
        const bool span_ends = c % SPAN_CHUNKS == SPAN_CHUNKS - 1, ends = c + 1 == at.n_chunks;
        if (c % SPAN_CHUNKS == 0) {
            double *to = w.P + at.group(c) * w.P_each + 16 * warp * R;
#pragma unroll
            for (int j = 0; j < R / 8; j++) put_rows(to, R, 8 * j, P[j]);
        }
        if (c > 0 && (warp == 1 || warp == 2)) {
            put_reads<R>(w.reads + at.own(c - 1) * SMALL, room.z, room.q[(c - 1) % 2],
                         room.inverse[(c - 1) % 2], warp - 1);
        } else if (c > 0 && warp == R / 16 - 1 && lane == 0) {
            say_left(w.left + block, c);
        }
        double x[2][2][2];
        if (!span_ends) {
            times_covariance<R>(x, room.parts[0], P, room.k[(c + 1) % KEY_STAGES],
                                w.nk + at.shared(c + 1) * CHUNK * R);
        }
        __syncthreads();
        fetch_covariance<R>(room, w, at, c + KEY_STAGES - 1);
        put_z<R>(room, w, at, c);
        await_copies();
        __syncthreads();
        const double r2 = ends ? 1.0 : w.r2[at.own(c + 1) * CHUNK + lane % 16];
        if (!span_ends) {
            add_shares<R>(room.ahead, room.parts[0]);
            add_shares<R>(room.cross, room.parts[1]);
            __syncthreads();
            follow<R>(room, x, c);
        } else {
            write_covariance<R>(P, room, c);
            move_covariance<R>(P, room, turns);
            if (!ends) start_chunk<R>(room, P, w, at, c + 1);
        }
        if (warp == 0 && !ends) {
            factorise(room.S, room.eliminate, room.sigma, room.inverse[(c + 1) % 2], r2);
        }
        if (R == 128 && warp % 4 == 0) {
            /* Warp 4 multiplies with the same units, and would hold the factorisation up. */
            asm volatile("bar.sync 1, 64;" ::: "memory");
        }
        if (!span_ends) write_covariance<R>(P, room, c);
    }
    __syncthreads();
    if (threadIdx.x == 0) say_left(w.left + block, at.n_chunks);
    if (at.n_chunks > 0 && (warp == 1 || warp == 2)) {
        const int64_t c = at.n_chunks - 1;
        put_reads<R>(w.reads + at.own(c) * SMALL, room.z, room.q[c % 2], room.inverse[c % 2],
                     warp - 1);
    }
    const float *dP = mn_row<float>(p.cot.P, s.n, 0, s.h);
    if (dP) dP += s.g * rows * rows;
    put_last<R>(w.last + block * (w.slices * SLICES + 1) * 2 * R, P,
                [&](int row, int other) { return symmetric_cotangent(dP, rows, row, other); });
}

#endif
