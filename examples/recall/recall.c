/* recall.c - a gated delta memory as a dictionary: store pairs, overwrite one, ask for all.
 *
 * Eight random unit keys hold eight one-hot values; then key 3 gets a new value. The delta rule
 * corrects what the memory predicted, so the old value is gone; a plain sum keeps both. */
#include <math.h>
#include <mneme.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_PAIRS = 8, T = N_PAIRS + 1, K = 64, V = 10, REWRITTEN = 3, NEW_VALUE = 9 };

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, mn_last_error());
    exit(1);
}

/* Rows of length one from a small congruential generator. */
static void random_keys(float *keys) {
    unsigned state = 1;
    for (int row = 0; row < N_PAIRS; row++) {
        double sum = 0;
        for (int i = 0; i < K; i++) {
            state = state * 1664525u + 1013904223u;
            keys[row * K + i] = (float)(state >> 8) / (float)(1 << 23) - 1.0f;
            sum += (double)keys[row * K + i] * keys[row * K + i];
        }
        for (int i = 0; i < K; i++) keys[row * K + i] /= (float)sqrt(sum);
    }
}

/* Reads the memory with every key; counts values that come back as the largest entry. */
static int print_recall(const char *name, const float *state, const float *keys) {
    int n_right = 0;
    printf("%-10s", name);
    for (int row = 0; row < N_PAIRS; row++) {
        int best = 0;
        double top = -1e9;
        for (int j = 0; j < V; j++) {
            double sum = 0;
            for (int i = 0; i < K; i++) sum += (double)state[i * V + j] * keys[row * K + i];
            if (sum > top) top = sum, best = j;
        }
        n_right += best == (row == REWRITTEN ? NEW_VALUE : row);
        printf("  %d:%.2f", best, top);
    }
    printf("   %d of %d right\n", n_right, N_PAIRS);
    return n_right;
}

int main(void) {
    static float keys[T * K], values[T * V], q[T * K], beta[T], delta[K * V], sum[K * V];
    random_keys(keys);
    for (int i = 0; i < K; i++) keys[N_PAIRS * K + i] = keys[REWRITTEN * K + i];
    for (int t = 0; t < T; t++) {
        values[t * V + (t < N_PAIRS ? t : NEW_VALUE)] = 1.0f;
        beta[t] = 1.0f;
    }
    mn_context *context = NULL;
    if (mn_context_create(&context, NULL) != MN_OK) fail("context");
    const mn_call call = { .dtype = MN_F32, .B = 1, .T = T, .H = 1, .K = K, .V = V };
    const mn_delta_net_args delta_net = { .call = call, .scale = 1.0, .q = { q }, .k = { keys },
                                          .v = { values }, .beta = { beta }, .state = { delta } };
    const mn_additive_args additive = { .call = call, .scale = 1.0, .q = { q }, .k = { keys },
                                        .v = { values }, .state = { sum } };
    if (mn_op_delta_net(context, &delta_net) != MN_OK) fail("delta_net");
    if (mn_op_additive(context, &additive) != MN_OK) fail("additive");
    printf("mneme %s on %s; value:strength for each key, key %d was given value %d last\n",
           mn_version(), mn_context_target(context), REWRITTEN, NEW_VALUE);
    const int n_right = print_recall("delta rule", delta, keys);
    print_recall("sum", sum, keys);
    mn_context_destroy(context);
    return n_right == N_PAIRS ? 0 : 1;
}
