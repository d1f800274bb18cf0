/* fuzz_tokenizer.c - a document (up to the first zero byte) and a text behind it: the document is
 * refused with a message or makes a tokenizer whose tokens are in its vocabulary and decode; the
 * text also goes through tokenizers that are sound, where it must come back. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer/tokenizer.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

enum { TEXT_MOST = 256 };    // patterns of the input may be slow

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void use(const mn_tokenizer *t, const char *text, size_t size, bool special, bool exact) {
    mn_token_list list = { 0 };
    char *back = NULL, out[1 << 13];
    size_t back_size = 0, n = 0;
    mn_stream_decoder decoder = { 0 };
    const mn_status st = mn_tokenizer_encode(t, text, size, special, &list);
    REQUIRE(st == MN_OK || (!exact && list.count == 0 && *mn_last_error()));
    for (int64_t i = 0; i < list.count; i++) {
        REQUIRE(list.ids[i] >= 0 && list.ids[i] < mn_tokenizer_size(t));
        if (n < sizeof out / 2) mn_tokenizer_stream(t, &decoder, list.ids[i], out, sizeof out, &n);
        REQUIRE(n <= sizeof out);
    }
    const mn_status decoded = mn_tokenizer_decode(t, list.ids, list.count, true, &back, &back_size);
    REQUIRE(decoded == MN_OK || !exact);
    if (exact) REQUIRE(back_size == size && (size == 0 || memcmp(back, text, size) == 0));
    free(back);
    mn_token_list_free(&list);
}

/* Training on the text gives a tokenizer that brings it back. */
static void train(const char *text, size_t size) {
    static const char *const patterns[] = { "gpt2", "llama3" };
    static const char *const special[] = { "<|endoftext|>", NULL };
    const mn_tokenizer_training how = { .vocab_size = 280, .special = special,
                                        .pattern = patterns[size % 2] };
    mn_tokenizer *t = NULL;
    REQUIRE(mn_tokenizer_train(&t, &how, &text, &size, 1) == MN_OK);
    use(t, text, size, size % 3 == 0, true);
    mn_tokenizer_destroy(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    const uint8_t *zero = size > 0 ? memchr(bytes, 0, size) : NULL;
    const size_t document = zero ? (size_t)(zero - bytes) : size;
    const size_t behind = zero ? size - document - 1 : 0;
    const char *text = zero ? (const char *)zero + 1 : "";
    const size_t text_size = behind < TEXT_MOST ? behind : TEXT_MOST;
    mn_tokenizer *t = NULL;
    if (mn_tokenizer_parse(&t, bytes, document, "fuzz") == MN_OK) {
        use(t, text, text_size, true, false);
        use(t, text, text_size, false, false);
        mn_tokenizer_find(t, "a");
        mn_tokenizer_destroy(t);
    } else {
        REQUIRE(!t && *mn_last_error());
    }
    if (text_size % 4 == 0) train(text, text_size);    // slow beside the rest
    return 0;
}
