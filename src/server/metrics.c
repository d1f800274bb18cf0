/* metrics.c - the text format of Prometheus, version 0.0.4. */
#include "server/metrics.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/util.h"

static const struct {
    const char *name, *kind, *about;
    size_t offset;
} rows[] = {
#define COUNTER(id, name, about) { name, "counter", about, offsetof(mn_metrics, id) },
#define GAUGE(id, name, about) { name, "gauge", about, offsetof(mn_metrics, id) },
#include "server/metrics.def"
#undef COUNTER
#undef GAUGE
};

void mn_histogram_add(mn_histogram *h, double seconds) {
    int i = 0;
    for (double limit = 1e-3; i < MN_BUCKETS - 1 && seconds > limit; limit *= 2.0) i++;
    h->counts[i]++;
    h->sum += seconds;
}

static void add_histograms(mn_histogram *to, const mn_histogram *more, const mn_histogram *less) {
    for (int i = 0; i < MN_BUCKETS; i++) to->counts[i] += more->counts[i] - less->counts[i];
    to->sum += more->sum - less->sum;
}

void mn_metrics_add(mn_metrics *to, const mn_metrics *more, const mn_metrics *less) {
#define COUNTER(id, name, about) to->id += more->id - less->id;
#define GAUGE(id, name, about)
#include "server/metrics.def"
#undef COUNTER
#undef GAUGE
    add_histograms(&to->first_token, &more->first_token, &less->first_token);
    add_histograms(&to->step, &more->step, &less->step);
}

static mn_status add_line(mn_text *out, const char *line) {
    return mn_text_add(out, line, strlen(line));
}

static mn_status add_histogram(mn_text *out, const char *name, const char *about,
                               const mn_histogram *h) {
    char line[256];
    uint64_t sum = 0;
    double limit = 1e-3;
    snprintf(line, sizeof line, "# HELP %s %s\n# TYPE %s histogram\n", name, about, name);
    mn_status st = add_line(out, line);
    for (int i = 0; i < MN_BUCKETS && st == MN_OK; i++, limit *= 2.0) {
        char bound[32] = "+Inf";
        sum += h->counts[i];
        if (i < MN_BUCKETS - 1) snprintf(bound, sizeof bound, "%g", limit);
        snprintf(line, sizeof line, "%s_bucket{le=\"%s\"} %" PRIu64 "\n", name, bound, sum);
        st = add_line(out, line);
    }
    snprintf(line, sizeof line, "%s_sum %.9g\n%s_count %" PRIu64 "\n", name, h->sum, name, sum);
    return st == MN_OK ? add_line(out, line) : st;
}

mn_status mn_metrics_write(mn_text *out, const mn_metrics *metrics) {
    char line[512];
    mn_status st = MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(rows) && st == MN_OK; i++) {
        uint64_t value;
        memcpy(&value, (const char *)metrics + rows[i].offset, sizeof value);
        snprintf(line, sizeof line, "# HELP %s %s\n# TYPE %s %s\n%s %" PRIu64 "\n", rows[i].name,
                 rows[i].about, rows[i].name, rows[i].kind, rows[i].name, value);
        st = add_line(out, line);
    }
    if (st == MN_OK) {
        st = add_histogram(out, "mneme_first_token_seconds",
                           "from the request to its first token", &metrics->first_token);
    }
    if (st == MN_OK) {
        st = add_histogram(out, "mneme_step_seconds", "one step of the batch", &metrics->step);
    }
    return st;
}
