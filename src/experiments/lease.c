/* lease.c - files that say who runs a job. */
#include "experiments/lease.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/status.h"

enum { PATH = 4096, NAME = 320 };

static bool path_of(char path[PATH], const char *folder, const char *key, const char *suffix) {
    return snprintf(path, PATH, "%s/%s.%s", folder, key, suffix) < PATH;
}

/* "HOST PID" of this process. */
static void own_name(char name[NAME]) {
    char host[256] = "unknown";
    gethostname(host, sizeof host - 1);
    snprintf(name, NAME, "%.255s %ld", host, (long)getpid());
}

/* Whether nobody runs what the lease at `path` stands for. */
static bool is_stale(const char *path) {
    struct stat about;
    char name[NAME] = "", own[NAME], host[256] = "";
    long pid = 0;
    if (stat(path, &about) != 0) return false;
    if (time(NULL) - about.st_mtime > MN_LEASE_SECONDS) return true;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd >= 0 ? read(fd, name, sizeof name - 1) : 0;
    if (fd >= 0) close(fd);
    name[n > 0 ? n : 0] = '\0';
    own_name(own);
    const size_t length = (size_t)(strrchr(own, ' ') - own) + 1;
    if (sscanf(name, "%255s %ld", host, &pid) != 2 || strncmp(name, own, length) != 0) return false;
    return pid > 0 && kill((pid_t)pid, 0) != 0 && errno == ESRCH;
}

/* Makes the lease; false when there is one. */
static mn_status make(bool *made, const char *path) {
    char name[NAME];
    own_name(name);
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    *made = fd >= 0;
    if (fd < 0 && errno == EEXIST) return MN_OK;
    const bool written = fd >= 0 && write(fd, name, strlen(name)) == (ssize_t)strlen(name);
    const int error = errno;
    if (fd >= 0) close(fd);
    if (written) return MN_OK;
    if (*made) unlink(path);
    return mn_fail(MN_ERR_IO, "%s: cannot take the job: %s", path, strerror(error));
}

/* Moves a stale lease away: one of those who try gets it. Where it was renewed meanwhile, or is
 * somebody's new one, it goes back. */
static void remove_stale(const char *folder, const char *key, const char *path) {
    char aside[PATH], name[NAME];
    own_name(name);
    const long pid = (long)getpid();
    if (snprintf(aside, PATH, "%s/.%s.%ld.stale", folder, key, pid) >= PATH) return;
    if (rename(path, aside) != 0) return;
    if (!is_stale(aside) && link(aside, path) != 0 && errno != EEXIST) {
        rename(aside, path);
        return;
    }
    unlink(aside);
}

mn_status mn_lease_take(mn_lease *out, const char *folder, const char *key) {
    char path[PATH], done[PATH];
    bool made = false;
    *out = MN_LEASE_OTHERS;
    if (!path_of(path, folder, key, "lease") || !path_of(done, folder, key, "done")) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", folder);
    }
    if (access(done, F_OK) == 0) {
        *out = MN_LEASE_DONE;
        return MN_OK;
    }
    if (is_stale(path)) remove_stale(folder, key, path);
    const mn_status st = make(&made, path);
    if (st != MN_OK || !made) return st;
    *out = access(done, F_OK) == 0 ? MN_LEASE_DONE : MN_LEASE_TAKEN;    // ended just before
    if (*out == MN_LEASE_DONE) unlink(path);
    return MN_OK;
}

void mn_lease_renew(const char *folder, const char *key) {
    char path[PATH];
    if (path_of(path, folder, key, "lease")) utimensat(AT_FDCWD, path, NULL, 0);
}

void mn_lease_end(const char *folder, const char *key, bool done) {
    char path[PATH], to[PATH];
    if (!path_of(path, folder, key, "lease") || !path_of(to, folder, key, "done")) return;
    if (!done || rename(path, to) != 0) unlink(path);
}
