/* doubt.c - answers with the entropy of their prediction and the posteriors behind them. */
#include "eval/doubt.h"

#include <math.h>
#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"

enum { PIECE = 1024 };    // targets whose logits exist at one time

void mn_doubts_free(mn_doubts *d) {
    free(d->entropy);
    free(d->confidence);
    free(d->chance);
    free(d->wrong);
    free(d->kind);
    free(d->value);
    *d = (mn_doubts){ 0 };
}

static bool grow(void *list, int64_t room, size_t size) {
    void **at = list, *more = realloc(*at, (size_t)room * size);
    if (more) *at = more;
    return more != NULL;
}

static mn_status make_room(mn_doubts *d, int64_t more) {
    if (d->n + more <= d->room) return MN_OK;
    const int64_t room = mn_max(2 * d->room, d->n + more);
    const size_t values = (size_t)mn_max(d->features, 1) * sizeof *d->value;
    const bool fits = grow(&d->entropy, room, sizeof *d->entropy) &&
                      grow(&d->confidence, room, sizeof *d->confidence) &&
                      grow(&d->chance, room, sizeof *d->chance) &&
                      grow(&d->wrong, room, sizeof *d->wrong) &&
                      grow(&d->kind, room, sizeof *d->kind) && grow(&d->value, room, values);
    if (!fits) return mn_fail(MN_ERR_MEMORY, "no memory for %lld answers", (long long)room);
    d->room = room;
    return MN_OK;
}

/* One answer from its logits. */
static void put_answer(mn_doubts *d, int64_t i, const float *logits, int64_t V, int32_t target) {
    int64_t best = 0;
    double sum = 0.0, mean = 0.0;
    for (int64_t v = 1; v < V; v++) best = logits[v] > logits[best] ? v : best;
    for (int64_t v = 0; v < V; v++) {
        const double z = (double)logits[v] - logits[best], e = exp(z);
        sum += e;
        mean += e * z;
    }
    d->entropy[i] = (float)(log(sum) - mean / sum);
    d->confidence[i] = (float)(1.0 / sum);
    d->chance[i] = (float)(exp((double)logits[target] - logits[best]) / sum);
    d->wrong[i] = best != target;
}

static mn_status put_answers(mn_doubts *d, mn_model *model, mn_tape *tape, mn_tensor *hidden,
                             const mn_token_batch *batch, const int32_t *places, int64_t n) {
    const int64_t V = mn_model_describe(model)->vocab_size;
    float *logits = malloc((size_t)(mn_min(n, PIECE) * V + 1) * sizeof *logits);
    mn_status st = logits ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for logits");
    for (int64_t first = 0; st == MN_OK && first < n; first += PIECE) {
        const int64_t here = mn_min(PIECE, n - first);
        mn_tensor *picked = mn_tape_pick(tape, hidden, places + first, here);
        const mn_tensor *scores = mn_model_logits(model, tape, picked);
        st = scores ? mn_tape_read(tape, scores, logits) : mn_tape_status(tape);
        for (int64_t i = 0; st == MN_OK && i < here; i++) {
            put_answer(d, d->n + first + i, logits + i * V, V, batch->targets[places[first + i]]);
        }
    }
    free(logits);
    return st;
}

/* The places of a batch that ask; their number, or -1 where a target is no token of the model. */
static int64_t places_of(int32_t *places, const mn_token_batch *b, int64_t V) {
    int64_t n = 0;
    for (int64_t i = 0; i < b->rows * b->length; i++) {
        if (b->targets[i] >= V) return -1;
        if (b->targets[i] >= 0) places[n++] = (int32_t)i;
    }
    return n;
}

mn_status mn_doubts_add(mn_doubts *d, mn_model *model, mn_tape *tape, mn_posterior *posterior,
                        const mn_token_batch *batch, const int8_t *kinds) {
    const int64_t V = mn_model_describe(model)->vocab_size, all = batch->rows * batch->length;
    int32_t *places = malloc((size_t)(all + 1) * sizeof *places);
    if (!places) return mn_fail(MN_ERR_MEMORY, "no memory for the places of a batch");
    const int64_t n = places_of(places, batch, V);
    d->features = mn_posterior_features(posterior);
    mn_status st = n >= 0 ? make_room(d, n)
                          : mn_fail(MN_ERR_ARGUMENT, "a target is outside the model's vocabulary "
                                    "of %lld", (long long)V);
    if (st == MN_OK && n > 0) {
        const mn_model_input in = { .tokens = batch->tokens, .B = batch->rows, .T = batch->length,
                                    .tap = mn_posterior_tap(posterior, tape) };
        mn_tape_start(tape, MN_TAPE_FORWARD);
        mn_tensor *hidden = mn_model_hidden(model, tape, &in);
        st = hidden ? put_answers(d, model, tape, hidden, batch, places, n) : mn_tape_status(tape);
        if (st == MN_OK) {
            st = mn_posterior_read(posterior, batch->rows, batch->length, places, n,
                                   d->value + d->n * d->features);
        }
    }
    for (int64_t i = 0; st == MN_OK && i < n; i++) {
        d->kind[d->n + i] = kinds ? kinds[places[i]] : -1;
    }
    if (st == MN_OK) d->n += n;
    free(places);
    return st;
}
