/* mixer.h - the table of sequence layers, and the generic step loop that defines each of them.
 *
 * A mixer is one sequence's belief about a memory: a row of layers/all.def with sizes and a state
 * in double precision. One token at a time it predicts, observes and reads, by the row's three axis
 * functions. A fused operator is an optimisation of a row and is held to this loop by the tests.
 *
 *   mn_mixer_create(&m, "gdn", &config); mn_mixer_step(m, &token, o, NULL); mn_mixer_destroy(m); */
#ifndef MN_DEFINITION_MIXER_H
#define MN_DEFINITION_MIXER_H

#include "ops/describe.h"

typedef struct mn_transition mn_transition;
typedef struct mn_belief mn_belief;
typedef struct mn_read mn_read;

enum { MN_MIXER_PARTS = 5, MN_MIXER_NAME = 48, MN_MIXER_FORMULA = 96 };

/* ---- the table ------------------------------------------------------------------------------- */

/* One layer: a row, with or without "+ccq". */
typedef struct mn_mixer_info {
    const char *name;                // of the row
    const mn_transition *transition;
    const mn_belief *belief;
    const mn_read *read;
    mn_op_id op;                     // runs the row fused
    bool ccq;                        // l2_norm of the keys and curvature come before the operator
} mn_mixer_info;

int mn_mixer_count(void);
const mn_mixer_info *mn_mixer_row(int index);    // in the order of layers/all.def

/* The layer called `name`, such as "gdn" or "bayes+ccq". The message suggests the nearest name. */
mn_status mn_mixer_find(mn_mixer_info *out, const char *name);

const char *mn_mixer_transition_name(const mn_mixer_info *info);
const char *mn_mixer_belief_name(const mn_mixer_info *info);
const char *mn_mixer_read_name(const mn_mixer_info *info);
const char *mn_mixer_transition_equation(const mn_mixer_info *info);
const char *mn_mixer_belief_equation(const mn_mixer_info *info);
const char *mn_mixer_read_equation(const mn_mixer_info *info);

/* Keeps a K x V memory, so that "+ccq" composes with it. */
bool mn_mixer_has_matrix(const mn_mixer_info *info);

/* Knows the variance of what it reads. */
bool mn_mixer_has_variance(const mn_mixer_info *info);

/* The state grows with the sequence. */
bool mn_mixer_has_cache(const mn_mixer_info *info);

/* The row's name, with "+ccq" if that is on. */
void mn_mixer_full_name(char out[MN_MIXER_NAME], const mn_mixer_info *info);

/* Numbers in the state of one sequence, as text: "H K V + H K K". */
void mn_mixer_state_formula(char out[MN_MIXER_FORMULA], const mn_mixer_info *info);

/* Sets in the argument struct of the row's operator what the row decides: decay, kind. */
void mn_mixer_set_args(const mn_mixer_info *info, void *args);

/* ---- one sequence ---------------------------------------------------------------------------- */

/* One token's inputs, each contiguous in the axes of the row's operator without B and T: k is
 * (H,K) for most rows, (K) for kla and mamba1. Parameters that do not change with time (ip, lam,
 * a ...) are given with every token too. What a row does not take is ignored. */
typedef struct mn_token {
#define INPUT(name, about) const double *name;
#include "definition/inputs.def"
} mn_token;

/* The slot for an operator's argument called `name`; NULL if no row takes such an input. */
const double **mn_token_slot(mn_token *token, const char *name);

typedef struct mn_mixer_config {
    mn_call size;        // the letters of the row's operator; B, T, L, cu_seqlens are not read
    double scale;        // 0: 1
    double eps;          // relu_attention, hypermlp, hyperglu; 0: 1e-12
    double rope_base;    // attention; 0: 10000
    int rope_kind, norm, layout, from_prior, softplus;    // as in the operators' arguments
} mn_mixer_config;

typedef struct mn_mixer mn_mixer;

/* An empty memory for one sequence. Fails on an unknown name or a size that is missing or too
 * large. mn_mixer_destroy accepts NULL. */
mn_status mn_mixer_create(mn_mixer **out, const char *name, const mn_mixer_config *config);
void mn_mixer_destroy(mn_mixer *mixer);
const mn_mixer_info *mn_mixer_describe(const mn_mixer *mixer);

/* Numbers in one output: heads times V. */
int64_t mn_mixer_width(const mn_mixer *mixer);

/* Writes the token, then reads its query. `o` and `variance` take mn_mixer_width numbers and may
 * be NULL; `variance` only where the row has one. On failure (an input is missing, a log decay
 * is above 0) nothing has changed and the message names the input. */
mn_status mn_mixer_step(mn_mixer *mixer, const mn_token *token, double *o, double *variance);

/* Reads the query of `token` without writing anything; the other inputs as for a step. */
mn_status mn_mixer_read(mn_mixer *mixer, const mn_token *token, double *o, double *variance);

/* Gives a fresh state its prior from the token's p0 or ip, which the first step does by itself. For
 * callers who want to change the state before that. */
mn_status mn_mixer_start(mn_mixer *mixer, const mn_token *token);

/* Back to the empty memory. */
void mn_mixer_reset(mn_mixer *mixer);

/* ---- its state ------------------------------------------------------------------------------- */

int64_t mn_mixer_tokens(const mn_mixer *mixer);    // written since create or reset
int64_t mn_mixer_state_floats(const mn_mixer *mixer);

/* The part of the state that the operator returns as `name` (M, P, mu ...; kk and ks with +ccq), in
 * the operator's layout for one sequence; NULL if there is none. Valid until destroy. */
double *mn_mixer_part(mn_mixer *mixer, const char *name, int64_t *count);

/* A copy of the state in `bytes` of mn_mixer_snapshot_bytes, and back. A snapshot fits every
 * mixer of the same layer, sizes and options; for the rows without cache its size is constant.
 * Restore refuses any other bytes and then changes nothing. */
size_t mn_mixer_snapshot_bytes(const mn_mixer *mixer);
void mn_mixer_snapshot(void *bytes, const mn_mixer *mixer);
mn_status mn_mixer_restore(mn_mixer *mixer, const void *bytes, size_t size);

/* A second memory that starts where this one is and goes its own way. */
mn_status mn_mixer_clone(mn_mixer **out, const mn_mixer *mixer);

#endif
