/* plan_attention.c - a token's attention over a cache as two stages of a megakernel: parts of 256
 * keys, shared out among blocks, and behind a barrier the sum of the parts of each head.
 *
 * How many keys there are is known when the stages run: a block has every so many-th part of a
 * key-value head, however many those are. Which parts there are, and the order of their sum, goes
 * by the keys alone. */
#include "base/util.h"
#include "decode/plan.h"

static bool serves(const mn_decode_attention *a) {
    return a->dtype == MN_BF16 && a->J > 0 && a->H % a->J == 0 && a->K % 8 == 0 && a->V % 8 == 0 &&
           a->K <= MN_DECODE_ATTEND_WIDEST && a->V <= MN_DECODE_ATTEND_WIDEST &&
           (uintptr_t)a->keys % 16 == 0 && (uintptr_t)a->values % 16 == 0;
}

static int64_t parts_size(const mn_decode_attention *a) {
    return a->H * a->n_parts * (a->V + 2);
}

/* What the parts are made of, the token's row of the caches among it. */
static void gather_parts(mn_stage_ranges *r, const mn_decode_attention *a) {
    mn_stage_reads(r, a->q, (a->H - 1) * a->q_step + a->K, 2);
    mn_stage_reads(r, a->k, (a->J - 1) * a->k_step + a->K, 2);
    mn_stage_reads(r, a->v, (a->J - 1) * a->v_step + a->V, 2);
    if (a->turns > 0) mn_stage_reads(r, a->inv_freq, a->turns / 2, sizeof *a->inv_freq);
    mn_stage_loads(r, a->position, 1, sizeof *a->position);
    mn_stage_writes(r, a->keys, a->capacity * a->J * a->K, 2, false);
    mn_stage_writes(r, a->values, a->capacity * a->J * a->V, 2, false);
    mn_stage_writes(r, a->parts, parts_size(a), sizeof *a->parts, false);
}

static void gather_sums(mn_stage_ranges *r, const mn_decode_attention *a) {
    mn_stage_reads(r, a->parts, parts_size(a), sizeof *a->parts);
    mn_stage_writes(r, a->o, a->H * a->V, 2, true);
}

static mn_decode_instr *add_instr(mn_megakernel *p, int block, const mn_decode_attention *a,
                                  int64_t head, int64_t slot, int64_t n_slots) {
    mn_decode_instr *instr = mn_plan_add_instr(p, block);
    if (!instr) return NULL;
    instr->kind = MN_DECODE_ATTEND;
    instr->work.attend = (mn_decode_attend_instr){ (int)head, (int)slot, (int)n_slots, *a };
    return instr;
}

static void end_instr(mn_megakernel *p, int block) {
    mn_plan_end_instr(p, block, offsetof(mn_decode_instr, work.attend) +
                                    sizeof(mn_decode_attend_instr));
}

/* Piece `from` and those after it, one for each block from the next one on; the stage of the
 * others is empty. `o_handoff`: of sums; parts have none. */
static void deal(mn_megakernel *p, const mn_decode_attention *a, int64_t n_slots, int o_handoff) {
    const int64_t all = n_slots > 0 ? a->J * n_slots : a->H;
    for (int64_t from = 0; from < all && !p->failed; from += p->n_blocks) {
        for (int block = 0; block < p->n_blocks && !p->failed; block++) {
            const int64_t i = from + (block - p->phase + p->n_blocks) % p->n_blocks;
            if (i >= all) {
                mn_plan_rest(p, block);
                continue;
            }
            const int64_t head = n_slots > 0 ? i % a->J : i, slot = n_slots > 0 ? i / a->J : 0;
            mn_decode_instr *instr = add_instr(p, block, a, head, slot, n_slots);
            if (instr && o_handoff >= 0) {
                instr->work.n_published = 1;
                instr->work.published[0] = (mn_decode_publication){
                    (const mn_decode_bf16 *)a->o + head * a->V,
                    mn_decode_word_from(o_handoff, (unsigned)(head * a->V)), (int)a->V
                };
            }
            if (instr) end_instr(p, block);
        }
        p->n_stages++;
    }
    p->phase = (int)((p->phase + all) % p->n_blocks);
    p->works = p->attends = true;
}

bool mn_megakernel_add_attention(mn_megakernel *p, const mn_decode_attention *a) {
    if (p->failed || !serves(a)) return false;
    mn_stage_ranges parts, sums;
    mn_stage_open(&sums, p);
    gather_sums(&sums, a);
    mn_stage_open(&parts, p);
    gather_parts(&parts, a);
    if (!sums.fits || !mn_stage_close(&parts)) return false;
    deal(p, a, mn_min(mn_max(p->n_blocks / a->J, 1), a->n_parts), MN_DECODE_NO_WORDS);
    mn_stage_open(&sums, p);
    gather_sums(&sums, a);
    if (mn_stage_close(&sums)) deal(p, a, 0, mn_stage_words(&sums, a->o));
    else p->failed = true;    // memory was out, or results lie in what the parts are made of
    return true;
}
