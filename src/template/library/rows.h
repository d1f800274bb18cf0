/* rows.h - the functions that the tables name. */
#ifndef MN_TEMPLATE_ROWS_H
#define MN_TEMPLATE_ROWS_H

#include "template/state.h"

#define FILTER(name, run, parameters) \
    value *filter_##run(state *s, value **a, const arguments *all);
#include "template/library/filters.def"
#undef FILTER

#define TEST(name, run, parameters) value *test_##run(state *s, value **a, const arguments *all);
#include "template/library/tests.def"
#undef TEST

#define METHOD(kind, name, parameters) \
    value *method_##name(state *s, value **a, const arguments *all);
#include "template/library/methods.def"
#undef METHOD

#define GLOBAL(name, parameters) value *global_##name(state *s, value **a, const arguments *all);
#include "template/library/globals.def"
#undef GLOBAL

/* What several of them need. */
bool want_whole(state *s, int64_t *out, const value *v, int64_t none);
bool want_string(state *s, const string **out, const value *v);
bool given(const value *v);                             // there, and not None
bool yes_or(state *s, const value *v, bool none);
value *strip_string(state *s, value *v, const value *chars, bool left, bool right);
value *lower_of(state *s, value *v);                    // texts in lower case, others as they are
value *replace_string(state *s, value *of, const string *old, const string *with, int64_t most);
value *split_lines(state *s, value *of, bool keep);
value *join_strings(state *s, const string *between, value *over, bool convert);
value *pad_string(state *s, value *of, int64_t width, const value *fill, int side);
bool sort_values(state *s, items *list, items *keys, bool reverse);

/* An attribute by its dotted name, a number or None, of many items. */
typedef struct getter {
    items parts;
    value *otherwise;           // where it is undefined, or NULL
    bool lower;
} getter;

bool read_getter(state *s, getter *out, value *attribute, bool lower, value *otherwise);
value *get_part(state *s, const getter *g, value *of);

#endif
