/* test_answers.c - picked tokens and their gradients, loaders over sources, and the answers of a
 * model against its whole logits. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/status.h"
#include "eval/answers.h"
#include "support/check.h"

enum { VOCABULARY = 7, ROWS = 3, LENGTH = 5 };

/* Asks at every token whose number is a multiple of three, for token + 1. */
static mn_status fill(void *context, int64_t step, int64_t rows, int64_t length, int32_t *tokens,
                      int32_t *targets) {
    const uint64_t seed = *(const uint64_t *)context;
    for (int64_t i = 0; i < rows * length; i++) {
        tokens[i] = (int32_t)(mn_rng_bits(seed, (uint64_t)step, (uint64_t)i) % VOCABULARY);
        targets[i] = i % 3 == 0 ? (tokens[i] + 1) % VOCABULARY : -100;
    }
    return step == 99 ? mn_fail(MN_ERR_IO, "step 99 is not there") : MN_OK;
}

static mn_status open_loader(mn_loader **loader, uint64_t *seed) {
    return mn_loader_from_source(loader, &(mn_source){ seed, fill, ROWS, LENGTH, 4 });
}

static mn_status open_model(mn_model **model) {
    static const char json[] = "{\"layers\": \"gdn\", \"num_hidden_layers\": 1, "
                               "\"hidden_size\": 8, \"vocab_size\": 7}";
    mn_json root = { 0 };
    mn_model_config config = { 0 };
    mn_status st = mn_json_parse(&root, json, strlen(json), "model", MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_model_config_read(&config, &root);
    if (st == MN_OK) st = mn_model_create(model, &config, MN_F32);
    mn_model_config_free(&config);
    mn_json_free(&root);
    if (st == MN_OK) mn_model_start(*model, NULL, 5);
    return st;
}

static void sources(void **state) {
    (void)state;
    uint64_t seed = 3;
    mn_loader *loader = NULL;
    mn_token_batch batch = { 0 };
    CHECK(open_loader(&loader, &seed) == MN_OK, "%s", mn_last_error());
    CHECK(mn_loader_epoch(loader) == 4, "an epoch of %lld", (long long)mn_loader_epoch(loader));
    CHECK(mn_token_batch_create(&batch, loader) == MN_OK, "%s", mn_last_error());
    CHECK(mn_loader_fill(&batch, loader, 2) == MN_OK, "%s", mn_last_error());
    CHECK(!batch.packed && batch.n_sequences == ROWS && batch.starts[ROWS] == ROWS * LENGTH,
          "%lld sequences", (long long)batch.n_sequences);
    CHECK(batch.targets[3] == (batch.tokens[3] + 1) % VOCABULARY && batch.targets[4] == -100,
          "targets %d %d", batch.targets[3], batch.targets[4]);
    CHECK(mn_loader_fill(&batch, loader, 99) == MN_ERR_IO, "step 99 was filled");
    mn_loader *none;
    CHECK(mn_loader_from_source(&none, &(mn_source){ &seed, fill, 0, 5, 1 }) == MN_ERR_ARGUMENT,
          "a source without rows was taken");
    mn_token_batch_free(&batch);
    mn_loader_destroy(loader);
    check_done();
}

typedef struct tally {
    int64_t n, right;
    int32_t answers[ROWS * LENGTH];
} tally;

static void count(void *context, int64_t place, int32_t target, int32_t answer) {
    tally *t = context;
    t->n++;
    t->right += target == answer;
    t->answers[place] = answer;
}

/* The answers are the largest logits of a pass over everything, the loss is that of the tape. */
static void answers(void **state) {
    (void)state;
    uint64_t seed = 3;
    mn_loader *loader = NULL;
    mn_token_batch batch = { 0 };
    mn_model *model = NULL;
    mn_context *context = NULL;
    mn_tape *tape = NULL;
    double loss = NAN, want = NAN;
    int64_t counted = 0;
    tally got = { 0 };
    CHECK(open_loader(&loader, &seed) == MN_OK && open_model(&model) == MN_OK &&
              mn_context_create(&context, NULL) == MN_OK &&
              mn_tape_create(&tape, context, MN_F32) == MN_OK &&
              mn_token_batch_create(&batch, loader) == MN_OK, "%s", mn_last_error());
    CHECK(mn_answers(model, tape, loader, 1, 1, count, &got, &loss) == MN_OK, "%s",
          mn_last_error());
    CHECK(got.n == (ROWS * LENGTH + 2) / 3, "%lld answers", (long long)got.n);
    mn_loader_fill(&batch, loader, 1);
    const mn_model_input in = { .tokens = batch.tokens, .B = ROWS, .T = LENGTH };
    mn_tape_start(tape, MN_TAPE_FORWARD);
    mn_tensor *hidden = mn_model_hidden(model, tape, &in);
    mn_model_loss(model, tape, hidden, batch.targets, (mn_loss_options){ 0 }, &want, &counted);
    const mn_tensor *logits = mn_model_logits(model, tape, hidden);
    CHECK(counted == got.n && fabs(loss - want) < 1e-6 * want, "loss %g for %g", loss, want);
    for (int i = 0; i < ROWS * LENGTH; i += 3) {
        const float *row = (const float *)logits->data + i * VOCABULARY;
        int best = 0;
        for (int k = 1; k < VOCABULARY; k++) best = row[k] > row[best] ? k : best;
        CHECK(got.answers[i] == best, "place %d: %d for %d", i, got.answers[i], best);
    }
    mn_token_batch_free(&batch);
    mn_tape_destroy(tape);
    mn_context_destroy(context);
    mn_model_destroy(model);
    mn_loader_destroy(loader);
    check_done();
}

/* y = x[places]: the gradient goes back to those and to no other. */
static void picked_gradients(void **state) {
    (void)state;
    mn_context *context = NULL;
    mn_tape *tape = NULL;
    double x[2 * 3 * 4], dx[2 * 3 * 4], dy[2 * 4];
    static const int32_t places[] = { 4, 1 };
    for (int i = 0; i < 24; i++) x[i] = i;
    for (int i = 0; i < 8; i++) dy[i] = 10.0 + i;
    CHECK(mn_context_create(&context, NULL) == MN_OK &&
              mn_tape_create(&tape, context, MN_F64) == MN_OK, "%s", mn_last_error());
    mn_tape_start(tape, MN_TAPE_RECORD);
    mn_tensor *in = mn_tape_input(tape, x, dx, (int64_t[]){ 2, 3, 1, 4 });
    mn_tensor *y = mn_tape_pick(tape, in, places, 2);
    CHECK(y && ((double *)y->data)[0] == 16 && ((double *)y->data)[5] == 5, "wrong rows");
    mn_tape_seed(tape, y, dy);
    CHECK(mn_tape_backward(tape) == MN_OK, "%s", mn_last_error());
    for (int i = 0; i < 24; i++) {
        const double want = i / 4 == 4 ? dy[i % 4] : i / 4 == 1 ? dy[4 + i % 4] : 0.0;
        CHECK(dx[i] == want, "entry %d: %g for %g", i, dx[i], want);
    }
    mn_tape_start(tape, MN_TAPE_FORWARD);
    in = mn_tape_input(tape, x, NULL, (int64_t[]){ 2, 3, 1, 4 });
    CHECK(!mn_tape_pick(tape, in, (int32_t[]){ 6 }, 1) && mn_tape_status(tape) != MN_OK,
          "a token beyond the end was picked");
    mn_tape_destroy(tape);
    mn_context_destroy(context);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sources),
        cmocka_unit_test(answers),
        cmocka_unit_test(picked_gradients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
