/* test_tasks_niah.c - needles: the prompts read again as text, their frequencies, sentences of the
 * haystack, sizes under both rules, tokens and targets, and the score. */
// labels: sanitize
#include "support/task_case.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "tokenizer/tokenizer.h"
#include "support/folder.h"
#include "tasks/niah/haystack.h"

enum { SEED = 4711, MOST = 40, WORDS = 6000 };

static char essay[WORDS * 12];    // words "w0", "w1" ..., every ninth with a full stop

static int setup(void **state) {
    const int failed = make_folder(state);
    size_t used = 0;
    for (int i = 0; i < WORDS; i++) {
        used += (size_t)sprintf(essay + used, "%s%d%s", i % 9 == 0 ? "W" : "w", i,
                                i % 9 == 8 ? ".\n" : "  ");
    }
    if (failed == 0) write_file(in_folder("essay.txt"), essay, used);
    return failed;
}

static const char *with_essays(const char *more) {
    static char changes[512];
    snprintf(changes, sizeof changes, "essays=%s %s", in_folder("essay.txt"), more);
    return changes;
}

/* ---- reading a prompt ------------------------------------------------------------------------ */

typedef struct needle {
    char key[96], value[96];
    size_t at, end;           // in the context
    size_t value_at;          // in the prompt
} needle;

typedef struct prompt {
    char context[65536];
    char query[512];
    needle needles[MOST];
    int n;
} prompt;

/* Takes `text` off the front of *at. */
static void take(const char **at, const char *text) {
    if (strncmp(*at, text, strlen(text)) != 0) {
        check_fatal("\"%.60s\" instead of \"%s\"", *at, text);
    }
    *at += strlen(text);
}

/* Copies up to `end` and moves behind it. */
static void take_until(char *out, size_t room, const char **at, const char *end) {
    const char *found = strstr(*at, end);
    if (!found || (size_t)(found - *at) >= room) check_fatal("no \"%s\" in \"%.60s\"", end, *at);
    memcpy(out, *at, (size_t)(found - *at));
    out[found - *at] = '\0';
    *at = found + strlen(end);
}

static void take_needles(prompt *p, const char *kinds, size_t context_at) {
    char head[64];
    snprintf(head, sizeof head, "One of the special magic %s for ", kinds);
    p->n = 0;
    for (const char *at = p->context; (at = strstr(at, head)); p->n++) {
        needle *it = &p->needles[p->n];
        it->at = (size_t)(at - p->context);
        take(&at, head);
        take_until(it->key, sizeof it->key, &at, " is: ");
        it->value_at = context_at + (size_t)(at - p->context);
        take_until(it->value, sizeof it->value, &at, ".");
        it->end = (size_t)(at - p->context);
    }
}

/* The whole prompt by the published wording. */
static void read_prompt(prompt *p, const char *text, const char *kinds, bool one) {
    char kind[16], line[128], again[512];
    snprintf(kind, sizeof kind, "%.*s", (int)(strlen(kinds) - one), kinds);
    const char *at = text;
    snprintf(line, sizeof line, "%s special magic %s %s hidden within the following text. ",
             one ? "A" : "Some", kind, one ? "is" : "are");
    take(&at, line);
    snprintf(line, sizeof line, "Make sure to memorize it. I will quiz you about the %s "
                                "afterwards.\n", kind);
    take(&at, line);
    const size_t context_at = (size_t)(at - text);
    snprintf(line, sizeof line, "\nWhat %s the special magic %s for ", one ? "is" : "are all",
             kind);
    take_until(p->context, sizeof p->context, &at, line);
    take_until(p->query, sizeof p->query, &at, " mentioned in the provided text? The special ");
    snprintf(line, sizeof line, "magic %s for ", kind);
    take(&at, line);
    take_until(again, sizeof again, &at, " mentioned in the provided text ");
    take(&at, one ? "is" : "are");
    assert_string_equal(at, "");
    assert_string_equal(again, p->query);
    take_needles(p, kinds, context_at);
}

static void check_answers(const prompt *p, const mn_task_text *text, int values) {
    char query[512] = "";
    const int asked = text->n_answers / values;
    for (int i = 0; i < text->n_answers; i++) {
        const needle *it = NULL;
        for (int k = 0; k < p->n; k++) {
            if (p->needles[k].value_at == (size_t)text->answer_at[i]) it = &p->needles[k];
        }
        if (!it) check_fatal("answer %d is nowhere", i);
        assert_string_equal(it->value, text->answers[i]);
        if (i % values > 0) continue;
        if (i > 0) strcat(query, i / values == asked - 1 ? ", and " : ", ");
        strcat(query, it->key);
    }
    assert_string_equal(query, p->query);
}

static bool is_number(const char *value) {
    return strlen(value) == 7 && strspn(value, "0123456789") == 7 && value[0] != '0';
}

static bool is_uuid(const char *value) {
    for (int i = 0; i < 36; i++) {
        const bool dash = i == 8 || i == 13 || i == 18 || i == 23;
        if (dash ? value[i] != '-' : !strchr("0123456789abcdef", value[i]) || !value[i]) {
            return false;
        }
    }
    return strlen(value) == 36 && value[14] == '4' && strchr("89ab", value[19]);
}

static mn_task_text text_of(task_case *c, int64_t index) {
    mn_task_text text;
    if (mn_task_text_of(c->task, SEED, MN_SPLIT_TEST, index, &text) != MN_OK) {
        check_fatal("%s", mn_last_error());
    }
    return text;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void prompts_are_read_again(void **state) {
    (void)state;
    static const struct {
        const char *name, *kinds;
        int keys, values, asked;
        bool essay;
    } cases[] = {
        { "niah-single-1", "numbers", 1, 1, 1, false },
        { "niah-single-2", "numbers", 1, 1, 1, true },
        { "niah-single-3", "uuids", 1, 1, 1, true },
        { "niah-multikey-1", "numbers", 4, 1, 1, true },
        { "niah-multivalue", "numbers", 1, 4, 1, true },
        { "niah-multiquery", "numbers", 4, 1, 4, true },
        { "s-niah-1", "numbers", 1, 1, 1, false },
        { "s-niah-2", "numbers", 1, 1, 1, true },
        { "s-niah-3", "uuids", 1, 1, 1, true },
    };
    static prompt p;
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        task_case c = task_open(cases[k].name, with_essays(""));
        for (int64_t i = 0; i < 40; i++) {
            const mn_task_text text = text_of(&c, i);
            const int answers = cases[k].asked * cases[k].values;
            assert_int_equal(text.n_answers, answers);
            read_prompt(&p, text.prompt, cases[k].kinds, answers == 1);
            assert_int_equal(p.n, cases[k].keys * cases[k].values);
            check_answers(&p, &text, cases[k].values);
            for (int n = 0; n < p.n; n++) {
                const char *value = p.needles[n].value;
                CHECK(cases[k].kinds[0] == 'n' ? is_number(value) : is_uuid(value), "value %s",
                      value);
                CHECK(strchr(p.needles[n].key, '-') != NULL, "key %s", p.needles[n].key);
            }
            /* Bytes: the prompt and 128 tokens for the answer fit in the budget of 4096; of the
             * second form only what stands before the opening of the answer counts. */
            const char *opening = strstr(text.prompt, "text? The special") + 5;
            const size_t counts = cases[k].name[0] == 's' ? (size_t)(opening - text.prompt)
                                                          : strlen(text.prompt);
            CHECK(counts + 128 <= 4096, "%s: %d bytes", cases[k].name, (int)counts);
            CHECK(text.prompt_tokens == (int64_t)strlen(text.prompt) &&
                  text.answer_token[answers - 1] == text.answer_at[answers - 1], "tokens");
        }
        task_close(&c);
    }
    check_done();
}

/* Lines that are needles themselves: exactly one is asked for, and its value is the answer. */
static void needles_hide_among_others(void **state) {
    (void)state;
    static const char *const names[] = { "niah-multikey-2", "niah-multikey-3" };
    for (size_t k = 0; k < MN_COUNTOF(names); k++) {
        task_case c = task_open(names[k], "");
        int64_t last = 0, longest = 0;
        for (int64_t i = 0; i < 40; i++) {
            const mn_task_text text = text_of(&c, i);
            char key[128], line[256];
            const char *asked = strstr(text.prompt, "What is the special magic ");
            assert_non_null(asked);
            assert_int_equal(sscanf(asked, "What is the special magic %*s for %100s", key), 1);
            CHECK(k == 0 ? strchr(key, '-') != NULL : is_uuid(key), "key %s", key);
            snprintf(line, sizeof line, " for %s is: %s.\n", key, text.answers[0]);
            const char *at = strstr(text.prompt, line);
            assert_non_null(at);
            CHECK(strstr(at + 1, line) == NULL, "the needle stands twice");
            int64_t lines = 0;
            for (const char *p = text.prompt; (p = strstr(p, "One of the special")); p++) lines++;
            CHECK(lines > 20, "%d lines", (int)lines);
            /* what does not fit is cut by 25 lines */
            CHECK(text.prompt_tokens + 128 <= 4096, "%d bytes", (int)text.prompt_tokens);
            longest = mn_max(longest, text.prompt_tokens);
            last += text.answer_at[0];
        }
        CHECK(last / 40 > 800 && last / 40 < 3200, "needles stand at %d", (int)(last / 40));
        CHECK(longest > 3700, "at most %d bytes", (int)longest);
        task_close(&c);
    }
    check_done();
}

/* Lines of noise with the needle as a line of its own, uniform over the lines it stands before. */
static void noise_hides_needles_evenly(void **state) {
    (void)state;
    static const char line[] = "The grass is green. The sky is blue. The sun is yellow. Here we "
                               "go. There and back again.";
    static prompt p;
    task_case c = task_open("s-niah-1", "");
    tally before = tally_even("lines before the needle", 25), digit = tally_even("first digit", 9);
    tally rest = tally_even("last digit", 10);
    for (int64_t i = 0; i < 1500; i++) {
        const mn_task_text text = text_of(&c, i);
        read_prompt(&p, text.prompt, "numbers", true);
        const char *at = p.context;
        int64_t lines = 0, above = -1;
        for (bool more = true; more;) {
            if ((size_t)(at - p.context) == p.needles[0].at) {
                above = lines;
                at = p.context + p.needles[0].end;
            } else {
                take(&at, line);
                lines++;
            }
            more = *at == '\n';
            at += more;
        }
        CHECK(*at == '\0' && lines == 25 && above >= 0 && above < 25, "%d lines", (int)lines);
        before.count[above]++;
        digit.count[text.answers[0][0] - '1']++;
        rest.count[text.answers[0][6] - '0']++;
    }
    tally_check(&before);
    tally_check(&digit);
    tally_check(&rest);
    task_close(&c);
    check_done();
}

/* Forty depths: before sentence int(S depth / 100) of the first words of the essays, which stay as
 * they are but for their blanks. */
static void essays_hide_needles_at_forty_depths(void **state) {
    (void)state;
    static prompt p;
    task_case c = task_open("s-niah-2", with_essays("budget=6000"));
    int64_t sentence_of[40];
    tally depth = tally_even("depths", 40);
    int64_t n_words = 0;
    for (int64_t i = 0; i < 1600; i++) {
        const mn_task_text text = text_of(&c, i);
        read_prompt(&p, text.prompt, "numbers", true);
        memmove(p.context + p.needles[0].at, p.context + p.needles[0].end,
                strlen(p.context + p.needles[0].end) + 1);
        int64_t words = 0, before = 0, next = 0;
        for (char *at = p.context; *at;) {
            const size_t size = strcspn(at, " ");
            char want[16];
            snprintf(want, sizeof want, "%s%d%s", words % 9 ? "w" : "W", (int)words,
                     words % 9 == 8 ? "." : "");
            if (size == 0) {
                at++;
                continue;
            }
            CHECK(strlen(want) == size && memcmp(at, want, size) == 0, "word %d is %.*s",
                  (int)words, (int)size, at);
            if ((size_t)(at - p.context) < p.needles[0].at) before = words + 1;
            words++;
            at += size;
        }
        CHECK(words % 500 == 0 && words > 0, "%d words are no step", (int)words);
        if (i == 0) n_words = words;
        CHECK(words == n_words, "%d words, then %d", (int)n_words, (int)words);
        const int64_t sentences = (n_words + 8) / 9;
        for (int d = 0; d < 40; d++) {
            const double percent = floor(d * 100.0 / 39.0 + 0.5);
            sentence_of[d] = (int64_t)((double)sentences * (percent / 100.0));
        }
        while (next < 40 && mn_min(9 * sentence_of[next], n_words) != before) next++;
        CHECK(next < 40, "a needle behind %d words", (int)before);
        if (next < 40) depth.count[next]++;
    }
    tally_check(&depth);
    task_close(&c);
    check_done();
}

/* Four needles stand in the order 2, 1, 3, 0 of their making, here that of their values' keys. */
static void four_needles_have_one_order(void **state) {
    (void)state;
    static prompt p;
    task_case c = task_open("niah-multivalue", with_essays(""));
    tally first = tally_even("key asked first", 4);
    for (int64_t i = 0; i < 100; i++) {
        static const int order[] = { 2, 1, 3, 0 };
        const mn_task_text text = text_of(&c, i);
        read_prompt(&p, text.prompt, "numbers", false);
        for (int k = 0; k < 4; k++) assert_string_equal(p.needles[k].value, text.answers[order[k]]);
        for (int k = 1; k < 4; k++) CHECK(p.needles[k].at > p.needles[k - 1].end, "no order");
    }
    task_close(&c);
    c = task_open("niah-multiquery", with_essays(""));
    for (int64_t i = 0; i < 400; i++) {
        const mn_task_text text = text_of(&c, i);
        read_prompt(&p, text.prompt, "numbers", false);
        for (int k = 0; k < 4; k++) {
            first.count[k] += strcmp(p.needles[k].value, text.answers[0]) == 0;
        }
    }
    tally_check(&first);
    task_close(&c);
    check_done();
}

/* Bisection fills the budget; steps do so but for one of them. */
static void haystacks_fill_the_budget(void **state) {
    (void)state;
    static const int budgets[] = { 3000, 4096, 20000, 60000 };
    for (size_t k = 0; k < MN_COUNTOF(budgets); k++) {
        char more[64];
        snprintf(more, sizeof more, "budget=%d", budgets[k]);
        task_case noise = task_open("niah-single-1", more);
        task_case steps = task_open("s-niah-1", more);
        for (int64_t i = 0; i < 20; i++) {
            const int64_t line = 91, step = line * (budgets[k] < 4096 ? 5 : 25);
            const int64_t fits = budgets[k] - 128;
            /* the answer of 7 digits is measured along, and needles differ by some 40 letters */
            const int64_t n = text_of(&noise, i).prompt_tokens;
            CHECK(n <= fits && n > fits - step - 2 * line, "%d of %d bytes", (int)n, (int)fits);
            const int64_t m = text_of(&steps, i).prompt_tokens;
            CHECK(m <= fits + 200 && m > fits - 2 * step - 200, "%d of %d bytes in steps", (int)m,
                  (int)fits);
        }
        task_close(&noise);
        task_close(&steps);
    }
    /* Longer than the essays: one form begins anew, the other stops. */
    task_case again = task_open("niah-single-2", with_essays("budget=80000"));
    task_case stops = task_open("s-niah-2", with_essays("budget=80000"));
    const int64_t all = (int64_t)strlen(essay);
    CHECK(text_of(&again, 0).prompt_tokens > 70000, "the essays do not begin anew");
    const int64_t n = text_of(&stops, 0).prompt_tokens;
    CHECK(n < all + 1000 && n > all - 7000, "%d bytes of essays of %d", (int)n, (int)all);
    task_close(&again);
    task_close(&stops);
    check_done();
}

static void keys_and_values_have_their_frequencies(void **state) {
    (void)state;
    static prompt p;
    tally hex = tally_even("hex digits", 16), variant = tally_even("variants", 4);
    tally half = { .what = "adjectives up to the 455th", .n = 2, .p = { 0.5, 0.5 } };
    task_case c = task_open("niah-single-1", "values_are=uuids budget=2000");
    for (int64_t i = 0; i < 1000; i++) {
        const mn_task_text text = text_of(&c, i);
        read_prompt(&p, text.prompt, "uuids", true);
        static const char digits[] = "0123456789abcdef";
        hex.count[strchr(digits, text.answers[0][(i % 8)]) - digits]++;
        hex.count[strchr(digits, text.answers[0][24 + i % 12]) - digits]++;
        hex.count[strchr(digits, text.answers[0][15 + i % 3]) - digits]++;
        variant.count[strchr("89ab", text.answers[0][19]) - "89ab"]++;
    }
    tally_check(&hex);
    tally_check(&variant);
    task_close(&c);
    /* Halves by first letter; how many of the list lie in each is counted here. */
    int64_t n = 0, low = 0;
    static const char list[] =
#define ADJECTIVES(words) words
#include "tasks/niah/niah_words.def"
        ;
    for (const char *at = list; *at; at = strchr(at, ';') + 1, n++) low += tolower(*at) < 'h';
    assert_true(n > 200);
    half.p[0] = (double)low / (double)n;
    half.p[1] = 1.0 - half.p[0];
    half.what = "first letters of adjectives";
    c = task_open("niah-single-1", "values_are=words budget=2000");
    for (int64_t i = 0; i < 1000; i++) {
        const mn_task_text text = text_of(&c, i);
        read_prompt(&p, text.prompt, "words", true);
        half.count[tolower(p.needles[0].key[0]) >= 'h']++;
        half.count[tolower(text.answers[0][0]) >= 'h']++;
    }
    tally_check(&half);
    task_close(&c);
    check_done();
}

/* Input: the tokens of prompt and answers but for the last; targets: those of the answers. */
static void samples_are_the_texts_tokens(void **state) {
    (void)state;
    task_case c = task_open("niah-multiquery", with_essays(""));
    for (int64_t i = 0; i < 20; i++) {
        char whole[8192];
        task_take(&c, SEED, MN_SPLIT_TEST, i);
        const int64_t used = mn_task_used(c.task);
        const mn_task_text text = text_of(&c, i);
        const int n = snprintf(whole, sizeof whole, "%s %s, %s, %s, %s", text.prompt,
                               text.answers[0], text.answers[1], text.answers[2], text.answers[3]);
        assert_int_equal(used, n - 1);
        for (int64_t t = 0; t < c.n; t++) {
            const int32_t id = t < used ? (unsigned char)whole[t] : 0;
            const bool asked = t < used && t + 1 >= text.prompt_tokens;
            const int32_t next = asked ? (unsigned char)whole[t + 1] : MN_NO_TARGET;
            CHECK(c.input[t] == id && c.target[t] == next, "place %d", (int)t);
        }
    }
    task_close(&c);
    check_done();
}

/* With a trained tokenizer the budget is in its tokens, and more text fits. */
static void other_tokenizers_are_heard(void **state) {
    (void)state;
    const char *const texts[] = { essay };
    const size_t sizes[] = { strlen(essay) };
    const mn_tokenizer_training how = { .vocab_size = 400 };
    mn_tokenizer *tokenizer;
    char changes[512];
    assert_int_equal(mn_tokenizer_train(&tokenizer, &how, texts, sizes, 1), MN_OK);
    assert_int_equal(mn_tokenizer_save(tokenizer, in_folder("tokenizer.json")), MN_OK);
    snprintf(changes, sizeof changes, "essays=%s tokenizer=%s", in_folder("essay.txt"),
             in_folder("tokenizer.json"));
    task_case c = task_open("niah-single-2", changes);
    mn_token_list tokens = { 0 };
    const mn_task_text text = text_of(&c, 0);
    assert_int_equal(c.shape.vocab, mn_tokenizer_size(tokenizer));
    assert_int_equal(mn_tokenizer_encode(tokenizer, text.prompt, strlen(text.prompt), false,
                                         &tokens), MN_OK);
    CHECK(tokens.count == text.prompt_tokens, "%d tokens", (int)text.prompt_tokens);
    CHECK(tokens.count <= 4096 - 128, "%d tokens", (int)tokens.count);
    task_take(&c, SEED, MN_SPLIT_TEST, 0);
    const size_t bytes = (size_t)tokens.count * sizeof *c.input;
    CHECK(memcmp(tokens.ids, c.input, bytes) == 0, "the tokens");
    /* What would not fit is cut by 500 words: the longest of some comes near the budget. */
    size_t longest = 0;
    for (int64_t i = 0; i < 48; i++) {
        const size_t n = strlen(text_of(&c, i).prompt);
        if (n > longest) longest = n;
    }
    CHECK(longest > 4500, "at most %d bytes", (int)longest);
    mn_token_list_free(&tokens);
    mn_tokenizer_destroy(tokenizer);
    task_close(&c);
    check_done();
}

static void sentences_end_where_they_end(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int64_t n;
    } cases[] = {
        { "One. Two! Three? Four", 4 },
        { "Mr. Jones met Dr. Who. He left.", 2 },
        { "It cost 3.50 dollars. Then e.g. nothing.", 2 },
        { "He said \"go.\" Then (really!) he went.", 3 },
        { "J. R. Smith wrote it.", 1 },
        { "Wait... what? Yes.", 2 },
        { "a\tb\n\nc \xC2\xA0 d\xE3\x80\x80" "e", 1 },
        { "It was I. He knew.", 2 },
    };
    for (size_t k = 0; k < MN_COUNTOF(cases); k++) {
        mn_haystack h;
        assert_int_equal(mn_haystack_make(&h, cases[k].text, strlen(cases[k].text)), MN_OK);
        CHECK(mn_haystack_sentences(&h, h.n_words) == cases[k].n, "\"%s\": %d sentences",
              cases[k].text, (int)mn_haystack_sentences(&h, h.n_words));
        mn_haystack_free(&h);
    }
    mn_haystack h;
    assert_int_equal(mn_haystack_make(&h, cases[6].text, strlen(cases[6].text)), MN_OK);
    assert_int_equal(h.n_words, 5);
    mn_haystack_free(&h);
    assert_fails(mn_haystack_make(&h, " \n ", 3), MN_ERR_ARGUMENT, "essays", "no words");
    assert_null(h.text);
    check_done();
}

/* Any bytes make a haystack or are refused. */
static void any_bytes_make_haystacks(void **state) {
    (void)state;
    for (uint64_t trial = 0; trial < 3000; trial++) {
        static const char alphabet[] = " \n.?!\"')]ab\xE2\x80\x9D\xC2\xA0\xE3\x80\x80I";
        char text[64];
        const size_t n = mn_rng_bits(SEED, trial, 100) % sizeof text;
        for (size_t i = 0; i < n; i++) {
            text[i] = alphabet[mn_rng_bits(SEED, trial, i) % sizeof alphabet];
        }
        mn_haystack h;
        if (mn_haystack_make(&h, text, n) != MN_OK) continue;
        const int64_t s = mn_haystack_sentences(&h, 3 * h.n_words);
        CHECK(s >= 1 && s <= 3 * h.n_words, "%d sentences", (int)s);
        mn_haystack_free(&h);
    }
    check_done();
}

static void predictions_are_scored(void **state) {
    (void)state;
    const mn_task_text text = { .answers = { "1234567", "wide-Lamp", "7654321", "x" },
                                .n_answers = 4 };
    assert_true(mn_task_text_score(&text, "") == 0.0);
    assert_true(mn_task_text_score(&text, " 1234567, and 7654321.") == 0.5);
    assert_true(mn_task_text_score(&text, "WIDE-lamp\x01X 71234567 7654321") == 1.0);
    assert_true(mn_task_text_score(&text, "123456\n7") == 0.0);
    const mn_task_text nothing = { .n_answers = 0 };
    assert_true(mn_task_text_score(&nothing, "a") == 0.0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts_are_read_again),
        cmocka_unit_test(needles_hide_among_others),
        cmocka_unit_test(noise_hides_needles_evenly),
        cmocka_unit_test(essays_hide_needles_at_forty_depths),
        cmocka_unit_test(four_needles_have_one_order),
        cmocka_unit_test(haystacks_fill_the_budget),
        cmocka_unit_test(keys_and_values_have_their_frequencies),
        cmocka_unit_test(samples_are_the_texts_tokens),
        cmocka_unit_test(other_tokenizers_are_heard),
        cmocka_unit_test(sentences_end_where_they_end),
        cmocka_unit_test(any_bytes_make_haystacks),
        cmocka_unit_test(predictions_are_scored),
    };
    return cmocka_run_group_tests_name("tasks: needles", tests, setup, remove_folder);
}
