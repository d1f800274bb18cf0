/* kernel.h - what a kernel is: a plan and a runner over one argument struct of mneme.h.
 *
 * Kernels see pointers and sizes only. When one is called every view has its strides filled in, all
 * sizes are checked (T and the length of a sequence may be 0), and cu_seqlens is either NULL or
 * sound. A kernel allocates nothing, starts no thread and cannot fail.
 *
 * A call is a few phases, one after the other; the items of a phase are independent and may run on
 * any thread in any order. How work is cut into items may depend on the sizes but never on the
 * number of threads, and what an item computes for one sequence never depends on the other
 * sequences: that is what makes results bit-equal across thread counts and packed equal to
 * separate. */
#ifndef MN_KERNELS_KERNEL_H
#define MN_KERNELS_KERNEL_H

#include "mneme.h"

enum { MN_MAX_PHASES = 8 };

typedef struct mn_plan {
    int n_phases;
    int64_t items[MN_MAX_PHASES];
    size_t shared_bytes;     // one block for the call, seen by all items, uninitialised
    size_t scratch_bytes;    // one block per worker, uninitialised at each item
} mn_plan;

/* Fills a zeroed plan; false when its sizes overflow. Pointers that are NULL in the arguments are
 * results not wanted or inputs not given; a plan may look at that. */
typedef bool (*mn_plan_fn)(const void *args, mn_plan *plan);
typedef void (*mn_run_fn)(const void *args, int phase, int64_t item, void *shared, void *scratch);

/* A kernel of a GPU: puts its work on `stream` and returns without waiting, with 0 or the
 * cudaError_t of the launch. All pointers in `args` are the device's, cu_seqlens and counts0 too;
 * `shared` is a block of plan's shared_bytes there, which is all of the plan that counts (the plan
 * itself sees those two arrays in host memory). What an element's value is may not depend on timing
 * (no floating-point atomics), nor on the other sequences of a packed call. */
typedef int (*mn_launch_fn)(const void *args, void *shared, void *stream);

/* `run` is NULL for a kernel of a GPU, `launch` for one of the CPU, both where there is none. */
typedef struct mn_kernel {
    mn_plan_fn plan;
    mn_run_fn run;
    const char *target;    // "ref", "avx2", ..., "cuda"
    mn_launch_fn launch;
} mn_kernel;

typedef enum mn_pass { MN_FORWARD, MN_BACKWARD, MN_STEP, MN_PASS_COUNT } mn_pass;

/* Ids of the operators that are kernels, in the order of kernels.def. */
typedef enum mn_kernel_id {
#define KERNEL(name) MN_KERNEL_##name,
#include "kernels/kernels.def"
#undef KERNEL
    MN_KERNEL_COUNT
} mn_kernel_id;

/* Ids of the kernels of spans.def. */
typedef enum mn_span_id {
#define SPAN(name) MN_SPAN_##name,
#include "kernels/spans.def"
#undef SPAN
    MN_SPAN_COUNT
} mn_span_id;

/* One table per storage type and target. MN_STEP is forward with T = 1 over unpacked input, the
 * final state written over the initial one (or, for caches, with more keys than queries); its run
 * is NULL where forward serves. */
typedef struct mn_kernel_table {
    mn_kernel kernel[MN_KERNEL_COUNT][MN_PASS_COUNT];
} mn_kernel_table;

const char *mn_kernel_name(mn_kernel_id id);
const char *mn_pass_name(mn_pass pass);

#endif
