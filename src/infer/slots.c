/* slots.c - one token for each of many sessions as one recorded step of a GPU.
 *
 * The pass has as many rows as there are sessions, rounded up to sizes of which there are few: each
 * has a tape and a graph of its own. Rows behind the last session step a state that nobody has. A
 * row's bits do not depend on the others (MN_TAPE_ALIKE), so which slot a session has, and beside
 * whom, never shows. */
#include "infer/slots.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "kernels/decode.h"
#include "model/pass.h"

enum { PLAYS = 64 };    // sizes of steps: four between a power of two and the next
enum { BRANCHES = 2, BRANCHED_ROWS = 32 };

/* What a step may keep of all its layers. Memory that the next layer uses again makes works wait
 * for each other that have nothing to do with each other, so it does only beyond this. */
static const size_t kept_bytes = (size_t)512 << 20;

/* Steps of `rows` rows. Many are two branches, each of half of the rows: products of one, which
 * wait for each other, go beside the states of the other, which take the memory's time. */
typedef struct play {
    int64_t rows;
    mn_tape *tapes[BRANCHES];
    mn_device_graph *graph;    // NULL: not recorded
    bool ran;                  // once, without being recorded
} play;

struct mn_slots {
    mn_context *context;
    mn_model *model;
    mn_dtype dtype;
    bool usable;               // steps repeat, with states of constant size in every layer
    int branches;              // of large steps
    mn_model_state all;        // of all slots; counts of pieces are those of the step at hand
    int64_t *each;             // (layers, MN_STATE_PIECES): numbers of a slot
    size_t row_bytes;          // that a step keeps for each row
    int64_t capacity, last_rows;
    mn_session **of;           // (capacity); NULL: free
    float *logits;             // (capacity, vocabulary), on the GPU
    float *mirror;             // the same on the host, and whether it is of the last step
    bool mirrored;
    int32_t *tokens, *likeliest;    // (capacity), of the host, where the GPU reaches them
    int64_t below, wanted;     // ids among which the likeliest are; and from the next step on
    int n_plays;
    play plays[PLAYS];
};

static mn_device *device_of(const mn_slots *a) {
    return a->context->device;
}

/* The least size of a step that has room for n. */
static int64_t size_of(int64_t n) {
    int64_t step = 1;
    while (n > 8 * step) step *= 2;
    return mn_ceil_div(n, step) * step;
}

/* ---- making ---------------------------------------------------------------------------------- */

/* What pieces layers have, from a pass that is planned. */
static mn_status find_pieces(mn_slots *a) {
    const int32_t token = 0;
    mn_tape *tape = NULL;
    mn_status st = mn_model_state_create(&a->all, a->model);
    if (st == MN_OK) st = mn_tape_create(&tape, a->context, a->dtype);
    if (st != MN_OK) return st;
    for (int i = 0; i < a->all.n_layers; i++) a->all.layers[i].counts = true;
    const mn_model_input in = { .tokens = &token, .B = 1, .T = 1, .state = &a->all };
    mn_tape_start(tape, MN_TAPE_PLAN);
    mn_model_hidden(a->model, tape, &in);
    st = mn_tape_status(tape);
    a->row_bytes = mn_tape_bytes(tape);
    mn_tape_destroy(tape);
    a->usable = st == MN_OK && mn_model_repeats_steps(a->model);
    for (int i = 0; i < a->all.n_layers; i++) {
        mn_layer_state *layer = &a->all.layers[i];
        a->usable &= !layer->by_position;
        layer->counts = false;
        layer->device = device_of(a);
        for (int k = 0; k < layer->n_pieces; k++) {
            a->usable &= layer->pieces[k].width == 0 && layer->pieces[k].count > 0;
            a->each[i * MN_STATE_PIECES + k] = layer->pieces[k].count;
        }
    }
    return st;
}

/* MN_BRANCHES=1: steps are whole. */
static int branches_of(const mn_context *context) {
    const char *asked = getenv("MN_BRANCHES");
    if (asked && strcmp(asked, "1") == 0) return 1;
    return mn_device_facts(context->device)->major >= 9 ? BRANCHES : 1;
}

mn_status mn_slots_create(mn_slots **out, mn_context *context, mn_model *model, mn_dtype dtype) {
    *out = NULL;
    mn_slots *a = calloc(1, sizeof *a);
    if (!a) return mn_fail(MN_ERR_MEMORY, "no memory for a batch");
    a->context = context;
    a->model = model;
    a->dtype = dtype;
    a->branches = branches_of(context);
    const size_t layers = (size_t)mn_model_describe(model)->n_layers;
    a->each = calloc(layers * MN_STATE_PIECES, sizeof *a->each);
    mn_status st = a->each ? mn_model_place(model, context, dtype)
                           : mn_fail(MN_ERR_MEMORY, "no memory for a batch");
    if (st == MN_OK) st = find_pieces(a);
    if (st != MN_OK) {
        mn_slots_destroy(a);
        return st;
    }
    *out = a;
    return MN_OK;
}

static void forget_graphs(mn_slots *a) {
    for (int i = 0; i < a->n_plays; i++) {
        mn_device_graph_destroy(a->plays[i].graph);
        a->plays[i].graph = NULL;
    }
}

static void free_arrays(mn_slots *a) {
    free(a->of);
    mn_device_free(device_of(a), a->logits);
    mn_device_host_free(device_of(a), a->mirror);
    mn_device_host_free(device_of(a), a->tokens);
    mn_device_host_free(device_of(a), a->likeliest);
    a->of = NULL;
    a->logits = a->mirror = NULL;
    a->tokens = a->likeliest = NULL;
    a->mirrored = false;
}

void mn_slots_destroy(mn_slots *a) {
    if (!a) return;
    for (int64_t i = 0; i < a->capacity; i++) {
        mn_session *s = a->of[i];
        if (s && mn_slots_leave(s) != MN_OK) s->broken = true;
    }
    mn_device_synchronize(device_of(a));
    forget_graphs(a);
    for (int i = 0; i < a->n_plays; i++) {
        for (int k = 0; k < BRANCHES; k++) mn_tape_destroy(a->plays[i].tapes[k]);
    }
    mn_model_state_free(&a->all);
    free_arrays(a);
    free(a->each);
    free(a);
}

/* ---- room ------------------------------------------------------------------------------------ */

/* A piece for `capacity` slots with what it had, and zeros behind. */
static mn_status grow_piece(mn_slots *a, mn_state_piece *piece, int64_t each, int64_t capacity) {
    void *memory;
    size_t bytes, before = (size_t)(a->capacity * each) * mn_dtype_bytes(piece->dtype);
    if (!mn_mul_size(&bytes, (size_t)(each * (int64_t)mn_dtype_bytes(piece->dtype)),
                     (size_t)capacity)) {
        return mn_fail(MN_ERR_MEMORY, "states of %lld sessions overflow", (long long)capacity);
    }
    mn_status st = mn_device_pool_allocate(device_of(a), &memory, bytes);
    if (st != MN_OK) return st;
    st = mn_device_fill(device_of(a), memory, 0, bytes);
    if (st == MN_OK && before) st = mn_device_copy(device_of(a), memory, piece->now, before);
    mn_device_pool_free(device_of(a), piece->now);
    piece->now = memory;
    return st;
}

/* The pieces of those that have a slot, where they are now. */
static void point_again(mn_slots *a) {
    for (int64_t slot = 0; slot < a->capacity; slot++) {
        for (int i = 0; a->of[slot] && i < a->all.n_layers; i++) {
            mn_layer_state_view_slot(&a->all.layers[i], &a->of[slot]->state.layers[i], slot);
        }
    }
}

static mn_status new_arrays(mn_slots *a, int64_t capacity) {
    const size_t n = (size_t)capacity, V = (size_t)mn_model_vocabulary(a->model);
    mn_session **of = calloc(n, sizeof *of);
    if (!of) return mn_fail(MN_ERR_MEMORY, "no memory for a batch of %zu sessions", n);
    if (a->capacity) memcpy(of, a->of, (size_t)a->capacity * sizeof *of);
    free_arrays(a);
    a->of = of;
    mn_device *device = device_of(a);
    mn_status st = mn_device_allocate(device, (void **)&a->logits, n * V * sizeof(float));
    if (st == MN_OK) {
        st = mn_device_host_allocate(device, (void **)&a->mirror, n * V * sizeof(float));
    }
    if (st == MN_OK) st = mn_device_host_allocate(device, (void **)&a->tokens, n * sizeof(int32_t));
    if (st == MN_OK) {
        st = mn_device_host_allocate(device, (void **)&a->likeliest, n * sizeof(int32_t));
    }
    return st;
}

static mn_status keep_logits(mn_session *s) {
    if (!s->in_slot) return MN_OK;
    const float *logits = mn_slots_logits(s);
    if (!logits) return mn_fail(MN_ERR_INTERNAL, "the logits of a step cannot be read");
    memcpy(s->state.logits, logits, (size_t)s->state.n_logits * sizeof *logits);
    s->in_slot = false;
    return MN_OK;
}

static mn_status make_room(mn_slots *a, int64_t capacity) {
    if (capacity <= a->capacity) return MN_OK;
    mn_status st = MN_OK;
    for (int64_t i = 0; i < a->capacity && st == MN_OK; i++) {
        if (a->of[i]) st = keep_logits(a->of[i]);
    }
    if (st == MN_OK) st = mn_device_synchronize(device_of(a));
    if (st != MN_OK) return st;
    forget_graphs(a);
    for (int i = 0; i < a->all.n_layers && st == MN_OK; i++) {
        mn_layer_state *layer = &a->all.layers[i];
        for (int k = 0; k < layer->n_pieces && st == MN_OK; k++) {
            st = grow_piece(a, &layer->pieces[k], a->each[i * MN_STATE_PIECES + k], capacity);
        }
    }
    if (st == MN_OK) st = new_arrays(a, capacity);
    if (st != MN_OK) {    // some pieces have moved: nobody has a slot any more
        for (int64_t i = 0; i < a->capacity && a->of; i++) {
            if (a->of[i]) a->of[i]->broken = true;
            if (a->of[i]) mn_slots_drop(a->of[i]);
        }
        a->capacity = 0;
        return st;
    }
    a->capacity = capacity;
    point_again(a);
    return MN_OK;
}

/* ---- coming and going ------------------------------------------------------------------------ */

bool mn_slots_serve(const mn_slots *a, const mn_session *s) {
    if (s->slots == a) return true;    // it has one: nothing of it has changed since
    bool fits = a->usable && s->options.dtype == a->dtype && !s->options.belief;
    for (int i = 0; fits && i < s->state.n_layers; i++) {
        const mn_layer_state *all = &a->all.layers[i], *one = &s->state.layers[i];
        fits = one->n_pieces == all->n_pieces &&
               (one->n_pieces == 0 || mn_layer_state_fits_slot(all, one));
        for (int k = 0; fits && k < one->n_pieces; k++) {
            fits = a->each[i * MN_STATE_PIECES + k] > 0;
        }
    }
    return fits;
}

static mn_status give_slot(mn_slots *a, mn_session *s, int64_t slot) {
    mn_status st = s->slots == a ? MN_OK : mn_slots_leave(s);    // another batch's
    const bool lent = s->slots == a;
    if (!lent) mn_session_forget_graph(s);
    if (lent) a->of[s->slot] = NULL;
    s->in_slot = false;    // the step makes other logits
    for (int i = 0; i < s->state.n_layers && st == MN_OK; i++) {
        st = mn_layer_state_to_slot(&a->all.layers[i], &s->state.layers[i], lent, slot);
    }
    s->slots = a;
    s->slot = slot;
    a->of[slot] = s;
    return st;
}

mn_status mn_slots_leave(mn_session *s) {
    mn_slots *a = s->slots;
    if (!a) return MN_OK;
    mn_status st = keep_logits(s);
    for (int i = 0; i < s->state.n_layers; i++) {
        const mn_status own = mn_layer_state_from_slot(&s->state.layers[i]);
        if (st == MN_OK) st = own;
    }
    a->of[s->slot] = NULL;
    s->slots = NULL;
    s->in_slot = false;
    mn_session_forget_graph(s);
    return st;
}

void mn_slots_drop(mn_session *s) {
    if (!s->slots) return;
    for (int i = 0; i < s->state.n_layers; i++) mn_layer_state_leave_slot(&s->state.layers[i]);
    if (s->slots->of) s->slots->of[s->slot] = NULL;
    s->slots = NULL;
    s->in_slot = false;
}

/* The sessions to the first n slots, others out of the rows of the step. */
static mn_status arrange(mn_slots *a, mn_session *const *sessions, int64_t n, int64_t rows) {
    mn_status st = make_room(a, rows);
    for (int64_t b = 0; b < n && st == MN_OK; b++) sessions[b]->in_batch = true;
    for (int64_t i = 0; i < a->capacity && st == MN_OK; i++) {
        mn_session *s = a->of[i];
        if (s && !s->in_batch) st = i < rows ? mn_slots_leave(s) : keep_logits(s);
    }
    int64_t hole = 0;
    for (int64_t b = 0; b < n && st == MN_OK; b++) {
        mn_session *s = sessions[b];
        if (s->slots == a && s->slot < n) continue;
        while (a->of[hole]) hole++;
        st = give_slot(a, s, hole);
    }
    for (int64_t b = 0; b < n; b++) sessions[b]->in_batch = false;
    return st;
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* The pieces become those of `rows` slots from `begin` on; back with begin = -begin. */
static void move_pieces(mn_slots *a, int64_t begin, int64_t rows) {
    for (int i = 0; i < a->all.n_layers; i++) {
        mn_layer_state *layer = &a->all.layers[i];
        for (int k = 0; k < layer->n_pieces; k++) {
            mn_state_piece *piece = &layer->pieces[k];
            const int64_t each = a->each[i * MN_STATE_PIECES + k];
            const int64_t item = (int64_t)mn_dtype_bytes(piece->dtype);
            piece->count = rows * each;
            piece->now = (char *)piece->now + begin * each * item;
        }
    }
}

/* Rows [begin, begin + rows). */
static mn_status pass(mn_slots *a, mn_tape *tape, int64_t begin, int64_t rows) {
    const int64_t V = mn_model_vocabulary(a->model);
    const bool keeps = (size_t)rows * a->row_bytes <= kept_bytes;
    const mn_model_input in = { .tokens = a->tokens + begin, .B = rows, .T = 1, .state = &a->all,
                                .recompute = keeps ? MN_RECOMPUTE_NONE
                                                   : mn_pass_recompute(a->context) };
    float *to = a->logits + begin * V;
    move_pieces(a, begin, rows);
    mn_tape_start_alike(tape, MN_TAPE_REPEATS | MN_TAPE_DEFER, rows);
    mn_tensor *hidden = mn_model_hidden(a->model, tape, &in);
    mn_tensor *logits = mn_model_logits(a->model, tape, hidden);
    const mn_status st = mn_tape_send(tape, logits, to);
    move_pieces(a, -begin, rows);
    if (st != MN_OK || a->below == 0) return st;
    const int code = mn_decode_likeliest(to, rows, V, a->below, a->likeliest + begin,
                                         mn_device_stream(device_of(a)));
    return mn_device_check(device_of(a), code, "the likeliest tokens");
}

static mn_status pass_all(mn_slots *a, const play *p) {
    const int64_t second = p->tapes[1] ? p->rows / 2 : 0, first = p->rows - second;
    if (second == 0) return pass(a, p->tapes[0], 0, first);
    mn_device *device = device_of(a);
    mn_status st = mn_device_fork(device);
    if (st != MN_OK) return st;
    st = pass(a, p->tapes[1], first, second);
    const mn_status back = mn_device_back(device);
    if (st == MN_OK) st = back;
    if (st == MN_OK) st = pass(a, p->tapes[0], 0, first);
    const mn_status joined = mn_device_join(device);
    return st == MN_OK ? joined : st;
}

static mn_status find_play(play **out, mn_slots *a, int64_t rows) {
    for (int i = 0; i < a->n_plays; i++) {
        *out = &a->plays[i];
        if (a->plays[i].rows == rows) return MN_OK;
    }
    if (a->n_plays == PLAYS) return mn_fail(MN_ERR_UNSUPPORTED, "too many sessions in a batch");
    *out = &a->plays[a->n_plays];
    const int branches = rows >= BRANCHED_ROWS ? a->branches : 1;
    mn_status st = MN_OK;
    for (int k = 0; k < branches && st == MN_OK; k++) {
        if (!(*out)->tapes[k]) st = mn_tape_create(&(*out)->tapes[k], a->context, a->dtype);
    }
    if (st == MN_OK) a->plays[a->n_plays++].rows = rows;
    return st;
}

static mn_status record(mn_slots *a, play *p) {
    mn_status st = mn_device_graph_begin(device_of(a));
    if (st != MN_OK) return st;
    st = pass_all(a, p);
    const mn_status ended = mn_device_graph_end(device_of(a), &p->graph);
    return st == MN_OK ? ended : st;
}

/* The first pass of a size takes what memory such a pass needs, the second one is recorded. */
static mn_status launch(mn_slots *a, play *p) {
    mn_status st = MN_OK;
    if (!p->ran) {
        st = pass_all(a, p);
        p->ran = st == MN_OK;
        return st;
    }
    if (!p->graph) st = record(a, p);
    for (int k = 0; k < BRANCHES && st == MN_OK; k++) {
        if (p->tapes[k]) st = mn_tape_feed(p->tapes[k]);
    }
    return st == MN_OK ? mn_device_graph_launch(p->graph) : st;
}

static mn_status start(mn_slots *a, mn_session *const *sessions, const int32_t *tokens,
                       int64_t n) {
    const int64_t rows = size_of(n);
    play *p = NULL;
    mn_status st = arrange(a, sessions, n, rows);
    if (st == MN_OK) st = find_play(&p, a, rows);
    if (st != MN_OK) return st;
    for (int64_t b = 0; b < n; b++) a->tokens[sessions[b]->slot] = tokens[b];
    for (int64_t i = n; i < rows; i++) a->tokens[i] = 0;
    if (a->wanted != a->below) {
        forget_graphs(a);
        a->below = a->wanted;
    }
    a->mirrored = false;
    a->last_rows = n;
    return launch(a, p);
}

mn_status mn_slots_start(mn_slots *a, mn_session *const *sessions, const int32_t *tokens,
                         int64_t n) {
    mn_status st = MN_OK;
    for (int64_t b = 0; b < n && st == MN_OK; b++) st = mn_session_room(sessions[b], 1, 1);
    if (st != MN_OK) return st;
    st = start(a, sessions, tokens, n);
    for (int64_t b = 0; b < n; b++) {
        mn_session *s = sessions[b];
        s->broken = st != MN_OK;
        s->played = false;
        s->in_slot = st == MN_OK;
        if (st == MN_OK) s->state.position++;
    }
    return st;
}

mn_status mn_slots_wait(mn_slots *a) {
    return mn_device_synchronize(device_of(a));
}

/* ---- what has come of it --------------------------------------------------------------------- */

const float *mn_slots_logits(mn_session *s) {
    mn_slots *a = s->slots;
    const int64_t V = mn_model_vocabulary(a->model);
    if (!a->mirrored) {
        const size_t bytes = (size_t)(a->last_rows * V) * sizeof *a->mirror;
        a->mirrored = mn_device_download(device_of(a), a->mirror, a->logits, bytes) == MN_OK;
    }
    return a->mirrored ? a->mirror + s->slot * V : NULL;
}

bool mn_slots_likeliest(int32_t *token, const mn_session *s, int64_t n) {
    mn_slots *a = s->slots;
    if (!a || !s->in_slot) return false;
    a->wanted = n;
    if (a->below != n || a->likeliest[s->slot] < 0) return false;
    *token = a->likeliest[s->slot];
    return true;
}
