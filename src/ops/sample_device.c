/* sample_device.c - a sample's call on a device. */
#include "ops/sample_device.h"

#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"

enum { GUARD_BYTES = 256, GUARD = 0x5A, UNSET = 0xFF };    // 0xFF.. is a NaN in every type

/* A tensor, or its gradient or cotangent, on the device. */
typedef struct part {
    void *host;              // where the sample has it, to recognise memory used twice
    size_t offset;           // of its view in the argument struct
    unsigned char *memory;   // on the device, with guards on both sides; NULL: absent
    mn_dtype dtype;
    int64_t count, held;     // numbers; those that the sample holds, which the others repeat
    bool given, wanted;      // copied there; copied back
} part;

struct mn_device_sample {
    mn_device *device;
    mn_op_id op;
    int n_parts;
    part parts[2 * MN_MAX_FIELDS];
    _Alignas(64) unsigned char args[MN_MAX_ARGS_BYTES];
};

static bool is_input(const mn_sample_tensor *tensor) {
    return tensor->field->role <= MN_ROLE_RAW;
}

static double rounded(double x, mn_dtype dtype) {
    if (dtype == MN_F64) return x;
    return dtype == MN_F32 ? (float)x : mn_bf16_round(x);
}

void mn_sample_round(mn_sample *sample, mn_dtype dtype) {
    for (int i = 0; i < sample->n_tensors; i++) {
        mn_sample_tensor *tensor = &sample->tensors[i];
        void *data = is_input(tensor) ? tensor->data : tensor->partner;
        const mn_dtype type = mn_field_dtype(tensor->field, dtype);
        for (int64_t at = 0; data && at < tensor->count; at++) {
            mn_sample_set(sample, data, at, rounded(mn_sample_get(sample, data, at), type));
        }
    }
}

/* ---- there ----------------------------------------------------------------------------------- */

static size_t data_bytes(const part *p) {
    return (size_t)p->count * mn_dtype_bytes(p->dtype);
}

/* Guard, tensor, guard; the second one starts right behind the last element. */
static size_t part_bytes(const part *p) {
    return data_bytes(p) + 2 * (size_t)GUARD_BYTES;
}

static void encode(unsigned char *to, const mn_sample *sample, const part *p) {
    for (int64_t i = 0; i < p->held; i++) {
        const float x = (float)mn_sample_get(sample, p->host, i);
        const uint16_t half = mn_bf16_from_float(x);
        if (p->dtype == MN_F32) memcpy(to + 4 * i, &x, sizeof x);
        else memcpy(to + 2 * i, &half, sizeof half);
    }
}

static double decode(const unsigned char *from, const part *p, int64_t i) {
    float x;
    uint16_t half;
    if (p->dtype == MN_F32) {
        memcpy(&x, from + 4 * i, sizeof x);
        return x;
    }
    memcpy(&half, from + 2 * i, sizeof half);
    return mn_bf16_to_float(half);
}

/* The numbers that the sample holds go there; the rest repeats them, twice as many at a time. */
static mn_status send_given(mn_device *device, const mn_sample *sample, const part *p) {
    const size_t all = data_bytes(p);
    size_t done = (size_t)p->held * mn_dtype_bytes(p->dtype);
    unsigned char *image = malloc(done + 1), *data = p->memory + GUARD_BYTES;
    if (!image) return mn_fail(MN_ERR_MEMORY, "no memory for a copy of %zu bytes", done);
    encode(image, sample, p);
    mn_status st = mn_device_upload(device, data, image, done);
    free(image);
    while (st == MN_OK && done > 0 && done < all) {
        const size_t bytes = done < all - done ? done : all - done;
        st = mn_device_copy(device, data + done, data, bytes);
        done += bytes;
    }
    return st;
}

static mn_status send(mn_device_sample *there, const mn_sample *sample, part *p) {
    size_t bytes;
    if (!mn_mul_size(&bytes, (size_t)p->count, sizeof(double))) {
        return mn_fail(MN_ERR_MEMORY, "the size of a tensor overflows");
    }
    void *memory;
    mn_status st = mn_device_allocate(there->device, &memory, part_bytes(p));
    p->memory = memory;
    if (st == MN_OK) st = mn_device_fill(there->device, memory, GUARD, part_bytes(p));
    if (st != MN_OK) return st;
    if (p->given) return send_given(there->device, sample, p);
    return mn_device_fill(there->device, p->memory + GUARD_BYTES, UNSET, data_bytes(p));
}

/* The part that has its memory at `host` in the sample; NULL if none has. */
static part *find_part(mn_device_sample *there, const void *host) {
    for (int i = 0; i < there->n_parts; i++) {
        if (there->parts[i].memory && there->parts[i].host == host) return &there->parts[i];
    }
    return NULL;
}

/* One view of the call: memory of its own, or that of the input it is written over. */
static mn_status place(mn_device_sample *there, const mn_sample *sample,
                       const mn_sample_tensor *tensor, bool partner, mn_dtype dtype) {
    const size_t offset = partner ? tensor->field->partner : tensor->field->offset;
    if (offset == MN_NO_OFFSET) return MN_OK;
    mn_out *view = (mn_out *)(there->args + offset);
    if (!view->data) return MN_OK;
    part *shared = find_part(there, view->data);
    if (shared) {
        shared->wanted = true;
        view->data = shared->memory + GUARD_BYTES;
        return MN_OK;
    }
    const bool given = is_input(tensor) != partner;
    part *p = &there->parts[there->n_parts++];
    *p = (part){ .host = view->data, .offset = offset,
                 .dtype = mn_field_dtype(tensor->field, dtype), .count = tensor->count,
                 .held = tensor->held, .given = given, .wanted = !given };
    const mn_status st = send(there, sample, p);
    view->data = p->memory + GUARD_BYTES;
    return st;
}

mn_status mn_device_sample_create(mn_device_sample **out, mn_context *context,
                                  const mn_sample *sample, mn_dtype dtype) {
    *out = NULL;
    if (!context->device) return mn_fail(MN_ERR_ARGUMENT, "the context has no device");
    mn_device_sample *there = calloc(1, sizeof *there);
    if (!there) return mn_fail(MN_ERR_MEMORY, "no memory for a sample");
    there->device = context->device;
    there->op = sample->op;
    memcpy(there->args, sample->args, sizeof there->args);
    ((mn_call *)there->args)->dtype = dtype;
    mn_status st = MN_OK;
    for (int i = 0; i < sample->n_tensors && st == MN_OK; i++) {
        st = place(there, sample, &sample->tensors[i], false, dtype);
    }
    for (int i = 0; i < sample->n_tensors && st == MN_OK; i++) {
        st = place(there, sample, &sample->tensors[i], true, dtype);
    }
    if (st != MN_OK) {
        mn_device_sample_free(there);
        return st;
    }
    *out = there;
    return MN_OK;
}

/* Where the view at `offset` of a clone points, if the original's has memory. */
static void move_view(mn_device_sample *to, const mn_device_sample *from, size_t offset) {
    if (offset == MN_NO_OFFSET) return;
    const unsigned char *old = ((const mn_out *)(from->args + offset))->data;
    for (int i = 0; old && i < from->n_parts; i++) {
        if (from->parts[i].memory + GUARD_BYTES != old) continue;
        ((mn_out *)(to->args + offset))->data = to->parts[i].memory + GUARD_BYTES;
    }
}

mn_status mn_device_sample_clone(mn_device_sample **out, const mn_device_sample *sample) {
    mn_device_sample *clone = malloc(sizeof *clone);
    *out = NULL;
    if (!clone) return mn_fail(MN_ERR_MEMORY, "no memory for a sample");
    *clone = *sample;
    for (int i = 0; i < clone->n_parts; i++) clone->parts[i].memory = NULL;
    mn_status st = MN_OK;
    for (int i = 0; i < clone->n_parts && st == MN_OK; i++) {
        void *memory;
        const size_t bytes = part_bytes(&clone->parts[i]);
        st = mn_device_allocate(clone->device, &memory, bytes);
        clone->parts[i].memory = memory;
        if (st == MN_OK) {
            st = mn_device_copy(clone->device, memory, sample->parts[i].memory, bytes);
        }
    }
    int count;
    const mn_field *fields = mn_op_fields(sample->op, &count);
    for (int i = 0; i < count && st == MN_OK; i++) {
        move_view(clone, sample, fields[i].offset);
        move_view(clone, sample, fields[i].partner);
    }
    if (st != MN_OK) {
        mn_device_sample_free(clone);
        return st;
    }
    *out = clone;
    return MN_OK;
}

void mn_device_sample_free(mn_device_sample *sample) {
    if (!sample) return;
    for (int i = 0; i < sample->n_parts; i++) {
        mn_device_free(sample->device, sample->parts[i].memory);
    }
    free(sample);
}

const void *mn_device_sample_args(const mn_device_sample *sample) {
    return sample->args;
}

size_t mn_device_sample_bytes(const mn_device_sample *sample) {
    size_t bytes = 0;
    for (int i = 0; i < sample->n_parts; i++) bytes += data_bytes(&sample->parts[i]);
    return bytes;
}

/* ---- and back -------------------------------------------------------------------------------- */

static bool guards_intact(const unsigned char *image, const part *p) {
    for (int i = 0; i < GUARD_BYTES; i++) {
        if (image[i] != GUARD || image[GUARD_BYTES + data_bytes(p) + (size_t)i] != GUARD) {
            return false;
        }
    }
    return true;
}

static mn_status fetch_part(const mn_device_sample *there, const part *p, mn_sample *into) {
    unsigned char *image = malloc(part_bytes(p));
    if (!image) return mn_fail(MN_ERR_MEMORY, "no memory for a copy of %zu bytes", part_bytes(p));
    mn_status st = mn_device_download(there->device, image, p->memory, part_bytes(p));
    if (st == MN_OK && !guards_intact(image, p)) {
        st = mn_fail(MN_ERR_INTERNAL, "%s: memory around a tensor was overwritten on the GPU",
                     mn_op_describe(there->op)->name);
    }
    void *to = ((mn_out *)(into->args + p->offset))->data;
    for (int64_t i = 0; st == MN_OK && p->wanted && i < p->count; i++) {
        mn_sample_set(into, to, i, decode(image + GUARD_BYTES, p, i));
    }
    free(image);
    return st;
}

mn_status mn_device_sample_fetch(const mn_device_sample *sample, mn_sample *into) {
    mn_status st = mn_device_synchronize(sample->device);
    for (int i = 0; i < sample->n_parts && st == MN_OK; i++) {
        st = fetch_part(sample, &sample->parts[i], into);
    }
    return st;
}
