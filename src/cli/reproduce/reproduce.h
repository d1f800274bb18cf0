/* reproduce.h - the figures of an experiment's report. */
#ifndef MN_CLI_REPRODUCE_REPRODUCE_H
#define MN_CLI_REPRODUCE_REPRODUCE_H

#include "io/json.h"
#include "mneme.h"

/* Draws the tables of `results` that want a figure into `folder` as table-N.svg and .png, from
 * scripts table-N.gp that hold their data, and sets "figures", the names, or "no_figures", why
 * there are none. Missing gnuplot is no failure. */
mn_status mn_reproduce_figures(const mn_json *results, const char *folder);

#endif
