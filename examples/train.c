/* train.c - training from C, with batches that the program makes itself: a model learns to repeat
 * what it has read, is saved half way, and goes on from there with the same bits.
 *
 *   cc train.c $(pkg-config --cflags --libs mneme) -o train && ./train FOLDER */
#include <stdio.h>
#include <stdlib.h>

#include <mneme.h>

enum { STEPS = 120, WORDS = 16 };

static void check(mn_status status) {
    if (status == MN_OK) return;
    fprintf(stderr, "train: %s\n", mn_last_error());
    exit(1);
}

/* Half a row of random words, then the same again: only the second half is asked for. */
static mn_status repeat(void *context, int64_t step, int64_t rows, int64_t length, int32_t *tokens,
                        int32_t *targets) {
    (void)context;
    for (int64_t r = 0; r < rows; r++) {
        uint64_t state = (uint64_t)(step * rows + r) * 0x9e3779b97f4a7c15u + 1;
        for (int64_t t = 0; t < length; t++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            int32_t *row = tokens + r * length;
            row[t] = t < length / 2 ? (int32_t)(state >> 33) % WORDS : row[t - length / 2];
        }
        for (int64_t t = 0; t < length; t++) {
            const int asked = t + 1 >= length / 2 && t + 1 < length;
            targets[r * length + t] = asked ? tokens[r * length + t + 1] : -100;
        }
    }
    return MN_OK;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: train FOLDER\n");
        return 2;
    }
    char config[1024];
    snprintf(config, sizeof config,
             "{\"model\": {\"layers\": \"gdn\", \"hidden_size\": 32, \"num_hidden_layers\": 2,"
             " \"vocab_size\": %d}, \"train\": {\"steps\": %d, \"batch\": 8, \"context\": 16,"
             " \"lr\": 0.01, \"warmup\": 10}, \"out\": \"%s\"}",
             WORDS, STEPS, argv[1]);
    const mn_train_batches batches = { .fill = repeat };
    mn_context *context;
    mn_train *run, *again;
    mn_train_result result = { 0 }, second = { 0 };
    check(mn_context_create(&context, NULL));
    check(mn_train_create_from(&run, context, config, &batches, &batches));
    while (mn_train_steps(run) < STEPS) {
        check(mn_train_step(run, &result));
        if (result.step % 20 == 0) {
            printf("step %3lld  loss %.4f\n", (long long)result.step, result.loss);
        }
        if (mn_train_steps(run) == STEPS / 2) check(mn_train_save(run));
    }
    double loss;
    check(mn_train_evaluate(run, &loss));
    printf("loss %.4f, validation %.4f\n", result.loss, loss);

    check(mn_train_create_from(&again, context, config, &batches, &batches));
    check(mn_train_resume(again, NULL));
    while (mn_train_steps(again) < STEPS) check(mn_train_step(again, &second));
    const int same = second.loss == result.loss;
    printf("resumed at step %d: %s\n", STEPS / 2, same ? "the same bits" : "other bits");
    mn_train_destroy(again);
    mn_train_destroy(run);
    mn_context_destroy(context);
    return same ? 0 : 1;
}
