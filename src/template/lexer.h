/* lexer.h - from the text of a template to tokens. */
#ifndef MN_TEMPLATE_LEXER_H
#define MN_TEMPLATE_LEXER_H

#include "template/value.h"

typedef enum token_kind {
    T_END, T_DATA, T_VARIABLE_BEGIN, T_VARIABLE_END, T_BLOCK_BEGIN, T_BLOCK_END, T_NAME, T_STRING,
    T_INT, T_FLOAT, T_ADD, T_SUB, T_DIV, T_FLOOR, T_MUL, T_MOD, T_POW, T_TILDE, T_LBRACKET,
    T_RBRACKET, T_LPAREN, T_RPAREN, T_LBRACE, T_RBRACE, T_EQ, T_NE, T_GT, T_GE, T_LT, T_LE,
    T_ASSIGN, T_DOT, T_COLON, T_PIPE, T_COMMA, T_SEMICOLON, T_COUNT,
} token_kind;

typedef struct token {
    token_kind kind;
    int line;
    string text;                // data, names, texts after their escapes
    int64_t whole;
    double real;
} token;

typedef struct tokens {
    token *at;
    int64_t n, room;
} tokens;

/* All tokens of a text, closed by T_END. Memory is of the state's store. */
bool read_tokens(state *s, tokens *out, const char *text, size_t size);

const char *token_name(token_kind kind);

#endif
