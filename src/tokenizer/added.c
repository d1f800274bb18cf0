/* added.c - tokens that are matched as text before anything else is done.
 *
 * At each place the longest token that fits is taken, from the left. A token may ask to stand alone
 * (no character of a word on either side) and may swallow the blanks beside it. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "tokenizer/tokenizer_internal.h"
#include "tokenizer/unicode/unicode.h"
#include "base/utf8.h"

static const mn_added *longest_at(const mn_added_set *set, const char *text, size_t size) {
    const uint8_t byte = (uint8_t)text[0];
    for (int64_t i = set->first[byte]; i < set->first[byte + 1]; i++) {
        const mn_span match = set->rows[i]->match;
        if (match.size <= size && memcmp(match.bytes, text, match.size) == 0) return set->rows[i];
    }
    return NULL;
}

/* Whether the code point at the start of `text` belongs to a word. */
static mn_status is_word(mn_matcher *word, const char *text, size_t size, bool *yes) {
    uint32_t point;
    *yes = false;
    if (size == 0) return MN_OK;
    const int length = mn_utf8_take(text, size, &point);
    if (point == MN_UTF8_BAD) return MN_OK;
    size_t start, end;
    return mn_matcher_find(word, text, (size_t)length, 0, &start, &end, yes);
}

/* The place of the code point that ends at `end`. */
static size_t step_back(const char *text, size_t end) {
    size_t at = end;
    while (at > 0 && end - at < 4) {
        at--;
        if (((uint8_t)text[at] & 0xC0) != 0x80) break;
    }
    return at;
}

static mn_status stands_alone(const mn_added_visit *w, size_t start, size_t end, bool *alone) {
    const char *text = w->text.bytes;
    const size_t before = step_back(text, start);
    bool left = false, right = false;
    mn_status st = is_word(w->word, text + before, start - before, &left);
    if (st == MN_OK) st = is_word(w->word, text + end, w->text.size - end, &right);
    *alone = !left && !right;
    return st;
}

static size_t blanks_before(mn_span text, size_t start, size_t done) {
    while (start > done) {
        uint32_t point;
        const size_t at = step_back(text.bytes, start);
        const int length = mn_utf8_take(text.bytes + at, start - at, &point);
        const bool blank = mn_unicode_is_space(point) && at + (size_t)length == start;
        if (!blank || at < done) break;
        start = at;
    }
    return start;
}

static size_t blanks_behind(mn_span text, size_t end) {
    while (end < text.size) {
        uint32_t point;
        const int length = mn_utf8_take(text.bytes + end, text.size - end, &point);
        if (!mn_unicode_is_space(point)) break;
        end += (size_t)length;
    }
    return end;
}

mn_status mn_added_next(mn_added_visit *w, mn_added_match *match, bool *found) {
    const mn_added_set *set = w->set;
    *found = false;
    while (w->at < w->text.size) {
        const uint8_t byte = (uint8_t)w->text.bytes[w->at];
        const mn_added *token = NULL;
        if (set->first[byte] < set->first[byte + 1]) {
            token = longest_at(set, w->text.bytes + w->at, w->text.size - w->at);
        }
        if (!token) {
            w->at++;
            continue;
        }
        size_t start = w->at, end = start + token->match.size;
        bool alone = true;
        w->at = end;
        if (token->special && !w->special) continue;
        if (token->single_word) {
            const mn_status st = stands_alone(w, start, end, &alone);
            if (st != MN_OK) return st;
        }
        if (!alone) continue;
        if (token->lstrip) start = blanks_before(w->text, start, w->done);
        if (token->rstrip) end = blanks_behind(w->text, end);
        *match = (mn_added_match){ start, end, token->id };
        *found = true;
        w->done = end;
        return MN_OK;
    }
    return MN_OK;
}

/* ---- at loading ------------------------------------------------------------------------------ */

static int by_byte_and_length(const void *a, const void *b) {
    const mn_added *x = *(const mn_added *const *)a, *y = *(const mn_added *const *)b;
    const uint8_t p = (uint8_t)x->match.bytes[0], q = (uint8_t)y->match.bytes[0];
    if (p != q) return p < q ? -1 : 1;
    if (x->match.size != y->match.size) return x->match.size > y->match.size ? -1 : 1;
    return x < y ? -1 : x > y;
}

static mn_status make_set(mn_added_set *set, const mn_added_tokens *tokens, bool normalized) {
    int64_t n = 0;
    set->rows = malloc(((size_t)tokens->count + 1) * sizeof *set->rows);
    if (!set->rows) return mn_fail(MN_ERR_MEMORY, "no memory for added tokens");
    for (int64_t i = 0; i < tokens->count; i++) {
        const mn_added *row = &tokens->rows[i];
        if (row->normalized == normalized && row->match.size > 0) set->rows[n++] = row;
    }
    qsort(set->rows, (size_t)n, sizeof *set->rows, by_byte_and_length);
    int64_t at = 0;
    for (int byte = 0; byte < 256; byte++) {
        set->first[byte] = at;
        while (at < n && (uint8_t)set->rows[at]->match.bytes[0] == byte) at++;
    }
    set->first[256] = n;
    return MN_OK;
}

mn_status mn_added_prepare(mn_added_tokens *tokens, const mn_normaliser *normaliser,
                           mn_vocab *vocab) {
    mn_text a = { 0 }, b = { 0 };
    mn_status st = MN_OK;
    bool alone = false;
    for (int64_t i = 0; i < tokens->count && st == MN_OK; i++) {
        mn_added *row = &tokens->rows[i];
        alone = alone || row->single_word;
        if (!row->normalized) continue;
        mn_span normal;
        st = mn_normalise(normaliser, &a, &b, row->match, &normal);
        if (st != MN_OK) break;
        row->match.bytes = mn_vocab_copy(vocab, normal.bytes, normal.size);
        row->match.size = normal.size;
        if (!row->match.bytes) st = mn_fail(MN_ERR_MEMORY, "no memory for added tokens");
    }
    mn_text_free(&a);
    mn_text_free(&b);
    if (st == MN_OK) st = make_set(&tokens->plain, tokens, false);
    if (st == MN_OK) st = make_set(&tokens->normalized, tokens, true);
    /* Here, as in Whitespace, the joiners belong to words; in patterns of the file they do not. */
    static const char word[] = "[\\w\\x{200c}\\x{200d}]";
    const mn_json nowhere = { .name = "single_word" };
    return st == MN_OK && alone ? mn_pattern_compile(&tokens->word, word, &nowhere) : st;
}

void mn_added_free(mn_added_tokens *tokens) {
    free(tokens->rows);
    free(tokens->plain.rows);
    free(tokens->normalized.rows);
    mn_pattern_free(&tokens->word);
    *tokens = (mn_added_tokens){ 0 };
}
