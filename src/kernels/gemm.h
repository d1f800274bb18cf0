/* gemm.h - matrix gemms of a GPU: cuBLASLt where the machine has it, loaded at the first
 * product, else a kernel of our own. The megakernel neither needs nor carries the library. */
#ifndef MN_KERNELS_GEMM_H
#define MN_KERNELS_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/quant.h"
#include "mneme.h"

/* c = a b, c += a b or c = onto + a b, plus the row `bias` (in c's type; NULL: none): a (M,K), b
 * (K,N), c (M,N), a and b stored transposed or not, in rows that lie *_row apart; `onto` is laid
 * out as c, in its type. `dtype` is that of a and b, MN_F32 or MN_BF16; c has it too, or MN_F32.
 * Sums are float32. A row's bits do not depend on how many rows there are unless a is transposed,
 * the library has different algorithms for few and for many rows (seen where N or K are a few
 * elements), or this is a step of decoding, where few rows are multiplied faster in another
 * order. `alike`: rows are tokens of sequences that decode together, any number of them, and get
 * the same bits whatever that is. `b_is_old`: no launch that may still be at work writes b. */
typedef struct mn_gemm_problem {
    mn_dtype dtype, c_dtype;
    const void *a, *b, *bias, *onto;
    void *c;
    int64_t M, N, K, a_row, b_row, c_row;
    bool a_transposed, b_transposed, accumulate, step, alike, b_is_old;
    const mn_quant *quant;    // b transposed in 8 or 4 bits, in place of b; NULL: b
    void *gated;              // of mn_gemm_rows; NULL: none
    int64_t gated_row;
    int gate;                 // mn_unary
} mn_gemm_problem;

/* Bytes of work space that each product may use, and that weights of a quantised one, a piece at a
 * time, become numbers of a's type in. */
enum { MN_GEMM_WORKSPACE = 32 << 20, MN_GEMM_UNPACKED = 32 << 20 };

static inline size_t mn_gemm_workspace(const mn_gemm_problem *p) {
    return (size_t)MN_GEMM_WORKSPACE + (p->quant ? (size_t)MN_GEMM_UNPACKED : 0);
}

/* Up to so many products of one a, of up to 8 rows, with quantised weights of as many bits, in one
 * launch; c_dtype is the same too. Returns 0 or a cudaError_t. */
enum { MN_GEMM_QUANTS = 8 };
#ifdef __cplusplus
extern "C"
#endif
int mn_gemm_quant_several(const mn_gemm_problem *works, int n, void *stream);

/* Products for the rows of sequences that decode together (`alike`), in bf16: up to so many of one
 * a, into c of one type, in one launch. Where `gated` (M, N/2) is there, it becomes f(x) y of the
 * two halves x, y of each row of c, as they are stored; N is a multiple of 64 then. Returns 0 or a
 * cudaError_t. */
enum { MN_GEMM_ROWS = 4 };
#ifdef __cplusplus
extern "C" {
#endif
bool mn_gemm_rows_supported(const mn_gemm_problem *work);
int mn_gemm_rows(const mn_gemm_problem *works, int n, void *stream);
#ifdef __cplusplus
}
#endif

/* The library and the algorithms it has chosen so far, one for each shape; for one thread. NULL
 * when memory is out. The same shapes at addresses of the same alignment give the same bits. */
typedef struct mn_gemm_handle mn_gemm_handle;
mn_gemm_handle *mn_gemm_create(void);
void mn_gemm_destroy(mn_gemm_handle *gemms);    // NULL accepted

/* Whether cuBLASLt is there. */
bool mn_gemm_has_cublaslt(mn_gemm_handle *gemms);

/* Puts the product on `stream`, and returns 0 or a cudaError_t. M and N are not 0. */
int mn_gemm_run(mn_gemm_handle *gemms, const mn_gemm_problem *work, void *space, void *stream);

#endif
