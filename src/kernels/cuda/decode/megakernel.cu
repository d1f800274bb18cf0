/* megakernel.cu - a megakernel (kernels/decode.h): one kernel goes through all stages, a block for
 * each
 * processor.
 *
 * A block has one warp that brings instrs and weights (megakernel_producer.cuh), and eight that
 * multiply. No
 * barrier stands between stages: a block begins one as soon as the elements that it reads are there
 * (megakernel.cuh), most often while its weights have come already. The launch is cooperative, so
 * that all blocks are there at once. */
#include "kernels/cuda/decode/megakernel_producer.cuh"
#include "kernels/cuda/decode/megakernel_gemv.cuh"
#include "kernels/cuda/decode/megakernel.h"
#include "kernels/cuda/decode/megakernel_matrix_state.cuh"
#include "kernels/cuda/prim/device_props.h"

enum { THREADS = MN_DECODE_THREADS + 32 };

#if __CUDA_ARCH__ >= 900

__device__ static void init_barriers(mn_decode_smem &smem) {
    for (int i = 0; i < MN_DECODE_SLOTS; i++) {
        mn_mbarrier_init(&smem.full[i], 1);
        mn_mbarrier_init(&smem.empty[i], MN_DECODE_WARPS);
    }
    for (int i = 0; i < MN_DECODE_INSTRS; i++) {
        mn_mbarrier_init(&smem.instr_full[i], 1);
        mn_mbarrier_init(&smem.instr_empty[i], MN_DECODE_WARPS);
    }
    mn_mbarrier_init_fence();
}

/* What is multiplied by the zeros behind a row must be elements. */
__device__ static void clear(mn_decode_smem &smem) {
#pragma unroll 1
    for (int i = threadIdx.x; i < (int)(sizeof smem.ring / 16); i += THREADS) {
        ((uint4 *)smem.ring)[i] = make_uint4(0, 0, 0, 0);
    }
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* Numbers from outside to words, two a thread at a time; of row `row` of a table. */
__device__ static void copy(const mn_decode_copy_instr &p, const mn_decode_pipe &place, int row) {
#pragma unroll 1
    for (int i = 0; i < p.n; i++) {
        const mn_decode_copy &c = p.of[i];
        const mn_bf16 *from = c.from + row * c.row;
#pragma unroll 1
        for (int k = threadIdx.x * 2; k < c.count; k += 2 * MN_DECODE_THREADS) {
            const bool two = k + 1 < c.count;
            const mn_bf16 low = from[k], high = two ? from[k + 1] : low;
            mn_decode_store_word(place, c.words + mn_decode_word_at(k),
                                 mn_bf16_pack2(mn_float(low), mn_float(high)));
            if (c.to) c.to[k] = low;
            if (c.to && two) c.to[k + 1] = high;
        }
    }
}

/* The words of the next run, which have been read in the last one; while the first ones of this run
 * are on their way. */
__device__ static void discard(char *words, int bytes) {
    const uint4 sentinel = { MN_DECODE_SENTINEL, MN_DECODE_SENTINEL, MN_DECODE_SENTINEL,
        MN_DECODE_SENTINEL };
    const int first = (int)(blockIdx.x * MN_DECODE_THREADS + threadIdx.x);
#pragma unroll 1
    for (int i = first; i < bytes / 16; i += (int)gridDim.x * MN_DECODE_THREADS) {
        ((uint4 *)words)[i] = sentinel;
    }
}

/* Waits for the next instr; and says that it has been done. */
__device__ static const mn_decode_instr &begin(const mn_decode_smem &smem,
                                               const mn_decode_pipe &place) {
    mn_mbarrier_wait(&smem.instr_full[place.instr], place.instr_phase);
    return *(const mn_decode_instr *)smem.instr[place.instr];
}

__device__ static void end(mn_decode_smem &smem, mn_decode_pipe &place) {
    mn_mbarrier_arrive_warp(&smem.instr_empty[place.instr]);
    place.next_instr();
}

/* All stages; the first one copies. `row`: of a table, the megakernel's. */
__device__ static void work(mn_decode_smem &smem, const char *words, int row, int n_stages) {
    mn_decode_pipe place = {};
    place.words = words;
    copy(begin(smem, place).copy, place, row);
    end(smem, place);
#pragma unroll 1
    for (int i = 1; i < n_stages; i++) {
        const mn_decode_instr &instr = begin(smem, place);
        if (instr.kind == MN_DECODE_GEMM) mn_decode_run_gemms(smem, instr, place);
        else if (instr.kind == MN_DECODE_RECURRENCE) mn_decode_recurrence_step(smem, instr.memory,
                                                                               place);
        end(smem, place);
    }
}

/* The last block to leave counts the run. */
__device__ static void leave(mn_decode_header *head, unsigned run) {
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(&head->left, 1u) + 1 < gridDim.x) return;
    head->left = 0;
    head->run = run;
}

#endif

__global__ void __launch_bounds__(THREADS, 1)
decode_megakernel(char *megakernel, int n_stages, int handoff_at, int words, int ragged) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_decode_smem &smem = *(mn_decode_smem *)bytes;
    mn_decode_header *head = (mn_decode_header *)megakernel;
    const unsigned run = *(volatile unsigned *)&head->run + 1;
    const mn_decode_entry start = ((const mn_decode_entry *)(head + 1))[blockIdx.x];
    if (threadIdx.x == 0) init_barriers(smem);
    if (ragged) clear(smem);
    __syncthreads();
    int row = 0;    // far away: asked for first
    if ((int)blockIdx.x < head->n_gather_blocks) row = *(const volatile int32_t *)head->index;
    const int now = (int)(run % MN_DECODE_WORD_SETS) * words;
    if (threadIdx.x >= MN_DECODE_THREADS) mn_decode_producer(smem, megakernel, start, now,
                                                             n_stages);
    else {
        discard(megakernel + handoff_at + (words - now), words);
        work(smem, megakernel + now, row, n_stages);
    }
    leave(head, run);
#endif
}

int mn_megakernel_blocks(void) {
    const mn_device_props m = mn_device_props_current();
    const bool serves = m.coop_launch && m.major >= 9
        && m.shared_bytes >= (int)sizeof(mn_decode_smem);
    return serves ? m.processors : 0;
}

int mn_megakernel_start(const mn_decode_launch_args *given, void *megakernel, void *stream) {
    cudaError_t code = cudaFuncSetAttribute(decode_megakernel,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            (int)sizeof(mn_decode_smem));
    if (code != cudaSuccess) return (int)code;
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3((unsigned)mn_megakernel_blocks()), how.blockDim = dim3(THREADS);
    how.dynamicSmemBytes = sizeof(mn_decode_smem), how.stream = (cudaStream_t)stream;
    how.attrs = &together, how.numAttrs = 1;
    return (int)cudaLaunchKernelEx(&how, decode_megakernel, (char *)megakernel, given->n_stages,
                                   given->handoff_at, given->words, given->ragged);
}
