/* test_model.c - whole models: gradients of every parameter of every kind against finite
 * differences, planned memory against used, files that come back bit for bit, names of layers. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "model/checkpoint.h"
#include "support/check.h"
#include "support/folder.h"

enum { VOCABULARY = 11, WIDTH = 16, B = 2, T = 5, TRIED = 3 };

typedef struct fixture {
    mn_context *context;
    mn_tape *tape;
    mn_model *model;
    int32_t tokens[B * T], targets[B * T];
} fixture;

static mn_status read_config(mn_model_config *config, const char *json) {
    mn_json root = { 0 };
    mn_status st = mn_json_parse(&root, json, strlen(json), "config.json", MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_model_config_read(config, &root);
    mn_json_free(&root);
    return st;
}

/* A model from JSON, its parameters moved away from where they start so that none is special. */
static bool open(fixture *f, const char *json, mn_dtype dtype) {
    memset(f, 0, sizeof *f);
    mn_model_config config = { 0 };
    mn_status st = read_config(&config, json);
    if (st == MN_OK) st = mn_model_create(&f->model, &config, dtype);
    mn_model_config_free(&config);
    if (st == MN_OK) st = mn_model_want_gradients(f->model);
    if (st == MN_OK) st = mn_context_create(&f->context, NULL);
    if (st == MN_OK) st = mn_tape_create(&f->tape, f->context, dtype);
    if (!CHECK(st == MN_OK, "%s: %s", json, mn_last_error())) return false;
    mn_model_start(f->model, f->context, 3);
    for (int i = 0; i < mn_model_params(f->model); i++) {
        const mn_model_param *p = mn_model_param_at(f->model, i);
        const double scale = p->info.init == MN_INIT_HUNDREDTH ? 0.001 : 0.2;
        for (int64_t k = 0; k < p->info.count; k++) {
            const double move = scale * mn_rng_normal(5, (uint64_t)i, (uint64_t)k);
            if (dtype == MN_F64) ((double *)p->value)[k] += move;
            else ((float *)p->value)[k] += (float)move;
        }
    }
    for (int i = 0; i < B * T; i++) {
        f->tokens[i] = (int32_t)(mn_rng_bits(1, 1, (uint64_t)i) % VOCABULARY);
        f->targets[i] = i == 3 ? -100 : (int32_t)(mn_rng_bits(1, 2, (uint64_t)i) % VOCABULARY);
    }
    return true;
}

static void finish(fixture *f) {
    mn_tape_destroy(f->tape);
    mn_model_destroy(f->model);
    mn_context_destroy(f->context);
}

/* Loss of the batch; `samples` 0 for the usual one. */
static double loss_of(fixture *f, unsigned modes, int samples, double z_loss) {
    double loss = NAN;
    int64_t counted;
    const mn_model_input in = { .tokens = f->tokens, .B = B, .T = T };
    const mn_loss_options how = { .z_loss = z_loss };
    mn_tape_start(f->tape, modes);
    if (samples) {
        mn_model_marginal_loss(f->model, f->tape, &in, f->targets, how, samples, 9, 4, &loss,
                               &counted);
    } else {
        mn_tensor *hidden = mn_model_hidden(f->model, f->tape, &in);
        mn_model_loss(f->model, f->tape, hidden, f->targets, how, &loss, &counted);
    }
    if (mn_tape_status(f->tape) == MN_OK && modes & MN_TAPE_RECORD) mn_tape_backward(f->tape);
    mn_model_settle_gradients(f->model);
    CHECK(mn_tape_status(f->tape) == MN_OK, "%s", mn_last_error());
    CHECK(modes & MN_TAPE_PLAN || counted == B * T - 1, "%lld targets counted", (long long)counted);
    return loss;
}

/* Derivative by four points: their error is h^4 of the fifth derivative plus 1e-16 / h of the loss,
 * which keeps eight digits where norms of short vectors bend the loss sharply. */
static double difference(fixture *f, double *value, int samples, double z_loss) {
    static const double at[] = { -2, -1, 1, 2 }, weight[] = { 1, -8, 8, -1 };
    const double h = 2e-5, before = *value;
    double sum = 0.0;
    for (int i = 0; i < 4; i++) {
        *value = before + at[i] * h;
        sum += weight[i] * loss_of(f, MN_TAPE_FORWARD, samples, z_loss);
    }
    *value = before;
    return sum / (12 * h);
}

static void check_gradients(const char *json, int samples, double z_loss) {
    fixture f;
    if (!open(&f, json, MN_F64)) return;
    loss_of(&f, MN_TAPE_RECORD, samples, z_loss);
    for (int i = 0; i < mn_model_params(f.model); i++) {
        const mn_model_param *p = mn_model_param_at(f.model, i);
        double *value = p->value, *grad = p->grad;
        if (p->info.group == MN_GROUP_FROZEN) continue;    // given, not learnt
        for (int t = 0; t < TRIED; t++) {
            const uint64_t bits = mn_rng_bits(8, (uint64_t)i, (uint64_t)t);
            const int64_t at = (int64_t)(bits % (uint64_t)p->info.count);
            const double want = difference(&f, &value[at], samples, z_loss);
            CHECK(fabs(grad[at] - want) <= 1e-7 * (1.0 + fabs(want)),
                  "%s %s entry %lld: gradient %.9g, differences %.9g", json, p->name,
                  (long long)at, grad[at], want);
        }
    }
    finish(&f);
}

/* Every kind, alone in one layer of two and beside its +ccq where there is one. */
static void gradients_of_every_kind(void **state) {
    (void)state;
    for (int kind = 0; kind < MN_LAYER_COUNT; kind++) {
        const char *name = mn_layer_kind_name((mn_layer_kind)kind);
        const char *ccq = mn_layer_takes_ccq((mn_layer_kind)kind) ? "+ccq" : "";
        char json[512];
        snprintf(json, sizeof json, "{\"layers\": \"%s, %s%s\", \"hidden_size\": %d, "
                 "\"vocab_size\": %d, \"mlp\": \"%s\", \"tie_word_embeddings\": %s, "
                 "\"max_position_embeddings\": 8, \"intermediate_size\": 6}", name, name, ccq,
                 WIDTH, VOCABULARY, kind % 2 ? "gelu" : "swiglu", kind % 3 ? "false" : "true");
        check_gradients(json, 0, kind % 2 ? 1e-2 : 0.0);
    }
    check_done();
}

/* Blocks otherwise than usual (blocks.def), each with what else its models have. */
static const char *const blocks[] = {
    "\"layers\": \"attention\", \"norm\": \"layer\", \"parallel_residual\": true, "
    "\"mlp_bias\": true, \"mlp\": \"gelu_erf\"",
    "\"layers\": \"attention\", \"norm\": \"layer\", \"learned_positions\": 16, \"mlp\": \"gelu\"",
    "\"layers\": \"gdn, attention\", \"norms_after\": \"attention\", \"residual_multiplier\": 0.7, "
    "\"embedding_multiplier\": 2, \"logits_multiplier\": 0.4, \"mlp_fused\": true",
    "\"layers\": \"lightning, attention\", \"residual\": \"norm\", \"attention_alpha\": 1.2, "
    "\"mixer_beta\": 0.8, \"mlp_alpha\": 0.9, \"num_experts\": 3, \"num_experts_per_tok\": 2, "
    "\"moe_intermediate_size\": 4, \"norm_topk_prob\": true",
    "\"layers\": \"mamba2, none\", \"mlp\": \"relu_square\", "
    "\"mlp_layer_types\": [\"none\", \"sparse\"], \"num_experts\": 4, \"num_experts_per_tok\": 2, "
    "\"moe_intermediate_size\": 4, \"shared_expert_intermediate_size\": 5, "
    "\"router\": \"sigmoid\", \"router_bias\": true, "
    "\"n_group\": 2, \"topk_group\": 1, \"routed_scaling_factor\": 1.5",
    "\"layers\": \"gdn\", \"num_experts\": 3, \"num_experts_per_tok\": 1, "
    "\"moe_intermediate_size\": 4, \"shared_expert_intermediate_size\": 4, "
    "\"shared_expert_gate\": true, \"mlp_layer_types\": [\"dense\", \"sparse\"]",
    "\"layers\": \"mamba2\", \"beside_attention\": true, \"mlp_gate_multiplier\": 0.7, "
    "\"mlp_down_multiplier\": 1.3, \"mixers\": {\"attention\": {\"num_heads\": 2}}",
    "\"layers\": \"mamba2\", \"num_hidden_layers\": 3, \"shared_blocks\": 1, \"adapter_rank\": 2, "
    "\"mlp_layer_types\": [\"shared\", \"none\", \"shared\"], "
    "\"mixers\": {\"attention\": {\"num_heads\": 2}}",
};

static void gradients_of_a_hybrid(void **state) {
    (void)state;
    check_gradients("{\"layers\": \"attention*2, gdn\", \"hidden_size\": 8, \"vocab_size\": 11, "
                    "\"mlp\": \"none\", \"logit_softcap\": 2.5}", 0, 0.0);
    check_done();
}

/* Every place from the stream at the last one: of each of two rows its own, and what a place says
 * depends on it only through the last token's stream. */
static void decoder_of_places(void **state) {
    (void)state;
    static const char json[] = "{\"layers\": \"gdn\", \"hidden_size\": 8, \"vocab_size\": 11, "
                               "\"num_hidden_layers\": 1, \"decoder\": \"places\"}";
    check_gradients(json, 0, 0.0);
    check_gradients("{\"layers\": \"kla\", \"hidden_size\": 8, \"vocab_size\": 11, "
                    "\"num_hidden_layers\": 1, \"decoder\": \"places\"}", 2, 0.0);
    fixture f;
    if (open(&f, json, MN_F64)) {
        const mn_model_input in = { .tokens = f.tokens, .B = B, .T = T };
        mn_tape_start(f.tape, MN_TAPE_FORWARD);
        const mn_tensor *h = mn_model_hidden(f.model, f.tape, &in);
        const double before = h ? ((const double *)h->data)[0] : NAN;
        f.tokens[T - 1] = (f.tokens[T - 1] + 1) % 11;
        mn_tape_start(f.tape, MN_TAPE_FORWARD);
        h = mn_model_hidden(f.model, f.tape, &in);
        const double after = h ? ((const double *)h->data)[0] : NAN;
        CHECK(h && h->shape[0] == B && h->shape[1] == T, "another shape");
        CHECK(fabs(before - after) > 1e-6, "place 0 does not hear of the last token");
    }
    finish(&f);
    check_done();
}

static void marginal_loss(void **state) {
    (void)state;
    static const char json[] = "{\"layers\": \"attention, kla\", \"hidden_size\": 8, "
                               "\"vocab_size\": 11, \"intermediate_size\": 6}";
    check_gradients(json, 1, 0.0);
    check_gradients(json, 4, 0.0);
    fixture f;
    if (open(&f, json, MN_F64)) {
        const double plain = loss_of(&f, MN_TAPE_FORWARD, 0, 0.0);
        const double one = loss_of(&f, MN_TAPE_FORWARD, 1, 0.0);
        CHECK(plain != one && fabs(plain - one) < 1.0, "losses %g and %g", plain, one);
    }
    finish(&f);
    check_done();
}

/* What a plan says is what a step takes, to the byte, and it takes no more the second time. */
static void check_plan(const char *json) {
    fixture f;
    if (open(&f, json, MN_F32)) {
        loss_of(&f, MN_TAPE_RECORD | MN_TAPE_PLAN, 0, 0.0);
        const size_t planned = mn_tape_bytes(f.tape);
        CHECK(mn_tape_reserve(f.tape, planned) == MN_OK, "%s", mn_last_error());
        loss_of(&f, MN_TAPE_RECORD, 0, 0.0);
        const size_t used = mn_tape_bytes(f.tape);
        CHECK(used == planned, "%s: planned %zu, used %zu", json, planned, used);
        const size_t held = mn_arena_held(f.context->arena);
        loss_of(&f, MN_TAPE_RECORD, 0, 0.0);
        CHECK(mn_tape_bytes(f.tape) == used && mn_arena_held(f.context->arena) == held,
              "%s: the second step takes other memory than the first", json);
    }
    finish(&f);
}

static void plan_is_what_is_used(void **state) {
    (void)state;
    check_plan("{\"layers\": \"gdn, attention\", \"hidden_size\": 8, \"vocab_size\": 11}");
    for (int kind = 0; kind < MN_LAYER_COUNT; kind++) {
        const char *name = mn_layer_kind_name((mn_layer_kind)kind);
        char json[256];
        snprintf(json, sizeof json, "{\"layers\": \"%s%s\", \"hidden_size\": 8, "
                 "\"vocab_size\": 11, \"max_position_embeddings\": 8}", name,
                 mn_layer_takes_ccq((mn_layer_kind)kind) ? "+ccq" : "");
        check_plan(json);
    }
    check_done();
}

/* The same loss and gradients at any number of threads. */
static void same_bits_at_any_thread_count(void **state) {
    (void)state;
    double loss[3];
    float *grads[3] = { NULL };
    static const int threads[] = { 1, 2, 5 };
    for (int n = 0; n < 3; n++) {
        fixture f;
        if (!open(&f, "{\"layers\": \"gdn, attention, linear, gla+ccq, retnet, mesa, mamba2, "
                  "mamba1, mlstm, longhorn\", \"hidden_size\": 8, \"vocab_size\": 11}",
                  MN_F32)) {
            break;
        }
        mn_context_destroy(f.context);
        mn_tape_destroy(f.tape);
        const mn_context_options options = { .n_threads = threads[n] };
        CHECK(mn_context_create(&f.context, &options) == MN_OK, "%s", mn_last_error());
        CHECK(mn_tape_create(&f.tape, f.context, MN_F32) == MN_OK, "%s", mn_last_error());
        loss[n] = loss_of(&f, MN_TAPE_RECORD, 0, 0.0);
        const size_t bytes = (size_t)mn_model_count(f.model) * sizeof(float);
        grads[n] = malloc(bytes);
        size_t at = 0;
        for (int i = 0; i < mn_model_params(f.model); i++) {
            const mn_model_param *p = mn_model_param_at(f.model, i);
            memcpy(grads[n] + at, p->grad, (size_t)p->info.count * sizeof(float));
            at += (size_t)p->info.count;
        }
        CHECK(memcmp(grads[n], grads[0], bytes) == 0 && loss[n] == loss[0],
              "%d threads give other bits than 1", threads[n]);
        finish(&f);
    }
    for (int n = 0; n < 3; n++) free(grads[n]);
    check_done();
}

static void folders_come_back(void **state) {
    (void)state;
    fixture f;
    if (open(&f, "{\"layers\": \"gdn*2, attention\", \"hidden_size\": 8, \"vocab_size\": 11, "
             "\"mixers\": {\"gdn\": {\"num_heads\": 2}}}", MN_F32)) {
        mn_model *back = NULL;
        CHECK(mn_checkpoint_save(f.model, in_folder("")) == MN_OK, "%s", mn_last_error());
        CHECK(mn_checkpoint_load(&back, in_folder(""), MN_F32) == MN_OK, "%s", mn_last_error());
        for (int i = 0; back && i < mn_model_params(f.model); i++) {
            const mn_model_param *p = mn_model_param_at(f.model, i);
            const mn_model_param *q = mn_model_param_at(back, i);
            CHECK(strcmp(p->name, q->name) == 0, "%s became %s", p->name, q->name);
            CHECK(memcmp(p->value, q->value, (size_t)p->info.count * sizeof(float)) == 0,
                  "%s changed on its way", p->name);
        }
        mn_model_destroy(back);
    }
    finish(&f);
    check_done();
}

static void wrong_configurations(void **state) {
    (void)state;
    static const struct {
        const char *json, *says[2];
    } wrong[] = {
        { "{\"layers\": \"gdn\", \"hidden_sise\": 8}", { "hidden_size", "" } },
        { "{\"layers\": \"gdn\", \"hidden_size\": 8, \"num_head\": 2}",
          { "num_head", "num_heads" } },
        { "{\"layers\": \"gdm\", \"hidden_size\": 8}", { "gdm", "gdn" } },
        { "{\"layers\": \"gdn*0\", \"hidden_size\": 8}", { "gdn*0", "" } },
        { "{\"layers\": \"gdn,attention\", \"num_hidden_layers\": 3, \"hidden_size\": 8}",
          { "num_hidden_layers", "" } },
        { "{\"layers\": \"gdn\", \"hidden_size\": \"8\"}", { "hidden_size", "string" } },
        { "{\"layers\": \"gdn\", \"hidden_size\": 8, \"mlp\": \"gleu\"}", { "mlp", "gelu" } },
        { "{\"layers\": \"gdn\", \"hidden_size\": 8, \"decoder\": \"place\"}",
          { "decoder", "places" } },
        { "{\"hidden_size\": 8}", { "layers", "" } },
        { "{\"layers\": \"gdn\", \"hidden_size\": 8, \"mixers\": {\"gdn\": {\"num_head\": 1}}}",
          { "num_head", "num_heads" } },
    };
    for (size_t i = 0; i < MN_COUNTOF(wrong); i++) {
        mn_model_config config = { 0 };
        const mn_status st = read_config(&config, wrong[i].json);
        CHECK(st != MN_OK, "%s was read", wrong[i].json);
        const char *says = mn_last_error();
        CHECK(strstr(says, wrong[i].says[0]) && strstr(says, wrong[i].says[1]), "%s: %s",
              wrong[i].json, says);
        mn_model_config_free(&config);
    }
    check_done();
}

/* Initial values are a function of the seed, whoever draws them. */
static void threads_start_the_same_values(void **state) {
    (void)state;
    static const char json[] = "{\"layers\": \"kla, gdn\", \"hidden_size\": 48, "
                               "\"vocab_size\": 3001}";
    fixture alone, shared;
    const mn_context_options three = { .n_threads = 3 };
    mn_context *context = NULL;
    if (!open(&alone, json, MN_F32) || !open(&shared, json, MN_F32)) check_fatal("no models");
    if (mn_context_create(&context, &three) != MN_OK) check_fatal("%s", mn_last_error());
    mn_model_start(alone.model, NULL, 11);
    mn_model_start(shared.model, context, 11);
    for (int i = 0; i < mn_model_params(alone.model); i++) {
        const mn_model_param *a = mn_model_param_at(alone.model, i);
        const mn_model_param *b = mn_model_param_at(shared.model, i);
        CHECK(memcmp(a->value, b->value, (size_t)a->info.count * sizeof(float)) == 0,
              "%s differs", a->name);
    }
    mn_context_destroy(context);
    finish(&alone);
    finish(&shared);
    check_done();
}

static void gradients_of_every_block(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(blocks); i++) {
        char json[1024];
        const bool counted = strstr(blocks[i], "num_hidden_layers") != NULL;
        snprintf(json, sizeof json, "{%s, \"hidden_size\": %d, \"vocab_size\": %d, %s"
                 "\"intermediate_size\": 6}", blocks[i], WIDTH, VOCABULARY,
                 counted ? "" : "\"num_hidden_layers\": 2, ");
        check_gradients(json, 0, 0.0);
        /* how tokens fall to experts is not known before */
        if (!strstr(blocks[i], "num_experts")) check_plan(json);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_of_every_kind),
        cmocka_unit_test(gradients_of_every_block),
        cmocka_unit_test(gradients_of_a_hybrid),
        cmocka_unit_test(decoder_of_places),
        cmocka_unit_test(marginal_loss),
        cmocka_unit_test(plan_is_what_is_used),
        cmocka_unit_test(same_bits_at_any_thread_count),
        cmocka_unit_test(threads_start_the_same_values),
        cmocka_unit_test_setup_teardown(folders_come_back, make_folder, remove_folder),
        cmocka_unit_test(wrong_configurations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
