/* prepared.h - the folder that mneme prepare writes, seen from its index.json.
 *
 *     train_000000.bin         tokens with the header of llm.c
 *     train_000000.documents   where documents end in it: uint64, counted from the split's start
 *     valid_000000.bin ...     the same for the part held out, if any
 *     tokenizer.json           what made the tokens
 *     index.json               counts and hashes of all of it */
#ifndef MN_DATA_PREPARED_H
#define MN_DATA_PREPARED_H

#include "data/bin.h"

enum { MN_SPLIT_TRAIN, MN_SPLIT_VALID, MN_SPLIT_COUNT };

extern const char *const mn_split_names[MN_SPLIT_COUNT];

typedef struct mn_shard {
    int64_t tokens, documents;    // documents: those that end in it
    int64_t largest;              // token id
    uint64_t hash, documents_hash;    // of the two files
} mn_shard;

typedef struct mn_split {
    mn_shard *shards;
    int64_t n_shards, capacity;
    int64_t tokens, documents;    // sums
} mn_split;

/* Where an unfinished preparation goes on: at the first token of `piece` of the input, whose first
 * `skip` tokens are in shards already. */
typedef struct mn_prepare_place {
    int64_t piece, skip;
    int64_t open;             // tokens of the document that is open where the piece begins
} mn_prepare_place;

typedef struct mn_prepared {
    bool complete;
    int64_t vocab_size, document_end;    // document_end -1: none
    int token_bytes;
    char *tokenizer_kind, *text_key, *separator, *format;    // owned; separator may be NULL
    uint64_t tokenizer;                  // fingerprint
    double valid;
    int64_t shard_tokens;
    int64_t input_files, input_bytes;
    uint64_t input;                      // of names and sizes
    uint64_t input_times;                // of times of change; only while not complete
    mn_prepare_place place;              // only while not complete
    mn_split splits[MN_SPLIT_COUNT];
} mn_prepared;

/* Reads FOLDER/index.json. On failure `*out` is all zeros. */
mn_status mn_prepared_load(mn_prepared *out, const char *folder);
mn_status mn_prepared_save(const mn_prepared *prepared, const char *folder);
void mn_prepared_free(mn_prepared *prepared);    // all zeros is fine

mn_status mn_split_add(mn_split *split, const mn_shard *shard);

/* FOLDER/SPLIT_000000.ENDING, to be freed; NULL when out of memory. */
char *mn_shard_path(const char *folder, int split, int64_t shard, const char *ending);

/* Opens a shard; its header must agree with the index. */
mn_status mn_shard_open(mn_bin *out, const mn_prepared *prepared, const char *folder, int split,
                        int64_t shard);

/* Reads where documents end in a shard whose first token is number `first` of the split: `ends` has
 * room for shard.documents of them. They ascend and lie inside, or this fails. */
mn_status mn_shard_documents(int64_t *ends, const mn_prepared *prepared, const char *folder,
                             int split, int64_t shard, int64_t first);

#endif
