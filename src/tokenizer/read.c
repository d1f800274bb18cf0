/* read.c - "model" and "added_tokens" of a tokenizer.json. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "tokenizer/tokenizer_internal.h"

/* ---- vocabulary ------------------------------------------------------------------------------ */

static mn_status read_id(int64_t *id, const mn_json *at) {
    const mn_status st = mn_json_read_i64(id, at);
    if (st != MN_OK) return st;
    if (*id >= 0 && *id < MN_TOKEN_IDS_MAX) return MN_OK;
    return mn_json_fail(at, "id %" PRId64 " is not between 0 and %d", *id, MN_TOKEN_IDS_MAX - 1);
}

/* One more than the largest id of vocabulary and added tokens. */
static mn_status measure(int64_t *size, const mn_json *vocab, const mn_json *added) {
    mn_status st = MN_OK;
    int64_t id = 0;
    *size = json_is_array(vocab->value) ? mn_json_count(vocab) : 0;
    if (*size > MN_TOKEN_IDS_MAX) return mn_json_fail(vocab, "holds too many tokens");
    for (mn_json entry = { 0 }; st == MN_OK && mn_json_next(&entry, vocab);) {
        st = read_id(&id, &entry);
        if (id >= *size) *size = id + 1;
    }
    for (int64_t i = 0; i < mn_json_count(added) && st == MN_OK; i++) {
        const mn_json item = mn_json_item(added, i), at = mn_json_member(&item, "id");
        st = read_id(&id, &at);
        if (id >= *size) *size = id + 1;
    }
    return st;
}

static mn_status set_token(mn_tokenizer *t, int64_t id, const char *text, unsigned flags,
                           const mn_json *at) {
    mn_token *token = &t->vocab.tokens[id];
    if (token->text.bytes) {
        return mn_json_fail(at, "id %" PRId64 " is given to \"%s\" and to \"%s\"", id,
                            token->text.bytes, text);
    }
    const size_t size = strlen(text);
    token->text = (mn_span){ mn_vocab_copy(&t->vocab, text, size), size };
    token->flags = flags;
    if (!token->text.bytes) return mn_fail(MN_ERR_MEMORY, "no memory for the vocabulary");
    mn_id_map_add(&t->vocab.by_text, t->vocab.tokens, (int32_t)id);
    return MN_OK;
}

/* How tokens look inside pieces: as bytes where the splitter leaves bytes. */
static mn_status set_pieces(mn_tokenizer *t, int64_t n_entries) {
    mn_vocab *vocab = &t->vocab;
    mn_text bytes = { 0 };
    mn_status st = mn_id_map_make(&vocab->by_piece, n_entries, true);
    for (int64_t id = 0; id < vocab->size && st == MN_OK; id++) {
        mn_token *token = &vocab->tokens[id];
        if (!(token->flags & MN_TOKEN_MODEL)) continue;
        token->piece = token->text;
        if (t->splitter.byte_pieces) {
            bool all;
            bytes.size = 0;
            st = mn_bytes_unspell(&bytes, &all, token->text.bytes, token->text.size);
            if (st != MN_OK) break;
            token->piece = (mn_span){ 0 };
            if (!all) continue;                    // no text leads to it
            token->piece.bytes = mn_vocab_copy(vocab, bytes.bytes, bytes.size);
            token->piece.size = bytes.size;
            if (!token->piece.bytes) st = mn_fail(MN_ERR_MEMORY, "no memory for the vocabulary");
        }
        if (st == MN_OK) mn_id_map_add(&vocab->by_piece, vocab->tokens, (int32_t)id);
    }
    mn_text_free(&bytes);
    return st;
}

/* [["text", log probability], ...]; the place is the id. */
static mn_status read_scores(mn_tokenizer *t, const mn_json *at) {
    const int64_t n = mn_json_count(at);
    mn_status st = MN_OK;
    t->unigram.scores = calloc((size_t)t->vocab.size, sizeof *t->unigram.scores);
    if (!t->unigram.scores) return mn_fail(MN_ERR_MEMORY, "no memory for scores of tokens");
    for (int64_t i = 0; i < n && st == MN_OK; i++) {
        const mn_json item = mn_json_item(at, i), text = mn_json_item(&item, 0);
        const mn_json score = mn_json_item(&item, 1);
        const char *name = NULL;
        st = mn_json_read_text(&name, &text);
        if (st == MN_OK) st = mn_json_read_f64(&t->unigram.scores[i], &score);
        if (st == MN_OK) st = set_token(t, i, name, MN_TOKEN_MODEL, &item);
    }
    return st;
}

static mn_status read_vocab(mn_tokenizer *t, const mn_json *at, const mn_json *added) {
    mn_vocab *vocab = &t->vocab;
    const int64_t n_entries = mn_json_count(at);
    mn_status st = t->model == MN_TOKEN_UNIGRAM ? mn_json_expect_list(at)
                                                : mn_json_expect_object(at);
    if (st == MN_OK) st = measure(&vocab->size, at, added);
    if (st == MN_OK && vocab->size == 0) st = mn_json_fail(at, "holds no token");
    if (st != MN_OK) return st;
    vocab->tokens = calloc((size_t)vocab->size, sizeof *vocab->tokens);
    if (!vocab->tokens) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " tokens", vocab->size);
    }
    st = mn_id_map_make(&vocab->by_text, n_entries + mn_json_count(added), false);
    for (mn_json entry = { 0 }; st == MN_OK && mn_json_next(&entry, at);) {
        int64_t id = 0;
        st = mn_json_read_i64(&id, &entry);
        if (st == MN_OK) st = set_token(t, id, entry.name, MN_TOKEN_MODEL, &entry);
    }
    if (st == MN_OK && t->model == MN_TOKEN_UNIGRAM) st = read_scores(t, at);
    return st == MN_OK ? set_pieces(t, n_entries) : st;
}

/* ---- merges ---------------------------------------------------------------------------------- */

static int32_t find_model(const mn_vocab *vocab, const char *text, size_t size) {
    const int32_t id = mn_id_map_find(&vocab->by_text, vocab->tokens, text, size);
    return id >= 0 && (vocab->tokens[id].flags & MN_TOKEN_MODEL) ? id : -1;
}

/* "a b" or ["a", "b"] */
static mn_status read_sides(mn_span sides[2], const mn_json *item) {
    if (json_is_array(item->value)) {
        mn_status st = MN_OK;
        for (int i = 0; i < 2 && st == MN_OK; i++) {
            const mn_json side = mn_json_item(item, i);
            st = mn_json_read_text(&sides[i].bytes, &side);
            if (st == MN_OK) sides[i].size = strlen(sides[i].bytes);
        }
        if (st == MN_OK && mn_json_count(item) != 2) st = mn_json_fail(item, "expected two texts");
        return st;
    }
    const char *text = NULL;
    const mn_status st = mn_json_read_text(&text, item);
    if (st != MN_OK) return st;
    const char *blank = strchr(text, ' ');
    if (!blank || strchr(blank + 1, ' ')) {
        return mn_json_fail(item, "expected two texts with one blank between, found \"%s\"", text);
    }
    sides[0] = (mn_span){ text, (size_t)(blank - text) };
    sides[1] = (mn_span){ blank + 1, strlen(blank + 1) };
    return MN_OK;
}

static mn_status read_merge(mn_tokenizer *t, const mn_json *item, int64_t rank, mn_text *both) {
    mn_span sides[2];
    int32_t ids[3];
    mn_status st = read_sides(sides, item);
    both->size = 0;
    for (int i = 0; i < 2 && st == MN_OK; i++) {
        ids[i] = find_model(&t->vocab, sides[i].bytes, sides[i].size);
        if (ids[i] < 0) {
            return mn_json_fail(item, "\"%.*s\" is not in the vocabulary", (int)sides[i].size,
                                sides[i].bytes);
        }
        st = mn_text_add(both, sides[i].bytes, sides[i].size);
    }
    if (st != MN_OK) return st;
    ids[2] = find_model(&t->vocab, both->bytes ? both->bytes : "", both->size);
    if (ids[2] < 0) {
        return mn_json_fail(item, "the merged \"%.*s\" is not in the vocabulary", (int)both->size,
                            both->bytes);
    }
    mn_pair_map_put(&t->bpe.merges, mn_pair_key(ids[0], ids[1]), (int32_t)rank, ids[2]);
    return MN_OK;
}

static mn_status read_merges(mn_tokenizer *t, const mn_json *at) {
    mn_text both = { 0 };
    const int64_t count = mn_json_count(at);
    mn_status st = mn_json_expect_list(at);
    if (st == MN_OK && count >= INT32_MAX) st = mn_json_fail(at, "holds too many merges");
    if (st == MN_OK) st = mn_pair_map_make(&t->bpe.merges, count);
    for (int64_t rank = 0; rank < count && st == MN_OK; rank++) {
        const mn_json item = mn_json_item(at, rank);
        st = read_merge(t, &item, rank, &both);
    }
    t->bpe.n_merges = count;
    mn_text_free(&both);
    return st;
}

/* ---- model ----------------------------------------------------------------------------------- */

static mn_status read_type(mn_token_model *out, const mn_json *model) {
    static const char *const names[] = { [MN_TOKEN_BPE] = "BPE", [MN_TOKEN_UNIGRAM] = "Unigram",
                                         [MN_TOKEN_WORDPIECE] = "WordPiece" };
    const char *type = "BPE";
    const mn_status st = mn_json_opt_text(&type, model, "type");
    if (st != MN_OK) return st;
    for (int i = 0; i < (int)MN_COUNTOF(names); i++) {
        if (strcmp(names[i], type) != 0) continue;
        *out = (mn_token_model)i;
        return MN_OK;
    }
    return mn_json_fail(model, "model type \"%s\" is not supported; there are BPE, Unigram, "
                        "WordPiece", type);
}

/* Rules that would change what merges mean. */
static mn_status refuse_rules(const mn_json *model) {
    static const char *const affixes[] = { "continuing_subword_prefix", "end_of_word_suffix" };
    double dropout = 0;
    mn_status st = MN_OK;
    for (int i = 0; i < 2 && st == MN_OK; i++) {
        const char *affix = "";
        st = mn_json_opt_text(&affix, model, affixes[i]);
        if (st == MN_OK && *affix) {
            return mn_json_fail(model, "%s \"%s\" is not supported, only an empty one", affixes[i],
                                affix);
        }
    }
    if (st == MN_OK) st = mn_json_opt_f64(&dropout, model, "dropout");
    if (st == MN_OK && dropout != 0) {
        st = mn_json_fail(model, "dropout of merges is not supported: the same text would give "
                          "different tokens; set it to null");
    }
    return st;
}

static mn_status read_unigram(mn_tokenizer *t, const mn_json *model) {
    const mn_json vocab = mn_json_member(model, "vocab"), unk = mn_json_member(model, "unk_id");
    int64_t unk_id = -1;
    mn_status st = mn_json_opt_bool(&t->unigram.fallback, model, "byte_fallback");
    if (st == MN_OK && mn_json_given(&unk)) st = mn_json_read_i64(&unk_id, &unk);
    if (st == MN_OK && unk_id >= mn_json_count(&vocab)) {
        st = mn_json_fail(&unk, "%" PRId64 " is outside the vocabulary", unk_id);
    }
    t->unigram.unk_id = (int32_t)unk_id;
    return st == MN_OK ? mn_unigram_prepare(&t->unigram, &t->vocab) : st;
}

static mn_status read_wordpiece(mn_tokenizer *t, const mn_json *model) {
    mn_wordpiece *w = &t->wordpiece;
    const char *prefix = "##", *unk = "[UNK]";
    w->most_characters = 100;
    mn_status st = mn_json_opt_text(&prefix, model, "continuing_subword_prefix");
    if (st == MN_OK) st = mn_json_opt_text(&unk, model, "unk_token");
    if (st == MN_OK) st = mn_json_opt_i64(&w->most_characters, model, "max_input_chars_per_word");
    if (st != MN_OK) return st;
    w->unk_id = find_model(&t->vocab, unk, strlen(unk));
    if (w->unk_id < 0) {
        return mn_json_fail(model, "unk_token \"%s\" is not in the vocabulary", unk);
    }
    w->prefix = (mn_span){ mn_vocab_copy(&t->vocab, prefix, strlen(prefix)), strlen(prefix) };
    if (!w->prefix.bytes) return mn_fail(MN_ERR_MEMORY, "no memory for a tokenizer");
    mn_wordpiece_prepare(w, &t->vocab);
    return MN_OK;
}

/* Tables of the merges, empty where the model is another. */
static mn_status read_other(mn_tokenizer *t, const mn_json *model, const mn_json *added) {
    const mn_json vocab = mn_json_member(model, "vocab");
    mn_status st = MN_OK;
    if (mn_json_given(added)) st = mn_json_expect_list(added);
    t->bpe.unk_id = -1;
    if (st == MN_OK) st = read_vocab(t, &vocab, added);
    if (st != MN_OK) return st;
    return t->model == MN_TOKEN_UNIGRAM ? read_unigram(t, model) : read_wordpiece(t, model);
}

mn_status mn_tokenizer_read_model(mn_tokenizer *t, const mn_json *root) {
    const mn_json model = mn_json_member(root, "model");
    const mn_json vocab = mn_json_member(&model, "vocab");
    const mn_json merges = mn_json_member(&model, "merges");
    const mn_json added = mn_json_member(root, "added_tokens");
    mn_bpe *bpe = &t->bpe;
    const char *unk = NULL;
    mn_status st = mn_json_expect_object(&model);
    if (st == MN_OK) st = read_type(&t->model, &model);
    if (st == MN_OK && t->model != MN_TOKEN_BPE) return read_other(t, &model, &added);
    if (st == MN_OK) st = refuse_rules(&model);
    if (st == MN_OK && mn_json_given(&added)) st = mn_json_expect_list(&added);
    if (st == MN_OK) st = mn_json_opt_bool(&bpe->byte_fallback, &model, "byte_fallback");
    if (st == MN_OK) st = mn_json_opt_bool(&bpe->fuse_unk, &model, "fuse_unk");
    if (st == MN_OK) st = mn_json_opt_bool(&bpe->ignore_merges, &model, "ignore_merges");
    if (st == MN_OK) st = mn_json_opt_text(&unk, &model, "unk_token");
    if (st == MN_OK) st = read_vocab(t, &vocab, &added);
    if (st == MN_OK) st = read_merges(t, &merges);
    if (st != MN_OK) return st;
    bpe->byte_pieces = t->splitter.byte_pieces;
    bpe->unk_id = unk ? find_model(&t->vocab, unk, strlen(unk)) : -1;
    if (unk && bpe->unk_id < 0) {
        return mn_json_fail(&model, "unk_token \"%s\" is not in the vocabulary", unk);
    }
    return mn_bpe_prepare(bpe, &t->vocab);
}

/* ---- added tokens ---------------------------------------------------------------------------- */

static mn_status read_added(mn_tokenizer *t, mn_added *out, const mn_json *item) {
    const char *text = NULL;
    int64_t id = 0;
    bool normalized = true;
    mn_status st = mn_json_get_text(&text, item, "content");
    if (st == MN_OK) st = mn_json_get_i64(&id, item, "id");
    if (st == MN_OK) st = mn_json_opt_bool(&out->single_word, item, "single_word");
    if (st == MN_OK) st = mn_json_opt_bool(&out->lstrip, item, "lstrip");
    if (st == MN_OK) st = mn_json_opt_bool(&out->rstrip, item, "rstrip");
    if (st == MN_OK) st = mn_json_opt_bool(&out->special, item, "special");
    normalized = !out->special;
    if (st == MN_OK) st = mn_json_opt_bool(&normalized, item, "normalized");
    if (st != MN_OK) return st;
    const int32_t known = mn_id_map_find(&t->vocab.by_text, t->vocab.tokens, text, strlen(text));
    if (known < 0) {
        st = set_token(t, id, text, 0, item);
    } else if (known != id) {
        st = mn_json_fail(item, "\"%s\" has id %" PRId64 " here and %d in the vocabulary", text, id,
                          (int)known);
    }
    if (st != MN_OK) return st;
    mn_token *token = &t->vocab.tokens[id];
    token->flags |= MN_TOKEN_ADDED | (out->special ? MN_TOKEN_SPECIAL : 0u);
    out->id = (int32_t)id;
    out->normalized = normalized;
    out->match = token->text;
    return MN_OK;
}

mn_status mn_tokenizer_read_added(mn_tokenizer *t, const mn_json *root) {
    const mn_json list = mn_json_member(root, "added_tokens");
    const int64_t count = mn_json_count(&list);
    t->added.rows = calloc((size_t)count + 1, sizeof *t->added.rows);
    if (!t->added.rows) return mn_fail(MN_ERR_MEMORY, "no memory for added tokens");
    mn_status st = MN_OK;
    for (int64_t i = 0; i < count && st == MN_OK; i++) {
        const mn_json item = mn_json_item(&list, i);
        st = read_added(t, &t->added.rows[i], &item);
        if (st == MN_OK) t->added.count++;
    }
    return st == MN_OK ? mn_added_prepare(&t->added, &t->normaliser, &t->vocab) : st;
}

mn_status mn_unknown_type(const mn_json *at, const char *component, const char *type,
                          const char *const *first, size_t n, size_t step) {
    mn_text names = { 0 };
    mn_status st = MN_OK;
    for (size_t i = 0; i < n && st == MN_OK; i++) {
        const char *name = *(const char *const *)((const char *)first + i * step);
        st = mn_text_add(&names, name, strlen(name));
        if (st == MN_OK) st = mn_text_add(&names, ", ", 2);
    }
    if (st == MN_OK) {
        st = mn_json_fail(at, "%s type \"%s\" is not supported; there are %.*sSequence", component,
                          type, (int)names.size, names.bytes);
    }
    mn_text_free(&names);
    return st;
}
