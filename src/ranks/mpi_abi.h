/* mpi_abi.h - the calls of MPI that ranks use, for one kind of handle. Included once for each:
 *
 *   MN_ABI       suffix of the names made here
 *   MN_HANDLE    what communicators, types and requests are: pointers in Open MPI, ints in MPICH
 *
 * MPI fixes names and meanings, not binary interfaces; these two are the ones that libraries have
 * (MPICH's is shared by Intel MPI, MVAPICH and Cray's). */
#define MN_JOIN_(a, b) a##_##b
#define MN_JOIN(a, b) MN_JOIN_(a, b)
#define NAME(x) MN_JOIN(x, MN_ABI)

typedef struct NAME(calls) {
    int (*isend)(const void *data, int count, MN_HANDLE type, int to, int tag, MN_HANDLE comm,
                 MN_HANDLE *request);
    int (*irecv)(void *data, int count, MN_HANDLE type, int from, int tag, MN_HANDLE comm,
                 MN_HANDLE *request);
    int (*testall)(int n, MN_HANDLE *requests, int *done, void *statuses);
    int (*comm_rank)(MN_HANDLE comm, int *rank);
    int (*comm_size)(MN_HANDLE comm, int *size);
    int (*abort)(MN_HANDLE comm, int code);
    int (*set_errhandler)(MN_HANDLE comm, MN_HANDLE handler);
    MN_HANDLE world;
    MN_HANDLE byte;
    MN_HANDLE errors_return;
    void *no_statuses;
} NAME(calls);

static bool NAME(find)(NAME(calls) *c, void *library) {
    const struct {
        const char *name;
        void *to;
    } wanted[] = {
        { "MPI_Isend", &c->isend }, { "MPI_Irecv", &c->irecv }, { "MPI_Testall", &c->testall },
        { "MPI_Comm_rank", &c->comm_rank }, { "MPI_Comm_size", &c->comm_size },
        { "MPI_Abort", &c->abort }, { "MPI_Comm_set_errhandler", &c->set_errhandler },
    };
    for (size_t i = 0; i < MN_COUNTOF(wanted); i++) {
        void *found = dlsym(library, wanted[i].name);
        if (!found) return false;
        memcpy(wanted[i].to, &found, sizeof found);    // a function's address, as POSIX has it
    }
    return true;
}

/* Messages longer than an int counts go in pieces, in order. */
static mn_status NAME(exchange)(mpi *m, const NAME(calls) *c, const mn_transfer *t, int n) {
    size_t pieces = 0;
    for (int i = 0; i < n; i++) pieces += (t[i].bytes + PIECE - 1) / PIECE;
    MN_HANDLE *requests = malloc(pieces * sizeof *requests + 1);
    if (!requests) return mn_fail(MN_ERR_MEMORY, "no memory for %zu messages", pieces);
    int used = 0, error = 0, done = 0;
    for (int i = 0; i < n && !error; i++) {
        if (t[i].peer == m->rank) continue;
        for (size_t at = 0; at < t[i].bytes && !error; at += PIECE) {
            const size_t left = t[i].bytes - at;
            const int count = (int)(left < PIECE ? left : PIECE);
            char *data = (char *)t[i].data + at;
            error = t[i].send ? c->isend(data, count, c->byte, t[i].peer, TAG, c->world,
                                         &requests[used])
                              : c->irecv(data, count, c->byte, t[i].peer, TAG, c->world,
                                         &requests[used]);
            if (!error) used++;
        }
    }
    const double until = mn_seconds() + m->silence;
    while (!error && !done) {
        error = c->testall(used, requests, &done, c->no_statuses);
        if (!done && !error && mn_seconds() > until) break;
        if (!done && !error) sched_yield();
    }
    free(requests);
    if (error) return mn_fail(MN_ERR_IO, "MPI failed with error %d between the ranks", error);
    if (done) return MN_OK;
    return mn_fail(MN_ERR_IO, "a rank has not answered for %.0f seconds", m->silence);
}

#undef NAME
#undef MN_JOIN
#undef MN_JOIN_
#undef MN_ABI
#undef MN_HANDLE
