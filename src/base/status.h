/* status.h - failure as a value: a status and one sentence per thread. */
#ifndef MN_BASE_STATUS_H
#define MN_BASE_STATUS_H

#include "mneme.h"

/* Sets this thread's message from a printf format and returns `status`, so that a failing function
 * ends with `return mn_fail(...)`. The message names the thing and, where there is one, the remedy.
 */
mn_status mn_fail(mn_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#ifdef __clang_analyzer__    // which cannot see that the status comes back
#define mn_fail(status, ...) (status)
#endif

#endif
