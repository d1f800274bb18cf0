/* device.h - an accelerator: its stream, its memory and copies to and from it.
 *
 * Work goes to the device's stream in the order of the calls; only what says so waits for it. A
 * build without CUDA has all of these functions, and opening a device then fails with a sentence
 * that says so. The GPU itself is reached through device_backend.h. */
#ifndef MN_RUNTIME_DEVICE_H
#define MN_RUNTIME_DEVICE_H

#include "mneme.h"
#include "runtime/arena.h"

typedef struct mn_device mn_device;

typedef struct mn_device_info {
    int index;
    char name[256];
    int major, minor;                   // compute capability
    int n_processors;
    size_t bytes, free_bytes, l2_bytes;
    unsigned char uuid[16];             // no other GPU has it
} mn_device_info;

/* Whether this build has CUDA kernels at all. */
bool mn_device_built(void);

/* GPUs that can be seen. Fails, and then says why there are none: no CUDA in the build, no driver,
 * a driver that is too old, no GPU. */
mn_status mn_device_count(int *count);

/* What device `index` is. */
mn_status mn_device_describe(mn_device_info *info, int index);

/* Opens "cuda" (the first) or "cuda:N". Work runs on `stream` when that is not NULL: it stays the
 * caller's; otherwise on a stream of the device's own. */
mn_status mn_device_open(mn_device **out, const char *name, void *stream);
void mn_device_close(mn_device *device);    // waits for its work; NULL accepted

const mn_device_info *mn_device_facts(const mn_device *device);
void *mn_device_stream(const mn_device *device);

/* Work of later calls goes to `stream`, the caller's; scratch memory is given back first, since it
 * belongs to the stream before. Not while scratch memory is in use. */
mn_status mn_device_use_stream(mn_device *device, void *stream);

/* Bytes of the GPU's memory that are no longer free since it was opened. */
mn_status mn_device_used(const mn_device *device, size_t *bytes);

/* Makes it the device of the calling thread; before anything that launches by itself. */
mn_status mn_device_use(mn_device *device);

/* The status that a launch returned (a cudaError_t) as ours; `what` begins the sentence. */
mn_status mn_device_check(mn_device *device, int code, const char *what);

/* Waits until all work is done; failures of that work come out here. */
mn_status mn_device_synchronize(mn_device *device);

/* Whether it is done, without waiting. */
mn_status mn_device_done(mn_device *device, bool *done);

/* ---- memory ---------------------------------------------------------------------------------- */

/* Lasting memory, aligned for any vector, uninitialised. */
mn_status mn_device_allocate(mn_device *device, void **out, size_t bytes);
void mn_device_free(mn_device *device, void *data);    // NULL accepted

/* The same for what comes and goes, such as states: taken and given back in the order of the
 * stream, from a pool that keeps what is given back, so that neither waits for anything. Not while
 * work is recorded. */
mn_status mn_device_pool_allocate(mn_device *device, void **out, size_t bytes);
void mn_device_pool_free(mn_device *device, void *data);    // NULL accepted

/* Scratch memory as in arena.h: blocks are kept when released. A piece may be handed out again at
 * once, because the stream runs what was asked for before. NULL when there is no memory. */
void *mn_device_bytes(mn_device *device, size_t bytes);
mn_mark mn_device_mark(const mn_device *device);
void mn_device_release(mn_device *device, mn_mark mark);

/* Scratch memory comes from `source` from now on. */
mn_status mn_device_scratch_from(mn_device *device, const mn_arena_source *source);
void mn_device_trim(mn_device *device);    // gives scratch memory back; NULL accepted

/* An arena of its memory for one owner, who destroys it before the device is closed. */
mn_status mn_device_arena(mn_device *device, mn_arena **out);

/* Copies in the stream. `from` of an upload may be changed as soon as the call returns; a download
 * waits until the bytes are there. */
mn_status mn_device_upload(mn_device *device, void *to, const void *from, size_t bytes);
mn_status mn_device_download(mn_device *device, void *to, const void *from, size_t bytes);
mn_status mn_device_copy(mn_device *device, void *to, const void *from, size_t bytes);

/* Copies `rows` rows of `bytes`, which begin so many bytes apart, on the device. */
mn_status mn_device_copy_rows(mn_device *device, void *to, size_t to_step, const void *from,
                              size_t from_step, size_t bytes, int64_t rows);

/* Host memory that kernels reach at the same address: what they wrote there is there once the
 * device has been waited for. */
mn_status mn_device_host_allocate(mn_device *device, void **out, size_t bytes);
void mn_device_host_free(mn_device *device, void *data);    // NULL accepted

/* Every byte becomes `value`. */
mn_status mn_device_fill(mn_device *device, void *to, unsigned char value, size_t bytes);

/* ---- time ------------------------------------------------------------------------------------ */

/* A point in the stream; the time between two of them is the GPU's own. */
typedef struct mn_device_event mn_device_event;

mn_status mn_device_event_create(mn_device *device, mn_device_event **out);
void mn_device_event_destroy(mn_device_event *event);    // NULL accepted
mn_status mn_device_event_record(mn_device *device, mn_device_event *event);

/* Waits for `to`; seconds from `from` to `to`. */
mn_status mn_device_seconds(mn_device *device, double *seconds, mn_device_event *from,
                            mn_device_event *to);

/* ---- branches -------------------------------------------------------------------------------- */

/* Work that does not wait for each other, recorded or not. After a fork calls go to a second
 * stream, behind what was asked for so far and with scratch memory of its own; mn_device_back
 * follows in any case, then calls go to the first stream again, beside the branch. What comes
 * after mn_device_join waits for both. Tapes take the stream of the moment when they start. */
mn_status mn_device_fork(mn_device *device);
mn_status mn_device_back(mn_device *device);
mn_status mn_device_join(mn_device *device);

/* ---- graphs ---------------------------------------------------------------------------------- */

/* Work of the stream, recorded once and launched as often as wanted: the same kernels on the same
 * addresses. Between begin and end nothing runs, and nothing may wait or download. */
typedef struct mn_device_graph mn_device_graph;

mn_status mn_device_graph_begin(mn_device *device);
mn_status mn_device_graph_end(mn_device *device, mn_device_graph **out);
bool mn_device_captures(const mn_device *device);    // between the two
mn_status mn_device_graph_launch(mn_device_graph *graph);
void mn_device_graph_destroy(mn_device_graph *graph);    // NULL accepted; before the device closes

#endif
