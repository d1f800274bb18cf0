/* unigram.c - pieces to tokens by the most likely segmentation (SentencePiece's unigram model).
 *
 *   best(end) = max over tokens t that end there of best(end - |t|) + log p(t)
 *
 * A character that no token of one character covers costs what the least likely token does and 10
 * more; neighbours of that kind are one unknown token, or their bytes. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"
#include "base/util.h"
#include "tokenizer/tokenizer_internal.h"

static const double unknown_penalty = 10.0;

/* ---- tokens by prefix ------------------------------------------------------------------------ */

static int compare(const mn_token *a, const mn_token *b) {
    const size_t n = mn_min(a->text.size, b->text.size);
    const int order = n ? memcmp(a->text.bytes, b->text.bytes, n) : 0;
    return order ? order : (a->text.size > b->text.size) - (a->text.size < b->text.size);
}

/* Merge sort: qsort would need the vocabulary in a variable that threads share. */
static void sort(int32_t *ids, int32_t *spare, int64_t n, const mn_vocab *vocab) {
    if (n < 2) return;
    const int64_t half = n / 2;
    sort(ids, spare, half, vocab);
    sort(ids + half, spare, n - half, vocab);
    memcpy(spare, ids, (size_t)half * sizeof *ids);
    for (int64_t i = 0, j = half, k = 0; i < half; k++) {
        const bool left = j == n || compare(&vocab->tokens[spare[i]], &vocab->tokens[ids[j]]) <= 0;
        ids[k] = left ? spare[i++] : ids[j++];
    }
}

mn_status mn_unigram_prepare(mn_unigram *u, const mn_vocab *vocab) {
    u->order = malloc((size_t)(vocab->size + 1) * sizeof *u->order);
    int32_t *spare = malloc((size_t)(vocab->size + 1) * sizeof *spare);
    if (!u->order || !spare) {
        free(spare);
        return mn_fail(MN_ERR_MEMORY, "no memory for a vocabulary");
    }
    u->least = INFINITY;
    for (int64_t id = 0; id < vocab->size; id++) {
        const mn_token *token = &vocab->tokens[id];
        if (!(token->flags & MN_TOKEN_MODEL)) continue;
        u->least = fmin(u->least, u->scores[id]);
        if (token->text.size > 0) u->order[u->count++] = (int32_t)id;
    }
    sort(u->order, spare, u->count, vocab);
    free(spare);
    for (int byte = 0; byte < 256; byte++) {
        static const char digits[] = "0123456789ABCDEF";
        const char name[] = { '<', '0', 'x', digits[byte / 16], digits[byte % 16], '>' };
        u->bytes[byte] = mn_id_map_find(&vocab->by_text, vocab->tokens, name, sizeof name);
    }
    return MN_OK;
}

void mn_unigram_free(mn_unigram *u) {
    free(u->scores);
    free(u->order);
    *u = (mn_unigram){ 0 };
}

/* The byte of the token at `at` in the order, -1 where it has ended. */
static int byte_at(const mn_unigram *u, const mn_vocab *vocab, int64_t at, size_t depth) {
    const mn_span text = vocab->tokens[u->order[at]].text;
    return depth < text.size ? (uint8_t)text.bytes[depth] : -1;
}

/* Of the tokens [low, high), which share `depth` bytes, the first whose next byte is `byte` or
 * larger. */
static int64_t first_with(const mn_unigram *u, const mn_vocab *vocab, int64_t low, int64_t high,
                          size_t depth, int byte) {
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (byte_at(u, vocab, middle, depth) < byte) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* ---- segmentation ---------------------------------------------------------------------------- */

static mn_status make_room(mn_word_room *room, size_t size) {
    if (room->capacity > size) return MN_OK;
    const size_t capacity = 2 * size + 64;
    mn_best *best = capacity < SIZE_MAX / sizeof *best ? realloc(room->best, capacity *
                                                                 sizeof *best) : NULL;
    if (!best) return mn_fail(MN_ERR_MEMORY, "no memory for a piece of %zu bytes", size);
    room->best = best;
    room->capacity = capacity;
    return MN_OK;
}

static void offer(mn_best *to, double score, size_t start, int32_t id) {
    if (to->id >= -1 && score <= to->score) return;
    *to = (mn_best){ .score = score, .start = start, .id = id };
}

enum { NOT_REACHED = -2 };

/* The tokens that begin at `start`. */
static void extend(const mn_unigram *u, const mn_vocab *vocab, mn_best *best, const char *piece,
                   size_t size, size_t start) {
    uint32_t point;
    const size_t one = (size_t)mn_utf8_take(piece + start, size - start, &point);
    const double here = best[start].score;
    int64_t low = 0, high = u->count;
    bool single = false;
    for (size_t depth = 0; start + depth < size; depth++) {
        const int byte = (uint8_t)piece[start + depth];
        low = first_with(u, vocab, low, high, depth, byte);
        high = first_with(u, vocab, low, high, depth, byte + 1);
        if (low == high) break;
        if (vocab->tokens[u->order[low]].text.size != depth + 1) continue;
        const int32_t id = u->order[low];
        offer(&best[start + depth + 1], here + u->scores[id], start, id);
        single |= depth + 1 == one;
    }
    if (!single) offer(&best[start + one], here + (u->least - unknown_penalty), start, -1);
}

/* What the model has no token for: the token that is spelt so after all, bytes, or unknown. */
static mn_status put_unknown(const mn_unigram *u, const mn_vocab *vocab, const char *text,
                             size_t size, mn_token_list *out) {
    const int32_t known = mn_id_map_find(&vocab->by_text, vocab->tokens, text, size);
    if (known >= 0 && (vocab->tokens[known].flags & MN_TOKEN_MODEL)) {
        return mn_token_list_add(out, known);
    }
    bool bytes = u->fallback;
    for (size_t i = 0; i < size && bytes; i++) bytes = u->bytes[(uint8_t)text[i]] >= 0;
    mn_status st = MN_OK;
    for (size_t i = 0; i < size && bytes && st == MN_OK; i++) {
        st = mn_token_list_add(out, u->bytes[(uint8_t)text[i]]);
    }
    if (bytes) return st;
    if (u->unk_id >= 0) return mn_token_list_add(out, u->unk_id);
    return mn_fail(MN_ERR_ARGUMENT, "\"%.*s\" has no token, and the tokenizer has no unk_id",
                   (int)mn_min(size, (size_t)32), text);
}

mn_status mn_unigram_encode(const mn_unigram *u, const mn_vocab *vocab, mn_word_room *room,
                            const char *piece, size_t size, mn_token_list *out) {
    mn_status st = make_room(room, size);
    if (st != MN_OK || size == 0) return st;
    mn_best *best = room->best;
    for (size_t i = 0; i <= size; i++) best[i] = (mn_best){ .id = NOT_REACHED };
    best[0].id = -1;
    for (size_t at = 0; at < size;) {
        uint32_t point;
        extend(u, vocab, best, piece, size, at);
        at += (size_t)mn_utf8_take(piece + at, size - at, &point);
    }
    /* from the end: `next` of a start is where its token ends */
    for (size_t end = size; end > 0; end = best[end].start) best[best[end].start].next = end;
    for (size_t at = 0; at < size && st == MN_OK;) {
        size_t end = best[at].next;
        const int32_t id = best[end].id;
        if (id >= 0 && id != u->unk_id) {
            st = mn_token_list_add(out, id);
            at = end;
            continue;
        }
        while (end < size) {
            const size_t next = best[end].next;
            if (best[next].id >= 0 && best[next].id != u->unk_id) break;
            end = next;
        }
        st = put_unknown(u, vocab, piece + at, end - at, out);
        at = end;
    }
    return st;
}
