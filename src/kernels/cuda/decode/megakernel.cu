/* megakernel.cu - a program (kernels/decode.h): one kernel goes through all stages, a block for
 * each
 * processor.
 *
 * A block has one warp that brings notes and weights (megakernel_producer.cuh), and eight that
 * multiply. No
 * barrier stands between stages: a block begins one as soon as the numbers that it reads are there
 * (megakernel.cuh), most often while its weights have come already. The launch is cooperative, so
 * that all blocks are there at once. */
#include "kernels/cuda/decode/megakernel_producer.cuh"
#include "kernels/cuda/decode/megakernel_gemv.cuh"
#include "kernels/cuda/decode/megakernel.h"
#include "kernels/cuda/decode/megakernel_matrix_state.cuh"
#include "kernels/cuda/prim/device_props.h"

enum { THREADS = MN_FEW_THREADS + 32 };

#if __CUDA_ARCH__ >= 900

__device__ static void open_barriers(mn_few_block &room) {
    for (int i = 0; i < MN_FEW_SLOTS; i++) {
        mn_barrier_open(&room.full[i], 1);
        mn_barrier_open(&room.empty[i], MN_FEW_WARPS);
    }
    for (int i = 0; i < MN_FEW_NOTES; i++) {
        mn_barrier_open(&room.note_full[i], 1);
        mn_barrier_open(&room.note_empty[i], MN_FEW_WARPS);
    }
    mn_bulk_barriers_open();
}

/* What is multiplied by the zeros behind a row must be numbers. */
__device__ static void clear(mn_few_block &room) {
#pragma unroll 1
    for (int i = threadIdx.x; i < (int)(sizeof room.ring / 16); i += THREADS) {
        ((uint4 *)room.ring)[i] = make_uint4(0, 0, 0, 0);
    }
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* Numbers from outside to words, two a thread at a time; of row `row` of a table. */
__device__ static void copy(const mn_few_copy_note &p, const mn_few_place &place, int row) {
#pragma unroll 1
    for (int i = 0; i < p.n; i++) {
        const mn_few_copy &c = p.of[i];
        const mn_bf16 *from = c.from + row * c.row;
#pragma unroll 1
        for (int k = threadIdx.x * 2; k < c.count; k += 2 * MN_FEW_THREADS) {
            const bool two = k + 1 < c.count;
            const mn_bf16 low = from[k], high = two ? from[k + 1] : low;
            mn_few_say(place, c.words + mn_few_word(k), mn_few_two(mn_float(low), mn_float(high)));
            if (c.to) c.to[k] = low;
            if (c.to && two) c.to[k + 1] = high;
        }
    }
}

/* The words of the next run, which have been read in the last one; while the first ones of this run
 * are on their way. */
__device__ static void forget(char *words, int bytes) {
    const uint4 unsaid = { MN_FEW_UNSAID, MN_FEW_UNSAID, MN_FEW_UNSAID, MN_FEW_UNSAID };
    const int first = (int)(blockIdx.x * MN_FEW_THREADS + threadIdx.x);
#pragma unroll 1
    for (int i = first; i < bytes / 16; i += (int)gridDim.x * MN_FEW_THREADS) {
        ((uint4 *)words)[i] = unsaid;
    }
}

/* Waits for the next note; and says that it has been done. */
__device__ static const mn_few_note &begin(const mn_few_block &room, const mn_few_place &place) {
    mn_barrier_wait(&room.note_full[place.note], place.note_turn);
    return *(const mn_few_note *)room.note[place.note];
}

__device__ static void end(mn_few_block &room, mn_few_place &place) {
    mn_barrier_release(&room.note_empty[place.note]);
    place.next_note();
}

/* All stages; the first one copies. `row`: of a table, the program's. */
__device__ static void work(mn_few_block &room, const char *words, int row, int n_stages) {
    mn_few_place place = {};
    place.words = words;
    copy(begin(room, place).copy, place, row);
    end(room, place);
#pragma unroll 1
    for (int i = 1; i < n_stages; i++) {
        const mn_few_note &note = begin(room, place);
        if (note.kind == MN_FEW_MULTIPLY) mn_few_multiply(room, note, place);
        else if (note.kind == MN_FEW_RECALL) mn_few_recall(room, note.memory, place);
        end(room, place);
    }
}

/* The last block to leave counts the run. */
__device__ static void leave(mn_few_head *head, unsigned run) {
    __syncthreads();
    if (threadIdx.x > 0 || atomicAdd(&head->left, 1u) + 1 < gridDim.x) return;
    head->left = 0;
    head->run = run;
}

#endif

__global__ void __launch_bounds__(THREADS, 1)
few_program_kernel(char *program, int n_stages, int words_at, int words, int ragged) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_few_block &room = *(mn_few_block *)bytes;
    mn_few_head *head = (mn_few_head *)program;
    const unsigned run = *(volatile unsigned *)&head->run + 1;
    const mn_few_start start = ((const mn_few_start *)(head + 1))[blockIdx.x];
    if (threadIdx.x == 0) open_barriers(room);
    if (ragged) clear(room);
    __syncthreads();
    int row = 0;    // far away: asked for first
    if ((int)blockIdx.x < head->n_picking) row = *(const volatile int32_t *)head->index;
    const int now = (int)(run % MN_FEW_SETS) * words;
    if (threadIdx.x >= MN_FEW_THREADS) mn_few_feed(room, program, start, now, n_stages);
    else {
        forget(program + words_at + (words - now), words);
        work(room, program + now, row, n_stages);
    }
    leave(head, run);
#endif
}

int mn_few_blocks(void) {
    const mn_machine m = mn_machine_in_use();
    const bool serves = m.cooperates && m.major >= 9 && m.shared_bytes >= (int)sizeof(mn_few_block);
    return serves ? m.processors : 0;
}

int mn_few_start_program(const mn_few_started *given, void *program, void *stream) {
    cudaError_t code = cudaFuncSetAttribute(few_program_kernel,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            (int)sizeof(mn_few_block));
    if (code != cudaSuccess) return (int)code;
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3((unsigned)mn_few_blocks()), how.blockDim = dim3(THREADS);
    how.dynamicSmemBytes = sizeof(mn_few_block), how.stream = (cudaStream_t)stream;
    how.attrs = &together, how.numAttrs = 1;
    return (int)cudaLaunchKernelEx(&how, few_program_kernel, (char *)program, given->n_stages,
                                   given->words_at, given->words, given->ragged);
}
