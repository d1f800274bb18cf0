/* test_stories.c - the stories against a second reading of their text: answers, information of
 * every token, the entropy by enumeration of all stories of a small source, and frequencies. */
// labels: sanitize
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "support/check.h"
#include "support/folder.h"
#include "tasks/stories.h"

static int32_t id(const char *word) {
    const int32_t found = mn_stories_find(word, strlen(word));
    if (found < 0) check_fatal("there is no word \"%s\"", word);
    return found;
}

static bool is_in(int32_t token, mn_stories_class class, int64_t n) {
    const int32_t first = mn_stories_first(class);
    return token >= first && token < first + n;
}

static mn_stories stories_of(const mn_stories_config *config, uint64_t seed, int64_t first,
                             int64_t count) {
    mn_stories out;
    if (mn_stories_tokens(&out, config, seed, first, count) != MN_OK) {
        check_fatal("%s", mn_last_error());
    }
    return out;
}

/* Sources at the edges, and the default. */
static int sources(mn_stories_config out[8]) {
    int n = 0;
    for (int i = 0; i < 7; i++) out[i] = mn_stories_default();
    n++;
    out[n++].p_end = 0.0;
    out[1].n_sentences = 7;
    out[n].n_cast = out[n].n_objects = 1;
    out[n++].n_places = 2;
    out[n].filler = 0.0;
    out[n++].p_new = 1.0;
    out[n].question = 0.0;
    out[n++].n_names = 2;
    out[n].update = out[n].filler = 0.0;
    out[n++].n_sentences = 9;
    out[n++].p_new = 0.0;
    return n;
}

/* ---- the second reader ------------------------------------------------------------------------
 * Knows the language and the config, nothing of the generator: goes through a story word by word
 * and says how likely each word was after the words before it. */

enum { MAX_OBJECTS = 64 };

typedef struct reader {
    const mn_stories_config *c;
    int64_t n_sentences, n_known;
    int64_t place_of[MAX_OBJECTS];      // -1: not in the story
    int64_t said[MAX_OBJECTS], times[MAX_OBJECTS];
} reader;

static reader new_reader(const mn_stories_config *c) {
    reader r = { .c = c };
    for (int i = 0; i < MAX_OBJECTS; i++) r.place_of[i] = -1;
    return r;
}

/* P(word w | the words of the sentence so far, and the story before it); 0 for impossible words. */
static double chance_of(const reader *r, const int32_t *sentence, int64_t n, int32_t w) {
    const mn_stories_config *c = r->c;
    const double sum = c->update + c->filler + c->question;
    const double ask = r->n_known > 0 ? c->question / sum : 0.0;
    const int64_t n_verbs = mn_stories_count(MN_STORIES_ALONE) +
                            mn_stories_count(MN_STORIES_PASSING) +
                            mn_stories_count(MN_STORIES_TOGETHER);
    const bool is_name = is_in(w, MN_STORIES_NAME, c->n_names);
    const bool is_place = is_in(w, MN_STORIES_PLACE, c->n_places);
    const bool is_object = is_in(w, MN_STORIES_OBJECT, c->n_objects);
    const int64_t object = is_object ? w - mn_stories_first(MN_STORIES_OBJECT) : 0;
    if (n == 0) {
        double end = r->n_sentences > 0 ? c->p_end : 0.0;
        if (r->n_sentences == c->n_sentences) end = 1.0;
        if (w == id("\n")) return end;
        if (w == id("where")) return (1.0 - end) * ask;
        return is_name ? (1.0 - end) * (1.0 - ask) / (double)c->n_names : 0.0;
    }
    if (sentence[0] == id("where")) {
        static const char *const frame[] = { "where", "is", "the", NULL, "?", NULL, "." };
        if (frame[n]) return w == id(frame[n]);
        if (n == 3) return is_object && r->place_of[object] >= 0 ? 1.0 / (double)r->n_known : 0.0;
        const int32_t asked = sentence[3] - mn_stories_first(MN_STORIES_OBJECT);
        return w == mn_stories_first(MN_STORIES_PLACE) + r->place_of[asked];
    }
    if (n == 1) {
        double update = c->update + c->filler > 0.0 ? c->update / (c->update + c->filler) : 0.0;
        double fresh = r->n_known < c->n_cast ? c->p_new : 0.0;
        if (r->n_known == 0) update = fresh = 1.0;
        if (w == id("puts")) return update * fresh;
        if (w == id("takes")) return update * (1.0 - fresh);
        const bool verb = is_in(w, MN_STORIES_ALONE, mn_stories_count(MN_STORIES_ALONE)) ||
                          is_in(w, MN_STORIES_PASSING, mn_stories_count(MN_STORIES_PASSING)) ||
                          is_in(w, MN_STORIES_TOGETHER, mn_stories_count(MN_STORIES_TOGETHER));
        return verb ? (1.0 - update) / (double)n_verbs : 0.0;
    }
    const bool puts = sentence[1] == id("puts"), takes = sentence[1] == id("takes");
    if (puts || takes) {
        const char *const into = puts ? "in" : "to";
        const char *const frame[] = { NULL, NULL, "the", NULL, into, "the", NULL, "." };
        if (frame[n]) return w == id(frame[n]);
        if (n == 3 && puts) {
            const bool free = is_object && r->place_of[object] < 0;
            return free ? 1.0 / (double)(c->n_objects - r->n_known) : 0.0;
        }
        if (n == 3) return is_object && r->place_of[object] >= 0 ? 1.0 / (double)r->n_known : 0.0;
        if (puts) return is_place ? 1.0 / (double)c->n_places : 0.0;
        const int64_t now = r->place_of[sentence[3] - mn_stories_first(MN_STORIES_OBJECT)];
        if (w == mn_stories_first(MN_STORIES_PLACE) + now) return 0.0;
        return is_place ? 1.0 / (double)(c->n_places - 1) : 0.0;
    }
    if (sentence[1] < mn_stories_first(MN_STORIES_PASSING)) return w == id(".");
    if (sentence[1] < mn_stories_first(MN_STORIES_TOGETHER)) {
        static const char *const frame[] = { NULL, NULL, "past", "the", NULL, "." };
        if (frame[n]) return w == id(frame[n]);
        return is_place ? 1.0 / (double)c->n_places : 0.0;
    }
    if (n == 2) return is_name && w != sentence[0] ? 1.0 / (double)(c->n_names - 1) : 0.0;
    return w == id(".");
}

/* Takes note of a whole sentence whose first word is token `at` of the story. */
static void learn(reader *r, const int32_t *sentence, int64_t at) {
    r->n_sentences++;
    if (sentence[1] != id("puts") && sentence[1] != id("takes")) return;
    const int64_t object = sentence[3] - mn_stories_first(MN_STORIES_OBJECT);
    r->n_known += r->place_of[object] < 0;
    r->place_of[object] = sentence[6] - mn_stories_first(MN_STORIES_PLACE);
    r->said[object] = at + 6;
    r->times[object]++;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void words_are_few_and_plain(void **state) {
    (void)state;
    assert_in_range(mn_stories_words(), 50, 128);
    int64_t in_classes = 0;
    for (int c = 0; c < MN_STORIES_CLASSES; c++) {
        in_classes += mn_stories_count((mn_stories_class)c);
    }
    assert_int_equal(in_classes, mn_stories_words());
    for (int32_t i = 0; i < mn_stories_words(); i++) {
        const char *word = mn_stories_word(i);
        CHECK(mn_stories_find(word, strlen(word)) == i, "\"%s\" is there twice", word);
        CHECK(strspn(word, "abcdefghijklmnopqrstuvwxyz.?\n") == strlen(word), "word \"%s\"", word);
    }
    assert_null(mn_stories_word(-1));
    assert_null(mn_stories_word((int32_t)mn_stories_words()));
    assert_int_equal(mn_stories_find("lam", 3), -1);
    assert_int_equal(mn_stories_find("lampx", 4), id("lamp"));
    check_done();
}

static void a_story_is_a_function_of_seed_and_index(void **state) {
    (void)state;
    const mn_stories_config c = mn_stories_default();
    mn_stories all = stories_of(&c, 5, 100, 40), again = stories_of(&c, 5, 100, 40);
    assert_int_equal(all.n_tokens, again.n_tokens);
    assert_memory_equal(all.tokens, again.tokens, (size_t)all.n_tokens * sizeof *all.tokens);
    assert_memory_equal(all.bits, again.bits, (size_t)all.n_tokens * sizeof *all.bits);
    mn_stories_free(&again);
    for (int64_t i = 0; i < all.n_stories; i++) {                  // alone as in company
        const int64_t at = all.borders[i], n = all.borders[i + 1] - at;
        mn_stories one = stories_of(&c, 5, 100 + i, 1), other = stories_of(&c, 6, 100 + i, 1);
        assert_int_equal(one.n_tokens, n);
        assert_memory_equal(one.tokens, all.tokens + at, (size_t)n * sizeof *one.tokens);
        assert_memory_equal(one.bits, all.bits + at, (size_t)n * sizeof *one.bits);
        const size_t bytes = (size_t)mn_min(n, other.n_tokens) * sizeof *one.tokens;
        CHECK(i == 0 || memcmp(all.tokens, one.tokens, bytes) != 0, "story %d twice", (int)i);
        CHECK(memcmp(other.tokens, one.tokens, bytes) != 0, "the seed is not heard at %d", (int)i);
        mn_stories_free(&one);
        mn_stories_free(&other);
    }
    mn_stories_free(&all);
    mn_stories none = stories_of(&c, 5, 0, 0);
    assert_int_equal(none.n_tokens, 0);
    assert_int_equal(none.borders[0], 0);
    mn_stories_free(&none);
    check_done();
}

/* Reads story i again: what each word tells, what each answer has to be. Returns the questions. */
static int64_t read_again(const mn_stories *s, int64_t i, int64_t question,
                          const mn_stories_config *c) {
    const int64_t at = s->borders[i], n = s->borders[i + 1] - at;
    const int32_t *token = s->tokens + at;
    reader r = new_reader(c);
    int64_t start = 0;
    for (int64_t t = 0; t < n; t++) {
        const double p = chance_of(&r, token + start, t - start, token[t]);
        CHECK(p > 0.0, "story %d: impossible word %s at %d", (int)i, mn_stories_word(token[t]),
              (int)t);
        /* Sums of a handful of logarithms and logarithms of products, all below 16. */
        CHECK(fabs(s->bits[at + t] + log2(p)) <= 16.0 * 16.0 * DBL_EPSILON,
              "story %d, %s: %.17g bits, not %.17g", (int)i, mn_stories_word(token[t]),
              s->bits[at + t], -log2(p));
        if (t > 0 && token[t - 1] == id("?")) {
            const mn_stories_question *q = &s->questions[question++];
            const int64_t object = token[t - 2] - mn_stories_first(MN_STORIES_OBJECT);
            CHECK(q->at == at + t && q->object == token[t - 2] && q->answer == token[t] &&
                  q->distance == t - r.said[object] && q->n_updates == r.times[object],
                  "story %d: question at %d misreported", (int)i, (int)t);
        }
        if (token[t] == id(".")) {
            learn(&r, token + start, start);
            start = t + 1;
        }
    }
    CHECK(token[n - 1] == id("\n") && start == n - 1, "story %d does not end", (int)i);
    return question;
}

static void a_second_reader_agrees_on_every_word(void **state) {
    (void)state;
    mn_stories_config all[8];
    const int n = sources(all);
    for (int k = 0; k < n; k++) {
        mn_stories s = stories_of(&all[k], 11, 0, 60);
        int64_t question = 0;
        for (int64_t i = 0; i < s.n_stories; i++) question = read_again(&s, i, question, &all[k]);
        CHECK(question == s.n_questions, "source %d: %d of %d questions", k, (int)question,
              (int)s.n_questions);
        mn_stories_free(&s);
    }
    check_done();
}

static void text_gives_its_tokens_back(void **state) {
    (void)state;
    const mn_stories_config c = mn_stories_default();
    mn_stories s = stories_of(&c, 3, 0, 50);
    char *text;
    size_t size;
    int32_t *tokens;
    int64_t count;
    assert_int_equal(mn_stories_text(&text, &size, s.tokens, s.n_tokens), MN_OK);
    assert_int_equal(strlen(text), size);
    assert_null(strstr(text, "  "));
    assert_null(strstr(text, " ."));
    assert_null(strstr(text, "\n "));
    assert_int_equal(strspn(text, "abcdefghijklmnopqrstuvwxyz .?\n"), size);
    assert_int_equal(mn_stories_encode(&tokens, &count, text, size), MN_OK);
    assert_int_equal(count, s.n_tokens);
    assert_memory_equal(tokens, s.tokens, (size_t)count * sizeof *tokens);
    free(tokens);
    free(text);
    mn_stories_free(&s);

    const char foreign[] = "anna puts the lamq in the barn.";
    assert_fails(mn_stories_encode(&tokens, &count, foreign, strlen(foreign)), MN_ERR_FORMAT,
                 "lamq", "byte 14");
    assert_null(tokens);
    const int32_t wrong[] = { 0, 4000 };
    assert_fails(mn_stories_text(&text, &size, wrong, 2), MN_ERR_ARGUMENT, "token 1", "4000");
    assert_null(text);
    assert_int_equal(mn_stories_encode(&tokens, &count, "", 0), MN_OK);
    assert_int_equal(count, 0);
    free(tokens);
}

/* Text through the tokenizer of `name`d origin gives the stories' tokens, and these the text. */
static void check_tokenizer(const mn_tokenizer *t, const char *name) {
    mn_stories_config c[8];
    const int n = sources(c);
    for (int i = 0; i < n; i++) {
        mn_stories s = stories_of(&c[i], 5, 0, 40);
        mn_token_list got = { 0 };
        char *text, *back;
        size_t size, back_size;
        assert_int_equal(mn_stories_text(&text, &size, s.tokens, s.n_tokens), MN_OK);
        assert_int_equal(mn_tokenizer_encode(t, text, size, true, &got), MN_OK);
        CHECK(got.count == s.n_tokens, "%s, source %d: %lld tokens, expected %lld", name, i,
              (long long)got.count, (long long)s.n_tokens);
        for (int64_t k = 0; k < got.count && k < s.n_tokens; k++) {
            CHECK(got.ids[k] == s.tokens[k], "%s, source %d, token %lld: %d, expected %d", name, i,
                  (long long)k, (int)got.ids[k], (int)s.tokens[k]);
        }
        assert_int_equal(mn_tokenizer_decode(t, s.tokens, s.n_tokens, false, &back, &back_size),
                         MN_OK);
        CHECK(back_size == size && memcmp(back, text, size) == 0, "%s, source %d: another text",
              name, i);
        free(back);
        free(text);
        mn_token_list_free(&got);
        mn_stories_free(&s);
    }
}

static void the_tokenizer_gives_their_tokens(void **state) {
    (void)state;
    mn_tokenizer *t, *loaded;
    assert_int_equal(mn_stories_tokenizer(&t), MN_OK);
    check_tokenizer(t, "made");
    assert_int_equal(mn_tokenizer_size(t), mn_stories_words() + 1);
    assert_int_equal(mn_tokenizer_save(t, in_folder("tokenizer.json")), MN_OK);
    assert_int_equal(mn_tokenizer_load(&loaded, in_folder("tokenizer.json")), MN_OK);
    check_tokenizer(loaded, "saved and loaded");
    assert_int_equal(mn_tokenizer_fingerprint(loaded), mn_tokenizer_fingerprint(t));

    /* words it does not know are one unknown token each, whatever they are made of */
    const char text[] = "where is  the dragon?\nThe h4t.";
    const int32_t unknown = (int32_t)mn_stories_words();
    const int32_t wanted[] = { id("where"), id("is"), id("the"), unknown, id("?"), id("\n"),
                               unknown, unknown, id(".") };
    mn_token_list got = { 0 };
    assert_int_equal(mn_tokenizer_encode(t, text, strlen(text), true, &got), MN_OK);
    assert_int_equal(got.count, MN_COUNTOF(wanted));
    assert_memory_equal(got.ids, wanted, sizeof wanted);

    /* token by token only the start of a later line differs: by a blank */
    mn_stream_decoder decoder = { 0 };
    char stream[256];
    size_t size = 0;
    const char two[] = "anna sings.\nben waits.\n";
    got.count = 0;
    assert_int_equal(mn_tokenizer_encode(t, two, strlen(two), true, &got), MN_OK);
    for (int64_t i = 0; i < got.count; i++) {
        assert_int_equal(mn_tokenizer_stream(t, &decoder, got.ids[i], stream, sizeof stream, &size),
                         MN_OK);
    }
    stream[size] = '\0';
    assert_string_equal(stream, "anna sings.\n ben waits.\n");
    mn_token_list_free(&got);
    mn_tokenizer_destroy(loaded);
    mn_tokenizer_destroy(t);
    check_done();
}

/* All stories of a source, by trying every word at every place: total probability, -p log2 p, and
 * the means weighted with it. */
typedef struct census {
    mn_stories_config config;
    double mass;
    mn_stories_means means;
    int64_t n_stories;
} census;

static void enumerate(census *out, const reader *r, int32_t *story, int64_t start, int64_t n,
                      double p, int64_t n_questions) {
    for (int32_t w = 0; w < mn_stories_words(); w++) {
        const double q = p * chance_of(r, story + start, n - start, w);
        if (q <= 0.0) continue;
        story[n] = w;
        reader next = *r;
        int64_t from = start;
        if (w == id(".")) {
            learn(&next, story + start, start);
            from = n + 1;
        }
        if (w != id("\n")) {
            enumerate(out, &next, story, from, n + 1, q, n_questions + (w == id("?")));
            continue;
        }
        out->n_stories++;
        out->mass += q;
        out->means.bits -= q * log2(q);
        out->means.tokens += q * (double)(n + 1);
        out->means.sentences += q * (double)r->n_sentences;
        out->means.questions += q * (double)n_questions;
    }
}

static void entropy_is_that_of_all_stories(void **state) {
    (void)state;
    mn_stories_config c = mn_stories_default();
    c.n_names = c.n_objects = c.n_places = c.n_cast = 2;
    c.n_sentences = 3;
    mn_stories_config small[] = { c, c, c, c, c };
    small[1].p_end = 0.0;
    small[1].n_sentences = 2;
    small[2].n_objects = 3;
    small[2].p_end = 0.3;
    small[2].n_sentences = 2;
    small[3].filler = 0.0;
    small[3].n_sentences = 4;
    small[3].n_cast = 1;
    small[4].update = small[4].filler = 0.0;
    small[4].n_sentences = 6;
    for (size_t k = 0; k < MN_COUNTOF(small); k++) {
        census all = { .config = small[k] };
        mn_stories_means means;
        int32_t story[64];
        const reader r = new_reader(&all.config);
        enumerate(&all, &r, story, 0, 0, 1.0, 0);
        assert_int_equal(mn_stories_expect(&means, &small[k]), MN_OK);
        /* Sums of n_stories terms of one sign, each right to a few roundings. */
        const double most = 1e-12;
        CHECK(all.n_stories > 20, "only %d stories", (int)all.n_stories);
        CHECK(fabs(all.mass - 1.0) < most, "source %d: total %.17g", (int)k, all.mass);
#define SAME(field)                                                                                \
    CHECK(fabs(all.means.field - means.field) <= most * fabs(means.field),                         \
          "source %d, " #field ": %.17g, not %.17g", (int)k, means.field, all.means.field)
        SAME(bits);
        SAME(tokens);
        SAME(sentences);
        SAME(questions);
#undef SAME
    }
    check_done();
}

/* The mean over many stories lies within five standard errors of the closed form. */
static void samples_have_the_means(void **state) {
    (void)state;
    mn_stories_config all[8];
    const int n_sources = sources(all);
    for (int k = 0; k < n_sources; k++) {
        enum { N = 4000 };
        mn_stories s = stories_of(&all[k], 77, 0, N);
        mn_stories_means means;
        assert_int_equal(mn_stories_expect(&means, &all[k]), MN_OK);
        double sum = 0.0, squares = 0.0;
        for (int64_t i = 0; i < N; i++) {
            double bits = 0.0;
            for (int64_t t = s.borders[i]; t < s.borders[i + 1]; t++) bits += s.bits[t];
            sum += bits;
            squares += bits * bits;
        }
        const double mean = sum / N, error = sqrt(fmax(0.0, squares / N - mean * mean) / N);
        CHECK(fabs(mean - means.bits) <= 5.0 * error + 1e-9 * mean,
              "source %d: %g bits a story, not %g (seed 77)", k, mean, means.bits);
        if (k == 0) {
            const double tokens = (double)s.n_tokens / N;
            CHECK(fabs(tokens / means.tokens - 1.0) < 0.08, "%g tokens, not %g", tokens,
                  means.tokens);
            CHECK(fabs((double)s.n_questions / N / means.questions - 1.0) < 0.08, "questions");
        }
        mn_stories_free(&s);
    }
    check_done();
}

/* ---- frequencies ----------------------------------------------------------------------------- */

/* Counts of one choice against its probabilities. */
typedef struct tally {
    const char *what;
    int64_t n, count[64];
    double p[64];
} tally;

/* sum (count - expected)^2 / expected against its mean n-1 and standard deviation sqrt(2(n-1)): six
 * of these lie beyond the 1e-6 quantile for every n here, and the seed is fixed. */
static void check_tally(const tally *t) {
    double total = 0.0, chi = 0.0;
    for (int64_t i = 0; i < t->n; i++) total += (double)t->count[i];
    for (int64_t i = 0; i < t->n; i++) {
        const double want = total * t->p[i];
        CHECK(want > 20.0, "%s: too few draws", t->what);
        chi += ((double)t->count[i] - want) * ((double)t->count[i] - want) / want;
    }
    const double freedom = (double)t->n - 1.0;
    CHECK(chi <= freedom + 6.0 * sqrt(2.0 * freedom), "%s: chi-square %g with %g degrees", t->what,
          chi, freedom);
}

static tally even(const char *what, int64_t n) {
    tally t = { .what = what, .n = n };
    for (int64_t i = 0; i < n; i++) t.p[i] = 1.0 / (double)n;
    return t;
}

static void words_come_as_often_as_stated(void **state) {
    (void)state;
    const mn_stories_config c = mn_stories_default();
    const int32_t names = mn_stories_first(MN_STORIES_NAME);
    const int32_t objects = mn_stories_first(MN_STORIES_OBJECT);
    const int32_t places = mn_stories_first(MN_STORIES_PLACE);
    const int32_t verbs = mn_stories_first(MN_STORIES_ALONE);
    const int64_t n_verbs = mn_stories_words() - verbs;
    tally name = even("names", c.n_names), first = even("first objects", c.n_objects);
    tally place = even("places to put", c.n_places), verb = even("verbs", n_verbs);
    tally move = even("moves", c.n_places - 1);
    const double goes_on = 1.0 - c.p_end, update = c.update / (c.update + c.filler);
    tally opening = { "question or name or end", 3, { 0 },
                      { goes_on * c.question, goes_on * (1.0 - c.question), c.p_end } };
    tally kind = { "filler, new, move (cast incomplete)", 3, { 0 },
                   { 1.0 - update, update * c.p_new, update * (1.0 - c.p_new) } };
    mn_stories s = stories_of(&c, 2024, 0, 3000);
    for (int64_t i = 0; i < s.n_stories; i++) {
        reader r = new_reader(&c);
        for (int64_t t = s.borders[i]; t + 1 < s.borders[i + 1];) {
            const int32_t *w = s.tokens + t;
            const bool asks = w[0] == id("where"), puts = w[1] == id("puts");
            const bool takes = w[1] == id("takes");
            if (!asks) name.count[w[0] - names]++;
            if (r.n_known == 0) first.count[w[3] - objects]++;
            if (puts) place.count[w[6] - places]++;
            if (takes) {
                const int64_t now = r.place_of[w[3] - objects], to = w[6] - places;
                move.count[to - (to > now)]++;
            }
            if (w[1] >= verbs) verb.count[w[1] - verbs]++;
            if (r.n_known > 0 && r.n_known < c.n_cast && !asks) {
                kind.count[puts ? 1 : takes ? 2 : 0]++;
            }
            learn(&r, w, t);
            while (s.tokens[t] != id(".")) t++;
            t++;
            if (r.n_sentences < c.n_sentences) {
                opening.count[s.tokens[t] == id("\n") ? 2 : s.tokens[t] == id("where") ? 0 : 1]++;
            }
        }
    }
    mn_stories_free(&s);
    const tally *const all[] = { &name, &first, &place, &verb, &move, &opening, &kind };
    for (size_t i = 0; i < MN_COUNTOF(all); i++) check_tally(all[i]);
    check_done();
}

static void impossible_sources_are_refused(void **state) {
    (void)state;
    mn_stories s;
#define REFUSED(field, value)                                                                      \
    do {                                                                                           \
        mn_stories_config c = mn_stories_default();                                                \
        c.field = value;                                                                           \
        assert_fails(mn_stories_tokens(&s, &c, 1, 0, 1), MN_ERR_ARGUMENT, #field, "possible");     \
        assert_null(s.tokens);                                                                     \
        mn_stories_means means;                                                                    \
        assert_fails(mn_stories_expect(&means, &c), MN_ERR_ARGUMENT, #field, "possible");          \
    } while (0)
    REFUSED(n_names, 1);
    REFUSED(n_names, 1000);
    REFUSED(n_objects, 0);
    REFUSED(n_objects, INT64_MAX);
    REFUSED(n_places, 1);
    REFUSED(n_cast, 0);
    REFUSED(n_cast, 25);
    REFUSED(n_sentences, 0);
    REFUSED(n_sentences, INT64_MAX);
    REFUSED(p_end, -0.1);
    REFUSED(p_end, NAN);
    REFUSED(p_new, 1.5);
    REFUSED(update, -1.0);
    REFUSED(question, INFINITY);
#undef REFUSED
    mn_stories_config c = mn_stories_default();
    assert_fails(mn_stories_tokens(&s, &c, 1, -1, 1), MN_ERR_ARGUMENT, "first", "possible");
    assert_fails(mn_stories_tokens(&s, &c, 1, 0, INT64_MAX), MN_ERR_ARGUMENT, "count", "possible");
    c.update = c.filler = c.question = 0.0;
    assert_fails(mn_stories_check(&c), MN_ERR_ARGUMENT, "question", "weight");
    mn_stories_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(words_are_few_and_plain),
        cmocka_unit_test(a_story_is_a_function_of_seed_and_index),
        cmocka_unit_test(a_second_reader_agrees_on_every_word),
        cmocka_unit_test(text_gives_its_tokens_back),
        cmocka_unit_test(the_tokenizer_gives_their_tokens),
        cmocka_unit_test(entropy_is_that_of_all_stories),
        cmocka_unit_test(samples_have_the_means),
        cmocka_unit_test(words_come_as_often_as_stated),
        cmocka_unit_test(impossible_sources_are_refused),
    };
    return cmocka_run_group_tests_name("stories", tests, make_folder, remove_folder);
}
