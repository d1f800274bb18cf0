/* shuffle.h - a random order of n things without a table of them. */
#ifndef MN_DATA_SHUFFLE_H
#define MN_DATA_SHUFFLE_H

#include <stdint.h>

typedef struct mn_shuffle {
    uint64_t seed, round;        // another order for each
    int64_t n, rows, columns;    // rows * columns >= n
} mn_shuffle;

/* The order number `round` of n >= 1 things under `seed`. */
mn_shuffle mn_shuffle_make(int64_t n, uint64_t seed, uint64_t round);

/* Which of 0 .. n-1 comes at `place` of 0 .. n-1; every one comes once. */
int64_t mn_shuffle_at(const mn_shuffle *shuffle, int64_t place);

#endif
