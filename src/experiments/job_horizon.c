/* job_horizon.c - a job that asks a memory, without any training, how far back it remembers.
 *
 *   memory    palimpsa, mamba2 or gdn; all fade by a = 1 - 1 / window a token
 *   window    N: tokens that a posterior cut off at N would hold; 0: nothing fades
 *   prior     importance before the first token (palimpsa)
 *   keys, classes, tokens, streams, seed
 *
 * A stream writes a random unit key with a one-hot label at each token. In its second half, at
 * sixteen places, every key of the last tokens / 2 is asked, and the largest entry of what is read
 * is the answer. With r(d) the part of right answers d tokens back, less chance, over 1 - chance:
 *
 *   remembered   sum_d r(d), keys that are still there
 *   half         the first d whose neighbourhood d .. 2 d has r below a half
 *   newest       r(0)
 *   recall       r over d .. 2 d - 1, for powers of two
 *   importance   mean precision of a cell at the end (palimpsa) */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"
#include "experiments/job_internal.h"
#include "io/json_write.h"
#include "definition/mixer.h"

enum { PLACES = 16, MOST_TOKENS = 65536, MOST_WIDTH = 512 };

typedef struct settings {
    const char *memory;
    double window, prior;
    int64_t keys, labels, tokens, streams, seed;
} settings;

static const struct {
    const char *name, *mixer;
} memories[] = { { "palimpsa", "palimpsa_paper" }, { "mamba2", "mamba2" }, { "gdn", "gdn" } };

static const char *mixer_of(const char *memory) {
    for (size_t i = 0; i < MN_COUNTOF(memories); i++) {
        if (strcmp(memories[i].name, memory) == 0) return memories[i].mixer;
    }
    return NULL;
}

static mn_status read_settings(settings *s, const mn_json *job) {
    static const char *const keys[] = { "kind", "memory", "window", "prior", "keys", "classes",
                                        "tokens", "streams", "seed", "labels", "steps_at_most" };
    *s = (settings){ .prior = 1.0, .keys = 32, .labels = 32, .tokens = 1024, .streams = 8 };
    mn_status st = mn_json_unknown_key(job, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_get_text(&s->memory, job, "memory");
    if (st == MN_OK) st = mn_json_opt_f64(&s->window, job, "window");
    if (st == MN_OK) st = mn_json_opt_f64(&s->prior, job, "prior");
    if (st == MN_OK) st = mn_json_opt_i64(&s->keys, job, "keys");
    if (st == MN_OK) st = mn_json_opt_i64(&s->labels, job, "classes");
    if (st == MN_OK) st = mn_json_opt_i64(&s->tokens, job, "tokens");
    if (st == MN_OK) st = mn_json_opt_i64(&s->streams, job, "streams");
    if (st == MN_OK) st = mn_json_opt_i64(&s->seed, job, "seed");
    if (st != MN_OK) return st;
    if (!mixer_of(s->memory)) {
        return mn_json_fail(job, "there is no memory \"%s\"; palimpsa, mamba2, gdn", s->memory);
    }
    if (!(s->window == 0.0 || s->window >= 1.0) || !(s->prior > 0.0)) {
        return mn_json_fail(job, "window is 0 or at least 1, prior is positive");
    }
    if (s->keys < 1 || s->keys > MOST_WIDTH || s->labels < 2 || s->labels > MOST_WIDTH ||
        s->tokens < 2 * PLACES || s->tokens > MOST_TOKENS || s->streams < 1) {
        return mn_json_fail(job, "keys are 1 to %d, classes 2 to %d, tokens %d to %d, streams 1 or "
                            "more", MOST_WIDTH, MOST_WIDTH, 2 * PLACES, MOST_TOKENS);
    }
    return MN_OK;
}

static mn_status complete(mn_json *job) {
    settings s;
    const mn_status st = read_settings(&s, job);
    json_object_del(job->value, "steps_at_most");    // nothing is trained
    return st;
}

/* ---- one stream ------------------------------------------------------------------------------ */

typedef struct horizon {
    settings how;
    mn_mixer *mixer;
    double *keys;                    // (tokens,keys)
    double *value, *read, *ones;     // a number a label
    int32_t *labels;                 // of each token
    int64_t *right, *asked;          // by tokens back
    double importance;
} horizon;

static mn_status open_horizon(horizon *h) {
    const settings *s = &h->how;
    const mn_mixer_config config = { .size = { .H = 1, .K = s->keys, .V = s->labels } };
    const size_t n = (size_t)s->tokens;
    h->keys = calloc(n * (size_t)s->keys, sizeof *h->keys);
    h->value = calloc((size_t)s->labels, sizeof *h->value);
    h->read = calloc((size_t)s->labels, sizeof *h->read);
    h->ones = calloc((size_t)s->labels, sizeof *h->ones);
    h->labels = calloc(n, sizeof *h->labels);
    h->right = calloc(n, sizeof *h->right);
    h->asked = calloc(n, sizeof *h->asked);
    if (!h->keys || !h->value || !h->read || !h->ones || !h->labels || !h->right || !h->asked) {
        return mn_fail(MN_ERR_MEMORY, "no memory for a stream of %zu tokens", n);
    }
    for (int64_t i = 0; i < s->labels; i++) h->ones[i] = 1.0;
    return mn_mixer_create(&h->mixer, mixer_of(s->memory), &config);
}

static void close_horizon(horizon *h) {
    mn_mixer_destroy(h->mixer);
    free(h->keys);
    free(h->value);
    free(h->read);
    free(h->ones);
    free(h->labels);
    free(h->right);
    free(h->asked);
}

static void draw_stream(horizon *h, int64_t stream) {
    const settings *s = &h->how;
    const uint64_t seed = (uint64_t)s->seed, key_stream = 2 * (uint64_t)stream;
    for (int64_t t = 0; t < s->tokens; t++) {
        double *key = h->keys + t * s->keys, square = 0.0;
        for (int64_t i = 0; i < s->keys; i++) {
            key[i] = mn_rng_normal(seed, key_stream, (uint64_t)(t * s->keys + i));
            square += key[i] * key[i];
        }
        for (int64_t i = 0; i < s->keys; i++) key[i] /= sqrt(square);
        const double u = mn_rng_uniform(seed, key_stream + 1, (uint64_t)t);
        h->labels[t] = (int32_t)mn_min((int64_t)(u * (double)s->labels), s->labels - 1);
    }
}

/* What every token brings besides key and value. */
typedef struct gates {
    double g, window;
} gates;

static mn_token token_of(const horizon *h, const gates *of, const double *key) {
    return (mn_token){ .q = key, .k = key, .v = h->value, .g = &of->g, .beta = h->ones,
                       .gamma = h->ones, .n_mem = &of->window, .ip = &h->how.prior };
}

/* Asks for every key of the last half, the newest first. */
static mn_status ask(horizon *h, const gates *of, int64_t t) {
    const settings *s = &h->how;
    mn_status st = MN_OK;
    for (int64_t d = 0; st == MN_OK && d < s->tokens / 2; d++) {
        const mn_token token = token_of(h, of, h->keys + (t - d) * s->keys);
        int64_t best = 0;
        st = mn_mixer_read(h->mixer, &token, h->read, NULL);
        for (int64_t i = 1; i < s->labels; i++) best = h->read[i] > h->read[best] ? i : best;
        h->asked[d]++;
        h->right[d] += best == h->labels[t - d];
    }
    return st;
}

static mn_status run_stream(horizon *h, int64_t stream) {
    const settings *s = &h->how;
    const double window = s->window > 0.0 ? s->window : 1e300;
    const gates of = { fmax(log1p(-1.0 / window), -700.0), window };
    const int64_t apart = s->tokens / 2 / PLACES;
    mn_status st = MN_OK;
    draw_stream(h, stream);
    mn_mixer_reset(h->mixer);
    for (int64_t t = 0; st == MN_OK && t < s->tokens; t++) {
        const mn_token token = token_of(h, &of, h->keys + t * s->keys);
        memset(h->value, 0, (size_t)s->labels * sizeof *h->value);
        h->value[h->labels[t]] = 1.0;
        st = mn_mixer_step(h->mixer, &token, NULL, NULL);
        const int64_t left = s->tokens - 1 - t;
        if (st == MN_OK && left % apart == 0 && left / apart < PLACES) st = ask(h, &of, t);
    }
    int64_t count = 0;
    const double *importance = mn_mixer_part(h->mixer, "imp", &count);
    for (int64_t i = 0; importance && i < count; i++) {
        h->importance += importance[i] / (double)(count * s->streams);
    }
    return st;
}

/* ---- what came out --------------------------------------------------------------------------- */

/* r over first .. end - 1 tokens back. */
static double recall(const horizon *h, int64_t first, int64_t end) {
    const double chance = 1.0 / (double)h->how.labels;
    int64_t right = 0, asked = 0;
    for (int64_t d = first; d < mn_min(end, h->how.tokens / 2); d++) {
        right += h->right[d];
        asked += h->asked[d];
    }
    return asked == 0 ? NAN : ((double)right / (double)asked - chance) / (1.0 - chance);
}

static json_t *tell(const horizon *h) {
    const int64_t most = h->how.tokens / 2;
    double remembered = 0.0;
    int64_t half = 0;
    json_t *by_lag = json_object();
    for (int64_t d = 0; d < most; d++) remembered += recall(h, d, d + 1);
    while (half < most && recall(h, half, 2 * half + 1) >= 0.5) half++;
    for (int64_t d = 1; d < most; d *= 2) {
        char name[24];
        snprintf(name, sizeof name, "%lld", (long long)d);
        json_object_set_new(by_lag, name, mn_json_real(recall(h, d, 2 * d)));
    }
    return json_pack("{s:o, s:o, s:I, s:o, s:o, s:o}", "score", mn_json_real(remembered),
                     "remembered", mn_json_real(remembered), "half", (json_int_t)half, "newest",
                     mn_json_real(recall(h, 0, 1)), "recall", by_lag, "importance",
                     mn_json_real(h->importance));
}

static mn_status run(json_t **result, const mn_json *job, const mn_job_call *call) {
    horizon h = { 0 };
    mn_status st = read_settings(&h.how, job);
    if (st == MN_OK) st = open_horizon(&h);
    for (int64_t i = 0; st == MN_OK && i < h.how.streams; i++) {
        st = run_stream(&h, i);
        const mn_job_progress now = { i + 1, h.how.streams, NAN, NAN };
        if (call->watch) call->watch(call->context, &now);
    }
    if (st == MN_OK) *result = tell(&h);
    if (st == MN_OK && !*result) st = mn_fail(MN_ERR_MEMORY, "no memory for a result");
    close_horizon(&h);
    return st;
}

const mn_job_kind mn_job_horizon = { complete, run };
