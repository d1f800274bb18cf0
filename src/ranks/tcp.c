/* tcp.c - messages over sockets, all transfers of a call at once.
 *
 * Each peer has its transfers in two rows, those sent and those received, which go on side by side.
 * A message is a head of 16 bytes and its data; one of another length than the receiver expects is
 * a failure, as is silence of all peers for `limit` seconds. */
#include "ranks/tcp.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "ranks/comm_internal.h"

/* One direction of one peer in an exchange. */
typedef struct row {
    const mn_transfer *all;
    int n, next, peer;         // index of the transfer under way
    bool sends;
    size_t done;               // bytes of it, head first
    mn_tcp_head head;
} row;

static mn_status gone(const mn_tcp *tcp, int peer, const char *doing, int error) {
    const char *why = error == ETIMEDOUT ? "no answer from its machine"
                      : error           ? strerror(error)
                                        : "it closed the connection";
    return mn_fail(MN_ERR_IO, "rank %d of %d is gone (%s: %s)", peer, tcp->world, doing, why);
}

/* ---- one direction --------------------------------------------------------------------------- */

/* Goes to the next transfer of the row; false when there is none. */
static bool advance(row *r) {
    for (; r->next < r->n; r->next++) {
        const mn_transfer *t = &r->all[r->next];
        if (t->peer == r->peer && t->send == r->sends && t->bytes > 0) break;
    }
    if (r->next == r->n) return false;
    if (r->sends) r->head = (mn_tcp_head){ MN_TCP_MAGIC, MN_TCP_DATA, r->all[r->next].bytes };
    return true;
}

static bool ended(row *r) {
    if (r->done < sizeof r->head + r->all[r->next].bytes) return false;
    r->next++;
    r->done = 0;
    return true;
}

static mn_status send_some(mn_tcp *tcp, row *r, bool *moved) {
    mn_tcp_peer *peer = &tcp->peers[r->peer];
    while (advance(r)) {
        const mn_transfer *t = &r->all[r->next];
        struct iovec parts[2];
        int n = 0;
        const size_t head = sizeof r->head, data = r->done > head ? r->done - head : 0;
        if (r->done < head) parts[n++] = (struct iovec){ (char *)&r->head + r->done,
                                                         head - r->done };
        parts[n++] = (struct iovec){ (char *)t->data + data, t->bytes - data };
        const struct msghdr message = { .msg_iov = parts, .msg_iovlen = (size_t)n };
        const ssize_t sent = sendmsg(peer->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return MN_OK;
        if (sent < 0) return gone(tcp, r->peer, "sending", errno);
        *moved = true;
        r->done += (size_t)sent;
        peer->between = !ended(r);
    }
    return MN_OK;
}

/* The sentence of a rank that gives up. */
static mn_status take_abort(mn_tcp *tcp, const row *r) {
    char why[MN_TCP_WHY] = "";
    const size_t n = r->head.bytes < sizeof why - 1 ? (size_t)r->head.bytes : sizeof why - 1;
    const ssize_t got = recv(tcp->peers[r->peer].fd, why, n, MSG_WAITALL);
    why[got > 0 ? got : 0] = '\0';
    return mn_fail(MN_ERR_IO, "rank %d gave up: %s", r->peer, why);
}

static mn_status check_head(mn_tcp *tcp, const row *r) {
    const mn_transfer *t = &r->all[r->next];
    if (r->head.magic != MN_TCP_MAGIC) {
        return mn_fail(MN_ERR_IO, "rank %d sent what is no message of mneme", r->peer);
    }
    if (r->head.kind == MN_TCP_ABORT) return take_abort(tcp, r);
    if (r->head.bytes == t->bytes) return MN_OK;
    return mn_fail(MN_ERR_INTERNAL, "rank %d sent %llu bytes where %zu were expected; do all ranks "
                   "run the same command?", r->peer, (unsigned long long)r->head.bytes, t->bytes);
}

static mn_status receive_some(mn_tcp *tcp, row *r, bool *moved) {
    while (advance(r)) {
        const mn_transfer *t = &r->all[r->next];
        const size_t head = sizeof r->head, data = r->done > head ? r->done - head : 0;
        char *to = r->done < head ? (char *)&r->head + r->done : (char *)t->data + data;
        const size_t most = r->done < head ? head - r->done : t->bytes - data;
        const ssize_t got = recv(tcp->peers[r->peer].fd, to, most, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return MN_OK;
        if (got <= 0) return gone(tcp, r->peer, "receiving", got < 0 ? errno : 0);
        *moved = true;
        r->done += (size_t)got;
        if (r->done == head) {
            const mn_status st = check_head(tcp, r);
            if (st != MN_OK) return st;
        }
        ended(r);
    }
    return MN_OK;
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* Rows of the peers that take part, sends and receives; their number. */
static int make_rows(row *rows, const mn_tcp *tcp, const mn_transfer *t, int n) {
    int used = 0;
    for (int i = 0; i < n; i++) {
        if (t[i].bytes == 0 || t[i].peer == tcp->rank) continue;
        bool known = false;
        for (int k = 0; k < used && !known; k++) {
            known = rows[k].peer == t[i].peer && rows[k].sends == t[i].send;
        }
        if (!known) rows[used++] = (row){ t, n, 0, t[i].peer, t[i].send, 0, { 0, 0, 0 } };
    }
    return used;
}

/* Lets each row move as far as it can without waiting; *open: rows that have not ended. */
static mn_status move_all(mn_tcp *tcp, row *rows, int n, struct pollfd *polls, int *open,
                          bool *moved) {
    *open = 0;
    for (int i = 0; i < n; i++) {
        row *r = &rows[i];
        const mn_status st = r->sends ? send_some(tcp, r, moved) : receive_some(tcp, r, moved);
        if (st != MN_OK) return st;
        if (!advance(r)) continue;
        const short what = r->sends ? POLLOUT : POLLIN;
        polls[(*open)++] = (struct pollfd){ tcp->peers[r->peer].fd, what, 0 };
    }
    return MN_OK;
}

static mn_status silence(const mn_tcp *tcp, row *rows, int n) {
    for (int i = 0; i < n; i++) {
        if (!advance(&rows[i])) continue;
        return mn_fail(MN_ERR_IO, "rank %d of %d has not %s for %.0f seconds; is it still there?",
                       rows[i].peer, tcp->world, rows[i].sends ? "read" : "answered", tcp->limit);
    }
    return MN_OK;
}

static mn_status exchange(void *self, const mn_transfer *t, int n) {
    mn_tcp *tcp = self;
    row *rows = malloc((size_t)n * sizeof *rows + 1);
    struct pollfd *polls = malloc((size_t)n * sizeof *polls + 1);
    mn_status st = rows && polls ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for %d messages", n);
    const int used = st == MN_OK ? make_rows(rows, tcp, t, n) : 0;
    double heard = mn_seconds();
    for (int open = used; st == MN_OK && open > 0;) {
        bool moved = false;
        st = move_all(tcp, rows, used, polls, &open, &moved);
        if (st != MN_OK || open == 0) break;
        const double now = mn_seconds();
        if (moved) heard = now;
        if (now - heard > tcp->limit) st = silence(tcp, rows, used);
        if (st == MN_OK) poll(polls, (nfds_t)open, 1000);
    }
    free(rows);
    free(polls);
    return st;
}

/* ---- the transport --------------------------------------------------------------------------- */

/* Looks at what each peer sent last: nothing, a message that is waited for later, its farewell, or
 * the end of the connection. */
static mn_status check_peers(void *self) {
    mn_tcp *tcp = self;
    for (int r = 0; r < tcp->world; r++) {
        row of = { .peer = r };
        if (tcp->peers[r].fd < 0) continue;
        const ssize_t got = recv(tcp->peers[r].fd, &of.head, sizeof of.head,
                                 MSG_PEEK | MSG_DONTWAIT);
        const int error = got < 0 ? errno : 0;
        if (error == EAGAIN || error == EWOULDBLOCK || error == EINTR) continue;
        if (got <= 0) return gone(tcp, r, "looking after it", error);
        if (got < (ssize_t)sizeof of.head || of.head.kind != MN_TCP_ABORT) continue;
        if (recv(tcp->peers[r].fd, &of.head, sizeof of.head, 0) > 0) return take_abort(tcp, &of);
    }
    return MN_OK;
}

static void send_abort(void *self, const char *why) {
    mn_tcp *tcp = self;
    char message[sizeof(mn_tcp_head) + MN_TCP_WHY];
    const size_t n = strlen(why) < MN_TCP_WHY ? strlen(why) : MN_TCP_WHY - 1;
    const mn_tcp_head head = { MN_TCP_MAGIC, MN_TCP_ABORT, n };
    memcpy(message, &head, sizeof head);
    memcpy(message + sizeof head, why, n);
    for (int r = 0; r < tcp->world; r++) {
        const mn_tcp_peer *peer = &tcp->peers[r];
        if (peer->fd < 0 || peer->between) continue;    // within a message it would be its data
        const ssize_t sent = send(peer->fd, message, sizeof head + n, MSG_NOSIGNAL | MSG_DONTWAIT);
        (void)sent;    // who cannot hear it sees the connection end
        shutdown(peer->fd, SHUT_WR);
    }
}

static void close_all(void *self) {
    mn_tcp *tcp = self;
    for (int r = 0; tcp->peers && r < tcp->world; r++) {
        if (tcp->peers[r].fd >= 0) close(tcp->peers[r].fd);
    }
    free(tcp->peers);
    free(tcp);
}

static const mn_transport transport_tcp = { exchange, send_abort, close_all, check_peers };

mn_status mn_transport_open_tcp(void **self, const mn_transport **transport,
                                const mn_comm_options *how) {
    mn_tcp *tcp = calloc(1, sizeof *tcp);
    if (tcp) tcp->peers = calloc((size_t)how->world, sizeof *tcp->peers);
    if (!tcp || !tcp->peers) {
        free(tcp);
        return mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", how->world);
    }
    tcp->rank = how->rank;
    tcp->world = how->world;
    tcp->limit = how->silence;
    for (int r = 0; r < how->world; r++) tcp->peers[r].fd = -1;
    const mn_status st = how->world > 1 ? mn_tcp_meet(tcp, how) : MN_OK;
    if (st != MN_OK) {
        close_all(tcp);
        return st;
    }
    *self = tcp;
    *transport = &transport_tcp;
    return MN_OK;
}
