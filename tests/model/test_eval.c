/* test_eval.c - perplexity against one computed window by window, choices of a model whose
 * preferences are made by hand, and logits as files. */
// labels: sanitize
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "eval/choice.h"
#include "eval/logits.h"
#include "eval/perplexity.h"
#include "io/safetensors.h"
#include "support/check.h"
#include "support/folder.h"
#include "support/model_case.h"

enum { VOCABULARY = 13, TOKENS = 101 };

typedef struct fixture {
    mn_context *context;
    mn_model *model;
    mn_corpus *corpus;
    int32_t tokens[TOKENS];
} fixture;

static bool open(fixture *f, const char *layers, mn_dtype dtype) {
    char json[256];
    snprintf(json, sizeof json, "{\"layers\": \"%s\", \"hidden_size\": 8, \"vocab_size\": %d, "
             "\"intermediate_size\": 6}", layers, VOCABULARY);
    memset(f, 0, sizeof *f);
    mn_status st = model_case_create(&f->model, json, dtype, 0.3, 5);
    if (st == MN_OK) st = mn_context_create(&f->context, NULL);
    model_case_tokens(f->tokens, TOKENS, VOCABULARY, 2);
    const int64_t borders[] = { 0, 40, TOKENS };
    if (st == MN_OK) st = mn_corpus_from_tokens(&f->corpus, f->tokens, TOKENS, borders, 2);
    return CHECK(st == MN_OK, "%s: %s", layers, mn_last_error());
}

static void finish(fixture *f) {
    mn_corpus_destroy(f->corpus);
    mn_model_destroy(f->model);
    mn_context_destroy(f->context);
}

/* Logits after each of T tokens, by one forward pass; to be freed. */
static double *logits_of(const fixture *f, const int32_t *tokens, int64_t T) {
    mn_tape *tape = NULL;
    double *out = malloc((size_t)(T * VOCABULARY) * sizeof *out);
    if (!out || mn_tape_create(&tape, f->context, mn_model_dtype(f->model)) != MN_OK) {
        check_fatal("no tape");
    }
    const mn_model_input in = { .tokens = tokens, .B = 1, .T = T };
    mn_tape_start(tape, MN_TAPE_FORWARD);
    const mn_tensor *logits = mn_model_logits(f->model, tape,
                                              mn_model_hidden(f->model, tape, &in));
    if (mn_tape_status(tape) != MN_OK) check_fatal("%s", mn_last_error());
    for (int64_t i = 0; i < T * VOCABULARY; i++) {
        out[i] = mn_model_dtype(f->model) == MN_F64 ? ((const double *)logits->data)[i]
                                                    : ((const float *)logits->data)[i];
    }
    mn_tape_destroy(tape);
    return out;
}

static double log_probability(const double *logits, int32_t token) {
    double sum = 0.0;
    for (int i = 0; i < VOCABULARY; i++) sum += exp(logits[i]);
    return logits[token] - log(sum);
}

/* ---- perplexity ------------------------------------------------------------------------------ */

static double direct_loss(const fixture *f, int64_t length, int64_t windows, double *error) {
    double sum = 0.0, squares = 0.0;
    for (int64_t w = 0; w < windows; w++) {
        const int32_t *window = f->tokens + w * length;
        double *logits = logits_of(f, window, length), mean = 0.0;
        for (int64_t t = 1; t < length; t++) {
            mean -= log_probability(logits + (t - 1) * VOCABULARY, window[t]) /
                    (double)(length - 1);
        }
        sum += mean;
        squares += mean * mean;
        free(logits);
    }
    const double n = (double)windows, loss = sum / n;
    *error = sqrt((squares / n - loss * loss) / (n - 1.0));
    return loss;
}

/* Window lengths that divide and do not, budgets that hold all windows and that hold a few tokens:
 * float64 up to sums of float32 losses, 1e-6 of a loss about 2.5. */
static void check_perplexity(const char *layers) {
    static const int64_t lengths[] = { 2, 7, 20, 50 };
    fixture f;
    if (open(&f, layers, MN_F64)) {
        for (size_t i = 0; i < MN_COUNTOF(lengths); i++) {
            const int64_t L = lengths[i], windows = TOKENS / L;
            double error, want = direct_loss(&f, L, windows, &error);
            for (int way = 0; way < 2; way++) {
                mn_perplexity got;
                const mn_perplexity_options how = { .length = L, .budget = way ? 1 : 0 };
                const mn_status st = mn_perplexity_measure(&got, f.context, f.model, f.corpus,
                                                           &how);
                if (!CHECK(st == MN_OK, "%s: %s", layers, mn_last_error())) continue;
                CHECK(got.windows == windows && got.tokens == windows * (L - 1), "%s: %d windows",
                      layers, (int)got.windows);
                CHECK(fabs(got.loss - want) < 1e-6 && fabs(got.loss_error - error) < 1e-6,
                      "%s, length %d, way %d: loss %.9g +- %g, not %.9g +- %g", layers, (int)L,
                      way, got.loss, got.loss_error, want, error);
                CHECK(fabs(got.perplexity - exp(got.loss)) < 1e-12 * exp(got.loss), "%s", layers);
            }
        }
    }
    finish(&f);
}

static void perplexity_is_direct(void **state) {
    (void)state;
    check_perplexity("gdn, attention");
    check_perplexity("bayes, relu_attention");
    check_perplexity("mlstm, gla+ccq");
    check_done();
}

static int64_t calls, last_done;

static bool stop_at(void *context, int64_t done, int64_t all) {
    CHECK(done > last_done && done <= all, "%d of %d", (int)done, (int)all);
    last_done = done;
    return ++calls < *(int64_t *)context;
}

static void perplexity_limits(void **state) {
    (void)state;
    fixture f;
    if (open(&f, "gdn", MN_F32)) {
        mn_perplexity got;
        int64_t most = 1000;
        mn_perplexity_options how = { .length = 10, .max_tokens = 35, .progress = stop_at,
                                      .context = &most, .budget = 1 };
        CHECK(mn_perplexity_measure(&got, f.context, f.model, f.corpus, &how) == MN_OK, "%s",
              mn_last_error());
        CHECK(got.windows == 3 && calls > 0 && last_done == 27, "%d windows, %d calls",
              (int)got.windows, (int)calls);
        double error;
        CHECK(fabs(got.loss - direct_loss(&f, 10, 3, &error)) < 1e-5, "%g", got.loss);
        how.max_tokens = 10;
        how.progress = NULL;
        CHECK(mn_perplexity_measure(&got, f.context, f.model, f.corpus, &how) == MN_OK, "%s",
              mn_last_error());
        CHECK(got.windows == 1 && isnan(got.loss_error), "an error from one window");
        how.length = 102;
        how.max_tokens = 0;
        assert_fails(mn_perplexity_measure(&got, f.context, f.model, f.corpus, &how),
                     MN_ERR_ARGUMENT, "101 tokens", "102");
        how.length = 1;
        assert_fails(mn_perplexity_measure(&got, f.context, f.model, f.corpus, &how),
                     MN_ERR_ARGUMENT, "window of 1", "");
        how.length = 2;
        how.progress = stop_at;
        calls = last_done = 0;
        most = 1;
        CHECK(mn_perplexity_measure(&got, f.context, f.model, f.corpus, &how) != MN_OK,
              "nobody stopped it");
    }
    finish(&f);
    check_done();
}

/* ---- choices --------------------------------------------------------------------------------- */

static void set_all(mn_model *model, const char *name, double value) {
    mn_model_param *p = mn_model_param_named(model, name);
    if (!p) check_fatal("no parameter %s", name);
    for (int64_t i = 0; i < p->info.count; i++) ((float *)p->value)[i] = (float)value;
}

/* A model of letters whose next letter hangs on the last one alone: the layers add nothing, letter
 * i is the unit vector i, and the head holds the log probability of j after i. After any letter,
 * 'a' has 1/2, 'b' 1/4, 'c' 1/8, the blank 1/16, others share the rest; but after 'x', 'c' has
 * 0.9. Norms scale unit vectors by sqrt(8) = 2.83, which the head undoes. */
static const char letters[] = " abcxyz.";

static mn_status by_hand(mn_model **model) {
    const mn_status st = model_case_create(model, "{\"layers\": \"gdn\", \"hidden_size\": 8, "
                                           "\"vocab_size\": 8, \"mlp\": \"none\", \"norm_eps\": "
                                           "1e-12}", MN_F32, 0.1, 3);
    if (st != MN_OK) return st;
    set_all(*model, "model.layers.0.attn.o_proj.weight", 0.0);
    set_all(*model, "model.norm.weight", 1.0);
    float *embed = mn_model_param_named(*model, "model.embeddings.weight")->value;
    float *head = mn_model_param_named(*model, "lm_head.weight")->value;
    static const double usual[] = { 1.0 / 16, 1.0 / 2, 1.0 / 4, 1.0 / 8, 1.0 / 64, 1.0 / 64,
                                    1.0 / 64, 1.0 / 64 };
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 8; j++) {
            const double after_x = j == 3 ? 0.9 : 0.1 / 7;
            embed[i * 8 + j] = i == j;
            head[j * 8 + i] = (float)(log(letters[i] == 'x' ? after_x : usual[j]) / sqrt(8.0));
        }
    }
    return MN_OK;
}

/* Line 1: after "x", "c" 0.9 against "a" 0.1/7: the blank between is a token, so " c" is read and
 *         'c' follows ' ': 1/8 against 1/2. With the blank in the context it is the same.
 * Line 2: no blank is added before one: " a" as it is.
 * Line 3: "aa" has 1/4, "c" 1/8: equal per byte would be 1/2 and 1/8. "aa" both ways.
 * Line 4: "aaaa" has 1/16, "c" 1/8: "c" by score, "aaaa" per byte. */
static const char questions[] =
    "{\"context\": \"x\", \"choices\": [\"c\", \"a\"], \"answer\": 1}\n"
    "\n"
    "{\"context\": \"b \", \"choices\": [\"a\", \"c\", \"b\"], \"answer\": 0, \"id\": [7]}\r\n"
    "{\"ctx\": \"y\", \"endings\": [\" c\", \"aa\"], \"label\": \"1\"}\n"
    "{\"ctx\": \"y.\", \"endings\": [\"aaaa\", \"c\"], \"label\": 1}";

static void choices_by_hand(void **state) {
    (void)state;
    mn_model *model = NULL;
    mn_tokenizer *tokenizer = NULL;
    mn_context *context = NULL;
    mn_questions all = { 0 };
    mn_choice_result got;
    mn_choice_options how = { 0 };
    mn_status st = by_hand(&model);
    if (st == MN_OK) st = mn_tokenizer_chars(&tokenizer, letters, strlen(letters));
    if (st == MN_OK) st = mn_context_create(&context, NULL);
    if (st == MN_OK) st = mn_questions_parse(&all, questions, strlen(questions), "q.jsonl");
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    assert_int_equal(mn_tokenizer_size(tokenizer), 8);
    assert_int_equal(all.count, 4);
    assert_int_equal(all.at[1].line, 3);
    CHECK(mn_choice_measure(&got, context, model, tokenizer, &all, &how) == MN_OK, "%s",
          mn_last_error());
    CHECK(got.questions == 4 && got.accuracy == 1.0 && got.accuracy_error == 0.0, "accuracy %g",
          got.accuracy);
    CHECK(got.normalised == 0.75 && fabs(got.normalised_error - 0.25) < 1e-12,
          "normalised %g +- %g", got.normalised, got.normalised_error);
    CHECK(fabs(got.chance - (1.5 + 1.0 / 3.0) / 4.0) < 1e-12, "chance %g", got.chance);
    how.max_questions = 1;
    all.at[0].answer = 0;
    CHECK(mn_choice_measure(&got, context, model, tokenizer, &all, &how) == MN_OK, "%s",
          mn_last_error());
    CHECK(got.questions == 1 && got.accuracy == 0.0 && isnan(got.accuracy_error), "one question");
    /* an empty context needs a token that begins texts, which single letters do not have */
    all.at[0].context[0] = '\0';
    assert_fails(mn_choice_measure(&got, context, model, tokenizer, &all, &how), MN_ERR_ARGUMENT,
                 "line 1", "empty");
    mn_questions_free(&all);
    mn_tokenizer_destroy(tokenizer);
    mn_model_destroy(model);
    mn_context_destroy(context);
    check_done();
}

/* Scores against log probabilities by one pass per choice, on a model with memory: the picks of
 * random questions must be those of the larger sum. */
static void choices_are_direct(void **state) {
    (void)state;
    fixture f;
    mn_tokenizer *tokenizer = NULL;
    mn_questions all = { 0 };
    if (open(&f, "bayes, attention", MN_F32)) {
        static const char alphabet[] = " abcdefghijkl";
        char text[8192] = "";
        assert_int_equal(mn_tokenizer_chars(&tokenizer, alphabet, strlen(alphabet)), MN_OK);
        int64_t want[2] = { 0, 0 };
        for (int q = 0; q < 30; q++) {
            char line[3][16];
            double best[2] = { -INFINITY, -INFINITY };
            int picked[2] = { 0, 0 };
            for (int i = 0; i < 3; i++) {
                int32_t ids[12];
                const int n = i ? 2 + (q + i) % 4 : 9;
                model_case_tokens(ids, n, 12, (uint64_t)(100 * (i ? q * 3 + i : q) + i));
                for (int k = 0; k < n; k++) line[i][k] = (char)('a' + ids[k]);
                line[i][n] = '\0';
            }
            for (int i = 1; i < 3; i++) {
                int32_t ids[32];
                int n = 0;
                for (const char *c = line[0]; *c; c++) ids[n++] = *c - 'a' + 1;
                ids[n++] = 0;
                for (const char *c = line[i]; *c; c++) ids[n++] = *c - 'a' + 1;
                double *logits = logits_of(&f, ids, n), sum = 0.0;
                for (int t = 9; t < n; t++) {
                    sum += log_probability(logits + (t - 1) * VOCABULARY, ids[t]);
                }
                free(logits);
                const double each[2] = { sum, sum / (double)strlen(line[i]) };
                for (int way = 0; way < 2; way++) {
                    if (each[way] > best[way]) picked[way] = i - 1, best[way] = each[way];
                }
            }
            for (int way = 0; way < 2; way++) want[way] += picked[way] == q % 2;
            const size_t used = strlen(text);
            snprintf(text + used, sizeof text - used, "{\"context\": \"%s\", \"choices\": [\"%s\", "
                     "\"%s\"], \"answer\": %d}\n", line[0], line[1], line[2], q % 2);
        }
        mn_choice_result got;
        const mn_choice_options how = { 0 };
        mn_status st = mn_questions_parse(&all, text, strlen(text), "q");
        if (st == MN_OK) {
            st = mn_choice_measure(&got, f.context, f.model, tokenizer, &all, &how);
        }
        if (CHECK(st == MN_OK, "%s", mn_last_error())) {
            CHECK(got.accuracy == (double)want[0] / 30.0, "%g, not %g", got.accuracy,
                  (double)want[0] / 30.0);
            CHECK(got.normalised == (double)want[1] / 30.0, "%g, not %g", got.normalised,
                  (double)want[1] / 30.0);
        }
    }
    mn_questions_free(&all);
    mn_tokenizer_destroy(tokenizer);
    finish(&f);
    check_done();
}

static void wrong_questions(void **state) {
    (void)state;
    static const struct {
        const char *text, *says[2];
    } wrong[] = {
        { "", { "q.jsonl", "no question" } },
        { "\n \n", { "no question", "" } },
        { "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 0}\nnot json",
          { "line 2", "" } },
        { "[1]", { "line 1", "object" } },
        { "{\"text\": \"a\"}", { "context", "endings" } },
        { "{\"context\": \"a\", \"choices\": [\"b\"], \"answer\": 0}", { "choices", "two" } },
        { "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 2}", { "answer", "1" } },
        { "{\"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": -1}", { "answer", "1" } },
        { "{\"context\": \"a\", \"choices\": [\"b\", \"c\"]}", { "answer", "" } },
        { "{\"ctx\": \"a\", \"endings\": [\"b\", \"c\"], \"label\": \"\"}", { "label", "" } },
        { "{\"context\": \"a\", \"choices\": [\"b\", 3], \"answer\": 0}", { "choices[1]", "" } },
        { "{\"context\": \"a\", \"choices\": [\"b\", \"\"], \"answer\": 0}",
          { "choices[1]", "empty" } },
        { "{\"context\": 1, \"choices\": [\"b\", \"c\"], \"answer\": 0}", { "context", "" } },
    };
    for (size_t i = 0; i < MN_COUNTOF(wrong); i++) {
        mn_questions all;
        const mn_status st = mn_questions_parse(&all, wrong[i].text, strlen(wrong[i].text),
                                                "q.jsonl");
        const char *says = mn_last_error();
        CHECK(st != MN_OK && !all.at && !all.count, "%s was read", wrong[i].text);
        CHECK(strstr(says, wrong[i].says[0]) && strstr(says, wrong[i].says[1]), "%s: %s",
              wrong[i].text, says);
        mn_questions_free(&all);
    }
    mn_questions all;
    assert_int_equal(mn_questions_load(&all, in_folder("absent.jsonl")), MN_ERR_IO);
    check_done();
}

/* ---- logits ---------------------------------------------------------------------------------- */

/* Four ids, of which the first row has `first`. */
static void check_ids(const char *name, const void *bytes, size_t size, int32_t first) {
    static const int32_t want[] = { 3, 0, 12, 7 };
    mn_token_list ids, ends;
    write_file(in_folder(name), bytes, size);
    const mn_status st = mn_logits_read_ids(&ids, &ends, in_folder(name), VOCABULARY);
    if (!CHECK(st == MN_OK, "%s: %s", name, mn_last_error())) return;
    CHECK(ids.count == 4 && memcmp(ids.ids, want, sizeof want) == 0, "%s: other ids", name);
    CHECK(ends.count == (first < 4 ? 2 : 1) && ends.ids[0] == first &&
              ends.ids[ends.count - 1] == 4,
          "%s: other rows", name);
    mn_token_list_free(&ids);
    mn_token_list_free(&ends);
}

static void ids_of_every_form(void **state) {
    (void)state;
    static const uint16_t bin[] = { 3, 0, 12, 7 };
    int32_t header[256] = { 20240520, 1, 4 };
    char llmc[sizeof header + sizeof bin];
    memcpy(llmc, header, sizeof header);
    memcpy(llmc + sizeof header, bin, sizeof bin);
    check_ids("plain", "3 0\t12\n7\n", 9, 4);
    check_ids("commas", "3,0, 12 ,7", 10, 4);
    check_ids("list", " [3, 0, 12, 7]\n", 15, 4);
    check_ids("rows", "[[3, 0, 12], [7]]", 17, 3);
    check_ids("nano.bin", bin, sizeof bin, 4);
    check_ids("llmc.bin", llmc, sizeof llmc, 4);
    static const struct {
        const char *name, *text, *says[2];
    } wrong[] = { { "a", "3 13 1", { "id 13 at 1", "13" } }, { "b", "3 x", { "byte 2", "" } },
                  { "c", "3 -1", { "byte 2", "" } }, { "d", "[3, 0.5]", { "[1]", "" } },
                  { "e", "[3, -2]", { "id -2", "" } }, { "f", " ", { "no tokens", "" } },
                  { "g", "[]", { "no tokens", "" } }, { "h", "[3", { "h", "" } },
                  { "i", "3 99999999999999999999", { "byte 2", "" } },
                  { "j", "3;4", { "byte 0", "" } },
                  { "k", "[[3], []]", { "row 1", "no tokens" } },
                  { "l", "[[3], 4]", { "[1]", "" } }, { "m", "[3, [4]]", { "[1]", "" } } };
    for (size_t i = 0; i < MN_COUNTOF(wrong); i++) {
        mn_token_list ids, ends;
        write_file(in_folder(wrong[i].name), wrong[i].text, strlen(wrong[i].text));
        const mn_status st = mn_logits_read_ids(&ids, &ends, in_folder(wrong[i].name), VOCABULARY);
        const char *says = mn_last_error();
        CHECK(st != MN_OK && !ids.ids && !ends.ids, "%s was read", wrong[i].text);
        CHECK(strstr(says, wrong[i].says[0]) && strstr(says, wrong[i].says[1]), "%s: %s",
              wrong[i].text, says);
    }
    write_file(in_folder("big.bin"), (uint16_t[]){ 1, 13 }, 4);
    mn_token_list ids, ends;
    assert_fails(mn_logits_read_ids(&ids, &ends, in_folder("big.bin"), VOCABULARY), MN_ERR_FORMAT,
                 "big.bin", "13");
    check_done();
}

static void check_logits(mn_dtype dtype) {
    fixture f;
    mn_safetensors *file = NULL;
    const char *path = in_folder("logits.safetensors");
    if (open(&f, "bayes, attention, kla", dtype)) {
        mn_token_list tokens = { f.tokens, 20, 20 }, ends = { (int32_t[]){ 12, 20 }, 2, 2 };
        mn_status st = mn_logits_write(path, f.context, f.model, &tokens, &ends, 0);
        if (st == MN_OK) st = mn_safetensors_open(&file, path);
        if (st != MN_OK) check_fatal("%s", mn_last_error());
        const mn_stored_tensor *logits = mn_safetensors_find(file, "logits");
        const mn_stored_tensor *variance = mn_safetensors_find(file, "variance");
        if (!logits || !variance) check_fatal("tensors are missing");
        CHECK(logits->shape[0] == 20 && logits->shape[1] == VOCABULARY, "shape");
        CHECK(variance->shape[0] == 2 && variance->shape[1] == 20, "shape of variance");
        double got[20 * VOCABULARY], *first = logits_of(&f, f.tokens, 12);
        double *second = logits_of(&f, f.tokens + 12, 8);
        const size_t bytes = 12 * VOCABULARY * sizeof *got;
        CHECK(mn_safetensors_read_f64(got, logits) == MN_OK, "%s", mn_last_error());
        CHECK(memcmp(got, first, bytes) == 0 &&
                  memcmp(got + 12 * VOCABULARY, second, sizeof got - bytes) == 0,
              "other logits than those of a pass over each row");
        free(first);
        free(second);
        mn_safetensors_close(file);
    }
    finish(&f);
}

static void logits_as_files(void **state) {
    (void)state;
    check_logits(MN_F32);
    check_logits(MN_F64);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(perplexity_is_direct),
        cmocka_unit_test(perplexity_limits),
        cmocka_unit_test(choices_by_hand),
        cmocka_unit_test(choices_are_direct),
        cmocka_unit_test(wrong_questions),
        cmocka_unit_test(ids_of_every_form),
        cmocka_unit_test(logits_as_files),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
