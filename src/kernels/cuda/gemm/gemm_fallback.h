/* gemm_fallback.h - the matrix product for machines without cuBLASLt, and for shapes that it has no
 * algorithm for. */
#ifndef MN_KERNELS_CUDA_GEMM_GEMM_FALLBACK_H
#define MN_KERNELS_CUDA_GEMM_GEMM_FALLBACK_H

#include "kernels/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launches it; returns the cudaError_t. */
int mn_gemm_simt(const mn_gemm_problem *work, void *stream);

/* The same for a few rows and a weight as layers store it, where it is faster than the library:
 * gemv.cu. */
bool mn_gemm_small_m_supported(const mn_gemm_problem *work);
int mn_gemm_small_m(const mn_gemm_problem *work, void *stream);

/* Likewise for weights of a few rows: decode_gemv.cu. */
bool mn_gemm_small_n_supported(const mn_gemm_problem *work);
int mn_gemm_small_n(const mn_gemm_problem *work, void *stream);

/* Products with weights of 8 or 4 bits: gemv_quant.cu. Few rows of a are multiplied at once; for
 * more, rows of the weights become numbers of `dtype` first, (n_rows, cols): those of `index`, or,
 * where that is NULL, from `first` on. */
bool mn_gemm_quant_few(const mn_gemm_problem *work);
int mn_quant_rows_cuda(const mn_quant *q, mn_dtype dtype, void *to, const int32_t *index,
                       int64_t first, int64_t n_rows, void *stream);

#ifdef __cplusplus
}
#endif

#endif
