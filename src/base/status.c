/* status.c - failure as a value: a status and one sentence per thread. */
#include "base/status.h"
#undef mn_fail

#include <stdarg.h>
#include <stdio.h>

#include "base/util.h"

static _Thread_local char last_error[1024];

static const char *const status_names[MN_STATUS_COUNT] = {
#define STATUS(id, name) [MN_##id] = name,
#include "base/status.def"
#undef STATUS
};

mn_status mn_fail(mn_status status, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(last_error, sizeof last_error, format, list);
    va_end(list);
    return status;
}

const char *mn_version(void) {
    return MN_VERSION;
}

const char *mn_status_name(mn_status status) {
    const bool known = (int)status >= 0 && (int)status < MN_STATUS_COUNT;
    return known ? status_names[status] : "unknown status";
}

const char *mn_last_error(void) {
    return last_error;
}
