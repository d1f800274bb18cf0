/* hash.h - a fast 64-bit hash of bytes, fed in pieces of any size. Finds damage and difference, not
 * malice. The same on every machine. */
#ifndef MN_DATA_HASH_H
#define MN_DATA_HASH_H

#include <stddef.h>
#include <stdint.h>

/* All zeros is the start. */
typedef struct mn_hash {
    uint64_t lane[4];
    uint64_t bytes;          // so far
    uint8_t pending[32];     // the block that is not full yet: bytes % 32 of them
} mn_hash;

void mn_hash_add(mn_hash *hash, const void *bytes, size_t size);

/* Numbers, eight bytes each. */
void mn_hash_add_u64(mn_hash *hash, uint64_t value);

/* Tokens as 32-bit numbers, however wide their file stores them. */
void mn_hash_add_tokens(mn_hash *hash, const int32_t *tokens, int64_t count);

/* The hash of what was added; adding may go on afterwards. */
uint64_t mn_hash_value(const mn_hash *hash);

#endif
