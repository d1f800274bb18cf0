/* figures.c - the two figures of the deterministic experiment, as gnuplot scripts over
 * the CSV files: recall (the paper's Figure 3 a, b) and dynamics (its Figure 6). Each script
 * writes an SVG and a PNG. */
#include <math.h>

#include "base/util.h"
#include "cli/collide/collide.h"
#include "cli/plot/gnuplot.h"

/* A curve: which column, how it is called and drawn. */
typedef struct curve {
    mn_collision_rule rule;
    const char *label, *color;
    double width;
    int dash;
} curve;

static const curve curves[] = {
    { MN_COLLISION_LINEAR, "linear, gla, mamba2", "#8c8c8c", 2.0, 1 },
    { MN_COLLISION_ATTENTION, "attention", "#5b5b5b", 1.5, 3 },
    { MN_COLLISION_LONGHORN, "longhorn", "#a6761d", 1.5, 1 },
    { MN_COLLISION_KLA, "kla", "#7b4fa3", 1.5, 1 },
    { MN_COLLISION_PALIMPSA_PAPER, "palimpsa", "#c8508c", 1.5, 1 },
    { MN_COLLISION_MESA, "mesa", "#1b9e77", 1.5, 1 },
    { MN_COLLISION_DIAG, "bayes, diagonal P", "#5aa9e6", 2.0, 2 },
    { MN_COLLISION_DELTA, "delta, gdn, kda, reset", "#d95f02", 2.5, 1 },
    { MN_COLLISION_BAYES, "bayes", "#0b4f9c", 3.0, 1 },
};

enum { N_CURVES = MN_COUNTOF(curves) };

static const char *color_of(mn_collision_rule rule) {
    for (int i = 0; i < N_CURVES; i++) {
        if (curves[i].rule == rule) return curves[i].color;
    }
    return "#000000";
}

/* ---- the parts of a script ------------------------------------------------------------------- */

static void place_panel(FILE *out, double left, double right, const char *title) {
    fprintf(out, "set lmargin at screen %g\nset rmargin at screen %g\n", left, right);
    fputs("set bmargin at screen 0.14\nset tmargin at screen 0.86\n", out);
    fprintf(out, "set label \"%s\" at graph 0, graph 1.12 left\n", title);
}

/* Shades seed, boost and flood and names them above the panel. */
static void draw_phases(FILE *out, const mn_collide *c) {
    const double seed = (double)(c->boost_end - c->setup.n_boost) + 0.5;
    const double boost = (double)c->boost_end + 0.5, end = (double)c->length + 0.5;
    const double from[] = { 0.5, seed, boost }, to[] = { seed, boost, end };
    static const char *const names[] = { "seed", "boost B", "flood A" };
    static const char *const fills[] = { "#f2f2f2", "#e9f3ee", "#fdf0e3" };
    for (int i = 0; i < 3; i++) {
        if (to[i] <= from[i]) continue;
        fprintf(out,
                "set object %d rect from %g, graph 0 to %g, graph 1 fc rgb '%s' fs solid noborder "
                "behind\n",
                i + 1, from[i], to[i], fills[i]);
        fprintf(out, "set label '%s' at %g, graph 1.035 center tc rgb '#707070'\n", names[i],
                0.5 * (from[i] + to[i]));
    }
    fprintf(out, "set xrange [0.5:%g]\nset xlabel 'token'\n", end);
}

static void clear_marks(FILE *out) {
    fputs("unset object\nunset label\nunset arrow\n", out);
}

/* A closed form: a dotted line across the flood, or across everything. */
static void draw_limit(FILE *out, double from, double to, double y, const char *color) {
    fprintf(out, "set arrow from %g, %g to %g, %g nohead lc rgb '%s' lw 1.2 dt 3 front\n", from, y,
            to, y, color);
}

static void draw_curve(FILE *out, const curve *line, const char *file, const char *x, bool first) {
    fprintf(
        out,
        "%s '%s' using (column('%s')):(column('%s')) with lines lc rgb '%s' lw %g dt %d title '%s'",
        first ? "plot" : ", \\\n    ", file, x, mn_collision_name(line->rule), line->color,
        line->width, line->dash, line->label);
}

/* Names of the curves beside their last values, pushed apart where these are close. */
static void name_curves(FILE *out, const mn_collide *c) {
    const double gap = 0.047;
    int order[N_CURVES];
    double at[N_CURVES];
    for (int i = 0; i < N_CURVES; i++) {
        const double p = c->points[curves[i].rule][c->length - 1].p;
        int place = i;
        for (; place > 0 && c->points[curves[order[place - 1]].rule][c->length - 1].p > p;
             place--) {
            order[place] = order[place - 1];
        }
        order[place] = i;
    }
    for (int i = 0; i < N_CURVES; i++) {
        at[i] = c->points[curves[order[i]].rule][c->length - 1].p;
    }
    for (int round = 0; round < 200; round++) {
        for (int i = 1; i < N_CURVES; i++) {
            const double push = 0.5 * fmax(0.0, gap - (at[i] - at[i - 1]));
            at[i - 1] -= push;
            at[i] += push;
        }
    }
    for (int i = 0; i < N_CURVES; i++) {
        fprintf(out, "set label '%s' at graph 1.02, first %g left tc rgb '%s'\n",
                curves[order[i]].label, at[i], curves[order[i]].color);
    }
}

/* ---- recall ---------------------------------------------------------------------------------- */

static void recall_over_time(FILE *out, const mn_collide *c) {
    char title[128];
    const double end = (double)c->length + 0.5, boost = (double)c->boost_end + 0.5;
    snprintf(title, sizeof title, "{/:Bold a}  Asked for B: how much of it is left (ρ = %g)",
             c->setup.rho);
    place_panel(out, 0.065, 0.435, title);
    draw_phases(out, c);
    draw_limit(out, 0.5, end, c->theory.boost_p, "#505050");
    draw_limit(out, boost, end, c->theory.bayes_p, color_of(MN_COLLISION_BAYES));
    draw_limit(out, boost, end, c->theory.reset_p, color_of(MN_COLLISION_DELTA));
    name_curves(out, c);
    fputs("set yrange [0:1.02]\nset ylabel 'probability of B'\n", out);
    for (int i = 0; i < N_CURVES; i++) draw_curve(out, &curves[i], "retrieval.csv", "t", i == 0);
    fputs("\n", out);
    clear_marks(out);
}

static double highest_variance(const mn_collide *c) {
    double highest = 0.0;
    for (int64_t t = 0; t < c->length; t++) {
        const mn_collision_point *point = &c->points[MN_COLLISION_BAYES][t];
        highest = fmax(highest, fmax(point->var_a, point->var_b));
    }
    return highest;
}

/* Variances along k_A and k_B; the predicted growth starts where a line of that slope ends. */
static void variance_over_time(FILE *out, const mn_collide *c) {
    static const struct {
        mn_collision_rule rule;
        const char *file, *color;
        int dash;
    } lines[] = {
        { MN_COLLISION_DIAG, "variance_a.csv", "#e08214", 2 },
        { MN_COLLISION_DIAG, "variance_b.csv", "#1a9988", 2 },
        { MN_COLLISION_BAYES, "variance_a.csv", "#e08214", 1 },
        { MN_COLLISION_BAYES, "variance_b.csv", "#1a9988", 1 },
    };
    const mn_collision_point *last = &c->points[MN_COLLISION_BAYES][c->length - 1];
    const double start = (double)c->boost_end + 1.0, end = (double)c->length;
    const double offset = 0.035, before = last->var_b - c->theory.var_b_rate * (end - start);
    place_panel(out, 0.665, 0.965, "{/:Bold b}  Variance along k_A and k_B (dashed: diagonal P)");
    draw_phases(out, c);
    draw_limit(out, start, end, c->theory.var_a, "#505050");
    fprintf(out, "set arrow from %g, %g to %g, %g nohead lc rgb '#505050' lw 1.2 dt 3 front\n",
            start, before + offset, end, last->var_b + offset);
    if (c->setup.n_flood >= 20) {
        fprintf(out,
                "set label \"predicted slope\\n(1 − ρ²) ℓ² = %.4f\" "
                "at %g, graph 0.95 left tc rgb '#404040'\n",
                c->theory.var_b_rate, start + 2.0);
    }
    fprintf(out, "set label 'k_B' at graph 1.015, first %g left tc rgb '#1a9988'\n", last->var_b);
    fprintf(out, "set label 'k_A' at graph 1.015, first %g left tc rgb '#e08214'\n", last->var_a);
    fprintf(out, "set yrange [0:%g]\nset ylabel 'variance of the answer'\n",
            1.3 * highest_variance(c));
    for (size_t i = 0; i < MN_COUNTOF(lines); i++) {
        const curve line = { lines[i].rule, "", lines[i].color, lines[i].dash == 1 ? 2.5 : 1.5,
                             lines[i].dash };
        draw_curve(out, &line, lines[i].file, "t", i == 0);
    }
    fputs("\n", out);
    clear_marks(out);
}

static void recall(FILE *out, const mn_collide *c) {
    fputs("set encoding utf8\n", out);
    mn_gnuplot_begin(out, "recall", "Retrieval of B and the variance along both addresses over "
                     "time.", 1280, 520, 2);
    recall_over_time(out, c);
    variance_over_time(out, c);
    mn_gnuplot_end(out);
}

/* ---- dynamics -------------------------------------------------------------------------------- */

static void gain_over_time(FILE *out, const mn_collide *c) {
    static const mn_collision_rule shown[] = { MN_COLLISION_DELTA, MN_COLLISION_DIAG,
                                               MN_COLLISION_BAYES };
    const double boost = (double)c->boost_end + 0.5, end = (double)c->length + 0.5;
    place_panel(out, 0.065, 0.465, "{/:Bold a}  Gain of each write, β k^Tu");
    draw_phases(out, c);
    draw_limit(out, 0.5, end, c->theory.gain_floor, "#505050");
    fprintf(out, "set label 'floor g_{ss} = %.3f' at %g, %g left tc rgb '#404040'\n",
            c->theory.gain_floor, boost + 16.0, c->theory.gain_floor + 0.045);
    fprintf(out, "set label 'first flood write: %.2f' at %g, %g left tc rgb '%s'\n",
            c->theory.onset_gain, boost + 3.0, c->theory.onset_gain, color_of(MN_COLLISION_BAYES));
    fputs("set yrange [0:1.05]\nset ylabel 'gain'\nset key bottom right Left reverse invert "
          "samplen 2.5 "
          "tc rgb '#404040'\n",
          out);
    for (size_t i = 0; i < MN_COUNTOF(shown); i++) {
        for (int n = 0; n < N_CURVES; n++) {
            if (curves[n].rule == shown[i]) draw_curve(out, &curves[n], "gain.csv", "t", i == 0);
        }
    }
    fputs("\n", out);
    clear_marks(out);
}

static void retrieval_over_overlap(FILE *out, const mn_collide *c) {
    place_panel(out, 0.555, 0.965, "{/:Bold b}  Left of B after the flood, by overlap");
    fprintf(out,
            "set xrange [0:1]\nset xlabel 'overlap ρ'\nset yrange [0:1.02]\n"
            "set ylabel 'probability of B at t = %lld'\n",
            (long long)c->length);
    fputs(
        "set key at graph 0.03, graph 0.03 left bottom Left reverse invert samplen 2.5 tc rgb "
        "'#404040'\n"
        "set arrow from graph 0, first 0.5 to graph 1, first 0.5 nohead lc rgb '#b0b0b0' lw 0.7\n",
        out);
    fprintf(out, "set arrow from %g, graph 0 to %g, graph 1 nohead lc rgb '#b0b0b0' lw 0.7 dt 2\n",
            c->setup.rho, c->setup.rho);
    fprintf(out, "set label 'ρ = %g' at %g, graph 1.035 center tc rgb '#707070'\n", c->setup.rho,
            c->setup.rho);
    for (int i = 0; i < N_CURVES; i++) {
        draw_curve(out, &curves[i], "overlap_curve.csv", "rho", i == 0);
    }
    fputs("\n", out);
    clear_marks(out);
}

static void dynamics(FILE *out, const mn_collide *c) {
    fputs("set encoding utf8\n", out);
    mn_gnuplot_begin(out, "dynamics", "Gain of the writes over time, and what is left of B by "
                     "overlap.", 1280, 520, 2);
    gain_over_time(out, c);
    retrieval_over_overlap(out, c);
    mn_gnuplot_end(out);
}

static void overlap_curve(FILE *out, const mn_collide *c) {
    fputs("rho", out);
    for (int n = 0; n < N_CURVES; n++) fprintf(out, ",%s", mn_collision_name(curves[n].rule));
    fputc('\n', out);
    for (int i = 0; i < MN_COLLIDE_CURVE; i++) {
        fprintf(out, "%.2f", c->curve_overlap[i]);
        for (int n = 0; n < N_CURVES; n++) fprintf(out, ",%.10g", c->curve[i][curves[n].rule]);
        fputc('\n', out);
    }
}

mn_status mn_collide_write_figures(const mn_collide *c, const char *folder) {
    mn_status st = mn_collide_write_csv(c, folder);
    if (st == MN_OK) st = mn_collide_write_file(c, folder, "overlap_curve.csv", overlap_curve);
    if (st == MN_OK) st = mn_collide_write_file(c, folder, "recall.gp", recall);
    if (st == MN_OK) st = mn_collide_write_file(c, folder, "dynamics.gp", dynamics);
    if (st == MN_OK) st = mn_gnuplot_run(folder, "recall.gp");
    if (st == MN_OK) st = mn_gnuplot_run(folder, "dynamics.gp");
    return st;
}
