/* knowing.h - what tells a model's right answers from its wrong ones: the entropy of its
 * predictions, statistics of its posteriors, or both.
 *
 *   asked, error, loss     answers of the test split, the part of them that is wrong, and the mean
 *                          negative log probability of the target
 *   auroc, aurc            by name: entropy, confidence; where a layer keeps a posterior each
 *                          statistic (mean over units and layers), chosen: the feature of the
 *                          largest AUROC on the validation split, its sign as there; both: logistic
 *                          regression on entropy and chosen; all: on entropy and the mean of
 *                          every layer and statistic
 *   gain, gain_both        AUROC of chosen and of both less that of entropy
 *   chosen, carried        what was chosen, and 1 for its statistic, 0 for the others
 *   unit                   AUROC of each statistic's best feature, chosen in the same way
 *   calibration            expected calibration error over 15 bins, bins of the reliability diagram
 *   kinds                  of each kind of question: asked, right, doubt: AUROC of telling them
 *                          from right answers to the other kinds
 *   calibrator             the regression of both, see mn_calibrator */
#ifndef MN_EVAL_KNOWING_H
#define MN_EVAL_KNOWING_H

#include "eval/calibration.h"
#include "eval/doubt.h"
#include "io/json.h"

/* From answers to choose and fit by and others to report, new. `kinds` names the kinds of places;
 * n_kinds may be 0. */
mn_status mn_knowing_tell(json_t **out, const mn_posterior *posterior, const mn_doubts *valid,
                          const mn_doubts *test, const char *const *kinds, int n_kinds);

/* A fitted probability of being wrong, of the entropy and one feature. */
typedef struct mn_calibrator {
    mn_logistic fit;
    int feature;                 // of the posterior, -1: entropy alone
} mn_calibrator;

/* From "calibrator" above; fails for another model's. */
mn_status mn_calibrator_read(mn_calibrator *out, const mn_posterior *posterior,
                             const mn_json *root);
double mn_calibrator_doubt(const mn_calibrator *calibrator, float entropy, const float *features);

#endif
