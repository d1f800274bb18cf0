/* session.h - one sequence that a model reads: feed, logits, belief, snapshot, fork, files.
 *
 * The interface is the part "sessions" of mneme.h; here is only what the program needs beyond it.
 * Built on mn_model_state (what layers remember) and the forward pass of model.h. */
#ifndef MN_INFER_SESSION_H
#define MN_INFER_SESSION_H

#include "infer/sample.h"
#include "model/model.h"

/* As mn_session_sample, among the ids below `n` only: models have rows that no token uses. */
mn_status mn_session_sample_below(int32_t *token, mn_session *session, const mn_sampling *how,
                                  const int32_t *recent, int64_t n_recent, int64_t n);

/* Hears the logits behind token t of a feed, mn_model_vocabulary of them, valid during the call; a
 * failure ends the feed. */
typedef struct mn_logits_hearer {
    mn_status (*hear)(void *context, int64_t t, const float *logits);
    void *context;
} mn_logits_hearer;

/* mn_session_feed that tells the logits behind every token. */
mn_status mn_session_feed_heard(mn_session *session, const int32_t *tokens, int64_t count,
                                const mn_logits_hearer *hearer);

/* mn_batch_feed that tells the logits behind every token to hearers[b] of session b; any of them,
 * or all, may be NULL. */
mn_status mn_batch_feed_heard(mn_batch *batch, mn_session *const *sessions,
                              const int32_t *const *tokens, const int64_t *counts, int64_t n,
                              const mn_logits_hearer *const *hearers);

/* Snapshots that are not needed soon: to the host's memory, or to a file, which goes with the
 * snapshot unless it is to stay. Restoring one reads it from there, with the same bits, and leaves
 * it. After a failure it is where it was. */
bool mn_snapshot_is_away(const mn_snapshot *snapshot, const mn_context *context);
mn_status mn_snapshot_to_host(mn_snapshot *snapshot);
mn_status mn_snapshot_to_file(mn_snapshot *snapshot, const mn_state_notes *notes,
                              const char *path);
void mn_snapshot_stay(mn_snapshot *snapshot);

/* A copy in a file; NULL: of a session that has read nothing. And the snapshot of such a file: in
 * it, or in the host's memory. */
mn_status mn_snapshot_save(const mn_snapshot *snapshot, const mn_model *model,
                           const mn_state_notes *notes, const char *path);
mn_status mn_snapshot_open(mn_snapshot **out, const mn_model *model, size_t bytes,
                           const char *path);
mn_status mn_snapshot_load(mn_snapshot **out, const mn_model *model, const char *path);
int64_t mn_snapshot_position(const mn_snapshot *snapshot);

/* mn_batch_step in two: the GPU works between them, and nothing of sessions may be looked at. */
mn_status mn_batch_begin(mn_batch *batch, mn_session *const *sessions, const int32_t *tokens,
                         int64_t n);
mn_status mn_batch_wait(mn_batch *batch);

/* The likeliest next token among the ids below n, where a batch knows it without logits. */
bool mn_session_likeliest(int32_t *token, const mn_session *session, int64_t n);

/* Whether the next step may find its token read already, and whether it would find `token`. */
bool mn_session_is_ahead(const mn_session *session);
bool mn_session_finds(const mn_session *session, int32_t token);

/* What followed the last tokens when they, as long a run of them as possible, were there before: up
 * to `most` tokens. How many; 0: none of them was. */
int64_t mn_guess_ngram(int32_t *out, int64_t most, const int32_t *seen, int64_t count);

/* Tokens that a feed computes at once. */
int64_t mn_session_chunk(const mn_session *session);

#endif
