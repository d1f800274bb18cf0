/* slots.h - sessions of a batch on a GPU: their states lie side by side, and one pass takes all.
 *
 * A session that steps in a batch gets a slot and keeps it until something else is done with it;
 * sessions that come and go cost a copy of their state. Logits stay on the GPU until somebody asks
 * for them. Private to the files of this folder. */
#ifndef MN_INFER_SLOTS_H
#define MN_INFER_SLOTS_H

#include "infer/session_internal.h"

/* Context and model must outlive the slots. `dtype` is that of the sessions. */
mn_status mn_slots_create(mn_slots **out, mn_context *context, mn_model *model, mn_dtype dtype);

/* Sessions that have a slot get memory of their own. NULL accepted. */
void mn_slots_destroy(mn_slots *slots);

/* Whether a session may have a slot: it has read something, no layer of the model keeps a cache or
 * goes by position, and variances are not asked for. */
bool mn_slots_serve(const mn_slots *slots, const mn_session *session);

/* Begins a step of n sessions, all there once, which are broken after a failure. Nothing of them
 * may be looked at before mn_slots_wait. */
mn_status mn_slots_start(mn_slots *slots, mn_session *const *sessions, const int32_t *tokens,
                         int64_t n);
mn_status mn_slots_wait(mn_slots *slots);

/* Gives a session memory of its own for what it remembers, and its last logits; or forgets both. A
 * session without a slot is left alone. */
mn_status mn_slots_leave(mn_session *session);
void mn_slots_drop(mn_session *session);

/* The last logits of a session with `in_slot`; NULL when they cannot be had. */
const float *mn_slots_logits(mn_session *session);

/* The likeliest next token below n, where it is known without logits. Steps that follow a first
 * question look for it. */
bool mn_slots_likeliest(int32_t *token, const mn_session *session, int64_t n);

#endif
