/* ranks.c - the ranks of a verb. */
#include "cli/ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "ranks/launch.h"
#include "runtime/device.h"

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
    out->alone = how.world == 1 && ranks == 1;
    return MN_OK;
}

mn_status mn_cli_ranks_meet(mn_cli_ranks *ranks, const char *transport) {
    mn_comm_options how;
    if (ranks->world == 1 && !ranks->alone) return MN_OK;
    const mn_status st = mn_launch_read(&how, transport);
    how.log = log_line;
    return st == MN_OK ? mn_comm_create(&ranks->comm, &how) : st;
}

/* A launcher may have shown each rank a GPU of its own, which then is the only one. */
mn_status mn_cli_ranks_device(mn_cli_ranks *ranks, const char **device, const char *asked) {
    const int local = mn_comm_local_rank(ranks->comm);
    int count = 0;
    *device = asked;
    if (ranks->world == 1 || !asked || strncmp(asked, "cuda", 4) != 0) return MN_OK;
    if (strcmp(asked, "cuda") != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "--device %s is one GPU, and every rank needs one of its "
                       "own: --device cuda gives rank 0 of a machine its first, rank 1 its second",
                       asked);
    }
    const mn_status st = mn_device_count(&count);
    if (st != MN_OK) return st;
    const bool own = count == 1 && getenv("CUDA_VISIBLE_DEVICES") && ranks->local_world != count;
    if (local >= count && !own) {
        return mn_fail(MN_ERR_ARGUMENT, "rank %d is number %d on its machine, counted from 0, "
                       "which has %d GPU%s: start at most %d rank%s there", ranks->rank, local,
                       count, count == 1 ? "" : "s", count, count == 1 ? "" : "s");
    }
    snprintf(ranks->device, sizeof ranks->device, "cuda:%d", own ? 0 : local);
    *device = ranks->device;
    return MN_OK;
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
