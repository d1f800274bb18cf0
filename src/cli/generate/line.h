/* line.h - lines that somebody types: with editing and history (libedit) on a terminal, else as
 * they come. */
#ifndef MN_CLI_GENERATE_LINE_H
#define MN_CLI_GENERATE_LINE_H

#include <stdbool.h>
#include <sys/types.h>

typedef struct mn_line_reader mn_line_reader;

/* NULL: no memory. History is kept in $XDG_STATE_HOME/mneme/history (~/.local/state), which only
 * its owner reads; MNEME_HISTORY names another file, and nothing when it is empty. */
mn_line_reader *mn_line_open(bool terminal);
void mn_line_close(mn_line_reader *reader);    // NULL accepted

/* The next line without its end, until the next call; -1 at the end of the input or when a signal
 * came. `prompt` is shown on a terminal. */
ssize_t mn_line_next(char **line, mn_line_reader *reader, const char *prompt);

#endif
