/* dtype.c - names and sizes of element types. */
#include "base/dtype.h"

#include <string.h>

static const struct {
    const char *name;
    size_t bytes;
} dtypes[MN_DTYPE_COUNT] = {
#define DTYPE(id, name, bytes) [MN_##id] = { name, bytes },
#include "base/dtype.def"
#undef DTYPE
};

const char *mn_dtype_name(mn_dtype dtype) {
    return dtypes[dtype].name;
}

size_t mn_dtype_bytes(mn_dtype dtype) {
    return dtypes[dtype].bytes;
}

bool mn_dtype_parse(mn_dtype *out, const char *name) {
    for (int i = 0; i < MN_DTYPE_COUNT; i++) {
        if (strcmp(dtypes[i].name, name) == 0) {
            *out = (mn_dtype)i;
            return true;
        }
    }
    return false;
}
