/* main.c - mneme VERB ...: finds the verb and hands over. */
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

int main(int argc, char **argv) {
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
