/* context.c - worker threads, scratch memory and kernels of one caller; or its GPU. */
#include "ops/context.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"

static bool is_given(const char *text) {
    return text && *text;
}

/* The device asked for, NULL for the CPU: "cuda" is understood as a target too. */
static mn_status choose_device(const char **out, const mn_context_options *options) {
    const bool cuda_target = is_given(options->target) && strcmp(options->target, "cuda") == 0;
    const bool device = is_given(options->device) && strcmp(options->device, "cpu") != 0;
    *out = device ? options->device : cuda_target && !options->device ? "cuda" : NULL;
    if (device && is_given(options->target) && !cuda_target) {
        return mn_fail(MN_ERR_ARGUMENT, "target %s is the CPU's; leave it out for device %s",
                       options->target, options->device);
    }
    if (!*out && options->stream) {
        return mn_fail(MN_ERR_ARGUMENT, "a stream is given, and no device that it could be of");
    }
    if (!options->allocate != !options->release || (options->allocate && !*out)) {
        return mn_fail(MN_ERR_ARGUMENT, "allocate and release go together, and with a device");
    }
    return MN_OK;
}

static mn_status open_device(mn_context *context, const mn_context_options *options,
                             const char *name) {
    const mn_arena_source lent = { options->allocate, options->release, options->owner,
                                   (size_t)2 << 20 };
    const mn_status st = mn_device_open(&context->device, name, options->stream);
    return st == MN_OK && lent.allocate ? mn_device_scratch_from(context->device, &lent) : st;
}

static mn_status fill(mn_context *context, const mn_context_options *options, const char *device) {
    context->target = MN_TARGET_REF;
    mn_status st = device ? open_device(context, options, device)
                          : mn_target_choose(&context->target, options->target);
    if (st == MN_OK) st = mn_threads_create(&context->threads, options->n_threads);
    if (st == MN_OK) st = mn_arena_create(&context->arena);
    if (st == MN_OK) st = mn_kernel_table_fill(&context->f32, context->target, MN_F32);
    if (st == MN_OK) st = mn_kernel_table_fill(&context->f64, context->target, MN_F64);
    if (st == MN_OK && device) mn_kernel_table_fill_cuda(&context->cuda);
    return st;
}

mn_status mn_context_create(mn_context **out, const mn_context_options *options) {
    const mn_context_options defaults = { 0 };
    if (!out) return mn_fail(MN_ERR_ARGUMENT, "context: out is NULL");
    *out = NULL;
    if (!options) options = &defaults;
    const char *device;
    mn_status st = choose_device(&device, options);
    if (st != MN_OK) return st;
    mn_context *context = calloc(1, sizeof *context);
    if (!context) return mn_fail(MN_ERR_MEMORY, "no memory for a context");
    st = fill(context, options, device);
    if (st != MN_OK) {
        mn_context_destroy(context);
        return st;
    }
    *out = context;
    return MN_OK;
}

void mn_context_destroy(mn_context *context) {
    if (!context) return;
    if (!mn_threads_forked(context->threads)) {    // a child has neither threads nor the device
        mn_gemm_destroy(context->products);
        mn_device_close(context->device);
    }
    mn_threads_destroy(context->threads);
    mn_arena_destroy(context->arena);
    free(context);
}

int mn_context_threads(const mn_context *context) {
    return context ? mn_threads_count(context->threads) : 0;
}

const char *mn_context_target(const mn_context *context) {
    if (!context) return NULL;
    return context->device ? "cuda" : mn_target_name(context->target);
}

mn_status mn_context_synchronize(mn_context *context) {
    if (!context) return mn_fail(MN_ERR_ARGUMENT, "synchronize: context is NULL");
    return context->device ? mn_device_synchronize(context->device) : MN_OK;
}

mn_status mn_context_use_stream(mn_context *context, void *stream) {
    if (!context) return mn_fail(MN_ERR_ARGUMENT, "use_stream: context is NULL");
    if (!context->device) {
        return mn_fail(MN_ERR_ARGUMENT, "use_stream: the context is of the CPU, which has none");
    }
    return mn_device_use_stream(context->device, stream);
}

void mn_context_trim(mn_context *context) {
    if (!context) return;
    mn_arena_trim(context->arena);
    mn_device_trim(context->device);
}

/* Its address names the thread. */
static _Thread_local char self;

mn_status mn_context_enter(mn_context *context) {
    const void *nobody = NULL;
    const bool first = atomic_compare_exchange_strong(&context->user, &nobody, &self);
    if (!first && nobody != &self) {
        return mn_fail(MN_ERR_ARGUMENT, "another thread is in a call with this context; give each "
                       "thread a context of its own, or let them take turns");
    }
    context->depth++;
    return MN_OK;
}

void mn_context_leave(mn_context *context) {
    if (--context->depth == 0) atomic_store(&context->user, NULL);
}

mn_status mn_context_needs_cpu(const mn_context *context, const char *what) {
    if (!context->device) return MN_OK;
    return mn_fail(MN_ERR_UNSUPPORTED, "%s runs on the CPU only, and this context is of %s", what,
                   mn_device_facts(context->device)->name);
}
