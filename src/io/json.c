/* json.c - the reading side of JSON: checks before jansson, ways and kinds in messages after it.
 * Writing is in json_write.c. */
#define _XOPEN_SOURCE 700       // strdup under -std=c11
#include "io/json.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/closest.h"
#include "io/file.h"

/* A fixed buffer that text is appended to; what does not fit is cut. */
typedef struct short_text {
    char text[512];
    size_t n;
} short_text;

static void append(short_text *to, const char *format, ...) {
    const size_t room = sizeof to->text - to->n;
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(to->text + to->n, room, format, args);
    va_end(args);
    if (n > 0) to->n += (size_t)n < room ? (size_t)n : room - 1;
}

static bool is_plain_key(const char *key) {
    if (!*key) return false;
    for (; *key; key++) {
        const char c = *key;
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
        const bool other = (c >= '0' && c <= '9') || c == '-';
        if (!letter && !other) return false;
    }
    return true;
}

/* "model.layers[3].heads"; keys that hold dots or blanks are quoted: ["a.b"].heads */
static void append_way(short_text *to, const mn_json *at) {
    if (!at->parent) return;
    append_way(to, at->parent);
    if (!at->name) {
        append(to, "[%" PRId64 "]", at->index);
    } else if (is_plain_key(at->name)) {
        append(to, "%s%s", at->parent->parent ? "." : "", at->name);
    } else {
        append(to, "[\"%s\"]", at->name);
    }
}

static const char *document_name(const mn_json *at) {
    while (at->parent) at = at->parent;
    return at->name ? at->name : "JSON";
}

/* What a value is, in the words of the messages. */
static const char *kind_of(const json_t *value) {
    if (!value) return "nothing";
    switch (json_typeof(value)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "a list";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: return "a whole number";
    case JSON_REAL: return "a fractional number";
    case JSON_TRUE: return "true";
    case JSON_FALSE: return "false";
    case JSON_NULL: return "null";
    }
    return "something else";
}

/* "expected ..., found ...", or what is missing above a value that is not there. */
static mn_status fail_kind(const mn_json *at, const char *expected) {
    if (!at->value && at->parent) {
        const mn_json *up = at->parent;
        const bool fits = at->name ? json_is_object(up->value) : json_is_array(up->value);
        if (!fits) return fail_kind(up, at->name ? "an object" : "a list");
        return mn_json_fail(at, "is missing, expected %s", expected);
    }
    return mn_json_fail(at, "expected %s, found %s", expected, kind_of(at->value));
}

/* Walks the text outside strings and refuses what would make the parser recurse too far. */
static mn_status check_depth(const uint8_t *text, size_t size, const char *name) {
    int64_t depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < size; i++) {
        const uint8_t c = text[i];
        if (in_string && c == '\\') i++;              // whatever is escaped
        if (c == '"') in_string = !in_string;
        if (in_string) continue;
        if (c == '[' || c == '{') depth++;
        if (c == ']' || c == '}') depth--;
        if (depth > MN_JSON_MAX_DEPTH) {
            return mn_fail(MN_ERR_FORMAT, "%s: lists and objects are nested more than %d deep",
                           name, MN_JSON_MAX_DEPTH);
        }
    }
    return MN_OK;
}

/* Length of the Python word for a non-finite number at the start of `text`, or 0. */
static size_t python_word(const uint8_t *text, size_t size) {
    static const char *const words[] = {"Infinity", "-Infinity", "NaN"};
    for (size_t i = 0; i < MN_COUNTOF(words); i++) {
        const size_t n = strlen(words[i]);
        if (n <= size && memcmp(text, words[i], n) == 0) return n;
    }
    return 0;
}

/* A copy (to be freed) of the text with null for Infinity, -Infinity and NaN outside strings. */
static uint8_t *without_python_words(size_t *n_out, const uint8_t *text, size_t size) {
    /* NaN -> null grows 3 bytes to 4; the other words shrink. */
    if (size > SIZE_MAX / 2) return NULL;
    uint8_t *out = malloc(size + size / 3 + 1);
    if (!out) return NULL;
    size_t n = 0;
    bool in_string = false;
    for (size_t i = 0; i < size;) {
        const size_t word = in_string ? 0 : python_word(text + i, size - i);
        if (word > 0) {
            memcpy(out + n, "null", 4);
            n += 4;
            i += word;
            continue;
        }
        if (text[i] == '"') in_string = !in_string;
        if (in_string && text[i] == '\\' && i + 1 < size) out[n++] = text[i++];
        out[n++] = text[i++];
    }
    *n_out = n;
    return out;
}

/* jansson on checked text; its message gets our name and a place in words. */
static mn_status load_text(json_t **out, const uint8_t *text, size_t size, const char *name,
                           mn_json_text_rules rules) {
    json_error_t error;
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY;
    *out = json_loadb((const char *)text, size, flags, &error);
    const bool large = !*out && json_error_code(&error) == json_error_numeric_overflow;
    if (large && rules == MN_JSON_PYTHON) {
        *out = json_loadb((const char *)text, size, flags | JSON_DECODE_INT_AS_REAL, &error);
    }
    if (*out) return MN_OK;
    if (json_error_code(&error) == json_error_out_of_memory) {
        return mn_fail(MN_ERR_MEMORY, "%s: out of memory", name);
    }
    if (json_error_code(&error) == json_error_null_character ||
        json_error_code(&error) == json_error_null_byte_in_key) {
        return mn_fail(MN_ERR_FORMAT, "%s: line %d, column %d: a text holds \\u0000, a zero byte, "
                       "which no text may have here; leave it out", name, error.line,
                       error.column);
    }
    return mn_fail(MN_ERR_FORMAT, "%s: line %d, column %d: %s", name, error.line, error.column,
                   error.text);
}

mn_status mn_json_parse(mn_json *root, const void *bytes, size_t size, const char *name,
                        mn_json_text_rules rules) {
    *root = (mn_json){0};
    if (size == 0) return mn_fail(MN_ERR_FORMAT, "%s: is empty, expected JSON", name);
    mn_status st = check_depth(bytes, size, name);
    if (st != MN_OK) return st;

    const uint8_t *text = bytes;
    uint8_t *copy = NULL;
    if (rules == MN_JSON_PYTHON) {
        copy = without_python_words(&size, text, size);
        if (!copy) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", name);
        text = copy;
    }
    json_t *value = NULL;
    st = load_text(&value, text, size, name, rules);
    free(copy);
    if (st != MN_OK) return st;

    char *own_name = strdup(name);
    if (!own_name) {
        json_decref(value);
        return mn_fail(MN_ERR_MEMORY, "%s: out of memory", name);
    }
    *root = (mn_json){.value = value, .name = own_name};
    return MN_OK;
}

mn_status mn_json_load(mn_json *root, const char *path, mn_json_text_rules rules) {
    *root = (mn_json){0};
    mn_file file = {0};
    mn_status st = mn_file_map(&file, path);
    if (st == MN_OK) st = mn_json_parse(root, file.bytes, file.size, path, rules);
    mn_file_unmap(&file);
    return st;
}

void mn_json_free(mn_json *root) {
    if (!root) return;
    json_decref(root->value);
    free((char *)(uintptr_t)root->name);
    free(root->ids.of);
    *root = (mn_json){0};
}

mn_json mn_json_member(const mn_json *object, const char *key) {
    return (mn_json){
        .value = json_object_get(object->value, key),   // NULL for what is no object
        .parent = object,
        .name = key,
    };
}

mn_json mn_json_item(const mn_json *list, int64_t index) {
    const bool inside = index >= 0 && index < (int64_t)json_array_size(list->value);
    return (mn_json){
        .value = inside ? json_array_get(list->value, (size_t)index) : NULL,
        .parent = list,
        .index = index,
    };
}

bool mn_json_given(const mn_json *at) {
    return at->value && !json_is_null(at->value);
}

int64_t mn_json_count(const mn_json *at) {
    /* Each is 0 for the other kind. */
    return (int64_t)(json_array_size(at->value) + json_object_size(at->value));
}

bool mn_json_next(mn_json *member, const mn_json *object) {
    void *const iter = member->name
                           ? json_object_iter_next(object->value,
                                                   json_object_key_to_iter(member->name))
                           : json_object_iter(object->value);
    if (!iter) return false;
    *member = (mn_json){
        .value = json_object_iter_value(iter),
        .parent = object,
        .name = json_object_iter_key(iter),
    };
    return true;
}

mn_status mn_json_expect_object(const mn_json *at) {
    return json_is_object(at->value) ? MN_OK : fail_kind(at, "an object");
}

mn_status mn_json_expect_list(const mn_json *at) {
    return json_is_array(at->value) ? MN_OK : fail_kind(at, "a list");
}

mn_status mn_json_read_i64(int64_t *out, const mn_json *at) {
    if (json_is_integer(at->value)) {
        *out = json_integer_value(at->value);
        return MN_OK;
    }
    /* Beyond 2^53 a double no longer tells neighbouring whole numbers apart. */
    const double real = json_real_value(at->value);     // 0 for other kinds
    if (!json_is_real(at->value) || fabs(real) > 9007199254740992.0 || real != floor(real)) {
        return fail_kind(at, "a whole number");
    }
    *out = (int64_t)real;
    return MN_OK;
}

mn_status mn_json_read_f64(double *out, const mn_json *at) {
    if (!json_is_number(at->value)) return fail_kind(at, "a number");
    *out = json_number_value(at->value);
    return MN_OK;
}

mn_status mn_json_read_bool(bool *out, const mn_json *at) {
    if (!json_is_boolean(at->value)) return fail_kind(at, "true or false");
    *out = json_is_true(at->value);
    return MN_OK;
}

mn_status mn_json_read_text(const char **out, const mn_json *at) {
    if (!json_is_string(at->value)) return fail_kind(at, "a string");
    *out = json_string_value(at->value);
    return MN_OK;
}

/* The required and the optional form of a reader. */
#define MEMBER_READERS(kind, type)                                                                 \
    mn_status mn_json_get_##kind(type *out, const mn_json *object, const char *key) {              \
        const mn_json at = mn_json_member(object, key);                                            \
        return mn_json_read_##kind(out, &at);                                                      \
    }                                                                                              \
    mn_status mn_json_opt_##kind(type *out, const mn_json *object, const char *key) {              \
        const mn_json at = mn_json_member(object, key);                                            \
        if (json_is_object(object->value) && !mn_json_given(&at)) return MN_OK;                    \
        return mn_json_read_##kind(out, &at);                                                      \
    }
MEMBER_READERS(i64, int64_t)
MEMBER_READERS(f64, double)
MEMBER_READERS(bool, bool)
MEMBER_READERS(text, const char *)
#undef MEMBER_READERS

mn_status mn_json_unknown_key_among(const mn_json *object, const char *const known[],
                                    int64_t n_known, int64_t n_meant) {
    const mn_status st = mn_json_expect_object(object);
    if (st != MN_OK) return st;
    for (mn_json member = {0}; mn_json_next(&member, object);) {
        int64_t i = 0;
        while (i < n_known && strcmp(known[i], member.name) != 0) i++;
        if (i < n_known) continue;
        const char *closest = mn_closest(member.name, known, n_meant);
        if (!closest) return mn_json_fail(object, "unknown key \"%s\"", member.name);
        return mn_json_fail(object, "unknown key \"%s\", did you mean \"%s\"?", member.name,
                            closest);
    }
    return MN_OK;
}

mn_status mn_json_unknown_key(const mn_json *object, const char *const known[], int64_t n_known) {
    return mn_json_unknown_key_among(object, known, n_known, n_known);
}

mn_status mn_json_fail(const mn_json *at, const char *format, ...) {
    short_text way = {0}, sentence = {0};
    append_way(&way, at);
    va_list args;
    va_start(args, format);
    vsnprintf(sentence.text, sizeof sentence.text, format, args);
    va_end(args);
    return mn_fail(MN_ERR_FORMAT, "%s: %s%s%s", document_name(at), way.text, way.n > 0 ? ": " : "",
                   sentence.text);
}
