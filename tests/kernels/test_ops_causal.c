/* test_ops_causal.c - one number that no model should see stays where it can be seen.
 *
 * A NaN, an infinity, a number near the ends of float32 or a denormal enters one token of one
 * input, and everything before that token, every other head and every other sequence keeps its
 * bits. The same in one token of one cotangent, and every gradient after it keeps its bits. Targets
 * agree on the token at which NaN begins. A masked half that is multiplied by 0 breaks each. */
#include "support/op_causal.h"

#include <math.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "support/op_walk.h"

static bool run(mn_context *context, mn_sample *s, mn_pass pass, const op_case *c) {
    const mn_status st = mn_op_run(context, s->op, pass, s->args);
    CHECK(mn_sample_guards_intact(s), "wrote beside a result, %s", op_case_text(c));
    return st == MN_OK;
}

typedef struct bench {
    op_target targets[MN_TARGET_COUNT + 1];
    int n_targets;
    mn_sample clean[MN_TARGET_COUNT + 1];
} bench;

static void poison_input(const bench *b, const op_case *c, int which, float value, int round) {
    op_beginnings want, have;
    bool ref_takes = true;
    for (int i = 0; i < b->n_targets; i++) {
        if (b->targets[i].dtype != MN_F32) continue;
        mn_context *context = op_context(b->targets[i].name, 1);
        const char *target = b->targets[i].name;
        mn_sample got;
        op_open(&got, c);
        const mn_sample_tensor *t = &got.tensors[which];
        const int64_t at = op_choose_element(&got, t, round);
        const op_spot poison = op_spot_at(&got, t, at);
        mn_sample_set(&got, t->data, at, (double)value);
        const bool ref = strcmp(target, "ref") == 0;
        const bool taken = run(context, &got, MN_FORWARD, c);
        if (ref) ref_takes = taken;
        CHECK(taken == ref_takes, "%s %s %s in %s, ref does not; %s", target,
              taken ? "takes" : "refuses", op_wild_text(value), t->field->name, op_case_text(c));
        if (taken && ref_takes) {
            op_check_kept(target, &b->clean[i], &got, t, &poison, value, OP_ON_RESULTS, c);
            op_find_nan(ref ? want : have, &got);
            if (!ref && isnan(value)) op_check_beginnings(target, want, have, &got, t, value, c);
            if (op_has_backward(c->op) && run(context, &got, MN_BACKWARD, c)) {
                op_check_kept(target, &b->clean[i], &got, t, &poison, value,
                              OP_ON_GRADIENTS_OF_INPUT, c);
            }
        }
        mn_sample_free(&got);
    }
}

static void poison_cotangent(const bench *b, const op_case *c, int which, float value, int round) {
    for (int i = 0; i < b->n_targets; i++) {
        if (b->targets[i].dtype != MN_F32) continue;
        mn_context *context = op_context(b->targets[i].name, 1);
        mn_sample got;
        op_open(&got, c);
        const mn_sample_tensor *t = &got.tensors[which];
        const int64_t at = op_choose_element(&got, t, round);
        const op_spot poison = op_spot_at(&got, t, at);
        mn_sample_set(&got, t->partner, at, (double)value);
        if (run(context, &got, MN_FORWARD, c) && run(context, &got, MN_BACKWARD, c)) {
            op_check_kept(b->targets[i].name, &b->clean[i], &got, t, &poison, value,
                          OP_ON_GRADIENTS, c);
        } else {
            CHECK(false, "%s: %s; %s", b->targets[i].name, mn_last_error(), op_case_text(c));
        }
        mn_sample_free(&got);
    }
}

/* Every value in every input and cotangent, or NaN and another that takes turns. */
static void check_form(const op_case *c, bool every) {
    bench b = { .n_targets = op_targets(b.targets) };
    for (int i = 0; i < b.n_targets; i++) {
        op_open(&b.clean[i], c);
        if (b.targets[i].dtype == MN_F32)
            op_run_both(op_context(b.targets[i].name, 1), &b.clean[i], c);
    }
    int round = (int)c->seed;
    for (int i = 0; i < b.clean[0].n_tensors; i++) {
        const mn_sample_tensor *t = &b.clean[0].tensors[i];
        const bool input = t->field->role <= MN_ROLE_RAW;
        if (!op_has_rows(t) || t->field->law == MN_LAW_CLASS) continue;
        for (size_t v = 0; v < OP_WILD_VALUES; v++, round++) {
            const size_t turn = 1 + (size_t)(c->seed + (uint64_t)i) % (OP_WILD_VALUES - 1);
            if (!every && v != 0 && v != turn) continue;
            float value = op_wild_values[v];
            if (input && op_allows(t->field, &value)) poison_input(&b, c, i, value, round);
            if (!input && t->partner) poison_cotangent(&b, c, i, value, round);
        }
    }
    for (int i = 0; i < b.n_targets; i++) mn_sample_free(&b.clean[i]);
}

static void keeps_to_itself(mn_op_id op) {
    static const int64_t borders[] = { 0, 1, 70, 70, 103 };
    op_case forms[OP_MAX_FORMS];
    const int n_forms = op_forms(op, forms);
    for (int f = 0; f < n_forms; f++) {
        op_case c = forms[f];
        c.seed = 1 + (uint64_t)f;
        c.B = 2, c.H = 2, c.T = 75, c.K = 19, c.V = 18;
        check_form(&c, f == 0);
        if (f > 0) continue;
        c.B = 1, c.H = 3, c.K = 32, c.V = 40, c.T = 103;
        c.cu_seqlens = borders, c.n_seqs = 4;
        if (op_has_time(op)) check_form(&c, f == 0);
        c.cu_seqlens = NULL, c.n_seqs = 0;
        c.B = c.H = 1, c.T = 97, c.K = 64, c.V = 96, c.more_keys = 7;
        check_form(&c, f == 0);
    }
}

int main(int argc, char **argv) {
    return op_visit("a wild number stays where it can be seen", keeps_to_itself, argc, argv);
}
