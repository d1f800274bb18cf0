/* ends.c - which tokens begin and end a text.
 *
 * tokenizer.json does not say; a tokenizer_config.json beside it may. Without one the names of
 * ends.def are looked for. */
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "tokenizer/tokenizer_internal.h"

static void try_end(const mn_tokenizer *t, int32_t *end, const char *name) {
    if (*end >= 0) return;
    const int32_t id = mn_tokenizer_find(t, name);
    if (id >= 0 && (t->vocab.tokens[id].flags & MN_TOKEN_ADDED)) *end = id;
}

/* "bos_token": "<s>", or {"content": "<s>", ...}, or null: there is none. */
static mn_status read_end(const mn_tokenizer *t, int32_t *end, const mn_json *root,
                          const char *key) {
    const mn_json at = mn_json_member(root, key);
    const char *name = NULL;
    if (!at.value) return MN_OK;
    *end = -1;
    if (!mn_json_given(&at)) return MN_OK;
    const mn_status st = json_is_object(at.value) ? mn_json_get_text(&name, &at, "content")
                                                  : mn_json_read_text(&name, &at);
    if (st != MN_OK) return st;
    *end = mn_tokenizer_find(t, name);
    if (*end < 0) return mn_json_fail(&at, "the vocabulary has no token \"%s\"", name);
    return MN_OK;
}

mn_status mn_tokenizer_find_ends(mn_tokenizer *t, const char *config_path) {
    int32_t bos = -1, eos = -1;
#define END(which, name) try_end(t, &which, name);
#include "tokenizer/ends.def"
#undef END
    t->bos = bos;
    t->eos = eos;
    if (!config_path || access(config_path, F_OK) != 0) return MN_OK;
    mn_json root;
    mn_status st = mn_json_load(&root, config_path, MN_JSON_PYTHON);
    if (st == MN_OK) st = read_end(t, &t->bos, &root, "bos_token");
    if (st == MN_OK) st = read_end(t, &t->eos, &root, "eos_token");
    mn_json_free(&root);
    return st;
}
