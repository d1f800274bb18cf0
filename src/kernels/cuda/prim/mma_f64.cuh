/* mma_f64.cuh - products of doubles on tensor cores, and a reciprocal without a slow path. */
#ifndef MN_KERNELS_CUDA_PRIM_MMA_F64_CUH
#define MN_KERNELS_CUDA_PRIM_MMA_F64_CUH

namespace mneme {

/* (8,8) += (8,4) (4,8) */
__device__ inline void mn_mma_f64_k4(double (&c)[2], double a, double b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(c[0]), "+d"(c[1]) : "d"(a), "d"(b));
}

/* (16,8) += (16,8) (8,8) and (16,16) (16,8). Lane l gives a[2 i + m]: row l / 4 + 8 m, column l % 4
 * + 4 i, b[i]: row l % 4 + 4 i, column l / 4; c[m]: rows as of a, columns 2 (l % 4) and the next.
 * sm_90 has such products, many times as fast as the small one; before it there is only that. */
__device__ inline void mn_mma_f64_k8(double (&c)[2][2], const double (&a)[4],
                                     const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+d"(c[0][0]), "+d"(c[0][1]), "+d"(c[1][0]), "+d"(c[1][1])
                 : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
    for (int i = 0; i < 2; i++) mn_mma_f64_k4(c[0], a[2 * i], b[i]),
        mn_mma_f64_k4(c[1], a[2 * i + 1], b[i]);
#endif
}

__device__ inline void mn_mma_f64_k16(double (&c)[2][2], const double (&a)[8],
                                     const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
                 : "+d"(c[0][0]), "+d"(c[0][1]), "+d"(c[1][0]), "+d"(c[1][1])
                 : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]),
                   "d"(a[7]), "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
#else
    for (int i = 0; i < 4; i++) mn_mma_f64_k4(c[0], a[2 * i], b[i]),
        mn_mma_f64_k4(c[1], a[2 * i + 1], b[i]);
#endif
}

/* 1 / x to a rounding or two, of normal numbers whose reciprocal is one too. The approximation has
 * 20 bits, of which the one cubic step makes 60. */
__device__ inline double mn_rcp_f64(double x) {
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    const double off = fma(-x, y, 1.0);
    return fma(y, fma(off, off, off), y);
}

}    // namespace mneme

#endif
