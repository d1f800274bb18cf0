/* store.c - blocks in a chain; the newest gives memory. */
#include "template/store.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 16384, ALIGN = 16 };

struct store_block {
    store_block *next;
    _Alignas(ALIGN) char bytes[];
};

static bool add_block(store *s, size_t bytes) {
    size_t size = s->held < 16 * BLOCK ? BLOCK : 16 * BLOCK;
    if (bytes > SIZE_MAX / 2) return false;
    if (bytes + ALIGN > size) size = bytes + ALIGN;
    if (s->most && (size > s->most || s->held > s->most - size)) return false;
    store_block *block = malloc(sizeof *block + size);
    if (!block) return false;
    block->next = s->blocks;
    s->blocks = block;
    s->at = block->bytes;
    s->end = block->bytes + size;
    s->held += size;
    return true;
}

void *store_take(store *s, size_t bytes) {
    const size_t off = (uintptr_t)s->at % ALIGN, skip = off ? ALIGN - off : 0;
    if (!s->at || bytes > (size_t)(s->end - s->at) || skip > (size_t)(s->end - s->at) - bytes) {
        if (!add_block(s, bytes)) return NULL;
    } else {
        s->at += skip;
    }
    void *out = s->at;
    s->at += bytes;
    return memset(out, 0, bytes);
}

char *store_bytes(store *s, size_t bytes) {
    if ((!s->at || bytes > (size_t)(s->end - s->at)) && !add_block(s, bytes)) return NULL;
    char *out = s->at;
    s->at += bytes;
    return out;
}

char *store_grow(store *s, const char *at, size_t old, size_t size) {
    if (s->at && at + old == s->at && size - old <= (size_t)(s->end - s->at) && old > 0) {
        s->at += size - old;
        return s->at - size;
    }
    /* Room to grow into: a text that is added to again and again is copied a few times only. */
    const size_t room = size < 256 ? size : size / 2 + size;
    char *out = room > size ? store_bytes(s, room) : NULL;
    if (!out) out = store_bytes(s, size);
    else s->at = out + size;
    if (out && old) memcpy(out, at, old);
    return out;
}

void store_free(store *s) {
    for (store_block *block = s->blocks; block;) {
        store_block *next = block->next;
        free(block);
        block = next;
    }
    const size_t most = s->most;
    *s = (store){ .most = most };
}
