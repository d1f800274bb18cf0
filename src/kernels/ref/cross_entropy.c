/* cross_entropy.c - nll = logsumexp(logits) - logits[target]; loss = mean over the rows kept.
 *
 *   dlogits = dloss / kept (softmax(logits) - onehot(target)), zero where the target is `ignore`
 *
 * Forward: blocks of rows, then one item that adds up their sums. Backward: one item that counts
 * the rows kept, then blocks of rows. Without rows kept, loss and gradients are zero. */
#include <math.h>

#include "kernels/ref/ref.h"

enum { ROWS = 64 };

typedef struct part {
    double sum, kept;
} part;

/* The class of row b, -1 where it is to be ignored. */
static int64_t class_of(const mn_cross_entropy_args *p, int64_t b) {
    const int64_t target = (int64_t)((const REAL *)p->target.data)[b];
    return target == p->ignore ? -1 : target;
}

/* The largest logit, and the sum of exp(x_i - largest). Kept apart: their logarithm together would
 * round away what little a nearly certain model leaves to the other classes. */
typedef struct row_sums {
    double top, sum;
} row_sums;

static row_sums sum_row(const REAL *x, int64_t V) {
    row_sums row = { x[0], 0.0 };
    for (int64_t i = 1; i < V; i++) row.top = x[i] > row.top ? x[i] : row.top;
    for (int64_t i = 0; i < V; i++) row.sum += exp(x[i] - row.top);
    return row;
}

static double row_loss(const REAL *x, int64_t V, int64_t target) {
    if (target < 0) return 0.0;
    const row_sums row = sum_row(x, V);
    return (row.top - x[target]) + log(row.sum);
}

bool MN_REF(mn_cross_entropy_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    const int64_t items = mn_ceil_div(c->B, ROWS);
    const bool ok = mn_ref_plan(plan, items, 0) &&
                    mn_mul_size(&plan->shared_bytes, (size_t)items, sizeof(part));
    mn_ref_add_phase(plan, 1);
    return ok;
}

static void close_loss(const mn_cross_entropy_args *p, const part *parts) {
    part all = { 0.0, 0.0 };
    for (int64_t i = 0; i < mn_ceil_div(p->call.B, ROWS); i++) {
        all.sum += parts[i].sum;
        all.kept += parts[i].kept;
    }
    REAL *loss = p->loss.data;
    if (loss) *loss = (REAL)(all.kept > 0.0 ? all.sum / all.kept : 0.0);
}

void MN_REF(mn_cross_entropy_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                          void *scratch) {
    (void)scratch;
    const mn_cross_entropy_args *p = args;
    if (phase == 1) {
        close_loss(p, shared);
        return;
    }
    part mine = { 0.0, 0.0 };
    REAL *nll = p->nll.data;
    const int64_t end = mn_min(p->call.B, (item + 1) * ROWS);
    for (int64_t b = item * ROWS; b < end; b++) {
        const REAL *x = MN_ROW(REAL, p->logits, b, 0, 0);
        const int64_t target = class_of(p, b);
        const double loss = row_loss(x, p->call.V, target);
        if (nll) nll[b] = (REAL)loss;
        mine.sum += loss;
        mine.kept += target >= 0;
    }
    ((part *)shared)[item] = mine;
}

bool MN_REF(mn_cross_entropy_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->shared_bytes = sizeof(double);
    const bool ok = mn_ref_plan(plan, 1, 0);
    mn_ref_add_phase(plan, mn_ceil_div(c->B, ROWS));
    return ok;
}

static double count_kept(const mn_cross_entropy_args *p) {
    double kept = 0.0;
    for (int64_t b = 0; b < p->call.B; b++) kept += class_of(p, b) >= 0;
    return kept;
}

void MN_REF(mn_cross_entropy_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                           void *scratch) {
    (void)scratch;
    const mn_cross_entropy_args *p = args;
    double *kept = shared;
    if (phase == 0) {
        *kept = count_kept(p);
        return;
    }
    const int64_t V = p->call.V, end = mn_min(p->call.B, (item + 1) * ROWS);
    const double dloss = mn_ref_get(p->cot.loss.data, 0);
    for (int64_t b = item * ROWS; p->grad.logits.data && b < end; b++) {
        const REAL *x = MN_ROW(REAL, p->logits, b, 0, 0);
        REAL *dx = MN_ROW_OUT(REAL, p->grad.logits, b, 0, 0);
        const int64_t target = class_of(p, b);
        const row_sums row = sum_row(x, V);
        for (int64_t i = 0; i < V; i++) {
            const double share = exp(x[i] - row.top) / row.sum;
            dx[i] = target < 0 ? 0 : (REAL)(dloss / *kept * (share - (i == target)));
        }
    }
}
