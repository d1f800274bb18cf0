/* test_importance.c - Palimpsa and Longhorn beyond what the operator table's own tests ask: awkward
 * sizes, harsh inputs, 65,536 tokens, decoding in place, and the operators they turn into.
 *
 * Where the judge is the float64 reference, tolerances are measured case by case
 * (support/op_error.h). */
#include <math.h>
#include <string.h>

#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"
#include "support/close.h"
#include "support/op_against.h"

static const mn_op_id ops[] = { MN_OP_importance, MN_OP_longhorn_diag, MN_OP_longhorn_column };

static op_case case_of(mn_op_id op, int64_t T, int64_t H, int64_t K, int64_t V) {
    return (op_case){ .op = op, .dtype = MN_F32, .fields = MN_ALL_FIELDS, .B = 1, .T = T, .H = H,
                      .K = K, .V = V, .seed = 3 };
}

/* ---- sizes --------------------------------------------------------------------------------------- */

static void awkward_sizes(void **state) {
    (void)state;
    static const int64_t K[] = { 1, 7, 48, 64, 100 }, V[] = { 1, 5, 8, 16, 31, 128 };
    static const int64_t T[] = { 0, 1, 15, 64, 65, 130 };
    for (size_t i = 0; i < MN_COUNTOF(K) * MN_COUNTOF(V) * MN_COUNTOF(T); i++) {
        const size_t t = i % MN_COUNTOF(T), v = i / MN_COUNTOF(T) % MN_COUNTOF(V);
        const size_t k = i / MN_COUNTOF(T) / MN_COUNTOF(V);
        if (K[k] * V[v] > 3000 && t % 2 == v % 2) continue;    // the reference takes its time
        for (size_t o = 0; o < MN_COUNTOF(ops); o++) {
            op_case c = case_of(ops[o], T[t], 1 + (int64_t)(i % 2), K[k], V[v]);
            if ((i + o) % 3 == 0) c.fields = 0;
            op_against_reference(c, NULL);
        }
    }
    check_done();
}

/* Few heads cut rows and columns into items, many heads do not, and 128 columns are one tile. */
static void cuts_do_not_show(void **state) {
    (void)state;
    for (size_t o = 0; o < MN_COUNTOF(ops); o++) {
        op_against_reference(case_of(ops[o], 70, 9, 24, 17), NULL);
        op_against_reference(case_of(ops[o], 40, 8, 20, 150), NULL);
        op_against_reference(case_of(ops[o], 70, 1, 100, 150), NULL);
        op_against_reference(case_of(ops[o], 40, 3, 33, 70), NULL);
    }
    check_done();
}

/* ---- harsh inputs --------------------------------------------------------------------------------- */

static double log_uniform(uint64_t stream, int64_t i, double low, double high) {
    const double u = mn_rng_uniform(5, stream, (uint64_t)i);
    return exp(log(low) + u * (log(high) - log(low)));
}

static void fill_log_uniform(mn_sample *s, const char *name, double low, double high) {
    const mn_sample_tensor *t = mn_sample_find(s, name);
    for (int64_t i = 0; t->data && i < t->count; i++) {
        mn_sample_set(s, t->data, i, log_uniform((uint64_t)(t - s->tensors), i, low, high));
    }
}

/* Some keys are zero, some all but. */
static void thin_keys(mn_sample *s) {
    mn_sample_tensor *k = mn_sample_find(s, "k");
    const int64_t K = ((const mn_call *)s->args)->K;
    for (int64_t i = 0; i < k->count; i++) {
        const int64_t row = i / K;
        if (row % 7 == 2) mn_sample_set(s, k->data, i, 0.0);
        if (row % 7 == 5) mn_sample_set(s, k->data, i, 1e-9 * mn_sample_get(s, k->data, i));
        if (row % 11 == 3 && i % K != 0) mn_sample_set(s, k->data, i, 0.0);    // one entry is left
    }
}

/* Decays from none to exp(-40), gates and prior over many decades. */
static void harsh_importance(mn_sample *s) {
    static const double falls[] = { 0.0, -1e-7, -1e-3, -0.1, -0.7, -3.9, -4.1, -40.0 };
    mn_sample_tensor *g = mn_sample_find(s, "g");
    for (int64_t i = 0; i < g->count; i++) {
        const double u = mn_rng_uniform(5, 90, (uint64_t)i);
        mn_sample_set(s, g->data, i, falls[(size_t)(u * (double)MN_COUNTOF(falls))]);
    }
    fill_log_uniform(s, "b", 1e-8, 1e6);
    fill_log_uniform(s, "ip", 1e-4, 1e4);
    thin_keys(s);
}

/* A state far below the prior, where I - ip would lose everything. */
static void below_the_prior(mn_sample *s) {
    op_fill(s, "ip", 3.0);
    fill_log_uniform(s, "imp0", 1e-9, 1e-3);
    fill_log_uniform(s, "b", 1e-9, 1e-3);
    for (int64_t t = 0; t < ((const mn_call *)s->args)->T; t++) {
        op_fill_token(s, "g", t, t % 5 ? -1e-6 : 0.0);
    }
}

/* A prior that swallows each single gain, but not their sum. */
static void far_above_the_gains(mn_sample *s) {
    op_fill(s, "ip", 1e8);
    op_fill(s, "g", 0.0);
}

static void harsh_longhorn(mn_sample *s) {
    fill_log_uniform(s, "beta", 1e-8, 1e8);
    thin_keys(s);
}

static void harsh_inputs_match_reference(void **state) {
    (void)state;
    static const int64_t widths[][2] = { { 8, 6 }, { 20, 33 }, { 1, 5 } };
    for (size_t w = 0; w < MN_COUNTOF(widths); w++) {
        op_case c = case_of(MN_OP_importance, 150, 2, widths[w][0], widths[w][1]);
        op_against_reference(c, below_the_prior);
        op_against_reference(c, harsh_importance);
        c.fields = 0;
        op_against_reference(c, harsh_importance);
        op_against_reference(c, far_above_the_gains);
        for (int o = 1; o < 3; o++) {
            op_against_reference(case_of(ops[o], 70, 2, widths[w][0], widths[w][1]), harsh_longhorn);
        }
    }
    check_done();
}

/* ---- long sequences --------------------------------------------------------------------------------- */

/* Forgetting over 30,000 tokens. The decay lies halfway between two floats: rounded and applied once
 * per token it would be off by 9e-4 in the end. */
static void forget_slowly(mn_sample *s) {
    op_fill(s, "g", -0.00003347);
}

/* Each token rounds the state once, by 2^-25 at most and to either side: sqrt(T) such roundings by the
 * end of the line. Four of them for results, four times that for gradients, which pass them twice. */
static void long_run_matches_reference(op_case c, op_shape_fn *shape) {
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    const double tolerance = 4.0 * 0x1p-25 * sqrt((double)c.T);
    op_case f64 = c;
    mn_sample want, drawn;
    f64.dtype = MN_F64;
    op_open(&drawn, &c);
    op_open(&want, &f64);
    shape(&drawn);
    op_convert(&want, &drawn);
    op_run_both(op_context("ref", 1), &want, &f64);
    for (int i = 0; i < n_targets; i++) {
        mn_sample got;
        c.dtype = targets[i].dtype;
        op_open(&got, &c);
        op_convert(&got, &drawn);
        op_run_both(op_context(targets[i].name, 1), &got, &c);
        check_samples_close(op_case_text(&c), targets[i].name, &got, &want, false, tolerance);
        check_samples_close(op_case_text(&c), targets[i].name, &got, &want, true, 4.0 * tolerance);
        mn_sample_free(&got);
    }
    mn_sample_free(&want);
    mn_sample_free(&drawn);
}

static void long_sequences_stay_accurate(void **state) {
    (void)state;
    op_case c = case_of(MN_OP_importance, 65536, 1, 3, 2);
    long_run_matches_reference(c, forget_slowly);
    c.fields = 0;
    long_run_matches_reference(c, far_above_the_gains);
    op_against_reference(case_of(MN_OP_longhorn_diag, 65536, 1, 3, 2), NULL);
    op_against_reference(case_of(MN_OP_longhorn_column, 65536, 1, 3, 2), NULL);
    check_done();
}

static void tiny_importance(mn_sample *s) {
    op_fill(s, "imp0", 1e-30);
    op_fill(s, "b", 0.0);
    op_fill(s, "g", 0.0);
}

static void sudden_forgetting(mn_sample *s) {
    op_fill(s, "imp0", 1e30);
    for (int64_t t = 0; t < ((const mn_call *)s->args)->T; t++) {
        op_fill_token(s, "g", t, t % 1000 == 999 ? -40.0 : -1e-7);
    }
}

static void wild_gates(mn_sample *s) {
    harsh_importance(s);
    fill_log_uniform(s, "b", 1e-12, 1e12);
    fill_log_uniform(s, "imp0", 1e-12, 1e12);
}

static void importance_stays_positive(void **state) {
    (void)state;
    static op_shape_fn *const shapes[] = { tiny_importance, sudden_forgetting, wild_gates };
    static const char *const names[] = { "imp", "ovar", "o", "mu" };
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < 3 * n_targets; i++) {
        op_case c = case_of(MN_OP_importance, 65536, 1, 3, 18);
        const op_target *target = &targets[i / 3];
        mn_sample s;
        c.dtype = target->dtype;
        op_open(&s, &c);
        shapes[i % 3](&s);
        op_run(op_context(target->name, 2), &s, MN_FORWARD, &c);
        for (size_t n = 0; n < MN_COUNTOF(names); n++) {
            const mn_sample_tensor *t = mn_sample_find(&s, names[n]);
            for (int64_t at = 0; at < t->count; at++) {
                const double x = mn_sample_get(&s, t->data, at);
                if (!CHECK(isfinite(x) && (n > 1 || x > 0.0), "%s, inputs %d: %s[%d] is %g",
                           target->name, i % 3, names[n], (int)at, x)) break;
            }
        }
        mn_sample_free(&s);
    }
    check_done();
}

/* ---- decoding ----------------------------------------------------------------------------------------- */

static void steps_match_reference(void **state) {
    (void)state;
    for (size_t o = 0; o < MN_COUNTOF(ops); o++) {
        op_steps_against_reference(case_of(ops[o], 100, 1, 17, 9), NULL);
        op_case c = case_of(ops[o], 45, 3, 48, 70);
        c.B = 2;
        op_steps_against_reference(c, NULL);
    }
    op_steps_against_reference(case_of(MN_OP_importance, 100, 2, 8, 6), harsh_importance);
    op_steps_against_reference(case_of(MN_OP_importance, 100, 2, 8, 6), below_the_prior);
    op_steps_against_reference(case_of(MN_OP_importance, 400, 1, 3, 2), forget_slowly);
    op_steps_against_reference(case_of(MN_OP_longhorn_diag, 70, 2, 8, 6), harsh_longhorn);
    op_steps_against_reference(case_of(MN_OP_longhorn_column, 70, 2, 8, 6), harsh_longhorn);
    check_done();
}

/* ---- what they turn into ------------------------------------------------------------------------------ */

/* Both sides of an identity lose a few roundings per token, at random: sqrt(T) of them, and some for
 * the sums over rows. */
static double identity_tolerance(const op_case *c) {
    return (c->dtype == MN_F64 ? 0x1p-53 : 0x1p-24) * (8.0 + 4.0 * sqrt((double)c->T));
}

/* Inputs of `to` that `from` also has, by name. */
static void share_inputs(mn_sample *to, mn_sample *from) {
    for (int i = 0; i < to->n_tensors; i++) {
        mn_sample_tensor *t = &to->tensors[i];
        const mn_sample_tensor *f = mn_sample_find(from, t->field->name);
        if (t->field->role > MN_ROLE_RAW || !t->data || !f || !f->data) continue;
        for (int64_t at = 0; at < t->count; at++) {
            mn_sample_set(to, t->data, at, mn_sample_get(from, f->data, at));
        }
    }
}

/* rms(x - factor y) <= tolerance rms(x) for result x of one and y of the other */
static void check_equal(const op_case *c, const char *target, mn_sample *one, const char *x,
                        mn_sample *other, const char *y, double factor) {
    const mn_sample_tensor *a = mn_sample_find(one, x), *b = mn_sample_find(other, y);
    double off = 0.0, size = 0.0;
    for (int64_t i = 0; i < a->count; i++) {
        const double want = mn_sample_get(one, a->data, i);
        off += pow(want - factor * mn_sample_get(other, b->data, i), 2.0);
        size += want * want;
    }
    CHECK(size > 0.0 && sqrt(off / size) <= identity_tolerance(c), "%s: %s and %s differ by %.2e, %s",
          target, x, y, sqrt(off / size), op_case_text(c));
}

/* Linear attention with a decay per token, from a fresh state, in the sizes of c */
static op_case linear_case(op_case c) {
    int count;
    const mn_field *fields = mn_op_fields(MN_OP_additive, &count);
    c.op = MN_OP_additive;
    c.decay = MN_DECAY_TOKEN;
    c.fields = MN_ALL_FIELDS;
    for (int i = 0; i < count; i++) {
        if (strcmp(fields[i].name, "state0") == 0) c.fields &= ~((uint64_t)1 << i);
    }
    return c;
}

/* Without gates and from a fresh start I stays at ip, and the rest is linear attention with decay;
 * the variance is that of the prior. */
static void without_gates_it_is_linear_attention(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        op_case c = case_of(MN_OP_importance, 130, 2, 12, 19);
        c.fields = 0;
        c.dtype = targets[i].dtype;
        const op_case plain = linear_case(c);
        mn_sample s, linear;
        op_open(&s, &c);
        op_open(&linear, &plain);
        op_fill(&s, "b", 0.0);
        op_fill(&s, "ip", 0.375);
        share_inputs(&linear, &s);
        op_run(op_context(targets[i].name, 2), &s, MN_FORWARD, &c);
        op_run(op_context(targets[i].name, 2), &linear, MN_FORWARD, &plain);
        check_equal(&c, targets[i].name, &s, "o", &linear, "o", 1.0 / 0.375);
        check_equal(&c, targets[i].name, &s, "mu", &linear, "state", 1.0 / 0.375);
        const mn_sample_tensor *ovar = mn_sample_find(&s, "ovar"), *q = mn_sample_find(&s, "q");
        for (int64_t at = 0; at < ovar->count; at++) {
            double sum = 0.0;
            for (int64_t m = 0; m < c.K; m++) {
                sum += pow(mn_sample_get(&s, q->data, at / c.V * c.K + m), 2.0);
            }
            const double want = 0.7 * 0.7 * sum / 0.375, got = mn_sample_get(&s, ovar->data, at);
            CHECK(fabs(got - want) <= identity_tolerance(&c) * want, "%s: ovar", targets[i].name);
        }
        mn_sample_free(&s);
        mn_sample_free(&linear);
    }
    check_done();
}

/* With a prior of 2^60 and values as large, no gate moves I: Mamba-2. */
static void a_huge_prior_is_mamba2(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        op_case c = case_of(MN_OP_importance, 130, 2, 12, 19);
        c.fields = 0;
        c.dtype = targets[i].dtype;
        const op_case plain = linear_case(c);
        mn_sample s, mamba;
        op_open(&s, &c);
        op_open(&mamba, &plain);
        share_inputs(&mamba, &s);
        op_fill(&s, "ip", 0x1p60);
        mn_sample_tensor *v = mn_sample_find(&s, "v");
        for (int64_t at = 0; at < v->count; at++) {
            mn_sample_set(&s, v->data, at, 0x1p60 * mn_sample_get(&s, v->data, at));
        }
        op_run(op_context(targets[i].name, 2), &s, MN_FORWARD, &c);
        op_run(op_context(targets[i].name, 2), &mamba, MN_FORWARD, &plain);
        check_equal(&c, targets[i].name, &s, "o", &mamba, "o", 1.0);
        check_equal(&c, targets[i].name, &s, "mu", &mamba, "state", 1.0);
        mn_sample_free(&s);
        mn_sample_free(&mamba);
    }
    check_done();
}

/* Makes beta the same in all columns, and sets the gain of the delta rule that this is. */
static void equal_columns(mn_sample *longhorn, mn_sample *delta, const op_case *c) {
    mn_sample_tensor *beta = mn_sample_find(longhorn, "beta"), *k = mn_sample_find(longhorn, "k");
    mn_sample_tensor *gain = mn_sample_find(delta, "beta");
    for (int64_t row = 0; row < gain->count; row++) {
        const double x = mn_sample_get(longhorn, beta->data, row * c->V);
        double norm = 0.0;
        for (int64_t j = 0; j < c->V; j++) mn_sample_set(longhorn, beta->data, row * c->V + j, x);
        for (int64_t i = 0; i < c->K; i++) norm += pow(mn_sample_get(longhorn, k->data, row * c->K + i), 2);
        mn_sample_set(delta, gain->data, row, x / (1.0 + x * norm));
    }
}

static void equal_columns_are_the_delta_rule(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        op_case c = case_of(MN_OP_longhorn_column, 130, 2, 12, 19);
        c.dtype = targets[i].dtype;
        op_case rule = c;
        rule.op = MN_OP_delta_net;
        rule.decay = MN_DECAY_NONE;
        mn_sample s, delta;
        op_open(&s, &c);
        op_open(&delta, &rule);
        share_inputs(&delta, &s);
        equal_columns(&s, &delta, &c);
        op_run(op_context(targets[i].name, 2), &s, MN_FORWARD, &c);
        op_run(op_context(targets[i].name, 2), &delta, MN_FORWARD, &rule);
        check_equal(&c, targets[i].name, &s, "o", &delta, "o", 1.0);
        check_equal(&c, targets[i].name, &s, "state", &delta, "state", 1.0);
        mn_sample_free(&s);
        mn_sample_free(&delta);
    }
    check_done();
}

/* A memory of one row has nothing off its diagonal. */
static void one_row_is_diagonal(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        op_case c = case_of(MN_OP_longhorn_column, 130, 2, 1, 19);
        c.dtype = targets[i].dtype;
        op_case diagonal = c;
        diagonal.op = MN_OP_longhorn_diag;
        mn_sample s, d;
        op_open(&s, &c);
        op_open(&d, &diagonal);
        share_inputs(&d, &s);
        op_run(op_context(targets[i].name, 2), &s, MN_FORWARD, &c);
        op_run(op_context(targets[i].name, 2), &d, MN_FORWARD, &diagonal);
        check_equal(&c, targets[i].name, &s, "o", &d, "o", 1.0);
        check_equal(&c, targets[i].name, &s, "state", &d, "state", 1.0);
        mn_sample_free(&s);
        mn_sample_free(&d);
    }
    check_done();
}

/* ---- gates ---------------------------------------------------------------------------------------------- */

/* The message must name the gate the caller gave, not the log decay made of it. */
static void check_refused(mn_op_id op, const char *name, double x, const char *named) {
    op_case c = case_of(op, 20, 2, 4, 3);
    mn_sample s;
    op_open(&s, &c);
    op_fill_token(&s, name, 7, x);
    const mn_status st = mn_op_run(op_context("ref", 1), op, MN_FORWARD, s.args);
    CHECK(st == MN_ERR_ARGUMENT && strstr(mn_last_error(), named), "%s = %g: %s, \"%s\"", name, x,
          mn_status_name(st), mn_last_error());
    mn_sample_free(&s);
}

static void impossible_gates_are_refused(void **state) {
    (void)state;
    check_refused(MN_OP_palimpsa_paper, "gamma", 1e9, "gamma");
    check_refused(MN_OP_palimpsa_paper, "gamma", -0.5, "gamma");
    check_refused(MN_OP_palimpsa_paper, "gamma", NAN, "gamma");
    check_refused(MN_OP_palimpsa_code, "dt", -0.5, "dt");
    check_refused(MN_OP_palimpsa_code, "dt", NAN, "dt");
    check_refused(MN_OP_palimpsa_code, "dt", INFINITY, "dt");
    check_done();
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(awkward_sizes),
        cmocka_unit_test(cuts_do_not_show),
        cmocka_unit_test(harsh_inputs_match_reference),
        cmocka_unit_test(long_sequences_stay_accurate),
        cmocka_unit_test(importance_stays_positive),
        cmocka_unit_test(steps_match_reference),
        cmocka_unit_test(without_gates_it_is_linear_attention),
        cmocka_unit_test(a_huge_prior_is_mamba2),
        cmocka_unit_test(equal_columns_are_the_delta_rule),
        cmocka_unit_test(one_row_is_diagonal),
        cmocka_unit_test(impossible_gates_are_refused),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("importance and longhorn", tests, NULL, NULL);
}
