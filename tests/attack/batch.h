/* batch.h - attacks in child processes: a case that ends in a signal or takes over ten seconds is
 * told by its number and counted, and the ones behind it are tried all the same. */
#ifndef TESTS_ATTACK_BATCH_H
#define TESTS_ATTACK_BATCH_H

#include <stdint.h>

/* Runs `try` for cases 0 .. n-1, `each` of them in one child; returns how many broke. `tell` prints
 * what case `i` was. */
int64_t attack_all(int64_t n, int64_t each, void (*try)(int64_t i), void (*tell)(int64_t i));

#endif
