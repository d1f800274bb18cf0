// labels: sanitize
/* test_sequence_moebius.c - KLA over a sequence that is cut over ranks: composed maps and the
 * pipeline, unequal and short parts, every vector target, against the float64 reference over the
 * whole sequence; and what stretches of tokens say of themselves.
 *
 * The tolerances are those of one call on one rank (support/op_error.h): a state that is rounded
 * once more where a rank begins lies within them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "ops/run.h"
#include "ranks/sequence.h"
#include "support/check.h"
#include "support/op_error.h"
#include "support/ranks.h"

enum { MOST = 4, KEPT = 8 };

typedef struct job {
    op_case c;
    const char *target;
    mn_sequence_states states;
    int64_t cut[MOST + 1];     // rank r has tokens [cut[r], cut[r + 1])
    mn_sample given, want;     // in the type of the case, in float64
    op_tolerances tolerances;
} job;

/* ---- memory that lasts ----------------------------------------------------------------------- */

typedef struct owner {
    void *kept[KEPT];
    int n;
} owner;

static void *keep(void *context, size_t bytes, bool plan) {
    (void)plan;
    owner *o = context;
    return o->n < KEPT ? o->kept[o->n++] = malloc(bytes) : NULL;
}

/* ---- a rank ---------------------------------------------------------------------------------- */

static void open_part(mn_sample *part, const job *j, int rank) {
    op_case c = j->c;
    c.T = j->cut[rank + 1] - j->cut[rank];
    op_allocate(part, &c);
    op_copy_shared(part, &j->given, OP_GIVEN);
    op_copy_states(part, 0, &j->given, 0, c.B, OP_GIVEN);
    op_copy_tokens(part, 0, &j->given, j->cut[rank], c.T, OP_GIVEN);
}

/* Results and gradients of a part, to or from rank 0. */
static mn_status carry(mn_comm *comm, mn_sample *part, int peer, bool send) {
    const mn_dtype dtype = ((const mn_call *)part->args)->dtype;
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < part->n_tensors; i++) {
        const mn_sample_tensor *t = &part->tensors[i];
        void *data = op_memory(t, OP_COMPUTED);
        const size_t bytes = data ? (size_t)t->count * mn_dtype_bytes(dtype) : 0;
        if (send) st = mn_comm_send(comm, peer, data, bytes);
        else st = mn_comm_receive(comm, peer, data, bytes);
    }
    return st;
}

/* Puts a part into the whole: tokens, final states of the last, gradients of initial states of the
 * first, and the sum of gradients that all tokens share. */
static void join(mn_sample *whole, mn_sample *part, const job *j, int rank, int world) {
    op_copy_tokens(whole, j->cut[rank], part, 0, j->cut[rank + 1] - j->cut[rank], OP_COMPUTED);
    for (int i = 0; i < part->n_tensors; i++) {
        const mn_sample_tensor *t = &part->tensors[i];
        void *to = op_memory(&whole->tensors[i], OP_COMPUTED), *from = op_memory(t, OP_COMPUTED);
        op_tokens tokens;
        if (!to || !from || op_token_layout(&tokens, part, t)) continue;
        const bool state = t->axes[0] == 'N', input = t->field->role <= MN_ROLE_OPT;
        if (state && rank != (input ? 0 : world - 1)) continue;
        for (int64_t k = 0; k < t->count; k++) {
            const double before = state || rank == 0 ? 0.0 : mn_sample_get(whole, to, k);
            mn_sample_set(whole, to, k, before + mn_sample_get(part, from, k));
        }
    }
}

static int judge(mn_comm *comm, job *j, mn_sample *own, int world) {
    mn_sample whole;
    op_allocate(&whole, &j->c);
    join(&whole, own, j, 0, world);
    for (int r = 1; r < world; r++) {
        mn_sample part;
        open_part(&part, j, r);
        if (carry(comm, &part, r, false) != MN_OK) return 5;
        join(&whole, &part, j, r, world);
        mn_sample_free(&part);
    }
    const bool same = op_agrees(&whole, &j->want, &j->tolerances);
    if (!same) op_compare(j->target, &whole, &j->want, &j->tolerances, &j->c);
    mn_sample_free(&whole);
    return same ? 0 : 6;
}

static int run_part(mn_comm *comm, void *context) {
    job *j = context;
    const int world = mn_comm_world(comm), rank = mn_comm_rank(comm);
    const mn_context_options how = { .n_threads = 1, .target = j->target };
    mn_context *ops;
    owner own = { .n = 0 };
    mn_sample part;
    open_part(&part, j, rank);
    if (mn_context_create(&ops, &how) != MN_OK) return 2;
    const mn_sequence s = { .comm = comm, .context = ops, .states = j->states, .keep = keep,
                            .owner = &own };
    mn_status st = mn_sequence_forward(&s, j->c.op, part.args, false);
    if (st == MN_OK) st = mn_sequence_backward(&s, j->c.op, part.args, false);
    if (st != MN_OK) {
        fprintf(stderr, "%s: %s\n", op_case_text(&j->c), mn_last_error());
        return 3;
    }
    int code = mn_sample_guards_intact(&part) ? 0 : 4;
    if (code == 0) code = rank == 0 ? judge(comm, j, &part, world)
                                    : carry(comm, &part, 0, true) == MN_OK ? 0 : 5;
    for (int i = 0; i < own.n; i++) free(own.kept[i]);
    mn_sample_free(&part);
    mn_context_destroy(ops);
    return code;
}

/* ---- cases ----------------------------------------------------------------------------------- */

/* Changes drawn inputs of a whole sequence of T tokens. */
typedef void spoil_fn(mn_sample *s);

static void fill(mn_sample *s, const char *name, double x) {
    mn_sample_tensor *t = mn_sample_find(s, name);
    for (int64_t i = 0; t->data && i < t->count; i++) mn_sample_set(s, t->data, i, x);
}

/* No process noise and nothing forgotten: precisions grow without bound, maps do not fade. */
static void remember_all(mn_sample *s) {
    fill(s, "a", 1.0);
    fill(s, "p", 0.0);
}

/* A token without a projective form, on the last rank but one or the last. */
static void one_negative(mn_sample *s) {
    mn_sample_tensor *t = mn_sample_find(s, "prec");
    mn_sample_set(s, t->data, t->count * 3 / 4, -0.01);
}

/* Flat priors: precisions of zero, below the floor until a token writes. */
static void flat(mn_sample *s) {
    fill(s, "lam0", 0.0);
}

static void check_ranks(const op_case *form, const int64_t *cut, int world,
                        mn_sequence_states states, spoil_fn *spoil) {
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    job j = { .c = *form, .states = states };
    int codes[16];
    memcpy(j.cut, cut, ((size_t)world + 1) * sizeof *cut);
    j.c.T = cut[world];
    mn_sample drawn;
    j.c.dtype = MN_F32;
    op_open(&drawn, &j.c);
    if (spoil) spoil(&drawn);
    j.c.dtype = MN_F64;
    op_open(&j.want, &j.c);
    op_convert(&j.want, &drawn);
    op_measure(&j.tolerances, &j.want, &j.c);
    for (int i = 0; i < n_targets; i++) {
        j.c.dtype = targets[i].dtype;
        j.target = targets[i].name;
        op_open(&j.given, &j.c);
        op_convert(&j.given, &j.want);
        run_ranks(run_part, &j, world, codes);
        for (int r = 0; r < world; r++) {
            CHECK(codes[r] == 0, "%s, %s: rank %d of %d ends with %d", op_case_text(&j.c),
                  targets[i].name, r, world, codes[r]);
        }
        mn_sample_free(&j.given);
    }
    mn_sample_free(&drawn);
    mn_sample_free(&j.want);
}

static op_case sized(op_case c, int64_t B, int64_t V, int64_t K) {
    c.B = B;
    c.V = V;
    c.K = K;
    c.seed = 23;
    return c;
}

/* Parts of one token, of less than a block, of a block and one, and of many. */
static const int64_t cuts[][MOST + 1] = { { 0, 90 }, { 0, 1, 100 }, { 0, 64, 97 },
                                          { 0, 31, 32, 131 }, { 0, 33, 65, 70, 71 } };
static const int worlds[] = { 1, 2, 2, 3, 4 };

static void every_form_is_that_of_one_rank(void **state) {
    (void)state;
    op_case forms[OP_MAX_FORMS];
    const int n = op_forms(MN_OP_moebius, forms);
    for (int f = 0; f < n; f++) {
        for (size_t i = 0; i < MN_COUNTOF(cuts); i++) {
            const op_case c = sized(forms[f], 2, 19, 3);
            check_ranks(&c, cuts[i], worlds[i], MN_SEQUENCE_MAPS, NULL);
        }
        const op_case c = sized(forms[f], 2, 19, 3);
        check_ranks(&c, cuts[4], worlds[4], MN_SEQUENCE_PIPELINE, NULL);
    }
    check_done();
}

static void long_and_harsh_sequences(void **state) {
    (void)state;
    static const int64_t long_cut[] = { 0, 700, 1500, 2200 };
    op_case forms[OP_MAX_FORMS];
    const int n = op_forms(MN_OP_moebius, forms);
    spoil_fn *const spoils[] = { NULL, remember_all, one_negative };
    for (size_t i = 0; i < MN_COUNTOF(spoils); i++) {
        const op_case c = sized(forms[0], 1, 35, 4);
        check_ranks(&c, long_cut, 3, MN_SEQUENCE_MAPS, spoils[i]);
    }
    for (int f = 0; f < n; f++) {    // a form with an initial state
        const op_case c = sized(forms[f], 1, 9, 4);
        mn_sample probe;
        op_case small = c;
        small.dtype = MN_F64;
        small.T = 4;
        op_open(&probe, &small);
        const bool has = mn_sample_find(&probe, "lam0")->data != NULL;
        mn_sample_free(&probe);
        if (!has) continue;
        check_ranks(&c, cuts[4], worlds[4], MN_SEQUENCE_MAPS, flat);
        break;
    }
    check_done();
}

/* ---- stretches of tokens --------------------------------------------------------------------- */

/* Whether the kernel says of `bad` (a channel) and no other that it has no map, or no adjoint. */
static void check_marks(const op_target *target, mn_span_id id, spoil_fn *spoil, bool all_good) {
    op_case forms[OP_MAX_FORMS];
    op_forms(MN_OP_moebius, forms);
    op_case c = sized(forms[0], 1, 5, 3);
    c.T = 40;
    c.dtype = target->dtype;
    mn_sample s;
    op_open(&s, &c);
    if (spoil) spoil(&s);
    const int entries = id == MN_SPAN_moebius_map ? MN_MAP_ENTRIES : MN_ADJOINT_ENTRIES;
    unsigned char good[5] = { 0 };
    void *out = calloc((size_t)(entries * 5 * 3), sizeof(double));
    mn_moebius_span_args args = { .out = out, .good = good };
    memcpy(&args.op, s.args, sizeof args.op);
    assert_non_null(out);
    assert_int_equal(mn_op_run_span(op_context(target->name, 1), id, &args), MN_OK);
    bool all = true;
    for (int i = 0; i < 5; i++) all = all && good[i];
    CHECK(all == all_good, "%s: span %d of %s tokens", target->name, (int)id,
          all_good ? "common" : "spoilt");
    free(out);
    mn_sample_free(&s);
}

static void nothing(mn_sample *s) {
    (void)s;
}

static void not_a_number(mn_sample *s) {
    mn_sample_tensor *t = mn_sample_find(s, "prec");
    mn_sample_set(s, t->data, t->count / 2, NAN);
}

static void stretches_say_where_they_have_no_map(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        for (int id = 0; id < MN_SPAN_COUNT; id++) {
            check_marks(&targets[i], (mn_span_id)id, nothing, true);
            check_marks(&targets[i], (mn_span_id)id, one_negative, false);
            check_marks(&targets[i], (mn_span_id)id, not_a_number, false);
        }
        check_marks(&targets[i], MN_SPAN_moebius_adjoint, flat, false);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_form_is_that_of_one_rank),
        cmocka_unit_test(long_and_harsh_sequences),
        cmocka_unit_test(stretches_say_where_they_have_no_map),
    };
    return cmocka_run_group_tests_name("moebius over ranks", tests, NULL, NULL);
}
