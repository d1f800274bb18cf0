/* decode.c - decoding of one sequence on a CPU, one token after the other, of the same model with
 * weights of float32, 8 and 4 bits: in turn, so that what else the machine does falls on all. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/bench/bench.h"
#include "infer/session.h"
#include "io/json_write.h"
#include "model/quant.h"

enum { KINDS = 3, WARM = 2, TOKENS = 8, RUNS = 9, MOST_RUNS = 64 };

static const char *const names[KINDS] = { "f32", "8 bits", "4 bits" };
static const int bits_of[KINDS] = { 32, 8, 4 };

/* All weights are read for each token, those of the tied table too. */
static const char full[] = "{\"layers\": \"gdn\", \"num_hidden_layers\": 9, \"hidden_size\": 768, "
                           "\"num_heads\": 6, \"head_dim\": 96, \"intermediate_size\": 2048, "
                           "\"vocab_size\": 32000, \"tie_word_embeddings\": true}";
static const char quick[] = "{\"layers\": \"gdn\", \"num_hidden_layers\": 2, \"hidden_size\": 64, "
                            "\"num_heads\": 2, \"intermediate_size\": 128, \"vocab_size\": 256, "
                            "\"tie_word_embeddings\": true}";

typedef struct contender {
    mn_model *model;
    mn_session *session;
    double seconds[MOST_RUNS], rate;    // of TOKENS tokens; tokens a second by their median
    size_t bytes;
} contender;

static mn_status open_contender(contender *c, mn_context *context, const char *text, int bits) {
    mn_json root = { 0 };
    mn_model_config config = { 0 };
    mn_status st = mn_json_parse(&root, text, strlen(text), "the model", MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_model_config_read(&config, &root);
    if (st == MN_OK) st = mn_model_create(&c->model, &config, MN_F32);
    if (st == MN_OK) mn_model_start(c->model, context, 1);
    if (st == MN_OK && bits != 32) {
        st = mn_model_quantize(c->model, context, &(mn_quant_options){ .bits = bits });
    }
    if (st == MN_OK) c->bytes = mn_model_param_bytes(c->model);
    if (st == MN_OK) st = mn_session_create(&c->session, context, c->model, NULL);
    mn_model_config_free(&config);
    mn_json_free(&root);
    return st;
}

static mn_status take_turn(contender *c, int run) {
    const int64_t vocabulary = mn_model_describe(c->model)->vocab_size;
    const double start = mn_seconds();
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < TOKENS; i++) {
        const uint64_t bits = mn_rng_bits(2, (uint64_t)run + WARM, (uint64_t)i);
        st = mn_session_step(c->session, (int32_t)(bits % (uint64_t)vocabulary));
    }
    if (run >= 0) c->seconds[run] = mn_seconds() - start;
    return st;
}

static mn_status measure(contender *all, mn_context *context, const mn_bench_options *options,
                         int n_runs) {
    const char *text = options->scale == MN_BENCH_QUICK ? quick : full;
    mn_status st = MN_OK;
    for (int k = 0; st == MN_OK && k < KINDS; k++) {
        st = open_contender(&all[k], context, text, bits_of[k]);
    }
    for (int run = -WARM; st == MN_OK && run < n_runs; run++) {
        for (int k = 0; st == MN_OK && k < KINDS; k++) st = take_turn(&all[k], run);
    }
    for (int k = 0; st == MN_OK && k < KINDS; k++) {
        all[k].rate = TOKENS / mn_bench_median(all[k].seconds, n_runs);
    }
    return st;
}

static mn_status report_json(const contender *all, mn_context *context) {
    char *text = NULL;
    json_t *list = json_array();
    for (int k = 0; k < KINDS; k++) {
        json_array_append_new(list, json_pack("{s:s, s:I, s:o, s:o}", "weights", names[k], "bytes",
                                              (json_int_t)all[k].bytes, "tokens_per_second",
                                              mn_json_real(all[k].rate), "times_f32",
                                              mn_json_real(all[k].rate / all[0].rate)));
    }
    json_t *root = json_pack("{s:s, s:s, s:s, s:i, s:I, s:o}", "bench", "infer", "version",
                             mn_version(), "target", mn_context_target(context), "threads",
                             mn_context_threads(context), "parameters",
                             (json_int_t)mn_model_count(all[0].model), "cases", list);
    const mn_status st = root ? mn_json_text(&text, root, MN_JSON_PRETTY)
                              : mn_fail(MN_ERR_MEMORY, "no memory for the result");
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}

static void report(const contender *all, mn_context *context) {
    printf("decoding of one sequence, gdn of %.1fM parameters, %s, %d threads\n",
           1e-6 * (double)mn_model_count(all[0].model), mn_context_target(context),
           mn_context_threads(context));
    for (int k = 0; k < KINDS; k++) {
        printf("%-8s %7.1f MB %9.1f tokens/s %6.2f GB/s %6.2f times f32\n", names[k],
               1e-6 * (double)all[k].bytes, all[k].rate,
               1e-9 * (double)all[k].bytes * all[k].rate, all[k].rate / all[0].rate);
    }
}

int mn_bench_infer(const mn_bench_options *options, bool json) {
    const mn_context_options how = { .n_threads = options->n_threads, .target = options->target };
    const int n_runs = options->n_runs ? (int)mn_min(options->n_runs, MOST_RUNS)
                       : options->scale == MN_BENCH_QUICK ? 3 : RUNS;
    contender all[KINDS] = { 0 };
    mn_context *context = NULL;
    mn_status st = mn_context_create(&context, &how);
    if (st == MN_OK) st = measure(all, context, options, n_runs);
    if (st == MN_OK && json) st = report_json(all, context);
    else if (st == MN_OK) report(all, context);
    if (st != MN_OK) fprintf(stderr, "mneme bench: %s\n", mn_last_error());
    for (int k = 0; k < KINDS; k++) {
        mn_session_destroy(all[k].session);
        mn_model_destroy(all[k].model);
    }
    mn_context_destroy(context);
    return st != MN_OK;
}
