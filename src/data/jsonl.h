/* jsonl.h - the text of one line of JSON. */
#ifndef MN_DATA_JSONL_H
#define MN_DATA_JSONL_H

#include "io/json.h"

/* Parses the line and borrows the text under `key` from it; free `root` when done with it, also
 * after failure. `name`, such as "books.jsonl: line 7", opens the messages, which suggest the
 * nearest key when there is no such one. */
mn_status mn_jsonl_text(mn_json *root, const char **text, size_t *size, const char *line,
                        size_t line_size, const char *key, const char *name);

/* Whether a line holds nothing but blanks. */
bool mn_jsonl_blank(const char *line, size_t size);

#endif
