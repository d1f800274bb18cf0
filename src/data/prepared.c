/* prepared.c - the folder that mneme prepare writes, seen from its index.json. */
#define _XOPEN_SOURCE 700    // strdup
#include "data/prepared.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "data/hash.h"
#include "base/util.h"
#include "io/cursor.h"
#include "io/file.h"
#include "io/json.h"
#include "io/json_write.h"

enum { VERSION = 1 };

static const char format_name[] = "mneme prepared";

const char *const mn_split_names[MN_SPLIT_COUNT] = { "train", "valid" };

static char *path_in(const char *folder, const char *name) {
    const size_t room = strlen(folder) + strlen(name) + 2;
    char *path = malloc(room);
    if (path) snprintf(path, room, "%s/%s", folder, name);
    return path;
}

char *mn_shard_path(const char *folder, int split, int64_t shard, const char *ending) {
    char name[64];
    snprintf(name, sizeof name, "%s_%06" PRId64 ".%s", mn_split_names[split], shard, ending);
    return path_in(folder, name);
}

mn_status mn_split_add(mn_split *split, const mn_shard *shard) {
    if (split->n_shards == split->capacity) {
        const int64_t capacity = 2 * split->capacity + 16;
        mn_shard *grown = realloc(split->shards, (size_t)capacity * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " shards", capacity);
        split->shards = grown;
        split->capacity = capacity;
    }
    split->shards[split->n_shards++] = *shard;
    split->tokens += shard->tokens;
    split->documents += shard->documents;
    return MN_OK;
}

void mn_prepared_free(mn_prepared *prepared) {
    for (int i = 0; i < MN_SPLIT_COUNT; i++) free(prepared->splits[i].shards);
    free(prepared->tokenizer_kind);
    free(prepared->text_key);
    free(prepared->separator);
    free(prepared->format);
    *prepared = (mn_prepared){ 0 };
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Hashes are written as 16 hexadecimal digits: JSON's numbers end at 2^53. */
static mn_status get_hash(uint64_t *out, const mn_json *object, const char *key) {
    const char *text;
    mn_status st = mn_json_get_text(&text, object, key);
    if (st != MN_OK) return st;
    if (strlen(text) != 16 || strspn(text, "0123456789abcdef") != 16) {
        const mn_json at = mn_json_member(object, key);
        return mn_json_fail(&at, "expected 16 hexadecimal digits, found \"%s\"", text);
    }
    *out = strtoull(text, NULL, 16);
    return MN_OK;
}

/* A whole number in [low, high]. */
static mn_status get_count(int64_t *out, const mn_json *object, const char *key, int64_t low,
                           int64_t high) {
    int64_t value;
    const mn_status st = mn_json_get_i64(&value, object, key);
    if (st != MN_OK) return st;
    if (value < low || value > high) {
        const mn_json at = mn_json_member(object, key);
        return mn_json_fail(&at, "%" PRId64 " is not in %" PRId64 "..%" PRId64, value, low, high);
    }
    *out = value;
    return MN_OK;
}

static mn_status get_copy(char **out, const mn_json *object, const char *key) {
    const char *text;
    const mn_status st = mn_json_get_text(&text, object, key);
    if (st == MN_OK && !(*out = strdup(text))) return mn_fail(MN_ERR_MEMORY, "no memory for text");
    return st;
}

static mn_status read_shard(mn_split *split, const mn_json *item) {
    mn_shard shard = { 0 };
    mn_status st = get_count(&shard.tokens, item, "tokens", 1, MN_BIN_MAX_TOKENS);
    if (st == MN_OK) st = get_count(&shard.documents, item, "documents", 0, shard.tokens);
    if (st == MN_OK) st = get_count(&shard.largest, item, "largest", 0, INT32_MAX);
    if (st == MN_OK) st = get_hash(&shard.hash, item, "hash");
    if (st == MN_OK) st = get_hash(&shard.documents_hash, item, "documents_hash");
    return st == MN_OK ? mn_split_add(split, &shard) : st;
}

static mn_status read_splits(mn_prepared *out, const mn_json *root) {
    const mn_json splits = mn_json_member(root, "splits");
    mn_status st = mn_json_expect_object(&splits);
    for (int i = 0; i < MN_SPLIT_COUNT && st == MN_OK; i++) {
        const mn_json list = mn_json_member(&splits, mn_split_names[i]);
        if (!mn_json_given(&list)) continue;
        st = mn_json_expect_list(&list);
        for (int64_t j = 0; j < mn_json_count(&list) && st == MN_OK; j++) {
            const mn_json item = mn_json_item(&list, j);
            st = read_shard(&out->splits[i], &item);
        }
    }
    return st;
}

static mn_status read_settings(mn_prepared *out, const mn_json *root) {
    const mn_json tokenizer = mn_json_member(root, "tokenizer");
    const mn_json settings = mn_json_member(root, "settings");
    const mn_json input = mn_json_member(root, "input");
    const mn_json separator = mn_json_member(&settings, "separator");
    mn_status st = get_hash(&out->tokenizer, &tokenizer, "fingerprint");
    if (st == MN_OK) st = get_copy(&out->tokenizer_kind, &tokenizer, "kind");
    if (st == MN_OK) st = get_copy(&out->text_key, &settings, "text_key");
    if (st == MN_OK) st = get_copy(&out->format, &settings, "format");
    if (st == MN_OK && mn_json_given(&separator)) {
        st = get_copy(&out->separator, &settings, "separator");
    }
    if (st == MN_OK) st = mn_json_get_f64(&out->valid, &settings, "valid");
    if (st == MN_OK) {
        st = get_count(&out->shard_tokens, &settings, "shard_tokens", 1, MN_BIN_MAX_TOKENS);
    }
    if (st == MN_OK) st = get_count(&out->input_files, &input, "files", 1, INT64_MAX);
    if (st == MN_OK) st = get_count(&out->input_bytes, &input, "bytes", 0, INT64_MAX);
    return st == MN_OK ? get_hash(&out->input, &input, "fingerprint") : st;
}

static mn_status read_place(mn_prepared *out, const mn_json *root) {
    const mn_json place = mn_json_member(root, "resume");
    if (out->complete) return MN_OK;
    mn_status st = get_count(&out->place.piece, &place, "piece", 0, INT64_MAX);
    if (st == MN_OK) st = get_count(&out->place.skip, &place, "skip", 0, INT64_MAX);
    if (st == MN_OK) st = get_count(&out->place.open, &place, "open", 0, INT64_MAX);
    return st == MN_OK ? get_hash(&out->input_times, &place, "input_times") : st;
}

/* Hash of everything in the index but the seal itself; 0 when memory is out. */
static uint64_t seal_of(const json_t *root) {
    json_t *rest = json_copy((json_t *)root);
    char *text = NULL;
    mn_hash hash = { 0 };
    if (rest && (json_object_del(rest, "seal") == 0 || !json_object_get(rest, "seal"))) {
        text = json_dumps(rest, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(17));
    }
    if (text) mn_hash_add(&hash, text, strlen(text));
    const uint64_t value = text ? mn_hash_value(&hash) : 0;
    free(text);
    json_decref(rest);
    return value;
}

static mn_status check_seal(const mn_json *root) {
    const mn_json at = mn_json_member(root, "seal");
    uint64_t seal;
    if (!mn_json_given(&at)) {
        return mn_json_fail(root, "has no seal: damaged, or of an older mneme; prepare it again");
    }
    const mn_status st = get_hash(&seal, root, "seal");
    if (st != MN_OK || seal == seal_of(root->value)) return st;
    return mn_json_fail(&at, "is not that of this index: it is not as it was written");
}

static mn_status read_index(mn_prepared *out, const mn_json *root) {
    const char *format;
    int64_t version, token_bytes = 0;
    mn_status st = mn_json_get_text(&format, root, "format");
    if (st == MN_OK && strcmp(format, format_name) != 0) {
        return mn_json_fail(root, "the format is \"%s\", expected \"%s\"", format, format_name);
    }
    if (st == MN_OK) st = get_count(&version, root, "version", VERSION, VERSION);
    if (st == MN_OK) st = mn_json_get_bool(&out->complete, root, "complete");
    if (st == MN_OK) st = get_count(&out->vocab_size, root, "vocab_size", 1, INT32_MAX);
    if (st == MN_OK) st = get_count(&token_bytes, root, "token_bytes", 2, 4);
    if (st == MN_OK) st = get_count(&out->document_end, root, "document_end", -1, INT32_MAX);
    out->token_bytes = token_bytes == 2 ? 2 : 4;
    if (st == MN_OK) st = read_settings(out, root);
    if (st == MN_OK) st = read_splits(out, root);
    if (st == MN_OK) st = read_place(out, root);
    return st == MN_OK ? check_seal(root) : st;
}

mn_status mn_prepared_load(mn_prepared *out, const char *folder) {
    *out = (mn_prepared){ 0 };
    mn_json root;
    char *path = path_in(folder, "index.json");
    if (!path) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    mn_status st = mn_json_load(&root, path, MN_JSON_STANDARD);
    if (st == MN_OK) {
        st = read_index(out, &root);
        mn_json_free(&root);
    }
    free(path);
    if (st != MN_OK) mn_prepared_free(out);
    return st;
}

/* ---- writing --------------------------------------------------------------------------------- */

static json_t *hash_text(uint64_t hash) {
    char text[17];
    snprintf(text, sizeof text, "%016" PRIx64, hash);
    return json_string(text);
}

static json_t *shards_of(const mn_split *split) {
    json_t *list = json_array();
    for (int64_t i = 0; list && i < split->n_shards; i++) {
        const mn_shard *shard = &split->shards[i];
        json_t *item = json_pack("{s:I, s:I, s:I, s:o, s:o}", "tokens", (json_int_t)shard->tokens,
                                 "documents", (json_int_t)shard->documents, "largest",
                                 (json_int_t)shard->largest, "hash", hash_text(shard->hash),
                                 "documents_hash", hash_text(shard->documents_hash));
        if (item && json_array_append_new(list, item) == 0) continue;
        json_decref(list);
        return NULL;
    }
    return list;
}

static json_t *index_of(const mn_prepared *p) {
    json_t *root = json_pack(
        "{s:s, s:i, s:b, s:I, s:i, s:I, s:{s:s, s:s, s:o}, s:{s:s, s:s, s:s?, s:o, s:I}, "
        "s:{s:I, s:I, s:o}, s:{s:o, s:o}}",
        "format", format_name, "version", VERSION, "complete", (int)p->complete, "vocab_size",
        (json_int_t)p->vocab_size, "token_bytes", p->token_bytes, "document_end",
        (json_int_t)p->document_end, "tokenizer", "file", "tokenizer.json", "kind",
        p->tokenizer_kind, "fingerprint", hash_text(p->tokenizer), "settings", "format", p->format,
        "text_key", p->text_key, "separator", p->separator, "valid", mn_json_real(p->valid),
        "shard_tokens", (json_int_t)p->shard_tokens, "input", "files", (json_int_t)p->input_files,
        "bytes", (json_int_t)p->input_bytes, "fingerprint", hash_text(p->input), "splits", "train",
        shards_of(&p->splits[MN_SPLIT_TRAIN]), "valid", shards_of(&p->splits[MN_SPLIT_VALID]));
    if (!root || p->complete) return root;
    json_t *place = json_pack("{s:I, s:I, s:I, s:o}", "piece", (json_int_t)p->place.piece, "skip",
                              (json_int_t)p->place.skip, "open", (json_int_t)p->place.open,
                              "input_times", hash_text(p->input_times));
    if (place && json_object_set_new(root, "resume", place) == 0) return root;
    json_decref(root);
    return NULL;
}

mn_status mn_prepared_save(const mn_prepared *prepared, const char *folder) {
    char *path = path_in(folder, "index.json");
    json_t *root = index_of(prepared);
    if (root) json_object_set_new(root, "seal", hash_text(seal_of(root)));
    const mn_status st = path && root ? mn_json_save(path, root)
                                      : mn_fail(MN_ERR_MEMORY, "%s: no memory for its index",
                                                folder);
    json_decref(root);
    free(path);
    return st;
}

/* ---- shards ---------------------------------------------------------------------------------- */

mn_status mn_shard_open(mn_bin *out, const mn_prepared *prepared, const char *folder, int split,
                        int64_t shard) {
    *out = (mn_bin){ 0 };
    const mn_shard *of = &prepared->splits[split].shards[shard];
    char *path = mn_shard_path(folder, split, shard, "bin");
    if (!path) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    mn_status st = mn_bin_open(out, path, MN_CORPUS_LLMC);
    if (st == MN_OK && (out->shape.n_tokens != of->tokens ||
                        out->shape.token_bytes != prepared->token_bytes)) {
        st = mn_fail(MN_ERR_FORMAT,
                     "%s: holds %" PRId64 " tokens of %d bytes, index.json says %" PRId64
                     " of %d; run mneme prepare again",
                     path, out->shape.n_tokens, out->shape.token_bytes, of->tokens,
                     prepared->token_bytes);
        mn_bin_close(out);
    }
    free(path);
    return st;
}

static mn_status take_documents(int64_t *ends, const mn_shard *shard, const mn_file *file,
                                int64_t first, const char *path) {
    mn_cursor in = mn_cursor_over(file->bytes, file->size);
    if (file->size % 8 != 0 || (int64_t)(file->size / 8) != shard->documents) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: %zu bytes are not the %" PRId64 " ends of documents that index.json "
                       "says; run mneme prepare again",
                       path, file->size, shard->documents);
    }
    int64_t last = first;
    for (int64_t i = 0; i < shard->documents; i++) {
        uint64_t end = 0;
        if (!mn_take_u64le(&in, &end) || end > INT64_MAX || (int64_t)end <= last ||
            (int64_t)end > first + shard->tokens) {
            return mn_fail(MN_ERR_FORMAT, "%s: entry %" PRId64 ": documents end out of order", path,
                           i);
        }
        last = ends[i] = (int64_t)end;
    }
    return MN_OK;
}

mn_status mn_shard_documents(int64_t *ends, const mn_prepared *prepared, const char *folder,
                             int split, int64_t shard, int64_t first) {
    mn_file file;
    char *path = mn_shard_path(folder, split, shard, "documents");
    if (!path) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    mn_status st = mn_file_map(&file, path);
    if (st == MN_OK) {
        st = take_documents(ends, &prepared->splits[split].shards[shard], &file, first, path);
    }
    mn_file_unmap(&file);
    free(path);
    return st;
}
