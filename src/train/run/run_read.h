/* run_read.h - reads metrics.jsonl: one JSON object a line, each with the step it belongs to.
 *
 * A last line without newline is still being written, or was when its writer died: it is not there
 * for these readers. Anything else that is no such object fails, named with file and line. */
#ifndef MN_TRAIN_RUN_READ_H
#define MN_TRAIN_RUN_READ_H

#include <stddef.h>
#include <stdint.h>

#include "mneme.h"

/* Lines whose step is at most `last_step` and the bytes they fill from the start, up to the first
 * line of a later step. `name` opens messages. */
mn_status mn_run_lines_until(int64_t *n_lines, size_t *size, int64_t last_step, const void *bytes,
                             size_t n_bytes, const char *name);

/* A run as columns of numbers. */
typedef struct mn_run_table {
    int64_t n_rows, n_columns;
    char **names;         // of columns, in the order in which they first appear
    double *values;       // (n_columns, n_rows); NaN where a line lacks the number or has null
} mn_run_table;

/* Members that are no numbers are left out. On failure `*out` is all zeros. */
mn_status mn_run_table_parse(mn_run_table *out, const void *bytes, size_t n_bytes,
                             const char *name);

/* The same from the file at `path`. */
mn_status mn_run_table_load(mn_run_table *out, const char *path);

/* The n_rows numbers of the column called `name`, or NULL. */
const double *mn_run_table_column(const mn_run_table *table, const char *name);

/* NULL and all zeros are fine. */
void mn_run_table_free(mn_run_table *table);

#endif
