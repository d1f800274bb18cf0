/* deviation.c - see deviation.h. */
#include "base/deviation.h"

#include <math.h>

#include "base/util.h"

/* A row: its largest number and its rms, or the tensor's where that is more. */
typedef struct row_size {
    double largest, rms;
} row_size;

static double root_mean_square(const double *x, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += isfinite(x[i]) ? x[i] * x[i] : 0.0;
    return count > 0 ? sqrt(sum / (double)count) : 0.0;
}

static row_size row_of(const double *row, int64_t width, double rms) {
    row_size of = { rms, fmax(rms, root_mean_square(row, width)) };
    for (int64_t i = 0; i < width; i++) {
        if (isfinite(row[i])) of.largest = fmax(of.largest, fabs(row[i]));
    }
    return of;
}

static double error_of(double x, double r) {
    return isinf(r) && x == r ? 0.0 : fabs(x - r);
}

/* The larger of two shares, of which 0 / 0 is none and NaN the largest. */
static double larger(double most, double error, double whole) {
    const double share = error > 0.0 || isnan(error) ? error / whole : 0.0;
    return share > most || isnan(share) ? share : most;
}

mn_deviation mn_deviation_of(const double *x, const double *r, int64_t count, int64_t width) {
    mn_deviation off = { .rms = root_mean_square(r, count) };
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += error_of(x[i], r[i]) * error_of(x[i], r[i]);
    const double error = count > 0 ? sqrt(sum / (double)count) : 0.0;
    const double normal = sqrt(2.0 * log((double)mn_max(count, 1)));    // of the largest of so many
    off.of_rms = off.rms > 0.0 ? error / off.rms : error;
    for (int64_t first = 0; first < count; first += width) {
        const row_size row = row_of(r + first, width, off.rms);
        const double law = MN_BF16_UNIT * row.largest + normal * off.of_rms * row.rms;
        for (int64_t i = first; i < first + width; i++) {
            const double d = error_of(x[i], r[i]), before = off.share;
            off.worst = larger(off.worst, d, 1.0);
            off.share = larger(off.share, d, row.largest);
            off.of_law = larger(off.of_law, d, law);
            if (off.share > before || (isnan(off.share) && !isnan(before))) off.at = i;
        }
    }
    return off;
}
