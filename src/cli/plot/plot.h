/* plot.h - curves of runs, read from metrics.jsonl, and the two ways to draw them. */
#ifndef MN_CLI_PLOT_PLOT_H
#define MN_CLI_PLOT_PLOT_H

#include <stdbool.h>
#include <stdint.h>

#include "mneme.h"

enum { MN_PLOT_RUNS = 32, MN_PLOT_KEYS = 16 };

typedef enum mn_plot_axis { MN_PLOT_STEP, MN_PLOT_TOKENS, MN_PLOT_SECONDS } mn_plot_axis;

/* Points from left to right. */
typedef struct mn_plot_line {
    int64_t n;
    double *x, *y;
} mn_plot_line;

/* One number of one run. */
typedef struct mn_plot_curve {
    int run, key;
    mn_plot_line points;      // as measured
    mn_plot_line mean;        // smoothed; the same points when there is nothing to smooth
    bool smoothed;
    double *half;             // of a mean over seeds: its standard error at each point; or NULL
    bool banded;              // some of them are not 0
} mn_plot_curve;

/* What is drawn. Keys that end in "loss" share the first panel, each other key has its own. */
typedef struct mn_plot {
    const char *paths[MN_PLOT_RUNS];
    char *names[MN_PLOT_RUNS];          // for the legend
    int colour[MN_PLOT_RUNS];           // runs of one layer share one
    int n_runs;
    const char *keys[MN_PLOT_KEYS];
    int panel[MN_PLOT_KEYS];
    int n_keys, n_panels;
    mn_plot_axis axis;
    int64_t smooth;                     // points in a mean; 0: a hundredth of the curve
    bool log, log_x;
    bool sweep;                         // curves are means over seeds, colours stand for layers
    mn_plot_curve curves[MN_PLOT_RUNS * MN_PLOT_KEYS];
    int n_curves;
    double x_scale;                     // x of the drawing = x_scale * x of the curves
    char x_label[128];
} mn_plot;

/* Sets "step", "tokens" or "seconds"; false for anything else. */
bool mn_plot_find_axis(mn_plot_axis *out, const char *name);

/* Reads the runs and fills names, panels, curves and the scale of x. Fails when a run has no
 * metrics, or none of the keys, and when nobody has a key that was asked for (`asked`). */
mn_status mn_plot_read(mn_plot *plot, bool asked);

/* The same of a sweep: means over seeds with standard errors, along "step" or an axis of its
 * grid. */
mn_status mn_plot_read_sweep(mn_plot *plot, const char *folder, const char *along, bool asked);
bool mn_plot_is_sweep(const char *folder);

void mn_plot_free_curve(mn_plot_curve *curve);

/* Frees names and curves. */
void mn_plot_free(mn_plot *plot);

/* Draws with gnuplot into the file at `out`: PNG if it ends in .png, else SVG; with `both` also the
 * other. The script stays beside it only when gnuplot is missing or fails. */
mn_status mn_plot_draw(const mn_plot *plot, const char *out, bool both);

/* Draws with characters on standard output. */
mn_status mn_plot_print(const mn_plot *plot);

#endif
