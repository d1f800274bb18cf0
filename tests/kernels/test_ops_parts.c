/* test_ops_parts.c - a sequence in parts, the state carried from one to the next, equals the whole
 * sequence: token by token, with the states in other memory and in place (a decode step), and cut
 * in two with the gradient carried back over the cut.
 *
 * The parts of every target are held to the float64 run of the whole, within the tolerances of
 * support/op_error.h; those of float64 to the same tolerances in roundings of float64. */
#include "support/op_error.h"

#include <math.h>
#include <string.h>

#include "base/util.h"

/* hyper_layer has a convolution and keys inside and no way to hand them in. */
static bool comes_in_parts(mn_op_id op) {
    return op_has_time(op) && op != MN_OP_hyper_layer;
}

static bool is_state(const mn_sample *s, const mn_sample_tensor *t) {
    return op_final_state((mn_sample *)s, t->field) != NULL;
}

/* What counts the tokens before the part. */
static void set_position(mn_sample *part, const mn_sample *whole, int64_t t0) {
    const mn_curvature_args *curvature = (const void *)whole->args;
    const mn_ccq_read_args *read = (const void *)whole->args;
    if (part->op == MN_OP_curvature) ((mn_curvature_args *)part->args)->n0 = curvature->n0 + t0;
    if (part->op == MN_OP_ccq_read) ((mn_ccq_read_args *)part->args)->n0 = read->n0 + t0;
    if (part->op == MN_OP_rope) ((mn_rope_args *)part->args)->pos0 = 3 + t0;
}

static bool is_keys(const mn_sample_tensor *t) {
    return t->axes[1] == 'L' && op_is_keyed(t->field->op);
}

/* Tokens [t0, t0 + length) of `whole`, going on from the state of `before` unless it is NULL. */
static op_case open_part(mn_sample *part, const mn_sample *whole, const op_case *c, int64_t t0,
                         int64_t length, const mn_sample *before) {
    op_case p = *c;
    p.T = length;
    p.more_keys += op_is_keyed(c->op) ? t0 : 0;
    for (int i = 0; before && i < whole->n_tensors; i++) {
        if (is_state(whole, &whole->tensors[i])) p.fields |= (uint64_t)1 << i;
    }
    op_allocate(part, &p);
    set_position(part, whole, t0);
    op_copy_shared(part, whole, OP_GIVEN);
    op_copy_states(part, 0, whole, 0, c->B, OP_GIVEN);
    if (before) op_carry_state(part, before);
    for (int i = 0; i < whole->n_tensors; i++) {
        op_tokens d, s;
        if (!op_token_layout(&s, whole, &whole->tensors[i])) continue;
        char *out = op_memory(&part->tensors[i], OP_GIVEN);
        const char *in = op_memory(&whole->tensors[i], OP_GIVEN);
        if (!in || !out || !op_token_layout(&d, part, &part->tensors[i])) continue;
        const int64_t from = is_keys(&whole->tensors[i]) ? 0 : t0;
        const size_t size = c->dtype == MN_F64 ? sizeof(double) : sizeof(float);
        for (int64_t o = 0; o < s.outer; o++) {
            memcpy(out + (size_t)(o * d.length * d.inner) * size,
                   in + (size_t)((o * s.length + from) * s.inner) * size,
                   (size_t)(d.length * d.inner) * size);
        }
    }
    return p;
}

/* whole gradient (+)= part gradient, for what several parts share: keys, weights */
static void add_gradient(mn_sample *joined, const mn_sample *part, int i, bool first) {
    const mn_sample_tensor *from = &part->tensors[i], *to = &joined->tensors[i];
    op_tokens d = { 1, 1, to->count }, s = { 1, 1, from->count };
    if (is_keys(to)) op_token_layout(&d, joined, to), op_token_layout(&s, part, from);
    for (int64_t o = 0; o < s.outer; o++) {
        for (int64_t j = 0; j < s.length * s.inner; j++) {
            const int64_t at = o * d.length * d.inner + j;
            const double old = first ? 0.0 : mn_sample_get(joined, to->partner, at);
            const double more = mn_sample_get(part, from->partner, o * s.length * s.inner + j);
            mn_sample_set(joined, to->partner, at, old + more);
        }
    }
}

/* Puts what a part computed where it belongs; parts are joined last to first when `gradients`. */
static void join(mn_sample *joined, const mn_sample *part, const op_case *c, int64_t t0,
                 bool gradients) {
    const int64_t length = ((const mn_call *)part->args)->T;
    const bool last = t0 + length == c->T;
    for (int i = 0; i < part->n_tensors; i++) {
        const mn_sample_tensor *to = &joined->tensors[i], *from = &part->tensors[i];
        const bool input = to->field->role <= MN_ROLE_RAW;
        const char *in = op_memory(from, OP_COMPUTED);
        char *out = op_memory(to, OP_COMPUTED);
        const size_t size = c->dtype == MN_F64 ? sizeof(double) : sizeof(float);
        op_tokens d, s;
        if (!in || !out || input != gradients) continue;
        if (to->axes[0] == 'N') {
            if (input ? t0 == 0 : last) memcpy(out, in, (size_t)to->count * size);
        } else if (is_keys(to) || !op_token_layout(&d, joined, to)) {
            add_gradient(joined, part, i, last);
        } else {
            op_token_layout(&s, part, from);
            for (int64_t o = 0; o < s.outer; o++) {
                memcpy(out + (size_t)((o * d.length + t0) * d.inner) * size,
                       in + (size_t)(o * s.length * s.inner) * size,
                       (size_t)(s.length * s.inner) * size);
            }
        }
    }
}

/* The gradient of the later part's initial state is the cotangent of the earlier part's final one.
 * mLSTM's cotangents belong to the states in unscaled units, C0 = csum e^-m0. */
static void carry_back(mn_sample *earlier, mn_sample *later) {
    const mn_sample_tensor *m0 = mn_sample_find(later, "m0");
    for (int i = 0; i < later->n_tensors; i++) {
        const mn_sample_tensor *first = &later->tensors[i];
        mn_sample_tensor *last = op_final_state(earlier, first->field);
        if (!last || !first->partner) continue;
        if (earlier->op == MN_OP_mlstm) {
            const char *name = first->field->name;
            if (strcmp(name, "m0") == 0) continue;
            last = mn_sample_find(earlier, strcmp(name, "C0") == 0 ? "csum" : "nsum");
        }
        for (int64_t at = 0; at < first->count; at++) {
            double x = mn_sample_get(later, first->partner, at);
            if (earlier->op == MN_OP_mlstm) {
                const int64_t per_head = first->count / m0->count;
                x *= exp(-mn_sample_get(later, m0->data, at / per_head));
            }
            mn_sample_set(earlier, last->partner, at, x);
        }
    }
}

/* Token by token, results only: gradients of `joined` are those of the whole. */
static void run_tokens(const op_target *target, mn_sample *joined, const mn_sample *whole,
                       const op_case *c, bool in_place) {
    mn_context *context = op_context(target->name, 2);
    mn_sample parts[2];
    for (int64_t t = 0; t < c->T; t++) {
        mn_sample *now = &parts[t % 2], *before = t ? &parts[(t + 1) % 2] : NULL;
        const op_case p = open_part(now, whole, c, t, 1, before);
        if (in_place) op_stay_in_place(now);
        op_run(context, now, MN_FORWARD, &p);
        join(joined, now, c, t, false);
        if (before) mn_sample_free(before);
    }
    mn_sample_free(&parts[(c->T + 1) % 2]);
}

static void run_halves(const op_target *target, mn_sample *joined, const mn_sample *whole,
                       const op_case *c, int64_t cut) {
    mn_context *context = op_context(target->name, 2);
    mn_sample head, rest;
    const op_case p = open_part(&head, whole, c, 0, cut, NULL);
    op_run(context, &head, MN_FORWARD, &p);
    const op_case q = open_part(&rest, whole, c, cut, c->T - cut, &head);
    op_run_both(context, &rest, &q);
    carry_back(&head, &rest);
    op_run(context, &head, MN_BACKWARD, &p);
    join(joined, &rest, c, cut, false);
    join(joined, &head, c, 0, false);
    join(joined, &rest, c, cut, true);
    join(joined, &head, c, 0, true);
    mn_sample_free(&head);
    mn_sample_free(&rest);
}

static void to_roundings_of_double(op_tolerances *t) {
    for (int i = 0; i < MN_MAX_FIELDS; i++) {
        t->result[i] = fmax(1e-12, 4.0 * 0x1p-29 * t->result[i]);
        t->gradient[i] = fmax(1e-12, 4.0 * 0x1p-29 * t->gradient[i]);
    }
    t->loss_norm *= 0x1p-29;
}

/* A part of no tokens leaves a state of zeros behind, from which a document of lru goes on rather
 * than begins: its first token enters unscaled where no state is given. */
static bool begins_by_absence(const mn_sample *whole) {
    const mn_sample_tensor *h0 = mn_sample_find((mn_sample *)whole, "h0");
    return whole->op == MN_OP_lru && !(h0 && h0->data);
}

static void check_case(op_case c, const int64_t *cuts, int n_cuts) {
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    op_tolerances measured;
    mn_sample whole32, want;
    c.block = c.T + c.more_keys + 3;
    c.dtype = MN_F32;
    op_open(&whole32, &c);
    c.dtype = MN_F64;
    op_allocate(&want, &c);
    op_convert(&want, &whole32);
    op_measure(&measured, &want, &c);
    for (int i = 0; i < n_targets; i++) {
        op_tolerances tolerances = measured;
        mn_sample joined;
        c.dtype = targets[i].dtype;
        const mn_sample *whole = c.dtype == MN_F64 ? &want : &whole32;
        if (c.dtype == MN_F64) to_roundings_of_double(&tolerances);
        op_allocate(&joined, &c);
        for (int k = 0; k < n_cuts; k++) {
            if (cuts[k] == 0 && begins_by_absence(whole)) continue;
            run_halves(&targets[i], &joined, whole, &c, cuts[k]);
            op_compare(targets[i].name, &joined, &want, &tolerances, &c);
        }
        for (int in_place = 0; in_place < 2; in_place++) {
            run_tokens(&targets[i], &joined, whole, &c, in_place);
            op_compare(targets[i].name, &joined, &want, &tolerances, &c);
        }
        mn_sample_free(&joined);
    }
    mn_sample_free(&whole32);
    mn_sample_free(&want);
}

static void parts_are_the_whole(mn_op_id op) {
    static const int64_t cuts[] = { 0, 1, 31, 64, 69, 70 };
    op_case forms[OP_MAX_FORMS];
    const int n_forms = op_forms(op, forms);
    if (!comes_in_parts(op)) return;
    for (int f = 0; f < n_forms; f++) {
        op_case c = forms[f];
        c.T = 70, c.K = f % 2 ? 17 : 6, c.V = f % 3 ? 5 : 20;
        c.seed = (uint64_t)f + 1;
        c.more_keys = f % 2 ? 4 : 0;
        check_case(c, cuts, MN_COUNTOF(cuts));
    }
}

int main(int argc, char **argv) {
    return op_visit("parts are the whole", parts_are_the_whole, argc, argv);
}
