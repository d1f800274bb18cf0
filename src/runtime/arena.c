/* arena.c - scratch memory with a mark. A list of blocks; the last one in use serves. */
#include "runtime/arena.h"

#include <stdint.h>
#include <stdlib.h>

#include "base/checked.h"
#include "base/status.h"

enum { MAX_BLOCKS = 64 };

typedef struct block {
    unsigned char *bytes;
    size_t size;
} block;

struct mn_arena {
    block blocks[MAX_BLOCKS];
    size_t n_blocks;
    size_t current, used;    // allocation point: block and offset
    bool counts;             // no blocks: addresses only
    size_t most;             // of `used`, where it counts
    mn_arena_source source;
};

static size_t rounded(size_t bytes) {
    return (bytes + MN_ALIGN - 1) / MN_ALIGN * MN_ALIGN;
}

static void *allocate_on_heap(void *owner, size_t bytes) {
    (void)owner;
    return aligned_alloc(MN_ALIGN, rounded(bytes));
}

static void free_on_heap(void *owner, void *memory) {
    (void)owner;
    free(memory);
}

/* Makes blocks[n_blocks] at least `bytes` big, doubling what is held so far. */
static bool add_block(mn_arena *arena, size_t bytes) {
    if (arena->n_blocks == MAX_BLOCKS || bytes > PTRDIFF_MAX / 2) return false;
    const size_t held = mn_arena_held(arena);
    const mn_arena_source *from = &arena->source;
    size_t size = held > from->first_bytes ? held : from->first_bytes;
    if (size < bytes) size = bytes;
    unsigned char *memory = from->allocate(from->owner, size);
    if (!memory && size > bytes) memory = from->allocate(from->owner, size = bytes);
    if (!memory) return false;
    arena->blocks[arena->n_blocks++] = (block){ memory, size };
    return true;
}

mn_status mn_arena_create_over(mn_arena **out, const mn_arena_source *source) {
    *out = calloc(1, sizeof **out);
    if (!*out) return mn_fail(MN_ERR_MEMORY, "no memory for an arena");
    (*out)->source = *source;
    return MN_OK;
}

mn_status mn_arena_create(mn_arena **out) {
    const mn_arena_source heap = { allocate_on_heap, free_on_heap, NULL, (size_t)1 << 20 };
    return mn_arena_create_over(out, &heap);
}

mn_status mn_arena_create_counting(mn_arena **out) {
    const mn_status st = mn_arena_create(out);
    if (st == MN_OK) (*out)->counts = true;
    return st;
}

size_t mn_arena_most(const mn_arena *arena) {
    return arena->most;
}

void mn_arena_trim(mn_arena *arena) {
    if (!arena) return;
    for (size_t i = 0; i < arena->n_blocks; i++) {
        arena->source.free(arena->source.owner, arena->blocks[i].bytes);
    }
    arena->n_blocks = arena->current = arena->used = 0;
}

void mn_arena_destroy(mn_arena *arena) {
    mn_arena_trim(arena);
    free(arena);
}

void *mn_arena_bytes(mn_arena *arena, size_t bytes) {
    size_t want;
    if (!mn_add_size(&want, bytes, MN_ALIGN)) return NULL;
    want = rounded(bytes ? bytes : 1);
    if (arena->counts) {
        const size_t begin = arena->used;
        if (!mn_add_size(&arena->used, begin, want)) return NULL;
        if (arena->used > arena->most) arena->most = arena->used;
        return (void *)(uintptr_t)(begin + MN_ALIGN);
    }
    size_t at = arena->current, used = arena->used;
    while (at < arena->n_blocks && arena->blocks[at].size - used < want) {
        at++;
        used = 0;
    }
    if (at == arena->n_blocks && !add_block(arena, want)) return NULL;
    arena->current = at;
    arena->used = used + want;
    return arena->blocks[at].bytes + used;
}

void *mn_arena_array(mn_arena *arena, int64_t rows, int64_t cols, size_t size) {
    size_t bytes;
    if (rows < 0 || cols < 0 || !mn_mul_size(&bytes, (size_t)rows, (size_t)cols)) return NULL;
    return mn_mul_size(&bytes, bytes, size) ? mn_arena_bytes(arena, bytes) : NULL;
}

mn_mark mn_arena_mark(const mn_arena *arena) {
    return (mn_mark){ arena->current, arena->used };
}

void mn_arena_release(mn_arena *arena, mn_mark mark) {
    arena->current = mark.block;
    arena->used = mark.used;
}

size_t mn_arena_held(const mn_arena *arena) {
    size_t held = 0;
    for (size_t i = 0; i < arena->n_blocks; i++) held += arena->blocks[i].size;
    return held;
}

bool mn_arena_holds(const mn_arena *arena, const void *address) {
    const uintptr_t at = (uintptr_t)address;
    for (size_t i = 0; i < arena->n_blocks; i++) {
        const uintptr_t begin = (uintptr_t)arena->blocks[i].bytes;
        if (at >= begin && at - begin < arena->blocks[i].size) return true;
    }
    return false;
}
