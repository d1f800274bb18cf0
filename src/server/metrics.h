/* metrics.h - what the server counts, as Prometheus reads it. */
#ifndef MN_SERVER_METRICS_H
#define MN_SERVER_METRICS_H

#include "io/text.h"

enum { MN_BUCKETS = 16 };

/* Seconds by size: bucket i counts those up to 2^i milliseconds, the last one all. */
typedef struct mn_histogram {
    uint64_t counts[MN_BUCKETS];
    double sum;
} mn_histogram;

void mn_histogram_add(mn_histogram *h, double seconds);

/* Guarded by the engine's lock. */
typedef struct mn_metrics {
#define COUNTER(id, name, about) uint64_t id;
#define GAUGE(id, name, about) uint64_t id;
#include "server/metrics.def"
#undef COUNTER
#undef GAUGE
    mn_histogram first_token;      // from the request to its first token
    mn_histogram step;             // of the batch
} mn_metrics;

/* Adds the counts of `more` without those of `less`; gauges stay. */
void mn_metrics_add(mn_metrics *to, const mn_metrics *more, const mn_metrics *less);

mn_status mn_metrics_write(mn_text *out, const mn_metrics *metrics);

#endif
