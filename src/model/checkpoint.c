/* checkpoint.c - weights and configuration of a model, to and from its folder. */
#include "model/checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/dtype.h"
#include "base/f16.h"
#include "base/status.h"
#include "io/file.h"
#include "io/folder.h"
#include "io/safetensors.h"
#include "model/families/dialect.h"
#include "model/model_internal.h"

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
#include "model/families/spellings.def"
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

/* The kind of layer that a parameter of a block is in, "hybrid" with a shared block before it;
 * NULL: in none. */
static const char *kind_of(const mn_model *model, const char *name) {
    int i = -1;
    if (sscanf(name, "model.layers.%d.", &i) != 1) return NULL;
    if (mn_model_describe(model)->halves[i] == MN_MLP_SHARED) return "hybrid";
    return mn_layer_kind_name(mn_model_layer(model, i)->kind);
}

/* By the name that its family gives it, with or without the name of the whole model before it, or
 * by one of other spellings. */
static const mn_stored_tensor *find(const weights *w, const mn_model *model, const char *name) {
    char theirs[MN_PARAM_NAME];
    mn_dialect_name(theirs, mn_model_describe(model)->family, kind_of(model, name), name);
    const mn_stored_tensor *found = find_exact(w, theirs);
    const char *rest = strchr(theirs, '.');
    if (!found && rest) found = find_exact(w, rest + 1);
    return found ? found : find_from(w, name, 0, 0);
}

/* ---- weights in 8 or 4 bits ------------------------------------------------------------------ */

/* Codes are stored under the parameter's name, what goes with them under that and a suffix. */
static const char scales_suffix[] = ".scales", least_suffix[] = ".least";

static bool is_codes(const mn_model_param *p, const mn_stored_tensor *t) {
    const bool matrix = p->info.rank == 2 && p->info.group != MN_GROUP_VECTOR;
    return matrix && (t->dtype == MN_STORED_I8 || t->dtype == MN_STORED_U8);
}

static mn_status check_part(const mn_stored_tensor **out, const weights *w, const char *name,
                            const char *suffix, mn_stored_dtype dtype, int64_t rows,
                            int64_t cols) {
    char full[MN_PARAM_NAME + sizeof scales_suffix];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    const mn_stored_tensor *t = find_exact(w, full);
    if (!t) {
        return mn_fail(MN_ERR_FORMAT, "%s: no tensor %s, which belongs to quantised weights",
                       w->folder, full);
    }
    if (t->dtype != dtype || t->rank != 2 || t->shape[0] != rows || t->shape[1] != cols) {
        return mn_fail(MN_ERR_FORMAT, "%s: %s is not %lld x %lld of %s, as the configuration's "
                       "quantization makes it", w->folder, full, (long long)rows, (long long)cols,
                       mn_stored_dtype_name(dtype));
    }
    if (out) *out = t;
    return MN_OK;
}

/* What a file holds of quantised parameter p; codes, scales and least values are the file's. */
static mn_status find_quant(mn_quant_stored *s, const mn_model *model, const weights *w,
                            const mn_model_param *p, const mn_stored_tensor *t) {
    const mn_model_config *c = mn_model_describe(model);
    const int64_t rows = p->info.shape[0], cols = p->info.shape[1];
    if (c->quant_bits == 0) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: %s is quantised, and only a model that config.json "
                       "calls so can have it; training takes the folder that was quantised",
                       w->folder, p->name);
    }
    const mn_stored_tensor *scales = NULL, *least = NULL;
    *s = (mn_quant_stored){ .bits = t->dtype == MN_STORED_I8 ? 8 : 4, .rows = rows, .cols = cols,
                            .group = c->quant_group };
    const int64_t groups = mn_ceil_div(cols, s->group);
    const mn_stored_dtype kind = s->bits == 8 ? MN_STORED_F32 : MN_STORED_F16;
    mn_status st = check_part(NULL, w, t->name, "", t->dtype, rows,
                              s->bits == 8 ? cols : mn_ceil_div(cols, 2));
    if (st == MN_OK) st = check_part(&scales, w, t->name, scales_suffix, kind, rows, groups);
    if (st == MN_OK && s->bits == 4) {
        st = check_part(&least, w, t->name, least_suffix, kind, rows, groups);
    }
    if (st != MN_OK) return st;
    s->codes = (void *)t->data;
    s->scales = (void *)scales->data;
    s->least = least ? (void *)least->data : NULL;
    return MN_OK;
}

/* A file's tensors lie at any address: what is wider than a byte is copied first. */
static mn_status aligned(void **to, const void *from, size_t bytes) {
    *to = malloc(bytes > 0 ? bytes : 1);
    if (!*to) return mn_fail(MN_ERR_MEMORY, "no memory to read quantised weights");
    if (bytes > 0) memcpy(*to, from, bytes);
    return MN_OK;
}

static mn_status read_quant(mn_model *model, const weights *w, mn_model_param *p,
                            const mn_stored_tensor *t) {
    mn_quant_stored s;
    void *scales = NULL, *least = NULL;
    if (mn_model_device_bytes(model) > 0 || mn_model_dtype(model) != MN_F32) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: quantised weights are read as float32 of the host",
                       w->folder);
    }
    mn_status st = find_quant(&s, model, w, p, t);
    if (st != MN_OK) return st;
    const mn_quant_sizes sizes = mn_quant_stored_sizes(&s);
    st = aligned(&scales, s.scales, sizes.scales);
    if (st == MN_OK) st = aligned(&least, s.least, sizes.least);
    s.scales = scales;
    s.least = least;
    mn_quant *q = NULL;
    if (st == MN_OK) st = mn_quant_check(&s, p->name);
    if (st == MN_OK) st = mn_quant_load(&q, &s);
    if (st == MN_OK) {
        mn_quant_free(p->quant);
        p->quant = q;
        free(p->value);
        p->value = NULL;
    }
    free(scales);
    free(least);
    return st;
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

enum { TRIO = 3 };    // q, k and v

/* The three parameters that `name` is one of; returns which of them, -1 if they are not there. */
static int trio_of(int trio[TRIO], mn_model *model, const char *name) {
    static const char *const marks[TRIO] = { ".q_", ".k_", ".v_" };
    int which = -1;
    for (int k = 0; k < TRIO; k++) {
        const char *at = strstr(name, marks[k]);
        if (!at) continue;
        which = k;
        for (int m = 0; m < TRIO; m++) {
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

/* Whether the file cuts the three elsewhere, and has as many numbers in all. */
static bool cut_elsewhere(mn_model *model, const weights *w, const mn_model_param *p) {
    int trio[TRIO];
    int64_t here = 0, there = 0;
    const char *family = mn_model_describe(model)->family;
    if (!mn_dialect_joined(family, p->name) || trio_of(trio, model, p->name) < 0) return false;
    for (int k = 0; k < TRIO; k++) {
        const mn_model_param *one = mn_model_param_at(model, trio[k]);
        const mn_stored_tensor *t = find(w, model, one->name);
        const int last = one->info.rank - 1;
        if (!t || t->rank != last + 1 || t->shape[last] != one->info.shape[last]) return false;
        here += one->info.count;
        there += mn_stored_elements(t);
    }
    return here == there;
}

static mn_status check_all(mn_model *model, const weights *w) {
    for (int i = 0; i < mn_model_params(model); i++) {
        const mn_model_param *p = mn_model_param_at(model, i);
        const mn_stored_tensor *t = find(w, model, p->name);
        if (!t) {
            return mn_fail(MN_ERR_FORMAT, "%s: no tensor %s, which the model's configuration asks "
                           "for", w->folder, p->name);
        }
        const bool turned = mn_dialect_transposed(mn_model_describe(model)->family, p->name);
        mn_quant_stored s;
        if (cut_elsewhere(model, w, p)) continue;
        const mn_status st = is_codes(p, t) ? find_quant(&s, model, w, p, t)
                                            : check_shape(p, t, turned, w->folder);
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

/* The other way round: `rows` of `columns` become as many columns. */
static mn_status turn(void *numbers, int64_t rows, int64_t columns, size_t item) {
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

/* How the file has it, for writing it back so. */
static void remember(mn_model_param *p, const mn_stored_tensor *t) {
    bool same = t->rank == p->info.rank;
    for (int i = 0; same && i < t->rank; i++) same = t->shape[i] == p->info.shape[i];
    p->stored = (int)t->dtype;
    p->stored_rank = same ? -1 : t->rank;
    for (int i = 0; i < 4 && i < t->rank; i++) p->stored_shape[i] = t->shape[i];
}

/* Straight into the host's memory, or through it to a GPU's. */
static mn_status read_param(mn_model *model, int i, const mn_stored_tensor *t) {
    mn_model_param *p = mn_model_param_at(model, i);
    const bool f64 = mn_model_dtype(model) == MN_F64, there = mn_model_device_bytes(model) > 0;
    void *numbers = p->value;
    if (there) numbers = malloc((size_t)p->info.count * mn_dtype_bytes(mn_model_dtype(model)));
    if (!numbers) return mn_fail(MN_ERR_MEMORY, "no memory to read %s", p->name);
    mn_status st = f64 ? mn_safetensors_read_f64(numbers, t) : mn_safetensors_read_f32(numbers, t);
    if (st == MN_OK && mn_dialect_transposed(mn_model_describe(model)->family, p->name)) {
        st = turn(numbers, p->info.shape[1], p->info.shape[0],
                  mn_dtype_bytes(mn_model_dtype(model)));
    }
    remember(p, t);
    if (st == MN_OK && there) st = mn_model_put(model, i, numbers);
    if (there) free(numbers);
    return st;
}

/* Part `which` of three, each of as many numbers as `counts` says, of all of them side by side. */
static void *cut(void *all, const int64_t counts[TRIO], int which, size_t item) {
    for (int k = 0; k < which; k++) all = (char *)all + (size_t)counts[k] * item;
    return all;
}

/* Reads three parameters that the file cuts elsewhere. */
static mn_status read_trio(mn_model *model, const weights *w, int i) {
    const size_t item = mn_dtype_bytes(mn_model_dtype(model));
    const bool f64 = mn_model_dtype(model) == MN_F64;
    int trio[TRIO];
    int64_t theirs[TRIO], ours[TRIO], n = 0;
    const mn_stored_tensor *t[TRIO];
    trio_of(trio, model, mn_model_param_at(model, i)->name);
    for (int k = 0; k < TRIO; k++) {
        t[k] = find(w, model, mn_model_param_at(model, trio[k])->name);
        theirs[k] = mn_stored_elements(t[k]);
        ours[k] = mn_model_param_at(model, trio[k])->info.count;
        n += ours[k];
    }
    void *all = malloc((size_t)n * item);
    if (!all) return mn_fail(MN_ERR_MEMORY, "no memory to read a convolution");
    mn_status st = MN_OK;
    for (int k = 0; k < TRIO && st == MN_OK; k++) {
        void *to = cut(all, theirs, k, item);
        st = f64 ? mn_safetensors_read_f64(to, t[k]) : mn_safetensors_read_f32(to, t[k]);
    }
    for (int k = 0; k < TRIO && st == MN_OK; k++) {
        remember(mn_model_param_at(model, trio[k]), t[k]);
        st = mn_model_put(model, trio[k], cut(all, ours, k, item));
    }
    free(all);
    return st;
}

mn_status mn_checkpoint_read_weights(mn_model *model, const char *given) {
    return mn_checkpoint_read_each(model, given, NULL, NULL);
}

mn_status mn_checkpoint_read_each(mn_model *model, const char *given, mn_checkpoint_each fn,
                                  void *context) {
    char folder[MN_FOLDER_PATH];
    mn_status st = mn_folder_of_model(folder, given);
    if (st != MN_OK) return st;
    weights *w = malloc(sizeof *w);
    if (!w) return mn_fail(MN_ERR_MEMORY, "no memory to read %s", folder);
    st = open_weights(w, folder);
    if (st == MN_OK) st = check_all(model, w);
    for (int i = 0; st == MN_OK && i < mn_model_params(model); i++) {
        mn_model_param *p = mn_model_param_at(model, i);
        const mn_stored_tensor *t = find(w, model, p->name);
        if (is_codes(p, t)) st = read_quant(model, w, p, t);
        else st = cut_elsewhere(model, w, p) ? read_trio(model, w, i) : read_param(model, i, t);
        if (st == MN_OK && fn) st = fn(context, i);
    }
    close_weights(w);
    free(w);
    return st;
}

mn_status mn_checkpoint_create(mn_model **out, const char *given, mn_dtype dtype) {
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
    return st;
}

mn_status mn_checkpoint_load(mn_model **out, const char *given, mn_dtype dtype) {
    mn_status st = mn_checkpoint_create(out, given, dtype);
    if (st == MN_OK) st = mn_checkpoint_read_weights(*out, given);
    if (st != MN_OK) {
        mn_model_destroy(*out);
        *out = NULL;
    }
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

typedef char param_name[MN_PARAM_NAME];

/* Whether all numbers of p are of the type of the file that it was read from: untouched ones are,
 * and are written as they were. */
static bool keeps_type(const mn_model_param *p, const float *x) {
    if (p->stored != MN_STORED_BF16 && p->stored != MN_STORED_F16) return false;
    for (int64_t i = 0; i < p->info.count; i++) {
        const bool bf16 = p->stored == MN_STORED_BF16;
        const float back = bf16 ? mn_bf16_round(x[i]) : mn_f16_to_float(mn_f16_from_float(x[i]));
        if (memcmp(&back, &x[i], sizeof back) != 0) return false;
    }
    return true;
}

/* What a file that cuts the three elsewhere holds under the name of parameter i: in *copy. */
static mn_status cut_as_stored(mn_stored_tensor *t, void **copy, mn_model *model, int i) {
    const size_t item = mn_dtype_bytes(mn_model_dtype(model));
    int trio[TRIO];
    int64_t theirs[TRIO], ours[TRIO], n = 0;
    const int which = trio_of(trio, model, mn_model_param_at(model, i)->name);
    for (int k = 0; k < TRIO; k++) {
        const mn_model_param *p = mn_model_param_at(model, trio[k]);
        theirs[k] = 1;
        for (int a = 0; a < p->stored_rank; a++) theirs[k] *= p->stored_shape[a];
        ours[k] = p->info.count;
        n += ours[k];
    }
    void *all = malloc((size_t)n * item);
    *copy = malloc((size_t)theirs[which] * item);
    mn_status st = all && *copy ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to save a convolution");
    for (int k = 0; k < TRIO && st == MN_OK; k++) {
        st = mn_model_get(model, trio[k], cut(all, ours, k, item));
    }
    if (st == MN_OK) memcpy(*copy, cut(all, theirs, which, item), (size_t)theirs[which] * item);
    free(all);
    t->data = *copy;
    t->bytes = (size_t)theirs[which] * item;
    return st;
}

/* Whether the file that parameter p was read from cut it elsewhere. */
static bool was_cut(const mn_model_param *p) {
    int64_t count = 1;
    for (int a = 0; a < p->stored_rank; a++) count *= p->stored_shape[a];
    return p->stored_rank >= 0 && count != p->info.count;
}

/* The numbers of parameter i as the file gets them: in *copy, to be freed, or as they are. */
static mn_status stored_form(mn_stored_tensor *t, void **copy, mn_model *model, int i) {
    const mn_model_param *p = mn_model_param_at(model, i);
    const size_t item = mn_dtype_bytes(mn_model_dtype(model));
    const bool f64 = mn_model_dtype(model) == MN_F64, there = mn_model_device_bytes(model) > 0;
    const bool turned = mn_dialect_transposed(mn_model_config_family(mn_model_describe(model)),
                                              p->name);
    t->dtype = f64 ? MN_STORED_F64 : MN_STORED_F32;
    t->rank = p->info.rank;
    memcpy(t->shape, p->info.shape, sizeof p->info.shape);
    if (p->stored_rank >= 0) {
        t->rank = p->stored_rank;
        memcpy(t->shape, p->stored_shape, sizeof p->stored_shape);
    } else if (turned) {
        t->shape[0] = p->info.shape[1];
        t->shape[1] = p->info.shape[0];
    }
    mn_status st = MN_OK;
    if (was_cut(p)) return cut_as_stored(t, copy, model, i);
    const bool narrow = !there && !f64 && keeps_type(p, p->value);
    if (there || turned || narrow) {
        *copy = malloc((size_t)p->info.count * item);
        if (!*copy) return mn_fail(MN_ERR_MEMORY, "no memory to save %s", p->name);
        if (there) st = mn_model_get(model, i, *copy);
        else memcpy(*copy, p->value, (size_t)p->info.count * item);
    }
    if (st == MN_OK && turned) st = turn(*copy, p->info.shape[0], p->info.shape[1], item);
    if (narrow || (there && keeps_type(p, *copy))) {
        t->dtype = (mn_stored_dtype)p->stored;
        for (int64_t k = 0; k < p->info.count; k++) {
            const float x = ((const float *)*copy)[k];
            ((uint16_t *)*copy)[k] = p->stored == MN_STORED_BF16 ? mn_bf16_from_float(x)
                                                                 : mn_f16_from_float(x);
        }
    }
    t->data = *copy ? *copy : p->value;
    t->bytes = (size_t)p->info.count * mn_stored_dtype_bytes(t->dtype);
    return st;
}

/* Codes, scales and least values of quantised parameter i, named after names[0]; returns how many
 * tensors that is. */
static int quant_form(mn_stored_tensor *tensors, param_name *names, void **copies,
                      const mn_model_param *p) {
    static const char *const suffixes[] = { "", scales_suffix, least_suffix };
    const mn_quant *q = p->quant;
    mn_quant_stored s = { .bits = q->bits, .rows = q->rows, .cols = q->cols, .group = q->group };
    const mn_quant_sizes sizes = mn_quant_stored_sizes(&s);
    const size_t bytes[] = { sizes.codes, sizes.scales, sizes.least };
    const bool wide = q->bits == 8;
    const int64_t cols[] = { mn_quant_file_row(q), mn_quant_groups(q), mn_quant_groups(q) };
    const mn_stored_dtype kinds[] = { wide ? MN_STORED_I8 : MN_STORED_U8,
                                      wide ? MN_STORED_F32 : MN_STORED_F16, MN_STORED_F16 };
    const int n = wide ? 2 : 3;
    char name[MN_PARAM_NAME];
    snprintf(name, sizeof name, "%s", names[0]);
    for (int k = 0; k < n; k++) {
        if (!(copies[k] = malloc(bytes[k]))) return 0;
        snprintf(names[k], MN_PARAM_NAME, "%.100s%s", name, suffixes[k]);
        tensors[k] = (mn_stored_tensor){ .name = names[k], .dtype = kinds[k], .rank = 2,
                                         .shape = { q->rows, cols[k] }, .data = copies[k],
                                         .bytes = bytes[k] };
    }
    s.codes = copies[0];
    s.scales = copies[1];
    s.least = wide ? NULL : copies[2];
    mn_quant_store(&s, q);
    return n;
}

enum { PARTS = 3 };    // tensors of one parameter at most

static mn_status write_weights(mn_model *model, mn_stored_tensor *tensors, param_name *names,
                               void **copies, const char *path) {
    const char *family = mn_model_config_family(mn_model_describe(model));
    mn_status st = MN_OK;
    int n = 0;
    for (int i = 0; i < mn_model_params(model) && st == MN_OK; i++) {
        const mn_model_param *p = mn_model_param_at(model, i);
        mn_dialect_name(names[n], family, kind_of(model, p->name), p->name);
        if (p->quant && model->device) {
            st = mn_fail(MN_ERR_UNSUPPORTED, "%s: quantised weights are saved from the CPU", path);
        } else if (p->quant) {
            const int parts = quant_form(&tensors[n], &names[n], &copies[n], p);
            if (parts == 0) st = mn_fail(MN_ERR_MEMORY, "no memory to save %s", p->name);
            n += parts;
        } else {
            tensors[n] = (mn_stored_tensor){ .name = names[n] };
            st = stored_form(&tensors[n], &copies[n], model, i);
            n++;
        }
    }
    const mn_stored_text format = { "format", "pt" };
    return st == MN_OK ? mn_safetensors_write(path, tensors, n, &format, 1) : st;
}

static mn_status save_weights(mn_model *model, const char *path) {
    const size_t n = PARTS * (size_t)mn_model_params(model);
    mn_stored_tensor *tensors = calloc(n, sizeof *tensors);
    void **copies = calloc(n, sizeof *copies);
    param_name *names = calloc(n, sizeof *names);
    mn_status st = tensors && copies && names
                       ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to write %s", path);
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
