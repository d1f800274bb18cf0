/* bert.c - see bert.h. */
#include "tokenizer/unicode/bert.h"

#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "base/util.h"
#include "tokenizer/unicode/unicode.h"

typedef struct range {
    uint32_t first, last;
} range;

#define ROW(a, b) { a, b },
static const range dropped[] = {
#define DROPPED ROW
#include "tokenizer/unicode/unicode_bert.def"
#undef DROPPED
};
static const range marks[] = {
#define MARK ROW
#include "tokenizer/unicode/unicode_bert.def"
#undef MARK
};
static const range accents[] = {
#define ACCENT ROW
#include "tokenizer/unicode/unicode_bert.def"
#undef ACCENT
};
static const range punctuation[] = {
#define PUNCTUATION ROW
#include "tokenizer/unicode/unicode_bert.def"
#undef PUNCTUATION
};
#undef ROW

/* As BERT has them: U+2B820 to U+2B91F are missing there. */
static const range chinese[] = {
    { 0x3400, 0x4DBF },   { 0x4E00, 0x9FFF },   { 0xF900, 0xFAFF },   { 0x20000, 0x2A6DF },
    { 0x2A700, 0x2B73F }, { 0x2B740, 0x2B81F }, { 0x2B920, 0x2CEAF }, { 0x2F800, 0x2FA1F },
};

static bool is_in(const range *ranges, size_t n, uint32_t point) {
    size_t low = 0;
    while (n > 0) {
        const size_t half = n / 2;
        if (ranges[low + half].last < point) {
            low += half + 1;
            n -= half + 1;
        } else {
            if (ranges[low + half].first <= point) return true;
            n = half;
        }
    }
    return false;
}

#define IS_IN(ranges, point) is_in(ranges, MN_COUNTOF(ranges), point)

/* Code point by code point: cleaned, and blanks put around Chinese characters. */
static mn_status clean(mn_text *out, const char *text, size_t size, const mn_bert_rules *rules) {
    mn_status st = MN_OK;
    for (size_t at = 0; at < size && st == MN_OK;) {
        uint32_t point;
        const size_t length = (size_t)mn_utf8_take(text + at, size - at, &point);
        const bool alone = rules->chinese && IS_IN(chinese, point);
        if (rules->clean && IS_IN(dropped, point)) {
            at += length;
            continue;
        }
        if (alone) st = mn_text_add(out, " ", 1);
        if (rules->clean && mn_unicode_is_space(point)) {
            if (st == MN_OK) st = mn_text_add(out, " ", 1);
        } else if (st == MN_OK) {
            st = mn_text_add(out, text + at, length);
        }
        if (alone && st == MN_OK) st = mn_text_add(out, " ", 1);
        at += length;
    }
    return st;
}

static mn_status without(mn_text *out, const char *text, size_t size, const range *ranges,
                         size_t n) {
    mn_status st = MN_OK;
    for (size_t at = 0; at < size && st == MN_OK;) {
        uint32_t point;
        const size_t length = (size_t)mn_utf8_take(text + at, size - at, &point);
        if (!is_in(ranges, n, point)) st = mn_text_add(out, text + at, length);
        at += length;
    }
    return st;
}

mn_status mn_strip_accents(mn_text *out, const char *text, size_t size) {
    return without(out, text, size, accents, MN_COUNTOF(accents));
}

mn_status mn_bert_normalise(mn_text *out, mn_text *between, const char *text, size_t size,
                            const mn_bert_rules *rules) {
    mn_text part = { 0 };
    between->size = 0;
    mn_status st = mn_text_reserve(between, 1);
    if (st == MN_OK) st = clean(between, text, size, rules);
    if (st == MN_OK && rules->accents) {
        st = mn_text_reserve(&part, 1);
        if (st == MN_OK) st = mn_unicode_normalise(&part, between->bytes, between->size, MN_NFD);
        between->size = 0;
        if (st == MN_OK) st = without(between, part.bytes, part.size, marks, MN_COUNTOF(marks));
    }
    if (st == MN_OK) {
        st = rules->lower ? mn_unicode_lower(out, between->bytes, between->size)
                          : mn_text_add(out, between->bytes, between->size);
    }
    mn_text_free(&part);
    return st;
}

mn_status mn_bert_punctuation(mn_text *out) {
    mn_status st = mn_text_add(out, "[", 1);
    for (size_t i = 0; i < MN_COUNTOF(punctuation) && st == MN_OK; i++) {
        char row[48];
        const int n = snprintf(row, sizeof row, "\\x{%x}-\\x{%x}", (unsigned)punctuation[i].first,
                               (unsigned)punctuation[i].last);
        st = mn_text_add(out, row, (size_t)n);
    }
    return st == MN_OK ? mn_text_add(out, "]", 2) : st;
}
