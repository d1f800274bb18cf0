/* kalman.c - rows of Kalman attention, from what kla layers tell of a pass. */
#include "model/kalman.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

/* ---- what is heard --------------------------------------------------------------------------- */

enum { V_, PREC, K_, Q_, Y_, PER_TOKEN, A_ = PER_TOKEN, P_, HEARD };

static const char *const heard_names[HEARD] = {
    [V_] = "v", [PREC] = "prec", [K_] = "k", [Q_] = "q", [Y_] = "y", [A_] = "a", [P_] = "p",
};

typedef struct heard {
    float *at;
    int64_t count, room;
} heard;

typedef struct kla_layer {
    int index;                   // in the model
    int64_t M, N;                // channels, slots
    heard heard[HEARD];          // v, prec, y (T,M); k, q (T,N); a, p (M,N)
    double *lam, *eta;           // (M,N) before the first token; NULL: the prior
} kla_layer;

struct mn_kalman {
    int n_layers;
    kla_layer *layers;
    mn_tape *tape;
    mn_tap tap;
    mn_status st;
};

static mn_status keep(heard *h, mn_tape *tape, const mn_tensor *x, bool append) {
    const int64_t n = x->shape[0] * x->shape[1] * x->shape[2] * x->shape[3];
    const int64_t from = append ? h->count : 0;
    if (from + n > h->room) {
        const int64_t room = append ? 2 * (from + n) : n;
        float *more = realloc(h->at, (size_t)room * sizeof *more);
        if (!more) return mn_fail(MN_ERR_MEMORY, "no memory for what a layer tells");
        h->at = more;
        h->room = room;
    }
    h->count = from + n;
    return mn_tape_read(tape, x, h->at + from);
}

static void hear(void *context, int layer, const char *name, const mn_tensor *x) {
    mn_kalman *kalman = context;
    int l = 0, i = 0;
    while (l < kalman->n_layers && kalman->layers[l].index != layer) l++;
    while (i < HEARD && strcmp(heard_names[i], name) != 0) i++;
    if (l == kalman->n_layers || i == HEARD || kalman->st != MN_OK) return;
    kalman->st = keep(&kalman->layers[l].heard[i], kalman->tape, x, i < PER_TOKEN);
}

/* ---- which layers ---------------------------------------------------------------------------- */

mn_status mn_kalman_create(mn_kalman **out, const mn_model *model) {
    const int n = mn_model_describe(model)->n_layers;
    mn_kalman *kalman = calloc(1, sizeof *kalman);
    *out = NULL;
    if (kalman) kalman->layers = calloc((size_t)n + 1, sizeof *kalman->layers);
    if (!kalman || !kalman->layers) {
        free(kalman);
        return mn_fail(MN_ERR_MEMORY, "no memory for the rows of %d layers", n);
    }
    for (int i = 0; i < n; i++) {
        const mn_layer *layer = mn_model_layer(model, i);
        if (layer->kind != MN_LAYER_kla || layer->config.decode_from_prior) continue;
        kalman->layers[kalman->n_layers++] = (kla_layer){
            .index = i, .M = MN_SIZE(&layer->sizes, 'V'), .N = MN_SIZE(&layer->sizes, 'K') };
    }
    kalman->tap = (mn_tap){ hear, kalman };
    *out = kalman;
    return MN_OK;
}

static void forget(kla_layer *l) {
    for (int i = 0; i < HEARD; i++) l->heard[i].count = 0;
    free(l->lam);
    free(l->eta);
    l->lam = l->eta = NULL;
}

void mn_kalman_destroy(mn_kalman *kalman) {
    if (!kalman) return;
    for (int l = 0; l < kalman->n_layers; l++) {
        forget(&kalman->layers[l]);
        for (int i = 0; i < HEARD; i++) free(kalman->layers[l].heard[i].at);
    }
    free(kalman->layers);
    free(kalman);
}

int mn_kalman_layers(const mn_kalman *kalman) {
    return kalman->n_layers;
}

int mn_kalman_layer(const mn_kalman *kalman, int i) {
    return kalman->layers[i].index;
}

/* ---- where it begins ------------------------------------------------------------------------- */

static mn_status copy_piece(double **to, const kla_layer *l, mn_layer_state *state,
                            const char *name) {
    const mn_state_piece *piece = mn_state_find(state, name);
    const int64_t count = l->M * l->N;
    if (!piece) return MN_OK;         // nothing was read yet
    if (piece->count != count) {
        return mn_fail(MN_ERR_ARGUMENT, "layer %d: the state is not of one sequence", l->index);
    }
    *to = malloc((size_t)count * sizeof **to);
    if (!*to) return mn_fail(MN_ERR_MEMORY, "no memory for the belief of a layer");
    for (int64_t i = 0; i < count; i++) {
        (*to)[i] = piece->dtype == MN_F64 ? ((const double *)piece->now)[i]
                                          : (double)((const float *)piece->now)[i];
    }
    return MN_OK;
}

mn_status mn_kalman_from(mn_kalman *kalman, const mn_model_state *state) {
    mn_status st = MN_OK;
    kalman->st = MN_OK;
    for (int l = 0; l < kalman->n_layers && st == MN_OK; l++) {
        kla_layer *layer = &kalman->layers[l];
        forget(layer);
        if (!state) continue;
        mn_layer_state *own = &state->layers[layer->index], here = { 0 };
        if (own->device) st = mn_layer_state_fetch(&here, own);
        mn_layer_state *from = own->device ? &here : own;
        if (st == MN_OK) st = copy_piece(&layer->lam, layer, from, "precision");
        if (st == MN_OK) st = copy_piece(&layer->eta, layer, from, "information");
        if (own->device) mn_layer_state_free(&here);
    }
    return st;
}

const mn_tap *mn_kalman_tap(mn_kalman *kalman, mn_tape *tape) {
    kalman->tape = tape;
    return &kalman->tap;
}

mn_status mn_kalman_status(const mn_kalman *kalman) {
    mn_status st = kalman->st;
    for (int l = 0; l < kalman->n_layers && st == MN_OK; l++) {
        const kla_layer *layer = &kalman->layers[l];
        const int64_t T = layer->heard[V_].count / layer->M;
        bool whole = true;
        for (int i = 0; i < HEARD; i++) {
            const int64_t width = i == K_ || i == Q_ ? layer->N : layer->M;
            whole &= layer->heard[i].count == (i < PER_TOKEN ? T * width : layer->M * layer->N);
        }
        if (!whole) st = mn_fail(MN_ERR_INTERNAL, "layer %d tells of another pass", layer->index);
    }
    return st;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* Row `t` of what was heard. */
static const float *row_of(const kla_layer *l, int which, int64_t t, int64_t width) {
    return l->heard[which].at + t * width;
}

/* f_s and at the end lam_t of one cell: channel c, slot n. */
static double filter(double *f, const kla_layer *l, int64_t c, int64_t n, int64_t t) {
    const int64_t cell = c * l->N + n;
    const double a = l->heard[A_].at[cell], p = l->heard[P_].at[cell];
    double lam = l->lam ? l->lam[cell] : 1.0;
    for (int64_t s = 0; s <= t; s++) {
        const double k = row_of(l, K_, s, l->N)[n], d = fmax(a * a + p * lam, 1e-12);
        lam = lam / d + k * k * row_of(l, PREC, s, l->M)[c];
        f[s] = a / d;
    }
    return lam;
}

/* Row t of channel c into m, and what was there before; `f` has room for t + 1 numbers. */
static double channel_row(double *m, double *f, const kla_layer *l, int64_t c, int64_t t) {
    double rest = 0.0;
    for (int64_t s = 0; s <= t; s++) m[s] = 0.0;
    for (int64_t n = 0; n < l->N; n++) {
        const double lam = filter(f, l, c, n, t);
        double reach = row_of(l, Q_, t, l->N)[n] / lam;
        for (int64_t s = t; s >= 0; s--) {
            m[s] += reach * row_of(l, K_, s, l->N)[n] * row_of(l, PREC, s, l->M)[c];
            reach *= f[s];
        }
        if (l->eta) rest += reach * l->eta[c * l->N + n];
    }
    return rest;
}

mn_status mn_kalman_read(mn_kalman_row *row, const mn_kalman *kalman, int i, int64_t t) {
    const kla_layer *l = &kalman->layers[i];
    double *m = malloc((size_t)(t + 1) * sizeof *m), *f = malloc((size_t)(t + 1) * sizeof *f);
    double error = 0.0, largest = 1e-30, rests = 0.0, reads = 1e-30;
    const bool room = m && f;
    for (int64_t s = 0; s <= t; s++) row->weights[s] = 0.0;
    for (int64_t c = 0; room && c < l->M; c++) {
        const double rest = channel_row(m, f, l, c, t), y = row_of(l, Y_, t, l->M)[c];
        double sum = rest;
        for (int64_t s = 0; s <= t; s++) {
            sum += m[s] * row_of(l, V_, s, l->M)[c];
            row->weights[s] += fabs(m[s]) / (double)l->M;
        }
        error = fmax(error, fabs(sum - y));
        largest = fmax(largest, fabs(y));
        rests += fabs(rest);
        reads += fabs(y);
    }
    row->before = rests / reads;
    row->digits = -log10(fmax(error / largest, 1e-17));
    free(m);
    free(f);
    return room ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a row of %lld tokens",
                                  (long long)(t + 1));
}
