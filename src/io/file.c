/* file.c - mapping for reading, temporary-sync-rename for writing (POSIX).
 *
 * Order of a write: temporary in the same folder, content, fsync, rename, fsync of the folder.
 * The rename is the only step that a reader of `path` can notice. */
#define _XOPEN_SOURCE 700       // realpath, fsync, fchmod under -std=c11
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"

struct mn_sink {
    int fd;
    const char *path;   // as the caller wrote it, for messages
    mn_status status;   // the first failure
};

/* Says why the system refused something, in words where a common reason has better ones. */
static mn_status fail_errno(const char *path, const char *doing, int error) {
    if (error == ENOENT) return mn_fail(MN_ERR_IO, "%s: no such file", path);
    if (error == ENOMEM) return mn_fail(MN_ERR_MEMORY, "%s: %s: out of memory", path, doing);
    return mn_fail(MN_ERR_IO, "%s: %s: %s", path, doing, strerror(error));
}

static mn_status refuse_unless_regular(const char *path, const struct stat *info) {
    if (S_ISREG(info->st_mode)) return MN_OK;
    if (S_ISDIR(info->st_mode)) {
        return mn_fail(MN_ERR_IO, "%s: is a folder, expected a file", path);
    }
    return mn_fail(MN_ERR_IO, "%s: is a pipe or device, expected a regular file", path);
}

static mn_status map_open_file(mn_file *out, const char *path, int fd) {
    struct stat info;
    if (fstat(fd, &info) != 0) return fail_errno(path, "cannot read its size", errno);
    const mn_status st = refuse_unless_regular(path, &info);
    if (st != MN_OK) return st;
    if ((uintmax_t)info.st_size > SIZE_MAX) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: %jd bytes do not fit in memory addresses", path,
                       (intmax_t)info.st_size);
    }
    static const uint8_t nothing[1];            // mmap refuses length 0
    *out = (mn_file){.bytes = nothing, .size = 0};
    if (info.st_size == 0) return MN_OK;

    void *bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED) {
        *out = (mn_file){0};
        return fail_errno(path, "cannot map", errno);
    }
    *out = (mn_file){.bytes = bytes, .size = (size_t)info.st_size};
    return MN_OK;
}

/* The folder part of `path`, to be freed; "." when there is none, NULL when out of memory. */
static char *folder_of(const char *path) {
    const char *slash = strrchr(path, '/');
    if (!slash) return strdup(".");
    const size_t n = slash == path ? 1 : (size_t)(slash - path);
    char *folder = malloc(n + 1);
    if (!folder) return NULL;
    memcpy(folder, path, n);
    folder[n] = '\0';
    return folder;
}

/* Makes the rename itself durable. Some file systems cannot sync a folder and say EINVAL. */
static mn_status sync_folder(const char *target, const char *path) {
    char *folder = folder_of(target);
    if (!folder) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", path);
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(folder);
    if (fd < 0) return MN_OK;                   // a folder we may write in but not read
    const bool synced = fsync(fd) == 0 || errno == EINVAL || errno == ENOTSUP || errno == EROFS;
    const int error = errno;
    close(fd);
    return synced ? MN_OK : fail_errno(path, "cannot sync its folder", error);
}

/* Opens a new file next to `target`; its name (to be freed) leaves through `temporary`.
 *
 * The name carries process and serial number, so concurrent writers never share one; a leftover
 * of a killed process with the same number makes O_EXCL fail and the next serial is tried. */
static mn_status open_temporary(int *fd, char **temporary, const char *target, const char *path) {
    static atomic_uint serial;
    const size_t room = strlen(target) + 48;
    char *name = malloc(room);
    if (!name) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", path);
    for (int attempt = 0; attempt < 1000; attempt++) {
        snprintf(name, room, "%s.%jd-%u.tmp", target, (intmax_t)getpid(),
                 atomic_fetch_add(&serial, 1));
        *fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (*fd >= 0) {
            *temporary = name;
            return MN_OK;
        }
        if (errno != EEXIST) break;
    }
    const int error = errno;
    free(name);
    if (error == ENOENT) return mn_fail(MN_ERR_IO, "%s: its folder does not exist", path);
    return fail_errno(path, "cannot create a file in its folder", error);
}

/* Lets the writer fill the open temporary and brings it to the disk. Closes `fd`. */
static mn_status fill(int fd, const char *path, mn_file_writer writer, void *context) {
    mn_sink sink = {.fd = fd, .path = path, .status = MN_OK};
    mn_status st = writer(&sink, context);
    if (st == MN_OK) st = sink.status;          // a put whose result the writer dropped
    if (st == MN_OK && fsync(fd) != 0) st = fail_errno(path, "cannot write", errno);
    if (close(fd) != 0 && st == MN_OK) st = fail_errno(path, "cannot write", errno);
    return st;
}

/* Writes through a temporary beside `target`, the file that `path` finally names. */
static mn_status replace(const char *target, const char *path, mn_file_writer writer,
                         void *context) {
    struct stat old;
    const bool exists = stat(target, &old) == 0;
    if (exists) {
        const mn_status st = refuse_unless_regular(path, &old);
        if (st != MN_OK) return st;
    }
    int fd = -1;
    char *temporary = NULL;
    mn_status st = open_temporary(&fd, &temporary, target, path);
    if (st != MN_OK) return st;

    /* Best effort: on file systems without permissions there is nothing to keep. */
    if (exists) (void)fchmod(fd, old.st_mode & 0777);
    st = fill(fd, path, writer, context);
    if (st == MN_OK && rename(temporary, target) != 0) {
        st = fail_errno(path, "cannot replace", errno);
    }
    if (st == MN_OK) {
        st = sync_folder(target, path);
    } else {
        unlink(temporary);
    }
    free(temporary);
    return st;
}

static mn_status put_bytes(mn_sink *sink, void *context) {
    const mn_file *content = context;
    return mn_sink_put(sink, content->bytes, content->size);
}

mn_status mn_file_map(mn_file *out, const char *path) {
    *out = (mn_file){0};
    if (!path || !*path) return mn_fail(MN_ERR_ARGUMENT, "no file name given");
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);   // a pipe must not block us
    if (fd < 0) return fail_errno(path, "cannot open", errno);
    const mn_status st = map_open_file(out, path, fd);
    close(fd);                                  // the mapping stays
    return st;
}

void mn_file_unmap(mn_file *file) {
    if (!file) return;
    if (file->size > 0) munmap((void *)(uintptr_t)file->bytes, file->size);
    *file = (mn_file){0};
}

mn_status mn_sink_put(mn_sink *sink, const void *bytes, size_t size) {
    if (sink->status != MN_OK) return sink->status;
    const uint8_t *at = bytes;
    while (size > 0) {
        /* Linux writes at most 2 GiB - 4 KiB a call; 1 GiB keeps far from any such limit. */
        const size_t most = (size_t)1 << 30;
        const ssize_t n = write(sink->fd, at, size < most ? size : most);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return sink->status = fail_errno(sink->path, "cannot write", errno);
        at += n;
        size -= (size_t)n;
    }
    return MN_OK;
}

mn_status mn_file_write_atomic(const char *path, mn_file_writer writer, void *context) {
    if (!path || !*path) return mn_fail(MN_ERR_ARGUMENT, "no file name given");
    char *target = realpath(path, NULL);        // NULL for a new file
    const mn_status st = replace(target ? target : path, path, writer, context);
    free(target);
    return st;
}

mn_status mn_file_write_bytes(const char *path, const void *bytes, size_t size) {
    mn_file content = {.bytes = bytes, .size = size};
    return mn_file_write_atomic(path, put_bytes, &content);
}
