/* works.h - which small works and operators become one stage of a megakernel (works.c), and that
 * stage (plan_works.c). Private to src/decode. */
#ifndef MN_DECODE_WORKS_H
#define MN_DECODE_WORKS_H

#include "decode/defer.h"
#include "kernels/decode_image.h"

enum { MN_WORK_STEPS = 8, MN_WORK_ATTACHED = 8, MN_WORK_WHOLE = -1 };

/* Works in their order. */
typedef struct mn_chain {
    int of[MN_DEFERRED], n;
} mn_chain;

/* Elements from `begin` on. */
typedef struct mn_span {
    int64_t begin, count;
} mn_span;

/* A step of an operator, a piece of which is some columns of a head, or a group of it. Small
 * works `before` make what it reads: each piece makes of work j what it reads of field
 * follows[j] by itself, or all of it. Those `after` go number by number from its results. */
typedef struct mn_step_work {
    mn_decode_step_kind step;
    int deferred;
    mn_chain before, after;
    int follows[MN_WORK_ATTACHED];
    _Alignas(16) unsigned char args[MN_MAX_ARGS_BYTES];    // with strides filled in
} mn_step_work;

/* Chains are independent of each other and of the steps. */
typedef struct mn_work_set {
    const mn_defer *all;
    mn_chain chains[MN_DEFERRED];
    mn_step_work step[MN_WORK_STEPS];
    int n_chains, n_steps;
    uint64_t taken;
} mn_work_set;

/* Chooses among small works that are ready, or are after others of these, and operators that
 * then are; `chains`: also small works that belong to no operator. */
void mn_works_select(mn_work_set *set, const mn_defer *all, uint64_t small, bool chains);

static inline const mn_decode_op *mn_small_at(const mn_defer *all, int i) {
    return &all->list[i].of.few;
}

static inline bool mn_is_elementwise(const mn_decode_op *f) {
    return f->kind <= MN_DECODE_FILL;
}

/* What pieces of a work count: elements, channels or rows; and how many elements one of them
 * has. */
int64_t mn_small_units(const mn_decode_op *f);
int64_t mn_small_unit_size(const mn_decode_op *f);

/* Whether f reads from what `made` is, a row of `count`, other than number by number. */
bool mn_small_strays(const mn_values *values, const mn_decode_op *f, const mn_decode_op *made,
                     int64_t count);

/* The pieces of a step, and how many elements each of `heads` rows of results has. */
int64_t mn_step_pieces(const mn_step_work *w);

/* Head and column of a piece, and the elements that it makes of a row of V for each head. */
mn_span mn_step_piece(int64_t *head, int64_t *column, const mn_step_work *w, int64_t piece);

/* What a piece reads of a field. */
mn_span mn_step_reads(const mn_step_work *w, int field, int64_t piece);

/* Result number i where it is a row of V numbers of bf16 for each head, or of K where a piece has
 * whole heads; NULL: none, or another kind. And what a piece makes of it. */
const mn_decode_bf16 *mn_step_result(const mn_step_work *w, int i);
mn_span mn_step_makes(const mn_step_work *w, int i, int64_t piece);

/* Whether what belongs to all columns of a head waits until all pieces have read it. */
bool mn_step_shares(const mn_step_work *w);
int64_t mn_step_heads(const mn_step_work *w);

mn_op_id mn_step_op(const mn_step_work *w);

#endif
