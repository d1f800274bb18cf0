/* megakernel_ranges.cuh - a program while it is written (megakernel_build.cu,
 * megakernel_encode.cu): the notes of all
 * blocks so far, and what memory its stages touch.
 *
 * Numbers that a later stage reads have words behind all notes. Since no barrier stands between
 * stages, nothing may be written that an earlier stage reads from memory or writes itself. */
#ifndef MN_KERNELS_CUDA_DECODE_MEGAKERNEL_RANGES_CUH
#define MN_KERNELS_CUDA_DECODE_MEGAKERNEL_RANGES_CUH

#include <stdlib.h>

#include "kernels/cuda/decode/megakernel.cuh"

enum { MN_FEW_RANGES = 16384 };

/* Bytes that stages read or write. Those written may have words; those read have where they are
 * copied to words first. */
struct mn_few_range {
    uintptr_t begin, end;
    bool writes, flagged, read;
    int words;                  // bytes from the first word
};

/* A block's notes. */
struct mn_few_notes {
    unsigned char *bytes;
    int64_t n, most, last;      // where the last note begins
    int64_t first;              // bytes of the first
};

struct mn_few_program {
    int n_stages, n_blocks, turn;    // turn: the block that has the next unit
    int64_t words;                   // bytes of all words
    int64_t n_copies, most_copies;
    mn_few_copy *copy;               // what is copied to words first
    mn_few_notes *list;
    mn_few_range *range;
    int64_t n_ranges, most_ranges;
    bool failed;                     // memory was out
    bool ragged;                     // a row's last chunk is not whole
};

/* ---- lists ----------------------------------------------------------------------------------- */

inline bool mn_few_grow(void **list, int64_t *most, int64_t n, size_t item) {
    if (n <= *most) return true;
    const int64_t more = n > 2 * *most ? n : 2 * *most;
    void *grown = realloc(*list, (size_t)more * item);
    if (!grown) return false;
    *list = grown;
    *most = more;
    return true;
}

/* A zeroed note at the end of a block's list; its bytes are set when it is complete. */
inline mn_few_note *mn_few_add_note(mn_few_program *p, int block) {
    mn_few_notes *list = &p->list[block];
    if (!mn_few_grow((void **)&list->bytes, &list->most, list->n + MN_FEW_NOTE_BYTES, 1)) {
        p->failed = true;
        return NULL;
    }
    mn_few_note *note = (mn_few_note *)(list->bytes + list->n);
    memset(note, 0, MN_FEW_NOTE_BYTES);
    return note;
}

inline void mn_few_end_note(mn_few_program *p, int block, int bytes) {
    mn_few_notes *list = &p->list[block];
    bytes = (bytes + 15) / 16 * 16;
    if (list->n == 0) list->first = bytes;
    else ((mn_few_note *)(list->bytes + list->last))->next_bytes = bytes;
    list->last = list->n;
    list->n += bytes;
}

inline mn_few_range mn_few_range_of(const void *data, size_t bytes, bool writes) {
    mn_few_range range = {};
    range.begin = (uintptr_t)data, range.end = range.begin + bytes;
    range.writes = writes, range.words = MN_FEW_NOWHERE;
    return range;
}

inline bool mn_few_overlap(const mn_few_range &a, const mn_few_range &b) {
    return a.begin < b.end && b.begin < a.end;
}

/* ---- what a stage touches -------------------------------------------------------------------- */

/* What one stage touches, gathered before it is added. */
struct mn_few_touch {
    mn_few_program *p;
    mn_few_range list[512];
    int n;
    int64_t n_copies;    // of the program, without those of a stage that is not added
    bool fits;

    explicit mn_few_touch(mn_few_program *program)
        : p(program), n(0), n_copies(program->n_copies), fits(true) {}

    void add(const mn_few_range &range) {
        if (n == (int)(sizeof list / sizeof *list)) fits = false;
        else list[n++] = range;
    }

    /* Numbers that must be older than the program. */
    void reads(const void *data, int64_t count, size_t item) {
        if (!data) return;
        const mn_few_range range = mn_few_range_of(data, (size_t)count * item, false);
        if (is_written(data, count * (int64_t)item)) fits = false;
        add(range);
    }

    /* Results, which others may read as words where they are `flagged`. */
    void writes(const void *data, int64_t count, size_t item, bool flagged) {
        if (!data) return;
        mn_few_range range = mn_few_range_of(data, (size_t)count * item, true);
        for (int64_t i = 0; i < p->n_ranges; i++) {
            if (mn_few_overlap(range, p->range[i])) fits = false;
        }
        range.flagged = flagged;
        add(range);
    }

    bool is_written(const void *data, int64_t bytes) const {
        const mn_few_range range = mn_few_range_of(data, (size_t)bytes, false);
        for (int64_t i = 0; i < p->n_ranges; i++) {
            if (p->range[i].writes && mn_few_overlap(range, p->range[i])) return true;
        }
        return false;
    }

    /* Memory that a block reads before it writes the same itself. */
    void renews(const void *data, int64_t count, size_t item) {
        writes(data, count, item, false);
    }

    /* Cut into what a block copies at once. */
    void copies(mn_few_copy all) {
        for (int from = 0; from < all.count && fits; from += MN_FEW_CHUNK) {
            fits = n_copies < MN_FEW_COPIES * p->n_blocks &&
                   mn_few_grow((void **)&p->copy, &p->most_copies, n_copies + 1, sizeof *p->copy);
            if (!fits) return;
            mn_few_copy *piece = &p->copy[n_copies++];
            *piece = all;
            piece->from += from, piece->words += mn_few_word((unsigned)from);
            if (piece->to) piece->to += from;
            piece->count = (int)mn_min(all.count - from, MN_FEW_CHUNK);
        }
    }

    /* Numbers of bf16, wherever they come from. `even`: those asked for at once. */
    mn_few_source source(const void *data, int64_t count, int even) {
        const mn_few_range range = mn_few_range_of(data, (size_t)count * 2, false);
        mn_few_range *home = NULL;
        for (int64_t i = 0; i < p->n_ranges + n; i++) {
            mn_few_range &other = i < p->n_ranges ? p->range[i] : list[i - p->n_ranges];
            const bool own = i >= p->n_ranges && other.writes;
            if (own || !(other.writes || other.flagged) || !mn_few_overlap(range, other)) continue;
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
            add_words(home);
            copies({ (const mn_bf16 *)data, NULL, NULL, 0, home->words, (int)count });
        }
        const int64_t at = (int64_t)(range.begin - home->begin) / 2;
        fits = fits && at % even == 0;
        home->read = true;
        return { home->words + mn_few_word((unsigned)at), 1, (short)(at % 2) };
    }

    /* A place for words. What is not added at last leaves a gap. */
    void add_words(mn_few_range *range) {
        range->words = (int)p->words;
        const int64_t numbers = (int64_t)(range->end - range->begin) / 2;
        p->words += (numbers / MN_FEW_OF_LINE + 1) * MN_FEW_LINE;
    }

    /* Words of something written, or MN_FEW_NOWHERE, before it is known whether any are read. */
    int words(const void *data) const {
        for (int i = 0; i < n; i++) {
            if (list[i].writes && list[i].begin == (uintptr_t)data) return list[i].words;
        }
        return MN_FEW_NOWHERE;
    }

    /* Places for words; what has been touched is the program's. */
    bool place(void) {
        if (!fits || p->n_ranges + n > MN_FEW_RANGES ||
            !mn_few_grow((void **)&p->range, &p->most_ranges, p->n_ranges + n, sizeof *list)) {
            return false;
        }
        p->n_copies = n_copies;
        for (int i = 0; i < n; i++) {
            if (list[i].flagged && list[i].words < 0) add_words(&list[i]);
            p->range[p->n_ranges + i] = list[i];
        }
        p->n_ranges += n;
        return true;
    }
};

#endif
