/* utf8.h - one code point at a time, strict: no surrogates, no overlong forms, nothing above
 * U+10FFFF. */
#ifndef MN_BASE_UTF8_H
#define MN_BASE_UTF8_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MN_UTF8_BAD UINT32_MAX
#define MN_UTF8_REPLACEMENT "\xEF\xBF\xBD"    // U+FFFD

/* Reads the code point at the start of `text` (size > 0) and returns its length in bytes. Where
 * there is none, `*point` is MN_UTF8_BAD and the length that of the longest start of a code point,
 * at least 1: what one U+FFFD stands for. */
static inline int mn_utf8_take(const char *text, size_t size, uint32_t *point) {
    const uint8_t *s = (const uint8_t *)text;
    *point = s[0];
    if (s[0] < 0x80) return 1;
    *point = MN_UTF8_BAD;
    if (s[0] < 0xC2 || s[0] > 0xF4) return 1;
    const int length = s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4;
    const uint8_t low = s[0] == 0xE0 ? 0xA0 : s[0] == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = s[0] == 0xED ? 0x9F : s[0] == 0xF4 ? 0x8F : 0xBF;
    if (size < 2 || s[1] < low || s[1] > high) return 1;
    uint32_t value = s[0] & (0x7Fu >> length);
    value = value << 6 | (s[1] & 0x3Fu);
    for (int i = 2; i < length; i++) {
        if ((size_t)i >= size || (s[i] & 0xC0) != 0x80) return i;
        value = value << 6 | (s[i] & 0x3Fu);
    }
    *point = value;
    return length;
}

/* Writes a code point and returns its length, 1 to 4. */
static inline int mn_utf8_put(char out[4], uint32_t point) {
    if (point < 0x80) {
        out[0] = (char)point;
        return 1;
    }
    const int length = point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    for (int i = length - 1; i > 0; i--, point >>= 6) out[i] = (char)(0x80 | (point & 0x3F));
    out[0] = (char)(point | (0xF00u >> length));
    return length;
}

/* How many bytes at the start of `text` are whole code points. */
static inline size_t mn_utf8_valid(const char *text, size_t size) {
    size_t at = 0;
    while (at < size) {
        uint64_t word;
        if (size - at >= 8 && (memcpy(&word, text + at, 8), (word & 0x8080808080808080u) == 0)) {
            at += 8;
            continue;
        }
        uint32_t point;
        const int length = mn_utf8_take(text + at, size - at, &point);
        if (point == MN_UTF8_BAD) break;
        at += (size_t)length;
    }
    return at;
}

#endif
