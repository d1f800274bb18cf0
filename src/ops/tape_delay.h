/* tape_delay.h - what a tape has been asked for and not yet done: MN_TAPE_DELAY. Private to
 * ops/tape*.c. */
#ifndef MN_OPS_TAPE_DELAY_H
#define MN_OPS_TAPE_DELAY_H

#include "kernels/few.h"
#include "ops/tape_node.h"

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
            bool fits;         // a launch of few.h can do it
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

/* tape_few.c: what a work or an operator is as a work on few rows, and what it touches; false where
 * it is none. */
bool mn_few_of_work(mn_delayed *out, mn_work_id id, const void *work);
bool mn_few_of_op(mn_delayed *out, mn_op_id op, const void *args);

/* What any operator touches; false where that is too much to note. */
bool mn_touch_op(mn_delayed *out, mn_op_id op, const void *args);
void mn_touch_product(mn_delayed *out, const mn_product_work *p);

/* Where the numbers of a small work come out, and how many inputs are in front. */
int mn_few_inputs_of(mn_few_kind kind);
const mn_view *mn_few_result(const mn_few *few);

/* tape_delay.c. False: the tape does not delay this; do it at once. */
bool mn_delay_work(mn_tape *tape, mn_work_id id, const void *work);
bool mn_delay_product(mn_tape *tape, const mn_matmul_args *p);
bool mn_delay_op(mn_tape *tape, mn_op_id op, const void *args);
void mn_delay_forget(mn_tape *tape);

#endif
