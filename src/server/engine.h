/* engine.h - the model behind the server: a queue of jobs and the one thread that runs them.
 *
 * Sequences of all jobs step together (mn_batch_step), join and leave at token borders, and are
 * read in chunks between steps. Chunks begin at multiples of the chunk's length, so that a text
 * depends on its request alone: not on the company, and not on what the state cache held. */
#ifndef MN_SERVER_ENGINE_H
#define MN_SERVER_ENGINE_H

#include "io/text.h"
#include "server/metrics.h"
#include "server/request.h"

typedef struct mn_engine mn_engine;
typedef struct mn_job mn_job;

typedef struct mn_engine_options {
    const char *model;             // folder
    const char *name;              // as /v1/models tells it; NULL: the folder's
    int n_threads;
    const char *device;            // NULL: the CPU
    mn_dtype dtype;                // of what a GPU computes
    int64_t streams;               // sequences at once
    int64_t queue;                 // requests that wait
    int64_t chunk;                 // tokens of a prompt between two steps
    int64_t context;               // tokens of a sequence
    int64_t states;                // stored, at most
    int64_t draft;                 // tokens guessed for a sequence by itself, at most; 0: none
    int64_t patience;              // seconds that a client may leave its events unread
    int64_t seconds;               // of a request at most, from its start; 0: no bound
    size_t cache_bytes, state_bytes;
    /* Of the state cache beyond cache_bytes: in the host's memory, where that is another one, and
     * in files of a folder. 0 and NULL: none. */
    size_t cache_host_bytes, cache_disk_bytes;
    const char *cache_disk;
    const char *states_disk;       // folder of the files of stored states; NULL: they have none
} mn_engine_options;

/* Defaults for a machine of a few cores. */
void mn_engine_defaults(mn_engine_options *options);

mn_status mn_engine_open(mn_engine **out, const mn_engine_options *options);

/* Finishes what runs for at most `seconds`, gives up the rest, and frees. Jobs have to be released
 * before, or cancelled and released by other threads meanwhile. NULL accepted. */
void mn_engine_drain(mn_engine *engine, double seconds);
void mn_engine_close(mn_engine *engine);

const mn_ask_limits *mn_engine_limits(const mn_engine *engine);
const char *mn_engine_name(const mn_engine *engine);
const char *mn_engine_folder(const mn_engine *engine);
mn_metrics mn_engine_metrics(mn_engine *engine);

/* Adds what another engine counted, without what of it was added before. */
void mn_engine_count(mn_engine *engine, const mn_metrics *more, const mn_metrics *less);

/* Counts an answer in the metrics. */
void mn_engine_answered(mn_engine *engine, int http_status);

/* ---- jobs ------------------------------------------------------------------------------------ */

typedef enum mn_job_kind {
    MN_JOB_COMPLETION,             // of `ask`
    MN_JOB_FEED,                   // reads the prompt of `ask` into a stored state
    MN_JOB_BELIEF,                 // tells the variances of reading the prompt
    MN_JOB_CALL,                   // runs `call` on the engine's thread
} mn_job_kind;

/* What a call leaves as answer: JSON in `out`, or a failure that mn_job_fail was told. */
typedef void (*mn_job_call)(mn_job *job, mn_engine *engine);

/* Called under the engine's lock whenever there is more to send, or the end. */
typedef void (*mn_job_wake)(void *context);

/* Takes over `ask`. `into` is the id of the state that a feed goes on with, "" for a new one. */
mn_status mn_job_create(mn_job **out, mn_engine *engine, mn_job_kind kind, mn_ask *ask,
                        const char *into);
mn_status mn_job_create_call(mn_job **out, mn_engine *engine, mn_job_call call, void *data);
void *mn_job_data(const mn_job *job);

/* `fd` of the client's connection, -1: none. MN_ERR_MEMORY: the queue is full; the job is then
 * still the caller's. */
mn_status mn_job_start(mn_job *job, mn_job_wake wake, void *context, int fd);

/* The caller's last use; a job that still runs is cancelled. */
void mn_job_release(mn_job *job);

/* Whether mn_job_take would give anything, or the job is done. Else `*waits` is set for the next
 * wake. */
bool mn_job_ready(mn_job *job);
bool mn_job_is_done(const mn_job *job);

/* Takes up to `size` bytes of what is there to send; 0 with *done at the end. */
size_t mn_job_take(mn_job *job, char *out, size_t size, bool *done);

/* After the end: the status of HTTP, and all of the answer that was not taken. */
int mn_job_status(const mn_job *job);
const char *mn_job_body(const mn_job *job, size_t *size);

/* The lock that mn_job_ready and the wake are under: to fall asleep without missing a wake. */
void mn_engine_lock(mn_engine *engine);
void mn_engine_unlock(mn_engine *engine);

/* ---- for calls ------------------------------------------------------------------------------- */

void mn_job_fail(mn_job *job, int http_status, const char *kind, const char *message);
void mn_job_answer(mn_job *job, int http_status, json_t *body);    // takes the body over

#endif
