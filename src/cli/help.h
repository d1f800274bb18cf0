/* help.h - what a verb says of itself, in parts: for man pages and completion. */
#ifndef MN_CLI_HELP_H
#define MN_CLI_HELP_H

#include "cli/command.h"
#include "cli/options.h"
#include "io/text.h"

enum { MN_HELP_OPTIONS = 640, MN_HELP_NAME = 40, MN_HELP_ABOUT = 120 };

/* A row of a verb's table of options. */
typedef struct mn_help_option {
    char verb[MN_HELP_NAME];     // "tokenizer train"
    char name[MN_HELP_NAME];
    char about[MN_HELP_ABOUT];   // the beginning of what --help says; "" for nothing
    bool flag, number;           // takes no value; takes a whole number; else a text
} mn_help_option;

typedef struct mn_help_options {
    mn_help_option rows[MN_HELP_OPTIONS];
    int count;
} mn_help_options;

/* What `mneme VERB SUB --help` prints; `sub` may be NULL. */
mn_status mn_help_text(mn_text *out, const mn_command *command, const char *sub);

/* The options of all verbs, as their tables have them. */
mn_status mn_help_collect(mn_help_options *out);

mn_status mn_help_man(const char *verb);                  // NULL: the program's own page
mn_status mn_help_completion(const char *shell);          // bash, zsh or fish

#endif
