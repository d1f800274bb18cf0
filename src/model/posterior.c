/* posterior.c - posteriors filtered once more from what a pass tells of its layers. */
#include "model/posterior.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

static const char *const statistic_names[] = {
#define STATISTIC(id, name, about) name,
#include "model/posterior.def"
#undef STATISTIC
};

static const char *const statistic_abouts[] = {
#define STATISTIC(id, name, about) about,
#include "model/posterior.def"
#undef STATISTIC
};

const char *mn_statistic_name(mn_statistic statistic) {
    return statistic_names[statistic];
}

const char *mn_statistic_about(mn_statistic statistic) {
    return statistic_abouts[statistic];
}

/* ---- what is heard --------------------------------------------------------------------------- */

enum { Q, K, V, LA, L2, R2, P0, READ, GATE, PREC, A, P, Y, B_, G, IP, BETA, GAMMA, N_MEM, HEARD };

static const char *const heard_names[HEARD] = {
    [Q] = "q", [K] = "k", [V] = "v", [LA] = "la", [L2] = "l2", [R2] = "r2", [P0] = "p0",
    [READ] = "read", [GATE] = "gate", [PREC] = "prec", [A] = "a", [P] = "p", [Y] = "y",
    [B_] = "b", [G] = "g", [IP] = "ip", [BETA] = "beta", [GAMMA] = "gamma", [N_MEM] = "n_mem",
};

typedef enum family { BAYES, KLA, PALIMPSA_CODE, PALIMPSA_PAPER } family;

/* Which of these a family has to tell. */
static const int needed[][10] = {
    [BAYES] = { Q, K, V, LA, L2, R2, P0, READ, -1 },
    [KLA] = { Q, K, V, PREC, A, P, Y, -1 },
    [PALIMPSA_CODE] = { Q, K, V, B_, G, IP, READ, -1 },
    [PALIMPSA_PAPER] = { Q, K, V, BETA, GAMMA, N_MEM, IP, READ, -1 },
};

typedef struct heard {
    float *at;
    int64_t count, room;
    bool now;                    // of this pass
} heard;

typedef struct belief_layer {
    int index;                   // in the model
    family family;
    int64_t H, K, V, G;          // kla: H = 1, V channels, K slots
    int64_t units;               // H times the units of a head
    heard heard[HEARD];
    /* the belief to go on from; NULL: the prior. mean: of kla the information vector */
    double *start, *mean;
} belief_layer;

struct mn_posterior {
    int n_layers, per_statistic, features;
    belief_layer *layers;
    mn_tape *tape;
    mn_tap tap;
    mn_status st;
};

static mn_status keep(heard *h, mn_tape *tape, const mn_tensor *x) {
    const int64_t n = x->shape[0] * x->shape[1] * x->shape[2] * x->shape[3];
    if (n > h->room) {
        float *more = realloc(h->at, (size_t)n * sizeof *more);
        if (!more) return mn_fail(MN_ERR_MEMORY, "no memory for what a layer tells");
        h->at = more;
        h->room = n;
    }
    h->count = n;
    h->now = true;
    return mn_tape_read(tape, x, h->at);
}

static void hear(void *context, int layer, const char *name, const mn_tensor *x) {
    mn_posterior *p = context;
    int l = 0, i = 0;
    while (l < p->n_layers && p->layers[l].index != layer) l++;
    while (i < HEARD && strcmp(heard_names[i], name) != 0) i++;
    if (l == p->n_layers || i == HEARD || p->st != MN_OK) return;
    p->st = keep(&p->layers[l].heard[i], p->tape, x);
}

/* ---- which layers ---------------------------------------------------------------------------- */

static bool family_of(family *out, const mn_layer *layer) {
    switch (layer->kind) {
    case MN_LAYER_bayes:
        *out = BAYES;
        return true;
    case MN_LAYER_kla:
        *out = KLA;
        return layer->config.decode_from_prior == 0;
    case MN_LAYER_palimpsa_code:
        *out = PALIMPSA_CODE;
        return layer->config.metaplasticity != 0;
    case MN_LAYER_palimpsa_paper:
        *out = PALIMPSA_PAPER;
        return true;
    default:
        return false;
    }
}

static belief_layer layer_of(int index, family kind, const mn_layer *layer) {
    const mn_layer_sizes *s = &layer->sizes;
    belief_layer b = { .index = index, .family = kind, .H = 1, .G = 1, .K = MN_SIZE(s, 'K'),
                       .V = MN_SIZE(s, 'V') };
    if (kind != KLA) b.H = MN_SIZE(s, 'H');
    if (kind == BAYES) b.G = MN_SIZE(s, 'G');
    b.units = b.H * (kind == BAYES ? b.G : b.V);
    return b;
}

enum { LEAST, MEAN, LARGEST, HEADS };    // places of a layer's features of a statistic
enum { GAIN = MN_STATISTICS, PER_UNIT };  // what a unit has: its statistics, and the gain

mn_status mn_posterior_create(mn_posterior **out, const mn_model *model) {
    const int n = mn_model_describe(model)->n_layers;
    mn_posterior *p = calloc(1, sizeof *p);
    *out = NULL;
    if (p) p->layers = calloc((size_t)n + 1, sizeof *p->layers);
    if (!p || !p->layers) {
        free(p);
        return mn_fail(MN_ERR_MEMORY, "no memory for the posteriors of %d layers", n);
    }
    for (int i = 0; i < n; i++) {
        const mn_layer *layer = mn_model_layer(model, i);
        family f;
        if (!family_of(&f, layer)) continue;
        p->layers[p->n_layers] = layer_of(i, f, layer);
        p->per_statistic += HEADS + (int)p->layers[p->n_layers++].H;
    }
    if (p->n_layers > 0) p->per_statistic++;      // the mean over layers, which is the first
    p->features = MN_STATISTICS * p->per_statistic;
    p->tap = (mn_tap){ hear, p };
    *out = p;
    return MN_OK;
}

void mn_posterior_destroy(mn_posterior *p) {
    if (!p) return;
    for (int l = 0; l < p->n_layers; l++) {
        for (int i = 0; i < HEARD; i++) free(p->layers[l].heard[i].at);
        free(p->layers[l].start);
        free(p->layers[l].mean);
    }
    free(p->layers);
    free(p);
}

int mn_posterior_features(const mn_posterior *p) {
    return p->features;
}

int mn_posterior_overall(const mn_posterior *p, mn_statistic statistic) {
    return (int)statistic * p->per_statistic;
}

void mn_posterior_feature(const mn_posterior *p, int feature, mn_statistic *statistic, char *name,
                          size_t size) {
    static const char *const parts[HEADS] = { "least", "mean", "largest" };
    int at = feature % p->per_statistic - 1;
    *statistic = (mn_statistic)(feature / p->per_statistic);
    if (at < 0) {
        snprintf(name, size, "mean");
        return;
    }
    const belief_layer *l = p->layers;
    for (; at >= HEADS + (int)l->H; l++) at -= HEADS + (int)l->H;
    if (at < HEADS) snprintf(name, size, "layer %d %s", l->index, parts[at]);
    else snprintf(name, size, "layer %d head %d", l->index, at - HEADS);
}

int mn_posterior_of_layer(const mn_posterior *p, int layer, mn_statistic statistic) {
    int at = (int)statistic * p->per_statistic + 1;
    for (int l = 0; l < p->n_layers; at += HEADS + (int)p->layers[l++].H) {
        if (p->layers[l].index == layer) return at + MEAN;
    }
    return -1;
}

mn_statistic mn_posterior_doubt(const mn_posterior *p, int layer) {
    static const mn_statistic doubts[] = {
        [BAYES] = MN_STATISTIC_DIRECTION, [KLA] = MN_STATISTIC_CONTENT,
        [PALIMPSA_CODE] = MN_STATISTIC_DIRECTION, [PALIMPSA_PAPER] = MN_STATISTIC_DIRECTION,
    };
    int l = 0;
    while (l + 1 < p->n_layers && p->layers[l].index != layer) l++;
    return doubts[p->layers[l].family];
}

static mn_status copy_piece(double **to, const belief_layer *l, mn_layer_state *state,
                            const char *name, int64_t count) {
    const mn_state_piece *piece = mn_state_find(state, name);
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

static mn_status copy_belief(belief_layer *l, mn_layer_state *state) {
    static const char *const spreads[] = { [BAYES] = "covariance", [KLA] = "precision",
                                           [PALIMPSA_CODE] = "importance",
                                           [PALIMPSA_PAPER] = "importance" };
    const int64_t cells = l->units * l->K;
    const bool dense = l->family == BAYES;
    const mn_status st = copy_piece(&l->start, l, state, spreads[l->family],
                                    dense ? cells * l->K : cells);
    if (st != MN_OK) return st;
    return copy_piece(&l->mean, l, state, l->family == KLA ? "information" : "mean",
                      dense ? l->H * l->K * l->V : cells);
}

mn_status mn_posterior_from(mn_posterior *p, const mn_model_state *state) {
    mn_status st = MN_OK;
    for (int l = 0; l < p->n_layers && st == MN_OK; l++) {
        belief_layer *layer = &p->layers[l];
        free(layer->start);
        free(layer->mean);
        layer->start = layer->mean = NULL;
        if (!state) continue;
        mn_layer_state *own = &state->layers[layer->index], here = { 0 };
        if (own->device) st = mn_layer_state_fetch(&here, own);
        if (st == MN_OK) st = copy_belief(layer, own->device ? &here : own);
        if (own->device) mn_layer_state_free(&here);
    }
    return st;
}

const mn_tap *mn_posterior_tap(mn_posterior *p, mn_tape *tape) {
    p->tape = tape;
    p->st = MN_OK;
    for (int l = 0; l < p->n_layers; l++) {
        for (int i = 0; i < HEARD; i++) p->layers[l].heard[i].now = false;
    }
    return &p->tap;
}

/* ---- one sequence ---------------------------------------------------------------------------- */

/* Where the questions of a sequence are, and room for (questions, units, PER_UNIT). */
typedef struct sequence {
    const belief_layer *l;
    int64_t b, T;                // row of the batch, its tokens
    const int32_t *places;       // tokens, ascending
    int64_t n;
    double *units;
    double *read, *held;         // (questions, heads): sums over units for the statistic content
    double *work;
} sequence;

/* Rows of `width` numbers that `which` has for each token. */
static const float *row_of(const sequence *s, int which, int64_t t, int64_t width) {
    return s->l->heard[which].at + (s->b * s->T + t) * width;
}

static double silu(double x) {
    return x / (1.0 + exp(-x));
}

static double mean_square(const float *x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sum / (double)n;
}

/* silu(gate)^2 of column j of head h, 1 without a gate. */
static double opening(const sequence *s, int64_t t, int64_t h, int64_t j) {
    const belief_layer *l = s->l;
    if (!l->heard[GATE].now) return 1.0;
    const double open = silu(row_of(s, GATE, t, l->H * l->V)[h * l->V + j]);
    return open * open;
}

static double *unit_of(const sequence *s, int64_t question, int64_t unit) {
    return s->units + (question * s->l->units + unit) * PER_UNIT;
}

/* For the statistic content, of column j: what is read along q, and what is held in any direction
 * on average, by how far the gate of the column is open. */
static void put_read(const sequence *s, int64_t question, int64_t h, int64_t j, double read,
                     double held) {
    const double open = opening(s, s->places[question], h, j);
    s->read[question * s->l->H + h] += open * read;
    s->held[question * s->l->H + h] += open * held;
}

/* What all families put: variance, what it was before the first token, its mean over directions. */
static void put_unit(double *to, double variance, double prior, double directions, double logdet) {
    to[MN_STATISTIC_VARIANCE] = variance;
    to[MN_STATISTIC_PRIOR] = variance / prior;
    to[MN_STATISTIC_DIRECTION] = variance / directions;
    to[MN_STATISTIC_LOGDET] = logdet;
}

/* log |P| by Cholesky; `work` has K^2 numbers. */
static double log_determinant(const double *P_, int64_t K_, double *work) {
    double sum = 0.0;
    for (int64_t i = 0; i < K_; i++) {
        for (int64_t j = 0; j <= i; j++) {
            double x = P_[i * K_ + j];
            for (int64_t k = 0; k < j; k++) x -= work[i * K_ + k] * work[j * K_ + k];
            work[i * K_ + j] = i == j ? sqrt(fmax(x, 1e-30)) : x / work[j * K_ + j];
        }
        sum += 2.0 * log(work[i * K_ + i]);
    }
    return sum;
}

/* A token into the covariance of a head and noise group; returns the variance of its value. */
static double bayes_step(const sequence *s, double *cov, double *u, int64_t t, int64_t h,
                         int64_t g) {
    const belief_layer *l = s->l;
    const int64_t K_ = l->K;
    const float *k = row_of(s, K, t, l->H * K_) + h * K_;
    const float *la = row_of(s, LA, t, l->H * K_) + h * K_;
    const double l2 = row_of(s, L2, t, l->H)[h], r2 = row_of(s, R2, t, l->H * l->G)[h * l->G + g];
    double seen = r2;
    for (int64_t i = 0; i < K_; i++) {
        for (int64_t j = 0; j <= i; j++) {
            const double decay = exp((double)la[i] + la[j]);
            cov[i * K_ + j] = cov[i * K_ + j] * decay + (i == j ? l2 : 0.0);
            if (j < i) cov[j * K_ + i] = cov[j * K_ + i] * decay + 0.0;
        }
    }
    for (int64_t i = 0; i < K_; i++) {
        u[i] = 0.0;
        for (int64_t j = 0; j < K_; j++) u[i] += cov[i * K_ + j] * k[j];
        seen += u[i] * k[i];
    }
    for (int64_t i = 0; i < K_; i++) {
        for (int64_t j = 0; j < K_; j++) cov[i * K_ + j] -= u[i] * u[j] / seen;
    }
    return seen;
}

/* What a token leaves of the rows of the mean of a head. */
static void bayes_decay(const sequence *s, double *decay, int64_t t, int64_t h) {
    const float *la = row_of(s, LA, t, s->l->H * s->l->K) + h * s->l->K;
    for (int64_t i = 0; i < s->l->K; i++) decay[i] = exp((double)la[i]);
}

/* The same token into column j of the mean, whose gain is u / seen. */
static void bayes_mean(const sequence *s, double *mean, const double *decay, const double *u,
                       double seen, int64_t t, int64_t h, int64_t j) {
    const belief_layer *l = s->l;
    const float *k = row_of(s, K, t, l->H * l->K) + h * l->K;
    double error = row_of(s, V, t, l->H * l->V)[h * l->V + j];
    for (int64_t i = 0; i < l->K; i++) {
        mean[i] *= decay[i];
        error -= mean[i] * k[i];
    }
    for (int64_t i = 0; i < l->K; i++) mean[i] += u[i] / seen * error;
}

static void bayes_question(const sequence *s, const double *cov, double *work, int64_t question,
                           int64_t h, int64_t g) {
    const belief_layer *l = s->l;
    const int64_t K_ = l->K, t = s->places[question], width = l->V / l->G;
    const float *q = row_of(s, Q, t, l->H * K_) + h * K_;
    const float *read = row_of(s, READ, t, l->H * l->V) + h * l->V;
    const double p0 = l->heard[P0].at[h];
    double variance = 0.0, trace = 0.0, square = 0.0, open = 0.0;
    for (int64_t i = 0; i < K_; i++) {
        double sum = 0.0;
        for (int64_t j = 0; j < K_; j++) sum += cov[i * K_ + j] * q[j];
        variance += q[i] * sum;
        trace += cov[i * K_ + i];
        square += (double)q[i] * q[i];
    }
    for (int64_t j = 0; j < width; j++) open += opening(s, t, h, g * width + j) / (double)width;
    double *to = unit_of(s, question, h * l->G + g);
    put_unit(to, variance, p0 * square, square * trace / (double)K_,
             log_determinant(cov, K_, work) / (double)K_ - log(p0));
    to[MN_STATISTIC_NOISE] = variance / (mean_square(read, l->V) + 1e-12);
    to[MN_STATISTIC_GATED] = to[MN_STATISTIC_NOISE] * open;
}

/* A column of the mean at a question. */
static void mean_question(const sequence *s, const double *mean, int64_t question, int64_t h,
                          int64_t j) {
    const int64_t K_ = s->l->K;
    const float *q = row_of(s, Q, s->places[question], s->l->H * K_) + h * K_;
    double read = 0.0, length = 0.0, held = 0.0;
    for (int64_t i = 0; i < K_; i++) {
        read += mean[i] * q[i];
        length += (double)q[i] * q[i];
        held += mean[i] * mean[i] / (double)K_;
    }
    put_read(s, question, h, j, read * read, length * held);
}

/* The columns of the mean of a group, from those before the first token. */
static void start_means(const sequence *s, double *means, int64_t h, int64_t g, int64_t width) {
    const belief_layer *l = s->l;
    for (int64_t j = 0; j < width; j++) {
        for (int64_t i = 0; i < l->K; i++) {
            means[j * l->K + i] = l->mean ? l->mean[(h * l->K + i) * l->V + g * width + j] : 0.0;
        }
    }
}

static void read_bayes(const sequence *s) {
    const int64_t K_ = s->l->K, width = s->l->V / s->l->G;
    double *cov = s->work, *u = cov + K_ * K_, *decay = u + K_, *work = decay + K_;
    double *means = work + K_ * K_;
    for (int64_t unit = 0; unit < s->l->units; unit++) {
        const int64_t h = unit / s->l->G, g = unit % s->l->G;
        const double *start = s->l->start;
        for (int64_t i = 0; i < K_ * K_; i++) {
            cov[i] = start ? start[unit * K_ * K_ + i]
                           : i % (K_ + 1) == 0 ? s->l->heard[P0].at[h] : 0.0;
        }
        start_means(s, means, h, g, width);
        for (int64_t t = 0, i = 0; i < s->n; t++) {
            const double seen = bayes_step(s, cov, u, t, h, g);
            const bool asked = s->places[i] == t;
            bayes_decay(s, decay, t, h);
            for (int64_t j = 0; j < width; j++) {
                bayes_mean(s, means + j * K_, decay, u, seen, t, h, g * width + j);
                if (asked) mean_question(s, means + j * K_, i, h, g * width + j);
            }
            if (!asked) continue;
            const double r2 = row_of(s, R2, t, s->l->H * s->l->G)[h * s->l->G + g];
            unit_of(s, i, unit)[GAIN] = 1.0 - r2 / seen;
            bayes_question(s, cov, work, i++, h, g);
        }
    }
}

/* One channel at a question: lam and eta of its slots. */
static void kla_question(const sequence *s, const double *lam, const double *eta, int64_t question,
                         int64_t channel) {
    const belief_layer *l = s->l;
    const int64_t t = s->places[question];
    const float *q = row_of(s, Q, t, l->K);
    double variance = 0.0, square = 0.0, spread = 0.0, logs = 0.0, read = 0.0, held = 0.0;
    for (int64_t i = 0; i < l->K; i++) {
        const double mean = eta[i] / lam[i];
        variance += (double)q[i] * q[i] / lam[i];
        square += (double)q[i] * q[i];
        spread += 1.0 / (lam[i] * (double)l->K);
        logs += log(lam[i]) / (double)l->K;
        read += mean * q[i];
        held += mean * mean / (double)l->K;
    }
    put_read(s, question, 0, channel, read * read, square * held);
    double *to = unit_of(s, question, channel);
    put_unit(to, variance, square, square * spread, -logs);
    to[MN_STATISTIC_NOISE] = variance / (mean_square(row_of(s, Y, t, l->V), l->V) + 1e-12);
    to[MN_STATISTIC_GATED] = variance * opening(s, t, 0, channel);
}

static void read_kla(const sequence *s) {
    const belief_layer *l = s->l;
    double *lam = s->work, *eta = lam + l->K;
    for (int64_t c = 0; c < l->V; c++) {
        const float *a = l->heard[A].at + c * l->K, *p = l->heard[P].at + c * l->K;
        for (int64_t i = 0; i < l->K; i++) {
            lam[i] = l->start ? l->start[c * l->K + i] : 1.0;
            eta[i] = l->mean ? l->mean[c * l->K + i] : 0.0;
        }
        for (int64_t t = 0, question = 0; question < s->n; t++) {
            const float *k = row_of(s, K, t, l->K);
            const double prec = row_of(s, PREC, t, l->V)[c], v = row_of(s, V, t, l->V)[c];
            double gain = 0.0, square = 1e-30;
            for (int64_t i = 0; i < l->K; i++) {
                const double den = fmax((double)a[i] * a[i] + p[i] * lam[i], 1e-12);
                const double k2 = (double)k[i] * k[i];
                lam[i] = lam[i] / den + prec * k2;
                eta[i] = a[i] * eta[i] / den + prec * v * k[i];
                gain += k2 * prec * k2 / lam[i];
                square += k2;
            }
            if (s->places[question] != t) continue;
            unit_of(s, question, c)[GAIN] = gain / square;
            kla_question(s, lam, eta, question++, c);
        }
    }
}

/* A column of a head at a question: its importances. */
static void palimpsa_question(const sequence *s, const double *importance, int64_t question,
                              int64_t h, int64_t j) {
    const belief_layer *l = s->l;
    const int64_t t = s->places[question], K_ = l->K;
    const float *q = row_of(s, Q, t, l->H * K_) + h * K_;
    const double ip = l->heard[IP].at[h], share = 1.0 / (double)K_;
    double variance = 0.0, square = 0.0, spread = 0.0, logs = 0.0;
    for (int64_t i = 0; i < K_; i++) {
        variance += share * q[i] * q[i] / importance[i];
        square += share * q[i] * q[i];
        spread += share / importance[i];
        logs += share * log(importance[i] / ip);
    }
    double *to = unit_of(s, question, h * l->V + j);
    const float *read = row_of(s, READ, t, l->H * l->V) + h * l->V;
    put_unit(to, variance, square / ip, square * spread, -logs);
    to[MN_STATISTIC_NOISE] = variance / (mean_square(read, l->V) + 1e-12);
    to[MN_STATISTIC_GATED] = to[MN_STATISTIC_NOISE] * opening(s, t, h, j);
}

/* How much of the importance stays, and what a key adds to it. */
static void palimpsa_rates(const sequence *s, int64_t t, int64_t h, int64_t j, double *kept,
                           double *added) {
    const belief_layer *l = s->l;
    if (l->family == PALIMPSA_CODE) {
        *kept = exp(row_of(s, G, t, l->H)[h]);
        *added = row_of(s, B_, t, l->H * l->V)[h * l->V + j];
    } else {
        *kept = 1.0 - row_of(s, GAMMA, t, l->H)[h] / l->heard[N_MEM].at[h];
        *added = row_of(s, BETA, t, l->H * l->V)[h * l->V + j];
    }
}

static void read_palimpsa(const sequence *s) {
    const belief_layer *l = s->l;
    double *importance = s->work, *sum = importance + l->K, *mean = sum + l->K, kept, added;
    for (int64_t unit = 0; unit < l->units; unit++) {
        const int64_t h = unit / l->V, j = unit % l->V;
        const double ip = l->heard[IP].at[h];
        for (int64_t i = 0; i < l->K; i++) {
            const int64_t cell = (h * l->K + i) * l->V + j;
            importance[i] = l->start ? l->start[cell] : ip;
            sum[i] = l->mean ? l->mean[cell] * importance[i] : 0.0;
        }
        for (int64_t t = 0, question = 0; question < s->n; t++) {
            const float *k = row_of(s, K, t, l->H * l->K) + h * l->K;
            const double v = row_of(s, V, t, l->H * l->V)[unit];
            palimpsa_rates(s, t, h, j, &kept, &added);
            double told = 0.0, square = 1e-30;
            for (int64_t i = 0; i < l->K; i++) {
                const double k2 = (double)k[i] * k[i];
                importance[i] = kept * importance[i] + (1.0 - kept) * ip + added * k2;
                sum[i] = kept * sum[i] + k[i] * v;
                mean[i] = sum[i] / importance[i];
                told += k2 * added * k2 / importance[i];
                square += k2;
            }
            if (s->places[question] != t) continue;
            unit_of(s, question, unit)[GAIN] = told / square;
            mean_question(s, mean, question, h, j);
            palimpsa_question(s, importance, question++, h, j);
        }
    }
}

/* ---- features -------------------------------------------------------------------------------- */

static double scaled(mn_statistic statistic, double x) {
    return statistic == MN_STATISTIC_LOGDET ? x : log(fmax(x, 1e-30));
}

/* The features of one layer and statistic at a question, HEADS + H of them; returns the mean. */
static double reduce(const sequence *s, int64_t question, mn_statistic statistic, float *to) {
    const int64_t per_head = s->l->units / s->l->H;
    double least = INFINITY, largest = -INFINITY, all = 0.0;
    for (int64_t h = 0; h < s->l->H; h++) {
        double sum = 0.0;
        for (int64_t i = 0; i < per_head; i++) {
            const double x = unit_of(s, question, h * per_head + i)[statistic];
            least = fmin(least, x);
            largest = fmax(largest, x);
            sum += x / (double)per_head;
        }
        to[HEADS + h] = (float)scaled(statistic, sum);
        all += sum / (double)s->l->H;
    }
    to[LEAST] = (float)scaled(statistic, least);
    to[MEAN] = (float)scaled(statistic, all);
    to[LARGEST] = (float)scaled(statistic, largest);
    return to[MEAN];
}

static mn_status check_heard(const belief_layer *l, int64_t B, int64_t T) {
    for (const int *i = needed[l->family]; *i >= 0; i++) {
        const heard *h = &l->heard[*i];
        if (!h->now) {
            return mn_fail(MN_ERR_INTERNAL, "layer %d does not tell its %s", l->index,
                           heard_names[*i]);
        }
    }
    const int64_t want = B * T * l->H * l->K;
    return l->heard[Q].count == want && l->heard[K].count == want
               ? MN_OK : mn_fail(MN_ERR_INTERNAL, "layer %d tells of another pass", l->index);
}

/* All columns of a head together: a single one may well read next to nothing. */
static void put_content(const sequence *s) {
    const int64_t per_head = s->l->units / s->l->H;
    for (int64_t i = 0; i < s->n * s->l->units; i++) {
        const int64_t at = i / s->l->units * s->l->H + i % s->l->units / per_head;
        s->units[i * PER_UNIT + MN_STATISTIC_CONTENT] =
            s->held[at] > 0.0 ? s->held[at] / (s->read[at] + 1e-9 * s->held[at]) : 1.0;
    }
}

/* The units of a layer into s->units, to be freed; false: no memory. */
static bool read_units(sequence *s, const belief_layer *l) {
    static void (*const readers[])(const sequence *) = {
        [BAYES] = read_bayes, [KLA] = read_kla,
        [PALIMPSA_CODE] = read_palimpsa, [PALIMPSA_PAPER] = read_palimpsa,
    };
    s->l = l;
    s->units = malloc((size_t)(s->n * l->units * PER_UNIT) * sizeof *s->units);
    s->read = calloc((size_t)(2 * s->n * l->H), sizeof *s->read);
    s->held = s->read + s->n * l->H;
    s->work = malloc((size_t)(2 * l->K * l->K + (4 + l->V) * l->K) * sizeof *s->work);
    const bool room = s->units && s->read && s->work;
    if (room) readers[l->family](s);
    if (room) put_content(s);
    free(s->read);
    free(s->work);
    return room;
}

static mn_status read_sequence(const mn_posterior *p, sequence *s, float *out) {
    for (int64_t i = 0; i < s->n; i++) {
        for (int k = 0; k < MN_STATISTICS; k++) out[i * p->features + k * p->per_statistic] = 0.0f;
    }
    for (int l = 0, at = 1; l < p->n_layers; at += HEADS + (int)p->layers[l++].H) {
        const bool room = read_units(s, &p->layers[l]);
        for (int64_t i = 0; room && i < s->n; i++) {
            for (int k = 0; k < MN_STATISTICS; k++) {
                float *to = out + i * p->features + k * p->per_statistic;
                to[0] += (float)(reduce(s, i, (mn_statistic)k, to + at) / p->n_layers);
            }
        }
        free(s->units);
        if (!room) return mn_fail(MN_ERR_MEMORY, "no memory for the posterior of a layer");
    }
    return MN_OK;
}

mn_status mn_posterior_read(const mn_posterior *p, int64_t B, int64_t T, const int32_t *places,
                            int64_t n, float *out) {
    int32_t *tokens = malloc((size_t)(n + 1) * sizeof *tokens);
    mn_status st = tokens ? p->st : mn_fail(MN_ERR_MEMORY, "no memory for places");
    for (int l = 0; st == MN_OK && l < p->n_layers; l++) st = check_heard(&p->layers[l], B, T);
    for (int64_t at = 0; st == MN_OK && p->features > 0 && at < n;) {
        sequence s = { .b = places[at] / T, .T = T, .places = tokens };
        while (at + s.n < n && places[at + s.n] / T == s.b) {
            tokens[s.n] = (int32_t)(places[at + s.n] % T);
            s.n++;
        }
        st = read_sequence(p, &s, out + at * p->features);
        at += s.n;
    }
    free(tokens);
    return st;
}

/* ---- by head --------------------------------------------------------------------------------- */

int mn_posterior_heads(const mn_posterior *p) {
    int64_t n = 0;
    for (int l = 0; l < p->n_layers; l++) n += p->layers[l].H;
    return (int)n;
}

void mn_posterior_head(const mn_posterior *p, int i, int *layer, int *head) {
    const belief_layer *l = p->layers;
    for (; i >= (int)l->H; l++) i -= (int)l->H;
    *layer = l->index;
    *head = i;
}

mn_status mn_posterior_by_head(const mn_posterior *p, int64_t T, float *variance, float *gain) {
    const int n = mn_posterior_heads(p);
    int32_t *places = malloc((size_t)(T + 1) * sizeof *places);
    mn_status st = places ? p->st : mn_fail(MN_ERR_MEMORY, "no memory for places");
    for (int64_t t = 0; places && t < T; t++) places[t] = (int32_t)t;
    for (int l = 0, at = 0; l < p->n_layers && st == MN_OK; at += (int)p->layers[l++].H) {
        const belief_layer *layer = &p->layers[l];
        sequence s = { .T = T, .places = places, .n = T };
        st = check_heard(layer, 1, T);
        if (st == MN_OK && !read_units(&s, layer)) {
            st = mn_fail(MN_ERR_MEMORY, "no memory for the posterior of a layer");
        }
        const int64_t per_head = layer->units / layer->H;
        for (int64_t i = 0; st == MN_OK && i < T * layer->H; i++) {
            const int64_t t = i / layer->H, h = i % layer->H;
            double read = 0.0, told = 0.0;
            for (int64_t u = 0; u < per_head; u++) {
                const double *unit = unit_of(&s, t, h * per_head + u);
                read += unit[MN_STATISTIC_VARIANCE] / (double)per_head;
                told += unit[GAIN] / (double)per_head;
            }
            variance[t * n + at + h] = (float)read;
            gain[t * n + at + h] = (float)told;
        }
        free(s.units);
    }
    free(places);
    return st;
}
