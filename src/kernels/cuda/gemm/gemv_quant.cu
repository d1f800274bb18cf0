/* gemv_quant.cu - products with weights of 8 or 4 bits (kernels/quant.h), and such weights as
 * numbers.
 *
 *   few rows    c (M,N) = a (M,cols) W' + bias + onto (a residual), W (N,cols): a warp has one
 *               column, 4 rows; lanes load 16 bytes of codes: scale sum(q a) + least sum(a)
 *   unpack      rows of W as float32 or bf16, for a product of many rows
 *   gather      rows of W by index: the embedding */
#include "kernels/cuda/gemm/gemm_fallback.h"
#include "kernels/cuda/gemm/quant_codes.cuh"
#include "kernels/cuda/prim/common.cuh"

namespace mneme::gemm {

enum { QUANT_THREADS = 128, QUANT_WARPS = QUANT_THREADS / 32, QUANT_DEPTH = 2, QUANT_ROWS = 8 };

/* Numbers [k, k + N) of a row, zeros from `cols` on. */
template <int N, typename T>
__device__ static void load_row(float (&x)[N], const T *row, int k, int cols, bool packed) {
    constexpr int PACK = 16 / (int)sizeof(T);
    if (packed && k + N <= cols) {
#pragma unroll
        for (int i = 0; i < N; i += PACK) {
            const mn_vec<T, PACK> v = *(const mn_vec<T, PACK> *)(row + k + i);
#pragma unroll
            for (int j = 0; j < PACK; j++) x[i + j] = mn_float(v.at[j]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = k + i < cols ? mn_float(row[k + i]) : 0.0f;
}

/* What a launch multiplies a by: warps [begins[i], begins[i + 1]) have the columns of weights i. */
struct quant_products {
    int n, M, cols, packed, begins[MN_GEMM_QUANTS + 1];
    int64_t a_row, c_row[MN_GEMM_QUANTS];
    const void *a, *bias[MN_GEMM_QUANTS], *onto[MN_GEMM_QUANTS];
    void *c[MN_GEMM_QUANTS];
    bool accumulate[MN_GEMM_QUANTS];
    quant_weights w[MN_GEMM_QUANTS];
};

template <int BITS, typename T, typename C, int ROWS>
__global__ void __launch_bounds__(QUANT_THREADS) quant_gemv(const __grid_constant__
                                                            quant_products p) {
    constexpr int N = quant_codes<BITS>::N;
    const int at = blockIdx.x * QUANT_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (at >= p.begins[p.n]) return;
    int which = 0;
    while (at >= p.begins[which + 1]) which++;
    const quant_weights &w = p.w[which];
    const int64_t column = at - p.begins[which];
    const unsigned char *codes = w.codes + column * w.row_bytes;
    float sum[ROWS] = {};
    for (int first = lane * N; first < p.cols; first += 32 * QUANT_DEPTH * N) {
        uint4 four[QUANT_DEPTH];
        quant_levels l[QUANT_DEPTH];
#pragma unroll
        for (int i = 0; i < QUANT_DEPTH; i++) {
            const int k = first + 32 * i * N;
            if (k >= p.cols) continue;
            four[i] = *(const uint4 *)(codes + k * BITS / 8);
            l[i] = quant_levels_at<BITS>(w, column, k);
        }
#pragma unroll
        for (int i = 0; i < QUANT_DEPTH; i++) {
            const int k = first + 32 * i * N;
            if (k >= p.cols) continue;
            const quant_codes<BITS> q(four[i]);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                float x[N], dot = 0.0f, all = 0.0f;
                load_row<N>(x, (const T *)p.a + row * p.a_row, k, p.cols, p.packed);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    dot = fmaf(q.at(j), x[j], dot);
                    if (BITS == 4) all += x[j];
                }
                sum[row] = fmaf(l[i].scale, dot, fmaf(l[i].least, all, sum[row]));
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const float all = mn_warp_sum(sum[row]);
        if (lane != 0) continue;
        const int64_t to = row * p.c_row[which] + column;
        C *c = (C *)p.c[which] + to;
        const float base = p.accumulate[which] ? mn_float(*c) : 0.0f;
        const float onto = p.onto[which] ? mn_float(((const C *)p.onto[which])[to]) : 0.0f;
        mn_put(c, base + onto + all + mn_get((const C *)p.bias[which], column));
    }
}

template <int BITS, typename T, typename C>
static int launch_rows(const quant_products &p, cudaStream_t on) {
    const unsigned blocks = mn_blocks(p.begins[p.n], QUANT_WARPS);
    switch (p.M) {
    case 1: quant_gemv<BITS, T, C, 1><<<blocks, QUANT_THREADS, 0, on>>>(p); break;
    case 2: quant_gemv<BITS, T, C, 2><<<blocks, QUANT_THREADS, 0, on>>>(p); break;
    case 3: quant_gemv<BITS, T, C, 3><<<blocks, QUANT_THREADS, 0, on>>>(p); break;
    default: quant_gemv<BITS, T, C, 4><<<blocks, QUANT_THREADS, 0, on>>>(p); break;
    }
    return mn_launch_status();
}

template <int BITS>
static int launch_types(const quant_products &p, const mn_gemm_problem *of, cudaStream_t on) {
    if (of->dtype == MN_F32) return launch_rows<BITS, float, float>(p, on);
    return of->c_dtype == MN_BF16 ? launch_rows<BITS, mn_bf16, mn_bf16>(p, on)
                                  : launch_rows<BITS, mn_bf16, float>(p, on);
}

/* Rows [row, row + at most 4) of the products. */
static quant_products rows_of(const mn_gemm_problem *works, int n, int64_t row) {
    const mn_gemm_problem *of = &works[0];
    const size_t item = of->dtype == MN_F32 ? 4 : 2, c_item = of->c_dtype == MN_F32 ? 4 : 2;
    quant_products p = {};
    p.n = n, p.M = (int)min(of->M - row, (int64_t)4), p.cols = (int)of->K, p.a_row = of->a_row;
    p.a = (const char *)of->a + row * of->a_row * item;
    p.packed = (uintptr_t)p.a % 16 == 0 && of->a_row * item % 16 == 0;
    for (int i = 0; i < n; i++) {
        const mn_gemm_problem *one = &works[i];
        const size_t to = row * one->c_row * c_item;
        p.begins[i + 1] = p.begins[i] + (int)one->N;
        p.c_row[i] = one->c_row, p.bias[i] = one->bias, p.accumulate[i] = one->accumulate;
        p.c[i] = (char *)one->c + to;
        p.onto[i] = one->onto ? (const char *)one->onto + to : NULL;
        p.w[i] = quant_weights_of(one->quant);
    }
    return p;
}

/* Four rows at a time: a row's bits do not depend on the others. */
extern "C" int mn_gemm_quant_several(const mn_gemm_problem *works, int n, void *stream) {
    int status = 0;
    for (int64_t row = 0; status == 0 && row < works[0].M; row += 4) {
        const quant_products p = rows_of(works, n, row);
        status = works[0].quant->bits == 8 ? launch_types<8>(p, works, (cudaStream_t)stream)
                                           : launch_types<4>(p, works, (cudaStream_t)stream);
    }
    return status;
}

extern "C" bool mn_gemm_quant_few(const mn_gemm_problem *p) {
    return p->M <= QUANT_ROWS;
}

/* ---- as numbers ------------------------------------------------------------------------------ */

enum { UNPACK_N = 8, UNPACK_THREADS = 256 };

/* Row i is W's row `index[i]`, or first + i where there is no index; a thread has eight inputs. */
template <int BITS, typename T>
__global__ void __launch_bounds__(UNPACK_THREADS) quant_unpack(const __grid_constant__
                                                               quant_weights w, T *to,
                                                               const int32_t *index, int64_t first,
                                                               int64_t n_rows, int packs) {
    const int64_t at = blockIdx.x * (int64_t)UNPACK_THREADS + threadIdx.x, i = at / packs;
    if (i >= n_rows) return;
    const int k = (int)(at - i * packs) * UNPACK_N;
    const int64_t row = index ? index[i] : first + i;
    const quant_levels l = quant_levels_at<BITS>(w, row, k);
    const unsigned *words = (const unsigned *)(w.codes + row * w.row_bytes + k * BITS / 8);
    const quant_codes<BITS> q(make_uint4(words[0], BITS == 8 ? words[1] : 0, 0, 0));
    mn_vec<T, UNPACK_N> y;
#pragma unroll
    for (int j = 0; j < UNPACK_N; j++) {
        const float x = BITS == 8 ? l.scale * q.at(j) : fmaf(l.scale, q.at(j), l.least);
        mn_put(&y.at[j], x);
    }
    T *out = to + i * w.cols + k;
    if (w.cols % UNPACK_N == 0) {
        *(mn_vec<T, UNPACK_N> *)out = y;
        return;
    }
    for (int j = 0; j < UNPACK_N && k + j < w.cols; j++) out[j] = y.at[j];
}

template <int BITS>
static int unpack(const mn_quant *q, mn_dtype dtype, void *to, const int32_t *index, int64_t first,
                  int64_t n_rows, cudaStream_t on) {
    const quant_weights w = quant_weights_of(q);
    const int packs = (int)mn_ceil_div(q->cols, UNPACK_N);
    const unsigned blocks = mn_blocks(n_rows * packs, UNPACK_THREADS);
    if (dtype == MN_F32) {
        quant_unpack<BITS, float><<<blocks, UNPACK_THREADS, 0, on>>>(w, (float *)to, index, first,
                                                                     n_rows, packs);
    } else {
        quant_unpack<BITS, mn_bf16><<<blocks, UNPACK_THREADS, 0, on>>>(w, (mn_bf16 *)to, index,
                                                                       first, n_rows, packs);
    }
    return mn_launch_status();
}

extern "C" int mn_quant_rows_cuda(const mn_quant *q, mn_dtype dtype, void *to, const int32_t *index,
                                  int64_t first, int64_t n_rows, void *stream) {
    if (n_rows == 0) return 0;
    const cudaStream_t on = (cudaStream_t)stream;
    return q->bits == 8 ? unpack<8>(q, dtype, to, index, first, n_rows, on)
                        : unpack<4>(q, dtype, to, index, first, n_rows, on);
}

}    // namespace mneme::gemm
