// labels: sanitize
/* test_sequence.c - every operator with a state or keys over a sequence that is cut over 2, 3
 * and 4 ranks, and over rows of packed sequences that are, forward and backward, held to one call
 * over the whole.
 *
 * In float64, where the two orders of sums differ by roundings only: within 1e-9 of the largest
 * number of a tensor, beside which the roundings of sums over 12 tokens are 1e-14; operators that
 * solve by iteration (mesa) stop at residuals below that too. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "ops/run.h"
#include "ranks/sequence.h"
#include "support/check.h"
#include "support/op_case.h"
#include "support/ranks.h"

enum { TOKENS = 12, KEPT = 16 };

typedef struct job {
    op_case c;
    mn_sequence_states states;
    mn_sample whole;
} job;

/* Two rows: sequences that go through a rank, that end where a rank does, and that begin there. */
enum { ROWS = 2, PACKED = 6 };
static const int64_t packed[PACKED + 1] = { 0, 1, 11, 12, 18, 20, 24 };

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

/* ---- comparing ------------------------------------------------------------------------------- */

static double largest(const mn_sample *s, const void *data, int64_t count) {
    double most = 0.0;
    for (int64_t i = 0; i < count; i++) most = fmax(most, fabs(mn_sample_get(s, data, i)));
    return most;
}

static bool close_to(const job *j, const mn_sample_tensor *t, const void *whole, int64_t at,
                     double got, const char *what) {
    const double want = mn_sample_get(&j->whole, whole, at);
    const double most = largest(&j->whole, whole, t->count);
    if (fabs(got - want) <= 1e-9 * (most + 1e-3)) return true;
    fprintf(stderr, "%s: %s %s[%lld] is %.12g, in one piece %.12g\n", op_case_text(&j->c), what,
            t->field->name, (long long)at, got, want);
    return false;
}

/* Tokens [t0, t0 + T) of a tensor. */
static bool same_tokens(const job *j, const mn_sample *part, int i, int64_t t0) {
    const mn_sample_tensor *w = &j->whole.tensors[i], *p = &part->tensors[i];
    const void *whole = op_memory(w, OP_COMPUTED), *got = op_memory(p, OP_COMPUTED);
    op_tokens a, b;
    if (!whole || !got || !op_token_layout(&a, &j->whole, w) || !op_token_layout(&b, part, p)) {
        return true;
    }
    for (int64_t o = 0; o < b.outer; o++) {
        for (int64_t k = 0; k < b.length * b.inner; k++) {
            const int64_t at = (o * a.length + t0) * a.inner + k;
            const double x = mn_sample_get(part, got, o * b.length * b.inner + k);
            if (!close_to(j, w, whole, at, x, "token of")) return false;
        }
    }
    return true;
}

/* Final states on the last rank, gradients of initial ones on the first. */
static bool same_states(const job *j, mn_sample *part, int i, int rank, int world) {
    const mn_sample_tensor *w = &j->whole.tensors[i], *p = &part->tensors[i];
    if (w->axes[0] != 'N') return true;
    const bool input = w->field->role == MN_ROLE_OPT;
    if (rank != (input ? 0 : world - 1)) return true;
    const void *whole = op_memory(w, OP_COMPUTED), *got = op_memory(p, OP_COMPUTED);
    for (int64_t k = 0; whole && got && k < w->count; k++) {
        if (!close_to(j, w, whole, k, mn_sample_get(part, got, k), "state")) return false;
    }
    return true;
}

/* Gradients of weights: the sum over ranks. */
static bool same_shared(const job *j, mn_sample *part, int i, mn_comm *comm) {
    const mn_sample_tensor *w = &j->whole.tensors[i], *p = &part->tensors[i];
    op_tokens tokens;
    if (w->field->role > MN_ROLE_OPT || w->axes[0] == 'N' || !w->partner ||
        op_token_layout(&tokens, &j->whole, w)) {
        return true;
    }
    const size_t bytes = (size_t)p->count * sizeof(double);
    double *all = malloc((size_t)mn_comm_world(comm) * bytes);
    bool same = all && mn_comm_all_gather(comm, all, p->partner, bytes) == MN_OK;
    for (int64_t k = 0; same && k < p->count; k++) {
        double sum = 0.0;
        for (int r = 0; r < mn_comm_world(comm); r++) sum += all[r * p->count + k];
        same = close_to(j, w, w->partner, k, sum, "gradient of");
    }
    free(all);
    return same;
}

/* ---- a rank ---------------------------------------------------------------------------------- */

static int run_part(mn_comm *comm, void *context) {
    job *j = context;
    const int world = mn_comm_world(comm), rank = mn_comm_rank(comm);
    const int64_t T = TOKENS / world;
    op_case c = j->c;
    mn_sample part;
    mn_context *ops;
    owner own = { .n = 0 };
    c.T = T;
    op_allocate(&part, &c);
    op_copy_shared(&part, &j->whole, OP_GIVEN);
    op_copy_states(&part, 0, &j->whole, 0, c.B, OP_GIVEN);
    op_copy_tokens(&part, 0, &j->whole, rank * T, T, OP_GIVEN);
    if (mn_context_create(&ops, &(mn_context_options){ .n_threads = 1 }) != MN_OK) return 2;
    const mn_sequence s = { .comm = comm, .context = ops, .states = j->states, .keep = keep,
                            .owner = &own };
    mn_status st = mn_sequence_forward(&s, c.op, part.args, false);
    if (st == MN_OK && !mn_op_traits_of(c.op)->forward_only) {
        st = mn_sequence_backward(&s, c.op, part.args, false);
    }
    if (st != MN_OK) {
        fprintf(stderr, "%s: %s\n", op_case_text(&c), mn_last_error());
        return 3;
    }
    if (op_is_keyed(c.op)) ((mn_call *)part.args)->L = T;    // of the rank's own keys again
    bool same = mn_sample_guards_intact(&part);
    for (int i = 0; i < part.n_tensors; i++) {
        same = same_tokens(j, &part, i, rank * T) && same;
        same = same_states(j, &part, i, rank, world) && same;
        same = same_shared(j, &part, i, comm) && same;
    }
    for (int i = 0; i < own.n; i++) free(own.kept[i]);
    mn_sample_free(&part);
    mn_context_destroy(ops);
    return same ? 0 : 4;
}

/* ---- a rank of packed rows ------------------------------------------------------------------- */

/* What a rank has: its sequences, and which of the whole they are parts of. */
typedef struct cut {
    int64_t n, starts[PACKED + ROWS + 1], of[PACKED + ROWS], length;
    int64_t before[5 * ROWS];
} cut;

static void cut_rows(cut *out, int rank, int world) {
    *out = (cut){ .length = TOKENS / world };
    for (int b = 0; b < ROWS; b++) {
        for (int r = 0; r <= world; r++) {
            const int64_t at = b * TOKENS + r * out->length;
            int64_t begins = 0;
            for (int s = 0; s < PACKED; s++) begins = packed[s] <= at ? packed[s] : begins;
            out->before[r * ROWS + b] = r < world ? at - begins : 0;
        }
        const int64_t first = b * TOKENS + rank * out->length, end = first + out->length;
        for (int s = 0; s < PACKED; s++) {
            if (packed[s + 1] <= first || packed[s] >= end) continue;
            out->of[out->n] = s;
            out->starts[out->n++] = b * out->length + mn_max(packed[s] - first, 0);
        }
    }
    out->starts[out->n] = ROWS * out->length;
}

/* Whether sequence i of the rank begins here, or ends. */
static bool has_end(const cut *k, int rank, int64_t i, bool last) {
    const int64_t b = packed[k->of[i]] / TOKENS, first = b * TOKENS + rank * k->length;
    return last ? packed[k->of[i] + 1] <= first + k->length : packed[k->of[i]] >= first;
}

static bool same_packed_tokens(const job *j, const mn_sample *part, int i, const cut *k, int rank) {
    const mn_sample_tensor *w = &j->whole.tensors[i], *p = &part->tensors[i];
    const void *whole = op_memory(w, OP_COMPUTED), *got = op_memory(p, OP_COMPUTED);
    op_tokens a, b;
    if (!whole || !got || !op_token_layout(&a, &j->whole, w) || !op_token_layout(&b, part, p)) {
        return true;
    }
    for (int64_t o = 0; o < b.outer; o++) {
        for (int64_t x = 0; x < b.length * b.inner; x++) {
            const int64_t t = x / b.inner, row = t / k->length;
            const int64_t from = row * TOKENS + rank * k->length + t % k->length;
            const int64_t at = (o * a.length + from) * a.inner + x % b.inner;
            const double number = mn_sample_get(part, got, o * b.length * b.inner + x);
            if (!close_to(j, w, whole, at, number, "packed token of")) return false;
        }
    }
    return true;
}

/* Final states of sequences that end here, gradients of initial states of those that begin here,
 * and none of others. */
static bool same_packed_states(const job *j, const mn_sample *part, int i, const cut *k, int rank) {
    const mn_sample_tensor *w = &j->whole.tensors[i], *p = &part->tensors[i];
    const void *whole = op_memory(w, OP_COMPUTED), *got = op_memory(p, OP_COMPUTED);
    if (w->axes[0] != 'N' || !whole || !got) return true;
    const bool input = w->field->role == MN_ROLE_OPT;
    const int64_t each = w->count / PACKED;
    for (int64_t s = 0; s < k->n; s++) {
        for (int64_t x = 0; x < each; x++) {
            const double number = mn_sample_get(part, got, s * each + x);
            const int64_t at = k->of[s] * each + x;
            if (has_end(k, rank, s, !input)) {
                if (!close_to(j, w, whole, at, number, "packed state")) return false;
            } else if (input && number != 0.0) {
                fprintf(stderr, "%s: a gradient of %s is another rank's\n", op_case_text(&j->c),
                        w->field->name);
                return false;
            }
        }
    }
    return true;
}

static int run_packed_part(mn_comm *comm, void *context) {
    job *j = context;
    const int world = mn_comm_world(comm), rank = mn_comm_rank(comm);
    op_case c = j->c;
    cut k;
    mn_sample part;
    mn_context *ops;
    owner own = { .n = 0 };
    cut_rows(&k, rank, world);
    c.T = ROWS * k.length;
    c.cu_seqlens = k.starts;
    c.n_seqs = k.n;
    op_allocate(&part, &c);
    op_copy_shared(&part, &j->whole, OP_GIVEN);
    for (int b = 0; b < ROWS; b++) {
        op_copy_tokens(&part, b * k.length, &j->whole, b * TOKENS + rank * k.length, k.length,
                       OP_GIVEN);
    }
    for (int64_t s = 0; s < k.n; s++) op_copy_states(&part, s, &j->whole, k.of[s], 1, OP_GIVEN);
    if (mn_context_create(&ops, &(mn_context_options){ .n_threads = 1 }) != MN_OK) return 2;
    const mn_sequence s = { .comm = comm, .context = ops, .states = j->states, .keep = keep,
                            .owner = &own, .rows = ROWS, .before = k.before };
    mn_status st = mn_sequence_forward(&s, c.op, part.args, false);
    if (st == MN_OK && !mn_op_traits_of(c.op)->forward_only) {
        st = mn_sequence_backward(&s, c.op, part.args, false);
    }
    if (st != MN_OK) {
        fprintf(stderr, "%s: %s\n", op_case_text(&c), mn_last_error());
        return 3;
    }
    bool same = mn_sample_guards_intact(&part);
    for (int i = 0; i < part.n_tensors; i++) {
        same = same_packed_tokens(j, &part, i, &k, rank) && same;
        same = same_packed_states(j, &part, i, &k, rank) && same;
        same = same_shared(j, &part, i, comm) && same;
    }
    for (int i = 0; i < own.n; i++) free(own.kept[i]);
    mn_sample_free(&part);
    mn_context_destroy(ops);
    return same ? 0 : 4;
}

/* ---- all operators --------------------------------------------------------------------------- */

/* hyper_layer has a convolution and keys inside and no way to hand them in. */
static bool is_cut(mn_op_id op) {
    return op_has_time(op) && (op_has_state(op) || op_is_keyed(op)) && op != MN_OP_hyper_layer;
}

static void check_form(const op_case *form, mn_context *context, bool packs) {
    job j = { .c = *form };
    int codes[16];
    j.c.dtype = MN_F64;
    j.c.B = packs ? 1 : 2;
    j.c.T = packs ? ROWS * TOKENS : TOKENS;
    j.c.cu_seqlens = packs ? packed : NULL;
    j.c.n_seqs = packs ? PACKED : 0;
    j.c.block = op_is_keyed(form->op) ? TOKENS + 3 : 0;
    j.c.seed = 11;
    op_open(&j.whole, &j.c);
    if (mn_op_run(context, j.c.op, MN_FORWARD, j.whole.args) != MN_OK ||
        (!mn_op_traits_of(j.c.op)->forward_only &&
         mn_op_run(context, j.c.op, MN_BACKWARD, j.whole.args) != MN_OK)) {
        check_fatal("%s: %s", op_case_text(&j.c), mn_last_error());
    }
    for (int world = 2; world <= 4; world++) {
        j.states = world == 3 ? MN_SEQUENCE_PIPELINE : MN_SEQUENCE_MAPS;
        run_ranks(packs ? run_packed_part : run_part, &j, world, codes);
        for (int r = 0; r < world; r++) {
            CHECK(codes[r] == 0, "%s: rank %d of %d ends with %d", op_case_text(&j.c), r, world,
                  codes[r]);
        }
    }
    mn_sample_free(&j.whole);
}

static void check_all(bool packs) {
    mn_context *context;
    int n_ops = 0;
    assert_int_equal(mn_context_create(&context, &(mn_context_options){ .n_threads = 1 }), MN_OK);
    for (int op = 0; op < MN_OP_COUNT; op++) {
        op_case forms[OP_MAX_FORMS];
        if (!is_cut((mn_op_id)op)) continue;
        const int n = op_forms((mn_op_id)op, forms);
        for (int i = 0; i < n; i++) check_form(&forms[i], context, packs);
        n_ops++;
    }
    mn_context_destroy(context);
    assert_true(n_ops >= 18);
    check_done();
}

static void cut_sequences_are_whole_ones(void **state) {
    (void)state;
    check_all(false);
}

static void cut_packed_sequences_are_whole_ones(void **state) {
    (void)state;
    check_all(true);
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(cut_sequences_are_whole_ones),
                                        cmocka_unit_test(cut_packed_sequences_are_whole_ones) };
    return cmocka_run_group_tests_name("sequences over ranks", tests, NULL, NULL);
}
