/* gpu.c - operators of a GPU, in turn with copies of its memory.
 *
 * All runs of a case are put on the stream at once, with an event after each, so that the GPU never
 * waits for the host; several sets of inputs take turns, so that none is still in the cache. */
#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/bench/bench.h"
#include "ops/run.h"
#include "ops/sample_device.h"

enum { USUAL_RUNS = 50, QUICK_RUNS = 5, MOST_RUNS = 256, WARM_UPS = 3, MOST_SETS = 16 };
enum { CACHES = 4 };    // sets of inputs fill the second cache this many times over
static const size_t buffer_bytes = (size_t)1 << 30;

struct mn_bench_gpu {
    mn_device *device;      // borrowed from the context
    mn_context *context;
    unsigned char *from, *to;
    size_t at;              // where the next copy starts
    mn_device_event *events[2 * MOST_RUNS + 1];
    double copy_rate, product_rate;
};

/* ---- ceilings -------------------------------------------------------------------------------- */

/* Copies so that `bytes` are read and written together, each time elsewhere; in pieces where that
 * is more than the buffer holds. */
static mn_status put_copy(mn_bench_gpu *gpu, size_t bytes) {
    mn_status st = MN_OK;
    for (size_t left = bytes / 2; left > 0 && st == MN_OK;) {
        const size_t piece = left < buffer_bytes ? left : buffer_bytes;
        if (gpu->at + piece > buffer_bytes) gpu->at = 0;
        st = mn_device_copy(gpu->device, gpu->to + gpu->at, gpu->from + gpu->at, piece);
        gpu->at = (gpu->at + piece + 4095) / 4096 * 4096;
        left -= piece;
    }
    return st;
}

static mn_status measure_copy(mn_bench_gpu *gpu) {
    enum { RUNS = 9 };
    double seconds[RUNS];
    mn_status st = put_copy(gpu, 2 * buffer_bytes);
    if (st == MN_OK) st = mn_device_event_record(gpu->device, gpu->events[0]);
    for (int i = 0; i < RUNS && st == MN_OK; i++) {
        st = put_copy(gpu, 2 * buffer_bytes);
        if (st == MN_OK) st = mn_device_event_record(gpu->device, gpu->events[i + 1]);
    }
    for (int i = 0; i < RUNS && st == MN_OK; i++) {
        st = mn_device_seconds(gpu->device, &seconds[i], gpu->events[i], gpu->events[i + 1]);
    }
    if (st == MN_OK) gpu->copy_rate = 2.0 * (double)buffer_bytes / mn_bench_median(seconds, RUNS);
    return st;
}

mn_status mn_bench_gpu_create(mn_bench_gpu **out, mn_context *context) {
    mn_bench_gpu *gpu = calloc(1, sizeof *gpu);
    if (!gpu) return mn_fail(MN_ERR_MEMORY, "no memory for a measurement");
    gpu->context = context;
    gpu->device = context->device;
    void *from = NULL, *to = NULL;
    mn_status st = mn_device_allocate(gpu->device, &from, buffer_bytes);
    if (st == MN_OK) st = mn_device_allocate(gpu->device, &to, buffer_bytes);
    gpu->from = from;
    gpu->to = to;
    if (st == MN_OK) st = mn_device_fill(gpu->device, from, 0x5A, buffer_bytes);
    for (size_t i = 0; i < MN_COUNTOF(gpu->events) && st == MN_OK; i++) {
        st = mn_device_event_create(gpu->device, &gpu->events[i]);
    }
    if (st == MN_OK) st = measure_copy(gpu);
    if (st != MN_OK) {
        mn_bench_gpu_destroy(gpu);
        return st;
    }
    gpu->product_rate = mn_bench_product_rate(gpu->device);
    *out = gpu;
    return MN_OK;
}

void mn_bench_gpu_destroy(mn_bench_gpu *gpu) {
    if (!gpu) return;
    for (size_t i = 0; i < MN_COUNTOF(gpu->events); i++) mn_device_event_destroy(gpu->events[i]);
    mn_device_free(gpu->device, gpu->from);
    mn_device_free(gpu->device, gpu->to);
    free(gpu);
}

double mn_bench_gpu_copy_rate(const mn_bench_gpu *gpu) {
    return gpu->copy_rate;
}

double mn_bench_gpu_product_rate(const mn_bench_gpu *gpu) {
    return gpu->product_rate;
}

/* ---- operators ------------------------------------------------------------------------------- */

mn_status mn_bench_gpu_serves(const mn_bench_case *which) {
    const bool train = which->pass == MN_BENCH_TRAIN;
    if (mn_op_has_cuda(which->op, MN_FORWARD) &&
        (!train || mn_op_has_cuda(which->op, MN_BACKWARD))) {
        return MN_OK;
    }
    return mn_fail(MN_ERR_UNSUPPORTED, "%s has no CUDA kernel yet",
                   mn_op_describe(which->op)->name);
}

/* Sets of inputs that take turns. */
typedef struct sets {
    mn_device_sample *each[MOST_SETS];
    int count;
} sets;

static void free_sets(sets *s) {
    for (int i = 0; i < s->count; i++) mn_device_sample_free(s->each[i]);
    s->count = 0;
}

/* As many as it takes to fill the cache several times. */
static mn_status make_sets(sets *s, const mn_bench_gpu *gpu, const mn_sample *sample,
                           mn_dtype dtype) {
    mn_status st = mn_device_sample_create(&s->each[0], gpu->context, sample, dtype);
    if (st != MN_OK) return st;
    s->count = 1;
    const size_t bytes = mn_device_sample_bytes(s->each[0]) + 1;
    const size_t wanted = CACHES * mn_device_facts(gpu->device)->l2_bytes / bytes + 1;
    const int n = (int)mn_min((int64_t)mn_max((int64_t)wanted, 2), MOST_SETS);
    while (s->count < n && st == MN_OK) {
        st = mn_device_sample_clone(&s->each[s->count], s->each[0]);
        if (st == MN_OK) s->count++;
    }
    return st;
}

static mn_status put_operator(const mn_bench_gpu *gpu, const mn_bench_case *which, const sets *s,
                              int run) {
    const void *args = mn_device_sample_args(s->each[run % s->count]);
    mn_status st = mn_op_run(gpu->context, which->op, MN_FORWARD, args);
    if (st == MN_OK && which->pass == MN_BENCH_TRAIN) {
        st = mn_op_run(gpu->context, which->op, MN_BACKWARD, args);
    }
    return st;
}

/* One call from the host's side, until all of it is done. */
static mn_status time_call(double *seconds, const mn_bench_gpu *gpu, const mn_bench_case *which,
                           const sets *s, int run) {
    const double start = mn_seconds();
    mn_status st = put_operator(gpu, which, s, run);
    if (st == MN_OK) st = mn_device_synchronize(gpu->device);
    *seconds = mn_seconds() - start;
    return st;
}

/* A copy, the operator, a copy, the operator ..., an event after each. */
static mn_status put_runs(mn_bench_gpu *gpu, const mn_bench_result *r, const sets *s, int n) {
    const size_t bytes = (size_t)r->bytes;
    mn_status st = MN_OK;
    for (int i = 0; i < WARM_UPS && st == MN_OK; i++) {
        st = put_operator(gpu, r->which, s, i);
        if (st == MN_OK) st = put_copy(gpu, 2 * buffer_bytes);    // and the host gets ahead
    }
    if (st == MN_OK) st = mn_device_event_record(gpu->device, gpu->events[0]);
    for (int i = 0; i < n && st == MN_OK; i++) {
        st = put_copy(gpu, bytes);
        if (st == MN_OK) st = mn_device_event_record(gpu->device, gpu->events[2 * i + 1]);
        if (st == MN_OK) st = put_operator(gpu, r->which, s, WARM_UPS + i);
        if (st == MN_OK) st = mn_device_event_record(gpu->device, gpu->events[2 * i + 2]);
    }
    return st == MN_OK ? mn_device_synchronize(gpu->device) : st;
}

static mn_status read_times(mn_bench_result *r, const mn_bench_gpu *gpu, int n) {
    double op[MOST_RUNS], top[MOST_RUNS];
    mn_status st = MN_OK;
    for (int i = 0; i < n && st == MN_OK; i++) {
        st = mn_device_seconds(gpu->device, &top[i], gpu->events[2 * i], gpu->events[2 * i + 1]);
        if (st != MN_OK) break;
        st = mn_device_seconds(gpu->device, &op[i], gpu->events[2 * i + 1],
                               gpu->events[2 * i + 2]);
    }
    if (st != MN_OK) return st;
    r->n_runs = n;
    r->median_s = mn_bench_median(op, n);
    r->min_s = op[0];
    r->ceiling_median_s = mn_bench_median(top, n);
    r->ceiling_min_s = top[0];
    return MN_OK;
}

/* The product was measured once; its time for this case follows from the rate. */
static void use_product(mn_bench_result *r, const mn_bench_gpu *gpu) {
    r->ceiling_min_s = r->ceiling_median_s = r->flop / gpu->product_rate;
}

mn_status mn_bench_gpu_time(mn_bench_result *r, const mn_bench *bench, const mn_sample *sample,
                            int n) {
    const mn_dtype dtype = bench->options.dtype;
    const bool product = r->which->ceiling == MN_CEILING_GPU_PRODUCT;
    sets s = { .count = 0 };
    mn_status st = make_sets(&s, bench->gpu, sample, dtype);
    if (st == MN_OK) st = mn_device_synchronize(bench->gpu->device);
    if (st == MN_OK) st = time_call(&r->first_s, bench->gpu, r->which, &s, 0);
    if (st == MN_OK) st = time_call(&r->second_s, bench->gpu, r->which, &s, 1);
    if (st == MN_OK) {
        r->call = *(const mn_call *)sample->args;
        r->flop = mn_bench_work(r->which, sample);
        r->bytes = mn_bench_bytes(r->which, sample, dtype);
        r->amount = product ? r->flop : r->bytes;
        st = put_runs(bench->gpu, r, &s, n);
    }
    if (st == MN_OK) st = read_times(r, bench->gpu, n);
    if (st == MN_OK && product) use_product(r, bench->gpu);
    if (st == MN_OK) r->share = r->ceiling_median_s / r->median_s;
    free_sets(&s);
    return st;
}

mn_status mn_bench_gpu_measure(mn_bench_result *result, const mn_bench *bench,
                               const mn_bench_case *which) {
    const mn_bench_options *o = &bench->options;
    *result = (mn_bench_result){ .which = which };
    mn_sample *sample = calloc(1, sizeof *sample);
    if (!sample) return mn_fail(MN_ERR_MEMORY, "no memory for a sample");
    mn_status st = mn_bench_open(sample, which, o->scale, MN_F32, true);
    if (st == MN_OK) {
        const int usual = o->scale == MN_BENCH_QUICK ? QUICK_RUNS : USUAL_RUNS;
        const int n = o->n_runs > 0 ? (int)mn_min(o->n_runs, MOST_RUNS) : usual;
        mn_sample_draw_repeated(sample, 1);
        st = mn_bench_gpu_time(result, bench, sample, n);
    }
    if (st == MN_OK) st = mn_bench_check(which, bench->context, bench->reference, o->dtype);
    mn_sample_free(sample);
    free(sample);
    return st;
}
