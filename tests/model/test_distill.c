/* test_distill.c - learning from a teacher: gradients of both objectives against finite
 * differences, the stages of their weights, and that a student which is its teacher has nothing
 * to learn. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "model/checkpoint.h"
#include "support/check.h"
#include "support/model_case.h"
#include "train/distill.h"
#include "train/trainable.h"

enum { B = 2, T = 7, V = 11 };

#define SIZES                                                                                      \
    "\"num_hidden_layers\": 3, \"hidden_size\": 8, \"vocab_size\": 11, \"num_heads\": 2, "         \
    "\"intermediate_size\": 8, \"max_position_embeddings\": 16"
static const char teacher_json[] = "{\"layers\": \"gdn*3\", " SIZES "}";
static const char student_json[] = "{\"layers\": \"gdn, bayes, gdn\", " SIZES "}";
static const char folder[] = "distill-teacher";

typedef struct pass {
    mn_model *student;
    mn_context *context;
    mn_tape *tape;
    mn_distill *distill;
    mn_train_options options;
    bool of[MN_MAX_LAYERS];
    int32_t tokens[B * T], targets[B * T];
} pass;

static void open_pass(pass *p, const char *objective, const char *student) {
    static const mn_context_options one = { .n_threads = 1 };
    mn_model *teacher;
    mn_json none = { .value = json_object(), .name = "none" };
    mkdir(folder, 0777);
    *p = (pass){ 0 };
    mn_status st = model_case_create(&teacher, teacher_json, MN_F32, 0.3, 4);
    if (st == MN_OK) st = mn_checkpoint_save(teacher, folder);
    if (st == MN_OK) st = mn_train_options_read(&p->options, &none);
    snprintf(p->options.teacher, MN_TRAIN_TEXT, "%s", folder);
    snprintf(p->options.distill, MN_TRAIN_TEXT, "%s", objective);
    if (st == MN_OK) st = model_case_create(&p->student, student, MN_F64, 0.3, 5);
    if (st == MN_OK) st = mn_model_want_gradients(p->student);
    if (st == MN_OK) st = mn_context_create(&p->context, &one);
    if (st == MN_OK) st = mn_tape_create(&p->tape, p->context, MN_F64);
    if (st == MN_OK) {
        st = mn_distill_create(&p->distill, p->of, &p->options, p->student, p->context, MN_F64);
    }
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    model_case_tokens(p->tokens, B * T, V, 5);
    for (int i = 0; i < B * T; i++) {
        p->targets[i] = i % 5 == 4 ? -100 : p->tokens[(i + 1) % (B * T)];
    }
    mn_model_destroy(teacher);
    json_decref(none.value);
}

static void close_pass(pass *p) {
    mn_distill_destroy(p->distill);
    mn_tape_destroy(p->tape);
    mn_context_destroy(p->context);
    mn_model_destroy(p->student);
}

static double objective(pass *p, bool back, int64_t step) {
    const mn_model_input in = { .tokens = p->tokens, .B = B, .T = T };
    double loss = NAN;
    int64_t counted;
    mn_tape_start(p->tape, MN_TAPE_RECORD);
    mn_distill_forward(p->distill, p->tape, p->student, &in, p->targets, step, 1.0, &loss,
                       &counted);
    mn_status st = mn_tape_status(p->tape);
    if (back && st == MN_OK) st = mn_tape_backward(p->tape);
    if (st != MN_OK) check_fatal("%s", mn_last_error());
    if (back) mn_model_settle_gradients(p->student);
    CHECK(counted == 12, "%lld targets", (long long)counted);
    return loss;
}

/* Central differences of the objective. Its value comes through float32, of about 1e-7 in a loss of
 * about 2: over 2e-3 that is 1e-4, and the curvature adds as little. */
static void differences(const char *name, double cosine, int64_t step) {
    pass p;
    const double h = 1e-3;
    int checked = 0;
    open_pass(&p, name, student_json);
    p.options.distill_cosine = cosine;
    p.options.distill_turn = 5;
    objective(&p, true, step);
    for (int i = 0; i < mn_model_params(p.student); i++) {
        mn_model_param *of = mn_model_param_at(p.student, i);
        const int64_t at = of->info.count / 2;
        double *x = (double *)of->value + at, before = *x, two[2];
        const double grad = ((double *)of->grad)[at];
        for (int s = 0; s < 2; s++) {
            *x = before + (s ? -h : h);
            two[s] = objective(&p, false, step);
        }
        *x = before;
        const double got = (two[0] - two[1]) / (2.0 * h);
        CHECK(fabs(got - grad) < 1e-3 + 2e-3 * fabs(grad), "%s, %s: %.6g by differences, %.6g",
              name, of->name, got, grad);
        checked += fabs(grad) > 5e-3;
    }
    CHECK(checked > 8, "%s: only %d gradients that count", name, checked);
    close_pass(&p);
}

static void gradients_are_differences(void **state) {
    (void)state;
    differences("layers", 0.0, 0);
    differences("layers", 0.5, 0);
    differences("model", 0.05, 0);
    differences("model", 0.05, 7);
    check_done();
}

/* Layer by layer, only the mixers that were replaced and the norms in front get gradients. */
static void other_layers_stay_out(void **state) {
    (void)state;
    pass p;
    open_pass(&p, "layers", student_json);
    objective(&p, true, 0);
    for (int i = 0; i < mn_model_params(p.student); i++) {
        const mn_model_param *of = mn_model_param_at(p.student, i);
        const bool own = strncmp(of->name, "model.layers.1.attn", 19) == 0;
        double sum = 0.0;
        for (int64_t k = 0; k < of->info.count; k++) sum += fabs(((const double *)of->grad)[k]);
        CHECK(own || sum == 0.0, "%s has a gradient", of->name);
    }
    CHECK(p.of[1] && !p.of[0] && !p.of[2], "the layers that differ");
    close_pass(&p);
    check_done();
}

/* A copy of the teacher: no error, no divergence, no gradient but rounding. */
static void a_copy_has_nothing_to_learn(void **state) {
    (void)state;
    pass p;
    open_pass(&p, "model", teacher_json);
    if (mn_checkpoint_read_weights(p.student, folder) != MN_OK) check_fatal("%s", mn_last_error());
    const double loss = objective(&p, true, 0);
    CHECK(fabs(loss) < 1e-6, "loss %g", loss);
    for (int i = 0; i < mn_model_params(p.student); i++) {
        const mn_model_param *of = mn_model_param_at(p.student, i);
        for (int64_t k = 0; k < of->info.count; k++) {
            CHECK(fabs(((const double *)of->grad)[k]) < 1e-12, "%s", of->name);
        }
    }
    close_pass(&p);
    check_done();
}

static void weights_ramp(void **state) {
    (void)state;
    const mn_train_options o = { .distill_kl = 0.8, .distill_boundary = 0.2, .distill_turn = 100,
                                 .distill_ramp = 10, .distill_kl_late = 0.9,
                                 .distill_boundary_late = 0.1 };
    const struct {
        int64_t step;
        double kl, boundary;
    } wants[] = { { 0, 0.8, 0.2 }, { 99, 0.8, 0.2 }, { 104, 0.85, 0.15 }, { 109, 0.9, 0.1 },
                  { 5000, 0.9, 0.1 } };
    for (size_t i = 0; i < MN_COUNTOF(wants); i++) {
        double kl, boundary;
        mn_distill_weights(&kl, &boundary, &o, wants[i].step);
        CHECK(fabs(kl - wants[i].kl) < 1e-12 && fabs(boundary - wants[i].boundary) < 1e-12,
              "step %lld: %g and %g", (long long)wants[i].step, kl, boundary);
    }
    check_done();
}

static void patterns_choose(void **state) {
    (void)state;
    mn_model *model;
    const bool of[MN_MAX_LAYERS] = { [1] = true };
    const bool none[MN_MAX_LAYERS] = { false };
    if (model_case_create(&model, student_json, MN_F32, 0.1, 5) != MN_OK) check_fatal("a model");
    const struct {
        const char *list, *name;
        double rate;
    } wants[] = {
        { "", "model.embeddings.weight", 1.0 },
        { "mixers", "model.embeddings.weight", 0.0 },
        { "mixers", "model.layers.1.attn.r_proj.weight", 1.0 },
        { "mixers", "model.layers.1.attn_norm.weight", 0.0 },
        { "mixers", "model.layers.0.attn.q_proj.weight", 0.0 },
        { "mixers", "model.layers.1.mlp.gate_proj.weight", 0.1 },
        { "mixers", "model.layers.1.mlp.up_proj.weight", 0.0 },
        { "*.q_proj.weight=0.25, *.attn.*", "model.layers.2.attn.q_proj.weight", 0.25 },
        { "*.q_proj.weight=0.25, *.attn.*", "model.layers.2.attn.k_proj.weight", 1.0 },
    };
    for (size_t i = 0; i < MN_COUNTOF(wants); i++) {
        for (int k = 0; k < mn_model_params(model); k++) mn_model_param_at(model, k)->rate = 1.0;
        CHECK(mn_trainable_apply(model, wants[i].list, of) == MN_OK, "%s", mn_last_error());
        const mn_model_param *p = mn_model_param_named(model, wants[i].name);
        CHECK(p && p->rate == wants[i].rate, "\"%s\": %s learns at %g", wants[i].list,
              wants[i].name, p ? p->rate : NAN);
    }
    static const char *const wrong[] = { "*.none", "*.attn.*=fast", "*.attn.*=-1" };
    for (size_t i = 0; i < MN_COUNTOF(wrong); i++) {
        CHECK(mn_trainable_apply(model, wrong[i], of) != MN_OK, "\"%s\" is taken", wrong[i]);
    }
    CHECK(mn_trainable_apply(model, "mixers", none) != MN_OK, "mixers of no layer");
    mn_model_destroy(model);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_differences),
        cmocka_unit_test(other_layers_stay_out),
        cmocka_unit_test(a_copy_has_nothing_to_learn),
        cmocka_unit_test(weights_ramp),
        cmocka_unit_test(patterns_choose),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
