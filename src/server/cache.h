/* cache.h - values by token prefix: a radix tree with a bound in bytes.
 *
 * Server keeps session snapshots in it, so that a prompt that begins as an earlier one did is not
 * read again. Beyond the bound the value that was used longest ago goes first: to the next level
 * where there is one, such as host memory or a disk. Edges of the tree hold runs of tokens; finding
 * a prefix costs its length and nothing else. */
#ifndef MN_SERVER_CACHE_H
#define MN_SERVER_CACHE_H

#include <stdbool.h>

#include "mneme.h"

typedef struct mn_cache mn_cache;

typedef void (*mn_cache_free)(void *value);

/* What the value of these tokens is brought from the level in front to level `level` by; false: it
 * cannot be, and is given up. */
typedef struct mn_cache_moved {
    void *value;
    const int32_t *tokens;
    int64_t count;
    int level;
} mn_cache_moved;

typedef bool (*mn_cache_move)(void *context, const mn_cache_moved *moved);

enum { MN_CACHE_LEVELS = 3 };

typedef struct mn_cache_stats {
    int64_t entries;
    size_t bytes;              // of values of the first level and of the tree
    size_t level_bytes[MN_CACHE_LEVELS];    // of values
    uint64_t lookups, hits;    // finds, and those that found a value
    uint64_t tokens_wanted, tokens_found;
    uint64_t evictions;
} mn_cache_stats;

/* `most_bytes` 0: keeps nothing. `free_value` frees what is evicted. */
mn_status mn_cache_create(mn_cache **out, size_t most_bytes, mn_cache_free free_value);
void mn_cache_destroy(mn_cache *cache);    // NULL accepted

/* One more level for values that the last one has no room for: MN_CACHE_LEVELS at most. */
void mn_cache_add_level(mn_cache *cache, size_t most_bytes, mn_cache_move move, void *context);

/* The value of the longest prefix of `tokens` that may serve: all `count` of them, or a multiple of
 * `border`. NULL and length 0 where there is none. The value stays the cache's, until the next
 * put. */
void *mn_cache_find(mn_cache *cache, const int32_t *tokens, int64_t count, int64_t border,
                    int64_t *length);

/* Whether exactly these tokens have a value; counts as no lookup. */
bool mn_cache_has(mn_cache *cache, const int32_t *tokens, int64_t count);

/* Gives the cache a value of `bytes` for these tokens (count > 0), in place of the one that was
 * there. What does not fit, or where memory is short, is freed at once: a cache may forget. */
void mn_cache_put(mn_cache *cache, const int32_t *tokens, int64_t count, void *value,
                  size_t bytes);

/* Frees the value of exactly these tokens, if there is one. */
void mn_cache_forget(mn_cache *cache, const int32_t *tokens, int64_t count);

/* The same as a put at the last level, for what was there when the cache was made. */
void mn_cache_put_away(mn_cache *cache, const int32_t *tokens, int64_t count, void *value,
                       size_t bytes);

/* Brings all values to the last level, as far as it has room: those used last are kept. */
void mn_cache_flush(mn_cache *cache);

/* Calls `visit` for every value. */
void mn_cache_each(const mn_cache *cache, void (*visit)(void *value));

mn_cache_stats mn_cache_describe(const mn_cache *cache);

#endif
