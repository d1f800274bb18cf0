/* cross_entropy.c - nll = logsumexp(logits) - logits[target], loss = mean over the kept rows.
 *
 * With e_i = exp(x_i - max) and `rest` the sum of e_i over i other than the target, nll is
 * log1p(rest) where the target is the largest and max - x_target + log(rest + e_target) elsewhere;
 * the target's gradient is minus the sum of the others. So neither drowns in a 1 when the model is
 * nearly certain. Items and phases as in ref/cross_entropy.c. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/simd/row.h"

#include <string.h>

enum { ROWS = 8 };

typedef struct part {
    double sum, kept;
} part;

/* The class of row b, -1 where it is to be ignored. */
static int64_t class_of(const mn_cross_entropy_args *p, int64_t b) {
    const int64_t target = (int64_t)((const float *)p->target.data)[b];
    return target == p->ignore ? -1 : target;
}

static float row_max(const float *x, int64_t n) {
    const vf lowest = vf_set1(-INFINITY);
    vf top = lowest;
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf x_i = vf_load_row(x + i, lanes);
        top = vf_max(top, lanes == MN_VW ? x_i : vf_select(vm_first(lanes), x_i, lowest));
    }
    return vf_max_lanes(top);
}

/* The sum of factor exp(x_i - top), written to y unless it is NULL. */
static float exponentials(float *y, const float *x, float top, float factor, int64_t n) {
    const vf top_all = vf_set1(top), factor_all = vf_set1(factor);
    vf sum = vf_zero();
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        const vf e = vf_mul(factor_all, vf_exp(vf_sub(vf_load_row(x + i, lanes), top_all)));
        sum = vf_add(sum, lanes == MN_VW ? e : vf_keep_first(e, lanes));
        if (y) vf_store_row(y + i, e, lanes);
    }
    return vf_sum(sum);
}

/* Sums of one row: the largest logit, e of the target and of all others. */
typedef struct row_sums {
    float top;
    double target, rest;
} row_sums;

static row_sums sum_row(const float *x, int64_t V, int64_t target) {
    row_sums row = { .top = row_max(x, V) };
    row.target = exp((double)x[target] - (double)row.top);
    row.rest = exponentials(NULL, x, row.top, 1.0f, target);
    row.rest += exponentials(NULL, x + target + 1, row.top, 1.0f, V - target - 1);
    return row;
}

static double row_loss(const float *x, int64_t V, int64_t target) {
    if (target < 0) return 0.0;
    const row_sums row = sum_row(x, V, target);
    if (x[target] == row.top) return log1p(row.rest);
    return ((double)row.top - (double)x[target]) + log(row.rest + row.target);
}

bool MN_T(mn_cross_entropy_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 2;
    plan->items[0] = mn_ceil_div(c->B, ROWS);
    plan->items[1] = 1;
    return mn_mul_size(&plan->shared_bytes, (size_t)plan->items[0], sizeof(part));
}

static void close_loss(const mn_cross_entropy_args *p, const part *parts) {
    part all = { 0.0, 0.0 };
    for (int64_t i = 0; i < mn_ceil_div(p->call.B, ROWS); i++) {
        all.sum += parts[i].sum;
        all.kept += parts[i].kept;
    }
    float *loss = p->loss.data;
    if (loss) *loss = (float)(all.kept > 0.0 ? all.sum / all.kept : 0.0);
}

void MN_T(mn_cross_entropy_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                        void *scratch) {
    (void)scratch;
    const mn_cross_entropy_args *p = args;
    if (phase == 1) {
        close_loss(p, shared);
        return;
    }
    part mine = { 0.0, 0.0 };
    float *nll = p->nll.data;
    const int64_t end = mn_min(p->call.B, (item + 1) * ROWS);
    for (int64_t b = item * ROWS; b < end; b++) {
        const int64_t target = class_of(p, b);
        const double loss = row_loss(MN_ROW(float, p->logits, b, 0, 0), p->call.V, target);
        if (nll) nll[b] = (float)loss;
        mine.sum += loss;
        mine.kept += target >= 0;
    }
    ((part *)shared)[item] = mine;
}

bool MN_T(mn_cross_entropy_backward_plan)(const void *args, mn_plan *plan) {
    const mn_cross_entropy_args *p = args;
    plan->shared_bytes = sizeof(double);
    plan->n_phases = 2;
    plan->items[0] = 1;
    plan->items[1] = p->grad.logits.data ? mn_ceil_div(p->call.B, ROWS) : 0;
    return true;
}

static double count_kept(const mn_cross_entropy_args *p) {
    double kept = 0.0;
    for (int64_t b = 0; b < p->call.B; b++) kept += class_of(p, b) >= 0;
    return kept;
}

void MN_T(mn_cross_entropy_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                         void *scratch) {
    (void)scratch;
    const mn_cross_entropy_args *p = args;
    double *kept = shared;
    if (phase == 0) {
        *kept = count_kept(p);
        return;
    }
    const int64_t V = p->call.V, end = mn_min(p->call.B, (item + 1) * ROWS);
    const double dloss = p->cot.loss.data ? *(const float *)p->cot.loss.data : 0.0;
    for (int64_t b = item * ROWS; b < end; b++) {
        const float *x = MN_ROW(float, p->logits, b, 0, 0);
        float *dx = (float *)p->grad.logits.data + MN_OFFSET(p->grad.logits, b, 0, 0);
        const int64_t target = class_of(p, b);
        if (target < 0) {
            memset(dx, 0, (size_t)V * sizeof(float));
            continue;
        }
        const row_sums row = sum_row(x, V, target);
        const float factor = (float)(dloss / *kept / (row.rest + row.target));
        const float before = exponentials(dx, x, row.top, factor, target);
        const float after = exponentials(dx + target + 1, x + target + 1, row.top, factor,
                                         V - target - 1);
        dx[target] = -(before + after);
    }
}
