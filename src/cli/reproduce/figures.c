/* figures.c - tables as bars or lines with error bars, and the two figures of the
 * collision experiment. */
#include "cli/reproduce/reproduce.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "cli/collide/collide.h"
#include "cli/plot/gnuplot.h"
#include "cli/reproduce/reproduce_internal.h"
#include "experiments/cells.h"
#include "io/file.h"

enum { PATH = 4096, NAME = 32, WIDTH = 960, HEIGHT = 540 };

static const char *const colors[] = { "0b4f9c", "d95f02", "1b9e77", "7b4fa3",
                                      "c8508c", "a6761d", "5aa9e6", "5b5b5b" };

static const char *color_of(int64_t i) {
    return colors[(size_t)i % (sizeof colors / sizeof *colors)];
}

/* Where a row's number stands: bars side by side, points of a line a little apart. */
static double place_of(const mn_cells *c, int64_t row, int64_t column, bool bars) {
    const double width = bars ? 0.8 : 0.12;
    return (double)column + width * (((double)row + 0.5) / (double)c->n_rows - 0.5);
}

/* One block a row: place, mean, error. */
static void put_data(FILE *out, const mn_cells *c, bool bars) {
    const double scale = c->percent ? 100.0 : 1.0;
    for (int64_t r = 0; r < c->n_rows; r++) {
        fprintf(out, "$row%" PRId64 " << EOD\n", r);
        for (int64_t k = 0; k < c->n_columns; k++) {
            const mn_cell *cell = mn_cells_at(c, c->rows[r], c->columns[k]);
            if (!cell || cell->n == 0) continue;
            fprintf(out, "%.6g %.9g %.9g\n", place_of(c, r, k, bars), scale * cell->mean,
                    isnan(cell->se) ? 0.0 : scale * cell->se);
        }
        fputs("EOD\n", out);
        fprintf(out, "$paper%" PRId64 " << EOD\n", r);
        for (int64_t k = 0; k < c->n_columns; k++) {
            const mn_cell *cell = mn_cells_at(c, c->rows[r], c->columns[k]);
            if (!cell || isnan(cell->paper)) continue;
            fprintf(out, "%.6g %.9g\n", place_of(c, r, k, bars), scale * cell->paper);
        }
        fputs("EOD\n", out);
    }
}

static bool has_paper(const mn_cells *c, int64_t row) {
    for (int64_t i = 0; i < c->n; i++) {
        if (strcmp(c->items[i].row, c->rows[row]) == 0 && !isnan(c->items[i].paper)) return true;
    }
    return false;
}

static bool has_data(const mn_cells *c, int64_t row) {
    for (int64_t i = 0; i < c->n; i++) {
        if (strcmp(c->items[i].row, c->rows[row]) == 0 && c->items[i].n > 0) return true;
    }
    return false;
}

static void put_terminal(FILE *out, bool png, const char *name) {
    if (png) {
        fprintf(out, "set terminal pngcairo size %d,%d font 'Sans,24' linewidth 2 noenhanced "
                "background '#ffffff'\nset output '%s.png'\n", 2 * WIDTH, 2 * HEIGHT, name);
    } else {
        fprintf(out, "set terminal svg size %d,%d font 'Helvetica,14' noenhanced background "
                "'#ffffff'\nset output '%s.svg'\n", WIDTH, HEIGHT, name);
    }
}

static void put_axes(FILE *out, const mn_cells *c) {
    fputs("set border 3 lc rgb '#404040'\nset tics nomirror tc rgb '#404040'\n"
          "set grid ytics lc rgb '#e6e6e6' lt 1 lw 0.5\nset key outside right top\nset title ",
          out);
    mn_gnuplot_put_text(out, c->title);
    if (c->percent) fputs("\nset ylabel 'percent'\nset yrange [0:105]", out);
    fputs("\nset xtics (", out);
    for (int64_t k = 0; k < c->n_columns; k++) {
        if (k > 0) fputs(", ", out);
        mn_gnuplot_put_text(out, c->columns[k]);
        fprintf(out, " %" PRId64, k);
    }
    fprintf(out, ")\nset xrange [-0.6:%" PRId64 ".6]\nset boxwidth %.4g\n"
            "set style fill solid 0.85\nset errorbars 0.5\n", c->n_columns - 1,
            0.72 / (double)c->n_rows);
}

static void put_plot(FILE *out, const mn_cells *c, bool bars) {
    const char *join = "plot ";
    bool any = false;
    for (int64_t r = 0; r < c->n_rows; r++) {
        if (!has_data(c, r)) continue;
        fprintf(out, "%s$row%" PRId64 " using 1:2%s lc rgb '#%s'%s title ", join, r,
                bars ? " with boxes" : " with linespoints pt 7 ps 0.8", color_of(r),
                bars ? "" : " lw 2");
        mn_gnuplot_put_text(out, c->rows[r]);
        fprintf(out, ", $row%" PRId64 " using 1:2:3 with yerrorbars pt 0 lc rgb '#303030' notitle",
                r);
        if (has_paper(c, r)) {
            fprintf(out, ", $paper%" PRId64 " using 1:2 with points pt 9 ps 1.2 lc rgb '#000000' ",
                    r);
            fputs(any ? "notitle" : "title 'paper'", out);
            any = true;
        }
        join = ", ";
    }
    fputc('\n', out);
}

static mn_status write_script(const mn_cells *c, const char *folder, const char *name) {
    char path[PATH], *text = NULL;
    size_t size = 0;
    const bool bars = strcmp(c->figure, "bars") == 0;
    if (snprintf(path, sizeof path, "%s/%s.gp", folder, name) >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", folder);
    }
    FILE *out = open_memstream(&text, &size);
    if (!out) return mn_fail(MN_ERR_MEMORY, "no memory for %s", path);
    put_data(out, c, bars);
    for (int png = 0; png < 2; png++) {
        put_terminal(out, png != 0, name);
        put_axes(out, c);
        put_plot(out, c, bars);
    }
    const bool whole = fclose(out) == 0;
    const mn_status st = whole ? mn_file_write_bytes(path, text, size)
                               : mn_fail(MN_ERR_MEMORY, "no memory for %s", path);
    free(text);
    return st;
}

static bool any_data(const mn_cells *c) {
    for (int64_t r = 0; r < c->n_rows; r++) {
        if (has_data(c, r)) return true;
    }
    return false;
}

/* The figure of a table, its name in `figures`. */
static mn_status draw_table(json_t *figures, const mn_json *results, int64_t table,
                            const char *folder) {
    mn_cells cells;
    char name[NAME], script[NAME + 8];
    mn_status st = mn_cells_make(&cells, results, table);
    if (st != MN_OK) return st;
    snprintf(name, sizeof name, "table-%" PRId64, table + 1);
    snprintf(script, sizeof script, "%s.gp", name);
    if (cells.figure && any_data(&cells)) {
        st = write_script(&cells, folder, name);
        if (st == MN_OK) st = mn_gnuplot_run(folder, script);
        if (st == MN_OK) json_array_append_new(figures, json_sprintf("%s.svg", name));
    }
    mn_cells_free(&cells);
    return st;
}

static mn_status draw_collision(json_t *figures, const char *folder) {
    mn_collide *c = calloc(1, sizeof *c);
    if (!c) return mn_fail(MN_ERR_MEMORY, "no memory for the collision experiment");
    c->setup = mn_collision_default();
    mn_status st = mn_collide_compute(c, true);
    if (st == MN_OK) st = mn_collide_write_csv(c, folder);
    if (st == MN_OK) st = mn_collide_write_figures(c, folder);
    if (st == MN_OK) {
        json_array_append_new(figures, json_string("recall.svg"));
        json_array_append_new(figures, json_string("dynamics.svg"));
    }
    mn_collide_free(c);
    free(c);
    return st;
}

mn_status mn_reproduce_figures(const mn_json *results, const char *folder) {
    const mn_json tables = mn_json_member(results, "tables");
    const char *name = json_string_value(json_object_get(results->value, "experiment"));
    json_t *figures = json_array();
    mn_status st = figures ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for figures");
    for (int64_t i = 0; st == MN_OK && i < mn_json_count(&tables); i++) {
        st = draw_table(figures, results, i, folder);
    }
    if (st == MN_OK) st = mn_reproduce_pictures(figures, results, folder, true);
    if (st == MN_OK && name && strcmp(name, "collision") == 0) st = draw_collision(figures, folder);
    if (st == MN_ERR_UNSUPPORTED) {
        json_object_set_new(results->value, "no_figures",
                            json_string("gnuplot is not installed; the scripts lie beside this "
                                        "report"));
        st = MN_OK;
    }
    json_object_set_new(results->value, "figures", figures);
    return st;
}
