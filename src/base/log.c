/* log.c - messages of the program: level, sentence, standard error. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

static mn_log_level threshold = MN_LOG_INFO;

void mn_log_set_level(mn_log_level level) {
    threshold = level;
}

void mn_log(mn_log_level level, const char *format, ...) {
    static const char *const prefix[] = { "error: ", "warning: ", "", "debug: " };
    if (level > threshold) return;
    va_list list;
    va_start(list, format);
    fprintf(stderr, "mneme: %s", prefix[level]);
    vfprintf(stderr, format, list);
    fputc('\n', stderr);
    va_end(list);
}
