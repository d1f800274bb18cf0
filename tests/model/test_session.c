/* test_session.c - sessions on models of every kind: token by token against all at once, chunks of
 * any size, scores, copies and files that give the same bits, states that are refused. */
// labels: sanitize
#include "infer/session.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "io/safetensors.h"
#include "model/checkpoint.h"
#include "support/check.h"
#include "support/folder.h"
#include "support/model_case.h"

enum { VOCABULARY = 17, T = 24 };

typedef struct fixture {
    mn_context *context;
    mn_model *model;
    int32_t tokens[T];
    float logits[T][VOCABULARY];     // of the full forward, after each token
    float variance[8][T];
    double score[T];                 // log probability of each token by those logits
} fixture;

/* The forward pass over all tokens, and what follows from it. */
static mn_status whole(fixture *f) {
    mn_tape *tape = NULL;
    float *variance = calloc(8 * T, sizeof *variance);
    mn_status st = mn_tape_create(&tape, f->context, MN_F32);
    if (st != MN_OK || !variance) return MN_ERR_MEMORY;
    const mn_model_input in = { .tokens = f->tokens, .B = 1, .T = T, .variance = variance };
    mn_tape_start(tape, MN_TAPE_FORWARD);
    mn_tensor *hidden = mn_model_hidden(f->model, tape, &in);
    const mn_tensor *logits = mn_model_logits(f->model, tape, hidden);
    st = mn_tape_status(tape);
    if (st == MN_OK) memcpy(f->logits, logits->data, sizeof f->logits);
    for (int i = 0; i < mn_model_beliefs(f->model); i++) {
        memcpy(f->variance[i], variance + i * T, sizeof f->variance[i]);
    }
    for (int t = 1; t < T; t++) {
        double sum = 0.0;
        for (int i = 0; i < VOCABULARY; i++) sum += exp((double)f->logits[t - 1][i]);
        f->score[t] = (double)f->logits[t - 1][f->tokens[t]] - log(sum);
    }
    free(variance);
    mn_tape_destroy(tape);
    return st;
}

static bool open(fixture *f, const char *layers) {
    char json[1024];
    const size_t n = strcspn(layers, "|");    // behind it: settings of the blocks
    snprintf(json, sizeof json, "{\"layers\": \"%.*s\", %s \"hidden_size\": 16, "
             "\"vocab_size\": %d, \"max_position_embeddings\": 32, \"intermediate_size\": 12, "
             "\"logit_softcap\": 20}",
             (int)n, layers, layers[n] ? layers + n + 1 : "", VOCABULARY);
    memset(f, 0, sizeof *f);
    mn_status st = model_case_create(&f->model, json, MN_F32, 0.2, 3);
    if (st == MN_OK) st = mn_context_create(&f->context, NULL);
    model_case_tokens(f->tokens, T, VOCABULARY, 9);
    if (st == MN_OK) st = whole(f);
    return CHECK(st == MN_OK, "%s: %s", layers, mn_last_error());
}

static void finish(fixture *f) {
    mn_model_destroy(f->model);
    mn_context_destroy(f->context);
}

static mn_session *start(const fixture *f, int64_t chunk) {
    mn_session *session = NULL;
    const mn_session_options options = { .prefill_chunk = chunk, .belief = true };
    const mn_status st = mn_session_create(&session, f->context, f->model, &options);
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    return session;
}

static void feed(mn_session *session, const int32_t *tokens, int64_t count) {
    const mn_status st = mn_session_feed(session, tokens, count);
    if (st != MN_OK) check_fatal("%s", mn_last_error());
}

/* The same numbers up to the float32 of other chunks: 1e-5 of the largest logit. */
static void check_logits(const char *what, const mn_session *session, const float *want) {
    const float *got = mn_session_logits(session);
    float top = 1.0f;
    if (!CHECK(got != NULL, "%s: no logits", what)) return;
    for (int i = 0; i < VOCABULARY; i++) top = fmaxf(top, fabsf(want[i]));
    for (int i = 0; i < VOCABULARY; i++) {
        CHECK(fabsf(got[i] - want[i]) <= 1e-5f * top, "%s, %lld tokens read: logit %d is %g, not "
              "%g", what, (long long)mn_session_position(session), i, (double)got[i],
              (double)want[i]);
    }
}

/* Float32 sums of 24 positive terms in another order: 1e-4 of each. */
static void check_belief(const char *what, const fixture *f, const mn_session *session, int64_t at,
                         int64_t n) {
    for (int i = 0; i < mn_session_beliefs(session); i++) {
        const float *v;
        const int64_t count = mn_session_belief(&v, session, i);
        if (!CHECK(count == n, "%s: %lld variances", what, (long long)count)) return;
        const int layer = mn_session_belief_layer(session, i);
        CHECK(mn_layer_has_variance(mn_model_layer(f->model, layer)), "%s: layer %d", what, layer);
        for (int64_t t = 0; t < n; t++) {
            const float want = f->variance[i][at + t];
            CHECK(want > 0.0f && fabsf(v[t] - want) <= 1e-4f * want, "%s: variance %g, not %g",
                  what, (double)v[t], (double)want);
        }
    }
}

typedef void layers_test(fixture *f, const char *layers);

/* Two layers of every kind, +ccq where there is one, and hybrids. */
static void every_kind(layers_test *test) {
    static const char *const hybrids[] = {
        "attention, gdn, bayes",
        "kla, relu_attention, mlstm",
        "attention, gdn|\"norm\": \"layer\", \"parallel_residual\": true, "
        "\"learned_positions\": 32,",
        "lightning, none|\"residual\": \"norm\", \"mlp_beta\": 0.8, \"num_experts\": 3, "
        "\"num_experts_per_tok\": 2, \"moe_intermediate_size\": 4, "
        "\"shared_expert_intermediate_size\": 4,",
        "mamba2|\"beside_attention\": true, \"mixers\": {\"attention\": {\"num_heads\": 2}},",
        "mamba2*2|\"shared_blocks\": 1, \"adapter_rank\": 2, \"mlp_layer_types\": [\"shared\", "
        "\"shared\"], \"mixers\": {\"attention\": {\"num_heads\": 2}},",
    };
    char layers[512];
    fixture f;
    for (int kind = 0; kind < MN_LAYER_COUNT + (int)MN_COUNTOF(hybrids); kind++) {
        if (kind < MN_LAYER_COUNT) {
            const char *name = mn_layer_kind_name((mn_layer_kind)kind);
            snprintf(layers, sizeof layers, "%s, %s%s", name, name,
                     mn_layer_takes_ccq((mn_layer_kind)kind) ? "+ccq" : "");
        } else {
            snprintf(layers, sizeof layers, "%s", hybrids[kind - MN_LAYER_COUNT]);
        }
        if (open(&f, layers)) test(&f, layers);
        finish(&f);
    }
    check_done();
}

/* ---- the same numbers ------------------------------------------------------------------------ */

static void steps_of(fixture *f, const char *layers) {
    mn_session *session = start(f, 0);
    CHECK(!mn_session_logits(session) && mn_session_position(session) == 0, "not fresh");
    for (int t = 0; t < T; t++) {
        if (mn_session_step(session, f->tokens[t]) != MN_OK) check_fatal("%s", mn_last_error());
        check_logits(layers, session, f->logits[t]);
        check_belief(layers, f, session, t, 1);
    }
    mn_session_destroy(session);
}

static void chunks_of(fixture *f, const char *layers) {
    for (int64_t chunk = 1; chunk <= T + 1; chunk += chunk < 9 ? 1 : 5) {
        mn_session *session = start(f, chunk);
        assert_int_equal(mn_session_chunk(session), chunk);
        feed(session, f->tokens, 7);
        check_logits(layers, session, f->logits[6]);
        check_belief(layers, f, session, 0, 7);
        feed(session, f->tokens + 7, 0);
        feed(session, f->tokens + 7, T - 7);
        check_logits(layers, session, f->logits[T - 1]);
        check_belief(layers, f, session, 7, T - 7);
        CHECK(mn_session_position(session) == T, "%s: position", layers);
        mn_session_destroy(session);
    }
}

static void scores_of(fixture *f, const char *layers) {
    for (int64_t chunk = 2; chunk <= 32; chunk *= 4) {
        mn_session *session = start(f, chunk);
        double score[T];
        mn_status st = mn_session_score(session, f->tokens, 5, score);
        if (st == MN_OK) st = mn_session_score(session, f->tokens + 5, T - 5, score + 5);
        CHECK(st == MN_OK && score[0] == 0.0, "%s: %s", layers, mn_last_error());
        for (int t = 1; t < T; t++) {
            CHECK(fabs(score[t] - f->score[t]) <= 2e-5, "%s: score %g of token %d, not %g", layers,
                  score[t], t, f->score[t]);
        }
        check_logits(layers, session, f->logits[T - 1]);
        mn_session_destroy(session);
    }
}

static void steps_equal_whole(void **state) {
    (void)state;
    every_kind(steps_of);
}

static void chunks_equal_whole(void **state) {
    (void)state;
    every_kind(chunks_of);
}

static void scores_are_log_probabilities(void **state) {
    (void)state;
    every_kind(scores_of);
}

/* ---- the same bits --------------------------------------------------------------------------- */

enum { HALF = 11 };

/* Goes on with the second half, a chunk and then steps; the logits after it. */
static void go_on(float *logits, mn_session *session, const fixture *f) {
    feed(session, f->tokens + HALF, 4);
    for (int t = HALF + 4; t < T; t++) feed(session, f->tokens + t, 1);
    memcpy(logits, mn_session_logits(session), VOCABULARY * sizeof *logits);
}

static void check_bits(const char *layers, const char *what, mn_session *session, const fixture *f,
                       const float *half, const float *want) {
    float got[VOCABULARY];
    CHECK(memcmp(mn_session_logits(session), half, sizeof got) == 0, "%s: %s has other logits",
          layers, what);
    go_on(got, session, f);
    CHECK(memcmp(got, want, sizeof got) == 0, "%s: %s goes on otherwise", layers, what);
    CHECK(mn_session_position(session) == T, "%s: %s has another position", layers, what);
}

static void copies_of(fixture *f, const char *layers) {
    mn_session *session = start(f, 0), *fork = NULL, *other = start(f, 0);
    mn_snapshot *snapshot = NULL;
    float want[VOCABULARY], half[VOCABULARY];
    const char *file = in_folder("state.safetensors");
    feed(session, f->tokens, HALF);
    memcpy(half, mn_session_logits(session), sizeof half);
    mn_status st = mn_session_snapshot(&snapshot, session);
    if (st == MN_OK) st = mn_session_fork(&fork, session);
    if (st == MN_OK) st = mn_session_save(session, file);
    if (st != MN_OK) check_fatal("%s: %s", layers, mn_last_error());
    CHECK(mn_snapshot_bytes(snapshot) == mn_session_bytes(session), "%s: sizes", layers);
    go_on(want, session, f);
    check_bits(layers, "a fork", fork, f, half, want);
    feed(other, f->tokens + 3, 9);    // something else to forget
    CHECK(mn_session_load(other, file) == MN_OK, "%s: %s", layers, mn_last_error());
    check_bits(layers, "a file", other, f, half, want);
    for (int again = 0; again < 2; again++) {
        CHECK(mn_session_restore(session, snapshot) == MN_OK, "%s: %s", layers, mn_last_error());
        check_bits(layers, "a snapshot", session, f, half, want);
    }
    CHECK(mn_session_reset(session) == MN_OK && !mn_session_logits(session), "%s", layers);
    feed(session, f->tokens, HALF);
    check_bits(layers, "a session after reset", session, f, half, want);
    mn_session_destroy(session);
    mn_session_destroy(fork);
    mn_session_destroy(other);
    mn_snapshot_destroy(snapshot);
}

static void copies_give_the_same_bits(void **state) {
    (void)state;
    every_kind(copies_of);
}

static void recurrent_states_keep_their_size(void **state) {
    (void)state;
    fixture f;
    if (open(&f, "gdn, bayes, kla, gla+ccq, mlstm")) {
        mn_session *session = start(&f, 5);
        feed(session, f.tokens, 1);
        const size_t bytes = mn_session_bytes(session);
        for (int i = 0; i < 40; i++) feed(session, f.tokens, T);
        CHECK(mn_session_bytes(session) == bytes, "%zu bytes became %zu", bytes,
              mn_session_bytes(session));
        mn_session_destroy(session);
    }
    finish(&f);
    check_done();
}

/* ---- choosing, and refusing ------------------------------------------------------------------ */

static void samples(void **state) {
    (void)state;
    fixture f;
    if (open(&f, "gdn")) {
        mn_session *session = start(&f, 0);
        mn_sampling how;
        mn_sampling_defaults(&how);
        int32_t token = -1, below = -1;
        assert_fails(mn_session_sample(&token, session, &how, NULL, 0), MN_ERR_ARGUMENT, "feed",
                     "");
        feed(session, f.tokens, T);
        how.temperature = 0.0;
        CHECK(mn_session_sample(&token, session, &how, NULL, 0) == MN_OK, "%s", mn_last_error());
        for (int i = 0; i < VOCABULARY; i++) {
            CHECK(f.logits[T - 1][i] <= f.logits[T - 1][token], "token %d is better", i);
        }
        CHECK(mn_session_sample_below(&below, session, &how, NULL, 0, 1) == MN_OK && below == 0,
              "not the only token there is");
        CHECK(mn_session_position(session) == T, "sampling reads");
        mn_session_destroy(session);
    }
    finish(&f);
    check_done();
}

static void wrong_tokens(void **state) {
    (void)state;
    fixture f;
    if (open(&f, "gdn, attention")) {
        mn_session *session = start(&f, 0);
        feed(session, f.tokens, 5);
        int32_t tokens[] = { 1, 2, VOCABULARY };
        assert_fails(mn_session_feed(session, tokens, 3), MN_ERR_ARGUMENT, "token 17 at 2", "17");
        tokens[2] = -1;
        assert_fails(mn_session_feed(session, tokens, 3), MN_ERR_ARGUMENT, "token -1", "");
        assert_fails(mn_session_feed(session, NULL, 3), MN_ERR_ARGUMENT, "3", "");
        assert_fails(mn_session_feed(session, tokens, -1), MN_ERR_ARGUMENT, "-1", "");
        feed(session, f.tokens + 5, T - 5);    // nothing was read in between
        check_logits("after refusals", session, f.logits[T - 1]);
        mn_session *other = NULL;
        const mn_session_options options = { .prefill_chunk = -4 };
        assert_fails(mn_session_create(&other, f.context, f.model, &options), MN_ERR_ARGUMENT,
                     "prefill_chunk", "-4");
        assert_null(other);
        mn_session_destroy(session);
    }
    finish(&f);
    check_done();
}

/* A layer of limited length fails in the middle of a feed; the session then says so until it is
 * brought back. */
static void broken_sessions(void **state) {
    (void)state;
    fixture f;
    if (open(&f, "gdn, hyperglu")) {
        mn_session *session = start(&f, 4), *fork = NULL;
        mn_snapshot *snapshot = NULL, *none = NULL;
        int32_t many[40];
        model_case_tokens(many, 40, VOCABULARY, 1);
        feed(session, f.tokens, HALF);
        CHECK(mn_session_snapshot(&snapshot, session) == MN_OK, "%s", mn_last_error());
        CHECK(mn_session_feed(session, many, 40) != MN_OK, "51 tokens in a context of 32");
        CHECK(!mn_session_logits(session), "logits of a broken session");
        assert_fails(mn_session_feed(session, many, 1), MN_ERR_ARGUMENT, "middle", "restore");
        assert_fails(mn_session_snapshot(&none, session), MN_ERR_ARGUMENT, "middle", "");
        assert_fails(mn_session_fork(&fork, session), MN_ERR_ARGUMENT, "middle", "");
        assert_fails(mn_session_save(session, in_folder("broken")), MN_ERR_ARGUMENT, "middle", "");
        CHECK(mn_session_restore(session, snapshot) == MN_OK, "%s", mn_last_error());
        feed(session, f.tokens + HALF, T - HALF);
        check_logits("brought back", session, f.logits[T - 1]);
        mn_snapshot_destroy(snapshot);
        mn_session_destroy(session);
    }
    finish(&f);
    check_done();
}

static void wrong_states(void **state) {
    (void)state;
    fixture f, g;
    if (open(&f, "gdn, attention") && open(&g, "gdn, gdn")) {
        mn_session *mine = start(&f, 0), *theirs = start(&g, 0);
        mn_snapshot *snapshot = NULL;
        const char *file = in_folder("theirs.safetensors"), *text = in_folder("text");
        feed(mine, f.tokens, HALF);
        feed(theirs, f.tokens, HALF);
        CHECK(mn_session_snapshot(&snapshot, theirs) == MN_OK, "%s", mn_last_error());
        CHECK(mn_session_save(theirs, file) == MN_OK, "%s", mn_last_error());
        assert_fails(mn_session_restore(mine, snapshot), MN_ERR_ARGUMENT, "another model", "");
        assert_fails(mn_session_load(mine, file), MN_ERR_ARGUMENT, "another model", "theirs");
        assert_fails(mn_session_load(mine, in_folder("absent")), MN_ERR_IO, "absent", "");
        write_file(text, "not a state at all", 18);
        assert_int_equal(mn_session_load(mine, text), MN_ERR_FORMAT);
        CHECK(mn_checkpoint_save(f.model, in_folder("")) == MN_OK, "%s", mn_last_error());
        assert_fails(mn_session_load(mine, in_folder("model.safetensors")), MN_ERR_FORMAT,
                     "no saved state", "");
        feed(mine, f.tokens + HALF, T - HALF);    // as if nothing had been tried
        check_logits("after refusals", mine, f.logits[T - 1]);

        mn_model *model = NULL;    // opening a folder, and one that is none
        CHECK(mn_model_open(&model, in_folder("")) == MN_OK, "%s", mn_last_error());
        CHECK(mn_model_vocabulary(model) == VOCABULARY, "another vocabulary");
        mn_model_close(model);
        CHECK(mn_model_open(&model, in_folder("absent")) != MN_OK && !model, "opened nothing");
        mn_session_destroy(mine);
        mn_session_destroy(theirs);
        mn_snapshot_destroy(snapshot);
        finish(&g);
    }
    finish(&f);
    check_done();
}

/* ---- files that lie -------------------------------------------------------------------------- */

typedef enum lie { TWICE_AS_MUCH, OTHER_RANK, NO_LAYER, NO_NAME, LOGITS, POSITION, N_LIES } lie;

/* Rewrites the state `from` with one lie about tensor `which`; false where that cannot be told. */
static bool write_lie(const char *to, const mn_safetensors *from, lie what, int64_t which) {
    mn_stored_tensor tensors[64];
    const int64_t n = mn_safetensors_count(from);
    assert_true(n < 64);
    for (int64_t i = 0; i < n; i++) tensors[i] = *mn_safetensors_at(from, i);
    mn_stored_tensor *t = &tensors[which];
    const bool logits = strcmp(t->name, "logits") == 0;
    char *twice = malloc(2 * t->bytes);
    memcpy(twice, t->data, t->bytes);
    memcpy(twice + t->bytes, t->data, t->bytes);
    mn_stored_text about[3];
    for (int i = 0; i < 3; i++) {
        about[i] = mn_safetensors_metadata_at(from, i);
        if (what == POSITION && strcmp(about[i].key, "position") == 0) about[i].value = "-1";
    }
    if (what == TWICE_AS_MUCH) {
        t->data = twice;
        t->bytes *= 2;
        t->shape[0] *= 2;
    }
    if (what == OTHER_RANK) {
        t->shape[0] = mn_stored_elements(t);
        t->rank = t->rank == 1 ? 3 : 1;
        t->shape[1] = t->shape[2] = 1;
    }
    if (what == NO_LAYER) t->name = "7.memory";
    if (what == NO_NAME) t->name = "0.";
    if (what == LOGITS) t->dtype = MN_STORED_I32;
    const bool tells = what == LOGITS ? logits : what < LOGITS || which == 0;
    if (tells) assert_int_equal(mn_safetensors_write(to, tensors, n, about, 3), MN_OK);
    free(twice);
    return tells;
}

/* Each lie is found when the file is read, or by the layer that it is about. */
static void lies_of(fixture *f, const char *layers) {
    mn_session *session = start(f, 0);
    mn_safetensors *file = NULL;
    const char *path = in_folder("true"), *other = in_folder("lie");
    feed(session, f->tokens, HALF);
    if (mn_session_save(session, path) != MN_OK) check_fatal("%s", mn_last_error());
    if (mn_safetensors_open(&file, path) != MN_OK) check_fatal("%s", mn_last_error());
    for (int what = 0; what < N_LIES; what++) {
        for (int64_t i = 0; i < mn_safetensors_count(file); i++) {
            if (!write_lie(other, file, (lie)what, i)) continue;
            mn_status st = mn_session_load(session, other);
            if (st == MN_OK) st = mn_session_feed(session, f->tokens + HALF, 3);
            CHECK(st != MN_OK, "%s: lie %d about %s was believed", layers, what,
                  mn_safetensors_at(file, i)->name);
        }
    }
    CHECK(mn_session_load(session, path) == MN_OK, "%s: %s", layers, mn_last_error());
    feed(session, f->tokens + HALF, T - HALF);
    check_logits(layers, session, f->logits[T - 1]);
    mn_safetensors_close(file);
    mn_session_destroy(session);
}

static void files_that_lie(void **state) {
    (void)state;
    every_kind(lies_of);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_equal_whole),
        cmocka_unit_test(chunks_equal_whole),
        cmocka_unit_test(scores_are_log_probabilities),
        cmocka_unit_test(copies_give_the_same_bits),
        cmocka_unit_test(recurrent_states_keep_their_size),
        cmocka_unit_test(samples),
        cmocka_unit_test(wrong_tokens),
        cmocka_unit_test(broken_sessions),
        cmocka_unit_test(wrong_states),
        cmocka_unit_test(files_that_lie),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
