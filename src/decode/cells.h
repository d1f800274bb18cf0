/* cells.h - the memories of Palimpsa, KLA and the Bayesian Layer together with the small works
 * around them: what becomes one stage of a megakernel, without a barrier in front (plan_cells.c).
 * Private to src/decode.
 *
 * cells.c looks among what waits for exactly the works that such a stage does by itself; where a
 * layer asks for others, its memory is a step like those of other operators (works.c). */
#ifndef MN_DECODE_CELLS_H
#define MN_DECODE_CELLS_H

#include "decode/defer.h"
#include "kernels/decode_image.h"

/* Works that are NULL are not there. */
typedef struct mn_palimpsa_works {
    _Alignas(16) mn_importance_args args;        // with strides filled in
    const mn_decode_op *norm[MN_DECODE_QK_NORMS];    // that make q and k
    const mn_decode_op *gate;                    // v, by a number for each head
    const mn_decode_op *exp, *wide;              // ip, and the same in float32
    const mn_decode_op *skip, *sum;              // behind o
    uint64_t taken;
} mn_palimpsa_works;

typedef struct mn_kla_works {
    _Alignas(16) mn_moebius_args args;
    _Alignas(16) mn_kla_discretise_args dynamics;
    const mn_decode_op *rounded[MN_DECODE_KLA_DYNAMICS];    // parameters in bf16
    const mn_decode_op *norm[MN_DECODE_QK_NORMS];
    const mn_decode_op *weighted, *sum, *gate;   // behind y
    uint64_t taken;
} mn_kla_works;

typedef struct mn_bayes_works {
    _Alignas(16) mn_bayes_args args;
    const mn_decode_op *norm[MN_DECODE_QK_NORMS];
    const mn_decode_op *decay, *prior;           // la from one number for each head; a constant p0
    uint64_t taken;
} mn_bayes_works;

/* The works around operator i that waits; false where there are none, or others. Of KLA `whole`:
 * nothing but its dynamics and norms may hold it back. */
bool mn_palimpsa_find(mn_palimpsa_works *to, const mn_defer *all, int i);
bool mn_kla_find(mn_kla_works *to, const mn_defer *all, int i, bool whole);
bool mn_bayes_find(mn_bayes_works *to, const mn_defer *all, int i);

/* Whether operator i is dynamics that a stage of KLA will make by itself. */
bool mn_kla_makes(const mn_defer *all, int i);

/* plan_cells.c: operator i with what is around it as a stage; returns the bits of those works, 0
 * and nothing changed where none does that. */
uint64_t mn_megakernel_add_cells(mn_megakernel *megakernel, const mn_defer *all, int i);

#endif
