/* curvature_sum_sm90.cuh - the running sum of keys on Hopper, forward and in the order of time
 * going back: two warps keep it and write it behind each tile of keys. */
#ifndef MN_KERNELS_CUDA_CURVATURE_CURVATURE_SUM_SM90_CUH
#define MN_KERNELS_CUDA_CURVATURE_CURVATURE_SUM_SM90_CUH

#include "kernels/cuda/curvature/curvature_sm90.cuh"

namespace mneme::curvature {

#if MN_HAS_WGMMA

/* The running sum of keys by columns: each of two warps has half of them, a lane two, as products
 * of tensor cores leave them. */
template <int KP>
struct mn_curve_vector {
    static constexpr int vec16s = KP / 16;
    float at[2];

    __device__ static int first(void) {
        return threadIdx.x / 32 % 2 * (KP / 2);
    }

    __device__ static int column(void) {
        const int lane = threadIdx.x % 32;
        return first() + lane / 4 % vec16s * 8 + lane % 4 * 2;
    }

    __device__ void load(const float *from, int64_t K) {
#pragma unroll
        for (int i = 0; i < 2; i++) at[i] = column() + i < K ? mn_get(from, column() + i) : 0.0f;
    }

    /* Rows 64 and 65 of a tile of keys, and floats. */
    __device__ void put(unsigned char *k, float *to) const {
        const uint32_t pair = mn_bf16x2(at[0], at[1]);
        *(uint32_t *)(k + mn_swizzle_byte(MN_CURVE_ROWS, 64, column())) = pair;
        *(uint32_t *)(k + mn_swizzle_byte(MN_CURVE_ROWS, 65, column())) =
            mn_bf16x2(at[0] - mn_curve_low(pair), at[1] - mn_curve_high(pair));
        *(float2 *)(to + column()) = make_float2(at[0], at[1]);
    }

    /* += a tile's rows, which are multiplied by ones: all rows of a product are their sums. */
    __device__ void add(const unsigned char *k) {
        const int lane = threadIdx.x % 32;
        const uint32_t ones[4] = { 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80 };
        float sum[vec16s][4] = {};
#pragma unroll
        for (int row = 0; row < MN_CURVE_CHUNK; row += 16) {
#pragma unroll
            for (int n = 0; n < vec16s; n += 2) {
                const int j = first() + 8 * n + lane / 16 * 8;
                unsigned b[4];
                mn_ldmatrix_x4<true>(
                    b, mn_curve_at(k, mn_swizzle_byte(MN_CURVE_ROWS, row + lane % 16, j)));
                mn_mma_m16n8k16(sum[n], ones, b[0], b[1]);
                mn_mma_m16n8k16(sum[n + 1], ones, b[2], b[3]);
            }
        }
        uint32_t own[2] = {};    // bits, as the compiler would keep what it chooses from in memory
#pragma unroll
        for (int n = 0; n < vec16s; n++) {
            const uint32_t mine = lane / 4 % vec16s == n ? ~0u : 0u;
            own[0] |= __float_as_uint(sum[n][0]) & mine;
            own[1] |= __float_as_uint(sum[n][1]) & mine;
        }
        at[0] += __uint_as_float(own[0]), at[1] += __uint_as_float(own[1]);
    }

    __device__ void store(float *to, int64_t K, int slice) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = column() + i;
            if (threadIdx.x % 32 < 4 * vec16s && j < K && j / MN_CURVE_SLICE == slice) {
                to[j] = at[i];
            }
        }
    }
};

/* Keys behind the last token become zeros, in a warp's own columns: they are those of another
 * sequence. */
template <int KP>
__device__ inline void mn_curve_end_keys(unsigned char *k, int count) {
    for (int n = threadIdx.x % 32; n < (64 - count) * (KP / 16); n += 32) {
        const int row = count + n / (KP / 16);
        const int column = mn_curve_vector<KP>::first() + n % (KP / 16) * 8;
        *(uint4 *)(k + mn_swizzle_byte(MN_CURVE_ROWS, row, column)) = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
}

/* Two warps: s in front of each chunk, from `vector` on; behind the last one to `last`, if given.
 * They wait for tiles (there), show rows 64 and 65 and floats (ready), and have then read
 * (gone). */
template <int KP, int STAGES, typename Smem>
__device__ inline void mn_curve_add_keys(Smem &smem, const mn_curve_place &at, int64_t K,
                                         const float *vector, float *last) {
    const int n_chunks = (at.s.rows + 63) / 64;
    mn_curve_vector<KP> s;
    s.load(vector, K);
    for (int n = threadIdx.x % 64; n < STAGES * (KP / 64) * 48; n += 64) {
        unsigned char *k = smem.stage[n / 48 / (KP / 64)].k;    // the rows behind s
        const int smem_tile = n / 48 % (KP / 64);
        *(uint4 *)(k + (smem_tile * MN_CURVE_ROWS + 66) * 128 + n % 48 * 16) =
            make_uint4(0, 0, 0, 0);
    }
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % STAGES;
        auto &in = smem.stage[slot];
        mn_mbarrier_wait(&smem.there[slot], c / STAGES & 1);
        if (at.s.rows < c * 64 + 64) mn_curve_end_keys<KP>(in.k, at.s.rows - c * 64);
        s.put(in.k, in.s);
        mn_fence_proxy_async();
        mn_mbarrier_arrive(&smem.ready[slot]);
        s.add(in.k);
        mn_fence_proxy_async();
        mn_mbarrier_arrive(&smem.gone[slot]);
    }
    if (last) s.store(last, K, at.slice);
}

#endif

}    // namespace mneme::curvature

#endif
