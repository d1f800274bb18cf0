/* mma_tf32.cuh - products of tf32 on tensor cores, and numbers of float32 rounded to it. */
#ifndef MN_KERNELS_CUDA_PRIM_MMA_TF32_CUH
#define MN_KERNELS_CUDA_PRIM_MMA_TF32_CUH

namespace mneme {

/* x to ten bits behind the first, halves away from zero. */
__device__ inline unsigned mn_tf32(float x) {
    unsigned bits = 0;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
    return bits;
}

/* (16,8) += (16,8) (8,8) */
__device__ inline void mn_mma_tf32_k8(float (&sum)[4], const unsigned (&a)[4], unsigned b0,
                                      unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

}    // namespace mneme

#endif
