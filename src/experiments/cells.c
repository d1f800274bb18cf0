/* cells.c - means over seeds, and the best of the settings that were tried. */
#include "experiments/cells.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "experiments/job_internal.h"

enum { MOST_SEEDS = 64 };

/* The results of one setting in one cell, by seed: a seed with several runs counts their mean. */
typedef struct trial {
    char row[MN_CELL_NAME], column[MN_CELL_NAME], setting[MN_CELL_NAME];
    int64_t n, missing;
    double seed[MOST_SEEDS], sum[MOST_SEEDS];    // NAN: a run without a seed
    int64_t runs[MOST_SEEDS];
} trial;

typedef struct trials {
    trial *items;
    int64_t n;
} trials;

static void put_value(char text[MN_CELL_NAME], const json_t *value) {
    if (json_is_string(value)) snprintf(text, MN_CELL_NAME, "%s", json_string_value(value));
    else if (json_is_number(value)) snprintf(text, MN_CELL_NAME, "%g", json_number_value(value));
    else text[0] = '\0';
}

/* The labels of a run that are neither row, column nor seed, nor the same in all of the table. */
static void put_setting(char text[MN_CELL_NAME], json_t *labels, const char *rows,
                        const char *columns, const json_t *where) {
    const char *key;
    json_t *value;
    text[0] = '\0';
    json_object_foreach(labels, key, value) {
        char one[MN_CELL_NAME];
        const size_t n = strlen(text);
        if (strcmp(key, rows) == 0 || strcmp(key, columns) == 0 || strcmp(key, "seed") == 0) {
            continue;
        }
        if (json_object_get(where, key)) continue;
        put_value(one, value);
        const char *comma = n > 0 ? ", " : "";
        const int put = snprintf(text + n, MN_CELL_NAME - n, "%s%s=%s", comma, key, one);
        if (put < 0 || (size_t)put >= MN_CELL_NAME - n) return;    // the name is cut, not the row
    }
}

static trial *trial_of(trials *all, const char *row, const char *column, const char *setting) {
    for (int64_t i = 0; i < all->n; i++) {
        trial *t = &all->items[i];
        if (strcmp(t->row, row) == 0 && strcmp(t->column, column) == 0 &&
            strcmp(t->setting, setting) == 0) {
            return t;
        }
    }
    trial *t = &all->items[all->n++];
    memset(t, 0, sizeof *t);
    snprintf(t->row, MN_CELL_NAME, "%s", row);
    snprintf(t->column, MN_CELL_NAME, "%s", column);
    snprintf(t->setting, MN_CELL_NAME, "%s", setting);
    return t;
}

/* A run that has not been made yet counts for nothing. */
static void count(trial *t, const json_t *value, const json_t *seed, bool failed) {
    const double own = json_is_number(seed) ? json_number_value(seed) : NAN;
    int64_t i = 0;
    if (!json_is_number(value)) {
        t->missing += failed;
        return;
    }
    while (i < t->n && t->seed[i] != own) i++;
    if (i == t->n && i < MOST_SEEDS) t->seed[t->n++] = own;
    if (i == MOST_SEEDS) i--;
    t->sum[i] += json_number_value(value);
    t->runs[i]++;
}

static double mean_of_seed(const trial *t, int64_t i) {
    return t->sum[i] / (double)t->runs[i];
}

static bool has_labels(const json_t *labels, const json_t *where) {
    const char *key;
    json_t *label;
    json_object_foreach((json_t *)(uintptr_t)where, key, label) {
        if (!json_equal(label, json_object_get(labels, key))) return false;
    }
    return true;
}

/* One run into the trials of its row. */
static void count_run(trials *all, const json_t *run, const json_t *table) {
    const char *rows = json_string_value(json_object_get(table, "rows"));
    const char *columns = json_string_value(json_object_get(table, "columns"));
    const char *way = json_string_value(json_object_get(table, "value")), *name;
    json_t *labels = json_object_get(run, "labels"), *values = json_object_get(table, "values");
    char row[MN_CELL_NAME], column[MN_CELL_NAME], setting[MN_CELL_NAME];
    json_t *at;
    const json_t *where = json_object_get(table, "where");
    if (!has_labels(labels, where) || json_object_get(labels, "pilot")) return;
    if (!rows) rows = "";
    if (!columns) columns = "";
    put_value(row, json_object_get(labels, rows));
    put_value(column, json_object_get(labels, columns));
    put_setting(setting, labels, rows, columns, where);
    const char *until = json_string_value(json_object_get(table, "columns_until"));
    char *end = until ? strstr(column, until) : NULL;
    if (end) *end = '\0';
    const json_t *seed = json_object_get(labels, "seed");
    const json_t *result = json_object_get(run, "result");
    const char *status = json_string_value(json_object_get(run, "status"));
    /* a run that came out without this number has no such answers */
    const bool failed = !status || (strcmp(status, "not run") != 0 && strcmp(status, "ok") != 0);
    if (!values) {
        if (!row[0]) return;        // a run of another table
        if (columns[0] && !column[0]) return;
        count(trial_of(all, row, column, setting), mn_spec_get(result, way ? way : "score"),
              seed, failed);
        return;
    }
    json_object_foreach(values, name, at) {
        /* a smaller preset leaves out some; a run that failed says nothing about that */
        if (result && !mn_spec_get(result, json_string_value(at))) continue;
        count(trial_of(all, row, name, setting), mn_spec_get(result, json_string_value(at)),
              seed, failed);
    }
}

static double mean_of(const trial *t) {
    double sum = 0.0;
    for (int64_t i = 0; i < t->n; i++) sum += mean_of_seed(t, i);
    return t->n > 0 ? sum / (double)t->n : -INFINITY;
}

/* The mean's standard error, from the deviations between seeds. */
static double error_of(const trial *t) {
    if (t->n < 2) return NAN;
    const double mean = mean_of(t), n = (double)t->n;
    double squares = 0.0;
    for (int64_t i = 0; i < t->n; i++) {
        squares += (mean_of_seed(t, i) - mean) * (mean_of_seed(t, i) - mean);
    }
    return sqrt(squares / (n - 1.0) / n);
}

static double most_of(const trial *t) {
    double most = -INFINITY;
    for (int64_t i = 0; i < t->n; i++) most = fmax(most, mean_of_seed(t, i));
    return most;
}

static void take_trial(mn_cell *cell, const trial *t) {
    *cell = (mn_cell){ .n = t->n, .missing = t->missing, .se = error_of(t), .paper = NAN,
                       .mean = t->n > 0 ? mean_of(t) : NAN,
                       .most = t->n > 0 ? most_of(t) : NAN };
    memcpy(cell->row, t->row, MN_CELL_NAME);
    memcpy(cell->column, t->column, MN_CELL_NAME);
    memcpy(cell->setting, t->setting, MN_CELL_NAME);
}

static void add_name(char (*names)[MN_CELL_NAME], int64_t *n, const char *name) {
    for (int64_t i = 0; i < *n; i++) {
        if (strcmp(names[i], name) == 0) return;
    }
    snprintf(names[(*n)++], MN_CELL_NAME, "%s", name);
}

/* The best setting of each row and column. */
static void choose(mn_cells *out, const trials *all) {
    for (int64_t i = 0; i < all->n; i++) {
        const trial *t = &all->items[i];
        mn_cell *cell = (mn_cell *)(uintptr_t)mn_cells_at(out, t->row, t->column);
        if (!cell) {
            cell = &out->items[out->n++];
            take_trial(cell, t);
            add_name(out->rows, &out->n_rows, t->row);
            add_name(out->columns, &out->n_columns, t->column);
        } else if (mean_of(t) > (cell->n > 0 ? cell->mean : -INFINITY)) {
            take_trial(cell, t);
        }
    }
}

static void add_paper(mn_cells *out, const mn_json *results, int64_t table) {
    const json_t *numbers = json_object_get(results->value, "paper_numbers");
    for (size_t i = 0; i < json_array_size(numbers); i++) {
        const json_t *one = json_array_get(numbers, i);
        const char *row = json_string_value(json_object_get(one, "row"));
        const char *column = json_string_value(json_object_get(one, "column"));
        if (json_integer_value(json_object_get(one, "table")) != table || !row || !column) continue;
        mn_cell *cell = (mn_cell *)(uintptr_t)mn_cells_at(out, row, column);
        if (!cell) continue;
        cell->printed = json_string_value(json_object_get(one, "printed"));
        cell->place = json_string_value(json_object_get(one, "place"));
        if (cell->printed) cell->paper = strtod(cell->printed, NULL);
        if (out->percent) cell->paper /= 100.0;
    }
}

mn_status mn_cells_make(mn_cells *out, const mn_json *results, int64_t table) {
    const mn_json tables = mn_json_member(results, "tables"), at = mn_json_item(&tables, table);
    const mn_json runs = mn_json_member(results, "runs");
    *out = (mn_cells){ 0 };
    mn_status st = mn_json_expect_object(&at);
    if (st == MN_OK) st = mn_json_expect_list(&runs);
    if (st == MN_OK) st = mn_json_get_text(&out->title, &at, "title");
    if (st == MN_OK) st = mn_json_opt_text(&out->figure, &at, "figure");
    if (st == MN_OK) st = mn_json_opt_bool(&out->percent, &at, "percent");
    if (st == MN_OK) st = mn_json_opt_bool(&out->exact, &at, "exact");
    if (st != MN_OK) return st;
    const size_t values = json_object_size(json_object_get(at.value, "values"));
    const size_t most = json_array_size(runs.value) * (values > 0 ? values : 1) + 1;
    trials all = { .items = calloc(most, sizeof *all.items) };
    out->items = calloc(most, sizeof *out->items);
    out->rows = calloc(most, sizeof *out->rows);
    out->columns = calloc(most, sizeof *out->columns);
    if (all.items && out->items && out->rows && out->columns) {
        for (size_t i = 0; i < json_array_size(runs.value); i++) {
            count_run(&all, json_array_get(runs.value, i), at.value);
        }
        choose(out, &all);
        add_paper(out, results, table);
    } else {
        st = mn_fail(MN_ERR_MEMORY, "no memory for a table of %zu runs", most);
        mn_cells_free(out);
    }
    free(all.items);
    return st;
}

void mn_cells_free(mn_cells *cells) {
    free(cells->items);
    free(cells->rows);
    free(cells->columns);
    *cells = (mn_cells){ 0 };
}

const mn_cell *mn_cells_at(const mn_cells *cells, const char *row, const char *column) {
    for (int64_t i = 0; i < cells->n; i++) {
        const mn_cell *cell = &cells->items[i];
        if (strcmp(cell->row, row) == 0 && strcmp(cell->column, column) == 0) return cell;
    }
    return NULL;
}

bool mn_cell_agrees(const mn_cell *cell, bool percent) {
    char ours[64];
    if (!cell->printed || cell->n == 0) return false;
    const char *dot = strchr(cell->printed, '.');
    const int digits = dot ? (int)strlen(dot + 1) : 0;
    snprintf(ours, sizeof ours, "%.*f", digits, (percent ? 100.0 : 1.0) * cell->mean);
    return strtod(ours, NULL) == strtod(cell->printed, NULL);
}
