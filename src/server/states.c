/* states.c - a table of shared snapshots. */
#include "server/states.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/status.h"

/* A snapshot and how many states are it. */
typedef struct shared {
    mn_snapshot *snapshot;
    mn_token_list read;        // empty: nobody knows
    int64_t owners;
} shared;

typedef struct entry {
    mn_stored_state state;     // first: a state is its entry
    shared *content;
} entry;

struct mn_states {
    entry **entries;
    int64_t count, most;
    size_t bytes, most_bytes;
};

mn_status mn_states_create(mn_states **out, int64_t most, size_t most_bytes) {
    *out = calloc(1, sizeof **out);
    if (*out) (*out)->entries = calloc((size_t)most + 1, sizeof *(*out)->entries);
    if (!*out || !(*out)->entries) {
        free(*out);
        *out = NULL;
        return mn_fail(MN_ERR_MEMORY, "no memory for a table of states");
    }
    (*out)->most = most;
    (*out)->most_bytes = most_bytes;
    return MN_OK;
}

static void let_go(mn_states *states, entry *e) {
    shared *content = e->content;
    if (content && --content->owners == 0) {
        states->bytes -= e->state.bytes;
        mn_snapshot_destroy(content->snapshot);
        mn_token_list_free(&content->read);
        free(content);
    }
    e->content = NULL;
    e->state.snapshot = NULL;
    e->state.read = NULL;
}

void mn_states_destroy(mn_states *states) {
    if (!states) return;
    while (states->count) mn_states_delete(states, &states->entries[0]->state);
    free(states->entries);
    free(states);
}

void mn_states_set(mn_states *states, mn_stored_state *state, const mn_stored_state *from) {
    entry *e = (entry *)state;
    const entry *source = (const entry *)from;
    if (e == source) return;
    let_go(states, e);
    e->content = source->content;
    if (e->content) e->content->owners++;
    state->snapshot = from->snapshot;
    state->read = from->read;
    state->position = from->position;
    state->bytes = from->bytes;
}

static mn_status new_id(char id[MN_STATE_ID]) {
    uint8_t bytes[(MN_STATE_ID - 1) / 2];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes) {
        return mn_fail(MN_ERR_IO, "the system gives no random numbers for the id of a state");
    }
    for (size_t i = 0; i < sizeof bytes; i++) snprintf(id + 2 * i, 3, "%02x", bytes[i]);
    return MN_OK;
}

mn_status mn_states_add(mn_stored_state **out, mn_states *states, const mn_stored_state *from,
                        bool frozen) {
    *out = NULL;
    if (states->count == states->most) {
        return mn_fail(MN_ERR_MEMORY, "%" PRId64 " states are stored, which is all there may be: "
                       "delete some", states->count);
    }
    entry *e = calloc(1, sizeof *e);
    if (!e) return mn_fail(MN_ERR_MEMORY, "no memory for a state");
    const mn_status st = new_id(e->state.id);
    if (st != MN_OK) {
        free(e);
        return st;
    }
    e->state.frozen = frozen;
    e->state.created = mn_seconds();
    if (from) mn_states_set(states, &e->state, from);
    states->entries[states->count++] = e;
    *out = &e->state;
    return MN_OK;
}

mn_stored_state *mn_states_find(mn_states *states, const char *id) {
    for (int64_t i = 0; i < states->count; i++) {
        if (strcmp(states->entries[i]->state.id, id) == 0) return &states->entries[i]->state;
    }
    return NULL;
}

mn_status mn_states_take(mn_states *states, mn_stored_state *state, const mn_session *session,
                         mn_token_list *read) {
    const bool known = read->count == mn_session_position(session);
    const size_t ids = known ? (size_t)read->count * sizeof *read->ids : 0;
    const size_t bytes = mn_session_bytes(session) + ids;
    if (states->bytes + bytes > states->most_bytes) {
        return mn_fail(MN_ERR_MEMORY, "stored states hold %zu bytes and may hold %zu: delete some",
                       states->bytes, states->most_bytes);
    }
    shared *content = calloc(1, sizeof *content);
    if (!content) return mn_fail(MN_ERR_MEMORY, "no memory for a state");
    const mn_status st = mn_session_snapshot(&content->snapshot, session);
    if (st != MN_OK) {
        free(content);
        return st;
    }
    entry *e = (entry *)state;
    let_go(states, e);
    content->owners = 1;
    if (known) {
        content->read = *read;
        *read = (mn_token_list){ 0 };
    }
    e->content = content;
    state->snapshot = content->snapshot;
    state->read = known ? &content->read : NULL;
    state->position = mn_session_position(session);
    state->bytes = mn_snapshot_bytes(content->snapshot) + ids;
    states->bytes += state->bytes;
    return MN_OK;
}

mn_status mn_states_load(mn_stored_state **out, mn_states *states, mn_session *session,
                         const char *path) {
    mn_stored_state *state = NULL;
    mn_token_list nobody_knows = { 0 };
    mn_status st = mn_session_load(session, path);
    if (st == MN_OK && !mn_session_logits(session)) {
        st = mn_fail(MN_ERR_FORMAT, "%s: the state has no logits", path);
    }
    if (st == MN_OK) st = mn_states_add(&state, states, NULL, false);
    if (st == MN_OK) st = mn_states_take(states, state, session, &nobody_knows);
    if (st == MN_OK) st = mn_session_step(session, 0);
    if (st != MN_OK && state) mn_states_delete(states, state);
    *out = st == MN_OK ? state : NULL;
    return st;
}

void mn_states_delete(mn_states *states, mn_stored_state *state) {
    entry *e = (entry *)state;
    for (int64_t i = 0; i < states->count; i++) {
        if (states->entries[i] != e) continue;
        states->entries[i] = states->entries[--states->count];
        break;
    }
    let_go(states, e);
    free(e);
}

int64_t mn_states_count(const mn_states *states) {
    return states->count;
}

size_t mn_states_bytes(const mn_states *states) {
    return states->bytes;
}

const mn_stored_state *mn_states_at(const mn_states *states, int64_t i) {
    return &states->entries[i]->state;
}
