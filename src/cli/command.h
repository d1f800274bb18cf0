/* command.h - one function per verb, in one file each. */
#ifndef MN_CLI_COMMAND_H
#define MN_CLI_COMMAND_H

/* argv[0] is the verb. The result is the exit status: 0 only when the thing asked for was done. */
#define COMMAND(verb, about) int mn_command_##verb(int argc, char **argv);
#include "cli/commands.def"
#undef COMMAND

#endif
