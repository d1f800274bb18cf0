/* test_batch.c - many sessions stepped at once have the bits of each stepped alone: every kind of
 * layer, sessions that join and leave, positions that differ, sessions that have read nothing. On a
 * GPU, where there is one, alone means in a batch by itself.
 *
 *   test_batch [WORD...]    layers whose names have one of these words, without one all */
// labels: sanitize threads
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/util.h"
#include "infer/session.h"
#include "model/checkpoint.h"
#include "support/check.h"
#include "support/model_case.h"

enum { VOCABULARY = 23, SESSIONS = 37, STEPS = 9, PROMPT = 48 };

typedef struct fixture {
    mn_context *context;
    mn_model *model;
    mn_batch *batch, *solo;    // solo: of those alone on a GPU; NULL: they step by themselves
    int32_t tokens[SESSIONS][PROMPT + STEPS];
    mn_session *alone[SESSIONS], *together[SESSIONS];
    bool belief;                   // they tell variances
} fixture;

static void need(mn_status st) {
    if (st != MN_OK) check_fatal("%s", mn_last_error());
}

/* Session i has read i tokens: the first none, the last ones more than one block of a product. */
static void begin(fixture *f, const mn_context_options *options, const mn_session_options *given,
                  const char *json) {
    const mn_session_options how = *given;
    memset(f, 0, sizeof *f);
    f->belief = how.belief;
    need(mn_context_create(&f->context, options));
    need(model_case_create(&f->model, json, MN_F32, 0.2, 3));
    need(mn_batch_create(&f->batch, f->context, f->model));
    for (int i = 0; i < SESSIONS; i++) {
        model_case_tokens(f->tokens[i], PROMPT + STEPS, VOCABULARY, 100 + (uint64_t)i);
        need(mn_session_create(&f->alone[i], f->context, f->model, &how));
        need(mn_session_create(&f->together[i], f->context, f->model, &how));
        need(mn_session_feed(f->alone[i], f->tokens[i], i));
        need(mn_session_feed(f->together[i], f->tokens[i], i));
    }
}

static void start(fixture *f, const char *target, int threads, const char *json) {
    const mn_context_options options = { .n_threads = threads, .target = target };
    const mn_session_options how = { .belief = true, .prefill_chunk = 16 };
    begin(f, &options, &how, json);
}

/* Session i alone reads a token. */
static mn_status step_alone(fixture *f, int i, int32_t token) {
    return f->solo ? mn_batch_step(f->solo, &f->alone[i], &token, 1)
                   : mn_session_step(f->alone[i], token);
}

static void finish(fixture *f) {
    for (int i = 0; i < SESSIONS; i++) {
        mn_session_destroy(f->alone[i]);
        mn_session_destroy(f->together[i]);
    }
    mn_batch_destroy(f->batch);
    mn_batch_destroy(f->solo);
    mn_model_destroy(f->model);
    mn_context_destroy(f->context);
}

/* Whether session i takes part in step t: company changes from step to step. */
static bool joins(int i, int t) {
    return t == 0 || t == STEPS - 1 || (i * 7 + t * 3) % 5 != 0;
}

static bool same(const float *a, const float *b, int64_t n) {
    return n == 0 || memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

static void check_same(const char *what, const fixture *f, int i, int t) {
    const mn_session *a = f->alone[i], *b = f->together[i];
    CHECK(memcmp(mn_session_logits(a), mn_session_logits(b), VOCABULARY * sizeof(float)) == 0,
          "%s, session %d, step %d: other logits than alone", what, i, t);
    CHECK(mn_session_position(a) == mn_session_position(b), "%s: position", what);
    for (int k = 0; k < mn_session_beliefs(a); k++) {
        const float *va, *vb;
        const int64_t n = mn_session_belief(&va, a, k), m = mn_session_belief(&vb, b, k);
        CHECK(n == m && n == (f->belief ? 1 : 0) && same(va, vb, n),
              "%s, session %d, step %d: variance %d of %lld and %lld", what, i, t, k,
              (long long)n, (long long)m);
    }
}

static void steps(const char *what, fixture *f) {
    for (int t = 0; t < STEPS; t++) {
        mn_session *some[SESSIONS];
        int32_t tokens[SESSIONS];
        int64_t n = 0;
        for (int i = 0; i < SESSIONS; i++) {
            if (!joins(i, t)) continue;
            some[n] = f->together[i];
            tokens[n++] = f->tokens[i][PROMPT + t];
            need(step_alone(f, i, f->tokens[i][PROMPT + t]));
        }
        need(mn_batch_step(f->batch, some, tokens, n));
        for (int i = 0; i < SESSIONS; i++) {
            if (joins(i, t)) check_same(what, f, i, t);
        }
    }
}

/* Where nobody needs it soon: on the host, in a file, or where it was made. */
static void put_away(mn_snapshot *snapshot, int i, int twin) {
    const char *folder = getenv("TMPDIR");
    char path[512];
    snprintf(path, sizeof path, "%s/mneme_test_batch_%ld_%d_%d.state", folder ? folder : "/tmp",
             (long)getpid(), i, twin);
    if (i % 4 == 0) need(mn_snapshot_to_host(snapshot));
    if (i % 8 == 0 || i % 8 == 1) need(mn_snapshot_to_file(snapshot, NULL, path));
}

/* Sessions that were in a batch are looked at, copied, put back and stepped by themselves, their
 * twins too; a fork goes on as the session does. */
static void between(const char *what, fixture *f) {
    for (int i = 0; i < SESSIONS; i += 3) {
        mn_session *const twins[] = { f->alone[i], f->together[i] };
        const int32_t token = f->tokens[i][i % PROMPT];
        for (int k = 0; k < 2; k++) {
            mn_snapshot *snapshot = NULL;
            mn_session *fork = NULL;
            if (i % 2 == 0) need(mn_session_step(twins[k], token));
            need(mn_session_snapshot(&snapshot, twins[k]));
            need(mn_session_fork(&fork, twins[k]));
            need(mn_session_step(twins[k], token));
            need(mn_session_step(fork, token));
            CHECK(memcmp(mn_session_logits(fork), mn_session_logits(twins[k]),
                         VOCABULARY * sizeof(float)) == 0, "%s, session %d: a fork", what, i);
            put_away(snapshot, i, k);
            if (i % 4 < 2) need(mn_session_restore(twins[k], snapshot));
            mn_snapshot_destroy(snapshot);
            mn_session_destroy(fork);
        }
        CHECK(memcmp(mn_session_logits(twins[0]), mn_session_logits(twins[1]),
                     VOCABULARY * sizeof(float)) == 0, "%s, session %d: put back", what, i);
    }
}

/* Each session reads another number of tokens, all in one pass, and goes on. */
static void feeds(const char *what, fixture *f) {
    const int32_t *tokens[SESSIONS];
    int64_t counts[SESSIONS];
    for (int i = 0; i < SESSIONS; i++) {
        tokens[i] = f->tokens[i];
        counts[i] = 2 + i * 5 % 14;
        need(mn_session_feed(f->alone[i], tokens[i], counts[i]));
    }
    need(mn_batch_feed(f->batch, f->together, tokens, counts, SESSIONS));
    for (int i = 0; i < SESSIONS; i++) {
        const mn_session *a = f->alone[i], *b = f->together[i];
        CHECK(memcmp(mn_session_logits(a), mn_session_logits(b), VOCABULARY * sizeof(float)) == 0,
              "%s, session %d: %lld tokens fed otherwise", what, i, (long long)counts[i]);
        for (int k = 0; k < mn_session_beliefs(a); k++) {
            const float *va, *vb;
            const int64_t n = mn_session_belief(&va, a, k), m = mn_session_belief(&vb, b, k);
            CHECK(n == m && n == (f->belief ? counts[i] : 0) &&
                  same(va, vb, n), "%s, session %d: variances of a feed", what, i);
        }
    }
    for (int i = 0; i < SESSIONS; i++) {
        need(mn_session_feed(f->alone[i], f->tokens[i], 3));
        need(mn_session_feed(f->together[i], f->tokens[i], 3));
        CHECK(memcmp(mn_session_logits(f->alone[i]), mn_session_logits(f->together[i]),
                     VOCABULARY * sizeof(float)) == 0, "%s, session %d: goes on otherwise", what,
              i);
    }
}

/* Variances are told by single steps only. */
static void without_belief(fixture *f) {
    mn_session **both[] = { &f->alone[0], &f->together[0] };
    const mn_session_options how = { .prefill_chunk = 16 };
    for (int i = 0; i < 2; i++) {
        mn_session_destroy(*both[i]);
        need(mn_session_create(both[i], f->context, f->model, &how));
    }
}

/* Session 0 steps alone; its twin expects tokens that come, that come in part, or that do not. */
static void expects(const char *what, fixture *f) {
    mn_session *a = f->alone[0], *b = f->together[0];
    int32_t guesses[5];
    int64_t at = 0;
    const int32_t *tokens = f->tokens[1];
    need(mn_session_reset(a));
    need(mn_session_reset(b));
    for (int round = 0; at < PROMPT; round++) {
        for (int k = 0; k < 5; k++) {
            const int32_t right = tokens[mn_min(at + 1 + k, PROMPT)];
            guesses[k] = k < round % 6 ? right : (right + 1) % VOCABULARY;
        }
        if (!mn_session_is_ahead(b)) need(mn_session_expect(b, guesses, 1 + round % 5));
        for (int k = 0; k <= round % 4 && at < PROMPT; k++, at++) {
            need(mn_session_step(a, tokens[at]));
            need(mn_session_step(b, tokens[at]));
            CHECK(memcmp(mn_session_logits(a), mn_session_logits(b),
                         VOCABULARY * sizeof(float)) == 0, "%s: token %lld after guesses", what,
                  (long long)at);
        }
        if (round % 3 == 2) {    // whatever else looks at the state finds what was stepped
            CHECK(mn_session_bytes(a) == mn_session_bytes(b), "%s: bytes", what);
            mn_session *fork = NULL;
            need(mn_session_fork(&fork, b));
            CHECK(mn_session_position(fork) == at, "%s: a fork's position", what);
            mn_session_destroy(fork);
        }
    }
    need(mn_session_feed(a, tokens, 4));
    need(mn_session_feed(b, tokens, 4));
    CHECK(memcmp(mn_session_logits(a), mn_session_logits(b), VOCABULARY * sizeof(float)) == 0,
          "%s: goes on otherwise after guesses", what);
}

static const struct {
    const char *layer, *options;
} rows[] = {
#define LAYER_TEST(layer, options) { layer, options },
#include "layers/all.def"
#undef LAYER_TEST
};

static char **words;

static bool is_wanted(size_t row) {
    bool wanted = !words[0];
    for (int i = 0; words[i]; i++) wanted = wanted || strstr(rows[row].layer, words[i]);
    return wanted;
}

/* The options of the row, laid into a model of two such layers. */
static void config_of(char *json, size_t size, size_t row) {
    const char *options = rows[row].options + 1;
    snprintf(json, size, "{\"layers\": \"%s, %s\", \"hidden_size\": 8, \"vocab_size\": %d, "
             "\"max_position_embeddings\": 96, \"intermediate_size\": 12%s%s", rows[row].layer,
             rows[row].layer, VOCABULARY, *options == '}' ? "" : ", ", options);
    char *block = strstr(json, "\"block_size\": 1");    // 1x: not room for the tokens of this test
    if (block) block[strlen("\"block_size\": ")] = '9';
}

static void every_layer_has_the_bits_of_steps_alone(void **context) {
    (void)context;
    char json[1024];
    for (size_t row = 0; row < MN_COUNTOF(rows); row++) {
        fixture f;
        if (!is_wanted(row)) continue;
        config_of(json, sizeof json, row);
        start(&f, NULL, 2, json);
        feeds(json, &f);
        steps(json, &f);
        without_belief(&f);
        expects(json, &f);
        finish(&f);
    }
    check_done();
}

/* Widths that are no multiples of a vector or of a block of a product, hybrids, softcap, one to
 * three threads, every target that is here. */
static void targets_and_threads(void **state) {
    (void)state;
    static const char *const targets[] = { "ref", "avx2", "avx512", "neon" };
    static const char *const layers[] = { "attention, gdn, kla", "bayes, mlstm, mamba2+ccq",
                                          "retnet, palimpsa, hyperglu" };
    char json[512];
    for (size_t t = 0; t < MN_COUNTOF(targets); t++) {
        mn_context *context = NULL;
        const mn_context_options there = { .target = targets[t] };
        const bool here = mn_context_create(&context, &there) == MN_OK;
        mn_context_destroy(context);
        for (int i = 0; here && i < (int)MN_COUNTOF(layers); i++) {
            snprintf(json, sizeof json, "{\"layers\": \"%s\", \"hidden_size\": 40, "
                     "\"vocab_size\": %d, \"max_position_embeddings\": 96, "
                     "\"intermediate_size\": 100, \"logit_softcap\": 20}", layers[i], VOCABULARY);
            fixture f;
            start(&f, targets[t], 1 + i, json);
            steps(layers[i], &f);
            between(layers[i], &f);
            feeds(layers[i], &f);
            without_belief(&f);
            expects(layers[i], &f);
            finish(&f);
        }
    }
    check_done();
}

static void refusals_change_nothing(void **context) {
    (void)context;
    fixture f;
    start(&f, NULL, 1, "{\"layers\": \"gdn\", \"hidden_size\": 8, \"vocab_size\": 23}");
    mn_session *twice[] = { f.together[1], f.together[2], f.together[1] };
    const int32_t fine[] = { 1, 2, 3 }, outside[] = { 1, VOCABULARY, 3 };
    mn_session *three[] = { f.together[1], f.together[2], f.together[3] };
    CHECK(mn_batch_step(f.batch, twice, fine, 3) == MN_ERR_ARGUMENT, "a session twice");
    CHECK(strstr(mn_last_error(), "twice") != NULL, "%s", mn_last_error());
    CHECK(mn_batch_step(f.batch, three, outside, 3) == MN_ERR_ARGUMENT, "a token outside");
    CHECK(mn_batch_step(f.batch, three, NULL, 3) == MN_ERR_ARGUMENT, "no tokens");
    CHECK(mn_batch_step(f.batch, three, fine, -1) == MN_ERR_ARGUMENT, "less than none");
    CHECK(mn_batch_step(f.batch, NULL, NULL, 0) == MN_OK, "none: %s", mn_last_error());
    const int32_t *few[] = { fine, fine, fine };
    const int64_t one[] = { 2, 1, 2 };
    CHECK(mn_batch_feed(f.batch, three, few, one, 3) == MN_ERR_ARGUMENT, "one token to feed");
    for (int i = 1; i < 4; i++) CHECK(mn_session_position(f.together[i]) == i, "position");
    CHECK(mn_batch_step(f.batch, three, fine, 3) == MN_OK, "%s", mn_last_error());
    CHECK(mn_batch_create(NULL, f.context, f.model) == MN_ERR_ARGUMENT, "nowhere to put it");
    finish(&f);
    check_done();
}

/* ---- on a GPU -------------------------------------------------------------------------------- */

static bool has_gpu(void) {
    mn_context *gpu = NULL;
    const mn_context_options there = { .n_threads = 2, .device = "cuda" };
    const bool here = mn_context_create(&gpu, &there) == MN_OK;
    if (!here) printf("skipped: %s\n", mn_last_error());
    mn_context_destroy(gpu);
    return here;
}

static void start_on_gpu(fixture *f, mn_dtype dtype, bool belief, const char *json) {
    const mn_context_options options = { .n_threads = 2, .device = "cuda" };
    const mn_session_options how = { .belief = belief, .prefill_chunk = 16, .dtype = dtype };
    begin(f, &options, &how, json);
    need(mn_batch_create(&f->solo, f->context, f->model));
}

/* The likeliest token is that of the logits. */
static void likeliest(const char *what, fixture *f) {
    for (int i = 0; i < SESSIONS; i++) {
        const mn_sampling greedy = { 0 };
        int32_t picked, sampled;
        const bool known = mn_session_likeliest(&picked, f->together[i], VOCABULARY);
        need(mn_session_sample(&sampled, f->together[i], &greedy, NULL, 0));
        CHECK(!known || picked == sampled, "%s, session %d: token %d instead of %d", what, i,
              (int)picked, (int)sampled);
    }
}

static void company_on_a_gpu(const char *json, mn_dtype dtype, bool belief) {
    fixture f;
    const int before = check_next();
    start_on_gpu(&f, dtype, belief, json);
    steps(json, &f);
    likeliest(json, &f);
    steps(json, &f);
    likeliest(json, &f);
    between(json, &f);
    steps(json, &f);
    feeds(json, &f);
    steps(json, &f);
    finish(&f);
    if (check_next() > before) printf("%d checks failed: %s\n", check_next() - before, json);
}

static void every_layer_on_a_gpu(void **context) {
    (void)context;
    if (!has_gpu()) return;
    char json[1024];
    for (size_t row = 0; row < MN_COUNTOF(rows); row++) {
        if (!is_wanted(row)) continue;
        config_of(json, sizeof json, row);
        printf("%s\n", rows[row].layer);
        fflush(stdout);
        company_on_a_gpu(json, row % 2 ? MN_BF16 : MN_F32, row % 3 == 0);
    }
    check_done();
}

static void widths_on_a_gpu(void **context) {
    (void)context;
    if (!has_gpu()) return;
    static const char *const sizes[] = {
        "\"layers\": \"gdn\", \"num_heads\": 2, \"head_dim\": 256, \"expand_v\": 1, "
        "\"hidden_size\": 512, \"intermediate_size\": 1408",
        "\"layers\": \"gdn, kla\", \"hidden_size\": 264, \"intermediate_size\": 88",
        "\"layers\": \"gla, kda, gdn2\", \"num_heads\": 2, \"hidden_size\": 128, "
        "\"intermediate_size\": 360",
        "\"layers\": \"attention, gdn, palimpsa\", \"hidden_size\": 128, "
        "\"intermediate_size\": 344, \"logit_softcap\": 20",
        "\"layers\": \"bayes, mamba2\", \"hidden_size\": 60, \"intermediate_size\": 100",
        "\"layers\": \"gdn\", \"hidden_size\": 64, \"num_experts\": 4, "
        "\"num_experts_per_tok\": 2, \"moe_intermediate_size\": 48",
    };
    char json[512];
    for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
        snprintf(json, sizeof json, "{%s, \"vocab_size\": %d, \"max_position_embeddings\": 128}",
                 sizes[i], VOCABULARY);
        company_on_a_gpu(json, MN_F32, false);
        company_on_a_gpu(json, MN_BF16, false);
    }
    check_done();
}

/* More rows than a tile of a product has, at every size of a step on the way. */
static void many_on_a_gpu(void **context) {
    (void)context;
    enum { MANY = 150 };
    if (!has_gpu()) return;
    fixture f;
    start_on_gpu(&f, MN_BF16, false, "{\"layers\": \"gdn\", \"hidden_size\": 128, "
                 "\"vocab_size\": 23, \"num_hidden_layers\": 2}");
    static mn_session *many[MANY];
    static float logits[MANY][VOCABULARY];
    const mn_session_options how = { .dtype = MN_BF16 };
    for (int i = 0; i < MANY; i++) {
        const int32_t token = i % VOCABULARY;
        need(mn_session_create(&many[i], f.context, f.model, &how));
        need(mn_session_feed(many[i], f.tokens[i % SESSIONS], 2 + i % 7));
        need(mn_batch_step(f.solo, &many[i], &token, 1));
        memcpy(logits[i], mn_session_logits(many[i]), sizeof logits[i]);
    }
    for (int n = 1; n <= MANY; n += n < 12 ? 1 : 23) {
        int32_t tokens[MANY];
        for (int i = 0; i < n; i++) {
            need(mn_session_reset(many[i]));
            need(mn_session_feed(many[i], f.tokens[i % SESSIONS], 2 + i % 7));
            tokens[i] = i % VOCABULARY;
        }
        need(mn_batch_step(f.batch, many, tokens, n));
        for (int i = 0; i < n; i++) {
            CHECK(memcmp(mn_session_logits(many[i]), logits[i], sizeof logits[i]) == 0,
                  "session %d of %d: other logits than alone", i, n);
        }
    }
    for (int i = 0; i < MANY; i++) mn_session_destroy(many[i]);
    finish(&f);
    check_done();
}

int main(int argc, char **argv) {
    words = argv + (argc > 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_on_a_gpu),
        cmocka_unit_test(widths_on_a_gpu),
        cmocka_unit_test(every_layer_on_a_gpu),
        cmocka_unit_test(every_layer_has_the_bits_of_steps_alone),
        cmocka_unit_test(targets_and_threads),
        cmocka_unit_test(refusals_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
