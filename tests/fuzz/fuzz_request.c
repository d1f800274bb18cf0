/* fuzz_request.c - bodies of requests: any bytes are refused with a message, or give a request
 * whose numbers are all within the limits it was read with. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "infer/sample.h"
#include "server/http/exchange.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static mn_tokenizer *tokenizer;
static mn_chat *chat;

static void check_ask(const mn_ask *ask, const mn_ask_limits *limits) {
    REQUIRE(ask->n >= 1 && ask->n * ask->n_prompts <= MN_ASK_SEQUENCES);
    REQUIRE(ask->max_tokens >= 0 && ask->max_tokens <= limits->context);
    REQUIRE(ask->logprobs >= -1 && ask->logprobs <= MN_ASK_LOGPROBS);
    REQUIRE(ask->n_stops <= MN_ASK_STOPS && mn_sampling_check(&ask->sampling) == MN_OK);
    REQUIRE(isfinite(ask->sampling.temperature));
    for (int64_t i = 0; i < ask->n_prompts; i++) {
        const mn_token_list *tokens = &ask->prompts[i].tokens;
        REQUIRE(tokens->count + ask->max_tokens <= limits->context);
        for (int64_t t = 0; t < tokens->count; t++) {
            REQUIRE(tokens->ids[t] >= 0 && tokens->ids[t] < limits->n_ids);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (!tokenizer) {
        REQUIRE(mn_tokenizer_bytes(&tokenizer) == MN_OK);
        REQUIRE(mn_chat_open(&chat, "/nowhere") == MN_OK);
    }
    const mn_ask_limits limits = { .tokenizer = tokenizer, .chat = chat, .n_ids = 200,
                                   .context = 100, .most_tokens = 50 };
    for (int is_chat = 0; is_chat < 2; is_chat++) {
        mn_json root = { 0 };
        mn_ask ask = { 0 };
        mn_status st = mn_json_parse_ids(&root, bytes, size, "request", "prompt");
        if (st == MN_OK) st = mn_ask_read(&ask, &root, &limits, is_chat);
        if (st == MN_OK) check_ask(&ask, &limits);
        else REQUIRE(mn_last_error()[0]);
        mn_ask_free(&ask);
        if (root.value && json_is_object(root.value)) {
            if (mn_ask_rows(&ask, &root) != MN_OK) REQUIRE(mn_last_error()[0]);
            REQUIRE(0 <= ask.n_rows && ask.n_rows <= MN_INSIDE_ROWS);
        }
        mn_json_free(&root);
    }
    char path[64] = "", id[MN_STATE_ID];
    int status;
    memcpy(path, bytes, size < sizeof path - 1 ? size : sizeof path - 1);
    const mn_route *route = mn_route_find("GET", path, id, &status);
    REQUIRE(route ? strlen(id) == 0 || strlen(id) == MN_STATE_ID - 1
                  : status == 404 || status == 405);
    return 0;
}
