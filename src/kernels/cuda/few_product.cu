/* few_product.cu - c = a b' of a few rows with several weights in one launch (kernels/few.h).
 *
 * Such products read every weight once and do next to nothing with it: what counts is how many
 * bytes are on their way, and that they are before the numbers they wait for. A block takes strips
 * of eight columns. It asks for the weights of its first strip before it waits for the launch in
 * front, then makes or fetches its rows of a, each block for itself.
 *
 * bf16: warps share the strip's rows of weights in units of 32 numbers. A lane's 16 bytes are the
 * left factor of two products of tensor cores, whose eight lower rows stay zero; the numbers of a
 * unit are taken in the order in which the lanes have them, in both factors. float32: a warp has a
 * column. Sums are float32, of each warp in order, then over the warps. */
#include "kernels/cuda/after.cuh"
#include "kernels/cuda/few_work.cuh"

enum { COLUMNS = 8, UNIT = 32, PAD = 8, PROCESSORS = 132 };

struct few_product {
    const void *b, *bias, *plus;
    void *c, *sum;
    int64_t b_row;
    int N;
};

struct few_products {
    int M, K, step, n, has_first, settled;    // step: from row to row of a in shared memory
    int64_t a_row;
    const void *a;
    int begins[MN_FEW_PRODUCTS + 1];          // strips in front of each product
    few_product of[MN_FEW_PRODUCTS];
    mn_few_job first;
};

/* A strip: which product, and its first column. */
struct strip {
    const few_product *of;
    int column;

    __device__ strip(const few_products &p, int at) {
        int i = 0;
        while (at >= p.begins[i + 1]) i++;
        of = &p.of[i];
        column = (at - p.begins[i]) * COLUMNS;
    }
};

__device__ static uint4 ask(const void *from) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
}

/* acc (16,8) += (the 8 rows of which a lane has w0 and w1, and 8 of zeros) b */
__device__ static void multiply_add(float (&acc)[4], uint32_t w0, uint32_t w1, uint32_t b0,
                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(w0), "r"(0), "r"(w1), "r"(0), "r"(b0), "r"(b1));
}

/* How a block of WARPS warps multiplies, with AHEAD packs of each lane on their way. PARTS sums of
 * each number come out, sums[part][row][column]. */
template <typename T, int WARPS, int AHEAD>
struct multiplier;

template <int WARPS, int AHEAD>
struct multiplier<mn_bf16, WARPS, AHEAD> {
    static constexpr int PARTS = WARPS, NUMBERS = WARPS * AHEAD * UNIT;    // of K at once
    uint4 w[AHEAD];

    /* The numbers from `first` on of the strip's weights. */
    __device__ void load(const few_products &p, const strip &s, int first) {
        const int lane = threadIdx.x % 32, column = s.column + lane / 4;
        const mn_bf16 *row = (const mn_bf16 *)s.of->b + column * s.of->b_row;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = place(first, i);
            w[i] = make_uint4(0, 0, 0, 0);
            if (column < s.of->N && k < p.K) w[i] = ask(row + k);
        }
    }

    __device__ static int place(int first, int i) {
        return first + (i * WARPS + threadIdx.x / 32) * UNIT + threadIdx.x % 4 * 8;
    }

    __device__ void multiply(float *sums, const few_products &p, const strip &s,
                             const mn_bf16 *x) {
        const int lane = threadIdx.x % 32, row = lane / 4;
        float acc[4] = {};
#pragma unroll 1
        for (int first = 0; first < p.K; first += NUMBERS) {
            if (first > 0) load(p, s, first);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int k = place(first, i);
                uint4 b = make_uint4(0, 0, 0, 0);
                if (row < p.M && k < p.K) b = *(const uint4 *)(x + row * p.step + k);
                multiply_add(acc, w[i].x, w[i].y, b.x, b.y);
                multiply_add(acc, w[i].z, w[i].w, b.z, b.w);
            }
        }
        float *part = sums + threadIdx.x / 32 * (MN_FEW_DEEPEST * COLUMNS);
        const int left = 2 * (lane % 4);    // rows of a that this lane has sums of
        if (left < p.M) part[left * COLUMNS + row] = acc[0];
        if (left + 1 < p.M) part[(left + 1) * COLUMNS + row] = acc[1];
    }
};

template <int WARPS, int AHEAD>
struct multiplier<float, WARPS, AHEAD> {
    static constexpr int PARTS = 1, NUMBERS = AHEAD * 128;
    static_assert(WARPS == COLUMNS, "a warp has a column");
    uint4 w[AHEAD];

    __device__ void load(const few_products &p, const strip &s, int first) {
        const int column = s.column + threadIdx.x / 32;
        const float *row = (const float *)s.of->b + column * s.of->b_row;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int k = place(first, i);
            w[i] = make_uint4(0, 0, 0, 0);
            if (column < s.of->N && k < p.K) w[i] = ask(row + k);
        }
    }

    __device__ static int place(int first, int i) {
        return first + i * 128 + threadIdx.x % 32 * 4;
    }

    __device__ void multiply(float *sums, const few_products &p, const strip &s, const float *x) {
        float sum[MN_FEW_DEEPEST] = {};
#pragma unroll 1
        for (int first = 0; first < p.K; first += NUMBERS) {
            if (first > 0) load(p, s, first);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int k = place(first, i);
                if (k >= p.K) continue;
#pragma unroll
                for (int row = 0; row < MN_FEW_DEEPEST; row++) {
                    if (row >= p.M) continue;
                    const float4 a = *(const float4 *)(x + row * p.step + k);
                    sum[row] = fmaf(a.x, __uint_as_float(w[i].x), sum[row]);
                    sum[row] = fmaf(a.y, __uint_as_float(w[i].y), sum[row]);
                    sum[row] = fmaf(a.z, __uint_as_float(w[i].z), sum[row]);
                    sum[row] = fmaf(a.w, __uint_as_float(w[i].w), sum[row]);
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

/* Rows of a to shared memory: made by the first work, which block 0 stores as well, or fetched. */
template <typename T>
__device__ static void bring(T *x, const few_products &p, float *room) {
    constexpr int N = 16 / (int)sizeof(T);
    const int packs = p.K / N;
    if (p.has_first) {
        mn_few_do(p.first, { (char *)x, p.K, p.step }, room);
        if (blockIdx.x > 0) return;
        __syncthreads();
        T *a = (T *)p.a;
        for (int i = threadIdx.x; i < p.M * p.K; i += blockDim.x) {
            const int row = i / p.K;
            a[i] = x[row * p.step + i - row * p.K];
        }
        return;
    }
    for (int i = threadIdx.x; i < p.M * packs; i += blockDim.x) {
        const int row = i / packs, at = (i - row * packs) * N;
        *(uint4 *)(x + row * p.step + at) = *(const uint4 *)((const T *)p.a + row * p.a_row + at);
    }
}

/* Adds the parts up in order, and stores. */
template <typename T, int PARTS>
__device__ static void finish(const float *sums, const few_products &p, const strip &s) {
    const int row = threadIdx.x / COLUMNS, column = s.column + threadIdx.x % COLUMNS;
    if (row >= p.M || column >= s.of->N) return;
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        sum += sums[part * (MN_FEW_DEEPEST * COLUMNS) + threadIdx.x];
    }
    sum += mn_get((const T *)s.of->bias, column);
    const int64_t at = (int64_t)row * s.of->N + column;
    T *c = (T *)s.of->c + at;
    mn_put(c, sum);
    if (s.of->sum) mn_put((T *)s.of->sum + at, mn_float(*c) + mn_get((const T *)s.of->plus, at));
}

/* Blocks that a processor holds: so many bytes of weights are on their way to it. */
template <typename T, int WARPS, int AHEAD>
constexpr int resident = WARPS > 8 ? 2 : sizeof(T) == 2 && AHEAD <= 4 ? 5 : 4;

template <typename T, int WARPS, int AHEAD>
__global__ void __launch_bounds__(32 * WARPS, (resident<T, WARPS, AHEAD>))
few_product_kernel(const __grid_constant__ few_products p) {
    typedef multiplier<T, WARPS, AHEAD> way;
    extern __shared__ uint4 rows_of_a[];
    __shared__ float sums[2][way::PARTS * MN_FEW_DEEPEST * COLUMNS], room[32];
    T *x = (T *)rows_of_a;
    const int n_strips = p.begins[p.n];
    way m;
    mn_let_next_begin();
    if (p.settled) m.load(p, strip(p, blockIdx.x), 0);
    if (p.has_first) mn_few_ask(p.first);
    mn_wait_for_before();
    if (!p.settled) m.load(p, strip(p, blockIdx.x), 0);
    bring(x, p, room);
    __syncthreads();
    for (int at = blockIdx.x, turn = 0; at < n_strips; at += gridDim.x, turn = 1 - turn) {
        const strip s(p, at);
        m.multiply(sums[turn], p, s, x);
        if (at + (int)gridDim.x < n_strips) m.load(p, strip(p, at + gridDim.x), 0);
        __syncthreads();
        finish<T, way::PARTS>(sums[turn], p, s);
    }
}

template <typename T, int WARPS, int AHEAD>
static int launch(const few_products &p, cudaStream_t stream) {
    const size_t room = (size_t)p.M * (size_t)p.step * sizeof(T);
    void (*kernel)(few_products) = few_product_kernel<T, WARPS, AHEAD>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)room);
    if (code != cudaSuccess) return code;
    const unsigned blocks = mn_blocks(p.begins[p.n], 1, PROCESSORS * resident<T, WARPS, AHEAD>);
    return mn_launch_early(kernel, dim3(blocks), 32 * WARPS, room, stream, p);
}

extern "C" bool mn_few_multiplies(const mn_product_work *w) {
    const int64_t pack = w->dtype == MN_F32 ? 4 : 8;
    const int64_t most = (int64_t)160 * 1024 / (w->dtype == MN_F32 ? 4 : 2);
    return w->M <= MN_FEW_DEEPEST && w->b_transposed && !w->a_transposed && !w->accumulate &&
           w->c_dtype == w->dtype && w->c_row == w->N && w->K % pack == 0 && w->a_row % pack == 0 &&
           w->b_row % pack == 0 && (uintptr_t)w->a % 16 == 0 && (uintptr_t)w->b % 16 == 0 &&
           w->K > 0 && w->N < (1 << 30) && w->M * (w->K + PAD) <= most;
}

extern "C" int mn_few_multiply(const mn_few_products *given, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    few_products p = {};
    p.M = (int)given->M, p.K = (int)given->K, p.step = (int)given->K + PAD, p.n = given->n;
    p.a = given->a, p.a_row = given->a_row, p.settled = given->settled;
    p.has_first = given->first != NULL;
    if (given->first) p.first = mn_few_job_of(*given->first);
    for (int i = 0; i < given->n; i++) {
        const mn_few_product &g = given->of[i];
        p.of[i] = { g.b, g.bias, g.plus, g.c, g.sum, g.b_row, (int)g.N };
        p.begins[i + 1] = p.begins[i] + (int)mn_ceil_div(g.N, COLUMNS);
    }
    if (given->dtype == MN_F32) return launch<float, 8, 8>(p, on);
    if (p.K <= 8 * 4 * UNIT) return launch<mn_bf16, 8, 4>(p, on);
    if (p.K <= 8 * 8 * UNIT) return launch<mn_bf16, 8, 8>(p, on);
    return launch<mn_bf16, 16, 8>(p, on);
}
