/* test_calls.c - calls of tools in a model's text: what is one, what stays text, and that events
 * tell no byte of what becomes a call. */
// labels: sanitize
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "server/calls.h"
#include "support/check.h"

static const char tools_text[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"weather\"}},{\"name\":\"clock\"}]";

typedef struct call_case {
    const char *text;
    size_t before;           // bytes of text in front
    const char *names;       // of the calls, "" for none
    const char *arguments;   // of the last one
} call_case;

static const call_case cases[] = {
    { "", 0, "", "" },
    { "no call", 0, "", "" },
    { "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>", 0,
      "weather", "{\"city\":\"Oslo\"}" },
    { "Let me look.\n<tool_call>{\"name\": \"clock\"}</tool_call>\n<tool_call>{\"name\": "
      "\"weather\", \"arguments\": {}}</tool_call>", 12, "clock weather", "{}" },
    { "<tool_call>{\"name\": \"clock\", \"arguments\": {\"a\": [1]}}", 0, "clock",
      "{\"a\":[1]}" },                                    // a stop took the end away
    { "{\"name\": \"weather\", \"parameters\": {\"city\": 1}}", 0, "weather", "{\"city\":1}" },
    { " [{\"name\": \"clock\"}, {\"name\": \"clock\", \"arguments\": {\"b\": null}}]", 0,
      "clock clock", "{\"b\":null}" },
    { "<tool_call>{\"name\": \"other\"}</tool_call>", 0, "", "" },
    { "<tool_call>{\"name\": \"clock\"</tool_call>", 0, "", "" },
    { "<tool_call>{\"name\": \"clock\"}</tool_call> and more", 0, "", "" },
    { "<tool_call>{\"name\": \"clock\", \"arguments\": 5}</tool_call>", 0, "", "" },
    { "{\"name\": \"other\"}", 0, "", "" },
    { "[]", 0, "", "" },
    { "[[[[", 0, "", "" },
    { "{\"name\": 5}", 0, "", "" },
};

static void check_settled(const char *text, size_t size, size_t before) {
    for (size_t n = 0; n <= size; n++) {
        const size_t told = mn_calls_settled(text, n);
        CHECK(told <= n && told <= before, "%zu of %zu bytes of '%s' were told, before %zu", told,
              n, text, before);
    }
}

static void calls_are_found(void **context) {
    (void)context;
    json_t *tools = json_loads(tools_text, 0, NULL);
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        const call_case *c = &cases[i];
        const size_t size = strlen(c->text);
        size_t before = size;
        char names[200] = "";
        const char *last = "";
        json_t *calls = mn_calls_parse(tools, c->text, size, "id", &before);
        for (size_t k = 0; k < json_array_size(calls); k++) {
            const json_t *f = json_object_get(json_array_get(calls, k), "function");
            if (k) strcat(names, " ");
            strcat(names, json_string_value(json_object_get(f, "name")));
            last = json_string_value(json_object_get(f, "arguments"));
        }
        CHECK(strcmp(names, c->names) == 0, "'%s': calls '%s'", c->text, names);
        CHECK(strcmp(last, c->arguments) == 0, "'%s': arguments '%s'", c->text, last);
        CHECK(before == (calls ? c->before : size), "'%s': %zu bytes before", c->text, before);
        CHECK((calls == NULL) == !*c->names, "'%s': an empty list", c->text);
        if (calls) check_settled(c->text, size, before);
        json_decref(calls);
        CHECK(!mn_calls_parse(NULL, c->text, size, "id", &before), "a call without tools");
    }
    CHECK(mn_calls_settled("all of it", 9) == 9, "plain text is held back");
    CHECK(mn_calls_settled("a < b", 5) == 5, "a lone sign is held back");
    json_decref(tools);
    check_done();
}

static void messages_are_unfolded(void **context) {
    (void)context;
    static const char given[] =
        "[{\"tool_calls\":[{\"function\":{\"arguments\":\"{\\\"a\\\":1}\"}}]},{\"content\":"
        "[{\"type\":\"text\",\"text\":\"x\"},{\"type\":\"text\",\"text\":\"y\"}]}]";
    json_t *messages = json_loads(given, 0, NULL);
    json_t *unfolded = mn_calls_unfold(messages);
    char *text = json_dumps(unfolded, JSON_COMPACT);
    CHECK(strcmp(text, "[{\"tool_calls\":[{\"function\":{\"arguments\":{\"a\":1}}}]},"
                       "{\"content\":\"x\\ny\"}]") == 0, "unfolded: %s", text);
    free(text);
    json_decref(unfolded);
    json_decref(messages);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_are_found),
        cmocka_unit_test(messages_are_unfolded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
