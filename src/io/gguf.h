/* gguf.h - writes GGUF files (version 3), as llama.cpp reads them.
 *
 *     "GGUF" | u32 version | u64 tensors | u64 keys | keys | tensor infos | data aligned to 32
 *
 * A key is a name, a type and a value; lists have the type of their items and how many. A tensor's
 * sizes are told innermost first. All numbers are little-endian. */
#ifndef MN_IO_GGUF_H
#define MN_IO_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mneme.h"

/* Types of tensors that are written, with the format's numbers. */
typedef enum mn_gguf_type {
    MN_GGUF_F32 = 0,
    MN_GGUF_F16 = 1,
    MN_GGUF_Q8_0 = 8,     // 32 numbers as a float16 scale and bytes
    MN_GGUF_BF16 = 30,
} mn_gguf_type;

enum { MN_GGUF_NAME = 64, MN_GGUF_RANK = 4, MN_GGUF_BLOCK = 32, MN_GGUF_BLOCK_BYTES = 34 };

typedef struct mn_gguf_tensor {
    char name[MN_GGUF_NAME];
    mn_gguf_type type;
    int rank;
    int64_t shape[MN_GGUF_RANK];    // rows first
} mn_gguf_tensor;

int64_t mn_gguf_elements(const mn_gguf_tensor *tensor);
size_t mn_gguf_bytes(const mn_gguf_tensor *tensor);

/* `n` numbers, a multiple of 32, as blocks of Q8_0: scale max|x| / 127, rounded to nearest. */
void mn_gguf_q8_0(void *out, const float *x, int64_t n);

/* Keys as they are collected. All zeros is empty; a failure is kept until the file is written. */
typedef struct mn_gguf_keys {
    unsigned char *bytes;
    size_t size, capacity;
    uint64_t count;
    mn_status status;
} mn_gguf_keys;

void mn_gguf_u32(mn_gguf_keys *keys, const char *key, int64_t value);
void mn_gguf_f32(mn_gguf_keys *keys, const char *key, double value);
void mn_gguf_bool(mn_gguf_keys *keys, const char *key, bool value);
void mn_gguf_text(mn_gguf_keys *keys, const char *key, const char *value);
void mn_gguf_texts(mn_gguf_keys *keys, const char *key, const char *const *values, int64_t n);
void mn_gguf_i32s(mn_gguf_keys *keys, const char *key, const int32_t *values, int64_t n);
void mn_gguf_f32s(mn_gguf_keys *keys, const char *key, const float *values, int64_t n);
void mn_gguf_keys_free(mn_gguf_keys *keys);

/* Gives the bytes of tensor `i`, valid until the next call. */
typedef mn_status (*mn_gguf_source)(const void **data, void *context, int64_t i);

/* Writes the file (mn_file_write_atomic), one tensor in memory at a time. */
mn_status mn_gguf_write(const char *path, const mn_gguf_keys *keys, const mn_gguf_tensor *tensors,
                        int64_t n, mn_gguf_source source, void *context);

#endif
