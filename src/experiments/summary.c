/* summary.c - see summary.h. */
#include "experiments/summary.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/job.h"

enum { PATH = 4096 };

/* ---- numbers --------------------------------------------------------------------------------- */

mn_estimate mn_estimate_of(const double *values, int64_t n) {
    mn_estimate e = { 0, NAN, NAN };
    double sum = 0.0, squares = 0.0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(values[i])) continue;
        e.n++;
        sum += values[i];
    }
    if (e.n == 0) return e;
    e.mean = sum / (double)e.n;
    for (int64_t i = 0; i < n; i++) {
        if (isfinite(values[i])) squares += (values[i] - e.mean) * (values[i] - e.mean);
    }
    if (e.n > 1) e.se = sqrt(squares / (double)(e.n - 1) / (double)e.n);
    return e;
}

static double number_of(const json_t *object, const char *key) {
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static mn_estimate estimate(const json_t *runs, const char *key, bool of_result) {
    const size_t n = json_array_size(runs);
    double *values = malloc((n + 1) * sizeof *values);
    for (size_t i = 0; values && i < n; i++) {
        const json_t *run = json_array_get(runs, i);
        values[i] = number_of(of_result ? json_object_get(run, "result") : run, key);
    }
    const mn_estimate e = values ? mn_estimate_of(values, (int64_t)n)
                                 : (mn_estimate){ 0, NAN, NAN };
    free(values);
    return e;
}

/* ---- settings -------------------------------------------------------------------------------- */

static void put_label(char out[MN_SUMMARY_LABEL], const json_t *value) {
    if (json_is_string(value)) {
        snprintf(out, MN_SUMMARY_LABEL, "%s", json_string_value(value));
    } else if (json_is_number(value)) {
        snprintf(out, MN_SUMMARY_LABEL, "%g", json_number_value(value));
    } else {
        char *text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
        snprintf(out, MN_SUMMARY_LABEL, "%s", text ? text : "");
        free(text);
    }
}

int mn_summary_axis(const mn_summary *s, const char *name) {
    for (int i = 0; i < s->n_axes; i++) {
        if (strcmp(s->axes[i], name) == 0) return i;
    }
    return -1;
}

/* The setting of these labels, added if there is none. */
static mn_setting *setting_of(mn_summary *s, const json_t *labels) {
    mn_setting fresh = { 0 };
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)labels, key, value) {
        if (strcmp(key, "seed") == 0) continue;
        int axis = mn_summary_axis(s, key);
        if (axis < 0 && s->n_axes < MN_SUMMARY_AXES) {
            axis = s->n_axes++;
            snprintf(s->axes[axis], MN_SUMMARY_LABEL, "%s", key);
        }
        if (axis >= 0) put_label(fresh.labels[axis], value);
    }
    for (int64_t i = 0; i < s->n; i++) {
        if (memcmp(s->settings[i].labels, fresh.labels, sizeof fresh.labels) == 0) {
            return &s->settings[i];
        }
    }
    mn_setting *grown = realloc(s->settings, (size_t)(s->n + 1) * sizeof *grown);
    if (!grown) return NULL;
    s->settings = grown;
    fresh.runs = json_array();
    if (!fresh.runs) return NULL;
    s->settings[s->n] = fresh;
    return &s->settings[s->n++];
}

static mn_status take_record(mn_summary *s, const json_t *record) {
    const json_t *job = json_object_get(record, "job");
    mn_setting *at = setting_of(s, json_object_get(job, "labels"));
    if (!at) return mn_fail(MN_ERR_MEMORY, "no memory for a summary");
    const char *status = json_string_value(json_object_get(record, "status"));
    if (!status || strcmp(status, "ok") != 0) {
        at->failed++;
        return MN_OK;
    }
    at->n++;
    json_t *shared = (json_t *)(uintptr_t)record;
    return json_array_append(at->runs, shared) == 0 ? MN_OK
                                                    : mn_fail(MN_ERR_MEMORY, "no memory for a "
                                                              "summary");
}

/* Of two equal scores the one with the lower loss counts. */
static bool better(const mn_summary *s, const mn_setting *a, const mn_setting *b) {
    if (s->scored && a->score.mean == b->score.mean) return a->loss.mean < b->loss.mean;
    const double x = s->scored ? a->score.mean : -a->loss.mean;
    const double y = s->scored ? b->score.mean : -b->loss.mean;
    return isfinite(x) && (!isfinite(y) || x > y);
}

static void find_best(mn_summary *s) {
    s->best = -1;
    for (int64_t i = 0; i < s->n; i++) s->scored |= s->settings[i].score.n > 0;
    for (int64_t i = 0; i < s->n; i++) {
        mn_setting *at = &s->settings[i];
        if (at->n == 0) continue;
        if (s->best < 0 || better(s, at, &s->settings[s->best])) s->best = i;
        at->best = true;
        for (int64_t k = 0; k < s->n; k++) {
            const mn_setting *other = &s->settings[k];
            if (strcmp(other->labels[0], at->labels[0]) != 0 || other->n == 0) continue;
            if (better(s, other, at)) at->best = false;
        }
    }
}

mn_status mn_summary_make(mn_summary *out, const json_t *records, const json_t *jobs) {
    mn_summary s = { .best = -1 };
    mn_status st = MN_OK;
    const char *key;
    json_t *record;
    size_t i;
    if (jobs) {
        json_array_foreach((json_t *)(uintptr_t)jobs, i, record) {
            char name[MN_JOB_KEY];
            if (st == MN_OK) st = mn_job_key(name, record);
            const json_t *found = st == MN_OK ? json_object_get(records, name) : NULL;
            if (!found) continue;
            /* the labels of the file as it is now, the result as it was kept */
            json_t *copy = json_copy((json_t *)(uintptr_t)found);
            json_object_set(copy, "job", record);
            st = take_record(&s, copy);
            json_decref(copy);
        }
    } else {
        json_object_foreach((json_t *)(uintptr_t)records, key, record) {
            if (st == MN_OK) st = take_record(&s, record);
        }
    }
    for (int64_t k = 0; k < s.n; k++) {
        mn_setting *at = &s.settings[k];
        at->score = estimate(at->runs, "score", true);
        at->loss = estimate(at->runs, "loss", true);
        at->seconds = estimate(at->runs, "seconds", false);
        for (int a = 0; a < s.n_axes; a++) {
            s.varies[a] |= strcmp(at->labels[a], s.settings[0].labels[a]) != 0;
        }
    }
    find_best(&s);
    *out = s;
    if (st != MN_OK) mn_summary_free(out);
    return st;
}

void mn_summary_free(mn_summary *s) {
    for (int64_t i = 0; i < s->n; i++) json_decref(s->settings[i].runs);
    free(s->settings);
    *s = (mn_summary){ .best = -1 };
}

void mn_setting_title(char *text, size_t size, const mn_summary *s, const mn_setting *setting,
                      int but) {
    size_t n = 0;
    text[0] = '\0';
    for (int a = 0; a < s->n_axes && n + 1 < size; a++) {
        if (a == but || !setting->labels[a][0] || (!s->varies[a] && a > 0)) continue;
        char *end;
        strtod(setting->labels[a], &end);
        const bool number = !*end;
        const int more = snprintf(text + n, size - n, "%s%s%s%s", n ? " " : "",
                                  number ? s->axes[a] : "", number ? "=" : "", setting->labels[a]);
        n += more > 0 ? mn_min((size_t)more, size - n - 1) : 0;
    }
    if (!text[0]) snprintf(text, size, "all");
}

/* ---- files ----------------------------------------------------------------------------------- */

static void put_field(FILE *out, const char *text) {
    if (!strpbrk(text, ",\"\n\r")) {
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

static void put_number(FILE *out, double value) {
    if (isfinite(value)) fprintf(out, ",%.9g", value);
    else fputc(',', out);
}

static void put_axes(FILE *out, const mn_summary *s) {
    for (int a = 0; a < s->n_axes; a++) {
        put_field(out, s->axes[a]);
        fputc(',', out);
    }
}

static void put_labels(FILE *out, const mn_summary *s, const mn_setting *at) {
    for (int a = 0; a < s->n_axes; a++) {
        put_field(out, at->labels[a]);
        fputc(',', out);
    }
}

static void put_runs(FILE *out, const mn_summary *s) {
    static const char *const numbers[] = { "score", "loss", "token", "macro", "example", "sequence",
                                           "step", "train_loss", "parameters" };
    put_axes(out, s);
    fputs("seed,seconds", out);
    for (size_t k = 0; k < MN_COUNTOF(numbers); k++) fprintf(out, ",%s", numbers[k]);
    fputs(",key,commit\n", out);
    for (int64_t i = 0; i < s->n; i++) {
        size_t j;
        json_t *run;
        json_array_foreach(s->settings[i].runs, j, run) {
            char seed[MN_SUMMARY_LABEL];
            const json_t *result = json_object_get(run, "result");
            put_label(seed, json_object_get(json_object_get(run, "job"), "seed"));
            put_labels(out, s, &s->settings[i]);
            put_field(out, seed);
            put_number(out, number_of(run, "seconds"));
            for (size_t k = 0; k < MN_COUNTOF(numbers); k++) {
                put_number(out, number_of(result, numbers[k]));
            }
            const char *commit = json_string_value(json_object_get(run, "commit"));
            fprintf(out, ",%s,%s\n", json_string_value(json_object_get(run, "key")),
                    commit ? commit : "");
        }
    }
}

static void put_settings(FILE *out, const mn_summary *s) {
    put_axes(out, s);
    fputs("n,failed,score,score_se,loss,loss_se,seconds,best\n", out);
    for (int64_t i = 0; i < s->n; i++) {
        const mn_setting *at = &s->settings[i];
        put_labels(out, s, at);
        fprintf(out, "%" PRId64 ",%" PRId64, at->n, at->failed);
        put_number(out, at->score.mean);
        put_number(out, at->score.se);
        put_number(out, at->loss.mean);
        put_number(out, at->loss.se);
        put_number(out, at->seconds.mean);
        fprintf(out, ",%d\n", at->best);
    }
}

static mn_status write_file(const mn_summary *s, const char *folder, const char *name,
                            void (*put)(FILE *out, const mn_summary *s)) {
    char path[PATH];
    if (snprintf(path, PATH, "%s/%s", folder, name) >= PATH) {
        return mn_fail(MN_ERR_ARGUMENT, "%s/%s: the path is too long", folder, name);
    }
    FILE *out = fopen(path, "w");
    if (!out) return mn_fail(MN_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
    put(out, s);
    const bool good = !ferror(out);
    if (fclose(out) == 0 && good) return MN_OK;
    return mn_fail(MN_ERR_IO, "%s: cannot write: %s", path, strerror(errno));
}

mn_status mn_summary_write(const mn_summary *s, const char *folder) {
    const mn_status st = write_file(s, folder, "runs.csv", put_runs);
    return st == MN_OK ? write_file(s, folder, "summary.csv", put_settings) : st;
}
