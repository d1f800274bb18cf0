/* engine_internal.h - jobs and their sequences, shared by the files of the engine. */
#ifndef MN_SERVER_ENGINE_INTERNAL_H
#define MN_SERVER_ENGINE_INTERNAL_H

#include <pthread.h>

#include "infer/session.h"
#include "server/cache.h"
#include "server/engine.h"
#include "server/states.h"

/* A token of a sequence as logprobs tells it. */
typedef struct mn_told_token {
    int32_t id;
    double log_probability;            // NaN: the first of a sequence
    int n_top;
    int32_t top[MN_ASK_LOGPROBS + 1];
    double top_log_probability[MN_ASK_LOGPROBS + 1];
} mn_told_token;

/* How many tokens to guess, from how guesses went; see sequence.c. */
typedef struct mn_guesser {
    int64_t draft, guessed, agreed, rest, rest_after;
} mn_guesser;

typedef enum mn_stage { MN_STAGE_QUEUED, MN_STAGE_READING, MN_STAGE_WRITING, MN_STAGE_DONE }
    mn_stage;

/* One continuation of one prompt. */
typedef struct mn_sequence {
    mn_job *job;
    int64_t index;                     // among the job's choices
    int64_t stream;                    // among the continuations of its prompt
    const mn_prompt *prompt;
    mn_stage stage;
    mn_session *session;
    mn_inside *inside;                 // listens to what it reads; NULL: nobody does
    mn_token_list before;              // what its state had read, as far as that is known
    mn_token_list seen;                // prompt, then what was written
    int64_t n_read, n_cached, n_written;
    int32_t drawn;                     // the token that the next step reads
    uint64_t served;                   // when its last chunk was read
    bool looked;                       // into the cache
    mn_guesser guesser;                // of the tokens behind the drawn one
    size_t bytes;                      // of the session, when it was asked last
    mn_logits_hearer hearer;
    bool tells;                        // the drawn token is not in the text yet
    mn_stream_decoder decoder;
    mn_text held;                      // decoded, but it may be the start of a stop
    mn_text text;                      // settled
    size_t n_sent;                     // of it, told as events
    const char *finish;                // "stop" or "length"
    bool cut;                          // by a stop, which is held
    bool feeds;                        // the state it goes back to is marked busy
    mn_told_token *told;               // with logprobs: of each token, prompts too with echo
    int64_t n_told, told_room, told_sent;
    int64_t offset;                    // code points of the tokens told so far
    float *variance;                   // with belief: (tokens, layers)
    int64_t n_variance, variance_room, variance_sent;
    mn_stream_decoder pieces;          // of the texts told with them
    bool opened;                       // its first event was sent
    char kept[MN_STATE_ID];            // the state it was stored as
} mn_sequence;

struct mn_job {
    mn_engine *engine;
    mn_job_kind kind;
    mn_ask ask;
    char into[MN_STATE_ID];
    char id[MN_STATE_ID + 8];          // "cmpl-..."
    long long created;                 // seconds since 1970
    double started;
    mn_sequence *sequences;
    int64_t n_sequences, n_admitted, n_done;
    bool said_first;                   // its first token was counted
    bool opened;                       // an event was sent
    mn_job_call call;
    void *data;
    mn_job *next;                      // in the queue
    /* under the engine's lock */
    int owners;                        // the caller and the engine
    double behind;                     // since when its client has not read its events; 0: it does
    bool done, cancelled, waits;
    int http_status;
    mn_text out;
    mn_text answer;              // whole, made without the lock; `out` once the job is done
    bool answered;
    size_t n_taken;
    mn_job_wake wake;
    void *waker;
    int fd;
};

struct mn_engine {
    mn_engine_options options;
    char *folder, *name;
    mn_context *context;
    mn_model *model;
    mn_tokenizer *tokenizer;
    mn_chat *chat;
    mn_ask_limits limits;
    mn_session *probe;                 // says what sessions on this model tell
    mn_batch *batch;
    mn_sampler *sampler;
    mn_cache *cache;
    mn_cache_stats told;               // of the cache, in the metrics
    mn_states *states;
    mn_disk cache_disk, states_disk;
    int n_beliefs;
    mn_sequence **active;              // (streams)
    int64_t n_active;
    uint64_t ticks;
    double looked;              // when clients were last asked whether they are there
    bool looks;                 // whether this turn asks
    mn_job *finished;                  // in this turn
    mn_session **stepping;             // (streams), with the tokens they read
    mn_sequence **stepped, **turn;
    int32_t *tokens;
    mn_sequence **reading;             // (streams): whose chunks one pass reads
    const int32_t **chunks;
    int64_t *counts;
    const mn_logits_hearer **hearers;
    pthread_t thread;
    bool started;
    /* under the lock */
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    mn_job *first, *last;              // the queue
    int64_t n_queued;
    bool closing, resting, busy;
    mn_metrics metrics;
};

/* ---- job.c ----------------------------------------------------------------------------------- */

void mn_job_free(mn_job *job);       // nobody owns it any more
void mn_job_wake_up(mn_job *job);    // under the lock: who waits for it hears of it

/* ---- sequence.c ------------------------------------------------------------------------------ */

/* Takes a place: a session, from the cache or a stored state where there is one. */
mn_status mn_sequence_begin(mn_engine *engine, mn_sequence *s);

/* Before the first chunk: takes from the cache what it has of the prompt. */
mn_status mn_sequence_look(mn_engine *engine, mn_sequence *s);

/* Tokens of the next chunk of the prompt, 0 at its end; who hears their logits, NULL: nobody; and
 * after the session was fed with them. */
int64_t mn_sequence_chunk(const mn_engine *engine, const mn_sequence *s);
const mn_logits_hearer *mn_sequence_hearer(const mn_sequence *s);
mn_status mn_sequence_fed(mn_engine *engine, mn_sequence *s, int64_t count);

/* Draws the next token; `*steps` unless the sequence ends with it. Then its text, once, which may
 * end the sequence as well: a GPU steps meanwhile. */
mn_status mn_sequence_draw(mn_engine *engine, mn_sequence *s, bool *steps);
mn_status mn_sequence_write(mn_engine *engine, mn_sequence *s, bool *steps);

/* Before a step of the sequence alone: what may follow the drawn token, at most `most` tokens, is
 * read with it. Never shows in a result (mn_session_expect). */
mn_status mn_sequence_expect(mn_engine *engine, mn_sequence *s, int64_t most);

/* After the step that read what was drawn. */
mn_status mn_sequence_after(mn_engine *engine, mn_sequence *s);

/* Settles the text and stores the state where that was asked for; gives the session back. */
mn_status mn_sequence_end(mn_engine *engine, mn_sequence *s);
void mn_sequence_free(mn_sequence *s);

/* Gives the session and the state it was fed from back. */
void mn_sequence_let_go(mn_engine *engine, mn_sequence *s);

/* ---- reply.c --------------------------------------------------------------------------------- */

/* The whole answer of a job that is done. */
json_t *mn_reply_whole(mn_job *job);

/* What a sequence has to tell since the last event, as server-sent events behind `out`. */
mn_status mn_reply_events(mn_text *out, mn_job *job, mn_sequence *s);

/* The last ones: usage where it was asked for, and the end. */
mn_status mn_reply_last(mn_text *out, mn_job *job);

json_t *mn_reply_error(int http_status, const char *kind, const char *message);
json_t *mn_reply_state(const mn_stored_state *state);

/* The status of HTTP for a failure of the library, and its kind in words. */
int mn_reply_status(mn_status status, const char **kind);

#endif
