/* curves.c - from metrics.jsonl to curves: which numbers, along what, smoothed how.
 *
 * The mean at a point is over the N points around it, fewer at both ends, so it does not lag. */
#define _XOPEN_SOURCE 700       // strdup, realpath under -std=c11
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/plot/plot.h"
#include "io/closest.h"
#include "io/json.h"
#include "train/run/run_log.h"
#include "train/run/run_read.h"

static const char *const axes[] = { "step", "tokens", "seconds" };

bool mn_plot_find_axis(mn_plot_axis *out, const char *name) {
    for (size_t i = 0; i < MN_COUNTOF(axes); i++) {
        if (strcmp(name, axes[i]) != 0) continue;
        *out = (mn_plot_axis)i;
        return true;
    }
    return false;
}

/* ---- curves ---------------------------------------------------------------------------------- */

static mn_status new_line(mn_plot_line *out, int64_t n) {
    size_t bytes;
    *out = (mn_plot_line){ 0 };
    if (mn_mul_size(&bytes, (size_t)n + 1, sizeof *out->x)) {
        out->x = malloc(bytes);
        out->y = malloc(bytes);
    }
    return out->x && out->y ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a curve");
}

static void free_line(mn_plot_line *line) {
    free(line->x);
    free(line->y);
    *line = (mn_plot_line){ 0 };
}

/* Rows that hold the number. A row without the x (a line of validation only) has that of the row
 * before it, if both are of one step. */
static mn_status take_points(mn_plot_line *out, const mn_run_table *table, const char *key,
                             mn_plot_axis axis) {
    const double *y = mn_run_table_column(table, key);
    const double *step = mn_run_table_column(table, "step");
    const double *along = mn_run_table_column(table, axes[axis]);
    const mn_status st = new_line(out, table->n_rows);
    if (st != MN_OK || !y || !along || !step) return st;
    double x = NAN;
    for (int64_t row = 0; row < table->n_rows; row++) {
        if (row > 0 && step[row] != step[row - 1]) x = NAN;
        if (!isnan(along[row])) x = along[row];
        if (isnan(x) || isnan(y[row])) continue;
        out->x[out->n] = x;
        out->y[out->n++] = y[row];
    }
    return MN_OK;
}

static mn_status smooth(mn_plot_curve *curve, int64_t window) {
    const mn_plot_line *p = &curve->points;
    curve->smoothed = window > 1 && p->n > 4 * window;
    if (!curve->smoothed) window = 1;
    const mn_status st = new_line(&curve->mean, p->n);
    if (st != MN_OK) return st;
    curve->mean.n = p->n;
    for (int64_t i = 0; i < p->n; i++) {
        const int64_t from = mn_max(0, i - window / 2), to = mn_min(p->n, i - window / 2 + window);
        double sum = 0.0;
        for (int64_t j = from; j < to; j++) sum += p->y[j];
        curve->mean.x[i] = p->x[i];
        curve->mean.y[i] = sum / (double)(to - from);
    }
    return MN_OK;
}

/* Keeps lowest and highest of each of `spans` stretches: what can be seen at that width. */
static void thin_extremes(mn_plot_line *line, int64_t spans) {
    if (line->n <= 2 * spans) return;
    int64_t n = 0;
    for (int64_t s = 0; s < spans; s++) {
        const int64_t from = line->n * s / spans, to = line->n * (s + 1) / spans;
        int64_t low = from, high = from;
        for (int64_t i = from; i < to; i++) {
            if (line->y[i] < line->y[low]) low = i;
            if (line->y[i] > line->y[high]) high = i;
        }
        const int64_t kept[2] = { mn_min(low, high), mn_max(low, high) };
        for (int i = 0; i < 2; i++, n++) {              // n never passes what is still to be read
            line->x[n] = line->x[kept[i]];
            line->y[n] = line->y[kept[i]];
        }
    }
    line->n = n;
}

static mn_status add_curve(mn_plot *plot, const mn_run_table *table, int run, int key) {
    enum { SPANS = 700 };
    mn_plot_curve curve = { .run = run, .key = key };
    mn_status st = take_points(&curve.points, table, plot->keys[key], plot->axis);
    const int64_t n = curve.points.n;
    const int64_t window = plot->smooth > 0 ? plot->smooth : n / 100;
    if (st == MN_OK && n > 0) st = smooth(&curve, window);
    if (st == MN_OK && n > 0) {
        thin_extremes(&curve.points, SPANS);
        thin_extremes(&curve.mean, SPANS);
        plot->curves[plot->n_curves++] = curve;
        return MN_OK;
    }
    free_line(&curve.points);
    free_line(&curve.mean);
    return st;
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* "loss, lr, tokens" into a buffer, cut where it is full. */
static void list_names(char *out, size_t room, const char *const names[], int64_t n) {
    size_t used = 0;
    out[0] = '\0';
    for (int64_t i = 0; i < n && used < room; i++) {
        const int more = snprintf(out + used, room - used, "%s%s", i > 0 ? ", " : "", names[i]);
        if (more > 0) used += (size_t)more;
    }
}

static mn_status fail_keys(const char *path, const mn_plot *plot, const mn_run_table *table) {
    char wanted[200], present[300];
    list_names(wanted, sizeof wanted, plot->keys, plot->n_keys);
    list_names(present, sizeof present, (const char *const *)table->names, table->n_columns);
    const char *axis = axes[plot->axis];
    if (!mn_run_table_column(table, axis)) {
        return mn_fail(MN_ERR_FORMAT, "%s: no \"%s\" to draw along; there are %s", path, axis,
                       present);
    }
    return mn_fail(MN_ERR_FORMAT, "%s: no numbers for %s; there are %s", path, wanted, present);
}

static bool is_folder(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static mn_status load(mn_run_table *out, const char *path) {
    char file[4096];
    struct stat info;
    const bool folder = is_folder(path);
    const int n = snprintf(file, sizeof file, "%s%s", path, folder ? "/" MN_RUN_METRICS : "");
    if (n < 0 || (size_t)n >= sizeof file) return mn_fail(MN_ERR_ARGUMENT, "%s: too long", path);
    if (folder && stat(file, &info) != 0) {
        return mn_fail(MN_ERR_IO, "%s: holds no " MN_RUN_METRICS ": is it the folder of a run?",
                       path);
    }
    mn_status st = mn_run_table_load(out, file);
    if (st == MN_OK && out->n_rows == 0) {
        mn_run_table_free(out);
        st = mn_fail(MN_ERR_FORMAT, "%s: holds no metrics yet", file);
    }
    return st;
}

static mn_status read_run(mn_plot *plot, int run, bool has_key[MN_PLOT_KEYS]) {
    mn_run_table table;
    mn_status st = load(&table, plot->paths[run]);
    if (st != MN_OK) return st;
    const int before = plot->n_curves;
    for (int key = 0; key < plot->n_keys && st == MN_OK; key++) {
        const int curves = plot->n_curves;
        st = add_curve(plot, &table, run, key);
        has_key[key] = has_key[key] || plot->n_curves > curves;
    }
    if (st == MN_OK && plot->n_curves == before) st = fail_keys(plot->paths[run], plot, &table);
    mn_run_table_free(&table);
    return st;
}

/* Last part of the path; of where it leads when that says nothing. */
static char *last_part(const char *path) {
    char *whole = strdup(path), *real = NULL;
    if (!whole) return NULL;
    for (size_t n = strlen(whole); n > 1 && whole[n - 1] == '/'; n--) whole[n - 1] = '\0';
    const char *slash = strrchr(whole, '/');
    const char *part = slash && slash[1] ? slash + 1 : whole;
    if (strspn(part, ".") == strlen(part) && (real = realpath(path, NULL))) {
        part = strrchr(real, '/') && strrchr(real, '/')[1] ? strrchr(real, '/') + 1 : real;
    }
    char *out = strdup(part);
    free(whole);
    free(real);
    return out;
}

static mn_status name_runs(mn_plot *plot) {
    bool whole = false;                       // two runs of one name: paths tell them apart
    for (int i = 0; i < plot->n_runs; i++) {
        plot->names[i] = last_part(plot->paths[i]);
        if (!plot->names[i]) return mn_fail(MN_ERR_MEMORY, "no memory for the names of runs");
        for (int j = 0; j < i; j++) whole = whole || strcmp(plot->names[i], plot->names[j]) == 0;
    }
    for (int i = 0; i < plot->n_runs; i++) {
        if (whole) {
            free(plot->names[i]);
            plot->names[i] = strdup(plot->paths[i]);
            if (!plot->names[i]) return mn_fail(MN_ERR_MEMORY, "no memory for the names of runs");
        }
        for (char *c = plot->names[i]; *c; c++) {
            if ((unsigned char)*c < ' ') *c = '?';
        }
    }
    return MN_OK;
}

/* The layers of a run as its settings have them, new: "gdn" or a list; NULL without any. */
static char *layers_of(const char *path) {
    char file[4096];
    const int n = snprintf(file, sizeof file, "%s/settings.json", path);
    mn_json settings = { 0 };
    char *out = NULL;
    if (n < 0 || (size_t)n >= sizeof file || !is_folder(path)) return NULL;
    if (mn_json_load(&settings, file, MN_JSON_PYTHON) != MN_OK) return NULL;
    const json_t *model = json_object_get(settings.value, "model");
    const json_t *layers = json_object_get(model, "layers");
    if (!layers) layers = json_object_get(model, "model_type");
    if (layers) out = json_dumps(layers, JSON_ENCODE_ANY);
    mn_json_free(&settings);
    return out;
}

/* Runs of one layer share a colour where there are several layers; else each run has its own. */
static void share_colours(mn_plot *plot) {
    char *layers[MN_PLOT_RUNS];
    int n_colours = 0;
    for (int i = 0; i < plot->n_runs; i++) {
        int same = 0;
        layers[i] = layers_of(plot->paths[i]);
        while (same < i && !(layers[i] && layers[same] && strcmp(layers[i], layers[same]) == 0)) {
            same++;
        }
        plot->colour[i] = same < i ? plot->colour[same] : n_colours++;
    }
    for (int i = 0; i < plot->n_runs; i++) {
        if (n_colours == 1) plot->colour[i] = i;
        free(layers[i]);
    }
}

static bool is_loss(const char *key) {
    const size_t n = strlen(key);
    return n >= 4 && strcmp(key + n - 4, "loss") == 0;
}

static void share_out_panels(mn_plot *plot) {
    plot->n_panels = 0;
    for (int key = 0; key < plot->n_keys; key++) {
        if (is_loss(plot->keys[key])) plot->n_panels = 1;
    }
    for (int key = 0; key < plot->n_keys; key++) {
        plot->panel[key] = is_loss(plot->keys[key]) ? 0 : plot->n_panels++;
    }
}

/* Units in which the longest run is a handy number. */
static void scale_axis(mn_plot *plot) {
    static const struct {
        mn_plot_axis axis;
        double from, scale;
        const char *label;
    } units[] = {
        { MN_PLOT_TOKENS, 2e9, 1e-9, "tokens (billions)" },
        { MN_PLOT_TOKENS, 2e6, 1e-6, "tokens (millions)" },
        { MN_PLOT_TOKENS, 2e4, 1e-3, "tokens (thousands)" },
        { MN_PLOT_SECONDS, 2.0 * 86400.0, 1.0 / 86400.0, "days" },
        { MN_PLOT_SECONDS, 7200.0, 1.0 / 3600.0, "hours" },
        { MN_PLOT_SECONDS, 300.0, 1.0 / 60.0, "minutes" },
        { MN_PLOT_STEP, 1e6, 1e-3, "step (thousands)" },
    };
    double most = 0.0;
    for (int i = 0; i < plot->n_curves; i++) {
        const mn_plot_line *line = &plot->curves[i].points;
        most = fmax(most, line->x[line->n - 1]);
    }
    plot->x_scale = 1.0;
    snprintf(plot->x_label, sizeof plot->x_label, "%s", axes[plot->axis]);
    for (size_t i = 0; i < MN_COUNTOF(units); i++) {
        if (units[i].axis != plot->axis || most < units[i].from) continue;
        plot->x_scale = units[i].scale;
        snprintf(plot->x_label, sizeof plot->x_label, "%s", units[i].label);
        return;
    }
}

mn_status mn_plot_read(mn_plot *plot, bool asked) {
    bool has_key[MN_PLOT_KEYS] = { false };
    mn_status st = name_runs(plot);
    if (st == MN_OK) share_colours(plot);
    for (int run = 0; run < plot->n_runs && st == MN_OK; run++) st = read_run(plot, run, has_key);
    for (int key = 0; key < plot->n_keys && st == MN_OK && asked; key++) {
        if (has_key[key]) continue;
        mn_run_table table;
        st = load(&table, plot->paths[0]);
        if (st != MN_OK) break;
        const char *const *names = (const char *const *)table.names;
        char present[300];
        list_names(present, sizeof present, names, table.n_columns);
        const char *near = mn_closest(plot->keys[key], names, table.n_columns);
        st = mn_fail(MN_ERR_ARGUMENT, "no run has numbers for \"%s\"%s%s%s; there are %s",
                     plot->keys[key], near ? ", did you mean \"" : "", near ? near : "",
                     near ? "\"?" : "", present);
        mn_run_table_free(&table);
    }
    share_out_panels(plot);
    if (st == MN_OK) scale_axis(plot);
    return st;
}

void mn_plot_free_curve(mn_plot_curve *curve) {
    free_line(&curve->points);
    free_line(&curve->mean);
    free(curve->half);
    curve->half = NULL;
}

void mn_plot_free(mn_plot *plot) {
    for (int i = 0; i < plot->n_runs; i++) free(plot->names[i]);
    for (int i = 0; i < plot->n_curves; i++) mn_plot_free_curve(&plot->curves[i]);
    plot->n_curves = plot->n_runs = 0;
}
