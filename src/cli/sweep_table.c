/* sweep_table.c - the closing table of a sweep: mean and standard error over seeds by setting. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "cli/sweep.h"
#include "experiments/summary.h"

enum { TITLE = 200, WIDEST = 40 };

/* "0.9430 ± 0.0021" right-aligned in 19 columns; the sign has two bytes. */
static void put_estimate(const mn_estimate *e) {
    char text[48] = "-";
    if (e->n > 1) snprintf(text, sizeof text, "%.4f \xC2\xB1 %.4f", e->mean, e->se);
    else if (e->n == 1) snprintf(text, sizeof text, "%.4f         ", e->mean);
    const int wide = (int)strlen(text) - (e->n > 1 ? 1 : 0);
    printf("%*s%s", wide < 19 ? 19 - wide : 0, "", text);
}

static void print_rows(const mn_summary *s) {
    int64_t width = 7;
    char title[TITLE];
    for (int64_t i = 0; i < s->n; i++) {
        mn_setting_title(title, sizeof title, s, &s->settings[i], -1);
        width = mn_max(width, (int64_t)mn_min(strlen(title), (size_t)WIDEST));
    }
    printf("\nmean \xC2\xB1 standard error over seeds\n\n  %-*s   n", (int)width, "setting");
    printf("%s%s\n", s->scored ? "              score" : "", "               loss");
    for (int64_t i = 0; i < s->n; i++) {
        const mn_setting *at = &s->settings[i];
        mn_setting_title(title, sizeof title, s, at, -1);
        const bool marked = s->n_axes > 1 ? at->best : i == s->best;
        printf("%c %-*.*s %3" PRId64, marked ? '*' : ' ', (int)width, (int)width, title, at->n);
        if (s->scored) put_estimate(&at->score);
        put_estimate(&at->loss);
        if (at->failed > 0) printf("  %" PRId64 " failed", at->failed);
        putchar('\n');
    }
}

static void print_best(const mn_summary *s) {
    char title[TITLE];
    if (s->best < 0) return;
    const mn_setting *at = &s->settings[s->best];
    const mn_estimate *e = s->scored ? &at->score : &at->loss;
    mn_setting_title(title, sizeof title, s, at, -1);
    printf("\nbest: %s, %s %.4f", title, s->scored ? "score" : "loss", e->mean);
    if (e->n > 1) printf(" \xC2\xB1 %.4f over %" PRId64 " seeds", e->se, e->n);
    if (s->n_axes > 1) printf("; * the best of each %s", s->axes[0]);
    putchar('\n');
}

int mn_sweep_table(const char *folder, const json_t *jobs, bool quiet) {
    char path[MN_SWEEP_PATH];
    json_t *records = NULL;
    mn_summary summary = { .best = -1 };
    snprintf(path, sizeof path, "%s/results.jsonl", folder);
    mn_status st = mn_sweep_records(&records, path);
    if (st == MN_OK) st = mn_summary_make(&summary, records, jobs);
    if (st == MN_OK && summary.n > 0) st = mn_summary_write(&summary, folder);
    if (st == MN_OK && summary.n > 0 && !quiet) {
        print_rows(&summary);
        print_best(&summary);
        printf("\n%s/results.jsonl, runs.csv and summary.csv hold the numbers; mneme plot %s draws "
               "them\n", folder, folder);
    }
    if (st != MN_OK) fprintf(stderr, "mneme sweep: %s\n", mn_last_error());
    mn_summary_free(&summary);
    json_decref(records);
    return st == MN_OK ? 0 : 1;
}
