/* comm.c - collectives as lists of transfers, and sums in the order of a binary tree. */
#include "ranks/comm.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "ranks/comm_internal.h"
#include "ranks/tree.h"

static const char *const names[] = {
#define TRANSPORT(id, name, about) [MN_TRANSPORT_##id] = name,
#include "ranks/transports.def"
#undef TRANSPORT
};

const char *mn_transport_name(mn_transport_id id) {
    return names[id];
}

bool mn_transport_find(mn_transport_id *out, const char *name) {
    for (int i = 0; i < MN_TRANSPORT_COUNT; i++) {
        if (strcmp(names[i], name) != 0) continue;
        *out = (mn_transport_id)i;
        return true;
    }
    return false;
}

/* ---- create ---------------------------------------------------------------------------------- */

mn_status mn_comm_create(mn_comm **out, const mn_comm_options *how) {
    *out = NULL;
    if (how->world < 1 || how->world > MN_RANKS_MOST || how->rank < 0 || how->rank >= how->world) {
        return mn_fail(MN_ERR_ARGUMENT, "rank %d of %d: ranks count from 0, and there are 1 to %d "
                       "of them", how->rank, how->world, MN_RANKS_MOST);
    }
    mn_comm *comm = calloc(1, sizeof *comm);
    if (!comm) return mn_fail(MN_ERR_MEMORY, "no memory for a communicator");
    comm->id = how->transport;
    comm->rank = how->rank;
    comm->world = how->world;
    comm->local_rank = how->local_rank;
    const mn_status st = how->transport == MN_TRANSPORT_MPI
                             ? mn_transport_open_mpi(&comm->self, &comm->transport, how)
                             : mn_transport_open_tcp(&comm->self, &comm->transport, how);
    if (st != MN_OK) {
        free(comm);
        return st;
    }
    *out = comm;
    return MN_OK;
}

mn_status mn_comm_part(mn_comm **out, mn_comm *comm, int first, int n) {
    *out = NULL;
    if (first < 0 || n < 1 || first + n > comm->world || comm->rank < first ||
        comm->rank >= first + n) {
        return mn_fail(MN_ERR_ARGUMENT, "ranks %d to %d are no part that rank %d of %d belongs to",
                       first, first + n - 1, comm->rank, comm->world);
    }
    mn_comm *part = calloc(1, sizeof *part);
    if (!part) return mn_fail(MN_ERR_MEMORY, "no memory for a communicator");
    part->whole = comm;
    part->id = comm->id;
    part->first = first;
    part->rank = comm->rank - first;
    part->world = n;
    part->local_rank = comm->local_rank;
    *out = part;
    return MN_OK;
}

void mn_comm_destroy(mn_comm *comm) {
    if (!comm) return;
    if (!comm->whole) {
        if (!comm->failed) mn_comm_barrier(comm);
        if (comm->failed) comm->transport->abort(comm->self, mn_last_error());
        comm->transport->close(comm->self);
    }
    free(comm->space);
    free(comm);
}

int mn_comm_rank(const mn_comm *comm) {
    return comm ? comm->rank : 0;
}

int mn_comm_world(const mn_comm *comm) {
    return comm ? comm->world : 1;
}

int mn_comm_local_rank(const mn_comm *comm) {
    return comm ? comm->local_rank : 0;
}

mn_transport_id mn_comm_transport(const mn_comm *comm) {
    return comm->id;
}

mn_comm_meter mn_comm_measured(const mn_comm *comm) {
    return comm ? comm->meter : (mn_comm_meter){ 0 };
}

/* ---- messages -------------------------------------------------------------------------------- */

/* Messages of this rank to itself: the i-th one sent is the i-th one received. */
static mn_status copy_own(const mn_comm *comm, const mn_transfer *t, int n) {
    int from = 0;
    for (int i = 0; i < n; i++) {
        if (t[i].peer != comm->rank || t[i].send || t[i].bytes == 0) continue;
        while (from < n && !(t[from].peer == comm->rank && t[from].send && t[from].bytes > 0)) {
            from++;
        }
        if (from == n || t[from].bytes != t[i].bytes) {
            return mn_fail(MN_ERR_INTERNAL, "a message of rank %d to itself has no other end",
                           comm->rank);
        }
        memmove(t[i].data, t[from++].data, t[i].bytes);
    }
    return MN_OK;
}

/* Of a part: the same transfers in ranks of the whole. */
static mn_status exchange_in_whole(mn_comm *comm, const mn_transfer *t, int n) {
    mn_transfer *moved = malloc((size_t)n * sizeof *moved + 1);
    if (!moved) return mn_fail(MN_ERR_MEMORY, "no memory for %d messages", n);
    for (int i = 0; i < n; i++) {
        moved[i] = t[i];
        moved[i].peer += comm->first;
    }
    const mn_status st = mn_comm_exchange(comm->whole, moved, n);
    free(moved);
    return st;
}

mn_status mn_comm_exchange(mn_comm *comm, const mn_transfer *t, int n) {
    if (comm->failed) return mn_fail(MN_ERR_IO, "%s", comm->why);
    const double started = mn_seconds();
    mn_status st = comm->whole ? MN_OK : copy_own(comm, t, n);
    bool others = false;
    for (int i = 0; i < n; i++) {
        if (t[i].bytes == 0 || (t[i].peer == comm->rank && !comm->whole)) continue;
        others = true;
        if (t[i].send) comm->meter.sent += t[i].bytes;
        else comm->meter.received += t[i].bytes;
    }
    if (st == MN_OK && comm->whole) st = exchange_in_whole(comm, t, n);
    else if (st == MN_OK && others) st = comm->transport->exchange(comm->self, t, n);
    comm->failed = st != MN_OK;
    if (comm->failed) snprintf(comm->why, sizeof comm->why, "%s", mn_last_error());
    comm->meter.exchanges++;
    comm->meter.seconds += mn_seconds() - started;
    return st;
}

mn_status mn_comm_send(mn_comm *comm, int to, const void *data, size_t bytes) {
    const mn_transfer t = { to, true, (void *)data, bytes };
    return mn_comm_exchange(comm, &t, 1);
}

mn_status mn_comm_receive(mn_comm *comm, int from, void *data, size_t bytes) {
    const mn_transfer t = { from, false, data, bytes };
    return mn_comm_exchange(comm, &t, 1);
}

/* `bytes` that last until the next reduction, or NULL. */
static void *space_of(mn_comm *comm, size_t bytes) {
    if (bytes <= comm->space_bytes) return comm->space;
    void *space = realloc(comm->space, bytes);
    if (!space) {
        mn_fail(MN_ERR_MEMORY, "no memory for %zu bytes between ranks", bytes);
        return NULL;
    }
    comm->space = space;
    comm->space_bytes = bytes;
    return space;
}

/* ---- collectives ----------------------------------------------------------------------------- */

mn_status mn_comm_gather_parts(mn_comm *comm, void *all, const size_t *starts) {
    const int n = comm->world, me = comm->rank;
    mn_transfer *t = malloc(2 * (size_t)n * sizeof *t);
    if (!t) return mn_fail(MN_ERR_MEMORY, "no memory for %d messages", 2 * n);
    int used = 0;
    /* each rank begins with its right neighbour, so that not all go to the same one at once */
    for (int step = 1; step < n; step++) {
        const int to = (me + step) % n, from = (me + n - step) % n;
        t[used++] = (mn_transfer){ to, true, (char *)all + starts[me],
                                   starts[me + 1] - starts[me] };
        t[used++] = (mn_transfer){ from, false, (char *)all + starts[from],
                                   starts[from + 1] - starts[from] };
    }
    const mn_status st = mn_comm_exchange(comm, t, used);
    free(t);
    return st;
}

mn_status mn_comm_all_gather(mn_comm *comm, void *all, const void *own, size_t bytes) {
    size_t *starts = malloc(((size_t)comm->world + 1) * sizeof *starts);
    if (!starts) return mn_fail(MN_ERR_MEMORY, "no memory for %d messages", comm->world);
    for (int r = 0; r <= comm->world; r++) starts[r] = (size_t)r * bytes;
    char *mine = (char *)all + starts[comm->rank];
    if (mine != own && bytes > 0) memmove(mine, own, bytes);
    const mn_status st = mn_comm_gather_parts(comm, all, starts);
    free(starts);
    return st;
}

mn_status mn_comm_barrier(mn_comm *comm) {
    unsigned char *all = calloc((size_t)comm->world, 1);
    if (!all) return mn_fail(MN_ERR_MEMORY, "no memory for a barrier");
    const mn_status st = mn_comm_all_gather(comm, all, &all[comm->rank], 1);
    free(all);
    return st;
}

/* Down a binomial tree: who has the data gives it to the rank half of what is left further on. */
mn_status mn_comm_broadcast(mn_comm *comm, int root, void *data, size_t bytes) {
    const int n = comm->world, at = (comm->rank + n - root) % n;
    int span = 1;
    while (span < n) span *= 2;
    mn_status st = MN_OK;
    for (int half = span / 2; st == MN_OK && half >= 1; half /= 2) {
        if (at % (2 * half) == half) {
            st = mn_comm_receive(comm, (at - half + root) % n, data, bytes);
        } else if (at % (2 * half) == 0 && at + half < n) {
            st = mn_comm_send(comm, (at + half + root) % n, data, bytes);
        }
    }
    return st;
}

mn_status mn_comm_reduce_scatter(mn_comm *comm, float *own, const float *data,
                                 const int64_t *starts) {
    const int n = comm->world, me = comm->rank;
    const int64_t count = starts[me + 1] - starts[me];
    float *parts = space_of(comm, (size_t)n * (size_t)count * sizeof *parts + 1);
    mn_transfer *t = malloc(2 * (size_t)n * sizeof *t);
    mn_status st = parts && t ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a sum over ranks");
    for (int step = 0; st == MN_OK && step < n; step++) {
        const int to = (me + step) % n, from = (me + n - step) % n;
        const size_t bytes = (size_t)(starts[to + 1] - starts[to]) * sizeof *data;
        t[2 * step] = (mn_transfer){ to, true, (void *)(data + starts[to]), bytes };
        t[2 * step + 1] = (mn_transfer){ from, false, parts + from * count,
                                         (size_t)count * sizeof *parts };
    }
    if (st == MN_OK) st = mn_comm_exchange(comm, t, 2 * n);
    free(t);
    if (st != MN_OK || count == 0) return st;
    mn_tree_sum_rows(parts, n, count);
    memcpy(own, parts, (size_t)count * sizeof *own);
    return MN_OK;
}

mn_status mn_comm_all_reduce(mn_comm *comm, float *data, int64_t n) {
    const int world = comm->world;
    int64_t *starts = malloc(((size_t)world + 1) * sizeof *starts);
    size_t *bytes = malloc(((size_t)world + 1) * sizeof *bytes);
    mn_status st = starts && bytes ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a sum");
    for (int r = 0; st == MN_OK && r <= world; r++) {
        starts[r] = n * r / world;
        bytes[r] = (size_t)starts[r] * sizeof *data;
    }
    if (st == MN_OK) st = mn_comm_reduce_scatter(comm, data + starts[comm->rank], data, starts);
    if (st == MN_OK) st = mn_comm_gather_parts(comm, data, bytes);
    free(starts);
    free(bytes);
    return st;
}

/* Values are small, so that one gather and a product on each rank beat log n rounds of messages. */
mn_status mn_comm_exclusive_scan(mn_comm *comm, void *own, size_t bytes, mn_combine_fn combine,
                                 void *context) {
    const size_t n = (size_t)comm->world;
    char *all = space_of(comm, (n + 2) * bytes + 1);
    if (!all) return MN_ERR_MEMORY;
    const mn_status st = mn_comm_all_gather(comm, all, own, bytes);
    if (st != MN_OK || comm->rank == 0) return st;
    char *sum = all, *next = all + n * bytes;
    for (int r = 1; r < comm->rank; r++) {
        combine(context, next, sum, all + (size_t)r * bytes);
        sum = next;
        next = sum == all + n * bytes ? all + (n + 1) * bytes : all + n * bytes;
    }
    memcpy(own, sum, bytes);
    return MN_OK;
}

/* ---- agreement ------------------------------------------------------------------------------- */

typedef struct report {
    int32_t status;
    char why[508];
} report;

mn_status mn_comm_agree(mn_comm *comm, mn_status mine) {
    if (!comm || comm->world == 1 || (comm->failed && mine != MN_OK)) return mine;
    report *all = calloc((size_t)comm->world, sizeof *all);
    if (!all) return mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", comm->world);
    report own = { .status = (int32_t)mine };
    if (mine != MN_OK) snprintf(own.why, sizeof own.why, "%s", mn_last_error());
    mn_status st = mn_comm_all_gather(comm, all, &own, sizeof own);
    for (int r = 0; st == MN_OK && r < comm->world; r++) {
        if (all[r].status == MN_OK) continue;
        all[r].why[sizeof all[r].why - 1] = '\0';
        st = mn_fail((mn_status)all[r].status, "rank %d: %s", r, all[r].why);
    }
    free(all);
    return st;
}

mn_status mn_comm_same(mn_comm *comm, const char *what, uint64_t value) {
    if (!comm || comm->world == 1) return MN_OK;
    uint64_t first = value;
    mn_status st = mn_comm_broadcast(comm, 0, &first, sizeof first);
    if (st != MN_OK) return st;
    if (first != value) {
        st = mn_fail(MN_ERR_ARGUMENT, "the %s differs from that of rank 0; start all ranks with "
                     "the same command on the same data", what);
    }
    return mn_comm_agree(comm, st);
}

mn_status mn_comm_check(mn_comm *comm) {
    if (!comm) return MN_OK;
    while (comm->whole) comm = comm->whole;
    if (comm->failed) return mn_fail(MN_ERR_IO, "%s", comm->why);
    const mn_status st = comm->transport->check ? comm->transport->check(comm->self) : MN_OK;
    comm->failed = st != MN_OK;
    if (comm->failed) snprintf(comm->why, sizeof comm->why, "%s", mn_last_error());
    return st;
}

bool mn_comm_failed(const mn_comm *comm) {
    while (comm && comm->whole) comm = comm->whole;
    return comm && comm->failed;
}

void mn_comm_abort(mn_comm *comm, const char *why) {
    if (!comm || comm->failed) return;
    while (comm->whole) comm = comm->whole;
    comm->failed = true;
    snprintf(comm->why, sizeof comm->why, "%s", why);
    comm->transport->abort(comm->self, why);
}
