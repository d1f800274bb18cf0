/* collision.h - the deterministic collision experiment of the Bayesian Layer paper (Appendix E):
 * two overlapping addresses A and B; B is boosted, A is flooded, and B is asked for.
 *
 * Writes are (k, v) pairs over unit keys in D = 16 dimensions and one-hot values of m = 6
 * identities: seed passes A B C D E F, then B alone, then A alone. A layer can take part when
 * key, value and query are all it learns at a token; collision.def says how the rest is set, and
 * who cannot. */
#ifndef MN_EXPERIMENTS_COLLISION_COLLISION_H
#define MN_EXPERIMENTS_COLLISION_COLLISION_H

#include "definition/mixer.h"

enum { MN_COLLISION_D = 16, MN_COLLISION_M = 6 };

typedef struct mn_collision_setup {
    int64_t n_seed, n_boost, n_flood;    // passes over all six, writes of B, writes of A
    double rho;                          // k_A . k_B, in (-1, 1)
    double p0, l2, r2;                   // prior, process noise and observation noise variance
    double c;                            // predicted covariance of the reset
    double gamma;                        // contraction of the +ccq layers
} mn_collision_setup;

/* The paper's numbers: 2, 40, 60; 0.92; 3, 0.05, 0.05; 0.05; and gamma 0.5. */
mn_collision_setup mn_collision_default(void);
int64_t mn_collision_length(const mn_collision_setup *setup);

/* After one write. a and b are what the memory answers to k_A and k_B, in the places of A and of
 * B. NaN where a layer has no such quantity. */
typedef struct mn_collision_point {
    double a[2], b[2];
    double p, margin;                  // softmax over b's two places: of B; p_B - p_A
    double gain, gain_norm, cosine;    // beta k'u; |beta u|; between k and u, of this write
    double var_a, var_b, cov_ab;       // k_A'P k_A, k_B'P k_B, k_A'P k_B after it
} mn_collision_point;

typedef enum mn_collision_rule {
#define RULE(id, name, control, family, settings) MN_COLLISION_##id,
#include "experiments/collision/collision.def"
    MN_COLLISION_RULES
} mn_collision_rule;

const char *mn_collision_name(mn_collision_rule rule);
const char *mn_collision_settings(mn_collision_rule rule);

/* Rows of layers/all.def that cannot take part, one per index; false at the end. */
bool mn_collision_absent(int index, const char **row, const char **why);

/* Runs one rule; `points` takes mn_collision_length of them. */
mn_status mn_collision_run(mn_collision_point *points, mn_collision_rule rule,
                           const mn_collision_setup *setup);

/* The first flood write after which A outweighs B, counted from 1; 0 if there is none. */
int64_t mn_collision_crossing(const mn_collision_point *points, const mn_collision_setup *setup);

/* ---- closed forms ---------------------------------------------------------------------------- */

/* What Appendix E.1 to E.3 predicts, from the formulas there. Where they start from the state
 * before the flood, that state is the measured one, as in the paper. */
typedef struct mn_collision_theory {
    double boost_p;                  // (1 + e^-1)^-1
    double gain_floor;               // (42)
    double var_a;                    // (37): limit of k_A'P k_A under the flood
    double var_b_rate;               // (38): (1 - rho^2) l2 per step
    double onset_gain;               // gain of the first flood write, from the covariance before it
    double onset_cosine;             // its cos(k, u)
    double cosine_limit;             // (45): sqrt(1 - rho^2), for an endless boost
    double reset_b[2], reset_p;      // (52): b under an endless flood, covariance reset
    double bayes_b[2], bayes_p;      // (57): the same with propagated covariance
    double linear_b[2], linear_p;    // after n_flood writes; p falls to 0 without end
} mn_collision_theory;

/* `bayes`, `reset` and `linear` are the points of those three rules. */
void mn_collision_predict(mn_collision_theory *out, const mn_collision_setup *setup,
                          const mn_collision_point *bayes, const mn_collision_point *reset,
                          const mn_collision_point *linear);

#endif
