/* clients.c - see clients.h. A connection is shut down, not closed: its descriptor stays that of
 * libmicrohttpd, which closes it and says so before the number is given to another. */
#include "server/http/clients.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"

enum { SLOWEST = 16 << 10 };       // bytes a second of a body, after the first seconds

typedef enum phase { HEADER, BODY, SERVED, OVER } phase;

struct mn_client {
    mn_client *next, **link;       // the pointer to this one
    int fd;
    phase phase;
    double since;
    size_t came;
};

struct mn_clients {
    pthread_mutex_t lock;
    mn_client *first;
    int count, most, timeout;
};

mn_status mn_clients_create(mn_clients **out, int most, int timeout) {
    *out = calloc(1, sizeof **out);
    if (!*out) return mn_fail(MN_ERR_MEMORY, "no memory for connections");
    pthread_mutex_init(&(*out)->lock, NULL);
    (*out)->most = most;
    (*out)->timeout = timeout;
    return MN_OK;
}

void mn_clients_destroy(mn_clients *all) {
    if (!all) return;
    while (all->first) mn_clients_remove(all, all->first);
    pthread_mutex_destroy(&all->lock);
    free(all);
}

mn_client *mn_clients_add(mn_clients *all, int fd) {
    mn_client *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->fd = fd;
    c->since = mn_seconds();
    pthread_mutex_lock(&all->lock);
    c->next = all->first;
    c->link = &all->first;
    if (c->next) c->next->link = &c->next;
    all->first = c;
    all->count++;
    pthread_mutex_unlock(&all->lock);
    return c;
}

void mn_clients_remove(mn_clients *all, mn_client *c) {
    if (!c) return;
    pthread_mutex_lock(&all->lock);
    *c->link = c->next;
    if (c->next) c->next->link = c->link;
    all->count--;
    pthread_mutex_unlock(&all->lock);
    free(c);
}

static void move_on(mn_clients *all, mn_client *c, phase to) {
    if (!c) return;
    pthread_mutex_lock(&all->lock);
    if (c->phase != OVER) c->phase = to;
    c->since = mn_seconds();
    c->came = 0;
    pthread_mutex_unlock(&all->lock);
}

void mn_client_sends(mn_clients *all, mn_client *c) {
    move_on(all, c, BODY);
}

void mn_client_sent(mn_clients *all, mn_client *c, size_t bytes) {
    if (!c) return;
    pthread_mutex_lock(&all->lock);
    c->came += bytes;
    pthread_mutex_unlock(&all->lock);
}

void mn_client_waits(mn_clients *all, mn_client *c) {
    move_on(all, c, SERVED);
}

void mn_client_rests(mn_clients *all, mn_client *c) {
    move_on(all, c, HEADER);
}

/* Seconds for a header: all of the timeout while less than half of the connections are taken, 2
 * when all are. */
static double patience(const mn_clients *all) {
    const double taken = (double)all->count / (double)mn_max(all->most, 1);
    const double least = mn_min(2, all->timeout);
    if (taken <= 0.5) return all->timeout;
    return least + (all->timeout - least) * mn_max(2.0 * (1.0 - taken), 0.0);
}

void mn_clients_refuse(int fd, const char *status, const char *message) {
    char body[256], reply[512];
    const int size = snprintf(body, sizeof body, "{\"error\":{\"message\":\"%s\",\"type\":"
                              "\"invalid_request_error\",\"param\":null,\"code\":%.3s}}", message,
                              status);
    const int n = snprintf(reply, sizeof reply, "HTTP/1.1 %s\r\nContent-Type: application/json\r\n"
                           "Connection: close\r\nContent-Length: %d\r\n\r\n%s", status, size,
                           body);
    const ssize_t sent = send(fd, reply, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)sent;    // it may be gone
    shutdown(fd, SHUT_WR);
}

int mn_clients_sweep(mn_clients *all) {
    const double now = mn_seconds();
    int ended = 0;
    pthread_mutex_lock(&all->lock);
    const double for_header = patience(all);
    for (mn_client *c = all->first; c; c = c->next) {
        const double for_body = all->timeout + (double)c->came / SLOWEST;
        const bool late = (c->phase == HEADER && now - c->since > for_header) ||
                          (c->phase == BODY && now - c->since > for_body);
        if (!late) continue;
        if (c->phase == BODY) {
            mn_clients_refuse(c->fd, "408 Request Timeout", "the body comes too slowly");
        }
        shutdown(c->fd, SHUT_RDWR);
        c->phase = OVER;
        ended++;
    }
    pthread_mutex_unlock(&all->lock);
    return ended;
}
