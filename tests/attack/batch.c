/* batch.c - attacks in child processes. */
#include "attack/batch.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_SECONDS = 10 };

/* Tries cases from `first` on in a child; returns its status, *at the case it was in. */
static int run_child(int64_t first, int64_t end, void (*try)(int64_t i), volatile int64_t *at) {
    fflush(NULL);
    const pid_t child = fork();
    if (child < 0) {
        perror("fork");
        exit(2);
    }
    if (child == 0) {
        const int null = open("/dev/null", O_WRONLY);
        if (null >= 0) dup2(null, STDOUT_FILENO);
        for (int64_t i = first; i < end; i++) {
            *at = i;
            alarm(MOST_SECONDS);
            try(i);
        }
        *at = end;
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
}

int64_t attack_all(int64_t n, int64_t each, void (*try)(int64_t i), void (*tell)(int64_t i)) {
    volatile int64_t *at = mmap(NULL, sizeof *at, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int64_t broken = 0;
    if (at == MAP_FAILED) return 1;
    for (int64_t first = 0; first < n;) {
        const int64_t end = first + each < n ? first + each : n;
        const int status = run_child(first, end, try, at);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
            first = end;
            continue;
        }
        broken++;
        printf("case %lld: ", (long long)*at);
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) printf("over %d s", MOST_SECONDS);
        else if (WIFSIGNALED(status)) printf("%s", strsignal(WTERMSIG(status)));
        else printf("exit status %d", WEXITSTATUS(status));
        printf(", ");
        tell(*at);
        first = *at + 1;
    }
    munmap((void *)at, sizeof *at);
    return broken;
}
