/* hash.c - a fast 64-bit hash of bytes, fed in pieces of any size.
 *
 * Four lanes take eight bytes each of every block of 32:  lane <- fold((lane ^ word) * odd), where
 * fold adds the halves of the 128-bit product by xor. The value folds lanes and length. */
#include "data/hash.h"

#include <string.h>

static const uint64_t factor[4] = { 0x9E3779B97F4A7C15u, 0xD2B74407B1CE6E93u, 0xA0761D6478BD642Fu,
                                    0xE7037ED1A0B428DBu };

static uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t word_at(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* The second factor differs from zero whatever the word is, so no word stops a lane for good. */
static void add_block(uint64_t lane[4], const uint8_t *block) {
    for (int i = 0; i < 4; i++) {
        lane[i] = fold(word_at(block + 8 * i) ^ factor[i], (lane[i] ^ factor[3 - i]) | 1) +
                  word_at(block + 8 * i) + (lane[i] << 23 | lane[i] >> 41);
    }
}

void mn_hash_add(mn_hash *hash, const void *bytes, size_t size) {
    const uint8_t *at = bytes;
    const size_t held = hash->bytes % 32;
    hash->bytes += size;
    if (held > 0) {
        const size_t n = size < 32 - held ? size : 32 - held;
        memcpy(hash->pending + held, at, n);
        if (held + n < 32) return;
        add_block(hash->lane, hash->pending);
        at += n;
        size -= n;
    }
    for (; size >= 32; size -= 32, at += 32) add_block(hash->lane, at);
    if (size > 0) memcpy(hash->pending, at, size);
}

void mn_hash_add_u64(mn_hash *hash, uint64_t value) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(value >> (8 * i));
    mn_hash_add(hash, bytes, sizeof bytes);
}

void mn_hash_add_tokens(mn_hash *hash, const int32_t *tokens, int64_t count) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    for (int64_t i = 0; i < count; i++) {
        const uint32_t swapped = __builtin_bswap32((uint32_t)tokens[i]);
        mn_hash_add(hash, &swapped, sizeof swapped);
    }
#else
    mn_hash_add(hash, tokens, (size_t)count * sizeof *tokens);
#endif
}

uint64_t mn_hash_value(const mn_hash *hash) {
    uint64_t lane[4];
    uint8_t last[32] = { 0 };
    memcpy(lane, hash->lane, sizeof lane);
    if (hash->bytes % 32 > 0) {
        memcpy(last, hash->pending, hash->bytes % 32);
        add_block(lane, last);
    }
    uint64_t value = hash->bytes * factor[0];
    for (int i = 0; i < 4; i++) value = fold(value ^ lane[i] ^ factor[i], factor[3 - i]);
    return fold(value ^ factor[1], factor[2]);
}
