/* checkpoint.c - weights and configuration of a model, to and from its folder. */
#include "model/checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "io/file.h"
#include "io/folder.h"
#include "io/safetensors.h"
#include "model/dialect.h"

enum { PATH = 4096, MAX_FILES = 1024 };

static mn_status join(char path[PATH], const char *folder, const char *name) {
    if (snprintf(path, PATH, "%s/%s", folder, name) < PATH) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s/%s: the path is too long", folder, name);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The files that hold a model's weights. */
typedef struct weights {
    mn_safetensors *files[MAX_FILES];
    int n_files;
    const char *folder;
} weights;

static void close_weights(weights *w) {
    for (int i = 0; i < w->n_files; i++) mn_safetensors_close(w->files[i]);
    w->n_files = 0;
}

static mn_status open_file(weights *w, const char *name) {
    char path[PATH];
    mn_status st = join(path, w->folder, name);
    if (st == MN_OK && w->n_files == MAX_FILES) {
        st = mn_fail(MN_ERR_FORMAT, "%s: more than %d files of weights", w->folder, MAX_FILES);
    }
    if (st == MN_OK) st = mn_safetensors_open(&w->files[w->n_files], path);
    if (st == MN_OK) w->n_files++;
    return st;
}

/* Each file of the index once. Names must not lead out of the folder. */
static mn_status open_index(weights *w, const mn_json *index) {
    const mn_json map = mn_json_member(index, "weight_map");
    mn_status st = mn_json_expect_object(&map);
    const char *opened[MAX_FILES];
    for (mn_json at = { 0 }; st == MN_OK && mn_json_next(&at, &map);) {
        const char *name;
        st = mn_json_read_text(&name, &at);
        if (st != MN_OK) break;
        if (strchr(name, '/')) return mn_json_fail(&at, "\"%s\" is no file of the folder", name);
        bool known = false;
        for (int i = 0; i < w->n_files; i++) known |= strcmp(opened[i], name) == 0;
        if (known) continue;
        if (w->n_files < MAX_FILES) opened[w->n_files] = name;
        st = open_file(w, name);
    }
    return st;
}

static mn_status open_weights(weights *w, const char *folder) {
    *w = (weights){ .folder = folder };
    char path[PATH];
    mn_status st = join(path, folder, "model.safetensors.index.json");
    if (st != MN_OK) return st;
    mn_file probe;
    if (mn_file_map(&probe, path) != MN_OK) return open_file(w, "model.safetensors");
    mn_file_unmap(&probe);
    mn_json index = { 0 };
    st = mn_json_load(&index, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = open_index(w, &index);
    mn_json_free(&index);
    if (st != MN_OK) close_weights(w);
    return st;
}

/* Other spellings of a parameter's name in files. */
static const struct {
    const char *ours, *theirs;
} spellings[] = {
#define SPELLING(ours, theirs) { ours, theirs },
#include "model/spellings.def"
#undef SPELLING
};

static const mn_stored_tensor *find_exact(const weights *w, const char *name) {
    for (int i = 0; i < w->n_files; i++) {
        const mn_stored_tensor *found = mn_safetensors_find(w->files[i], name);
        if (found) return found;
    }
    return NULL;
}

/* `name` with the first `ours` in it replaced, if it is there and the result fits. */
static bool respell(char out[MN_PARAM_NAME], const char *name, const char *ours,
                    const char *theirs) {
    const char *at = strstr(name, ours);
    if (!at) return false;
    const int n = snprintf(out, MN_PARAM_NAME, "%.*s%s%s", (int)(at - name), name, theirs,
                           at + strlen(ours));
    return n < MN_PARAM_NAME;
}

enum { MAX_SPELLINGS = 4 };    // that one name may need at once

static const mn_stored_tensor *find_from(const weights *w, const char *name, size_t first,
                                         int depth) {
    const mn_stored_tensor *found = find_exact(w, name);
    const size_t n = sizeof spellings / sizeof *spellings;
    for (size_t i = first; !found && depth < MAX_SPELLINGS && i < n; i++) {
        char other[MN_PARAM_NAME];
        if (!respell(other, name, spellings[i].ours, spellings[i].theirs)) continue;
        found = find_from(w, other, i + 1, depth + 1);
    }
    return found;
}

/* By the name that its family gives it, or by one of other spellings. */
static const mn_stored_tensor *find(const weights *w, const mn_model *model, const char *name) {
    char theirs[MN_PARAM_NAME];
    mn_dialect_name(theirs, mn_model_describe(model)->family, name);
    const mn_stored_tensor *found = find_exact(w, theirs);
    return found ? found : find_from(w, name, 0, 0);
}

static mn_status check_shape(const mn_model_param *p, const mn_stored_tensor *t,
                             const char *folder) {
    bool same = t->rank == p->info.rank;
    for (int i = 0; same && i < t->rank; i++) same = t->shape[i] == p->info.shape[i];
    /* (n) may be stored as (1,n) or (n,1) and a single number as () */
    if (same || (mn_stored_elements(t) == p->info.count && (t->rank == 0 || p->info.rank == 1))) {
        return MN_OK;
    }
    char want[96] = "", have[96] = "";
    for (int i = 0; i < p->info.rank; i++) {
        snprintf(want + strlen(want), sizeof want - strlen(want), "%s%lld", i ? " x " : "",
                 (long long)p->info.shape[i]);
    }
    for (int i = 0; i < t->rank; i++) {
        snprintf(have + strlen(have), sizeof have - strlen(have), "%s%lld", i ? " x " : "",
                 (long long)t->shape[i]);
    }
    return mn_fail(MN_ERR_FORMAT, "%s: %s is %s, the model's configuration makes it %s", folder,
                   p->name, have, want);
}

static mn_status check_all(mn_model *model, const weights *w) {
    for (int i = 0; i < mn_model_params(model); i++) {
        const mn_model_param *p = mn_model_param_at(model, i);
        const mn_stored_tensor *t = find(w, model, p->name);
        if (!t) {
            return mn_fail(MN_ERR_FORMAT, "%s: no tensor %s, which the model's configuration asks "
                           "for", w->folder, p->name);
        }
        const mn_status st = check_shape(p, t, w->folder);
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

/* Straight into the host's memory, or through it to a GPU's. */
static mn_status read_param(mn_model *model, int i, const mn_stored_tensor *t) {
    const mn_model_param *p = mn_model_param_at(model, i);
    const bool f64 = mn_model_dtype(model) == MN_F64, there = mn_model_device_bytes(model) > 0;
    void *numbers = p->value;
    if (there) numbers = malloc((size_t)p->info.count * mn_dtype_bytes(mn_model_dtype(model)));
    if (!numbers) return mn_fail(MN_ERR_MEMORY, "no memory to read %s", p->name);
    mn_status st = f64 ? mn_safetensors_read_f64(numbers, t) : mn_safetensors_read_f32(numbers, t);
    if (st == MN_OK && there) st = mn_model_put(model, i, numbers);
    if (there) free(numbers);
    return st;
}

mn_status mn_checkpoint_read_weights(mn_model *model, const char *given) {
    char folder[MN_FOLDER_PATH];
    mn_status st = mn_folder_of_model(folder, given);
    if (st != MN_OK) return st;
    weights *w = malloc(sizeof *w);
    if (!w) return mn_fail(MN_ERR_MEMORY, "no memory to read %s", folder);
    st = open_weights(w, folder);
    if (st == MN_OK) st = check_all(model, w);
    for (int i = 0; st == MN_OK && i < mn_model_params(model); i++) {
        st = read_param(model, i, find(w, model, mn_model_param_at(model, i)->name));
    }
    close_weights(w);
    free(w);
    return st;
}

mn_status mn_checkpoint_load(mn_model **out, const char *given, mn_dtype dtype) {
    *out = NULL;
    char path[PATH], folder[MN_FOLDER_PATH];
    mn_json root = { 0 };
    mn_model_config config = { 0 };
    mn_status st = mn_folder_of_model(folder, given);
    if (st == MN_OK) st = join(path, folder, "config.json");
    if (st == MN_OK) st = mn_json_load(&root, path, MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_model_config_read(&config, &root);
    mn_json_free(&root);
    if (st == MN_OK) st = mn_model_create(out, &config, dtype);
    mn_model_config_free(&config);
    if (st == MN_OK) st = mn_checkpoint_read_weights(*out, folder);
    if (st != MN_OK) {
        mn_model_destroy(*out);
        *out = NULL;
    }
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* Values that are on a GPU, copied to memory of the host, (n_params) pieces; to be freed. */
static mn_status fetch_weights(void **copies, mn_model *model) {
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < mn_model_params(model); i++) {
        const mn_model_param *p = mn_model_param_at(model, i);
        copies[i] = malloc((size_t)p->info.count * mn_dtype_bytes(mn_model_dtype(model)));
        st = copies[i] ? mn_model_get(model, i, copies[i])
                       : mn_fail(MN_ERR_MEMORY, "no memory to save %s", p->name);
    }
    return st;
}

typedef char param_name[MN_PARAM_NAME];

static mn_status write_weights(mn_model *model, mn_stored_tensor *tensors, param_name *names,
                               void *const *copies, const char *path) {
    const int n = mn_model_params(model);
    const bool f64 = mn_model_dtype(model) == MN_F64;
    const char *family = mn_model_config_family(mn_model_describe(model));
    for (int i = 0; i < n; i++) {
        const mn_model_param *p = mn_model_param_at(model, i);
        mn_dialect_name(names[i], family, p->name);
        mn_stored_tensor *t = &tensors[i];
        *t = (mn_stored_tensor){ .name = names[i], .dtype = f64 ? MN_STORED_F64 : MN_STORED_F32,
                                 .rank = p->info.rank, .data = copies[i] ? copies[i] : p->value };
        memcpy(t->shape, p->info.shape, sizeof p->info.shape);
        t->bytes = (size_t)p->info.count * mn_dtype_bytes(mn_model_dtype(model));
    }
    const mn_stored_text format = { "format", "pt" };
    return mn_safetensors_write(path, tensors, n, &format, 1);
}

static mn_status save_weights(mn_model *model, const char *path) {
    const size_t n = (size_t)mn_model_params(model);
    mn_stored_tensor *tensors = calloc(n, sizeof *tensors);
    void **copies = calloc(n, sizeof *copies);
    param_name *names = calloc(n, sizeof *names);
    mn_status st = tensors && copies && names
                       ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to write %s", path);
    if (st == MN_OK && mn_model_device_bytes(model) > 0) st = fetch_weights(copies, model);
    if (st == MN_OK) st = write_weights(model, tensors, names, copies, path);
    for (size_t i = 0; copies && i < n; i++) free(copies[i]);
    free(copies);
    free(names);
    free(tensors);
    return st;
}

mn_status mn_checkpoint_save(mn_model *model, const char *folder) {
    char path[PATH], *text = NULL;
    size_t size = 0;
    mn_status st = join(path, folder, "model.safetensors");
    if (st == MN_OK) st = save_weights(model, path);
    if (st == MN_OK) st = mn_model_config_write(&text, &size, mn_model_describe(model));
    if (st == MN_OK) st = join(path, folder, "config.json");
    if (st == MN_OK) st = mn_file_write_bytes(path, text, size);
    free(text);
    return st;
}
