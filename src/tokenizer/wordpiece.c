/* wordpiece.c - words to tokens: the longest token that a word begins with, then the longest of
 * what follows, spelt with a prefix such as "##". A word with a part that no token fits is
 * unknown. */
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"
#include "tokenizer/tokenizer_internal.h"

void mn_wordpiece_prepare(mn_wordpiece *w, const mn_vocab *vocab) {
    w->longest = 0;
    for (int64_t id = 0; id < vocab->size; id++) {
        const mn_token *token = &vocab->tokens[id];
        if (token->text.size > w->longest) w->longest = token->text.size;
    }
}

static bool is_too_long(const mn_wordpiece *w, const char *word, size_t size) {
    int64_t n = 0;
    for (size_t at = 0; at < size; n++) {
        uint32_t point;
        at += (size_t)mn_utf8_take(word + at, size - at, &point);
    }
    return n > w->most_characters;
}

/* The longest token at `start`, whose end becomes *end; -1: none. */
static int32_t longest_at(const mn_wordpiece *w, const mn_vocab *vocab, mn_text *text,
                          const char *word, size_t size, size_t start, size_t *end) {
    const size_t prefix = start > 0 ? w->prefix.size : 0;
    size_t most = size - start;
    if (most > w->longest) most = w->longest;
    text->size = 0;
    if (mn_text_add(text, w->prefix.bytes, prefix) != MN_OK) return -1;
    if (mn_text_add(text, word + start, most) != MN_OK) return -1;
    for (size_t n = most; n > 0; n--) {
        const bool inside = start + n < size && ((uint8_t)word[start + n] & 0xC0) == 0x80;
        if (inside) continue;
        const int32_t id = mn_id_map_find(&vocab->by_text, vocab->tokens, text->bytes, prefix + n);
        if (id < 0 || !(vocab->tokens[id].flags & MN_TOKEN_MODEL)) continue;
        *end = start + n;
        return id;
    }
    return -1;
}

mn_status mn_wordpiece_encode(const mn_wordpiece *w, const mn_vocab *vocab, mn_word_room *room,
                              const char *word, size_t size, mn_token_list *out) {
    const int64_t before = out->count;
    mn_status st = MN_OK;
    bool known = !is_too_long(w, word, size);
    for (size_t at = 0; at < size && known && st == MN_OK;) {
        const int32_t id = longest_at(w, vocab, &room->text, word, size, at, &at);
        known = id >= 0;
        if (known) st = mn_token_list_add(out, id);
    }
    if (known || st != MN_OK) return st;
    out->count = before;
    return mn_token_list_add(out, w->unk_id);
}
