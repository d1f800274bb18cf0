/* gnuplot.c - runs gnuplot on a script that was written next to its data. */
#include "cli/gnuplot.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/status.h"

enum { NOT_FOUND = 127, NO_FOLDER = 126 };

mn_status mn_make_folder(const char *path) {
    struct stat at;
    if (mkdir(path, 0777) == 0) return MN_OK;
    if (errno == EEXIST && stat(path, &at) == 0 && S_ISDIR(at.st_mode)) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s: cannot make this folder: %s", path, strerror(errno));
}

/* In the child; never returns. */
static void become_gnuplot(const char *folder, const char *script) {
    if (chdir(folder) != 0) _exit(NO_FOLDER);
    execlp("gnuplot", "gnuplot", script, (char *)NULL);
    _exit(NOT_FOUND);
}

mn_status mn_gnuplot_run(const char *folder, const char *script) {
    int status = 0;
    const pid_t child = fork();
    if (child == 0) become_gnuplot(folder, script);
    if (child < 0) return mn_fail(MN_ERR_IO, "cannot start gnuplot: %s", strerror(errno));
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) return mn_fail(MN_ERR_IO, "lost gnuplot: %s", strerror(errno));
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return MN_OK;
    if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_FOUND) {
        return mn_fail(MN_ERR_UNSUPPORTED,
                       "gnuplot is not installed; data and scripts are in %s: install "
                       "it and run \"gnuplot %s\" there",
                       folder, script);
    }
    return mn_fail(MN_ERR_IO, "%s/%s: gnuplot failed", folder, script);
}
