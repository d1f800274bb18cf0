/* jsonl.c - the text of one line of JSON. */
#include "data/jsonl.h"

#include "base/status.h"
#include "io/closest.h"

enum { MAX_SUGGESTED = 64 };    // keys looked at for a suggestion

static mn_status fail_missing(const mn_json *root, const char *key) {
    const char *names[MAX_SUGGESTED];
    int64_t n = 0;
    for (mn_json m = { 0 }; n < MAX_SUGGESTED && mn_json_next(&m, root);) names[n++] = m.name;
    const char *near = mn_closest(key, names, n);
    if (near) return mn_json_fail(root, "no key \"%s\", did you mean \"%s\"?", key, near);
    if (n == 0) return mn_json_fail(root, "no key \"%s\", the object is empty", key);
    return mn_json_fail(root, "no key \"%s\"; the first one there is \"%s\"", key, names[0]);
}

mn_status mn_jsonl_text(mn_json *root, const char **text, size_t *size, const char *line,
                        size_t line_size, const char *key, const char *name) {
    mn_status st = mn_json_parse(root, line, line_size, name, MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_json_expect_object(root);
    if (st != MN_OK) return st;
    const mn_json value = mn_json_member(root, key);
    if (!value.value) return fail_missing(root, key);
    st = mn_json_read_text(text, &value);
    if (st == MN_OK) *size = json_string_length(value.value);
    return st;
}

bool mn_jsonl_blank(const char *line, size_t size) {
    for (size_t i = 0; i < size; i++) {
        if (line[i] != ' ' && line[i] != '\t' && line[i] != '\r') return false;
    }
    return true;
}
