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

/* Tokens that a feed computes at once. */
int64_t mn_session_chunk(const mn_session *session);

#endif
