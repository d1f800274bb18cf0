/* run_folder.c - names, links and seals of a run's checkpoints. */
#include "train/run/run_folder.h"

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
#include "base/util.h"
#include "data/hash.h"
#include "io/folder.h"
#include "io/json.h"
#include "io/json_write.h"
#include "train/run/run_log.h"

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

enum { HEAD_BYTES = 1 << 16 };

/* What a seal says of a file: its size, and hashes of its head and of all of it. */
typedef struct sealed {
    int64_t bytes;
    char head[17], hash[17];
} sealed;

static void put_hash(char text[17], const mn_hash *hash) {
    snprintf(text, 17, "%016" PRIx64, mn_hash_value(hash));
}

/* In pieces: a mapping of a large file would count as memory of the run. With `quick` only the size
 * and the head. */
static mn_status seal_file(sealed *out, const char *path, bool quick) {
    mn_hash head = { 0 }, all = { 0 };
    struct stat about;
    void *piece = malloc(HEAD_BYTES);
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n = fd >= 0 && piece && fstat(fd, &about) == 0 ? 1 : -1;
    int64_t at = 0;
    while (n > 0 && (!quick || at < HEAD_BYTES)) {
        n = read(fd, piece, HEAD_BYTES);
        if (n > 0) mn_hash_add(&all, piece, (size_t)n);
        if (n > 0 && at < HEAD_BYTES) {
            mn_hash_add(&head, piece, (size_t)mn_min(n, HEAD_BYTES - at));
        }
        if (n > 0) at += n;
        if (n < 0 && errno == EINTR) n = 1;
    }
    mn_status st = MN_OK;
    if (!piece) st = mn_fail(MN_ERR_MEMORY, "no memory to read %s", path);
    else if (n < 0) st = mn_run_io_fail("read", path);
    if (fd >= 0) close(fd);
    free(piece);
    out->bytes = st == MN_OK ? (int64_t)about.st_size : 0;
    put_hash(out->head, &head);
    put_hash(out->hash, &all);
    return st;
}

static json_t *sealed_json(const sealed *s) {
    return json_pack("{s:I, s:s, s:s}", "bytes", (json_int_t)s->bytes, "head", s->head, "hash",
                     s->hash);
}

/* The files of a folder beside the seal itself, by name. */
static int list_files(const char *folder, struct dirent ***entries) {
    const int n = scandir(folder, entries, NULL, alphasort);
    int kept = 0;
    for (int i = 0; i < n; i++) {
        struct dirent *entry = (*entries)[i];
        if (entry->d_name[0] == '.' || strcmp(entry->d_name, "done") == 0) free(entry);
        else (*entries)[kept++] = entry;
    }
    return n < 0 ? n : kept;
}

mn_status mn_run_seal(const char *folder) {
    struct dirent **entries;
    const int n = list_files(folder, &entries);
    if (n < 0) return mn_run_io_fail("read", folder);
    json_t *root = json_object();
    bool fits = root;
    mn_status st = MN_OK;
    char path[PATH];
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        sealed file;
        if (st == MN_OK) st = mn_run_join(path, folder, name);
        if (st == MN_OK) st = seal_file(&file, path, false);
        fits = fits && st == MN_OK && json_object_set_new(root, name, sealed_json(&file)) == 0;
        free(entries[i]);
    }
    free(entries);
    if (st == MN_OK && !fits) st = mn_fail(MN_ERR_MEMORY, "no memory to write %s/done", folder);
    if (st == MN_OK) st = mn_run_join(path, folder, "done");
    if (st == MN_OK) st = mn_json_save(path, root);
    json_decref(root);
    return st;
}

static bool ends_in(const char *name, const char *ending) {
    const size_t n = strlen(name), m = strlen(ending);
    return n >= m && strcmp(name + n - m, ending) == 0;
}

/* One file against its entry, which seals of before had as the hash alone. */
static mn_status check_file(const char *folder, const mn_json *at, bool quick) {
    char path[PATH];
    sealed file;
    const char *hash = NULL, *head = NULL;
    int64_t bytes = -1;
    mn_status st = MN_OK;
    if (json_is_string(at->value)) {
        st = mn_json_read_text(&hash, at);
    } else {
        st = mn_json_expect_object(at);
        if (st == MN_OK) st = mn_json_get_i64(&bytes, at, "bytes");
        if (st == MN_OK) st = mn_json_get_text(&head, at, "head");
        if (st == MN_OK) st = mn_json_get_text(&hash, at, "hash");
    }
    if (st == MN_OK && strchr(at->name, '/')) st = mn_json_fail(at, "is no file's name");
    if (st == MN_OK) st = mn_run_join(path, folder, at->name);
    if (st == MN_OK) st = seal_file(&file, path, quick);
    if (st != MN_OK) return st;
    const bool same = (bytes < 0 || file.bytes == bytes) &&
                      (!head || strcmp(file.head, head) == 0) &&
                      (quick || strcmp(file.hash, hash) == 0);
    return same ? MN_OK : mn_fail(MN_ERR_FORMAT, "%s: is not as it was written", path);
}

/* Files that are read must be in the seal: without an entry nothing vouches for them. What is made
 * of a model that is whole comes later. */
static mn_status check_entries(const char *folder, const mn_json *root) {
    static const char *const kinds[] = { ".json", ".safetensors", ".bin" };
    static const char later[] = "calibration.json";
    struct dirent **entries;
    const int n = list_files(folder, &entries);
    if (n < 0) return mn_run_io_fail("read", folder);
    mn_status st = MN_OK;
    if (!json_object_get(root->value, "config.json")) {
        st = mn_json_fail(root, "has no entry for config.json");
    }
    for (int i = 0; i < n; i++) {
        const char *name = entries[i]->d_name;
        bool reads = false;
        for (size_t k = 0; k < MN_COUNTOF(kinds); k++) reads |= ends_in(name, kinds[k]);
        reads = reads && strcmp(name, later) != 0;
        if (st == MN_OK && reads && !json_object_get(root->value, name)) {
            st = mn_json_fail(root, "has no entry for %s", name);
        }
        free(entries[i]);
    }
    free(entries);
    return st;
}

mn_status mn_run_check_seal(const char *folder, bool quick) {
    char path[PATH];
    mn_json root = { 0 };
    mn_status st = mn_run_join(path, folder, "done");
    if (st == MN_OK && access(path, F_OK) != 0) {
        return mn_fail(MN_ERR_IO, "%s holds no complete checkpoint to go on from", folder);
    }
    if (st == MN_OK) st = mn_json_load(&root, path, MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_json_expect_object(&root);
    if (st == MN_OK) st = check_entries(folder, &root);
    for (mn_json at = { 0 }; st == MN_OK && mn_json_next(&at, &root);) {
        st = check_file(folder, &at, quick);
    }
    mn_json_free(&root);
    return st;
}

mn_status mn_run_check_model(const char *folder, bool all) {
    static const char *const places[] = { "done", "best/done", "last/done" };    // a run's folder
    char path[PATH];
    for (size_t i = 0; i < MN_COUNTOF(places); i++) {
        const bool there = mn_run_join(path, folder, places[i]) == MN_OK && access(path, F_OK) == 0;
        if (!there) continue;
        path[strlen(path) - strlen("/done")] = '\0';
        return mn_run_check_seal(path, !all);
    }
    if (!all) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "--verify: %s has no seal, the file \"done\" of checkpoints of "
                   "mneme train", folder);
}
