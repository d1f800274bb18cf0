/* launch.c - variables of launchers, and local ranks as processes of their own. */
#include "ranks/launch.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "ranks/tcp.h"

enum { PORT = 29400, MEET = 120, SILENCE = 1800, GRACE = 6 };

/* ---- variables ------------------------------------------------------------------------------- */

typedef struct launcher {
    const char *rank, *world, *local_rank, *local_world;
    bool mpi;
} launcher;

static const launcher launchers[] = {
    { "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", false },
    { "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
      "OMPI_COMM_WORLD_LOCAL_SIZE", true },
    { "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", true },
    { "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", false },
};

/* The number in a variable, or `missing`; what is no number fails. */
static mn_status number_in(int *out, const char *name, int missing) {
    const char *text = getenv(name);
    *out = missing;
    if (!text || !*text) return MN_OK;
    char *end;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (*end || errno || value < 0 || value > 65535) {
        return mn_fail(MN_ERR_ARGUMENT, "%s is \"%s\", not a number from 0 to 65535", name, text);
    }
    *out = (int)value;
    return MN_OK;
}

static bool is_loopback(const char *address) {
    return !address || strcmp(address, "localhost") == 0 || strncmp(address, "127.", 4) == 0 ||
           strcmp(address, "::1") == 0;
}

/* torchrun's own store listens at MASTER_PORT; ranks then meet one port further. */
static mn_status read_place(mn_comm_options *how) {
    const char *store = getenv("TORCHELASTIC_USE_AGENT_STORE"), *inherited = NULL;
    int taken = 0;
    how->address = getenv("MASTER_ADDR");
    how->token = getenv("MNEME_TOKEN");
    inherited = getenv("MNEME_LISTENER");
    mn_status st = number_in(&how->port, "MASTER_PORT", PORT);
    if (st == MN_OK && store && strcmp(store, "True") == 0) how->port++;
    if (st == MN_OK) st = number_in(&how->port, "MNEME_PORT", how->port);
    if (st == MN_OK && inherited && how->rank == 0) {
        st = number_in(&taken, "MNEME_LISTENER", -1);
        how->listener = taken;
    }
    if (st != MN_OK || how->transport == MN_TRANSPORT_MPI || how->world == 1) return st;
    if (is_loopback(how->address) || (how->token && *how->token)) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "ranks that meet at %s need MNEME_TOKEN, a secret that all of "
                   "them are given, so that nobody else joins: export MNEME_TOKEN=$(openssl rand "
                   "-hex 16) before the launcher", how->address);
}

static bool opens(const char *const *names) {
    for (; *names; names++) {
        if (dlopen(*names, RTLD_LAZY | RTLD_GLOBAL)) return true;
    }
    return false;
}

/* MPI started these ranks: it carries their messages, unless its library is not here. */
static bool has_mpi(const launcher *by) {
    static const char *const of_open_mpi[] = { "libmpi.so.40", "libmpi.so.80", "libmpi.so", NULL };
    static const char *const of_mpich[] = { "libmpich.so.12", "libmpi.so.12", "libmpich.so", NULL };
    return by->mpi && opens(by->rank[0] == 'O' ? of_open_mpi : of_mpich);
}

static mn_status choose_transport(mn_comm_options *how, const char *name, const launcher *by) {
    if (!name || strcmp(name, "auto") == 0) {
        how->transport = has_mpi(by) ? MN_TRANSPORT_MPI : MN_TRANSPORT_TCP;
        return MN_OK;
    }
    if (!mn_transport_find(&how->transport, name)) {
        return mn_fail(MN_ERR_ARGUMENT, "--transport %s: take auto, tcp or mpi", name);
    }
    if (how->transport != MN_TRANSPORT_MPI || by->mpi) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "--transport mpi is for ranks that mpirun started; these were "
                   "not: use tcp");
}

mn_status mn_launch_read(mn_comm_options *how, const char *transport) {
    *how = (mn_comm_options){ .world = 1, .local_world = 1, .listener = -1, .limit = MEET,
                              .silence = SILENCE };
    const launcher *by = NULL;
    for (size_t i = 0; i < MN_COUNTOF(launchers) && !by; i++) {
        if (getenv(launchers[i].rank) && getenv(launchers[i].world)) by = &launchers[i];
    }
    /* a shell inside an allocation of Slurm has its variables and is no rank */
    if (!by || (by == &launchers[3] && !getenv("SLURM_STEP_ID"))) return MN_OK;
    mn_status st = number_in(&how->rank, by->rank, 0);
    if (st == MN_OK) st = number_in(&how->world, by->world, 1);
    if (st == MN_OK) st = number_in(&how->local_rank, by->local_rank, how->rank);
    if (st == MN_OK) st = number_in(&how->local_world, by->local_world, 1);
    int limit = MEET, silence = SILENCE;
    if (st == MN_OK) st = number_in(&limit, "MNEME_MEET_SECONDS", MEET);
    if (st == MN_OK) st = number_in(&silence, "MNEME_SILENCE_SECONDS", SILENCE);
    how->limit = limit;
    how->silence = silence;
    if (st == MN_OK) st = choose_transport(how, transport, by);
    return st == MN_OK ? read_place(how) : st;
}

/* ---- local ranks ----------------------------------------------------------------------------- */

static volatile sig_atomic_t passed_on;

static void pass_on(int signal) {
    passed_on = signal;
}

static void set_number(const char *name, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static mn_status set_token(void) {
    unsigned char bytes[16];
    char text[33];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes) {
        return mn_fail(MN_ERR_IO, "no random numbers for a token: %s", strerror(errno));
    }
    for (int i = 0; i < 16; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    setenv("MNEME_TOKEN", text, 1);
    return MN_OK;
}

/* In a child: it ends with the launcher, however that ends. */
static void become_rank(int rank, pid_t launcher_pid, int listener) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setpgid(0, 0);    // Ctrl-C reaches the launcher, which passes it on once
    if (getppid() != launcher_pid) _exit(1);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    set_number("RANK", rank);
    set_number("LOCAL_RANK", rank);
    if (rank == 0) set_number("MNEME_LISTENER", listener);
    else close(listener);
}

static void say_how(int rank, int status) {
    if (WIFSIGNALED(status)) {
        fprintf(stderr, "mneme: rank %d was ended by signal %d (%s); the others stop\n", rank,
                WTERMSIG(status), strsignal(WTERMSIG(status)));
    }
}

static int code_of(int status) {
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void signal_all(const pid_t *pids, int n, int signal) {
    for (int i = 0; i < n; i++) {
        if (pids[i] > 0) kill(pids[i], signal);
    }
}

/* Waits for all; those that do not stop within GRACE seconds of the first failure are killed. */
static int wait_for(pid_t *pids, int n) {
    int first = 0, left = n;
    time_t failed = 0;
    bool killed = false;
    while (left > 0) {
        int status;
        const pid_t pid = waitpid(-1, &status, WNOHANG);
        if (passed_on) {
            signal_all(pids, n, passed_on);
            passed_on = 0;
        }
        if (pid <= 0) {
            const struct timespec rest = { 0, 20000000 };
            nanosleep(&rest, NULL);
            if (failed && !killed && time(NULL) - failed > GRACE) {
                signal_all(pids, n, SIGKILL);
                killed = true;
            }
            continue;
        }
        for (int i = 0; i < n; i++) {
            if (pids[i] != pid) continue;
            pids[i] = 0;
            left--;
            if (status != 0 && (!first || first == 130)) first = code_of(status);
            if (status == 0 || code_of(status) == 130) continue;
            if (!killed) say_how(i, status);
            if (!failed) failed = time(NULL);
        }
    }
    return first;
}

mn_status mn_launch_local(int n, bool *parent, int *status) {
    int listener = -1, port = 0;
    *parent = true;
    *status = 1;
    pid_t *pids = calloc((size_t)n, sizeof *pids);
    mn_status st = pids ? mn_tcp_listen(&listener, &port, "127.0.0.1", 0)
                        : mn_fail(MN_ERR_MEMORY, "no memory for %d ranks", n);
    if (st == MN_OK) st = set_token();
    if (st == MN_OK) {
        fcntl(listener, F_SETFD, 0);
        set_number("WORLD_SIZE", n);
        set_number("LOCAL_WORLD_SIZE", n);
        set_number("MASTER_PORT", port);
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        unsetenv("TORCHELASTIC_USE_AGENT_STORE");
        unsetenv("MNEME_PORT");
        const struct sigaction relay = { .sa_handler = pass_on };
        sigaction(SIGINT, &relay, NULL);
        sigaction(SIGTERM, &relay, NULL);
    }
    const pid_t self = getpid();
    for (int r = 0; st == MN_OK && r < n; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            become_rank(r, self, listener);
            free(pids);
            *parent = false;
            return MN_OK;
        }
        if (pids[r] < 0) {
            st = mn_fail(MN_ERR_IO, "rank %d does not start: %s", r, strerror(errno));
            signal_all(pids, r, SIGKILL);
        }
    }
    if (listener >= 0) close(listener);
    if (st == MN_OK) *status = wait_for(pids, n);
    free(pids);
    return st;
}
