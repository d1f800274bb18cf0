/* network_link.c - a network of hosts that delays and loses, where the kernel has no netem.
 *
 *   network_link SECONDS LOSS INTERFACE...
 *
 * Every frame that comes in on an interface (the far end of a host's veth pair) goes out on all
 * others SECONDS later, unless it is one of the LOSS (a part of 1) that are dropped. An interface
 * that is down is a host that is cut off. Ends when it is killed. */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 16, FRAME = 66000, ROOM = 4096 };

/* Frames on their way, first in first out. */
typedef struct frame {
    double due;
    int from;
    ssize_t size;
    unsigned char *data;
} frame;

static frame queue[ROOM];
static int first, n_frames, ends[MOST], n_ends;
static uint64_t state = 88172645463325252u;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double uniform(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) / 9007199254740992.0;
}

static int open_end(const char *name) {
    struct sockaddr_ll at = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL) };
    const int fd = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL)), on = 1;
    at.sll_ifindex = (int)if_nametoindex(name);
    /* frames carry what is left to be done for them: checksums, segments */
    if (fd < 0 || at.sll_ifindex == 0 ||
        setsockopt(fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on) != 0 ||
        bind(fd, (struct sockaddr *)&at, sizeof at) != 0) {
        fprintf(stderr, "network_link: %s: %s\n", name, strerror(errno));
        exit(1);
    }
    return fd;
}

static void take(int end, double delay, double loss) {
    static unsigned char data[FRAME];
    struct sockaddr_ll from;
    socklen_t length = sizeof from;
    const ssize_t size = recvfrom(ends[end], data, sizeof data, MSG_DONTWAIT,
                                  (struct sockaddr *)&from, &length);
    if (size <= 0 || from.sll_pkttype == PACKET_OUTGOING) return;
    if (uniform() < loss || n_frames == ROOM) return;
    frame *f = &queue[(first + n_frames) % ROOM];
    *f = (frame){ now() + delay, end, size, malloc((size_t)size) };
    if (!f->data) return;
    memcpy(f->data, data, (size_t)size);
    n_frames++;
}

static void pass_on(void) {
    while (n_frames > 0 && queue[first].due <= now()) {
        frame *f = &queue[first];
        for (int i = 0; i < n_ends; i++) {
            if (i != f->from) (void)!send(ends[i], f->data, (size_t)f->size, MSG_DONTWAIT);
        }
        free(f->data);
        first = (first + 1) % ROOM;
        n_frames--;
    }
}

int main(int argc, char **argv) {
    struct pollfd polls[MOST];
    if (argc < 5 || argc > 3 + MOST) {
        fprintf(stderr, "usage: network_link SECONDS LOSS INTERFACE...\n");
        return 2;
    }
    const double delay = atof(argv[1]), loss = atof(argv[2]);
    for (int i = 3; i < argc; i++) ends[n_ends++] = open_end(argv[i]);
    for (;;) {
        for (int i = 0; i < n_ends; i++) polls[i] = (struct pollfd){ ends[i], POLLIN, 0 };
        const double left = n_frames > 0 ? queue[first].due - now() : 1.0;
        const int64_t nanoseconds = left > 0.0 ? (int64_t)(left * 1e9) : 0;
        const struct timespec t = { nanoseconds / 1000000000, nanoseconds % 1000000000 };
        if (ppoll(polls, (nfds_t)n_ends, &t, NULL) < 0 && errno != EINTR) return 1;
        for (int i = 0; i < n_ends; i++) {
            if (polls[i].revents & POLLIN) take(i, delay, loss);
        }
        pass_on();
    }
}
