/* disk.c - see disk.h. Files are called mneme-KIND-MARK-ID.state. */
#define _XOPEN_SOURCE 700    // st_mtim
#include "server/disk.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "io/file.h"

static const char ending[] = ".state";

mn_status mn_disk_open(mn_disk *out, const char *folder, const char *kind, uint64_t mark) {
    mn_status st = mn_folder_make(folder);
    if (st == MN_OK && access(folder, W_OK | X_OK) != 0) {
        st = mn_fail(MN_ERR_IO, "%s: states cannot be written there: %s", folder, strerror(errno));
    }
    out->folder = st == MN_OK ? folder : NULL;
    snprintf(out->begin, sizeof out->begin, "mneme-%s-%016" PRIx64 "-", kind, mark);
    return st;
}

mn_status mn_disk_new_id(char id[MN_DISK_ID]) {
    uint8_t bytes[(MN_DISK_ID - 1) / 2];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes) {
        return mn_fail(MN_ERR_IO, "the system gives no random numbers for the id of a state");
    }
    for (size_t i = 0; i < sizeof bytes; i++) snprintf(id + 2 * i, 3, "%02x", bytes[i]);
    return MN_OK;
}

bool mn_disk_path(char path[MN_FOLDER_PATH], const mn_disk *disk, const char *id) {
    const int n = snprintf(path, MN_FOLDER_PATH, "%s/%s%s%s", disk->folder, disk->begin, id,
                           ending);
    return n > 0 && n < MN_FOLDER_PATH;
}

/* ---- marks ----------------------------------------------------------------------------------- */

enum { LANES = 4 };

static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 29;
}

/* Four lanes of words side by side, so that a model of some gigabytes takes as long as its file. */
static void mark_bytes(uint64_t *mark, const uint8_t *bytes, size_t size) {
    uint64_t lane[LANES] = { *mark, 1, 2, 3 }, word[LANES];
    size_t at = 0;
    for (; at + sizeof word <= size; at += sizeof word) {
        memcpy(word, bytes + at, sizeof word);
        for (int i = 0; i < LANES; i++) lane[i] = mix(lane[i], word[i]);
    }
    for (; at < size; at++) lane[0] = mix(lane[0], bytes[at]);
    *mark = mix(lane[0], size);
    for (int i = 1; i < LANES; i++) *mark = mix(*mark, lane[i]);
}

void mn_disk_mark_text(uint64_t *mark, const char *text) {
    mark_bytes(mark, (const uint8_t *)text, strlen(text));
}

static mn_status mark_file(uint64_t *mark, const char *path) {
    mn_file file = { 0 };
    const mn_status st = mn_file_map(&file, path);
    if (st == MN_OK) mark_bytes(mark, file.bytes, file.size);
    mn_file_unmap(&file);
    return st;
}

mn_status mn_disk_mark_program(uint64_t *mark) {
    return mark_file(mark, "/proc/self/exe");
}

static bool ends_in(const char *name, const char *end) {
    const size_t n = strlen(name), m = strlen(end);
    return n > m && strcmp(name + n - m, end) == 0;
}

static int is_of_model(const struct dirent *entry) {
    return ends_in(entry->d_name, ".safetensors") || ends_in(entry->d_name, ".json");
}

mn_status mn_disk_mark_model(uint64_t *mark, const char *folder) {
    struct dirent **files = NULL;
    const int n = scandir(folder, &files, is_of_model, alphasort);
    if (n < 0) return mn_fail(MN_ERR_IO, "%s: cannot be listed: %s", folder, strerror(errno));
    mn_status st = MN_OK;
    for (int i = 0; i < n; i++) {
        char path[MN_FOLDER_PATH];
        const int length = snprintf(path, sizeof path, "%s/%s", folder, files[i]->d_name);
        mn_disk_mark_text(mark, files[i]->d_name);
        if (st == MN_OK && length < (int)sizeof path) st = mark_file(mark, path);
        free(files[i]);
    }
    free(files);
    return st;
}

/* ---- what is there --------------------------------------------------------------------------- */

typedef struct found_file {
    struct timespec written;
    char id[MN_DISK_ID];
} found_file;

static int by_time(const void *a, const void *b) {
    const struct timespec *x = &((const found_file *)a)->written;
    const struct timespec *y = &((const found_file *)b)->written;
    if (x->tv_sec != y->tv_sec) return x->tv_sec < y->tv_sec ? -1 : 1;
    return x->tv_nsec < y->tv_nsec ? -1 : x->tv_nsec > y->tv_nsec;
}

/* The id of a file that is called as ours are. */
static bool id_of(char id[MN_DISK_ID], const mn_disk *disk, const char *name) {
    const size_t n = strlen(disk->begin);
    if (strncmp(name, disk->begin, n) != 0) return false;
    const size_t digits = strspn(name + n, "0123456789abcdef");
    if (digits != MN_DISK_ID - 1 || strcmp(name + n + digits, ending) != 0) return false;
    memcpy(id, name + n, digits);
    id[digits] = '\0';
    return true;
}

static mn_status list(found_file **out, int64_t *count, const mn_disk *disk) {
    DIR *folder = opendir(disk->folder);
    int64_t room = 0;
    *out = NULL;
    *count = 0;
    if (!folder) return mn_fail(MN_ERR_IO, "%s: %s", disk->folder, strerror(errno));
    mn_status st = MN_OK;
    for (struct dirent *entry; st == MN_OK && (entry = readdir(folder)) != NULL;) {
        found_file file;
        struct stat about;
        char path[MN_FOLDER_PATH];
        if (!id_of(file.id, disk, entry->d_name) || !mn_disk_path(path, disk, file.id) ||
            stat(path, &about) != 0 || !S_ISREG(about.st_mode)) {
            continue;
        }
        file.written = about.st_mtim;
        if (*count == room) {
            room = 2 * room + 64;
            found_file *grown = realloc(*out, (size_t)room * sizeof *grown);
            if (grown) *out = grown;
            else st = mn_fail(MN_ERR_MEMORY, "no memory for a list of states");
        }
        if (st == MN_OK) (*out)[(*count)++] = file;
    }
    closedir(folder);
    return st;
}

mn_status mn_disk_each(const mn_disk *disk, mn_disk_found found, void *context) {
    found_file *files;
    int64_t n;
    const mn_status st = list(&files, &n, disk);
    if (st == MN_OK && n > 0) qsort(files, (size_t)n, sizeof *files, by_time);
    for (int64_t i = 0; st == MN_OK && i < n; i++) {
        char path[MN_FOLDER_PATH];
        if (mn_disk_path(path, disk, files[i].id)) found(context, files[i].id, path);
    }
    free(files);
    return st;
}
