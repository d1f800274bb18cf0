/* number.h - numbers on the command line. */
#ifndef MN_CLI_NUMBER_H
#define MN_CLI_NUMBER_H

#include <stdbool.h>

/* Sets *out from a whole number in [low, high]; false for anything else, also for trailing text. */
bool mn_parse_count(int *out, const char *text, int low, int high);

#endif
