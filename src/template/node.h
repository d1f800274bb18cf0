/* node.h - the tree of a parsed template. */
#ifndef MN_TEMPLATE_NODE_H
#define MN_TEMPLATE_NODE_H

#include "template/template.h"
#include "template/value.h"

typedef enum node_kind {
    N_DATA, N_OUTPUT, N_IF, N_FOR, N_SET, N_SET_BLOCK, N_MACRO, N_CALL_BLOCK, N_FILTER_BLOCK,
    N_WITH, N_SCOPE, N_BREAK, N_CONTINUE, N_BLOCK,
    N_CONST, N_NAME, N_ATTRIBUTE_OF_NAMESPACE, N_TUPLE, N_LIST, N_DICT, N_ATTRIBUTE, N_ITEM,
    N_SLICE, N_CALL, N_FILTER, N_TEST, N_NOT, N_NEGATIVE, N_POSITIVE, N_ADD, N_SUBTRACT,
    N_MULTIPLY, N_DIVIDE, N_FLOOR, N_MODULO, N_POWER, N_CONCAT, N_COMPARE, N_AND, N_OR, N_CHOICE,
} node_kind;

typedef enum name_use { USE_LOAD, USE_STORE, USE_PARAMETER } name_use;

typedef struct node node;
typedef struct function function;

typedef struct nodes {
    node **at;
    int64_t n, room;
} nodes;

/* A name within one function at one depth of scopes: where its value is at run time. */
typedef struct ident {
    const string *name;
    int level;
    function *of;
    int slot;
    struct ident *next;
} ident;

/* What has its own variables at run time: the template, a macro, the body of a call, the test of a
 * loop, a recursive loop. */
struct function {
    function *outer;
    ident *idents;
    int n_slots;
    int depth;
};

typedef enum load_kind { LOAD_PARAMETER, LOAD_RESOLVE, LOAD_ALIAS, LOAD_UNDEFINED } load_kind;

/* What happens to a variable where a scope is entered. */
typedef struct load {
    ident *target;
    load_kind kind;
    ident *from;                // LOAD_ALIAS
    struct load *next;
} load;

/* Arguments of a call, filter or test. */
typedef struct call_nodes {
    nodes at, named;
    nodes names;                // N_CONST
    node *rest, *named_rest;    // *x, **x
} call_nodes;

struct node {
    node_kind kind;
    int line;
    const string *name;         // variable, attribute, filter, test, macro
    node *a, *b, *c, *d;        // by kind, see parser
    nodes list, body, other;
    value *constant;
    call_nodes *call;
    name_use use;
    ident *ident;
    int op;                     // of a comparison: its operands' signs in `list`
    bool negative, recursive, top, in_loop;
    const void *row;            // of filters.def or tests.def
    load *loads, *more_loads, *test_loads;
    function *function, *test_function;
    ident *loop, *caller, *kwargs, *varargs;
};

typedef enum compare_sign {
    SIGN_EQ, SIGN_NE, SIGN_LT, SIGN_LE, SIGN_GT, SIGN_GE, SIGN_IN, SIGN_NOT_IN,
} compare_sign;

struct mn_jinja {
    store texts;                // of strings that had escapes
    store store;
    char *name;
    node *root;                 // `body`; loads and function of the template itself
};

#endif
