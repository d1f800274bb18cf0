/* measure.c - ceiling, operator, ceiling, operator ...: both see the same machine. */
#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/bench/bench.h"
#include "ops/run.h"

enum { MAX_RUNS = 256, USUAL_RUNS = 7, QUICK_RUNS = 3, LEAST_RUNS = 3 };

static const double patience = 10.0;    // seconds a case may take beyond its least runs

mn_status mn_bench_create(mn_bench *bench, const mn_bench_options *options) {
    *bench = (mn_bench){ .options = *options };
    const mn_context_options wanted = { .n_threads = options->n_threads,
                                        .target = options->target, .device = options->device };
    const mn_context_options single = { .n_threads = 1, .target = options->target };
    const mn_context_options reference = { .target = "ref" };
    mn_status st = mn_context_create(&bench->context, &wanted);
    if (st == MN_OK && !options->device) st = mn_context_create(&bench->single, &single);
    if (st == MN_OK) st = mn_context_create(&bench->reference, &reference);
    if (st == MN_OK && options->device) st = mn_bench_gpu_create(&bench->gpu, bench->context);
    if (st != MN_OK) mn_bench_destroy(bench);
    return st;
}

void mn_bench_destroy(mn_bench *bench) {
    mn_bench_gpu_destroy(bench->gpu);
    mn_context_destroy(bench->context);
    mn_context_destroy(bench->single);
    mn_context_destroy(bench->reference);
    *bench = (mn_bench){ 0 };
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double mn_bench_median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return 0.5 * (x[(n - 1) / 2] + x[n / 2]);
}

static mn_status time_operator(double *seconds, mn_context *context, const mn_bench_case *which,
                               const mn_sample *sample) {
    const double start = mn_seconds();
    mn_status st = mn_op_run(context, sample->op, MN_FORWARD, sample->args);
    if (st == MN_OK && which->pass == MN_BENCH_TRAIN) {
        st = mn_op_run(context, sample->op, MN_BACKWARD, sample->args);
    }
    *seconds = mn_seconds() - start;
    return st;
}

static mn_status time_ceiling(double *seconds, mn_ceiling *ceiling, const mn_bench *bench,
                              const mn_bench_case *which, const mn_sample *sample) {
    if (which->ceiling != MN_CEILING_THREADS) {
        *seconds = mn_ceiling_seconds(ceiling);
        return MN_OK;
    }
    const mn_status st = time_operator(seconds, bench->single, which, sample);
    *seconds /= mn_context_threads(bench->context);
    return st;
}

/* How many runs: as asked, or the usual number while it stays within the patience. */
static bool enough(const mn_bench_options *o, int done, double since) {
    const int quick = o->scale == MN_BENCH_QUICK ? QUICK_RUNS : USUAL_RUNS;
    if (o->n_runs > 0) return done >= mn_min(o->n_runs, MAX_RUNS);
    return done >= quick || (done >= LEAST_RUNS && mn_seconds() - since > patience);
}

static double amount_of(const mn_bench_case *which, const mn_sample *sample) {
    switch (which->ceiling) {
    case MN_CEILING_SGEMM: return mn_bench_work(which, sample);
    case MN_CEILING_DIVIDE: return mn_bench_cells(which, sample);
    case MN_CEILING_THREADS: return 1.0;
    default: return mn_bench_bytes(which, sample, MN_F32);
    }
}

static mn_status repeat(mn_bench_result *result, const mn_bench *bench, mn_ceiling *ceiling,
                        const mn_sample *sample) {
    const mn_bench_case *which = result->which;
    double op[MAX_RUNS], top[MAX_RUNS], warm_up;
    mn_status st = time_ceiling(&warm_up, ceiling, bench, which, sample);
    if (st == MN_OK) st = time_operator(&warm_up, bench->context, which, sample);
    const double start = mn_seconds();
    int n = 0;
    for (; st == MN_OK && !enough(&bench->options, n, start); n++) {
        st = time_ceiling(&top[n], ceiling, bench, which, sample);
        if (st == MN_OK) st = time_operator(&op[n], bench->context, which, sample);
    }
    if (st != MN_OK) return st;
    result->n_runs = n;
    result->median_s = mn_bench_median(op, n);
    result->min_s = op[0];
    result->ceiling_median_s = mn_bench_median(top, n);
    result->ceiling_min_s = top[0];
    result->share = result->ceiling_median_s / result->median_s;
    return MN_OK;
}

mn_status mn_bench_measure(mn_bench_result *result, const mn_bench *bench,
                           const mn_bench_case *which) {
    *result = (mn_bench_result){ .which = which };
    mn_sample *sample = calloc(1, sizeof *sample);
    if (!sample) return mn_fail(MN_ERR_MEMORY, "no memory for a sample");
    mn_ceiling ceiling = { 0 };
    mn_status st = mn_bench_check(which, bench->context, bench->reference, MN_F32);
    if (st == MN_OK) st = mn_bench_open(sample, which, bench->options.scale, MN_F32, false);
    if (st == MN_OK) st = mn_ceiling_open(&ceiling, which, sample, bench->context);
    if (st == MN_OK) {
        result->call = *(const mn_call *)sample->args;
        result->flop = mn_bench_work(which, sample);
        result->bytes = mn_bench_bytes(which, sample, MN_F32);
        result->amount = amount_of(which, sample);
        mn_sample_draw_repeated(sample, 1);
        st = repeat(result, bench, &ceiling, sample);
    }
    mn_ceiling_close(&ceiling);
    mn_sample_free(sample);
    free(sample);
    return st;
}
