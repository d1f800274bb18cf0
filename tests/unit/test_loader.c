/* test_loader.c - batches as a function of (seed, step): windows, packed documents, epochs, and the
 * shuffle behind them. */
// labels: sanitize
#define _XOPEN_SOURCE 700
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/rng.h"
#include "base/util.h"
#include "data/loader.h"
#include "data/shuffle.h"
#include "support/folder.h"

/* A corpus whose token i is i, so that a token says where it came from. */
static mn_corpus *count_up(const int64_t *lengths, int64_t n_documents, int64_t *borders) {
    mn_corpus *corpus;
    borders[0] = 0;
    for (int64_t i = 0; i < n_documents; i++) borders[i + 1] = borders[i] + lengths[i];
    const int64_t n = borders[n_documents];
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)i;
    assert_int_equal(mn_corpus_from_tokens(&corpus, ids, n, borders, n_documents), MN_OK);
    free(ids);
    return corpus;
}

static mn_loader *make(const mn_corpus *corpus, mn_loader_options options) {
    mn_loader *loader;
    if (mn_loader_create(&loader, corpus, &options) != MN_OK) fail_msg("%s", mn_last_error());
    return loader;
}

static mn_token_batch filled(const mn_loader *loader, int64_t step) {
    mn_token_batch batch;
    assert_int_equal(mn_token_batch_create(&batch, loader), MN_OK);
    assert_int_equal(mn_loader_fill(&batch, loader, step), MN_OK);
    return batch;
}

static bool same_batch(const mn_token_batch *a, const mn_token_batch *b) {
    const size_t n = (size_t)(a->rows * a->length);
    return a->n_sequences == b->n_sequences && memcmp(a->tokens, b->tokens, 4 * n) == 0 &&
           memcmp(a->targets, b->targets, 4 * n) == 0 &&
           memcmp(a->starts, b->starts, 8 * ((size_t)a->n_sequences + 1)) == 0;
}

/* ---- what holds for every batch -------------------------------------------------------------- */

/* Sequences begin at every row, ascend, and close with the batch; every target follows its token
 * inside its document; without target there is token 0. Counts the places seen into `seen`. */
static void assert_sound(const mn_token_batch *batch, const int64_t *borders, int64_t n_documents,
                         int *seen) {
    const int64_t n = batch->rows * batch->length;
    int64_t next = 0;
    assert_int_equal(batch->starts[batch->n_sequences], n);
    for (int64_t i = 0; i < n; i++) {
        const bool begins = next < batch->n_sequences && batch->starts[next] == i;
        next += begins;
        if (i % batch->length == 0) assert_true(begins);
        if (batch->targets[i] == -100) {
            assert_int_equal(batch->tokens[i], 0);
            continue;
        }
        const int32_t token = batch->tokens[i];
        assert_int_equal(batch->targets[i], token + 1);
        if (seen) seen[token]++;
        if (!begins) assert_int_equal(token, batch->tokens[i - 1] + 1);
        if (!batch->packed) continue;
        bool last = false, first = false;
        for (int64_t d = 0; d < n_documents; d++) {
            last |= token == borders[d + 1] - 1;
            first |= token == borders[d];
        }
        assert_false(last);                     // nothing follows it in its document
        if (first) assert_true(begins);
        if (begins && i % batch->length != 0) assert_true(first);
    }
    assert_int_equal(next, batch->n_sequences);
}

typedef struct shape {
    int64_t rows, length, documents, longest;
} shape;

static const shape shapes[] = { { 1, 1, 1, 9 },    { 2, 5, 3, 7 },    { 4, 8, 40, 30 },
                                { 3, 16, 200, 3 }, { 2, 64, 5, 700 }, { 8, 3, 130, 12 } };

/* Documents of random lengths from 1 to longest, one of them longer than a token. */
static mn_corpus *draw_documents(const shape *s, int64_t *borders) {
    int64_t lengths[256];
    for (int64_t i = 0; i < s->documents; i++) {
        lengths[i] = 1 + (int64_t)(mn_rng_bits(77, (uint64_t)s->rows, (uint64_t)i) %
                                   (uint64_t)s->longest);
    }
    lengths[s->documents / 2] = s->longest;
    return count_up(lengths, s->documents, borders);
}

/* An epoch of packed documents offers every token but the last of each document exactly once. */
static void epoch_of_documents_covers_every_place_once(void **state) {
    (void)state;
    int64_t borders[257];
    for (size_t i = 0; i < 2 * MN_COUNTOF(shapes); i++) {
        const shape *s = &shapes[i / 2];
        mn_corpus *corpus = draw_documents(s, borders);
        const int64_t n = mn_corpus_tokens(corpus);
        mn_loader *loader = make(corpus, (mn_loader_options){ MN_CUT_DOCUMENTS, s->rows, s->length,
                                                              .seed = 5, .sequential = i % 2 });
        const int64_t steps = mn_loader_epoch(loader);
        assert_int_equal(steps, mn_ceil_div(n - s->documents, s->rows * s->length));
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            int *seen = calloc((size_t)n, sizeof *seen);
            for (int64_t step = 0; step < steps; step++) {
                mn_token_batch batch = filled(loader, epoch * steps + step);
                assert_true(batch.packed);
                assert_sound(&batch, borders, s->documents, seen);
                mn_token_batch_free(&batch);
            }
            for (int64_t d = 0; d < s->documents; d++) {
                for (int64_t at = borders[d]; at < borders[d + 1]; at++) {
                    assert_int_equal(seen[at], at + 1 < borders[d + 1]);
                }
            }
            free(seen);
        }
        mn_loader_destroy(loader);
        mn_corpus_destroy(corpus);
    }
}

static void sequential_windows_cover_every_place_once(void **state) {
    (void)state;
    int64_t borders[2];
    for (int64_t n = 12; n < 60; n += 7) {
        mn_corpus *corpus = count_up(&n, 1, borders);
        mn_loader *loader = make(corpus, (mn_loader_options){ MN_CUT_WINDOWS, 3, 4,
                                                              .sequential = true });
        const int64_t windows = (n - 1) / 4, steps = mn_loader_epoch(loader);
        int seen[64] = { 0 };
        assert_int_equal(steps, mn_ceil_div(windows, 3));
        for (int64_t step = 0; step < steps; step++) {
            mn_token_batch batch = filled(loader, step), again = filled(loader, step + 5 * steps);
            assert_false(batch.packed);
            assert_int_equal(batch.n_sequences, 3);
            assert_sound(&batch, borders, 1, seen);
            assert_true(same_batch(&batch, &again));
            mn_token_batch_free(&batch);
            mn_token_batch_free(&again);
        }
        for (int64_t i = 0; i < n; i++) assert_int_equal(seen[i], i < 4 * windows);
        mn_loader_destroy(loader);
        mn_corpus_destroy(corpus);
    }
}

/* ---- functions of the step ------------------------------------------------------------------- */

/* Any order of steps, any loader: the same batch. Another seed or step: another one. */
static void batches_are_functions_of_seed_and_step(void **state) {
    (void)state;
    enum { STEPS = 40 };
    int64_t borders[257];
    for (int kind = 0; kind < 2; kind++) {
        mn_corpus *corpus = draw_documents(&shapes[2], borders);
        const mn_loader_options options = { kind ? MN_CUT_DOCUMENTS : MN_CUT_WINDOWS, 2, 7,
                                            .seed = 9 };
        mn_loader_options other = options;
        other.seed = 10;
        mn_loader *a = make(corpus, options), *b = make(corpus, options), *c = make(corpus, other);
        mn_token_batch forward[STEPS];
        for (int64_t i = 0; i < STEPS; i++) forward[i] = filled(a, 3 * i);
        int same_as_other_seed = 0, same_as_before = 0;
        for (int64_t i = STEPS; i-- > 0;) {
            mn_token_batch backward = filled(b, 3 * i), again = filled(a, 3 * i);
            mn_token_batch with = filled(c, 3 * i);
            assert_true(same_batch(&forward[i], &backward));
            assert_true(same_batch(&forward[i], &again));
            same_as_other_seed += same_batch(&forward[i], &with);
            if (i > 0) same_as_before += same_batch(&forward[i], &forward[i - 1]);
            mn_token_batch_free(&backward);
            mn_token_batch_free(&again);
            mn_token_batch_free(&with);
        }
        assert_int_equal(same_as_other_seed, 0);
        assert_int_equal(same_as_before, 0);
        for (int64_t i = 0; i < STEPS; i++) mn_token_batch_free(&forward[i]);
        mn_loader_destroy(a);
        mn_loader_destroy(b);
        mn_loader_destroy(c);
        mn_corpus_destroy(corpus);
    }
}

/* Starts are even over the n - T places, both ends among them. */
static void random_windows_begin_anywhere(void **state) {
    (void)state;
    int64_t borders[2];
    const int64_t n = 20;
    mn_corpus *corpus = count_up(&n, 1, borders);
    mn_loader *loader = make(corpus, (mn_loader_options){ MN_CUT_WINDOWS, 10, 4, .seed = 1 });
    enum { STEPS = 1600, CHOICES = 16 };
    int count[CHOICES] = { 0 };
    assert_int_equal(mn_loader_epoch(loader), 1);    // ceil(20 / 40)
    for (int64_t step = 0; step < STEPS; step++) {
        mn_token_batch batch = filled(loader, step);
        assert_sound(&batch, borders, 1, NULL);
        for (int64_t row = 0; row < 10; row++) {
            assert_in_range(batch.tokens[row * 4], 0, CHOICES - 1);
            count[batch.tokens[row * 4]]++;
        }
        mn_token_batch_free(&batch);
    }
    /* 1000 expected of each, standard deviation 31: six of them. */
    for (int i = 0; i < CHOICES; i++) assert_in_range(count[i], 814, 1186);
    mn_loader_destroy(loader);
    mn_corpus_destroy(corpus);
}

static void windows_use_all_of_the_smallest_corpus(void **state) {
    (void)state;
    int64_t borders[2];
    const int64_t n = 5;
    mn_corpus *corpus = count_up(&n, 1, borders);
    for (int sequential = 0; sequential < 2; sequential++) {
        mn_loader *loader = make(corpus, (mn_loader_options){ MN_CUT_WINDOWS, 1, 4, 0,
                                                              sequential });
        mn_token_batch batch = filled(loader, 3);
        assert_int_equal(batch.tokens[0], 0);
        assert_int_equal(batch.targets[3], 4);
        mn_token_batch_free(&batch);
        mn_loader_destroy(loader);
    }
    mn_corpus_destroy(corpus);
}

/* ---- packing by hand ------------------------------------------------------------------------- */

static void packing_is_as_written_down(void **state) {
    (void)state;
    static const int64_t lengths[] = { 4, 1, 6, 3 };    // tokens 0-3, 4, 5-10, 11-13
    int64_t borders[5];
    mn_corpus *corpus = count_up(lengths, 4, borders);
    mn_loader *loader = make(corpus, (mn_loader_options){ MN_CUT_DOCUMENTS, 2, 6,
                                                          .sequential = true });
    static const int32_t tokens[] = { 0, 1, 2, 5, 6, 7, 8, 9, 11, 12, 0, 0 };
    static const int32_t targets[] = { 1, 2, 3, 6, 7, 8, 9, 10, 12, 13, -100, -100 };
    static const int64_t starts[] = { 0, 3, 6, 8, 10, 12 };
    mn_token_batch batch = filled(loader, 0);
    assert_int_equal(mn_loader_epoch(loader), 1);
    assert_memory_equal(batch.tokens, tokens, sizeof tokens);
    assert_memory_equal(batch.targets, targets, sizeof targets);
    assert_int_equal(batch.n_sequences, 5);    // what is left empty is one too
    assert_memory_equal(batch.starts, starts, sizeof starts);
    mn_token_batch_free(&batch);
    mn_loader_destroy(loader);
    mn_corpus_destroy(corpus);
}

static void documents_change_order_with_the_epoch(void **state) {
    (void)state;
    enum { N = 100, EPOCHS = 20 };
    int64_t lengths[N], borders[N + 1];
    int first[EPOCHS], distinct = 0;
    for (int i = 0; i < N; i++) lengths[i] = 3;
    mn_corpus *corpus = count_up(lengths, N, borders);
    mn_loader *loader = make(corpus, (mn_loader_options){ MN_CUT_DOCUMENTS, 1, 200, .seed = 4 });
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        mn_token_batch batch = filled(loader, epoch);
        first[epoch] = batch.tokens[0];
        bool fresh = true;
        for (int i = 0; i < epoch; i++) fresh &= first[i] != first[epoch];
        distinct += fresh;
        mn_token_batch_free(&batch);
    }
    assert_true(distinct > 10);    // 18 expected
    mn_loader_destroy(loader);
    mn_corpus_destroy(corpus);
}

/* ---- mistakes -------------------------------------------------------------------------------- */

static void mistakes_are_named(void **state) {
    (void)state;
    int64_t borders[4];
    const int64_t lengths[] = { 1, 1, 1 };
    mn_corpus *corpus = count_up(lengths, 3, borders);
    mn_loader *loader;
    mn_loader_options o = { MN_CUT_WINDOWS, 2, 3, 0, false };
    assert_fails(mn_loader_create(&loader, corpus, &o), MN_ERR_ARGUMENT, "3 tokens", "need 4");
    o.cutting = MN_CUT_DOCUMENTS;
    assert_fails(mn_loader_create(&loader, corpus, &o), MN_ERR_ARGUMENT, "3 documents",
                 "two tokens");
    static const int64_t sizes[][2] = { { 0, 4 }, { 4, 0 }, { -1, 4 }, { 4, -1 } };
    for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
        o.rows = sizes[i][0];
        o.length = sizes[i][1];
        assert_fails(mn_loader_create(&loader, corpus, &o), MN_ERR_ARGUMENT, "batch", "1 or more");
    }
    o.rows = o.length = INT64_MAX / 2;
    assert_fails(mn_loader_create(&loader, corpus, &o), MN_ERR_MEMORY, "too large", "");
    assert_null(loader);
    o = (mn_loader_options){ MN_CUT_WINDOWS, 1, 2, 0, false };
    loader = make(corpus, o);
    mn_token_batch batch = filled(loader, 0);
    assert_fails(mn_loader_fill(&batch, loader, -1), MN_ERR_ARGUMENT, "step -1", "negative");
    mn_token_batch_free(&batch);
    mn_loader_destroy(loader);
    mn_corpus_destroy(corpus);
    mn_loader_destroy(NULL);
}

static void shrinking_file_is_a_sentence(void **state) {
    (void)state;
    static uint8_t file[400];
    const char *path = in_folder("shrinks.bin");
    for (int i = 0; i < 200; i++) file[2 * i] = (uint8_t)(i + 1);
    write_file(path, file, sizeof file);
    const mn_corpus_options options = { .paths = &path, .n_paths = 1, .document_end = 50 };
    mn_corpus *corpus;
    assert_int_equal(mn_corpus_open(&corpus, &options, NULL), MN_OK);
    for (int kind = 0; kind < 2; kind++) {
        write_file(path, file, sizeof file);
        mn_loader *loader = make(corpus, (mn_loader_options){ kind ? MN_CUT_DOCUMENTS
                                                                   : MN_CUT_WINDOWS,
                                                              .rows = 2, .length = 70 });
        mn_token_batch batch = filled(loader, 0);
        assert_int_equal(truncate(path, 20), 0);
        assert_fails(mn_loader_fill(&batch, loader, 0), MN_ERR_IO, "shrinks.bin", "shrank");
        mn_token_batch_free(&batch);
        mn_loader_destroy(loader);
    }
    mn_corpus_destroy(corpus);
}

/* ---- shuffle --------------------------------------------------------------------------------- */

static void shuffle_is_a_permutation(void **state) {
    (void)state;
    static const int64_t sizes[] = { 1, 2, 3, 4, 5, 10, 16, 17, 99, 1000, 4097, 65536, 1234567 };
    for (size_t i = 0; i < MN_COUNTOF(sizes); i++) {
        const int64_t n = sizes[i];
        const mn_shuffle shuffle = mn_shuffle_make(n, 3, i);
        uint8_t *seen = calloc((size_t)n, 1);
        int64_t fixed = 0, rises = 0, before = -1;
        for (int64_t place = 0; place < n; place++) {
            const int64_t at = mn_shuffle_at(&shuffle, place);
            assert_true(at >= 0 && at < n && !seen[at]);
            seen[at] = 1;
            fixed += at == place;
            rises += at > before;
            before = at;
        }
        /* One fixed point is expected at any n (variance 1), and half of the neighbours rise
         * (variance n / 12). */
        if (n >= 1000) assert_true(fixed < 10);
        if (n >= 1000) assert_in_range(rises, n / 2 - n / 10, n / 2 + n / 10);
        free(seen);
    }
}

static void shuffles_of_rounds_and_seeds_differ(void **state) {
    (void)state;
    const int64_t n = 1000;
    const mn_shuffle a = mn_shuffle_make(n, 3, 0), b = mn_shuffle_make(n, 3, 1);
    const mn_shuffle c = mn_shuffle_make(n, 4, 0);
    int same_round = 0, same_seed = 0;
    for (int64_t i = 0; i < n; i++) {
        same_round += mn_shuffle_at(&a, i) == mn_shuffle_at(&b, i);
        same_seed += mn_shuffle_at(&a, i) == mn_shuffle_at(&c, i);
    }
    assert_true(same_round < 10 && same_seed < 10);    // 1 expected
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(epoch_of_documents_covers_every_place_once),
        cmocka_unit_test(sequential_windows_cover_every_place_once),
        cmocka_unit_test(batches_are_functions_of_seed_and_step),
        cmocka_unit_test(random_windows_begin_anywhere),
        cmocka_unit_test(windows_use_all_of_the_smallest_corpus),
        cmocka_unit_test(packing_is_as_written_down),
        cmocka_unit_test(documents_change_order_with_the_epoch),
        cmocka_unit_test(mistakes_are_named),
        cmocka_unit_test(shrinking_file_is_a_sentence),
        cmocka_unit_test(shuffle_is_a_permutation),
        cmocka_unit_test(shuffles_of_rounds_and_seeds_differ),
    };
    return cmocka_run_group_tests_name("loader", tests, make_folder, remove_folder);
}
