/* nccl.c - the library, its communicator, and waiting for it with an eye on the other ranks.
 *
 * The communicator is one that does not block: a call that sets up links returns at once and is
 * asked until it is done, so that a rank that dies meanwhile is noticed by the host's sockets. */
#include "ranks/nccl.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "ranks/nccl_abi.h"

static const double look_after = 0.02, meet_limit = 120.0, end_limit = 5.0;    // seconds

struct mn_nccl {
    mn_comm *comm;
    void *handle;              // NCCL's; NULL: aborted
    int rank, world;
};

static mn_nccl_calls calls;
static void *library;          // stays open: its threads may outlive a communicator
static int found_version;

/* ---- the library ----------------------------------------------------------------------------- */

static bool find_calls(void) {
    const struct {
        const char *name;
        void *to;
    } wanted[] = {
        { "ncclGetVersion", &calls.version },
        { "ncclGetUniqueId", &calls.unique_id },
        { "ncclCommInitRankConfig", &calls.init },
        { "ncclCommGetAsyncError", &calls.async_error },
        { "ncclGroupStart", &calls.group_start },
        { "ncclGroupEnd", &calls.group_end },
        { "ncclSend", &calls.send },
        { "ncclRecv", &calls.receive },
        { "ncclCommFinalize", &calls.finalize },
        { "ncclCommDestroy", &calls.destroy },
        { "ncclCommAbort", &calls.abort },
        { "ncclGetErrorString", &calls.error_text },
        { "ncclGetLastError", &calls.last_error },
    };
    for (size_t i = 0; i < MN_COUNTOF(wanted); i++) {
        void *found = dlsym(library, wanted[i].name);
        if (!found) return false;
        memcpy(wanted[i].to, &found, sizeof found);    // a function's address, as POSIX has it
    }
    return true;
}

static mn_status open_library(void) {
    const char *named = getenv("MNEME_NCCL");
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    if (named && *named) {
        library = dlopen(named, RTLD_NOW | RTLD_LOCAL);
        if (library) return MN_OK;
        return mn_fail(MN_ERR_UNSUPPORTED, "MNEME_NCCL: %s does not open: %s", named, dlerror());
    }
    library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library) return MN_OK;
    return mn_fail(MN_ERR_UNSUPPORTED, "libnccl.so.2 was not found, through which GPUs talk to "
                   "each other: install NCCL (package libnccl2), or give its path as MNEME_NCCL; "
                   "on one GPU --ranks is not needed");
}

mn_status mn_nccl_find(int *version) {
    *version = found_version;
    if (found_version > 0) return MN_OK;
    mn_status st = library ? MN_OK : open_library();
    if (st != MN_OK) return st;
    if (!find_calls() || calls.version(version) != MN_NCCL_SUCCESS || *version < MN_NCCL_LEAST) {
        return mn_fail(MN_ERR_UNSUPPORTED, "libnccl.so.2 is older than NCCL 2.18, or none: install "
                       "a newer one, or give its path as MNEME_NCCL");
    }
    found_version = *version;
    return MN_OK;
}

/* ---- waiting for it -------------------------------------------------------------------------- */

static mn_status failure(const mn_nccl *n, int result, const char *doing) {
    const char *more = n->handle ? calls.last_error(n->handle) : NULL;
    return mn_fail(MN_ERR_IO, "NCCL failed %s: %s%s%s; NCCL_DEBUG=WARN tells more", doing,
                   calls.error_text(result), more && *more ? ": " : "", more ? more : "");
}

/* A moment's rest, and every so often a look at the other ranks. */
static mn_status rest(mn_nccl *n, double *looked) {
    const struct timespec moment = { 0, 20000 };
    nanosleep(&moment, NULL);
    if (mn_seconds() - *looked < look_after) return MN_OK;
    *looked = mn_seconds();
    return mn_comm_check(n->comm);
}

/* Until what returned `result` is done, at most `limit` seconds. */
static mn_status settle(mn_nccl *n, int result, const char *doing, double limit) {
    const double started = mn_seconds();
    double looked = started;
    mn_status st = MN_OK;
    while (st == MN_OK && result == MN_NCCL_IN_PROGRESS) {
        const int asked = calls.async_error(n->handle, &result);
        if (asked != MN_NCCL_SUCCESS) return failure(n, asked, doing);
        if (result != MN_NCCL_IN_PROGRESS) break;
        st = rest(n, &looked);
        if (st == MN_OK && mn_seconds() - started > limit) {
            st = mn_fail(MN_ERR_IO, "NCCL has not finished %s within %.0f seconds; NCCL_DEBUG=INFO "
                         "tells what it waits for", doing, limit);
        }
    }
    return st == MN_OK && result != MN_NCCL_SUCCESS ? failure(n, result, doing) : st;
}

/* ---- create ---------------------------------------------------------------------------------- */

mn_status mn_nccl_create(mn_nccl **out, mn_comm *comm, bool local) {
    int version;
    mn_nccl_id id = { { 0 } };
    mn_nccl_config config = MN_NCCL_CONFIG;
    *out = NULL;
    if (local) setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    mn_status st = mn_comm_agree(comm, mn_nccl_find(&version));
    mn_nccl *n = st == MN_OK ? calloc(1, sizeof *n) : NULL;
    if (!n) return st == MN_OK ? mn_fail(MN_ERR_MEMORY, "no memory for a communicator") : st;
    n->comm = comm;
    n->rank = mn_comm_rank(comm);
    n->world = mn_comm_world(comm);
    if (n->rank == 0) {
        const int result = calls.unique_id(&id);
        if (result != MN_NCCL_SUCCESS) st = failure(n, result, "making an id");
    }
    st = mn_comm_agree(comm, st);
    if (st == MN_OK && n->world > 1) st = mn_comm_broadcast(comm, 0, &id, sizeof id);
    if (st == MN_OK) {
        const int result = calls.init(&n->handle, n->world, id, n->rank, &config);
        if (result == MN_NCCL_SUCCESS || n->handle) {
            st = settle(n, result, "meeting the other GPUs", meet_limit);
        } else {
            st = failure(n, result, "meeting the other GPUs");
        }
    }
    /* one that fails says so at the run's end, which ends the others' waiting for it */
    if (st == MN_OK) st = mn_comm_agree(comm, st);
    if (st == MN_OK) {
        *out = n;
        return MN_OK;
    }
    mn_nccl_abort(n);
    free(n);
    return st;
}

void mn_nccl_abort(mn_nccl *n) {
    if (!n || !n->handle) return;
    calls.abort(n->handle);
    n->handle = NULL;
}

/* Where all ranks come here their ends are made together; else each makes its own. */
void mn_nccl_destroy(mn_nccl *n) {
    if (!n) return;
    if (n->handle) {
        bool well = !mn_comm_failed(n->comm);
        if (well && n->world > 1) well = mn_comm_barrier(n->comm) == MN_OK;
        if (well) {
            well = settle(n, calls.finalize(n->handle), "ending", end_limit) == MN_OK;
        }
        if (well) calls.destroy(n->handle);
        else calls.abort(n->handle);
    }
    free(n);
}

/* ---- messages -------------------------------------------------------------------------------- */

mn_status mn_nccl_exchange(mn_nccl *n, const mn_transfer *t, int count, int first, void *stream) {
    int some = 0;
    for (int i = 0; i < count; i++) some += t[i].bytes > 0;
    if (!n->handle) return mn_fail(MN_ERR_IO, "the GPUs of this run no longer talk to each other");
    if (some == 0) return MN_OK;
    int result = calls.group_start();
    for (int i = 0; i < count && result == MN_NCCL_SUCCESS; i++) {
        const int peer = first + t[i].peer;
        if (t[i].bytes == 0) continue;
        result = t[i].send ? calls.send(t[i].data, t[i].bytes, MN_NCCL_BYTES, peer, n->handle,
                                        stream)
                           : calls.receive(t[i].data, t[i].bytes, MN_NCCL_BYTES, peer, n->handle,
                                           stream);
        if (result == MN_NCCL_IN_PROGRESS) result = MN_NCCL_SUCCESS;
    }
    const int ended = calls.group_end();
    if (result != MN_NCCL_SUCCESS) return failure(n, result, "sending between GPUs");
    return settle(n, ended, "sending between GPUs", meet_limit);
}

mn_status mn_nccl_check(mn_nccl *n) {
    int result = MN_NCCL_SUCCESS;
    if (!n->handle) return mn_fail(MN_ERR_IO, "the GPUs of this run no longer talk to each other");
    const mn_status st = mn_comm_check(n->comm);
    if (st != MN_OK) return st;
    const int asked = calls.async_error(n->handle, &result);
    if (asked != MN_NCCL_SUCCESS) result = asked;
    if (result == MN_NCCL_SUCCESS || result == MN_NCCL_IN_PROGRESS) return MN_OK;
    return failure(n, result, "between the GPUs");
}

int mn_nccl_version(const mn_nccl *n) {
    (void)n;
    return found_version;
}
