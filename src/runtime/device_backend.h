/* device_backend.h - the few calls that reach a GPU. device_cuda.c makes them through the CUDA
 * runtime; device_none.c stands in for it in a build without CUDA and fails with a sentence. Only
 * device.c calls them. */
#ifndef MN_RUNTIME_DEVICE_BACKEND_H
#define MN_RUNTIME_DEVICE_BACKEND_H

#include "runtime/device.h"

typedef enum mn_backend_way { MN_TO_DEVICE, MN_FROM_DEVICE, MN_ON_DEVICE } mn_backend_way;

/* What a build without CUDA says. */
#define MN_BACKEND_MISSING                                                                         \
    "this build has no CUDA: install the CUDA toolkit and build mneme with -DMN_CUDA=ON, or use "  \
    "the CPU"

bool mn_backend_built(void);
mn_status mn_backend_count(int *count);
mn_status mn_backend_describe(mn_device_info *info, int index);

/* Device `index` becomes that of the calling thread; all calls below go there. */
mn_status mn_backend_use(int index);

/* The code of a launch or a call: MN_OK for 0, else a sentence that begins with `what`. */
mn_status mn_backend_check(int code, const char *what);

mn_status mn_backend_stream_create(void **stream);
void mn_backend_stream_destroy(void *stream);
mn_status mn_backend_synchronize(void *stream);
mn_status mn_backend_done(void *stream, bool *done);    // without waiting

mn_status mn_backend_allocate(void **out, size_t bytes);
void mn_backend_free(void *data);
mn_status mn_backend_pool_allocate(void **out, size_t bytes, void *stream);
void mn_backend_pool_free(void *data, void *stream);
mn_status mn_backend_host_allocate(void **out, size_t bytes);
void mn_backend_host_free(void *data);
mn_status mn_backend_copy(void *to, const void *from, size_t bytes, mn_backend_way way,
                          void *stream);
mn_status mn_backend_copy_rows(void *to, size_t to_step, const void *from, size_t from_step,
                               size_t bytes, int64_t rows, void *stream);    // on the device
mn_status mn_backend_fill(void *to, unsigned char value, size_t bytes, void *stream);

/* Addresses of the current device without memory, and pages of memory that are put behind them:
 * `bytes` are multiples of a page's. A page may be behind several addresses. */
mn_status mn_backend_page_bytes(size_t *bytes);
mn_status mn_backend_reserve(void **out, size_t bytes);
void mn_backend_unreserve(void *at, size_t bytes);
mn_status mn_backend_page_create(uint64_t *page, size_t bytes);
void mn_backend_page_destroy(uint64_t page);
mn_status mn_backend_page_map(void *at, uint64_t page, size_t bytes);
void mn_backend_page_unmap(void *at, size_t bytes);

mn_status mn_backend_event_create(void **event);
void mn_backend_event_destroy(void *event);
mn_status mn_backend_event_record(void *event, void *stream);
mn_status mn_backend_event_wait(void *event, void *stream);    // the stream waits, nobody else
mn_status mn_backend_event_seconds(double *seconds, void *from, void *to);

mn_status mn_backend_capture_begin(void *stream);
mn_status mn_backend_capture_end(void **graph, void *stream);    // ready to launch
mn_status mn_backend_graph_launch(void *graph, void *stream);
void mn_backend_graph_destroy(void *graph);    // NULL accepted

#endif
