/* train.c - mneme bench train: whole training steps, each timed between two matrix products
 * that say what the machine could do at that moment. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/bench/bench.h"
#include "cli/machine.h"
#include "cli/bench/sgemm.h"
#include "io/json_write.h"
#include "model/model.h"
#include "optim/optim.h"

typedef struct train_case {
    const char *name, *layers;
    int64_t n_layers, width;
    const char *mlp;
    int64_t vocabulary, batch, context;
    double asked;
} train_case;

static const train_case cases[] = {
#define TRAIN_CASE(name, layers, n_layers, width, mlp, vocabulary, batch, context, asked)          \
    { name, layers, n_layers, width, mlp, vocabulary, batch, context, asked },
#include "cli/bench/train.def"
};

/* What a step of a case needs. */
typedef struct rig {
    mn_model *model;
    mn_tape *tape;
    mn_optimizer *optimizer;
    int32_t *tokens;
} rig;

enum { MAX_RUNS = 64 };

typedef struct result {
    const train_case *of;
    int64_t parameters;
    double step, least, ceiling, tokens_per_second, share;    // medians; least: shortest step
    double forward, backward, update;                         // medians, seconds
    double mebibytes;
} result;

static mn_status make_model(mn_model **out, const train_case *c) {
    char json[512];
    snprintf(json, sizeof json, "{\"layers\": \"%s\", \"num_hidden_layers\": %lld, "
             "\"hidden_size\": %lld, \"mlp\": \"%s\", \"vocab_size\": %lld, "
             "\"tie_word_embeddings\": true, \"max_position_embeddings\": %lld}", c->layers,
             (long long)c->n_layers, (long long)c->width, c->mlp, (long long)c->vocabulary,
             (long long)c->context);
    mn_json root = { 0 };
    mn_model_config config = { 0 };
    mn_status st = mn_json_parse(&root, json, strlen(json), c->name, MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_model_config_read(&config, &root);
    if (st == MN_OK) st = mn_model_create(out, &config, MN_F32);
    mn_model_config_free(&config);
    mn_json_free(&root);
    return st;
}

static mn_status make_optimizer(mn_optimizer **out, mn_model *model) {
    const int n = mn_model_params(model);
    mn_optim_param *params = calloc((size_t)n, sizeof *params);
    if (!params) return mn_fail(MN_ERR_MEMORY, "no memory for an optimiser");
    for (int i = 0; i < n; i++) {
        const mn_model_param *p = mn_model_param_at(model, i);
        params[i] = (mn_optim_param){ p->name, p->value, p->grad, p->info.count, 1.0, true,
                                      p->shadow };
    }
    const mn_adamw_options how = { 0.9, 0.99, 1e-8, 0.1 };
    const mn_status st = mn_optimizer_create(out, params, n, &how);
    free(params);
    return st;
}

static mn_status open_rig(rig *r, const train_case *c, mn_context *context) {
    mn_status st = make_model(&r->model, c);
    if (st == MN_OK) st = mn_model_want_gradients(r->model);
    if (st != MN_OK) return st;
    mn_model_start(r->model, context, 1);
    st = make_optimizer(&r->optimizer, r->model);
    if (st == MN_OK) st = mn_tape_create(&r->tape, context, MN_F32);
    const int64_t n = c->batch * c->context;
    r->tokens = calloc((size_t)n + 1, sizeof *r->tokens);
    if (st == MN_OK && !r->tokens) st = mn_fail(MN_ERR_MEMORY, "no memory for tokens");
    for (int64_t i = 0; st == MN_OK && i <= n; i++) {
        r->tokens[i] = (int32_t)(mn_rng_bits(1, 2, (uint64_t)i) % (uint64_t)c->vocabulary);
    }
    return st;
}

static void close_rig(rig *r) {
    mn_tape_destroy(r->tape);
    mn_optimizer_destroy(r->optimizer);
    mn_model_destroy(r->model);
    free(r->tokens);
}

/* One step; times[0..2]: forward, backward, update. */
static mn_status step(rig *r, const train_case *c, mn_context *context, int64_t number,
                      double times[3]) {
    const double start = mn_seconds();
    double loss;
    int64_t counted;
    const mn_model_input in = { .tokens = r->tokens, .B = c->batch, .T = c->context };
    mn_tape_start(r->tape, MN_TAPE_RECORD);
    mn_tensor *hidden = mn_model_hidden(r->model, r->tape, &in);
    mn_model_loss(r->model, r->tape, hidden, r->tokens + 1, (mn_loss_options){ 0 }, &loss,
                  &counted);
    const double middle = mn_seconds();
    mn_status st = mn_tape_status(r->tape);
    if (st == MN_OK) st = mn_tape_backward(r->tape);
    mn_model_settle_gradients(r->model);
    const double after = mn_seconds();
    if (st == MN_OK) {
        const double norm = mn_optimizer_grad_norm(r->optimizer, context);
        st = mn_optimizer_step(r->optimizer, context, number, 1e-4, fmin(1.0, 1.0 / norm));
    }
    times[0] = middle - start;
    times[1] = after - middle;
    times[2] = mn_seconds() - after;
    return st;
}

static mn_status measure(result *out, const train_case *c, mn_context *context, int n_runs) {
    rig r = { 0 };
    double all[MAX_RUNS], share[MAX_RUNS], ceiling[MAX_RUNS], parts[3][MAX_RUNS], times[3];
    mn_status st = open_rig(&r, c, context);
    if (st == MN_OK) st = step(&r, c, context, 0, times);    // takes its memory
    const double tokens = (double)(c->batch * c->context);
    const double work = st == MN_OK ? mn_model_flops(r.model, c->context) * tokens : 0.0;
    const int threads = mn_context_threads(context);
    for (int i = 0; st == MN_OK && i < n_runs; i++) {
        const double before = mn_sgemm_rate(threads);
        st = step(&r, c, context, i + 1, times);
        ceiling[i] = 0.5 * (before + mn_sgemm_rate(threads));
        all[i] = times[0] + times[1] + times[2];
        for (int k = 0; k < 3; k++) parts[k][i] = times[k];
        share[i] = work / all[i] / ceiling[i];
    }
    if (st == MN_OK) {
        *out = (result){ .of = c, .parameters = mn_model_count(r.model),
                         .step = mn_bench_median(all, n_runs),
                         .share = mn_bench_median(share, n_runs),
                         .ceiling = mn_bench_median(ceiling, n_runs),
                         .forward = mn_bench_median(parts[0], n_runs),
                         .backward = mn_bench_median(parts[1], n_runs),
                         .update = mn_bench_median(parts[2], n_runs),
                         .mebibytes = (double)mn_tape_bytes(r.tape) / 1048576.0 };
        out->least = all[0];    // sorted by median
        out->tokens_per_second = tokens / out->step;
    }
    close_rig(&r);
    return st;
}

static void print(const result *r) {
    const train_case *c = r->of;
    printf("%-22s %7.2fM %3lld x %-4lld %8.1f ms %8.1f + %6.1f + %5.1f %9.0f tok/s %5.2f", c->name,
           (double)r->parameters * 1e-6, (long long)c->batch, (long long)c->context,
           1e3 * r->step, 1e3 * r->forward, 1e3 * r->backward, 1e3 * r->update,
           r->tokens_per_second, r->share);
    if (c->asked > 0.0) printf("  asked %.2f%s", c->asked, r->share >= c->asked ? "" : " SHORT");
    putchar('\n');
    fflush(stdout);
}

static json_t *as_json(const result *r) {
    const train_case *c = r->of;
    return json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, "
                     "s:o}", "name", c->name, "layers", c->layers,
                     "n_layers", (json_int_t)c->n_layers, "width", (json_int_t)c->width,
                     "batch", (json_int_t)c->batch, "context", (json_int_t)c->context,
                     "parameters", (json_int_t)r->parameters,
                     "step_seconds", mn_json_real(r->step), "least_seconds", mn_json_real(r->least),
                     "forward_seconds", mn_json_real(r->forward),
                     "backward_seconds", mn_json_real(r->backward),
                     "update_seconds", mn_json_real(r->update),
                     "tokens_per_second", mn_json_real(r->tokens_per_second),
                     "sgemm_flops", mn_json_real(r->ceiling), "share", mn_json_real(r->share),
                     "step_mebibytes", mn_json_real(r->mebibytes));
}

static mn_status report_json(const result *results, int n, const mn_context *context) {
    char cpu[256], *text = NULL;
    mn_machine_cpu(cpu, sizeof cpu);
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, as_json(&results[i]));
    json_t *root = json_pack("{s:s, s:s, s:s, s:i, s:o}", "version", mn_version(), "cpu", cpu,
                             "target", mn_context_target(context),
                             "threads", mn_context_threads(context), "cases", list);
    const mn_status st = mn_json_text(&text, root, MN_JSON_PRETTY);
    if (st == MN_OK) puts(text);
    free(text);
    json_decref(root);
    return st;
}

int mn_bench_train(const mn_bench_options *options, const char *only, bool json, bool list) {
    if (options->device) return mn_bench_train_gpu(options, only, json, list);
    result results[MN_COUNTOF(cases)];
    int n = 0, n_failed = 0, n_chosen = 0;
    mn_context *context;
    const mn_context_options how = { .n_threads = options->n_threads,
                                     .target = options->target };
    mn_status st = mn_context_create(&context, &how);
    if (st == MN_OK && !json && !list) {
        printf("a training step: forward + backward + update; share of sgemm on %d threads\n",
               mn_context_threads(context));
    }
    for (size_t i = 0; st == MN_OK && i < MN_COUNTOF(cases); i++) {
        if (only && !strstr(cases[i].name, only)) continue;
        n_chosen++;
        if (list) {
            puts(cases[i].name);
            continue;
        }
        train_case c = cases[i];
        const bool quick = options->scale == MN_BENCH_QUICK;
        if (quick) {
            c.n_layers = 1;
            c.width = 64;
            c.context = mn_min(c.context, 64);
        }
        const int runs = options->n_runs ? (int)mn_min(options->n_runs, MAX_RUNS) : quick ? 2 : 9;
        if (measure(&results[n], &c, context, runs) != MN_OK) {
            fprintf(stderr, "mneme bench: %s: %s\n", c.name, mn_last_error());
            n_failed++;
            continue;
        }
        results[n].of = &cases[i];
        if (!json) print(&results[n]);
        n++;
    }
    if (st == MN_OK && n_chosen == 0) {
        fprintf(stderr, "mneme bench: no case is called like \"%s\"; --list names them\n", only);
        n_failed = 2;
    }
    if (st == MN_OK && json) st = report_json(results, n, context);
    mn_context_destroy(context);
    if (st != MN_OK) fprintf(stderr, "mneme bench: %s\n", mn_last_error());
    return st != MN_OK ? 2 : n_failed;
}
