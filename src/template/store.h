/* store.h - memory of one template or one rendering: given out piece by piece, freed at once. */
#ifndef MN_TEMPLATE_STORE_H
#define MN_TEMPLATE_STORE_H

#include <stdbool.h>
#include <stddef.h>

#include "template/names.h"

typedef struct store_block store_block;

/* All zeros is empty. */
typedef struct store {
    store_block *blocks;
    char *at, *end;             // free bytes of the block in use
    size_t held, most;          // bytes of blocks; 0: no limit
} store;

/* Zeroed memory for any object; NULL beyond the limit or without memory. */
void *store_take(store *s, size_t bytes);

/* The same for bytes of text: not zeroed, not aligned. */
char *store_bytes(store *s, size_t bytes);

/* Makes `old` bytes at `at` into `size` of them, in place where nothing was taken behind them. */
char *store_grow(store *s, const char *at, size_t old, size_t size);

void store_free(store *s);

#endif
