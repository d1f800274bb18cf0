/* device.c - an accelerator: names, scratch memory and copies over a backend. */
#include "runtime/device.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "runtime/device_backend.h"

enum { MAX_BLOCKS = 64, MAX_INDEX = 4096 };
static const size_t first_block_bytes = (size_t)32 << 20;

typedef struct block {
    unsigned char *bytes;
    size_t size;
} block;

struct mn_device {
    mn_device_info info;
    void *stream;
    bool owns_stream;
    block blocks[MAX_BLOCKS];
    size_t n_blocks;
    size_t current, used;    // allocation point: block and offset
};

struct mn_device_event {
    void *event;
};

bool mn_device_built(void) {
    return mn_backend_built();
}

mn_status mn_device_count(int *count) {
    return mn_backend_count(count);
}

mn_status mn_device_describe(mn_device_info *info, int index) {
    memset(info, 0, sizeof *info);
    return mn_backend_describe(info, index);
}

/* "cuda" or "cuda:N" */
static mn_status parse_name(int *index, const char *name) {
    *index = 0;
    if (strcmp(name, "cuda") == 0) return MN_OK;
    if (strncmp(name, "cuda:", 5) == 0 && name[5]) {
        int64_t value = 0;
        const char *at = name + 5;
        while (*at >= '0' && *at <= '9' && value <= MAX_INDEX) value = value * 10 + (*at++ - '0');
        *index = (int)value;
        if (!*at && value <= MAX_INDEX) return MN_OK;
    }
    return mn_fail(MN_ERR_ARGUMENT, "no device is called \"%s\"; there are cpu, cuda and cuda:N",
                   name);
}

static mn_status find(mn_device_info *info, const char *name) {
    int index, count;
    mn_status st = parse_name(&index, name);
    if (st == MN_OK) st = mn_backend_count(&count);
    if (st == MN_OK && index >= count) {
        st = mn_fail(MN_ERR_UNSUPPORTED, "there is no %s; %d GPU%s can be seen, counted from 0",
                     name, count, count == 1 ? "" : "s");
    }
    return st == MN_OK ? mn_device_describe(info, index) : st;
}

mn_status mn_device_open(mn_device **out, const char *name, void *stream) {
    mn_device_info info;
    mn_status st = find(&info, name);
    if (st != MN_OK) return st;
    mn_device *device = calloc(1, sizeof *device);
    if (!device) return mn_fail(MN_ERR_MEMORY, "no memory for a device");
    device->info = info;
    device->stream = stream;
    st = mn_backend_use(info.index);
    if (st == MN_OK && !stream) {
        st = mn_backend_stream_create(&device->stream);
        device->owns_stream = st == MN_OK;
    }
    if (st != MN_OK) {
        mn_device_close(device);
        return st;
    }
    *out = device;
    return MN_OK;
}

void mn_device_close(mn_device *device) {
    if (!device) return;
    if (mn_device_use(device) == MN_OK) {
        mn_backend_synchronize(device->stream);
        for (size_t i = 0; i < device->n_blocks; i++) mn_backend_free(device->blocks[i].bytes);
        if (device->owns_stream) mn_backend_stream_destroy(device->stream);
    }
    free(device);
}

const mn_device_info *mn_device_facts(const mn_device *device) {
    return &device->info;
}

void *mn_device_stream(const mn_device *device) {
    return device->stream;
}

mn_status mn_device_use(mn_device *device) {
    return mn_backend_use(device->info.index);
}

mn_status mn_device_check(mn_device *device, int code, const char *what) {
    (void)device;
    return code == 0 ? MN_OK : mn_backend_check(code, what);
}

mn_status mn_device_synchronize(mn_device *device) {
    const mn_status st = mn_device_use(device);
    return st == MN_OK ? mn_backend_synchronize(device->stream) : st;
}

/* ---- memory ---------------------------------------------------------------------------------- */

mn_status mn_device_allocate(mn_device *device, void **out, size_t bytes) {
    *out = NULL;
    const mn_status st = mn_device_use(device);
    return st == MN_OK ? mn_backend_allocate(out, bytes ? bytes : 1) : st;
}

void mn_device_free(mn_device *device, void *data) {
    if (data && mn_device_use(device) == MN_OK) mn_backend_free(data);
}

static size_t held(const mn_device *device) {
    size_t bytes = 0;
    for (size_t i = 0; i < device->n_blocks; i++) bytes += device->blocks[i].size;
    return bytes;
}

/* Makes blocks[n_blocks] at least `bytes` big, doubling what is held so far where that fits. */
static bool add_block(mn_device *device, size_t bytes) {
    if (device->n_blocks == MAX_BLOCKS || bytes > PTRDIFF_MAX / 2) return false;
    size_t size = held(device) > first_block_bytes ? held(device) : first_block_bytes;
    if (size < bytes) size = bytes;
    void *memory;
    mn_status st = mn_device_allocate(device, &memory, size);
    if (st == MN_ERR_MEMORY && size > bytes) {
        st = mn_device_allocate(device, &memory, size = bytes);
    }
    if (st != MN_OK) return false;
    device->blocks[device->n_blocks++] = (block){ memory, size };
    return true;
}

void *mn_device_bytes(mn_device *device, size_t bytes) {
    size_t want;
    if (!mn_add_size(&want, bytes ? bytes : 1, MN_DEVICE_ALIGN - 1)) return NULL;
    want = want / MN_DEVICE_ALIGN * MN_DEVICE_ALIGN;
    size_t at = device->current, used = device->used;
    while (at < device->n_blocks && device->blocks[at].size - used < want) {
        at++;
        used = 0;
    }
    if (at == device->n_blocks && !add_block(device, want)) return NULL;
    device->current = at;
    device->used = used + want;
    return device->blocks[at].bytes + used;
}

mn_mark mn_device_mark(const mn_device *device) {
    return (mn_mark){ device->current, device->used };
}

void mn_device_release(mn_device *device, mn_mark mark) {
    device->current = mark.block;
    device->used = mark.used;
}

static mn_status copy(mn_device *device, void *to, const void *from, size_t bytes,
                      mn_backend_way way) {
    if (bytes == 0) return MN_OK;
    const mn_status st = mn_device_use(device);
    return st == MN_OK ? mn_backend_copy(to, from, bytes, way, device->stream) : st;
}

/* From memory that is not pinned, CUDA reads all bytes before the call returns. */
mn_status mn_device_upload(mn_device *device, void *to, const void *from, size_t bytes) {
    return copy(device, to, from, bytes, MN_TO_DEVICE);
}

mn_status mn_device_download(mn_device *device, void *to, const void *from, size_t bytes) {
    const mn_status st = copy(device, to, from, bytes, MN_FROM_DEVICE);
    return st == MN_OK ? mn_device_synchronize(device) : st;
}

mn_status mn_device_copy(mn_device *device, void *to, const void *from, size_t bytes) {
    return copy(device, to, from, bytes, MN_ON_DEVICE);
}

mn_status mn_device_fill(mn_device *device, void *to, unsigned char value, size_t bytes) {
    if (bytes == 0) return MN_OK;
    const mn_status st = mn_device_use(device);
    return st == MN_OK ? mn_backend_fill(to, value, bytes, device->stream) : st;
}

/* ---- time ------------------------------------------------------------------------------------ */

mn_status mn_device_event_create(mn_device *device, mn_device_event **out) {
    *out = NULL;
    mn_status st = mn_device_use(device);
    mn_device_event *event = st == MN_OK ? calloc(1, sizeof *event) : NULL;
    if (st == MN_OK && !event) st = mn_fail(MN_ERR_MEMORY, "no memory for an event");
    if (st == MN_OK) st = mn_backend_event_create(&event->event);
    if (st != MN_OK) {
        free(event);
        return st;
    }
    *out = event;
    return MN_OK;
}

void mn_device_event_destroy(mn_device_event *event) {
    if (!event) return;
    mn_backend_event_destroy(event->event);
    free(event);
}

mn_status mn_device_event_record(mn_device *device, mn_device_event *event) {
    const mn_status st = mn_device_use(device);
    return st == MN_OK ? mn_backend_event_record(event->event, device->stream) : st;
}

mn_status mn_device_seconds(mn_device *device, double *seconds, mn_device_event *from,
                            mn_device_event *to) {
    *seconds = 0.0;
    const mn_status st = mn_device_use(device);
    return st == MN_OK ? mn_backend_event_seconds(seconds, from->event, to->event) : st;
}
