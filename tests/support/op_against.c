/* op_against.c - one call on chosen numbers against the float64 reference. */
#include "support/op_against.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"

static mn_sample_tensor *tensor_called(mn_sample *sample, const char *name) {
    mn_sample_tensor *tensor = mn_sample_find(sample, name);
    if (!tensor || !tensor->data) check_fatal("no tensor is called %s", name);
    return tensor;
}

void op_fill(mn_sample *sample, const char *name, double x) {
    const mn_sample_tensor *tensor = tensor_called(sample, name);
    for (int64_t i = 0; i < tensor->count; i++) mn_sample_set(sample, tensor->data, i, x);
}

void op_fill_token(mn_sample *sample, const char *name, int64_t t, double x) {
    const mn_sample_tensor *tensor = tensor_called(sample, name);
    op_tokens tokens;
    if (!op_token_layout(&tokens, sample, tensor)) check_fatal("%s has no tokens", name);
    for (int64_t o = 0; o < tokens.outer; o++) {
        for (int64_t i = 0; i < tokens.inner; i++) {
            mn_sample_set(sample, tensor->data, (o * tokens.length + t) * tokens.inner + i, x);
        }
    }
}

double op_at(mn_sample *sample, const char *name, int64_t i) {
    return mn_sample_get(sample, tensor_called(sample, name)->data, i);
}

/* The inputs in float32, and the reference on the same numbers with its tolerances. */
static void prepare(mn_sample *drawn, mn_sample *want, op_tolerances *tolerances, op_case *c,
                    op_shape_fn *shape) {
    c->dtype = MN_F32;
    op_open(drawn, c);
    if (shape) shape(drawn);
    c->dtype = MN_F64;
    op_open(want, c);
    op_convert(want, drawn);
    op_measure(tolerances, want, c);
    c->dtype = MN_F32;
}

/* ---- the state rounded on the way ------------------------------------------------------------ */

enum { PIECE = 32 };

/* Input `first` of `next` becomes final state of `piece`, rounded to float32. */
static void hand_on(mn_sample *next, mn_sample *piece) {
    for (int i = 0; i < next->n_tensors; i++) {
        const mn_sample_tensor *first = &next->tensors[i];
        const mn_sample_tensor *last = op_final_state(piece, first->field);
        for (int64_t at = 0; last && at < first->count; at++) {
            mn_sample_set(next, first->data, at, (float)mn_sample_get(piece, last->data, at));
        }
    }
}

/* Gradients of the initial states of `next` become cotangents of the final ones of `piece`. */
static void hand_back(mn_sample *piece, const mn_sample *next) {
    for (int i = 0; i < next->n_tensors; i++) {
        const mn_sample_tensor *first = &next->tensors[i];
        const mn_sample_tensor *last = op_final_state(piece, first->field);
        if (last) memcpy(last->partner, first->partner, (size_t)first->count * sizeof(double));
    }
}

/* Gradients of inputs that all tokens share are sums over the pieces. */
static void add_shared(mn_sample *joined, const mn_sample *piece, bool first) {
    for (int i = 0; i < piece->n_tensors; i++) {
        const mn_sample_tensor *t = &piece->tensors[i];
        op_tokens tokens;
        if (!t->partner || t->axes[0] == 'N' || op_token_layout(&tokens, piece, t)) continue;
        double *sum = joined->tensors[i].partner;
        const double *part = t->partner;
        for (int64_t at = 0; at < t->count; at++) sum[at] = (first ? 0.0 : sum[at]) + part[at];
    }
}

/* Results and gradients of `joined` in pieces with rounded states between them. */
static void run_pieces(mn_sample *joined, const op_case *c) {
    const int64_t n = (c->T + PIECE - 1) / PIECE;
    mn_context *context = op_context("ref", 1);
    mn_sample *pieces = calloc((size_t)n, sizeof *pieces);
    if (!pieces) check_fatal("no memory for %d pieces", (int)n);
    for (int64_t i = 0; i < n; i++) {
        op_case part = *c;
        part.T = mn_min(PIECE, c->T - i * PIECE);
        op_open(&pieces[i], &part);
        op_copy_shared(&pieces[i], joined, OP_GIVEN);
        op_copy_states(&pieces[i], 0, joined, 0, c->B, OP_GIVEN);
        op_copy_tokens(&pieces[i], 0, joined, i * PIECE, part.T, OP_GIVEN);
        if (i > 0) hand_on(&pieces[i], &pieces[i - 1]);
        op_run(context, &pieces[i], MN_FORWARD, &part);
    }
    op_copy_states(joined, 0, &pieces[n - 1], 0, c->B, OP_COMPUTED);
    for (int64_t i = n - 1; i >= 0; i--) {
        if (i < n - 1) hand_back(&pieces[i], &pieces[i + 1]);
        op_run(context, &pieces[i], MN_BACKWARD, c);
        op_copy_tokens(joined, i * PIECE, &pieces[i], 0, mn_min(PIECE, c->T - i * PIECE),
                       OP_COMPUTED);
        add_shared(joined, &pieces[i], i == n - 1);
    }
    for (int64_t i = 0; i < n; i++) {
        for (int k = 0; i == 0 && k < joined->n_tensors; k++) {
            const mn_sample_tensor *t = &pieces[0].tensors[k];
            if (t->axes[0] != 'N' || t->field->role > MN_ROLE_RAW || !t->partner) continue;
            memcpy(joined->tensors[k].partner, t->partner, (size_t)t->count * sizeof(double));
        }
        mn_sample_free(&pieces[i]);
    }
    free(pieces);
}

/* `arrays` times the factors of op_error.c times the relative rms between two float64 samples. */
static void widen(op_tolerances *out, const mn_sample *x, const mn_sample *r, int arrays) {
    for (int i = 0; i < r->n_tensors; i++) {
        const mn_sample_tensor *t = &r->tensors[i];
        const bool input = t->field->role <= MN_ROLE_RAW;
        const double *a = input ? x->tensors[i].partner : x->tensors[i].data;
        const double *b = input ? t->partner : t->data;
        double off = 0.0, size = 0.0;
        for (int64_t at = 0; a && b && at < t->count; at++) {
            off += (a[at] - b[at]) * (a[at] - b[at]);
            size += b[at] * b[at];
        }
        double *tol = input ? &out->gradient[i] : &out->result[i];
        if (size > 0.0) *tol = fmax(*tol, arrays * (input ? 40.0 : 20.0) * sqrt(off / size));
    }
}

static void compare_targets(op_case c, op_shape_fn *shape, int arrays) {
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    op_tolerances tolerances;
    mn_sample drawn, want;
    prepare(&drawn, &want, &tolerances, &c, shape);
    if (arrays > 0) {
        mn_sample pieces;
        op_case f64 = c;
        f64.dtype = MN_F64;
        op_open(&pieces, &f64);
        op_convert(&pieces, &drawn);
        run_pieces(&pieces, &f64);
        widen(&tolerances, &pieces, &want, arrays);
        mn_sample_free(&pieces);
    }
    for (int i = 0; i < n_targets; i++) {
        if (targets[i].dtype != MN_F32) continue;
        op_run_both(op_context(targets[i].name, 2), &drawn, &c);
        op_compare(targets[i].name, &drawn, &want, &tolerances, &c);
    }
    mn_sample_free(&drawn);
    mn_sample_free(&want);
}

void op_against_reference(op_case c, op_shape_fn *shape) {
    compare_targets(c, shape, 0);
}

void op_against_rounded_states(op_case c, op_shape_fn *shape, int arrays) {
    compare_targets(c, shape, arrays);
}

/* ---- token by token -------------------------------------------------------------------------- */

/* Every final state of `one` lies where its initial state is. */
static void join_states(mn_sample *one) {
    for (int i = 0; i < one->n_tensors; i++) {
        mn_sample_tensor *first = &one->tensors[i], *last = op_final_state(one, first->field);
        if (!last || !first->data) continue;
        ((mn_out *)(one->args + last->field->offset))->data = first->data;
    }
}

static void add_count(mn_sample *one) {
    if (one->op == MN_OP_curvature) ((mn_curvature_args *)one->args)->n0++;
    if (one->op == MN_OP_ccq_read) ((mn_ccq_read_args *)one->args)->n0++;
}

/* States that stand in the memory of the initial ones go to that of the final ones. */
static void part_states(mn_sample *one) {
    const size_t size = mn_dtype_bytes(((const mn_call *)one->args)->dtype);
    for (int i = 0; i < one->n_tensors; i++) {
        mn_sample_tensor *first = &one->tensors[i], *last = op_final_state(one, first->field);
        if (last && first->data) memcpy(last->data, first->data, (size_t)first->count * size);
    }
}

/* Runs the tokens of `whole` one by one and puts what they give in its place. */
static void run_steps(mn_context *context, mn_sample *whole, const op_case *c) {
    mn_sample one;
    op_case alone = *c;
    alone.T = 1;
    op_open(&one, &alone);
    op_copy_shared(&one, whole, OP_GIVEN);
    op_copy_states(&one, 0, whole, 0, c->B, OP_GIVEN);
    join_states(&one);
    for (int64_t t = 0; t < c->T; t++) {
        op_copy_tokens(&one, 0, whole, t, 1, OP_GIVEN);
        op_run(context, &one, MN_FORWARD, &alone);
        op_copy_tokens(whole, t, &one, 0, 1, OP_COMPUTED);
        add_count(&one);
    }
    part_states(&one);
    op_copy_states(whole, 0, &one, 0, c->B, OP_COMPUTED);
    mn_sample_free(&one);
}

/* op_copy_* move gradients as well as results, so those are computed last. */
void op_steps_against_reference(op_case c, op_shape_fn *shape) {
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    op_tolerances tolerances;
    mn_sample drawn, want;
    prepare(&drawn, &want, &tolerances, &c, shape);
    for (int i = 0; i < n_targets; i++) {
        if (targets[i].dtype != MN_F32) continue;
        mn_context *context = op_context(targets[i].name, 1);
        run_steps(context, &drawn, &c);
        op_run(context, &drawn, MN_BACKWARD, &c);
        op_compare(targets[i].name, &drawn, &want, &tolerances, &c);
    }
    mn_sample_free(&drawn);
    mn_sample_free(&want);
}
