/* run.c - runs an operator: validate, plan, take memory, hand the items to the threads or launch
 * the kernel on the context's device. */
#include "ops/grouped.h"
#include "ops/run.h"

#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/util.h"
#include "kernels/conv_unit.h"
#include "kernels/delta_gpu.h"
#include "ops/compose/compose.h"
#include "ops/overlap.h"
#include "ops/validate.h"
#include "ops/workspace.h"

typedef mn_status (*compose_fn)(mn_context *context, mn_pass pass, const void *args);

/* An op is a kernel (id + 1) or a composition. */
static const int kernel_of[MN_OP_COUNT] = {
#define KERNEL(name) [MN_OP_##name] = MN_KERNEL_##name + 1,
#include "kernels/kernels.def"
#undef KERNEL
};

static const compose_fn composition_of[MN_OP_COUNT] = {
#define COMPOSE(name, parts) [MN_OP_##name] = mn_compose_##name,
#include "ops/compose/compose.def"
    NULL,
};

/* What a composition needs on a device: kernels, and products, which every device has. */
#define PART(name) ((uint64_t)1 << MN_KERNEL_##name)
#define MN_PART_PRODUCTS ((uint64_t)1 << 63)
_Static_assert(MN_KERNEL_COUNT < 63, "the parts of a composition are bits");

static const uint64_t parts_of[MN_OP_COUNT] = {
#define COMPOSE(name, parts) [MN_OP_##name] = parts,
#include "ops/compose/compose.def"
};

/* A composition that a kernel serves whole on a device where heads and views suit it. */
typedef const mn_kernel *(*whole_fn)(mn_pass pass, const void *args);

static const whole_fn whole_of[MN_OP_COUNT] = {
#define COMPOSE_WHOLE(name, kernel) [MN_OP_##name] = kernel,
#include "ops/compose/compose.def"
    NULL,
};

typedef struct job {
    const mn_kernel *kernel;
    const void *args;
    int phase;
    void *shared;
    unsigned char *scratch;
    size_t scratch_bytes;
} job;

static void run_item(void *context, int64_t item, int worker) {
    const job *j = context;
    j->kernel->run(j->args, j->phase, item, j->shared,
                   j->scratch + (size_t)worker * j->scratch_bytes);
}

const mn_kernel *mn_op_kernel(const mn_context *context, mn_op_id op, mn_pass pass,
                              mn_dtype dtype) {
    const int id = kernel_of[op];
    if (id == 0) return NULL;
    const mn_kernel_table *table = context->device   ? &context->cuda
                                   : dtype == MN_F64 ? &context->f64
                                                     : &context->f32;
    return &table->kernel[id - 1][pass];
}

bool mn_op_has_cuda(mn_op_id op, mn_pass pass) {
    mn_kernel_table table;
    mn_kernel_table_fill_cuda(&table);
    if (kernel_of[op]) return table.kernel[kernel_of[op] - 1][pass].launch;
    if (!parts_of[op] || pass == MN_STEP) return false;
    bool there = mn_device_built();
    for (int id = 0; id < MN_KERNEL_COUNT; id++) {
        if (parts_of[op] >> id & 1) there = there && table.kernel[id][pass].launch;
    }
    return there;
}

bool mn_op_rounds_between(mn_op_id op) {
    return mn_op_traits_of(op)->rounds_between;
}

static const void *data_at(const void *args, const mn_field *field) {
    return ((const mn_in *)((const char *)args + field->offset))->data;
}

/* Whether a final state is written over the initial one. */
static bool in_place(mn_op_id op, const void *args) {
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; i < count; i++) {
        const void *from = data_at(args, &fields[i]);
        if (fields[i].role != MN_ROLE_OPT || fields[i].axes[0] != 'N' || !from) continue;
        for (int j = 0; j < count; j++) {
            if (fields[j].role >= MN_ROLE_OUT && data_at(args, &fields[j]) == from) return true;
        }
    }
    return false;
}

/* One token takes the decode step where there is one: when the state is kept in place, or when a
 * cache holds more keys than queries. Other calls with T = 1 take the way of longer ones, so that a
 * packed sequence of one token has the bits of a separate one. */
static const mn_kernel *choose_kernel(const mn_context *context, mn_op_id op, mn_pass pass,
                                      const void *args) {
    const mn_call *call = args;
    const mn_kernel *step = mn_op_kernel(context, op, MN_STEP, call->dtype);
    const bool one = pass == MN_FORWARD && call->T == 1 && !call->cu_seqlens &&
                     (step->run || step->launch);
    const bool decodes = one && (call->L > 1 || in_place(op, args));
    return decodes ? step : mn_op_kernel(context, op, pass, call->dtype);
}

static mn_status refuse_device(mn_op_id op, mn_pass pass) {
    return mn_fail(MN_ERR_UNSUPPORTED,
                   "%s has no CUDA kernel for its %s pass yet; run it on the CPU",
                   mn_op_describe(op)->name, mn_pass_name(pass));
}

/* Bytes of scratch per worker, rounded so that workers share no cache line; false on overflow. */
static bool scratch_of(const mn_plan *plan, int n_threads, size_t *each, size_t *all) {
    if (!mn_add_size(each, plan->scratch_bytes, MN_ALIGN)) return false;
    *each = *each / MN_ALIGN * MN_ALIGN;
    return mn_mul_size(all, *each, (size_t)n_threads);
}

static mn_status run_items(mn_context *context, const mn_kernel *kernel, const char *name,
                           const void *args) {
    const int n_threads = mn_threads_count(context->threads);
    mn_plan plan = { 0 };
    job j = { .kernel = kernel, .args = args };
    size_t all_scratch;
    if (!j.kernel->plan(args, &plan) ||
        !scratch_of(&plan, n_threads, &j.scratch_bytes, &all_scratch)) {
        return mn_fail(MN_ERR_MEMORY, "%s: the sizes of its work space overflow", name);
    }
    j.shared = mn_arena_bytes(context->arena, plan.shared_bytes);
    j.scratch = mn_arena_bytes(context->arena, all_scratch);
    if (!j.shared || !j.scratch) {
        return mn_fail(MN_ERR_MEMORY, "%s: no memory for a work space of %zu + %zu bytes", name,
                       plan.shared_bytes, all_scratch);
    }
    if (context->plans) return MN_OK;
    for (j.phase = 0; j.phase < plan.n_phases; j.phase++) {
        mn_threads_run(context->threads, plan.items[j.phase], run_item, &j);
    }
    return MN_OK;
}

static mn_status run_kernel(mn_context *context, mn_op_id op, mn_pass pass, const void *args) {
    return run_items(context, choose_kernel(context, op, pass, args), mn_op_describe(op)->name,
                     args);
}

/* ---- on a device ----------------------------------------------------------------------------- */

/* Copies `count` numbers of a host array that kernels read to the device; NULL stays NULL. */
static mn_status lend_array(mn_context *context, const int64_t **array, int64_t count) {
    if (!*array) return MN_OK;
    const size_t bytes = (size_t)count * sizeof **array;    // validated: the array is there
    void *there = mn_workspace_bytes(context, bytes);
    if (!there) return mn_fail(MN_ERR_MEMORY, "the GPU has no %zu bytes left", bytes);
    if (context->plans) return MN_OK;
    const mn_status st = mn_device_upload(context->device, there, *array, bytes);
    *array = there;
    return st;
}

bool mn_op_find_counts(mn_op_id op, void *args, const mn_borders *counts) {
    const size_t counts0 = mn_op_traits_of(op)->counts0;
    const int64_t **at = (const int64_t **)((char *)args + counts0);
    if (!counts0 || !*at) return true;
    if (*at != counts->host) return false;
    *at = counts->there;
    return true;
}

/* Makes what callers keep in host memory visible to the kernels. */
static mn_status lend_arrays(mn_context *context, mn_op_id op, void *args) {
    mn_call *call = args;
    const int64_t n_states = call->cu_seqlens ? call->n_seqs : call->B;
    mn_status st = MN_OK;
    if (call->cu_seqlens && call->cu_seqlens == context->borders.host) {
        call->cu_seqlens = context->borders.there;
    } else {
        st = lend_array(context, &call->cu_seqlens, call->n_seqs + 1);
    }
    if (st == MN_OK && !mn_op_find_counts(op, args, &context->counts)) {
        const size_t counts0 = mn_op_traits_of(op)->counts0;
        st = lend_array(context, (const int64_t **)((char *)args + counts0), n_states);
    }
    return st;
}

static mn_status launch_kernel(mn_context *context, const mn_kernel *kernel, mn_op_id op,
                               void *args) {
    const char *name = mn_op_describe(op)->name;
    mn_device *device = context->device;
    mn_plan plan = { 0 };
    if (!kernel->plan(args, &plan)) {
        return mn_fail(MN_ERR_MEMORY, "%s: the sizes of its work space overflow", name);
    }
    void *shared = plan.shared_bytes > 0 ? mn_workspace_bytes(context, plan.shared_bytes) : NULL;
    if (plan.shared_bytes > 0 && !shared) {
        return mn_fail(MN_ERR_MEMORY, "%s: the GPU has no memory for a work space of %zu bytes",
                       name, plan.shared_bytes);
    }
    mn_status st = context->plans ? MN_OK : mn_device_use(device);
    if (st == MN_OK) st = lend_arrays(context, op, args);
    if (st != MN_OK || context->plans) return st;
    return mn_device_check(device, kernel->launch(args, shared, mn_device_stream(device)), name);
}

/* A choice of which only the first name has a CUDA kernel, or a number of which only 0 has. */
static mn_status check_choice(mn_op_id op, const void *args) {
    const size_t offset = mn_op_traits_of(op)->cpu_choice;
    if (!offset) return MN_OK;
    int count;
    const mn_param *params = mn_op_params(op, &count);
    while (params->offset != offset) params++;
    const void *at = (const char *)args + offset;
    if (params->kind == MN_PARAM_INT) {
        if (*(const int64_t *)at == 0) return MN_OK;
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: %s has no CUDA kernel; run it on the CPU",
                       mn_op_describe(op)->name, params->name);
    }
    const int value = *(const int *)at;
    if (value == 0) return MN_OK;
    const char *chosen = params->choices;
    for (int i = 0; i < value; i++) chosen += strcspn(chosen, ",") + 1;
    return mn_fail(MN_ERR_UNSUPPORTED, "%s: %s %.*s has no CUDA kernel; run it on the CPU",
                   mn_op_describe(op)->name, params->name, (int)strcspn(chosen, ","), chosen);
}

static mn_status backward_on_device(mn_context *context, mn_op_id op, void *args) {
    return launch_kernel(context, choose_kernel(context, op, MN_BACKWARD, args), op, args);
}

/* Values in tensors are not checked: that would read the device's memory back at each call. */
static mn_status run_on_device(mn_context *context, mn_op_id op, mn_pass pass, void *args) {
    const mn_op_info *info = mn_op_describe(op);
    if (((const mn_call *)args)->dtype == MN_F64) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: f64 is for the CPU; GPUs run f32 and bf16",
                       info->name);
    }
    mn_status st = mn_validate_sizes(op, args, pass == MN_BACKWARD);
    if (st == MN_OK && !context->plans) st = mn_check_overlap(op, args, pass == MN_BACKWARD);
    if (st != MN_OK) return st;
    const mn_kernel *kernel = kernel_of[op] ? choose_kernel(context, op, pass, args) : NULL;
    if (whole_of[op]) kernel = whole_of[op](pass, args);
    const bool serves = kernel ? kernel->launch != NULL : mn_op_has_cuda(op, pass);
    if (!serves) return refuse_device(op, pass);
    st = check_choice(op, args);
    if (st != MN_OK) return st;
    const mn_mark mark = mn_workspace_mark(context);
    if (kernel_of[op] && pass == MN_BACKWARD && mn_op_is_grouped(op, args) &&
        !mn_op_folds_on_device(op, args)) {
        st = mn_grouped_backward(context, op, args, backward_on_device);
    } else {
        st = kernel ? launch_kernel(context, kernel, op, args)
                    : composition_of[op](context, pass, args);
    }
    mn_workspace_release(context, mark);
    return st;
}

static mn_status backward_on_host(mn_context *context, mn_op_id op, void *args) {
    return run_kernel(context, op, MN_BACKWARD, args);
}

static mn_status run_inside(mn_context *context, mn_op_id op, mn_pass pass, const void *args) {
    const mn_op_info *info = mn_op_describe(op);
    _Alignas(16) unsigned char copy[MN_MAX_ARGS_BYTES];
    memcpy(copy, args, info->args_bytes);
    if (context->device) return run_on_device(context, op, pass, copy);
    if (((const mn_call *)args)->dtype == MN_BF16) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: bf16 runs on GPUs only; use f32 on the CPU",
                       info->name);
    }
    const bool back = pass == MN_BACKWARD;
    mn_status st = context->plans ? mn_validate_sizes(op, copy, back) : mn_validate(op, copy, back);
    if (st != MN_OK) return st;
    const mn_mark mark = mn_arena_mark(context->arena);
    if (kernel_of[op] && back && mn_op_is_grouped(op, copy)) {
        st = mn_grouped_backward(context, op, copy, backward_on_host);
    } else if (kernel_of[op]) {
        st = run_kernel(context, op, pass, copy);
    } else if (composition_of[op]) {
        st = composition_of[op](context, pass, copy);
    } else {
        st = mn_fail(MN_ERR_UNSUPPORTED, "%s has no kernel in this build", info->name);
    }
    mn_arena_release(context->arena, mark);
    return st;
}

mn_status mn_op_run(mn_context *context, mn_op_id op, mn_pass pass, const void *args) {
    const mn_op_info *info = mn_op_describe(op);
    if (!context) return mn_fail(MN_ERR_ARGUMENT, "%s: context is NULL", info->name);
    if (!args) return mn_fail(MN_ERR_ARGUMENT, "%s: args is NULL", info->name);
    mn_status st = mn_context_enter(context);
    if (st != MN_OK) return st;
    st = run_inside(context, op, pass, args);
    mn_context_leave(context);
    return st;
}

/* ---- stretches of tokens --------------------------------------------------------------------- */

static mn_status run_span(mn_context *context, mn_span_id id, mn_moebius_span_args *args) {
    const bool adjoint = id == MN_SPAN_moebius_adjoint;
    mn_status st = mn_context_needs_cpu(context, "the map of a stretch of tokens");
    if (st == MN_OK) st = mn_validate(MN_OP_moebius, &args->op, adjoint);
    if (st != MN_OK) return st;
    const mn_kernel *kernel = mn_span_kernel(id, context->target, args->op.call.dtype);
    const mn_mark mark = mn_arena_mark(context->arena);
    st = run_items(context, kernel, mn_op_describe(MN_OP_moebius)->name, args);
    mn_arena_release(context->arena, mark);
    return st;
}

mn_status mn_op_run_span(mn_context *context, mn_span_id id, const mn_moebius_span_args *args) {
    mn_moebius_span_args copy = *args;
    mn_status st = mn_context_enter(context);
    if (st != MN_OK) return st;
    st = run_span(context, id, &copy);
    mn_context_leave(context);
    return st;
}

/* ---- many calls of one operator -------------------------------------------------------------- */

typedef struct row_call {
    unsigned char *args;
    const mn_kernel *kernel;
    mn_plan plan;
    void *shared;
    int64_t first;                // of this phase's items
} row_call;

typedef struct rows_job {
    const row_call *rows;
    int64_t n;
    int phase;
    unsigned char *scratch;
    size_t scratch_bytes;
} rows_job;

/* Item `item` of the phase belongs to the last row that begins at it or before, of those with any
 * items. */
static void run_row_item(void *context, int64_t item, int worker) {
    const rows_job *j = context;
    int64_t low = 0, high = j->n;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (j->rows[middle].first <= item) low = middle;
        else high = middle;
    }
    const row_call *row = &j->rows[low];
    row->kernel->run(row->args, j->phase, item - row->first, row->shared,
                     j->scratch + (size_t)worker * j->scratch_bytes);
}

static mn_status plan_row(mn_context *context, mn_op_id op, row_call *row, size_t *scratch) {
    const char *name = mn_op_describe(op)->name;
    const mn_status st = mn_validate(op, row->args, false);
    if (st != MN_OK) return st;
    row->kernel = choose_kernel(context, op, MN_FORWARD, row->args);
    size_t each, all;
    if (!row->kernel->plan(row->args, &row->plan) || !scratch_of(&row->plan, 1, &each, &all)) {
        return mn_fail(MN_ERR_MEMORY, "%s: the sizes of its work space overflow", name);
    }
    *scratch = mn_max(*scratch, each);
    row->shared = mn_arena_bytes(context->arena, row->plan.shared_bytes);
    return row->shared ? MN_OK : mn_fail(MN_ERR_MEMORY, "%s: no memory for a work space of %zu "
                                         "bytes", name, row->plan.shared_bytes);
}

static void run_phases(mn_context *context, rows_job *j, row_call *rows) {
    for (j->phase = 0; j->phase < MN_MAX_PHASES; j->phase++) {
        int64_t items = 0;
        for (int64_t i = 0; i < j->n; i++) {
            rows[i].first = items;
            if (j->phase < rows[i].plan.n_phases) items += rows[i].plan.items[j->phase];
        }
        if (items > 0) mn_threads_run(context->threads, items, run_row_item, j);
    }
}

static mn_status run_rows_of_kernel(mn_context *context, mn_op_id op, const unsigned char *args,
                                    size_t step, int64_t n) {
    const size_t bytes = mn_op_describe(op)->args_bytes;
    row_call *rows = mn_arena_bytes(context->arena, (size_t)n * sizeof *rows);
    unsigned char *copies = mn_arena_bytes(context->arena, (size_t)n * step);
    rows_job j = { .rows = rows, .n = n };
    if (!rows || !copies) return mn_fail(MN_ERR_MEMORY, "no memory for %lld calls", (long long)n);
    for (int64_t i = 0; i < n; i++) {
        rows[i] = (row_call){ .args = copies + (size_t)i * step };
        memcpy(rows[i].args, args + (size_t)i * step, bytes);
        const mn_status st = plan_row(context, op, &rows[i], &j.scratch_bytes);
        if (st != MN_OK) return st;
    }
    const size_t workers = (size_t)mn_threads_count(context->threads);
    j.scratch = mn_arena_bytes(context->arena, j.scratch_bytes * workers);
    if (!j.scratch) return mn_fail(MN_ERR_MEMORY, "no memory for the scratch of %zu threads",
                                   workers);
    run_phases(context, &j, rows);
    return MN_OK;
}

mn_status mn_op_run_rows(mn_context *context, mn_op_id op, const void *rows, size_t step,
                         int64_t n) {
    mn_status st = MN_OK;
    if (context->device || !kernel_of[op]) {
        for (int64_t i = 0; i < n && st == MN_OK; i++) {
            st = mn_op_run(context, op, MN_FORWARD, (const char *)rows + (size_t)i * step);
        }
        return st;
    }
    st = mn_context_enter(context);
    if (st != MN_OK) return st;
    const mn_mark mark = mn_arena_mark(context->arena);
    st = run_rows_of_kernel(context, op, rows, step, n);
    mn_arena_release(context->arena, mark);
    mn_context_leave(context);
    return st;
}

/* Walks through the operator with threads that rest and an arena that counts. */
mn_status mn_op_workspace(mn_context *context, mn_op_id op, mn_pass pass, const void *args,
                          size_t *bytes) {
    mn_context dry = *context;
    *bytes = 0;
    dry.plans = true;
    mn_status st = mn_arena_create_counting(&dry.arena);
    if (st != MN_OK) return st;
    mn_threads_rest(dry.threads, true);
    st = mn_op_run(&dry, op, pass, args);
    mn_threads_rest(dry.threads, false);
    *bytes = mn_arena_most(dry.arena);
    mn_arena_destroy(dry.arena);
    return st;
}

#define ENTRY_POINTS(name)                                                                         \
    _Static_assert(sizeof(mn_##name##_args) <= MN_MAX_ARGS_BYTES, #name);                          \
    mn_status mn_op_##name(mn_context *context, const mn_##name##_args *args) {                    \
        return mn_op_run(context, MN_OP_##name, MN_FORWARD, args);                                 \
    }                                                                                              \
    mn_status mn_op_##name##_backward(mn_context *context, const mn_##name##_args *args) {         \
        return mn_op_run(context, MN_OP_##name, MN_BACKWARD, args);                                \
    }
MN_OPS(ENTRY_POINTS)
