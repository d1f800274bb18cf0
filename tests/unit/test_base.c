/* test_base.c - statuses, checked sizes, element types, random numbers, scratch memory and threads.
 */
// labels: sanitize threads
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/deviation.h"
#include "base/dtype.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"
#include "support/check.h"
#include "ops/run.h"
#include "ops/sample.h"
#include "runtime/arena.h"
#include "runtime/threads.h"

/* Huge requests are part of the tests; the sanitizer's allocator is to refuse them like any other.
 */
const char *__asan_default_options(void);
const char *__asan_default_options(void) {
    return "allocator_may_return_null=1";
}

/* ---- status -----------------------------------------------------------------------------------
 */

static void status_carries_a_sentence(void **state) {
    (void)state;
    assert_int_equal(mn_fail(MN_ERR_FORMAT, "%s: line %d", "a.json", 7), MN_ERR_FORMAT);
    assert_string_equal(mn_last_error(), "a.json: line 7");
    char longer[4096];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    mn_fail(MN_ERR_IO, "%s", longer);
    const size_t kept = strlen(mn_last_error());
    assert_true(kept > 500 && kept < sizeof longer);
    assert_memory_equal(mn_last_error(), longer, kept);
}

static void every_status_has_a_name(void **state) {
    (void)state;
    for (int i = 0; i < MN_STATUS_COUNT; i++) {
        assert_non_null(mn_status_name((mn_status)i));
        assert_true(strlen(mn_status_name((mn_status)i)) > 0);
        for (int j = 0; j < i; j++) {
            assert_string_not_equal(mn_status_name((mn_status)i), mn_status_name((mn_status)j));
        }
    }
    assert_string_equal(mn_status_name((mn_status)-1), "unknown status");
    assert_string_equal(mn_status_name(MN_STATUS_COUNT), "unknown status");
}

static void *fail_elsewhere(void *unused) {
    const bool empty = mn_last_error()[0] == '\0';
    mn_fail(MN_ERR_IO, "elsewhere");
    return empty && strcmp(mn_last_error(), "elsewhere") == 0 ? unused : NULL;
}

static void messages_belong_to_threads(void **state) {
    pthread_t thread;
    void *fine = NULL;
    mn_fail(MN_ERR_IO, "here");
    assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, &state), 0);
    pthread_join(thread, &fine);
    assert_non_null(fine);
    assert_string_equal(mn_last_error(), "here");
}

/* ---- checked arithmetic, types, clock ----------------------------------------------------------
 */

static void sizes_that_do_not_fit_are_noticed(void **state) {
    (void)state;
    size_t s;
    int64_t n;
    assert_true(mn_mul_size(&s, SIZE_MAX / 3, 3));
    assert_int_equal(s, SIZE_MAX / 3 * 3);
    assert_false(mn_mul_size(&s, SIZE_MAX / 3 + 1, 3));
    assert_true(mn_mul_size(&s, 0, SIZE_MAX));
    assert_int_equal(s, 0);
    assert_true(mn_add_size(&s, SIZE_MAX - 5, 5));
    assert_false(mn_add_size(&s, SIZE_MAX - 5, 6));
    assert_true(mn_mul_i64(&n, INT64_MAX / 7, 7));
    assert_false(mn_mul_i64(&n, INT64_MAX / 7 + 1, 7));
    assert_true(mn_mul_i64(&n, INT64_MIN / 2, 2));
    assert_true(n == INT64_MIN);
    assert_false(mn_mul_i64(&n, INT64_MIN, -1));
    assert_true(mn_add_i64(&n, INT64_MAX, INT64_MIN));
    assert_int_equal(n, -1);
    assert_false(mn_add_i64(&n, INT64_MAX, 1));
}

static void small_helpers(void **state) {
    (void)state;
    assert_int_equal(mn_min(-3, 2), -3);
    assert_int_equal(mn_max(-3, 2), 2);
    assert_int_equal(mn_ceil_div(0, 4), 0);
    assert_int_equal(mn_ceil_div(1, 4), 1);
    assert_int_equal(mn_ceil_div(4, 4), 1);
    assert_int_equal(mn_ceil_div(5, 4), 2);
    assert_true(mn_ceil_div(INT64_MAX, 2) == INT64_MAX / 2 + 1);
    const double before = mn_seconds();
    assert_true(mn_seconds() >= before);
}

static void types_have_names_and_sizes(void **state) {
    (void)state;
    assert_int_equal(mn_dtype_bytes(MN_F32), 4);
    assert_int_equal(mn_dtype_bytes(MN_F64), 8);
    assert_int_equal(mn_dtype_bytes(MN_BF16), 2);
    for (int i = 0; i < MN_DTYPE_COUNT; i++) {
        mn_dtype parsed = MN_DTYPE_COUNT;
        assert_true(mn_dtype_parse(&parsed, mn_dtype_name((mn_dtype)i)));
        assert_int_equal(parsed, i);
    }
    mn_dtype parsed;
    assert_false(mn_dtype_parse(&parsed, "f16"));
    assert_false(mn_dtype_parse(&parsed, ""));
}

/* ---- random numbers -----------------------------------------------------------------------------
 */

/* Known answers of Philox 2x64-10 published with Random123 (Salmon et al.): counter (index,
 * stream), key seed; the first word. */
static void philox_gives_its_known_answers(void **state) {
    (void)state;
    assert_true(mn_rng_bits(0, 0, 0) == 0xca00a0459843d731u);
    assert_true(mn_rng_bits(UINT64_MAX, UINT64_MAX, UINT64_MAX) == 0x65b021d60cd8310fu);
    assert_true(mn_rng_bits(0xa4093822299f31d0u, 0x13198a2e03707344u, 0x243f6a8885a308d3u) ==
                0x0a5e742c2997341cu);
}

enum { N_DRAWS = 200000 };

/* Moments within five standard errors; 64 bins within the 1e-6 quantile of chi squared. */
static void uniform_numbers_are_uniform(void **state) {
    (void)state;
    enum { N_BINS = 64 };
    double sum = 0.0, square = 0.0, neighbours = 0.0, last = 0.5, chi2 = 0.0;
    int64_t bins[N_BINS] = { 0 };
    for (uint64_t i = 0; i < N_DRAWS; i++) {
        const double u = mn_rng_uniform(42, 7, i);
        assert_true(u > 0.0 && u < 1.0);
        bins[(int)(u * N_BINS)]++;
        sum += u;
        square += (u - 0.5) * (u - 0.5);
        neighbours += (u - 0.5) * (last - 0.5);
        last = u;
    }
    for (int b = 0; b < N_BINS; b++) {
        const double expected = (double)N_DRAWS / N_BINS, off = (double)bins[b] - expected;
        chi2 += off * off / expected;
    }
    const double n = N_DRAWS;
    assert_true(fabs(sum / n - 0.5) < 5.0 * sqrt(1.0 / 12.0 / n));
    assert_true(fabs(square / n - 1.0 / 12.0) < 5.0 * sqrt(1.0 / 180.0 / n));
    assert_true(fabs(neighbours / n) < 5.0 / 12.0 / sqrt(n));
    assert_true(chi2 > 20.0 && chi2 < 130.0);
}

static void normal_numbers_are_normal(void **state) {
    (void)state;
    double moments[5] = { 0.0 };
    int64_t beyond_two = 0;
    for (uint64_t i = 0; i < N_DRAWS; i++) {
        const double z = mn_rng_normal(1, 2, i);
        assert_true(isfinite(z));
        for (int k = 1; k < 5; k++) moments[k] += pow(z, k) / N_DRAWS;
        beyond_two += fabs(z) > 2.0;
    }
    const double n = N_DRAWS, tail = 0.04550026389635842;
    assert_true(fabs(moments[1]) < 5.0 * sqrt(1.0 / n));
    assert_true(fabs(moments[2] - 1.0) < 5.0 * sqrt(2.0 / n));
    assert_true(fabs(moments[3]) < 5.0 * sqrt(15.0 / n));
    assert_true(fabs(moments[4] - 3.0) < 5.0 * sqrt(96.0 / n));
    assert_true(fabs((double)beyond_two / n - tail) < 5.0 * sqrt(tail * (1.0 - tail) / n));
}

/* Seeds, streams and indices each lead elsewhere. */
static void draws_differ_by_every_argument(void **state) {
    (void)state;
    double by_seed = 0.0, by_stream = 0.0;
    for (uint64_t i = 0; i < 1000; i++) {
        assert_true(mn_rng_bits(5, 6, i) == mn_rng_bits(5, 6, i));
        assert_true(mn_rng_bits(5, 6, i) != mn_rng_bits(5, 6, i + 1));
        const double z = mn_rng_normal(5, 6, i);
        by_seed += z * mn_rng_normal(6, 6, i) / 1000.0;
        by_stream += z * mn_rng_normal(5, 7, i) / 1000.0;
    }
    assert_true(fabs(by_seed) < 5.0 / sqrt(1000.0));
    assert_true(fabs(by_stream) < 5.0 / sqrt(1000.0));
}

/* ---- arena --------------------------------------------------------------------------------------
 */

/* A call's worth of pieces of awkward sizes, none overlapping another. */
static void take_pieces(mn_arena *arena) {
    enum { N_PIECES = 200 };
    unsigned char *pieces[N_PIECES];
    size_t sizes[N_PIECES];
    for (int i = 0; i < N_PIECES; i++) {
        sizes[i] = (size_t)mn_rng_bits(3, 0, (uint64_t)i) % (i % 20 == 0 ? 3000000 : 5000);
        pieces[i] = mn_arena_bytes(arena, sizes[i]);
        assert_non_null(pieces[i]);
        assert_int_equal((uintptr_t)pieces[i] % MN_ALIGN, 0);
        memset(pieces[i], i, sizes[i]);
    }
    for (int i = 0; i < N_PIECES; i++) {
        for (size_t b = 0; b < sizes[i]; b += 97) assert_int_equal(pieces[i][b], (unsigned char)i);
        if (sizes[i]) assert_int_equal(pieces[i][sizes[i] - 1], (unsigned char)i);
    }
}

static void arena_does_not_grow_the_second_time(void **state) {
    (void)state;
    mn_arena *arena;
    assert_int_equal(mn_arena_create(&arena), MN_OK);
    const mn_mark start = mn_arena_mark(arena);
    take_pieces(arena);
    const size_t held = mn_arena_held(arena);
    for (int round = 0; round < 3; round++) {
        mn_arena_release(arena, start);
        take_pieces(arena);
        assert_int_equal(mn_arena_held(arena), held);
    }
    mn_arena_destroy(arena);
    mn_arena_destroy(NULL);
}

static void *counted_allocate(void *owner, size_t bytes) {
    ++*(int *)owner;
    return aligned_alloc(MN_ALIGN, (bytes + MN_ALIGN - 1) / MN_ALIGN * MN_ALIGN);
}

static void counted_free(void *owner, void *memory) {
    --*(int *)owner;
    free(memory);
}

static void arena_gives_its_blocks_back(void **state) {
    (void)state;
    int blocks = 0;
    const mn_arena_source source = { counted_allocate, counted_free, &blocks, 4096 };
    mn_arena *arena;
    assert_int_equal(mn_arena_create_over(&arena, &source), MN_OK);
    for (int round = 0; round < 2; round++) {
        const mn_mark start = mn_arena_mark(arena);
        take_pieces(arena);
        assert_true(blocks > 1);
        mn_arena_release(arena, start);
        mn_arena_trim(arena);
        assert_int_equal(blocks, 0);
        assert_int_equal(mn_arena_held(arena), 0);
    }
    mn_arena_destroy(arena);
    mn_arena_trim(NULL);
}

static void arena_keeps_what_is_before_a_mark(void **state) {
    (void)state;
    mn_arena *arena;
    assert_int_equal(mn_arena_create(&arena), MN_OK);
    unsigned char *kept = mn_arena_bytes(arena, 1000);
    memset(kept, 0x11, 1000);
    const mn_mark mark = mn_arena_mark(arena);
    unsigned char *first = mn_arena_bytes(arena, 5000000);    // a block of its own
    memset(first, 0x22, 5000000);
    mn_arena_release(arena, mark);
    unsigned char *again = mn_arena_bytes(arena, 5000000);
    assert_ptr_equal(first, again);
    memset(again, 0x33, 5000000);
    for (int i = 0; i < 1000; i++) assert_int_equal(kept[i], 0x11);
    mn_arena_destroy(arena);
}

static void arena_refuses_what_does_not_fit(void **state) {
    (void)state;
    mn_arena *arena;
    assert_int_equal(mn_arena_create(&arena), MN_OK);
    assert_null(mn_arena_bytes(arena, SIZE_MAX));
    assert_null(mn_arena_bytes(arena, SIZE_MAX - 100));
    assert_null(mn_arena_bytes(arena, (size_t)1 << 62));
    assert_null(mn_arena_array(arena, (int64_t)1 << 40, (int64_t)1 << 40, 4));
    assert_null(mn_arena_array(arena, INT64_MAX, 2, 8));
    assert_null(mn_arena_array(arena, -1, 4, 8));
    assert_null(mn_arena_array(arena, 4, -1, 8));
    assert_non_null(mn_arena_bytes(arena, 0));
    assert_non_null(mn_arena_array(arena, 0, 5, 8));
    take_pieces(arena);
    mn_arena_destroy(arena);
}

/* ---- threads
 * ------------------------------------------------------------------------------------- */

enum { MOST_ITEMS = 10007, MOST_WORKERS = 16 };

typedef struct count {
    _Atomic int runs[MOST_ITEMS];
    _Atomic int inside[MOST_WORKERS];    // items that a worker's scratch serves right now
    _Atomic int wrong;
    int n_workers;
} count;

static void count_item(void *context, int64_t item, int worker) {
    count *c = context;
    if (worker < 0 || worker >= c->n_workers) {
        atomic_fetch_add(&c->wrong, 1);
        return;
    }
    if (atomic_fetch_add(&c->inside[worker], 1) != 0) atomic_fetch_add(&c->wrong, 1);
    atomic_fetch_add(&c->runs[item], 1);
    atomic_fetch_sub(&c->inside[worker], 1);
}

/* Every item once, and no two at a time with the same worker number. */
static bool runs_each_once(mn_threads *threads, int64_t n_items) {
    count *c = calloc(1, sizeof *c);
    c->n_workers = mn_threads_count(threads);
    mn_threads_run(threads, n_items, count_item, c);
    bool fine = atomic_load(&c->wrong) == 0;
    for (int64_t i = 0; i < MOST_ITEMS; i++)
        fine = fine && atomic_load(&c->runs[i]) == (i < n_items);
    free(c);
    return fine;
}

static void threads_run_each_item_once(void **state) {
    (void)state;
    static const int counts[] = { 1, 2, 3, 7, MOST_WORKERS };
    static const int64_t items[] = { 0, 1, 2, 3, 6, 7, 8, 100, MOST_ITEMS };
    for (size_t i = 0; i < MN_COUNTOF(counts); i++) {
        mn_threads *threads;
        assert_int_equal(mn_threads_create(&threads, counts[i]), MN_OK);
        assert_int_equal(mn_threads_count(threads), counts[i]);
        for (int round = 0; round < 10; round++) {
            for (size_t k = 0; k < MN_COUNTOF(items); k++) {
                assert_true(runs_each_once(threads, items[k]));
            }
        }
        mn_threads_destroy(threads);
    }
    mn_threads_destroy(NULL);
}

/* Rounds so short that most end before a worker has come, each with its own context. */
static void short_rounds_follow_each_other(void **state) {
    (void)state;
    enum { ROUNDS = 20000, ITEMS = 5 };
    mn_threads *threads;
    count *c = calloc(1, sizeof *c);
    assert_non_null(c);
    assert_int_equal(mn_threads_create(&threads, 4), MN_OK);
    c->n_workers = 4;
    for (int round = 1; round <= ROUNDS; round++) {
        mn_threads_run(threads, ITEMS, count_item, c);
        for (int i = 0; i < ITEMS; i++) assert_int_equal(atomic_load(&c->runs[i]), round);
    }
    assert_int_equal(atomic_load(&c->wrong), 0);
    mn_threads_destroy(threads);
    free(c);
}

/* Item 1 waits for item 0: allowed, because items begin in order. */
static void wait_for_first(void *context, int64_t item, int worker) {
    (void)worker;
    _Atomic int *done = context;
    while (item > 0 && atomic_load(done) == 0) sched_yield();
    if (item == 0) atomic_store(done, 1);
}

static void items_begin_in_order(void **state) {
    (void)state;
    static const int n_threads[] = { 1, 2, 4 };
    for (size_t i = 0; i < MN_COUNTOF(n_threads); i++) {
        mn_threads *threads;
        assert_int_equal(mn_threads_create(&threads, n_threads[i]), MN_OK);
        for (int round = 0; round < 200; round++) {
            _Atomic int done = 0;
            mn_threads_run(threads, 20, wait_for_first, &done);
            assert_int_equal(atomic_load(&done), 1);
        }
        mn_threads_destroy(threads);
    }
}

static void a_pool_may_rest_and_go_on(void **state) {
    (void)state;
    mn_threads *threads;
    const struct timespec a_while = { 0, 20000000 };
    assert_int_equal(mn_threads_create(&threads, 3), MN_OK);
    for (int round = 0; round < 3; round++) {
        assert_true(runs_each_once(threads, 50));
        nanosleep(&a_while, NULL);    // beyond the spin, into the wait
    }
    mn_threads_destroy(threads);
    assert_int_equal(mn_threads_create(&threads, 5), MN_OK);    // and one that never ran
    mn_threads_destroy(threads);
}

static void thread_counts_are_checked(void **state) {
    (void)state;
    mn_threads *threads = NULL;
    assert_int_equal(mn_threads_create(&threads, -1), MN_ERR_ARGUMENT);
    assert_int_equal(mn_threads_create(&threads, 100000), MN_ERR_ARGUMENT);
    assert_null(threads);
    assert_int_equal(mn_threads_create(&threads, 0), MN_OK);
    assert_true(mn_threads_count(threads) >= 1);
    mn_threads_destroy(threads);
}

/* One host thread with a context of its own: the same call again and again gives the same bits. */
static void *host(void *result) {
    mn_context *context = NULL;
    mn_sample s;
    const mn_context_options options = { .n_threads = 3 };
    bool *fine = result;
    *fine = mn_context_create(&context, &options) == MN_OK;
    mn_sample_init(&s, MN_OP_rms_norm);
    ((mn_call *)s.args)->B = 1500;
    ((mn_call *)s.args)->V = 37;
    *fine = *fine && mn_sample_allocate(&s, MN_ALL_FIELDS) == MN_OK;
    mn_sample_draw(&s, 11);
    float *first = NULL;
    const mn_sample_tensor *y = mn_sample_find(&s, "y");
    for (int round = 0; round < 40 && *fine; round++) {
        *fine = mn_op_run(context, MN_OP_rms_norm, MN_FORWARD, s.args) == MN_OK &&
                mn_op_run(context, MN_OP_rms_norm, MN_BACKWARD, s.args) == MN_OK;
        const size_t bytes = (size_t)y->count * sizeof(float);
        if (!first) {
            first = malloc(bytes);
            memcpy(first, y->data, bytes);
        }
        *fine = *fine && memcmp(first, y->data, bytes) == 0;
    }
    free(first);
    mn_sample_free(&s);
    mn_context_destroy(context);
    return NULL;
}

static void contexts_work_side_by_side(void **state) {
    (void)state;
    enum { N_HOSTS = 4 };
    pthread_t hosts[N_HOSTS];
    bool fine[N_HOSTS] = { false };
    for (int i = 0; i < N_HOSTS; i++) {
        assert_int_equal(pthread_create(&hosts[i], NULL, host, &fine[i]), 0);
    }
    for (int i = 0; i < N_HOSTS; i++) pthread_join(hosts[i], NULL);
    for (int i = 0; i < N_HOSTS; i++) assert_true(fine[i]);
}

/* Two rows, of scales 4 and 2, in a tensor of rms sqrt(25 / 4): one number off by 1 / 4. */
static void deviations_by_hand(void **state) {
    (void)state;
    const double r[4] = { 3, 4, 0, 0 }, inf = INFINITY;
    double x[4] = { 3, 4.25, 0, 0 };
    mn_deviation off = mn_deviation_of(x, r, 4, 2);
    CHECK(fabs(off.rms - 2.5) < 1e-15 && fabs(off.of_rms - 0.05) < 1e-15, "%g, %g", off.rms,
          off.of_rms);
    CHECK(off.worst == 0.25 && off.share == 0.0625 && off.at == 1, "%g, %g at %d", off.worst,
          off.share, (int)off.at);
    const double law = 4.0 / 256.0 + sqrt(2.0 * log(4.0)) * 0.05 * sqrt(12.5);
    CHECK(fabs(off.of_law - 0.25 / law) < 1e-15, "%g, not %g", off.of_law, 0.25 / law);
    x[3] = 0.25;    // of a row of zeros, whose scale is the tensor's rms
    off = mn_deviation_of(x, r, 4, 2);
    CHECK(off.share == 0.1 && off.at == 3, "%g at %d", off.share, (int)off.at);
    x[2] = NAN;
    off = mn_deviation_of(x, r, 4, 2);
    CHECK(isnan(off.share) && isnan(off.worst) && off.at == 2, "at %d", (int)off.at);
    const double far[2] = { inf, 1 }, same[2] = { inf, 1 }, other[2] = { -inf, 1 };
    CHECK(mn_deviation_of(same, far, 2, 2).worst == 0.0, "the same infinity");
    CHECK(mn_deviation_of(other, far, 2, 2).worst == inf, "another infinity");
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(status_carries_a_sentence),
        cmocka_unit_test(every_status_has_a_name),
        cmocka_unit_test(messages_belong_to_threads),
        cmocka_unit_test(sizes_that_do_not_fit_are_noticed),
        cmocka_unit_test(small_helpers),
        cmocka_unit_test(types_have_names_and_sizes),
        cmocka_unit_test(philox_gives_its_known_answers),
        cmocka_unit_test(uniform_numbers_are_uniform),
        cmocka_unit_test(normal_numbers_are_normal),
        cmocka_unit_test(draws_differ_by_every_argument),
        cmocka_unit_test(arena_does_not_grow_the_second_time),
        cmocka_unit_test(arena_gives_its_blocks_back),
        cmocka_unit_test(arena_keeps_what_is_before_a_mark),
        cmocka_unit_test(arena_refuses_what_does_not_fit),
        cmocka_unit_test(threads_run_each_item_once),
        cmocka_unit_test(short_rounds_follow_each_other),
        cmocka_unit_test(items_begin_in_order),
        cmocka_unit_test(a_pool_may_rest_and_go_on),
        cmocka_unit_test(thread_counts_are_checked),
        cmocka_unit_test(contexts_work_side_by_side),
        cmocka_unit_test(deviations_by_hand),
    };
    return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
