/* row_reduce.cuh - rows of V neighbours, each read by a row_group of threads: part of a warp or a
 * warp where rows are short, a block where they are long. For norms and whatever else needs a sum
 * over a row first.
 *
 * Thread `lane` of a row_group owns the packs of N columns that start at (lane + k GROUP) N, for
 * all k. The first VECS of them are kept in registers, as they are stored, between passes over
 * the row; of longer rows the rest is read again, from a cache. Where nothing is summed over rows
 * a row_group has one, and what hides the time that memory takes is that many fit a processor.
 * Else it takes row after row, and the next ones are on their way to shared memory
 * (mn_row_prefetch). */
#ifndef MN_KERNELS_CUDA_PRIM_ROW_REDUCE_CUH
#define MN_KERNELS_CUDA_PRIM_ROW_REDUCE_CUH

#include "kernels/cuda/prim/vec_load.cuh"

namespace mneme {

enum {
    // least rows of a row_group that gathers a part of a sum over rows
    MN_ROW_GROUP_ROWS = 4,
    MN_ROW_GROUP_BLOCKS = 16,       // most blocks of a processor
    MN_ROW_GROUP_SMS = 132,  // of an H200
    MN_ROW_GROUP_SMEM = 128,        // floats of shared memory for sums over a row
};

/* GROUP threads with VECS packs of N numbers of type T each. */
template <typename T_, int N_, int GROUP_, int VECS_>
struct mn_row_group {
    typedef T_ T;
    static constexpr int N = N_, GROUP = GROUP_, VECS = VECS_;
    static constexpr int THREADS = GROUP_ > 32 ? GROUP_ : 128, per_block = THREADS / GROUP_;
    static constexpr int KEPT = GROUP_ * VECS_ * N_;    // columns
    // rows may be, of the largest row_groups
    static constexpr bool LONGER = GROUP_ * VECS_ >= 1024;
    typedef typename mn_vec_bits<T_, N_>::type stored;
    typedef stored kept[VECS_];
    typedef float floats[VECS_][N_];
    int stage = 0;

    /* Blocks of a processor whose threads keep `regs` registers of each pack, besides some 48. */
    static constexpr int blocks_per_sm(int regs) {
        const int threads = 65536 / (48 + regs * VECS_ * N_ * (int)sizeof(T_) / 16);
        const int blocks = threads / THREADS;
        return blocks < 1 ? 1 : blocks > MN_ROW_GROUP_BLOCKS ? MN_ROW_GROUP_BLOCKS : blocks;
    }

    __device__ int64_t first() const {
        return blockIdx.x * (int64_t)per_block + threadIdx.x / GROUP;
    }

    __device__ int64_t step() const {
        return gridDim.x * (int64_t)per_block;
    }

    __device__ int column(int k) const {
        return ((int)threadIdx.x % GROUP + k * GROUP) * N;
    }

    /* Sums over the row_group, in all its threads. Parts of a warp end their loops over rows at
     * different times, so each part names its own threads; a block waits once, since successive
     * calls take turns in `smem`. */
    template <int n>
    __device__ void sum(float (&x)[n], float *smem) {
        const unsigned base = GROUP < 32 ? threadIdx.x % 32 / GROUP * GROUP : 0;
        const unsigned own = (GROUP >= 32 ? 0xffffffffu : (1u << GROUP % 32) - 1) << base;
#pragma unroll
        for (int i = 0; i < n; i++) {
#pragma unroll
            for (int lanes = (GROUP < 32 ? GROUP : 32) / 2; lanes > 0; lanes >>= 1) {
                x[i] += __shfl_xor_sync(own, x[i], lanes);
            }
        }
        if constexpr (GROUP > 32) {
            static_assert(2 * n * (GROUP / 32) <= MN_ROW_GROUP_SMEM, "room for the warps' sums");
            float *at = smem + stage * n * (GROUP / 32);
#pragma unroll
            for (int i = 0; i < n; i++) {
                if (threadIdx.x % 32 == 0) at[i * (GROUP / 32) + threadIdx.x / 32] = x[i];
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < n; i++) {
                x[i] = at[i * (GROUP / 32)];
#pragma unroll
                for (int warp = 1; warp < GROUP / 32; warp++) x[i] += at[i * (GROUP / 32) + warp];
            }
            stage = 1 - stage;
        }
    }

    __device__ float sum(float x, float *smem) {
        float one[1] = { x };
        sum(one, smem);
        return one[0];
    }

    /* Reads the first columns of a row; zeros where x is NULL. */
    __device__ void load_row(kept &out, const T *x, int64_t V) const {
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            if (x && column(k) < (int)V) out[k] = *(const stored *)(x + column(k));
            else out[k] = stored{};
        }
    }

    /* The pack at column i: number k of those kept, or read again for k = -1. */
    __device__ void at(float (&out)[N], const kept &from, const T *x, int64_t i, int k) const {
        if (k < 0) mn_load<N>(out, x, i);
        else mn_unpack_to(out, from[k]);
    }

    /* use(i, k) for each pack of this thread: at column i, kept as number k, or -1. */
    template <typename F>
    __device__ void for_each(int64_t V, F use) const {
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            if (column(k) < (int)V) use(column(k), k);
        }
        for (int i = column(VECS); LONGER && i < (int)V; i += GROUP * N) use(i, -1);
    }

    /* A pack of a row, by one access. */
    __device__ static void store_vec(T *y, int64_t i, const float (&x)[N]) {
        stored vec;
        T *at = (T *)&vec;
#pragma unroll
        for (int j = 0; j < N; j++) mn_put(at + j, x[j]);
        *(stored *)(y + i) = vec;
    }

    /* Adds products to this row_group's part of a sum over rows: in registers for columns kept, in
     * memory that no other thread touches for the others. */
    __device__ void accumulate(floats &sums, float *partial, const float (&a)[N],
                               const float (&b)[N],
                           int64_t i, int k) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (k < 0) partial[i + j] = fmaf(a[j], b[j], partial[i + j]);
            else sums[k][j] = fmaf(a[j], b[j], sums[k][j]);
        }
    }

    /* Before the first row: the part in memory starts at zero. */
    __device__ void zero_partial(float *partial, int64_t V) const {
        for (int64_t i = column(VECS); LONGER && i < V; i += GROUP * N) {
            for (int j = 0; j < N; j++) partial[i + j] = 0.0f;
        }
    }

    /* After the last row, by the whole block: what was gathered in registers, row_groups in their
     * order. Rows of row_groups that share a block are never longer than what is kept. */
    __device__ void store_partial(float *partial, const floats &sums, int64_t V) const {
        if constexpr (per_block == 1) {
#pragma unroll
            for (int k = 0; k < VECS; k++) {
                if (column(k) < (int)V) mn_store<N>(partial, column(k), sums[k]);
            }
        } else {
            __shared__ float all[per_block][KEPT];
#pragma unroll
            for (int k = 0; k < VECS; k++) {
#pragma unroll
                for (int j = 0; j < N; j++) all[threadIdx.x / GROUP][column(k) + j] = sums[k][j];
            }
            __syncthreads();
            for (int64_t i = threadIdx.x; i < V; i += THREADS) {
                float sum = all[0][i];
#pragma unroll
                for (int row_group = 1; row_group < per_block; row_group++) sum +=
                    all[row_group][i];
                partial[i] = sum;
            }
        }
    }
};

/* ---- rows on their way to shared memory ------------------------------------------------------
 *
 * INPUTS rows at a time, DEPTH times over: each thread asks for its own packs and takes no
 * others, so that nobody waits for anybody, and registers hold only what is worked on. */
template <typename RowGroup, int INPUTS>
struct mn_row_prefetch {
    typedef typename RowGroup::T T;
    typedef typename RowGroup::stored stored;
    static constexpr int VECS = RowGroup::VECS;
    static constexpr int ROWS = INPUTS * VECS * RowGroup::THREADS * (int)sizeof(stored);
    static constexpr int DEPTH = ROWS > 8192 ? 2 : 4, BYTES = DEPTH * ROWS;    // of shared memory
    const T *from[INPUTS];    // the thread's first pack of what is asked for next; NULL: zeros
    int64_t stride, rows_left;     // elements from row to row of the row_group, rows to ask for
    bool has[VECS];
    int stage = 0;

    /* `rows` begin at the row_group's first one; it goes on to every step-th, of `width` columns.
     * */
    __device__ mn_row_prefetch(const RowGroup &row_group, const T *const (&rows)[INPUTS], int64_t B,
                              int64_t V, int64_t width)
        : stride(row_group.step() * V), rows_left((B - row_group.first() + row_group.step() - 1)
                                                  / row_group.step()) {
#pragma unroll
        for (int i = 0; i < INPUTS; i++) from[i] = rows[i] ? rows[i] + row_group.column(0)
            : nullptr;
#pragma unroll
        for (int k = 0; k < VECS; k++) has[k] = row_group.column(k) < (int)width;
        for (int ahead = 0; ahead < DEPTH; ahead++) {
#pragma unroll
            for (int i = 0; i < INPUTS; i++) {
#pragma unroll
                for (int k = 0; k < VECS; k++) {
                    if (!from[i]) *place(i, k) = stored{};
                }
            }
            issue();
            stage = (stage + 1) % DEPTH;
        }
    }

    __device__ stored *place(int input, int k) const {
        extern __shared__ uint4 mn_row_prefetch_smem[];
        return (stored *)mn_row_prefetch_smem +
               ((stage * INPUTS + input) * VECS + k) * RowGroup::THREADS + threadIdx.x;
    }

    __device__ static void cp_async(stored *to, const T *from) {
        const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
        if constexpr (sizeof(stored) == 16) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from)
                         : "memory");
        } else if constexpr (sizeof(stored) == 4) {
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from)
                         : "memory");
        } else {
            *to = *(const stored *)from;
        }
    }

    __device__ void issue() {
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
#pragma unroll
            for (int k = 0; k < VECS; k++) {
                if (rows_left > 0 && from[i] && has[k]) {
                    cp_async(place(i, k), from[i] + k * RowGroup::GROUP * RowGroup::N);
                }
            }
            if (from[i]) from[i] += stride;
        }
        rows_left--;
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    /* Takes the next rows, and asks for those that come DEPTH rows later in their place. */
    __device__ void consume(typename RowGroup::kept (&rows)[INPUTS]) {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
#pragma unroll
            for (int k = 0; k < VECS; k++) rows[i][k] = *place(i, k);
        }
        issue();
        stage = stage + 1 == DEPTH ? 0 : stage + 1;
    }
};

/* ---- sums over rows --------------------------------------------------------------------------
 *
 * Rows of `width` columns come in `row_groups` that have sums of their own: block (part, g) gathers
 * part `part` of group g, of gridDim.x parts. */

/* Blocks for `rows` rows, `blocks_per_sm` of them on each processor. */
template <typename RowGroup>
inline unsigned mn_row_group_blocks(int64_t rows, int64_t row_groups, int blocks_per_sm,
                                    int64_t least_rows) {
    const int64_t most = mn_max(MN_ROW_GROUP_SMS * blocks_per_sm / row_groups, 1);
    return mn_blocks(rows, RowGroup::per_block * least_rows, most);
}

/* Work space for as many parts as any row_group leaves. */
inline bool mn_row_reduce_plan(mn_plan *plan, int64_t rows, int64_t width, int64_t row_groups) {
    const int64_t most = mn_max(MN_ROW_GROUP_SMS * MN_ROW_GROUP_BLOCKS / row_groups, 1);
    const int64_t n_partials = mn_max(mn_min(mn_ceil_div(rows, MN_ROW_GROUP_ROWS), most), 1);
    return mn_mul_size(&plan->shared_bytes, (size_t)n_partials, (size_t)(width * row_groups)) &&
           mn_mul_size(&plan->shared_bytes, plan->shared_bytes, sizeof(float));
}

/* ---- choosing a row_group -------------------------------------------------------------------- */

/* Whether packs serve rows of `width` of all these tensors. */
template <typename T, size_t n>
inline bool mn_rows_vec_aligned(const void *const (&tensors)[n], int64_t width) {
    bool all = true;
    for (size_t i = 0; i < n; i++) all = all && mn_vec_aligned<T>(tensors[i], width);
    return all;
}

/* Returns function<mn_row_group<...>> arguments for rows of `width` columns in `call`. */
#define MN_DISPATCH_ROW_GROUP(function, call, width, tensors, arguments)                           \
    do {                                                                                           \
        if ((call).dtype == MN_BF16) {                                                             \
            MN_DISPATCH_ROW_GROUP_OF(mn_bf16, function, width, tensors, arguments);                \
        }                                                                                          \
        MN_DISPATCH_ROW_GROUP_OF(float, function, width, tensors, arguments);                      \
    } while (0)

#define MN_DISPATCH_ROW_GROUP_OF(T, function, width, tensors, arguments)                           \
    do {                                                                                           \
        constexpr int N = mn_vec_width<T>();                                                      \
        if (mn_rows_vec_aligned<T>(tensors, width)) {                                              \
            if ((width) <= 16 * N) return function<mn_row_group<T, N, 8, 2>> arguments;         \
            if ((width) <= 32 * N) return function<mn_row_group<T, N, 16, 2>> arguments;        \
            if ((width) <= 64 * N) return function<mn_row_group<T, N, 16, 4>> arguments;        \
            if ((width) <= 128 * N) return function<mn_row_group<T, N, 32, 4>> arguments;       \
            if ((width) <= 256 * N) return function<mn_row_group<T, N, 128, 2>> arguments;      \
            if ((width) <= 512 * N) return function<mn_row_group<T, N, 256, 2>> arguments;      \
            return function<mn_row_group<T, N, 256, 4>> arguments;                              \
        }                                                                                          \
        if ((width) <= 128) return function<mn_row_group<T, 1, 32, 4>> arguments;               \
        return function<mn_row_group<T, 1, 256, 8>> arguments;                                  \
    } while (0)

}    // namespace mneme

#endif
