/* bpe.c - byte-pair merges over one piece of text.
 *
 * A piece starts as one symbol per character (or byte). As long as two neighbours have a merge, the
 * one of lowest rank is done, leftmost first. Three things make this fast, none changes a result:
 *
 *   whole   a piece that is itself a token, and that the merges are known to lead to, is looked up;
 *   borders long pieces are cut between symbols that no merge can join;
 *   heap    what is long even so takes its merges from a heap, O(n log n). */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "tokenizer/tokenizer_internal.h"
#include "base/utf8.h"

enum { SHORT = 32, NO_RANK = INT32_MAX };

/* A symbol of a long run: neighbours by index, -1 at the ends; `rank` and `merged` are those of the
 * pair that starts here; id -1: merged into its left neighbour. */
typedef struct mn_bpe_node {
    int32_t id, rank, merged, left, right;
} mn_bpe_node;

void mn_bpe_room_free(mn_bpe_room *room) {
    free(room->symbols);
    free(room->nodes);
    free(room->heap);
    *room = (mn_bpe_room){ 0 };
}

/* ---- symbols --------------------------------------------------------------------------------- */

static mn_status add_tokens(mn_token_list *out, const int32_t *ids, int64_t count) {
    if (count <= out->capacity - out->count) {
        if (count > 0) memcpy(out->ids + out->count, ids, (size_t)count * sizeof *ids);
        out->count += count;
        return MN_OK;
    }
    mn_status st = MN_OK;
    for (int64_t i = 0; i < count && st == MN_OK; i++) st = mn_token_list_add(out, ids[i]);
    return st;
}

static int32_t char_id(const mn_bpe *bpe, const mn_vocab *vocab, const char *text, int length,
                       uint32_t point) {
    if (point < MN_LOW_POINTS) return bpe->low_id[point];
    return mn_id_map_find(&vocab->by_piece, vocab->tokens, text, (size_t)length);
}

/* Byte tokens for a character outside the vocabulary; false if one of them is missing. */
static bool fall_back(const mn_bpe *bpe, int32_t *out, const char *text, int length) {
    if (!bpe->byte_fallback) return false;
    for (int i = 0; i < length; i++) {
        out[i] = bpe->fallback_id[(uint8_t)text[i]];
        if (out[i] < 0) return false;
    }
    return true;
}

static mn_status outside(mn_span text, const char *at, uint32_t point) {
    const size_t place = (size_t)((uintptr_t)at - (uintptr_t)text.bytes);
    if (text.bytes && place < text.size) {
        return mn_fail(MN_ERR_ARGUMENT, "character U+%04" PRIX32 " at byte %zu is not in the "
                       "vocabulary", point, place);
    }
    return mn_fail(MN_ERR_ARGUMENT, "character U+%04" PRIX32 " is not in the vocabulary", point);
}

/* The symbols of a piece of characters: at most one per byte. Unknown ones become the unknown
 * token, a run of them one if they are fused; without such a token they are dropped. */
static mn_status char_symbols(const mn_bpe *bpe, const mn_vocab *vocab, mn_bpe_room *room,
                              int64_t *count, const char *text, size_t size) {
    int32_t *out = room->symbols;
    int64_t n = 0;
    bool unknown = false;
    for (size_t at = 0; at < size;) {
        uint32_t point;
        const int length = mn_utf8_take(text + at, size - at, &point);
        const int32_t id = char_id(bpe, vocab, text + at, length, point);
        if (id >= 0) {
            if (unknown) out[n++] = bpe->unk_id;
            unknown = false;
            out[n++] = id;
        } else if (fall_back(bpe, out + n, text + at, length)) {
            n += length;
        } else if (bpe->unk_id >= 0) {
            if (unknown && !bpe->fuse_unk) out[n++] = bpe->unk_id;
            unknown = true;
        } else if (bpe->strict) {
            return outside(room->text, text + at, point);
        }
        at += (size_t)length;
    }
    if (unknown) out[n++] = bpe->unk_id;
    *count = n;
    return MN_OK;
}

static void byte_symbols(const mn_bpe *bpe, int32_t *out, int64_t *count, const char *text,
                         size_t size) {
    int64_t n = 0;
    bool unknown = false;
    for (size_t i = 0; i < size; i++) {
        const int32_t id = bpe->byte_id[(uint8_t)text[i]];
        if (id < 0) {
            if (bpe->unk_id >= 0 && unknown && !bpe->fuse_unk) out[n++] = bpe->unk_id;
            unknown = bpe->unk_id >= 0;
            continue;
        }
        if (unknown) out[n++] = bpe->unk_id;
        unknown = false;
        out[n++] = id;
    }
    if (unknown) out[n++] = bpe->unk_id;
    *count = n;
}

/* ---- short runs: look for the lowest rank each time ------------------------------------------ */

static void rank_of(const mn_bpe *bpe, int32_t *rank, int32_t *merged, int32_t a, int32_t b) {
    const struct mn_pair_slot *slot = mn_pair_map_find(&bpe->merges, mn_pair_key(a, b));
    *rank = slot ? slot->rank : NO_RANK;
    *merged = slot ? slot->id : -1;
}

/* Merges `count` <= SHORT symbols in place; how many are left. */
static int64_t merge_short(const mn_bpe *bpe, int32_t *ids, int64_t count) {
    int32_t rank[SHORT], merged[SHORT];
    for (int64_t i = 0; i + 1 < count; i++) {
        rank_of(bpe, &rank[i], &merged[i], ids[i], ids[i + 1]);
    }
    while (count > 1) {
        int64_t best = 0;
        for (int64_t i = 1; i + 1 < count; i++) {
            if (rank[i] < rank[best]) best = i;
        }
        if (rank[best] == NO_RANK) break;
        ids[best] = merged[best];
        count--;
        for (int64_t i = best + 1; i < count; i++) ids[i] = ids[i + 1];
        for (int64_t i = best; i + 1 < count; i++) {
            rank[i] = rank[i + 1];
            merged[i] = merged[i + 1];
        }
        if (best + 1 < count) rank_of(bpe, &rank[best], &merged[best], ids[best], ids[best + 1]);
        if (best > 0) rank_of(bpe, &rank[best - 1], &merged[best - 1], ids[best - 1], ids[best]);
    }
    return count;
}

/* ---- long runs: a heap of pairs, rank << 32 | place ------------------------------------------ */

static void sift_down(uint64_t *heap, int64_t count, int64_t at) {
    const uint64_t value = heap[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= value) break;
        heap[at] = heap[child];
    }
    heap[at] = value;
}

static void heap_push(mn_bpe_room *room, uint64_t value) {
    int64_t at = room->n_heap++;
    for (; at > 0 && room->heap[(at - 1) / 2] > value; at = (at - 1) / 2) {
        room->heap[at] = room->heap[(at - 1) / 2];
    }
    room->heap[at] = value;
}

static uint64_t heap_pop(mn_bpe_room *room) {
    const uint64_t top = room->heap[0];
    room->heap[0] = room->heap[--room->n_heap];
    if (room->n_heap > 0) sift_down(room->heap, room->n_heap, 0);
    return top;
}

/* Room for a run: each merge takes one entry out and puts two in, so 2 n + n entries are enough. */
static mn_status make_run_room(mn_bpe_room *room, int64_t count) {
    if (count <= room->n_nodes) return MN_OK;
    const int64_t heap_capacity = 3 * count;
    mn_bpe_node *nodes = realloc(room->nodes, (size_t)count * sizeof *nodes);
    if (nodes) room->nodes = nodes;
    uint64_t *heap = realloc(room->heap, (size_t)heap_capacity * sizeof *heap);
    if (heap) room->heap = heap;
    if (!nodes || !heap) {
        return mn_fail(MN_ERR_MEMORY, "no memory to merge %" PRId64 " characters", count);
    }
    room->n_nodes = count;
    room->heap_capacity = heap_capacity;
    return MN_OK;
}

/* Looks up the pair that starts at node `at` and queues it. */
static void queue_pair(const mn_bpe *bpe, mn_bpe_room *room, int32_t at) {
    mn_bpe_node *node = &room->nodes[at];
    node->rank = NO_RANK;
    if (node->right < 0) return;
    rank_of(bpe, &node->rank, &node->merged, node->id, room->nodes[node->right].id);
    if (node->rank != NO_RANK) heap_push(room, (uint64_t)node->rank << 32 | (uint32_t)at);
}

static mn_status merge_long(const mn_bpe *bpe, mn_bpe_room *room, int32_t *ids, int64_t *count) {
    const mn_status st = make_run_room(room, *count);
    if (st != MN_OK) return st;
    mn_bpe_node *nodes = room->nodes;
    room->n_heap = 0;
    for (int32_t i = 0; i < *count; i++) {
        nodes[i] = (mn_bpe_node){ ids[i], NO_RANK, -1, i - 1, i + 1 < *count ? i + 1 : -1 };
    }
    for (int32_t i = 0; i < *count; i++) queue_pair(bpe, room, i);
    while (room->n_heap > 0) {
        const uint64_t top = heap_pop(room);
        const int32_t at = (int32_t)(uint32_t)top;
        mn_bpe_node *node = &nodes[at];
        if (node->id < 0 || (uint64_t)node->rank != top >> 32) continue;    // merged meanwhile
        mn_bpe_node *gone = &nodes[node->right];
        node->id = node->merged;
        node->right = gone->right;
        gone->id = -1;
        if (node->right >= 0) nodes[node->right].left = at;
        queue_pair(bpe, room, at);
        if (node->left >= 0) queue_pair(bpe, room, node->left);
    }
    int64_t n = 0;
    for (int32_t at = 0; at >= 0; at = nodes[at].right) ids[n++] = nodes[at].id;
    *count = n;
    return MN_OK;
}

/* ---- pieces ---------------------------------------------------------------------------------- */

static mn_status merge_run(const mn_bpe *bpe, mn_bpe_room *room, int32_t *ids, int64_t count,
                           mn_token_list *out) {
    mn_status st = MN_OK;
    if (count <= SHORT) count = merge_short(bpe, ids, count);
    else st = merge_long(bpe, room, ids, &count);
    return st == MN_OK ? add_tokens(out, ids, count) : st;
}

/* Cuts symbols where nothing can join them, and merges what is between. */
static mn_status merge_all(const mn_bpe *bpe, mn_bpe_room *room, int64_t count,
                           mn_token_list *out) {
    int32_t *ids = room->symbols;
    if (bpe->n_merges == 0) return add_tokens(out, ids, count);
    if (count <= SHORT) return merge_run(bpe, room, ids, count, out);
    mn_status st = MN_OK;
    for (int64_t from = 0, at = 1; at <= count && st == MN_OK; at++) {
        if (at < count && mn_pair_map_find(&bpe->borders, mn_pair_key(ids[at - 1], ids[at]))) {
            continue;
        }
        st = merge_run(bpe, room, ids + from, at - from, out);
        from = at;
    }
    return st;
}

static mn_status make_symbol_room(mn_bpe_room *room, size_t size) {
    if (size >= INT32_MAX / 4) {
        return mn_fail(MN_ERR_ARGUMENT, "a piece of %zu bytes is too long to merge; encode the "
                       "text in parts", size);
    }
    if ((int64_t)size <= room->capacity) return MN_OK;
    const size_t capacity = size < 256 ? 256 : size;
    int32_t *symbols = realloc(room->symbols, capacity * sizeof *symbols);
    if (!symbols) return mn_fail(MN_ERR_MEMORY, "no memory for %zu symbols", capacity);
    room->symbols = symbols;
    room->capacity = (int64_t)capacity;
    return MN_OK;
}

/* The merges without the shortcut for whole pieces. */
static mn_status encode_by_merges(const mn_bpe *bpe, const mn_vocab *vocab, mn_bpe_room *room,
                                  const char *piece, size_t size, mn_token_list *out) {
    int64_t count = 0;
    mn_status st = make_symbol_room(room, size);
    if (st != MN_OK) return st;
    if (bpe->byte_pieces) byte_symbols(bpe, room->symbols, &count, piece, size);
    else st = char_symbols(bpe, vocab, room, &count, piece, size);
    return st == MN_OK ? merge_all(bpe, room, count, out) : st;
}

mn_status mn_bpe_encode(const mn_bpe *bpe, const mn_vocab *vocab, mn_bpe_room *room,
                        const char *piece, size_t size, mn_token_list *out) {
    if (size == 0) return MN_OK;
    if (size <= bpe->longest) {
        const int32_t id = mn_id_map_find(&vocab->by_piece, vocab->tokens, piece, size);
        if (id >= 0 && (bpe->ignore_merges || (vocab->tokens[id].flags & MN_TOKEN_WHOLE))) {
            return mn_token_list_add(out, id);
        }
    }
    return encode_by_merges(bpe, vocab, room, piece, size, out);
}

/* ---- what is derived at loading -------------------------------------------------------------- */

static int32_t find_model(const mn_vocab *vocab, const char *piece, size_t size) {
    return mn_id_map_find(&vocab->by_piece, vocab->tokens, piece, size);
}

static void fill_tables(mn_bpe *bpe, const mn_vocab *vocab) {
    for (int i = 0; i < 256; i++) {
        const char byte = (char)i;
        static const char hex[] = "0123456789ABCDEF";
        const char code[] = { '<', '0', 'x', hex[i >> 4], hex[i & 15], '>' };
        bpe->byte_id[i] = bpe->byte_pieces ? find_model(vocab, &byte, 1) : -1;
        const int32_t id = mn_id_map_find(&vocab->by_text, vocab->tokens, code, sizeof code);
        const bool known = id >= 0 && (vocab->tokens[id].flags & MN_TOKEN_MODEL);
        bpe->fallback_id[i] = known ? id : -1;
    }
    for (uint32_t point = 0; point < MN_LOW_POINTS; point++) {
        char bytes[4];
        const int length = mn_utf8_put(bytes, point);
        bpe->low_id[point] = find_model(vocab, bytes, (size_t)length);
    }
    for (int64_t id = 0; id < vocab->size; id++) {
        const mn_token *token = &vocab->tokens[id];
        const bool model = token->piece.bytes && (token->flags & MN_TOKEN_MODEL);
        if (model && token->piece.size > bpe->longest) bpe->longest = token->piece.size;
    }
}

/* The symbol at one end of a token's text, -1 if it is outside the vocabulary. */
static int32_t end_symbol(const mn_bpe *bpe, const mn_vocab *vocab, int32_t id, bool last) {
    const mn_span piece = vocab->tokens[id].piece;
    if (!piece.bytes || piece.size == 0) return -1;
    if (bpe->byte_pieces) return bpe->byte_id[(uint8_t)piece.bytes[last ? piece.size - 1 : 0]];
    size_t at = last ? piece.size - 1 : 0;
    while (at > 0 && ((uint8_t)piece.bytes[at] & 0xC0) == 0x80) at--;
    uint32_t point;
    const int length = mn_utf8_take(piece.bytes + at, piece.size - at, &point);
    return char_id(bpe, vocab, piece.bytes + at, length, point);
}

/* Whether a token of several characters can stand in a piece before any merge. */
static bool is_symbol(const mn_bpe *bpe, const mn_vocab *vocab, int32_t id) {
    const mn_span text = vocab->tokens[id].text;
    return id == bpe->unk_id || (bpe->byte_fallback && text.size == 6 && text.bytes[0] == '<');
}

/* The symbols that can lie at one end of a token, at most two. */
static int end_symbols(const mn_bpe *bpe, const mn_vocab *vocab, int32_t id, bool last,
                       int32_t out[2]) {
    int n = 0;
    const int32_t end = end_symbol(bpe, vocab, id, last);
    if (end >= 0) out[n++] = end;
    if (is_symbol(bpe, vocab, id)) out[n++] = id;
    return n;
}

/* A merge joins (a, b) between the last symbol of a and the first of b. Calls that only count them
 * pass no map. */
static int64_t each_border(const mn_bpe *bpe, const mn_vocab *vocab, mn_pair_map *borders) {
    int64_t count = 0;
    for (size_t i = 0; i <= bpe->merges.mask; i++) {
        const uint64_t key = bpe->merges.slots[i].key;
        if (key == UINT64_MAX) continue;
        int32_t lefts[2], rights[2];
        const int n_lefts = end_symbols(bpe, vocab, (int32_t)(key >> 32), true, lefts);
        const int n_rights = end_symbols(bpe, vocab, (int32_t)(uint32_t)key, false, rights);
        count += (int64_t)n_lefts * n_rights;
        for (int n = 0; borders && n < n_lefts * n_rights; n++) {
            const int32_t left = lefts[n / n_rights], right = rights[n % n_rights];
            mn_pair_map_put(borders, mn_pair_key(left, right), 0, 0);
        }
    }
    return count;
}

static mn_status fill_borders(mn_bpe *bpe, const mn_vocab *vocab) {
    enum { BYTE_PAIRS = 257 * 257 };               // of 256 bytes and the unknown token
    const int64_t count = each_border(bpe, vocab, NULL);
    const int64_t room = bpe->byte_pieces && count > BYTE_PAIRS ? BYTE_PAIRS : count;
    const mn_status st = mn_pair_map_make(&bpe->borders, room);
    if (st == MN_OK) each_border(bpe, vocab, &bpe->borders);
    return st;
}

mn_status mn_bpe_prepare(mn_bpe *bpe, mn_vocab *vocab) {
    fill_tables(bpe, vocab);
    mn_status st = fill_borders(bpe, vocab);
    mn_bpe_room room = { 0 };
    mn_token_list list = { 0 };
    for (int64_t id = 0; id < vocab->size && st == MN_OK; id++) {
        mn_token *token = &vocab->tokens[id];
        const bool model = token->piece.bytes && (token->flags & MN_TOKEN_MODEL);
        if (!model || token->piece.size == 0 || token->piece.size > 4 * SHORT) continue;
        list.count = 0;
        st = encode_by_merges(bpe, vocab, &room, token->piece.bytes, token->piece.size, &list);
        if (list.count == 1 && list.ids[0] == id) token->flags |= MN_TOKEN_WHOLE;
    }
    mn_token_list_free(&list);
    mn_bpe_room_free(&room);
    return st;
}
