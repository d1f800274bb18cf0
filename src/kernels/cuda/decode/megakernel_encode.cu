/* megakernel_encode.cu - programs as their kernel reads them (kernels/decode.h): a head, for each
 * block where
 * its notes begin, the notes of all blocks, and words. */
#include "kernels/cuda/decode/megakernel.h"
#include "kernels/cuda/decode/megakernel_ranges.cuh"

enum {
    COPY_BYTES = (int)((offsetof(mn_few_note, copy) + sizeof(mn_few_copy_note) + 15) / 16 * 16)
};

extern "C" bool mn_few_programs_serve(void) {
    return mn_few_blocks() > 0;
}

extern "C" mn_few_program *mn_few_program_create(void) {
    mn_few_program *p = (mn_few_program *)calloc(1, sizeof *p);
    if (!p) return NULL;
    p->n_blocks = mn_few_blocks();
    p->list = (mn_few_notes *)calloc((size_t)p->n_blocks, sizeof *p->list);
    if (p->list) return p;
    free(p);
    return NULL;
}

extern "C" void mn_few_program_destroy(mn_few_program *p) {
    if (!p) return;
    for (int i = 0; i < p->n_blocks; i++) free(p->list[i].bytes);
    free(p->list);
    free(p->range);
    free(p->copy);
    free(p);
}

extern "C" void mn_few_program_clear(mn_few_program *p) {
    for (int i = 0; i < p->n_blocks; i++) p->list[i].n = 0;
    p->n_stages = p->turn = 0;
    p->n_ranges = p->words = p->n_copies = 0;
    p->failed = p->ragged = false;
}

static int64_t notes_at(const mn_few_program *p) {
    const int64_t starts = p->n_blocks * (int64_t)sizeof(mn_few_start);
    return ((int64_t)sizeof(mn_few_head) + starts + 127) / 128 * 128;
}

static int64_t words_at(const mn_few_program *p) {
    int64_t bytes = notes_at(p);
    for (int i = 0; i < p->n_blocks; i++) bytes += COPY_BYTES + p->list[i].n;
    return (bytes + 127) / 128 * 128;
}

extern "C" size_t mn_few_program_bytes(const mn_few_program *p) {
    if (p->failed) return sizeof(mn_few_head);    // the launch says so
    if (p->n_stages + p->n_copies == 0) return 0;
    return (size_t)(words_at(p) + MN_FEW_SETS * p->words);
}

/* Which words are read: a byte for each line of them. */
static unsigned char *list_read(const mn_few_program *p) {
    unsigned char *read = (unsigned char *)calloc((size_t)(p->words / MN_FEW_LINE + 1), 1);
    for (int64_t i = 0; i < p->n_ranges && read; i++) {
        const mn_few_range &range = p->range[i];
        if (!range.flagged || !range.read) continue;
        const int64_t numbers = (int64_t)(range.end - range.begin) / 2;
        for (int64_t k = 0; k < numbers; k += MN_FEW_OF_LINE) {
            read[(range.words + mn_few_word((unsigned)k)) / MN_FEW_LINE] = 1;
        }
    }
    return read;
}

/* Words from the beginning of the program, and only where somebody reads them. */
struct few_moving {
    const unsigned char *read;
    int64_t base;

    void words(int *at) const {
        if (*at < 0) return;
        if (read && !read[*at / MN_FEW_LINE]) *at = MN_FEW_NOWHERE;
        else *at += (int)base;
    }

    void source(int *at) const {
        *at += (int)base;
    }

    void note(mn_few_note *note) const {
        if (note->kind == MN_FEW_RECALL) {
            mn_few_memory_note *m = &note->memory;
            mn_few_source *of[] = { &m->q, &m->e, &m->v, &m->beta, &m->g };
            for (mn_few_source *from : of) source(&from->at);
            words(&m->o_words);
        }
        if (note->kind != MN_FEW_MULTIPLY) return;
        mn_few_products_note *p = &note->products;
        mn_few_end *end = (mn_few_end *)((char *)note + note->ends_at);
        source(&p->x);
        source(&p->z);
        for (int i = 0; i < p->n_units; i++) {
            mn_few_unit *unit = &p->unit[i];
            source(&unit->plus.at);
            words(&unit->to_words);
            for (int k = 0; k < unit->n_ends; k++, end++) {
                for (mn_few_input &in : end->in) source(&in.source.at);
                words(&end->to_words);
            }
        }
    }
};

/* A block's first note: blocks in turn copy what the program reads to words. */
static void write_first(void *to, const mn_few_program *p, int block, int64_t base) {
    mn_few_note *note = (mn_few_note *)to;
    note->kind = MN_FEW_COPY, note->next_bytes = (int)p->list[block].first;
    for (int64_t i = block; i < p->n_copies; i += p->n_blocks) {
        mn_few_copy *copy = &note->copy.of[note->copy.n++];
        *copy = p->copy[i];
        copy->words += (int)base;
    }
}

extern "C" void mn_few_program_write(const mn_few_program *p, void *to) {
    unsigned char *bytes = (unsigned char *)to;
    memset(bytes, 0, mn_few_program_bytes(p));
    if (p->failed) return;
    memset(bytes + words_at(p), MN_FEW_UNSAID & 0xff, (size_t)(MN_FEW_SETS * p->words));
    unsigned char *read = list_read(p);
    mn_few_head *head = (mn_few_head *)bytes;
    for (int64_t i = 0; i < p->n_copies; i++) {
        if (!p->copy[i].index) continue;
        head->index = p->copy[i].index;
        head->n_picking = (int)mn_min(i + 1, p->n_blocks);
    }
    mn_few_start *starts = (mn_few_start *)(bytes + sizeof(mn_few_head));
    const few_moving moving = { read, words_at(p) };
    int64_t at = notes_at(p);
    for (int block = 0; block < p->n_blocks; block++) {
        const mn_few_notes &list = p->list[block];
        starts[block] = { at, COPY_BYTES };
        write_first(bytes + at, p, block, moving.base);
        at += COPY_BYTES;
        memcpy(bytes + at, list.bytes, (size_t)list.n);
        int64_t next = list.first;
        for (int64_t i = 0; i < list.n;) {
            mn_few_note *note = (mn_few_note *)(bytes + at + i);
            moving.note(note);
            i += next;
            next = note->next_bytes;
        }
        at += list.n;
    }
    free(read);
}

extern "C" int mn_few_program_launch(const mn_few_program *p, void *there, void *stream) {
    if (p->failed) return (int)cudaErrorMemoryAllocation;
    const mn_few_started given = { 1 + p->n_stages, (int)words_at(p), (int)p->words, p->ragged };
    return mn_few_start_program(&given, there, stream);
}
