/* main.c - mneme VERB ...: finds the verb and hands over. */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "cli/command.h"
#include "io/closest.h"
#include "mneme.h"

static const mn_command commands[] = {
#define COMMAND(verb, about) { #verb, about, mn_command_##verb },
#include "cli/commands.def"
#undef COMMAND
};

const mn_command *mn_commands(int *n) {
    *n = (int)MN_COUNTOF(commands);
    return commands;
}

const mn_command *mn_command_find(const char *verb) {
    for (size_t i = 0; i < MN_COUNTOF(commands); i++) {
        if (strcmp(verb, commands[i].verb) == 0) return &commands[i];
    }
    return NULL;
}

int mn_command_unknown(const char *verb) {
    const char *names[MN_COUNTOF(commands)];
    for (size_t i = 0; i < MN_COUNTOF(commands); i++) names[i] = commands[i].verb;
    const char *meant = mn_closest(verb, names, MN_COUNTOF(names));
    fprintf(stderr, "mneme: there is no verb \"%s\"%s%s%s; mneme --help lists them\n", verb,
            meant ? ", did you mean \"" : "", meant ? meant : "", meant ? "\"?" : "");
    return 2;
}

static void print_help(FILE *out) {
    fprintf(out,
            "mneme %s - sequence memory: train, inspect and measure layers that keep a belief\n\n"
            "usage: mneme VERB [options]      mneme help VERB      mneme train book.txt\n\n",
            mn_version());
    for (size_t i = 0; i < MN_COUNTOF(commands); i++) {
        fprintf(out, "  %-10s %s\n", commands[i].verb, commands[i].about);
    }
}

void mn_commands_print(void) {
    print_help(stdout);
}

static int run_verb(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_help(stdout);
        return 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("mneme %s\n", mn_version());
        return 0;
    }
    const mn_command *command = mn_command_find(argv[1]);
    return command ? command->run(argc - 1, argv + 1) : mn_command_unknown(argv[1]);
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
