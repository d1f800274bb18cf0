/* fuzz_upload.c - uploaded states: any bytes are refused with a message, or give a state whose
 * steps disturb no session that steps beside it.
 *
 * A state names its model by a number that no fuzzer finds: "@@@@@@@@@@@@@@@@" in the input stands
 * for that of the model used here, as in fuzz_state.c. */
#define _GNU_SOURCE    // memfd_create, memmem
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/safetensors.h"
#include "server/states.h"

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
static mn_model *model;
static mn_states *states;
static mn_batch *batch;
static mn_session *loaded, *beside;
static float want[7];
static int file;
static char path[64], mark[17];

static void learn_mark(void) {
    mn_safetensors *saved;
    char name[] = "/tmp/mneme-fuzz-XXXXXX";
    const int made = mkstemp(name);
    REQUIRE(made >= 0 && mn_session_save(beside, name) == MN_OK);
    REQUIRE(mn_safetensors_open(&saved, name) == MN_OK);
    snprintf(mark, sizeof mark, "%s", mn_safetensors_metadata(saved, "model"));
    mn_safetensors_close(saved);
    close(made);
    unlink(name);
}

static void start(void) {
    mn_json root = { 0 };
    mn_model_config config = { 0 };
    const mn_context_options one = { .n_threads = 1 };
    const mn_session_options how = { .prefill_chunk = 8 };
    REQUIRE(mn_json_parse(&root, config_text, sizeof config_text - 1, "model",
                          MN_JSON_STANDARD) == MN_OK);
    REQUIRE(mn_model_config_read(&config, &root) == MN_OK);
    REQUIRE(mn_model_create(&model, &config, MN_F32) == MN_OK);
    REQUIRE(mn_context_create(&context, &one) == MN_OK);
    mn_model_start(model, context, 1);
    mn_model_config_free(&config);
    mn_json_free(&root);
    REQUIRE(mn_states_create(&states, 4, (size_t)1 << 24) == MN_OK);
    REQUIRE(mn_batch_create(&batch, context, model) == MN_OK);
    REQUIRE(mn_session_create(&loaded, context, model, &how) == MN_OK);
    REQUIRE(mn_session_create(&beside, context, model, &how) == MN_OK);
    learn_mark();
    REQUIRE(mn_session_step(beside, 3) == MN_OK);
    memcpy(want, mn_session_logits(beside), sizeof want);
    file = memfd_create("upload", 0);
    REQUIRE(file >= 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
}

static void write_input(const uint8_t *bytes, size_t size) {
    uint8_t *copy = malloc(size + 1);
    REQUIRE(copy != NULL);
    memcpy(copy, bytes, size);
    uint8_t *at = memmem(copy, size, stands_for, sizeof stands_for - 1);
    if (at) memcpy(at, mark, sizeof stands_for - 1);
    REQUIRE(ftruncate(file, 0) == 0 && pwrite(file, copy, size, 0) == (ssize_t)size);
    free(copy);
}

/* A token of the upload beside one of another session, which has to get its own bits. */
static void step_together(const mn_stored_state *state) {
    static const int32_t tokens[] = { 5, 3 };
    mn_session *const both[] = { loaded, beside };
    REQUIRE(mn_session_restore(loaded, state->snapshot) == MN_OK);
    REQUIRE(mn_session_reset(beside) == MN_OK);
    REQUIRE(mn_batch_step(batch, both, tokens, 2) == MN_OK);
    REQUIRE(memcmp(want, mn_session_logits(beside), sizeof want) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (!model) start();
    if (size > 1 << 16) return 0;
    mn_stored_state *state;
    write_input(bytes, size);
    REQUIRE(mn_session_reset(loaded) == MN_OK);
    if (mn_states_load(&state, states, loaded, path) == MN_OK) {
        step_together(state);
        mn_states_delete(states, state);
    } else {
        REQUIRE(!state && mn_last_error()[0]);
    }
    REQUIRE(mn_states_count(states) == 0 && mn_states_bytes(states) == 0);
    return 0;
}
