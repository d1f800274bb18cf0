/* test_template.c - chat templates: texts and refusals, row by row. */
// labels: sanitize threads
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "template/template.h"

static const char variables[] =
    "{\"xs\": [3, 1, 2], \"d\": {\"b\": 1, \"a\": [true, null]}, \"s\": \"H\xC3\xA9llo\", "
    "\"ms\": [{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"tool\", \"content\": \"x\"}],"
    "\"none\": null, \"tree\": [{\"n\": 1, \"c\": [{\"n\": 2, \"c\": []}]}]}";

static mn_status render(mn_text *out, const char *text, const mn_jinja_limits *limits) {
    json_error_t error;
    json_t *given = json_loads(variables, 0, &error);
    mn_jinja *t = NULL;
    assert_non_null(given);
    mn_status st = mn_jinja_parse(&t, text, strlen(text), "test");
    if (st == MN_OK) st = mn_jinja_render(out, t, given, limits);
    mn_jinja_free(t);
    json_decref(given);
    return st;
}

static const struct {
    const char *text, *wanted;
} texts[] = {
#define TEXT(text, wanted) { text, wanted },
#define FAILS(text, says)
#include "unit/template_cases.def"
#undef TEXT
#undef FAILS
};

static const struct {
    const char *text, *says;
} failures[] = {
#define TEXT(text, wanted)
#define FAILS(text, says) { text, says },
#include "unit/template_cases.def"
#undef TEXT
#undef FAILS
};

static void test_texts(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(texts); i++) {
        mn_text out = { 0 };
        if (render(&out, texts[i].text, NULL) != MN_OK) {
            fail_msg("%s: %s", texts[i].text, mn_last_error());
        }
        assert_int_equal(mn_text_add(&out, "", 1), MN_OK);
        if (strcmp(out.bytes, texts[i].wanted) != 0) {
            fail_msg("%s: wanted \"%s\", got \"%s\"", texts[i].text, texts[i].wanted, out.bytes);
        }
        mn_text_free(&out);
    }
}

static void test_failures(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(failures); i++) {
        mn_text out = { 0 };
        if (render(&out, failures[i].text, NULL) == MN_OK) fail_msg("%s: passed", failures[i].text);
        if (!strstr(mn_last_error(), failures[i].says)) {
            fail_msg("%s: \"%s\" does not say \"%s\"", failures[i].text, mn_last_error(),
                     failures[i].says);
        }
        assert_int_equal(out.size, 0);
        mn_text_free(&out);
    }
}

/* Loops, texts and calls without end stop at their limits. */
static void test_limits(void **state) {
    static const char *const hostile[] = {
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(t='x') %}{% for a in range(99) %}{% set ns.t = ns.t + ns.t %}"
        "{% endfor %}{{ ns.t }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ 'x' * 99999999999 }}",
        "{% for a in range(99999) %}{{ 'xxxxxxxxxxxxxxxx' * 999 }}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
    };
    const mn_jinja_limits limits = { .steps = 1000000, .bytes = 8 << 20, .output = 1 << 20 };
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(hostile); i++) {
        mn_text out = { 0 };
        if (render(&out, hostile[i], &limits) == MN_OK) fail_msg("%s: passed", hostile[i]);
        mn_text_free(&out);
    }
}

static void test_nesting(void **state) {
    static char text[200000];
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        static const char *const open[] = { "(", "[", "-", "not " };
        mn_text out = { 0 };
        size_t n = (size_t)snprintf(text, sizeof text, "{{ ");
        while (n < sizeof text - 16) n += (size_t)snprintf(text + n, 8, "%s", open[kind]);
        assert_int_not_equal(render(&out, text, NULL), MN_OK);
        mn_text_free(&out);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_nesting),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
