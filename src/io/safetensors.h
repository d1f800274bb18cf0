/* safetensors.h - named tensors in one file, as the Hugging Face world stores them.
 *
 *     u64 little-endian header length | header: JSON, blank-padded | tensor bytes
 *
 * The header maps names to {"dtype", "shape", "data_offsets": [begin, end)}, offsets counted from
 * the end of the header, and "__metadata__" to an object of strings. Files are read in place. A
 * file that opens is sound: known types, sizes that agree with shapes, and tensors that cover the
 * bytes exactly once. */
#ifndef MN_IO_SAFETENSORS_H
#define MN_IO_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "mneme.h"

enum {
    MN_STORED_MAX_RANK = 8,             // ours
    MN_STORED_MAX_HEADER = 100000000    // the format's, in bytes
};

/* Element types, from safetensors_dtype.def. */
typedef enum mn_stored_dtype {
#define STORED_DTYPE(id, name, bytes, kind, exponent, fraction) MN_STORED_##id,
#include "io/safetensors_dtype.def"
#undef STORED_DTYPE
    MN_STORED_COUNT
} mn_stored_dtype;

/* One tensor in a file, read or to be written. Row-major, little-endian.
 *
 * Data of a file that was read is borrowed from it and may lie at any alignment: use the
 * conversions below, memcpy, or check the address first. */
typedef struct mn_stored_tensor {
    const char *name;
    mn_stored_dtype dtype;
    int rank;
    int64_t shape[MN_STORED_MAX_RANK];
    const void *data;
    size_t bytes;
} mn_stored_tensor;

/* One entry of __metadata__. */
typedef struct mn_stored_text {
    const char *key, *value;
} mn_stored_text;

const char *mn_stored_dtype_name(mn_stored_dtype dtype);
size_t mn_stored_dtype_bytes(mn_stored_dtype dtype);

/* Elements of a tensor of this module: the product of its shape, 1 for rank 0. */
int64_t mn_stored_elements(const mn_stored_tensor *tensor);

/* A safetensors file, open for reading. Safe to read from many threads. */
typedef struct mn_safetensors mn_safetensors;

/* Maps and checks the file at `path`. On failure `*out` is NULL. */
mn_status mn_safetensors_open(mn_safetensors **out, const char *path);

/* The same for bytes in memory, which must outlive `*out`; `name` opens the messages. */
mn_status mn_safetensors_parse(mn_safetensors **out, const void *bytes, size_t size,
                               const char *name);

/* Ends every tensor, name and text taken from the file. NULL is fine. */
void mn_safetensors_close(mn_safetensors *file);

/* Tensors in the order of the header; `i` in [0, count). */
int64_t mn_safetensors_count(const mn_safetensors *file);
const mn_stored_tensor *mn_safetensors_at(const mn_safetensors *file, int64_t i);
const char *mn_safetensors_name(const mn_safetensors *file, int64_t i);

/* The tensor of that name. `find` returns NULL when there is none; `get` fails with a message
 * that names the file and the tensor. */
const mn_stored_tensor *mn_safetensors_find(const mn_safetensors *file, const char *name);
mn_status mn_safetensors_get(const mn_stored_tensor **out, const mn_safetensors *file,
                             const char *name);

/* Metadata in the order of the header; the value of `key`, or NULL. */
int64_t mn_safetensors_metadata_count(const mn_safetensors *file);
mn_stored_text mn_safetensors_metadata_at(const mn_safetensors *file, int64_t i);
const char *mn_safetensors_metadata(const mn_safetensors *file, const char *key);

/* Convert all elements of a tensor into `out`, which holds mn_stored_elements of them.
 *
 * Every real type converts; equal types keep their bits, NaN payloads included. Into f32, values
 * are rounded to nearest and those out of its range become infinite. Complex types fail. */
mn_status mn_safetensors_read_f64(double *out, const mn_stored_tensor *tensor);
mn_status mn_safetensors_read_f32(float *out, const mn_stored_tensor *tensor);

/* Writes a file (see mn_file_write_atomic) whose header lists tensors and metadata as given.
 *
 * The same arguments give the same bytes. The data goes from wide to narrow types, in the given
 * order within a width, so that every tensor is aligned to its element. Readers of transformers
 * want the metadata entry {"format", "pt"}. */
mn_status mn_safetensors_write(const char *path, const mn_stored_tensor *tensors,
                               int64_t n_tensors, const mn_stored_text *metadata,
                               int64_t n_metadata);

/* Gives the bytes of tensor `i`, valid until the next call. */
typedef mn_status (*mn_stored_source)(const void **data, void *context, int64_t i);

/* The same with one tensor in memory at a time: `data` of the tensors is not read, `source` is
 * asked for each once, in the order of the file. */
mn_status mn_safetensors_write_from(const char *path, const mn_stored_tensor *tensors,
                                    int64_t n_tensors, const mn_stored_text *metadata,
                                    int64_t n_metadata, mn_stored_source source, void *context);

/* Numbers of one real type as another, rounded to nearest. `*lost` counts those that are finite in
 * `from` and not in `to`; equal types are copied. */
mn_status mn_stored_convert(void *out, mn_stored_dtype to, const void *in, mn_stored_dtype from,
                            int64_t count, int64_t *lost);

#endif
