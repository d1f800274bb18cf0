/* context.h - worker threads, scratch memory and kernels of one caller. */
#ifndef MN_OPS_CONTEXT_H
#define MN_OPS_CONTEXT_H

#include "kernels/dispatch.h"
#include "mneme.h"
#include "runtime/arena.h"
#include "runtime/threads.h"

struct mn_context {
    mn_threads *threads;
    mn_arena *arena;
    mn_target_id target;
    bool plans;                  // operators compute nothing and take memory from a counting arena
    mn_kernel_table f32, f64;
};

#endif
