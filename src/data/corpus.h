/* corpus.h - one long row of tokens from files of any kind, with the borders of its documents. */
#ifndef MN_DATA_CORPUS_H
#define MN_DATA_CORPUS_H

#include "io/tokenizer.h"

typedef struct mn_corpus mn_corpus;

/* How files are read; by default their ending and first bytes decide. */
typedef enum mn_corpus_format {
    MN_CORPUS_AUTO,
    MN_CORPUS_TEXT,       // a document per file, or split at `separator`
    MN_CORPUS_JSONL,      // a document per line, under the key `text_key`
    MN_CORPUS_NANOGPT,    // .bin: headerless uint16
    MN_CORPUS_LLMC,       // .bin: 256 int32 header, magic 20240520 (uint16) or 20240801 (uint32)
    MN_CORPUS_PREPARED,   // folder written by mneme prepare
} mn_corpus_format;

typedef struct mn_corpus_options {
    mn_corpus_format format;
    const char *const *paths;    // files and folders (walked in sorted order)
    int64_t n_paths;
    const char *text_key;        // NULL: "text"
    const char *separator;       // NULL: none; such as "\n\n" or "<|endoftext|>"
    int32_t document_end;        // token put after each document; -1: the tokenizer's EOS, if any
    int64_t vocab_size;          // tokens at or above are refused, named with file and place
} mn_corpus_options;

/* Reads everything. `tokenizer` is needed for text and JSON lines, and may be NULL for the rest.
 * .bin and prepared files are mapped, not copied. On failure `*out` is NULL. */
mn_status mn_corpus_open(mn_corpus **out, const mn_corpus_options *options,
                         const mn_tokenizer *tokenizer);

/* Tokens already in memory, copied; `borders` are the n_documents + 1 offsets of documents. */
mn_status mn_corpus_from_tokens(mn_corpus **out, const int32_t *tokens, int64_t count,
                                const int64_t *borders, int64_t n_documents);

/* The part [from, to) of its tokens in [0,1], cut at a token (at a document border when there is
 * more than one document): the last tenth for validation is (0.9, 1). `corpus` must outlive it. */
mn_status mn_corpus_part(mn_corpus **out, const mn_corpus *corpus, double from, double to);

void mn_corpus_destroy(mn_corpus *corpus);    // NULL accepted

int64_t mn_corpus_tokens(const mn_corpus *corpus);
int64_t mn_corpus_documents(const mn_corpus *corpus);
int64_t mn_corpus_document_start(const mn_corpus *corpus, int64_t document);    // 0 .. documents

/* Copies tokens [at, at + count). Fails when a mapped file shrank. */
mn_status mn_corpus_read(const mn_corpus *corpus, int64_t at, int64_t count, int32_t *out);

/* Changes with the tokens: resume refuses other data. */
uint64_t mn_corpus_fingerprint(const mn_corpus *corpus);

#endif
