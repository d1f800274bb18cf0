/* collide.c - mneme collide: the collision experiment of the Bayesian Layer paper (Appendix E)
 * on every layer that can take part, beside the closed forms it is held to. */
#include "cli/collide/collide.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"

static void print_help(void) {
    puts("usage: mneme collide [options]\n\n"
         "Two overlapping addresses A and B: all six identities are written, B is boosted, A is "
         "flooded,\n"
         "and B is asked for. Runs every layer of the table that can take part: key, value and "
         "query must\n"
         "be all that it learns at a token. Prints how much of B is left, the closed forms of the "
         "paper's\n"
         "Appendix E beside the run, the overlap sweep and the fixed-prior control.\n\n"
         "  --rho R         overlap of the two addresses, inside (-1, 1) (default 0.92)\n"
         "  --boost N       writes of B (default 40)\n"
         "  --flood N       writes of A (default 60)\n"
         "  --gamma G       contraction of the +ccq layers, 0 to 1 (default 0.5)\n"
         "  --json          everything as JSON, series included\n"
         "  --csv DIR       also write the series and tables as CSV files\n"
         "  --figures DIR   also draw the paper's two figures, as SVG and PNG (needs gnuplot)");
}

/* ---- compute --------------------------------------------------------------------------------- */

static mn_status run_all(mn_collide *c) {
    mn_status st = MN_OK;
    c->length = mn_collision_length(&c->setup);
    c->boost_end = c->length - c->setup.n_flood;
    for (int rule = 0; rule < MN_COLLISION_RULES && st == MN_OK; rule++) {
        c->points[rule] = c->length > 0 ? calloc((size_t)c->length, sizeof **c->points) : NULL;
        if (c->length > 0 && !c->points[rule]) {
            return mn_fail(MN_ERR_MEMORY, "no memory for the series");
        }
        st = mn_collision_run(c->points[rule], (mn_collision_rule)rule, &c->setup);
    }
    return st;
}

/* Rounding apart: rules of one family differ in the order of their operations. */
static bool same_answers(const mn_collide *c, int rule, int other) {
    for (int64_t t = 0; t < c->length; t++) {
        if (!(fabs(c->points[rule][t].p - c->points[other][t].p) < 1e-9)) return false;
    }
    return true;
}

static void find_families(mn_collide *c) {
    for (int rule = 0; rule < MN_COLLISION_RULES; rule++) {
        int first = 0;
        while (first < rule && !same_answers(c, rule, first)) first++;
        c->same_as[rule] = (mn_collision_rule)first;
    }
}

/* The last point of every rule at another overlap. */
static mn_status ends_at(mn_collision_point ends[MN_COLLISION_RULES], const mn_collide *c,
                         double rho) {
    mn_collision_setup setup = c->setup;
    mn_collision_point *points = calloc((size_t)c->length, sizeof *points);
    mn_status st = points ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a series");
    setup.rho = rho;
    for (int rule = 0; rule < MN_COLLISION_RULES && st == MN_OK; rule++) {
        st = mn_collision_run(points, (mn_collision_rule)rule, &setup);
        ends[rule] = points[c->length - 1];
    }
    free(points);
    return st;
}

static mn_status sweep_overlaps(mn_collide *c, bool with_curve) {
    static const double overlaps[MN_COLLIDE_OVERLAPS] = { 0.30, 0.45, 0.60, 0.75, 0.85,
                                                          0.90, 0.92, 0.95, 0.98, 0.99 };
    mn_collision_point ends[MN_COLLISION_RULES];
    mn_status st = MN_OK;
    for (int i = 0; i < MN_COLLIDE_OVERLAPS && st == MN_OK; i++) {
        c->overlap[i] = overlaps[i];
        st = ends_at(ends, c, overlaps[i]);
        for (int rule = 0; rule < MN_COLLISION_RULES; rule++) c->sweep[i][rule] = ends[rule].margin;
    }
    for (int i = 0; with_curve && i < MN_COLLIDE_CURVE && st == MN_OK; i++) {
        c->curve_overlap[i] = (double)i / MN_COLLIDE_CURVE;
        st = ends_at(ends, c, c->curve_overlap[i]);
        for (int rule = 0; rule < MN_COLLISION_RULES; rule++) c->curve[i][rule] = ends[rule].p;
    }
    return st;
}

static mn_status sweep_priors(mn_collide *c) {
    static const double priors[MN_COLLIDE_PRIORS] = { 0.01, 0.05, 0.10, 0.50, 1.0, 3.0 };
    mn_collision_point *points = calloc((size_t)c->length, sizeof *points);
    mn_status st = points ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a series");
    for (int at = 0; at < 2 && st == MN_OK; at++) {
        mn_collision_setup setup = c->setup;
        if (at == 1) setup.rho = 0.99;
        for (int i = 0; i < MN_COLLIDE_PRIORS && st == MN_OK; i++) {
            setup.c = c->prior[i].c = priors[i];
            st = mn_collision_run(points, MN_COLLISION_RESET, &setup);
            c->prior[i].gain = points[c->length - 1].gain;
            c->prior[i].margin[at] = points[c->length - 1].margin;
            c->prior[i].crossing[at] = mn_collision_crossing(points, &setup);
        }
        if (st == MN_OK) st = mn_collision_run(points, MN_COLLISION_BAYES, &setup);
        c->bayes_margin[at] = points[c->length - 1].margin;
    }
    free(points);
    return st;
}

mn_status mn_collide_compute(mn_collide *c, bool with_curve) {
    mn_status st = run_all(c);
    if (st != MN_OK) return st;
    find_families(c);
    mn_collision_predict(&c->theory, &c->setup, c->points[MN_COLLISION_BAYES],
                         c->points[MN_COLLISION_RESET], c->points[MN_COLLISION_LINEAR]);
    st = sweep_overlaps(c, with_curve);
    return st == MN_OK ? sweep_priors(c) : st;
}

void mn_collide_free(mn_collide *c) {
    for (int rule = 0; rule < MN_COLLISION_RULES; rule++) free(c->points[rule]);
}

int mn_collide_checks(mn_collide_check out[MN_COLLIDE_CHECKS], const mn_collide *c) {
    const mn_collision_theory *th = &c->theory;
    const mn_collision_point *bayes = c->points[MN_COLLISION_BAYES];
    const mn_collision_point *reset = c->points[MN_COLLISION_RESET];
    const mn_collision_point *linear = c->points[MN_COLLISION_LINEAR];
    const int64_t end = c->length, boost = c->boost_end;
    const bool flooded = c->setup.n_flood > 1, boosted = c->setup.n_boost > 0;
    int n = 0;
    if (boosted) {
        out[n++] = (mn_collide_check) { "boost plateau of p", "1/(1 + 1/e)", th->boost_p,
                                        bayes[boost - 1].p, boost };
    }
    if (!flooded) return n;
    out[n++] = (mn_collide_check) { "gain of the first flood write", "(40)", th->onset_gain,
                                    bayes[boost].gain, boost + 1 };
    out[n++] = (mn_collide_check) { "cosine between it and k_A", "(44)", th->onset_cosine,
                                    bayes[boost].cosine, boost + 1 };
    out[n++] =
        (mn_collide_check) { "the same after an endless boost", "(45)", th->cosine_limit, NAN, 0 };
    out[n++] = (mn_collide_check) { "gain under the flood", "(42)", th->gain_floor,
                                    bayes[end - 1].gain, end };
    out[n++] =
        (mn_collide_check) { "variance along k_A", "(37)", th->var_a, bayes[end - 1].var_a, end };
    out[n++] = (mn_collide_check) { "growth per write along k_B", "(38)", th->var_b_rate,
                                    bayes[end - 1].var_b - bayes[end - 2].var_b, end };
#define ANSWERS(name, field, where, series)                                                        \
    out[n++] =                                                                                     \
        (mn_collide_check) { name " b(A)", where, th->field##_b[0], series[end - 1].b[0], end };   \
    out[n++] =                                                                                     \
        (mn_collide_check) { name " b(B)", where, th->field##_b[1], series[end - 1].b[1], end };   \
    out[n++] = (mn_collide_check) { name " p", where, th->field##_p, series[end - 1].p, end };
    ANSWERS("bayes", bayes, "(57)", bayes)
    ANSWERS("reset", reset, "(52)", reset)
    ANSWERS("linear", linear, "b0 + n w rho", linear)
#undef ANSWERS
    return n;
}

const char *mn_collide_note(int index) {
    static const char *const notes[] = {
        "Tables E.4.2 and E.4.4 of the paper belong to overlap 0.99, not to the 0.92 its text "
        "states: there "
        "bayes ends at margin +0.20, reset at -0.44, and the fixed priors at -0.45 to -0.43. At "
        "0.92 they end "
        "where Appendix E.3 and table E.4.3 have them.",
        "The gain of about 2.0 that table E.4.4 gives the first flood write is the norm |beta u| "
        "at overlap "
        "0.92; the scalar gain beta k'u of that write is 0.91, as Appendix E.2 says.",
    };
    return index < (int)(sizeof notes / sizeof *notes) ? notes[index] : NULL;
}

/* ---- options --------------------------------------------------------------------------------- */

typedef struct options {
    bool json;
    const char *csv, *figures;
} options;

static bool read_real(double *out, const char *text) {
    char *end;
    errno = 0;
    *out = strtod(text, &end);
    return end != text && *end == '\0' && isfinite(*out);
}

static bool read_count(void *out, const char *text) {
    double x;
    if (!read_real(&x, text) || x < 0.0 || x > 1e6 || x != floor(x)) return false;
    *(int64_t *)out = (int64_t)x;
    return true;
}

static bool read_rho(void *to, const char *text) {
    double *rho = to;
    return read_real(rho, text) && fabs(*rho) < 1.0;
}

static bool read_gamma(void *to, const char *text) {
    double *gamma = to;
    return read_real(gamma, text) && *gamma >= 0.0 && *gamma <= 1.0;
}

static int parse(options *o, mn_collision_setup *s, int argc, char **argv) {
    static const char count[] = "a whole number from 0 to 1000000";
    const mn_option rows[] = {
        { "--rho", .read = read_rho, .to = &s->rho, .needs = "a number between -1 and 1" },
        { "--boost", .read = read_count, .to = &s->n_boost, .needs = count },
        { "--flood", .read = read_count, .to = &s->n_flood, .needs = count },
        { "--gamma", .read = read_gamma, .to = &s->gamma, .needs = "a number from 0 to 1" },
        { "--csv", .text = &o->csv },
        { "--figures", .text = &o->figures },
        { "--json", .flag = &o->json },
    };
    return mn_options_read(rows, MN_COUNTOF(rows), "collide", argc, argv);
}

static mn_status collide(const options *o, mn_collide *c) {
    mn_status st = mn_collide_compute(c, o->figures != NULL);
    if (st == MN_OK && o->json) st = mn_collide_print_json(c);
    else if (st == MN_OK) mn_collide_print(c);
    if (st == MN_OK && o->csv) st = mn_collide_write_csv(c, o->csv);
    if (st == MN_OK && o->figures) st = mn_collide_write_figures(c, o->figures);
    if (st == MN_OK && o->figures && !o->json) {
        printf("\nwrote %s/recall and %s/dynamics, each as .svg and .png\n", o->figures,
               o->figures);
    }
    return st;
}

int mn_command_collide(int argc, char **argv) {
    options o = { 0 };
    mn_collide *c = calloc(1, sizeof *c);
    if (!c) return 2;
    c->setup = mn_collision_default();
    int status = parse(&o, &c->setup, argc, argv);
    if (status < 0) print_help();
    if (status == 0 && collide(&o, c) != MN_OK) {
        fprintf(stderr, "mneme collide: %s\n", mn_last_error());
        status = 1;
    }
    mn_collide_free(c);
    free(c);
    return status < 0 ? 0 : status;
}
