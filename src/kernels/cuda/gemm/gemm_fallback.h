/* gemm_fallback.h - the matrix product for machines without cuBLASLt, and for shapes that it has no
 * algorithm for. */
#ifndef MN_KERNELS_CUDA_GEMM_GEMM_FALLBACK_H
#define MN_KERNELS_CUDA_GEMM_GEMM_FALLBACK_H

#include "kernels/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launches it; returns the cudaError_t. */
int mn_product_plain(const mn_product_work *work, void *stream);

/* The same for a few rows and a weight as layers store it, where it is faster than the library:
 * gemv.cu. */
bool mn_product_few_serves(const mn_product_work *work);
int mn_product_few(const mn_product_work *work, void *stream);

/* Likewise for weights of a few rows: decode_gemv.cu. */
bool mn_few_columns_serve(const mn_product_work *work);
int mn_few_columns(const mn_product_work *work, void *stream);

#ifdef __cplusplus
}
#endif

#endif
