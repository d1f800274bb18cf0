/* test_tasks_mqar.c - associative recall and word problems against a second reading of their
 * samples, and the frequencies that the law gives. */
// labels: sanitize
#include "support/task_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"

enum { SEED = 4711, MOST_PAIRS = 512 };

/* What is said about one form of the task. */
typedef struct form {
    const char *name, *changes;
    int64_t V, N, D;             // D: pairs, or keys of a block
    int64_t updates, rewrites;
    bool block, shared, filled;
} form;

typedef struct found {
    int64_t pairs, context;
    int64_t key[MOST_PAIRS], value[MOST_PAIRS];       // newest values
    int64_t times[MOST_PAIRS];                        // that the key got a value
    int64_t slot[MOST_PAIRS];                         // where it is asked for
    int64_t n_fillers;
} found;

static int64_t find_key(const found *f, int64_t key) {
    for (int64_t i = 0; i < f->pairs; i++) {
        if (f->key[i] == key) return i;
    }
    return -1;
}

/* The pairs of a block sample: blocks go on until the queries begin, of which there are as many as
 * pairs, so the count is the number of targets. */
static void read_context(found *f, const task_case *c, const form *is) {
    const int64_t block = is->block ? is->D : 1;
    f->pairs = is->block ? task_scored(c) : is->D;
    f->context = 2 * (f->pairs + is->updates * is->rewrites);
    CHECK(f->pairs % block == 0, "%d pairs in blocks of %d", (int)f->pairs, (int)block);
    for (int64_t i = 0; i < f->pairs; i++) {
        const int64_t at = i / block * 2 * block + i % block;
        f->key[i] = c->input[at];
        f->value[i] = c->input[at + block];
        f->times[i] = 1;
        f->slot[i] = -1;
    }
    for (int64_t t = 2 * f->pairs; t < f->context; t += 2) {
        const int64_t i = find_key(f, c->input[t]);
        CHECK(i >= 0, "a rewrite of the unknown key %d", (int)c->input[t]);
        if (i < 0) continue;
        CHECK(f->value[i] != c->input[t + 1], "key %d keeps its value", (int)f->key[i]);
        f->value[i] = c->input[t + 1];
        f->times[i]++;
    }
}

static void check_tokens(const found *f, const task_case *c, const form *is) {
    const int64_t first_value = is->shared ? 1 : is->V / 2;
    const int64_t end_key = is->shared ? is->V : is->V / 2;
    int64_t updated = 0;
    for (int64_t i = 0; i < f->pairs; i++) {
        CHECK(f->key[i] >= 1 && f->key[i] < end_key, "key %d", (int)f->key[i]);
        CHECK(f->value[i] >= first_value && f->value[i] < is->V, "value %d", (int)f->value[i]);
        CHECK(find_key(f, f->key[i]) == i, "key %d twice", (int)f->key[i]);
        for (int64_t j = 0; j < i; j++) CHECK(f->value[i] != f->value[j], "a value twice");
        CHECK(f->times[i] == 1 || f->times[i] == 1 + is->rewrites, "key %d has %d values",
              (int)f->key[i], (int)f->times[i]);
        updated += f->times[i] > 1;
        CHECK(f->slot[i] >= 0, "key %d is not asked for", (int)f->key[i]);
    }
    CHECK(updated == is->updates, "%d keys updated", (int)updated);
    for (int64_t t = 0; t < f->context; t++) CHECK(c->target[t] == MN_NO_TARGET, "early target");
}

static found read_mqar(const task_case *c, const form *is) {
    static found f;
    static int8_t group[4096];
    f = (found){ 0 };
    read_context(&f, c, is);
    mn_task_group(c->task, c->input, c->target, group);
    for (int64_t t = f.context; t < c->n; t++) {
        if (c->target[t] == MN_NO_TARGET) {
            CHECK(is->filled || c->input[t] == 0, "token %d between queries", (int)c->input[t]);
            f.n_fillers++;
            continue;
        }
        const int64_t i = find_key(&f, c->input[t]);
        CHECK(i >= 0 && (t - f.context) % 2 == 0, "a query of %d at place %d", (int)c->input[t],
              (int)t);
        if (i < 0) continue;
        CHECK(f.slot[i] < 0, "key %d is asked twice", (int)f.key[i]);
        CHECK(c->target[t] == f.value[i], "key %d: target %d, not %d", (int)f.key[i],
              (int)c->target[t], (int)f.value[i]);
        CHECK(is->updates == 0 || group[t] == (f.times[i] > 1), "group %d", group[t]);
        f.slot[i] = (t - f.context) / 2;
    }
    check_tokens(&f, c, is);
    return f;
}

static const form forms[] = {
    { "mqar", "", 8192, 64, 4, 0, 0, false, false, true },
    { "mqar", "length=64 pairs=4 random_fill=false", 8192, 64, 4, 0, 0, false, false, false },
    { "mqar", "length=256 pairs=64", 8192, 256, 64, 0, 0, false, false, true },
    { "mqar", "length=1024 pairs=256 random_fill=false", 8192, 1024, 256, 0, 0, false, false,
      false },
    { "mqar", "vocab=6 length=4 pairs=1", 6, 4, 1, 0, 0, false, false, true },
    { "mqar", "vocab=19 length=16 pairs=4 alpha=1", 19, 16, 4, 0, 0, false, false, true },
    { "mqar-shared", "", 8192, 64, 4, 0, 0, false, true, false },
    { "mqar-shared", "vocab=5 length=4 pairs=1", 5, 4, 1, 0, 0, false, true, false },
    { "mqar-update", "", 8192, 64, 4, 4, 1, false, true, false },
    { "mqar-update", "length=128 pairs=16 updates=2", 8192, 128, 16, 2, 1, false, true, false },
    { "mqar-update", "length=128 pairs=8 updates=3 rewrites=2", 8192, 128, 8, 3, 2, false, true,
      false },
    { "mqar-update", "updates=0", 8192, 64, 4, 0, 1, false, true, false },
    { "mqar-block", "", 8192, 128, 2, 0, 0, true, true, false },
    { "mqar-block", "block=8", 8192, 128, 8, 0, 0, true, true, false },
};

static void mqar_is_read_again(void **state) {
    (void)state;
    for (size_t k = 0; k < MN_COUNTOF(forms); k++) {
        task_case c = task_open(forms[k].name, forms[k].changes);
        assert_int_equal(c.n, forms[k].N);
        assert_int_equal(c.shape.vocab, forms[k].V);
        for (int64_t i = 0; i < 200; i++) {
            task_take(&c, SEED, (mn_split)(i % 3), i);
            read_mqar(&c, &forms[k]);
        }
        task_close(&c);
    }
    check_done();
}

/* D=4, N=64: the first key is in slot 0 with .2511, mean slots 6.2, 6.8, 7.5, 8.0. */
static void gaps_follow_the_power_law(void **state) {
    (void)state;
    const double published[] = { 6.2, 6.8, 7.5, 8.0 };
    const form *is = &forms[1];
    task_case c = task_open(is->name, is->changes);
    double total = 0.0;
    tally first = { .what = "slot of the first key", .n = 28 };
    tally second = { .what = "slot of the second key", .n = 28 };
    tally key = tally_even("keys in 16 parts", 16), value = tally_even("values in 16 parts", 16);
    moments slot[4] = { { 0 } };
    for (int i = 0; i < 28; i++) total += pow(i + 1, -0.99);
    for (int i = 0; i < 28; i++) first.p[i] = pow(i + 1, -0.99) / total;
    for (int i = 0; i < 28; i++) {    // the second draw: what the first one left, in proportion
        for (int j = 0; j < 28; j++) {
            if (j != i) second.p[i] += first.p[j] * first.p[i] / (1.0 - first.p[j]);
        }
    }
    CHECK(fabs(first.p[0] - 0.2511) < 5e-5, "P(slot 0) = %g", first.p[0]);
    for (int64_t i = 0; i < 20000; i++) {
        task_take(&c, SEED, MN_SPLIT_TRAIN, i);
        const found f = read_mqar(&c, is);
        first.count[f.slot[0]]++;
        second.count[f.slot[1]]++;
        key.count[(f.key[i % 4] - 1) * 16 / 4095]++;
        value.count[(f.value[i % 4] - 4096) * 16 / 4096]++;
        for (int j = 0; j < 4; j++) moments_add(&slot[j], (double)f.slot[j]);
    }
    tally_check(&first);
    tally_check(&second);
    tally_check(&key);
    tally_check(&value);
    for (int j = 0; j < 4; j++) {
        CHECK(fabs(moments_mean(&slot[j]) - published[j]) < 0.15, "key %d: mean slot %g", j,
              moments_mean(&slot[j]));
    }
    task_close(&c);
    check_done();
}

/* (64,256): mean slots 13.6 for the first key to 52.0 for the last. */
static void full_gaps_have_their_means(void **state) {
    (void)state;
    task_case c = task_open(forms[2].name, forms[2].changes);
    tally filler = tally_even("fillers in 16 parts", 16);
    moments first = { 0 }, last = { 0 };
    for (int64_t i = 0; i < 4000; i++) {
        task_take(&c, SEED, MN_SPLIT_TRAIN, i);
        const found f = read_mqar(&c, &forms[2]);
        moments_add(&first, (double)f.slot[0]);
        moments_add(&last, (double)f.slot[63]);
        for (int64_t t = 129; t < 256; t += 2) filler.count[c.input[t] * 16 / 8192]++;
    }
    CHECK(fabs(moments_mean(&first) - 13.6) < 1.0, "first key: %g", moments_mean(&first));
    CHECK(fabs(moments_mean(&last) - 52.0) < 1.0, "last key: %g", moments_mean(&last));
    tally_check(&filler);
    task_close(&c);
    check_done();
}

static void alpha_one_is_even(void **state) {
    (void)state;
    task_case c = task_open("mqar", "random_fill=false alpha=1");
    tally slot = tally_even("slots at alpha 1", 28);
    for (int64_t i = 0; i < 4000; i++) {
        task_take(&c, SEED, MN_SPLIT_TEST, i);
        const found f = read_mqar(&c, &forms[1]);
        slot.count[f.slot[i % 4]]++;
    }
    tally_check(&slot);
    task_close(&c);
    check_done();
}

static void updates_and_blocks_have_their_frequencies(void **state) {
    (void)state;
    const form update = { "mqar-update", "length=128 pairs=8 updates=1", 8192, 128, 8, 1, 1, false,
                          true, false };
    const form *block = &forms[12];
    task_case c = task_open(update.name, update.changes);
    tally which = tally_even("key that is updated", 8), blocks = tally_even("blocks", 4);
    tally key = tally_even("shared keys in 16 parts", 16);
    int64_t both = 0;
    for (int64_t i = 0; i < 4000; i++) {
        task_take(&c, SEED, MN_SPLIT_TEST, i);
        const found f = read_mqar(&c, &update);
        for (int j = 0; j < 8; j++) which.count[j] += f.times[j] > 1;
        key.count[(f.key[i % 8] - 1) * 16 / 8191]++;
        for (int j = 0; j < 8; j++) both += find_key(&f, f.value[j]) >= 0;
    }
    tally_check(&which);
    tally_check(&key);
    /* 8 values, each one of the 8 keys with probability 8 / 8191: 31 of 4,000 samples x 8. */
    CHECK(both > 8 && both < 64, "%d values are keys as well, 31 are expected", (int)both);
    task_close(&c);
    c = task_open(block->name, block->changes);
    for (int64_t i = 0; i < 4000; i++) {
        task_take(&c, SEED, MN_SPLIT_TEST, i);
        blocks.count[read_mqar(&c, block).pairs / 2 - 1]++;
    }
    tally_check(&blocks);
    task_close(&c);
    check_done();
}

/* Only these of the grid N {64,128} x D {4,16} x U {D,D/2,D/4,D/8} are possible. */
static void infeasible_updates_are_refused(void **state) {
    (void)state;
    int possible = 0;
    for (int n = 64; n <= 128; n *= 2) {
        for (int d = 4; d <= 16; d *= 4) {
            for (int part = 1; part <= 8; part *= 2) {
                char changes[96];
                if (d / part == 0) continue;
                snprintf(changes, sizeof changes, "length=%d pairs=%d updates=%d", n, d, d / part);
                const bool fits = 2 * (d + d / part) + 2 * d <= n;
                const mn_status st = task_try("mqar-update", changes);
                CHECK(st == (fits ? MN_OK : MN_ERR_ARGUMENT), "%s: %d", changes, (int)st);
                possible += st == MN_OK;
            }
        }
    }
    CHECK(possible == 10, "%d combinations are possible", possible);
    check_done();
}

/* ---- word problems --------------------------------------------------------------------------- */

typedef struct table {
    int n;
    int element[120][5];
} table;

/* All permutations of five digits by counting to 44444 in base five, the even ones if asked. Even:
 * the permutation matrix has determinant 1, found by undoing it with swaps. */
static table list_permutations(bool even_only) {
    table t = { 0 };
    for (int code = 0; code < 3125; code++) {
        int p[5], q[5], swaps = 0, rest = code;
        bool used[5] = { false }, ok = true;
        for (int i = 4; i >= 0; i--, rest /= 5) p[i] = rest % 5;
        for (int i = 0; i < 5; i++) {
            ok = ok && !used[p[i]];
            used[p[i]] = true;
        }
        if (!ok) continue;
        memcpy(q, p, sizeof q);
        for (int i = 0; i < 5; i++) {
            while (q[i] != i) {
                const int to = q[i], kept = q[to];
                q[to] = to;
                q[i] = kept;
                swaps++;
            }
        }
        if (!even_only || swaps % 2 == 0) memcpy(t.element[t.n++], p, sizeof p);
    }
    return t;
}

static int number_of(const table *t, const int p[5]) {
    for (int i = 0; i < t->n; i++) {
        if (memcmp(t->element[i], p, 5 * sizeof *p) == 0) return i;
    }
    return -1;
}

/* Follows five points through the word: the product of all letters applied to point i applies the
 * last letter first. Returns the word's length. */
static int64_t read_word(const task_case *c, const table *t) {
    const int32_t pad = t->n, bos = t->n + 1;
    int64_t k = 0;
    while (k + 1 < c->n && c->input[k + 1] != pad) k++;
    CHECK(c->input[0] == bos && c->target[0] == bos, "no BOS");
    for (int64_t end = 1; end <= k; end++) {
        int p[5];
        for (int i = 0; i < 5; i++) {
            p[i] = i;
            for (int64_t at = end; at >= 1; at--) {
                CHECK(c->input[at] >= 0 && c->input[at] < t->n, "letter %d", (int)c->input[at]);
                p[i] = t->element[c->input[at]][p[i]];
            }
        }
        CHECK(c->target[end] == number_of(t, p), "product at %d: %d, not %d", (int)end,
              (int)c->target[end], number_of(t, p));
    }
    for (int64_t at = k + 1; at < c->n; at++) {
        CHECK(c->input[at] == pad && c->target[at] == pad, "no PAD at %d", (int)at);
    }
    return k;
}

static void words_are_read_again(void **state) {
    (void)state;
    static const struct {
        const char *name, *changes;
        int64_t k;
        bool even;
    } cases[] = { { "a5", "", 20, true },           { "a5", "steps=3", 3, true },
                  { "a5", "steps=2", 2, true },     { "a5", "steps=10", 10, true },
                  { "s5", "steps=6", 6, false },    { "s5", "short_ones=false", 20, false },
                  { "a5", "steps=11 sequences=5", 11, true } };
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        task_case c = task_open(cases[k].name, cases[k].changes);
        const table t = list_permutations(cases[k].even);
        assert_int_equal(t.n, cases[k].even ? 60 : 120);
        assert_int_equal(c.shape.vocab, t.n + 7);
        for (int64_t i = 0; i < 300; i++) {
            const mn_split split = (mn_split)(i % 3);
            task_take(&c, SEED, split, i * 37);
            const int64_t length = read_word(&c, &t);
            CHECK(length == cases[k].k || (split == MN_SPLIT_TRAIN && length == 2),
                  "a word of %d letters", (int)length);
            CHECK(task_scored(&c) == c.n, "%d targets", (int)task_scored(&c));
        }
        task_close(&c);
    }
    check_done();
}

/* k = 3: the three splits are all 216,000 words, none of them twice; training has the 3,600 words
 * of two letters in front. */
static void short_words_are_complete(void **state) {
    (void)state;
    task_case c = task_open("a5", "steps=3");
    bool *seen = calloc(216000, 1), *seen2 = calloc(3600, 1);
    int64_t n = 0, n2 = 0;
    assert_int_equal(mn_task_examples(c.task, MN_SPLIT_TRAIN), 3600 + 172800);
    for (int split = 0; split < MN_SPLIT_COUNT; split++) {
        for (int64_t i = 0; i < mn_task_examples(c.task, (mn_split)split); i++) {
            task_take(&c, SEED, (mn_split)split, i);
            if (c.input[3] == 60) {
                bool *at = &seen2[c.input[1] * 60 + c.input[2]];
                n2 += !*at;
                *at = true;
                continue;
            }
            bool *at = &seen[(c.input[1] * 60 + c.input[2]) * 60 + c.input[3]];
            CHECK(!*at, "a word twice");
            n += !*at;
            *at = true;
        }
    }
    CHECK(n == 216000 && n2 == 3600, "%d words of three letters, %d of two", (int)n, (int)n2);
    free(seen);
    free(seen2);
    task_close(&c);
    check_done();
}

static void long_words_are_even_and_split(void **state) {
    (void)state;
    task_case c = task_open("a5", "steps=6");
    tally letter = tally_even("letters", 60), product = tally_even("products", 60);
    assert_int_equal(mn_task_examples(c.task, MN_SPLIT_TRAIN), 3600 + 800000);
    assert_int_equal(mn_task_examples(c.task, MN_SPLIT_TEST), 200000);
    assert_int_equal(mn_task_examples(c.task, MN_SPLIT_VALID), 200000);
    for (int64_t i = 0; i < 4000; i++) {
        task_take(&c, SEED, (mn_split)(i % 3), 3600 + i);
        for (int64_t t = 1; t <= 6; t++) letter.count[c.input[t]]++;
        product.count[c.target[6]]++;
    }
    tally_check(&letter);
    tally_check(&product);
    task_take(&c, SEED, MN_SPLIT_TEST, 7);
    int32_t kept[7];
    memcpy(kept, c.input, sizeof kept);
    task_take(&c, SEED, MN_SPLIT_TEST, 200007);
    assert_memory_equal(kept, c.input, sizeof kept);
    task_close(&c);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mqar_is_read_again),
        cmocka_unit_test(gaps_follow_the_power_law),
        cmocka_unit_test(full_gaps_have_their_means),
        cmocka_unit_test(alpha_one_is_even),
        cmocka_unit_test(updates_and_blocks_have_their_frequencies),
        cmocka_unit_test(infeasible_updates_are_refused),
        cmocka_unit_test(words_are_read_again),
        cmocka_unit_test(short_words_are_complete),
        cmocka_unit_test(long_words_are_even_and_split),
    };
    return cmocka_run_group_tests_name("tasks: recall and words", tests, NULL, NULL);
}
