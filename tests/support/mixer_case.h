/* mixer_case.h - one layer on random inputs, run by the step loop that defines it and by its fused
 * operator, whole or in pieces.
 *
 *   definition: mn_mixer_step, token after token, double precision
 *   fused:      with +ccq the keys through l2_norm and curvature, then the row's operator */
#ifndef MN_TESTS_MIXER_CASE_H
#define MN_TESTS_MIXER_CASE_H

#include "definition/mixer.h"
#include "ops/run.h"
#include "ops/sample.h"

typedef struct mixer_case {
    mn_mixer_info info;
    char name[MN_MIXER_NAME];
    mn_mixer_config config;
    mn_sample sample;
    int64_t B, T, heads, width;         // width: numbers in one output
    double *input[MN_MAX_FIELDS];       // inputs of the sample in double precision
    void *gamma;                        // (B,T,heads), in the sample's type
    double *gamma_f64;
    void *unit_keys, *query;            // (B,T,heads,K), for +ccq
    void *before[MN_MAX_FIELDS];        // initial state of the piece to run, one per state field
    void *kk[2], *ks[2];                // of curvature: before and after
    double *o, *variance;               // (B,T,width) of the definition
    double *state[MN_MAX_FIELDS];       // final states of the definition, in the operator's layout
    int64_t *cu;                        // NULL: not packed
    bool lone_packs;                    // pieces of a packed case go as packs of one sequence
} mixer_case;

/* Layer `name` over B sequences of T tokens (or, with `cu`, three packed ones) drawn from
 * `seed`. */
mn_status case_create(mixer_case *c, const char *name, mn_dtype dtype, int64_t B, int64_t T,
                      const int64_t *cu, uint64_t seed);
void case_destroy(mixer_case *c);

/* Sets the operator's parameter `name` (scale, norm, rope_kind ...) for both. */
void case_set(mixer_case *c, const char *name, double value);

/* Leaves the optional input `name` out of both. */
void case_drop(mixer_case *c, const char *name);

/* Draws the inputs of all tokens from `first` on anew. */
void case_redraw(mixer_case *c, int64_t first, uint64_t seed);

/* The inputs of token t of sequence row b. */
mn_token case_token(const mixer_case *c, int64_t b, int64_t t);

/* The step loop over everything; fills o, variance and state. */
mn_status case_define(mixer_case *c);

/* The fused operator over tokens [t0, t1), from the empty state or from where the last piece ended.
 * Results are in the sample. A packed case runs whole, as [0, T), or one sequence at a time. */
mn_status case_fuse(mixer_case *c, mn_context *context, int64_t t0, int64_t t1, bool fresh);

/* The sample's result called `name`; NULL when the row has none. */
const mn_sample_tensor *case_result(const mixer_case *c, const char *name);

/* The output, and the variance where the row has one (its name differs from row to row). */
const mn_sample_tensor *case_output(const mixer_case *c);
const mn_sample_tensor *case_variance(const mixer_case *c);

/* rms of x - reference relative to the rms of the reference; NaN if any x is. */
double case_error(const double *x, const double *reference, int64_t count);

/* The same for results of the sample against the definition. `rows` of the last case_fuse. */
double case_output_error(const mixer_case *c);
double case_variance_error(const mixer_case *c);

/* Largest relative rms error over the parts of the final state. mLSTM's content and normaliser are
 * compared in plain units, since they are only defined together with m. */
double case_state_error(const mixer_case *c);

#endif
