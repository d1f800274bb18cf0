/* tokenizer.c - a tokenizer as a whole: loading, encoding, and what there is to ask.
 *
 * The stages are in files of their own, see tokenizer_internal.h. */
#include "tokenizer/tokenizer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "io/file.h"
#include "io/folder.h"
#include "tokenizer/tokenizer_internal.h"
#include "base/utf8.h"

/* ---- lists ----------------------------------------------------------------------------------- */

mn_status mn_token_list_add(mn_token_list *list, int32_t id) {
    if (list->count == list->capacity) {
        const int64_t capacity = list->capacity > 0 ? 2 * list->capacity : 64;
        const bool fits = capacity <= (int64_t)(SIZE_MAX / 2 / sizeof *list->ids);
        int32_t *ids = fits ? realloc(list->ids, (size_t)capacity * sizeof *ids) : NULL;
        if (!ids) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " tokens", capacity);
        list->ids = ids;
        list->capacity = capacity;
    }
    list->ids[list->count++] = id;
    return MN_OK;
}

void mn_token_list_free(mn_token_list *list) {
    free(list->ids);
    *list = (mn_token_list){ 0 };
}

/* ---- making ---------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t hash, const void *bytes, size_t size) {
    const uint8_t *b = bytes;                      // FNV-1a, 64 bits
    for (size_t i = 0; i < size; i++) hash = (hash ^ b[i]) * 0x100000001B3u;
    return hash;
}

/* Every part of the document that can change what encoding or decoding gives, in an order that does
 * not depend on how the file is laid out. */
static mn_status take_fingerprint(mn_tokenizer *t, const mn_json *root) {
    static const char *const rules[] = { "normalizer", "pre_tokenizer", "post_processor", "decoder",
                                         "added_tokens" };
    uint64_t hash = 0xCBF29CE484222325u;
    for (int64_t id = 0; id < t->vocab.size; id++) {
        const mn_token *token = &t->vocab.tokens[id];
        if (!token->text.bytes) continue;
        hash = mix(hash, &id, sizeof id);
        hash = mix(hash, token->text.bytes, token->text.size + 1);
    }
    const mn_json model = mn_json_member(root, "model"), merges = mn_json_member(&model, "merges");
    for (int64_t i = 0; i < mn_json_count(&merges); i++) {
        const mn_json item = mn_json_item(&merges, i);
        const char *whole = json_string_value(item.value);    // NULL for a list of two
        for (int64_t k = 0; k < mn_json_count(&item); k++) {
            const mn_json side = mn_json_item(&item, k);
            const char *text = json_string_value(side.value);
            hash = mix(hash, text, strlen(text));
            hash = mix(hash, k == 0 ? " " : "", 1);
        }
        if (whole) hash = mix(hash, whole, strlen(whole) + 1);
    }
    const int32_t flags[] = { t->bpe.unk_id, t->bpe.byte_fallback, t->bpe.fuse_unk,
                              t->bpe.ignore_merges };
    hash = mix(hash, flags, sizeof flags);
    if (t->model == MN_TOKEN_UNIGRAM) {
        hash = mix(hash, t->unigram.scores, (size_t)t->vocab.size * sizeof *t->unigram.scores);
        hash = mix(hash, &t->unigram.unk_id, sizeof t->unigram.unk_id);
    }
    if (t->model == MN_TOKEN_WORDPIECE) {
        hash = mix(hash, t->wordpiece.prefix.bytes, t->wordpiece.prefix.size + 1);
        hash = mix(hash, &t->wordpiece.unk_id, sizeof t->wordpiece.unk_id);
    }
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const mn_json rule = mn_json_member(root, rules[i]);
        char *text = mn_json_given(&rule) ? json_dumps(rule.value, JSON_COMPACT | JSON_SORT_KEYS |
                                                       JSON_ENCODE_ANY) : strdup("null");
        if (!text) return mn_fail(MN_ERR_MEMORY, "no memory for a fingerprint");
        hash = mix(hash, text, strlen(text) + 1);
        free(text);
    }
    t->fingerprint = hash;
    return MN_OK;
}

static mn_status read_document(mn_tokenizer *t, const mn_json *root) {
    const mn_json normaliser = mn_json_member(root, "normalizer");
    const mn_json splitter = mn_json_member(root, "pre_tokenizer");
    const mn_json template = mn_json_member(root, "post_processor");
    const mn_json decoder = mn_json_member(root, "decoder");
    mn_status st = mn_json_expect_object(root);
    if (st == MN_OK) st = mn_normaliser_read(&t->normaliser, &normaliser);
    if (st == MN_OK) st = mn_splitter_read(&t->splitter, &splitter);
    if (st == MN_OK) st = mn_tokenizer_read_model(t, root);
    if (st == MN_OK) st = mn_tokenizer_read_added(t, root);
    if (st == MN_OK) st = mn_template_read(&t->template, &template, t->vocab.size);
    if (st == MN_OK) st = mn_decoder_read(&t->decoder, &decoder);
    if (st == MN_OK) t->bpe.strict = strcmp(mn_tokenizer_kind(t), "chars") == 0;
    return st == MN_OK ? take_fingerprint(t, root) : st;
}

static mn_status parse(mn_tokenizer **out, const void *bytes, size_t size, const char *name,
                       const char *config_path, const char *generation_path) {
    mn_tokenizer *t = calloc(1, sizeof *t);
    mn_json root = { 0 };
    *out = NULL;
    if (!t) return mn_fail(MN_ERR_MEMORY, "%s: no memory for a tokenizer", name);
    t->bos = t->eos = -1;
    mn_status st = mn_json_parse(&root, bytes, size, name, MN_JSON_STANDARD);
    if (st == MN_OK) st = read_document(t, &root);
    mn_json_free(&root);
    if (st == MN_OK) st = mn_tokenizer_find_ends(t, config_path, generation_path);
    if (st == MN_OK) t->source = malloc(size);
    if (st == MN_OK && !t->source) st = mn_fail(MN_ERR_MEMORY, "%s: no memory for a copy", name);
    if (st != MN_OK) {
        mn_tokenizer_destroy(t);
        return st;
    }
    memcpy(t->source, bytes, size);
    t->source_size = size;
    *out = t;
    return MN_OK;
}

mn_status mn_tokenizer_parse(mn_tokenizer **out, const void *bytes, size_t size, const char *name) {
    return parse(out, bytes, size, name, NULL, NULL);
}

/* FOLDER/NAME, the folder being the one that `path` is or lies in. */
static mn_status beside(mn_text *out, const char *path, bool is_folder, const char *name) {
    const char *slash = strrchr(path, '/');
    const size_t n = is_folder ? strlen(path) : slash ? (size_t)(slash - path) : 0;
    mn_status st = mn_text_add(out, path, n);
    if (st == MN_OK && (is_folder || slash)) st = mn_text_add(out, "/", 1);
    return st == MN_OK ? mn_text_add(out, name, strlen(name) + 1) : st;
}

mn_status mn_tokenizer_load(mn_tokenizer **out, const char *path) {
    struct stat info;
    mn_text file_path = { 0 }, config_path = { 0 }, generation_path = { 0 };
    mn_file file = { 0 };
    if (!out) return mn_fail(MN_ERR_ARGUMENT, "mn_tokenizer_load: out is NULL");
    *out = NULL;
    if (!path || !*path) return mn_fail(MN_ERR_ARGUMENT, "no name of a tokenizer file was given");
    const bool is_folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    char model[MN_FOLDER_PATH];
    if (is_folder && mn_folder_of_model(model, path) == MN_OK) path = model;
    mn_status st = is_folder ? beside(&file_path, path, true, "tokenizer.json")
                             : mn_text_add(&file_path, path, strlen(path) + 1);
    if (st == MN_OK) st = beside(&config_path, path, is_folder, "tokenizer_config.json");
    if (st == MN_OK) st = beside(&generation_path, path, is_folder, "generation_config.json");
    if (st == MN_OK) st = mn_file_map(&file, file_path.bytes);
    if (st == MN_OK) {
        st = parse(out, file.bytes, file.size, file_path.bytes, config_path.bytes,
                   generation_path.bytes);
    }
    mn_file_unmap(&file);
    mn_text_free(&file_path);
    mn_text_free(&config_path);
    mn_text_free(&generation_path);
    return st;
}

mn_status mn_tokenizer_open(mn_tokenizer **out, const char *name) {
    struct stat info;
    *out = NULL;
    if (strcmp(name, "bytes") == 0) return mn_tokenizer_bytes(out);
    if (*name && stat(name, &info) != 0) {
        return mn_fail(MN_ERR_IO, "%s: no such file; a tokenizer is bytes, chars, or the name of a "
                       "tokenizer.json or its folder", name);
    }
    return mn_tokenizer_load(out, name);
}

void mn_tokenizer_destroy(mn_tokenizer *t) {
    if (!t) return;
    mn_vocab_free(&t->vocab);
    mn_pair_map_free(&t->bpe.merges);
    mn_pair_map_free(&t->bpe.borders);
    mn_unigram_free(&t->unigram);
    mn_added_free(&t->added);
    mn_normaliser_free(&t->normaliser);
    mn_splitter_free(&t->splitter);
    mn_template_free(&t->template);
    mn_decoder_free(&t->decoder);
    free(t->source);
    free(t->config);
    free(t);
}

mn_status mn_tokenizer_save(const mn_tokenizer *t, const char *path) {
    return mn_file_write_bytes(path, t->source, t->source_size);
}

/* ---- encoding -------------------------------------------------------------------------------- */

/* One call. */
typedef struct encoding {
    const mn_tokenizer *t;
    mn_token_list *out;
    mn_bpe_room room;
    mn_word_room words;
    mn_split_visit split;
    mn_matcher word;
    mn_text a, b;            // of the normaliser
    bool special;
} encoding;

static mn_status use_piece(void *context, const char *piece, size_t size) {
    encoding *e = context;
    const mn_tokenizer *t = e->t;
    switch (t->model) {
    case MN_TOKEN_UNIGRAM:
        return mn_unigram_encode(&t->unigram, &t->vocab, &e->words, piece, size, e->out);
    case MN_TOKEN_WORDPIECE:
        return mn_wordpiece_encode(&t->wordpiece, &t->vocab, &e->words, piece, size, e->out);
    case MN_TOKEN_BPE: break;
    }
    return mn_bpe_encode(&t->bpe, &t->vocab, &e->room, piece, size, e->out);
}

/* Hands what lies between the added tokens of `set` to `use`, and appends the tokens. `first`: the
 * text starts here. */
static mn_status between(encoding *e, const mn_added_set *set, mn_span text, bool first,
                         mn_status (*use)(encoding *e, mn_span text, bool first)) {
    if (set->first[256] == 0) return use(e, text, first);
    mn_added_visit walk = { .tokens = &e->t->added, .set = set, .word = &e->word,
                           .special = e->special, .text = text };
    mn_status st = MN_OK;
    for (bool found = true; found && st == MN_OK;) {
        mn_added_match match;
        const size_t done = walk.done;
        st = mn_added_next(&walk, &match, &found);
        if (st != MN_OK) break;
        const size_t end = found ? match.start : text.size;
        const mn_span gap = { text.bytes + done, end > done ? end - done : 0 };
        if (gap.size > 0) st = use(e, gap, first && done == 0);
        if (found && st == MN_OK) st = mn_token_list_add(e->out, match.id);
    }
    return st;
}

static mn_status split(encoding *e, mn_span text, bool first) {
    return mn_split(&e->split, text, first);
}

static mn_status normalise(encoding *e, mn_span text, bool first) {
    mn_span normal;
    const mn_status st = mn_normalise(&e->t->normaliser, &e->a, &e->b, text, &normal);
    return st == MN_OK ? between(e, &e->t->added.normalized, normal, first, split) : st;
}

/* Bytes that are no text, in a byte-level vocabulary: one piece, kept as they are. */
static mn_status keep_bytes(encoding *e, mn_span bytes) {
    if (e->t->bpe.byte_pieces) return use_piece(e, bytes.bytes, bytes.size);
    e->a.size = 0;
    const mn_status st = mn_bytes_spell(&e->a, bytes.bytes, bytes.size);
    return st == MN_OK ? use_piece(e, e->a.bytes, e->a.size) : st;
}

/* Stretches of valid UTF-8 go through the stages, what is between them does not. */
static mn_status stretches(encoding *e, mn_span text, bool first) {
    mn_status st = MN_OK;
    for (size_t at = 0; at < text.size && st == MN_OK;) {
        const size_t valid = mn_utf8_valid(text.bytes + at, text.size - at);
        if (valid > 0) st = normalise(e, (mn_span){ text.bytes + at, valid }, first && at == 0);
        at += valid;
        size_t bad = at;
        while (bad < text.size && st == MN_OK) {
            uint32_t point;
            const int length = mn_utf8_take(text.bytes + bad, text.size - bad, &point);
            if (point != MN_UTF8_BAD) break;
            bad += (size_t)length;
        }
        if (bad > at && st == MN_OK) st = keep_bytes(e, (mn_span){ text.bytes + at, bad - at });
        at = bad;
    }
    return st;
}

static mn_status add_all(mn_token_list *out, const mn_token_list *ids, bool wanted) {
    mn_status st = MN_OK;
    for (int64_t i = 0; wanted && i < ids->count && st == MN_OK; i++) {
        st = mn_token_list_add(out, ids->ids[i]);
    }
    return st;
}

static mn_status encode(const mn_tokenizer *t, const char *text, size_t size, bool special,
                        bool template, mn_token_list *out) {
    encoding e = { .t = t, .out = out, .word = { .pattern = &t->added.word }, .special = special };
    const int64_t before = out->count;
    mn_span all = { text, size };
    mn_text copy = { 0 };
    mn_status st = mn_split_visit_open(&e.split, &t->splitter);
    e.split.use = use_piece;
    e.split.context = &e;
    if (st == MN_OK && !t->splitter.byte_level && mn_utf8_valid(text, size) < size) {
        st = mn_text_add_utf8(&copy, text, size);
        all = (mn_span){ copy.bytes, copy.size };
    }
    e.room.text = all;
    if (st == MN_OK) st = add_all(out, &t->template.before, template);
    if (st == MN_OK && size > 0) st = between(&e, &t->added.plain, all, true, stretches);
    if (st == MN_OK) st = add_all(out, &t->template.after, template);
    if (st != MN_OK) out->count = before;
    mn_split_visit_close(&e.split);
    mn_bpe_room_free(&e.room);
    free(e.words.best);
    mn_text_free(&e.words.text);
    mn_matcher_free(&e.word);
    mn_text_free(&e.a);
    mn_text_free(&e.b);
    mn_text_free(&copy);
    return st;
}

mn_status mn_tokenizer_encode(const mn_tokenizer *t, const char *text, size_t size, bool special,
                              mn_token_list *out) {
    return encode(t, text, size, special, special, out);
}

mn_status mn_tokenizer_encode_bare(const mn_tokenizer *t, const char *text, size_t size,
                                   mn_token_list *out) {
    return encode(t, text, size, true, false, out);
}

/* ---- questions ------------------------------------------------------------------------------- */

int64_t mn_tokenizer_size(const mn_tokenizer *t) {
    return t->vocab.size;
}

uint64_t mn_tokenizer_fingerprint(const mn_tokenizer *t) {
    return t->fingerprint;
}

const char *mn_tokenizer_kind(const mn_tokenizer *t) {
    if (t->model == MN_TOKEN_UNIGRAM) return "unigram";
    if (t->model == MN_TOKEN_WORDPIECE) return "wordpiece";
    if (t->bpe.n_merges > 0 || t->bpe.ignore_merges) return "bpe";
    if (t->splitter.byte_pieces) return "bytes";
    const bool spare = t->bpe.unk_id >= 0 || t->bpe.byte_fallback || t->splitter.byte_level;
    return spare ? "bpe" : "chars";
}

int32_t mn_tokenizer_find(const mn_tokenizer *t, const char *token) {
    const mn_vocab *vocab = &t->vocab;
    const size_t size = strlen(token);
    const int32_t id = mn_id_map_find(&vocab->by_text, vocab->tokens, token, size);
    return id >= 0 ? id : mn_id_map_find(&vocab->by_piece, vocab->tokens, token, size);
}

int32_t mn_tokenizer_bos(const mn_tokenizer *t) {
    return t->bos;
}

int32_t mn_tokenizer_eos(const mn_tokenizer *t) {
    return t->eos;
}
