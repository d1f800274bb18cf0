/* folder.c - a fresh folder for a group of tests, and checks on files and messages. */
#define _XOPEN_SOURCE 700
#include "support/folder.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/file.h"

static char folder[] = "/tmp/mneme-test-XXXXXX";

const char *in_folder(const char *name) {
    static char paths[4][512];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

void assert_message_holds(const char *piece) {
    if (strstr(mn_last_error(), piece)) return;
    fail_msg("message \"%s\" lacks \"%s\"", mn_last_error(), piece);
}

void write_file(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

void assert_file_is(const char *path, const void *bytes, size_t size) {
    mn_file file;
    assert_int_equal(mn_file_map(&file, path), MN_OK);
    assert_int_equal(file.size, size);
    if (size > 0) assert_memory_equal(file.bytes, bytes, size);
    mn_file_unmap(&file);
}

int64_t files_in_folder(void) {
    DIR *open_folder = opendir(folder);
    assert_non_null(open_folder);
    int64_t n = 0;
    for (struct dirent *entry; (entry = readdir(open_folder));) n += entry->d_name[0] != '.';
    closedir(open_folder);
    return n;
}

int make_folder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

int remove_folder(void **state) {
    (void)state;
    DIR *open_folder = opendir(folder);
    if (!open_folder) return -1;
    for (struct dirent *entry; (entry = readdir(open_folder));) {
        if (entry->d_name[0] != '.') remove(in_folder(entry->d_name));
    }
    closedir(open_folder);
    return rmdir(folder);                               // fails if a test left something hidden
}
