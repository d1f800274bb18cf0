/* make_model.c - writes a small model folder for tests of the program:
 *
 *   make_model FOLDER CONFIG.JSON [bytes | CHARACTERS]
 *
 * The tokenizer has one token per byte, or one per character of CHARACTERS; the vocabulary of the
 * configuration must have room for them. The same arguments write the same files. */
#include <stdio.h>
#include <string.h>

#include "io/file.h"
#include "tokenizer/tokenizer.h"
#include "model/checkpoint.h"
#include "support/model_case.h"

static mn_status write_tokenizer(const char *folder, const char *characters) {
    char path[4096];
    mn_tokenizer *tokenizer = NULL;
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    mn_status st = strcmp(characters, "bytes") == 0
                       ? mn_tokenizer_bytes(&tokenizer)
                       : mn_tokenizer_chars(&tokenizer, characters, strlen(characters));
    if (st == MN_OK) st = mn_tokenizer_save(tokenizer, path);
    mn_tokenizer_destroy(tokenizer);
    return st;
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > 4) {
        fputs("usage: make_model FOLDER CONFIG.JSON [bytes | CHARACTERS]\n", stderr);
        return 2;
    }
    mn_model *model = NULL;
    mn_status st = model_case_create(&model, argv[2], MN_F32, 0.3, 7);
    if (st == MN_OK) st = mn_checkpoint_save(model, argv[1]);
    if (st == MN_OK) st = write_tokenizer(argv[1], argc > 3 ? argv[3] : "bytes");
    mn_model_destroy(model);
    if (st != MN_OK) fprintf(stderr, "make_model: %s\n", mn_last_error());
    return st != MN_OK;
}
