/* stories_tokenizer.c - the tokenizer.json under which the text of stories is their tokens.
 *
 * Blanks are dropped, marks stand alone, and what is left is words, each in the vocabulary as a
 * whole (ignore_merges). Going back, a blank is put before each word and taken away again where a
 * line starts. Token by token the start of a later line is not seen, and its blank stays. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "io/json_write.h"
#include "tasks/stories.h"

#define UNKNOWN "<unk>"

static json_t *vocabulary(void) {
    json_t *vocab = json_object();
    const int64_t n = mn_stories_words();
    for (int32_t id = 0; vocab && id < n; id++) {
        json_object_set_new(vocab, mn_stories_word(id), json_integer(id));
    }
    json_object_set_new(vocab, UNKNOWN, json_integer(n));
    return vocab;
}

/* A step of the splitter: cuts at what matches `regex` and does `behaviour` to it. */
static json_t *cut(const char *regex, const char *behaviour) {
    return json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern", "Regex", regex,
                     "behavior", behaviour, "invert", 0);
}

static json_t *replace(const char *regex, const char *by) {
    return json_pack("{s:s, s:{s:s}, s:s}", "type", "Replace", "pattern", "Regex", regex, "content",
                     by);
}

/* Back to text: a blank before each word, all in one piece, none at the start of a line. */
static json_t *decoder(void) {
    return json_pack("{s:s, s:[o, {s:s}, {s:s, s:s, s:i, s:i}, o]}", "type", "Sequence", "decoders",
                     replace("^(?=[a-z<])", " "), "type", "Fuse", "type", "Strip", "content", " ",
                     "start", 1, "stop", 0, replace("(?<=\\n) ", ""));
}

static json_t *document(void) {
    json_t *model = json_pack("{s:s, s:n, s:s, s:n, s:n, s:b, s:b, s:b, s:o, s:[]}", "type", "BPE",
                              "dropout", "unk_token", UNKNOWN, "continuing_subword_prefix",
                              "end_of_word_suffix", "fuse_unk", 1, "byte_fallback", 0,
                              "ignore_merges", 1, "vocab", vocabulary(), "merges");
    json_t *splitter = json_pack("{s:s, s:[o, o]}", "type", "Sequence", "pretokenizers",
                                 cut(" +", "Removed"), cut("[.?\\n]", "Isolated"));
    return json_pack("{s:s, s:n, s:n, s:[], s:n, s:o, s:n, s:o, s:o}", "version", "1.0",
                     "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                     splitter, "post_processor", "decoder", decoder(), "model", model);
}

mn_status mn_stories_tokenizer(mn_tokenizer **out) {
    static const char name[] = "the tokenizer of the stories";
    char *text = NULL;
    *out = NULL;
    json_t *root = document();
    if (!root) return mn_fail(MN_ERR_MEMORY, "%s: no memory", name);
    mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    json_decref(root);
    if (st == MN_OK) st = mn_tokenizer_parse(out, text, strlen(text), name);
    free(text);
    return st;
}
