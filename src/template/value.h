/* value.h - values of a template: those of Python that it can make, none of which changes.
 *
 * All memory is of the store of one rendering and ends with it. A NULL value means failure: the
 * message was set by fail(). */
#ifndef MN_TEMPLATE_VALUE_H
#define MN_TEMPLATE_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/utf8.h"
#include "template/store.h"

typedef enum value_kind {
    K_UNDEFINED, K_NONE, K_BOOL, K_INT, K_FLOAT, K_STRING, K_LIST, K_TUPLE, K_DICT, K_VIEW,
    K_RANGE, K_ITERATOR, K_NAMESPACE, K_GLOBAL, K_METHOD, K_MACRO, K_LOOP, K_CYCLER, K_JOINER,
    K_COUNT,
} value_kind;

typedef struct value value;
typedef struct state state;

/* Text of `size` bytes of UTF-8, with the number of its code points (-1: not counted yet). */
typedef struct string {
    const char *bytes;
    size_t size;
    int64_t points;
} string;

typedef struct items {
    value **at;
    int64_t n;
} items;

typedef struct dict_slot {
    value *key, *item;
    uint64_t hash;
} dict_slot;

/* Members in the order of their first insertion, found through an open hash table. */
typedef struct dict {
    dict_slot *slots;
    int64_t n, room;
    int32_t *table;             // -1: free; NULL while there are few
    int64_t table_size;
} dict;

typedef enum view_kind { VIEW_KEYS, VIEW_VALUES, VIEW_ITEMS } view_kind;

typedef struct view {
    view_kind which;
    dict *of;
} view;

typedef struct range {
    int64_t from, to, step, n;
} range;

/* Arguments of a call: by place, then by name. */
typedef struct arguments {
    value **at;
    int64_t n;
    value **names, **named;
    int64_t n_named;
} arguments;

typedef struct iterator iterator;

/* Something that is stepped through once. Gives NULL and no failure at the end. */
struct iterator {
    value *(*next)(state *s, iterator *it);
    value *source;              // what the place counts in, or NULL
    iterator *from;             // what it takes items from, or NULL
    int64_t place;
    void *more;                 // of its kind
    value *held;                // of reversed text and the like
};

/* Why something is undefined: a hint, or a name of an object. */
typedef struct undefined {
    const char *hint;           // NULL: by name and object
    value *name;
    value *object;              // NULL: a variable
} undefined;

typedef struct method_row method_row;
typedef struct global_row global_row;
typedef struct macro macro;
typedef struct loop_state loop_state;

struct value {
    value_kind kind;
    bool grouped;               // a tuple of groupby: grouper and list
    union {
        bool yes;
        int64_t whole;
        double real;
        string text;
        items list;
        dict *members;          // also of a namespace
        view view;
        range range;
        iterator *iterator;
        undefined undefined;
        const global_row *global;
        struct {
            const method_row *row;
            value *self;
        } method;
        macro *macro;
        loop_state *loop;
        struct {
            items items;
            int64_t place;
        } cycler;
        struct {
            value *separator;
            bool used;
        } joiner;
    };
};

/* ---- making ---------------------------------------------------------------------------------- */

extern value mn_value_none, mn_value_true, mn_value_false;

value *new_value(state *s, value_kind kind);
value *new_bool(bool yes);
value *new_int(state *s, int64_t whole);
value *new_float(state *s, double real);
value *new_string(state *s, const char *bytes, size_t size);      // copied
value *new_text(state *s, const char *text);                      // copied
value *lent_string(state *s, const char *bytes, size_t size);     // not copied
value *new_list(state *s, value_kind kind, int64_t n);    // a list or tuple, items unset
value *new_undefined(state *s, const char *hint, value *name, value *object);
value *new_iterator(state *s, value *(*next)(state *s, iterator *it));
value *pair_of(state *s, value *a, value *b);                     // a tuple

/* A list that grows; `at` moves. */
bool push(state *s, items *list, value *item);
value *list_of(state *s, const items *list);

/* ---- dictionaries ---------------------------------------------------------------------------- */

value *new_dict(state *s);
bool dict_set(state *s, dict *d, value *key, value *item);
bool dict_set_text(state *s, dict *d, const char *key, value *item);

/* NULL without failure where there is none; keys that cannot be one fail. */
value *dict_get(state *s, const dict *d, value *key);
value *dict_get_text(const dict *d, const char *key, size_t size);
bool hashable(const value *v);

/* ---- strings --------------------------------------------------------------------------------- */

int64_t string_points(state *s, value *v);
bool string_is(const value *v, const char *text);
value *string_cut(state *s, value *v, int64_t from, int64_t to);    // by code points, in bounds

/* ---- Python's view of them ------------------------------------------------------------------- */

const char *type_name(const value *v);
bool truth(state *s, const value *v);
int64_t length_of(state *s, value *v);      // -1: has none; no failure
bool is_number(const value *v);             // bool, int, float
bool whole_of(const value *v, int64_t *out);    // bool or int
double real_of(const value *v);
bool equal(state *s, const value *a, const value *b);
bool same(const value *a, const value *b);

/* -1, 0, 1 by `out`; 2 where one is no number. False: they have no order, and it failed. */
bool order(state *s, const value *a, const value *b, const char *sign, int *out);

value *string_of(state *s, value *v);       // str()
value *repr_of(state *s, value *v);         // repr()
size_t real_text(char out[40], double real);

/* ---- iteration ------------------------------------------------------------------------------- */

/* A way through `v`; NULL and failure where there is none. */
iterator *iterate(state *s, value *v);
bool iterable(const value *v);
value *next_item(state *s, iterator *it);
bool collect(state *s, items *out, value *v);    // all that is left

/* ---- failure --------------------------------------------------------------------------------- */

bool failed(const state *s);
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
value *fail(state *s, const char *format, ...);

/* Fails over an undefined value, in the words of what it is. */
value *fail_undefined(state *s, const value *v);

/* Counts work against the limit. */
bool spend(state *s, int64_t steps);
bool spend_bytes(state *s, size_t bytes);

#endif
