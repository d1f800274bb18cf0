/* op_error.c - how far results in float32 may lie from float64, measured case by case. */
#include "support/op_error.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "support/op_rounded.h"
#include "support/shares.h"

enum { N_TRIALS = 3 };

/* Root of the mean square and largest, of the difference and of the reference. */
typedef struct distance {
    double rms, worst, size, largest;
} distance;

/* Entry i, or for a symmetric matrix the mean of it and its mirror image. */
static double entry(const mn_sample *s, const void *data, int64_t i, int64_t square) {
    if (square == 0) return mn_sample_get(s, data, i);
    const int64_t row = i / square % square, col = i % square, block = i - row * square - col;
    return 0.5 * (mn_sample_get(s, data, i) + mn_sample_get(s, data, block + col * square + row));
}

static distance distance_between(const mn_sample *x_of, const void *x, const mn_sample *r_of,
                                 const void *r, int64_t count, int64_t square) {
    distance sum = { 0.0, 0.0, 0.0, 0.0 };
    for (int64_t i = 0; i < count; i++) {
        const double want = entry(r_of, r, i, square), got = entry(x_of, x, i, square);
        const double d = got == want ? 0.0 : fabs(got - want);    // infinities may be equal
        if (!isfinite(d)) return (distance){ INFINITY, INFINITY, 0.0, 0.0 };
        if (isinf(want)) continue;
        sum.rms += d * d;
        sum.size += want * want;
        sum.worst = fmax(sum.worst, d);
        sum.largest = fmax(sum.largest, fabs(want));
    }
    sum.rms = sqrt(sum.rms / (double)count);
    sum.size = sqrt(sum.size / (double)count);
    return sum;
}

static bool is_dynamics(const mn_field *field) {
    static const char names[] = ",g,la,theta,l2,a,p,gamma,n_mem,dt,dt_bias,decay_rate,A,fpre,";
    const char *at = strstr(names, field->name);
    return at && at[-1] == ',' && at[strlen(field->name)] == ',';
}

/* Every input moves by a random sign and up to `unit` of itself. Symmetric ones stay so, classes
 * stay. */
static void nudge(mn_sample *moved, const mn_sample *from, uint64_t trial, double unit) {
    for (int i = 0; i < from->n_tensors; i++) {
        const mn_sample_tensor *t = &from->tensors[i];
        const bool input = t->field->role <= MN_ROLE_RAW;
        const double *x = input ? t->data : t->partner;
        double *y = input ? moved->tensors[i].data : moved->tensors[i].partner;
        int64_t size = 0;
        if (!x || !y || t->field->law == MN_LAW_CLASS) continue;
        const bool symmetric = op_is_symmetric(from, t, &size);
        for (int64_t at = 0; at < t->count; at++) {
            int64_t key = at;
            if (symmetric) {
                const int64_t row = at / size % size, col = at % size;
                key = at - row * size - col + mn_max(row, col) * size + mn_min(row, col);
            }
            const double u = 2.0 * mn_rng_uniform(trial, (uint64_t)i, (uint64_t)key) - 1.0;
            y[at] = x[at] * (1.0 + (u < 0 ? -unit : unit));
        }
    }
}

/* The larger of `tol` and what the nudged results say. */
static void widen(op_tolerances *out, const mn_sample *moved, const mn_sample *want) {
    for (int i = 0; i < want->n_tensors; i++) {
        const mn_sample_tensor *t = &want->tensors[i];
        const bool input = t->field->role <= MN_ROLE_RAW;
        const void *r = input ? t->partner : t->data;
        const void *x = input ? moved->tensors[i].partner : moved->tensors[i].data;
        if (!r || !x || t->count == 0) continue;
        const distance d = distance_between(moved, x, want, r, t->count, 0);
        if (!isfinite(d.rms) || d.size == 0.0) continue;
        const double b = fmax(d.rms / d.size, d.worst / d.largest / 16.0);
        const double factor = !input ? 20.0 : is_dynamics(t->field) ? 80.0 : 40.0;
        double *tol = input ? &out->gradient[i] : &out->result[i];
        *tol = fmax(*tol, factor * b);
    }
}

double op_loss_norm(const mn_sample *want) {
    double sum = 0.0;
    for (int i = 0; i < want->n_tensors; i++) {
        const mn_sample_tensor *t = &want->tensors[i];
        for (int64_t at = 0; t->field->role == MN_ROLE_OUT && at < t->count; at++) {
            const double x = mn_sample_get(want, t->data, at) * mn_sample_get(want, t->partner, at);
            sum += isfinite(x) ? x * x : 0.0;
        }
    }
    return sqrt(sum);
}

void op_reference(op_tolerances *floor, mn_sample *want, const op_case *c) {
    for (int i = 0; i < want->n_tensors; i++) {
        floor->result[i] = 2e-6;
        floor->gradient[i] = is_dynamics(want->tensors[i].field) ? 2e-5 : 5e-6;
    }
    op_run_both(op_context("ref", shares_threads()), want, c);
    floor->loss_norm = op_loss_norm(want);
}

void op_widen(op_tolerances *out, const mn_sample *want, const op_case *c) {
    mn_sample moved;
    op_case f64 = *c;
    f64.dtype = MN_F64;
    op_allocate(&moved, &f64);
    op_convert(&moved, want);
    for (uint64_t trial = 1; trial <= N_TRIALS; trial++) {
        nudge(&moved, want, trial, 0x1p-24);
        op_run_both(op_context("ref", shares_threads()), &moved, &f64);
        widen(out, &moved, want);
    }
    mn_sample_free(&moved);
}

void op_measure(op_tolerances *out, mn_sample *want, const op_case *c) {
    op_reference(out, want, c);
    op_widen(out, want, c);
}

/* The larger of what is there and twice how far `moved` lies from `want`. */
static void widen_bf16(double rms[MN_MAX_FIELDS], double worst[MN_MAX_FIELDS],
                       const mn_sample *moved, const mn_sample *want) {
    for (int i = 0; i < want->n_tensors; i++) {
        const mn_sample_tensor *t = &want->tensors[i];
        const void *x = op_memory(&moved->tensors[i], OP_COMPUTED);
        const void *r = op_memory(t, OP_COMPUTED);
        if (!x || !r || t->count == 0) continue;
        const distance d = distance_between(moved, x, want, r, t->count, 0);
        rms[i] = fmax(rms[i], 2.0 * d.rms);
        worst[i] = fmax(worst[i], 2.0 * d.worst);
    }
}

bool op_measure_bf16(double rms[MN_MAX_FIELDS], double worst[MN_MAX_FIELDS], const mn_sample *want,
                     const op_case *c, int step) {
    mn_sample moved;
    op_case f64 = *c;
    f64.dtype = MN_F64;
    if (step > N_TRIALS) return false;
    op_allocate(&moved, &f64);
    op_convert(&moved, want);
    bool runs = true;
    if (step == 0) {
        runs = op_run_rounded(&moved, &f64);
    } else {
        nudge(&moved, want, (uint64_t)step, 0x1p-9);
        op_run_both(op_context("ref", shares_threads()), &moved, &f64);
    }
    if (runs) widen_bf16(rms, worst, &moved, want);
    mn_sample_free(&moved);
    return true;
}

/* How far tensor i lies from the reference, and what is allowed. */
typedef struct verdict {
    distance off;
    double tolerance;
    bool judged, close;
} verdict;

static verdict judge(const mn_sample *got, const mn_sample *want, const op_tolerances *tolerances,
                     int i) {
    const mn_sample_tensor *t = &want->tensors[i];
    const bool input = t->field->role <= MN_ROLE_RAW;
    const void *r = op_memory(t, OP_COMPUTED), *x = op_memory(&got->tensors[i], OP_COMPUTED);
    const double tol = input ? tolerances->gradient[i] : tolerances->result[i];
    int64_t square = 0;
    if (!r || t->count == 0 || (input && !op_has_backward(want->op))) {
        return (verdict){ .close = true };
    }
    if (input) op_is_symmetric(want, t, &square);
    const distance d = distance_between(got, x, want, r, t->count, square);
    const bool vanishes = input && d.size < 0x1p-40 * tolerances->loss_norm;
    double besides = vanishes || (input && is_dynamics(t->field))
                         ? 0x1p-20 * tolerances->loss_norm : 0.0;
    if (vanishes) besides *= 8.0;
    const bool close = d.rms <= tol * d.size + besides &&
                       d.worst <= 16.0 * (tol * d.largest + besides);
    return (verdict){ d, tol, true, close };
}

bool op_agrees(const mn_sample *got, const mn_sample *want, const op_tolerances *tolerances) {
    for (int i = 0; i < want->n_tensors; i++) {
        if (!judge(got, want, tolerances, i).close) return false;
    }
    return true;
}

void op_compare(const char *target, const mn_sample *got, const mn_sample *want,
                const op_tolerances *tolerances, const op_case *c) {
    for (int i = 0; i < want->n_tensors; i++) {
        const mn_sample_tensor *t = &want->tensors[i];
        const verdict v = judge(got, want, tolerances, i);
        if (!v.judged) continue;
        CHECK(v.close,
              "%s %s: %s%s off by rms %.2e of %.2e, worst %.2e of %.2e, tolerance %.2e", target,
              op_case_text(c), t->field->role <= MN_ROLE_RAW ? "d" : "", t->field->name, v.off.rms,
              v.off.size, v.off.worst, v.off.largest, v.tolerance);
    }
}
