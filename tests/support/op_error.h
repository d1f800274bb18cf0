/* op_error.h - how far results in float32 may lie from float64, measured case by case.
 *
 * The rule is that of the golden files (tests/golden/README.md): rms(x - r) <= tol rms(r) and
 * max |x - r| <= 16 tol max |r| with tol = max(floor, factor b), where b is how far the float64
 * result itself moves when every input moves by one rounding of float32, 2^-24. The factors are
 * twice those of the golden files, which also measure what a sequential float32 run loses.
 *
 * Gradients of decays, noises and dynamics may be off by 2^-20 of the norm of cotangent x result
 * besides: to scale a memory is to scale its results, so these gradients are sums of such products,
 * and chunked kernels form them as differences of sums. Where the gradient vanishes, as it does for
 * the decay of a memory that is still empty, their rounding is all there is: eight times as much is
 * allowed there, the square root of the tokens in a chunk.
 *
 * A gradient that even float64 leaves at its own rounding, below 2^-40 of the norm of cotangent x
 * result, vanishes by structure: a row of scores with one entry, for instance, divided by its norm.
 * Float32 then leaves its rounding, and the same eightfold bound holds. */
#ifndef TESTS_SUPPORT_OP_ERROR_H
#define TESTS_SUPPORT_OP_ERROR_H

#include "support/op_case.h"
#include "support/op_walk.h"

typedef struct op_tolerances {
    double result[MN_MAX_FIELDS];     // of tensor i as a result
    double gradient[MN_MAX_FIELDS];   // of the gradient of tensor i
    double loss_norm;                 // of all products cotangent x result
} op_tolerances;

/* Norm of all products cotangent x result. */
double op_loss_norm(const mn_sample *want);

/* Runs `want` (float64, inputs drawn) both ways, so that it holds results and gradients, and
 * measures its tolerances. */
void op_measure(op_tolerances *out, mn_sample *want, const op_case *c);

/* The same in two steps, as measuring takes three more runs of the reference: what is close at the
 * floors of the tolerances need not be judged again. */
void op_reference(op_tolerances *floor, mn_sample *want, const op_case *c);
void op_widen(op_tolerances *out, const mn_sample *want, const op_case *c);

/* Whether op_compare would find every result and gradient close. */
bool op_agrees(const mn_sample *got, const mn_sample *want, const op_tolerances *tolerances);

/* Widens how far results and gradients in bf16 may lie from float64, besides what storing them
 * costs: to twice as far as they move when what passes between the parts of an operator made of
 * others is rounded (op_rounded.h; step 0), or when every input of `want` (float64, run both ways,
 * inputs rounded) moves by half a unit of bf16 (three further steps). A tensor of fewer than 16
 * numbers, a head's decay say, has 15 more draws of the first kind behind these: the error of one
 * number in one draw may be next to nothing. False when there is no such step: who is close after
 * fewer needs no more. */
bool op_measure_bf16(double rms[MN_MAX_FIELDS], double worst[MN_MAX_FIELDS], const mn_sample *want,
                     const op_case *c, int step);

/* Checks every result and gradient of `got` against `want`. */
void op_compare(const char *target, const mn_sample *got, const mn_sample *want,
                const op_tolerances *tolerances, const op_case *c);

#endif
