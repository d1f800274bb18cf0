/* delta_intra_chunk.cuh - what keys and decays determine of each chunk, all chunks at once.
 *
 *   A_ts = beta_s e_t.w_s exp(G_t - G_s), s < t     T = (I + A)^-1
 *   P_ts = scale beta_s q_t.w_s exp(G_t - G_s), s <= t
 *
 * T, the UT transform of the chunk (WY form), comes from its diagonal blocks of 16 rows, solved
 * column by column in float32, and by doubling: of two neighbours on the diagonal T_10 =
 * -T_11 A_10 T_00, of 16 rows each, then of 32, products in tf32.
 *
 * One block has one chunk of one head. With a decay that channels share, warps 0 to 3 have 16 rows
 * of A each, warps 4 to 7 of P. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_INTRA_CHUNK_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_INTRA_CHUNK_CUH

#include "kernels/cuda/delta/delta_redo.cuh"
#include "kernels/cuda/prim/mma_tf32.cuh"

namespace mneme::delta {

enum {
    // length of rows of float matrices in shared memory: four rows of eight numbers meet in no bank
    MN_DELTA_LD = MN_DELTA_CHUNK + 8,
    MN_DELTA_INTRA_THREADS = 256,
};

/* Blocks of 16 x 16 of A, and of T: those on the diagonal apart, others where A has no rows. */
struct mn_delta_wy_solver {
    float A[MN_DELTA_CHUNK][MN_DELTA_LD], diagonal[16][MN_DELTA_LD];

    __device__ const float *a(int I, int J) const {
        return &A[16 * I][16 * J];
    }

    __device__ float *t(int I, int J) {
        return I == J ? &diagonal[0][16 * I] : &A[16 * J][16 * I];
    }
};

__device__ inline void mn_delta_store_log_decays(mn_delta_log_decays *to,
                                                 const mn_delta_log_decays &log_decays) {
    const uint4 *from = (const uint4 *)&log_decays;
    for (int k = threadIdx.x; k < (int)(sizeof log_decays / sizeof *from); k += blockDim.x) {
        ((uint4 *)to)[k] = from[k];
    }
}

template <int KP>
struct mn_delta_intra_smem {
    alignas(128) mn_delta_log_decays log_decays;
    union {
        struct {
            alignas(128) unsigned char q[mn_tile_bytes<KP>()], e[mn_tile_bytes<KP>()];
            unsigned char w[mn_tile_bytes<KP>()];
        };
        mn_delta_wy_solver solver;    // once the keys have been read
    };

    /* Bytes of shared memory with w or without: the fewer, the more blocks at once. */
    static size_t bytes(bool with_w) {
        const size_t keys = (with_w ? 3 : 2) * (size_t)mn_tile_bytes<KP>();
        return sizeof(mn_delta_intra_smem) - 3 * (size_t)mn_tile_bytes<KP>() +
               (keys > sizeof(mn_delta_wy_solver) ? keys : sizeof(mn_delta_wy_solver));
    }
};

/* ---- the inverse ----------------------------------------------------------------------------- */

/* Blocks 2 half and 2 half + 1 of the diagonal by a warp: lane j has column j % 16 of one of them,
 * and sums of four rows beside each other. */
__device__ inline void mn_delta_invert_diagonal(mn_delta_wy_solver &smem, int half) {
    const int lane = threadIdx.x % 32, block = 2 * half + lane / 16, j = lane % 16;
    const float *A = smem.a(block, block);
    float *T = smem.t(block, block), x[16];
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = i == j ? 1.0f : 0.0f;
#pragma unroll
    for (int rows = 0; rows < 16; rows += 4) {
#pragma unroll
        for (int m = 0; m <= rows; m += 4) {
            float a[4][4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                *(float4 *)a[r] = *(const float4 *)(A + (rows + r) * MN_DELTA_LD + m);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    if (m + i < rows + r) x[rows + r] = fmaf(-a[r][i], x[m + i], x[rows + r]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) T[i * MN_DELTA_LD + j] = j <= i ? x[i] : 0.0f;
    __syncwarp();
}

/* A block of 16 x 16 in tf32 as an operand: lane (g, t) has of rows g and g + 8, numbers 0 and 1 of
 * a step, columns 2 t, and 2 t + 1 in numbers 2 and 3, of each half of the columns. Sums over
 * columns meet in that order wherever both operands have it; then a right operand is the block
 * transposed. */
struct mn_delta_block {
    unsigned at[2][4];

    __device__ void load_rows(const float *from) {
        from += threadIdx.x % 32 / 4 * MN_DELTA_LD + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 x = *(const float2 *)(from + i % 2 * 8 * MN_DELTA_LD + i / 2 * 8);
            at[i / 2][i % 2] = mn_tf32(x.x), at[i / 2][i % 2 + 2] = mn_tf32(x.y);
        }
    }

    /* The rows are the columns of what is there. Half of the lanes begin with the columns from 8
     * on, where no other lane's banks are. */
    __device__ void load_transposed(const float *from) {
        const bool last = threadIdx.x % 4 >= 2;
        from += threadIdx.x % 4 * 2 * MN_DELTA_LD + threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float *row = from + (i / 4 * 8 + i % 4 / 2) * MN_DELTA_LD;
            const unsigned x = mn_tf32(row[last ? 8 : 0]), y = mn_tf32(row[last ? 0 : 8]);
            at[i / 4][i % 4] = last ? y : x, at[i / 4][i % 4 + 1] = last ? x : y;
        }
    }

    /* What a product left in registers: its rows stay rows. */
    __device__ void take(const float (&sum)[2][4]) {
#pragma unroll
        for (int i = 0; i < 8; i++) at[i / 4][i % 4] = mn_tf32(sum[i / 4][i % 2 * 2 + i % 4 / 2]);
    }
};

/* sum += a b'. */
__device__ inline void mn_delta_block_mma(float (&sum)[2][4], const mn_delta_block &a,
                                          const mn_delta_block &b) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            mn_mma_tf32_k8(sum[n], a.at[k], b.at[k][n], b.at[k][n + 2]);
        }
    }
}

/* sum += T_IM Y for Y', which is what registers have after a product. */
__device__ inline void mn_delta_block_apply(float (&sum)[2][4], mn_delta_wy_solver &smem, int I,
                                            int M, const float (&transposed)[2][4]) {
    mn_delta_block T, Y;
    T.load_rows(smem.t(I, M));
    Y.take(transposed);
    mn_delta_block_mma(sum, T, Y);
}

/* sum += (A_IM T_MJ)'. */
__device__ inline void mn_delta_block_add(float (&sum)[2][4], mn_delta_wy_solver &smem, int I,
                                          int M, int J) {
    mn_delta_block A, T;
    A.load_rows(smem.a(I, M));
    T.load_transposed(smem.t(M, J));
    mn_delta_block_mma(sum, T, A);
}

/* T_IJ = -sum. */
__device__ inline void mn_delta_block_store(float *to, const float (&sum)[2][4]) {
    to += threadIdx.x % 32 / 4 * MN_DELTA_LD + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        *(float2 *)(to + 8 * n) = make_float2(-sum[n][0], -sum[n][1]);
        *(float2 *)(to + 8 * n + 8 * MN_DELTA_LD) = make_float2(-sum[n][2], -sum[n][3]);
    }
}

/* The block below the diagonal in a half of the rows, by one warp: T_10 = -T_11 A_10 T_00. */
__device__ inline void mn_delta_invert_half(mn_delta_wy_solver &smem, int half) {
    const int I = 2 * half + 1, J = 2 * half;
    float Y[2][4] = {}, sum[2][4] = {};
    mn_delta_block_add(Y, smem, I, J, J);
    mn_delta_block_apply(sum, smem, I, I, Y);
    mn_delta_block_store(smem.t(I, J), sum);
}

/* One of the four blocks where the halves meet, by a warp: of halves T_10 = -T_11 A_10 T_00. */
__device__ inline void mn_delta_invert_quarter(mn_delta_wy_solver &smem, int warp) {
    const int I = 2 + warp / 2, J = warp % 2;
    float sum[2][4] = {};
    for (int M = 2; M <= I; M++) {
        float Y[2][4] = {};
        for (int L = J; L < 2; L++) mn_delta_block_add(Y, smem, M, L, J);
        mn_delta_block_apply(sum, smem, I, M, Y);
    }
    mn_delta_block_store(smem.t(I, J), sum);
}

/* T and, unless NULL, A to the workspace, by four warps: a thread has four columns of a row in each
 * quarter of the rows and half of the columns. Eight lanes have four rows of eight columns, which
 * meet in no bank. */
template <bool TILE>
__device__ inline void mn_delta_store_inverse(const mn_delta_wy_solver &smem, mn_bf16 *T,
                                              mn_bf16 *A) {
    const int tid = threadIdx.x, row = tid / 32 * 4 + tid % 8 / 2, in = tid % 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int vec16 = 4 * half + tid % 32 / 8, J = vec16 / 2, column = vec16 % 2 * 8 + in;
        const float *below = &smem.A[16 * J + row][column];
        const float *diagonal = &smem.diagonal[row][16 * J + column];
#pragma unroll
        for (int I = 0; I < 4; I++) {
            const int at = (16 * I + row) * MN_DELTA_CHUNK + 8 * vec16 + in;
            float x[4] = {};
            if (2 * half <= I && J <= I) mn_load<4>(x, J == I ? diagonal : below + 16 * I, 0);
            mn_store<4>(T, TILE ? mn_tile_swizzle(16 * I + row, vec16) / 2 + in : at, x);
            if (!A) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const bool inside = J < I || (J == I && column + j < row);
                x[j] = inside ? smem.A[16 * I + row][16 * J + column + j] : 0.0f;
            }
            mn_store<4>(A, at, x);
        }
    }
}

/* T from A of `smem`, and both to the workspace (64,64); `A` may be NULL. T is stored row by row,
 * or as a swizzled tile. All THREADS of the block call. */
template <int THREADS, bool TILE>
__device__ inline void mn_delta_wy_inverse(mn_delta_wy_solver &smem, mn_bf16 *T, mn_bf16 *A) {
    const int warp = threadIdx.x / 32;
    __syncthreads();
    if (warp < 2) {
        mn_delta_invert_diagonal(smem, warp);
        mn_delta_invert_half(smem, warp);
    }
    __syncthreads();
    if (warp < 4) mn_delta_invert_quarter(smem, warp);
    __syncthreads();
    if (warp < 4) mn_delta_store_inverse<TILE>(smem, T, A);
}

/* ---- decays that channels share -------------------------------------------------------------- */

/* Sums in double: a small decay behind a large one still counts. One warp calls. */
__device__ inline void mn_delta_cumsum_decays(mn_delta_log_decays &log_decays,
                                              const mn_delta_args &p,
                                           const mn_span &span, int64_t h, int64_t t, int count) {
    const int lane = threadIdx.x % 32;
    mn_bf16 g[2] = {}, beta[2] = {};
    double sum[2], before = 0.0;
#pragma unroll
    for (int half = 0; half < 2; half++) {    // all are asked for before one is looked at
        const int64_t when = span.t0 + t + min(32 * half + lane, count - 1);
        if (p.g.data) g[half] = *mn_row<mn_bf16>(p.g, span.b, when, h);
        if (p.beta.data) beta[half] = *mn_row<mn_bf16>(p.beta, span.b, when, h);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = 32 * half + lane;
        const bool inside = token < count;
        sum[half] = inside && p.g.data ? (double)mn_float(g[half]) : 0.0;
        log_decays.beta[token] = !inside ? 0.0f : p.beta.data ? mn_float(beta[half]) : 1.0f;
    }
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const double other = __shfl_up_sync(0xffffffffu, sum[half], step);
            if (lane >= step) sum[half] += other;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] += before;
        before = __shfl_sync(0xffffffffu, sum[half], 31);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = 32 * half + lane;
        log_decays.G[token] = mn_log_sum_of(sum[half]);
        log_decays.gamma[token] = expf((float)sum[half]);
        log_decays.write[token] = log_decays.beta[token] * expf((float)(before - sum[half]));
    }
}

/* Blocks of P above the diagonal are zeros: all threads of the block call. */
template <int THREADS = MN_DELTA_INTRA_THREADS>
__device__ inline void mn_delta_zero_upper(mn_bf16 *P) {
    for (int k = threadIdx.x; k < MN_DELTA_MATRIX / 8; k += THREADS) {
        const float zeros[8] = {};
        if (k % 8 / 2 > k / 8 / 16) mn_store<8>(P, k * 8, zeros);
    }
}

/* Decays of scores in block `block` of 16 rows, a lane's share: since its rows' first token, until
 * there from the tokens `lane` and `lane` + 32 with their beta, and inside of the block. */
struct mn_delta_score_decays {
    float until[2], since[2], inside[2][4];
};

__device__ inline mn_delta_score_decays mn_delta_score_decays_of(
    const mn_delta_log_decays &log_decays, int block) {
    const int lane = threadIdx.x % 32, row = block * 16 + lane / 4, column = lane % 4 * 2;
    const mn_log_sum start = block > 0 ? log_decays.G[block * 16 - 1] : mn_log_sum{};
    mn_delta_score_decays by;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const mn_log_sum G = log_decays.G[row + 8 * half];
        const int s = 32 * half + lane;
        by.since[half] = expf(mn_log_between(G, start));
        // used in front
        by.until[half] = expf(mn_log_between(start, log_decays.G[s])) * log_decays.beta[s];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int other = block * 16 + 8 * (i / 2) + column + i % 2;
            by.inside[i / 2][2 * half + i % 2] = expf(mn_log_between(G, log_decays.G[other]));
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) asm volatile("" : "+f"(by.inside[i / 4][i % 4]));    // all at once
    return by;
}

/* put(t, s, x, y) for pairs of neighbours among a warp's sums, which are scores of 16 rows: with
 * their decays, and zero behind the diagonal, or on it unless it is `inclusive`. In front of the
 * rows' own block a decay is what a write keeps until there, by what a row keeps from there:
 * neither is more than one. */
template <typename F>
__device__ inline void mn_delta_put_scores(const float (&sum)[8][4],
                                           const mn_delta_score_decays &by,
                                           const mn_delta_log_decays &log_decays, int block,
                                           bool inclusive, F put) {
    const int lane = threadIdx.x % 32, row = block * 16 + lane / 4, column = lane % 4 * 2;
    float own[2][4];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        if (n / 2 > block) break;
        if (n / 2 == block) {
#pragma unroll
            for (int i = 0; i < 4; i++) own[n % 2][i] = sum[n][i];
            continue;
        }
        const float x = __shfl_sync(0xffffffffu, by.until[n / 4], n % 4 * 8 + column);
        const float y = __shfl_sync(0xffffffffu, by.until[n / 4], n % 4 * 8 + column + 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            put(row + 8 * half, 8 * n + column, sum[n][2 * half] * x * by.since[half],
                sum[n][2 * half + 1] * y * by.since[half]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int s = block * 16 + 8 * n + column;
        const float beta[2] = { log_decays.beta[s], log_decays.beta[s + 1] };
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = row + 8 * half;
            float x[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool inside = s + i < t || (s + i == t && inclusive);
                const float score = own[n][2 * half + i] * by.inside[n][2 * half + i] * beta[i];
                x[i] = inside ? score : 0.0f;
            }
            put(t, s, x[0], x[1]);
        }
    }
}

template <typename F>
__device__ inline void mn_delta_decay_scores(const float (&sum)[8][4],
                                             const mn_delta_log_decays &log_decays, int block,
                                             bool inclusive, F put) {
    mn_delta_put_scores(sum, mn_delta_score_decays_of(log_decays, block), log_decays, block,
                        inclusive, put);
}

/* Rows of A by warps 0 to 3, of P by warps 4 to 7. */
template <int KP>
__device__ void mn_delta_scores(mn_delta_intra_smem<KP> &smem, unsigned w, mn_bf16 *P,
                                float scale) {
    const int warp = threadIdx.x / 32, block = warp % 4;
    const unsigned left = mn_shared_u32(warp < 4 ? smem.e : smem.q);
    float sum[8][4] = {};
    for (int k = 0; k < KP; k += 16) {
        unsigned a[4], b[4];
        mn_frag_a(a, left, block * 16, k);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n > block) break;
            mn_frag_b(b, w, k, n * 16);
            mn_mma(sum[2 * n], a, b[0], b[1]);
            mn_mma(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
    __syncthreads();
    const auto put = [&](int t, int s, float x, float y) {
        if (warp < 4) *(float2 *)&smem.solver.A[t][s] = make_float2(x, y);
        else *(unsigned *)(P + t * MN_DELTA_CHUNK + s) = mn_bf16x2(scale * x, scale * y);
    };
    mn_delta_decay_scores(sum, smem.log_decays, block, warp >= 4, put);
}

/* Grid: chunk slots * H blocks of 256 threads, block = slot * H + h, or as delta_redo.cuh says.
 * Loads   q, e and, where given, w (64,K) of the key head; g and beta (64) of the head.
 * Stores  T and P (64,64), log_decays and, where wanted, A (64,64) of the workspace at [block]. */
template <int KP>
__global__ void __launch_bounds__(MN_DELTA_INTRA_THREADS, 4)
delta_intra_chunk_kernel(const __grid_constant__ mn_delta_params job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_delta_intra_smem<KP> &smem = *(mn_delta_intra_smem<KP> *)bytes;
    const mn_delta_args &p = job.p;
    const mn_call &call = p.call;
    const mn_delta_chunk_place place = mn_delta_find_chunk<true>(job, MN_DELTA_CHUNK);
    const int64_t h = place.h, index = place.index, key = mn_key_head(call, h);
    const mn_tile_span &tile = place.tile;
    const int count = (int)tile.n_rows, warp = threadIdx.x / 32;
    if (count == 0) return;
    mn_tile_load<KP, MN_DELTA_INTRA_THREADS>(smem.q, p.q, job.packed[MN_DELTA_Q], tile.span, key,
                                          tile.first, count, 0, call.K, threadIdx.x);
    mn_tile_load<KP, MN_DELTA_INTRA_THREADS>(smem.e, p.e, job.packed[MN_DELTA_E], tile.span, key,
                                          tile.first, count, 0, call.K, threadIdx.x);
    if (p.w.data) {
        mn_tile_load<KP, MN_DELTA_INTRA_THREADS>(smem.w, p.w, job.packed[MN_DELTA_W], tile.span,
                                              key, tile.first, count, 0, call.K, threadIdx.x);
    }
    mn_cp_async_commit();
    if (warp == 0) mn_delta_cumsum_decays(smem.log_decays, p, tile.span, h, tile.first, count);
    mn_cp_async_wait<0>();
    __syncthreads();
    mn_delta_zero_upper(job.workspace.P + index * MN_DELTA_MATRIX);
    mn_delta_scores<KP>(smem, mn_shared_u32(p.w.data ? smem.w : smem.e),
                        job.workspace.P + index * MN_DELTA_MATRIX, job.scale);
    mn_delta_wy_inverse<MN_DELTA_INTRA_THREADS, false>(
        smem.solver, job.workspace.T + index * MN_DELTA_MATRIX,
        job.workspace.A ? job.workspace.A + index * MN_DELTA_MATRIX : nullptr);
    mn_delta_store_log_decays(job.workspace.log_decays + index, smem.log_decays);
}

}    // namespace mneme::delta

#endif
