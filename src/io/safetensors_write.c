/* safetensors_write.c - lays out and writes a safetensors file. */
#include "io/safetensors.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/util.h"
#include "io/file.h"
#include "io/json_write.h"

enum { ALIGNMENT = 8 };

/* What the file will hold, worked out before anything is written. */
typedef struct layout {
    const mn_stored_tensor *tensors;
    int64_t n_tensors;
    int64_t *order;         // data order: indices into tensors
    size_t *begin;          // data offset of each tensor
    char *header;
    mn_stored_source source;    // of the data, in place of that of the tensors; NULL: theirs
    void *context;
} layout;

static mn_status fail_memory(const char *path) {
    return mn_fail(MN_ERR_MEMORY, "%s: out of memory", path);
}

/* A tensor has to agree with itself before its name goes into a file. */
static mn_status check_tensor(const mn_stored_tensor *tensor, bool sourced, const char *path) {
    const char *name = tensor->name;
    size_t bytes = mn_stored_dtype_bytes(tensor->dtype);
    if (tensor->rank < 0 || tensor->rank > MN_STORED_MAX_RANK) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: tensor \"%s\": %d dimensions, the most is %d", path,
                       name, tensor->rank, MN_STORED_MAX_RANK);
    }
    for (int i = 0; i < tensor->rank; i++) {
        const int64_t size = tensor->shape[i];
        if (size < 0 || (uint64_t)size > SIZE_MAX || !mn_mul_size(&bytes, bytes, (size_t)size)) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: tensor \"%s\": shape[%d] = %" PRId64
                           " is no possible size", path, name, i, size);
        }
    }
    if (bytes != tensor->bytes || (bytes > 0 && !tensor->data && !sourced)) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: tensor \"%s\": dtype and shape need %zu bytes, %zu "
                       "given", path, name, bytes, tensor->data ? tensor->bytes : 0);
    }
    return MN_OK;
}

/* Wide elements first: after any number of w-byte elements the next offset is a multiple of w, so
 * every tensor is aligned without holes, which the format forbids. */
static mn_status place(layout *to, const char *path) {
    static const size_t widths[] = {8, 4, 2, 1};
    size_t end = 0;
    int64_t n = 0;
    for (size_t w = 0; w < MN_COUNTOF(widths); w++) {
        for (int64_t i = 0; i < to->n_tensors; i++) {
            if (mn_stored_dtype_bytes(to->tensors[i].dtype) != widths[w]) continue;
            to->order[n++] = i;
            to->begin[i] = end;
            if (!mn_add_size(&end, end, to->tensors[i].bytes) || end > INT64_MAX) {
                return mn_fail(MN_ERR_ARGUMENT, "%s: the tensors are too large for one file", path);
            }
        }
    }
    return MN_OK;
}

static json_t *describe(const mn_stored_tensor *tensor, size_t begin) {
    json_t *shape = json_array();
    for (int i = 0; i < tensor->rank; i++) {
        if (json_array_append_new(shape, json_integer(tensor->shape[i])) != 0) {
            json_decref(shape);
            return NULL;
        }
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", mn_stored_dtype_name(tensor->dtype),
                     "shape", shape, "data_offsets", (json_int_t)begin,
                     (json_int_t)(begin + tensor->bytes));
}

/* Adds a member that must be new. `value` is taken over; NULL counts as out of memory. */
static mn_status add_new(json_t *object, const char *key, json_t *value, const char *path) {
    json_t *utf8 = json_string(key);            // NULL for text that JSON cannot hold
    const bool good_key = utf8 != NULL;
    json_decref(utf8);
    if (good_key && !json_object_get(object, key)) {
        return json_object_set_new(object, key, value) == 0 ? MN_OK : fail_memory(path);
    }
    json_decref(value);
    return mn_fail(MN_ERR_ARGUMENT, "%s: name \"%s\" %s", path, key,
                   good_key ? "is given twice" : "is not UTF-8 text");
}

static mn_status add_metadata(json_t *header, const mn_stored_text *metadata, int64_t n,
                              const char *path) {
    if (n == 0) return MN_OK;
    json_t *texts = json_object();
    if (json_object_set_new(header, "__metadata__", texts) != 0) return fail_memory(path);
    for (int64_t i = 0; i < n; i++) {
        json_t *value = json_string(metadata[i].value);
        if (!value) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: metadata \"%s\" is not UTF-8 text", path,
                           metadata[i].key);
        }
        const mn_status st = add_new(texts, metadata[i].key, value, path);
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

static mn_status add_tensors(json_t *header, const layout *from, const char *path) {
    for (int64_t i = 0; i < from->n_tensors; i++) {
        const mn_stored_tensor *tensor = &from->tensors[i];
        if (strcmp(tensor->name, "__metadata__") == 0) {
            return mn_fail(MN_ERR_ARGUMENT, "%s: no tensor can be named __metadata__", path);
        }
        json_t *entry = describe(tensor, from->begin[i]);
        const mn_status st = add_new(header, tensor->name, entry, path);
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

/* The header text, padded with blanks so that the data starts at a multiple of 8. */
static mn_status print_header(layout *to, const json_t *header, const char *path) {
    char *text;
    const mn_status st = mn_json_text(&text, header, MN_JSON_COMPACT);
    if (st != MN_OK) return st;
    const size_t n = strlen(text), padded = (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (padded > MN_STORED_MAX_HEADER) {
        free(text);
        return mn_fail(MN_ERR_ARGUMENT, "%s: names and metadata make a header of %zu bytes, the "
                       "format allows %d", path, padded, MN_STORED_MAX_HEADER);
    }
    to->header = realloc(text, padded + 1);
    if (!to->header) {
        free(text);
        return fail_memory(path);
    }
    memset(to->header + n, ' ', padded - n);
    to->header[padded] = '\0';
    return MN_OK;
}

static mn_status plan(layout *to, const mn_stored_text *metadata, int64_t n_metadata,
                      const char *path) {
    for (int64_t i = 0; i < to->n_tensors; i++) {
        const mn_status st = check_tensor(&to->tensors[i], to->source != NULL, path);
        if (st != MN_OK) return st;
    }
    to->order = calloc((size_t)to->n_tensors + 1, sizeof *to->order);
    to->begin = calloc((size_t)to->n_tensors + 1, sizeof *to->begin);
    json_t *header = json_object();
    mn_status st = to->order && to->begin && header ? MN_OK : fail_memory(path);
    if (st == MN_OK) st = place(to, path);
    if (st == MN_OK) st = add_metadata(header, metadata, n_metadata, path);
    if (st == MN_OK) st = add_tensors(header, to, path);
    if (st == MN_OK) st = print_header(to, header, path);
    json_decref(header);
    return st;
}

/* The writer callback: length, header, data. */
static mn_status put_layout(mn_sink *sink, void *context) {
    const layout *from = context;
    const size_t n = strlen(from->header);
    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)((uint64_t)n >> (8 * i));
    mn_status st = mn_sink_put(sink, length, sizeof length);
    if (st == MN_OK) st = mn_sink_put(sink, from->header, n);
    for (int64_t i = 0; i < from->n_tensors && st == MN_OK; i++) {
        const mn_stored_tensor *tensor = &from->tensors[from->order[i]];
        const void *data = tensor->data;
        if (from->source) st = from->source(&data, from->context, from->order[i]);
        if (st == MN_OK) st = mn_sink_put(sink, data, tensor->bytes);
    }
    return st;
}

mn_status mn_safetensors_write(const char *path, const mn_stored_tensor *tensors,
                               int64_t n_tensors, const mn_stored_text *metadata,
                               int64_t n_metadata) {
    return mn_safetensors_write_from(path, tensors, n_tensors, metadata, n_metadata, NULL, NULL);
}

mn_status mn_safetensors_write_from(const char *path, const mn_stored_tensor *tensors,
                                    int64_t n_tensors, const mn_stored_text *metadata,
                                    int64_t n_metadata, mn_stored_source source, void *context) {
    layout to = {.tensors = tensors, .n_tensors = n_tensors, .source = source,
                 .context = context};
    mn_status st = plan(&to, metadata, n_metadata, path);
    if (st == MN_OK) st = mn_file_write_atomic(path, put_layout, &to);
    free(to.header);
    free(to.begin);
    free(to.order);
    return st;
}
