/* gguf.c - keys, tensor infos and data of a GGUF file. */
#include "io/gguf.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/f16.h"
#include "base/status.h"
#include "io/file.h"

enum { VERSION = 3, ALIGNMENT = 32 };

/* Types of values, with the format's numbers. */
enum { U32 = 4, I32 = 5, F32 = 6, BOOL = 7, TEXT = 8, LIST = 9 };

int64_t mn_gguf_elements(const mn_gguf_tensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++) n *= t->shape[i];
    return n;
}

size_t mn_gguf_bytes(const mn_gguf_tensor *t) {
    const size_t n = (size_t)mn_gguf_elements(t);
    switch (t->type) {
    case MN_GGUF_F32: return 4 * n;
    case MN_GGUF_F16:
    case MN_GGUF_BF16: return 2 * n;
    case MN_GGUF_Q8_0: return n / MN_GGUF_BLOCK * MN_GGUF_BLOCK_BYTES;
    }
    return 0;
}

void mn_gguf_q8_0(void *out, const float *x, int64_t n) {
    unsigned char *to = out;
    for (int64_t at = 0; at < n; at += MN_GGUF_BLOCK, to += MN_GGUF_BLOCK_BYTES) {
        float most = 0.0f;
        for (int i = 0; i < MN_GGUF_BLOCK; i++) most = fmaxf(most, fabsf(x[at + i]));
        const float scale = most / 127.0f, inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
        const uint16_t half = mn_f16_from_float(scale);
        to[0] = (unsigned char)half;
        to[1] = (unsigned char)(half >> 8);
        for (int i = 0; i < MN_GGUF_BLOCK; i++) {
            to[2 + i] = (unsigned char)(int8_t)roundf(x[at + i] * inverse);
        }
    }
}

/* ---- keys ------------------------------------------------------------------------------------ */

static void put(mn_gguf_keys *k, const void *bytes, size_t size) {
    if (k->status != MN_OK) return;
    if (k->size + size > k->capacity) {
        const size_t capacity = 2 * (k->capacity + size) + 4096;
        unsigned char *grown = realloc(k->bytes, capacity);
        if (!grown) {
            k->status = mn_fail(MN_ERR_MEMORY, "no memory for the keys of a GGUF file");
            return;
        }
        k->bytes = grown;
        k->capacity = capacity;
    }
    memcpy(k->bytes + k->size, bytes, size);
    k->size += size;
}

static void put_number(mn_gguf_keys *k, uint64_t value, int bytes) {
    unsigned char out[8];
    for (int i = 0; i < bytes; i++) out[i] = (unsigned char)(value >> (8 * i));
    put(k, out, (size_t)bytes);
}

static void put_text(mn_gguf_keys *k, const char *text) {
    const size_t n = strlen(text);
    put_number(k, n, 8);
    put(k, text, n);
}

static void put_float(mn_gguf_keys *k, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_number(k, bits, 4);
}

static void begin(mn_gguf_keys *k, const char *key, uint32_t type) {
    put_text(k, key);
    put_number(k, type, 4);
    k->count++;
}

static void begin_list(mn_gguf_keys *k, const char *key, uint32_t type, int64_t n) {
    begin(k, key, LIST);
    put_number(k, type, 4);
    put_number(k, (uint64_t)n, 8);
}

void mn_gguf_u32(mn_gguf_keys *k, const char *key, int64_t value) {
    begin(k, key, U32);
    put_number(k, (uint64_t)value, 4);
}

void mn_gguf_f32(mn_gguf_keys *k, const char *key, double value) {
    begin(k, key, F32);
    put_float(k, (float)value);
}

void mn_gguf_bool(mn_gguf_keys *k, const char *key, bool value) {
    begin(k, key, BOOL);
    put_number(k, value, 1);
}

void mn_gguf_text(mn_gguf_keys *k, const char *key, const char *value) {
    begin(k, key, TEXT);
    put_text(k, value);
}

void mn_gguf_texts(mn_gguf_keys *k, const char *key, const char *const *values, int64_t n) {
    begin_list(k, key, TEXT, n);
    for (int64_t i = 0; i < n; i++) put_text(k, values[i]);
}

void mn_gguf_i32s(mn_gguf_keys *k, const char *key, const int32_t *values, int64_t n) {
    begin_list(k, key, I32, n);
    for (int64_t i = 0; i < n; i++) put_number(k, (uint32_t)values[i], 4);
}

void mn_gguf_f32s(mn_gguf_keys *k, const char *key, const float *values, int64_t n) {
    begin_list(k, key, F32, n);
    for (int64_t i = 0; i < n; i++) put_float(k, values[i]);
}

void mn_gguf_keys_free(mn_gguf_keys *k) {
    free(k->bytes);
    *k = (mn_gguf_keys){ 0 };
}

/* ---- the file -------------------------------------------------------------------------------- */

typedef struct writing {
    const mn_gguf_keys *head;         // everything before the data
    const mn_gguf_tensor *tensors;
    int64_t n;
    mn_gguf_source source;
    void *context;
} writing;

static size_t aligned(size_t size) {
    return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static mn_status pad(mn_sink *sink, size_t size) {
    static const unsigned char zeros[ALIGNMENT];
    return mn_sink_put(sink, zeros, aligned(size) - size);
}

static mn_status put_file(mn_sink *sink, void *context) {
    const writing *w = context;
    mn_status st = mn_sink_put(sink, w->head->bytes, w->head->size);
    if (st == MN_OK) st = pad(sink, w->head->size);
    for (int64_t i = 0; i < w->n && st == MN_OK; i++) {
        const void *data = NULL;
        const size_t bytes = mn_gguf_bytes(&w->tensors[i]);
        st = w->source(&data, w->context, i);
        if (st == MN_OK) st = mn_sink_put(sink, data, bytes);
        if (st == MN_OK) st = pad(sink, bytes);
    }
    return st;
}

mn_status mn_gguf_write(const char *path, const mn_gguf_keys *keys, const mn_gguf_tensor *tensors,
                        int64_t n, mn_gguf_source source, void *context) {
    mn_gguf_keys head = { 0 };
    size_t offset = 0;
    if (keys->status != MN_OK) return keys->status;
    put(&head, "GGUF", 4);
    put_number(&head, VERSION, 4);
    put_number(&head, (uint64_t)n, 8);
    put_number(&head, keys->count, 8);
    put(&head, keys->bytes, keys->size);
    for (int64_t i = 0; i < n; i++) {
        const mn_gguf_tensor *t = &tensors[i];
        put_text(&head, t->name);
        put_number(&head, (uint64_t)t->rank, 4);
        for (int a = t->rank - 1; a >= 0; a--) put_number(&head, (uint64_t)t->shape[a], 8);
        put_number(&head, (uint64_t)t->type, 4);
        put_number(&head, offset, 8);
        offset += aligned(mn_gguf_bytes(t));
    }
    writing w = { &head, tensors, n, source, context };
    mn_status st = head.status;
    if (st == MN_OK) st = mn_file_write_atomic(path, put_file, &w);
    mn_gguf_keys_free(&head);
    return st;
}
