/* event_file.c - TensorBoard's event files: protocol buffers in TFRecord frames.
 *
 *   record  = length (u64), masked CRC-32C of the length, message, masked CRC-32C of the message
 *   Event   = 1: wall_time (double), 2: step (varint), 3: file_version (text), 5: Summary,
 *             7: SessionLog { 1: status, START = 1 }
 *   Summary = 1: Value { 1: tag (text), 2: simple_value (float) }, repeated
 *
 * All numbers are little-endian. A field starts with the varint (number << 3 | wire type). */
#define _XOPEN_SOURCE 700       // gethostname, clock_gettime under -std=c11
#include "train/run/event_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/status.h"
#include "io/crc32c.h"

struct mn_event_file {
    int fd;
    char *path;
};

/* ---- bytes ----------------------------------------------------------------------------------- */

/* A message being built. `full` is kept once memory ran out. */
typedef struct message {
    uint8_t *bytes;
    size_t n, room;
    bool full;
} message;

static void put(message *m, const void *bytes, size_t n) {
    size_t room = m->room;
    if (!mn_add_size(&room, m->n, n) || !mn_mul_size(&room, room, 2)) m->full = true;
    if (!m->full && n > m->room - m->n) {
        uint8_t *grown = realloc(m->bytes, room);
        if (grown) {
            m->bytes = grown;
            m->room = room;
        } else {
            m->full = true;
        }
    }
    if (m->full || n == 0) return;
    memcpy(m->bytes + m->n, bytes, n);
    m->n += n;
}

static void put_little(message *m, uint64_t value, int n_bytes) {
    for (int i = 0; i < n_bytes; i++) {
        const uint8_t byte = (uint8_t)(value >> 8 * i);
        put(m, &byte, 1);
    }
}

static void put_varint(message *m, uint64_t value) {
    for (; value >= 0x80; value >>= 7) put_little(m, (value & 0x7F) | 0x80, 1);
    put_little(m, value, 1);
}

/* ---- fields ---------------------------------------------------------------------------------- */

enum { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };
enum { EVENT_WALL_TIME = 1, EVENT_STEP, EVENT_FILE_VERSION, EVENT_SUMMARY = 5, EVENT_SESSION = 7 };
enum { SUMMARY_VALUE = 1, VALUE_TAG = 1, VALUE_SIMPLE = 2, SESSION_STATUS = 1, SESSION_START = 1 };

static void put_key(message *m, int field, int wire) {
    put_varint(m, (uint64_t)field << 3 | (uint64_t)wire);
}

static void put_field_int(message *m, int field, int64_t value) {
    put_key(m, field, WIRE_VARINT);
    put_varint(m, (uint64_t)value);
}

static void put_field_double(message *m, int field, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_key(m, field, WIRE_64);
    put_little(m, bits, 8);
}

static void put_field_float(message *m, int field, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_key(m, field, WIRE_32);
    put_little(m, bits, 4);
}

static void put_field_bytes(message *m, int field, const void *bytes, size_t n) {
    put_key(m, field, WIRE_BYTES);
    put_varint(m, n);
    put(m, bytes, n);
}

/* Puts `part` as a field and frees it. */
static void put_field_message(message *m, int field, message *part) {
    put_field_bytes(m, field, part->bytes, part->n);
    m->full = m->full || part->full;
    free(part->bytes);
}

static message new_event(int64_t step) {
    message event = { 0 };
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    put_field_double(&event, EVENT_WALL_TIME, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
    if (step != 0) put_field_int(&event, EVENT_STEP, step);    // 0 is what an absent field means
    return event;
}

/* ---- records --------------------------------------------------------------------------------- */

static mn_status write_all(mn_event_file *file, const uint8_t *bytes, size_t size) {
    while (size > 0) {
        const ssize_t n = write(file->fd, bytes, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            return mn_fail(MN_ERR_IO, "%s: cannot write: %s", file->path, strerror(errno));
        }
        bytes += n;
        size -= (size_t)n;
    }
    return MN_OK;
}

/* Frames the event, writes it in one piece and frees it. */
static mn_status write_event(mn_event_file *file, message *event) {
    message record = { 0 };
    put_little(&record, event->n, 8);
    put_little(&record, record.full ? 0 : mn_crc32c_masked(record.bytes, record.n), 4);
    put(&record, event->bytes, event->n);
    put_little(&record, mn_crc32c_masked(event->bytes, event->n), 4);
    const mn_status st = event->full || record.full
                             ? mn_fail(MN_ERR_MEMORY, "%s: no memory for a record", file->path)
                             : write_all(file, record.bytes, record.n);
    free(record.bytes);
    free(event->bytes);
    return st;
}

static mn_status write_opening(mn_event_file *file, int64_t resumed_step) {
    static const char version[] = "brain.Event:2";
    message event = new_event(0);
    put_field_bytes(&event, EVENT_FILE_VERSION, version, sizeof version - 1);
    const mn_status st = write_event(file, &event);
    if (st != MN_OK || resumed_step < 0) return st;
    event = new_event(resumed_step + 1);           // from here on other files are out of date
    message session = { 0 };
    put_field_int(&session, SESSION_STATUS, SESSION_START);
    put_field_message(&event, EVENT_SESSION, &session);
    return write_event(file, &event);
}

/* ---- public ---------------------------------------------------------------------------------- */

/* Opens the first free name. */
static mn_status open_new(mn_event_file *file, const char *folder) {
    enum { ATTEMPTS = 1000, NAME_ROOM = 400 };
    char host[256] = "";
    if (gethostname(host, sizeof host - 1) != 0 || !host[0]) strcpy(host, "localhost");
    size_t room;
    if (!mn_add_size(&room, strlen(folder), NAME_ROOM) || !(file->path = malloc(room))) {
        return mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    }
    const int64_t now = (int64_t)time(NULL);
    for (int i = 0; i < ATTEMPTS; i++) {
        char suffix[16] = "";
        if (i > 0) snprintf(suffix, sizeof suffix, ".%d", i);
        snprintf(file->path, room, "%s/events.out.tfevents.%010" PRId64 ".%s%s", folder, now, host,
                 suffix);
        file->fd = open(file->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
        if (file->fd >= 0) return MN_OK;
        if (errno != EEXIST) break;
    }
    return mn_fail(MN_ERR_IO, "%s: cannot make this file: %s", file->path, strerror(errno));
}

mn_status mn_event_file_create(mn_event_file **out, const char *folder, int64_t resumed_step) {
    *out = NULL;
    mn_event_file *file = calloc(1, sizeof *file);
    if (!file) return mn_fail(MN_ERR_MEMORY, "%s: out of memory", folder);
    file->fd = -1;
    mn_status st = open_new(file, folder);
    if (st == MN_OK) st = write_opening(file, resumed_step);
    if (st == MN_OK) {
        *out = file;
        return MN_OK;
    }
    if (file->fd >= 0) close(file->fd);
    free(file->path);
    free(file);
    return st;
}

mn_status mn_event_file_write(mn_event_file *file, int64_t step, const mn_run_value *values,
                              int64_t n_values) {
    message event = new_event(step), summary = { 0 };
    for (int64_t i = 0; i < n_values; i++) {
        message value = { 0 };
        put_field_bytes(&value, VALUE_TAG, values[i].name, strlen(values[i].name));
        put_field_float(&value, VALUE_SIMPLE, (float)values[i].value);
        put_field_message(&summary, SUMMARY_VALUE, &value);
    }
    put_field_message(&event, EVENT_SUMMARY, &summary);
    return write_event(file, &event);
}

const char *mn_event_file_path(const mn_event_file *file) {
    return file->path;
}

mn_status mn_event_file_close(mn_event_file *file) {
    if (!file) return MN_OK;
    mn_status st = MN_OK;
    if (close(file->fd) != 0) {
        st = mn_fail(MN_ERR_IO, "%s: cannot write: %s", file->path, strerror(errno));
    }
    free(file->path);
    free(file);
    return st;
}
