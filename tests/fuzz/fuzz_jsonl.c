/* fuzz_jsonl.c - a line either gives the text under the key or a message that names the line. The
 * key is the input up to the first line end, the line what follows. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "data/jsonl.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    const uint8_t *end = size > 0 ? memchr(bytes, '\n', size) : NULL;
    const size_t key_size = end ? (size_t)(end - bytes) : 0, at = end ? key_size + 1 : 0;
    char *key = calloc(key_size + 1, 1);
    REQUIRE(key);
    if (key_size > 0) memcpy(key, bytes, key_size);
    /* A copy of its exact size, so that reads past its end are seen. */
    char *line = malloc(size - at + (size == at));
    REQUIRE(line);
    if (size > at) memcpy(line, bytes + at, size - at);

    mn_json root = { 0 };
    const char *text = NULL;
    size_t text_size = 0;
    const mn_status st = mn_jsonl_text(&root, &text, &text_size, line, size - at, key, "fuzz");
    if (st == MN_OK) {
        REQUIRE(text && strlen(text) == text_size && text_size <= size);
        REQUIRE(!mn_jsonl_blank(line, size - at));
    } else {
        REQUIRE(strncmp(mn_last_error(), "fuzz: ", 6) == 0);
    }
    mn_json_free(&root);
    free(line);
    free(key);
    return 0;
}
