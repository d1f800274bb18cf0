/* fuzz_template.c - any bytes are refused with a message, or render within their limits, twice the
 * same. */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "template/template.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

enum { MOST_OUTPUT = 1 << 16 };

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static const char given[] =
    "{\"messages\": [{\"role\": \"system\", \"content\": \"Be brief.\"}, {\"role\": \"user\", "
    "\"content\": [{\"type\": \"text\", \"text\": \"\xC3\xA9\"}]}, {\"role\": \"assistant\", "
    "\"tool_calls\": [{\"function\": {\"name\": \"f\", \"arguments\": {\"x\": 1.5}}}]}], "
    "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\"}}], "
    "\"bos_token\": \"<s>\", \"add_generation_prompt\": true, \"xs\": [3, 1, 2], \"n\": 7}";

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static json_t *variables;
    const mn_jinja_limits limits = { .steps = 100000, .bytes = 8 << 20, .output = MOST_OUTPUT };
    if (!variables) variables = json_loads(given, 0, NULL);
    REQUIRE(variables);
    mn_jinja *t = NULL;
    if (mn_jinja_parse(&t, (const char *)bytes, size, "fuzz") != MN_OK) {
        REQUIRE(!t && strncmp(mn_last_error(), "fuzz: ", 6) == 0);
        return 0;
    }
    mn_text out = { 0 }, again = { 0 };
    const mn_status st = mn_jinja_render(&out, t, variables, &limits);
    if (st != MN_OK) REQUIRE(out.size == 0 && strncmp(mn_last_error(), "fuzz: ", 6) == 0);
    REQUIRE(out.size <= MOST_OUTPUT && mn_utf8_valid(out.bytes, out.size) == out.size);
    REQUIRE(mn_jinja_render(&again, t, variables, &limits) == st);
    const bool now = memmem(bytes, size, "strftime_now", 12) != NULL;
    const bool same = out.size == again.size &&
                      (!out.size || memcmp(out.bytes, again.bytes, out.size) == 0);
    REQUIRE(now || same);
    mn_text_free(&out);
    mn_text_free(&again);
    mn_jinja_free(t);
    return 0;
}
