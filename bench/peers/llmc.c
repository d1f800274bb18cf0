/* llmc.c - training steps of llm.c's GPT on the processor: its own forward, backward and update.
 *
 *   llmc_bench CHECKPOINT [steps [batch [context [layers [width [heads [vocabulary]]]]]]]
 *
 * Writes a checkpoint in llm.c's format (version 3) with random weights, has llm.c read it and
 * times steps on random tokens. Compiled by llmc.sh with the train_gpt2.c of a checkout, whose main
 * is left out by TESTING. Prints tokens per second: the median step, and the fastest. */
#define TESTING
#include "train_gpt2.c"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_STEPS = 1000, HEADER = 256, MAGIC = 20240326, VERSION = 3 };

static uint64_t random_state = 1;

static uint32_t random_bits(void) {    // splitmix64
    uint64_t x = random_state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (uint32_t)(x >> 32);
}

/* Twelve uniform numbers: near enough to normal, standard deviation 0.02. */
static float small_number(void) {
    double sum = -6.0;
    for (int i = 0; i < 12; i++) sum += random_bits() / 4294967296.0;
    return (float)(0.02 * sum);
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void write_checkpoint(const char *path, const GPT2Config *config) {
    const int header[HEADER] = { MAGIC, VERSION, config->max_seq_len, config->vocab_size,
                                 config->num_layers, config->num_heads, config->channels,
                                 config->padded_vocab_size };
    size_t sizes[NUM_PARAMETER_TENSORS], total = 0;
    fill_in_parameter_sizes(sizes, *config);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) total += sizes[i];
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(header, sizeof header, 1, file) != 1) {
        fprintf(stderr, "%s cannot be written\n", path);
        exit(2);
    }
    for (size_t i = 0; i < total; i++) {
        const float x = small_number();
        if (fwrite(&x, sizeof x, 1, file) != 1) exit(2);
    }
    if (fclose(file) != 0) exit(2);
}

static void fill_with_ones(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = 1.0f;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    int sizes[] = { 20, 4, 256, 6, 384, 6, 65 };
    enum { N_SIZES = sizeof sizes / sizeof *sizes };
    for (int i = 0; i < N_SIZES && i + 2 < argc; i++) sizes[i] = atoi(argv[i + 2]);
    const int steps = sizes[0], B = sizes[1], T = sizes[2], V = sizes[6];
    const GPT2Config config = { .max_seq_len = T, .vocab_size = V, .padded_vocab_size = V,
                                .num_layers = sizes[3], .channels = sizes[4],
                                .num_heads = sizes[5] };
    if (argc < 2 || steps < 1 || steps > MAX_STEPS || B < 1 || T < 1 || V < 1) {
        fprintf(stderr, "usage: %s CHECKPOINT [steps [batch [context [layers [width [heads "
                        "[vocabulary]]]]]]]\n", argv[0]);
        return 2;
    }
    write_checkpoint(argv[1], &config);
    GPT2 model;
    gpt2_build_from_checkpoint(&model, argv[1]);
    const size_t C = (size_t)config.channels, L = (size_t)config.num_layers;
    fill_with_ones(model.params.ln1w, L * C);
    fill_with_ones(model.params.ln2w, L * C);
    fill_with_ones(model.params.lnfw, C);

    int *tokens = malloc(((size_t)B * (size_t)T + 1) * sizeof *tokens);
    double step_s[MAX_STEPS];
    if (!tokens) return 2;
    for (int step = -2; step < steps; step++) {    // two to warm up
        for (int i = 0; i <= B * T; i++) tokens[i] = (int)(random_bits() % (uint32_t)V);
        const double start = seconds_now();
        gpt2_forward(&model, tokens, tokens + 1, (size_t)B, (size_t)T);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        gpt2_update(&model, 3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, step + 3);
        if (step >= 0) step_s[step] = seconds_now() - start;
    }
    printf("loss %.4f after %d steps; ln %d is %.4f\n", (double)model.mean_loss, steps, V, log(V));
    qsort(step_s, (size_t)steps, sizeof *step_s, by_value);
    const double n = (double)B * T;
    printf("llm.c: %.0f tokens/s (median of %d steps), %.0f (fastest)\n", n / step_s[steps / 2],
           steps, n / step_s[0]);
    free(tokens);
    gpt2_free(&model);
    return 0;
}
