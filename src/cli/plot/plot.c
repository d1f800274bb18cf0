/* plot.c - mneme plot: curves of one or more runs, through gnuplot or as text. */
#include "cli/plot/plot.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"
#include "cli/reproduce/reproduce.h"
#include "io/folder.h"
#include "io/json.h"

enum { PATH = 4096 };

static void print_help(void) {
    puts("usage: mneme plot RUN... [options]\n\n"
         "Curves of runs: each RUN is a folder that training wrote, or a metrics.jsonl.\n"
         "The folder of a sweep stands alone: means over its seeds, with standard errors as "
         "bands,\n"
         "along the steps or, with --x, along an axis of its grid; a colour is a layer.\n"
         "The folder of an experiment (mneme reproduce) stands alone: its figures are drawn "
         "again.\n"
         "Losses share one panel, every other number has its own; a colour is a run,\n"
         "or a layer where runs of several layers are given. Pale lines are what was measured,\n"
         "strong ones the mean over the points around.\n\n"
         "  -o FILE        where to draw, .svg or .png (default plot.svg)\n"
         "  --png          draw a PNG beside the SVG, or an SVG beside a FILE that is a PNG\n"
         "  --x AXIS       along step, tokens or seconds (default step); of a sweep along an axis "
         "of\n"
         "                 its grid such as train.lr\n"
         "  --key LIST     numbers to draw, separated by commas (default loss,valid_loss);\n"
         "                 training writes loss, valid_loss, lr, grad_norm, tokens_per_second\n"
         "  --smooth N     mean over N points, for curves of more than 4 N; 1: none\n"
         "                 (default: a hundredth of the curve)\n"
         "  --log          logarithmic heights\n"
         "  --text         draw in the terminal; needs no gnuplot");
}

typedef struct options {
    bool text, png, asked;
    bool sweep;
    const char *out, *along;
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

/* What --key fills in: the names are cut out of a copy. */
typedef struct asked_keys {
    options *o;
    mn_plot *plot;
} asked_keys;

static bool read_keys(void *to, const char *value) {
    const asked_keys *keys = to;
    free(keys->o->keys);
    keys->o->keys = malloc(strlen(value) + 1);
    if (!keys->o->keys) return false;
    keys->o->asked = true;
    return split_keys(keys->plot, strcpy(keys->o->keys, value));
}

static int parse(options *o, mn_plot *plot, int argc, char **argv) {
    asked_keys keys = { o, plot };
    int smooth = 0;
    const mn_option rows[] = {
        { "-o", .text = &o->out },
        { "--x", .text = &o->along },
        { "--key", .read = read_keys, .to = &keys, .needs = "names with commas between them" },
        { "--smooth", .count = &smooth, .low = 1, .high = 1000000 },
        { "--text", .flag = &o->text },
        { "--png", .flag = &o->png },
        { "--log", .flag = &plot->log },
        { NULL, .list = plot->paths, .n = &plot->n_runs, .most = MN_PLOT_RUNS },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "plot", argc, argv);
    if (smooth > 0) plot->smooth = smooth;
    if (status != 0) return status;
    if (!*o->out) return mn_options_mistake("plot", "-o", "needs the name of a file");
    if (plot->n_runs == 0) {
        return mn_options_mistake("plot", "", "give the folder of at least one run");
    }
    o->sweep = plot->n_runs == 1 && mn_plot_is_sweep(plot->paths[0]);
    if (o->sweep || mn_plot_find_axis(&plot->axis, o->along)) return 0;
    char what[256];
    snprintf(what, sizeof what, "needs step, tokens or seconds, not \"%.100s\"", o->along);
    return mn_options_mistake("plot", "--x", what);
}

static mn_status draw(const options *o, mn_plot *plot) {
    mn_status st = mn_folder_make_above(o->out);
    if (st == MN_OK) st = mn_plot_draw(plot, o->out, o->png);
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

static mn_status plot_runs(const options *o, mn_plot *plot) {
    char path[PATH];
    if (plot->n_runs == 1 && find_results(path, plot->paths[0])) {
        return draw_experiment(plot->paths[0], path);
    }
    const mn_status st = o->sweep ? mn_plot_read_sweep(plot, plot->paths[0], o->along, o->asked)
                                  : mn_plot_read(plot, o->asked);
    if (st != MN_OK) return st;
    return o->text ? mn_plot_print(plot) : draw(o, plot);
}

int mn_command_plot(int argc, char **argv) {
    options o = { .out = "plot.svg", .along = "step" };
    mn_plot *plot = calloc(1, sizeof *plot);
    if (!plot) return 2;
    plot->keys[plot->n_keys++] = "loss";
    plot->keys[plot->n_keys++] = "valid_loss";
    int status = parse(&o, plot, argc, argv);
    if (status < 0) print_help();
    if (status == 0 && plot_runs(&o, plot) != MN_OK) {
        fprintf(stderr, "mneme plot: %s\n", mn_last_error());
        status = 1;
    }
    mn_plot_free(plot);
    free(plot);
    free(o.keys);
    return status < 0 ? 0 : status;
}
