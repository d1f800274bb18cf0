/* run_read.c - lines of metrics.jsonl, and columns made of them in two passes: names, then numbers.
 */
#define _XOPEN_SOURCE 700       // strdup under -std=c11
#include "train/run/run_read.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "io/file.h"
#include "io/json.h"

enum { MAX_COLUMNS = 1024 };

/* A place in the text; start with `number` 0. */
typedef struct lines {
    const char *text, *name;
    size_t size, at;      // `at`: behind the line
    int64_t number;
    mn_json object;       // of this line, to be freed by the next call
    int64_t step;
    mn_status status;
} lines;

/* Goes on to the next whole line that is not blank; false at the end and on failure. */
static bool next_line(lines *l) {
    mn_json_free(&l->object);
    while (l->status == MN_OK && l->at < l->size) {
        const char *const line = l->text + l->at;
        const char *const end = memchr(line, '\n', l->size - l->at);
        if (!end) return false;
        const size_t n = (size_t)(end - line);
        l->at += n + 1;
        l->number++;
        if (strspn(line, " \t\r") >= n) continue;    // stops at the newline at the latest
        char name[512];
        snprintf(name, sizeof name, "%.400s: line %" PRId64, l->name, l->number);
        l->status = mn_json_parse(&l->object, line, n, name, MN_JSON_PYTHON);
        if (l->status == MN_OK) l->status = mn_json_get_i64(&l->step, &l->object, "step");
        return l->status == MN_OK;
    }
    return false;
}

mn_status mn_run_lines_until(int64_t *n_lines, size_t *size, int64_t last_step, const void *bytes,
                             size_t n_bytes, const char *name) {
    lines l = { .text = bytes, .size = n_bytes, .name = name };
    *n_lines = 0;
    *size = 0;
    while (next_line(&l) && l.step <= last_step) {
        ++*n_lines;
        *size = l.at;
    }
    mn_json_free(&l.object);
    return l.status;
}

/* ---- columns --------------------------------------------------------------------------------- */

static int64_t column_of(const mn_run_table *table, const char *name) {
    for (int64_t i = 0; i < table->n_columns; i++) {
        if (strcmp(table->names[i], name) == 0) return i;
    }
    return -1;
}

static mn_status add_names(mn_run_table *out, const mn_json *object) {
    for (mn_json member = { 0 }; mn_json_next(&member, object);) {
        if (mn_json_given(&member) && !json_is_number(member.value)) continue;
        if (column_of(out, member.name) >= 0) continue;
        if (out->n_columns == MAX_COLUMNS) {
            return mn_json_fail(object, "more than %d different names of numbers", MAX_COLUMNS);
        }
        out->names[out->n_columns] = strdup(member.name);
        if (!out->names[out->n_columns++]) return mn_fail(MN_ERR_MEMORY, "no memory for names");
    }
    return MN_OK;
}

static mn_status find_columns(mn_run_table *out, const void *bytes, size_t n_bytes,
                              const char *name) {
    lines l = { .text = bytes, .size = n_bytes, .name = name };
    out->names = calloc(MAX_COLUMNS, sizeof *out->names);
    if (!out->names) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", name);
    while (next_line(&l)) {
        out->n_rows++;
        l.status = add_names(out, &l.object);
    }
    mn_json_free(&l.object);
    return l.status;
}

static mn_status fill_columns(mn_run_table *out, const void *bytes, size_t n_bytes,
                              const char *name) {
    size_t n, size;
    if (!mn_mul_size(&n, (size_t)out->n_rows, (size_t)out->n_columns) ||
        !mn_mul_size(&size, n, sizeof *out->values) || !(out->values = malloc(size + 1))) {
        return mn_fail(MN_ERR_MEMORY, "%s: no memory for %" PRId64 " lines of %" PRId64 " numbers",
                       name, out->n_rows, out->n_columns);
    }
    for (size_t i = 0; i < n; i++) out->values[i] = NAN;
    lines l = { .text = bytes, .size = n_bytes, .name = name };
    for (int64_t row = 0; next_line(&l); row++) {
        for (mn_json member = { 0 }; mn_json_next(&member, &l.object);) {
            if (!json_is_number(member.value)) continue;
            const int64_t column = column_of(out, member.name);
            out->values[column * out->n_rows + row] = json_number_value(member.value);
        }
    }
    mn_json_free(&l.object);
    return l.status;
}

mn_status mn_run_table_parse(mn_run_table *out, const void *bytes, size_t n_bytes,
                             const char *name) {
    *out = (mn_run_table){ 0 };
    mn_status st = find_columns(out, bytes, n_bytes, name);
    if (st == MN_OK) st = fill_columns(out, bytes, n_bytes, name);
    if (st != MN_OK) mn_run_table_free(out);
    return st;
}

mn_status mn_run_table_load(mn_run_table *out, const char *path) {
    *out = (mn_run_table){ 0 };
    mn_file file = { 0 };
    mn_status st = mn_file_map(&file, path);
    if (st == MN_OK) st = mn_run_table_parse(out, file.bytes, file.size, path);
    mn_file_unmap(&file);
    return st;
}

const double *mn_run_table_column(const mn_run_table *table, const char *name) {
    const int64_t column = column_of(table, name);
    return column < 0 ? NULL : table->values + column * table->n_rows;
}

void mn_run_table_free(mn_run_table *table) {
    if (!table) return;
    for (int64_t i = 0; i < table->n_columns; i++) free(table->names[i]);
    free(table->names);
    free(table->values);
    *table = (mn_run_table){ 0 };
}
