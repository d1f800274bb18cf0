/* attention_mma.cuh - instructions of warps that products by mma.sync are made of. Of 16 rows and
 * eight columns of sums lane l has rows l / 4 and that plus 8, columns l % 4 * 2 and the next. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_MMA_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_MMA_CUH

#include "kernels/cuda/prim/common.cuh"

namespace mneme::attention {

/* Four matrices of 8 x 8, of which each lane gives a row; TRANS exchanges their axes. */
template <bool TRANS>
__device__ inline void mn_ldmatrix_x4(uint32_t (&r)[4], uint32_t at) {
    if (TRANS) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    }
}

/* d[0..3] += a b for 16 rows and 8 columns over a depth of 16 */
__device__ inline void mn_mma_m16n8k16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}    // namespace mneme::attention

#endif
