/* test_metric.c - ways of counting right answers, on batches counted by hand. */
// labels: sanitize
#include "support/check.h"

#include <math.h>
#include <string.h>

#include "support/folder.h"
#include "tasks/metric.h"
#include "tasks/task.h"

enum { NO = MN_NO_TARGET };

static mn_metric *metric_of(int64_t n_classes, int n_groups) {
    mn_metric *m;
    if (mn_metric_create(&m, n_classes, n_groups) != MN_OK) check_fatal("%s", mn_last_error());
    return m;
}

static void near(const char *what, double got, double want) {
    CHECK(fabs(got - want) < 1e-12, "%s: %.15g, not %.15g", what, got, want);
}

static void batches_are_counted(void **state) {
    (void)state;
    mn_metric *m = metric_of(6, 2);
    /* Classes: 0 right 2 of 3, 1 right 0 of 1, 2 right 1 of 1; 4 only predicted: (2/3+0+1+0)/4. */
    const int32_t target1[] = { 0, 0, NO, 1, 2, 0, NO, NO, NO };
    const int32_t said1[] = { 0, 4, 9, 0, 2, 0, 3, -7, 5 };
    const int8_t group1[] = { 0, 1, -1, 0, 1, -1, 0, 0, 0 };
    assert_int_equal(mn_metric_add(m, said1, target1, group1, 3, 3), MN_OK);
    mn_metric_result r = mn_metric_read(m);
    near("token", r.token, 3.0 / 5.0);
    near("macro", r.macro, (2.0 / 3.0 + 0.0 + 1.0 + 0.0) / 4.0);
    near("example", r.example, (1.0 / 2.0 + 2.0 / 3.0) / 2.0);
    near("sequence", r.sequence, 0.0);
    near("group 0", mn_metric_group(m, 0), 1.0 / 2.0);
    near("group 1", mn_metric_group(m, 1), 1.0 / 2.0);
    assert_int_equal(r.sequences, 2);
    /* Another batch: macro is the mean over batches, not of all tokens. */
    const int32_t target2[] = { 3, 3, 3, 5 }, said2[] = { 3, 3, 3, 5 };
    assert_int_equal(mn_metric_add(m, said2, target2, NULL, 2, 2), MN_OK);
    const int32_t nothing[] = { NO, NO };
    assert_int_equal(mn_metric_add(m, nothing, nothing, NULL, 1, 2), MN_OK);
    r = mn_metric_read(m);
    near("token", r.token, 7.0 / 9.0);
    near("macro", r.macro, (5.0 / 12.0 + 1.0) / 2.0);
    near("example", r.example, (7.0 / 6.0 + 2.0) / 4.0);
    near("sequence", r.sequence, 2.0 / 4.0);
    assert_int_equal(r.batches, 2);
    assert_int_equal(r.answers, 9);
    mn_metric_reset(m);
    r = mn_metric_read(m);
    assert_true(isnan(r.token) && isnan(r.macro) && isnan(r.example) && isnan(r.sequence));
    assert_true(isnan(mn_metric_group(m, 0)) && isnan(mn_metric_group(m, 7)));
    mn_metric_destroy(m);
    check_done();
}

/* One stray prediction of a key costs 1/9 of a batch with eight values. */
static void a_stray_class_costs_a_ninth(void **state) {
    (void)state;
    mn_metric *m = metric_of(16, 0);
    int32_t target[800], said[800];
    for (int i = 0; i < 800; i++) target[i] = said[i] = 8 + i % 8;
    said[0] = 0;
    assert_int_equal(mn_metric_add(m, said, target, NULL, 8, 100), MN_OK);
    near("macro", mn_metric_read(m).macro, (7.0 + 99.0 / 100.0) / 9.0);
    near("token", mn_metric_read(m).token, 799.0 / 800.0);
    mn_metric_destroy(m);
    check_done();
}

static void nonsense_is_refused(void **state) {
    (void)state;
    mn_metric *m;
    assert_fails(mn_metric_create(&m, 0, 0), MN_ERR_ARGUMENT, "0 classes", "possible");
    assert_null(m);
    assert_fails(mn_metric_create(&m, 3, 1000), MN_ERR_ARGUMENT, "1000 groups", "possible");
    m = metric_of(4, 1);
    const int32_t good[] = { 0, 3 }, high[] = { 0, 4 }, low[] = { 0, -1 };
    const int8_t group[] = { 0, 1 };
    assert_fails(mn_metric_add(m, high, good, NULL, 1, 2), MN_ERR_ARGUMENT, "place 1",
                 "prediction 4");
    assert_fails(mn_metric_add(m, low, good, NULL, 1, 2), MN_ERR_ARGUMENT, "place 1",
                 "prediction -1");
    assert_fails(mn_metric_add(m, good, high, NULL, 1, 2), MN_ERR_ARGUMENT, "place 1", "target 4");
    assert_fails(mn_metric_add(m, good, good, group, 1, 2), MN_ERR_ARGUMENT, "place 1", "group 1");
    assert_int_equal(mn_metric_read(m).answers, 0);
    mn_metric_destroy(m);
    mn_metric_destroy(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(batches_are_counted),
        cmocka_unit_test(a_stray_class_costs_a_ninth),
        cmocka_unit_test(nonsense_is_refused),
    };
    return cmocka_run_group_tests_name("metric", tests, NULL, NULL);
}
