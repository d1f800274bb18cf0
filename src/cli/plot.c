/* plot.c - mneme plot: curves of one or more runs, through gnuplot or as text. */
#include "cli/plot.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "cli/command.h"
#include "cli/number.h"
#include "cli/reproduce.h"
#include "io/json.h"

enum { PATH = 4096 };

static void print_help(void) {
    puts("usage: mneme plot RUN... [options]\n\n"
         "Curves of runs: each RUN is a folder that training wrote, or a metrics.jsonl.\n"
         "The folder of an experiment (mneme reproduce) stands alone: its figures are drawn "
         "again.\n"
         "Losses share one panel, every other number has its own; colours are runs. Pale lines\n"
         "are what was measured, strong ones the mean over the points around.\n\n"
         "  -o FILE        where to draw, .svg or .png (default plot.svg)\n"
         "  --png          draw a PNG beside the SVG, or an SVG beside a FILE that is a PNG\n"
         "  --x AXIS       along step, tokens or seconds (default step)\n"
         "  --key LIST     numbers to draw, separated by commas (default loss,valid_loss);\n"
         "                 training writes loss, valid_loss, lr, grad_norm, tokens_per_second\n"
         "  --smooth N     mean over N points, for curves of more than 4 N; 1: none\n"
         "                 (default: a hundredth of the curve)\n"
         "  --log          logarithmic heights\n"
         "  --text         draw in the terminal; needs no gnuplot");
}

typedef struct options {
    bool help, text, png, asked;
    const char *out;
    char *keys;                              // a copy, cut at its commas
} options;

/* Splits the list in place; false for an empty name or too many. */
static bool split_keys(mn_plot *plot, char *list) {
    plot->n_keys = 0;
    char *at = list;
    while (at) {
        char *comma = strchr(at, ',');
        if (comma) *comma = '\0';
        if (!*at || plot->n_keys == MN_PLOT_KEYS) return false;
        for (int i = 0; i < plot->n_keys; i++) {
            if (strcmp(plot->keys[i], at) == 0) return false;
        }
        plot->keys[plot->n_keys++] = at;
        at = comma ? comma + 1 : NULL;
    }
    return true;
}

static bool parse_keys(options *o, mn_plot *plot, const char *value) {
    free(o->keys);
    o->keys = malloc(strlen(value) + 1);
    if (!o->keys) return false;
    o->asked = true;
    return split_keys(plot, strcpy(o->keys, value));
}

static bool parse_value(options *o, mn_plot *plot, const char *name, const char *value) {
    int count;
    if (strcmp(name, "-o") == 0) {
        o->out = value;
        return *value != '\0';
    }
    if (strcmp(name, "--x") == 0) return mn_plot_find_axis(&plot->axis, value);
    if (strcmp(name, "--key") == 0) return parse_keys(o, plot, value);
    if (strcmp(name, "--smooth") != 0 || !mn_parse_count(&count, value, 1, 1000000)) return false;
    plot->smooth = count;
    return true;
}

/* True when the argument stands alone. */
static bool parse_switch(options *o, mn_plot *plot, const char *name) {
    if (strcmp(name, "--help") == 0) o->help = true;
    else if (strcmp(name, "--text") == 0) o->text = true;
    else if (strcmp(name, "--png") == 0) o->png = true;
    else if (strcmp(name, "--log") == 0) plot->log = true;
    else return false;
    return true;
}

static bool complain(const char *argument, const char *value) {
    fprintf(stderr, "mneme plot: \"%s%s%s\" is not understood; --help lists options\n", argument,
            value ? " " : "", value ? value : "");
    return false;
}

static bool parse(options *o, mn_plot *plot, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (parse_switch(o, plot, argv[i])) continue;
        if (argv[i][0] == '-') {
            if (i + 1 >= argc) return complain(argv[i], NULL);
            if (!parse_value(o, plot, argv[i], argv[i + 1])) return complain(argv[i], argv[i + 1]);
            i++;
        } else if (plot->n_runs == MN_PLOT_RUNS) {
            fprintf(stderr, "mneme plot: %d runs are the most in one plot\n", MN_PLOT_RUNS);
            return false;
        } else {
            plot->paths[plot->n_runs++] = argv[i];
        }
    }
    if (o->help || plot->n_runs > 0) return true;
    fputs("mneme plot: give the folder of at least one run; --help explains\n", stderr);
    return false;
}

static mn_status draw(const options *o, mn_plot *plot) {
    const mn_status st = mn_plot_draw(plot, o->out, o->png);
    if (st == MN_OK) {
        printf("wrote %s%s\n", o->out, o->png ? ", and its twin as the other kind" : "");
    } else if (st == MN_ERR_UNSUPPORTED) {
        fputs("mneme plot: --text draws without gnuplot\n", stderr);
    }
    return st;
}

/* The results.json of an experiment's folder; false when there is none. */
static bool find_results(char path[PATH], const char *folder) {
    struct stat about;
    return snprintf(path, PATH, "%s/results.json", folder) < PATH && stat(path, &about) == 0;
}

/* Draws the figures of an experiment again. */
static mn_status draw_experiment(const char *folder, const char *path) {
    mn_json results = { 0 };
    size_t i;
    json_t *name;
    mn_status st = mn_json_load(&results, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_reproduce_figures(&results, folder);
    const json_t *none = json_object_get(results.value, "no_figures");
    if (st == MN_OK && none) st = mn_fail(MN_ERR_UNSUPPORTED, "%s", json_string_value(none));
    if (st == MN_OK) {
        json_array_foreach(json_object_get(results.value, "figures"), i, name) {
            printf("%s/%s\n", folder, json_string_value(name));
        }
    }
    mn_json_free(&results);
    return st;
}

int mn_command_plot(int argc, char **argv) {
    options o = { .out = "plot.svg" };
    int result = 2;
    mn_plot *plot = calloc(1, sizeof *plot);
    if (!plot) return 2;
    plot->keys[plot->n_keys++] = "loss";
    plot->keys[plot->n_keys++] = "valid_loss";
    if (parse(&o, plot, argc, argv)) {
        mn_status st = MN_OK;
        char path[PATH];
        const bool whole = plot->n_runs == 1 && find_results(path, plot->paths[0]);
        if (o.help) print_help();
        else if (whole) st = draw_experiment(plot->paths[0], path);
        else st = mn_plot_read(plot, o.asked);
        if (st == MN_OK && !o.help && !whole) st = o.text ? mn_plot_print(plot) : draw(&o, plot);
        if (st != MN_OK) fprintf(stderr, "mneme plot: %s\n", mn_last_error());
        result = st == MN_OK ? 0 : 1;
    }
    mn_plot_free(plot);
    free(plot);
    free(o.keys);
    return result;
}
