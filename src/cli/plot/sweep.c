/* sweep.c - curves of a sweep: means over seeds with their standard errors as bands, along the
 * steps of training or any axis of the grid. One colour for each label of the first other axis,
 * which is the layer in most grids. */
#define _XOPEN_SOURCE 700       // strdup under -std=c11
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/plot/plot.h"
#include "experiments/summary.h"
#include "experiments/sweep.h"

enum { PATH = 4096, TITLE = 160, MOST_POINTS = 4096 };

/* Where a number of a result is along training: curve rows are [step, loss, score]. */
typedef struct wanted {
    const char *key;
    int curve;               // 1 loss, 2 score; 0: not in curves
} wanted;

static double result_number(const json_t *run, const char *key) {
    const json_t *value = json_object_get(json_object_get(run, "result"), key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static mn_status new_points(mn_plot_curve *curve, int64_t n) {
    const size_t bytes = (size_t)(n + 1) * sizeof(double);
    curve->mean.x = malloc(bytes);
    curve->mean.y = malloc(bytes);
    curve->half = malloc(bytes);
    if (curve->mean.x && curve->mean.y && curve->half) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "no memory for a curve");
}

static void add_point(mn_plot_curve *curve, double x, const mn_estimate *e) {
    mn_plot_line *line = &curve->mean;
    if (e->n == 0 || !isfinite(x)) return;
    line->x[line->n] = x;
    line->y[line->n] = e->mean;
    curve->half[line->n++] = e->n > 1 ? e->se : 0.0;
    curve->banded |= e->n > 1;
}

/* The number over seeds at every step that some run was asked at. */
static mn_status along_steps(mn_plot_curve *curve, const mn_setting *at, const wanted *what) {
    const size_t n_runs = json_array_size(at->runs);
    size_t most = 0;
    for (size_t r = 0; r < n_runs; r++) {
        const json_t *run = json_array_get(at->runs, r);
        most += json_array_size(json_object_get(json_object_get(run, "result"), "curve"));
    }
    mn_status st = new_points(curve, (int64_t)most);
    double *values = malloc((n_runs + 1) * sizeof *values), last = -INFINITY;
    if (!values) st = mn_fail(MN_ERR_MEMORY, "no memory for a curve");
    while (st == MN_OK) {
        double next = INFINITY;
        int64_t n = 0;
        for (size_t r = 0; r < n_runs; r++) {
            size_t i;
            json_t *row;
            const json_t *run = json_array_get(at->runs, r);
            json_t *rows = json_object_get(json_object_get(run, "result"), "curve");
            json_array_foreach(rows, i, row) {
                const double step = json_number_value(json_array_get(row, 0));
                const json_t *value = json_array_get(row, (size_t)what->curve);
                if (step <= last || step > next || !json_is_number(value)) continue;
                if (step < next) n = 0;
                next = step;
                values[n++] = json_number_value(value);
                break;
            }
        }
        if (!isfinite(next)) break;
        const mn_estimate e = mn_estimate_of(values, n);
        add_point(curve, next, &e);
        last = next;
    }
    free(values);
    return st;
}

static double label_number(const char *label) {
    char *end;
    const double value = strtod(label, &end);
    return *label && !*end ? value : NAN;
}

/* Whether two settings differ at most along `axis`. */
static bool same_but(const mn_summary *s, const mn_setting *a, const mn_setting *b, int axis) {
    for (int i = 0; i < s->n_axes; i++) {
        if (i != axis && strcmp(a->labels[i], b->labels[i]) != 0) return false;
    }
    return true;
}

static int64_t place_of(const mn_summary *s, const mn_setting *at, int axis) {
    int64_t place = 0;
    for (int64_t i = 0; i < s->n; i++) {
        bool first = true;
        for (int64_t k = 0; k < i; k++) {
            first &= strcmp(s->settings[i].labels[axis], s->settings[k].labels[axis]) != 0;
        }
        if (strcmp(s->settings[i].labels[axis], at->labels[axis]) == 0) return place;
        place += first;
    }
    return place;
}

/* Labels that are numbers lie at them, others one beside the other. */
static double x_of(const mn_summary *s, const mn_setting *at, int axis, bool numbers) {
    return numbers ? label_number(at->labels[axis]) : (double)place_of(s, at, axis);
}

static mn_estimate estimate_of(const mn_setting *at, const wanted *what) {
    double values[256];
    const size_t n = mn_min(json_array_size(at->runs), MN_COUNTOF(values));
    for (size_t i = 0; i < n; i++) {
        values[i] = result_number(json_array_get(at->runs, i), what->key);
    }
    return mn_estimate_of(values, (int64_t)n);
}

static mn_status along_axis(mn_plot_curve *curve, const mn_summary *s, const mn_setting *first,
                            int axis, bool numbers, const wanted *what) {
    const mn_status st = new_points(curve, s->n);
    for (int64_t i = 0; st == MN_OK && i < s->n; i++) {
        const mn_setting *at = &s->settings[i];
        if (!same_but(s, first, at, axis)) continue;
        const mn_estimate e = estimate_of(at, what);
        add_point(curve, x_of(s, at, axis, numbers), &e);
    }
    mn_plot_line *line = &curve->mean;
    for (int64_t i = 1; i < line->n; i++) {              // by x, few points
        for (int64_t k = i; k > 0 && line->x[k] < line->x[k - 1]; k--) {
            double *const all[3] = { line->x, line->y, curve->half };
            for (int a = 0; a < 3; a++) {
                const double swap = all[a][k];
                all[a][k] = all[a][k - 1];
                all[a][k - 1] = swap;
            }
        }
    }
    return st;
}

/* The axis that colours stand for: the first that varies and is not along x. */
static int colour_axis(const mn_summary *s, int along) {
    for (int a = 0; a < s->n_axes; a++) {
        if (a != along && s->varies[a]) return a;
    }
    return -1;
}

static mn_status add_series(mn_plot *plot, const mn_summary *s, int64_t i, int axis, bool numbers) {
    char title[TITLE];
    const mn_setting *at = &s->settings[i];
    if (plot->n_runs == MN_PLOT_RUNS) {
        return mn_fail(MN_ERR_ARGUMENT, "more than %d curves; --x AXIS puts an axis of the grid "
                       "along the figure", MN_PLOT_RUNS);
    }
    const int run = plot->n_runs++, by = colour_axis(s, axis);
    mn_setting_title(title, sizeof title, s, at, axis);
    plot->names[run] = strdup(title);
    plot->colour[run] = by < 0 ? 0 : (int)place_of(s, at, by);
    if (!plot->names[run]) return mn_fail(MN_ERR_MEMORY, "no memory for a curve");
    mn_status st = MN_OK;
    for (int key = 0; key < plot->n_keys && st == MN_OK; key++) {
        const bool loss = strcmp(plot->keys[key], "loss") == 0;
        const bool score = strcmp(plot->keys[key], "score") == 0;
        const wanted what = { plot->keys[key], loss ? 1 : score ? 2 : 0 };
        mn_plot_curve *curve = &plot->curves[plot->n_curves];
        *curve = (mn_plot_curve){ .run = run, .key = key };
        if (axis < 0 && what.curve == 0) {
            return mn_fail(MN_ERR_ARGUMENT, "--key %s: along the steps there are score and loss; "
                           "--x AXIS draws other numbers of the results", what.key);
        }
        st = axis < 0 ? along_steps(curve, at, &what)
                      : along_axis(curve, s, at, axis, numbers, &what);
        plot->n_curves++;
        plot->panel[key] = key;
        if (st == MN_OK && curve->mean.n == 0) {
            plot->n_curves--;
            mn_plot_free_curve(curve);
        }
    }
    return st;
}

/* Whether labels are numbers, and whether they span decades. */
static void look_at_axis(mn_plot *plot, const mn_summary *s, int axis, bool *numbers) {
    double low = INFINITY, high = -INFINITY;
    *numbers = true;
    for (int64_t i = 0; i < s->n; i++) {
        const double value = label_number(s->settings[i].labels[axis]);
        *numbers &= isfinite(value);
        low = fmin(low, value);
        high = fmax(high, value);
    }
    plot->log_x = *numbers && low > 0.0 && high >= 8.0 * low;
    size_t n = (size_t)snprintf(plot->x_label, sizeof plot->x_label, "%s", s->axes[axis]);
    for (int64_t i = 0; !*numbers && i < s->n; i++) {
        bool first = true;
        const mn_setting *at = &s->settings[i];
        for (int64_t k = 0; k < i; k++) {
            first &= strcmp(at->labels[axis], s->settings[k].labels[axis]) != 0;
        }
        if (!first || n + 4 >= sizeof plot->x_label) continue;
        const int more = snprintf(plot->x_label + n, sizeof plot->x_label - n, "%s%d %s",
                                  i ? ", " : ": ", (int)place_of(s, at, axis), at->labels[axis]);
        n += more > 0 ? mn_min((size_t)more, sizeof plot->x_label - n - 1) : 0;
    }
}

static mn_status fill(mn_plot *plot, const mn_summary *s, const char *along) {
    const int axis = strcmp(along, "step") == 0 ? -1 : mn_summary_axis(s, along);
    bool numbers = false;
    mn_status st = MN_OK;
    if (axis < 0 && strcmp(along, "step") != 0) {
        char names[512] = "step";
        for (int a = 0; a < s->n_axes; a++) {
            const size_t n = strlen(names);
            snprintf(names + n, sizeof names - n, ", %s", s->axes[a]);
        }
        return mn_fail(MN_ERR_ARGUMENT, "--x %s: the axes of this sweep are %s", along, names);
    }
    plot->x_scale = 1.0;
    snprintf(plot->x_label, sizeof plot->x_label, "step");
    if (axis >= 0) look_at_axis(plot, s, axis, &numbers);
    for (int64_t i = 0; st == MN_OK && i < s->n; i++) {
        bool first = true;
        for (int64_t k = 0; k < i && axis >= 0; k++) {
            first &= !same_but(s, &s->settings[i], &s->settings[k], axis);
        }
        if (first) st = add_series(plot, s, i, axis, numbers);
    }
    plot->n_panels = plot->n_keys;
    if (st == MN_OK && plot->n_curves == 0) {
        st = mn_fail(MN_ERR_FORMAT, "no run of the sweep has numbers for %s%s", plot->keys[0],
                     plot->n_keys > 1 ? " and the others" : "");
    }
    return st;
}

bool mn_plot_is_sweep(const char *folder) {
    char path[PATH];
    if (snprintf(path, PATH, "%s/results.jsonl", folder) >= PATH) return false;
    FILE *file = fopen(path, "r");
    if (file) fclose(file);
    return file != NULL;
}

mn_status mn_plot_read_sweep(mn_plot *plot, const char *folder, const char *along, bool asked) {
    char path[PATH];
    json_t *records = NULL;
    mn_summary summary = { .best = -1 };
    mn_status st = MN_OK;
    if (snprintf(path, PATH, "%s/results.jsonl", folder) >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", folder);
    }
    plot->n_runs = 0;
    plot->sweep = true;
    st = mn_sweep_records(&records, path);
    if (st == MN_OK) st = mn_summary_make(&summary, records, NULL);
    if (st == MN_OK && summary.n == 0) st = mn_fail(MN_ERR_FORMAT, "%s: holds no result", path);
    if (st == MN_OK && !asked) {
        plot->n_keys = 0;
        if (summary.scored) plot->keys[plot->n_keys++] = "score";
        plot->keys[plot->n_keys++] = "loss";
    }
    if (st == MN_OK) st = fill(plot, &summary, along);
    mn_summary_free(&summary);
    json_decref(records);
    return st;
}
