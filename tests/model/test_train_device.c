/* test_train_device.c - training and sessions on a GPU against the CPU: loss curves in float32 and
 * bf16, the same bits after resuming and with blocks computed again, parts of a batch, parameters
 * and states that come and go, decoding from a recorded graph. Skipped without a GPU.
 *
 * float32 differs from the CPU in the order of sums, bf16 rounds activations and weights to 2^-9 of
 * themselves, and training makes more of either: means over 20 losses are held to half a percent,
 * the bound that bench/bf16.sh and the requirements name. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "infer/session.h"
#include "support/check.h"
#include "support/folder.h"
#include "train/run/run_folder.h"
#include "train/trainer_internal.h"

enum { VOCABULARY = 48, ROWS = 8, LENGTH = 96, STEPS = 200, PATH = MN_RUN_PATH };

static mn_context *cpu, *gpu;    // gpu NULL: none here

static bool asks;    // targets at some tokens only, as tasks have them

/* From a tenth to two fifths of the tokens, by step. */
static double asked_share(int64_t step) {
    return 0.1 + 0.1 * (double)(step % 4);
}

/* Rows that a model can learn: the next token follows from this one and a letter of the row. */
static mn_status fill(void *context, int64_t step, int64_t rows, int64_t length, int32_t *tokens,
                      int32_t *targets) {
    (void)context;
    for (int64_t row = 0; row < rows; row++) {
        const uint64_t stream = (uint64_t)(step * rows + row);
        int64_t at = (int64_t)(mn_rng_bits(1, stream, 0) % VOCABULARY);
        const int64_t by = 1 + (int64_t)(mn_rng_bits(2, stream, 0) % 5);
        for (int64_t i = 0; i < length; i++) {
            const bool jumps = mn_rng_uniform(3, stream, (uint64_t)i) < 0.15;
            tokens[row * length + i] = (int32_t)at;
            at = jumps ? (int64_t)(mn_rng_bits(4, stream, (uint64_t)i) % VOCABULARY)
                       : (at * 5 + by) % VOCABULARY;
            const bool asked = !asks || mn_rng_uniform(5, stream, (uint64_t)i) < asked_share(step);
            targets[row * length + i] = asked ? (int32_t)at : -100;
        }
    }
    return MN_OK;
}

typedef struct run {
    mn_json root;
    mn_trainer *t;
} run;

/* A run of `layers` with more settings of "model" and "train" in `model` and `more` ("" or
 * ", \"key\": value"). */
static void open_run_of(run *r, mn_context *context, const char *layers, const char *model,
                        const char *dtype, int rows, const char *more, const char *out) {
    char text[1024];
    mn_train_memory memory;
    snprintf(text, sizeof text, "{\"model\": {\"layers\": \"%s\", \"hidden_size\": 64, "
             "\"num_hidden_layers\": 2, \"intermediate_size\": 96, \"vocab_size\": %d%s}, "
             "\"train\": {\"batch\": %d, \"context\": %d, \"steps\": %d, \"warmup\": 10, "
             "\"lr\": 0.003, \"dtype\": \"%s\"%s}, \"out\": \"%s\"}", layers, VOCABULARY, model,
             rows, LENGTH, STEPS, dtype, more, in_folder(out));
    const mn_source source = { NULL, fill, rows, LENGTH, 1000 };
    const mn_train_data data = { .train_source = &source };
    mn_status st = mn_json_parse(&r->root, text, strlen(text), "test", MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_trainer_create_from(&r->t, &r->root, &data, context);
    if (st == MN_OK) st = mn_trainer_predict(r->t, &memory);
    if (st != MN_OK) check_fatal("%s in %s: %s", layers, dtype, mn_last_error());
}

static void open_run(run *r, mn_context *context, const char *layers, const char *dtype, int rows,
                     const char *more, const char *out) {
    open_run_of(r, context, layers, "", dtype, rows, more, out);
}

static void close_run(run *r) {
    mn_trainer_destroy(r->t);
    mn_json_free(&r->root);
}

static void go_on(double *losses, run *r, int64_t steps) {
    while (mn_trainer_step_number(r->t) < steps) {
        mn_step_result s;
        const mn_status st = mn_trainer_step(r->t, &s);
        if (st != MN_OK) check_fatal("a step failed: %s", mn_last_error());
        losses[s.step] = s.loss;
    }
}

/* All values of a model, one after the other; to be freed. */
static float *values_of(mn_model *model) {
    float *all = malloc((size_t)mn_model_count(model) * sizeof *all), *at = all;
    for (int i = 0; all && i < mn_model_params(model); i++) {
        if (mn_model_get(model, i, at) != MN_OK) check_fatal("%s", mn_last_error());
        at += mn_model_param_at(model, i)->info.count;
    }
    return all;
}

static void check_same_values(mn_model *a, mn_model *b, const char *what) {
    float *x = values_of(a), *y = values_of(b);
    CHECK(x && y && memcmp(x, y, (size_t)mn_model_count(a) * sizeof *x) == 0,
          "%s: parameters have other bits", what);
    free(x);
    free(y);
}

static bool absent(void) {
    if (!gpu) skip();
    return !gpu;
}

/* ---- curves ---------------------------------------------------------------------------------- */

/* The largest difference of means over 20 steps, as a part of the mean. */
static double worst_mean(const double *got, const double *want) {
    double worst = 0.0;
    for (int first = 0; first < STEPS; first += 20) {
        double a = 0.0, b = 0.0;
        for (int i = first; i < first + 20; i++) {
            a += got[i];
            b += want[i];
        }
        const double off = fabs(a - b) / b;
        if (!(off <= worst)) worst = off;
    }
    return worst;
}

static void curves_follow_the_cpu(void **state) {
    (void)state;
    if (absent()) return;
    static const char *const layers[] = { "gdn", "gdn", "kla", "attention" };
    static const char *const models[] = {
        "", "", "", ", \"use_rope\": false, \"learned_positions\": 96, \"norm\": \"layer\", "
        "\"mlp\": \"gelu\"",
    };
    for (size_t i = 0; i < MN_COUNTOF(layers); i++) {
        double want[STEPS], got[STEPS];
        run r;
        asks = i == 0;
        open_run_of(&r, cpu, layers[i], models[i], "f32", ROWS, "", "curve");
        go_on(want, &r, STEPS);
        close_run(&r);
        CHECK(want[STEPS - 1] < 0.8 * want[0], "%s learns nothing: %g", layers[i], want[STEPS - 1]);
        for (int bf16 = 0; bf16 < 2 - asks; bf16++) {    // few targets: more noise than rounding
            open_run_of(&r, gpu, layers[i], models[i], bf16 ? "bf16" : "f32", ROWS, "", "curve");
            go_on(got, &r, STEPS);
            close_run(&r);
            const double off = worst_mean(got, want), most = 5e-3;
            CHECK(off <= most, "%s in %s: losses are off by %.3f %%", layers[i],
                  bf16 ? "bf16" : "f32", 100.0 * off);
        }
    }
    asks = false;
    check_done();
}

/* ---- the same bits --------------------------------------------------------------------------- */

static void resume_gives_the_same_bits(void **state) {
    (void)state;
    if (absent()) return;
    static const char *const dtypes[] = { "f32", "bf16" };
    for (int i = 0; i < 2; i++) {
        double whole[STEPS], part[STEPS];
        char folder[PATH];
        run a, b;
        asks = i == 0;
        open_run(&a, gpu, "gdn, kla", dtypes[i], 2, ", \"accumulate\": 3", "whole");
        go_on(whole, &a, 4);
        mn_status st = mn_trainer_save(a.t, false);
        if (st == MN_OK) st = mn_run_checkpoint(folder, in_folder("whole"), 4);
        go_on(whole, &a, 8);
        open_run(&b, gpu, "gdn, kla", dtypes[i], 2, ", \"accumulate\": 3", "part");
        if (st == MN_OK) st = mn_trainer_resume(b.t, folder);
        CHECK(st == MN_OK && mn_trainer_step_number(b.t) == 4, "%s", mn_last_error());
        go_on(part, &b, 8);
        for (int s = 4; s < 8; s++) CHECK(whole[s] == part[s], "loss %d has other bits", s);
        check_same_values(mn_trainer_model(a.t), mn_trainer_model(b.t), dtypes[i]);
        close_run(&a);
        close_run(&b);
        mn_run_clear(in_folder("whole"));
        remove(in_folder("whole/checkpoints"));
        remove(in_folder("whole"));
    }
    asks = false;
    check_done();
}

static void recomputing_gives_the_same_bits(void **state) {
    (void)state;
    if (absent()) return;
    static const char *const hows[] = { "light", "layer" };
    double kept[STEPS], again[STEPS];
    for (size_t i = 0; i < MN_COUNTOF(hows); i++) {
        char sets[64];
        run a, b;
        snprintf(sets, sizeof sets, ", \"recompute\": \"%s\"", hows[i]);
        open_run(&a, gpu, "gdn, kla", "bf16", ROWS, "", "kept");
        open_run(&b, gpu, "gdn, kla", "bf16", ROWS, sets, "again");
        go_on(kept, &a, 6);
        go_on(again, &b, 6);
        CHECK(memcmp(kept, again, 6 * sizeof *kept) == 0, "%s: losses have other bits", hows[i]);
        check_same_values(mn_trainer_model(a.t), mn_trainer_model(b.t), hows[i]);
        close_run(&a);
        close_run(&b);
    }
    check_done();
}

/* A step that is not to be made changes nothing, and says so. */
static void spikes_change_nothing(void **state) {
    (void)state;
    if (absent()) return;
    double losses[STEPS];
    run r;
    open_run(&r, gpu, "gdn", "f32", ROWS, ", \"spike_skip\": 1", "spike");
    go_on(losses, &r, 1);
    for (int i = 0; i < MN_SPIKE_WINDOW; i++) r.t->recent[i] = 0.5 + 0.001 * (i % 2);
    r.t->n_recent = MN_SPIKE_WINDOW;
    float *before = values_of(mn_trainer_model(r.t));
    mn_step_result s = { 0 };
    CHECK(mn_trainer_step(r.t, &s) == MN_OK && s.skipped && s.loss > 1.0, "%s", mn_last_error());
    float *after = values_of(mn_trainer_model(r.t));
    CHECK(memcmp(before, after, (size_t)mn_model_count(mn_trainer_model(r.t)) * sizeof *after) == 0,
          "a skipped step changed parameters");
    free(before);
    free(after);
    close_run(&r);
    check_done();
}

/* ---- sessions -------------------------------------------------------------------------------- */

static double furthest(const float *a, const float *b) {
    double worst = 0.0;
    for (int i = 0; i < VOCABULARY; i++) worst = fmax(worst, fabs((double)a[i] - b[i]));
    return worst;
}

/* Tokens one by one, the fourth and later ones from a graph, against all of them at once; through a
 * file and a snapshot on the way. */
static void sessions_decode(void **state) {
    (void)state;
    if (absent()) return;
    static const char *const layers[] = { "gdn", "kla", "attention, gla" };
    enum { N = 24 };
    for (size_t i = 0; i < MN_COUNTOF(layers); i++) {
        const mn_session_options how = { .dtype = MN_F32, .prefill_chunk = 7 };
        mn_session *one = NULL, *all = NULL;
        mn_snapshot *middle = NULL;
        int32_t tokens[N];
        float kept[VOCABULARY];
        run r;
        open_run(&r, gpu, layers[i], "f32", ROWS, "", "session");
        mn_model *model = mn_trainer_model(r.t);
        for (int k = 0; k < N; k++) tokens[k] = (k * k + 3) % VOCABULARY;
        mn_status st = mn_session_create(&one, gpu, model, &how);
        if (st == MN_OK) st = mn_session_create(&all, gpu, model, &how);
        for (int k = 0; st == MN_OK && k < N; k++) {
            st = mn_session_step(one, tokens[k]);
            if (k == 11 && st == MN_OK) st = mn_session_snapshot(&middle, one);
            if (k == 11 && st == MN_OK) st = mn_session_save(one, in_folder("state"));
        }
        if (st == MN_OK) st = mn_session_feed(all, tokens, N);
        if (st != MN_OK) check_fatal("%s: %s", layers[i], mn_last_error());
        memcpy(kept, mn_session_logits(one), sizeof kept);
        CHECK(furthest(kept, mn_session_logits(all)) < 1e-4, "%s: decoding is off by %g", layers[i],
              furthest(kept, mn_session_logits(all)));
        for (int way = 0; way < 2; way++) {
            st = way ? mn_session_load(one, in_folder("state")) : mn_session_restore(one, middle);
            for (int k = 12; st == MN_OK && k < N; k++) st = mn_session_step(one, tokens[k]);
            CHECK(st == MN_OK && memcmp(kept, mn_session_logits(one), sizeof kept) == 0,
                  "%s: going on from a %s gives other bits (%s)", layers[i],
                  way ? "file" : "snapshot", mn_last_error());
        }
        mn_snapshot_destroy(middle);
        mn_session_destroy(one);
        mn_session_destroy(all);
        close_run(&r);
        remove(in_folder("state"));
    }
    check_done();
}

int main(void) {
    const mn_context_options there = { .n_threads = 2, .device = "cuda" };
    if (mn_context_create(&gpu, &there) != MN_OK) printf("skipped: %s\n", mn_last_error());
    if (mn_context_create(&cpu, NULL) != MN_OK) return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(curves_follow_the_cpu),
        cmocka_unit_test(resume_gives_the_same_bits),
        cmocka_unit_test(recomputing_gives_the_same_bits),
        cmocka_unit_test(spikes_change_nothing),
        cmocka_unit_test(sessions_decode),
    };
    const int failed = cmocka_run_group_tests(tests, make_folder, remove_folder);
    mn_context_destroy(gpu);
    mn_context_destroy(cpu);
    return failed;
}
