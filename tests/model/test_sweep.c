/* test_sweep.c - jobs and sweeps: keys, products of axes, every plan of every experiment, the
 * queue, what a kill leaves behind, failures, the same numbers again, and cells of a report. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/util.h"
#include "experiments/cells.h"
#include "experiments/claims.h"
#include "experiments/experiment.h"
#include "experiments/grid.h"
#include "experiments/pilot.h"
#include "experiments/job_internal.h"
#include "experiments/sweep.h"
#include "experiments/task_run.h"
#include "io/file.h"
#include "io/json_write.h"
#include "support/check.h"
#include "support/folder.h"

enum { PATH = 4096 };

static mn_json parse(const char *text) {
    mn_json root = { 0 };
    if (mn_json_parse(&root, text, strlen(text), "test", MN_JSON_STANDARD) != MN_OK) {
        check_fatal("%s", mn_last_error());
    }
    return root;
}

static json_t *expand(const char *text) {
    mn_json root = parse(text);
    json_t *jobs = NULL;
    if (mn_grid_expand(&jobs, &root, NULL) != MN_OK) check_fatal("%s", mn_last_error());
    mn_json_free(&root);
    return jobs;
}

#define TINY                                                                                       \
    "\"job\": {\"task\": {\"name\": \"mad-recall\", \"options\": {\"length\": 16}, "               \
    "\"train\": 64, \"test\": 16}, \"model\": {\"layers\": \"linear\", \"hidden_size\": 16, "    \
    "\"num_hidden_layers\": 1}, \"train\": {\"steps\": 4, \"batch\": 16, \"lr\": 0.01, "           \
    "\"min_lr\": 0, \"warmup\": 0}}"

static const char grid_of_six[] =
    "{" TINY ", \"grid\": {\"lr\": {\"low\": {\"train\": {\"lr\": 0.001}}, "
    "\"high\": {\"train\": {\"lr\": 0.02}}}, \"seed\": [0, 1, 2]}}";

/* ---- jobs ------------------------------------------------------------------------------------ */

static void key_of(char key[MN_JOB_KEY], const char *text) {
    json_t *jobs = expand(text);
    assert_int_equal(json_array_size(jobs), 1);
    assert_int_equal(mn_job_key(key, json_array_get(jobs, 0)), MN_OK);
    json_decref(jobs);
}

static void keys_know_what_defines_a_job(void **state) {
    (void)state;
    static const char *const same[] = {
        "{\"jobs\": [{\"task\": {\"name\": \"mqar\", \"setting\": \"64-4\", \"test\": 9}, "
        "\"model\": {\"layers\": \"gdn\", \"hidden_size\": 32}, \"train\": {\"steps\": 5}}]}",
        "{\"jobs\": [{\"seed\": 0, \"train\": {\"steps\": 5, \"batch\": 32}, \"model\": "
        "{\"hidden_size\": 32, \"layers\": \"gdn\"}, \"task\": {\"test\": 9, "
        "\"setting\": \"64-4\", \"name\": \"mqar\"}, \"labels\": {\"any\": \"thing\"}}]}",
        "{\"job\": {\"task\": {\"name\": \"mqar\", \"test\": 9, \"train\": 100000, \"options\": "
        "{\"length\": 64, \"pairs\": 4, \"random_fill\": false}}, \"train\": {\"steps\": 50}, "
        "\"steps_at_most\": 5, \"model\": {\"layers\": \"gdn\"}}, "
        "\"grid\": {\"model.hidden_size\": [32]}}",
    };
    static const char *const other[] = {
        "{\"jobs\": [{\"task\": {\"name\": \"mqar\", \"setting\": \"64-4\", \"test\": 9}, "
        "\"model\": {\"layers\": \"gdn\", \"hidden_size\": 32}, \"train\": {\"steps\": 6}}]}",
        "{\"jobs\": [{\"task\": {\"name\": \"mqar\", \"setting\": \"64-4\", \"test\": 9}, "
        "\"model\": {\"layers\": \"kda\", \"hidden_size\": 32}, \"train\": {\"steps\": 5}}]}",
        "{\"jobs\": [{\"task\": {\"name\": \"mqar\", \"setting\": \"64-4\", \"test\": 9}, "
        "\"seed\": 1, \"model\": {\"layers\": \"gdn\", \"hidden_size\": 32}, "
        "\"train\": {\"steps\": 5}}]}",
    };
    char first[MN_JOB_KEY], key[MN_JOB_KEY];
    key_of(first, same[0]);
    assert_int_equal(strlen(first), 16);
    for (size_t i = 1; i < MN_COUNTOF(same); i++) {
        key_of(key, same[i]);
        assert_string_equal(key, first);
    }
    for (size_t i = 0; i < MN_COUNTOF(other); i++) {
        key_of(key, other[i]);
        assert_string_not_equal(key, first);
    }
    check_done();
}

static void products_have_labels(void **state) {
    (void)state;
    char title[256];
    json_t *jobs = expand(grid_of_six);
    assert_int_equal(json_array_size(jobs), 6);
    mn_job_title(title, sizeof title, json_array_get(jobs, 4));
    assert_string_equal(title, "high seed=1");
    const json_t *lr = mn_spec_get(json_array_get(jobs, 4), "train.lr");
    assert_true(json_number_value(lr) == 0.02);
    json_decref(jobs);
    jobs = expand("{" TINY ", \"only\": {\"seed\": [2]}, \"parts\": ["
                  "{\"grid\": {\"seed\": [1, 2]}}, "
                  "{\"job\": {\"train\": {\"steps\": 7}}, \"grid\": {\"seed\": [2]}}]}");
    assert_int_equal(json_array_size(jobs), 2);
    assert_int_equal(json_integer_value(mn_spec_get(json_array_get(jobs, 1), "train.steps")), 7);
    json_decref(jobs);
    jobs = expand("{\"job\": {\"task\": {\"name\": \"mad-recall\", \"train\": 100}, \"epochs\": 3, "
                  "\"lr_by_epoch\": true, \"train\": {\"batch\": 40}, \"model\": {\"layers\": "
                  "\"gdn\", \"hidden_size\": 16}}}");
    assert_int_equal(json_integer_value(mn_spec_get(json_array_get(jobs, 0), "train.steps")), 9);
    assert_int_equal(json_integer_value(mn_spec_get(json_array_get(jobs, 0), "train.lr_hold")), 3);
    json_decref(jobs);
    check_done();
}

static void what_cannot_run_is_refused(void **state) {
    (void)state;
    static const char *const bad[][2] = {
        { "{\"jobs\": [{\"task\": {\"name\": \"mqarr\"}}]}", "did you mean \"mqar\"" },
        { "{\"jobs\": [{\"task\": {\"name\": \"mqar\", \"setting\": \"x\"}}]}",
          "no setting \"x\"" },
        { "{\"jobs\": [{\"taks\": {}}]}", "\"task\"" },
        { "{\"jobs\": [{\"kind\": \"trian\"}]}", "did you mean \"train\"" },
        { "{" TINY ", \"grid\": {\"train.lrr\": [1]}}", "did you mean \"lr\"" },
        { "{" TINY ", \"grid\": {\"model.layers\": [\"gnd\"]}}", "gdn" },
        { "{" TINY ", \"grid\": {\"seed\": 3}}", "neither a list nor an object" },
        { "{" TINY ", \"grid\": {\"evaluate.metric\": [\"best\"]}}", "metric is token" },
        { "{" TINY ", \"grid\": {\"task.test\": [0]}}", "test has to be 1" },
        { "{" TINY ", \"only\": {\"seed\": [7]}, \"grid\": {\"seed\": [1]}}", "no job is left" },
        { "{\"jobs\": [{\"task\": {\"name\": \"mqar\"}, \"epochs\": 2}]}", "a training set of a" },
        { "{\"jobs\": [{\"task\": {\"name\": \"collision\"}}]}", "inputs are numbers" },
        { "{\"jobs\": [{\"kind\": \"collision\", \"rule\": \"bayes\", \"quantity\": \"gain\", "
          "\"write\": 113}]}", "from 1 to 112" },
    };
    for (size_t i = 0; i < MN_COUNTOF(bad); i++) {
        mn_json root = parse(bad[i][0]);
        json_t *jobs = NULL;
        CHECK(mn_grid_expand(&jobs, &root, NULL) != MN_OK, "%s is taken", bad[i][0]);
        CHECK(strstr(mn_last_error(), bad[i][1]) != NULL, "\"%s\" lacks \"%s\"", mn_last_error(),
              bad[i][1]);
        json_decref(jobs);
        mn_json_free(&root);
    }
    check_done();
}

/* Every experiment at every size is a list of jobs whose labels its tables name, and what papers
 * print belongs to a cell of the full size. */
static void plans_are_whole(void **state) {
    (void)state;
    for (int i = 0; i < mn_experiment_count(); i++) {
        for (int preset = 0; preset < MN_PRESETS; preset++) {
            if (!mn_experiment_row(i).cost[preset]) continue;
            const char *name = mn_experiment_row(i).name;
            json_t *plan = NULL, *jobs = NULL, *records = json_object();
            mn_json results = { .name = name };
            mn_status st = mn_experiment_plan(&plan, i, (mn_preset)preset);
            const mn_json grid = { .value = json_object_get(plan, "grid"), .name = name };
            if (st == MN_OK) st = mn_grid_expand(&jobs, &grid, NULL);
            if (st == MN_OK) {
                st = mn_experiment_results(&results.value, i, (mn_preset)preset, "", plan, jobs,
                                           records);
            }
            if (st != MN_OK) check_fatal("%s %d: %s", name, preset, mn_last_error());
            const mn_json tables = mn_json_member(&results, "tables");
            size_t printed = 0;
            for (int64_t t = 0; t < mn_json_count(&tables); t++) {
                mn_cells cells;
                if (mn_cells_make(&cells, &results, t) != MN_OK) check_fatal("%s", mn_last_error());
                CHECK(cells.n > 0, "%s: table %d is empty", name, (int)t);
                for (int64_t k = 0; k < cells.n; k++) printed += cells.items[k].printed != NULL;
                mn_cells_free(&cells);
            }
            const size_t all = json_array_size(json_object_get(results.value, "paper_numbers"));
            CHECK(preset != MN_PRESET_FULL || printed == all, "%s: %zu of %zu printed numbers have "
                  "a cell", name, printed, all);
            json_decref(results.value);
            json_decref(plan);
            json_decref(jobs);
            json_decref(records);
        }
    }
    check_done();
}

/* ---- sweeps ---------------------------------------------------------------------------------- */

/* Two rates on a pilot's seed: the better of each row runs on the seeds that are reported. */
static void settings_are_chosen_on_other_seeds(void **state) {
    (void)state;
    const char text[] = "{\"seeds\": [100, 101], \"axes\": [\"train.lr\"], \"value\": \"token\"}";
    json_t *pilot = json_loads(text, 0, NULL), *first = NULL, *chosen = NULL;
    json_t *jobs = expand("{" TINY ", \"grid\": {\"model\": {"
                          "\"a\": {\"model\": {\"num_heads\": 2}}, \"b\": "
                          "{\"model\": {\"num_heads\": 4}}}, \"train.lr\": [0.1, 0.2], "
                          "\"seed\": [0, 1, 2]}}");
    json_t *records = json_object();
    assert_int_equal(json_array_size(jobs), 12);
    if (mn_pilot_jobs(&first, jobs, pilot) != MN_OK) check_fatal("%s", mn_last_error());
    assert_int_equal(json_array_size(first), 8);      // two rows, two rates, two seeds
    for (size_t i = 0; i < json_array_size(first); i++) {
        char key[MN_JOB_KEY];
        const json_t *job = json_array_get(first, i), *labels = json_object_get(job, "labels");
        const bool a = strcmp(json_string_value(json_object_get(labels, "model")), "a") == 0;
        const double lr = json_number_value(json_object_get(labels, "train.lr"));
        const double seed = (double)json_integer_value(json_object_get(job, "seed"));
        assert_true(json_object_get(labels, "pilot") && seed >= 100);
        /* a: the larger rate by its mean, though not by its best; b: the smaller */
        const double score = a ? lr < 0.15 ? 0.4 + 0.3 * (seed - 100) : 0.6
                               : lr < 0.15 ? 0.9 : 0.8;
        assert_int_equal(mn_job_key(key, job), MN_OK);
        json_object_set_new(records, key, json_pack("{s:{s:f}}", "result", "token", score));
    }
    if (mn_pilot_choose(&chosen, jobs, pilot, first, records) != MN_OK) {
        check_fatal("%s", mn_last_error());
    }
    assert_int_equal(json_array_size(chosen), 6);
    for (size_t i = 0; i < json_array_size(chosen); i++) {
        const json_t *labels = json_object_get(json_array_get(chosen, i), "labels");
        const bool a = strcmp(json_string_value(json_object_get(labels, "model")), "a") == 0;
        const double lr = json_number_value(json_object_get(labels, "train.lr"));
        CHECK(a == (lr > 0.15), "row %s at %g", a ? "a" : "b", lr);
    }
    json_decref(chosen);
    json_decref(first);
    json_t *one = expand("{" TINY ", \"grid\": {\"train.lr\": [0.1], \"seed\": [0, 1]}}");
    if (mn_pilot_jobs(&first, one, pilot) != MN_OK) check_fatal("%s", mn_last_error());
    assert_int_equal(json_array_size(first), 0);      // nothing to choose from
    json_decref(first);
    json_decref(one);
    json_decref(jobs);
    json_decref(records);
    json_decref(pilot);
    check_done();
}

/* Whether `list` holds the very job. */
static bool has_job(const json_t *list, const json_t *job) {
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (json_array_get(list, i) == job) return true;
    }
    return false;
}

/* A pilot has a length of its own, and what is expected to run behind it is what it chose; of rows
 * that it has not chosen for yet, one setting. */
static void pilots_are_short(void **state) {
    (void)state;
    const char text[] = "{\"seeds\": [100], \"axes\": [\"train.lr\"], \"value\": \"loss\", "
                        "\"least\": true, \"steps\": 3}";
    json_t *pilot = json_loads(text, 0, NULL), *first = NULL, *chosen = NULL, *then = NULL;
    json_t *jobs = expand("{" TINY ", \"grid\": {\"model\": {"
                          "\"a\": {\"model\": {\"num_heads\": 2}}, \"b\": "
                          "{\"model\": {\"num_heads\": 4}}}, \"train.lr\": [0.1, 0.2], "
                          "\"seed\": [0, 1]}}");
    json_t *records = json_object();
    if (mn_pilot_jobs(&first, jobs, pilot) != MN_OK) check_fatal("%s", mn_last_error());
    assert_int_equal(json_array_size(first), 4);
    for (size_t i = 0; i < json_array_size(first); i++) {
        char key[MN_JOB_KEY];
        const json_t *job = json_array_get(first, i), *labels = json_object_get(job, "labels");
        const json_t *steps = mn_spec_get(job, "train.steps");
        const double lr = json_number_value(json_object_get(labels, "train.lr"));
        CHECK(json_integer_value(steps) == 3, "%lld steps",
              (long long)json_integer_value(steps));
        if (strcmp(json_string_value(json_object_get(labels, "model")), "a") != 0) continue;
        assert_int_equal(mn_job_key(key, job), MN_OK);    // row b has not run
        json_object_set_new(records, key, json_pack("{s:{s:f}}", "result", "loss", 1.0 - lr));
    }
    mn_status st = mn_pilot_choose(&chosen, jobs, pilot, first, records);
    if (st == MN_OK) st = mn_pilot_expected(&then, jobs, chosen, pilot);
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    assert_int_equal(json_array_size(chosen), 2);
    assert_int_equal(json_array_size(then), 4);
    for (size_t i = 0; i < json_array_size(jobs); i++) {
        const json_t *job = json_array_get(jobs, i), *labels = json_object_get(job, "labels");
        const bool a = strcmp(json_string_value(json_object_get(labels, "model")), "a") == 0;
        const bool high = json_number_value(json_object_get(labels, "train.lr")) > 0.15;
        CHECK(json_integer_value(mn_spec_get(job, "train.steps")) == 4, "a reported run is cut");
        CHECK(has_job(then, job) == (a ? high : !high), "row %s: %s", a ? "a" : "b",
              high ? "0.2" : "0.1");
    }
    json_decref(then);
    json_decref(chosen);
    json_decref(first);
    json_decref(jobs);
    json_decref(records);
    json_decref(pilot);
    check_done();
}

/* The rule of verdicts. */
static void verdicts_follow_the_rule(void **state) {
    (void)state;
    const mn_claim good = { .verdict = MN_CLAIM_HOLDS, .seeds = 3, .se = 0.1 };
    mn_claim c = good;
    assert_string_equal(mn_claim_word(&c, true), "reproduced");
    assert_string_equal(mn_claim_word(&c, false), "at reduced size");
    c.close = true;
    assert_string_equal(mn_claim_word(&c, true), "undecided");
    c = good;
    c.seeds = 1;
    c.se = NAN;
    assert_string_equal(mn_claim_word(&c, true), "undecided");
    c.sure = true;
    assert_string_equal(mn_claim_word(&c, true), "reproduced");
    c = good;
    c.verdict = MN_CLAIM_FAILS;
    assert_string_equal(mn_claim_word(&c, true), "refuted");
    c.verdict = MN_CLAIM_OPEN;
    assert_string_equal(mn_claim_word(&c, true), "not run");
}

static mn_sweep_state run_sweep(const char *path, const char *text, int processes) {
    static mn_sweep_state now;
    json_t *jobs = expand(text);
    const mn_sweep_options how = { .path = path, .processes = processes };
    if (mn_sweep_run(&now, jobs, &how) != MN_OK) check_fatal("%s", mn_last_error());
    json_decref(jobs);
    return now;
}

static int64_t lines_of(const char *path) {
    mn_file file = { 0 };
    int64_t n = 0;
    if (mn_file_map(&file, path) != MN_OK) return -1;
    for (size_t i = 0; i < file.size; i++) n += file.bytes[i] == '\n';
    mn_file_unmap(&file);
    return n;
}

/* Results of each key, as text. */
static void check_same_results(const char *a, const char *b) {
    json_t *one = NULL, *two = NULL, *record;
    const char *key;
    if (mn_sweep_records(&one, a) != MN_OK || mn_sweep_records(&two, b) != MN_OK) {
        check_fatal("%s", mn_last_error());
    }
    assert_int_equal(json_object_size(one), json_object_size(two));
    json_object_foreach(one, key, record) {
        const json_t *result = json_object_get(record, "result");
        CHECK(json_is_object(result), "%s has no result", key);
        CHECK(json_equal(result, json_object_get(json_object_get(two, key), "result")),
              "%s has another result", key);
    }
    json_decref(one);
    json_decref(two);
}

static void no_job_runs_twice(void **state) {
    (void)state;
    char path[PATH], alone[PATH];
    snprintf(path, PATH, "%s", in_folder("twice.jsonl"));
    snprintf(alone, PATH, "%s", in_folder("alone.jsonl"));
    const mn_sweep_state first = run_sweep(path, grid_of_six, 3);
    assert_int_equal(first.jobs, 6);
    assert_int_equal(first.done, 6);
    assert_int_equal(first.found, 0);
    assert_int_equal(lines_of(path), 6);
    const mn_sweep_state again = run_sweep(path, grid_of_six, 3);
    assert_int_equal(again.found, 6);
    assert_int_equal(lines_of(path), 6);
    /* the same job twice in one list */
    const mn_sweep_state pair = run_sweep(alone, "{" TINY ", \"parts\": [{}, {}]}", 2);
    assert_int_equal(pair.jobs, 1);
    assert_int_equal(lines_of(alone), 1);
    /* one process or three: the same numbers */
    snprintf(alone, PATH, "%s", in_folder("one-by-one.jsonl"));
    run_sweep(alone, grid_of_six, 1);
    check_same_results(path, alone);
    check_done();
}

/* Ends the program, as a power cut would, when a job has ended. */
static void die_after_two(void *context, const mn_sweep_state *now) {
    (void)context;
    if (now->ended && now->done == 2) kill(getpid(), SIGKILL);
}

static void a_killed_sweep_goes_on(void **state) {
    (void)state;
    char path[PATH], whole[PATH];
    snprintf(path, PATH, "%s", in_folder("killed.jsonl"));
    snprintf(whole, PATH, "%s", in_folder("whole.jsonl"));
    json_t *jobs = expand(grid_of_six);
    const pid_t child = fork();
    if (child == 0) {
        static mn_sweep_state now;
        const mn_sweep_options how = { .path = path, .processes = 2, .tell = die_after_two };
        mn_sweep_run(&now, jobs, &how);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status));
    json_decref(jobs);
    assert_int_equal(lines_of(path), 2);
    /* half a line, as a kill in the middle of a write leaves it */
    FILE *file = fopen(path, "ab");
    assert_non_null(file);
    fputs("{\"key\": \"0123", file);
    assert_int_equal(fclose(file), 0);
    const mn_sweep_state again = run_sweep(path, grid_of_six, 2);
    assert_int_equal(again.found, 2);
    assert_int_equal(again.done, 6);
    assert_int_equal(lines_of(path), 6);
    run_sweep(whole, grid_of_six, 2);
    check_same_results(path, whole);
    check_done();
}

static void one_failure_stops_nothing(void **state) {
    (void)state;
    char path[PATH];
    json_t *records = NULL, *record;
    const char *key;
    int64_t failed = 0;
    snprintf(path, PATH, "%s", in_folder("failed.jsonl"));
    /* heads that do not fit the width are found when the layer is made */
    static const char text[] = "{" TINY ", \"grid\": {\"heads\": {\"three\": {\"model\": "
                               "{\"num_heads\": 3}}, \"two\": {\"model\": {\"num_heads\": 2}}}, "
                               "\"seed\": [0, 1]}}";
    const mn_sweep_state now = run_sweep(path, text, 2);
    assert_int_equal(now.done, 2);
    assert_int_equal(now.failed, 2);
    if (mn_sweep_records(&records, path) != MN_OK) check_fatal("%s", mn_last_error());
    json_object_foreach(records, key, record) {
        const char *error = json_string_value(json_object_get(record, "error"));
        const char *label = json_string_value(mn_spec_get(record, "job.labels.heads"));
        failed += error != NULL;
        CHECK((error != NULL) == (strcmp(label, "three") == 0), "%s: %s", label,
              error ? error : "no error");
        CHECK(!error || strstr(error, "head") != NULL, "no word about heads: %s",
              error ? error : "");
    }
    assert_int_equal(failed, 2);
    json_decref(records);
    /* what failed is tried again, what is done is not */
    assert_int_equal(run_sweep(path, text, 2).found, 2);
    check_done();
}

static volatile sig_atomic_t stop;

static void stop_after_one(void *context, const mn_sweep_state *now) {
    (void)context;
    if (now->ended) stop = 1;
}

static void stopping_leaves_the_rest(void **state) {
    (void)state;
    char path[PATH];
    static mn_sweep_state now;
    snprintf(path, PATH, "%s", in_folder("stopped.jsonl"));
    json_t *jobs = expand(grid_of_six);
    const mn_sweep_options how = { .path = path, .processes = 1, .stop = &stop,
                                   .tell = stop_after_one };
    stop = 0;
    if (mn_sweep_run(&now, jobs, &how) != MN_OK) check_fatal("%s", mn_last_error());
    json_decref(jobs);
    assert_int_equal(now.done, 1);
    assert_int_equal(now.failed, 0);
    assert_int_equal(lines_of(path), 1);
    check_done();
}

static void a_damaged_file_is_named(void **state) {
    (void)state;
    char path[PATH];
    static mn_sweep_state now;
    snprintf(path, PATH, "%s", in_folder("damaged.jsonl"));
    assert_int_equal(mn_file_write_bytes(path, "{}\n", 3), MN_OK);
    json_t *jobs = expand(grid_of_six);
    const mn_sweep_options how = { .path = path, .processes = 1 };
    assert_int_equal(mn_sweep_run(&now, jobs, &how), MN_ERR_FORMAT);
    CHECK(strstr(mn_last_error(), "line 1") != NULL, "%s", mn_last_error());
    json_decref(jobs);
    check_done();
}

/* Segments make an epoch together, and no batch mixes them: short rows end in filling. The next
 * epoch repeats this one, or with `fresh` shows others; segments of the same options differ. */
static void check_segments(const char *fresh, bool repeats) {
    char text[1024];
    snprintf(text, sizeof text,
        "{\"jobs\": [{\"task\": {\"name\": \"mqar\", \"options\": {\"length\": 8, \"pairs\": 1, "
        "\"vocab\": 40}, \"test\": 8%s, \"segments\": [{\"options\": {\"length\": 8, \"pairs\": 1, "
        "\"vocab\": 40}, \"train\": 16}, {\"options\": {\"length\": 8, \"pairs\": 1, "
        "\"vocab\": 40}, \"train\": 8}, {\"options\": {\"length\": 32, \"pairs\": 4, "
        "\"vocab\": 40}, \"train\": 16}]}, \"epochs\": 2, \"train\": {\"batch\": 8}, "
        "\"model\": {\"layers\": \"linear\", \"hidden_size\": 16}}]}", fresh);
    json_t *jobs = expand(text);
    json_t *job = json_array_get(jobs, 0);
    assert_int_equal(json_integer_value(mn_spec_get(job, "train.steps")), 10);
    const mn_json handle = { .value = job, .name = "job" };
    mn_task_run *run = NULL;
    if (mn_task_run_open(&run, &handle) != MN_OK) check_fatal("%s", mn_last_error());
    const mn_source source = mn_task_run_source(run);
    static int32_t tokens[5][8 * 32], targets[8 * 32], again[8 * 32];
    assert_true(source.length == 32 && source.epoch == 5 && source.rows == 8);
    for (int64_t step = 0; step < 5; step++) {
        int32_t *own = tokens[step];
        assert_int_equal(source.fill(source.context, step + 5, 8, 32, again, targets), MN_OK);
        assert_int_equal(source.fill(source.context, step, 8, 32, own, targets), MN_OK);
        CHECK((memcmp(own, again, sizeof again) == 0) == repeats, "step %d of the next epoch",
              (int)step);
        for (int row = 0; row < 8; row++) {
            int asked = 0, behind = 0;
            for (int t = 0; t < 32; t++) {
                asked += targets[row * 32 + t] >= 0;
                behind += t >= 8 && own[row * 32 + t] != 0;
            }
            CHECK(asked == (step < 3 ? 1 : 4), "step %d asks %d times", (int)step, asked);
            CHECK(step >= 3 || behind == 0, "step %d: tokens behind the end", (int)step);
        }
    }
    CHECK(memcmp(tokens[0], tokens[2], sizeof tokens[0]) != 0, "two segments show the same");
    mn_task_run_close(run);
    json_decref(jobs);
}

static void segments_follow_each_other(void **state) {
    (void)state;
    check_segments("", true);
    check_segments(", \"fresh\": true", false);
    check_done();
}

/* Ends the process in the middle of a job; elsewhere says where the job began. */
static void end_at_step(void *context, const mn_job_progress *now) {
    if (now->step == *(const int64_t *)context) _exit(7);
}

static void note_first(void *context, const mn_job_progress *now) {
    int64_t *first = context;
    if (*first < 0) *first = now->step;
}

/* Asks the job to stop at a step. */
typedef struct stop_at {
    int64_t step;
    volatile sig_atomic_t stop;
} stop_at;

static void stop_at_step(void *context, const mn_job_progress *now) {
    stop_at *at = context;
    at->stop = now->step == at->step;
}

/* Runs the job as far as a step, by a process that ends there. */
static void kill_at(const json_t *job, const mn_job_keeping *keeping, int64_t step) {
    int status = 0;
    const pid_t pid = fork();
    if (pid == 0) {
        json_t *record = NULL;
        mn_job_run(&record, job, keeping, NULL, end_at_step, &step);
        _exit(1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

/* The same by asking; checkpoints are not due by the clock then. */
static void stop_it_at(const json_t *job, mn_job_keeping keeping, int64_t step) {
    stop_at at = { step, 0 };
    json_t *record = NULL;
    keeping.seconds = 1e9;
    keeping.stop = &at.stop;
    assert_int_equal(mn_job_run(&record, job, &keeping, NULL, stop_at_step, &at), MN_OK);
    CHECK(!record, "a job that was stopped left a record");
    json_decref(record);
}

/* A job that was killed, or stopped, goes on where it saved itself, and ends with the same
 * numbers. */
static void end_and_go_on(const char *text, int64_t step, bool kill) {
    char folder[PATH], own[2 * PATH], key[MN_JOB_KEY];
    int64_t first = -1;
    snprintf(folder, sizeof folder, "%s", in_folder("keep"));
    json_t *jobs = expand(text);
    const json_t *job = json_array_get(jobs, 0);
    json_t *whole = NULL, *resumed = NULL;
    const mn_job_keeping keeping = { folder, 0.0, NULL };
    assert_int_equal(mn_job_key(key, job), MN_OK);
    assert_int_equal(mn_job_run(&whole, job, NULL, NULL, NULL, NULL), MN_OK);
    if (kill) kill_at(job, &keeping, step);
    else stop_it_at(job, keeping, step);
    snprintf(own, sizeof own, "%s/%s", folder, key);
    assert_int_equal(access(own, F_OK), 0);
    assert_int_equal(mn_job_run(&resumed, job, &keeping, NULL, note_first, &first), MN_OK);
    CHECK(first >= step, "the job began at step %d", (int)first);
    json_object_del(json_object_get(whole, "result"), "speed");
    json_object_del(json_object_get(resumed, "result"), "speed");
    CHECK(json_equal(json_object_get(whole, "result"), json_object_get(resumed, "result")),
          "another result");
    CHECK(access(own, F_OK) != 0, "%s is still there", own);
    json_decref(whole);
    json_decref(resumed);
    json_decref(jobs);
}

static void kill_and_go_on(const char *text, int64_t step) {
    end_and_go_on(text, step, true);
    end_and_go_on(text, step, false);
}

/* A job of text that it makes itself; 704 tokens are too few for the haystack. */
static const char text_job[] =
    "{\"jobs\": [{\"data\": {\"made\": 20000}, \"model\": {\"layers\": \"gdn\", "
    "\"hidden_size\": 16, \"num_hidden_layers\": 1}, \"train\": {\"steps\": 6, \"lr\": 0.02, "
    "\"warmup\": 0, \"batch\": 2, \"context\": 32, \"eval_every\": 2, \"eval_batches\": 2}, "
    "\"ask\": {\"lengths\": {\"1x\": 32, \"9x\": 288}, \"tokens\": 600, \"rows\": 2, "
    "\"tasks\": {\"niah-single-1\": {}}, \"budgets\": {\"1x\": 1000, \"short\": 704}}}]}";

static void a_killed_job_goes_on(void **state) {
    (void)state;
    kill_and_go_on("{\"jobs\": [{\"task\": {\"name\": \"mad-recall\", \"options\": {"
                   "\"length\": 16}, \"train\": 64, \"test\": 16}, \"model\": {"
                   "\"layers\": \"gdn\", \"hidden_size\": 16, \"num_hidden_layers\": 1}, "
                   "\"train\": {\"steps\": 6, \"batch\": 16, \"warmup\": 0}, "
                   "\"evaluate\": {\"every\": 1, \"select\": \"loss\"}}]}", 3);
    kill_and_go_on("{\"jobs\": [{\"kind\": \"addressed\", \"memory\": \"bayes\", \"task\": {"
                   "\"name\": \"collision\", \"options\": {\"floods\": \"1,2\", \"boosts\": 1}}, "
                   "\"steps\": 4, \"batch\": 8, \"tests\": {\"more\": {\"options\": {"
                   "\"floods\": \"3\"}, \"test\": 16}}}]}", 1);
    kill_and_go_on(text_job, 4);
    end_and_go_on(text_job, 6, false);    // while it is asked
    check_done();
}

/* What a model of text is asked: a length each, and why a budget is left out. */
static void models_of_text_are_asked(void **state) {
    (void)state;
    json_t *record = NULL, *jobs = expand(text_job);
    assert_int_equal(mn_job_run(&record, json_array_get(jobs, 0), NULL, NULL, NULL, NULL), MN_OK);
    const json_t *result = json_object_get(record, "result");
    const double loss = json_number_value(mn_spec_get(result, "perplexity.9x.loss"));
    CHECK(json_integer_value(mn_spec_get(result, "perplexity.1x.tokens")) == 18 * 31 &&
          json_integer_value(mn_spec_get(result, "perplexity.9x.tokens")) == 2 * 287,
          "not the windows of the first 600 tokens");
    CHECK(loss > 1.0 && loss < 5.4, "a loss of %g, and knowing nothing is 5.5", loss);
    CHECK(json_integer_value(mn_spec_get(result, "tasks.niah-single-1.1x.answers")) == 16,
          "not eight bytes of each of two answers");
    CHECK(strstr(json_string_value(mn_spec_get(result, "tasks.niah-single-1.short.left_out")),
                 "raise the budget") != NULL, "not why");
    json_decref(record);
    json_decref(jobs);
    check_done();
}

/* Every memory of the learned collisions learns, and learns the same again. */
static void learned_collisions_repeat(void **state) {
    (void)state;
    json_t *jobs = expand(
        "{\"job\": {\"kind\": \"addressed\", \"task\": {\"name\": \"collision\", \"options\": "
        "{\"bindings\": 8, \"floods\": \"1,2\", \"boosts\": 1}}, \"steps\": 30, \"batch\": 8, "
        "\"lr\": 0.01, \"tests\": {\"more\": {\"options\": {\"floods\": \"3\"}, \"test\": 16}}}, "
        "\"grid\": {\"memory\": [\"linear\", \"gla\", \"delta\", \"reset\", \"bayes\"]}}");
    for (size_t i = 0; i < json_array_size(jobs); i++) {
        json_t *one = NULL, *two = NULL;
        const json_t *job = json_array_get(jobs, i);
        if (mn_job_run(&one, job, NULL, NULL, NULL, NULL) != MN_OK ||
            mn_job_run(&two, job, NULL, NULL, NULL, NULL) != MN_OK) {
            check_fatal("%s", mn_last_error());
        }
        const json_t *result = json_object_get(one, "result");
        CHECK(json_is_object(result) && json_equal(result, json_object_get(two, "result")),
              "memory %zu: another result", i);
        /* log 16 = 2.77 is what knowing nothing costs; a mean over the last steps */
        const double loss = json_number_value(mn_spec_get(result, "train_loss"));
        CHECK(loss > 0.0 && loss < 2.0, "memory %zu: loss %g after 30 steps", i, loss);
        json_decref(one);
        json_decref(two);
    }
    json_decref(jobs);
    check_done();
}

/* ---- cells ----------------------------------------------------------------------------------- */

static void cells_choose_the_best_setting(void **state) {
    (void)state;
#define RUN(model, lr, seed, score)                                                                \
    "{\"labels\": {\"model\": \"" model "\", \"task\": \"t\", \"train.lr\": " lr                   \
    ", \"seed\": " seed "}, \"result\": {\"token\": " score "}}"
    mn_json root = parse(
        "{\"tables\": [{\"title\": \"x\", \"rows\": \"model\", \"columns\": \"task\", \"value\": "
        "\"token\", \"percent\": true}], \"paper_numbers\": [{\"table\": 0, \"row\": \"a\", "
        "\"column\": \"t\", \"printed\": \"70.0\", \"place\": \"Table 9\"}], \"runs\": ["
        RUN("a", "0.1", "0", "0.9") "," RUN("a", "0.1", "1", "0.1") ","
        RUN("a", "0.2", "0", "0.6") "," RUN("a", "0.2", "1", "0.8") ","
        RUN("b", "0.1", "0", "0.25") "," RUN("b", "0.1", "1", "null") "], \"claims\": ["
        "{\"says\": \"a is ahead\", \"cell\": [\"a\", \"t\"], \"less\": [\"b\", \"t\"], "
        "\"above\": 0.4}, {\"says\": \"a is low\", \"cell\": [\"a\", \"t\"], \"below\": 0.6}, "
        "{\"says\": \"nobody\", \"cell\": [\"c\", \"t\"], \"above\": 0}]}");
#undef RUN
    mn_claim ahead, low, nobody;
    assert_int_equal(mn_claim_count(&root), 3);
    assert_int_equal(mn_claim_judge(&ahead, &root, 0), MN_OK);
    assert_int_equal(mn_claim_judge(&low, &root, 1), MN_OK);
    assert_int_equal(mn_claim_judge(&nobody, &root, 2), MN_OK);
    assert_true(ahead.verdict == MN_CLAIM_HOLDS && fabs(ahead.value - 0.45) < 1e-12);
    assert_true(ahead.seeds == 1 && isnan(ahead.se) && ahead.percent);
    assert_true(low.verdict == MN_CLAIM_FAILS && fabs(low.se - 0.1) < 1e-12 && low.seeds == 2);
    assert_int_equal(nobody.verdict, MN_CLAIM_OPEN);
    assert_true(low.close && !ahead.close && !nobody.close);
    mn_cells cells;
    if (mn_cells_make(&cells, &root, 0) != MN_OK) check_fatal("%s", mn_last_error());
    assert_int_equal(cells.n, 2);
    const mn_cell *a = mn_cells_at(&cells, "a", "t"), *b = mn_cells_at(&cells, "b", "t");
    assert_non_null(a);
    assert_non_null(b);
    assert_string_equal(a->setting, "train.lr=0.2");
    /* mean of 0.6 and 0.8; deviations of 0.1 give sd 0.1414 and, over two seeds, 0.1 */
    assert_true(fabs(a->mean - 0.7) < 1e-12 && fabs(a->se - 0.1) < 1e-12 && a->n == 2);
    assert_true(fabs(a->paper - 0.7) < 1e-12 && mn_cell_agrees(a, true));
    assert_true(b->n == 1 && b->missing == 1 && isnan(b->se) && isnan(b->paper));
    mn_cells_free(&cells);
    mn_json_free(&root);
    check_done();
}

/* Rows that are both at chance differ by nothing, however sure their seeds are: undecided. A row
 * that has learned decides, and one that falls short of a margin refutes it. */
static void rows_at_chance_decide_nothing(void **state) {
    (void)state;
#define RUN(model, seed, score)                                                                    \
    "{\"labels\": {\"model\": \"" model "\", \"task\": \"t\", \"seed\": " seed                     \
    "}, \"result\": {\"token\": " score "}}"
#define LESS(than) "\"cell\": [\"a\", \"t\"], \"less\": [\"" than "\", \"t\"], \"above\": 0.2"
    mn_json root = parse(
        "{\"tables\": [{\"title\": \"x\", \"rows\": \"model\", \"columns\": \"task\", \"value\": "
        "\"token\"}], \"runs\": [" RUN("a", "0", "0.001") "," RUN("a", "1", "0.002") ","
        RUN("b", "0", "0.001") "," RUN("b", "1", "0.002") "," RUN("c", "0", "0.9") ","
        RUN("c", "1", "0.91") "], \"claims\": [{\"says\": \"no bound\", " LESS("b") "}, "
        "{\"says\": \"idle\", " LESS("b") ", \"learned\": 0.2}, "
        "{\"says\": \"one learned\", " LESS("c") ", \"learned\": 0.2}]}");
#undef LESS
#undef RUN
    static const char *const words[] = { "refuted", "undecided", "refuted" };
    for (int i = 0; i < 3; i++) {
        mn_claim claim;
        if (mn_claim_judge(&claim, &root, i) != MN_OK) check_fatal("%s", mn_last_error());
        CHECK(strcmp(mn_claim_word(&claim, true), words[i]) == 0, "%s: %s", claim.says,
              mn_claim_word(&claim, true));
    }
    mn_json_free(&root);
    check_done();
}

/* ---------------------------------------------------------------------------------------------- */

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_know_what_defines_a_job),
        cmocka_unit_test(products_have_labels),
        cmocka_unit_test(what_cannot_run_is_refused),
        cmocka_unit_test(plans_are_whole),
        cmocka_unit_test(settings_are_chosen_on_other_seeds),
        cmocka_unit_test(pilots_are_short),
        cmocka_unit_test(verdicts_follow_the_rule),
        cmocka_unit_test(no_job_runs_twice),
        cmocka_unit_test(a_killed_sweep_goes_on),
        cmocka_unit_test(one_failure_stops_nothing),
        cmocka_unit_test(stopping_leaves_the_rest),
        cmocka_unit_test(a_damaged_file_is_named),
        cmocka_unit_test(segments_follow_each_other),
        cmocka_unit_test(a_killed_job_goes_on),
cmocka_unit_test(models_of_text_are_asked),
        cmocka_unit_test(learned_collisions_repeat),
        cmocka_unit_test(cells_choose_the_best_setting),
        cmocka_unit_test(rows_at_chance_decide_nothing),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
