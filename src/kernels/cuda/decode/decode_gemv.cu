/* decode_gemv.cu - c = a b' of a few rows with several weights in one launch (kernels/decode.h).
 *
 * Such gemms read every weight once and do next to nothing with it: what counts is how many bytes
 * are on their way, and that they are before the elements they wait for. A block takes column
 * tiles of eight columns. It asks for the weights of its first column tile before it waits
 * for the launch in front, then makes or loads its rows of a, each block for itself.
 *
 * bf16: warps share the column tile's rows of weights in steps of 32 elements. A lane's 16
 * bytes are the left factor of two gemms of tensor cores, whose eight lower rows stay zero; the
 * elements of a step are taken in the order in which the lanes have them, in both factors.
 * float32, and weights of 8 and 4 bits: a warp has a column. Sums are float32, of each warp in
 * order, then over the warps. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/decode/decode_elementwise.cuh"
#include "kernels/cuda/gemm/gemm_fallback.h"
#include "kernels/cuda/gemm/quant_codes.cuh"

namespace mneme::decode {

enum { COLUMNS = 8, K_STEP = 32, PAD = 8, SM_COUNT = 132 };

struct gemm_weights {
    const void *b, *bias, *plus;
    void *c, *sum;
    int64_t b_row, c_row, c_column;    // elements between rows of a, and of b, in c
    int N;
    bool by_row;                       // the bias belongs to rows of a
    gemm::quant_weights quant;         // where the launch is of quantised weights
};

struct alignas(16) gemm_params {
    int M, K, step, n, has_prologue, b_is_const;    // step: from row to row of a in shared memory
    int64_t a_row;
    const void *a;
    int begins[MN_DECODE_GEMMS + 1];          // column tiles in front of each product
    gemm_weights of[MN_DECODE_GEMMS];
    mn_decode_job first;
};

/* A column tile: which product, and its first column. */
struct col_tile {
    const gemm_weights *of;
    int column;

    __device__ col_tile(const gemm_params &p, int at) {
        int i = 0;
        while (at >= p.begins[i + 1]) i++;
        of = &p.of[i];
        column = (at - p.begins[i]) * COLUMNS;
    }
};

/* Sixteen bytes on their way to shared memory; zeros where `there` is false. */
__device__ static void fetch(uint4 *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

__device__ static void cp_async_wait_all(void) {
    asm volatile("cp.async.wait_all;\n" ::: "memory");
}

/* acc (16,8) += (the 8 rows of which a lane has w0 and w1, and 8 of zeros) b */
__device__ static void mma(float (&acc)[4], uint32_t w0, uint32_t w1, uint32_t b0,
                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(w0), "r"(0), "r"(w1), "r"(0), "r"(b0), "r"(b1));
}

/* How a block of WARPS warps multiplies, with DEPTH packs of each lane on their way: w[i][thread],
 * which no other thread looks at. PARTS sums of each number come out, sums[part][row][column]. */
template <typename T, int WARPS, int DEPTH, int BITS = 0>
struct mainloop;

template <int WARPS, int DEPTH>
struct mainloop<mn_bf16, WARPS, DEPTH, 0> {
    static constexpr int PARTS = WARPS, K_TILE = WARPS * DEPTH * K_STEP;    // of K at once
    uint4 (*w)[32 * WARPS];

    /* The elements from `first` on of the column tile's weights. */
    __device__ void load(const gemm_params &p, const col_tile &s, int first) {
        const int lane = threadIdx.x % 32, column = s.column + lane / 4;
        const mn_bf16 *b = (const mn_bf16 *)s.of->b, *row = b + column * s.of->b_row;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int k = place(first, i);
            const bool there = column < s.of->N && k < p.K;
            fetch(&w[i][threadIdx.x], there ? row + k : b, there);
        }
    }

    __device__ static int place(int first, int i) {
        return first + (i * WARPS + threadIdx.x / 32) * K_STEP + threadIdx.x % 4 * 8;
    }

    __device__ void multiply(float *sums, const gemm_params &p, const col_tile &s,
                             const mn_bf16 *x) {
        const int lane = threadIdx.x % 32, row = lane / 4;
        float acc[2][4] = {};
#pragma unroll 1
        for (int first = 0; first < p.K; first += K_TILE) {
            if (first > 0) load(p, s, first);
            cp_async_wait_all();
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                const int k = place(first, i);
                uint4 b = make_uint4(0, 0, 0, 0);
                if (row < p.M && k < p.K) b = *(const uint4 *)(x + row * p.step + k);
                const uint4 a = w[i][threadIdx.x];
                mma(acc[0], a.x, a.y, b.x, b.y);
                mma(acc[1], a.z, a.w, b.z, b.w);
            }
        }
        float *part = sums + threadIdx.x / 32 * (MN_DECODE_MAX_M * COLUMNS);
        const int left = 2 * (lane % 4);    // rows of a that this lane has sums of
        if (left < p.M) part[left * COLUMNS + row] = acc[0][0] + acc[1][0];
        if (left + 1 < p.M) part[(left + 1) * COLUMNS + row] = acc[0][1] + acc[1][1];
    }
};

template <int WARPS, int DEPTH>
struct mainloop<float, WARPS, DEPTH, 0> {
    static constexpr int PARTS = 1, K_TILE = DEPTH * 128;
    static_assert(WARPS == COLUMNS, "a warp has a column");
    uint4 (*w)[32 * WARPS];

    __device__ void load(const gemm_params &p, const col_tile &s, int first) {
        const int column = s.column + threadIdx.x / 32;
        const float *b = (const float *)s.of->b, *row = b + column * s.of->b_row;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int k = place(first, i);
            const bool there = column < s.of->N && k < p.K;
            fetch(&w[i][threadIdx.x], there ? row + k : b, there);
        }
    }

    __device__ static int place(int first, int i) {
        return first + i * 128 + threadIdx.x % 32 * 4;
    }

    __device__ void multiply(float *sums, const gemm_params &p, const col_tile &s, const float *x) {
        float sum[MN_DECODE_MAX_M] = {};
#pragma unroll 1
        for (int first = 0; first < p.K; first += K_TILE) {
            if (first > 0) load(p, s, first);
            cp_async_wait_all();
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                const int k = place(first, i);
                if (k >= p.K) continue;
                const float4 b = *(const float4 *)&w[i][threadIdx.x];
#pragma unroll
                for (int row = 0; row < MN_DECODE_MAX_M; row++) {
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
        for (int row = 0; row < MN_DECODE_MAX_M; row++) {
            const float all = mn_warp_sum(sum[row]);
            if (threadIdx.x % 32 == 0) sums[row * COLUMNS + threadIdx.x / 32] = all;
        }
    }
};

/* Quantised weights: a lane's 16 bytes of codes lie in one group, as K and groups are multiples of
 * 32. */
template <typename T, int WARPS, int DEPTH, int BITS>
struct mainloop_quant {
    static constexpr int N = gemm::quant_codes<BITS>::N, PARTS = 1, K_TILE = DEPTH * 32 * N;
    static_assert(WARPS == COLUMNS, "a warp has a column");
    uint4 (*w)[32 * WARPS];

    __device__ void load(const gemm_params &p, const col_tile &s, int first) {
        const int column = s.column + threadIdx.x / 32;
        const unsigned char *codes = s.of->quant.codes;
        const unsigned char *row = codes + column * s.of->quant.row_bytes;
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int k = place(first, i);
            const bool there = column < s.of->N && k < p.K;
            fetch(&w[i][threadIdx.x], there ? row + k * BITS / 8 : codes, there);
        }
    }

    __device__ static int place(int first, int i) {
        return first + (i * 32 + threadIdx.x % 32) * N;
    }

    /* scale sum(q x) + least sum(x) of a lane's codes and a row. */
    __device__ static float dot(const gemm::quant_codes<BITS> &q, gemm::quant_levels l,
                                const T *x) {
        constexpr int PACK = 16 / (int)sizeof(T);
        float sum = 0.0f, all = 0.0f;
#pragma unroll
        for (int j = 0; j < N; j += PACK) {
            const mn_vec<T, PACK> v = *(const mn_vec<T, PACK> *)(x + j);
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                sum = fmaf(q.at(j + i), mn_float(v.at[i]), sum);
                if (BITS == 4) all += mn_float(v.at[i]);
            }
        }
        return fmaf(l.scale, sum, l.least * all);
    }

    __device__ void multiply(float *sums, const gemm_params &p, const col_tile &s, const T *x) {
        const int column = min(s.column + (int)threadIdx.x / 32, s.of->N - 1);
        float sum[MN_DECODE_MAX_M] = {};
#pragma unroll 1
        for (int first = 0; first < p.K; first += K_TILE) {
            if (first > 0) load(p, s, first);
            gemm::quant_levels l[DEPTH];
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                const int k = min(place(first, i), p.K - 1);
                l[i] = gemm::quant_levels_at<BITS>(s.of->quant, column, k);
            }
            cp_async_wait_all();
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                const int k = place(first, i);
                if (k >= p.K) continue;
                const gemm::quant_codes<BITS> q(w[i][threadIdx.x]);
#pragma unroll
                for (int row = 0; row < MN_DECODE_MAX_M; row++) {
                    if (row < p.M) sum[row] += dot(q, l[i], x + row * p.step + k);
                }
            }
        }
#pragma unroll
        for (int row = 0; row < MN_DECODE_MAX_M; row++) {
            const float all = mn_warp_sum(sum[row]);
            if (threadIdx.x % 32 == 0) sums[row * COLUMNS + threadIdx.x / 32] = all;
        }
    }
};

template <typename T, int WARPS, int DEPTH>
struct mainloop<T, WARPS, DEPTH, 8> : mainloop_quant<T, WARPS, DEPTH, 8> {};
template <typename T, int WARPS, int DEPTH>
struct mainloop<T, WARPS, DEPTH, 4> : mainloop_quant<T, WARPS, DEPTH, 4> {};

/* Rows of a to shared memory: made by the first work, which block 0 stores as well, or loaded. */
template <typename T>
__device__ static void load_rows(T *x, const gemm_params &p, float *smem) {
    constexpr int N = 16 / (int)sizeof(T);
    const int packs = p.K / N;
    if (p.has_prologue) {
        mn_decode_run_op(p.first, { (char *)x, p.K, p.step }, smem);
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

/* What a thread adds to its number of a column tile and where that goes; asked for before the
 * sums are there. */
template <typename T>
struct epilogue {
    T *c, *sum;
    float bias, plus;

    __device__ epilogue(const gemm_params &p, const col_tile &s) {
        const int row = threadIdx.x / COLUMNS, column = s.column + threadIdx.x % COLUMNS;
        c = sum = nullptr;
        bias = plus = 0.0f;
        if (row >= p.M || column >= s.of->N) return;
        const int64_t at = row * s.of->c_row + column * s.of->c_column;
        c = (T *)s.of->c + at;
        bias = mn_get((const T *)s.of->bias, s.of->by_row ? row : column);
        if (!s.of->sum) return;
        sum = (T *)s.of->sum + at;
        plus = mn_get((const T *)s.of->plus, at);
    }

    /* Adds the parts up in order, and stores. */
    template <int PARTS>
    __device__ void finish(const float *sums) const {
        if (!c) return;
        float all = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            all += sums[part * (MN_DECODE_MAX_M * COLUMNS) + threadIdx.x];
        }
        T rounded;
        mn_put(&rounded, all + bias);
        *c = rounded;
        if (sum) mn_put(sum, mn_float(rounded) + plus);
    }
};

/* Blocks that a processor holds: so many bytes of weights are on their way to it. */
template <typename T, int WARPS, int DEPTH>
constexpr int blocks_per_sm = WARPS > 8 ? 2 : sizeof(T) == 2 && DEPTH <= 4 ? 5 : 4;

template <typename T, int WARPS, int DEPTH, int BITS>
__global__ void __launch_bounds__(32 * WARPS, (blocks_per_sm<T, WARPS, DEPTH>))
decode_gemm(const __grid_constant__ gemm_params given) {
    typedef mainloop<T, WARPS, DEPTH, BITS> way;
    extern __shared__ uint4 packs[];    // of weights, then the rows of a
    __shared__ gemm_params p;
    __shared__ float sums[2][way::PARTS * MN_DECODE_MAX_M * COLUMNS], smem[32];
    T *x = (T *)(packs + DEPTH * 32 * WARPS);
    way m;
    m.w = (uint4 (*)[32 * WARPS])packs;
    mn_pdl_launch_dependents();
    mn_load_args_to_smem(&p, given);
    __syncthreads();
    const int n_col_tiles = p.begins[p.n];
    if (p.b_is_const) m.load(p, col_tile(p, blockIdx.x), 0);
    if (p.has_prologue) mn_decode_prefetch(p.first);
    mn_pdl_wait();
    if (!p.b_is_const) m.load(p, col_tile(p, blockIdx.x), 0);
    load_rows(x, p, smem);
    __syncthreads();
    for (int at = blockIdx.x, phase = 0; at < n_col_tiles; at += gridDim.x, phase = 1 - phase) {
        const col_tile s(p, at);
        const epilogue<T> end(p, s);
        m.multiply(sums[phase], p, s, x);
        if (at + (int)gridDim.x < n_col_tiles) m.load(p, col_tile(p, at + gridDim.x), 0);
        __syncthreads();
        end.template finish<way::PARTS>(sums[phase]);
    }
}

template <typename T, int WARPS, int DEPTH, int BITS = 0>
static int launch(const gemm_params &p, cudaStream_t stream) {
    const size_t smem = (size_t)DEPTH * 32 * WARPS * sizeof(uint4) +
                        (size_t)p.M * (size_t)p.step * sizeof(T);
    void (*kernel)(gemm_params) = decode_gemm<T, WARPS, DEPTH, BITS>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (code != cudaSuccess) return code;
    const unsigned blocks = mn_blocks(p.begins[p.n], 1, SM_COUNT * blocks_per_sm<T, WARPS, DEPTH>);
    return mn_launch_pdl(kernel, dim3(blocks), 32 * WARPS, smem, stream, p);
}

/* By how a processor's lanes are used best for rows of that length. */
static int launch_by_k(const gemm_params &p, mn_dtype dtype, int bits, cudaStream_t on) {
    if (bits == 8) return dtype == MN_F32 ? launch<float, 8, 4, 8>(p, on)
                                          : launch<mn_bf16, 8, 4, 8>(p, on);
    if (bits == 4) return dtype == MN_F32 ? launch<float, 8, 2, 4>(p, on)
                                          : launch<mn_bf16, 8, 2, 4>(p, on);
    if (dtype == MN_F32) return launch<float, 8, 8>(p, on);
    if (p.K <= 8 * 4 * K_STEP) return launch<mn_bf16, 8, 4>(p, on);
    if (p.K <= 8 * 8 * K_STEP) return launch<mn_bf16, 8, 8>(p, on);
    return launch<mn_bf16, 16, 8>(p, on);
}

/* What few rows and few columns require alike; `few` rows are kept in shared memory. */
static bool takes(const mn_gemm_problem *w, int64_t few, int64_t many) {
    if (w->quant && w->K % 32 != 0) return false;
    const int64_t pack = w->dtype == MN_F32 ? 4 : 8;
    const int64_t most = (int64_t)128 * 1024 / (w->dtype == MN_F32 ? 4 : 2);
    return few <= MN_DECODE_MAX_M && many < (1 << 30) && w->b_transposed && !w->a_transposed &&
           !w->accumulate && w->c_dtype == w->dtype && w->K > 0 && w->K % pack == 0 &&
           w->a_row % pack == 0 && (w->quant || w->b_row % pack == 0) &&
           (uintptr_t)w->a % 16 == 0 && (uintptr_t)w->b % 16 == 0 && few * (w->K + PAD) <= most;
}

extern "C" bool mn_decode_gemms_supported(const mn_gemm_problem *w) {
    return takes(w, w->M, w->N) && w->c_row == w->N;
}

extern "C" bool mn_gemm_small_n_supported(const mn_gemm_problem *w) {
    return takes(w, w->N, w->M);
}

/* c' = b a': the columns are the few rows. */
extern "C" int mn_gemm_small_n(const mn_gemm_problem *w, void *stream) {
    gemm_params p = {};
    p.M = (int)w->N, p.K = (int)w->K, p.step = p.K + PAD, p.n = 1;
    p.a = w->b, p.a_row = w->b_row;
    p.of[0] = { w->a, w->bias, NULL, w->c, NULL, w->a_row, 1, w->c_row, (int)w->M, true, {} };
    p.begins[1] = (int)mn_ceil_div(w->M, COLUMNS);
    return launch_by_k(p, w->dtype, 0, (cudaStream_t)stream);
}

extern "C" int mn_decode_run_gemms(const mn_decode_gemms *given, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    gemm_params p = {};
    p.M = (int)given->M, p.K = (int)given->K, p.step = (int)given->K + PAD, p.n = given->n;
    p.a = given->a, p.a_row = given->a_row, p.b_is_const = given->b_is_const;
    p.has_prologue = given->first != NULL;
    if (given->first) p.first = mn_decode_job_of(*given->first);
    for (int i = 0; i < given->n; i++) {
        const mn_decode_gemm &g = given->of[i];
        p.of[i] = { g.b, g.bias, g.plus, g.c, g.sum, g.b_row, g.N, 1, (int)g.N, false, {} };
        if (g.quant) p.of[i].quant = gemm::quant_weights_of(g.quant);
        p.begins[i + 1] = p.begins[i] + (int)mn_ceil_div(g.N, COLUMNS);
    }
    return launch_by_k(p, given->dtype, given->of[0].quant ? given->of[0].quant->bits : 0, on);
}

}    // namespace mneme::decode
