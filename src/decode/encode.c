/* encode.c - a megakernel from its first stage to the bytes that its kernel reads
 * (kernels/decode_image.h): a header, for each block where its instructions begin, the instructions
 * of all blocks, and hand-off words. */
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "decode/plan.h"

#define COPY_BYTES                                                                                 \
    ((int64_t)((offsetof(mn_decode_instr, copy) + sizeof(mn_decode_copy_instr) + 15) / 16 * 16))

enum { NO_MEMORY = 2 };    // cudaErrorMemoryAllocation

bool mn_megakernel_supported(void) {
    return mn_megakernel_blocks() > 0;
}

mn_megakernel *mn_megakernel_create(void) {
    mn_megakernel *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->n_blocks = mn_megakernel_blocks();
    p->list = calloc((size_t)p->n_blocks, sizeof *p->list);
    if (p->list) return p;
    free(p);
    return NULL;
}

void mn_megakernel_destroy(mn_megakernel *p) {
    if (!p) return;
    for (int i = 0; i < p->n_blocks; i++) free(p->list[i].bytes);
    free(p->list);
    free(p->range);
    free(p->copy);
    free(p);
}

void mn_megakernel_clear(mn_megakernel *p) {
    for (int i = 0; i < p->n_blocks; i++) {
        p->list[i].n = 0;
        p->list[i].sync = 0;
    }
    p->n_stages = p->phase = 0;
    p->n_ranges = p->words = p->n_copies = 0;
    p->n_syncs = 0;
    p->failed = p->ragged = p->works = false;
    p->attends = p->hyper = p->streams = p->small = false;
    p->steps = 0;
}

/* ---- lists of instructions ------------------------------------------------------------------- */

bool mn_plan_grow(void **list, int64_t *most, int64_t n, size_t item) {
    if (n <= *most) return true;
    const int64_t more = mn_max(n, 2 * *most);
    void *grown = realloc(*list, (size_t)more * item);
    if (!grown) return false;
    *list = grown;
    *most = more;
    return true;
}

mn_decode_instr *mn_plan_add_instr(mn_megakernel *p, int block) {
    mn_decode_instr_list *list = &p->list[block];
    if (!mn_plan_grow((void **)&list->bytes, &list->most, list->n + MN_DECODE_INSTR_BYTES, 1)) {
        p->failed = true;
        return NULL;
    }
    mn_decode_instr *instr = memset(list->bytes + list->n, 0, MN_DECODE_INSTR_BYTES);
    instr->sync = list->sync;
    return instr;
}

void mn_plan_end_instr(mn_megakernel *p, int block, size_t bytes) {
    mn_decode_instr_list *list = &p->list[block];
    const int64_t whole = (int64_t)(bytes + 15) / 16 * 16;
    if (list->n == 0) list->first = whole;
    else ((mn_decode_instr *)(list->bytes + list->last))->next_bytes = (int)whole;
    list->last = list->n;
    list->n += whole;
    list->sync = 0;
}

void mn_plan_sync(mn_megakernel *p) {
    p->n_syncs++;
    p->works = true;
    for (int i = 0; i < p->n_blocks; i++) p->list[i].sync = p->n_syncs;
}

void mn_plan_rest(mn_megakernel *p, int block) {
    if (mn_plan_add_instr(p, block)) mn_plan_end_instr(p, block, offsetof(mn_decode_instr, gemms));
}

/* ---- the image ------------------------------------------------------------------------------- */

static int64_t instrs_at(const mn_megakernel *p) {
    const int64_t entries = p->n_blocks * (int64_t)sizeof(mn_decode_entry);
    return ((int64_t)sizeof(mn_decode_header) + entries + 127) / 128 * 128;
}

static int64_t handoff_at(const mn_megakernel *p) {
    int64_t bytes = instrs_at(p);
    for (int i = 0; i < p->n_blocks; i++) bytes += COPY_BYTES + p->list[i].n;
    return (bytes + 127) / 128 * 128;
}

size_t mn_megakernel_bytes(const mn_megakernel *p) {
    if (p->failed) return sizeof(mn_decode_header);    // the launch says so
    if (p->n_stages + p->n_copies == 0) return 0;
    return (size_t)(handoff_at(p) + MN_DECODE_WORD_SETS * p->words);
}

/* Which words are read: a byte for each line of them. */
static unsigned char *list_read(const mn_megakernel *p) {
    unsigned char *read = calloc((size_t)(p->words / MN_DECODE_LINE + 1), 1);
    for (int64_t i = 0; i < p->n_ranges && read; i++) {
        const mn_decode_range *range = &p->range[i];
        if (!range->flagged || !range->read) continue;
        const int64_t elements = (range->of.end - range->of.begin) / 2;
        for (int64_t k = 0; k < elements; k += MN_DECODE_PER_LINE) {
            read[(range->words + mn_decode_word_at((unsigned)k)) / MN_DECODE_LINE] = 1;
        }
    }
    return read;
}

/* Words count from the beginning of the image, and are only where somebody reads them. */
typedef struct relocation {
    const unsigned char *read;
    int base;
} relocation;

static void move_words(const relocation *to, int *at) {
    if (*at < 0) return;
    if (to->read && !to->read[*at / MN_DECODE_LINE]) *at = MN_DECODE_NO_WORDS;
    else *at += to->base;
}

static void move_recurrence(const relocation *to, mn_decode_recurrence_instr *m) {
    mn_decode_source *sources[] = { &m->q, &m->e, &m->v, &m->beta, &m->g, &m->plus };
    for (size_t i = 0; i < MN_COUNTOF(sources); i++) sources[i]->at += to->base;
    move_words(to, &m->o_handoff);
    move_words(to, &m->sum.handoff);
}

static void move_palimpsa(const relocation *to, mn_decode_palimpsa_instr *m) {
    mn_decode_source *sources[] = { &m->q, &m->k, &m->v, &m->by, &m->b, &m->g };
    mn_decode_result_at *results[] = { &m->gated, &m->o, &m->skipped, &m->sum };
    for (size_t i = 0; i < MN_COUNTOF(sources); i++) sources[i]->at += to->base;
    for (size_t i = 0; i < MN_COUNTOF(results); i++) move_words(to, &results[i]->handoff);
}

static void move_kla(const relocation *to, mn_decode_kla_instr *m) {
    mn_decode_source *sources[] = { &m->q, &m->k, &m->v, &m->prec, &m->z, &m->gate };
    mn_decode_result_at *results[] = { &m->y, &m->weighted, &m->sum, &m->out };
    for (size_t i = 0; i < MN_COUNTOF(sources); i++) sources[i]->at += to->base;
    for (size_t i = 0; i < MN_COUNTOF(results); i++) move_words(to, &results[i]->handoff);
}

static void move_bayes(const relocation *to, mn_decode_bayes_instr *m) {
    mn_decode_source *sources[] = { &m->q, &m->k, &m->v, &m->la, &m->l2, &m->r2 };
    for (size_t i = 0; i < MN_COUNTOF(sources); i++) sources[i]->at += to->base;
    move_words(to, &m->o.handoff);
}

static void move_stream(const relocation *to, mn_decode_stream_instr *m) {
    mn_decode_source *sources[] = { &m->q, &m->k, &m->v };
    for (size_t i = 0; i < MN_COUNTOF(sources); i++) sources[i]->at += to->base;
    m->splits += to->base;    // always read
    move_words(to, &m->o_handoff);
}

static void move_gemms(const relocation *to, mn_decode_gemm_instr *p, mn_decode_epi_instr *epi) {
    p->x += to->base;
    p->z += to->base;
    move_words(to, &p->row_handoff);
    for (int i = 0; i < p->n_out_tiles; i++) {
        mn_decode_out_tile *tile = &p->out_tile[i];
        tile->plus.at += to->base;
        move_words(to, &tile->to_handoff);
        for (int k = 0; k < tile->n_epis; k++, epi++) {
            for (size_t j = 0; j < MN_COUNTOF(epi->in); j++) epi->in[j].source.at += to->base;
            move_words(to, &epi->to_handoff);
        }
    }
}

static void move_instr(const relocation *to, mn_decode_instr *instr) {
    if (instr->kind == MN_DECODE_RECURRENCE) move_recurrence(to, &instr->memory);
    if (instr->kind == MN_DECODE_PALIMPSA) move_palimpsa(to, &instr->palimpsa);
    if (instr->kind == MN_DECODE_KLA) move_kla(to, &instr->kla);
    if (instr->kind == MN_DECODE_BAYES) move_bayes(to, &instr->bayes);
    if (instr->kind == MN_DECODE_STREAM) move_stream(to, &instr->stream);
    if (instr->kind == MN_DECODE_ATTEND && instr->work.attend.by_words) {
        mn_decode_attend_instr *attend = &instr->work.attend;
        attend->q.at += to->base, attend->k.at += to->base, attend->v.at += to->base;
    }
    if (mn_decode_is_work(instr->kind)) {
        mn_decode_work_instr *work = &instr->work;
        for (int i = 0; i < work->n_published; i++) move_words(to, &work->published[i].words);
    }
    if (instr->kind != MN_DECODE_GEMM) return;
    move_gemms(to, &instr->gemms, (mn_decode_epi_instr *)((char *)instr + instr->epis_at));
}

/* A block's first instruction: blocks in turns copy what the megakernel reads to words. */
static void write_copy_instr(void *at, const mn_megakernel *p, int block, int base) {
    mn_decode_instr *instr = at;
    instr->kind = MN_DECODE_COPY;
    instr->next_bytes = (int)p->list[block].first;
    for (int64_t i = block; i < p->n_copies; i += p->n_blocks) {
        mn_decode_copy *copy = &instr->copy.of[instr->copy.n++];
        *copy = p->copy[i];
        copy->words += base;
    }
}

static void write_header(mn_decode_header *header, const mn_megakernel *p) {
    for (int64_t i = 0; i < p->n_copies; i++) {
        if (!p->copy[i].index) continue;
        header->index = p->copy[i].index;
        header->n_gather_blocks = (int)mn_min(i + 1, p->n_blocks);
    }
}

/* A block's instructions from `at` on. */
static void write_block(unsigned char *at, const mn_megakernel *p, int block,
                        const relocation *to) {
    const mn_decode_instr_list *list = &p->list[block];
    write_copy_instr(at, p, block, to->base);
    if (list->n == 0) return;
    at += COPY_BYTES;
    memcpy(at, list->bytes, (size_t)list->n);
    int64_t bytes = list->first;
    for (int64_t i = 0; i < list->n;) {
        mn_decode_instr *instr = (mn_decode_instr *)(at + i);
        move_instr(to, instr);
        i += bytes;
        bytes = instr->next_bytes;
    }
}

void mn_megakernel_encode(const mn_megakernel *p, void *image) {
    unsigned char *bytes = image;
    memset(bytes, 0, mn_megakernel_bytes(p));
    if (p->failed) return;
    memset(bytes + handoff_at(p), MN_DECODE_SENTINEL & 0xff,
           (size_t)(MN_DECODE_WORD_SETS * p->words));
    unsigned char *read = list_read(p);
    const relocation to = { read, (int)handoff_at(p) };
    write_header(image, p);
    mn_decode_entry *entries = (mn_decode_entry *)(bytes + sizeof(mn_decode_header));
    int64_t at = instrs_at(p);
    for (int block = 0; block < p->n_blocks; block++) {
        entries[block] = (mn_decode_entry){ at, COPY_BYTES };
        write_block(bytes + at, p, block, &to);
        at += COPY_BYTES + p->list[block].n;
    }
    free(read);
}

int mn_megakernel_launch(const mn_megakernel *p, void *image, void *stream) {
    if (p->failed) return NO_MEMORY;
    const mn_decode_launch_args given = { 1 + p->n_stages, (int)handoff_at(p), (int)p->words,
                                          p->ragged, p->works, p->attends, p->hyper,
                                          p->streams, p->small, p->steps };
    return mn_megakernel_start(&given, image, stream);
}
