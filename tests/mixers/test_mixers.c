/* test_mixers.c - every layer of the table, with and without +ccq: the fused operator is the
 * step loop, whatever the pieces it is run in.
 *
 * A row whose operator is missing fails. All rows are visited before a test fails, so that its
 * output lists every one that does not hold. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "kernels/dispatch.h"
#include "definition/axes.h"
#include "support/mixer_case.h"

enum { SEED = 20240611, N_TOKENS = 70 }; // more than a chunk of 64

/* A target and the type it runs in. */
typedef struct where {
    mn_context *context;
    const char *target;
    mn_dtype dtype;
} where;

typedef int (*check_fn)(const char *name, const where *at);

/* Results are sums over at most T K terms of numbers that were rounded to the type once or twice
 * on their way, with signs at random, plus the error of a few exponentials: 100 units in the
 * last place hold with room, and a wrong term is off by far more. In double the reference is the
 * only kernel. */
static double tolerance(const where *at) {
    return 100.0 * (at->dtype == MN_F64 ? DBL_EPSILON : FLT_EPSILON);
}

static int complain(const char *name, const where *at, const char *what, double error) {
    print_error("%s on %s %s: %s: %g\n", name, at->target, mn_dtype_name(at->dtype), what, error);
    return 1;
}

static int complain_of_status(const char *name, const where *at) {
    print_error("%s on %s %s: %s\n", name, at->target, mn_dtype_name(at->dtype), mn_last_error());
    return 1;
}

/* Runs `check` for every layer, on the reference in double and on every target in float. */
static void for_all_layers(check_fn check) {
    int failures = 0;
    for (int run = -1; run < MN_TARGET_COUNT; run++) {
        const mn_target_id id = run < 0 ? MN_TARGET_REF : (mn_target_id)run;
        if (!mn_target_available(id)) continue;
        where at = { NULL, mn_target_name(id), run < 0 ? MN_F64 : MN_F32 };
        const mn_context_options options = { .n_threads = 2, .target = at.target };
        assert_int_equal(mn_context_create(&at.context, &options), MN_OK);
        for (int i = 0; i < 2 * mn_mixer_count(); i++) {
            mn_mixer_info info = *mn_mixer_row(i / 2);
            info.ccq = i % 2 == 1;
            char name[MN_MIXER_NAME];
            mn_mixer_full_name(name, &info);
            if (!info.ccq || mn_mixer_has_matrix(&info)) failures += check(name, &at);
        }
        mn_context_destroy(at.context);
    }
    assert_int_equal(failures, 0);
}

/* ---- the operator is the definition ---------------------------------------------------------- */

static int compare_with_definition(const mixer_case *c, const where *at) {
    const double tol = tolerance(at), output = case_output_error(c), state = case_state_error(c);
    int failures = 0;
    if (!(output <= tol)) failures += complain(c->name, at, "output", output);
    if (!(state <= tol)) failures += complain(c->name, at, "final state", state);
    if (mn_mixer_has_variance(&c->info)) {
        const double variance = case_variance_error(c);
        if (!(variance <= tol)) failures += complain(c->name, at, "variance", variance);
    }
    return failures;
}

/* The operator over the pieces that end at `cuts`, each from the state the last one left. */
static int check_pieces(const char *name, const where *at, const int64_t *cuts, int n_cuts) {
    mixer_case c;
    int failures = 0;
    mn_status st = case_create(&c, name, at->dtype, 2, N_TOKENS, NULL, SEED);
    if (st == MN_OK) st = case_define(&c);
    for (int64_t i = 0, t0 = 0; i < n_cuts && st == MN_OK; t0 = cuts[i++]) {
        st = case_fuse(&c, at->context, t0, cuts[i], i == 0);
    }
    failures += st == MN_OK ? compare_with_definition(&c, at) : complain_of_status(name, at);
    if (!mn_sample_guards_intact(&c.sample)) failures += complain(name, at, "guards", 0);
    case_destroy(&c);
    return failures;
}

static int check_whole(const char *name, const where *at) {
    const int64_t cuts[] = { N_TOKENS };
    return check_pieces(name, at, cuts, 1);
}

static int check_steps(const char *name, const where *at) {
    int64_t cuts[N_TOKENS];
    for (int64_t t = 0; t < N_TOKENS; t++) cuts[t] = t + 1;
    return check_pieces(name, at, cuts, N_TOKENS);
}

static int check_cuts(const char *name, const where *at) {
    const int64_t cuts[] = { 1, 38, 39, N_TOKENS };
    return check_pieces(name, at, cuts, 4);
}

static void operator_is_the_definition(void **state) {
    (void)state;
    for_all_layers(check_whole);
}

static void steps_equal_the_scan(void **state) {
    (void)state;
    for_all_layers(check_steps);
}

static void state_carries_across_cuts(void **state) {
    (void)state;
    for_all_layers(check_cuts);
}

/* ---- options --------------------------------------------------------------------------------- */

/* A parameter other than its default, or optional inputs left out. */
static const struct {
    const char *layer, *parameter;
    double value;
    const char *dropped[5];
} options[] = {
    { "attention", "rope_kind", 0, { 0 } },
    { "attention", "rope_kind", 2, { 0 } },
    { "attention", "rope_base", 50, { 0 } },
    { "relu_attention", "eps", 3.0, { 0 } },
    { "hypermlp", "norm", 1, { 0 } },
    { "hypermlp", "norm", 2, { "gv" } },
    { "hypermlp", "norm", 0, { "c1", "U1", "Vt1", "d1" } },
    { "hyperglu", "norm", 1, { 0 } },
    { "hyperglu", "norm", 2, { "c2", "U2", "Vt2", "d2" } },
    { "kla", "from_prior", 1, { 0 } },
    { "kla+ccq", "from_prior", 1, { 0 } },
    { "mamba1", "softplus", 0, { 0 } },
    { "mamba1+ccq", "softplus", 1, { "D", "z", "dt_bias" } },
};

static void options_mean_the_same(void **state) {
    (void)state;
    where at = { NULL, "ref", MN_F64 };
    const mn_context_options wanted = { .n_threads = 1, .target = at.target };
    int failures = 0;
    assert_int_equal(mn_context_create(&at.context, &wanted), MN_OK);
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        mixer_case c;
        mn_status st = case_create(&c, options[i].layer, at.dtype, 2, 20, NULL, SEED);
        case_set(&c, options[i].parameter, options[i].value);
        for (int n = 0; options[i].dropped[n]; n++) case_drop(&c, options[i].dropped[n]);
        if (st == MN_OK) st = case_define(&c);
        if (st == MN_OK) st = case_fuse(&c, at.context, 0, 20, true);
        failures += st == MN_OK ? compare_with_definition(&c, &at)
                                : complain_of_status(options[i].layer, &at);
        case_destroy(&c);
    }
    mn_context_destroy(at.context);
    assert_int_equal(failures, 0);
}

/* ---- no look-ahead --------------------------------------------------------------------------- */

static double largest_change(const double *x, const double *y, int64_t n) {
    double largest = 0.0;
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(x[i] - y[i]));
    return largest;
}

/* Outputs before and from the cut on, with all inputs from the cut on drawn anew. */
static int check_causal(const char *name, const where *at) {
    enum { CUT = 41 };
    mixer_case c;
    mn_status st = case_create(&c, name, at->dtype, 1, N_TOKENS, NULL, SEED);
    double *first = calloc((size_t)(N_TOKENS * c.width), sizeof *first),
           *second = first ? calloc((size_t)(N_TOKENS * c.width), sizeof *second) : NULL;
    assert_non_null(second);
    for (int run = 0; run < 2 && st == MN_OK; run++) {
        if (run == 1) case_redraw(&c, CUT, SEED + 1);
        st = case_fuse(&c, at->context, 0, N_TOKENS, true);
        for (int64_t i = 0; i < N_TOKENS * c.width; i++) {
            (run ? second : first)[i] = mn_sample_get(&c.sample, case_output(&c)->data, i);
        }
    }
    const int64_t before = CUT * c.width, after = (N_TOKENS - CUT) * c.width;
    int failures = st == MN_OK ? 0 : complain_of_status(name, at);
    if (st == MN_OK) {
        const double seen = case_error(second, first, before);
        const double changed = largest_change(second + before, first + before, after);
        if (!(seen <= tolerance(at))) failures += complain(name, at, "looks ahead", seen);
        if (!(changed > 1e-3)) failures += complain(name, at, "does not see its input", changed);
    }
    free(first);
    free(second);
    case_destroy(&c);
    return failures;
}

static void nothing_looks_ahead(void **state) {
    (void)state;
    for_all_layers(check_causal);
}

/* ---- packed sequences ------------------------------------------------------------------------ */

static bool same_bits(const mixer_case *x, const mixer_case *y, const char *name, int64_t x_at,
                      int64_t y_at, int64_t count) {
    const size_t bytes = mn_dtype_bytes(((const mn_call *)x->sample.args)->dtype);
    const char *a = case_result(x, name)->data, *b = case_result(y, name)->data;
    return memcmp(a + (size_t)x_at * bytes, b + (size_t)y_at * bytes, (size_t)count * bytes) == 0;
}

/* Sequence n of the packed run against a run of its own; the states of `own` are in row 0. */
static int compare_sequence(const mixer_case *packed, const mixer_case *own, int64_t n,
                            const where *at) {
    const int64_t t0 = packed->cu[n], t1 = packed->cu[n + 1];
    const char *output = case_output(packed)->field->name;
    int failures = 0;
    if (!same_bits(packed, own, output, t0 * packed->width, t0 * packed->width,
                   (t1 - t0) * packed->width)) {
        failures += complain(packed->name, at, "packed output differs in sequence", (double)n);
    }
    for (int i = 0; i < packed->sample.n_tensors; i++) {
        const mn_sample_tensor *tensor = &packed->sample.tensors[i];
        if (tensor->field->role < MN_ROLE_OUT || tensor->axes[0] != 'N') continue;
        const int64_t count = tensor->count / 3;
        if (!same_bits(packed, own, tensor->field->name, n * count, 0, count)) {
            failures += complain(packed->name, at, tensor->field->name, (double)n);
        }
    }
    return failures;
}

/* Every sequence against a pack of its own and, where it has more than one token, against a call
 * without packing. One token without packing is a decode step, which has kernels of its own that
 * agree to rounding; steps_equal_the_scan holds them to that. */
static int check_packed(const char *name, const where *at) {
    static const int64_t cu[] = { 0, 37, 38, N_TOKENS };
    mixer_case packed, own;
    int failures = 0;
    mn_status st = case_create(&packed, name, at->dtype, 1, N_TOKENS, cu, SEED);
    if (st == MN_OK) st = case_create(&own, name, at->dtype, 1, N_TOKENS, cu, SEED);
    if (st == MN_OK) st = case_define(&packed);
    if (st == MN_OK) st = case_fuse(&packed, at->context, 0, N_TOKENS, true);
    if (st == MN_OK) failures += compare_with_definition(&packed, at);
    for (int64_t i = 0; i < 6 && st == MN_OK; i++) {
        const int64_t n = i / 2;
        own.lone_packs = i % 2 == 0;
        if (!own.lone_packs && cu[n + 1] - cu[n] == 1) continue;
        st = case_fuse(&own, at->context, cu[n], cu[n + 1], true);
        if (st == MN_OK) failures += compare_sequence(&packed, &own, n, at);
    }
    if (st != MN_OK) failures += complain_of_status(name, at);
    case_destroy(&packed);
    case_destroy(&own);
    return failures;
}

static void packed_equals_separate(void **state) {
    (void)state;
    for_all_layers(check_packed);
}

/* ---- the state of a mixer -------------------------------------------------------------------- */

static void for_all_names(void (*check)(const char *name, const mn_mixer_info *info)) {
    for (int i = 0; i < 2 * mn_mixer_count(); i++) {
        mn_mixer_info info = *mn_mixer_row(i / 2);
        info.ccq = i % 2 == 1;
        char name[MN_MIXER_NAME];
        mn_mixer_full_name(name, &info);
        if (!info.ccq || mn_mixer_has_matrix(&info)) check(name, &info);
    }
}

static void take_steps(mn_mixer *m, const mixer_case *c, int64_t t0, int64_t t1, double *o) {
    for (int64_t t = t0; t < t1; t++) {
        const mn_token token = case_token(c, 0, t);
        assert_int_equal(mn_mixer_step(m, &token, o ? o + t * c->width : NULL, NULL), MN_OK);
    }
}

enum { SNAPSHOT_AT = 9, SNAPSHOT_END = 20 };

/* From the snapshot on, `m` answers what `want` holds, bit for bit. */
static void assert_goes_on(mn_mixer *m, const mixer_case *c, const double *want) {
    const int64_t count = (SNAPSHOT_END - SNAPSHOT_AT) * c->width;
    double *o = calloc((size_t)(SNAPSHOT_END * c->width), sizeof *o);
    assert_non_null(o);
    assert_int_equal(mn_mixer_tokens(m), SNAPSHOT_AT);
    take_steps(m, c, SNAPSHOT_AT, SNAPSHOT_END, o);
    assert_memory_equal(o + SNAPSHOT_AT * c->width, want + SNAPSHOT_AT * c->width,
                        (size_t)count * sizeof *o);
    free(o);
}

/* A snapshot cut short, damaged or of other sizes is refused and changes nothing. */
static void assert_refuses(mixer_case *c, const void *bytes, size_t size) {
    mn_mixer *m;
    c->config.size.V += 2;
    assert_int_equal(mn_mixer_create(&m, c->name, &c->config), MN_OK);
    assert_int_equal(mn_mixer_restore(m, bytes, size), MN_ERR_FORMAT);
    mn_mixer_destroy(m);
    c->config.size.V -= 2;
    assert_int_equal(mn_mixer_create(&m, c->name, &c->config), MN_OK);
    assert_int_equal(mn_mixer_restore(m, bytes, size - 1), MN_ERR_FORMAT);
    assert_int_equal(mn_mixer_restore(m, bytes, 3), MN_ERR_FORMAT);
    assert_int_equal(mn_mixer_tokens(m), 0);
    mn_mixer_destroy(m);
}

static void check_snapshot(const char *name, const mn_mixer_info *info) {
    mixer_case c;
    mn_mixer *m, *copy;
    assert_int_equal(case_create(&c, name, MN_F64, 1, N_TOKENS, NULL, SEED), MN_OK);
    assert_int_equal(mn_mixer_create(&m, name, &c.config), MN_OK);
    double *o = calloc((size_t)(SNAPSHOT_END * c.width), sizeof *o);
    const size_t empty = mn_mixer_snapshot_bytes(m);
    take_steps(m, &c, 0, SNAPSHOT_AT, o);
    const size_t size = mn_mixer_snapshot_bytes(m);
    assert_true(mn_mixer_has_cache(info) ? size > empty : size == empty);
    void *bytes = malloc(size);
    assert_true(bytes && o);
    mn_mixer_snapshot(bytes, m);
    assert_int_equal(mn_mixer_clone(&copy, m), MN_OK);
    take_steps(m, &c, SNAPSHOT_AT, SNAPSHOT_END, o);
    assert_goes_on(copy, &c, o);    // the original went on without it
    assert_int_equal(mn_mixer_restore(m, bytes, size), MN_OK);
    assert_goes_on(m, &c, o);
    mn_mixer_reset(m);              // forgets everything
    take_steps(m, &c, 0, SNAPSHOT_AT, NULL);
    assert_goes_on(m, &c, o);
    assert_refuses(&c, bytes, size);
    free(bytes);
    free(o);
    mn_mixer_destroy(m);
    mn_mixer_destroy(copy);
    case_destroy(&c);
}

static void snapshots_are_exact(void **state) {
    (void)state;
    for_all_names(check_snapshot);
}

/* Value of a formula such as "H K V + H 2K 2K + 1" at the sizes of `call`. */
static int64_t evaluate(const char *formula, const mn_call *call) {
    int64_t sum = 0, product = 1;
    bool ok = true;
    for (const char *at = formula;; at++) {
        if (*at == '+' || *at == '\0') {
            sum += product;
            product = 1;
        } else if (*at >= '1' && *at <= '9') {
            product *= *at - '0';
        } else if (*at != ' ') {
            product *= mn_axis_size(call, *at, &ok);
        }
        if (*at == '\0') return ok ? sum : -1;
    }
}

static void check_formula(const char *name, const mn_mixer_info *info) {
    mixer_case c;
    mn_mixer *m;
    char formula[MN_MIXER_FORMULA];
    assert_int_equal(case_create(&c, name, MN_F64, 1, N_TOKENS, NULL, SEED), MN_OK);
    assert_int_equal(mn_mixer_create(&m, name, &c.config), MN_OK);
    mn_mixer_state_formula(formula, info);
    c.config.size.L = 7;
    const int64_t count = evaluate(formula, &c.config.size);
    take_steps(m, &c, 0, 7, NULL);
    if (mn_mixer_state_floats(m) != count) {
        fail_msg("%s: %s is %lld, the state has %lld", name, formula, (long long)count,
                 (long long)mn_mixer_state_floats(m));
    }
    mn_mixer_destroy(m);
    case_destroy(&c);
}

static void state_has_the_size_of_its_formula(void **state) {
    (void)state;
    for_all_names(check_formula);
}

/* A read leaves the belief as it is and gives what a step would have read. */
static void check_read(const char *name, const mn_mixer_info *info) {
    mixer_case c;
    mn_mixer *m;
    assert_int_equal(case_create(&c, name, MN_F64, 1, N_TOKENS, NULL, SEED), MN_OK);
    assert_int_equal(mn_mixer_create(&m, name, &c.config), MN_OK);
    take_steps(m, &c, 0, 5, NULL);
    double *o = calloc((size_t)(4 * c.width), sizeof *o);
    assert_non_null(o);
    const bool sure = mn_mixer_has_variance(info);
    const mn_token token = case_token(&c, 0, 5);
    const size_t bytes = (size_t)c.width * sizeof *o;
    assert_int_equal(mn_mixer_step(m, &token, o, sure ? o + 2 * c.width : NULL), MN_OK);
    assert_int_equal(mn_mixer_read(m, &token, o + c.width, sure ? o + 3 * c.width : NULL), MN_OK);
    assert_memory_equal(o, o + c.width, bytes);
    assert_memory_equal(o + 2 * c.width, o + 3 * c.width, bytes);
    for (int64_t i = 0; sure && i < c.width; i++) assert_true(o[2 * c.width + i] > 0.0);
    assert_int_equal(mn_mixer_tokens(m), 6);
    if (!sure) assert_int_equal(mn_mixer_read(m, &token, o, o), MN_ERR_ARGUMENT);
    free(o);
    mn_mixer_destroy(m);
    case_destroy(&c);
}

static void reads_write_nothing(void **state) {
    (void)state;
    for_all_names(check_read);
}

/* ---- names and bad input --------------------------------------------------------------------- */

static void assert_message_holds(const char *piece) {
    if (!strstr(mn_last_error(), piece)) fail_msg("\"%s\" lacks \"%s\"", mn_last_error(), piece);
}

static void names_are_found(void **state) {
    (void)state;
    mn_mixer_info info;
    int n_rows = 0;
#define MIXER(name, transition, belief, read, op) n_rows++;
#include "layers/all.def"
    assert_int_equal(mn_mixer_count(), n_rows);
    assert_int_equal(mn_mixer_find(&info, "bayes+ccq"), MN_OK);
    assert_string_equal(info.name, "bayes");
    assert_true(info.ccq);
    assert_int_equal(mn_mixer_find(&info, "palimpsa"), MN_OK);
    assert_string_equal(info.name, "palimpsa_code");
    assert_false(info.ccq);
    assert_int_equal(mn_mixer_find(&info, "bayse"), MN_ERR_ARGUMENT);
    assert_message_holds("did you mean \"bayes\"");
    assert_int_equal(mn_mixer_find(&info, "manba2+ccq"), MN_ERR_ARGUMENT);
    assert_message_holds("mamba2");
    assert_int_equal(mn_mixer_find(&info, "gdn+cq"), MN_ERR_ARGUMENT);
    assert_message_holds("+ccq");
    assert_int_equal(mn_mixer_find(&info, "attention+ccq"), MN_ERR_ARGUMENT);
    assert_message_holds("no memory matrix");
    assert_int_equal(mn_mixer_find(&info, ""), MN_ERR_ARGUMENT);
    assert_int_equal(
        mn_mixer_find(&info, "nothing like any of them, and far too long to be a name"),
        MN_ERR_ARGUMENT);
}

/* The operator's own check of a call agrees with what the row takes. */
static void check_required(const char *name, const mn_mixer_info *info) {
    mixer_case c;
    mn_mixer *m;
    (void)info;
    assert_int_equal(case_create(&c, name, MN_F64, 1, N_TOKENS, NULL, SEED), MN_OK);
    assert_int_equal(mn_mixer_create(&m, name, &c.config), MN_OK);
    const mn_token whole = case_token(&c, 0, 0);
    for (int i = 0; i < c.sample.n_tensors; i++) {
        const mn_field *field = c.sample.tensors[i].field;
        if (field->role != MN_ROLE_IN) continue;
        mn_token token = whole;
        *mn_token_slot(&token, field->name) = NULL;
        assert_int_equal(mn_mixer_step(m, &token, NULL, NULL), MN_ERR_ARGUMENT);
        assert_message_holds(field->name);
    }
    assert_int_equal(mn_mixer_tokens(m), 0);
    mn_mixer_destroy(m);
    case_destroy(&c);
}

static void missing_inputs_are_named(void **state) {
    (void)state;
    for_all_names(check_required);
}

static void bad_input_is_refused(void **state) {
    (void)state;
    const double g[2] = { -0.1, 0.1 }, x[8] = { 0 }, half[2] = { 0.5, 0.5 };
    mn_mixer *m = NULL;
    mn_mixer_config config = { .size = { .H = 2, .K = 4, .V = 4 } };
    mn_token token = { .q = x, .k = x, .v = x, .g = g, .beta = half };
    assert_int_equal(mn_mixer_create(&m, "gdn", &config), MN_OK);
    assert_int_equal(mn_mixer_step(m, &token, NULL, NULL), MN_ERR_ARGUMENT);
    assert_message_holds("log decay");
    mn_mixer_destroy(m);
    config.size.K = 0;
    assert_int_equal(mn_mixer_create(&m, "gdn", &config), MN_ERR_ARGUMENT);
    assert_message_holds("K is 0");
    config.size.K = INT64_MAX / 2;
    assert_int_equal(mn_mixer_create(&m, "gdn", &config), MN_ERR_MEMORY);
    config.size.K = 4;
    config.size.J = 3;
    assert_int_equal(mn_mixer_create(&m, "attention", &config), MN_ERR_ARGUMENT);
    assert_message_holds("multiple");
    config.size.J = 0;
    config.size.K = 3;
    config.rope_kind = 1;
    assert_int_equal(mn_mixer_create(&m, "attention", &config), MN_ERR_ARGUMENT);
    assert_message_holds("even");
}

/* HyperMLP's mixing parameters end at P tokens. */
static void lag_parameters_end(void **state) {
    (void)state;
    mixer_case c;
    mn_mixer *m;
    assert_int_equal(case_create(&c, "hypermlp", MN_F64, 1, 12, NULL, SEED), MN_OK);
    assert_int_equal(mn_mixer_create(&m, "hypermlp", &c.config), MN_OK);
    for (int64_t t = 0; t < c.config.size.P; t++) {
        const mn_token token = case_token(&c, 0, t % 12);
        assert_int_equal(mn_mixer_step(m, &token, NULL, NULL), MN_OK);
    }
    const mn_token token = case_token(&c, 0, 0);
    assert_int_equal(mn_mixer_step(m, &token, NULL, NULL), MN_ERR_ARGUMENT);
    assert_message_holds("P = 17");
    assert_int_equal(mn_mixer_tokens(m), c.config.size.P);
    mn_mixer_destroy(m);
    case_destroy(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_found),
        cmocka_unit_test(missing_inputs_are_named),
        cmocka_unit_test(bad_input_is_refused),
        cmocka_unit_test(lag_parameters_end),
        cmocka_unit_test(state_has_the_size_of_its_formula),
        cmocka_unit_test(snapshots_are_exact),
        cmocka_unit_test(reads_write_nothing),
        cmocka_unit_test(operator_is_the_definition),
        cmocka_unit_test(steps_equal_the_scan),
        cmocka_unit_test(state_carries_across_cuts),
        cmocka_unit_test(options_mean_the_same),
        cmocka_unit_test(nothing_looks_ahead),
        cmocka_unit_test(packed_equals_separate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
