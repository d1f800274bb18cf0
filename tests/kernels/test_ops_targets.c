/* test_ops_targets.c - every target against the float64 reference, on awkward sizes.
 *
 * Tolerances are measured case by case (support/op_error.h). */
#include "support/op_error.h"

#include "base/util.h"

static void check_case(op_case c) {
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    op_tolerances tolerances;
    mn_sample drawn, want;
    c.dtype = MN_F32;
    op_open(&drawn, &c);
    c.dtype = MN_F64;
    op_allocate(&want, &c);
    op_convert(&want, &drawn);
    mn_sample_free(&drawn);
    op_measure(&tolerances, &want, &c);
    c.dtype = MN_F32;
    for (int i = 0; i < n_targets; i++) {
        if (targets[i].dtype != MN_F32) continue;
        mn_sample got;
        op_open(&got, &c);
        op_run_both(op_context(targets[i].name, 2), &got, &c);
        op_compare(targets[i].name, &got, &want, &tolerances, &c);
        mn_sample_free(&got);
    }
    mn_sample_free(&want);
}

/* Around vector widths, tiles and chunks. */
static const int64_t lengths[] = { 0, 1, 2, 15, 16, 17, 63, 64, 65, 130 };
static const struct {
    int64_t K, V;
} widths[] = { { 1, 1 },   { 3, 8 },    { 8, 3 },    { 16, 17 },   { 17, 16 }, { 31, 64 },
               { 64, 31 }, { 64, 64 },  { 100, 33 }, { 33, 100 },  { 2, 128 } };

/* A norm over one number is constant up to eps: its gradient is what rounding leaves. */
static bool is_norm(mn_op_id op) {
    return op == MN_OP_rms_norm || op == MN_OP_rms_norm_gated || op == MN_OP_l2_norm;
}

/* So is that of a head of one channel. */
static void keep_heads_wide(op_case *c) {
    if (c->op == MN_OP_conv_unit && c->K == 1) c->K = 2 + c->T % 2;
}

/* One key channel makes a row of scores a multiple of q, one token makes it one number, and the
 * norm takes the factor away: the gradient of q (of the gate's half in glu) is what rounding
 * leaves. */
static void keep_scores_apart(op_case *c) {
    const bool hyper = c->op == MN_OP_hyper || c->op == MN_OP_hyper_layer;
    if (hyper && c->K == 1) c->K = 2 + c->T % 2;
    if (c->op == MN_OP_hyper_layer && c->T == 1) c->T = 3;
}

static void targets_match_reference(mn_op_id op) {
    op_case forms[OP_MAX_FORMS];
    const int n_forms = op_forms(op, forms);
    for (int f = 0; f < n_forms; f++) {
        op_case c = forms[f];
        for (size_t i = 0; i < MN_COUNTOF(lengths); i++) {
            const size_t w = (i + (size_t)f) % MN_COUNTOF(widths);
            c.T = lengths[i], c.K = widths[w].K, c.V = widths[w].V;
            if (is_norm(op) && c.V == 1) c.V = 2 + c.T % 2;
            keep_heads_wide(&c);
            keep_scores_apart(&c);
            c.B = c.H = c.K * c.V > 600 ? 1 : 2;
            c.more_keys = (int64_t)i % 3 * 7;
            c.seed = 100 * (uint64_t)f + i + 1;
            check_case(c);
        }
    }
    op_case wide = forms[0];
    wide.B = wide.H = 1, wide.T = 20, wide.K = 256, wide.V = 512;
    check_case(wide);
}

int main(int argc, char **argv) {
    return op_visit("targets match the reference", targets_match_reference, argc, argv);
}
