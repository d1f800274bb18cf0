/* train_gpu.c - mneme bench train --device cuda: whole models on a GPU, by the code that
 * mneme train and sessions run.
 *
 * Each case is a process's worth of work: a context and a trainer of its own, from nothing to the
 * first step, then steps that are timed by the clock of the host, which waits once for each; then a
 * session on the same parameters reads and writes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/bench/bench.h"
#include "infer/session.h"
#include "io/json_write.h"
#include "model/quant.h"
#include "train/trainer.h"

typedef struct train_case {
    const char *name, *model, *recompute;
    int64_t batch, context;
    double asked, asked_gib;
    bool infers_only;
} train_case;

static const train_case cases[] = {
#define TRAIN_CASE(name, model, recompute, batch, context, asked, asked_gib)                       \
    { name, model, recompute, batch, context, asked, asked_gib, false },
#include "cli/bench/train_cuda.def"
#define INFER_CASE(name, model) { name, model, "none", 1, 4096, 0, 0, true },
#include "cli/bench/infer_cuda.def"
};

enum { VOCABULARY = 32000, QUICK_VOCABULARY = 512, MAX_RUNS = 64, WARM = 3, PREFILL = 4096 };

typedef struct result {
    const train_case *of;
    int64_t parameters;
    double first, step, least, tokens_per_second, flops;    // seconds; operations a second
    double loss;
    double predicted, peak;                                 // mebibytes
    double prefill, decode;                                 // seconds of 4096 tokens, of one
    double batch;                                           // of one for each of a batch; 0: none
} result;

/* ---- a case ---------------------------------------------------------------------------------- */

/* Tokens drawn for a step; targets are the next ones. */
static mn_status fill(void *context, int64_t step, int64_t rows, int64_t length, int32_t *tokens,
                      int32_t *targets) {
    const int64_t vocabulary = *(const int64_t *)context;
    for (int64_t i = 0; i <= rows * length; i++) {
        const uint64_t bits = mn_rng_bits(1, (uint64_t)step, (uint64_t)i);
        const int32_t token = (int32_t)(bits % (uint64_t)vocabulary);
        if (i < rows * length) tokens[i] = token;
        if (i > 0) targets[i - 1] = token;
    }
    return MN_OK;
}

static mn_status configure(mn_json *root, const train_case *c, const mn_bench_options *o) {
    const bool quick = o->scale == MN_BENCH_QUICK;
    const int n_layers = o->n_layers > 0 ? o->n_layers : quick ? 2 : 24;
    char text[1024];
    snprintf(text, sizeof text,
             "{\"model\": {%s, \"num_hidden_layers\": %d, \"hidden_size\": 1024, "
             "\"intermediate_size\": %d, \"mlp\": \"swiglu\", \"vocab_size\": %d, "
             "\"tie_word_embeddings\": false}, \"train\": {\"batch\": %lld, \"context\": %lld, "
             "\"steps\": 1000, \"warmup\": 10, \"lr\": 3e-4, \"dtype\": \"%s\", "
             "\"recompute\": \"%s\"}}", c->model, n_layers, quick ? 256 : 2816,
             quick ? QUICK_VOCABULARY : VOCABULARY, (long long)c->batch, (long long)c->context,
             mn_dtype_name(o->dtype), c->recompute);
    return mn_json_parse(root, text, strlen(text), c->name, MN_JSON_STANDARD);
}

static double mebibytes(size_t bytes) {
    return (double)bytes / 1048576.0;
}

/* Steps after some that record what later ones play. */
static mn_status time_steps(result *r, mn_trainer *trainer, int n_runs) {
    double seconds[MAX_RUNS];
    mn_step_result step;
    mn_status st = MN_OK;
    for (int i = 1; st == MN_OK && i < WARM; i++) st = mn_trainer_step(trainer, &step);
    for (int i = 0; st == MN_OK && i < n_runs; i++) {
        const double start = mn_seconds();
        st = mn_trainer_step(trainer, &step);
        seconds[i] = mn_seconds() - start;
    }
    if (st != MN_OK) return st;
    const mn_train_options *o = mn_trainer_options(trainer);
    r->loss = step.loss;
    r->step = mn_bench_median(seconds, n_runs);
    r->least = seconds[0];    // sorted by median
    r->tokens_per_second = (double)(o->batch * o->context) / r->step;
    r->flops = mn_model_flops(mn_trainer_model(trainer), o->context) * r->tokens_per_second;
    return MN_OK;
}

/* Reads 4096 tokens at once, the third time with all memory at hand, and behind them one after the
 * other. */
static mn_status time_session(result *r, mn_model *model, mn_context *context, mn_dtype dtype,
                              int n_runs) {
    const int64_t vocabulary = mn_model_describe(model)->vocab_size;
    const mn_session_options how = { .dtype = dtype, .prefill_chunk = PREFILL };
    mn_session *session = NULL;
    int32_t *tokens = malloc(PREFILL * sizeof *tokens);
    if (!tokens) return mn_fail(MN_ERR_MEMORY, "no memory for tokens");
    for (int64_t i = 0; i < PREFILL; i++) {
        tokens[i] = (int32_t)(mn_rng_bits(2, 0, (uint64_t)i) % (uint64_t)vocabulary);
    }
    mn_status st = mn_session_create(&session, context, model, &how);
    for (int i = 0; st == MN_OK && i < 3; i++) {
        st = mn_session_reset(session);
        const double start = mn_seconds();
        if (st == MN_OK) st = mn_session_feed(session, tokens, PREFILL);
        r->prefill = mn_seconds() - start;
    }
    const int n = 8 * n_runs;
    double start = mn_seconds();
    for (int i = -4; st == MN_OK && i < n; i++) {
        if (i == 0) start = mn_seconds();
        st = mn_session_step(session, tokens[i + 4]);
    }
    r->decode = (mn_seconds() - start) / (double)n;
    mn_session_destroy(session);
    free(tokens);
    return st;
}

/* Steps of a batch, each session with a short prompt of its own behind it. */
static mn_status step_batch(result *r, mn_context *context, mn_model *model,
                            mn_session *const *sessions, int n, int n_runs) {
    const int64_t vocabulary = mn_model_describe(model)->vocab_size;
    int32_t *tokens = calloc((size_t)n, sizeof *tokens);
    mn_batch *batch = NULL;
    mn_status st = tokens ? mn_batch_create(&batch, context, model)
                          : mn_fail(MN_ERR_MEMORY, "no memory for tokens");
    const int steps = 8 * n_runs;
    double start = mn_seconds();
    for (int t = -4; st == MN_OK && t < steps; t++) {
        if (t == 0) start = mn_seconds();
        for (int i = 0; i < n; i++) {
            tokens[i] = (int32_t)(mn_rng_bits(3, (uint64_t)t + 4, (uint64_t)i) %
                                  (uint64_t)vocabulary);
        }
        st = mn_batch_step(batch, sessions, tokens, n);
    }
    r->batch = (mn_seconds() - start) / (double)steps;
    mn_batch_destroy(batch);
    free(tokens);
    return st;
}

static mn_status time_batch(result *r, mn_model *model, mn_context *context,
                            const mn_bench_options *options, int n_runs) {
    enum { PROMPT = 16 };
    const int n = options->streams;
    const mn_session_options how = { .dtype = options->dtype, .prefill_chunk = PROMPT };
    mn_session **sessions = calloc((size_t)n, sizeof *sessions);
    mn_status st = sessions ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for sessions");
    for (int i = 0; i < n && st == MN_OK; i++) {
        int32_t prompt[PROMPT];
        for (int t = 0; t < PROMPT; t++) prompt[t] = (i * PROMPT + t) % 251;
        st = mn_session_create(&sessions[i], context, model, &how);
        if (st == MN_OK) st = mn_session_feed(sessions[i], prompt, PROMPT);
    }
    if (st == MN_OK) st = step_batch(r, context, model, sessions, n, n_runs);
    for (int i = 0; sessions && i < n; i++) mn_session_destroy(sessions[i]);
    free(sessions);
    return st;
}

static mn_status measure(result *r, const train_case *c, const mn_bench_options *options,
                         int n_runs) {
    const bool quick = options->scale == MN_BENCH_QUICK;
    const int64_t vocabulary = quick ? QUICK_VOCABULARY : VOCABULARY;
    const mn_context_options how = { .n_threads = options->n_threads, .device = options->device };
    const double start = mn_seconds();
    mn_context *context = NULL;
    mn_trainer *trainer = NULL;
    mn_json root = { 0 };
    mn_train_memory memory;
    mn_step_result step;
    size_t used = 0;
    const mn_source source = { (void *)&vocabulary, fill, c->batch, c->context, 1000 };
    const mn_train_data data = { .train_source = &source };
    *r = (result){ .of = c };
    mn_status st = mn_context_create(&context, &how);
    if (st == MN_OK) st = configure(&root, c, options);
    if (st == MN_OK) st = mn_trainer_create_from(&trainer, &root, &data, context);
    if (st == MN_OK) st = mn_trainer_predict(trainer, &memory);
    if (st == MN_OK) st = mn_trainer_step(trainer, &step);
    r->first = mn_seconds() - start;
    if (st == MN_OK) st = time_steps(r, trainer, n_runs);
    if (st == MN_OK) st = mn_device_used(context->device, &used);
    if (st == MN_OK) {
        r->parameters = mn_model_count(mn_trainer_model(trainer));
        r->predicted = mebibytes(memory.total);
        r->peak = mebibytes(used);
        st = time_session(r, mn_trainer_model(trainer), context, options->dtype, n_runs);
    }
    mn_trainer_destroy(trainer);
    mn_json_free(&root);
    mn_context_destroy(context);
    return st;
}

static mn_status make_model(mn_model **out, mn_context *context, const mn_json *root) {
    const mn_json keys = mn_json_member(root, "model");
    mn_model_config config = { 0 };
    mn_status st = mn_model_config_read(&config, &keys);
    if (st == MN_OK) st = mn_model_create(out, &config, MN_F32);
    if (st == MN_OK) mn_model_start(*out, context, 1);
    mn_model_config_free(&config);
    return st;
}

static mn_status quantize(mn_model *model, const mn_bench_options *options) {
    const mn_context_options how = { .n_threads = options->n_threads };
    mn_context *cpu = NULL;
    mn_status st = mn_context_create(&cpu, &how);
    if (st == MN_OK) {
        st = mn_model_quantize(model, cpu, &(mn_quant_options){ .bits = options->bits });
    }
    mn_context_destroy(cpu);
    return st;
}

/* A session on a model of its own. */
static mn_status measure_infer(result *r, const train_case *c, const mn_bench_options *options,
                               int n_runs) {
    const mn_context_options how = { .n_threads = options->n_threads, .device = options->device };
    mn_context *context = NULL;
    mn_model *model = NULL;
    mn_json root = { 0 };
    *r = (result){ .of = c };
    mn_status st = mn_context_create(&context, &how);
    if (st == MN_OK) st = configure(&root, c, options);
    if (st == MN_OK) st = make_model(&model, context, &root);
    if (st == MN_OK && options->bits) st = quantize(model, options);
    if (st == MN_OK) st = time_session(r, model, context, options->dtype, n_runs);
    if (st == MN_OK && options->streams) st = time_batch(r, model, context, options, n_runs);
    mn_model_destroy(model);
    mn_json_free(&root);
    mn_context_destroy(context);
    return st;
}

/* ---- showing --------------------------------------------------------------------------------- */

static void print_head(const mn_bench_options *options) {
    printf("training steps of whole models in %s on %s; prefill of %d tokens, decoding of one "
           "sequence\n%-20s %7s %10s %8s %8s %9s %9s %8s %8s %8s\n", mn_dtype_name(options->dtype),
           options->device, PREFILL, "model", "params", "batch", "step", "tokens/s", "TFLOP/s",
           "GiB", "of", "first s", "prefill");
}

static void print(const result *r) {
    const train_case *c = r->of;
    printf("%-20s %6.1fM %3lld x %-4lld %6.1f ms %8.0f %9.1f %9.2f %8.2f %8.2f %5.1f ms, decode "
           "%.3f ms", c->name, (double)r->parameters * 1e-6, (long long)c->batch,
           (long long)c->context, 1e3 * r->step, r->tokens_per_second, 1e-12 * r->flops,
           r->peak / 1024.0, r->predicted / 1024.0, r->first, 1e3 * r->prefill, 1e3 * r->decode);
    if (c->asked > 0.0) {
        printf("  asked %.0f/s%s", c->asked, r->tokens_per_second >= c->asked ? "" : " SHORT");
    }
    if (c->asked_gib > 0.0 && r->peak / 1024.0 > c->asked_gib) {
        printf("  above %.0f GiB", c->asked_gib);
    }
    putchar('\n');
    fflush(stdout);
}

static json_t *as_json(const result *r) {
    const train_case *c = r->of;
    return json_pack("{s:s, s:s, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}",
                     "name", c->name, "recompute", c->recompute,
                     "parameters", (json_int_t)r->parameters, "batch", (json_int_t)c->batch,
                     "context", (json_int_t)c->context, "first_step_seconds",
                     mn_json_real(r->first), "step_seconds", mn_json_real(r->step),
                     "least_seconds", mn_json_real(r->least), "tokens_per_second",
                     mn_json_real(r->tokens_per_second), "flops", mn_json_real(r->flops),
                     "peak_mebibytes", mn_json_real(r->peak), "predicted_mebibytes",
                     mn_json_real(r->predicted), "prefill_seconds", mn_json_real(r->prefill),
                     "decode_seconds", mn_json_real(r->decode));
}

static json_t *infer_json(const result *r) {
    json_t *all = json_pack("{s:s, s:i, s:o, s:o}", "name", r->of->name, "prefill_tokens",
                            (int)PREFILL, "prefill_seconds", mn_json_real(r->prefill),
                            "decode_seconds", mn_json_real(r->decode));
    if (r->batch > 0.0) json_object_set_new(all, "batch_seconds", mn_json_real(r->batch));
    return all;
}

static mn_status report_json(const result *results, int n, const mn_bench_options *options,
                             const char *what, json_t *(*entry)(const result *r)) {
    char *text = NULL;
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, entry(&results[i]));
    json_t *root = json_pack("{s:s, s:s, s:s, s:s, s:o}", "bench", what, "version", mn_version(),
                             "device", options->device, "dtype", mn_dtype_name(options->dtype),
                             "cases", list);
    const mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}

static bool chosen(const train_case *c, const char *only) {
    return !only || strstr(c->name, only);
}

static bool trains(const train_case *c, const char *only) {
    return chosen(c, only) && !c->infers_only;
}

int mn_bench_train_gpu(const mn_bench_options *options, const char *only, bool json, bool list) {
    result results[MN_COUNTOF(cases)];
    const bool quick = options->scale == MN_BENCH_QUICK;
    int n = 0, n_failed = 0, n_chosen = 0;
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) n_chosen += trains(&cases[i], only);
    if (n_chosen == 0) {
        fprintf(stderr, "mneme bench: no case is called like \"%s\"; --list names them\n", only);
        return 2;
    }
    if (!json && !list) print_head(options);
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        if (!trains(&cases[i], only)) continue;
        if (list) {
            puts(cases[i].name);
            continue;
        }
        train_case c = cases[i];
        if (quick) c.context = 256;
        const int runs = options->n_runs ? (int)mn_min(options->n_runs, MAX_RUNS) : quick ? 2 : 9;
        if (measure(&results[n], &c, options, runs) != MN_OK) {
            fprintf(stderr, "mneme bench: %s: %s\n", c.name, mn_last_error());
            n_failed++;
            continue;
        }
        results[n].of = &cases[i];
        if (!json) print(&results[n]);
        n++;
    }
    if (json && !list && report_json(results, n, options, "train", as_json) != MN_OK) {
        n_failed++;
    }
    return n_failed > 0;
}

/* Every number of these cases is that of a model whose activations are kept. */
static bool infers(const train_case *c, const char *only) {
    return chosen(c, only) && !strstr(c->name, ".recompute") && !strstr(c->name, ".mlp");
}

int mn_bench_infer_gpu(const mn_bench_options *options, const char *only, bool json, bool list) {
    result results[MN_COUNTOF(cases)];
    int n = 0, n_failed = 0, n_chosen = 0;
    for (size_t i = 0; i < MN_COUNTOF(cases); i++) {
        if (!infers(&cases[i], only)) continue;
        n_chosen++;
        if (list) {
            puts(cases[i].name);
            continue;
        }
        const int runs = options->n_runs ? (int)mn_min(options->n_runs, MAX_RUNS) : 9;
        result *r = &results[n];
        if (measure_infer(r, &cases[i], options, runs) != MN_OK) {
            fprintf(stderr, "mneme bench: %s: %s\n", cases[i].name, mn_last_error());
            n_failed++;
            continue;
        }
        if (!json) {
            printf("%-20s prefill of %d tokens %6.2f ms, decoding %.3f ms a token\n",
                   cases[i].name, PREFILL, 1e3 * r->prefill, 1e3 * r->decode);
            if (r->batch > 0.0) {
                printf("%-20s %d streams %.3f ms a step, %.0f tokens/s\n", "", options->streams,
                       1e3 * r->batch, options->streams / r->batch);
            }
            fflush(stdout);
        }
        n++;
    }
    if (n_chosen == 0) {
        fprintf(stderr, "mneme bench: no case is called like \"%s\"; --list names them\n", only);
        return 2;
    }
    if (json && !list && report_json(results, n, options, "infer", infer_json) != MN_OK) n_failed++;
    return n_failed > 0;
}
