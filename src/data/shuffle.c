/* shuffle.c - a random order of n things without a table of them.
 *
 * A Feistel network over pairs (x in Z_rows, y in Z_columns), x + rows y being the place:
 *     (x, y) <- (y, x + F(y))    alternately modulo rows and modulo columns
 * Each round can be undone, so the network permutes the rows * columns >= n places. A result
 * beyond n is sent through again until it falls below ("cycle walking"); as rows * columns is less
 * than n + rows, that is rare. Black and Rogaway, Ciphers with arbitrary finite domains, 2002. */
#include "data/shuffle.h"

#include "base/rng.h"
#include "base/util.h"

enum { ROUNDS = 8 };    // even, so that x and y end where they began

mn_shuffle mn_shuffle_make(int64_t n, uint64_t seed, uint64_t round) {
    int64_t rows = 1;
    while (rows < n / rows + (n % rows != 0)) rows += rows < 1024 ? 1 : rows / 1024;
    return (mn_shuffle){ .seed = seed, .round = round, .n = n, .rows = rows,
                         .columns = mn_ceil_div(n, rows) };
}

static int64_t turn(const mn_shuffle *s, int64_t place) {
    int64_t x = place % s->rows, y = place / s->rows;
    for (uint64_t i = 0; i < ROUNDS; i++) {
        const uint64_t modulus = (uint64_t)(i % 2 == 0 ? s->rows : s->columns);
        const uint64_t bits = mn_rng_bits(s->seed, s->round * ROUNDS + i, (uint64_t)y);
        const uint64_t sum = (uint64_t)x + bits % modulus;
        x = y;
        y = (int64_t)(sum < modulus ? sum : sum - modulus);
    }
    return x + s->rows * y;
}

int64_t mn_shuffle_at(const mn_shuffle *shuffle, int64_t place) {
    do place = turn(shuffle, place);
    while (place >= shuffle->n);
    return place;
}
