/* grid.c - every operator of a GPU at every shape of grid.def, against its floors: bytes at the
 * rate of copies, work at the rate of matrix products, whichever takes longer. A kernel that was
 * tuned at one shape shows here what it does at others. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/bench/bench.h"
#include "io/json_write.h"

enum { GRID_RUNS = 10, MOST_PACKED = 64 };

typedef struct shape {
    int64_t n_sequences, tokens, heads, share, K, V;
    int packed;
    double gates;
} shape;

static const shape shapes[] = {
#define GRID_SHAPE(sequences, tokens, heads, share, K, V, packed, gates)                           \
    { sequences, tokens, heads, share, K, V, packed, gates },
#include "cli/bench/grid.def"
};

static const char *const rows[] = {
#define GRID_ROW(case) case,
#include "cli/bench/grid.def"
};

/* Borders of sequences of uneven lengths: the i-th is i + 1 parts long. */
static void cut(int64_t borders[MOST_PACKED + 1], const shape *s) {
    const int64_t parts = (int64_t)s->packed * (s->packed + 1) / 2;
    for (int64_t i = 0; i <= s->packed; i++) {
        borders[i] = s->tokens * (i * (i + 1) / 2) / parts;
    }
}

/* Whether heads of the operator may share what has heads of its own. */
static bool shares_heads(mn_op_id op) {
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; i < count; i++) {
        if (strchr(fields[i].axes, 'J')) return true;
    }
    return false;
}

/* The case of a row at a shape; `borders` stay in use. */
static mn_bench_case case_at(const mn_bench_case *row, const shape *s,
                             int64_t borders[MOST_PACKED + 1]) {
    mn_bench_case at = *row;
    mn_call *c = &at.call;
    c->B = s->n_sequences;
    c->T = s->tokens;
    if (c->H > 0) {
        c->H = s->heads;
        if (c->K > 0) c->K = s->K;
        if (c->V > 0) c->V = s->V;
        c->J = s->share > 1 && shares_heads(row->op) ? s->heads / s->share : 0;
    } else {
        c->V = s->heads * s->V;
    }
    if (s->packed > 0) {
        cut(borders, s);
        c->cu_seqlens = borders;
        c->n_seqs = s->packed;
    }
    return at;
}

/* Log decays, made stronger or weaker. */
static void set_gates(mn_sample *sample, double by) {
    static const char *const names[] = { "g", "la" };
    for (size_t i = 0; i < MN_COUNTOF(names) && by != 1.0; i++) {
        mn_sample_tensor *g = mn_sample_find(sample, names[i]);
        for (int64_t k = 0; g && k < g->held; k++) {
            mn_sample_set(sample, g->data, k, by * mn_sample_get(sample, g->data, k));
        }
    }
}

typedef struct point {
    bool measured;
    double floor_s, seconds, share;
} point;

static mn_status measure(point *out, const mn_bench *bench, const mn_bench_case *which,
                         double gates) {
    mn_bench_result r = { .which = which };
    mn_sample *sample = calloc(1, sizeof *sample);
    if (!sample) return mn_fail(MN_ERR_MEMORY, "no memory for a sample");
    mn_status st = mn_bench_open(sample, which, bench->options.scale, MN_F32, true);
    if (st == MN_OK) {
        mn_sample_draw_repeated(sample, 1);
        set_gates(sample, gates);
        const int n = bench->options.n_runs > 0 ? bench->options.n_runs : GRID_RUNS;
        st = mn_bench_gpu_time(&r, bench, sample, n);
    }
    if (st == MN_OK) {
        const double bytes_s = r.bytes / mn_bench_gpu_copy_rate(bench->gpu);
        const double work_s = r.flop / mn_bench_gpu_product_rate(bench->gpu);
        *out = (point){ true, fmax(bytes_s, isnan(work_s) ? 0.0 : work_s), r.median_s, 0.0 };
        out->share = out->floor_s / out->seconds;
    }
    mn_sample_free(sample);
    free(sample);
    return st;
}

static void print_point(const shape *s, bool shares, const point p[2]) {
    printf("  %2" PRId64 " x %6" PRId64 "  H %2" PRId64 "  K %3" PRId64 " V %3" PRId64,
           s->n_sequences, s->tokens, s->heads, s->K, s->V);
    if (s->packed) printf("  packed %2d", s->packed);
    else if (s->gates != 1.0) printf("  gates x%-4g", s->gates);
    else if (shares && s->share > 1) printf("  of %2" PRId64 " keys", s->heads / s->share);
    else printf("  %10s", "");
    for (int i = 0; i < 2; i++) {
        if (p[i].measured) printf("  %9.3f %5.2f", 1e3 * p[i].seconds, p[i].share);
        else printf("  %9s %5s", "-", "");
    }
    putchar('\n');
    fflush(stdout);
}

static json_t *point_json(const shape *s, const mn_bench_case *at, const point *p) {
    const mn_call *c = &at->call;
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:i, s:o, s:s, s:o, s:o, s:o}", "sequences",
                     (json_int_t)s->n_sequences, "tokens", (json_int_t)s->tokens, "heads",
                     (json_int_t)s->heads, "key_heads", (json_int_t)(c->J ? c->J : s->heads), "K",
                     (json_int_t)s->K, "V", (json_int_t)s->V, "packed", s->packed, "gates",
                     mn_json_real(s->gates), "pass", mn_bench_pass_name(at->pass), "median_s",
                     mn_json_real(p->seconds), "floor_s", mn_json_real(p->floor_s), "share",
                     mn_json_real(p->share));
}

/* Geometric mean and worst of the shares of one pass. */
static void summarise(double *mean, double *worst, const point (*points)[2], int pass) {
    double sum = 0.0;
    int n = 0;
    *worst = INFINITY;
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) {
        if (!points[i][pass].measured) continue;
        sum += log(points[i][pass].share);
        *worst = fmin(*worst, points[i][pass].share);
        n++;
    }
    *mean = n > 0 ? exp(sum / n) : NAN;
    if (n == 0) *worst = NAN;
}

/* All shapes of one row; those that the device does not serve or has no memory for are told and
 * left out. */
static void measure_row(json_t *list, const mn_bench *bench, const mn_bench_case *row, bool json) {
    point points[MN_COUNTOF(shapes)][2] = { { { 0 } } };
    json_t *all = json_array();
    if (!json) {
        printf("%s\n  %-39s %9s %5s  %9s %5s\n", row->name, "", "fwd ms", "share", "+bwd ms",
               "share");
    }
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) {
        int64_t borders[MOST_PACKED + 1];
        mn_bench_case at = case_at(row, &shapes[i], borders);
        for (int pass = MN_BENCH_FORWARD; pass <= MN_BENCH_TRAIN; pass++) {
            at.pass = (mn_bench_pass)pass;
            const mn_status st = measure(&points[i][pass], bench, &at, shapes[i].gates);
            if (st != MN_OK) fprintf(stderr, "mneme bench: %s: %s\n", row->name, mn_last_error());
            else json_array_append_new(all, point_json(&shapes[i], &at, &points[i][pass]));
        }
        if (!json) print_point(&shapes[i], at.call.J > 0, points[i]);
    }
    double mean[2], worst[2];
    for (int pass = 0; pass < 2; pass++) summarise(&mean[pass], &worst[pass], points, pass);
    if (!json) {
        printf("  geometric mean of shares %.3f forward, %.3f with backward; worst %.3f, %.3f\n\n",
               mean[0], mean[1], worst[0], worst[1]);
    }
    json_array_append_new(list, json_pack("{s:s, s:o, s:o, s:o, s:o, s:o}", "name", row->name,
                                          "points", all, "mean_forward", mn_json_real(mean[0]),
                                          "mean_train", mn_json_real(mean[1]), "worst_forward",
                                          mn_json_real(worst[0]), "worst_train",
                                          mn_json_real(worst[1])));
}

static const mn_bench_case *find_case(const char *name) {
    int count;
    const mn_bench_case *all = mn_bench_cases(&count, true);
    for (int i = 0; i < count; i++) {
        if (strcmp(all[i].name, name) == 0) return &all[i];
    }
    return NULL;
}

static bool chosen(const mn_bench_case *row, const char *only) {
    return row && (!only || strstr(row->name, only));
}

/* Results agree with the reference at a small size of the row, forward and backward. */
static mn_status check_row(const mn_bench *bench, const mn_bench_case *row) {
    mn_bench_case train = *row;
    train.pass = MN_BENCH_TRAIN;
    const mn_status st = mn_bench_gpu_serves(&train);
    return st == MN_OK ? mn_bench_check(&train, bench->context, bench->reference,
                                        bench->options.dtype) : st;
}

int mn_bench_grid(const mn_bench_options *options, const char *only, bool json, bool list) {
    int n_chosen = 0, n_failed = 0;
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        const bool takes = chosen(find_case(rows[i]), only);
        n_chosen += takes;
        if (list && takes) puts(rows[i]);
    }
    if (n_chosen == 0) {
        fprintf(stderr, "mneme bench: no row of the grid is called like \"%s\"\n", only);
        return 2;
    }
    if (list) return 0;
    mn_bench bench = { 0 };
    if (mn_bench_create(&bench, options) != MN_OK) {
        fprintf(stderr, "mneme bench: %s\n", mn_last_error());
        return 2;
    }
    json_t *all = json_array();
    if (!json) mn_bench_print_gpu(stdout, &bench);
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        const mn_bench_case *row = find_case(rows[i]);
        if (!chosen(row, only)) continue;
        if (check_row(&bench, row) == MN_OK) {
            measure_row(all, &bench, row, json);
        } else {
            fprintf(stderr, "mneme bench: %s: %s\n", row->name, mn_last_error());
            n_failed++;
        }
    }
    json_t *root = mn_bench_root_json(&bench, "grid");
    json_object_set_new(root, "rows", all);
    char *text = NULL;
    if (json && mn_json_text(&text, root, MN_JSON_PRETTY) == MN_OK) puts(text);
    free(text);
    json_decref(root);
    mn_bench_destroy(&bench);
    return n_failed > 0;
}
