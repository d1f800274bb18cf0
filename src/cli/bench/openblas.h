/* openblas.h - OpenBLAS, opened where a ceiling is measured and nowhere else. */
#ifndef MN_CLI_BENCH_OPENBLAS_H
#define MN_CLI_BENCH_OPENBLAS_H

#include <stdbool.h>

/* C = A B for n x n matrices on that many threads. False, and C is untouched, where there is no
 * OpenBLAS, the build leaves it out, or address space is limited: its threads reserve much of it,
 * and without it the program would not end. */
bool mn_openblas_sgemm(int n_threads, int n, const float *a, const float *b, float *c);

#endif
