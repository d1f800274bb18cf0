/* values.h - the tensors of a step, under numbers. Private to src/tape and src/decode.
 *
 * Whoever owns memory that a step works with declares it: the tape its results, parameters,
 * constants and ids, a layer's state its pieces, the session its logits. What an operation
 * accesses is then an interval of a declared tensor, looked up once, when it is asked for. Whether
 * operations, or stages of a megakernel, have to do with each other is a question of numbers and
 * intervals of one tensor; declared tensors have no byte in common. */
#ifndef MN_DECODE_VALUES_H
#define MN_DECODE_VALUES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mn_value_memory {
    const char *data;
    size_t bytes;
    int number;
} mn_value_memory;

/* In the order of their memory. All zeros: none. */
typedef struct mn_values {
    mn_value_memory *of;
    int64_t n, most;
    int last;               // number
} mn_values;

/* Bytes [begin, end) of declared tensor `value`; 0: of none. */
typedef struct mn_mem_range {
    int value;
    int64_t begin, end;
    bool writes;
} mn_mem_range;

static inline bool mn_ranges_meet(const mn_mem_range *a, const mn_mem_range *b) {
    return a->value == b->value && a->begin < b->end && b->begin < a->end;
}

/* Whether the memory is part of a declared tensor, or of none: then it may be declared. False: of
 * several, or not whole of one. */
bool mn_values_fits(const mn_values *values, const void *data, size_t bytes);

/* Declares what fits and is part of no tensor yet; false when memory is out. */
bool mn_values_declare(mn_values *values, const void *data, size_t bytes);

/* The interval that the memory is; its value is 0 where it is not part of one tensor. */
mn_mem_range mn_values_range(const mn_values *values, const void *data, size_t bytes);

/* Calls `use` with the number of each tensor that has some of this memory, until it says true; then
 * true. */
bool mn_values_any(const mn_values *values, const void *data, size_t bytes,
                   bool (*use)(const void *context, int number), const void *context);

/* Tensors that have some of this memory are none any more. */
void mn_values_remove(mn_values *values, const void *data, size_t bytes);

/* Whether the interval begins with what lies at `data`. */
bool mn_values_begins(const mn_values *values, const mn_mem_range *range, const void *data);

void mn_values_forget(mn_values *values);    // all of them
void mn_values_free(mn_values *values);

#endif
