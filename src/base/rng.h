/* rng.h - random numbers as a function of (seed, stream, index): nothing to carry, nothing to race.
 *
 * Philox 2x64 with ten rounds (Salmon et al., 2011). */
#ifndef MN_BASE_RNG_H
#define MN_BASE_RNG_H

#include <stdint.h>

/* 64 random bits */
uint64_t mn_rng_bits(uint64_t seed, uint64_t stream, uint64_t index);

/* uniform in (0, 1), never either end */
double mn_rng_uniform(uint64_t seed, uint64_t stream, uint64_t index);

/* standard normal, by Box and Muller */
double mn_rng_normal(uint64_t seed, uint64_t stream, uint64_t index);

#endif
