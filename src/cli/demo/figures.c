/* figures.c - the two figures of the demo, as gnuplot scripts over its CSV files: loss against
 * the floor, and answers by distance and by number of updates. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/demo/demo.h"
#include "cli/plot/gnuplot.h"

static const char *const colors[MN_DEMO_MODELS] = { "#0b4f9c", "#d95f02", "#1b9e77", "#7b4fa3" };

/* ---- loss ------------------------------------------------------------------------------------ */

/* Points at the end of the curves: how far above the floor a model is on the stories held out. Rows
 * of training begin inside of stories too, where nobody knows what was before. */
static void held_out(FILE *out, const mn_demo *demo) {
    for (int i = 0; i < demo->n_models; i++) {
        fprintf(out, "set label '' at graph 1, first %.6g point pt 7 ps 1.2 lc rgb '%s' front\n",
                demo->data.floor + demo->models[i].result.gap, colors[i]);
    }
}

/* Where the steep start is over: a tenth of the way. */
static double top_of(const mn_demo *demo) {
    double top = 0.0;
    for (int i = 0; i < demo->n_models; i++) {
        const mn_demo_model *m = &demo->models[i];
        for (int64_t p = m->n_points / 10; p < m->n_points; p++) top = fmax(top, m->points[p].loss);
    }
    return top;
}

static void loss(FILE *out, const mn_demo *demo) {
    const double floor = demo->data.floor, top = fmax(top_of(demo), floor + 0.05);
    const double room = 0.08 * (top - floor);
    mn_gnuplot_begin(out, "loss", "Loss during training, and the entropy of the source.", 860, 520,
                     1);
    fputs("set bmargin at screen 0.14\nset tmargin at screen 0.94\nset lmargin at screen 0.11\n"
          "set rmargin at screen 0.97\nset xlabel 'million tokens'\n"
          "set ylabel 'bits per token'\n"
          "set key top right Left reverse samplen 2.5 tc rgb '#404040'\n", out);
    const mn_demo_model *first = &demo->models[0];
    fprintf(out, "set xrange [0:%.6g]\nset yrange [%.6g:%.6g]\n",
            1e-6 * (double)first->points[first->n_points - 1].tokens, floor - room,
            top + 2.0 * room);
    fprintf(out, "set arrow from graph 0, first %.6g to graph 1, first %.6g nohead lc rgb '#404040'"
            " lw 1.5 dt 2 front\n", floor, floor);
    fprintf(out, "set label 'floor: entropy of the source, %.4f' at graph 0.02, first %.6g left tc "
            "rgb '#404040' front\n", floor, floor - 0.45 * room);
    held_out(out, demo);
    for (int i = 0; i < demo->n_models; i++) {
        fprintf(out, "%s 'loss.csv' using (column('tokens')*1e-6):(column('%s')) with lines lc rgb "
                "'%s' lw 2 title '%s'", i == 0 ? "plot" : ", \\\n    ", demo->models[i].name,
                colors[i], demo->models[i].name);
    }
    fprintf(out, ", \\\n    NaN with points pt 7 ps 1.2 lc rgb '#707070' title '"
            "whole stories held out'\n");
    mn_gnuplot_end(out);
}

/* ---- recall ---------------------------------------------------------------------------------- */

/* Groups [first, first + count), which are lines `first` and on of the file, counted from 0. */
static void panel(FILE *out, const mn_demo *demo, const char *title, const char *label,
                  double left, double right, int first, int count) {
    const double chance = 100.0 * mn_demo_chance(&demo->data);
    fprintf(out, "set lmargin at screen %g\nset rmargin at screen %g\n", left, right);
    fprintf(out, "set label 1 '{/:Bold %s}' at graph 0, graph 1.07 left\nset xlabel '%s'\n", title,
            label);
    fprintf(out, "set xrange [-0.5:%g]\nset yrange [0:104]\nset xtics (", count - 0.5);
    for (int i = 0; i < count; i++) {
        fprintf(out, "%s'%s' %d", i == 0 ? "" : ", ", mn_demo_group_name(first + i), i);
    }
    fprintf(out, ")\nset arrow 1 from graph 0, first %g to graph 1, first %g nohead lc rgb "
            "'#909090' dt 3\nset label 2 'guessing' at graph 0.01, first %g left tc rgb "
            "'#707070'\n", chance, chance, chance - 3.0);
    for (int i = 0; i < demo->n_models; i++) {
        const char *name = demo->models[i].name;
        fprintf(out, "%s 'recall.csv' every ::%d::%d using ($0+%g):(100*column('%s'))"
                ":(100*column('%s error')) with yerrorlines lc rgb '%s' lw 2 pt 7 ps 0.8 "
                "title '%s'", i == 0 ? "plot" : ", \\\n    ", first, first + count - 1,
                0.03 * (i - 0.5 * (demo->n_models - 1)), name, name, colors[i], name);
    }
    fputc('\n', out);
}

static void recall(FILE *out, const mn_demo *demo) {
    mn_gnuplot_begin(out, "recall", "Questions answered, by distance and by number of updates.",
                     1180, 520, 2);
    fputs("set bmargin at screen 0.14\nset tmargin at screen 0.84\n"
          "set ylabel 'right answers, %'\n"
          "set key at screen 0.975, screen 0.985 top right horizontal Left reverse samplen 2 "
          "tc rgb '#404040'\n",
          out);
    panel(out, demo, "By distance", "tokens since the place was said", 0.075, 0.56, 1,
          MN_DEMO_DISTANCES);
    fputs("set key off\nunset ylabel\n", out);
    panel(out, demo, "By updates", "times the object was put or taken", 0.64, 0.975,
          1 + MN_DEMO_DISTANCES, MN_DEMO_UPDATES);
    mn_gnuplot_end(out);
}

/* ---- public ---------------------------------------------------------------------------------- */

static mn_status write_script(const mn_demo *demo, const char *name,
                              void (*script)(FILE *out, const mn_demo *demo)) {
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s", demo->options->out, name) >= (int)sizeof path) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", demo->options->out);
    }
    FILE *out = fopen(path, "w");
    if (!out) return mn_fail(MN_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    script(out, demo);
    const bool good = !ferror(out);
    if (fclose(out) == 0 && good) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
}

mn_status mn_demo_draw(const mn_demo *demo) {
    mn_status st = write_script(demo, "loss.gp", loss);
    if (st == MN_OK) st = write_script(demo, "recall.gp", recall);
    if (st == MN_OK) st = mn_gnuplot_run(demo->options->out, "loss.gp");
    if (st == MN_OK) st = mn_gnuplot_run(demo->options->out, "recall.gp");
    return st;
}
