/* ends.c - which tokens begin and end a text.
 *
 * tokenizer.json does not say; a tokenizer_config.json beside it may. Without one the names of
 * ends.def are looked for. A generation_config.json may name more tokens that end a text. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "io/file.h"
#include "io/folder.h"
#include "io/json_write.h"
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

/* ---- generation_config.json ------------------------------------------------------------------ */

static void add_end(mn_tokenizer *t, int64_t id) {
    const bool there = id >= 0 && id < t->vocab.size && t->vocab.tokens[id].text.bytes;
    for (int i = 0; i < t->n_ends; i++) {
        if (t->ends[i] == id) return;
    }
    if (there && t->n_ends < MN_TOKEN_ENDS) t->ends[t->n_ends++] = (int32_t)id;
}

/* A number or a list of them; what is not in the vocabulary is passed over, since models have more
 * ids than tokenizers. */
static mn_status read_ids(mn_tokenizer *t, int32_t *first, const mn_json *root, const char *key,
                          bool ends) {
    const mn_json at = mn_json_member(root, key);
    mn_status st = MN_OK;
    if (!mn_json_given(&at)) return MN_OK;
    const bool list = json_is_array(at.value);
    for (int64_t i = 0; st == MN_OK && i < (list ? mn_json_count(&at) : 1); i++) {
        const mn_json item = list ? mn_json_item(&at, i) : at;
        int64_t id = -1;
        st = mn_json_read_i64(&id, &item);
        if (st == MN_OK && ends) add_end(t, id);
        if (st == MN_OK && *first < 0 && id >= 0 && id < t->vocab.size) *first = (int32_t)id;
    }
    return st;
}

static mn_status read_generation(mn_tokenizer *t, const char *path) {
    mn_json root = { 0 };
    if (!path || access(path, F_OK) != 0) return MN_OK;
    mn_status st = mn_json_load(&root, path, MN_JSON_PYTHON);
    if (st == MN_OK) st = read_ids(t, &t->bos, &root, "bos_token_id", false);
    if (st == MN_OK) st = read_ids(t, &t->eos, &root, "eos_token_id", true);
    mn_json_free(&root);
    return st;
}

/* ---- reading and writing --------------------------------------------------------------------- */

static mn_status keep_config(mn_tokenizer *t, const char *path) {
    mn_file file = { 0 };
    const mn_status st = mn_file_map(&file, path);
    if (st != MN_OK) return st;
    t->config = malloc(file.size + 1);
    if (t->config) memcpy(t->config, file.bytes, file.size);
    t->config_size = file.size;
    mn_file_unmap(&file);
    return t->config ? MN_OK : mn_fail(MN_ERR_MEMORY, "%s: no memory for a copy", path);
}

mn_status mn_tokenizer_find_ends(mn_tokenizer *t, const char *config_path,
                                 const char *generation_path) {
    int32_t bos = -1, eos = -1;
#define END(which, name) try_end(t, &which, name);
#include "tokenizer/ends.def"
#undef END
    t->bos = bos;
    t->eos = eos;
    mn_status st = MN_OK;
    if (config_path && access(config_path, F_OK) == 0) {
        mn_json root;
        st = mn_json_load(&root, config_path, MN_JSON_PYTHON);
        if (st == MN_OK) st = read_end(t, &t->bos, &root, "bos_token");
        if (st == MN_OK) st = read_end(t, &t->eos, &root, "eos_token");
        mn_json_free(&root);
        if (st == MN_OK) st = keep_config(t, config_path);
    }
    if (st == MN_OK && t->eos >= 0) add_end(t, t->eos);
    return st == MN_OK ? read_generation(t, generation_path) : st;
}

bool mn_tokenizer_ends(const mn_tokenizer *t, int32_t id) {
    for (int i = 0; i < t->n_ends; i++) {
        if (t->ends[i] == id) return true;
    }
    return false;
}

static json_t *token_name(const mn_tokenizer *t, int32_t id) {
    return id >= 0 ? json_string(t->vocab.tokens[id].text.bytes) : json_null();
}

static mn_status save_generation(const mn_tokenizer *t, const char *path) {
    json_t *ends = json_array();
    for (int i = 0; i < t->n_ends; i++) json_array_append_new(ends, json_integer(t->ends[i]));
    json_t *eos = t->n_ends == 1 ? json_integer(t->ends[0])
                                 : t->n_ends > 1 ? json_incref(ends) : json_null();
    json_t *root = json_pack("{s:o, s:o}", "bos_token_id",
                             t->bos >= 0 ? json_integer(t->bos) : json_null(), "eos_token_id",
                             eos);
    const mn_status st = root ? mn_json_save(path, root)
                              : mn_fail(MN_ERR_MEMORY, "no memory to write %s", path);
    json_decref(root);
    json_decref(ends);
    return st;
}

mn_status mn_tokenizer_save_ends(const mn_tokenizer *t, const char *folder) {
    char path[MN_FOLDER_PATH], other[MN_FOLDER_PATH];
    if (snprintf(path, sizeof path, "%s/tokenizer_config.json", folder) >= (int)sizeof path ||
        snprintf(other, sizeof other, "%s/generation_config.json", folder) >= (int)sizeof other) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: the path is too long", folder);
    }
    mn_status st = MN_OK;
    if (t->config) {
        st = mn_file_write_bytes(path, t->config, t->config_size);
    } else {
        json_t *root = json_pack("{s:s, s:o, s:o, s:b}", "tokenizer_class",
                                 "PreTrainedTokenizerFast", "bos_token", token_name(t, t->bos),
                                 "eos_token", token_name(t, t->eos),
                                 "clean_up_tokenization_spaces", 0);
        st = root ? mn_json_save(path, root) : mn_fail(MN_ERR_MEMORY, "no memory for %s", path);
        json_decref(root);
    }
    return st == MN_OK ? save_generation(t, other) : st;
}
