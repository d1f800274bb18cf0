/* megakernel_producer.cuh - the warp of a block that brings instrs and weights (kernels/decode.h).
 *
 * It goes through all stages by itself, ahead of the others: what it brings is older than the
 * megakernel, so that it waits for nothing but smem. Weights come in pieces, the eight rows of a
 * col_tile
 * by up to 1024 elements, in the order in which they are multiplied: col_tile by col_tile, chunk by
 * chunk.
 * Lane i requests for row i. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_PRODUCER_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_PRODUCER_CUH

#include "kernels/cuda/decode/megakernel.cuh"

#if __CUDA_ARCH__ >= 900

/* Asks for a instr. */
__device__ inline void mn_decode_load_instr(mn_decode_smem &smem, const mn_decode_pipe &at,
                                         const char *from, int bytes) {
    mn_mbarrier_wait(&smem.instr_empty[at.instr], at.instr_phase ^ 1);
    if (threadIdx.x % 32 > 0) return;
    mn_mbarrier_arrive_expect_tx(&smem.instr_full[at.instr], bytes);
    mn_tma_load_bulk(smem.instr[at.instr], from, bytes, &smem.instr_full[at.instr]);
}

__device__ inline void mn_decode_load_weight_tile(mn_decode_smem &smem, mn_decode_pipe &at,
                                          const mn_decode_col_tile &col_tile, int chunk,
                                              int bytes) {
    const int lane = threadIdx.x % 32;
    mn_mbarrier_wait(&smem.empty[at.slot], at.phase ^ 1);
    if (lane == 0) mn_mbarrier_arrive_expect_tx(&smem.full[at.slot], col_tile.n_rows * bytes);
    __syncwarp();
    if (lane < col_tile.n_rows) {
        const char *from = col_tile.rows + lane * (int64_t)col_tile.step + chunk
            * (2 * MN_DECODE_CHUNK);
        mn_decode_tma_load_once(smem.ring[at.slot] + lane * MN_DECODE_ROW_STRIDE, from, bytes,
                                &smem.full[at.slot]);
    }
    at.next_slot();
}

__device__ inline void mn_decode_load_weights(mn_decode_smem &smem, mn_decode_pipe &at,
                                            const mn_decode_gemm_instr &p) {
    const int n = p.n_col_tiles, K = p.K;
#pragma unroll 1
    for (int i = 0; i < n; i++) {
#pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; chunk++) {
            const int bytes = 2 * min((int)MN_DECODE_CHUNK, K - chunk * MN_DECODE_CHUNK);
            mn_decode_load_weight_tile(smem, at, p.col_tile[i], chunk, bytes);
        }
    }
}

__device__ inline void mn_decode_prefetch_line(const void *at) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(at));
}

/* A state is too narrow for copies: the second cache is asked for its lines. */
__device__ inline void mn_decode_prefetch_state(const mn_decode_recurrence_instr &m) {
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < m.K; row += 32) {
        mn_decode_prefetch_line(m.state + row * (int64_t)m.V);
    }
}

enum { MN_DECODE_PREFETCH_SHARE = 8 };

/* Lines of K words that others will write: who looks at one that the second cache does not have
 * waits for memory first. Each block requests for a part. */
__device__ inline void mn_decode_prefetch_words(const char *words, int K) {
    for (int i = threadIdx.x % 32 * MN_DECODE_PREFETCH_SHARE
         + blockIdx.x % MN_DECODE_PREFETCH_SHARE;
         i * MN_DECODE_PER_LINE < K; i += 32 * MN_DECODE_PREFETCH_SHARE) {
        mn_decode_prefetch_line(words + i * MN_DECODE_LINE);
    }
}

__device__ inline void mn_decode_producer(mn_decode_smem &smem, const char *megakernel,
                                   const mn_decode_entry &start, int words, int n_stages) {
    mn_decode_pipe next = {}, at = {};    // the instr asked for next; the one at work
    const char *from = megakernel + start.at;
    int bytes = (int)start.bytes;
    mn_decode_load_instr(smem, next, from, bytes);
    next.next_instr();
#pragma unroll 1
    for (int i = 0; i < n_stages; i++) {
        mn_mbarrier_wait(&smem.instr_full[at.instr], at.instr_phase);
        const mn_decode_instr &instr = *(const mn_decode_instr *)smem.instr[at.instr];
        if (i + 1 < n_stages) {
            from += bytes;
            bytes = instr.next_bytes;
            mn_decode_load_instr(smem, next, from, bytes);
            next.next_instr();
        }
        if (instr.kind == MN_DECODE_GEMM) {
            mn_decode_prefetch_words(megakernel + words + instr.gemms.x, instr.gemms.K);
            mn_decode_load_weights(smem, at, instr.gemms);
        } else if (instr.kind == MN_DECODE_RECURRENCE) {
            mn_decode_prefetch_words(megakernel + words + instr.memory.q.at, instr.memory.K);
            mn_decode_prefetch_words(megakernel + words + instr.memory.e.at, instr.memory.K);
            mn_decode_prefetch_state(instr.memory);
        }
        __syncwarp();
        at.next_instr();
    }
}

#endif

#endif
