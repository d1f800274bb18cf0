/* linear_bank.h - chunks prepared ahead, all at once and in parallel.
 *
 * What keys and decays determine does not wait for the state. With few heads the value columns are
 * cut into tiles that walk the chunks side by side; preparing every chunk once, before, spares each
 * tile the same work. A slot of the bank is one chunk of one head: the struct and its arrays. */
#ifndef MN_KERNELS_CPU_LINEAR_LINEAR_BANK_H
#define MN_KERNELS_CPU_LINEAR_LINEAR_BANK_H

#include "kernels/cpu/linear/linear.h"

/* Slots per head: each chunk of each sequence has one, some stay empty. */
static inline int64_t mn_bank_slots(const mn_call *call) {
    return call->cu_seqlens ? call->T / MN_CHUNK + call->n_seqs
                            : call->B * ((call->T + MN_CHUNK - 1) / MN_CHUNK);
}

/* First slot of sequence n: floor((t0 + len) / L) + 1 >= floor(t0 / L) + ceil(len / L), so that
 * packed sequences do not overlap. */
static inline int64_t mn_bank_first(const mn_call *call, int64_t n) {
    return call->cu_seqlens ? call->cu_seqlens[n] / MN_CHUNK + n
                            : n * ((call->T + MN_CHUNK - 1) / MN_CHUNK);
}

/* Bytes of one slot. */
size_t MN_T(mn_bank_stride)(const mn_linear *p);

/* Prepares slot item / H of head item % H, for reading as well. */
void MN_T(mn_bank_fill)(void *bank, const mn_linear *p, int64_t item);

/* Makes c the chunk in that slot. Arrays that are only read stay in the bank; those that a walk
 * writes remain the ones c had. */
void MN_T(mn_bank_take)(mn_chunk *c, void *bank, const mn_linear *p, int64_t slot, int64_t h);

#endif
