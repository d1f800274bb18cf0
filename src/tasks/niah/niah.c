/* niah.c - needles in a haystack: sentences with a key and a value, hidden in a long text, and a
 * question for the values of a key.
 *
 *   needle   One of the special magic {T} for {key} is: {value}.
 *   prompt   Some special magic {T} are hidden within the following text. ... {context}
 *            What are all the special magic {T} for {query} mentioned in the provided text? ...
 *
 * Keys are adjective-noun or UUIDs; values 7 digits, adjective-noun or a version-4 UUID. The
 * haystack is
 *   noise    n lines of the same five sentences, a needle as a line of its own before each of some
 *            different lines
 *   needle   the same of n lines that are needles themselves, each with a key and value of its own
 *   essay    the first n words of the essays; with S sentences and different depths from the 40
 *            whole percents nearest to i 100 / 39, needles before sentence int(S depth / 100)
 * n is found when the task is made: what fits in the budget less 128 tokens for the answer, by
 * bisection over the prompt alone ("ruler"), or in steps of `increment` over prompt and answers
 * ("lm-eval", where the opening of the answer does not count). A sample that is longer takes steps
 * back until it fits.
 *
 * As tokens: prompt, blank and answers; the targets are the tokens of the answers. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/file.h"
#include "tokenizer/tokenizer.h"
#include "tasks/niah/haystack.h"
#include "tasks/task_internal.h"

static const char adjective_list[] =
#define ADJECTIVES(words) words
#include "tasks/niah/niah_words.def"
    ;
static const char noun_list[] =
#define NOUNS(words) words
#include "tasks/niah/niah_words.def"
    ;

enum {
    DEPTHS = 40,
    VALUE_BYTES = 96,          // of a key or value, with the closing zero
    MOST_WORD = 46,            // bytes of a word: two and a hyphen fit
    ANSWER_TOKENS = 128,       // of the budget
    MOST_KEYS = 32,
    LINE_STEP = 25, SHORT_LINE_STEP = 5, WORD_STEP = 500,
    PATIENCE = 64,             // draws of a sample that does not fit at the shortest haystack
};

static const char noise_line[] = "The grass is green. The sky is blue. The sun is yellow. Here we "
                                 "go. There and back again.";

/* The sentences around, without what differs between samples. */
static const char frame_text[] =
    " A special magic number is hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the number afterwards. Some special magic numbers are hidden within the "
    "following text. Make sure to memorize it. I will quiz you about the numbers afterwards. One "
    "of the special magic numbers for is: What is the special magic number for mentioned in the "
    "provided text? The special magic number for mentioned in the provided text is What are all "
    "the special magic numbers for mentioned in the provided text? The special magic numbers for "
    "mentioned in the provided text are words word uuids uuid and";

/* The longest of an answer's opening but for its keys. */
static const char opening_text[] =
    " The special magic numbers for mentioned in the provided text are";

typedef enum value_kind { NUMBERS, WORDS, UUIDS } value_kind;

typedef struct word_list {
    const char **words;
    int64_t count;
    char *text;
} word_list;

typedef struct needle {
    char value[VALUE_BYTES];
    int64_t at;                // of the value in the prompt
} needle;

typedef struct niah {
    bool essay, lm_eval;
    bool lines_are_needles;            // haystack=needle
    value_kind kind, key_kind;
    mn_tokenizer *tokenizer;
    mn_haystack haystack;
    word_list adjectives, nouns;
    int64_t increment, size, least;    // of the haystack, in lines or words
    int64_t n_needles;
    int32_t order[DEPTHS];             // needle number i of the text
    mn_deck depths, keys;
    int64_t place[DEPTHS];             // of needle i of the text: a line or sentence
    char key[MOST_KEYS][VALUE_BYTES];
    needle needles[DEPTHS];            // keys x values
    int32_t asked[MOST_KEYS];
    mn_text prompt, answer;
    size_t opening;                    // where the opening of the answer begins in the prompt
    mn_token_list tokens;
    int64_t prompt_tokens;
} niah;

static void close_niah(mn_task *task) {
    niah *n = task->own;
    mn_tokenizer_destroy(n->tokenizer);
    mn_haystack_free(&n->haystack);
    free(n->adjectives.words);
    free(n->adjectives.text);
    free(n->nouns.words);
    free(n->nouns.text);
    mn_deck_free(&n->depths);
    mn_deck_free(&n->keys);
    mn_text_free(&n->prompt);
    mn_text_free(&n->answer);
    mn_token_list_free(&n->tokens);
}

/* ---- words and values ------------------------------------------------------------------------ */

/* Words of "some;words;". */
static mn_status split_words(word_list *out, const mn_task *task, const char *list) {
    int64_t n = 0;
    for (const char *at = list; *at; at++) n += *at == ';';
    mn_status st = mn_task_memory(&out->words, task, n, sizeof *out->words);
    if (st == MN_OK) st = mn_task_memory(&out->text, task, (int64_t)strlen(list) + 1, 1);
    if (st != MN_OK) return st;
    strcpy(out->text, list);
    for (char *at = out->text, *end; (end = strchr(at, ';')); at = end + 1) {
        *end = '\0';
        out->words[out->count++] = at;
    }
    return MN_OK;
}

/* The built-in list, or the lines of `file` in the folder the options name. */
static mn_status open_words(word_list *out, const mn_task *task, const char *list,
                            const char *file) {
    const char *folder = task->values.words;
    if (folder[0] == '\0') return split_words(out, task, list);
    char path[4096];
    mn_file lines;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    mn_status st = mn_file_map(&lines, path);
    if (st != MN_OK) return st;
    char *joined = malloc(lines.size + 2);
    size_t n = 0;
    for (size_t i = 0; joined && i < lines.size; i++) {
        const char c = (char)lines.bytes[i];
        const bool end = c == '\n' || c == '\r' || c == ';';
        if (!end) joined[n++] = c ? c : '?';
        else if (n > 0 && joined[n - 1] != ';') joined[n++] = ';';
    }
    if (joined && n > 0 && joined[n - 1] != ';') joined[n++] = ';';
    if (joined) joined[n] = '\0';
    mn_file_unmap(&lines);
    st = joined ? split_words(out, task, joined)
                : mn_fail(MN_ERR_MEMORY, "no memory for the words of %s", path);
    free(joined);
    for (int64_t i = 0; st == MN_OK && i < out->count; i++) {
        if (strlen(out->words[i]) <= MOST_WORD) continue;
        return mn_fail(MN_ERR_FORMAT, "%s: \"%.60s\" is longer than %d bytes", path, out->words[i],
                       MOST_WORD);
    }
    if (st == MN_OK && out->count == 0) st = mn_fail(MN_ERR_FORMAT, "%s holds no word", path);
    return st;
}

static void draw_words(char out[VALUE_BYTES], const niah *n, mn_draws *d) {
    const char *adjective = n->adjectives.words[mn_draw_below(d, n->adjectives.count)];
    const char *noun = n->nouns.words[mn_draw_below(d, n->nouns.count)];
    snprintf(out, VALUE_BYTES, "%s-%s", adjective, noun);
}

static void draw_value(char out[VALUE_BYTES], const niah *n, value_kind kind, mn_draws *d) {
    if (kind == WORDS) {
        draw_words(out, n, d);
    } else if (kind == NUMBERS) {
        snprintf(out, VALUE_BYTES, "%" PRId64, 1000000 + mn_draw_below(d, 9000000));
    } else {
        const uint64_t a = mn_draw_bits(d), b = mn_draw_bits(d);
        snprintf(out, VALUE_BYTES, "%08" PRIx64 "-%04" PRIx64 "-4%03" PRIx64 "-%04" PRIx64 "-%012"
                 PRIx64, a >> 32, a >> 16 & 0xFFFF, a & 0xFFF, (b >> 48 & 0x3FFF) | 0x8000,
                 b & UINT64_C(0xFFFFFFFFFFFF));
    }
}

/* ---- the text -------------------------------------------------------------------------------- */

static mn_status add(mn_text *to, const char *text) {
    return mn_text_add(to, text, strlen(text));
}

/* `format` with {T} for the kind of values, {K} for the keys asked for, and its plural words for
 * one answer in the singular: "{Some|A}". */
static mn_status add_frame(niah *n, const mn_task *task, const char *format) {
    static const char *const kinds[] = { "numbers", "words", "uuids" };
    const bool one = task->values.asked * task->values.values == 1;
    mn_status st = MN_OK;
    for (const char *at = format; *at && st == MN_OK;) {
        const size_t plain = strcspn(at, "{");
        st = mn_text_add(&n->prompt, at, plain);
        at += plain;
        if (*at == '\0' || st != MN_OK) break;
        const char *bar = strchr(at, '|'), *end = strchr(at, '}');
        if (at[1] == 'T') {
            st = mn_text_add(&n->prompt, kinds[n->kind], strlen(kinds[n->kind]) - one);
        } else if (at[1] == 'K') {
            for (int64_t i = 0; i < task->values.asked && st == MN_OK; i++) {
                const bool last = i > 0 && i + 1 == task->values.asked;
                if (i > 0) st = add(&n->prompt, last ? ", and " : ", ");
                if (st == MN_OK) st = add(&n->prompt, n->key[n->asked[i]]);
            }
        } else {
            const char *from = one ? bar + 1 : at + 1, *to = one ? end : bar;
            st = mn_text_add(&n->prompt, from, (size_t)(to - from));
        }
        at = end + 1;
    }
    return st;
}

static mn_status add_needle(niah *n, const mn_task *task, int64_t i) {
    static const char *const kinds[] = { "numbers", "words", "uuids" };
    needle *it = &n->needles[n->order[i]];
    char head[3 * VALUE_BYTES];
    snprintf(head, sizeof head, "One of the special magic %s for %s is: ", kinds[n->kind],
             n->key[n->order[i] / task->values.values]);
    mn_status st = add(&n->prompt, head);
    it->at = (int64_t)n->prompt.size;
    if (st == MN_OK) st = add(&n->prompt, it->value);
    return st == MN_OK ? add(&n->prompt, ".") : st;
}

/* A line of the haystack. */
static mn_status add_line(niah *n, mn_draws *d) {
    static const char *const kinds[] = { "numbers", "words", "uuids" };
    char key[VALUE_BYTES], value[VALUE_BYTES], line[4 * VALUE_BYTES];
    if (!n->lines_are_needles) return add(&n->prompt, noise_line);
    draw_value(key, n, n->key_kind, d);
    draw_value(value, n, n->kind, d);
    snprintf(line, sizeof line, "One of the special magic %s for %s is: %s.", kinds[n->kind], key,
             value);
    return add(&n->prompt, line);
}

/* Lines of noise or needles; the first needle stands last. */
static mn_status add_lines(niah *n, const mn_task *task, mn_draws *d, int64_t lines) {
    mn_status st = MN_OK;
    int64_t left = n->n_needles;
    for (int64_t i = 0; i < lines && st == MN_OK; i++) {
        if (i > 0) st = add(&n->prompt, "\n");
        if (left > 0 && n->place[n->n_needles - left] == i && st == MN_OK) {
            st = add_needle(n, task, --left);
            if (st == MN_OK) st = add(&n->prompt, "\n");
        }
        if (st == MN_OK) st = add_line(n, d);
    }
    return st;
}

/* Sentences and needles by turns with a blank between them, which is there even where no sentence
 * stands between two needles or at an end of the text, as the published generator has it. */
static mn_status add_essay(niah *n, const mn_task *task, int64_t words) {
    mn_status st = MN_OK;
    int64_t word = 0, sentence = 0;
    for (int64_t i = 0; i <= n->n_needles && st == MN_OK; i++) {
        const int64_t until = i < n->n_needles ? n->place[i] : INT64_MAX;
        if (i > 0) st = add(&n->prompt, " ");
        for (bool first = true; word < words && sentence < until && st == MN_OK; word++) {
            if (!first) st = add(&n->prompt, " ");
            first = false;
            if (st == MN_OK) st = mn_haystack_word(&n->prompt, &n->haystack, word);
            sentence += mn_haystack_ends(&n->haystack, word);
        }
        if (i == n->n_needles || st != MN_OK) break;
        st = add(&n->prompt, " ");
        if (st == MN_OK) st = add_needle(n, task, i);
    }
    return st;
}

static int by_size(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Where the needles go in a haystack of `size`: into n->place, ascending. */
static mn_status draw_places(niah *n, mn_draws *d, int64_t size) {
    mn_deck lines = { 0 };
    mn_deck *deck = &n->depths;
    if (!n->essay) {
        const mn_status st = mn_deck_create(&lines, size);
        if (st != MN_OK) return st;
        deck = &lines;
    }
    const int64_t sentences = n->essay ? mn_haystack_sentences(&n->haystack, size) : 0;
    for (int64_t i = 0; i < n->n_needles; i++) {
        const int32_t card = mn_deck_draw(deck, d);
        const double depth = nearbyint(card * (100.0 / (DEPTHS - 1)));
        n->place[i] = n->essay ? (int64_t)((double)sentences * (depth / 100.0)) : card;
    }
    mn_deck_restore(&n->depths);
    mn_deck_free(&lines);
    qsort(n->place, (size_t)n->n_needles, sizeof *n->place, by_size);
    return MN_OK;
}

/* Draws a sample with a haystack of `size` and writes its prompt. */
static mn_status compose(const mn_task *task, mn_draws *d, int64_t size) {
    niah *n = task->own;
    const mn_task_values *v = &task->values;
    for (int64_t k = 0; k < v->keys; k++) {
        draw_value(n->key[k], n, n->key_kind, d);
        for (int64_t i = 0; i < v->values; i++) {
            draw_value(n->needles[k * v->values + i].value, n, n->kind, d);
        }
    }
    for (int64_t i = 0; i < v->asked; i++) n->asked[i] = mn_deck_draw(&n->keys, d);
    mn_deck_restore(&n->keys);
    n->prompt.size = 0;
    mn_status st = draw_places(n, d, size);
    if (st == MN_OK) {
        st = add_frame(n, task, "{Some|A} special magic {T} {are|is} hidden within the following "
                                "text. Make sure to memorize it. I will quiz you about the {T} "
                                "afterwards.\n");
    }
    if (st == MN_OK) st = n->essay ? add_essay(n, task, size) : add_lines(n, task, d, size);
    if (st == MN_OK) {
        st = add_frame(n, task, "\nWhat {are all|is} the special magic {T} for {K} mentioned in "
                                "the provided text?");
    }
    n->opening = n->prompt.size;
    if (st == MN_OK) {
        st = add_frame(n, task, " The special magic {T} for {K} mentioned in the provided text "
                                "{are|is}");
    }
    return st;
}

/* The answers, with `between` them, behind a blank if `leads`. */
static mn_status write_answers(const mn_task *task, const char *before, const char *between) {
    niah *n = task->own;
    const int64_t values = task->values.values;
    n->answer.size = 0;
    mn_status st = add(&n->answer, before);
    for (int64_t i = 0; i < task->values.asked * values && st == MN_OK; i++) {
        const needle *it = &n->needles[n->asked[i / values] * values + i % values];
        if (i > 0) st = add(&n->answer, between);
        if (st == MN_OK) st = add(&n->answer, it->value);
    }
    return st;
}

/* ---- lengths --------------------------------------------------------------------------------- */

static mn_status encode(niah *n, const char *text, size_t size) {
    return mn_tokenizer_encode(n->tokenizer, text, size, false, &n->tokens);
}

/* What counts of the prompt against the budget, in tokens; `with_answers` behind it. */
static mn_status measure(int64_t *tokens, const mn_task *task, bool with_answers) {
    niah *n = task->own;
    const size_t size = n->lm_eval ? n->opening : n->prompt.size, kept = n->prompt.size;
    mn_status st = MN_OK;
    n->tokens.count = 0;
    if (with_answers) {    // directly behind, as the published generators measure
        st = write_answers(task, "", " ");
        n->prompt.size = size;
        if (st == MN_OK) st = mn_text_add(&n->prompt, n->answer.bytes, n->answer.size);
    }
    if (st == MN_OK) st = encode(n, n->prompt.bytes, with_answers ? n->prompt.size : size);
    *tokens = n->tokens.count;
    if (!with_answers) n->prompt.size = kept;
    return st;
}

/* Tokens of a sample with a haystack of `size` and room for the answer; steps of the second form
 * count the answers as well, as its generator does. */
static mn_status probe(int64_t *total, const mn_task *task, mn_draws *d, int64_t size) {
    *total = 0;
    mn_status st = compose(task, d, size);
    if (st == MN_OK) st = measure(total, task, ((niah *)task->own)->lm_eval);
    *total += ANSWER_TOKENS;
    return st;
}

/* The largest haystack that fits, by bisection up to three times what one step suggests. */
static mn_status bisect(niah *n, const mn_task *task, mn_draws *d) {
    int64_t total, low = n->increment;
    mn_status st = probe(&total, task, d, n->increment);
    const double each = (double)mn_max(1, total - ANSWER_TOKENS) / (double)n->increment;
    int64_t high = mn_max((int64_t)((double)task->values.budget / each * 3.0), 2 * n->increment);
    n->size = n->increment;
    while (st == MN_OK && low <= high) {
        const int64_t middle = low + (high - low) / 2;
        st = probe(&total, task, d, middle);
        if (total <= task->values.budget) {
            n->size = middle;
            low = middle + 1;
        } else {
            high = middle - 1;
        }
    }
    return st;
}

/* Steps of `increment` until the budget is passed, then one back. */
static mn_status climb(niah *n, const mn_task *task, mn_draws *d) {
    const int64_t budget = task->values.budget;
    int64_t total = 0;
    mn_status st = MN_OK;
    for (n->size = n->increment; st == MN_OK && total < budget; n->size += n->increment) {
        if (n->essay) n->size = mn_min(n->size, n->haystack.n_words);
        st = probe(&total, task, d, n->size);
        if (total > budget) {
            n->size -= n->increment;
            break;
        }
        if (n->essay && n->size == n->haystack.n_words) break;
    }
    n->size = mn_max(n->size, n->least);
    return st;
}

/* A sample that fits, and the tokens of its prompt. */
static mn_status settle(mn_task *task, mn_draws *d) {
    niah *n = task->own;
    int64_t size = n->size, length = 0;
    for (int tries = 0; tries < PATIENCE;) {
        mn_status st = compose(task, d, size);
        if (st == MN_OK) st = measure(&length, task, false);
        if (st != MN_OK) return st;
        if (length + ANSWER_TOKENS <= task->values.budget) return MN_OK;
        const bool last = size <= (n->lm_eval ? n->least : n->increment);
        if (last) tries++;
        else size = mn_max(n->least, size - n->increment);
    }
    return mn_fail(MN_ERR_ARGUMENT, "%s: the shortest haystack makes a prompt of %" PRId64
                   " tokens, which with %d for the answer passes the budget of %" PRId64
                   "; raise the budget", task->info.name, length, ANSWER_TOKENS,
                   task->values.budget);
}

/* ---- opening --------------------------------------------------------------------------------- */

static mn_status one_of(int *out, const mn_task *task, const char *key, const char *value,
                        const char *const *names, int n_names) {
    for (int i = 0; i < n_names; i++) {
        if (strcmp(names[i], value) != 0) continue;
        *out = i;
        return MN_OK;
    }
    return mn_fail(MN_ERR_ARGUMENT, "%s: %s is \"%s\", which is none of %s, %s%s%s",
                   task->info.name, key, value, names[0], names[1], n_names > 2 ? ", " : "",
                   n_names > 2 ? names[2] : "");
}

static mn_status read_choices(mn_task *task, niah *n) {
    static const char *const stacks[] = { "noise", "essay", "needle" };
    static const char *const sizes[] = { "ruler", "lm-eval" };
    static const char *const kinds[] = { "numbers", "words", "uuids" };
    const mn_task_values *v = &task->values;
    int stack = 0, sizing = 0, kind = 0, key_kind = 0;
    mn_status st = one_of(&stack, task, "haystack", v->haystack, stacks, 3);
    if (st == MN_OK) st = one_of(&sizing, task, "sizing", v->sizing, sizes, 2);
    if (st == MN_OK) st = one_of(&kind, task, "values_are", v->values_are, kinds, 3);
    if (st == MN_OK) st = one_of(&key_kind, task, "keys_are", v->keys_are, kinds, 3);
    if (st == MN_OK) {
        st = mn_task_require(task, v->keys * v->values <= DEPTHS, "values",
                             "keys times values must not exceed 40, the number of depths");
    }
    if (st == MN_OK) {
        st = mn_task_require(task, v->asked <= v->keys, "asked", "there are not that many keys");
    }
    n->essay = stack == 1;
    n->lines_are_needles = stack == 2;
    n->key_kind = (value_kind)key_kind;
    n->lm_eval = sizing == 1;
    n->kind = (value_kind)kind;
    n->n_needles = v->keys * v->values;
    n->increment = n->essay ? WORD_STEP : v->budget < 4096 ? SHORT_LINE_STEP : LINE_STEP;
    n->least = n->essay ? 1 : n->n_needles;
    n->increment = mn_max(n->increment, n->least);
    return st;
}

/* The order of the needles in the text is the same in every sample. Of four it is the published
 * one; other numbers have one of ours. */
static void fix_order(niah *n) {
    static const int32_t of_four[] = { 2, 1, 3, 0 };
    mn_draws d = mn_draws_make(42, MN_DRAW_MAP, MN_SPLIT_TRAIN, n->n_needles);
    for (int32_t i = 0; i < n->n_needles; i++) n->order[i] = i;
    for (int64_t i = n->n_needles; i > 1; i--) {
        const int64_t j = mn_draw_below(&d, i);
        const int32_t kept = n->order[i - 1];
        n->order[i - 1] = n->order[j];
        n->order[j] = kept;
    }
    if (n->n_needles == 4) memcpy(n->order, of_four, sizeof of_four);
}

/* Words of the frame, the noise and the lists, the first two most often: the same for all options.
 * No digit is in them, so that numbers stay digits. */
static mn_status learn_tokenizer(mn_tokenizer **out) {
    enum { TIMES = 16, TOKENS = 1024 };
    const mn_tokenizer_training how = { .vocab_size = TOKENS };
    const char *texts[2 * TIMES + 2];
    size_t sizes[2 * TIMES + 2];
    char *lists[2] = { malloc(sizeof adjective_list), malloc(sizeof noun_list) };
    mn_status st = lists[0] && lists[1] ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for words");
    for (int i = 0; i < 2 * TIMES; i++) texts[i] = i % 2 ? noise_line : frame_text;
    for (int i = 0; st == MN_OK && i < 2; i++) {
        char *list = lists[i];
        texts[2 * TIMES + i] = list;
        memcpy(list, i ? noun_list : adjective_list, i ? sizeof noun_list : sizeof adjective_list);
        for (; *list; list++) *list = *list == ';' ? ' ' : *list;
    }
    for (int i = 0; st == MN_OK && i < 2 * TIMES + 2; i++) sizes[i] = strlen(texts[i]);
    if (st == MN_OK) st = mn_tokenizer_train(out, &how, texts, sizes, 2 * TIMES + 2);
    free(lists[0]);
    free(lists[1]);
    return st;
}

static mn_status open_tokenizer(const mn_task *task, niah *n) {
    const char *name = task->values.tokenizer;
    if (strcmp(name, "bytes") == 0) return mn_tokenizer_bytes(&n->tokenizer);
    if (strcmp(name, "words") == 0) return learn_tokenizer(&n->tokenizer);
    return mn_tokenizer_load(&n->tokenizer, name);
}

static mn_status open_essays(const mn_task *task, niah *n) {
    if (!n->essay) return MN_OK;
    if (task->values.essays[0] == '\0') {
        return mn_fail(MN_ERR_ARGUMENT, "%s: its haystack is made of essays: name a file or folder "
                       "of long English prose, as in essays=FOLDER", task->info.name);
    }
    return mn_haystack_load(&n->haystack, task->values.essays);
}

static int64_t longest_word(const word_list *list) {
    int64_t most = 0;
    for (int64_t i = 0; i < list->count; i++) {
        most = mn_max(most, (int64_t)strlen(list->words[i]));
    }
    return most;
}

/* What a row may hold behind its budget: the opening of the answer, its keys, and the answers. No
 * token is shorter than a byte; of our own tokenizer the opening's tokens are counted. */
static mn_status find_tail(int64_t *tail, niah *n, const mn_task_values *v) {
    enum { AND = 6, COMMA = 2, SLACK = 4, DIGITS = 7, UUID = 36 };
    const int64_t words = longest_word(&n->adjectives) + 1 + longest_word(&n->nouns);
    const int64_t sizes[] = { [NUMBERS] = DIGITS, [WORDS] = words, [UUIDS] = UUID };
    const int64_t key = sizes[n->key_kind], value = sizes[n->kind];
    int64_t opening = (int64_t)sizeof opening_text;
    mn_status st = MN_OK;
    if (strcmp(v->tokenizer, "words") == 0) {
        n->tokens.count = 0;
        st = encode(n, opening_text, strlen(opening_text));
        opening = n->tokens.count;
    }
    *tail = opening + SLACK + v->asked * (key + AND) + v->asked * v->values * (value + COMMA);
    return st;
}

static mn_status open_niah(mn_task *task) {
    mn_status st = mn_task_own(task, sizeof(niah));
    if (st != MN_OK) return st;
    niah *n = task->own;
    const mn_task_values *v = &task->values;
    st = read_choices(task, n);
    if (st == MN_OK) st = open_tokenizer(task, n);
    if (st == MN_OK) st = open_essays(task, n);
    if (st == MN_OK) st = open_words(&n->adjectives, task, adjective_list, "adjectives.txt");
    if (st == MN_OK) st = open_words(&n->nouns, task, noun_list, "nouns.txt");
    if (st == MN_OK) st = mn_deck_create(&n->depths, DEPTHS);
    if (st == MN_OK) st = mn_deck_create(&n->keys, v->keys);
    if (st != MN_OK) return st;
    fix_order(n);
    mn_draws d = mn_draws_make(42, MN_DRAW_MAP, MN_SPLIT_TEST, 0);
    st = n->lm_eval ? climb(n, task, &d) : bisect(n, task, &d);
    if (st == MN_OK) st = settle(task, &d);
    int64_t tail = 0;
    if (st == MN_OK) st = find_tail(&tail, n, v);
    const int64_t vocab = mn_tokenizer_size(n->tokenizer);
    task->shape = (mn_task_shape){ .vocab = vocab, .classes = vocab,
                                   .length = v->budget - ANSWER_TOKENS + tail };
    return st;
}

/* ---- samples --------------------------------------------------------------------------------- */

/* The whole prompt as tokens. */
static mn_status encode_prompt(niah *n) {
    n->tokens.count = 0;
    const mn_status st = encode(n, n->prompt.bytes, n->prompt.size);
    n->prompt_tokens = n->tokens.count;
    return st;
}

static mn_status draw_niah(mn_task *task, mn_sample_row *row) {
    niah *n = task->own;
    mn_status st = settle(task, &row->draws);
    if (st == MN_OK) st = encode_prompt(n);
    if (st == MN_OK) st = write_answers(task, " ", ", ");
    if (st == MN_OK) st = encode(n, n->answer.bytes, n->answer.size);
    if (st != MN_OK) return st;
    if (n->tokens.count > task->shape.length + 1) {
        return mn_fail(MN_ERR_INTERNAL, "%s: a sample of %" PRId64 " tokens, %" PRId64
                       " are the most", task->info.name, n->tokens.count, task->shape.length + 1);
    }
    task->used = n->tokens.count - 1;
    for (int64_t t = 0; t < task->used; t++) {
        row->input[t] = n->tokens.ids[t];
        if (t + 1 >= n->prompt_tokens) row->target[t] = n->tokens.ids[t + 1];
    }
    return MN_OK;
}

static mn_status text_niah(mn_task *task, mn_sample_row *row, mn_task_text *out) {
    niah *n = task->own;
    const int64_t values = task->values.values;
    mn_status st = settle(task, &row->draws);
    if (st == MN_OK) st = encode_prompt(n);
    if (st == MN_OK) st = mn_text_reserve(&n->prompt, 1);
    if (st != MN_OK) return st;
    n->prompt.bytes[n->prompt.size] = '\0';
    out->prompt = n->prompt.bytes;
    out->prompt_tokens = n->prompt_tokens;
    for (int64_t i = 0; i < task->values.asked * values && st == MN_OK; i++) {
        const needle *it = &n->needles[n->asked[i / values] * values + i % values];
        n->tokens.count = 0;
        st = encode(n, n->prompt.bytes, (size_t)it->at);
        out->answers[out->n_answers] = it->value;
        out->answer_token[out->n_answers] = n->tokens.count;
        out->answer_at[out->n_answers++] = it->at;
    }
    return st;
}

const mn_generator mn_generator_niah = { .open = open_niah, .draw = draw_niah, .close = close_niah,
                                         .text = text_niah };
