/* test_grouped.c - value heads that share query and key heads (additive, delta, delta_net and
 * delta_gva): a call is the same call with these repeated, bit by bit forward and in its states,
 * and gradients of a shared head are the sums of those of its copies. Whole, packed and a token at
 * a time with the state in place, on every target. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "support/op_case.h"
#include "support/op_walk.h"

enum { H = 6, GROUP = 3 };

static bool is_shared(const mn_sample_tensor *t) {
    return strcmp(t->field->axes, "BTJK") == 0;
}

/* Numbers of `few` for `all`, whose heads are not shared. */
static void repeat_keys(mn_sample *all, const mn_sample *few, int64_t K, size_t item) {
    for (int i = 0; i < few->n_tensors; i++) {
        const mn_sample_tensor *from = &few->tensors[i], *to = &all->tensors[i];
        const void *x = op_memory(from, OP_GIVEN);
        char *y = op_memory(to, OP_GIVEN);
        if (!x || !y) continue;
        if (!is_shared(from)) {
            memcpy(y, x, (size_t)from->count * item);
            continue;
        }
        for (int64_t row = 0; row < to->count / K; row++) {
            const int64_t source = row / H * (H / GROUP) + row % H / GROUP;
            memcpy(y + (size_t)(row * K) * item, (const char *)x + (size_t)(source * K) * item,
                   (size_t)K * item);
        }
    }
}

static void check_results(const mn_sample *few, const mn_sample *all, size_t item,
                          const char *target, const op_case *c) {
    for (int i = 0; i < few->n_tensors; i++) {
        const mn_sample_tensor *a = &few->tensors[i], *b = &all->tensors[i];
        if (a->field->role < MN_ROLE_OUT || !a->data) continue;
        CHECK(memcmp(a->data, b->data, (size_t)a->count * item) == 0, "%s %s: %s has other bits",
              target, op_case_text(c), a->field->name);
    }
}

static double sum_of(const mn_sample *all, const mn_sample_tensor *t, int64_t row, int64_t i,
                     int64_t K, double *size) {
    double sum = 0.0;
    *size = 0.0;
    for (int64_t h = 0; h < GROUP; h++) {
        const int64_t heads = H / GROUP, at = row / heads * H + row % heads * GROUP + h;
        const double x = mn_sample_get(all, t->partner, at * K + i);
        sum += x;
        *size += fabs(x);
    }
    return sum;
}

static void check_gradients(const mn_sample *few, const mn_sample *all, int64_t K, size_t item,
                            const char *target, const op_case *c) {
    const double tolerance = item == 8 ? 1e-15 : 4e-7;
    for (int i = 0; i < few->n_tensors; i++) {
        const mn_sample_tensor *a = &few->tensors[i], *b = &all->tensors[i];
        if (a->field->role >= MN_ROLE_OUT || !a->partner) continue;
        if (!is_shared(a)) {
            CHECK(memcmp(a->partner, b->partner, (size_t)a->count * item) == 0,
                  "%s %s: the gradient of %s has other bits", target, op_case_text(c),
                  a->field->name);
            continue;
        }
        double off = 0.0;
        for (int64_t k = 0; k < a->count; k++) {
            double size;
            const double want = sum_of(all, b, k / K, k % K, K, &size);
            off = fmax(off, (fabs(mn_sample_get(few, a->partner, k) - want) - tolerance * size) /
                                fmax(size, 1e-300));
        }
        CHECK(off <= 0.0, "%s %s: the gradient of %s is no sum", target, op_case_text(c),
              a->field->name);
    }
}

static void check_call(op_case c, const op_target *target, bool step) {
    op_case whole = c;
    mn_sample few, all;
    c.dtype = whole.dtype = target->dtype;
    c.groups = GROUP;
    whole.groups = 1;
    const size_t item = mn_dtype_bytes(c.dtype);
    op_open(&few, &c);
    if (whole.op == MN_OP_delta_gva) {    // made of groups: the same without them is delta_net
        whole.op = MN_OP_delta_net;
    }
    op_open(&all, &whole);
    repeat_keys(&all, &few, c.K, item);
    mn_context *context = op_context(target->name, 2);
    if (!step || (op_stay_in_place(&few) && op_stay_in_place(&all))) {
        op_run(context, &few, MN_FORWARD, &c);
        op_run(context, &all, MN_FORWARD, &whole);
        check_results(&few, &all, item, target->name, &c);
    }
    if (!step) {
        op_run(context, &few, MN_BACKWARD, &c);
        op_run(context, &all, MN_BACKWARD, &whole);
        check_gradients(&few, &all, c.K, item, target->name, &c);
    }
    mn_sample_free(&few);
    mn_sample_free(&all);
}

static void grouped_is_repeated(mn_op_id op) {
    static const int64_t borders[] = { 0, 1, 1, 40, 70 };
    op_case forms[OP_MAX_FORMS];
    op_target targets[MN_TARGET_COUNT + 1];
    const bool takes = op == MN_OP_additive || op == MN_OP_delta || op == MN_OP_delta_net ||
                       op == MN_OP_delta_gva;
    const int n_forms = takes ? op_forms(op, forms) : 0, n_targets = op_targets(targets);
    for (int f = 0; f < n_forms; f++) {
        for (int i = 0; i < n_targets; i++) {
            op_case c = forms[f];
            c.B = 2, c.T = 70, c.H = H, c.K = 9, c.V = 21, c.seed = (uint64_t)f + 1;
            check_call(c, &targets[i], false);
            c.T = 1;
            check_call(c, &targets[i], true);
            c.B = 1, c.T = 70, c.cu_seqlens = borders, c.n_seqs = MN_COUNTOF(borders) - 1;
            check_call(c, &targets[i], false);
        }
    }
}

int main(int argc, char **argv) {
    return op_visit("grouped heads are repeated heads", grouped_is_repeated, argc, argv);
}
