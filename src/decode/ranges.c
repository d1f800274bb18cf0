/* ranges.c - what the stages of a megakernel read and write of the step's tensors, and where its
 * hand-off words are. */
#include <string.h>

#include "base/util.h"
#include "decode/plan.h"

enum { MOST_RANGES = 16384 };

/* What is of no tensor fits no stage. */
static mn_mem_range range_of(mn_stage_ranges *r, const void *data, size_t bytes, bool writes) {
    mn_mem_range range = mn_values_range(r->p->values, data, bytes);
    range.writes = writes;
    r->fits = r->fits && range.value != 0;
    return range;
}

void mn_stage_open(mn_stage_ranges *r, mn_megakernel *p) {
    r->p = p;
    r->n = 0;
    r->n_copies = p->n_copies;
    r->fits = true;
    r->behind = false;
}

static mn_decode_range *add(mn_stage_ranges *r, mn_mem_range of) {
    if (r->n == MN_STAGE_RANGES) {
        r->fits = false;
        return NULL;
    }
    r->list[r->n] = (mn_decode_range){ .of = of, .words = MN_DECODE_NO_WORDS };
    return &r->list[r->n++];
}

static bool is_written(const mn_megakernel *p, const mn_mem_range *range) {
    for (int64_t i = 0; i < p->n_ranges; i++) {
        if (p->range[i].of.writes && mn_ranges_meet(range, &p->range[i].of)) return true;
    }
    return false;
}

bool mn_stage_is_written(const mn_stage_ranges *r, const void *data, int64_t bytes) {
    const mn_mem_range range = mn_values_range(r->p->values, data, (size_t)bytes);
    return is_written(r->p, &range);
}

void mn_stage_loads(mn_stage_ranges *r, const void *data, int64_t count, size_t item) {
    if (!data) return;
    const mn_mem_range range = range_of(r, data, (size_t)count * item, false);
    if (is_written(r->p, &range)) r->fits = false;
    add(r, range);
}

void mn_stage_touches(mn_stage_ranges *r, const mn_mem_range *range, bool flagged) {
    if (!range->writes && is_written(r->p, range)) r->behind = true;
    for (int64_t i = 0; i < r->p->n_ranges && range->writes; i++) {
        if (mn_ranges_meet(range, &r->p->range[i].of)) r->fits = false;
    }
    for (int i = 0; i < r->n && range->writes; i++) {    // words are written once
        const mn_decode_range *other = &r->list[i];
        const bool words = other->of.writes && (flagged || other->flagged);
        if (words && mn_ranges_meet(range, &other->of)) r->fits = false;
    }
    mn_decode_range *added = add(r, *range);
    if (added) added->flagged = flagged;
}

void mn_stage_reads(mn_stage_ranges *r, const void *data, int64_t count, size_t item) {
    if (!data) return;
    const mn_mem_range range = range_of(r, data, (size_t)count * item, false);
    mn_stage_touches(r, &range, false);
}

void mn_stage_writes(mn_stage_ranges *r, const void *data, int64_t count, size_t item,
                     bool flagged) {
    if (!data) return;
    const mn_mem_range range = range_of(r, data, (size_t)count * item, true);
    mn_stage_touches(r, &range, flagged);
}

void mn_stage_copies(mn_stage_ranges *r, mn_decode_copy all) {
    mn_megakernel *p = r->p;
    for (int from = 0; from < all.count && r->fits; from += MN_DECODE_CHUNK) {
        r->fits = r->n_copies < MN_DECODE_COPIES * p->n_blocks &&
                  mn_plan_grow((void **)&p->copy, &p->max_copies, r->n_copies + 1,
                               sizeof *p->copy);
        if (!r->fits) return;
        mn_decode_copy *copy = &p->copy[r->n_copies++];
        *copy = all;
        copy->from += from;
        copy->words += mn_decode_word_at((unsigned)from);
        if (copy->to) copy->to += from;
        copy->count = (int)mn_min(all.count - from, MN_DECODE_CHUNK);
    }
}

void mn_stage_add_words(mn_stage_ranges *r, mn_decode_range *range) {
    const int64_t elements = (range->of.end - range->of.begin) / 2;
    range->words = (int)r->p->words;
    r->p->words += (elements / MN_DECODE_PER_LINE + 1) * MN_DECODE_LINE;
}

/* The range whose words hold all of `range`; NULL: none does. What meets it in another way does not
 * fit. */
static mn_decode_range *home_of(mn_stage_ranges *r, const mn_mem_range *range) {
    mn_megakernel *p = r->p;
    mn_decode_range *home = NULL;
    for (int64_t i = 0; i < p->n_ranges + r->n; i++) {
        mn_decode_range *other = i < p->n_ranges ? &p->range[i] : &r->list[i - p->n_ranges];
        const bool writes = other->of.writes, own = i >= p->n_ranges && writes;
        if (own || !(writes || other->flagged) || !mn_ranges_meet(range, &other->of)) continue;
        const bool whole = other->of.begin <= range->begin && range->end <= other->of.end;
        if (whole && other->flagged) home = other;
        else if (writes) r->fits = false;
    }
    return home;
}

mn_decode_source mn_stage_source(mn_stage_ranges *r, const void *data, int64_t count, int even) {
    const mn_mem_range range = range_of(r, data, (size_t)count * 2, false);
    mn_decode_range *home = home_of(r, &range);
    if (!home) {
        r->fits = r->fits && (uintptr_t)data % 2 == 0;
        home = r->fits ? add(r, range) : NULL;
        if (!home) return (mn_decode_source){ 0 };
        home->flagged = true;
        mn_stage_add_words(r, home);
        mn_stage_copies(r, (mn_decode_copy){ .from = data, .words = home->words,
                                             .count = (int)count });
    }
    const int64_t at = (range.begin - home->of.begin) / 2;
    r->fits = r->fits && at % even == 0;
    home->read = true;
    return (mn_decode_source){ home->words + mn_decode_word_at((unsigned)at), 1,
                               (short)(at % 2) };
}

int mn_stage_words(const mn_stage_ranges *r, const void *data) {
    for (int i = 0; i < r->n; i++) {
        const mn_mem_range *of = &r->list[i].of;
        if (of->writes && mn_values_begins(r->p->values, of, data)) return r->list[i].words;
    }
    return MN_DECODE_NO_WORDS;
}

bool mn_stage_close(mn_stage_ranges *r) {
    mn_megakernel *p = r->p;
    if (!r->fits || p->n_ranges + r->n > MOST_RANGES ||
        !mn_plan_grow((void **)&p->range, &p->max_ranges, p->n_ranges + r->n, sizeof *p->range)) {
        return false;
    }
    p->n_copies = r->n_copies;
    for (int i = 0; i < r->n; i++) {
        if (r->list[i].flagged && r->list[i].words < 0) mn_stage_add_words(r, &r->list[i]);
        p->range[p->n_ranges + i] = r->list[i];
    }
    p->n_ranges += r->n;
    if (r->behind) mn_plan_sync(p);
    return true;
}

mn_decode_source mn_source_from(mn_decode_source source, int64_t i) {
    source.at = mn_decode_word_from(source.at, (unsigned)(source.odd + i));
    source.odd = (short)((source.odd + i) % 2);
    return source;
}
