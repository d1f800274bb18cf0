/* tokenizer.h - the verbs of mneme tokenizer. */
#ifndef MN_CLI_TOKENIZER_H
#define MN_CLI_TOKENIZER_H

#include "io/text.h"
#include "tokenizer/tokenizer.h"

/* What stands on the command line; fields not asked for are zero. */
typedef struct mn_tokenizer_options {
    const char *tokenizer;       // file or folder; NULL: ./tokenizer.json
    const char *out;
    const char *pattern, *kind;
    const char **special;        // NULL-terminated
    int n_special;
    int vocab_size, min_count;
    bool json, lines, plain, count, keep_special, quiet;
    const char **files;
    int n_files;
} mn_tokenizer_options;

/* The bytes of a file, of standard input for "-". Free with mn_text_free. */
mn_status mn_read_input(mn_text *out, const char *path);

/* tokenizer_train.c: learns a tokenizer from the files. */
mn_status mn_tokenizer_verb_train(const mn_tokenizer_options *o);

/* tokenizer_use.c */
mn_status mn_tokenizer_verb_encode(const mn_tokenizer_options *o);
mn_status mn_tokenizer_verb_decode(const mn_tokenizer_options *o);
mn_status mn_tokenizer_verb_info(const mn_tokenizer_options *o);

#endif
