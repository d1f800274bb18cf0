/* json_write.c - JSON text from jansson values: layout, escapes and shortest numbers. */
#include "io/json_write.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "io/file.h"
#include "io/json.h"

enum { LINE_WIDTH = 100, INDENT = 2 };

/* Growing text. After the first failure nothing more is added. */
typedef struct writer {
    char *text;
    size_t n, room;
    size_t line;            // where the current line starts
    bool pretty;
    mn_status status;
} writer;

static void put(writer *w, const char *text, size_t n) {
    if (w->status != MN_OK) return;
    if (n > w->room - w->n) {
        const size_t room = 2 * (w->n + n) + 256;
        char *grown = n < SIZE_MAX / 4 && w->n < SIZE_MAX / 4 ? realloc(w->text, room) : NULL;
        if (!grown) {
            w->status = mn_fail(MN_ERR_MEMORY, "out of memory for %zu bytes of JSON", room);
            return;
        }
        w->text = grown;
        w->room = room;
    }
    memcpy(w->text + w->n, text, n);
    w->n += n;
}

static void put_text(writer *w, const char *text) {
    put(w, text, strlen(text));
}

static void put_newline(writer *w, int depth) {
    put(w, "\n", 1);
    w->line = w->n;
    for (int i = 0; i < INDENT * depth; i++) put(w, " ", 1);
}

/* Escapes what JSON must have escaped; all other UTF-8 stays as it is. */
static void put_string(writer *w, const char *text, size_t n) {
    put(w, "\"", 1);
    for (size_t i = 0, done = 0; i <= n; i++) {
        const unsigned char c = i < n ? (unsigned char)text[i] : 0;
        if (i < n && c >= 0x20 && c != '"' && c != '\\') continue;
        put(w, text + done, i - done);
        done = i + 1;
        if (i == n) break;
        char escape[8];
        switch (c) {
        case '"': put_text(w, "\\\""); break;
        case '\\': put_text(w, "\\\\"); break;
        case '\n': put_text(w, "\\n"); break;
        case '\r': put_text(w, "\\r"); break;
        case '\t': put_text(w, "\\t"); break;
        default: put(w, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", c)); break;
        }
    }
    put(w, "\"", 1);
}

/* The fewest digits from 15 on that read back exactly; 17 always do. */
static void put_real(writer *w, double value) {
    char text[40];
    int n = 0;
    for (int digits = 15; digits <= 17; digits++) {
        n = snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;     // same locale as snprintf
    }
    /* Whatever is not a digit, sign or exponent is the locale's decimal mark, of any length. */
    size_t kept = 0;
    bool whole = true;
    for (int i = 0; i < n; i++) {
        const bool plain = text[i] >= ' ' && text[i] <= '~' && strchr("0123456789+-e", text[i]);
        whole = whole && plain && text[i] != 'e';
        if (plain) {
            text[kept++] = text[i];
        } else if (text[kept - 1] != '.') {
            text[kept++] = '.';
        }
    }
    put(w, text, kept);
    if (whole) put_text(w, ".0");                   // so that it reads back as a real
}

static void put_integer(writer *w, json_int_t value) {
    char text[32];
    put(w, text, (size_t)snprintf(text, sizeof text, "%" JSON_INTEGER_FORMAT, value));
}

static void put_value(writer *w, const json_t *value, int depth);

static bool all_plain(const json_t *list) {
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        if (json_is_object(item) || json_is_array(item)) return false;
    }
    return true;
}

/* One line: [1, 2, 3] or, compact, [1,2,3]. */
static void put_list_flat(writer *w, const json_t *list, int depth) {
    put(w, "[", 1);
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (i > 0) put_text(w, w->pretty ? ", " : ",");
        put_value(w, json_array_get(list, i), depth + 1);
    }
    put(w, "]", 1);
}

static void put_list(writer *w, const json_t *list, int depth) {
    const size_t n_before = w->n;
    if (!w->pretty || all_plain(list)) {
        put_list_flat(w, list, depth);
        if (!w->pretty || w->n - w->line < LINE_WIDTH) return;
        w->n = n_before;                            // too wide: take it back
    }
    put(w, "[", 1);
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (i > 0) put(w, ",", 1);
        put_newline(w, depth + 1);
        put_value(w, json_array_get(list, i), depth + 1);
    }
    put_newline(w, depth);
    put(w, "]", 1);
}

static void put_object(writer *w, const json_t *object, int depth) {
    const char *key;
    json_t *value;
    bool first = true;
    put(w, "{", 1);
    json_object_foreach((json_t *)(uintptr_t)object, key, value) {
        if (!first) put(w, ",", 1);
        if (w->pretty) put_newline(w, depth + 1);
        put_string(w, key, strlen(key));
        put_text(w, w->pretty ? ": " : ":");
        put_value(w, value, depth + 1);
        first = false;
    }
    if (w->pretty && !first) put_newline(w, depth);
    put(w, "}", 1);
}

static void put_value(writer *w, const json_t *value, int depth) {
    if (w->status != MN_OK) return;
    if (!value || depth > MN_JSON_MAX_DEPTH) {
        w->status = mn_fail(MN_ERR_INTERNAL, "JSON to write is %s",
                            value ? "nested too deep" : "missing a value");
        return;
    }
    switch (json_typeof(value)) {
    case JSON_OBJECT: put_object(w, value, depth); break;
    case JSON_ARRAY: put_list(w, value, depth); break;
    case JSON_STRING: put_string(w, json_string_value(value), json_string_length(value)); break;
    case JSON_INTEGER: put_integer(w, json_integer_value(value)); break;
    case JSON_REAL: put_real(w, json_real_value(value)); break;
    case JSON_TRUE: put_text(w, "true"); break;
    case JSON_FALSE: put_text(w, "false"); break;
    case JSON_NULL: put_text(w, "null"); break;
    }
}

mn_status mn_json_text(char **out, const json_t *value, mn_json_style style) {
    writer w = {.pretty = style == MN_JSON_PRETTY, .status = MN_OK};
    put_value(&w, value, 0);
    put(&w, "", 1);                                 // the closing zero
    if (w.status != MN_OK) {
        free(w.text);
        w.text = NULL;
    }
    *out = w.text;
    return w.status;
}

mn_status mn_json_save(const char *path, const json_t *value) {
    char *text;
    mn_status st = mn_json_text(&text, value, MN_JSON_PRETTY);
    if (st != MN_OK) return st;
    const size_t n = strlen(text);
    text[n] = '\n';                                 // over the closing zero
    st = mn_file_write_bytes(path, text, n + 1);
    free(text);
    return st;
}

json_t *mn_json_real(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}
