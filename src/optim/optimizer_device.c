/* optimizer_device.c - moments, tables and launches of AdamW on a GPU (kernels/adamw_all.h). */
#include "optim/optimizer_device.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/util.h"
#include "kernels/adamw_all.h"

enum { LINE = 64, MOST_LOSSES = 4096 };    // floats of 256 bytes

/* Of numbers [begin, begin + count) of a parameter, those that this optimiser owns: where they are
 * among all moments. */
typedef struct moments {
    int64_t begin, count, at;
} moments;

struct mn_device_optimizer {
    mn_device *device;
    mn_adamw_options options;
    mn_adamw_param *params;      // (n_params), as on the device
    moments *moments;            // (n_params)
    int64_t n_params, n_chunks;
    int64_t own, end;            // chunks [own, end) are this optimiser's
    unsigned char *memory;       // moments, then the tables below, on the device
    size_t bytes;
    mn_adamw_all all;            // addresses on the device
};

/* ---- create ---------------------------------------------------------------------------------- */

/* Where things lie in the one piece of memory. */
typedef struct layout {
    size_t params, chunks, squares, hparams, result, losses, end;
} layout;

/* Puts `count` items of `size` bytes at the end, on a line of their own. */
static bool place(size_t *at, size_t *end, int64_t count, size_t size) {
    size_t bytes;
    *at = *end;
    return mn_mul_size(&bytes, (size_t)count, size) && mn_add_size(&bytes, bytes, 255) &&
           mn_add_size(end, *end, bytes / 256 * 256);
}

/* Chunks of all parameters, which of them are this owner's, and floats of its moments. */
static bool share_out(int64_t *floats, mn_device_optimizer *o, const mn_optim_param *params) {
    int64_t at = 0, padded;
    *floats = 0;
    for (int64_t i = 0; i < o->n_params; i++) {
        const int64_t chunks = mn_ceil_div(params[i].count, MN_ADAMW_CHUNK);
        const int64_t low = mn_max(o->own - at, 0), high = mn_min(o->end - at, chunks);
        at += chunks;
        if (low >= high) continue;
        moments *m = &o->moments[i];
        m->begin = low * MN_ADAMW_CHUNK;
        m->count = mn_min(high * MN_ADAMW_CHUNK, params[i].count) - m->begin;
        m->at = *floats;
        if (!mn_add_i64(&padded, m->count, LINE - 1)) return false;
        if (!mn_add_i64(floats, *floats, 2 * (padded / LINE * LINE))) return false;
    }
    o->n_chunks = at;
    return true;
}

static bool lay_out(layout *l, mn_device_optimizer *o, const mn_optim_param *params) {
    int64_t floats;
    size_t at;
    return share_out(&floats, o, params) && place(&at, &l->end, floats, sizeof(float)) &&
           place(&l->params, &l->end, o->n_params, sizeof(mn_adamw_param)) &&
           place(&l->chunks, &l->end, o->n_chunks, sizeof(mn_adamw_chunk)) &&
           place(&l->squares, &l->end, o->n_chunks, sizeof(double)) &&
           place(&l->hparams, &l->end, 1, sizeof(mn_adamw_hparams)) &&
           place(&l->result, &l->end, 1, sizeof(mn_adamw_result)) &&
           place(&l->losses, &l->end, MOST_LOSSES, sizeof(mn_adamw_loss));
}

/* Moments are counted from the parameter's first number, which may be another owner's. */
static void fill_params(mn_device_optimizer *o, const mn_optim_param *params) {
    for (int64_t i = 0; i < o->n_params; i++) {
        const mn_optim_param *p = &params[i];
        const moments *of = &o->moments[i];
        const int64_t padded = mn_ceil_div(of->count, LINE) * LINE;
        const uintptr_t first = (uintptr_t)((float *)o->memory + of->at);
        const uintptr_t before = (uintptr_t)of->begin * sizeof(float);
        o->params[i] = (mn_adamw_param){
            .p = p->value, .g = p->grad, .m = (float *)(first - before),
            .v = (float *)(first + (uintptr_t)padded * sizeof(float) - before),
            .shadow = p->shadow, .lr_scale = (float)p->lr_scale,
            .weight_decay = p->decays ? (float)o->options.weight_decay : 0.0f };
    }
}

static void fill_cuts(mn_adamw_chunk *chunks, const mn_optim_param *params, int64_t n_params) {
    for (int64_t i = 0; i < n_params; i++) {
        for (int64_t first = 0; first < params[i].count; first += MN_ADAMW_CHUNK) {
            const int64_t count = mn_min(MN_ADAMW_CHUNK, params[i].count - first);
            *chunks++ = (mn_adamw_chunk){ (int32_t)i, (int32_t)count, first };
        }
    }
}

/* Moments of 0 and the tables, in memory that is there. */
static mn_status fill(mn_device_optimizer *o, const layout *l, const mn_optim_param *params) {
    mn_adamw_chunk *chunks = calloc((size_t)o->n_chunks + 1, sizeof *chunks);
    if (!chunks) return mn_fail(MN_ERR_MEMORY, "no memory for an optimiser");
    fill_params(o, params);
    fill_cuts(chunks, params, o->n_params);
    mn_status st = mn_device_fill(o->device, o->memory, 0, o->bytes);
    if (st == MN_OK) {
        st = mn_device_upload(o->device, o->memory + l->params, o->params,
                              (size_t)o->n_params * sizeof *o->params);
    }
    if (st == MN_OK) {
        st = mn_device_upload(o->device, o->memory + l->chunks, chunks,
                              (size_t)o->n_chunks * sizeof *chunks);
    }
    free(chunks);
    o->all = (mn_adamw_all){
        .params = (mn_adamw_param *)(o->memory + l->params),
        .chunks = (mn_adamw_chunk *)(o->memory + l->chunks), .n_chunks = o->n_chunks,
        .first = o->own, .own = o->end - o->own, .n_parts = 1,
        .squares = (double *)(o->memory + l->squares),
        .hparams = (mn_adamw_hparams *)(o->memory + l->hparams),
        .result = (mn_adamw_result *)(o->memory + l->result),
        .losses = (mn_adamw_loss *)(o->memory + l->losses) };
    return st;
}

/* Tables of the host, and which chunks are whose. */
static bool open_tables(mn_device_optimizer *o, const mn_optim_param *params, int part, int parts) {
    o->params = calloc((size_t)o->n_params + 1, sizeof *o->params);
    o->moments = calloc((size_t)o->n_params + 1, sizeof *o->moments);
    int64_t *bounds = calloc(2 * ((size_t)parts + 1), sizeof *bounds);
    const bool there = o->params && o->moments && bounds;
    if (there) {
        mn_optim_shares(params, o->n_params, parts, bounds, bounds + parts + 1);
        o->own = bounds[parts + 1 + part];
        o->end = bounds[parts + 1 + part + 1];
    }
    free(bounds);
    return there;
}

mn_status mn_device_optimizer_create_part(mn_device_optimizer **out, mn_context *context,
                                          const mn_optim_param *params, int64_t n_params,
                                          const mn_adamw_options *options, int part, int parts) {
    *out = NULL;
    mn_status st = mn_optim_check(params, n_params, options);
    if (st != MN_OK) return st;
    mn_device_optimizer *o = calloc(1, sizeof *o);
    layout l = { 0 };
    if (!o) return mn_fail(MN_ERR_MEMORY, "no memory for an optimiser");
    o->device = context->device;
    o->options = *options;
    o->n_params = n_params;
    const bool fits = n_params < INT32_MAX && open_tables(o, params, part, parts) &&
                      lay_out(&l, o, params) && o->n_chunks < INT32_MAX;
    if (!fits) st = mn_fail(MN_ERR_MEMORY, "no memory for the moments of %" PRId64 " parameters",
                            n_params);
    void *memory = NULL;
    if (st == MN_OK) st = mn_device_allocate(o->device, &memory, l.end);
    if (st == MN_OK) {
        o->memory = memory;
        o->bytes = l.end;
        st = fill(o, &l, params);
    }
    if (st != MN_OK) {
        mn_device_optimizer_destroy(o);
        return st;
    }
    *out = o;
    return MN_OK;
}

mn_status mn_device_optimizer_create(mn_device_optimizer **out, mn_context *context,
                                     const mn_optim_param *params, int64_t n_params,
                                     const mn_adamw_options *options) {
    return mn_device_optimizer_create_part(out, context, params, n_params, options, 0, 1);
}

void mn_device_optimizer_destroy(mn_device_optimizer *optimizer) {
    if (!optimizer) return;
    mn_device_free(optimizer->device, optimizer->memory);
    free(optimizer->params);
    free(optimizer->moments);
    free(optimizer);
}

/* ---- use ------------------------------------------------------------------------------------- */

mn_status mn_device_optimizer_tell(mn_device_optimizer *o, int64_t step, double lr, double clip,
                                   double limit) {
    if (step < 0 || step == INT64_MAX) {
        return mn_fail(MN_ERR_ARGUMENT, "adamw: step %" PRId64 ", counted from 0", step);
    }
    if (!isfinite(lr) || lr < 0.0) {
        return mn_fail(MN_ERR_ARGUMENT, "adamw: learning rate %g at step %" PRId64, lr, step);
    }
    const double n = (double)(step + 1), beta1 = o->options.beta1, beta2 = o->options.beta2;
    const mn_adamw_hparams hparams = {
        .clip = clip, .loss_limit = limit, .lr = (float)lr, .eps = (float)o->options.eps,
        .beta1 = (float)beta1, .rest1 = (float)(1.0 - beta1),
        .bias1 = (float)-expm1(n * log(beta1)),
        .beta2 = (float)beta2, .rest2 = (float)(1.0 - beta2),
        .bias2 = (float)-expm1(n * log(beta2)) };
    return mn_device_upload(o->device, (void *)o->all.hparams, &hparams, sizeof hparams);
}

mn_status mn_device_optimizer_loss(mn_device_optimizer *o, int64_t i, const void *told) {
    if (i < 0 || i >= MOST_LOSSES) {
        return mn_fail(MN_ERR_ARGUMENT, "train.accumulate is above %d, the most that a GPU takes",
                       MOST_LOSSES);
    }
    return mn_device_copy(o->device, (mn_adamw_loss *)o->all.losses + i, told,
                          sizeof(mn_adamw_loss));
}

mn_status mn_device_optimizer_measure(mn_device_optimizer *o) {
    const mn_status st = mn_device_use(o->device);
    if (st != MN_OK) return st;
    return mn_device_check(o->device, mn_adamw_squares_cuda(&o->all, mn_device_stream(o->device)),
                           "gradient norm");
}

double *mn_device_optimizer_squares(mn_device_optimizer *o) {
    return o->all.squares;
}

void *mn_device_optimizer_losses(mn_device_optimizer *o) {
    return (mn_adamw_loss *)o->all.losses;
}

mn_status mn_device_optimizer_decide(mn_device_optimizer *o, int64_t n_batches, int parts) {
    void *stream = mn_device_stream(o->device);
    o->all.n_losses = n_batches;
    o->all.n_parts = parts;
    mn_status st = mn_device_use(o->device);
    if (st == MN_OK) {
        st = mn_device_check(o->device, mn_adamw_decide_cuda(&o->all, stream), "gradient norm");
    }
    if (st != MN_OK) return st;
    return mn_device_check(o->device, mn_adamw_update_cuda(&o->all, stream), "adamw");
}

mn_status mn_device_optimizer_shadows(mn_device_optimizer *o) {
    const mn_status st = mn_device_use(o->device);
    if (st != MN_OK) return st;
    return mn_device_check(o->device, mn_adamw_shadows_cuda(&o->all, mn_device_stream(o->device)),
                           "parameters in bf16");
}

mn_status mn_device_optimizer_step(mn_device_optimizer *o, int64_t n_batches) {
    const mn_status st = mn_device_optimizer_measure(o);
    return st == MN_OK ? mn_device_optimizer_decide(o, n_batches, 1) : st;
}

mn_status mn_device_optimizer_ask(mn_device_optimizer *o, mn_optim_outcome *outcome) {
    mn_adamw_result result;
    const mn_status st = mn_device_download(o->device, &result, o->all.result, sizeof result);
    if (st == MN_OK) *outcome = (mn_optim_outcome){ .norm = result.norm, .loss = result.loss,
                                                       .counted = result.counted,
                                                       .updated = result.update };
    return st;
}

float *mn_device_optimizer_first(mn_device_optimizer *optimizer, int64_t i) {
    return optimizer->params[i].m + optimizer->moments[i].begin;
}

float *mn_device_optimizer_second(mn_device_optimizer *optimizer, int64_t i) {
    return optimizer->params[i].v + optimizer->moments[i].begin;
}

void mn_device_optimizer_owned(const mn_device_optimizer *optimizer, int64_t i, int64_t *begin,
                               int64_t *count) {
    *begin = optimizer->moments[i].begin;
    *count = optimizer->moments[i].count;
}

size_t mn_device_optimizer_bytes(const mn_device_optimizer *optimizer) {
    return optimizer->bytes;
}
