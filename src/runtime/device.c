/* device.c - an accelerator: names, scratch memory and copies over a backend. */
#include "runtime/device.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "runtime/device_backend.h"

enum { MAX_INDEX = 4096 };
static const size_t first_block_bytes = (size_t)32 << 20;

/* Where calls go while another branch of the work waits. */
typedef struct branch {
    void *stream, *forked, *ended;    // and two events; NULL: there has been no fork yet
    mn_arena *scratch;
} branch;

struct mn_device {
    mn_device_info info;
    void *stream;
    bool owns_stream;
    bool captures;        // what is asked for goes into a graph
    mn_arena *scratch;
    branch other;
};

struct mn_device_graph {
    mn_device *device;
    void *graph;
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
    if (st == MN_OK) st = mn_device_arena(device, &device->scratch);
    if (st != MN_OK) {
        mn_device_close(device);
        return st;
    }
    *out = device;
    return MN_OK;
}

static void close_branch(branch *other) {
    mn_arena_destroy(other->scratch);
    mn_backend_event_destroy(other->forked);
    mn_backend_event_destroy(other->ended);
    mn_backend_stream_destroy(other->stream);
}

void mn_device_close(mn_device *device) {
    if (!device) return;
    if (mn_device_use(device) == MN_OK) {
        mn_backend_synchronize(device->stream);
        mn_arena_destroy(device->scratch);
        close_branch(&device->other);
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

mn_status mn_device_use_stream(mn_device *device, void *stream) {
    if (!stream) return mn_fail(MN_ERR_ARGUMENT, "the stream is NULL");
    if (stream == device->stream) return MN_OK;
    mn_device_trim(device);
    if (device->owns_stream) mn_backend_stream_destroy(device->stream);
    device->owns_stream = false;
    device->stream = stream;
    return MN_OK;
}

mn_status mn_device_used(const mn_device *device, size_t *bytes) {
    mn_device_info now;
    const mn_status st = mn_device_describe(&now, device->info.index);
    const size_t before = device->info.free_bytes;
    *bytes = st == MN_OK && now.free_bytes < before ? before - now.free_bytes : 0;
    return st;
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

mn_status mn_device_done(mn_device *device, bool *done) {
    *done = false;
    const mn_status st = mn_device_use(device);
    return st == MN_OK ? mn_backend_done(device->stream, done) : st;
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

mn_status mn_device_pool_allocate(mn_device *device, void **out, size_t bytes) {
    *out = NULL;
    const mn_status st = mn_device_use(device);
    return st == MN_OK ? mn_backend_pool_allocate(out, bytes ? bytes : 1, device->stream) : st;
}

void mn_device_pool_free(mn_device *device, void *data) {
    if (data && mn_device_use(device) == MN_OK) mn_backend_pool_free(data, device->stream);
}

static void *allocate_block(void *owner, size_t bytes) {
    void *memory;
    return mn_device_allocate(owner, &memory, bytes) == MN_OK ? memory : NULL;
}

static void free_block(void *owner, void *block) {
    mn_device_free(owner, block);
}

mn_status mn_device_arena(mn_device *device, mn_arena **out) {
    const mn_arena_source source = { allocate_block, free_block, device, first_block_bytes };
    return mn_arena_create_over(out, &source);
}

mn_status mn_device_scratch_from(mn_device *device, const mn_arena_source *source) {
    mn_arena_destroy(device->scratch);
    return mn_arena_create_over(&device->scratch, source);
}

void mn_device_trim(mn_device *device) {
    if (device) mn_arena_trim(device->scratch);
    if (device && device->other.scratch) mn_arena_trim(device->other.scratch);
}

void *mn_device_bytes(mn_device *device, size_t bytes) {
    return mn_arena_bytes(device->scratch, bytes);
}

mn_mark mn_device_mark(const mn_device *device) {
    return mn_arena_mark(device->scratch);
}

void mn_device_release(mn_device *device, mn_mark mark) {
    mn_arena_release(device->scratch, mark);
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

mn_status mn_device_host_allocate(mn_device *device, void **out, size_t bytes) {
    *out = NULL;
    const mn_status st = mn_device_use(device);
    return st == MN_OK ? mn_backend_host_allocate(out, bytes) : st;
}

void mn_device_host_free(mn_device *device, void *data) {
    if (data && mn_device_use(device) == MN_OK) mn_backend_host_free(data);
}

mn_status mn_device_copy(mn_device *device, void *to, const void *from, size_t bytes) {
    return copy(device, to, from, bytes, MN_ON_DEVICE);
}

mn_status mn_device_copy_rows(mn_device *device, void *to, size_t to_step, const void *from,
                              size_t from_step, size_t bytes, int64_t rows) {
    if (bytes == 0 || rows == 0) return MN_OK;
    const mn_status st = mn_device_use(device);
    return st == MN_OK ? mn_backend_copy_rows(to, to_step, from, from_step, bytes, rows,
                                              device->stream) : st;
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

/* ---- branches -------------------------------------------------------------------------------- */

static mn_status open_branch(mn_device *device) {
    branch *other = &device->other;
    mn_status st = other->stream ? MN_OK : mn_backend_stream_create(&other->stream);
    if (st == MN_OK && !other->forked) st = mn_backend_event_create(&other->forked);
    if (st == MN_OK && !other->ended) st = mn_backend_event_create(&other->ended);
    if (st == MN_OK && !other->scratch) st = mn_device_arena(device, &other->scratch);
    return st;
}

static void change_branch(mn_device *device) {
    void *stream = device->stream;
    mn_arena *scratch = device->scratch;
    device->stream = device->other.stream;
    device->scratch = device->other.scratch;
    device->other.stream = stream;
    device->other.scratch = scratch;
}

mn_status mn_device_fork(mn_device *device) {
    branch *other = &device->other;
    mn_status st = mn_device_use(device);
    if (st == MN_OK) st = open_branch(device);
    if (st == MN_OK) st = mn_backend_event_record(other->forked, device->stream);
    if (st == MN_OK) st = mn_backend_event_wait(other->forked, other->stream);
    if (st == MN_OK) change_branch(device);
    return st;
}

mn_status mn_device_back(mn_device *device) {
    const mn_status st = mn_backend_event_record(device->other.ended, device->stream);
    change_branch(device);
    return st;
}

mn_status mn_device_join(mn_device *device) {
    return mn_backend_event_wait(device->other.ended, device->stream);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

mn_status mn_device_graph_begin(mn_device *device) {
    mn_status st = mn_device_use(device);
    if (st == MN_OK) st = mn_backend_capture_begin(device->stream);
    device->captures = st == MN_OK;
    return st;
}

mn_status mn_device_graph_end(mn_device *device, mn_device_graph **out) {
    *out = NULL;
    device->captures = false;
    mn_status st = mn_device_use(device);
    mn_device_graph *graph = calloc(1, sizeof *graph);
    void *made = NULL;
    if (st == MN_OK) st = mn_backend_capture_end(&made, device->stream);
    if (st == MN_OK && !graph) st = mn_fail(MN_ERR_MEMORY, "no memory for a graph");
    if (st != MN_OK) {
        mn_backend_graph_destroy(made);
        free(graph);
        return st;
    }
    *graph = (mn_device_graph){ device, made };
    *out = graph;
    return MN_OK;
}

bool mn_device_captures(const mn_device *device) {
    return device->captures;
}

mn_status mn_device_graph_launch(mn_device_graph *graph) {
    const mn_status st = mn_device_use(graph->device);
    return st == MN_OK ? mn_backend_graph_launch(graph->graph, graph->device->stream) : st;
}

void mn_device_graph_destroy(mn_device_graph *graph) {
    if (!graph) return;
    if (mn_device_use(graph->device) == MN_OK) mn_backend_graph_destroy(graph->graph);
    free(graph);
}
