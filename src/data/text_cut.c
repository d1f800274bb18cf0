/* text_cut.c - where a text may be cut without changing its tokens. */
#define _GNU_SOURCE    // memmem
#include "data/text_cut.h"

#include <string.h>

#include "base/util.h"

enum { MAX_TRIALS = 32 };    // places tried of each kind before giving a stretch of text up

static bool is_blank(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static bool is_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* Inside a UTF-8 character */
static bool continues(char c) {
    return ((unsigned char)c & 0xC0) == 0x80;
}

/* Whether the separator lies across `at`: begins in front of it and ends behind it. */
static bool across(const char *text, int64_t size, int64_t at, const char *separator) {
    const int64_t n = (int64_t)strlen(separator);
    for (int64_t i = mn_max(at - n + 1, 0); i < at && i + n <= size; i++) {
        if (memcmp(text + i, separator, (size_t)n) == 0) return true;
    }
    return false;
}

/* The end of the first separator in [from, to) that no other one overlaps from the left. Readers
 * that look for separators from left to right, wherever they begin, all find that one. */
static int64_t find_border(const char *text, int64_t size, int64_t from, int64_t to,
                           const char *separator) {
    const int64_t n = (int64_t)strlen(separator);
    int64_t at = mn_max(from - n, 0);
    while (at + n < to) {
        const char *found = memmem(text + at, (size_t)(mn_min(size, to) - at), separator,
                                   (size_t)n);
        if (!found) return -1;
        at = found - text;
        if (at + n >= from && at + n < to && !across(text, size, at, separator)) return at + n;
        at++;
    }
    return -1;
}

static int64_t find_line(const char *text, int64_t from, int64_t to) {
    const int64_t first = mn_max(from - 1, 0);
    const char *found = first < to - 1 ? memchr(text + first, '\n', (size_t)(to - 1 - first))
                                       : NULL;
    return found ? found - text + 1 : -1;
}

/* One or two parts, the same tokens? A text that cannot be encoded fails later, with a place. */
static bool same_tokens(const char *text, int64_t size, int64_t at, const mn_tokenizer *tokenizer) {
    int64_t from = mn_max(at - MN_CUT_CONTEXT, 0), to = mn_min(at + MN_CUT_CONTEXT, size);
    while (from < at && from > 0 && continues(text[from])) from++;
    while (to > at && to < size && continues(text[to])) to--;
    mn_token_list whole = { 0 }, parts = { 0 };
    const size_t left = (size_t)(at - from), right = (size_t)(to - at);
    const bool encoded =
        mn_tokenizer_encode(tokenizer, text + from, left + right, false, &whole) == MN_OK &&
        mn_tokenizer_encode(tokenizer, text + from, left, false, &parts) == MN_OK &&
        mn_tokenizer_encode(tokenizer, text + at, right, false, &parts) == MN_OK;
    const bool same = !encoded || (whole.count == parts.count &&
                                   memcmp(whole.ids, parts.ids,
                                          (size_t)whole.count * sizeof *whole.ids) == 0);
    mn_token_list_free(&whole);
    mn_token_list_free(&parts);
    return same;
}

typedef bool (*place_fn)(const char *text, int64_t at);

static bool after_line_end(const char *text, int64_t at) {
    return text[at - 1] == '\n' && !is_blank(text[at - 2]) && !is_blank(text[at]) &&
           !continues(text[at]);
}

static bool before_word(const char *text, int64_t at) {
    return text[at] == ' ' && is_letter(text[at - 1]) && is_letter(text[at + 1]);
}

static bool before_character(const char *text, int64_t at) {
    return !continues(text[at]);
}

static int64_t find_inside(const char *text, int64_t size, int64_t from, int64_t to,
                           place_fn place, const mn_cut_rule *rule) {
    int trials = 0;
    for (int64_t at = mn_max(from, 2); at < mn_min(to, size - 1) && trials < MAX_TRIALS; at++) {
        if (!place(text, at)) continue;
        if (rule->separator && across(text, size, at, rule->separator)) continue;
        if (place == before_character || same_tokens(text, size, at, rule->tokenizer)) return at;
        trials++;
    }
    return -1;
}

int64_t mn_cut_find(bool *border, const char *text, int64_t size, int64_t from, int64_t to,
                    const mn_cut_rule *rule) {
    *border = true;
    if (rule->lines) return find_line(text, from, to);
    int64_t at = -1;
    if (rule->separator) at = find_border(text, size, from, to, rule->separator);
    if (at >= 0 || rule->borders_only) return at;
    *border = false;
    const char *kind = rule->tokenizer ? mn_tokenizer_kind(rule->tokenizer) : "bytes";
    if (strcmp(kind, "bytes") == 0 || strcmp(kind, "chars") == 0) {
        return find_inside(text, size, from, to, before_character, rule);
    }
    at = find_inside(text, size, from, to, after_line_end, rule);
    return at >= 0 ? at : find_inside(text, size, from, to, before_word, rule);
}
