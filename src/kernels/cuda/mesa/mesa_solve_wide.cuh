/* mesa_solve_wide.cuh - M x = b for a symmetric positive definite M and two b, by a block, for keys
 * of
 * more than 128 channels: the elimination of mesa_solve.cuh, of which M does not fit a block's
 * registers. It lies in memory, 16 x 8 numbers after the other as the lanes of a warp hold them. A
 * warp has two pairs of rows of tiles and is alone in reading and writing them; column k of tiles,
 * which all need, is shown at one barrier for each k. */
#ifndef MN_KERNELS_CUDA_MESA_MESA_SOLVE_WIDE_CUH
#define MN_KERNELS_CUDA_MESA_MESA_SOLVE_WIDE_CUH

#include "kernels/cuda/mesa/mesa_solve.cuh"

enum { MN_MESA_THREADS = 256, MN_MESA_WIDEST = 256 };

struct mn_mesa_smem {
    double tile[2][MN_MESA_WIDEST / 8][64];    // column k, in turn with the one before
    double z[2][2][8], sum[2][MN_MESA_THREADS / 32][2][8];
};

/* Tiles of M along a side: those that keys fill, and one more where that is an odd number. */
__host__ __device__ inline int mn_mesa_tiles_of(int64_t K) {
    return (int)((K + 15) / 16 * 2);
}

/* Numbers of M as it lies in memory. */
__host__ __device__ inline int64_t mn_mesa_matrix_size(int64_t K) {
    return (int64_t)mn_mesa_tiles_of(K) * mn_mesa_tiles_of(K) * 64;
}

struct mn_mesa_wide {
    enum { SLOTS = 2, SIDES = 2, AHEAD = 4, WARPS = MN_MESA_THREADS / 32 };
    double *M;
    int tiles, warp, lane, row, pair;    // row and pair of columns of a tile
    double v[SLOTS][2][SIDES];           // what rows get until their turn, then D^-1 z, then x

    __device__ mn_mesa_wide(double *matrix, int64_t K)
        : M(matrix), tiles(mn_mesa_tiles_of(K)), warp(threadIdx.x / 32), lane(threadIdx.x % 32),
          row(threadIdx.x % 32 / 4), pair(threadIdx.x % 4), v{} {}

    /* The first of the slot's two rows of tiles, there if it is less than `tiles`. The long rows
     * are dealt out against the short ones. */
    __device__ int first(int slot) const {
        return 2 * (slot ? 2 * WARPS - 1 - warp : warp);
    }
    /* Whether a row of the slot comes behind row k. */
    __device__ bool behind(int slot, int k) const {
        return first(slot) < tiles && first(slot) + 1 > k;
    }
    __device__ bool has(int slot, int k) const {
        return first(slot) == k / 2 * 2;
    }

    /* v of row k, which the slot has. */
    __device__ double of(int slot, int k, int s) const {
        return k % 2 ? v[slot][1][s] : v[slot][0][s];
    }
    __device__ void put(double x, int slot, int k, int s) {
        if (k % 2) v[slot][1][s] = x;
        else v[slot][0][s] = x;
    }

    __device__ double *at(int slot, int j) const {
        return M + (((int64_t)first(slot) / 2 * tiles + j) * 32 + lane) * 4;
    }
    __device__ static void load(double (&c)[2][2], const double *from) {
        const double2 x = *(const double2 *)from, y = *(const double2 *)(from + 2);
        c[0][0] = x.x, c[0][1] = x.y, c[1][0] = y.x, c[1][1] = y.y;
    }
    __device__ static void store(double *to, const double (&c)[2][2]) {
        *(double2 *)to = make_double2(c[0][0], c[0][1]);
        *(double2 *)(to + 2) = make_double2(c[1][0], c[1][1]);
    }

    /* H + diag(lam), and the identity from row K on. */
    template <typename T>
    __device__ void begin(const float *H, int64_t pitch, const T *lam, int64_t K) {
        for (int slot = 0; slot < SLOTS && behind(slot, -1); slot++) {
            for (int j = 0; j <= first(slot) + 1; j++) {
                double c[2][2];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const int64_t i = 8 * (first(slot) + n / 2) + row, u = 8 * j + 2 * pair + n % 2;
                    const double ridge = i < K ? (double)mn_float(lam[i]) : 1.0;
                    const double x = i < K && u < K ? (double)H[i * pitch + u] : 0.0;
                    c[n / 2][n % 2] = x + (i == u ? ridge : 0.0);
                }
                store(at(slot, j), c);
            }
        }
    }

    /* Column k of the slot's tiles, and z of tile k, to all. */
    __device__ void show(double (&c)[2][2], mn_mesa_smem &room, float *const (&b)[2], int64_t K,
                         int slot, int k) {
        load(c, at(slot, k));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = first(slot) + i;
            if (j >= k) *(double2 *)&room.tile[k % 2][j][2 * lane] = make_double2(c[i][0], c[i][1]);
        }
        if (!has(slot, k)) return;
        const int64_t i = 8 * k + row;
#pragma unroll
        for (int s = 0; s < SIDES; s++) {
            const double got = mn_mesa_over(of(slot, k, s), 1, 2);
            if (pair == 0) room.z[k % 2][s][row] = (i < K ? (double)b[s][i] : 0.0) + got;
        }
    }

    /* The slot's rows lose what they have of column k, of which -L_ik is left; `less` is
     * -D_k^-1. */
    __device__ void eliminate(const double (&c)[2][2], const double (&less)[2],
                              const double (&z)[SIDES][2], const double (&tile)[32][64], int slot,
                              int k) {
        const double from[4] = { c[0][0], c[1][0], c[0][1], c[1][1] };
        double L[2][2] = {};
        mn_mma_f64_8(L, from, less);
        store(at(slot, k), L);
        const double left[4] = { L[0][0], L[1][0], L[0][1], L[1][1] };
        const int last = first(slot) + 1;
        for (int j0 = k + 1; j0 <= last; j0 += AHEAD) {
            double to[AHEAD][2][2];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) load(to[j], at(slot, min(j0 + j, last)));
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const double2 x = *(const double2 *)&tile[min(j0 + j, last)][2 * lane];
                const double right[2] = { x.x, x.y };
                mn_mma_f64_8(to[j], left, right);
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                if (j0 + j <= last) store(at(slot, j0 + j), to[j]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int s = 0; s < SIDES && first(slot) + i > k; s++) {
                v[slot][i][s] = fma(L[i][0], z[s][0], fma(L[i][1], z[s][1], v[slot][i][s]));
            }
        }
    }

    __device__ void forward(mn_mesa_smem &room, float *const (&b)[2], int64_t K) {
        for (int k = 0; k < tiles; k++) {
            double c[SLOTS][2][2], z[SIDES][2];
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                if (behind(slot, k - 1)) show(c[slot], room, b, K, slot, k);
            }
            __syncthreads();
            const double(&tile)[32][64] = room.tile[k % 2];
            double d[2] = { tile[k][2 * lane], tile[k][2 * lane + 1] };
            mn_mesa_invert(d);
#pragma unroll
            for (int s = 0; s < SIDES; s++) {
                z[s][0] = room.z[k % 2][s][2 * pair], z[s][1] = room.z[k % 2][s][2 * pair + 1];
                const double x = mn_mesa_over(fma(d[0], z[s][0], d[1] * z[s][1]), 1, 2);
#pragma unroll
                for (int slot = 0; slot < SLOTS; slot++) {
                    if (has(slot, k)) put(x, slot, k, s);
                }
            }
            const double less[2] = { -d[0], -d[1] };
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                if (behind(slot, k)) eliminate(c[slot], less, z, tile, slot, k);
            }
        }
    }

    __device__ void back(mn_mesa_smem &room, float *const (&b)[2], int64_t K) {
        for (int k = tiles - 1; k >= 0; k--) {
            double sum[SIDES][2] = {};
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                double L[2][2];
                if (!behind(slot, k)) continue;
                load(L, at(slot, k));
#pragma unroll
                for (int n = 0; n < 2 * SIDES; n++) {
                    const int i = n / SIDES, s = n % SIDES;
                    const double x = first(slot) + i > k ? v[slot][i][s] : 0.0;
                    sum[s][0] = fma(x, L[i][0], sum[s][0]), sum[s][1] = fma(x, L[i][1], sum[s][1]);
                }
            }
#pragma unroll
            for (int n = 0; n < 2 * SIDES; n++) {
                const double x = mn_mesa_over(sum[n / 2][n % 2], 4, 16);
                if (row == 0) room.sum[k % 2][warp][n / 2][2 * pair + n % 2] = x;
            }
            __syncthreads();
#pragma unroll
            for (int n = 0; n < SLOTS * SIDES; n++) {
                const int slot = n / SIDES, s = n % SIDES;
                if (!has(slot, k)) continue;
                double x = of(slot, k, s);
                for (int i = 0; i < WARPS; i++) x += room.sum[k % 2][i][s][row];
                put(x, slot, k, s);
                if (pair == 0 && 8 * k + row < K) b[s][8 * k + row] = (float)x;
            }
        }
    }
};

/* b[0] and b[1], K numbers in shared memory each, become M^-1 b; M = H + diag(lam), of which H is
 * in rows of `pitch`, in mn_mesa_matrix_size(K) doubles. All threads of the block call; barriers on
 * both sides. */
template <typename T>
__device__ void mn_mesa_solve(float *const (&b)[2], const float *H, int64_t pitch, const T *lam,
                              int64_t K, mn_mesa_smem &room, double *M) {
    mn_mesa_wide wide(M, K);
    wide.begin(H, pitch, lam, K);
    wide.forward(room, b, K);
    wide.back(room, b, K);
    __syncthreads();
}

#endif
