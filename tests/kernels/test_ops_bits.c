/* test_ops_bits.c - what must be equal bit for bit, on every target:
 *
 *   packed sequences, or rows of a batch, and the same sequences one by one; any number of
 *   threads; strided and contiguous views; an unchanged past after the future was changed. */
#include "support/op_bits.h"
#include "support/op_walk.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"

static size_t bytes_of(const mn_sample *s, int64_t count) {
    return (size_t)count * mn_dtype_bytes(((const mn_call *)s->args)->dtype);
}

/* ---- packed and separate ------------------------------------------------------------------- */

static void run_here(void *context, mn_sample *sample, const op_case *c) {
    op_run_both(context, sample, c);
}

static void packed_is_separate(const op_target *target, const op_case *c) {
    mn_sample packed;
    op_open(&packed, c);
    op_check_packed(target->name, &packed, c, run_here, op_context(target->name, 2));
    mn_sample_free(&packed);
}

/* ---- threads, views, batches ---------------------------------------------------------------- */

static void threads_do_not_show(const op_target *target, const op_case *c) {
    static const int counts[] = { 2, 3, 7 };
    mn_sample one;
    op_open(&one, c);
    op_run_both(op_context(target->name, 1), &one, c);
    for (size_t i = 0; i < MN_COUNTOF(counts); i++) {
        mn_sample more;
        char what[32] = "1 and N threads";
        what[6] = (char)('0' + counts[i]);
        op_open(&more, c);
        op_run_both(op_context(target->name, counts[i]), &more, c);
        op_check_same(what, target->name, &one, &more, op_bits_everything, c);
        mn_sample_free(&more);
    }
    mn_sample_free(&one);
}

/* All (B,T,..) views of one kind side by side in one row per token, as after a joint projection. */
typedef struct interleaved {
    unsigned char *memory;
    size_t bytes;
    int64_t row;    // elements
} interleaved;

enum { PADDING = 3, UNTOUCHED = 0xA7 };

static bool can_interleave(const mn_sample *s, const mn_sample_tensor *t, op_tokens *tokens) {
    return strncmp(t->axes, "BT", 2) == 0 && t->axes[2] && op_token_layout(tokens, s, t);
}

/* Copies one tensor between its own memory and its place in the rows. */
static void move_rows(const interleaved *rows, int64_t at, unsigned char *own,
                      const op_tokens *tokens, size_t size, bool into_rows) {
    const size_t bytes = (size_t)tokens->inner * size;
    for (int64_t r = 0; r < tokens->outer * tokens->length; r++) {
        unsigned char *place = rows->memory + (size_t)(r * rows->row + at) * size;
        memcpy(into_rows ? place : own + (size_t)r * bytes,
               into_rows ? own + (size_t)r * bytes : place, bytes);
    }
}

/* Points a view into the rows. Axis 2 has a stride of its own unless it is the last. */
static void place_view(mn_out *view, const interleaved *rows, int64_t at, const mn_sample_tensor *t,
                       const op_tokens *tokens, const mn_call *call, size_t size) {
    bool ok = true;
    int64_t heads = 1;
    if (strchr("HJQ", t->axes[2])) heads = mn_axis_size(call, t->axes[2], &ok);
    view->data = rows->memory + (size_t)at * size;
    view->stride[0] = tokens->length * rows->row;
    view->stride[1] = rows->row;
    view->stride[2] = strchr("HJQ", t->axes[2]) ? tokens->inner / heads : 0;
}

/* Lays out all tensors; `into_rows` also copies what is given, otherwise what was computed comes
 * back and the padding is inspected. */
static void interleave(interleaved *rows, mn_sample *s, bool into_rows, const op_case *c) {
    const mn_call *call = (const mn_call *)s->args;
    const size_t size = mn_dtype_bytes(call->dtype);
    int64_t at = 0;
    for (int i = 0; i < s->n_tensors; i++) {
        mn_sample_tensor *t = &s->tensors[i];
        op_tokens tokens;
        if (!can_interleave(s, t, &tokens)) continue;
        void *own[2] = { t->data, t->partner };
        const size_t offsets[2] = { t->field->offset, t->field->partner };
        for (int k = 0; k < 2; k++) {
            if (!own[k]) continue;
            if (rows->memory) {
                move_rows(rows, at, own[k], &tokens, size, into_rows);
                place_view((mn_out *)(s->args + offsets[k]), rows, at, t, &tokens, call, size);
                for (int64_t r = 0; !into_rows && r < tokens.outer * tokens.length; r++) {
                    const unsigned char *pad = rows->memory +
                                               (size_t)(r * rows->row + at + tokens.inner) * size;
                    bool intact = true;
                    for (size_t b = 0; b < PADDING * size; b++)
                        intact = intact && pad[b] == UNTOUCHED;
                    CHECK(intact, "wrote beside %s, %s", t->field->name, op_case_text(c));
                }
            }
            at += tokens.inner + PADDING;
        }
    }
    rows->row = at;
}

static void views_do_not_show(const op_target *target, const op_case *c) {
    mn_context *context = op_context(target->name, 2);
    mn_sample plain, strided;
    interleaved rows = { 0 };
    op_open(&plain, c);
    op_open(&strided, c);
    op_run_both(context, &plain, c);
    interleave(&rows, &strided, true, c);
    rows.bytes = bytes_of(&strided, c->B * c->T * rows.row) + 64;
    rows.memory = malloc(rows.bytes);
    memset(rows.memory, UNTOUCHED, rows.bytes);
    interleave(&rows, &strided, true, c);
    op_run_both(context, &strided, c);
    interleave(&rows, &strided, false, c);
    op_check_same("contiguous and strided", target->name, &plain, &strided, op_bits_everything, c);
    free(rows.memory);
    mn_sample_free(&plain);
    mn_sample_free(&strided);
}

/* ---- no look ahead --------------------------------------------------------------------------- */

/* Inputs of tokens after `cut` become those of another draw; results up to it must stay. */
static void future_does_not_show(const op_target *target, const op_case *c, int64_t cut) {
    mn_context *context = op_context(target->name, 2);
    mn_sample before, after, other;
    op_case another = *c;
    another.seed += 1000;
    op_open(&before, c);
    op_open(&after, c);
    op_open(&other, &another);
    op_copy_tokens(&after, cut, &other, cut, c->T - cut, OP_GIVEN);
    op_run(context, &before, MN_FORWARD, c);
    op_run(context, &after, MN_FORWARD, c);
    for (int i = 0; i < before.n_tensors; i++) {
        const mn_sample_tensor *x = &before.tensors[i], *y = &after.tensors[i];
        op_tokens tokens;
        if (x->field->role < MN_ROLE_OUT || !op_token_layout(&tokens, &before, x)) continue;
        for (int64_t o = 0; o < tokens.outer; o++) {
            const size_t at = bytes_of(&before, o * tokens.length * tokens.inner);
            CHECK(memcmp((char *)x->data + at, (char *)y->data + at,
                         bytes_of(&before, cut * tokens.inner)) == 0,
                  "%s: %s before token %d depends on later ones, %s", target->name, x->field->name,
                  (int)cut, op_case_text(c));
        }
    }
    mn_sample_free(&before);
    mn_sample_free(&after);
    mn_sample_free(&other);
}

/* ---- the walk ---------------------------------------------------------------------------------
 */

static const struct {
    int64_t K, V;
} widths[] = { { 4, 3 }, { 17, 33 }, { 64, 48 }, { 1, 1 }, { 32, 16 } };

/* Members of length 0 and 1, around chunk borders, and longer than several chunks. */
static const int64_t packing[] = { 0, 5, 5, 6, 23, 87, 87, 152, 153, 290 };

static void check_form(const op_target *target, op_case c, int f) {
    const size_t w = (size_t)f % MN_COUNTOF(widths);
    c.dtype = target->dtype;
    c.K = widths[w].K, c.V = widths[w].V;
    c.seed = (uint64_t)f + 1;
    op_case packed = c;
    packed.B = 1, packed.T = packing[MN_COUNTOF(packing) - 1], packed.block = packed.T;
    packed.cu_seqlens = packing, packed.n_seqs = MN_COUNTOF(packing) - 1;
    if (op_has_time(c.op)) packed_is_separate(target, &packed);
    if (op_has_time(c.op)) threads_do_not_show(target, &packed);
    c.B = 3, c.T = 70 + f % 3;
    threads_do_not_show(target, &c);
    if (!op_has_time(c.op)) return;
    packed_is_separate(target, &c);
    views_do_not_show(target, &c);
    future_does_not_show(target, &c, 64);
    future_does_not_show(target, &c, 37);
}

static void bits_are_equal(mn_op_id op) {
    op_case forms[OP_MAX_FORMS];
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_forms = op_forms(op, forms), n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        for (int f = 0; f < n_forms; f++) check_form(&targets[i], forms[f], f);
    }
}

int main(int argc, char **argv) {
    return op_visit("bits are equal", bits_are_equal, argc, argv);
}
