/* transition_decay.c - S~ = diag(exp g) S, with one g per head for all time, per token, or per key
 * channel of each token.
 *
 * Every part of the belief fades alike; a part of more than one number has K rows. */
#include "definition/axes.h"

#include <math.h>

static void fade_whole(mn_head *head) {
    const double a = exp(head->in.g[0]);
    for (int n = 0; n < head->n_parts; n++) {
        for (int64_t i = 0; i < head->count[n]; i++) head->part[n][i] *= a;
    }
}

static void fade_channels(mn_head *head) {
    const int64_t K = head->size->K;
    for (int n = 0; n < head->n_parts; n++) {
        const int64_t width = head->count[n] / K;
        for (int64_t i = 0; i < K; i++) {
            const double a = exp(head->in.g[i]);
            for (int64_t j = 0; j < width; j++) head->part[n][i * width + j] *= a;
        }
    }
}

const mn_transition mn_transition_head = {
    .name = "decay per head",
    .equation = "S~ = e^g S, g (H)",
    .decay = MN_DECAY_HEAD,
    .predict = fade_whole,
};

const mn_transition mn_transition_token = {
    .name = "decay per token",
    .equation = "S~ = e^g S, g (T,H)",
    .decay = MN_DECAY_TOKEN,
    .predict = fade_whole,
};

const mn_transition mn_transition_channel = {
    .name = "decay per channel",
    .equation = "S~ = diag(e^g) S, g (T,H,K)",
    .decay = MN_DECAY_CHANNEL,
    .predict = fade_channels,
};
