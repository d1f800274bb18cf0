/* job.c - keys, titles and records of jobs. */
#include "experiments/job.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "data/hash.h"
#include "experiments/job_internal.h"
#include "io/closest.h"
#include "io/folder.h"
#include "io/json_write.h"
#include "model/checkpoint.h"

enum { KEEP_PATH = 4096 };

static const char *const kind_names[] = {
#define JOB_KIND(name, about) #name,
#include "experiments/job_kinds.def"
#undef JOB_KIND
};

static const mn_job_kind *const kinds[] = {
#define JOB_KIND(name, about) &mn_job_##name,
#include "experiments/job_kinds.def"
#undef JOB_KIND
};

static mn_status find_kind(const mn_job_kind **out, const mn_json *job) {
    const bool text = json_object_get(job->value, "data") && !json_object_get(job->value, "task");
    const char *name = text ? "text" : "train";
    const mn_status st = mn_json_opt_text(&name, job, "kind");
    if (st != MN_OK) return st;
    for (size_t i = 0; i < MN_COUNTOF(kinds); i++) {
        if (strcmp(kind_names[i], name) != 0) continue;
        *out = kinds[i];
        return MN_OK;
    }
    const char *near = mn_closest(name, kind_names, (int64_t)MN_COUNTOF(kinds));
    return mn_fail(MN_ERR_ARGUMENT, "there is no kind of job \"%s\"%s%s%s", name,
                   near ? ", did you mean \"" : "", near ? near : "", near ? "\"?" : "");
}

mn_status mn_job_complete(json_t **out, const mn_json *spec) {
    const mn_job_kind *kind = NULL;
    *out = NULL;
    mn_status st = mn_json_expect_object(spec);
    if (st == MN_OK) st = find_kind(&kind, spec);
    if (st != MN_OK) return st;
    mn_json job = { .value = json_deep_copy(spec->value), .name = "job" };
    if (!job.value) return mn_fail(MN_ERR_MEMORY, "no memory for a job");
    for (size_t i = 0; i < MN_COUNTOF(kinds); i++) {
        if (kinds[i] != kind || json_object_get(job.value, "kind")) continue;
        json_object_set_new(job.value, "kind", json_string(kind_names[i]));
    }
    st = kind->complete(&job);
    if (st == MN_OK) *out = job.value;
    else json_decref(job.value);
    return st;
}

mn_status mn_job_key(char key[MN_JOB_KEY], const json_t *job) {
    json_t *bare = json_copy((json_t *)(uintptr_t)job);
    json_object_del(bare, "labels");
    char *text = bare ? json_dumps(bare, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    json_decref(bare);
    if (!text) return mn_fail(MN_ERR_MEMORY, "no memory for the key of a job");
    mn_hash hash = { 0 };
    mn_hash_add(&hash, text, strlen(text));
    snprintf(key, MN_JOB_KEY, "%016" PRIx64, mn_hash_value(&hash));
    free(text);
    return MN_OK;
}

/* Appends " key=value", or " value" for texts. */
static void put_label(char *text, size_t size, const char *key, const json_t *value) {
    const size_t n = strlen(text);
    const char *blank = n > 0 ? " " : "";
    if (json_is_string(value)) {
        snprintf(text + n, size - n, "%s%s", blank, json_string_value(value));
    } else if (json_is_number(value)) {
        snprintf(text + n, size - n, "%s%s=%g", blank, key, json_number_value(value));
    }
}

void mn_job_title(char *text, size_t size, const json_t *job) {
    const char *key;
    json_t *value;
    text[0] = '\0';
    json_t *labels = json_object_get(job, "labels");
    json_object_foreach(labels, key, value) put_label(text, size, key, value);
    if (json_object_size(labels) > 0) return;
    put_label(text, size, "task", mn_spec_get(job, "task.name"));
    put_label(text, size, "layers", mn_spec_get(job, "model.layers"));
    put_label(text, size, "lr", mn_spec_get(job, "train.lr"));
    put_label(text, size, "seed", mn_spec_get(job, "seed"));
}

bool mn_job_is_to_stop(const mn_job_call *call) {
    return call->stop && *call->stop;
}

bool mn_job_keeps_now(const mn_job_call *call, double last) {
    return call->keep &&
           (mn_job_is_to_stop(call) || mn_seconds() - last >= call->keep_seconds);
}

/* Models lie beside the folder of what is unfinished. */
mn_status mn_job_keep_model(const mn_job_call *call, const mn_json *job, mn_model *model,
                            const mn_tokenizer *tokenizer) {
    char key[MN_JOB_KEY], folder[KEEP_PATH], path[KEEP_PATH];
    bool keep = false;
    mn_status st = mn_json_opt_bool(&keep, job, "keep");
    if (st != MN_OK || !keep) return st;
    if (!call->keep) {
        return mn_fail(MN_ERR_ARGUMENT, "keep: this job runs without a folder of results");
    }
    st = mn_job_key(key, job->value);
    int n = snprintf(path, sizeof path, "%s", call->keep);
    for (int up = 0; up < 2 && n < KEEP_PATH; up++) {
        char *slash = strrchr(path, '/');
        if (slash) *slash = '\0';
        else strcpy(path, ".");
    }
    if (st == MN_OK && (n >= KEEP_PATH || snprintf(folder, sizeof folder, "%.4000s/models/%s", path,
                                                   key) >= KEEP_PATH)) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", call->keep);
    }
    if (st == MN_OK) st = mn_folder_make(folder);
    if (st == MN_OK) st = mn_checkpoint_save(model, folder);
    if (st != MN_OK || !tokenizer) return st;
    snprintf(path, sizeof path, "%.4000s/tokenizer.json", folder);
    st = mn_tokenizer_save(tokenizer, path);
    return st == MN_OK ? mn_tokenizer_save_ends(tokenizer, folder) : st;
}

mn_status mn_job_run(json_t **record, const json_t *job, const mn_job_keeping *keeping,
                     const char *device, mn_job_watch watch, void *context) {
    const mn_json handle = { .value = (json_t *)(uintptr_t)job, .name = "job" };
    const mn_job_kind *kind = NULL;
    char key[MN_JOB_KEY], keep[KEEP_PATH];
    json_t *result = NULL;
    mn_job_call call = { .device = device, .watch = watch, .context = context };
    *record = NULL;
    const double start = mn_seconds();
    mn_status st = mn_job_key(key, job);
    if (st != MN_OK) return st;
    st = find_kind(&kind, &handle);
    if (st == MN_OK && keeping && keeping->folder) {
        if (snprintf(keep, sizeof keep, "%s/%s", keeping->folder, key) >= KEEP_PATH) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", keeping->folder);
        }
        call.keep = keep;
        call.keep_seconds = keeping->seconds;
        call.stop = keeping->stop;
    }
    if (st == MN_OK) st = kind->run(&result, &handle, &call);
    if (st == MN_OK && !result && mn_job_is_to_stop(&call)) return MN_OK;
    const bool ok = st == MN_OK && result;
    json_t *root = json_pack("{s:s, s:O, s:s, s:o, s:s, s:s}", "key", key, "job", job, "status",
                             ok ? "ok" : "failed", "seconds", mn_json_real(mn_seconds() - start),
                             "commit", mn_build_commit(), "version", mn_version());
    if (ok) json_object_set(root, "result", result);
    else json_object_set_new(root, "error", json_string(mn_last_error()));
    if (device) json_object_set_new(root, "device", json_string(device));
    json_decref(result);
    *record = root;
    return root ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for the record of a job");
}
