/* values.c - the tensors of a step, under numbers. */
#include "decode/values.h"

#include <stdlib.h>
#include <string.h>

#include "base/util.h"

/* The first that begins behind `data`. */
static int64_t behind(const mn_values *values, const char *data) {
    int64_t low = 0, high = values->n;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if ((uintptr_t)values->of[middle].data <= (uintptr_t)data) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The one that `data` is in; NULL: none. */
static const mn_value_memory *holder(const mn_values *values, const char *data) {
    const int64_t i = behind(values, data) - 1;
    if (i < 0) return NULL;
    const mn_value_memory *of = &values->of[i];
    return (uintptr_t)data - (uintptr_t)of->data < of->bytes ? of : NULL;
}

mn_mem_range mn_values_range(const mn_values *values, const void *data, size_t bytes) {
    const mn_value_memory *of = holder(values, data);
    mn_mem_range range = { 0 };
    if (!of) return range;
    const size_t at = (size_t)((const char *)data - of->data);
    if (bytes > of->bytes - at) return range;
    range.value = of->number;
    range.begin = (int64_t)at;
    range.end = (int64_t)(at + bytes);
    return range;
}

bool mn_values_fits(const mn_values *values, const void *data, size_t bytes) {
    if (holder(values, data)) return mn_values_range(values, data, bytes).value != 0;
    const int64_t i = behind(values, data);
    return i == values->n || (uintptr_t)values->of[i].data - (uintptr_t)data >= bytes;
}

bool mn_values_declare(mn_values *values, const void *data, size_t bytes) {
    if (holder(values, data)) return true;
    if (values->n == values->most) {
        const int64_t most = mn_max(2 * values->most, 256);
        mn_value_memory *more = realloc(values->of, (size_t)most * sizeof *more);
        if (!more) return false;
        values->of = more;
        values->most = most;
    }
    const int64_t at = behind(values, data);
    memmove(&values->of[at + 1], &values->of[at], (size_t)(values->n - at) * sizeof *values->of);
    values->of[at] = (mn_value_memory){ data, bytes, ++values->last };
    values->n++;
    return true;
}

static bool has_some(const mn_value_memory *of, const void *data, size_t bytes) {
    const uintptr_t begin = (uintptr_t)of->data, from = (uintptr_t)data;
    return begin < from + bytes && from < begin + of->bytes;
}

bool mn_values_any(const mn_values *values, const void *data, size_t bytes,
                   bool (*use)(const void *context, int number), const void *context) {
    for (int64_t i = 0; i < values->n; i++) {
        const mn_value_memory *of = &values->of[i];
        if (has_some(of, data, bytes) && use(context, of->number)) return true;
    }
    return false;
}

void mn_values_remove(mn_values *values, const void *data, size_t bytes) {
    int64_t n = 0;
    for (int64_t i = 0; i < values->n; i++) {
        const mn_value_memory *of = &values->of[i];
        if (has_some(of, data, bytes)) continue;
        values->of[n++] = *of;
    }
    values->n = n;
}

bool mn_values_begins(const mn_values *values, const mn_mem_range *range, const void *data) {
    const mn_mem_range at = mn_values_range(values, data, 1);
    return at.value != 0 && at.value == range->value && at.begin == range->begin;
}

void mn_values_forget(mn_values *values) {
    values->n = 0;
    values->last = 0;
}

void mn_values_free(mn_values *values) {
    free(values->of);
    *values = (mn_values){ 0 };
}
