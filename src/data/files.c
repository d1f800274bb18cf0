/* files.c - the files that a list of files and folders stands for. */
#define _XOPEN_SOURCE 700
#include "data/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"

enum { MAX_DEPTH = 64, HEAD_BYTES = 4096 };    // folders in folders; links may go round

static bool ends_in(const char *path, const char *ending) {
    const size_t n = strlen(path), m = strlen(ending);
    return n > m && strcmp(path + n - m, ending) == 0;
}

static char *join(const char *folder, const char *name) {
    const size_t n = strlen(folder), room = n + strlen(name) + 2;
    char *path = malloc(room);
    const bool slash = n > 0 && folder[n - 1] == '/';
    if (path) snprintf(path, room, "%s%s%s", folder, slash ? "" : "/", name);
    return path;
}

static bool is_prepared(const char *folder) {
    struct stat info;
    char *index = join(folder, "index.json");
    const bool there = index && stat(index, &info) == 0 && S_ISREG(info.st_mode);
    free(index);
    return there;
}

/* What is no text although it was not named as something else. */
static mn_status refuse_binary(const uint8_t *head, size_t size, const char *path) {
    static const struct {
        const char *bytes, *what;
    } kinds[] = { { "\x1f\x8b", "compressed (gzip)" }, { "\x28\xb5\x2f\xfd", "compressed (zstd)" },
                  { "\xfd" "7zXZ", "compressed (xz)" }, { "PK\x03\x04", "a zip archive" },
                  { "PAR1", "a Parquet file" }, { "\x93NUMPY", "a NumPy array" } };
    for (size_t i = 0; i < MN_COUNTOF(kinds); i++) {
        const size_t n = strlen(kinds[i].bytes);
        if (size >= n && memcmp(head, kinds[i].bytes, n) == 0) {
            return mn_fail(MN_ERR_FORMAT,
                           "%s: is %s; unpack it to text, JSON lines or .bin first", path,
                           kinds[i].what);
        }
    }
    const uint8_t *zero = size > 0 ? memchr(head, 0, size) : NULL;
    if (!zero) return MN_OK;
    return mn_fail(MN_ERR_FORMAT,
                   "%s: a zero byte at offset %d: this is no text; name the format if it is", path,
                   (int)(zero - head));
}

static mn_status detect(mn_corpus_format *format, const char *path) {
    if (ends_in(path, ".bin")) {
        return MN_OK;    // stays AUTO: mn_bin_open looks for the magic number
    }
    uint8_t head[HEAD_BYTES];
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const ssize_t n = fd < 0 ? -1 : pread(fd, head, sizeof head, 0);
    const int error = errno;
    if (fd >= 0) close(fd);
    if (n < 0) return mn_fail(MN_ERR_IO, "%s: cannot read: %s", path, strerror(error));
    size_t at = 0;
    while (at < (size_t)n && strchr(" \t\r\n", head[at]) && head[at]) at++;
    const bool brace = at < (size_t)n && head[at] == '{';
    const bool lines = ends_in(path, ".jsonl") || ends_in(path, ".ndjson") ||
                       (ends_in(path, ".json") && brace);
    *format = lines ? MN_CORPUS_JSONL : MN_CORPUS_TEXT;
    return refuse_binary(head, (size_t)n, path);
}

static mn_status add(mn_data_files *files, const char *path, const struct stat *info,
                     mn_corpus_format format) {
    if (format == MN_CORPUS_AUTO) {
        const mn_status st = detect(&format, path);
        if (st != MN_OK) return st;
    }
    if (files->count == files->capacity) {
        const int64_t capacity = 2 * files->capacity + 16;
        mn_data_file *grown = realloc(files->items, (size_t)capacity * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "%s: out of memory for its name", path);
        files->items = grown;
        files->capacity = capacity;
    }
    mn_data_file *file = &files->items[files->count];
    *file = (mn_data_file){ .path = strdup(path), .bytes = info->st_size, .format = format,
                            .changed_ns = (int64_t)info->st_mtim.tv_sec * 1000000000 +
                                          info->st_mtim.tv_nsec };
    if (!file->path) return mn_fail(MN_ERR_MEMORY, "%s: out of memory for its name", path);
    files->count++;
    return MN_OK;
}

static int not_hidden(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

static int by_bytes(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static mn_status walk(mn_data_files *files, const char *path, mn_corpus_format format, int depth);

static mn_status scan_entry(mn_data_files *files, const char *path, mn_corpus_format format,
                            int depth) {
    struct stat info;
    if (stat(path, &info) != 0) return MN_OK;    // a link to nothing
    if (S_ISDIR(info.st_mode)) return walk(files, path, format, depth + 1);
    if (!S_ISREG(info.st_mode) || ends_in(path, "/meta.json")) return MN_OK;
    return add(files, path, &info, format);
}

static mn_status walk(mn_data_files *files, const char *path, mn_corpus_format format, int depth) {
    struct dirent **entries = NULL;
    if (depth > MAX_DEPTH) {
        return mn_fail(MN_ERR_IO, "%s: folders more than %d deep; does a link go round?", path,
                       MAX_DEPTH);
    }
    const int n = scandir(path, &entries, not_hidden, by_bytes);
    if (n < 0) return mn_fail(MN_ERR_IO, "%s: cannot list: %s", path, strerror(errno));
    mn_status st = MN_OK;
    for (int i = 0; i < n; i++) {
        char *entry = st == MN_OK ? join(path, entries[i]->d_name) : NULL;
        if (entry) st = scan_entry(files, entry, format, depth);
        else if (st == MN_OK) st = mn_fail(MN_ERR_MEMORY, "%s: out of memory", path);
        free(entry);
        free(entries[i]);
    }
    free(entries);
    return st;
}

static mn_status list_path(mn_data_files *files, const char *path, mn_corpus_format format) {
    struct stat info;
    if (!path || !*path) return mn_fail(MN_ERR_ARGUMENT, "no file name given");
    if (stat(path, &info) != 0) {
        return errno == ENOENT ? mn_fail(MN_ERR_IO, "%s: no such file or folder", path)
                               : mn_fail(MN_ERR_IO, "%s: %s", path, strerror(errno));
    }
    const bool folder = S_ISDIR(info.st_mode);
    if (folder && (format == MN_CORPUS_PREPARED ||
                   (format == MN_CORPUS_AUTO && is_prepared(path)))) {
        return add(files, path, &info, MN_CORPUS_PREPARED);
    }
    if (folder) return walk(files, path, format, 0);
    if (format == MN_CORPUS_PREPARED) {
        return mn_fail(MN_ERR_IO, "%s: is a file, expected a folder written by mneme prepare",
                       path);
    }
    if (S_ISREG(info.st_mode)) return add(files, path, &info, format);
    return mn_fail(MN_ERR_IO, "%s: is a pipe or device, expected a file or folder", path);
}

mn_status mn_data_files_list(mn_data_files *out, const char *const *paths, int64_t n_paths,
                             mn_corpus_format format) {
    *out = (mn_data_files){ 0 };
    mn_status st = MN_OK;
    for (int64_t i = 0; i < n_paths && st == MN_OK; i++) st = list_path(out, paths[i], format);
    if (st == MN_OK && out->count == 0) {
        st = n_paths > 0 ? mn_fail(MN_ERR_IO, "%s: holds no file to read", paths[0])
                         : mn_fail(MN_ERR_ARGUMENT, "no file given");
    }
    if (st != MN_OK) mn_data_files_free(out);
    return st;
}

void mn_data_files_free(mn_data_files *files) {
    for (int64_t i = 0; i < files->count; i++) free(files->items[i].path);
    free(files->items);
    *files = (mn_data_files){ 0 };
}
