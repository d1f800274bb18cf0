/* answers.c - the likeliest token at every target of a batch. */
#include "eval/answers.h"

#include <math.h>
#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"

enum { PIECE = 1024 };    // targets whose logits exist at one time

typedef struct round_state {
    mn_model *model;
    mn_tape *tape;
    mn_token_batch batch;
    int32_t *places;
    float *logits;              // of a piece
    mn_answer_fn tell;
    void *context;
    double loss;
    int64_t targets;
} round_state;

static int32_t likeliest(const float *logits, int64_t n, double *log_sum) {
    int64_t best = 0;
    double sum = 0.0;
    for (int64_t i = 1; i < n; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    for (int64_t i = 0; i < n; i++) sum += exp((double)logits[i] - logits[best]);
    *log_sum = log(sum) + logits[best];
    return (int32_t)best;
}

static mn_status answer_piece(round_state *r, mn_tensor *hidden, int64_t first, int64_t n) {
    const int32_t *places = r->places + first;
    mn_tensor *picked = mn_tape_pick(r->tape, hidden, places, n);
    const mn_tensor *logits = mn_model_logits(r->model, r->tape, picked);
    if (!logits) return mn_tape_status(r->tape);
    const mn_status st = mn_tape_read(r->tape, logits, r->logits);
    if (st != MN_OK) return st;
    const int64_t V = logits->shape[3];
    for (int64_t i = 0; i < n; i++) {
        const float *row = r->logits + i * V;
        double log_sum;
        const int32_t answer = likeliest(row, V, &log_sum), target = r->batch.targets[places[i]];
        r->loss += log_sum - row[target];
        r->targets++;
        if (r->tell) r->tell(r->context, places[i], target, answer);
    }
    return MN_OK;
}

static mn_status answer_batch(round_state *r) {
    const mn_token_batch *b = &r->batch;
    mn_model_input in = { .tokens = b->tokens, .B = b->rows, .T = b->length };
    if (b->packed) {
        in.B = 1;
        in.T = b->rows * b->length;
        in.starts = b->starts;
        in.n_sequences = b->n_sequences;
    }
    const int64_t V = mn_model_describe(r->model)->vocab_size;
    int64_t n = 0;
    for (int64_t i = 0; i < b->rows * b->length; i++) {
        if (b->targets[i] < 0) continue;
        if (b->targets[i] >= V) {
            return mn_fail(MN_ERR_ARGUMENT, "target %d is outside the model's vocabulary of %lld",
                           (int)b->targets[i], (long long)V);
        }
        r->places[n++] = (int32_t)i;
    }
    mn_tape_start(r->tape, MN_TAPE_FORWARD);
    mn_tensor *hidden = mn_model_hidden(r->model, r->tape, &in);
    if (!hidden) return mn_tape_status(r->tape);
    mn_status st = MN_OK;
    for (int64_t i = 0; st == MN_OK && i < n; i += PIECE) {
        st = answer_piece(r, hidden, i, mn_min(PIECE, n - i));
    }
    return st;
}

mn_status mn_answers(mn_model *model, mn_tape *tape, const mn_loader *loader, int64_t first,
                     int64_t count, mn_answer_fn tell, void *context, double *loss) {
    round_state r = { .model = model, .tape = tape, .tell = tell, .context = context };
    mn_status st = mn_token_batch_create(&r.batch, loader);
    if (st == MN_OK) {
        r.places = calloc((size_t)(r.batch.rows * r.batch.length) + 1, sizeof *r.places);
        const int64_t rows = mn_min(r.batch.rows * r.batch.length, PIECE);
        r.logits = calloc((size_t)rows, (size_t)mn_model_describe(model)->vocab_size *
                                            sizeof *r.logits);
        if (!r.places || !r.logits) {
            st = mn_fail(MN_ERR_MEMORY, "no memory for the answers of a batch");
        }
    }
    for (int64_t i = 0; st == MN_OK && i < count; i++) {
        st = mn_loader_fill(&r.batch, loader, first + i);
        if (st == MN_OK) st = answer_batch(&r);
    }
    if (st == MN_OK && loss) *loss = r.loss / (double)mn_max(r.targets, 1);
    mn_token_batch_free(&r.batch);
    free(r.places);
    free(r.logits);
    return st;
}
