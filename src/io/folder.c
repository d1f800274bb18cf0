/* folder.c - see folder.h. */
#include "io/folder.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"

enum { PATH = MN_FOLDER_PATH };

static mn_status make_one(const char *path) {
    struct stat about;
    if (mkdir(path, 0777) == 0) return MN_OK;
    if (errno != EEXIST) {
        return mn_fail(MN_ERR_IO, "%s: cannot make the folder: %s", path, strerror(errno));
    }
    if (stat(path, &about) == 0 && S_ISDIR(about.st_mode)) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s: is a file where a folder is needed", path);
}

/* The folders above the last part of `path`. */
static mn_status make_parents(const char *path) {
    char part[PATH];
    if (strlen(path) >= PATH) return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", path);
    for (size_t i = 1; path[i]; i++) {
        if (path[i] != '/') continue;
        memcpy(part, path, i);
        part[i] = '\0';
        mkdir(part, 0777);    // what cannot be made is told of the last one
    }
    return MN_OK;
}

mn_status mn_folder_make(const char *path) {
    if (!path[0]) return mn_fail(MN_ERR_ARGUMENT, "the name of a folder is empty");
    const mn_status st = make_parents(path);
    return st == MN_OK ? make_one(path) : st;
}

mn_status mn_folder_make_above(const char *path) {
    char folder[PATH];
    const char *slash = strrchr(path, '/');
    if (!slash || slash == path) return MN_OK;
    if ((size_t)(slash - path) >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", path);
    }
    snprintf(folder, PATH, "%.*s", (int)(slash - path), path);
    return mn_folder_make(folder);
}

static bool holds(const char *folder, const char *name) {
    char path[PATH];
    struct stat about;
    return snprintf(path, PATH, "%s/%s", folder, name) < PATH && stat(path, &about) == 0;
}

mn_status mn_folder_of_model(char out[PATH], const char *path) {
    static const char *const links[] = { "best", "last" };
    if (snprintf(out, PATH, "%s", path) >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", path);
    }
    if (holds(path, "config.json") || !holds(path, "train.json")) return MN_OK;
    for (int i = 0; i < 2; i++) {
        char inner[32];
        snprintf(inner, sizeof inner, "%s/config.json", links[i]);
        if (!holds(path, inner)) continue;
        const size_t n = strlen(out);
        if (n + strlen(links[i]) + 2 > PATH) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", path);
        }
        out[n] = '/';
        strcpy(out + n + 1, links[i]);
        return MN_OK;
    }
    return mn_fail(MN_ERR_IO, "%s is the folder of a run that has no checkpoint yet; mneme train "
                   "--resume %s goes on with it", path, path);
}
