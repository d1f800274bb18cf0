/* context.h - worker threads, scratch memory and kernels of one caller; or its GPU. */
#ifndef MN_OPS_CONTEXT_H
#define MN_OPS_CONTEXT_H

#include <stdatomic.h>

#include "kernels/dispatch.h"
#include "kernels/gemm.h"
#include "mneme.h"
#include "runtime/arena.h"
#include "runtime/device.h"
#include "runtime/threads.h"

/* cu_seqlens, or tokens seen before, in host memory, and the same on the device. */
typedef struct mn_borders {
    const int64_t *host, *there;
} mn_borders;

struct mn_context {
    mn_threads *threads;
    mn_arena *arena;
    mn_target_id target;
    bool plans;                  // operators compute nothing and take memory from a counting arena
    bool steps;                  // a token is decoded: products of few rows as fast as they can be
    mn_kernel_table f32, f64;
    mn_device *device;       // NULL: operators run on the CPU
    mn_kernel_table cuda;    // with a device: its kernels, for f32 and bf16
    mn_gemm_handle *products;   // with a device, from the first matrix product on
    _Atomic(const void *) user;    // the thread that is inside, and how deep
    int depth;
    mn_borders borders, counts;    // what operators find on the device, while a tape runs them
};

/* The calling thread goes in, and out again; it may go in several times. Fails while another thread
 * is inside: threads and memory of a context serve one call at a time. */
mn_status mn_context_enter(mn_context *context);
void mn_context_leave(mn_context *context);

/* MN_ERR_UNSUPPORTED where the context has a device: for `what` that is of the CPU only. */
mn_status mn_context_needs_cpu(const mn_context *context, const char *what);

#endif
