/* methods.c - methods of Python's str, list, tuple, range and dict. */
#include <math.h>
#include <string.h>

#include "base/utf8.h"
#include "template/library/rows.h"

/* ---- arguments ------------------------------------------------------------------------------- */

bool given(const value *v) {
    return v && v->kind != K_NONE;
}

bool yes_or(state *s, const value *v, bool none) {
    return v ? truth(s, v) : none;
}

bool want_whole(state *s, int64_t *out, const value *v, int64_t none) {
    if (!v) {
        *out = none;
        return true;
    }
    if (whole_of(v, out)) return true;
    if (v->kind == K_UNDEFINED) fail_undefined(s, v);
    else fail(s, "'%s' object cannot be interpreted as an integer", type_name(v));
    return false;
}

bool want_string(state *s, const string **out, const value *v) {
    if (v->kind == K_STRING) {
        *out = &v->text;
        return true;
    }
    fail(s, "expected str, not %s", type_name(v));
    return false;
}

static value *cut(state *s, const string *t, size_t from, size_t to) {
    return lent_string(s, t->bytes + from, to - from);
}

/* ---- case ------------------------------------------------------------------------------------ */

static value *in_case(state *s, const value *v, letter_case to) {
    maker m = { .s = s };
    put_case(&m, v->text.bytes, v->text.size, to);
    return made(&m);
}

value *lower_of(state *s, value *v) {
    return v->kind == K_STRING ? in_case(s, v, CASE_LOWER) : v;
}

value *method_lower(state *s, value **a, const arguments *all) {
    (void)all;
    return in_case(s, a[0], CASE_LOWER);
}

value *method_upper(state *s, value **a, const arguments *all) {
    (void)all;
    return in_case(s, a[0], CASE_UPPER);
}

/* As lower case, with what folds otherwise of the Latin, Greek and ligature letters. */
value *method_casefold(state *s, value **a, const arguments *all) {
    maker m = { .s = s };
    const string *t = &a[0]->text;
    (void)all;
    for (size_t at = 0; at < t->size;) {
        uint32_t point;
        const int n = mn_utf8_take(t->bytes + at, t->size - at, &point);
        if (point == 0xDF || point == 0x1E9E) put_text(&m, "ss");
        else if (point == 0x3C2) put_point(&m, 0x3C3);
        else if (point == 0x3A3) put_point(&m, 0x3C3);
        else put_case(&m, t->bytes + at, (size_t)n, CASE_LOWER);
        at += (size_t)n;
    }
    return made(&m);
}

value *method_capitalize(state *s, value **a, const arguments *all) {
    maker m = { .s = s };
    const string *t = &a[0]->text;
    uint32_t point;
    (void)all;
    const size_t n = t->size ? (size_t)mn_utf8_take(t->bytes, t->size, &point) : 0;
    put_case(&m, t->bytes, n, CASE_TITLE);
    put_case(&m, t->bytes + n, t->size - n, CASE_LOWER);
    return made(&m);
}

static bool cased(uint32_t point) {
    return is_lower(point) || is_upper(point) || (point >= 0x1C5 && point <= 0x1F2 &&
           (point == 0x1C5 || point == 0x1C8 || point == 0x1CB || point == 0x1F2));
}

value *method_title(state *s, value **a, const arguments *all) {
    maker m = { .s = s };
    const string *t = &a[0]->text;
    bool within = false;
    (void)all;
    for (size_t at = 0; at < t->size;) {
        uint32_t point;
        const int n = mn_utf8_take(t->bytes + at, t->size - at, &point);
        put_case(&m, t->bytes + at, (size_t)n, within ? CASE_LOWER : CASE_TITLE);
        within = cased(point);
        at += (size_t)n;
    }
    return made(&m);
}

value *method_swapcase(state *s, value **a, const arguments *all) {
    maker m = { .s = s };
    const string *t = &a[0]->text;
    (void)all;
    for (size_t at = 0; at < t->size;) {
        uint32_t point;
        const int n = mn_utf8_take(t->bytes + at, t->size - at, &point);
        put_case(&m, t->bytes + at, (size_t)n, is_upper(point) ? CASE_LOWER : CASE_UPPER);
        at += (size_t)n;
    }
    return made(&m);
}

/* ---- questions ------------------------------------------------------------------------------- */

static value *all_are(state *s, const value *v, bool (*is)(uint32_t), bool empty) {
    const string *t = &v->text;
    spend_bytes(s, t->size);
    for (size_t at = 0; at < t->size;) {
        uint32_t point;
        at += (size_t)mn_utf8_take(t->bytes + at, t->size - at, &point);
        if (!is(point)) return new_bool(false);
    }
    return new_bool(t->size > 0 || empty);
}

/* Cased letters of one kind only, and one at least. */
static value *letters_are(const value *v, bool (*is)(uint32_t), bool (*not)(uint32_t)) {
    const string *t = &v->text;
    bool any = false;
    for (size_t at = 0; at < t->size;) {
        uint32_t point;
        at += (size_t)mn_utf8_take(t->bytes + at, t->size - at, &point);
        if (not(point) || (cased(point) && !is(point))) return new_bool(false);
        any |= is(point);
    }
    return new_bool(any);
}

static bool alphanumeric(uint32_t point) {
    return is_alphabetic(point) || is_numeric(point);
}

static bool ascii(uint32_t point) {
    return point < 0x80;
}

#define ALL_ARE(name, is, empty)                                                                   \
    value *method_##name(state *s, value **a, const arguments *all) {                              \
        (void)all;                                                                                 \
        return all_are(s, a[0], is, empty);                                                        \
    }

ALL_ARE(isalnum, alphanumeric, false)
ALL_ARE(isalpha, is_alphabetic, false)
ALL_ARE(isascii, ascii, true)
ALL_ARE(isdecimal, is_decimal, false)
ALL_ARE(isdigit, is_digit, false)
ALL_ARE(isnumeric, is_numeric, false)
ALL_ARE(isprintable, is_printable, true)
ALL_ARE(isspace, is_blank, false)

value *method_isidentifier(state *s, value **a, const arguments *all) {
    const string *t = &a[0]->text;
    (void)all;
    uint32_t point = 0;
    if (t->size) mn_utf8_take(t->bytes, t->size, &point);
    if (point != '_' && !is_alphabetic(point)) return new_bool(false);
    return all_are(s, a[0], is_word, false);
}

value *method_islower(state *s, value **a, const arguments *all) {
    (void)s, (void)all;
    return letters_are(a[0], is_lower, is_upper);
}

value *method_isupper(state *s, value **a, const arguments *all) {
    (void)s, (void)all;
    return letters_are(a[0], is_upper, is_lower);
}

value *method_istitle(state *s, value **a, const arguments *all) {
    const string *t = &a[0]->text;
    bool within = false, any = false;
    (void)s, (void)all;
    for (size_t at = 0; at < t->size;) {
        uint32_t point;
        at += (size_t)mn_utf8_take(t->bytes + at, t->size - at, &point);
        const bool up = is_upper(point) || (cased(point) && !is_lower(point));
        if ((up && within) || (is_lower(point) && !within)) return new_bool(false);
        any |= up || is_lower(point);
        within = cased(point);
    }
    return new_bool(any);
}

/* ---- blanks and padding ---------------------------------------------------------------------- */

static bool strips(const string *chars, const char *at, size_t n, uint32_t point) {
    if (!chars) return is_blank(point);
    for (size_t i = 0; i + n <= chars->size; i++) {
        if (memcmp(chars->bytes + i, at, n) == 0) return true;
    }
    return false;
}

value *strip_string(state *s, value *v, const value *chars, bool left, bool right) {
    const string *t = &v->text, *set = NULL;
    size_t from = 0, to = t->size;
    uint32_t point;
    if (given(chars)) {
        if (chars->kind != K_STRING) return fail(s, "strip arg must be None or str");
        set = &chars->text;
    }
    while (left && from < to) {
        const size_t n = (size_t)mn_utf8_take(t->bytes + from, to - from, &point);
        if (!strips(set, t->bytes + from, n, point)) break;
        from += n;
    }
    while (right && to > from) {
        size_t at = to - 1;
        while (at > from && ((uint8_t)t->bytes[at] & 0xC0) == 0x80) at--;
        mn_utf8_take(t->bytes + at, to - at, &point);
        if (!strips(set, t->bytes + at, to - at, point)) break;
        to = at;
    }
    if (!spend_bytes(s, t->size - (to - from) + (set ? set->size : 0))) return NULL;
    return to - from == t->size ? v : cut(s, t, from, to);
}

value *method_strip(state *s, value **a, const arguments *all) {
    (void)all;
    return strip_string(s, a[0], a[1], true, true);
}

value *method_lstrip(state *s, value **a, const arguments *all) {
    (void)all;
    return strip_string(s, a[0], a[1], true, false);
}

value *method_rstrip(state *s, value **a, const arguments *all) {
    (void)all;
    return strip_string(s, a[0], a[1], false, true);
}

/* side: -1 the text is left, 0 in the middle, 1 right */
value *pad_string(state *s, value *of, int64_t width, const value *fill, int side) {
    const int64_t n = string_points(s, of), more = width - n;
    const string blank = { " ", 1, 1 }, *with = fill ? &fill->text : &blank;
    if (fill && (fill->kind != K_STRING || string_points(s, (value *)fill) != 1)) {
        return fail(s, "the fill character must be exactly one character long");
    }
    if (more <= 0) return of;
    if (more > (int64_t)(s->most_bytes / 4)) return fail(s, "a padded text is over the limit");
    const int64_t left = side < 0 ? 0 : side > 0 ? more : more / 2 + (more & width & 1);
    maker m = { .s = s };
    for (int64_t i = 0; i < left; i++) put(&m, with->bytes, with->size);
    put(&m, of->text.bytes, of->text.size);
    for (int64_t i = left; i < more; i++) put(&m, with->bytes, with->size);
    return made(&m);
}

static value *pad(state *s, value **a, int side) {
    int64_t width;
    return want_whole(s, &width, a[1], 0) ? pad_string(s, a[0], width, a[2], side) : NULL;
}

value *method_center(state *s, value **a, const arguments *all) {
    (void)all;
    return pad(s, a, 0);
}

value *method_ljust(state *s, value **a, const arguments *all) {
    (void)all;
    return pad(s, a, -1);
}

value *method_rjust(state *s, value **a, const arguments *all) {
    (void)all;
    return pad(s, a, 1);
}

value *method_zfill(state *s, value **a, const arguments *all) {
    int64_t width;
    const string *t = &a[0]->text;
    (void)all;
    if (!want_whole(s, &width, a[1], 0)) return NULL;
    const int64_t more = width - string_points(s, a[0]);
    if (more <= 0) return a[0];
    if (more > (int64_t)(s->most_bytes / 4)) return fail(s, "a padded text is over the limit");
    const size_t sign = t->size && (t->bytes[0] == '-' || t->bytes[0] == '+');
    maker m = { .s = s };
    put(&m, t->bytes, sign);
    put_fill(&m, '0', more);
    put(&m, t->bytes + sign, t->size - sign);
    return made(&m);
}

value *method_expandtabs(state *s, value **a, const arguments *all) {
    int64_t width, column = 0;
    const string *t = &a[0]->text;
    maker m = { .s = s };
    (void)all;
    if (!want_whole(s, &width, a[1], 8)) return NULL;
    if (width > 1 << 20) return fail(s, "a text with tabs is over the limit");
    for (size_t at = 0; at < t->size && !m.failed;) {
        uint32_t point;
        const int n = mn_utf8_take(t->bytes + at, t->size - at, &point);
        if (point == '\t') {
            const int64_t more = width > 0 ? width - column % width : 0;
            put_fill(&m, ' ', more);
            column += more;
        } else {
            put(&m, t->bytes + at, (size_t)n);
            column = point == '\n' || point == '\r' ? 0 : column + 1;
        }
        at += (size_t)n;
    }
    return made(&m);
}

/* ---- finding --------------------------------------------------------------------------------- */

static const char *find_first(const char *in, size_t size, const string *what) {
    while (size >= what->size) {
        if (!what->size) return in;
        const char *at = memchr(in, what->bytes[0], size - what->size + 1);
        if (!at) return NULL;
        if (memcmp(at, what->bytes, what->size) == 0) return at;
        size -= (size_t)(at + 1 - in);
        in = at + 1;
    }
    return NULL;
}

static const char *find_last(const char *in, size_t size, const string *what) {
    if (size < what->size) return NULL;
    for (const char *at = in + size - what->size;; at--) {
        if (!what->size || memcmp(at, what->bytes, what->size) == 0) return at;
        if (at == in) return NULL;
    }
}

/* The part [from, to) that a[2], a[3] ask for, as Python clips it; false: from lies behind. */
static bool part(state *s, value **a, value **out, int64_t *from) {
    int64_t to;
    const int64_t n = string_points(s, a[0]);
    if (!want_whole(s, from, given(a[2]) ? a[2] : NULL, 0) ||
        !want_whole(s, &to, given(a[3]) ? a[3] : NULL, n)) return false;
    if (to > n) to = n;
    if (to < 0 && (to += n) < 0) to = 0;
    if (*from < 0 && (*from += n) < 0) *from = 0;
    *out = *from > n || *from > to ? NULL : string_cut(s, a[0], *from, to);
    return !failed(s);
}

/* The place of a[1] as code points, -1 where there is none; -2: failed. */
static int64_t place_of(state *s, value **a, bool last) {
    value *in;
    int64_t from;
    const string *what;
    if (!want_string(s, &what, a[1]) || !part(s, a, &in, &from)) return -2;
    if (!in) return -1;
    const string *t = &in->text;
    spend(s, (int64_t)(t->size / 64 + 1) * (int64_t)(what->size / 64 + 1));
    const char *at = last ? find_last(t->bytes, t->size, what) : find_first(t->bytes, t->size,
                                                                            what);
    if (!at) return -1;
    value *before = lent_string(s, t->bytes, (size_t)(at - t->bytes));
    return before ? from + string_points(s, before) : -2;
}

value *method_find(state *s, value **a, const arguments *all) {
    (void)all;
    const int64_t at = place_of(s, a, false);
    return at == -2 ? NULL : new_int(s, at);
}

value *method_rfind(state *s, value **a, const arguments *all) {
    (void)all;
    const int64_t at = place_of(s, a, true);
    return at == -2 ? NULL : new_int(s, at);
}

value *method_rindex(state *s, value **a, const arguments *all) {
    (void)all;
    const int64_t at = place_of(s, a, true);
    if (at == -1) return fail(s, "substring not found");
    return at == -2 ? NULL : new_int(s, at);
}

static value *index_of_item(state *s, value **a) {
    int64_t from, to;
    iterator *it = iterate(s, a[0]);
    if (!it || !want_whole(s, &from, a[2], 0) || !want_whole(s, &to, a[3], INT64_MAX)) return NULL;
    const int64_t n = length_of(s, a[0]);
    if (from < 0 && (from += n) < 0) from = 0;
    if (to < 0) to += n;
    int64_t at = 0;
    for (value *v; (v = next_item(s, it)); at++) {
        if (at >= from && at < to && equal(s, v, a[1])) return new_int(s, at);
    }
    return fail(s, "the value is not in the %s", type_name(a[0]));
}

value *method_index(state *s, value **a, const arguments *all) {
    (void)all;
    if (a[0]->kind != K_STRING) return index_of_item(s, a);
    const int64_t at = place_of(s, a, false);
    if (at == -1) return fail(s, "substring not found");
    return at == -2 ? NULL : new_int(s, at);
}

value *method_count(state *s, value **a, const arguments *all) {
    int64_t n = 0, from;
    const string *what;
    value *in;
    (void)all;
    if (a[0]->kind != K_STRING) {
        iterator *it = iterate(s, a[0]);
        for (value *v; it && (v = next_item(s, it));) n += equal(s, v, a[1]);
        return failed(s) ? NULL : new_int(s, n);
    }
    if (!want_string(s, &what, a[1]) || !part(s, a, &in, &from)) return NULL;
    if (!in) return new_int(s, 0);
    if (!what->size) return new_int(s, string_points(s, in) + 1);
    const char *at = in->text.bytes, *end = at + in->text.size;
    for (; (at = find_first(at, (size_t)(end - at), what)); at += what->size) n++;
    return spend_bytes(s, in->text.size) ? new_int(s, n) : NULL;
}

static value *at_edge(state *s, value **a, bool end) {
    value *in, *one = a[1];
    int64_t from;
    items what = { &one, 1 };
    if (a[1]->kind == K_TUPLE) what = a[1]->list;
    if (!part(s, a, &in, &from)) return NULL;
    for (int64_t i = 0; i < what.n; i++) {
        if (what.at[i]->kind != K_STRING) {
            return fail(s, "%s first arg must be str or a tuple of str, not %s",
                        end ? "endswith" : "startswith", type_name(what.at[i]));
        }
        const string *t = &what.at[i]->text;
        if (!in || t->size > in->text.size) continue;
        const char *at = in->text.bytes + (end ? in->text.size - t->size : 0);
        if (memcmp(at, t->bytes, t->size) == 0) return &mn_value_true;
    }
    return &mn_value_false;
}

value *method_startswith(state *s, value **a, const arguments *all) {
    (void)all;
    return at_edge(s, a, false);
}

value *method_endswith(state *s, value **a, const arguments *all) {
    (void)all;
    return at_edge(s, a, true);
}

value *method_removeprefix(state *s, value **a, const arguments *all) {
    const string *what, *t = &a[0]->text;
    (void)all;
    if (!want_string(s, &what, a[1])) return NULL;
    const bool there = what->size <= t->size && memcmp(t->bytes, what->bytes, what->size) == 0;
    return there ? cut(s, t, what->size, t->size) : a[0];
}

value *method_removesuffix(state *s, value **a, const arguments *all) {
    const string *what, *t = &a[0]->text;
    (void)all;
    if (!want_string(s, &what, a[1])) return NULL;
    const bool there = what->size <= t->size &&
                       memcmp(t->bytes + t->size - what->size, what->bytes, what->size) == 0;
    return there ? cut(s, t, 0, t->size - what->size) : a[0];
}

/* ---- cutting and joining --------------------------------------------------------------------- */

static bool add_part(state *s, items *list, const char *from, const char *to) {
    return push(s, list, lent_string(s, from, (size_t)(to - from)));
}

static bool split_by(state *s, items *out, const string *t, const string *by, int64_t most) {
    const char *from = t->bytes, *end = from + t->size, *at;
    for (; most != 0 && (at = find_first(from, (size_t)(end - from), by)); most--) {
        if (!add_part(s, out, from, at)) return false;
        from = at + by->size;
    }
    return add_part(s, out, from, end);
}

static void reverse(items *list) {
    for (int64_t i = 0, k = list->n - 1; i < k; i++, k--) {
        value *v = list->at[i];
        list->at[i] = list->at[k];
        list->at[k] = v;
    }
}

static bool rsplit_by(state *s, items *out, const string *t, const string *by, int64_t most) {
    const char *from = t->bytes, *end = from + t->size, *at;
    for (; most != 0 && (at = find_last(from, (size_t)(end - from), by)); most--) {
        if (!add_part(s, out, at + by->size, end)) return false;
        end = at;
    }
    if (!add_part(s, out, from, end)) return false;
    reverse(out);
    return true;
}

static bool split_blanks(state *s, items *out, value *of, int64_t most) {
    value *rest = strip_string(s, of, NULL, true, false);
    while (rest && rest->text.size) {
        const string *t = &rest->text;
        size_t at = 0;
        uint32_t point;
        if (most-- == 0) {
            rest = strip_string(s, rest, NULL, false, true);
            return rest && push(s, out, rest);
        }
        while (at < t->size) {
            const int n = mn_utf8_take(t->bytes + at, t->size - at, &point);
            if (is_blank(point)) break;
            at += (size_t)n;
        }
        if (!push(s, out, cut(s, t, 0, at))) return false;
        rest = cut(s, t, at, t->size);
        if (rest) rest = strip_string(s, rest, NULL, true, false);
    }
    return rest != NULL;
}

static bool rsplit_blanks(state *s, items *out, value *of, int64_t most) {
    value *rest = strip_string(s, of, NULL, false, true);
    while (rest && rest->text.size) {
        const string *t = &rest->text;
        size_t from = t->size;
        uint32_t point;
        if (most-- == 0) {
            rest = strip_string(s, rest, NULL, true, false);
            if (!rest || !push(s, out, rest)) return false;
            break;
        }
        while (from > 0) {
            size_t at = from - 1;
            while (at > 0 && ((uint8_t)t->bytes[at] & 0xC0) == 0x80) at--;
            mn_utf8_take(t->bytes + at, from - at, &point);
            if (is_blank(point)) break;
            from = at;
        }
        if (!push(s, out, cut(s, t, from, t->size))) return false;
        rest = cut(s, t, 0, from);
        if (rest) rest = strip_string(s, rest, NULL, false, true);
    }
    reverse(out);
    return rest != NULL;
}

static value *split(state *s, value **a, bool right) {
    items out = { 0 };
    const string *by;
    int64_t most;
    bool ok;
    if (!want_whole(s, &most, a[2], -1)) return NULL;
    spend_bytes(s, a[0]->text.size);
    if (!given(a[1])) {
        ok = right ? rsplit_blanks(s, &out, a[0], most) : split_blanks(s, &out, a[0], most);
        return ok ? list_of(s, &out) : NULL;
    }
    if (!want_string(s, &by, a[1])) return NULL;
    if (!by->size) return fail(s, "empty separator");
    ok = right ? rsplit_by(s, &out, &a[0]->text, by, most) : split_by(s, &out, &a[0]->text, by,
                                                                      most);
    return ok ? list_of(s, &out) : NULL;
}

value *method_split(state *s, value **a, const arguments *all) {
    (void)all;
    return split(s, a, false);
}

value *method_rsplit(state *s, value **a, const arguments *all) {
    (void)all;
    return split(s, a, true);
}

static value *parts(state *s, value **a, bool right) {
    const string *by, *t = &a[0]->text;
    if (!want_string(s, &by, a[1])) return NULL;
    if (!by->size) return fail(s, "empty separator");
    spend_bytes(s, t->size);
    const char *at = right ? find_last(t->bytes, t->size, by) : find_first(t->bytes, t->size, by);
    value *out = new_list(s, K_TUPLE, 3), *none = lent_string(s, "", 0);
    if (!out || !none) return NULL;
    const size_t from = at ? (size_t)(at - t->bytes) : 0;
    out->list.at[0] = at ? cut(s, t, 0, from) : right ? none : a[0];
    out->list.at[1] = at ? a[1] : none;
    out->list.at[2] = at ? cut(s, t, from + by->size, t->size) : right ? a[0] : none;
    return failed(s) ? NULL : out;
}

value *method_partition(state *s, value **a, const arguments *all) {
    (void)all;
    return parts(s, a, false);
}

value *method_rpartition(state *s, value **a, const arguments *all) {
    (void)all;
    return parts(s, a, true);
}

static bool breaks_line(uint32_t point) {
    return (point >= '\n' && point <= '\r') || (point >= 0x1C && point <= 0x1E) || point == 0x85 ||
           point == 0x2028 || point == 0x2029;
}

value *split_lines(state *s, value *of, bool keep) {
    items out = { 0 };
    const string *t = &of->text;
    size_t from = 0, at = 0;
    while (at < t->size) {
        uint32_t point;
        size_t next = at + (size_t)mn_utf8_take(t->bytes + at, t->size - at, &point);
        if (breaks_line(point)) {
            if (point == '\r' && next < t->size && t->bytes[next] == '\n') next++;
            if (!push(s, &out, cut(s, t, from, keep ? next : at))) return NULL;
            from = next;
        }
        at = next;
    }
    if (from < t->size && !push(s, &out, cut(s, t, from, t->size))) return NULL;
    return spend_bytes(s, t->size) ? list_of(s, &out) : NULL;
}

value *method_splitlines(state *s, value **a, const arguments *all) {
    (void)all;
    return split_lines(s, a[0], yes_or(s, a[1], false));
}

value *replace_string(state *s, value *of, const string *old, const string *with, int64_t most) {
    const char *from = of->text.bytes, *end = from + of->text.size, *at;
    maker m = { .s = s };
    spend_bytes(s, of->text.size);
    if (!old->size) {
        for (; most != 0 && !m.failed; most--) {
            put(&m, with->bytes, with->size);
            if (from == end) break;
            uint32_t point;
            const int n = mn_utf8_take(from, (size_t)(end - from), &point);
            put(&m, from, (size_t)n);
            from += n;
        }
    } else {
        for (; most != 0 && !m.failed && (at = find_first(from, (size_t)(end - from),
                                                          old)); most--) {
            put(&m, from, (size_t)(at - from));
            put(&m, with->bytes, with->size);
            from = at + old->size;
        }
    }
    put(&m, from, (size_t)(end - from));
    return made(&m);
}

value *method_replace(state *s, value **a, const arguments *all) {
    const string *old, *with;
    int64_t most;
    (void)all;
    if (!want_string(s, &old, a[1]) || !want_string(s, &with, a[2]) ||
        !want_whole(s, &most, a[3], -1)) return NULL;
    return replace_string(s, a[0], old, with, most);
}

value *join_strings(state *s, const string *between, value *over, bool convert) {
    maker m = { .s = s };
    iterator *it = iterate(s, over);
    int64_t n = 0;
    for (value *v; it && (v = next_item(s, it)); n++) {
        if (v->kind != K_STRING && !convert) {
            return fail(s, "sequence item %lld: expected str instance, %s found", (long long)n,
                        type_name(v));
        }
        if (n) put(&m, between->bytes, between->size);
        if (!put_string_of(&m, v)) return NULL;
    }
    return failed(s) ? NULL : made(&m);
}

value *method_join(state *s, value **a, const arguments *all) {
    (void)all;
    if (!iterable(a[1])) return fail(s, "can only join an iterable");
    return join_strings(s, &a[0]->text, a[1], false);
}

value *method_format(state *s, value **a, const arguments *all) {
    return format_braces(s, a[0], all);
}

value *method_format_map(state *s, value **a, const arguments *all) {
    arguments named = { 0 };
    (void)all;
    if (a[1]->kind != K_DICT) return fail(s, "format_map() takes a mapping");
    named.n_named = a[1]->members->n;
    named.names = take(s, (size_t)named.n_named * sizeof *named.names + 1);
    named.named = take(s, (size_t)named.n_named * sizeof *named.named + 1);
    if (!named.names || !named.named) return NULL;
    for (int64_t i = 0; i < named.n_named; i++) {
        named.names[i] = a[1]->members->slots[i].key;
        named.named[i] = a[1]->members->slots[i].item;
    }
    return format_braces(s, a[0], &named);
}

/* ---- dictionaries, lists and numbers ----------------------------------------------------------
 * */

static value *view_of(state *s, value *v, view_kind which) {
    value *out = new_value(s, K_VIEW);
    if (out) out->view = (view){ which, v->members };
    return out;
}

value *method_keys(state *s, value **a, const arguments *all) {
    (void)all;
    return view_of(s, a[0], VIEW_KEYS);
}

value *method_values(state *s, value **a, const arguments *all) {
    (void)all;
    return view_of(s, a[0], VIEW_VALUES);
}

value *method_items(state *s, value **a, const arguments *all) {
    (void)all;
    return view_of(s, a[0], VIEW_ITEMS);
}

value *method_get(state *s, value **a, const arguments *all) {
    (void)all;
    value *v = dict_get(s, a[0]->members, a[1]);
    if (v || failed(s)) return v;
    return a[2] ? a[2] : &mn_value_none;
}

value *method_copy(state *s, value **a, const arguments *all) {
    (void)all;
    value *out = new_value(s, a[0]->kind);    // nothing changes: the insides are shared
    if (!out) return NULL;
    *out = *a[0];
    if (out->kind == K_LIST) {
        out = new_list(s, K_LIST, a[0]->list.n);
        for (int64_t i = 0; out && i < out->list.n; i++) out->list.at[i] = a[0]->list.at[i];
        return out;
    }
    dict *d = take(s, sizeof *d);
    if (!d) return NULL;
    *d = *a[0]->members;
    out->members = d;
    return out;
}

value *method_is_integer(state *s, value **a, const arguments *all) {
    (void)s, (void)all;
    return new_bool(isfinite(a[0]->real) && floor(a[0]->real) == a[0]->real);
}

value *method_bit_length(state *s, value **a, const arguments *all) {
    int64_t whole = 0, n = 0;
    (void)all;
    whole_of(a[0], &whole);
    for (uint64_t x = whole < 0 ? -(uint64_t)whole : (uint64_t)whole; x; x >>= 1) n++;
    return new_int(s, n);
}
