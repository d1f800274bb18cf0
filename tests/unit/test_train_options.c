/* test_train_options.c - every number of a training run has a range: its ends are taken, what lies
 * beyond is refused by name. */
// labels: sanitize
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "train/options.h"

typedef struct number {
    const char *section, *name;
    bool whole;
    double value, least, most;
} number;

static const number numbers[] = {
#define INT(section, name, value, least, most, about)                                              \
    { #section, #name, true, value, (double)least, (double)most },
#define REAL(section, name, value, least, most, about)                                             \
    { #section, #name, false, value, least, most },
#include "train/train_options.def"
};

/* The options of a document that says one number; every other has its default. */
static mn_status read_one(const number *o, const char *text) {
    char document[256];
    mn_json root;
    mn_train_options *options = test_malloc(sizeof *options);
    /* What has to hold between options shall not refuse a number that is fine by itself. */
    const char *more = strcmp(o->name, "lr") == 0 ? ", \"min_lr\": 0"
                     : strcmp(o->name, "min_lr") == 0 ? ", \"lr\": 1e38"
                     : strcmp(o->name, "batch") == 0 ? ", \"context\": 1" : "";
    const int n = snprintf(document, sizeof document, "{\"%s\": {\"%s\": %s%s}}", o->section,
                           o->name, text, more);
    assert_int_equal(mn_json_parse(&root, document, (size_t)n, "settings", MN_JSON_STANDARD),
                     MN_OK);
    const mn_status st = mn_train_options_read(options, &root);
    mn_json_free(&root);
    test_free(options);
    return st;
}

static void check(const number *o, double value, bool fits) {
    char text[64];
    snprintf(text, sizeof text, o->whole ? "%.0f" : "%.17g", value);
    if (o->whole && value >= 9.2e18) snprintf(text, sizeof text, "9223372036854775807");
    const mn_status st = read_one(o, text);
    if (fits && st == MN_OK) return;
    if (fits) fail_msg("%s.%s = %s is refused: %s", o->section, o->name, text, mn_last_error());
    if (st == MN_OK) fail_msg("%s.%s = %s is taken", o->section, o->name, text);
    assert_non_null(strstr(mn_last_error(), o->name));
}

static void ranges_hold(void **state) {
    (void)state;
    assert_true(MN_COUNTOF(numbers) > 20);
    for (size_t i = 0; i < MN_COUNTOF(numbers); i++) {
        const number *o = &numbers[i];
        assert_true(o->least <= o->value && o->value <= o->most);
        check(o, o->least, true);
        check(o, o->most, true);
        check(o, o->value, true);
        check(o, o->whole ? o->least - 1 : o->least - (o->least > 0 ? o->least / 2 : 1e-3), false);
        if (o->most < 9e18) check(o, o->whole ? o->most + 1 : o->most * 1.0001, false);
        check(o, -9.0e18, false);
    }
}

static void products_hold(void **state) {
    (void)state;
    const number batch = { "train", "batch", true, 12, 1, 1 << 24 };
    assert_int_equal(read_one(&batch, "16777216"), MN_OK);
    const number steps = { "train", "steps\": 5, \"batch\": 16777216, \"context", true, 0, 0, 0 };
    assert_int_not_equal(read_one(&steps, "1024"), MN_OK);
    assert_non_null(strstr(mn_last_error(), "train.batch"));
    const number lr = { "train", "lr\": 1e-5, \"seed", true, 0, 0, 0 };
    assert_int_not_equal(read_one(&lr, "1"), MN_OK);
    assert_non_null(strstr(mn_last_error(), "train.min_lr"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranges_hold),
        cmocka_unit_test(products_hold),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
