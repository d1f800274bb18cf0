/* numbers.c - int() and float() of a text, under every locale. */
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "template/state.h"

/* Blanks at both ends go. */
static void trim(const char **text, size_t *size) {
    uint32_t point;
    while (*size) {
        const size_t n = (size_t)mn_utf8_take(*text, *size, &point);
        if (!is_blank(point)) break;
        *text += n;
        *size -= n;
    }
    while (*size) {
        size_t at = *size - 1;
        while (at > 0 && ((uint8_t)(*text)[at] & 0xC0) == 0x80) at--;
        mn_utf8_take(*text + at, *size - at, &point);
        if (!is_blank(point)) break;
        *size = at;
    }
}

static int digit_of(char c) {
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'z' ? (c | 32) - 87 : 99;
}

bool parse_whole(int64_t *out, const char *text, size_t size, int base) {
    trim(&text, &size);
    const bool minus = size && *text == '-';
    if (size && (*text == '-' || *text == '+')) text++, size--;
    const char letter = size > 2 && *text == '0' ? text[1] | 32 : 0;
    const int spelt = letter == 'b' ? 2 : letter == 'o' ? 8 : letter == 'x' ? 16 : 0;
    bool prefix = spelt && (base == 0 || base == spelt);
    if (prefix) text += 2, size -= 2;
    if (base == 0 && !prefix && size > 1 && *text == '0') {     // 0 and 00 only
        for (size_t i = 0; i < size; i++) {
            if (text[i] != '0' && text[i] != '_') return false;
        }
    }
    if (base == 0) base = prefix ? spelt : 10;
    int64_t sum = 0;
    bool digit = prefix;        // an underscore may follow
    if (!size || text[size - 1] == '_') return false;
    for (size_t i = 0; i < size; i++) {
        if (text[i] == '_') {
            if (!digit) return false;
            digit = false;
            continue;
        }
        const int d = digit_of(text[i]);
        if (d >= base || __builtin_mul_overflow(sum, (int64_t)base, &sum) ||
            __builtin_sub_overflow(sum, (int64_t)d, &sum)) return false;
        digit = true;
    }
    if (!minus && sum == INT64_MIN) return false;
    *out = minus ? sum : -sum;
    return true;
}

static bool word(const char *text, size_t size, const char *is) {
    if (size != strlen(is)) return false;
    for (size_t i = 0; i < size; i++) {
        if ((text[i] | 32) != is[i]) return false;
    }
    return true;
}

bool parse_real(double *out, const char *text, size_t size) {
    char plain[420];
    size_t n = 0, at = 0, digits = 0;
    trim(&text, &size);
    if (size && (*text == '-' || *text == '+')) plain[n++] = text[at++];
    if (word(text + at, size - at, "inf") || word(text + at, size - at, "infinity")) {
        *out = n && plain[0] == '-' ? -INFINITY : INFINITY;
        return true;
    }
    if (word(text + at, size - at, "nan")) {
        *out = NAN;
        return true;
    }
    bool point = false, power = false;
    for (; at < size; at++) {
        const char c = text[at], before = at ? text[at - 1] : 0;
        const bool next_digit = at + 1 < size && text[at + 1] >= '0' && text[at + 1] <= '9';
        if (c == '_') {
            if (before < '0' || before > '9' || !next_digit) return false;
            continue;
        }
        if (n + 16 > sizeof plain) return false;
        if (c >= '0' && c <= '9') {
            digits++;
            plain[n++] = c;
        } else if (c == '.' && !point && !power) {
            const char *mark = localeconv()->decimal_point;
            const size_t width = strlen(mark) < 8 ? strlen(mark) : 1;
            memcpy(plain + n, mark, width);
            n += width;
            point = true;
        } else if ((c | 32) == 'e' && digits && !power) {
            power = true;
            digits = 0;
            plain[n++] = 'e';
            if (at + 1 < size && (text[at + 1] == '-' ||
                                  text[at + 1] == '+')) plain[n++] = text[++at];
        } else {
            return false;
        }
    }
    if (!digits) return false;
    plain[n] = 0;
    *out = strtod(plain, NULL);
    return true;
}
