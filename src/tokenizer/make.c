/* make.c - writes the tokenizer.json of tokenizers that are made here.
 *
 * What is made goes through the same reader as what is loaded, so that there is one meaning. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/json_write.h"
#include "tokenizer/tokenizer_internal.h"
#include "base/utf8.h"

static const mn_training_pattern patterns[] = {
#define PATTERN(name, nfc, regex) { #name, regex, nfc },
#include "tokenizer/patterns.def"
#undef PATTERN
};

const mn_training_pattern *mn_training_pattern_find(const char *name) {
    mn_text names = { 0 };
    for (size_t i = 0; i < MN_COUNTOF(patterns); i++) {
        if (strcmp(patterns[i].name, name ? name : "gpt2") == 0) return &patterns[i];
    }
    mn_status st = MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(patterns) && st == MN_OK; i++) {
        if (i > 0) st = mn_text_add(&names, ", ", 2);
        if (st == MN_OK) st = mn_text_add(&names, patterns[i].name, strlen(patterns[i].name));
    }
    if (st == MN_OK) {
        mn_fail(MN_ERR_ARGUMENT, "no pattern is called \"%s\"; there are %.*s", name,
                (int)names.size, names.bytes);
    }
    mn_text_free(&names);
    return NULL;
}

/* ---- parts of the document; NULL from any of them means no memory ---------------------------- */

static json_t *byte_level(bool use_regex) {
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                     "trim_offsets", 0, "use_regex", use_regex);
}

static json_t *splitter_of(const mn_training_pattern *pattern) {
    if (!pattern->regex) return byte_level(true);
    return json_pack("{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, o]}", "type", "Sequence", "pretokenizers",
                     "type", "Split", "pattern", "Regex", pattern->regex, "behavior", "Isolated",
                     "invert", 0, byte_level(false));
}

static json_t *normaliser_of(const mn_training_pattern *pattern) {
    return pattern && pattern->nfc ? json_pack("{s:s}", "type", "NFC") : json_null();
}

/* Adds `count` special tokens from id 0 on. */
static json_t *added_of(const mn_span *tokens, int64_t count) {
    json_t *list = json_array();
    for (int64_t i = 0; list && i < count; i++) {
        json_t *row = json_pack("{s:I, s:s%, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)i,
                                "content", tokens[i].bytes, tokens[i].size, "single_word", 0,
                                "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1);
        if (!row || json_array_append_new(list, row) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *vocab_of(const mn_span *tokens, int64_t count) {
    json_t *vocab = json_object();
    for (int64_t i = 0; vocab && i < count; i++) {
        if (json_object_set_new(vocab, tokens[i].bytes, json_integer(i)) != 0) {
            json_decref(vocab);
            return NULL;
        }
    }
    return vocab;
}

static json_t *merges_of(const mn_span *tokens, const int32_t (*merges)[2], int64_t count) {
    json_t *list = json_array();
    for (int64_t i = 0; list && i < count; i++) {
        const mn_span a = tokens[merges[i][0]], b = tokens[merges[i][1]];
        json_t *pair = json_pack("[s%, s%]", a.bytes, a.size, b.bytes, b.size);
        if (!pair || json_array_append_new(list, pair) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *document(json_t *added, json_t *normaliser, json_t *splitter, json_t *decoder,
                        json_t *vocab, json_t *merges) {
    json_t *model = json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:o}", "type", "BPE",
                              "dropout", "unk_token", "continuing_subword_prefix",
                              "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0,
                              "ignore_merges", 0, "vocab", vocab, "merges", merges);
    return json_pack("{s:s, s:n, s:n, s:o, s:o, s:o, s:n, s:o, s:o}", "version", "1.0",
                     "truncation", "padding", "added_tokens", added, "normalizer", normaliser,
                     "pre_tokenizer", splitter, "post_processor", "decoder", decoder, "model",
                     model);
}

/* Writes the document and reads it back. */
static mn_status finish(mn_tokenizer **out, json_t *root, const char *name) {
    char *text = NULL;
    if (!root) return mn_fail(MN_ERR_MEMORY, "%s: no memory for a vocabulary", name);
    mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    json_decref(root);
    if (st == MN_OK) st = mn_tokenizer_parse(out, text, strlen(text), name);
    free(text);
    return st;
}

mn_status mn_tokenizer_assemble(mn_tokenizer **out, const mn_span *tokens, int64_t n_tokens,
                                int64_t n_special, const int32_t (*merges)[2], int64_t n_merges,
                                const mn_training_pattern *pattern) {
    json_t *root = document(added_of(tokens, n_special), normaliser_of(pattern),
                            splitter_of(pattern), byte_level(true), vocab_of(tokens, n_tokens),
                            merges_of(tokens, merges, n_merges));
    return finish(out, root, "the trained tokenizer");
}

mn_status mn_training_splitter(mn_splitter *splitter, mn_normaliser *normaliser,
                               const mn_training_pattern *pattern) {
    json_t *values[] = { splitter_of(pattern), normaliser_of(pattern) };
    const mn_json at[] = { { .value = values[0], .name = "pattern" },
                           { .value = values[1], .name = "pattern" } };
    mn_status st = MN_OK;
    if (!values[0] || !values[1]) st = mn_fail(MN_ERR_MEMORY, "no memory for a pattern");
    if (st == MN_OK) st = mn_splitter_read(splitter, &at[0]);
    if (st == MN_OK) st = mn_normaliser_read(normaliser, &at[1]);
    json_decref(values[0]);
    json_decref(values[1]);
    return st;
}

mn_status mn_tokenizer_bytes(mn_tokenizer **out) {
    char text[256][5] = { "" };
    mn_span tokens[256];
    *out = NULL;
    for (int i = 0; i < 256; i++) {
        tokens[i].bytes = text[i];
        tokens[i].size = (size_t)mn_utf8_put(text[i], mn_byte_char((uint8_t)i));
    }
    json_t *root = document(json_array(), json_null(), byte_level(false), byte_level(true),
                            vocab_of(tokens, 256), json_array());
    return finish(out, root, "the vocabulary of bytes");
}

/* ---- characters ------------------------------------------------------------------------------ */

enum { N_POINTS = 0x110000 };

/* Marks the code points of `text` in a bit set. */
static mn_status mark_points(uint8_t *seen, const char *text, size_t size) {
    for (size_t at = 0; at < size;) {
        uint32_t point;
        const int length = mn_utf8_take(text + at, size - at, &point);
        if (point == MN_UTF8_BAD) {
            return mn_fail(MN_ERR_FORMAT, "byte %zu of the text is not UTF-8; use a vocabulary of "
                           "bytes for such text", at);
        }
        if (point == 0) {
            return mn_fail(MN_ERR_FORMAT, "byte %zu of the text is zero, which a vocabulary of "
                           "characters cannot hold; use one of bytes", at);
        }
        seen[point / 8] |= (uint8_t)(1u << point % 8);
        at += (size_t)length;
    }
    return MN_OK;
}

mn_status mn_tokenizer_chars(mn_tokenizer **out, const char *text, size_t size) {
    *out = NULL;
    if (size == 0) return mn_fail(MN_ERR_ARGUMENT, "an empty text has no characters to learn");
    uint8_t *seen = calloc(N_POINTS / 8, 1);
    if (!seen) return mn_fail(MN_ERR_MEMORY, "no memory to count characters");
    mn_status st = mark_points(seen, text, size);
    json_t *vocab = json_object();
    for (uint32_t point = 0, id = 0; point < N_POINTS && st == MN_OK && vocab; point++) {
        if (!(seen[point / 8] & 1u << point % 8)) continue;
        char bytes[5] = "";
        mn_utf8_put(bytes, point);
        if (json_object_set_new(vocab, bytes, json_integer(id++)) != 0) {
            st = mn_fail(MN_ERR_MEMORY, "no memory for a vocabulary of characters");
        }
    }
    free(seen);
    if (st != MN_OK) {
        json_decref(vocab);
        return st;
    }
    json_t *root = document(json_array(), json_null(), json_null(),
                            json_pack("{s:s}", "type", "Fuse"), vocab, json_array());
    return finish(out, root, "the vocabulary of characters");
}
