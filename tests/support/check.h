/* check.h - checks that count instead of stopping, so that one run shows every failing case.
 *
 * A test calls CHECK as often as it likes and ends in check_done(), which fails it if any did. */
#ifndef TESTS_SUPPORT_CHECK_H
#define TESTS_SUPPORT_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* Prints the message and counts a failure unless `holds`; prints no more after the tenth. Returns
 * `holds`. */
bool check(bool holds, const char *format, ...) __attribute__((format(printf, 2, 3)));
#define CHECK(holds, ...) check((holds), __VA_ARGS__)

/* Fails the running test at once. */
void check_fatal(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* Fails the running test if a check of it failed, and forgets. */
void check_done(void);

/* Between cases of one test: how many checks have failed so far; messages begin again. */
int check_next(void);

#endif
