/* tokenizer.h - text to tokens and back, by the rules of a Hugging Face tokenizer.json.
 *
 * Three models: byte-pair merges over pieces of text, the most likely segmentation (unigram), the
 * longest match (WordPiece). Bytes are a byte-level
 * vocabulary of 256 without merges, characters a vocabulary of code points without merges, and
 * both are written as a tokenizer.json that other programs load. Safe to use from many threads. */
#ifndef MN_TOKENIZER_TOKENIZER_H
#define MN_TOKENIZER_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mneme.h"

typedef struct mn_tokenizer mn_tokenizer;

/* A growing list of tokens; all zeros is empty. Free with mn_token_list_free. */
typedef struct mn_token_list {
    int32_t *ids;
    int64_t count, capacity;
} mn_token_list;

mn_status mn_token_list_add(mn_token_list *list, int32_t id);
void mn_token_list_free(mn_token_list *list);

/* ---- make ------------------------------------------------------------------------------------ */

/* Reads a tokenizer.json, or the folder that holds one. On failure `*out` is NULL and the message
 * names the file and the part of it that is not understood. */
mn_status mn_tokenizer_load(mn_tokenizer **out, const char *path);

/* The one that a setting names: "bytes", or a file or folder as above. */
mn_status mn_tokenizer_open(mn_tokenizer **out, const char *name);

/* The same for bytes in memory; `name` opens the messages. */
mn_status mn_tokenizer_parse(mn_tokenizer **out, const void *bytes, size_t size, const char *name);

/* 256 tokens, one per byte. */
mn_status mn_tokenizer_bytes(mn_tokenizer **out);

/* One token per distinct code point of `text`, in ascending order. */
mn_status mn_tokenizer_chars(mn_tokenizer **out, const char *text, size_t size);

typedef struct mn_tokenizer_training {
    int64_t vocab_size;          // special tokens, 256 bytes and merges together
    int64_t min_count;           // pairs seen less often are not merged; 0: 2
    const char *pattern;         // a name such as "gpt2", "llama3", "qwen2"; NULL: gpt2
    const char *const *special;  // tokens that stay whole, NULL-terminated; may be NULL
    bool (*progress)(void *context, int64_t done, int64_t all);    // merges; false stops; or NULL
    void *context;
} mn_tokenizer_training;

/* Byte-level BPE over `n_texts` texts: the most frequent pair first, of equal ones that of smaller
 * ids. The same input gives the same merges. There are fewer tokens than asked for when no pair is
 * left that occurs often enough. Ids: special tokens, bytes, merges. */
mn_status mn_tokenizer_train(mn_tokenizer **out, const mn_tokenizer_training *how,
                             const char *const *texts, const size_t *sizes, int64_t n_texts);

void mn_tokenizer_destroy(mn_tokenizer *tokenizer);    // NULL accepted

/* Writes a tokenizer.json, atomically. */
mn_status mn_tokenizer_save(const mn_tokenizer *tokenizer, const char *path);

/* ---- use ------------------------------------------------------------------------------------- */

/* One more than the largest id. */
int64_t mn_tokenizer_size(const mn_tokenizer *tokenizer);

/* A number that changes with vocabulary, merges and rules: stored with prepared data and models. */
uint64_t mn_tokenizer_fingerprint(const mn_tokenizer *tokenizer);

/* "bytes", "chars", "bpe", "unigram" or "wordpiece". */
const char *mn_tokenizer_kind(const mn_tokenizer *tokenizer);

/* Appends the tokens of `text`; on failure `out` is as it was. With `special` the text of special
 * tokens becomes those tokens and the tokenizer's own template (such as a leading BOS) is applied;
 * without it special tokens are plain text and nothing is put around. Added tokens that are not
 * special are vocabulary like any other. Bytes that are not UTF-8 are taken as U+FFFD, except by
 * byte-level vocabularies, which keep them. A character outside a character vocabulary fails and is
 * named with its place. Elsewhere it becomes the unknown token, or bytes, or, where the file names
 * neither, nothing. */
mn_status mn_tokenizer_encode(const mn_tokenizer *tokenizer, const char *text, size_t size,
                              bool special, mn_token_list *out);

/* The same with the text of special tokens as those tokens, and nothing put around: what other
 * software calls add_special_tokens = false. */
mn_status mn_tokenizer_encode_bare(const mn_tokenizer *tokenizer, const char *text, size_t size,
                                   mn_token_list *out);

/* The text of `count` tokens, in memory the caller frees; `*size` excludes the closing zero byte.
 * Special tokens are left out unless `special`. Byte-level vocabularies give the bytes as they are,
 * also where they are not UTF-8. An id outside the vocabulary fails. */
mn_status mn_tokenizer_decode(const mn_tokenizer *tokenizer, const int32_t *ids, int64_t count,
                              bool special, char **text, size_t *size);

/* Decoding token by token, for streaming: holds back bytes that do not yet make whole characters.
 * All zeros is the start of a text. */
typedef struct mn_stream_decoder {
    char pending[8];
    int n_pending;
    bool started;
} mn_stream_decoder;

/* Appends what token `id` completes to `out` (of `capacity` bytes, `*size` used); fails when it
 * does not fit, and then changes nothing. Special tokens add nothing; bytes that cannot make a
 * character become U+FFFD. With id -1: what is left at the end, as U+FFFD. */
mn_status mn_tokenizer_stream(const mn_tokenizer *tokenizer, mn_stream_decoder *decoder, int32_t id,
                              char *out, size_t capacity, size_t *size);

/* The token with exactly this text (special tokens included), as the file spells it or as it stands
 * in a text (" the" finds the byte-level token spelt with U+0120), or -1. */
int32_t mn_tokenizer_find(const mn_tokenizer *tokenizer, const char *token);

/* Begin and end of text, -1 where the tokenizer names none. */
int32_t mn_tokenizer_bos(const mn_tokenizer *tokenizer);
int32_t mn_tokenizer_eos(const mn_tokenizer *tokenizer);

/* Whether a text ends with this token: its end, or one of those generation_config.json names. */
bool mn_tokenizer_ends(const mn_tokenizer *tokenizer, int32_t id);

/* Writes tokenizer_config.json (as it was read, where there was one) and generation_config.json
 * into the folder: which tokens begin and end a text, for other software. */
mn_status mn_tokenizer_save_ends(const mn_tokenizer *tokenizer, const char *folder);

#endif
