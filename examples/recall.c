/* recall.c - a key-value memory of fixed size, kept by the gated delta rule.
 *
 *   S = S + beta k (v - S'k)'      written with beta = 1, read with beta = 0:  o = S'q
 *
 * Words become random directions. Writing a pair corrects what the memory answers to that key and
 * leaves other keys nearly as they were, so a fact can be replaced without touching the rest.
 *
 *   cc recall.c $(pkg-config --cflags --libs mneme) -lm -o recall && ./recall */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <mneme.h>

enum { WIDTH = 64, MAX_PAIRS = 8 };

typedef struct pair {
    const char *key, *value;
} pair;

/* The memory: one head, one matrix, updated in place. */
typedef struct memory {
    mn_context *context;
    float state[WIDTH * WIDTH];
} memory;

/* A direction for a word: the same word always gives the same one. */
static void direction(float *out, const char *word) {
    uint64_t x = 14695981039346656037u;
    for (; *word; word++) x = (x ^ (unsigned char)*word) * 1099511628211u;
    float sum = 0.0f;
    for (int i = 0; i < WIDTH; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        out[i] = (float)(x >> 40) / 8388608.0f - 1.0f;
        sum += out[i] * out[i];
    }
    for (int i = 0; i < WIDTH; i++) out[i] /= sqrtf(sum);
}

/* Presents `count` tokens to the memory: with strength 1 it learns them, with 0 it only answers. */
static mn_status present(memory *m, float *answers, const float *keys, const float *values,
                         int64_t count, float strength) {
    float beta[MAX_PAIRS], log_decay[MAX_PAIRS];
    for (int64_t t = 0; t < count; t++) {
        beta[t] = strength;
        log_decay[t] = 0.0f;    // below 0 everything fades a little with each token
    }
    const mn_delta_net_args args = {
        .call = { .dtype = MN_F32, .B = 1, .T = count, .H = 1, .K = WIDTH, .V = WIDTH },
        .scale = 1.0, .decay = MN_DECAY_TOKEN,
        .q.data = keys, .k.data = keys, .v.data = values, .beta.data = beta, .g.data = log_decay,
        .state0.data = m->state, .o.data = answers, .state.data = m->state,
    };
    return mn_op_delta_net(m->context, &args);
}

static mn_status store(memory *m, const pair *pairs, int count) {
    float keys[MAX_PAIRS * WIDTH], values[MAX_PAIRS * WIDTH];
    for (int i = 0; i < count; i++) {
        direction(keys + i * WIDTH, pairs[i].key);
        direction(values + i * WIDTH, pairs[i].value);
        printf("store   %-8s %s\n", pairs[i].key, pairs[i].value);
    }
    return present(m, NULL, keys, values, count, 1.0f);
}

static double likeness(const float *a, const float *b) {
    double ab = 0.0, aa = 0.0, bb = 0.0;
    for (int i = 0; i < WIDTH; i++) {
        ab += (double)a[i] * b[i];
        aa += (double)a[i] * a[i];
        bb += (double)b[i] * b[i];
    }
    return ab / sqrt(aa * bb);
}

/* Asks for each key and prints the word nearest to the answer; counts those that are not expected. */
static mn_status recall(memory *m, const pair *expected, int count, int *n_wrong) {
    float keys[MAX_PAIRS * WIDTH], values[MAX_PAIRS * WIDTH] = { 0 }, answers[MAX_PAIRS * WIDTH];
    for (int i = 0; i < count; i++) direction(keys + i * WIDTH, expected[i].key);
    const mn_status st = present(m, answers, keys, values, count, 0.0f);
    if (st != MN_OK) return st;
    static const char *const words[] = { "Paris", "Rome", "Oslo", "Lima", "Kyoto", "Tokyo" };
    for (int i = 0; i < count; i++) {
        const char *best = "nothing";
        double most = 0.0;
        for (size_t w = 0; w < sizeof words / sizeof *words; w++) {
            float word[WIDTH];
            direction(word, words[w]);
            const double like = likeness(answers + i * WIDTH, word);
            if (like > most) most = like, best = words[w];
        }
        printf("recall  %-8s %-8s %.2f\n", expected[i].key, best, most);
        *n_wrong += strcmp(best, expected[i].value) != 0;
    }
    return MN_OK;
}

int main(void) {
    static memory m;
    pair facts[] = { { "France", "Paris" }, { "Italy", "Rome" }, { "Norway", "Oslo" },
                     { "Peru", "Lima" }, { "Japan", "Kyoto" } };
    const int count = sizeof facts / sizeof *facts;
    int n_wrong = 0;
    mn_status st = mn_context_create(&m.context, NULL);
    if (st == MN_OK) st = store(&m, facts, count);
    if (st == MN_OK) st = recall(&m, facts, count, &n_wrong);
    facts[4].value = "Tokyo";    // the court moved
    if (st == MN_OK) st = store(&m, &facts[4], 1);
    if (st == MN_OK) st = recall(&m, facts, count, &n_wrong);
    mn_context_destroy(m.context);
    if (st != MN_OK) fprintf(stderr, "recall: %s: %s\n", mn_status_name(st), mn_last_error());
    return st != MN_OK || n_wrong > 0;
}
