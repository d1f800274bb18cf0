/* megakernel_ranges.cuh - a megakernel while it is written (megakernel_build.cu,
 * megakernel_encode.cu): the instrs of all blocks so far, and what memory its stages access.
 *
 * Numbers that a later stage reads have words behind all instrs. Since no barrier stands between
 * stages, nothing may be written that an earlier stage reads from memory or writes itself. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_RANGES_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_RANGES_CUH

#include <stdlib.h>

#include "kernels/cuda/decode/megakernel.cuh"

namespace mneme::decode {

enum { MN_DECODE_RANGES = 16384 };

/* Bytes that stages read or write. Those written may have words; those read have where they are
 * copied to words first. */
struct mn_decode_range {
    uintptr_t begin, end;
    bool writes, flagged, read;
    int words;                  // bytes from the first word
};

/* A block's instrs. */
struct mn_decode_instr_list {
    unsigned char *bytes;
    int64_t n, most, last;      // where the last instr begins
    int64_t first;              // bytes of the first
};

struct mn_megakernel {
    int n_stages, n_blocks, phase;    // phase: the block that has the next out_tile
    int64_t words;                   // bytes of all words
    int64_t n_copies, max_copies;
    mn_decode_copy *copy;               // what is copied to words first
    mn_decode_instr_list *list;
    mn_decode_range *range;
    int64_t n_ranges, max_ranges;
    bool failed;                     // memory was out
    bool ragged;                     // a row's last chunk is not whole
};

/* ---- lists ----------------------------------------------------------------------------------- */

inline bool mn_decode_grow(void **list, int64_t *most, int64_t n, size_t item) {
    if (n <= *most) return true;
    const int64_t more = n > 2 * *most ? n : 2 * *most;
    void *grown = realloc(*list, (size_t)more * item);
    if (!grown) return false;
    *list = grown;
    *most = more;
    return true;
}

/* A zeroed instr at the end of a block's list; its bytes are set when it is complete. */
inline mn_decode_instr *mn_decode_add_instr(mn_megakernel *p, int block) {
    mn_decode_instr_list *list = &p->list[block];
    if (!mn_decode_grow((void **)&list->bytes, &list->most, list->n + MN_DECODE_INSTR_BYTES, 1)) {
        p->failed = true;
        return NULL;
    }
    mn_decode_instr *instr = (mn_decode_instr *)(list->bytes + list->n);
    memset(instr, 0, MN_DECODE_INSTR_BYTES);
    return instr;
}

inline void mn_decode_end_instr(mn_megakernel *p, int block, int bytes) {
    mn_decode_instr_list *list = &p->list[block];
    bytes = (bytes + 15) / 16 * 16;
    if (list->n == 0) list->first = bytes;
    else ((mn_decode_instr *)(list->bytes + list->last))->next_bytes = bytes;
    list->last = list->n;
    list->n += bytes;
}

inline mn_decode_range mn_decode_range_of(const void *data, size_t bytes, bool writes) {
    mn_decode_range range = {};
    range.begin = (uintptr_t)data, range.end = range.begin + bytes;
    range.writes = writes, range.words = MN_DECODE_NO_WORDS;
    return range;
}

inline bool mn_decode_overlap(const mn_decode_range &a, const mn_decode_range &b) {
    return a.begin < b.end && b.begin < a.end;
}

/* ---- what a stage touches -------------------------------------------------------------------- */

/* What one stage touches, gathered before it is added. */
struct mn_decode_ranges {
    mn_megakernel *p;
    mn_decode_range list[512];
    int n;
    int64_t n_copies;    // of the megakernel, without those of a stage that is not added
    bool fits;

    explicit mn_decode_ranges(mn_megakernel *megakernel)
        : p(megakernel), n(0), n_copies(megakernel->n_copies), fits(true) {}

    void add(const mn_decode_range &range) {
        if (n == (int)(sizeof list / sizeof *list)) fits = false;
        else list[n++] = range;
    }

    /* Numbers that must be older than the megakernel. */
    void reads(const void *data, int64_t count, size_t item) {
        if (!data) return;
        const mn_decode_range range = mn_decode_range_of(data, (size_t)count * item, false);
        if (is_written(data, count * (int64_t)item)) fits = false;
        add(range);
    }

    /* Results, which others may read as words where they are `flagged`. */
    void writes(const void *data, int64_t count, size_t item, bool flagged) {
        if (!data) return;
        mn_decode_range range = mn_decode_range_of(data, (size_t)count * item, true);
        for (int64_t i = 0; i < p->n_ranges; i++) {
            if (mn_decode_overlap(range, p->range[i])) fits = false;
        }
        range.flagged = flagged;
        add(range);
    }

    bool is_written(const void *data, int64_t bytes) const {
        const mn_decode_range range = mn_decode_range_of(data, (size_t)bytes, false);
        for (int64_t i = 0; i < p->n_ranges; i++) {
            if (p->range[i].writes && mn_decode_overlap(range, p->range[i])) return true;
        }
        return false;
    }

    /* Memory that a block reads before it writes the same itself. */
    void updates(const void *data, int64_t count, size_t item) {
        writes(data, count, item, false);
    }

    /* Cut into what a block copies at once. */
    void copies(mn_decode_copy all) {
        for (int from = 0; from < all.count && fits; from += MN_DECODE_CHUNK) {
            fits = n_copies < MN_DECODE_COPIES * p->n_blocks &&
                   mn_decode_grow((void **)&p->copy, &p->max_copies, n_copies + 1, sizeof *p->copy);
            if (!fits) return;
            mn_decode_copy *frag = &p->copy[n_copies++];
            *frag = all;
            frag->from += from, frag->words += mn_decode_word_at((unsigned)from);
            if (frag->to) frag->to += from;
            frag->count = (int)mn_min(all.count - from, MN_DECODE_CHUNK);
        }
    }

    /* Numbers of bf16, wherever they come from. `even`: those asked for at once. */
    mn_decode_source source(const void *data, int64_t count, int even) {
        const mn_decode_range range = mn_decode_range_of(data, (size_t)count * 2, false);
        mn_decode_range *home = NULL;
        for (int64_t i = 0; i < p->n_ranges + n; i++) {
            mn_decode_range &other = i < p->n_ranges ? p->range[i] : list[i - p->n_ranges];
            const bool own = i >= p->n_ranges && other.writes;
            if (own || !(other.writes || other.flagged)
                || !mn_decode_overlap(range, other)) continue;
            const bool whole = other.begin <= range.begin && range.end <= other.end;
            if (whole && other.flagged) home = &other;
            else if (other.writes) fits = false;
        }
        if (!home) {
            fits = fits && range.begin % 2 == 0 && n < (int)(sizeof list / sizeof *list);
            if (!fits) return {};
            home = &list[n++];
            *home = range;
            home->flagged = true;
            add_handoff(home);
            copies({ (const mn_bf16 *)data, NULL, NULL, 0, home->words, (int)count });
        }
        const int64_t at = (int64_t)(range.begin - home->begin) / 2;
        fits = fits && at % even == 0;
        home->read = true;
        return { home->words + mn_decode_word_at((unsigned)at), 1, (short)(at % 2) };
    }

    /* A place for words. What is not added at last leaves a gap. */
    void add_handoff(mn_decode_range *range) {
        range->words = (int)p->words;
        const int64_t elements = (int64_t)(range->end - range->begin) / 2;
        p->words += (elements / MN_DECODE_PER_LINE + 1) * MN_DECODE_LINE;
    }

    /* Words of something written, or MN_DECODE_NO_WORDS, before it is known whether any are read.
     * */
    int words(const void *data) const {
        for (int i = 0; i < n; i++) {
            if (list[i].writes && list[i].begin == (uintptr_t)data) return list[i].words;
        }
        return MN_DECODE_NO_WORDS;
    }

    /* Places for words; what has been ranges is the megakernel's. */
    bool place(void) {
        if (!fits || p->n_ranges + n > MN_DECODE_RANGES ||
            !mn_decode_grow((void **)&p->range, &p->max_ranges, p->n_ranges + n, sizeof *list)) {
            return false;
        }
        p->n_copies = n_copies;
        for (int i = 0; i < n; i++) {
            if (list[i].flagged && list[i].words < 0) add_handoff(&list[i]);
            p->range[p->n_ranges + i] = list[i];
        }
        p->n_ranges += n;
        return true;
    }
};

}    // namespace mneme::decode

#endif
