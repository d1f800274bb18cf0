/* sample.c - one call of an operator with memory of its own. */
#include "ops/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"

enum { GUARD_BYTES = 64, GUARD = 0x5A, UNSET = 0xFF };    // 0xFF.. is a NaN in every type
enum { REPEAT_AFTER = 40000 };                            // numbers of one tensor

static size_t element_bytes(const mn_sample *sample) {
    return mn_dtype_bytes(((const mn_call *)sample->args)->dtype);
}

void mn_sample_init(mn_sample *sample, mn_op_id op) {
    memset(sample, 0, sizeof *sample);
    sample->op = op;
    int count;
    const mn_param *params = mn_op_params(op, &count);
    for (int i = 0; i < count; i++) {
        void *at = sample->args + params[i].offset;
        if (params[i].kind == MN_PARAM_REAL) *(double *)at = params[i].value;
        if (params[i].kind == MN_PARAM_INT) *(int64_t *)at = (int64_t)params[i].value;
    }
}

/* Memory for `count` elements between guards; points behind the first guard. */
static void *guarded(const mn_sample *sample, int64_t count) {
    size_t bytes, all;
    if (!mn_mul_size(&bytes, (size_t)count, element_bytes(sample)) ||
        !mn_add_size(&all, bytes, 3 * GUARD_BYTES)) {
        return NULL;
    }
    unsigned char *memory = aligned_alloc(GUARD_BYTES, all / GUARD_BYTES * GUARD_BYTES);
    if (!memory) return NULL;
    memset(memory, GUARD, GUARD_BYTES);
    memset(memory + GUARD_BYTES, UNSET, bytes);
    memset(memory + GUARD_BYTES + bytes, GUARD, GUARD_BYTES);
    return memory + GUARD_BYTES;
}

static bool guard_intact(const mn_sample *sample, const void *data, int64_t count) {
    if (!data) return true;
    const unsigned char *before = (const unsigned char *)data - GUARD_BYTES;
    const unsigned char *after = (const unsigned char *)data +
                                 (size_t)count * element_bytes(sample);
    for (int i = 0; i < GUARD_BYTES; i++) {
        if (before[i] != GUARD || after[i] != GUARD) return false;
    }
    return true;
}

/* The numbers of a tensor that are drawn before they repeat: `limit`, rounded up to whole rows, or
 * whole blocks of a matrix. */
static int64_t drawn_of(const mn_call *call, const mn_sample_tensor *tensor, int64_t limit) {
    const size_t rank = strlen(tensor->axes);
    bool ok = true;
    const int64_t width = rank ? mn_axis_size(call, tensor->axes[rank - 1], &ok) : 1;
    const bool square = rank >= 2 && tensor->axes[rank - 1] == tensor->axes[rank - 2];
    const int64_t block = mn_max(square ? width * width : width, 1);
    return mn_min(tensor->count, mn_ceil_div(limit, block) * block);
}

static mn_status allocate_one(mn_sample *sample, mn_sample_tensor *tensor) {
    const mn_call *call = (const mn_call *)sample->args;
    bool ok = true;
    tensor->count = 1;
    for (const char *letter = tensor->axes; *letter; letter++) {
        const int64_t size = mn_axis_size(call, *letter, &ok);
        if (size < 0 || !ok || !mn_mul_i64(&tensor->count, tensor->count, size)) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: bad size on axis %c", tensor->field->name,
                           *letter);
        }
    }
    tensor->held = sample->repeated ? drawn_of(call, tensor, REPEAT_AFTER) : tensor->count;
    tensor->data = guarded(sample, tensor->held);
    const bool paired = tensor->field->partner != MN_NO_OFFSET && !sample->forward_only;
    if (paired) tensor->partner = guarded(sample, tensor->held);
    if (!tensor->data || (paired && !tensor->partner)) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %s", tensor->field->name);
    }
    ((mn_out *)(sample->args + tensor->field->offset))->data = tensor->data;
    if (tensor->partner)
        ((mn_out *)(sample->args + tensor->field->partner))->data = tensor->partner;
    return MN_OK;
}

mn_status mn_sample_allocate(mn_sample *sample, uint64_t wanted) {
    mn_call *call = (mn_call *)sample->args;
    int count;
    const mn_field *fields = mn_op_fields(sample->op, &count);
    const int decay = mn_args_decay(sample->op, sample->args);
    const mn_op_traits *traits = mn_op_traits_of(sample->op);
    if (traits->keyed && call->L == 0) call->L = call->T;
    if (traits->grouped && call->J == 0) call->J = call->H;
    mn_status st = MN_OK;
    sample->n_tensors = count;
    for (int i = 0; i < count && st == MN_OK; i++) {
        mn_sample_tensor *tensor = &sample->tensors[i];
        *tensor = (mn_sample_tensor){ .field = &fields[i] };
        const bool optional = fields[i].role == MN_ROLE_OPT;
        const bool absent = optional && !(wanted >> i & 1);
        if (absent || !mn_field_axes(&fields[i], decay, tensor->axes)) continue;
        if (traits->theta && fields[i].offset == traits->theta) call->R = 2 * call->K;
        else if (traits->theta && call->R == 0) call->R = call->K;
        st = allocate_one(sample, tensor);
    }
    return st;
}

static void free_guarded(void *data) {
    if (data) free((unsigned char *)data - GUARD_BYTES);
}

void mn_sample_free(mn_sample *sample) {
    for (int i = 0; i < sample->n_tensors; i++) {
        free_guarded(sample->tensors[i].data);
        free_guarded(sample->tensors[i].partner);
    }
    sample->n_tensors = 0;
}

double mn_sample_get(const mn_sample *sample, const void *data, int64_t i) {
    const bool f64 = ((const mn_call *)sample->args)->dtype == MN_F64;
    return f64 ? ((const double *)data)[i] : (double)((const float *)data)[i];
}

void mn_sample_set(const mn_sample *sample, void *data, int64_t i, double x) {
    const bool f64 = ((const mn_call *)sample->args)->dtype == MN_F64;
    if (f64) ((double *)data)[i] = x;
    else ((float *)data)[i] = (float)x;
}

/* Number `at` of a tensor by its law, from the normal or the uniform number of that place: UNIT and
 * COVARIANCE are finished later. */
static double draw_one(mn_law law, uint64_t seed, int which, int64_t at, int64_t n_classes) {
    if (law == MN_LAW_GATE || law == MN_LAW_DECAY || law == MN_LAW_CLASS) {
        const double u = mn_rng_uniform(seed, (uint64_t)which + MN_MAX_FIELDS, (uint64_t)at);
        if (law == MN_LAW_GATE) return 0.02 + 0.96 * u;
        return law == MN_LAW_DECAY ? -0.3 * u * u : floor(u * (double)n_classes);
    }
    const double z = mn_rng_normal(seed, (uint64_t)which, (uint64_t)at);
    switch (law) {
    case MN_LAW_SMALL: return 0.2 * z;
    case MN_LAW_POSITIVE: return exp(0.5 * z);
    case MN_LAW_NOISE: return 0.1 * exp(0.5 * z);
    case MN_LAW_MEMORY: return 1.0 + 15.0 * exp(0.3 * z);
    default: return z;
    }
}

/* Rows of length one. */
static void normalise_rows(const mn_sample *sample, void *data, int64_t count, int64_t width) {
    for (int64_t row = 0; row < count / width; row++) {
        double sum = 1e-30;
        for (int64_t i = 0; i < width; i++) {
            const double x = mn_sample_get(sample, data, row * width + i);
            sum += x * x;
        }
        for (int64_t i = 0; i < width; i++) {
            const double x = mn_sample_get(sample, data, row * width + i);
            mn_sample_set(sample, data, row * width + i, x / sqrt(sum));
        }
    }
}

/* Makes each R x R block symmetric: diagonally dominant for a covariance. */
static void symmetrise(const mn_sample *sample, void *data, int64_t count, int64_t R,
                       bool dominant) {
    for (int64_t at = 0; at < count; at += R * R) {
        for (int64_t i = 0; i < R; i++) {
            for (int64_t j = 0; j <= i; j++) {
                double x = mn_sample_get(sample, data, at + i * R + j);
                if (dominant) x = 0.3 * x / (double)R + (i == j ? 1.0 : 0.0);
                mn_sample_set(sample, data, at + i * R + j, x);
                mn_sample_set(sample, data, at + j * R + i, x);
            }
        }
    }
}

/* Fills `data` by its law; beyond the first `limit` numbers, rounded up to whole rows or blocks, it
 * repeats them. */
static void draw_tensor(const mn_sample *sample, int which, void *data, mn_law law, uint64_t seed,
                        int64_t limit) {
    const mn_sample_tensor *tensor = &sample->tensors[which];
    const mn_call *call = (const mn_call *)sample->args;
    const size_t rank = strlen(tensor->axes);
    bool ok = true;
    const int64_t width = rank ? mn_axis_size(call, tensor->axes[rank - 1], &ok) : 1;
    const bool square = rank >= 2 && tensor->axes[rank - 1] == tensor->axes[rank - 2];
    const int64_t drawn = drawn_of(call, tensor, limit);
    for (int64_t at = 0; at < drawn; at++) {
        mn_sample_set(sample, data, at, draw_one(law, seed, which, at, call->V));
    }
    if (law == MN_LAW_UNIT) normalise_rows(sample, data, drawn, width);
    if (square) symmetrise(sample, data, drawn, width, law == MN_LAW_COVARIANCE);
    const size_t bytes = element_bytes(sample);
    for (int64_t at = drawn; at < tensor->held; at += drawn) {
        const size_t part = (size_t)mn_min(drawn, tensor->held - at) * bytes;
        memcpy((unsigned char *)data + (size_t)at * bytes, data, part);
    }
}

static void draw_all(mn_sample *sample, uint64_t seed, int64_t limit) {
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *tensor = &sample->tensors[i];
        const bool input = tensor->field->role <= MN_ROLE_RAW;
        void *data = input ? tensor->data : tensor->partner;
        if (data)
            draw_tensor(sample, i, data, input ? tensor->field->law : MN_LAW_NORMAL, seed, limit);
    }
}

void mn_sample_draw(mn_sample *sample, uint64_t seed) {
    int64_t largest = 1;
    for (int i = 0; i < sample->n_tensors; i++) largest = mn_max(largest, sample->tensors[i].count);
    draw_all(sample, seed, largest);
}

void mn_sample_draw_repeated(mn_sample *sample, uint64_t seed) {
    draw_all(sample, seed, REPEAT_AFTER);
}

bool mn_sample_in_place(mn_sample *sample, const char *input, const char *result) {
    mn_sample_tensor *from = mn_sample_find(sample, input), *to = mn_sample_find(sample, result);
    if (!from || !to || !from->data || !to->data || from->count != to->count) return false;
    free_guarded(to->data);
    to->data = NULL;
    to->count = to->held = 0;
    ((mn_out *)(sample->args + to->field->offset))->data = from->data;
    return true;
}

mn_sample_tensor *mn_sample_find(mn_sample *sample, const char *name) {
    for (int i = 0; i < sample->n_tensors; i++) {
        if (strcmp(sample->tensors[i].field->name, name) == 0) return &sample->tensors[i];
    }
    return NULL;
}

bool mn_sample_guards_intact(const mn_sample *sample) {
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *tensor = &sample->tensors[i];
        if (!guard_intact(sample, tensor->data, tensor->held)) return false;
        if (!guard_intact(sample, tensor->partner, tensor->held)) return false;
    }
    return true;
}

void mn_sample_nudge(mn_sample *to, const mn_sample *from, double size, uint64_t seed) {
    for (int i = 0; i < from->n_tensors; i++) {
        const mn_sample_tensor *tensor = &from->tensors[i];
        const bool input = tensor->field->role <= MN_ROLE_RAW;
        const void *x = input ? tensor->data : tensor->partner;
        void *y = input ? to->tensors[i].data : to->tensors[i].partner;
        for (int64_t at = 0; x && y && at < tensor->count; at++) {
            const bool up = mn_rng_uniform(seed, (uint64_t)i, (uint64_t)at) < 0.5;
            mn_sample_set(to, y, at, mn_sample_get(from, x, at) * (up ? 1.0 + size : 1.0 - size));
        }
    }
}
