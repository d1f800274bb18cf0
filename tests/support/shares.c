/* shares.c - processes of shares.h. */
#include "support/shares.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/util.h"

enum { MOST = 16 };

static int share, n_shares = 1, n_cases;    // cases share, share + n_shares, ... are ours

bool shares_next(void) {
    return n_cases++ % n_shares == share;
}

void shares_restart(void) {
    n_cases = 0;
}

int shares_threads(void) {
    return n_shares > 1 ? 1 : 4;
}

bool shares_given(int argc, char **argv) {
    return argc > 2 && strchr(argv[2], '/') != NULL;
}

static int run_given(int argc, char **argv, int (*run)(int argc, char **argv)) {
    if (sscanf(argv[2], "%d/%d", &share, &n_shares) != 2 || share < 0 || n_shares < 1) {
        fprintf(stderr, "%s: not a share: write I/N\n", argv[2]);
        return 1;
    }
    return run(argc, argv);
}

/* What a process wrote, onto ours. */
static void show(FILE *said) {
    char line[4096];
    rewind(said);
    while (fgets(line, sizeof line, said)) fputs(line, stderr);
}

int shares_run(int argc, char **argv, int (*run)(int argc, char **argv)) {
    FILE *said[MOST];
    pid_t child[MOST];
    int n_failed = 0;
    if (shares_given(argc, argv)) return run_given(argc, argv, run);
    n_shares = (int)mn_max(1, mn_min(sysconf(_SC_NPROCESSORS_ONLN), MOST));
    for (share = 0; share < n_shares; share++) {
        said[share] = tmpfile();
        child[share] = said[share] ? fork() : -1;
        if (child[share] != 0) continue;
        dup2(fileno(said[share]), STDOUT_FILENO);
        dup2(fileno(said[share]), STDERR_FILENO);
        exit(run(argc, argv) != 0);
    }
    for (int i = 0; i < n_shares; i++) {
        int status = 1;
        const bool ended = child[i] > 0 && waitpid(child[i], &status, 0) == child[i];
        const bool failed = !ended || !WIFEXITED(status) || WEXITSTATUS(status) != 0;
        n_failed += failed;
        if (said[i] && (failed || i == 0)) show(said[i]);
        if (failed) fprintf(stderr, "share %d of %d failed\n", i, n_shares);
    }
    return n_failed;
}
