/* test_trainer_given.c - runs on tokens in memory: the same numbers as from a file with these
 * tokens, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "support/check.h"
#include "support/folder.h"
#include "train/trainer.h"

enum { N_TOKENS = 1000, VOCABULARY = 50, STEPS = 4 };

static mn_context *context;

static void parse(mn_json *root, const char *data) {
    char text[2048];
    snprintf(text, sizeof text, "{\"model\": {\"layers\": \"gdn\", \"hidden_size\": 16, "
             "\"vocab_size\": %d}, \"data\": {%s}, \"train\": {\"steps\": %d, \"batch\": 3, "
             "\"context\": 20}, \"out\": \"run\"}", VOCABULARY, data, STEPS);
    if (mn_json_parse(root, text, strlen(text), "test", MN_JSON_STANDARD) != MN_OK) {
        check_fatal("%s", mn_last_error());
    }
}

static void make_tokens(int32_t tokens[N_TOKENS]) {
    for (uint64_t i = 0; i < N_TOKENS; i++) {
        tokens[i] = (int32_t)(mn_rng_uniform(1, 2, i) * VOCABULARY);
    }
}

static mn_corpus *corpus_of(const int32_t *tokens) {
    mn_corpus *corpus;
    const int64_t borders[] = { 0, N_TOKENS };
    assert_int_equal(mn_corpus_from_tokens(&corpus, tokens, N_TOKENS, borders, 1), MN_OK);
    return corpus;
}

/* Losses of all steps and of an evaluation. */
static void run(double losses[STEPS + 1], mn_trainer *t) {
    bool best;
    for (int i = 0; i < STEPS; i++) {
        mn_step_result r;
        assert_int_equal(mn_trainer_step(t, &r), MN_OK);
        losses[i] = r.loss;
    }
    assert_int_equal(mn_trainer_evaluate(t, &losses[STEPS], &best), MN_OK);
}

static void memory_and_files_give_the_same_numbers(void **state) {
    (void)state;
    int32_t tokens[N_TOKENS];
    uint16_t stored[N_TOKENS];
    make_tokens(tokens);
    for (int i = 0; i < N_TOKENS; i++) stored[i] = (uint16_t)tokens[i];
    write_file(in_folder("tokens.bin"), stored, sizeof stored);
    double from_file[STEPS + 1], given[STEPS + 1];
    char data[1024];
    mn_json root;
    mn_trainer *t;
    snprintf(data, sizeof data, "\"train\": \"%s\", \"valid\": \"%s\"", in_folder("tokens.bin"),
             in_folder("tokens.bin"));
    parse(&root, data);
    assert_int_equal(mn_trainer_create(&t, &root, context), MN_OK);
    run(from_file, t);
    mn_trainer_destroy(t);
    mn_json_free(&root);

    mn_corpus *corpus = corpus_of(tokens);
    const mn_train_data both = { .train = corpus, .valid = corpus };
    mn_train_memory memory;
    parse(&root, "");
    assert_int_equal(mn_trainer_create_from(&t, &root, &both, context), MN_OK);
    assert_int_equal(mn_trainer_predict(t, &memory), MN_OK);
    assert_int_equal(mn_trainer_tokens(t, false), N_TOKENS);
    run(given, t);
    mn_trainer_destroy(t);
    for (int i = 0; i <= STEPS; i++) {
        CHECK(given[i] == from_file[i], "number %d: %.17g from a file, %.17g from memory", i,
              from_file[i], given[i]);
    }

    /* nothing held out: the evaluation has no number, and the corpus is still the caller's */
    const mn_train_data alone = { .train = corpus };
    double loss;
    bool best;
    assert_int_equal(mn_trainer_create_from(&t, &root, &alone, context), MN_OK);
    assert_int_equal(mn_trainer_tokens(t, true), 0);
    assert_int_equal(mn_trainer_evaluate(t, &loss, &best), MN_OK);
    CHECK(loss != loss && !best, "a loss of nothing: %g", loss);
    mn_trainer_destroy(t);
    mn_corpus_destroy(corpus);
    mn_json_free(&root);
    check_done();
}

static void one_source_of_data_is_needed(void **state) {
    (void)state;
    int32_t tokens[N_TOKENS];
    make_tokens(tokens);
    mn_json root;
    mn_trainer *t;
    parse(&root, "");
    assert_fails(mn_trainer_create(&t, &root, context), MN_ERR_ARGUMENT, "data.train", "no file");
    assert_null(t);
    mn_json_free(&root);

    mn_corpus *corpus = corpus_of(tokens);
    const mn_train_data data = { .train = corpus };
    parse(&root, "\"train\": \"somewhere.txt\"");
    assert_fails(mn_trainer_create_from(&t, &root, &data, context), MN_ERR_ARGUMENT, "data.train",
                 "given");
    assert_null(t);
    mn_json_free(&root);
    mn_corpus_destroy(corpus);
}

static int start(void **state) {
    return mn_context_create(&context, NULL) == MN_OK ? make_folder(state) : -1;
}

static int end(void **state) {
    mn_context_destroy(context);
    return remove_folder(state);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_and_files_give_the_same_numbers),
        cmocka_unit_test(one_source_of_data_is_needed),
    };
    return cmocka_run_group_tests_name("trainers on given data", tests, start, end);
}
