/* report.c - tables of our numbers beside the paper's, as Markdown and as CSV. */
#include "experiments/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/cells.h"
#include "experiments/claims.h"
#include "experiments/job.h"
#include "experiments/job_internal.h"
#include "io/file.h"

enum { PATH = 4096, TITLE = 256 };

/* ---- files ----------------------------------------------------------------------------------- */

typedef struct page {
    const mn_json *results;
    const mn_cells *cells;       // of the table, where a page is about one
} page;

typedef void (*page_fill)(FILE *out, const page *p);

static mn_status write_page(const char *folder, const char *name, page_fill fill, const page *p) {
    char path[PATH], *text = NULL;
    size_t size = 0;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", folder);
    }
    FILE *out = open_memstream(&text, &size);
    if (!out) return mn_fail(MN_ERR_MEMORY, "no memory for %s", name);
    fill(out, p);
    const bool whole = fclose(out) == 0;
    const mn_status st = whole ? mn_file_write_bytes(path, text, size)
                               : mn_fail(MN_ERR_MEMORY, "no memory for %s", name);
    free(text);
    return st;
}

static const char *text_of(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

/* ---- Markdown -------------------------------------------------------------------------------- */

/* As many digits as the error lets stand: 97.3 ± 0.4. */
static void put_mean(FILE *out, const mn_cell *cell, bool percent) {
    const double scale = percent ? 100.0 : 1.0;
    if (cell->n == 0) {
        fputs(cell->missing > 0 ? "failed" : "-", out);
        return;
    }
    fprintf(out, "%.*f", percent ? 1 : 4, scale * cell->mean);
    if (!isnan(cell->se)) fprintf(out, " ± %.*f", percent ? 1 : 4, scale * cell->se);
}

/* Text in a table: a bar would end the column. */
static void put_text(FILE *out, const char *text) {
    for (; *text; text++) {
        if (*text == '|') fputc('\\', out);
        fputc(*text, out);
    }
}

/* Rows against columns. */
static void put_grid(FILE *out, const mn_cells *c) {
    fputs("\n| |", out);
    for (int64_t k = 0; k < c->n_columns; k++) fprintf(out, " %s |", c->columns[k]);
    fputs("\n|---|", out);
    for (int64_t k = 0; k < c->n_columns; k++) fputs("---|", out);
    for (int64_t r = 0; r < c->n_rows; r++) {
        fputs("\n| ", out);
        put_text(out, c->rows[r]);
        fputs(" |", out);
        for (int64_t k = 0; k < c->n_columns; k++) {
            const mn_cell *cell = mn_cells_at(c, c->rows[r], c->columns[k]);
            fputc(' ', out);
            if (cell) put_mean(out, cell, c->percent);
            fputs(" |", out);
        }
    }
    fputc('\n', out);
}

static int64_t count_paper(const mn_cells *c) {
    int64_t n = 0;
    for (int64_t i = 0; i < c->n; i++) n += c->items[i].printed != NULL;
    return n;
}

static void put_paper(FILE *out, const mn_cells *c) {
    const double scale = c->percent ? 100.0 : 1.0;
    fputs("\nBeside the paper:\n\n| | | ours | paper | difference | its standard error | place |\n"
          "|---|---|---|---|---|---|---|\n", out);
    for (int64_t i = 0; i < c->n; i++) {
        const mn_cell *cell = &c->items[i];
        if (!cell->printed) continue;
        fputs("| ", out);
        put_text(out, cell->row);
        fprintf(out, " | %s | ", cell->column);
        put_mean(out, cell, c->percent);
        fprintf(out, " | %s | ", cell->printed);
        if (cell->n > 0) fprintf(out, "%+.*f | ", c->percent ? 1 : 4,
                                 scale * (cell->mean - cell->paper));
        else fputs("- | ", out);
        if (cell->n > 1) fprintf(out, "%.*f | ", c->percent ? 1 : 4, scale * cell->se);
        else fputs("- | ", out);
        put_text(out, cell->place ? cell->place : "");
        fputs(" |\n", out);
    }
    if (c->percent) fputs("\nThe paper's numbers count as exact in the standard error.\n", out);
}

/* Numbers that are to be the same to the digits printed. */
static void put_exact(FILE *out, const mn_cells *c) {
    int64_t agree = 0;
    fputs("\n| | | ours | paper | as printed | place |\n|---|---|---|---|---|---|\n", out);
    for (int64_t i = 0; i < c->n; i++) {
        const mn_cell *cell = &c->items[i];
        const bool same = mn_cell_agrees(cell, c->percent);
        agree += same;
        fputs("| ", out);
        put_text(out, cell->row);
        fprintf(out, " | %s | ", cell->column);
        if (cell->n > 0) fprintf(out, "%.6g", cell->mean);
        fprintf(out, " | %s | %s | ", cell->printed ? cell->printed : "", same ? "yes" : "NO");
        put_text(out, cell->place ? cell->place : "");
        fputs(" |\n", out);
    }
    fprintf(out, "\n%" PRId64 " of %" PRId64 " printed numbers come out to the digits printed.\n",
            agree, count_paper(c));
}

/* Whether a cell of the row before `at` has the same setting. */
static bool is_said(const mn_cells *c, int64_t at) {
    for (int64_t i = 0; i < at; i++) {
        if (strcmp(c->items[i].row, c->items[at].row) == 0 &&
            strcmp(c->items[i].setting, c->items[at].setting) == 0) {
            return true;
        }
    }
    return false;
}

/* With a pilot the settings were chosen on its seeds, and each row says its own once. */
static void put_settings(FILE *out, const mn_cells *c, bool pilot) {
    bool any = false;
    for (int64_t i = 0; i < c->n; i++) {
        const mn_cell *cell = &c->items[i];
        if (!cell->setting[0] || (pilot && is_said(c, i))) continue;
        if (!any) fputs(pilot ? "\nChosen on other seeds:" : "\nBest of the settings tried:", out);
        fprintf(out, "%s %s%s%s at %s", any ? ";" : "", cell->row, pilot ? "" : " ",
                pilot ? "" : cell->column, cell->setting);
        any = true;
    }
    if (any) fputs(".\n", out);
}

/* " 3 seeds.", or the range. */
static void put_seeds(FILE *out, const mn_cells *c) {
    int64_t least = INT64_MAX, most = 0;
    for (int64_t i = 0; i < c->n; i++) {
        if (c->items[i].n == 0) continue;
        least = mn_min(least, c->items[i].n);
        most = mn_max(most, c->items[i].n);
    }
    if (most == 0) fputc('\n', out);
    else if (least == most) fprintf(out, " %" PRId64 " seed%s.\n", most, most == 1 ? "" : "s");
    else fprintf(out, " %" PRId64 " to %" PRId64 " seeds.\n", least, most);
}

static void put_table(FILE *out, const page *p, int64_t number) {
    mn_cells cells;
    char svg[32];
    if (mn_cells_make(&cells, p->results, number) != MN_OK) {
        fprintf(out, "\nTable %" PRId64 " cannot be made: %s\n", number + 1, mn_last_error());
        return;
    }
    fprintf(out, "\n## %s\n", cells.title);
    if (cells.n == 0) {
        fputs("\nNothing of this was asked.\n", out);
        mn_cells_free(&cells);
        return;
    }
    if (cells.percent) {
        fputs("\nPercent, mean over seeds ± standard error of the mean.", out);
        put_seeds(out, &cells);
    }
    if (cells.exact) put_exact(out, &cells);
    else put_grid(out, &cells);
    if (!cells.exact && count_paper(&cells) > 0) put_paper(out, &cells);
    put_settings(out, &cells, json_object_get(p->results->value, "pilot") != NULL);
    snprintf(svg, sizeof svg, "table-%" PRId64 ".svg", number + 1);
    const json_t *figures = json_object_get(p->results->value, "figures");
    for (size_t i = 0; i < json_array_size(figures); i++) {
        const char *name = json_string_value(json_array_get(figures, i));
        if (name && strcmp(name, svg) == 0) fprintf(out, "\n![%s](%s)\n", cells.title, svg);
    }
    mn_cells_free(&cells);
}

static void put_claim(FILE *out, const mn_claim *claim, bool full_size) {
    const double scale = claim->percent ? 100.0 : 1.0;
    fputs("| ", out);
    put_text(out, claim->says);
    fprintf(out, " | %s | ", mn_claim_word(claim, full_size));
    if (claim->verdict == MN_CLAIM_OPEN) {
        fputs("- | - | - |\n", out);
        return;
    }
    fprintf(out, "%.4g", scale * claim->value);
    if (!isnan(claim->se)) fprintf(out, " ± %.2g", scale * claim->se);
    fprintf(out, " | %s %.4g | %" PRId64 " |\n", claim->below ? "below" : "above",
            scale * claim->bound, claim->seeds);
}

/* Whether these are the published sizes, which no option of the command changed. */
static bool is_full(const json_t *root) {
    return strcmp(text_of(root, "preset"), "full") == 0 &&
           !json_is_true(json_object_get(root, "changed"));
}

/* What the paper says, and whether it came out here. */
static void put_claims(FILE *out, const mn_json *results) {
    const int64_t n = mn_claim_count(results);
    if (n == 0) return;
    const bool full = is_full(results->value);
    fputs("\n## What came out\n\n" MN_CLAIM_RULE "\n\n| claim | verdict | ours | asked | seeds |\n"
          "|---|---|---|---|---|\n", out);
    for (int64_t i = 0; i < n; i++) {
        mn_claim claim;
        if (mn_claim_judge(&claim, results, i) == MN_OK) put_claim(out, &claim, full);
        else fprintf(out, "| claim %" PRId64 " cannot be judged: %s | | | | |\n", i + 1,
                     mn_last_error());
    }
}

/* The values of `key` in runs that ended, each once: " on cuda, cpu". */
static void put_each(FILE *out, const json_t *runs, const char *key, const char *otherwise) {
    json_t *seen = json_object(), *run;
    const char *before = " ";
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)runs, i, run) {
        const char *text = text_of(run, key);
        if (strcmp(text_of(run, "status"), "ok") != 0) continue;
        if (*text == '\0') text = otherwise;
        if (json_object_get(seen, text)) continue;
        json_object_set_new(seen, text, json_true());
        fprintf(out, "%s%s", before, text);
        before = ", ";
    }
    json_decref(seen);
}

/* How many runs came out, where and by which commits, the seconds they took, and what failed. */
static void put_runs(FILE *out, const json_t *root) {
    const json_t *runs = json_object_get(root, "runs"), *run;
    double seconds = 0.0;
    int64_t done = 0;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)runs, i, run) {
        seconds += json_number_value(json_object_get(run, "seconds"));
        done += strcmp(text_of(run, "status"), "ok") == 0;
    }
    fprintf(out, "\n## Runs\n\n%" PRId64 " of %zu runs, %.0f seconds of one core together. Each, "
            "with all that defines it, is in results.json and a line of runs.csv.\n", done,
            json_array_size(runs), seconds);
    if (done > 0) {
        fputs("\nThey ran on", out);
        put_each(out, runs, "device", "cpu");
        fputs(", by commit", out);
        put_each(out, runs, "commit", "unknown");
        fputs(".\n", out);
    }
    json_array_foreach((json_t *)(uintptr_t)runs, i, run) {
        char title[TITLE];
        if (strcmp(text_of(run, "status"), "ok") == 0) continue;
        mn_job_title(title, sizeof title, run);
        const char *error = text_of(run, "error");
        fprintf(out, "\n- %s: %s%s%s", title, text_of(run, "status"), *error ? ": " : "", error);
    }
    if (done < (int64_t)json_array_size(runs)) fputc('\n', out);
}

static void put_figures(FILE *out, const json_t *root) {
    const json_t *figures = json_object_get(root, "figures"), *name;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)figures, i, name) {
        const char *text = json_string_value(name);
        if (text && strncmp(text, "table-", 6) != 0) fprintf(out, "\n![%s](%s)\n", text, text);
    }
    const char *why = text_of(root, "no_figures");
    if (*why) fprintf(out, "\nThere are no figures: %s.\n", why);
}

static void fill_report(FILE *out, const page *p) {
    const json_t *root = p->results->value, *note;
    size_t i;
    fprintf(out, "# %s: %s\n\nPaper: %s. Preset: %s%s. mneme %s, commit %s.\n",
            text_of(root, "experiment"), text_of(root, "about"), text_of(root, "paper"),
            text_of(root, "preset"),
            is_full(root) ? ", sizes as published"
                : ", smaller than published: compare orders, not numbers",
            text_of(root, "version"), text_of(root, "commit"));
    if (*text_of(root, "command")) fprintf(out, "\n    %s\n", text_of(root, "command"));
    put_claims(out, p->results);
    const size_t tables = json_array_size(json_object_get(root, "tables"));
    for (i = 0; i < tables; i++) put_table(out, p, (int64_t)i);
    put_figures(out, root);
    const json_t *notes = json_object_get(root, "notes");
    if (json_array_size(notes) > 0) fputs("\n## Notes\n\n", out);
    json_array_foreach((json_t *)(uintptr_t)notes, i, note) {
        const char *text = json_string_value(note);
        if (text) fprintf(out, "- %s\n", text);
    }
    put_runs(out, root);
}

/* ---- CSV ------------------------------------------------------------------------------------- */

/* A field in double quotes where it has to be. */
static void put_field(FILE *out, const char *text) {
    if (!strpbrk(text, ",\"\n")) {
        fputs(text, out);
        return;
    }
    fputc('"', out);
    for (; *text; text++) {
        if (*text == '"') fputc('"', out);
        fputc(*text, out);
    }
    fputc('"', out);
}

static void put_number(FILE *out, double x) {
    if (isfinite(x)) fprintf(out, ",%.9g", x);
    else fputc(',', out);
}

static void fill_table(FILE *out, const page *p) {
    fputs("row,column,setting,seeds,ours,standard_error,paper,difference,place\n", out);
    for (int64_t i = 0; i < p->cells->n; i++) {
        const mn_cell *cell = &p->cells->items[i];
        put_field(out, cell->row);
        fputc(',', out);
        put_field(out, cell->column);
        fputc(',', out);
        put_field(out, cell->setting);
        fprintf(out, ",%" PRId64, cell->n);
        put_number(out, cell->mean);
        put_number(out, cell->se);
        put_number(out, cell->paper);
        put_number(out, cell->mean - cell->paper);
        fputc(',', out);
        put_field(out, cell->place ? cell->place : "");
        fputc('\n', out);
    }
}

static void fill_runs(FILE *out, const page *p) {
    static const char *const numbers[] = { "score", "loss", "token", "macro", "example", "sequence",
                                           "step", "steps", "train_loss", "parameters" };
    const json_t *runs = json_object_get(p->results->value, "runs"), *run;
    size_t i;
    fputs("key,title,status,seconds", out);
    for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++) fprintf(out, ",%s", numbers[k]);
    fputs(",stopped\n", out);
    json_array_foreach((json_t *)(uintptr_t)runs, i, run) {
        char title[TITLE];
        const json_t *result = json_object_get(run, "result");
        mn_job_title(title, sizeof title, run);
        fprintf(out, "%s,", text_of(run, "key"));
        put_field(out, title);
        fprintf(out, ",%s", text_of(run, "status"));
        put_number(out, json_number_value(json_object_get(run, "seconds")));
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++) {
            const json_t *value = json_object_get(result, numbers[k]);
            put_number(out, json_is_number(value) ? json_number_value(value) : NAN);
        }
        fprintf(out, ",%s\n", text_of(result, "stopped"));
    }
}

mn_status mn_report_write(const mn_json *results, const char *folder) {
    const mn_json tables = mn_json_member(results, "tables");
    const page whole = { .results = results };
    mn_status st = mn_json_expect_list(&tables);
    for (int64_t i = 0; st == MN_OK && i < mn_json_count(&tables); i++) {
        mn_cells cells;
        char name[32];
        snprintf(name, sizeof name, "table-%" PRId64 ".csv", i + 1);
        st = mn_cells_make(&cells, results, i);
        if (st != MN_OK) break;
        st = write_page(folder, name, fill_table, &(page){ .results = results, .cells = &cells });
        mn_cells_free(&cells);
    }
    if (st == MN_OK) st = write_page(folder, "runs.csv", fill_runs, &whole);
    return st == MN_OK ? write_page(folder, "report.md", fill_report, &whole) : st;
}
