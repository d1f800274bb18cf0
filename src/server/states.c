/* states.c - a table of shared snapshots. */
#include "server/states.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

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
    const mn_disk *disk;       // NULL: states have no files
    const mn_model *model;
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

/* The state without its file. */
static void drop(mn_states *states, entry *e) {
    for (int64_t i = 0; i < states->count; i++) {
        if (states->entries[i] != e) continue;
        states->entries[i] = states->entries[--states->count];
        break;
    }
    let_go(states, e);
    free(e);
}

void mn_states_destroy(mn_states *states) {
    if (!states) return;
    while (states->count) drop(states, states->entries[0]);
    free(states->entries);
    free(states);
}

/* ---- files ----------------------------------------------------------------------------------- */

/* Writes the file of a state that is to be this snapshot (NULL: nothing was read). */
static mn_status write_file(const mn_states *states, const mn_stored_state *state,
                            const mn_snapshot *snapshot, const mn_token_list *read) {
    char path[MN_FOLDER_PATH], words[64];
    if (!states->disk) return MN_OK;
    if (!mn_disk_path(path, states->disk, state->id)) {
        return mn_fail(MN_ERR_IO, "%s: the path of its files is too long", states->disk->folder);
    }
    const long long created = (long long)time(NULL) - (long long)(mn_seconds() - state->created);
    snprintf(words, sizeof words, "%s %lld", state->frozen ? "snapshot" : "state", created);
    const mn_state_notes notes = { .tokens = read ? read->ids : NULL,
                                   .n_tokens = read ? read->count : 0, .words = words };
    return mn_snapshot_save(snapshot, states->model, &notes, path);
}

/* What the words of a file say. */
static bool read_words(mn_stored_state *state, const char *words) {
    char kind[16];
    long long created;
    if (!words || sscanf(words, "%15s %lld", kind, &created) != 2) return false;
    state->frozen = strcmp(kind, "snapshot") == 0;
    state->created = mn_seconds() - (double)((long long)time(NULL) - created);
    return state->frozen || strcmp(kind, "state") == 0;
}

/* What a file holds: a state whose content nobody owns yet. */
static mn_status read_file(mn_stored_state *state, shared *content, const mn_states *states,
                           const char *path) {
    char *words = NULL;
    mn_status st = mn_model_state_notes(&content->read.ids, &content->read.count, &words,
                                        states->model, path);
    if (st == MN_OK && !read_words(state, words)) {
        st = mn_fail(MN_ERR_FORMAT, "%s: is no stored state", path);
    }
    free(words);
    if (st == MN_OK) st = mn_snapshot_load(&content->snapshot, states->model, path);
    if (st != MN_OK) return st;
    state->position = mn_snapshot_position(content->snapshot);
    if (state->position == 0) return MN_OK;
    state->snapshot = content->snapshot;
    state->read = content->read.ids ? &content->read : NULL;
    state->bytes = mn_snapshot_bytes(content->snapshot) +
                   (size_t)content->read.count * sizeof *content->read.ids;
    return MN_OK;
}

/* The state of a file: what cannot be read, or has no room, stays where it is. */
static void find_file(void *context, const char *id, const char *path) {
    mn_states *states = context;
    entry *e = calloc(1, sizeof *e);
    shared *content = calloc(1, sizeof *content);
    bool fits = e && content && states->count < states->most;
    fits = fits && read_file(&e->state, content, states, path) == MN_OK;
    fits = fits && states->bytes + e->state.bytes <= states->most_bytes;
    if (fits) {
        snprintf(e->state.id, sizeof e->state.id, "%s", id);
        states->bytes += e->state.bytes;
        states->entries[states->count++] = e;
    }
    if (fits && e->state.snapshot) {
        content->owners = 1;
        e->content = content;
        return;
    }
    if (content) mn_snapshot_destroy(content->snapshot);
    if (content) mn_token_list_free(&content->read);
    free(content);
    if (!fits) free(e);
}

mn_status mn_states_keep(mn_states *states, const mn_disk *disk, const mn_model *model) {
    states->disk = disk;
    states->model = model;
    return mn_disk_each(disk, find_file, states);
}

/* ---- use ------------------------------------------------------------------------------------- */

/* The state shares what `from` has. */
static void share(mn_states *states, entry *e, const entry *source) {
    let_go(states, e);
    e->content = source->content;
    if (e->content) e->content->owners++;
    e->state.snapshot = source->state.snapshot;
    e->state.read = source->state.read;
    e->state.position = source->state.position;
    e->state.bytes = source->state.bytes;
}

mn_status mn_states_set(mn_states *states, mn_stored_state *state, const mn_stored_state *from) {
    if (state == from) return MN_OK;
    const mn_status st = write_file(states, state, from->snapshot, from->read);
    if (st == MN_OK) share(states, (entry *)state, (const entry *)from);
    return st;
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
    mn_status st = mn_disk_new_id(e->state.id);
    e->state.frozen = frozen;
    e->state.created = mn_seconds();
    if (st == MN_OK) st = write_file(states, &e->state, from ? from->snapshot : NULL,
                                     from ? from->read : NULL);
    if (st != MN_OK) {
        free(e);
        return st;
    }
    if (from) share(states, e, (const entry *)from);
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
    mn_status st = mn_session_snapshot(&content->snapshot, session);
    if (st == MN_OK) st = write_file(states, state, content->snapshot, known ? read : NULL);
    if (st != MN_OK) {
        mn_snapshot_destroy(content->snapshot);
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
    char path[MN_FOLDER_PATH];
    if (states->disk && mn_disk_path(path, states->disk, state->id)) unlink(path);
    drop(states, (entry *)state);
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
