/* test_papers.c - what the plans of the experiments say: sizes, settings and rows as the papers
 * have them, equal states where they are said to be equal, seeds of settings apart from those that
 * are reported. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "experiments/experiment.h"
#include "experiments/grid.h"
#include "experiments/job_internal.h"
#include "experiments/task_run.h"
#include "model/model.h"
#include "support/check.h"
#include "tasks/task.h"

enum { TOKENS = 8 };

/* The jobs of an experiment at a size, and where `plan` is given its plan. */
static json_t *jobs_of(const char *name, mn_preset preset, json_t **plan) {
    json_t *own = NULL, *jobs = NULL;
    int row;
    mn_status st = mn_experiment_find(&row, name);
    if (st == MN_OK) st = mn_experiment_plan(&own, row, preset);
    const mn_json grid = { .value = json_object_get(own, "grid"), .name = name };
    if (st == MN_OK) st = mn_grid_expand(&jobs, &grid, NULL);
    if (st != MN_OK) check_fatal("%s: %s", name, mn_last_error());
    if (plan) *plan = own;
    else json_decref(own);
    return jobs;
}

static const char *label_of(const json_t *job, const char *axis) {
    const json_t *labels = json_object_get(job, "labels");
    const char *label = json_string_value(json_object_get(labels, axis));
    return label ? label : "";
}

/* The first job with these labels; "" takes any. */
static const json_t *job_with(const json_t *jobs, const char *model, const char *axis,
                              const char *label) {
    for (size_t i = 0; i < json_array_size(jobs); i++) {
        const json_t *job = json_array_get(jobs, i);
        const bool here = *model == '\0' || strcmp(label_of(job, "model"), model) == 0;
        if (here && (*axis == '\0' || strcmp(label_of(job, axis), label) == 0)) return job;
    }
    check_fatal("no job of %s with %s %s", model, axis, label);
    return NULL;
}

static int64_t whole(const json_t *job, const char *path) {
    const json_t *value = mn_spec_get(job, path);
    CHECK(json_is_integer(value), "%s is no whole number", path);
    return json_integer_value(value);
}

/* ---- states ---------------------------------------------------------------------------------- */

/* Numbers that the first layer keeps of a sequence, without the tails of convolutions and the
 * normalisers beside a memory; *parameters of the whole model. */
static int64_t state_of(int64_t *parameters, const json_t *job) {
    static const char *const kept[] = { "memory", "mean", "precision", "information",
                                        "importance" };
    mn_task_run *task = NULL;
    mn_context *context = NULL;
    mn_model *model = NULL;
    mn_tape *tape = NULL;
    mn_model_config config = { 0 };
    mn_model_state state = { 0 };
    int64_t n = 0;
    const mn_json handle = { .value = (json_t *)(uintptr_t)job, .name = "job" };
    json_t *section = json_deep_copy(json_object_get(job, "model"));
    const mn_json about = { .value = section, .name = "model" };
    mn_status st = mn_task_run_open(&task, &handle);
    if (st == MN_OK) {
        json_object_set_new(section, "vocab_size", json_integer(mn_task_run_vocab(task)));
        json_object_set_new(section, "max_position_embeddings", json_integer(TOKENS));
        st = mn_model_config_read(&config, &about);
    }
    if (st == MN_OK) st = mn_model_create(&model, &config, MN_F32);
    if (st == MN_OK) st = mn_context_create(&context, NULL);
    if (st == MN_OK) st = mn_tape_create(&tape, context, MN_F32);
    if (st == MN_OK) st = mn_model_state_create(&state, model);
    if (st == MN_OK) {
        const int32_t tokens[TOKENS] = { 1, 2, 3, 1, 2, 3, 1, 2 };
        const mn_model_input in = { .tokens = tokens, .B = 1, .T = TOKENS, .state = &state };
        mn_model_start(model, context, 1);
        mn_tape_start(tape, MN_TAPE_FORWARD);
        mn_model_hidden(model, tape, &in);
        st = mn_tape_status(tape);
        *parameters = mn_model_count(model);
    }
    for (int i = 0; st == MN_OK && i < state.layers[0].n_pieces; i++) {
        const mn_state_piece *piece = &state.layers[0].pieces[i];
        for (size_t k = 0; k < MN_COUNTOF(kept); k++) {
            if (strcmp(piece->name, kept[k]) == 0) n += piece->count;
        }
    }
    CHECK(st == MN_OK, "%s", mn_last_error());
    mn_model_state_free(&state);
    mn_tape_destroy(tape);
    mn_context_destroy(context);
    mn_model_destroy(model);
    mn_model_config_free(&config);
    mn_task_run_close(task);
    json_decref(section);
    return n;
}

/* 2,048 numbers and about 100,000 parameters in every row of mad; kla counts means and precisions,
 * as its paper does. */
static void rows_of_mad_are_equal(void **state) {
    (void)state;
    static const char *const rows[] = { "kla", "kla+", "gdn", "gla", "mamba1", "mlstm" };
    json_t *jobs = jobs_of("mad", MN_PRESET_FULL, NULL);
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        int64_t parameters = 0;
        const int64_t n = state_of(&parameters, job_with(jobs, rows[i], "task", "recall"));
        CHECK(n == 2048, "%s keeps %lld numbers", rows[i], (long long)n);
        CHECK(parameters > 92000 && parameters < 108000, "%s has %lld parameters", rows[i],
              (long long)parameters);
    }
    json_decref(jobs);
    jobs = jobs_of("mad", MN_PRESET_GPU, NULL);
    int64_t parameters = 0;
    const int64_t n = state_of(&parameters, job_with(jobs, "palimpsa", "task", "recall"));
    CHECK(n == 2048, "palimpsa keeps %lld numbers", (long long)n);
    CHECK(parameters > 92000 && parameters < 108000, "palimpsa has %lld parameters",
          (long long)parameters);
    json_decref(jobs);
    check_done();
}

/* The configurations of the paper's Table 12; its gla has half of what the table prints. */
static void states_of_mqar_long_are_the_papers(void **state) {
    (void)state;
    static const struct {
        const char *model, *width;
        int64_t numbers;
    } rows[] = {
        { "kla", "64", 2048 },    { "kla", "128", 4096 },    { "kla", "256", 8192 },
        { "mamba1", "64", 2048 }, { "mamba1", "128", 4096 }, { "mamba1", "256", 8192 },
        { "gdn", "64", 2304 },    { "gdn", "128", 4608 },    { "gdn", "256", 9216 },
        { "gla", "64", 1024 },    { "gla", "128", 2048 },    { "gla", "256", 4096 },
    };
    json_t *jobs = jobs_of("mqar-long", MN_PRESET_FULL, NULL);
    for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
        int64_t parameters = 0;
        const json_t *job = job_with(jobs, rows[i].model, "width", rows[i].width);
        const int64_t n = state_of(&parameters, job);
        CHECK(n == rows[i].numbers, "%s of width %s keeps %lld numbers, not %lld", rows[i].model,
              rows[i].width, (long long)n, (long long)rows[i].numbers);
    }
    json_decref(jobs);
    check_done();
}

/* ---- settings -------------------------------------------------------------------------------- */

/* All 66 settings of MAD's sweep, and in every row MAD's 200 epochs: 400 steps where 256 examples
 * are trained on, nothing cut short. */
static void layouts_run_on_the_whole_sweep(void **state) {
    (void)state;
    json_t *jobs = jobs_of("hyper-layout", MN_PRESET_FULL, NULL), *seen = json_object();
    for (size_t i = 0; i < json_array_size(jobs); i++) {
        const json_t *job = json_array_get(jobs, i);
        const int64_t examples = whole(job, "task.train"), steps = whole(job, "train.steps");
        const int64_t batches = (examples + 127) / 128;
        json_object_set_new(seen, label_of(job, "task"), json_true());
        CHECK(steps == 200 * batches, "%s, %s: %lld steps with %lld examples",
              label_of(job, "model"), label_of(job, "task"), (long long)steps,
              (long long)examples);
        CHECK(whole(job, "train.batch") == 128, "%s: another batch", label_of(job, "task"));
    }
    CHECK(json_object_size(seen) == 66, "%zu settings", json_object_size(seen));
    json_decref(seen);
    json_decref(jobs);
    jobs = jobs_of("hyper-layout", MN_PRESET_GPU, NULL);
    static const char *const controls[] = { "attention, no positions", "bare, places, second mix",
                                            "bare, lags", "bare, places" };
    for (size_t i = 0; i < MN_COUNTOF(controls); i++) {
        const json_t *job = job_with(jobs, controls[i], "task", "memorise: vocab-8192");
        CHECK(whole(job, "train.steps") == 400 && whole(job, "model.hidden_size") == 128,
              "%s is of another size", controls[i]);
    }
    json_decref(jobs);
    check_done();
}

/* One mixture in which keys get new values and keys are left alone, and the rows of the claim. */
static void updates_leave_keys_alone(void **state) {
    (void)state;
    static const char *const rows[] = { "bayes", "bayes, no gate", "rotation", "gdn", "mamba2" };
    static const mn_preset presets[] = { MN_PRESET_CPU, MN_PRESET_GPU, MN_PRESET_FULL };
    for (size_t p = 0; p < MN_COUNTOF(presets); p++) {
        json_t *jobs = jobs_of("mqar-update", presets[p], NULL);
        for (size_t i = 0; i < MN_COUNTOF(rows); i++) {
            const json_t *job = job_with(jobs, rows[i], "", ""), *segment;
            const json_t *segments = mn_spec_get(job, "task.segments");
            size_t k;
            int64_t alone = 0, changed = 0;
            json_array_foreach((json_t *)(uintptr_t)segments, k, segment) {
                const int64_t pairs = whole(segment, "options.pairs");
                const int64_t updates = whole(segment, "options.updates");
                alone += updates < pairs;
                changed += updates > 0;
            }
            CHECK(alone > 0 && changed > 0, "%s: %lld segments with keys left alone", rows[i],
                  (long long)alone);
            CHECK(presets[p] == MN_PRESET_CPU || k == 10, "%s: %zu segments of ten", rows[i], k);
        }
        json_decref(jobs);
    }
    check_done();
}

/* The samples of the smallest mixture: both kinds of keys are asked for, and counted apart. */
static void both_kinds_of_keys_are_asked(void **state) {
    (void)state;
    json_t *jobs = jobs_of("mqar-update", MN_PRESET_CPU, NULL);
    const json_t *job = job_with(jobs, "gdn", "", ""), *options = mn_spec_get(job, "task.options");
    mn_task *task = NULL;
    const mn_json handle = { .value = (json_t *)(uintptr_t)options, .name = "options" };
    if (mn_task_create(&task, "mqar-update", &handle) != MN_OK) check_fatal("%s", mn_last_error());
    const int64_t length = mn_task_shape_of(task).length;
    int32_t *input = calloc((size_t)length, sizeof *input), *target = calloc((size_t)length,
                                                                             sizeof *target);
    int64_t of[2] = { 0, 0 };
    for (int64_t i = 0; i < 20 && input && target; i++) {
        if (mn_task_sample(task, 0, MN_SPLIT_TEST, i, input, target) != MN_OK) {
            check_fatal("%s", mn_last_error());
        }
        for (int64_t t = 0; t < length; t++) {
            if (target[t] < 0) continue;
            int64_t values = 0, last = -1;    // of this key before it is asked for
            for (int64_t s = 0; s + 1 < t; s++) {
                if (input[s] != input[t] || target[s] >= 0 || input[s + 1] == last) continue;
                last = input[s + 1];
                values++;
            }
            of[values > 1]++;
        }
    }
    CHECK(of[0] > 0 && of[1] > 0, "%lld keys left alone, %lld with a new value",
          (long long)of[0], (long long)of[1]);
    free(input);
    free(target);
    mn_task_destroy(task);
    json_decref(jobs);
    check_done();
}

/* In every MQAR task the readout is the table of embeddings, as in the model of the benchmark: with
 * one of its own no row learns a vocabulary of some hundred words in these steps. */
static void readouts_of_mqar_are_tied(void **state) {
    (void)state;
    static const char *const names[] = { "mqar", "mqar-update", "mqar-block", "mqar-mixed" };
    for (size_t k = 0; k < MN_COUNTOF(names); k++) {
        for (int preset = 0; preset < MN_PRESETS; preset++) {
            int row = 0;
            assert_int_equal(mn_experiment_find(&row, names[k]), MN_OK);
            if (!mn_experiment_row(row).cost[preset]) continue;
            json_t *jobs = jobs_of(names[k], (mn_preset)preset, NULL);
            for (size_t i = 0; i < json_array_size(jobs); i++) {
                const json_t *job = json_array_get(jobs, i);
                CHECK(json_is_true(mn_spec_get(job, "model.tie_word_embeddings")),
                      "%s, preset %d: %s has a readout of its own", names[k], preset,
                      label_of(job, "model"));
            }
            json_decref(jobs);
        }
    }
    check_done();
}

/* Sixteen passes over the paper's 100,000 examples of ten settings in batches of 256, and a pilot
 * that is shorter. */
static void updates_have_the_papers_examples(void **state) {
    (void)state;
    json_t *plan = NULL, *jobs = jobs_of("mqar-update", MN_PRESET_GPU, &plan);
    const json_t *steps = mn_spec_get(plan, "pilot.steps");
    CHECK(json_is_integer(steps) && json_integer_value(steps) < 62560, "the pilot is as long");
    for (size_t i = 0; i < json_array_size(jobs); i++) {
        const json_t *job = json_array_get(jobs, i);
        CHECK(whole(job, "train.steps") == 16 * 10 * ((100000 + 255) / 256), "%lld steps",
              (long long)whole(job, "train.steps"));
        CHECK(whole(job, "model.hidden_size") == 128 && whole(job, "train.batch") == 256 &&
              whole(job, "train.warmup") < 1600, "%s is of another size", label_of(job, "model"));
    }
    json_decref(plan);
    json_decref(jobs);
    check_done();
}

/* A claim about widths has an axis of widths. */
static void widths_are_an_axis(void **state) {
    (void)state;
    static const mn_preset presets[] = { MN_PRESET_CPU, MN_PRESET_GPU, MN_PRESET_FULL };
    for (size_t p = 0; p < MN_COUNTOF(presets); p++) {
        json_t *jobs = jobs_of("mqar", presets[p], NULL), *seen = json_object();
        for (size_t i = 0; i < json_array_size(jobs); i++) {
            const json_t *job = json_array_get(jobs, i);
            const char *width = label_of(job, "width");
            CHECK(atoll(width) == whole(job, "model.hidden_size"), "width %s is another", width);
            json_object_set_new(seen, width, json_true());
        }
        CHECK(json_object_size(seen) >= 2, "%zu widths", json_object_size(seen));
        json_decref(seen);
        json_decref(jobs);
    }
    check_done();
}

/* Of nine places of a5 at length eight, those of BOS and of the first element need no memory and
 * are not counted. */
static void free_places_are_not_counted(void **state) {
    (void)state;
    json_t *jobs = jobs_of("a5", MN_PRESET_FULL, NULL);
    const json_t *job = job_with(jobs, "kla, 1 block", "length", "8");
    const json_t *options = mn_spec_get(job, "task.options");
    const mn_json handle = { .value = (json_t *)(uintptr_t)options, .name = "options" };
    mn_task *task = NULL;
    int32_t input[9], target[9];
    if (mn_task_create(&task, "a5", &handle) != MN_OK) check_fatal("%s", mn_last_error());
    assert_int_equal(mn_task_shape_of(task).length, 9);
    if (mn_task_sample(task, 0, MN_SPLIT_TEST, 0, input, target) != MN_OK) {
        check_fatal("%s", mn_last_error());
    }
    for (int t = 0; t < 9; t++) {
        CHECK((target[t] >= 0) == (t >= 2), "place %d: target %d", t, (int)target[t]);
    }
    mn_task_destroy(task);
    json_decref(jobs);
    check_done();
}

/* Every answer of the needles of preset cpu stands in the text in front of its question. */
static void needles_are_in_the_haystack(void **state) {
    (void)state;
    json_t *jobs = jobs_of("ccq-needle", MN_PRESET_CPU, NULL);
    const json_t *job = job_with(jobs, "gla", "", ""), *options = mn_spec_get(job, "task.options");
    const char *name = json_string_value(mn_spec_get(job, "task.name"));
    const mn_json handle = { .value = (json_t *)(uintptr_t)options, .name = "options" };
    mn_task *task = NULL;
    if (mn_task_create(&task, name, &handle) != MN_OK) check_fatal("%s", mn_last_error());
    const int64_t length = mn_task_shape_of(task).length;
    int32_t *input = calloc((size_t)length, sizeof *input), *target = calloc((size_t)length,
                                                                             sizeof *target);
    int64_t asked = 0, found = 0;
    for (int64_t i = 0; i < 20 && input && target; i++) {
        if (mn_task_sample(task, 0, MN_SPLIT_TEST, i, input, target) != MN_OK) {
            check_fatal("%s", mn_last_error());
        }
        for (int64_t t = 0; t < length; t++) {
            if (target[t] < 0) continue;
            asked++;
            for (int64_t s = 0; s + 1 < t; s++) {
                if (input[s] != input[t] || input[s + 1] != target[t]) continue;
                found++;
                break;
            }
        }
    }
    CHECK(asked > 0 && found == asked, "%lld of %lld needles", (long long)found, (long long)asked);
    free(input);
    free(target);
    mn_task_destroy(task);
    json_decref(jobs);
    check_done();
}

/* ---- seeds ----------------------------------------------------------------------------------- */

static bool holds(const json_t *list, const json_t *item) {
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (json_equal(json_array_get(list, i), item)) return true;
    }
    return false;
}

/* Where a plan tries several learning rates it chooses them by a pilot, none of whose seeds is
 * reported. */
static void settings_have_seeds_of_their_own(void **state) {
    (void)state;
    int tried = 0;
    for (int i = 0; i < mn_experiment_count(); i++) {
        for (int preset = 0; preset < MN_PRESETS; preset++) {
            const mn_experiment about = mn_experiment_row(i);
            json_t *plan = NULL;
            if (!about.cost[preset]) continue;
            if (mn_experiment_plan(&plan, i, (mn_preset)preset) != MN_OK) {
                check_fatal("%s: %s", about.name, mn_last_error());
            }
            const json_t *axes = mn_spec_get(plan, "grid.grid"), *pilot, *seeds, *seed;
            size_t k;
            pilot = json_object_get(plan, "pilot");
            seeds = json_object_get(pilot, "seeds");
            if (json_array_size(json_object_get(axes, "train.lr")) > 1) {
                tried++;
                CHECK(json_array_size(seeds) > 0, "%s tries rates without a pilot", about.name);
                const json_t *chosen = json_object_get(pilot, "axes"), *reported;
                json_t *rate = json_string("train.lr");
                CHECK(holds(chosen, rate), "%s: the pilot chooses no rate", about.name);
                json_decref(rate);
                reported = json_object_get(axes, "seed");
                CHECK(json_array_size(reported) > 0, "%s reports no seeds", about.name);
                json_array_foreach((json_t *)(uintptr_t)seeds, k, seed) {
                    CHECK(!holds(reported, seed), "%s: a seed of the pilot is reported",
                          about.name);
                }
            }
            json_decref(plan);
        }
    }
    CHECK(tried > 3, "%d plans try several rates", tried);
    check_done();
}

/* What a paper says is a claim with a verdict: no report leaves it to the reader. The exact numbers
 * of collision stand by themselves, and mqar-mixed is of none of the papers. */
static void papers_claims_are_judged(void **state) {
    (void)state;
    for (int i = 0; i < mn_experiment_count(); i++) {
        const mn_experiment about = mn_experiment_row(i);
        const bool exact = strcmp(about.name, "collision") == 0;
        if (exact || strcmp(about.name, "mqar-mixed") == 0) continue;
        for (int preset = MN_PRESET_CPU; preset < MN_PRESETS; preset++) {
            json_t *plan = NULL;
            if (!about.cost[preset]) continue;
            if (mn_experiment_plan(&plan, i, (mn_preset)preset) != MN_OK) {
                check_fatal("%s: %s", about.name, mn_last_error());
            }
            CHECK(json_array_size(json_object_get(plan, "claims")) > 0, "%s, %s: no claim",
                  about.name, mn_preset_name((mn_preset)preset));
            json_decref(plan);
        }
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_mad_are_equal),
        cmocka_unit_test(states_of_mqar_long_are_the_papers),
        cmocka_unit_test(layouts_run_on_the_whole_sweep),
        cmocka_unit_test(updates_leave_keys_alone),
        cmocka_unit_test(both_kinds_of_keys_are_asked),
        cmocka_unit_test(readouts_of_mqar_are_tied),
        cmocka_unit_test(updates_have_the_papers_examples),
        cmocka_unit_test(widths_are_an_axis),
        cmocka_unit_test(free_places_are_not_counted),
        cmocka_unit_test(needles_are_in_the_haystack),
        cmocka_unit_test(settings_have_seeds_of_their_own),
        cmocka_unit_test(papers_claims_are_judged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
