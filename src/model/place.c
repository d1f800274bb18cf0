/* place.c - parameters in a GPU's memory.
 *
 * All values lie in one piece of memory, each on a line of 256 bytes, gradients and shadows in
 * pieces of the same layout; or in pages (mn_model_want_pages). The model has a handle of its own
 * on the GPU, so that it does not matter which context is closed first. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "kernels/adamw_all.h"
#include "model/model_internal.h"

enum { LINE = 256 };

/* Bytes of one piece for all parameters at `item` bytes a number; false when that overflows. */
static bool all_bytes(size_t *bytes, const mn_model *model, size_t item) {
    *bytes = 0;
    for (int i = 0; i < model->n_params; i++) {
        size_t own;
        if (model->params[i].quant) continue;
        if (!mn_mul_size(&own, (size_t)model->params[i].info.count, item)) return false;
        if (!mn_add_size(&own, own, LINE - 1)) return false;
        if (!mn_add_size(bytes, *bytes, own / LINE * LINE)) return false;
    }
    return true;
}

/* Where the numbers of a parameter begin in such a piece, after those of the one before. */
static unsigned char *next_place(unsigned char *at, const mn_model_param *before, size_t item) {
    if (before->quant) return at;
    return at + ((size_t)before->info.count * item + LINE - 1) / LINE * LINE;
}

static mn_status take(unsigned char **out, mn_model *model, size_t item, mn_model_piece piece,
                      const char *what) {
    size_t bytes;
    void *memory = NULL;
    if (!all_bytes(&bytes, model, item)) {
        return mn_fail(MN_ERR_MEMORY, "the sizes of the model's %s overflow", what);
    }
    mn_device_pages **pages = &model->pages[piece];
    mn_status st;
    if (model->wants_pages) {
        st = mn_device_pages_create(pages, model->device, bytes);
        if (st == MN_OK) memory = mn_device_pages_at(*pages);
    } else {
        st = mn_device_allocate(model->device, &memory, bytes);
    }
    if (st == MN_ERR_MEMORY) {
        return mn_fail(st, "the GPU has no memory for %.0f MiB of %s; use a smaller model",
                       (double)bytes / 1048576.0, what);
    }
    if (st != MN_OK) return st;
    *out = memory;
    if (!model->wants_pages) model->device_bytes += bytes;
    return MN_OK;
}

static void give(mn_model *model, unsigned char **at, mn_model_piece piece) {
    if (model->pages[piece]) mn_device_pages_destroy(model->pages[piece]);
    else mn_device_free(model->device, *at);
    model->pages[piece] = NULL;
    *at = NULL;
}

void mn_model_want_pages(mn_model *model) {
    model->wants_pages = true;
}

mn_device_pages *mn_model_pages(const mn_model *model, mn_model_piece piece) {
    return model->pages[piece];
}

/* Codes and scales of a quantised parameter in the form that the GPU reads; the host's are freed
 * when all are there. */
static mn_status move_quant(mn_model *model, mn_quant *there, const mn_quant *q) {
    const size_t codes = mn_quant_device_codes_bytes(q), scales = mn_quant_device_scales_bytes(q);
    unsigned char *host = malloc(codes + scales);
    void *memory = NULL;
    if (!host) return mn_fail(MN_ERR_MEMORY, "no memory to move quantised weights");
    const size_t begin = (codes + LINE - 1) / LINE * LINE;
    mn_quant_to_device_form(host, host + codes, q);
    mn_status st = mn_device_allocate(model->device, &memory, begin + scales);
    if (st == MN_OK) st = mn_device_upload(model->device, memory, host, codes);
    if (st == MN_OK) {
        st = mn_device_upload(model->device, (char *)memory + begin, host + codes, scales);
    }
    if (st == MN_OK) st = mn_device_synchronize(model->device);
    free(host);
    *there = *q;
    there->codes = memory;
    there->scales = memory ? (char *)memory + begin : NULL;
    if (memory) model->device_bytes += begin + scales;
    return st;
}

static mn_status move_quants(mn_model *model) {
    mn_quant *there = calloc((size_t)model->n_params, sizeof *there);
    mn_status st = there ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a model");
    for (int i = 0; st == MN_OK && i < model->n_params; i++) {
        if (model->params[i].quant) st = move_quant(model, &there[i], model->params[i].quant);
    }
    for (int i = 0; there && i < model->n_params; i++) {
        mn_quant *q = model->params[i].quant;
        if (st != MN_OK) mn_device_free(model->device, (void *)there[i].codes);
        if (st != MN_OK || !q) continue;
        free((void *)q->codes);
        free((void *)q->scales);
        *q = there[i];
    }
    free(there);
    return st;
}

static size_t value_bytes(const mn_model_param *p) {
    return (size_t)p->info.count * sizeof(float);
}

/* Values from the host's memory, which is freed once all are there. */
static mn_status move_values(mn_model *model) {
    mn_status st = take(&model->values, model, sizeof(float), MN_MODEL_VALUES, "parameters");
    unsigned char *at = model->values;
    for (int i = 0; st == MN_OK && i < model->n_params; i++) {
        const mn_model_param *p = &model->params[i];
        if (p->quant) continue;
        st = mn_device_upload(model->device, at, p->value, value_bytes(p));
        at = next_place(at, p, sizeof(float));
    }
    if (st == MN_OK) st = mn_device_synchronize(model->device);
    at = model->values;
    for (int i = 0; st == MN_OK && i < model->n_params; i++) {
        mn_model_param *p = &model->params[i];
        if (p->quant) continue;
        free(p->value);
        p->value = at;
        at = next_place(at, p, sizeof(float));
    }
    return st;
}

mn_status mn_model_place_gradients(mn_model *model) {
    if (model->grads) return MN_OK;
    size_t bytes;
    mn_status st = take(&model->grads, model, sizeof(float), MN_MODEL_GRADIENTS, "gradients");
    if (st == MN_OK && all_bytes(&bytes, model, sizeof(float))) {
        st = mn_device_fill(model->device, model->grads, 0, bytes);
    }
    unsigned char *at = model->grads;
    for (int i = 0; st == MN_OK && i < model->n_params; i++) {
        mn_model_param *p = &model->params[i];
        free(p->grad);
        p->grad = at;
        at = next_place(at, p, sizeof(float));
    }
    return st == MN_OK ? mn_device_synchronize(model->device) : st;
}

static mn_status cast(mn_model *model, const mn_model_param *p) {
    const int code = mn_cast_bf16_cuda(p->shadow, p->value, p->info.count,
                                    mn_device_stream(model->device));
    return mn_device_check(model->device, code, p->name);
}

static mn_status make_shadows(mn_model *model) {
    if (model->shadows) return MN_OK;
    mn_status st = take(&model->shadows, model, mn_dtype_bytes(MN_BF16), MN_MODEL_SHADOWS,
                        "parameters in bf16");
    unsigned char *at = model->shadows;
    for (int i = 0; st == MN_OK && i < model->n_params; i++) {
        mn_model_param *p = &model->params[i];
        if (p->quant) continue;
        p->shadow = at;
        at = next_place(at, p, mn_dtype_bytes(MN_BF16));
        st = cast(model, p);
    }
    return st == MN_OK ? mn_device_synchronize(model->device) : st;
}

static mn_status open_device(mn_model *model, const mn_context *context) {
    char name[32];
    snprintf(name, sizeof name, "cuda:%d", mn_device_facts(context->device)->index);
    return mn_device_open(&model->device, name, NULL);
}

/* From the host to the GPU; what fails leaves the model on the host. */
static mn_status move_device(mn_model *model, const mn_context *context) {
    if (model->dtype != MN_F32) {
        return mn_fail(MN_ERR_UNSUPPORTED, "a model of %s stays on the CPU; GPUs take one of f32",
                       mn_dtype_name(model->dtype));
    }
    mn_status st = open_device(model, context);
    if (st == MN_OK) st = move_quants(model);
    if (st == MN_OK) st = move_values(model);
    if (st != MN_OK && model->device) {
        give(model, &model->values, MN_MODEL_VALUES);
        mn_device_close(model->device);
        model->device = NULL;
        model->device_bytes = 0;
    }
    return st;
}

mn_status mn_model_place(mn_model *model, const mn_context *context, mn_dtype dtype) {
    if (!context->device) {
        if (!model->device) return MN_OK;
        return mn_fail(MN_ERR_ARGUMENT, "the model's parameters are on %s; open it once more for "
                       "the CPU", mn_device_facts(model->device)->name);
    }
    const int index = mn_device_facts(context->device)->index;
    bool wants = false;
    for (int i = 0; i < model->n_params; i++) wants |= model->params[i].grad != NULL;
    mn_status st = model->device ? MN_OK : move_device(model, context);
    if (st == MN_OK && mn_device_facts(model->device)->index != index) {
        return mn_fail(MN_ERR_ARGUMENT, "the model's parameters are on cuda:%d; open it once more "
                       "for cuda:%d", mn_device_facts(model->device)->index, index);
    }
    if (st == MN_OK) st = mn_device_use(model->device);
    if (st == MN_OK && wants) st = mn_model_place_gradients(model);
    if (st == MN_OK && dtype == MN_BF16) st = make_shadows(model);
    return st;
}

mn_dtype mn_model_pass_dtype(const mn_model *model) {
    return model->shadows ? MN_BF16 : model->dtype;
}

void mn_model_unplace(mn_model *model) {
    const bool trains = model->grads != NULL;
    give(model, &model->values, MN_MODEL_VALUES);
    give(model, &model->grads, MN_MODEL_GRADIENTS);
    give(model, &model->shadows, MN_MODEL_SHADOWS);
    for (int i = 0; i < model->n_params; i++) {
        mn_model_param *p = &model->params[i];
        if (p->quant) {
            mn_device_free(model->device, (void *)p->quant->codes);
            p->quant->codes = p->quant->scales = NULL;
        }
        p->value = p->shadow = NULL;
        if (trains) p->grad = NULL;
    }
    mn_device_close(model->device);
}

mn_status mn_model_get(mn_model *model, int i, void *numbers) {
    const mn_model_param *p = &model->params[i];
    if (p->quant && (model->device || model->dtype != MN_F32)) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: quantised weights are read from the CPU", p->name);
    }
    if (p->quant) {
        mn_quant_unpack(numbers, p->quant);
        return MN_OK;
    }
    if (model->device) return mn_device_download(model->device, numbers, p->value, value_bytes(p));
    memcpy(numbers, p->value, (size_t)p->info.count * mn_dtype_bytes(model->dtype));
    return MN_OK;
}

mn_status mn_model_put(mn_model *model, int i, const void *numbers) {
    const mn_model_param *p = &model->params[i];
    if (p->quant) return mn_fail(MN_ERR_UNSUPPORTED, "%s: quantised weights stay", p->name);
    if (!model->device) {
        memcpy(p->value, numbers, (size_t)p->info.count * mn_dtype_bytes(model->dtype));
        return MN_OK;
    }
    mn_status st = mn_device_upload(model->device, p->value, numbers, value_bytes(p));
    if (st == MN_OK && p->shadow) st = cast(model, p);
    return st == MN_OK ? mn_device_synchronize(model->device) : st;
}

size_t mn_model_device_bytes(const mn_model *model) {
    size_t bytes = model->device_bytes;
    for (int i = 0; i < MN_MODEL_PIECES; i++) {
        if (model->pages[i]) bytes += mn_device_pages_held(model->pages[i]);
    }
    return bytes;
}
