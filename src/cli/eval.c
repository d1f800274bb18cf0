/* eval.c - mneme eval: how well a model foretells text, how often it picks the right continuation,
 * and its logits as a file. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/calibration.h"
#include "cli/eval/eval_task.h"
#include "cli/command.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "eval/choice.h"
#include "eval/logits.h"
#include "eval/perplexity.h"
#include "io/folder.h"
#include "io/json_write.h"
#include "model/checkpoint.h"
#include "tasks/task.h"
#include "train/run/run_folder.h"

enum { MOST_LENGTHS = 64, MOST_SETS = 64 };

typedef struct options {
    const char *model, *choices, *tokens, *logits, *dtype, *split, *device;
    const char **texts, **data;     // of --text and --data, argc at most; texts gets both
    int n_texts;
    bool any_format;                // --data
    int64_t lengths[MOST_LENGTHS], max_tokens, max_questions, per_pass;
    int n_lengths, n_threads;
    const char *task, *sets[MOST_SETS], *save_calibration;
    int64_t rows;                   // --rows
    int n_sets;
    bool calibration, json, quiet, verify;
} options;

static void print_help(void) {
    puts("usage: mneme eval --model DIR [--text FILE...] [--choices FILE] "
         "[--tokens F --logits OUT]\n\n"
         "  --model DIR        a model's folder, or a run's: then its best checkpoint\n"
         "  --text FILE...     perplexity of texts, folders of texts or JSON lines: one row of\n"
         "                     tokens, cut into windows that do not overlap and that each start\n"
         "                     from nothing; what is left at the end is dropped\n"
         "  --data PATH...     the same, also for files of tokens (.bin) and prepared folders\n"
         "  --split S          of prepared folders: train or valid (default: valid)\n"
         "  --lengths L,...    tokens of a window (default 512)\n"
         "  --max-tokens N     look at the first N tokens only\n"
         "  --choices FILE     multiple choice, a question a line: {\"context\", \"choices\": [],\n"
         "                     \"answer\": index}, or as in HellaSwag {\"ctx\", \"endings\",\n"
         "                     \"label\"}: accuracy by log probability, and by that per byte\n"
         "  --max-questions N  the first N questions only\n"
         "  --tokens FILE      token ids: .bin, a JSON list, a list of lists that each start\n"
         "                     from nothing, or numbers and blanks\n"
         "  --logits OUT       write the logits of --tokens to a safetensors file\n"
         "  --per-pass N       read --tokens N at a time; 1: as decoding does\n"
         "  --calibration      of --text or --task: is it sure where it is right? AUROC and\n"
         "                     risk-coverage of entropy, of the posteriors of layers and of both,\n"
         "                     and reliability; every other window chooses and fits\n"
         "  --task NAME        answers to the questions of a task (mneme task), in the model's\n"
         "                     own tokens where the task is text; with --calibration those\n"
         "  --set KEY=VALUE    an option of the task; may be repeated\n"
         "  --rows N           samples of a task, with --calibration windows or samples of each\n"
         "                     half (default 64)\n"
         "  --save-calibration F   what generate --abstain reads\n"
         "  --device D         cpu (default), cuda or cuda:N\n"
         "  --dtype T          f32 (default), f64 on the CPU, bf16 on a GPU\n"
         "  --json             results as one document\n"
         "  --threads N        default: one per core\n"
         "  --verify           check every byte of the model against its seal, not sizes and "
         "heads\n"
         "  --quiet            no progress");
}

/* ---- options --------------------------------------------------------------------------------- */

static int mistake(const char *option, const char *what) {
    return mn_options_mistake("eval", option, what);
}

static bool read_count(int64_t *out, const char *text, const char **end) {
    char *stop = NULL;
    errno = 0;
    const long long value = strtoll(text, &stop, 10);
    if (stop == text || errno || value < 1) return false;
    *out = value;
    *end = stop;
    return true;
}

static bool read_whole(void *to, const char *text) {
    const char *end = "";
    return read_count(to, text, &end) && !*end;
}

static bool read_lengths(void *to, const char *text) {
    options *o = to;
    for (o->n_lengths = 0; o->n_lengths < MOST_LENGTHS; text++) {
        if (!read_count(&o->lengths[o->n_lengths], text, &text)) return false;
        if (o->lengths[o->n_lengths++] < 2) return false;
        if (*text != ',') return *text == '\0';
    }
    return false;
}

static int check(const options *o) {
    if (!o->model) return mistake("--model", "is missing: name a folder");
    if (!o->tokens != !o->logits) return mistake("--tokens", "and --logits go together");
    if (o->dtype && strcmp(o->dtype, "f32") != 0 && strcmp(o->dtype, "f64") != 0 &&
        strcmp(o->dtype, "bf16") != 0) {
        return mistake("--dtype", "is f32, f64, or bf16 on a GPU");
    }
    if (o->save_calibration && !o->calibration) {
        return mistake("--save-calibration", "needs --calibration");
    }
    if (o->task && o->n_texts > 0) return mistake("--task", "and --text are two questions");
    if (o->calibration && !o->task && o->n_texts == 0) {
        return mistake("--calibration", "needs --text, --data or --task");
    }
    if (o->n_texts > 0 || o->choices || o->tokens || o->task) return 0;
    return mistake("--text, --choices or --tokens", "is missing: what is to be measured?");
}

static int parse(options *o, int argc, char **argv) {
    static const char whole[] = "a whole number from 1";
    int n_data = 0;
    const mn_option rows[] = {
        { "--model", .text = &o->model },
        { "--verify", .flag = &o->verify },
        { "--text", .list = o->texts, .n = &o->n_texts, .most = argc, .several = true },
        { "--data", .list = o->data, .n = &n_data, .most = argc, .several = true },
        { "--split", .text = &o->split },
        { "--lengths", .read = read_lengths, .to = o,
          .needs = "whole numbers from 2, with commas between them" },
        { "--max-tokens", .read = read_whole, .to = &o->max_tokens, .needs = whole },
        { "--choices", .text = &o->choices },
        { "--max-questions", .read = read_whole, .to = &o->max_questions, .needs = whole },
        { "--tokens", .text = &o->tokens },
        { "--logits", .text = &o->logits },
        { "--calibration", .flag = &o->calibration },
        { "--task", .text = &o->task },
        { "--set", .list = o->sets, .n = &o->n_sets, .most = MOST_SETS },
        { "--rows", .read = read_whole, .to = &o->rows, .needs = whole },
        { "--save-calibration", .text = &o->save_calibration },
        { "--per-pass", .read = read_whole, .to = &o->per_pass, .needs = whole },
        { "--device", .text = &o->device },
        { "--dtype", .text = &o->dtype },
        { "--threads", .count = &o->n_threads, .low = 1, .high = 256 },
        { "--json", .flag = &o->json },
        { "--quiet", .flag = &o->quiet },
    };
    const int status = mn_options_read(rows, MN_COUNTOF(rows), "eval", argc, argv);
    o->any_format = n_data > 0;
    for (int i = 0; i < n_data; i++) o->texts[o->n_texts++] = o->data[i];
    if (o->n_lengths == 0) o->lengths[o->n_lengths++] = 512;
    return status ? status : check(o);
}

/* ---- measuring ------------------------------------------------------------------------------- */

typedef struct evaluation {
    const options *o;
    mn_context *context;
    mn_model *model;
    mn_tokenizer *tokenizer;     // NULL: the folder has none and none is needed
    json_t *root;
} evaluation;

static bool progress(void *context, int64_t done, int64_t all) {
    (void)all;
    mn_progress_update(context, done, NULL);
    return true;
}

static void end_progress(mn_progress *bar, mn_status st) {
    if (st == MN_OK) mn_progress_finish(bar, NULL);
    else mn_progress_clear(bar);
}

static mn_status open_corpus(mn_corpus **out, const evaluation *e) {
    const options *o = e->o;
    const mn_corpus_options how = {
        .paths = o->texts, .n_paths = o->n_texts, .document_end = MN_DOCUMENT_END_OWN,
        .vocab_size = mn_model_describe(e->model)->vocab_size,
        .split = o->split ? o->split : "valid" };
    return mn_corpus_open(out, &how, e->tokenizer);
}

static void put_perplexity(const evaluation *e, json_t *list, const mn_perplexity *p) {
    const double rate = p->seconds > 0.0 ? (double)p->tokens / p->seconds : 0.0;
    if (!e->o->json) {
        char error[32] = "";
        if (!isnan(p->loss_error)) snprintf(error, sizeof error, "%.4f", p->loss_error);
        printf("%8" PRId64 " %8" PRId64 " %10" PRId64 "  %9.5f %8s  %12.4f  %9.0f\n", p->length,
               p->windows, p->tokens, p->loss, error, p->perplexity, rate);
        fflush(stdout);
        return;
    }
    json_t *row = json_object();
    json_object_set_new(row, "length", json_integer(p->length));
    json_object_set_new(row, "windows", json_integer(p->windows));
    json_object_set_new(row, "tokens", json_integer(p->tokens));
    json_object_set_new(row, "loss", mn_json_real(p->loss));
    json_object_set_new(row, "loss_error", mn_json_real(p->loss_error));
    json_object_set_new(row, "perplexity", mn_json_real(p->perplexity));
    json_object_set_new(row, "tokens_per_second", mn_json_real(rate));
    json_array_append_new(list, row);
}

static mn_status measure_length(const evaluation *e, const mn_corpus *corpus, int64_t length,
                                json_t *list) {
    char title[64];
    mn_progress bar;
    mn_perplexity result;
    int64_t windows = 0;
    mn_perplexity_options how = { .length = length, .max_tokens = e->o->max_tokens,
                                  .progress = progress, .context = &bar };
    mn_status st = mn_perplexity_windows(&windows, corpus, &how);
    if (st != MN_OK) return st;
    snprintf(title, sizeof title, "perplexity at %" PRId64, length);
    mn_progress_start(&bar, title, "tokens", 0, windows * (length - 1), e->o->quiet);
    st = mn_perplexity_measure(&result, e->context, e->model, corpus, &how);
    end_progress(&bar, st);
    if (st == MN_OK) put_perplexity(e, list, &result);
    return st;
}

static mn_status measure_text(const evaluation *e) {
    const options *o = e->o;
    mn_corpus *corpus = NULL;
    json_t *list = json_array();
    mn_status st = open_corpus(&corpus, e);
    for (int i = 0; i < o->n_lengths && st == MN_OK; i++) {    // all that cannot be, before any
        int64_t windows;
        const mn_perplexity_options how = { .length = o->lengths[i], .max_tokens = o->max_tokens };
        st = mn_perplexity_windows(&windows, corpus, &how);
    }
    if (st == MN_OK && !o->json) {
        printf("%8s %8s %10s  %9s %8s  %12s  %9s\n", "length", "windows", "tokens", "loss", "+-",
               "perplexity", "tokens/s");
    }
    for (int i = 0; i < o->n_lengths && st == MN_OK; i++) {
        st = measure_length(e, corpus, o->lengths[i], list);
    }
    mn_corpus_destroy(corpus);
    json_object_set_new(e->root, "perplexity", list);
    return st;
}

static mn_status measure_calibration(const evaluation *e) {
    const options *o = e->o;
    mn_json changes = { .value = json_object(), .name = "options" };
    mn_corpus *corpus = NULL;
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < o->n_sets; i++) st = mn_task_set(&changes, o->sets[i]);
    if (st == MN_OK && o->n_texts > 0) st = open_corpus(&corpus, e);
    const mn_calibration_ask ask = {
        .corpus = corpus, .task = o->task, .task_options = &changes, .length = o->lengths[0],
        .rows = o->rows ? o->rows : 64, .save = o->save_calibration, .quiet = o->quiet,
        .json = o->json };
    if (st == MN_OK) st = mn_calibration_measure(e->root, e->context, e->model, &ask);
    mn_corpus_destroy(corpus);
    json_decref(changes.value);
    return st;
}

static mn_status measure_task(const evaluation *e) {
    const options *o = e->o;
    mn_json changes = { .value = json_object(), .name = "options" };
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < o->n_sets; i++) st = mn_task_set(&changes, o->sets[i]);
    const mn_eval_task_ask ask = { .task = o->task, .model = o->model, .options = changes.value,
                                   .rows = o->rows ? o->rows : 64, .json = o->json };
    if (st == MN_OK) st = mn_eval_task(e->root, e->context, e->model, &ask);
    json_decref(changes.value);
    return st;
}

static void put_choices(const evaluation *e, const mn_choice_result *r) {
    if (!e->o->json) {
        printf("%" PRId64 " questions: accuracy %.4f +- %.4f, by byte %.4f +- %.4f, chance %.4f; "
               "%.0f tokens/s\n", r->questions, r->accuracy, r->accuracy_error, r->normalised,
               r->normalised_error, r->chance,
               r->seconds > 0.0 ? (double)r->tokens / r->seconds : 0.0);
        return;
    }
    json_t *out = json_object();
    json_object_set_new(out, "questions", json_integer(r->questions));
    json_object_set_new(out, "acc", mn_json_real(r->accuracy));
    json_object_set_new(out, "acc_stderr", mn_json_real(r->accuracy_error));
    json_object_set_new(out, "acc_norm", mn_json_real(r->normalised));
    json_object_set_new(out, "acc_norm_stderr", mn_json_real(r->normalised_error));
    json_object_set_new(out, "chance", mn_json_real(r->chance));
    json_object_set_new(e->root, "choices", out);
}

static mn_status measure_choices(const evaluation *e) {
    mn_questions questions;
    mn_choice_result result;
    mn_progress bar;
    const mn_choice_options how = { .max_questions = e->o->max_questions, .progress = progress,
                                    .context = &bar };
    mn_status st = mn_questions_load(&questions, e->o->choices);
    if (st != MN_OK) return st;
    const int64_t all = how.max_questions ? mn_min(how.max_questions, questions.count)
                                          : questions.count;
    mn_progress_start(&bar, "choices", "questions", 0, all, e->o->quiet);
    st = mn_choice_measure(&result, e->context, e->model, e->tokenizer, &questions, &how);
    end_progress(&bar, st);
    if (st == MN_OK) put_choices(e, &result);
    mn_questions_free(&questions);
    return st;
}

static mn_status write_logits(const evaluation *e) {
    mn_token_list tokens, ends;
    const int64_t V = mn_model_describe(e->model)->vocab_size;
    mn_status st = mn_logits_read_ids(&tokens, &ends, e->o->tokens, V);
    if (st != MN_OK) return st;
    if (e->o->max_tokens) tokens.count = mn_min(tokens.count, e->o->max_tokens);
    while (ends.count > 1 && ends.ids[ends.count - 2] >= tokens.count) ends.count--;
    ends.ids[ends.count - 1] = (int32_t)tokens.count;
    st = mn_folder_make_above(e->o->logits);
    if (st == MN_OK) {
        st = mn_logits_write(e->o->logits, e->context, e->model, &tokens, &ends, e->o->per_pass);
    }
    if (st == MN_OK && !e->o->json) {
        printf("wrote %s: logits of %" PRId64 " tokens, %" PRId64 " each\n", e->o->logits,
               tokens.count, V);
    }
    if (st == MN_OK) {
        json_object_set_new(e->root, "logits", json_string(e->o->logits));
        json_object_set_new(e->root, "logits_tokens", json_integer(tokens.count));
    }
    mn_token_list_free(&tokens);
    mn_token_list_free(&ends);
    return st;
}

/* Files of tokens need no tokenizer, and a prepared folder brings its own rules; text needs one. */
static mn_status open_tokenizer(evaluation *e) {
    const bool text = e->o->choices || (e->o->n_texts > 0 && !e->o->any_format);
    if (!text && e->o->n_texts == 0) return MN_OK;
    const mn_status st = mn_tokenizer_load(&e->tokenizer, e->o->model);
    return text ? st : MN_OK;
}

static mn_status print_json(const evaluation *e) {
    char *text = NULL;
    const mn_status st = mn_json_text(&text, e->root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    return st;
}

static mn_status evaluate(const options *o) {
    evaluation e = { .o = o, .root = json_object() };
    const mn_context_options how = { .n_threads = o->n_threads, .device = o->device };
    mn_dtype dtype = MN_F32;
    if (o->dtype) mn_dtype_parse(&dtype, o->dtype);
    json_object_set_new(e.root, "model", json_string(o->model));
    mn_status st = mn_context_create(&e.context, &how);
    if (st == MN_OK && dtype == MN_BF16 && !o->device) {
        st = mn_fail(MN_ERR_UNSUPPORTED, "bf16 runs on GPUs only; add --device cuda");
    }
    if (st == MN_OK) st = mn_run_check_model(o->model, o->verify);
    if (st == MN_OK) {
        st = mn_checkpoint_load(&e.model, o->model, dtype == MN_BF16 ? MN_F32 : dtype);
    }
    if (st == MN_OK) st = mn_model_place(e.model, e.context, dtype);
    if (st == MN_OK) st = open_tokenizer(&e);
    if (st == MN_OK && o->calibration) st = measure_calibration(&e);
    if (st == MN_OK && o->task && !o->calibration) st = measure_task(&e);
    if (st == MN_OK && o->n_texts > 0 && !o->calibration) st = measure_text(&e);
    if (st == MN_OK && o->choices) st = measure_choices(&e);
    if (st == MN_OK && o->tokens) st = write_logits(&e);
    if (st == MN_OK && o->json) st = print_json(&e);
    if (st == MN_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        st = mn_fail(MN_ERR_IO, "standard output cannot be written");
    }
    json_decref(e.root);
    mn_tokenizer_destroy(e.tokenizer);
    mn_model_destroy(e.model);
    mn_context_destroy(e.context);
    return st;
}

int mn_command_eval(int argc, char **argv) {
    options o = { 0 };
    o.texts = calloc(2 * (size_t)argc, sizeof *o.texts);
    o.data = o.texts ? o.texts + argc : NULL;
    int status = o.texts ? parse(&o, argc, argv) : 2;
    if (status < 0) print_help();
    if (status == 0 && evaluate(&o) != MN_OK) {
        fflush(stdout);
        fprintf(stderr, "mneme eval: %s\n", mn_last_error());
        status = 1;
    }
    free(o.texts);
    return status < 0 ? 0 : status;
}
