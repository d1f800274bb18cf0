/* fuzz_quant.c - weights of 8 and 4 bits: any bytes in the place of model.safetensors fail with a
 * message, or give a model that reads tokens, saves itself and loads again. */
#define _GNU_SOURCE    // memfd_create
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/file.h"
#include "model/checkpoint.h"
#include "model/quant.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static const char config[] =
    "{\"layers\": \"gdn\", \"num_hidden_layers\": 1, \"hidden_size\": 40, \"num_heads\": 1, "
    "\"head_dim\": 16, \"expand_v\": 1, \"vocab_size\": 16, \"intermediate_size\": 32, "
    "\"quantization\": {\"bits\": 4, \"group_size\": 32}}";

static mn_context *context;
static mn_tape *tape;
static int file;
static char folder[] = "/tmp/mneme-fuzz-XXXXXX", weights[64], settings[64];

static void clean(void) {
    unlink(weights);
    unlink(settings);
    rmdir(folder);
}

static void start(void) {
    const mn_context_options one = { .n_threads = 1 };
    char target[64];
    REQUIRE(mn_context_create(&context, &one) == MN_OK);
    REQUIRE(mn_tape_create(&tape, context, MN_F32) == MN_OK);
    REQUIRE(mkdtemp(folder));
    snprintf(weights, sizeof weights, "%s/model.safetensors", folder);
    snprintf(settings, sizeof settings, "%s/config.json", folder);
    REQUIRE(mn_file_write_bytes(settings, config, sizeof config - 1) == MN_OK);
    file = memfd_create("weights", 0);
    REQUIRE(file >= 0);
    snprintf(target, sizeof target, "/proc/self/fd/%d", file);
    REQUIRE(symlink(target, weights) == 0);
    atexit(clean);
}

/* Three tokens and one; weights may be anything, so logits may be, too. */
static void read_tokens(mn_model *model) {
    static const int32_t tokens[] = { 1, 15, 0 };
    for (int64_t T = 3; T >= 1; T -= 2) {
        const mn_model_input in = { .tokens = tokens, .B = 1, .T = T };
        mn_tape_start(tape, MN_TAPE_FORWARD);
        mn_model_logits(model, tape, mn_model_hidden(model, tape, &in));
        REQUIRE(mn_tape_status(tape) == MN_OK || *mn_last_error());
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    mn_model *model;
    if (!context) start();
    REQUIRE(ftruncate(file, 0) == 0);
    REQUIRE(pwrite(file, bytes, size, 0) == (ssize_t)size);
    if (mn_checkpoint_load(&model, folder, MN_F32) != MN_OK) {
        REQUIRE(!model && *mn_last_error());
        return 0;
    }
    read_tokens(model);
    mn_model_destroy(model);
    return 0;
}
