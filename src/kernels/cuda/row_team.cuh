/* row_team.cuh - rows of V neighbours, each read by a team of threads: part of a warp or a warp
 * where rows are short, a block where they are long. For norms and whatever else needs a sum over a
 * row first.
 *
 * Thread `lane` of a team owns the packs of N columns that start at (lane + k TEAM) N, for all k.
 * The first PACKS of them are kept in registers, as they are stored, between passes over the row;
 * of longer rows the rest is read again, from a cache. What is kept is also what is in flight at
 * once: 16 bytes for each pack and tensor, which is what hides the time that memory takes. */
#ifndef MN_KERNELS_CUDA_ROW_TEAM_CUH
#define MN_KERNELS_CUDA_ROW_TEAM_CUH

#include "kernels/cuda/common.cuh"

enum {
    MN_TEAM_THREADS = 256,    // of a block
    MN_WARP_ROW = 1024,       // longest row of a warp
    MN_TEAM_ROWS = 16,        // least rows of a team that gathers a part of a sum over rows
    MN_TEAM_BLOCKS = 528,     // most blocks that gather: four for each processor of an H200
};

/* TEAM threads with PACKS packs of N numbers of type T each. */
template <typename T_, int N_, int TEAM_, int PACKS_>
struct mn_team {
    typedef T_ T;
    static constexpr int N = N_, TEAM = TEAM_, PACKS = PACKS_, per_block = MN_TEAM_THREADS / TEAM_;
    static constexpr int blocks = N_ * PACKS_ > 16 ? 1 : 2;    // of a processor, in backward
    typedef mn_pack<T_, N_> kept[PACKS_];
    typedef float floats[PACKS_][N_];

    __device__ int64_t first() const {
        return blockIdx.x * (int64_t)per_block + threadIdx.x / TEAM;
    }

    __device__ int64_t step() const {
        return gridDim.x * (int64_t)per_block;
    }

    __device__ int64_t column(int k) const {
        return (threadIdx.x % TEAM + k * (int64_t)TEAM) * N;
    }

    /* The sum over the team, in all its threads. Parts of a warp end their loops over rows at
     * different times, so each part names its own threads. */
    __device__ float sum(float x, float *room) const {
        if constexpr (TEAM > 32) {
            return mn_team_sum<TEAM>(x, room);
        } else {
            const unsigned base = threadIdx.x % 32 / TEAM * TEAM;
            const unsigned own = (TEAM == 32 ? 0xffffffffu : (1u << TEAM % 32) - 1) << base;
#pragma unroll
            for (int lanes = TEAM / 2; lanes > 0; lanes >>= 1) {
                x += __shfl_xor_sync(own, x, lanes);
            }
            return x;
        }
    }

    /* Reads the first columns of a row; zeros where x is NULL. */
    __device__ void keep(kept &out, const T *x, int64_t V) const {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (x && column(k) < V) out[k] = *(const mn_pack<T, N> *)(x + column(k));
            else out[k] = mn_pack<T, N>{};
        }
    }

    /* The pack at column i: number k of those kept, or read again for k = -1. */
    __device__ void at(float (&out)[N], const kept &from, const T *x, int64_t i, int k) const {
        if (k < 0) {
            mn_load<N>(out, x, i);
            return;
        }
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = mn_float(from[k].at[j]);
    }

    /* use(i, k) for each pack of this thread: at column i, kept as number k, or -1. */
    template <typename F>
    __device__ void each(int64_t V, F use) const {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (column(k) < V) use(column(k), k);
        }
        for (int64_t i = column(PACKS); i < V; i += TEAM * N) use(i, -1);
    }

    /* Adds to this team's part of a sum over rows: in registers for columns kept, in memory that no
     * other thread touches for the others. */
    __device__ void gather(floats &sums, float *part, const float (&more)[N], int64_t i,
                           int k) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (k < 0) part[i + j] += more[j];
            else sums[k][j] += more[j];
        }
    }

    /* Before the first row: the part in memory starts at zero. */
    __device__ void begin(float *part, int64_t V) const {
        for (int64_t i = column(PACKS); i < V; i += TEAM * N) {
            for (int j = 0; j < N; j++) part[i + j] = 0.0f;
        }
    }

    /* After the last row: what was gathered in registers. */
    __device__ void leave(float *part, const floats &sums, int64_t V) const {
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (column(k) < V) mn_store<N>(part, column(k), sums[k]);
        }
    }
};

/* ---- sums over rows --------------------------------------------------------------------------
 *
 * Rows of `width` columns come in `groups` that have sums of their own. Part `part` of group g is
 * gathered by team part * groups + g over the rows part, part + n_parts, ... of that group. */

inline int64_t mn_gather_parts(int64_t rows, int64_t width, int64_t groups) {
    const int64_t teams = width <= MN_WARP_ROW ? MN_TEAM_THREADS / 32 : 1;    // of a block
    const int64_t most = MN_TEAM_BLOCKS * teams / groups;
    return mn_max(mn_min(mn_ceil_div(rows, MN_TEAM_ROWS), most), 1);
}

/* Work space for the parts. */
inline bool mn_gather_plan(mn_plan *plan, int64_t rows, int64_t width, int64_t groups) {
    const int64_t n_parts = mn_gather_parts(rows, width, groups);
    return mn_mul_size(&plan->shared_bytes, (size_t)n_parts, (size_t)(width * groups)) &&
           mn_mul_size(&plan->shared_bytes, plan->shared_bytes, sizeof(float));
}

/* ---- choosing a team ------------------------------------------------------------------------- */

/* Whether packs serve rows of `width` of all these tensors. */
template <typename T, size_t n>
inline bool mn_rows_packable(const void *const (&tensors)[n], int64_t width) {
    bool all = true;
    for (size_t i = 0; i < n; i++) all = all && mn_packable<T>(tensors[i], width);
    return all;
}

/* Returns function<mn_team<...>> arguments for rows of `width` columns in `call`. */
#define MN_BY_TEAM(function, call, width, tensors, arguments)                                      \
    do {                                                                                           \
        if ((call).dtype == MN_BF16) MN_BY_TEAM_OF(mn_bf16, function, width, tensors, arguments);  \
        MN_BY_TEAM_OF(float, function, width, tensors, arguments);                                 \
    } while (0)

#define MN_BY_TEAM_OF(T, function, width, tensors, arguments)                                      \
    do {                                                                                           \
        constexpr int N = mn_pack_width<T>();                                                      \
        const bool warps = (width) <= MN_WARP_ROW;                                                 \
        if (mn_rows_packable<T>(tensors, width)) {                                                 \
            if ((width) <= 16 * N) return function<mn_team<T, N, 16, 1>> arguments;                \
            if ((width) <= 64 * N) return function<mn_team<T, N, 32, 2>> arguments;                \
            if (warps) return function<mn_team<T, N, 32, 32 / N>> arguments;                       \
            if ((width) <= 512 * N) return function<mn_team<T, N, MN_TEAM_THREADS, 2>> arguments;  \
            return function<mn_team<T, N, MN_TEAM_THREADS, 4>> arguments;                          \
        }                                                                                          \
        if (warps) return function<mn_team<T, 1, 32, 4>> arguments;                                \
        return function<mn_team<T, 1, MN_TEAM_THREADS, 4>> arguments;                              \
    } while (0)

#endif
