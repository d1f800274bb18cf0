/* letters.c - what Python's methods of str ask about a code point, and its other case. */
#include <string.h>

#include "base/utf8.h"
#include "base/util.h"
#include "template/state.h"
#include "tokenizer/unicode/unicode.h"

typedef struct run {
    uint32_t first, last;
} run;

#define KIND(first, last) { first, last },
#define CASE(first, last, step, distance) { first, last, step, distance },
#define MANY(point, a, b, c) { point, { a, b, c } },

static const run unprintable[] = {
#define KIND_PRINTABLE
#include "template/unicode_kinds.def"
#undef KIND_PRINTABLE
};

static const run alphabetic[] = {
#define KIND_ALPHABETIC
#include "template/unicode_kinds.def"
#undef KIND_ALPHABETIC
};

static const run numeric[] = {
#define KIND_NUMERIC
#include "template/unicode_kinds.def"
#undef KIND_NUMERIC
};

static const run digit[] = {
#define KIND_DIGIT
#include "template/unicode_kinds.def"
#undef KIND_DIGIT
};

static const run decimal[] = {
#define KIND_DECIMAL
#include "template/unicode_kinds.def"
#undef KIND_DECIMAL
};

static const run lower[] = {
#define KIND_LOWER
#include "template/unicode_kinds.def"
#undef KIND_LOWER
};

static const run upper[] = {
#define KIND_UPPER
#include "template/unicode_kinds.def"
#undef KIND_UPPER
};

typedef struct case_run {
    uint32_t first, last, step;
    int32_t distance;
} case_run;

static const case_run to_upper[] = {
#define CASE_OF_UPPER
#include "template/unicode_kinds.def"
#undef CASE_OF_UPPER
};

static const case_run to_title[] = {
#define CASE_OF_TITLE
#include "template/unicode_kinds.def"
#undef CASE_OF_TITLE
};

typedef struct many {
    uint32_t point, to[3];
} many;

static const many many_upper[] = {
#define MANY_OF_UPPER
#include "template/unicode_kinds.def"
#undef MANY_OF_UPPER
};

static const many many_title[] = {
#define MANY_OF_TITLE
#include "template/unicode_kinds.def"
#undef MANY_OF_TITLE
};

static bool within(const run *runs, size_t n, uint32_t point) {
    size_t low = 0, high = n;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (runs[middle].last < point) low = middle + 1;
        else high = middle;
    }
    return low < n && runs[low].first <= point;
}

bool is_printable(uint32_t point) {
    return !within(unprintable, MN_COUNTOF(unprintable), point);
}

bool is_alphabetic(uint32_t point) {
    return within(alphabetic, MN_COUNTOF(alphabetic), point);
}

bool is_numeric(uint32_t point) {
    return within(numeric, MN_COUNTOF(numeric), point);
}

bool is_digit(uint32_t point) {
    return within(digit, MN_COUNTOF(digit), point);
}

bool is_decimal(uint32_t point) {
    return within(decimal, MN_COUNTOF(decimal), point);
}

bool is_lower(uint32_t point) {
    return within(lower, MN_COUNTOF(lower), point);
}

bool is_upper(uint32_t point) {
    return within(upper, MN_COUNTOF(upper), point);
}

bool is_word(uint32_t point) {
    return point == '_' || is_alphabetic(point) || is_numeric(point);
}

bool is_blank(uint32_t point) {
    return mn_unicode_is_space(point) || (point >= 0x1C && point <= 0x1F);
}

static void put_other(maker *m, uint32_t point, const case_run *runs, size_t n, const many *others,
                      size_t n_others) {
    for (size_t i = 0; point >= 0x80 && i < n_others; i++) {
        if (others[i].point != point) continue;
        for (int k = 0; k < 3 && others[i].to[k]; k++) put_point(m, others[i].to[k]);
        return;
    }
    size_t low = 0, high = n;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (runs[middle].last < point) low = middle + 1;
        else high = middle;
    }
    if (low < n && runs[low].first <= point && (point - runs[low].first) % runs[low].step == 0) {
        point = (uint32_t)((int32_t)point + runs[low].distance);
    }
    put_point(m, point);
}

/* Whether a letter stands before `at`, or after it, with only marks that join between. */
static bool letter_beside(const char *text, size_t size, size_t at, bool before) {
    while (before ? at > 0 : at < size) {
        size_t from = at;
        if (before) {
            from = at - 1;
            while (from > 0 && ((uint8_t)text[from] & 0xC0) == 0x80) from--;
        }
        uint32_t point;
        const int n = mn_utf8_take(text + from, size - from, &point);
        const bool joins = point == '\'' || point == '.' || point == ':' || point == 0xAD ||
                           point == 0x2019 || point == 0xB7 || (point >= 0x300 && point < 0x370);
        if (!joins) return is_lower(point) || is_upper(point);
        at = before ? from : at + (size_t)n;
    }
    return false;
}

static void put_lower(maker *m, const char *text, size_t size, size_t at, int n, uint32_t point) {
    if (point == 0x3A3) {       // final sigma
        const bool last = letter_beside(text, size, at, true) &&
                          !letter_beside(text, size, at + (size_t)n, false);
        put_point(m, last ? 0x3C2 : 0x3C3);
    } else if (point == 0x130) {
        put_point(m, 'i');
        put_point(m, 0x307);
    } else {
        mn_text out = { 0 };
        if (mn_unicode_lower(&out, text + at, (size_t)n) != MN_OK) m->failed = true;
        else put(m, out.bytes, out.size);
        mn_text_free(&out);
    }
}

void put_case(maker *m, const char *text, size_t size, letter_case to) {
    for (size_t at = 0; at < size;) {
        uint32_t point;
        const int n = mn_utf8_take(text + at, size - at, &point);
        if (point < 0x80 && to == CASE_LOWER) {
            put_point(m, point >= 'A' && point <= 'Z' ? point + 32 : point);
        } else if (to == CASE_LOWER) {
            put_lower(m, text, size, at, n, point);
        } else if (to == CASE_UPPER) {
            put_other(m, point, to_upper, MN_COUNTOF(to_upper), many_upper, MN_COUNTOF(many_upper));
        } else {
            put_other(m, point, to_title, MN_COUNTOF(to_title), many_title, MN_COUNTOF(many_title));
        }
        at += (size_t)n;
    }
}
