/* look_maps.c - a kla layer as attention: how much of each value is in each output, and what the
 * layer knows.
 *
 *   lam_t = lam_(t-1) / d_t + k_t^2 prec_t      d_t = a^2 + p lam_(t-1)      f_t = a / d_t
 *   M_ts  = sum_n q_tn / lam_tn (f_(s+1) ... f_t)_n k_sn prec_s              y_t = sum_s M_ts v_s
 *
 * per channel, n over slots. Options: layer (0), example (0), channels (4: those with most weight).
 * Adds "maps": places with their tokens and targets, the matrices, the variance read (yvar, mean
 * over channels) and that of the cells (1 / lam), and
 *
 *   digits    to which y_t and sum_s M_ts v_s agree, over all channels
 *   aimed     part of |M_ts| on places that hold the answer, over places that ask: their token, or
 *             one of the three before that the convolution brings there
 *   best      the same of the channel that aims best
 *   by_chance the same if all places before weighed the same */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/looks/look.h"

enum { MOST_CHANNELS = 16, MOST_PLACES = 4096 };

typedef struct options {
    int64_t layer, example, channels;
} options;

static mn_status read_options(options *o, const mn_json *at) {
    static const char *const keys[] = { "layer", "example", "channels" };
    *o = (options){ .channels = 4 };
    mn_status st = mn_json_expect_object(at);
    if (st == MN_OK) st = mn_json_unknown_key(at, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_opt_i64(&o->layer, at, "layer");
    if (st == MN_OK) st = mn_json_opt_i64(&o->example, at, "example");
    if (st == MN_OK) st = mn_json_opt_i64(&o->channels, at, "channels");
    if (st != MN_OK) return st;
    const bool fine = o->layer >= 0 && o->example >= 0 && o->channels >= 1 &&
                      o->channels <= MOST_CHANNELS;
    return fine ? MN_OK : mn_json_fail(at, "layer and example count from 0, channels from 1 to %d",
                                       MOST_CHANNELS);
}

static mn_status check(const mn_json *at) {
    options o;
    return read_options(&o, at);
}

/* ---- hearing --------------------------------------------------------------------------------- */

enum { HEARD = 7 };
static const char *const heard_names[HEARD] = { "v", "prec", "k", "q", "a", "p", "y" };
enum { V_, PREC, K_, Q_, A_, P_, Y_ };

/* What the layer told, as doubles: v, prec, y (T,M); k, q (T,N); a, p (M,N). */
typedef struct heard {
    int layer;
    double *at[HEARD];
    int64_t count[HEARD], rows[HEARD], width[HEARD];
    bool full;                       // memory ran out
} heard;

static void hear(void *context, int layer, const char *name, const mn_tensor *x) {
    heard *h = context;
    int i = 0;
    while (i < HEARD && strcmp(heard_names[i], name) != 0) i++;
    if (i == HEARD || layer != h->layer || h->at[i]) return;
    const int64_t rows = x->shape[1] * x->shape[2], width = x->shape[3];
    h->at[i] = calloc((size_t)(rows * width), sizeof *h->at[i]);
    if (!h->at[i]) {
        h->full = true;
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t from = r / x->shape[2] * x->stride[1] + r % x->shape[2] * x->stride[2];
        for (int64_t c = 0; c < width; c++) {
            h->at[i][r * width + c] = ((const float *)x->data)[from + c];
        }
    }
    h->count[i] = rows * width;
    h->rows[i] = rows;
    h->width[i] = width;
}

static mn_status listen_to(heard *h, const mn_look_at *at, const int32_t *tokens, int64_t T) {
    const mn_tap tap = { hear, h };
    const mn_model_input in = { .tokens = tokens, .B = 1, .T = T, .tap = &tap };
    mn_tape *tape = NULL;
    mn_status st = mn_tape_create(&tape, at->context, MN_F32);
    if (st == MN_OK) {
        mn_tape_start(tape, MN_TAPE_FORWARD);
        mn_model_hidden(at->model, tape, &in);
        st = mn_tape_status(tape);
    }
    mn_tape_destroy(tape);
    if (st != MN_OK) return st;
    if (h->full) return mn_fail(MN_ERR_MEMORY, "no memory for what a layer tells");
    for (int i = 0; i < HEARD; i++) {
        if (!h->at[i]) {
            return mn_fail(MN_ERR_ARGUMENT, "maps are of kla; layer %d is something else",
                           h->layer);
        }
    }
    return MN_OK;
}

/* ---- the matrices ---------------------------------------------------------------------------- */

typedef struct maps {
    int64_t T, M, N;
    double *map, *forget, *lam;      // (T,T) of the channel at hand; (T,N) each
    double *read, *cell;             // (T): variances, means over channels
    double *weight;                  // (M): all of |M_ts| of a channel
    double error, largest, aimed, best, by_chance;
    int64_t asking;
} maps;

/* lam and f of one channel, and its variances. */
static void filter(maps *m, const heard *h, int64_t channel) {
    const double share = 1.0 / (double)m->M;
    for (int64_t n = 0; n < m->N; n++) {
        const double a = h->at[A_][channel * m->N + n], p = h->at[P_][channel * m->N + n];
        double lam = 1.0;
        for (int64_t t = 0; t < m->T; t++) {
            const double k = h->at[K_][t * m->N + n], q = h->at[Q_][t * m->N + n];
            const double d = a * a + p * lam;
            lam = lam / d + k * k * h->at[PREC][t * m->M + channel];
            m->lam[t * m->N + n] = lam;
            m->forget[t * m->N + n] = a / d;
            m->read[t] += share * q * q / lam;
            m->cell[t] += share / (lam * (double)m->N);
        }
    }
}

static void fill_map(maps *m, const heard *h, int64_t channel) {
    filter(m, h, channel);
    for (int64_t s = 0; s < m->T; s++) {
        for (int64_t t = 0; t < m->T; t++) m->map[t * m->T + s] = 0.0;
        for (int64_t n = 0; n < m->N; n++) {
            double eta = h->at[K_][s * m->N + n] * h->at[PREC][s * m->M + channel];
            for (int64_t t = s; t < m->T; t++) {
                if (t > s) eta *= m->forget[t * m->N + n];
                m->map[t * m->T + s] += h->at[Q_][t * m->N + n] * eta / m->lam[t * m->N + n];
            }
        }
    }
}

/* Whether `token` stands at place s or within reach of a convolution of four taps. */
static bool holds(const int32_t *tokens, int64_t s, int32_t token) {
    for (int64_t i = mn_max(s - 3, 0); i <= s; i++) {
        if (tokens[i] == token) return true;
    }
    return false;
}

/* Holds the matrix against the layer's own output, and adds up where it looks. */
static void judge_map(maps *m, const heard *h, int64_t channel, const int32_t *tokens,
                      const int32_t *targets) {
    double aims = 0.0;
    int64_t asking = 0;
    m->weight[channel] = 0.0;
    for (int64_t t = 0; t < m->T; t++) {
        double y = 0.0, all = 0.0, aimed = 0.0;
        int64_t fitting = 0;
        for (int64_t s = 0; s <= t; s++) {
            const double w = m->map[t * m->T + s];
            const bool fits = holds(tokens, s, targets[t]);
            y += w * h->at[V_][s * m->M + channel];
            all += fabs(w);
            aimed += fits ? fabs(w) : 0.0;
            fitting += fits;
        }
        const double told = h->at[Y_][t * m->M + channel];
        m->error = fmax(m->error, fabs(y - told));
        m->largest = fmax(m->largest, fabs(told));
        m->weight[channel] += all;
        if (targets[t] < 0 || !(all > 0.0)) continue;
        aims += aimed / all;
        m->by_chance += (double)fitting / (double)(t + 1);
        asking++;
    }
    m->aimed += aims;
    m->asking += asking;
    m->best = fmax(m->best, aims / (double)mn_max(asking, 1));
}

static mn_status open_maps(maps *m, const heard *h) {
    *m = (maps){ .T = h->rows[V_], .M = h->width[V_], .N = h->width[K_] };
    if (m->T > MOST_PLACES) return mn_fail(MN_ERR_ARGUMENT, "maps take up to %d tokens",
                                           MOST_PLACES);
    const size_t T = (size_t)m->T;
    m->map = calloc(T * T, sizeof *m->map);
    m->forget = calloc(T * (size_t)m->N, sizeof *m->forget);
    m->lam = calloc(T * (size_t)m->N, sizeof *m->lam);
    m->read = calloc(T, sizeof *m->read);
    m->cell = calloc(T, sizeof *m->cell);
    m->weight = calloc((size_t)m->M, sizeof *m->weight);
    return m->map && m->forget && m->lam && m->read && m->cell && m->weight
               ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for maps of %zu places", T);
}

static void close_maps(maps *m) {
    free(m->map);
    free(m->forget);
    free(m->lam);
    free(m->read);
    free(m->cell);
    free(m->weight);
}

/* ---- telling --------------------------------------------------------------------------------- */

/* Five digits are more than a picture shows. */
static json_t *short_number(double x) {
    char text[32];
    snprintf(text, sizeof text, "%.4g", x);
    return json_real(strtod(text, NULL));
}

static json_t *numbers(const double *at, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(list, short_number(at[i]));
    return list;
}

static json_t *ids(const int32_t *at, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(list, json_integer(at[i]));
    return list;
}

/* The channel with most weight, whose weight becomes -1. */
static int64_t take_heaviest(maps *m) {
    int64_t best = 0;
    for (int64_t i = 1; i < m->M; i++) best = m->weight[i] > m->weight[best] ? i : best;
    m->weight[best] = -1.0;
    return best;
}

/* Lower triangles, row by row, of the heaviest channels. */
static json_t *tell_channels(maps *m, const heard *h, int64_t count) {
    json_t *list = json_array();
    for (int64_t i = 0; i < mn_min(count, m->M); i++) {
        const int64_t channel = take_heaviest(m);
        json_t *rows = json_array();
        fill_map(m, h, channel);
        for (int64_t t = 0; t < m->T; t++) {
            json_array_append_new(rows, numbers(m->map + t * m->T, t + 1));
        }
        json_array_append_new(list, json_pack("{s:I, s:o}", "channel", (json_int_t)channel,
                                              "rows", rows));
    }
    return list;
}

static mn_status tell(json_t *result, maps *m, const heard *h, int64_t channels,
                      const int32_t *tokens, const int32_t *targets) {
    const double asking = (double)mn_max(m->asking, 1);
    json_t *read = numbers(m->read, m->T), *cell = numbers(m->cell, m->T);
    const double first = m->cell[0], last = m->cell[m->T - 1];
    json_t *out = json_pack(
        "{s:o, s:o, s:o, s:o, s:f, s:f, s:f, s:f, s:f, s:f, s:o}", "tokens", ids(tokens, m->T),
        "targets", ids(targets, m->T), "read_variance", read, "cell_variance", cell, "digits",
        -log10(fmax(m->error / fmax(m->largest, 1e-30), 1e-17)), "aimed", m->aimed / asking, "best",
        m->best, "by_chance", m->by_chance / asking, "variance_first", first, "variance_last",
        last, "channels", tell_channels(m, h, channels));
    return json_object_set_new(result, "maps", out) == 0
               ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for maps");
}

static mn_status look(json_t *result, const mn_look_at *at, const mn_json *given) {
    options o;
    heard h = { 0 };
    maps m = { 0 };
    const size_t most = (size_t)mn_task_run_longest(at->task);
    int32_t *tokens = calloc(most, sizeof *tokens), *targets = calloc(most, sizeof *targets);
    int64_t T = 0;
    mn_status st = tokens && targets ? read_options(&o, given)
                                     : mn_fail(MN_ERR_MEMORY, "no memory for an example");
    if (st == MN_OK) {
        h.layer = (int)o.layer;
        st = mn_task_run_example(at->task, o.example, tokens, targets, &T, NULL);
    }
    if (st == MN_OK) st = listen_to(&h, at, tokens, T);
    if (st == MN_OK) st = open_maps(&m, &h);
    for (int64_t c = 0; st == MN_OK && c < m.M; c++) {
        fill_map(&m, &h, c);
        judge_map(&m, &h, c, tokens, targets);
    }
    if (st == MN_OK) st = tell(result, &m, &h, o.channels, tokens, targets);
    close_maps(&m);
    for (int i = 0; i < HEARD; i++) free(h.at[i]);
    free(tokens);
    free(targets);
    return st;
}

const mn_look mn_look_maps = { check, look };
