/* hyper_rows.cuh - rows of a strip of HyperMLP / HyperGLU: mixes, activation and their way back
 * (equations in ref/hyper.c).
 *
 * A thread has lags and goes over four rows with what the mixing parameters have for a lag, so that
 * these are read once for four rows. Contractions over lags sum 16 ranks of four rows at a
 * time. The parameters lie by lag, in float, ranks padded with zeros to a multiple of 16:
 *
 *   U (lags, ranks)    Vt (lags, ranks), turned    d (lags)
 *
 * A row of a strip keeps two numbers and for each of its mixes h = z U, h c and y c.
 * Norm l2 divides x1 before the activation; relu and everything after it are homogeneous, so it is
 * applied to the output like out_scale. */
#ifndef MN_KERNELS_CUDA_HYPER_HYPER_ROWS_CUH
#define MN_KERNELS_CUDA_HYPER_HYPER_ROWS_CUH

#include "kernels/cuda/attention/attention_strip_mma.cuh"

enum { MN_HYPER_ROWS = 4, MN_HYPER_RANKS = 16, MN_HYPER_LAGS = 2 };
enum {
    MN_HYPER_SUMS = MN_HYPER_ROWS * MN_HYPER_RANKS,
    MN_HYPER_STEP = MN_HYPER_LAGS * MN_COL_TILE_THREADS,
};
enum { MN_HYPER_SCALE, MN_HYPER_NORM, MN_HYPER_FIRST = 4 };    // of a row

/* A call at work. Mixes are counted: the first ones of branches 0 .. Q-1, then H second ones. */
struct mn_hyper {
    mn_hyper_args p;
    mn_strip s;
    int64_t ranks, lags;              // padded ranks; P, or 0 without parameters
    bool mixed[2];                    // first mix, second mix
    float *params;                    // (Q + H, lags (2 ranks + 1))
    float *z[2], *base, *w, *g[2];    // matrices of a strip; base may be z[0], w may be base
    float *rows;                      // (tiles, H, rows, row_floats)
    int64_t row_floats;
    int branches;
};

/* One mix. */
struct mn_hyper_mix {
    const float *U, *Vt, *d;          // by lag; NULL where absent
};

__device__ inline mn_hyper_mix mn_hyper_mix_of(const mn_hyper &k, int64_t mix) {
    mn_hyper_mix m = {};
    if (!k.mixed[mix >= k.p.call.Q]) return m;
    m.U = k.params + mix * k.lags * (2 * k.ranks + 1);
    m.Vt = m.U + k.lags * k.ranks;
    m.d = m.Vt + k.lags * k.ranks;
    return m;
}

/* Index of the mix of branch 0 or 1 of a head; of branch 2 the second. */
__device__ inline int64_t mn_hyper_mix_index(const mn_hyper &k, int64_t head, int branch) {
    return head + (branch == 2 ? k.p.call.Q : branch * k.p.call.H);
}

/* Up to four rows of a block. Rows that see many keys start first. */
struct mn_hyper_four {
    mn_tile_span tile;
    int64_t head, first;              // first row in the tile
    int which;                        // tile of the strip
    int n, seen, most, end;           // rows; keys before the first; of the last; columns that
                                      // products read

    /* Keys that row r sees, 0 where there is no such row. */
    __device__ int keys(int r) const {
        return r < n ? seen + r + 1 : 0;
    }

    __device__ int64_t token(int r) const {
        return tile.span.t0 + tile.first + first + r;
    }
};

__device__ inline bool mn_hyper_find(mn_hyper_four *f, const mn_hyper &k) {
    f->which = (int)k.s.n_tiles - 1 - (int)blockIdx.z;
    f->tile = mn_tile_at(k.s.call, MN_COL_TILE_ROWS, k.s.first + f->which);
    f->head = blockIdx.y, f->first = (int64_t)blockIdx.x * MN_HYPER_ROWS;
    const int64_t seen = mn_keys_before(k.s.call) + f->tile.first;
    f->n = (int)max(min((int64_t)MN_HYPER_ROWS, f->tile.n_rows - f->first), (int64_t)0);
    f->seen = (int)(seen + f->first);
    f->most = f->seen + f->n;
    f->end = (int)((seen + f->tile.n_rows + 63) / 64 * 64);
    return f->n > 0;
}

/* Where the four rows of a matrix have lag 0: row r lies r (row + 1) floats on, lag j before it. */
__device__ inline float *mn_hyper_newest(const mn_hyper &k, float *matrix,
                                         const mn_hyper_four &f) {
    return matrix + mn_strip_at(k.s, f.which, f.head, f.first) + f.seen;
}

/* How far on lag j of row r lies. */
__device__ inline int mn_hyper_on(const mn_hyper &k, int r, int j) {
    return r * ((int)k.s.row + 1) - j;
}

__device__ inline float *mn_hyper_kept(const mn_hyper &k, int64_t tile, int64_t head, int64_t r) {
    return k.rows + ((tile * k.s.heads + head) * k.s.rows + r) * k.row_floats;
}

enum { MN_HYPER_H, MN_HYPER_HC, MN_HYPER_YC };

__device__ inline float *mn_hyper_ranks(const mn_hyper &k, float *kept, int branch, int what) {
    return kept + MN_HYPER_FIRST + (branch * 3 + what) * k.ranks;
}

/* Each exchange of lanes sums pairs and leaves a lane half of its values. */
template <int half>
__device__ inline void mn_hyper_fold(float (&v)[MN_HYPER_SUMS]) {
    const bool upper = threadIdx.x & half / 2;
#pragma unroll
    for (int i = 0; i < half; i++) {
        const float give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
        v[i] = keep + __shfl_xor_sync(0xffffffffu, give, half / 2);
    }
    if constexpr (half > 2) mn_hyper_fold<half / 2>(v);
}

/* Sums `v` over the block into out[0 .. 63]. */
__device__ inline void mn_hyper_reduce(float (&v)[MN_HYPER_SUMS], float *room, float *out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    mn_hyper_fold<MN_HYPER_SUMS / 2>(v);
    __syncthreads();
    room[warp * MN_HYPER_SUMS + 2 * lane] = v[0];
    room[warp * MN_HYPER_SUMS + 2 * lane + 1] = v[1];
    __syncthreads();
    if (threadIdx.x < MN_HYPER_SUMS) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < MN_COL_TILE_THREADS / 32; i++) {
            sum += room[i * MN_HYPER_SUMS + threadIdx.x];
        }
        out[threadIdx.x] = sum;
    }
    __syncthreads();
}

/* What the threads of a block share: ranks of a mix of four rows, sums, room for them. */
struct mn_hyper_smem {
    float sums[MN_HYPER_SUMS], room[MN_COL_TILE_THREADS / 32 * MN_HYPER_SUMS], team[32];
};

/* 16 ranks of a lag */
__device__ inline void mn_hyper_load(float (&x)[MN_HYPER_RANKS], const float *from) {
#pragma unroll
    for (int i = 0; i < MN_HYPER_RANKS; i += 4) {
        const float4 v = *(const float4 *)(from + i);
        x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
}

/* sums over lags of matrix(row, lag) times a parameter by lag; put(r, rank, sum) by one thread
 * each. */
template <typename F>
__device__ inline void mn_hyper_contract(const mn_hyper &k, const mn_hyper_four &f,
                                         mn_hyper_smem &room, float *matrix, const float *by_lag,
                                         F put) {
    const float *newest = mn_hyper_newest(k, matrix, f);
    for (int64_t a0 = 0; a0 < k.ranks; a0 += MN_HYPER_RANKS) {
        float sums[MN_HYPER_SUMS] = {}, next[MN_HYPER_RANKS], z_next[MN_HYPER_ROWS];
        const auto fetch = [&](int j) {
            if (j >= f.most) return;
            mn_hyper_load(next, by_lag + j * k.ranks + a0);
#pragma unroll
            for (int r = 0; r < MN_HYPER_ROWS; r++) {
                z_next[r] = j < f.keys(r) ? newest[mn_hyper_on(k, r, j)] : 0.0f;
            }
        };
        fetch(threadIdx.x);
        for (int j = threadIdx.x; j < f.most; j += MN_COL_TILE_THREADS) {
            float u[MN_HYPER_RANKS], z[MN_HYPER_ROWS];
#pragma unroll
            for (int a = 0; a < MN_HYPER_RANKS; a++) u[a] = next[a];
#pragma unroll
            for (int r = 0; r < MN_HYPER_ROWS; r++) z[r] = z_next[r];
            fetch(j + MN_COL_TILE_THREADS);
#pragma unroll
            for (int r = 0; r < MN_HYPER_ROWS; r++) {
#pragma unroll
                for (int a = 0; a < MN_HYPER_RANKS; a++) {
                    sums[r * MN_HYPER_RANKS + a] = fmaf(z[r], u[a], sums[r * MN_HYPER_RANKS + a]);
                }
            }
        }
        mn_hyper_reduce(sums, room.room, room.sums);
        if (threadIdx.x < MN_HYPER_SUMS && f.keys(threadIdx.x / MN_HYPER_RANKS) > 0) {
            put(threadIdx.x / MN_HYPER_RANKS, a0 + threadIdx.x % MN_HYPER_RANKS,
                room.sums[threadIdx.x]);
        }
        __syncthreads();
    }
}

/* Numbers of a thread: two lags, a block's threads ws, of four rows. */
struct mn_hyper_numbers {
    float at[MN_HYPER_LAGS][MN_HYPER_ROWS];
};

__device__ inline int mn_hyper_lag(int j, int l) {
    return j + l * MN_COL_TILE_THREADS;
}

/* x_r += sum of ranks of row r (in shared memory, `ranks` ws) times a parameter by lag */
__device__ inline void mn_hyper_expand(const mn_hyper &k, const mn_hyper_four &f,
                                       mn_hyper_numbers &x, const float *of_rows,
                                       const float *by_lag, int j) {
    for (int64_t a0 = 0; a0 < k.ranks; a0 += MN_HYPER_RANKS) {
        float v[MN_HYPER_LAGS][MN_HYPER_RANKS] = {};
#pragma unroll
        for (int l = 0; l < MN_HYPER_LAGS; l++) {
            const int lag = mn_hyper_lag(j, l);
            if (lag < f.most) mn_hyper_load(v[l], by_lag + lag * k.ranks + a0);
        }
#pragma unroll
        for (int r = 0; r < MN_HYPER_ROWS; r++) {
#pragma unroll
            for (int a = 0; a < MN_HYPER_RANKS; a += 4) {
                const float4 c = *(const float4 *)(of_rows + r * k.ranks + a0 + a);
#pragma unroll
                for (int l = 0; l < MN_HYPER_LAGS; l++) {
                    float y = x.at[l][r];
                    y = fmaf(c.x, v[l][a], y), y = fmaf(c.y, v[l][a + 1], y);
                    y = fmaf(c.z, v[l][a + 2], y), y = fmaf(c.w, v[l][a + 3], y);
                    x.at[l][r] = y;
                }
            }
        }
    }
}

__device__ inline float mn_hyper_softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

__device__ inline float mn_hyper_sigmoid(float x) {
    const float e = expf(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

/* Controls of a rank, 1 where the mix has none; 0 for padding. */
template <typename T>
__device__ inline float mn_hyper_control(const mn_hyper &k, const mn_hyper_four &f, int branch,
                                         int r, int64_t a) {
    const mn_call &c = k.p.call;
    const bool second = branch == 2;
    if (a >= (second ? c.W : c.R)) return 0.0f;
    const int64_t which = second ? f.head : f.head + branch * c.H;
    const T *row = mn_row<T>(second ? k.p.c2 : k.p.c1, f.tile.span.b, f.token(r), which);
    return row ? mn_float(row[a]) : 1.0f;
}

/* The matrix of `newest` times 1 + d. */
__device__ inline void mn_hyper_scaled(const mn_hyper &k, const mn_hyper_four &f,
                                       mn_hyper_numbers &x, const float *newest, const float *d,
                                       int j) {
#pragma unroll
    for (int l = 0; l < MN_HYPER_LAGS; l++) {
        const int lag = mn_hyper_lag(j, l);
        const float by = d && lag < f.most ? 1.0f + d[lag] : 1.0f;
#pragma unroll
        for (int r = 0; r < MN_HYPER_ROWS; r++) {
            x.at[l][r] = lag < f.keys(r) ? by * newest[mn_hyper_on(k, r, lag)] : 0.0f;
        }
    }
}

/* x of a branch: z (1 + d) + (h c) Vt, z in the matrix of `newest` */
__device__ inline void mn_hyper_mixed(const mn_hyper &k, const mn_hyper_four &f,
                                      mn_hyper_numbers &x, const float *newest,
                                      const mn_hyper_mix &m, const float *hc, int j) {
    mn_hyper_scaled(k, f, x, newest, m.d, j);
    if (m.Vt) mn_hyper_expand(k, f, x, hc, m.Vt, j);
}

/* what(l, r, where it lies) for the thread's numbers that rows see */
template <typename F>
__device__ inline void mn_hyper_each(const mn_hyper &k, const mn_hyper_four &f, int j, F what) {
#pragma unroll
    for (int l = 0; l < MN_HYPER_LAGS; l++) {
        const int lag = mn_hyper_lag(j, l);
#pragma unroll
        for (int r = 0; r < MN_HYPER_ROWS; r++) {
            if (lag < f.keys(r)) what(l, r, mn_hyper_on(k, r, lag));
        }
    }
}

/* h and h c of a mix from its argument, kept and in shared memory. */
template <typename T>
__device__ inline void mn_hyper_enter(const mn_hyper &k, const mn_hyper_four &f,
                                      mn_hyper_smem &room, float *matrix, const mn_hyper_mix &m,
                                      int branch, float *hc) {
    if (!m.U) return;
    mn_hyper_contract(k, f, room, matrix, m.U, [&](int r, int64_t a, float sum) {
        const float by = mn_hyper_control<T>(k, f, branch, r, a) * sum;
        float *kept = mn_hyper_kept(k, f.which, f.head, f.first + r);
        mn_hyper_ranks(k, kept, branch, MN_HYPER_H)[a] = sum;
        mn_hyper_ranks(k, kept, branch, MN_HYPER_HC)[a] = by;
        hc[r * k.ranks + a] = by;
    });
}

/* Zeros where products read beyond a row's keys. */
__device__ inline void mn_hyper_clear(const mn_hyper &k, const mn_hyper_four &f, float *matrix) {
    for (int r = 0; r < f.n; r++) {
        float *line = matrix + mn_strip_at(k.s, f.which, f.head, f.first + r);
        for (int i = f.keys(r) + threadIdx.x; i < f.end; i += MN_COL_TILE_THREADS) line[i] = 0.0f;
    }
}

/* base from z, w from base, and the scale of the output. A block has four rows of a head. */
template <typename T>
__global__ void __launch_bounds__(MN_COL_TILE_THREADS, 2)
mn_hyper_forward_kernel(const __grid_constant__ mn_hyper k) {
    extern __shared__ __align__(16) float shared[];
    __shared__ mn_hyper_smem room;
    mn_hyper_four f;
    if (!mn_hyper_find(&f, k)) return;
    const int64_t each = MN_HYPER_ROWS * k.ranks;
    const mn_hyper_mix first = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, 0));
    const mn_hyper_mix second = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, k.branches - 1));
    const mn_hyper_mix last = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, 2));
    float *hc = shared, square[MN_HYPER_ROWS] = {};
    float *base = mn_hyper_newest(k, k.base, f), *w = mn_hyper_newest(k, k.w, f);
    const float *z1 = mn_hyper_newest(k, k.z[0], f);
    const float *z2 = mn_hyper_newest(k, k.z[k.branches - 1], f);
    for (int i = threadIdx.x; i < 3 * MN_HYPER_ROWS * k.ranks; i += MN_COL_TILE_THREADS) {
        shared[i] = 0.0f;
    }
    __syncthreads();
    mn_hyper_enter<T>(k, f, room, k.z[0], first, 0, hc);
    if (k.branches == 2) mn_hyper_enter<T>(k, f, room, k.z[1], second, 1, hc + each);
    for (int j = threadIdx.x; j < f.most; j += MN_HYPER_STEP) {
        mn_hyper_numbers x, scale;
        mn_hyper_mixed(k, f, x, z1, first, hc, j);
        if (k.branches == 2) mn_hyper_mixed(k, f, scale, z2, second, hc + each, j);
        mn_hyper_each(k, f, j, [&](int l, int r, int at) {
            square[r] = fmaf(x.at[l][r], x.at[l][r], square[r]);
            float y = fmaxf(x.at[l][r], 0.0f);
            if (k.branches == 2) y *= mn_hyper_softplus(scale.at[l][r]);
            base[at] = y;
        });
    }
#pragma unroll
    for (int r = 0; r < MN_HYPER_ROWS; r++) {
        const float norm = sqrtf(mn_group_sum<MN_COL_TILE_THREADS>(square[r], room.team));
        if (threadIdx.x != 0 || f.keys(r) == 0) continue;
        float *kept = mn_hyper_kept(k, f.which, f.head, f.first + r);
        kept[MN_HYPER_NORM] = norm;
        kept[MN_HYPER_SCALE] = k.p.norm == 2 ? 1.0f : 1.0f / fmaxf(norm, (float)k.p.eps);
    }
    __syncthreads();
    mn_hyper_enter<T>(k, f, room, k.base, last, 2, hc + 2 * each);
    for (int j = threadIdx.x; j < f.most; j += MN_HYPER_STEP) {
        mn_hyper_numbers x;
        mn_hyper_mixed(k, f, x, base, last, hc + 2 * each, j);
        mn_hyper_each(k, f, j, [&](int l, int r, int at) { w[at] = x.at[l][r]; });
    }
    if (k.w != k.base) mn_hyper_clear(k, f, k.w);
}

/* y c of a mix from the cotangent of its result, and dc. */
template <typename T>
__device__ inline void mn_hyper_leave(const mn_hyper &k, const mn_hyper_four &f,
                                      mn_hyper_smem &room, float *matrix, const mn_hyper_mix &m,
                                      int branch, float *yc) {
    if (!m.Vt) return;
    const bool second = branch == 2;
    const int64_t n_ranks = second ? k.p.call.W : k.p.call.R;
    mn_hyper_contract(k, f, room, matrix, m.Vt, [&](int r, int64_t a, float sum) {
        const float by = mn_hyper_control<T>(k, f, branch, r, a) * sum;
        float *kept = mn_hyper_kept(k, f.which, f.head, f.first + r);
        mn_hyper_ranks(k, kept, branch, MN_HYPER_YC)[a] = by;
        yc[r * k.ranks + a] = by;
        T *dc = mn_row<T>(second ? k.p.grad.c2 : k.p.grad.c1, f.tile.span.b, f.token(r),
                          second ? f.head : f.head + branch * k.p.call.H);
        const float h = mn_hyper_ranks(k, kept, branch, MN_HYPER_H)[a];
        if (dc && a < n_ranks) mn_put(dc + a, h * sum);
    });
}

/* What of x1 is taken from its cotangent for the norm: x1 itself times sum_j gw_j w_j / n^2, as
 * weights are homogeneous in x1. With w = base (1 + d) + (h c) Vt the sum is that of
 * gw base (1 + d) over lags and of h y c over ranks: made of the numbers that the cotangent is made
 * of, it cancels what it has to cancel, in a row with a single key all. */
__device__ inline void mn_hyper_pulls(const mn_hyper &k, const mn_hyper_four &f,
                                      mn_hyper_smem &room, float (&pull)[MN_HYPER_ROWS],
                                      const float *gw, const float *base, const float *d,
                                      const float *yc) {
    float along[MN_HYPER_ROWS] = {};
    for (int j = threadIdx.x; j < f.most; j += MN_HYPER_STEP) {
        mn_hyper_numbers g;
        mn_hyper_scaled(k, f, g, gw, d, j);
        mn_hyper_each(k, f, j, [&](int l, int r, int at) {
            along[r] = fmaf(g.at[l][r], base[at], along[r]);
        });
    }
#pragma unroll
    for (int r = 0; r < MN_HYPER_ROWS; r++) {
        float *kept = mn_hyper_kept(k, f.which, f.head, f.first + (r < f.n ? r : 0));
        const float *h = mn_hyper_ranks(k, kept, 2, MN_HYPER_H);
        for (int64_t a = threadIdx.x; k.mixed[1] && a < k.ranks; a += MN_COL_TILE_THREADS) {
            along[r] = fmaf(yc[r * k.ranks + a], h[a], along[r]);
        }
        const float by = kept[MN_HYPER_SCALE];
        const bool normed = k.p.norm != 2 && kept[MN_HYPER_NORM] > (float)k.p.eps;
        const float sum = mn_group_sum<MN_COL_TILE_THREADS>(along[r], room.team);
        pull[r] = normed ? sum * by * by : 0.0f;
    }
}

/* From w, the cotangent of the weights, to g, those of x1 and x2. */
template <typename T>
__global__ void __launch_bounds__(MN_COL_TILE_THREADS, 2)
mn_hyper_backward_kernel(const __grid_constant__ mn_hyper k) {
    extern __shared__ __align__(16) float shared[];
    __shared__ mn_hyper_smem room;
    mn_hyper_four f;
    if (!mn_hyper_find(&f, k)) return;
    const int64_t each = MN_HYPER_ROWS * k.ranks;
    const mn_hyper_mix first = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, 0));
    const mn_hyper_mix second = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, k.branches - 1));
    const mn_hyper_mix last = mn_hyper_mix_of(k, mn_hyper_mix_index(k, f.head, 2));
    float *hc = shared, *yc = shared + 2 * each, pull[MN_HYPER_ROWS];
    float *g1 = mn_hyper_newest(k, k.g[0], f), *g2 = mn_hyper_newest(k, k.g[k.branches - 1], f);
    const float *z1 = mn_hyper_newest(k, k.z[0], f);
    const float *z2 = mn_hyper_newest(k, k.z[k.branches - 1], f);
    const float *w = mn_hyper_newest(k, k.w, f);
    for (int e = threadIdx.x; e < 3 * each; e += MN_COL_TILE_THREADS) {
        const int i = (int)(e / each), r = (int)(e % each / k.ranks);
        float x = 0.0f;
        if (r < f.n && k.mixed[0] && i < k.branches) {
            float *kept = mn_hyper_kept(k, f.which, f.head, f.first + r);
            x = mn_hyper_ranks(k, kept, i, MN_HYPER_HC)[e % k.ranks];
        }
        shared[e] = x;
    }
    __syncthreads();
    mn_hyper_leave<T>(k, f, room, k.w, last, 2, yc);
    mn_hyper_pulls(k, f, room, pull, w, mn_hyper_newest(k, k.base, f), last.d, yc);
    for (int j = threadIdx.x; j < f.most; j += MN_HYPER_STEP) {
        mn_hyper_numbers x, scale, g;
        mn_hyper_scaled(k, f, g, w, last.d, j);
        if (last.U) mn_hyper_expand(k, f, g, yc, last.U, j);
        mn_hyper_mixed(k, f, x, z1, first, hc, j);
        if (k.branches == 2) mn_hyper_mixed(k, f, scale, z2, second, hc + each, j);
        mn_hyper_each(k, f, j, [&](int l, int r, int at) {
            const float open = x.at[l][r] > 0.0f ? g.at[l][r] : 0.0f;
            float to_first = open;
            if (k.branches == 2) {
                to_first = open * mn_hyper_softplus(scale.at[l][r]);
                g2[at] = open * x.at[l][r] * mn_hyper_sigmoid(scale.at[l][r]);
            }
            g1[at] = fmaf(-pull[r], x.at[l][r], to_first);
        });
    }
    mn_hyper_clear(k, f, k.g[0]);
    if (k.branches == 2) mn_hyper_clear(k, f, k.g[1]);
    __syncthreads();
    mn_hyper_leave<T>(k, f, room, k.g[0], first, 0, hc);
    if (k.branches == 2) mn_hyper_leave<T>(k, f, room, k.g[1], second, 1, hc + each);
}

#endif
