/* states.h - states that clients keep on the server: by id, shared where they are the same. Only
 * the thread of the scheduler touches them. */
#ifndef MN_SERVER_STATES_H
#define MN_SERVER_STATES_H

#include "infer/session.h"
#include "server/disk.h"
#include "server/request.h"

typedef struct mn_states mn_states;

typedef struct mn_stored_state {
    char id[MN_STATE_ID];
    bool frozen;               // a snapshot: it can be forked and restored, not fed
    bool busy;                 // a feed is on its way
    double created;            // seconds of the monotonic clock
    int64_t position;
    size_t bytes;
    mn_snapshot *snapshot;     // NULL: nothing was read yet
    const mn_token_list *read; // the tokens, `position` of them; NULL: nobody knows (an upload)
} mn_stored_state;

mn_status mn_states_create(mn_states **out, int64_t most, size_t most_bytes);
void mn_states_destroy(mn_states *states);    // NULL accepted

/* From now on every state has a file as well, from which it is found again: those that are there
 * are. Disk and model must outlive the table. */
mn_status mn_states_keep(mn_states *states, const mn_disk *disk, const mn_model *model);

/* A new state that holds nothing, or what `from` holds. MN_ERR_MEMORY beyond the bounds. */
mn_status mn_states_add(mn_stored_state **out, mn_states *states, const mn_stored_state *from,
                        bool frozen);

/* NULL: there is none of that id. */
mn_stored_state *mn_states_find(mn_states *states, const char *id);

/* What a session remembers becomes the state's; on failure the state is as it was. `read` are the
 * tokens it has read, whose memory goes over to the state; others than its position says: nobody
 * knows them. */
mn_status mn_states_take(mn_states *states, mn_stored_state *state, const mn_session *session,
                         mn_token_list *read);

/* A new state from a file of mn_session_save. `session` is the caller's, to load it and to see that
 * a token can be read behind it: what is stored fails no step that it takes part in with others. */
mn_status mn_states_load(mn_stored_state **out, mn_states *states, mn_session *session,
                         const char *path);

/* The state becomes what `from` is; on failure it is as it was. */
mn_status mn_states_set(mn_states *states, mn_stored_state *state, const mn_stored_state *from);

void mn_states_delete(mn_states *states, mn_stored_state *state);

int64_t mn_states_count(const mn_states *states);
size_t mn_states_bytes(const mn_states *states);
const mn_stored_state *mn_states_at(const mn_states *states, int64_t i);

#endif
