/* text_data.c - text of the user's for an experiment that trains on text: --data of reproduce. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/experiment.h"
#include "experiments/job_internal.h"

enum { PATH = 4096 };

/* FOLDER/NAME, or false where there is none of that name. */
static bool find_in(char path[PATH], const char *folder, const char *name) {
    struct stat about;
    return snprintf(path, PATH, "%s/%s", folder, name) < PATH && stat(path, &about) == 0;
}

static mn_status set(json_t *job, const char *path, const char *value) {
    return mn_spec_set(job, path, json_string(value));
}

/* Text that haystacks are made of, the part held out first: it is short, and no model has seen
 * it. Without any, tasks that need some say so. */
static mn_status add_essays(json_t *job, const char *folder) {
    static const char *const names[] = { "essays.txt", "valid.jsonl", "valid.txt", "train.txt" };
    char path[PATH];
    for (size_t i = 0; i < MN_COUNTOF(names); i++) {
        if (find_in(path, folder, names[i])) return set(job, "ask.essays", path);
    }
    return MN_OK;
}

/* A folder as bench/language makes it: train and valid, both of mneme prepare; or one of mneme
 * prepare alone. */
static mn_status take_folder(json_t *job, const char *folder) {
    char path[PATH];
    const bool alone = find_in(path, folder, "index.json");
    if (!alone && !find_in(path, folder, "train/index.json")) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: is neither a folder of mneme prepare, nor one that "
                       "holds such folders called train and valid", folder);
    }
    mn_status st = set(job, "data.format", "prepared");
    if (alone) {
        if (st == MN_OK) st = set(job, "data.train", folder);
        return st == MN_OK ? add_essays(job, folder) : st;
    }
    if (st == MN_OK && find_in(path, folder, "train")) st = set(job, "data.train", path);
    if (st == MN_OK && find_in(path, folder, "valid/index.json") &&
        find_in(path, folder, "valid")) {
        st = set(job, "data.valid", path);
    }
    return st == MN_OK ? add_essays(job, folder) : st;
}

/* A file of text: its bytes are the tokens, its last tenth is held out. */
static mn_status take_file(json_t *job, const char *file) {
    mn_status st = set(job, "data.train", file);
    if (st == MN_OK) st = set(job, "data.tokenizer", "bytes");
    return st == MN_OK ? set(job, "ask.essays", file) : st;
}

mn_status mn_experiment_take_data(json_t *plan, const char *name, const char *path) {
    json_t *job = mn_spec_get(plan, "grid.job");
    const bool needed = json_is_true(json_object_get(plan, "needs_text"));
    struct stat about;
    if (!path && needed) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: this preset trains on text of yours: --data FILE of "
                       "plain text, or --data FOLDER made as bench/language/README.md says; "
                       "presets smoke and cpu make text of their own", name);
    }
    if (!path) return MN_OK;
    if (!json_object_get(job, "data")) {
        return mn_fail(MN_ERR_ARGUMENT, "%s makes its own sequences; --data is for experiments "
                       "that train on text, such as needles", name);
    }
    char *real = realpath(path, NULL);
    if (!real || stat(real, &about) != 0) {
        free(real);
        return mn_fail(MN_ERR_IO, "--data %s: there is no such file or folder", path);
    }
    json_object_del(json_object_get(job, "data"), "made");
    const mn_status st = S_ISDIR(about.st_mode) ? take_folder(job, real) : take_file(job, real);
    free(real);
    return st;
}
