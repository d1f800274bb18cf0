/* op_bits.c - the comparisons of op_bits.h. */
#include "support/op_bits.h"

#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "support/check.h"

static size_t bytes_of(const mn_sample *s, int64_t count) {
    return (size_t)count * mn_dtype_bytes(((const mn_call *)s->args)->dtype);
}

bool op_bits_everything(const mn_sample *s, const mn_sample_tensor *t) {
    (void)s, (void)t;
    return true;
}

bool op_bits_per_sequence(const mn_sample *s, const mn_sample_tensor *t) {
    op_tokens tokens;
    return t->axes[0] == 'N' || op_token_layout(&tokens, s, t);
}

/* The first number of `a` that has other bits in `b`, as text. */
static const char *first_difference(const mn_sample *s, const void *a, const void *b,
                                    int64_t count, char text[80]) {
    const mn_dtype dtype = ((const mn_call *)s->args)->dtype;
    const size_t size = mn_dtype_bytes(dtype);
    int64_t at = 0;
    while (at < count && !memcmp((const char *)a + at * size, (const char *)b + at * size, size)) {
        at++;
    }
    const bool wide = dtype == MN_F64;
    snprintf(text, 80, "at %lld: %.9g and %.9g", (long long)at,
             wide ? ((const double *)a)[at] : (double)((const float *)a)[at],
             wide ? ((const double *)b)[at] : (double)((const float *)b)[at]);
    return text;
}

void op_check_same(const char *what, const char *target, const mn_sample *a, const mn_sample *b,
                   op_bits_filter *wanted, const op_case *c) {
    for (int i = 0; i < a->n_tensors; i++) {
        const mn_sample_tensor *t = &a->tensors[i];
        const void *x = op_memory(t, OP_COMPUTED), *y = op_memory(&b->tensors[i], OP_COMPUTED);
        if (!x || !y || !wanted(a, t)) continue;
        const bool input = t->field->role <= MN_ROLE_RAW;
        if (memcmp(x, y, bytes_of(a, t->count)) == 0) continue;
        char text[80];
        CHECK(false, "%s, %s: %s%s differs %s, %s", what, target, input ? "d" : "",
              t->field->name, first_difference(a, x, y, t->count, text), op_case_text(c));
    }
}

/* Tokens of sequence n of `all`, to a sample of it alone. */
static void take_sequence(mn_sample *one, const mn_sample *all, const op_case *c, int64_t n) {
    if (!c->cu_seqlens) {
        op_copy_rows(one, 0, all, n, OP_GIVEN);
    } else {
        const int64_t t0 = c->cu_seqlens[n];
        op_copy_tokens(one, 0, all, t0, c->cu_seqlens[n + 1] - t0, OP_GIVEN);
    }
}

static void put_sequence(mn_sample *all, const mn_sample *one, const op_case *c, int64_t n) {
    if (!c->cu_seqlens) {
        op_copy_rows(all, n, one, 0, OP_COMPUTED);
    } else {
        const int64_t t0 = c->cu_seqlens[n];
        op_copy_tokens(all, t0, one, 0, c->cu_seqlens[n + 1] - t0, OP_COMPUTED);
    }
}

/* Runs sequence n of `packed` alone and puts what it gives where it belongs in `joined`. */
static void run_alone(mn_sample *joined, const mn_sample *packed, const op_case *c, int64_t n,
                      op_bits_run *run, void *how) {
    mn_sample one;
    op_case alone = *c;
    if (c->cu_seqlens) alone.T = c->cu_seqlens[n + 1] - c->cu_seqlens[n];
    alone.cu_seqlens = NULL;
    alone.n_seqs = 0, alone.B = 1;
    op_allocate(&one, &alone);
    op_copy_shared(&one, packed, OP_GIVEN);
    op_copy_states(&one, 0, packed, n, 1, OP_GIVEN);
    take_sequence(&one, packed, c, n);
    run(how, &one, &alone);
    put_sequence(joined, &one, c, n);
    op_copy_states(joined, n, &one, 0, 1, OP_COMPUTED);
    mn_sample_free(&one);
}

void op_check_packed(const char *target, mn_sample *packed, const op_case *c, op_bits_run *run,
                     void *how) {
    mn_sample joined;
    op_allocate(&joined, c);
    run(how, packed, c);
    const int64_t n_seqs = c->cu_seqlens ? c->n_seqs : c->B;
    for (int64_t n = 0; n < n_seqs; n++) run_alone(&joined, packed, c, n, run, how);
    op_check_same("packed and separate", target, packed, &joined, op_bits_per_sequence, c);
    mn_sample_free(&joined);
}
