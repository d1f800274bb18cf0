/* test_calibration.c - ROC and risk-coverage curves, reliability, logistic regression, on answers
 * counted by hand. */
// labels: sanitize
#include "support/check.h"

#include <math.h>

#include "base/util.h"
#include "eval/calibration.h"

static void near(const char *what, double got, double want) {
    CHECK(fabs(got - want) < 1e-9, "%s: %.12g, not %.12g", what, got, want);
}

static void curves_are_counted(void **state) {
    (void)state;
    /* Pairs (wrong, right): 0.9 beats 0.1 0.5 0.5; 0.5 beats 0.1 and ties twice: (3 + 2) / 6. */
    const float doubt[] = { 0.1f, 0.5f, 0.9f, 0.5f, 0.5f };
    const uint8_t wrong[] = { 0, 0, 1, 1, 0 };
    near("auroc", mn_auroc(doubt, wrong, 5), 5.0 / 6.0);
    /* Wrong ones among the first k: 0, then the tie of three holds one: 1/3, 2/3, 1, then 2. */
    near("aurc", mn_aurc(doubt, wrong, 5),
         (0.0 + (1.0 / 3.0) / 2.0 + (2.0 / 3.0) / 3.0 + 1.0 / 4.0 + 2.0 / 5.0) / 5.0);
    const float none[] = { 1, 1, 1, 1 };
    const uint8_t half[] = { 1, 0, 0, 1 };
    near("auroc of nothing", mn_auroc(none, half, 4), 0.5);
    near("aurc of nothing", mn_aurc(none, half, 4), 0.5);
    const float order[] = { 4, 1, 2, 3 };
    near("auroc of a full order", mn_auroc(order, (const uint8_t[]){ 1, 0, 0, 1 }, 4), 1.0);
    near("auroc the wrong way round", mn_auroc(order, (const uint8_t[]){ 0, 1, 1, 0 }, 4), 0.0);
    near("aurc of a full order", mn_aurc(order, (const uint8_t[]){ 1, 0, 0, 1 }, 4),
         (0.0 + 0.0 + 1.0 / 3.0 + 0.5) / 4.0);
    CHECK(isnan(mn_auroc(order, (const uint8_t[]){ 0, 0, 0, 0 }, 4)), "auroc of right answers");
    CHECK(isnan(mn_auroc(order, half, 0)) && isnan(mn_aurc(order, half, 0)), "of no answers");
    /* What is no number is the most doubtful. */
    const float odd[] = { 1, NAN, 2 };
    near("auroc with a NAN", mn_auroc(odd, (const uint8_t[]){ 0, 1, 0 }, 3), 1.0);
    check_done();
}

static void reliability_is_counted(void **state) {
    (void)state;
    const float confidence[] = { 0.1f, 0.2f, 0.9f, 1.0f, 0.6f };
    const uint8_t wrong[] = { 1, 0, 0, 0, 1 };
    mn_reliability_bin bins[2];
    /* [0, .5): confidence .15, accuracy .5; [.5, 1]: 2.5 / 3 and 2 / 3. */
    const double ece = mn_reliability(bins, 2, confidence, wrong, 5);
    CHECK(fabs(ece - (2 * 0.35 + 3 * (2.5 / 3.0 - 2.0 / 3.0)) / 5.0) < 1e-7, "ece %.9g", ece);
    CHECK(bins[0].n == 2 && bins[1].n == 3, "%d and %d", (int)bins[0].n, (int)bins[1].n);
    CHECK(fabs(bins[0].confidence - 0.15) < 1e-7 && bins[0].accuracy == 0.5, "the first bin");
    CHECK(bins[1].low == 0.5 && bins[1].high == 1.0, "the second bin");
    const double one = mn_reliability(bins, 2, confidence + 3, wrong + 3, 1);
    CHECK(one == 0.0 && isnan(bins[0].accuracy), "a sure and right answer: %.9g", one);
    check_done();
}

/* One feature that is 0 or 1: the fit is the log odds of each, whatever the scale. */
static void regression_finds_log_odds(void **state) {
    (void)state;
    enum { N = 40 };
    float x[N];
    uint8_t wrong[N];
    mn_logistic fit;
    for (int i = 0; i < N; i++) {
        x[i] = i < 20 ? 0.0f : 1.0f;
        wrong[i] = i < 20 ? i < 5 : i < 36;        // 5 of 20, 16 of 20
    }
    if (mn_logistic_fit(&fit, x, 1, wrong, N, 0.0) != MN_OK) check_fatal("%s", mn_last_error());
    CHECK(fabs(mn_logistic_doubt(&fit, (const float[]){ 0.0f }) - 0.25) < 1e-6, "a quarter");
    CHECK(fabs(mn_logistic_doubt(&fit, (const float[]){ 1.0f }) - 0.8) < 1e-6, "four fifths");
    /* Classes that part entirely have no finite weight: the ridge gives them one. */
    for (int i = 0; i < N; i++) wrong[i] = i >= 20;
    if (mn_logistic_fit(&fit, x, 1, wrong, N, 1e-3) != MN_OK) check_fatal("%s", mn_last_error());
    CHECK(isfinite(fit.weight[0]) && fit.weight[0] > 1.0, "a weight of %g", fit.weight[0]);
    /* A constant tells nothing and changes nothing. */
    float two[2 * N];
    for (int i = 0; i < N; i++) {
        two[2 * i] = 7.0f;
        two[2 * i + 1] = x[i];
        wrong[i] = i < 20 ? i < 5 : i < 36;
    }
    if (mn_logistic_fit(&fit, two, 2, wrong, N, 1e-9) != MN_OK) check_fatal("%s", mn_last_error());
    CHECK(fabs(mn_logistic_doubt(&fit, (const float[]){ 7.0f, 1.0f }) - 0.8) < 1e-6, "beside a "
          "constant");
    CHECK(mn_logistic_fit(&fit, x, 0, wrong, N, 0.0) == MN_ERR_ARGUMENT, "no features were taken");
    check_done();
}

static void limits_keep_the_share(void **state) {
    (void)state;
    const float doubt[] = { 0.1f, 0.2f, 0.3f, 0.4f };
    const uint8_t wrong[] = { 0, 1, 0, 1 };
    near("all right", mn_doubt_limit(doubt, wrong, 4, 1.0), (double)0.1f);
    near("two of three", mn_doubt_limit(doubt, wrong, 4, 0.6), (double)0.3f);
    near("half", mn_doubt_limit(doubt, wrong, 4, 0.5), (double)0.4f);
    CHECK(mn_doubt_limit(doubt, (const uint8_t[]){ 1, 1, 1, 1 }, 4, 0.5) == -INFINITY, "no limit");
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(curves_are_counted),
        cmocka_unit_test(reliability_is_counted),
        cmocka_unit_test(regression_finds_log_odds),
        cmocka_unit_test(limits_keep_the_share),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
