/* gnuplot.h - runs gnuplot on a script that was written next to its data. */
#ifndef MN_CLI_GNUPLOT_H
#define MN_CLI_GNUPLOT_H

#include "mneme.h"

/* Makes the folder at `path` if it is not there; its parent must be. */
mn_status mn_make_folder(const char *path);

/* Runs `gnuplot SCRIPT` inside `folder`. Fails with MN_ERR_UNSUPPORTED, and a message that says
 * how to go on, when gnuplot is not installed. */
mn_status mn_gnuplot_run(const char *folder, const char *script);

#endif
