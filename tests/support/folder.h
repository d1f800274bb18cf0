/* folder.h - a fresh folder for a group of tests, and checks on files and messages. */
#ifndef MN_TESTS_FOLDER_H
#define MN_TESTS_FOLDER_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* Group set-up and tear-down; the latter fails when a test left something hidden behind. */
int make_folder(void **state);
int remove_folder(void **state);

/* The path of `name` in the folder, "" for the folder itself; valid until the fourth next call. */
const char *in_folder(const char *name);
int64_t files_in_folder(void);

void write_file(const char *path, const void *bytes, size_t size);
void assert_file_is(const char *path, const void *bytes, size_t size);
void assert_message_holds(const char *piece);

/* The call failed so, and its message holds each of the two pieces. */
#define assert_fails(call, wanted, piece1, piece2)                                                 \
    do {                                                                                           \
        assert_int_equal(call, wanted);                                                            \
        assert_message_holds(piece1);                                                              \
        assert_message_holds(piece2);                                                              \
    } while (0)

#endif
