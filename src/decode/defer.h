/* defer.h - what a tape has been asked for and not yet done: MN_TAPE_DEFER. Private to src/tape and
 * src/decode. */
#ifndef MN_DECODE_DEFER_H
#define MN_DECODE_DEFER_H

#include "decode/values.h"
#include "kernels/decode.h"
#include "tape/tape_internal.h"

enum { MN_DEFERRED = 64, MN_DEFERRED_RANGES = 24 };    // works; pieces of memory of one

typedef enum mn_deferred_kind { MN_DEFERRED_SMALL, MN_DEFERRED_GEMM,
    MN_DEFERRED_OP, MN_DEFERRED_ATTENTION, MN_DEFERRED_HYPER } mn_deferred_kind;

typedef struct mn_deferred {
    mn_deferred_kind kind;
    union {
        mn_decode_op few;
        struct {
            mn_gemm_problem work;
            bool fits;         // a launch of decode.h can do it
        } product;
        struct {
            mn_op_id id;
            const void *args;
        } op;
        const mn_decode_attention *attention;
        const mn_decode_hyper *hyper;
    } of;
    uint64_t after;            // bits of the earlier works that must have been done
    const mn_values *values;   // the tensors that there are
    bool unnamed;              // it accesses something else
    int n_ranges;
    mn_mem_range ranges[MN_DEFERRED_RANGES];
} mn_deferred;

/* The step's tensors, what waits, what of it is done, and the megakernel that has come of it and is
 * to be launched. */
struct mn_defer {
    mn_values values;
    mn_deferred list[MN_DEFERRED];
    int n;
    uint64_t done;
    mn_borders counts;            // where the token stands
    mn_megakernel *megakernel;    // NULL until there is one
    bool stages;                  // the last products were a stage of it
    bool fuses;                   // products may become stages
};

static inline uint64_t mn_bit(int i) {
    return UINT64_C(1) << i;
}

/* lower.c: a work or an operator as a small work, and what it reads and writes of out->values;
 * false where it is none. `max_move`: elements that are still few where they are only moved.
 * `sequences`, where it is not 0: rows belong to so many, and the work becomes the part of one. */
bool mn_decode_of_elementwise(mn_deferred *out, mn_elementwise_id id, const void *work,
                              int64_t max_move, int64_t sequences);
bool mn_decode_of_op(mn_deferred *out, mn_op_id op, const void *args, int64_t sequences);

/* Whether the part of a sequence of small work `later` follows from what the same sequence's part
 * of `earlier` has left, as far as they meet at all. */
bool mn_decode_follows(const mn_values *values, const mn_decode_op *later,
                       const mn_decode_op *earlier, int64_t sequences);

/* What any operator reads and writes; false where that is too much to write down. */
bool mn_ranges_of_op(mn_deferred *out, mn_op_id op, const void *args);
void mn_ranges_of_gemm(mn_deferred *out, const mn_gemm_problem *p);

void mn_ranges_of_attention(mn_deferred *out, const mn_decode_attention *p);
void mn_ranges_of_hyper(mn_deferred *out, const mn_decode_hyper *p);

/* An operator as the recurrence of a memory for one token; false where it is none. */
bool mn_decode_recurrence_of(mn_decode_recurrence *out, mn_op_id op, const void *args);

/* plan_works.c: small works that are ready, or are after others of these, and operators that
 * then are, as a stage of a megakernel; `early`: only operators with what belongs to them, and
 * only where they need no barrier. Returns the bits of those that are; 0, and nothing changed,
 * where none is. */
uint64_t mn_megakernel_add_works(mn_megakernel *megakernel, mn_defer *all, uint64_t small,
                                 bool early);

/* plan_gemms.c: whether a stage can make a row of K by that small work. */
bool mn_megakernel_takes_row(const mn_decode_op *first, int64_t K);

/* defer.c: part[i] is the same for works of `taken` that depend on each other, however
 * indirectly. */
void mn_defer_parts(int part[MN_DEFERRED], const mn_defer *all, uint64_t taken);

/* Where the elements of a small work come out, and how many inputs are in front. */
int mn_decode_inputs_of(mn_decode_op_kind kind);
const mn_view *mn_decode_result(const mn_decode_op *few);

/* epilogue.c: makes epilogues of what waits, is not of `taken`, and follows from the columns of
 * `launch` alone, whose product i is work gemms[i]; returns the bits of those works. */
uint64_t mn_decode_fuse_epilogues(mn_defer *all, mn_decode_gemms *launch, const int *gemms,
                               uint64_t taken);

/* Likewise of works of `small`, which are ready or after others of these, where no product is:
 * those that go over as many numbers, or one for each of several, as the first one. */
uint64_t mn_decode_fuse_map(mn_defer *all, mn_decode_gemms *launch, uint64_t small);

/* Likewise of a product for the rows of several sequences, which has been taken: a gate over its
 * columns becomes its last part. Returns the bit of that work, or 0. */
uint64_t mn_decode_fuse_gate(const mn_defer *all, mn_gemm_problem *p, int product);

/* Whether a view holds `count` elements one after the other. */
bool mn_is_row(const mn_view *view, const int64_t shape[4], int64_t count);

/* Whether `later` reads what `earlier` writes, and nothing else keeps them in order. */
bool mn_only_reads(const mn_deferred *later, const mn_deferred *earlier);

/* Memory that operations of this step will name (values.h). Nothing on a tape that does not delay
 * works. What had the memory before, if anything, is no tensor any more. */
void mn_defer_declare(mn_tape *tape, const void *data, size_t bytes);

/* The same for memory that was handed out just now: what had it before has none of it any more. */
void mn_defer_renew(mn_tape *tape, const void *data, size_t bytes);

/* defer.c. False: the tape does not delay this; do it at once. */
bool mn_defer_elementwise(mn_tape *tape, mn_elementwise_id id, const void *work);
bool mn_defer_gemm(mn_tape *tape, const mn_matmul_args *p);
bool mn_defer_op(mn_tape *tape, mn_op_id op, const void *args);
bool mn_defer_attention(mn_tape *tape, const mn_decode_attention *p);
bool mn_defer_hyper(mn_tape *tape, const mn_decode_hyper *p);
void mn_defer_discard(mn_tape *tape);
void mn_defer_destroy(mn_defer *delay);    // NULL accepted

/* Launches what waits, or makes it a part of the megakernel, but for small works that something may
 * still make its input by; mn_tape_flush launches everything. */
void mn_defer_lower(mn_tape *tape);

#endif
