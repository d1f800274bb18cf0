/* request.h - what a client asks for, read from JSON and checked before anything runs. */
#ifndef MN_SERVER_REQUEST_H
#define MN_SERVER_REQUEST_H

#include "io/json.h"
#include "server/chat.h"
#include "server/inside.h"
#include "tokenizer/tokenizer.h"

enum {
    MN_ASK_STOPS = 16,
    MN_ASK_LOGPROBS = 20,       // tokens beside the one, at most
    MN_ASK_SEQUENCES = 256,     // prompts times continuations, at most
    MN_STATE_ID = 33,           // 32 digits and a zero byte
};

/* What requests are checked against; borrowed. */
typedef struct mn_ask_limits {
    const mn_tokenizer *tokenizer;
    const mn_chat *chat;
    int64_t n_ids;              // ids that model and tokenizer both know
    int64_t context;            // tokens of a prompt and its continuation at most
    int64_t most_tokens;        // tokens to write where the request does not say (chat)
    bool belief;                // the model tells variances
} mn_ask_limits;

typedef struct mn_prompt {
    mn_token_list tokens;
    bool echoes;                // the text is wanted
    char *text;                 // as given, or where it is wanted as decoded
    size_t size;
} mn_prompt;

typedef struct mn_ask {
    mn_prompt *prompts;
    int64_t n_prompts;
    int64_t n, max_tokens;
    int logprobs;               // tokens beside the one; -1: not asked for
    bool chat, echo, stream, usage, ignore_eos, cache, belief, keep;
    bool inside;                // with belief: by head, with gains and rows of Kalman attention
    int64_t rows[MN_INSIDE_ROWS];      // tokens whose rows are asked for
    int n_rows;
    char *stops[MN_ASK_STOPS];
    int n_stops;
    bool keep_stop;             // the text of the stop stays in the answer
    int32_t stop_ids[MN_ASK_STOPS];
    int n_stop_ids;
    json_t *tools;              // that the template told of; NULL: none
    mn_sampling sampling;
    char state[MN_STATE_ID];    // "": a fresh sequence
} mn_ask;

/* Reads a completion, or a conversation where `chat`. MN_ERR_ARGUMENT and MN_ERR_FORMAT blame the
 * request, in words. Free `out` in any case. */
mn_status mn_ask_read(mn_ask *out, const mn_json *root, const mn_ask_limits *limits, bool chat);
void mn_ask_free(mn_ask *ask);    // leaves all zeros

/* Texts or ids of member `key` as prompts: the four forms of a prompt. With `fresh` the sequence
 * begins here: the tokenizer's beginning is put in front of texts if `special`, and nothing at all
 * becomes that beginning. */
mn_status mn_ask_prompts(mn_ask *out, const mn_json *root, const char *key,
                         const mn_ask_limits *limits, bool special, bool fresh);

/* The prompt of a request about what a state has read already: none. */
mn_status mn_ask_no_prompt(mn_ask *out);

/* The tokens whose rows a request about beliefs asks for. */
mn_status mn_ask_rows(mn_ask *out, const mn_json *root);

/* The id of a stored state, as member `key`: 32 hexadecimal digits. Absent: "". */
mn_status mn_ask_state(char out[MN_STATE_ID], const mn_json *root, const char *key);

#endif
