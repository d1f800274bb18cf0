/* megakernel.cuh - shared memory of a block of a megakernel, and how its threads load and store
 * hand-off words. The instructions are those of kernels/decode_image.h. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_CUH

#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/decode/decode_elementwise.cuh"
#include "kernels/decode_image.h"

namespace mneme::decode {

enum {
    MN_DECODE_ROW_STRIDE = 2 * MN_DECODE_CHUNK + 64,    // bytes apart: other banks
    // a column tile's part of a chunk
    MN_DECODE_TILE_BYTES = MN_DECODE_TILE_N * MN_DECODE_ROW_STRIDE,
    MN_DECODE_SLOTS = 11,     // tiles on their way or not used yet
    MN_DECODE_INSTRS = 6,     // stages that a block knows ahead
};

static_assert(MN_DECODE_SLOTS * MN_DECODE_TILE_BYTES >= MN_DECODE_ROOM, "a step in the ring");
static_assert(sizeof(mn_decode_instr) <= MN_DECODE_INSTR_BYTES &&
              offsetof(mn_decode_instr, gemms) + sizeof(mn_decode_gemm_instr) +
              MN_DECODE_EPILOGUES * sizeof(mn_decode_epi_instr) <= MN_DECODE_INSTR_BYTES,
              "an instruction");

struct alignas(128) mn_decode_smem {
    unsigned char ring[MN_DECODE_SLOTS][MN_DECODE_TILE_BYTES];
    alignas(16) unsigned char instr[MN_DECODE_INSTRS][MN_DECODE_INSTR_BYTES];
    union {
        alignas(16) mn_bf16 row[MN_DECODE_CHUNKS * MN_DECODE_CHUNK];
        unsigned char scratch[MN_DECODE_SCRATCH];    // of stages that are no products
    };
    alignas(16) float sums[2][MN_DECODE_COL_TILES][MN_DECODE_TILE_N][MN_DECODE_WARPS + 2];
    alignas(16) float squares[2][MN_DECODE_WARPS];
    alignas(16) float2 columns[2][MN_DECODE_WARPS][MN_DECODE_TILE_V];
    alignas(16) float4 shared[2][MN_DECODE_WARPS];
    float values[MN_DECODE_COL_TILES][MN_DECODE_VALUES][MN_DECODE_TILE_N];
    uint64_t full[MN_DECODE_SLOTS], empty[MN_DECODE_SLOTS];
    uint64_t instr_full[MN_DECODE_INSTRS], instr_empty[MN_DECODE_INSTRS];
    mn_decode_header *header;    // for barriers of the grid: registers are for weights
};

/* Where a warp stands: in the ring of weights, in that of instructions, in which buffer of what is
 * there twice. */
struct mn_decode_pipe {
    int slot, instr, buf;
    unsigned phase, instr_phase;
    const char *words;    // from here instructions count bytes to words

    __device__ void next_slot(void) {
        if (++slot == MN_DECODE_SLOTS) slot = 0, phase ^= 1;
    }

    __device__ void next_instr(void) {
        if (++instr == MN_DECODE_INSTRS) instr = 0, instr_phase ^= 1;
    }
};

#if __CUDA_ARCH__ >= 900

/* What is not read again in this run: L2 keeps the rest of the megakernel instead.
 * */
__device__ inline void mn_decode_tma_load_once(void *to, const void *from, int bytes,
                                         uint64_t *barrier) {
    asm volatile("{\n\t.reg .b64 once;\n"
                 "\tcreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
                 "\tcp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], once;\n\t}"
                 ::"r"(mn_smem_addr(to)), "l"(from), "r"(bytes),
                 "r"(mn_smem_addr(barrier)) : "memory");
}

/* What all lanes of a warp have: known to be the same, so that branches by it go one way. */
__device__ inline unsigned mn_decode_uniform(unsigned x) {
    return __reduce_or_sync(0xffffffffu, x);
}

/* A place in shared memory that is worked out here, and not where it is used. */
__device__ inline uint32_t mn_decode_materialize(uint32_t place) {
    asm volatile("" : "+r"(place));
    return place;
}

__device__ inline uint2 mn_decode_load_shared(uint32_t place) {
    uint2 two;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(two.x), "=r"(two.y) : "r"(place)
                 : "memory");
    return two;
}

/* What is multiplied by the zeros behind a row must be finite. By all threads, or the first. */
__device__ inline void mn_decode_clear_ring(mn_decode_smem &smem, int threads) {
#pragma unroll 1
    for (int i = threadIdx.x; i < (int)(sizeof smem.ring / 16); i += threads) {
        ((uint4 *)smem.ring)[i] = make_uint4(0, 0, 0, 0);
    }
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* All warps that multiply. */
__device__ inline void mn_decode_consumer_sync(void) {
    asm volatile("bar.sync 1, %0;" ::"n"((int)MN_DECODE_THREADS) : "memory");
}

/* ---- words ----------------------------------------------------------------------------------- */

__device__ inline void mn_decode_store_word(const mn_decode_pipe &place, int word, uint32_t two) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place.words + word), "r"(two)
                 : "memory");
}

/* Four neighbours: two words, as they were found. */
struct mn_decode_word2 {
    uint32_t a, b;

    /* As if they had been found, whatever they are. */
    __device__ void none(void) {
        a = b = 0;
    }

    /* Nothing waits for them here. */
    __device__ void fetch(const char *words) {
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(a), "=r"(b) : "l"(words) : "memory");
    }

    /* MN_DECODE_SENTINEL: one of them is not there. */
    __device__ uint32_t most(void) const {
        return max(a, b);
    }

    __device__ uint2 elements(void) const {
        return make_uint2(a, b);
    }
};

/* The word of one number. */
struct mn_decode_word1 {
    uint32_t a;

    __device__ void none(void) {
        a = 0;
    }

    __device__ void fetch(const char *word) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(a) : "l"(word) : "memory");
    }

    __device__ uint32_t most(void) const {
        return a;
    }

    __device__ float number(int odd) const {
        return __uint_as_float(odd ? a & 0xffff0000u : a << 16);
    }
};

#endif

/* ---- elements of bf16 ------------------------------------------------------------------------ */

__device__ inline float mn_bf16_low(uint32_t two) {
    return __uint_as_float(two << 16);
}

__device__ inline float mn_bf16_high(uint32_t two) {
    return __uint_as_float(two & 0xffff0000u);
}

__device__ inline uint32_t mn_bf16_pack2(float low, float high) {
    uint32_t two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

__device__ inline float mn_bf16_rounded(float x) {
    return mn_bf16_low(mn_bf16_pack2(x, 0.0f));
}

/* Two instructions: off by |x| 2^-24 of itself; below the smallest normal float 0. */
__device__ inline float mn_decode_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.44269504f * x));
    return y;
}

/* One instruction: off by 2^-22 of itself. */
__device__ inline float mn_decode_rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#if __CUDA_ARCH__ >= 900

/* Eight neighbours: four words, as they were found. */
struct mn_decode_word4 {
    mn_decode_word2 at[2];

    __device__ void fetch(const char *words) {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(at[0].a), "=r"(at[0].b), "=r"(at[1].a), "=r"(at[1].b) : "l"(words)
                     : "memory");
    }

    __device__ void none(void) {
        at[0].none();
        at[1].none();
    }

    __device__ uint32_t most(void) const {
        return max(at[0].most(), at[1].most());
    }

    __device__ void get(float (&x)[8]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint2 two = at[i].elements();
            x[4 * i] = mn_bf16_low(two.x), x[4 * i + 1] = mn_bf16_high(two.x);
            x[4 * i + 2] = mn_bf16_low(two.y), x[4 * i + 3] = mn_bf16_high(two.y);
        }
    }
};

/* 1 / length */
template <typename NORM>
__device__ inline float mn_decode_l2_scale(const NORM &front, float squares) {
    return front.there ? fminf(mn_decode_rsqrt(squares + front.plus), front.most) : 1.0f;
}

#endif

}    // namespace mneme::decode

#endif
