/* op_causal.c - who may see a number, and what moved although it could not (op_causal.h). */
#include "support/op_causal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "support/check.h"

const float op_wild_values[OP_WILD_VALUES] = { NAN,   INFINITY, -INFINITY, 3e38f,
                                               -3e38f, 1e25f,   1e-42f };

op_spot op_spot_at(const mn_sample *s, const mn_sample_tensor *t, int64_t at) {
    const mn_call *call = (const mn_call *)s->args;
    op_spot where = { -1, -1, -1, -1 };
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
static bool apart(const op_spot *a, const op_spot *b) {
    if (a->sequence >= 0 && b->sequence >= 0 && a->sequence != b->sequence) return true;
    return a->head >= 0 && b->head >= 0 && (a->heads <= b->head || b->heads <= a->head);
}

static bool must_stay(const op_spot *e, const op_spot *poison, op_effect what) {
    if (apart(e, poison)) return true;
    if (e->query < 0 || poison->query < 0) return false;
    if (what == OP_ON_RESULTS) return e->query < poison->query;
    return what == OP_ON_GRADIENTS && e->query > poison->query;
}

const char *op_wild_text(float x) {
    static char text[32];
    snprintf(text, sizeof text, "%g", (double)x);
    return text;
}

static bool same_bits(const mn_sample *s, const void *a, const void *b, int64_t at) {
    const size_t size = ((const mn_call *)s->args)->dtype == MN_F64 ? 8 : 4;
    const unsigned char *x = a, *y = b;
    return memcmp(x + size * (size_t)at, y + size * (size_t)at, size) == 0;
}

int64_t op_check_kept(const char *target, const mn_sample *clean, const mn_sample *got,
                      const mn_sample_tensor *poisoned, const op_spot *poison, float value,
                      op_effect what, const op_case *c) {
    int64_t all = 0;
    for (int i = 0; i < clean->n_tensors; i++) {
        const mn_sample_tensor *t = &clean->tensors[i];
        const bool result = t->field->role >= MN_ROLE_OUT;
        if (result != (what == OP_ON_RESULTS)) continue;
        const void *want = op_memory(t, OP_COMPUTED);
        const void *have = op_memory(&got->tensors[i], OP_COMPUTED);
        int64_t moved = 0, first = -1;
        if (!want || !have) continue;
        for (int64_t at = 0; at < t->count; at++) {
            if (same_bits(clean, want, have, at)) continue;
            const op_spot e = op_spot_at(clean, t, at);
            if (!must_stay(&e, poison, what)) continue;
            if (moved++ == 0) first = at;
        }
        CHECK(moved == 0,
              "%s: %s in %s%s at token %lld moves %lld of %s%s, first %lld: %g, not %g; %s",
              target, op_wild_text(value), what == OP_ON_GRADIENTS ? "d" : "",
              poisoned->field->name, (long long)poison->query, (long long)moved,
              result ? "" : "d", t->field->name, (long long)first,
              mn_sample_get(got, have, first < 0 ? 0 : first),
              mn_sample_get(clean, want, first < 0 ? 0 : first), op_case_text(c));
        all += moved;
    }
    return all;
}

void op_find_nan(op_beginnings out, const mn_sample *s) {
    int64_t *all = &out[0][0][0];
    for (int i = 0; i < MN_MAX_FIELDS * OP_MOST_SEQUENCES * OP_MOST_HEADS; i++) all[i] = OP_NEVER;
    for (int i = 0; i < s->n_tensors; i++) {
        const mn_sample_tensor *t = &s->tensors[i];
        for (int64_t at = 0; t->field->role >= MN_ROLE_OUT && t->data && at < t->count; at++) {
            if (!isnan(mn_sample_get(s, t->data, at))) continue;
            const op_spot e = op_spot_at(s, t, at);
            if (e.query < 0 || e.sequence < 0) continue;
            const int64_t head = mn_max(e.head, 0) % OP_MOST_HEADS;
            int64_t *first = &out[i][e.sequence % OP_MOST_SEQUENCES][head];
            *first = mn_min(*first, e.query);
        }
    }
}

int64_t op_check_beginnings(const char *target, op_beginnings want, op_beginnings have,
                            const mn_sample *s, const mn_sample_tensor *poisoned, float value,
                            const op_case *c) {
    int64_t differ = 0;
    for (int i = 0; i < s->n_tensors; i++) {
        for (int n = 0; n < OP_MOST_SEQUENCES * OP_MOST_HEADS; n++) {
            const int64_t a = want[i][n / OP_MOST_HEADS][n % OP_MOST_HEADS];
            const int64_t b = have[i][n / OP_MOST_HEADS][n % OP_MOST_HEADS];
            differ += a != b;
            CHECK(a == b, "%s: with %s in %s NaN begins in %s at token %lld, ref at %lld; %s",
                  target, op_wild_text(value), poisoned->field->name, s->tensors[i].field->name,
                  (long long)b, (long long)a, op_case_text(c));
        }
    }
    return differ;
}

bool op_allows(const mn_field *field, float *value) {
    if (field->law != MN_LAW_DECAY) return true;
    *value = -fabsf(*value);
    return !isnan(*value);
}

int64_t op_choose_element(const mn_sample *s, const mn_sample_tensor *t, int round) {
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

bool op_has_rows(const mn_sample_tensor *t) {
    return t->data && t->axes[0] && (strchr("B*", t->axes[0]) || strchr(t->axes, 'T'));
}
