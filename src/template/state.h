/* state.h - one parsing or one rendering under way. */
#ifndef MN_TEMPLATE_STATE_H
#define MN_TEMPLATE_STATE_H

#include "io/text.h"
#include "template/node.h"

enum {
    MOST_NESTING = 150,         // of expressions and blocks in the text
    MOST_DEPTH = 600,           // of evaluation: nesting, macros and recursive loops together
    MOST_MACROS = 100,          // calls within calls
    MOST_RANGE = 100000,
};

/* Variables of a function that runs. */
typedef struct frame {
    struct frame *outer;        // of the function it stands in
    const function *function;
    value **slots;
} frame;

struct macro {
    const node *node;
    frame *outer;
    const char *name;           // NULL: body of a call block
    bool takes_caller, explicit_caller;
};

struct loop_state {
    iterator *from;
    value *over;                // what has a length, or NULL
    int64_t index0, length;     // -1: not known
    value *before, *current, *after;
    bool peeked, ended;
    value *last_changed;
    int depth0;
    const node *recursive;      // NULL: not
    frame *frame;               // the frame the recursive loop stands in
};

struct state {
    store *store;
    store own;                  // values of a rendering
    store texts;                // bytes of strings that are made
    const char *name;
    int line;
    mn_status status;
    char message[600];
    int64_t steps;              // left
    int depth, macros;
    size_t most_output, most_bytes;
    mn_text out;
    dict *globals;              // variables the template was given
    dict *exported;             // what it set at its top
    value *captured;            // what a filter without an input takes
    frame *frame;
};

/* ---- evaluation ------------------------------------------------------------------------------ */

value *evaluate(state *s, const node *n);
bool render_root(state *s, const mn_jinja *t);

typedef enum outcome { GO_ON, GO_BREAK, GO_CONTINUE, GO_FAILED } outcome;
outcome run_body(state *s, const nodes *body);
outcome run_loop(state *s, const node *n);
bool enter_scope(state *s, const load *loads);
bool assign(state *s, const node *target, value *v, bool top);
frame *new_frame(state *s, frame *outer, const function *f);
value **slot_of(state *s, const ident *i);
value *capture(state *s, size_t from);          // the output behind `from`, taken back
value *evaluate_call(state *s, const node *n, value *caller);
value *call_value(state *s, value *f, const arguments *a);
value *call_macro(state *s, macro *m, const arguments *a);
value *run_recursive(state *s, loop_state *outer, value *over);

/* ---- attributes ------------------------------------------------------------------------------ */

value *get_attribute(state *s, value *of, value *name);
value *get_item(state *s, value *of, value *key);
value *get_slice(state *s, value *of, value *from, value *to, value *step);
value *loop_attribute(state *s, value *loop, const char *name, size_t size);    // NULL: none
value *contains(state *s, value *item, value *in);

/* ---- arithmetic ------------------------------------------------------------------------------ */

value *arithmetic(state *s, node_kind op, value *a, value *b);
value *concat(state *s, value *a, value *b);
value *negative(state *s, value *a);

/* ---- rows of functions ----------------------------------------------------------------------- */

typedef value *(*builtin)(state *s, value **a, const arguments *all);

/* Parameters: names divided by blanks, `?` behind those that may be absent, `*` and `**` where the
 * rest is taken as it comes, `/` in front where none has a name to its caller. */
typedef struct filter_row {
    const char *name;
    builtin run;
    const char *parameters;
} filter_row;

struct method_row {
    value_kind of;
    const char *name;
    builtin run;
    const char *parameters;
};

struct global_row {
    const char *name;
    builtin run;
    const char *parameters;
};

enum { MOST_PARAMETERS = 8 };

/* Puts arguments to their parameters: `out[i]` is NULL where absent. `first`, where there is one,
 * takes the first. */
bool bind(state *s, value *out[MOST_PARAMETERS], const char *name, const char *parameters,
          value *first, const arguments *all);

const filter_row *find_filter(const char *name, size_t size);
const filter_row *find_test(const char *name, size_t size);
const method_row *find_method(value_kind of, const char *name, size_t size);
bool unsafe_method(value_kind of, const char *name, size_t size);
const global_row *find_global(const char *name, size_t size);

value *call_filter(state *s, const filter_row *row, value *of, const arguments *a);
value *call_test(state *s, const filter_row *row, value *of, const arguments *a);
value *call_row(state *s, const char *name, builtin run, const char *parameters, value *first,
                const arguments *a);

/* ---- text ------------------------------------------------------------------------------------ */

/* A text being made. */
typedef struct maker {
    state *s;
    char *bytes;
    size_t size, room;
    bool failed;
} maker;

void put(maker *m, const char *bytes, size_t size);
void put_text(maker *m, const char *text);
void put_point(maker *m, uint32_t point);
void put_fill(maker *m, char c, int64_t n);
value *made(maker *m);                          // NULL and failure where memory was out
bool put_string_of(maker *m, value *v);         // false: failed
bool put_repr(maker *m, value *v);

bool is_blank(uint32_t point);                  // str.isspace
bool is_printable(uint32_t point);
bool is_alphabetic(uint32_t point);
bool is_numeric(uint32_t point);                // str.isnumeric
bool is_digit(uint32_t point);                  // str.isdigit
bool is_decimal(uint32_t point);
bool is_lower(uint32_t point);
bool is_upper(uint32_t point);
bool is_word(uint32_t point);                   // \w
typedef enum letter_case { CASE_LOWER, CASE_UPPER, CASE_TITLE } letter_case;
void put_case(maker *m, const char *text, size_t size, letter_case to);

bool parse_whole(int64_t *out, const char *text, size_t size, int base);    // int(text, base)
bool parse_real(double *out, const char *text, size_t size);                // float(text)

value *format_percent(state *s, value *format, value *with);
value *format_braces(state *s, value *format, const arguments *a);
value *format_one(state *s, value *v, const char *spec, size_t size);
bool put_json(maker *m, value *v, value *indent, value *separators, bool sort, bool ascii);

/* ---- names ----------------------------------------------------------------------------------- */

node *parse_template(state *s, const char *text, size_t size);
bool resolve_names(state *s, node *root);
void *take(state *s, size_t bytes);             // of the store; NULL and failure
value *no_memory(state *s);                     // fails
bool add_node(state *s, nodes *list, node *n);

#endif
