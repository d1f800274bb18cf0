/* json_write.h - JSON text from jansson values.
 *
 * Numbers take the fewest digits that read back to the same double (1e-06, not
 * 9.9999999999999995e-07), members keep the order they were set in, and the text is the same under
 * every locale. */
#ifndef MN_IO_JSON_WRITE_H
#define MN_IO_JSON_WRITE_H

#include <jansson.h>

#include "mneme.h"

typedef enum mn_json_style {
    MN_JSON_COMPACT,        // one line, no blanks
    MN_JSON_PRETTY,         // two blanks per level; lists of plain values on one line if they fit
} mn_json_style;

/* Writes `value` as text without final newline. `*out` is to be freed; NULL after failure. */
mn_status mn_json_text(char **out, const json_t *value, mn_json_style style);

/* Writes `value` pretty, with final newline, as the file at `path` (see mn_file_write_atomic). */
mn_status mn_json_save(const char *path, const json_t *value);

/* A number, or null for NaN and infinities, which JSON cannot say. NULL when out of memory. */
json_t *mn_json_real(double value);

#endif
