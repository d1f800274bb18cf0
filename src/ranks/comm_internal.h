/* comm_internal.h - the inside of a communicator, shared by comm.c and the transports. */
#ifndef MN_RANKS_COMM_INTERNAL_H
#define MN_RANKS_COMM_INTERNAL_H

#include "ranks/comm.h"

/* What a transport does. `self` is its own; transfers of this rank to itself never reach it. */
typedef struct mn_transport {
    mn_status (*exchange)(void *self, const mn_transfer *transfers, int n);
    void (*abort)(void *self, const char *why);
    void (*close)(void *self);
    mn_status (*check)(void *self);    // NULL: the launcher ends all ranks itself
} mn_transport;

struct mn_comm {
    const mn_transport *transport;
    void *self;
    mn_transport_id id;
    int rank, world, local_rank;
    mn_comm *whole;            // of a part: whose messages these are
    int first;                 // of a part: the rank of its rank 0
    bool failed;
    char why[512];             // the sentence of the failure, which later calls repeat
    mn_comm_meter meter;
    void *space;               // of reductions, grown as needed
    size_t space_bytes;
};

/* Opens a transport. Fails with a sentence, and then leaves nothing behind. MPI tells rank and
 * world itself: they are checked against how's where those are given. */
mn_status mn_transport_open_tcp(void **self, const mn_transport **transport,
                                const mn_comm_options *how);
mn_status mn_transport_open_mpi(void **self, const mn_transport **transport,
                                const mn_comm_options *how);

#endif
