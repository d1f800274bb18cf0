/* text.h - text that grows. All zeros is empty. */
#ifndef MN_IO_TEXT_H
#define MN_IO_TEXT_H

#include <stddef.h>

#include "mneme.h"

typedef struct mn_text {
    char *bytes;
    size_t size, capacity;
} mn_text;

/* Makes room for `more` bytes behind the text; on failure it is as it was. */
mn_status mn_text_reserve(mn_text *text, size_t more);

mn_status mn_text_add(mn_text *text, const void *bytes, size_t size);

/* Appends `bytes` with U+FFFD for what is not UTF-8, one for each longest start of a character. */
mn_status mn_text_add_utf8(mn_text *text, const char *bytes, size_t size);

void mn_text_free(mn_text *text);    // leaves all zeros

#endif
