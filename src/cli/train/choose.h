/* choose.h - mneme train book.txt: what is trained when nobody says. */
#ifndef MN_CLI_TRAIN_CHOOSE_H
#define MN_CLI_TRAIN_CHOOSE_H

#include <stdbool.h>

#include "io/json.h"

enum { MN_CHOICE_SAID = 1024 };

typedef struct mn_choice {
    double size;              // parameters asked for, without embeddings; 0: by text and machine
    double flops;             // operations a second of products of matrices; 0: not measured
    bool from;                // a model is given: its sizes and its tokenizer stay
    bool per_character;       // the text has no character of several bytes
    char said[MN_CHOICE_SAID];    // what was chosen and why, in lines; "" where nothing was
} mn_choice;

/* "300k", "10m", "1.5b" as a number of parameters. */
bool mn_choice_size(void *to, const char *value);

/* Floating-point operations a second of a product of matrices on the context; NAN: no memory. */
double mn_train_product_rate(mn_context *context);

/* Whether data.train is text in which each byte is a character. */
bool mn_train_per_character(const mn_json *root);

/* Fills in what the document leaves open: layers, sizes, tokenizer, context, batch, steps, learning
 * rate, evaluations. What it says stays. data.train names text or tokens. */
mn_status mn_train_choose(mn_json *root, mn_choice *choice);

#endif
