/* report.c - results of the bench as a table or as JSON. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/bench/bench.h"
#include "cli/machine.h"
#include "io/json_write.h"

typedef struct named_size {
    char letter;
    int64_t size;
} named_size;

enum { MAX_SIZES = 14 };    // letters of mn_call

/* The sizes that are set, in the usual order; how many. */
static int sizes_of(named_size out[MAX_SIZES], const mn_call *call) {
    int n = 0;
    for (const char *letter = "BTLHJQKVGPRWDS"; *letter; letter++) {
        const int64_t size = *mn_axis_slot((mn_call *)call, *letter);    // only looked at
        if (size > 0) out[n++] = (named_size){ *letter, size };
    }
    return n;
}

/* A second of one amount of work, in the unit of the ceiling. */
static double rate_of(const mn_bench_result *r, double seconds) {
    const double billions = r->which->ceiling == MN_CEILING_THREADS ? 1.0 : 1e9;
    return r->amount / seconds / billions;
}

static bool judged(const mn_bench *bench, const mn_bench_result *r) {
    return r->which->asked > 0.0 && bench->options.scale == MN_BENCH_FULL && !isnan(r->share);
}

void mn_bench_print_gpu(FILE *out, const mn_bench *bench) {
    const mn_device_info *gpu = mn_device_facts(bench->context->device);
    fprintf(out, "%s, compute capability %d.%d, %d processors, %.0f GB, L2 %.0f MB\n", gpu->name,
            gpu->major, gpu->minor, gpu->n_processors, (double)gpu->bytes / 1e9,
            (double)gpu->l2_bytes / 1e6);
    fprintf(out, "  copies of 1 GiB: %.0f GB/s; bf16 products: %.0f TFLOP/s\n",
            mn_bench_gpu_copy_rate(bench->gpu) / 1e9, mn_bench_gpu_product_rate(bench->gpu) / 1e12);
}

void mn_bench_print_header(FILE *out, const mn_bench *bench) {
    char cpu[128];
    mn_machine_cpu(cpu, sizeof cpu);
    fprintf(out, "mneme %s bench ops\n%s, %d threads, target %s, %s\n", mn_version(), cpu,
            mn_context_threads(bench->context), mn_context_target(bench->context),
            mn_dtype_name(bench->options.dtype));
    if (bench->gpu) mn_bench_print_gpu(out, bench);
    for (int i = 0; i < MN_CEILING_COUNT; i++) {
        const mn_ceiling_info *info = mn_ceiling_describe((mn_ceiling_id)i);
        if (mn_ceiling_of_device((mn_ceiling_id)i) != (bench->gpu != NULL)) continue;
        fprintf(out, "  ceiling %-8s %s\n", info->name, info->about);
    }
    if (bench->options.scale == MN_BENCH_QUICK)
        fputs("  quick: cut sizes, nothing is judged\n", out);
    fprintf(out, "\n%-30s %4s %10s %10s %9s %-8s %-8s %9s %6s %6s", "case", "runs", "min ms",
            "median ms", "rate", "", "ceiling", "its rate", "share", "asked");
    fputs(bench->gpu ? "  first ms\n" : "\n", out);
}

void mn_bench_print(FILE *out, const mn_bench *bench, const mn_bench_result *r) {
    const mn_ceiling_info *info = mn_ceiling_describe(r->which->ceiling);
    fprintf(out, "%-30s %4d %10.3f %10.3f %9.2f %-8s %-8s %9.2f %6.2f", r->which->name, r->n_runs,
            1e3 * r->min_s, 1e3 * r->median_s, rate_of(r, r->median_s), info->unit, info->name,
            rate_of(r, r->ceiling_median_s), r->share);
    if (judged(bench, r)) {
        fprintf(out, " %6.2f %s", r->which->asked,
                r->share >= r->which->asked ? "reached" : "missed");
    }
    if (bench->gpu) fprintf(out, "%*s%10.2f", judged(bench, r) ? 0 : 7, "", 1e3 * r->first_s);
    named_size sizes[MAX_SIZES];
    const int n = sizes_of(sizes, &r->call);
    fputs(judged(bench, r) && r->share < r->which->asked ? "   " : "  ", out);
    for (int i = 0; i < n; i++) fprintf(out, " %c%" PRId64, sizes[i].letter, sizes[i].size);
    fputc('\n', out);
    fflush(out);
}

void mn_bench_print_footer(FILE *out, const mn_bench *bench, const mn_bench_result *results,
                           int count) {
    int n_asked = 0, n_reached = 0;
    for (int i = 0; i < count; i++) {
        if (!judged(bench, &results[i])) continue;
        n_asked++;
        n_reached += results[i].share >= results[i].which->asked;
    }
    fprintf(out, "\n%d cases; %d of %d asked shares reached\n", count, n_reached, n_asked);
}

static json_t *sizes_json(const mn_call *call) {
    named_size sizes[MAX_SIZES];
    const int n = sizes_of(sizes, call);
    json_t *object = json_object();
    for (int i = 0; i < n; i++) {
        const char key[2] = { sizes[i].letter, '\0' };
        json_object_set_new(object, key, json_integer(sizes[i].size));
    }
    return object;
}

static void set_real(json_t *object, const char *key, double value) {
    json_object_set_new(object, key, mn_json_real(value));
}

static void set_text(json_t *object, const char *key, const char *text) {
    json_object_set_new(object, key, json_string(text));
}

static json_t *ceiling_json(const mn_bench_result *r) {
    const mn_ceiling_info *info = mn_ceiling_describe(r->which->ceiling);
    json_t *object = json_object();
    set_text(object, "name", info->name);
    set_text(object, "about", info->about);
    set_real(object, "median_s", r->ceiling_median_s);
    set_real(object, "min_s", r->ceiling_min_s);
    set_real(object, "rate", rate_of(r, r->ceiling_median_s));
    return object;
}

static json_t *result_json(const mn_bench *bench, const mn_bench_result *r) {
    json_t *object = json_object();
    set_text(object, "name", r->which->name);
    set_text(object, "op", mn_op_describe(r->which->op)->name);
    set_text(object, "pass", mn_bench_pass_name(r->which->pass));
    set_text(object, "with", r->which->with);
    json_object_set_new(object, "sizes", sizes_json(&r->call));
    json_object_set_new(object, "runs", json_integer(r->n_runs));
    set_real(object, "work_flop", r->flop);
    set_real(object, "bytes", r->bytes);
    set_real(object, "min_s", r->min_s);
    set_real(object, "median_s", r->median_s);
    if (bench->gpu) {
        set_real(object, "first_call_s", r->first_s);
        set_real(object, "second_call_s", r->second_s);
    }
    set_real(object, "rate", rate_of(r, r->median_s));
    set_text(object, "unit", mn_ceiling_describe(r->which->ceiling)->unit);
    json_object_set_new(object, "ceiling", ceiling_json(r));
    set_real(object, "share", r->share);
    if (judged(bench, r)) {
        set_real(object, "asked", r->which->asked);
        json_object_set_new(object, "reached", json_boolean(r->share >= r->which->asked));
    }
    return object;
}

json_t *mn_bench_root_json(const mn_bench *bench, const char *what) {
    char cpu[128];
    mn_machine_cpu(cpu, sizeof cpu);
    json_t *root = json_object(), *machine = json_object();
    set_text(root, "bench", what);
    set_text(root, "version", mn_version());
    set_text(machine, "cpu", cpu);
    json_object_set_new(machine, "threads", json_integer(mn_context_threads(bench->context)));
    set_text(machine, "target", mn_context_target(bench->context));
    json_object_set_new(root, "machine", machine);
    if (bench->gpu) {
        const mn_device_info *gpu = mn_device_facts(bench->context->device);
        set_text(machine, "gpu", gpu->name);
        set_real(machine, "gpu_copy_bytes_per_s", mn_bench_gpu_copy_rate(bench->gpu));
        set_real(machine, "gpu_product_flop_per_s", mn_bench_gpu_product_rate(bench->gpu));
    }
    set_text(root, "dtype", mn_dtype_name(bench->options.dtype));
    json_object_set_new(root, "quick", json_boolean(bench->options.scale == MN_BENCH_QUICK));
    return root;
}

mn_status mn_bench_json(FILE *out, const mn_bench *bench, const mn_bench_result *results,
                        int count) {
    json_t *root = mn_bench_root_json(bench, "ops"), *list = json_array();
    for (int i = 0; i < count; i++) json_array_append_new(list, result_json(bench, &results[i]));
    json_object_set_new(root, "cases", list);
    char *text = NULL;
    const mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) fprintf(out, "%s\n", text);
    free(text);
    json_decref(root);
    return st;
}
