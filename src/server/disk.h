/* disk.h - a folder with files of states that outlive the server. Their names say what they are,
 * which weights they belong to, and how those were computed with where that matters; files of
 * others are left alone. */
#ifndef MN_SERVER_DISK_H
#define MN_SERVER_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io/folder.h"

enum { MN_DISK_ID = 33 };    // 32 hexadecimal digits and a zero byte

typedef struct mn_disk {
    const char *folder;      // borrowed; NULL: there is none
    char begin[64];          // of the names of files
} mn_disk;

/* `kind` is a word. The mark is of mn_disk_mark. Fails where nothing can be written. */
mn_status mn_disk_open(mn_disk *out, const char *folder, const char *kind, uint64_t mark);

/* Mixes the files of a model into `*mark`: its weights, configuration and tokenizer, whatever their
 * dates; or this program itself. */
mn_status mn_disk_mark_model(uint64_t *mark, const char *folder);
mn_status mn_disk_mark_program(uint64_t *mark);
void mn_disk_mark_text(uint64_t *mark, const char *text);

/* A name that nothing has. */
mn_status mn_disk_new_id(char id[MN_DISK_ID]);

/* The path of a file; false: it is too long. */
bool mn_disk_path(char path[MN_FOLDER_PATH], const mn_disk *disk, const char *id);

/* Calls `found` for every file that is there, those written longest ago first. */
typedef void (*mn_disk_found)(void *context, const char *id, const char *path);
mn_status mn_disk_each(const mn_disk *disk, mn_disk_found found, void *context);

#endif
