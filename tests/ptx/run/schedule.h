/* schedule.h - runs warps in turns until all have ended. */
#ifndef PTX_SCHEDULE_H
#define PTX_SCHEDULE_H

#include <string>

#include "run/state.h"

namespace ptx {

/* Instructions until the warp waits, ends, yields or has had so many. */
void run_warp(warp &w, int budget);

std::unique_ptr<cluster> open_cluster(ptx_kernel &k, const ptx_launch &launch, u64 index);
/* Does what its blocks left in flight. */
void close_cluster(cluster &c);

enum class outcome { PROGRESS, BLOCKED, ENDED };
/* A turn for each warp that can go on. */
outcome take_turns(cluster &c);

/* Where each warp stands that has not ended, and what it waits for: a line each. */
std::string standing(const cluster &c);
/* Block, warp, line and instruction of what runs or ran last; empty before the first. */
std::string last_executed();

}    // namespace ptx
#endif
