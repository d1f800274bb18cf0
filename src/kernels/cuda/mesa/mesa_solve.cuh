/* mesa_solve.cuh - M x = b for a symmetric positive definite M: by a warp up to 64 rows, by four
 * warps up to 128.
 *
 * M is in tiles of 8 x 8 doubles in registers, a lane with row l / 4 and columns 2 (l % 4) and the
 * next of each, which is how tensor cores want sums and, with their inner index reordered to 0 2 4
 * 6, 1 3 5 7, both factors as well. With D_k the tile on the diagonal when its turn comes,
 *
 *   L_ik = C_ik D_k^-1       C_ij -= L_ik C_jk'      z_i -= L_ik z_k         i >= j > k
 *   x_k = D_k^-1 z_k - sum over i > k of L_ik'x_i
 *
 * so that M = L D L' and nothing but tiles of eight is inverted. All in double, but for the first
 * guess of an inverse: any data is solved to the accuracy of its statistics. Warps of a
 * group show each other column k of tiles, and then sums, at one barrier of the block for
 * each k. */
#ifndef MN_KERNELS_CUDA_MESA_MESA_SOLVE_CUH
#define MN_KERNELS_CUDA_MESA_MESA_SOLVE_CUH

#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/mma_f64.cuh"

namespace mneme::mesa {

/* The lower triangle of N x N tiles, two rows of tiles at a time as the tensor cores take them. A
 * single warp has all pairs of rows; of a group, warp w has the pairs w and N / 2 - 1 - w.
 * at[slot][j] are column j of the rows 2 pair and 2 pair + 1, there for j < columns(slot); what is
 * right of the diagonal means nothing. */
template <int N>
struct mn_mesa_matrix {
    static constexpr int warps = N <= 8 ? 1 : 4, slots = N / 2 / warps;
    double at[slots][N][2][2];

    __device__ static constexpr int columns(int slot) {
        return warps == 1 ? 2 * slot + 2 : N / 2 * (slot + 1);
    }

    __device__ static int pair(int slot) {
        const int warp = threadIdx.x / 32 % warps;
        return warps == 1 ? slot : slot ? N / 2 - 1 - warp : warp;
    }

    /* Whether this warp has row k of tiles, and where. */
    __device__ static constexpr int slot_of(int k) {
        return warps == 1 ? k / 2 : k / (N / 2);
    }
    __device__ static bool has(int k) {
        return pair(slot_of(k)) == k / 2;
    }
};

/* What 1 - X D may be, cell by cell, for X to come nearer to the inverse of D each time; and for
 * the next X to be off by the square of that, some 1e-10, where M's numbers are good for 6e-8. One
 * or two rounds get there where D is no worse than most. */
static constexpr double MN_MESA_CONTRACTS = 0.01, MN_MESA_CONVERGED = 4e-6;
enum { MN_MESA_MAX_NEWTON = 6 };

/* What the warps of a group show each other, in turn with what they showed before. */
template <int N>
struct mn_mesa_warp_exchange {
    double tile[2][N][64], z[2][2][8], sum[2][mn_mesa_matrix<N>::warps][2][8];
};
template <>
struct mn_mesa_warp_exchange<8> {};
template <>
struct mn_mesa_warp_exchange<4> {};
template <>
struct mn_mesa_warp_exchange<2> {};

/* A barrier of the group; where groups have several warps, of the block, whose groups do the
 * same.
 * */
template <int WARPS>
__device__ inline void mn_mesa_group_sync(void) {
    if (WARPS == 1) __syncwarp();
    else __syncthreads();
}

__device__ inline double mn_mesa_shfl(double x, int lane) {
    return __shfl_sync(0xffffffffu, x, lane);
}

/* The sum over lanes that differ in `bits`. */
__device__ inline double mn_mesa_lane_sum(double x, int first, int last) {
    for (int lanes = first; lanes <= last; lanes *= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, lanes);
    }
    return x;
}

/* Sums over rows of a tile, to the rows: to row r that of column r. The two columns of a lane part
 * on the way. */
__device__ inline double mn_mesa_lane_transpose(const double (&x)[2]) {
    const int row = threadIdx.x % 32 / 4;
    const double send = row % 2 ? x[0] : x[1], own = row % 2 ? x[1] : x[0];
    const double sum = mn_mesa_lane_sum(own + __shfl_xor_sync(0xffffffffu, send, 4), 8, 16);
    return mn_mesa_shfl(sum, 4 * (row % 2) + row / 2);
}

__device__ inline float mn_mesa_shfl(float x, int lane) {
    return __shfl_sync(0xffffffffu, x, lane);
}

__device__ inline float mn_mesa_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline double mn_mesa_reciprocal(double x) {
    return mn_rcp_f64(x);
}

/* D becomes its inverse: Gauss and Jordan's elimination in place, two rows S at a time, of which E
 * is the inverse of D_SS. A row outside loses D_rS E times the rows S, and keeps -D_rS E at S. */
template <typename R>
__device__ inline void mn_mesa_eliminate(R (&d)[2]) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
#pragma unroll 1
    for (int p = 0; p < 4; p++) {
        const R a = mn_mesa_shfl(d[0], 9 * p), b = mn_mesa_shfl(d[1], 9 * p);
        const R c = mn_mesa_shfl(d[1], 9 * p + 4);
        R left[2], above[2][2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            left[e] = mn_mesa_shfl(d[e], 4 * row + p);
            above[0][e] = mn_mesa_shfl(d[e], 8 * p + pair);
            above[1][e] = mn_mesa_shfl(d[e], 8 * p + 4 + pair);
        }
        const bool inside = row / 2 == p;    // a row of S takes E times the rows S
        left[0] = inside ? (R)(row % 2 ? 0 : 1) : -left[0];
        left[1] = inside ? (R)(row % 2 ? 1 : 0) : -left[1];
        const R share = mn_mesa_reciprocal(fma(a, c, -b * b));
        const R first = share * fma(left[0], c, -left[1] * b);
        const R second = share * fma(left[1], a, -left[0] * b);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const R old = inside ? (R)0 : d[e];
            const R other = fma(second, above[1][e], fma(first, above[0][e], old));
            d[e] = pair == p ? (e ? second : first) : other;
        }
    }
}

/* Whether all cells of a tile are less than `bound`, by the upper halves of the numbers, which are
 * compared sooner than doubles; NaN is not. */
__device__ inline bool mn_mesa_all_below(const double (&x)[2], double bound) {
    const int most = __double2hiint(bound);
    const int first = __double2hiint(x[0]) & 0x7fffffff, second = __double2hiint(x[1]) & 0x7fffffff;
    return __all_sync(0xffffffffu, max(first, second) < most);
}

/* The same, as a chain of doubles is long: the inverse X in float32, then X <- X + (1 - X D) X on
 * tensor cores, each time the square of what was off before, until that is far less than what the
 * numbers that D was made from are good for. Where float32 has no grip on D, all in double. */
__device__ inline void mn_mesa_invert(double (&d)[2]) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    float guess[2] = { (float)d[0], (float)d[1] };
    mn_mesa_eliminate(guess);
    double x[2] = { (double)guess[0], (double)guess[1] };
    bool contracts = true, converged = false;
#pragma unroll 1
    for (int round = 0; round < MN_MESA_MAX_NEWTON && contracts && !converged; round++) {
        double off[2][2] = { { row == 2 * pair ? 1.0 : 0.0, row == 2 * pair + 1 ? 1.0 : 0.0 } };
        const double left[4] = { x[0], 0.0, x[1], 0.0 }, less[2] = { -d[0], -d[1] };
        mn_mma_f64_k8(off, left, less);
        contracts = mn_mesa_all_below(off[0], MN_MESA_CONTRACTS),
            converged = mn_mesa_all_below(off[0], MN_MESA_CONVERGED);
        double sum[2][2] = { { x[0], x[1] } };
        const double by[4] = { off[0][0], 0.0, off[0][1], 0.0 };
        mn_mma_f64_k8(sum, by, x);    // asked before it is known, as it takes a while
        x[0] = sum[0][0], x[1] = sum[0][1];
    }
    if (contracts) d[0] = x[0], d[1] = x[1];
    else mn_mesa_eliminate(d);
}

/* The parts that are the same for one warp and for more; -L_ik takes the place of C_ik. `v` are the
 * sides, a lane with its part of what row l / 4 of each of its tiles gets until that tile's turn,
 * D_k^-1 z_k after it, then x. */
template <int N, int SIDES>
struct mn_mesa_solver {
    typedef mn_mesa_matrix<N> matrix;
    double v[matrix::slots][2][SIDES];

    /* z of tile k, which this warp has: in all lanes of a row. */
    __device__ double own(const float *b, int k, int s) const {
        const double got = mn_mesa_lane_sum(v[matrix::slot_of(k)][k % 2][s], 1, 2);
        return (double)b[s * 8 * N + 8 * k + threadIdx.x % 32 / 4] + got;
    }

    /* D_k^-1 z_k takes the place of what the row got. */
    __device__ void apply_inverse(const double (&d)[2], const double (&z)[2], int k, int s) {
        const double x = mn_mesa_lane_sum(fma(d[0], z[0], d[1] * z[1]), 1, 2);
        if (matrix::has(k)) v[matrix::slot_of(k)][k % 2][s] = x;
    }

    /* A pair of rows loses what it has of column k, of which -L_ik is left where i > k; `d` is
     * -D_k^-1. Tensor cores take a left factor's numbers in another order than they leave sums, so
     * a single warp, which has all rows, multiplies C_ik, in that order already, with -L_jk, its
     * `column(j)`; a group, which has been shown column k as it was, -L_ik with C_jk. */
    template <typename Column>
    __device__ void eliminate(matrix &m, int slot, int k, const double (&d)[2],
                              const double (&z)[SIDES][2], Column column) {
        double(&c)[2][2] = m.at[slot][k];
        const double from[4] = { c[0][0], c[1][0], c[0][1], c[1][1] };
        const int below = 2 * matrix::pair(slot) - k;    // of the pair's first row
        double L[2][2] = {};
        mn_mma_f64_k8(L, from, d);
        const double less[4] = { L[0][0], L[1][0], L[0][1], L[1][1] };
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (matrix::warps == 1 && 2 * slot + i <= k) continue;
            c[i][0] = L[i][0], c[i][1] = L[i][1];
        }
#pragma unroll
        for (int j = k + 1; j < matrix::columns(slot); j++) {
            mn_mma_f64_k8(m.at[slot][j], matrix::warps == 1 ? from : less, column(j));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int s = 0; s < SIDES; s++) {
                const double sum = fma(L[i][0], z[s][0], fma(L[i][1], z[s][1], v[slot][i][s]));
                if (below + i > 0) v[slot][i][s] = sum;
            }
        }
    }

    /* This warp's part of what the rows below k give back: column 2 (l % 4) + e of row k. */
    __device__ void gather(double (&sum)[2], const matrix &m, int k, int s) const {
        sum[0] = sum[1] = 0.0;
#pragma unroll
        for (int slot = 0; slot < matrix::slots; slot++) {
            if (k >= matrix::columns(slot)) continue;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const double x = 2 * matrix::pair(slot) + i > k ? v[slot][i][s] : 0.0;
#pragma unroll
                for (int e = 0; e < 2; e++) sum[e] = fma(x, m.at[slot][k][i][e], sum[e]);
            }
        }
        sum[0] = mn_mesa_lane_sum(sum[0], 4, 16), sum[1] = mn_mesa_lane_sum(sum[1], 4, 16);
    }

    /* x of tile k, to which the rows below give `back`, into b. */
    __device__ void put(float *b, double back, int k, int s) {
        if (!matrix::has(k)) return;
        double &x = v[matrix::slot_of(k)][k % 2][s];
        x += back;
        if (threadIdx.x % 4 == 0) b[s * 8 * N + 8 * k + threadIdx.x % 32 / 4] = (float)x;
    }
};

/* b, SIDES rows of 8 N floats in shared memory, become M^-1 b. Rows of M from K on, up to whole
 * tiles, are those of the identity, and b is zero there. */
template <int N, int SIDES>
__device__ __forceinline__ void mn_mesa_solve_warp(mn_mesa_matrix<N> &m, float *b, int K) {
    const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    mn_mesa_solver<N, SIDES> at = {};
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (8 * k >= K) continue;
        double(&tile)[2] = m.at[k / 2][k][k % 2];
        mn_mesa_invert(tile);
        double z[SIDES][2];
        const double d[2] = { -tile[0], -tile[1] };
#pragma unroll
        for (int s = 0; s < SIDES; s++) {
            const double own = at.own(b, k, s);
            at.v[k / 2][k % 2][s] = own;
            z[s][0] = mn_mesa_shfl(own, 8 * pair), z[s][1] = mn_mesa_shfl(own, 8 * pair + 4);
        }
#pragma unroll
        for (int slot = 0; slot < N / 2; slot++) {    // from above: others need rows above
            if (2 * slot + 1 <= k) continue;
            at.eliminate(m, slot, k, d, z, [&](int j) -> const double(&)[2] {
                return m.at[j / 2][k][j % 2];
            });
        }
    }
#pragma unroll
    for (int k = 0; k < N; k++) {
#pragma unroll
        for (int s = 0; s < SIDES && 8 * k < K; s++) {
            const double own = at.v[k / 2][k % 2][s];
            const double z[2] = { mn_mesa_shfl(own, 8 * pair), mn_mesa_shfl(own, 8 * pair + 4) };
            at.apply_inverse(m.at[k / 2][k][k % 2], z, k, s);
        }
    }
    __syncwarp();    // all of b has been read
#pragma unroll
    for (int s = 0; s < SIDES; s++) {
        double given[N][2] = {};    // what x so far gives rows above, this lane's row of it
#pragma unroll
        for (int k = N - 1; k >= 0; k--) {
            if (8 * k >= K) continue;
            double &x = at.v[k / 2][k % 2][s];
            if (k < N - 1) x += mn_mesa_lane_transpose(given[k]);
            if (pair == 0) b[s * 8 * N + 8 * k + row] = (float)x;
#pragma unroll
            for (int j = k - 1; j >= 0; j--) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    given[j][e] = fma(m.at[k / 2][j][k % 2][e], x, given[j][e]);
                }
            }
        }
    }
    __syncwarp();
}

/* The same by a group of warps. */
template <int N, int SIDES>
__device__ __forceinline__ void mn_mesa_solve_warps(mn_mesa_matrix<N> &m, float *b, int K,
                                                   mn_mesa_warp_exchange<N> &exchange) {
    typedef mn_mesa_matrix<N> matrix;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % matrix::warps;
    const int row = lane / 4, pair = lane % 4;
    mn_mesa_solver<N, SIDES> at = {};
#pragma unroll
    for (int k = 0; k < N; k++) {
        if (8 * k >= K) continue;
        double(&tile)[N][64] = exchange.tile[k % 2];
#pragma unroll
        for (int slot = 0; slot < matrix::slots; slot++) {
            if (k >= matrix::columns(slot)) continue;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int j = 2 * matrix::pair(slot) + i;
                const double(&c)[2] = m.at[slot][k][i];
                if (j >= k) *(double2 *)&tile[j][2 * lane] = make_double2(c[0], c[1]);
            }
        }
#pragma unroll
        for (int s = 0; s < SIDES; s++) {
            const double own = at.own(b, k, s);
            if (pair == 0 && matrix::has(k)) exchange.z[k % 2][s][row] = own;
        }
        mn_mesa_group_sync<matrix::warps>();
        double d[2] = { tile[k][2 * lane], tile[k][2 * lane + 1] }, z[SIDES][2];
        mn_mesa_invert(d);
#pragma unroll
        for (int s = 0; s < SIDES; s++) {
            z[s][0] = exchange.z[k % 2][s][2 * pair], z[s][1] = exchange.z[k % 2][s][2 * pair + 1];
        }
#pragma unroll
        for (int s = 0; s < SIDES; s++) at.apply_inverse(d, z[s], k, s);
        d[0] = -d[0], d[1] = -d[1];
#pragma unroll
        for (int slot = 0; slot < matrix::slots; slot++) {
            if (k >= matrix::columns(slot)) continue;
            at.eliminate(m, slot, k, d, z, [&](int j) -> const double(&)[2] {
                return *(const double(*)[2])&tile[j][2 * lane];
            });
        }
    }
#pragma unroll
    for (int k = N - 1; k >= 0; k--) {
        if (8 * k >= K) continue;
#pragma unroll
        for (int s = 0; s < SIDES; s++) {
            double sum[2];
            at.gather(sum, m, k, s);
            double(&to)[8] = exchange.sum[k % 2][warp][s];
            if (row == 0) to[2 * pair] = sum[0], to[2 * pair + 1] = sum[1];
        }
        mn_mesa_group_sync<matrix::warps>();
#pragma unroll
        for (int s = 0; s < SIDES; s++) {
            double back = 0.0;
            for (int i = 0; i < matrix::warps; i++) back += exchange.sum[k % 2][i][s][row];
            at.put(b, back, k, s);
        }
    }
    mn_mesa_group_sync<matrix::warps>();
}

}    // namespace mneme::mesa

#endif
