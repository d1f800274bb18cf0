/* test_rows.c - what the walks over the table do not reach of the operators on rows: losses without
 * rows, a model that is certain, steps in place and stacked, rows of zeros and of extremes,
 * gradients that nobody asks for. On every target. */
#include "support/op_walk.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "support/close.h"

static double *as_f64(const mn_sample *s, const char *name) {
    const mn_sample_tensor *t = mn_sample_find((mn_sample *)s, name);
    double *copy = malloc((size_t)(t->count + 1) * sizeof *copy);
    for (int64_t i = 0; i < t->count; i++) copy[i] = mn_sample_get(s, t->data, i);
    return copy;
}

static void put(mn_sample *s, const char *name, int64_t i, double x) {
    mn_sample_set(s, mn_sample_find(s, name)->data, i, x);
}

static double get(mn_sample *s, const char *name, int64_t i) {
    return mn_sample_get(s, mn_sample_find(s, name)->data, i);
}

static double get_gradient(mn_sample *s, const char *name, int64_t i) {
    return mn_sample_get(s, mn_sample_find(s, name)->partner, i);
}

static op_case rows_case(mn_op_id op, mn_dtype dtype, int64_t rows, int64_t V) {
    return (op_case){ .op = op, .dtype = dtype, .fields = MN_ALL_FIELDS, .B = rows, .T = 1, .H = 1,
                      .K = 4, .V = V, .seed = 5 };
}

/* ---- cross_entropy ------------------------------------------------------------------------------
 */

static void loss_without_rows(const op_target *target) {
    const op_case c = rows_case(MN_OP_cross_entropy, target->dtype, 21, 33);
    mn_sample s;
    op_open(&s, &c);
    for (int64_t i = 0; i < 21; i++) put(&s, "target", i, -100.0);
    op_run_both(op_context(target->name, 2), &s, &c);
    CHECK(get(&s, "loss", 0) == 0.0, "%s: the loss of no rows is %g", target->name,
          get(&s, "loss", 0));
    for (int64_t i = 0; i < 21 * 33; i++) {
        CHECK(get_gradient(&s, "logits", i) == 0.0, "%s: an ignored row has a gradient",
              target->name);
    }
    mn_sample_free(&s);
}

/* The target is ahead by 30: nll = log1p((V - 1) e^-30), far below one rounding of 1. */
static void loss_of_a_certain_model(const op_target *target) {
    enum { V = 33, AT = 20 };
    const op_case c = rows_case(MN_OP_cross_entropy, target->dtype, 1, V);
    mn_sample s;
    op_open(&s, &c);
    for (int64_t i = 0; i < V; i++) put(&s, "logits", i, i == AT ? 30.0 : 0.0);
    put(&s, "target", 0, AT);
    mn_sample_set(&s, mn_sample_find(&s, "loss")->partner, 0, 1.0);
    op_run_both(op_context(target->name, 2), &s, &c);
    const double nll = log1p((V - 1) * exp(-30.0)),
                 others = exp(-30.0) / (1.0 + (V - 1) * exp(-30.0));
    const double off = strcmp(target->name, "ref") == 0 ? 2e-3 : 1e-5;    // V sums near 1 in double
    CHECK(fabs(get(&s, "loss", 0) / nll - 1.0) < off, "%s: nll %.9g, not %.9g", target->name,
          get(&s, "loss", 0), nll);
    CHECK(fabs(get_gradient(&s, "logits", AT) / (-(V - 1) * others) - 1.0) < off, "%s: dlogits %g",
          target->name, get_gradient(&s, "logits", AT));
    CHECK(fabs(get_gradient(&s, "logits", 0) / others - 1.0) < 1e-5, "%s: dlogits", target->name);
    mn_sample_free(&s);
}

/* ---- adamw
 * --------------------------------------------------------------------------------------- */

/* Three stacked steps, then the same three one at a time with results over inputs. */
static void steps_in_place(const op_target *target) {
    enum { N = 9001, STEPS = 2 };
    op_case c = rows_case(MN_OP_adamw, target->dtype, N, 4);
    mn_sample stacked, single;
    op_open(&stacked, &c);
    op_open(&single, &c);
    op_run(op_context(target->name, 2), &stacked, MN_FORWARD, &c);
    mn_adamw_args *args = (mn_adamw_args *)single.args;
    const size_t size = target->dtype == MN_F64 ? 8 : 4;
    const unsigned char *grads = args->grads.data;
    args->call.S = 1;
    args->p_out.data = (void *)args->p.data;
    args->m_out.data = (void *)args->m.data;
    args->v_out.data = (void *)args->v.data;
    for (int64_t step = 0; step < STEPS; step++) {
        args->step0 = step;
        args->grads.data = grads + (size_t)step * N * size;
        op_run(op_context(target->name, 2), &single, MN_FORWARD, &c);
        static const char *const names[][2] = { { "p", "p_out" },
                                                { "m", "m_out" },
                                                { "v", "v_out" } };
        for (size_t k = 0; k < MN_COUNTOF(names); k++) {
            const unsigned char *want = mn_sample_find(&stacked, names[k][1])->data;
            CHECK(memcmp(mn_sample_find(&single, names[k][0])->data, want + (size_t)step * N * size,
                         N * size) == 0,
                  "%s: %s after step %d", target->name, names[k][0], (int)step);
        }
    }
    mn_sample_free(&stacked);
    mn_sample_free(&single);
}

/* ---- norms
 * ---------------------------------------------------------------------------------------- */

static const mn_op_id norms[] = { MN_OP_rms_norm, MN_OP_rms_norm_gated, MN_OP_l2_norm };

/* Rows of zeros, and rows whose squares leave float32 at either end; scaling x scales y by at most
 * the sign. */
static void rows_of_extremes(const op_target *target) {
    enum { V = 40, ROWS = 5 };
    static const double scales[ROWS] = { 0.0, 1e-30, 1e-20, 1e20, 1e30 };
    for (size_t k = 0; k < MN_COUNTOF(norms); k++) {
        const op_case c = rows_case(norms[k], target->dtype, ROWS, V);
        mn_sample s;
        op_open(&s, &c);
        double *x = as_f64(&s, "x");
        for (int64_t i = 0; i < ROWS * V; i++) put(&s, "x", i, x[i % V] * scales[i / V]);
        op_run_both(op_context(target->name, 2), &s, &c);
        for (int64_t i = 0; i < ROWS * V; i++) {
            CHECK(isfinite(get(&s, "y", i)) && isfinite(get_gradient(&s, "x", i)),
                  "%s %s: row of %g is not finite", target->name, mn_op_describe(norms[k])->name,
                  scales[i / V]);
            CHECK(i >= V || get(&s, "y", i) == 0.0, "%s: zeros have no direction", target->name);
        }
        free(x);
        mn_sample_free(&s);
    }
}

/* ---- what is not wanted, and what is zero
 * ---------------------------------------------------------- */

/* A kernel may take another way when less is wanted: a few roundings apart, no more. */
static double closeness(const op_target *target) {
    return target->dtype == MN_F64 ? 1e-13 : 1e-5;
}

static const char *label(const char *what, const char *name, mn_op_id op) {
    static char text[128];
    snprintf(text, sizeof text, "%s: %s%s", mn_op_describe(op)->name, what, name);
    return text;
}

/* Each gradient asked for alone is what it is among all. */
static void gradients_one_at_a_time(const op_target *target, mn_op_id op) {
    const op_case c = { .op = op, .dtype = target->dtype, .fields = MN_ALL_FIELDS, .B = 2, .T = 19,
                        .H = 2, .K = 4, .V = 18, .seed = 3 };
    mn_sample all, one;
    op_open(&all, &c);
    op_open(&one, &c);
    op_run(op_context(target->name, 2), &all, MN_BACKWARD, &c);
    for (int i = 0; i < one.n_tensors; i++) {
        const mn_sample_tensor *t = &one.tensors[i];
        if (t->field->role > MN_ROLE_OPT || !t->partner) continue;
        for (int j = 0; j < one.n_tensors; j++) {
            const mn_field *other = one.tensors[j].field;
            if (other->role > MN_ROLE_OPT) continue;
            ((mn_out *)(one.args + other->partner))->data = i == j ? t->partner : NULL;
        }
        op_run(op_context(target->name, 2), &one, MN_BACKWARD, &c);
        check_close(label("only d", t->field->name, op), target->name, &one, t->partner, &all,
                    all.tensors[i].partner, t->count, closeness(target));
    }
    mn_sample_free(&all);
    mn_sample_free(&one);
}

/* Without any cotangent every gradient is written, as zero. */
static void no_cotangent_no_gradient(const op_target *target, mn_op_id op) {
    const op_case c = { .op = op, .dtype = target->dtype, .fields = MN_ALL_FIELDS, .B = 2, .T = 19,
                        .H = 2, .K = 4, .V = 18, .seed = 3 };
    mn_sample s;
    op_open(&s, &c);
    for (int i = 0; i < s.n_tensors; i++) {
        const mn_field *field = s.tensors[i].field;
        if (field->role == MN_ROLE_OUT) ((mn_in *)(s.args + field->partner))->data = NULL;
    }
    op_run(op_context(target->name, 2), &s, MN_BACKWARD, &c);
    for (int i = 0; i < s.n_tensors; i++) {
        const mn_sample_tensor *t = &s.tensors[i];
        if (t->field->role > MN_ROLE_OPT || !t->partner) continue;
        int64_t wrong = 0;
        for (int64_t at = 0; at < t->count; at++)
            wrong += !(mn_sample_get(&s, t->partner, at) == 0.0);
        CHECK(wrong == 0, "%s %s: without cotangents %lld of d%s are not zero", target->name,
              mn_op_describe(op)->name, (long long)wrong, t->field->name);
    }
    mn_sample_free(&s);
}

/* The same for results. */
static void results_one_at_a_time(const op_target *target, mn_op_id op) {
    const op_case c = { .op = op, .dtype = target->dtype, .fields = MN_ALL_FIELDS, .B = 2, .T = 19,
                        .H = 2, .K = 4, .V = 18, .seed = 3 };
    mn_sample all, one;
    op_open(&all, &c);
    op_open(&one, &c);
    op_run(op_context(target->name, 2), &all, MN_FORWARD, &c);
    for (int i = 0; i < one.n_tensors; i++) {
        const mn_sample_tensor *t = &one.tensors[i];
        if (t->field->role < MN_ROLE_OUT) continue;
        for (int j = 0; j < one.n_tensors; j++) {
            const mn_field *other = one.tensors[j].field;
            if (other->role >= MN_ROLE_OUT) {
                ((mn_out *)(one.args + other->offset))->data = i == j ? t->data : NULL;
            }
        }
        op_run(op_context(target->name, 2), &one, MN_FORWARD, &c);
        check_close(label("only ", t->field->name, op), target->name, &one, t->data, &all,
                    all.tensors[i].data, t->count, closeness(target));
    }
    mn_sample_free(&all);
    mn_sample_free(&one);
}

static void rows_and_leftovers(mn_op_id op) {
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        if (op == MN_OP_cross_entropy) loss_without_rows(&targets[i]);
        if (op == MN_OP_cross_entropy) loss_of_a_certain_model(&targets[i]);
        if (op == MN_OP_adamw) steps_in_place(&targets[i]);
        if (op == MN_OP_rms_norm) rows_of_extremes(&targets[i]);
        results_one_at_a_time(&targets[i], op);
        if (!op_has_backward(op)) continue;
        gradients_one_at_a_time(&targets[i], op);
        no_cotangent_no_gradient(&targets[i], op);
    }
}

int main(int argc, char **argv) {
    return op_visit("rows and leftovers", rows_and_leftovers, argc, argv);
}
