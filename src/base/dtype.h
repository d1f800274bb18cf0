/* dtype.h - names and sizes of element types. */
#ifndef MN_BASE_DTYPE_H
#define MN_BASE_DTYPE_H

#include "mneme.h"

const char *mn_dtype_name(mn_dtype dtype);
size_t mn_dtype_bytes(mn_dtype dtype);

/* Sets *out from a name such as "f32"; false if there is no such type. */
bool mn_dtype_parse(mn_dtype *out, const char *name);

#endif
