/* test_tasks_mad.c - the six MAD tasks against a second reading of their samples: what has to be
 * asked and answered, frequencies, and the published sanity numbers. */
// labels: sanitize
#include "support/task_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"

enum { SEED = 4711 };

/* ---- recall ---------------------------------------------------------------------------------- */

/* What the second reader finds in one sample. */
typedef struct found {
    int64_t n_pairs, n_noise, n_new, n_distinct;    // in the slots before the last
    int64_t probe;                                  // its key
    int64_t times[4096];                            // of each key
    int64_t order[4096];                            // in which each came first
} found;

/* Reads a recall sample with keys [0, K), values [K, S), noise [S, V). */
static found read_recall(const task_case *c, mn_split split, int64_t K, int64_t S) {
    static int64_t value_of[4096];
    found f = { 0 };
    const int64_t P = (c->n + 1) / 2;
    for (int64_t k = 0; k < K; k++) value_of[k] = -1;
    for (int64_t i = 0; i < P; i++) {
        const bool last = i == P - 1;
        const int64_t first = c->input[2 * i];
        const int64_t second = last ? c->target[2 * i] : c->input[2 * i + 1];
        int64_t asked = MN_NO_TARGET;
        if (first >= S) {
            CHECK(second >= S && !last, "slot %d: noise beside %d", (int)i, (int)second);
            f.n_noise++;
        } else {
            CHECK(first >= 0 && first < K && second >= K && second < S, "slot %d: %d %d", (int)i,
                  (int)first, (int)second);
            const bool known = value_of[first] >= 0;
            CHECK(!known || value_of[first] == second, "slot %d: key %d changed its value", (int)i,
                  (int)first);
            CHECK(!last || known, "the probe %d was not shown", (int)first);
            if (known) asked = second;
            value_of[first] = second;
            if (!last) {
                f.n_pairs++;
                if (!known) f.order[first] = f.n_new++;
                f.times[first]++;
            }
            if (last) f.probe = first;
        }
        if (split == MN_SPLIT_TRAIN) asked = second;
        CHECK(c->target[2 * i] == asked, "slot %d: target %d, not %d", (int)i,
              (int)c->target[2 * i], (int)asked);
        if (last) break;
        const int64_t after = split == MN_SPLIT_TRAIN ? c->input[2 * i + 2] : MN_NO_TARGET;
        CHECK(c->target[2 * i + 1] == after, "behind slot %d: target %d, not %d", (int)i,
              (int)c->target[2 * i + 1], (int)after);
    }
    for (int64_t k = 0; k < K; k++) f.n_distinct += f.times[k] > 0;
    return f;
}

/* How many keys came more often than the probe, ties by id: even if the probe ignores how often. */
static int64_t rank_of_probe(const found *f, int64_t K) {
    int64_t rank = 0;
    for (int64_t k = 0; k < K; k++) {
        const int64_t more = f->times[k] - f->times[f->probe];
        rank += more > 0 || (more == 0 && k < f->probe && f->times[k] > 0);
    }
    return rank;
}

/* Mean scored tokens of a test sequence: pairs that are not new, and the probe. A pair is noise
 * with probability f except in slot j*, uniform over all P, and there is a pair at least. */
static double expected_scores(int64_t P, int64_t K, double f) {
    const double p = 1.0 - f, k = (double)K, n = (double)P - 1.0;
    const double none = pow(f, n), old = 1.0 - p / k;
    const double kept = (1.0 + (n - 1.0) * p) - k * (1.0 - (1.0 - 1.0 / k) * pow(old, n - 1.0));
    const double free_ = (n * p - k * (1.0 - pow(old, n))) / (1.0 - none);
    const double last = (1.0 - none) / ((1.0 - none) + n);    // that j* is P-1, no redraw
    return 1.0 + (1.0 - last) * kept + last * free_;
}

static void recall_is_read_again(void **state) {
    (void)state;
    static const struct {
        const char *name, *changes;
        int64_t K, S;
    } cases[] = {
        { "mad-recall", "", 8, 16 },
        { "mad-recall", "vocab=128 length=1024", 64, 128 },
        { "mad-recall", "vocab=5 length=4", 2, 5 },
        { "mad-recall", "vocab=2 length=6", 1, 2 },
        { "mad-noisy", "", 8, 16 },
        { "mad-noisy", "noise=0.8", 8, 16 },
        { "mad-noisy", "vocab=144 length=256 noise=0.6", 64, 128 },
        { "mad-noisy", "vocab=4 noise_vocab=1 length=4 noise=0.99", 1, 3 },
        { "mqar-long", "", 128, 256 },
    };
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        task_case c = task_open(cases[k].name, cases[k].changes);
        for (int64_t i = 0; i < 300; i++) {
            const mn_split split = (mn_split)(i % 3);
            task_take(&c, SEED, split, i);
            const found f = read_recall(&c, split, cases[k].K, cases[k].S);
            CHECK(f.n_pairs > 0, "nothing but noise");
        }
        task_close(&c);
    }
    check_done();
}

static void recall_has_its_frequencies(void **state) {
    (void)state;
    task_case c = task_open("mad-recall", "");
    tally key = tally_even("keys", 8), value = tally_even("values", 8);
    tally rank = tally_even("probe by frequency", 8), order = tally_even("probe by age", 8);
    moments scored = { 0 }, guesses = { 0 };
    for (int64_t i = 0; i < 4000; i++) {
        task_take(&c, SEED, MN_SPLIT_TEST, i);
        const found f = read_recall(&c, MN_SPLIT_TEST, 8, 16);
        for (int64_t k = 0; k < 8; k++) key.count[k] += f.times[k];
        value.count[c.input[1] - 8]++;                   // of the first key, which is new
        if (f.n_distinct == 8) {
            rank.count[rank_of_probe(&f, 8)]++;
            order.count[f.order[f.probe]]++;
        }
        moments_add(&scored, (double)task_scored(&c));
        moments_add(&guesses, 63.0 + (double)f.n_new);    // targets nobody can tell, in training
    }
    tally_check(&key);
    tally_check(&value);
    tally_check(&rank);
    tally_check(&order);
    moments_check(&scored, "scored tokens", expected_scores(64, 8, 0.0), 0.05);
    moments_check(&scored, "scored tokens, as published", 56.0, 0.05);
    CHECK(fabs(moments_mean(&guesses) * log(8.0) / 127.0 - 1.163) < 0.001, "floor of the loss: %g",
          moments_mean(&guesses) * log(8.0) / 127.0);
    task_close(&c);
    check_done();
}

static void noise_has_its_frequencies(void **state) {
    (void)state;
    static const struct {
        const char *changes;
        double noise, published, most;
    } cases[] = { { "", 0.2, 43.5, 0.1 }, { "noise=0.8", 0.8, 7.8, 0.1 } };
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        task_case c = task_open("mad-noisy", cases[k].changes);
        tally noise = tally_even("noise tokens", 16), slot = tally_even("slots of pairs", 63);
        moments scored = { 0 }, pairs = { 0 };
        for (int64_t i = 0; i < 8000; i++) {
            task_take(&c, SEED, MN_SPLIT_TEST, i);
            const found f = read_recall(&c, MN_SPLIT_TEST, 8, 16);
            for (int64_t t = 0; t < c.n; t++) {
                if (c.input[t] >= 16) noise.count[c.input[t] - 16]++;
                else if (t % 2 == 0 && t < 126) slot.count[t / 2]++;
            }
            moments_add(&scored, (double)task_scored(&c));
            moments_add(&pairs, (double)f.n_pairs);
        }
        const double f = cases[k].noise;
        tally_check(&noise);
        tally_check(&slot);
        moments_check(&pairs, "pairs", 63.0 * (1.0 - f) + 63.0 / 64.0 * f, 1.0);
        moments_check(&scored, "scored tokens", expected_scores(64, 8, f), 1.0);
        CHECK(fabs(moments_mean(&scored) - cases[k].published) < cases[k].most,
              "scored tokens: %g, published %g", moments_mean(&scored), cases[k].published);
        task_close(&c);
    }
    check_done();
}

/* Four slots, the last of which is the probe's: j* is uniform over all four, and a sample without
 * any pair is drawn again. */
static void protected_slots_are_even(void **state) {
    (void)state;
    const double f = 0.9, p = 0.1;
    tally pairs = { .what = "pairs in three slots", .n = 3,
                    .p = { 0.75 * f * f + 0.25 * 3.0 * p * f * f,
                           0.75 * 2.0 * p * f + 0.25 * 3.0 * p * p * f,
                           0.75 * p * p + 0.25 * p * p * p } };
    const double total = pairs.p[0] + pairs.p[1] + pairs.p[2];
    for (int i = 0; i < 3; i++) pairs.p[i] /= total;
    task_case c = task_open("mad-noisy", "length=8 noise=0.9");
    for (int64_t i = 0; i < 200000; i++) {
        task_take(&c, SEED, MN_SPLIT_TEST, i);
        pairs.count[read_recall(&c, MN_SPLIT_TEST, 8, 16).n_pairs - 1]++;
    }
    tally_check(&pairs);
    task_close(&c);
    check_done();
}

/* V=256, T=2048: 1,024 slots, 128 keys, 896.0 scored tokens. */
static void long_recall_scores_896(void **state) {
    (void)state;
    task_case c = task_open("mqar-long", "");
    moments scored = { 0 };
    assert_int_equal(c.n, 2047);
    for (int64_t i = 0; i < 500; i++) {
        task_take(&c, SEED, MN_SPLIT_TEST, i);
        moments_add(&scored, (double)task_scored(&c));
    }
    moments_check(&scored, "scored tokens", 896.04, 0.2);
    task_take(&c, SEED, MN_SPLIT_TRAIN, 0);
    assert_int_equal(task_scored(&c), 2047);
    task_close(&c);
    check_done();
}

/* ---- fuzzy ----------------------------------------------------------------------------------- */

enum { MOST_RUNS = 4096 };

/* A run of key tokens or of value tokens. */
typedef struct run {
    const int32_t *token;
    int64_t at, size;
} run;

/* The whole sequence behind the pads, with the last token from the targets. */
typedef struct fuzzy_text {
    int32_t token[MOST_RUNS];
    int64_t pads, n, n_runs;
    run runs[MOST_RUNS];             // key, value, key, value ...
} fuzzy_text;

static void read_runs(fuzzy_text *f, const task_case *c, int64_t K, int64_t pad) {
    f->n = f->n_runs = 0;
    f->pads = 0;
    while (f->pads < c->n && c->input[f->pads] == pad) f->pads++;
    for (int64_t t = f->pads; t < c->n; t++) f->token[f->n++] = c->input[t];
    f->token[f->n++] = c->target[c->n - 1];
    for (int64_t i = 0; i < f->n;) {
        const bool is_key = f->token[i] < K;
        run r = { f->token + i, i, 0 };
        while (i < f->n && (f->token[i] < K) == is_key) i++;
        r.size = i - r.at;
        CHECK(is_key == (f->n_runs % 2 == 0), "run %d begins with the wrong kind",
              (int)f->n_runs);
        for (int64_t a = 0; a < r.size; a++) {
            CHECK(r.token[a] >= 0 && r.token[a] < pad, "token %d", (int)r.token[a]);
            for (int64_t b = 0; b < a; b++) CHECK(r.token[a] != r.token[b], "a token twice");
        }
        f->runs[f->n_runs++] = r;
    }
}

static bool same(const run *a, const run *b) {
    return a->size == b->size &&
           memcmp(a->token, b->token, (size_t)a->size * sizeof *a->token) == 0;
}

/* The run number of this key's earlier showing, -1 when it is the first. */
static int64_t shown_before(const fuzzy_text *f, int64_t key) {
    for (int64_t i = 0; i < key; i += 2) {
        if (same(&f->runs[i], &f->runs[key])) return i;
    }
    return -1;
}

static void check_fuzzy(const fuzzy_text *f, const task_case *c, mn_split split, int64_t k,
                        int64_t v) {
    const bool train = split == MN_SPLIT_TRAIN;
    CHECK(f->n_runs >= 2 && f->n_runs % 2 == 0, "%d runs", (int)f->n_runs);
    const run *last_key = &f->runs[f->n_runs - 2], *last_value = &f->runs[f->n_runs - 1];
    const int64_t s = last_key->size + last_value->size, end = c->n - s - k - v;
    CHECK(f->pads >= 2, "%d pads", (int)f->pads);
    CHECK(last_key->at >= end, "stops at %d of %d", (int)last_key->at, (int)end);
    if (f->n_runs > 2) {
        CHECK(f->runs[f->n_runs - 4].at < end, "goes on behind %d", (int)end);
    }
    for (int64_t i = 0; i < f->n_runs; i += 2) {
        const run *key = &f->runs[i], *value = &f->runs[i + 1];
        const int64_t before = shown_before(f, i);
        CHECK(key->size <= k && value->size <= v && (train || key->size == k), "sizes %d %d",
              (int)key->size, (int)value->size);
        CHECK(before < 0 || same(value, &f->runs[before + 1]), "key run %d has two values", (int)i);
        const bool asked = before >= 0 || i == f->n_runs - 2;
        for (int64_t a = key->at; a < value->at + value->size && !train; a++) {
            const int64_t t = a + f->pads - 1;    // where token a is to be said
            const bool scored = asked && a >= value->at;
            CHECK(c->target[t] == (scored ? f->token[a] : MN_NO_TARGET), "place %d: target %d",
                  (int)t, (int)c->target[t]);
        }
    }
    for (int64_t t = 0; t < c->n - 1; t++) {
        if (train) CHECK(c->target[t] == c->input[t + 1], "place %d: not the next token", (int)t);
        else if (t < f->pads - 1) CHECK(c->target[t] == MN_NO_TARGET, "pad %d is asked", (int)t);
    }
}

static void fuzzy_is_read_again(void **state) {
    (void)state;
    static const struct {
        const char *changes;
        int64_t V, k, v;
    } cases[] = {
        { "", 16, 3, 3 },
        { "vocab=128 length=1024", 128, 3, 3 },
        { "vocab=7 length=13", 7, 3, 3 },
        { "vocab=5 length=20 key_motif=2 value_motif=1", 5, 2, 1 },
        { "vocab=3 length=5 key_motif=1 value_motif=1", 3, 1, 1 },
        { "vocab=20 length=200 key_motif=4 value_motif=4", 20, 4, 4 },
    };
    static fuzzy_text f;
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        task_case c = task_open("mad-fuzzy", cases[k].changes);
        for (int64_t i = 0; i < 300; i++) {
            const mn_split split = (mn_split)(i % 3);
            task_take(&c, SEED, split, i);
            read_runs(&f, &c, (cases[k].V - 1) / 2, cases[k].V - 1);
            check_fuzzy(&f, &c, split, cases[k].k, cases[k].v);
        }
        task_close(&c);
    }
    check_done();
}

/* Number of an ordered choice of 3 of 7 different tokens. */
static int64_t choice_of(const int32_t token[3]) {
    const int64_t a = token[0], b = token[1] - (token[1] > token[0]);
    int64_t c = token[2];
    c -= (token[2] > token[0]) + (token[2] > token[1]);
    return (a * 6 + b) * 5 + c;
}

static void fuzzy_has_its_frequencies(void **state) {
    (void)state;
    static fuzzy_text f;
    task_case c = task_open("mad-fuzzy", "");
    tally motif = tally_even("key motifs of three", 210), sizes = tally_even("sizes", 9);
    tally last = tally_even("sizes of the probe", 9);
    moments scored = { 0 }, lost = { 0 };
    double quarter[4] = { 0 }, n_shown = 0.0;
    for (int64_t i = 0; i < 12000; i++) {
        task_take(&c, SEED, MN_SPLIT_TEST, i);
        read_runs(&f, &c, 7, 15);
        motif.count[choice_of(f.runs[0].token)]++;
        moments_add(&scored, (double)task_scored(&c));
        int64_t at = shown_before(&f, f.n_runs - 2);
        moments_add(&lost, at < 0);
        if (at >= 0) {
            quarter[mn_min(3, f.runs[at].at * 4 / 116)] += 1.0;
            n_shown += 1.0;
        }
        task_take(&c, SEED, MN_SPLIT_TRAIN, i);
        read_runs(&f, &c, 7, 15);
        sizes.count[(f.runs[0].size - 1) * 3 + f.runs[1].size - 1]++;
        last.count[(f.runs[f.n_runs - 2].size - 1) * 3 + f.runs[f.n_runs - 1].size - 1]++;
    }
    tally_check(&motif);
    tally_check(&sizes);
    tally_check(&last);
    moments_check(&scored, "scored tokens", 4.33, 0.1);
    CHECK(fabs(moments_mean(&lost) - 0.022) < 0.006, "%g never show the probe, published 0.022",
          moments_mean(&lost));
    for (int q = 0; q < 4; q++) {
        CHECK(fabs(quarter[q] / n_shown - 0.25) < 0.05, "%g of the probes in quarter %d",
              quarter[q] / n_shown, q);
    }
    task_close(&c);
    static const struct {
        const char *changes;
        double published, most;
    } others[] = { { "vocab=128", 2.0, 0.06 }, { "length=1024", 147.0, 2.0 } };
    for (size_t k = 0; k < MN_COUNTOF(others); k++) {
        moments m = { 0 };
        c = task_open("mad-fuzzy", others[k].changes);
        for (int64_t i = 0; i < 2000; i++) {
            task_take(&c, SEED, MN_SPLIT_TEST, i);
            moments_add(&m, (double)task_scored(&c));
        }
        CHECK(fabs(moments_mean(&m) - others[k].published) < others[k].most,
              "%s: %g scored tokens, published %g", others[k].changes, moments_mean(&m),
              others[k].published);
        task_close(&c);
    }
    check_done();
}

/* ---- memorise, compress, copy ---------------------------------------------------------------- */

static void memorise_keeps_one_map(void **state) {
    (void)state;
    task_case c = task_open("mad-memorise", "");
    int64_t value_of[127], key_of[256];
    tally keys = tally_even("keys", 127);
    for (int k = 0; k < 127; k++) value_of[k] = -1;
    for (int v = 0; v < 256; v++) key_of[v] = -1;
    for (int64_t i = 0; i < 2000; i++) {
        task_take(&c, (uint64_t)(SEED + i % 5), (mn_split)(i % 3), i);
        for (int64_t t = 0; t < 32; t += 2) {
            const int64_t key = c.input[t], value = c.target[t + 1];
            CHECK(key >= 0 && key < 127 && c.input[t + 1] == 255 && c.target[t] == MN_NO_TARGET &&
                  value >= 127 && value < 255, "place %d: %d, target %d", (int)t, (int)key,
                  (int)value);
            CHECK(value_of[key] < 0 || value_of[key] == value, "key %d has two values", (int)key);
            CHECK(key_of[value] < 0 || key_of[value] == key, "value %d has two keys", (int)value);
            value_of[key] = value;
            key_of[value] = key;
            keys.count[key]++;
        }
    }
    tally_check(&keys);
    task_close(&c);
    c = task_open("mad-memorise", "map_seed=1");
    task_take(&c, SEED, MN_SPLIT_TRAIN, 0);
    int differ = 0;
    for (int64_t t = 0; t < 32; t += 2) differ += c.target[t + 1] != value_of[c.input[t]];
    CHECK(differ > 8, "map_seed is not heard");
    task_close(&c);
    check_done();
}

/* Of n keys, 256 x 16 draws show 1 - (1 - 1/n)^4096: the ceiling of the sweep. */
static void memorise_has_its_ceilings(void **state) {
    (void)state;
    static const struct {
        const char *changes;
        int64_t n_keys;
        double published;
    } cases[] = { { "vocab=512", 255, 1.0 },    { "vocab=1024", 511, 1.0 },
                  { "vocab=2048", 1023, 0.982 }, { "vocab=4096", 2047, 0.865 },
                  { "vocab=8192", 4095, 0.632 } };
    double sum = 1.0;
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        enum { SETS = 40 };
        static bool seen[4096];
        task_case c = task_open("mad-memorise", cases[k].changes);
        int64_t n = 0;
        for (int64_t i = 0; i < 256 * SETS; i++) {
            if (i % 256 == 0) memset(seen, 0, sizeof seen);
            task_take(&c, SEED, MN_SPLIT_TRAIN, i);
            for (int64_t t = 0; t < 32; t += 2) {
                n += !seen[c.input[t]];
                seen[c.input[t]] = true;
            }
        }
        const double part = (double)n / (double)(cases[k].n_keys * SETS);
        sum += part;
        CHECK(fabs(part - cases[k].published) < 0.003, "%s: %g of the keys seen, published %g",
              cases[k].changes, part, cases[k].published);
        task_close(&c);
    }
    CHECK(fabs(sum / 6.0 - 0.913) < 0.002, "ceiling %g, published 0.913", sum / 6.0);
    check_done();
}

static void compress_repeats_its_input(void **state) {
    (void)state;
    static const char *const cases[] = { "", "vocab=128 length=256", "vocab=2 length=1" };
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        task_case c = task_open("mad-compress", cases[k]);
        tally tokens = tally_even("tokens", c.shape.vocab - 1);
        for (int64_t i = 0; i < 2000; i++) {
            task_take(&c, SEED, (mn_split)(i % 3), i);
            CHECK(memcmp(c.input, c.target, (size_t)c.n * sizeof *c.input) == 0, "not the input");
            CHECK(c.input[c.n - 1] == c.shape.vocab - 1, "does not end in the compression token");
            for (int64_t t = 0; t + 1 < c.n; t++) {
                CHECK(c.input[t] >= 0 && c.input[t] < c.shape.vocab - 1, "token %d",
                      (int)c.input[t]);
                tokens.count[c.input[t]]++;
            }
        }
        if (k < 2) tally_check(&tokens);
        task_close(&c);
    }
    check_done();
}

static void copying_is_read_again(void **state) {
    (void)state;
    static const struct {
        const char *changes;
        int64_t V, T, n;
    } cases[] = { { "", 16, 256, 16 },
                  { "vocab=128 length=1024", 128, 1024, 16 },
                  { "to_copy=96", 16, 256, 96 },
                  { "vocab=3 length=3 to_copy=1", 3, 3, 1 } };
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        const int64_t V = cases[k].V, T = cases[k].T, n = cases[k].n, blanks = T - 2 * n - 1;
        task_case c = task_open("mad-copy", cases[k].changes);
        tally gaps = tally_even("blanks before each token", n);
        tally content = tally_even("content", V - 2);
        moments first = { 0 };
        for (int64_t i = 0; i < 2000; i++) {
            task_take(&c, SEED, (mn_split)(i % 3), i);
            int64_t next = 0, gap = 0;
            for (int64_t t = 0; t < T - n - 1; t++) {
                if (c.input[t] == V - 2) {
                    gap++;
                    continue;
                }
                CHECK(next < n && c.input[t] >= 0 && c.input[t] < V - 2 &&
                      c.target[T - n + next] == c.input[t], "content %d", (int)next);
                if (next == 0) moments_add(&first, (double)gap);
                content.count[c.input[t]]++;
                gaps.count[next++] += gap;
                gap = 0;
            }
            CHECK(next == n && gap == 0 && c.input[T - n - 1] == V - 1, "no end of the content");
            for (int64_t t = 0; t < T - n; t++) CHECK(c.target[t] == MN_NO_TARGET, "early target");
            for (int64_t t = T - n; t < T; t++) CHECK(c.input[t] == V - 2, "no blank at the end");
        }
        if (blanks > 0 && n > 1) {
            const double q = 1.0 / (double)n, spread = (double)blanks * q * (1.0 - q);
            tally_check(&gaps);
            CHECK(fabs(moments_variance(&first) / spread - 1.0) < 0.15,
                  "blanks before the first: variance %g, not %g", moments_variance(&first), spread);
        }
        if (V > 3) tally_check(&content);
        task_close(&c);
    }
    check_done();
}

/* The published sweep, counted and opened. */
static void sweep_has_66_settings(void **state) {
    (void)state;
    static const struct {
        const char *task;
        int n;
    } counts[] = { { "mad-recall", 11 }, { "mad-fuzzy", 11 },    { "mad-noisy", 14 },
                   { "mad-copy", 13 },   { "mad-compress", 11 }, { "mad-memorise", 6 } };
    int total = 0;
    for (size_t k = 0; k < MN_COUNTOF(counts); k++) {
        int n = 0;
        for (int i = 0; i < mn_task_setting_count(); i++) {
            const mn_task_setting s = mn_task_setting_row(i);
            if (strcmp(s.suite, "mad") != 0 || strcmp(s.task, counts[k].task) != 0) continue;
            n++;
            CHECK(s.test == 1280 && s.train >= 256 && s.train <= 12800, "%s %s", s.task, s.name);
        }
        CHECK(n == counts[k].n, "%s: %d settings", counts[k].task, n);
        total += n;
    }
    CHECK(total == 66, "%d settings in all", total);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(recall_is_read_again),
        cmocka_unit_test(recall_has_its_frequencies),
        cmocka_unit_test(noise_has_its_frequencies),
        cmocka_unit_test(protected_slots_are_even),
        cmocka_unit_test(long_recall_scores_896),
        cmocka_unit_test(fuzzy_is_read_again),
        cmocka_unit_test(fuzzy_has_its_frequencies),
        cmocka_unit_test(memorise_keeps_one_map),
        cmocka_unit_test(memorise_has_its_ceilings),
        cmocka_unit_test(compress_repeats_its_input),
        cmocka_unit_test(copying_is_read_again),
        cmocka_unit_test(sweep_has_66_settings),
    };
    return cmocka_run_group_tests_name("tasks: MAD", tests, NULL, NULL);
}
