/* test_tasks.c - what holds for every task: samples are functions of seed, split and index, ids lie
 * in range, nonsense is refused, settings open; and batches. */
// labels: sanitize
#include "support/task_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "support/folder.h"
#include "tasks/stories.h"

enum { SEED = 4711 };

static const char prose[] =
    "It was a bright cold day in April, and the clocks were striking. Mr. Smith slipped quickly "
    "through the doors! Was he late? \"Not yet.\" he said. The hall smelt of old mats and 3.5 "
    "cabbages, etc. and more. At one end of it a poster had been fixed to the wall. ";

/* Options under which row `name` can be made: tasks of essays need some. */
static const char *needs(const char *name, const char *more) {
    static char changes[512];
    const bool essay = strstr(name, "niah") && !strstr(name, "niah-1") && !strstr(name, "single-1");
    snprintf(changes, sizeof changes, "%s%s %s", essay ? "essays=" : "",
             essay ? in_folder("essays.txt") : "", more);
    return changes;
}

static int setup(void **state) {
    const int failed = make_folder(state);
    char text[20 * sizeof prose] = "";
    for (int i = 0; i < 20; i++) strcat(text, prose);
    if (failed == 0) write_file(in_folder("essays.txt"), text, strlen(text));
    return failed;
}

static size_t input_bytes(const task_case *c) {
    return c->x ? (size_t)(c->n * c->shape.features) * sizeof *c->x
                : (size_t)c->n * sizeof *c->input;
}

static const void *input_of(const task_case *c) {
    return c->x ? (const void *)c->x : (const void *)c->input;
}

static void check_range(const task_case *c, const char *what) {
    int64_t scored = 0;
    const int64_t used = mn_task_used(c->task);
    CHECK(used >= 1 && used <= c->n, "%s: %d of %d places used", what, (int)used, (int)c->n);
    for (int64_t t = 0; t < c->n; t++) {
        const bool id = c->x || (c->input[t] >= 0 && c->input[t] < c->shape.vocab);
        const bool asked = c->target[t] != MN_NO_TARGET;
        CHECK(id, "%s: token %d at %d", what, c->x ? 0 : (int)c->input[t], (int)t);
        CHECK(!asked || (c->target[t] >= 0 && c->target[t] < c->shape.classes && t < used),
              "%s: target %d at %d", what, (int)c->target[t], (int)t);
        CHECK(c->x || t < used || c->input[t] == 0, "%s: token behind the end", what);
        scored += asked;
    }
    CHECK(scored == task_scored(c), "%s: counts differ", what);
}

/* The same bits whatever was asked before, and by another handle; other bits for another seed,
 * split or index. */
static void samples_are_functions(void **state) {
    (void)state;
    for (int row = 0; row < mn_task_count(); row++) {
        const char *name = mn_task_row(row).name;
        task_case a = task_open(name, needs(name, "")), b = task_open(name, needs(name, ""));
        const size_t bytes = input_bytes(&a), ids = (size_t)a.n * sizeof *a.target;
        const int64_t far = mn_task_examples(a.task, MN_SPLIT_TRAIN) > 0 ? 100000 : 5000000000;
        for (int i = 0; i < 9; i++) {
            const mn_split split = (mn_split)(i % 3);
            const int64_t index = far + i * 1000;
            task_take(&a, SEED, split, index);
            check_range(&a, name);
            CHECK(task_scored(&a) > 0 || strcmp(name, "stories") == 0, "%s asks nothing", name);
            task_take(&b, SEED + 1, split, index);
            CHECK(memcmp(input_of(&a), input_of(&b), bytes) != 0, "%s: the seed is not heard",
                  name);
            task_take(&b, SEED, split, index + 1);
            CHECK(memcmp(input_of(&a), input_of(&b), bytes) != 0, "%s: the index is not heard",
                  name);
            task_take(&b, SEED, (mn_split)((i + 1) % 3), index);
            CHECK(memcmp(input_of(&a), input_of(&b), bytes) != 0, "%s: the split is not heard",
                  name);
            task_take(&b, SEED, split, index);
            CHECK(memcmp(input_of(&a), input_of(&b), bytes) == 0 &&
                  memcmp(a.target, b.target, ids) == 0, "%s: not the same again", name);
        }
        task_close(&a);
        task_close(&b);
    }
    check_done();
}

static void settings_open(void **state) {
    (void)state;
    for (int i = 0; i < mn_task_setting_count(); i++) {
        const mn_task_setting s = mn_task_setting_row(i);
        CHECK(mn_task_find(s.task) >= 0, "%s: no task %s", s.name, s.task);
        if (strcmp(s.suite, "ruler") == 0 && strcmp(s.name, "budget-2048") == 0 &&
            task_try(s.task, needs(s.task, s.changes)) != MN_OK) {
            assert_message_holds("raise the budget");    // 500 words are too many bytes
            continue;
        }
        task_case c = task_open(s.task, needs(s.task, s.changes));
        task_take(&c, SEED, MN_SPLIT_TEST, 3);
        check_range(&c, s.name);
        task_close(&c);
    }
    check_done();
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void nonsense_is_refused(void **state) {
    (void)state;
    static const struct {
        const char *task, *changes, *piece1, *piece2;
    } cases[] = {
        { "mad-recal", "", "mad-recal", "did you mean \"mad-recall\"" },
        { "mad-recall", "vocabb=3", "vocabb", "did you mean \"vocab\"" },
        { "mad-recall", "pairs=3", "pairs", "unknown" },
        { "mad-recall", "vocab=big", "vocab", "whole number" },
        { "mad-recall", "vocab=1", "vocab", "from 2 to" },
        { "mad-recall", "length=127", "length is 127", "even" },
        { "mad-recall", "length=2", "length is 2", "at least 4" },
        { "mad-recall", "length=0", "length", "from 1 to" },
        { "mad-noisy", "vocab=17", "noise_vocab", "left for keys and values" },
        { "mad-noisy", "noise=1", "noise", "below 1" },
        { "mad-noisy", "noise=1.5", "noise", "from 0 to 1" },
        { "mad-noisy", "noise_vocab=0", "noise_vocab", "tokens of its own" },
        { "mad-fuzzy", "vocab=6", "vocab is 6", "whole motif" },
        { "mad-fuzzy", "length=12", "length is 12", "twice" },
        { "mad-fuzzy", "vocab=70000", "vocab is 70000", "65535" },
        { "mad-memorise", "vocab=2", "vocab is 2", "three" },
        { "mad-memorise", "length=5", "length is 5", "even" },
        { "mad-copy", "to_copy=128", "to_copy is 128", "fit" },
        { "mad-copy", "vocab=2", "vocab is 2", "three" },
        { "mqar", "length=63", "length is 63", "even" },
        { "mqar", "vocab=64", "vocab is 64", "exceed length" },
        { "mqar", "pairs=17", "pairs is 17", "fit in length" },
        { "mqar", "random_fill=3", "random_fill", "true or false" },
        { "mqar-update", "updates=5", "updates is 5", "no more keys" },
        { "mqar-update", "updates=4 rewrites=9999", "pairs is 4", "fit in length" },
        { "mqar-block", "block=16", "blocks is 4", "fit in length" },
        { "a5", "steps=1", "steps is 1", "two factors" },
        { "a5", "sequences=2", "sequences", "from 5 to" },
        { "collision", "floods=1,x", "floods is \"1,x\"", "separated by commas" },
        { "collision", "floods=", "floods is \"\"", "separated by commas" },
        { "collision", "rho_low=0.9", "rho_low", "exceed rho_high" },
        { "collision", "bindings=0", "bindings", "from 1 to" },
        { "crowding", "writes=4,16", "queries is 8", "least of writes" },
        { "crowding", "writes=0", "writes is \"0\"", "from 1 to" },
        { "niah-single-2", "", "essays", "name a file or folder" },
        { "niah-single-1", "haystack=hay", "haystack is \"hay\"", "noise, essay" },
        { "niah-single-1", "sizing=big", "sizing is \"big\"", "ruler, lm-eval" },
        { "niah-single-1", "values_are=dates", "values_are is \"dates\"", "uuids" },
        { "niah-single-1", "asked=2", "asked is 2", "not that many" },
        { "niah-single-1", "keys=32 values=2", "values is 2", "40" },
        { "niah-single-1", "budget=256", "shortest haystack", "raise the budget" },
        { "niah-single-1", "tokenizer=/no/such.json", "/no/such.json", "no such" },
        { "niah-single-2", "essays=/no/such", "/no/such", "no such" },
        { "stories", "cast=24 objects=3", "n_cast", "possible" },
        { "stories", "update=0 filler=0 question=0", "question", "weight" },
    };
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        const mn_status st = task_try(cases[k].task, cases[k].changes);
        CHECK(st != MN_OK, "%s %s is taken", cases[k].task, cases[k].changes);
        CHECK(strstr(mn_last_error(), cases[k].piece1) && strstr(mn_last_error(), cases[k].piece2),
              "%s %s: \"%s\" lacks \"%s\" or \"%s\"", cases[k].task, cases[k].changes,
              mn_last_error(), cases[k].piece1, cases[k].piece2);
    }
    task_case c = task_open("mad-recall", ""), v = task_open("collision", "");
    int32_t ids[256];
    float x[1];
    mn_task_text text;
    assert_fails(mn_task_sample(c.task, 1, MN_SPLIT_TEST, -1, ids, ids), MN_ERR_ARGUMENT,
                 "sample -1", "none");
    assert_fails(mn_task_sample(c.task, 1, MN_SPLIT_COUNT, 0, ids, ids), MN_ERR_ARGUMENT,
                 "split 3", "none");
    assert_fails(mn_task_vectors(c.task, 1, MN_SPLIT_TEST, 0, x, ids), MN_ERR_ARGUMENT,
                 "mad-recall", "tokens");
    assert_fails(mn_task_sample(v.task, 1, MN_SPLIT_TEST, 0, ids, ids), MN_ERR_ARGUMENT,
                 "collision", "vectors");
    assert_fails(mn_task_text_of(c.task, 1, MN_SPLIT_TEST, 0, &text), MN_ERR_ARGUMENT,
                 "mad-recall", "not of text");
    task_close(&c);
    task_close(&v);
    mn_task_destroy(NULL);
    check_done();
}

/* Any options: either refused with a sentence, or samples in range. */
static void random_options_never_break(void **state) {
    (void)state;
    static const char *const keys[] = {
        "vocab", "length", "noise_vocab", "noise", "key_motif", "value_motif", "to_copy", "pairs",
        "alpha", "random_fill", "shared", "updates", "rewrites", "block", "blocks", "steps",
        "sequences", "short_ones", "bindings", "rho_low", "rho_high", "floods", "boosts", "writes",
        "key_width", "labels", "queries", "batch", "budget", "haystack", "sizing", "values_are",
        "keys", "values", "asked", "names", "objects", "places", "cast", "sentences", "p_end",
        "p_new", "update", "filler", "question", "answers_only",
    };
    static const char *const values[] = {
        "0", "1", "2", "3", "4", "5", "7", "8", "16", "17", "33", "64", "100", "255", "256", "600",
        "0.5", "0.99", "-1", "true", "false", "essay", "noise", "lm-eval", "uuids", "words", "1,2",
        "\"\"", "null", "[]", "1e300", "9223372036854775807", "1000",
    };
    uint64_t n = 0;
    int taken = 0;
    for (int trial = 0; trial < 20000; trial++) {
        char changes[400] = "";
        const int row = (int)(mn_rng_bits(SEED, 1, n++) % (uint64_t)mn_task_count());
        const char *name = mn_task_row(row).name;
        const uint64_t n_changes = mn_rng_bits(SEED, 1, n++) % 5;
        for (uint64_t i = 0; i < n_changes; i++) {
            const char *key = keys[mn_rng_bits(SEED, 1, n++) % MN_COUNTOF(keys)];
            const char *value = values[mn_rng_bits(SEED, 1, n++) % MN_COUNTOF(values)];
            const size_t used = strlen(changes);
            snprintf(changes + used, sizeof changes - used, " %s=%s", key, value);
        }
        /* Needles are slow to make; one in sixteen is enough. */
        if (strstr(name, "niah") && trial % 16 != 0) continue;
        if (task_try(name, needs(name, changes)) != MN_OK) {
            CHECK(strlen(mn_last_error()) > 8, "%s %s: no reason given", name, changes);
            continue;
        }
        task_case c = task_open(name, needs(name, changes));
        for (int i = 0; i < 6; i++) {
            task_take(&c, (uint64_t)trial, (mn_split)(i % 3), i);
            check_range(&c, name);
        }
        taken++;
        task_close(&c);
    }
    CHECK(taken > 1000, "only %d option sets were possible", taken);
    check_done();
}

/* ---- stories --------------------------------------------------------------------------------- */

/* Rows hold whole stories in a row, whose answers are told by the latest place. */
static void stories_are_read_again(void **state) {
    (void)state;
    static const char *const cases[] = { "", "answers_only=true length=1000", "length=1",
                                         "p_end=1 length=64" };
    const int32_t ask = mn_stories_find("?", 1), end = mn_stories_find("\n", 1);
    const int32_t puts_ = mn_stories_find("puts", 4), takes = mn_stories_find("takes", 5);
    const int32_t objects = mn_stories_first(MN_STORIES_OBJECT);
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        task_case c = task_open("stories", cases[k]);
        int64_t answers = 0;
        for (int64_t i = 0; i < 200; i++) {
            const mn_split split = (mn_split)(i % 3);
            const bool all = split == MN_SPLIT_TRAIN && k != 1;
            int32_t place[32];
            memset(place, -1, sizeof place);
            task_take(&c, SEED, split, i);
            for (int64_t t = 0; t < c.n; t++) {
                const int32_t now = c.input[t];
                if (now == end) memset(place, -1, sizeof place);
                if (t >= 5 && (c.input[t - 5] == puts_ || c.input[t - 5] == takes)) {
                    place[c.input[t - 3] - objects] = now;
                }
                int32_t want = all && t + 1 < c.n ? c.input[t + 1] : MN_NO_TARGET;
                if (now == ask && t > 0) {
                    want = place[c.input[t - 1] - objects];
                    answers++;
                }
                if (all && t + 1 == c.n && now != ask) continue;    // behind the row
                CHECK(c.target[t] == want, "%s, place %d: target %d, not %d", cases[k], (int)t,
                      (int)c.target[t], (int)want);
            }
        }
        CHECK(answers > 0 || k >= 2, "no questions");
        task_close(&c);
    }
    check_done();
}

/* ---- batches --------------------------------------------------------------------------------- */

static void sets_are_gone_through_once_an_epoch(void **state) {
    (void)state;
    enum { ROWS = 8, N = 29 };
    task_case c = task_open("mad-recall", "");
    const size_t row_bytes = (size_t)c.n * sizeof *c.input;
    mn_token_batch batch;
    mn_task_feed feed = { .split = MN_SPLIT_TRAIN, .seed = SEED, .rows = ROWS, .examples = N };
    assert_int_equal(mn_task_batch_create(&batch, c.task, ROWS), MN_OK);
    assert_int_equal(mn_task_epoch(c.task, &feed), 4);
    int32_t *first = malloc(row_bytes);
    int64_t moved = 0;
    for (int64_t epoch = 0; epoch < 3; epoch++) {
        int times[N] = { 0 };
        for (int64_t step = 4 * epoch; step < 4 * epoch + 4; step++) {
            assert_int_equal(mn_task_fill(&batch, NULL, c.task, &feed, step), MN_OK);
            for (int r = 0; r < ROWS; r++) {
                const int32_t *tokens = batch.tokens + r * c.n, *targets = batch.targets + r * c.n;
                CHECK(batch.starts[r] == r * c.n, "start of row %d", r);
                if (step % 4 == 3 && r >= N - 3 * ROWS) {
                    for (int64_t t = 0; t < c.n; t++) {
                        CHECK(tokens[t] == 0 && targets[t] == MN_NO_TARGET, "row %d is not empty",
                              r);
                    }
                    continue;
                }
                int found = -1;
                for (int i = 0; i < N; i++) {
                    task_take(&c, SEED, MN_SPLIT_TRAIN, i);
                    if (memcmp(c.input, tokens, row_bytes) != 0) continue;
                    CHECK(memcmp(c.target, targets, row_bytes) == 0, "other targets");
                    found = i;
                }
                CHECK(found >= 0, "step %d row %d is no example of the set", (int)step, r);
                if (found >= 0) times[found]++;
            }
        }
        for (int i = 0; i < N; i++) CHECK(times[i] == 1, "example %d came %d times", i, times[i]);
        assert_int_equal(mn_task_fill(&batch, NULL, c.task, &feed, 4 * epoch), MN_OK);
        if (epoch > 0) moved += memcmp(first, batch.tokens, row_bytes) != 0;
        memcpy(first, batch.tokens, row_bytes);
    }
    CHECK(moved > 0, "epochs have one order");
    feed.in_order = true;
    assert_int_equal(mn_task_fill(&batch, NULL, c.task, &feed, 5), MN_OK);
    task_take(&c, SEED, MN_SPLIT_TRAIN, 8 + 3);
    assert_memory_equal(c.input, batch.tokens + 3 * c.n, row_bytes);
    feed.examples = 0;
    assert_int_equal(mn_task_epoch(c.task, &feed), 0);
    assert_int_equal(mn_task_fill(&batch, NULL, c.task, &feed, 1000), MN_OK);
    task_take(&c, SEED, MN_SPLIT_TRAIN, 8003);
    assert_memory_equal(c.input, batch.tokens + 3 * c.n, row_bytes);
    free(first);
    mn_token_batch_free(&batch);
    task_close(&c);
    check_done();
}

static void ended_splits_and_vectors_fill_batches(void **state) {
    (void)state;
    task_case a = task_open("a5", "steps=2 sequences=100"), v = task_open("collision", "");
    mn_token_batch batch;
    mn_task_feed feed = { .split = MN_SPLIT_TEST, .seed = SEED, .rows = 6 };
    assert_int_equal(mn_task_examples(a.task, MN_SPLIT_TEST), 20);
    assert_int_equal(mn_task_epoch(a.task, &feed), 4);
    assert_int_equal(mn_task_batch_create(&batch, a.task, 6), MN_OK);
    assert_int_equal(mn_task_fill(&batch, NULL, a.task, &feed, 3), MN_OK);
    assert_int_equal(batch.targets[5 * a.n], MN_NO_TARGET);
    assert_true(batch.targets[1 * a.n] != MN_NO_TARGET);
    assert_fails(mn_task_fill(&batch, NULL, a.task, &feed, -1), MN_ERR_ARGUMENT, "a5", "step -1");
    assert_fails(mn_task_fill(&batch, NULL, a.task, &feed, INT64_MAX), MN_ERR_ARGUMENT, "a5",
                 "no step");
    feed.rows = 5;
    assert_fails(mn_task_fill(&batch, NULL, a.task, &feed, 0), MN_ERR_ARGUMENT, "6 rows", "5 of");
    mn_token_batch_free(&batch);
    assert_fails(mn_task_batch_create(&batch, a.task, 0), MN_ERR_ARGUMENT, "a5", "0 rows");
    assert_fails(mn_task_batch_create(&batch, a.task, INT64_MAX), MN_ERR_MEMORY, "a5", "memory");
    feed = (mn_task_feed){ .split = MN_SPLIT_TRAIN, .seed = SEED, .rows = 256 };
    assert_int_equal(mn_task_batch_create(&batch, v.task, 256), MN_OK);
    assert_fails(mn_task_fill(&batch, NULL, v.task, &feed, 0), MN_ERR_ARGUMENT, "collision",
                 "room");
    const int64_t row = v.n * v.shape.features;
    float *x = malloc((size_t)(256 * row) * sizeof *x);
    assert_int_equal(mn_task_fill(&batch, x, v.task, &feed, 3), MN_OK);
    task_take(&v, SEED, MN_SPLIT_TRAIN, 3 * 256 + 9);
    assert_memory_equal(v.x, x + 9 * row, (size_t)row * sizeof *x);
    assert_memory_equal(v.target, batch.targets + 9 * v.n, (size_t)v.n * sizeof *v.target);
    free(x);
    mn_token_batch_free(&batch);
    task_close(&a);
    task_close(&v);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(samples_are_functions),
        cmocka_unit_test(settings_open),
        cmocka_unit_test(nonsense_is_refused),
        cmocka_unit_test(random_options_never_break),
        cmocka_unit_test(stories_are_read_again),
        cmocka_unit_test(sets_are_gone_through_once_an_epoch),
        cmocka_unit_test(ended_splits_and_vectors_fill_batches),
    };
    return cmocka_run_group_tests_name("tasks", tests, setup, remove_folder);
}
