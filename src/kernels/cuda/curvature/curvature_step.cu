/* curvature_step.cu - one token of curvature (see ref/curvature.c), states in place.
 *
 *   R += k k'     s += k     qt = q - gamma / n (R q - (s.q / n) s)
 *
 * A block has a head, a warp one block of 32 x 32 of R at a time with the one across the diagonal,
 * as R counts by its symmetric part. What such a block adds to R q goes to a row of shared memory
 * that no other one writes. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/curvature/curvature.cuh"

namespace mneme::curvature {

enum { STEP_WARPS = 10, STEP_THREADS = 32 * STEP_WARPS, STEP_SIDE = 32, STEP_PITCH = 33 };

struct step_smem {
    float q[MN_CURVE_WIDEST], k[MN_CURVE_WIDEST];
    float reads[MN_CURVE_WIDEST / STEP_SIDE][MN_CURVE_WIDEST];
    float square[STEP_WARPS][STEP_SIDE * STEP_PITCH];
    float sums[32];
};

/* Rows [i, i + 32) and columns [j, j + 32) of R, and their like across the diagonal. */
__device__ static void step_square(step_smem &smem, const float *from, float *to, int i, int j,
                                   int K) {
    const int lane = threadIdx.x % 32;
    float *square = smem.square[threadIdx.x / 32];
    float here[STEP_SIDE], reads = 0.0f, across = 0.0f;
#pragma unroll
    for (int r = 0; r < STEP_SIDE; r++) {
        const bool inside = from && i + r < K && j + lane < K;
        here[r] = inside ? from[(i + r) * K + j + lane] : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < STEP_SIDE; r++) {
        const bool inside = from && j + r < K && i + lane < K;
        square[r * STEP_PITCH + lane] = inside ? from[(j + r) * K + i + lane] : 0.0f;
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < STEP_SIDE; r++) {
        const float even = 0.5f * (here[r] + square[lane * STEP_PITCH + r]);
        here[r] = fmaf(smem.k[i + r], smem.k[j + lane], even);
        across = fmaf(here[r], smem.q[i + r], across);
        if (to && i + r < K && j + lane < K) to[(i + r) * K + j + lane] = here[r];
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < STEP_SIDE; r++) square[r * STEP_PITCH + lane] = here[r];
    __syncwarp();
#pragma unroll
    for (int c = 0; c < STEP_SIDE; c++) {
        reads = fmaf(square[lane * STEP_PITCH + c], smem.q[j + c], reads);
    }
    smem.reads[j / STEP_SIDE][i + lane] = reads;
    if (i == j) return;
    smem.reads[i / STEP_SIDE][j + lane] = across;
#pragma unroll
    for (int r = 0; r < STEP_SIDE; r++) {
        if (to && j + r < K && i + lane < K) {
            to[(j + r) * K + i + lane] = square[lane * STEP_PITCH + r];
        }
    }
    __syncwarp();
}

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
curvature_step_kernel(const __grid_constant__ mn_curvature_args p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    step_smem &smem = *(step_smem *)bytes;
    const int64_t h = blockIdx.x % p.call.H, n = blockIdx.x / p.call.H;
    const int K = (int)p.call.K, sides = (K + STEP_SIDE - 1) / STEP_SIDE;
    const T *q = mn_row<T>(p.q, n, 0, h), *k = mn_row<T>(p.k, n, 0, h);
    const float *R0 = mn_row<float>(p.kk0, n, 0, h), *s0 = mn_row<float>(p.ks0, n, 0, h);
    float *R = mn_row<float>(p.kk, n, 0, h), *s = mn_row<float>(p.ks, n, 0, h);
    T *qt = mn_row<T>(p.qt, n, 0, h);
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    const float gamma = mn_float(*mn_row<T>(p.gamma, n, 0, h));
    const float each = (float)(1.0 / (mn_curve_before(p, n) + 1.0));
    float mean = 0.0f;
    for (int i = threadIdx.x; i < sides * STEP_SIDE; i += STEP_THREADS) {
        smem.q[i] = i < K ? mn_float(q[i]) : 0.0f;
        smem.k[i] = i < K ? mn_float(k[i]) : 0.0f;
    }
    __syncthreads();
    for (int at = threadIdx.x / 32; at < sides * (sides + 1) / 2; at += STEP_WARPS) {
        int row = 0, column = at;
        while (column >= sides - row) column -= sides - row, row++;
        step_square(smem, R0, R, STEP_SIDE * row, STEP_SIDE * (row + column), K);
    }
    const int i = threadIdx.x;
    const float sum = i < K ? mn_get(s0, i) + smem.k[i] : 0.0f;
    mean = each * mn_group_sum<STEP_THREADS>(i < K ? sum * smem.q[i] : 0.0f, smem.sums);
    if (i >= K) return;
    if (s) s[i] = sum;
    float read = -mean * sum;
    for (int side = 0; side < sides; side++) read += smem.reads[side][i];
    if (qt) mn_put(qt + i, fmaf(-gamma * each, read, smem.q[i]));
}

MN_CUDA_PLAN(curvature_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(curvature_step) {
    (void)shared;
    const mn_curvature_args *p = (const mn_curvature_args *)args;
    const auto kernel = p->call.dtype == MN_BF16 ? curvature_step_kernel<mn_bf16>
                                                 : curvature_step_kernel<float>;
    const int64_t blocks = p->call.B * p->call.H;
    if (p->call.K > MN_CURVE_WIDEST || blocks > INT32_MAX) return cudaErrorNotSupported;
    if (blocks == 0) return cudaSuccess;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(step_smem));
    if (code != cudaSuccess) return code;
    return mn_launch_pdl(kernel, dim3((unsigned)blocks), STEP_THREADS, sizeof(step_smem),
                           (cudaStream_t)stream, *p);
}

}    // namespace mneme::curvature
