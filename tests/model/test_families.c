/* test_families.c - models of other software: written under the names of their family and read back
 * the same; keys that are not understood are named. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/file.h"
#include "io/safetensors.h"
#include "model/checkpoint.h"
#include "support/check.h"
#include "support/folder.h"

#define SIZES "\"vocab_size\": 11, \"hidden_size\": 8, \"num_hidden_layers\": 2"
#define HEADS "\"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"rms_norm_eps\": 1e-5"
#define DELTA "\"layer_types\": [\"linear_attention\", \"full_attention\"], \"head_dim\": 8, "     \
              "\"linear_num_key_heads\": 2, \"linear_num_value_heads\": 4, "                       \
              "\"linear_key_head_dim\": 4, \"linear_value_head_dim\": 3, "                         \
              "\"rope_parameters\": {\"rope_type\": \"default\", \"partial_rotary_factor\": 0.5}"

#define EXPERTS "\"num_experts\": 3, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 4, "   \
                "\"shared_expert_intermediate_size\": 5"

static const struct {
    const char *json, *tensor, *says;    // a tensor of its file, and a piece of its config.json
} families[] = {
    { "{\"model_type\": \"llama\", " SIZES ", " HEADS ", \"attention_bias\": true, "
      "\"mlp_bias\": true, "
      "\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"rope_theta\": 100.0, "
      "\"original_max_position_embeddings\": 16}}",
      "model.layers.1.self_attn.o_proj.bias", "LlamaForCausalLM" },
    { "{\"model_type\": \"qwen3\", " SIZES ", " HEADS ", \"head_dim\": 6}",
      "model.layers.0.self_attn.q_norm.weight", "num_key_value_heads" },
    { "{\"model_type\": \"qwen3\", " SIZES ", " HEADS ", \"head_dim\": 6, \"rope_parameters\": "
      "{\"rope_type\": \"yarn\", \"factor\": 4.0, \"rope_theta\": 100.0, \"beta_fast\": 8, "
      "\"original_max_position_embeddings\": 16}}",
      "model.layers.0.self_attn.q_norm.weight", "original_max_position_embeddings" },
    { "{\"model_type\": \"mamba\", " SIZES ", \"state_size\": 3, \"layer_norm_epsilon\": 1e-5}",
      "backbone.layers.0.mixer.x_proj.weight", "layer_norm_epsilon" },
    { "{\"model_type\": \"mamba2\", " SIZES ", \"state_size\": 3, \"num_heads\": 4, "
      "\"head_dim\": 4, "
      "\"time_step_limit\": [0.01, 0.5]}", "backbone.norm_f.weight", "time_step_limit" },
    { "{\"model_type\": \"mamba2\", " SIZES ", \"state_size\": 3, \"num_heads\": 4, "
      "\"head_dim\": 4, "
      "\"dt_limit\": [0.0, {\"__float__\": \"Infinity\"}]}", "backbone.embeddings.weight",
      "mamba2" },
    { "{\"model_type\": \"log_linear_mamba2\", " SIZES ", \"state_size\": 3, \"num_heads\": 4, "
      "\"head_dim\": 4, "
      "\"dt_limit\": [0.0, {\"__float__\": \"Infinity\"}]}", "backbone.layers.0.mixer_norm.weight",
      "log_linear_mamba2" },
    { "{\"model_type\": \"transformer\", " SIZES ", \"num_heads\": 2, \"qk_norm\": true}",
      "model.layers.0.attn.k_norm.weight", "\"qk_norm\": true" },
    { "{\"model_type\": \"delta_net\", " SIZES ", \"num_heads\": 2, \"expand_k\": 0.5}",
      "model.layers.0.attn.b_proj.weight", "expand_k" },
    { "{\"model_type\": \"bamba\", " SIZES ", " HEADS ", \"attn_layer_indices\": [1], "
      "\"mamba_d_head\": 4, \"mamba_n_heads\": 4, \"mamba_d_state\": 3}",
      "model.layers.0.mamba.A_log", "attn_layer_indices" },
    { "{\"model_type\": \"qwen3_next\", " SIZES ", " HEADS ", " DELTA "}",
      "model.layers.0.linear_attn.in_proj_qkvz.weight", "full_attention" },
    { "{\"model_type\": \"qwen3_5_text\", " SIZES ", " HEADS ", " DELTA "}",
      "model.layers.1.self_attn.q_proj.weight", "linear_key_head_dim" },
    { "{\"model_type\": \"qwen3_5\", \"vision_config\": {}, \"text_config\": {\"model_type\": "
      "\"qwen3_5_text\", " SIZES ", " HEADS ", " DELTA "}}",
      "model.language_model.layers.0.linear_attn.norm.weight", "text_config" },
    { "{\"model_type\": \"gpt2\", \"vocab_size\": 11, \"n_embd\": 8, \"n_layer\": 2, "
      "\"n_head\": 2, \"n_positions\": 16}",
      "transformer.h.1.attn.c_attn.bias", "n_positions" },
    { "{\"model_type\": \"gpt_neox\", " SIZES ", \"num_attention_heads\": 2, "
      "\"rotary_pct\": 0.5}",
      "gpt_neox.layers.0.attention.query_key_value.weight", "rotary_pct" },
    { "{\"model_type\": \"mesa_net\", " SIZES ", \"num_heads\": 2, "
      "\"max_cg_step_training\": 30, \"max_cg_step_decoding\": 30}",
      "model.layers.0.attn.lambda_params", "max_cg_step_training" },
    { "{\"model_type\": \"mla\", " SIZES ", \"num_heads\": 2, \"q_lora_rank\": 4, "
      "\"kv_lora_rank\": 4, \"qk_nope_head_dim\": 4, \"qk_rope_head_dim\": 2, "
      "\"v_head_dim\": 4}",
      "model.layers.1.attn.kv_proj.2.weight", "kv_lora_rank" },
    { "{\"model_type\": \"qwen3_next\", " SIZES ", " HEADS ", " DELTA ", "
      "\"num_experts\": 3, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 4, "
      "\"shared_expert_intermediate_size\": 4, \"mlp_only_layers\": [0]}",
      "model.layers.1.mlp.experts.2.up_proj.weight", "mlp_only_layers" },
    { "{\"model_type\": \"granitemoehybrid\", " SIZES ", " HEADS ", "
      "\"layer_types\": [\"linear_attention\", \"full_attention\"], "
      "\"shared_intermediate_size\": 6, \"mamba_d_head\": 4, \"mamba_n_heads\": 4, "
      "\"mamba_d_state\": 3, \"logits_scaling\": 2.0}",
      "model.layers.0.shared_mlp.input_linear.weight", "logits_scaling" },
    { "{\"model_type\": \"granitemoehybrid\", " SIZES ", " HEADS ", "
      "\"layer_types\": [\"linear_attention\", \"full_attention\"], "
      "\"shared_intermediate_size\": 6, \"intermediate_size\": 4, \"num_local_experts\": 3, "
      "\"num_experts_per_tok\": 2, \"mamba_d_head\": 4, \"mamba_n_heads\": 4, "
      "\"mamba_d_state\": 3}",
      "model.layers.1.block_sparse_moe.input_linear.weight", "num_local_experts" },
    { "{\"model_type\": \"qwen3_5_moe_text\", " SIZES ", " HEADS ", " DELTA ", " EXPERTS "}",
      "model.layers.0.mlp.experts.gate_up_proj", "num_experts_per_tok" },
    { "{\"model_type\": \"qwen3_5_moe\", \"vision_config\": {}, \"text_config\": {\"model_type\": "
      "\"qwen3_5_moe_text\", " SIZES ", " HEADS ", " DELTA ", " EXPERTS "}}",
      "model.language_model.layers.1.mlp.experts.down_proj", "text_config" },
    { "{\"model_type\": \"qwen3_5_text\", " SIZES ", " HEADS ", \"full_attention_interval\": 2, "
      "\"attn_output_gate\": true, \"mtp_num_hidden_layers\": 1, \"head_dim\": 8, "
      "\"linear_num_key_heads\": 2, \"linear_num_value_heads\": 4, "
      "\"linear_key_head_dim\": 4, \"linear_value_head_dim\": 3, "
      "\"rope_parameters\": {\"rope_type\": \"default\", \"mrope_interleaved\": true, "
      "\"mrope_section\": [1, 1, 0]}}",
      "model.layers.1.self_attn.q_proj.weight", "mrope_section" },
    { "{\"model_type\": \"jamba\", " SIZES ", " HEADS ", \"attn_layer_period\": 2, "
      "\"attn_layer_offset\": 1, \"num_experts\": 2, \"num_experts_per_tok\": 1, "
      "\"intermediate_size\": 6, \"mamba_d_state\": 3, \"mamba_dt_rank\": 2}",
      "model.layers.1.feed_forward.router.weight", "attn_layer_period" },
    { "{\"model_type\": \"recurrent_gemma\", \"vocab_size\": 11, \"hidden_size\": 8, "
      "\"num_hidden_layers\": 3, " HEADS ", \"lru_width\": 12, \"attention_window_size\": 3, "
      "\"block_types\": [\"recurrent\", \"recurrent\", \"attention\"], "
      "\"intermediate_size\": 12}",
      "model.layers.1.temporal_block.rg_lru.input_gate_weight", "attention_window_size" },
    { "{\"model_type\": \"lfm2\", " SIZES ", \"num_attention_heads\": 2, "
      "\"layer_types\": [\"conv\", \"full_attention\"], \"intermediate_size\": 6, "
      "\"block_auto_adjust_ff_dim\": false}",
      "model.layers.1.self_attn.q_layernorm.weight", "block_auto_adjust_ff_dim" },
    { "{\"model_type\": \"minimax\", " SIZES ", " HEADS ", "
      "\"layer_types\": [\"linear_attention\", \"full_attention\"], "
      "\"num_local_experts\": 2, \"num_experts_per_tok\": 1, \"intermediate_size\": 6, "
      "\"block_size\": 4}",
      "model.layers.0.self_attn.diagonal_decay", "num_local_experts" },
    { "{\"model_type\": \"nemotron_h\", \"vocab_size\": 11, \"hidden_size\": 8, "
      "\"num_attention_heads\": 2, \"hybrid_override_pattern\": \"M-*E\", "
      "\"intermediate_size\": 6, \"mamba_num_heads\": 2, \"mamba_head_dim\": 4, "
      "\"ssm_state_size\": 3, \"n_groups\": 1, \"n_routed_experts\": 2, "
      "\"num_experts_per_tok\": 1, \"moe_intermediate_size\": 4, "
      "\"moe_shared_expert_intermediate_size\": 4}",
      "backbone.layers.3.mixer.gate.e_score_correction_bias", "M-*E" },
    { "{\"model_type\": \"olmo_hybrid\", " SIZES ", " HEADS ", "
      "\"layer_types\": [\"linear_attention\", \"full_attention\"], "
      "\"linear_num_key_heads\": 2, \"linear_num_value_heads\": 4, "
      "\"linear_key_head_dim\": 4, \"linear_value_head_dim\": 3}",
      "model.layers.1.post_feedforward_layernorm.weight", "linear_num_value_heads" },
    { "{\"model_type\": \"falcon_h1\", " SIZES ", " HEADS ", \"mamba_d_ssm\": 12, "
      "\"mamba_d_head\": 4, \"mamba_n_heads\": 3, \"mamba_d_state\": 3, "
      "\"mamba_n_groups\": 1, \"ssm_multipliers\": [0.9, 0.8, 0.7, 1.2, 1.1]}",
      "model.layers.1.self_attn.k_proj.weight", "ssm_multipliers" },
    { "{\"model_type\": \"zamba2\", " SIZES ", \"num_attention_heads\": 2, "
      "\"layers_block_type\": [\"linear_attention\", \"hybrid\"], "
      "\"intermediate_size\": 6, \"adapter_rank\": 2, \"n_mamba_heads\": 4, "
      "\"mamba_headdim\": 4, \"mamba_d_state\": 3}",
      "model.layers.1.shared_transformer.feed_forward.gate_up_proj_adapter_list.0.1.weight",
      "layers_block_type" },
    { "{\"model_type\": \"bailing_hybrid\", " SIZES ", \"num_attention_heads\": 2, "
      "\"layer_types\": [\"linear_attention\", \"full_attention\"], "
      "\"kda_safe_gate\": true, \"linear_num_heads\": 2, \"linear_head_dim\": 4, "
      "\"kv_lora_rank\": 4, \"qk_nope_head_dim\": 4, \"qk_rope_head_dim\": 2, "
      "\"v_head_dim\": 4, \"num_experts\": 2, \"num_experts_per_token\": 1, "
      "\"moe_intermediate_size\": 4, \"first_k_dense_replace\": 1}",
      "model.layers.1.mlp.gate.expert_bias", "kda_safe_gate" },
    { "{\"model_type\": \"kimi_linear\", " SIZES ", \"num_attention_heads\": 2, "
      "\"linear_attn_config\": {\"full_attn_layers\": [2], \"kda_layers\": [1], "
      "\"num_heads\": 2, \"head_dim\": 4, \"short_conv_kernel_size\": 4}, "
      "\"kv_lora_rank\": 4, \"qk_nope_head_dim\": 4, \"qk_rope_head_dim\": 2, "
      "\"v_head_dim\": 4, \"num_experts\": 2, \"num_experts_per_token\": 1, "
      "\"moe_intermediate_size\": 4}",
      "model.layers.1.block_sparse_moe.experts.1.w2.weight", "linear_attn_config" },
};

static mn_status read_config(mn_model_config *out, const char *text) {
    mn_json root = { 0 };
    mn_status st = mn_json_parse(&root, text, strlen(text), "config.json", MN_JSON_PYTHON);
    if (st == MN_OK) st = mn_model_config_read(out, &root);
    mn_json_free(&root);
    return st;
}

static mn_status make(mn_model **out, const char *text) {
    mn_model_config config = { 0 };
    mn_status st = read_config(&config, text);
    if (st == MN_OK) st = mn_model_create(out, &config, MN_F32);
    if (st == MN_OK) mn_model_start(*out, NULL, 7);
    mn_model_config_free(&config);
    return st;
}

static void check_same(mn_model *a, mn_model *b, const char *what) {
    const int n = mn_model_params(a);
    CHECK(n == mn_model_params(b), "%s: another number of parameters", what);
    for (int i = 0; i < n && i < mn_model_params(b); i++) {
        const mn_model_param *p = mn_model_param_at(a, i), *q = mn_model_param_at(b, i);
        const bool same = strcmp(p->name, q->name) == 0 && p->info.count == q->info.count &&
                          memcmp(p->value, q->value, (size_t)p->info.count * sizeof(float)) == 0;
        CHECK(same, "%s: %s changed on its way", what, p->name);
    }
    char *first = NULL, *second = NULL;
    size_t size;
    CHECK(mn_model_config_write(&first, &size, mn_model_describe(a)) == MN_OK, "%s", what);
    CHECK(mn_model_config_write(&second, &size, mn_model_describe(b)) == MN_OK, "%s", what);
    CHECK(first && second && strcmp(first, second) == 0, "%s became %s", first, second);
    free(first);
    free(second);
}

static void check_files(int i) {
    char path[4096];
    mn_safetensors *file = NULL;
    snprintf(path, sizeof path, "%s", in_folder("model.safetensors"));
    CHECK(mn_safetensors_open(&file, path) == MN_OK, "%s", mn_last_error());
    if (file) {
        CHECK(mn_safetensors_find(file, families[i].tensor), "no tensor %s", families[i].tensor);
        mn_safetensors_close(file);
    }
    mn_file text = { 0 };
    snprintf(path, sizeof path, "%s", in_folder("config.json"));
    CHECK(mn_file_map(&text, path) == MN_OK, "%s", mn_last_error());
    char *copy = calloc(text.size + 1, 1);
    if (copy && text.bytes) memcpy(copy, text.bytes, text.size);
    CHECK(copy && strstr(copy, families[i].says), "no %s in %s", families[i].says, copy);
    free(copy);
    mn_file_unmap(&text);
}

static void come_back(void **state) {
    (void)state;
    for (int i = 0; i < (int)(sizeof families / sizeof *families); i++) {
        mn_model *model = NULL, *back = NULL;
        CHECK(make(&model, families[i].json) == MN_OK, "%s: %s", families[i].json, mn_last_error());
        if (!model) continue;
        CHECK(mn_checkpoint_save(model, in_folder("")) == MN_OK, "%s", mn_last_error());
        check_files(i);
        CHECK(mn_checkpoint_load(&back, in_folder(""), MN_F32) == MN_OK, "%s: %s",
              families[i].tensor, mn_last_error());
        if (back) check_same(model, back, families[i].tensor);
        mn_model_destroy(back);
        mn_model_destroy(model);
    }
    check_done();
}

/* ---- experts that are all alike -------------------------------------------------------------- */

#define GRANITE "{\"model_type\": \"granitemoehybrid\", " SIZES ", " HEADS ", "                    \
                "\"layer_types\": [\"linear_attention\", \"full_attention\"], "                    \
                "\"mamba_d_head\": 4, \"mamba_n_heads\": 4, \"mamba_d_state\": 3, "                \
                "\"residual_multiplier\": 0.5, "

enum { SHARED = 6, OWN = 4, WIDE = SHARED + OWN, D = 8 };

/* Rows and columns [first, first + n) of the wide MLP's matrix as matrix `name` of block i. */
static void take(mn_model *to, mn_model *wide, int i, const char *name, const char *from,
                 int64_t row, int64_t rows, int64_t column, int64_t columns) {
    char full[128];
    snprintf(full, sizeof full, "model.layers.%d.mlp.%s.weight", i, name);
    const mn_model_param *p = mn_model_param_named(to, full);
    snprintf(full, sizeof full, "model.layers.%d.mlp.%s.weight", i, from);
    const mn_model_param *q = mn_model_param_named(wide, full);
    if (!CHECK(p && q, "no %s", full)) return;
    const int64_t width = p->info.shape[1], theirs = q->info.shape[1];
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) {
            ((float *)p->value)[r * width + c] =
                ((const float *)q->value)[(row + r) * theirs + column + c];
        }
    }
}

static void share_out(mn_model *to, mn_model *wide, int i) {
    char name[64];
    for (int e = 0; e < 3; e++) {
        const int64_t first[] = { SHARED, 0, WIDE + SHARED };
        for (int which = 1; which <= 3; which++) {
            snprintf(name, sizeof name, "experts.%d.w%d", e, which);
            if (which == 2) take(to, wide, i, name, "down_proj", 0, D, SHARED, OWN);
            else take(to, wide, i, name, "gate_up_proj", first[which - 1], OWN, 0, D);
        }
    }
    mn_model_param *p = NULL;
    snprintf(name, sizeof name, "model.layers.%d.mlp.shared_expert.gate_up_proj.weight", i);
    if (CHECK((p = mn_model_param_named(to, name)) != NULL, "no %s", name)) {
        snprintf(name, sizeof name, "model.layers.%d.mlp.gate_up_proj.weight", i);
        const float *q = mn_model_param_named(wide, name)->value;
        memcpy(p->value, q, SHARED * D * sizeof *q);
        memcpy((float *)p->value + SHARED * D, q + WIDE * D, SHARED * D * sizeof *q);
    }
    take(to, wide, i, "shared_expert.down_proj", "down_proj", 0, D, 0, SHARED);
}

/* Weights of chosen experts sum to one, so experts that are one another's copies and an MLP beside
 * them are one MLP of both their widths, whatever the router says. */
static void like_experts(void **state) {
    (void)state;
    mn_model *model[2] = { NULL, NULL };
    const char *const json[] = {
        GRANITE "\"shared_intermediate_size\": 10}",
        GRANITE "\"shared_intermediate_size\": 6, \"intermediate_size\": 4, "
                "\"num_local_experts\": 3, \"num_experts_per_tok\": 2}" };
    mn_context *context = NULL;
    mn_session *session[2] = { NULL, NULL };
    static const int32_t tokens[] = { 1, 5, 2, 10, 3, 3, 7 };
    mn_status st = mn_context_create(&context, NULL);
    for (int k = 0; k < 2 && st == MN_OK; k++) st = make(&model[k], json[k]);
    CHECK(st == MN_OK, "%s", mn_last_error());
    for (int i = 0; st == MN_OK && i < mn_model_params(model[1]); i++) {
        mn_model_param *p = mn_model_param_at(model[1], i);
        const mn_model_param *q = mn_model_param_named(model[0], p->name);
        if (q) memcpy(p->value, q->value, (size_t)p->info.count * sizeof(float));
    }
    for (int i = 0; st == MN_OK && i < 2; i++) share_out(model[1], model[0], i);
    for (int k = 0; k < 2 && st == MN_OK; k++) {
        st = mn_session_create(&session[k], context, model[k], NULL);
        if (st == MN_OK) st = mn_session_feed(session[k], tokens, 7);
    }
    CHECK(st == MN_OK, "%s", mn_last_error());
    for (int v = 0; st == MN_OK && v < 11; v++) {
        const double a = mn_session_logits(session[0])[v], b = mn_session_logits(session[1])[v];
        CHECK(fabs(a - b) <= 1e-6 + 1e-5 * fabs(a), "logit %d is %.8f, not %.8f", v, b, a);
    }
    for (int k = 0; k < 2; k++) {
        mn_session_destroy(session[k]);
        mn_model_destroy(model[k]);
    }
    mn_context_destroy(context);
    check_done();
}

/* ---- what is beside a model ------------------------------------------------------------------ */

/* The folder's tensors and one of a tower that no parameter has. */
static void add_tower(const float *numbers, int64_t n) {
    char path[4096];
    mn_safetensors *file = NULL;
    snprintf(path, sizeof path, "%s", in_folder("model.safetensors"));
    if (!CHECK(mn_safetensors_open(&file, path) == MN_OK, "%s", mn_last_error())) return;
    const int64_t count = mn_safetensors_count(file);
    mn_stored_tensor *all = calloc((size_t)count + 1, sizeof *all);
    for (int64_t i = 0; i < count; i++) all[i] = *mn_safetensors_at(file, i);
    all[count] = (mn_stored_tensor){ .name = "model.visual.patch.weight", .dtype = MN_STORED_F32,
                                     .rank = 1, .shape = { n }, .data = numbers,
                                     .bytes = (size_t)n * sizeof *numbers };
    const mn_stored_text format = { "format", "pt" };
    CHECK(mn_safetensors_write(path, all, count + 1, &format, 1) == MN_OK, "%s", mn_last_error());
    free(all);
    mn_safetensors_close(file);
}

/* A tower stays with its model, also when the folder it came from is written over. */
static void towers_stay(void **state) {
    (void)state;
    static const float numbers[] = { 1.5f, -2.0f, 3.25f };
    const char *json = "{\"model_type\": \"qwen3_5\", \"vision_config\": {}, \"text_config\": {"
                       "\"model_type\": \"qwen3_5_text\", " SIZES ", " HEADS ", " DELTA "}}";
    mn_model *model = NULL, *back = NULL;
    mn_status st = make(&model, json);
    if (st == MN_OK) st = mn_checkpoint_save(model, in_folder(""));
    add_tower(numbers, 3);
    if (st == MN_OK) st = mn_checkpoint_load(&back, in_folder(""), MN_F32);
    for (int times = 0; times < 2 && st == MN_OK; times++) {
        mn_safetensors *file = NULL;
        st = mn_checkpoint_save(back, in_folder(""));
        if (st == MN_OK) st = mn_safetensors_open(&file, in_folder("model.safetensors"));
        const mn_stored_tensor *t = NULL;
        if (st == MN_OK) t = mn_safetensors_find(file, "model.visual.patch.weight");
        CHECK(t && t->bytes == sizeof numbers && memcmp(t->data, numbers, sizeof numbers) == 0,
              "the tower is gone");
        mn_safetensors_close(file);
    }
    CHECK(st == MN_OK, "%s", mn_last_error());
    mn_model_destroy(back);
    mn_model_destroy(model);
    check_done();
}

/* ---- steps of mesa's solver ------------------------------------------------------------------ */

/* Their class takes 30 steps where a file has none; the solution, which is what 0 asks for here, it
 * cannot be asked for: that is said under our name. */
static void steps_of_the_solver(void **state) {
    (void)state;
    static const struct {
        const char *json;
        int64_t steps;
    } cases[] = {
        { "{\"model_type\": \"mesa_net\", " SIZES ", \"num_heads\": 2}", 30 },
        { "{\"model_type\": \"mesa_net\", " SIZES ", \"num_heads\": 2, "
          "\"max_cg_step_training\": 12}", 12 },
        { "{\"model_type\": \"mesa_net\", " SIZES ", \"num_heads\": 2, "
          "\"cg_steps\": 0}", 0 },
        { "{\"layers\": \"mesa\", " SIZES ", \"num_heads\": 2}", 0 },
        { "{\"layers\": \"mesa\", " SIZES ", \"num_heads\": 2, \"cg_steps\": 12}", 12 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mn_model *model = NULL, *back = NULL;
        CHECK(make(&model, cases[i].json) == MN_OK, "%s: %s", cases[i].json, mn_last_error());
        if (!model) continue;
        const int64_t made = mn_model_describe(model)->options[0].cg_steps;
        CHECK(made == cases[i].steps, "%s: %" PRId64 " steps", cases[i].json, made);
        CHECK(mn_checkpoint_save(model, in_folder("")) == MN_OK, "%s", mn_last_error());
        CHECK(mn_checkpoint_load(&back, in_folder(""), MN_F32) == MN_OK, "%s", mn_last_error());
        if (back) {
            const int64_t read = mn_model_describe(back)->options[0].cg_steps;
            CHECK(read == cases[i].steps, "%s: read as %" PRId64, cases[i].json, read);
        }
        char *text = NULL;
        size_t size;
        CHECK(mn_model_config_write(&text, &size, mn_model_describe(model)) == MN_OK, "no text");
        CHECK(text && !strstr(text, "\"max_cg_step_training\": 0"), "%s", text);
        free(text);
        mn_model_destroy(back);
        mn_model_destroy(model);
    }
    check_done();
}

static void wrong_keys(void **state) {
    (void)state;
    static const struct {
        const char *json, *says;
    } wrong[] = {
        { "{\"model_type\": \"llama\", " SIZES ", " HEADS ", \"atention_bias\": true}",
          "atention_bias" },
        { "{\"model_type\": \"llama\", " SIZES ", " HEADS ", "
      "\"rope_parameters\": {\"mscale\": 3}}",
          "mscale" },
        { "{\"model_type\": \"qwen3\", " SIZES ", " HEADS ", \"use_sliding_window\": true, "
          "\"sliding_window\": 4, \"layer_types\": [\"full_attention\", \"sliding_attention\"]}",
          "use_sliding_window" },
        { "{\"model_type\": \"llama\", " SIZES ", " HEADS ", \"rope_theta\": 5, "
          "\"rope_parameters\": {\"rope_theta\": 6}}", "contradicts" },
        { "{\"model_type\": \"qwen3_next\", " SIZES ", \"layer_types\": [\"conv\", "
      "\"moe\"]}", "conv" },
        { "{\"model_type\": \"nemotron_h\", " SIZES ", \"hybrid_override_pattern\": \"M?\"}",
          "no layer of nemotron_h" },
        { "{\"model_type\": \"falcon_h1\", " SIZES ", " HEADS ", \"projectors_bias\": true}",
          "projectors_bias" },
        { "{\"model_type\": \"qwen3_5_text\", " SIZES ", " HEADS ", " DELTA ", "
          "\"attn_output_gate\": false}", "attn_output_gate" },
        { "{\"model_type\": \"gpt2\", " SIZES ", \"activation_function\": \"sine\"}", "sine" },
        { "{\"model_type\": \"qwen3_next\", " SIZES ", \"num_experts\": 4, "
          "\"num_experts_per_tok\": 5, \"moe_intermediate_size\": 8}", "num_experts_per_tok" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        mn_model *model = NULL;
        CHECK(make(&model, wrong[i].json) != MN_OK, "%s is taken", wrong[i].json);
        CHECK(strstr(mn_last_error(), wrong[i].says), "%s: %s", wrong[i].says, mn_last_error());
        mn_model_destroy(model);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(come_back),
        cmocka_unit_test(like_experts),
        cmocka_unit_test(towers_stay),
        cmocka_unit_test(steps_of_the_solver),
        cmocka_unit_test(wrong_keys),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
