/* test_ops_cores.c - one head of one sequence uses several cores, on every vector target.
 *
 *   The parts that a call hands to the pool are counted: with a single one the other cores would
 *   rest. What has no exact split is in the table below, with the reason in
 *   docs/internals/architecture.md. The cut shows in no bit: 1, 2 and 3 threads, packed and
 *   separate; and in no error: the reference goes over the sequence in one piece. */
#include "support/op_bits.h"
#include "support/op_error.h"
#include "support/op_walk.h"

#include <string.h>

#include "base/util.h"

/* Tokens of more than one segment of mesa; widths of several tiles, the last one not whole. */
enum { TOKENS = 290, KEYS = 80, VALUES = 112 };

static const int64_t packing[] = { 0, 1, 40, TOKENS };

/* Passes whose first phases are one part, and how many of them. -1: all are. */
static const struct {
    mn_op_id op;
    mn_pass pass;
    int alone;
} whole[] = {
    { MN_OP_mesa, MN_FORWARD, 1 },        // statistics, which wait for each other
    { MN_OP_mesa, MN_BACKWARD, 1 },
    { MN_OP_curvature, MN_BACKWARD, 1 },  // sums of keys, K numbers a token
    { MN_OP_riccati, MN_FORWARD, -1 },    // a covariance makes the gains that make the next one
    { MN_OP_riccati, MN_BACKWARD, -1 },
    { MN_OP_bayes, MN_FORWARD, -1 },
    { MN_OP_bayes, MN_BACKWARD, -1 },
};

static int alone_of(mn_op_id op, mn_pass pass) {
    for (size_t i = 0; i < MN_COUNTOF(whole); i++) {
        if (whole[i].op == op && whole[i].pass == pass) return whole[i].alone;
    }
    return 0;
}

/* Phases before the first that has several parts. */
static void parts_are_several(const op_target *target, const mn_sample *s, mn_op_id op,
                              mn_pass pass) {
    const mn_kernel *kernel = mn_op_kernel(op_context(target->name, 2), op, pass, MN_F32);
    _Alignas(16) unsigned char args[MN_MAX_ARGS_BYTES];
    mn_plan plan = { 0 };
    int single = 0, phase = 0;
    if (!kernel) return;    // composed: its parts are operators
    memcpy(args, s->args, mn_op_describe(op)->args_bytes);
    ((mn_call *)(void *)args)->G = 1;    // groups would be parts
    CHECK(kernel->plan(args, &plan), "%s: no plan", mn_op_describe(op)->name);
    for (; phase < plan.n_phases && plan.items[phase] < 2; phase++) {
        single += plan.items[phase] == 1;
    }
    const int alone = phase < plan.n_phases ? single : -1, allowed = alone_of(op, pass);
    CHECK(alone == allowed, "%s, %s of %s: %d phases of one part come first, -1 being all; %d "
          "expected", target->name, mn_pass_name(pass), mn_op_describe(op)->name, alone, allowed);
}

static void run_here(void *context, mn_sample *sample, const op_case *c) {
    op_run_both(context, sample, c);
}

static void bits_are_equal(const op_target *target, const op_case *c) {
    static const char *const what[] = { "1 and 2 threads", "1 and 3 threads" };
    mn_sample one, packed;
    op_case members = *c;
    op_open(&one, c);
    op_run_both(op_context(target->name, 1), &one, c);
    for (int n = 0; n < 2; n++) {
        mn_sample more;
        op_open(&more, c);
        op_run_both(op_context(target->name, n + 2), &more, c);
        op_check_same(what[n], target->name, &one, &more, op_bits_everything, c);
        mn_sample_free(&more);
    }
    mn_sample_free(&one);
    members.cu_seqlens = packing, members.n_seqs = MN_COUNTOF(packing) - 1;
    members.block = TOKENS;
    op_open(&packed, &members);
    op_check_packed(target->name, &packed, &members, run_here, op_context(target->name, 2));
    mn_sample_free(&packed);
}

static void results_match(const op_case *f32, const op_target *targets, int n_targets) {
    mn_sample drawn, want;
    op_tolerances tolerances;
    op_case c = *f32;
    op_open(&drawn, &c);
    c.dtype = MN_F64;
    op_allocate(&want, &c);
    op_convert(&want, &drawn);
    mn_sample_free(&drawn);
    op_measure(&tolerances, &want, &c);
    c.dtype = MN_F32;
    for (int i = 0; i < n_targets; i++) {
        mn_sample got;
        op_open(&got, &c);
        op_run_both(op_context(targets[i].name, 2), &got, &c);
        op_compare(targets[i].name, &got, &want, &tolerances, &c);
        mn_sample_free(&got);
    }
    mn_sample_free(&want);
}

static void several_cores(mn_op_id op) {
    op_case forms[OP_MAX_FORMS];
    op_target all[MN_TARGET_COUNT + 1], targets[MN_TARGET_COUNT + 1];
    const int n_all = op_targets(all);
    int n = 0;
    for (int i = 0; i < n_all; i++) {
        if (strcmp(all[i].name, "ref") != 0) targets[n++] = all[i];
    }
    if (!op_has_time(op) || n == 0) return;
    op_forms(op, forms);
    op_case c = forms[0];
    c.dtype = MN_F32, c.B = c.H = 1, c.T = TOKENS, c.K = KEYS, c.V = VALUES, c.seed = 7;
    if (op == MN_OP_scan) c.choice[0] = 1;    // softplus: negative steps would grow for ever
    mn_sample s;
    op_open(&s, &c);
    for (int i = 0; i < n; i++) {
        parts_are_several(&targets[i], &s, op, MN_FORWARD);
        if (op_has_backward(op)) parts_are_several(&targets[i], &s, op, MN_BACKWARD);
        bits_are_equal(&targets[i], &c);
    }
    mn_sample_free(&s);
    results_match(&c, targets, n);
}

int main(int argc, char **argv) {
    return op_visit("several cores", several_cores, argc, argv);
}
