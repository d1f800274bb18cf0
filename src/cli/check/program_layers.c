/* program_layers.c - golden files of whole layers (programs.def): the layers of models themselves,
 * their states as tensors whose gradients the files have too. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/util.h"
#include "cli/check/program.h"
#include "layers/family.h"

static const mn_program_layout as_is = { 1, 1, 1, 1, false, false, 0 };

enum { MOST_FIXED = 256 };    // numbers of a parameter that is not learnt

/* What a file calls a parameter, or a piece of the state before and after. */
typedef struct renamed {
    const char *ours, *theirs, *after;
} renamed;

/* A layer of a file. */
typedef struct whole {
    mn_program *p;
    const char *kind;
    char options[512];
    double eps;
    int index, n_layers;
    const renamed *params, *pieces;    // up to one without a name; NULL: none
    mn_shared *shared;
    int n_ends;
    const renamed *named[MN_STATE_PIECES];    // pieces that were made, and what they are at the end
    mn_tensor *ends[MN_STATE_PIECES];
} whole;

static const renamed *row_of(const renamed *rows, const char *name) {
    for (; rows && rows->ours; rows++) {
        if (strcmp(rows->ours, name) == 0) return rows;
    }
    return NULL;
}

/* Sets one more option. */
static void option(whole *w, const char *format, ...) {
    const size_t n = strlen(w->options);
    va_list rest;
    va_start(rest, format);
    w->options[n] = n ? ',' : '{';
    vsnprintf(w->options + n + 1, sizeof w->options - n - 1, format, rest);
    va_end(rest);
}

static mn_tensor *before(void *context, const char *name) {
    const whole *w = context;
    const renamed *row = row_of(w->pieces, name);
    return row ? mn_program_state_in(w->p, row->theirs, as_is) : NULL;
}

static void after(void *context, const char *name, mn_tensor *x) {
    whole *w = context;
    const renamed *row = row_of(w->pieces, name);
    if (!row || w->n_ends == MN_STATE_PIECES) return;
    w->named[w->n_ends] = row;
    w->ends[w->n_ends++] = x;
}

/* Results, once their numbers are there. */
static void results(const whole *w, mn_tensor *y) {
    mn_program_out(w->p, "y", y);
    for (int i = 0; i < w->n_ends; i++) {
        mn_program_state_out(w->p, w->named[i]->after, w->ends[i], as_is);
    }
}

/* Parameter i; one that is not learnt, and in no file, as it starts. */
static mn_tensor *param_in(const whole *w, const mn_layer *layer, int i) {
    const mn_param_info *info = &layer->params[i];
    const renamed *row = row_of(w->params, info->name);
    const int64_t rows = info->rank > 1 ? info->shape[0] : 1, cols = info->count / rows;
    mn_program_layout layout = as_is;
    if (row && row->after) {    // turned in the file
        layout.turned = true, layout.a = cols, layout.b = rows;
    }
    mn_tensor *x = mn_program_param_in(w->p, row ? row->theirs : info->name, rows, cols, layout);
    if (x || mn_tape_status(w->p->tape) != MN_OK) return x;
    if (info->group != MN_GROUP_FROZEN || info->count > MOST_FIXED) {
        return mn_tape_fail(w->p->tape, mn_fail(MN_ERR_FORMAT, "the file has no tensor %s",
                                                info->name));
    }
    double fixed[MOST_FIXED];
    mn_param_start(fixed, MN_F64, info, 0.0, 0, 0, 0, info->count);
    return mn_tape_constant(w->p->tape, (int64_t[]){ 1, 1, rows, cols }, fixed);
}

static mn_status create(mn_layer *out, whole *w, int64_t D, int64_t T) {
    mn_layer_kind kind;
    bool ccq;
    mn_layer_config config;
    mn_json options = { 0 };
    mn_status st = mn_layer_kind_find(&kind, &ccq, w->kind);
    const size_t n = strlen(w->options);
    snprintf(w->options + n, sizeof w->options - n, "}");
    if (st == MN_OK) {
        mn_layer_defaults(&config, kind);
        st = mn_json_parse(&options, w->options, strlen(w->options), w->kind, MN_JSON_STANDARD);
    }
    if (st == MN_OK) st = mn_layer_config_read(&config, kind, &options);
    mn_json_free(&options);
    if (st != MN_OK) return st;
    return mn_layer_create_at(out, w->kind, &config, D, T, w->eps, w->index,
                              mn_max(w->n_layers, w->index + 1));
}

/* Runs the layer on the file's x and gives what it makes. */
static void run_layer(whole *w) {
    mn_program *p = w->p;
    mn_tensor *x = mn_program_in(p, "x"), *params[MN_LAYER_PARAMS];
    mn_layer layer;
    if (!x) return;
    const mn_status st = create(&layer, w, x->shape[3], x->shape[1]);
    if (st != MN_OK) {
        mn_tape_fail(p->tape, st);
        return;
    }
    for (int i = 0; i < layer.n_params; i++) params[i] = param_in(w, &layer, i);
    const mn_state_ends ends = { before, after, w };
    mn_layer_state state = { .ends = &ends };
    mn_forward f = { .tape = p->tape, .layer = &layer, .params = params, .shared = w->shared,
                     .state = w->pieces ? &state : NULL };
    if (mn_tape_status(p->tape) == MN_OK) results(w, mn_layer_forward(&f, x));
}

static int whole_number(const mn_program *p, const char *key) {
    return (int)mn_program_number(p, key, 0.0);
}

static int size_of(const mn_program *p, const char *name, int axis) {
    return (int)mn_program_size(p, name, axis);
}

void mn_program_diff_layer(mn_program *p) {
    whole w = { .p = p, .kind = "diff_attention", .eps = mn_program_number(p, "eps", 1e-5) };
    const double lambda = mn_program_number(p, "lambda_init", 0.2);
    w.index = (int)lround(-log((0.8 - lambda) / 0.6) / 0.3);
    option(&w, "\"num_heads\": %d, \"num_kv_heads\": %d, \"head_dim\": %d",
           whole_number(p, "heads"), whole_number(p, "kv_heads"), size_of(p, "lambda_q1", 0));
    option(&w, "\"rope_theta\": %.17g", mn_program_number(p, "rope_base", 10000.0));
    run_layer(&w);
}

void mn_program_gated_attention(mn_program *p) {
    whole w = { .p = p, .kind = "attention", .eps = mn_program_number(p, "eps", 1e-6) };
    const int d = size_of(p, "q_norm.weight", 0);
    option(&w, "\"num_heads\": %d, \"num_kv_heads\": %d, \"head_dim\": %d",
           whole_number(p, "heads"), whole_number(p, "kv_heads"), d);
    option(&w, "\"use_output_gate\": true, \"qk_rms_norm\": true, \"norm_plus_one\": true");
    option(&w, "\"rope_theta\": %.17g, \"partial_rotary_factor\": %.17g",
           mn_program_number(p, "rope_base", 1e4), mn_program_number(p, "rope_dim", d) / d);
    run_layer(&w);
}

void mn_program_kda(mn_program *p) {
    static const renamed pieces[] = { { "q_conv", "q_tail0", "q_tail" },
                                      { "k_conv", "k_tail0", "k_tail" },
                                      { "v_conv", "v_tail0", "v_tail" },
                                      { "memory", "state0", "state" }, { 0 } };
    whole w = { .p = p, .kind = "kda", .pieces = pieces,
                .eps = mn_program_number(p, "eps", 1e-5) };
    const int H = whole_number(p, "key_heads"), J = whole_number(p, "value_heads");
    const int K = size_of(p, "q_proj.weight", 0) / mn_max(H, 1);
    option(&w, "\"num_heads\": %d, \"num_v_heads\": %d, \"head_dim\": %d", H, J, K);
    option(&w, "\"expand_v\": %.17g, \"lower_bound\": %.17g",
           (double)size_of(p, "o_norm.weight", 0) / K, mn_program_number(p, "lower_bound", 0.0));
    run_layer(&w);
}

void mn_program_qwen_gdn(mn_program *p) {
    static const renamed pieces[] = { { "qkv_conv", "tail0", "tail" },
                                      { "memory", "state0", "state" }, { 0 } };
    static const renamed params[] = { { "o_norm.weight", "norm.weight", NULL }, { 0 } };
    whole w = { .p = p, .kind = "gdn", .pieces = pieces, .params = params,
                .eps = mn_program_number(p, "eps", 1e-6) };
    const bool next = mn_safetensors_find(p->file, "in_proj_qkvz.weight") != NULL;
    const int H = whole_number(p, "key_heads"), J = whole_number(p, "value_heads");
    const int V = size_of(p, "norm.weight", 0);
    option(&w, "\"projections\": \"%s\", \"num_heads\": %d, \"num_v_heads\": %d",
           next ? "qkvz" : "qkv", H, J);
    option(&w, "\"head_dim\": %d, \"v_head_dim\": %d",
           (size_of(p, "conv1d.weight", 0) - J * V) / mn_max(2 * H, 1), V);
    run_layer(&w);
}

void mn_program_lightning(mn_program *p) {
    static const renamed pieces[] = { { "memory", "state0", "state" }, { 0 } };
    whole w = { .p = p, .kind = "lightning", .pieces = pieces,
                .eps = mn_program_number(p, "eps", 1e-6), .index = whole_number(p, "layer"),
                .n_layers = whole_number(p, "n_layers") };
    const int H = whole_number(p, "heads");
    option(&w, "\"num_heads\": %d, \"head_dim\": %d", H,
           size_of(p, "norm.weight", 0) / mn_max(H, 1));
    run_layer(&w);
}

void mn_program_log_linear(mn_program *p) {
    whole w = { .p = p, .kind = "log_linear_mamba2", .eps = mn_program_number(p, "eps", 1e-5) };
    const int H = whole_number(p, "heads"), G = whole_number(p, "groups");
    const int inner = size_of(p, "norm.weight", 0);
    option(&w, "\"num_heads\": %d, \"head_dim\": %d, \"n_groups\": %d, \"state_size\": %d", H,
           inner / mn_max(H, 1), G, (size_of(p, "conv1d.weight", 0) - inner) / mn_max(2 * G, 1));
    option(&w, "\"expand\": %.17g", (double)inner / (double)mn_max(size_of(p, "x", 2), 1));
    run_layer(&w);
}

void mn_program_hawk(mn_program *p) {
    static const renamed pieces[] = { { "conv", "tail0", "tail" }, { "memory", "h0", "h" },
                                      { 0 } };
    static const renamed params[] = {
        { "conv_1d.weight", "conv_1d.w", "turned" }, { "conv_1d.bias", "conv_1d.b", NULL },
        { "rg_lru.recurrent_param", "rg_lru.a_param", NULL },
        { "rg_lru.input_gate_weight", "rg_lru.input_gate.w", NULL },
        { "rg_lru.input_gate_bias", "rg_lru.input_gate.b", NULL },
        { "rg_lru.recurrent_gate_weight", "rg_lru.a_gate.w", NULL },
        { "rg_lru.recurrent_gate_bias", "rg_lru.a_gate.b", NULL }, { 0 },
    };
    whole w = { .p = p, .kind = "rg_lru", .pieces = pieces, .params = params, .eps = 1e-6 };
    option(&w, "\"num_heads\": %d, \"lru_width\": %d, \"conv_size\": %d",
           size_of(p, "rg_lru.a_gate.w", 0), size_of(p, "rg_lru.a_param", 0),
           size_of(p, "conv_1d.w", 0));
    run_layer(&w);
}

/* With `v_first` it is a later layer, whose values are on their way to those; without, the first,
 * which gives them. */
void mn_program_time_mix(mn_program *p) {
    static const renamed pieces[] = { { "time_shift", "last0", "last" },
                                      { "memory", "state0", "state" }, { 0 } };
    const bool later = mn_safetensors_find(p->file, "v_lora.lora.0.weight") != NULL;
    mn_shared shared = { .first_value = later ? mn_program_in(p, "v_first") : NULL };
    whole w = { .p = p, .kind = "rwkv7", .pieces = pieces, .shared = &shared, .index = later,
                .n_layers = 2, .eps = mn_program_number(p, "norm_eps", 1e-5) };
    const int K = whole_number(p, "head_dim");
    option(&w, "\"num_heads\": %d, \"head_dim\": %d", size_of(p, "r_k", 0), K);
    option(&w, "\"decay_low_rank_dim\": %d, \"a_low_rank_dim\": %d, \"gate_low_rank_dim\": %d",
           size_of(p, "w_lora.lora.0.weight", 0), size_of(p, "a_lora.lora.0.weight", 0),
           size_of(p, "g_lora.lora.0.weight", 0));
    if (later) option(&w, "\"v_low_rank_dim\": %d", size_of(p, "v_lora.lora.0.weight", 0));
    run_layer(&w);
    if (!later) mn_program_out(p, "v_first", shared.first_value);
}

void mn_program_channel_mix(mn_program *p) {
    static const renamed pieces[] = { { "channel_shift", "last0", "last" }, { 0 } };
    whole w = { .p = p, .pieces = pieces };
    const mn_state_ends ends = { before, after, &w };
    mn_layer_state state = { .ends = &ends };
    mn_tensor *x = mn_program_in(p, "x"), *by = mn_program_in(p, "x_k");
    mn_tensor *k = mn_channel_mixed(p->tape, &state, x, by, mn_program_in(p, "key.weight"),
                                    "channel_shift");
    results(&w, mn_tape_linear(p->tape, k, mn_program_in(p, "value.weight"), NULL));
}
