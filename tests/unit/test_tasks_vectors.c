/* test_tasks_vectors.c - collisions and crowds against a second reading of their vectors. */
// labels: sanitize
#include "support/task_case.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "support/folder.h"
#include "tasks/projection.h"

enum { SEED = 4711 };

/* ---- collisions ------------------------------------------------------------------------------ */

/* A token read again: which key of which pair, with what cosine, and its label (-1: a question). */
typedef struct token {
    int64_t pair, label;
    bool asks, is_a;
    double rho;
} token;

static token read_token(const task_case *c, int64_t t, int64_t P) {
    const float *x = c->x + t * c->shape.features;
    token r = { .pair = -1, .label = -1, .asks = x[0] != 0.0f };
    CHECK(x[0] == 0.0f || x[0] == 1.0f, "flag %g", (double)x[0]);
    for (int64_t i = 0; i < P; i++) {
        const double along = x[1 + 2 * i], across = x[2 + 2 * i];
        if (along == 0.0 && across == 0.0) continue;
        CHECK(r.pair < 0, "a key of two pairs");
        CHECK(fabs(along * along + across * across - 1.0) <= 4.0 * FLT_EPSILON, "key of norm %g",
              sqrt(along * along + across * across));
        r.pair = i;
        r.rho = along;
        r.is_a = across != 0.0;
    }
    for (int64_t k = 0; k < 2 * P; k++) {
        const float y = x[1 + 2 * P + k];
        if (y == 0.0f) continue;
        CHECK(r.label < 0 && y == 1.0f, "label is not one-hot");
        r.label = k;
    }
    CHECK(r.pair >= 0 && (r.label < 0) == r.asks, "token %d", (int)t);
    return r;
}

/* Goes through a sample phase by phase; returns its number of floods. */
static int64_t read_collision(const task_case *c, int64_t P, int64_t boosts, double low,
                              double high) {
    const int64_t used = mn_task_used(c->task), n = used / P - 3 - boosts;
    int64_t label[2][256], t = 0;
    double rho[256];
    static int32_t rival[1 << 16];
    bool seen[2][256] = { { false } }, has[512] = { false };
    CHECK(used == P * (3 + boosts + n) && n >= 0, "%d tokens", (int)used);
    for (; t < 2 * P; t++) {
        const token r = read_token(c, t, P);
        CHECK(!r.asks && !seen[r.is_a][r.pair] && !has[r.label], "seed %d", (int)t);
        seen[r.is_a][r.pair] = has[r.label] = true;
        label[r.is_a][r.pair] = r.label;
        if (r.is_a) rho[r.pair] = r.rho;
        CHECK(!r.is_a || (r.rho >= low - 1e-6 && r.rho <= high + 1e-6), "rho %g", r.rho);
    }
    for (int64_t i = 0; i < P * boosts; i++, t++) {
        const token r = read_token(c, t, P);
        CHECK(!r.asks && !r.is_a && r.pair == i / boosts && r.label == label[0][r.pair],
              "boost %d", (int)i);
    }
    for (int64_t i = 0; i < P * n; i++, t++) {
        const token r = read_token(c, t, P);
        CHECK(!r.asks && r.is_a && r.pair == i / n && r.label == label[1][r.pair] &&
              r.rho == rho[r.pair], "flood %d", (int)i);
    }
    memset(seen, 0, sizeof seen);
    mn_task_rival(c->task, c->x, c->target, rival);
    for (int64_t i = 0; i < P; i++, t++) {
        const token r = read_token(c, t, P);
        CHECK(r.asks && !r.is_a && !seen[0][r.pair], "question %d", (int)i);
        CHECK(c->target[t] == label[0][r.pair], "question %d: target %d", (int)i,
              (int)c->target[t]);
        CHECK(rival[t] == label[1][r.pair], "question %d: rival %d", (int)i, (int)rival[t]);
        seen[0][r.pair] = true;
    }
    for (int64_t i = 0; i < c->n; i++) {
        CHECK((rival[i] == MN_NO_TARGET) == (c->target[i] == MN_NO_TARGET), "rival at %d", (int)i);
    }
    CHECK(task_scored(c) == P, "%d targets", (int)task_scored(c));
    for (; t < c->n; t++) {
        const float *x = c->x + t * c->shape.features;
        for (int64_t i = 0; i < c->shape.features; i++) CHECK(x[i] == 0.0f, "behind the end");
    }
    return n;
}

static void collisions_are_read_again(void **state) {
    (void)state;
    static const struct {
        const char *changes;
        int64_t P, boosts;
        double low, high;
    } cases[] = { { "", 8, 4, 0.6, 0.8 },
                  { "floods=256 rho_low=0.8 rho_high=0.8", 8, 4, 0.8, 0.8 },
                  { "floods=16 rho_low=0.85 rho_high=0.95", 8, 4, 0.85, 0.95 },
                  { "bindings=1 boosts=0 floods=0", 1, 0, 0.6, 0.8 },
                  { "rho_low=0 rho_high=0 floods=3", 8, 4, 0.0, 0.0 },
                  { "bindings=3 boosts=1 floods=0,5 batch=1", 3, 1, 0.6, 0.8 } };
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        task_case c = task_open("collision", cases[k].changes);
        assert_int_equal(c.shape.features, 1 + 4 * cases[k].P);
        assert_int_equal(c.shape.classes, 2 * cases[k].P);
        for (int64_t i = 0; i < 200; i++) {
            task_take(&c, SEED, (mn_split)(i % 3), i);
            read_collision(&c, cases[k].P, cases[k].boosts, cases[k].low, cases[k].high);
        }
        task_close(&c);
    }
    check_done();
}

static void collisions_have_their_frequencies(void **state) {
    (void)state;
    task_case c = task_open("collision", "");
    tally floods = tally_even("floods", 4), label = tally_even("label of b_0", 16);
    tally rho = tally_even("rho in 10 parts", 10), asked = tally_even("first question", 8);
    for (int64_t i = 0; i < 6000; i++) {
        task_take(&c, SEED, MN_SPLIT_TRAIN, 256 * i + i % 256);
        const int64_t n = read_collision(&c, 8, 4, 0.6, 0.8);
        floods.count[n == 1 ? 0 : n == 2 ? 1 : n == 4 ? 2 : 3]++;
        CHECK(n == 1 || n == 2 || n == 4 || n == 8, "%d floods", (int)n);
        label.count[read_token(&c, 16, 8).label]++;    // its boosts begin
        asked.count[read_token(&c, mn_task_used(c.task) - 8, 8).pair]++;
        rho.count[mn_min(9, (int64_t)((read_token(&c, 48 + n * (i % 8), 8).rho - 0.6) * 50.0))]++;
    }
    tally_check(&floods);
    tally_check(&label);
    tally_check(&rho);
    tally_check(&asked);
    for (int64_t b = 0; b < 20; b++) {    // neighbours have one length
        task_take(&c, SEED, MN_SPLIT_TRAIN, 256 * b);
        const int64_t used = mn_task_used(c.task);
        task_take(&c, SEED, MN_SPLIT_TRAIN, 256 * b + 255);
        CHECK(mn_task_used(c.task) == used, "batch %d has two lengths", (int)b);
    }
    task_close(&c);
    check_done();
}

/* ---- crowds ---------------------------------------------------------------------------------- */

static int64_t label_of(const float *value, int64_t labels) {
    int64_t label = -1;
    for (int64_t k = 0; k < labels; k++) {
        if (value[k] == 0.0f) continue;
        CHECK(label < 0 && value[k] == 1.0f, "label is not one-hot");
        label = k;
    }
    return label;
}

/* Returns the number of writes. */
static int64_t read_crowd(const task_case *c, int64_t width, int64_t labels, int64_t queries) {
    const int64_t n = mn_task_used(c->task) - queries, stride = c->shape.features;
    bool asked[512] = { false };
    for (int64_t t = 0; t < n + queries; t++) {
        const float *x = c->x + t * stride;
        double square = 0.0;
        for (int64_t i = 0; i < width; i++) square += (double)x[1 + i] * x[1 + i];
        CHECK(fabs(square - 1.0) <= (double)width * FLT_EPSILON, "key of square %.9g", square);
        CHECK(x[0] == (t < n ? 0.0f : 1.0f), "flag of token %d", (int)t);
        const int64_t label = label_of(x + 1 + width, labels);
        CHECK((label >= 0) == (t < n), "token %d: label %d", (int)t, (int)label);
        if (t < n) continue;
        int64_t written = -1;
        for (int64_t s = 0; s < n; s++) {
            const float *y = c->x + s * stride;
            if (memcmp(x + 1, y + 1, (size_t)width * sizeof *x) != 0) continue;
            CHECK(written < 0, "two equal keys");
            written = s;
        }
        CHECK(written >= 0 && !asked[written], "question %d", (int)(t - n));
        if (written < 0) continue;
        asked[written] = true;
        CHECK(c->target[t] == label_of(c->x + written * stride + 1 + width, labels),
              "question %d: target %d", (int)(t - n), (int)c->target[t]);
    }
    CHECK(task_scored(c) == queries, "%d targets", (int)task_scored(c));
    return n;
}

static void crowds_are_read_again(void **state) {
    (void)state;
    static const struct {
        const char *changes;
        int64_t width, labels, queries;
    } cases[] = { { "", 64, 64, 8 },
                  { "writes=256", 64, 64, 8 },
                  { "writes=8 key_width=4 labels=2", 4, 2, 8 },
                  { "writes=1,3 key_width=3 labels=5 queries=1 batch=1", 3, 5, 1 } };
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        task_case c = task_open("crowding", cases[k].changes);
        assert_int_equal(c.shape.features, 1 + cases[k].width + cases[k].labels);
        for (int64_t i = 0; i < 60; i++) {
            task_take(&c, SEED, (mn_split)(i % 3), i);
            read_crowd(&c, cases[k].width, cases[k].labels, cases[k].queries);
        }
        task_close(&c);
    }
    check_done();
}

static void crowds_have_their_frequencies(void **state) {
    (void)state;
    task_case c = task_open("crowding", "");
    tally writes = tally_even("writes", 4), label = tally_even("labels", 64);
    tally asked = tally_even("first question of 16", 16), sign = tally_even("signs", 4);
    moments square = { 0 }, fourth = { 0 }, product = { 0 };
    for (int64_t i = 0; i < 1500; i++) {
        task_take(&c, SEED, MN_SPLIT_TRAIN, 256 * i);
        const int64_t n = mn_task_used(c.task) - 8;
        writes.count[n / 16 - 1]++;
        CHECK(n == 16 || n == 32 || n == 48 || n == 64, "%d writes", (int)n);
        for (int64_t t = 0; t < n; t++) {
            const float *x = c.x + t * 129;
            const double y = x[1 + t % 64], z = x[1 + (t + 1) % 64];
            label.count[label_of(x + 65, 64)]++;
            sign.count[2 * (y > 0.0) + (z > 0.0)]++;
            moments_add(&square, 64.0 * y * y);
            moments_add(&fourth, 64.0 * 64.0 * y * y * y * y);
            moments_add(&product, 64.0 * y * z);
        }
        for (int64_t t = 0; n == 16 && t < n; t++) {
            asked.count[t] += memcmp(c.x + t * 129 + 1, c.x + n * 129 + 1, 64 * sizeof *c.x) == 0;
        }
    }
    tally_check(&writes);
    tally_check(&label);
    tally_check(&asked);
    tally_check(&sign);
    /* On the sphere in d dimensions E x^2 = 1/d and E x^4 = 3 / (d (d + 2)). */
    moments_check(&square, "squares", 1.0, 0.03);
    moments_check(&fourth, "fourth powers", 3.0 * 64.0 / 66.0, 0.2);
    moments_check(&product, "products", 0.0, 0.03);
    task_close(&c);
    check_done();
}

/* Orthonormal rows, and addresses of norm 1 that keep the angles of keys in their span. */
static void projections_are_orthonormal(void **state) {
    (void)state;
    enum { R = 16, N = 64 };
    static float p[R * N], other[R * N], square[9], key[N], address[R];
    assert_int_equal(mn_projection_make(p, R, N, SEED), MN_OK);
    assert_int_equal(mn_projection_make(other, R, N, SEED + 1), MN_OK);
    assert_true(memcmp(p, other, sizeof p) != 0);
    for (int a = 0; a < R; a++) {
        for (int b = 0; b <= a; b++) {
            double sum = 0.0;
            for (int i = 0; i < N; i++) sum += (double)p[a * N + i] * p[b * N + i];
            CHECK(fabs(sum - (a == b)) <= N * FLT_EPSILON, "rows %d and %d: %g", a, b, sum);
        }
    }
    for (int i = 0; i < N; i++) key[i] = 3.0f * p[2 * N + i] + 4.0f * p[5 * N + i];
    mn_projection_apply(address, p, key, R, N);
    for (int r = 0; r < R; r++) {
        const double want = r == 2 ? 0.6 : r == 5 ? 0.8 : 0.0;
        CHECK(fabs(address[r] - want) <= N * FLT_EPSILON, "address %d: %g", r, (double)address[r]);
    }
    memset(key, 0, sizeof key);
    mn_projection_apply(address, p, key, R, N);
    for (int r = 0; r < R; r++) assert_true(address[r] == 0.0f);
    assert_int_equal(mn_projection_make(square, 3, 3, SEED), MN_OK);
    assert_fails(mn_projection_make(square, 4, 3, SEED), MN_ERR_ARGUMENT, "4 rows", "possible");
    assert_fails(mn_projection_make(square, 0, 3, SEED), MN_ERR_ARGUMENT, "0 rows", "possible");
    assert_fails(mn_projection_make(square, INT64_MAX / 2, INT64_MAX, SEED), MN_ERR_MEMORY,
                 "projection", "memory");
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collisions_are_read_again),
        cmocka_unit_test(collisions_have_their_frequencies),
        cmocka_unit_test(crowds_are_read_again),
        cmocka_unit_test(crowds_have_their_frequencies),
        cmocka_unit_test(projections_are_orthonormal),
    };
    return cmocka_run_group_tests_name("tasks: vectors", tests, NULL, NULL);
}
