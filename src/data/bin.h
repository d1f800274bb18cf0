/* bin.h - files of token ids: nanoGPT's and llm.c's .bin, read in place.
 *
 *     nanoGPT   uint16 ids until the end of the file
 *     llm.c     256 int32: magic, version, number of ids, zeros; then the ids
 *               magic 20240520, version 1: uint16; magic 20240801, version 7: uint32
 * All little-endian. */
#ifndef MN_DATA_BIN_H
#define MN_DATA_BIN_H

#include <stdbool.h>

#include "data/corpus.h"

enum { MN_BIN_HEADER_BYTES = 1024, MN_BIN_MAX_TOKENS = INT32_MAX };    // of llm.c

/* How the ids lie in a file. */
typedef struct mn_bin_shape {
    int64_t offset;      // bytes before the first id
    int64_t n_tokens;
    int token_bytes;     // 2 or 4
} mn_bin_shape;

/* Reads the shape off the first bytes of a file of `file_bytes`; `head` holds its first
 * MN_BIN_HEADER_BYTES, or all of a shorter one. `format` is NANOGPT, LLMC, or AUTO: LLMC where the
 * magic number is there. `name` opens the messages. */
mn_status mn_bin_describe(mn_bin_shape *out, const uint8_t *head, size_t head_bytes,
                          int64_t file_bytes, mn_corpus_format format, const char *name);

/* Writes the header of llm.c: what mn_bin_describe reads. */
void mn_bin_header(uint8_t out[MN_BIN_HEADER_BYTES], int64_t n_tokens, int token_bytes);

/* An open file. Safe to read from many threads. */
typedef struct mn_bin {
    mn_bin_shape shape;
    int fd;
    char *path;          // NULL: not open
} mn_bin;

/* On failure `*out` is all zeros. */
mn_status mn_bin_open(mn_bin *out, const char *path, mn_corpus_format format);
void mn_bin_close(mn_bin *bin);    // all zeros is fine

/* Reads tokens [at, at + count) of the file. Fails when the file shrank meanwhile, and names the
 * place of an id at or above `vocab_size` (0: any that fits in int32). */
mn_status mn_bin_read(const mn_bin *bin, int64_t at, int64_t count, int64_t vocab_size,
                      int32_t *out);

/* Fails when one of `count` ids is outside 0 .. vocab_size-1 (0: negative); `first` is the place of
 * the first one in `name`. */
mn_status mn_check_ids(const int32_t *ids, int64_t count, int64_t vocab_size, const char *name,
                       int64_t first);

#endif
