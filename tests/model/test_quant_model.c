/* test_quant_model.c - models with weights of 8 or 4 bits compute, to the last bit, what the same
 * models compute with the float32 numbers that their codes stand for: read at once, token by token,
 * and after a save and a load; they are not trained. On a GPU they give what the CPU gives. */
// labels: sanitize
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "infer/session.h"
#include "model/checkpoint.h"
#include "model/quant.h"
#include "support/check.h"
#include "support/folder.h"
#include "support/model_case.h"

enum { VOCABULARY = 100, N = 21 };

static mn_context *cpu, *gpu;    // gpu NULL: none here

static const char *const models[] = {
    "\"layers\": \"gdn\", \"num_heads\": 2, \"head_dim\": 32",
    "\"layers\": \"gla, kda, delta\", \"num_heads\": 2",
    "\"layers\": \"attention, mamba2, hypermlp\", \"num_heads\": 4, \"tie_word_embeddings\": true",
    "\"layers\": \"mlstm, gla+ccq, kla\", \"num_heads\": 2",
    "\"layers\": \"bayes, palimpsa, mesa\", \"num_heads\": 2",
    "\"layers\": \"rwkv7, attention\", \"mixers\": {\"rwkv7\": {\"num_heads\": 2}}, "
    "\"mlp\": \"swiglu\"",
    "\"layers\": \"hgrn2, gsa, comba\", \"num_heads\": 2",
    "\"layers\": \"mla, longhorn, lightning\", \"num_heads\": 2",
    "\"layers\": \"gdn, attention\", \"num_heads\": 2, \"num_experts\": 4, "
    "\"num_experts_per_tok\": 2, \"moe_intermediate_size\": 48",
};

static mn_model *model_of(const char *what) {
    char text[512];
    snprintf(text, sizeof text, "{%s, \"hidden_size\": 72, \"intermediate_size\": 100, "
             "\"vocab_size\": %d, \"max_position_embeddings\": 32}", what, VOCABULARY);
    mn_model *model = NULL;
    if (model_case_create(&model, text, MN_F32, 0.05, 3) != MN_OK) {
        CHECK(false, "%s: %s", what, mn_last_error());
    }
    return model;
}

/* The logits after N tokens, `chunk` at a time. */
static bool logits_of(float *out, mn_model *model, mn_context *context, mn_dtype dtype, int chunk) {
    const mn_session_options how = { .dtype = dtype };
    mn_session *session = NULL;
    int32_t tokens[N];
    model_case_tokens(tokens, N, VOCABULARY, 9);
    mn_status st = mn_session_create(&session, context, model, &how);
    for (int i = 0; st == MN_OK && i < N; i += chunk) {
        const int n = i + chunk < N ? chunk : N - i;
        st = chunk == 1 ? mn_session_step(session, tokens[i])
                        : mn_session_feed(session, tokens + i, n);
    }
    if (st == MN_OK) memcpy(out, mn_session_logits(session), VOCABULARY * sizeof *out);
    mn_session_destroy(session);
    return CHECK(st == MN_OK, "%s", mn_last_error());
}

/* `to` gets the numbers that the codes of `from` stand for. */
static bool copy_numbers(mn_model *to, mn_model *from, int *n_quant) {
    *n_quant = 0;
    for (int i = 0; i < mn_model_params(from); i++) {
        const mn_model_param *p = mn_model_param_at(from, i);
        float *numbers = malloc((size_t)p->info.count * sizeof *numbers);
        *n_quant += p->quant != NULL;
        const bool fine = numbers && mn_model_get(from, i, numbers) == MN_OK &&
                          mn_model_put(to, i, numbers) == MN_OK;
        free(numbers);
        if (!CHECK(fine, "%s", mn_last_error())) return false;
    }
    return true;
}

static void same_as_numbers(void **state) {
    (void)state;
    static const int chunks[] = { 1, 3, N };
    for (size_t i = 0; i < MN_COUNTOF(models); i++) {
        for (int bits = 4; bits <= 8; bits += 4) {
            mn_model *quant = model_of(models[i]), *plain = model_of(models[i]);
            if (!quant || !plain) break;
            const mn_quant_options how = { .bits = bits, .group = 32 };
            int n_quant = 0;
            bool fine = CHECK(mn_model_quantize(quant, cpu, &how) == MN_OK, "%s: %s", models[i],
                              mn_last_error());
            fine = fine && copy_numbers(plain, quant, &n_quant);
            CHECK(n_quant >= 8, "%s: %d quantised tensors", models[i], n_quant);
            for (size_t c = 0; fine && c < MN_COUNTOF(chunks); c++) {
                float a[VOCABULARY], b[VOCABULARY];
                fine = logits_of(a, quant, cpu, MN_F32, chunks[c]) &&
                       logits_of(b, plain, cpu, MN_F32, chunks[c]);
                CHECK(!fine || memcmp(a, b, sizeof a) == 0, "%s, %d bits, %d tokens at once: other "
                      "bits than with float32", models[i], bits, chunks[c]);
            }
            CHECK(mn_model_want_gradients(quant) == MN_ERR_UNSUPPORTED, "gradients are promised");
            mn_model_destroy(quant);
            mn_model_destroy(plain);
        }
    }
    check_done();
}

static double apart(const float *a, const float *b) {
    double sum = 0.0;
    for (int i = 0; i < VOCABULARY; i++) sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sqrt(sum / VOCABULARY);
}

static void folders_hold_the_same(void **state) {
    (void)state;
    const char *folder = in_folder("");
    for (size_t i = 0; i < 3; i++) {
        float a[VOCABULARY], b[VOCABULARY];
        mn_model *quant = model_of(models[i]), *back = NULL;
        const mn_quant_options how = { .bits = i % 2 ? 8 : 4, .group = 64 };
        mn_status st = mn_model_quantize(quant, cpu, &how);
        if (st == MN_OK) st = mn_checkpoint_save(quant, folder);
        if (st == MN_OK) st = mn_checkpoint_load(&back, folder, MN_F32);
        if (CHECK(st == MN_OK, "%s", mn_last_error()) &&
            CHECK(mn_model_quant_bits(back) == how.bits, "bits") &&
            logits_of(a, quant, cpu, MN_F32, N) && logits_of(b, back, cpu, MN_F32, N)) {
            CHECK(memcmp(a, b, sizeof a) == 0, "%s: other bits from a file", models[i]);
        }
        CHECK(mn_model_quantize(quant, cpu, &how) == MN_ERR_ARGUMENT, "quantised twice");
        mn_model_destroy(quant);
        mn_model_destroy(back);
    }
    check_done();
}

/* In float32 a GPU differs by the order of sums; in bf16 by roundings of activations, by which it
 * differs with weights of bf16 too. */
static void gpu_gives_the_same(void **state) {
    (void)state;
    if (!gpu) printf("skipped: there is no GPU here\n");
    for (size_t i = 0; gpu && i < MN_COUNTOF(models); i++) {
        for (int bits = 4; bits <= 8; bits += 4) {
            static const float zero[VOCABULARY];
            float host[VOCABULARY], there[2][2][VOCABULARY], plain[VOCABULARY];
            const mn_quant_options how = { .bits = bits, .group = 32 };
            bool fine = true;
            for (int bf16 = 0; bf16 < 2 && fine; bf16++) {
                mn_model *quant = model_of(models[i]), *numbers = model_of(models[i]);
                int n;
                fine = mn_model_quantize(quant, cpu, &how) == MN_OK &&
                       copy_numbers(numbers, quant, &n);
                const mn_dtype dtype = bf16 ? MN_BF16 : MN_F32;
                fine = fine && (bf16 || logits_of(host, quant, cpu, MN_F32, N)) &&
                       logits_of(there[bf16][0], quant, gpu, dtype, N) &&
                       logits_of(there[bf16][1], quant, gpu, dtype, 1) &&
                       (!bf16 || logits_of(plain, numbers, gpu, dtype, N));
                mn_model_destroy(quant);
                mn_model_destroy(numbers);
            }
            if (!CHECK(fine, "%s: %s", models[i], mn_last_error())) continue;
            const double size = apart(host, zero), off = apart(there[0][0], host);
            const double steps = apart(there[0][1], host), rounded = apart(plain, host);
            const double reads = apart(there[1][0], host), decodes = apart(there[1][1], host);
            printf("model %zu, %d bits: size %g, off %g, steps off %g; in bf16 %g, %g, with bf16 "
                   "weights %g\n", i, bits, size, off, steps, reads, decodes, rounded);
            fflush(stdout);
            CHECK(off < 5e-5 * size && steps < 5e-5 * size, "%s, %d bits: off by %g and %g of %g",
                  models[i], bits, off, steps, size);
            CHECK(reads < 2.0 * rounded && decodes < 3.0 * rounded, "%s, %d bits: in bf16 off by "
                  "%g and %g, with weights of bf16 %g", models[i], bits, reads, decodes, rounded);
        }
    }
    check_done();
}

int main(void) {
    const mn_context_options here = { .n_threads = 2 };
    const mn_context_options there = { .n_threads = 2, .device = "cuda" };
    if (mn_context_create(&cpu, &here) != MN_OK) return 1;
    if (mn_context_create(&gpu, &there) != MN_OK) gpu = NULL;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_as_numbers),
        cmocka_unit_test(folders_hold_the_same),
        cmocka_unit_test(gpu_gives_the_same),
    };
    const int failed = cmocka_run_group_tests(tests, make_folder, remove_folder);
    mn_context_destroy(gpu);
    mn_context_destroy(cpu);
    return failed;
}
