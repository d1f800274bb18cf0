/* vocab.c - the tables behind a vocabulary: texts to ids, pairs of ids to merges.
 *
 * Both are open addressing with linear probing at most half full, filled once and then only read,
 * so threads share them. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "tokenizer/tokenizer_internal.h"

enum { BLOCK_BYTES = 1 << 16 };

/* Texts are cut from blocks that are freed together. */
typedef struct mn_block {
    struct mn_block *next;
    size_t used, size;
    char bytes[];
} mn_block;

const char *mn_vocab_copy(mn_vocab *vocab, const void *bytes, size_t size) {
    mn_block *block = vocab->blocks;
    if (!block || block->size - block->used <= size) {
        if (size > SIZE_MAX / 2) return NULL;
        const size_t room = size >= BLOCK_BYTES ? size + 1 : BLOCK_BYTES;
        block = malloc(sizeof *block + room);
        if (!block) return NULL;
        *block = (mn_block){ .next = vocab->blocks, .size = room };
        vocab->blocks = block;
    }
    char *copy = block->bytes + block->used;
    if (size > 0) memcpy(copy, bytes, size);
    copy[size] = 0;
    block->used += size + 1;
    return copy;
}

void mn_vocab_free(mn_vocab *vocab) {
    for (mn_block *block = vocab->blocks; block;) {
        mn_block *next = block->next;
        free(block);
        block = next;
    }
    mn_id_map_free(&vocab->by_text);
    mn_id_map_free(&vocab->by_piece);
    free(vocab->tokens);
    *vocab = (mn_vocab){ 0 };
}

/* The smallest power of two that is at least twice `count`. */
static size_t slots_for(int64_t count) {
    size_t slots = 16;
    while (slots < 2 * (size_t)count) slots *= 2;
    return slots;
}

static uint32_t hash_text(const char *text, size_t size) {
    uint64_t h = 0x9E3779B97F4A7C15u ^ size;
    for (; size >= 8; text += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, text, 8);
        h = (h ^ word) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
    }
    uint64_t word = 0;
    for (size_t i = 0; i < size; i++) word |= (uint64_t)(uint8_t)text[i] << (8 * i);
    h = (h ^ word) * 0xD6E8FEB86659FD93u;
    h ^= h >> 32;
    h *= 0xD6E8FEB86659FD93u;
    return (uint32_t)(h >> 32);
}

static mn_span key_of(const mn_id_map *map, const mn_token *token) {
    return map->by_piece ? token->piece : token->text;
}

mn_status mn_id_map_make(mn_id_map *map, int64_t count, bool by_piece) {
    const size_t slots = slots_for(count);
    *map = (mn_id_map){ .ids = malloc(slots * sizeof *map->ids),
                        .hashes = malloc(slots * sizeof *map->hashes),
                        .mask = slots - 1,
                        .by_piece = by_piece };
    if (!map->ids || !map->hashes) {
        mn_id_map_free(map);
        return mn_fail(MN_ERR_MEMORY, "no memory for a vocabulary of %lld tokens",
                       (long long)count);
    }
    for (size_t i = 0; i < slots; i++) map->ids[i] = -1;
    return MN_OK;
}

void mn_id_map_free(mn_id_map *map) {
    free(map->ids);
    free(map->hashes);
    *map = (mn_id_map){ 0 };
}

int32_t mn_id_map_find(const mn_id_map *map, const mn_token *tokens, const char *text,
                       size_t size) {
    if (!map->ids) return -1;
    const uint32_t hash = hash_text(text, size);
    for (size_t at = hash & map->mask;; at = (at + 1) & map->mask) {
        const int32_t id = map->ids[at];
        if (id < 0) return -1;
        if (map->hashes[at] != hash) continue;
        const mn_span key = key_of(map, &tokens[id]);
        if (key.size == size && memcmp(key.bytes, text, size) == 0) return id;
    }
}

void mn_id_map_add(mn_id_map *map, const mn_token *tokens, int32_t id) {
    const mn_span key = key_of(map, &tokens[id]);
    if (mn_id_map_find(map, tokens, key.bytes, key.size) >= 0) return;
    const uint32_t hash = hash_text(key.bytes, key.size);
    size_t at = hash & map->mask;
    while (map->ids[at] >= 0) at = (at + 1) & map->mask;
    map->ids[at] = id;
    map->hashes[at] = hash;
}

mn_status mn_pair_map_make(mn_pair_map *map, int64_t count) {
    const size_t slots = slots_for(count);
    *map = (mn_pair_map){ .slots = malloc(slots * sizeof *map->slots), .mask = slots - 1 };
    if (!map->slots) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %lld merges", (long long)count);
    }
    for (size_t i = 0; i < slots; i++) map->slots[i].key = UINT64_MAX;
    return MN_OK;
}

void mn_pair_map_free(mn_pair_map *map) {
    free(map->slots);
    *map = (mn_pair_map){ 0 };
}

/* The slot of a key, or the empty one where it would be. */
static struct mn_pair_slot *slot_of(const mn_pair_map *map, uint64_t key) {
    const uint64_t mixed = (key ^ key >> 29) * 0x9E3779B97F4A7C15u;
    size_t at = (size_t)(mixed >> 32) & map->mask;
    while (map->slots[at].key != key && map->slots[at].key != UINT64_MAX) at = (at + 1) & map->mask;
    return &map->slots[at];
}

void mn_pair_map_put(mn_pair_map *map, uint64_t key, int32_t rank, int32_t id) {
    struct mn_pair_slot *slot = slot_of(map, key);
    map->count += slot->key == UINT64_MAX;
    *slot = (struct mn_pair_slot){ key, rank, id };
}

const struct mn_pair_slot *mn_pair_map_find(const mn_pair_map *map, uint64_t key) {
    const struct mn_pair_slot *slot = slot_of(map, key);
    return slot->key == key ? slot : NULL;
}
