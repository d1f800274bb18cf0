/* cache.c - the radix tree: nodes own the tokens of the edge above them. */
#include "server/cache.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

typedef struct node {
    struct node *parent, *children, *sibling;
    int32_t *tokens;               // of the edge from the parent
    int64_t count;
    void *value;                   // NULL: only a fork of the tree
    size_t bytes;
    int level;
    struct node *newer, *older;    // of nodes with values of a level, by last use
} node;

typedef struct level {
    node *newest, *oldest;
    size_t most_bytes;
    mn_cache_move move;
    void *context;
} level;

struct mn_cache {
    node root;
    level levels[MN_CACHE_LEVELS];
    int n_levels;
    mn_cache_free free_value;
    mn_cache_stats stats;
};

mn_status mn_cache_create(mn_cache **out, size_t most_bytes, mn_cache_free free_value) {
    *out = calloc(1, sizeof **out);
    if (!*out) return mn_fail(MN_ERR_MEMORY, "no memory for a cache");
    (*out)->levels[0].most_bytes = most_bytes;
    (*out)->n_levels = 1;
    (*out)->free_value = free_value;
    return MN_OK;
}

void mn_cache_add_level(mn_cache *c, size_t most_bytes, mn_cache_move move, void *context) {
    c->levels[c->n_levels++] = (level){ .most_bytes = most_bytes, .move = move,
                                        .context = context };
}

/* ---- order of use ---------------------------------------------------------------------------- */

static void unlink_use(mn_cache *c, node *n) {
    level *l = &c->levels[n->level];
    if (n->newer) n->newer->older = n->older;
    else l->newest = n->older;
    if (n->older) n->older->newer = n->newer;
    else l->oldest = n->newer;
    n->newer = n->older = NULL;
}

static void link_newest(mn_cache *c, node *n) {
    level *l = &c->levels[n->level];
    n->older = l->newest;
    if (l->newest) l->newest->newer = n;
    else l->oldest = n;
    l->newest = n;
}

/* Adds to what the level of n holds; the tree counts with the first. */
static void count_bytes(mn_cache *c, const node *n, size_t more, size_t less) {
    c->stats.level_bytes[n->level] += more - less;
    if (n->level == 0) c->stats.bytes += more - less;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static size_t node_bytes(const node *n) {
    return sizeof *n + (size_t)n->count * sizeof *n->tokens;
}

static node *child_of(const node *parent, int32_t token) {
    node *child = parent->children;
    while (child && child->tokens[0] != token) child = child->sibling;
    return child;
}

static node **place_of(node *n) {
    node **at = &n->parent->children;
    while (*at != n) at = &(*at)->sibling;
    return at;
}

static node *add_child(mn_cache *c, node *parent, const int32_t *tokens, int64_t count) {
    node *n = calloc(1, sizeof *n);
    int32_t *copy = malloc((size_t)count * sizeof *copy);
    if (!n || !copy) {
        free(n);
        free(copy);
        return NULL;
    }
    memcpy(copy, tokens, (size_t)count * sizeof *copy);
    *n = (node){ .parent = parent, .sibling = parent->children, .tokens = copy, .count = count };
    parent->children = n;
    c->stats.bytes += node_bytes(n);
    return n;
}

/* Cuts the edge above `n` after `at` tokens; the node between, NULL when memory is short. */
static node *split(mn_cache *c, node *n, int64_t at) {
    node *upper = calloc(1, sizeof *upper);
    int32_t *head = malloc((size_t)at * sizeof *head);
    if (!upper || !head) {
        free(upper);
        free(head);
        return NULL;
    }
    node **place = place_of(n);
    memcpy(head, n->tokens, (size_t)at * sizeof *head);
    *upper = (node){ .parent = n->parent, .sibling = n->sibling, .children = n, .tokens = head,
                     .count = at };
    *place = upper;
    n->parent = upper;
    n->sibling = NULL;
    n->count -= at;
    memmove(n->tokens, n->tokens + at, (size_t)n->count * sizeof *n->tokens);
    c->stats.bytes += sizeof *upper;
    return upper;
}

/* Takes nodes out that hold nothing and lead nowhere, from `n` up. */
static void prune(mn_cache *c, node *n) {
    while (n != &c->root && !n->value && !n->children) {
        node *parent = n->parent;
        *place_of(n) = n->sibling;
        c->stats.bytes -= node_bytes(n);
        free(n->tokens);
        free(n);
        n = parent;
    }
}

static void drop_value(mn_cache *c, node *n) {
    unlink_use(c, n);
    c->free_value(n->value);
    count_bytes(c, n, 0, n->bytes);
    c->stats.entries--;
    n->value = NULL;
    n->bytes = 0;
}

/* All tokens up to `n`, to be freed, and how many; NULL when memory is short. */
static int32_t *tokens_of(const node *n, int64_t *count) {
    *count = 0;
    for (const node *at = n; at->parent; at = at->parent) *count += at->count;
    int32_t *tokens = malloc((size_t)*count * sizeof *tokens);
    int64_t end = *count;
    for (const node *at = n; tokens && at->parent; at = at->parent) {
        end -= at->count;
        memcpy(tokens + end, at->tokens, (size_t)at->count * sizeof *tokens);
    }
    return tokens;
}

/* The value to the next level; false: there is none, or none that takes it. */
static bool move_on(mn_cache *c, node *n) {
    const int next = n->level + 1;
    if (next >= c->n_levels || n->bytes > c->levels[next].most_bytes) return false;
    mn_cache_moved moved = { .value = n->value, .level = next };
    int32_t *tokens = tokens_of(n, &moved.count);
    moved.tokens = tokens;
    const bool goes = tokens && c->levels[next].move(c->levels[next].context, &moved);
    free(tokens);
    if (!goes) return false;
    unlink_use(c, n);
    count_bytes(c, n, 0, n->bytes);
    n->level = next;
    count_bytes(c, n, n->bytes, 0);
    link_newest(c, n);
    return true;
}

static void shrink(mn_cache *c) {
    for (int i = 0; i < c->n_levels; i++) {
        level *l = &c->levels[i];
        while ((i == 0 ? c->stats.bytes : c->stats.level_bytes[i]) > l->most_bytes && l->oldest) {
            node *n = l->oldest;
            if (move_on(c, n)) continue;
            drop_value(c, n);
            prune(c, n);
            c->stats.evictions++;
        }
    }
}

void mn_cache_destroy(mn_cache *cache) {
    if (!cache) return;
    for (int i = 0; i < cache->n_levels; i++) {
        while (cache->levels[i].oldest) {
            node *n = cache->levels[i].oldest;
            drop_value(cache, n);
            prune(cache, n);
        }
    }
    free(cache);
}

/* ---- use ------------------------------------------------------------------------------------- */

/* How many tokens of the edge above `n` agree with what is given. */
static int64_t agreeing(const node *n, const int32_t *tokens, int64_t count) {
    const int64_t most = mn_min(n->count, count);
    int64_t i = 0;
    while (i < most && n->tokens[i] == tokens[i]) i++;
    return i;
}

void *mn_cache_find(mn_cache *c, const int32_t *tokens, int64_t count, int64_t border,
                    int64_t *length) {
    node *best = NULL, *n = &c->root;
    int64_t at = 0;
    *length = 0;
    while (at < count && (n = child_of(n, tokens[at])) != NULL) {
        if (agreeing(n, tokens + at, count - at) < n->count) break;
        at += n->count;
        if (!n->value || (at != count && at % border != 0)) continue;
        best = n;
        *length = at;
    }
    c->stats.lookups++;
    c->stats.tokens_wanted += (uint64_t)count;
    if (!best) return NULL;
    c->stats.hits++;
    c->stats.tokens_found += (uint64_t)*length;
    unlink_use(c, best);
    link_newest(c, best);
    return best->value;
}

/* The node of exactly these tokens where it has a value. */
static node *exactly(mn_cache *c, const int32_t *tokens, int64_t count) {
    node *n = &c->root;
    int64_t at = 0;
    while (at < count && (n = child_of(n, tokens[at])) != NULL) {
        if (agreeing(n, tokens + at, count - at) < n->count) return NULL;
        at += n->count;
    }
    return at == count && n && n->value ? n : NULL;
}

bool mn_cache_has(mn_cache *c, const int32_t *tokens, int64_t count) {
    return exactly(c, tokens, count) != NULL;
}

void mn_cache_forget(mn_cache *c, const int32_t *tokens, int64_t count) {
    node *n = exactly(c, tokens, count);
    if (!n) return;
    drop_value(c, n);
    prune(c, n);
}

/* The node of exactly these tokens, made where there is none; NULL when memory is short. */
static node *node_for(mn_cache *c, const int32_t *tokens, int64_t count) {
    node *n = &c->root;
    for (int64_t at = 0; at < count;) {
        node *child = child_of(n, tokens[at]);
        if (!child) return add_child(c, n, tokens + at, count - at);
        const int64_t same = agreeing(child, tokens + at, count - at);
        if (same < child->count) {
            child = split(c, child, same);
            if (!child) return NULL;
        }
        n = child;
        at += same;
    }
    return n;
}

static void put_at(mn_cache *c, const int32_t *tokens, int64_t count, void *value, size_t bytes,
                   int at) {
    const bool fits = count > 0 && bytes < c->levels[at].most_bytes;
    node *n = fits ? node_for(c, tokens, count) : NULL;
    if (!n) {
        c->free_value(value);
        return;
    }
    if (n->value) drop_value(c, n);
    n->value = value;
    n->bytes = bytes;
    n->level = at;
    count_bytes(c, n, bytes, 0);
    c->stats.entries++;
    link_newest(c, n);
    shrink(c);
}

void mn_cache_put(mn_cache *c, const int32_t *tokens, int64_t count, void *value, size_t bytes) {
    put_at(c, tokens, count, value, bytes, 0);
}

void mn_cache_put_away(mn_cache *c, const int32_t *tokens, int64_t count, void *value,
                       size_t bytes) {
    put_at(c, tokens, count, value, bytes, c->n_levels - 1);
}

void mn_cache_flush(mn_cache *c) {
    for (int i = c->n_levels - 2; i >= 0; i--) {
        while (c->levels[i].oldest) {
            node *n = c->levels[i].oldest;
            bool moved = true;
            while (moved && n->level < c->n_levels - 1) moved = move_on(c, n);
            if (moved) continue;
            drop_value(c, n);
            prune(c, n);
        }
    }
    shrink(c);
}

void mn_cache_each(const mn_cache *c, void (*visit)(void *value)) {
    for (int i = 0; i < c->n_levels; i++) {
        for (const node *n = c->levels[i].newest; n; n = n->older) visit(n->value);
    }
}

mn_cache_stats mn_cache_describe(const mn_cache *cache) {
    return cache->stats;
}
