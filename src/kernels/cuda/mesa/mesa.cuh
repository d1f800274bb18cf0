/* mesa.cuh - the parts of mesa (see ref/mesa.c): work space, pairs of matrices, sums of chunks.
 *
 * A state is the pair (Hkk, Hkv), row by row side by side; so is its adjoint (A, B). Sequences are
 * cut into chunks of 32 tokens: what each chunk adds to the pair, all of them at once; a sum over
 * chunks in their order, which leaves the pair in front of each (behind each, for adjoints); then
 * all chunks at once again. */
#ifndef MN_KERNELS_CUDA_MESA_MESA_CUH
#define MN_KERNELS_CUDA_MESA_MESA_CUH

#include "kernels/cuda/mesa/mesa_solve.cuh"
#include "kernels/cuda/prim/pdl.cuh"

namespace mneme::mesa {

/* M x = b for a symmetric positive definite M and two b, by a block, for keys of more than 128
 * channels: the elimination of mesa_solve.cuh, of which M does not fit a block's registers. It
 * lies in memory, 16 x 8 numbers after the other as the lanes of a warp hold them. A warp has two
 * pairs of rows of tiles and is alone in reading and writing them; column k of tiles, which all
 * need, is shown at one barrier for each k. */

enum { MN_MESA_THREADS = 256, MN_MESA_MAX_K = 256 };

struct mn_mesa_solve_smem {
    double tile[2][MN_MESA_MAX_K / 8][64];    // column k, in turn with the one before
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

struct mn_mesa_block_ldl {
    enum { SLOTS = 2, SIDES = 2, AHEAD = 4, WARPS = MN_MESA_THREADS / 32 };
    double *M;
    int tiles, warp, lane, row, pair;    // row and pair of columns of a tile
    double v[SLOTS][2][SIDES];           // what rows get until their turn, then D^-1 z, then x

    __device__ mn_mesa_block_ldl(double *matrix, int64_t K)
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
    __device__ void show(double (&c)[2][2], mn_mesa_solve_smem &smem, float *const (&b)[2],
                         int64_t K,
                         int slot, int k) {
        load(c, at(slot, k));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = first(slot) + i;
            if (j >= k) *(double2 *)&smem.tile[k % 2][j][2 * lane] = make_double2(c[i][0], c[i][1]);
        }
        if (!has(slot, k)) return;
        const int64_t i = 8 * k + row;
#pragma unroll
        for (int s = 0; s < SIDES; s++) {
            const double got = mn_mesa_lane_sum(of(slot, k, s), 1, 2);
            if (pair == 0) smem.z[k % 2][s][row] = (i < K ? (double)b[s][i] : 0.0) + got;
        }
    }

    /* The slot's rows lose what they have of column k, of which -L_ik is left; `less` is
     * -D_k^-1. */
    __device__ void eliminate(const double (&c)[2][2], const double (&less)[2],
                              const double (&z)[SIDES][2], const double (&tile)[32][64], int slot,
                              int k) {
        const double from[4] = { c[0][0], c[1][0], c[0][1], c[1][1] };
        double L[2][2] = {};
        mn_mma_f64_k8(L, from, less);
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
                mn_mma_f64_k8(to[j], left, right);
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

    __device__ void forward(mn_mesa_solve_smem &smem, float *const (&b)[2], int64_t K) {
        for (int k = 0; k < tiles; k++) {
            double c[SLOTS][2][2], z[SIDES][2];
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                if (behind(slot, k - 1)) show(c[slot], smem, b, K, slot, k);
            }
            __syncthreads();
            const double(&tile)[32][64] = smem.tile[k % 2];
            double d[2] = { tile[k][2 * lane], tile[k][2 * lane + 1] };
            mn_mesa_invert(d);
#pragma unroll
            for (int s = 0; s < SIDES; s++) {
                z[s][0] = smem.z[k % 2][s][2 * pair], z[s][1] = smem.z[k % 2][s][2 * pair + 1];
                const double x = mn_mesa_lane_sum(fma(d[0], z[s][0], d[1] * z[s][1]), 1, 2);
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

    __device__ void back(mn_mesa_solve_smem &smem, float *const (&b)[2], int64_t K) {
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
                const double x = mn_mesa_lane_sum(sum[n / 2][n % 2], 4, 16);
                if (row == 0) smem.sum[k % 2][warp][n / 2][2 * pair + n % 2] = x;
            }
            __syncthreads();
#pragma unroll
            for (int n = 0; n < SLOTS * SIDES; n++) {
                const int slot = n / SIDES, s = n % SIDES;
                if (!has(slot, k)) continue;
                double x = of(slot, k, s);
                for (int i = 0; i < WARPS; i++) x += smem.sum[k % 2][i][s][row];
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
                              int64_t K, mn_mesa_solve_smem &smem, double *M) {
    mn_mesa_block_ldl wide(M, K);
    wide.begin(H, pitch, lam, K);
    wide.forward(smem, b, K);
    wide.back(smem, b, K);
    __syncthreads();
}

enum { MN_MESA_CHUNK = 32, MN_MESA_BLOCKS = 264 };
enum { MN_MESA_REG_MAX_K = 128 };                      // the widest keys whose M is in registers
// tokens of a block, with narrow keys and wide
enum { MN_MESA_TOKENS = 16, MN_MESA_TOKENS_WIDE = 4 };
enum { MN_MESA_ROWS = 8, MN_MESA_SUM_THREADS = 128 };    // rows and threads of a block that sums
enum { MN_MESA_SCAN_THREADS = 128 };                    // threads of one that carries
// chunks of one that does both; most tokens
enum { MN_MESA_SHORT_CHUNKS = 4, MN_MESA_SHORT_TOKENS = 256 };

/* How a pair lies in work space: `rows` rows of `rows` numbers of Hkk and those of Hkv, filled up
 * with zeros so that what reads it whole needs no borders and takes numbers in packs. */
struct mn_mesa_layout {
    int64_t rows, pitch, size;

    __host__ __device__ static mn_mesa_layout of(const mn_call &c) {
        const int64_t K = c.K;
        const int64_t rows = K <= 16 ? 16 : K <= 32 ? 32 : K <= 64 ? 64 : K <= 128 ? 128
                                                                         : (K + 3) / 4 * 4;
        const int64_t pitch = rows + (c.V + 3) / 4 * 4;
        return { rows, pitch, rows * pitch };
    }
};

/* Blocks that read a chunk of a head. */
__host__ __device__ inline int mn_mesa_splits(const mn_call &c) {
    return MN_MESA_CHUNK / (c.K <= MN_MESA_REG_MAX_K ? MN_MESA_TOKENS : MN_MESA_TOKENS_WIDE);
}

/* Counts of floats; of doubles for `matrices`. */
struct mn_mesa_workspace_sizes {
    size_t pairs, decays, last, tokens, lam;
    size_t state_spill, matrices;    // of all blocks, where shared memory is too small
    int64_t slots;
    size_t smem_bytes;         // shared memory of a block
};

struct mn_mesa_workspace {
    double *matrices;
    float *pairs, *decays, *last;    // in front of chunks; (N,H) at the end
    float *adjoints;                // behind chunks
    float *x, *y;                   // (B T, H, K)
    float *lam;                     // (chunks, H, K): parts of its gradient
    float *state_spill;                   // NULL: pairs of blocks are in shared memory
};

/* Short sequences and single tokens, forward, by one kernel (mesa_fwd_single_launch.cu): whether
 * it serves a call here. */
bool mn_mesa_single_launch_supported(const mn_mesa_args *p);
int mn_mesa_single_launch(const mn_mesa_args *p, const mn_mesa_workspace &w, cudaStream_t on);

/* One chunk of one head. */
struct mn_mesa_coord {
    int64_t slot, h, index;    // index: of the pair
    mn_tile_span tile;
};

__device__ inline mn_mesa_coord mn_mesa_coord_of(const mn_call &call, int64_t slot, int64_t h) {
    mn_mesa_coord at;
    at.index = slot * call.H + h, at.slot = slot, at.h = h;
    at.tile = mn_tile_at(call, MN_MESA_CHUNK, at.slot);
    return at;
}

/* A log decay, as sums take it; NaN stays. */
template <typename T>
__device__ inline float mn_mesa_log(const mn_mesa_args &p, int64_t b, int64_t t, int64_t h) {
    const float g = mn_float(*mn_row<T>(p.g, b, t, h));
    return g < -1e5f ? -1e5f : g;
}

/* beta and the log decay of token u, zeros behind the last one. */
template <typename T>
__device__ inline float2 mn_mesa_token(const mn_mesa_args &p, const mn_mesa_coord &at, int u) {
    const int64_t b = at.tile.span.b, t = at.tile.span.t0 + at.tile.first + u;
    if (u >= at.tile.n_rows) return make_float2(0.0f, 0.0f);
    return make_float2(mn_float(*mn_row<T>(p.beta, b, t, at.h)), mn_mesa_log<T>(p, b, t, at.h));
}

/* The sum of log decays from the chunk's front to token u, of which `g` is that of token u, for a
 * warp; the last one's behind it. */
__device__ inline double mn_mesa_log_decay_cumsum(float g, int u) {
    double sum = (double)g;
    for (int lanes = 1; lanes < MN_MESA_CHUNK; lanes *= 2) {
        const double before = __shfl_up_sync(0xffffffffu, sum, lanes);
        if (u >= lanes) sum += before;
    }
    return sum;
}

/* The weight of each token in the sums of its chunk, with the decays to the end or, `backward`,
 * from the front on; and the decay of the whole chunk. Thread u has token u. */
__device__ inline void mn_mesa_token_weights(float *weight, float *decay, float2 token, int u,
                                     bool backward) {
    if (u >= MN_MESA_CHUNK) return;
    const double G = mn_mesa_log_decay_cumsum(token.y, u);
    const double end = __shfl_sync(0xffffffffu, G, MN_MESA_CHUNK - 1);
    weight[u] = backward ? expf((float)G) : token.x * expf((float)(end - G));
    if (u == 0 && decay) *decay = expf((float)end);
}

/* Column j of what the chunk's tokens give the right: keys and values or, BACK, y, with x in
 * right[1], and cotangents. All loads at once; zeros behind the last token. */
template <typename T, bool BACK>
__device__ __forceinline__ void mn_mesa_column(float (&right)[BACK ? 2 : 1][MN_MESA_CHUNK],
                                               const mn_mesa_args &p, const mn_mesa_workspace &w,
                                               const mn_mesa_coord &at, int64_t j) {
    const int64_t K = p.call.K, rows = mn_mesa_layout::of(p.call).rows, b = at.tile.span.b;
    const int64_t t0 = at.tile.span.t0 + at.tile.first;
    const int count = (int)at.tile.n_rows;
    if (BACK && j < K) {
        const int64_t stride = p.call.H * K, from = ((b * p.call.T + t0) * p.call.H + at.h) * K + j;
#pragma unroll
        for (int u = 0; u < MN_MESA_CHUNK; u++) {
            right[0][u] = u < count ? w.y[from + u * stride] : 0.0f;
            right[BACK][u] = u < count ? w.x[from + u * stride] : 0.0f;
        }
        return;
    }
    const mn_in &view = j < rows ? p.k : BACK ? p.cot.o : p.v;
    const bool real = view.data && (j < rows ? j < K && !BACK : j < rows + p.call.V);
    const T *from = mn_row<T>(view, b, t0, at.h) + (j < rows ? j : j - rows);
    const int64_t stride = view.stride[1];
#pragma unroll
    for (int u = 0; u < MN_MESA_CHUNK; u++, from += stride) {
        right[0][u] = u < count && real ? mn_float(*from) : 0.0f;
        right[BACK][u] = BACK ? 0.0f : right[0][u];
    }
}

/* Rows row0, row0 + 1, ... of what the tokens give the left: keys or, BACK, x and y. By
 * MN_MESA_SUM_THREADS threads. */
template <typename T, bool BACK>
__device__ inline void mn_mesa_load_left(float (&left)[BACK ? 2 : 1][MN_MESA_CHUNK][MN_MESA_ROWS],
                                          const mn_mesa_args &p, const mn_mesa_workspace &w,
                                          const mn_mesa_coord &at, int64_t row0) {
    const int64_t K = p.call.K, b = at.tile.span.b, t0 = at.tile.span.t0 + at.tile.first;
#pragma unroll
    for (int n = 0; n < MN_MESA_CHUNK * MN_MESA_ROWS / MN_MESA_SUM_THREADS; n++) {
        const int i = threadIdx.x % MN_MESA_SUM_THREADS + n * MN_MESA_SUM_THREADS;
        const int u = i / MN_MESA_ROWS, row = i % MN_MESA_ROWS;
        const int64_t channel = row0 + row, token = ((b * p.call.T + t0 + u) * p.call.H + at.h) * K;
        const bool valid = channel < K && u < at.tile.n_rows;
        if (BACK) left[BACK][u][row] = valid ? w.y[token + channel] : 0.0f;
        left[0][u][row] = !valid ? 0.0f : BACK ? w.x[token + channel]
                          : mn_float(mn_row<T>(p.k, b, t0 + u, at.h)[channel]);
    }
}

/* What all tokens give one column of the rows. A pair's first matrix is symmetric to the last bit:
 * the two keys meet before the weight. `both`: the column has x and y. */
template <bool BACK>
__device__ inline void mn_mesa_add_tokens(
    float (&sum)[MN_MESA_ROWS], const float (&left)[BACK ? 2 : 1][MN_MESA_CHUNK][MN_MESA_ROWS],
    const float (&right)[BACK ? 2 : 1][MN_MESA_CHUNK], const float *weight, bool both) {
#pragma unroll
    for (int u = 0; u < MN_MESA_CHUNK; u++) {
        float x[BACK ? 2 : 1][MN_MESA_ROWS];
        const float by = BACK && both ? -0.5f * weight[u] : weight[u];
#pragma unroll
        for (int r = 0; r < MN_MESA_ROWS; r += 4) {
            *(float4 *)&x[0][r] = *(const float4 *)&left[0][u][r];
            if (BACK) *(float4 *)&x[BACK][r] = *(const float4 *)&left[BACK][u][r];
        }
#pragma unroll
        for (int r = 0; r < MN_MESA_ROWS; r++) {
            float product = x[0][r] * right[0][u];
            if (BACK && both) product += x[BACK][r] * right[BACK][u];
            sum[r] = fmaf(by, product, sum[r]);
        }
    }
}

/* What a chunk adds to its pair at its end or, BACK, to the adjoint at its front, where the decay
 * of its first token counts, too. A block has a few rows (blockIdx.y) of a chunk (.x) of a head
 * (.z), a thread columns of them. */
template <typename T, bool BACK>
__global__ void __launch_bounds__(MN_MESA_SUM_THREADS)
mesa_chunk_sums_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_workspace w) {
    __shared__ float weight[MN_MESA_CHUNK];
    __shared__ alignas(16) float left[BACK ? 2 : 1][MN_MESA_CHUNK][MN_MESA_ROWS];
    const mn_mesa_coord at = mn_mesa_coord_of(p.call, blockIdx.x, blockIdx.z);
    const int64_t row0 = blockIdx.y * MN_MESA_ROWS;
    const mn_mesa_layout layout = mn_mesa_layout::of(p.call);
    mn_pdl_launch_dependents();
    if (at.tile.n_rows == 0) return;
    const float2 token = mn_mesa_token<T>(p, at, threadIdx.x);    // first, as all wait for it
    float right[BACK ? 2 : 1][MN_MESA_CHUNK];
    mn_mesa_column<T, BACK>(right, p, w, at, min((int64_t)threadIdx.x, layout.pitch - 1));
    mn_mesa_token_weights(weight, blockIdx.y == 0 ? &w.decays[at.index] : NULL, token,
                          threadIdx.x, BACK);
    mn_mesa_load_left<T, BACK>(left, p, w, at, row0);
    __syncthreads();
    float *to = (BACK ? w.adjoints : w.pairs) + at.index * layout.size + row0 * layout.pitch;
    for (int64_t j0 = 0; j0 < layout.pitch; j0 += MN_MESA_SUM_THREADS) {
        const int64_t j = min(j0 + threadIdx.x, layout.pitch - 1);
        float sum[MN_MESA_ROWS] = {};
        if (j0 > 0) mn_mesa_column<T, BACK>(right, p, w, at, j);
        mn_mesa_add_tokens<BACK>(sum, left, right, weight, j < p.call.K);
#pragma unroll
        for (int r = 0; r < MN_MESA_ROWS; r++) {
            if (row0 + r < layout.rows) to[r * layout.pitch + j] = sum[r];
        }
    }
}

/* Where number `cell` of a pair is in its matrices: row i and column j of the first, or column v of
 * the second; or neither. */
struct mn_mesa_cell {
    int64_t i, j, v;
    bool in_kk, in_kv;
};

__device__ inline mn_mesa_cell mn_mesa_cell_at(const mn_call &c, int64_t cell) {
    const mn_mesa_layout layout = mn_mesa_layout::of(c);
    const int64_t i = (int)cell / (int)layout.pitch, j = (int)cell % (int)layout.pitch;
    const int64_t v = j - layout.rows;
    return { i, j, v, i < c.K && j < c.K, i < c.K && v >= 0 && v < c.V };
}

/* Its number in a given pair: of the symmetric part of the first matrix, and of the second. */
__device__ inline float mn_mesa_load_state(const float *kk, const float *kv, int64_t head,
                                      const mn_mesa_cell &at, int64_t K, int64_t V) {
    if (at.in_kv) return mn_get(kv, (head * K + at.i) * V + at.v);
    if (!at.in_kk) return 0.0f;
    return 0.5f * (mn_get(kk, (head * K + at.i) * K + at.j) +
                   mn_get(kk, (head * K + at.j) * K + at.i));
}

__device__ inline void mn_mesa_store_state(float *kk, float *kv, int64_t head,
                                           const mn_mesa_cell &at,
                                   int64_t K, int64_t V, float x) {
    if (at.in_kk && kk) kk[(head * K + at.i) * K + at.j] = x;
    if (at.in_kv && kv) kv[(head * K + at.i) * V + at.v] = x;
}

/* The number of the first chunk of sequence n. */
__device__ inline int64_t mn_mesa_slot(const mn_call &c, const mn_span &span, int64_t n) {
    return c.cu_seqlens ? span.t0 / MN_MESA_CHUNK + n
                        : n * ((c.T + MN_MESA_CHUNK - 1) / MN_MESA_CHUNK);
}

/* Smem of AT_ONCE groups of threads that sum chunks and go over them. */
template <int GROUPS>
struct mn_mesa_short_smem {
    float weight[GROUPS][MN_MESA_CHUNK], decay[GROUPS];
    alignas(16) float left[GROUPS][1][MN_MESA_CHUNK][MN_MESA_ROWS];
    float sums[GROUPS][MN_MESA_ROWS][MN_MESA_SUM_THREADS];
};

/* A few rows, from row0 on, of head h of sequence n: the pairs in front of its chunks and behind
 * the last one. Each group of threads sums a chunk; then each thread goes over chunks for a few
 * numbers. All threads call; barriers at both ends. */
template <typename T, int GROUPS>
__device__ inline void mn_mesa_scan_rows(mn_mesa_short_smem<GROUPS> &smem,
                                          const mn_mesa_args &p, const mn_mesa_workspace &w,
                                              int64_t n,
                                          int64_t h, int64_t row0) {
    constexpr int each = MN_MESA_ROWS / GROUPS;
    const int group = threadIdx.x / MN_MESA_SUM_THREADS, thread = threadIdx.x % MN_MESA_SUM_THREADS;
    const int64_t head = n * p.call.H + h;
    const mn_mesa_layout layout = mn_mesa_layout::of(p.call);
    const mn_span span = mn_span_at(p.call, n);
    const int64_t chunks = (span.length + MN_MESA_CHUNK - 1) / MN_MESA_CHUNK;
    const int64_t slot0 = mn_mesa_slot(p.call, span, n);
    const float *kk = (const float *)p.hkk0.data, *kv = (const float *)p.hkv0.data;
    for (int64_t j0 = 0; j0 < layout.pitch; j0 += MN_MESA_SUM_THREADS) {
        const int64_t j = j0 + thread;    // also of this thread's numbers, in rows group, + AT_ONCE
        float x[each] = {};
        for (int i = 0; i < each && (kk || kv) && j < layout.pitch; i++) {
            const int64_t row = row0 + group + i * GROUPS;
            x[i] = mn_mesa_load_state(kk, kv, head, mn_mesa_cell_at(p.call, row * layout.pitch + j),
                                 p.call.K, p.call.V);
        }
        for (int64_t c0 = 0; c0 < chunks; c0 += GROUPS) {
            const int64_t chunk = min(c0 + group, chunks - 1);
            const mn_mesa_coord at = mn_mesa_coord_of(p.call, slot0 + chunk, h);
            const float2 token = mn_mesa_token<T>(p, at, thread);
            float right[1][MN_MESA_CHUNK], sum[MN_MESA_ROWS] = {};
            mn_mesa_column<T, false>(right, p, w, at, min(j, layout.pitch - 1));
            mn_mesa_token_weights(smem.weight[group], &smem.decay[group], token, thread, false);
            mn_mesa_load_left<T, false>(smem.left[group], p, w, at, row0);
            __syncthreads();
            mn_mesa_add_tokens<false>(sum, smem.left[group], right, smem.weight[group], false);
#pragma unroll
            for (int r = 0; r < MN_MESA_ROWS; r++) smem.sums[group][r][thread] = sum[r];
            __syncthreads();
            for (int c = 0; c < GROUPS && c0 + c < chunks; c++) {
                float *to = w.pairs + ((slot0 + c0 + c) * p.call.H + h) * layout.size + j;
#pragma unroll
                for (int i = 0; i < each; i++) {
                    const int row = group + i * GROUPS;
                    if (j < layout.pitch) to[(row0 + row) * layout.pitch] = x[i];
                    x[i] = fmaf(smem.decay[c], x[i], smem.sums[c][row][thread]);
                }
            }
            __syncthreads();
        }
        for (int i = 0; i < each && j < layout.pitch; i++) {
            const int64_t row = row0 + group + i * GROUPS;
            w.last[head * layout.size + row * layout.pitch + j] = x[i];
        }
    }
}

/* Sums of chunks and over them in one, forward, where sequences are short. A block has a few rows
 * (blockIdx.y) of a head (.z) of a sequence (.x). */
template <typename T>
__global__ void __launch_bounds__(MN_MESA_SHORT_CHUNKS * MN_MESA_SUM_THREADS)
mesa_chunk_scan_short_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_workspace w) {
    __shared__ mn_mesa_short_smem<MN_MESA_SHORT_CHUNKS> smem;
    mn_pdl_launch_dependents();
    mn_mesa_scan_rows<T>(smem, p, w, blockIdx.x, blockIdx.z, blockIdx.y * MN_MESA_ROWS);
}

enum { MN_MESA_PREFETCH = 8, MN_MESA_VEC = 4 };

/* Sums over the chunks of a sequence, in place: afterwards a pair is the one in front of its chunk
 * or, backward, behind it. A thread has a pack of the pair, and loads several ahead of the sum. */
static __global__ void __launch_bounds__(MN_MESA_SCAN_THREADS)
mesa_chunk_scan_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_workspace w, bool backward) {
    const int64_t K = p.call.K, V = p.call.V, size = mn_mesa_layout::of(p.call).size, H = p.call.H;
    const int64_t cell = MN_MESA_VEC * (blockIdx.x * (int64_t)MN_MESA_SCAN_THREADS + threadIdx.x);
    const int64_t n = blockIdx.y / H, h = blockIdx.y % H, head = blockIdx.y;
    const mn_span span = mn_span_at(p.call, n);
    const int64_t chunks = (span.length + MN_MESA_CHUNK - 1) / MN_MESA_CHUNK;
    const int64_t slot0 = mn_mesa_slot(p.call, span, n);
    const float *kk = (const float *)(backward ? p.cot.hkk.data : p.hkk0.data);
    const float *kv = (const float *)(backward ? p.cot.hkv.data : p.hkv0.data);
    float x[MN_MESA_VEC] = {};
    for (int e = 0; e < MN_MESA_VEC && (kk || kv) && cell < size; e++) {
        x[e] = mn_mesa_load_state(kk, kv, head, mn_mesa_cell_at(p.call, cell + e), K, V);
    }
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    if (cell >= size) return;
    float *const cells = (backward ? w.adjoints : w.pairs) + cell;
    for (int64_t i0 = 0; i0 < chunks; i0 += MN_MESA_PREFETCH) {
        int64_t index[MN_MESA_PREFETCH];
        float added[MN_MESA_PREFETCH][MN_MESA_VEC], decay[MN_MESA_PREFETCH];
#pragma unroll
        for (int i = 0; i < MN_MESA_PREFETCH; i++) {
            const int64_t chunk = min(i0 + i, chunks - 1);
            index[i] = (slot0 + (backward ? chunks - 1 - chunk : chunk)) * H + h;
            mn_load<MN_MESA_VEC>(added[i], cells, index[i] * size), decay[i] = w.decays[index[i]];
        }
#pragma unroll
        for (int i = 0; i < MN_MESA_PREFETCH; i++) {
            if (i0 + i >= chunks) break;
            mn_store<MN_MESA_VEC>(cells, index[i] * size, x);
#pragma unroll
            for (int e = 0; e < MN_MESA_VEC; e++) x[e] = fmaf(decay[i], x[e], added[i][e]);
        }
    }
    if (!backward) mn_store<MN_MESA_VEC>(w.last, head * size + cell, x);
    for (int e = 0; e < MN_MESA_VEC && backward; e++) {
        mn_mesa_store_state((float *)p.grad.hkk0.data, (float *)p.grad.hkv0.data, head,
                    mn_mesa_cell_at(p.call, cell + e), K, V, x[e]);
    }
}

/* The pairs at the end; in a kernel of its own, as they may lie where the first ones did. */
static __global__ void __launch_bounds__(MN_MESA_THREADS)
mesa_store_state_kernel(const __grid_constant__ mn_mesa_args p, const float *last) {
    const int64_t size = mn_mesa_layout::of(p.call).size, head = blockIdx.y;
    const int64_t cell = blockIdx.x * (int64_t)MN_MESA_THREADS + threadIdx.x;
    if (cell >= size) return;
    mn_mesa_store_state((float *)p.hkk.data, (float *)p.hkv.data, head,
                        mn_mesa_cell_at(p.call, cell),
                p.call.K, p.call.V, last[head * size + cell]);
}

/* out[j] = sum over rows i < K of x_i P_ij, for `width` columns of rows of `pitch`. All threads
 * call; `smem` has as many numbers as threads. Barriers on both sides. */
__device__ inline void mn_mesa_vec_mat(float *out, const float *P, int64_t pitch, int64_t width,
                                       const float *x, int64_t K, float *smem) {
    const int lanes = (int)min((width + 31) / 32 * 32, (int64_t)MN_MESA_THREADS);
    const int row_groups = MN_MESA_THREADS / lanes, row_group = threadIdx.x / lanes;
    for (int64_t j0 = 0; j0 < width; j0 += lanes) {
        const int64_t j = j0 + threadIdx.x % lanes;
        float sum = 0.0f;
        for (int64_t i = row_group; i < K && j < width && row_group < row_groups; i += row_groups) {
            sum = fmaf(x[i], P[i * pitch + j], sum);
        }
        smem[threadIdx.x] = sum;
        __syncthreads();
        if (row_group == 0 && j < width) {
            for (int other = 1; other < row_groups; other++) sum +=
                smem[other * lanes + threadIdx.x];
            out[j] = sum;
        }
        __syncthreads();
    }
}

/* out[i] = sum over columns j < width of P_ij x_j, for K rows; a warp has a row at a time. A
 * barrier follows. */
__device__ inline void mn_mesa_mat_vec(float *out, const float *P, int64_t pitch, int64_t width,
                                    const float *x, int64_t K) {
    for (int64_t i = threadIdx.x / 32; i < K; i += MN_MESA_THREADS / 32) {
        float sum = 0.0f;
        for (int64_t j = threadIdx.x % 32; j < width; j += 32) {
            sum = fmaf(P[i * pitch + j], x[j], sum);
        }
        sum = mn_warp_sum(sum);
        if (threadIdx.x % 32 == 0) out[i] = sum;
    }
    __syncthreads();
}

}    // namespace mneme::mesa

#endif
