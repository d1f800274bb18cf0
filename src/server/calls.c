/* calls.c - see calls.h. */
#include "server/calls.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char opening[] = "<tool_call>", closing[] = "</tool_call>";

enum { OPENING = sizeof opening - 1, CLOSING = sizeof closing - 1 };

/* ---- reading --------------------------------------------------------------------------------- */

static size_t skip_space(const char *text, size_t size, size_t at) {
    while (at < size && strchr(" \t\r\n", text[at]) && text[at]) at++;
    return at;
}

/* Where `mark` begins at or behind `at`; `size`: nowhere. */
static size_t find(const char *text, size_t size, size_t at, const char *mark, size_t n) {
    for (; at + n <= size; at++) {
        if (memcmp(text + at, mark, n) == 0) return at;
    }
    return size;
}

static bool is_tool(const json_t *tools, const char *name) {
    for (size_t i = 0; i < json_array_size(tools); i++) {
        const json_t *tool = json_array_get(tools, i);
        const json_t *function = json_object_get(tool, "function");
        const char *is = json_string_value(json_object_get(function ? function : tool, "name"));
        if (is && strcmp(is, name) == 0) return true;
    }
    return false;
}

/* Appends one call; whether it is one. */
static bool add_call(json_t *calls, const json_t *tools, const json_t *call, const char *id) {
    const char *name = json_string_value(json_object_get(call, "name"));
    const json_t *arguments = json_object_get(call, "arguments");
    if (!arguments) arguments = json_object_get(call, "parameters");
    if (!name || !is_tool(tools, name)) return false;
    if (arguments && !json_is_object(arguments)) return false;
    char own[64];
    snprintf(own, sizeof own, "call-%s-%zu", id, json_array_size(calls));
    char *text = arguments ? json_dumps(arguments, JSON_COMPACT) : NULL;
    json_t *out = json_pack("{s:i,s:s,s:s,s:{s:s,s:s}}", "index", (int)json_array_size(calls),
                            "id", own, "type", "function", "function", "name", name, "arguments",
                            text ? text : "{}");
    free(text);
    return out && json_array_append_new(calls, out) == 0;
}

/* The object of a call, or each of a list. */
static bool add_calls(json_t *calls, const json_t *tools, const char *text, size_t size,
                      const char *id) {
    json_t *value = json_loadb(text, size, JSON_REJECT_DUPLICATES, NULL);
    bool good = value && (json_is_object(value) || json_array_size(value) > 0);
    if (good && json_is_object(value)) good = add_call(calls, tools, value, id);
    for (size_t i = 0; good && i < json_array_size(value); i++) {
        good = add_call(calls, tools, json_array_get(value, i), id);
    }
    json_decref(value);
    return good;
}

/* Marked calls from `at` on, to the end of the text. */
static bool add_marked(json_t *calls, const json_t *tools, const char *text, size_t size, size_t at,
                       const char *id) {
    while (at < size) {
        if (size - at < OPENING || memcmp(text + at, opening, OPENING) != 0) return false;
        const size_t from = at + OPENING, to = find(text, size, from, closing, CLOSING);
        if (!add_calls(calls, tools, text + from, to - from, id)) return false;
        at = skip_space(text, size, to < size ? to + CLOSING : size);
    }
    return json_array_size(calls) > 0;
}

json_t *mn_calls_parse(const json_t *tools, const char *text, size_t size, const char *id,
                       size_t *before) {
    if (!tools || size == 0) return NULL;
    json_t *calls = json_array();
    if (!calls) return NULL;
    size_t at = find(text, size, 0, opening, OPENING);
    bool found = at < size && add_marked(calls, tools, text, size, at, id);
    if (!found && at == size) {
        at = 0;
        found = add_calls(calls, tools, text, size, id);
    }
    if (!found) {
        json_decref(calls);
        return NULL;
    }
    while (at > 0 && strchr(" \t\r\n", text[at - 1]) && text[at - 1]) at--;
    *before = at;
    return calls;
}

size_t mn_calls_settled(const char *text, size_t size) {
    const size_t first = skip_space(text, size, 0);
    if (first == size || text[first] == '{' || text[first] == '[') return 0;
    size_t at = 0;    // where a mark begins, or may
    for (; at < size; at++) {
        const size_t here = size - at < OPENING ? size - at : OPENING;
        if (memcmp(text + at, opening, here) == 0) break;
    }
    while (at > 0 && strchr(" \t\r\n", text[at - 1]) && text[at - 1]) at--;    // goes with it
    return at;
}

/* ---- what was called before ------------------------------------------------------------------ */

/* Parts of text become one text; other parts are left for the template to refuse. */
static void unfold_content(json_t *message) {
    const json_t *content = json_object_get(message, "content");
    json_t *all = json_is_array(content) ? json_string("") : NULL;
    for (size_t i = 0; all && i < json_array_size(content); i++) {
        const json_t *part = json_array_get(content, i), *text = json_object_get(part, "text");
        const char *type = json_string_value(json_object_get(part, "type"));
        json_t *longer = NULL;
        if (text && type && strcmp(type, "text") == 0) {
            longer = json_sprintf("%s%s%s", json_string_value(all), i ? "\n" : "",
                                  json_string_value(text));
        }
        json_decref(all);
        all = longer;
    }
    if (all) json_object_set(message, "content", all);
    json_decref(all);
}

static void unfold_message(json_t *message) {
    unfold_content(message);
    json_t *calls = json_object_get(message, "tool_calls");
    for (size_t i = 0; i < json_array_size(calls); i++) {
        json_t *function = json_object_get(json_array_get(calls, i), "function");
        const json_t *text = json_object_get(function, "arguments");
        if (!json_is_string(text)) continue;
        json_t *value = json_loadb(json_string_value(text), json_string_length(text),
                                   JSON_REJECT_DUPLICATES, NULL);
        if (json_is_object(value)) json_object_set(function, "arguments", value);
        json_decref(value);
    }
}

json_t *mn_calls_unfold(const json_t *messages) {
    json_t *copy = json_deep_copy(messages);
    for (size_t i = 0; i < json_array_size(copy); i++) unfold_message(json_array_get(copy, i));
    return copy;
}
