/* comm.h - ranks: processes that work on one run, and what they say to each other.
 *
 *   mn_comm_create(&comm, &how);              all ranks meet, or a sentence says who did not come
 *   mn_comm_all_gather(comm, all, own, n);    collectives are called by all ranks in one order
 *   mn_comm_destroy(comm);
 *
 * Every collective is a list of transfers, which a transport (transports.def) carries out. Sums are
 * float32 in the order of a binary tree over ranks, so that they do not depend on who is first. A
 * communicator is used by one thread at a time; several may take turns.
 *
 * A rank that fails says so to the others (mn_comm_abort); one that is killed closes its
 * connections. Either way every other rank's next call fails with a sentence that names it. */
#ifndef MN_RANKS_COMM_H
#define MN_RANKS_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mneme.h"

enum { MN_RANKS_MOST = 4096 };

typedef enum mn_transport_id {
#define TRANSPORT(id, name, about) MN_TRANSPORT_##id,
#include "ranks/transports.def"
#undef TRANSPORT
    MN_TRANSPORT_COUNT
} mn_transport_id;

const char *mn_transport_name(mn_transport_id id);
bool mn_transport_find(mn_transport_id *out, const char *name);

/* Where the ranks meet. Texts are borrowed until mn_comm_create returns. */
typedef struct mn_comm_options {
    mn_transport_id transport;
    int rank, world;
    int local_rank, local_world;   // among the ranks of this machine; which GPU is whose
    const char *address;           // of rank 0; NULL: 127.0.0.1
    int port;
    int listener;                  // rank 0: a socket that listens there already; -1: none
    const char *token;             // who has another is refused; NULL or "": none
    double limit;                  // seconds to meet in
    double silence;                // seconds without a byte before a rank is given up
    void (*log)(const char *line); // strangers that were refused; NULL: nobody hears
} mn_comm_options;

typedef struct mn_comm mn_comm;

mn_status mn_comm_create(mn_comm **out, const mn_comm_options *how);

/* Says goodbye where no call failed, and closes. NULL accepted. */
void mn_comm_destroy(mn_comm *comm);

/* `n` neighbouring ranks from `first` on as a communicator of their own, whose messages go through
 * `comm`, which must outlive it. Called by the ranks of the part only; no message is sent. */
mn_status mn_comm_part(mn_comm **out, mn_comm *comm, int first, int n);

int mn_comm_rank(const mn_comm *comm);      // NULL: 0
int mn_comm_world(const mn_comm *comm);     // NULL: 1
int mn_comm_local_rank(const mn_comm *comm);
mn_transport_id mn_comm_transport(const mn_comm *comm);

/* ---- messages -------------------------------------------------------------------------------- */

/* One message to or from a rank, which may be this one. */
typedef struct mn_transfer {
    int peer;
    bool send;
    void *data;            // read where it is sent
    size_t bytes;          // 0: no message
} mn_transfer;

/* Carries out all of them at once; those between two ranks match in the order of the lists. */
mn_status mn_comm_exchange(mn_comm *comm, const mn_transfer *transfers, int n);

mn_status mn_comm_send(mn_comm *comm, int to, const void *data, size_t bytes);
mn_status mn_comm_receive(mn_comm *comm, int from, void *data, size_t bytes);

/* ---- collectives ----------------------------------------------------------------------------- */

mn_status mn_comm_barrier(mn_comm *comm);
mn_status mn_comm_broadcast(mn_comm *comm, int root, void *data, size_t bytes);

/* all[r * bytes] = what rank r has in `own`, which may lie in its place already. */
mn_status mn_comm_all_gather(mn_comm *comm, void *all, const void *own, size_t bytes);

/* The same for parts of different sizes, in place: rank r has bytes [starts[r], starts[r+1]). */
mn_status mn_comm_gather_parts(mn_comm *comm, void *all, const size_t *starts);

/* own = the sum over ranks of elements [starts[rank], starts[rank+1]) of their `data`. */
mn_status mn_comm_reduce_scatter(mn_comm *comm, float *own, const float *data,
                                 const int64_t *starts);

/* Every rank's data becomes the sum of all ranks'. */
mn_status mn_comm_all_reduce(mn_comm *comm, float *data, int64_t n);

/* own = what combine makes of the values of the ranks before this one, first to last; `own` is left
 * alone on rank 0. combine(out, a, b) puts a b into out, a being of the earlier ranks. */
typedef void (*mn_combine_fn)(void *context, void *out, const void *a, const void *b);
mn_status mn_comm_exclusive_scan(mn_comm *comm, void *own, size_t bytes, mn_combine_fn combine,
                                 void *context);

/* ---- agreement ------------------------------------------------------------------------------- */

/* Every rank tells how it fared; all return the first failure in the order of ranks, with its
 * sentence: "rank 2: ...". */
mn_status mn_comm_agree(mn_comm *comm, mn_status mine);

/* Fails on all ranks where `value` (of rank 0) is not the same everywhere. */
mn_status mn_comm_same(mn_comm *comm, const char *what, uint64_t value);

/* Whether the others are there still, without a message and without waiting: fails with the
 * sentence of one that gave up, or with the name of one that is gone. NULL: there are no others. */
mn_status mn_comm_check(mn_comm *comm);
bool mn_comm_failed(const mn_comm *comm);    // some call did, and all later ones will

/* Tells all ranks that this one gives up; they fail with its sentence. Sends what it can without
 * waiting, and nothing after. */
void mn_comm_abort(mn_comm *comm, const char *why);

/* ---- measures -------------------------------------------------------------------------------- */

typedef struct mn_comm_meter {
    double seconds;            // inside exchanges
    uint64_t sent, received;   // bytes
    uint64_t exchanges;
} mn_comm_meter;

mn_comm_meter mn_comm_measured(const mn_comm *comm);    // since it was created; NULL: nothing

#endif
