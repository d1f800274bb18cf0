/* corpus.h - one long row of tokens from files of any kind, with the borders of its documents.
 *
 * Text is read in pieces and only its tokens are kept; files of tokens stay on the disk and are
 * read where they lie. */
#ifndef MN_DATA_CORPUS_H
#define MN_DATA_CORPUS_H

#include "tokenizer/tokenizer.h"

typedef struct mn_corpus mn_corpus;

/* How files are read; by default their ending and first bytes decide (see files.h). */
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
    int32_t document_end;        // token put after each document; see below
    int64_t vocab_size;          // tokens at or above are refused, named with file and place; 0:
                                 // the size of the tokenizer, if there is one
    const char *split;           // of prepared folders: "train" (also NULL) or "valid"
} mn_corpus_options;

enum {
    MN_DOCUMENT_END_OWN = -1,     // the tokenizer's EOS, if it has one
    MN_DOCUMENT_END_NONE = -2,
};

/* Reads text, and looks through files of tokens once. `tokenizer` is needed for text and JSON
 * lines, and may be NULL for the rest; a prepared folder must have been made with the same one.
 *
 * In text, special tokens are plain text and documents without any token are left out. In a .bin a
 * document ends behind each `document_end` and with the file; a meta.json beside it that names a
 * larger "vocab_size" than there is fails. On failure `*out` is NULL. */
mn_status mn_corpus_open(mn_corpus **out, const mn_corpus_options *options,
                         const mn_tokenizer *tokenizer);

/* Tokens already in memory, copied; `borders` are the n_documents + 1 offsets of documents. */
mn_status mn_corpus_from_tokens(mn_corpus **out, const int32_t *tokens, int64_t count,
                                const int64_t *borders, int64_t n_documents);

/* The part [from, to) of its tokens in [0,1], cut at a token, or at the nearest border between
 * documents when there is more than one: the last tenth for validation is (0.9, 1). Parts that
 * share a number meet there. `corpus` must outlive it. Fails when the part would be empty. */
mn_status mn_corpus_part(mn_corpus **out, const mn_corpus *corpus, double from, double to);

void mn_corpus_destroy(mn_corpus *corpus);    // NULL accepted

int64_t mn_corpus_tokens(const mn_corpus *corpus);
int64_t mn_corpus_documents(const mn_corpus *corpus);
int64_t mn_corpus_document_start(const mn_corpus *corpus, int64_t document);    // 0 .. documents

/* Copies tokens [at, at + count). Fails when a file shrank or holds other ids than it did. */
mn_status mn_corpus_read(const mn_corpus *corpus, int64_t at, int64_t count, int32_t *out);

/* Changes with the tokens: resume refuses other data. */
uint64_t mn_corpus_fingerprint(const mn_corpus *corpus);

#endif
