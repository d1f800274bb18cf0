/* sgemm.c - times cblas_sgemm. */
#include "cli/bench/sgemm.h"

#if MN_HAVE_OPENBLAS
#include <cblas.h>
#endif
#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "cli/bench/bench.h"

#if MN_HAVE_OPENBLAS

enum { N = 1024, RUNS = 5 };

double mn_sgemm_rate(int n_threads) {
    float *memory = malloc(3 * sizeof(float) * N * N);
    if (!memory) return 1.0;
    for (int i = 0; i < 3 * N * N; i++) memory[i] = 0.1f * (float)(i % 7) - 0.3f;
    float *a = memory, *b = a + N * N, *c = b + N * N;
    double seconds[RUNS];
    openblas_set_num_threads(n_threads);
    for (int run = -1; run < RUNS; run++) {    // the first warms up
        const double start = mn_seconds();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, N, N, 1.0f, a, N, b, N, 0.0f, c,
                    N);
        if (run >= 0) seconds[run] = mn_seconds() - start;
    }
    free(memory);
    return 2.0 * N * N * N / mn_bench_median(seconds, RUNS);
}

#else

double mn_sgemm_rate(int n_threads) {
    (void)n_threads;
    return NAN;
}

#endif
