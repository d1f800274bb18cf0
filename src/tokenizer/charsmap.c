/* charsmap.c - the normaliser "Precompiled": SentencePiece's table of replacements.
 *
 *   the table    base64 of: bytes of a double-array trie, the trie (32-bit units, little-endian),
 *                texts that end in a zero byte each; what the trie finds is a place among these
 *   the rule     a grapheme cluster of less than 6 bytes that begins with a key is replaced whole,
 *                by the text of the shortest such key; else each of its characters likewise */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"
#include "tokenizer/tokenizer_internal.h"

enum { SHORT_CLUSTER = 6 };

static int digit_of(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* The bytes of a text in base64; false for any other text. */
static bool decode_base64(uint8_t *out, size_t *size, const char *text) {
    uint32_t bits = 0;
    int n_bits = 0;
    *size = 0;
    for (; *text && *text != '='; text++) {
        const int digit = digit_of(*text);
        if (digit < 0) return false;
        bits = bits << 6 | (uint32_t)digit;
        n_bits += 6;
        if (n_bits < 8) continue;
        n_bits -= 8;
        out[(*size)++] = (uint8_t)(bits >> n_bits);
    }
    return text[strspn(text, "=")] == '\0';
}

/* Splits the table into units and texts. */
static bool take_table(mn_charsmap *map, const uint8_t *bytes, size_t size) {
    if (size < 4) return false;
    const size_t trie = (size_t)bytes[0] | (size_t)bytes[1] << 8 | (size_t)bytes[2] << 16 |
                        (size_t)bytes[3] << 24;
    if (trie % 4 != 0 || trie < 4 || trie > size - 4) return false;
    map->n_units = trie / 4;
    map->n_texts = size - 4 - trie;
    map->units = malloc(trie);
    map->texts = malloc(map->n_texts + 1);
    if (!map->units || !map->texts) return false;
    for (size_t i = 0; i < map->n_units; i++) {
        const uint8_t *b = bytes + 4 + 4 * i;
        map->units[i] = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 |
                        (uint32_t)b[3] << 24;
    }
    memcpy(map->texts, bytes + 4 + trie, map->n_texts);
    map->texts[map->n_texts] = '\0';
    return true;
}

mn_status mn_charsmap_read(mn_charsmap *out, const mn_json *at) {
    const char *text = NULL;
    const mn_json table = mn_json_member(at, "precompiled_charsmap");
    if (!mn_json_given(&table)) return MN_OK;    // nothing is replaced
    mn_status st = mn_json_read_text(&text, &table);
    if (st != MN_OK || !*text) return st;
    uint8_t *bytes = malloc(strlen(text) + 1);
    size_t size = 0;
    if (!bytes) return mn_fail(MN_ERR_MEMORY, "no memory for a table of characters");
    const bool good = decode_base64(bytes, &size, text) && take_table(out, bytes, size);
    free(bytes);
    if (!good) return mn_json_fail(&table, "is no table of SentencePiece in base64");
    return mn_pattern_compile(&out->cluster, "\\X", at);
}

void mn_charsmap_free(mn_charsmap *map) {
    free(map->units);
    free(map->texts);
    mn_pattern_free(&map->cluster);
}

static uint32_t offset_of(uint32_t unit) {
    return unit >> 10 << ((unit & (1u << 9)) >> 6);
}

/* What stands for the shortest key that `text` begins with; NULL: none does. */
static const char *find(const mn_charsmap *map, const char *text, size_t size) {
    uint32_t at = offset_of(map->units[0]);
    for (size_t i = 0; i < size && text[i]; i++) {
        const uint8_t byte = (uint8_t)text[i];
        at ^= byte;
        if (at >= map->n_units) return NULL;
        const uint32_t unit = map->units[at];
        if ((unit & (1u << 31 | 0xFF)) != byte) return NULL;
        at ^= offset_of(unit);
        if (at >= map->n_units) return NULL;
        if (!(unit >> 8 & 1)) continue;
        const uint32_t place = map->units[at] & ~(1u << 31);
        return place < map->n_texts ? map->texts + place : NULL;
    }
    return NULL;
}

static mn_status put_characters(mn_text *out, const mn_charsmap *map, const char *text,
                                size_t size) {
    mn_status st = MN_OK;
    for (size_t at = 0; at < size && st == MN_OK;) {
        uint32_t point;
        const size_t n = (size_t)mn_utf8_take(text + at, size - at, &point);
        const char *other = find(map, text + at, n);
        st = other ? mn_text_add(out, other, strlen(other)) : mn_text_add(out, text + at, n);
        at += n;
    }
    return st;
}

mn_status mn_charsmap_apply(mn_text *out, const mn_charsmap *map, const char *text, size_t size) {
    if (!map->units) return mn_text_add(out, text, size);
    mn_matcher matcher = { .pattern = &map->cluster };
    mn_status st = MN_OK;
    for (size_t at = 0; at < size && st == MN_OK;) {
        size_t start = at, end = size;
        bool found = false;
        st = mn_matcher_find(&matcher, text, size, at, &start, &end, &found);
        if (st != MN_OK) break;
        if (!found || start != at || end <= at) end = size;    // \X matches everywhere
        const char *other = end - at < SHORT_CLUSTER ? find(map, text + at, end - at) : NULL;
        st = other ? mn_text_add(out, other, strlen(other))
                   : put_characters(out, map, text + at, end - at);
        at = end;
    }
    mn_matcher_free(&matcher);
    return st;
}
