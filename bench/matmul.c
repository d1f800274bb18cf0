/* matmul.c - mn_matmul against cblas_sgemm on the products of training and decoding.
 *
 *   bench_matmul [threads [target [runs [tokens]]]]
 *
 * For each linear layer: forward x W^T, dx = dy W, dW = dy^T x over many tokens, and the forward
 * product of a few rows, as in decoding. Ours and OpenBLAS take turns in one run on the same number
 * of threads, each thread held on a processor of its own. On a busy machine the fastest tenth of
 * the calls says more than their median. `cmake --build DIR --target bench_matmul` builds it. */
#define _GNU_SOURCE
#include <cblas.h>
#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

#include "base/clock.h"
#include "base/rng.h"
#include "base/util.h"
#include "ops/matmul.h"

typedef struct product {
    const char *name;
    int64_t M, N, K;
    bool a_transposed, b_transposed;
} product;

typedef struct setup {
    mn_context *context;
    int n_threads, runs;
} setup;

enum { MAX_RUNS = 101, MAX_TIMES = 1 << 16 };
static const double turn_seconds = 0.02, warm_seconds = 0.04;

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static float *numbers(int64_t count, uint64_t stream) {
    float *data = aligned_alloc(64, (size_t)mn_ceil_div(count * 4, 64) * 64);
    if (!data) exit(1);
    for (int64_t i = 0; i < count; i++) {
        data[i] = (float)mn_rng_uniform(1, stream, (uint64_t)i) - 0.5f;
    }
    return data;
}

static void call_ours(const setup *s, const product *p, float *c, const float *a, const float *b) {
    const mn_matmul_args args = { .dtype = MN_F32, .c = c, .a = a, .b = b, .M = p->M, .N = p->N,
                                  .K = p->K, .a_transposed = p->a_transposed,
                                  .b_transposed = p->b_transposed };
    mn_matmul(s->context, &args);
}

static void call_blas(const product *p, float *c, const float *a, const float *b) {
    const int M = (int)p->M, N = (int)p->N, K = (int)p->K;
    cblas_sgemm(CblasRowMajor, p->a_transposed ? CblasTrans : CblasNoTrans,
                p->b_transposed ? CblasTrans : CblasNoTrans, M, N, K, 1.0f, a,
                p->a_transposed ? M : K, b, p->b_transposed ? K : N, 0.0f, c, N);
}

/* Turns begin with calls that are not timed, until the other's workers, which spin for some 30 ms
 * after their last call, sleep and the system has spread the threads over the processors. */
typedef struct turn {
    const setup *s;
    const product *p;
    bool blas;
    float *c;
    const float *a, *b;
} turn;

static void call(const turn *t) {
    if (t->blas) call_blas(t->p, t->c, t->a, t->b);
    else call_ours(t->s, t->p, t->c, t->a, t->b);
}

/* Seconds of single calls, from all turns. */
typedef struct times {
    double s[MAX_TIMES];
    int n;
} times;

static void take_turn(times *out, const turn *t) {
    double start = mn_seconds();
    while (mn_seconds() - start < warm_seconds) call(t);
    start = mn_seconds();
    do {
        const double before = mn_seconds();
        call(t);
        if (out->n < MAX_TIMES) out->s[out->n++] = mn_seconds() - before;
    } while (mn_seconds() - start < turn_seconds);
}

/* The time below which `part` of them lie. */
static double quantile(times *t, double part) {
    qsort(t->s, (size_t)t->n, sizeof *t->s, by_value);
    return t->s[(int)(part * (t->n - 1))];
}

/* Threads that were not there before, each on a processor of its own; the caller is on the first.
 * Systems that pack threads onto few processors to save power would decide the result. */
static void spread_new_threads(void) {
    static pid_t newest;
    DIR *tasks = opendir("/proc/self/task");
    pid_t last = newest;
    int cpu = newest ? 1 : 0;
    for (const struct dirent *entry; tasks && (entry = readdir(tasks));) {
        const pid_t id = (pid_t)atoi(entry->d_name);
        if (id <= newest) continue;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET((size_t)cpu++, &set);
        (void)sched_setaffinity(id, sizeof set, &set);    // fewer processors than threads: as it is
        if (id > last) last = id;
    }
    if (tasks) closedir(tasks);
    newest = last;
}

static void measure(const setup *s, const product *p) {
    float *a = numbers(p->M * p->K, 1), *b = numbers(p->K * p->N, 2);
    float *ours = numbers(p->M * p->N, 3), *blas = numbers(p->M * p->N, 3);
    const double flop = 2.0 * (double)p->M * (double)p->N * (double)p->K;
    const turn our_turn = { s, p, false, ours, a, b }, blas_turn = { s, p, true, blas, a, b };
    static times ours_s, blas_s;
    ours_s.n = blas_s.n = 0;
    double worst = 0.0;
    for (int run = 0; run < s->runs; run++) {
        take_turn(&ours_s, &our_turn);
        take_turn(&blas_s, &blas_turn);
    }
    for (int64_t i = 0; i < p->M * p->N; i++) {
        worst = fmax(worst, fabs((double)ours[i] - (double)blas[i]));
    }
    const double o = quantile(&ours_s, 0.5), z = quantile(&blas_s, 0.5);
    printf("%-8s %6" PRId64 " %6" PRId64 " %6" PRId64, p->name, p->M, p->N, p->K);
    printf(" %9.1f %9.1f %7.2f %9.1f %9.1f %7.2f %9.1e\n", flop / o / 1e9, flop / z / 1e9, z / o,
           flop / quantile(&ours_s, 0.1) / 1e9, flop / quantile(&blas_s, 0.1) / 1e9,
           quantile(&blas_s, 0.1) / quantile(&ours_s, 0.1), worst);
    fflush(stdout);
    free(a);
    free(b);
    free(ours);
    free(blas);
}

/* The three products of a layer of `in` inputs and `out` outputs over `tokens` rows. */
static void measure_layer(const setup *s, int64_t tokens, int64_t in, int64_t out) {
    const product forward = { "x W^T", tokens, out, in, false, true };
    const product dx = { "dy W", tokens, in, out, false, false };
    const product dweight = { "dy^T x", out, in, tokens, true, false };
    measure(s, &forward);
    if (tokens < 64) return;    // decoding
    measure(s, &dx);
    measure(s, &dweight);
}

int main(int argc, char **argv) {
    static const int64_t layers[][3] = {
        { 1024, 384, 384 }, { 1024, 384, 1152 }, { 1024, 384, 1536 }, { 1024, 1536, 384 },
        { 1024, 128, 128 }, { 1024, 128, 512 },  { 768, 128, 128 },   { 768, 128, 512 },
        { 1024, 384, 65 },  { 1024, 384, 32000 }, { 1, 384, 384 },    { 1, 384, 1536 },
        { 1, 384, 32000 },  { 1, 4096, 4096 },   { 2, 4096, 4096 },   { 4, 4096, 4096 },
        { 8, 4096, 4096 },  { 8, 384, 1536 },    { 16, 384, 1536 },
    };
    setup s = { .n_threads = argc > 1 ? atoi(argv[1]) : 1, .runs = argc > 3 ? atoi(argv[3]) : 11 };
    const int64_t tokens = argc > 4 ? atoll(argv[4]) : 0;    // 0: all of them
    openblas_set_num_threads(s.n_threads);
    spread_new_threads();
    const mn_context_options options = { .n_threads = s.n_threads,
                                         .target = argc > 2 ? argv[2] : NULL };
    if (s.runs < 1 || s.runs > MAX_RUNS || mn_context_create(&s.context, &options) != MN_OK) {
        fprintf(stderr, "bench_matmul: %s; bench_matmul [threads [target [runs [tokens]]]]\n",
                s.runs < 1 || s.runs > MAX_RUNS ? "runs are 1 to 101" : mn_last_error());
        return 2;
    }
    spread_new_threads();
    printf("target %s, %d threads, %s (core %s); GFLOP/s: median, fastest tenth\n",
           mn_context_target(s.context), s.n_threads, openblas_get_config(),
           openblas_get_corename());
    printf("%-8s %6s %6s %6s %9s %9s %7s %9s %9s %7s %9s\n", "product", "M", "N", "K", "ours",
           "OpenBLAS", "ratio", "ours", "OpenBLAS", "ratio", "apart by");
    for (size_t i = 0; i < MN_COUNTOF(layers); i++) {
        if (tokens && tokens != layers[i][0]) continue;
        measure_layer(&s, layers[i][0], layers[i][1], layers[i][2]);
    }
    mn_context_destroy(s.context);
    return 0;
}
