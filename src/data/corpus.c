/* corpus.c - one long row of tokens from files of any kind, with the borders of its documents.
 *
 * A corpus is a list of segments: runs of tokens in memory (from text) or in a file. */
#define _XOPEN_SOURCE 700    // strdup
#include "data/corpus.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/util.h"
#include "data/bin.h"
#include "data/encode.h"
#include "data/files.h"
#include "data/hash.h"
#include "data/prepared.h"
#include "data/text.h"
#include "io/json.h"

enum { SCAN_TOKENS = 16384, THREADED_BYTES = 4 << 20 };    // below, one thread is as fast

typedef struct segment {
    int64_t first, count;    // tokens
    int64_t offset;          // into the memory, for tokens of text
    mn_bin bin;              // path NULL: in memory
} segment;

struct mn_corpus {
    const mn_corpus *whole;    // of a part: who holds the tokens; else itself
    int64_t first;             // of a part: its first token there
    int64_t n_tokens, n_documents;
    const int64_t *starts;     // n_documents + 1, counted from the start of `whole`
    int64_t own_starts[2];     // of a part inside one document
    uint64_t fingerprint;
    int64_t vocab_size;        // 0: any

    mn_token_list memory;
    segment *segments;
    int64_t n_segments, segment_room;
    int64_t *borders;          // owned; starts of a whole corpus
    int64_t border_room;
};

/* A corpus being put together. */
typedef struct builder {
    mn_corpus *corpus;
    const mn_corpus_options *options;
    const mn_tokenizer *tokenizer;
    int64_t document_end;    // -1: none
    mn_hash hash;
} builder;

/* ---- building -------------------------------------------------------------------------------- */

static mn_status add_border(mn_corpus *corpus, int64_t at) {
    if (corpus->n_documents + 1 >= corpus->border_room) {
        const int64_t room = 2 * corpus->border_room + 16;
        int64_t *grown = realloc(corpus->borders, (size_t)room * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " documents", room);
        corpus->borders = grown;
        corpus->border_room = room;
    }
    corpus->borders[0] = 0;
    corpus->borders[++corpus->n_documents] = at;
    return MN_OK;
}

/* Where the document that is being added began. */
static int64_t open_start(const mn_corpus *corpus) {
    return corpus->n_documents > 0 ? corpus->borders[corpus->n_documents] : 0;
}

static mn_status end_document(mn_corpus *corpus) {
    return corpus->n_tokens > open_start(corpus) ? add_border(corpus, corpus->n_tokens) : MN_OK;
}

/* A new segment behind the last one; a file's tokens are counted at once. */
static mn_status add_segment(mn_corpus *corpus, const mn_bin *bin) {
    if (corpus->n_segments == corpus->segment_room) {
        const int64_t room = 2 * corpus->segment_room + 16;
        segment *grown = realloc(corpus->segments, (size_t)room * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " files", room);
        corpus->segments = grown;
        corpus->segment_room = room;
    }
    segment *last = &corpus->segments[corpus->n_segments++];
    *last = (segment){ .first = corpus->n_tokens, .offset = corpus->memory.count };
    if (bin) {
        last->bin = *bin;
        last->count = bin->shape.n_tokens;
    }
    return MN_OK;
}

/* Tokens of text, to the memory and to the last segment. */
static mn_status put_tokens(void *context, const int32_t *ids, int64_t count) {
    builder *b = context;
    mn_corpus *corpus = b->corpus;
    mn_token_list *list = &corpus->memory;
    const mn_status st = mn_check_ids(ids, count, corpus->vocab_size, "tokenizer",
                                      corpus->n_tokens);
    if (st != MN_OK) return st;
    if (list->capacity - list->count < count) {
        const int64_t capacity = list->capacity + mn_max(list->capacity / 2, count + 4096);
        int32_t *grown = realloc(list->ids, (size_t)capacity * sizeof *grown);
        if (!grown) {
            return mn_fail(MN_ERR_MEMORY,
                           "no memory for %" PRId64 " tokens; mneme prepare puts them on the disk",
                           capacity);
        }
        list->ids = grown;
        list->capacity = capacity;
    }
    memcpy(list->ids + list->count, ids, (size_t)count * sizeof *ids);
    list->count += count;
    corpus->segments[corpus->n_segments - 1].count += count;
    corpus->n_tokens += count;
    mn_hash_add_tokens(&b->hash, ids, count);
    return MN_OK;
}

static mn_status close_document(void *context) {
    builder *b = context;
    mn_status st = MN_OK;
    const int32_t end = (int32_t)b->document_end;
    if (b->corpus->n_tokens == open_start(b->corpus)) return MN_OK;
    if (b->document_end >= 0) st = put_tokens(b, &end, 1);
    return st == MN_OK ? end_document(b->corpus) : st;
}

/* `run`: neighbouring files of text or JSON lines. */
static mn_status add_text(builder *b, const mn_data_files *run) {
    const mn_corpus_options *o = b->options;
    mn_text_plan plan;
    mn_threads *threads = NULL;
    if (!b->tokenizer) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: text needs a tokenizer; a .bin of tokens does not",
                       run->items[0].path);
    }
    mn_status st = mn_text_plan_make(&plan, run, o->text_key, o->separator, 0, b->tokenizer);
    if (st != MN_OK) return st;
    st = add_segment(b->corpus, NULL);
    if (st == MN_OK && plan.bytes >= THREADED_BYTES) st = mn_threads_create(&threads, 0);
    const mn_token_sink sink = { .context = b, .put = put_tokens, .close = close_document };
    if (st == MN_OK) st = mn_encode_pieces(&plan, b->tokenizer, 0, threads, &sink);
    mn_threads_destroy(threads);
    mn_text_plan_free(&plan);
    return st;
}

/* nanoGPT writes meta files that say how large the vocabulary is. */
static mn_status check_meta(const builder *b, const char *bin_path) {
    const char *slash = strrchr(bin_path, '/');
    const int folder = slash ? (int)(slash + 1 - bin_path) : 0;
    char path[4096];
    int64_t vocab_size = 0;
    mn_json root;
    const int n = snprintf(path, sizeof path, "%.*smeta.json", folder, bin_path);
    if (b->corpus->vocab_size == 0 || n >= (int)sizeof path || access(path, F_OK) != 0) {
        return MN_OK;
    }
    mn_status st = mn_json_load(&root, path, MN_JSON_PYTHON);
    if (st != MN_OK) return st;
    st = mn_json_opt_i64(&vocab_size, &root, "vocab_size");
    if (st == MN_OK && vocab_size > b->corpus->vocab_size) {
        st = mn_json_fail(&root,
                          "the tokens beside it come from a vocabulary of %" PRId64
                          ", here it has %" PRId64,
                          vocab_size, b->corpus->vocab_size);
    }
    mn_json_free(&root);
    return st;
}

/* Looks at every token of the last segment: vocabulary, fingerprint, ends of documents. */
static mn_status scan_bin(builder *b) {
    mn_corpus *corpus = b->corpus;
    const mn_bin *bin = &corpus->segments[corpus->n_segments - 1].bin;
    int32_t *ids = malloc(SCAN_TOKENS * sizeof *ids);
    mn_status st = ids ? MN_OK : mn_fail(MN_ERR_MEMORY, "%s: out of memory", bin->path);
    for (int64_t at = 0; at < bin->shape.n_tokens && st == MN_OK; at += SCAN_TOKENS) {
        const int64_t n = mn_min(SCAN_TOKENS, bin->shape.n_tokens - at);
        st = mn_bin_read(bin, at, n, corpus->vocab_size, ids);
        if (st != MN_OK) break;
        mn_hash_add_tokens(&b->hash, ids, n);
        for (int64_t i = 0; b->document_end >= 0 && i < n && st == MN_OK; i++) {
            const int64_t end = corpus->n_tokens + i + 1;
            if (ids[i] == b->document_end && end > open_start(corpus)) st = add_border(corpus, end);
        }
        corpus->n_tokens += n;
    }
    free(ids);
    return st == MN_OK ? end_document(corpus) : st;
}

static mn_status add_bin(builder *b, const mn_data_file *file) {
    mn_bin bin;
    mn_status st = check_meta(b, file->path);
    if (st == MN_OK) st = mn_bin_open(&bin, file->path, file->format);
    if (st != MN_OK) return st;
    st = add_segment(b->corpus, &bin);
    if (st != MN_OK) mn_bin_close(&bin);
    return st == MN_OK ? scan_bin(b) : st;
}

/* Names the first token that the vocabulary lacks; the index says that there is one. */
static mn_status fail_vocabulary(const mn_bin *bin, int64_t vocab_size, int64_t largest) {
    int32_t ids[1024];
    for (int64_t at = 0; at < bin->shape.n_tokens; at += 1024) {
        const int64_t n = mn_min(1024, bin->shape.n_tokens - at);
        const mn_status st = mn_bin_read(bin, at, n, vocab_size, ids);
        if (st != MN_OK) return st;
    }
    return mn_fail(MN_ERR_FORMAT, "%s: index.json speaks of a token %" PRId64 " that is not there",
                   bin->path, largest);
}

static mn_status add_shard(builder *b, const mn_prepared *prepared, const char *folder, int split,
                           int64_t index) {
    mn_corpus *corpus = b->corpus;
    const mn_shard *shard = &prepared->splits[split].shards[index];
    mn_bin bin;
    mn_status st = mn_shard_open(&bin, prepared, folder, split, index);
    if (st != MN_OK) return st;
    if (corpus->vocab_size > 0 && shard->largest >= corpus->vocab_size) {
        st = fail_vocabulary(&bin, corpus->vocab_size, shard->largest);
    }
    if (st == MN_OK) st = add_segment(corpus, &bin);
    if (st != MN_OK) {
        mn_bin_close(&bin);
        return st;
    }
    corpus->n_tokens += shard->tokens;
    mn_hash_add_u64(&b->hash, (uint64_t)shard->tokens);
    mn_hash_add_u64(&b->hash, shard->hash);
    return MN_OK;
}

/* Checks that the folder fits what was asked for; *split is the part to read. */
static mn_status check_prepared(int *split, const builder *b, const mn_prepared *prepared,
                                const char *folder) {
    const char *wanted = b->options->split ? b->options->split : mn_split_names[MN_SPLIT_TRAIN];
    *split = -1;
    for (int i = 0; i < MN_SPLIT_COUNT; i++) {
        if (strcmp(mn_split_names[i], wanted) == 0) *split = i;
    }
    if (*split < 0) {
        return mn_fail(MN_ERR_ARGUMENT, "split: \"%s\" is neither \"train\" nor \"valid\"", wanted);
    }
    if (!prepared->complete) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: its preparation did not come to an end; run the same mneme prepare "
                       "again and it goes on",
                       folder);
    }
    if (prepared->splits[*split].n_shards == 0) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: holds no part \"%s\"; prepare it with --valid 0.1 for one", folder,
                       wanted);
    }
    if (b->tokenizer && mn_tokenizer_fingerprint(b->tokenizer) != prepared->tokenizer) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: was prepared with another tokenizer (%s, %" PRId64
                       " tokens); use %s/tokenizer.json, or prepare again",
                       folder, prepared->tokenizer_kind, prepared->vocab_size, folder);
    }
    return MN_OK;
}

static mn_status add_prepared_split(builder *b, const mn_prepared *prepared, const char *folder,
                                    int split) {
    mn_corpus *corpus = b->corpus;
    const int64_t before = corpus->n_tokens;
    int64_t first = 0;
    mn_status st = MN_OK;
    for (int64_t i = 0; i < prepared->splits[split].n_shards && st == MN_OK; i++) {
        const mn_shard *shard = &prepared->splits[split].shards[i];
        int64_t *ends = malloc((size_t)shard->documents * sizeof *ends + 1);
        st = ends ? mn_shard_documents(ends, prepared, folder, split, i, first)
                  : mn_fail(MN_ERR_MEMORY, "%s: no memory for its documents", folder);
        if (st == MN_OK) st = add_shard(b, prepared, folder, split, i);
        for (int64_t j = 0; j < shard->documents && st == MN_OK; j++) {
            st = add_border(corpus, before + ends[j]);
        }
        free(ends);
        first += shard->tokens;
    }
    return st == MN_OK ? end_document(corpus) : st;
}

static mn_status add_prepared(builder *b, const char *folder) {
    mn_prepared prepared;
    int split;
    mn_status st = mn_prepared_load(&prepared, folder);
    if (st != MN_OK) return st;
    st = check_prepared(&split, b, &prepared, folder);
    if (st == MN_OK) st = add_prepared_split(b, &prepared, folder, split);
    mn_prepared_free(&prepared);
    return st;
}

static bool is_text(const mn_data_file *file) {
    return file->format == MN_CORPUS_TEXT || file->format == MN_CORPUS_JSONL;
}

static mn_status add_files(builder *b, const mn_data_files *files) {
    mn_status st = MN_OK;
    for (int64_t i = 0; i < files->count && st == MN_OK;) {
        const mn_data_file *file = &files->items[i];
        int64_t end = i + 1;
        while (is_text(file) && end < files->count && is_text(&files->items[end])) end++;
        const mn_data_files run = { .items = files->items + i, .count = end - i };
        if (is_text(file)) st = add_text(b, &run);
        else if (file->format == MN_CORPUS_PREPARED) st = add_prepared(b, file->path);
        else st = add_bin(b, file);
        i = end;
    }
    return st;
}

static mn_status settle_options(builder *b) {
    const mn_corpus_options *o = b->options;
    const int64_t size = b->tokenizer ? mn_tokenizer_size(b->tokenizer) : 0;
    b->corpus->vocab_size = o->vocab_size > 0 ? o->vocab_size : size;
    b->document_end = o->document_end >= 0 ? o->document_end : -1;
    if (o->document_end == MN_DOCUMENT_END_OWN && b->tokenizer) {
        b->document_end = mn_tokenizer_eos(b->tokenizer);
    }
    if (b->corpus->vocab_size > 0 && b->document_end >= b->corpus->vocab_size) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "document_end: token %" PRId64 " is not below the vocabulary size %" PRId64,
                       b->document_end, b->corpus->vocab_size);
    }
    return MN_OK;
}

/* The fingerprint covers the tokens and where documents begin. */
static mn_status finish(builder *b) {
    mn_corpus *corpus = b->corpus;
    if (corpus->n_tokens == 0) return mn_fail(MN_ERR_FORMAT, "the files hold no token");
    corpus->whole = corpus;
    corpus->starts = corpus->borders;
    mn_hash_add_u64(&b->hash, (uint64_t)corpus->n_tokens);
    for (int64_t i = 0; i <= corpus->n_documents; i++) {
        mn_hash_add_u64(&b->hash, (uint64_t)corpus->borders[i]);
    }
    corpus->fingerprint = mn_hash_value(&b->hash);
    return MN_OK;
}

/* ---- public ---------------------------------------------------------------------------------- */

mn_status mn_corpus_open(mn_corpus **out, const mn_corpus_options *options,
                         const mn_tokenizer *tokenizer) {
    mn_data_files files;
    *out = NULL;
    mn_status st = mn_data_files_list(&files, options->paths, options->n_paths, options->format);
    if (st != MN_OK) return st;
    builder b = { .options = options, .tokenizer = tokenizer,
                  .corpus = calloc(1, sizeof *b.corpus) };
    st = b.corpus ? settle_options(&b) : mn_fail(MN_ERR_MEMORY, "no memory for a corpus");
    if (st == MN_OK) st = add_files(&b, &files);
    if (st == MN_OK) st = finish(&b);
    mn_data_files_free(&files);
    if (st == MN_OK) *out = b.corpus;
    else mn_corpus_destroy(b.corpus);
    return st;
}

mn_status mn_corpus_from_tokens(mn_corpus **out, const int32_t *tokens, int64_t count,
                                const int64_t *borders, int64_t n_documents) {
    *out = NULL;
    bool sound = count > 0 && n_documents > 0 && borders[0] == 0 && borders[n_documents] == count;
    for (int64_t i = 0; i < n_documents && sound; i++) sound = borders[i] < borders[i + 1];
    if (!sound) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "borders: expected offsets that ascend from 0 to the %" PRId64 " tokens",
                       count);
    }
    builder b = { .corpus = calloc(1, sizeof *b.corpus) };
    mn_status st = b.corpus ? add_segment(b.corpus, NULL)
                            : mn_fail(MN_ERR_MEMORY, "no memory for a corpus");
    if (st == MN_OK) st = put_tokens(&b, tokens, count);
    for (int64_t i = 1; i <= n_documents && st == MN_OK; i++) st = add_border(b.corpus, borders[i]);
    if (st == MN_OK) st = finish(&b);
    if (st == MN_OK) *out = b.corpus;
    else mn_corpus_destroy(b.corpus);
    return st;
}

/* The first document that starts at or behind `at`, counted like `starts`. */
static int64_t document_from(const mn_corpus *corpus, int64_t at) {
    int64_t low = 0, high = corpus->n_documents;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (corpus->starts[middle] < at) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The border between documents nearest to the share; the ends only for 0 and 1. */
static int64_t border_near(const mn_corpus *corpus, double share) {
    const int64_t n = corpus->n_documents;
    if (share <= 0 || share >= 1) return share <= 0 ? 0 : n;
    const int64_t at = corpus->first + (int64_t)((double)corpus->n_tokens * share);
    int64_t d = document_from(corpus, at);
    if (d > 0 && at - corpus->starts[d - 1] <= corpus->starts[d] - at) d--;
    return mn_min(mn_max(d, 1), n - 1);
}

static int64_t token_near(const mn_corpus *corpus, double share) {
    if (share <= 0 || share >= 1) return share <= 0 ? 0 : corpus->n_tokens;
    return (int64_t)((double)corpus->n_tokens * share);
}

mn_status mn_corpus_part(mn_corpus **out, const mn_corpus *corpus, double from, double to) {
    *out = NULL;
    if (!(from >= 0 && from < to && to <= 1)) {
        return mn_fail(MN_ERR_ARGUMENT, "part: [%g, %g) is not inside [0, 1]", from, to);
    }
    mn_corpus *part = calloc(1, sizeof *part);
    if (!part) return mn_fail(MN_ERR_MEMORY, "no memory for a part of the corpus");
    part->whole = corpus->whole;
    part->vocab_size = corpus->vocab_size;
    if (corpus->n_documents > 1) {
        const int64_t first = border_near(corpus, from), last = border_near(corpus, to);
        part->starts = corpus->starts + first;
        part->n_documents = last - first;
    } else {
        part->own_starts[0] = corpus->first + token_near(corpus, from);
        part->own_starts[1] = corpus->first + token_near(corpus, to);
        part->starts = part->own_starts;
        part->n_documents = part->own_starts[1] > part->own_starts[0];
    }
    if (part->n_documents == 0) {
        free(part);
        return mn_fail(MN_ERR_ARGUMENT,
                       "part: [%g, %g) of %" PRId64 " tokens in %" PRId64 " documents is empty",
                       from, to, corpus->n_tokens, corpus->n_documents);
    }
    part->first = part->starts[0];
    part->n_tokens = part->starts[part->n_documents] - part->first;
    mn_hash hash = { 0 };
    mn_hash_add_u64(&hash, corpus->whole->fingerprint);
    mn_hash_add_u64(&hash, (uint64_t)part->first);
    mn_hash_add_u64(&hash, (uint64_t)part->n_tokens);
    part->fingerprint = mn_hash_value(&hash);
    *out = part;
    return MN_OK;
}

void mn_corpus_destroy(mn_corpus *corpus) {
    if (!corpus) return;
    for (int64_t i = 0; i < corpus->n_segments; i++) mn_bin_close(&corpus->segments[i].bin);
    free(corpus->segments);
    free(corpus->borders);
    mn_token_list_free(&corpus->memory);
    free(corpus);
}

int64_t mn_corpus_tokens(const mn_corpus *corpus) {
    return corpus->n_tokens;
}

int64_t mn_corpus_documents(const mn_corpus *corpus) {
    return corpus->n_documents;
}

int64_t mn_corpus_document_start(const mn_corpus *corpus, int64_t document) {
    return corpus->starts[document] - corpus->first;
}

/* The segment that holds token `at` of a whole corpus. */
static const segment *segment_at(const mn_corpus *corpus, int64_t at) {
    int64_t low = 0, high = corpus->n_segments - 1;
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (corpus->segments[middle].first <= at) low = middle;
        else high = middle - 1;
    }
    return &corpus->segments[low];
}

mn_status mn_corpus_read(const mn_corpus *corpus, int64_t at, int64_t count, int32_t *out) {
    const mn_corpus *whole = corpus->whole;
    if (at < 0 || count < 0 || at > corpus->n_tokens || count > corpus->n_tokens - at) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "tokens %" PRId64 " and %" PRId64 " more are not among the %" PRId64
                       " of the corpus",
                       at, count, corpus->n_tokens);
    }
    mn_status st = MN_OK;
    for (at += corpus->first; count > 0 && st == MN_OK;) {
        const segment *in = segment_at(whole, at);
        const int64_t skip = at - in->first, n = mn_min(count, in->count - skip);
        if (in->bin.path) {
            st = mn_bin_read(&in->bin, skip, n, whole->vocab_size, out);
        } else {
            memcpy(out, whole->memory.ids + in->offset + skip, (size_t)n * sizeof *out);
        }
        at += n;
        out += n;
        count -= n;
    }
    return st;
}

uint64_t mn_corpus_fingerprint(const mn_corpus *corpus) {
    return corpus->fingerprint;
}
