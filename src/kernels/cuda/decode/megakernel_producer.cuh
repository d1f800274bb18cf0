/* megakernel_producer.cuh - the warp of a block that brings notes and weights (kernels/decode.h).
 *
 * It goes through all stages by itself, ahead of the others: what it brings is older than the
 * program, so that it waits for nothing but room. Weights come in pieces, the eight rows of a strip
 * by up to 1024 numbers, in the order in which they are multiplied: strip by strip, chunk by chunk.
 * Lane i asks for row i. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_PRODUCER_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_PRODUCER_CUH

#include "kernels/cuda/decode/megakernel.cuh"

#if __CUDA_ARCH__ >= 900

/* Asks for a note. */
__device__ inline void mn_few_bring_note(mn_few_block &room, const mn_few_place &at,
                                         const char *from, int bytes) {
    mn_barrier_wait(&room.note_empty[at.note], at.note_turn ^ 1);
    if (threadIdx.x % 32 > 0) return;
    mn_bulk_expect(&room.note_full[at.note], bytes);
    mn_bulk_copy_plain(room.note[at.note], from, bytes, &room.note_full[at.note]);
}

__device__ inline void mn_few_bring_piece(mn_few_block &room, mn_few_place &at,
                                          const mn_few_strip &strip, int chunk, int bytes) {
    const int lane = threadIdx.x % 32;
    mn_barrier_wait(&room.empty[at.slot], at.turn ^ 1);
    if (lane == 0) mn_bulk_expect(&room.full[at.slot], strip.n_rows * bytes);
    __syncwarp();
    if (lane < strip.n_rows) {
        const char *from = strip.rows + lane * (int64_t)strip.step + chunk * (2 * MN_FEW_CHUNK);
        mn_few_bring_once(room.ring[at.slot] + lane * MN_FEW_ROW, from, bytes, &room.full[at.slot]);
    }
    at.next_slot();
}

__device__ inline void mn_few_bring_weights(mn_few_block &room, mn_few_place &at,
                                            const mn_few_products_note &p) {
    const int n = p.n_strips, K = p.K;
#pragma unroll 1
    for (int i = 0; i < n; i++) {
#pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; chunk++) {
            const int bytes = 2 * min((int)MN_FEW_CHUNK, K - chunk * MN_FEW_CHUNK);
            mn_few_bring_piece(room, at, p.strip[i], chunk, bytes);
        }
    }
}

__device__ inline void mn_few_ask_line(const void *at) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(at));
}

/* A state is too narrow for copies: the second cache is asked for its lines. */
__device__ inline void mn_few_ask_state(const mn_few_memory_note &m) {
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < m.K; row += 32) {
        mn_few_ask_line(m.state + row * (int64_t)m.V);
    }
}

enum { MN_FEW_SHARE = 8 };

/* Lines of K words that others will write: who looks at one that the second cache does not have
 * waits for memory first. Each block asks for a part. */
__device__ inline void mn_few_ask_words(const char *words, int K) {
    for (int i = threadIdx.x % 32 * MN_FEW_SHARE + blockIdx.x % MN_FEW_SHARE;
         i * MN_FEW_OF_LINE < K; i += 32 * MN_FEW_SHARE) {
        mn_few_ask_line(words + i * MN_FEW_LINE);
    }
}

__device__ inline void mn_few_feed(mn_few_block &room, const char *program,
                                   const mn_few_start &start, int words, int n_stages) {
    mn_few_place next = {}, at = {};    // the note asked for next; the one at work
    const char *from = program + start.at;
    int bytes = (int)start.bytes;
    mn_few_bring_note(room, next, from, bytes);
    next.next_note();
#pragma unroll 1
    for (int i = 0; i < n_stages; i++) {
        mn_barrier_wait(&room.note_full[at.note], at.note_turn);
        const mn_few_note &note = *(const mn_few_note *)room.note[at.note];
        if (i + 1 < n_stages) {
            from += bytes;
            bytes = note.next_bytes;
            mn_few_bring_note(room, next, from, bytes);
            next.next_note();
        }
        if (note.kind == MN_FEW_MULTIPLY) {
            mn_few_ask_words(program + words + note.products.x, note.products.K);
            mn_few_bring_weights(room, at, note.products);
        } else if (note.kind == MN_FEW_RECALL) {
            mn_few_ask_words(program + words + note.memory.q.at, note.memory.K);
            mn_few_ask_words(program + words + note.memory.e.at, note.memory.K);
            mn_few_ask_state(note.memory);
        }
        __syncwarp();
        at.next_note();
    }
}

#endif

#endif
