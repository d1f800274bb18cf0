/* tcp_meet.c - how ranks find each other.
 *
 *   rank r -> rank 0   hello: token, r, world, the port where r listens
 *   rank 0 -> rank r   welcome: the addresses of all ranks, once the last has come
 *   rank r -> rank s   hello, for 0 < s < r; answered by a welcome without addresses
 *
 * Every listener is closed when its last rank has come. A connection that says no hello within
 * HELLO seconds, another token, a rank that is taken or a world of another size is refused: it gets
 * a line that says why, unless it had no token, and the log gets one, too. The token keeps out who
 * does not know it; it is sent as it is, so a network where others listen needs a tunnel. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "ranks/tcp.h"

enum { VERSION = 1, TOKEN = 128, ADDRESS = 64, HELLO = 5 };

typedef struct hello {
    uint32_t magic, version;
    int32_t rank, world, port, reserved;
    char token[TOKEN];
} hello;

typedef struct welcome {
    uint32_t magic;
    int32_t accepted;
    char why[120];
} welcome;

/* Where a rank listens for those behind it. */
typedef struct place {
    char address[ADDRESS];
    int32_t port, reserved;
} place;

/* ---- sockets --------------------------------------------------------------------------------- */

void mn_tcp_tune(int fd) {
    const int on = 1, idle = 5, every = 2, count = 4, unheard = 15000;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unheard, sizeof unheard);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
}

static mn_status resolve(struct addrinfo **found, const char *address, int port, bool listens) {
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    const struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM,
                                    .ai_flags = listens ? AI_PASSIVE : 0 };
    const int error = getaddrinfo(address, service, &hints, found);
    if (error == 0) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s: %s; MASTER_ADDR names the machine of rank 0", address,
                   gai_strerror(error));
}

static int port_of(int fd) {
    struct sockaddr_storage name;
    socklen_t size = sizeof name;
    if (getsockname(fd, (struct sockaddr *)&name, &size) != 0) return 0;
    return ntohs(name.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&name)->sin6_port
                                            : ((struct sockaddr_in *)&name)->sin_port);
}

mn_status mn_tcp_listen(int *fd, int *port, const char *address, int wanted) {
    struct addrinfo *found;
    mn_status st = resolve(&found, address, wanted, true);
    if (st != MN_OK) return st;
    const int on = 1;
    *fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*fd >= 0) setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (*fd < 0 || bind(*fd, found->ai_addr, found->ai_addrlen) != 0 || listen(*fd, 512) != 0) {
        st = mn_fail(MN_ERR_IO, "%s:%d: cannot listen: %s; MASTER_ADDR and MASTER_PORT are an "
                     "address of rank 0's machine and a free port", address, wanted,
                     strerror(errno));
        if (*fd >= 0) close(*fd);
        *fd = -1;
    } else {
        *port = port_of(*fd);
    }
    freeaddrinfo(found);
    return st;
}

static void pause_for(double seconds) {
    const struct timespec time = { (time_t)seconds,
                                   (long)((seconds - (double)(time_t)seconds) * 1e9) };
    nanosleep(&time, NULL);
}

/* One connection, or -1 with errno. */
static int connect_once(const struct addrinfo *to, double left) {
    const int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    int error = connect(fd, to->ai_addr, to->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
        struct pollfd wait = { fd, POLLOUT, 0 };
        socklen_t size = sizeof error;
        const int ms = (int)(1000.0 * (left < 5.0 ? left : 5.0));
        error = ETIMEDOUT;
        if (poll(&wait, 1, ms > 0 ? ms : 0) == 1) {
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        }
    }
    if (error == 0) {
        fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
        return fd;
    }
    close(fd);
    errno = error;
    return -1;
}

/* Tries until there is an answer or the time is up: ranks start in any order. */
static mn_status connect_to(int *fd, const char *address, int port, double until) {
    struct addrinfo *found;
    mn_status st = resolve(&found, address, port, false);
    if (st != MN_OK) return st;
    double rest = 0.02;
    for (*fd = -1; *fd < 0;) {
        int error = ECONNREFUSED;
        for (const struct addrinfo *to = found; to && *fd < 0; to = to->ai_next) {
            *fd = connect_once(to, until - mn_seconds());
            error = errno;
        }
        if (*fd >= 0) break;
        if (mn_seconds() + rest > until) {
            st = mn_fail(MN_ERR_IO, "%s:%d: no rank answers there (%s)", address, port,
                         strerror(error));
            break;
        }
        pause_for(rest);
        rest = rest < 0.5 ? 2.0 * rest : 0.5;
    }
    freeaddrinfo(found);
    return st;
}

static bool write_all(int fd, const void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = send(fd, (const char *)data + done, bytes - done, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

/* False when the other end closes, or `until` comes first. */
static bool read_all(int fd, void *data, size_t bytes, double until) {
    for (size_t done = 0; done < bytes;) {
        const double left = until - mn_seconds();
        struct pollfd wait = { fd, POLLIN, 0 };
        if (left <= 0.0) return false;
        const int ready = poll(&wait, 1, left > 1.0 ? 1000 : (int)(left * 1000.0) + 1);
        if (ready <= 0) continue;
        const ssize_t n = recv(fd, (char *)data + done, bytes - done, MSG_DONTWAIT);
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

static void name_of(char name[ADDRESS], int fd, bool other) {
    struct sockaddr_storage at;
    socklen_t size = sizeof at;
    const int got = other ? getpeername(fd, (struct sockaddr *)&at, &size)
                          : getsockname(fd, (struct sockaddr *)&at, &size);
    if (got != 0 || getnameinfo((struct sockaddr *)&at, size, name, ADDRESS, NULL, 0,
                                NI_NUMERICHOST) != 0) {
        snprintf(name, ADDRESS, "an unknown address");
    }
}

/* ---- hellos ---------------------------------------------------------------------------------- */

/* In a time that does not depend on where they differ. */
static bool same_token(const char a[TOKEN], const char b[TOKEN]) {
    unsigned char differs = 0;
    for (int i = 0; i < TOKEN; i++) differs |= (unsigned char)(a[i] ^ b[i]);
    return differs == 0;
}

static mn_status make_hello(hello *h, const mn_comm_options *how, int port) {
    *h = (hello){ MN_TCP_MAGIC, VERSION, how->rank, how->world, port, 0, "" };
    const char *token = how->token ? how->token : "";
    if (strlen(token) < TOKEN) {
        memcpy(h->token, token, strlen(token));
        return MN_OK;
    }
    return mn_fail(MN_ERR_ARGUMENT, "the ranks' token is longer than %d bytes", TOKEN - 1);
}

static void refuse(int fd, const mn_comm_options *how, const char *why, bool answer) {
    char name[ADDRESS], line[ADDRESS + 200];
    name_of(name, fd, true);
    if (answer) {
        welcome no = { .magic = MN_TCP_MAGIC };
        snprintf(no.why, sizeof no.why, "%s", why);
        write_all(fd, &no, sizeof no);
    }
    close(fd);
    snprintf(line, sizeof line, "rank %d refused a connection from %s: %s", how->rank, name, why);
    if (how->log) how->log(line);
}

/* Takes one connection of a rank in (above, world) that has the token; *fd is -1 when it was
 * somebody else, or nobody came within a second. */
static mn_status take_one(int *fd, hello *h, mn_tcp *tcp, int listener, int above,
                          const mn_comm_options *how, const hello *own) {
    struct pollfd wait = { listener, POLLIN, 0 };
    *fd = -1;
    if (poll(&wait, 1, 1000) <= 0) return MN_OK;
    const int came = accept(listener, NULL, NULL);
    if (came < 0) return MN_OK;    // it left again
    mn_tcp_tune(came);
    char why[120] = "";
    bool answer = true;
    if (!read_all(came, h, sizeof *h, mn_seconds() + HELLO) || h->magic != MN_TCP_MAGIC) {
        snprintf(why, sizeof why, "it is no rank of mneme");
        answer = false;
    } else if (h->version != VERSION) {
        snprintf(why, sizeof why, "it speaks version %u, this one %d", h->version, VERSION);
    } else if (!same_token(h->token, own->token)) {
        snprintf(why, sizeof why, "its token is wrong (MNEME_TOKEN)");
    } else if (h->world != how->world) {
        snprintf(why, sizeof why, "it is one of %d ranks, this run has %d", h->world, how->world);
    } else if (h->rank <= above || h->rank >= how->world || tcp->peers[h->rank].fd >= 0) {
        snprintf(why, sizeof why, "rank %d is here already or none of this run", h->rank);
    }
    if (why[0]) refuse(came, how, why, answer);
    else *fd = came;
    return MN_OK;
}

static mn_status missing(const mn_tcp *tcp, int above, double limit) {
    char list[200] = "";
    size_t n = 0;
    int count = 0;
    for (int r = above + 1; r < tcp->world; r++) {
        if (tcp->peers[r].fd >= 0) continue;
        count++;
        if (n < sizeof list - 16) {
            n += (size_t)snprintf(list + n, sizeof list - n, "%s%d", n ? ", " : "", r);
        }
    }
    return mn_fail(MN_ERR_IO, "%d of %d ranks did not come within %.0f seconds: %s", count,
                   tcp->world, limit, list);
}

/* Ranks behind `above`, all of them; where they listen goes into places unless it is NULL. */
static mn_status take_all(mn_tcp *tcp, int listener, int above, const mn_comm_options *how,
                          const hello *own, double until, place *places) {
    const welcome yes = { .magic = MN_TCP_MAGIC, .accepted = 1 };
    for (int left = tcp->world - 1 - above; left > 0;) {
        hello h;
        int fd;
        const mn_status st = take_one(&fd, &h, tcp, listener, above, how, own);
        if (st != MN_OK) return st;
        if (fd >= 0) {
            tcp->peers[h.rank].fd = fd;
            left--;
            if (places) {
                name_of(places[h.rank].address, fd, true);
                places[h.rank].port = h.port;
            } else if (!write_all(fd, &yes, sizeof yes)) {
                return mn_fail(MN_ERR_IO, "rank %d left while the ranks met", h.rank);
            }
        }
        if (left > 0 && mn_seconds() > until) return missing(tcp, above, how->limit);
    }
    return MN_OK;
}

/* ---- meeting --------------------------------------------------------------------------------- */

static mn_status greet(mn_tcp *tcp, int peer, const hello *h, double until) {
    welcome answer;
    const int fd = tcp->peers[peer].fd;
    mn_tcp_tune(fd);
    if (!write_all(fd, h, sizeof *h) || !read_all(fd, &answer, sizeof answer, until) ||
        answer.magic != MN_TCP_MAGIC) {
        return mn_fail(MN_ERR_IO, "rank %d gave no answer: is that rank %d of this run?", peer,
                       peer);
    }
    answer.why[sizeof answer.why - 1] = '\0';
    if (answer.accepted) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "rank %d refused this rank: %s", peer, answer.why);
}

static mn_status meet_as_first(mn_tcp *tcp, const mn_comm_options *how, double until) {
    const char *address = how->address ? how->address : "127.0.0.1";
    int listener = how->listener, port = 0;
    hello own;
    place *places = calloc((size_t)tcp->world, sizeof *places);
    mn_status st = places ? make_hello(&own, how, 0) : mn_fail(MN_ERR_MEMORY, "no memory");
    if (st == MN_OK && listener < 0) st = mn_tcp_listen(&listener, &port, address, how->port);
    if (st == MN_OK) st = take_all(tcp, listener, 0, how, &own, until, places);
    if (listener >= 0) close(listener);
    const welcome yes = { .magic = MN_TCP_MAGIC, .accepted = 1 };
    for (int r = 1; st == MN_OK && r < tcp->world; r++) {
        if (write_all(tcp->peers[r].fd, &yes, sizeof yes) &&
            write_all(tcp->peers[r].fd, places, (size_t)tcp->world * sizeof *places)) continue;
        st = mn_fail(MN_ERR_IO, "rank %d left while the ranks met", r);
    }
    free(places);
    return st;
}

static mn_status meet_others(mn_tcp *tcp, const mn_comm_options *how, double until, int listener,
                             const hello *own, place *places) {
    if (!read_all(tcp->peers[0].fd, places, (size_t)tcp->world * sizeof *places, until)) {
        return mn_fail(MN_ERR_IO, "rank 0 left while the ranks met");
    }
    mn_status st = MN_OK;
    for (int r = 1; st == MN_OK && r < how->rank; r++) {
        places[r].address[ADDRESS - 1] = '\0';
        st = connect_to(&tcp->peers[r].fd, places[r].address, places[r].port, until);
        if (st == MN_OK) st = greet(tcp, r, own, until);
    }
    return st == MN_OK ? take_all(tcp, listener, how->rank, how, own, until, NULL) : st;
}

/* A rank listens on the address by which it reaches rank 0, and nowhere else. */
static mn_status meet_as_other(mn_tcp *tcp, const mn_comm_options *how, double until) {
    const char *address = how->address ? how->address : "127.0.0.1";
    char mine[ADDRESS];
    int listener = -1, port = 0;
    hello own;
    place *places = calloc((size_t)tcp->world, sizeof *places);
    mn_status st = places ? connect_to(&tcp->peers[0].fd, address, how->port, until)
                          : mn_fail(MN_ERR_MEMORY, "no memory");
    if (st == MN_OK) {
        name_of(mine, tcp->peers[0].fd, false);
        st = mn_tcp_listen(&listener, &port, mine, 0);
    }
    if (st == MN_OK) st = make_hello(&own, how, port);
    if (st == MN_OK) st = greet(tcp, 0, &own, until);
    if (st == MN_OK) st = meet_others(tcp, how, until, listener, &own, places);
    if (listener >= 0) close(listener);
    free(places);
    return st;
}

mn_status mn_tcp_meet(mn_tcp *tcp, const mn_comm_options *how) {
    const double until = mn_seconds() + how->limit;
    mn_status st = how->rank == 0 ? meet_as_first(tcp, how, until)
                                  : meet_as_other(tcp, how, until);
    for (int r = 0; st == MN_OK && r < tcp->world; r++) {
        const int fd = tcp->peers[r].fd;
        if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    }
    return st;
}
