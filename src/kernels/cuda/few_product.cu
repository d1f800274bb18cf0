/* few_product.cu - c = a b' of a few rows, where the weight is a and c is turned.
 *
 * Such products read every weight once and do next to nothing with it: what counts is how many
 * bytes are on their way. A block takes strips of eight columns.
 *
 * bf16: warps share the strip's rows of weights in units of 32 numbers. A lane's 16 bytes are the
 * left factor of two products of tensor cores, whose eight lower rows stay zero; the numbers of a
 * unit are taken in the order in which the lanes have them, in both factors. float32: a warp has a
 * column. Sums are float32, of each warp in order, then over the warps. */
#include "kernels/cuda/after.cuh"
#include "kernels/cuda/product_plain.h"
#include "kernels/few.h"

enum { COLUMNS = 8, UNIT = 32, PAD = 8, PROCESSORS = 132 };

struct alignas(16) few_product {
    int M, K, N, step;                       // step: from row to row of a in shared memory
    int64_t a_row, b_row, c_row, c_column;   // numbers between rows, and columns of c
    const void *a, *b, *bias;                // the bias belongs to rows of a
    void *c;
};

/* Sixteen bytes on their way to shared memory; zeros where `there` is false. */
__device__ static void ask(uint4 *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

__device__ static void wait_for_asked(void) {
    asm volatile("cp.async.wait_all;\n" ::: "memory");
}

/* acc (16,8) += (the 8 rows of which a lane has w0 and w1, and 8 of zeros) b */
__device__ static void multiply_add(float (&acc)[4], uint32_t w0, uint32_t w1, uint32_t b0,
                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(w0), "r"(0), "r"(w1), "r"(0), "r"(b0), "r"(b1));
}

/* How a block of WARPS warps multiplies, with AHEAD packs of each lane on their way: w[i][thread],
 * which no other thread looks at. PARTS sums of each number come out, sums[part][row][column]. */
template <typename T, int WARPS, int AHEAD>
struct multiplier;

template <int WARPS, int AHEAD>
struct multiplier<mn_bf16, WARPS, AHEAD> {
    static constexpr int PARTS = WARPS, NUMBERS = WARPS * AHEAD * UNIT;    // of K at once
    uint4 (*w)[32 * WARPS];

    /* The numbers from `first` on of the weights of the strip from column `from` on. */
    __device__ void load(const few_product &p, int from, int first) {
        const int lane = threadIdx.x % 32, column = from + lane / 4;
        const mn_bf16 *b = (const mn_bf16 *)p.b, *row = b + column * p.b_row;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = place(first, i);
            const bool there = column < p.N && k < p.K;
            ask(&w[i][threadIdx.x], there ? row + k : b, there);
        }
    }

    __device__ static int place(int first, int i) {
        return first + (i * WARPS + threadIdx.x / 32) * UNIT + threadIdx.x % 4 * 8;
    }

    __device__ void multiply(float *sums, const few_product &p, int from, const mn_bf16 *x) {
        const int lane = threadIdx.x % 32, row = lane / 4;
        float acc[2][4] = {};
#pragma unroll 1
        for (int first = 0; first < p.K; first += NUMBERS) {
            if (first > 0) load(p, from, first);
            wait_for_asked();
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int k = place(first, i);
                uint4 b = make_uint4(0, 0, 0, 0);
                if (row < p.M && k < p.K) b = *(const uint4 *)(x + row * p.step + k);
                const uint4 a = w[i][threadIdx.x];
                multiply_add(acc[0], a.x, a.y, b.x, b.y);
                multiply_add(acc[1], a.z, a.w, b.z, b.w);
            }
        }
        float *part = sums + threadIdx.x / 32 * (MN_FEW_DEEPEST * COLUMNS);
        const int left = 2 * (lane % 4);    // rows of a that this lane has sums of
        if (left < p.M) part[left * COLUMNS + row] = acc[0][0] + acc[1][0];
        if (left + 1 < p.M) part[(left + 1) * COLUMNS + row] = acc[0][1] + acc[1][1];
    }
};

template <int WARPS, int AHEAD>
struct multiplier<float, WARPS, AHEAD> {
    static constexpr int PARTS = 1, NUMBERS = AHEAD * 128;
    static_assert(WARPS == COLUMNS, "a warp has a column");
    uint4 (*w)[32 * WARPS];

    __device__ void load(const few_product &p, int from, int first) {
        const int column = from + threadIdx.x / 32;
        const float *b = (const float *)p.b, *row = b + column * p.b_row;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = place(first, i);
            const bool there = column < p.N && k < p.K;
            ask(&w[i][threadIdx.x], there ? row + k : b, there);
        }
    }

    __device__ static int place(int first, int i) {
        return first + i * 128 + threadIdx.x % 32 * 4;
    }

    __device__ void multiply(float *sums, const few_product &p, int from, const float *x) {
        float sum[MN_FEW_DEEPEST] = {};
#pragma unroll 1
        for (int first = 0; first < p.K; first += NUMBERS) {
            if (first > 0) load(p, from, first);
            wait_for_asked();
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int k = place(first, i);
                if (k >= p.K) continue;
                const float4 b = *(const float4 *)&w[i][threadIdx.x];
#pragma unroll
                for (int row = 0; row < MN_FEW_DEEPEST; row++) {
                    if (row >= p.M) continue;
                    const float4 a = *(const float4 *)(x + row * p.step + k);
                    sum[row] = fmaf(a.x, b.x, sum[row]);
                    sum[row] = fmaf(a.y, b.y, sum[row]);
                    sum[row] = fmaf(a.z, b.z, sum[row]);
                    sum[row] = fmaf(a.w, b.w, sum[row]);
                }
            }
        }
#pragma unroll
        for (int row = 0; row < MN_FEW_DEEPEST; row++) {
            const float all = mn_warp_sum(sum[row]);
            if (threadIdx.x % 32 == 0) sums[row * COLUMNS + threadIdx.x / 32] = all;
        }
    }
};

/* Rows of a to shared memory. */
template <typename T>
__device__ static void bring(T *x, const few_product &p) {
    constexpr int N = 16 / (int)sizeof(T);
    const int packs = p.K / N;
    for (int i = threadIdx.x; i < p.M * packs; i += blockDim.x) {
        const int row = i / packs, at = (i - row * packs) * N;
        *(uint4 *)(x + row * p.step + at) = *(const uint4 *)((const T *)p.a + row * p.a_row + at);
    }
}

/* Adds the parts of a thread's number of a strip up in order, and stores it. */
template <typename T, int PARTS>
__device__ static void finish(const few_product &p, int from, const float *sums) {
    const int row = threadIdx.x / COLUMNS, column = from + threadIdx.x % COLUMNS;
    if (row >= p.M || column >= p.N) return;
    float all = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        all += sums[part * (MN_FEW_DEEPEST * COLUMNS) + threadIdx.x];
    }
    mn_put((T *)p.c + row * p.c_row + column * p.c_column, all + mn_get((const T *)p.bias, row));
}

/* Blocks that a processor holds: so many bytes of weights are on their way to it. */
template <typename T, int WARPS, int AHEAD>
constexpr int resident = WARPS > 8 ? 2 : sizeof(T) == 2 && AHEAD <= 4 ? 5 : 4;

template <typename T, int WARPS, int AHEAD>
__global__ void __launch_bounds__(32 * WARPS, (resident<T, WARPS, AHEAD>))
few_product_kernel(const __grid_constant__ few_product p) {
    typedef multiplier<T, WARPS, AHEAD> way;
    extern __shared__ uint4 packs[];    // of weights, then the rows of a
    __shared__ float sums[2][way::PARTS * MN_FEW_DEEPEST * COLUMNS];
    T *x = (T *)(packs + AHEAD * 32 * WARPS);
    way m = { (uint4 (*)[32 * WARPS])packs };
    const int step = gridDim.x * COLUMNS;
    mn_let_next_begin();
    mn_wait_for_before();
    m.load(p, blockIdx.x * COLUMNS, 0);
    bring(x, p);
    __syncthreads();
    for (int from = blockIdx.x * COLUMNS, turn = 0; from < p.N; from += step, turn = 1 - turn) {
        m.multiply(sums[turn], p, from, x);
        if (from + step < p.N) m.load(p, from + step, 0);
        __syncthreads();
        finish<T, way::PARTS>(p, from, sums[turn]);
    }
}

template <typename T, int WARPS, int AHEAD>
static int launch(const few_product &p, cudaStream_t stream) {
    const size_t room = (size_t)AHEAD * 32 * WARPS * sizeof(uint4) +
                        (size_t)p.M * (size_t)p.step * sizeof(T);
    void (*kernel)(few_product) = few_product_kernel<T, WARPS, AHEAD>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)room);
    if (code != cudaSuccess) return code;
    const int64_t strips = mn_ceil_div((int64_t)p.N, (int64_t)COLUMNS);
    const unsigned blocks = mn_blocks(strips, 1, PROCESSORS * resident<T, WARPS, AHEAD>);
    return mn_launch_early(kernel, dim3(blocks), 32 * WARPS, room, stream, p);
}

/* By how a processor's lanes are used best for rows of that length. */
static int launch_by_length(const few_product &p, mn_dtype dtype, cudaStream_t on) {
    if (dtype == MN_F32) return launch<float, 8, 8>(p, on);
    if (p.K <= 8 * 4 * UNIT) return launch<mn_bf16, 8, 4>(p, on);
    if (p.K <= 8 * 8 * UNIT) return launch<mn_bf16, 8, 8>(p, on);
    return launch<mn_bf16, 16, 8>(p, on);
}

/* What both ways round ask for; `few` rows are kept in shared memory. */
static bool takes(const mn_product_work *w, int64_t few, int64_t many) {
    const int64_t pack = w->dtype == MN_F32 ? 4 : 8;
    const int64_t most = (int64_t)128 * 1024 / (w->dtype == MN_F32 ? 4 : 2);
    return few <= MN_FEW_DEEPEST && many < (1 << 30) && w->b_transposed && !w->a_transposed &&
           !w->accumulate && w->c_dtype == w->dtype && w->K > 0 && w->K % pack == 0 &&
           w->a_row % pack == 0 && w->b_row % pack == 0 && (uintptr_t)w->a % 16 == 0 &&
           (uintptr_t)w->b % 16 == 0 && few * (w->K + PAD) <= most;
}

extern "C" bool mn_few_columns_serve(const mn_product_work *w) {
    return takes(w, w->N, w->M);
}

/* c' = b a': the columns are the few rows. */
extern "C" int mn_few_columns(const mn_product_work *w, void *stream) {
    few_product p = {};
    p.M = (int)w->N, p.N = (int)w->M, p.K = (int)w->K, p.step = p.K + PAD;
    p.a = w->b, p.a_row = w->b_row, p.b = w->a, p.b_row = w->a_row, p.bias = w->bias;
    p.c = w->c, p.c_row = 1, p.c_column = w->c_row;
    return launch_by_length(p, w->dtype, (cudaStream_t)stream);
}
