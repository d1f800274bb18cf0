/* script.c - curves as one gnuplot script that holds its own data. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/plot/gnuplot.h"
#include "cli/plot/plot.h"

/* Told apart by readers who see fewer colours too. */
static const char *const colors[] = { "0b4f9c", "d95f02", "1b9e77", "7b4fa3",
                                      "c8508c", "a6761d", "5aa9e6", "5b5b5b" };

enum { WIDTH = 960, HEIGHT_ONE = 540, HEIGHT_EACH = 300, PNG_SCALE = 2, KEY_INSIDE = 8 };

static const char *color_of(const mn_plot *plot, int run) {
    return colors[(size_t)plot->colour[run] % MN_COUNTOF(colors)];
}

static void put_line(FILE *out, const char *block, int index, const mn_plot_line *line,
                     double scale) {
    fprintf(out, "$%s%d << EOD\n", block, index);
    for (int64_t i = 0; i < line->n; i++) {
        fprintf(out, "%.9g %.9g\n", scale * line->x[i], line->y[i]);
    }
    fputs("EOD\n", out);
}

/* Mean less and mean more its standard error. */
static void put_band(FILE *out, int index, const mn_plot_curve *curve, double scale) {
    fprintf(out, "$band%d << EOD\n", index);
    for (int64_t i = 0; i < curve->mean.n; i++) {
        fprintf(out, "%.9g %.9g %.9g\n", scale * curve->mean.x[i],
                curve->mean.y[i] - curve->half[i], curve->mean.y[i] + curve->half[i]);
    }
    fputs("EOD\n", out);
}

static void put_data(FILE *out, const mn_plot *plot) {
    for (int i = 0; i < plot->n_curves; i++) {
        const mn_plot_curve *curve = &plot->curves[i];
        if (curve->smoothed) put_line(out, "points", i, &curve->points, plot->x_scale);
        put_line(out, "mean", i, &curve->mean, plot->x_scale);
        if (curve->banded) put_band(out, i, curve, plot->x_scale);
    }
}

/* All panels show the same stretch. */
static void put_x_range(FILE *out, const mn_plot *plot) {
    double low = INFINITY, high = -INFINITY;
    for (int i = 0; i < plot->n_curves; i++) {
        const mn_plot_line *line = &plot->curves[i].mean;
        if (line->n == 0) continue;
        low = fmin(low, plot->x_scale * line->x[0]);
        high = fmax(high, plot->x_scale * line->x[line->n - 1]);
    }
    const double room = low < high ? 0.0 : 0.5 * fmax(fabs(low), 1.0);    // around a single place
    if (low <= high) fprintf(out, "set xrange [%.9g:%.9g]\n", low - room, high + room);
}

static void put_terminal(FILE *out, const mn_plot *plot, bool png, const char *name) {
    const int height = plot->n_panels == 1 ? HEIGHT_ONE : HEIGHT_EACH * plot->n_panels;
    fputs("reset\n", out);
    if (png) {
        fprintf(out, "set terminal pngcairo size %d,%d font 'Sans,%d' linewidth %d noenhanced "
                "background '#ffffff'\n", PNG_SCALE * WIDTH, PNG_SCALE * height, 12 * PNG_SCALE,
                PNG_SCALE);
    } else {
        fprintf(out, "set terminal svg size %d,%d font 'Helvetica,14' noenhanced background "
                "'#ffffff'\n", WIDTH, height);
    }
    fputs("set output ", out);
    mn_gnuplot_put_text(out, name);
    fputs("\nset border 3 lc rgb '#404040'\nset tics nomirror tc rgb '#404040'\n"
          "set grid ytics lc rgb '#e6e6e6' lt 1 lw 0.5\nset format x '%.10g'\n"
          "set format y '%.6g'\nset lmargin 12\nset rmargin 4\n",
          out);
    if (plot->log) fputs("set logscale y\n", out);
    if (plot->log_x) fputs("set logscale x\n", out);
    put_x_range(out, plot);
}

/* Logarithmic heights within less than two decades: gnuplot would label powers of ten only, and
 * widen the range to them. */
static void put_log_range(FILE *out, const mn_plot *plot, int panel) {
    static const double marks[] = { 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0 };
    double low = INFINITY, high = 0.0;
    for (int i = 0; i < plot->n_curves; i++) {
        const mn_plot_line *line = &plot->curves[i].points;
        if (plot->panel[plot->curves[i].key] != panel) continue;
        for (int64_t p = 0; p < line->n; p++) {
            if (line->y[p] > 0.0) low = fmin(low, line->y[p]);
            if (isfinite(line->y[p])) high = fmax(high, line->y[p]);
        }
    }
    fputs("set yrange [*:*]\nset ytics autofreq\n", out);
    if (!(low > 0.0 && low <= high && high < 100.0 * low)) return;
    low /= 1.05;
    high *= 1.05;
    fprintf(out, "set yrange [%.9g:%.9g]\nset ytics (", low, high);
    const char *join = "";
    for (int power = (int)floor(log10(low)); power <= (int)floor(log10(high)); power++) {
        for (size_t i = 0; i < MN_COUNTOF(marks); i++) {
            fprintf(out, "%s%.9g", join, marks[i] * pow(10.0, power));
            join = ", ";
        }
    }
    fputs(")\n", out);
}

/* "loss, valid_loss" */
static void put_panel_label(FILE *out, const mn_plot *plot, int panel) {
    char label[256] = "";
    for (int key = 0; key < plot->n_keys; key++) {
        if (plot->panel[key] != panel) continue;
        const size_t n = strlen(label);
        snprintf(label + n, sizeof label - n, "%s%s", n > 0 ? ", " : "", plot->keys[key]);
    }
    const size_t n = strlen(label);
    if (n >= 4 && strcmp(label + n - 4, "loss") == 0) {
        snprintf(label + n, sizeof label - n, " (nats a token)");
    }
    fputs("set ylabel ", out);
    mn_gnuplot_put_text(out, label);
    fputs(" tc rgb '#404040'\n", out);
}

#define MARK " pt 7 ps 0.6"

/* Whether all curves of a key have few enough points to show each. */
static bool is_marked(const mn_plot *plot, int key) {
    for (int i = 0; i < plot->n_curves; i++) {
        if (plot->curves[i].key == key && plot->curves[i].mean.n > 60) return false;
    }
    return true;
}

/* Curves of one key: measured ones pale and thin under their mean. The first key of a panel is
 * solid, others are dashed with a mark at each point if these are few. */
static void put_curves(FILE *out, const mn_plot *plot, int panel, const char **join) {
    bool named[MN_PLOT_RUNS] = { false };
    for (int i = 0; i < plot->n_curves; i++) {
        const mn_plot_curve *curve = &plot->curves[i];
        if (plot->panel[curve->key] != panel || !curve->banded) continue;
        fprintf(out, "%s $band%d with filledcurves fc rgb '#D0%s' notitle", *join, i,
                color_of(plot, curve->run));
        *join = ", \\\n    ";
    }
    for (int i = 0; i < plot->n_curves; i++) {
        const mn_plot_curve *curve = &plot->curves[i];
        if (plot->panel[curve->key] != panel || !curve->smoothed) continue;
        fprintf(out, "%s $points%d with lines lc rgb '#C8%s' lw 1 notitle", *join, i,
                color_of(plot, curve->run));
        *join = ", \\\n    ";
    }
    for (int i = 0; i < plot->n_curves; i++) {
        const mn_plot_curve *curve = &plot->curves[i];
        if (plot->panel[curve->key] != panel) continue;
        int before = 0;                       // keys of this panel listed earlier
        for (int key = 0; key < curve->key; key++) before += plot->panel[key] == panel;
        for (int run = 0; run < curve->run; run++) {    // runs of one layer
            before += plot->colour[run] == plot->colour[curve->run];
        }
        const bool marked = is_marked(plot, curve->key);
        fprintf(out, "%s $mean%d with %s lc rgb '#%s' lw 2 dt %d%s ", *join, i,
                marked ? "linespoints" : "lines", color_of(plot, curve->run), before + 1,
                marked ? MARK : "");
        *join = ", \\\n    ";
        fputs(named[curve->run] ? "notitle" : "title ", out);
        if (!named[curve->run]) mn_gnuplot_put_text(out, plot->names[curve->run]);
        named[curve->run] = true;
    }
}

/* Which dashes mean which key, when there are several. */
static void put_key_styles(FILE *out, const mn_plot *plot, int panel, const char *join) {
    int n = 0, at = 0;
    for (int key = 0; key < plot->n_keys; key++) n += plot->panel[key] == panel;
    for (int key = 0; key < plot->n_keys && n > 1; key++) {
        if (plot->panel[key] != panel) continue;
        const bool marked = is_marked(plot, key);
        fprintf(out, "%s NaN with %s lc rgb '#909090' lw 2 dt %d%s title ", join,
                marked ? "linespoints" : "lines", ++at, marked ? MARK : "");
        mn_gnuplot_put_text(out, plot->keys[key]);
    }
}

static void put_figure(FILE *out, const mn_plot *plot, bool png, const char *name) {
    put_terminal(out, plot, png, name);
    if (plot->n_panels > 1) fprintf(out, "set multiplot layout %d,1\n", plot->n_panels);
    for (int panel = 0; panel < plot->n_panels; panel++) {
        const char *join = "plot";
        fprintf(out, "set key %s top Left reverse samplen 3 spacing 1.1 tc rgb '#404040'%s\n",
                plot->n_runs > KEY_INSIDE ? "outside right" : "inside right",
                plot->n_runs > KEY_INSIDE ? "\nset rmargin 28" : "");
        if (panel > 0) fputs("set key off\n", out);
        put_panel_label(out, plot, panel);
        if (plot->log) put_log_range(out, plot, panel);
        if (panel == plot->n_panels - 1) {
            fputs("set xlabel ", out);
            mn_gnuplot_put_text(out, plot->x_label);
            fputs(" tc rgb '#404040'\n", out);
        }
        put_curves(out, plot, panel, &join);
        put_key_styles(out, plot, panel, join);
        fputc('\n', out);
    }
    fputs(plot->n_panels > 1 ? "unset multiplot\nunset output\n" : "unset output\n", out);
}

/* ---- files ----------------------------------------------------------------------------------- */

static bool ends_in(const char *text, const char *ending) {
    const size_t n = strlen(text), m = strlen(ending);
    return n >= m && strcmp(text + n - m, ending) == 0;
}

/* Where things go: `folder`, and names inside it. */
typedef struct place {
    char *folder, *first, *second, *script;
    bool png;                                 // `first` is PNG, `second` SVG
} place;

static void free_place(place *p) {
    free(p->folder);
    free(p->first);
    free(p->second);
    free(p->script);
}

static char *joined(const char *start, size_t n, const char *ending) {
    char *out = malloc(n + strlen(ending) + 1);
    if (!out) return NULL;
    memcpy(out, start, n);
    strcpy(out + n, ending);
    return out;
}

static char *named(const char *start, const char *name, size_t n, const char *ending) {
    char *whole = joined(start, strlen(start), name);
    if (!whole) return NULL;
    char *out = joined(whole, strlen(start) + n, ending);
    free(whole);
    return out;
}

static mn_status find_place(place *p, const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t stem = strlen(name);
    if (stem == 0) return mn_fail(MN_ERR_ARGUMENT, "%s: is a folder, expected a file name", path);
    p->png = ends_in(name, ".png");
    if (p->png || ends_in(name, ".svg")) stem -= 4;
    p->folder = slash ? joined(path, (size_t)(name - path), "") : joined(".", 1, "");
    /* "./": gnuplot runs what is behind a leading | or <, and takes a leading - for an option */
    p->first = named("./", name, strlen(name), "");
    p->second = named("./", name, stem, p->png ? ".svg" : ".png");
    p->script = named("./", name, strlen(name), ".gp");
    if (p->folder && p->first && p->second && p->script) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "%s: out of memory", path);
}

/* Where they are not needed, UTF-8 only makes gnuplot complain about plain locales. */
static bool has_foreign_letters(const mn_plot *plot) {
    for (int i = 0; i < plot->n_runs; i++) {
        for (const char *c = plot->names[i]; *c; c++) {
            if ((unsigned char)*c >= 0x80) return true;
        }
    }
    for (int i = 0; i < plot->n_keys; i++) {
        for (const char *c = plot->keys[i]; *c; c++) {
            if ((unsigned char)*c >= 0x80) return true;
        }
    }
    return false;
}

/* First line of our scripts: what begins otherwise is somebody else's and stays. */
static const char mark[] = "# drawn by mneme plot\n";

static bool is_ours(const char *path) {
    char line[sizeof mark] = "";
    FILE *file = fopen(path, "r");
    if (!file) return errno == ENOENT;
    const bool ours = fgets(line, sizeof line, file) && strcmp(line, mark) == 0;
    fclose(file);
    return ours;
}

static mn_status write_script(const mn_plot *plot, const place *p, const char *path, bool both) {
    if (!is_ours(path)) {
        return mn_fail(MN_ERR_IO, "%s: is in the way of the script for gnuplot and not ours; move "
                       "it, or choose another -o", path);
    }
    FILE *out = fopen(path, "w");
    if (!out) return mn_fail(MN_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    fputs(mark, out);
    if (has_foreign_letters(plot)) fputs("set encoding utf8\n", out);
    put_data(out, plot);
    put_figure(out, plot, p->png, p->first);
    if (both) put_figure(out, plot, !p->png, p->second);
    const bool good = !ferror(out);
    if (fclose(out) == 0 && good) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
}

mn_status mn_plot_draw(const mn_plot *plot, const char *out, bool both) {
    place p = { 0 };
    mn_status st = find_place(&p, out);
    char *path = NULL;
    if (st == MN_OK) {
        const size_t n = strlen(p.folder);
        char *start = joined(p.folder, n, p.folder[n - 1] == '/' ? "" : "/");
        path = start ? joined(start, strlen(start), p.script + 2) : NULL;    // without "./"
        free(start);
        if (!path) st = mn_fail(MN_ERR_MEMORY, "%s: out of memory", out);
    }
    if (st == MN_OK) st = write_script(plot, &p, path, both);
    if (st == MN_OK) st = mn_gnuplot_run(p.folder, p.script);
    if (st == MN_OK) unlink(path);
    free(path);
    free_place(&p);
    return st;
}
