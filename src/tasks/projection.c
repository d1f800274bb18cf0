/* projection.c - the fixed random address of crowded keys: R k / |R k|, rows of R orthonormal. */
#include "tasks/projection.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "base/checked.h"
#include "base/rng.h"
#include "base/status.h"

static double dot(const double *a, const double *b, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Row r becomes orthogonal to those before it, twice for what rounding leaves, and of norm 1. */
static void make_row(double *rows, int64_t r, int64_t n) {
    double *row = rows + r * n;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t k = 0; k < r; k++) {
            const double along = dot(row, rows + k * n, n);
            for (int64_t i = 0; i < n; i++) row[i] -= along * rows[k * n + i];
        }
    }
    const double scale = 1.0 / sqrt(dot(row, row, n));
    for (int64_t i = 0; i < n; i++) row[i] *= scale;
}

mn_status mn_projection_make(float *out, int64_t rows, int64_t columns, uint64_t seed) {
    size_t count, bytes;
    double *work = NULL;
    if (rows < 1 || rows > columns) {
        return mn_fail(MN_ERR_ARGUMENT, "a projection of %" PRId64 " rows and %" PRId64
                       " columns: from 1 row to as many as columns are possible", rows, columns);
    }
    if (mn_mul_size(&count, (size_t)rows, (size_t)columns) &&
        mn_mul_size(&bytes, count, sizeof *work)) {
        work = malloc(bytes);
    }
    if (!work) {
        return mn_fail(MN_ERR_MEMORY, "no memory for a projection of %" PRId64 " rows and %" PRId64
                       " columns", rows, columns);
    }
    const uint64_t stream = UINT64_C(0x70726F6A);    // "proj"
    for (size_t i = 0; i < count; i++) work[i] = mn_rng_normal(seed, stream, i);
    for (int64_t r = 0; r < rows; r++) make_row(work, r, columns);
    for (size_t i = 0; i < count; i++) out[i] = (float)work[i];
    free(work);
    return MN_OK;
}

void mn_projection_apply(float *address, const float *projection, const float *key, int64_t rows,
                         int64_t columns) {
    double square = 0.0;
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0.0;
        for (int64_t i = 0; i < columns; i++) {
            sum += (double)projection[r * columns + i] * key[i];
        }
        address[r] = (float)sum;
        square += sum * sum;
    }
    const double scale = square > 0.0 ? 1.0 / sqrt(square) : 0.0;
    for (int64_t r = 0; r < rows; r++) address[r] = (float)(address[r] * scale);
}
