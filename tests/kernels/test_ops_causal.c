/* test_ops_causal.c - one number that no model should see stays where it can be seen.
 *
 * A NaN, an infinity, a number near the ends of float32 or a denormal enters one token of one
 * input, and everything before that token, every other head and every other sequence keeps its
 * bits. The same in one token of one cotangent, and every gradient after it keeps its bits. Targets
 * agree on the token at which NaN begins. A masked half that is multiplied by 0 breaks each. */
#include "support/op_walk.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

static const float values[] = { NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e25f, 1e-42f };

/* Where an element lies: -1 where its tensor has no such axis. `query` is the first token that may
 * see it, [head, heads) the heads of axis H that it belongs to. */
typedef struct spot {
    int64_t sequence, query, head, heads;
} spot;

static spot spot_at(const mn_sample *s, const mn_sample_tensor *t, int64_t at) {
    const mn_call *call = (const mn_call *)s->args;
    spot where = { -1, -1, -1, -1 };
    bool ok = true;
    const bool keyed = op_is_keyed(s->op);
    for (size_t i = strlen(t->axes); i-- > 0;) {
        const char letter = t->axes[i];
        const int64_t size = mn_axis_size(call, letter, &ok), x = at % size;
        at /= size;
        if (strchr("BN*", letter)) where.sequence = x;
        if (letter == 'T') where.query = x;
        if (letter == 'L' && keyed) where.query = x - (call->L - call->T);
        if (letter == 'H') where.head = x, where.heads = x + 1;
        if (letter == 'J' && keyed) {
            const int64_t group = call->H / call->J;
            where.head = x * group, where.heads = where.head + group;
        }
    }
    for (int64_t n = 0; call->cu_seqlens && where.query >= 0 && n < call->n_seqs; n++) {
        if (where.query >= call->cu_seqlens[n]) where.sequence = n;
    }
    return where;
}

/* No path leads from one to the other, whatever their tokens. */
static bool apart(const spot *a, const spot *b) {
    if (a->sequence >= 0 && b->sequence >= 0 && a->sequence != b->sequence) return true;
    return a->head >= 0 && b->head >= 0 && (a->heads <= b->head || b->heads <= a->head);
}

typedef enum effect { ON_RESULTS, ON_GRADIENTS_OF_INPUT, ON_GRADIENTS } effect;

static bool must_stay(const spot *e, const spot *poison, effect what) {
    if (apart(e, poison)) return true;
    if (e->query < 0 || poison->query < 0) return false;
    if (what == ON_RESULTS) return e->query < poison->query;
    return what == ON_GRADIENTS && e->query > poison->query;
}

static const char *value_text(float x) {
    static char text[32];
    snprintf(text, sizeof text, "%g", (double)x);
    return text;
}

/* One poisoned run against the run without it. */
static void check_kept(const char *target, const mn_sample *clean, const mn_sample *got,
                       const mn_sample_tensor *poisoned, const spot *poison, float value,
                       effect what, const op_case *c) {
    for (int i = 0; i < clean->n_tensors; i++) {
        const mn_sample_tensor *t = &clean->tensors[i];
        const bool result = t->field->role >= MN_ROLE_OUT;
        if (result != (what == ON_RESULTS)) continue;
        const uint32_t *want = op_memory(t, OP_COMPUTED);
        const uint32_t *have = op_memory(&got->tensors[i], OP_COMPUTED);
        int64_t moved = 0, first = -1;
        if (!want || !have) continue;
        for (int64_t at = 0; at < t->count; at++) {
            if (want[at] == have[at]) continue;
            const spot e = spot_at(clean, t, at);
            if (!must_stay(&e, poison, what)) continue;
            if (moved++ == 0) first = at;
        }
        CHECK(moved == 0,
              "%s: %s in %s%s at token %lld moves %lld of %s%s, first %lld: %g, not %g; %s",
              target, value_text(value), what == ON_GRADIENTS ? "d" : "", poisoned->field->name,
              (long long)poison->query, (long long)moved, result ? "" : "d", t->field->name,
              (long long)first, mn_sample_get(got, have, first < 0 ? 0 : first),
              mn_sample_get(clean, want, first < 0 ? 0 : first), op_case_text(c));
    }
}

/* First token of each sequence and head at which a result is NaN, one row for each result. */
enum { MOST_SEQUENCES = 4, MOST_HEADS = 4, NEVER = 1 << 20 };
typedef int64_t beginnings[MN_MAX_FIELDS][MOST_SEQUENCES][MOST_HEADS];

static void find_nan(beginnings out, const mn_sample *s) {
    int64_t *all = &out[0][0][0];
    for (int i = 0; i < MN_MAX_FIELDS * MOST_SEQUENCES * MOST_HEADS; i++) all[i] = NEVER;
    for (int i = 0; i < s->n_tensors; i++) {
        const mn_sample_tensor *t = &s->tensors[i];
        for (int64_t at = 0; t->field->role >= MN_ROLE_OUT && t->data && at < t->count; at++) {
            if (!isnan(mn_sample_get(s, t->data, at))) continue;
            const spot e = spot_at(s, t, at);
            if (e.query < 0 || e.sequence < 0) continue;
            int64_t *first = &out[i][e.sequence % MOST_SEQUENCES][mn_max(e.head, 0) % MOST_HEADS];
            *first = mn_min(*first, e.query);
        }
    }
}

static void check_beginnings(const char *target, beginnings want, beginnings have,
                             const mn_sample *s, const mn_sample_tensor *poisoned, float value,
                             const op_case *c) {
    for (int i = 0; i < s->n_tensors; i++) {
        for (int n = 0; n < MOST_SEQUENCES * MOST_HEADS; n++) {
            const int64_t a = want[i][n / MOST_HEADS][n % MOST_HEADS];
            const int64_t b = have[i][n / MOST_HEADS][n % MOST_HEADS];
            CHECK(a == b, "%s: with %s in %s NaN begins in %s at token %lld, ref at %lld; %s",
                  target, value_text(value), poisoned->field->name, s->tensors[i].field->name, (long long)b,
                  (long long)a, op_case_text(c));
        }
    }
}

static bool run(mn_context *context, mn_sample *s, mn_pass pass, const op_case *c) {
    const mn_status st = mn_op_run(context, s->op, pass, s->args);
    CHECK(mn_sample_guards_intact(s), "wrote beside a result, %s", op_case_text(c));
    return st == MN_OK;
}

/* Which numbers an input may hold at all: a log decay is at most 0. */
static bool allowed(const mn_field *field, float *value) {
    if (field->law != MN_LAW_DECAY) return true;
    *value = -fabsf(*value);
    return !isnan(*value);
}

/* The element to poison: of a token in the middle of a chunk, of the last head of the second
 * sequence where there is one. */
static int64_t choose_element(const mn_sample *s, const mn_sample_tensor *t, int round) {
    static const int64_t tokens[] = { 37, 13, 66, 21, 48, 5, 30 };
    const mn_call *call = (const mn_call *)s->args;
    bool ok = true;
    int64_t at = 0;
    for (const char *letter = t->axes; *letter; letter++) {
        const int64_t size = mn_axis_size(call, *letter, &ok);
        int64_t x = (3 + round) % size;
        if (strchr("TL", *letter)) x = tokens[round % (int)MN_COUNTOF(tokens)] % size;
        if (strchr("HJQ", *letter)) x = size - 1;
        if (strchr("BN", *letter)) x = mn_min(1, size - 1);
        at = at * size + x;
    }
    return at;
}

static bool has_rows(const mn_sample_tensor *t) {
    return t->data && t->axes[0] && (strchr("B*", t->axes[0]) || strchr(t->axes, 'T'));
}

typedef struct bench {
    op_target targets[MN_TARGET_COUNT + 1];
    int n_targets;
    mn_sample clean[MN_TARGET_COUNT + 1];
} bench;

static void poison_input(const bench *b, const op_case *c, int which, float value, int round) {
    beginnings want, have;
    bool ref_takes = true;
    for (int i = 0; i < b->n_targets; i++) {
        if (b->targets[i].dtype != MN_F32) continue;
        mn_context *context = op_context(b->targets[i].name, 2);
        const char *target = b->targets[i].name;
        mn_sample got;
        op_open(&got, c);
        const mn_sample_tensor *t = &got.tensors[which];
        const int64_t at = choose_element(&got, t, round);
        const spot poison = spot_at(&got, t, at);
        mn_sample_set(&got, t->data, at, (double)value);
        const bool ref = strcmp(target, "ref") == 0;
        const bool taken = run(context, &got, MN_FORWARD, c);
        if (ref) ref_takes = taken;
        CHECK(taken == ref_takes, "%s %s %s in %s, ref does not; %s", target,
              taken ? "takes" : "refuses", value_text(value), t->field->name, op_case_text(c));
        if (taken && ref_takes) {
            check_kept(target, &b->clean[i], &got, t, &poison, value, ON_RESULTS, c);
            find_nan(ref ? want : have, &got);
            if (!ref && isnan(value)) check_beginnings(target, want, have, &got, t, value, c);
            if (op_has_backward(c->op) && run(context, &got, MN_BACKWARD, c)) {
                check_kept(target, &b->clean[i], &got, t, &poison, value, ON_GRADIENTS_OF_INPUT, c);
            }
        }
        mn_sample_free(&got);
    }
}

static void poison_cotangent(const bench *b, const op_case *c, int which, float value, int round) {
    for (int i = 0; i < b->n_targets; i++) {
        if (b->targets[i].dtype != MN_F32) continue;
        mn_context *context = op_context(b->targets[i].name, 2);
        mn_sample got;
        op_open(&got, c);
        const mn_sample_tensor *t = &got.tensors[which];
        const int64_t at = choose_element(&got, t, round);
        const spot poison = spot_at(&got, t, at);
        mn_sample_set(&got, t->partner, at, (double)value);
        if (run(context, &got, MN_FORWARD, c) && run(context, &got, MN_BACKWARD, c)) {
            check_kept(b->targets[i].name, &b->clean[i], &got, t, &poison, value, ON_GRADIENTS, c);
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
            op_run_both(op_context(b.targets[i].name, 2), &b.clean[i], c);
    }
    int round = (int)c->seed;
    for (int i = 0; i < b.clean[0].n_tensors; i++) {
        const mn_sample_tensor *t = &b.clean[0].tensors[i];
        const bool input = t->field->role <= MN_ROLE_RAW;
        if (!has_rows(t) || t->field->law == MN_LAW_CLASS) continue;
        for (size_t v = 0; v < MN_COUNTOF(values); v++, round++) {
            const size_t turn = 1 + (size_t)(c->seed + (uint64_t)i) % (MN_COUNTOF(values) - 1);
            if (!every && v != 0 && v != turn) continue;
            float value = values[v];
            if (input && allowed(t->field, &value)) poison_input(&b, c, i, value, round);
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
        if (f > 1 && f % 4 != 0) continue;
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
