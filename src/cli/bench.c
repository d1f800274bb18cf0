/* bench.c - mneme bench: times operators, or training steps, against ceilings measured in the same
 * run. */
#include "cli/bench.h"

#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "cli/command.h"
#include "cli/number.h"

typedef struct options {
    mn_bench_options bench;
    const char *only;     // NULL: every case
    const char *dtype;    // NULL: bf16 on a GPU
    bool json, list;
} options;

static void print_help(void) {
    puts("usage: mneme bench ops [options]\n"
         "       mneme bench train [options]\n"
         "       mneme bench infer --device cuda [options]\n\n"
         "train: whole training steps of small models, in turn with a matrix product; with "
         "--device cuda\n"
         "whole models of 400M parameters on a GPU: steps, memory, prefill and decoding.\n"
         "infer: prefill and decoding of these models alone.\n"
         "ops: checks each operator against the reference, then times it in turn with a ceiling:\n"
         "work this machine cannot do faster. Prints minimum and median of the runs, the rate, "
         "the\n"
         "share of the ceiling and, where a share is asked for, whether it was reached.\n\n"
         "  --only TEXT     only the cases whose names contain TEXT (delta, .train, step.)\n"
         "  --list          names of the cases\n"
         "  --runs N        runs of each case (default: 7, fewer for slow ones)\n"
         "  --threads N     worker threads (default: one per core)\n"
         "  --target NAME   ref, avx2, avx512 (default: the best here)\n"
         "  --device NAME   cuda or cuda:N: the operators of a GPU, against copies of its memory\n"
         "  --dtype NAME    on a GPU: bf16 or f32 (default: bf16)\n"
         "  --quick         cut sizes and three runs: does it work, not how fast is it\n"
         "  --json          machine, shapes, times, work, bytes and shares as one document");
}

static int usage_error(const char *what, const char *option) {
    fprintf(stderr, "mneme bench: %s%s; mneme bench --help lists the options\n", option, what);
    return 2;
}

/* The CPU measures f32; a GPU bf16 or f32. */
static int parse_device(options *o) {
    if (o->bench.device && strcmp(o->bench.device, "cpu") == 0) o->bench.device = NULL;
    o->bench.dtype = o->bench.device ? MN_BF16 : MN_F32;
    if (!o->dtype) return 0;
    const bool known = mn_dtype_parse(&o->bench.dtype, o->dtype) && o->bench.dtype != MN_F64;
    if (known && (o->bench.device || o->bench.dtype == MN_F32)) return 0;
    return usage_error(" is not measured; the CPU has f32, a GPU bf16 and f32", o->dtype);
}

/* 0, or the exit status of a mistake. */
static int parse(options *o, int argc, char **argv) {
    for (int i = 2; i < argc; i++) {
        const char *option = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        int *number = strcmp(option, "--runs") == 0      ? &o->bench.n_runs
                      : strcmp(option, "--threads") == 0 ? &o->bench.n_threads
                                                         : NULL;
        const char **text = strcmp(option, "--only") == 0     ? &o->only
                            : strcmp(option, "--target") == 0 ? &o->bench.target
                            : strcmp(option, "--device") == 0 ? &o->bench.device
                            : strcmp(option, "--dtype") == 0  ? &o->dtype
                                                              : NULL;
        if (strcmp(option, "--json") == 0) o->json = true;
        else if (strcmp(option, "--list") == 0) o->list = true;
        else if (strcmp(option, "--quick") == 0) o->bench.scale = MN_BENCH_QUICK;
        else if (!number && !text) return usage_error(" is no option", option);
        else if (!value) return usage_error(" needs a value", option);
        else if (text) *text = value;
        else if (!mn_parse_count(number, value, 1, 256)) {
            return usage_error(" needs a whole number from 1 to 256", option);
        }
        i += number || text;
    }
    return parse_device(o);
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
    mn_bench bench;
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
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help();
            return 0;
        }
    }
    const bool ops = argc >= 2 && strcmp(argv[1], "ops") == 0;
    const bool train = argc >= 2 && strcmp(argv[1], "train") == 0;
    const bool infer = argc >= 2 && strcmp(argv[1], "infer") == 0;
    if (!ops && !train && !infer) {
        return usage_error(argc < 2 ? "say what to measure: mneme bench ops"
                                    : " is nothing to measure; there are: ops, train, infer",
                           argc < 2 ? "" : argv[1]);
    }
    const int mistake = parse(&o, argc, argv);
    if (mistake) return mistake;
    if (infer && !o.bench.device) {
        return usage_error(" is measured on a GPU: --device cuda", "infer");
    }
    if (infer) return mn_bench_infer_gpu(&o.bench, o.only, o.list);
    return ops ? run_ops(&o) : mn_bench_train(&o.bench, o.only, o.json, o.list);
}
