/* mpi.c - messages through the MPI that started the ranks, opened at run time, so that one binary
 * serves machines without it.
 *
 * Which library: the one whose launcher set its variables, Open MPI's or MPICH's. MPI gives bytes
 * from rank to rank; sums stay ours, whose order does not depend on the library. */
#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "ranks/comm_internal.h"

enum { TAG = 77, PIECE = 1 << 30, SERIALIZED = 2 };

typedef struct mpi mpi;

static void *keep_open;    // MPI lives until the process ends, and is initialised once

struct mpi {
    void *library;
    int rank;
    double silence;
    const void *calls;
    mn_status (*exchange)(mpi *m, const mn_transfer *t, int n);
};

#define MN_ABI pointers
#define MN_HANDLE void *
#include "ranks/mpi_abi.h"
#define MN_ABI ints
#define MN_HANDLE int
#include "ranks/mpi_abi.h"

static calls_pointers open_mpi;
static calls_ints mpich;

static mn_status exchange_open_mpi(mpi *m, const mn_transfer *t, int n) {
    return exchange_pointers(m, &open_mpi, t, n);
}

static mn_status exchange_mpich(mpi *m, const mn_transfer *t, int n) {
    return exchange_ints(m, &mpich, t, n);
}

/* ---- the transport --------------------------------------------------------------------------- */

static mn_status exchange(void *self, const mn_transfer *t, int n) {
    mpi *m = self;
    return m->exchange(m, t, n);
}

/* MPI ends all ranks of the job itself. */
static void abort_all(void *self, const char *why) {
    mpi *m = self;
    fprintf(stderr, "mneme: rank %d ends the job: %s\n", m->rank, why);
    if (m->exchange == exchange_open_mpi) open_mpi.abort(open_mpi.world, 1);
    else mpich.abort(mpich.world, 1);
}

static void close_mpi(void *self) {
    mpi *m = self;
    int (*finalize)(void);
    void *found = dlsym(m->library, "MPI_Finalize");
    memcpy(&finalize, &found, sizeof found);
    if (finalize) finalize();
    free(m);
}

static const mn_transport transport_mpi = { exchange, abort_all, close_mpi, NULL };

/* ---- opening --------------------------------------------------------------------------------- */

static void *open_first(const char *const *names) {
    for (; *names; names++) {
        void *library = dlopen(*names, RTLD_NOW | RTLD_GLOBAL);
        if (library) return library;
    }
    return NULL;
}

static bool find_open_mpi(void *library) {
    open_mpi.world = dlsym(library, "ompi_mpi_comm_world");
    open_mpi.byte = dlsym(library, "ompi_mpi_byte");
    open_mpi.errors_return = dlsym(library, "ompi_mpi_errors_return");
    open_mpi.no_statuses = NULL;
    return open_mpi.world && open_mpi.byte && open_mpi.errors_return &&
           find_pointers(&open_mpi, library);
}

/* Numbers of mpi.h, the same since MPICH's common interface of 2014. */
static bool find_mpich(void *library) {
    mpich.world = 0x44000000;
    mpich.byte = 0x4c00010d;
    mpich.errors_return = 0x54000001;
    mpich.no_statuses = (void *)1;
    return find_ints(&mpich, library);
}

static mn_status start(mpi *m, int *rank, int *world) {
    int (*init)(int *argc, char ***argv, int required, int *provided);
    void *found = dlsym(m->library, "MPI_Init_thread");
    int level = 0, error = -1;
    memcpy(&init, &found, sizeof found);
    if (init) error = init(NULL, NULL, SERIALIZED, &level);
    if (error) return mn_fail(MN_ERR_IO, "MPI does not start (error %d); --transport tcp does "
                              "without it", error);
    if (level < SERIALIZED) {
        return mn_fail(MN_ERR_UNSUPPORTED, "this MPI cannot be called from several threads in "
                       "turn; use --transport tcp");
    }
    if (m->exchange == exchange_open_mpi) {
        open_mpi.set_errhandler(open_mpi.world, open_mpi.errors_return);
        error = open_mpi.comm_rank(open_mpi.world, rank) +
                open_mpi.comm_size(open_mpi.world, world);
    } else {
        mpich.set_errhandler(mpich.world, mpich.errors_return);
        error = mpich.comm_rank(mpich.world, rank) + mpich.comm_size(mpich.world, world);
    }
    return error ? mn_fail(MN_ERR_IO, "MPI does not tell its ranks (error %d)", error) : MN_OK;
}

static mn_status open_library(mpi *m) {
    static const char *const of_open_mpi[] = { "libmpi.so.40", "libmpi.so.80", "libmpi.so", NULL };
    static const char *const of_mpich[] = { "libmpich.so.12", "libmpi.so.12", "libmpich.so", NULL };
    const bool is_open_mpi = getenv("OMPI_COMM_WORLD_SIZE") != NULL;
    m->library = open_first(is_open_mpi ? of_open_mpi : of_mpich);
    if (!m->library) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s was not found on this machine; --transport tcp does "
                       "without it", is_open_mpi ? "Open MPI (libmpi.so)" : "MPICH (libmpich.so)");
    }
    keep_open = m->library;
    m->exchange = is_open_mpi ? exchange_open_mpi : exchange_mpich;
    if (is_open_mpi ? find_open_mpi(m->library) : find_mpich(m->library)) return MN_OK;
    return mn_fail(MN_ERR_UNSUPPORTED, "the MPI library here has another binary interface than %s; "
                   "use --transport tcp", is_open_mpi ? "Open MPI's" : "MPICH's");
}

mn_status mn_transport_open_mpi(void **self, const mn_transport **transport,
                                const mn_comm_options *how) {
    if (keep_open) return mn_fail(MN_ERR_UNSUPPORTED, "MPI starts once in a process only");
    mpi *m = calloc(1, sizeof *m);
    if (!m) return mn_fail(MN_ERR_MEMORY, "no memory for MPI");
    int rank = -1, world = -1;
    m->silence = how->silence;
    mn_status st = open_library(m);
    if (st == MN_OK) st = start(m, &rank, &world);
    if (st == MN_OK && (rank != how->rank || world != how->world)) {
        st = mn_fail(MN_ERR_IO, "MPI says rank %d of %d, its launcher's variables say %d of %d; is "
                     "this the library of that launcher? --transport tcp does without it", rank,
                     world, how->rank, how->world);
    }
    if (st != MN_OK) {
        free(m);
        return st;
    }
    m->rank = rank;
    *self = m;
    *transport = &transport_mpi;
    return MN_OK;
}
