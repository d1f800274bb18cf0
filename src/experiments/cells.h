/* cells.h - the numbers of a report: means over seeds, at the best of the settings tried, beside
 * what the paper prints.
 *
 *   table   {"title", "rows": axis, "columns": axis, "value": way into a result, "percent": true,
 *            "values": {column: way} in place of columns and value, "exact": true,
 *            "columns_until": text: columns whose labels are the same before it are one,
 *            "figure": "bars" or "lines", "where": {axis: label}: only runs with these labels}
 *
 * A cell is what its row and column label have in common. Labels other than these and the seed are
 * settings that were tried: the setting with the highest mean over seeds is the cell's. */
#ifndef MN_EXPERIMENTS_CELLS_H
#define MN_EXPERIMENTS_CELLS_H

#include <stdbool.h>
#include <stdint.h>

#include "io/json.h"
#include "mneme.h"

enum { MN_CELL_NAME = 128 };

typedef struct mn_cell {
    char row[MN_CELL_NAME], column[MN_CELL_NAME];
    char setting[MN_CELL_NAME];     // "train.lr=0.001", "" when nothing was tried
    int64_t n, missing;             // seeds measured; failed
    double mean, se, most;          // se of the mean: NAN for one seed; most: of the best seed
    const char *printed, *place;    // the paper's, or NULL; borrowed from the results
    double paper;                   // NAN without
} mn_cell;

typedef struct mn_cells {
    const char *title, *figure;     // borrowed; figure may be NULL
    bool percent, exact;
    mn_cell *items;                 // in the order of the results
    int64_t n;
    int64_t n_rows, n_columns;
    char (*rows)[MN_CELL_NAME], (*columns)[MN_CELL_NAME];
} mn_cells;

/* The cells of table `table` of a results.json, which must outlive them. */
mn_status mn_cells_make(mn_cells *out, const mn_json *results, int64_t table);
void mn_cells_free(mn_cells *cells);

/* NULL: nothing was planned there. */
const mn_cell *mn_cells_at(const mn_cells *cells, const char *row, const char *column);

/* Whether our number, rounded to the digits printed, is the printed one. */
bool mn_cell_agrees(const mn_cell *cell, bool percent);

#endif
