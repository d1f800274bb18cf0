/* quantised.c - codes, scales and least values of quantised weights, from and to the files of a
 * folder. */
#include "model/folder/quantised.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/model_internal.h"

/* Codes are stored under the parameter's name, what goes with them under that and a suffix. */
static const char scales_suffix[] = ".scales", least_suffix[] = ".least";

bool mn_quantised_stored(const mn_model_param *p, const mn_stored_tensor *t) {
    const bool matrix = p->info.rank == 2 && p->info.group != MN_GROUP_VECTOR;
    return matrix && (t->dtype == MN_STORED_I8 || t->dtype == MN_STORED_U8);
}

static mn_status check_part(const mn_stored_tensor **out, const mn_weights *w, const char *name,
                            const char *suffix, mn_stored_dtype dtype, int64_t rows,
                            int64_t cols) {
    char full[MN_PARAM_NAME + sizeof scales_suffix];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    const mn_stored_tensor *t = mn_weights_exact(w, full);
    if (!t) {
        return mn_fail(MN_ERR_FORMAT, "%s: no tensor %s, which belongs to quantised weights",
                       mn_weights_folder(w), full);
    }
    if (t->dtype != dtype || t->rank != 2 || t->shape[0] != rows || t->shape[1] != cols) {
        return mn_fail(MN_ERR_FORMAT, "%s: %s is not %lld x %lld of %s, as the configuration's "
                       "quantization makes it", mn_weights_folder(w), full, (long long)rows,
                       (long long)cols, mn_stored_dtype_name(dtype));
    }
    if (out) *out = t;
    return MN_OK;
}

/* What a file holds of quantised parameter p; codes, scales and least values are the file's. */
static mn_status find_quant(mn_quant_stored *s, const mn_model *model, const mn_weights *w,
                            const mn_model_param *p, const mn_stored_tensor *t) {
    const mn_model_config *c = mn_model_describe(model);
    const int64_t rows = p->info.shape[0], cols = p->info.shape[1];
    if (c->quant_bits == 0) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: %s is quantised, and only a model that config.json "
                       "calls so can have it; training takes the folder that was quantised",
                       mn_weights_folder(w), p->name);
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

mn_status mn_quantised_check(const mn_model *model, const mn_weights *w, const mn_model_param *p,
                             const mn_stored_tensor *t) {
    mn_quant_stored s;
    return find_quant(&s, model, w, p, t);
}

/* A file's tensors lie at any address: what is wider than a byte is copied first. */
static mn_status aligned(void **to, const void *from, size_t bytes) {
    *to = malloc(bytes > 0 ? bytes : 1);
    if (!*to) return mn_fail(MN_ERR_MEMORY, "no memory to read quantised weights");
    if (bytes > 0) memcpy(*to, from, bytes);
    return MN_OK;
}

mn_status mn_quantised_read(mn_model *model, const mn_weights *w, mn_model_param *p,
                            const mn_stored_tensor *t) {
    mn_quant_stored s;
    void *scales = NULL, *least = NULL;
    if (mn_model_device_bytes(model) > 0 || mn_model_dtype(model) != MN_F32) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: quantised weights are read as float32 of the host",
                       mn_weights_folder(w));
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
        mn_model_drop_value(model, p);
    }
    free(scales);
    free(least);
    return st;
}

int mn_quantised_tensors(mn_stored_tensor *tensors, char (*names)[MN_PARAM_NAME], void **copies,
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

