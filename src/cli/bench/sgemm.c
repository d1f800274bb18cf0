/* sgemm.c - times OpenBLAS's matrix product. */
#include "cli/bench/sgemm.h"

#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "cli/bench/bench.h"
#include "cli/bench/openblas.h"

enum { N = 1024, RUNS = 5 };

double mn_sgemm_rate(int n_threads) {
    float *memory = malloc(3 * sizeof(float) * N * N);
    if (!memory) return NAN;
    for (int i = 0; i < 3 * N * N; i++) memory[i] = 0.1f * (float)(i % 7) - 0.3f;
    float *a = memory, *b = a + N * N, *c = b + N * N;
    double seconds[RUNS];
    bool there = true;
    for (int run = -1; run < RUNS && there; run++) {    // the first warms up
        const double start = mn_seconds();
        there = mn_openblas_sgemm(n_threads, N, a, b, c);
        if (run >= 0) seconds[run] = mn_seconds() - start;
    }
    free(memory);
    return there ? 2.0 * N * N * N / mn_bench_median(seconds, RUNS) : NAN;
}
