/* unicode.c - normal forms (Unicode Standard Annex 15) and lower case.
 *
 * decompose: each code point becomes its full decomposition;
 * order:     runs of combining marks are sorted by class, equal classes stay in order;
 * compose:   a mark joins the last starter if both have a composite and nothing between blocks it.
 *
 * Only stretches that hold something the form may change are taken apart. ASCII characters are
 * starters that never join what is in front of them, so stretches end there. */
#include "tokenizer/unicode/unicode.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "base/utf8.h"

typedef struct class_run {
    uint32_t first, last;
    uint8_t class;
} class_run;

typedef struct decomposition {
    uint32_t point;
    const char *text;
} decomposition;

typedef struct pair {
    uint32_t first, second, both;
} pair;

typedef struct lower_run {
    uint32_t first, last, step;
    int32_t distance;
} lower_run;

static const class_run classes[] = {
#define CLASS(first, last, class) { first, last, class },
#include "tokenizer/unicode/unicode_class.def"
#undef CLASS
};

static const decomposition canonical[] = {
#define CANONICAL(point, text) { point, text },
#include "tokenizer/unicode/unicode_canonical.def"
#undef CANONICAL
};

static const decomposition compatible[] = {
#define COMPATIBLE(point, text) { point, text },
#include "tokenizer/unicode/unicode_compatible.def"
#undef COMPATIBLE
};

static const pair pairs[] = {
#define PAIR(first, second, both) { first, second, both },
#include "tokenizer/unicode/unicode_pair.def"
#undef PAIR
};

static const lower_run lowers[] = {
#define LOWER(first, last, step, distance) { first, last, step, distance },
#include "tokenizer/unicode/unicode_lower.def"
#undef LOWER
};

/* Hangul syllables: S = S0 + (L * 21 + V) * 28 + T */
enum { S0 = 0xAC00, L0 = 0x1100, V0 = 0x1161, T0 = 0x11A7, LS = 19, VS = 21, TS = 28 };
enum { SYLLABLES = LS * VS * TS };

/* A stretch of text being normalised. */
typedef struct stretch {
    uint32_t *points;
    uint8_t *class;
    int64_t count, capacity;
} stretch;

static uint8_t class_of(uint32_t point) {
    if (point < classes[0].first) return 0;
    size_t low = 0, high = MN_COUNTOF(classes);
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        if (classes[middle].first <= point) low = middle;
        else high = middle;
    }
    return point <= classes[low].last ? classes[low].class : 0;
}

static const char *find_decomposition(const decomposition *rows, size_t count, uint32_t point) {
    size_t low = 0, high = count;
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        if (rows[middle].point <= point) low = middle;
        else high = middle;
    }
    return rows[low].point == point ? rows[low].text : NULL;
}

/* The composite of two code points, 0 if there is none. */
static uint32_t compose_pair(uint32_t a, uint32_t b) {
    if (a - L0 < LS && b - V0 < VS) return S0 + ((a - L0) * VS + (b - V0)) * TS;
    if (a - S0 < SYLLABLES && (a - S0) % TS == 0 && b - T0 - 1 < TS - 1) return a + (b - T0);
    size_t low = 0, high = MN_COUNTOF(pairs);
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        const pair *p = &pairs[middle];
        if (p->first < a || (p->first == a && p->second <= b)) low = middle;
        else high = middle;
    }
    return pairs[low].first == a && pairs[low].second == b ? pairs[low].both : 0;
}

static mn_status push(stretch *s, uint32_t point) {
    if (s->count == s->capacity) {
        const int64_t capacity = s->capacity > 0 ? 2 * s->capacity : 64;
        uint32_t *points = realloc(s->points, (size_t)capacity * sizeof *points);
        if (points) s->points = points;
        uint8_t *class = realloc(s->class, (size_t)capacity);
        if (class) s->class = class;
        if (!points || !class) {
            return mn_fail(MN_ERR_MEMORY, "no memory to normalise %lld characters",
                           (long long)capacity);
        }
        s->capacity = capacity;
    }
    s->points[s->count] = point;
    s->class[s->count++] = class_of(point);
    return MN_OK;
}

static mn_status push_decomposed(stretch *s, uint32_t point, bool compatibly) {
    if (point - S0 < SYLLABLES) {
        const uint32_t at = point - S0, tail = at % TS;
        mn_status st = push(s, L0 + at / (VS * TS));
        if (st == MN_OK) st = push(s, V0 + at / TS % VS);
        if (st == MN_OK && tail > 0) st = push(s, T0 + tail);
        return st;
    }
    const char *text = NULL;
    if (compatibly) text = find_decomposition(compatible, MN_COUNTOF(compatible), point);
    if (!text) text = find_decomposition(canonical, MN_COUNTOF(canonical), point);
    if (!text) return push(s, point);
    mn_status st = MN_OK;
    for (size_t left = strlen(text); left > 0 && st == MN_OK;) {
        uint32_t part;
        const int length = mn_utf8_take(text, left, &part);
        st = push(s, part);
        text += length;
        left -= (size_t)length;
    }
    return st;
}

/* Sorts one run of marks by class. Runs are a few marks long, except in text made to be slow, which
 * is sorted class by class. */
static mn_status order_run(uint32_t *points, uint8_t *class, int64_t count) {
    if (count > 32) {
        uint32_t *sorted = malloc((size_t)count * sizeof *sorted);
        if (!sorted) return mn_fail(MN_ERR_MEMORY, "no memory for %lld marks", (long long)count);
        int64_t n = 0;
        for (int k = 1; k < 256; k++) {
            for (int64_t i = 0; i < count; i++) {
                if (class[i] == k) sorted[n++] = points[i];
            }
        }
        memcpy(points, sorted, (size_t)count * sizeof *sorted);
        for (int64_t i = 0; i < count; i++) class[i] = class_of(points[i]);
        free(sorted);
        return MN_OK;
    }
    for (int64_t i = 1; i < count; i++) {
        const uint32_t point = points[i];
        const uint8_t k = class[i];
        int64_t j = i;
        for (; j > 0 && class[j - 1] > k; j--) {
            points[j] = points[j - 1];
            class[j] = class[j - 1];
        }
        points[j] = point;
        class[j] = k;
    }
    return MN_OK;
}

static mn_status order(stretch *s) {
    mn_status st = MN_OK;
    for (int64_t i = 0; i < s->count && st == MN_OK;) {
        int64_t end = i;
        while (end < s->count && s->class[end] > 0) end++;
        if (end - i > 1) st = order_run(s->points + i, s->class + i, end - i);
        i = end + 1;
    }
    return st;
}

static void compose(stretch *s) {
    int64_t starter = -1, n = 0;
    for (int64_t i = 0; i < s->count; i++) {
        const uint8_t class = s->class[i];
        /* Blocked: something between starter and this one has class 0 or one not below. */
        const bool adjacent = starter == n - 1;
        const bool open = starter >= 0 && (adjacent || (s->class[n - 1] < class &&
                                                        s->class[n - 1] > 0));
        const uint32_t both = open ? compose_pair(s->points[starter], s->points[i]) : 0;
        if (both > 0) {
            s->points[starter] = both;
            continue;
        }
        if (class == 0) starter = n;
        s->points[n] = s->points[i];
        s->class[n++] = class;
    }
    s->count = n;
}

static mn_status normalise_stretch(mn_text *out, stretch *s, const char *text, size_t size,
                                   mn_normal_form form) {
    mn_status st = MN_OK;
    s->count = 0;
    for (size_t at = 0; at < size && st == MN_OK;) {
        uint32_t point;
        at += (size_t)mn_utf8_take(text + at, size - at, &point);
        st = push_decomposed(s, point, form == MN_NFKC || form == MN_NFKD);
    }
    if (st == MN_OK) st = order(s);
    if (st == MN_OK && (form == MN_NFC || form == MN_NFKC)) compose(s);
    for (int64_t i = 0; i < s->count && st == MN_OK; i++) {
        char bytes[4];
        st = mn_text_add(out, bytes, (size_t)mn_utf8_put(bytes, s->points[i]));
    }
    return st;
}

mn_status mn_unicode_normalise(mn_text *out, const char *text, size_t size, mn_normal_form form) {
    /* Lead bytes of the first code points a form may change: U+0300, U+00C0, U+0080. */
    static const uint8_t lead[] = { [MN_NFC] = 0xCC, [MN_NFD] = 0xC3, [MN_NFKC] = 0xC2,
                                    [MN_NFKD] = 0xC2 };
    stretch s = { 0 };
    mn_status st = MN_OK;
    for (size_t done = 0, at = 0; done < size && st == MN_OK;) {
        while (at < size && (uint8_t)text[at] < lead[form]) at++;
        size_t from = at;
        if (at < size && from > done) {            // what is in front may join
            do from--;
            while (from > done && ((uint8_t)text[from] & 0xC0) == 0x80);
        }
        st = mn_text_add(out, text + done, from - done);
        while (at < size && (uint8_t)text[at] >= 0x80) at++;
        if (st == MN_OK && at > from) st = normalise_stretch(out, &s, text + from, at - from, form);
        done = at;
    }
    free(s.points);
    free(s.class);
    return st;
}

static uint32_t lower(uint32_t point) {
    if (point < lowers[0].first) return point;
    size_t low = 0, high = MN_COUNTOF(lowers);
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        if (lowers[middle].first <= point) low = middle;
        else high = middle;
    }
    const lower_run *run = &lowers[low];
    const bool inside = point <= run->last && (point - run->first) % run->step == 0;
    return inside ? (uint32_t)((int64_t)point + run->distance) : point;
}

mn_status mn_unicode_lower(mn_text *out, const char *text, size_t size) {
    mn_status st = MN_OK;
    for (size_t at = 0; at < size && st == MN_OK;) {
        uint32_t point;
        at += (size_t)mn_utf8_take(text + at, size - at, &point);
        if (point == 0x130) {                      // the one that becomes two: i and a dot above
            st = mn_text_add(out, "i\xCC\x87", 3);
            continue;
        }
        char bytes[4];
        st = mn_text_add(out, bytes, (size_t)mn_utf8_put(bytes, lower(point)));
    }
    return st;
}

bool mn_unicode_is_space(uint32_t c) {
    if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13);
    return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
           c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}
