/* defer.h - what a tape has been asked for and not yet done: MN_TAPE_DELAY. Private to
 * ops/tape*.c. */
#ifndef MN_DECODE_DEFER_H
#define MN_DECODE_DEFER_H

#include "kernels/decode.h"
#include "tape/tape_internal.h"

enum { MN_DELAYED = 64, MN_TOUCHED = 24 };    // works; pieces of memory that one touches

/* Bytes that a work reads or writes. */
typedef struct mn_touch {
    uintptr_t begin, end;
    bool writes;
} mn_touch;

typedef enum mn_delayed_kind { MN_DELAYED_FEW, MN_DELAYED_PRODUCT, MN_DELAYED_OP } mn_delayed_kind;

typedef struct mn_delayed {
    mn_delayed_kind kind;
    union {
        mn_few few;
        struct {
            mn_product_work work;
            bool fits;         // a launch of decode.h can do it
        } product;
        struct {
            mn_op_id id;
            const void *args;
        } op;
    } of;
    uint64_t after;            // bits of the earlier works that must have been done
    int n_touched;
    mn_touch touched[MN_TOUCHED];
} mn_delayed;

/* What waits, what of it is done, and the program that has come of it and is to be launched. */
struct mn_delay {
    mn_delayed list[MN_DELAYED];
    int n;
    uint64_t done;
    mn_few_program *program;    // NULL until there is one
};

static inline uint64_t mn_bit(int i) {
    return UINT64_C(1) << i;
}

/* lower.c: what a work or an operator is as a work on few rows, and what it touches; false where
 * it is none. `most_moved`: numbers that are still few where they are only moved. */
bool mn_few_of_work(mn_delayed *out, mn_work_id id, const void *work, int64_t most_moved);
bool mn_few_of_op(mn_delayed *out, mn_op_id op, const void *args);

/* What any operator touches; false where that is too much to note. */
bool mn_touch_op(mn_delayed *out, mn_op_id op, const void *args);
void mn_touch_product(mn_delayed *out, const mn_product_work *p);

/* An operator as the recurrence of a memory for one token; false where it is none. */
bool mn_few_memory_of(mn_few_memory *out, mn_op_id op, const void *args);

/* Where the numbers of a small work come out, and how many inputs are in front. */
int mn_few_inputs_of(mn_few_kind kind);
const mn_view *mn_few_result(const mn_few *few);

/* epilogue.c: notes what waits, is not of `taken`, and follows from the columns of `launch`
 * alone, whose product i is work products[i]; returns the bits of those works. */
uint64_t mn_few_gather_endings(mn_delay *all, mn_few_products *launch, const int *products,
                               uint64_t taken);

/* Whether a view holds `count` numbers one after the other. */
bool mn_is_row(const mn_view *view, const int64_t shape[4], int64_t count);

/* Whether `later` reads what `earlier` writes, and nothing else holds them apart. */
bool mn_only_reads(const mn_delayed *later, const mn_delayed *earlier);

/* defer.c. False: the tape does not delay this; do it at once. */
bool mn_delay_work(mn_tape *tape, mn_work_id id, const void *work);
bool mn_delay_product(mn_tape *tape, const mn_matmul_args *p);
bool mn_delay_op(mn_tape *tape, mn_op_id op, const void *args);
void mn_delay_forget(mn_tape *tape);
void mn_delay_destroy(mn_delay *delay);    // NULL accepted

/* Launches what waits, or makes it a part of the program, but for small works that something may
 * still make its input by; mn_tape_flush launches everything. */
void mn_delay_stage(mn_tape *tape);

#endif
