/* expression.c - the parser of expressions: from tuples and `if` down to names and literals. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "template/parser.h"

const token *peek(const parser *p) {
    return &p->tokens.at[p->at];
}

const token *peek_next(const parser *p) {
    return &p->tokens.at[p->at + (p->at + 1 < p->tokens.n)];
}

static void step(parser *p) {
    if (p->at + 1 < p->tokens.n) p->at++;
}

bool is_kind(const parser *p, token_kind kind) {
    return peek(p)->kind == kind;
}

static bool token_is(const token *t, const char *name) {
    return t->kind == T_NAME && strlen(name) == t->text.size &&
           memcmp(t->text.bytes, name, t->text.size) == 0;
}

bool is_name(const parser *p, const char *name) {
    return token_is(peek(p), name);
}

bool skip_kind(parser *p, token_kind kind) {
    if (!is_kind(p, kind)) return false;
    step(p);
    return true;
}

bool skip_name(parser *p, const char *name) {
    if (!is_name(p, name)) return false;
    step(p);
    return true;
}

node *complain(parser *p, int line, const char *format, ...) {
    char text[300];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    p->s->line = line;
    fail(p->s, "%s", text);
    return NULL;
}

bool expect(parser *p, token_kind kind) {
    if (skip_kind(p, kind)) return true;
    const token *t = peek(p);
    const bool named = t->kind == T_NAME;
    complain(p, t->line, "expected %s, found %s%.*s%s", token_name(kind),
             named ? "\"" : token_name(t->kind), named ? (int)t->text.size : 0,
             named ? t->text.bytes : "", named ? "\"" : "");
    return false;
}

bool enter(parser *p) {
    if (++p->depth <= MOST_NESTING) return true;
    complain(p, peek(p)->line, "expressions or blocks are nested more than %d deep", MOST_NESTING);
    return false;
}

void leave(parser *p) {
    p->depth--;
}

node *make(parser *p, node_kind kind, int line) {
    node *n = take(p->s, sizeof *n);
    if (n) *n = (node){ .kind = kind, .line = line };
    return n;
}

const string *intern(parser *p, const token *t) {
    string *out = take(p->s, sizeof *out);
    if (out) *out = t->text;
    return out;
}

static node *constant(parser *p, int line, value *v) {
    node *n = v ? make(p, N_CONST, line) : NULL;
    if (n) n->constant = v;
    return n;
}

static node *two(parser *p, node_kind kind, int line, node *a, node *b) {
    node *n = a && b ? make(p, kind, line) : NULL;
    if (!n) return NULL;
    n->a = a;
    n->b = b;
    return n;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static bool parse_named(parser *p, call_nodes *c) {
    const token *name = peek(p);
    p->at += 2;
    node *key = constant(p, name->line, lent_string(p->s, name->text.bytes, name->text.size));
    node *item = parse_expression(p, true);
    return key && item && add_node(p->s, &c->names, key) && add_node(p->s, &c->named, item);
}

static bool parse_argument(parser *p, call_nodes *c, int line) {
    const bool star = is_kind(p, T_MUL), stars = is_kind(p, T_POW);
    const bool named = is_kind(p, T_NAME) && peek_next(p)->kind == T_ASSIGN;
    if (c->named_rest || (c->rest && !named && !stars) || (c->named.n && !named && !star &&
                                                           !stars)) {
        complain(p, line, "arguments of a call are in the wrong order");
        return false;
    }
    if (star) {
        step(p);
        return (c->rest = parse_expression(p, true)) != NULL;
    }
    if (stars) {
        step(p);
        return (c->named_rest = parse_expression(p, true)) != NULL;
    }
    if (named) return parse_named(p, c);
    node *n = parse_expression(p, true);
    return n && add_node(p->s, &c->at, n);
}

/* From "(" to ")". */
static call_nodes *parse_arguments(parser *p) {
    call_nodes *c = take(p->s, sizeof *c);
    const int line = peek(p)->line;
    if (!c || !expect(p, T_LPAREN)) return NULL;
    for (bool first = true; !is_kind(p, T_RPAREN); first = false) {
        if (!first && !expect(p, T_COMMA)) return NULL;
        if (!first && is_kind(p, T_RPAREN)) break;
        if (!parse_argument(p, c, line)) return NULL;
    }
    return expect(p, T_RPAREN) ? c : NULL;
}

static node *parse_call(parser *p, node *of) {
    const int line = peek(p)->line;
    call_nodes *c = parse_arguments(p);
    node *n = c ? make(p, N_CALL, line) : NULL;
    if (!n) return NULL;
    n->a = of;
    n->call = c;
    return n;
}

/* "name" or "name.more" of a filter or test; the row is found here. */
static node *parse_row_name(parser *p, node_kind kind) {
    const token *t = peek(p);
    node *n = make(p, kind, t->line);
    maker m = { .s = p->s };
    if (!n || !expect(p, T_NAME)) return NULL;
    put(&m, t->text.bytes, t->text.size);
    while (skip_kind(p, T_DOT)) {
        t = peek(p);
        if (!expect(p, T_NAME)) return NULL;
        put(&m, ".", 1);
        put(&m, t->text.bytes, t->text.size);
    }
    value *name = made(&m);
    if (!name) return NULL;
    n->name = &name->text;
    n->row = kind == N_FILTER ? find_filter(name->text.bytes, name->text.size)
                              : find_test(name->text.bytes, name->text.size);
    return n;
}

node *parse_filters(parser *p, node *of, bool inline_first) {
    while (inline_first || is_kind(p, T_PIPE)) {
        if (!inline_first) step(p);
        inline_first = false;
        node *n = parse_row_name(p, N_FILTER);
        if (!n) return NULL;
        if (is_kind(p, T_LPAREN) && !(n->call = parse_arguments(p))) return NULL;
        n->a = of;
        of = n;
    }
    return of;
}

static node *parse_postfix(parser *p, node *n);

static node *parse_test(parser *p, node *of) {
    step(p);                                            // is
    const int line = peek(p)->line;
    const bool negated = skip_name(p, "not");
    node *n = parse_row_name(p, N_TEST);
    if (!n) return NULL;
    n->a = of;
    const token_kind kind = peek(p)->kind;
    if (kind == T_LPAREN) {
        if (!(n->call = parse_arguments(p))) return NULL;
    } else if ((kind == T_NAME && !is_name(p, "else") && !is_name(p, "or") && !is_name(p, "and")) ||
               kind == T_STRING || kind == T_INT || kind == T_FLOAT || kind == T_LBRACKET ||
               kind == T_LBRACE) {
        if (is_name(p, "is")) return complain(p, line, "tests cannot be chained by is");
        n->call = take(p->s, sizeof *n->call);
        node *argument = parse_primary(p, false);
        argument = argument ? parse_postfix(p, argument) : NULL;
        if (!n->call || !argument || !add_node(p->s, &n->call->at, argument)) return NULL;
    }
    if (!negated) return n;
    node *no = make(p, N_NOT, line);
    if (no) no->a = n;
    return no;
}

/* ---- primaries and what follows them --------------------------------------------------------- */

static node *parse_slice(parser *p) {
    const int line = peek(p)->line;
    node *start = NULL;
    if (!is_kind(p, T_COLON)) {
        start = parse_expression(p, true);
        if (!start || !is_kind(p, T_COLON)) return start;
    }
    step(p);
    node *n = make(p, N_SLICE, line);
    if (!n) return NULL;
    n->a = start;
    if (!is_kind(p, T_COLON) && !is_kind(p, T_RBRACKET) && !is_kind(p, T_COMMA) &&
        !(n->b = parse_expression(p, true))) return NULL;
    if (!skip_kind(p, T_COLON)) return n;
    if (!is_kind(p, T_RBRACKET) && !is_kind(p, T_COMMA) &&
        !(n->c = parse_expression(p, true))) return NULL;
    return n;
}

static node *parse_subscript(parser *p, node *of) {
    const int line = peek(p)->line;
    if (skip_kind(p, T_DOT)) {
        const token *t = peek(p);
        step(p);
        if (t->kind == T_NAME) {
            node *n = make(p, N_ATTRIBUTE, line);
            if (!n || !(n->constant = lent_string(p->s, t->text.bytes, t->text.size))) return NULL;
            n->a = of;
            return n;
        }
        if (t->kind != T_INT) return complain(p, line, "expected a name or number behind \".\"");
        return two(p, N_ITEM, line, of, constant(p, line, new_int(p->s, t->whole)));
    }
    step(p);                                            // [
    nodes all = { 0 };
    while (!is_kind(p, T_RBRACKET)) {
        if (all.n && !expect(p, T_COMMA)) return NULL;
        node *n = parse_slice(p);
        if (!n || !add_node(p->s, &all, n)) return NULL;
    }
    step(p);
    if (all.n == 1) return two(p, N_ITEM, line, of, all.at[0]);
    node *key = make(p, N_TUPLE, line);
    if (key) key->list = all;
    return two(p, N_ITEM, line, of, key);
}

static node *parse_postfix(parser *p, node *n) {
    while (n) {
        if (is_kind(p, T_DOT) || is_kind(p, T_LBRACKET)) n = parse_subscript(p, n);
        else if (is_kind(p, T_LPAREN)) n = parse_call(p, n);
        else break;
    }
    return n;
}

static node *parse_filter_expression(parser *p, node *n) {
    while (n) {
        if (is_kind(p, T_PIPE)) n = parse_filters(p, n, false);
        else if (is_name(p, "is")) n = parse_test(p, n);
        else if (is_kind(p, T_LPAREN)) n = parse_call(p, n);
        else break;
    }
    return n;
}

static node *parse_list(parser *p, int line) {
    node *n = make(p, N_LIST, line);
    while (n && !is_kind(p, T_RBRACKET)) {
        if (n->list.n && !expect(p, T_COMMA)) return NULL;
        if (is_kind(p, T_RBRACKET)) break;
        node *item = parse_expression(p, true);
        if (!item || !add_node(p->s, &n->list, item)) return NULL;
    }
    return n && expect(p, T_RBRACKET) ? n : NULL;
}

/* Keys in `list`, items in `body`. */
static node *parse_dict(parser *p, int line) {
    node *n = make(p, N_DICT, line);
    while (n && !is_kind(p, T_RBRACE)) {
        if (n->list.n && !expect(p, T_COMMA)) return NULL;
        if (is_kind(p, T_RBRACE)) break;
        node *key = parse_expression(p, true);
        if (!key || !expect(p, T_COLON)) return NULL;
        node *item = parse_expression(p, true);
        if (!item || !add_node(p->s, &n->list, key) || !add_node(p->s, &n->body, item)) return NULL;
    }
    return n && expect(p, T_RBRACE) ? n : NULL;
}

static node *parse_name(parser *p, const token *t, bool with_namespace) {
    static const struct {
        const char *name;
        value *is;
    } words[] = {
        { "true", &mn_value_true }, { "True", &mn_value_true }, { "false", &mn_value_false },
        { "False", &mn_value_false }, { "none", &mn_value_none }, { "None", &mn_value_none },
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (token_is(t, words[i].name)) return constant(p, t->line, words[i].is);
    }
    const bool of_namespace = with_namespace && skip_kind(p, T_DOT);
    node *n = make(p, of_namespace ? N_ATTRIBUTE_OF_NAMESPACE : N_NAME, t->line);
    if (!n || !(n->name = intern(p, t))) return NULL;
    if (of_namespace) {
        const token *attribute = peek(p);
        if (!expect(p, T_NAME)) return NULL;
        n->constant = lent_string(p->s, attribute->text.bytes, attribute->text.size);
        if (!n->constant) return NULL;
    }
    return n;
}

node *parse_primary(parser *p, bool with_namespace) {
    const token *t = peek(p);
    node *n = NULL;
    if (!enter(p)) return NULL;
    step(p);
    switch (t->kind) {
    case T_NAME: n = parse_name(p, t, with_namespace); break;
    case T_STRING:
        if (!is_kind(p, T_STRING)) {
            n = constant(p, t->line, lent_string(p->s, t->text.bytes, t->text.size));
        } else {
            maker m = { .s = p->s };
            put(&m, t->text.bytes, t->text.size);
            for (; is_kind(p, T_STRING); step(p)) put(&m, peek(p)->text.bytes, peek(p)->text.size);
            n = constant(p, t->line, made(&m));
        }
        break;
    case T_INT: n = constant(p, t->line, new_int(p->s, t->whole)); break;
    case T_FLOAT: n = constant(p, t->line, new_float(p->s, t->real)); break;
    case T_LPAREN:
        n = parse_tuple(p, false, true, NULL, true, false);
        if (n && !expect(p, T_RPAREN)) n = NULL;
        break;
    case T_LBRACKET: n = parse_list(p, t->line); break;
    case T_LBRACE: n = parse_dict(p, t->line); break;
    default: complain(p, t->line, "unexpected %s where a value should be", token_name(t->kind));
    }
    leave(p);
    return n;
}

/* ---- operators, from strong to weak ---------------------------------------------------------- */

static node *parse_unary(parser *p, bool filters) {
    const int line = peek(p)->line;
    const bool minus = is_kind(p, T_SUB), plus = is_kind(p, T_ADD);
    node *n;
    if (!minus && !plus) {
        n = parse_primary(p, false);
    } else {
        if (!enter(p)) return NULL;
        step(p);
        n = make(p, minus ? N_NEGATIVE : N_POSITIVE, line);
        if (n && !(n->a = parse_unary(p, false))) n = NULL;
        leave(p);
    }
    n = n ? parse_postfix(p, n) : NULL;
    return n && filters ? parse_filter_expression(p, n) : n;
}

typedef struct operator_row {
    token_kind token;
    node_kind node;
} operator_row;

/* Operators of one strength, from left to right. */
static node *parse_left(parser *p, const operator_row *rows, node *(*below)(parser *p)) {
    node *left = below(p);
    int more = 0;
    while (left) {
        const operator_row *row = rows;
        while (row->token && !is_kind(p, row->token)) row++;
        if (!row->token) break;
        const int line = peek(p)->line;
        step(p);
        if (++more > MOST_DEPTH / 2) return complain(p, line, "too many operators in a row");
        left = two(p, row->node, line, left, below(p));
    }
    return left;
}

static node *parse_filtered(parser *p) {
    return parse_unary(p, true);
}

static node *parse_power(parser *p) {
    static const operator_row rows[] = { { T_POW, N_POWER }, { 0 } };
    return parse_left(p, rows, parse_filtered);
}

static node *parse_product(parser *p) {
    static const operator_row rows[] = { { T_MUL, N_MULTIPLY }, { T_DIV, N_DIVIDE },
                                         { T_FLOOR, N_FLOOR }, { T_MOD, N_MODULO }, { 0 } };
    return parse_left(p, rows, parse_power);
}

static node *parse_concat(parser *p) {
    const int line = peek(p)->line;
    node *first = parse_product(p);
    if (!first || !is_kind(p, T_TILDE)) return first;
    node *n = make(p, N_CONCAT, line);
    if (!n || !add_node(p->s, &n->list, first)) return NULL;
    while (skip_kind(p, T_TILDE)) {
        node *next = parse_product(p);
        if (!next || !add_node(p->s, &n->list, next)) return NULL;
    }
    return n;
}

static node *parse_sum(parser *p) {
    static const operator_row rows[] = { { T_ADD, N_ADD }, { T_SUB, N_SUBTRACT }, { 0 } };
    return parse_left(p, rows, parse_concat);
}

/* The sign of a comparison, taken; -1: none. */
static int take_sign(parser *p) {
    static const struct {
        token_kind token;
        compare_sign sign;
    } signs[] = { { T_EQ, SIGN_EQ }, { T_NE, SIGN_NE }, { T_LT, SIGN_LT }, { T_LE, SIGN_LE },
                  { T_GT, SIGN_GT }, { T_GE, SIGN_GE } };
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) {
        if (skip_kind(p, signs[i].token)) return (int)signs[i].sign;
    }
    if (skip_name(p, "in")) return SIGN_IN;
    if (is_name(p, "not") && token_is(peek_next(p), "in")) {
        p->at += 2;
        return SIGN_NOT_IN;
    }
    return -1;
}

/* a < b <= c: the first in `a`, the others in `list`, each with its sign as `op`. */
static node *parse_compare(parser *p) {
    const int line = peek(p)->line;
    node *first = parse_sum(p), *n = NULL;
    for (int sign; first && (sign = take_sign(p)) >= 0;) {
        node *operand = make(p, N_COMPARE, line);
        if (!n) n = make(p, N_COMPARE, line);
        if (!n || !operand || !(operand->a = parse_sum(p))) return NULL;
        operand->op = sign;
        if (!add_node(p->s, &n->list, operand)) return NULL;
        n->a = first;
    }
    return n ? n : first;
}

static node *parse_not(parser *p) {
    const int line = peek(p)->line;
    if (!skip_name(p, "not")) return parse_compare(p);
    if (!enter(p)) return NULL;
    node *n = make(p, N_NOT, line);
    if (n && !(n->a = parse_not(p))) n = NULL;
    leave(p);
    return n;
}

static node *parse_logic(parser *p, const char *word, node_kind kind, node *(*below)(parser *p)) {
    const int line = peek(p)->line;
    node *left = below(p);
    int more = 0;
    while (left && skip_name(p, word)) {
        if (++more > MOST_DEPTH / 2) return complain(p, line, "too many operators in a row");
        left = two(p, kind, line, left, below(p));
    }
    return left;
}

static node *parse_and(parser *p) {
    return parse_logic(p, "and", N_AND, parse_not);
}

static node *parse_or(parser *p) {
    return parse_logic(p, "or", N_OR, parse_and);
}

/* a if b else c: test in `a`, then in `b`, else in `c`, which may be missing. */
static node *parse_choice(parser *p) {
    const int line = peek(p)->line;
    node *n = parse_or(p);
    int more = 0;
    while (n && skip_name(p, "if")) {
        if (++more > MOST_DEPTH / 2) return complain(p, line, "too many ifs in a row");
        node *choice = make(p, N_CHOICE, line);
        node *test = choice ? parse_or(p) : NULL, *other = NULL;
        if (test && skip_name(p, "else")) {
            if (enter(p)) other = parse_choice(p);
            leave(p);
            if (!other) test = NULL;
        }
        if (!test) return NULL;
        *choice = (node){ .kind = N_CHOICE, .line = line, .a = test, .b = n, .c = other };
        n = choice;
    }
    return n;
}

node *parse_expression(parser *p, bool choice) {
    if (!enter(p)) return NULL;
    node *n = choice ? parse_choice(p) : parse_or(p);
    leave(p);
    return n;
}

static bool tuple_ends(const parser *p, const char *end_name) {
    const token_kind kind = peek(p)->kind;
    return kind == T_VARIABLE_END || kind == T_BLOCK_END || kind == T_RPAREN ||
           (end_name && is_name(p, end_name));
}

node *parse_tuple(parser *p, bool simplified, bool choice, const char *end_name, bool parentheses,
                  bool with_namespace) {
    const int line = peek(p)->line;
    nodes all = { 0 };
    bool is_tuple = false;
    while (true) {
        if (all.n && !expect(p, T_COMMA)) return NULL;
        if (tuple_ends(p, end_name)) break;
        node *n = simplified ? parse_primary(p, with_namespace) : parse_expression(p, choice);
        if (!n || !add_node(p->s, &all, n)) return NULL;
        if (!is_kind(p, T_COMMA)) break;
        is_tuple = true;
    }
    if (!is_tuple && all.n) return all.at[0];
    if (!is_tuple && !parentheses) {
        return complain(p, line, "expected an expression, found %s", token_name(peek(p)->kind));
    }
    node *n = make(p, N_TUPLE, line);
    if (n) n->list = all;
    return n;
}
