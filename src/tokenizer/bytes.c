/* bytes.c - byte-level vocabularies spell each byte as a printable character: itself for
 * the printable ones of Latin-1, else U+0100 and on, in the order of the bytes. */
#include "tokenizer/tokenizer_internal.h"
#include "base/utf8.h"

enum { FIRST_STAND_IN = 0x100, N_STAND_INS = 68 };

static bool stands_for_itself(uint32_t byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) ||
           (byte >= 0xAE && byte <= 0xFF);
}

/* The bytes without a character are 0 to 0x20, 0x7F to 0xA0, and 0xAD. */
uint32_t mn_byte_char(uint8_t byte) {
    if (stands_for_itself(byte)) return byte;
    if (byte <= 0x20) return FIRST_STAND_IN + byte;
    if (byte <= 0xA0) return FIRST_STAND_IN + 33u + (byte - 0x7Fu);
    return FIRST_STAND_IN + N_STAND_INS - 1;
}

int mn_char_byte(uint32_t point) {
    if (point < FIRST_STAND_IN) return stands_for_itself(point) ? (int)point : -1;
    const uint32_t at = point - FIRST_STAND_IN;
    if (at < 33) return (int)at;
    if (at < N_STAND_INS - 1) return (int)(0x7F + (at - 33));
    return at == N_STAND_INS - 1 ? 0xAD : -1;
}

mn_status mn_bytes_spell(mn_text *out, const char *text, size_t size) {
    mn_status st = MN_OK;
    for (size_t i = 0; i < size && st == MN_OK; i++) {
        char bytes[4];
        const int n = mn_utf8_put(bytes, mn_byte_char((uint8_t)text[i]));
        st = mn_text_add(out, bytes, (size_t)n);
    }
    return st;
}

mn_status mn_bytes_unspell(mn_text *out, bool *all, const char *text, size_t size) {
    const size_t before = out->size;
    mn_status st = MN_OK;
    *all = true;
    for (size_t at = 0; at < size && st == MN_OK && *all;) {
        uint32_t point;
        at += (size_t)mn_utf8_take(text + at, size - at, &point);
        const int byte = mn_char_byte(point);
        const char one = (char)byte;
        *all = byte >= 0;
        if (*all) st = mn_text_add(out, &one, 1);
    }
    if (!*all) out->size = before;
    return st;
}
