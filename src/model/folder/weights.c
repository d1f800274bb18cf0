/* weights.c - finds the tensors of a folder by the parameters of a model, and reads them where the
 * files are mapped. */
#include "model/folder/weights.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "io/file.h"
#include "model/families/dialect.h"
#include "model/folder/quantised.h"

enum { PATH = 4096, MAX_FILES = 1024 };

static mn_status join(char path[PATH], const char *folder, const char *name) {
    if (snprintf(path, PATH, "%s/%s", folder, name) < PATH) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s/%s: the path is too long", folder, name);
}

/* The part of a tensor of all experts that is one parameter. */
typedef struct slice {
    char name[MN_PARAM_NAME];    // the parameter's
    mn_stored_tensor tensor;
    const mn_stored_tensor *whole;
} slice;

struct mn_weights {
    mn_safetensors *files[MAX_FILES];
    int n_files;
    char folder[PATH];
    slice *slices;               // by name
    size_t n_slices;
};

void mn_weights_close(mn_weights *w) {
    if (!w) return;
    for (int i = 0; i < w->n_files; i++) mn_safetensors_close(w->files[i]);
    free(w->slices);
    free(w);
}

static mn_status open_file(mn_weights *w, const char *name) {
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
static mn_status open_index(mn_weights *w, const mn_json *index) {
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

static mn_status open_all(mn_weights *w, const char *folder) {
    char path[PATH];
    mn_status st = join(path, folder, "model.safetensors.index.json");
    if (st != MN_OK) return st;
    snprintf(w->folder, sizeof w->folder, "%s", folder);
    mn_file probe;
    if (mn_file_map(&probe, path) != MN_OK) return open_file(w, "model.safetensors");
    mn_file_unmap(&probe);
    mn_json index = { 0 };
    st = mn_json_load(&index, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = open_index(w, &index);
    mn_json_free(&index);
    return st;
}

/* ---- experts of one tensor ------------------------------------------------------------------- */

static int compare_slices(const void *a, const void *b) {
    return strcmp(((const slice *)a)->name, ((const slice *)b)->name);
}

/* Part at->part of expert at->expert of `whole`. */
static mn_status cut_slice(slice *out, const mn_weights *w, const mn_model *model,
                           const mn_stored_tensor *whole, const mn_stacked *at, const char *name) {
    const int64_t E = mn_model_describe(model)->block.num_experts;
    if (whole->rank != 3 || whole->shape[0] != E || whole->shape[1] % at->parts != 0) {
        return mn_fail(MN_ERR_FORMAT, "%s: %s has not the matrices of %lld experts", w->folder,
                       whole->name, (long long)E);
    }
    const size_t bytes = whole->bytes / (size_t)(E * at->parts);
    *out = (slice){ .whole = whole, .tensor = *whole };
    snprintf(out->name, sizeof out->name, "%s", name);
    out->tensor.rank = 2;
    out->tensor.shape[0] = whole->shape[1] / at->parts;
    out->tensor.shape[1] = whole->shape[2];
    out->tensor.bytes = bytes;
    out->tensor.data = (const char *)whole->data + bytes * (size_t)(at->expert * at->parts +
                                                                    at->part);
    return MN_OK;
}

/* Cuts what files of the model's family keep for all experts at once. */
static mn_status cut_stacks(mn_weights *w, const mn_model *model) {
    const char *family = mn_model_describe(model)->family;
    const int n = mn_model_params(model);
    mn_status st = MN_OK;
    for (int i = 0; i < n && st == MN_OK; i++) {
        const char *name = mn_model_param_at((mn_model *)model, i)->name;
        mn_stacked at;
        if (!mn_dialect_stacked(&at, family, mn_weights_kind(model, name), name)) continue;
        const mn_stored_tensor *whole = mn_weights_exact(w, at.name);
        if (!whole) continue;
        if (!w->slices) w->slices = calloc((size_t)n, sizeof *w->slices);
        if (!w->slices) return mn_fail(MN_ERR_MEMORY, "no memory to read %s", w->folder);
        st = cut_slice(&w->slices[w->n_slices++], w, model, whole, &at, name);
    }
    if (w->slices) qsort(w->slices, w->n_slices, sizeof *w->slices, compare_slices);
    for (size_t i = 0; i < w->n_slices; i++) w->slices[i].tensor.name = w->slices[i].name;
    return st;
}

static const mn_stored_tensor *find_slice(const mn_weights *w, const char *name) {
    slice key;
    if (w->n_slices == 0) return NULL;
    snprintf(key.name, sizeof key.name, "%s", name);
    const slice *found = bsearch(&key, w->slices, w->n_slices, sizeof *w->slices, compare_slices);
    return found ? &found->tensor : NULL;
}

const mn_stored_tensor *mn_weights_whole(const mn_weights *w, const mn_stored_tensor *t) {
    const mn_stored_tensor *cut = t ? find_slice(w, t->name) : NULL;
    return cut && cut == t ? ((const slice *)((const char *)t - offsetof(slice, tensor)))->whole
                           : t;
}

mn_status mn_weights_open(mn_weights **out, const char *folder, const mn_model *model) {
    *out = NULL;
    mn_weights *w = calloc(1, sizeof *w);
    if (!w) return mn_fail(MN_ERR_MEMORY, "no memory to read %s", folder);
    mn_status st = open_all(w, folder);
    if (st == MN_OK) st = cut_stacks(w, model);
    if (st == MN_OK) *out = w;
    else mn_weights_close(w);
    return st;
}

int mn_weights_files(const mn_weights *w) {
    return w->n_files;
}

const mn_safetensors *mn_weights_file(const mn_weights *w, int i) {
    return w->files[i];
}

/* Other spellings of a parameter's name in files. */
static const struct {
    const char *ours, *theirs;
} spellings[] = {
#define SPELLING(ours, theirs) { ours, theirs },
#include "model/families/spellings.def"
#undef SPELLING
};

const mn_stored_tensor *mn_weights_exact(const mn_weights *w, const char *name) {
    for (int i = 0; i < w->n_files; i++) {
        const mn_stored_tensor *found = mn_safetensors_find(w->files[i], name);
        if (found) return found;
    }
    return NULL;
}

const char *mn_weights_folder(const mn_weights *w) {
    return w->folder;
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

static const mn_stored_tensor *find_from(const mn_weights *w, const char *name, size_t first,
                                         int depth) {
    const mn_stored_tensor *found = mn_weights_exact(w, name);
    const size_t n = sizeof spellings / sizeof *spellings;
    for (size_t i = first; !found && depth < MAX_SPELLINGS && i < n; i++) {
        char other[MN_PARAM_NAME];
        if (!respell(other, name, spellings[i].ours, spellings[i].theirs)) continue;
        found = find_from(w, other, i + 1, depth + 1);
    }
    return found;
}

const char *mn_weights_kind(const mn_model *model, const char *name) {
    int i = -1;
    if (sscanf(name, "model.layers.%d.", &i) != 1) return NULL;
    if (mn_model_describe(model)->halves[i] == MN_MLP_SHARED) return "hybrid";
    return mn_layer_kind_name(mn_model_layer(model, i)->kind);
}

mn_status mn_weights_beside(const mn_weights *w, const mn_model *model,
                            mn_status (*visit)(void *context, const mn_stored_tensor *t),
                            void *context) {
    const char *family = mn_model_describe(model)->family;
    mn_status st = MN_OK;
    for (int i = 0; i < w->n_files; i++) {
        for (int64_t k = 0; st == MN_OK && k < mn_safetensors_count(w->files[i]); k++) {
            const mn_stored_tensor *t = mn_safetensors_at(w->files[i], k);
            if (mn_dialect_beside(family, t->name)) st = visit(context, t);
        }
    }
    return st;
}

/* A slice; or by the name that its family gives it, with or without the name of the whole model
 * before it, or by one of other spellings. */
const mn_stored_tensor *mn_weights_find(const mn_weights *w, const mn_model *model,
                                        const char *name) {
    char theirs[MN_PARAM_NAME];
    const mn_stored_tensor *found = find_slice(w, name);
    if (found) return found;
    mn_dialect_name(theirs, mn_model_describe(model)->family, mn_weights_kind(model, name), name);
    found = mn_weights_exact(w, theirs);
    const char *rest = strchr(theirs, '.');
    if (!found && rest) found = mn_weights_exact(w, rest + 1);
    return found ? found : find_from(w, name, 0, 0);
}

static mn_status check_shape(const mn_model_param *p, const mn_stored_tensor *t, bool turned,
                             const char *folder) {
    bool same = t->rank == p->info.rank;
    for (int i = 0; same && i < t->rank; i++) {
        same = t->shape[turned ? t->rank - 1 - i : i] == p->info.shape[i];
    }
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

int mn_weights_trio(int trio[MN_TRIO], mn_model *model, const char *name) {
    static const char *const marks[MN_TRIO] = { ".q_", ".k_", ".v_" };
    int which = -1;
    for (int k = 0; k < MN_TRIO; k++) {
        const char *at = strstr(name, marks[k]);
        if (!at) continue;
        which = k;
        for (int m = 0; m < MN_TRIO; m++) {
            char other[MN_PARAM_NAME];
            snprintf(other, sizeof other, "%.*s%s%s", (int)(at - name), name, marks[m],
                     at + strlen(marks[k]));
            mn_model_param *p = mn_model_param_named(model, other);
            if (!p) return -1;
            trio[m] = (int)(p - mn_model_param_at(model, 0));
        }
    }
    return which;
}

bool mn_weights_cut(mn_model *model, const mn_weights *w, const mn_model_param *p) {
    int trio[MN_TRIO];
    int64_t here = 0, there = 0;
    const char *family = mn_model_describe(model)->family;
    if (!mn_dialect_joined(family, p->name)) return false;
    if (mn_weights_trio(trio, model, p->name) < 0) return false;
    for (int k = 0; k < MN_TRIO; k++) {
        const mn_model_param *one = mn_model_param_at(model, trio[k]);
        const mn_stored_tensor *t = mn_weights_find(w, model, one->name);
        const int last = one->info.rank - 1;
        if (!t || t->rank != last + 1 || t->shape[last] != one->info.shape[last]) return false;
        here += one->info.count;
        there += mn_stored_elements(t);
    }
    return here == there;
}

mn_status mn_weights_check(mn_model *model, const mn_weights *w) {
    for (int i = 0; i < mn_model_params(model); i++) {
        const mn_model_param *p = mn_model_param_at(model, i);
        const mn_stored_tensor *t = mn_weights_find(w, model, p->name);
        if (!t) {
            return mn_fail(MN_ERR_FORMAT, "%s: no tensor %s, which the model's configuration asks "
                           "for", w->folder, p->name);
        }
        const bool turned = mn_dialect_transposed(mn_model_describe(model)->family, p->name);
        if (mn_weights_cut(model, w, p)) continue;
        const mn_status st = mn_quantised_stored(p, t) ? mn_quantised_check(model, w, p, t)
                                                       : check_shape(p, t, turned, w->folder);
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

mn_status mn_weights_turn(void *numbers, int64_t rows, int64_t columns, size_t item) {
    char *copy = malloc((size_t)(rows * columns) * item);
    if (!copy) return mn_fail(MN_ERR_MEMORY, "no memory to turn a matrix");
    memcpy(copy, numbers, (size_t)(rows * columns) * item);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t k = 0; k < columns; k++) {
            memcpy((char *)numbers + (size_t)(k * rows + i) * item,
                   copy + (size_t)(i * columns + k) * item, item);
        }
    }
    free(copy);
    return MN_OK;
}

void mn_weights_remember(mn_model_param *p, const mn_stored_tensor *t) {
    bool same = t->rank == p->info.rank;
    for (int i = 0; same && i < t->rank; i++) same = t->shape[i] == p->info.shape[i];
    p->stored = (int)t->dtype;
    p->stored_rank = same ? -1 : t->rank;
    for (int i = 0; i < 4 && i < t->rank; i++) p->stored_shape[i] = t->shape[i];
}

/* ---- reading --------------------------------------------------------------------------------- */

mn_stored_dtype mn_weights_dtype(const mn_weights *w, const mn_model *model, const char *name) {
    return mn_weights_find(w, model, name)->dtype;
}

/* Copies elements [first, first + count) of q, k and v as they follow each other in the file. */
static mn_status copy_cut(void *out, mn_model *model, const mn_weights *w, const int trio[MN_TRIO],
                          int64_t first, int64_t count) {
    int64_t at = 0;
    const mn_stored_tensor *t0 = NULL;
    for (int k = 0; k < MN_TRIO; k++) {
        const mn_stored_tensor *t = mn_weights_find(w, model,
                                                    mn_model_param_at(model, trio[k])->name);
        const int64_t n = mn_stored_elements(t);
        const size_t item = mn_stored_dtype_bytes(t->dtype);
        if (!t0) t0 = t;
        if (t->dtype != t0->dtype) {
            return mn_fail(MN_ERR_FORMAT, "%s and %s are one matrix cut in parts of two types",
                           t0->name, t->name);
        }
        const int64_t from = mn_max(first, at), to = mn_min(first + count, at + n);
        if (from < to) {
            memcpy((char *)out + (size_t)(from - first) * item,
                   (const char *)t->data + (size_t)(from - at) * item, (size_t)(to - from) * item);
        }
        at += n;
    }
    return MN_OK;
}

mn_status mn_weights_raw(void *out, mn_model *model, const mn_weights *w, int i) {
    const mn_model_param *p = mn_model_param_at(model, i);
    if (mn_weights_cut(model, w, p)) {
        int trio[MN_TRIO];
        int64_t first = 0;
        const int which = mn_weights_trio(trio, model, p->name);
        for (int k = 0; k < which; k++) first += mn_model_param_at(model, trio[k])->info.count;
        return copy_cut(out, model, w, trio, first, p->info.count);
    }
    const mn_stored_tensor *t = mn_weights_find(w, model, p->name);
    memcpy(out, t->data, t->bytes);
    if (!mn_dialect_transposed(mn_model_describe(model)->family, p->name)) return MN_OK;
    return mn_weights_turn(out, p->info.shape[1], p->info.shape[0],
                           mn_stored_dtype_bytes(t->dtype));
}

/* Numbers of the file's type as float32 or float64. */
static mn_status as_numbers(void *out, mn_dtype dtype, const void *raw, mn_stored_dtype stored,
                            int64_t count) {
    const mn_stored_tensor t = { .name = "a parameter", .dtype = stored, .rank = 1,
                                 .shape = { count }, .data = raw,
                                 .bytes = (size_t)count * mn_stored_dtype_bytes(stored) };
    return dtype == MN_F64 ? mn_safetensors_read_f64(out, &t) : mn_safetensors_read_f32(out, &t);
}

mn_status mn_weights_read(void *numbers, mn_dtype dtype, mn_model *model, const mn_weights *w,
                          int i) {
    const mn_model_param *p = mn_model_param_at(model, i);
    const mn_stored_tensor *t = mn_weights_find(w, model, p->name);
    if (mn_weights_cut(model, w, p)) {
        void *raw = malloc((size_t)p->info.count * mn_stored_dtype_bytes(t->dtype));
        if (!raw) return mn_fail(MN_ERR_MEMORY, "no memory to read %s", p->name);
        mn_status st = mn_weights_raw(raw, model, w, i);
        if (st == MN_OK) st = as_numbers(numbers, dtype, raw, t->dtype, p->info.count);
        free(raw);
        return st;
    }
    const mn_status st = as_numbers(numbers, dtype, t->data, t->dtype, p->info.count);
    if (st != MN_OK || !mn_dialect_transposed(mn_model_describe(model)->family, p->name)) return st;
    return mn_weights_turn(numbers, p->info.shape[1], p->info.shape[0], mn_dtype_bytes(dtype));
}
