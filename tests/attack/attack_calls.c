/* attack_calls.c - calls of the library with every argument wrong in turn, generated from the
 * operator tables: pointers NULL, sizes and counts absurd, strides negative, choices beyond their
 * names, results over one another. Other calls are attack_api's.
 *
 * A call is refused in words or does what it says. What no library can tell, such as a size that
 * only the caller's memory is too small for, is not tried. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attack/batch.h"
#include "base/util.h"
#include "ops/run.h"
#include "ops/sample.h"

static const int64_t sizes[] = { 0, -1, INT64_MAX, INT64_MIN, INT64_C(1) << 62, INT64_C(1) << 59 };
static const int64_t strides[] = { -1, INT64_MIN };
static const int choices[] = { -1, 99, INT_MIN, INT_MAX };
static const char letters[] = "BTHKVGJLQPRWDS";

enum { MOST_CASES = 1 << 16 };
typedef enum blow {
    NO_DATA,
    NO_PARTNER,
    BAD_SIZE,
    BAD_STRIDE,
    BAD_CHOICE,
    BAD_DECAY,
    BAD_DTYPE,
    BAD_PACKING,
    SHARED,
    NO_ARGS,
    NO_CONTEXT
} blow;

static const char *const blows[] = {
    "no data", "no gradient", "size", "stride", "choice", "decay",
    "dtype", "packing", "shared memory", "no arguments", "no context",
};

static struct {
    mn_op_id op;
    blow what;
    int which, value;
} cases[MOST_CASES];
static int64_t n_cases;

static void add(mn_op_id op, blow what, int which, int n_values) {
    for (int v = 0; v < n_values && n_cases < MOST_CASES; v++) {
        cases[n_cases].op = op;
        cases[n_cases].what = what;
        cases[n_cases].which = which;
        cases[n_cases++].value = v;
    }
}

static void list_cases(void) {
    for (int op = 0; op < MN_OP_COUNT; op++) {
        int n_fields, n_params;
        mn_op_fields((mn_op_id)op, &n_fields);
        const mn_param *params = mn_op_params((mn_op_id)op, &n_params);
        for (int i = 0; i < n_fields; i++) {
            add((mn_op_id)op, NO_DATA, i, 1);
            add((mn_op_id)op, NO_PARTNER, i, 1);
            add((mn_op_id)op, BAD_STRIDE, i, 3 * MN_COUNTOF(strides));
            add((mn_op_id)op, SHARED, i, n_fields);
        }
        for (int i = 0; letters[i]; i++) add((mn_op_id)op, BAD_SIZE, i, MN_COUNTOF(sizes));
        for (int i = 0; i < n_params; i++) {
            if (params[i].kind == MN_PARAM_CHOICE) {
                add((mn_op_id)op, BAD_CHOICE, i, MN_COUNTOF(choices));
            }
        }
        add((mn_op_id)op, BAD_DECAY, 0, MN_COUNTOF(choices));
        add((mn_op_id)op, BAD_DTYPE, 0, MN_COUNTOF(choices));
        add((mn_op_id)op, BAD_PACKING, 0, 6);
        add((mn_op_id)op, NO_ARGS, 0, 1);
        add((mn_op_id)op, NO_CONTEXT, 0, 1);
    }
}

static void set_sizes(mn_sample *s) {
    mn_call *c = (mn_call *)s->args;
    *c = (mn_call){ .dtype = MN_F32, .B = 2, .T = 3, .H = 2, .K = 4, .V = 4, .G = 2, .J = 2, .L = 3,
                    .Q = 2, .P = 8, .R = 4, .W = 2, .D = 4, .S = 2 };
    int *decay = mn_args_decay_slot(s->op, s->args);
    if (decay) *decay = MN_DECAY_TOKEN;
}

static void strike(mn_sample *s, int64_t i) {
    static const int64_t packings[6][3] = { { 0, 2, 3 }, { 1, 2, 3 }, { 0, 4, 3 }, { 0, -1, 3 },
                                            { 0, INT64_MAX, 3 }, { 0, 2, INT64_MAX } };
    int n_fields, n_params;
    const mn_field *field = mn_op_fields(s->op, &n_fields) + cases[i].which;
    const mn_param *params = mn_op_params(s->op, &n_params);
    mn_call *call = (mn_call *)s->args;
    const int value = cases[i].value;
    switch (cases[i].what) {
    case NO_DATA: ((mn_in *)(s->args + field->offset))->data = NULL; break;
    case NO_PARTNER:
        if (field->partner != MN_NO_OFFSET) ((mn_in *)(s->args + field->partner))->data = NULL;
        break;
    case BAD_STRIDE:
        ((mn_in *)(s->args + field->offset))->stride[value % 3] = strides[value / 3];
        break;
    case SHARED: {
        const mn_field *other = mn_op_fields(s->op, &n_fields) + value;
        mn_in *from = (mn_in *)(s->args + field->offset), *to = (mn_in *)(s->args + other->offset);
        const mn_sample_tensor *a = mn_sample_find(s, field->name);
        const mn_sample_tensor *b = mn_sample_find(s, other->name);
        const bool fits = a && b && a->count >= b->count;
        if (fits && field->role >= MN_ROLE_OUT && other->role >= MN_ROLE_OUT) to->data = from->data;
        break;
    }
    case BAD_SIZE: {
        int64_t *slot = mn_axis_slot(call, letters[cases[i].which]);
        if (slot) *slot = sizes[value];
        break;
    }
    case BAD_CHOICE: *(int *)(s->args + params[cases[i].which].offset) = choices[value]; break;
    case BAD_DECAY: {
        int *decay = mn_args_decay_slot(s->op, s->args);
        if (decay) *decay = choices[value];
        break;
    }
    case BAD_DTYPE: call->dtype = (mn_dtype)choices[value]; break;
    case BAD_PACKING:
        call->cu_seqlens = packings[value];
        call->n_seqs = value == 0 ? -1 : 2;
        call->B = 1;
        break;
    case NO_ARGS:
    case NO_CONTEXT: break;
    }
}

static void try(int64_t i) {
    static mn_context *context;
    const mn_context_options options = { .n_threads = 1 };
    mn_sample s;
    if (!context && mn_context_create(&context, &options) != MN_OK) abort();
    mn_sample_init(&s, cases[i].op);
    set_sizes(&s);
    if (mn_sample_allocate(&s, MN_ALL_FIELDS) != MN_OK) return;
    mn_sample_draw(&s, 1);
    strike(&s, i);
    const void *args = cases[i].what == NO_ARGS ? NULL : s.args;
    mn_context *with = cases[i].what == NO_CONTEXT ? NULL : context;
    for (int pass = MN_FORWARD; pass <= MN_BACKWARD; pass++) {
        const mn_status st = mn_op_run(with, cases[i].op, (mn_pass)pass, args);
        if (st != MN_OK && !*mn_last_error()) abort();
        if (st == MN_OK && (!args || !with)) abort();
    }
    ((mn_call *)s.args)->dtype = MN_F32;    // by which the sample knows its own sizes
    if (!mn_sample_guards_intact(&s)) abort();
    mn_sample_free(&s);
}

static void tell(int64_t i) {
    printf("%s: %s %d, value %d\n", mn_op_describe(cases[i].op)->name, blows[cases[i].what],
           cases[i].which, cases[i].value);
}

int main(void) {
    list_cases();
    const int64_t broken = attack_all(n_cases, 500, try, tell);
    printf("%" PRId64 " wrong calls, %" PRId64 " broke something\n", n_cases, broken);
    return broken > 0;
}
