/* rng.c - random numbers as a function of (seed, stream, index). */
#include "base/rng.h"

#include <math.h>

typedef struct pair {
    uint64_t low, high;
} pair;

/* One block of Philox 2x64-10: the counter is (index, stream), the key is the seed. */
static pair philox(uint64_t seed, uint64_t stream, uint64_t index) {
    const uint64_t multiplier = 0xD2B74407B1CE6E93u;
    const uint64_t weyl = 0x9E3779B97F4A7C15u;
    pair x = { index, stream };
    for (int round = 0; round < 10; round++) {
        const unsigned __int128 product = (unsigned __int128)multiplier * x.low;
        x.low = (uint64_t)(product >> 64) ^ seed ^ x.high;
        x.high = (uint64_t)product;
        seed += weyl;
    }
    return x;
}

static double unit(uint64_t bits) {
    return ((double)(bits >> 11) + 0.5) * 0x1p-53;
}

uint64_t mn_rng_bits(uint64_t seed, uint64_t stream, uint64_t index) {
    return philox(seed, stream, index).low;
}

double mn_rng_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    return unit(philox(seed, stream, index).low);
}

double mn_rng_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    const pair bits = philox(seed, stream, index);
    return sqrt(-2.0 * log(unit(bits.low))) * cos(2.0 * M_PI * unit(bits.high));
}
