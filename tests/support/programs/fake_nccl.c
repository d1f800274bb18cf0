/* fake_nccl.c - a library with the calls of NCCL that mneme makes, between processes of one machine
 * and memory of the host: messages are files of a folder that the id names. Calls return before
 * they are done, as those of a communicator that does not block. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, SYSTEM = 2, INVALID = 4, IN_PROGRESS = 7 };
enum { RANKS = 16, CALLS = 4096, PATH = 256 };

typedef struct id {
    char folder[128];
} id;

typedef struct message {
    void *data;
    size_t bytes;
    int peer, number;
    int sends, done;
} message;

typedef struct fake {
    char folder[128];
    int rank, world;
    int sent[RANKS], received[RANKS];
    message calls[CALLS];
    int n;
} fake;

static fake *only;    // one communicator a process

int ncclGetVersion(int *version);
int ncclGetUniqueId(id *out);
int ncclCommInitRankConfig(void **comm, int world, id from, int rank, void *config);
int ncclCommGetAsyncError(void *comm, int *error);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclSend(const void *data, size_t count, int type, int peer, void *comm, void *stream);
int ncclRecv(void *data, size_t count, int type, int peer, void *comm, void *stream);
int ncclCommFinalize(void *comm);
int ncclCommDestroy(void *comm);
int ncclCommAbort(void *comm);
const char *ncclGetErrorString(int result);
const char *ncclGetLastError(void *comm);

EXPORT int ncclGetVersion(int *version) {
    *version = 22809;
    return SUCCESS;
}

EXPORT int ncclGetUniqueId(id *out) {
    strcpy(out->folder, "/tmp/mneme-fake-XXXXXX");
    return mkdtemp(out->folder) ? SUCCESS : SYSTEM;
}

EXPORT int ncclCommInitRankConfig(void **comm, int world, id from, int rank, void *config) {
    size_t size;
    unsigned magic;
    memcpy(&size, config, sizeof size);
    memcpy(&magic, (char *)config + sizeof size, sizeof magic);
    if (size != 44 || magic != 0xcafebeefu || world > RANKS) return INVALID;
    only = calloc(1, sizeof *only);
    memcpy(only->folder, from.folder, sizeof only->folder);
    only->rank = rank;
    only->world = world;
    *comm = only;
    return IN_PROGRESS;
}

static void path_of(char path[PATH], int from, int to, int number, const char *end) {
    snprintf(path, PATH, "%s/%d-%d-%d%s", only->folder, from, to, number, end);
}

/* Writes what is sent, and takes what is there; whether anything is left. */
static int move(int *error) {
    int left = 0;
    for (int i = 0; i < only->n; i++) {
        message *m = &only->calls[i];
        char path[PATH], made[PATH];
        if (m->done) continue;
        if (m->sends) {
            path_of(path, only->rank, m->peer, m->number, ".new");
            path_of(made, only->rank, m->peer, m->number, "");
            FILE *file = fopen(path, "wb");
            if (!file || fwrite(m->data, 1, m->bytes, file) != m->bytes) *error = SYSTEM;
            if (file && fclose(file) != 0) *error = SYSTEM;
            if (rename(path, made) != 0) *error = SYSTEM;
            m->done = 1;
            continue;
        }
        path_of(path, m->peer, only->rank, m->number, "");
        FILE *file = fopen(path, "rb");
        if (!file) {
            left = 1;
            continue;
        }
        char more;
        const int whole = fread(m->data, 1, m->bytes, file) == m->bytes &&
                          fread(&more, 1, 1, file) == 0;
        if (!whole) *error = INVALID;    // ends that do not agree on the size
        fclose(file);
        remove(path);
        m->done = 1;
    }
    return left;
}

EXPORT int ncclCommGetAsyncError(void *comm, int *error) {
    *error = SUCCESS;
    if (comm != only) return INVALID;
    if (move(error) && *error == SUCCESS) *error = IN_PROGRESS;
    if (*error != IN_PROGRESS) only->n = 0;
    return SUCCESS;
}

EXPORT int ncclGroupStart(void) {
    return SUCCESS;
}

EXPORT int ncclGroupEnd(void) {
    return IN_PROGRESS;
}

static int add(void *data, size_t count, int peer, int sends) {
    if (only->n == CALLS || peer < 0 || peer >= only->world) return INVALID;
    const int number = sends ? only->sent[peer]++ : only->received[peer]++;
    only->calls[only->n++] = (message){ data, count, peer, number, sends, 0 };
    return SUCCESS;
}

EXPORT int ncclSend(const void *data, size_t count, int type, int peer, void *comm, void *stream) {
    (void)stream;
    return comm == only && type == 0 ? add((void *)data, count, peer, 1) : INVALID;
}

EXPORT int ncclRecv(void *data, size_t count, int type, int peer, void *comm, void *stream) {
    (void)stream;
    return comm == only && type == 0 ? add(data, count, peer, 0) : INVALID;
}

EXPORT int ncclCommFinalize(void *comm) {
    return comm == only ? SUCCESS : INVALID;
}

EXPORT int ncclCommDestroy(void *comm) {
    rmdir(only->folder);    // goes well for the last one
    free(comm);
    only = NULL;
    return SUCCESS;
}

EXPORT int ncclCommAbort(void *comm) {
    return ncclCommDestroy(comm);
}

EXPORT const char *ncclGetErrorString(int result) {
    return result == INVALID ? "invalid argument" : "system error";
}

EXPORT const char *ncclGetLastError(void *comm) {
    (void)comm;
    return "";
}
