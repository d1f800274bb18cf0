/* experiment.c - the table of experiments, their plans, and results.json. */
#include "experiments/experiment.h"

#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/experiment_internal.h"
#include "experiments/job_internal.h"
#include "io/closest.h"
#include "io/json_write.h"

static const char *const preset_names[MN_PRESETS] = { "smoke", "cpu", "gpu", "full" };

static const struct {
    mn_experiment info;
    const mn_experiment_text *text;
} experiments[] = {
#define EXPERIMENT(id, name, about, paper, smoke, cpu, gpu, full)                                  \
    { { name, about, paper, { smoke, cpu, gpu, full } }, &mn_experiment_##id },
#include "experiments/experiments.def"
#undef EXPERIMENT
};

static const struct {
    const char *experiment;
    int table;
    const char *row, *column, *printed, *place;
} numbers[] = {
#define PAPER(experiment, table, row, column, printed, place)                                      \
    { experiment, table, row, column, printed, place },
#include "experiments/papers/paper_numbers.def"
#undef PAPER
};

const char *mn_preset_name(mn_preset preset) {
    return preset_names[preset];
}

bool mn_preset_find(mn_preset *out, const char *name) {
    for (int i = 0; i < MN_PRESETS; i++) {
        if (strcmp(preset_names[i], name) != 0) continue;
        *out = (mn_preset)i;
        return true;
    }
    return false;
}

int mn_experiment_count(void) {
    return (int)MN_COUNTOF(experiments);
}

mn_experiment mn_experiment_row(int i) {
    return experiments[i].info;
}

mn_status mn_experiment_find(int *out, const char *name) {
    const char *names[MN_COUNTOF(experiments)];
    for (int i = 0; i < mn_experiment_count(); i++) {
        names[i] = experiments[i].info.name;
        if (strcmp(names[i], name) != 0) continue;
        *out = i;
        return MN_OK;
    }
    const char *near = mn_closest(name, names, (int64_t)MN_COUNTOF(experiments));
    return mn_fail(MN_ERR_ARGUMENT, "there is no experiment \"%s\"%s%s%s; mneme reproduce --list "
                   "names them", name,
                   near ? ", did you mean \"" : "", near ? near : "", near ? "\"?" : "");
}

/* Lays `text`, JSON or NULL, over the plan. */
static mn_status lay(json_t *plan, const char *text, const char *name) {
    mn_json over = { 0 };
    if (!text) return MN_OK;
    mn_status st = mn_json_parse(&over, text, strlen(text), name, MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_spec_merge(plan, over.value);
    mn_json_free(&over);
    return st;
}

/* A text and, before it, what it is based on. */
static mn_status lay_text(json_t *plan, const mn_experiment_text *text, mn_preset preset,
                          const char *name) {
    mn_status st = text->base ? lay_text(plan, text->base, preset, name) : MN_OK;
    if (st == MN_OK) st = lay(plan, text->common, name);
    return st == MN_OK ? lay(plan, text->preset[preset], preset_names[preset]) : st;
}

mn_status mn_experiment_plan(json_t **plan, int i, mn_preset preset) {
    const mn_experiment_text *text = experiments[i].text;
    *plan = NULL;
    if (!experiments[i].info.cost[preset]) {
        return mn_fail(MN_ERR_ARGUMENT, "%s has no preset %s; it has smoke, cpu and full",
                       experiments[i].info.name, preset_names[preset]);
    }
    json_t *whole = json_object(), *notes = json_array();
    mn_status st = whole ? lay_text(whole, text, preset, experiments[i].info.name)
                         : mn_fail(MN_ERR_MEMORY, "no memory for the plan of an experiment");
    if (st == MN_OK && text->add) st = text->add(whole);
    for (int k = 0; text->notes[k]; k++) json_array_append_new(notes, json_string(text->notes[k]));
    if (json_object_set_new(whole, "notes", notes) != 0 && st == MN_OK) {
        st = mn_fail(MN_ERR_MEMORY, "no memory for the plan of an experiment");
    }
    if (st == MN_OK) *plan = whole;
    else json_decref(whole);
    return st;
}

mn_status mn_experiment_paper(json_t **out, int row) {
    json_t *list = json_array();
    for (size_t i = 0; i < MN_COUNTOF(numbers); i++) {
        if (strcmp(numbers[i].experiment, experiments[row].info.name) != 0) continue;
        json_array_append_new(list, json_pack("{s:i, s:s, s:s, s:s, s:s}", "table",
                                              numbers[i].table, "row", numbers[i].row, "column",
                                              numbers[i].column, "printed", numbers[i].printed,
                                              "place", numbers[i].place));
    }
    mn_status st = list ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the paper's numbers");
    if (st == MN_OK && experiments[row].text->add_paper) {
        st = experiments[row].text->add_paper(list);
    }
    if (st == MN_OK) *out = list;
    else json_decref(list);
    return st;
}

/* Of every job its labels, and what its record says. */
static json_t *runs_of(const json_t *jobs, const json_t *records) {
    static const char *const kept[] = { "status", "error", "result", "seconds", "commit",
                                        "version", "device" };
    json_t *runs = json_array();
    for (size_t i = 0; i < json_array_size(jobs); i++) {
        const json_t *job = json_array_get(jobs, i);
        char key[MN_JOB_KEY] = "";
        if (mn_job_key(key, job) != MN_OK) continue;
        const json_t *record = json_object_get(records, key);
        json_t *run = json_pack("{s:s, s:O*}", "key", key, "labels",
                                json_object_get(job, "labels"));
        for (size_t k = 0; k < MN_COUNTOF(kept); k++) {
            json_t *value = json_object_get(record, kept[k]);
            if (value) json_object_set(run, kept[k], value);
        }
        if (!record) json_object_set_new(run, "status", json_string("not run"));
        json_object_set(run, "job", (json_t *)(uintptr_t)job);
        json_array_append_new(runs, run);
    }
    return runs;
}

mn_status mn_experiment_results(json_t **results, int i, mn_preset preset, const char *command,
                                const json_t *plan, const json_t *jobs, const json_t *records) {
    const mn_experiment *e = &experiments[i].info;
    json_t *paper = NULL;
    *results = NULL;
    const mn_status st = mn_experiment_paper(&paper, i);
    if (st != MN_OK) return st;
    *results = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:O*, s:O*, s:O*, s:O*, s:o, s:o}",
                         "experiment", e->name, "about", e->about, "paper", e->paper, "preset",
                         preset_names[preset], "command", command, "version", mn_version(),
                         "commit", mn_build_commit(), "tables", json_object_get(plan, "tables"),
                         "claims", json_object_get(plan, "claims"), "notes",
                         json_object_get(plan, "notes"), "pilot", json_object_get(plan, "pilot"),
                         "paper_numbers", paper, "runs", runs_of(jobs, records));
    return *results ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for results");
}
