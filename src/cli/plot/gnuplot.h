/* gnuplot.h - runs gnuplot on a script that was written next to its data. */
#ifndef MN_CLI_PLOT_GNUPLOT_H
#define MN_CLI_PLOT_GNUPLOT_H

#include <stdio.h>

#include "mneme.h"

/* Makes the folder at `path` and those above it where they are not there. */
mn_status mn_make_folder(const char *path);

/* Begins a script that draws NAME.svg and NAME.png, `width` x `height` units each, `panels`
 * side by
 * side, in the colours of our figures; mn_gnuplot_end closes it. Letters beyond ASCII need "set
 * encoding utf8" before it, of which gnuplot complains in plain locales. */
void mn_gnuplot_begin(FILE *out, const char *name, const char *about, int width, int height,
                      int panels);
void mn_gnuplot_end(FILE *out);

/* A text as gnuplot reads it back, byte for byte: everything but letters, digits and a few harmless
 * signs is an escape in octal, so that no quote, line end, backquote or macro is there to be parsed.
 * Control characters become spaces. */
void mn_gnuplot_put_text(FILE *out, const char *text);

/* Runs `gnuplot SCRIPT` inside `folder`. Fails with MN_ERR_UNSUPPORTED, and a message that says
 * how to go on, when gnuplot is not installed. */
mn_status mn_gnuplot_run(const char *folder, const char *script);

#endif
