/* session_internal.h - the inside of a session, shared by the files of this folder. */
#ifndef MN_INFER_SESSION_INTERNAL_H
#define MN_INFER_SESSION_INTERNAL_H

#include "infer/session.h"
#include "model/posterior.h"

typedef struct mn_slots mn_slots;

struct mn_session {
    mn_context *context;
    mn_model *model;
    mn_tape *tape;
    mn_session_options options;
    mn_model_state state;
    bool broken;                // a pass failed: some layers are ahead of others
    bool in_batch;              // while a batch checks that no session is in it twice
    int n_beliefs;
    float *variance;            // (n_beliefs, n_variance) and room for one chunk behind it
    int64_t n_variance, variance_room;
    mn_posterior *posterior;    // with `relative`; NULL before it is needed
    mn_sampler *sampler;

    /* Tokens that the next step may read ahead, and those that were: the first `n_agreed` of them
     * have been stepped, and the layers are behind all of them (ahead.c). */
    int32_t *expected, *ahead;
    int64_t n_expected, n_ahead, n_agreed;
    float *ahead_logits;        // behind each of `ahead`

    /* On a GPU one token takes the same launches on the same memory as the one before, unless a
     * layer does something else at each position: they are recorded once and played from then on.
     * Layers with caches, and those that count tokens, are placed: they read the position when they
     * run; the recording ends when a cache grows. */
    enum { MN_REPEATS_UNKNOWN, MN_REPEATS, MN_REPEATS_NOT } repeats;
    bool placed;
    int64_t position;           // that the graph is given
    uint64_t place;             // where the pieces of the state were when it was recorded
    mn_device_graph *graph;     // NULL: none yet
    int steps;                  // passes of one token since the last one of several
    bool recording;
    int32_t *token;             // that the graph reads, and logits that it writes, of n_logits: in
    float *logits;              // host memory that the device reaches by itself
    bool played;                // the last logits are those of the graph

    /* Its place beside others of a batch (slots.h), and whether the last logits are there. */
    mn_slots *slots;            // NULL: it has none
    int64_t slot;
    bool in_slot;
};

/* The memory that the graph is about is used otherwise. */
void mn_session_forget_graph(mn_session *session);

/* Room for the variances of a feed of `count` tokens in passes of `chunk`, and for logits. */
mn_status mn_session_room(mn_session *session, int64_t count, int64_t chunk);

/* Takes back what was read ahead and not stepped. */
void mn_session_settle(mn_session *session);
void mn_session_forget_ahead(mn_session *session);    // the state is about to be another

/* Steps by `token` if that was read ahead, or reads it with what is expected behind it; false: it
 * has to be read by itself. */
bool mn_session_step_ahead(mn_session *session, int32_t token, mn_status *status);

/* Fails for ids outside the vocabulary and for sessions that broke in a feed. */
mn_status mn_session_check_tokens(const mn_session *session, const int32_t *tokens,
                                  int64_t count);

#endif
