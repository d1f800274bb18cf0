/* gnuplot.c - runs gnuplot on a script that was written next to its data. */
#include "cli/plot/gnuplot.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/status.h"
#include "io/folder.h"

enum { NOT_FOUND = 127, NO_FOLDER = 126 };

mn_status mn_make_folder(const char *path) {
    return mn_folder_make(path);
}

void mn_gnuplot_put_text(FILE *out, const char *text) {
    static const char plain[] = " _.,:+-/()[]=";
    fputc('"', out);
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                            (c >= '0' && c <= '9');
        if (c < 0x20 || c == 0x7f) fputc(' ', out);
        else if (letter || strchr(plain, c)) fputc(c, out);
        else fprintf(out, "\\%03o", c);
    }
    fputc('"', out);
}

/* A line of comment, whatever the text holds. */
static void put_comment(FILE *out, const char *text) {
    fputs("# ", out);
    for (; *text; text++) fputc((unsigned char)*text < 0x20 || *text == '\\' ? ' ' : *text, out);
    fputc('\n', out);
}

void mn_gnuplot_begin(FILE *out, const char *name, const char *about, int width, int height,
                      int panels) {
    put_comment(out, about);
    fprintf(out, "# gnuplot %s.gp\n", name);
    fprintf(out, "do for [kind in 'svg png'] {\n"
            "reset\n"
            "set datafile separator ','\n"
            "if (kind eq 'svg') {\n"
            "set terminal svg size %d,%d font 'Helvetica,14' enhanced background '#ffffff'\n"
            "} else {\n"
            "set terminal pngcairo size %d,%d font 'Sans,25' linewidth 2 enhanced background "
            "'#ffffff'\n"
            "}\n", width, height, 2 * width, 2 * height);
    fprintf(out, "set output '%s.'.kind\n", name);
    fprintf(out, "set border 3 lc rgb '#404040'\nset tics nomirror tc rgb '#404040'\n"
            "set grid ytics lc rgb '#e6e6e6' lt 1 lw 0.5\nset key off\n"
            "set multiplot layout 1,%d\n", panels);
}

void mn_gnuplot_end(FILE *out) {
    fputs("unset multiplot\nunset output\n}\n", out);
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
