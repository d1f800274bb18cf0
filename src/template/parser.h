/* parser.h - what the two halves of the parser share: statements and expressions. */
#ifndef MN_TEMPLATE_PARSER_H
#define MN_TEMPLATE_PARSER_H

#include "template/lexer.h"
#include "template/state.h"

typedef struct parser {
    state *s;
    tokens tokens;
    int64_t at;
    int depth;
} parser;

const token *peek(const parser *p);
const token *peek_next(const parser *p);
bool is_kind(const parser *p, token_kind kind);
bool is_name(const parser *p, const char *name);
bool skip_kind(parser *p, token_kind kind);
bool skip_name(parser *p, const char *name);
bool expect(parser *p, token_kind kind);
node *make(parser *p, node_kind kind, int line);
const string *intern(parser *p, const token *t);
node *complain(parser *p, int line, const char *format, ...);

node *parse_expression(parser *p, bool choice);
node *parse_primary(parser *p, bool with_namespace);
node *parse_filters(parser *p, node *of, bool inline_first);

/* Expressions divided by commas; a tuple where there is one. `end_name` ends it too, or NULL. */
node *parse_tuple(parser *p, bool simplified, bool choice, const char *end_name, bool parentheses,
                  bool with_namespace);
bool enter(parser *p);      // one level deeper, or failure
void leave(parser *p);

#endif
