/* trainer_data.c - where a run's tokens come from. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "data/prepared.h"
#include "data/text.h"
#include "train/trainer_internal.h"

static mn_status format_of(mn_corpus_format *out, const char *name) {
    static const char *const names[] = { "auto", "text", "jsonl", "nanogpt", "llmc", "prepared" };
    for (int i = 0; i < 6; i++) {
        if (strcmp(names[i], name) == 0) {
            *out = (mn_corpus_format)i;
            return MN_OK;
        }
    }
    return mn_fail(MN_ERR_ARGUMENT, "data.format: \"%s\" is none of auto, text, jsonl, nanogpt, "
                   "llmc, prepared", name);
}

/* Characters of all files of the run, training and validation: a vocabulary that covers both. */
static mn_status chars_of(mn_tokenizer **out, const mn_train_options *o, mn_corpus_format format) {
    const char *paths[2 * MN_TRAIN_PATHS];
    int64_t n = 0;
    for (int i = 0; i < o->n_train; i++) paths[n++] = o->train[i];
    for (int i = 0; i < o->n_valid; i++) paths[n++] = o->valid[i];
    mn_data_files files = { 0 };
    mn_text_plan plan = { 0 };
    char *text = NULL;
    size_t size = 0;
    const char *separator = o->separator[0] ? o->separator : NULL;
    mn_status st = mn_data_files_list(&files, paths, n, format);
    if (st == MN_OK) st = mn_text_plan_make(&plan, &files, o->text_key, separator, 0.0, NULL);
    if (st == MN_OK) st = mn_text_alphabet(&text, &size, &plan, NULL, NULL);
    if (st == MN_OK) st = mn_tokenizer_chars(out, text, size);
    free(text);
    mn_text_plan_free(&plan);
    mn_data_files_free(&files);
    return st;
}

/* Whether the files are text, so that a tokenizer is needed. */
static mn_status is_text(bool *text, const mn_train_options *o, mn_corpus_format format) {
    mn_data_files files = { 0 };
    const mn_status st = mn_data_files_list(&files, o->train, o->n_train, format);
    *text = false;
    for (int64_t i = 0; i < files.count; i++) {
        *text |= files.items[i].format == MN_CORPUS_TEXT ||
                 files.items[i].format == MN_CORPUS_JSONL;
    }
    mn_data_files_free(&files);
    return st;
}

static mn_status open_tokenizer(mn_trainer *t, mn_corpus_format format) {
    const char *name = t->options.tokenizer;
    mn_status st = is_text(&t->text, &t->options, format);
    if (st != MN_OK) return st;
    const bool named = strcmp(name, "chars") != 0;
    if (named) return mn_tokenizer_open(&t->own_tokenizer, name);
    if (t->text) return chars_of(&t->own_tokenizer, &t->options, format);
    /* prepared folders bring their own; .bin files have none */
    if (mn_tokenizer_load(&t->own_tokenizer, t->options.train[0]) != MN_OK) {
        t->own_tokenizer = NULL;
    }
    return MN_OK;
}

/* Whether the paths are all folders of mneme prepare that hold a part for validation. */
static bool have_valid_split(const char *const *paths, int n) {
    for (int i = 0; i < n; i++) {
        mn_prepared prepared;
        if (mn_prepared_load(&prepared, paths[i]) != MN_OK) return false;
        const bool has = prepared.splits[MN_SPLIT_VALID].n_shards > 0;
        mn_prepared_free(&prepared);
        if (!has) return false;
    }
    return n > 0;
}

/* Validation data are the files given, else the part that mneme prepare held out, else the end of
 * the training data. */
static mn_status open_corpora(mn_trainer *t, mn_corpus_format format, int64_t vocab_size) {
    const mn_train_options *o = &t->options;
    mn_corpus_options how = { .format = format, .paths = o->train, .n_paths = o->n_train,
                              .text_key = o->text_key, .document_end = -1,
                              .separator = o->separator[0] ? o->separator : NULL,
                              .vocab_size = vocab_size };
    mn_status st = mn_corpus_open(&t->all, &how, t->tokenizer);
    if (st != MN_OK) return st;
    const bool given = o->n_valid > 0;
    if (given) {
        how.paths = o->valid;
        how.n_paths = o->n_valid;
    }
    const bool split = have_valid_split(how.paths, (int)how.n_paths);
    how.split = split ? mn_split_names[MN_SPLIT_VALID] : NULL;
    const bool apart = given || (split && o->valid_part > 0.0);
    if (apart) st = mn_corpus_open(&t->valid, &how, t->tokenizer);
    const double cut = apart ? 1.0 : 1.0 - o->valid_part;
    if (st == MN_OK) st = mn_corpus_part(&t->train, t->all, 0.0, cut);
    if (st == MN_OK && cut < 1.0) st = mn_corpus_part(&t->valid, t->all, cut, 1.0);
    return st;
}

static mn_status open_loader(mn_loader **loader, mn_token_batch *batch, const mn_corpus *corpus,
                             const mn_loader_options *how, const char *name) {
    mn_status st = mn_loader_create(loader, corpus, how);
    if (st == MN_OK) return mn_token_batch_create(batch, *loader);
    char why[512];
    snprintf(why, sizeof why, "%s", mn_last_error());
    return mn_fail(st, "%s: %s", name, why);
}

static mn_status open_loaders(mn_trainer *t) {
    const mn_train_options *o = &t->options;
    const bool documents = strcmp(o->cutting, "documents") == 0;
    if (!documents && strcmp(o->cutting, "windows") != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "data.cutting: \"%s\" is none of windows, documents",
                       o->cutting);
    }
    mn_loader_options how = { .cutting = documents ? MN_CUT_DOCUMENTS : MN_CUT_WINDOWS,
                              .rows = o->batch, .length = o->context,
                              .seed = (uint64_t)o->seed };
    mn_status st = open_loader(&t->train_loader, &t->batch, t->train, &how, "data.train");
    how.sequential = true;
    if (st != MN_OK || !t->valid) return st;
    return open_loader(&t->valid_loader, &t->valid_batch, t->valid, &how,
                       o->n_valid > 0 ? "data.valid" : "the part held out (data.valid_part)");
}

/* The corpora of the run are parts of those given, so that they can be freed like its own. */
static mn_status take_corpora(mn_trainer *t, const mn_train_data *given) {
    mn_status st = mn_corpus_part(&t->train, given->train, 0.0, 1.0);
    if (st == MN_OK && given->valid) st = mn_corpus_part(&t->valid, given->valid, 0.0, 1.0);
    return st;
}

static mn_status open_source(mn_loader **loader, mn_token_batch *batch, const mn_source *source,
                             const mn_train_options *o) {
    if (source->rows != o->batch || source->length != o->context) {
        return mn_fail(MN_ERR_ARGUMENT, "the source of batches has %lld rows of %lld tokens, but "
                       "train.batch is %lld and train.context %lld", (long long)source->rows,
                       (long long)source->length, (long long)o->batch, (long long)o->context);
    }
    const mn_status st = mn_loader_from_source(loader, source);
    return st == MN_OK ? mn_token_batch_create(batch, *loader) : st;
}

static mn_status open_sources(mn_trainer *t, const mn_train_data *given) {
    const mn_train_options *o = &t->options;
    mn_status st = open_source(&t->train_loader, &t->batch, given->train_source, o);
    if (st != MN_OK || !given->valid_source) return st;
    return open_source(&t->valid_loader, &t->valid_batch, given->valid_source, o);
}

mn_status mn_trainer_open_data(mn_trainer *t, const mn_train_data *given, int64_t *vocab_size) {
    const mn_train_options *o = &t->options;
    if (!given && o->n_train == 0) {
        return mn_fail(MN_ERR_ARGUMENT, "data.train names no file to train on");
    }
    if (given && (o->n_train > 0 || o->n_valid > 0)) {
        return mn_fail(MN_ERR_ARGUMENT, "data.train and data.valid name files, and the tokens of "
                       "this run are given; leave them out");
    }
    mn_corpus_format format = MN_CORPUS_AUTO;
    mn_status st = format_of(&format, o->format);
    if (st == MN_OK && !given) st = open_tokenizer(t, format);
    if (st != MN_OK) return st;
    t->tokenizer = given ? given->tokenizer : t->own_tokenizer;
    if (!t->tokenizer && t->options.sample_every > 0) {
        return mn_fail(MN_ERR_ARGUMENT, "train.sample_every: samples of text need a tokenizer, and "
                       "the data bring none; give data.tokenizer or set it to 0");
    }
    const int64_t tokens = t->tokenizer ? mn_tokenizer_size(t->tokenizer) : 0;
    if (*vocab_size == 0) *vocab_size = tokens;
    if (*vocab_size == 0) {
        return mn_fail(MN_ERR_ARGUMENT, "model.vocab_size is not given and the data bring no "
                       "tokenizer; give either");
    }
    if (tokens > *vocab_size) {
        return mn_fail(MN_ERR_ARGUMENT, "the tokenizer has %lld tokens and model.vocab_size is "
                       "%lld; leave vocab_size out or raise it", (long long)tokens,
                       (long long)*vocab_size);
    }
    if (given && given->train_source) return open_sources(t, given);
    st = given ? take_corpora(t, given) : open_corpora(t, format, *vocab_size);
    return st == MN_OK ? open_loaders(t) : st;
}

uint64_t mn_trainer_tokenizer_mark(const mn_trainer *t) {
    return t->tokenizer ? mn_tokenizer_fingerprint(t->tokenizer) : 0;
}

void mn_trainer_close_data(mn_trainer *t) {
    mn_token_batch_free(&t->batch);
    mn_token_batch_free(&t->valid_batch);
    mn_loader_destroy(t->train_loader);
    mn_loader_destroy(t->valid_loader);
    mn_corpus_destroy(t->train);
    mn_corpus_destroy(t->valid);
    mn_corpus_destroy(t->all);
    mn_tokenizer_destroy(t->own_tokenizer);
}
