/* cell_state.cuh - recurrences in which every memory cell goes its own way: what moebius.cu and
 * importance.cu share.
 *
 * Cells lie in slots (axis K) and columns (axis V). A thread keeps 4 slots of C columns in
 * registers and scans through time by tiles of 16 tokens, whose numbers wait in shared memory. The
 * lanes of a warp are 4 along the slots and 8 along the columns, so that a warp has 16 slots of 8 C
 * columns; GROUPS of the block's warps lie along the slots, the others along the columns.
 *
 * Sums over columns or slots go from lane to lane by halves: of n numbers a lane gives away n / 2
 * and keeps n / 2. So that it always gives the same registers, lanes call their slots and columns
 * by different names: number j of a thread is slot 4 s + (j ^ c % 4), number i is column C c + (i ^
 * s % C), with s and c the lane's place. Keys lie in shared memory in the four orders that this
 * asks for. */
#ifndef MN_KERNELS_CUDA_RECURRENT_CELL_STATE_CUH
#define MN_KERNELS_CUDA_RECURRENT_CELL_STATE_CUH

#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/split_reduce.cuh"

namespace mneme::recurrent {

enum {
    MN_CELL_SLOTS = 4,                         // of a thread
    MN_CELL_GROUP = 16,                        // slots of a warp
    MN_CELL_LANES = 8,                         // of a warp along the columns
    MN_CELL_TOKENS = 16,                       // of a tile
    MN_CELL_PITCH = MN_CELL_TOKENS + 4,        // rows 16 bytes aligned, in different banks
};

/* ---- positions ------------------------------------------------------------------------------- */

template <int GROUPS_, int WARPS_, int C_>
struct mn_cell_block {
    static constexpr int GROUPS = GROUPS_, C = C_, THREADS = 32 * WARPS_;
    static constexpr int SLOTS = MN_CELL_GROUP * GROUPS;
    static constexpr int COLUMNS = WARPS_ / GROUPS * MN_CELL_LANES * C;

    __device__ static int slot_lane() {
        return threadIdx.x % 4;
    }

    __device__ static int column_lane() {
        return threadIdx.x / 4 % MN_CELL_LANES;
    }

    __device__ static int group() {
        return threadIdx.x / 32 % GROUPS;
    }

    /* Slot j and column i of this thread, counted from the block's first. */
    __device__ static int slot(int j) {
        return group() * MN_CELL_GROUP + 4 * slot_lane() + (j ^ column_lane() % 4);
    }

    __device__ static int column(int i) {
        const int lane = threadIdx.x / 32 / GROUPS * MN_CELL_LANES + column_lane();
        return lane * C + (i ^ slot_lane() % C);
    }

    /* The block's first slot and column. */
    __device__ static int64_t slot0() {
        return blockIdx.z * (int64_t)SLOTS;
    }

    __device__ static int64_t column0() {
        return blockIdx.x * (int64_t)COLUMNS;
    }

    /* Where the numbers of this thread begin among four per thread of all blocks, set after set. */
    __device__ static int64_t own(int64_t set) {
        const int64_t blocks = gridDim.x * (int64_t)gridDim.z;
        const int64_t block = blockIdx.z * (int64_t)gridDim.x + blockIdx.x;
        return ((set * blocks + block) * THREADS + threadIdx.x) * 4;
    }
};

/* Tokens [first, first + MN_CELL_TOKENS) of a sequence, or those of them that there are. */
struct mn_cell_tile {
    mn_span span;
    int64_t first;
    int n_rows;

    /* Number of its token t among all tokens. */
    __device__ int64_t row(const mn_call &call, int t) const {
        return span.b * call.T + span.t0 + first + t;
    }
};

__device__ inline mn_cell_tile mn_cell_tile_at(const mn_span &span, int64_t index) {
    const int64_t first = index * MN_CELL_TOKENS;
    return { span, first, (int)min((int64_t)MN_CELL_TOKENS, span.length - first) };
}

__device__ inline int64_t mn_cell_tiles(int64_t n_tokens) {
    return (n_tokens + MN_CELL_TOKENS - 1) / MN_CELL_TOKENS;
}

/* Where the tiles of `rows` tokens of sequence n begin among those of all, as mn_tile_slots counts
 * them. */
__device__ inline int64_t mn_cell_first_slot(const mn_call &call, int64_t n, int64_t rows) {
    if (call.cu_seqlens) return call.cu_seqlens[n] / rows + n;
    return n * ((call.T + rows - 1) / rows);
}

/* Tokens of all sequences. */
inline int64_t mn_cell_rows_of(const mn_call *call) {
    return call->cu_seqlens ? call->T : call->B * call->T;
}

/* ---- numbers of a tile ----------------------------------------------------------------------- */

/* How the THREADS of a block share out WIDTH numbers of each token of a tile: a thread has EACH
 * neighbours of one token. */
template <int WIDTH, int THREADS>
struct mn_cell_thread_map {
    static constexpr int EACH = WIDTH * MN_CELL_TOKENS / THREADS, ACROSS = WIDTH / EACH;

    __device__ static int place() {
        return threadIdx.x % ACROSS * EACH;
    }

    __device__ static int row() {
        return threadIdx.x / ACROSS;
    }
};

/* `n` neighbours, as one pack where all of them are inside and `at` is aligned for it. */
template <typename T, int n>
__device__ __forceinline__ bool mn_cell_vec_aligned(const T *at, int64_t inside) {
    return inside >= n && (uintptr_t)at % alignof(mn_vec<T, n>) == 0;
}

template <typename T, int n>
__device__ __forceinline__ void mn_cell_store(T *to, int64_t inside, const float (&x)[n]) {
    if (mn_cell_vec_aligned<T, n>(to, inside)) {
        mn_store<n>(to, 0, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < n; i++) {
        if (i < inside) mn_put(to + i, x[i]);
    }
}

/* WIDTH numbers of each token on their way to shared memory. */
template <typename T, int WIDTH, int THREADS>
struct mn_cell_prefetch {
    typedef mn_cell_thread_map<WIDTH, THREADS> share;
    mn_vec<T, share::EACH> x;
    const T *from;    // this thread's first number in the sequence
    int inside;       // how many there are from it on; EACH + 1: EACH, as one pack

    /* Numbers base, base + 1, ... of head h of a sequence, of which the tensor has `count`. */
    __device__ void open(const mn_in &view, const mn_span &span, int64_t h, int64_t base,
                         int64_t count) {
        const int64_t i = base + share::place();
        inside = view.data ? (int)max(min(count - i, (int64_t)share::EACH), (int64_t)0) : 0;
        from = (const T *)view.data + span.b * view.stride[0] +
               (span.t0 + share::row()) * view.stride[1] + h * view.stride[2] + i;
        const int64_t row_stride = view.stride[1] * (int64_t)sizeof(T);
        const bool vec_aligned = ((uintptr_t)from | row_stride) % alignof(mn_vec<T,
                                                                          share::EACH>) == 0;
        if (inside == share::EACH && vec_aligned) inside++;
    }

    /* Those of a tile of it; zeros where there are none. */
    __device__ __forceinline__ void fetch(const mn_in &view, const mn_cell_tile &tile) {
        const T *at = from + tile.first * view.stride[1];
        x = {};
        if (share::row() >= tile.n_rows) return;
        if (inside > share::EACH) {
            x = *(const mn_vec<T, share::EACH> *)at;
            return;
        }
#pragma unroll
        for (int n = 0; n < share::EACH; n++) {
            if (n < inside) x.at[n] = at[n];
        }
    }

    /* To shared memory, times `by`. */
    template <typename Smem>
    __device__ void put(Smem &smem, float by = 1.0f) const {
        float all[share::EACH];
#pragma unroll
        for (int n = 0; n < share::EACH; n++) all[n] = by * mn_float(x.at[n]);
        smem.put(share::row(), share::place(), all);
    }
};

/* n neighbours, aligned for one access. */
template <int n>
__device__ __forceinline__ void mn_cell_load(float (&x)[n], const float *from) {
    const mn_vec<float, n> vec = *(const mn_vec<float, n> *)from;
#pragma unroll
    for (int i = 0; i < n; i++) x[i] = vec.at[i];
}

/* Rows (t, group, order): 16 numbers of slots at token t, number i ^ order in place i. Four tokens
 * of eight slots each are stored at a time: they lie in different banks. */
template <typename Block>
struct alignas(16) mn_cell_keys {
    float at[MN_CELL_TOKENS][Block::GROUPS * 4 * MN_CELL_GROUP + 8];

    __device__ __forceinline__ static int row(int group, int order) {
        return (group * 4 + order) * MN_CELL_GROUP;
    }

    /* 2 or 4 neighbours from slot on. */
    template <int n>
    __device__ void put(int t, int slot, const float (&x)[n]) {
        static_assert(n == 2 || n == 4, "orders change places among four");
#pragma unroll
        for (int order = 0; order < 4; order++) {
            float y[n];
#pragma unroll
            for (int i = 0; i < n; i++) y[i] = x[i ^ order % n];
            float *to = at[t] + row(slot / MN_CELL_GROUP, order);
            mn_store<n>(to, slot % MN_CELL_GROUP ^ order / n * n, y);
        }
    }

    /* use(place) for all positions of the number of a slot. */
    template <typename F>
    __device__ __forceinline__ void for_each_slot(int t, int slot, F use) {
#pragma unroll
        for (int order = 0; order < 4; order++) {
            use(at[t] + row(slot / MN_CELL_GROUP, order) + (slot % MN_CELL_GROUP ^ order));
        }
    }

    /* Those of this thread's slots. */
    __device__ void get(float (&x)[4], int t) const {
        const float *from = at[t] + row(Block::group(), Block::column_lane() % 4);
        mn_cell_load(x, from + 4 * Block::slot_lane());
    }
};

/* at[i][t]: number of column i at token t */
template <typename Block>
struct alignas(16) mn_cell_columns {
    float at[Block::COLUMNS][MN_CELL_PITCH];

    template <int n>
    __device__ void put(int t, int column, const float (&x)[n]) {
#pragma unroll
        for (int i = 0; i < n; i++) at[column + i][t] = x[i];
    }

    template <typename F>
    __device__ __forceinline__ void for_each_slot(int t, int column, F use) {
        use(&at[column][t]);
    }

    /* n tokens from t on, a multiple of n, of this thread's columns. */
    template <int n>
    __device__ void get(float (&x)[Block::C][n], int t) const {
#pragma unroll
        for (int i = 0; i < Block::C; i++) mn_load<n>(x[i], at[Block::column(i)], t);
    }
};

/* ---- sums over lanes ------------------------------------------------------------------------- */

/* One exchange between lanes `mask` apart. The lane whose bit is 0 keeps x[0 .. n), the other one
 * x[n .. 2 n), each summed over both, in x[0 .. n). */
template <int n, int count>
__device__ __forceinline__ void mn_cell_reduce_half(float (&x)[count], int mask) {
    static_assert(2 * n <= count, "two halves");
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int i = 0; i < n; i++) {
        const float early = x[i], late = x[i + n];    // values: chosen addresses would keep x out
        const float give = upper ? early : late;      // of the registers
        x[i] = (upper ? late : early) + __shfl_xor_sync(0xffffffffu, give, mask);
    }
}

/* The same where the other lane calls x[i + n] what this one calls x[i]. */
template <int n, int count>
__device__ __forceinline__ void mn_cell_reduce_swap(float (&x)[count], int mask) {
    static_assert(2 * n <= count, "two halves");
#pragma unroll
    for (int i = 0; i < n; i++) x[i] += __shfl_xor_sync(0xffffffffu, x[i + n], mask);
}

/* Sums over the 8 columns' lanes of two numbers for each of the 4 slots: the first for the lower
 * half of the lanes, the second for the upper half; lane c has slot c % 4 of its four. Which is
 * number mn_cell_key_index() of 2 x 16. */
__device__ __forceinline__ float mn_cell_key_sums(float (&first)[4], float (&second)[4]) {
    mn_cell_reduce_swap<2>(first, 8);
    mn_cell_reduce_swap<2>(second, 8);
    mn_cell_reduce_swap<1>(first, 4);
    mn_cell_reduce_swap<1>(second, 4);
    float both[2] = { first[0], second[0] };
    mn_cell_reduce_half<1>(both, 16);
    return both[0];
}

__device__ inline int mn_cell_key_index(void) {
    const int lane = threadIdx.x % 32;
    return lane / 16 * MN_CELL_GROUP + lane % 4 * 4 + lane / 4 % 4;
}

/* Sums over the 4 slots' lanes at four tokens: lane s has token s. */
__device__ __forceinline__ float mn_cell_column_sums(float (&x)[4]) {
    mn_cell_reduce_half<2>(x, 2);
    mn_cell_reduce_half<1>(x, 1);
    return x[0];
}

/* 1 / x to the last bit or two; denormal numbers count as zero. */
__device__ inline float mn_rcp_ftz(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- sums on their way to memory ------------------------------------------------------------- */

/* x += n neighbours from `from` on, 16 bytes aligned or less of them */
template <int n>
__device__ __forceinline__ void mn_cell_add(float (&x)[n], const float *from) {
    float more[n];
    mn_load<n>(more, from, 0);
#pragma unroll
    for (int i = 0; i < n; i++) x[i] += more[i];
}

/* Two sums for each token and column of a tile, from each group of slots. */
template <typename Block>
struct alignas(16) mn_cell_sums {
    float at[2][Block::GROUPS][MN_CELL_TOKENS][Block::COLUMNS + 8 * Block::C];
};

/* One of them, to rows that begin at `to` and lie `stride` apart, of which `count` numbers
 * exist. */
template <typename T, typename Block>
__device__ __forceinline__ void mn_cell_store_kind(T *to, int64_t stride, int64_t count, int kind,
                                                 int n_rows, const mn_cell_sums<Block> &sums) {
    typedef mn_cell_thread_map<Block::COLUMNS, Block::THREADS> share;
    const int t = share::row(), place = share::place();
    if (t >= n_rows) return;
    float x[share::EACH] = {};
#pragma unroll
    for (int group = 0; group < Block::GROUPS; group++) {
        mn_cell_add(x, &sums.at[kind][group][t][place]);
    }
    mn_cell_store(to + t * stride + place, count - place, x);
}

/* Puts them to two tensors whose rows have call.V numbers or, where blockIdx.z counts blocks of
 * slots, as its part to `parts`: rows of both, behind each other, for `n_rows` tokens and heads. */
template <typename T, typename Block>
__device__ __forceinline__ void mn_cell_store_sums(const mn_out &first, const mn_out &second,
                                                 float *partials, const mn_call &call,
                                                 const mn_cell_tile &tile, int64_t h, int64_t heads,
                                                 int64_t n_rows, const mn_cell_sums<Block> &sums) {
    const int64_t m = Block::column0(), count = call.V - m, token = tile.span.t0 + tile.first;
    if (gridDim.z > 1) {
        const int64_t row = blockIdx.z * n_rows + tile.row(call, 0) * heads + h;
        float *to = partials + row * 2 * call.V + m;
        mn_cell_store_kind(to, 2 * call.V * heads, count, 0, tile.n_rows, sums);
        mn_cell_store_kind(to + call.V, 2 * call.V * heads, count, 1, tile.n_rows, sums);
        return;
    }
    T *to_first = mn_row<T>(first, tile.span.b, token, h);
    T *to_second = mn_row<T>(second, tile.span.b, token, h);
    if (to_first) mn_cell_store_kind(to_first + m, first.stride[1], count, 0, tile.n_rows, sums);
    if (to_second) mn_cell_store_kind(to_second + m, second.stride[1], count, 1, tile.n_rows, sums);
}

/* Two sums for each token and slot of a tile, from each warp, as mn_cell_key_index orders them. */
template <typename Block>
struct alignas(16) mn_cell_key_partials {
    static constexpr int ACROSS = Block::THREADS / 32 / Block::GROUPS;    // warps along the columns
    float at[ACROSS][Block::GROUPS][MN_CELL_TOKENS][2 * MN_CELL_GROUP];

    __device__ void put(int t, float sum) {
        at[threadIdx.x / 32 / Block::GROUPS][Block::group()][t][mn_cell_key_index()] = sum;
    }
};

/* This block's sums over its columns: part blockIdx.x of `parts`, rows of call.K first and call.K
 * second numbers for `n_rows` tokens and heads. */
template <typename Block>
__device__ __forceinline__ void mn_cell_store_keys(float *partials, const mn_call &call,
                                                 const mn_cell_tile &tile, int64_t h, int64_t heads,
                                                 int64_t n_rows,
                                                 const mn_cell_key_partials<Block> &sums) {
    typedef mn_cell_thread_map<2 * Block::SLOTS, Block::THREADS> share;
    const int kind = share::place() / Block::SLOTS, slot = share::place() % Block::SLOTS;
    const int group = slot / MN_CELL_GROUP, i = kind * MN_CELL_GROUP + slot % MN_CELL_GROUP;
    const int64_t s = Block::slot0() + slot;
    const int t = share::row();
    if (t >= tile.n_rows) return;
    float x[share::EACH] = {};
#pragma unroll
    for (int warp = 0; warp < mn_cell_key_partials<Block>::ACROSS; warp++) {
        mn_cell_add(x, &sums.at[warp][group][t][i]);
    }
    const int64_t row = blockIdx.x * n_rows + tile.row(call, t) * heads + h;
    mn_cell_store(partials + (row * 2 + kind) * call.K + s, call.K - s, x);
}

/* ---- work space ------------------------------------------------------------------------------ */

/* Smem for parts of so many floats each, 16 bytes aligned. */
template <int n>
inline bool mn_cell_plan_workspace(mn_plan *plan, const int64_t (&counts)[n]) {
    for (int64_t count : counts) {
        size_t bytes;
        if (!mn_mul_size(&bytes, (size_t)count, sizeof(float)) ||
            bytes > SIZE_MAX - 16 - plan->shared_bytes) {
            return false;
        }
        plan->shared_bytes += (bytes + 15) / 16 * 16;
    }
    return true;
}

/* Where they lie. */
template <int n>
inline void mn_cell_carve_workspace(float *(&at)[n], float *shared, const int64_t (&counts)[n]) {
    for (int i = 0; i < n; i++) {
        at[i] = shared;
        shared += (counts[i] + 3) / 4 * 4;
    }
}

/* ---- sums over parts ------------------------------------------------------------------------- */

enum { MN_CELL_REDUCE_THREADS = 256 };

/* How many lanes of a warp take a row of n pieces: a power of two, so that warps whose rows are
 * narrow have several. */
inline int mn_cell_reduce_lanes(int64_t n) {
    int lanes = 1;
    while (lanes < 32 && lanes < n) lanes *= 2;
    return lanes;
}

/* Where row (b, t, h) lies; divisions of 64 bits would take longer than what is added up. */
struct mn_cell_row_place {
    int64_t b, t, h;

    __device__ static mn_cell_row_place of(int64_t row, int64_t n_rows, int64_t tokens,
                                           int64_t heads) {
        if (n_rows <= INT32_MAX) {
            const unsigned token = (unsigned)row / (unsigned)heads;
            const unsigned b = token / (unsigned)tokens;
            return { b, token - b * (unsigned)tokens, (unsigned)row - token * (unsigned)heads };
        }
        const int64_t token = row / heads;
        return { token / tokens, token % tokens, row % heads };
    }
};

/* Two tensors of `width` numbers in each row (b, t, h) from parts of n_rows such rows, the second
 * one's row behind the first one's. `lanes` lanes take a row and add the parts in their order, EACH
 * neighbours a lane, of which width is a multiple. */
template <typename T, int EACH>
__global__ void __launch_bounds__(MN_CELL_REDUCE_THREADS)
cell_reduce_partials_kernel(mn_out first, mn_out second, const float *partials,
                            int64_t n_partials, int64_t n_rows,
                   int64_t tokens, int64_t heads, int64_t width, int lanes) {
    const int64_t row =
        blockIdx.x * (int64_t)(MN_CELL_REDUCE_THREADS / lanes) + threadIdx.x / (unsigned)lanes;
    if (row >= n_rows) return;
    const mn_cell_row_place at = mn_cell_row_place::of(row, n_rows, tokens, heads);
    T *to_first = mn_row<T>(first, at.b, at.t, at.h);
    T *to_second = mn_row<T>(second, at.b, at.t, at.h);
    const int64_t begin = to_first ? 0 : width, end = to_second ? 2 * width : width;
    for (int64_t i = begin + (threadIdx.x & (lanes - 1)) * EACH; i < end; i += lanes * EACH) {
        const float *from = partials + row * 2 * width + i;
        float sums[EACH] = {};
#pragma unroll 8
        for (int64_t partial = 0; partial < n_partials; partial++) {
            mn_cell_add(sums, from + partial * n_rows * 2 * width);
        }
        if (i < width) mn_cell_store(to_first + i, EACH, sums);
        else mn_cell_store(to_second + i - width, EACH, sums);
    }
}

/* The same for two parts, EACH neighbours of both tensors at once: loads on their way are what it
 * lives on. */
template <typename T, int EACH>
__global__ void __launch_bounds__(MN_CELL_REDUCE_THREADS)
cell_reduce_two_kernel(mn_out first, mn_out second, const float *partials, int64_t n_rows,
                       int64_t tokens, int64_t heads, int64_t width, int lanes) {
    const int64_t row =
        blockIdx.x * (int64_t)(MN_CELL_REDUCE_THREADS / lanes) + threadIdx.x / (unsigned)lanes;
    if (row >= n_rows) return;
    const mn_cell_row_place at = mn_cell_row_place::of(row, n_rows, tokens, heads);
    T *const to[2] = { mn_row<T>(first, at.b, at.t, at.h), mn_row<T>(second, at.b, at.t, at.h) };
    const float *from = partials + row * 2 * width;
    for (int64_t i = (threadIdx.x & (lanes - 1)) * EACH; i < width; i += lanes * EACH) {
        float x[2][2][EACH];
#pragma unroll
        for (int partial = 0; partial < 2; partial++) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (to[n]) mn_load<EACH>(x[n][partial], from + (partial * n_rows * 2 + n) * width,
                                         i);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (!to[n]) continue;
#pragma unroll
            for (int j = 0; j < EACH; j++) x[n][0][j] = 0.0f + x[n][0][j] + x[n][1][j];
            mn_cell_store(to[n] + i, EACH, x[n][0]);
        }
    }
    mn_pdl_wait();
}

/* Adds the parts of mn_cell_store_sums or mn_cell_store_keys. `beside_last`: two parts,
 * beside the launch in front of it, which has said so (prim/pdl.cuh) and writes none of them; what
 * comes behind waits for both. */
template <typename T>
inline int mn_cell_reduce_partials(const mn_out &first, const mn_out &second, const float *partials,
                            int64_t n_partials, const mn_call *call, int64_t heads, int64_t width,
                            cudaStream_t stream, bool beside_last = false) {
    const int64_t n_rows = mn_cell_rows_of(call) * heads;
    if (n_rows == 0 || (!first.data && !second.data)) return cudaSuccess;
    const bool two = n_partials == 2 && width % 4 == 0;
    const int lanes = mn_cell_reduce_lanes((two ? 1 : 2) * width / (width % 4 ? 1 : 4));
    const unsigned blocks = mn_blocks(n_rows, MN_CELL_REDUCE_THREADS / lanes);
    if (two && beside_last) {
        return mn_launch_pdl(cell_reduce_two_kernel<T, 4>, blocks, MN_CELL_REDUCE_THREADS, 0,
                             stream, first, second, partials, n_rows, call->T, heads, width, lanes);
    }
    if (two) {
        cell_reduce_two_kernel<T, 4><<<blocks, MN_CELL_REDUCE_THREADS, 0, stream>>>(
            first, second, partials, n_rows, call->T, heads, width, lanes);
    } else if (width % 4 == 0) {
        cell_reduce_partials_kernel<T, 4><<<blocks, MN_CELL_REDUCE_THREADS, 0, stream>>>(
            first, second, partials, n_partials, n_rows, call->T, heads, width, lanes);
    } else {
        cell_reduce_partials_kernel<T, 1><<<blocks, MN_CELL_REDUCE_THREADS, 0, stream>>>(
            first, second, partials, n_partials, n_rows, call->T, heads, width, lanes);
    }
    return mn_launch_status();
}

}    // namespace mneme::recurrent

#endif
