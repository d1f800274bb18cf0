/* number.c - numbers on the command line. */
#include "cli/number.h"

#include <errno.h>
#include <stdlib.h>

bool mn_parse_count(int *out, const char *text, int low, int high) {
    char *end = NULL;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (end == text || *end || errno || value < low || value > high) return false;
    *out = (int)value;
    return true;
}
