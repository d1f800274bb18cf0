/* parser.c - statements: what stands between {% and %}, and the bodies they open. */
#include "template/parser.h"

#include <string.h>

typedef bool (*statement)(parser *p, nodes *out, int line);

static bool parse_until(parser *p, nodes *out, const char *const ends[]);

/* " %}" and then a body up to one of `ends`, whose word is taken; its place in `ends`, -1: failed.
 * */
static int parse_body(parser *p, nodes *out, const char *const ends[]) {
    skip_kind(p, T_COLON);
    if (!expect(p, T_BLOCK_END) || !enter(p)) return -1;
    const bool ok = parse_until(p, out, ends);
    leave(p);
    if (!ok) return -1;
    for (int i = 0; ends[i]; i++) {
        if (skip_name(p, ends[i])) return i;
    }
    return -1;
}

static bool parse_one_body(parser *p, nodes *out, const char *end) {
    const char *const ends[] = { end, NULL };
    return parse_body(p, out, ends) == 0;
}

static node *add_new(parser *p, nodes *out, node_kind kind, int line) {
    node *n = make(p, kind, line);
    return n && add_node(p->s, out, n) ? n : NULL;
}

/* ---- targets --------------------------------------------------------------------------------- */

/* Makes names stores; false where something cannot be assigned to. */
static bool make_target(parser *p, node *n, name_use use) {
    if (n->kind == N_NAME) {
        n->use = use;
        return true;
    }
    if (n->kind == N_ATTRIBUTE_OF_NAMESPACE) return true;
    if (n->kind != N_TUPLE) {
        complain(p, n->line, "this cannot be assigned to");
        return false;
    }
    for (int64_t i = 0; i < n->list.n; i++) {
        if (!make_target(p, n->list.at[i], use)) return false;
    }
    return true;
}

static node *parse_target(parser *p, const char *end_name, bool with_namespace, name_use use) {
    node *n = parse_tuple(p, true, true, end_name, false, with_namespace);
    return n && make_target(p, n, use) ? n : NULL;
}

static node *parse_one_name(parser *p, name_use use) {
    const token *t = peek(p);
    if (!expect(p, T_NAME)) return NULL;
    node *n = make(p, N_NAME, t->line);
    if (!n || !(n->name = intern(p, t))) return NULL;
    n->use = use;
    return n;
}

/* ---- statements ------------------------------------------------------------------------------ */

/* set TARGET = VALUE: target `a`, value `b`. As a block: filters in `b`, applied to the body. */
static bool parse_set(parser *p, nodes *out, int line) {
    node *target = parse_target(p, NULL, true, USE_STORE);
    if (!target) return false;
    if (skip_kind(p, T_ASSIGN)) {
        node *n = add_new(p, out, N_SET, line);
        if (!n) return false;
        n->a = target;
        return (n->b = parse_tuple(p, false, true, NULL, false, false)) != NULL;
    }
    node *n = add_new(p, out, N_SET_BLOCK, line);
    if (!n) return false;
    n->a = target;
    if (is_kind(p, T_PIPE) && !(n->b = parse_filters(p, NULL, false))) return false;
    return parse_one_body(p, &n->body, "endset");
}

/* for A in B if C: body, else in `other`. */
static bool parse_for(parser *p, nodes *out, int line) {
    static const char *const ends[] = { "endfor", "else", NULL };
    node *n = add_new(p, out, N_FOR, line);
    if (!n || !(n->a = parse_target(p, "in", false, USE_STORE))) return false;
    if (!skip_name(p, "in")) {
        complain(p, line, "a for needs \"in\" behind its names");
        return false;
    }
    if (!(n->b = parse_tuple(p, false, false, "recursive", false, false))) return false;
    if (skip_name(p, "if") && !(n->c = parse_expression(p, true))) return false;
    n->recursive = skip_name(p, "recursive");
    const int end = parse_body(p, &n->body, ends);
    return end == 0 || (end == 1 && parse_one_body(p, &n->other, "endfor"));
}

/* if A: body; each elif is a node in `list`; else in `other`. */
static bool parse_if(parser *p, nodes *out, int line) {
    static const char *const ends[] = { "elif", "else", "endif", NULL };
    node *result = add_new(p, out, N_IF, line), *n = result;
    while (n) {
        if (!(n->a = parse_tuple(p, false, false, NULL, false, false))) return false;
        const int end = parse_body(p, &n->body, ends);
        if (end < 0) return false;
        if (end == 2) return true;
        if (end == 1) return parse_one_body(p, &result->other, "endif");
        n = add_new(p, &result->list, N_IF, peek(p)->line);
    }
    return false;
}

/* with a = b, ...: targets in `list`, values in `other`. */
static bool parse_with(parser *p, nodes *out, int line) {
    node *n = add_new(p, out, N_WITH, line);
    while (n && !is_kind(p, T_BLOCK_END)) {
        if (n->list.n && !expect(p, T_COMMA)) return false;
        node *target = parse_target(p, NULL, false, USE_PARAMETER);
        if (!target || !expect(p, T_ASSIGN)) return false;
        node *given = parse_expression(p, true);
        if (!given || !add_node(p->s, &n->list, target) || !add_node(p->s, &n->other, given)) {
            return false;
        }
    }
    return n && parse_one_body(p, &n->body, "endwith");
}

/* Parameters in `list`, defaults of the last ones in `other`. */
static bool parse_signature(parser *p, node *n) {
    if (!expect(p, T_LPAREN)) return false;
    while (!is_kind(p, T_RPAREN)) {
        if (n->list.n && !expect(p, T_COMMA)) return false;
        node *name = parse_one_name(p, USE_PARAMETER);
        if (!name) return false;
        if (skip_kind(p, T_ASSIGN)) {
            node *given = parse_expression(p, true);
            if (!given || !add_node(p->s, &n->other, given)) return false;
        } else if (n->other.n) {
            complain(p, name->line, "a parameter without default follows one with a default");
            return false;
        }
        if (!add_node(p->s, &n->list, name)) return false;
    }
    return expect(p, T_RPAREN);
}

static bool parse_macro(parser *p, nodes *out, int line) {
    node *n = add_new(p, out, N_MACRO, line), *name = n ? parse_one_name(p, USE_STORE) : NULL;
    if (!name) return false;
    n->name = name->name;
    return parse_signature(p, n) && parse_one_body(p, &n->body, "endmacro");
}

/* call(parameters) a: the call in `a`. */
static bool parse_call_block(parser *p, nodes *out, int line) {
    node *n = add_new(p, out, N_CALL_BLOCK, line);
    if (!n || (is_kind(p, T_LPAREN) && !parse_signature(p, n))) return false;
    if (!(n->a = parse_expression(p, true))) return false;
    if (n->a->kind != N_CALL) {
        complain(p, line, "a call block needs a call");
        return false;
    }
    return parse_one_body(p, &n->body, "endcall");
}

static bool parse_filter_block(parser *p, nodes *out, int line) {
    node *n = add_new(p, out, N_FILTER_BLOCK, line);
    if (!n || !(n->b = parse_filters(p, NULL, true))) return false;
    return parse_one_body(p, &n->body, "endfilter");
}

static bool parse_print(parser *p, nodes *out, int line) {
    node *n = add_new(p, out, N_OUTPUT, line);
    while (n && !is_kind(p, T_BLOCK_END)) {
        if (n->list.n && !expect(p, T_COMMA)) return false;
        node *given = parse_expression(p, true);
        if (!given || !add_node(p->s, &n->list, given)) return false;
    }
    return n != NULL;
}

/* Where an answer of the assistant stands: its text is that of its body. */
static bool parse_generation(parser *p, nodes *out, int line) {
    node *n = add_new(p, out, N_CALL_BLOCK, line);
    return n && parse_one_body(p, &n->body, "endgeneration");
}

static bool parse_autoescape(parser *p, nodes *out, int line) {
    node *n = add_new(p, out, N_SCOPE, line);
    if (!n || !(n->a = parse_expression(p, true))) return false;
    if (n->a->kind != N_CONST || n->a->constant != &mn_value_false) {
        complain(p, line, "autoescape is not supported: prompts are not HTML");
        return false;
    }
    return parse_one_body(p, &n->body, "endautoescape");
}

static bool parse_block(parser *p, nodes *out, int line) {
    node *n = add_new(p, out, N_BLOCK, line), *name = n ? parse_one_name(p, USE_STORE) : NULL;
    if (!name) return false;
    n->name = name->name;
    skip_name(p, "scoped");
    skip_name(p, "required");
    if (!parse_one_body(p, &n->body, "endblock")) return false;
    const token *t = peek(p);
    if (t->kind == T_NAME && t->text.size == n->name->size &&
        memcmp(t->text.bytes, n->name->bytes, t->text.size) == 0) expect(p, T_NAME);
    return true;
}

static bool parse_break(parser *p, nodes *out, int line) {
    return add_new(p, out, N_BREAK, line) != NULL;
}

static bool parse_continue(parser *p, nodes *out, int line) {
    return add_new(p, out, N_CONTINUE, line) != NULL;
}

static bool refuse_other(parser *p, nodes *out, int line) {
    (void)out;
    complain(p, line, "a chat template is one text: it cannot extend, include or import others");
    return false;
}

static const struct {
    const char *word;
    statement parse;
} statements[] = {
#define STATEMENT(word, parse) { word, parse },
#include "template/statements.def"
#undef STATEMENT
};

static bool parse_statement(parser *p, nodes *out) {
    const token *t = peek(p);
    if (t->kind != T_NAME) {
        complain(p, t->line, "a tag begins with its name");
        return false;
    }
    for (size_t i = 0; i < sizeof statements / sizeof *statements; i++) {
        if (skip_name(p, statements[i].word)) {
            return statements[i].parse(p, out, t->line) && expect(p, T_BLOCK_END);
        }
    }
    complain(p, t->line, "unknown tag \"%.*s\", or one that closes what is not open",
             (int)t->text.size, t->text.bytes);
    return false;
}

/* One piece of output is added to the last node where that is output of the same run. */
static bool add_output(parser *p, nodes *out, node **run, node *n) {
    if (!*run) *run = add_new(p, out, N_OUTPUT, n->line);
    return *run && add_node(p->s, &(*run)->list, n);
}

/* Nodes up to the tag that begins with one of `ends`, whose word is next; NULL: up to the end. */
static bool parse_until(parser *p, nodes *out, const char *const ends[]) {
    node *run = NULL;
    while (!is_kind(p, T_END)) {
        const token *t = peek(p);
        if (skip_kind(p, T_DATA)) {
            node *data = make(p, N_DATA, t->line);
            if (!data || !(data->name = intern(p, t)) || !add_output(p, out, &run, data)) {
                return false;
            }
        } else if (skip_kind(p, T_VARIABLE_BEGIN)) {
            node *n = parse_tuple(p, false, true, NULL, false, false);
            if (!n || !add_output(p, out, &run, n) || !expect(p, T_VARIABLE_END)) return false;
        } else {
            if (!expect(p, T_BLOCK_BEGIN)) return false;
            run = NULL;
            for (int i = 0; ends && ends[i]; i++) {
                if (is_name(p, ends[i])) return true;
            }
            if (!parse_statement(p, out)) return false;
        }
    }
    if (!ends) return true;
    complain(p, peek(p)->line, "the template ends where {%% %s %%} is missing", ends[0]);
    return false;
}

node *parse_template(state *s, const char *text, size_t size) {
    parser p = { .s = s };
    if (!read_tokens(s, &p.tokens, text, size)) return NULL;
    node *root = make(&p, N_SCOPE, 1);
    return root && parse_until(&p, &root->body, NULL) ? root : NULL;
}
