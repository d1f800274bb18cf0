/* progress.h - how far a long command is: a bar on a terminal, plain lines when piped.
 *
 * Everything goes to standard error, so that results on standard output stay clean. On a terminal
 * one line is redrawn at most ten times a second. Elsewhere a line is printed after each tenth of
 * the work, at most one a second, and at least every ten seconds. Colour is left out when NO_COLOR
 * is set. */
#ifndef MN_CLI_PROGRESS_H
#define MN_CLI_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* One bar; used by one thread at a time. All zeros: nothing is shown, every call is fine. */
typedef struct mn_progress {
    FILE *out;                  // NULL: silent
    bool terminal, colour;
    bool drawn;                 // the terminal's line holds a bar
    int columns;                // width of the terminal
    const char *title, *unit;   // borrowed
    int64_t first, done, all;   // units at the start, now, in all (0: not known)
    double started, shown_at;   // seconds
    int64_t shown;              // units at the last line
    char extra[80];
} mn_progress;

/* Begins with `done` of `all` units (0: not known); work done before the start counts in the share
 * but not in the rate. `unit` is a plural such as "steps"; "bytes" are written as kB, MB and GB.
 * `title` and `unit` must outlive the bar. `quiet` shows nothing. */
void mn_progress_start(mn_progress *bar, const char *title, const char *unit, int64_t done,
                       int64_t all, bool quiet);

/* Now `done` units; `extra` (may be NULL) is put at the end of the line. Cheap: call it at will. */
void mn_progress_update(mn_progress *bar, int64_t done, const char *extra);

/* Takes the bar off the terminal so that a message can be printed; the next update redraws it. */
void mn_progress_clear(mn_progress *bar);

/* Closes with a line of what was done in which time. */
void mn_progress_finish(mn_progress *bar, const char *extra);

/* The text of a line at time `now`: what the calls above print, without colour and line ends. */
void mn_progress_text(char *out, size_t size, const mn_progress *bar, double now, bool finished);

#endif
