/* reproduce.c - mneme reproduce: an experiment of a paper in one command, up to a report. */
#include "cli/reproduce/reproduce.h"
#include "cli/reproduce/reproduce_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"
#include "cli/sweep.h"
#include "experiments/experiment.h"
#include "experiments/grid.h"
#include "experiments/pilot.h"
#include "experiments/report.h"
#include "io/json_write.h"
#include "train/options.h"

enum { MOST_SETS = 64, MOST_CHECKPOINTS = 64, MOST_ONLY = 64 };

typedef struct options {
    const char *name, *out, *report, *device, *data;
    const char *sets[MOST_SETS];
    const char *checkpoints[MOST_CHECKPOINTS];
    const char *only[MOST_ONLY];
    int n_sets, n_checkpoints, n_only, processes, seeds, steps, minutes;
    mn_preset preset;
    bool list, json, quiet, dry, collect;
} options;

static void print_help(void) {
    puts("usage: mneme reproduce --list\n"
         "       mneme reproduce NAME [--preset smoke|cpu|gpu|full] [options]\n"
         "       mneme reproduce NAME --report DIR\n\n"
         "Runs an experiment of a paper and writes a report that puts our numbers beside the "
         "printed ones.\n"
         "DIR gets report.md, figures (SVG and PNG, with gnuplot), CSV files, results.json (all "
         "that the\n"
         "report is made of) and results.jsonl (a line for each run as it ended). The same command "
         "goes on\n"
         "with one that was stopped or killed.\n\n"
         "  --list              experiments, what they cost, and their papers\n"
         "  --preset NAME       smoke (a minute or two on two cores), cpu (about an hour), "
         "gpu (minutes on\n"
         "                      one GPU, where there is one), full (as published); default: smoke\n"
         "  --out DIR           default: NAME-PRESET\n"
         "  --jobs N            processes, one thread each (default: one a core; with --device "
         "one)\n"
         "  --device D          train on cuda or cuda:N (default: cpu)\n"
         "  --seeds N           seeds 0 to N-1 in place of the preset's\n"
         "  --steps N           no run takes more steps than these\n"
         "  --only AXIS=LABEL   only runs with this label, such as model=gdn or seed=0; several of "
         "an axis\n"
         "                      add up\n"
         "  --minutes N         stop after so many, as Ctrl-C does: the same command goes on\n"
         "  --set KEY=VALUE     set a member of every job (mneme sweep --help); may be repeated\n"
         "  --data PATH         (needles) train on this text: a file, or a folder as "
         "bench/language makes it\n"
         "  --checkpoint DIR    (ccq-alignment) ask this model, with its tokenizer, instead of "
         "training\n"
         "                      some; may be repeated\n"
         "  --dry-run           run nothing: what would run, what is done, what the rest costs "
         "by runs that\n"
         "                      ended in DIR (short ones too: --steps 50)\n"
         "  --collect           run nothing: the report of what DIR/results.jsonl has, which may "
         "be put\n"
         "                      together from pieces of several machines\n"
         "  --report DIR        write report.md and CSV files again, from DIR/results.json alone\n"
         "  --json              with --list and --dry-run: as JSON\n"
         "  --quiet             show nothing but failures");
}

static int failed(void) {
    fprintf(stderr, "mneme reproduce: %s\n", mn_last_error());
    return 1;
}

/* ---- options --------------------------------------------------------------------------------- */

static bool read_preset(void *to, const char *value) {
    return mn_preset_find(to, value);
}

static int parse(options *o, int argc, char **argv) {
    const mn_option rows[] = {
        { "--list", .flag = &o->list },
        { "--json", .flag = &o->json },
        { "--quiet", .flag = &o->quiet },
        { "--dry-run", .flag = &o->dry },
        { "--collect", .flag = &o->collect },
        { "--jobs", .count = &o->processes, .low = 1, .high = MN_SWEEP_LANES },
        { "--seeds", .count = &o->seeds, .low = 1, .high = 1000 },
        { "--steps", .count = &o->steps, .low = 1, .high = INT32_MAX },
        { "--minutes", .count = &o->minutes, .low = 1, .high = 100000 },
        { "--only", .list = o->only, .n = &o->n_only, .most = MOST_ONLY },
        { "--out", .text = &o->out },
        { "--data", .text = &o->data },
        { "--report", .text = &o->report },
        { "--device", .read = mn_options_device, .to = &o->device },
        { "--preset", .read = read_preset, .to = &o->preset, .needs = "smoke, cpu, gpu or full" },
        { "--checkpoint", .list = o->checkpoints, .n = &o->n_checkpoints,
          .most = MOST_CHECKPOINTS },
        { "--set", .list = o->sets, .n = &o->n_sets, .most = MOST_SETS },
        { NULL, .text = &o->name },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "reproduce", argc, argv);
    if (status != 0 || o->name || o->list) return status;
    return mn_options_mistake("reproduce", "", "name an experiment, or --list them");
}

/* ---- the list -------------------------------------------------------------------------------- */

static int print_list(bool json) {
    json_t *list = json_array();
    for (int i = 0; i < mn_experiment_count(); i++) {
        const mn_experiment e = mn_experiment_row(i);
        json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:{s:s, s:s, s:s*, s:s}}", "name",
                                              e.name, "about", e.about, "paper", e.paper, "cost",
                                              "smoke", e.cost[MN_PRESET_SMOKE], "cpu",
                                              e.cost[MN_PRESET_CPU], "gpu", e.cost[MN_PRESET_GPU],
                                              "full", e.cost[MN_PRESET_FULL]));
        if (!json) {
            const char *gpu = e.cost[MN_PRESET_GPU];
            printf("%-13s %s\n%13s %s; smoke %s, cpu %s%s%s, full %s\n", e.name, e.about, "",
                   e.paper, e.cost[MN_PRESET_SMOKE], e.cost[MN_PRESET_CPU], gpu ? ", gpu " : "",
                   gpu ? gpu : "", e.cost[MN_PRESET_FULL]);
        }
    }
    char *text = NULL;
    json_t *root = json_pack("{s:o}", "experiments", list);
    const mn_status st = json ? mn_json_text(&text, root, MN_JSON_PRETTY) : MN_OK;
    if (st == MN_OK && text) puts(text);
    free(text);
    json_decref(root);
    return st == MN_OK ? 0 : failed();
}

/* ---- one experiment -------------------------------------------------------------------------- */

/* What the options change in every job. */
static mn_status changes_of(mn_json *changes, const options *o) {
    mn_status st = MN_OK;
    *changes = (mn_json){ .value = json_object(), .name = "--set" };
    for (int i = 0; st == MN_OK && i < o->n_sets; i++) st = mn_train_set(changes, o->sets[i]);
    if (st == MN_OK && o->steps > 0) {
        json_object_set_new(changes->value, "steps_at_most", json_integer(o->steps));
    }
    return st;
}

/* The grid becomes a job for each checkpoint. */
static mn_status ask_checkpoints(json_t *plan, const options *o) {
    json_t *jobs = json_array();
    if (strcmp(o->name, "ccq-alignment") != 0) {
        json_decref(jobs);
        return mn_fail(MN_ERR_ARGUMENT, "%s trains its own models; --checkpoint is for "
                       "ccq-alignment", o->name);
    }
    for (int i = 0; i < o->n_checkpoints; i++) {
        json_array_append_new(jobs, json_pack("{s:s, s:s, s:{s:s}}", "kind", "alignment",
                                              "checkpoint", o->checkpoints[i], "labels", "model",
                                              o->checkpoints[i]));
    }
    return json_object_set_new(plan, "grid", json_pack("{s:o}", "jobs", jobs)) == 0
               ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for jobs");
}

static mn_status make_jobs(json_t **plan, json_t **jobs, int row, const options *o) {
    mn_json changes = { 0 };
    mn_status st = changes_of(&changes, o);
    if (st == MN_OK) st = mn_experiment_plan(plan, row, o->preset);
    if (st == MN_OK) st = mn_experiment_take_data(*plan, o->name, o->data);
    if (st == MN_OK && o->n_checkpoints > 0) st = ask_checkpoints(*plan, o);
    if (st == MN_OK) {
        const mn_json grid = { .value = json_object_get(*plan, "grid"), .name = o->name };
        json_t *axes = json_object_get(grid.value, "grid");
        if (o->seeds > 0 && json_object_get(axes, "seed")) {
            json_t *seeds = json_array();
            for (int i = 0; i < o->seeds; i++) json_array_append_new(seeds, json_integer(i));
            json_object_set_new(axes, "seed", seeds);
        }
        const bool trains = axes != NULL;    // other jobs have no steps to cut
        st = mn_grid_expand_only(jobs, &grid, trains ? changes.value : NULL, o->only, o->n_only);
    }
    json_decref(changes.value);
    return st;
}

/* Runs the pilot of the plan, where it has one and rows have a choice; *jobs becomes those of the
 * settings that it chose, *own the pilot's, which the report names. */
static mn_status run_pilot(json_t **jobs, json_t **own, const json_t *plan, const char *folder,
                           const options *o, int *status) {
    const json_t *pilot = json_object_get(plan, "pilot");
    json_t *first = NULL, *chosen = NULL, *records = NULL;
    char path[MN_SWEEP_PATH];
    snprintf(path, sizeof path, "%s/results.jsonl", folder);
    mn_status st = mn_pilot_jobs(&first, *jobs, pilot);
    if (st == MN_OK && json_array_size(first) > 0) {
        if (!o->quiet && !o->collect) {
            fprintf(stderr, "settings are chosen on other seeds: %zu runs first\n",
                    json_array_size(first));
        }
        if (!o->collect) {
            *status = mn_sweep_show("reproduce", folder, first, o->processes, o->device, 0, 0,
                                    o->quiet);
        }
        st = mn_sweep_records(&records, path);
        if (st == MN_OK) st = mn_pilot_choose(&chosen, *jobs, pilot, first, records);
        if (st == MN_OK && *status == 1 && mn_pilot_covers(*jobs, chosen, pilot)) {
            fprintf(stderr, "settings that failed are not chosen\n");
            *status = 0;
        }
        if (st == MN_OK) {
            json_decref(*jobs);
            *jobs = json_incref(chosen);
        }
    }
    *own = first;
    json_decref(records);
    json_decref(chosen);
    return st;
}

/* " 'value with blanks'", as a shell reads it. */
static void put_word(FILE *out, const char *option, const char *value) {
    const char *quote = strpbrk(value, " \t\"$&;()<>|*?") ? "'" : "";
    fprintf(out, " %s%s%s%s%s", option, *option ? " " : "", quote, value, quote);
}

/* The command that gives the same numbers: without what only says where and how fast. */
static char *command_of(const options *o) {
    char *text = NULL, number[24];
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (!out) return NULL;
    fprintf(out, "mneme reproduce %s --preset %s", o->name, mn_preset_name(o->preset));
    for (int i = 0; i < 2; i++) {
        const int n = i == 0 ? o->seeds : o->steps;
        snprintf(number, sizeof number, "%d", n);
        if (n > 0) put_word(out, i == 0 ? "--seeds" : "--steps", number);
    }
    for (int i = 0; i < o->n_only; i++) put_word(out, "--only", o->only[i]);
    for (int i = 0; i < o->n_sets; i++) put_word(out, "--set", o->sets[i]);
    for (int i = 0; i < o->n_checkpoints; i++) put_word(out, "--checkpoint", o->checkpoints[i]);
    if (o->data) put_word(out, "--data", o->data);
    if (o->device) put_word(out, "--device", o->device);
    if (fclose(out) == 0) return text;
    free(text);
    return NULL;
}

static mn_status write_results(const char *folder, int row, const options *o, const json_t *plan,
                               const json_t *jobs) {
    char path[MN_SWEEP_PATH];
    json_t *records = NULL;
    mn_json results = { .name = "results.json" };
    char *command = command_of(o);
    snprintf(path, sizeof path, "%s/results.jsonl", folder);
    mn_status st = command ? mn_sweep_records(&records, path)
                           : mn_fail(MN_ERR_MEMORY, "no memory for the command");
    if (st == MN_OK) {
        st = mn_experiment_results(&results.value, row, o->preset, command, plan, jobs, records);
    }
    free(command);
    if (st == MN_OK && (o->steps > 0 || o->n_sets > 0)) {
        json_object_set_new(results.value, "changed", json_true());    // sizes are not the preset's
    }
    if (st == MN_OK) st = mn_reproduce_figures(&results, folder);
    snprintf(path, sizeof path, "%s/results.json", folder);
    if (st == MN_OK) st = mn_json_save(path, results.value);
    if (st == MN_OK) st = mn_report_write(&results, folder);
    json_decref(results.value);
    json_decref(records);
    return st;
}

static int report_again(int row, const char *folder) {
    char path[MN_SWEEP_PATH];
    mn_json results = { 0 };
    const char *name = "";
    if (snprintf(path, sizeof path, "%s/results.json", folder) >= MN_SWEEP_PATH) {
        return mn_options_mistake("reproduce", folder, "is too long a path");
    }
    mn_status st = mn_json_load(&results, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_json_get_text(&name, &results, "experiment");
    if (st == MN_OK && strcmp(name, mn_experiment_row(row).name) != 0) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: is of experiment \"%s\"", path, name);
    }
    if (st == MN_OK) st = mn_report_write(&results, folder);
    if (st == MN_OK) st = mn_reproduce_pictures(NULL, &results, folder, false);
    mn_json_free(&results);
    if (st != MN_OK) return failed();
    printf("%s/report.md\n", folder);
    return 0;
}

/* What would run: the pilot, and behind it the settings that it chose or will choose. */
static mn_status tell_plan(const json_t *jobs, const json_t *plan, const char *folder,
                           const options *o) {
    const json_t *pilot = json_object_get(plan, "pilot");
    json_t *first = NULL, *chosen = NULL, *then = NULL, *records = NULL, *told = NULL;
    char path[MN_SWEEP_PATH], *text = NULL;
    snprintf(path, sizeof path, "%s/results.jsonl", folder);
    mn_status st = mn_sweep_records(&records, path);
    if (st == MN_OK) st = mn_pilot_jobs(&first, jobs, pilot);
    if (st == MN_OK && json_array_size(first) > 0) {
        st = mn_pilot_choose(&chosen, jobs, pilot, first, records);
    }
    if (st == MN_OK) st = mn_pilot_expected(&then, jobs, chosen, pilot);
    if (st == MN_OK && json_array_extend(first, then) != 0) {
        st = mn_fail(MN_ERR_MEMORY, "no memory for a plan");
    }
    if (st == MN_OK) st = mn_reproduce_plan(&told, first, pilot, records);
    if (st == MN_OK && o->json) st = mn_json_text(&text, told, MN_JSON_PRETTY);
    if (st == MN_OK && o->json) puts(text);
    else if (st == MN_OK) mn_reproduce_plan_show(told);
    free(text);
    json_decref(told);
    json_decref(then);
    json_decref(chosen);
    json_decref(first);
    json_decref(records);
    return st;
}

/* Runs the jobs, or with --collect none, and reports them; the exit status. */
static int run_and_report(json_t **jobs, int row, const json_t *plan, const char *folder,
                          const options *o) {
    json_t *first = NULL;
    int status = 0;
    if (o->minutes > 0) mn_sweep_stop_after(o->minutes);
    if (!o->quiet && !o->collect) {
        fprintf(stderr, "%s, preset %s: %zu runs, %s\n", o->name, mn_preset_name(o->preset),
                json_array_size(*jobs), mn_experiment_row(row).cost[o->preset]);
    }
    if (run_pilot(jobs, &first, plan, folder, o, &status) != MN_OK) status = failed();
    if (status == 0 && !o->collect) {
        status = mn_sweep_show("reproduce", folder, *jobs, o->processes, o->device, 0, 0, o->quiet);
    }
    if (first) json_array_extend(first, *jobs);
    /* What came out is reported even when the rest failed or was stopped. */
    struct stat about;
    const json_t *told = first ? first : *jobs;
    if (stat(folder, &about) == 0 && write_results(folder, row, o, plan, told) != MN_OK) {
        status = failed();
    } else if (!o->quiet) {
        printf("%s/report.md\n", folder);
    }
    json_decref(first);
    return status;
}

static int reproduce(int row, const options *o) {
    char folder[MN_SWEEP_PATH - 64];
    json_t *plan = NULL, *jobs = NULL;
    struct stat about;
    const int n = o->out ? snprintf(folder, sizeof folder, "%s", o->out)
                         : snprintf(folder, sizeof folder, "%s-%s", o->name,
                                    mn_preset_name(o->preset));
    if (n >= (int)sizeof folder) {
        return mn_options_mistake("reproduce", "--out", "is too long a path");
    }
    if (o->collect && stat(folder, &about) != 0) {
        return mn_options_mistake("reproduce", folder, "is not there; --collect needs the folder "
                                  "of runs that ended");
    }
    int status = make_jobs(&plan, &jobs, row, o) == MN_OK ? 0 : failed();
    if (status == 0 && o->dry) status = tell_plan(jobs, plan, folder, o) == MN_OK ? 0 : failed();
    else if (status == 0) status = run_and_report(&jobs, row, plan, folder, o);
    json_decref(plan);
    json_decref(jobs);
    return status;
}

int mn_command_reproduce(int argc, char **argv) {
    options o = { 0 };
    const int mistake = parse(&o, argc, argv);
    if (mistake < 0) print_help();
    if (mistake != 0) return mistake < 0 ? 0 : mistake;
    if (o.list) return print_list(o.json);
    int row;
    if (mn_experiment_find(&row, o.name) != MN_OK) return failed();
    return o.report ? report_again(row, o.report) : reproduce(row, &o);
}
