/* main.c - mneme VERB ...: finds the verb and hands over. */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "cli/command.h"
#include "mneme.h"

static const struct {
    const char *verb, *about;
    int (*run)(int argc, char **argv);
} commands[] = {
#define COMMAND(verb, about) { #verb, about, mn_command_##verb },
#include "cli/commands.def"
#undef COMMAND
};

static void print_help(FILE *out) {
    fprintf(out,
            "mneme %s - sequence memory: train, inspect and measure layers that keep a belief\n\n"
            "usage: mneme VERB [options]      mneme VERB --help\n\n",
            mn_version());
    for (size_t i = 0; i < MN_COUNTOF(commands); i++) {
        fprintf(out, "  %-10s %s\n", commands[i].verb, commands[i].about);
    }
}

static int run_verb(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("mneme %s\n", mn_version());
        return 0;
    }
    for (size_t i = 0; i < MN_COUNTOF(commands); i++) {
        if (strcmp(argv[1], commands[i].verb) == 0) return commands[i].run(argc - 1, argv + 1);
    }
    fprintf(stderr, "mneme: there is no verb \"%s\"; mneme --help lists them\n", argv[1]);
    return 2;
}

/* What was printed has to arrive: a full disk at the other end of a pipe or a file is a failure. A
 * standard output that was closed before the start takes nothing, which only matters to a verb that
 * has something to say. */
static int close_output(int status) {
    bool good = fflush(stdout) == 0 && !ferror(stdout);
    const int why = errno;
    if (good && fclose(stdout) != 0) good = errno == EBADF;
    if (good) return status;
    fprintf(stderr, "mneme: standard output: cannot write: %s\n", strerror(why));
    return status ? status : 1;
}

int main(int argc, char **argv) {
    signal(SIGXFSZ, SIG_IGN);    // a file that may not grow fails as a full disk does
    return close_output(run_verb(argc, argv));
}
