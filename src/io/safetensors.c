/* safetensors.c - opens and checks safetensors files.
 *
 * Everything is checked at open, in this order: length, header text, each entry by itself, then
 * all entries together against the bytes. Conversion to numbers is in safetensors_read.c, writing
 * in safetensors_write.c. */
#define _XOPEN_SOURCE 700       // strdup under -std=c11
#include "io/safetensors.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "io/cursor.h"
#include "io/file.h"
#include "io/json.h"

struct mn_safetensors {
    char *name;                             // path or name, for messages
    mn_file file;                           // all zeros when the bytes are the caller's
    mn_json header;                         // owns every name and text
    mn_stored_tensor *tensors;              // in header order
    const mn_stored_tensor **sorted;        // by name
    int64_t n_tensors;
    mn_stored_text *metadata;               // in header order
    int64_t n_metadata;
};

static const struct {
    const char *name;
    size_t bytes;
} dtypes[] = {
#define STORED_DTYPE(id, name, bytes, kind, exponent, fraction) [MN_STORED_##id] = {name, bytes},
#include "io/safetensors_dtype.def"
#undef STORED_DTYPE
};

/* Splits the file into header text and tensor bytes. */
static mn_status split(mn_bytes *header, mn_bytes *data, const mn_bytes *all, const char *name) {
    mn_cursor in = mn_cursor_over(all->bytes, all->size);
    uint64_t n;
    if (!mn_take_u64le(&in, &n)) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: %zu bytes are too few for a safetensors file, which starts with an "
                       "8-byte length", name, all->size);
    }
    if (n > MN_STORED_MAX_HEADER) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: is not a safetensors file: header length %" PRIu64
                       " is above the limit of %d", name, n, MN_STORED_MAX_HEADER);
    }
    if (!mn_take_bytes(&in, header, (size_t)n)) {
        return mn_fail(MN_ERR_FORMAT,
                       "%s: the header should have %" PRIu64 " bytes, but the file ends after %zu; "
                       "it may be cut short", name, n, mn_left(&in));
    }
    if (header->size == 0 || header->bytes[0] != '{') {
        return mn_fail(MN_ERR_FORMAT, "%s: is not a safetensors file: the header does not start "
                       "with {", name);
    }
    mn_take_bytes(&in, data, mn_left(&in));
    return MN_OK;
}

static mn_status parse_header(mn_json *header, const mn_bytes *text, const char *name) {
    const size_t room = strlen(name) + sizeof ": header";
    char *title = malloc(room);
    if (!title) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", name);
    snprintf(title, room, "%s: header", name);
    const mn_status st = mn_json_parse(header, text->bytes, text->size, title, MN_JSON_STANDARD);
    free(title);
    return st;
}

static mn_status read_dtype(mn_stored_dtype *out, const mn_json *entry) {
    const char *name;
    const mn_status st = mn_json_get_text(&name, entry, "dtype");
    if (st != MN_OK) return st;
    for (int i = 0; i < MN_STORED_COUNT; i++) {
        if (strcmp(dtypes[i].name, name) != 0) continue;
        *out = (mn_stored_dtype)i;
        return MN_OK;
    }
    return mn_json_fail(entry, "dtype \"%s\" is not known here", name);
}

/* A whole number >= 0 at `at`. */
static mn_status read_size(int64_t *out, const mn_json *at) {
    const mn_status st = mn_json_read_i64(out, at);
    if (st != MN_OK) return st;
    return *out >= 0 ? MN_OK : mn_json_fail(at, "%" PRId64 " is negative", *out);
}

/* Fills rank and shape, and `bytes` from their product. */
static mn_status read_shape(mn_stored_tensor *tensor, const mn_json *entry) {
    const mn_json shape = mn_json_member(entry, "shape");
    mn_status st = mn_json_expect_list(&shape);
    if (st != MN_OK) return st;
    const int64_t rank = mn_json_count(&shape);
    if (rank > MN_STORED_MAX_RANK) {
        return mn_json_fail(&shape, "%" PRId64 " dimensions are more than the %d supported", rank,
                            MN_STORED_MAX_RANK);
    }
    tensor->rank = (int)rank;
    tensor->bytes = dtypes[tensor->dtype].bytes;
    for (int i = 0; i < tensor->rank; i++) {
        const mn_json item = mn_json_item(&shape, i);
        st = read_size(&tensor->shape[i], &item);
        if (st != MN_OK) return st;
        if ((uint64_t)tensor->shape[i] > SIZE_MAX ||
            !mn_mul_size(&tensor->bytes, tensor->bytes, (size_t)tensor->shape[i])) {
            return mn_json_fail(&shape, "the sizes multiply to more bytes than can be counted");
        }
    }
    return MN_OK;
}

/* Points the tensor at its bytes after comparing them with shape and file. */
static mn_status read_data(mn_stored_tensor *tensor, const mn_json *entry, const mn_bytes *data) {
    const mn_json offsets = mn_json_member(entry, "data_offsets");
    mn_status st = mn_json_expect_list(&offsets);
    if (st != MN_OK) return st;
    if (mn_json_count(&offsets) != 2) {
        return mn_json_fail(&offsets, "expected two numbers, found %" PRId64,
                            mn_json_count(&offsets));
    }
    const mn_json first = mn_json_item(&offsets, 0), second = mn_json_item(&offsets, 1);
    int64_t begin, end;
    st = read_size(&begin, &first);
    if (st == MN_OK) st = read_size(&end, &second);
    if (st != MN_OK) return st;
    if (begin > end || (uint64_t)end > data->size) {
        return mn_json_fail(&offsets,
                            "[%" PRId64 ", %" PRId64 "] is not a range within the %zu bytes of "
                            "tensor data; the file may be cut short", begin, end, data->size);
    }
    if ((size_t)(end - begin) != tensor->bytes) {
        return mn_json_fail(entry,
                            "dtype and shape need %zu bytes, data_offsets [%" PRId64 ", %" PRId64
                            "] give %" PRId64, tensor->bytes, begin, end, end - begin);
    }
    tensor->data = data->bytes + begin;
    return MN_OK;
}

static mn_status read_metadata(mn_safetensors *in, const mn_json *texts) {
    mn_status st = mn_json_expect_object(texts);
    if (st != MN_OK) return st;
    in->metadata = calloc((size_t)mn_json_count(texts) + 1, sizeof *in->metadata);
    if (!in->metadata) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", in->name);
    for (mn_json text = {0}; mn_json_next(&text, texts);) {
        mn_stored_text *to = &in->metadata[in->n_metadata];
        to->key = text.name;
        st = mn_json_read_text(&to->value, &text);
        if (st != MN_OK) return st;
        in->n_metadata++;
    }
    return MN_OK;
}

/* Reads every entry by itself. */
static mn_status read_entries(mn_safetensors *in, const mn_bytes *data) {
    const size_t n = (size_t)mn_json_count(&in->header);
    in->tensors = calloc(n + 1, sizeof *in->tensors);       // + 1: calloc(0) may be NULL
    in->sorted = calloc(n + 1, sizeof *in->sorted);
    if (!in->tensors || !in->sorted) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", in->name);
    for (mn_json entry = {0}; mn_json_next(&entry, &in->header);) {
        mn_status st;
        if (strcmp(entry.name, "__metadata__") == 0) {
            st = read_metadata(in, &entry);
        } else {
            mn_stored_tensor *tensor = &in->tensors[in->n_tensors];
            tensor->name = entry.name;
            st = read_dtype(&tensor->dtype, &entry);
            if (st == MN_OK) st = read_shape(tensor, &entry);
            if (st == MN_OK) st = read_data(tensor, &entry, data);
            in->sorted[in->n_tensors++] = tensor;
        }
        if (st != MN_OK) return st;
    }
    return MN_OK;
}

static int compare_places(const void *a, const void *b) {
    const mn_stored_tensor *s = *(const mn_stored_tensor *const *)a;
    const mn_stored_tensor *t = *(const mn_stored_tensor *const *)b;
    const uintptr_t sa = (uintptr_t)s->data, ta = (uintptr_t)t->data;
    if (sa != ta) return sa < ta ? -1 : 1;
    return (s->bytes > t->bytes) - (s->bytes < t->bytes);   // empty ones first
}

static int compare_names(const void *a, const void *b) {
    const mn_stored_tensor *s = *(const mn_stored_tensor *const *)a;
    const mn_stored_tensor *t = *(const mn_stored_tensor *const *)b;
    return strcmp(s->name, t->name);
}

/* Tensors side by side must fill the data: no byte shared, no byte unclaimed. */
static mn_status check_cover(const mn_safetensors *in, const mn_bytes *data) {
    size_t end = 0;
    for (int64_t i = 0; i < in->n_tensors; i++) {
        const mn_stored_tensor *tensor = in->sorted[i];
        const size_t begin = (size_t)((const uint8_t *)tensor->data - data->bytes);
        if (begin < end) {
            return mn_fail(MN_ERR_FORMAT, "%s: tensors \"%s\" and \"%s\" overlap", in->name,
                           in->sorted[i - 1]->name, tensor->name);
        }
        if (begin > end) {
            return mn_fail(MN_ERR_FORMAT, "%s: the %zu bytes before tensor \"%s\" belong to none",
                           in->name, begin - end, tensor->name);
        }
        end = begin + tensor->bytes;
    }
    if (end == data->size) return MN_OK;
    return mn_fail(MN_ERR_FORMAT, "%s: the last %zu bytes belong to no tensor", in->name,
                   data->size - end);
}

static mn_status fill(mn_safetensors *in, const mn_bytes *all, const char *name) {
    in->name = strdup(name);
    if (!in->name) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", name);
    mn_bytes header, data;
    mn_status st = split(&header, &data, all, name);
    if (st == MN_OK) st = parse_header(&in->header, &header, name);
    if (st == MN_OK) st = read_entries(in, &data);
    if (st != MN_OK) return st;

    qsort(in->sorted, (size_t)in->n_tensors, sizeof *in->sorted, compare_places);
    st = check_cover(in, &data);
    qsort(in->sorted, (size_t)in->n_tensors, sizeof *in->sorted, compare_names);
    return st;
}

const char *mn_stored_dtype_name(mn_stored_dtype dtype) {
    assert(dtype >= 0 && dtype < MN_STORED_COUNT);
    return dtypes[dtype].name;
}

size_t mn_stored_dtype_bytes(mn_stored_dtype dtype) {
    assert(dtype >= 0 && dtype < MN_STORED_COUNT);
    return dtypes[dtype].bytes;
}

int64_t mn_stored_elements(const mn_stored_tensor *tensor) {
    int64_t n = 1;
    for (int i = 0; i < tensor->rank; i++) n *= tensor->shape[i];    // checked at open and write
    return n;
}

mn_status mn_safetensors_open(mn_safetensors **out, const char *path) {
    *out = NULL;
    mn_file file = {0};
    mn_status st = mn_file_map(&file, path);
    if (st == MN_OK) st = mn_safetensors_parse(out, file.bytes, file.size, path);
    if (st == MN_OK) {
        (*out)->file = file;
    } else {
        mn_file_unmap(&file);
    }
    return st;
}

mn_status mn_safetensors_parse(mn_safetensors **out, const void *bytes, size_t size,
                               const char *name) {
    *out = NULL;
    mn_safetensors *in = calloc(1, sizeof *in);
    if (!in) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", name);
    const mn_bytes all = {.bytes = bytes, .size = size};
    const mn_status st = fill(in, &all, name);
    if (st == MN_OK) {
        *out = in;
    } else {
        mn_safetensors_close(in);
    }
    return st;
}

void mn_safetensors_close(mn_safetensors *file) {
    if (!file) return;
    free(file->metadata);
    free(file->sorted);
    free(file->tensors);
    mn_json_free(&file->header);
    mn_file_unmap(&file->file);
    free(file->name);
    free(file);
}

int64_t mn_safetensors_count(const mn_safetensors *file) {
    return file->n_tensors;
}

const mn_stored_tensor *mn_safetensors_at(const mn_safetensors *file, int64_t i) {
    assert(i >= 0 && i < file->n_tensors);
    return &file->tensors[i];
}

const char *mn_safetensors_name(const mn_safetensors *file, int64_t i) {
    return mn_safetensors_at(file, i)->name;
}

const mn_stored_tensor *mn_safetensors_find(const mn_safetensors *file, const char *name) {
    const mn_stored_tensor wanted = {.name = name}, *key = &wanted;
    const mn_stored_tensor **found = bsearch(&key, file->sorted, (size_t)file->n_tensors,
                                             sizeof *file->sorted, compare_names);
    return found ? *found : NULL;
}

mn_status mn_safetensors_get(const mn_stored_tensor **out, const mn_safetensors *file,
                             const char *name) {
    *out = mn_safetensors_find(file, name);
    return *out ? MN_OK
                : mn_fail(MN_ERR_FORMAT, "%s: has no tensor \"%s\"", file->name, name);
}

int64_t mn_safetensors_metadata_count(const mn_safetensors *file) {
    return file->n_metadata;
}

mn_stored_text mn_safetensors_metadata_at(const mn_safetensors *file, int64_t i) {
    assert(i >= 0 && i < file->n_metadata);
    return file->metadata[i];
}

const char *mn_safetensors_metadata(const mn_safetensors *file, const char *key) {
    for (int64_t i = 0; i < file->n_metadata; i++) {
        if (strcmp(file->metadata[i].key, key) == 0) return file->metadata[i].value;
    }
    return NULL;
}
