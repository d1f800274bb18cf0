/* sgemm.h - how many floating-point operations a second this machine's matrix product does: the
 * ceiling that training is shown against. */
#ifndef MN_CLI_BENCH_SGEMM_H
#define MN_CLI_BENCH_SGEMM_H

/* Median of a few products of 1024 x 1024, about a tenth of a second, on that many threads. NaN
 * where there is no OpenBLAS. */
double mn_sgemm_rate(int n_threads);

#endif
