/* check.c - checks that count instead of stopping. */
#include "support/check.h"

#include <stdio.h>

enum { MOST_MESSAGES = 10 };

static int n_failed, n_said;

static void say(const char *format, va_list list) {
    char text[1024];
    vsnprintf(text, sizeof text, format, list);
    print_error("    %s\n", text);
}

bool check(bool holds, const char *format, ...) {
    if (holds) return true;
    n_failed++;
    if (n_said++ < MOST_MESSAGES) {
        va_list list;
        va_start(list, format);
        say(format, list);
        va_end(list);
    }
    return false;
}

void check_fatal(const char *format, ...) {
    va_list list;
    va_start(list, format);
    say(format, list);
    va_end(list);
    n_failed = n_said = 0;
    fail();
    __builtin_unreachable();
}

void check_done(void) {
    const int failed = n_failed;
    n_failed = n_said = 0;
    if (failed > 0) fail_msg("%d checks failed", failed);
}

int check_next(void) {
    n_said = 0;
    return n_failed;
}
