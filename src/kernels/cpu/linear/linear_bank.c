/* linear_bank.c - chunks prepared ahead, all at once and in parallel. */
#include "kernels/cpu/linear/linear_bank.h"

enum { LINE = 64 };

static size_t header_bytes(void) {
    return (sizeof(mn_chunk) + LINE - 1) / LINE * LINE;
}

size_t MN_T(mn_bank_stride)(const mn_linear *p) {
    const int64_t K = p->call->K, width = mn_decay_width(p->decay, K);
    const size_t bytes = (size_t)MN_T(mn_chunk_floats)(K, width, p->e.data) * sizeof(float);
    return header_bytes() + (bytes + LINE - 1) / LINE * LINE;
}

static mn_chunk *slot_of(void *bank, const mn_linear *p, int64_t slot, int64_t h) {
    return (mn_chunk *)((char *)bank + (size_t)(slot * p->call->H + h) * MN_T(mn_bank_stride)(p));
}

void MN_T(mn_bank_fill)(void *bank, const mn_linear *p, int64_t item) {
    const mn_call *call = p->call;
    const int64_t slot = item / call->H, h = item % call->H;
    int64_t n = 0;
    while (n + 1 < mn_n_sequences(call) && mn_bank_first(call, n + 1) <= slot) n++;
    const mn_sequence seq = mn_sequence_at(call, n);
    const int64_t start = (slot - mn_bank_first(call, n)) * MN_CHUNK;
    if (start >= seq.length) return;
    mn_chunk *c = slot_of(bank, p, slot, h);
    MN_T(mn_chunk_place)(c, (float *)((char *)c + header_bytes()), call->K,
                         mn_decay_width(p->decay, call->K), p->e.data);
    MN_T(mn_chunk_prepare)(c, p, &seq, h, start, MN_SCAN_FORWARD);
}

void MN_T(mn_bank_take)(mn_chunk *c, void *bank, const mn_linear *p, int64_t slot, int64_t h) {
    float *const factor = c->factor, *const ws = c->ws_memory;
    *c = *slot_of(bank, p, slot, h);
    c->factor = factor;
    c->ws_memory = ws;
    if (c->n_segments > 1) c->ws = ws;    // the scan computes it anew, segment by segment
}
