/* ranks.h - ranks of a test: processes that meet over the loopback interface. */
#ifndef TESTS_SUPPORT_RANKS_H
#define TESTS_SUPPORT_RANKS_H

#include "ranks/comm.h"

/* What one rank does: its exit status, 0 for well. */
typedef int (*rank_fn)(mn_comm *comm, void *job);

/* Runs fn in `world` processes, at most 16; codes[r] is what rank r exited with, -1 where a signal
 * ended it, 90 where the ranks did not meet. */
void run_ranks(rank_fn fn, void *job, int world, int *codes);

#endif
