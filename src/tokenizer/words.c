/* words.c - counts pieces of text: the first half of training. */
#include "tokenizer/words.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"

enum { PIECES_PER_REPORT = 1 << 16 };

/* What counting one text needs. */
typedef struct counting {
    mn_words *words;
    const mn_tokenizer_training *how;
    mn_splitter splitter;
    mn_normaliser normaliser;
    mn_added_tokens special;
    mn_split_visit split;
    mn_text a, b;
    int64_t n_pieces;
} counting;

void mn_words_free(mn_words *words) {
    free(words->rows);
    free(words->slots);
    free(words->hashes);
    mn_vocab_free(&words->memory);
    *words = (mn_words){ 0 };
}

static uint64_t hash_piece(const char *text, size_t size) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ (uint8_t)text[i]) * 0x100000001B3u;
    return hash ^ hash >> 29;
}

/* Twice the slots, and rows for half of them. */
static mn_status grow(mn_words *words) {
    const size_t slots = words->slots ? 2 * (words->mask + 1) : 1 << 12;
    int64_t *fresh = malloc(slots * sizeof *fresh);
    uint64_t *hashes = malloc(slots * sizeof *hashes);
    mn_word *rows = realloc(words->rows, slots / 2 * sizeof *rows);
    if (rows) words->rows = rows;
    if (!fresh || !hashes || !rows) {
        free(fresh);
        free(hashes);
        return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " distinct pieces", words->count);
    }
    for (size_t i = 0; i < slots; i++) fresh[i] = -1;
    for (size_t i = 0; words->slots && i <= words->mask; i++) {
        if (words->slots[i] < 0) continue;
        size_t at = words->hashes[i] & (slots - 1);
        while (fresh[at] >= 0) at = (at + 1) & (slots - 1);
        fresh[at] = words->slots[i];
        hashes[at] = words->hashes[i];
    }
    free(words->slots);
    free(words->hashes);
    words->slots = fresh;
    words->hashes = hashes;
    words->mask = slots - 1;
    words->capacity = (int64_t)(slots / 2);
    return MN_OK;
}

static mn_status count_piece(void *context, const char *piece, size_t size) {
    counting *c = context;
    mn_words *words = c->words;
    if (++c->n_pieces % PIECES_PER_REPORT == 0 && c->how->progress &&
        !c->how->progress(c->how->context, 0, c->how->vocab_size)) {
        return mn_fail(MN_ERR_ARGUMENT, "training was stopped");
    }
    if (words->count == words->capacity) {
        const mn_status st = grow(words);
        if (st != MN_OK) return st;
    }
    const uint64_t hash = hash_piece(piece, size);
    size_t at = hash & words->mask;
    for (; words->slots[at] >= 0; at = (at + 1) & words->mask) {
        mn_word *word = &words->rows[words->slots[at]];
        if (words->hashes[at] != hash || word->text.size != size) continue;
        if (memcmp(word->text.bytes, piece, size) != 0) continue;
        word->count++;
        return MN_OK;
    }
    const char *copy = mn_vocab_copy(&words->memory, piece, size);
    if (!copy) return mn_fail(MN_ERR_MEMORY, "no memory for a piece of %zu bytes", size);
    words->rows[words->count] = (mn_word){ { copy, size }, 1 };
    words->slots[at] = words->count++;
    words->hashes[at] = hash;
    return MN_OK;
}

/* Text without special tokens: its stretches of valid UTF-8. */
static mn_status count_stretches(counting *c, mn_span text) {
    mn_status st = MN_OK;
    for (size_t at = 0; at < text.size && st == MN_OK;) {
        const size_t valid = mn_utf8_valid(text.bytes + at, text.size - at);
        mn_span normal = { text.bytes + at, valid };
        if (valid > 0) st = mn_normalise(&c->normaliser, &c->a, &c->b, normal, &normal);
        if (valid > 0 && st == MN_OK) st = mn_split(&c->split, normal, at == 0);
        at += valid > 0 ? valid : 1;
    }
    return st;
}

static mn_status count_text(counting *c, mn_span text) {
    mn_matcher word = { .pattern = &c->special.word };
    mn_added_visit walk = { .tokens = &c->special, .set = &c->special.plain, .word = &word,
                           .special = true, .text = text };
    mn_status st = MN_OK;
    if (c->special.count == 0) return count_stretches(c, text);
    for (bool found = true; found && st == MN_OK;) {
        mn_added_match match;
        const size_t done = walk.done;
        st = mn_added_next(&walk, &match, &found);
        if (st != MN_OK) break;
        const size_t end = found ? match.start : text.size;
        st = count_stretches(c, (mn_span){ text.bytes + done, end - done });
    }
    return st;
}

static mn_status set_special(counting *c) {
    int64_t n = 0;
    while (c->how->special && c->how->special[n]) n++;
    c->special.rows = calloc((size_t)n + 1, sizeof *c->special.rows);
    if (!c->special.rows) return mn_fail(MN_ERR_MEMORY, "no memory for special tokens");
    for (int64_t i = 0; i < n; i++) {
        const char *text = c->how->special[i];
        c->special.rows[i] = (mn_added){ .id = (int32_t)i, .match = { text, strlen(text) },
                                         .special = true };
    }
    c->special.count = n;
    return mn_added_prepare(&c->special, &c->normaliser, &c->words->memory);
}

mn_status mn_words_count(mn_words *words, const mn_tokenizer_training *how,
                         const mn_training_pattern *pattern, mn_span text) {
    counting c = { .words = words, .how = how };
    mn_status st = mn_training_splitter(&c.splitter, &c.normaliser, pattern);
    if (st == MN_OK) st = set_special(&c);
    if (st == MN_OK) st = mn_split_visit_open(&c.split, &c.splitter);
    c.split.use = count_piece;
    c.split.context = &c;
    if (st == MN_OK && text.size > 0) st = count_text(&c, text);
    mn_split_visit_close(&c.split);
    mn_added_free(&c.special);
    mn_splitter_free(&c.splitter);
    mn_normaliser_free(&c.normaliser);
    mn_text_free(&c.a);
    mn_text_free(&c.b);
    return st;
}
