/* fuzz_bin.c - the first bytes of a file of tokens either fail with a message or describe a file
 * whose tokens lie inside it, and the header written for that shape reads back. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "data/bin.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void check(const uint8_t *head, size_t head_bytes, int64_t file_bytes,
                  mn_corpus_format format) {
    mn_bin_shape shape = { -1, -1, -1 }, back;
    if (mn_bin_describe(&shape, head, head_bytes, file_bytes, format, "fuzz") != MN_OK) {
        REQUIRE(strncmp(mn_last_error(), "fuzz: ", 6) == 0 && shape.n_tokens == -1);
        return;
    }
    REQUIRE(shape.token_bytes == 2 || shape.token_bytes == 4);
    REQUIRE(shape.offset >= 0 && shape.n_tokens >= 0);
    REQUIRE(shape.offset + shape.n_tokens * shape.token_bytes == file_bytes);
    if (shape.offset == 0) return;
    uint8_t header[MN_BIN_HEADER_BYTES];
    mn_bin_header(header, shape.n_tokens, shape.token_bytes);
    REQUIRE(mn_bin_describe(&back, header, sizeof header, file_bytes, MN_CORPUS_AUTO, "back") ==
            MN_OK);
    REQUIRE(back.n_tokens == shape.n_tokens && back.token_bytes == shape.token_bytes);
}

/* The input is a whole file; then the first bytes of one whose size its last four say. */
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const mn_corpus_format formats[] = { MN_CORPUS_AUTO, MN_CORPUS_NANOGPT, MN_CORPUS_LLMC };
    const size_t head = size < MN_BIN_HEADER_BYTES ? size : MN_BIN_HEADER_BYTES;
    uint32_t more = 0;
    if (size >= 4) memcpy(&more, bytes + size - 4, 4);
    for (int i = 0; i < 3; i++) {
        check(bytes, head, (int64_t)size, formats[i]);
        if (head == MN_BIN_HEADER_BYTES) check(bytes, head, (int64_t)head + more, formats[i]);
    }
    return 0;
}
