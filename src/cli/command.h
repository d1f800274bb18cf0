/* command.h - one function per verb, in one file each. */
#ifndef MN_CLI_COMMAND_H
#define MN_CLI_COMMAND_H

/* argv[0] is the verb. The result is the exit status: 0 only when the thing asked for was done. */
#define COMMAND(verb, about) int mn_command_##verb(int argc, char **argv);
#include "cli/commands.def"
#undef COMMAND

/* The rows of commands.def. */
typedef struct mn_command {
    const char *verb, *about;
    int (*run)(int argc, char **argv);
} mn_command;

const mn_command *mn_commands(int *n);
const mn_command *mn_command_find(const char *verb);    // NULL: there is none

/* Says that there is no such verb, and which one may have been meant; 2. */
int mn_command_unknown(const char *verb);

void mn_commands_print(void);    // the list that mneme --help shows

#endif
