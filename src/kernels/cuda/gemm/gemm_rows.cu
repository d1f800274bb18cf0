/* gemm_rows.cu - c = a b' (+ c, + onto, + bias) in bf16 for the rows of sequences that decode
 * together: any number of them, each with the same bits whatever that is.
 *
 * A block has BN rows of the weight b and BM rows of a; both come through shared memory by
 * cp.async, 64 of K a stage, several stages ahead. The weight is the left factor of the tensor
 * cores, so that eight rows of a are a tile. An element is one accumulator that takes K sixteen at
 * a time, in order, whatever BN and BM are. Weights that are older than the launch in front are
 * asked for before it has ended. Several weights of one a are one launch. */
#include "kernels/cuda/gemm/gemm_fallback.h"
#include "kernels/cuda/prim/pdl.cuh"

namespace mneme::gemm {

enum { ROWS_THREADS = 128, ROWS_WARPS = 4, ROWS_K = 64, ROWS_BYTES = 2 * ROWS_K, ROWS_VEC = 8 };

template <int BN, int BM>
struct rows_tile {
    static constexpr int warps_n = BN / 16, warps_m = ROWS_WARPS / warps_n;
    static constexpr int tiles = BM / 8, each = (tiles + warps_m - 1) / warps_m;
    static constexpr bool spare = tiles < warps_m;    // warps without a tile
    static constexpr int stage = (BN + BM) * ROWS_BYTES;
    static constexpr int stages = stage <= 6144 ? 8 : stage <= 12288 ? 6 : 4;
    static constexpr int smem = stages * stage;
    static_assert(BN <= 64 && smem >= BM * (BN + 1) * 4, "sums fit where the factors were");
};

/* Sixteen bytes on their way to shared memory; zeros where `there` is false. */
__device__ static void rows_fetch(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

/* `count` rows of ROWS_K elements of K from k on; 16-byte vectors are swizzled by the row. */
template <int COUNT>
__device__ static void rows_load(uint32_t to, const mn_bf16 *from, int64_t row0, int64_t n_rows,
                                 int64_t stride, int64_t k, int64_t K) {
    static_assert(COUNT * ROWS_VEC % ROWS_THREADS == 0 || COUNT == 8, "whole rounds");
#pragma unroll
    for (int i = threadIdx.x; i < COUNT * ROWS_VEC; i += ROWS_THREADS) {
        const int row = i / ROWS_VEC, vec = i % ROWS_VEC;
        const int64_t at = row0 + row, element = k + vec * 8;
        const bool there = at < n_rows && element < K;
        rows_fetch(to + row * ROWS_BYTES + (vec ^ (row & 7)) * 16,
                   there ? from + at * stride + element : from, there);
    }
}

__device__ static void rows_ldmatrix(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

__device__ static void rows_mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A stage: this warp's 16 rows of the weight with its tiles of 8 rows of a. */
template <int BN, int BM>
__device__ static void rows_multiply(float (&acc)[rows_tile<BN, BM>::each][4], uint32_t weights,
                                     uint32_t rows) {
    using tile = rows_tile<BN, BM>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int wn = warp % tile::warps_n, first = warp / tile::warps_n * tile::each;
    uint32_t a[ROWS_K / 16][4];
    const int row = wn * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < ROWS_K / 16; k++) {
        rows_ldmatrix(a[k], weights + row * ROWS_BYTES + ((2 * k + lane / 16) ^ (row & 7)) * 16);
    }
#pragma unroll
    for (int i = 0; i < tile::each; i++) {
        if (tile::spare && first + i >= tile::tiles) continue;
        const uint32_t at = rows + ((first + i) * 8 + lane % 8) * ROWS_BYTES;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t b[4];
            rows_ldmatrix(b, at + ((4 * half + lane / 8) ^ (lane % 8)) * 16);
            rows_mma(acc[i], a[2 * half], b[0], b[1]);
            rows_mma(acc[i], a[2 * half + 1], b[2], b[3]);
        }
    }
}

/* Sums through shared memory, so that neighbours along c's rows are stored together. */
template <int BN, int BM, typename C>
__device__ static void rows_store(const mn_gemm_problem &w, float *sums,
                                  const float (&acc)[rows_tile<BN, BM>::each][4], int64_t n0,
                                  int64_t m0) {
    using tile = rows_tile<BN, BM>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n = warp % tile::warps_n * 16 + lane / 4, first = warp / tile::warps_n * tile::each;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < tile::each; i++) {
        if (tile::spare && first + i >= tile::tiles) continue;
        float *to = sums + ((first + i) * 8 + lane % 4 * 2) * (BN + 1) + n;
        to[0] = acc[i][0], to[BN + 1] = acc[i][1];
        to[8] = acc[i][2], to[BN + 9] = acc[i][3];
    }
    __syncthreads();
    const C *base = (const C *)(w.accumulate ? w.c : w.onto), *bias = (const C *)w.bias;
    for (int i = threadIdx.x; i < BN * BM; i += ROWS_THREADS) {
        const int64_t m = m0 + i / BN, column = n0 + i % BN;
        if (m >= w.M || column >= w.N) continue;
        const int64_t at = m * w.c_row + column;
        mn_put((C *)w.c + at, mn_get(base, at) + sums[i / BN * (BN + 1) + i % BN] +
                                  mn_get(bias, column));
    }
}

/* Problem i has column tiles [begins[i], begins[i + 1]). */
struct rows_params {
    int n, begins[MN_GEMM_ROWS + 1];
    mn_gemm_problem of[MN_GEMM_ROWS];
};

template <int BN, int BM, typename C>
__global__ void __launch_bounds__(ROWS_THREADS)
gemm_rows(const __grid_constant__ rows_params p) {
    using tile = rows_tile<BN, BM>;
    extern __shared__ __align__(128) unsigned char bytes[];
    const uint32_t smem = (uint32_t)__cvta_generic_to_shared(bytes);
    int which = 0;
    while ((int)blockIdx.x >= p.begins[which + 1]) which++;
    const mn_gemm_problem &w = p.of[which];
    const int64_t n0 = ((int)blockIdx.x - p.begins[which]) * (int64_t)BN;
    const int64_t m0 = blockIdx.y * (int64_t)BM;
    const int steps = (int)((w.K + ROWS_K - 1) / ROWS_K);
    const mn_bf16 *a = (const mn_bf16 *)w.a, *b = (const mn_bf16 *)w.b;
    const auto stage_of = [&](int step) { return smem + step % tile::stages * tile::stage; };
    const auto weights = [&](int step) {
        rows_load<BN>(stage_of(step), b, n0, w.N, w.b_row, (int64_t)step * ROWS_K, w.K);
    };
    const auto rows = [&](int step) {
        rows_load<BM>(stage_of(step) + BN * ROWS_BYTES, a, m0, w.M, w.a_row,
                      (int64_t)step * ROWS_K, w.K);
        asm volatile("cp.async.commit_group;\n" ::: "memory");
    };
    mn_pdl_launch_dependents();
    for (int s = 0; w.b_is_old && s < tile::stages - 1 && s < steps; s++) weights(s);
    mn_pdl_wait();
    for (int s = 0; s < tile::stages - 1; s++) {
        if (s < steps && !w.b_is_old) weights(s);
        if (s < steps) rows(s);
        else asm volatile("cp.async.commit_group;\n" ::: "memory");
    }
    float acc[tile::each][4] = {};
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
        asm volatile("cp.async.wait_group %0;\n" :: "n"(tile::stages - 2) : "memory");
        __syncthreads();
        const int next = s + tile::stages - 1;
        if (next < steps) {
            weights(next);
            rows(next);
        } else {
            asm volatile("cp.async.commit_group;\n" ::: "memory");
        }
        rows_multiply<BN, BM>(acc, stage_of(s), stage_of(s) + BN * ROWS_BYTES);
    }
    asm volatile("cp.async.wait_all;\n" ::: "memory");
    rows_store<BN, BM, C>(w, (float *)bytes, acc, n0, m0);
}

template <int BN, int BM, typename C>
static int rows_launch(const mn_gemm_problem *works, int n, cudaStream_t on) {
    using tile = rows_tile<BN, BM>;
    const cudaError_t code = cudaFuncSetAttribute(
        gemm_rows<BN, BM, C>, cudaFuncAttributeMaxDynamicSharedMemorySize, tile::smem);
    if (code != cudaSuccess) return (int)code;
    rows_params p = {};
    p.n = n;
    for (int i = 0; i < n; i++) {
        p.of[i] = works[i];
        p.begins[i + 1] = p.begins[i] + (int)mn_ceil_div(works[i].N, BN);
    }
    for (int i = n; i < MN_GEMM_ROWS; i++) p.begins[i + 1] = p.begins[n];
    const dim3 blocks((unsigned)p.begins[n], (unsigned)mn_ceil_div(works[0].M, BM));
    return mn_launch_pdl(gemm_rows<BN, BM, C>, blocks, ROWS_THREADS, tile::smem, on, p);
}

static int64_t rows_tiles(const mn_gemm_problem *works, int n, int64_t width) {
    int64_t tiles = 0;
    for (int i = 0; i < n; i++) tiles += mn_ceil_div(works[i].N, width);
    return tiles;
}

/* Enough blocks for the processors, of as large tiles as that leaves. */
template <int BM, typename C>
static int rows_launch_n(const mn_gemm_problem *works, int n, cudaStream_t on) {
    enum { ENOUGH = 96 };
    const int64_t down = mn_ceil_div(works[0].M, BM);
    if (rows_tiles(works, n, 64) * down >= ENOUGH) return rows_launch<64, BM, C>(works, n, on);
    if (rows_tiles(works, n, 32) * down >= ENOUGH) return rows_launch<32, BM, C>(works, n, on);
    return rows_launch<16, BM, C>(works, n, on);
}

template <typename C>
static int rows_launch_m(const mn_gemm_problem *works, int n, cudaStream_t on) {
    if (works[0].M <= 8) return rows_launch_n<8, C>(works, n, on);
    if (works[0].M <= 16) return rows_launch_n<16, C>(works, n, on);
    if (works[0].M <= 32) return rows_launch_n<32, C>(works, n, on);
    if (works[0].M <= 64) return rows_launch_n<64, C>(works, n, on);
    return rows_launch_n<128, C>(works, n, on);
}

extern "C" bool mn_gemm_rows_supported(const mn_gemm_problem *w) {
    return w->alike && w->dtype == MN_BF16 && !w->quant && w->b_transposed && !w->a_transposed &&
           w->K > 0 && w->K % 8 == 0 && w->a_row % 8 == 0 && w->b_row % 8 == 0 &&
           w->M <= (1 << 20) && w->N <= (1 << 24) && (uintptr_t)w->a % 16 == 0 &&
           (uintptr_t)w->b % 16 == 0;
}

extern "C" int mn_gemm_rows(const mn_gemm_problem *works, int n, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    return works[0].c_dtype == MN_BF16 ? rows_launch_m<mn_bf16>(works, n, on)
                                       : rows_launch_m<float>(works, n, on);
}

}    // namespace mneme::gemm
