/* shares.h - a program of tests as processes side by side, each of which does its share of every
 * operator's cases. References take most of the time of tests of a GPU, and one process keeps one
 * core busy. */
#ifndef TESTS_SUPPORT_SHARES_H
#define TESTS_SUPPORT_SHARES_H

#include <stdbool.h>

/* Whether argv[2] is a share, I/N. */
bool shares_given(int argc, char **argv);

/* How many threads a process should have: one where others have the cores. */
int shares_threads(void);

/* Calls `run` with the arguments in a process for each core, or in this one for a share that is
 * given. What a process writes is shown if it fails; so is that of the first. Returns how many
 * failed. Nothing may have touched a GPU before. */
int shares_run(int argc, char **argv, int (*run)(int argc, char **argv));

/* Cases are dealt out in order: whether the next one is for this process; from the first on. */
bool shares_next(void);
void shares_restart(void);

#endif
