/* ranks.c - the ranks of a verb. */
#include "cli/ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/status.h"
#include "ranks/launch.h"

static void log_line(const char *line) {
    fprintf(stderr, "mneme: %s\n", line);
}

mn_status mn_cli_ranks_start(mn_cli_ranks *out, const char *verb, int ranks, const char *transport,
                             bool *ended, int *status) {
    mn_comm_options how;
    *ended = false;
    *out = (mn_cli_ranks){ .world = 1, .local_world = 1, .verb = verb };
    mn_status st = mn_launch_read(&how, transport);
    if (st == MN_OK && how.world > 1 && ranks > 0 && ranks != how.world) {
        st = mn_fail(MN_ERR_ARGUMENT, "--ranks %d, and the launcher has started %d; leave it out",
                     ranks, how.world);
    }
    if (st == MN_OK && how.world == 1 && ranks > 1) {
        st = mn_launch_local(ranks, ended, status);
        if (st == MN_OK && !*ended) st = mn_launch_read(&how, transport);
    }
    if (st != MN_OK || *ended) return st;
    out->rank = how.rank;
    out->world = how.world;
    out->local_world = how.local_world;
    return MN_OK;
}

mn_status mn_cli_ranks_meet(mn_cli_ranks *ranks, const char *transport) {
    mn_comm_options how;
    if (ranks->world == 1) return MN_OK;
    const mn_status st = mn_launch_read(&how, transport);
    how.log = log_line;
    return st == MN_OK ? mn_comm_create(&ranks->comm, &how) : st;
}

int mn_cli_ranks_threads(const mn_cli_ranks *ranks, int asked) {
    if (asked > 0 || ranks->local_world <= 1) return asked;
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores > ranks->local_world ? (int)(cores / ranks->local_world) : 1;
}

void mn_cli_ranks_fail(mn_cli_ranks *ranks) {
    if (ranks->world == 1) {
        fprintf(stderr, "mneme %s: %s\n", ranks->verb, mn_last_error());
        return;
    }
    fprintf(stderr, "mneme %s: rank %d stops: %s\n", ranks->verb, ranks->rank, mn_last_error());
    mn_comm_abort(ranks->comm, mn_last_error());
}
