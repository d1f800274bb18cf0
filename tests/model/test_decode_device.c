/* test_decode_device.c - decoding on a GPU as one megakernel a token (kernels/decode.h): token by
 * token against all at once, in float32 and bf16, at widths for which the megakernel's tiles,
 * pieces and epilogues are whole, and at others; the same bits twice. Models with caches also read
 * so many tokens that these grow and have several parts of keys. Given words, only the models that
 * have one of them are read. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "infer/session.h"
#include "support/check.h"
#include "support/model_case.h"

enum { VOCABULARY = 1000, N = 9, LONG = 600 };    // tokens

static mn_context *gpu;    // NULL: none here
static char **words;       // up to a NULL

static bool absent(void) {
    if (!gpu) printf("skipped: there is no GPU here\n");
    return !gpu;
}

static const char *const models[] = {
    "\"layers\": \"gdn\", \"num_heads\": 2, \"head_dim\": 256, \"expand_v\": 1, "
    "\"hidden_size\": 512, \"intermediate_size\": 1408",
    "\"layers\": \"gdn\", \"num_heads\": 3, \"head_dim\": 40, \"expand_v\": 2, "
    "\"hidden_size\": 264, \"intermediate_size\": 88",
    "\"layers\": \"gdn\", \"num_heads\": 1, \"head_dim\": 24, \"expand_v\": 1, "
    "\"hidden_size\": 72, \"intermediate_size\": 4136",
    "\"layers\": \"delta\", \"num_heads\": 2, \"head_dim\": 64, \"hidden_size\": 128, "
    "\"intermediate_size\": 352",
    "\"layers\": \"gla, kda\", \"num_heads\": 2, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"attention, mamba2\", \"num_heads\": 4, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"gdn\", \"num_heads\": 1, \"head_dim\": 64, \"expand_v\": 1, "
    "\"hidden_size\": 60, \"intermediate_size\": 100",
    "\"layers\": \"mlstm, gla+ccq\", \"num_heads\": 2, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"mlstm, gdn+ccq\", \"num_heads\": 3, \"head_dim\": 40, "
    "\"hidden_size\": 132, \"intermediate_size\": 88",
    "\"layers\": \"bayes\", \"num_heads\": 2, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    /* steps of operators as stages: heads and columns that are whole, and others */
    "\"layers\": \"palimpsa\", \"num_heads\": 2, \"head_dim\": 128, \"expand_v\": 1, "
    "\"hidden_size\": 256, \"intermediate_size\": 704",
    "\"layers\": \"palimpsa\", \"num_heads\": 3, \"head_dim\": 20, \"expand_v\": 1, "
    "\"hidden_size\": 132, \"intermediate_size\": 88",
    "\"layers\": \"kla\", \"expand\": 1, \"hidden_size\": 256, \"intermediate_size\": 704",
    "\"layers\": \"kla\", \"expand\": 1, \"d_state\": 40, \"hidden_size\": 132, "
    "\"intermediate_size\": 88",
    "\"layers\": \"mamba2\", \"hidden_size\": 256, \"intermediate_size\": 704",
    "\"layers\": \"bayes\", \"num_heads\": 3, \"head_dim\": 40, \"hidden_size\": 132, "
    "\"intermediate_size\": 88",
    /* one that takes the ring of weights, in front of rows whose last chunk is not whole */
    "\"layers\": \"mesa\", \"num_heads\": 4, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"mesa, kla\", \"num_heads\": 3, \"head_dim\": 20, \"expand\": 1, "
    "\"hidden_size\": 132, \"intermediate_size\": 88",
    /* whose matrix is in the ring: keys that fill it, others, and those that are just too many for
     * registers */
    "\"layers\": \"mesa\", \"num_heads\": 2, \"head_dim\": 128, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"mesa\", \"num_heads\": 3, \"head_dim\": 88, \"hidden_size\": 132, "
    "\"intermediate_size\": 88, \"use_output_gate\": true",
    "\"layers\": \"mesa, gdn\", \"num_heads\": 1, \"head_dim\": 72, \"expand_v\": 1, "
    "\"hidden_size\": 256, \"intermediate_size\": 704",
    /* over a cache, one part of it: with both mixes, by place, without them */
    "\"layers\": \"hypermlp, hyperglu\", \"num_heads\": 2, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"hyperglu, attention\", \"num_heads\": 3, \"layout\": \"position\", "
    "\"attn_norm\": \"l2\", \"op1_rank\": 5, \"hidden_size\": 132, "
    "\"intermediate_size\": 88",
    "\"layers\": \"hyperglu\", \"num_heads\": 4, \"op1_rank\": 0, \"op2_rank\": 0, "
    "\"use_vo_gate\": false, \"hidden_size\": 256, \"intermediate_size\": 704",
    "\"layers\": \"hyperglu\", \"num_heads\": 2, \"use_rope\": true, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    /* and the small works of others between their launches */
    "\"layers\": \"relu_attention\", \"num_heads\": 4, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"longhorn, mesa\", \"num_heads\": 2, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"longhorn, longhorn_column\", \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"longhorn_column, mamba1\", \"hidden_size\": 132, \"state_size\": 40, "
    "\"intermediate_size\": 88",
    "\"layers\": \"hgrn2, lightning\", \"num_heads\": 2, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"rwkv7, comba\", \"num_heads\": 2, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"rg_lru, mamba1\", \"hidden_size\": 256, \"intermediate_size\": 704",
    "\"layers\": \"gdn2, palimpsa_paper\", \"num_heads\": 2, \"head_dim\": 64, "
    "\"hidden_size\": 256, \"intermediate_size\": 704",
    "\"layers\": \"gsa, short_conv\", \"num_heads\": 2, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
};

/* Models whose caches grow. */
static const char *const long_models[] = {
    "\"layers\": \"relu_attention\", \"num_heads\": 4, \"num_kv_heads\": 2, "
    "\"hidden_size\": 256, \"intermediate_size\": 704",
    "\"layers\": \"attention\", \"num_heads\": 2, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"attention, gdn\", \"num_heads\": 4, \"num_kv_heads\": 2, \"head_dim\": 40, "
    "\"expand_v\": 1, \"hidden_size\": 132, \"intermediate_size\": 88, \"window_size\": 300, "
    "\"qk_rms_norm\": true, \"partial_rotary_factor\": 0.5",
    "\"layers\": \"attention\", \"num_heads\": 12, \"num_kv_heads\": 2, \"head_dim\": 64, "
    "\"hidden_size\": 256, \"intermediate_size\": 704, \"use_output_gate\": true, "
    "\"rope_type\": \"yarn\", \"rope_factor\": 4, \"rope_original_context\": 128",
    "\"layers\": \"hypermlp\", \"num_heads\": 2, \"hidden_size\": 256, "
    "\"intermediate_size\": 704",
    "\"layers\": \"hyperglu, gdn\", \"num_heads\": 2, \"head_dim\": 64, \"expand_v\": 1, "
    "\"op2_rank\": 24, \"hidden_size\": 256, \"intermediate_size\": 704",
    "\"layers\": \"hyperglu\", \"num_heads\": 3, \"layout\": \"position\", "
    "\"attn_norm\": \"none\", \"hidden_size\": 132, \"intermediate_size\": 88",
};

static bool is_wanted(const char *model) {
    bool wanted = !words[0];
    for (int i = 0; words[i]; i++) wanted = wanted || strstr(model, words[i]);
    return wanted;
}

typedef enum way { AT_ONCE, ONE_BY_ONE, IN_A_BATCH } way;

/* Logits after `count` tokens. */
static void logits_of(float *out, const char *text, mn_dtype dtype, way how_read, int count) {
    const mn_session_options how = { .dtype = dtype };
    mn_model *model = NULL;
    mn_session *session = NULL;
    mn_batch *batch = NULL;
    int32_t tokens[LONG];
    model_case_tokens(tokens, count, VOCABULARY, 9);
    mn_status st = model_case_create(&model, text, MN_F32, 0.05, 3);
    if (st == MN_OK) st = mn_session_create(&session, gpu, model, &how);
    if (st == MN_OK) st = mn_batch_create(&batch, gpu, model);
    for (int i = 0; st == MN_OK && how_read != AT_ONCE && i < count; i++) {
        st = how_read == IN_A_BATCH ? mn_batch_step(batch, &session, &tokens[i], 1)
                                    : mn_session_step(session, tokens[i]);
    }
    if (st == MN_OK && how_read == AT_ONCE) st = mn_session_feed(session, tokens, count);
    if (st != MN_OK) check_fatal("%s: %s", text, mn_last_error());
    memcpy(out, mn_session_logits(session), VOCABULARY * sizeof *out);
    mn_batch_destroy(batch);
    mn_session_destroy(session);
    mn_model_destroy(model);
}

static double apart(const float *a, const float *b) {
    double sum = 0.0;
    for (int i = 0; i < VOCABULARY; i++) sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sqrt(sum / VOCABULARY);
}

/* In float32 both ways differ by the order of sums. In bf16 each is off by its roundings, decoding
 * by no more than twice what reading all at once is. */
static void check_model(const char *model, int number, int count) {
    static float all[2][VOCABULARY], one[2][VOCABULARY], again[VOCABULARY], batch[2][VOCABULARY];
    static const float zero[VOCABULARY];
    char text[512];
    snprintf(text, sizeof text, "{%s, \"num_hidden_layers\": 2, \"vocab_size\": %d, "
             "\"max_position_embeddings\": %d}", model, VOCABULARY, (int)mn_max(32, count));
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const mn_dtype dtype = bf16 ? MN_BF16 : MN_F32;
        logits_of(all[bf16], text, dtype, AT_ONCE, count);
        logits_of(batch[bf16], text, dtype, IN_A_BATCH, count);
        logits_of(one[bf16], text, dtype, ONE_BY_ONE, count);
        logits_of(again, text, dtype, ONE_BY_ONE, count);
        CHECK(memcmp(again, one[bf16], sizeof again) == 0, "%s: other bits the second time", text);
    }
    const double size = apart(all[0], zero), off = apart(one[0], all[0]);
    const double reads = apart(all[1], all[0]), decodes = apart(one[1], all[0]);
    const double off_batch = apart(batch[0], all[0]), batches = apart(batch[1], all[0]);
    printf("model %d: size %g, off %g, in a batch %g; in bf16 reading %g, decoding %g, in a "
           "batch %g\n", number, size, off, off_batch, reads, decodes, batches);
    fflush(stdout);
    CHECK(off < 2e-5 * size, "%s: decoding is off by %g of %g", text, off, size);
    CHECK(off_batch < 2e-5 * size, "%s: a batch is off by %g of %g", text, off_batch, size);
    CHECK(batches < 2.0 * reads, "%s: a batch in bf16 is off by %g, reading by %g of %g", text,
          batches, reads, size);
    CHECK(decodes < 2.0 * reads, "%s: decoding in bf16 is off by %g, reading by %g of %g", text,
          decodes, reads, size);
}

static void decoding_is_reading(void **state) {
    (void)state;
    if (absent()) return;
    for (int i = 0; i < (int)MN_COUNTOF(models); i++) {
        if (is_wanted(models[i])) check_model(models[i], i, N);
    }
    check_done();
}

static void caches_grow(void **state) {
    (void)state;
    if (absent()) return;
    for (int i = 0; i < (int)MN_COUNTOF(long_models); i++) {
        if (is_wanted(long_models[i])) check_model(long_models[i], i, LONG);
    }
    check_done();
}

int main(int argc, char **argv) {
    const mn_context_options there = { .n_threads = 2, .device = "cuda" };
    words = argv + (argc > 0);
    if (mn_context_create(&gpu, &there) != MN_OK) printf("skipped: %s\n", mn_last_error());
    const struct CMUnitTest tests[] = { cmocka_unit_test(decoding_is_reading),
                                        cmocka_unit_test(caches_grow) };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    mn_context_destroy(gpu);
    return failed;
}
