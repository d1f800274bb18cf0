/* bayes_span_walks.cuh - what of the way back of the Bayesian Layer must go token after token, by
 * chunks of 16: the covariance forward, its adjoint backward, and between them the mean and its
 * adjoint, whose value columns never meet. Formulas are in bayes_backward.cu.
 *
 * A covariance, or D, is in the registers of R / 16 warps, 16 rows in each: of 8 columns a lane has
 * two in rows l / 4 and l / 4 + 8, as products leave them. Read as columns, which a symmetric matrix
 * allows, the same numbers are the right factor of the next product. A warp of the mean has 16 value
 * columns of M' or E' alike. */
#ifndef MN_KERNELS_CUDA_BAYES_SPAN_WALKS_CUH
#define MN_KERNELS_CUDA_BAYES_SPAN_WALKS_CUH

#include "kernels/cuda/bayes_span.cuh"

enum { STAGES = 3, PARTS_LD = 24 };

/* A lane's part of 16 rows: [block of 8 columns][row l / 4 + 8 m][column] */
template <int R>
using strip = double[R / 8][2][2];

/* The strip's columns by Phi of a frame, or by Phi'. */
template <int R>
__device__ __forceinline__ static void move_strip_columns(strip<R> &x, const double *phi, bool turns, bool back) {
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
        const int column = mn_tile_column(j);
        const double2 by = *(const double2 *)(phi + column);
        const double sine = back ? -by.y : by.y;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const double re = x[j][m][0], im = x[j][m][1];
            x[j][m][0] = turns ? by.x * re - sine * im : by.x * re;
            x[j][m][1] = turns ? sine * re + by.x * im : by.y * im;
        }
    }
}

/* Its rows alike; the rows of a channel lie in neighbouring lanes. */
template <int R>
__device__ __forceinline__ static void move_strip_rows(strip<R> &x, const double *phi, bool turns, bool back) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int row = mn_tile_row(2 * (int)(threadIdx.x / 32) + m);
        const double own = phi[turns ? row / 2 * 2 : row], sine = phi[row / 2 * 2 + 1];
        const double other = (row % 2 == 1) != back ? sine : -sine;
#pragma unroll
        for (int j = 0; j < R / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                double moved = own * x[j][m][i];
                if (turns) moved += other * __shfl_xor_sync(0xffffffffu, x[j][m][i], 4);
                x[j][m][i] = moved;
            }
        }
    }
}

/* What a lane has inside channels is in column block 2 warp + m of its rows m, if anything. All
 * lanes select, for an index that the compiler does not know would send the strip to memory. */
__device__ __forceinline__ static bool is_inside() {
    const int lane = threadIdx.x % 32;
    return lane / 8 == lane % 4;
}

template <int R>
__device__ __forceinline__ static void pick_inside(double (&v)[2][2], const strip<R> &x) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) v[j % 2][i] = warp == j / 2 ? x[j][j % 2][i] : v[j % 2][i];
    }
}

template <int R>
__device__ __forceinline__ static void put_inside(strip<R> &x, const double (&v)[2][2]) {
    const int warp = threadIdx.x / 32;
    const bool mine = is_inside();
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[j][j % 2][i] = mine && warp == j / 2 ? v[j % 2][i] : x[j][j % 2][i];
        }
    }
}

/* use(element, row, column) for them; rows and columns of the whole matrix */
template <typename F>
__device__ __forceinline__ static void each_inside(double (&v)[2][2], F use) {
    const int lane = threadIdx.x % 32;
    if (!is_inside()) return;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int row = threadIdx.x / 32 * 16 + 8 * m + lane / 4;
        use(v[m][0], row, row / 2 * 2), use(v[m][1], row, row / 2 * 2 + 1);
    }
}

/* The strip from its elements, use(row, column). */
template <int R, typename F>
__device__ __forceinline__ static void fill_strip(strip<R> &x, F use) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int row = mn_tile_row(2 * warp + m), column = mn_tile_column(j);
            x[j][m][0] = use(row, column), x[j][m][1] = use(row, column + 1);
        }
    }
}

/* An element of (dP + dP') / 2, or zero. */
__device__ __forceinline__ static double symmetric_cotangent(const float *dP, int rows, int row, int column) {
    if (!dP || row >= rows || column >= rows) return 0.0;
    return 0.5 * ((double)dP[(int64_t)row * rows + column] +
                  (double)dP[(int64_t)column * rows + row]);
}

/* c += (16 rows of `left`, R columns) times the strip read as columns: 16 x 16 */
template <int R>
__device__ __forceinline__ static void through_strip(double (&c)[2][2][2], const double *left, int ld,
                                     const strip<R> &x) {
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
        double a[4];
        left_rows(a, left, ld, 8 * j);
        mn_dmma_8(c[0], a, x[j][0]);
        mn_dmma_8(c[1], a, x[j][1]);
    }
}

/* This warp's share, its 16 rows, of x (16, R) times `right` (16, R)' into its (16,16) of parts. */
template <int R>
__device__ __forceinline__ static void gram_share(double *parts, const double (&x)[2][2][2], const double *right,
                                  int ld) {
    const int warp = threadIdx.x / 32;
    double s[2][2][2];
    zero(s[0]), zero(s[1]);
#pragma unroll
    for (int m = 0; m < 2; m++) {
        double a[4];
        left_result(a, x[m]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            double b[2];
            right_rows(b, right + 8 * half * ld, ld, 16 * warp + 8 * m);
            mn_dmma_8(s[half], a, b);
        }
    }
    put_rows(parts + warp * 16 * PARTS_LD, PARTS_LD, 0, s[0]);
    put_rows(parts + warp * 16 * PARTS_LD, PARTS_LD, 8, s[1]);
}

/* The sums of the shares; all threads call, between barriers. */
template <int R>
__device__ __forceinline__ static void add_shares(double *sum, const double *parts) {
    for (int i = threadIdx.x; i < SMALL; i += 2 * R) {
        double x = 0.0;
#pragma unroll
        for (int warp = 0; warp < R / 16; warp++) {
            x += parts[(warp * 16 + i / 16) * PARTS_LD + i % 16];
        }
        sum[i / 16 * SMALL_LD + i % 16] = x;
    }
}

/* ---- the covariance forward ------------------------------------------------------------------ */

/* Shared memory of the covariance's walk, in doubles. */
template <int R>
struct covariance_room {
    double k[STAGES][16 * pitch<R>::left], q[STAGES][16 * pitch<R>::left];
    double phi[STAGES][R], noise[STAGES][2 * R];
    double B[16 * pitch<R>::right], z[16 * pitch<R>::right];
    double parts[R / 16 * 16 * PARTS_LD];
    double S[16 * SMALL_LD], eliminate[16 * SMALL_LD];
    double inverse[2][CHUNK], sigma[CHUNK];    // inverse of this chunk and of the one before
    double spread[R / 16];
};

/* 1 / x of a normal number to its last bit or two: the quotient's care for others costs a call. */
__device__ __forceinline__ static double reciprocal(double x) {
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
#pragma unroll
    for (int i = 0; i < 3; i++) y = fma(y, fma(-x, y, 1.0), y);
    return y;
}

/* S + diag r2 = G' diag(1/sigma) G by one warp: lane t has column t, lane 16 + t that of the unit
 * matrix, which becomes G'^-1. The rows of S come first. Lane t has r2_t. */
__device__ __forceinline__ static void factorise(const double *S, double *eliminate, double *sigma,
                                 double *inverse, double r2) {
    const int lane = threadIdx.x % 32, t = lane % 16;
    const bool unit = lane >= 16;
    double column[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        const double s = S[i <= t ? i * SMALL_LD + t : t * SMALL_LD + i];
        column[i] = unit ? (i == t ? 1.0 : 0.0) : s;
    }
    double mine = 0.0, own = 0.0;
#pragma unroll
    for (int j = 0; j < CHUNK; j++) {
        const double variance = fmax(__shfl_sync(0xffffffffu, column[j], j), 0.0);
        const double total = __shfl_sync(0xffffffffu, r2, j) + variance;
        const double one = reciprocal(total);
        const double factor = column[j] * one;
        if (lane == j) mine = total, own = one;
#pragma unroll
        for (int i = j + 1; i < CHUNK; i++) {
            const double other = __shfl_sync(0xffffffffu, column[j], i);
            column[i] = fma(-other, factor, column[i]);
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
__device__ __forceinline__ static void put_reads(double *to, const double *z, const double *q,
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
__device__ __forceinline__ static bool raise_strip(strip<R> &P, covariance_room<R> &room, const double *nk,
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
__device__ __forceinline__ static void load_covariance(strip<R> &P, const mn_bayes_args &p, const span_group &s,
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
__device__ __forceinline__ static void put_last(double *to, const strip<R> &P, F adjoint) {
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

/* z / sigma and what chunks need of each other, of all chunks of a group of a head of a sequence. */
template <int R>
__global__ void __launch_bounds__(2 * R, 1)
covariance_walk_kernel(const __grid_constant__ mn_bayes_args p,
                       const __grid_constant__ span_work w, bool bf16) {
    extern __shared__ __align__(16) double doubles[];
    covariance_room<R> &room = *(covariance_room<R> *)doubles;
    constexpr int LEFT = pitch<R>::left, RIGHT = pitch<R>::right;
    const span_group s = group_at(p, blockIdx.x);
    const int64_t H = p.call.H, G = p.call.G;
    if (w.steep[s.n * H + s.h]) return;
    const mn_span span = mn_span_at(p.call, s.n);
    const int64_t slot0 = first_slot(p.call, span, s.n), n_chunks = SPAN_CHUNKS * n_spans_of(span);
    const bool turns = p.theta.data != NULL, handed_in = p.P0.data != NULL;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = (int)p.call.K * (turns ? 2 : 1), column = 16 * warp;
    const auto head_at = [&](int64_t c) { return (slot0 + c / SPAN_CHUNKS) * H + s.h; };
    const auto chunk_of_head = [&](int64_t c) {
        return (head_at(c) * SPAN_CHUNKS + c % SPAN_CHUNKS) * CHUNK;
    };
    const auto chunk_at = [&](int64_t c) {
        return (head_at(c) * G + s.g) * SPAN_CHUNKS + c % SPAN_CHUNKS;
    };
    const auto fetch = [&](int64_t c) {
        const int stage = (int)(c % STAGES);
        if (c < n_chunks) {
            const double *noise = w.noise + (head_at(c) * 5 + 4) * 2 * R;
            const double *phi = w.phi + (head_at(c) * SPAN_TOKENS + SPAN_TOKENS - 1) * R;
            copy_rows_later<R>(room.k[stage], LEFT, w.k + chunk_of_head(c) * R, CHUNK, 2 * R);
            copy_rows_later<R>(room.q[stage], LEFT, w.q + chunk_of_head(c) * R, CHUNK, 2 * R);
            copy_rows_later<R>(room.noise[stage], R, noise, 2, 2 * R);
            copy_rows_later<R>(room.phi[stage], R, phi, 1, 2 * R);
        }
        close_copies();
    };
    strip<R> P;
    load_covariance<R>(P, p, s, rows, bf16);
    fetch(0), fetch(1);
    await_copies();
    __syncthreads();
    for (int64_t c = 0; c < n_chunks; c++) {
        const int stage = (int)(c % STAGES), now = (int)(c % 2);
        const double *nk = w.nk + chunk_of_head(c) * R;
        const double r2 = w.r2[chunk_at(c) * CHUNK + lane % 16];
        double x[2][2][2], noisy[2][2][2];
        get_rows(noisy[0], nk, R, column), get_rows(noisy[1], nk, R, column + 8);
        for (bool again = false;; again = true) {
            zero(x[0]), zero(x[1]);
            through_strip<R>(x, room.k[stage], LEFT, P);
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
            if (!raise_strip<R>(P, room, nk, __shfl_sync(0xffffffffu, r2, 0), turns)) break;
        }
        if (c % SPAN_CHUNKS == 0) {
            double *to = w.P + (chunk_at(c) / SPAN_CHUNKS * R + 16 * warp) * R;
#pragma unroll
            for (int j = 0; j < R / 8; j++) put_rows(to, R, 8 * j, P[j]);
        }
        if (warp == 0) {
            factorise(room.S, room.eliminate, room.sigma, room.inverse[now], r2);
        } else if (warp < 3 && c > 0) {
            put_reads<R>(w.reads + chunk_at(c - 1) * SMALL, room.z,
                         room.q[(c - 1) % STAGES], room.inverse[!now], warp - 1);
        }
        __syncthreads();
        fetch(c + 2);
        double left[8];
        left_small(left, room.eliminate, SMALL_LD);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            double b[4];
            right_columns16(b, room.B, RIGHT, column + 8 * m);
            zero(x[m]);
            mn_dmma_16(x[m], left, b);
            put_rows(room.z, RIGHT, column + 8 * m, x[m]);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const double inverse = room.inverse[now][lane / 4 + 8 * t];
                x[m][t][0] *= inverse, x[m][t][1] *= inverse;
            }
            put_rows(w.w + chunk_at(c) * CHUNK * R, R, column + 8 * m, x[m]);
        }
        for (int i = threadIdx.x; i < SMALL; i += 2 * R) {
            w.eliminate[chunk_at(c) * SMALL + i] = room.eliminate[i / 16 * SMALL_LD + i % 16];
        }
        if (threadIdx.x < CHUNK) {
            w.sigma[chunk_at(c) * CHUNK + threadIdx.x] = room.sigma[threadIdx.x];
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
            mn_dmma_16(P[j], left, b);
        }
        if (c % SPAN_CHUNKS != SPAN_CHUNKS - 1) continue;
        const double *noise = room.noise[stage];
        double own[2][2] = {};
        pick_inside<R>(own, P);
        each_inside(own, [&](double &to, int row, int other) {
            to += row == other ? noise[row] : noise[R + row];
        });
        put_inside<R>(P, own);
        move_strip_columns<R>(P, room.phi[stage], turns, false);
        move_strip_rows<R>(P, room.phi[stage], turns, false);
    }
    if (n_chunks > 0 && (warp == 1 || warp == 2)) {
        put_reads<R>(w.reads + chunk_at(n_chunks - 1) * SMALL, room.z,
                     room.q[(n_chunks - 1) % STAGES], room.inverse[(n_chunks - 1) % 2], warp - 1);
    }
    const float *dP = mn_row<float>(p.cot.P, s.n, 0, s.h);
    if (dP) dP += s.g * rows * rows;
    put_last<R>(w.last + (int64_t)blockIdx.x * (w.slices * MEAN_WARPS + 1) * 2 * R, P,
                [&](int row, int other) { return symmetric_cotangent(dP, rows, row, other); });
}

/* ---- the mean and its adjoint ---------------------------------------------------------------- */

/* Shared memory of one chunk on the way forward, and back. */
template <int R>
struct mean_stage {
    double k[16 * pitch<R>::left], w[16 * pitch<R>::right];
    double eliminate[16 * SMALL_LD], phi[R];
};

template <int R>
struct mean_back_stage {
    double w[16 * pitch<R>::left], k[16 * pitch<R>::right], q[16 * pitch<R>::right];
    double eliminate[16 * SMALL_LD], reads[16 * SMALL_LD], phi[R];
};

template <int R>
struct mean_room {
    union {
        mean_stage<R> forward[STAGES];
        mean_back_stage<R> back[STAGES];
    };
    double turned[MEAN_WARPS][16 * SMALL_LD];    // of each warp: (16,16) to be read across
};

/* Where a warp of the mean works. */
struct mean_place {
    span_group s;
    mn_span span;
    int64_t slot0, n_chunks;
    int first, count;       // value columns of the warp: the first one within the group
    int64_t panel_ld;       // of e and de
};

__device__ __forceinline__ static mean_place mean_place_at(const mn_bayes_args &p, const span_work &w,
                                           int64_t block) {
    mean_place a;
    a.s = group_at(p, block / w.slices);
    a.span = mn_span_at(p.call, a.s.n);
    a.slot0 = first_slot(p.call, a.span, a.s.n);
    a.n_chunks = SPAN_CHUNKS * n_spans_of(a.span);
    a.first = (int)((block % w.slices * MEAN_WARPS + threadIdx.x / 32) * SLICE);
    a.count = max(min(a.s.count - a.first, (int)SLICE), 0);
    a.panel_ld = w.columns;
    return a;
}

/* A state's 16 value columns, (V, R) or transposed where the caller has it: rows of R numbers. */
template <int R>
__device__ __forceinline__ static void put_mean(double *to, const strip<R> &M) {
#pragma unroll
    for (int j = 0; j < R / 8; j++) put_rows(to, R, 8 * j, M[j]);
}

/* use(element, value column, row) for all of them */
template <int R, typename F>
__device__ __forceinline__ static void each_mean(strip<R> &M, F use) {
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int v = 8 * m + (int)(threadIdx.x % 32) / 4, row = mn_tile_column(j);
            use(M[j][m][0], v, row), use(M[j][m][1], v, row + 1);
        }
    }
}

template <int R>
__device__ __forceinline__ static void load_mean(strip<R> &M, const mn_in &from, const mn_bayes_args &p,
                                 const mean_place &a, int rows) {
    const float *x = mn_row<float>(from, a.s.n, 0, a.s.h);
    each_mean<R>(M, [&](double &to, int v, int row) {
        const bool inside = x && v < a.count && row < rows;
        to = inside ? (double)x[(int64_t)row * p.call.V + a.s.first + a.first + v] : 0.0;
    });
}

/* (16,16) of a warp as the right factors of both halves of its columns, tokens summed over. */
__device__ __forceinline__ static void turn(double (&b)[2][4], double *room, const double (&x)[2][2][2]) {
    __syncwarp();
    put_rows(room, SMALL_LD, 0, x[0]), put_rows(room, SMALL_LD, 8, x[1]);
    __syncwarp();
    right_columns16(b[0], room, SMALL_LD, 0);
    right_columns16(b[1], room, SMALL_LD, 8);
}

/* What turn left in the room, as a left factor: columns become rows. */
__device__ __forceinline__ static void left_turned(double (&a)[8], const double (&b)[2][4], double sign) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[2 * i] = sign * b[0][i], a[2 * i + 1] = sign * b[1][i];
}

/* 16 rows of a state += left (16, 16 tokens) times `rows` (16 tokens, R) */
template <int R>
__device__ __forceinline__ static void add_product(strip<R> &M, const double (&left)[8], const double *rows) {
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
        double b[4];
        right_columns16(b, rows, pitch<R>::right, 8 * j);
        mn_dmma_16(M[j], left, b);
    }
}

/* e_t, and M in front of spans. */
template <typename T, int R>
__device__ __forceinline__ static void mean_forward(mean_room<R> &room, const mn_bayes_args &p,
                                    const span_work &w, int64_t block) {
    const mean_place a = mean_place_at(p, w, block);
    const int64_t H = p.call.H, G = p.call.G;
    if (w.steep[a.s.n * H + a.s.h]) return;
    const bool turns = p.theta.data != NULL;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = (int)p.call.K * (turns ? 2 : 1);
    constexpr int THREADS = 32 * MEAN_WARPS;
    const auto head_at = [&](int64_t c) { return (a.slot0 + c / SPAN_CHUNKS) * H + a.s.h; };
    const auto chunk_at = [&](int64_t c) {
        return (head_at(c) * G + a.s.g) * SPAN_CHUNKS + c % SPAN_CHUNKS;
    };
    const auto fetch = [&](int64_t c) {
        mean_stage<R> &to = room.forward[c % STAGES];
        if (c < a.n_chunks) {
            const int64_t head = (head_at(c) * SPAN_CHUNKS + c % SPAN_CHUNKS) * CHUNK;
            const double *phi = w.phi + (head_at(c) * SPAN_TOKENS + SPAN_TOKENS - 1) * R;
            copy_rows_later<R>(to.k, pitch<R>::left, w.k + head * R, CHUNK, THREADS);
            copy_rows_later<R>(to.w, pitch<R>::right, w.w + chunk_at(c) * CHUNK * R, CHUNK,
                               THREADS);
            copy_rows_later<16>(to.eliminate, SMALL_LD, w.eliminate + chunk_at(c) * SMALL, CHUNK,
                                THREADS);
            copy_rows_later<R>(to.phi, R, phi, 1, THREADS);
        }
        close_copies();
    };
    strip<R> M;
    load_mean<R>(M, p.M0, p, a, rows);
    fetch(0), fetch(1);
    for (int64_t c = 0; c < a.n_chunks; c++) {
        await_copies();
        __syncthreads();
        fetch(c + 2);
        if (a.first >= w.columns) continue;
        const mean_stage<R> &here = room.forward[c % STAGES];
        if (c % SPAN_CHUNKS == 0) {
            put_mean<R>(w.M + (chunk_at(c) / SPAN_CHUNKS * w.columns + a.first) * R, M);
        }
        double x[2][2][2], v[2][2][2];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int m = i / 4, t = 8 * (i / 2 % 2) + lane / 4, j = 8 * m + 2 * (lane % 4) + i % 2;
            const bool there = j < a.count && c * CHUNK + t < a.span.length;
            const T *from = mn_row<T>(p.v, a.span.b, a.span.t0 + c * CHUNK + t, a.s.h);
            v[m][i / 2 % 2][i % 2] =
                there ? (double)mn_float(from[a.s.first + a.first + j]) : 0.0;
        }
        zero(x[0]), zero(x[1]);
        through_strip<R>(x, here.k, pitch<R>::left, M);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int m = i / 4, t = i / 2 % 2;
            x[m][t][i % 2] = v[m][t][i % 2] - x[m][t][i % 2];
        }
        double b[2][4], left[8];
        turn(b, room.turned[warp], x);
        left_small(left, here.eliminate, SMALL_LD);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            zero(x[m]);
            mn_dmma_16(x[m], left, b[m]);
            put_rows(w.e + chunk_at(c) * CHUNK * a.panel_ld + a.first, a.panel_ld, 8 * m, x[m]);
        }
        turn(b, room.turned[warp], x);
        left_turned(left, b, 1.0);
        add_product<R>(M, left, here.w);
        if (c % SPAN_CHUNKS == SPAN_CHUNKS - 1) {
            move_strip_columns<R>(M, here.phi, turns, false);
        }
    }
    const float *dM = mn_row<float>(p.cot.M, a.s.n, 0, a.s.h);
    const int part = 1 + a.first / SLICE;
    double *to = w.last + ((block / w.slices) * (w.slices * MEAN_WARPS + 1) + part) * 2 * R;
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
        double own[2] = { 0.0, 0.0 }, cross[2] = { 0.0, 0.0 };
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int v = 8 * m + lane / 4, row = mn_tile_column(j);
            const int64_t at = (int64_t)row * p.call.V + a.s.first + a.first + v;
            const bool there = dM && v < a.count;
            const double d0 = there && row < rows ? (double)dM[at] : 0.0;
            const double d1 = there && row + 1 < rows ? (double)dM[at + p.call.V] : 0.0;
            own[0] += d0 * M[j][m][0], own[1] += d1 * M[j][m][1];
            cross[0] += d0 * M[j][m][1], cross[1] += d1 * M[j][m][0];
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int lanes = 4; lanes < 32; lanes <<= 1) {
                own[i] += __shfl_xor_sync(0xffffffffu, own[i], lanes);
                cross[i] += __shfl_xor_sync(0xffffffffu, cross[i], lanes);
            }
            const int row = mn_tile_column(j) + i;
            if (lane < 4) to[row] = own[i], to[R + row] = cross[i];
        }
    }
}

/* de_t, E behind spans, and dM_0. */
template <typename T, int R>
__device__ __forceinline__ static void mean_backward(mean_room<R> &room, const mn_bayes_args &p,
                                     const span_work &w, int64_t block) {
    const mean_place a = mean_place_at(p, w, block);
    const int64_t H = p.call.H, G = p.call.G;
    if (w.steep[a.s.n * H + a.s.h]) return;
    const bool turns = p.theta.data != NULL;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = (int)p.call.K * (turns ? 2 : 1);
    constexpr int THREADS = 32 * MEAN_WARPS;
    const auto head_at = [&](int64_t c) { return (a.slot0 + c / SPAN_CHUNKS) * H + a.s.h; };
    const auto chunk_at = [&](int64_t c) {
        return (head_at(c) * G + a.s.g) * SPAN_CHUNKS + c % SPAN_CHUNKS;
    };
    const auto fetch = [&](int64_t c) {    // later chunks come first
        mean_back_stage<R> &to = room.back[(a.n_chunks - 1 - c) % STAGES];
        if (c >= 0) {
            const int64_t head = (head_at(c) * SPAN_CHUNKS + c % SPAN_CHUNKS) * CHUNK;
            const double *phi = w.phi + (head_at(c) * SPAN_TOKENS + SPAN_TOKENS - 1) * R;
            copy_rows_later<R>(to.k, pitch<R>::right, w.k + head * R, CHUNK, THREADS);
            copy_rows_later<R>(to.q, pitch<R>::right, w.q + head * R, CHUNK, THREADS);
            copy_rows_later<R>(to.w, pitch<R>::left, w.w + chunk_at(c) * CHUNK * R, CHUNK,
                               THREADS);
            copy_rows_later<16>(to.eliminate, SMALL_LD, w.eliminate + chunk_at(c) * SMALL, CHUNK,
                                THREADS);
            copy_rows_later<16>(to.reads, SMALL_LD, w.reads + chunk_at(c) * SMALL, CHUNK,
                                THREADS);
            copy_rows_later<R>(to.phi, R, phi, 1, THREADS);
        }
        close_copies();
    };
    strip<R> E;
    load_mean<R>(E, p.cot.M, p, a, rows);
    fetch(a.n_chunks - 1), fetch(a.n_chunks - 2);
    for (int64_t c = a.n_chunks - 1; c >= 0; c--) {
        await_copies();
        __syncthreads();
        fetch(c - 2);
        if (a.first >= w.columns) continue;
        const mean_back_stage<R> &here = room.back[(a.n_chunks - 1 - c) % STAGES];
        double y[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int m = i / 4, t = lane % 4 + i % 4 * 4, j = 8 * m + lane / 4;
            const T *from = mn_row<T>(p.cot.o, a.span.b, a.span.t0 + c * CHUNK + t, a.s.h);
            const bool there = from && j < a.count && c * CHUNK + t < a.span.length;
            y[m][i % 4] =
                there ? p.scale * (double)mn_float(from[a.s.first + a.first + j]) : 0.0;
        }
        if (c % SPAN_CHUNKS == SPAN_CHUNKS - 1) {
            move_strip_columns<R>(E, here.phi, turns, true);
            put_mean<R>(w.E + (chunk_at(c) / SPAN_CHUNKS * w.columns + a.first) * R, E);
        }
        double x[2][2][2], b[2][4], left[8];
        zero(x[0]), zero(x[1]);
        through_strip<R>(x, here.w, pitch<R>::left, E);
        left_small(left, here.reads, SMALL_LD);
        mn_dmma_16(x[0], left, y[0]);
        mn_dmma_16(x[1], left, y[1]);
        turn(b, room.turned[warp], x);
        left_columns16(left, here.eliminate, SMALL_LD, 0);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            zero(x[m]);
            mn_dmma_16(x[m], left, b[m]);
            put_rows(w.de + chunk_at(c) * CHUNK * a.panel_ld + a.first, a.panel_ld, 8 * m, x[m]);
        }
        left_turned(left, y, 1.0);
        add_product<R>(E, left, here.q);
        turn(b, room.turned[warp], x);
        left_turned(left, b, -1.0);
        add_product<R>(E, left, here.k);
    }
    float *dM = mn_row<float>(p.grad.M0, a.s.n, 0, a.s.h);
    each_mean<R>(E, [&](double &x, int v, int row) {
        if (!dM || v >= a.count || row >= rows) return;
        dM[(int64_t)row * p.call.V + a.s.first + a.first + v] = (float)x;
    });
}

/* Half the blocks go forward, the others back: neither needs the other. */
template <typename T, int R>
__global__ void __launch_bounds__(32 * MEAN_WARPS, 1)
mean_walks_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    mean_room<R> &room = *(mean_room<R> *)doubles;
    const int64_t half = gridDim.x / 2, block = blockIdx.x;
    if (block < half) mean_backward<T, R>(room, p, w, block);
    else mean_forward<T, R>(room, p, w, block - half);
}

/* ---- the covariance's adjoint ---------------------------------------------------------------- */

template <int R>
struct adjoint_stage {
    double w[16 * pitch<R>::left], k[16 * pitch<R>::right], q[16 * pitch<R>::right];
    double eliminate[16 * SMALL_LD], phi[R];
};

template <int R>
struct adjoint_room {
    adjoint_stage<R> stage[STAGES];
    double h[16 * pitch<R>::right], turned[16 * pitch<R>::right];
    double parts[R / 16 * 16 * PARTS_LD];
    double S[16 * SMALL_LD];
};

/* H of all chunks from what the sources alone say of it, and Omega + Theta / 2; dP_0. */
template <typename T, int R>
__global__ void __launch_bounds__(2 * R, 1)
adjoint_walk_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    adjoint_room<R> &room = *(adjoint_room<R> *)doubles;
    constexpr int LEFT = pitch<R>::left, RIGHT = pitch<R>::right, THREADS = 2 * R;
    const span_group s = group_at(p, blockIdx.x);
    const int64_t H = p.call.H, G = p.call.G;
    if (w.steep[s.n * H + s.h]) return;
    const mn_span span = mn_span_at(p.call, s.n);
    const int64_t slot0 = first_slot(p.call, span, s.n), n_chunks = SPAN_CHUNKS * n_spans_of(span);
    const bool turns = p.theta.data != NULL, weighs = p.cot.qvar.data && p.q.data;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = (int)p.call.K * (turns ? 2 : 1), column = 16 * warp;
    const auto head_at = [&](int64_t c) { return (slot0 + c / SPAN_CHUNKS) * H + s.h; };
    const auto chunk_at = [&](int64_t c) {
        return (head_at(c) * G + s.g) * SPAN_CHUNKS + c % SPAN_CHUNKS;
    };
    const auto fetch = [&](int64_t c) {
        adjoint_stage<R> &to = room.stage[(n_chunks - 1 - c) % STAGES];
        if (c >= 0) {
            const int64_t head = (head_at(c) * SPAN_CHUNKS + c % SPAN_CHUNKS) * CHUNK;
            const double *phi = w.phi + (head_at(c) * SPAN_TOKENS + SPAN_TOKENS - 1) * R;
            copy_rows_later<R>(to.w, LEFT, w.w + chunk_at(c) * CHUNK * R, CHUNK, THREADS);
            copy_rows_later<R>(to.k, RIGHT, w.k + head * R, CHUNK, THREADS);
            if (weighs) copy_rows_later<R>(to.q, RIGHT, w.q + head * R, CHUNK, THREADS);
            copy_rows_later<16>(to.eliminate, SMALL_LD, w.eliminate + chunk_at(c) * SMALL, CHUNK,
                                THREADS);
            copy_rows_later<R>(to.phi, R, phi, 1, THREADS);
        }
        close_copies();
    };
    const float *dP = mn_row<float>(p.cot.P, s.n, 0, s.h);
    if (dP) dP += s.g * rows * rows;
    strip<R> D;
    fill_strip<R>(D, [&](int row, int other) { return symmetric_cotangent(dP, rows, row, other); });
    fetch(n_chunks - 1), fetch(n_chunks - 2);
    await_copies();
    __syncthreads();
    for (int64_t c = n_chunks - 1; c >= 0; c--) {
        const adjoint_stage<R> &here = room.stage[(n_chunks - 1 - c) % STAGES];
        double *h = w.h + chunk_at(c) * CHUNK * R, *theta = w.theta + chunk_at(c) * SMALL;
        double x[2][2][2], known[2][2][2], omega[2][2][2], left[8], b[4];
        get_rows(known[0], h, R, column), get_rows(known[1], h, R, column + 8);
        get_rows(omega[0], theta, 16, 0), get_rows(omega[1], theta, 16, 8);
        if (c % SPAN_CHUNKS == SPAN_CHUNKS - 1) {
            move_strip_columns<R>(D, here.phi, turns, true);
            move_strip_rows<R>(D, here.phi, turns, true);
        }
        double *inside = w.inside + chunk_at(c) * 2 * R;
        double own[2][2] = {};
        pick_inside<R>(own, D);
        each_inside(own, [&](double &from, int row, int other) {
            inside[row == other ? row : R + row] = from;
        });
        zero(x[0]), zero(x[1]);
        through_strip<R>(x, here.w, LEFT, D);
        double *turned = room.turned + column;
        put_rows(turned, RIGHT, 0, x[0]), put_rows(turned, RIGHT, 8, x[1]);
        __syncwarp();
        left_columns16(left, here.eliminate, SMALL_LD, 0);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            right_columns16(b, turned, RIGHT, 8 * m);
            zero(x[m]);
            mn_dmma_16(x[m], left, b);
        }
        gram_share<R>(room.parts, x, here.w, LEFT);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            known[i / 4][i / 2 % 2][i % 2] += x[i / 4][i / 2 % 2][i % 2];
        }
        put_rows(room.h, RIGHT, column, known[0]), put_rows(room.h, RIGHT, column + 8, known[1]);
        put_rows(h, R, column, known[0]), put_rows(h, R, column + 8, known[1]);
        __syncthreads();
        fetch(c - 2);
        add_shares<R>(room.S, room.parts);
        left_columns16(left, here.k, RIGHT, column);
#pragma unroll
        for (int i = 0; i < 8; i++) left[i] = -left[i];
        add_product<R>(D, left, room.h);
        __syncthreads();
        left_small(left, room.S, SMALL_LD);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            right_columns16(b, here.eliminate, SMALL_LD, 8 * m);
            mn_dmma_16(omega[m], left, b);
        }
        if (warp == 0) put_rows(theta, 16, 0, omega[0]), put_rows(theta, 16, 8, omega[1]);
        zero(x[0]), zero(x[1]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            double a[4], k[2];
            left_result(a, omega[half]);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                right_columns(k, here.k + 8 * half * RIGHT, RIGHT, column + 8 * m);
                mn_dmma_8(x[m], a, k);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i / 4][i / 2 % 2][i % 2] -= known[i / 4][i / 2 % 2][i % 2];
        }
        put_rows(turned, RIGHT, 0, x[0]), put_rows(turned, RIGHT, 8, x[1]);
        __syncwarp();
        left_columns16(left, turned, RIGHT, 0);
        add_product<R>(D, left, here.k);
        if (weighs) {
            left_columns16(left, here.q, RIGHT, column);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int64_t t = c * CHUNK + lane % 4 + 4 * i;
                const T *dqvar = mn_row<T>(p.cot.qvar, span.b, span.t0 + t, s.h);
                const double a = t < span.length
                                     ? p.scale * p.scale * (double)mn_float(dqvar[s.g]) : 0.0;
                left[2 * i] *= a, left[2 * i + 1] *= a;
            }
            add_product<R>(D, left, here.q);
        }
        await_copies();
        __syncthreads();
    }
    float *dP0 = mn_row<float>(p.grad.P0, s.n, 0, s.h);
    if (dP0) dP0 += s.g * rows * rows;
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = mn_tile_row(2 * warp + i / 2), other = mn_tile_column(j) + i % 2;
            const double d = D[j][i / 2][i % 2];
            if (row == other && row < rows) sum += d;
            if (!dP0 || row >= rows || other > row) continue;
            dP0[(int64_t)row * rows + other] = dP0[(int64_t)other * rows + row] = (float)d;
        }
    }
    for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (lane == 0) room.S[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0.0;
    for (int i = 0; i < R / 16; i++) sum += room.S[i];
    w.traces[blockIdx.x] = sum;
}

#endif
