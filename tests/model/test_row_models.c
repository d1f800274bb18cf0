/* test_row_models.c - models whose blocks are more than a mixer and an MLP side by side: values of
 * the first layer in later ones, bounds that layers share, MLPs with a state. Gradients of every
 * parameter against finite differences, steps and pieces against all tokens at once, packed
 * sequences against separate ones, recomputed passes against kept ones. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "support/check.h"
#include "support/model_case.h"

enum { VOCABULARY = 11, LENGTH = 12, TRIED = 3 };

static const char *const models[] = {
    "{\"layers\": \"rwkv7\", \"num_hidden_layers\": 3, \"hidden_size\": 8, \"vocab_size\": 11, "
    "\"num_heads\": 2, \"decay_low_rank_dim\": 3, \"gate_low_rank_dim\": 2, \"a_low_rank_dim\": 2, "
    "\"v_low_rank_dim\": 2, \"mlp\": \"rwkv7\", \"norm\": \"layer\", \"norm_first\": true, "
    "\"intermediate_size\": 12}",
    "{\"layers\": \"rwkv7, attention, rwkv7\", \"hidden_size\": 8, \"vocab_size\": 11, "
    "\"mixers\": {\"rwkv7\": {\"num_heads\": 1, \"decay_low_rank_dim\": 3, "
    "\"gate_low_rank_dim\": 2, \"a_low_rank_dim\": 2, \"v_low_rank_dim\": 2, \"value_dim\": 16}}, "
    "\"mlp\": \"swiglu\", \"norm\": \"layer\", \"norm_bias\": false, \"intermediate_size\": 12}",
    "{\"layers\": \"hgrn2\", \"num_hidden_layers\": 4, \"hidden_size\": 8, \"vocab_size\": 11, "
    "\"num_heads\": 2, \"intermediate_size\": 12}",
    "{\"layers\": \"gsa, comba, gated_deltaproduct\", \"hidden_size\": 8, \"vocab_size\": 11, "
    "\"num_heads\": 2, \"num_slots\": 3, \"intermediate_size\": 12}",
};

typedef struct fixture {
    mn_context *context;
    mn_tape *tape;
    mn_model *model;
    int32_t tokens[LENGTH], targets[LENGTH];
} fixture;

static bool open(fixture *f, const char *json, mn_dtype dtype) {
    memset(f, 0, sizeof *f);
    mn_status st = model_case_create(&f->model, json, dtype, 0.2, 3);
    if (st == MN_OK) st = mn_model_want_gradients(f->model);
    if (st == MN_OK) st = mn_context_create(&f->context, NULL);
    if (st == MN_OK) st = mn_tape_create(&f->tape, f->context, dtype);
    model_case_tokens(f->tokens, LENGTH, VOCABULARY, 1);
    model_case_tokens(f->targets, LENGTH, VOCABULARY, 2);
    return CHECK(st == MN_OK, "%s: %s", json, mn_last_error());
}

static void finish(fixture *f) {
    mn_tape_destroy(f->tape);
    mn_model_destroy(f->model);
    mn_context_destroy(f->context);
}

/* Two sequences of six tokens. */
static double loss_of(fixture *f, unsigned modes, mn_recompute recompute) {
    double loss = NAN;
    int64_t counted;
    const mn_model_input in = { .tokens = f->tokens, .B = 2, .T = LENGTH / 2,
                                .recompute = recompute };
    mn_tape_start(f->tape, modes);
    mn_tensor *hidden = mn_model_hidden(f->model, f->tape, &in);
    mn_model_loss(f->model, f->tape, hidden, f->targets, (mn_loss_options){ 0 }, &loss, &counted);
    if (mn_tape_status(f->tape) == MN_OK && modes & MN_TAPE_RECORD) mn_tape_backward(f->tape);
    mn_model_settle_gradients(f->model);
    CHECK(mn_tape_status(f->tape) == MN_OK, "%s", mn_last_error());
    return loss;
}

/* Derivative by four points, as in test_model.c. */
static double difference(fixture *f, double *value) {
    static const double at[] = { -2, -1, 1, 2 }, weight[] = { 1, -8, 8, -1 };
    const double h = 2e-5, before = *value;
    double sum = 0.0;
    for (int i = 0; i < 4; i++) {
        *value = before + at[i] * h;
        sum += weight[i] * loss_of(f, MN_TAPE_FORWARD, MN_RECOMPUTE_NONE);
    }
    *value = before;
    return sum / (12 * h);
}

static void gradients(void **state) {
    (void)state;
    for (size_t m = 0; m < MN_COUNTOF(models); m++) {
        fixture f;
        if (!open(&f, models[m], MN_F64)) continue;
        loss_of(&f, MN_TAPE_RECORD, MN_RECOMPUTE_NONE);
        for (int i = 0; i < mn_model_params(f.model); i++) {
            const mn_model_param *p = mn_model_param_at(f.model, i);
            for (uint64_t t = 0; t < TRIED; t++) {
                const uint64_t bits = mn_rng_bits(8, (uint64_t)i, t);
                const int64_t at = (int64_t)(bits % (uint64_t)p->info.count);
                const double want = difference(&f, (double *)p->value + at);
                const double got = ((double *)p->grad)[at];
                CHECK(fabs(got - want) <= 1e-7 * (1.0 + fabs(want)), "%d %s[%lld]: gradient %.9g, "
                      "differences %.9g", (int)m, p->name, (long long)at, got, want);
            }
        }
        finish(&f);
    }
    check_done();
}

/* Logits (LENGTH, VOCABULARY) of the tokens as one sequence, in pieces or at once, or packed. */
static bool logits_of(fixture *f, double *to, const int64_t *pieces, int n, const int64_t *starts,
                      int64_t n_starts) {
    mn_model_state state = { 0 };
    mn_status st = n > 1 ? mn_model_state_create(&state, f->model) : MN_OK;
    int64_t at = 0;
    for (int i = 0; i < n && st == MN_OK; i++) {
        const mn_model_input in = { .tokens = f->tokens + at, .B = 1, .T = pieces[i],
                                    .starts = starts, .n_sequences = n_starts,
                                    .state = n > 1 ? &state : NULL };
        mn_tape_start(f->tape, MN_TAPE_FORWARD);
        const mn_tensor *y = mn_model_logits(f->model, f->tape,
                                             mn_model_hidden(f->model, f->tape, &in));
        st = mn_tape_status(f->tape);
        for (int64_t k = 0; k < pieces[i] * VOCABULARY && st == MN_OK; k++) {
            to[at * VOCABULARY + k] = y->dtype == MN_F64 ? ((double *)y->data)[k]
                                                         : (double)((float *)y->data)[k];
        }
        at += pieces[i];
    }
    mn_model_state_free(&state);
    return CHECK(st == MN_OK, "%s", mn_last_error());
}

static void pieces_equal_whole(void **state) {
    (void)state;
    static const int64_t whole[] = { LENGTH }, mixed[] = { 5, 1, 1, 2, 3 },
                         ones[] = { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 };
    for (size_t m = 0; m < MN_COUNTOF(models); m++) {
        for (int dtype = MN_F32; dtype <= MN_F64; dtype++) {
            fixture f;
            double want[LENGTH * VOCABULARY], got[LENGTH * VOCABULARY], top = 0.0;
            if (!open(&f, models[m], (mn_dtype)dtype)) continue;
            logits_of(&f, want, whole, 1, NULL, 0);
            for (int k = 0; k < LENGTH * VOCABULARY; k++) top = fmax(top, fabs(want[k]));
            const double near = (dtype == MN_F64 ? 1e-11 : 1e-5) * top;
            for (int way = 0; way < 2; way++) {
                logits_of(&f, got, way ? mixed : ones, way ? 5 : LENGTH, NULL, 0);
                for (int k = 0; k < LENGTH * VOCABULARY; k++) {
                    CHECK(fabs(got[k] - want[k]) <= near, "%d type %d way %d: %g for %g at %d",
                          (int)m, dtype, way, got[k], want[k], k);
                }
            }
            finish(&f);
        }
    }
    check_done();
}

static void packed_equals_separate(void **state) {
    (void)state;
    static const int64_t starts[] = { 0, 3, 4, LENGTH }, whole[] = { LENGTH };
    for (size_t m = 0; m < MN_COUNTOF(models); m++) {
        fixture f;
        double packed[LENGTH * VOCABULARY], one[LENGTH * VOCABULARY];
        if (!open(&f, models[m], MN_F32)) continue;
        logits_of(&f, packed, whole, 1, starts, 3);
        for (int n = 0; n < 3; n++) {
            const int64_t T = starts[n + 1] - starts[n];
            int32_t all[LENGTH];
            memcpy(all, f.tokens, sizeof all);
            memmove(f.tokens, all + starts[n], (size_t)T * sizeof *all);
            logits_of(&f, one, &T, 1, NULL, 0);
            memcpy(f.tokens, all, sizeof all);
            CHECK(memcmp(one, packed + starts[n] * VOCABULARY,
                         (size_t)(T * VOCABULARY) * sizeof *one) == 0,
                  "%d: packed sequence %d differs from a separate one", (int)m, n);
        }
        finish(&f);
    }
    check_done();
}

static void recomputed_is_kept(void **state) {
    (void)state;
    for (size_t m = 0; m < MN_COUNTOF(models); m++) {
        fixture f;
        if (!open(&f, models[m], MN_F32)) continue;
        int64_t count = 0, at = 0;
        for (int i = 0; i < mn_model_params(f.model); i++) {
            count += mn_model_param_at(f.model, i)->info.count;
        }
        float *kept = calloc((size_t)count, sizeof *kept);
        assert_non_null(kept);
        for (int how = 0; how < MN_RECOMPUTE_COUNT; how++, at = 0) {
            loss_of(&f, MN_TAPE_RECORD, (mn_recompute)how);
            for (int i = 0; i < mn_model_params(f.model); i++) {
                const mn_model_param *p = mn_model_param_at(f.model, i);
                const size_t bytes = (size_t)p->info.count * sizeof *kept;
                if (how == 0) memcpy(kept + at, p->grad, bytes);
                CHECK(memcmp(kept + at, p->grad, bytes) == 0, "%d recompute %d: %s", (int)m, how,
                      p->name);
                at += p->info.count;
            }
        }
        free(kept);
        finish(&f);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients),
        cmocka_unit_test(pieces_equal_whole),
        cmocka_unit_test(packed_equals_separate),
        cmocka_unit_test(recomputed_is_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
