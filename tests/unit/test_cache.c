/* test_cache.c - the radix tree against a list: the same prefixes are found, the bound holds, what
 * is used stays, nothing is lost or freed twice. */
// labels: sanitize
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "server/cache.h"
#include "support/check.h"

enum { MOST = 400, LENGTH = 24, BORDER = 4 };

/* A value knows its key. */
typedef struct value {
    int32_t tokens[LENGTH];
    int64_t count;
} value;

static int64_t n_alive;

static void free_value(void *v) {
    n_alive--;
    free(v);
}

static value *new_value(const int32_t *tokens, int64_t count) {
    value *v = calloc(1, sizeof *v);
    if (!v) check_fatal("no memory");
    memcpy(v->tokens, tokens, (size_t)count * sizeof *tokens);
    v->count = count;
    n_alive++;
    return v;
}

static mn_cache *open(size_t bytes) {
    mn_cache *cache = NULL;
    if (mn_cache_create(&cache, bytes, free_value) != MN_OK) check_fatal("%s", mn_last_error());
    return cache;
}

/* Keys of two letters, so that many begin alike. */
static int64_t draw_key(int32_t *tokens, uint64_t i) {
    const int64_t count = 1 + (int64_t)(mn_rng_uniform(7, 1, i) * LENGTH);
    for (int64_t t = 0; t < count; t++) {
        tokens[t] = mn_rng_uniform(7, 2, i * LENGTH + (uint64_t)t) < 0.8 ? 1 : 2;
    }
    return count;
}

static bool begins(const value *v, const int32_t *tokens, int64_t count) {
    return v->count <= count &&
           memcmp(v->tokens, tokens, (size_t)v->count * sizeof *tokens) == 0;
}

static void finds_what_a_list_finds(void **context) {
    (void)context;
    mn_cache *cache = open((size_t)1 << 30);
    static value keys[MOST];
    for (int i = 0; i < MOST; i++) {
        int32_t tokens[LENGTH];
        int64_t length, want = 0;
        const int64_t count = draw_key(tokens, (uint64_t)i);
        bool there = false;
        for (int k = 0; k < i; k++) {
            if (!begins(&keys[k], tokens, count)) continue;
            there |= keys[k].count == count;
            const bool serves = keys[k].count == count || keys[k].count % BORDER == 0;
            if (serves) want = mn_max(want, keys[k].count);
        }
        CHECK(mn_cache_has(cache, tokens, count) == there, "has, key %d", i);
        const value *found = mn_cache_find(cache, tokens, count, BORDER, &length);
        CHECK(length == want && !found == !want, "key %d: %lld tokens found, not %lld", i,
              (long long)length, (long long)want);
        CHECK(!found || (found->count == length && begins(found, tokens, count)),
              "key %d: another's value", i);
        memcpy(keys[i].tokens, tokens, sizeof tokens);
        keys[i].count = count;
        mn_cache_put(cache, tokens, count, new_value(tokens, count), 100);
    }
    const mn_cache_stats stats = mn_cache_describe(cache);
    CHECK(stats.entries == n_alive && stats.lookups == MOST, "%lld entries, %lld alive",
          (long long)stats.entries, (long long)n_alive);
    mn_cache_destroy(cache);
    CHECK(n_alive == 0, "%lld values are left", (long long)n_alive);
    check_done();
}

static void keeps_its_bound_and_what_is_used(void **context) {
    (void)context;
    enum { BYTES = 20000, EACH = 900 };
    mn_cache *cache = open(BYTES);
    const int32_t used[] = { 9, 9, 9, 9 };
    int64_t length;
    mn_cache_put(cache, used, 4, new_value(used, 4), EACH);
    for (int i = 0; i < MOST; i++) {
        int32_t tokens[LENGTH];
        const int64_t count = draw_key(tokens, (uint64_t)i);
        mn_cache_put(cache, tokens, count, new_value(tokens, count), EACH);
        CHECK(mn_cache_describe(cache).bytes <= BYTES, "%zu bytes",
              mn_cache_describe(cache).bytes);
        CHECK(mn_cache_find(cache, used, 4, BORDER, &length) && length == 4, "used, and gone");
        CHECK(mn_cache_has(cache, tokens, count), "the newest is gone");
    }
    CHECK(mn_cache_describe(cache).evictions > 0, "nothing had to go");
    mn_cache_put(cache, used, 4, new_value(used, 4), BYTES + 1);    // never fits
    CHECK(mn_cache_describe(cache).bytes <= BYTES, "what does not fit was kept");
    mn_cache_destroy(cache);
    CHECK(n_alive == 0, "%lld values are left", (long long)n_alive);
    check_done();
}

static void nothing_in_no_memory(void **context) {
    (void)context;
    mn_cache *cache = open(0);
    const int32_t tokens[] = { 1, 2 };
    int64_t length = 5;
    mn_cache_put(cache, tokens, 2, new_value(tokens, 2), 1);
    CHECK(!mn_cache_find(cache, tokens, 2, 1, &length) && length == 0, "found");
    mn_cache_destroy(cache);
    mn_cache_destroy(NULL);
    CHECK(n_alive == 0, "%lld values are left", (long long)n_alive);
    check_done();
}

/* ---- levels ---------------------------------------------------------------------------------- */

static int n_moves[MN_CACHE_LEVELS];

/* A level that takes nothing that begins with `context`. */
static bool move_value(void *context, const mn_cache_moved *moved) {
    const value *v = moved->value;
    n_moves[moved->level]++;
    CHECK(moved->count == v->count &&
          memcmp(moved->tokens, v->tokens, (size_t)v->count * sizeof *v->tokens) == 0,
          "a value is moved under other tokens");
    return v->tokens[0] != *(const int32_t *)context;
}

/* The newest are on the first level, older ones behind, the oldest gone; what is found stays where
 * it is, and a value put for the same tokens is near again. */
static void what_has_no_room_goes_on(void **context) {
    (void)context;
    enum { KEYS = 40, EACH = 1000, NEAR = 8 * EACH, AWAY = 10 * EACH, REFUSED = 77 };
    const int32_t refused = REFUSED;
    mn_cache *cache = open(NEAR);
    mn_cache_add_level(cache, AWAY, move_value, (void *)&refused);
    mn_cache_add_level(cache, AWAY, move_value, (void *)&refused);
    int64_t length;
    for (int32_t i = 0; i < KEYS; i++) {
        const int32_t tokens[] = { 100 + i, 2 };
        mn_cache_put(cache, tokens, 2, new_value(tokens, 2), EACH);
        const mn_cache_stats stats = mn_cache_describe(cache);
        CHECK(stats.bytes <= NEAR && stats.level_bytes[1] <= AWAY && stats.level_bytes[2] <= AWAY,
              "%d keys: a level holds too much", (int)i);
        CHECK(stats.entries == n_alive, "%d keys: %lld values, %lld alive", (int)i,
              (long long)stats.entries, (long long)n_alive);
    }
    const mn_cache_stats full = mn_cache_describe(cache);
    CHECK(full.level_bytes[1] == AWAY && full.level_bytes[2] == AWAY, "levels are not used");
    for (int32_t i = 0; i < KEYS; i++) {
        const int32_t tokens[] = { 100 + i, 2 };
        const bool there = i >= KEYS - (int32_t)full.entries;
        CHECK(mn_cache_has(cache, tokens, 2) == there, "key %d of %lld", (int)i,
              (long long)full.entries);
    }
    const int32_t oldest[] = { 100 + KEYS - (int32_t)full.entries, 2 };
    CHECK(mn_cache_find(cache, oldest, 2, 1, &length) && length == 2, "the oldest");
    mn_cache_put(cache, oldest, 2, new_value(oldest, 2), EACH);
    CHECK(mn_cache_describe(cache).entries <= full.entries, "twice there");
    CHECK(n_moves[1] > 0 && n_moves[2] > 0, "nothing moved");
    const int32_t stays[] = { REFUSED, 1 };
    mn_cache_put(cache, stays, 2, new_value(stays, 2), EACH);
    for (int32_t i = 0; i < KEYS; i++) {
        const int32_t tokens[] = { 300 + i, 2 };
        mn_cache_put(cache, tokens, 2, new_value(tokens, 2), EACH);
    }
    CHECK(!mn_cache_has(cache, stays, 2), "what no level takes is kept");
    mn_cache_destroy(cache);
    CHECK(n_alive == 0, "%lld values are lost", (long long)n_alive);
    check_done();
}

static int64_t n_seen;

static void see(void *v) {
    (void)v;
    n_seen++;
}

/* At the end all goes to the last level, those used last stay; another cache finds them there. */
static void a_flush_leaves_all_on_the_last_level(void **context) {
    (void)context;
    enum { KEYS = 30, EACH = 1000, NEAR = 20 * EACH, AWAY = 8 * EACH, REFUSED = 77 };
    const int32_t refused = REFUSED;
    mn_cache *cache = open(NEAR);
    mn_cache_add_level(cache, AWAY, move_value, (void *)&refused);
    for (int32_t i = 0; i < KEYS; i++) {
        const int32_t tokens[] = { 100, i == KEYS - 2 ? REFUSED : i, 3 };
        mn_cache_put(cache, tokens, 3, new_value(tokens, 3), EACH);
    }
    mn_cache_flush(cache);
    const mn_cache_stats stats = mn_cache_describe(cache);
    CHECK(stats.level_bytes[0] == 0 && stats.level_bytes[1] == AWAY && stats.entries == 8,
          "%zu and %zu bytes of %lld values", stats.level_bytes[0], stats.level_bytes[1],
          (long long)stats.entries);
    n_seen = 0;
    mn_cache_each(cache, see);
    CHECK(n_seen == 8 && n_alive == 8, "%lld seen", (long long)n_seen);
    const int32_t newest[] = { 100, KEYS - 1, 3 }, gone[] = { 100, 1, 3 };
    CHECK(mn_cache_has(cache, newest, 3) && !mn_cache_has(cache, gone, 3), "the newest");
    mn_cache_forget(cache, newest, 3);
    mn_cache_forget(cache, gone, 3);
    CHECK(!mn_cache_has(cache, newest, 3) && n_alive == 7, "not forgotten");
    mn_cache_put_away(cache, newest, 3, new_value(newest, 3), EACH);
    int64_t length;
    CHECK(mn_cache_find(cache, newest, 3, 1, &length) && length == 3, "put away and not found");
    CHECK(mn_cache_describe(cache).level_bytes[0] == 0, "put away near");
    mn_cache_destroy(cache);
    CHECK(n_alive == 0, "%lld values are lost", (long long)n_alive);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_flush_leaves_all_on_the_last_level),
        cmocka_unit_test(what_has_no_room_goes_on),
        cmocka_unit_test(finds_what_a_list_finds),
        cmocka_unit_test(keeps_its_bound_and_what_is_used),
        cmocka_unit_test(nothing_in_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
