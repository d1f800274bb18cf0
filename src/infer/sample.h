/* sample.h - the next token from logits, as a function of (seed, stream, position) and no other
 * chance.
 *
 * In this order, z being the logits:
 *
 *   penalty       z_i = z_i / r if z_i > 0 else z_i r, once for every token among the recent ones
 *   temperature   z = z / t; at 0 the largest wins, the lowest id among equals, and all is done
 *   top_k         the k largest stay; among equals lower ids first
 *   top_p         of softmax over what stayed, from the largest down: the shortest run that holds
 *                 at least p stays, at least one token
 *   min_p         p_i >= min_p max_j p_j stays
 *   draw          u in (0,1) from (seed, stream, position); going up through the ids of what
 *                 stayed, the first whose summed probability exceeds u is the token
 *
 * Arithmetic is in double. A logit of -infinity is never drawn. */
#ifndef MN_INFER_SAMPLE_H
#define MN_INFER_SAMPLE_H

#include "mneme.h"

/* Work space for one caller. */
typedef struct mn_sampler mn_sampler;

mn_status mn_sampler_create(mn_sampler **out, int64_t most_tokens);
void mn_sampler_destroy(mn_sampler *sampler);    // NULL accepted

/* What a token is drawn from. */
typedef struct mn_draw {
    const float *logits;
    int64_t n;                  // tokens to choose among: ids [0, n)
    const int32_t *recent;      // for the penalty, the latest last; ids outside [0, n) count not
    int64_t n_recent;
    uint64_t position;          // of the token in its sequence
} mn_draw;

/* Draws. MN_ERR_ARGUMENT names the field of `how` that is out of range; MN_ERR_NUMERIC when a logit
 * is NaN or infinite, or when all are -infinity. */
mn_status mn_sampler_pick(int32_t *token, mn_sampler *sampler, const mn_sampling *how,
                          const mn_draw *from);

/* The fields of mn_sampling by name, for command lines and files. */
typedef enum mn_sampling_kind { MN_SAMPLING_REAL, MN_SAMPLING_COUNT, MN_SAMPLING_SEED }
    mn_sampling_kind;

typedef struct mn_sampling_field {
    const char *name, *about;
    mn_sampling_kind kind;
    size_t offset;
    double low, high, value;    // bounds, and the default
} mn_sampling_field;

int mn_sampling_fields(const mn_sampling_field **out);

/* Sets a field from text; fails with a message that says what it takes. */
mn_status mn_sampling_set(mn_sampling *how, const mn_sampling_field *field, const char *text);

mn_status mn_sampling_check(const mn_sampling *how);

#endif
