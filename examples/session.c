/* session.c - a model reads a prompt once; three continuations go on from there.
 *
 *   session MODEL_FOLDER PROMPT
 *
 * The prompt is read in one go. A snapshot of what the model then remembers is restored before each
 * continuation, so nothing is read twice; the same seed and stream give the same text, which the
 * last continuation shows by repeating the first.
 *
 *   cc session.c $(pkg-config --cflags --libs mneme) -o session && ./session runs/gdn/best Once */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mneme.h>

enum { TOKENS = 24, CONTINUATIONS = 3 };

typedef struct reader {
    mn_context *context;
    mn_model *model;
    mn_tokenizer *tokenizer;
    mn_session *session;
    mn_snapshot *start;         // behind the prompt
} reader;

static mn_status open_reader(reader *r, const char *folder) {
    const mn_session_options options = { .belief = true };
    mn_status st = mn_context_create(&r->context, NULL);
    if (st == MN_OK) st = mn_model_open(&r->model, folder);
    if (st == MN_OK) st = mn_tokenizer_load(&r->tokenizer, folder);
    if (st == MN_OK) st = mn_session_create(&r->session, r->context, r->model, &options);
    return st;
}

static void close_reader(reader *r) {
    mn_snapshot_destroy(r->start);
    mn_session_destroy(r->session);
    mn_tokenizer_destroy(r->tokenizer);
    mn_model_close(r->model);
    mn_context_destroy(r->context);
}

/* Reads the prompt and tells how sure the layers were of what they answered meanwhile. */
static mn_status read_prompt(reader *r, const char *prompt) {
    int32_t *tokens = NULL;
    int64_t count = 0;
    mn_status st = mn_tokenizer_ids(&tokens, &count, r->tokenizer, prompt, strlen(prompt), true);
    if (st == MN_OK) st = mn_session_feed(r->session, tokens, count);
    for (int i = 0; st == MN_OK && i < mn_session_beliefs(r->session); i++) {
        const float *variance;
        const int64_t n = mn_session_belief(&variance, r->session, i);
        printf("layer %d: variance %.3g at the first token, %.3g at the last\n",
               mn_session_belief_layer(r->session, i), (double)variance[0],
               (double)variance[n - 1]);
    }
    if (st == MN_OK) {
        printf("%lld tokens read, %zu bytes remembered\n",
               (long long)mn_session_position(r->session), mn_session_bytes(r->session));
        st = mn_session_snapshot(&r->start, r->session);
    }
    free(tokens);
    return st;
}

/* Draws tokens one by one, reads each, and prints their text. */
static mn_status write_on(reader *r, int32_t tokens[TOKENS], uint64_t stream) {
    mn_sampling how;
    mn_sampling_defaults(&how);
    how.temperature = 0.8;
    how.top_k = 20;
    how.stream = stream;
    mn_status st = mn_session_restore(r->session, r->start);
    for (int i = 0; i < TOKENS && st == MN_OK; i++) {
        st = mn_session_sample(&tokens[i], r->session, &how, NULL, 0);
        if (st == MN_OK) st = mn_session_step(r->session, tokens[i]);
    }
    char *text = NULL;
    size_t size;
    if (st == MN_OK) st = mn_tokenizer_decode(r->tokenizer, tokens, TOKENS, false, &text, &size);
    if (st == MN_OK) printf("%llu: %s\n", (unsigned long long)stream, text);
    free(text);
    return st;
}

int main(int argc, char **argv) {
    static const uint64_t streams[CONTINUATIONS] = { 0, 1, 0 };
    reader r = { 0 };
    int32_t tokens[CONTINUATIONS][TOKENS];
    if (argc != 3) {
        fputs("usage: session MODEL_FOLDER PROMPT\n", stderr);
        return 2;
    }
    mn_status st = open_reader(&r, argv[1]);
    if (st == MN_OK) st = read_prompt(&r, argv[2]);
    for (int i = 0; i < CONTINUATIONS && st == MN_OK; i++) {
        st = write_on(&r, tokens[i], streams[i]);
    }
    close_reader(&r);
    if (st != MN_OK) {
        fprintf(stderr, "session: %s: %s\n", mn_status_name(st), mn_last_error());
        return 1;
    }
    const bool again = memcmp(tokens[0], tokens[2], sizeof tokens[0]) == 0;
    puts(again ? "the same again" : "not the same again");
    return !again;
}
