/* test_ops_stability.c - 65,536 tokens that no model should see: everything stays finite,
 * precisions and variances keep their sign, and work space stays far below that of storing every
 * state.
 *
 * Operators with a state are run forward and backward on every target, with decays next to one,
 * next to zero and in turns; the same key again and again, keys of zero; gates at their ends;
 * noise, precisions and ridges over twelve decades. */
#include "support/op_walk.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"

enum { LENGTH = 65536 };

typedef enum harshness {
    NO_DECAY,           // log decays of -1e-7, random keys
    FULL_DECAY,         // down to exp(-1e4) = 0
    TURNS,              // one after the other
    SAME_KEY,           // the state is written along one direction for ever
    ZERO_KEYS,          // every other key is zero, and so are the first thousand
    DECADES,            // noises, precisions and ridges from 1e-6 to 1e6
    N_HARSH
} harshness;

static const char *const names[N_HARSH] = { "no decay",  "full decay", "decay in turns",
                                            "same key",  "zero keys",  "twelve decades" };

static double harsh_decay(harshness how, int64_t token, double u) {
    static const double full[] = { -40.0, -1e4, -1.0, -300.0 };
    if (how == NO_DECAY) return -1e-7;
    if (how == FULL_DECAY) return full[token % 4];
    if (how == TURNS) return token % 3 == 0 ? -60.0 * u : -1e-6 * u;
    return -0.01 * u;
}

/* A number over twelve decades, or near the usual one. */
static double harsh_scale(harshness how, double usual, double u) {
    return how == DECADES ? usual * pow(10.0, 12.0 * u - 6.0) : usual * (0.5 + u);
}

static double harsh_gate(harshness how, double u) {
    if (how == DECADES) return u < 0.3 ? 0.0 : u > 0.7 ? 1.0 : u;
    return 0.05 + 0.9 * u;
}

static bool is_key(const mn_field *field) {
    return strcmp(field->name, "k") == 0 || strcmp(field->name, "e") == 0;
}

static bool is_gate_input(const mn_field *field) {
    return strcmp(field->name, "ipre") == 0 || strcmp(field->name, "fpre") == 0;
}

/* Copies row 0 over the others, or clears rows. */
static void harsh_keys(const mn_sample *s, const mn_sample_tensor *t, harshness how) {
    op_tokens tokens;
    if (!is_key(t->field) || !op_token_layout(&tokens, s, t)) return;
    for (int64_t row = 0; row < tokens.length; row++) {
        for (int64_t i = 0; i < tokens.inner; i++) {
            const int64_t at = row * tokens.inner + i;
            if (how == SAME_KEY) mn_sample_set(s, t->data, at, mn_sample_get(s, t->data, i));
            if (how == ZERO_KEYS && (row < 1000 || row % 2)) mn_sample_set(s, t->data, at, 0.0);
        }
    }
}

/* dplr with independent a and b is no contraction either: with b = -u a, u between 0 and 1, as
 * RWKV-7 has it, it is one, but for the decay, which it reads ahead of. */
static void harsh_pairs(const mn_sample *s, harshness how, uint64_t seed) {
    if (s->op != MN_OP_dplr) return;
    const mn_sample_tensor *a = mn_sample_find((mn_sample *)s, "a");
    const mn_sample_tensor *b = mn_sample_find((mn_sample *)s, "b");
    const int64_t K = ((const mn_call *)s->args)->K;
    for (int64_t at = 0; at < b->count; at++) {
        const double u = mn_rng_uniform(seed, 4000, (uint64_t)(at / K));
        mn_sample_set(s, b->data, at, -harsh_gate(how, u) * mn_sample_get(s, a->data, at));
    }
}

static void draw_harsh(mn_sample *s, harshness how, uint64_t seed) {
    for (int i = 0; i < s->n_tensors; i++) {
        mn_sample_tensor *t = &s->tensors[i];
        op_tokens tokens = { 1, 1, 1 };
        const mn_law law = t->field->law;
        const bool random = law != MN_LAW_NORMAL && law != MN_LAW_UNIT && law != MN_LAW_COVARIANCE;
        const bool gates = is_gate_input(t->field), steps = strcmp(t->field->name, "dt_bias") == 0;
        if (t->field->role > MN_ROLE_OPT || !t->data) continue;
        op_token_layout(&tokens, s, t);
        for (int64_t at = 0; at < t->count; at++) {
            const double u = random ? mn_rng_uniform(seed, 3000 + (uint64_t)i, (uint64_t)at) : 0.5;
            double x = mn_sample_get(s, t->data, at);
            switch (law) {
            case MN_LAW_DECAY: x = harsh_decay(how, at / tokens.inner, u); break;
            case MN_LAW_GATE: x = harsh_gate(how, u); break;
            case MN_LAW_POSITIVE: x = harsh_scale(how, 1.0, u); break;
            case MN_LAW_NOISE: x = harsh_scale(how, 0.1, u); break;
            case MN_LAW_MEMORY: x = 1.0 + harsh_scale(how, 16.0, u); break;
            default: x *= how == DECADES && gates ? 10.0 : 1.0;
            }
            /* The steps of a scan count forwards; backwards its decay is growth. */
            if (steps) x = fabs(x);
            mn_sample_set(s, t->data, at, x);
        }
        harsh_keys(s, t, how);
    }
    harsh_pairs(s, how, seed);
}

/* -1: any sign; 0: not below zero; 1: above zero */
static int sign_of(const mn_field *field) {
    if (field->role < MN_ROLE_OUT) return -1;
    if (strcmp(field->name, "lam") == 0 || strcmp(field->name, "imp") == 0) return 1;
    static const char *const not_below[] = { "ovar", "yvar", "kvar", "qvar", "gain" };
    for (size_t i = 0; i < MN_COUNTOF(not_below); i++) {
        if (strcmp(field->name, not_below[i]) == 0) return 0;
    }
    return -1;
}

static void check_sane(const char *target, const mn_sample *s, harshness how, const op_case *c) {
    for (int i = 0; i < s->n_tensors; i++) {
        const mn_sample_tensor *t = &s->tensors[i];
        const void *data = op_memory(t, OP_COMPUTED);
        const int sign = sign_of(t->field);
        int64_t wild = 0, wrong = 0;
        for (int64_t at = 0; data && at < t->count; at++) {
            const double x = mn_sample_get(s, data, at);
            wild += !isfinite(x);
            wrong += sign >= 0 && !(sign ? x > 0.0 : x >= 0.0);
        }
        CHECK(wild == 0, "%s, %s: %lld of %s%s not finite, %s", target, names[how], (long long)wild,
              t->field->role <= MN_ROLE_RAW ? "d" : "", t->field->name, op_case_text(c));
        CHECK(wrong == 0, "%s, %s: %lld of %s have lost their sign, %s", target, names[how],
              (long long)wrong, t->field->name, op_case_text(c));
    }
}

/* Results and gradients back to NaN. */
static void forget(mn_sample *s) {
    for (int i = 0; i < s->n_tensors; i++) {
        void *data = op_memory(&s->tensors[i], OP_COMPUTED);
        for (int64_t at = 0; data && at < s->tensors[i].count; at++)
            mn_sample_set(s, data, at, NAN);
    }
}

static void run_on(const op_target *target, mn_sample *s, harshness how, const op_case *c) {
    forget(s);
    op_run_both(op_context(target->name, 2), s, c);
    check_sane(target->name, s, how, c);
}

/* The float32 reference runs the same code as the float64 one. */
static void run_harsh(op_case c, harshness how) {
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    mn_sample narrow, wide;
    op_open(&narrow, &c);
    draw_harsh(&narrow, how, c.seed);
    for (int i = 0; i < n_targets; i++) {
        const bool ref = strcmp(targets[i].name, "ref") == 0;
        if (!ref) run_on(&targets[i], &narrow, how, &c);
        if (targets[i].dtype != MN_F64) continue;
        c.dtype = MN_F64;
        op_allocate(&wide, &c);
        op_convert(&wide, &narrow);
        run_on(&targets[i], &wide, how, &c);
        mn_sample_free(&wide);
        c.dtype = MN_F32;
    }
    mn_sample_free(&narrow);
}

/* delta with independent e and w is no contraction: its state may grow without bound in exact
 * arithmetic. With w = e it is one. */
static uint64_t contracting(const op_case *c) {
    int count;
    const mn_field *fields = mn_op_fields(c->op, &count);
    uint64_t bits = c->fields;
    for (int i = 0; i < count; i++) {
        if (c->op == MN_OP_delta && strcmp(fields[i].name, "w") == 0) bits &= ~((uint64_t)1 << i);
    }
    return bits;
}

static void long_and_harsh_is_finite(mn_op_id op) {
    op_case forms[OP_MAX_FORMS];
    const int n_forms = op_forms(op, forms);
    if (!op_has_state(op)) return;
    for (int f = 0; f < n_forms; f++) {
        op_case c = forms[f];
        if (c.fields != MN_ALL_FIELDS) continue;
        c.fields = contracting(&c);
        c.B = c.H = 1, c.T = LENGTH, c.K = 3, c.V = 4;
        for (int how = 0; how < N_HARSH; how++) run_harsh(c, (harshness)how);
    }
}

int main(int argc, char **argv) {
    return op_visit("long and harsh is finite", long_and_harsh_is_finite, argc, argv);
}
