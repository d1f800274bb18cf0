/* text.h - text files of any size as pieces that can be tokenised apart.
 *
 * Files are cut about every 256 KiB at a place that depends on their bytes alone: at the end of a
 * separator or a line of JSON, else after a line end between two characters that are not blank, or
 * before the blank between two words. A cut inside a document is taken only when the tokenizer
 * gives the same tokens for the 256 bytes on either side of it in one and in two parts; where no
 * such place is found in a piece, it is joined to the next one. Tokens of all pieces in a row are
 * so those of the whole text, and pieces can be worked on in any order on any number of threads. */
#ifndef MN_DATA_TEXT_H
#define MN_DATA_TEXT_H

#include "data/files.h"

typedef struct mn_text_piece {
    int64_t file, begin, end;    // bytes [begin, end) of the file
    int64_t before;              // bytes of all pieces in front
    bool closes;                 // a document ends where the piece ends
    bool held_out;               // belongs to the validation part
} mn_text_piece;

typedef struct mn_text_plan {
    const mn_data_files *files;    // borrowed, as are the texts
    const char *text_key, *separator;
    mn_text_piece *pieces;
    int64_t n_pieces, capacity;
    int64_t bytes;                 // of all pieces
} mn_text_plan;

/* Cuts `files`, all of which are TEXT or JSONL. `held_out` in [0, 1) is the last part of the bytes
 * kept for validation: the documents that begin in it, or, where none does, the end of the last
 * text itself. `tokenizer` may be NULL when tokens do not matter. */
mn_status mn_text_plan_make(mn_text_plan *out, const mn_data_files *files, const char *text_key,
                            const char *separator, double held_out,
                            const mn_tokenizer *tokenizer);
void mn_text_plan_free(mn_text_plan *plan);    // all zeros is fine

/* A run of text of a document, and whether the document ends there. */
typedef mn_status (*mn_text_visitor)(void *context, const char *text, size_t size, bool closes);

/* Bytes for a piece, kept from one to the next; all zeros is empty. Free `bytes`. */
typedef struct mn_text_buffer {
    char *bytes;
    size_t room;
} mn_text_buffer;

/* Reads piece `index` and hands the texts in it to `visit`, in order. */
mn_status mn_text_visit(const mn_text_plan *plan, int64_t index, mn_text_buffer *buffer,
                        mn_text_visitor visit, void *context);

/* Every distinct code point of the input as text, to be freed. `progress` (may be NULL) stops the
 * walk by false. */
mn_status mn_text_alphabet(char **text, size_t *size, const mn_text_plan *plan,
                           bool (*progress)(void *context, int64_t done, int64_t all),
                           void *context);

#endif
