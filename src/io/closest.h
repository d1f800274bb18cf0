/* closest.h - the "did you mean" behind messages about misspelt names. */
#ifndef MN_IO_CLOSEST_H
#define MN_IO_CLOSEST_H

#include <stdint.h>

/* The name that `word` most likely meant, or NULL when none is near.
 *
 * Near: insertions, deletions, substitutions and swaps of neighbours, counted together, number at
 * most a third of the longer word, or one. Upper and lower case count as equal. Ties go to the
 * first name. */
const char *mn_closest(const char *word, const char *const names[], int64_t n_names);

#endif
