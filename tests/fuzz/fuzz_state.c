/* fuzz_state.c - saved states of sequences: any bytes fail with a message, or give a state with
 * which a small model goes on, or which it refuses, without touching what is not its own.
 *
 * A state names its model by a number that no fuzzer finds: "@@@@@@@@@@@@@@@@" in the input stands
 * for that of the model used here. */
#define _GNU_SOURCE    // memfd_create, memmem
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/safetensors.h"
#include "model/model.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static const char config_text[] =
    "{\"layers\": \"gdn, attention, kla, hyperglu, mesa\", \"hidden_size\": 8, \"vocab_size\": 7, "
    "\"intermediate_size\": 8, \"max_position_embeddings\": 16}";
static const char stands_for[] = "@@@@@@@@@@@@@@@@";

static mn_context *context;
static mn_tape *tape;
static mn_model *model;
static int file;
static char path[64], mark[17];

static void learn_mark(void) {
    mn_model_state state;
    mn_safetensors *saved;
    REQUIRE(mn_model_state_create(&state, model) == MN_OK);
    char name[] = "/tmp/mneme-fuzz-XXXXXX";
    const int made = mkstemp(name);
    REQUIRE(made >= 0 && mn_model_state_save(&state, model, NULL, name) == MN_OK);
    REQUIRE(mn_safetensors_open(&saved, name) == MN_OK);
    snprintf(mark, sizeof mark, "%s", mn_safetensors_metadata(saved, "model"));
    mn_safetensors_close(saved);
    close(made);
    unlink(name);
    mn_model_state_free(&state);
}

static void start(void) {
    mn_json root = { 0 };
    mn_model_config config = { 0 };
    const mn_context_options one = { .n_threads = 1 };
    REQUIRE(mn_json_parse(&root, config_text, sizeof config_text - 1, "model",
                          MN_JSON_STANDARD) == MN_OK);
    REQUIRE(mn_model_config_read(&config, &root) == MN_OK);
    REQUIRE(mn_model_create(&model, &config, MN_F32) == MN_OK);
    REQUIRE(mn_context_create(&context, &one) == MN_OK);
    REQUIRE(mn_tape_create(&tape, context, MN_F32) == MN_OK);
    mn_model_start(model, context, 1);
    mn_model_config_free(&config);
    mn_json_free(&root);
    learn_mark();
    file = memfd_create("state", 0);
    REQUIRE(file >= 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
}

/* A token, then two, with the state as it was loaded and with a copy. */
static void go_on(mn_model_state *state) {
    static const int32_t tokens[] = { 1, 2, 6 };
    mn_model_state copy;
    REQUIRE(mn_model_state_copy(&copy, state) == MN_OK);
    for (int64_t T = 1; T <= 2; T++) {
        const mn_model_input in = { .tokens = tokens, .B = 1, .T = T,
                                    .state = T == 1 ? state : &copy };
        mn_tape_start(tape, MN_TAPE_FORWARD);
        mn_tensor *hidden = mn_model_hidden(model, tape, &in);
        const mn_tensor *logits = mn_model_logits(model, tape, hidden);
        REQUIRE((logits != NULL) == (mn_tape_status(tape) == MN_OK));
    }
    mn_model_state_free(&copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (!model) start();
    uint8_t *input = malloc(size + 1);
    if (!input) return 0;
    memcpy(input, bytes, size);
    uint8_t *at = memmem(input, size, stands_for, sizeof stands_for - 1);
    if (at) memcpy(at, mark, sizeof mark - 1);
    REQUIRE(ftruncate(file, 0) == 0);
    REQUIRE(pwrite(file, input, size, 0) == (ssize_t)size);
    free(input);
    mn_model_state state;
    if (mn_model_state_load(&state, model, path) != MN_OK) {
        REQUIRE(!state.layers && *mn_last_error());
        return 0;
    }
    go_on(&state);
    mn_model_state_free(&state);
    return 0;
}
