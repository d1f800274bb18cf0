/* test_delta_rounded.c - the delta rule over chunks that says what bf16 may cost (delta_rounded.h)
 * is, with nothing rounded, the delta rule: results and gradients of the float64 reference. */
#include <math.h>
#include <string.h>

#include "base/util.h"
#include "support/check.h"
#include "support/delta_rounded.h"
#include "support/op_walk.h"

static void compare(const mn_sample *got, const mn_sample *want, double within, const op_case *c) {
    for (int i = 0; i < want->n_tensors; i++) {
        const mn_sample_tensor *t = &want->tensors[i];
        const double *x = op_memory(&got->tensors[i], OP_COMPUTED);
        const double *r = op_memory(t, OP_COMPUTED);
        double off = 0.0, size = 0.0;
        if (!x || !r) continue;
        for (int64_t j = 0; j < t->count; j++) {
            off = isfinite(x[j]) ? fmax(off, fabs(x[j] - r[j])) : INFINITY;
            size = fmax(size, fabs(r[j]));
            if (isinf(off)) break;
        }
        CHECK(off <= within * size, "%s: %s is off by %g of %g", op_case_text(c), t->field->name,
              off, size);
    }
}

/* Some decays that leave nothing, or little, between the usual ones. */
static void steepen(mn_sample *sample) {
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *t = &sample->tensors[i];
        double *g = strcmp(t->field->name, "g") == 0 ? t->data : NULL;
        for (int64_t at = 3; g && at < t->count; at += 7) g[at] = at % 2 ? -1e24 : -20.0;
    }
}

static void chunks_are_the_rule(void **state) {
    (void)state;
    static const int64_t packing[] = { 0, 0, 1, 3, 67, 132, 260 };
    op_case forms[OP_MAX_FORMS];
    const int n_forms = op_forms(MN_OP_delta, forms);
    for (int f = 0; f < 8 * n_forms; f++) {
        op_case c = forms[f / 8];
        mn_sample got, want;
        c.dtype = MN_F64, c.B = 1, c.H = 2, c.K = 6, c.V = 5, c.T = 130, c.seed = (uint64_t)f;
        if (f / 2 % 2) c.H = 6, c.groups = 3;    // heads of values that share one of keys
        if (f % 2) {
            c.cu_seqlens = packing, c.n_seqs = MN_COUNTOF(packing) - 1, c.T = packing[c.n_seqs];
        }
        op_open(&want, &c);
        op_open(&got, &c);
        if (f / 4 % 2) steepen(&want), steepen(&got);
        op_run_both(op_context("ref", 1), &want, &c);
        delta_run_rounded(&got, &c, false);
        compare(&got, &want, 1e-11, &c);
        delta_run_rounded(&got, &c, true);
        compare(&got, &want, 0x1p-3, &c);    // what it costs a call of small sums
        mn_sample_free(&got);
        mn_sample_free(&want);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(chunks_are_the_rule) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
