/* plan_caches.c - a token against a cache as stages of a megakernel.
 *
 * Attention with heads of up to 128 channels, whose rows come as words, is cut into as many splits
 * as its heads need to keep the blocks busy; a second stage adds up those of each head. No barrier
 * stands in front of either (mn_decode_stream_instr).
 *
 * Otherwise a barrier stands in front of each stage: parts of 256 keys, shared out among blocks,
 * and at last the sum of the parts of each head. Of attention these are two, of HyperMLP four, of
 * which each reads what all of the one before made. How many keys there are is known when they run:
 * a block has every so many-th part of a head, however many those are. Which parts there are, and
 * the order of their sum, goes by the keys alone. */
#include "base/util.h"
#include "decode/plan.h"

/* Pieces of a stage: for each head every so many-th part, or where n_slots is 0 a piece a head.
 * They are of `attention` or, with a phase, of `hyper`. Results (V) of a head become words. */
typedef struct cache_stage {
    const mn_decode_attention *attention;
    const mn_decode_hyper *hyper;
    int phase;
    int64_t heads, n_slots, V;
    const mn_decode_bf16 *o;    // NULL: parts, which have no words
    int o_handoff;
    bool by_words;              // the token's queries, key and value
    mn_decode_source q, k, v;   // of all heads
    int64_t n_splits;           // attention's, where it is streamed; 0: it is not
    int splits;                 // their words
} cache_stage;

/* Attention's piece of a key-value head, or the sum of a query head's. */
static mn_decode_attend_instr attend_instr(const cache_stage *s, int64_t head, int64_t slot) {
    const mn_decode_attention *a = s->attention;
    mn_decode_attend_instr to = { (int)head, (int)slot, (int)s->n_slots, s->by_words, .of = *a };
    if (!s->by_words) return to;
    to.q = mn_source_from(s->q, head * (a->H / a->J) * a->K);
    to.k = mn_source_from(s->k, head * a->K);
    to.v = mn_source_from(s->v, head * a->V);
    return to;
}

/* Splits of a key-value head, or their sum for a query head. */
static mn_decode_stream_instr stream_instr(const cache_stage *s, int64_t head, int64_t slot) {
    const mn_decode_attention *a = s->attention;
    mn_decode_stream_instr to = { (int)head, (int)slot, (int)s->n_slots, (int)s->n_splits,
                                  s->splits, MN_DECODE_NO_WORDS, (int)(a->H / a->J), .of = *a };
    if (s->n_slots == 0) {
        to.o_handoff = mn_decode_word_from(s->o_handoff, (unsigned)(head * a->V));
        return to;
    }
    to.q = mn_source_from(s->q, head * to.group * a->K);
    to.k = mn_source_from(s->k, head * a->K);
    to.v = mn_source_from(s->v, head * a->V);
    return to;
}

static void fill_instr(mn_decode_instr *instr, const cache_stage *s, int64_t head, int64_t slot) {
    if (s->n_splits > 0) {
        instr->kind = MN_DECODE_STREAM;
        instr->stream = stream_instr(s, head, slot);
        return;
    }
    if (s->attention) {
        instr->kind = MN_DECODE_ATTEND;
        instr->work.attend = attend_instr(s, head, slot);
    } else {
        instr->kind = MN_DECODE_HYPER;
        instr->work.hyper = (mn_decode_hyper_instr){ s->phase, (int)head, (int)slot,
                                                     (int)mn_max(s->n_slots, 1), *s->hyper };
    }
    if (!s->o) return;
    instr->work.n_published = 1;
    instr->work.published[0] = (mn_decode_publication){
        s->o + head * s->V, mn_decode_word_from(s->o_handoff, (unsigned)(head * s->V)), (int)s->V
    };
}

static size_t instr_bytes(const cache_stage *s) {
    if (s->n_splits > 0) {
        return offsetof(mn_decode_instr, stream) + sizeof(mn_decode_stream_instr);
    }
    return s->attention ? offsetof(mn_decode_instr, work.attend) + sizeof(mn_decode_attend_instr)
                        : offsetof(mn_decode_instr, work.hyper) + sizeof(mn_decode_hyper_instr);
}

/* Piece `from` and those after it, one for each block from the next one on; the stage of the
 * others is empty. */
static void deal(mn_megakernel *p, const cache_stage *s) {
    const int64_t all = s->heads * mn_max(s->n_slots, 1);
    for (int64_t from = 0; from < all && !p->failed; from += p->n_blocks) {
        for (int block = 0; block < p->n_blocks && !p->failed; block++) {
            const int64_t i = from + (block - p->phase + p->n_blocks) % p->n_blocks;
            if (i >= all) {
                mn_plan_rest(p, block);
                continue;
            }
            mn_decode_instr *instr = mn_plan_add_instr(p, block);
            if (!instr) break;
            fill_instr(instr, s, i % s->heads, i / s->heads);
            mn_plan_end_instr(p, block, instr_bytes(s));
        }
        p->n_stages++;
    }
    p->phase = (int)((p->phase + all) % p->n_blocks);
    if (s->n_splits > 0) {
        p->streams = true;
        return;
    }
    p->works = true;
    if (s->attention) p->attends = true;
    else p->hyper = true;
}

/* Parts that a head's pieces are dealt out by. */
static int64_t slots_of(const mn_megakernel *p, int64_t heads, int64_t n_parts) {
    return mn_min(mn_max(p->n_blocks / heads, 1), n_parts);
}

static bool fits_widths(mn_dtype dtype, int64_t K, int64_t V, const void *keys,
                        const void *values) {
    return dtype == MN_BF16 && K % 8 == 0 && V % 8 == 0 && K <= MN_DECODE_ATTEND_WIDEST &&
           V <= MN_DECODE_ATTEND_WIDEST && (uintptr_t)keys % 16 == 0 &&
           (uintptr_t)values % 16 == 0;
}

/* ---- attention ------------------------------------------------------------------------------- */

static int64_t parts_size(const mn_decode_attention *a) {
    return a->H * a->n_parts * (a->V + 2);
}

/* Whether the token's rows are one behind the other, and have room beside attention's own memory
 * (megakernel_steps.cuh). */
static bool has_words(const mn_decode_attention *a) {
    const int64_t group = a->H / a->J;
    return (a->H == 1 || a->q_step == a->K) && (a->J == 1 || (a->k_step == a->K &&
                                                              a->v_step == a->V)) &&
           mn_decode_attend_bytes(a->K) + (group * a->K + a->K + a->V) * 2 <= MN_DECODE_SCRATCH;
}

/* What the parts are made of, the token's row of the caches among it. */
static void gather_parts(mn_stage_ranges *r, cache_stage *s) {
    const mn_decode_attention *a = s->attention;
    if (s->by_words) {
        s->q = mn_stage_source(r, a->q, a->H * a->K, 8);
        s->k = mn_stage_source(r, a->k, a->J * a->K, 8);
        s->v = mn_stage_source(r, a->v, a->J * a->V, 8);
    } else {
        mn_stage_reads(r, a->q, (a->H - 1) * a->q_step + a->K, 2);
        mn_stage_reads(r, a->k, (a->J - 1) * a->k_step + a->K, 2);
        mn_stage_reads(r, a->v, (a->J - 1) * a->v_step + a->V, 2);
    }
    if (a->turns > 0) mn_stage_reads(r, a->inv_freq, a->turns / 2, sizeof *a->inv_freq);
    mn_stage_loads(r, a->position, 1, sizeof *a->position);
    mn_stage_writes(r, a->keys, a->capacity * a->J * a->K, 2, false);
    mn_stage_writes(r, a->values, a->capacity * a->J * a->V, 2, false);
    mn_stage_writes(r, a->parts, parts_size(a), sizeof *a->parts, false);
}

/* `splits`: they come as words. */
static void gather_sums(mn_stage_ranges *r, const mn_decode_attention *a, bool splits) {
    if (!splits) mn_stage_reads(r, a->parts, parts_size(a), sizeof *a->parts);
    mn_stage_writes(r, a->o, a->H * a->V, 2, true);
}

/* Whether splits come through the ring, given that the token's rows are words. */
static bool is_streamed(const mn_decode_attention *a) {
    return MN_DECODE_STREAMS && a->K <= MN_DECODE_STREAM_WIDEST &&
           a->V <= MN_DECODE_STREAM_WIDEST && a->H / a->J <= MN_DECODE_STREAM_HEADS;
}

/* The stages behind each other, once the first has been closed. */
static void add_both(mn_megakernel *p, cache_stage *parts) {
    const mn_decode_attention *a = parts->attention;
    cache_stage sums = { .attention = a, .heads = a->H, .V = a->V, .o = a->o,
                         .n_splits = parts->n_splits };
    mn_stage_ranges last;
    if (parts->n_splits > 0) {
        parts->splits = sums.splits = (int)p->words;
        p->words += mn_decode_splits_bytes(a->H, a->J, a->V);
    }
    deal(p, parts);
    mn_stage_open(&last, p);
    gather_sums(&last, a, parts->n_splits > 0);
    if (mn_stage_close(&last)) {
        sums.o_handoff = mn_stage_words(&last, a->o);
        deal(p, &sums);
    } else {
        p->failed = true;    // memory was out, or results lie in what the parts are made of
    }
}

bool mn_megakernel_add_attention(mn_megakernel *p, const mn_decode_attention *a) {
    const bool serves = a->J > 0 && a->H % a->J == 0 &&
                        fits_widths(a->dtype, a->K, a->V, a->keys, a->values);
    if (p->failed || !serves) return false;
    cache_stage parts = { .attention = a, .heads = a->J };
    mn_stage_ranges ranges, last;
    mn_stage_open(&last, p);
    gather_sums(&last, a, false);
    for (int words = has_words(a); words >= 0; words--) {
        parts.by_words = words;
        mn_stage_open(&ranges, p);
        gather_parts(&ranges, &parts);
        if (ranges.fits) break;
    }
    if (!last.fits || !mn_stage_close(&ranges)) return false;
    if (parts.by_words && is_streamed(a)) parts.n_splits = mn_decode_splits(a->J);
    parts.n_slots = slots_of(p, a->J, parts.n_splits > 0 ? parts.n_splits : a->n_parts);
    add_both(p, &parts);
    return true;
}

/* ---- HyperMLP -------------------------------------------------------------------------------- */

/* A row of `width` numbers for each of n branches or heads. */
static void reads_rows(mn_stage_ranges *r, const void *data, int64_t n, int64_t step,
                       int64_t width) {
    if (data) mn_stage_reads(r, data, (n - 1) * step + width, 2);
}

/* What shares of ranks are made of (`sums`), or what those become. */
static void reads_mix(mn_stage_ranges *r, const mn_decode_mix *m, int64_t n, int64_t P, bool sums) {
    if (!m->U) return;
    if (sums) {
        reads_rows(r, m->U, n, m->U_step, P * m->R);
        return;
    }
    reads_rows(r, m->c, n, m->c_step, m->R);
    reads_rows(r, m->Vt, n, m->Vt_step, m->R * P);
    mn_stage_reads(r, m->d, (n - 1) * m->d_step + P, m->wide ? 4 : 2);
}

static void gather_phase(mn_stage_ranges *r, const mn_decode_hyper *a, int phase) {
    const int64_t scores = a->Q * a->n_parts * (MN_DECODE_ATTEND_KEYS + a->mix[0].R);
    const int64_t mixed = a->H * a->n_parts * (MN_DECODE_ATTEND_KEYS + a->mix[1].R + 1);
    const int64_t parts = a->H * a->n_parts * a->V;
    mn_stage_loads(r, a->position, 1, sizeof *a->position);
    if (phase == MN_HYPER_SCORES) {
        reads_rows(r, a->q, a->Q, a->q_step, a->K);
        reads_rows(r, a->k, a->Q, a->k_step, a->K);
        reads_rows(r, a->v, a->H, a->v_step, a->V);
        reads_mix(r, &a->mix[0], a->Q, a->P, true);
        mn_stage_writes(r, a->keys, a->capacity * a->Q * a->K, 2, false);
        mn_stage_writes(r, a->values, a->capacity * a->H * a->V, 2, false);
        mn_stage_writes(r, a->scores, scores, sizeof *a->scores, false);
    } else if (phase == MN_HYPER_MIX) {
        mn_stage_reads(r, a->scores, scores, sizeof *a->scores);
        reads_mix(r, &a->mix[0], a->Q, a->P, false);
        reads_mix(r, &a->mix[1], a->H, a->P, true);
        mn_stage_writes(r, a->mixed, mixed, sizeof *a->mixed, false);
    } else if (phase == MN_HYPER_VALUES) {
        mn_stage_reads(r, a->mixed, mixed, sizeof *a->mixed);
        reads_mix(r, &a->mix[1], a->H, a->P, false);
        mn_stage_reads(r, a->values, a->capacity * a->H * a->V, 2);
        mn_stage_writes(r, a->parts, parts, sizeof *a->parts, false);
    } else {
        mn_stage_reads(r, a->mixed, mixed, sizeof *a->mixed);
        mn_stage_reads(r, a->parts, parts, sizeof *a->parts);
        reads_rows(r, a->gv, a->H, a->gv_step, a->V);
        mn_stage_writes(r, a->o, a->H * a->V, 2, true);
    }
}

/* Whether each phase fits behind what is there already. */
static bool phases_fit(mn_megakernel *p, const mn_decode_hyper *a) {
    bool fit = true;
    for (int phase = 0; phase < MN_HYPER_PHASES; phase++) {
        mn_stage_ranges r;
        mn_stage_open(&r, p);
        gather_phase(&r, a, phase);
        fit = fit && r.fits;
    }
    return fit;
}

bool mn_megakernel_add_hyper(mn_megakernel *p, const mn_decode_hyper *a) {
    const bool serves = a->position && a->H > 0 && a->mix[0].R <= MN_DECODE_HYPER_RANKS &&
                        a->mix[1].R <= MN_DECODE_HYPER_RANKS &&
                        (a->H == 1 || a->o_step == a->V) &&
                        fits_widths(a->dtype, a->K, a->V, a->keys, a->values);
    if (p->failed || !serves || !phases_fit(p, a)) return false;
    for (int phase = 0; phase < MN_HYPER_PHASES; phase++) {
        cache_stage s = { .hyper = a, .phase = phase, .V = a->V };
        mn_stage_ranges r;
        mn_stage_open(&r, p);
        gather_phase(&r, a, phase);
        if (!mn_stage_close(&r)) {
            if (phase == 0) return false;
            p->failed = true;    // memory was out, or results lie in what earlier phases read
            return true;
        }
        s.heads = phase == MN_HYPER_SCORES ? a->Q : a->H;
        if (phase < MN_HYPER_OUTPUT) s.n_slots = slots_of(p, s.heads, a->n_parts);
        else s.o = a->o, s.o_handoff = mn_stage_words(&r, a->o);
        deal(p, &s);
    }
    return true;
}
