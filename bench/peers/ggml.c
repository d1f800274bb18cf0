/* ggml.c - mneme next to ggml in one process: the two gated recurrences both of them have.
 *
 *   gla  S = diag(a) S + k v';  o = scale S'q            ggml_gated_linear_attn, mn_op_additive
 *   gdn  S = a S + beta k (v - a S'k)';  o = S'q / sqrt K    ggml_gated_delta_net, mn_op_delta_net
 *   kda  the same with a per channel
 *
 * Both read the same (T,H,K) memory and write outputs and the final state; outputs are compared
 * before anything is timed, then the two take turns. With one thread the seconds are those the
 * process had a processor, which say more on a machine that others use. Built and run by
 * ggml.sh. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <ggml-cpu.h>
#include <ggml.h>
#include <mneme.h>

enum { T = 4096, H = 16, MAX_RUNS = 99 };

typedef enum kind { GLA, GDN, KDA } kind;
static const char *const names[] = { "gla", "gdn", "kda" };

/* One comparison. q, k, v, log_decay, decay, beta and the initial state are shared memory: the data
 * of ggml's tensors. */
typedef struct problem {
    kind kind;
    int64_t width;
    struct ggml_context *ggml;
    struct ggml_tensor *q, *k, *v, *log_decay, *decay, *beta, *state0, *result;
    struct ggml_cgraph *graph;
    struct ggml_cplan plan;
    mn_context *mneme;
    float *o, *state;
} problem;

static clockid_t watch = CLOCK_MONOTONIC;

static double seconds(void) {
    struct timespec now;
    clock_gettime(watch, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void fail(const char *what) {
    fprintf(stderr, "ggml bench: %s: %s\n", what, mn_last_error());
    exit(1);
}

/* Uniform in (-1, 1), the same at every start. */
static float draw(void) {
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (float)((double)(state >> 11) * 0x1p-52 - 1.0);
}

static struct ggml_tensor *tensor(problem *p, int64_t width, float scale, float shift) {
    struct ggml_tensor *x = ggml_new_tensor_4d(p->ggml, GGML_TYPE_F32, width, H, T, 1);
    float *data = ggml_get_data_f32(x);
    for (int64_t i = 0; i < width * H * T; i++) data[i] = shift + scale * draw();
    return x;
}

/* Rows of length one: what a delta rule wants of its keys. */
static void normalise(struct ggml_tensor *x) {
    const int64_t width = x->ne[0];
    float *row = ggml_get_data_f32(x);
    for (int64_t n = 0; n < H * T; n++, row += width) {
        double sum = 0.0;
        for (int64_t i = 0; i < width; i++) sum += (double)row[i] * row[i];
        for (int64_t i = 0; i < width; i++) row[i] = (float)(row[i] / sqrt(sum));
    }
}

static void open_ggml(problem *p, int n_threads) {
    const int64_t K = p->width;
    const bool channel = p->kind != GDN;
    struct ggml_init_params params = { .mem_size = (size_t)(K * H * T * 4 * 9 + (64 << 20)) };
    p->ggml = ggml_init(params);
    if (!p->ggml) fail("no memory for ggml");
    p->q = tensor(p, K, 1.0f, 0.0f);
    p->k = tensor(p, K, 1.0f, 0.0f);
    p->v = tensor(p, K, 1.0f, 0.0f);
    p->log_decay = tensor(p, channel ? K : 1, 0.05f, -0.05f);
    p->decay = tensor(p, channel ? K : 1, 0.0f, 0.0f);
    p->beta = tensor(p, 1, 0.4f, 0.5f);
    normalise(p->k);
    const int64_t n_decays = ggml_nelements(p->decay);
    for (int64_t i = 0; i < n_decays; i++) {
        ggml_get_data_f32(p->decay)[i] = expf(ggml_get_data_f32(p->log_decay)[i]);
    }
    p->state0 = p->kind == GLA ? ggml_new_tensor_2d(p->ggml, GGML_TYPE_F32, K * K * H, 1)
                               : ggml_new_tensor_4d(p->ggml, GGML_TYPE_F32, K, K, H, 1);
    memset(p->state0->data, 0, ggml_nbytes(p->state0));
    p->result = p->kind == GLA ? ggml_gated_linear_attn(p->ggml, p->k, p->v, p->q, p->decay,
                                                        p->state0, 1.0f / sqrtf((float)K))
                               : ggml_gated_delta_net(p->ggml, p->q, p->k, p->v, p->log_decay,
                                                      p->beta, p->state0, 1);
    p->graph = ggml_new_graph(p->ggml);
    ggml_build_forward_expand(p->graph, p->result);
    p->plan = ggml_graph_plan(p->graph, n_threads, NULL);
    p->plan.work_data = malloc(p->plan.work_size + 1);
}

static void open_mneme(problem *p, int n_threads) {
    const mn_context_options options = { .n_threads = n_threads };
    if (mn_context_create(&p->mneme, &options) != MN_OK) fail("context");
    p->o = calloc((size_t)(p->width * H * T), sizeof *p->o);
    p->state = calloc((size_t)(p->width * p->width * H), sizeof *p->state);
    if (!p->o || !p->state) fail("no memory");
}

static void close_problem(problem *p) {
    free(p->plan.work_data);
    ggml_free(p->ggml);
    mn_context_destroy(p->mneme);
    free(p->o);
    free(p->state);
}

static double run_ggml(problem *p) {
    const double start = seconds();
    if (ggml_graph_compute(p->graph, &p->plan) != GGML_STATUS_SUCCESS) fail("ggml_graph_compute");
    return seconds() - start;
}

static mn_status run_gla(const problem *p) {
    const mn_additive_args args = {
        .call = { .dtype = MN_F32, .B = 1, .T = T, .H = H, .K = p->width, .V = p->width },
        .scale = 1.0 / sqrt((double)p->width),
        .decay = MN_DECAY_CHANNEL,
        .q.data = p->q->data,
        .k.data = p->k->data,
        .v.data = p->v->data,
        .g.data = p->log_decay->data,
        .state0.data = p->state0->data,
        .o.data = p->o,
        .state.data = p->state,
    };
    return mn_op_additive(p->mneme, &args);
}

static mn_status run_delta(const problem *p) {
    const mn_delta_net_args args = {
        .call = { .dtype = MN_F32, .B = 1, .T = T, .H = H, .K = p->width, .V = p->width },
        .scale = 1.0 / sqrt((double)p->width),
        .decay = p->kind == KDA ? MN_DECAY_CHANNEL : MN_DECAY_TOKEN,
        .q.data = p->q->data,
        .k.data = p->k->data,
        .v.data = p->v->data,
        .beta.data = p->beta->data,
        .g.data = p->log_decay->data,
        .state0.data = p->state0->data,
        .o.data = p->o,
        .state.data = p->state,
    };
    return mn_op_delta_net(p->mneme, &args);
}

static double run_mneme(problem *p) {
    const double start = seconds();
    if ((p->kind == GLA ? run_gla(p) : run_delta(p)) != MN_OK) fail("mneme");
    return seconds() - start;
}

/* Relative rms distance of the n numbers x from y; y is read with its square blocks transposed
 * where `block` is their width. */
static double distance(const float *x, const float *y, int64_t n, int64_t block) {
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i;
        if (block) {
            const int64_t row = i / block % block, col = i % block;
            at = i - row * block - col + col * block + row;
        }
        error += ((double)x[i] - y[at]) * ((double)x[i] - y[at]);
        norm += (double)y[at] * y[at];
    }
    return sqrt(error / norm);
}

/* ggml keeps outputs and state in one tensor, and the state of its delta rule as (H,V,K). */
static double difference(const problem *p) {
    const int64_t K = p->width;
    const float *theirs = ggml_get_data_f32(p->result);
    const double o = distance(p->o, theirs, T * H * K, 0);
    const double s = distance(p->state, theirs + T * H * K, H * K * K, p->kind == GLA ? 0 : K);
    return o > s ? o : s;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* False when the two disagree. */
static bool compare(kind kind, int64_t width, int n_runs, int n_threads) {
    problem p = { .kind = kind, .width = width };
    open_ggml(&p, n_threads);
    open_mneme(&p, n_threads);
    run_ggml(&p);
    run_mneme(&p);
    const double off = difference(&p);
    const bool same = off < 1e-4;
    double theirs[MAX_RUNS], ours[MAX_RUNS];
    for (int i = 0; i < n_runs; i++) {
        theirs[i] = run_ggml(&p);
        ours[i] = run_mneme(&p);
    }
    qsort(theirs, (size_t)n_runs, sizeof *theirs, by_value);
    qsort(ours, (size_t)n_runs, sizeof *ours, by_value);
    const double a = theirs[n_runs / 2], b = ours[n_runs / 2];
    printf("%-4s %5lld %10.2f %10.2f %10.2f %10.2f %8.2f %8.2f   %.0e%s\n", names[kind],
           (long long)width, 1e3 * theirs[0], 1e3 * a, 1e3 * ours[0], 1e3 * b, theirs[0] / ours[0],
           a / b, off, same ? "" : "  DIFFERENT");
    fflush(stdout);
    close_problem(&p);
    return same;
}

int main(int argc, char **argv) {
    const int n_runs = argc > 1 ? atoi(argv[1]) : 9, n_threads = argc > 2 ? atoi(argv[2]) : 2;
    if (n_runs < 1 || n_runs > MAX_RUNS || n_threads < 1) {
        fprintf(stderr, "usage: ggml [runs 1..%d] [threads] [gla | gdn | kda]\n", MAX_RUNS);
        return 2;
    }
    if (n_threads == 1) watch = CLOCK_PROCESS_CPUTIME_ID;
    ggml_cpu_init();
    printf("forward, float32, B1 T%d H%d, %d threads, %d runs in turn, %s\n", T, H, n_threads,
           n_runs, n_threads == 1 ? "CPU time" : "elapsed time");
    printf("%-4s %5s %10s %10s %10s %10s %8s %8s   %s\n", "op", "K=V", "ggml min", "median ms",
           "mneme min", "median ms", "of mins", "medians", "rms difference");
    bool same = true;
    for (int kind = GLA; kind <= KDA; kind++) {
        if (argc > 3 && strcmp(argv[3], names[kind]) != 0) continue;
        same = compare((enum kind)kind, 64, n_runs, n_threads) && same;
        same = compare((enum kind)kind, 128, n_runs, n_threads) && same;
    }
    return same ? 0 : 1;
}
