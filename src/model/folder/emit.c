/* emit.c - a model folder, written tensor by tensor. */
#include "model/folder/emit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "io/file.h"
#include "io/json_write.h"
#include "runtime/reserve.h"

enum { PATH = 4096 };

static mn_status join(char path[PATH], const char *folder, const char *name) {
    if (snprintf(path, PATH, "%s/%s", folder, name) < PATH) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s/%s: the path is too long", folder, name);
}

int64_t mn_emit_bytes(const mn_emit *e, int64_t *largest) {
    int64_t all = 0;
    *largest = 0;
    for (int i = 0; i < e->n; i++) {
        const int64_t bytes =
            e->tensors[i].count * (int64_t)mn_stored_dtype_bytes(e->tensors[i].dtype);
        all += bytes;
        *largest = mn_max(*largest, bytes);
    }
    return all;
}

/* Of the folder, or of the nearest above it that is there. */
static mn_status check_disk(const char *folder, int64_t bytes) {
    char at[PATH];
    struct statvfs disk;
    snprintf(at, sizeof at, "%s", folder);
    while (statvfs(at[0] ? at : ".", &disk) != 0) {
        char *slash = strrchr(at, '/');
        if (at[0] == '\0') return MN_OK;
        *(slash ? slash : at) = '\0';
    }
    const double room = (double)disk.f_bavail * (double)disk.f_frsize;
    if ((double)bytes <= room) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s: the tensors take %.2f GB and the disk has %.2f GB left; free "
                   "some, or write to another disk", folder, (double)bytes / 1e9, room / 1e9);
}

/* Whether two paths are one folder. */
static bool same_folder(const char *a, const char *b) {
    char *x = realpath(a, NULL), *y = realpath(b, NULL);
    const bool same = x && y && strcmp(x, y) == 0;
    free(x);
    free(y);
    return same;
}

mn_status mn_emit_check(const mn_emit *e, bool overwrite) {
    if (e->source && same_folder(e->folder, e->source->folder)) {
        return mn_fail(MN_ERR_ARGUMENT, "%s is what would be read; write to another folder",
                       e->folder);
    }
    char path[PATH];
    int64_t largest;
    const int64_t bytes = mn_emit_bytes(e, &largest);
    mn_status st = join(path, e->folder, "config.json");
    if (st != MN_OK) return st;
    if (!overwrite && access(path, F_OK) == 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: there is a model already; write to another folder, or "
                       "say --overwrite", e->folder);
    }
    st = check_disk(e->folder, bytes);
    /* the tensor, and as much again in float32 where it is turned or made */
    return st == MN_OK ? mn_memory_check(3 * (size_t)largest, "writing the largest tensor") : st;
}

typedef struct writing {
    const mn_emit *emit;
    void *buffer;
    int64_t done, all;
} writing;

static mn_status give_tensor(const void **data, void *context, int64_t i) {
    writing *w = context;
    const mn_emit *e = w->emit;
    const mn_emit_tensor *t = &e->tensors[i];
    const mn_status st = e->fill(w->buffer, e->context, (int)i);
    *data = w->buffer;
    w->done += t->count * (int64_t)mn_stored_dtype_bytes(t->dtype);
    if (st != MN_OK || !e->progress || e->progress(e->progress_context, w->done, w->all)) return st;
    return mn_fail(MN_ERR_IO, "%s: stopped", e->folder);
}

static mn_status write_weights(const mn_emit *e) {
    char path[PATH];
    int64_t largest;
    writing w = { .emit = e, .all = mn_emit_bytes(e, &largest) };
    mn_stored_tensor *tensors = calloc((size_t)e->n + 1, sizeof *tensors);
    w.buffer = malloc((size_t)largest + 1);
    mn_status st = tensors && w.buffer ? join(path, e->folder, "model.safetensors")
                                       : mn_fail(MN_ERR_MEMORY, "%s: no memory for the largest "
                                                 "tensor, of %lld bytes", e->folder,
                                                 (long long)largest);
    for (int i = 0; st == MN_OK && i < e->n; i++) {
        const mn_emit_tensor *t = &e->tensors[i];
        tensors[i] = (mn_stored_tensor){ .name = t->name, .dtype = t->dtype, .rank = t->rank,
                                         .bytes = (size_t)t->count *
                                                  mn_stored_dtype_bytes(t->dtype) };
        memcpy(tensors[i].shape, t->shape, sizeof t->shape);
    }
    const mn_stored_text format = { "format", "pt" };
    if (st == MN_OK) {
        st = mn_safetensors_write_from(path, tensors, e->n, &format, 1, give_tensor, &w);
    }
    free(w.buffer);
    free(tensors);
    return st;
}

static mn_status copy_file(const char *folder, const char *from, const char *name) {
    char there[PATH], here[PATH];
    mn_status st = join(there, from, name);
    if (st == MN_OK) st = join(here, folder, name);
    if (st != MN_OK || access(there, F_OK) != 0) return st;
    mn_file file;
    st = mn_file_map(&file, there);
    if (st == MN_OK) st = mn_file_write_bytes(here, file.bytes, file.size);
    mn_file_unmap(&file);
    return st;
}

mn_status mn_emit_files(const char *folder, const char *from) {
    static const char *const names[] = {
#define FILE_OF(name) name,
#include "model/folder/files.def"
#undef FILE_OF
    };
    mn_status st = MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(names) && st == MN_OK; i++) {
        st = copy_file(folder, from, names[i]);
    }
    return st;
}

/* An index of shards that was there would be read in place of the one file. */
static void remove_index(const char *folder) {
    char path[PATH];
    if (join(path, folder, "model.safetensors.index.json") == MN_OK) unlink(path);
}

mn_status mn_emit_write(const mn_emit *e, const json_t *config) {
    char path[PATH];
    mn_status st = mn_folder_make(e->folder);
    if (st == MN_OK) st = join(path, e->folder, "config.json");
    if (st == MN_OK) unlink(path);
    if (st == MN_OK) st = write_weights(e);
    if (st == MN_OK) remove_index(e->folder);
    if (st == MN_OK && e->source) st = mn_emit_files(e->folder, e->source->folder);
    return st == MN_OK ? mn_json_save(path, config) : st;
}
