/* json_ids.c - objects with one long list of whole numbers, such as the ids of a prompt.
 *
 * A value of its own for each of 32,000 numbers takes longer than all else that a request needs
 * whose prompt was read before. So the list is found and read here, and the parser gets the text
 * without its items. Where anything is not as expected the parser gets all of the text, and has the
 * words for what is wrong with it. */
#include "io/json.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"

enum { MOST_DIGITS = 9, ROOM = 1024 };

/* Where text goes on; `end` where it does not. */
typedef struct place {
    const char *at, *end;
} place;

static bool is_next(const place *p, char c) {
    return p->at < p->end && *p->at == c;
}

static bool take(place *p, char c) {
    while (is_next(p, ' ') || is_next(p, '\n') || is_next(p, '\r') || is_next(p, '\t')) p->at++;
    if (!is_next(p, c)) return false;
    p->at++;
    return true;
}

/* The rest of a text whose quote was taken. */
static bool skip_text(place *p) {
    while (p->at < p->end && *p->at != '"') p->at += *p->at == '\\' ? 2 : 1;
    if (p->at >= p->end) return false;
    p->at++;
    return true;
}

/* Up to the comma or bracket behind a value. */
static bool skip_value(place *p) {
    int64_t depth = 0;
    while (p->at < p->end) {
        const char c = *p->at;
        if (depth == 0 && (c == ',' || c == '}')) return true;
        p->at++;
        if (c == '"' && !skip_text(p)) return false;
        if (c == '{' || c == '[') depth++;
        if (c == '}' || c == ']') depth--;
    }
    return false;
}

/* To the value of member `key` of the object that the text is. */
static bool find_value(place *p, const char *key) {
    const size_t n = strlen(key);
    if (!take(p, '{')) return false;
    do {
        if (!take(p, '"')) return false;
        const char *name = p->at;
        if (!skip_text(p)) return false;
        const bool same = (size_t)(p->at - 1 - name) == n && memcmp(name, key, n) == 0;
        if (!take(p, ':')) return false;
        if (same) return true;
        if (!skip_value(p)) return false;
    } while (take(p, ','));
    return false;
}

/* One number: what JSON calls an integer, without sign, and small. */
static bool take_number(int32_t *out, place *p) {
    int digits = 0;
    int32_t number = 0;
    while (p->at < p->end && *p->at >= '0' && *p->at <= '9') {
        if (digits == MOST_DIGITS || (digits == 1 && number == 0)) return false;    // 0 in front
        number = number * 10 + (*p->at++ - '0');
        digits++;
    }
    *out = number;
    return digits > 0;
}

/* The numbers of a list whose bracket was taken; p is at the bracket that closes it. */
static bool take_numbers(mn_json_ids *ids, place *p) {
    int64_t room = 0;
    do {
        if (ids->count == room) {
            room = room ? 2 * room : ROOM;
            int32_t *grown = realloc(ids->of, (size_t)room * sizeof *grown);
            if (!grown) return false;
            ids->of = grown;
        }
        while (is_next(p, ' ') || is_next(p, '\n')) p->at++;
        if (!take_number(&ids->of[ids->count], p)) return false;
        ids->count++;
    } while (take(p, ','));
    if (!take(p, ']')) return false;
    p->at--;
    return true;
}

/* The text without what is between two places. */
static char *without(const char *bytes, size_t size, const char *from, const char *to,
                     size_t *left) {
    const size_t head = (size_t)(from - bytes), tail = (size_t)(bytes + size - to);
    char *text = malloc(head + tail + 1);
    if (!text) return NULL;
    memcpy(text, bytes, head);
    memcpy(text + head, to, tail);
    *left = head + tail;
    return text;
}

mn_status mn_json_parse_ids(mn_json *root, const void *bytes, size_t size, const char *name,
                            const char *key) {
    place p = { .at = bytes, .end = (const char *)bytes + size };
    mn_json_ids ids = { 0 };
    size_t left = 0;
    char *text = NULL;
    if (size > 0 && find_value(&p, key) && take(&p, '[')) {
        const char *from = p.at;
        if (take_numbers(&ids, &p)) text = without(bytes, size, from, p.at, &left);
    }
    const bool parsed = text && mn_json_parse(root, text, left, name, MN_JSON_STANDARD) == MN_OK;
    free(text);
    if (parsed) {
        root->ids = ids;
        return MN_OK;
    }
    free(ids.of);
    return mn_json_parse(root, bytes, size, name, MN_JSON_STANDARD);
}
