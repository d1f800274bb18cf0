/* tcp.h - sockets between ranks: how they meet (tcp_meet.c) and how they talk (tcp.c). */
#ifndef MN_RANKS_TCP_H
#define MN_RANKS_TCP_H

#include "ranks/comm.h"

enum { MN_TCP_WHY = 480 };

/* What stands before every message. */
typedef struct mn_tcp_head {
    uint32_t magic, kind;
    uint64_t bytes;
} mn_tcp_head;

enum { MN_TCP_MAGIC = 0x4b524e4d, MN_TCP_DATA = 0, MN_TCP_ABORT = 1 };

typedef struct mn_tcp_peer {
    int fd;                    // -1: this rank itself
    bool between;              // part of a message has been sent
} mn_tcp_peer;

typedef struct mn_tcp {
    int rank, world;
    double limit;              // seconds of silence
    mn_tcp_peer *peers;        // (world)
} mn_tcp;

/* Connects every rank with every other: rank 0 listens where `how` says, takes who has the token,
 * tells all where the others listen, and each connects to those before it. Strangers are refused
 * and logged. On failure the peers made so far are left for the caller to close. */
mn_status mn_tcp_meet(mn_tcp *tcp, const mn_comm_options *how);

/* A socket that listens at address:port (0: any), and which port that is. */
mn_status mn_tcp_listen(int *fd, int *port, const char *address, int wanted);

/* No delay of small messages; a peer whose machine or network is gone is noticed in seconds. */
void mn_tcp_tune(int fd);

#endif
