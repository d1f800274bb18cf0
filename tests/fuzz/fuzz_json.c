/* fuzz_json.c - text that parses is written and read back equal; every value can be walked. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "io/json.h"
#include "io/json_write.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

/* Every reader on every value: success or a message that starts with the document. */
static void walk(const mn_json *at) {
    static const char *const known[] = {"heads", "hidden_size", "mixer"};
    int64_t i64 = 0;
    double f64 = 0;
    bool yes = false;
    const char *text = NULL;
    const mn_status results[] = {
        mn_json_read_f64(&f64, at),       mn_json_read_bool(&yes, at),
        mn_json_read_text(&text, at),     mn_json_expect_list(at),
        mn_json_expect_object(at),
    };
    int n_fitting = 0;
    for (size_t i = 0; i < MN_COUNTOF(results); i++) n_fitting += results[i] == MN_OK;
    REQUIRE(n_fitting == (mn_json_given(at) ? 1 : 0));
    if (mn_json_read_i64(&i64, at) == MN_OK) REQUIRE((double)i64 == f64);
    if (mn_json_unknown_key(at, known, 3) != MN_OK) {
        REQUIRE(strncmp(mn_last_error(), "fuzz: ", 6) == 0);
    }

    int64_t n_members = 0;
    for (mn_json member = {0}; mn_json_next(&member, at); n_members++) walk(&member);
    REQUIRE(n_members == 0 || n_members == mn_json_count(at));
    for (int64_t i = 0; n_members == 0 && i < mn_json_count(at); i++) {
        const mn_json item = mn_json_item(at, i);
        walk(&item);
    }
}

static void write_and_read_back(const mn_json *root, mn_json_style style) {
    char *text;
    mn_json back;
    REQUIRE(mn_json_text(&text, root->value, style) == MN_OK);
    REQUIRE(mn_json_parse(&back, text, strlen(text), "back", MN_JSON_STANDARD) == MN_OK);
    REQUIRE(json_equal(root->value, back.value));
    mn_json_free(&back);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    mn_json strict, python;
    const mn_status st = mn_json_parse(&strict, bytes, size, "fuzz", MN_JSON_STANDARD);
    const mn_status python_st = mn_json_parse(&python, bytes, size, "fuzz", MN_JSON_PYTHON);
    if (st == MN_OK) {                      // the wider rules change nothing in standard text
        REQUIRE(python_st == MN_OK && json_equal(strict.value, python.value));
    }
    if (python_st == MN_OK) {
        walk(&python);
        write_and_read_back(&python, MN_JSON_COMPACT);
        write_and_read_back(&python, MN_JSON_PRETTY);
    } else {
        REQUIRE(!python.value && strncmp(mn_last_error(), "fuzz: ", 6) == 0);
    }
    mn_json_free(&strict);
    mn_json_free(&python);
    return 0;
}
