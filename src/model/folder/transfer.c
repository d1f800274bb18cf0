/* transfer.c - finds for each tensor of a folder to be where its numbers come from. */
#include "model/folder/transfer.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/json_write.h"
#include "model/families/dialect.h"
#include "model/folder/same.h"

static int param_named(const mn_model *model, const char *name) {
    mn_model *m = (mn_model *)model;
    const mn_model_param *p = mn_model_param_named(m, name);
    return p ? (int)(p - mn_model_param_at(m, 0)) : MN_TRANSFER_MADE;
}

/* Of all experts: the tensor of the first of them, or that which has parameter i as well. */
static void describe_stack(mn_transfer *t, int i, mn_stored_dtype dtype, const mn_stacked *at) {
    const mn_param_info *info = &mn_model_param_at(t->target, i)->info;
    int k = t->n_tensors - 1;
    while (k >= 0 && strcmp(t->tensors[k].name, at->name) != 0) k--;
    t->place[i] = (at->expert * at->parts + at->part) * info->count;
    if (k >= 0) {
        t->next[i] = t->first[k];
        t->first[k] = i;
        return;
    }
    mn_emit_tensor *e = &t->tensors[t->n_tensors];
    const int64_t E = mn_model_describe(t->target)->block.num_experts;
    t->first[t->n_tensors++] = i;
    *e = (mn_emit_tensor){ .dtype = dtype == MN_STORED_COUNT ? t->dtypes[i] : dtype, .rank = 3,
                           .shape = { E, at->parts * info->shape[0], info->shape[1] },
                           .count = E * at->parts * info->count };
    memcpy(e->name, at->name, sizeof e->name);
}

/* What is written for parameter i of the target. */
static void describe(mn_transfer *t, int i, mn_stored_dtype dtype) {
    const mn_model_param *p = mn_model_param_at(t->target, i);
    const char *kind = mn_weights_kind(t->target, p->name);
    mn_stacked at;
    t->next[i] = -1;
    if (mn_dialect_stacked(&at, t->family, kind, p->name)) {
        describe_stack(t, i, dtype, &at);
        return;
    }
    mn_emit_tensor *e = &t->tensors[t->n_tensors];
    t->first[t->n_tensors++] = i;
    mn_dialect_name(e->name, t->family, kind, p->name);
    e->dtype = dtype == MN_STORED_COUNT ? t->dtypes[i] : dtype;
    e->count = p->info.count;
    e->rank = p->info.rank;
    memcpy(e->shape, p->info.shape, sizeof p->info.shape);
    if (t->same_family && t->from[i] != MN_TRANSFER_MADE) {
        const mn_stored_tensor *s = mn_weights_find(t->source->weights, t->source->model, p->name);
        e->rank = s->rank;
        memcpy(e->shape, s->shape, sizeof e->shape);
        e->count = mn_stored_elements(s);
    } else if (mn_dialect_transposed(t->family, p->name)) {
        e->shape[0] = p->info.shape[1];
        e->shape[1] = p->info.shape[0];
    }
}

static mn_status match(mn_transfer *t, int i, const bool *is_made, const mn_stored_dtype *made) {
    const mn_source *s = t->source;
    const char *name = mn_model_param_at(t->target, i)->name;
    t->from[i] = is_made && is_made[i] ? MN_TRANSFER_MADE : param_named(s->model, name);
    if (is_made && is_made[i]) {
        t->dtypes[i] = made[i];
        return MN_OK;
    }
    if (t->from[i] == MN_TRANSFER_MADE) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: nothing there becomes %s", s->folder, name);
    }
    if (mn_model_param_at(s->model, t->from[i])->info.count !=
        mn_model_param_at(t->target, i)->info.count) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: %s has another shape there", s->folder, name);
    }
    t->dtypes[i] = mn_weights_dtype(s->weights, s->model, name);
    return MN_OK;
}

/* A tensor of what is beside the model, behind those of the parameters. */
static mn_status describe_beside(void *transfer, const mn_stored_tensor *s) {
    mn_transfer *t = transfer;
    mn_emit_tensor *e = &t->tensors[t->n_tensors];
    if (strlen(s->name) >= sizeof e->name || s->rank > MN_STORED_MAX_RANK) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: the name is too long to be written", s->name);
    }
    const bool real = s->dtype == MN_STORED_F32 || s->dtype == MN_STORED_F16 ||
                      s->dtype == MN_STORED_BF16;
    *e = (mn_emit_tensor){ .dtype = real && t->as != MN_STORED_COUNT ? t->as : s->dtype,
                           .rank = s->rank, .count = mn_stored_elements(s) };
    memcpy(e->name, s->name, strlen(s->name) + 1);
    memcpy(e->shape, s->shape, sizeof e->shape);
    t->beside[t->n_beside++] = s;
    t->n_tensors++;
    return MN_OK;
}

static mn_status count_one(void *count, const mn_stored_tensor *s) {
    (void)s;
    ++*(int *)count;
    return MN_OK;
}

/* Memory for lists of n parameters and of what is beside them. */
static mn_status allocate(mn_transfer *t) {
    const size_t n = (size_t)t->n;
    int beside = 0;
    if (t->same_family) mn_weights_beside(t->source->weights, t->source->model, count_one, &beside);
    t->from = calloc(n, sizeof *t->from);
    t->dtypes = calloc(n, sizeof *t->dtypes);
    t->tensors = calloc(n + (size_t)beside, sizeof *t->tensors);
    t->first = calloc(n, sizeof *t->first);
    t->next = calloc(n, sizeof *t->next);
    t->place = calloc(n, sizeof *t->place);
    t->beside = calloc((size_t)beside + 1, sizeof *t->beside);
    const bool all = t->from && t->dtypes && t->tensors && t->first && t->next && t->place &&
                     t->beside;
    return all ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to plan a folder");
}

mn_status mn_transfer_create(mn_transfer **out, const mn_source *source, mn_model *target,
                             mn_stored_dtype dtype, const bool *is_made,
                             const mn_stored_dtype *made) {
    mn_transfer *t = calloc(1, sizeof *t);
    *out = NULL;
    if (!t) {
        mn_model_destroy(target);
        return mn_fail(MN_ERR_MEMORY, "no memory to plan a folder");
    }
    const mn_model_config *here = mn_model_describe(source->model);
    t->source = source;
    t->target = target;
    t->n = mn_model_params(target);
    t->family = mn_model_config_family(mn_model_describe(target));
    const char *theirs = mn_model_config_family(here);
    t->same_family = t->family == theirs || (t->family && theirs && !strcmp(t->family, theirs));
    t->as = dtype;
    mn_status st = allocate(t);
    for (int i = 0; i < t->n && st == MN_OK; i++) {
        st = match(t, i, is_made, made);
        if (st == MN_OK) describe(t, i, dtype);
    }
    if (st == MN_OK && t->same_family) {
        st = mn_weights_beside(source->weights, source->model, describe_beside, t);
    }
    if (st == MN_OK) *out = t;
    else mn_transfer_destroy(t);
    return st;
}

void mn_transfer_destroy(mn_transfer *t) {
    if (!t) return;
    mn_model_destroy(t->target);
    free(t->from);
    free(t->dtypes);
    free(t->tensors);
    free(t->first);
    free(t->next);
    free(t->place);
    free(t->beside);
    free(t);
}

/* ---- numbers --------------------------------------------------------------------------------- */

static mn_status raw_numbers(void *raw, mn_transfer *t, int i) {
    const mn_source *s = t->source;
    const mn_model_param *p = mn_model_param_at(t->target, i);
    if (t->from[i] == MN_TRANSFER_MADE) {
        const mn_status st = t->make(raw, t->context, i);
        if (st != MN_OK || !mn_dialect_transposed(t->family, p->name)) return st;
        return mn_weights_turn(raw, p->info.shape[0], p->info.shape[1],
                               mn_stored_dtype_bytes(t->dtypes[i]));
    }
    if (t->same_family) {
        const mn_stored_tensor *stored = mn_weights_find(s->weights, s->model, p->name);
        memcpy(raw, stored->data, stored->bytes);
        return MN_OK;
    }
    const mn_status st = mn_weights_raw(raw, s->model, s->weights, t->from[i]);
    if (st != MN_OK || !mn_dialect_transposed(t->family, p->name)) return st;
    return mn_weights_turn(raw, p->info.shape[0], p->info.shape[1],
                           mn_stored_dtype_bytes(t->dtypes[i]));
}

static mn_status converted(void *out, const mn_emit_tensor *e, const void *raw,
                           mn_stored_dtype from, int64_t count) {
    int64_t lost = 0;
    const mn_status st = mn_stored_convert(out, e->dtype, raw, from, count, &lost);
    if (st != MN_OK || lost == 0) return st;
    return mn_fail(MN_ERR_ARGUMENT, "%s: %lld numbers are out of the range of %s; bf16 has that of "
                   "f32", e->name, (long long)lost, mn_stored_dtype_name(e->dtype));
}

/* The `count` numbers of parameter i. */
static mn_status fill_param(void *out, mn_transfer *t, const mn_emit_tensor *e, int i,
                            int64_t count) {
    if (e->dtype == t->dtypes[i]) return raw_numbers(out, t, i);
    void *raw = malloc((size_t)count * mn_stored_dtype_bytes(t->dtypes[i]) + 1);
    if (!raw) return mn_fail(MN_ERR_MEMORY, "no memory to convert %s", e->name);
    mn_status st = raw_numbers(raw, t, i);
    if (st == MN_OK) st = converted(out, e, raw, t->dtypes[i], count);
    free(raw);
    return st;
}

mn_status mn_transfer_fill(void *out, void *transfer, int k) {
    mn_transfer *t = transfer;
    const mn_emit_tensor *e = &t->tensors[k];
    if (k >= t->n_tensors - t->n_beside) {
        const mn_stored_tensor *s = t->beside[k - (t->n_tensors - t->n_beside)];
        return converted(out, e, s->data, s->dtype, e->count);
    }
    if (t->next[t->first[k]] < 0 && t->place[t->first[k]] == 0) {
        return fill_param(out, t, e, t->first[k], e->count);
    }
    mn_status st = MN_OK;
    for (int i = t->first[k]; i >= 0 && st == MN_OK; i = t->next[i]) {
        const size_t first = (size_t)t->place[i] * mn_stored_dtype_bytes(e->dtype);
        st = fill_param((char *)out + first, t, e, i,
                        mn_model_param_at(t->target, i)->info.count);
    }
    return st;
}

/* ---- configuration --------------------------------------------------------------------------- */

static mn_status config_json(mn_json *out, const mn_model_config *config) {
    char *text = NULL;
    size_t size = 0;
    *out = (mn_json){ 0 };
    mn_status st = mn_model_config_write(&text, &size, config);
    if (st == MN_OK) st = mn_json_parse(out, text, size, "the configuration", MN_JSON_PYTHON);
    free(text);
    return st;
}

/* The name that transformers has for a type. */
static const char *torch_name(mn_stored_dtype dtype) {
    switch (dtype) {
    case MN_STORED_F32: return "float32";
    case MN_STORED_F16: return "float16";
    case MN_STORED_BF16: return "bfloat16";
    default: return NULL;
    }
}

mn_status mn_transfer_config(json_t **out, const mn_transfer *t, mn_stored_dtype dtype) {
    mn_json root;
    *out = NULL;
    mn_status st = config_json(&root, mn_model_describe(t->target));
    const char *name = torch_name(dtype == MN_STORED_COUNT ? t->dtypes[0] : dtype);
    const char *key = st == MN_OK && json_object_get(root.value, "dtype") ? "dtype"
                                                                          : "torch_dtype";
    if (st == MN_OK && name && json_object_set_new(root.value, key, json_string(name)) != 0) {
        st = mn_fail(MN_ERR_MEMORY, "no memory for a configuration");
    }
    if (st == MN_OK) *out = json_incref(root.value);
    mn_json_free(&root);
    return st;
}

mn_status mn_transfer_target(mn_model **out, const mn_model_config *config) {
    mn_json root;
    mn_model_config again = { 0 };
    mn_model *copy = NULL;
    char why[MN_SAME_WHY];
    mn_status st = mn_model_sketch(out, config);
    if (st != MN_OK) return st;
    st = config_json(&root, mn_model_describe(*out));
    if (st == MN_OK) st = mn_model_config_read(&again, &root);
    if (st == MN_OK) st = mn_model_sketch(&copy, &again);
    if (st == MN_OK && !mn_model_config_same(why, mn_model_describe(*out),
                                             mn_model_describe(copy))) {
        st = mn_fail(MN_ERR_UNSUPPORTED, "no configuration says what this model is: %s", why);
    }
    mn_model_destroy(copy);
    mn_model_config_free(&again);
    mn_json_free(&root);
    if (st != MN_OK) {
        mn_model_destroy(*out);
        *out = NULL;
    }
    return st;
}
