/* tokens.c - tokenizer.json as the lists that llama.cpp reads: tokens, types, merges, ids. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "io/file.h"
#include "io/json.h"
#include "model/gguf/gguf.h"

enum { PATH = 4096, NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER = 4, UNUSED = 5, BYTE = 6 };

static const struct {
    const char *name, *pattern;
} pres[] = {
#define PRE(name, pattern) { name, pattern },
#include "model/gguf/pre.def"
#undef PRE
};

typedef struct lists {
    int64_t n;
    const char **tokens;
    char (*unused)[32];         // names of ids that have no token
    int32_t *types;
    float *scores;
    char **merges;
    int64_t n_merges;
} lists;

static void free_lists(lists *l) {
    for (int64_t i = 0; l->merges && i < l->n_merges; i++) free(l->merges[i]);
    free(l->merges);
    free(l->tokens);
    free(l->unused);
    free(l->types);
    free(l->scores);
}

static mn_status no_memory(void) {
    return mn_fail(MN_ERR_MEMORY, "no memory for the tokens of a GGUF file");
}

/* A file of the folder as JSON; NULL where there is none. */
static json_t *load(const char *folder, const char *name) {
    char path[PATH];
    mn_json root = { 0 };
    if (snprintf(path, PATH, "%s/%s", folder, name) >= PATH) return NULL;
    if (mn_json_load(&root, path, MN_JSON_PYTHON) != MN_OK) return NULL;
    json_t *value = json_incref(root.value);
    mn_json_free(&root);
    return value;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static void set_token(lists *l, int64_t id, const char *text, int32_t type) {
    if (id < 0 || id >= l->n) return;
    l->tokens[id] = text;
    l->types[id] = type;
}

static bool is_byte(const char *text) {
    unsigned value;
    char end;
    return sscanf(text, "<0x%2X%c", &value, &end) == 2 && end == '>' && strlen(text) == 6;
}

static mn_status take_tokens(lists *l, const json_t *root, int64_t vocab_size) {
    const json_t *model = json_object_get(root, "model");
    const char *key, *unknown = json_string_value(json_object_get(model, "unk_token"));
    json_t *value;
    size_t i;
    l->n = vocab_size;
    l->tokens = calloc((size_t)l->n, sizeof *l->tokens);
    l->unused = calloc((size_t)l->n, sizeof *l->unused);
    l->types = calloc((size_t)l->n, sizeof *l->types);
    l->scores = calloc((size_t)l->n, sizeof *l->scores);
    if (!l->tokens || !l->unused || !l->types || !l->scores) return no_memory();
    for (int64_t id = 0; id < l->n; id++) {
        snprintf(l->unused[id], sizeof l->unused[id], "[PAD%lld]", (long long)id);
        set_token(l, id, l->unused[id], UNUSED);
        l->scores[id] = -(float)id;
    }
    json_object_foreach(json_object_get(model, "vocab"), key, value) {
        const bool none = unknown && strcmp(unknown, key) == 0;
        set_token(l, json_integer_value(value), key, none ? UNKNOWN : is_byte(key) ? BYTE : NORMAL);
    }
    json_array_foreach(json_object_get(root, "added_tokens"), i, value) {
        const char *text = json_string_value(json_object_get(value, "content"));
        const int64_t id = json_integer_value(json_object_get(value, "id"));
        const bool special = json_is_true(json_object_get(value, "special"));
        const bool none = unknown && text && strcmp(unknown, text) == 0;
        if (text) set_token(l, id, text, none ? UNKNOWN : special ? CONTROL : USER);
    }
    return MN_OK;
}

/* "a b", or ["a", "b"] with blanks in a part as byte-level tokens have them. */
static char *merge_text(const json_t *merge) {
    if (json_is_string(merge)) return strdup(json_string_value(merge));
    const char *a = json_string_value(json_array_get(merge, 0));
    const char *b = json_string_value(json_array_get(merge, 1));
    if (!a || !b) return NULL;
    char *text = malloc(2 * (strlen(a) + strlen(b)) + 2), *to = text;
    for (const char *at = a; text && *at; at++) {
        if (*at == ' ') to = stpcpy(to, "\u0120");
        else *to++ = *at;
    }
    if (text) *to++ = ' ';
    for (const char *at = b; text && *at; at++) {
        if (*at == ' ') to = stpcpy(to, "\u0120");
        else *to++ = *at;
    }
    if (text) *to = '\0';
    return text;
}

static mn_status take_merges(lists *l, const json_t *root) {
    const json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    const size_t n = json_array_size(merges);
    l->merges = calloc(n + 1, sizeof *l->merges);
    if (!l->merges) return no_memory();
    for (size_t i = 0; i < n; i++) {
        l->merges[i] = merge_text(json_array_get(merges, i));
        if (!l->merges[i]) return mn_fail(MN_ERR_FORMAT, "tokenizer.json: merge %zu is none", i);
        l->n_merges++;
    }
    return MN_OK;
}

/* ---- the kind of tokenizer ------------------------------------------------------------------- */

/* The part of that type in a pre-tokenizer or decoder, or in its sequence; NULL: none. */
static const json_t *part_of(const json_t *part, const char *type) {
    const char *own = json_string_value(json_object_get(part, "type"));
    json_t *value;
    size_t i;
    if (own && strcmp(own, type) == 0) return part;
    const json_t *list = json_object_get(part, "pretokenizers");
    if (!list) list = json_object_get(part, "decoders");
    json_array_foreach(list, i, value) {
        const json_t *found = part_of(value, type);
        if (found) return found;
    }
    return NULL;
}

static const char *pre_of(const json_t *root, char remark[MN_GGUF_REMARK]) {
    const json_t *pre = json_object_get(root, "pre_tokenizer");
    const json_t *pattern = json_object_get(part_of(pre, "Split"), "pattern");
    const char *text = json_string_value(json_object_get(pattern, "Regex"));
    const json_t *cuts = json_object_get(part_of(pre, "ByteLevel"), "use_regex");
    for (size_t i = 0; i < MN_COUNTOF(pres); i++) {
        if (!text && json_is_false(cuts)) break;    // nothing is cut
        if (strcmp(pres[i].pattern, text ? text : "") == 0) return pres[i].name;
    }
    mn_gguf_remark(remark, "how its tokenizer cuts text before merges has no name that is known "
                   "here: tokenizer.ggml.pre is \"default\", and llama.cpp may cut otherwise");
    return "default";
}

static mn_status put_bpe(mn_gguf_keys *keys, char remark[MN_GGUF_REMARK], const json_t *root,
                         bool levels, int64_t vocab_size) {
    lists l = { 0 };
    mn_status st = take_tokens(&l, root, vocab_size);
    if (st == MN_OK && levels) st = take_merges(&l, root);
    if (st == MN_OK) {
        mn_gguf_text(keys, "tokenizer.ggml.model", levels ? "gpt2" : "llama");
        mn_gguf_text(keys, "tokenizer.ggml.pre", levels ? pre_of(root, remark) : "default");
        mn_gguf_texts(keys, "tokenizer.ggml.tokens", l.tokens, l.n);
        if (!levels) mn_gguf_f32s(keys, "tokenizer.ggml.scores", l.scores, l.n);
        mn_gguf_i32s(keys, "tokenizer.ggml.token_type", l.types, l.n);
        if (levels) {
            mn_gguf_texts(keys, "tokenizer.ggml.merges", (const char *const *)l.merges, l.n_merges);
        }
    }
    free_lists(&l);
    return st;
}

/* ---- special tokens -------------------------------------------------------------------------- */

/* The id of a token by its text, among all and the added ones; -1: none. */
static int64_t id_of(const json_t *root, const char *text) {
    json_t *value;
    size_t i;
    if (!text) return -1;
    json_array_foreach(json_object_get(root, "added_tokens"), i, value) {
        const char *content = json_string_value(json_object_get(value, "content"));
        if (content && strcmp(content, text) == 0) {
            return json_integer_value(json_object_get(value, "id"));
        }
    }
    const json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    const json_t *id = json_object_get(vocab, text);
    return json_is_integer(id) ? json_integer_value(id) : -1;
}

static const char *text_of(const json_t *token) {
    const char *text = json_string_value(token);
    return text ? text : json_string_value(json_object_get(token, "content"));
}

static void put_special(mn_gguf_keys *keys, const json_t *root, const char *folder) {
    static const struct {
        const char *token, *id, *key;
    } specials[] = {
        { "bos_token", "bos_token_id", "tokenizer.ggml.bos_token_id" },
        { "eos_token", "eos_token_id", "tokenizer.ggml.eos_token_id" },
        { "unk_token", "unk_token_id", "tokenizer.ggml.unknown_token_id" },
        { "pad_token", "pad_token_id", "tokenizer.ggml.padding_token_id" },
    };
    json_t *of_tokenizer = load(folder, "tokenizer_config.json"), *config = load(folder,
                                                                                 "config.json");
    for (size_t i = 0; i < MN_COUNTOF(specials); i++) {
        int64_t id = id_of(root, text_of(json_object_get(of_tokenizer, specials[i].token)));
        const json_t *given = json_object_get(config, specials[i].id);
        if (json_is_array(given)) given = json_array_get(given, 0);
        if (id < 0 && json_is_integer(given)) id = json_integer_value(given);
        if (id >= 0) mn_gguf_u32(keys, specials[i].key, id);
    }
    const json_t *add = json_object_get(of_tokenizer, "add_bos_token");
    if (json_is_boolean(add)) {
        mn_gguf_bool(keys, "tokenizer.ggml.add_bos_token", json_is_true(add));
    }
    const char *template = json_string_value(json_object_get(of_tokenizer, "chat_template"));
    char path[PATH];
    mn_file file = { 0 };
    if (template) {
        mn_gguf_text(keys, "tokenizer.chat_template", template);
    } else if (snprintf(path, PATH, "%s/chat_template.jinja", folder) < PATH &&
               access(path, F_OK) == 0 && mn_file_map(&file, path) == MN_OK) {
        char *text = strndup((const char *)file.bytes, file.size);
        if (text) mn_gguf_text(keys, "tokenizer.chat_template", text);
        free(text);
    }
    mn_file_unmap(&file);
    json_decref(of_tokenizer);
    json_decref(config);
}

mn_status mn_gguf_put_tokens(mn_gguf_keys *keys, char remark[MN_GGUF_REMARK], const char *folder,
                             int64_t vocab_size) {
    json_t *root = load(folder, "tokenizer.json");
    const json_t *model = json_object_get(root, "model");
    const char *type = json_string_value(json_object_get(model, "type"));
    const bool bpe = type && strcmp(type, "BPE") == 0;
    const bool levels = part_of(json_object_get(root, "pre_tokenizer"), "ByteLevel") ||
                        part_of(json_object_get(root, "decoder"), "ByteLevel");
    const bool falls = json_is_true(json_object_get(model, "byte_fallback"));
    mn_status st = MN_OK;
    if (bpe && (levels || falls)) {
        st = put_bpe(keys, remark, root, levels, vocab_size);
        if (st == MN_OK) put_special(keys, root, folder);
    } else {
        mn_gguf_remark(remark, "%s: the file is without tokens, for ids alone",
                 root ? "its tokenizer is none that llama.cpp has" : "there is no tokenizer.json");
        mn_gguf_text(keys, "tokenizer.ggml.model", "none");
    }
    json_decref(root);
    return st == MN_OK ? keys->status : st;
}
