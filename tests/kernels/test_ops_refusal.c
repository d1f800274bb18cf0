/* test_ops_refusal.c - wrong calls are refused: a status other than MN_OK, a sentence that names
 * the operator and the argument, and no byte written. Goes through the public entry points. */
// labels: sanitize
#include "support/op_walk.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"

typedef mn_status (*entry_fn)(mn_context *context, const void *args);

static const struct {
    entry_fn forward, backward;
} entries[MN_OP_COUNT] = {
#define ENTRY(name) [MN_OP_##name] = { (entry_fn)mn_op_##name, (entry_fn)mn_op_##name##_backward },
    MN_OPS(ENTRY)
#undef ENTRY
};

/* Every byte of what would be computed is as allocation left it. Samples here are float32, whatever
 * dtype a test has put into the call. */
static bool untouched(const mn_sample *spoilt) {
    mn_sample s = *spoilt;
    ((mn_call *)s.args)->dtype = MN_F32;
    for (int i = 0; i < s.n_tensors; i++) {
        const unsigned char *bytes = op_memory(&s.tensors[i], OP_COMPUTED);
        const size_t size = (size_t)s.tensors[i].count * sizeof(float);
        for (size_t b = 0; bytes && b < size; b++) {
            if (bytes[b] != 0xFF) return false;
        }
    }
    return mn_sample_guards_intact(&s);
}

/* Both passes of a spoilt call; `word` must be in the message. */
static void refused(const mn_sample *s, mn_context *context, const char *what, const char *word) {
    const char *name = mn_op_describe(s->op)->name;
    for (int pass = MN_FORWARD; pass <= MN_BACKWARD; pass++) {
        const entry_fn run = pass == MN_FORWARD ? entries[s->op].forward : entries[s->op].backward;
        const mn_status st = run(context, s->args);
        const char *why = mn_last_error();
        CHECK(st != MN_OK, "%s pass %d: %s was accepted", name, pass, what);
        if (st == MN_OK || (pass == MN_BACKWARD && !op_has_backward(s->op))) continue;
        CHECK(strstr(why, name) && strstr(why, word), "%s: %s: message \"%s\" does not say %s",
              name, what, why, word);
        CHECK(untouched(s), "%s pass %d: %s was refused after something was written", name, pass,
              what);
    }
}

static op_case small_case(mn_op_id op, const int64_t *packing, int64_t n_seqs) {
    op_case forms[OP_MAX_FORMS];
    op_forms(op, forms);
    op_case c = forms[0];
    int count;
    mn_op_fields(op, &count);
    c.B = packing ? 1 : 2, c.T = 6;
    c.cu_seqlens = packing, c.n_seqs = n_seqs;
    static unsigned char probe[MN_MAX_ARGS_BYTES];
    if (mn_args_decay_slot(op, probe)) c.decay = MN_DECAY_CHANNEL;
    return c;
}

static void open_small(mn_sample *s, mn_op_id op) {
    const op_case c = small_case(op, NULL, 0);
    op_open(s, &c);
}

static mn_context *context_here(void) {
    return op_context("ref", 1);
}

/* ---- sizes ------------------------------------------------------------------------------------
 */

static bool uses_letter(const mn_sample *s, char letter) {
    for (int i = 0; i < s->n_tensors; i++) {
        if (s->tensors[i].data && strchr(s->tensors[i].axes, letter)) return true;
    }
    return false;
}

/* The R of Bayesian operators follows from K, whatever the call says. */
static bool is_derived(mn_op_id op, char letter) {
    return letter == 'R' && (op == MN_OP_riccati || op == MN_OP_bayes);
}

/* 0 asks for these to be derived, or means that nothing is there. */
static bool zero_is_fine(mn_op_id op, char letter) {
    const bool derived_keys = strchr("JL", letter) && op != MN_OP_hyper_layer;
    return letter == 'T' || is_derived(op, letter) || derived_keys;
}

static void sizes(mn_op_id op) {
    for (const char *letter = "BTHKVGJLQPRWDS"; *letter; letter++) {
        const char word[2] = { *letter == 'B' && !op_has_time(op) ? 'B' : *letter, '\0' };
        for (int64_t bad = -1; bad <= 0; bad++) {
            char what[32];
            mn_sample s;
            open_small(&s, op);
            const bool used = uses_letter(&s, *letter) || (*letter == 'B' && uses_letter(&s, '*'));
            snprintf(what, sizeof what, "%c = %" PRId64, *letter, bad);
            *mn_axis_slot((mn_call *)s.args, *letter) = bad;
            if (used && (bad < 0 || !zero_is_fine(op, *letter))) {
                refused(&s, context_here(), what, bad < 0 ? word : "");
            }
            mn_sample_free(&s);
        }
    }
}

/* Any two axes of one tensor being 2^40 each make more elements than there are numbers for. */
static void overflows(mn_op_id op) {
    mn_sample probe;
    open_small(&probe, op);
    for (int i = 0; i < probe.n_tensors; i++) {
        const char *axes = probe.tensors[i].axes;
        for (size_t a = 0; probe.tensors[i].data && axes[a]; a++) {
            for (size_t b = a + 1; axes[b]; b++) {
                mn_sample s;
                open_small(&s, op);
                int64_t *x = mn_axis_slot((mn_call *)s.args, axes[a]);
                int64_t *y = mn_axis_slot((mn_call *)s.args, axes[b]);
                if (x && y && x != y && !is_derived(op, axes[a]) && !is_derived(op, axes[b])) {
                    char what[32];
                    snprintf(what, sizeof what, "%c = %c = 2^40", axes[a], axes[b]);
                    *x = *y = (int64_t)1 << 40;
                    refused(&s, context_here(), what, "");
                }
                mn_sample_free(&s);
            }
        }
    }
    mn_sample_free(&probe);
}

/* ---- what is given ----------------------------------------------------------------------------
 */

static void missing_inputs(mn_op_id op) {
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; i < count; i++) {
        const bool needed = fields[i].role == MN_ROLE_IN || fields[i].role == MN_ROLE_RAW ||
                            strchr(fields[i].axes, '|');
        if (!needed) continue;
        mn_sample s;
        open_small(&s, op);
        ((mn_in *)(s.args + fields[i].offset))->data = NULL;
        refused(&s, context_here(), "a NULL input", fields[i].name);
        mn_sample_free(&s);
    }
}

static void nothing_at_all(mn_op_id op) {
    mn_sample s;
    open_small(&s, op);
    refused(&s, NULL, "no context", "context");
    CHECK(entries[op].forward(context_here(), NULL) == MN_ERR_ARGUMENT, "args NULL was accepted");
    CHECK(entries[op].backward(context_here(), NULL) == MN_ERR_ARGUMENT, "args NULL was accepted");
    mn_sample_free(&s);
}

/* Values that an input's law forbids, at its first and at its last entry. */
static void forbidden_values(mn_op_id op) {
    static const double decays[] = { NAN, 0.5, INFINITY, 1e-30 };
    mn_sample probe;
    open_small(&probe, op);
    const double V = (double)((mn_call *)probe.args)->V;
    const double classes[] = { NAN, V, -1.0, 0.5 };
    for (int i = 0; i < probe.n_tensors; i++) {
        const mn_law law = probe.tensors[i].field->law;
        const bool input = probe.tensors[i].field->role <= MN_ROLE_RAW;
        if (!input || (law != MN_LAW_DECAY && law != MN_LAW_CLASS)) continue;
        for (size_t k = 0; k < 2 * MN_COUNTOF(decays); k++) {
            const double bad = (law == MN_LAW_DECAY ? decays : classes)[k / 2];
            char what[64];
            mn_sample s;
            open_small(&s, op);
            mn_sample_tensor *t = &s.tensors[i];
            snprintf(what, sizeof what, "%s = %g", t->field->name, bad);
            mn_sample_set(&s, t->data, k % 2 ? t->count - 1 : 0, bad);
            refused(&s, context_here(), what, t->field->name);
            mn_sample_free(&s);
        }
    }
    mn_sample_free(&probe);
}

/* ---- enums ------------------------------------------------------------------------------------
 */

static void enums(mn_op_id op) {
    static const int dtypes[] = { -1, 99 }, decays[] = { -1, 4 };
    for (size_t k = 0; k < 2; k++) {
        mn_sample s;
        open_small(&s, op);
        ((mn_call *)s.args)->dtype = (mn_dtype)dtypes[k];
        refused(&s, context_here(), "a dtype that is none", "dtype");
        mn_sample_free(&s);
        open_small(&s, op);
        int *decay = mn_args_decay_slot(op, s.args);
        if (decay) *decay = decays[k];
        if (decay) refused(&s, context_here(), "a decay that is none", "decay");
        mn_sample_free(&s);
    }
    mn_sample s;
    open_small(&s, op);
    ((mn_call *)s.args)->dtype = MN_BF16;
    refused(&s, context_here(), "bf16 on the CPU", "bf16");
    mn_sample_free(&s);
}

static void choices(mn_op_id op) {
    int count;
    const mn_param *params = mn_op_params(op, &count);
    for (int i = 0; i < count; i++) {
        if (params[i].kind != MN_PARAM_CHOICE) continue;
        int n = 1;
        for (const char *at = params[i].choices; *at; at++) n += *at == ',';
        for (int k = 0; k < 2; k++) {
            mn_sample s;
            open_small(&s, op);
            *(int *)(s.args + params[i].offset) = k ? n : -1;
            refused(&s, context_here(), "a choice that is none", params[i].name);
            mn_sample_free(&s);
        }
    }
}

/* ---- packing ----------------------------------------------------------------------------------
 */

static void packings(mn_op_id op) {
    static const int64_t good[] = { 0, 2, 6 }, decreasing[] = { 0, 7, 6 }, late[] = { 1, 2, 6 };
    static const int64_t beyond[] = { 0, 2, 9 }, before[] = { 0, 2, 5 }, below[] = { 0, -2, 6 };
    static const int64_t *const bad[] = { decreasing, late, beyond, before, below };
    if (!op_has_time(op)) return;
    const op_case c = small_case(op, good, 2);
    for (size_t k = 0; k < MN_COUNTOF(bad) + 2; k++) {
        mn_sample s;
        op_open(&s, &c);
        mn_call *call = (mn_call *)s.args;
        if (k < MN_COUNTOF(bad)) call->cu_seqlens = bad[k];
        if (k == MN_COUNTOF(bad)) call->B = 2;
        if (k == MN_COUNTOF(bad) + 1) call->n_seqs = 0;
        refused(&s, context_here(), "packing that does not fit", "seq");
        mn_sample_free(&s);
    }
}

/* ---- views ------------------------------------------------------------------------------------
 */

static void strides(mn_op_id op) {
    mn_sample probe;
    open_small(&probe, op);
    for (int i = 0; i < probe.n_tensors; i++) {
        const char *axes = probe.tensors[i].axes;
        const bool may_be_strided = axes[0] == 'B' && axes[1] && strchr("TL", axes[1]);
        if (!probe.tensors[i].data) continue;
        mn_sample s;
        open_small(&s, op);
        mn_in *view = (mn_in *)(s.args + s.tensors[i].field->offset);
        view->stride[0] = may_be_strided ? -64 : 63;
        view->stride[1] = 7;
        refused(&s, context_here(), "a stride that cannot be", s.tensors[i].field->name);
        mn_sample_free(&s);
    }
    mn_sample_free(&probe);
}

/* ---- sizes that must fit each other ------------------------------------------------------------
 */

static void refused_after(mn_op_id op, void (*spoil)(void *args), const char *what,
                          const char *word) {
    mn_sample s;
    open_small(&s, op);
    spoil(s.args);
    refused(&s, context_here(), what, word);
    mn_sample_free(&s);
}

static void five_keys(void *args) {
    ((mn_call *)args)->L = 5;
}
static void three_heads_two_kept(void *args) {
    ((mn_call *)args)->H = 3, ((mn_call *)args)->J = 2;
}
static void odd_width(void *args) {
    ((mn_call *)args)->K = 3;
}
static void odd_attention(void *args) {
    ((mn_call *)args)->K = 3, ((mn_attention_args *)args)->rope_kind = 1;
}
static void one_branch_more(void *args) {
    ((mn_call *)args)->Q += 1;
}
static void short_block(void *args) {
    ((mn_call *)args)->P = 4;
}
static void negative_count(void *args) {
    ((mn_curvature_args *)args)->n0 = -1;
}
static void negative_count_read(void *args) {
    ((mn_ccq_read_args *)args)->n0 = -1;
}
static void no_groups(void *args) {
    ((mn_rms_norm_gated_args *)args)->groups = 0;
}
static void uneven_groups(void *args) {
    ((mn_rms_norm_gated_args *)args)->groups = 2;
}

static void fitting(mn_op_id op) {
    static const struct {
        mn_op_id op;
        void (*spoil)(void *args);
        const char *what, *word;
    } cases[] = {
        { MN_OP_attention, five_keys, "fewer keys than queries", "L" },
        { MN_OP_relu_attention, five_keys, "fewer keys than queries", "L" },
        { MN_OP_hyper, five_keys, "fewer keys than queries", "L" },
        { MN_OP_attention, three_heads_two_kept, "2 key heads for 3", "J" },
        { MN_OP_rope, odd_width, "an odd width", "K" },
        { MN_OP_attention, odd_attention, "an odd width with rope", "K" },
        { MN_OP_hyper, one_branch_more, "a branch too many", "Q" },
        { MN_OP_hyper, short_block, "fewer mixing parameters than lags", "P" },
        { MN_OP_curvature, negative_count, "a negative count", "n0" },
        { MN_OP_ccq_read, negative_count_read, "a negative count", "n0" },
        { MN_OP_rms_norm_gated, no_groups, "no groups", "groups" },
        { MN_OP_rms_norm_gated, uneven_groups, "uneven groups", "groups" },
    };
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        if (cases[i].op == op) refused_after(op, cases[i].spoil, cases[i].what, cases[i].word);
    }
}

/* ---- optional inputs in every combination ------------------------------------------------------
 */

/* Any set of optional inputs is either refused without a write or computed without a NaN. */
static void any_presence(mn_op_id op) {
    int count, bits[MN_MAX_FIELDS], n_bits = 0;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; i < count; i++) {
        if (fields[i].role == MN_ROLE_OPT && !strchr(fields[i].axes, '|')) bits[n_bits++] = i;
    }
    for (uint64_t set = 0; set < (uint64_t)1 << n_bits; set++) {
        op_case c = small_case(op, NULL, 0);
        mn_sample s;
        for (int k = 0; k < n_bits; k++) {
            if (!(set >> k & 1)) c.fields &= ~((uint64_t)1 << bits[k]);
        }
        op_open(&s, &c);
        const mn_status st = mn_op_run(context_here(), op, MN_FORWARD, s.args);
        if (st == MN_OK && op_has_backward(op)) op_run(context_here(), &s, MN_BACKWARD, &c);
        if (st != MN_OK) CHECK(untouched(&s), "%s: refused after a write", op_case_text(&c));
        for (int i = 0; st == MN_OK && i < s.n_tensors; i++) {
            const void *data = op_memory(&s.tensors[i], OP_COMPUTED);
            bool finite = true;
            for (int64_t at = 0; data && at < s.tensors[i].count; at++) {
                finite = finite && isfinite(mn_sample_get(&s, data, at));
            }
            CHECK(finite, "%s: %s is not finite", op_case_text(&c), s.tensors[i].field->name);
        }
        mn_sample_free(&s);
    }
}

/* ---- contexts ----------------------------------------------------------------------------------
 */

static void free_nothing(void *owner, void *memory) {
    (void)owner;
    (void)memory;
}

static void contexts(void) {
    mn_context *context = NULL;
    const mn_context_options no_target = { .n_threads = 1, .target = "mmx" };
    const mn_context_options few = { .n_threads = -1 }, many = { .n_threads = 100000 };
    CHECK(mn_context_create(&context, &no_target) == MN_ERR_ARGUMENT && !context &&
              strstr(mn_last_error(), "mmx"), "an unknown target was accepted");
    CHECK(mn_context_create(&context, &few) == MN_ERR_ARGUMENT && !context, "-1 threads");
    CHECK(mn_context_create(&context, &many) == MN_ERR_ARGUMENT && !context, "100000 threads");
    CHECK(mn_context_create(NULL, NULL) == MN_ERR_ARGUMENT, "nowhere to put the context");
    mn_context_destroy(NULL);
    const mn_context_options half = { .n_threads = 1, .release = free_nothing };
    CHECK(mn_context_create(&context, &half) == MN_ERR_ARGUMENT && !context, "release alone");
    CHECK(mn_context_use_stream(NULL, &context) == MN_ERR_ARGUMENT, "a stream of no context");
    CHECK(mn_context_use_stream(context_here(), &context) == MN_ERR_ARGUMENT &&
              strstr(mn_last_error(), "CPU"), "a stream of the CPU");
    mn_context_trim(NULL);
    mn_context_trim(context_here());    // later calls take memory anew
}

static void wrong_calls_are_refused(mn_op_id op) {
    mn_sample s;
    open_small(&s, op);
    const mn_status st = mn_op_run(context_here(), op, MN_FORWARD, s.args);
    mn_sample_free(&s);
    CHECK(st == MN_OK, "the sound call fails: %s", mn_last_error());
    contexts();
    sizes(op);
    overflows(op);
    missing_inputs(op);
    nothing_at_all(op);
    forbidden_values(op);
    enums(op);
    choices(op);
    packings(op);
    strides(op);
    fitting(op);
    any_presence(op);
}

int main(int argc, char **argv) {
    return op_visit("wrong calls are refused", wrong_calls_are_refused, argc, argv);
}
