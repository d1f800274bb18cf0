/* run_folder.c - names, links and seals of a run's checkpoints. */
#include "train/run_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "data/hash.h"
#include "io/folder.h"
#include "io/json.h"
#include "io/json_write.h"
#include "train/run_log.h"

enum { PATH = MN_RUN_PATH };

/* ---- paths ----------------------------------------------------------------------------------- */

mn_status mn_run_io_fail(const char *what, const char *path) {
    return mn_fail(MN_ERR_IO, "%s: cannot %s: %s", path, what, strerror(errno));
}

mn_status mn_run_join(char path[PATH], const char *folder, const char *name) {
    if (snprintf(path, PATH, "%s/%s", folder, name) < PATH) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s/%s: the path is too long", folder, name);
}

mn_status mn_run_make_folder(const char *path) {
    struct stat about;
    if (mkdir(path, 0777) == 0) return MN_OK;
    if (errno != EEXIST) return mn_run_io_fail("make the folder", path);
    if (stat(path, &about) == 0 && S_ISDIR(about.st_mode)) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s: is a file where a folder is needed", path);
}

mn_status mn_run_make_folders(const char *out) {
    if (!out[0]) return mn_fail(MN_ERR_ARGUMENT, "out is empty; it names a folder for the run");
    return mn_folder_make(out);
}

mn_status mn_run_sync_folder(const char *path) {
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool synced = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL || errno == ENOTSUP);
    const mn_status st = synced ? MN_OK : mn_run_io_fail("sync", path);
    if (fd >= 0) close(fd);
    return st;
}

void mn_run_remove_folder(const char *path) {
    DIR *dir = opendir(path);
    if (!dir) return;
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        const char *name = entry->d_name;
        char file[PATH];
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) continue;
        if (mn_run_join(file, path, name) == MN_OK) unlink(file);
    }
    closedir(dir);
    rmdir(path);
}

void mn_run_step_name(char name[MN_RUN_STEP], int64_t step) {
    snprintf(name, MN_RUN_STEP, "step-%08" PRId64, step);
}

int64_t mn_run_step_of(const char *name) {
    if (strncmp(name, "step-", 5) != 0 || name[5] < '0' || name[5] > '9') return -1;
    char *end;
    const long long step = strtoll(name + 5, &end, 10);
    return *end == '\0' ? step : -1;
}

mn_status mn_run_checkpoint(char path[PATH], const char *out, int64_t step) {
    char name[MN_RUN_STEP + 16] = "checkpoints/";
    mn_run_step_name(name + strlen(name), step);
    return mn_run_join(path, out, name);
}

bool mn_run_has(const char *out, int64_t step) {
    char folder[PATH], done[PATH];
    return step >= 0 && mn_run_checkpoint(folder, out, step) == MN_OK &&
           mn_run_join(done, folder, "done") == MN_OK && access(done, F_OK) == 0;
}

int64_t mn_run_latest(const char *out) {
    char folder[PATH];
    int64_t latest = -1;
    DIR *dir = mn_run_join(folder, out, "checkpoints") == MN_OK ? opendir(folder) : NULL;
    if (!dir) return -1;
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        const int64_t step = mn_run_step_of(entry->d_name);
        if (step > latest && mn_run_has(out, step)) latest = step;
    }
    closedir(dir);
    return latest;
}

/* ---- links ----------------------------------------------------------------------------------- */

mn_status mn_run_point(const char *out, const char *name, int64_t step) {
    char link[PATH], fresh[PATH], target[MN_RUN_STEP + 16] = "checkpoints/";
    mn_run_step_name(target + strlen(target), step);
    mn_status st = mn_run_join(link, out, name);
    if (st == MN_OK && snprintf(fresh, PATH, "%s.new", link) >= PATH) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", link);
    }
    if (st != MN_OK) return st;
    unlink(fresh);
    if (symlink(target, fresh) != 0) return mn_run_io_fail("make the link", fresh);
    if (rename(fresh, link) != 0) return mn_run_io_fail("replace the link", link);
    return mn_run_sync_folder(out);
}

int64_t mn_run_pointed(const char *out, const char *link) {
    char path[PATH], target[PATH];
    if (mn_run_join(path, out, link) != MN_OK) return -1;
    const ssize_t n = readlink(path, target, sizeof target - 1);
    if (n <= 0) return -1;
    target[n] = '\0';
    const char *slash = strrchr(target, '/');
    return mn_run_step_of(slash ? slash + 1 : target);
}

/* ---- removing -------------------------------------------------------------------------------- */

/* Removes the checkpoints, and what is half written, that `goes` tells of by their step. */
static void remove_checkpoints(const char *out, bool (*goes)(const void *about, int64_t step),
                               const void *about) {
    char folder[PATH], path[PATH];
    if (mn_run_join(folder, out, "checkpoints") != MN_OK) return;
    DIR *dir = opendir(folder);
    if (!dir) return;
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        const char *name = entry->d_name;
        const int64_t step = mn_run_step_of(name);
        const bool half = strncmp(name, ".step-", 6) == 0;
        if (!half && (step < 0 || !goes(about, step))) continue;
        if (mn_run_join(path, folder, name) == MN_OK) mn_run_remove_folder(path);
    }
    closedir(dir);
}

typedef struct keeping {
    int64_t last, best, every;
} keeping;

static bool not_kept(const void *about, int64_t step) {
    const keeping *k = about;
    if (step == k->last || step == k->best) return false;
    return k->every == 0 || step % k->every != 0;
}

void mn_run_prune(const char *out, int64_t keep_every) {
    const keeping k = { mn_run_pointed(out, "last"), mn_run_pointed(out, "best"), keep_every };
    remove_checkpoints(out, not_kept, &k);
}

static bool is_behind(const void *about, int64_t step) {
    return step > *(const int64_t *)about;
}

static mn_status remove_file(const char *out, const char *name) {
    char path[PATH];
    const mn_status st = mn_run_join(path, out, name);
    if (st != MN_OK || unlink(path) == 0 || errno == ENOENT) return st;
    return mn_run_io_fail("remove", path);
}

mn_status mn_run_go_back(const char *out, int64_t step, int64_t best_step) {
    mn_status st = MN_OK;
    if (!mn_run_has(out, step)) return st;
    if (mn_run_pointed(out, "last") != step) st = mn_run_point(out, "last", step);
    const int64_t best = mn_run_pointed(out, "best");
    const bool has = best_step <= step && mn_run_has(out, best_step);
    if (st == MN_OK && has && best != best_step) st = mn_run_point(out, "best", best_step);
    if (st == MN_OK && !has && best > step) st = remove_file(out, "best");
    if (st == MN_OK) remove_checkpoints(out, is_behind, &step);
    return st;
}

mn_status mn_run_clear(const char *out) {
    const int64_t all = -1;
    mn_status st = remove_file(out, "last");
    if (st == MN_OK) st = remove_file(out, "best");
    if (st == MN_OK) st = remove_file(out, MN_RUN_METRICS);
    remove_checkpoints(out, is_behind, &all);
    DIR *dir = opendir(out);
    if (!dir) return st;
    for (struct dirent *entry = readdir(dir); st == MN_OK && entry; entry = readdir(dir)) {
        if (strncmp(entry->d_name, "events.out.tfevents.", 20) != 0) continue;
        st = remove_file(out, entry->d_name);
    }
    closedir(dir);
    return st;
}

/* ---- seals ----------------------------------------------------------------------------------- */

/* In pieces: a mapping of a large file would count as memory of the run. */
static mn_status hash_file(char hash[17], const char *path) {
    enum { PIECE = 1 << 18 };
    mn_hash of = { 0 };
    void *piece = malloc(PIECE);
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n = fd >= 0 && piece ? 1 : -1;
    while (n > 0) {
        n = read(fd, piece, PIECE);
        if (n > 0) mn_hash_add(&of, piece, (size_t)n);
        if (n < 0 && errno == EINTR) n = 1;
    }
    mn_status st = MN_OK;
    if (!piece) st = mn_fail(MN_ERR_MEMORY, "no memory to read %s", path);
    else if (n < 0) st = mn_run_io_fail("read", path);
    if (fd >= 0) close(fd);
    free(piece);
    snprintf(hash, 17, "%016" PRIx64, mn_hash_value(&of));
    return st;
}

mn_status mn_run_seal(const char *folder) {
    struct dirent **entries;
    const int n = scandir(folder, &entries, NULL, alphasort);
    if (n < 0) return mn_run_io_fail("read", folder);
    json_t *root = json_object();
    bool fits = root;
    mn_status st = MN_OK;
    char path[PATH], hash[17];
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        if (name[0] != '.' && st == MN_OK) {
            st = mn_run_join(path, folder, name);
            if (st == MN_OK) st = hash_file(hash, path);
            fits = fits && st == MN_OK && json_object_set_new(root, name, json_string(hash)) == 0;
        }
        free(entries[i]);
    }
    free(entries);
    if (st == MN_OK && !fits) st = mn_fail(MN_ERR_MEMORY, "no memory to write %s/done", folder);
    if (st == MN_OK) st = mn_run_join(path, folder, "done");
    if (st == MN_OK) st = mn_json_save(path, root);
    json_decref(root);
    return st;
}

mn_status mn_run_check_seal(const char *folder) {
    char path[PATH], hash[17];
    mn_json root = { 0 };
    mn_status st = mn_run_join(path, folder, "done");
    if (st == MN_OK && access(path, F_OK) != 0) {
        return mn_fail(MN_ERR_IO, "%s holds no complete checkpoint to go on from", folder);
    }
    if (st == MN_OK) st = mn_json_load(&root, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_json_expect_object(&root);
    if (st == MN_OK && mn_json_count(&root) == 0) st = mn_json_fail(&root, "names no file");
    for (mn_json at = { 0 }; st == MN_OK && mn_json_next(&at, &root);) {
        const char *sealed;
        st = mn_json_read_text(&sealed, &at);
        if (st == MN_OK && strchr(at.name, '/')) st = mn_json_fail(&at, "is no file's name");
        if (st == MN_OK) st = mn_run_join(path, folder, at.name);
        if (st == MN_OK) st = hash_file(hash, path);
        if (st == MN_OK && strcmp(hash, sealed) != 0) {
            st = mn_fail(MN_ERR_FORMAT, "%s: is not as it was written", path);
        }
    }
    mn_json_free(&root);
    return st;
}
