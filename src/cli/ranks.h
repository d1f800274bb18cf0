/* ranks.h - a verb on several ranks: started here or by a launcher, and ended together. */
#ifndef MN_CLI_RANKS_H
#define MN_CLI_RANKS_H

#include <stdbool.h>

#include "ranks/comm.h"

typedef struct mn_cli_ranks {
    mn_comm *comm;             // NULL: one rank
    int rank, world, local_world;
    bool alone;                // one rank that was asked for takes the ways of several
    char device[32];           // this rank's, see mn_cli_ranks_device
    const char *verb;
} mn_cli_ranks;

/* With `ranks` > 1 starts that many here, unless a launcher has done so. *ended: this process is
 * the one that started them, all have ended, and *status is its exit status. Call before any thread
 * is made. Fails with a sentence. */
mn_status mn_cli_ranks_start(mn_cli_ranks *out, const char *verb, int ranks, const char *transport,
                             bool *ended, int *status);

/* All ranks meet. */
mn_status mn_cli_ranks_meet(mn_cli_ranks *ranks, const char *transport);

/* Which device this rank computes on where `asked` was given: of several ranks each takes the GPU
 * of its number on this machine. With one rank, or on the CPU, it is what was asked for. */
mn_status mn_cli_ranks_device(mn_cli_ranks *ranks, const char **device, const char *asked);

/* Threads of each rank where none are asked for: the cores of this machine shared out. */
int mn_cli_ranks_threads(const mn_cli_ranks *ranks, int asked);

/* Prints the last failure, and tells the others. */
void mn_cli_ranks_fail(mn_cli_ranks *ranks);

#endif
