/* ranks.c - processes of a test that talk to each other. */
#include "support/ranks.h"

#include <sys/wait.h>
#include <unistd.h>

#include "ranks/tcp.h"
#include "support/check.h"

static int run_rank(rank_fn fn, void *job, int rank, int world, int port, int listener) {
    const mn_comm_options how = { .rank = rank, .world = world, .port = port, .token = "a token",
                                  .listener = rank == 0 ? listener : -1, .limit = 10.0,
                                  .silence = 20.0 };
    mn_comm *comm;
    if (mn_comm_create(&comm, &how) != MN_OK) return 90;
    const int code = fn(comm, job);
    mn_comm_destroy(comm);
    return code;
}

void run_ranks(rank_fn fn, void *job, int world, int *codes) {
    int listener, port;
    pid_t pids[16];
    if (mn_tcp_listen(&listener, &port, "127.0.0.1", 0) != MN_OK) check_fatal("no socket");
    for (int r = 0; r < world; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            alarm(60);
            _exit(run_rank(fn, job, r, world, port, listener));
        }
    }
    close(listener);
    for (int r = 0; r < world; r++) {
        int status;
        if (waitpid(pids[r], &status, 0) != pids[r]) check_fatal("rank %d was lost", r);
        codes[r] = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
}
