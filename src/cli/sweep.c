/* sweep.c - mneme sweep: a file of jobs, run several at once, with results that a stopped or killed
 * sweep keeps. */
#include "cli/sweep.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"
#include "experiments/grid.h"
#include "io/json_write.h"
#include "train/options.h"

enum { MOST_SETS = 64, MOST_ONLY = 64, TITLE = 256 };

typedef struct options {
    const char *file, *out, *device;
    const char *sets[MOST_SETS];
    const char *only[MOST_ONLY];
    int n_sets, n_only, processes, shard, shards, minutes;
    bool dry, quiet;
} options;

static void print_help(void) {
    puts("usage: mneme sweep FILE.json [options]\n\n"
         "Trains models on tasks and asks them, one process and one thread for each job, several "
         "at once.\n"
         "FILE is a product of axes:\n\n"
         "  {\"job\": {\"task\": {\"name\": \"mqar\", \"setting\": \"64-4\", \"test\": 1000},\n"
         "           \"model\": {\"hidden_size\": 64, \"num_hidden_layers\": 2},\n"
         "           \"train\": {\"steps\": 2000, \"batch\": 64},\n"
         "           \"evaluate\": {\"every\": 500, \"metric\": \"example\", \"stop_at\": 0.99}},\n"
         "   \"grid\": {\"model\": {\"gdn\": {\"model\": {\"layers\": \"gdn\"}},\n"
         "                      \"kla\": {\"model\": {\"layers\": \"kla\"}}},\n"
         "            \"train.lr\": [0.001, 0.003], \"seed\": [0, 1, 2]}}\n\n"
         "A named choice is laid over the job, a listed one is set at the place that the axis "
         "names; names and\n"
         "values become the labels of the job. \"parts\": [{\"job\", \"grid\"}] are several such "
         "products over one\n"
         "beginning, \"only\": {axis: [labels]} leaves out the others, \"jobs\": [...] lists them "
         "one by one.\n\n"
         "A job with data in place of task trains on text of your own: {\"data\": {\"train\": "
         "\"book.txt\"},\n"
         "\"model\": ..., \"train\": ...} as in mneme train; its result is the loss on text held "
         "out. \"keep\": true\n"
         "leaves the model of a job in DIR/models/KEY.\n\n"
         "A job: task (name, setting, options; train and test: examples), model and train as in "
         "mneme train,\n"
         "seed, epochs, lr_by_epoch, steps_at_most, tests (name: {options, test}), evaluate "
         "(every, metric:\n"
         "token macro example sequence, select: last loss, stop_at, patience, batch).\n\n"
         "Records are appended to DIR/results.jsonl, on the disk before the next job starts. A "
         "job that is\n"
         "there is not run again, so the same command goes on with a sweep that was stopped or "
         "killed.\n"
         "At the end a table shows mean and standard error over seeds of each setting and the best "
         "one;\n"
         "runs.csv and summary.csv hold the same, and mneme plot DIR draws it.\n\n"
         "  -o DIR              folder of the results (default: FILE without .json)\n"
         "  --jobs N            processes (default: one a core; with --device one)\n"
         "  --device D          train on cuda or cuda:N (default: cpu)\n"
         "  --shard I/N         this is sweep I (from 0) of N over one folder, on machines that "
         "share it: each\n"
         "                      takes jobs that no other runs, also those of one that was killed; "
         "the\n"
         "                      same command without --shard gathers all into results.jsonl\n"
         "  --set KEY=VALUE     set a member of every job, such as train.steps=100; may be "
         "repeated\n"
         "  --only AXIS=LABEL   only jobs with this label, such as model=gdn or seed=0; several of "
         "an axis\n"
         "                      add up\n"
         "  --minutes N         stop after so many, as Ctrl-C does: the same command goes on\n"
         "  --dry-run           print the jobs and their keys, run nothing\n"
         "  --quiet             show nothing but failures");
}

static bool read_shard(void *to, const char *value) {
    options *o = to;
    int end = 0;
    return sscanf(value, "%d/%d%n", &o->shard, &o->shards, &end) == 2 && !value[end] &&
           o->shard >= 0 && o->shard < o->shards && o->shards <= 65536;
}

static int parse(options *o, int argc, char **argv) {
    const mn_option rows[] = {
        { "-o", .text = &o->out },
        { "--jobs", .count = &o->processes, .low = 1, .high = MN_SWEEP_LANES },
        { "--device", .read = mn_options_device, .to = &o->device },
        { "--set", .list = o->sets, .n = &o->n_sets, .most = MOST_SETS },
        { "--only", .list = o->only, .n = &o->n_only, .most = MOST_ONLY },
        { "--shard", .read = read_shard, .to = o, .needs = "I/N with 0 <= I < N" },
        { "--minutes", .count = &o->minutes, .low = 1, .high = 100000 },
        { "--dry-run", .flag = &o->dry },
        { "--quiet", .flag = &o->quiet },
        { NULL, .text = &o->file },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "sweep", argc, argv);
    if (status != 0 || o->file) return status;
    return mn_options_mistake("sweep", "", "name a file of jobs");
}

static mn_status load_jobs(json_t **jobs, const options *o) {
    mn_json root = { 0 }, changes = { .value = json_object(), .name = "--set" };
    mn_status st = mn_json_load(&root, o->file, MN_JSON_STANDARD);
    for (int i = 0; st == MN_OK && i < o->n_sets; i++) st = mn_train_set(&changes, o->sets[i]);
    if (st == MN_OK) st = mn_grid_expand_only(jobs, &root, changes.value, o->only, o->n_only);
    json_decref(changes.value);
    mn_json_free(&root);
    return st;
}

static int print_jobs(const json_t *jobs) {
    for (size_t i = 0; i < json_array_size(jobs); i++) {
        char key[MN_JOB_KEY] = "", title[TITLE], *text = NULL;
        const json_t *job = json_array_get(jobs, i);
        mn_job_title(title, sizeof title, job);
        if (mn_job_key(key, job) != MN_OK || mn_json_text(&text, job, MN_JSON_COMPACT) != MN_OK) {
            fprintf(stderr, "mneme sweep: %s\n", mn_last_error());
            return 1;
        }
        printf("%s  %s  %s\n", key, title, text);
        free(text);
    }
    return 0;
}

int mn_command_sweep(int argc, char **argv) {
    options o = { 0 };
    char folder[MN_SWEEP_PATH];
    const int mistake = parse(&o, argc, argv);
    if (mistake < 0) print_help();
    if (mistake != 0) return mistake < 0 ? 0 : mistake;
    json_t *jobs = NULL;
    if (load_jobs(&jobs, &o) != MN_OK) {
        fprintf(stderr, "mneme sweep: %s\n", mn_last_error());
        return 1;
    }
    snprintf(folder, sizeof folder, "%s", o.out ? o.out : o.file);
    const size_t n = strlen(folder);
    if (!o.out && n > 5 && strcmp(folder + n - 5, ".json") == 0) folder[n - 5] = '\0';
    else if (!o.out) snprintf(folder + n, sizeof folder - n, ".results");
    if (o.minutes > 0) mn_sweep_stop_after(o.minutes);
    const int status = o.dry ? print_jobs(jobs)
                             : mn_sweep_show("sweep", folder, jobs, o.processes, o.device,
                                              o.shard, o.shards, o.quiet);
    if (status == 0 && !o.dry && !o.quiet && o.shards > 0) {
        printf("%s/results-%d-of-%d.jsonl\n", folder, o.shard, o.shards);
    }
    const int told = o.dry || o.shards > 0 ? 0 : mn_sweep_table(folder, jobs, o.quiet);
    json_decref(jobs);
    return status != 0 ? status : told;
}
