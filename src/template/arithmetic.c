/* arithmetic.c - the operators of Python between values. Whole numbers have 64 bits: what does not
 * fit fails instead of wrapping round. */
#include <math.h>
#include <string.h>

#include "template/state.h"

static value *too_large(state *s) {
    return fail(s, "a whole number has more than 64 bits");
}

static const char *sign_of(node_kind op) {
    switch (op) {
    case N_ADD: return "+";
    case N_SUBTRACT: return "-";
    case N_MULTIPLY: return "*";
    case N_DIVIDE: return "/";
    case N_FLOOR: return "//";
    case N_MODULO: return "%";
    default: return "** or pow()";
    }
}

static value *power_whole(state *s, int64_t a, int64_t b) {
    if (b < 0) {
        if (a == 0) return fail(s, "0.0 cannot be raised to a negative power");
        return new_float(s, pow((double)a, (double)b));
    }
    int64_t out = 1;
    if (a == 0 || a == 1) return new_int(s, b ? a : 1);
    if (a == -1) return new_int(s, b % 2 ? -1 : 1);
    for (; b > 0; b--) {
        if (__builtin_mul_overflow(out, a, &out)) return too_large(s);
    }
    return new_int(s, out);
}

static value *whole_numbers(state *s, node_kind op, int64_t a, int64_t b) {
    int64_t out;
    if (b == 0 && (op == N_DIVIDE || op == N_FLOOR || op == N_MODULO)) {
        return fail(s, op == N_DIVIDE ? "division by zero" : "integer division or modulo by zero");
    }
    switch (op) {
    case N_ADD: return __builtin_add_overflow(a, b, &out) ? too_large(s) : new_int(s, out);
    case N_SUBTRACT: return __builtin_sub_overflow(a, b, &out) ? too_large(s) : new_int(s, out);
    case N_MULTIPLY: return __builtin_mul_overflow(a, b, &out) ? too_large(s) : new_int(s, out);
    case N_DIVIDE: return new_float(s, (double)a / (double)b);
    case N_FLOOR:
        if (b == -1) return __builtin_sub_overflow((int64_t)0, a, &out) ? too_large(s)
                                                                        : new_int(s, out);
        return new_int(s, a / b - (a % b != 0 && (a < 0) != (b < 0)));
    case N_MODULO:
        if (b == -1) return new_int(s, 0);
        return new_int(s, a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0));
    default: return power_whole(s, a, b);
    }
}

/* Python's float modulo has the sign of the divisor, and // is the floor that goes with it. */
static double real_modulo(double a, double b, double *floored) {
    double rest = fmod(a, b), quotient = (a - rest) / b;
    if (rest != 0) {
        if ((b < 0) != (rest < 0)) {
            rest += b;
            quotient -= 1;
        }
    } else {
        rest = copysign(0, b);
    }
    if (quotient != 0) {
        *floored = floor(quotient);
        if (quotient - *floored > 0.5) *floored += 1;
    } else {
        *floored = copysign(0, a / b);
    }
    return rest;
}

static value *real_numbers(state *s, node_kind op, double a, double b) {
    double floored;
    if (b == 0 && (op == N_DIVIDE || op == N_FLOOR || op == N_MODULO)) {
        return fail(s, op == N_DIVIDE ? "float division by zero"
                       : op == N_FLOOR ? "float floor division by zero" : "float modulo");
    }
    switch (op) {
    case N_ADD: return new_float(s, a + b);
    case N_SUBTRACT: return new_float(s, a - b);
    case N_MULTIPLY: return new_float(s, a * b);
    case N_DIVIDE: return new_float(s, a / b);
    case N_FLOOR:
        real_modulo(a, b, &floored);
        return new_float(s, floored);
    case N_MODULO: return new_float(s, real_modulo(a, b, &floored));
    default: {
        if (a == 0 && b < 0) return fail(s, "0.0 cannot be raised to a negative power");
        const double out = pow(a, b);
        if (isnan(out) && !isnan(a) && !isnan(b)) return fail(s,
                                                              "complex numbers are not supported");
        if (isinf(out) && !isinf(a) && !isinf(b)) return fail(s, "Numerical result out of range");
        return new_float(s, out);
    }
    }
}

static value *repeat(state *s, value *what, int64_t n) {
    if (n < 0) n = 0;
    if (what->kind == K_STRING) {
        maker m = { .s = s };
        if (what->text.size && n > (int64_t)(s->most_bytes / what->text.size)) {
            return fail(s, "a repeated text is larger than the limit");
        }
        for (int64_t i = 0; what->text.size && i < n && !m.failed; i++) {
            put(&m, what->text.bytes, what->text.size);
        }
        return made(&m);
    }
    int64_t total;
    if (__builtin_mul_overflow(what->list.n, n, &total) || total > (int64_t)(s->most_bytes / 8)) {
        return fail(s, "a repeated list is larger than the limit");
    }
    value *out = new_list(s, what->kind, total);
    for (int64_t i = 0; out && i < total; i++) out->list.at[i] = what->list.at[i % what->list.n];
    return out;
}

value *concat(state *s, value *a, value *b) {
    const string *x = &a->text, *y = &b->text;
    if (!y->size) return a;
    if (!x->size) return b;
    if (!spend_bytes(s, y->size)) return NULL;
    char *bytes = store_grow(&s->texts, x->bytes, x->size, x->size + y->size);
    if (!bytes) return no_memory(s);
    memcpy(bytes + x->size, y->bytes, y->size);
    if (bytes != x->bytes && !spend_bytes(s, x->size)) return NULL;
    value *out = lent_string(s, bytes, x->size + y->size);
    if (out && x->points >= 0 && y->points >= 0) out->text.points = x->points + y->points;
    return out;
}

static value *concat_lists(state *s, value *a, value *b) {
    value *out = new_list(s, a->kind, a->list.n + b->list.n);
    if (!out) return NULL;
    for (int64_t i = 0; i < a->list.n; i++) out->list.at[i] = a->list.at[i];
    for (int64_t i = 0; i < b->list.n; i++) out->list.at[a->list.n + i] = b->list.at[i];
    return out;
}

static bool repeats(const value *v) {
    return v->kind == K_STRING || v->kind == K_LIST || v->kind == K_TUPLE;
}

/* dict | dict and the like are no operators of templates. */
value *arithmetic(state *s, node_kind op, value *a, value *b) {
    int64_t x, y;
    if (op == N_MODULO && a->kind == K_STRING) return format_percent(s, a, b);
    if (a->kind == K_UNDEFINED) return fail_undefined(s, a);
    if (b->kind == K_UNDEFINED) return fail_undefined(s, b);
    const bool wx = whole_of(a, &x), wy = whole_of(b, &y);
    if (wx && wy) return whole_numbers(s, op, x, y);
    if (is_number(a) && is_number(b)) return real_numbers(s, op, real_of(a), real_of(b));
    if (op == N_ADD && a->kind == b->kind && repeats(a)) {
        return a->kind == K_STRING ? concat(s, a, b) : concat_lists(s, a, b);
    }
    if (op == N_MULTIPLY && repeats(a) && wy) return repeat(s, a, y);
    if (op == N_MULTIPLY && repeats(b) && wx) return repeat(s, b, x);
    if (op == N_ADD && repeats(a)) {
        return fail(s, "can only concatenate %s (not \"%s\") to %s", type_name(a), type_name(b),
                    type_name(a));
    }
    return fail(s, "unsupported operand type(s) for %s: '%s' and '%s'", sign_of(op), type_name(a),
                type_name(b));
}

value *negative(state *s, value *a) {
    int64_t x;
    if (a->kind == K_UNDEFINED) return fail_undefined(s, a);
    if (a->kind == K_FLOAT) return new_float(s, -a->real);
    if (!whole_of(a, &x)) return fail(s, "bad operand type for unary -: '%s'", type_name(a));
    return x == INT64_MIN ? too_large(s) : new_int(s, -x);
}
