/* text.c - text that grows by doubling. */
#include "io/text.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/utf8.h"

mn_status mn_text_reserve(mn_text *text, size_t more) {
    if (more <= text->capacity - text->size) return MN_OK;
    size_t wanted, capacity;
    if (!mn_add_size(&wanted, text->size, more) || !mn_mul_size(&capacity, text->capacity, 2)) {
        return mn_fail(MN_ERR_MEMORY, "a text of %zu and %zu more bytes is too long", text->size,
                       more);
    }
    if (capacity < wanted) capacity = wanted;
    if (capacity < 64) capacity = 64;
    char *bytes = realloc(text->bytes, capacity);
    if (!bytes) return mn_fail(MN_ERR_MEMORY, "no memory for a text of %zu bytes", capacity);
    text->bytes = bytes;
    text->capacity = capacity;
    return MN_OK;
}

mn_status mn_text_add(mn_text *text, const void *bytes, size_t size) {
    const mn_status st = mn_text_reserve(text, size);
    if (st != MN_OK || size == 0) return st;
    memcpy(text->bytes + text->size, bytes, size);
    text->size += size;
    return MN_OK;
}

mn_status mn_text_add_utf8(mn_text *text, const char *bytes, size_t size) {
    mn_status st = MN_OK;
    while (size > 0 && st == MN_OK) {
        size_t n = mn_utf8_valid(bytes, size);
        st = mn_text_add(text, bytes, n);
        if (n == 0) {
            uint32_t point;
            n = (size_t)mn_utf8_take(bytes, size, &point);
            st = mn_text_add(text, MN_UTF8_REPLACEMENT, 3);
        }
        bytes += n;
        size -= n;
    }
    return st;
}

void mn_text_free(mn_text *text) {
    free(text->bytes);
    *text = (mn_text){ 0 };
}
