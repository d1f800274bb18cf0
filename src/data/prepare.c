/* prepare.c - text as files of tokens, made once.
 *
 * Tokens are gathered in memory until a shard is full; shard, ends of documents and index are then
 * written in this order, each as a whole, so that the index never speaks of what is not there. The
 * index also says at which piece of the input, and how far inside it, the next shard begins. */
#define _GNU_SOURCE    // flock, strdup
#include "data/prepare.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "data/encode.h"
#include "data/files.h"
#include "data/hash.h"
#include "data/prepared.h"
#include "data/text.h"
#include "io/folder.h"
#include "io/file.h"

enum { DEFAULT_SHARD_TOKENS = 1 << 25, UINT16_VOCABULARY = 65536, CHECK_TOKENS = 65536 };

typedef struct preparation {
    const mn_prepare_options *options;
    const mn_tokenizer *tokenizer;
    mn_tokenizer *made;          // of characters; owned
    mn_data_files files;
    mn_text_plan plan;
    mn_prepared index;
    mn_prepare_result *result;

    int split;                   // that is being written
    uint8_t *ids;                // of the shard that is being filled, as they will be in the file
    int64_t n_ids, room;
    int64_t *ends;               // of documents, in this shard
    int64_t n_ends, ends_room;
    int64_t largest;
    mn_prepare_place place;      // of the piece that is being handed on; skip: tokens seen of it
    int64_t open;                // tokens of the document that is open
    int64_t skip;                // tokens still to be left out after a stop
    int lock;                    // the folder, open and locked; -1: not
} preparation;

/* ---- shards ---------------------------------------------------------------------------------- */

typedef struct two_parts {
    const void *head, *body;
    size_t head_bytes, body_bytes;
} two_parts;

static mn_status write_parts(mn_sink *sink, void *context) {
    const two_parts *parts = context;
    const mn_status st = mn_sink_put(sink, parts->head, parts->head_bytes);
    return st == MN_OK ? mn_sink_put(sink, parts->body, parts->body_bytes) : st;
}

/* Writes FOLDER/SPLIT_000000.ENDING; its hash leaves through *hash. */
static mn_status write_shard_file(uint64_t *hash, const preparation *p, const char *ending,
                                  const two_parts *parts) {
    mn_hash h = { 0 };
    mn_hash_add(&h, parts->head, parts->head_bytes);
    mn_hash_add(&h, parts->body, parts->body_bytes);
    *hash = mn_hash_value(&h);
    char *path = mn_shard_path(p->options->folder, p->split, p->index.splits[p->split].n_shards,
                               ending);
    if (!path) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", p->options->folder);
    const mn_status st = mn_file_write_atomic(path, write_parts, (void *)(uintptr_t)parts);
    free(path);
    return st;
}

static mn_status write_shard(preparation *p) {
    uint8_t header[MN_BIN_HEADER_BYTES];
    mn_shard shard = { .tokens = p->n_ids, .documents = p->n_ends, .largest = p->largest };
    if (p->n_ids == 0) return MN_OK;
    mn_bin_header(header, p->n_ids, p->index.token_bytes);
    const two_parts tokens = { header, p->ids, sizeof header,
                               (size_t)p->n_ids * (size_t)p->index.token_bytes };
    uint8_t *ends = malloc((size_t)p->n_ends * 8 + 1);
    if (!ends) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " documents", p->n_ends);
    for (int64_t i = 0; i < 8 * p->n_ends; i++) {
        ends[i] = (uint8_t)((uint64_t)p->ends[i / 8] >> (8 * (i % 8)));
    }
    const two_parts documents = { "", ends, 0, (size_t)p->n_ends * 8 };
    mn_status st = write_shard_file(&shard.hash, p, "bin", &tokens);
    if (st == MN_OK) st = write_shard_file(&shard.documents_hash, p, "documents", &documents);
    if (st == MN_OK) st = mn_split_add(&p->index.splits[p->split], &shard);
    p->index.place = p->place;
    if (st == MN_OK) st = mn_prepared_save(&p->index, p->options->folder);
    free(ends);
    p->n_ids = p->n_ends = p->largest = 0;
    return st;
}

static mn_status make_room(preparation *p) {
    if (p->n_ids < p->room) return MN_OK;
    const int64_t room = mn_min(p->index.shard_tokens, 2 * p->room + 65536);
    uint8_t *grown = realloc(p->ids, (size_t)room * (size_t)p->index.token_bytes);
    if (!grown) {
        return mn_fail(MN_ERR_MEMORY,
                       "no memory for a shard of %" PRId64 " tokens; make it smaller",
                       p->index.shard_tokens);
    }
    p->ids = grown;
    p->room = room;
    return MN_OK;
}

static mn_status put_one(preparation *p, int32_t id) {
    mn_status st = MN_OK;
    p->open++;
    if (p->skip > 0) {
        p->skip--;
        p->place.skip++;
        return MN_OK;
    }
    if (p->n_ids == p->index.shard_tokens) st = write_shard(p);
    if (st == MN_OK) st = make_room(p);
    if (st != MN_OK) return st;
    uint8_t *at = p->ids + p->n_ids * p->index.token_bytes;
    for (int i = 0; i < p->index.token_bytes; i++) at[i] = (uint8_t)((uint32_t)id >> (8 * i));
    p->largest = mn_max(p->largest, id);
    p->n_ids++;
    p->place.skip++;
    return MN_OK;
}

/* ---- the sink of the tokens ------------------------------------------------------------------ */

static mn_status put_tokens(void *context, const int32_t *ids, int64_t count) {
    preparation *p = context;
    mn_status st = mn_check_ids(ids, count, p->index.vocab_size, "tokenizer", 0);
    for (int64_t i = 0; i < count && st == MN_OK; i++) st = put_one(p, ids[i]);
    return st;
}

static mn_status close_document(void *context) {
    preparation *p = context;
    mn_status st = MN_OK;
    if (p->open == 0) return MN_OK;
    if (p->index.document_end >= 0) st = put_one(p, (int32_t)p->index.document_end);
    p->open = 0;
    if (st != MN_OK || p->n_ids == 0) return st;    // no tokens here: it ended in a shard on disk
    if (p->n_ends == p->ends_room) {
        const int64_t room = 2 * p->ends_room + 1024;
        int64_t *grown = realloc(p->ends, (size_t)room * sizeof *grown);
        if (!grown) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " documents", room);
        p->ends = grown;
        p->ends_room = room;
    }
    p->ends[p->n_ends++] = p->index.splits[p->split].tokens + p->n_ids;
    return MN_OK;
}

static mn_status begin_piece(void *context, int64_t index) {
    preparation *p = context;
    const mn_text_piece *piece = &p->plan.pieces[index];
    if (piece->held_out && p->split == MN_SPLIT_TRAIN) {
        const mn_status st = write_shard(p);
        if (st != MN_OK) return st;
        p->split = MN_SPLIT_VALID;
    }
    p->place = (mn_prepare_place){ .piece = index, .open = p->open };
    const mn_split *splits = p->index.splits;
    const int64_t tokens = splits[0].tokens + splits[1].tokens + p->n_ids;
    const mn_prepare_options *o = p->options;
    if (!o->progress || o->progress(o->context, piece->before, p->plan.bytes, tokens)) return MN_OK;
    return mn_fail(MN_ERR_ARGUMENT, "stopped; the same command goes on from here");
}

/* ---- settings and folder --------------------------------------------------------------------- */

static mn_status copy_text(char **out, const char *text) {
    *out = strdup(text);
    return *out ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for settings");
}

static mn_status list_input(preparation *p) {
    const mn_corpus_options *in = &p->options->input;
    mn_status st = mn_data_files_list(&p->files, in->paths, in->n_paths, in->format);
    mn_hash names = { 0 }, times = { 0 };
    for (int64_t i = 0; i < p->files.count && st == MN_OK; i++) {
        const mn_data_file *file = &p->files.items[i];
        if (file->format != MN_CORPUS_TEXT && file->format != MN_CORPUS_JSONL) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: holds tokens already; prepare takes text",
                           file->path);
        }
        const char *slash = strrchr(file->path, '/'), *name = slash ? slash + 1 : file->path;
        mn_hash_add(&names, name, strlen(name) + 1);
        mn_hash_add_u64(&names, (uint64_t)file->bytes);
        mn_hash_add_u64(&times, (uint64_t)file->changed_ns);
        p->index.input_bytes += file->bytes;
    }
    p->index.input_files = p->files.count;
    p->index.input = mn_hash_value(&names);
    p->index.input_times = mn_hash_value(&times);
    return st;
}

static bool scan_goes_on(void *context, int64_t done, int64_t all) {
    const mn_prepare_options *o = context;
    (void)done;
    return !o->progress || o->progress(o->context, 0, all, 0);
}

static mn_status make_characters(preparation *p) {
    const mn_corpus_options *in = &p->options->input;
    char *letters = NULL;
    size_t size = 0;
    mn_text_plan plan;
    mn_status st = mn_text_plan_make(&plan, &p->files, in->text_key, in->separator, 0, NULL);
    if (st != MN_OK) return st;
    st = mn_text_alphabet(&letters, &size, &plan, scan_goes_on, (void *)(uintptr_t)p->options);
    if (st == MN_OK) st = mn_tokenizer_chars(&p->made, letters, size);
    p->tokenizer = p->made;
    free(letters);
    mn_text_plan_free(&plan);
    return st;
}

static mn_status settle(preparation *p) {
    const mn_prepare_options *o = p->options;
    mn_prepared *x = &p->index;
    const char *formats[] = { [MN_CORPUS_AUTO] = "auto", [MN_CORPUS_TEXT] = "text",
                              [MN_CORPUS_JSONL] = "jsonl" };
    x->vocab_size = mn_tokenizer_size(p->tokenizer);
    x->token_bytes = x->vocab_size <= UINT16_VOCABULARY ? 2 : 4;
    x->tokenizer = mn_tokenizer_fingerprint(p->tokenizer);
    x->valid = o->valid;
    x->shard_tokens = o->shard_tokens > 0 ? o->shard_tokens : DEFAULT_SHARD_TOKENS;
    x->document_end = o->input.document_end;
    if (x->document_end == MN_DOCUMENT_END_OWN) x->document_end = mn_tokenizer_eos(p->tokenizer);
    if (x->document_end < 0) x->document_end = -1;
    if (x->document_end >= x->vocab_size) {
        return mn_fail(MN_ERR_ARGUMENT, "document end: token %" PRId64 " of %" PRId64,
                       x->document_end, x->vocab_size);
    }
    const char *separator = o->input.separator;
    mn_status st = copy_text(&x->tokenizer_kind, mn_tokenizer_kind(p->tokenizer));
    if (st == MN_OK) st = copy_text(&x->format, formats[o->input.format]);
    if (st == MN_OK) st = copy_text(&x->text_key, o->input.text_key ? o->input.text_key : "text");
    if (st == MN_OK && separator && *separator) st = copy_text(&x->separator, separator);
    return st;
}

static bool same_text(const char *a, const char *b) {
    return a && b ? strcmp(a, b) == 0 : a == b;
}

/* What differs between two sets of settings, in a word; NULL: nothing. */
static const char *difference(const mn_prepared *a, const mn_prepared *b) {
    if (a->tokenizer != b->tokenizer || a->vocab_size != b->vocab_size) return "tokenizer";
    if (a->document_end != b->document_end) return "token at the end of documents";
    if (!same_text(a->format, b->format)) return "format of the input";
    if (!same_text(a->text_key, b->text_key)) return "text key";
    if (!same_text(a->separator, b->separator)) return "separator";
    if (a->valid != b->valid) return "share for validation";
    if (a->shard_tokens != b->shard_tokens) return "size of shards";
    if (a->input_files != b->input_files || a->input_bytes != b->input_bytes ||
        a->input != b->input) {
        return "input";
    }
    if (!a->complete && a->input_times != b->input_times) return "input (it was changed since)";
    return NULL;
}

static char *path_in(const char *folder, const char *name) {
    const size_t room = strlen(folder) + strlen(name) + 2;
    char *path = malloc(room);
    if (path) snprintf(path, room, "%s/%s", folder, name);
    return path;
}

static mn_status hash_file(uint64_t *out, const char *path) {
    mn_file file;
    mn_hash hash = { 0 };
    const mn_status st = mn_file_map(&file, path);
    if (st == MN_OK) mn_hash_add(&hash, file.bytes, file.size);
    mn_file_unmap(&file);
    *out = mn_hash_value(&hash);
    return st;
}

static mn_status check_file(const char *folder, int split, int64_t shard, const char *ending,
                            uint64_t wanted) {
    uint64_t hash;
    char *path = mn_shard_path(folder, split, shard, ending);
    if (!path) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    mn_status st = hash_file(&hash, path);
    if (st == MN_OK && hash != wanted) {
        st = mn_fail(MN_ERR_FORMAT, "%s: is not what was written (hash %016" PRIx64
                     ", index.json says %016" PRIx64 ")", path, hash, wanted);
    }
    free(path);
    return st;
}

/* A shard as it was written? */
static mn_status check_shard(const mn_prepared *index, const char *folder, int split, int64_t i) {
    const mn_shard *shard = &index->splits[split].shards[i];
    const mn_status st = check_file(folder, split, i, "bin", shard->hash);
    return st == MN_OK ? check_file(folder, split, i, "documents", shard->documents_hash) : st;
}

/* Takes over what an earlier run left. A damaged shard makes it begin anew. */
static mn_status take_over(preparation *p, mn_prepared *old) {
    const char *what = difference(old, &p->index);
    if (what) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "%s: was begun with another %s; choose another folder, or remove this one",
                       p->options->folder, what);
    }
    int64_t n = 0;
    for (int s = 0; s < MN_SPLIT_COUNT; s++) {
        for (int64_t i = 0; i < old->splits[s].n_shards; i++, n++) {
            if (check_shard(old, p->options->folder, s, i) != MN_OK) return MN_OK;
        }
    }
    p->index.place = old->place;
    p->index.complete = old->complete;
    p->result->kept = n;
    for (int s = 0; s < MN_SPLIT_COUNT; s++) {
        p->index.splits[s] = old->splits[s];
        old->splits[s] = (mn_split){ 0 };
    }
    return MN_OK;
}

/* Removes the unfinished files of a run that was killed. */
static void sweep(const char *folder) {
    DIR *entries = opendir(folder);
    if (!entries) return;
    for (struct dirent *entry; (entry = readdir(entries));) {
        const char *name = entry->d_name;
        const size_t n = strlen(name);
        const bool ours = strncmp(name, "train_", 6) == 0 || strncmp(name, "valid_", 6) == 0 ||
                          strncmp(name, "index.json.", 11) == 0 ||
                          strncmp(name, "tokenizer.json.", 15) == 0;
        if (ours && n > 4 && strcmp(name + n - 4, ".tmp") == 0) {
            unlinkat(dirfd(entries), name, 0);
        }
    }
    closedir(entries);
}

/* Makes the folder if need be and keeps other runs out of it until `p->lock` is closed. */
static mn_status lock_folder(preparation *p) {
    const char *folder = p->options->folder;
    const mn_status st = mn_folder_make(folder);
    if (st != MN_OK) return st;
    p->lock = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (p->lock >= 0 && flock(p->lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        return mn_fail(MN_ERR_IO, "%s: another mneme prepare is writing there", folder);
    }
    sweep(folder);
    return MN_OK;
}

static mn_status open_folder(preparation *p) {
    const char *folder = p->options->folder;
    struct stat info;
    mn_prepared old;
    mn_status st = lock_folder(p);
    char *path = st == MN_OK ? path_in(folder, "index.json") : NULL;
    if (st == MN_OK && !path) st = mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    const bool begun = path && stat(path, &info) == 0;
    free(path);
    if (st != MN_OK || !begun) return st;
    st = mn_prepared_load(&old, folder);
    if (st != MN_OK) return st;
    st = take_over(p, &old);
    mn_prepared_free(&old);
    return st;
}

/* ---- preparing ------------------------------------------------------------------------------- */

static void report(const preparation *p) {
    for (int s = 0; s < MN_SPLIT_COUNT; s++) {
        p->result->tokens[s] = p->index.splits[s].tokens;
        p->result->documents[s] = p->index.splits[s].documents;
        p->result->shards[s] = p->index.splits[s].n_shards;
    }
    p->result->token_bytes = p->index.token_bytes;
}

/* Encodes from the place where the index says that the next shard begins. */
static mn_status encode(preparation *p) {
    const mn_token_sink sink = { p, put_tokens, close_document, begin_piece };
    mn_threads *threads = NULL;
    mn_status st = mn_threads_create(&threads, p->options->n_threads);
    if (st != MN_OK) return st;
    if (p->index.place.piece >= mn_max(p->plan.n_pieces, 1)) {
        st = mn_fail(MN_ERR_FORMAT, "%s/index.json: resume: piece %" PRId64 " of %" PRId64,
                     p->options->folder, p->index.place.piece, p->plan.n_pieces);
    }
    p->skip = p->index.place.skip;
    p->open = p->index.place.open;
    p->split = p->index.splits[MN_SPLIT_VALID].n_shards > 0 ? MN_SPLIT_VALID : MN_SPLIT_TRAIN;
    if (st == MN_OK) {
        st = mn_encode_pieces(&p->plan, p->tokenizer, p->index.place.piece, threads, &sink);
    }
    mn_threads_destroy(threads);
    if (st == MN_OK) st = write_shard(p);
    if (st != MN_OK) return st;
    if (p->index.splits[MN_SPLIT_TRAIN].n_shards == 0) {
        return mn_fail(MN_ERR_FORMAT, "%s: there is no text in it", p->files.items[0].path);
    }
    p->index.complete = true;
    return mn_prepared_save(&p->index, p->options->folder);
}

static mn_status prepare(preparation *p) {
    const mn_corpus_options *in = &p->options->input;
    mn_status st = list_input(p);
    if (st == MN_OK && !p->tokenizer) st = make_characters(p);
    if (st == MN_OK) st = settle(p);
    if (st == MN_OK) st = open_folder(p);
    if (st != MN_OK) return st;
    if (p->index.complete) {
        p->result->was_complete = true;
        return MN_OK;
    }
    st = mn_text_plan_make(&p->plan, &p->files, in->text_key, in->separator, p->options->valid,
                           p->tokenizer);
    char *path = path_in(p->options->folder, "tokenizer.json");
    if (st == MN_OK && !path) st = mn_fail(MN_ERR_MEMORY, "no memory for a name");
    if (st == MN_OK) st = mn_tokenizer_save(p->tokenizer, path);
    free(path);
    return st == MN_OK ? encode(p) : st;
}

mn_status mn_prepare(mn_prepare_result *out, const mn_prepare_options *options,
                     const mn_tokenizer *tokenizer) {
    preparation p = { .options = options, .tokenizer = tokenizer, .result = out,
                      .lock = -1 };
    *out = (mn_prepare_result){ 0 };
    if (!options->folder || !*options->folder) {
        return mn_fail(MN_ERR_ARGUMENT, "no folder given for the prepared data");
    }
    if (!(options->valid >= 0 && options->valid < 1)) {
        return mn_fail(MN_ERR_ARGUMENT, "share for validation: %g is not in [0, 1)",
                       options->valid);
    }
    if (options->shard_tokens < 0 || options->shard_tokens > MN_BIN_MAX_TOKENS) {
        return mn_fail(MN_ERR_ARGUMENT, "shard: %" PRId64 " tokens are not in 1..%d",
                       options->shard_tokens, MN_BIN_MAX_TOKENS);
    }
    if (options->input.format > MN_CORPUS_JSONL) {
        return mn_fail(MN_ERR_ARGUMENT, "format: prepare takes text or JSON lines");
    }
    const mn_status st = prepare(&p);
    report(&p);
    if (p.lock >= 0) close(p.lock);
    free(p.ids);
    free(p.ends);
    mn_text_plan_free(&p.plan);
    mn_data_files_free(&p.files);
    mn_prepared_free(&p.index);
    mn_tokenizer_destroy(p.made);
    return st;
}

/* ---- checking -------------------------------------------------------------------------------- */

static mn_status check_tokens(const mn_prepared *index, const char *folder, int split, int64_t i) {
    mn_bin bin;
    mn_status st = mn_shard_open(&bin, index, folder, split, i);
    if (st != MN_OK) return st;
    int32_t *ids = malloc(CHECK_TOKENS * sizeof *ids);
    int32_t largest = 0;
    if (!ids) st = mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    for (int64_t at = 0; at < bin.shape.n_tokens && st == MN_OK; at += CHECK_TOKENS) {
        const int64_t n = mn_min(CHECK_TOKENS, bin.shape.n_tokens - at);
        st = mn_bin_read(&bin, at, n, index->vocab_size, ids);
        for (int64_t j = 0; j < n && st == MN_OK; j++) largest = (int32_t)mn_max(largest, ids[j]);
    }
    const int64_t wanted = index->splits[split].shards[i].largest;
    if (st == MN_OK && largest != wanted) {
        st = mn_fail(MN_ERR_FORMAT,
                     "%s: its largest token is %" PRId32 ", index.json says %" PRId64, bin.path,
                     largest, wanted);
    }
    free(ids);
    mn_bin_close(&bin);
    return st;
}

static mn_status check_documents(const mn_prepared *index, const char *folder, int split, int64_t i,
                                 int64_t first) {
    const int64_t n = index->splits[split].shards[i].documents;
    int64_t *ends = malloc((size_t)n * sizeof *ends + 1);
    if (!ends) return mn_fail(MN_ERR_MEMORY, "no memory for %" PRId64 " documents", n);
    const mn_status st = mn_shard_documents(ends, index, folder, split, i, first);
    free(ends);
    return st;
}

static mn_status check_tokenizer(const mn_prepared *index, const char *folder) {
    mn_tokenizer *tokenizer = NULL;
    char *path = path_in(folder, "tokenizer.json");
    if (!path) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    mn_status st = mn_tokenizer_load(&tokenizer, path);
    if (st == MN_OK && mn_tokenizer_fingerprint(tokenizer) != index->tokenizer) {
        st = mn_fail(MN_ERR_FORMAT, "%s: is not the tokenizer that made the tokens", path);
    }
    mn_tokenizer_destroy(tokenizer);
    free(path);
    return st;
}

static mn_status check_index(const mn_prepared *index, const char *folder,
                             mn_prepare_progress progress, void *context) {
    if (!index->complete) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: its preparation did not come to an end; run the same mneme prepare "
                       "again and it goes on",
                       folder);
    }
    const int64_t all = index->splits[0].tokens + index->splits[1].tokens;
    int64_t done = 0;
    mn_status st = check_tokenizer(index, folder);
    for (int s = 0; s < MN_SPLIT_COUNT && st == MN_OK; s++) {
        int64_t first = 0;
        for (int64_t i = 0; i < index->splits[s].n_shards && st == MN_OK; i++) {
            st = check_shard(index, folder, s, i);
            if (st == MN_OK) st = check_tokens(index, folder, s, i);
            if (st == MN_OK) st = check_documents(index, folder, s, i, first);
            first += index->splits[s].shards[i].tokens;
            done += index->splits[s].shards[i].tokens;
            if (st == MN_OK && progress && !progress(context, done, all, done)) {
                st = mn_fail(MN_ERR_ARGUMENT, "stopped");
            }
        }
    }
    return st;
}

mn_status mn_prepare_check(mn_prepare_result *out, const char *folder,
                           mn_prepare_progress progress, void *context) {
    preparation p = { .result = out };
    *out = (mn_prepare_result){ 0 };
    mn_status st = mn_prepared_load(&p.index, folder);
    if (st == MN_OK) st = check_index(&p.index, folder, progress, context);
    report(&p);
    mn_prepared_free(&p.index);
    return st;
}
