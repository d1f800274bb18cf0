/* posterior.h - what the memories of a model know at the place of a question.
 *
 * bayes, kla and palimpsa keep a Gaussian belief of what they would read. From what a pass tells of
 * each such layer (queries, keys, noises, decays) the posterior is filtered once more in double
 * precision, and at the places asked for these statistics of it are taken, for every unit: a head
 * and noise group (bayes), a channel (kla), a value column of a head (palimpsa).
 *
 *                 bayes, per head              kla, per channel          palimpsa, per column
 *   variance      q'Pq                         sum q_n^2 / lam_n         sum q_i^2 / I_i / K
 *   prior         / (p0 |q|^2)                 / |q|^2                   / (|q|^2 / ip / K)
 *   direction     / (|q|^2 tr P / K)           / (|q|^2 mean 1 / lam)    / (|q|^2 mean(1 / I) / K)
 *   logdet        log |P / p0| / K             - mean log lam            - mean log (I / ip)
 *   noise         variance / mean square of what the head (kla: the layer) reads
 *   gated         noise * silu(gate)^2         variance * silu(gate)^2   noise * silu(gate)^2
 *   content       sum g_j^2 |q|^2 |M_j|^2 / K over sum g_j^2 (M_j'q)^2, over the columns M_j of the
 *                 mean of a head (kla: eta / lam of all channels) and their gates g_j = silu(gate)
 *
 * All but logdet are told as natural logarithms. A feature is a statistic of a layer as least, mean
 * and largest over its units, and as the mean of each head's; or its mean over the layers. */
#ifndef MN_MODEL_POSTERIOR_H
#define MN_MODEL_POSTERIOR_H

#include "model/model.h"

typedef enum mn_statistic {
#define STATISTIC(id, name, about) MN_STATISTIC_##id,
#include "model/posterior.def"
#undef STATISTIC
    MN_STATISTICS
} mn_statistic;

const char *mn_statistic_name(mn_statistic statistic);
const char *mn_statistic_about(mn_statistic statistic);

typedef struct mn_posterior mn_posterior;

/* For a model without such layers there are no features. */
mn_status mn_posterior_create(mn_posterior **out, const mn_model *model);
void mn_posterior_destroy(mn_posterior *p);    // NULL accepted

int mn_posterior_features(const mn_posterior *p);

/* "layer 1 mean", "layer 0 head 2", or "mean" over the layers. */
void mn_posterior_feature(const mn_posterior *p, int feature, mn_statistic *statistic, char *name,
                          size_t size);

/* The feature that is the mean of a statistic over units and layers. */
int mn_posterior_overall(const mn_posterior *p, mn_statistic statistic);

/* The mean of a statistic over the units of layer `layer` of the model, -1: it has no posterior. */
int mn_posterior_of_layer(const mn_posterior *p, int layer, mn_statistic statistic);

/* What tells a query that this layer can answer from one that it cannot: above 1 for doubt,
 * whatever the length of the sequence. The direction of bayes and palimpsa; of kla, whose
 * variances are of slots and not of directions, the content (docs/math/knowing.md). */
mn_statistic mn_posterior_doubt(const mn_posterior *p, int layer);

/* The next pass goes on from `state`, of one sequence, whose beliefs are copied; NULL: it starts
 * from nothing, as without this call. */
mn_status mn_posterior_from(mn_posterior *p, const mn_model_state *state);

/* Hears a pass over whole sequences that start from nothing, or go on from a state; valid while `p`
 * and the tape are. */
const mn_tap *mn_posterior_tap(mn_posterior *p, mn_tape *tape);

/* After such a pass of (B,T) tokens: features of `n` places (row * T + token, ascending) as (n,
 * features). */
mn_status mn_posterior_read(const mn_posterior *p, int64_t B, int64_t T, const int32_t *places,
                            int64_t n, float *out);

/* By head of each such layer: a kla layer is one head. */
int mn_posterior_heads(const mn_posterior *p);
void mn_posterior_head(const mn_posterior *p, int i, int *layer, int *head);

/* After a pass of one sequence of T tokens: the variance that each token reads, and its gain, as
 * (T, heads), means over the units of a head. The gain is the part that the token's own evidence
 * has in what the memory believes behind it along its key, between 0 and 1:
 *
 *   bayes     k'Pk / (r2 + k'Pk)
 *   kla       sum_n k_n^2 (prec k_n^2 / lam_n) / |k|^2
 *   palimpsa  sum_i k_i^2 (b k_i^2 / I_i) / |k|^2 */
mn_status mn_posterior_by_head(const mn_posterior *p, int64_t T, float *variance, float *gain);

#endif
