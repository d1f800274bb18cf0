/* calibration.h - how well a number tells right answers from wrong ones.
 *
 * `doubt` is larger the less sure an answer is; `wrong` is 1 where it was wrong. */
#ifndef MN_EVAL_CALIBRATION_H
#define MN_EVAL_CALIBRATION_H

#include <stdint.h>

#include "mneme.h"

/* Area under the ROC curve: the probability that a wrong answer has more doubt than a right one,
 * ties counting half. NAN when all answers are right or all are wrong, or for want of memory. */
double mn_auroc(const float *doubt, const uint8_t *wrong, int64_t n);

/* Area under the risk-coverage curve: the part of wrong answers among the k of least doubt, mean
 * over k = 1 .. n; answers of equal doubt come in no order, in expectation. Doubt that says nothing
 * has the error rate. NAN without answers. */
double mn_aurc(const float *doubt, const uint8_t *wrong, int64_t n);

/* One bin of a reliability diagram: answers whose confidence lies in [low, high). */
typedef struct mn_reliability_bin {
    double low, high;
    double confidence, accuracy;    // means; NAN in an empty bin
    int64_t n;
} mn_reliability_bin;

/* Fills `bins` bins of equal width over [0, 1] and returns the expected calibration error: the mean
 * over answers of |accuracy - confidence| of their bin. NAN without answers. */
double mn_reliability(mn_reliability_bin *out, int bins, const float *confidence,
                      const uint8_t *wrong, int64_t n);

/* Logistic regression of `wrong` on features, each put to mean 0 and deviation 1 first. */
enum { MN_LOGISTIC_FEATURES = 64 };

typedef struct mn_logistic {
    int n;
    double bias, weight[MN_LOGISTIC_FEATURES];    // of the scaled features
    double mean[MN_LOGISTIC_FEATURES], scale[MN_LOGISTIC_FEATURES];
} mn_logistic;

/* `x` is (n, features), row by row. Minimises the mean log loss + ridge |weight|^2 / 2 by Newton's
 * method. */
mn_status mn_logistic_fit(mn_logistic *out, const float *x, int features, const uint8_t *wrong,
                          int64_t n, double ridge);

/* The probability that the answer is wrong. */
double mn_logistic_doubt(const mn_logistic *fit, const float *x);

/* The largest doubt up to which `share` of the answers or more are right: what to answer for a
 * wanted accuracy. -INFINITY where none reaches it. */
double mn_doubt_limit(const float *doubt, const uint8_t *wrong, int64_t n, double share);

#endif
