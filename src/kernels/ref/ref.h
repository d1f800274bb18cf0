/* ref.h - reference kernels: the definition, the fallback and the judge.
 *
 * Every file here is compiled twice: REAL is what memory holds (float or double), all arithmetic is
 * double. MN_REF(name) gives the external names their suffix, _f32 or _f64. */
#ifndef MN_KERNELS_REF_REF_H
#define MN_KERNELS_REF_REF_H

#include "base/checked.h"
#include "base/util.h"
#include "kernels/access.h"
#include "kernels/kernel.h"

#if MN_REF_BITS == 64
typedef double REAL;
#define MN_REF(name) name##_f64
#else
typedef float REAL;
#define MN_REF(name) name##_f32
#endif

/* A plan of one phase with `items` items, `count` doubles of scratch each. */
static inline bool mn_ref_plan(mn_plan *plan, int64_t items, int64_t count) {
    plan->n_phases = 1;
    plan->items[0] = items;
    return count >= 0 && mn_mul_size(&plan->scratch_bytes, (size_t)count, sizeof(double));
}

/* Rows of `view`, or zero where it is absent. */
static inline double mn_ref_get(const REAL *row, int64_t i) {
    return row ? (double)row[i] : 0.0;
}

/* max(x, 0); NaN stays */
static inline double mn_ref_relu(double x) {
    return x <= 0.0 ? 0.0 : x;
}

/* Adds a phase of one item that reduces per-sequence partial sums kept in shared memory. */
static inline void mn_ref_add_phase(mn_plan *plan, int64_t items) {
    plan->items[plan->n_phases++] = items;
}

/* out[item] = sum over parts of parts[part * width + item]: what blocks of rows gathered for a
 * shared parameter, always added in the same order. */
static inline void mn_ref_sum_parts(void *out, const double *parts, int64_t item, int64_t n_parts,
                                    int64_t width) {
    double sum = 0.0;
    for (int64_t part = 0; part < n_parts; part++) sum += parts[part * width + item];
    if (out) ((REAL *)out)[item] = (REAL)sum;
}

#endif
