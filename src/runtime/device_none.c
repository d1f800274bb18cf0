/* device_none.c - the backend of a build without CUDA: no device can be opened. */
#include "base/status.h"
#include "runtime/device_backend.h"

static mn_status refuse(void) {
    return mn_fail(MN_ERR_UNSUPPORTED, MN_BACKEND_MISSING);
}

bool mn_backend_built(void) {
    return false;
}

mn_status mn_backend_count(int *count) {
    *count = 0;
    return refuse();
}

mn_status mn_backend_describe(mn_device_info *info, int index) {
    (void)info, (void)index;
    return refuse();
}

mn_status mn_backend_use(int index) {
    (void)index;
    return refuse();
}

mn_status mn_backend_check(int code, const char *what) {
    (void)code, (void)what;
    return refuse();
}

mn_status mn_backend_stream_create(void **stream) {
    *stream = NULL;
    return refuse();
}

void mn_backend_stream_destroy(void *stream) {
    (void)stream;
}

mn_status mn_backend_synchronize(void *stream) {
    (void)stream;
    return refuse();
}

mn_status mn_backend_done(void *stream, bool *done) {
    (void)stream;
    *done = false;
    return refuse();
}

mn_status mn_backend_allocate(void **out, size_t bytes) {
    (void)bytes;
    *out = NULL;
    return refuse();
}

void mn_backend_free(void *data) {
    (void)data;
}

mn_status mn_backend_pool_allocate(void **out, size_t bytes, void *stream) {
    (void)bytes, (void)stream;
    *out = NULL;
    return refuse();
}

void mn_backend_pool_free(void *data, void *stream) {
    (void)data, (void)stream;
}

mn_status mn_backend_host_allocate(void **out, size_t bytes) {
    (void)bytes;
    *out = NULL;
    return refuse();
}

void mn_backend_host_free(void *data) {
    (void)data;
}

mn_status mn_backend_copy(void *to, const void *from, size_t bytes, mn_backend_way way,
                          void *stream) {
    (void)to, (void)from, (void)bytes, (void)way, (void)stream;
    return refuse();
}

mn_status mn_backend_copy_rows(void *to, size_t to_step, const void *from, size_t from_step,
                               size_t bytes, int64_t rows, void *stream) {
    (void)to, (void)to_step, (void)from, (void)from_step, (void)bytes, (void)rows, (void)stream;
    return refuse();
}

mn_status mn_backend_fill(void *to, unsigned char value, size_t bytes, void *stream) {
    (void)to, (void)value, (void)bytes, (void)stream;
    return refuse();
}

mn_status mn_backend_event_create(void **event) {
    *event = NULL;
    return refuse();
}

void mn_backend_event_destroy(void *event) {
    (void)event;
}

mn_status mn_backend_event_record(void *event, void *stream) {
    (void)event, (void)stream;
    return refuse();
}

mn_status mn_backend_event_wait(void *event, void *stream) {
    (void)event, (void)stream;
    return refuse();
}

mn_status mn_backend_event_seconds(double *seconds, void *from, void *to) {
    (void)from, (void)to;
    *seconds = 0.0;
    return refuse();
}

mn_status mn_backend_capture_begin(void *stream) {
    (void)stream;
    return refuse();
}

mn_status mn_backend_capture_end(void **graph, void *stream) {
    (void)stream;
    *graph = NULL;
    return refuse();
}

mn_status mn_backend_graph_launch(void *graph, void *stream) {
    (void)graph, (void)stream;
    return refuse();
}

void mn_backend_graph_destroy(void *graph) {
    (void)graph;
}
