/* test_tasks_known.c - the stream of statements and questions, read a second time. */
// labels: sanitize
#include "support/task_case.h"

#include <math.h>
#include <string.h>

#include "base/util.h"

enum { SEED = 77, MOST = 512 };

typedef struct reading {
    int64_t questions, statements, updates, unknown, kinds[4];
} reading;

/* The kind of a question by the definition: -1 where the place is none. */
static int kind_at(const task_case *c, int64_t place, int64_t old_after) {
    const int32_t key = c->input[place];
    int64_t times = 0, since = 0;
    for (int64_t t = 0; t < place - 1; t += 2) {
        if (c->input[t] == 0) continue;
        since++;
        if (c->input[t] != key) continue;
        times++;
        since = 0;
    }
    return times == 0 ? 0 : since > old_after ? 3 : times > 1 ? 2 : 1;
}

/* The newest value of a key before `place`, -1 for none. */
static int32_t newest(const task_case *c, int64_t place, int32_t key) {
    int32_t value = -1;
    for (int64_t t = 0; t < place; t += 2) {
        if (c->input[t] == key) value = c->input[t + 1];
    }
    return value;
}

static void read_question(reading *r, const task_case *c, int64_t t, int8_t kind,
                          int64_t old_after) {
    const int32_t key = c->input[t + 1], value = newest(c, t, key);
    const int32_t first_value = (int32_t)(1 + (c->shape.vocab - 1) / 2);
    CHECK(key >= 1 && key < first_value, "key %d", key);
    CHECK(c->target[t + 1] >= first_value && c->target[t + 1] < c->shape.vocab, "a target");
    CHECK(value < 0 || value == c->target[t + 1], "key %d: %d, not %d", key, c->target[t + 1],
          value);
    CHECK(kind == kind_at(c, t + 1, old_after), "kind %d", kind);
    r->questions++;
    r->unknown += value < 0;
    if (kind >= 0) r->kinds[kind]++;
}

static void read_sample(reading *r, const task_case *c, int64_t old_after) {
    int8_t kinds[MOST];
    memset(kinds, -1, sizeof kinds);
    mn_task_group(c->task, c->input, c->target, kinds);
    CHECK(c->input[0] != 0, "the first slot is a question");
    for (int64_t t = 0; t < c->n; t += 2) {
        CHECK(c->target[t] == MN_NO_TARGET && kinds[t] == -1, "a target at the start of a slot");
        if (c->input[t] == 0) {
            read_question(r, c, t, kinds[t + 1], old_after);
            continue;
        }
        const int32_t before = newest(c, t, c->input[t]);
        CHECK(c->target[t + 1] == MN_NO_TARGET && kinds[t + 1] == -1, "a target of a statement");
        CHECK(before != c->input[t + 1], "key %d is said to be what it was", c->input[t]);
        r->statements++;
        r->updates += before >= 0;
    }
}

static void streams_keep_their_law(void **state) {
    (void)state;
    static const struct {
        const char *changes;
        mn_split split;
        double unknown;
    } cases[] = {
        { "vocab=200 length=96 old_after=10 train_unknown=true", MN_SPLIT_TRAIN, 0.25 },
        { "vocab=200 length=96 old_after=10", MN_SPLIT_TRAIN, 0.0 },
        { "vocab=200 length=96 old_after=10", MN_SPLIT_TEST, 0.25 },
    };
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        task_case c = task_open("knowing", cases[i].changes);
        reading r = { 0 };
        for (int64_t k = 0; k < 400; k++) {
            task_take(&c, SEED, cases[i].split, k);
            read_sample(&r, &c, 10);
        }
        const double slots = 400.0 * 47.0, questions = (double)r.questions;
        CHECK(fabs(questions / slots - 0.33) < 0.015, "%g of the slots ask", questions / slots);
        CHECK(fabs((double)r.unknown / questions - cases[i].unknown) < 0.02, "%g are unknown",
              (double)r.unknown / questions);
        CHECK(fabs((double)r.updates / (double)(r.statements - 400) - 0.3) < 0.015, "updates");
        CHECK(r.kinds[0] == r.unknown, "%d never said", (int)r.kinds[0]);
        for (int kind = 1; kind < 4; kind++) CHECK(r.kinds[kind] > 400, "kind %d is rare", kind);
        task_close(&c);
    }
    check_done();
}

/* One stream by hand: 1 is said, then 2, then 1 again; kinds of questions about 1, 2 and 3. */
static void kinds_by_hand(void **state) {
    (void)state;
    task_case c = task_open("knowing", "vocab=41 length=16 old_after=1");
    static const int32_t input[16] = { 1, 30, 0, 1, 2, 31, 0, 1, 1, 32, 0, 1, 0, 2, 0, 3 };
    static const int8_t want[16] = { -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, 2, -1, 1, -1, 0 };
    int32_t target[16];
    int8_t kinds[16];
    for (int t = 0; t < 16; t++) target[t] = want[t] >= 0 ? 30 : MN_NO_TARGET;
    memset(kinds, -1, sizeof kinds);
    mn_task_group(c.task, input, target, kinds);
    for (int t = 0; t < 16; t++) CHECK(kinds[t] == want[t], "%d: kind %d", t, kinds[t]);
    CHECK(strcmp(mn_task_group_name(c.task, 3), "long_ago") == 0, "the name of a kind");
    task_close(&c);
    CHECK(task_try("knowing", "vocab=40 length=64") == MN_ERR_ARGUMENT, "no key is left unsaid");
    CHECK(task_try("knowing", "length=33") == MN_ERR_ARGUMENT, "an odd length was taken");
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_keep_their_law),
        cmocka_unit_test(kinds_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
