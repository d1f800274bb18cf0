/* bench.c - mneme bench: times operators, or training steps, against ceilings measured in the same
 * run. */
#include "cli/bench/bench.h"

#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/command.h"
#include "cli/options.h"

typedef struct options {
    mn_bench_options bench;
    const char *what;     // ops, train, infer
    const char *only;     // NULL: every case
    const char *dtype;    // NULL: bf16 on a GPU
    bool json, list, grid;
} options;

static void print_help(void) {
    puts("usage: mneme bench ops [options]\n"
         "       mneme bench train [options]\n"
         "       mneme bench infer [options]\n\n"
         "train: whole training steps of small models, in turn with a matrix product; with "
         "--device cuda\n"
         "whole models of 400M parameters on a GPU: steps, memory, prefill and decoding.\n"
         "infer: prefill and decoding of these models alone; on a CPU decoding of a model of 100M\n"
         "parameters with weights of float32, 8 and 4 bits, in turn.\n"
         "ops: checks each operator against the reference, then times it in turn with a ceiling:\n"
         "work this machine cannot do faster. Prints minimum and median of the runs, the rate, "
         "the\n"
         "share of the ceiling and, where a share is asked for, whether it was reached.\n\n"
         "  --only TEXT     only the cases whose names contain TEXT (delta, .train, step.)\n"
         "  --list          names of the cases\n"
         "  --runs N        runs of each case (default: 7, fewer for slow ones)\n"
         "  --threads N     worker threads (default: one per core)\n"
         "  --layers N      layers of models on a GPU (default: 24)\n"
         "  --bits N        of infer on a GPU: weights of 8 or 4 bits (default: of --dtype)\n"
         "  --streams N     of infer on a GPU: steps of so many sequences in a batch as well\n"
         "  --target NAME   ref, avx2, avx512, neon (default: the best here)\n"
         "  --device NAME   cuda or cuda:N: the operators of a GPU, against copies of its memory\n"
         "  --dtype NAME    on a GPU: bf16 or f32 (default: bf16)\n"
         "  --grid          operators of a GPU at 24 shapes each, against floors by bytes and by "
         "work\n"
         "  --quick         cut sizes and three runs: does it work, not how fast is it\n"
         "  --json          machine, shapes, times, work, bytes and shares as one document");
}

/* The CPU measures f32; a GPU bf16 or f32. */
static int parse_device(options *o) {
    o->bench.dtype = o->bench.device ? MN_BF16 : MN_F32;
    if (!o->dtype) return 0;
    const bool known = mn_dtype_parse(&o->bench.dtype, o->dtype) && o->bench.dtype != MN_F64;
    if (known && (o->bench.device || o->bench.dtype == MN_F32)) return 0;
    return mn_options_mistake("bench", o->dtype,
                              "is not measured; the CPU has f32, a GPU bf16 and f32");
}

static int parse(options *o, int argc, char **argv) {
    bool quick = false;
    const mn_option rows[] = {
        { "--only", .text = &o->only },
        { "--target", .text = &o->bench.target },
        { "--device", .read = mn_options_device, .to = &o->bench.device },
        { "--dtype", .text = &o->dtype },
        { "--runs", .count = &o->bench.n_runs, .low = 1, .high = 256 },
        { "--threads", .count = &o->bench.n_threads, .low = 1, .high = 256 },
        { "--layers", .count = &o->bench.n_layers, .low = 1, .high = 256 },
        { "--bits", .count = &o->bench.bits, .low = 4, .high = 8 },
        { "--streams", .count = &o->bench.streams, .low = 1, .high = 4096 },
        { "--quick", .flag = &quick },
        { "--json", .flag = &o->json },
        { "--grid", .flag = &o->grid },
        { "--list", .flag = &o->list },
        { NULL, .text = &o->what },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "bench", argc, argv);
    if (quick) o->bench.scale = MN_BENCH_QUICK;
    return status ? status : parse_device(o);
}

static bool chosen(const options *o, const mn_bench_case *which) {
    return !o->only || strstr(which->name, o->only);
}

static mn_status measure_one(mn_bench_result *result, const mn_bench *bench,
                             const mn_bench_case *which) {
    return bench->gpu ? mn_bench_gpu_measure(result, bench, which)
                      : mn_bench_measure(result, bench, which);
}

/* Measures the chosen cases; the number that failed. */
static int measure_all(mn_bench_result *results, int *n_results, const options *o,
                       const mn_bench *bench) {
    int n_cases, n_failed = 0;
    const mn_bench_case *cases = mn_bench_cases(&n_cases, bench->gpu != NULL);
    if (!o->json) mn_bench_print_header(stdout, bench);
    for (int i = 0; i < n_cases; i++) {
        if (!chosen(o, &cases[i])) continue;
        mn_bench_result *result = &results[*n_results];
        if (bench->gpu && mn_bench_gpu_serves(&cases[i]) != MN_OK) {
            fprintf(stderr, "mneme bench: %s left out: %s\n", cases[i].name, mn_last_error());
            continue;
        }
        if (measure_one(result, bench, &cases[i]) == MN_OK) {
            if (!o->json) mn_bench_print(stdout, bench, result);
            ++*n_results;
        } else {
            fprintf(stderr, "mneme bench: %s: %s\n", cases[i].name, mn_last_error());
            n_failed++;
        }
    }
    if (!o->json) mn_bench_print_footer(stdout, bench, results, *n_results);
    return n_failed;
}

static int run_ops(const options *o) {
    int n_cases, n_chosen = 0, n_results = 0;
    const mn_bench_case *cases = mn_bench_cases(&n_cases, o->bench.device != NULL);
    for (int i = 0; i < n_cases; i++) {
        n_chosen += chosen(o, &cases[i]);
        if (o->list && chosen(o, &cases[i])) puts(cases[i].name);
    }
    if (n_chosen == 0) {
        fprintf(stderr, "mneme bench: no case is called like \"%s\"; --list names them\n", o->only);
        return 2;
    }
    if (o->list) return 0;
    mn_bench bench = { 0 };
    mn_bench_result *results = calloc((size_t)n_chosen, sizeof *results);
    mn_status st = results ? mn_bench_create(&bench, &o->bench)
                           : mn_fail(MN_ERR_MEMORY, "no memory for %d results", n_chosen);
    int n_failed = 0;
    if (st == MN_OK) {
        n_failed = measure_all(results, &n_results, o, &bench);
        if (o->json) st = mn_bench_json(stdout, &bench, results, n_results);
        mn_bench_destroy(&bench);
    }
    if (st != MN_OK) fprintf(stderr, "mneme bench: %s\n", mn_last_error());
    free(results);
    return st != MN_OK ? 2 : n_failed > 0;
}

int mn_command_bench(int argc, char **argv) {
    options o = { 0 };
    const int status = parse(&o, argc, argv);
    if (status < 0) print_help();
    if (status != 0) return status < 0 ? 0 : status;
    if (!o.what) return mn_options_mistake("bench", "", "say what to measure: mneme bench ops");
    if (strcmp(o.what, "ops") == 0 && o.grid) {
        if (o.bench.device) return mn_bench_grid(&o.bench, o.only, o.json, o.list);
        return mn_options_mistake("bench", "--grid", "is measured on a GPU: --device cuda");
    }
    if (strcmp(o.what, "ops") == 0) return run_ops(&o);
    if (strcmp(o.what, "train") == 0) return mn_bench_train(&o.bench, o.only, o.json, o.list);
    if (strcmp(o.what, "infer") != 0) {
        return mn_options_mistake("bench", o.what,
                                  "is nothing to measure; there are: ops, train, infer");
    }
    if (o.bench.device) return mn_bench_infer_gpu(&o.bench, o.only, o.json, o.list);
    return mn_bench_infer(&o.bench, o.json);
}
