/* settings.c - see settings.h. */
#include "cli/train/settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/job.h"
#include "io/folder.h"
#include "io/json_write.h"
#include "train/run/run_folder.h"

enum { PATH = MN_TRAIN_PATH };

static bool exists(const char *path) {
    struct stat about;
    return stat(path, &about) == 0;
}

bool mn_train_holds_run(const char *folder) {
    char path[PATH];
    return snprintf(path, PATH, "%s/train.json", folder) < PATH && exists(path);
}

bool mn_train_has_config(const mn_train_request *r) {
    const size_t n = r->n_inputs > 0 ? strlen(r->inputs[0]) : 0;
    return n > 5 && strcmp(r->inputs[0] + n - 5, ".json") == 0;
}

/* ---- a run that goes on ---------------------------------------------------------------------- */

/* A run's folder, or a checkpoint inside one: RUN/train.json lies in it or two folders up. Links
 * (last, best) are followed first, as they will point elsewhere when the run goes on. */
static mn_status find_run(char run[PATH], char checkpoint[PATH], const char *from) {
    checkpoint[0] = '\0';
    if (snprintf(run, PATH, "%s", from) >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", from);
    }
    if (mn_train_holds_run(from)) return MN_OK;
    char *real = realpath(from, NULL);
    if (!real) return mn_fail(MN_ERR_IO, "%s: %s", from, strerror(errno));
    bool found = snprintf(checkpoint, PATH, "%s", real) < PATH &&
                 snprintf(run, PATH, "%s", real) < PATH;
    free(real);
    for (int up = 0; found && up < 2; up++) {
        char *slash = strrchr(run, '/');
        if (slash) *slash = '\0';
    }
    if (found && mn_train_holds_run(run)) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s is no folder of a run: no train.json in it or two folders up",
                   from);
}

/* A resumed run stays where it is, also when its folder was moved since. */
static mn_status keep_out(mn_json *root, const mn_train_request *r, const char *run) {
    for (int i = 0; i < r->n_sets; i++) {
        if (strncmp(r->sets[i], "out=", 4) != 0) continue;
        return mn_fail(MN_ERR_ARGUMENT, "--set %s: a resumed run stays in its folder; copy the "
                       "folder and resume the copy", r->sets[i]);
    }
    if (json_object_set_new(root->value, "out", json_string(run)) == 0) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s: the name is not valid UTF-8", run);
}

/* ---- a new run ------------------------------------------------------------------------------- */

static mn_status no_text(const char *text) {
    return mn_fail(MN_ERR_ARGUMENT, "%s: the name is not valid UTF-8", text);
}

static json_t *section(mn_json *root, const char *name) {
    json_t *at = json_object_get(root->value, name);
    if (at) return at;
    json_object_set_new(root->value, name, json_object());
    return json_object_get(root->value, name);
}

static mn_status take_inputs(mn_json *root, const mn_train_request *r) {
    json_t *list = json_array();
    for (int i = 0; i < r->n_inputs; i++) {
        if (!exists(r->inputs[i])) {
            json_decref(list);
            return mn_fail(MN_ERR_IO, "%s: %s", r->inputs[i], strerror(errno));
        }
        if (json_array_append_new(list, json_string(r->inputs[i])) != 0) {
            json_decref(list);
            return no_text(r->inputs[i]);
        }
    }
    json_object_set_new(section(root, "data"), "train", list);
    return MN_OK;
}

/* The model of a folder: its configuration, its weights and, where it has one, its tokenizer. */
static mn_status take_model(mn_json *root, const char *from) {
    char folder[MN_FOLDER_PATH], path[PATH];
    mn_json config = { 0 };
    mn_status st = mn_folder_of_model(folder, from);
    if (st == MN_OK) st = mn_run_join(path, folder, "config.json");
    if (st == MN_OK) st = mn_json_load(&config, path, MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_json_expect_object(&config);
    if (st != MN_OK) return st;
    json_object_set(root->value, "model", config.value);
    mn_json_free(&config);
    if (json_object_set_new(section(root, "train"), "from", json_string(folder)) != 0) {
        return no_text(folder);
    }
    st = mn_run_join(path, folder, "tokenizer.json");
    if (st != MN_OK || !exists(path) || json_object_get(section(root, "data"), "tokenizer")) {
        return st;
    }
    json_object_set_new(section(root, "data"), "tokenizer", json_string(folder));
    return MN_OK;
}

/* runs/NAME of the first text; where there is such a run, runs/NAME-2 and so on. */
static void name_run(char out[256], const char *input) {
    char name[128];
    const size_t n = strlen(input);
    size_t end = n, start;
    while (end > 1 && input[end - 1] == '/') end--;
    for (start = end; start > 0 && input[start - 1] != '/'; start--) {}
    snprintf(name, sizeof name, "%.*s", (int)mn_min(end - start, sizeof name - 1), input + start);
    char *dot = strrchr(name, '.');
    if (dot && dot != name) *dot = '\0';
    if (!name[0] || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) strcpy(name, "text");
    snprintf(out, 256, "runs/%s", name);
    for (int i = 2; i < 1000 && exists(out); i++) snprintf(out, 256, "runs/%s-%d", name, i);
}

static mn_status default_out(mn_json *root, const mn_train_request *r) {
    if (json_object_get(root->value, "out")) return MN_OK;
    char out[256] = "runs/";
    if (r->n_inputs > 0 && !mn_train_has_config(r)) {
        name_run(out, r->inputs[0]);
        return json_object_set_new(root->value, "out", json_string(out)) == 0 ? MN_OK
                                                                              : no_text(out);
    }
    const mn_json model = mn_json_member(root, "model");
    const char *layers = "model";
    const mn_status st = mn_json_opt_text(&layers, &model, "layers");
    for (size_t n = 5; st == MN_OK && *layers && n < sizeof out - 1; layers++) {
        if (*layers == ' ' || *layers == '/') continue;
        out[n++] = *layers;
    }
    json_object_set_new(root->value, "out", json_string(out));
    return st;
}

/* ---- paths ----------------------------------------------------------------------------------- */

/* The same file by its path from the root, so that the run can go on from any folder. */
static json_t *absolute(const json_t *path) {
    char *real = json_is_string(path) ? realpath(json_string_value(path), NULL) : NULL;
    json_t *value = real ? json_string(real) : NULL;
    free(real);
    return value;
}

static void make_absolute(void *context, const char *section_name, const char *key) {
    const mn_json *root = context;
    json_t *object = json_object_get(root->value, section_name);
    json_t *at = json_object_get(object, key);
    const char *text = json_is_string(at) ? json_string_value(at) : "";
    if (strcmp(text, "chars") == 0 || strcmp(text, "bytes") == 0) return;    // no files, but kinds
    json_t *fresh = absolute(at);
    if (fresh) {    // in place of `at`, which is gone then
        json_object_set_new(object, key, fresh);
        return;
    }
    for (size_t i = 0; json_is_array(at) && i < json_array_size(at); i++) {
        fresh = absolute(json_array_get(at, i));
        if (fresh) json_array_set_new(at, i, fresh);
    }
}

static void make_all_absolute(mn_json *root) {
    mn_train_options_paths(make_absolute, root);
}

/* ---- the document ---------------------------------------------------------------------------- */

static mn_status set_all(mn_json *root, const mn_train_request *r) {
    mn_status st = mn_json_expect_object(root);
    for (int i = 0; st == MN_OK && i < r->n_sets; i++) st = mn_train_set(root, r->sets[i]);
    return st;
}

static mn_status resumed(mn_json *root, mn_train_request *r, char checkpoint[PATH]) {
    char run[PATH], path[PATH];
    mn_status st = find_run(run, checkpoint, r->resume);
    if (st == MN_OK) st = mn_run_join(path, run, "train.json");
    if (st == MN_OK) st = mn_json_load(root, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = set_all(root, r);
    if (st == MN_OK) st = keep_out(root, r, run);
    if (st == MN_OK) make_all_absolute(root);
    r->choice.per_character = st == MN_OK && mn_train_per_character(root);
    return st;
}

bool mn_train_chooses_size(const mn_train_request *r) {
    const bool chooses = !r->resume && !mn_train_has_config(r) && (r->n_inputs > 0 || r->from);
    return chooses && !(r->choice.size > 0.0);
}

mn_status mn_train_settings(mn_json *root, mn_train_request *r, char checkpoint[PATH]) {
    const bool config = mn_train_has_config(r);
    checkpoint[0] = '\0';
    if (r->resume) return resumed(root, r, checkpoint);
    mn_status st = config ? mn_json_load(root, r->inputs[0], MN_JSON_STANDARD)
                          : mn_json_parse(root, "{}", 2, "--set", MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_json_expect_object(root);
    r->choice.from = r->from != NULL;
    if (st == MN_OK && r->from) st = take_model(root, r->from);
    if (st == MN_OK && r->n_inputs > 0 && !config) st = take_inputs(root, r);
    if (st == MN_OK) st = set_all(root, r);
    const bool chooses = !config && (r->n_inputs > 0 || r->choice.size > 0.0 || r->from);
    if (st == MN_OK && (chooses || r->choice.size > 0.0)) st = mn_train_choose(root, &r->choice);
    if (st == MN_OK) make_all_absolute(root);
    return st == MN_OK ? default_out(root, r) : st;
}

/* ---- what counted ---------------------------------------------------------------------------- */

mn_status mn_train_settings_save(mn_trainer *trainer, const char *device, int threads) {
    char path[PATH], *text = NULL;
    size_t size = 0;
    mn_json model = { 0 };
    json_t *root = NULL;
    const mn_train_options *o = mn_trainer_options(trainer);
    mn_status st = mn_run_join(path, o->out, "settings.json");
    if (st == MN_OK) {
        st = mn_model_config_write(&text, &size, mn_model_describe(mn_trainer_model(trainer)));
    }
    if (st == MN_OK) st = mn_json_parse(&model, text, size, "model", MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_train_options_json(&root, o);
    if (st == MN_OK) {
        json_object_set(root, "model", model.value);
        json_object_set_new(root, "parameters",
                            json_integer(mn_model_count(mn_trainer_model(trainer))));
        json_object_set_new(root, "version", json_string(mn_version()));
        json_object_set_new(root, "commit", json_string(mn_build_commit()));
        json_object_set_new(root, "device", json_string(device ? device : "cpu"));
        json_object_set_new(root, "threads", json_integer(threads));
        st = mn_json_save(path, root);
    }
    json_decref(root);
    mn_json_free(&model);
    free(text);
    return st;
}
