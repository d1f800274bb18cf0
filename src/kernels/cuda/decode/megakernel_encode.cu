/* megakernel_encode.cu - programs as their kernel reads them (kernels/decode.h): a head, for each
 * block where its instrs begin, the instrs of all blocks, and words. */
#include "kernels/cuda/decode/megakernel.h"
#include "kernels/cuda/decode/megakernel_ranges.cuh"

namespace mneme::decode {

enum {
    COPY_BYTES = (int)((offsetof(mn_decode_instr, copy) + sizeof(mn_decode_copy_instr) + 15) / 16
                       * 16)
};

extern "C" bool mn_megakernel_supported(void) {
    return mn_megakernel_blocks() > 0;
}

extern "C" mn_megakernel *mn_megakernel_create(void) {
    mn_megakernel *p = (mn_megakernel *)calloc(1, sizeof *p);
    if (!p) return NULL;
    p->n_blocks = mn_megakernel_blocks();
    p->list = (mn_decode_instr_list *)calloc((size_t)p->n_blocks, sizeof *p->list);
    if (p->list) return p;
    free(p);
    return NULL;
}

extern "C" void mn_megakernel_destroy(mn_megakernel *p) {
    if (!p) return;
    for (int i = 0; i < p->n_blocks; i++) free(p->list[i].bytes);
    free(p->list);
    free(p->range);
    free(p->copy);
    free(p);
}

extern "C" void mn_megakernel_clear(mn_megakernel *p) {
    for (int i = 0; i < p->n_blocks; i++) p->list[i].n = 0;
    p->n_stages = p->phase = 0;
    p->n_ranges = p->words = p->n_copies = 0;
    p->failed = p->ragged = false;
}

static int64_t instrs_at(const mn_megakernel *p) {
    const int64_t starts = p->n_blocks * (int64_t)sizeof(mn_decode_entry);
    return ((int64_t)sizeof(mn_decode_header) + starts + 127) / 128 * 128;
}

static int64_t handoff_at(const mn_megakernel *p) {
    int64_t bytes = instrs_at(p);
    for (int i = 0; i < p->n_blocks; i++) bytes += COPY_BYTES + p->list[i].n;
    return (bytes + 127) / 128 * 128;
}

extern "C" size_t mn_megakernel_bytes(const mn_megakernel *p) {
    if (p->failed) return sizeof(mn_decode_header);    // the launch says so
    if (p->n_stages + p->n_copies == 0) return 0;
    return (size_t)(handoff_at(p) + MN_DECODE_WORD_SETS * p->words);
}

/* Which words are read: a byte for each line of them. */
static unsigned char *list_read(const mn_megakernel *p) {
    unsigned char *read = (unsigned char *)calloc((size_t)(p->words / MN_DECODE_LINE + 1), 1);
    for (int64_t i = 0; i < p->n_ranges && read; i++) {
        const mn_decode_range &range = p->range[i];
        if (!range.flagged || !range.read) continue;
        const int64_t elements = (int64_t)(range.end - range.begin) / 2;
        for (int64_t k = 0; k < elements; k += MN_DECODE_PER_LINE) {
            read[(range.words + mn_decode_word_at((unsigned)k)) / MN_DECODE_LINE] = 1;
        }
    }
    return read;
}

/* Words from the beginning of the megakernel, and only where somebody reads them. */
struct relocation {
    const unsigned char *read;
    int64_t base;

    void words(int *at) const {
        if (*at < 0) return;
        if (read && !read[*at / MN_DECODE_LINE]) *at = MN_DECODE_NO_WORDS;
        else *at += (int)base;
    }

    void source(int *at) const {
        *at += (int)base;
    }

    void instr(mn_decode_instr *instr) const {
        if (instr->kind == MN_DECODE_RECURRENCE) {
            mn_decode_recurrence_instr *m = &instr->memory;
            mn_decode_source *of[] = { &m->q, &m->e, &m->v, &m->beta, &m->g };
            for (mn_decode_source *from : of) source(&from->at);
            words(&m->o_handoff);
        }
        if (instr->kind != MN_DECODE_GEMM) return;
        mn_decode_gemm_instr *p = &instr->gemms;
        mn_decode_epi_instr *end = (mn_decode_epi_instr *)((char *)instr + instr->epis_at);
        source(&p->x);
        source(&p->z);
        for (int i = 0; i < p->n_out_tiles; i++) {
            mn_decode_out_tile *out_tile = &p->out_tile[i];
            source(&out_tile->plus.at);
            words(&out_tile->to_handoff);
            for (int k = 0; k < out_tile->n_epis; k++, end++) {
                for (mn_decode_epi_input &in : end->in) source(&in.source.at);
                words(&end->to_handoff);
            }
        }
    }
};

/* A block's first instr: blocks in phase copy what the megakernel reads to words. */
static void write_copy_instr(void *to, const mn_megakernel *p, int block, int64_t base) {
    mn_decode_instr *instr = (mn_decode_instr *)to;
    instr->kind = MN_DECODE_COPY, instr->next_bytes = (int)p->list[block].first;
    for (int64_t i = block; i < p->n_copies; i += p->n_blocks) {
        mn_decode_copy *copy = &instr->copy.of[instr->copy.n++];
        *copy = p->copy[i];
        copy->words += (int)base;
    }
}

extern "C" void mn_megakernel_encode(const mn_megakernel *p, void *to) {
    unsigned char *bytes = (unsigned char *)to;
    memset(bytes, 0, mn_megakernel_bytes(p));
    if (p->failed) return;
    memset(bytes + handoff_at(p), MN_DECODE_SENTINEL & 0xff,
           (size_t)(MN_DECODE_WORD_SETS * p->words));
    unsigned char *read = list_read(p);
    mn_decode_header *head = (mn_decode_header *)bytes;
    for (int64_t i = 0; i < p->n_copies; i++) {
        if (!p->copy[i].index) continue;
        head->index = p->copy[i].index;
        head->n_gather_blocks = (int)mn_min(i + 1, p->n_blocks);
    }
    mn_decode_entry *starts = (mn_decode_entry *)(bytes + sizeof(mn_decode_header));
    const relocation reloc = { read, handoff_at(p) };
    int64_t at = instrs_at(p);
    for (int block = 0; block < p->n_blocks; block++) {
        const mn_decode_instr_list &list = p->list[block];
        starts[block] = { at, COPY_BYTES };
        write_copy_instr(bytes + at, p, block, reloc.base);
        at += COPY_BYTES;
        memcpy(bytes + at, list.bytes, (size_t)list.n);
        int64_t next = list.first;
        for (int64_t i = 0; i < list.n;) {
            mn_decode_instr *instr = (mn_decode_instr *)(bytes + at + i);
            reloc.instr(instr);
            i += next;
            next = instr->next_bytes;
        }
        at += list.n;
    }
    free(read);
}

extern "C" int mn_megakernel_launch(const mn_megakernel *p, void *there, void *stream) {
    if (p->failed) return (int)cudaErrorMemoryAllocation;
    const mn_decode_launch_args given = { 1 + p->n_stages, (int)handoff_at(p), (int)p->words,
        p->ragged };
    return mn_megakernel_start(&given, there, stream);
}

}    // namespace mneme::decode
