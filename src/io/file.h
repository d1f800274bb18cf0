/* file.h - whole files in, whole files out.
 *
 * Reading maps; writing goes through a temporary file in the same folder, so a reader sees the
 * old file or the new one and never a part. Messages start with the path as the caller gave it. */
#ifndef MN_IO_FILE_H
#define MN_IO_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "mneme.h"

/* A file's bytes, read-only until unmapped. All zeros is "no file" and safe to unmap. */
typedef struct mn_file {
    const uint8_t *bytes;   // never NULL after success, even for an empty file
    size_t size;
} mn_file;

/* Maps the regular file at `path`.
 *
 * Folders, pipes and devices are refused. On failure `*out` is all zeros. Another program that
 * shortens the file while it is mapped makes later reads trap: replace files, don't rewrite them
 * (mn_file_write_atomic replaces). */
mn_status mn_file_map(mn_file *out, const char *path);

/* Gives the bytes back and zeroes `file`. NULL and all zeros are fine. */
void mn_file_unmap(mn_file *file);

/* The file being written, handed to a writer callback. */
typedef struct mn_sink mn_sink;

/* Appends bytes. A failure is kept: once a put fails, so does the whole write. */
mn_status mn_sink_put(mn_sink *sink, const void *bytes, size_t size);

/* Writes the content by calling mn_sink_put; `context` is the caller's own. */
typedef mn_status (*mn_file_writer)(mn_sink *sink, void *context);

/* Replaces or creates the file at `path` with what `writer` puts.
 *
 * On success the content has reached the disk under that name. On failure (full disk, writer
 * error) the file that was there is untouched and the temporary is gone; only when the last step
 * fails, the sync of the folder, is the new file already in place and may not survive a power
 * cut. A symbolic link stays: what it points to is replaced. An existing file keeps its
 * permissions; anything that exists and is not a regular file is refused. */
mn_status mn_file_write_atomic(const char *path, mn_file_writer writer, void *context);

/* The same for content already in memory. */
mn_status mn_file_write_bytes(const char *path, const void *bytes, size_t size);

#endif
