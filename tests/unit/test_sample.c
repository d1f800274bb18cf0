/* test_sample.c - drawing tokens: distributions by chi-square, what each cut leaves, greedy,
 * penalties, and what is refused. */
// labels: sanitize
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "infer/sample.h"
#include "support/check.h"
#include "support/folder.h"

enum { V = 12, DRAWS = 40000 };

static const float logits[V] = { 1.5f, -0.5f, 0.0f, 2.0f, -3.0f, 2.0f, 0.7f, -INFINITY, 1.0f, -1.0f,
                                 0.3f, -6.0f };

static mn_sampling plain(void) {
    mn_sampling how;
    mn_sampling_defaults(&how);
    how.seed = 11;
    return how;
}

static int32_t pick(mn_sampler *sampler, const mn_sampling *how, uint64_t position,
                    const int32_t *recent, int64_t n_recent) {
    const mn_draw from = { logits, V, recent, n_recent, position };
    int32_t token = -1;
    CHECK(mn_sampler_pick(&token, sampler, how, &from) == MN_OK, "%s", mn_last_error());
    return token;
}

/* Counts of DRAWS draws, one per position. */
static void count(int64_t *counts, const mn_sampling *how, const int32_t *recent,
                  int64_t n_recent) {
    mn_sampler *sampler = NULL;
    memset(counts, 0, V * sizeof *counts);
    if (mn_sampler_create(&sampler, V) != MN_OK) check_fatal("%s", mn_last_error());
    for (uint64_t i = 0; i < DRAWS; i++) {
        const int32_t token = pick(sampler, how, i, recent, n_recent);
        if (CHECK(token >= 0 && token < V, "token %d", (int)token)) counts[token]++;
    }
    mn_sampler_destroy(sampler);
}

/* p over the tokens of `support` (a bit each), from softmax(z / temperature). */
static void expect(double *p, const double *z, double temperature, unsigned support) {
    double sum = 0.0;
    for (int i = 0; i < V; i++) {
        p[i] = support >> i & 1 ? exp(z[i] / temperature) : 0.0;
        sum += p[i];
    }
    for (int i = 0; i < V; i++) p[i] /= sum;
}

/* Chi-square over the tokens with p > 0; others must not occur. 11 degrees of freedom at most: 31.3
 * is passed once in a thousand times, and the draws are fixed. */
static void check_counts(const char *what, const int64_t *counts, const double *p) {
    double chi = 0.0;
    for (int i = 0; i < V; i++) {
        if (p[i] == 0.0) CHECK(counts[i] == 0, "%s: token %d occurs", what, i);
        else chi += pow((double)counts[i] - DRAWS * p[i], 2.0) / (DRAWS * p[i]);
    }
    CHECK(chi < 31.3, "%s: chi-square %g", what, chi);
}

static void check_law(const char *what, const mn_sampling *how, const double *z, unsigned support) {
    int64_t counts[V];
    double p[V];
    expect(p, z, how->temperature, support);
    count(counts, how, NULL, 0);
    check_counts(what, counts, p);
}

static void given(double *z) {
    for (int i = 0; i < V; i++) z[i] = logits[i];
}

enum { ALL = 0xfff & ~(1u << 7) };    // token 7 has no probability

static void temperatures(void **state) {
    (void)state;
    double z[V];
    given(z);
    mn_sampling how = plain();
    check_law("temperature 1", &how, z, ALL);
    how.temperature = 0.6;
    check_law("temperature 0.6", &how, z, ALL);
    how.temperature = 3.0;
    check_law("temperature 3", &how, z, ALL);
    how.stream = 5;
    check_law("another stream", &how, z, ALL);
    check_done();
}

/* In falling order the tokens are 3, 5, 0, 8, 6, 10, 2, 1, 9, 4, 11, 7, with probabilities
 * .271 .271 .165 .100 .074 .050 .037 .022 .014 .002 .0001 0. */
static unsigned first(int n) {
    static const int order[] = { 3, 5, 0, 8, 6, 10, 2, 1, 9, 4, 11 };
    unsigned set = 0;
    for (int i = 0; i < n; i++) set |= 1u << order[i];
    return set;
}

static void cuts(void **state) {
    (void)state;
    double z[V];
    given(z);
    mn_sampling how = plain();
    for (int k = 1; k <= 11; k++) {
        how.top_k = k;
        check_law("top_k", &how, z, first(k));
    }
    how = plain();
    static const struct {
        double p;
        int n;
    } tops[] = { { 0.01, 1 }, { 0.2, 1 }, { 0.3, 2 }, { 0.5, 2 }, { 0.6, 3 }, { 0.75, 4 },
                 { 0.85, 5 }, { 0.9, 6 }, { 0.999, 10 } };
    for (size_t i = 0; i < MN_COUNTOF(tops); i++) {
        how.top_p = tops[i].p;
        check_law("top_p", &how, z, first(tops[i].n));
    }
    how = plain();
    static const struct {
        double p;
        int n;
    } least[] = { { 1.0, 2 }, { 0.5, 3 }, { 0.3, 4 }, { 0.25, 5 }, { 0.001, 10 } };
    for (size_t i = 0; i < MN_COUNTOF(least); i++) {
        how.min_p = least[i].p;
        check_law("min_p", &how, z, first(least[i].n));
    }
    check_done();
}

/* top_p counts what top_k left: of the first three, .383 .383 .234, two hold 0.7. Of all they hold
 * 0.54. min_p counts what is left then. */
static void cuts_follow_each_other(void **state) {
    (void)state;
    double z[V];
    given(z);
    mn_sampling how = plain();
    how.top_k = 3;
    how.top_p = 0.7;
    check_law("top_k, top_p", &how, z, first(2));
    how.top_k = 6;
    how.top_p = 0.99;
    how.min_p = 0.3;
    check_law("top_k, top_p, min_p", &how, z, first(4));
    how.temperature = 4.0;    // flatter: min_p leaves all six
    check_law("temperature first", &how, z, first(6));
    check_done();
}

static void penalty(void **state) {
    (void)state;
    static const int32_t recent[] = { 3, 9, 3, 99, -1, 2, 3 };
    int64_t counts[V];
    double z[V], p[V];
    mn_sampling how = plain();
    how.repetition_penalty = 2.0;
    given(z);
    z[3] /= 2.0;
    z[9] *= 2.0;    // 2 has logit 0
    expect(p, z, 1.0, ALL);
    count(counts, &how, recent, MN_COUNTOF(recent));
    check_counts("penalty", counts, p);
    how.repetition_window = 2;    // 2 and 3
    given(z);
    z[3] /= 2.0;
    expect(p, z, 1.0, ALL);
    count(counts, &how, recent, MN_COUNTOF(recent));
    check_counts("penalty within a window", counts, p);
    check_done();
}

static void greedy(void **state) {
    (void)state;
    mn_sampler *sampler = NULL;
    assert_int_equal(mn_sampler_create(&sampler, V), MN_OK);
    mn_sampling how = { 0 };    // all zeros
    for (uint64_t i = 0; i < 20; i++) {
        how.seed = i;
        CHECK(pick(sampler, &how, i, NULL, 0) == 3, "not the first of the largest");
    }
    how.repetition_penalty = 1.1;
    const int32_t recent = 3;
    CHECK(pick(sampler, &how, 0, &recent, 1) == 5, "not the second of the largest");
    how = plain();
    how.temperature = 1e-9;    // the two largest share
    int n_third = 0;
    for (uint64_t i = 0; i < 100; i++) n_third += pick(sampler, &how, i, NULL, 0) == 3;
    CHECK(n_third > 20 && n_third < 80, "token 3 %d times of 100", n_third);
    mn_sampler_destroy(sampler);
    check_done();
}

/* A draw is a function of (seed, stream, position), whatever was drawn before. */
static void counter_based(void **state) {
    (void)state;
    mn_sampler *a = NULL, *b = NULL;
    assert_int_equal(mn_sampler_create(&a, V), MN_OK);
    assert_int_equal(mn_sampler_create(&b, 2 * V), MN_OK);
    mn_sampling how = plain();
    int32_t forwards[50];
    for (uint64_t i = 0; i < 50; i++) forwards[i] = pick(a, &how, i, NULL, 0);
    for (uint64_t i = 50; i-- > 0;) {
        CHECK(pick(b, &how, i, NULL, 0) == forwards[i], "position %d", (int)i);
    }
    int n_same[2] = { 0, 0 };
    for (uint64_t i = 0; i < 50; i++) {
        how = plain();
        how.seed++;
        n_same[0] += pick(a, &how, i, NULL, 0) == forwards[i];
        how.seed--;
        how.stream = 1;
        n_same[1] += pick(a, &how, i, NULL, 0) == forwards[i];
    }
    CHECK(n_same[0] < 40 && n_same[1] < 40, "seed or stream do not count");
    mn_sampler_destroy(a);
    mn_sampler_destroy(b);
    check_done();
}

/* The heap against sorting, on many tokens with many equal logits. */
static int64_t n_before(const float *z, int64_t n, int64_t id) {
    int64_t before = 0;
    for (int64_t i = 0; i < n; i++) before += z[i] > z[id] || (z[i] == z[id] && i < id);
    return before;
}

static void large_vocabularies(void **state) {
    (void)state;
    enum { N = 5000 };
    static float z[N];
    mn_sampler *sampler = NULL;
    assert_int_equal(mn_sampler_create(&sampler, N), MN_OK);
    for (uint64_t i = 0; i < N; i++) z[i] = (float)(mn_rng_bits(4, 4, i) % 40) * 0.01f;
    mn_sampling how = plain();
    for (int64_t k = 1; k < N; k = 3 * k + 1) {
        int64_t deepest = 0;
        how.top_k = k;
        for (uint64_t i = 0; i < 400; i++) {
            int32_t token = 0;
            const mn_draw from = { z, N, NULL, 0, i };
            CHECK(mn_sampler_pick(&token, sampler, &how, &from) == MN_OK, "%s", mn_last_error());
            const int64_t depth = n_before(z, N, token);
            CHECK(depth < k, "top_k %d drew the token %d-th in order", (int)k, (int)depth + 1);
            deepest = mn_max(deepest, depth);
        }
        /* 400 draws, nearly uniform: all in the upper 97 of 100 once in 100000 times */
        CHECK(deepest >= k * 97 / 100 - 1, "top_k %d goes no deeper than %d", (int)k,
              (int)deepest);
    }
    mn_sampler_destroy(sampler);
    check_done();
}

static void refusals(void **state) {
    (void)state;
    mn_sampler *sampler = NULL;
    int32_t token = -7;
    assert_int_equal(mn_sampler_create(&sampler, V), MN_OK);
    const mn_draw from = { logits, V, NULL, 0, 0 };
    static const struct {
        const char *field, *text;
    } wrong[] = { { "temperature", "-1" }, { "temperature", "nan" }, { "temperature", "warm" },
                  { "top_k", "1.5" }, { "top_k", "-1" }, { "top_p", "1.01" }, { "min_p", "-0.1" },
                  { "repetition_penalty", "101" }, { "seed", "-1" }, { "seed", "" },
                  { "seed", "18446744073709551616" }, { "top_p", "0.5x" } };
    const mn_sampling_field *fields;
    const int n = mn_sampling_fields(&fields);
    for (size_t i = 0; i < MN_COUNTOF(wrong); i++) {
        mn_sampling how = plain();
        int at = 0;
        while (at < n && strcmp(fields[at].name, wrong[i].field) != 0) at++;
        if (!CHECK(at < n, "no field %s", wrong[i].field)) continue;
        assert_fails(mn_sampling_set(&how, &fields[at], wrong[i].text), MN_ERR_ARGUMENT,
                     wrong[i].field, "takes");
    }
    mn_sampling how = plain();
    how.top_p = 2.0;
    assert_fails(mn_sampler_pick(&token, sampler, &how, &from), MN_ERR_ARGUMENT, "top_p", "0 to 1");
    how = plain();
    float spoilt[V] = { 0.0f };
    mn_draw bad = { spoilt, V, NULL, 0, 0 };
    spoilt[4] = NAN;
    assert_fails(mn_sampler_pick(&token, sampler, &how, &bad), MN_ERR_NUMERIC, "token 4", "nan");
    spoilt[4] = INFINITY;
    assert_fails(mn_sampler_pick(&token, sampler, &how, &bad), MN_ERR_NUMERIC, "token 4", "inf");
    for (int i = 0; i < V; i++) spoilt[i] = -INFINITY;
    assert_fails(mn_sampler_pick(&token, sampler, &how, &bad), MN_ERR_NUMERIC, "every", "");
    bad.n = V + 1;
    assert_fails(mn_sampler_pick(&token, sampler, &how, &bad), MN_ERR_ARGUMENT, "13", "12");
    bad.n = 0;
    assert_fails(mn_sampler_pick(&token, sampler, &how, &bad), MN_ERR_ARGUMENT, "0", "");
    assert_int_equal(token, -7);
    mn_sampler_destroy(sampler);
    assert_int_equal(mn_sampler_create(&sampler, 0), MN_ERR_MEMORY);
    assert_null(sampler);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(temperatures),
        cmocka_unit_test(cuts),
        cmocka_unit_test(cuts_follow_each_other),
        cmocka_unit_test(penalty),
        cmocka_unit_test(greedy),
        cmocka_unit_test(counter_based),
        cmocka_unit_test(large_vocabularies),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
