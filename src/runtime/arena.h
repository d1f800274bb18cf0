/* arena.h - scratch memory with a mark: allocate forward, release back to a mark.
 *
 * Blocks are kept when released, so a repeated computation allocates nothing after its first run.
 * All memory is aligned to MN_ALIGN: for the widest vector, and for a cache line of a GPU. Not for
 * sharing between threads. */
#ifndef MN_RUNTIME_ARENA_H
#define MN_RUNTIME_ARENA_H

#include <stdbool.h>

#include "mneme.h"

#define MN_ALIGN 128

typedef struct mn_arena mn_arena;
typedef struct mn_mark {
    size_t block, used;
} mn_mark;

mn_status mn_arena_create(mn_arena **out);
void mn_arena_destroy(mn_arena *arena);    // NULL accepted

/* Where blocks come from other than the host's heap, such as a device. `allocate` gives NULL when
 * there is no memory; blocks grow from `first_bytes`. */
typedef struct mn_arena_source {
    void *(*allocate)(void *owner, size_t bytes);
    void (*free)(void *owner, void *block);
    void *owner;
    size_t first_bytes;
} mn_arena_source;

/* An arena over it, which must outlive it. Its memory is for the owner's use only. */
mn_status mn_arena_create_over(mn_arena **out, const mn_arena_source *source);

/* An arena that has no memory and counts: what it hands out must not be touched. */
mn_status mn_arena_create_counting(mn_arena **out);
size_t mn_arena_most(const mn_arena *arena);    // bytes in use at once, of such an arena

/* Gives all blocks back; nothing of it may be in use. */
void mn_arena_trim(mn_arena *arena);    // NULL accepted

/* `bytes` of uninitialised memory, or NULL when there is none. */
void *mn_arena_bytes(mn_arena *arena, size_t bytes);

/* rows * cols elements of `size` bytes; NULL when the product overflows or memory is out. */
void *mn_arena_array(mn_arena *arena, int64_t rows, int64_t cols, size_t size);

mn_mark mn_arena_mark(const mn_arena *arena);
void mn_arena_release(mn_arena *arena, mn_mark mark);

/* Whether the address lies in one of its blocks. */
bool mn_arena_holds(const mn_arena *arena, const void *address);

/* bytes held, used or not */
size_t mn_arena_held(const mn_arena *arena);

#endif
