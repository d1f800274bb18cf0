/* fuzz_safetensors.c - any bytes either fail with a message or make a file that keeps its promises.
 *
 * libFuzzer hands over a block of exactly `size` bytes, so AddressSanitizer sees every read past
 * its end. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "io/safetensors.h"

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) abort();                                                                 \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static size_t check_tensor(const mn_safetensors *in, int64_t i) {
    const mn_stored_tensor *tensor = mn_safetensors_at(in, i);
    const int64_t n = mn_stored_elements(tensor);
    REQUIRE(mn_safetensors_find(in, mn_safetensors_name(in, i)) == tensor);
    REQUIRE(n >= 0 && (size_t)n * mn_stored_dtype_bytes(tensor->dtype) == tensor->bytes);

    /* n <= bytes <= size: the buffers stay as small as the input. */
    double *f64 = malloc(((size_t)n + 1) * sizeof *f64);
    float *f32 = malloc(((size_t)n + 1) * sizeof *f32);
    REQUIRE(f64 && f32);
    const mn_status wide = mn_safetensors_read_f64(f64, tensor);
    const mn_status narrow = mn_safetensors_read_f32(f32, tensor);
    REQUIRE(wide == narrow);
    for (int64_t j = 0; j < n && wide == MN_OK; j++) {
        REQUIRE(f64[j] != f64[j] ? f32[j] != f32[j] : f32[j] == (float)f64[j]);
    }
    free(f32);
    free(f64);
    return tensor->bytes;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    mn_safetensors *in;
    if (mn_safetensors_parse(&in, bytes, size, "fuzz") != MN_OK) {
        REQUIRE(!in && strncmp(mn_last_error(), "fuzz: ", 6) == 0);
        return 0;
    }
    size_t data_bytes = 0;
    for (int64_t i = 0; i < mn_safetensors_count(in); i++) data_bytes += check_tensor(in, i);
    uint64_t header_bytes;
    memcpy(&header_bytes, bytes, 8);
    REQUIRE(8 + header_bytes + data_bytes == size);
    for (int64_t i = 0; i < mn_safetensors_metadata_count(in); i++) {
        const mn_stored_text text = mn_safetensors_metadata_at(in, i);
        REQUIRE(mn_safetensors_metadata(in, text.key) == text.value);
    }
    mn_safetensors_close(in);
    return 0;
}
