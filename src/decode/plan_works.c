/* plan_works.c - small works, and operators that decode_steps.def has a row for, as a stage of a
 * megakernel.
 *
 * They read and write memory as launches of their own do. Where any reads what an earlier stage
 * wrote, a barrier of the whole grid stands in front. Works that depend on each other are a
 * block's, one after the other; what is large and goes element by element, or row by row, is
 * shared out among blocks, and so are heads and columns of operators. Results that are rows of
 * bf16 are published as words. */
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "decode/plan.h"
#include "decode/works.h"

enum {
    ELEMENTS = 1024,    // of a small work that a block has at once
    CHANNELS = 256,     // of a convolution
    ROWS = 8,           // of a norm
    EVEN = 8,           // pieces begin at multiples of it
    NARROW = 32,        // the widest row that any warp has at once
};

typedef struct work_stage {
    mn_work_set set;
    mn_stage_ranges ranges;
    mn_megakernel *p;
    int *instrs;    // of each block, up to now
    int next;       // the block that has the next piece
} work_stage;

/* ---- memory ---------------------------------------------------------------------------------- */

/* The result where it is a row of bf16. */
static const mn_decode_bf16 *row_of(const mn_decode_op *f) {
    const mn_view *to = mn_decode_result(f);
    const bool row = !mn_is_elementwise(f) || mn_is_row(to, f->shape, mn_small_units(f));
    const int64_t each = mn_small_unit_size(f);
    return row && to->dtype == MN_BF16 && (each == 1 || each % 2 == 0) ? to->data : NULL;
}

static bool is_result(const mn_work_set *set, const mn_mem_range *range) {
    for (int k = 0; k < set->n_steps; k++) {
        int n;
        mn_op_fields(mn_step_op(&set->step[k]), &n);
        for (int i = 0; i < n; i++) {
            const mn_decode_bf16 *row = mn_step_result(&set->step[k], i);
            if (row && mn_values_begins(&set->all->values, range, row)) return true;
        }
    }
    return false;
}

/* What work i reads and writes. */
static void gather_ranges(work_stage *s, int i) {
    const mn_deferred *d = &s->set.all->list[i];
    const mn_decode_bf16 *row = d->kind == MN_DEFERRED_SMALL ? row_of(&d->of.few) : NULL;
    for (int k = 0; k < d->n_ranges; k++) {
        const mn_mem_range *range = &d->ranges[k];
        const bool flagged = (row && mn_values_begins(s->p->values, range, row)) ||
                             is_result(&s->set, range);
        mn_stage_touches(&s->ranges, range, range->writes && flagged);
    }
}

static void publish(mn_decode_instr *instr, const work_stage *s, const mn_decode_bf16 *row,
                    mn_span span) {
    mn_decode_work_instr *to = &instr->work;
    const int words = row ? mn_stage_words(&s->ranges, row) : MN_DECODE_NO_WORDS;
    if (words < 0 || span.count <= 0 || to->n_published == MN_DECODE_PUBLISHED) return;
    to->published[to->n_published++] = (mn_decode_publication){
        row + span.begin, mn_decode_word_from(words, (unsigned)span.begin), (int)span.count
    };
}

/* ---- instructions ---------------------------------------------------------------------------- */

static mn_decode_instr *open_instr(work_stage *s, int block, mn_decode_opcode kind) {
    mn_decode_instr *instr = mn_plan_add_instr(s->p, block);
    if (instr) instr->kind = kind;
    s->instrs[block]++;
    return instr;
}

static void close_small(work_stage *s, int block, const mn_decode_instr *instr) {
    mn_plan_end_instr(s->p, block, offsetof(mn_decode_instr, work.small.job) +
                                       (size_t)instr->work.small.n * MN_DECODE_JOB_BYTES);
}

/* Elements of work i; published where `publishes`. */
typedef struct small_piece {
    int i;
    mn_span span;
    bool publishes;
} small_piece;

/* Whether a work waits for one of those in front, [from, at) of the list, or needs the scratch
 * memory that another one has. */
static bool waits(const mn_defer *all, const small_piece *list, int from, int at) {
    const mn_deferred *d = &all->list[list[at].i];
    const bool whole_row = !mn_is_elementwise(&d->of.few) && d->of.few.shape[2] == 1 &&
                           d->of.few.shape[3] > NARROW;
    for (int k = from; k < at; k++) {
        if (whole_row || d->after & mn_bit(list[k].i)) return true;
    }
    return false;
}

/* Warps that a piece keeps busy. */
static int warps_of(const mn_decode_op *f, mn_span span) {
    const int64_t each = mn_small_unit_size(f), rows = span.count / each;
    if (each > 1 && f->shape[2] > 1) return (int)mn_min(rows, MN_DECODE_WARPS);
    return (int)mn_min(mn_ceil_div(span.count, 128), MN_DECODE_WARPS);
}

static void write_small(work_stage *s, int block, const small_piece *list, int n) {
    int turn = 0;
    s->p->small = s->p->small || n > 0;
    for (int i = 0; i < n;) {
        mn_decode_instr *instr = open_instr(s, block, MN_DECODE_SMALL);
        if (!instr) return;
        mn_decode_small_instr *small = &instr->work.small;
        for (const int from = i; i < n && small->n < MN_DECODE_JOBS; i++) {
            const mn_decode_op *f = mn_small_at(s->set.all, list[i].i);
            const mn_span span = list[i].span;
            const int64_t each = mn_small_unit_size(f);
            mn_megakernel_fill_job(small->job[small->n++], f, span.begin / each,
                                   (span.begin + span.count) / each, 32 * turn,
                                   waits(s->set.all, list, from, i));
            turn = (turn + warps_of(f, span)) % MN_DECODE_WARPS;
            if (list[i].publishes) publish(instr, s, row_of(f), span);
        }
        close_small(s, block, instr);
    }
}

/* ---- chains ---------------------------------------------------------------------------------- */

/* Whether pieces of a chain are independent of each other. */
static bool splits(const mn_defer *all, const mn_chain *c) {
    const mn_decode_op *first = mn_small_at(all, c->of[0]);
    if (c->n == 1) return first->kind != MN_DECODE_ROWS &&
                          (first->kind != MN_DECODE_CONV || first->shape[2] == 1);
    const int64_t count = mn_small_units(first);
    for (int i = 0; i < c->n; i++) {
        const mn_decode_op *f = mn_small_at(all, c->of[i]);
        if (!mn_is_elementwise(f) || mn_small_units(f) != count) return false;
        if (!mn_is_row(mn_decode_result(f), f->shape, count)) return false;
        for (int k = 0; k < i; k++) {
            if (mn_small_strays(&all->values, f, mn_small_at(all, c->of[k]), count)) return false;
        }
    }
    return true;
}

static int64_t pieces_of(const mn_defer *all, const mn_chain *c, int n_blocks) {
    const mn_decode_op *first = mn_small_at(all, c->of[0]);
    if (!splits(all, c)) return 1;
    const int64_t each = mn_is_elementwise(first) ? ELEMENTS
                         : first->kind == MN_DECODE_CONV ? CHANNELS : ROWS;
    return mn_max(mn_min(mn_ceil_div(mn_small_units(first), each), n_blocks), 1);
}

/* Where piece i of `pieces` of a work begins. */
static int64_t piece_begin(const mn_decode_op *f, int64_t i, int64_t pieces) {
    const int64_t units = mn_small_units(f), each = mn_small_unit_size(f);
    const int64_t even = each == 1 ? EVEN : 1;
    return i == pieces ? units * each : units * i / pieces / even * even * each;
}

static void deal_chain(work_stage *s, const mn_chain *c) {
    const mn_defer *all = s->set.all;
    const int64_t pieces = pieces_of(all, c, s->p->n_blocks);
    for (int64_t i = 0; i < pieces; i++) {
        small_piece piece[MN_DEFERRED];
        for (int k = 0; k < c->n; k++) {
            const mn_decode_op *f = mn_small_at(all, c->of[k]);
            const int64_t begin = piece_begin(f, i, pieces);
            const int64_t count = piece_begin(f, i + 1, pieces) - begin;
            piece[k] = (small_piece){ c->of[k], { begin, count }, true };
        }
        write_small(s, s->next, piece, c->n);
        s->next = (s->next + 1) % s->p->n_blocks;
    }
}

/* ---- operators ------------------------------------------------------------------------------- */

/* What a piece makes of a work in front of its step. */
static mn_span span_before(const mn_step_work *w, const mn_decode_op *f, int j, int64_t piece) {
    if (w->follows[j] == MN_WORK_WHOLE) {
        return (mn_span){ 0, mn_small_units(f) * mn_small_unit_size(f) };
    }
    return mn_step_reads(w, w->follows[j], piece);
}

/* Several pieces make the same: the first one publishes it. */
static void write_before(work_stage *s, int block, const mn_step_work *w, int64_t piece) {
    small_piece list[MN_WORK_ATTACHED];
    for (int j = 0; j < w->before.n; j++) {
        const mn_decode_op *f = mn_small_at(s->set.all, w->before.of[j]);
        const mn_span span = span_before(w, f, j, piece);
        const bool first = piece == 0 || span_before(w, f, j, piece - 1).begin != span.begin;
        list[j] = (small_piece){ w->before.of[j], span, first };
    }
    write_small(s, block, list, w->before.n);
}

static void write_after(work_stage *s, int block, const mn_step_work *w, mn_span span) {
    small_piece list[MN_WORK_ATTACHED];
    for (int j = 0; j < w->after.n; j++) {
        list[j] = (small_piece){ w->after.of[j], span, true };
    }
    write_small(s, block, list, w->after.n);
}

/* `piece` < 0: what belongs to all columns of the head. */
static void write_step(work_stage *s, int block, const mn_step_work *w, int64_t head,
                       int64_t column, int64_t piece) {
    int n;
    const size_t bytes = mn_op_describe(mn_step_op(w))->args_bytes;
    mn_decode_instr *instr = open_instr(s, block, MN_DECODE_STEP);
    if (!instr) return;
    mn_decode_step_instr *step = &instr->work.step;
    s->p->steps |= 1u << w->step;
    step->step = (int)w->step;
    step->head = (int)head;
    step->column = (int)column;
    memcpy(step->args, w->args, bytes);
    mn_op_fields(mn_step_op(w), &n);
    for (int i = 0; i < n && piece >= 0; i++) {
        const mn_decode_bf16 *row = mn_step_result(w, i);
        if (row) publish(instr, s, row, mn_step_makes(w, i, piece));
    }
    mn_plan_end_instr(s->p, block, offsetof(mn_decode_instr, work.step.args) + bytes);
}

static void deal_step(work_stage *s, const mn_step_work *w) {
    const int64_t pieces = mn_step_pieces(w);
    for (int64_t i = 0; i < pieces; i++) {
        int64_t head, column;
        const mn_span made = mn_step_piece(&head, &column, w, i);
        write_before(s, s->next, w, i);
        write_step(s, s->next, w, head, column, i);
        write_after(s, s->next, w, made);
        s->next = (s->next + 1) % s->p->n_blocks;
    }
}

/* ---- the stage ------------------------------------------------------------------------------- */

/* As many instructions for all blocks; returns how many. */
static int even_out(work_stage *s) {
    const int n_blocks = s->p->n_blocks;
    int most = 0;
    for (int block = 0; block < n_blocks; block++) {
        most = s->instrs[block] > most ? s->instrs[block] : most;
    }
    for (int block = 0; block < n_blocks; block++) {
        for (; s->instrs[block] < most && !s->p->failed; s->instrs[block]++) {
            mn_plan_rest(s->p, block);
        }
    }
    return most;
}

/* What belongs to all columns of heads, when all pieces of a step have read it. */
static void deal_shared(work_stage *s) {
    bool any = false;
    for (int i = 0; i < s->set.n_steps; i++) any |= mn_step_shares(&s->set.step[i]);
    if (!any) return;
    even_out(s);
    mn_plan_sync(s->p);
    for (int i = 0; i < s->set.n_steps && !s->p->failed; i++) {
        const mn_step_work *w = &s->set.step[i];
        for (int64_t head = 0; mn_step_shares(w) && head < mn_step_heads(w); head++) {
            write_step(s, s->next, w, head, -1, -1);
            s->next = (s->next + 1) % s->p->n_blocks;
        }
    }
}

static void write_stage(work_stage *s) {
    mn_megakernel *p = s->p;
    s->instrs = calloc((size_t)p->n_blocks, sizeof *s->instrs);
    s->next = p->phase;
    p->failed = p->failed || !s->instrs;
    for (int i = 0; i < s->set.n_steps && !p->failed; i++) deal_step(s, &s->set.step[i]);
    for (int i = 0; i < s->set.n_chains && !p->failed; i++) deal_chain(s, &s->set.chains[i]);
    if (!p->failed) deal_shared(s);
    if (!p->failed) p->n_stages += even_out(s);
    free(s->instrs);
    p->phase = s->next;
    p->works = true;
}

/* All of them as a stage like those of products, which finds what it reads in words: no barrier
 * stands in front. */
static bool add_map(mn_megakernel *p, mn_defer *all, const mn_work_set *set) {
    mn_decode_gemms launch = { .dtype = MN_BF16, .M = 1 };
    const bool map = set->taken && set->n_steps == 0 &&
                     mn_decode_fuse_map(all, &launch, set->taken) == set->taken;
    return map && launch.of[0].N % EVEN == 0 && mn_megakernel_add_gemms(p, &launch);
}

/* What is chosen, with the barrier that it needs; `early`: without, or not at all. */
static bool add_stage(work_stage *s, bool early) {
    const uint64_t taken = s->set.taken;
    mn_stage_open(&s->ranges, s->p);
    for (int i = 0; i < s->set.all->n; i++) {
        if (taken & mn_bit(i)) gather_ranges(s, i);
    }
    if (!taken || (early && s->ranges.behind) || !mn_stage_close(&s->ranges)) return false;
    write_stage(s);
    return true;
}

uint64_t mn_megakernel_add_works(mn_megakernel *p, mn_defer *all, uint64_t small, bool early) {
    work_stage *s = p->failed ? NULL : calloc(1, sizeof *s);
    if (!s) return 0;
    s->p = p;
    mn_works_select(&s->set, all, small, !early);
    const uint64_t taken = s->set.taken;
    const bool added = (!early && add_map(p, all, &s->set)) || add_stage(s, early);
    free(s);
    return added ? taken : 0;
}

_Static_assert(sizeof(mn_decode_instr) <= MN_DECODE_INSTR_BYTES, "an instruction");
