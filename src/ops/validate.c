/* validate.c - checks a call and completes its views. */
#include "ops/validate.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "kernels/access.h"
#include "ops/overlap.h"

/* Largest number of elements of one tensor, far below what an int64_t byte offset can hold. */
static const int64_t max_elements = INT64_MAX / 64;

static mn_status check_packing(const char *name, const mn_call *call) {
    if (!call->cu_seqlens) return MN_OK;
    if (call->B != 1) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: cu_seqlens needs B = 1, not %" PRId64, name, call->B);
    }
    if (call->n_seqs < 1) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "%s: n_seqs is %" PRId64 ", with cu_seqlens it is at least 1", name,
                       call->n_seqs);
    }
    if (call->cu_seqlens[0] != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: cu_seqlens[0] is %" PRId64 ", not 0", name,
                       call->cu_seqlens[0]);
    }
    for (int64_t n = 0; n < call->n_seqs; n++) {
        if (call->cu_seqlens[n + 1] < call->cu_seqlens[n]) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: cu_seqlens decreases at entry %" PRId64, name,
                           n + 1);
        }
    }
    if (call->cu_seqlens[call->n_seqs] != call->T) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: cu_seqlens ends at %" PRId64 ", T is %" PRId64, name,
                       call->cu_seqlens[call->n_seqs], call->T);
    }
    return MN_OK;
}

/* Elements of a tensor with these axes; fails for a negative or missing size and for overflow. */
static mn_status count_elements(const char *op, const mn_field *field, const char *axes,
                                const mn_call *call, int64_t *count) {
    bool ok = true;
    *count = 1;
    for (const char *letter = axes; *letter; letter++) {
        const int64_t size = mn_axis_size(call, *letter, &ok);
        const bool may_be_empty = *letter == 'T' || *letter == 'L' || *letter == 'M';
        if (!ok || size < (may_be_empty ? 0 : 1)) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: %s has axes %s and %c is %" PRId64
                           ", it must be at least %d", op, field->name, axes, *letter, size,
                           may_be_empty ? 0 : 1);
        }
        if (!mn_mul_i64(count, *count, size) || *count > max_elements) {
            return mn_fail(MN_ERR_MEMORY, "%s: the sizes of %s overflow", op, field->name);
        }
    }
    return MN_OK;
}

/* Strides of a contiguous tensor, by the axis they belong to. */
static void contiguous(int64_t stride[3], const char *axes, const mn_call *call) {
    bool ok = true;
    int64_t step = 1;
    const size_t rank = strlen(axes);
    stride[0] = stride[1] = stride[2] = 0;
    for (size_t i = rank; i-- > 0;) {
        const char letter = axes[i];
        const bool last_two_of_square = i + 1 < rank && axes[i + 1] == letter;
        if (i == 0 && (letter == 'B' || letter == 'N' || letter == '*')) stride[0] = step;
        if (i <= 1 && (letter == 'T' || letter == 'L')) stride[1] = step;
        if (i <= 2 && strchr("HJQ", letter) && !last_two_of_square) stride[2] = step;
        step *= mn_axis_size(call, letter, &ok);
    }
}

/* Gives an absent view no strides and a view with three zeros those of a contiguous tensor. */
static mn_status complete_view(const char *op, const mn_field *field, const char *axes,
                               const mn_call *call, mn_in *view) {
    if (!view->data) {
        memset(view->stride, 0, sizeof view->stride);
        return MN_OK;
    }
    int64_t count;
    const mn_status st = count_elements(op, field, axes, call, &count);
    if (st != MN_OK) return st;
    int64_t plain[3];
    contiguous(plain, axes, call);
    const int64_t *s = view->stride;
    if (s[0] == 0 && s[1] == 0 && s[2] == 0) {
        memcpy(view->stride, plain, sizeof plain);
        return MN_OK;
    }
    const bool strided = axes[0] == 'B' && (axes[1] == 'T' || axes[1] == 'L');
    if (!strided && memcmp(s, plain, sizeof plain) != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: %s must be contiguous, leave its strides zero", op,
                       field->name);
    }
    if (s[0] < 0 || s[1] < 0 || s[2] < 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: %s has a negative stride", op, field->name);
    }
    return MN_OK;
}

/* Offset of row number `row`, a row being the last axis. */
static int64_t row_offset(const mn_in *view, const mn_call *call, const char *axes, int64_t row) {
    bool ok = true;
    const size_t rank = strlen(axes);
    int64_t offset = 0;
    for (size_t i = rank - 1; i-- > 0;) {
        const int64_t size = mn_axis_size(call, axes[i], &ok);
        const int axis = strchr("BN*", axes[i]) ? 0 : strchr("TL", axes[i]) ? 1 : 2;
        offset += row % size * view->stride[axis];
        row /= size;
    }
    return offset;
}

static bool any_above_zero_f32(const float *x, int64_t n) {
    int bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= !(x[i] <= 0.0f);
    return bad;
}

static bool any_above_zero_f64(const double *x, int64_t n) {
    int bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= !(x[i] <= 0.0);
    return bad;
}

/* A log decay is a number <= 0; NaN or growth would spoil a whole state without a word. */
static mn_status check_decay(const char *op, const mn_field *field, const char *axes,
                             const mn_call *call, const mn_in *view) {
    bool ok = true;
    int64_t count;
    mn_status st = count_elements(op, field, axes, call, &count);
    const int64_t width = mn_axis_size(call, axes[strlen(axes) - 1], &ok);
    const bool f64 = call->dtype == MN_F64;
    int64_t plain[3];
    contiguous(plain, axes, call);
    const bool is_plain = memcmp(plain, view->stride, sizeof plain) == 0;
    if (is_plain) {
        const bool bad = f64 ? any_above_zero_f64(view->data, count)
                             : any_above_zero_f32(view->data, count);
        if (!bad) return st;    // else the loop below finds the row
    }
    for (int64_t row = 0; st == MN_OK && row < count / width; row++) {
        const int64_t at = is_plain ? row * width : row_offset(view, call, axes, row);
        const bool bad = f64 ? any_above_zero_f64((const double *)view->data + at, width)
                             : any_above_zero_f32((const float *)view->data + at, width);
        if (bad) {
            st = mn_fail(MN_ERR_ARGUMENT, "%s: %s holds a value above 0 or NaN in row %" PRId64
                         "; a log decay is at most 0", op, field->name, row);
        }
    }
    return st;
}

/* Targets are whole numbers below V, or the value to be ignored. */
static mn_status check_classes(const char *op, const mn_field *field, const char *axes,
                               const mn_call *call, const mn_in *view, const int64_t *ignore) {
    int64_t count;
    const mn_status st = count_elements(op, field, axes, call, &count);
    for (int64_t i = 0; st == MN_OK && i < count; i++) {
        const double x = call->dtype == MN_F64 ? ((const double *)view->data)[i]
                                               : (double)((const float *)view->data)[i];
        const bool is_class = x >= 0 && x < (double)call->V && x == floor(x);
        if (!is_class && !(ignore && x == (double)*ignore)) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: %s holds %g at entry %" PRId64
                           ", no class below V = %" PRId64, op, field->name, x, i, call->V);
        }
    }
    return st;
}

/* One field: its own view and, in backward, its gradient or cotangent. */
static mn_status check_view(const char *op, const mn_field *field, int decay, const mn_call *call,
                             char *args, bool backward) {
    char buffer[MN_MAX_RANK + 1];
    const char *axes = mn_field_axes(field, decay, buffer);
    mn_in *view = (mn_in *)(args + field->offset);
    if (!axes) {
        memset(view, 0, sizeof *view);
        if (field->partner != MN_NO_OFFSET) memset(args + field->partner, 0, sizeof *view);
        return MN_OK;
    }
    if (strchr(field->axes, '|') && !view->data) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: decay says %s is %s, and %s is NULL", op, field->name,
                       axes, field->name);
    }
    if ((field->role == MN_ROLE_IN || field->role == MN_ROLE_RAW) && !view->data) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: %s is NULL", op, field->name);
    }
    mn_status st = complete_view(op, field, axes, call, view);
    if (st == MN_OK && field->partner != MN_NO_OFFSET && backward) {
        st = complete_view(op, field, axes, call, (mn_in *)(args + field->partner));
    }
    return st;
}

/* Values that a law forbids. Only once all views are checked: sizes that are wrong anywhere would
 * lead this one out of its memory. */
static mn_status check_values(const char *op, const mn_field *field, int decay, const mn_call *call,
                              const char *args) {
    char buffer[MN_MAX_RANK + 1];
    const char *axes = mn_field_axes(field, decay, buffer);
    const mn_in *view = (const mn_in *)(args + field->offset);
    if (!axes || !view->data) return MN_OK;
    if (field->law == MN_LAW_DECAY) return check_decay(op, field, axes, call, view);
    if (field->law != MN_LAW_CLASS) return MN_OK;
    const size_t ignores = mn_op_traits_of(field->op)->ignores;
    return check_classes(op, field, axes, call, view,
                         ignores ? (const int64_t *)(args + ignores) : NULL);
}

static mn_status check_sizes(const char *name, const mn_call *call) {
    static const char letters[] = "BTHKVGJLQPRWDS";
    if ((int)call->dtype < 0 || call->dtype >= MN_DTYPE_COUNT) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: dtype %d is none of ours", name, (int)call->dtype);
    }
    for (const char *letter = letters; *letter; letter++) {
        bool ok = true;
        const int64_t size = mn_axis_size(call, *letter, &ok);
        if (size < 0) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: %c is %" PRId64, name, *letter, size);
        }
    }
    return MN_OK;
}

static int count_choices(const char *names) {
    int count = 1;
    for (const char *at = names; *at; at++) count += *at == ',';
    return count;
}

/* Choices name one of their values. */
static mn_status check_params(mn_op_id op, const char *args) {
    const char *name = mn_op_describe(op)->name;
    int count;
    const mn_param *params = mn_op_params(op, &count);
    for (int i = 0; i < count; i++) {
        if (params[i].kind != MN_PARAM_CHOICE) continue;
        const int value = *(const int *)(args + params[i].offset);
        if (value < 0 || value >= count_choices(params[i].choices)) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: %s is %d, it counts in %s from 0", name,
                           params[i].name, value, params[i].choices);
        }
    }
    return MN_OK;
}

/* A count of tokens seen before is at least 0; curvature divides by it plus one. */
static mn_status check_counts(const char *name, const mn_op_traits *traits, const char *args) {
    if (!traits->n0) return MN_OK;
    const int64_t n0 = *(const int64_t *)(args + traits->n0);
    const void *at = args + traits->counts0;
    const int64_t *counts = traits->counts0 ? *(const int64_t *const *)at : NULL;
    if (n0 < 0)
        return mn_fail(MN_ERR_ARGUMENT, "%s: n0 is %" PRId64 ", a count is at least 0", name, n0);
    for (int64_t n = 0; counts && n < mn_n_sequences((const mn_call *)args); n++) {
        if (counts[n] < 0) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: counts0[%" PRId64 "] is %" PRId64
                           ", a count is at least 0", name, n, counts[n]);
        }
    }
    return MN_OK;
}

/* L keys for T queries, and heads that share keys evenly. */
static mn_status check_keys(const char *name, const mn_op_traits *traits, const mn_call *call) {
    if (traits->keyed && call->L < call->T) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: L = %" PRId64 " keys for T = %" PRId64 " queries",
                       name, call->L, call->T);
    }
    if (traits->keyed && call->cu_seqlens && call->L != call->T) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: packed sequences need L = T", name);
    }
    if (traits->grouped && (call->J < 1 || call->H % call->J != 0)) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: H = %" PRId64 " is no multiple of J = %" PRId64, name,
                       call->H, call->J);
    }
    return MN_OK;
}

/* Rotary positions turn pairs of channels. */
static mn_status check_pairs(const char *name, const mn_op_traits *traits, const char *args) {
    const mn_call *call = (const mn_call *)args;
    if (!traits->pairs || call->K % 2 == 0) return MN_OK;
    if (traits->pairs != MN_NO_OFFSET && *(const int *)(args + traits->pairs) == 0) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "%s: rotary positions need an even K, not %" PRId64, name,
                   call->K);
}

/* Sizes that follow from others. */
static void derive_sizes(const mn_op_traits *traits, char *args) {
    mn_call *call = (mn_call *)args;
    if (call->L == 0) call->L = call->T;
    if (call->J == 0) call->J = call->H;
    if (traits->theta) {
        const bool turns = ((const mn_in *)(args + traits->theta))->data != NULL;
        const bool fits = call->K <= INT64_MAX / 2;    // else its product with others is refused
        call->R = turns && fits ? 2 * call->K : call->K;
    }
}

/* The columns of the operator's row, and its own check. */
static mn_status check_traits(mn_op_id op, const char *name, const void *args) {
    const mn_op_traits *traits = mn_op_traits_of(op);
    mn_status st = check_counts(name, traits, args);
    if (st == MN_OK) st = check_keys(name, traits, args);
    if (st == MN_OK) st = check_params(op, args);
    if (st == MN_OK) st = check_pairs(name, traits, args);
    if (st == MN_OK && traits->check) st = traits->check(args);
    return st;
}

mn_status mn_validate_sizes(mn_op_id op, void *args, bool backward) {
    const char *name = mn_op_describe(op)->name;
    const mn_call *call = args;
    const int decay = mn_args_decay(op, args);
    const char *forward_only = mn_op_traits_of(op)->forward_only;
    if (backward && forward_only) {
        return mn_fail(MN_ERR_UNSUPPORTED, "%s: %s", name, forward_only);
    }
    mn_status st = check_sizes(name, call);
    if (st == MN_OK) st = check_packing(name, call);
    if (st == MN_OK) {
        derive_sizes(mn_op_traits_of(op), args);
        st = check_traits(op, name, args);
    }
    if (st == MN_OK && (decay < MN_DECAY_NONE || decay > MN_DECAY_CHANNEL)) {
        st = mn_fail(MN_ERR_ARGUMENT, "%s: decay is %d, not one of mn_decay", name, decay);
    }
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; st == MN_OK && i < count; i++) {
        st = check_view(name, &fields[i], decay, call, args, backward);
    }
    return st;
}

mn_status mn_validate(mn_op_id op, void *args, bool backward) {
    mn_status st = mn_validate_sizes(op, args, backward);
    if (st == MN_OK) st = mn_check_overlap(op, args, backward);
    const char *name = mn_op_describe(op)->name;
    const int decay = mn_args_decay(op, args);
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; st == MN_OK && i < count; i++) {
        st = check_values(name, &fields[i], decay, args, args);
    }
    return st;
}
