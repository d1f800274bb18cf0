/* barrier.h - barriers of blocks and clusters, and mbarriers. */
#ifndef PTX_BARRIER_H
#define PTX_BARRIER_H

#include <string>

#include "run/state.h"

namespace ptx {

/* A warp has ended: barriers that expect all threads expect fewer. */
void leave_barriers(block &b);

/* Whether what the warp waits for has happened. */
bool may_go_on(const warp &w);

/* What the warp waits for, in words; empty if for nothing. */
std::string waiting_for(const warp &w);

/* Arrivals, bytes that are expected and bytes that have come, at an mbarrier of shared memory. */
void change_mbarrier(u8 *at, s64 arrivals, s64 expected_bytes, s64 completed_bytes);

}    // namespace ptx
#endif
