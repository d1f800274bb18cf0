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
#include "io/json_write.h"
#include "io/safetensors.h"
#include "model/families/dialect.h"
#include "model/folder/auto_map.h"
#include "model/folder/quantised.h"
#include "model/folder/stacks.h"
#include "model/folder/weights.h"
#include "model/model_internal.h"
#include "runtime/reserve.h"

enum { PATH = 4096 };

static mn_status join(char path[PATH], const char *folder, const char *name) {
    if (snprintf(path, PATH, "%s/%s", folder, name) < PATH) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s/%s: the path is too long", folder, name);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Straight into the host's memory, or through it to a GPU's. */
static mn_status read_param(mn_model *model, const mn_weights *w, int i) {
    mn_model_param *p = mn_model_param_at(model, i);
    const mn_dtype dtype = mn_model_dtype(model);
    const bool there = mn_model_device_bytes(model) > 0;
    void *numbers = p->value;
    if (there) numbers = malloc((size_t)p->info.count * mn_dtype_bytes(dtype));
    if (!numbers) return mn_fail(MN_ERR_MEMORY, "no memory to read %s", p->name);
    mn_status st = mn_weights_read(numbers, dtype, model, w, i);
    mn_weights_remember(p, mn_weights_find(w, model, p->name));
    if (st == MN_OK && there) st = mn_model_put(model, i, numbers);
    if (there) free(numbers);
    return st;
}

static mn_status count_one(void *count, const mn_stored_tensor *t) {
    (void)t;
    ++*(int64_t *)count;
    return MN_OK;
}

mn_status mn_checkpoint_read_weights(mn_model *model, const char *given) {
    return mn_checkpoint_read_each(model, given, NULL, NULL);
}

mn_status mn_checkpoint_read_each(mn_model *model, const char *given, mn_checkpoint_each fn,
                                  void *context) {
    char folder[MN_FOLDER_PATH];
    mn_weights *w = NULL;
    mn_status st = mn_folder_of_model(folder, given);
    if (st == MN_OK) st = mn_weights_open(&w, folder, model);
    if (st == MN_OK) st = mn_weights_check(model, w);
    for (int i = 0; st == MN_OK && i < mn_model_params(model); i++) {
        mn_model_param *p = mn_model_param_at(model, i);
        const mn_stored_tensor *t = mn_weights_find(w, model, p->name);
        st = mn_quantised_stored(p, t) ? mn_quantised_read(model, w, p, t)
                                       : read_param(model, w, i);
        if (st == MN_OK && fn) st = fn(context, i);
    }
    int64_t n_beside = 0;
    if (st == MN_OK) st = mn_weights_beside(w, model, count_one, &n_beside);
    if (st != MN_OK || n_beside == 0) {
        mn_weights_close(w);
        return st;
    }
    mn_weights_close(model->beside);
    model->beside = w;
    return MN_OK;
}

/* Whether the parameters fit into memory, before any is read. */
static mn_status check_memory(const mn_model_config *config, mn_dtype dtype, const char *folder) {
    mn_model *sketch;
    const mn_status st = mn_model_sketch(&sketch, config);
    if (st != MN_OK) return st;
    const size_t bits = config->quant_bits ? 2 * (size_t)config->quant_bits    // and their scales
                                           : 8 * mn_dtype_bytes(dtype);
    const size_t need = (size_t)mn_model_count(sketch) / 8 * bits;
    mn_model_destroy(sketch);
    return mn_memory_check(need, folder);
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
    if (st == MN_OK) st = check_memory(&config, dtype, folder);
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

/* Part `which` of three, each of as many numbers as `counts` says, of all of them side by side. */
static void *cut(void *all, const int64_t counts[MN_TRIO], int which, size_t item) {
    for (int k = 0; k < which; k++) all = (char *)all + (size_t)counts[k] * item;
    return all;
}

/* What a file that cuts the three elsewhere holds under the name of parameter i: in *copy. */
static mn_status cut_as_stored(mn_stored_tensor *t, void **copy, mn_model *model, int i) {
    const size_t item = mn_dtype_bytes(mn_model_dtype(model));
    int trio[MN_TRIO];
    int64_t theirs[MN_TRIO], ours[MN_TRIO], n = 0;
    const int which = mn_weights_trio(trio, model, mn_model_param_at(model, i)->name);
    for (int k = 0; k < MN_TRIO; k++) {
        const mn_model_param *p = mn_model_param_at(model, trio[k]);
        theirs[k] = 1;
        for (int a = 0; a < p->stored_rank; a++) theirs[k] *= p->stored_shape[a];
        ours[k] = p->info.count;
        n += ours[k];
    }
    void *all = malloc((size_t)n * item);
    *copy = malloc((size_t)theirs[which] * item);
    mn_status st = all && *copy ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to save a convolution");
    for (int k = 0; k < MN_TRIO && st == MN_OK; k++) {
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
    if (st == MN_OK && turned) {
        st = mn_weights_turn(*copy, p->info.shape[0], p->info.shape[1], item);
    }
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

/* Parameter i at the end of the list, or in its place among those of all experts. */
static mn_status list_param(mn_stack_list *list, mn_model *model, int i) {
    const mn_model_config *c = mn_model_describe(model);
    const char *family = mn_model_config_family(c);
    const mn_model_param *p = mn_model_param_at(model, i);
    const char *kind = mn_weights_kind(model, p->name);
    const int n = list->n;
    mn_stacked at;
    mn_dialect_name(list->names[n], family, kind, p->name);
    if (p->quant && model->device) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: quantised weights are saved from the CPU",
                       p->name);
    }
    if (p->quant) {
        const int parts = mn_quantised_tensors(&list->tensors[n], &list->names[n],
                                               &list->copies[n], p);
        list->n += parts;
        return parts ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to save %s", p->name);
    }
    list->tensors[n] = (mn_stored_tensor){ .name = list->names[n] };
    const mn_status st = stored_form(&list->tensors[n], &list->copies[n], model, i);
    list->n++;
    if (st != MN_OK || !mn_dialect_stacked(&at, family, kind, p->name)) return st;
    return mn_stack_add(list, &at, c->block.num_experts,
                        mn_model_dtype(model) == MN_F64 ? MN_STORED_F64 : MN_STORED_F32);
}

static mn_status list_beside(void *context, const mn_stored_tensor *t) {
    mn_stack_list *list = context;
    list->tensors[list->n++] = *t;
    return MN_OK;
}

static mn_status write_weights(mn_model *model, mn_stack_list *list, const char *path) {
    mn_status st = MN_OK;
    for (int i = 0; i < mn_model_params(model) && st == MN_OK; i++) {
        st = list_param(list, model, i);
    }
    if (st == MN_OK && model->beside) {
        st = mn_weights_beside(model->beside, model, list_beside, list);
    }
    const mn_stored_text format = { "format", "pt" };
    return st == MN_OK ? mn_safetensors_write(path, list->tensors, list->n, &format, 1) : st;
}

static mn_status save_weights(mn_model *model, const char *path) {
    int64_t n_beside = 0;
    if (model->beside) mn_weights_beside(model->beside, model, count_one, &n_beside);
    const size_t n = MN_QUANTISED_PARTS * (size_t)mn_model_params(model) + (size_t)n_beside;
    mn_stack_list list = { .tensors = calloc(n, sizeof *list.tensors),
                           .copies = calloc(n, sizeof *list.copies),
                           .names = calloc(n, sizeof *list.names) };
    mn_status st = list.tensors && list.copies && list.names
                       ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to write %s", path);
    if (st == MN_OK) st = write_weights(model, &list, path);
    for (size_t i = 0; list.copies && i < n; i++) free(list.copies[i]);
    free(list.copies);
    free(list.names);
    free(list.tensors);
    return st;
}

/* The configuration, with a class for loaders where there is none (auto_map.h). */
static mn_status save_config(const mn_model_config *config, const char *folder) {
    char path[PATH], *text = NULL;
    size_t size = 0;
    mn_json root = { 0 };
    mn_status st = join(path, folder, "config.json");
    if (st == MN_OK) st = mn_model_config_write(&text, &size, config);
    if (st == MN_OK) st = mn_json_parse(&root, text, size, path, MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_auto_map_add(root.value, config, folder);
    free(text);
    text = NULL;
    if (st == MN_OK) st = mn_json_text(&text, root.value, MN_JSON_PRETTY);
    if (st == MN_OK) st = mn_file_write_bytes(path, text, strlen(text));
    mn_json_free(&root);
    free(text);
    return st;
}

mn_status mn_checkpoint_save(mn_model *model, const char *folder) {
    char path[PATH];
    mn_status st = join(path, folder, "model.safetensors");
    if (st == MN_OK) st = save_weights(model, path);
    return st == MN_OK ? save_config(mn_model_describe(model), folder) : st;
}
