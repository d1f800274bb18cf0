/* tests.c - what stands behind `is`. */
#include <math.h>
#include <string.h>

#include "template/library/rows.h"

static value *remainder_is(state *s, value *of, value *by, int64_t wanted) {
    value *rest = arithmetic(s, N_MODULO, of, by);
    const value right = { .kind = K_INT, .whole = wanted };
    if (!rest) return NULL;
    const bool yes = equal(s, rest, &right);
    return failed(s) ? NULL : new_bool(yes);
}

value *test_odd(state *s, value **a, const arguments *all) {
    (void)all;
    return remainder_is(s, a[0], new_int(s, 2), 1);
}

value *test_even(state *s, value **a, const arguments *all) {
    (void)all;
    return remainder_is(s, a[0], new_int(s, 2), 0);
}

value *test_divisibleby(state *s, value **a, const arguments *all) {
    (void)all;
    return remainder_is(s, a[0], a[1], 0);
}

#define SIMPLE(name, condition)                                                                    \
    value *test_##name(state *s, value **a, const arguments *all) {                                \
        (void)s, (void)all;                                                                        \
        return new_bool(condition);                                                                \
    }

SIMPLE(defined, a[0]->kind != K_UNDEFINED)
SIMPLE(undefined, a[0]->kind == K_UNDEFINED)
SIMPLE(none, a[0]->kind == K_NONE)
SIMPLE(boolean, a[0]->kind == K_BOOL)
SIMPLE(false, a[0]->kind == K_BOOL && !a[0]->yes)
SIMPLE(true, a[0]->kind == K_BOOL && a[0]->yes)
SIMPLE(integer, a[0]->kind == K_INT)
SIMPLE(float, a[0]->kind == K_FLOAT)
SIMPLE(string, a[0]->kind == K_STRING)
SIMPLE(mapping, a[0]->kind == K_DICT)
SIMPLE(number, is_number(a[0]))
SIMPLE(iterable, iterable(a[0]))
SIMPLE(sameas, same(a[0], a[1]))
SIMPLE(escaped, false && a[0])

value *test_callable(state *s, value **a, const arguments *all) {
    (void)s, (void)all;
    const value_kind k = a[0]->kind;      // an undefined value has a __call__ that fails
    return new_bool(k == K_GLOBAL || k == K_METHOD || k == K_MACRO || k == K_LOOP ||
                    k == K_JOINER || k == K_UNDEFINED);
}

value *test_sequence(state *s, value **a, const arguments *all) {
    (void)s, (void)all;
    const value_kind k = a[0]->kind;
    return new_bool(k == K_STRING || k == K_LIST || k == K_TUPLE || k == K_DICT || k == K_RANGE ||
                    k == K_UNDEFINED);
}

static value *text_is(state *s, value *v, builtin run) {
    value *text = string_of(s, v);
    return text ? run(s, &text, NULL) : NULL;
}

value *test_lower(state *s, value **a, const arguments *all) {
    (void)all;
    return text_is(s, a[0], method_islower);
}

value *test_upper(state *s, value **a, const arguments *all) {
    (void)all;
    return text_is(s, a[0], method_isupper);
}

static bool is_key(state *s, const value *v) {
    if (!hashable(v)) fail(s, "unhashable type: '%s'", type_name(v));
    return !failed(s);
}

value *test_filter(state *s, value **a, const arguments *all) {
    (void)all;
    if (!is_key(s, a[0])) return NULL;
    return new_bool(a[0]->kind == K_STRING && find_filter(a[0]->text.bytes, a[0]->text.size));
}

value *test_test(state *s, value **a, const arguments *all) {
    (void)all;
    if (!is_key(s, a[0])) return NULL;
    return new_bool(a[0]->kind == K_STRING && find_test(a[0]->text.bytes, a[0]->text.size));
}

value *test_in(state *s, value **a, const arguments *all) {
    (void)all;
    return contains(s, a[0], a[1]);
}

value *test_eq(state *s, value **a, const arguments *all) {
    (void)all;
    const bool yes = equal(s, a[0], a[1]);
    return failed(s) ? NULL : new_bool(yes);
}

value *test_ne(state *s, value **a, const arguments *all) {
    (void)all;
    const bool yes = equal(s, a[0], a[1]);
    return failed(s) ? NULL : new_bool(!yes);
}

static value *ordered(state *s, value **a, const char *sign, bool less, bool also_equal) {
    int c;
    if (!order(s, a[0], a[1], sign, &c)) return NULL;
    if (c == 2) return new_bool(false);
    return new_bool((c == 0 && also_equal) || (c != 0 && (c < 0) == less));
}

value *test_gt(state *s, value **a, const arguments *all) {
    (void)all;
    return ordered(s, a, ">", false, false);
}

value *test_ge(state *s, value **a, const arguments *all) {
    (void)all;
    return ordered(s, a, ">=", false, true);
}

value *test_lt(state *s, value **a, const arguments *all) {
    (void)all;
    return ordered(s, a, "<", true, false);
}

value *test_le(state *s, value **a, const arguments *all) {
    (void)all;
    return ordered(s, a, "<=", true, true);
}
