/* row_team.cuh - rows of V neighbours, each read by a team of threads: a warp where rows are short,
 * a block where they are long. For norms and whatever else needs a sum over a row first.
 *
 * Thread `lane` of a team owns the packs of N columns that start at (lane + k TEAM) N, for all k.
 * The first MN_KEPT / N of them are kept in registers between passes over the row; of longer rows
 * the rest is read again, from a cache. Teams take rows in turn. */
#ifndef MN_KERNELS_CUDA_ROW_TEAM_CUH
#define MN_KERNELS_CUDA_ROW_TEAM_CUH

#include "kernels/cuda/common.cuh"

enum {
    MN_TEAM_THREADS = 256,      // of a block
    MN_KEPT = 16,               // columns that a thread keeps
    MN_WARP_ROW = 32 * MN_KEPT, // longest row of a warp
    MN_TEAM_ROWS = 16,          // least rows of a team that gathers a part of a sum over rows
    MN_TEAM_BLOCKS = 528,       // most blocks that gather: four for each processor of an H200
};

/* N = 1 serves rows that are not aligned; there fewer columns are kept, in as many registers. */
template <int N>
constexpr int mn_kept_packs() {
    return N == 1 ? 4 : MN_KEPT / N;
}

template <int N>
using mn_kept = float[mn_kept_packs<N>()][N];

template <int N, int TEAM>
struct mn_team {
    static constexpr int packs = mn_kept_packs<N>();

    __device__ int64_t first() const {
        return blockIdx.x * (int64_t)(MN_TEAM_THREADS / TEAM) + threadIdx.x / TEAM;
    }

    __device__ int64_t step() const {
        return gridDim.x * (int64_t)(MN_TEAM_THREADS / TEAM);
    }

    __device__ int64_t column(int k) const {
        return (threadIdx.x % TEAM + k * (int64_t)TEAM) * N;
    }

    /* Reads the first columns of a row; zeros where x is NULL. */
    template <typename T>
    __device__ void keep(mn_kept<N> &kept, const T *x, int64_t V) const {
#pragma unroll
        for (int k = 0; k < packs; k++) {
            if (column(k) < V) mn_load<N>(kept[k], x, column(k));
        }
    }

    /* The pack at column i once more: number k of those kept, or read again for k = -1. */
    template <typename T>
    __device__ void again(float (&at)[N], const mn_kept<N> &kept, const T *x, int64_t i,
                          int k) const {
        if (k < 0) {
            mn_load<N>(at, x, i);
            return;
        }
#pragma unroll
        for (int j = 0; j < N; j++) at[j] = kept[k][j];
    }

    /* use(i, x[i..i+N)) for each pack of this thread */
    template <typename T, typename F>
    __device__ void each(const mn_kept<N> &kept, const T *x, int64_t V, F use) const {
#pragma unroll
        for (int k = 0; k < packs; k++) {
            if (column(k) < V) use(column(k), kept[k]);
        }
        for (int64_t i = column(packs); i < V; i += TEAM * N) {
            float at[N];
            mn_load<N>(at, x, i);
            use(i, at);
        }
    }

    /* use(i, x[i..i+N), y[i..i+N)) for each pack of this thread */
    template <typename T, typename F>
    __device__ void each(const mn_kept<N> &kept_x, const mn_kept<N> &kept_y, const T *x, const T *y,
                         int64_t V, F use) const {
#pragma unroll
        for (int k = 0; k < packs; k++) {
            if (column(k) < V) use(column(k), kept_x[k], kept_y[k]);
        }
        for (int64_t i = column(packs); i < V; i += TEAM * N) {
            float at_x[N], at_y[N];
            mn_load<N>(at_x, x, i);
            mn_load<N>(at_y, y, i);
            use(i, at_x, at_y);
        }
    }

    /* Adds to this team's part of a sum over rows: sum[k][j] for the columns kept, part[i] in
     * memory for the others, which no other thread touches. value(more, i, k or -1) gives N
     * numbers. */
    template <typename F>
    __device__ void gather(mn_kept<N> &sum, float *part, int64_t V, F value) const {
#pragma unroll
        for (int k = 0; k < packs; k++) {
            if (column(k) >= V) continue;
            float more[N];
            value(more, column(k), k);
#pragma unroll
            for (int j = 0; j < N; j++) sum[k][j] += more[j];
        }
        for (int64_t i = column(packs); i < V; i += TEAM * N) {
            float more[N];
            value(more, i, -1);
#pragma unroll
            for (int j = 0; j < N; j++) part[i + j] += more[j];
        }
    }

    /* Before the first row: the part in memory starts at zero. */
    __device__ void begin(float *part, int64_t V) const {
        for (int64_t i = column(packs); i < V; i += TEAM * N) {
            for (int j = 0; j < N; j++) part[i + j] = 0.0f;
        }
    }

    /* After the last row: what was gathered in registers. */
    __device__ void leave(float *part, const mn_kept<N> &sum, int64_t V) const {
#pragma unroll
        for (int k = 0; k < packs; k++) {
            if (column(k) < V) mn_store<N>(part, column(k), sum[k]);
        }
    }
};

/* ---- sums over rows --------------------------------------------------------------------------
 *
 * Rows of `width` columns come in `groups` that have sums of their own. Part `part` of group g is
 * gathered by team part * groups + g over the rows part, part + n_parts, ... of that group. */

inline int64_t mn_teams_per_block(int64_t width) {
    return width <= MN_WARP_ROW ? MN_TEAM_THREADS / 32 : 1;
}

inline int64_t mn_gather_parts(int64_t rows, int64_t width, int64_t groups) {
    const int64_t most = MN_TEAM_BLOCKS * mn_teams_per_block(width) / groups;
    return mn_max(mn_min(mn_ceil_div(rows, MN_TEAM_ROWS), most), 1);
}

inline unsigned mn_gather_blocks(int64_t rows, int64_t width, int64_t groups) {
    return mn_blocks(mn_gather_parts(rows, width, groups) * groups, mn_teams_per_block(width));
}

/* Work space for the parts. */
inline bool mn_gather_plan(mn_plan *plan, int64_t rows, int64_t width, int64_t groups) {
    const int64_t n_parts = mn_gather_parts(rows, width, groups);
    return mn_mul_size(&plan->shared_bytes, (size_t)n_parts, (size_t)(width * groups)) &&
           mn_mul_size(&plan->shared_bytes, plan->shared_bytes, sizeof(float));
}

/* Whether packs serve rows of `width` of all these tensors. */
template <typename T, size_t n>
inline bool mn_rows_packable(const void *const (&tensors)[n], int64_t width) {
    bool all = true;
    for (size_t i = 0; i < n; i++) all = all && mn_packable<T>(tensors[i], width);
    return all;
}

/* Returns function<T, N, TEAM> arguments for rows of `width` columns in `call`. */
#define MN_BY_TEAM(function, call, width, tensors, arguments)                                      \
    do {                                                                                           \
        if ((call).dtype == MN_BF16) MN_BY_TEAM_OF(mn_bf16, function, width, tensors, arguments);  \
        MN_BY_TEAM_OF(float, function, width, tensors, arguments);                                 \
    } while (0)

#define MN_BY_TEAM_OF(T, function, width, tensors, arguments)                                      \
    do {                                                                                           \
        constexpr int wide = mn_pack_width<T>();                                                   \
        const bool packs = mn_rows_packable<T>(tensors, width), warps = (width) <= MN_WARP_ROW;    \
        if (packs && warps) return function<T, wide, 32> arguments;                                \
        if (packs) return function<T, wide, MN_TEAM_THREADS> arguments;                            \
        if (warps) return function<T, 1, 32> arguments;                                            \
        return function<T, 1, MN_TEAM_THREADS> arguments;                                          \
    } while (0)

#endif
